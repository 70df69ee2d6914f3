"""Batches of like lengths on real ranks: in step, exact over stops and kills, and handed over between any numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import text_cases
from support.ranks import kill_after, ledger_of, run_on_ranks
from support.runs import assert_stitches
from support.sources import trained
from support.text_cases import HANDED_OVER, NAMES, NUM_SAMPLES, NUM_VAL, RESUMED, VAL_FIRST, hand_over
from support.texts import batches, fits, ids_of, length_of, padding_of, samples

EVERY_SAMPLE = list(range(NUM_SAMPLES))
Runs = list[dict[str, Any]]


class Everything:
    """What each number of ranks did, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.two = self._on(2, text_cases.ON_TWO)
        self.three = self._on(3, text_cases.ON_THREE)
        self.one = {name: hand_over(folder, name, 1, max_epochs=2) for name in NAMES}
        # The processes that finish what others left also go on where two were killed.
        self.killed = folder / "killed_run"
        self.killed.mkdir()
        kill_after(6, "support.killed_texts", self.killed)
        self.lines_when_killed = [len(ledger_of(self.killed, rank)) for rank in range(2)]
        self.two_again = self._on(2, text_cases.ON_TWO_AGAIN)

    def _on(self, number: int, cases: list[Any]) -> list[dict[str, Any]]:
        named = [("support.text_cases", case.__name__) for case in cases]
        return run_on_ranks(named, number, self.folder)

    def of(self, ranks: list[dict[str, Any]], case: str) -> list[Any]:
        results = [rank[case] for rank in ranks]
        assert not any(isinstance(result, str) for result in results), results
        return results

    def uninterrupted(self, number: int, name: str) -> Runs:
        """The runs of all ranks."""
        return [run[name] for run in self.of({2: self.two, 3: self.three}[number], "uninterrupted")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("buckets"))


def steps_of(runs: Runs, epoch: int) -> list[tuple[tuple[int, ...], ...]]:
    """The batches of all ranks, step by step."""
    return list(zip(*(batches(run["ledger"], epoch) for run in runs), strict=True))


def over_all(runs: Runs, epoch: int) -> list[int]:
    return sorted(index for run in runs for index in samples(run["ledger"], epoch))


# Ranks in step


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_take_the_same_steps_and_every_sample_comes_once(
    everything: Everything, name: str, number: int
) -> None:
    runs = everything.uninterrupted(number, name)
    assert len(runs) == number
    for run in runs:
        assert [event[:4] for event in trained(run["ledger"])] == [event[:4] for event in trained(runs[0]["ledger"])]
        assert all(fits(name, batch) for batch in batches(run["ledger"]))
    for epoch in range(2):
        assert len(steps_of(runs, epoch)) == runs[0]["length"]
        assert over_all(runs, epoch) == EVERY_SAMPLE
    assert steps_of(runs, 0) != steps_of(runs, 1)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", ["tokens", "given boundaries"])
def test_all_ranks_of_a_step_have_the_same_number_of_samples(everything: Everything, name: str, number: int) -> None:
    for epoch in range(2):
        for step in steps_of(everything.uninterrupted(number, name), epoch)[:-1]:
            assert len({len(batch) for batch in step}) == 1, step


@pytest.mark.parametrize("number", [2, 3])
def test_all_ranks_of_a_step_serve_the_same_bucket_save_where_one_ends(everything: Everything, number: int) -> None:
    def bucket(index: int) -> int:
        return sum(length_of(index) > end for end in (3, 8))

    for epoch in range(2):
        steps = steps_of(everything.uninterrupted(number, "given boundaries"), epoch)
        of_step = [{bucket(index) for batch in step for index in batch} for step in steps]
        mixed = [found for found in of_step if len(found) > 1]
        assert all(max(found) - min(found) == 1 for found in mixed)
        # Three buckets end twice before the last.
        assert len(mixed) <= 2
        assert {max(found) for found in of_step} == {0, 1, 2}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_gives_every_sample_once_over_the_ranks(everything: Everything, name: str, number: int) -> None:
    for epoch in range(2):
        events = [
            [event for event in run["ledger"] if event[0] == "val" and event[1] == epoch]
            for run in everything.uninterrupted(number, name)
        ]
        assert len({len(of_rank) for of_rank in events}) == 1
        served = sorted(index for of_rank in events for event in of_rank for index in ids_of(event))
        assert served == list(range(VAL_FIRST, VAL_FIRST + NUM_VAL))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("kind", ["tokens", "batch size"])
