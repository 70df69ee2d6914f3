"""Samplers that cannot be resumed exactly, or have changed since, are refused by name before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import samplers
from support.ledger import LedgerModel
from support.runs import StopAt, train
from support.sampler_cases import PlainData, cuts_loader, train_with
from support.samplers import BATCHES, LENGTH, LOADERS, loader
from support.sources import trained
from torch.utils.data import Sampler

from lightning_stateful import DDPSamplerWrapper, StatefulDataCallback, is_patched, patch_dataloader
from lightning_stateful.errors import (
    ConfigurationError,
    PositionError,
    StatefulError,
    StatefulWarning,
    StateMismatchError,
    UnsupportedLoaderError,
)


class Once(Sampler[int]):
    """Is over after one epoch."""

    def __init__(self) -> None:
        self.indices = iter(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.indices)


REFUSED: dict[str, tuple[Callable[[], Any], type[StatefulError], str]] = {
    "by the clock": (
        lambda: loader(sampler=samplers.ByTheClock()),
        UnsupportedLoaderError,
        "the training loader: ByTheClock yields something else .* accept=.'nondeterministic',.",
    ),
    "counts epochs": (
        lambda: loader(sampler=samplers.CountsEpochs()),
        UnsupportedLoaderError,
        "the training loader: CountsEpochs counts its epochs by itself.*Give it set_epoch",
    ),
    "says too much": (
        lambda: loader(batch_sampler=samplers.SaysTooMuch()),
        ConfigurationError,
        "SaysTooMuch yields 8 items in epoch 0, but its len.. is 9.*length='unknown'",
    ),
    "says too little": (
        lambda: loader(batch_sampler=samplers.SaysTooLittle()),
        ConfigurationError,
        "SaysTooLittle yields 8 items in epoch 0, but its len.. is 7.*length='unknown'",
    ),
    "an iterator": (
        lambda: loader(sampler=Once()),
        UnsupportedLoaderError,
        "Once yields something else when the same epoch is begun a second time",
    ),
    "in no order": (
        lambda: loader(sampler=samplers.GlobalRandom(), in_order=False),
        UnsupportedLoaderError,
        "in_order=False",
    ),
    "among others": (
        lambda: {"good": LOADERS["weighted"](), "bad": [loader(sampler=samplers.ByTheClock())]},
        UnsupportedLoaderError,
        "the training loader 'bad.0': ByTheClock yields",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resumed_exactly_is_refused_by_name_before_training(name: str) -> None:
    make, error, words = REFUSED[name]
    model = LedgerModel()
    with pytest.raises(error, match=words):
        train_with(make, model=model)
    assert model.ledger == []


class TooFewLater(samplers.ShuffledBatches):
    """Has as many batches as it says, but for the second epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter(batches if self.epoch != 1 else self.change(batches))

    def change(self, batches: list[list[int]]) -> list[list[int]]:
        return batches[:-2]


class TooManyLater(TooFewLater):
    def change(self, batches: list[list[int]]) -> list[list[int]]:
        return [*batches, [0]]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TooFewLater, "only 6"),
        (TooManyLater, "more than 8"),
    ],
)
def test_a_wrong_length_of_a_later_epoch_is_found_in_it(kind: Any, words: str) -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__} yields {words} items in epoch 1.*'unknown'"):
        train_with(lambda: loader(batch_sampler=kind()), model=model)
    assert [event[1] for event in trained(model.ledger)].count(0) == 8


def test_a_sampler_that_says_too_much_may_be_told_to_find_out() -> None:
    run = train_with(
        lambda: loader(batch_sampler=DDPSamplerWrapper(samplers.SaysTooMuch(), length="unknown")), max_epochs=2
    )
    right = train_with(LOADERS["shuffled batches"], max_epochs=2)
    assert run.ledger == right.ledger


