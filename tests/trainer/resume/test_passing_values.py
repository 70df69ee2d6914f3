"""Buffers and attributes that no checkpoint holds: those that training has changed are named on a resume."""

from __future__ import annotations

import copy
import decimal
import threading
import types
import warnings
from collections import UserDict, deque
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.module_state import passing_values


class Mean(torch.nn.Module):
    """A running mean, and a table that stays as it was built."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=persistent)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("bank", torch.zeros(50_000, 2), persistent=False)


class Model(BoringModel):
    """Averages its losses over an epoch."""

    def __init__(self, *, persistent: bool, restores: bool = False) -> None:
        super().__init__()
        self.mean, self.restores = Mean(persistent=persistent), restores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.total += 1
        self.mean.bank[self.trainer.global_step] += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.mean.total.zero_()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["total"] = self.mean.total.clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.restores:
            self.mean.total.copy_(checkpoint["total"])


def run(folder: Path, path: Path | None = None, **how: bool) -> list[str]:
    """The warnings of a run of two epochs of four batches, which saves after each batch."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = quiet_trainer(
        *([] if path else [saver]),
        StatefulDataCallback(),
        max_epochs=2,
        limit_val_batches=0,
        enable_checkpointing=not path,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Model(**how), DataLoader([torch.ones(32)] * 8, batch_size=2), ckpt_path=path)
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize(
    ("how", "step", "is_told"),
    [
        ({"persistent": False}, 2, True),
        ({"persistent": False}, 6, True),
        # Of the last batch of an epoch, at whose end it is summed up.
        ({"persistent": False}, 4, True),
        ({"persistent": False, "restores": True}, 2, False),
        ({"persistent": True}, 2, False),
    ],
)
def test_what_training_has_changed_and_a_resume_lacks_is_named(
    tmp_path: Path, how: dict[str, bool], step: int, is_told: bool
) -> None:
    assert run(tmp_path, **how) == []
    said = run(tmp_path, tmp_path / f"step={step}.ckpt", **how)
    (told,) = [one for one in said if "no checkpoint holds (persistent=False)" in one]
    assert [name in told for name in ("mean.total", "mean.bank", "table")] == [is_told, True, False]


class Remembers(BoringModel):
    """Has a temperature for each epoch, and a queue of what it has seen."""

    def __init__(self, restores: str = "") -> None:
        super().__init__()
        self.temperature, self.seen, self.restores = 1.0, deque(maxlen=3), restores
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.temperature = 1 / (2 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.mean())
        found = super().training_step(batch, batch_idx)
        self.losses.append(found["loss"].item())
        return found

    def on_train_epoch_end(self) -> None:
        self.losses.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.extend(checkpoint["seen"] if self.restores else ())

    def on_train_start(self) -> None:
        if self.restores == "all":
            self.on_train_epoch_start()


class Counts(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(
    ("step", "restores", "expected"),
    [
        (2, "", ["temperature was 0.5 and is 1.0", "seen", "losses"]),
        (2, "seen", ["temperature was 0.5 and is 1.0", "losses"]),
        (2, "all", ["losses"]),
        # The epoch's start sets the temperature, and the end of the one before empties the list.
        (5, "", ["temperature was 0.3333333333333333 and is 1.0", "seen", "losses"]),
        (4, "", ["seen"]),
    ],
)
def test_attributes_that_a_resume_lacks_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, restores: str, expected: list[str]
) -> None:
    at_end = step == 4
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=0 if at_end else 1, every_n_epochs=int(at_end)
    )
    caplog.set_level("INFO", logger="lightning.pytorch")
    for path in (None, tmp_path / f"step={step}.ckpt"):
        caplog.clear()
        trainer = quiet_trainer(
            Counts(),
            *([] if path else [saver]),
            StatefulDataCallback(),
            max_epochs=2,
            limit_val_batches=0,
            enable_checkpointing=not path,
        )
        trainer.fit(Remembers(restores), DataLoader([torch.ones(32)] * 8, batch_size=2), ckpt_path=path)
        found = [one for one in caplog.messages if "Attributes of the module, callbacks, opti" in one]
        if path is None:
            assert not found
    (said,) = found
    named = said.partition("are others here: ")[2].partition(". If training")[0]
    names = [*expected, f"Counts.batches was {step} and is 0"]
    assert named == some_of(names)


