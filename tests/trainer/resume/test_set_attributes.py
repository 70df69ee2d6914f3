"""Attributes of a dataset that hooks set while training goes on, and what a resume says of them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer as trainer_of
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from lightning_stateful import PackedDataModule, Packing, StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError

BATCHES = 8
WARNED = "Attributes of the dataset, a Levels, were changed in training"

# BoringModel validates on other random data in every run.
quiet_trainer = partial(trainer_of, limit_val_batches=0)


class Levels(Dataset[torch.Tensor]):
    """Samples that follow from an attribute; others change whenever a sample is read."""

    def __init__(self) -> None:
        self.level = self.reads = 0
        self.told = -1

    def __len__(self) -> int:
        return 2 * BATCHES

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.full((32,), index + 1000.0 * self.level)


class Raises(pl.Callback):
    """Sets the attribute in a hook; writes down what was trained on, and saves in the middle of the second epoch."""

    def __init__(self, dataset: Levels, hook: str, restored: str, path: Path) -> None:
        self.dataset, self.restored, self.path = dataset, restored, path
        self.trained: list[list[float]] = []
        setattr(self, hook, self.raised)

    def raised(self, trainer: pl.Trainer, *args: Any) -> None:
        self.dataset.level = 1 + trainer.global_step // 3

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.restored:
            first = trainer.global_step if self.restored == "as it is" else BATCHES
            self.dataset.level = 1 + first // 3

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())
        if len(self.trained) == BATCHES + 5 and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)


def fit(folder: Path, hook: str, restored: str = "", *, resumed: bool = False, workers: int = 0) -> list[list[float]]:
    dataset = Levels()
    callback = Raises(dataset, hook, restored if resumed else "", folder / "middle.ckpt")
    trainer = trainer_of(callback, StatefulDataCallback(), max_epochs=2)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers)
    held_out: Any = DataLoader(torch.ones(4, 32), batch_size=2)
    trainer.fit(BoringModel(), loader, held_out, ckpt_path=folder / "middle.ckpt" if resumed else None)
    return callback.trained


@pytest.mark.parametrize(
    ("hook", "workers", "restored", "warned"),
    [
        ("on_train_batch_end", 0, "", "level was 5 and is 0"),
        ("on_train_batch_end", 0, "as it is", ""),
        # Workers of the epoch were started before its batches raised the level.
        ("on_train_batch_end", 1, "as it is", "the workers of this epoch were started: level was 3 and is 5"),
        ("on_train_batch_end", 1, "as it began", ""),
        # Lightning calls it no second time for an epoch that is resumed.
        ("on_train_epoch_start", 0, "", "level was 3 and is 0"),
        ("on_train_epoch_start", 1, "as it began", ""),
        ("on_validation_end", 0, "", "level was 3 and is 0"),
        ("on_fit_end", 0, "", ""),
    ],
)
def test_a_resume_is_exact_or_says_which_attribute_is_not_set_again(
    tmp_path: Path, hook: str, workers: int, restored: str, warned: str
) -> None:
    whole = fit(tmp_path, hook, workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(tmp_path, hook, restored, resumed=True, workers=workers)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    assert (resumed == whole[BATCHES + 4 :]) == (not warned)
    assert [WARNED in one and warned in one for one in said] == [True] * bool(warned), said


def stage(dataset: Any, level: int) -> None:
    dataset.stage["level"] = level


def scale(dataset: Any, level: int) -> None:
    dataset.scales[3] = level


def weigh(dataset: Any, level: int) -> None:
    dataset.weights[:4] = level


def halve(dataset: Any, level: int) -> None:
    dataset.halves.fill_(level)


def refill(dataset: Any, level: int) -> None:
    dataset.ring.rows[:] = level


class Ring:
    """Keeps all that it has in slots."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = np.zeros(4, dtype=np.float32)


class Base:
    level = 0


class Scales(Base):
    """A transform with a default in the class of its base."""

    def __call__(self, value: float) -> float:
        return value + 1000.0 * self.level


class Transformed(Levels):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Scales()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), self.transform(index))