def test_hardly_any_samples_still_give_all_ranks_the_same_steps(everything: Everything, kind: str, number: int) -> None:
    found = everything.of({2: everything.two, 3: everything.three}[number], "few_samples")
    for length in (number - 1, number + 1):
        runs = [run[f"{kind}, {length}"] for run in found]
        for epoch in range(2):
            steps = steps_of(runs, epoch)
            assert all(batch for step in steps for batch in step)
            assert set(over_all(runs, epoch)) == set(range(length))
            # Only where there are fewer samples than ranks is one of them served twice.
            assert len(over_all(runs, epoch)) == max(length, number)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_equal_on_all_ranks(everything: Everything, name: str, number: int) -> None:
    runs = everything.uninterrupted(number, name)
    assert all(run["state"] == runs[0]["state"] for run in runs)
    assert runs[0]["state"]["lightning_stateful"]["progress"]["epoch"] == 2
    assert len(json.dumps(runs[0]["state"])) < 1000


# Logs


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_padding_is_logged_over_all_ranks_and_equal_on_each(everything: Everything, name: str, number: int) -> None:
    runs = everything.uninterrupted(number, name)
    steps = [*steps_of(runs, 0), *steps_of(runs, 1)]
    assert runs[0]["padding"] == [
        (step, pytest.approx(padding_of(name, *of_ranks))) for step, of_ranks in enumerate(steps)
    ]
    assert all(run["padding"] == runs[0]["padding"] for run in runs)


# Stops


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_stopped_at_any_moment_goes_on_exactly_on_every_rank(everything: Everything, name: str) -> None:
    wholes = everything.uninterrupted(2, name)
    for whole, stops in zip(wholes, everything.of(everything.two, "every_moment"), strict=True):
        assert len(stops[name]) == len(text_cases.MOMENTS)
        for moment, (ledger, resumed) in zip(text_cases.MOMENTS, stops[name], strict=True):
            assert_stitches([ledger, resumed["ledger"]], whole["ledger"])
            assert resumed["weights"] == whole["weights"], moment
            assert resumed["end"] == whole["end"], moment
            assert resumed["padding"] == whole["padding"][len(whole["padding"]) - len(resumed["padding"]) :], moment


def test_workers_change_nothing_on_any_rank(everything: Everything) -> None:
    for found in everything.of(everything.two, "workers"):
        assert_stitches([found["before"], found["after"]["ledger"]], found["whole"]["ledger"], 0)
        assert found["after"]["weights"] == found["whole"]["weights"]


# Another number of ranks


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_is_handed_over_from_two_ranks_to_three_to_one_to_two(everything: Everything, name: str) -> None:
    begun = [run[name] for run in everything.of(everything.two, "handed_over")]
    more = [run[name] for run in everything.of(everything.three, "handed_over")]
    one = [everything.one[name]]
    last = [run[name][0] for run in everything.of(everything.two_again, "to_the_end")]
    steps = [len(steps_of(runs, 0)) for runs in (begun, more, one, last)]
    assert steps[:3] == [3, 2, 3], HANDED_OVER
    assert steps[3] > 1
    assert sorted(index for runs in (begun, more, one, last) for index in over_all(runs, 0)) == EVERY_SAMPLE
    for runs in (begun, more, one, last):
        assert all(fits(name, batch) for run in runs for batch in batches(run["ledger"]))
    # The epoch ends where one on two ranks does, and the next is a whole one.
    assert [event[2] for event in trained(last[0]["ledger"]) if event[1] == 0][-1] == last[0]["length"] - 1
    assert over_all(last, 1) == EVERY_SAMPLE
    assert steps_of(last, 1) == steps_of(everything.uninterrupted(2, name), 1)


