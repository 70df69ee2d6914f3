"""Samplers and iterables whose generators and counts are no attributes of theirs: exact, or refused by name."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harm.basics import LENGTH, Indices, loader, permutation
from harm.laws import resumed, uninterrupted
from harm.runs import Trial, train
from harm.table import Entry, of
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

RNG = np.random.default_rng(0)
HELD = {"rng": random.Random(0)}


class Drawn(Sampler[int]):
    """Every sample once, in an order that a generator draws which it does not hold."""

    def __init__(self, dataset: Any = None) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return LENGTH


class OfModule(Drawn):
    def __iter__(self) -> Iterator[int]:
        return iter(RNG.permutation(LENGTH).tolist())


class OfClass(Drawn):
    rng = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH, generator=self.rng).tolist())


class InDict(Drawn):
    """Draws one sample at a time, while batches are read."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(HELD["rng"].randrange(len(left)))


class OfDefault(Drawn):
    def __iter__(self, rng: Any = np.random.RandomState(0)) -> Iterator[int]:  # noqa: B008  # as users write it
        return iter(rng.permutation(LENGTH).tolist())


class OfDataset(Drawn):
    """Draws one sample at a time from the generator that its dataset draws from, too."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(self.dataset.rng.integers(len(left)))


class ByMethod(Drawn):
    """Holds a method of its dataset's generator."""

    def __init__(self, dataset: Any) -> None:
        self.draw = dataset.rng.permutation

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(LENGTH).tolist())


def permuted(rng: Any, length: int) -> Any:
    return rng.permutation(length)


def sampled(length: int, *, rng: random.Random) -> Any:
    return rng.sample(range(length), length)


class Bound:
    """Has its generator in a partial."""

    def __init__(self) -> None:
        self.draw = functools.partial(permuted, np.random.default_rng(2))

    def __call__(self, length: int) -> Any:
        return self.draw(length)


class ByPartial(Drawn):
    """Holds its generator in a partial: at first, in a bound method of an object in another one, by a keyword."""

    draws: Any

    def __init__(self, dataset: Any = None) -> None:
        first = functools.partial(permuted, np.random.default_rng(2))
        second = functools.partial(Bound().__call__)
        third = functools.partial(sampled, rng=random.Random(2))
        self.draws = [first, second, third]

    def __iter__(self) -> Iterator[int]:
        order = np.arange(LENGTH)
        for draw in self.draws:
            order = order[draw(LENGTH)]
        return iter(order.tolist())


class PartialOfClass(Drawn):
    """Its class has a partial with a generator, and one that becomes a method."""

    first = functools.partial(permuted, np.random.default_rng(2))
    second = functools.partialmethod(lambda self, rng, length: rng.permutation(length), np.random.RandomState(2))

    def __iter__(self) -> Iterator[int]:
        return iter(type(self).first(LENGTH)[self.second(LENGTH)].tolist())


def of_closure() -> Drawn:
    rng = np.random.default_rng(0)

    class OfClosure(Drawn):
        def __iter__(self) -> Iterator[int]:
            return iter(rng.permutation(LENGTH).tolist())

    return OfClosure()


