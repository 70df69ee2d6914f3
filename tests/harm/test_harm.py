"""The rule on samplers and loaders of torch and of other packages, in one process.

It says: no harm to an uninterrupted run, and no resume that is inexact in silence. A failure that begins with HARM
breaks the rule; one that begins with LESS keeps it, but refuses or warns of what the table says is to work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harm.laws import is_harm, resumed, uninterrupted
from harm.page import PAGE, names_in
from harm.runs import Run, Trial
from harm.table import ENTRIES, Entry, of
from harm.verdicts import assert_lawful, judge_alone


@pytest.mark.parametrize("name", [name for name in ENTRIES if not name.startswith("own: ")])
def test_the_rule_holds(tmp_path: Path, name: str) -> None:
    assert_lawful(name, judge_alone(name, tmp_path))


def test_the_rule_tells_what_is_harm() -> None:
    entry, steps = Entry(of(list), "multiset"), [(epoch, [2 * epoch, 1]) for epoch in range(3)]
    plain, broken = Run(steps), Run(steps[:1], "KeyError: theirs")
    again = Run([(0, [0, 0]), *steps[1:]])
    runs = {"same": plain, "other data": again, "aborted": broken, "refused": Run([], "StateError: by name")}
    for outcome, own in runs.items():
        assert uninterrupted(entry, [Trial(plain, own)], None)[0] == outcome
    rest = {
        "exact": Run(steps[1:]),
        "silent": again,
        "warned": Run(again.trained, said=["not exact"]),
        "aborted": broken,
    }
    for outcome, after in rest.items():
        assert resumed([Run(steps, saved=1)], [after])[0] == outcome
    assert [outcome for outcome in {**runs, **rest} if is_harm(outcome)] == ["other data", "aborted", "silent"]


def test_the_page_has_these_entries() -> None:
    assert names_in(PAGE.read_text()) == list(ENTRIES)
