"""Items that are no numbers: told apart by their values, and said to be unproven where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from harm.basics import LENGTH, Indices, loader, permutation
from harm.laws import resumed
from harm.runs import train
from harm.table import Entry, WithCallback, of
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Window:
    """A part of a recording."""

    start: int


class Hidden:
    """A number that no attribute shows."""

    __slots__ = ()
    numbers: ClassVar[dict[int, int]] = {}

    def __init__(self, number: int) -> None:
        Hidden.numbers[id(self)] = number

    @property
    def start(self) -> int:
        return Hidden.numbers[id(self)]


HIDDEN = [Hidden(number) for number in range(LENGTH)]


class Windows(Indices):
    """Samples by windows."""

    def __getitem__(self, item: Any) -> torch.Tensor:
        return torch.tensor((item["window"] if isinstance(item, dict) else item).start)


class Converted(Sampler[Any]):
    """Converts what a list of indices has; moved on by its passes, or by a hook."""

    def __init__(self, convert: Callable[[int], Any], counts: bool) -> None:
        self.convert, self.counts, self.start = convert, counts, 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        self.start += self.counts
        return (self.convert(index) for index in permutation(self.start))


class Moves(pl.Callback):
    """Sets where the next epoch begins, and restores nothing."""

    def __init__(self, sampler: Converted) -> None:
        self.sampler = sampler

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.sampler.start = trainer.current_epoch + 5


@dataclass(frozen=True)
class Moved(WithCallback):
    """Windows, and a callback that moves them on."""

    def __call__(self, workers: int) -> Any:
        sampler = self.sampler()
        return lambda: loader(workers, dataset=Windows(), sampler=sampler), self.callback(sampler)


def counted(convert: Callable[[int], Any]) -> Entry:
    return Entry(of(lambda: Converted(convert, counts=True), dataset=Windows()), "equal")


def moved(convert: Callable[[int], Any]) -> Entry:
    return Entry(Moved(lambda: Converted(convert, counts=False), Moves), "equal")


def hidden(index: int) -> Hidden:
    return HIDDEN[index]


BY_VALUE: dict[str, Callable[[int], Any]] = {
    "slice": lambda index: slice(index, index + 3),
    "dataclass": Window,
    "dict of": lambda index: {"window": Window(index)},
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_sampler_that_counts_its_passes_resumes_exactly_whatever_it_yields(tmp_path: Path, name: str) -> None:
    entry = counted(BY_VALUE[name])
    whole = train(entry, save=tmp_path / "stop.ckpt")
    assert resumed([whole], [train(entry, ckpt_path=tmp_path / "stop.ckpt")]) == ("exact", "")
    assert not whole.said


@pytest.mark.parametrize("name", BY_VALUE)
def test_other_items_than_before_the_stop_are_refused(tmp_path: Path, name: str) -> None:
    entry = moved(BY_VALUE[name])
    whole = train(entry, save=tmp_path / "stop.ckpt")
    outcome, why = resumed([whole], [train(entry, ckpt_path=tmp_path / "stop.ckpt")])
    assert (outcome, why.split(":")[0]) == ("refused", "StateMismatchError")


def test_items_that_cannot_be_told_apart_are_named_at_the_start_and_at_the_resume(tmp_path: Path) -> None:
    for entry, outcome in ((counted(hidden), "exact"), (moved(hidden), "warned")):
        whole = train(entry, save=tmp_path / "stop.ckpt")
        after = train(entry, ckpt_path=tmp_path / "stop.ckpt")
        assert resumed([whole], [after])[0] == outcome
        for run in (whole, after):
            assert run.said[0].startswith("Converted yields a Hidden, of which nothing but the type can be compared")
