"""Samplers that cannot be resumed exactly, or have changed since, are refused by name before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import samplers
from support.ledger import LedgerModel, Numbers, batches, ids_of, trained
from support.runs import assert_goes_on_from_every_moment, quiet_trainer, stopped, train
from support.sampler_cases import PlainData, cuts_loader, train_with
from support.samplers import BATCHES, LENGTH, LOADERS, loader
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import StatefulDataCallback, is_patched, patch_dataloader
from lightning_stateful.errors import (
    ConfigurationError,
    PositionError,
    StatefulWarning,
    StateMismatchError,
)


def by_the_clock() -> Any:
    return loader(sampler=samplers.ByTheClock())


def test_a_sampler_that_cannot_be_right_is_refused_by_name_before_training() -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match="SaysTooMuch yields only 8 items"):
        train_with(
            lambda: {"good": LOADERS["weighted"](), "bad": [loader(batch_sampler=samplers.SaysTooMuch())]}, model=model
        )
    assert model.ledger == []


def test_what_cannot_be_repeated_is_accepted_on_request_with_a_warning_at_each_resume(tmp_path: Path) -> None:
    settings = {"accept": ("nondeterministic",)}
    stopped(tmp_path / "stop.ckpt", by_the_clock, run=train_with, settings=settings, batch=3, max_epochs=1)
    for _ in range(2):
        with pytest.warns(StatefulWarning, match="ByTheClock differs from run to run"):
            run = train_with(by_the_clock, settings=settings, ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
        assert len(trained(run.ledger)) == LENGTH - 4


class InOrderFirst(Sampler[int]):
    """Yields its samples in order in its first pass; later ones are drawn without a seed."""

    first = True

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        is_first, self.first = self.first, False
        return iter(range(LENGTH) if is_first else np.random.default_rng().permutation(LENGTH).tolist())


class DrawsLater(InOrderFirst):
    """Makes its generator behind the last sample of the first pass, and keeps it."""

    rng: Any = None

    def __iter__(self) -> Iterator[int]:
        yield from range(LENGTH) if self.rng is None else self.rng.permutation(LENGTH).tolist()
        self.rng = self.rng or np.random.default_rng()


class ByEpoch(InOrderFirst):
    """Goes by the epoch that it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch == 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH) if self.first else np.random.default_rng().permutation(LENGTH).tolist())


@pytest.mark.parametrize("kind", [InOrderFirst, DrawsLater, ByEpoch])
def test_a_sampler_whose_later_passes_cannot_be_repeated_is_warned_of_in_the_run_and_on_each_resume(
    tmp_path: Path, kind: Any
) -> None:
    def make() -> Any:
        return loader(sampler=kind())

    for hook in ("on_train_batch_end", "on_train_epoch_end"):
        said = f"{kind.__name__} begins its epoch 1 otherwise on each of two equal copies.*epochs from 1 on cannot be"
        with pytest.warns(StatefulWarning, match=said):
            stopped(tmp_path / "stop.ckpt", make, hook, run=train_with, max_epochs=2)
        with pytest.warns(StatefulWarning, match=said):
            train_with(make, ckpt_path=tmp_path / "stop.ckpt", max_epochs=2)


class ByNames(Sampler[int]):
    """Goes in order for some epochs, and by a set of names from then on."""

    def __init__(self, first: int) -> None:
        self.names, self.first, self.epoch = {f"class {index}" for index in range(LENGTH)}, first, 0

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        names = self.names if self.epoch >= self.first else sorted(self.names)
        return iter([int(name.removeprefix("class ")) for name in names])


