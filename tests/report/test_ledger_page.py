"""A page of a ledger says what the ledger does, and shows in a picture what came when."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lightning_stateful.ledger import Batch, FileHeader, LedgerFile, Part, read_ledger
from lightning_stateful.ledger.files import as_items
from lightning_stateful.ledger.over_time import Coverage, Shares
from lightning_stateful.report.ledger_page import write_page
from lightning_stateful.report.ledger_plots import chosen_dots, grouped


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
    text = (folder / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    # It needs no network.
    assert not re.search(r"(src|href)=.https?:|url\(.?http|@import", text)
    # What pictures refer to has a name of its own in each.
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names))
    return text, " ".join(page.words)


def test_a_run_without_a_fault(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [[0, 1], [2, 3], [4, 5]])
    write(tmp_path, "b", [[4, 5], [6, 7]], 2, 2)
    text, words = page_of(tmp_path)
    assert "Nothing was trained on twice, and nothing was left out." in words
    assert "<a>" in words
    # For wide screens and narrow ones, in the colour of the page's text.
    assert text.count("<svg") == 2
    assert "currentColor" in text
    assert "#010203" not in text
    assert "Which samples came when" in words
    assert "start 2" in words
    assert "trained on again" not in words
    assert "Padding is not known" in words
    assert "Not known: too few batches" in words


def test_a_run_that_trained_twice_on_something(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [[0, 1], [2, 3], [4, 5]])
    write(tmp_path, "b", [[2, 3], [4, 5], [6, 7]], 2, 2)
    _, words = page_of(tmp_path)
    assert "An uninterrupted run would not have done this:" in words
    assert "2 items that start <a> had trained on came again in start b: 2, 3." in words
    assert "lost with its weights" in words
    assert "trained on again in the same epoch" in words


def test_mixture_padding_and_waiting_stand_in_words_too(tmp_path: Path) -> None:
    mixture = {"names": ["web", "<books>"], "unit": "batches", "at": [0], "shares": [[0.5, 0.5]], "between": "constant"}
    for rank in range(2):
        loaders = {"a.b": {"length": None, "mixture": mixture}}
        header = FileHeader("one", rank, 2, loaders, host=f"node{rank}")
        file = LedgerFile(tmp_path / "one" / f"rank-{rank:05}.ledger", header)
        for number in range(60):
            part = Part("a.b", 0, None, 0, 0, ((0, 3),) if number % 4 else ((1, 5),), 6, 8)
            file.add(Batch(0, number, (part,), number * 0.5 + rank * 0.05, 0.1))
        file.close()
    text, words = page_of(tmp_path)
    assert text.count("<svg") == 6
    assert "Mixture of loader 'a.b', and what was asked for" in words
    shown = " ".join(words.split())
    assert "web 270 75.00% 50.00% <books> 150 25.00% 50.00%" in shown
    assert "25.00% of all 960 tokens in batches are padding" in words
    assert "Padding is not known" not in words
    assert "1 0 node0 0.10 29.5 5.90 20.0% 2.95 10.0% 0% 1 1 node1 0.10 29.5 5.90 20.0% 0.00 0.0% 100%" in shown
    assert "Most often the last was rank 1 on node1: in 100% of its steps." in shown
    assert "2 hosts, whose clocks are compared as they are" in words


def test_of_very_many_samples_those_that_came_again_are_not_lost_among_the_others() -> None:
    number = 300_000
    is_again = np.zeros(number, dtype=bool)
    is_again[[17, 123_457]] = True
    zeros = np.zeros(number, dtype=np.int64)
    found = Coverage(np.arange(number), zeros, zeros, is_again, is_again, [0], [])
    chosen = chosen_dots(found)
    assert len(chosen) < 21_000
    assert {17, 123_457} <= set(chosen.tolist())
    assert np.diff(chosen).max() < 40


def test_of_many_sources_the_largest_are_drawn_and_the_others_together() -> None:
    in_all = np.array([0.02, 0.3, 0.05, 0.1, 0.01, 0.2, 0.12, 0.08, 0.12])
    shares = np.stack([in_all, in_all[::-1]])
    found = Shares(tuple("abcdefghi"), "samples", np.arange(2.0), shares, 2 * shares, [1] * 9, in_all, in_all)
    names, got, asked = grouped(found)
    assert names == ["b", "d", "f", "g", "h", "i", "3 others"]
    assert got.sum(axis=1) == pytest.approx([1, 1])
    assert got[0] == pytest.approx([0.3, 0.1, 0.2, 0.12, 0.08, 0.12, 0.08])
    assert asked == pytest.approx(2 * got)


def test_keys_that_are_no_numbers_have_no_picture(tmp_path: Path) -> None:
    write(tmp_path, "<a>", [["x", "y"]])
    text, words = page_of(tmp_path)
    assert "<svg" not in text
    assert "2" in words.split()


def test_it_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "<a>", [[0, 1]])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="need matplotlib; install it"):
        write_page(read_ledger(tmp_path), tmp_path / "page.html")
