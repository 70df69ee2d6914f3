"""Other people's samplers under the callback alone: exact from every moment, wherever the loaders come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import samplers
from support.ledger import Asks, Numbers, batches, parts, samples, trained
from support.quick import thinned
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_same_end,
    callback_of,
    ended,
    seeded,
    stopped,
    train,
    train_alone,
)
from support.sampler_cases import cuts_loader, train_with
from support.samplers import BATCHES, LENGTH, LOADERS, loader

from lightning_stateful import DDPSamplerWrapper, is_patched, patch_dataloader
from lightning_stateful.trainer.train_loaders import dealt_otherwise

# Said by torchdata's loader, whenever one is made, of what newer versions of torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

MOMENTS = [
    ("on_train_batch_end", 0, 4),
    ("on_before_backward", 1, 2),
    ("on_validation_batch_end", 1, 1),
    ("on_train_epoch_end", 0, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 0, 0),
    ("on_train_batch_start", 1, 3),
    ("on_validation_start", 1, 0),
    ("on_validation_end", 0, 0),
]
HARDEST = MOMENTS[1:2]
CYCLED = [("on_train_batch_end", 0, 1), ("on_train_batch_end", 0, 9), ("on_before_backward", 1, 8)]
OF_ENDLESS = [("on_before_backward", 0, 5), ("on_train_batch_end", 0, 6)]
OF_LIMITED = [*OF_ENDLESS, ("on_train_batch_end", 1, 3), ("on_validation_batch_end", 1, 0)]
ALL_LOADERS = {**LOADERS, "lhotse's": cuts_loader}
WITHOUT_LEN = ("without len", "batches without len", "lhotse's")
EVERY_MOMENT = ("batches without len", "own state")
# The others are in the table of tests/harm, or on ranks in test_samplers_ddp.
STOPPED = (*EVERY_MOMENT, "class balanced", "shuffled in place", "unbatched", "batches handed on", "lhotse's")


def made(*names: str) -> dict[str, Any]:
    return {name: ALL_LOADERS[name]() for name in names}


def wrapped_batches(count: int, length: Any = "unknown") -> Any:
    return loader(batch_sampler=DDPSamplerWrapper(samplers.ShuffledBatches(BATCHES[:count]), length=length))


def wrapped_samples(make: Any = samplers.WithoutLen, batch_size: int = 4, **how: Any) -> Any:
    return loader(sampler=DDPSamplerWrapper(make(), **how), batch_size=batch_size)


def endless() -> Any:
    return loader(sampler=samplers.Endless(), batch_size=3)


def with_workers(name: str) -> Any:
    made = LOADERS[name]()
    made.num_workers = made.prefetch_factor = 2
    return made


class Keeps(pl.LightningDataModule):
    """Has one sampler for all loaders that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = samplers.ClassBalanced()

    def train_dataloader(self) -> Any:
        return loader(batch_sampler=self.sampler)


