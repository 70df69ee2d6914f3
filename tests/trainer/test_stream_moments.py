"""Runs on streams are stopped at any moment, and go on exactly: one process."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.runs import StopAt, assert_same_end, assert_stitches, seeded
from support.sources import SourcesModel, assert_goes_on_from_every_moment, ids_of, samples, train_on, trained
from support.stream_runs import EVERY_SAMPLE, MODULES, VAL_SAMPLES, chunks, module, read_chunk, write_files

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
REREAD = "ignore:.*(were read again|Hugging Face's own state):lightning_stateful.errors.StatefulWarning"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


# At any moment


# The loaders' own tests stop each of the others, too.
FAST = ("chunks", "batched map", "tokens", "mixed by sample", "own with a state")


@pytest.mark.filterwarnings(REREAD)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in MODULES]
)
def test_a_run_goes_on_exactly_from_any_moment(tmp_path: Path, files: Path, kind: str) -> None:
    moments = MOMENTS if kind == "chunks" else FEW
    assert_goes_on_from_every_moment(tmp_path, partial(MODULES[kind], files), moments, train_on)


# What the module, and the trainer, are given.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {"accumulate_grad_batches": 3}),
    "long accumulation": ({"steps_per_epoch": 30}, {"accumulate_grad_batches": 20}),
    "limited": ({}, {"limit_train_batches": 4, "max_epochs": 4}),
    "limited, accumulation": ({}, {"limit_train_batches": 4, "max_epochs": 4, "accumulate_grad_batches": 3}),
    "short epochs": ({"steps_per_epoch": 4}, {"max_epochs": 4}),
    "epochs of several passes": ({"steps_per_epoch": 25}, {"val_check_interval": 7}),
    "a share of an epoch": ({"steps_per_epoch": 8}, {"limit_train_batches": 0.5, "max_epochs": 4}),
    "validation within epochs": ({}, {"val_check_interval": 3}),
    "validation over epochs": ({}, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "validation every other epoch": ({}, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "loaders made anew": ({}, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "short epochs, loaders made anew": (
        {"steps_per_epoch": 4}, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
    ),
    "whole batches": ({"drop_last": True}, {"max_epochs": 3}),
    "sanity checking": ({}, {"num_sanity_val_steps": 2}),
}  # fmt: skip


# Runs over two ranks have them too, or others have their parts.
SLOW = ("long accumulation", "limited, accumulation", "a share of an epoch", "short epochs, loaders made anew")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SCHEDULES]
)
def test_a_run_goes_on_exactly_under_any_schedule(tmp_path: Path, files: Path, schedule: str) -> None:
    given, options = SCHEDULES[schedule]
    # Each with one kind or the other, by turns.
    kind = "json" if list(SCHEDULES).index(schedule) % 2 else "chunks"
    moments = [moment for moment in FEW if "validation" not in moment[0] or "every other" not in schedule]
    assert_goes_on_from_every_moment(tmp_path, partial(MODULES[kind], files, **given), moments, train_on, **options)


def test_workers_that_have_read_ahead_change_nothing(tmp_path: Path, files: Path) -> None:
    make = partial(MODULES["chunks"], files, num_workers=2, persistent_workers=True)
    assert_goes_on_from_every_moment(tmp_path, make, FEW[1:3], train_on)


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
    make, options = partial(MODULES[kind], files), {"max_epochs": 2, **options}
    whole = train_on(make, **options)
    for chain in CHAINS:
        ledgers, path = [], None
        for number, (hook, epoch, batch) in enumerate(chain):
            stop = StopAt(hook, tmp_path / f"{number}.ckpt", epoch=epoch, batch=batch)
            train_on(make, callbacks=[stop], ckpt_path=path, seed=number + 1, **options)
            assert stop.ledger is not None, (hook, epoch, batch)
            ledgers.append(stop.ledger)
            path = tmp_path / f"{number}.ckpt"
        last = train_on(make, ckpt_path=path, seed=99, **options)
        assert_stitches([*ledgers, last.ledger], whole.ledger)
        assert_same_end(last, whole)


# Ends of runs


def goes_on(make: Any, path: Path, before: Any, **options: Any) -> None:
    resumed, whole = train_on(make, ckpt_path=path, seed=99, **options), train_on(make, **options)
    assert trained(before) + trained(resumed.ledger) == trained(whole.ledger)
    assert_same_end(resumed, whole)


@pytest.mark.parametrize("steps", [5, 11])
def test_a_run_stopped_by_max_steps_goes_on_within_its_epoch(tmp_path: Path, files: Path, steps: int) -> None:
    make = partial(MODULES["json"], files)
    first = train_on(make, max_steps=steps)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    goes_on(make, tmp_path / "stop.ckpt", first.ledger)


class StopEarly(pl.Callback):
    """Ends the run within an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 14


