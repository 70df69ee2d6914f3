"""A set_epoch that shuffles in place what the call before has left, once for each epoch: resumes are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from harm.basics import LENGTH, loader
from harm.laws import resumed
from harm.runs import train
from harm.table import Entry
from torch.utils.data import Sampler


class Shuffles(Sampler[int]):
    """Begins with its epoch 0, so that the first call does nothing."""

    def __init__(self) -> None:
        self.epoch: int | None = 0
        self.order = list(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            random.Random(epoch).shuffle(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order))


class ShufflesAtFirst(Shuffles):
    """Begins with no epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = None


class NamesItNumber(ShufflesAtFirst):
    """Has no attribute that is named after the epoch."""

    number: int | None = None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.number:
            self.number = epoch
            random.Random(epoch).shuffle(self.order)


@pytest.mark.parametrize("kind", [Shuffles, ShufflesAtFirst, NamesItNumber])
def test_each_stop_is_resumed_exactly_and_nothing_is_said(kind: type[Shuffles], tmp_path: Path) -> None:
    entry = Entry(lambda workers: loader(workers, sampler=kind()), "runs")
    plain, whole = train(entry, own=False), train(entry)
    assert (whole.trained, whole.said) == (plain.trained, [])
    for stop in (6, 8, 12, 15):
        saved = train(entry, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, ckpt_path=tmp_path / "stop.ckpt")
        assert saved.trained == whole.trained
        assert (resumed([saved], [again]), again.said) == (("exact", ""), [])
