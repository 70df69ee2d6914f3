"""Streams on real ranks: in step, nothing lost, exact over stops and faults, and dealt out anew."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from support.ddp_runs import (
    Link,
    Settle,
    assert_chain,
    assert_in_step,
    chain_of,
    on_ranks,
    plain,
    quiet_trainer,
    run,
)
from support.ledger import LedgerModel, StepLogger
from support.ranks import Ranks
from support.runs import Outcome, assert_stitches, outcome_of, seeded, train
from support.sources import SourcesModel, ids_of, samples, trained
from support.stream_runs import (
    EVERY_SAMPLE,
    MODULES,
    OF_OTHERS,
    OTHER_FIRST,
    OTHER_SIZES,
    SIZES,
    VAL_FIRST,
    VAL_SAMPLES,
    VAL_SIZES,
    Batches,
    BatchesWithState,
    OwnWithState,
    chunks,
    files_of,
    mapped,
    module,
    read_chunk,
    write_files,
)
from torch.utils.data import DataLoader

from lightning_stateful import MixedStream, StatefulDataCallback, StreamDataModule
from lightning_stateful.errors import StatefulError, StatefulWarning, StateMismatchError

STOPS = [("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]
# The kinds that differ most; the others are read in one process by many tests.
KINDS = ("chunks", "json", "batched map", "tokens", "mixed by sample", "cycle", "own with a state", "own")
MIXED = ("in turn", "mixed by sample", "cycle")
# After so many steps each number of ranks, with so many workers, leaves the rest to the next.
HANDED_OVER = {2: (2, 0), 1: (4, 2), 3: (5, 0)}
HANDED = ("chunks", "filter", "batched map", "tokens", "in turn", "mixed by sample")
CALLBACK = {"callbacks": lambda: [StatefulDataCallback(seed=7)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return Ranks(2, folder / "2")


def files(folder: Path) -> Path:
    """Where the files are that all cases read."""
    return folder.parents[1]


def over_all(runs: list[dict[str, Any]], epoch: int | None = None) -> list[int]:
    return [index for run in runs for index in samples(run["ledger"], epoch)]


def every_sample_of(kind: str) -> list[int]:
    every = [index for index in EVERY_SAMPLE if kind != "filter" or index % 5 != 1]
    return [*every, *OF_OTHERS] if kind in MIXED else every


# In step, and nothing lost


def chain(folder: Path, kind: str) -> list[Link]:
    return chain_of(partial(MODULES[kind], files(folder)), folder, STOPS)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_uneven_shares_take_the_same_steps_and_lose_nothing(ranks: Ranks, kind: str) -> None:
    runs = [parts[0][0] for parts in ranks.of(chain, kind)]
    assert_in_step(runs)
    every = every_sample_of(kind)
    first, both = Counter(over_all(runs, 0)), Counter(over_all(runs))
    assert len(trained(runs[0]["ledger"])) >= 8
    assert set(both) == set(every)
    if kind != "cycle":
        # What is not served in an epoch comes in the next, of which some is left in turn.
        assert max(first.values()) == 1
        assert max(both.values()) == 2
        # Two ranks share all but a sample, unless the stream divides itself.
        assert first.total() >= len(every) - 1 or kind.startswith("own")


def test_what_a_rank_has_left_of_its_own_comes_first_in_the_next_epoch(ranks: Ranks) -> None:
    runs = [parts[0][0] for parts in ranks.of(chain, "own")]
    left = set(EVERY_SAMPLE) - set(over_all(runs, 0))
    assert left
    begun = []
    for found in runs:
        of_rank = samples(found["ledger"], 1)
        at = next((place for place, index in enumerate(of_rank) if index not in left), len(of_rank))
        begun += of_rank[:at]
    assert set(begun) == left


class States(pl.Callback):
    """Keeps every state and report that a rank would give."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def _keep(self, trainer: pl.Trainer, *args: Any) -> None:
        own: Any = trainer.datamodule
        self.found.append((trainer.current_epoch, own.state_dict()["lightning_stateful"], own.position_report()))

    on_train_epoch_start = on_before_backward = on_train_batch_end = on_validation_end = on_train_epoch_end = _keep


def states(folder: Path, kind: str, options: dict[str, Any]) -> list[Any]:
    kept = States()
    run(partial(MODULES[kind], files(folder)), callbacks=[kept], **options)
    return kept.found


