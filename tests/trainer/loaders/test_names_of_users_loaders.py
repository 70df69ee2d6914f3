"""Attributes and methods of a user's loader that bear names of this package's own: hooks find those of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, patch_dataloader
from lightning_stateful.errors import StatefulWarning, StateMismatchError

NUMBERS = torch.arange(24.0)[:, None]
# Of the proxy, of a stateful loader and of its tracker, some of them methods there, and one that nobody has.
NAMES = ["loader", "original", "waited", "seed", "path", "order", "progress", "batches", "_reader", "is_new"]


class ByEpoch(DataLoader[Any]):
    """Shifts what it gives by the epoch that it was told, and by what hooks set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 100 * self.epoch + sum(1000 * self.__dict__.get(name, 0) for name in NAMES)


class Holds:
    """Shifts what a DataLoader gives likewise."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.epoch = inner, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            yield batch + 100 * self.epoch + sum(1000 * self.__dict__.get(name, 0) for name in NAMES)


class Numbers:
    """Gives numbers without a DataLoader, shifted by what hooks set."""

    epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Any]:
        for at in range(12):
            yield NUMBERS[2 * at : 2 * at + 2] + sum(1000 * self.__dict__.get(name, 0) for name in NAMES)


MAKES: dict[str, Any] = {
    "subclass": lambda: ByEpoch(NUMBERS, batch_size=2, shuffle=True),
    "holder": lambda: Holds(DataLoader(NUMBERS, batch_size=2, shuffle=True)),
}


class Sets(pl.Callback):
    """Tells the trainer's loader the epoch, or sets an attribute of it behind the third batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.name == "set_epoch":
            trainer.train_dataloader.set_epoch(trainer.current_epoch)
        elif self.name == "epoch":
            trainer.train_dataloader.epoch = trainer.current_epoch
        self.found.append(trainer.train_dataloader.epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.name in NAMES and trainer.global_step == 3:
            setattr(trainer.train_dataloader, self.name, 1)
            self.found.append(getattr(trainer.train_dataloader, self.name))


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch.flatten().tolist())
        return self.layer(torch.ones(1, 32)).sum()


def fit(loader: Any, name: str, *more: pl.Callback, **options: Any) -> tuple[list[Any], list[Any]]:
    """The batches, and what the callback found."""
    sets, model = Sets(name), Records()
    ckpt_path = options.pop("ckpt_path", None)
    options = {"max_epochs": 3, "limit_val_batches": 0, "enable_checkpointing": len(more) > 1, **options}
    quiet_trainer(*more, sets, **options).fit(model, loader, ckpt_path=ckpt_path)
    return model.trained, sets.found


def shifts(trained: list[Any]) -> list[int]:
    return [int(batch[0]) // 100 for batch in trained]


@pytest.mark.parametrize("name", ["set_epoch", "epoch"])
@pytest.mark.parametrize("make", MAKES)
def test_a_loader_is_told_the_epoch_by_its_own_method_or_attribute(tmp_path: Path, make: str, name: str) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    plain, found = fit(MAKES[make](), name)
    whole, found_here = fit(MAKES[make](), name, StatefulDataCallback(seed=0), saver)
    assert shifts(whole) == shifts(plain)
    assert found_here == found == [0, 1, 2]
    for step in (5, 12, 17, 24):
        path = tmp_path / f"step={step}.ckpt"
        resumed, _ = fit(MAKES[make](), name, StatefulDataCallback(seed=0), ckpt_path=path)
        assert resumed == whole[step:], step


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [*MAKES.values(), Numbers])
def test_a_hook_sets_attributes_of_any_name(make: Any, name: str) -> None:
    plain = fit(make(), name)
    own = fit(make(), name, StatefulDataCallback(seed=0))
    assert shifts(own[0]) == shifts(plain[0])
    assert own[1] == plain[1]
    assert shifts(plain[0])[-1] == 10


def test_a_loop_tells_it_the_epoch() -> None:
    patched: Any = patch_dataloader(MAKES["subclass"](), seed=0)
    for epoch in (0, 1, 3):
        patched.set_epoch(epoch)
        assert {int(batch[0]) // 100 for batch in patched} == {epoch}
    patched.epoch = 5
    assert {int(batch[0]) // 100 for batch in patched} == {5}


class ByMethods(DataLoader[Any]):
    """Shifts what it gives by attributes that methods set, in ``__iter__`` and as it collates."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seed = self.epoch = self.progress = self.level = 0
        super().__init__(*arguments, collate_fn=self.collated, **options)

    def step(self) -> None:
        self.seed, self.epoch, self.progress = self.seed + 1, self.epoch + 1, self.progress + 1
        self.level += 1

    def collated(self, samples: list[Any]) -> Any:
        return torch.stack(samples) + 100 * self.level

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 1000 * (self.seed + self.epoch + self.progress)


def test_methods_that_set_such_attributes_do_so_on_the_users_object() -> None:
    found = []
    for patch in (lambda loader: loader, lambda loader: patch_dataloader(loader, seed=0)):
        loader = patch(ByMethods(NUMBERS, batch_size=2))
        for _ in range(3):
            loader.step()
            loader.level += 1
            found.append([batch.flatten().tolist() for batch in loader])
    assert found[:3] == found[3:]
    assert int(found[0][0][0]) == 3200


def in_tens(samples: list[Any]) -> Any:
    return 10 * torch.stack(samples)


class Collates(pl.Callback):
    """Has the loader collate otherwise from the second epoch on; on the user's object or the trainer's."""

    def __init__(self, loader: Any, by: str) -> None:
        self.loader, self.by = loader, by

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            (self.loader if self.by == "loader" else trainer.train_dataloader).collate_fn = in_tens


@pytest.mark.parametrize("by", ["loader", "trainer"])
@pytest.mark.parametrize("kind", [DataLoader, ByEpoch])
def test_a_collate_fn_that_a_hook_sets_is_used_from_the_next_epoch_on(tmp_path: Path, kind: Any, by: str) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=12, save_top_k=-1, filename="{step}")
    trained = []
    for more in ([], [StatefulDataCallback(seed=0), saver]):
        model, loader = Records(), kind(NUMBERS, batch_size=2)
        options: Any = {"max_epochs": 3, "limit_val_batches": 0, "enable_checkpointing": bool(more)}
        quiet_trainer(*more, Collates(loader, by), **options).fit(model, loader)
        trained.append(model.trained)
    assert trained[0] == trained[1]
    assert trained[0][-1] == [220, 230]
    for step in (12, 24):
        model, loader = Records(), kind(NUMBERS, batch_size=2)
        trainer = quiet_trainer(StatefulDataCallback(seed=0), Collates(loader, by), max_epochs=3)
        if step == 12:
            trainer.fit(model, loader, ckpt_path=tmp_path / f"step={step}.ckpt")
            assert model.trained == trained[0][step:]
        else:
            # A warning is an error here.
            said = r"is not what it was when|collate_fn as earlier epochs|collate_fn was in_tens .* and is default"
            with pytest.raises((StateMismatchError, StatefulWarning), match=said):
                trainer.fit(model, loader, ckpt_path=tmp_path / f"step={step}.ckpt")