class Kinds(Levels):
    """Holds containers that a hook changes in place, and a cache that fills while samples are read."""

    def __init__(self) -> None:
        super().__init__()
        self.stage: dict[str, Any] = {"level": 0, "names": ("a", "b")}
        self.scales = [0.0] * 8
        self.weights = np.zeros(8, dtype=np.float32)
        self.halves = torch.zeros(3, dtype=torch.bfloat16)
        self.ring = Ring()
        self.cache: dict[int, float] = {}
        self.seen: set[str] = set()

    def __getitem__(self, index: int) -> torch.Tensor:
        level = self.stage["level"] + self.scales[3] + float(self.weights[0]) + float(self.halves[0])
        level += float(self.ring.rows[0])
        self.cache[index] = level
        self.seen.add(f"sample {index}")
        return torch.full((32,), index + 1000.0 * level)


class Sets(Raises):
    def __init__(self, dataset: Any, change: Any, path: Path) -> None:
        super().__init__(dataset, "on_train_batch_end", "", path)
        self.change = change

    def raised(self, trainer: pl.Trainer, *args: Any) -> None:
        self.change(self.dataset, 1 + trainer.global_step // 3)


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        (stage, "stage was {'level': 5, 'names': ('a', 'b')} and is {'level': 0, 'names': ('a', 'b')}"),
        (scale, "scales was [0.0, 0.0, 0.0, 5, 0.0, 0.0, 0.0, 0.0] and is [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]"),
        (weigh, r"weights was an array \w+ of 32 bytes and is an array \w+ of 32 bytes"),
        (halve, r"halves was an array \w+ of 6 bytes and is an array"),
        (refill, r"ring.rows was an array \w+ of 16 bytes and is an array"),
    ],
)
def test_containers_arrays_and_tensors_that_a_hook_changes_are_named(tmp_path: Path, change: Any, warned: str) -> None:
    def fit(resumed: bool) -> list[list[float]]:
        callback = Sets(Kinds(), change, tmp_path / "middle.ckpt")
        loader = DataLoader(callback.dataset, batch_size=2, shuffle=True)
        trainer = quiet_trainer(callback, StatefulDataCallback(), max_epochs=2)
        trainer.fit(BoringModel(), loader, ckpt_path=callback.path if resumed else None)
        return callback.trained

    whole = fit(resumed=False)
    with pytest.warns(StatefulWarning, match="a Kinds, were changed in training.*") as caught:
        assert fit(resumed=True) != whole[BATCHES + 4 :]
    (said,) = (str(one.message) for one in caught if "a Kinds" in str(one.message))
    assert re.search(warned if "array" in warned else re.escape(warned), said), said
    assert "cache" not in said
    assert "seen" not in said


class Sample:
    def __init__(self, index: int) -> None:
        self.index = index