@pytest.mark.parametrize(
    ("kind", "options"),
    [("json", {"accumulate_grad_batches": 3}), ("own with a state", {}), ("cycle", {"limit_train_batches": 5})],
)
def test_states_are_equal_on_all_ranks_at_every_moment_and_plain(
    ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    first, second = ranks.of(states, kind, options)
    assert first == second
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(second))
    assert len(first) > 20
    # The dataset's own state of each rank is a tensor of 22 numbers.
    most = 9000 if kind == "own with a state" else 5000
    assert max(len(json.dumps(state)) for _, state, _ in first) < most


# Stops


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank(ranks: Ranks, kind: str) -> None:
    for parts in ranks.of(chain, kind):
        assert_chain(parts)


def workers(folder: Path, kind: str) -> list[Link]:
    make = partial(MODULES[kind], files(folder), num_workers=2, persistent_workers=True, val=None)
    return chain_of(make, folder, [("on_train_batch_end", 0, 2)], callbacks=lambda: [Settle()])


@pytest.mark.parametrize("kind", ["json", "own with a state"])
def test_workers_go_on_exactly_on_every_rank(ranks: Ranks, kind: str) -> None:
    chains = ranks.of(workers, kind)
    assert_in_step([parts[0][0] for parts in chains])
    for parts in chains:
        assert_chain(parts)


def side_by_side(folder: Path) -> Any:
    others = mapped(files_of("json", files(folder), "other"))
    return module({"a": chunks(), "b": chunks(OTHER_SIZES, OTHER_FIRST), "c": others}, steps_per_epoch=4)


def on_chunks(folder: Path, **options: Any) -> Any:
    return MODULES["chunks"](folder, **options)


# Epochs cut, made of several passes, with windows of accumulated gradients, and of several streams.
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "side by side": (side_by_side, {"max_epochs": 4, "makes": LedgerModel}),
    "loaders made anew": (on_chunks, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "limited": (on_chunks, {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 6}),
    "long accumulation": (partial(on_chunks, steps_per_epoch=26), {"accumulate_grad_batches": 20}),
    "short epochs": (partial(on_chunks, steps_per_epoch=4), {"max_epochs": 7}),
    "long epochs": (partial(on_chunks, steps_per_epoch=13), {"val_check_interval": 5}),
    "callback alone": (lambda folder: DataLoader(mapped(files_of("parquet", files(folder))), batch_size=2), CALLBACK),
    "iterables": (lambda folder: Batches(), CALLBACK),
    "iterables with a state": (lambda folder: BatchesWithState(), CALLBACK),
    "iterables cut": (
        lambda folder: BatchesWithState(),
        {**CALLBACK, "limit_train_batches": 3, "max_epochs": 3, "use_distributed_sampler": False},
    ),
}


def schedule(folder: Path, name: str) -> list[Link]:
    make, options = SCHEDULES[name]
    return chain_of(partial(make, folder), folder, STOPS, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_any_schedule_goes_on_exactly_on_every_rank(ranks: Ranks, name: str) -> None:
    chains = ranks.of(schedule, name)
    assert_in_step([parts[0][0] for parts in chains])
    for parts in chains:
        assert_chain(parts)


@pytest.mark.parametrize("name", ["limited", "short epochs", "long epochs", "loaders made anew", "long accumulation"])
def test_epochs_of_any_length_lose_nothing_over_the_ranks(ranks: Ranks, name: str) -> None:
    counts = Counter(over_all([parts[0][0] for parts in ranks.of(schedule, name)]))
    assert set(counts) == set(EVERY_SAMPLE)
    # A sample may be left of each of the last two passes, at most.
    assert max(counts.values()) - min(counts.values()) <= 2


def again(folder: Path) -> list[Any]:
    """A trainer is fitted, stopped within an epoch, and fitted again."""
    data, model, logger = MODULES["chunks"](folder), seeded(SourcesModel), StepLogger()
    trainer = quiet_trainer(logger=logger, num_sanity_val_steps=0, max_steps=4)
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(model, datamodule=data)
    return outcome_of(trainer, model, logger).ledger


def test_a_trainer_fitted_again_goes_on_within_its_epoch_on_every_rank(ranks: Ranks) -> None:
    for ledger, parts in zip(ranks.of(again), ranks.of(chain, "chunks"), strict=True):
        assert trained(ledger) == trained(parts[0][0]["ledger"])


# Evaluation


def evaluated(folder: Path, kind: str) -> list[Any]:
    """Streams for every stage of evaluation, of more shards than ranks and of one."""
    made = {
        "chunks": lambda: chunks(VAL_SIZES, VAL_FIRST),
        "one chunk": lambda: chunks((4,), VAL_FIRST),
        "parquet": lambda: mapped(files_of("parquet", files(folder), "val")),
        "mixed": lambda: MixedStream({"a": chunks(VAL_SIZES, VAL_FIRST), "b": chunks((1, 2, 1, 1), 600)}),
    }
    stream = made[kind]()
    data = StreamDataModule(None, stream, stream, stream, batch_size=2)
    trainer, model = quiet_trainer(), seeded(SourcesModel)
    trainer.test(model, datamodule=data, verbose=False)
    trainer.predict(model, datamodule=data)
    validating = run(partial(module, chunks(), val=stream), val_check_interval=3, max_epochs=1)
    return [*model.ledger, *validating.ledger]


@pytest.mark.parametrize("kind", ["chunks", "one chunk", "parquet", "mixed"])
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: Ranks, kind: str) -> None:
    of_kind = {"one chunk": list(range(VAL_FIRST, VAL_FIRST + 4)), "mixed": [*VAL_SAMPLES, *range(600, 605)]}
    expected, ledgers = of_kind.get(kind, VAL_SAMPLES), ranks.of(evaluated, kind)
    for stage in ("test", "predict"):
        served = [index for ledger in ledgers for event in ledger if event[0] == stage for index in event[2]]
        assert sorted(served) == expected, stage
    of_step: dict[int, list[int]] = {}
    for ledger in ledgers:
        for event in ledger:
            if event[0] == "val":
                of_step.setdefault(event[3], []).extend(ids_of(event))
    assert len(of_step) > 1
    assert all(sorted(served) == expected for served in of_step.values())


