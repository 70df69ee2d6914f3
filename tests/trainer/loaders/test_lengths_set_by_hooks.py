"""A sampler whose length follows from what hooks set: a resume asks for it once they have set it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.ledger import Numbers
from support.runs import Outcome, assert_goes_on_from_every_moment, ended, stopped, train_alone
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_stateful.errors import PositionError, StatefulWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*was changed between two epochs by something else", "ignore:.*no longer yields what it did before training"
)


class Leveled(Sampler[int]):
    """Eight samples for every level."""

    def __init__(self) -> None:
        self.level = 1

    def __len__(self) -> int:
        return 8 * self.level

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(36).tolist()[: 8 * self.level]


class Up(pl.Callback):
    """Sets the level at the end of each epoch, and again where a run begins."""

    def __init__(self, sampler: Leveled) -> None:
        self.sampler = sampler

    def of(self, epoch: int) -> int:
        return epoch + 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sampler.level = self.of(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sampler.level = self.of(trainer.current_epoch + 1)


class Down(Up):
    def of(self, epoch: int) -> int:
        return 3 - epoch


class UpAndDown(Up):
    """Epoch 1 is longer than the sampler as it is built and as it is in the next epoch."""

    def of(self, epoch: int) -> int:
        return 1 + 2 * (epoch % 2)


class Restored(Up):
    """Saves the level, and sets it where the state is loaded."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.sampler.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.level = state["level"]


class RestoredLate(Restored):
    """Sets it as training starts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["level"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sampler.level = getattr(self, "loaded", self.sampler.level)


def of_samples(sampler: Leveled) -> Any:
    return DataLoader(Numbers(36), batch_size=2, sampler=sampler)


def of_batches(sampler: Leveled) -> Any:
    return DataLoader(Numbers(36), batch_sampler=BatchSampler(sampler, 2, False))


def beside(sampler: Leveled) -> Any:
    return {"a": of_samples(sampler), "b": DataLoader(Numbers(12, first=50), batch_size=2, shuffle=True)}


def training_with(kind: Callable[[Leveled], Up], make: Any = of_samples) -> Any:
    """A function that trains on a sampler which a hook sets."""

    def run(_: Any = None, *, callbacks: Any = (), settings: Any = None, **options: Any) -> Outcome:
        sampler = Leveled()
        sampler.level = kind(sampler).of(0)
        hooks = [kind(sampler), *callbacks]

        class Module(pl.LightningDataModule):
            def train_dataloader(self) -> Any:
                return make(sampler)

            def val_dataloader(self) -> Any:
                return DataLoader(Numbers(3, first=100))

        return train_alone(Module, callbacks=hooks, settings=settings, **{"max_epochs": 3, **options})

    return run


# Batches of epoch 1 up to 3 are as many as epoch 0 has, or more.
MOMENTS = [
    ("on_train_batch_end", 0, 2),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_end", 1, 1),
    ("on_train_batch_end", 1, 3),
    ("on_train_batch_end", 1, 5),
    ("on_train_epoch_end", 1, 0),
    ("on_train_batch_end", 2, 2),
    ("on_validation_end", 2, 0),
]


@pytest.mark.parametrize("kind", [Up, Restored, RestoredLate])
def test_a_resume_has_every_batch_of_a_length_that_hooks_have_set(kind: Any, tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, None, MOMENTS, training_with(kind), max_epochs=3)


@pytest.mark.parametrize("make", [of_batches, beside])
def test_so_has_one_that_is_in_another_or_beside_one(make: Any, tmp_path: Path) -> None:
    moments = [MOMENTS[3], MOMENTS[5], MOMENTS[7]]
    assert_goes_on_from_every_moment(tmp_path, None, moments, training_with(Up, make), max_epochs=3)


@pytest.mark.parametrize("kind", [Down, UpAndDown])
def test_a_length_goes_down_as_well(kind: Any, tmp_path: Path) -> None:
    moments = [MOMENTS[1], ("on_train_batch_end", 1, 7), ("on_train_batch_end", 2, 1)]
    run = training_with(kind)
    assert_goes_on_from_every_moment(tmp_path, None, moments, run, max_epochs=3, val_check_interval=0.5)


@pytest.mark.parametrize(
    ("kind", "steps"), [(Up, 3), (Up, 4), (Up, 9), (Down, 9), (Down, 12), (UpAndDown, 3), (UpAndDown, 14)]
)
def test_a_resume_behind_max_steps_does_not_warn(
    kind: Any, steps: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run = training_with(kind)
    whole = run()
    before = ended(tmp_path / "some.ckpt", run=run, max_steps=steps)
    recwarn.clear()
    after = run(ckpt_path=tmp_path / "some.ckpt")
    steps_of = [[event for event in one.ledger if event[0] == "train"] for one in (before, after, whole)]
    assert steps_of[0] + steps_of[1] == steps_of[2]
    assert not [str(one.message) for one in recwarn if "had been changed in training" in str(one.message)]


@pytest.mark.parametrize("steps", [12, 15])
def test_the_log_says_the_length_that_hooks_have_set(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = training_with(Up)
    ended(tmp_path / "some.ckpt", run=run, max_steps=steps)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run(ckpt_path=tmp_path / "some.ckpt")
    assert [one.message for one in caplog.records if f"next is batch {steps - 11} of 12." in one.message]


class Forgets(Up):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pass


@pytest.mark.parametrize("batch", [4, 6])
def test_a_length_that_nothing_has_set_again_is_refused_where_more_is_used(batch: int, tmp_path: Path) -> None:
    run = training_with(Forgets)
    stopped(tmp_path / "some.ckpt", None, epoch=2, batch=batch, run=run)
    with pytest.raises(PositionError, match=r"of epoch 2 were consumed.*yields only 8.*had 24.*on_train_start"):
        run(ckpt_path=tmp_path / "some.ckpt")


@pytest.mark.filterwarnings("ignore:.*had been changed in training when")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_length_that_nothing_has_set_again_is_warned_of(batch: int, tmp_path: Path) -> None:
    run = training_with(Forgets)
    stopped(tmp_path / "some.ckpt", None, epoch=2, batch=batch, run=run)
    with pytest.warns(StatefulWarning, match=r"Leveled has 8 samples in epoch 2 here.*had 24"):
        run(ckpt_path=tmp_path / "some.ckpt")


class Wrong(Up):
    """Sets another level in a run that is resumed than in the one before."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path is not None:
            self.sampler.level = 2


