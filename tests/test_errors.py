"""Exceptions are of the kinds that users expect, and say all differences at once."""

from __future__ import annotations

import inspect
import pickle
import re

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


def parents_drawn() -> dict[str, str | None]:
    """The name above each name in the docstring's tree, told by indentation."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([\s│├└─]+)(\w+(?:Error|Warning))\b", line):
            above = [(indent, name) for indent, name in above if indent < len(found[1])]
            parents[found[2]] = above[-1][1] if above else None
            above.append((len(found[1]), found[2]))
    return parents


def test_one_root_catches_every_exception_and_the_docstring_draws_them_below_their_parents() -> None:
    parents = {}
    for kind in EXCEPTIONS:
        assert issubclass(kind, (StatefulError, StatefulWarning))
        parents[kind.__name__] = next((base.__name__ for base in kind.__bases__ if base in EXCEPTIONS), None)

    assert parents_drawn() == parents


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
