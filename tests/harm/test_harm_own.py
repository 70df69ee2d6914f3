"""The rule on samplers, loaders and iterables as users write them, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from harm.table import ENTRIES
from harm.verdicts import assert_lawful, judge_alone


@pytest.mark.parametrize("name", [name for name in ENTRIES if name.startswith("own: ")])
def test_the_rule_holds(tmp_path: Path, name: str) -> None:
    assert_lawful(name, judge_alone(name, tmp_path))
