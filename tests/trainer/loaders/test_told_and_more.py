"""Iterable datasets that are told the epoch, and whose order follows from something else as well."""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.ledger import batches
from support.runs import assert_goes_on_from_every_moment, ended, quiet_trainer, stopped, train_alone
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.iterable_datasets.earlier_passes import copied_with_shared_data

NUMBERS = 43
READ_AGAIN = pytest.mark.filterwarnings("ignore:.*samples of .* were read again")


class Told(IterableDataset[Any]):
    """Is told the epoch, which the order follows from."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(NUMBERS), NUMBERS)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in self.order()[first::step]:
            yield {"id": number, "x": torch.full((4,), number / 100)}


class Buffers(Told):
    """Shuffles in a buffer, by a generator that goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(self.generator.randrange(len(buffer)))
        yield from buffer


class Counts(Told):
    """Goes by the passes that it has begun."""

    passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return random.Random(self.epoch + 100 * self.passes).sample(range(NUMBERS), NUMBERS)


class CountsAtEnd(Told):
    """Goes by the passes that it has ended."""

    passes = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch + 100 * self.passes).sample(range(NUMBERS), NUMBERS)

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.passes += 1


class Reseeds(Told):
    """Seeds its generator by the epoch."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def order(self) -> list[int]:
        self.generator = random.Random(self.epoch)
        return self.generator.sample(range(NUMBERS), NUMBERS)


PASSES = [0]


class CountsOutside(Told):
    """Shuffles the second half by the passes that its module has counted."""

    def __init__(self) -> None:
        PASSES[0] = 0

    def __iter__(self) -> Iterator[Any]:
        samples = [*super().__iter__()]
        middle = len(samples) // 2
        yield from samples[:middle]
        PASSES[0] += 1
        yield from random.Random(PASSES[0]).sample(samples[middle:], len(samples) - middle)


KINDS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (Told, Buffers, Counts, CountsAtEnd, Reseeds, CountsOutside)
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@READ_AGAIN
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 6], ids=["whole epochs", "limit_train_batches"])
@pytest.mark.parametrize("how", ["no workers", *(pytest.param(one, marks=pytest.mark.slow) for one in [*WORKERS][1:])])
def test_a_resume_is_exact_whatever_else_the_order_follows_from(
    tmp_path: Path, kind: str, how: str, limit: int | None
) -> None:
    def make() -> Any:
        return DataLoader(KINDS[kind](), batch_size=4, **WORKERS[how])

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 3), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3, limit_train_batches=limit)


class Opens(Told):
    """Notes the passes that it begins, and samples that it gives."""

    begun: ClassVar[list[int]] = []
    given = 0

    def __iter__(self) -> Iterator[Any]:
        Opens.begun.append(self.epoch)
        for sample in super().__iter__():
            Opens.given += 1
            yield sample


def test_of_one_that_the_epoch_decides_no_earlier_pass_is_begun(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Opens(), batch_size=4)

    before = ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=2)
    Opens.begun, Opens.given = [], 0
    after = train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    assert (Opens.begun, Opens.given) == ([2], NUMBERS)
    assert batches(before.ledger + after.ledger) == batches(train_alone(make, max_epochs=3).ledger)


class Unseeded(Told):
    """Draws its order from a generator that nobody seeds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def order(self) -> list[int]:
        return list(self.generator.permutation(NUMBERS))


@pytest.mark.parametrize("how", ["no workers", "workers"])
def test_a_generator_without_a_seed_is_warned_of(tmp_path: Path, how: str) -> None:
    def make() -> Any:
        return DataLoader(Unseeded(), batch_size=4, **WORKERS[how])

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="not exact"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)


OUTSIDE = random.Random(2)