@pytest.mark.parametrize("name", ["tokens", "given boundaries"])
def test_what_was_handed_over_is_served_in_step(everything: Everything, name: str) -> None:
    more = [run[name] for run in everything.of(everything.three, "handed_over")]
    last = [run[name][0] for run in everything.of(everything.two_again, "to_the_end")]
    for step in [*steps_of(more, 0), *steps_of(last, 0)[:-1]]:
        assert len({len(batch) for batch in step}) == 1, step


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_logged_of_what_was_handed_over(everything: Everything, name: str) -> None:
    more = [run[name] for run in everything.of(everything.three, "handed_over")]
    assert [values for _, values in more[0]["padding"]] == [
        pytest.approx(padding_of(name, *of_ranks)) for of_ranks in steps_of(more, 0)
    ]
    assert all(run["padding"] == more[0]["padding"] for run in more)


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_that_was_handed_over_may_be_stopped_again(everything: Everything, name: str) -> None:
    for whole, ledger, again in (run[name] for run in everything.of(everything.two_again, "to_the_end")):
        assert_stitches([ledger, again["ledger"]], whole["ledger"])
        assert again["weights"] == whole["weights"]
        assert again["padding"] == whole["padding"][len(whole["padding"]) - len(again["padding"]) :]


# Lengths


def test_one_rank_measures_and_the_others_read(everything: Everything) -> None:
    found = everything.of(everything.two, "measured")
    pids = {run["pid"] for run in found}
    calls = [
        tuple(map(int, line.split())) for line in (everything.folder / "measured" / "calls").read_text().splitlines()
    ]
    of_pid = {pid: Counter(index for who, index in calls if who == pid) for pid in pids}
    assert {who for who, _ in calls} <= pids
    measuring = [pid for pid, counts in of_pid.items() if set(counts) == set(EVERY_SAMPLE)]
    assert len(measuring) == 1
    # The other looks at some, to see whether it can believe the file.
    (reading,) = pids - set(measuring)
    assert sum(of_pid[reading].values()) < sum(of_pid[measuring[0]].values())
    assert found[0]["ledger"] != found[1]["ledger"]
    for run, whole in zip(found, everything.uninterrupted(2, "tokens"), strict=True):
        assert batches(run["ledger"]) == batches(whole["ledger"], 0)


def test_ranks_with_other_lengths_or_budgets_are_refused_on_every_rank(everything: Everything) -> None:
    for case, words in (("other_lengths", "digest"), ("other_budgets", "max_tokens: rank 0: 40, rank 1: 41")):
        for rank in everything.two:
            assert rank[case].startswith("RankMismatchError: The ranks disagree about the training data"), rank[case]
            assert words in rank[case]


# Killed


def test_ranks_killed_within_an_epoch_train_on_exactly_the_uninterrupted_batches(everything: Everything) -> None:
    for rank, weights in enumerate(everything.of(everything.two_again, "killed_run")):
        whole = everything.two[rank]["workers"]["whole"]
        ours = ledger_of(everything.killed, rank)
        assert everything.lines_when_killed[rank] < len(whole["ledger"])
        # A kill between the step and its checkpoint repeats that step, to the same weights.
        once = [line for number, line in enumerate(ours) if line not in ours[max(number - 3, 0) : number]]
        assert once == [[event[1], event[2], list(ids_of(event))] for event in trained(whole["ledger"])]
        assert len(ours) - len(once) <= 2
        assert weights == whole["weights"]
