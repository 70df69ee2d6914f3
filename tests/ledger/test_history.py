"""A ledger of several starts tells what was trained on twice, never, or in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lightning_stateful.errors import DamagedStateError
from lightning_stateful.ledger import Batch, FileHeader, Finding, LedgerFile, Part, read_ledger
from lightning_stateful.ledger.files import as_items

LENGTH = 12


class Run:
    """Writes what starts train on: batches of two in order, over as many ranks as a start has."""

    def __init__(self, folder: Path, length: int | None = LENGTH) -> None:
        self.folder, self.length = folder, length
        self.once, self.data = True, "data"

    def start(
        self,
        name: str,
        batches: Iterable[Any],
        *,
        begins: tuple[int, int] = (0, 0),
        resumed: tuple[str, int, int] | None = None,
        ranks: int = 1,
        over: Iterable[int] = (),
    ) -> None:
        """Write a start: ``(epoch, batch, items of each rank)``, and the end of epochs after their last batch."""
        batches, over = list(batches), set(over)
        came_from = None if resumed is None else dict(zip(("start", "epoch", "batch"), resumed, strict=True))
        for rank in range(ranks):
            loader = {"length": self.length, "once": self.once, "data": self.data}
            header = FileHeader(name, rank, ranks, {"": loader}, begins, came_from)
            file = LedgerFile(self.folder / name / f"rank-{rank:05}.ledger", header)
            for at, (epoch, number, *items) in enumerate(batches):
                file.add(Batch(epoch, number, (Part("", epoch, *as_items(items[rank])),)))
                is_last = at + 1 == len(batches) or batches[at + 1][0] != epoch
                if is_last and epoch in over:
                    file.add(Batch(epoch, number + 1, ()))
            file.close()

    def findings(self) -> list[Finding]:
        return read_ledger(self.folder).findings()


def in_order(first: int = 0, last: int = LENGTH // 2, epoch: int = 0) -> list[Any]:
    return [(epoch, number, [2 * number, 2 * number + 1]) for number in range(first, last)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_of_three_starts_is_stitched(run: Run) -> None:
    # The first goes on for two batches behind the checkpoint, and a start from it in vain is no part of the last.
    run.start("1", in_order(0, 5))
    run.start("2", in_order(3, 4), begins=(0, 3), resumed=("1", 0, 3))
    run.start("3", in_order(3) + in_order(0, 2, 1), begins=(0, 3), resumed=("1", 0, 3), over=[0])
    found = read_ledger(run.folder)
    assert found.findings() == []
    assert [start.header.start for start in found.starts] == ["1", "3"]
    assert [(start.num_kept, start.num_lost) for start in found.starts] == [(3, 2), (5, 0)]
    assert found.items(0) == Counter(range(LENGTH))
    assert found.items(1) == Counter(range(4))
    assert [(row["items"], row["distinct"], row["over"]) for row in found.epochs()] == [(12, 12, True), (4, 4, False)]
    assert "Nothing was trained on twice, and nothing was left out." in str(found)
    assert found.to_dict()["findings"] == []
    assert [start.header.start for start in read_ledger(run.folder, start="2").starts] == ["1", "2"]


def test_items_of_two_starts_in_an_epoch_were_trained_on_twice(run: Run) -> None:
    run.start("1", in_order(0, 4))
    run.start("2", [*in_order(0, 4), (0, 4, [8, 9])], resumed=("1", 0, 3))
    twice = [finding for finding in run.findings() if finding.kind == "twice"]
    assert [(one.starts, one.number, one.items) for one in twice] == [(("1", "2"), 6, (0, 1, 2, 3, 4))]
    assert "6 items that start 1 had trained on came again in start 2: 0, 1, 2, 3, 4, ..." in str(
        read_ledger(run.folder)
    )


def test_items_of_an_epoch_that_is_over_never_came(run: Run) -> None:
    run.start("1", in_order(0, 2))
    run.start("2", in_order(3), begins=(0, 3), resumed=("1", 0, 2), over=[0])
    [never] = run.findings()
    assert (never.kind, never.epoch, never.items, never.starts) == ("never", 0, (4, 5), ("1", "2"))


def test_nothing_is_missed_of_an_epoch_that_goes_on_or_began_before_the_ledger(run: Run, tmp_path: Path) -> None:
    run.start("1", in_order(0, 3))
    assert run.findings() == []
    later = Run(tmp_path / "later")
    later.start("1", in_order(3) + in_order(0, 6, 1), begins=(0, 3), over=[0, 1])
    assert later.findings() == []


def test_batches_before_a_checkpoint_that_no_file_has_are_missing(run: Run) -> None:
    run.start("1", in_order(0, 2))
    run.start("2", in_order(4), begins=(0, 4), resumed=("1", 0, 4), over=[0])
    assert [(one.kind, one.items) for one in run.findings()] == [("missing", ((0, 2), (0, 4))), ("never", (4, 5, 6, 7))]


def test_a_rank_without_a_file_is_missing(run: Run) -> None:
    run.start("1", [(0, 0, [0], [1]), (0, 1, [2], [3])], ranks=2)
    run.start("2", [(0, 2, [4], [5])], begins=(0, 2), resumed=("1", 0, 2), ranks=2)
    next((run.folder / "1").glob("*1.ledger")).unlink()
    assert [(one.kind, one.starts) for one in run.findings()] == [("missing", ("1",))]


def test_batches_that_do_not_follow_one_another_are_named(run: Run) -> None:
    run.start("1", [in_order()[number] for number in (0, 1, 3, 2)])
    assert [(one.kind, one.items) for one in run.findings()] == [
        ("order", ((0, 2), (0, 3))),
        ("order", ((0, 4), (0, 2))),
    ]


def test_other_ranks_take_over_and_may_repeat_items_in_the_last_step(run: Run) -> None:
    run.start("1", [(0, 0, [0, 1], [2, 3]), (0, 1, [4, 5], [6, 7])], ranks=2)
    # Three ranks have a step of three for the last four items, and one of the first items fills up the last.
    rest = [(0, 2, [8], [9], [10]), (0, 3, [11], [0], [1])]
    run.start("2", rest, begins=(0, 2), resumed=("1", 0, 2), ranks=3, over=[0])
    assert run.findings() == []


TWICE: list[Any] = [(0, 0, [1, 1]), (0, 1, [5, 2])]
ONCE: list[Any] = [(0, 0, [1, 4]), (0, 1, [5, 2])]


@pytest.mark.parametrize(
    ("first", "changed", "why"),
    [
        (TWICE, {}, "the loader itself gives items of an epoch more than once"),
        (ONCE, {"once": False}, "an epoch of this stream may begin in one pass"),
        (ONCE, {"data": "others"}, "between starts the data or their order were changed"),
    ],
)
def test_items_that_are_not_the_same_twice_prove_nothing_and_that_is_said(
    run: Run, first: list[Any], changed: dict[str, Any], why: str
) -> None:
    run.length = None
    run.start("1", first)
    vars(run).update(changed)
    run.start("2", [(0, 2, [1, 2]), (0, 3, [7, 8])], begins=(0, 2), resumed=("1", 0, 2), over=[0])
    found = read_ledger(run.folder)
    assert found.findings() == []
    assert [why in note for note in found.notes()] == [True]
    assert "Nothing was trained on twice" not in str(found)


def test_batches_that_were_only_counted_say_nothing(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "1" / "rank-00000.ledger", FileHeader("1", 0, 1, {"": {"length": None}}))
    file.add(Batch(0, 0, (Part("", 0, None, 0),)))
    file.close()
    assert str(read_ledger(tmp_path)).endswith("is not known: batches were only counted; pass ledger_key.")


def test_a_start_that_is_gone_is_missing(run: Run) -> None:
    run.start("1", in_order(0, 3))
    run.start("2", in_order(3), begins=(0, 3), resumed=("1", 0, 3), over=[0])
    for file in run.folder.glob("1/*"):
        file.unlink()
    assert [(one.kind, one.starts) for one in run.findings()] == [("missing", ("1", "2"))]


def test_a_rank_of_the_last_start_that_has_no_file_is_missing(run: Run) -> None:
    run.start("1", [(0, 0, [0], [1]), (0, 1, [2], [3])], ranks=2)
    next(run.folder.glob("1/*1.ledger")).unlink()
    assert [(one.kind, one.items) for one in run.findings()] == [("missing", (1,))]


def test_an_epoch_that_breaks_off_before_a_checkpoint_at_its_end_is_missed(run: Run) -> None:
    run.start("1", in_order(0, 4))
    run.start("2", in_order(0, 2, 1), begins=(1, 0), resumed=("1", 1, 0))
    assert next((one.kind, one.items) for one in run.findings()) == ("missing", ((0, 4), (1, 0)))


def test_what_came_before_the_first_ledger_and_starts_that_led_nowhere_are_named(run: Run) -> None:
    run.start("1", in_order(3), begins=(0, 3), over=[0])
    run.start("2", in_order(0, 2))
    run.start("3", in_order(0, 1, 1), begins=(1, 0), resumed=("1", 1, 0))
    before, others = read_ledger(run.folder).notes()
    assert before.startswith("What was trained on before batch 3 of epoch 0 is not known")
    assert others.startswith("1 other start of this folder did not lead")


def test_a_file_without_a_whole_header_is_named_and_the_others_are_read(run: Run) -> None:
    run.start("1", in_order(0, 3))
    (run.folder / "2").mkdir()
    (run.folder / "2" / "rank-00000.ledger").write_bytes(b'{"vers')
    assert [(one.kind, one.starts) for one in run.findings()] == [("damaged", ("2",))]
    assert [start.header.start for start in read_ledger(run.folder).starts] == ["1"]


def test_the_end_of_a_file_matters_where_nothing_goes_on_before_it(run: Run) -> None:
    run.start("1", in_order(0, 3))
    file = next(run.folder.glob("1/*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert [(one.kind, one.starts) for one in run.findings()] == [("damaged", ("1",))]
    run.start("2", in_order(1, 2), begins=(0, 1), resumed=("1", 0, 1))
    assert run.findings() == []


def test_a_folder_without_a_ledger_is_refused(run: Run) -> None:
    with pytest.raises(FileNotFoundError, match="has no files of a ledger"):
        read_ledger(run.folder)
    run.start("1", in_order(0, 1))
    with pytest.raises(FileNotFoundError, match="has no start '2', but 1"):
        read_ledger(run.folder, start="2")


def test_files_of_one_start_are_of_one_number_of_ranks(run: Run, tmp_path: Path) -> None:
    run.start("1", in_order(0, 1))
    other = Run(tmp_path / "other")
    other.start("1", [(0, 0, [0], [1])], ranks=2)
    next((other.folder / "1").glob("*1.ledger")).rename(run.folder / "1" / "rank-00001.ledger")
    with pytest.raises(DamagedStateError, match="different numbers of ranks"):
        read_ledger(run.folder)
