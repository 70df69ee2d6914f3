"""Streams on real ranks: in step, nothing lost, exact over stops, faults and kills, and dealt out anew."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import stream_ranks
from support.killed_streams import KINDS, NUM_EPOCHS, NUM_STEPS
from support.ranks import kill, kill_after, ledger_of, run_on_ranks, start_ranks
from support.runs import assert_stitches, seeded, train
from support.sources import SourcesModel, ids_of, samples, trained
from support.stream_ranks import HANDED, hand_over
from support.stream_runs import (
    EVERY_SAMPLE,
    MODULES,
    OF_OTHERS,
    VAL_FIRST,
    VAL_SAMPLES,
    OwnWithState,
    module,
    write_files,
)

from lightning_stateful.errors import StateMismatchError

Ranks = list[dict[str, Any]]
MIXED = ("interleave", "concatenate", "in turn", "mixed by sample", "first exhausted", "cycle")
SCHEDULES = (
    "side by side",
    "loaders made anew",
    "limited",
    "long accumulation",
    "short epochs",
    "long epochs",
    "callback alone",
    "iterables",
    "iterables with a state",
    "iterables cut",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "files").mkdir()
    write_files(folder / "files")
    return folder


@pytest.fixture(scope="module")
def survivor(folder: Path) -> dict[str, Any]:
    """What becomes of rank 0 when rank 1 is killed; then both are, later on."""
    killed = folder / "killed_run"
    killed.mkdir()
    processes = start_ranks("support.killed_streams", killed)
    try:
        deadline = time.monotonic() + 60
        while len(ledger_of(killed, 0)) < 4 and time.monotonic() < deadline:
            assert all(process.poll() is None for process in processes), "the run was over before it was killed"
            time.sleep(0.005)
        kill(processes[1:])
        began = time.monotonic()
        code = processes[0].wait(timeout=60)
        waited = time.monotonic() - began
    finally:
        kill(processes)
    steps = len(ledger_of(killed, 0))
    kill_after(NUM_STEPS + 4, "support.killed_streams", killed)
    return {"code": code, "waited": waited, "steps": steps, "steps later": len(ledger_of(killed, 0))}


@pytest.fixture(scope="module")
def ranks(folder: Path, survivor: Any) -> Ranks:
    cases = [("support.stream_ranks", case.__name__) for case in stream_ranks.ON_TWO]
    killed = [("support.killed_streams", name) for name in ("killed_run", "not_killed")]
    return run_on_ranks([*killed, *cases], 2, folder)


@pytest.fixture(scope="module")
def handed(folder: Path, ranks: Ranks) -> list[Ranks]:
    """What two ranks, then one, then three have done, and then one again."""
    two = of(ranks, "handed_over")
    one = [{name: hand_over(folder, name, 1) for name in HANDED}]
    three = of(run_on_ranks([("support.stream_ranks", "handed_over")], 3, folder), "handed_over")
    last = {}
    for name in HANDED:
        path, model = folder / f"{name}, 3.ckpt", seeded(SourcesModel)
        make = lambda name=name: MODULES[name](folder / "files", val=None)  # noqa: E731  # as short as it gets
        last[name] = {"ledger": train(make, model=model, ckpt_path=path, max_epochs=2).ledger}
    return [two, one, three, [last]]


def of(ranks: Ranks, case: str) -> list[Any]:
    results = [rank[case] for rank in ranks]
    assert not any(isinstance(result, str) for result in results), results
    return results


def over_all(runs: Ranks, epoch: int | None = None) -> list[int]:
    return [index for run in runs for index in samples(run["ledger"], epoch)]


def assert_in_step(runs: Ranks) -> None:
    """All ranks take the same steps, to the same weights and states."""
    first = runs[0]
    for run in runs[1:]:
        assert [event[:4] for event in trained(run["ledger"])] == [event[:4] for event in trained(first["ledger"])]
        assert all(run[name] == first[name] for name in ("weights", "end", "state", "report"))


def assert_chain(parts: list[Any]) -> None:
    """Each run goes on where the one before was saved, and ends as the first did."""
    whole = parts[0][0]
    for (_, before), (after, _) in itertools.pairwise(parts):
        assert before is not None, "the moment was never reached"
        assert_stitches([before, after["ledger"]], whole["ledger"])
        assert all(after[name] == whole[name] for name in ("weights", "end", "state", "report"))


# In step, and nothing lost


def every_sample_of(kind: str) -> list[int]:
    every = [index for index in EVERY_SAMPLE if kind != "filter" or index % 5 != 1]
    return [*every, *OF_OTHERS] if kind in MIXED else every


@pytest.mark.parametrize("kind", MODULES)
def test_ranks_of_uneven_shares_take_the_same_steps_and_lose_nothing(ranks: Ranks, kind: str) -> None:
    runs = [found[kind][0][0] for found in of(ranks, "every_kind")]
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
    runs = [found["own"][0][0] for found in of(ranks, "every_kind")]
    left = set(EVERY_SAMPLE) - set(over_all(runs, 0))
    assert left
    begun = []
    for run in runs:
        of_rank = samples(run["ledger"], 1)
        at = next((place for place, index in enumerate(of_rank) if index not in left), len(of_rank))
        begun += of_rank[:at]
    assert set(begun) == left


def test_states_are_equal_on_all_ranks_at_every_moment_and_plain(ranks: Ranks) -> None:
    first, second = of(ranks, "states")
    assert first == second
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(second))
    for name, moments in first.items():
        assert len(moments) > 20
        # The dataset's own state of each rank is a tensor of 22 numbers.
        most = 9000 if name == "own with a state" else 5000
        assert max(len(json.dumps(state)) for _, state, _ in moments) < most


# Stops


@pytest.mark.parametrize("kind", MODULES)
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank(ranks: Ranks, kind: str) -> None:
    for found in of(ranks, "every_kind"):
        assert_chain(found[kind])


@pytest.mark.parametrize("kind", ["chunks", "json", "own with a state"])
def test_workers_go_on_exactly_on_every_rank(ranks: Ranks, kind: str) -> None:
    found = [found[kind] for found in of(ranks, "workers")]
    assert_in_step([parts[0][0] for parts in found])
    for parts in found:
        assert_chain(parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_any_schedule_goes_on_exactly_on_every_rank(ranks: Ranks, schedule: str) -> None:
    found = [found[schedule] for found in of(ranks, "schedules")]
    assert_in_step([parts[0][0] for parts in found])
    for parts in found:
        assert_chain(parts)


@pytest.mark.parametrize(
    "schedule", ["limited", "short epochs", "long epochs", "loaders made anew", "long accumulation"]
)
def test_epochs_of_any_length_lose_nothing_over_the_ranks(ranks: Ranks, schedule: str) -> None:
    runs = [found[schedule][0][0] for found in of(ranks, "schedules")]
    counts = Counter(over_all(runs))
    assert set(counts) == set(EVERY_SAMPLE)
    # A sample may be left of each of the last two passes, at most.
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_trainer_fitted_again_goes_on_within_its_epoch_on_every_rank(ranks: Ranks) -> None:
    for ledger, found in zip(of(ranks, "again"), of(ranks, "every_kind"), strict=True):
        assert trained(ledger) == trained(found["chunks"][0][0]["ledger"])


# Evaluation


@pytest.mark.parametrize("kind", ["chunks", "one chunk", "parquet", "mixed"])
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: Ranks, kind: str) -> None:
    expected = {"one chunk": list(range(VAL_FIRST, VAL_FIRST + 4)), "mixed": [*VAL_SAMPLES, *range(600, 605)]}
    ledgers = [found[kind] for found in of(ranks, "evaluated")]
    for stage in ("test", "predict"):
        served = [index for ledger in ledgers for event in ledger if event[0] == stage for index in event[2]]
        assert sorted(served) == expected.get(kind, VAL_SAMPLES), stage
    of_step: dict[int, list[int]] = {}
    for ledger in ledgers:
        for event in ledger:
            if event[0] == "val":
                of_step.setdefault(event[3], []).extend(ids_of(event))
    assert len(of_step) > 1
    assert all(sorted(served) == expected.get(kind, VAL_SAMPLES) for served in of_step.values())


# Faults


def test_a_fault_on_one_rank_is_an_error_on_both_and_the_last_checkpoint_goes_on(ranks: Ranks) -> None:
    first, second = of(ranks, "broken")
    assert first["error"].startswith("StreamError: The stream of rank 1 broke off before step 3: ShardError: chunk ")
    assert second["error"].startswith("ShardError: chunk ")
    for found in (first, second):
        assert "OSError: the disk is gone" in found["error"]
        # Lightning reads one batch ahead.
        assert len(trained(found["before"])) in (2, 3)
        assert_stitches([found["before"], found["after"]["ledger"]], found["whole"]["ledger"], 0)
        assert all(found["after"][name] == found["whole"][name] for name in ("weights", "end", "state"))


def test_a_rank_that_stands_still_is_named_on_both(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["slow"].startswith("StreamError: Step 0 was waited for in vain for 1 s"), rank["slow"]
        assert "rank 1" in rank["slow"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("seeds", "seed: rank 0: 0, rank 1: 1"),
        ("chunks", "stream.chunks: rank 0: 8"),
        ("steps", "length: rank 0: 3, rank 1: 4"),
    ],
)
def test_ranks_that_disagree_are_refused_on_both(ranks: Ranks, case: str, words: str) -> None:
    for found in of(ranks, "refused"):
        assert found[case].startswith("RankMismatchError: "), found[case]
        assert words in found[case]


def test_a_rank_without_samples_lets_no_epoch_be_empty(ranks: Ranks) -> None:
    for found in of(ranks, "nothing_on_a_rank"):
        assert {event[1] for event in trained(found["next"])} == set(range(4))


def test_a_rank_without_samples_is_dealt_what_others_have_left(ranks: Ranks) -> None:
    for found in of(ranks, "nothing_on_a_rank"):
        assert found["steps"] == "trained"


# Killed


def test_a_rank_does_not_wait_for_ever_for_one_that_was_killed(survivor: dict[str, Any]) -> None:
    assert survivor["code"] not in (0, -9)
    assert survivor["waited"] < 45


def test_ranks_killed_twice_train_on_exactly_the_uninterrupted_batches(
    ranks: Ranks, folder: Path, survivor: dict[str, Any]
) -> None:
    assert 4 <= survivor["steps"] < NUM_STEPS + 4 <= survivor["steps later"] < NUM_EPOCHS * NUM_STEPS
    for rank in range(2):
        ours, whole = ledger_of(folder / "killed_run", rank), ledger_of(folder / "not_killed", rank)
        assert len(whole) == NUM_EPOCHS * NUM_STEPS
        assert all(len(served) == KINDS for _, _, served in whole)
        # A kill between the step and its checkpoint repeats that step, to the same weights.
        once = [line for number, line in enumerate(ours) if line not in ours[max(number - 3, 0) : number]]
        assert once == whole
        assert len(ours) - len(once) <= 4
    for weights, expected in zip(of(ranks, "killed_run"), of(ranks, "not_killed"), strict=True):
        assert weights == expected


# Other numbers of ranks


@pytest.mark.parametrize("kind", HANDED)
def test_an_epoch_is_handed_over_from_two_ranks_to_one_to_three_to_one(handed: list[Ranks], kind: str) -> None:
    runs = [[run[kind] for run in of_number] for of_number in handed]
    assert [len(of_number) for of_number in runs] == [2, 1, 3, 1]
    assert all(trained(run["ledger"]) for of_number in runs for run in of_number)
    # What three ranks of uneven shares have left comes first in the next epoch.
    assert sorted(index for of_number in runs for index in over_all(of_number)) == sorted(every_sample_of(kind) * 2)
    assert max(Counter(index for of_number in runs for index in over_all(of_number, 0)).values()) == 1


def test_an_own_stream_cannot_be_handed_over_within_an_epoch(folder: Path, ranks: Ranks) -> None:
    path = folder / "every_kind" / "own with a state" / "1" / "0.ckpt"
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2, now 1.* resume on 2 ranks"):
        train(lambda: module(OwnWithState()), model=seeded(SourcesModel), ckpt_path=path)
