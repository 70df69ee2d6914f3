"""Checkpoints at the end of an epoch: hooks set what the next one trains on, and other data are still found."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Value
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError

BATCHES = 3
EPOCHS = 3
SETTINGS = {"level": 0}


class Rows(Dataset[Any]):
    """Rows by number; their files are in an order that nothing shows."""

    level = 0

    def __init__(self, files: int = 0) -> None:
        self.shared = Value("i", 0)
        self.order = list(range(4 * BATCHES))
        self._file = lambda index: (index * 5 + files) % (4 * BATCHES) if files else index

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> int:
        return self._file(self.order[index]) + 100 * (self.level + self.shared.value)


class Collate:
    level = 0

    def __call__(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows) + 100 * (self.level + SETTINGS["level"])


class Curriculum(pl.Callback):
    """Calls a function with the number of an epoch as it starts, or as the one before ends and as training starts."""

    def __init__(self, change: Callable[[int], None], at_start: bool) -> None:
        self.change, self.at_start = change, at_start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.at_start:
            self.change(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.at_start:
            self.change(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.at_start:
            self.change(trainer.current_epoch + 1)


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch.tolist())
        return self.layer(torch.ones(1, 32)).sum()


def in_collate(loader: DataLoader[Any], level: int) -> None:
    loader.collate_fn.level = level


def in_module(loader: DataLoader[Any], level: int) -> None:
    SETTINGS["level"] = level


def in_class(loader: DataLoader[Any], level: int) -> None:
    Rows.level = level


def in_shared_memory(loader: Any, level: int) -> None:
    loader.dataset.shared.value = level


def in_list(loader: Any, level: int) -> None:
    loader.dataset.order = random.Random(level).sample(range(4 * BATCHES), 4 * BATCHES)


def by_turns(loader: Any, level: int) -> None:
    loader.collate_fn.level = level % 2


def fit(folder: Path, change: Any, at_start: bool = True, *, name: str = "", files: int = 0) -> list[Any]:
    SETTINGS["level"] = Rows.level = 0
    torch.manual_seed(0)
    loader = DataLoader(Rows(files), batch_size=4, shuffle=True, collate_fn=Collate())
    saved: list[Any] = []
    if not name:
        often: Any = {"filename": "{step}", "every_n_train_steps": 1, "save_on_train_epoch_end": False}
        saved = [ModelCheckpoint(folder, save_top_k=-1, **how) for how in (often, {"filename": "{epoch}"})]
    sets = Curriculum(lambda level: change(loader, level), at_start)
    trainer = quiet_trainer(
        sets, StatefulDataCallback(seed=0), *saved, max_epochs=EPOCHS, enable_checkpointing=bool(saved)
    )
    model = Records()
    trainer.fit(model, loader, ckpt_path=folder / name if name else None)
    return model.trained


@pytest.mark.parametrize("at_start", [True, False], ids=["epoch start", "epoch end"])
@pytest.mark.parametrize("change", [in_collate, in_module, in_class, in_shared_memory, in_list, by_turns])
def test_what_a_hook_sets_by_epoch_is_exact_from_the_end_of_an_epoch(
    tmp_path: Path, change: Any, at_start: bool
) -> None:
    whole = fit(tmp_path, change, at_start)
    assert len(whole) == EPOCHS * BATCHES
    said = []
    for name, step in (("step=3", 3), ("step=6", 6), ("epoch=0", 3), ("epoch=1", 6)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = fit(tmp_path, change, at_start, name=f"{name}.ckpt")
        assert resumed == whole[step:], name
        said += [f"{name}: {one.message}" for one in caught if issubclass(one.category, StatefulWarning)]
    # One that returns to how it was built cannot be told from one that was not set again.
    returns = ["step=6", "epoch=1"] if change is by_turns and at_start else []
    assert [one.partition(":")[0] for one in said] == returns, said


def test_other_data_are_refused_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def nothing(loader: Any, level: int) -> None:
        pass

    fit(tmp_path, nothing)
    for name in ("step=3", "epoch=0", "epoch=1"):
        with pytest.raises(StateMismatchError, match=r"dataset.content: .*Batch 0 of epoch"):
            fit(tmp_path, nothing, name=f"{name}.ckpt", files=1)


class Buffer:
    def __init__(self) -> None:
        self.rows = [float(row) for row in range(8)]
        self.level = 0


class Replays(IterableDataset[float]):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[float]:
        for _ in range(4 * BATCHES):
            yield random.choice(self.buffer.rows) + 100 * self.buffer.level


class Grows(pl.Callback):
    """Adds a row with each batch, which it saves and restores if it is told to; or sets the level by epoch."""

    def __init__(self, buffer: Buffer, how: str) -> None:
        self.buffer, self.how = buffer, how

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how != "by epoch":
            self.buffer.rows.append(float(len(self.buffer.rows)))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.how == "by epoch":
            self.buffer.level = trainer.current_epoch

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.buffer.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.how == "restored":
            self.buffer.rows = list(state["rows"])


@pytest.mark.filterwarnings("ignore:Replays.buffer was changed between two epochs")
@pytest.mark.parametrize("how", ["restored", "by epoch", "lost"])
def test_a_buffer_is_compared_by_its_values_and_named_where_nothing_restores_it(tmp_path: Path, how: str) -> None:
    def run(step: int = 0) -> list[Any]:
        buffer, model = Buffer(), Records()
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [StatefulDataCallback(seed=0), Grows(buffer, how), *([] if step else [saver])]
        trainer = quiet_trainer(*callbacks, max_epochs=EPOCHS, enable_checkpointing=not step)
        path = tmp_path / f"step={step}.ckpt" if step else None
        trainer.fit(model, DataLoader(Replays(buffer), batch_size=4), ckpt_path=path)
        return model.trained

    whole = run()
    for step in (BATCHES, 2 * BATCHES):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = run(step)
        said = [str(one.message) for one in caught if "and is another here" in str(one.message)]
        assert (resumed == whole[step:], len(said)) == ((False, 1) if how == "lost" else (True, 0)), (step, said)


class Files(IterableDataset[int]):
    """Shuffles its list in each pass, in place."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.files)
        return iter(list(self.files))


