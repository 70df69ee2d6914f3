"""The contract that is shipped needs neither pytest nor lightning."""

from __future__ import annotations

import subprocess
import sys

from lightning_stateful import testing


def test_every_law_is_a_public_function() -> None:
    names = [f"check_{law.replace(' ', '_').replace('-', '_')}" for law in testing.LAWS]

    assert [getattr(testing, name) for name in names] == list(testing.LAWS.values())
    assert set(names) < set(testing.__all__)


def test_every_law_has_a_test_in_the_contract() -> None:
    tests = {name for name in dir(testing.ResumeContract) if name.startswith("test_")}

    assert tests == {f"test_{law.replace(' ', '_').replace('-', '_')}" for law in testing.LAWS}


def test_importing_it_imports_neither_pytest_nor_lightning() -> None:
    program = "import sys, lightning_stateful.testing; print(sorted({'pytest', 'lightning'} & set(sys.modules)))"

    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