class CachesObjects(Levels):
    """Keeps objects that it has read in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample | None] = [None] * len(self)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = self.samples[index] = self.samples[index] or Sample(index)
        return torch.full((32,), float(sample.index))


def test_nothing_is_said_of_objects_in_a_cache(tmp_path: Path) -> None:
    def fit(*, resumed: bool) -> list[list[float]]:
        callback = Raises(CachesObjects(), "on_train_batch_end", "", tmp_path / "middle.ckpt")
        loader = DataLoader(callback.dataset, batch_size=2, shuffle=True)
        trainer = quiet_trainer(callback, StatefulDataCallback(), max_epochs=2)
        trainer.fit(BoringModel(), loader, ckpt_path=callback.path if resumed else None)
        return callback.trained

    whole = fit(resumed=False)
    assert fit(resumed=True) == whole[BATCHES + 4 :]


def test_a_value_that_a_transform_has_from_a_base_class_until_a_hook_sets_it_is_followed(tmp_path: Path) -> None:
    def harden(dataset: Any, level: int) -> None:
        dataset.transform.level = level

    def fit(*, resumed: bool) -> list[list[float]]:
        dataset = Transformed()
        callback = Sets(dataset, harden, tmp_path / "middle.ckpt")
        loader = DataLoader(dataset, batch_size=2, shuffle=True)
        trainer = quiet_trainer(callback, StatefulDataCallback(), max_epochs=2)
        trainer.fit(BoringModel(), loader, ckpt_path=callback.path if resumed else None)
        return callback.trained

    whole = fit(resumed=False)
    with pytest.warns(StatefulWarning, match=re.escape("transform.level was 5 and is 0")):
        assert fit(resumed=True) != whole[BATCHES + 4 :]


class Stages(pl.Callback):
    """A curriculum, as people write one: set at the end of an epoch, and again as training starts."""

    def __init__(self, dataset: Any, change: Any, restores: bool) -> None:
        self.dataset, self.change, self.restores = dataset, change, restores
        self.trained: list[list[float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.restores and trainer.current_epoch:
            self.change(self.dataset, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.change(self.dataset, trainer.current_epoch + 1)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


def choose(dataset: Any, level: int) -> None:
    dataset.indices[:] = [level + 2 * place for place in range(len(dataset))]


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs")
@pytest.mark.parametrize("change", [stage, scale, weigh, halve, choose])
@pytest.mark.parametrize("at_end", [True, False], ids=["end of an epoch", "within an epoch"])
def test_a_curriculum_that_is_set_again_is_exact_and_one_that_is_not_is_never_silent(
    tmp_path: Path, change: Any, at_end: bool
) -> None:
    def fit(restores: bool, path: Path | None = None) -> list[list[float]]:
        dataset: Any = Subset(Levels(), [0, 2, 4, 6, 8, 10]) if change is choose else Kinds()
        stages = Stages(dataset, change, restores)
        every: Any = {"every_n_epochs": 1, "save_on_train_epoch_end": True} if at_end else {"every_n_train_steps": 1}
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **every)
        trainer = quiet_trainer(stages, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=True)
        trainer.fit(BoringModel(), DataLoader(dataset, batch_size=2, shuffle=True), ckpt_path=path)
        return stages.trained

    whole = fit(restores=True)
    epoch = len(whole) // 3
    step = 2 * epoch if at_end else epoch + 2
    assert fit(restores=True, path=tmp_path / f"step={step}.ckpt") == whole[step:]
    if at_end:
        with pytest.warns(StatefulWarning, match="changed in training"):
            assert fit(restores=False, path=tmp_path / f"step={step}.ckpt") != whole[step:]
    else:
        with pytest.raises(StateMismatchError, match="what a hook sets in the dataset, set it again in on_train_start"):
            fit(restores=False, path=tmp_path / f"step={step}.ckpt")


class Hard(Sampler[int]):
    """In order, but for the last item of an epoch, which follows from an attribute."""

    last = 2 * BATCHES - 1

    def __len__(self) -> int:
        return 2 * BATCHES

    def __iter__(self) -> Iterator[int]:
        yield from range(2 * BATCHES - 1)
        yield self.last


class Mines(pl.Callback):
    def __init__(self, sampler: Hard, path: Path) -> None:
        self.sampler, self.path = sampler, path
        self.trained: list[list[float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sampler.last = 3

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())
        if len(self.trained) == BATCHES + 5 and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)


def mined(path: Path, *, resumed: bool) -> list[list[float]]:
    callback = Mines(Hard(), path)
    trainer = quiet_trainer(callback, StatefulDataCallback(), max_epochs=2)
    loader = DataLoader(Levels(), batch_size=2, sampler=callback.sampler)
    trainer.fit(BoringModel(), loader, ckpt_path=path if resumed else None)
    return callback.trained


@pytest.mark.filterwarnings("ignore:.*was changed between.*")
def test_a_sampler_that_a_hook_changed_is_named_also_where_what_it_gave_of_the_epoch_is_the_same(
    tmp_path: Path,
) -> None:
    whole = mined(tmp_path / "some.ckpt", resumed=False)
    with pytest.warns(StatefulWarning, match="Hard had been changed in training when the checkpoint was written"):
        rest = mined(tmp_path / "some.ckpt", resumed=True)
    assert rest[:-1] == whole[BATCHES + 4 : -1]
    assert rest[-1] != whole[-1]


class Swaps(pl.Callback):
    """Turns a sampler's list by one item at the end of each epoch, which nothing saves."""

    def __init__(self, sampler: InOrder) -> None:
        self.sampler, self.trained = sampler, list[Any]()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sampler.order.append(self.sampler.order.pop(0))

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