# Faults


def fails_at(number: int, ref: Any) -> Iterator[int]:
    """A chunk that rank 1 cannot read."""
    for found in read_chunk(ref):
        if found == number and torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        yield found


def unshuffled(read: Any = read_chunk, **options: Any) -> Any:
    return module(chunks(read=read, buffer_size=1), val=None, **options)


def read_in_step_3_of_rank_1(whole: Outcome) -> int:
    numbers: list[Any] = [None, None]
    torch.distributed.all_gather_object(numbers, samples(whole.ledger))
    return int(numbers[1][6])


def broken(folder: Path) -> dict[str, Any]:
    """A reader fails on rank 1; from the last checkpoint a run goes on."""
    whole, model = run(unshuffled), seeded(SourcesModel)
    read = partial(fails_at, read_in_step_3_of_rank_1(whole))
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    with pytest.raises(StatefulError) as caught:
        run(partial(unshuffled, read), model=model, callbacks=[saver])
    torch.distributed.barrier()
    resumed = run(unshuffled, ckpt_path=folder / "last.ckpt", seed=9)
    error = f"{caught.type.__name__}: {caught.value}"
    return {"error": error, "before": model.ledger, "after": plain(resumed), "whole": plain(whole)}


def test_a_fault_on_one_rank_is_an_error_on_both_and_the_last_checkpoint_goes_on(ranks: Ranks) -> None:
    first, second = ranks.of(broken)
    assert first["error"].startswith("StreamError: The stream of rank 1 broke off before step 3: ShardError: chunk ")
    assert second["error"].startswith("ShardError: chunk ")
    for found in (first, second):
        assert "OSError: the disk is gone" in found["error"]
        # Lightning reads one batch ahead.
        assert len(trained(found["before"])) in (2, 3)
        assert_stitches([found["before"], found["after"]["ledger"]], found["whole"]["ledger"], 0)
        assert all(found["after"][name] == found["whole"][name] for name in ("weights", "end", "state"))


def waits(path: Path, ref: Any) -> Iterator[int]:
    """A chunk that rank 1 cannot read before the other has given up."""
    for found in read_chunk(ref):
        deadline = time.monotonic() + 30
        while torch.distributed.get_rank() and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield found


