"""Other people's samplers under the callback alone: exact from every moment, wherever the loaders come from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import sampler_cases, samplers, sources
from support.ledger import LedgerModel, Numbers
from support.runs import StopAt, assert_same_end, assert_stitches, seeded, train
from support.sampler_cases import (
    TO_EVALUATE,
    Hooks,
    callback_of,
    cuts_loader,
    evaluate,
    train_with,
    val_loader,
)
from support.samplers import BATCHES, LENGTH, LOADERS, PERMUTATIONS, loader
from support.sources import trained
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import DDPSamplerWrapper, StatefulDataModule, StatefulLoader, is_patched
from lightning_stateful.errors import ConfigurationError

# Said by torchdata's loader, whenever one is made, of what newer versions of torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

MOMENTS = [
    ("on_train_batch_end", 0, 4),
    ("on_validation_batch_end", 1, 1),
    ("on_before_backward", 1, 2),
    ("on_train_epoch_end", 0, 0),
]
MORE_MOMENTS = [
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 1, 3),
    ("on_validation_start", 1, 0),
    ("on_validation_end", 0, 0),
    ("on_train_batch_start", 0, 0),
]
ALL_LOADERS = {**LOADERS, "lhotse's": cuts_loader}
WITHOUT_LEN = ("without len", "batches without len", "lhotse's")


def assert_goes_on_from_every_moment(
    folder: Path, make: Any, moments: list[tuple[str, int, int]] = MOMENTS, run: Any = train_with, **options: Any
) -> None:
    sources.assert_goes_on_from_every_moment(folder, make, moments, run, **options)


def ids(ledger: list[Any], epoch: int | None = None) -> list[Any]:
    return [event[4] for event in trained(ledger) if epoch in (None, event[1])]


def flat(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("name", ALL_LOADERS)
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name])


@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_moments_between_batches_and_epochs_are_none_the_worse(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], MORE_MOMENTS)


@pytest.mark.parametrize("name", ["class balanced", "batches without len", "own state", "lhotse's"])
def test_a_run_saved_at_the_last_batch_of_an_epoch_begins_the_next_one(tmp_path: Path, name: str) -> None:
    whole = train_with(ALL_LOADERS[name], max_epochs=2)
    moments = [("on_train_batch_end", epoch, len(ids(whole.ledger, epoch)) - 1) for epoch in range(2)]
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], moments)


# Where loaders come from


def from_hooks(make: Any, *, seed: int = 1, **options: Any) -> Any:
    return train_with(None, model=seeded(lambda: Hooks(make), seed), **options)


def passed_to_fit(make: Any, **options: Any) -> Any:
    callback = sampler_cases.StatefulDataCallback(seed=5)
    return train(make, **{**options, "callbacks": [callback, *options.get("callbacks", [])]})


class Subclass(StatefulDataModule):
    """Returns a loader of its user's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(val=Numbers(5, first=100), batch_size=2, seed=5)
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


def from_a_stateful_module(make: Any, **options: Any) -> Any:
    return train(lambda: Subclass(make), **options)


@pytest.mark.parametrize(("name", "run"), [("without len", from_hooks), ("class balanced", from_a_stateful_module)])
def test_loaders_come_from_hooks_or_a_stateful_module(tmp_path: Path, name: str, run: Any) -> None:
    assert_goes_on_from_every_moment(tmp_path, LOADERS[name], run=run)
    assert run(LOADERS[name], max_epochs=2).ledger == train_with(LOADERS[name], max_epochs=2).ledger


@pytest.mark.parametrize("name", ["without len"])
def test_loaders_passed_to_fit_go_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, LOADERS[name], [MOMENTS[0], MOMENTS[2]], passed_to_fit)


# What an epoch changes stays in a sampler that is used again.
KEPT = ["shuffled in place", "shuffled batches", "class balanced", "own state"]