class ShufflesLate(Told):
    """Shuffles the second half of a pass by a generator that goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = random.Random(2)

    def __iter__(self) -> Iterator[Any]:
        samples = [*super().__iter__()]
        middle = len(samples) // 2
        yield from samples[:middle]
        yield from self.generator.sample(samples[middle:], len(samples) - middle)


class ShufflesLateOutside(ShufflesLate):
    """Does so by one of its module."""

    def __init__(self) -> None:
        OUTSIDE.seed(2)

    @property
    def generator(self) -> random.Random:  # type: ignore[override]
        return OUTSIDE


@pytest.mark.parametrize("kind", [ShufflesLate, ShufflesLateOutside])
@pytest.mark.parametrize("how", ["no workers", pytest.param("persistent workers", marks=pytest.mark.slow)])
def test_a_generator_that_decides_only_what_comes_late_is_warned_of(tmp_path: Path, kind: Any, how: str) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=4, **WORKERS[how])

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="holds a random generator that goes on from pass to pass"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)


class Levels(Told):
    """Samples that follow from attributes which hooks set."""

    def __init__(self) -> None:
        self.level, self.bad = 0, set[int]()

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample["id"] not in self.bad:
                yield {**sample, "x": sample["x"] + self.level}


class Untold(Levels):
    """Has no ``set_epoch``."""

    set_epoch = None  # type: ignore[assignment]  # none


def by_epoch(dataset: Levels, epoch: int) -> None:
    dataset.level = epoch + 1


def count_on(dataset: Levels, epoch: int) -> None:
    dataset.level += 1


def add_bad(dataset: Levels, epoch: int) -> None:
    dataset.bad |= {epoch, 20 + epoch}


class Sets(pl.Callback):
    """Calls a function at the end of each epoch."""

    def __init__(self, of: Callable[[Levels, int], None]) -> None:
        self.of = of

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        self.of(loader.dataset, trainer.current_epoch)


IN_THE_LOG = "That is exact if hooks set it by the epoch alone"


@pytest.mark.parametrize("kind", [Levels, Untold])
@pytest.mark.parametrize("of", [by_epoch, count_on, add_bad])
@pytest.mark.filterwarnings("ignore:.*was changed between two epochs by something else")
def test_what_hooks_set_at_the_end_of_epochs_and_a_resume_does_not_is_named(
    tmp_path: Path, kind: Any, of: Any, caplog: Any
) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=4)

    def run(*arguments: Any, callbacks: Any = (), **options: Any) -> Any:
        return train_alone(*arguments, callbacks=[*callbacks, Sets(of)], **options)

    whole = run(make, max_epochs=3)
    last = len(batches(whole.ledger, 1)) - 1
    stopped(tmp_path / "x.ckpt", make, epoch=1, batch=last, run=run)
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO", logger="lightning.pytorch"):
        warnings.simplefilter("always")
        rest = run(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    warned = [one for one in caught if "was set between two epochs in the run that wrote" in str(one.message)]
    logged = [one for one in caplog.messages if IN_THE_LOG in one]
    assert (len(warned), len(logged)) == ((0, 1) if of is by_epoch else (1, 0))
    is_exact = all(rest.weights[name].equal(value) for name, value in whole.weights.items())
    assert is_exact == (of is by_epoch)


class Mapped(Counts):
    """Reads from a file that is mapped into memory."""

    kept: Any = None

    def __init__(self, path: Path) -> None:
        self.numbers = np.memmap(path, dtype=np.int64, mode="r")

    def order(self) -> list[int]:
        return [int(self.numbers[place]) for place in super().order()]


@READ_AGAIN
def test_a_copy_of_a_dataset_leaves_a_mapped_file_where_it_is(tmp_path: Path) -> None:
    np.arange(NUMBERS).tofile(tmp_path / "numbers.bin")
    dataset = Mapped(tmp_path / "numbers.bin")
    dataset.kept = np.zeros(3)
    copied = copied_with_shared_data(dataset)
    assert copied.numbers is dataset.numbers
    assert copied.kept is not dataset.kept

    def make() -> Any:
        return DataLoader(Mapped(tmp_path / "numbers.bin"), batch_size=4)

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 3)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=2)


def test_a_dataset_that_cannot_be_copied_is_warned_of(tmp_path: Path) -> None:
    class Locked(Counts):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    def make() -> Any:
        return DataLoader(Locked(), batch_size=4)

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="could not be tried on a copy of it, which cannot be made"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)
    train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2, settings={"accept": ("nondeterministic",)})


def test_a_copy_that_cannot_be_read_is_warned_of(tmp_path: Path) -> None:
    class Alone(Counts):
        """Can be read as it was made, and no copy of it."""

        def __init__(self) -> None:
            self.made = id(self)

        def order(self) -> list[int]:
            if id(self) != self.made:
                raise RuntimeError("it is in use")
            return super().order()

    def make() -> Any:
        return DataLoader(Alone(), batch_size=4)

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="on a copy of it, which raised RuntimeError: it is in use"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)


class Shares(IterableDataset[Any]):
    """Its order follows from an epoch that processes share."""

    def __init__(self) -> None:
        self.shared = SharedEpoch()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in random.Random(self.shared.value.value).sample(range(NUMBERS), NUMBERS)[first::step]:
            yield {"id": number, "x": torch.full((4,), number / 100)}


class SharedEpoch:
    def __init__(self) -> None:
        self.value: Any = multiprocessing.Value("i", 0)


class SetsShared(pl.Callback):
    """Sets it in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.set)
        self.later = hook == "on_train_epoch_end"

    def set(self, trainer: pl.Trainer, *_: Any) -> None:
        loader: Any = trainer.train_dataloader
        loader.dataset.shared.value.value = trainer.current_epoch + self.later


