"""Hooks that look at a batch of the training loader: training is as without the callback, and is resumed exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from harm.basics import LENGTH, permutation
from harm.runs import Run, train
from harm.table import Entry, WithCallback
from support.ledger import Numbers
from support.runs import train_alone
from torch.utils.data import DataLoader, IterableDataset, Sampler


class Looks(pl.Callback):
    """Looks at the first batch of the trainer's loader in a hook; within an epoch at its third step."""

    def __init__(self, hook: str) -> None:
        def look(trainer: Any, module: Any, *arguments: Any) -> None:
            if not arguments or arguments[-1] == 2:
                next(iter(trainer.train_dataloader))

        setattr(self, hook, look)


class SavesBehind(Looks):
    """Saves in the hook of the first epoch, behind the look."""

    def __init__(self, hook: str, path: Path) -> None:
        super().__init__(hook)
        look = getattr(self, hook)

        def go(trainer: Any, module: Any, *arguments: Any) -> None:
            look(trainer, module, *arguments)
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

        setattr(self, hook, go)


class Counts(Sampler[int]):
    """Shuffles by the number of its passes."""

    passes = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(permutation(self.passes))


class Told(Counts):
    """Shuffles by the epoch that it is told, and has a seed of 0, as the first epoch."""

    def __init__(self) -> None:
        self.seed = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(100 * self.epoch + self.seed).sample(range(LENGTH), LENGTH))


def no_sampler() -> None:
    """In place of a sampler: the DataLoader takes samples in order."""


def runs(tmp_path: Path, sampler: Any, hook: str, stops: tuple[int, ...]) -> tuple[Run, dict[int, Run]]:
    """A whole run, equal to one without the callback, and the resumes after so many batches."""
    entry = Entry(WithCallback(sampler, lambda _: Looks(hook)), "equal")
    plain, whole = (train(entry, own=own) for own in (False, True))
    assert plain.error == whole.error == ""
    assert plain.trained == whole.trained
    resumed = {}
    for stop in stops:
        train(entry, save=tmp_path / "stop.ckpt", after=stop)
        resumed[stop] = train(entry, ckpt_path=tmp_path / "stop.ckpt")
    return whole, resumed


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("sampler", [Counts, Told, no_sampler])
def test_a_look_between_epochs_counts_as_in_torch_and_a_resume_is_exact(
    tmp_path: Path, sampler: Any, hook: str
) -> None:
    whole, resumed = runs(tmp_path, sampler, hook, (3, 6, 8))
    assert whole.said == []
    for stop, run in resumed.items():
        assert (run.trained, run.said) == (whole.trained[stop:], []), stop


def test_a_look_within_an_epoch_ends_no_run_and_is_warned_of_where_the_sampler_counts_it(tmp_path: Path) -> None:
    whole, resumed = runs(tmp_path, Told, "on_train_batch_start", (8,))
    assert (resumed[8].trained, whole.said) == (whole.trained[8:], [])

    whole, _ = runs(tmp_path, Counts, "on_train_batch_start", ())
    assert any(
        "Counts changes itself while it is iterated, and a hook has iterated its loader" in of for of in whole.said
    )


@pytest.mark.parametrize(
    ("hook", "trained"), [("on_train_epoch_end", 6), ("on_train_start", 0), ("on_train_epoch_start", 0)]
)
def test_a_look_between_epochs_is_in_a_checkpoint_of_the_same_hook(tmp_path: Path, hook: str, trained: int) -> None:
    entry = Entry(WithCallback(Counts, lambda _: SavesBehind(hook, tmp_path / "behind.ckpt")), "equal")
    whole = train(entry)
    again = train(entry, ckpt_path=tmp_path / "behind.ckpt")
    assert (again.trained, again.error, again.said) == (whole.trained[trained:], "", [])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class WithLength(Stream):
    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("kind", [Stream, WithLength])
def test_a_look_at_an_iterable_dataset_finds_a_batch_where_an_epoch_had_ended(tmp_path: Path, kind: Any) -> None:
    entry = Entry(WithCallback(kind, lambda _: Looks("on_train_start"), "dataset"), "equal")
    whole = train(entry, save=tmp_path / "end.ckpt", after=6)
    again = train(entry, ckpt_path=tmp_path / "end.ckpt")
    assert (again.trained, again.error) == (whole.trained[6:], "")
    assert all("Look at batches of a loader of its own" in one for one in again.said)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_look_within_an_epoch_at_a_loader_of_torchs_finds_all_of_the_data(shuffle: bool) -> None:
    found: list[list[int]] = []

    class LooksAtAll(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step in (2, 4):
                found.append([index for batch in trainer.train_dataloader for index in batch["id"].tolist()])

    runs = [
        train_alone(lambda: DataLoader(Numbers(12), batch_size=2, shuffle=shuffle), callbacks=more, max_epochs=2)
        for more in ([], [LooksAtAll()])
    ]
    assert [sorted(one) for one in found] == [[*range(12)]] * 2
    assert runs[0].ledger == runs[1].ledger
