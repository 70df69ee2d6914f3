"""Values outside of loaders that hooks set, and that code reads which builds loaders or datasets."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

LEVEL = 0


class Numbers(Dataset[torch.Tensor]):
    """Samples that follow from an attribute and from a variable of this module; counts and keeps what was read."""

    def __init__(self) -> None:
        self.level = self.reads = 0
        self.cache: dict[int, int] = {}

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.cache[index] = index
        return torch.full((32,), index + 1000.0 * (self.level + LEVEL))


class Pool(pl.LightningDataModule):
    """Trains on the first samples of its dataset, more of them in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"size": 0})
        self.dataset, self.pool, self.config = Numbers(), list(range(8)), SimpleNamespace(size=0)
        self.calls = self.ends = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        size = len(self.pool) + self.config.size + self.hparams["size"]
        return DataLoader(Subset(self.dataset, list(range(size))), batch_size=4, shuffle=True)


class KeepsPool(Pool):
    def state_dict(self) -> dict[str, Any]:
        return {"size": len(self.pool)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool = list(range(state_dict["size"]))


class BuildsAnew(Pool):
    def train_dataloader(self) -> Any:
        self.dataset = Numbers()
        return DataLoader(self.dataset, batch_size=20, shuffle=True)


class Once(Pool):
    def train_dataloader(self) -> Any:
        return DataLoader(Subset(self.dataset, range(12)), batch_size=4, shuffle=True)


def grow(data: Pool, epoch: int) -> None:
    data.pool += range(len(data.pool), len(data.pool) + 4)


def configure(data: Pool, epoch: int) -> None:
    data.config.size += 4


def tune(data: Pool, epoch: int) -> None:
    data.hparams["size"] += 4


def harden(data: Pool, epoch: int) -> None:
    data.dataset.level += 1


def globally(data: Pool, epoch: int) -> None:
    global LEVEL
    LEVEL += 1


def by_epoch(data: Pool, epoch: int) -> None:
    data.pool = list(range(8 + 4 * (epoch + 1)))
    data.dataset.level = epoch + 1


def globally_by_epoch(data: Pool, epoch: int) -> None:
    global LEVEL
    LEVEL = epoch + 1


def count(data: Pool, epoch: int) -> None:
    data.ends += 1


def weak(number: float, factor: float = 1.0) -> float:
    return number * factor


def strong(number: float) -> float:
    return number * 3


CONFIG = SimpleNamespace(level=1.0, levels={"a": 1.0})


class Model(BoringModel):
    level = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0


class Reaches(Dataset[torch.Tensor]):
    """Samples that follow from what an object of the module, a slot, functions, a model and shared memory hold."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot, self.model = 1.0, Model()
        self.transform: Any = weak
        self.partial: Any = functools.partial(weak, factor=1.0)
        self.shared = multiprocessing.Value("d", 1.0)
        self.corrupt, self.files, self.told, self.latest = 0, list[int](), False, 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 7 == 3:
            self.corrupt += 1
            self.files.append(index)
            self.latest = index
            if self.corrupt < 2:
                print("corrupt", self.corrupt)
            if not self.told:
                print("one is corrupt")
                self.told = True
        level = self.slot * CONFIG.level * CONFIG.levels["a"] * self.model.level * self.shared.value
        return torch.full((32,), self.transform(self.partial(index + 100.0 * level)))


class Reached(Once):
    def __init__(self) -> None:
        super().__init__()
        CONFIG.level = CONFIG.levels["a"] = self.factor = 1.0
        self.dataset: Any = Reaches()

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(self.dataset, range(12)), batch_size=4, shuffle=True, collate_fn=self.collate)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * self.factor


class Scales:
    """Is called by a dataset."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, number: float) -> float:
        return number * self.factor


SCALES, CALLED = Scales(1.0), weak


class Calls(Dataset[torch.Tensor]):
    """Calls an object and a function that variables of the module hold."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), SCALES(CALLED(index + 1.0)))


class Called(Once):
    def __init__(self) -> None:
        global CALLED
        super().__init__()
        CALLED, SCALES.factor = weak, 1.0
        self.dataset: Any = Calls()


SIZE: Any = None


class FromOutside(Pool):
    """Builds loaders by a variable of this module and by one of the environment, neither of which is set at first."""

    def __init__(self) -> None:
        global SIZE
        super().__init__()
        SIZE = None
        os.environ.pop("POOL_SIZE", None)

    def train_dataloader(self) -> Any:
        size = 8 + (SIZE or 0) + int(os.environ.get("POOL_SIZE", "0")) + int(os.getenv("POOL_SIZE") or 0)
        return DataLoader(Subset(self.dataset, range(size)), batch_size=4, shuffle=True)


def of_variable(data: Pool, epoch: int) -> None:
    global SIZE
    SIZE = 4


def of_environment(data: Pool, epoch: int) -> None:
    os.environ["POOL_SIZE"] = "4"


class InWorkers(Reached):
    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=4, shuffle=True, num_workers=1)


class Persistent(Pool):
    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=20, shuffle=True, num_workers=1, persistent_workers=True)


def of_module(data: Reached, epoch: int) -> None:
    CONFIG.level = 2.0


def in_dict_of_module(data: Reached, epoch: int) -> None:
    CONFIG.levels["a"] = 2.0


def slot(data: Reached, epoch: int) -> None:
    data.dataset.slot = 2.0


def of_model(data: Reached, epoch: int) -> None:
    data.dataset.model.level = 2.0


def function(data: Reached, epoch: int) -> None:
    data.dataset.transform = strong


def lambda_(data: Reached, epoch: int) -> None:
    data.dataset.transform = lambda number: number * 2


def partial(data: Reached, epoch: int) -> None:
    data.dataset.partial = functools.partial(weak, factor=2.0)


def collate(data: Reached, epoch: int) -> None:
    data.factor = 2.0


def shared(data: Reached, epoch: int) -> None:
    data.dataset.shared.value += 1.0


Hook = Callable[[Any, int], None]


def of_called(data: Pool, epoch: int) -> None:
    SCALES.factor = 2.0


def called(data: Pool, epoch: int) -> None:
    global CALLED
    CALLED = strong


class Changes(pl.Callback):
    """Calls a function in a hook of training, and on a resume another one; notes batches."""

    def __init__(self, hook: str, change: Hook, restored_in: str, restore: Hook) -> None:
        self.trained: list[tuple[int, list[float]]] = []
        self.change, self.restore = change, restore
        if restored_in:
            setattr(self, restored_in, self.restores)
        setattr(self, hook, self.changes)

    def changes(self, trainer: Any, *args: Any) -> None:
        self.change(trainer.datamodule, trainer.current_epoch)

    def restores(self, trainer: Any, *args: Any, **named: Any) -> None:
        self.restore(trainer.datamodule, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        self.trained.append((trainer.current_epoch, batch[:, 0].tolist()))


END, BATCH, START = "on_train_epoch_end", "on_train_batch_end", "on_train_epoch_start"


def outcome(
    folder: Path,
    hook: str,
    change: Hook,
    data: type[Pool] = Pool,
    *,
    after: int,
    every: int = 1,
    batch: int = 0,
    restored_in: str = "",
) -> tuple[bool, list[str]]:
    """Whether a resume is exact, and the warnings.

    Args:
        folder: For checkpoints.
        hook: The hook that changes something.
        change: The change.
        data: The data module.
        after: Resume from this epoch: from its end or, with ``batch``, from behind that batch, -1 for the last.
        every: Epochs after which loaders are built anew.
        batch: See ``after``.
        restored_in: The hook of a callback that makes the changes of all epochs up to the checkpoint again.
    """

    def again(data: Any, epoch: int) -> None:
        for earlier in range(after + 1 - bool(batch)):
            change(data, earlier)

    def run(path: Path | None) -> list[tuple[int, list[float]]]:
        global LEVEL
        LEVEL = 0
        changes = Changes(hook, change, restored_in if path else "", again)
        how: Any = {"every_n_train_steps": 1} if batch else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **how) if path is None else pl.Callback()
        trainer = quiet_trainer(
            changes,
            StatefulDataCallback(),
            saver,
            max_epochs=4,
            reload_dataloaders_every_n_epochs=every,
            enable_checkpointing=path is None,
        )
        trainer.fit(BoringModel(), datamodule=data(), ckpt_path=path)
        return changes.trained

    whole = run(None)
    steps = sum(epoch <= after for epoch, _ in whole)
    if batch > 0:
        steps += batch - sum(epoch == after for epoch, _ in whole)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = run(folder / f"step={steps}.ckpt")
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return rest == whole[steps:], said


@pytest.mark.parametrize(
    ("name", "hook", "change", "how"),
    [
        ("pool was", END, grow, {"after": 0}),
        ("pool was", END, grow, {"after": 1}),
        # The loaders that follow are built later.
        ("pool was", END, grow, {"after": 0, "every": 2}),
        ("pool was", BATCH, grow, {"after": 0, "batch": 1}),
        # Lightning calls the hooks of the epoch's end after such a checkpoint.
        ("pool was", END, grow, {"after": 1, "batch": -1}),
        ("config.size was", END, configure, {"after": 0}),
        ("hparams.size was", END, tune, {"after": 0}),
        ("level was", END, harden, {"after": 0}),
        ("level was", END, harden, {"after": 1, "batch": -1, "every": 0, "data": Once}),
        ("level was", START, harden, {"after": 1, "every": 0, "data": Once}),
        (".LEVEL was", END, globally, {"after": 0}),
        (".LEVEL was", END, globally, {"after": 0, "every": 0, "data": Once}),
        (".LEVEL was", END, globally, {"after": 1, "batch": -1, "every": 0, "data": Once}),
        (".CONFIG.level was 2.0 and is 1.0", END, of_module, {"after": 0, "every": 0, "data": Reached}),
        (".CONFIG.levels was {'a': 2.0}", END, in_dict_of_module, {"after": 0, "every": 0, "data": Reached}),
        (".SCALES.factor was 2.0 and is 1.0", END, of_called, {"after": 0, "every": 0, "data": Called}),
        (".CALLED was strong", END, called, {"after": 0, "every": 0, "data": Called}),
        (".SIZE was 4 and is None", END, of_variable, {"after": 0, "data": FromOutside}),
        ("os.environ['POOL_SIZE'] was '4' and is ''", END, of_environment, {"after": 0, "data": FromOutside}),
        ("slot was 2.0", END, slot, {"after": 0, "every": 0, "data": Reached}),
        ("model.level was 2.0", END, of_model, {"after": 0, "every": 0, "data": Reached}),
        ("transform was strong", END, function, {"after": 0, "every": 0, "data": Reached}),
        ("transform was <lambda> ", END, lambda_, {"after": 0, "every": 0, "data": Reached}),
        ("partial was", END, partial, {"after": 0, "every": 0, "data": Reached}),
        ("factor was 2.0", END, collate, {"after": 0, "every": 0, "data": Reached}),
        ("shared was 4.0", BATCH, shared, {"after": 0, "every": 0, "data": Reached}),
        ("shared was", BATCH, shared, {"after": 0, "batch": 2, "every": 0, "data": InWorkers}),
    ],
)
def test_what_nothing_restores_is_named(tmp_path: Path, name: str, hook: str, change: Hook, how: Any) -> None:
    exact, said = outcome(tmp_path, hook, change, **how)
    assert not exact
    assert sum(name in one and "the resume is not exact" in one for one in said) == 1, said
    assert how.get("data") is not Reached or "; " not in said[0], said


@pytest.mark.parametrize("every", [{}, {"every_n_train_steps": 5}], ids=["end of an epoch", "last batch"])
def test_values_that_persistent_workers_do_not_get_are_named_in_the_run_and_on_a_resume(
    tmp_path: Path, every: dict[str, int]
) -> None:
    def run(path: Path | None = None) -> tuple[list[Any], list[str]]:
        restored_in = "" if path is None or every else "on_train_start"
        changes = Changes(END, by_epoch, restored_in, lambda data, epoch: by_epoch(data, 0))
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **every) if path is None else pl.Callback()
        trainer = quiet_trainer(changes, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=path is None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(BoringModel(), datamodule=Persistent(), ckpt_path=path)
        return changes.trained, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]

    whole, (said,) = run()
    assert "set after the persistent workers of the training loader had been started: level was 0 and is 1" in said
    rest, resumed = run(tmp_path / "step=5.ckpt")
    assert rest != whole[5:]
    assert "in the run that wrote the checkpoint" in resumed[0]
    assert "level was 0 and is 1. If samples depend on them, the resume is not exact" in resumed[0]
    assert [("level was 1 and is 2" in one) for one in resumed[1:]] == [True], resumed


@pytest.mark.parametrize(
    ("hook", "change", "how"),
    [
        # No loader follows it.
        (END, count, {"after": 1}),
        (END, grow, {"after": 0, "every": 0}),
        (END, grow, {"after": 1, "data": KeepsPool}),
        (END, grow, {"after": 1, "data": KeepsPool, "batch": -1}),
        *((END, grow, {"after": 1, "restored_in": one}) for one in ("setup", "on_load_checkpoint", "on_train_start")),
        (END, harden, {"after": 1, "restored_in": "on_train_start"}),
        (END, globally, {"after": 1, "restored_in": "on_train_start"}),
        (END, globally, {"after": 1, "restored_in": "setup", "every": 0, "data": Once}),
        # Sets the same, whatever was set before.
        (END, by_epoch, {"after": 1, "batch": -1}),
        (END, globally_by_epoch, {"after": 1, "batch": -1}),
        (START, globally_by_epoch, {"after": 1}),
        (START, harden, {"after": 1, "data": BuildsAnew}),
        # Samples do not follow from counts, and from what is only written down.
        *((END, count, {"after": 0, "batch": one, "every": 0, "data": Reached}) for one in (0, 1, 2)),
        *(
            (END, one, {"after": 0, "every": 0, "data": Reached, "restored_in": "setup"})
            for one in (of_module, lambda_)
        ),
        *((END, one, {"after": 0, "every": 0, "data": Called, "restored_in": "setup"}) for one in (of_called, called)),
    ],
)
def test_what_is_exact_is_not_warned_of(tmp_path: Path, hook: str, change: Hook, how: Any) -> None:
    assert outcome(tmp_path, hook, change, **how) == (True, [])


class SetsLevels(pl.Callback):
    """Sets the level as training begins, and that of the next epoch as one ends."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.datamodule.dataset.level = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.datamodule.dataset.level = trainer.current_epoch + 1


def test_what_the_end_of_an_epoch_sets_that_max_steps_has_cut_is_not_missed(tmp_path: Path) -> None:
    def run(path: Path | None, **options: Any) -> tuple[list[Any], Any]:
        notes = Changes(START, count, "", count)
        trainer = quiet_trainer(StatefulDataCallback(), SetsLevels(), notes, max_epochs=3, **options)
        trainer.fit(BoringModel(), datamodule=Once(), ckpt_path=path)
        return notes.trained, trainer

    whole, _ = run(None)
    first, stopped = run(None, max_steps=2)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    rest, _ = run(tmp_path / "x.ckpt")
    assert first + rest == whole