@pytest.mark.parametrize("name", KEPT)
def test_one_loader_object_may_be_returned_to_one_fit_after_another(tmp_path: Path, name: str) -> None:
    whole = train_with(LOADERS[name], max_epochs=2)
    made = LOADERS[name]()
    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    train_with(lambda: made, callbacks=[stop], max_epochs=2)
    resumed = train_with(lambda: made, ckpt_path=tmp_path / "stop.ckpt", seed=99, max_epochs=2)
    assert_stitches([stop.ledger or [], resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


class Keeps(pl.LightningDataModule):
    """Has one sampler for all loaders that it is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.sampler = make()

    def train_dataloader(self) -> Any:
        return loader(batch_sampler=self.sampler)


@pytest.mark.parametrize("name", [name for name in KEPT if name != "own state"])
def test_loaders_that_are_built_again_of_one_sampler_go_on_exactly(tmp_path: Path, name: str) -> None:
    def run(make: Any, *, callbacks: Any = (), **options: Any) -> Any:
        callbacks = [sampler_cases.StatefulDataCallback(seed=5), *callbacks]
        return train(lambda: Keeps(make), callbacks=callbacks, **options)

    moments = [("on_train_batch_end", 1, 2), ("on_train_epoch_end", 0, 0)]
    make = samplers.BATCHED[name]
    assert_goes_on_from_every_moment(tmp_path, make, moments, run, reload_dataloaders_every_n_epochs=1, max_epochs=3)


def test_a_loader_that_has_been_iterated_before_is_none_the_worse() -> None:
    for name in ("class balanced", "shuffled batches", "torchdata's loader", "random"):
        made = LOADERS[name]()
        next(iter(made))
        assert train_with(lambda made=made: made, max_epochs=1).ledger == train_with(LOADERS[name], max_epochs=1).ledger


class Stream(IterableDataset[Any]):
    """The samples without random access."""

    def __iter__(self) -> Iterator[Any]:
        return (Numbers(LENGTH)[index] for index in range(LENGTH))


@pytest.mark.filterwarnings("ignore:.*of Stream .*read again.*")
def test_an_iterable_dataset_in_place_of_a_sampler_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, lambda: DataLoader(Stream(), batch_size=3))


# Structures

TWO = {"balanced": LOADERS["class balanced"], "weighted": LOADERS["weighted"]}
WITH_UNSIZED = {**TWO, "unsized": LOADERS["batches without len"], "own": LOADERS["own state"]}


def made(makes: dict[str, Any]) -> dict[str, Any]:
    return {name: make() for name, make in makes.items()}


STRUCTURES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(made(TWO).values()),
    "nested": lambda: {"first": LOADERS["shuffled batches"](), "rest": [LOADERS["random"](), made(TWO)]},
    "min_size": lambda: CombinedLoader(made(WITH_UNSIZED), "min_size"),
    "max_size": lambda: CombinedLoader(made({**TWO, "own": LOADERS["own state"]}), "max_size"),
    "max_size_cycle": lambda: CombinedLoader(list(made(TWO).values()), "max_size_cycle"),
    "all without len, min_size": lambda: CombinedLoader([ALL_LOADERS[name]() for name in WITHOUT_LEN], "min_size"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_loaders_go_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, STRUCTURES[name], MOMENTS[:3])


def three_batches(length: Any) -> Any:
    return loader(batch_sampler=DDPSamplerWrapper(samplers.ShuffledBatches(BATCHES[:3]), length=length))


CYCLES: dict[str, Callable[[], Any]] = {
    "the shorter begins anew again and again": lambda: {"short": three_batches("len"), "long": LOADERS["weighted"]()},
    "the shorter has a state": lambda: {"short": LOADERS["own state"](), "long": LOADERS["unbatched"]()},
}


@pytest.mark.parametrize("name", CYCLES)
def test_loaders_may_cycle_beside_longer_ones(tmp_path: Path, name: str) -> None:
    moments = [("on_train_batch_end", 0, 1), ("on_train_batch_end", 0, 9), ("on_before_backward", 1, 8)]
    assert_goes_on_from_every_moment(tmp_path, CYCLES[name], moments)


def test_a_loader_may_be_told_how_much_an_epoch_is_beside_a_longer_one(tmp_path: Path) -> None:
    def make(length: Any) -> Any:
        return lambda: {"short": three_batches(length), "long": LOADERS["random"]()}

    known, told = train_with(make("len"), max_epochs=2), train_with(make(3), max_epochs=2)
    assert [len(ids(known.ledger, epoch)) for epoch in range(2)] == [11, 11]
    assert told.ledger == known.ledger


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_loaders_of_which_the_end_is_unknown_are_refused_where_it_has_to_be_known(mode: Any) -> None:
    model = LedgerModel()
    words = r"Loaders \['unsized'\] do not say where they end.*'min_size'.*DDPSamplerWrapper\(sampler, length="
    with pytest.raises(ConfigurationError, match=words):
        train_with(lambda: CombinedLoader(made(WITH_UNSIZED), mode), model=model)
    assert model.ledger == []


@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_loaders_side_by_side_each_serve_what_they_serve_alone(mode: Any) -> None:
    makes = {name: ALL_LOADERS[name] for name in ("class balanced", "global random", "own state", "shuffled in place")}
    together = train_with(lambda: CombinedLoader(made(makes), mode), max_epochs=2)
    for name, make in makes.items():
        # Under its name: what a loader draws follows from that too.
        alone = train_with(lambda name=name, make=make: {name: make()}, max_epochs=2)
        for epoch in range(2):
            served, expected = ([dict(batch)[name] for batch in ids(run.ledger, epoch)] for run in (together, alone))
            if mode == "min_size":
                assert served == expected[: len(served)]
            else:
                assert served == expected + [None] * (len(served) - len(expected))


# Workers and the trainer's options


@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_workers_that_have_fetched_ahead_change_nothing(tmp_path: Path, name: str) -> None:
    def make(workers: int) -> Any:
        made = LOADERS[name]()
        made.num_workers, made.prefetch_factor = workers, 2 if workers else None
        return made

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    train_with(partial(make, 2), callbacks=[stop], max_epochs=2)
    resumed = train_with(partial(make, 2), ckpt_path=tmp_path / "stop.ckpt", seed=99, max_epochs=2)
    whole = train_with(partial(make, 0), max_epochs=2)
    assert_stitches([stop.ledger or [], resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


def test_workers_that_live_on_begin_every_epoch_of_a_sampler_without_len() -> None:
    batches = lambda **options: loader(batch_sampler=samplers.BatchesWithoutLen(), **options)  # noqa: E731
    living = train_with(lambda: batches(num_workers=2, persistent_workers=True))
    assert living.ledger == train_with(batches).ledger


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulating": {"accumulate_grad_batches": 3},
    "validating over epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "limited": {"limit_train_batches": 6},
    "reloading every epoch": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "counting steps": {"max_steps": 14, "max_epochs": -1},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("without len", options) for options in OPTIONS),
        ("class balanced", "counting steps"),
        ("own state", "accumulating"),
        ("batches without len", "reloading every epoch"),
    ],
)
def test_the_trainers_options_change_nothing_about_it(tmp_path: Path, name: str, options: str) -> None:
    moments = [moment for moment in MOMENTS if options != "counting steps" or moment[0] != "on_validation_batch_end"]
    assert_goes_on_from_every_moment(tmp_path, LOADERS[name], moments, **OPTIONS[options])


CHAIN = [("on_before_backward", 0, 4), ("on_before_backward", 0, 2), ("on_train_batch_end", 1, 1)]


@pytest.mark.parametrize("name", ["batches without len", "lhotse's"])
def test_a_chain_of_stops_gives_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    ledgers, path = [], None
    for number, (hook, epoch, batch) in enumerate(CHAIN):
        stop = StopAt(hook, tmp_path / f"{number}.ckpt", epoch=epoch, batch=batch)
        train_with(ALL_LOADERS[name], callbacks=[stop], ckpt_path=path, seed=1 if path is None else 50 + number)
        assert stop.ledger is not None
        ledgers.append(stop.ledger)
        path = tmp_path / f"{number}.ckpt"
    last = train_with(ALL_LOADERS[name], ckpt_path=path, seed=99)
    whole = train_with(ALL_LOADERS[name])
    assert_stitches([*ledgers, last.ledger], whole.ledger)
    assert_same_end(last, whole)


# Samplers without len


UNSIZED_OPTIONS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "accumulating": {"accumulate_grad_batches": 4},
    "validating over epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "limited within": {"limit_train_batches": 6},
    "limited at the end": {"limit_train_batches": 11},
    "counting steps": {"max_steps": 25, "max_epochs": -1},
}


@pytest.mark.parametrize("options", UNSIZED_OPTIONS)
def test_a_sampler_without_len_trains_as_it_would_with_one(options: str) -> None:
    unsized = train_with(LOADERS["without len"], **UNSIZED_OPTIONS[options])
    wrapped = DDPSamplerWrapper(samplers.WithoutLen(), length=LENGTH)
    sized = train_with(lambda: loader(sampler=wrapped, batch_size=2), **UNSIZED_OPTIONS[options])
    assert unsized.ledger == sized.ledger
    assert_same_end(unsized, sized)
    assert unsized.logged == sized.logged


def test_a_sampler_without_len_gives_every_sample_once_an_epoch_and_a_validation_after_it() -> None:
    for name in ("without len", "batches without len", "lhotse's"):
        run = train_with(ALL_LOADERS[name])
        for epoch in range(3):
            assert sorted(flat(ids(run.ledger, epoch))) == list(range(LENGTH)), (name, epoch)
            events = [event for event in run.ledger if event[1] == epoch]
            assert [event[0] for event in events if event[0] != "train"] == [
                "epoch start", "val", "val", "val", "epoch end"
            ]  # fmt: skip
            assert events[-5][0] == "train"
        assert len({tuple(flat(ids(run.ledger, epoch))) for epoch in range(3)}) == 3, name


@pytest.mark.parametrize("length", [1, 2])
def test_an_epoch_without_len_may_be_a_batch_or_two(tmp_path: Path, length: int) -> None:
    def make() -> Any:
        batches = samplers.ShuffledBatches(BATCHES[:length])
        return loader(batch_sampler=DDPSamplerWrapper(batches, length="unknown"))

    moments = [("on_train_batch_end", 0, length - 1), ("on_before_backward", 1, 0), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments)
    run = train_with(make)
    assert [len(ids(run.ledger, epoch)) for epoch in range(3)] == [length] * 3


@pytest.mark.parametrize("tail", ["split", "pad", "drop"])
def test_an_end_that_is_not_announced_may_be_dropped(tmp_path: Path, tail: Any) -> None:
    def make() -> Any:
        wrapper = DDPSamplerWrapper(samplers.WithoutLen(), tail=tail)
        return loader(sampler=wrapper, batch_size=4)

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 0, 4), ("on_train_batch_end", 1, 3)])
    assert [len(batch) for batch in ids(train_with(make, max_epochs=1).ledger)] == [4] * 5 + [2] * (tail != "drop")


@pytest.mark.parametrize("options", [{"limit_train_batches": 7}, {"max_steps": 17, "max_epochs": 1}])
def test_an_endless_sampler_goes_on_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    make = lambda: loader(sampler=samplers.Endless(), batch_size=3)  # noqa: E731
    moments = [("on_before_backward", 0, 5), ("on_train_batch_end", 0, 6)]
    moments += [("on_train_batch_end", 1, 3), ("on_validation_batch_end", 1, 0)] if "limit" in str(options) else []
    assert_goes_on_from_every_moment(tmp_path, make, moments, **options)


def test_an_endless_sampler_may_be_cut_off_after_a_given_length(tmp_path: Path) -> None:
    make = lambda: loader(sampler=DDPSamplerWrapper(samplers.Endless(), length=13), batch_size=3)  # noqa: E731
    assert_goes_on_from_every_moment(tmp_path, make, MOMENTS[:1], max_epochs=1)
    run = train_with(make, max_epochs=1)
    assert [len(batch) for batch in ids(run.ledger, 0)] == [3, 3, 3, 3, 1]
    assert run.trainer.num_training_batches == 5


def test_the_steps_of_a_whole_run_are_known_where_the_length_is() -> None:
    # Lightning says -1, the default of max_steps, of loaders without len.
    found = {}
    for name in ("class balanced", "without len"):
        run = train_with(LOADERS[name], max_epochs=2, accumulate_grad_batches=2)
        found[name] = run.trainer.estimated_stepping_batches
    assert found == {"class balanced": 10, "without len": -1}
    assert train_with(LOADERS["without len"], max_steps=7, max_epochs=-1).trainer.estimated_stepping_batches == 7


class Estimates(LedgerModel):
    """Asks how many steps there will be as people do for their schedules: before any state is restored."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("name", ["class balanced", "lhotse's"])
def test_a_model_may_ask_for_the_number_of_steps_before_training(tmp_path: Path, name: str) -> None:
    def run(make: Any, *, seed: int = 1, **options: Any) -> Any:
        return train_with(make, model=seeded(Estimates, seed), **options)

    # Lightning asks for the first batch early, before it has restored its counters.
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], MOMENTS[2:], run)
    assert run(ALL_LOADERS[name], max_epochs=2).ledger == train_with(ALL_LOADERS[name], max_epochs=2).ledger


