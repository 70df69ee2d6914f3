import dataclasses
import inspect
import pickle
import re

import pytest

from lightning_stateful import errors
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    PositionError,
    RankMismatchError,
    StatefulError,
    StatefulWarning,
    StateMismatchError,
    StateVersionError,
    UnsupportedLoaderError,
)

SEED = Difference(path="train.seed", saved=1, present=2, remedy="Pass the saved seed.")
LENGTH = Difference(path="train.dataset.length", saved=10, present="11", remedy="Train on the old data.")
EXCEPTIONS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", [kind for kind in EXCEPTIONS if kind is not StatefulWarning])
def test_one_root_catches_every_exception(kind):
    assert issubclass(kind, StatefulError)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigurationError, ValueError),
        (UnsupportedLoaderError, ConfigurationError),
        (RankMismatchError, RuntimeError),
        (DamagedStateError, ValueError),
        (StateVersionError, ValueError),
        (PositionError, ValueError),
        (StateMismatchError, ValueError),
        (StatefulWarning, UserWarning),
    ],
)
def test_an_exception_is_also_the_kind_that_users_expect(kind, builtin):
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_the_tree_in_the_docstring_draws_every_exception(kind):
    assert re.search(rf"\b{kind.__name__}\b", errors.__doc__)


def test_the_tree_in_the_docstring_draws_only_what_exists():
    drawn = set(re.findall(r"\b\w+(?:Error|Warning)\b", errors.__doc__))
    assert drawn - {kind.__name__ for kind in EXCEPTIONS} == {"ValueError", "RuntimeError", "UserWarning"}


def parents_drawn():
    """The name above each name in the docstring's tree, told by indentation."""
    parents, above = {}, []
    for line in errors.__doc__.splitlines():
        if found := re.match(r"([\s│├└─]+)(\w+(?:Error|Warning))\b", line):
            above = [(indent, name) for indent, name in above if indent < len(found[1])]
            parents[found[2]] = above[-1][1] if above else None
            above.append((len(found[1]), found[2]))
    return parents


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_the_tree_in_the_docstring_draws_every_exception_below_its_parent(kind):
    parents = [parent.__name__ for parent in kind.__bases__ if parent in EXCEPTIONS] or [None]
    assert parents_drawn()[kind.__name__] == parents[0]


def test_a_difference_reads_as_path_both_values_and_remedy():
    assert str(SEED) == "train.seed: saved 1, now 2. Pass the saved seed."


def test_a_difference_shows_text_apart_from_numbers():
    assert "saved 10, now '11'" in str(LENGTH)


def test_a_difference_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SEED.saved = 2


def test_a_mismatch_lists_every_difference_on_a_line_of_its_own():
    error = StateMismatchError([SEED, LENGTH])
    assert str(error).splitlines()[1:] == [f"  - {SEED}", f"  - {LENGTH}"]


def test_a_mismatch_keeps_its_differences_as_data():
    assert StateMismatchError([SEED, LENGTH]).differences == [SEED, LENGTH]


@pytest.mark.parametrize(("found", "said"), [([SEED], "(1 difference)"), ([SEED, LENGTH], "(2 differences)")])
def test_a_mismatch_counts_its_differences(found, said):
    assert said in str(StateMismatchError(found))


def test_a_mismatch_says_where_and_that_nothing_was_loaded():
    first = str(StateMismatchError([SEED], where="The state of 'train'")).splitlines()[0]
    assert first.startswith("The state of 'train' does not fit the present configuration")
    assert first.endswith("nothing was loaded:")


def test_a_mismatch_does_not_hold_on_to_the_list_it_was_given():
    found = [SEED]
    error = StateMismatchError(found)
    found.append(LENGTH)
    assert error.differences == [SEED]


def test_a_difference_survives_pickling():
    assert pickle.loads(pickle.dumps(LENGTH)) == LENGTH


def test_a_mismatch_survives_pickling() -> None:
    error = StateMismatchError([Difference(path="seed", saved=1, present=2, remedy="r")], where="w")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.differences == error.differences
