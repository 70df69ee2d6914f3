"""Figures of a ledger by step are those that its records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stateful.ledger import Batch, FileHeader, Ledger, LedgerFile, Part, over_time, read_ledger
from lightning_stateful.ledger.files import as_items
from lightning_stateful.ledger.over_time import coverage_of, in_numbers, padding_of, shares_of, waiting_of


def write(
    folder: Path,
    name: str,
    ranks: list[list[Batch]],
    *,
    resumed: tuple[str, int, int] | None = None,
    loader: Any = None,
    clocks: tuple[float, ...] = (0.0, 0.0),
) -> None:
    """A start with the batches of each rank, perhaps resumed from a batch of an earlier one."""
    came_from = None if resumed is None else dict(zip(("start", "epoch", "batch"), resumed, strict=True))
    for rank, batches in enumerate(ranks):
        begins = (batches[0].epoch, batches[0].batch)
        loaders = {"": loader or {"length": None}}
        header = FileHeader(name, rank, len(ranks), loaders, begins, came_from, {}, clocks[rank], f"host {rank}")
        file = LedgerFile(folder / name / f"rank-{rank:05}.ledger", header)
        for batch in batches:
            file.add(batch)
        file.close()


def batch(
    number: int, items: Any, epoch: int = 0, *, at: float | None = None, waited: float = 0.0, **more: Any
) -> Batch:
    return Batch(epoch, number, (Part("", epoch, *as_items(items), **more),), at, waited)


def counted(ledger: Ledger) -> Any:
    found = shares_of(ledger)
    assert found is not None
    return found


# Coverage


def test_each_sample_stands_at_the_step_of_the_run_in_which_it_came(tmp_path: Path) -> None:
    first = [[batch(0, [0, 1]), batch(1, [2, 3]), batch(2, [4, 5])], [batch(0, [6]), batch(1, [7]), batch(2, [8])]]
    write(tmp_path, "a", first)
    # Of what came before the checkpoint, 3 comes again.
    second = [
        [batch(2, [5, 3]), batch(3, [9]), Batch(0, 4, ()), batch(0, [3], 1)],
        [batch(2, [4]), batch(3, [8]), Batch(0, 4, ()), batch(0, [9], 1)],
    ]
    write(tmp_path, "b", second, resumed=("a", 0, 2))
    found = coverage_of(read_ledger(tmp_path))
    assert found is not None
    columns = (found.items, found.steps, found.starts, found.is_lost, found.is_again)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [
        (0, 0, 0, False, False),
        (1, 0, 0, False, False),
        (2, 1, 0, False, False),
        (3, 1, 0, False, False),
        (3, 3, 1, False, True),
        (3, 5, 1, False, False),
        (4, 2, 0, True, False),
        (4, 3, 1, False, False),
        (5, 2, 0, True, False),
        (5, 3, 1, False, False),
        (6, 0, 0, False, False),
        (7, 1, 0, False, False),
        (8, 2, 0, True, False),
        (8, 4, 1, False, False),
        (9, 4, 1, False, False),
        (9, 5, 1, False, False),
    ]
    assert (found.begins, found.epochs) == ([0, 3], [(0, 0), (5, 1)])


def test_items_that_are_no_indices_have_no_place(tmp_path: Path) -> None:
    write(tmp_path, "a", [[batch(0, ["x"])]])
    assert coverage_of(read_ledger(tmp_path)) is None
    assert waiting_of(read_ledger(tmp_path)) is None


# Shares

MIXTURE = {"names": ["x", "y"], "lengths": [6, 2], "unit": "samples", "at": [0], "shares": [[0.75, 0.25]]}


def test_shares_of_each_window_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_time, "_FEWEST_STEPS", 2)
    loader = {"mixture": {**MIXTURE, "between": "constant"}}
    # Indices go on from pass to pass; what came behind the checkpoint does not count.
    a = [batch(0, [0, 6]), batch(1, [5, 8 + 7]), batch(2, [7, 7])]
    write(tmp_path, "a", [a], loader=loader)
    write(tmp_path, "b", [[batch(2, [1, 2]), batch(3, [3, 7])]], loader=loader, resumed=("a", 0, 2))
    found = counted(read_ledger(tmp_path))
    assert (found.names, found.unit, found.samples) == (("x", "y"), "samples", [5, 3])
    assert found.steps.tolist() == [0.5, 2.5]
    assert found.got.tolist() == [[0.5, 0.5], [0.75, 0.25]]
    assert found.asked.tolist() == [[0.75, 0.25], [0.75, 0.25]]
    assert found.got_in_all.tolist() == [5 / 8, 3 / 8]
    assert in_numbers(read_ledger(tmp_path))["mixture"][""] == {
        "unit": "samples",
        "sources": {
            "x": {"samples": 5, "share": 5 / 8, "asked": 0.75},
            "y": {"samples": 3, "share": 3 / 8, "asked": 0.25},
        },
    }


@pytest.mark.parametrize("begins", [0, 1])
def test_what_a_schedule_asked_for(tmp_path: Path, begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_time, "_FEWEST_STEPS", 1)
    points = {"at": [0, 4], "shares": [[1.0, 0.0], [0.0, 1.0]], "between": "linear"}
    steps = [batch(number, None, epoch, sources=((0, 1),)) for epoch in range(2) for number in range(3)][begins:]
    write(tmp_path / "counted", "a", [steps], loader={"mixture": {**MIXTURE, **points}})
    write(tmp_path / "known", "a", [steps], loader={"mixture": {**MIXTURE, **points, "steps": 3}})
    expected = [1, 0.75, 0.5, 0.25, 0, 0][begins:]
    assert counted(read_ledger(tmp_path / "known")).asked[:, 0].tolist() == expected
    # A stream's epochs differ in length: its steps are counted, where the ledger has the first.
    found = counted(read_ledger(tmp_path / "counted")).asked[:, 0]
    assert np.isnan(found).all() if begins else found.tolist() == expected


def test_a_source_that_comes_later_has_its_own_weights_from_then_on(tmp_path: Path) -> None:
    write(tmp_path, "a", [[batch(0, [0, 1])]], loader={"mixture": {**MIXTURE, "between": "constant"}})
    later = {"names": ["y", "z"], "unit": "samples", "at": [0], "shares": [[0.5, 0.5]], "between": "constant"}
    steps = [batch(1, None, sources=((0, 1), (1, 3)))]
    write(tmp_path, "b", [steps], loader={"mixture": later}, resumed=("a", 0, 1))
    found = counted(read_ledger(tmp_path))
    assert (found.names, found.samples) == (("x", "y", "z"), [2, 1, 3])
    assert found.asked_in_all.tolist() == [0.375, 0.375, 0.25]


# Padding and waiting


def test_padding_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_time, "_FEWEST_STEPS", 1)
    ranks = [
        [batch(0, [0], tokens=6, padded=8), batch(1, [1], tokens=4, padded=4)],
        [batch(0, [2], tokens=6, padded=8), batch(1, [3], tokens=1, padded=4)],
    ]
    write(tmp_path, "a", ranks)
    found = padding_of(read_ledger(tmp_path))
    assert found is not None
    assert (found.tokens, found.padded) == (17, 24)
    assert found.share.tolist() == [0.25, 0.375]
    numbers = in_numbers(read_ledger(tmp_path))
    assert numbers == {
        "mixture": {},
        "padding": {"": {"tokens": 17, "padded": 24, "share": 1 - 17 / 24}},
        "waiting": [],
    }


def test_ranks_wait_for_their_batches_and_for_the_last_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_time, "_FEWEST_STEPS", 1)
    # The second rank's clock was read half a second later. The last step is in one file only.
    ranks = [
        [batch(0, [0], at=1.0, waited=5.0), batch(1, [1], at=2.0, waited=0.25), batch(2, [2], at=3.0), batch(3, [3])],
        [batch(0, [4], at=0.75), batch(1, [5], at=1.5, waited=0.5), batch(2, [6], at=2.5)],
    ]
    write(tmp_path, "a", ranks, clocks=(100.0, 100.5))
    found = waiting_of(read_ledger(tmp_path))
    assert found is not None
    one, other = found.ranks
    assert one == (0, 0, "host 0", 5.0, 2.0, 0.25, 0.25, 3, 2, 0)
    assert other == (0, 1, "host 1", 0.0, 1.75, 0.5, 0.0, 3, 3, 0)
    assert found.num_hosts == 2
    assert found.steps.tolist() == [1, 2]
    assert found.own.tolist() == pytest.approx([0.75 / 1.75, 0])
    assert found.others.tolist() == pytest.approx([0.25 / 1.75, 0])


def test_no_rank_waits_longer_for_others_than_its_steps_take(tmp_path: Path) -> None:
    # As of clocks that differ by an hour.
    ranks = [
        [batch(n, [n], at=float(n), waited=0.25) for n in range(5)],
        [batch(n, [n], at=float(n)) for n in range(5)],
    ]
    write(tmp_path, "a", ranks, clocks=(0.0, 3600.0))
    found = waiting_of(read_ledger(tmp_path))
    assert found is not None
    assert [(one.own, one.others, one.beyond) for one in found.ranks] == [(1.0, 3.0, 4), (0.0, 0.0, 0)]
    assert (found.own + found.others <= 1).all()


def test_very_many_steps_become_few_points(tmp_path: Path) -> None:
    steps = [batch(number, [number], tokens=1, padded=1 + number % 2, at=float(number)) for number in range(5000)]
    write(tmp_path, "a", [steps])
    found = padding_of(read_ledger(tmp_path))
    assert found is not None
    assert 50 < len(found.steps) < 100
    assert found.share == pytest.approx(1 / 3, abs=0.01)
    assert found.share_in_all == pytest.approx(1 / 3)
