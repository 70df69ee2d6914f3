"""Loaders are built as often as they have to be, and those that are built anew leave no worker processes behind."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import lightning.pytorch as pl
import pytest
from harm.basics import LENGTH, Indices, permutation
from harm.runs import train
from harm.table import Entry, WithCallback, of
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.iterable_cases import Counts, CountsWithState
from support.ledger import Asks, LedgerModel, Numbers, batches
from support.runs import assert_goes_on_from_every_moment, seeded, stopped, train_alone, training
from support.sampler_cases import PlainData
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Numbers(6).__getitem__, range(6))


def workers(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, num_workers=1, **options)


def module(make: Any, **options: Any) -> PlainData:
    """Gives the training loaders that a function makes, and a validation loader, with workers."""
    return PlainData(make, lambda: workers(Numbers(4), **options))


class Pool(PlainData):
    """Trains on all samples that are labelled, four more after each epoch; its state says how many."""

    def __init__(self) -> None:
        super().__init__(lambda: DataLoader(Numbers(self.labelled), batch_size=2, shuffle=True))
        self.labelled = 8

    def state_dict(self) -> dict[str, Any]:
        return {"labelled": self.labelled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labelled = state["labelled"]


def test_a_pool_that_grows_between_epochs_resumes_where_its_loader_is_built_anew(tmp_path: Path) -> None:
    def run(path: Path | None = None, save: bool = False) -> Any:
        pool = Pool()

        def grow(trainer: Any, module: Any) -> None:
            pool.labelled += 4
            if save and trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        grows = LambdaCallback(on_train_epoch_end=grow)
        options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1, "ckpt_path": path}
        return train_alone(lambda: pool, callbacks=[grows], **options).ledger

    whole = run(save=True)
    resumed = run(tmp_path / "a.ckpt")
    assert [len(batches(whole, epoch)) for epoch in range(4)] == [4, 6, 8, 10]
    for epoch in (2, 3):
        assert batches(resumed, epoch) == batches(whole, epoch)


class ByLoss(pl.LightningDataModule):
    """Chooses the samples of an epoch by the loss of the latest validation."""

    def train_dataloader(self) -> Any:
        loss = float(self.trainer.callback_metrics.get("val_loss", 0.0))  # type: ignore[union-attr]  # it has one
        return DataLoader(Subset(Numbers(50), Random(loss).sample(range(50), 8)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(4), batch_size=2)


class Validated(LedgerModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch["x"]).square().mean())


@pytest.mark.parametrize(("epoch", "step"), [(1, 2), (2, 1)])
def test_so_does_one_that_chooses_samples_by_what_was_logged(tmp_path: Path, epoch: int, step: int) -> None:
    path = tmp_path / "a.ckpt"

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (epoch, step - 1):
            trainer.save_checkpoint(path)

    def run(ckpt_path: Path | None = None) -> Any:
        saves = LambdaCallback(on_train_batch_end=save)
        options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "ckpt_path": ckpt_path}
        return train_alone(ByLoss, callbacks=[saves], model=seeded(Validated, 1), limit_val_batches=1.0, **options)

    whole = run().ledger
    resumed = run(path).ledger
    assert batches(resumed, epoch) == batches(whole, epoch)[step:]
    assert batches(resumed, 2) == batches(whole, 2)[step if epoch == 2 else 0 :]


class Subsets(PlainData):
    """Draws the subset of an epoch from a generator of its own, which nothing saves."""

    def __init__(self) -> None:
        draws = Random(0)
        super().__init__(lambda: DataLoader(Subset(Numbers(50), draws.sample(range(50), 6)), batch_size=2))


class Forgets(Pool):
    state_dict = load_state_dict = None  # type: ignore[assignment]  # as of a module that has none


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Subsets, "another here .* and is the one that the run began with. It is built anew"),
        (Forgets, "Values that the method reads which builds the training loaders .* labelled was 16 and is 8"),
    ],
)
def test_a_loader_that_depends_on_earlier_calls_is_warned_of_where_it_is_built_anew(
    tmp_path: Path, kind: Any, words: str
) -> None:
    def run(**options: Any) -> Any:
        data = kind()

        def grow(trainer: Any, module: Any) -> None:
            data.labelled = getattr(data, "labelled", 0) + 4

        callbacks = [LambdaCallback(on_train_epoch_end=grow)]
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        options |= {} if "ckpt_path" in options else {"callbacks": [*callbacks, saver], "enable_checkpointing": True}
        options = {"callbacks": callbacks, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, **options}
        return train_alone(lambda: data, **options).ledger

    whole = run()
    with pytest.warns(StatefulWarning, match=words):
        resumed = run(ckpt_path=tmp_path / "epoch=1.ckpt")
    assert batches(resumed, 2) != batches(whole, 2)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore:.*were read again.*")
@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (lambda: workers(Numbers(6), persistent_workers=True), {"persistent_workers": True}, 2),
        (lambda: workers(Rows(), persistent_workers=True), {"persistent_workers": True}, 2),
        (lambda: CombinedLoader([workers(Numbers(6)), workers(Rows())], "min_size"), {}, 3),
    ],
    ids=["samples", "stream", "combined, without persistent workers"],
)
def test_replaced_loaders_end_their_workers(make: Any, options: Any, most: int) -> None:
    counts: list[int] = []
    # What another test has left is ended when it is collected.
    others = multiprocessing.active_children()

    def children() -> list[Any]:
        return [child for child in multiprocessing.active_children() if child not in others]

    count = LambdaCallback(on_train_epoch_end=lambda *args: counts.append(len(children())))
    reloading = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 2}
    train_alone(lambda: module(make, **options), callbacks=[count], **reloading)
    assert len(counts) == 3
    assert max(counts) == most
    assert children() == []


@pytest.mark.parametrize("model", [LedgerModel, Asks])
@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 3}], ids=["once", "reloading"])
def test_a_run_builds_its_training_loaders_once_on_a_resume_too(tmp_path: Path, model: Any, options: Any) -> None:
    built = []

    def make() -> Any:
        built.append(len(built))
        return DataLoader(Numbers(6), batch_size=2, shuffle=True)

    run = training(model, lambda: [StatefulDataCallback()])
    stopped(tmp_path / "stop.ckpt", lambda: module(make), run=run, epoch=1, batch=1, **options)
    assert len(built) == 1
    run(lambda: module(make), ckpt_path=tmp_path / "stop.ckpt", **options)
    assert len(built) == 2


@pytest.mark.filterwarnings("ignore:.*were read again.*")
@pytest.mark.parametrize("kind", [Counts, CountsWithState])
@pytest.mark.parametrize("every", [1, 2])
def test_a_dataset_that_is_built_anew_counts_its_passes_as_without_a_stop(
    tmp_path: Path, kind: Any, every: int
) -> None:
    class Rows(kind):  # type: ignore[misc]  # chosen here
        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                yield Numbers(100)[number[1] if isinstance(number, tuple) else number]

    moments = [("on_train_epoch_end", 0, 0), ("on_train_epoch_end", 1, 0), ("on_train_batch_end", 1, 1)]
    make = lambda: PlainData(lambda: DataLoader(Rows(), batch_size=2))  # noqa: E731
    options = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 3}
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, **options)


class CountsItsPasses(Sampler[int]):
    """Shuffles by the number of its passes."""

    passes = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(permutation(self.passes))


@pytest.mark.parametrize(
    "make",
    [WithCallback(CountsItsPasses, lambda _: LambdaCallback()), of(CountsItsPasses)],
    ids=["the same sampler", "a new one"],
)
def test_a_sampler_that_counts_its_passes_goes_on_or_begins_as_in_torch_without_a_word(
    tmp_path: Path, make: Any
) -> None:
    entry = Entry(make, "equal", trainer={"reload_dataloaders_every_n_epochs": 1})
    plain, whole = (train(entry, own=own) for own in (False, True))
    assert (whole.trained, whole.error, whole.said) == (plain.trained, "", [])
    for stop in (6, 8, 15):
        train(entry, save=tmp_path / "stop.ckpt", after=stop)
        resumed = train(entry, ckpt_path=tmp_path / "stop.ckpt")
        assert (resumed.trained, resumed.error, resumed.said) == (whole.trained[stop:], "", []), stop


class CountsRows(IterableDataset[Any]):
    """Begins each pass with another sample."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return map(Numbers(100).__getitem__, range(self.passes, self.passes + 6))


