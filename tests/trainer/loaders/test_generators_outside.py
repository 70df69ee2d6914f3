"""Samplers and iterables whose generators and counts are no attributes of theirs: exact, or refused by name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harm.basics import LENGTH, Indices, loader
from harm.laws import resumed, uninterrupted
from harm.runs import Trial, train
from harm.table import Entry, of
from torch.utils.data import Sampler

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


def over_its_dataset(workers: int) -> Any:
    data = Draws()
    return loader(workers, dataset=data, sampler=OfDataset(data))


@pytest.mark.parametrize(
    "make",
    [of(OfModule), of(OfClass), of(InDict), of(OfDefault), of(of_closure), over_its_dataset],
    ids=["module", "class", "dict", "default argument", "closure", "dataset"],
)
def test_a_sampler_that_draws_from_a_generator_elsewhere_resumes_exactly(
    tmp_path: Path, make: Callable[[int], Any]
) -> None:
    entry = Entry(make, "distinct")
    plain, own = (train(entry, own=with_callback, workers=0) for with_callback in (False, True))
    assert uninterrupted(entry, [Trial(plain, own)], None) == ("same", "")
    for stop in (1, 6, 8):
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
        (counts_by_iterator, r"yields something else whenever a copy"),
    ],
)
def test_a_sampler_that_counts_in_variables_of_a_function_is_refused_by_name(
    make: Callable[[], Sampler[int]], said: str
) -> None:
    with pytest.raises(UnsupportedLoaderError, match=said):
        _ = WrappedSampler(make()).facts