RELOADING = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
# Loaders, the moments at which a run on them is stopped, and options of the trainer.
CASES: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any]]] = {
    **{name: (ALL_LOADERS[name], MOMENTS if name in EVERY_MOMENT else HARDEST, {}) for name in STOPPED},
    # Structures
    "all without len": (lambda: CombinedLoader(made(*WITHOUT_LEN), "min_size"), MOMENTS[1:3], {}),
    "the shorter begins anew": (lambda: {"short": wrapped_batches(3, "len"), **made("weighted")}, CYCLED, {}),
    "the shorter has a state": (lambda: made("own state", "unbatched"), CYCLED, {}),
    # The trainer's options, and workers
    "workers, batches without len": (partial(with_workers, "batches without len"), [("on_train_batch_end", 1, 3)], {}),
    "workers, own state": (partial(with_workers, "own state"), [("on_train_batch_end", 1, 3)], {}),
    "accumulating": (LOADERS["without len"], MOMENTS[:2], {"accumulate_grad_batches": 3}),
    "accumulating, own state": (LOADERS["own state"], MOMENTS[:2], {"accumulate_grad_batches": 3}),
    "validating over epochs": (
        LOADERS["without len"],
        MOMENTS[:2],
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
    ),
    "limited": (LOADERS["without len"], MOMENTS[:2], {"limit_train_batches": 6}),
    "counting steps": (LOADERS["without len"], MOMENTS[:2], {"max_steps": 14, "max_epochs": -1}),
    "reloading": (LOADERS["batches without len"], MOMENTS[:2], RELOADING),
    # Ends of epochs
    "the last batch": (
        LOADERS["own state"],
        [("on_train_batch_end", 0, 10), ("on_train_batch_end", 1, 10)],
        {},
    ),
    "an epoch of one batch": (
        partial(wrapped_batches, 1),
        [("on_train_batch_end", 0, 0), ("on_before_backward", 1, 0), ("on_train_epoch_end", 0, 0)],
        {},
    ),
    "an epoch of two batches": (
        partial(wrapped_batches, 2),
        [("on_train_batch_end", 0, 1), ("on_before_backward", 1, 0), ("on_train_epoch_end", 0, 0)],
        {},
    ),
    "endless": (endless, OF_ENDLESS, {"max_steps": 17, "max_epochs": 1}),
    "endless, limited": (endless, OF_LIMITED, {"limit_train_batches": 7}),
    # At the limit a window of accumulation ends, however many batches it has.
    "endless, accumulating": (endless, OF_LIMITED, {"limit_train_batches": 7, "accumulate_grad_batches": 4}),
    "endless, cut off": (partial(wrapped_samples, samplers.Endless, 3, length=13), MOMENTS[:1], {"max_epochs": 1}),
}
# Sizes of the batches of an epoch.
SIZES = {
    "an epoch of one batch": [2],
    "an epoch of two batches": [2, 3],
    "endless, limited": [3] * 7,
    "endless, accumulating": [3] * 7,
    "endless, cut off": [1, 3, 3, 3, 3],
}


# What a loader with a state of its own, or one without an end and with a limit, goes through as well; samplers of
# other kinds are stopped in tests/harm and on ranks.
SLOW = (
    *("accumulating", "limited", "counting steps", "endless", "an epoch of two batches", "shuffled in place"),
    *("workers, batches without len", "batches handed on", "class balanced", "unbatched", "lhotse's"),
    *("validating over epochs", "all without len", "the shorter has a state", "an epoch of one batch"),
)


@pytest.mark.parametrize("name", thinned(CASES, SLOW))
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    make, moments, options = CASES[name]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, train_with, **options)
    if name in SIZES:
        assert sorted(map(len, batches(whole.ledger, 0))) == SIZES[name]
    if name == "endless, accumulating":
        assert whole.global_step == 4
    if name.startswith("workers"):
        assert whole.ledger == train_with(LOADERS[name.removeprefix("workers, ")], max_epochs=2).ledger


def test_a_run_saved_at_the_last_batch_of_an_epoch_of_unknown_length_begins_the_next_one(tmp_path: Path) -> None:
    make = LOADERS["batches without len"]
    last = len(batches(train_with(make, max_epochs=1).ledger)) - 1
    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 0, last)], train_with)


@pytest.mark.parametrize("name", ["class balanced", "own state"])
def test_one_loader_object_may_be_returned_to_one_fit_after_another(tmp_path: Path, name: str) -> None:
    made = LOADERS[name]()
    moments = [("on_train_batch_end", 1, 3)]
    whole = assert_goes_on_from_every_moment(tmp_path, lambda: made, moments, train_with)
    assert whole.ledger == train_with(LOADERS[name], max_epochs=2).ledger


def test_loaders_that_are_built_again_of_one_sampler_go_on_exactly(tmp_path: Path) -> None:
    moments = [("on_train_batch_end", 1, 2), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, Keeps, moments, train_alone, **RELOADING)


def test_a_loader_that_has_been_iterated_before_is_none_the_worse() -> None:
    for name in ("class balanced", "shuffled batches", "torchdata's loader", "random"):
        made = LOADERS[name]()
        next(iter(made))
        assert train_with(lambda made=made: made, max_epochs=1).ledger == train_with(LOADERS[name], max_epochs=1).ledger


