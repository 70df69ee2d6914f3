"""Places that come out of their texts as they went in, and large states that are said once."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.streams import place_text
from lightning_stateful.streams.place_text import PlaceTexts, as_place, heard, text_of_list

LARGE = list(range(10**6, 10**6 + 1000))


def leaf(item: int, state: Any) -> dict[str, Any]:
    return {"shard": 1, "item": item, "since": 2, "state": state, "skipped_shards": 0}


def lane(**at: Any) -> dict[str, Any]:
    """The place of a lane whose sources stand at these places."""
    of = {name: {"round": 0, "portion": 0, "opened": 1, "skipped": [0, 0, 0], "place": at[name]} for name in at}
    return {"batches": 4, "over": False, "turn": 4, "ended": [], "again": [], "gone": [], "of": of}


def recurrent(state: Any, at: Any) -> dict[str, Any]:
    return {"at": {"at": at, "since": 1, "size": 9}, "since": 3, "state": state}


STATES = [None, 3, "in words", {"at": 5}, LARGE, {"big": LARGE}, "x" * 2000, {"state": LARGE, "at": "above"}]


def test_a_small_place_is_one_text() -> None:
    said = PlaceTexts()
    for at in (None, leaf(3, None), leaf(4, {"at": 7}), recurrent([1, 2], leaf(5, None))):
        assert said.text(lane(one=at)) == (json.dumps(lane(one=at)),)


def test_a_large_state_is_a_part_of_its_own_and_the_same_one_as_long_as_it_stays() -> None:
    said, state = PlaceTexts(), {"big": LARGE}
    first, second = said.text(lane(one=leaf(1, state))), said.text(lane(one=leaf(2, state)))

    assert first[1] == json.dumps(state)
    assert len("".join(first[::2])) < 300
    assert second[1] is first[1]
    assert second[::2] != first[::2]
    # Another object that says the same, and one that does not.
    assert said.text(lane(one=leaf(3, copy.deepcopy(state))))[1] is first[1]
    assert said.text(lane(one=leaf(3, {"big": LARGE[1:]})))[1] == json.dumps({"big": LARGE[1:]})


def test_a_state_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def dumps(value: Any) -> str:
        text = json.JSONEncoder().encode(value)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(place_text.json, "dumps", dumps)
    said = PlaceTexts()
    for state in (LARGE, list(range(100))):
        for item in range(50):
            said.text(lane(one=leaf(item, state)))
    assert sum(size > 1000 for size in sizes) == 1
    assert len(sizes) == 102


def test_states_that_are_gone_are_not_taken_for_new_ones_at_the_same_address() -> None:
    said = PlaceTexts()
    for number in range(200):
        place = lane(one=leaf(number, {"big": [number, *LARGE]}))
        assert as_place(said.text(place)) == place
        del place


def test_a_state_that_looks_like_a_mark_stays_as_it_is() -> None:
    state = {"big": LARGE, "mark": '"0123456789abcdef0"'}
    place = lane(one=leaf(1, state), two=leaf(2, "0123456789abcdef0"))
    assert as_place(PlaceTexts().text(place)) == place


@given(st.data())
def test_whoever_is_told_the_news_knows_every_place(data: st.DataObject) -> None:
    said, known, held = PlaceTexts(), lane(), []
    states = st.sampled_from(STATES).map(lambda state: copy.deepcopy(state) if data.draw(st.booleans()) else state)
    places: Any = st.none() | st.builds(leaf, st.integers(0, 9), states)
    places |= st.builds(recurrent, states, places.filter(lambda place: place is not None))
    for _ in range(data.draw(st.integers(1, 6))):
        place = lane(one=data.draw(places), two=data.draw(places))
        if data.draw(st.booleans()):
            # As after a checkpoint that was written with sorted keys.
            place = json.loads(json.dumps(place, sort_keys=True))
        before = copy.deepcopy(place)
        known = heard(pickle.loads(pickle.dumps(said.news(place))), known)
        held.append((known, place))
        assert place == before
    assert all(as_place(text) == place for text, place in held)
    assert json.loads("".join(text_of_list([text for text, _ in held]))) == [place for _, place in held]
    # Every second part is large.
    assert all(len(part) > 1000 for part in text_of_list([text for text, _ in held])[1::2])


def test_news_are_small_and_what_was_heard_is_shared() -> None:
    said, state = PlaceTexts(), {"big": LARGE}
    sizes, known = [], [heard(said.news(lane(one=leaf(0, state))), lane())]
    for item in range(1, 4):
        news = pickle.dumps(said.news(lane(one=leaf(item, state))))
        sizes.append(len(news))
        known.append(heard(pickle.loads(news), known[-1]))
    assert max(sizes) < 400
    assert len({id(text[1]) for text in known}) == 1
    assert [as_place(text)["of"]["one"]["place"]["item"] for text in known] == [0, 1, 2, 3]


def test_no_texts_are_an_empty_list() -> None:
    assert text_of_list([]) == ("[]",)
