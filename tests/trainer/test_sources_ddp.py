"""Several sources on two real ranks: in step, exact over stops, and handed over between one rank and two."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support import source_cases
from support.ranks import kill, kill_after, ledger_of, run_on_ranks, start_ranks
from support.runs import assert_stitches
from support.source_cases import CONFIGS, UNEVEN, WHOLE_EPOCHS, file_name, hand_over, plain
from support.sources import FIRSTS, ids_of, samples, samples_of, source_of, train_on, trained

Ranks = list[dict[str, Any]]

EVERY_SAMPLE = sorted(FIRSTS[name] + index for name, length in UNEVEN.items() for index in range(length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def of_one_rank(folder: Path) -> dict[str, Any]:
    """What one process leaves behind for two."""
    return {name: hand_over(folder, name, max_epochs=2).ledger for name in CONFIGS}


@pytest.fixture(scope="module")
def ranks(folder: Path, of_one_rank: Any) -> Ranks:
    cases = [("support.source_cases", case.__name__) for case in source_cases.ALL]
    return run_on_ranks([*cases, ("support.killed_ranks", "not_killed")], 2, folder)


def of(ranks: Ranks, name: str) -> list[Any]:
    results = [rank[name] for rank in ranks]
    assert not any(isinstance(result, str) for result in results), results
    return results


def over_both(runs: list[dict[str, Any]], epoch: int | None = None) -> list[int]:
    return [index for run in runs for index in samples(run["ledger"], epoch)]


# Ranks in step


@pytest.mark.parametrize("name", CONFIGS)
def test_all_ranks_take_the_same_steps_and_serve_the_same_source_in_each(ranks: Ranks, name: str) -> None:
    first, second = (trained(run[name]["ledger"]) for run in of(ranks, "uninterrupted"))
    assert [event[:4] for event in first] == [event[:4] for event in second]
    if name.startswith("by sample"):
        return
    for epoch in range(2):
        tags = [(one[4][0], other[4][0]) for one, other in zip(first, second, strict=True) if one[1] == epoch]
        differing = [number for number, (one, other) in enumerate(tags) if one != other]
        # Only what is left of the sources in the end, too little for a batch on each rank, is served side by side.
        assert differing == list(range(len(tags)))[len(tags) - len(differing) :]
        assert len(differing) <= 1
        assert "steps" not in name or not differing
    for event in first + second:
        assert {source_of(index) for index in ids_of(event)} == {event[4][0]}


@pytest.mark.parametrize("name", WHOLE_EPOCHS)
def test_an_epoch_gives_every_sample_once_over_the_ranks(ranks: Ranks, name: str) -> None:
    runs = [run[name] for run in of(ranks, "uninterrupted")]
    for epoch in range(2):
        assert sorted(over_both(runs, epoch)) == EVERY_SAMPLE


@pytest.mark.parametrize("name", ["mixture, steps"])
def test_with_steps_both_ranks_go_through_each_source_pass_by_pass(ranks: Ranks, name: str) -> None:
    runs = [run[name]["ledger"] for run in of(ranks, "uninterrupted")]
    steps = zip(*map(trained, runs), strict=True)
    together = [event for step in steps for event in step]
    for source, length in UNEVEN.items():
        # Within a step the ranks' shares of a pass stand one after the other.
        served = samples_of(source, together)
        for start in range(0, len(served) - length + 1, length):
            assert len(set(served[start : start + length])) == length, (source, start)


def test_sources_smaller_than_the_ranks_are_served_side_by_side(ranks: Ranks) -> None:
    runs = of(ranks, "fewer_samples_than_ranks")
    for epoch in range(2):
        assert sorted(over_both(runs, epoch)) == [0, 100, 200, 201, 202, 203]
    assert [len(trained(run["ledger"])) for run in runs] == [4, 4]


# Stops


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_stopped_at_any_moment_goes_on_exactly_on_every_rank(ranks: Ranks, name: str) -> None:
    for whole, stops in zip(of(ranks, "uninterrupted"), of(ranks, "every_moment"), strict=True):
        assert len(stops[name]) == len(source_cases.MOMENTS)
        for moment, (ledger, resumed) in zip(source_cases.MOMENTS, stops[name], strict=True):
            assert_stitches([ledger, resumed["ledger"]], whole[name]["ledger"])
            assert resumed["weights"] == whole[name]["weights"], moment
            assert resumed["end"] == whole[name]["end"], moment
            logged = whole[name]["logged"]
            assert resumed["logged"] == logged[len(logged) - len(resumed["logged"]) :], moment


def test_workers_and_accumulation_change_nothing_on_any_rank(ranks: Ranks) -> None:
    for whole, ledger, resumed in of(ranks, "workers_and_windows"):
        assert_stitches([ledger, resumed["ledger"]], whole["ledger"])
        assert resumed["weights"] == whole["weights"]


# Logs


def assert_logs_what_was_served(name: str, runs: list[dict[str, Any]], before: list[Any] | None = None) -> None:
    """Every logged value is what all ranks were served until then, after what was trained on before."""
    done = trained(before or [])
    steps = list(zip(*(trained(run["ledger"]) for run in runs), strict=True))
    assert [step - len(done) for step, _ in runs[0]["logged"]] == list(range(len(steps)))
    for number, (_, values) in enumerate(runs[0]["logged"]):
        epoch = steps[number][0][1]
        events = [*done, *(event for step in steps[: number + 1] for event in step)]
        counted = [event for event in events if "steps" in name or event[1] == epoch]
        for source, length in UNEVEN.items():
            count = len(samples_of(source, counted))
            assert values[f"{source}/samples"] == count
            assert values[f"{source}/epochs"] == pytest.approx(count / length)
            assert values[f"{source}/share"] == pytest.approx(count / len(samples(counted)))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_logged_is_equal_on_all_ranks_and_what_both_were_served(ranks: Ranks, name: str) -> None:
    runs = [run[name] for run in of(ranks, "uninterrupted")]
    assert runs[0]["logged"] == runs[1]["logged"]
    assert runs[0]["report"] == runs[1]["report"]
    assert_logs_what_was_served(name, runs)


# Another number of ranks


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_hands_over_to_two(ranks: Ranks, of_one_rank: dict[str, Any], name: str) -> None:
    runs = [found[name][0] for found in of(ranks, "resumed_on_two_ranks")]
    one, other = (trained(run["ledger"]) for run in runs)
    assert [event[:4] for event in one] == [event[:4] for event in other]
    assert_logs_what_was_served(name, runs, of_one_rank[name])
    # The epoch goes on in the steps of two ranks, and ends where they end.
    assert [event[2] for event in one if event[1] == 0][-1] == runs[0]["length"] - 1
    if name in WHOLE_EPOCHS:
        assert sorted(samples(of_one_rank[name], 0) + over_both(runs, 0)) == EVERY_SAMPLE
        assert sorted(over_both(runs, 1)) == EVERY_SAMPLE


@pytest.mark.parametrize("name", CONFIGS)
def test_an_epoch_that_was_handed_over_may_be_stopped_again(ranks: Ranks, name: str) -> None:
    for resumed, ledger, again in (found[name] for found in of(ranks, "resumed_on_two_ranks")):
        assert_stitches([ledger, again["ledger"]], resumed["ledger"])
        assert again["weights"] == resumed["weights"]
        assert again["logged"] == resumed["logged"][len(resumed["logged"]) - len(again["logged"]) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_hand_over_to_one(ranks: Ranks, folder: Path, name: str) -> None:
    before = [found[name] for found in of(ranks, "saved_on_two_ranks")]
    path = folder / "saved_on_two_ranks" / file_name(name, 2)
    resumed = plain(train_on(CONFIGS[name], ckpt_path=path, max_epochs=2))
    epoch = trained(resumed["ledger"])[0][1]
    last = [event for event in trained(resumed["ledger"]) if event[1] == epoch][-1]
    assert last[2] == resumed["length"] - 1
    if name in WHOLE_EPOCHS:
        assert sorted(over_both(before, epoch) + samples(resumed["ledger"], epoch)) == EVERY_SAMPLE
    elif "steps" in name:
        for source, length in UNEVEN.items():
            served = [*itertools.chain(*(samples_of(source, run["ledger"]) for run in before))]
            served += samples_of(source, resumed["ledger"])
            count = resumed["report"]["sources"][source]["samples"]
            assert count == len(served)
            assert len(set(served)) == min(length, count)


# Refusals


def test_ranks_with_other_weights_or_lengths_are_refused_on_every_rank(ranks: Ranks) -> None:
    for case, words in (("other_weights", "weights"), ("other_lengths", "sources")):
        for rank in ranks:
            assert rank[case].startswith("RankMismatchError: The ranks disagree about the training data"), rank[case]
            assert words in rank[case]


# Killed


def test_ranks_killed_twice_train_on_exactly_the_uninterrupted_batches(
    ranks: Ranks, folder: Path, tmp_path: Path
) -> None:
    for count in (13, 34):
        kill_after(count, "support.killed_ranks", tmp_path)
    processes = start_ranks("support.killed_ranks", tmp_path)
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        kill(processes)
    for rank in range(2):
        ours, whole = ledger_of(tmp_path, rank), ledger_of(folder / "not_killed", rank)
        assert len(whole) == 50
        # A kill between the step and its checkpoint repeats that step, to the same weights.
        once = [line for number, line in enumerate(ours) if line not in ours[max(number - 3, 0) : number]]
        assert once == whole
        assert len(ours) - len(once) <= 4
        assert (tmp_path / f"weights{rank}.json").read_text() == repr(of(ranks, "not_killed")[rank])
