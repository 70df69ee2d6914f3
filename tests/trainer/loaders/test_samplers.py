"""Other people's samplers under the callback alone: exact from every moment, wherever the loaders come from."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from support.runs import StopAt, assert_same_end, seeded, train
from support.sampler_cases import (
    callback_of,
    cuts_loader,
    train_with,
)
from support.samplers import BATCHES, LENGTH, LOADERS, PERMUTATIONS, loader
from support.sources import trained

from lightning_stateful import DDPSamplerWrapper, is_patched
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
    *MOMENTS,
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 0, 0),
    ("on_train_batch_start", 1, 3),
    ("on_validation_start", 1, 0),
    ("on_validation_end", 0, 0),
]
HARDEST = MOMENTS[2:3]
ALL_LOADERS = {**LOADERS, "lhotse's": cuts_loader}
WITHOUT_LEN = ("without len", "batches without len", "lhotse's")


def assert_goes_on_from_every_moment(
    folder: Path, make: Any, moments: list[tuple[str, int, int]] = MOMENTS, run: Any = train_with, **options: Any
) -> Any:
    return sources.assert_goes_on_from_every_moment(folder, make, moments, run, **options)


def ids(ledger: list[Any], epoch: int | None = None) -> list[Any]:
    return [event[4] for event in trained(ledger) if epoch in (None, event[1])]


def flat(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("name", ALL_LOADERS)
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    every = name in ("class balanced", "batches without len", "own state", "lhotse's")
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], MORE_MOMENTS if every else HARDEST)


@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_a_run_saved_at_the_last_batch_of_an_epoch_begins_the_next_one(tmp_path: Path, name: str) -> None:
    whole = train_with(ALL_LOADERS[name], max_epochs=2)
    moments = [("on_train_batch_end", epoch, len(ids(whole.ledger, epoch)) - 1) for epoch in range(2)]
    assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], moments)


# What an epoch changes stays in a sampler that is used again.
@pytest.mark.parametrize("name", ["shuffled in place", "own state"])
def test_one_loader_object_may_be_returned_to_one_fit_after_another(tmp_path: Path, name: str) -> None:
    made = LOADERS[name]()
    whole = assert_goes_on_from_every_moment(tmp_path, lambda: made, [("on_train_batch_end", 1, 3)])
    assert whole.ledger == train_with(LOADERS[name], max_epochs=2).ledger


class Keeps(pl.LightningDataModule):
    """Has one sampler for all loaders that it is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.sampler = make()

    def train_dataloader(self) -> Any:
        return loader(batch_sampler=self.sampler)


@pytest.mark.parametrize("name", ["shuffled in place", "class balanced"])
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


# Structures

TWO = {"balanced": LOADERS["class balanced"], "weighted": LOADERS["weighted"]}
WITH_UNSIZED = {**TWO, "unsized": LOADERS["batches without len"], "own": LOADERS["own state"]}


def made(makes: dict[str, Any]) -> dict[str, Any]:
    return {name: make() for name, make in makes.items()}


STRUCTURES: dict[str, Callable[[], Any]] = {
    "nested": lambda: {"first": LOADERS["shuffled batches"](), "rest": [LOADERS["random"](), made(TWO)]},
    "min_size": lambda: CombinedLoader(made(WITH_UNSIZED), "min_size"),
    "max_size": lambda: CombinedLoader(made({**TWO, "own": LOADERS["own state"]}), "max_size"),
    "all without len, min_size": lambda: CombinedLoader([ALL_LOADERS[name]() for name in WITHOUT_LEN], "min_size"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_loaders_go_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, STRUCTURES[name], MOMENTS[1:3])


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


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_loaders_of_which_the_end_is_unknown_are_refused_where_it_has_to_be_known(mode: Any) -> None:
    model = LedgerModel()
    words = r"Loaders \['unsized'\] do not say where they end.*'min_size'.*DDPSamplerWrapper\(sampler, length="
    with pytest.raises(ConfigurationError, match=words):
        train_with(lambda: CombinedLoader(made(WITH_UNSIZED), mode), model=model)
    assert model.ledger == []


def test_loaders_side_by_side_each_serve_what_they_serve_alone() -> None:
    makes = {name: ALL_LOADERS[name] for name in ("class balanced", "global random", "own state", "shuffled in place")}
    together = train_with(lambda: CombinedLoader(made(makes), "max_size"), max_epochs=2)
    for name, make in makes.items():
        # Under its name: what a loader draws follows from that too.
        alone = train_with(lambda name=name, make=make: {name: make()}, max_epochs=2)
        for epoch in range(2):
            served, expected = ([dict(batch)[name] for batch in ids(run.ledger, epoch)] for run in (together, alone))
            assert served == expected + [None] * (len(served) - len(expected))


# Workers and the trainer's options


@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_workers_that_have_fetched_ahead_change_nothing(tmp_path: Path, name: str) -> None:
    def make(workers: int) -> Any:
        made = LOADERS[name]()
        made.num_workers, made.prefetch_factor = workers, 2 if workers else None
        return made

    whole = assert_goes_on_from_every_moment(tmp_path, partial(make, 2), [("on_train_batch_end", 1, 3)])
    assert whole.ledger == train_with(partial(make, 0), max_epochs=2).ledger


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
        ("without len", "accumulating"),
        ("without len", "validating over epochs"),
        ("without len", "limited"),
        ("without len", "counting steps"),
        ("own state", "accumulating"),
        ("batches without len", "reloading every epoch"),
    ],
)
def test_the_trainers_options_change_nothing_about_it(tmp_path: Path, name: str, options: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, LOADERS[name], [MOMENTS[0], MOMENTS[2]], **OPTIONS[options])