def test_a_run_stopped_early_goes_on_within_its_epoch(tmp_path: Path) -> None:
    make = partial(module, chunks(), steps_per_epoch=5)
    first = train_on(make, callbacks=[StopEarly()], max_epochs=4)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    assert len(trained(first.ledger)) == 14
    goes_on(make, tmp_path / "stop.ckpt", first.ledger, max_epochs=4)


def test_a_run_that_was_over_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    make = partial(module, chunks())
    first = train_on(make, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    goes_on(make, tmp_path / "stop.ckpt", first.ledger, max_epochs=4)


class SaveOnException(pl.Callback):
    """Saves where a run breaks off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def breaks(number: int, ref: Any) -> Any:
    for found in read_chunk(ref):
        if found == number:
            raise OSError("a truncated file")
        yield found


def breaks_on(number: int, found: int) -> Any:
    if found == number:
        raise ValueError("no such word")
    return {"id": torch.tensor(found), "x": torch.rand(4) + found / 100}


@pytest.fixture
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Workers that only the garbage collection ends, torch waits for, and then kills."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


@pytest.mark.usefixtures("ends_soon")
@pytest.mark.parametrize(("where", "workers"), [("transform", 0), ("reader", 2)])
def test_a_stream_that_breaks_off_names_its_shard_and_resumes_exactly(tmp_path: Path, where: str, workers: int) -> None:
    def make(number: int = -1) -> Any:
        faults = {"reader": {"read": partial(breaks, number)}, "transform": {"transform": partial(breaks_on, number)}}
        return module(chunks(**faults[where], buffer_size=1), num_workers=workers, val=None)

    whole, model = train_on(make, max_epochs=2), seeded(SourcesModel)
    # The first time that it is read, of a shard of the middle.
    number = trained(whole.ledger)[5][4][-1]
    with pytest.raises(ShardError, match=r"(chunk|shard) \d.*(a truncated file|no such word)"):
        train_on(lambda: make(number), callbacks=[SaveOnException(tmp_path / "stop.ckpt")], model=model, max_epochs=2)
    resumed = train_on(make, ckpt_path=tmp_path / "stop.ckpt", seed=9, max_epochs=2)
    assert len(trained(model.ledger)) in (4, 5)
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


# What is trained on


def passes_of(found: list[int], size: int) -> list[list[int]]:
    return [sorted(found[start : start + size]) for start in range(0, len(found), size)]


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
    run = train_on(partial(MODULES["tokens"], files, **given), **options)
    whole, rest = divmod(len(samples(run.ledger)), len(EVERY_SAMPLE))
    assert whole >= 2
    *full, last = [*passes_of(samples(run.ledger), len(EVERY_SAMPLE)), *([] if rest else [[]])]
    assert full == [EVERY_SAMPLE] * whole
    assert len(set(last)) == len(last)
    assert full[0] != samples(run.ledger)[: len(EVERY_SAMPLE)]


def test_a_limited_epoch_stops_short_only_where_a_pass_ends() -> None:
    run = train_on(lambda: module(chunks(), val=None), limit_train_batches=4, max_epochs=6)
    assert [len([e for e in trained(run.ledger) if e[1] == epoch]) for epoch in range(6)] == [4, 4, 3, 4, 4, 3]


@pytest.mark.parametrize(("workers", "schedule"), [(0, {"val_check_interval": 4}), (2, {"num_sanity_val_steps": 2})])
def test_every_validation_gives_every_sample_once_in_order(workers: int, schedule: dict[str, Any]) -> None:
    run = train_on(
        lambda: module(chunks(), num_workers=workers, persistent_workers=workers > 0), max_epochs=2, **schedule
    )
    events = [event for event in run.ledger if event[0] == "val"]
    for _, of_one in itertools.groupby(events, key=lambda event: event[3]):
        found = [index for event in of_one for index in ids_of(event)]
        assert sorted(found) == VAL_SAMPLES
        assert workers or found == VAL_SAMPLES
