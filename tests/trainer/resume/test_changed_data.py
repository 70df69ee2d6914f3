"""Data that a hook changes between epochs and a data module restores: a resume within an epoch goes on with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import LedgerModel, Numbers, batches
from support.runs import stopped, train_alone
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stateful.errors import StateMismatchError

SAYS_NOTHING = pytest.mark.filterwarnings("error::lightning_stateful.errors.StatefulWarning")


class Listed(Dataset[Any]):
    """As many samples as its list has, each of a number in it."""

    def __init__(self) -> None:
        self.items = list(range(12))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return Numbers(48)[self.items[index]]


class Chosen(pl.LightningDataModule):
    """Chooses other samples for each epoch, saves the choice, and restores it."""

    def __init__(self, kind: str, *, restores: bool) -> None:
        super().__init__()
        self.kind, self.restores = kind, restores
        self.of: Any = Subset(Subset(Numbers(48), range(40)), list(range(12))) if kind == "subset" else Listed()

    @property
    def chosen(self) -> list[int]:
        held: list[int] = self.of.indices if self.kind == "subset" else self.of.items
        return held

    @chosen.setter
    def chosen(self, value: list[int]) -> None:
        setattr(self.of, "indices" if self.kind == "subset" else "items", value)

    def train_dataloader(self) -> Any:
        return DataLoader(self.of, batch_size=3, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": self.chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.restores:
            self.chosen = state_dict["chosen"]


class Chooses(LedgerModel):
    """Has other samples chosen as an epoch ends."""

    def on_train_epoch_end(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        data.chosen = [number + 7 for number in data.chosen]


def run(make: Any, **options: Any) -> Any:
    return train_alone(make, model=Chooses(), **options)


@SAYS_NOTHING
@pytest.mark.parametrize("kind", ["subset", "list"])
@pytest.mark.parametrize("moment", [(1, 1), (2, 2), (0, 1)])
def test_what_is_restored_is_gone_on_with_exactly(tmp_path: Path, kind: str, moment: tuple[int, int]) -> None:
    epoch, batch = moment
    whole = run(lambda: Chosen(kind, restores=True))
    stopped(tmp_path / "a.ckpt", lambda: Chosen(kind, restores=True), epoch=epoch, batch=batch, run=run)
    resumed = run(lambda: Chosen(kind, restores=True), ckpt_path=tmp_path / "a.ckpt")
    of_resumed = [one for at in range(3) for one in batches(resumed.ledger, at)]
    of_whole = [one for at in range(3) for one in batches(whole.ledger, at)]
    assert of_resumed == of_whole[4 * epoch + batch + 1 :]


@pytest.mark.filterwarnings("ignore::lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize("kind", ["subset", "list"])
def test_what_is_not_restored_is_refused(tmp_path: Path, kind: str) -> None:
    stopped(tmp_path / "a.ckpt", lambda: Chosen(kind, restores=True), epoch=1, batch=1, run=run)
    with pytest.raises(StateMismatchError, match="Batch 0 of epoch 1 is not what it was"):
        run(lambda: Chosen(kind, restores=False), ckpt_path=tmp_path / "a.ckpt")


class Grows(pl.Callback):
    """Adds samples as an epoch ends, and restores them in a hook that comes behind the building of loaders."""

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.datamodule.chosen = [*trainer.datamodule.chosen, 40, 41, 42]

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        if trainer.ckpt_path:
            trainer.datamodule.chosen = [*range(12), 40, 41, 42]


def test_where_loaders_are_built_before_a_hook_restores_the_data_the_error_says_where_to(tmp_path: Path) -> None:
    def make() -> Any:
        return Chosen("list", restores=False)

    stopped(tmp_path / "a.ckpt", make, epoch=1, batch=1, run=train_alone, callbacks=[Grows()])
    with pytest.raises(
        StateMismatchError, match=r"(?s)length: saved 15, now 12.*before loaders are built, in load_stat"
    ):
        train_alone(make, callbacks=[Grows()], ckpt_path=tmp_path / "a.ckpt")


class Cached(Dataset[Any]):
    """Holds its samples, of which a hook replaces some, and where the next ones come from."""

    def __init__(self) -> None:
        self.position, self.cache = 12, [(index, torch.full((4,), index / 10)) for index in range(12)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        number, features = self.cache[index]
        return {"id": number, "x": features}

    def replace(self) -> None:
        new = [(self.position + index, torch.full((4,), index / 7)) for index in range(3)]
        self.position, self.cache = self.position + 3, self.cache[3:] + new


class Replaces(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.train_dataloader.dataset.replace()


@pytest.mark.parametrize("moment", [(1, 1), (0, 3)])
def test_a_cache_that_was_replaced_with_a_count_beside_it_is_named_within_an_epoch_too(
    tmp_path: Path, moment: tuple[int, int]
) -> None:
    def make() -> Any:
        return DataLoader(Cached(), 3, shuffle=True)

    epoch, batch = moment
    stopped(tmp_path / "a.ckpt", make, epoch=epoch, batch=batch, run=train_alone, callbacks=[Replaces()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_alone(make, callbacks=[Replaces()], ckpt_path=tmp_path / "a.ckpt")
    said = [one for one in caught if "Cached.cache had been changed in training" in str(one.message)]
    assert len(said) == (epoch > 0)