# Samplers without len


UNSIZED_OPTIONS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "accumulating": {"accumulate_grad_batches": 4},
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


@pytest.mark.parametrize("tail", ["split", "drop"])
def test_an_end_that_is_not_announced_may_be_dropped(tmp_path: Path, tail: Any) -> None:
    def make() -> Any:
        wrapper = DDPSamplerWrapper(samplers.WithoutLen(), tail=tail)
        return loader(sampler=wrapper, batch_size=4)

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 0, 4), ("on_train_batch_end", 1, 3)])
    assert [len(batch) for batch in ids(train_with(make, max_epochs=1).ledger)] == [4] * 5 + [2] * (tail != "drop")


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 7},
        # At the limit a window of accumulation ends, however many batches it has.
        {"limit_train_batches": 7, "accumulate_grad_batches": 4},
        {"max_steps": 17, "max_epochs": 1},
    ],
    ids=str,
)
def test_an_endless_sampler_goes_on_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    def make() -> Any:
        return loader(sampler=samplers.Endless(), batch_size=3)

    moments = [("on_before_backward", 0, 5), ("on_train_batch_end", 0, 6)]
    if "limit_train_batches" in options:
        moments += [("on_train_batch_end", 1, 3), ("on_validation_batch_end", 1, 0)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, **options)
    assert whole.global_step == (4 if "accumulate_grad_batches" in options else options.get("max_steps", 14))


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


def test_a_model_may_ask_for_the_number_of_steps_before_training(tmp_path: Path) -> None:
    def run(make: Any, *, seed: int = 1, **options: Any) -> Any:
        return train_with(make, model=seeded(Estimates, seed), **options)

    # Lightning asks for the first batch early, before it has restored its counters.
    whole = assert_goes_on_from_every_moment(tmp_path, cuts_loader, MOMENTS[2:], run)
    assert whole.ledger == train_with(cuts_loader, max_epochs=2).ledger


@pytest.mark.parametrize("make", [samplers.WithoutLen, samplers.OwnState])
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
    ["shuffled in place", "lhotse's", "batches handed on"],
)
def test_overfitting_trains_on_the_same_batches_in_every_epoch(tmp_path: Path, name: str) -> None:
    options = {"overfit_batches": 3, "limit_val_batches": 0, "max_epochs": 3}
    run = assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], HARDEST, **options)
    batches = [ids(run.ledger, epoch) for epoch in range(3)]
    assert len(batches[0]) == 3
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize("name", ["batches without len", "own state"])
def test_a_trainer_that_is_fitted_again_goes_on_within_the_epoch(name: str) -> None:
    whole = train_with(LOADERS[name])
    run = train_with(LOADERS[name], max_steps=4)
    model: Any = run.trainer.lightning_module
    for max_steps in (11, -1):
        run.trainer.fit_loop.epoch_loop.max_steps = max_steps
        run.trainer.fit(model, datamodule=run.trainer.datamodule)
    # Lightning makes a new optimizer for each fit, so weights differ.
    assert ids(model.ledger) == ids(whole.ledger)


def test_a_run_ended_by_max_steps_goes_on_from_a_checkpoint_saved_after_it(tmp_path: Path) -> None:
    make = LOADERS["without len"]
    whole = train_with(make)
    # Within an epoch, and at its end.
    for steps in (4, 11):
        first = train_with(make, max_steps=steps)
        first.trainer.save_checkpoint(tmp_path / "end.ckpt")
        resumed = train_with(make, ckpt_path=tmp_path / "end.ckpt", seed=99)
        assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
        assert_same_end(resumed, whole)


# What Lightning has already put in place


def test_loaders_of_another_trainer_may_be_passed_on() -> None:
    first = train_with(LOADERS["class balanced"], max_epochs=2)
    again = train_with(lambda: first.trainer.train_dataloader, max_epochs=2)
    assert again.ledger == first.ledger


@pytest.mark.parametrize("name", ["random", "own state"])
def test_lightnings_own_wrapper_around_a_sampler_is_seen_through(name: str) -> None:
    plain = loader(sampler=PERMUTATIONS[name](), batch_size=2)
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
    assert is_patched(used)
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
    for name in ("class balanced", "batches without len", "own state", "torchdata's loader"):
        run = train_with(LOADERS[name], max_steps=5)
        state = callback_of(run).data_state()
        assert len(repr(state)) < 1000, name
        assert copy.deepcopy(state) == callback_of(run).data_state()


def test_validation_before_training_takes_nothing_from_it() -> None:
    checked = train_with(LOADERS["own state"], num_sanity_val_steps=2, max_epochs=2)
    assert checked.ledger == train_with(LOADERS["own state"], max_epochs=2).ledger