class Draws(Indices):
    """Draws from a generator of its own when a sample is read."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.rng.random()
        return super().__getitem__(index)


def over_its_dataset(kind: type[Drawn]) -> Callable[[int], Any]:
    def make(workers: int) -> Any:
        data = Draws()
        return loader(workers, dataset=data, sampler=kind(data))

    return make


@pytest.mark.parametrize(
    "make",
    [
        *map(of, (OfModule, OfClass, InDict, OfDefault, of_closure, ByPartial, PartialOfClass)),
        *map(over_its_dataset, (OfDataset, ByMethod)),
    ],
    ids=["module", "class", "dict", "default argument", "closure", "partial", "partial of class", "dataset", "method"],
)
def test_a_sampler_that_draws_from_a_generator_elsewhere_resumes_exactly(
    tmp_path: Path, make: Callable[[int], Any]
) -> None:
    entry = Entry(make, "distinct")
    plain, own = (train(entry, own=with_callback, workers=0) for with_callback in (False, True))
    assert uninterrupted(entry, [Trial(plain, own)], None) == ("same", "")
    for stop in (6, 8):
        saved = train(entry, workers=0, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, workers=0, ckpt_path=tmp_path / "stop.ckpt")
        assert resumed([saved], [again]) == ("exact", "")
        assert own.trained == saved.trained


def test_a_trial_leaves_generators_elsewhere_where_they_are() -> None:
    before = RNG.bit_generator.state
    order = WrappedSampler(OfModule())
    drawn = [batch for _, batch in order.plan(0, 1).batches(0)]
    assert RNG.bit_generator.state == before
    assert drawn == [batch for _, batch in order.plan(0, 1).batches(0)]


# Counts


def counts_in_closure() -> Sampler[int]:
    passes = [0]

    class Counts(Drawn):
        def __iter__(self) -> Iterator[int]:
            passes[0] += 1
            return iter([index * (1, 5, 7, 11)[passes[0] % 4] % LENGTH for index in range(LENGTH)])

    return Counts()


def counts_in_variable() -> Sampler[int]:
    passes = 0

    class Counts(Drawn):
        def __iter__(self) -> Iterator[int]:
            nonlocal passes
            passes += 1
            return iter([index * (1, 5, 7, 11)[passes % 4] % LENGTH for index in range(LENGTH)])

    return Counts()


def counts_in_default() -> Sampler[int]:
    class Counts(Drawn):
        def __iter__(self, passes: list[int] = [0]) -> Iterator[int]:  # noqa: B006  # as users write it
            passes[0] += 1
            return iter([index * (1, 5, 7, 11)[passes[0] % 4] % LENGTH for index in range(LENGTH)])

    return Counts()


def counts_in_nested_dict() -> Sampler[int]:
    state = {"passes": {"number": 0}}

    class Counts(Drawn):
        def __iter__(self) -> Iterator[int]:
            state["passes"]["number"] += 1
            return iter([index * (1, 5, 7, 11)[state["passes"]["number"] % 4] % LENGTH for index in range(LENGTH)])

    return Counts()


class Counter:
    """An object of a module that is called, and counts."""

    number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


COUNTER = Counter()


def counts_in_object() -> Sampler[int]:
    class Counts(Drawn):
        def __iter__(self) -> Iterator[int]:
            stride = (1, 5, 7, 11)[COUNTER() % 4]
            return iter([index * stride % LENGTH for index in range(LENGTH)])

    return Counts()


def embeds_in_train_mode() -> Sampler[int]:
    class Embeds(Drawn):
        network = torch.nn.Sequential(torch.nn.BatchNorm1d(1))

        def __iter__(self) -> Iterator[int]:
            self.network(torch.arange(float(LENGTH))[:, None])
            return iter(range(LENGTH))

    return Embeds()


def counts_by_function() -> Sampler[int]:
    network = torch.nn.Sequential()

    def count() -> None:
        network.passes = getattr(network, "passes", 0) + 1

    class Counts(Drawn):
        begin: Callable[[], None]

        def __iter__(self) -> Iterator[int]:
            self.begin()
            return iter(range(LENGTH))

    made = Counts()
    made.begin = count
    return made


def trains() -> Sampler[int]:
    class Trains(Drawn):
        layer = torch.nn.Linear(1, 1)

        def __iter__(self) -> Iterator[int]:
            with torch.no_grad():
                self.layer.weight += 1
            return iter(range(LENGTH))

    return Trains()


def counts_by_iterator() -> Sampler[int]:
    passes = itertools.count()

    class Counts(Drawn):
        def __iter__(self) -> Iterator[int]:
            stride = (1, 5, 7, 11)[next(passes) % 4]
            return iter([index * stride % LENGTH for index in range(LENGTH)])

    return Counts()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (counts_in_closure, r"changes `counts_in_closure\..*Counts\.__iter__\.passes` while it is iterated"),
        (counts_in_variable, r"changes `counts_in_variable\..*Counts\.__iter__\.passes` while it is iterated"),
        (counts_in_default, r"changes `counts_in_default\..*Counts\.__iter__\.passes` while it is iterated"),
        (counts_in_nested_dict, r"changes `counts_in_nested_dict\..*Counts\.__iter__\.state` while it is iterated"),
        (counts_in_object, r"changes `test_generators_outside\.COUNTER` while it is iterated"),
        (embeds_in_train_mode, r"changes `BatchNorm1d\.num_batches_tracked`, `BatchNorm1d\.running_mean`"),
        (counts_by_function, r"changes `Sequential\.passes` while it is iterated"),
        (trains, r"changes `Linear\.weight` while it is iterated"),
        (counts_by_iterator, r"yields something else whenever a copy"),
    ],
)
def test_a_sampler_that_changes_what_copies_share_with_it_is_refused_by_name(
    make: Callable[[], Sampler[int]], said: str
) -> None:
    with pytest.raises(UnsupportedLoaderError, match=said):
        _ = WrappedSampler(make()).facts


# Iterable datasets


class Fresh(IterableDataset[int]):
    """Is made in a process as it is when its modules have just been imported."""

    def __init__(self) -> None:
        global RNG, PASSES
        RNG, PASSES, HELD["rng"] = np.random.default_rng(0), 0, random.Random(0)


class OrderOfModule(Fresh):
    def __iter__(self) -> Iterator[int]:
        return iter(RNG.permutation(LENGTH).tolist())


class LazilyOfDict(Fresh):
    """Draws one sample at a time: the order of a pass depends on all of those before."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(HELD["rng"].randrange(len(left)))