@pytest.mark.parametrize("shares", [True, False])
def test_a_list_that_passes_of_training_and_of_validation_shuffle_is_warned_of(shares: bool) -> None:
    files = list(range(4 * BATCHES))
    held = DataLoader(Files(files if shares else list(files)), batch_size=4)
    trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=1, val_check_interval=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Validates(), DataLoader(Files(files), batch_size=4), held)
    said = [str(one.message) for one in caught if "of validation share one object, Files.files" in str(one.message)]
    assert len(said) == shares


class CountsPasses(IterableDataset[int]):
    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(4 * BATCHES), 4 * BATCHES))


@pytest.mark.parametrize("shares", [True, False])
def test_so_is_one_dataset_whose_passes_of_training_and_of_validation_are_counted_together(shares: bool) -> None:
    dataset = CountsPasses()
    held = DataLoader(dataset if shares else CountsPasses(), batch_size=4)
    trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Validates(), DataLoader(dataset, batch_size=4), held)
    said = [str(one.message) for one in caught if "share one object, CountsPasses.passes" in str(one.message)]
    assert len(said) == shares


class Augments:
    def __init__(self) -> None:
        self.steps: list[Any] = [random.Random(3)]

    def __call__(self, row: int) -> float:
        return row + float(self.steps[0].random())


class Augmented(IterableDataset[float]):
    def __init__(self, augments: Augments | None) -> None:
        self.stages = {"augments": augments}

    def __iter__(self) -> Iterator[float]:
        augments = self.stages["augments"] or float
        return map(augments, range(4 * BATCHES))


class Validates(Records):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(("of_training", "of_validation"), [(0, 0), (0, 1), (0, None), (None, 0)])
def test_a_generator_that_passes_of_training_and_of_validation_draw_from_is_warned_of(
    of_training: int | None, of_validation: int | None
) -> None:
    made = [Augments(), Augments()]
    train, val = (
        DataLoader(Augmented(None if one is None else made[one]), batch_size=4) for one in (of_training, of_validation)
    )
    trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=1, val_check_interval=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Validates(), train, val)
    said = [str(one.message) for one in caught if "validation share one object, Augmented.stages" in str(one.message)]
    assert len(said) == (of_training == of_validation)


class Counts(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100, 132))


class RecordsEach(Records):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append([part.tolist() for part in batch])
        return self.layer(torch.ones(1, 32)).sum()


@pytest.mark.filterwarnings("ignore:.*were read again")
def test_a_sized_loader_that_ends_before_a_stream_resumes_from_its_last_batch(tmp_path: Path) -> None:
    def run(step: int = 0) -> list[Any]:
        loaders = [DataLoader(Rows(), batch_size=4, shuffle=True), DataLoader(Counts(), batch_size=4)]
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [StatefulDataCallback(seed=0), *([] if step else [saver])]
        # BoringModel validates on other random data in every run.
        options = {"max_epochs": EPOCHS, "enable_checkpointing": not step, "limit_val_batches": 0}
        model, trainer = RecordsEach(), quiet_trainer(*callbacks, **options)
        path = tmp_path / f"step={step}.ckpt" if step else None
        trainer.fit(model, CombinedLoader(loaders, "min_size"), ckpt_path=path)
        return model.trained

    whole = run()
    for step in (2, BATCHES, 2 * BATCHES):
        assert run(step) == whole[step:], step


class Pool(Rows):
    """Labels four more rows after each epoch, which nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.labelled = list(range(8))

    def __len__(self) -> int:
        return len(self.labelled)


class OfPool(Records):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    def train_dataloader(self) -> Any:
        return DataLoader(self.pool, batch_size=4, shuffle=True, collate_fn=torch.tensor)

    def on_train_epoch_end(self) -> None:
        self.pool.labelled += range(4)


def test_a_pool_that_nothing_restores_is_warned_of_where_its_loader_is_built_anew(tmp_path: Path) -> None:
    def run(path: Path | None = None) -> list[Any]:
        saved = [] if path else [ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]
        how: Any = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "enable_checkpointing": not path}
        model = OfPool()
        quiet_trainer(StatefulDataCallback(seed=0), *saved, **how).fit(model, ckpt_path=path)
        return model.trained

    whole = run()
    with pytest.warns(StatefulWarning, match="Pool.labelled had been changed in training when the checkpoint"):
        assert run(tmp_path / "epoch=0.ckpt") != whole[2:]