def test_a_dataset_that_counts_its_passes_under_new_loaders_is_warned_of() -> None:
    dataset = CountsRows()
    with pytest.warns(StatefulWarning, match=r"CountsRows changes itself from pass to pass, and a new loader .* not e"):
        train_alone(
            lambda: PlainData(lambda: DataLoader(dataset, batch_size=2)),
            max_epochs=2,
            reload_dataloaders_every_n_epochs=1,
        )


class Drawn(PlainData):
    """Draws the subset of an epoch from the generators of the process, or from the system's entropy."""

    def __init__(self, draw: Any = random.sample) -> None:
        super().__init__(lambda: DataLoader(Subset(Numbers(50), draw(range(50), 6)), batch_size=2))


def test_a_subset_that_train_dataloader_draws_for_an_epoch_is_the_same_on_a_resume(tmp_path: Path) -> None:
    def run(make: Any, *, seed: int = 1, **options: Any) -> Any:
        # A resumed script begins as the first has begun.
        return train_alone(make, model=seeded(), **options)

    moments = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 1), ("on_train_epoch_end", 1, 0)]
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    random.seed(5)
    assert_goes_on_from_every_moment(tmp_path, lambda: random.seed(5) or Drawn(), moments, run, **options)


def test_another_subset_of_an_epoch_is_refused_with_the_remedy_for_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run": train_alone, "epoch": 1, "reload_dataloaders_every_n_epochs": 1}
    stopped(tmp_path / "x.ckpt", lambda: Drawn(random.SystemRandom().sample), max_epochs=2, **options)
    with pytest.raises(StateMismatchError, match=r"dataset.indices: .* follow from self\.trainer\.current_epoch"):
        train_alone(Drawn, ckpt_path=tmp_path / "x.ckpt", reload_dataloaders_every_n_epochs=1)


