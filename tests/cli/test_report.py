"""``lightning-stateful report`` says what a ledger shows, and its exit code whether something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_stateful.cli import main
from lightning_stateful.ledger import Batch, FileHeader, LedgerFile, Part
from lightning_stateful.ledger.files import as_items


def write(folder: Path, *batches: list[int]) -> None:
    """A start of one rank, over a dataset of six samples."""
    file = LedgerFile(folder / "monday" / "rank-00000.ledger", FileHeader("monday", 0, 1, {"": {"length": 6}}))
    for number, batch in enumerate(batches):
        file.add(Batch(0, number, (Part("", 0, *as_items(batch)),)))
    file.add(Batch(0, len(batches), ()))
    file.close()


def test_it_says_that_all_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [0, 4, 2], [1, 3, 5])
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "epoch 0, over: 6 items, 6 of 6 distinct\nNothing was trained on twice" in said


def test_it_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [0, 4, 2], [1, 5])
    assert main(["report", str(tmp_path)]) == 1
    assert "never: of epoch 0, 1 item of 6 never came: 3." in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["mixture"], said["padding"], said["waiting"]) == ({}, {}, [])
    [finding] = said["findings"]
    assert (finding["kind"], finding["items"], finding["starts"]) == ("never", [3], ["monday"])


@pytest.mark.parametrize("content", [b"nonsense", b'{"version": 9}\n'])
def test_what_it_cannot_read_it_names_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no files of a ledger" in capsys.readouterr().err
    write(tmp_path, [0])
    assert main(["report", str(tmp_path), "--start", "tuesday"]) == 2
    assert "has no start 'tuesday', but monday" in capsys.readouterr().err
    next(tmp_path.glob("*/*")).write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert not said.out