class CountsAtEnd(Fresh):
    """Counts in a variable of its module, when it has given its last sample."""

    def __iter__(self) -> Iterator[int]:
        global PASSES
        yield from permutation(PASSES)
        PASSES += 1


class Pipe(IterableDataset[int]):
    """Samples that go through functions, one after the other."""

    def __init__(self, *stages: Callable[[Iterator[int]], Iterator[int]]) -> None:
        self.stages = stages

    def __iter__(self) -> Iterator[int]:
        samples = iter(range(LENGTH))
        for stage in self.stages:
            samples = stage(samples)
        return samples


def shuffled() -> Callable[[Iterator[int]], Iterator[int]]:
    rng = random.Random(3)

    def stage(samples: Iterator[int]) -> Iterator[int]:
        drawn = list(samples)
        rng.shuffle(drawn)
        yield from drawn

    return stage


def rotated() -> Callable[[Iterator[int]], Iterator[int]]:
    passes = 0

    def stage(samples: Iterator[int]) -> Iterator[int]:
        nonlocal passes
        passes += 1
        return ((sample + passes) % LENGTH for sample in samples)

    return stage


def by_iterator() -> Callable[[Iterator[int]], Iterator[int]]:
    passes = itertools.count()
    return lambda samples: (lambda passed: ((sample + passed) % LENGTH for sample in samples))(next(passes))


def dataset_of_default() -> IterableDataset[int]:
    class OrderOfDefault(IterableDataset[int]):
        def __iter__(self, rng: Any = np.random.default_rng(0)) -> Iterator[int]:  # noqa: B008  # as users write it
            return iter(rng.permutation(LENGTH).tolist())

    return OrderOfDefault()


PASSES = 0
ITERABLES: dict[str, Callable[[], IterableDataset[int]]] = {
    "module": OrderOfModule,
    "drawn lazily": LazilyOfDict,
    "counts at the end": CountsAtEnd,
    "default argument": dataset_of_default,
    "stages": lambda: Pipe(shuffled(), rotated()),
    "iterator": lambda: Pipe(by_iterator()),
}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in ITERABLES), ("stages", 2), ("drawn lazily", 2)])
def test_an_iterable_that_goes_on_from_values_elsewhere_resumes_exactly(
    tmp_path: Path, kind: str, workers: int
) -> None:
    lives = {"persistent_workers": True} if workers else {}
    entry = Entry(lambda count: loader(count, dataset=ITERABLES[kind](), **lives), "equal")
    plain, own = (train(entry, own=with_callback, workers=workers) for with_callback in (False, True))
    assert uninterrupted(entry, [Trial(plain, own)], None) == ("same", "")
    for stop in (1, 6, 8) if not workers else (15,):
        saved = train(entry, workers=workers, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, workers=workers, ckpt_path=tmp_path / "stop.ckpt")
        assert resumed([saved], [again]) == ("exact", ""), stop


class GoesOn(Fresh):
    """As it is made anew in a process in which others have gone on."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(RNG.permutation(LENGTH).tolist())


def test_values_elsewhere_that_a_new_dataset_finds_moved_are_named_at_the_resume(tmp_path: Path) -> None:
    entry = Entry(lambda count: loader(count, dataset=GoesOn()), "equal")
    OrderOfModule()  # puts the module's generator to its beginning
    saved = train(entry, workers=0, save=tmp_path / "stop.ckpt", after=6)
    again = train(entry, workers=0, ckpt_path=tmp_path / "stop.ckpt")
    outcome, why = resumed([saved], [again])
    assert outcome == "warned", why
    assert any("GoesOn" in text and "RNG in a pass" in text for text in again.said), again.said


def test_a_dataset_is_let_go_of_when_its_loader_is() -> None:
    class Closed(IterableDataset[int]):
        def __init__(self) -> None:
            self.draw = lambda: iter(range(len(vars(self))))

        def __iter__(self) -> Iterator[int]:
            return self.draw()

    patched = patch_dataloader(DataLoader(Closed(), batch_size=2))
    list(patched)
    held = weakref.ref(patched.dataset)
    del patched
    gc.collect()
    assert held() is None