class InOrder(Sampler[int]):
    def __init__(self) -> None:
        self.order = list(range(2 * BATCHES))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


@pytest.mark.filterwarnings("ignore:.*no longer yields what it did", "ignore:.*was changed between")
def test_a_sampler_that_a_hook_changes_again_and_nothing_restores_is_named_from_the_end_of_an_epoch_too(
    tmp_path: Path,
) -> None:
    def run(path: Path | None = None) -> list[Any]:
        swaps = Swaps(InOrder())
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=BATCHES)
        saver = saver if path is None else pl.Callback()
        trainer = quiet_trainer(swaps, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=path is None)
        trainer.fit(BoringModel(), DataLoader(Levels(), batch_size=2, sampler=swaps.sampler), ckpt_path=path)
        return swaps.trained

    whole = run()
    assert run(tmp_path / f"step={BATCHES}.ckpt") == whole[BATCHES:]
    with pytest.warns(StatefulWarning, match="InOrder had been changed in training when the checkpoint was written"):
        assert run(tmp_path / f"step={2 * BATCHES}.ckpt") != whole[2 * BATCHES :]


class Documents(Levels):
    """Documents of four tokens."""

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]  # documents are lists
        return [index + 1000 * self.level] * 4


class Reads(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch["input_ids"].float().new_zeros(1, 32)).sum()


def test_documents_that_are_packed_are_looked_at_as_well(tmp_path: Path) -> None:
    def train(**how: Any) -> None:
        documents = Documents()
        data = PackedDataModule(documents, lengths=[4] * len(documents), packing=Packing(8), batch_size=2)
        raises = Raises(documents, "on_train_batch_end", "", tmp_path / "unused.ckpt")
        raises.on_train_batch_start = lambda *args: None  # type: ignore[method-assign]
        trainer = quiet_trainer(raises, **how)
        path = tmp_path / "stop.ckpt"
        trainer.fit(Reads(), datamodule=data, ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)

    train(max_steps=3)
    with pytest.warns(StatefulWarning, match="Attributes of the dataset, a Documents, .*: level was 2 and is 0"):
        train(max_steps=4)


class ByHalves(pl.Callback):
    """Sets an attribute to half of the epoch, which is 0.0 in the first."""

    def __init__(self, dataset: Levels) -> None:
        self.dataset = dataset

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.dataset.level = trainer.current_epoch * 0.5  # type: ignore[assignment]  # as here


@pytest.mark.parametrize("before", [0, 0.0])
def test_nothing_is_said_of_a_number_that_is_an_equal_one(tmp_path: Path, before: Any) -> None:
    def fit(**options: Any) -> pl.Trainer:
        dataset = Levels()
        dataset.level = before
        path = options.pop("ckpt_path", None)
        trainer = quiet_trainer(ByHalves(dataset), StatefulDataCallback(), max_epochs=2, **options)
        trainer.fit(BoringModel(), DataLoader(dataset, batch_size=2, shuffle=True), ckpt_path=path)
        return trainer

    fit(max_steps=3).save_checkpoint(tmp_path / "middle.ckpt")
    fit(ckpt_path=tmp_path / "middle.ckpt")


def boxed(box: list[int] = [0]) -> int:  # noqa: B006  # as people keep a value
    return box[0]