def test_another_length_than_that_of_the_epoch_is_warned_of(tmp_path: Path) -> None:
    run = training_with(Wrong)
    stopped(tmp_path / "some.ckpt", None, epoch=0, batch=1, run=run)
    with pytest.warns(StatefulWarning, match=r"Leveled has 16 samples in epoch 0 here.*had 8"):
        run(ckpt_path=tmp_path / "some.ckpt")


def test_a_checkpoint_that_a_resume_writes_before_its_first_batch_is_exact_too(tmp_path: Path) -> None:
    run = training_with(Up)
    whole = run()
    before = stopped(tmp_path / "some.ckpt", None, epoch=2, batch=4, run=run)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    again = stopped(
        tmp_path / "other.ckpt",
        None,
        "on_train_start",
        epoch=2,
        run=run,
        callbacks=[saves],
        ckpt_path=tmp_path / "some.ckpt",
    )
    after = run(ckpt_path=tmp_path / "other.ckpt")
    steps_of = [[event for event in one if event[0] == "train"] for one in (before, again, after.ledger, whole.ledger)]
    assert not steps_of[1]
    assert steps_of[0] + steps_of[2] == steps_of[3]


class Ramp(Sampler[list[int]]):
    """Batches that grow with the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12 // (self.epoch + 1)

    def __iter__(self) -> Iterator[list[int]]:
        size, drawn = self.epoch + 1, torch.randperm(12).tolist()
        yield from (drawn[first : first + size] for first in range(0, 12, size))


@pytest.mark.parametrize("steps", [5, 12])
def test_a_length_that_follows_from_the_epoch_is_not_warned_of(
    steps: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def make() -> Any:
        return DataLoader(Numbers(12), batch_sampler=Ramp())

    ended(tmp_path / "some.ckpt", make, run=train_alone, max_epochs=3, max_steps=steps)
    recwarn.clear()
    train_alone(make, max_epochs=3, ckpt_path=tmp_path / "some.ckpt")
    assert not [str(one.message) for one in recwarn if one.category is StatefulWarning]
