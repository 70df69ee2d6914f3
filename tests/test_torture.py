"""Runs that are killed, starved and damaged, and whether the counts that judge them would notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.torture.audit import Found, Trail, audit, compare_order, compare_weights
from benchmarks.torture.faults import faults_of
from benchmarks.torture.kinds import KINDS, NUM_SAMPLES, How
from benchmarks.torture.life import Outcome, torture
from benchmarks.torture.rank import NUM_WEIGHTS, Start


def assert_nothing_came_twice_or_never(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert (outcome.found, outcome.hung) == (Found(), 0), str(outcome)


def test_a_stream_is_trained_on_once_whatever_happens_to_the_run(tmp_path: Path) -> None:
    outcomes = torture(1, 4, tmp_path, kinds=["chunks"], most_faults=5)
    assert_nothing_came_twice_or_never(outcomes)
    faults = {outcome.fault for outcome in outcomes if outcome.fault}
    assert len(faults) >= 4
    assert faults <= set(faults_of("chunks"))
    by_name = {outcome.fault for outcome in outcomes if outcome.named}
    assert faults & {"full disk", "truncated checkpoint", "missing shard", "exception in the data"} <= by_name


@pytest.mark.slow
def test_data_of_every_kind_are_trained_on_once_whatever_happens_to_the_run(tmp_path: Path) -> None:
    outcomes = torture(3 * len(KINDS), 5, tmp_path, kinds=list(KINDS), jobs=2, most_faults=3)
    assert_nothing_came_twice_or_never(outcomes)
    assert {outcome.kind for outcome in outcomes} == set(KINDS)


# The counts


def start(folder: Path, number: int, batches: list[list[int]], *, kind: str = "shuffle", first: int = 0) -> Start:
    """A start on one rank that wrote down these batches of epoch 0."""
    found = Start(number, kind, folder, How(1), 2, 1)
    found.lines(0).parent.mkdir(exist_ok=True)
    lines = [[0, first + at, first + at, [[one] for one in batch]] for at, batch in enumerate(batches)]
    found.lines(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def trail_of(folder: Path, before: list[list[int]], after: list[list[int]], until: int) -> Trail:
    """Two starts; the second goes on from a checkpoint of the first, before the step ``until``."""
    return Trail([start(folder, 0, before), start(folder, 1, after, first=until)], {1: (0, until)})


ALL = [[number] for number in range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    ("before", "after", "replayed", "lost"),
    [
        (ALL[:30], ALL[20:], 0, 0),
        (ALL[:30], ALL[19:], 1, 0),
        (ALL[:30], ALL[21:], 0, 1),
        (ALL[:19] + ALL[40:41], ALL[20:], 1, 1),
    ],
    ids=["right", "twice", "never", "one for another"],
)
def test_what_came_twice_and_what_never_came_is_counted(
    tmp_path: Path, before: list[list[int]], after: list[list[int]], replayed: int, lost: int
) -> None:
    trail = trail_of(tmp_path, before, after, until=20)
    with trail.starts[-1].lines(0).open("a") as file:
        # The first batch of another epoch: this one is over.
        file.write(json.dumps([1, 0, 90, [[3]]]) + "\n")
    found = audit(trail, is_over=False)
    assert (found.replayed, found.lost) == (replayed, lost)


def test_weights_and_orders_that_are_others_are_noticed(tmp_path: Path) -> None:
    trail, whole = trail_of(tmp_path, ALL[:30], ALL[20:], until=20), tmp_path / "whole"
    whole.mkdir()
    assert compare_order(trail, start(whole, 0, ALL)) == []
    assert "[[6]]), and without a stop on (0, 6, [[7]])" in compare_order(trail, start(whole, 0, ALL[:6] + ALL[7:]))[0]
    counts = torch.zeros(NUM_WEIGHTS)
    counts[:25] = 1
    torch.save({"global_step": 25, "state_dict": {"counts": counts}}, tmp_path / "a.ckpt")
    assert compare_weights(trail, tmp_path / "a.ckpt", 1) == (25, [])
    counts[7] = 2
    torch.save({"global_step": 25, "state_dict": {"counts": counts}}, tmp_path / "a.ckpt")
    assert "1 weights are not" in compare_weights(trail, tmp_path / "a.ckpt", 1)[1][0]
