"""Where a sampler stands, as a position carries it: there and back, and damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_stateful.errors import DamagedStateError
from lightning_stateful.samplers.place import Place

PLACES = [
    Place(),
    Place(slot=16, state=({"a": [1, None]},), pending=(3, [4, 5]), mark=(15, "ab")),
    Place(state=(None,)),
    Place(mark=(0, "")),
]
GOOD: dict[str, Any] = {"slot": 3, "state": [1], "pending": [2], "mark": [1, "x"]}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_place_comes_back_from_text_and_from_json(place: Place) -> None:
    assert Place.from_text(place.to_text()) == place
    assert Place.from_dict(json.loads(json.dumps(place.to_dict()))) == place


def test_the_beginning_is_no_text() -> None:
    assert Place().to_text() == ""
    assert Place.from_text("") == Place()


def test_a_state_of_nothing_is_not_no_state() -> None:
    assert Place.from_text(Place(state=(None,)).to_text()).state == (None,)


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_found(key: str) -> None:
    with pytest.raises(DamagedStateError, match="holds slot, state, pending, mark, got"):
        Place.from_dict({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slot", "3"),
        ("slot", True),
        ("slot", 3.0),
        ("slot", -1),
        ("state", None),
        ("state", {}),
        ("state", [1, 2]),
        ("pending", 3),
        ("mark", [1]),
        ("mark", ["x", 1]),
        ("mark", [1, "x", 2]),
        ("mark", [True, "x"]),
    ],
)
def test_a_value_that_is_never_written_is_found(key: str, value: Any) -> None:
    with pytest.raises(DamagedStateError, match="a sampler's place"):
        Place.from_dict({**GOOD, key: value})


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_dict_is_found(data: Any) -> None:
    with pytest.raises(DamagedStateError):
        Place.from_dict(data)