class Outside(Dataset[torch.Tensor]):
    """Samples that follow from the environment, or from a default argument."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        level = int(os.environ.get("OUTSIDE_LEVEL", "0")) if self.of == "environment" else boxed()
        return torch.full((32,), index + 1000.0 * level)


@pytest.mark.parametrize(
    ("of", "named"),
    [("environment", "os.environ['OUTSIDE_LEVEL'] was '5' and is ''"), ("default", "boxed.box was [5] and is [0]")],
)
def test_the_environment_and_default_arguments_that_a_hook_sets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, named: str
) -> None:
    def raise_level(dataset: Any, level: int) -> None:
        if of == "environment":
            os.environ["OUTSIDE_LEVEL"] = str(level)
        else:
            boxed.__defaults__[0][0] = level  # type: ignore[index]  # it has one

    def fit(*, resumed: bool) -> list[list[float]]:
        monkeypatch.setitem(os.environ, "OUTSIDE_LEVEL", "")
        os.environ.pop("OUTSIDE_LEVEL")
        monkeypatch.setattr(boxed, "__defaults__", ([0],))
        callback = Sets(Outside(of), raise_level, tmp_path / "middle.ckpt")
        trainer = quiet_trainer(callback, StatefulDataCallback(), max_epochs=2)
        loader = DataLoader(callback.dataset, batch_size=2, shuffle=True)
        trainer.fit(BoringModel(), loader, ckpt_path=callback.path if resumed else None)
        return callback.trained

    whole = fit(resumed=False)
    with pytest.warns(StatefulWarning, match=re.escape(named)):
        assert fit(resumed=True) != whole[BATCHES + 4 :]


class Follows(Levels):
    def set_epoch(self, epoch: int) -> None:
        self.level = epoch


def test_nothing_is_said_of_a_dataset_that_a_hook_tells_each_epoch_as_it_begins(tmp_path: Path) -> None:
    class Tells(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
            trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)

    def run(path: Path | None = None) -> list[list[float]]:
        noted = Stages(None, lambda dataset, level: None, restores=False)
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = quiet_trainer(Tells(), noted, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=True)
        trainer.fit(BoringModel(), DataLoader(Follows(), batch_size=2, shuffle=True), ckpt_path=path)
        return noted.trained

    whole = run()
    for epoch in range(2):
        assert run(tmp_path / f"epoch={epoch}.ckpt") == whole[BATCHES * (epoch + 1) :]


class Steps(Sampler[int]):
    """Yields every so manieth sample, counted from one on; both are attributes."""

    def __init__(self) -> None:
        self.step = self.level = 1

    def __len__(self) -> int:
        return 2 * BATCHES

    def __iter__(self) -> Iterator[int]:
        return iter([(self.level + self.step * number) % (2 * BATCHES) for number in range(2 * BATCHES)])


class StartsAnew(pl.Callback):
    """Sets a level as training begins, and raises it at the end of each epoch, which nothing saves."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.trained = holder, list[Any]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.holder.level = 3

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.holder.level += 1

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


@pytest.mark.filterwarnings("ignore:.*no longer yields what it did", "ignore:.*was changed between")
@pytest.mark.parametrize(
    ("kind", "step", "named"),
    [
        (Levels, BATCHES + 2, "level was 4 and is 3"),
        (Levels, 2 * BATCHES, "On the resume level was 5 and is 3"),
        (Steps, 2 * BATCHES, "Steps had been changed when the checkpoint was written, and was changed to something"),
    ],
)
def test_what_a_hook_sets_to_a_third_value_before_a_resume_is_named(
    tmp_path: Path, kind: Any, step: int, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == step != 2 * BATCHES:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def run(path: Path | None = None) -> tuple[list[Any], str]:
        caplog.clear()
        holder = kind()
        callback, own = StartsAnew(holder), [] if path else [Saves()]
        trainer = quiet_trainer(callback, *own, StatefulDataCallback(seed=0), max_epochs=3)
        loader = DataLoader(Levels(), 2, sampler=holder) if kind is Steps else DataLoader(holder, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(BoringModel(), loader, ckpt_path=path)
        return callback.trained, "\n".join([caplog.text, *(str(one.message) for one in caught)])

    whole, said = run()
    assert named not in said
    rest, said = run(tmp_path / "a.ckpt")
    assert rest != whole[step:]
    assert named in said
