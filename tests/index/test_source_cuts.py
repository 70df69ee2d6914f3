from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mixtures import make_sources

from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.sources import EpochCut, Sources, StreamCut, deal_out_steps

RULES = st.builds(
    StepRule,
    batch_size=st.one_of(st.just(1), st.integers(1, 8)),
    num_replicas=st.integers(1, 9),
    drop_last=st.booleans(),
    exact=st.booleans(),
)


def ranges(shares):
    return [list(range(start, start + size)) for start, size in zip(*(part.tolist() for part in shares), strict=True)]


def groups_of(cut, rule, count):
    """Of every group, the places of each rank."""
    ranks = [ranges(cut.shares(np.arange(count), rank)) for rank in range(rule.num_replicas)]
    return [list(group) for group in zip(*ranks, strict=True)]


@given(RULES, st.integers(1, 150), st.data())
def test_steps_dealt_out_at_once_are_those_that_the_rule_gives_one_by_one(rule, length, data):
    rank, num_steps = data.draw(st.integers(0, rule.num_replicas - 1)), rule.num_steps(length)
    expected = []
    for step in range(num_steps):
        served = rule.served(length, step)
        expected.append((served + rule.share(length - served, rank)).tolist())
    assert ranges(deal_out_steps(length, rule, np.arange(num_steps), rank)) == expected


@given(RULES, st.integers(1, 150), st.data())
def test_steps_are_dealt_out_in_any_order(rule, length, data):
    num_steps = rule.num_steps(length)
    steps = np.array(data.draw(st.permutations(range(num_steps))), dtype=np.int64)
    found = ranges(deal_out_steps(length, rule, steps, 0))
    whole = ranges(deal_out_steps(length, rule, np.arange(num_steps), 0))
    assert found == [whole[step] for step in steps]


@given(RULES, st.integers(0, 150), st.integers(0, 160))
def test_groups_and_leftovers_together_are_what_is_left(rule, amount, place):
    cut = EpochCut(amount, place, rule)
    found = [place for group in groups_of(cut, rule, cut.num_groups) for batch in group for place in batch]
    assert found == list(range(place, place + len(found)))
    missing = max(amount - place, 0) - len(found) - cut.leftovers
    assert 0 <= missing < (rule.batch_size if rule.drop_last else 1)


@given(RULES, st.integers(0, 150), st.integers(0, 160))
def test_no_group_has_an_empty_or_a_repeated_batch(rule, amount, place):
    cut = EpochCut(amount, place, rule)
    for group in groups_of(cut, rule, cut.num_groups):
        assert all(group)
        assert max(Counter(place for batch in group for place in batch).values()) == 1


@given(RULES, st.integers(0, 150))
def test_leftovers_are_too_few_for_a_group(rule, amount):
    cut = EpochCut(amount, 0, rule)
    assert 0 <= cut.leftovers < (rule.full if rule.drop_last else rule.num_replicas)


@given(RULES, st.integers(0, 150), st.integers(0, 160))
def test_the_place_after_some_groups_counts_their_samples(rule, amount, place):
    cut = EpochCut(amount, place, rule)
    groups = groups_of(cut, rule, cut.num_groups)
    for count in range(cut.num_groups + 1):
        assert cut.place_after(count) == place + sum(len(batch) for group in groups[:count] for batch in group)


@given(RULES, st.integers(0, 300), st.integers(0, 20))
def test_a_stream_is_cut_into_full_groups_one_after_the_other(rule, place, count):
    cut = StreamCut(place, rule)
    found = groups_of(cut, rule, count)
    assert all(len(batch) == rule.batch_size for group in found for batch in group)
    assert [place for group in found for batch in group for place in batch] == list(
        range(place, cut.place_after(count))
    )


@pytest.mark.parametrize("seed", [None, ("mixture", 1, 2)])
def test_indices_of_every_pass_are_those_of_the_source(seed):
    sources = make_sources([5, 3], 1)
    first, passes = sources.look_up(0, np.arange(10), seed)
    assert [sorted(first[:5].tolist()), sorted(first[5:].tolist())] == [[0, 1, 2, 3, 4]] * 2
    assert np.array_equal(passes, [0] * 5 + [1] * 5)
    second, _ = sources.look_up(1, np.arange(6), seed)
    assert [sorted(second[:3].tolist()), sorted(second[3:].tolist())] == [[5, 6, 7]] * 2


def test_places_of_one_pass_have_its_number_alone():
    assert make_sources([5, 3], 1).look_up(1, np.array([7, 6]), None)[1] == 2


def test_without_a_seed_samples_keep_the_order_of_the_dataset():
    sources = make_sources([5, 3], 1)
    assert sources.look_up(1, np.array([4, 2]), None)[0].tolist() == [6, 7]
    assert sources.look_up(0, np.array([4, 5]), None)[0].tolist() == [4, 0]


def test_a_source_keeps_its_order_when_others_come_and_go():
    alone = Sources(("b",), (40,), (1,))
    both = Sources(("a", "b"), (7, 40), (1, 1))
    places = np.arange(80)
    assert np.array_equal(both.look_up(1, places, (3,))[0] - 7, alone.look_up(0, places, (3,))[0])


def test_every_pass_and_every_source_has_an_order_of_its_own():
    sources = make_sources([40, 40], 1)
    orders = {
        tuple((sources.look_up(source, np.arange(40) + 40 * number, (3,))[0] - 40 * source).tolist())
        for source in (0, 1)
        for number in range(10)
    }
    assert len(orders) == 20


def test_a_source_of_2_to_the_40_samples_is_asked_for_any_of_them():
    found, _ = make_sources([10, 2**40], 1).look_up(1, np.array([0, 2**40 - 1, 2**41 + 5]), (0,))
    assert all(10 <= index < 2**40 + 10 for index in found.tolist())


@pytest.mark.parametrize(
    ("lengths", "sizes", "message"),
    [
        ([], [], "There are no sources"),
        ([3, 0], [1, 1], "Source 'b' is empty"),
        ([3, 4.5], [1, 1], "The length of source 'b' must be an integer"),
        ([3, 4], [1, 0], "The batch size of source 'b' must be at least 1"),
        ([3, 4], [1, True], "The batch size of source 'b' must be at least 1"),
        ([3, 4], [1, 1.5], "The batch size of source 'b' must be an integer"),
        ([3, 2**40 + 1], [1, 1], r"must have 1 to 2"),
    ],
)
def test_illegal_sources_are_refused_by_name(lengths, sizes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_sources(lengths, sizes)


def test_a_batch_larger_than_its_source_is_refused_where_it_would_be_dropped():
    make_sources([3, 2], 2).refuse_large_batches()
    with pytest.raises(ConfigurationError, match="Source 'b' has 2 samples, fewer than a batch of 3"):
        make_sources([3, 2], 3).refuse_large_batches()
