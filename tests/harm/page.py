"""The table in docs/others.md: what each entry did on 1, 2 and 3 ranks."""

from __future__ import annotations

import logging
import re
import tempfile
from pathlib import Path

from harm.laws import MEANINGS, is_harm
from harm.table import ENTRIES, Entry
from harm.verdicts import Outcome, Verdict, judge_alone, judge_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "others.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
RANKS = (1, 2, 3)
_WORDS = {
    "refused": "refused at the start",
    "exact": "exact",
    "warned": "inexact, with a warning",
    "silent": "**inexact, without a word**",
    "aborted": "**ends in an error**",
    "hung": "**hangs**",
    "other data": "**other data**",
    "": "",
}


def names_in(page: str) -> list[str]:
    """The entries that the table of a page has."""
    table = page[page.index(BEGIN) : page.index(END)]
    return re.findall(r"^\| ([^|]+: [^|]+?) \|", table, flags=re.M)


def table_of(verdicts: dict[int, dict[str, Verdict]]) -> str:
    """The table in Markdown, of what each entry did on each number of ranks."""
    lines = [
        "| what | an uninterrupted run | a resume on the same ranks | on one rank of two |",
        "|---|---|---|---|",
    ]
    for name, entry in ENTRIES.items():
        found = {ranks: of[name] for ranks, of in verdicts.items()}
        run = _cell({ranks: _run(entry, ranks, verdict.run) for ranks, verdict in found.items()})
        run += "; ranks together" if entry.deals == "nobody" and found[2].run[0] == "same" else ""
        same = _cell({ranks: _resume(verdict.same) for ranks, verdict in found.items()})
        lines.append(f"| {name} | {run} | {same} | {_resume(found[2].other)} |")
    return "\n".join(lines)


def _run(entry: Entry, ranks: int, outcome: Outcome) -> str:
    if outcome[0] != "same":
        return _WORDS[outcome[0]]
    return MEANINGS[entry.compared(ranks)]


def _resume(outcome: Outcome) -> str:
    return _WORDS[outcome[0]]


def _cell(words: dict[int, str]) -> str:
    """The words for each number of ranks, once where they are the same on all."""
    by_word: dict[str, list[int]] = {}
    for ranks, word in words.items():
        by_word.setdefault(word or "-", []).append(ranks)
    if len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{word} ({', '.join(map(str, ranks))})" for word, ranks in by_word.items())


def write() -> None:
    """Try all, write the page, and print what is against the rule."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    verdicts: dict[int, dict[str, Verdict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            if ranks == 1:
                verdicts[1] = {name: judge_alone(name, Path(folder)) for name in ENTRIES}
            else:
                verdicts[ranks] = judge_on_ranks(ranks, list(ENTRIES), Path(folder) / str(ranks))
    page = PAGE.read_text()
    head, tail = page[: page.index(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{head}{BEGIN}\n{table_of(verdicts)}\n{tail}")
    for ranks, of in verdicts.items():
        for name, verdict in of.items():
            for fault in verdict.faults(ENTRIES[name]):
                print(f"{ranks} ranks, {name}: {fault}")
    harm = [name for of in verdicts.values() for name, found in of.items() if is_harm(found.run[0])]
    print(f"{len(ENTRIES)} entries; {len(harm)} uninterrupted runs come to harm")
