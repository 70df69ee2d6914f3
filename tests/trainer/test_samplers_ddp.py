"""Other people's samplers on two real ranks: every slot once, exact over stops and kills, and on one rank or two."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import sampler_cases
from support.killed_samplers import KINDS, NUM_EPOCHS, NUM_STEPS
from support.ranks import kill, kill_after, ledger_of, run_on_ranks, start_ranks
from support.runs import assert_stitches
from support.sampler_cases import (
    MOMENTS,
    ON_RANKS,
    STOPPED,
    TO_EVALUATE,
    file_name,
    hand_over,
    plain,
    train_with,
)
from support.sources import samples, trained

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Ranks = list[dict[str, Any]]

# Those that give every sample of an epoch once.
WHOLE_EPOCHS = [
    name
    for name in ON_RANKS
    if name not in ("random with replacement", "weighted", "weighted without replacement", "class balanced")
]
# How many samples of an epoch may be left that cannot be split over two ranks, and are served to both.
REPEATED = {"unbatched": 1, "unbatched, by itself": 1, "lhotse's": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samplers")


@pytest.fixture(scope="module")
def of_one_rank(folder: Path) -> dict[str, Any]:
    """What one process does, and leaves behind for two."""
    return {
        name: {"whole": train_with(ON_RANKS[name], max_epochs=2).ledger, "left": hand_over(folder, name).ledger}
        for name in ON_RANKS
    }


@pytest.fixture(scope="module")
def ranks(folder: Path, of_one_rank: Any) -> Ranks:
    cases = [("support.sampler_cases", case.__name__) for case in sampler_cases.ALL]
    return run_on_ranks([*cases, ("support.killed_samplers", "not_killed")], 2, folder)


def of(ranks: Ranks, name: str) -> list[Any]:
    results = [rank[name] for rank in ranks]
    assert not any(isinstance(result, str) for result in results), results
    return results


def over_both(runs: list[dict[str, Any]], epoch: int | None = None) -> list[int]:
    return [index for run in runs for index in samples(run["ledger"], epoch)]


# Ranks in step


@pytest.mark.parametrize("name", ON_RANKS)
def test_all_ranks_take_the_same_steps_though_their_generators_differ(ranks: Ranks, name: str) -> None:
    first, second = (run[name] for run in of(ranks, "uninterrupted"))
    assert [event[:4] for event in trained(first["ledger"])] == [event[:4] for event in trained(second["ledger"])]
    assert first["weights"] == second["weights"]
    assert first["end"] == second["end"]
    assert first["state"] == second["state"]
    assert first["report"] == second["report"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_serve_what_one_serves(ranks: Ranks, of_one_rank: dict[str, Any], name: str) -> None:
    runs = [run[name] for run in of(ranks, "uninterrupted")]
    for epoch in range(2):
        ours, alone = Counter(over_both(runs, epoch)), Counter(samples(of_one_rank[name]["whole"], epoch))
        assert set(ours) == set(alone)
        assert (ours - alone).total() <= REPEATED.get(name, 0)
        assert not alone - ours


@pytest.mark.parametrize("name", WHOLE_EPOCHS)
def test_an_epoch_gives_every_sample_once_over_the_ranks(ranks: Ranks, name: str) -> None:
    runs = [run[name] for run in of(ranks, "uninterrupted")]
    for epoch in range(2):
        counts = Counter(over_both(runs, epoch))
        assert set(counts) == set(range(sampler_cases.LENGTH))
        # lhotse's last batch may be of one cut, which both ranks are given.
        assert counts.total() - sampler_cases.LENGTH <= (1 if name == "lhotse's" else 0)


# Stops


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_stopped_at_any_moment_goes_on_exactly_on_every_rank(ranks: Ranks, name: str) -> None:
    for whole, stops in zip(of(ranks, "uninterrupted"), of(ranks, "every_moment"), strict=True):
        assert len(stops[name]) == len(MOMENTS)
        for moment, (ledger, resumed) in zip(MOMENTS, stops[name], strict=True):
            assert_stitches([ledger, resumed["ledger"]], whole[name]["ledger"])
            assert resumed["weights"] == whole[name]["weights"], moment
            assert resumed["end"] == whole[name]["end"], moment


# Another number of ranks


@pytest.mark.parametrize("name", ON_RANKS)
def test_one_rank_hands_over_to_two(ranks: Ranks, of_one_rank: dict[str, Any], name: str) -> None:
    runs = [found[name] for found in of(ranks, "resumed_on_two_ranks")]
    one, other = (trained(run["ledger"]) for run in runs)
    assert [event[:4] for event in one] == [event[:4] for event in other]
    for epoch in range(2):
        before = samples(of_one_rank[name]["left"], epoch)
        served, alone = Counter(before + over_both(runs, epoch)), Counter(samples(of_one_rank[name]["whole"], epoch))
        assert not alone - served
        assert (served - alone).total() <= REPEATED.get(name, 0)


@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_hand_over_to_one(ranks: Ranks, of_one_rank: dict[str, Any], folder: Path, name: str) -> None:
    before = [found[name] for found in of(ranks, "saved_on_two_ranks")]
    path = folder / "saved_on_two_ranks" / file_name(name, 2)
    resumed = plain(train_with(ON_RANKS[name], ckpt_path=path, seed=9, max_epochs=2))
    for epoch in range(2):
        served = Counter(over_both(before, epoch) + samples(resumed["ledger"], epoch))
        assert served == Counter(samples(of_one_rank[name]["whole"], epoch))


# Evaluation


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices:UserWarning")
@pytest.mark.parametrize("name", TO_EVALUATE)
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: Ranks, name: str) -> None:
    found = [rank[name] for rank in of(ranks, "evaluated")]
    alone = sampler_cases.evaluate(TO_EVALUATE[name])
    for stage in ("validate", "test", "predict"):
        served = sorted(index for rank in found for batch in rank[stage] for index in batch)
        assert served == sorted(index for batch in alone[stage] for index in batch), stage
        assert len({len(rank[stage]) for rank in found}) == 1
        assert all(batch for rank in found for batch in rank[stage])


@pytest.mark.parametrize("name", TO_EVALUATE)
def test_every_rank_writes_its_predictions_with_their_indices(ranks: Ranks, name: str) -> None:
    for rank in of(ranks, "evaluated"):
        found = rank[name]
        assert found["predictions"] == found["predict"]
        assert [predicted for _, predicted in found["written"]] == found["predict"]
        # Lightning infers no indices for loaders without len.
        expected = [[] for _ in found["predict"]] if "without len" in name else found["predict"]
        assert [indices for indices, _ in found["written"]] == expected
        assert found["written at the end"] == ([[]] if "without len" in name else [expected])


# Refusals


@pytest.mark.parametrize("case", ["by_rank", "by_hash"])
def test_a_sampler_that_differs_from_rank_to_rank_is_refused_on_every_rank(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case].startswith("RankMismatchError: The ranks disagree about the training data"), rank[case]
        sequences = re.findall(r"- sequence: rank 0: '(\w+)', rank 1: '(\w+)'", rank[case])
        assert len(sequences) == 1, rank[case]
        assert len(set(sequences[0])) == 2, rank[case]


def test_a_sampler_that_one_rank_refuses_is_refused_on_every_rank(ranks: Ranks) -> None:
    first, second = (rank["on_one_rank_only"] for rank in ranks)
    assert first.startswith("RankMismatchError: the training data could not be built on every rank"), first
    assert "rank 1: UnsupportedLoaderError" in first
    assert second.startswith("UnsupportedLoaderError: Cannot take over the training loader: Unshared"), second


def test_ranks_with_other_lengths_are_refused_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["lengths_differ"].startswith("RankMismatchError"), rank["lengths_differ"]
        assert "length: rank 0: 5, rank 1: 6" in rank["lengths_differ"]


# Killed


def test_ranks_killed_twice_train_on_exactly_the_uninterrupted_batches(
    ranks: Ranks, folder: Path, tmp_path: Path
) -> None:
    for count in (NUM_STEPS + 3, 2 * NUM_STEPS + 7):
        kill_after(count, "support.killed_samplers", tmp_path)
    processes = start_ranks("support.killed_samplers", tmp_path)
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        kill(processes)
    for rank in range(2):
        ours, whole = ledger_of(tmp_path, rank), ledger_of(folder / "not_killed", rank)
        assert len(whole) == NUM_EPOCHS * NUM_STEPS
        assert all(len(served) == KINDS for _, _, served in whole)
        # A kill between the step and its checkpoint repeats that step, to the same weights.
        once = [line for number, line in enumerate(ours) if line not in ours[max(number - 3, 0) : number]]
        assert once == whole
        assert len(ours) - len(once) <= 4
        assert (tmp_path / f"weights{rank}.json").read_text() == repr(of(ranks, "not_killed")[rank])
