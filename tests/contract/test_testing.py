"""The contract that is shipped needs neither pytest nor lightning."""

from __future__ import annotations

from lightning_stateful import testing


def test_every_law_is_a_public_function() -> None:
    names = [f"check_{law.replace(' ', '_').replace('-', '_')}" for law in testing.LAWS]

    assert [getattr(testing, name) for name in names] == list(testing.LAWS.values())
    assert set(names) < set(testing.__all__)


def test_every_law_has_a_test_in_the_contract() -> None:
    tests = {name for name in dir(testing.ResumeContract) if name.startswith("test_")}

    assert tests == {f"test_{law.replace(' ', '_').replace('-', '_')}" for law in testing.LAWS}