def test_loaders_side_by_side_each_serve_what_they_serve_alone() -> None:
    names = ("class balanced", "global random", "own state", "shuffled in place")
    together = train_with(lambda: CombinedLoader(made(*names), "max_size"), max_epochs=2)
    for name in names:
        # Under its name: what a loader draws follows from that too.
        alone = train_with(partial(made, name), max_epochs=2)
        for epoch in range(2):
            served, expected = (parts(run.ledger, name, epoch) for run in (together, alone))
            assert served == expected + [None] * (len(served) - len(expected))


def test_workers_that_live_on_begin_every_epoch_of_a_sampler_without_len() -> None:
    make = partial(loader, batch_sampler=samplers.BatchesWithoutLen())
    living = train_with(partial(make, num_workers=2, persistent_workers=True))
    assert living.ledger == train_with(make).ledger


# Samplers without len


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 4}, {"limit_train_batches": 11}, {"max_steps": 25, "max_epochs": -1}],
    ids=str,
)
def test_a_sampler_without_len_trains_as_it_would_with_one(options: dict[str, Any]) -> None:
    unsized = train_with(LOADERS["without len"], **options)
    sized = train_with(partial(wrapped_samples, batch_size=2, length=LENGTH), **options)
    assert unsized.ledger == sized.ledger
    assert_same_end(unsized, sized)
    assert unsized.logged == sized.logged


@pytest.mark.parametrize("name", WITHOUT_LEN)
def test_a_sampler_without_len_gives_every_sample_once_an_epoch_and_a_validation_after_it(name: str) -> None:
    run = train_with(ALL_LOADERS[name])
    for epoch in range(3):
        assert sorted(samples(run.ledger, epoch)) == list(range(LENGTH))
        kinds = [event[0] for event in run.ledger if event[1] == epoch]
        assert [kind for kind in kinds if kind != "train"] == ["epoch start", "val", "val", "val", "epoch end"]
        assert kinds[-5] == "train"
    assert len({tuple(samples(run.ledger, epoch)) for epoch in range(3)}) == 3


def test_the_steps_of_a_whole_run_are_known_where_the_length_is() -> None:
    # Lightning says -1, the default of max_steps, of loaders without len.
    found = {}
    for name in ("class balanced", "without len"):
        run = train_with(LOADERS[name], max_epochs=2, accumulate_grad_batches=2)
        found[name] = run.trainer.estimated_stepping_batches
    assert found == {"class balanced": 10, "without len": -1}
    assert train_with(LOADERS["without len"], max_steps=7, max_epochs=-1).trainer.estimated_stepping_batches == 7


def test_a_model_may_ask_for_the_number_of_steps_before_training(tmp_path: Path) -> None:
    def run(make: Any, *, seed: int = 1, **options: Any) -> Any:
        return train_with(make, model=seeded(Asks, seed), **options)

    # Lightning asks for the first batch early, before it has restored its counters.
    whole = assert_goes_on_from_every_moment(tmp_path, cuts_loader, MOMENTS[1:2], run)
    assert whole.ledger == train_with(cuts_loader, max_epochs=2).ledger


@pytest.mark.parametrize("make", [samplers.WithoutLen, samplers.OwnState])
def test_samples_go_on_in_batches_of_another_size(tmp_path: Path, make: Any) -> None:
    def of_size(batch_size: int) -> Any:
        return lambda: loader(sampler=make(), batch_size=batch_size)

    before = stopped(tmp_path / "stop.ckpt", of_size(2), run=train_with, batch=3)
    after = train_with(of_size(3), ckpt_path=tmp_path / "stop.ckpt", max_epochs=2)
    for epoch in range(2):
        assert sorted(samples(before + after.ledger, epoch)) == list(range(LENGTH))


# Overfitting, reloading, fitting again


@pytest.mark.filterwarnings("ignore:.*overfit_batches trains on the same batches.*")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled.*")
@pytest.mark.parametrize("name", ["shuffled in place", "batches handed on"])
def test_overfitting_trains_on_the_same_batches_in_every_epoch(tmp_path: Path, name: str) -> None:
    options = {"overfit_batches": 3, "limit_val_batches": 0, "max_epochs": 3}
    run = assert_goes_on_from_every_moment(tmp_path, ALL_LOADERS[name], HARDEST, train_with, **options)
    first, second, third = (batches(run.ledger, epoch) for epoch in range(3))
    assert len(first) == 3
    assert first == second == third