def test_what_cannot_be_repeated_is_accepted_on_request_with_a_warning_at_each_resume(tmp_path: Path) -> None:
    make, settings = REFUSED["by the clock"][0], {"accept": ("nondeterministic",)}
    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=0, batch=3)
    train_with(make, settings=settings, callbacks=[stop], max_epochs=1)
    for _ in range(2):
        with pytest.warns(StatefulWarning, match="ByTheClock differs from run to run"):
            run = train_with(make, settings=settings, ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
        assert len(trained(run.ledger)) == LENGTH - 4


# Changed since


def stopped(folder: Path, make: Any, *, epoch: int = 0, batch: int = 4, run: Any = train_with, **options: Any) -> Path:
    path = folder / "stop.ckpt"
    run(make, callbacks=[StopAt("on_train_batch_end", path, epoch=epoch, batch=batch)], **options)
    return path


OTHER_LABELS = [(number + 1) % 3 for number in range(LENGTH)]
FEWER_CUTS = LENGTH - 1
BEGINS_OTHERWISE = "sequence: saved .*, now .*accept=.'sequence',."
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "other labels": (
        LOADERS["class balanced"],
        lambda: loader(batch_sampler=samplers.ClassBalanced(OTHER_LABELS)),
        BEGINS_OTHERWISE,
    ),
    "other weights": (
        LOADERS["weighted"],
        lambda: loader(sampler=torch.utils.data.WeightedRandomSampler(samplers.WEIGHTS[::-1], LENGTH), batch_size=2),
        "WeightedRandomSampler no longer yields what it did",
    ),
    "another length": (
        LOADERS["shuffled batches"],
        lambda: loader(batch_sampler=samplers.ShuffledBatches(BATCHES[:-1])),
        "length",
    ),
    "another sampler": (LOADERS["shuffled batches"], LOADERS["class balanced"], "'ShuffledBatches'.*'ClassBalanced'"),
    "another order": (LOADERS["shuffled batches"], lambda: loader(batch_size=2), "batch_sampler"),
    "other batches without len": (
        LOADERS["without len"],
        lambda: loader(sampler=Renamed(), batch_size=2),
        BEGINS_OTHERWISE,
    ),
    "fewer cuts": (cuts_loader, lambda: cuts_loader(FEWER_CUTS), BEGINS_OTHERWISE),
    "another seed of its own": (
        LOADERS["own state"],
        lambda: loader(sampler=OwnSeed(), batch_size=2),
        BEGINS_OTHERWISE,
    ),
}


class Renamed(samplers.WithoutLen):
    def __iter__(self) -> Iterator[int]:
        return (LENGTH - 1 - index for index in super().__iter__())


class OwnSeed(samplers.OwnState):
    def __iter__(self) -> Iterator[int]:
        return ((index + 1) % LENGTH for index in super().__iter__())


Renamed.__qualname__, OwnSeed.__qualname__ = "WithoutLen", "OwnState"


@pytest.mark.parametrize("name", CHANGED)
def test_a_sampler_that_has_changed_since_is_refused_before_anything_is_trained(tmp_path: Path, name: str) -> None:
    before, after, words = CHANGED[name]
    path, model = stopped(tmp_path, before, batch=0 if name == "other labels" else 5), LedgerModel()
    with pytest.raises((StateMismatchError, PositionError), match=words):
        train_with(after, ckpt_path=path, model=model)
    assert trained(model.ledger) == []


def test_a_sampler_that_has_changed_since_is_refused_even_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Between epochs no batch of the old sampler's can be compared."""
    before, after, _ = CHANGED["another sampler"]
    path = tmp_path / "stop.ckpt"
    train_with(before, callbacks=[StopAt("on_train_epoch_end", path)])
    model = LedgerModel()
    with pytest.raises(StateMismatchError, match=r"'ShuffledBatches'.*'ClassBalanced'"):
        train_with(after, ckpt_path=path, model=model)
    assert model.ledger == []


def test_other_weights_for_a_run_accepted_to_go_on_elsewhere_are_warned_of(tmp_path: Path) -> None:
    before, after, _ = CHANGED["other labels"]
    path = stopped(tmp_path, before)
    with pytest.warns(StatefulWarning, match="Accepted: sequence at item 4"):
        run = train_with(after, ckpt_path=path, settings={"accept": ("sequence",)}, max_epochs=1)
    assert len(trained(run.ledger)) == 4