class LooksUp(ByNames):
    """Only looks whether a name is in the set."""

    def __iter__(self) -> Iterator[int]:
        return iter([index for index in range(LENGTH) if f"class {index}" in self.names])


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_sampler_that_goes_by_a_set_of_strings_is_warned_of_before_it_does(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.warns(
        StatefulWarning, match=f"ByNames begins its epoch {first} otherwise on a copy with the same set of"
    ):
        train_with(lambda: loader(sampler=ByNames(first)), max_epochs=1)
    train_with(lambda: loader(sampler=LooksUp(first)), max_epochs=1)
    if first:
        # With a seed of the user's the order is the same in every process.
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        train_with(lambda: loader(sampler=ByNames(first)), max_epochs=1)


class KeepsStream(Sampler[int]):
    """Each epoch is the next part of one endless stream of permutations, which it keeps."""

    stream: Any = None

    def __len__(self) -> int:
        return 10

    def permutations(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(LENGTH).tolist()

    def __iter__(self) -> Iterator[int]:
        self.stream = self.stream or self.permutations()
        return iter([next(self.stream) for _ in range(len(self))])


def test_one_that_goes_on_with_a_generator_that_it_keeps_is_exact_without_a_word(tmp_path: Path) -> None:
    def make() -> Any:
        return loader(sampler=KeepsStream())

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 0), ("on_train_epoch_end", 2, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_with, max_epochs=4)


# Changed since


OTHER_LABELS = [(number + 1) % 3 for number in range(LENGTH)]
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "other labels": (
        LOADERS["class balanced"],
        lambda: loader(batch_sampler=samplers.ClassBalanced(OTHER_LABELS)),
        "sequence: saved .*, now .*accept=.'sequence',.",
    ),
    "another length": (
        LOADERS["shuffled batches"],
        lambda: loader(batch_sampler=samplers.ShuffledBatches(BATCHES[:-1])),
        "length",
    ),
    "another sampler": (LOADERS["shuffled batches"], LOADERS["class balanced"], "'ShuffledBatches'.*'ClassBalanced'"),
    "no sampler": (LOADERS["shuffled batches"], lambda: loader(batch_size=2), "batch_sampler"),
    "fewer cuts": (cuts_loader, lambda: cuts_loader(LENGTH - 1), "sequence: saved .*, now .*accept=.'sequence',."),
}


# Between epochs no batch of the old sampler's can be compared.
@pytest.mark.parametrize(
    ("name", "hook"),
    [*((name, "on_train_batch_end") for name in CHANGED), ("another sampler", "on_train_epoch_end")],
)
def test_a_sampler_that_has_changed_since_is_refused_before_anything_is_trained(
    tmp_path: Path, name: str, hook: str
) -> None:
    before, after, words = CHANGED[name]
    stopped(tmp_path / "stop.ckpt", before, hook, run=train_with)
    model = LedgerModel()
    with pytest.raises((StateMismatchError, PositionError), match=words):
        train_with(after, ckpt_path=tmp_path / "stop.ckpt", model=model)
    assert trained(model.ledger) == []


# The loader in use


def plain() -> Any:
    return loader(batch_size=2)


def swap_combined(trainer: Any) -> None:
    loop = trainer.fit_loop
    loop._combined_loader = CombinedLoader(plain())
    loop._data_fetcher.setup(loop._combined_loader)
    iter(loop._data_fetcher)


def swap_within(trainer: Any) -> None:
    trainer.fit_loop._combined_loader.flattened = [plain()]


def swap_what_a_view_reads(trainer: Any) -> None:
    (view,) = trainer.fit_loop._combined_loader.flattened
    view.stateful_loader = patch_dataloader(LOADERS["class balanced"]())


def replace_source(trainer: Any) -> None:
    trainer.fit_loop._data_source = _DataLoaderSource(plain(), "")


def put_in_place(trainer: Any) -> None:
    trainer.fit_loop._data_source.instance = plain()
    trainer.fit_loop._data_source.name = ""


def swapped(hook: str, swap: Any, *, first: bool, **options: Any) -> Any:
    """Train with a callback that swaps loaders, before or after the toolkit's callback has its turn."""
    swaps = LambdaCallback(**{hook: lambda trainer, *args, **kwargs: swap(trainer)})
    callbacks = [StatefulDataCallback(seed=5), swaps]
    return train(lambda: PlainData(LOADERS["class balanced"]), callbacks=callbacks[:: -1 if first else 1], **options)


