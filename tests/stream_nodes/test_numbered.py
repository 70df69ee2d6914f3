"""Numbers that go with the samples of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.stream_nodes.numbered import Numbering, by_pass, numbered, without_numbers

PLACES = st.tuples(st.integers(0, 1000), st.integers(0, 6), st.integers(0, 2**30))


@given(st.lists(PLACES, min_size=1, max_size=20), st.integers(0, 5))
def test_a_number_tells_pass_source_shard_and_place(places: list[tuple[int, int, int]], first: int) -> None:
    numbering = Numbering(first, 13)
    numbers = [numbering.numbers(of_pass, shard, place, 1)[0] for of_pass, shard, place in places]
    found = [(number, *divmod(item, 13)) for number, items in by_pass(numbers) for item in items.tolist()]
    expected = sorted(((of_pass, place, shard + first) for of_pass, shard, place in places), key=lambda one: one[0])
    assert found == expected


def test_consecutive_samples_have_the_numbers_that_they_have_alone() -> None:
    numbering = Numbering(2, 7)
    alone = [numbering.numbers(3, 4, place, 1)[0] for place in range(5, 9)]
    assert list(numbering.numbers(3, 4, 5, 4)) == alone


def test_items_without_numbers_are_left_as_they_are() -> None:
    items = [(1, (2,)), (3, (4,))]
    assert without_numbers(items) == (items, None)
    assert without_numbers([]) == ([], None)
    assert without_numbers(numbered("ab", [(1,), (2, 3)])) == (["a", "b"], [(1,), (2, 3)])
    assert numbered(("a", "b"), None) == ["a", "b"]