class FromRows(IterableDataset[Any]):
    def __init__(self, end: int) -> None:
        self.end = end

    def __iter__(self) -> Iterator[Any]:
        return map(Numbers(100).__getitem__, range(self.end))


class MoreRows(pl.LightningDataModule):
    """A longer stream at each call, whose first samples are those of the one before."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.calls, self.make = 0, make

    def train_dataloader(self) -> Any:
        self.calls += 1
        return DataLoader(FromRows(8 + 4 * self.calls), batch_size=4) if self.make is None else self.make(self)


@pytest.mark.filterwarnings("ignore:.*were read again")
@pytest.mark.parametrize(
    "make", [None, lambda data: DataLoader(FromRows(8 + 4 * data.calls), batch_size=4)], ids=["method", "function"]
)
def test_a_stream_that_depends_on_the_number_of_calls_is_warned_of(tmp_path: Path, make: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    stopped(tmp_path / "x.ckpt", lambda: MoreRows(make), run=train_alone, epoch=1, batch=2, **options)
    with pytest.warns(StatefulWarning, match="calls was 2 and is 1. If samples depend on them, the resume is not ex"):
        train_alone(lambda: MoreRows(make), ckpt_path=tmp_path / "x.ckpt", **options)


class Sized(DataLoader[Any]):
    """Its length follows from an attribute that a hook sets by the epoch."""

    number = 3

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self.number)


class SetsNumber(pl.Callback):
    def __init__(self, loader: Sized) -> None:
        self.loader = loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loader.number = 3 + trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.loader.number = 4 + trainer.current_epoch


def test_a_length_that_is_restored_when_the_loader_has_been_built_anew_is_warned_of(tmp_path: Path) -> None:
    class Made(WithCallback):
        def __call__(self, workers: int) -> Any:
            made = self.sampler()
            return lambda: made, self.callback(made)

    make = Made(lambda: Sized(Indices(), batch_size=4), SetsNumber)
    entry = Entry(make, "equal", trainer={"reload_dataloaders_every_n_epochs": 1})
    train(entry, save=tmp_path / "stop.ckpt", after=5)
    again = train(entry, ckpt_path=tmp_path / "stop.ckpt")
    assert any("Epoch 1 has 3 batches here, and had 4 in the run" in text for text in again.said), again