class Decays:
    """An object of a user's."""

    def __init__(self) -> None:
        self.value = 1.0


class Teaches(Callback):
    """Keeps an average of the weights, and a scheduler of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.teacher = copy.deepcopy(pl_module.layer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.optimizer = pl_module.optimizers().optimizer
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 15)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.scheduler.step()
        with torch.no_grad():
            self.teacher.weight.lerp_(pl_module.layer.weight, 0.1)
        pl_module.helpers[0].value *= 0.5


class Helped(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.helpers = [Decays()]


def said_of_attributes(
    folder: Path,
    caplog: Any,
    model: Any,
    *callbacks: type[Callback],
    steps: int = 4,
    is_first: bool = False,
    batches: int = 6,
) -> str:
    """What a resume behind two steps says once of attributes, and the run before it does not."""
    caplog.set_level("INFO", logger="lightning.pytorch")
    for path in (None, folder / "x.ckpt"):
        made = [kind() for kind in callbacks]
        ordered = [StatefulDataCallback(), *made] if is_first else [*made, StatefulDataCallback()]
        limits = {"max_epochs": None, "max_steps": steps if path else 2, "limit_val_batches": 0}
        trainer = quiet_trainer(*ordered, **limits)
        trainer.fit(model(), DataLoader([torch.ones(32)] * 2 * batches, batch_size=2), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(folder / "x.ckpt")
    (said,) = [one for one in caplog.messages if "Attributes of the module, callbacks, opti" in one]
    return str(said)


def test_so_are_objects_networks_and_schedulers_that_are_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = r"set learning rates and .*others here: Teaches\.scheduler\.last_epoch was 2 and is 0\. If"
    with pytest.warns(StatefulWarning, match=schedule):
        said = said_of_attributes(tmp_path, caplog, Helped, Teaches, steps=5)
    assert "others here: helpers[0].value was 0.25 and is 1.0, Teaches.teacher. If" in said


class KeepsLosses(pl.LightningDataModule):
    """Holds what training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = [0.0]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(12, 32), batch_size=2)


class WritesLosses(BoringModel):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.datamodule.losses[0] += 1.0  # type: ignore[attr-defined]


