"""Samplers and data that the user's code changes between epochs: a resume is exact wherever that code restores them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harm.basics import LENGTH, Indices, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError

CHANGED = r"ignore:.*(was changed between two epochs|no longer yields):lightning_stateful.errors.StatefulWarning"
pytestmark = pytest.mark.filterwarnings(CHANGED)


class ByLevel(Sampler[int]):
    """Draws by a level that a curriculum sets."""

    level = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.level).choices(range(LENGTH), k=LENGTH))


class Ordered(Indices):
    """Has its samples in an order that may be changed."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(self.order[index])


class ByLevels:
    """A loader over a sampler whose level goes up at the end of an epoch."""

    def __init__(self) -> None:
        self.sampler = ByLevel()

    def loader(self) -> DataLoader[Any]:
        return loader(0, sampler=self.sampler)

    def end_epoch(self, epoch: int) -> None:
        self.sampler.level += 3

    def state(self) -> Any:
        return self.sampler.level

    def restore(self, state: Any) -> None:
        self.sampler.level = state


class ByWeights(ByLevels):
    """A loader over torch's sampler, whose weights change."""

    def __init__(self) -> None:
        self.sampler: Any = WeightedRandomSampler(torch.ones(LENGTH).double().tolist(), LENGTH)

    def end_epoch(self, epoch: int) -> None:
        self.sampler.weights = torch.arange(LENGTH).double() + 5 * epoch

    def state(self) -> Any:
        return self.sampler.weights

    def restore(self, state: Any) -> None:
        self.sampler.weights = state


class InOrder(ByLevels):
    """A loader over data that come in another order in each epoch."""

    options: dict[str, Any] = {"shuffle": False}  # noqa: RUF012  # read alone

    def __init__(self) -> None:
        self.data = Ordered()

    def loader(self) -> DataLoader[Any]:
        return loader(0, dataset=self.data, **self.options)

    def end_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.data.order)

    def state(self) -> Any:
        return list(self.data.order)

    def restore(self, state: Any) -> None:
        self.data.order = state


class Shuffled(InOrder):
    """The same data, shuffled by torch."""

    options = {"shuffle": True}  # noqa: RUF012  # read alone


class OfModule(pl.LightningModule):
    """A model that has the loader, changes it, and restores it in one of its hooks."""

    def __init__(self, kind: type[ByLevels], hook: str, stop: tuple[str, int] = ("", 0), path: str = "") -> None:
        super().__init__()
        self.held, self.hook, self.weight = kind(), hook, torch.nn.Parameter(torch.zeros(()))
        self.trained: list[list[int]] = []
        self.restored: Any = None

    def train_dataloader(self) -> Any:
        return self.held.loader()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch.tolist())
        return self.weight * batch.float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self) -> None:
        self.held.end_epoch(self.current_epoch)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["held"] = self.held.state()

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.restored = checkpoint["held"]
        if self.hook == "on_load_checkpoint":
            self.held.restore(self.restored)

    def on_train_start(self) -> None:
        if self.restored is not None and self.hook == "on_train_start":
            self.held.restore(self.restored)