@pytest.mark.parametrize("how", WORKERS)
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_an_epoch_that_processes_share_is_set_before_a_pass_begins_or_named(
    tmp_path: Path, hook: str, how: str, caplog: Any
) -> None:
    def make() -> Any:
        return DataLoader(Shares(), batch_size=4, **WORKERS[how])

    def run(*arguments: Any, callbacks: Any = (), **options: Any) -> Any:
        return train_alone(*arguments, callbacks=[*callbacks, SetsShared(hook)], **options)

    whole = run(make, max_epochs=3)
    before = ended(tmp_path / "x.ckpt", make, run=run, max_epochs=1)
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        after = run(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    is_exact = batches(before.ledger + after.ledger) == batches(whole.ledger)
    said = [one for one in caplog.messages if "Shares.shared.value in shared memory was set" in one]
    assert (is_exact, len(said)) == ((True, 0) if hook == "on_train_epoch_start" else (False, 1))


class Holds(Told):
    """Holds the Trainer."""

    trainer: Any = None


def test_a_dataset_that_holds_a_trainer_is_read(tmp_path: Path) -> None:
    class Gives(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            dataset.trainer = trainer

    dataset = Holds()
    train_alone(lambda: DataLoader(dataset, batch_size=4, num_workers=1), callbacks=[Gives()], max_epochs=2)


class Seen(Told):
    """Gives more samples the more it has given, which its first samples do not show."""

    set_epoch = None  # type: ignore[assignment]  # none
    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(NUMBERS):
            self.seen += 1
            if number < 10 or (number * 7) % NUMBERS <= 4 + self.seen:
                yield {"id": number, "x": torch.full((4,), self.seen / 100)}


@READ_AGAIN
def test_epochs_that_a_limit_cuts_are_begun_again_likewise(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Seen(), batch_size=2)

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 3), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3, limit_train_batches=7)


MODULE_GENERATOR = random.Random(3)


class DrawsOutside(Told):
    """Augments by a generator of the module, and notes where it is."""

    set_epoch = None  # type: ignore[assignment]  # none
    at = 0

    def __iter__(self) -> Iterator[Any]:
        for self.at in range(NUMBERS):
            yield {"id": self.at, "x": torch.full((4,), MODULE_GENERATOR.random())}


@READ_AGAIN
@pytest.mark.parametrize("limit", [None, 7])
def test_a_generator_of_the_module_that_samples_draw_from_is_where_it_was(tmp_path: Path, limit: int | None) -> None:
    def make() -> Any:
        MODULE_GENERATOR.seed(3)
        return DataLoader(DrawsOutside(), batch_size=4)

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3, limit_train_batches=limit)


class Augments(IterableDataset[Any]):
    """Draws for each sample from a generator that it holds."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        for number in range(NUMBERS):
            yield {"id": number, "x": torch.full((4,), self.generator.random())}


@READ_AGAIN
def test_within_the_first_pass_nothing_is_said_of_a_generator_that_goes_on(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Augments(), batch_size=4)

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 0, 3)], train_alone, max_epochs=2)


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


def test_a_dataset_that_shares_a_structure_between_processes_is_read() -> None:
    dataset = Shares()
    dataset.point = multiprocessing.Value(Point, 1, 2)  # type: ignore[attr-defined]  # as here
    train_alone(lambda: DataLoader(dataset, batch_size=4), max_epochs=2)


class DrawsOn(IterableDataset[Any]):
    """Shuffles with a generator that goes on, and gives the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch, self.draws = 0, random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.full((32,), 100.0 * self.epoch + one) for one in self.draws.sample(range(8), 8)])


def test_a_hook_that_tells_the_trainers_epoch_is_no_other_to_workers_of_a_resume(tmp_path: Path) -> None:
    def run(path: Path | None = None) -> list[Any]:
        dataset, trained = DrawsOn(), list[Any]()
        hooks = LambdaCallback(
            on_train_epoch_start=lambda trainer, _: dataset.set_epoch(trainer.current_epoch),
            on_train_batch_end=lambda *args: trained.append(args[3][:, 0].tolist()),
        )
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [hooks, StatefulDataCallback(seed=0), *([] if path else [saver])]
        trainer = quiet_trainer(*callbacks, max_epochs=3, enable_checkpointing=not path, limit_val_batches=0)
        trainer.fit(BoringModel(), DataLoader(dataset, 4, num_workers=1, persistent_workers=True), ckpt_path=path)
        return trained

    whole = run()
    assert run(tmp_path / "epoch=0.ckpt") == whole[2:]
