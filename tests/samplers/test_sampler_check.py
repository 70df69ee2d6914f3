"""A copy of a sampler is tried before training: what it yields, remembers and knows, or why it is refused."""

from __future__ import annotations

import itertools
import os
import random
import shelve
import time
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support import samplers as theirs
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.user_samplers import sampler_check, sampler_trial
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class OwnIterator(theirs.OwnState):
    """Is its own iterator, and begins anew at iter()."""

    def __iter__(self) -> Any:
        self.served = 0
        return self

    def __next__(self) -> int:
        if self.served == 9:
            raise StopIteration
        self.served += 1
        return self.served


class Counts(Sampler[int]):
    """Counts its passes, what it yields, and what it is asked, but yields the same."""

    def __init__(self, length: int, log: list[int] | None = None) -> None:
        self.length, self.times, self.log = length, 0, log

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        for index in range(self.length):
            if self.log is not None:
                self.log.append(index)
            yield index


class CountsForever(Counts):
    """Counts what it yields, and never ends."""

    def __iter__(self) -> Iterator[int]:
        for index in itertools.cycle(range(self.length)):
            self.times += 1
            yield index


class Told(Sampler[int]):
    """Changes its list in place whenever it is told the epoch."""

    def __init__(self, change: Callable[[list[int], int], object]) -> None:
        self.order, self.change = list(range(30)), change

    def set_epoch(self, epoch: int) -> None:
        self.change(self.order, epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Half(Sampler[int]):
    """Draws half of the samples once, and keeps to them by a cache that none of its attributes shows."""

    @lru_cache  # noqa: B019  # as users write it
    def half(self) -> list[int]:
        return random.sample(range(30), 15)

    def __len__(self) -> int:
        return 15

    def __iter__(self) -> Iterator[int]:
        return iter(self.half())


def test_the_sampler_itself_is_not_iterated_and_a_copy_once() -> None:
    sampler = Counts(200, log=[])
    order = WrappedSampler(sampler)
    facts = order.facts

    assert (facts.first, facts.says, facts.length, facts.error) == (0, None, 200, "")
    assert facts.begins == digest(list(range(64)))
    assert order.facts is facts
    assert (sampler.times, sampler.log) == (0, [])


@pytest.mark.parametrize(
    ("make", "remembers", "is_harmless"),
    [
        (theirs.GlobalRandom, False, False),
        (theirs.ByTheClock, False, False),
        (theirs.ClassBalanced, False, False),
        (lambda: Counts(30), True, True),
        (lambda: Told(lambda order, _: order.sort()), False, False),
        (lambda: Told(lambda order, _: random.shuffle(order)), True, False),
        (lambda: Told(lambda order, epoch: epoch % 2 or order.reverse()), True, False),
        (lambda: CountsForever(30), True, True),
        (theirs.CountsEpochs, True, False),
        (theirs.ShufflesInPlace, True, False),
        (lambda: theirs.Proxy(theirs.CountsEpochs()), True, False),
        (lambda: theirs.KeepsItsPlace(9), True, False),
        (Half, True, False),
        (theirs.Fails, True, False),
        (lambda: iter(range(5)), True, False),
        (lambda: (n for n in range(3)), True, False),
    ],
)
def test_it_is_found_out_whether_what_comes_depends_on_earlier_passes(
    make: Callable[[], Any], remembers: bool, is_harmless: bool
) -> None:
    facts = WrappedSampler(make()).facts

    assert (facts.remembers, facts.is_harmless) == (remembers, is_harmless)


def test_what_cannot_be_tried_says_why_and_is_left_where_it_was() -> None:
    items = iter(range(5))

    assert WrappedSampler(items).facts.error.startswith("it holds an iterator, a file or")
    assert WrappedSampler(theirs.Fails()).facts.error == "it raised KeyError: 'theirs'"
    assert list(items) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("rank_2_of_4")
def test_whether_it_asks_torch_for_its_rank_is_noted() -> None:
    sampler = theirs.GlobalRandom()
    assert not WrappedSampler(sampler).facts.asks
    sampler.__class__ = type("Asks", (theirs.GlobalRandom,), {"__len__": lambda _: 12 * dist.get_world_size() - 26})
    assert WrappedSampler(sampler).facts.asks


def test_generators_of_the_process_are_left_alone() -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    assert WrappedSampler(theirs.BatchesWithoutLen(), batch_size=None).facts.length

    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_torchs_own_samplers_are_not_tried_but_a_users_within_them_is() -> None:
    assert WrappedSampler(BatchSampler(RandomSampler(range(9)), 2, False)).facts.length is None
    assert WrappedSampler(BatchSampler(theirs.CountsEpochs(), 2, False)).facts.remembers


def test_to_overfit_on_its_first_epoch_a_sampler_may_count_epochs() -> None:
    order = WrappedSampler(theirs.CountsEpochs()).adapted(shuffle=False)

    assert list(order.plan(2, 1).batches(0)) == list(order.plan(0, 1).batches(0))


@pytest.mark.parametrize(
    ("make", "yields", "says"),
    [(theirs.SaysTooMuch, "only 8", 9), (theirs.SaysTooLittle, "more than 7", 7)],
    ids=["too much", "too little"],
)
def test_a_sampler_with_a_wrong_length_is_refused_with_both_numbers(make: Any, yields: str, says: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"{make.__name__} yields {yields} items .* its len\(\) is {says}"):
        _ = WrappedSampler(make()).facts
    with pytest.raises(ConfigurationError, match=r"list yields only 6 items in epoch 0, but length=150 was given"):
        _ = WrappedSampler([*range(6)], length=150).facts


def test_a_sampler_whose_trial_changes_what_no_copy_has_is_refused(tmp_path: Path) -> None:
    class InDatabase(Sampler[int]):
        def __init__(self) -> None:
            self.passes = shelve.open(str(tmp_path / "passes"))  # noqa: SIM115  # for as long as it lives

        def __iter__(self) -> Iterator[int]:
            self.passes["number"] = self.passes.get("number", 0) + 1
            return iter(range(self.passes["number"], 9))

    class ByFunction(Sampler[int]):
        def __init__(self) -> None:
            passes = itertools.count()
            self.draw = lambda: iter(range(next(passes), 9))

        def __iter__(self) -> Iterator[int]:
            return self.draw()

    for make in (InDatabase, ByFunction):
        with pytest.raises(UnsupportedLoaderError, match=f"{make.__name__} yields something else whenever a copy"):
            _ = WrappedSampler(make()).facts


def test_one_that_begins_anew_for_every_batch_that_torch_cuts_is_refused_and_served_where_torch_cuts_none() -> None:
    with pytest.raises(UnsupportedLoaderError, match="OwnIterator returns itself from __iter__, and begins anew there"):
        _ = WrappedSampler(OwnIterator(), length="unknown", is_cut_by_torch=True).facts

    order = WrappedSampler(OwnIterator(), length="unknown", is_cut_by_torch=True, is_wrapped=True)
    assert [batch for _, batch in order.plan(0, 1).batches(0)] == [[number] for number in range(1, 10)]


LABELS: dict[int, int] = {}


def label_of(index: int) -> int:
    """The class of a sample, kept by its module once it was asked for."""
    return LABELS.setdefault(index, index * 7 % 11)


class Labelled(Dataset[int]):
    """Computes classes when they are asked for, and keeps them."""

    by_epoch: dict[int, list[int]]

    def __init__(self) -> None:
        self.found: list[int] | None = None
        self.by_epoch, self.passes, self.draws = {}, 0, random.Random(1)

    def __len__(self) -> int:
        return 24

    @cached_property
    def labels(self) -> list[int]:
        return [index * 7 % 11 for index in range(24)]

    def labels_found(self) -> list[int]:
        if self.found is None:
            self.found = [index * 7 % 11 for index in range(24)]
        return self.found

    def order_of(self, epoch: int) -> list[int]:
        if epoch not in self.by_epoch:
            self.by_epoch[epoch] = random.Random(epoch).sample(range(24), 24)
        return self.by_epoch[epoch]

    def first_order(self) -> list[int]:
        self.found = self.found or random.Random(self.passes).sample(range(24), 24)
        return self.found

    def next_order(self) -> list[int]:
        self.passes += 1
        return random.Random(self.passes).sample(range(24), 24)

    def order_once_warm(self) -> list[int]:
        was_warm, self.passes = self.passes > 0, 1
        return list(range(24)) if was_warm else list(range(23, -1, -1))

    def order_after_two(self) -> list[int]:
        self.passes = min(self.passes + 1, 2)
        return list(range(24)) if self.passes < 2 else list(range(23, -1, -1))


class ByClass(Sampler[int]):
    """Goes through samples sorted by what its dataset says of them, another way in each of its passes."""

    def __init__(self, dataset: Labelled, key: Callable[[Labelled, int], list[int]]) -> None:
        self.dataset, self.key, self.passes = dataset, key, 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        keys = self.key(self.dataset, self.passes)
        self.passes += 1
        drawn = random.Random(self.passes).sample(range(24), 24)
        return iter(sorted(drawn, key=lambda index: keys[index]))


@pytest.mark.parametrize(
    "key",
    [
        lambda data, _: data.labels,
        lambda data, _: data.labels_found(),
        lambda data, epoch: data.order_of(epoch),
        lambda data, _: data.first_order(),
        lambda *_: [label_of(index) for index in range(24)],
    ],
    ids=["cached_property", "attribute", "by epoch", "drawn once", "dict of the module"],
)
def test_a_cache_that_a_pass_fills_in_the_dataset_or_its_module_is_let_through_if_the_same_comes_with_it(
    key: Callable[[Labelled, int], list[int]],
) -> None:
    LABELS.clear()
    alone, data = ByClass(Labelled(), key), Labelled()
    order = WrappedSampler(ByClass(data, key), dataset=data)

    assert order.facts.error == ""
    for epoch in range(4):
        assert [batch for _, (batch,) in order.plan(epoch, 1).batches(0)] == list(alone), epoch


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (lambda data, _: data.next_order(), "then yields something else"),
        (lambda data, _: data.order_once_warm(), "then yields something else"),
        (lambda data, _: data.order_after_two(), "then yields something else"),
        (lambda data, _: data.next_order() and [0] * 24, "a second pass changes it again"),
    ],
    ids=["counts", "yields otherwise", "yields otherwise later", "counts for nothing"],
)
def test_what_a_pass_changes_in_its_dataset_is_named_where_it_is_no_cache(
    key: Callable[[Labelled, int], list[int]], why: str
) -> None:
    data = Labelled()
    with pytest.raises(
        UnsupportedLoaderError, match=rf"ByClass changes `Labelled\.passes` while it is iterated, .*{why}"
    ):
        _ = WrappedSampler(ByClass(data, key), dataset=data).facts


