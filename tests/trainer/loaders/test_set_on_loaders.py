"""Attributes that hooks set on a loader with an iteration of its own: they come into force as without this package."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import quiet_trainer, train, train_alone
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import StatefulDataCallback, patch_dataloader
from lightning_stateful.errors import StatefulWarning

NUMBERS = torch.arange(24.0)[:, None]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERS)


class Shifts:
    """Leaves out batches, shifts what it gives, and counts it."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.skip, self.shift, self.given = loader, frozenset[int](), 0.0, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if int(batch[0]) not in self.skip:
                self.given += 1
                yield batch + self.shift


class OwnIterator(Shifts):
    def __iter__(self) -> Iterator[Any]:
        self.left = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.left)


class ShiftsItself(DataLoader[Any]):
    skip: frozenset[int] = frozenset()
    shift = 0.0
    given = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if int(batch[0]) not in self.skip:
                self.given += 1
                yield batch + self.shift


class Slotted:
    __slots__ = ("shift", "skip")


class InSlots(Slotted, Shifts):
    """Keeps what hooks set in slots."""


class ByProperty(ShiftsItself):
    """Keeps it in its dict, behind a property."""

    @property
    def shift(self) -> float:  # type: ignore[override]
        return float(self.__dict__.get("_shift", 0.0))

    @shift.setter
    def shift(self, shift: float) -> None:
        self.__dict__["_shift"] = shift


SHIFTED = {"by": 0.0}


class ByVariable(ShiftsItself):
    """Reads a variable of its module."""

    @property
    def shift(self) -> float:  # type: ignore[override]
        return SHIFTED["by"]

    @shift.setter
    def shift(self, shift: float) -> None:
        SHIFTED["by"] = shift

    def __iter__(self) -> Any:
        for batch in DataLoader.__iter__(self):
            self.given += 1
            yield batch + SHIFTED["by"]


