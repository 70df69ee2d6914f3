"""Runs on streams are stopped at any moment, and go on exactly: one process."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.ledger import batches, ids_of, samples, trained
from support.quick import thinned
from support.runs import (
    SaveOnException,
    assert_goes_on_from_every_moment,
    assert_goes_on_from_stop_to_stop,
    assert_resumes,
    assert_same_end,
    ended,
    seeded,
    stopped,
    train,
)
from support.stream_runs import EVERY_SAMPLE, MODULES, VAL_SAMPLES, chunks, module

from lightning_stateful.errors import ShardError

# Hook, epoch, and how many calls of it in that epoch before.
MOMENTS = [
    ("on_train_epoch_start", 0, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 0, 0),
    ("on_train_batch_start", 1, 2),
    ("on_before_backward", 1, 3),
    ("on_train_batch_end", 0, 0),
    ("on_train_batch_end", 0, 3),
    ("on_train_batch_end", 1, 1),
    ("on_validation_start", 0, 0),
    ("on_validation_batch_end", 1, 0),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_epoch_end", 1, 0),
]
FEW = [MOMENTS[number] for number in (1, 4, 9)]
REREAD = "ignore:.*(were read again|Hugging Face's state):lightning_stateful.errors.StatefulWarning"


# The loaders' own tests stop the other kinds.
PACKED = ("packed split", "packed whole", "packed tokens", "packed mixture")
KINDS = ("chunks", "batched map", "tokens", "mixed by sample", "own with a state", *PACKED)


@pytest.mark.filterwarnings(REREAD)
# Ranks hand over all kinds that are packed, within an epoch, in test_streams_ddp.
@pytest.mark.parametrize("kind", thinned(KINDS, ["packed split", "packed whole", "packed tokens"]))
def test_a_run_goes_on_exactly_from_any_moment(tmp_path: Path, files: Path, kind: str) -> None:
    moments = MOMENTS if kind == "chunks" else FEW
    assert_goes_on_from_every_moment(tmp_path, partial(MODULES[kind], files), moments)


# Options of the module, and of the trainer; runs over two ranks have others.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {"accumulate_grad_batches": 3}),
    "limited": ({}, {"limit_train_batches": 4, "max_epochs": 4}),
    "short epochs": ({"steps_per_epoch": 4}, {"max_epochs": 4}),
    "epochs of several passes": ({"steps_per_epoch": 25}, {"val_check_interval": 7}),
    "validation within epochs": ({}, {"val_check_interval": 3}),
    "validation over epochs": ({}, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "validation every other epoch": ({}, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "loaders made anew": ({}, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "whole batches": ({"drop_last": True}, {"max_epochs": 3}),
    "sanity checking": ({}, {"num_sanity_val_steps": 2}),
}  # fmt: skip


@pytest.mark.parametrize(
    "schedule",
    thinned(
        SCHEDULES,
        [
            *("validation within epochs", "validation over epochs", "validation every other epoch"),
            *("sanity checking", "loaders made anew"),
        ],
    ),
)
def test_a_run_goes_on_exactly_under_any_schedule(tmp_path: Path, files: Path, schedule: str) -> None:
    given, options = SCHEDULES[schedule]
    # Each with one kind or the other, by turns.
    kind = "json" if list(SCHEDULES).index(schedule) % 2 else "chunks"
    moments = [moment for moment in FEW if "validation" not in moment[0] or "every other" not in schedule]
    assert_goes_on_from_every_moment(tmp_path, partial(MODULES[kind], files, **given), moments, **options)


def test_a_long_window_of_accumulation_is_served_again_from_its_first_batch(tmp_path: Path) -> None:
    # Longer than what a loader keeps by itself.
    make, options = partial(module, chunks(), steps_per_epoch=22), {"accumulate_grad_batches": 20, "max_epochs": 1}
    stopped(tmp_path / "stop.ckpt", make, batch=18, **options)
    resumed = assert_resumes(tmp_path / "stop.ckpt", [], make=make, **options)
    assert trained(resumed.ledger)[0][2] == 0


def test_workers_that_have_read_ahead_change_nothing(tmp_path: Path, files: Path) -> None:
    make = partial(MODULES["chunks"], files, num_workers=2, persistent_workers=True)
    assert_goes_on_from_every_moment(tmp_path, make, FEW[1:3])


CHAINS = [
    [("on_train_batch_end", 0, 1), ("on_train_batch_end", 0, 0), ("on_before_backward", 1, 2)],
    [("on_before_backward", 0, 3), ("on_before_backward", 0, 0), ("on_before_backward", 0, 0)],
    [("on_validation_end", 0, 0), ("on_train_batch_start", 1, 0), ("on_validation_batch_end", 1, 0)],
]


@pytest.mark.filterwarnings(REREAD)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tokens", {"accumulate_grad_batches": 4}),
        ("own with a state", {"val_check_interval": 5}),
    ],
)
def test_a_chain_of_stops_gives_the_uninterrupted_run(
    tmp_path: Path, files: Path, kind: str, options: dict[str, Any]
) -> None:
    for chain in CHAINS:
        assert_goes_on_from_stop_to_stop(tmp_path, partial(MODULES[kind], files), chain, max_epochs=2, **options)


# Ends of runs


def stop_early(trainer: Any, *args: Any) -> None:
    trainer.should_stop = trainer.global_step == 14


SHORT = partial(module, chunks(), steps_per_epoch=5)
# What is trained on, how long, what ends the run before that, and batches that it has been trained on then.
ENDED: dict[str, tuple[Any, int, dict[str, Any], int]] = {
    "max_steps within an epoch": (partial(module, chunks()), 3, {"max_steps": 5}, 5),
    "max_steps at the end of an epoch": (partial(module, chunks()), 3, {"max_steps": 11}, 11),
    "should_stop": (SHORT, 4, {"callbacks": [LambdaCallback(on_train_batch_end=stop_early)], "max_epochs": 4}, 14),
    "max_epochs": (partial(module, chunks()), 4, {"max_epochs": 2}, 22),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_run_that_was_ended_goes_on_with_its_next_batch(tmp_path: Path, name: str) -> None:
    make, epochs, options, steps = ENDED[name]
    first = ended(tmp_path / "stop.ckpt", make, **options)
    resumed, whole = train(make, ckpt_path=tmp_path / "stop.ckpt", max_epochs=epochs), train(make, max_epochs=epochs)
    assert len(trained(first.ledger)) == steps
    assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
    assert_same_end(resumed, whole)


def breaks_on(number: int, found: int) -> Any:
    if found == number:
        raise ValueError("no such word")
    return {"id": torch.tensor(found), "x": torch.rand(4) + found / 100}


def test_a_stream_that_breaks_off_names_its_shard_and_resumes_exactly(tmp_path: Path) -> None:
    def make(number: int = -1) -> Any:
        return module(chunks(transform=lambda sample: breaks_on(number, sample), buffer_size=1), val=None)

    whole, model = train(make, max_epochs=2), seeded()
    # The first time that it is read, of a shard of the middle.
    number, saver = batches(whole.ledger)[5][-1], SaveOnException(tmp_path / "stop.ckpt")
    with pytest.raises(ShardError, match=r"(chunk|shard) \d.*no such word"):
        train(lambda: make(number), callbacks=[saver], model=model, max_epochs=2)
    assert len(trained(model.ledger)) in (4, 5)
    assert_resumes(tmp_path / "stop.ckpt", model.ledger, 0, make=make, whole=whole, max_epochs=2)


# What is trained on


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"limit_train_batches": 4, "max_epochs": 8}),
        ({"steps_per_epoch": 4}, {"max_epochs": 8}),
        ({"steps_per_epoch": 25}, {"max_epochs": 2}),
        ({"steps_per_epoch": 8}, {"max_epochs": 8, "limit_train_batches": 0.5}),
        ({}, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}),
    ],
    ids=str,
)
def test_epochs_of_any_length_follow_one_another_through_whole_passes(
    files: Path, given: dict[str, Any], options: dict[str, Any]
) -> None:
    run = train(partial(MODULES["tokens"], files, **given), **options)
    served, size = samples(run.ledger), len(EVERY_SAMPLE)
    passes = [served[start : start + size] for start in range(0, len(served), size)]
    assert len(passes) > 1
    assert all(len(set(found)) == len(found) for found in passes)
    assert sorted(passes[0]) == sorted(passes[1]) == EVERY_SAMPLE != passes[0]


def test_a_limited_epoch_stops_short_only_where_a_pass_ends() -> None:
    run = train(lambda: module(chunks(), val=None), limit_train_batches=4, max_epochs=6)
    assert [len(batches(run.ledger, epoch)) for epoch in range(6)] == [4, 4, 3, 4, 4, 3]


@pytest.mark.parametrize(("workers", "schedule"), [(0, {"val_check_interval": 4}), (2, {"num_sanity_val_steps": 2})])
def test_every_validation_gives_every_sample_once_in_order(workers: int, schedule: dict[str, Any]) -> None:
    run = train(lambda: module(chunks(), num_workers=workers, persistent_workers=workers > 0), max_epochs=2, **schedule)
    events = [event for event in run.ledger if event[0] == "val"]
    for _, of_one in itertools.groupby(events, key=lambda event: event[3]):
        found = [index for event in of_one for index in ids_of(event)]
        assert sorted(found) == VAL_SAMPLES
        assert workers or found == VAL_SAMPLES
