"""Datasets without a state that count or draw in each pass, and of which a hook restores what they count or draw."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import BEGINS_TWICE, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import PositionError, StatefulWarning, StateMismatchError

SAMPLES = 12
pytestmark = pytest.mark.skipif(BEGINS_TWICE, reason="begins the first pass of a resume twice")


class Counts(IterableDataset[Any]):
    """Shuffles by the number of its passes."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from np.random.default_rng(epoch).permutation(SAMPLES).tolist()

    def state(self) -> Any:
        return {"epoch": self.epoch}

    def restore(self, state: Any) -> None:
        vars(self).update(state)


class CountedIndices(Sampler[int]):
    """A sampler that does so."""

    __init__, __iter__, state, restore = Counts.__init__, Counts.__iter__, Counts.state, Counts.restore

    def __len__(self) -> int:
        return SAMPLES


class CountsBehind(Counts):
    """Counts a pass when it has ended."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()
        self.epoch += 1


class Draws(Counts):
    """Shuffles by a generator that it holds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(SAMPLES).tolist()

    def state(self) -> Any:
        return self.generator.bit_generator.state

    def restore(self, state: Any) -> None:
        self.generator.bit_generator.state = state


class Batches(Counts):
    """Is iterated without a DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.tensor(list(super().__iter__())).split(4)


class Replays(Draws):
    """Draws from a buffer that each sample moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = deque(range(6), maxlen=6)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            self.buffer.append(int(self.generator.integers(100)))
            yield self.buffer[int(self.generator.integers(6))]

    def state(self) -> Any:
        return {"generator": super().state(), "buffer": list(self.buffer)}

    def restore(self, state: Any) -> None:
        super().restore(state["generator"])
        self.buffer.extend(state["buffer"])


class DrawsAndCounts(Counts):
    """Shuffles by the number of its passes and by a generator, of which the former alone is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from np.random.default_rng(self.epoch + self.generator.integers(9)).permutation(SAMPLES).tolist()


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append((self.current_epoch, batch_idx, batch.tolist()))
        return self.layer(torch.ones(1, 32)).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, 0) and self.trainer.ckpt_path is None:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "within.ckpt")


class Restores(pl.Callback):
    """Saves what a dataset has, and restores it in a hook, if in any."""

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset, self.where = dataset, where
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.dataset.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.where == "load_state_dict":
            self.dataset.restore(state["of"])
        self.state = state["of"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.where == "on_train_start" and self.state is not None:
            self.dataset.restore(self.state)


class Unseeded(Draws):
    """Shuffles by a generator without a seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()


def fit(
    kind: Any, folder: Path, of: str = "", where: str = "", epochs: int = 4, **options: Any
) -> tuple[list[Any], list[str]]:
    """The batches, and the warnings of this package."""
    dataset, model = kind(), Records()
    saves = ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, enable_version_counter=False
    )
    callbacks = (saves, Restores(dataset, where), StatefulDataCallback(seed=0))
    workers = options.pop("num_workers", 0)
    limits = {"limit_val_batches": 0, "enable_checkpointing": True, **options}
    trainer = quiet_trainer(*callbacks, max_epochs=epochs, default_root_dir=folder, **limits)
    loader: Any = dataset if kind is Batches else DataLoader(dataset, batch_size=4, num_workers=workers)
    if kind is CountedIndices:
        loader = DataLoader(torch.arange(SAMPLES), batch_size=4, sampler=dataset)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader, ckpt_path=folder / f"{of}.ckpt" if of else None)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return model.trained, [one for one in said if "were read again" not in one]


KINDS = [Counts, CountsBehind, Draws, Replays, Batches]


@pytest.mark.parametrize("where", ["", "load_state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_behind_an_epoch_is_exact_whether_a_hook_restores_it_or_not(
    tmp_path: Path, kind: Any, where: str
) -> None:
    whole, _ = fit(kind, tmp_path)
    for epoch in (0, 1):
        resumed, said = fit(kind, tmp_path, f"epoch={epoch}", where)
        assert resumed == [one for one in whole if one[0] > epoch]
        assert not said
    # The second one of two resumes, the first of which has restored it.
    again, said = fit(kind, tmp_path, "epoch=2", where)
    assert again == [one for one in whole if one[0] > 2]
    assert not said


@pytest.mark.parametrize("where", ["", "load_state_dict"])
@pytest.mark.parametrize("kind", [Counts, Replays])
def test_one_whose_epochs_are_cut_is_restored_likewise(tmp_path: Path, kind: Any, where: str) -> None:
    whole, _ = fit(kind, tmp_path, limit_train_batches=2)
    resumed, said = fit(kind, tmp_path, "epoch=1", where, limit_train_batches=2)
    assert resumed == [one for one in whole if one[0] > 1]
    assert not said


@pytest.mark.parametrize("kind", [Counts, Draws])
def test_one_that_is_restored_in_on_train_start_is_exact(tmp_path: Path, kind: Any) -> None:
    whole, _ = fit(kind, tmp_path)
    resumed, said = fit(kind, tmp_path, "epoch=0", "on_train_start")
    assert resumed == whole[3:]
    assert not said


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unseeded_generator_is_warned_of_unless_it_is_restored(tmp_path: Path, num_workers: int) -> None:
    whole, _ = fit(Unseeded, tmp_path, epochs=3, num_workers=num_workers)
    _, said = fit(Unseeded, tmp_path, "epoch=1", epochs=3, num_workers=num_workers)
    assert len(said) == 1
    assert "generator" in said[0]
    resumed, said = fit(Unseeded, tmp_path, "epoch=1", "load_state_dict", epochs=3, num_workers=num_workers)
    assert resumed == whole[6:]
    assert not said


def test_one_that_was_iterated_in_this_process_is_warned_of(tmp_path: Path) -> None:
    fit(Counts, tmp_path)
    dataset = Counts()
    next(iter(dataset))
    _, said = fit(lambda: dataset, tmp_path, "epoch=1")
    assert len(said) == 1
    assert "Counts.epoch in each pass, which is another here" in said[0]


def test_one_that_is_restored_in_part_is_warned_of(tmp_path: Path) -> None:
    fit(DrawsAndCounts, tmp_path)
    assert not fit(DrawsAndCounts, tmp_path, "epoch=1")[1]
    _, said = fit(DrawsAndCounts, tmp_path, "epoch=1", "load_state_dict")
    assert len(said) == 1
    assert "DrawsAndCounts.epoch" in said[0]
    assert "but not DrawsAndCounts.generator" in said[0]


@pytest.mark.parametrize("kind", [Counts, Draws])
def test_a_resume_within_an_epoch_names_what_a_hook_has_restored(tmp_path: Path, kind: Any) -> None:
    whole, _ = fit(kind, tmp_path)
    assert fit(kind, tmp_path, "within")[0] == whole[4:]
    with pytest.raises(PositionError, match=f"changes {kind.__name__}.* is another here than before the first pass"):
        fit(kind, tmp_path, "within", "load_state_dict")


def test_a_sampler_that_a_hook_restores_within_an_epoch_is_refused_by_that_cause(tmp_path: Path) -> None:
    whole, _ = fit(CountedIndices, tmp_path)
    assert fit(CountedIndices, tmp_path, "within")[0] == whole[4:]
    assert fit(CountedIndices, tmp_path, "epoch=1", "load_state_dict")[0] == whole[6:]
    with pytest.raises(StateMismatchError, match="let no hook restore, within an epoch, what they change"):
        fit(CountedIndices, tmp_path, "within", "load_state_dict")
