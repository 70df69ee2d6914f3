"""States as text, with what is large said once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.stream_loader.rank_store import Changes, StateEncoder, complete, decode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.sampled_from(["state", "source", "a", "1"]) | st.text(), part),
)
LARGE = {"numbers": list(range(1000)), "state": "x" * 2000}


def with_large(step: int, large: Any = LARGE) -> dict[str, Any]:
    return {"at": step, "of": [{"source": {"state": large}}, {"state": {"small": step}}]}


def new_pieces(changes: Changes) -> int:
    return sum(piece is not None for piece in changes[1].values())


class TestEncoding:
    @given(st.lists(PLAIN, max_size=4), st.sampled_from([1, 300]))
    def test_states_come_back(self, states: list[Any], times: int) -> None:
        encoder, before, told = StateEncoder(), None, StateEncoder()
        for state in [[state] * times for state in states]:
            text = encoder.encode(state)
            assert decode(text.text, text.large) == state
            assert "\n" not in text.text
            before = complete(told.encode_changes(state), before)
            assert before == text

    @pytest.mark.parametrize("large", [LARGE, list(range(1000)), "x" * 2000])
    def test_what_is_large_under_the_key_state_is_taken_out(self, large: Any) -> None:
        text = StateEncoder().encode(with_large(3, large))
        assert len(text.text) < 200
        assert [json.loads(piece) for piece in text.large.values()] == [large]

    def test_a_state_that_is_large_without_is_taken_out_as_a_whole(self) -> None:
        state = [list(range(6000)), with_large(3)]
        text = StateEncoder().encode(state)
        assert len(text.text) < 200
        assert len(text.large) == 2
        assert decode(text.text, text.large) == state

    def test_pieces_are_small_enough_for_a_store_and_may_be_alike(self) -> None:
        state = {"state": "ab" * 3_000_000}
        text = StateEncoder().encode(state)
        assert max(map(len, text.large.values())) <= 2**20
        assert len(text.large) < 6
        assert decode(text.text, text.large) == state

    def test_a_large_object_is_not_encoded_again(self) -> None:
        class Counted(dict[str, Any]):
            times = 0

            def items(self) -> Any:
                type(self).times += 1
                return super().items()

        encoder, large = StateEncoder(), Counted(LARGE)
        texts = [encoder.encode(with_large(step, large)) for step in range(5)]
        assert Counted.times <= 2
        assert [decode(text.text, text.large) for text in texts] == [with_large(step) for step in range(5)]


class TestChanges:
    def test_hold_large_parts_only_where_they_are_new(self) -> None:
        encoder = StateEncoder()
        states = [with_large(step, [step // 3] * 1000) for step in range(7)]
        assert [new_pieces(encoder.encode_changes(state)) for state in states] == [1, 0, 0, 1, 0, 0, 1]
