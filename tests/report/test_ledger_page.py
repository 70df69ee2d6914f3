"""A page of a ledger says what the ledger does, and shows in a picture what came when."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_stateful.ledger import Batch, FileHeader, LedgerFile, Part, read_ledger
from lightning_stateful.ledger.files import as_items
from lightning_stateful.report.ledger_page import write_page


def write(folder: Path, name: str, batches: list[list[object]], first: int = 0, resumed: int | None = None) -> None:
    """A start of one rank over eight samples, perhaps resumed from a batch of the start ``<a>``."""
    came_from = None if resumed is None else {"start": "<a>", "epoch": 0, "batch": resumed}
    header = FileHeader(name, 0, 1, {"": {"length": 8}}, (0, first), came_from)
    file = LedgerFile(folder / name / "rank-00000.ledger", header)
    for number, batch in enumerate(batches, first):
        file.add(Batch(0, number, (Part("", 0, *as_items(batch)),)))
    file.close()


class Page(HTMLParser):
    """Notes the words of a page, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(folder: Path) -> tuple[str, str]:
    write_page(read_ledger(folder), folder / "page.html")
    text = (folder / "page.html").read_text()
    page = Page(text)
    assert not page.open
    # It needs no network.
    assert not re.search(r"(src|href)=.https?:", text.replace('xlink:href="#', ""))
    return text, " ".join(page.words)


def test_a_run_without_a_fault(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [[0, 1], [2, 3], [4, 5]])
    write(tmp_path, "b", [[4, 5], [6, 7]], 2, 2)
    text, words = page_of(tmp_path)
    assert "Nothing was trained on twice, and nothing was left out." in words
    assert "<a>" in words
    assert "<svg" in text
    assert "Which samples came when" in words


def test_a_run_that_trained_twice_on_something(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [[0, 1], [2, 3], [4, 5]])
    write(tmp_path, "b", [[2, 3], [4, 5], [6, 7]], 2, 2)
    _, words = page_of(tmp_path)
    assert "An uninterrupted run would not have done this:" in words
    assert "2 items that start <a> had trained on came again in start b: 2, 3." in words


def test_keys_that_are_no_numbers_have_no_picture(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [["x", "y"]])
    text, words = page_of(tmp_path)
    assert "<svg" not in text
    assert "2" in words.split()


def test_it_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "<a>", [[0, 1]])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="needs matplotlib; install it"):
        write_page(read_ledger(tmp_path), tmp_path / "page.html")