def assert_found(hook: str, swap: Any, num_steps: int = 0, **options: Any) -> None:
    """A swapped loader is found before it is trained on."""
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match=r"not the callback's.*Leave trainer.fit_loop's loaders alone"):
        swapped(hook, swap, model=model, **options)
    assert len(trained(model.ledger)) == num_steps


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(("first", "resumed"), [(True, False), (False, True)])
@pytest.mark.parametrize("swap", [swap_combined, swap_within, swap_what_a_view_reads])
def test_a_loader_that_is_not_the_callbacks_own_is_found_before_it_is_trained_on(
    tmp_path: Path, swap: Any, first: bool, resumed: bool
) -> None:
    path = tmp_path / "stop.ckpt" if resumed else None
    if path is not None:
        stopped(path, LOADERS["class balanced"], run=train_with, batch=4)
    assert_found("on_train_start", swap, first=first, ckpt_path=path)


@pytest.mark.parametrize(("hook", "first"), [("setup", False), ("on_fit_start", False), ("on_fit_start", True)])
def test_a_source_of_loaders_that_is_replaced_is_found_before_it_is_trained_on(hook: str, first: bool) -> None:
    assert_found(hook, replace_source, first=first)


@pytest.mark.parametrize(
    ("hook", "swap", "first"), [("setup", replace_source, True), ("on_fit_start", put_in_place, False)]
)
def test_what_is_replaced_before_the_callback_asks_for_it_is_what_it_takes(hook: str, swap: Any, first: bool) -> None:
    run = swapped(hook, swap, first=first, max_epochs=1)
    assert batches(run.ledger) == batches(train_with(plain, max_epochs=1).ledger)
    assert is_patched(run.trainer.train_dataloader)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_a_loader_that_is_swapped_between_epochs_is_never_trained_on(hook: str) -> None:
    def swap_later(trainer: Any) -> None:
        if trainer.current_epoch == 1 or hook == "on_train_epoch_end":
            swap_within(trainer)

    assert_found(hook, swap_later, 9, first=True)


# Evaluation


def test_a_sampler_by_the_clock_is_evaluated_as_it_is_on_one_rank() -> None:
    """There is nothing to resume in an evaluation."""
    model = LedgerModel()
    trainer: Any = train_with(LOADERS["class balanced"], max_epochs=1).trainer
    trainer.test(model, dataloaders=loader(sampler=samplers.ByTheClock(), batch_size=4), verbose=False)
    assert sorted(index for event in model.ledger for index in ids_of(event)) == list(range(LENGTH))


class Endless(Sampler[int]):
    """Has no end, and no len()."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(8)


class EpochOfThree(DataLoader[Any]):
    """Says itself how long an epoch is."""

    def __len__(self) -> int:
        return 3


def test_an_own_length_of_a_loader_over_an_endless_sampler_is_refused_unless_the_trainer_has_it_too() -> None:
    def fit(**options: Any) -> Any:
        trainer = quiet_trainer(StatefulDataCallback(), max_epochs=2, **options)
        trainer.fit(LedgerModel(), EpochOfThree(Numbers(8), batch_size=2, sampler=Endless()))
        return trainer

    with pytest.raises(ConfigurationError, match="an epoch has 3 batches, and its Endless has no len"):
        fit(max_steps=20)
    assert fit(limit_train_batches=3).global_step == 6


class EpochOfNine(DataLoader[Any]):
    """Says more batches than it gives."""

    def __len__(self) -> int:
        return 9


class CountsItsBatches(DataLoader[Any]):
    """Says what DataLoader does, in its own way."""

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]  # it has one


def test_an_own_length_that_is_not_what_the_loader_gives_is_refused_unless_the_trainer_ends_epochs_before() -> None:
    def fit(kind: Any, **options: Any) -> Any:
        trainer = quiet_trainer(StatefulDataCallback(), max_epochs=2, **options)
        trainer.fit(LedgerModel(), kind(Numbers(12), batch_size=2, shuffle=True))
        return trainer

    with pytest.raises(ConfigurationError, match=r"has 3 batches, and it gives 6.*limit_train_batches=3"):
        fit(EpochOfThree)
    with pytest.raises(ConfigurationError, match=r"has 9 batches, and it gives 6\. Schedules"):
        fit(EpochOfNine)
    assert fit(EpochOfThree, limit_train_batches=3).global_step == 6
    assert fit(EpochOfNine, limit_train_batches=6).global_step == 12
    assert fit(CountsItsBatches).global_step == 12