def test_so_is_what_a_data_module_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    for path in (None, tmp_path / "x.ckpt"):
        trainer = quiet_trainer(StatefulDataCallback(), max_epochs=1, max_steps=4 if path else 2, limit_val_batches=0)
        trainer.fit(WritesLosses(), datamodule=KeepsLosses(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    (said,) = [one for one in caplog.messages if "Attributes of the module, callbacks, opti" in one]
    assert "are others here: KeepsLosses.losses. If" in said


def test_hyperparameters_that_lightning_makes_for_a_data_module_without_any_as_it_saves_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    for path in (None, tmp_path / "step=2.ckpt"):
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [StatefulDataCallback(), *([] if path else [saver])]
        trainer = quiet_trainer(*callbacks, limit_val_batches=0, enable_checkpointing=not path)
        trainer.fit(BoringModel(), datamodule=KeepsLosses(), ckpt_path=path)
    assert not [one for one in caplog.messages if "Attributes of the module, callbacks, opti" in one]


class Replays(Callback):
    """Keeps what it has seen, which it adds to before a batch is trained on."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch.sum()))


class Anneals(Callback):
    """Sets a temperature for each epoch."""

    temperature = 1.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.temperature = 1 / (2 + trainer.current_epoch)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("at_end", [False, True])
def test_what_a_callback_adds_to_at_a_batch_is_named_wherever_it_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_first: bool, at_end: bool
) -> None:
    others, batches = (Replays, Anneals), 2 if at_end else 6
    said = said_of_attributes(tmp_path, caplog, BoringModel, *others, is_first=is_first, batches=batches)
    named = "Replays.seen" if at_end else "Replays.seen, Anneals.temperature was 0.5 and is 1.0"
    assert f"others here: {named}. If" in said


class Loops:
    def __init__(self) -> None:
        self.me: Any = [self]


class HoldsAnything(BoringModel):
    """Has attributes that cannot be read as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.meta, self.sparse = torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()
        self.narrow = [torch.ones(3, dtype=kind) for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64)]
        self.lock, self.rest, self.loops, self.cycle = threading.Lock(), iter([1]), Loops(), list[Any]()
        self.cycle.append(self.cycle)
        self.deep = [[[[0] * 100] * 100] * 100] * 100
        self.objects = np.array([object(), 1], dtype=object)
        self.register_buffer("whole", torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.narrow[1] = torch.full((3,), 2.0 + batch_idx).to(torch.float8_e4m3fn)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_attributes_that_cannot_be_read_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = said_of_attributes(tmp_path, caplog, HoldsAnything)
    assert "others here: narrow. If" in said


class HoldsNumbers(BoringModel):
    """Keeps numbers in what is none of Python's own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.exact = np.float32(0), decimal.Decimal(0)
        self.held, self.user, self.raw = types.SimpleNamespace(a=0), UserDict({"a": 0}), bytearray(b"a")
        self.sparse = torch.zeros(3).to_sparse()
        self.objects = np.array([0, "a"], dtype=object)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean, self.exact = np.float32(self.mean + 1), self.exact + 1
        self.held.a, self.user["a"] = self.held.a + 1, self.user["a"] + 1
        self.raw.append(1)
        self.sparse = self.sparse + torch.ones(3).to_sparse()
        self.objects[0] += 1
        return super().training_step(batch, batch_idx)


def test_numbers_of_other_types_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(passing_values, "some_of", ", ".join)
    said = said_of_attributes(tmp_path, caplog, HoldsNumbers)
    named = said.partition("are others here: ")[2].partition(". If training")[0].split(", ")
    assert [one.partition(" ")[0] for one in named] == [
        "mean",
        "exact",
        "held.a",
        "user.data",
        "raw",
        "sparse",
        "objects",
    ]


class Trains(BoringModel):
    """Has attributes of many kinds, of which one takes part in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.mean = self.current = self.best = self.given = 1.0
        self.history: deque[float] = deque(maxlen=5)
        self.losses: list[torch.Tensor] = []
        self.count = 0

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch

    def scaled(self, factor: float) -> Any:
        return self.layer(self.current * torch.ones(1, 32)).sum() * factor

    def taken_from(self, batch: torch.Tensor) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.current = float(batch.mean())
        loss = self.scaled(self.taken_from(batch))
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        self.log_dict({"mean": self.mean, "count": self.count})
        self.losses.append(loss.detach())
        self.count += 1
        if loss < self.best:
            self.best = float(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


class ByScale(Trains):
    def taken_from(self, batch: torch.Tensor) -> float:
        return self.scale


class ByMean(Trains):
    def taken_from(self, batch: torch.Tensor) -> float:
        return self.mean


class ByBank(Trains):
    """Keeps an average of each sample in a large table."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.ones(60_000, 3)

    def taken_from(self, batch: torch.Tensor) -> float:
        row = int(10 * batch.mean())
        self.bank[row] = 0.5 * self.bank[row] + 0.5 * batch.mean()
        return float(self.bank[row].mean())


class ByArray(ByBank):
    def __init__(self) -> None:
        super().__init__()
        self.bank: Any = self.bank.double().numpy()

    def taken_from(self, batch: torch.Tensor) -> float:
        row = int(10 * batch.mean())
        self.bank[row] = 0.5 * self.bank[row] + 0.5 * float(batch.mean())
        return float(self.bank[row].mean())


class ByHistory(Trains):
    def taken_from(self, batch: torch.Tensor) -> float:
        factor = 1.0 + sum(self.history)
        self.history.append(float(batch.mean()))
        return factor


class BySometimes(Trains):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.given = 2.0 + self.current_epoch
        return super().training_step(batch, batch_idx)

    def taken_from(self, batch: torch.Tensor) -> float:
        return self.given


class ByGiven(BySometimes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.given = 2.0 + self.current_epoch
        return super().training_step(batch, batch_idx)


class ByDefault(Trains):
    """Has its value from the class until training sets it."""

    pace = 1.0

    def taken_from(self, batch: torch.Tensor) -> float:
        self.pace = self.pace * 0.5 + float(batch.mean())
        return self.pace


class ByFirst(Trains):
    """Sets its value in the first batch that finds none, and in every fourth."""

    given: float

    def taken_from(self, batch: torch.Tensor) -> float:
        if not hasattr(self, "given") or self.trainer.global_step % 4 == 0:
            self.given = float(batch.mean())
        return self.given


class ByHyperparameter(Trains):
    """Lowers one of its hyperparameters, which Lightning saves as it was given."""

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def taken_from(self, batch: torch.Tensor) -> float:
        self.hparams["tau"] *= 0.5
        return float(self.hparams["tau"])


class ByClosure(Trains):
    """Has a function that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def factor() -> float:
            nonlocal calls
            calls += 1
            return 1.0 + calls

        self.factor = factor

    def taken_from(self, batch: torch.Tensor) -> float:
        return float(self.factor())


class ByFunction(Trains):
    """Trains with another function of torch from its second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.how: Any = torch.nn.functional.relu

    def on_train_epoch_start(self) -> None:
        self.how = torch.nn.functional.selu if self.current_epoch else self.how

    def taken_from(self, batch: torch.Tensor) -> float:
        return float(self.how(batch.mean()))


class ByFunctionBuilt(Trains):
    """Builds a function where it is needed first."""

    how: Any = None

    def taken_from(self, batch: torch.Tensor) -> float:
        if self.how is None:
            self.how = torch.relu
        return float(self.how(batch.mean()))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Trains, ""),
        (ByFunction, "how was function torch.nn.functional.selu and is function torch.nn.functional.relu"),
        (ByFunctionBuilt, ""),
        (ByHyperparameter, "hparams"),
        (ByClosure, "factor.calls was 6 and is 0"),
        (ByFirst, "given was"),
        (ByGiven, ""),
        (ByDefault, "pace was"),
        (ByScale, "scale was 2.0 and is 1.0"),
        (ByMean, "mean was"),
        (ByBank, "bank"),
        (ByArray, "bank"),
        (ByHistory, "history"),
        (BySometimes, "given was 3.0 and is 1.0"),
    ],
)
def test_attributes_that_training_uses_and_a_resume_lacks_are_warned_of(tmp_path: Path, kind: Any, named: str) -> None:
    data, weights = [torch.full((32,), number / 10) for number in range(8)], []
    for path in (None, tmp_path / "step=6.ckpt"):
        model = kind()
        torch.nn.init.constant_(model.layer.weight, 0.1)
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        options = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": not path}
        trainer = quiet_trainer(*([] if path else [saver]), StatefulDataCallback(seed=0), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=path)
        weights.append(model.layer.weight)
        said = [str(one.message) for one in caught if "Attributes of the module that training_step uses" in str(one)]
        assert len(said) == bool(path and named)
    assert torch.equal(*weights) == (not named)
    assert all(named in one.partition("others here: ")[2] for one in said)


class Ramps(Trains):
    """Counts batches as they reach the model, and keeps a mean of them."""

    def __init__(self, *, restores: bool = False) -> None:
        super().__init__()
        self.count, self.means, self.restores = 0, {"mean": torch.zeros(32)}, restores

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        self.means["mean"].mul_(0.9).add_(0.1 * batch.mean(0))
        return batch * (1 + self.count / 10) - self.means["mean"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ramp"] = (self.count, self.means["mean"].clone())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.restores:
            self.count, self.means["mean"] = checkpoint["ramp"]


class RampsInData(pl.LightningDataModule):
    count = 0

    def train_dataloader(self) -> Any:
        return DataLoader([torch.full((32,), number / 10) for number in range(8)], batch_size=2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        return batch * (1 + self.count / 10)


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize(
    ("make", "data", "named"),
    [
        (Ramps, DataLoader([torch.full((32,), number / 10) for number in range(8)], batch_size=2), "count was"),
        (partial(Ramps, restores=True), DataLoader([torch.ones(32)] * 8, batch_size=2), ""),
        (BoringModel, RampsInData, "RampsInData.count was"),
    ],
)
def test_so_are_those_that_hooks_of_the_transfer_of_batches_change(
    tmp_path: Path, make: Any, data: Any, named: str, step: int
) -> None:
    weights = []
    for path in (None, tmp_path / f"step={step}.ckpt"):
        model = make()
        torch.nn.init.constant_(model.layer.weight, 0.1)
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        options = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": not path}
        trainer = quiet_trainer(*([] if path else [saver]), StatefulDataCallback(seed=0), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, data() if isinstance(data, type) else data, ckpt_path=path)
        weights.append(model.layer.weight)
        told = [str(one.message) for one in caught if "that hooks of the transfer of batches use" in str(one)]
        assert [named in one for one in told] == [True] * bool(path and named), told
    assert torch.equal(*weights) is not bool(named)


class Clips(Callback):
    """Clips gradients to the mean of the norms so far."""

    def __init__(self) -> None:
        self.norms = [0.01]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        mean = sum(self.norms) / len(self.norms)
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(pl_module.parameters(), mean)))


class WarmsUp(Callback):
    """Raises the learning rate by the batches that it has seen."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        optimizer = pl_module.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * self.batches


class KeepsItsCount(WarmsUp):
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class SetsFactor(Callback):
    """Sets a factor of the loss from an average of its own."""

    def __init__(self) -> None:
        self.average = 1.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.average = 0.5 * self.average + 0.1
        model = pl_module
        model.scale = self.average


class Watches(Callback):
    """Logs what it has counted, and keeps an average of the weights for later."""

    def __init__(self) -> None:
        self.count, self.average, self.rates = 0, torch.zeros(32), []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.begun = self.count

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.count += 1
        found = {}
        found["rate"] = self.count / (1 + self.begun)
        self.rates.append(self.count - self.begun)
        pl_module.log("rate", found["rate"])
        trainer.logged_metrics["rates"] = torch.tensor(self.rates)
        self.average.lerp_(pl_module.layer.weight[0].detach(), 0.1)
        pl_module.layer.weight.requires_grad_(True)


class ClipsItself(Trains):
    """Clips gradients of its own by what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [0.01]

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **how: Any) -> None:
        mean = sum(self.norms) / len(self.norms)
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), mean)))


@pytest.mark.parametrize(
    ("callback", "kind", "named"),
    [
        (Clips, BoringModel, "Attributes of the callbacks that hooks which change the module, its gradients or optim"),
        (WarmsUp, BoringModel, "WarmsUp.batches was 3 and is 0"),
        (SetsFactor, ByScale, "SetsFactor.average was"),
        (KeepsItsCount, BoringModel, ""),
        (Watches, BoringModel, ""),
        (Watches, ClipsItself, "Attributes of the module that training_step uses"),
    ],
)
def test_so_are_those_of_callbacks_by_which_hooks_change_training(
    tmp_path: Path, callback: Any, kind: Any, named: str
) -> None:
    data, weights = [torch.full((32,), number / 10) for number in range(8)], []
    for path in (None, tmp_path / "step=3.ckpt"):
        model = kind()
        torch.nn.init.constant_(model.layer.weight, 0.1)
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        options = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": not path}
        trainer = quiet_trainer(*([] if path else [saver]), callback(), StatefulDataCallback(seed=0), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=path)
        weights.append(model.layer.weight)
        said = [str(one.message) for one in caught if "Attributes of the" in str(one.message)]
        assert any(named in one for one in said) == bool(path and named), said
    assert torch.equal(*weights) is not bool(named)