def test_a_run_ended_by_max_steps_goes_on_from_a_checkpoint_saved_after_it(tmp_path: Path) -> None:
    make = LOADERS["without len"]
    whole = train_with(make)
    # Within an epoch, and at its end.
    for steps in (4, 11):
        first = ended(tmp_path / "end.ckpt", make, run=train_with, max_steps=steps)
        resumed = train_with(make, ckpt_path=tmp_path / "end.ckpt", seed=99)
        assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
        assert_same_end(resumed, whole)


# What Lightning has already put in place


def test_loaders_of_another_trainer_may_be_passed_on() -> None:
    first = train_with(LOADERS["class balanced"], max_epochs=2)
    again = train_with(lambda: first.trainer.train_dataloader, max_epochs=2)
    assert again.ledger == first.ledger


def test_a_loader_whose_sampler_lightning_has_replaced_is_seen_through() -> None:
    """A Trainer without the callback leaves it behind in ``trainer.train_dataloader``."""
    left: Any = train(LOADERS["global random"], max_epochs=1, overfit_batches=0.0).trainer.train_dataloader
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
    # An epoch of so few batches is over before its state would be worth anything.
    "lhotse's": ("fast_forward", "SimpleCutSampler is begun anew on a resume and fast-forwarded, by indices alone."),
}


@pytest.mark.parametrize("name", SAID)
def test_the_resume_mode_is_in_the_log_and_the_report(
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
    assert len(repr(saved)) < 1000
    assert saved["config"]["sampler"]["class"] == kind
    assert saved["progress"]["consumed"] == {"without len": 6, "own state": 6}.get(name, 3)


def test_the_log_says_once_how_draws_differ_from_torchs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train_with(LOADERS["global random"], max_epochs=1)
    assert caplog.text.count("Samplers and samples draw random numbers by (seed ") == 1


@pytest.mark.parametrize(("num_ranks", "said"), [(1, ""), (2, "Of each step a rank takes consecutive samples, ")])
def test_a_shuffle_of_torchs_is_said_to_be_dealt_out_otherwise(num_ranks: int, said: str) -> None:
    given = torch.utils.data.DataLoader(Numbers(LENGTH), shuffle=True)
    patched = patch_dataloader(given, num_replicas=num_ranks, rank=0)
    note = dealt_otherwise({"": given}, {"": patched})[""]
    assert note.startswith(said)
    assert bool(note) is bool(said)
    assert dealt_otherwise({"": patched}, {"": patched}) == {"": ""}


def test_several_loaders_are_reported_by_path(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run = train_with(lambda: {"a": LOADERS["weighted"](), "b": [LOADERS["own state"]()]}, max_steps=2)
    assert "Training data 'a': WeightedRandomSampler is begun anew" in caplog.text
    assert "Training data 'b.0': OwnState keeps its own state" in caplog.text
    assert callback_of(run).position_report() == {
        "a": {"epoch": 0, "samples": 4, "sampler": {"class": "WeightedRandomSampler", "resume_mode": "fast_forward"}},
        "b.0": {"epoch": 0, "samples": 4, "sampler": {"class": "OwnState", "resume_mode": "own_state"}},
    }


def test_validation_before_training_takes_nothing_from_it() -> None:
    checked = train_with(LOADERS["own state"], num_sanity_val_steps=2, max_epochs=2)
    assert checked.ledger == train_with(LOADERS["own state"], max_epochs=2).ledger


class ByIndex:
    """A sampler with ``__getitem__`` alone, drawn anew when its first index is asked for."""

    drawn: Any = ()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, place: int) -> int:
        self.drawn = torch.randperm(LENGTH).tolist() if place == 0 else self.drawn
        return int(self.drawn[place])


def test_a_sampler_that_is_iterated_by_index_goes_on_exactly(tmp_path: Path) -> None:
    moments = [("on_train_batch_end", 0, 1), ("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 1)]
    assert_goes_on_from_every_moment(tmp_path, lambda: loader(sampler=ByIndex(), batch_size=2), moments, train_with)
