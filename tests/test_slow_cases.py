"""The list of cases that ``make test`` leaves out names tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LISTED = [line for line in (TESTS / "slow_cases.txt").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("file", sorted({line.partition("::")[0] for line in LISTED}))
def test_listed_cases_are_of_tests_that_have_others(file: str) -> None:
    code = (TESTS.parent / file).read_text()
    for line in LISTED:
        name, has_cases, _ = line.rpartition("::")[2].partition("[") if line.startswith(f"{file}::") else ("", "", "")
        assert not name or (has_cases and f"def {name}(" in code), line
