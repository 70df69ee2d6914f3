"""Samplers whose plan lies in a file or in shared memory: neither a trial nor a save changes it under training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import LedgerModel, Numbers, samples
from support.runs import quiet_trainer, seeded
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.sampler_copies.written_files import WrittenFiles

LENGTH = 24


class InFile(Sampler[int]):
    """Writes the plan of an epoch into a file, and reads it from there while it is iterated."""

    def __init__(self, path: Path) -> None:
        self.path, self.epoch = path, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        plan = np.memmap(self.path, dtype=np.int64, mode="w+", shape=(LENGTH,))
        plan[:] = np.random.default_rng(self.epoch).permutation(LENGTH)
        yield from map(int, plan)


class InFileWhenTold(InFile):
    """Writes it where it is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        plan = np.memmap(self.path, dtype=np.int64, mode="w+", shape=(LENGTH,))
        plan[:] = np.random.default_rng(epoch).permutation(LENGTH)

    def __iter__(self) -> Iterator[int]:
        yield from map(int, np.memmap(self.path, dtype=np.int64, mode="r"))


class InSharedMemory(Sampler[int]):
    """Shuffles a tensor in shared memory in place."""

    def __init__(self, path: Path) -> None:
        self.plan = torch.arange(LENGTH).share_memory_()  # type: ignore[no-untyped-call]  # torch's

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.plan[:] = self.plan[torch.randperm(LENGTH)]
        yield from self.plan.tolist()


class InMappedFile(InSharedMemory):
    """Shuffles an array in place that is mapped into memory from a file."""

    def __init__(self, path: Path) -> None:
        self.plan: Any = np.memmap(path, dtype=np.int64, mode="w+", shape=(LENGTH,))
        self.plan[:] = range(LENGTH)

    def __iter__(self) -> Iterator[int]:
        self.plan[:] = self.plan[np.random.permutation(LENGTH)]
        yield from self.plan.tolist()


class SavesEachBatch(StatefulDataCallback):
    """Saves a checkpoint behind every batch."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")


def fit(sampler: Any, folder: Path, **how: Any) -> Any:
    model = seeded(LedgerModel)
    trainer = quiet_trainer(SavesEachBatch(seed=7), max_epochs=3, default_root_dir=folder)
    trainer.fit(model, DataLoader(Numbers(LENGTH), batch_size=4, sampler=sampler), **how)
    return model.ledger


@pytest.mark.parametrize("kind", [InFile, InFileWhenTold, InSharedMemory, InMappedFile])
def test_each_sample_comes_in_each_epoch_while_checkpoints_are_saved_and_resumes_are_exact(
    tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    whole = fit(kind(tmp_path / "plan"), tmp_path)
    for epoch in range(3):
        assert sorted(samples(whole, epoch)) == list(range(LENGTH))
    assert samples(whole, 0) != samples(whole, 1) != samples(whole, 2)
    for step in (2, 6, 9, 16):
        (folder := tmp_path / str(step)).mkdir()
        rest = fit(kind(folder / "plan"), folder, ckpt_path=str(tmp_path / f"{step}.ckpt"))
        assert samples(rest) == samples(whole)[4 * step :]


def written(path: Path) -> None:
    path.write_text("a")


def appended(path: Path) -> None:
    path.open("a").close()


def described(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, mode=0o600))


@pytest.mark.parametrize(
    ("run", "are_there"),
    [
        (written, True),
        (appended, True),
        (described, True),
        (lambda path: torch.save(1, path), True),
        (lambda path: np.save(path, np.ones(1)), True),
        (lambda path: np.memmap(__file__, mode="r"), False),
        (lambda path: Path(__file__).read_text(), False),
    ],
)
def test_a_file_that_is_opened_to_write_it_is_noted_in_the_block_alone(
    tmp_path: Path, run: Callable[[Path], object], are_there: bool
) -> None:
    functions = open, os.open, torch.save
    with WrittenFiles() as found:
        run(tmp_path / "file")
    assert found.are_there == are_there
    assert (open, os.open, torch.save) == functions


def test_files_are_put_back_behind_the_block(tmp_path: Path) -> None:
    (old := tmp_path / "old").write_text("before")
    (mapped := tmp_path / "mapped").write_bytes(bytes(8))
    array = np.memmap(mapped, dtype=np.int64, mode="r+")
    with WrittenFiles():
        old.write_text("something longer")
        (tmp_path / "new").write_text("a")
        torch.save(1, tmp_path / "saved")
        np.memmap(mapped, dtype=np.int64, mode="r+")[:] = 3
    assert (old.read_text(), array.tolist()) == ("before", [0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mapped", "old"]


class CountsInFile(InFile):
    """Counts its passes in a file, and shuffles by that."""

    def __iter__(self) -> Iterator[int]:
        passes = int(self.path.read_text()) if self.path.exists() else 0
        self.path.write_text(str(passes + 1))
        yield from map(int, np.random.default_rng(passes).permutation(LENGTH))


def test_what_a_trial_writes_is_put_back_before_training(tmp_path: Path) -> None:
    (tmp_path / "passes").write_text("4")
    with pytest.warns(StatefulWarning, match="goes by the clock, a file that it writes"):
        found = fit(CountsInFile(tmp_path / "passes"), tmp_path)
    assert (tmp_path / "passes").read_text() == "7"
    for epoch in range(3):
        assert samples(found, epoch) == np.random.default_rng(4 + epoch).permutation(LENGTH).tolist()
