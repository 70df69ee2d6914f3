"""Exceptions are of the kinds that users expect, and say all differences at once."""

from __future__ import annotations

import inspect
import pickle

import pytest

from lightning_stateful import errors
from lightning_stateful.errors import Difference, StatefulError, StatefulWarning, StateMismatchError

SEED = Difference(path="train.seed", saved=1, present=2, remedy="Pass the saved seed.")
LENGTH = Difference(path="train.dataset.length", saved=10, present="11", remedy="Train on the old data.")
EXCEPTIONS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigurationError", ValueError),
        ("UnsupportedLoaderError", errors.ConfigurationError),
        ("RankMismatchError", RuntimeError),
        ("DamagedStateError", ValueError),
        ("StateVersionError", ValueError),
        ("PositionError", ValueError),
        ("StateMismatchError", ValueError),
        ("StatefulWarning", UserWarning),
    ],
)
def test_an_exception_is_also_the_kind_that_users_expect(name: str, builtin: type) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_one_root_catches_every_exception() -> None:
    assert all(issubclass(kind, (StatefulError, StatefulWarning)) for kind in EXCEPTIONS)


def test_a_mismatch_counts_its_differences_and_has_each_on_a_line_with_both_values_and_a_remedy() -> None:
    error = StateMismatchError([SEED, LENGTH], where="The state of 'train'")
    first, *lines = str(error).splitlines()

    assert first.startswith("The state of 'train' does not fit the present configuration (2 differences)")
    assert first.endswith("nothing was loaded:")
    assert lines[0] == "  - train.seed: saved 1, now 2. Pass the saved seed."
    assert "saved 10, now '11'" in lines[1]
    assert "(1 difference)" in str(StateMismatchError([SEED]))


def test_a_mismatch_keeps_its_differences_and_survives_pickling() -> None:
    found = [SEED]
    error = StateMismatchError(found, where="w")
    found.append(LENGTH)
    again = pickle.loads(pickle.dumps(error))

    assert (str(again), again.differences) == (str(error), [SEED])
