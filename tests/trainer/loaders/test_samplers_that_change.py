"""Samplers and datasets that something changes during training: as without the callback, and no resume in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from harm.basics import LENGTH, permutation
from harm.laws import is_harm, resumed, uninterrupted
from harm.own_samplers import CountsAtEnd
from harm.runs import Trial, train
from harm.table import Entry, WithCallback, of
from torch.utils.data import Sampler


class CountsDown(Sampler[int]):
    """Its ``len`` is what is left, as Megatron's; it counts a sample when the next is asked for."""

    consumed_samples = 0

    def __len__(self) -> int:
        return LENGTH - self.consumed_samples

    def __iter__(self) -> Iterator[int]:
        for index in range(self.consumed_samples, LENGTH):
            yield index
            self.consumed_samples += 1
        self.consumed_samples = 0


class SetsConsumed(pl.Callback):
    """Brings the sampler to where the run stopped, by a state of its own."""

    def __init__(self, sampler: CountsDown) -> None:
        self.sampler, self.consumed = sampler, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.consumed = (self.consumed + 4) % LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def on_train_start(self, *_: Any) -> None:
        self.sampler.consumed_samples = self.consumed


class HasTail(CountsAtEnd):
    """Counts an epoch behind its last sample, which torch asks for where the last batch is not full."""

    def __len__(self) -> int:
        return LENGTH - 2

    def __iter__(self) -> Iterator[int]:
        yield from permutation(self.epoch)[2:]
        self.epoch += 1


def judged(
    folder: Path, make: Callable[[int], Any], stops: dict[int, str], same: str = "equal", workers: int = 0
) -> None:
    """Compare a run with one without the callback, and its resumes with what is expected of each stop."""
    entry = Entry(make, same)
    plain, own = (train(entry, own=with_callback, workers=workers) for with_callback in (False, True))
    assert uninterrupted(entry, [Trial(plain, own)], None) == ("same", "")
    for stop, expected in stops.items():
        stopped = train(entry, workers=workers, max_steps=stop, save=folder / "middle.ckpt")
        outcome, why = resumed([own], [stopped], [train(entry, workers=workers, ckpt_path=folder / "middle.ckpt")])
        assert not is_harm(outcome), f"{stop}: {why}"
        assert outcome == expected, f"{stop}: {why}"


@pytest.mark.parametrize(
    ("make", "stops"),
    [
        pytest.param(of(CountsDown), {3: "exact", 6: "exact", 7: "exact", 9: "exact"}, id="len is what is left"),
        pytest.param(WithCallback(CountsDown, SetsConsumed), {2: "refused", 3: "refused"}, id="and is set"),
        pytest.param(of(HasTail), {6: "exact", 8: "exact"}, id="counts behind a tail"),
    ],
)
def test_a_sampler_counts_as_in_torch(tmp_path: Path, make: Any, stops: dict[int, str]) -> None:
    judged(tmp_path, make, stops)


def test_a_sampler_counts_as_in_torch_behind_what_workers_leave_out(tmp_path: Path) -> None:
    judged(tmp_path, of(HasTail, drop_last=True), {7: "exact"}, workers=1)