def test_another_seed_is_refused_by_name(tmp_path: Path) -> None:
    path = stopped(tmp_path, LOADERS["class balanced"])
    with pytest.raises(StateMismatchError, match="seed: saved 5, now 6"):
        train_with(LOADERS["class balanced"], ckpt_path=path, settings={"seed": 6})


# The loader in use


class Swaps(pl.Callback):
    """Puts loaders of its own where Lightning will look for them."""

    def __init__(self, hook: str, swap: Callable[[Any], None]) -> None:
        setattr(self, hook, lambda trainer, *args, **kwargs: swap(trainer))


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
    view.loader = patch_dataloader(LOADERS["class balanced"]())


def replace_source(trainer: Any) -> None:
    trainer.fit_loop._data_source = _DataLoaderSource(plain(), "")


def put_in_place(trainer: Any) -> None:
    trainer.fit_loop._data_source.instance = plain()
    trainer.fit_loop._data_source.name = ""


def swapped(hook: str, swap: Any, *, first: bool, model: LedgerModel | None = None, **options: Any) -> Any:
    """Train with a callback that swaps loaders, before or after the toolkit's callback has its turn."""
    callbacks = [StatefulDataCallback(seed=5), Swaps(hook, swap)]
    data = lambda: PlainData(LOADERS["class balanced"])  # noqa: E731
    return train(data, callbacks=callbacks[::-1] if first else callbacks, model=model, **options)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(("first", "resumed"), [(True, False), (False, True)])
@pytest.mark.parametrize("swap", [swap_combined, swap_within, swap_what_a_view_reads])
def test_a_loader_that_is_not_the_callbacks_own_is_found_before_it_is_trained_on(
    tmp_path: Path, swap: Any, first: bool, resumed: bool
) -> None:
    path, model = stopped(tmp_path, LOADERS["class balanced"]) if resumed else None, LedgerModel()
    with pytest.raises(ConfigurationError, match=r"not the callback's.*Leave trainer.fit_loop's loaders alone"):
        swapped("on_train_start", swap, first=first, model=model, ckpt_path=path)
    assert trained(model.ledger) == []


@pytest.mark.parametrize(("hook", "first"), [("setup", False), ("on_fit_start", False), ("on_fit_start", True)])
def test_a_source_of_loaders_that_is_replaced_is_found_before_it_is_trained_on(hook: str, first: bool) -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match="not the callback's"):
        swapped(hook, replace_source, first=first, model=model)
    assert trained(model.ledger) == []


def test_a_source_that_is_replaced_before_the_callback_looks_for_it_is_the_one_it_takes() -> None:
    run = swapped("setup", replace_source, first=True, max_epochs=1)
    expected = train_with(plain, max_epochs=1)
    assert [event[4] for event in trained(run.ledger)] == [event[4] for event in trained(expected.ledger)]
    assert is_patched(run.trainer.train_dataloader)


def test_what_a_source_holds_may_be_replaced_before_it_is_asked() -> None:
    run = swapped("on_fit_start", put_in_place, first=False, max_epochs=1)
    expected = train_with(plain, max_epochs=1)
    assert [event[4] for event in trained(run.ledger)] == [event[4] for event in trained(expected.ledger)]
    assert is_patched(run.trainer.train_dataloader)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_a_loader_that_is_swapped_between_epochs_is_never_trained_on(hook: str) -> None:
    def swap_later(trainer: Any) -> None:
        if trainer.current_epoch == 1 or hook == "on_train_epoch_end":
            swap_within(trainer)

    model = LedgerModel()
    with pytest.raises(ConfigurationError, match="not the callback's"):
        swapped(hook, swap_later, first=True, model=model)
    assert [event[1] for event in trained(model.ledger)] == [0] * 9


# Evaluation


def test_a_sampler_by_the_clock_is_evaluated_as_it_is_on_one_rank() -> None:
    """There is nothing to resume in an evaluation."""
    model = LedgerModel()
    trainer: Any = train_with(LOADERS["class balanced"], max_epochs=1).trainer
    trainer.test(model, dataloaders=loader(sampler=samplers.ByTheClock(), batch_size=4), verbose=False)
    assert sorted(index for event in model.ledger for index in event[2]) == list(range(LENGTH))