class SavesAt(pl.Callback):
    """Writes a checkpoint after a batch of epoch 1, and at the end of epoch 0 and of the fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            trainer.save_checkpoint(self.folder / "middle.ckpt")

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt")


def fit(module: OfModule, *callbacks: Any, max_epochs: int = 3, ckpt_path: Path | None = None) -> list[list[int]]:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[StatefulDataCallback(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module.trained


@pytest.mark.parametrize("hook", ["on_load_checkpoint", "on_train_start"])
@pytest.mark.parametrize("kind", [ByLevels, ByWeights, InOrder, Shuffled])
def test_what_the_user_restores_before_the_first_batch_goes_on_exactly(
    tmp_path: Path, kind: type[ByLevels], hook: str
) -> None:
    fit(OfModule(kind, hook), SavesAt(tmp_path), max_epochs=1)
    (tmp_path / "end.ckpt").rename(tmp_path / "first.ckpt")
    whole = fit(OfModule(kind, hook), SavesAt(tmp_path))

    for name, trained in (("middle", 9), ("first", 6)):
        assert fit(OfModule(kind, hook), ckpt_path=tmp_path / f"{name}.ckpt") == whole[trained:], name


@pytest.mark.filterwarnings("ignore:.*had been changed in training.*")
@pytest.mark.parametrize(
    ("kind", "what"),
    [(ByLevels, "ByLevel"), (ByWeights, r"WeightedRandomSampler\.weights"), (InOrder, r"Ordered\.order")],
)
def test_what_is_not_restored_is_refused_within_an_epoch_and_warned_of_at_its_beginning(
    tmp_path: Path, kind: type[ByLevels], what: str
) -> None:
    fit(OfModule(kind, ""), SavesAt(tmp_path), max_epochs=2)
    module = OfModule(kind, "")
    with pytest.raises(StateMismatchError):
        fit(module, ckpt_path=tmp_path / "middle.ckpt")
    assert module.trained == []
    with pytest.warns(StatefulWarning, match=f"{what} had been changed in training when the checkpoint was written"):
        fit(module, ckpt_path=tmp_path / "end.ckpt")


class SetLater(Sampler[int]):
    """Leaves out its first samples, by an attribute that counts from the third epoch on."""

    def __init__(self, counts: int = 2) -> None:
        self.epoch, self.bad, self.counts, self.note = 0, 0, counts, ""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        first = self.bad if self.epoch >= self.counts else 0
        return iter(torch.randint(first, 24, (24,)).tolist())


class SetsOnce(pl.Callback):
    """Sets an attribute of the sampler behind the first epoch; ``again`` in a hook of a resume."""

    def __init__(self, name: str, again: str) -> None:
        self.name, self.trained = name, list[list[int]]()
        if again:
            setattr(self, again, self.set)

    def set(self, trainer: Any, module: Any) -> None:
        setattr(trainer.train_dataloader.sampler, self.name, 12 if trainer.current_epoch else 0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            setattr(trainer.train_dataloader.sampler, self.name, 12)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


@pytest.mark.parametrize("steps", [6, 8])
@pytest.mark.parametrize(
    ("name", "again"), [("bad", ""), ("note", ""), ("bad", "on_train_start"), ("bad", "on_train_epoch_start")]
)
def test_what_a_hook_sets_on_a_sampler_before_it_has_an_effect_is_named_if_it_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, again: str, steps: int
) -> None:
    def fit(path: Path | None = None, max_steps: int = -1) -> tuple[list[list[int]], Any, list[str]]:
        sets = SetsOnce(name, again)
        trainer = quiet_trainer(
            StatefulDataCallback(seed=0), sets, max_epochs=4, max_steps=max_steps, limit_val_batches=0
        )
        data = torch.arange(24.0)[:, None].expand(24, 32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(BoringModel(), DataLoader(data, sampler=SetLater(), batch_size=4), ckpt_path=path)
        return sets.trained, trainer, [str(one.message) for one in caught if "SetLater" in str(one.message)]

    whole, _, said = fit()
    before, stopped, _ = fit(max_steps=steps)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    caplog.set_level("INFO", logger="lightning.pytorch")
    caplog.clear()
    after, _, said = fit(tmp_path / "x.ckpt")
    is_exact = name == "note" or bool(again)
    assert (before + after == whole) == is_exact
    text = f"SetLater.{name} had been set in training when the checkpoint was written, and is as it was built here"
    logged = [record.getMessage() for record in caplog.records if text in record.getMessage()]
    assert [text in one for one in said] == [True] * (name == "bad" and not again and steps == 6)
    # A hook that sets it as an epoch starts comes again only behind the epoch that is resumed.
    assert len(logged) == (not said and again != "on_train_start" and (steps == 8 or not again))


class MinesLater(Sampler[int]):
    """Draws by losses from its fourth epoch on, which training writes into it."""

    def __init__(self) -> None:
        self.losses, self.epoch = torch.zeros(24), 0

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(24) if self.epoch < 3 else torch.multinomial(self.losses, 24, True)
        return iter(drawn.tolist())


LOSSES: dict[int, float] = {}


class MinesLaterOutside(MinesLater):
    """Reads them from a variable of its module."""

    def __iter__(self) -> Iterator[int]:
        self.losses = torch.tensor([LOSSES.get(number, 1.0) for number in range(24)])
        return super().__iter__()


class WritesLosses(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for number in batch[:, 0].long().tolist():
            loss = LOSSES[number] = self.current_epoch + 1.0 + number % 5
            sampler: Any = self.trainer.train_dataloader.sampler  # type: ignore[union-attr]
            sampler.losses[number] = loss
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("steps", [3, 8, 12])
@pytest.mark.parametrize(("kind", "name"), [(MinesLater, "MinesLater.losses"), (MinesLaterOutside, ".LOSSES")])
def test_losses_that_training_writes_for_a_sampler_before_they_have_an_effect_are_named(
    tmp_path: Path, kind: type[MinesLater], name: str, steps: int
) -> None:
    for path in (None, tmp_path / "x.ckpt"):
        LOSSES.clear()
        limits = {"max_steps": -1 if path else steps, "max_epochs": 4, "limit_val_batches": 0}
        trainer = quiet_trainer(StatefulDataCallback(seed=0), **limits)
        data = torch.arange(24.0)[:, None].expand(24, 32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(WritesLosses(), DataLoader(data, sampler=kind(), batch_size=4), ckpt_path=path)
        said = [str(one.message) for one in caught]
        text = f"{name} had been set in training when the checkpoint was written, and is as it was built here"
        assert any(text in one for one in said) == bool(path), said
        trainer.save_checkpoint(tmp_path / "x.ckpt")


class Scored(Dataset[torch.Tensor]):
    """Keeps a score of each sample, which only a sampler reads."""

    def __init__(self) -> None:
        self.scores = np.ones(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


class ByScores(MinesLater):
    def __init__(self, data: Scored) -> None:
        self.data, self.epoch = data, 0

    def __iter__(self) -> Iterator[int]:
        scores = torch.from_numpy(self.data.scores)
        return iter((torch.randperm(24) if self.epoch < 3 else torch.multinomial(scores, 24, True)).tolist())


class WritesScores(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        numbers = batch[:, 0].long().numpy()
        self.trainer.train_dataloader.dataset.scores[numbers] = self.current_epoch + numbers  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("steps", "workers"), [(3, 0), (8, 0), (12, 0), (8, 1)])
def test_so_are_scores_of_a_dataset_that_only_its_sampler_reads(tmp_path: Path, steps: int, workers: int) -> None:
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "batch_size": 4}
    for path in (None, tmp_path / "x.ckpt"):
        data = Scored()
        limits = {"max_steps": -1 if path else steps, "max_epochs": 4, "limit_val_batches": 0}
        trainer = quiet_trainer(StatefulDataCallback(seed=0), **limits)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(WritesScores(), DataLoader(data, sampler=ByScores(data), **how), ckpt_path=path)
        said = [str(one.message) for one in caught if "a Scored," in str(one.message)]
        assert ["scores was an array" in one for one in said] == [True] * bool(path), said
        trainer.save_checkpoint(tmp_path / "x.ckpt")


class Pool(Sampler[int]):
    """Draws from samples that become more."""

    def __init__(self) -> None:
        self.chosen = list(range(8))

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[int]:
        return iter([self.chosen[place] for place in torch.randperm(len(self.chosen)).tolist()])


class Grows(BoringModel):
    """Adds samples to a pool behind each epoch, and restores it by assignment or in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.pool, self.in_place, self.trained = Pool(), in_place, list[list[int]]()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(32.0)[:, None].expand(32, 32), sampler=self.pool, batch_size=4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.trained.append(batch[:, 0].tolist())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.pool.chosen = [*self.pool.chosen, *range(len(self.pool), len(self.pool) + 4)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["chosen"] = list(self.pool.chosen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.in_place:
            self.pool.chosen[:] = checkpoint["chosen"]
        else:
            self.pool.chosen = checkpoint["chosen"]


@pytest.mark.filterwarnings("ignore:Pool was changed between two epochs")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_pool_that_grows_may_be_restored_before_the_loaders_are_built(
    tmp_path: Path, epoch: int, in_place: bool
) -> None:
    whole = Grows(in_place=in_place)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 4, "limit_val_batches": 0, "enable_checkpointing": True}
    quiet_trainer(StatefulDataCallback(seed=0), saver, **options).fit(whole)
    resumed = Grows(in_place=in_place)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        warnings.filterwarnings("ignore", "Pool was changed between two epochs")
        trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=4, limit_val_batches=0)
        trainer.fit(resumed, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    assert resumed.trained == whole.trained[-len(resumed.trained) :]