class Touch(pl.Callback):
    """Leaves a file where a run breaks off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, *args: Any) -> None:
        self.path.touch()


def slow(folder: Path) -> None:
    """Rank 1 stands still while the other waits, once ranks have met in an earlier run."""
    run(unshuffled, max_steps=1)
    stream = chunks(read=partial(waits, folder / "over"))
    run(lambda: module(stream, val=None, timeout=1), callbacks=[Touch(folder / "over")])


def test_a_rank_that_stands_still_is_named_on_both(ranks: Ranks) -> None:
    for error in ranks.errors_of(slow):
        assert error.startswith("StreamError: Step 0 was waited for in vain for 1 s"), error
        assert "rank 1" in error


def refused(folder: Path, what: str) -> None:
    rank = torch.distributed.get_rank()
    made = {
        "seeds": lambda: module(chunks(seed=rank)),
        "chunks": lambda: module(chunks(SIZES[: 8 + rank])),
        "steps": lambda: module(chunks(), steps_per_epoch=3 + rank),
    }
    run(made[what])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seeds", "seed: rank 0: 0, rank 1: 1"),
        ("chunks", "stream.chunks: rank 0: 8"),
        ("steps", "length: rank 0: 3, rank 1: 4"),
    ],
)
def test_ranks_that_disagree_are_refused_on_both(ranks: Ranks, what: str, words: str) -> None:
    for error in ranks.errors_of(refused, what):
        assert error.startswith("RankMismatchError: "), error
        assert words in error


def nothing_on_a_rank(folder: Path, options: dict[str, Any]) -> list[Any]:
    """One of two shards is empty, so that a rank may have nothing at all."""
    return run(lambda: module(chunks((4, 0)), val=None, **options), max_epochs=4).ledger


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 3}])
def test_a_rank_without_samples_is_dealt_what_others_have_left(ranks: Ranks, options: dict[str, Any]) -> None:
    for ledger in ranks.of(nothing_on_a_rank, options):
        assert {event[1] for event in trained(ledger)} == set(range(4))


def nothing_at_all(folder: Path) -> list[Any]:
    with pytest.warns(StatefulWarning, match="has given no batch in an epoch, so nothing was trained on"):
        return run(lambda: module(chunks((0, 0)), val=None), max_epochs=2).ledger


def test_ranks_that_have_nothing_at_all_are_warned_as_a_single_one_is(ranks: Ranks) -> None:
    assert [trained(ledger) for ledger in ranks.of(nothing_at_all)] == [[], []]


# Other numbers of ranks


def hand_over(folder: Path, kind: str, number: int, **options: Any) -> dict[str, Any]:
    """A few steps on ``number`` ranks, from the checkpoint that the ranks before them left."""
    steps, num_workers = HANDED_OVER[number]
    order = list(HANDED_OVER)
    before = order[order.index(number) - 1] if order.index(number) else None
    path = None if before is None else folder / f"{kind}, {before}.ckpt"
    make = partial(MODULES[kind], folder, num_workers=num_workers, val=None)
    found = train(make, model=seeded(SourcesModel), ckpt_path=path, **{**options, "max_steps": steps, "max_epochs": -1})
    found.trainer.save_checkpoint(folder / f"{kind}, {number}.ckpt")
    return plain(found)


def handed_over(folder: Path) -> dict[str, Any]:
    """Go on with what other ranks have left, if there is any, and leave the rest of the epoch to others again."""
    options = on_ranks()
    return {kind: hand_over(files(folder), kind, options["devices"], **options) for kind in HANDED}


@pytest.fixture(scope="module")
def handed(folder: Path, ranks: Ranks) -> list[list[dict[str, Any]]]:
    """What two ranks, then one, then three have done, of each kind."""
    two = ranks.of(handed_over)
    one = [{kind: hand_over(folder, kind, 1) for kind in HANDED}]
    return [two, one, Ranks(3, folder / "3").of(handed_over)]


@pytest.mark.parametrize("kind", HANDED)
def test_an_epoch_is_handed_over_from_two_ranks_to_one_to_three_to_one(
    folder: Path, handed: list[list[dict[str, Any]]], kind: str
) -> None:
    make = partial(MODULES[kind], folder, val=None)
    last = train(make, model=seeded(SourcesModel), ckpt_path=folder / f"{kind}, 3.ckpt", max_epochs=2)
    runs = [*([run[kind] for run in of_number] for of_number in handed), [{"ledger": last.ledger}]]
    assert [len(of_number) for of_number in runs] == [2, 1, 3, 1]
    assert all(trained(run["ledger"]) for of_number in runs for run in of_number)
    # What three ranks of uneven shares have left comes first in the next epoch.
    assert sorted(index for of_number in runs for index in over_all(of_number)) == sorted(every_sample_of(kind) * 2)
    assert max(Counter(index for of_number in runs for index in over_all(of_number, 0)).values()) == 1


def test_an_own_stream_cannot_be_handed_over_within_an_epoch(ranks: Ranks) -> None:
    ranks.of(chain, "own with a state")
    path = ranks.folder_of(chain, "own with a state") / "1" / "0.ckpt"
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2, now 1.* resume on 2 ranks"):
        train(lambda: module(OwnWithState()), model=seeded(SourcesModel), ckpt_path=path)