class PlansIn(Sampler[int]):
    """Takes a tenth of a second to plan an epoch, and writes a line each time into a file."""

    def __init__(self, path: str) -> None:
        self.order, self.epoch, self.passes = list(range(30)), 0, 0
        # What a trial opens is put back behind it.
        self.written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def plan(self, epoch: int) -> list[int]:
        os.write(self.written, b"planned\n")
        time.sleep(0.1)
        return random.Random(epoch).sample(range(30), 30)

    def __iter__(self) -> Iterator[int]:
        return iter(self.plan(self.epoch))


class PlansWhenTold(PlansIn):
    """Plans in ``set_epoch``."""

    def set_epoch(self, epoch: int) -> None:
        self.order = self.plan(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class KnowsEpoch(PlansIn):
    """Plans by the epoch that it was told."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class CountsPasses(PlansIn):
    """Plans by how often it was iterated."""

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(self.plan(self.passes))


class KeepsPlan(PlansIn):
    """Keeps what it has planned."""

    def __iter__(self) -> Iterator[int]:
        self.order = self.plan(0)
        return iter(self.order)


@pytest.mark.parametrize(
    ("make", "most", "remembers"),
    [
        (PlansIn, 1, False),
        (KnowsEpoch, 1, False),
        # In its trial, for two epochs, and for each of two others behind none and all of those before.
        (PlansWhenTold, 1 + 2 + 3 + 4, False),
        (CountsPasses, 4, True),
        (KeepsPlan, 9, False),
    ],
)
def test_one_that_takes_long_to_plan_an_epoch_plans_few_before_training(
    make: type[PlansIn], most: int, remembers: bool, tmp_path: Path
) -> None:
    facts = WrappedSampler(make(str(tmp_path / "plans"))).facts

    assert (facts.remembers, facts.hands_epoch_on, facts.apart_in) == (remembers, False, None)
    assert len((tmp_path / "plans").read_text().split()) == most


class DrawsWhenTold(theirs.Bag):
    """Notes outside of itself how often it has planned an epoch, by the epoch that it is told."""

    epoch = 0
    # A module is left as a trial has left it.
    plans: ClassVar[Any] = ModuleType("plans")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[attr-defined,no-any-return]

    def __iter__(self) -> Iterator[int]:
        self.plans.begun.append(self.epoch)
        return iter(random.Random(self.epoch).sample(self.rows, len(self.rows)))  # type: ignore[attr-defined]


def test_saves_try_a_sampler_that_is_slow_to_begin_twice_an_epoch_and_still_notice_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler_check, "_SLOW_TO_BEGIN", 0.0)
    # However long a busy machine takes.
    monkeypatch.setattr(sampler_check, "QUICK", float("inf"))
    for name in ("QUICK", "_BEARABLE", "_CHEAP"):
        monkeypatch.setattr(sampler_trial, name, float("inf"))
    sampler = DrawsWhenTold(rows=list(range(100)))
    sampler.plans.begun = []
    loader = patch_dataloader(DataLoader(range(100), sampler=sampler, batch_size=5))  # type: ignore[arg-type]
    for epoch in range(3):
        for number, _ in enumerate(loader):
            if number == 0:
                sampler.plans.begun.clear()
                state = loader.state_dict()
                # The epoch that it is told is no change: its beginning alone is compared.
                assert sampler.plans.begun == [0], epoch
            else:
                assert loader.state_dict().get("changed") == state.get("changed") is None
        # Once more at the last batch, where it is told the next epoch.
        assert sampler.plans.begun == [0, 0], epoch
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        assert "changed" not in loader.state_dict()
    sampler.rows.reverse()  # type: ignore[attr-defined]

    assert list(loader.state_dict()["changed"]) == ["sequence"]
