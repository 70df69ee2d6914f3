"""Samplers whose len() makes the plan of an epoch, or goes through one: all samples come, and a resume is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harm.basics import LENGTH, LENGTHS, loader
from harm.laws import resumed
from harm.runs import train
from harm.table import Entry
from support.ledger import LedgerModel, Numbers
from support.runs import quiet_trainer
from torch.utils.data import Sampler

from lightning_stateful import StatefulDataCallback, patch_dataloader
from lightning_stateful.errors import StatefulWarning


def cut(order: Any, budget: int = 20) -> list[list[int]]:
    """Batches of so many tokens."""
    batches: list[list[int]] = [[]]
    for index in map(int, order):
        if sum(LENGTHS[of] for of in [*batches[-1], index]) > budget:
            batches.append([])
        batches[-1].append(index)
    return batches


class Plans(Sampler[list[int]]):
    """Makes a plan where it is asked for its length or iterated, and keeps it."""

    plan: Any = None

    def order(self) -> Any:
        return np.random.permutation(LENGTH)

    def planned(self) -> list[list[int]]:
        if self.plan is None:
            self.plan = cut(self.order())
        plan: list[list[int]] = self.plan
        return plan

    def __len__(self) -> int:
        return len(self.planned())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.planned())


class PlansWhenTold(Plans):
    """Drops its plan where it is told an epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.plan = None


class DrawsWhenTold(PlansWhenTold):
    """Draws a seed for its plan where it is told an epoch."""

    seed = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.seed = int(np.random.randint(2**30))

    def order(self) -> Any:
        return np.random.default_rng([self.seed, np.random.randint(2**30)]).permutation(LENGTH)


class TakesPlan(Plans):
    """Iterates a plan once, and then makes another."""

    def __iter__(self) -> Iterator[list[int]]:
        plan, self.plan = self.planned(), None
        return iter(plan)


class ShufflesPlan(TakesPlan):
    """Draws on when it has its plan."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield np.random.permutation(batch).tolist()


class HoldsGenerator(TakesPlan):
    """Draws its plan from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def order(self) -> Any:
        return torch.randperm(LENGTH, generator=self.generator)


class GoesThrough(Sampler[list[int]]):
    """Counts the batches of a pass of its own where it is asked for its length."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        yield from cut(np.random.permutation(LENGTH))


class CountsPasses(GoesThrough):
    """Seeds each pass by its number, and that for its length too."""

    passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        yield from cut(np.random.default_rng(self.passes).permutation(LENGTH))


KINDS = [PlansWhenTold, DrawsWhenTold, TakesPlan, ShufflesPlan, HoldsGenerator, GoesThrough, CountsPasses]


def entry_of(kind: Callable[[], Any]) -> Entry:
    return Entry(lambda workers: loader(workers, batch_sampler=kind()), "runs")


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_comes_and_each_stop_is_resumed_exactly(kind: Callable[[], Any], tmp_path: Path) -> None:
    entry = entry_of(kind)
    whole = train(entry)
    assert (whole.error, whole.said) == ("", [])
    samples = [sorted(index for batch in whole.epoch(epoch) for index in batch) for epoch in range(3)]
    assert samples == [list(range(LENGTH))] * 3
    assert len({str(whole.epoch(epoch)) for epoch in range(3)}) == 3
    first = len(whole.epoch(0))
    for stop in (3, first, first + 1, first + 4):
        saved = train(entry, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, ckpt_path=tmp_path / "stop.ckpt")
        assert resumed([saved], [again]) == ("exact", "")
        assert saved.trained == whole.trained
        assert again.said == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_who_asks_for_the_length_in_a_loop(kind: Callable[[], Any]) -> None:
    def epochs(*, asks: bool) -> list[list[Any]]:
        ours, found = patch_dataloader(loader(0, batch_sampler=kind()), seed=7), []
        for _ in range(3):
            found.append([])
            assert not asks or len(ours)
            for batch in ours:
                assert not asks or len(ours)
                found[-1].append(batch.tolist())
            assert not asks or kind is CountsPasses or len(ours) == len(found[-1])
        return found

    found = epochs(asks=False)
    assert epochs(asks=True) == found
    assert [sorted(index for batch in epoch for index in batch) for epoch in found] == [list(range(LENGTH))] * 3


def test_to_ask_for_the_length_draws_nothing_from_the_generators_of_the_process() -> None:
    ours = patch_dataloader(loader(0, batch_sampler=GoesThrough()), seed=7)
    before = np.random.get_state()[1].tolist()
    assert len(ours)
    assert np.random.get_state()[1].tolist() == before


class SaysLatest(Sampler[list[int]]):
    """Makes a plan at the start of each pass but the first, with smaller batches; len() is the latest's."""

    size = 4

    def __init__(self) -> None:
        self.plan = [list(range(LENGTH))[at : at + 4] for at in range(0, LENGTH, 4)]
        self.is_first = True

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_first:
            self.size -= 1
            self.plan = [batch.tolist() for batch in torch.randperm(LENGTH).split(self.size)]
        self.is_first = False
        return iter(self.plan)


def test_an_epoch_that_is_cut_because_len_was_that_of_the_epoch_before_is_warned_of() -> None:
    trainer = quiet_trainer(StatefulDataCallback(seed=7), max_epochs=3)
    with pytest.warns(StatefulWarning, match="said that epoch") as said:
        trainer.fit(LedgerModel(), loader(0, dataset=Numbers(LENGTH), batch_sampler=SaysLatest()))
    assert trainer.global_step == 6 + 6 + 8
    first, second = [str(warning.message) for warning in said if "said that epoch" in str(warning.message)]
    assert first.startswith("SaysLatest said that epoch 1 has 6 batches, and says 8 now that it has begun.")
    assert second.startswith("SaysLatest said that epoch 2 has 8 batches, and says 12 now that it has begun.")


def test_so_it_is_in_a_loop() -> None:
    ours = patch_dataloader(loader(0, batch_sampler=SaysLatest()), seed=7)
    assert len(list(ours)) == 6
    with pytest.warns(StatefulWarning, match="said that epoch 1 has 6 batches, and says 8 now"):
        assert len(list(ours)) == 6