class Sets(pl.Callback):
    """Has a loader leave out batches, or shift them, by what it was trained on; on the user's object or the trainer's.

    Args:
        loader: The user's object.
        by: ``"loader"`` or ``"trainer"``.
        name: The attribute to set.
        restores: Whether a resume sets again what a checkpoint has.
    """

    def __init__(self, loader: Any, by: str, name: str, *, restores: bool = False) -> None:
        self.loader, self.by, self.name, self.restores = loader, by, name, restores
        self.counted: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loader = self.loader if self.by == "loader" else trainer.train_dataloader
        self.counted.append(loader.given)
        if self.name == "shift":
            loader.shift = loader.shift + 100
        elif int(batch[0]) % 6 == 0:
            loader.skip = loader.skip | {int(batch[0])}

    def state_dict(self) -> dict[str, Any]:
        return {self.name: getattr(self.loader, self.name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.restores:
            setattr(self.loader, self.name, state[self.name])


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch.flatten().tolist())
        return self.layer(torch.ones(1, 32)).sum()


def loader_of(kind: Any, workers: int = 0, *, streamed: bool = False) -> Any:
    how: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
    dataset: Any = Streamed() if streamed else NUMBERS
    return kind(dataset, **how) if issubclass(kind, DataLoader) else kind(DataLoader(dataset, **how))


def fit(
    loader: Any, *more: pl.Callback, by: str = "loader", name: str = "skip", restores: bool = False, **options: Any
) -> tuple[list[Any], list[int], list[str]]:
    """The batches, the counts that the callback saw, and the warnings of this package."""
    sets, model = Sets(loader, by, name, restores=restores), Records()
    ckpt_path = options.pop("ckpt_path", None)
    how = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": len(more) > 1, **options}
    trainer = quiet_trainer(*more, sets, **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return model.trained, sets.counted, said


@pytest.mark.parametrize("by", ["loader", "trainer"])
@pytest.mark.parametrize(
    ("kind", "workers", "streamed"),
    [
        (Shifts, 0, False),
        (ShiftsItself, 0, False),
        (OwnIterator, 0, False),
        (Shifts, 0, True),
        pytest.param(Shifts, 2, False, marks=pytest.mark.slow),
        pytest.param(ShiftsItself, 2, False, marks=pytest.mark.slow),
        pytest.param(OwnIterator, 2, False, marks=pytest.mark.slow),
        pytest.param(OwnIterator, 0, True, marks=pytest.mark.slow),
    ],
)
def test_what_a_hook_sets_on_a_loader_comes_into_force(kind: Any, workers: int, streamed: bool, by: str) -> None:
    plain, own = (
        fit(loader_of(kind, workers, streamed=streamed), *more, by=by) for more in ([], [StatefulDataCallback(seed=0)])
    )
    assert own[:2] == plain[:2]
    assert len(plain[0]) < 24


@pytest.mark.parametrize("by", ["loader", "trainer"])
@pytest.mark.parametrize("kind", [InSlots, ByProperty, ByVariable])
def test_so_does_what_it_keeps_in_slots_behind_a_property_or_elsewhere(kind: Any, by: str) -> None:
    trained = []
    for more in ([], [StatefulDataCallback(seed=0)]):
        SHIFTED["by"] = 0.0
        trained.append(fit(loader_of(kind), *more, by=by, name="shift")[0])
    assert trained[0] == trained[1]
    assert trained[0][-1][0] > 1000


@pytest.mark.parametrize("step", [3, 7])
def test_a_variable_that_it_reads_is_compared_within_the_first_epoch(tmp_path: Path, step: int) -> None:
    SHIFTED["by"] = 0.0
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole, _, _ = fit(loader_of(ByVariable), StatefulDataCallback(seed=0), saver, name="shift")
    for restores in (False, True):
        SHIFTED["by"] = 0.0
        path = tmp_path / f"step={step}.ckpt"
        resumed, _, said = fit(
            loader_of(ByVariable), StatefulDataCallback(seed=0), name="shift", restores=restores, ckpt_path=path
        )
        assert (resumed == whole[step:]) is restores
        assert ("test_set_on_loaders.SHIFTED was set in the run that wrote" in "".join(said)) is not restores


@pytest.mark.parametrize("kind", [Shifts, ShiftsItself])
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("step", [3, 7])
def test_a_resume_that_lacks_it_within_the_first_epoch_is_warned_of(
    tmp_path: Path, kind: Any, restores: bool, step: int
) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole, _, said = fit(loader_of(kind), StatefulDataCallback(seed=0), saver, name="shift")
    assert not said
    path = tmp_path / f"step={step}.ckpt"
    resumed, _, said = fit(
        loader_of(kind), StatefulDataCallback(seed=0), name="shift", restores=restores, ckpt_path=path
    )
    is_exact = restores and kind is ShiftsItself
    assert (resumed == whole[step:]) is is_exact
    assert (f"{kind.__name__}.shift was set in the run that wrote" in "".join(said)) is not is_exact
    # One without a length is read ahead.
    assert not restores or is_exact or resumed[1:] == whole[step + 1 :]


def test_what_is_set_on_a_loader_that_was_patched_before_comes_into_force() -> None:
    plain = fit(loader_of(ShiftsItself))
    patched: Any = patch_dataloader(loader_of(ShiftsItself), seed=0)
    patched.shift = 0.5
    own = fit(patched, StatefulDataCallback(seed=0))
    assert [[one - 0.5 for one in batch] for batch in own[0]] == plain[0]


def shifted(folder: Path, kind: str, by: str) -> Any:
    """By how much batches were shifted with the callback and without it, and what hooks have counted."""
    found = []
    for more in ([], [StatefulDataCallback(seed=0)]):
        trained, counted, _ = fit(loader_of(globals()[kind]), *more, by=by, name="shift", **on_ranks())
        found.append(([int(batch[0]) // 100 for batch in trained], counted))
    return found


def test_so_it_does_on_ranks_where_the_trainer_reads_the_users_object(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path / "ranks")
    # Lightning builds another loader in place of a DataLoader that it deals out.
    for kind, by in (
        ("Shifts", "loader"),
        ("Shifts", "trainer"),
        ("ShiftsItself", "loader"),
        ("ShiftsItself", "trainer"),
    ):
        for plain, own in ranks.of(shifted, kind, by):
            assert own == plain, (kind, by)


class CountsReads(Numbers):
    """Counts what each worker reads."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return {**super().__getitem__(index), "x": torch.full((4,), float(self.count))}


@pytest.mark.filterwarnings("ignore:.*changes 'count' whenever:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*changes 'CountsReads.count' whenever:lightning_stateful.errors.StatefulWarning")
def test_workers_that_persist_go_on_where_lightning_is_to_seed_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    class Sees(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(float(batch["x"].max()))
            return super().training_step(batch, batch_idx)

    def make() -> Any:
        return DataLoader(CountsReads(8), batch_size=4, num_workers=1, persistent_workers=True)

    found = []
    for run in (train, train_alone):
        seen: list[float] = []
        run(make, model=Sees(), max_epochs=3)
        found.append(seen)
    assert found[0] == found[1] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]