class Fetches(LedgerModel):
    """Takes its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]  # Lightning goes by the name
        # The number that comes with a batch counts from where the run goes on.
        batch, _, _ = next(dataloader_iter)
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed
        self.ledger.append(("train", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))
        return self._loss(batch)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_a_model_that_fetches_by_itself_goes_on_exactly(tmp_path: Path, name: str) -> None:
    def run(make: Any, *, seed: int = 1, **options: Any) -> Any:
        return train_with(make, model=seeded(Fetches, seed), **options)

    moments = [("on_train_batch_end", 0, 4), ("on_train_batch_end", 1, 2), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, LOADERS[name], moments, run)


@pytest.mark.parametrize("make", [samplers.WithoutLen, samplers.OwnState, samplers.GlobalRandom])
def test_samples_go_on_in_batches_of_another_size(tmp_path: Path, make: Any) -> None:
    def run(batch_size: int, **options: Any) -> Any:
        return train_with(lambda: loader(sampler=make(), batch_size=batch_size), **options)

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", batch=3)
    before, after = run(2, callbacks=[stop]), run(3, ckpt_path=tmp_path / "stop.ckpt", max_epochs=2)
    for epoch in range(2):
        served = flat(ids(before.ledger, epoch)) + flat(ids(after.ledger, epoch))
        assert sorted(served) == list(range(LENGTH))


# Overfitting, reloading, fitting again


@pytest.mark.filterwarnings("ignore:.*overfit_batches trains on the same batches.*")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled.*")
@pytest.mark.parametrize(
    "name",
    ["class balanced", "shuffled in place", "batches without len", "lhotse's", "batches handed on"],
)
def test_overfitting_trains_on_the_same_batches_in_every_epoch(tmp_path: Path, name: str) -> None:
    options = {"overfit_batches": 3, "limit_val_batches": 0}
    run = train_with(ALL_LOADERS[name], **options)
    batches = [ids(run.ledger, epoch) for epoch in range(3)]
    assert len(batches[0]) == 3
    assert batches[0] == batches[1] == batches[2]
    moments = [("on_train_batch_end", 0, 1), ("on_before_backward", 1, 2)]
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], moments, **options)


@pytest.mark.parametrize("name", ["class balanced", "own state", "batches without len"])
def test_loaders_that_are_built_again_go_on_in_the_epoch_where_they_are(name: str) -> None:
    reloading = train_with(LOADERS[name], reload_dataloaders_every_n_epochs=1)
    assert_same_end(reloading, train_with(LOADERS[name]))


@pytest.mark.parametrize("name", ["class balanced", "batches without len", "own state"])
def test_a_trainer_that_is_fitted_again_goes_on_within_the_epoch(name: str) -> None:
    whole = train_with(LOADERS[name])
    model: Any = None
    for max_steps in (4, 11, -1):
        if model is None:
            run = train_with(LOADERS[name], max_steps=max_steps)
            model = run.trainer.lightning_module
            continue
        run.trainer.fit_loop.epoch_loop.max_steps = max_steps
        run.trainer.fit(model, datamodule=run.trainer.datamodule)
    # Lightning makes a new optimizer for each fit, so weights differ.
    assert ids(model.ledger) == ids(whole.ledger)


@pytest.mark.parametrize("name", ["class balanced", "without len"])
def test_a_run_ended_by_max_steps_goes_on_from_a_checkpoint_saved_after_it(tmp_path: Path, name: str) -> None:
    whole = train_with(LOADERS[name])
    # Within an epoch, and at the end of an epoch of either.
    for steps in (4, 9, 11):
        first = train_with(LOADERS[name], max_steps=steps)
        first.trainer.save_checkpoint(tmp_path / "end.ckpt")
        resumed = train_with(LOADERS[name], ckpt_path=tmp_path / "end.ckpt", seed=99)
        assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
        assert_same_end(resumed, whole)


# Evaluation


def batches_of(make: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in make()]


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices.*:UserWarning")
@pytest.mark.parametrize("name", TO_EVALUATE)
def test_evaluation_gives_every_sample_once(name: str) -> None:
    found = evaluate(TO_EVALUATE[name])
    expected = sorted(flat(batches_of(TO_EVALUATE[name])))
    for stage in ("validate", "test", "predict"):
        assert sorted(flat(found[stage])) == expected
    assert found["validate"] == found["test"] == found["predict"] == found["predictions"]


@pytest.mark.parametrize("name", ["an odd batch", "shuffled batches", "own state", "one at a time"])
def test_predictions_are_written_with_the_indices_that_they_belong_to(name: str) -> None:
    found = evaluate(TO_EVALUATE[name])
    assert [indices for indices, _ in found["written"]] == found["predict"]
    assert [predicted for _, predicted in found["written"]] == found["predict"]
    assert found["written at the end"] == [found["predict"]]


@pytest.mark.parametrize("name", ["batches without len", "samples without len"])
def test_of_predictions_of_a_sampler_without_len_it_is_said_that_there_are_no_indices(name: str) -> None:
    with pytest.warns(UserWarning, match="Couldn't infer the batch indices"):
        found = evaluate(TO_EVALUATE[name])
    assert [predicted for _, predicted in found["written"]] == found["predict"]
    assert [indices for indices, _ in found["written"]] == [[] for _ in found["predict"]]
    assert found["written at the end"] == [[]]


def test_validation_within_training_sees_every_sample_of_a_sampler_of_its_own() -> None:
    def run(**options: Any) -> Any:
        data = sampler_cases.PlainData(LOADERS["class balanced"], LOADERS["batches without len"])
        callback = sampler_cases.StatefulDataCallback(seed=5)
        return train(lambda: data, callbacks=[callback, *options.pop("callbacks", [])], max_epochs=2, **options)

    for epoch in range(2):
        validated = [event[4] for event in run().ledger if event[:2] == ("val", epoch)]
        assert sorted(flat(validated)) == list(range(LENGTH))


def test_a_sampler_shared_by_training_and_validation_is_one_to_each(tmp_path: Path) -> None:
    """People reuse one sampler object; each loader runs it for itself."""

    def data(shared: bool) -> Any:
        of_training = samplers.ShuffledBatches()
        of_validation = of_training if shared else samplers.ShuffledBatches()
        return sampler_cases.PlainData(
            lambda: loader(batch_sampler=of_training), lambda: loader(batch_sampler=of_validation)
        )

    def run(shared: bool, **options: Any) -> Any:
        callbacks = [sampler_cases.StatefulDataCallback(seed=5), *options.pop("callbacks", [])]
        return train(lambda: data(shared), callbacks=callbacks, max_epochs=2, val_check_interval=3, **options)

    whole = run(False)
    assert run(True).ledger == whole.ledger
    stop = StopAt("on_validation_batch_end", tmp_path / "stop.ckpt", epoch=0, batch=4)
    run(True, callbacks=[stop])
    resumed = run(True, ckpt_path=tmp_path / "stop.ckpt", seed=99)
    assert_stitches([stop.ledger or [], resumed.ledger], whole.ledger)
    assert_same_end(resumed, whole)


# What Lightning has already put in place


def test_loaders_of_another_trainer_are_taken_for_what_they_are() -> None:
    for name in ("class balanced", "without len", "random with replacement"):
        first = train_with(LOADERS[name], max_epochs=2)
        used: Any = first.trainer.train_dataloader
        assert is_patched(used)
        again = train_with(lambda used=used: used.loader, max_epochs=2)
        assert again.ledger == first.ledger


def test_loaders_of_another_trainer_may_be_passed_on() -> None:
    first = train_with(LOADERS["class balanced"], max_epochs=2)
    again = train_with(lambda: first.trainer.train_dataloader, max_epochs=2)
    assert again.ledger == first.ledger


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_lightnings_own_wrapper_around_a_sampler_is_seen_through(name: str) -> None:
    plain = loader(sampler=PERMUTATIONS[name](), batch_size=2)
    if name == "without len":
        with pytest.raises(TypeError, match="`__len__`"):
            DistributedSamplerWrapper(plain.sampler, num_replicas=2, rank=0)
        return
    wrapper = DistributedSamplerWrapper(plain.sampler, num_replicas=2, rank=0)
    wrapped = loader(sampler=wrapper, batch_size=2)
    assert train_with(lambda: wrapped, max_epochs=2).ledger == train_with(lambda: plain, max_epochs=2).ledger


def test_a_loader_whose_sampler_lightning_has_replaced_is_seen_through() -> None:
    """What a Trainer without the callback leaves behind in ``trainer.train_dataloader``."""
    plain = train(lambda: loader(sampler=samplers.GlobalRandom(), batch_size=2), max_epochs=1, overfit_batches=0.0)
    left: Any = plain.trainer.train_dataloader
    again = train_with(lambda: left, max_epochs=2)
    assert again.ledger == train_with(LOADERS["global random"], max_epochs=2).ledger


def test_attributes_of_a_loader_of_ones_own_kind_are_those_of_the_loader_in_use() -> None:
    class Named(torch.utils.data.DataLoader[Any]):
        name = "named"

    run = train_with(lambda: Named(Numbers(LENGTH), batch_sampler=samplers.ClassBalanced()), max_epochs=1)
    used: Any = run.trainer.train_dataloader
    assert isinstance(used.loader, Named)
    assert isinstance(used.loader, StatefulLoader)
    assert used.name == "named"


# Where the resume mode can be seen

SAID = {
    "class balanced": ("fast_forward", "ClassBalanced is begun anew on a resume and fast-forwarded, by indices alone."),
    "without len": ("fast_forward", "WithoutLen is begun anew on a resume and fast-forwarded, by indices alone."),
    "own state": ("own_state", "OwnState keeps its own state, which a resume goes on from."),
    "lhotse's": ("own_state", "SimpleCutSampler keeps its own state, which a resume goes on from."),
}


@pytest.mark.parametrize("name", SAID)
def test_the_resume_mode_is_in_the_log_the_report_and_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    mode, said = SAID[name]
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run = train_with(ALL_LOADERS[name], max_steps=3, max_epochs=1)
    assert caplog.text.count(f"Training data: {said}") == 1
    kind = said.split()[0]
    report = callback_of(run).position_report()
    assert report["sampler"] == {"class": kind, "resume_mode": mode}
    assert report["epoch"] == 0
    # What lhotse's sampler yields is whole batches to the toolkit, whatever torch calls them.
    assert next(iter(set(report) - {"epoch", "sampler"})) in ("samples", "batches")
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]["data"]
    assert saved["config"]["sampler"]["resume_mode"] == mode
    assert saved["config"]["sampler"]["class"] == kind
    assert saved["progress"]["consumed"] == {"without len": 6, "own state": 6}.get(name, 3)


def test_several_loaders_are_reported_by_path(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run = train_with(lambda: {"a": LOADERS["weighted"](), "b": [LOADERS["own state"]()]}, max_steps=2)
    assert "Training data 'a': WeightedRandomSampler is begun anew" in caplog.text
    assert "Training data 'b.0': OwnState keeps its own state" in caplog.text
    assert callback_of(run).position_report() == {
        "a": {"epoch": 0, "samples": 4, "sampler": {"class": "WeightedRandomSampler", "resume_mode": "fast_forward"}},
        "b.0": {"epoch": 0, "samples": 4, "sampler": {"class": "OwnState", "resume_mode": "own_state"}},
    }


def test_the_state_stays_small_and_plain(tmp_path: Path) -> None:
    for name in LOADERS:
        run = train_with(LOADERS[name], max_steps=5)
        state = callback_of(run).data_state()
        assert len(repr(state)) < 1000, name
        assert copy.deepcopy(state) == callback_of(run).data_state()


class Own(LedgerModel):
    """Draws from the generators that all code shares, in training itself."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ledger.append(("drawn", self.current_epoch, round(float(torch.rand(())), 6)))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["without len", "own state", "class balanced"])
def test_what_the_model_draws_does_not_depend_on_the_sampler(name: str) -> None:
    def drawn(make: Any) -> list[Any]:
        return [event for event in train_with(make, model=seeded(Own), max_steps=8).ledger if event[0] == "drawn"]

    assert drawn(LOADERS[name]) == drawn(lambda: loader(batch_size=2))


def test_validation_before_training_takes_nothing_from_it() -> None:
    for name in ("batches without len", "own state"):
        checked = train_with(LOADERS[name], num_sanity_val_steps=2, max_epochs=2)
        assert checked.ledger == train_with(LOADERS[name], max_epochs=2).ledger


def test_a_model_validated_between_two_fits_goes_on_where_it_stood() -> None:
    whole = train_with(LOADERS["batches without len"], max_epochs=2)
    run = train_with(LOADERS["batches without len"], max_steps=4)
    model: Any = run.trainer.lightning_module
    run.trainer.validate(model, dataloaders=val_loader(), verbose=False)
    run.trainer.fit_loop.epoch_loop.max_steps = -1
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(model, datamodule=run.trainer.datamodule)
    assert ids(model.ledger) == ids(whole.ledger)
    assert isinstance(run.trainer, pl.Trainer)
