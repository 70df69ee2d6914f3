"""Samplers that change within a pass, behind it, or where their iterator is dropped: as in torch, and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from harm.basics import LENGTH, permutation
from harm.known_samplers import InfiniteSampler
from harm.laws import judged
from harm.own_samplers import CountsInFinally, Sized
from harm.runs import train
from harm.table import Entry, WithCallback, of


class DrawsInFinally(Sized):
    """Draws the order of its next pass where the latest is left."""

    order = tuple(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        try:
            yield from self.order
        finally:
            self.order = tuple(random.sample(range(LENGTH), LENGTH))


class AddsInFinally(Sized):
    """Adds the epoch, which Lightning tells it before torch drops the iterator of the one before."""

    epoch = total = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        try:
            yield from permutation(100 * self.epoch + self.total)
        finally:
            self.total += 1 + self.epoch


class KeepsItsIterator(CountsInFinally):
    """Goes on in a generator that it keeps, which torch does not end either."""

    kept: Any = None

    def __iter__(self) -> Iterator[int]:
        self.kept = self.kept or self.passes()
        return (next(self.kept) for _ in range(LENGTH))

    def passes(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class ShufflesInBuffer(Sized):
    """Draws from a buffer that is empty between two passes."""

    def __init__(self) -> None:
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(LENGTH):
            self.buffer.append(index)
            if len(self.buffer) > 5:
                yield self.buffer.pop(random.randrange(len(self.buffer)))
        random.shuffle(self.buffer)
        while self.buffer:
            yield self.buffer.pop()


class Replaces(pl.Callback):
    """Replaces a sample in the buffer within an epoch, once."""

    def __init__(self, sampler: ShufflesInBuffer) -> None:
        self.sampler = sampler

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 8:
            self.sampler.buffer[-1] = 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "same"),
    [
        pytest.param(of(CountsInFinally), "equal", id="counts"),
        pytest.param(of(CountsInFinally, batch_size=5), "equal", id="and torch asks for more"),
        pytest.param(of(AddsInFinally), "equal", id="adds"),
        pytest.param(of(DrawsInFinally), "runs", id="draws"),
    ],
)
def test_what_a_finally_changes_is_changed_where_torch_drops_the_iterator(
    tmp_path: Path, make: Any, same: str, workers: int
) -> None:
    judged(tmp_path, make, dict.fromkeys((3, 6, 8) if not workers else (5,), "exact"), same, workers)
    assert not train(Entry(make, same), workers=workers).said


@pytest.mark.parametrize("kind", [CountsInFinally, AddsInFinally])
def test_so_it_is_behind_a_limit(tmp_path: Path, kind: Any) -> None:
    judged(tmp_path, of(kind), dict.fromkeys((2, 4, 6), "exact"), limit_train_batches=4)


def test_where_workers_begin_the_next_epoch_first_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    for kind, workers, limit in ((CountsInFinally, 1, 4), (CountsInFinally, 0, 4), (CountsInFinally, 1, 1.0)):
        caplog.clear()
        train(Entry(of(kind), "equal", trainer={"limit_train_batches": limit}), workers=workers)
        assert ("changes itself behind its last item" in caplog.text) == (workers == 1 and limit == 4)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_read_ahead_of_a_sampler_without_end_is_read_as_in_torch(tmp_path: Path, persistent: bool) -> None:
    judged(tmp_path, of(InfiniteSampler, persistent_workers=persistent), {5: "exact", 8: "exact"}, workers=2)


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_an_iterator_that_a_sampler_keeps_goes_on(tmp_path: Path, stop: int) -> None:
    judged(tmp_path, of(KeepsItsIterator), {stop: "exact"})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [2, 8, 9])
def test_a_buffer_that_is_empty_between_passes_is_filled_again_without_a_word(
    tmp_path: Path, stop: int, workers: int
) -> None:
    entry = Entry(of(ShufflesInBuffer), "equal")
    whole = train(entry, workers=workers)
    train(entry, workers=workers, save=tmp_path / "stop.ckpt", after=stop)
    again = train(entry, workers=workers, ckpt_path=tmp_path / "stop.ckpt")
    assert again.trained == whole.trained[stop:]
    assert not again.said


def test_but_what_a_callback_has_put_into_it_is_warned_of(tmp_path: Path) -> None:
    entry = Entry(WithCallback(ShufflesInBuffer, Replaces), "equal")
    whole = train(entry)
    train(entry, save=tmp_path / "stop.ckpt", after=8)
    again = train(entry, ckpt_path=tmp_path / "stop.ckpt")
    assert again.trained != whole.trained[8:]
    assert any("ShufflesInBuffer had been changed in training" in text for text in again.said)
