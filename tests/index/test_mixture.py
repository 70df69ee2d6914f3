import json
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest
from support.mixtures import in_places, mixture, round_robin

from lightning_stateful.errors import ConfigurationError


def batches(order, epoch=0):
    """On one rank: of every step, the source and the places in it, counted on from pass to pass."""
    lengths = order.mixture.sources.lengths
    return [
        (step[0][0][0], [number * lengths[source] + index for source, number, index in step[0]])
        for step in in_places(order, order.begin(epoch, 1), 1)
    ]


def in_turn(lengths, sizes, stop):
    """Round robin on one rank, slowly."""
    served, turns, source = [0] * len(lengths), [], 0
    while True:
        exhausted = [place >= length for place, length in zip(served, lengths, strict=True)]
        if (stop == "first_exhausted" and exhausted[source]) or all(exhausted):
            return turns
        if not (stop == "all_exhausted" and exhausted[source]):
            turns.append(source)
            served[source] += sizes[source]
        source = (source + 1) % len(lengths)


def cut(turns, lengths, sizes):
    """The batches of turns; a source that is served whole and no more ends with what is left."""
    places, found = [0] * len(lengths), []
    amounts = [
        length if turns.count(source) == -(-length // size) else turns.count(source) * size
        for source, (length, size) in enumerate(zip(lengths, sizes, strict=True))
    ]
    for source in turns:
        last = min(places[source] + sizes[source], amounts[source])
        found.append((source, list(range(places[source], last))))
        places[source] = last
    return found


CASES = [([7, 12], [2, 2]), ([5, 5, 5], [2, 2, 2]), ([15, 29, 60], [4, 4, 4]), ([3, 1, 8], [1, 4, 3]), ([9], [4])]


@pytest.mark.parametrize(("lengths", "sizes"), CASES)
@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_round_robin_on_one_rank_is_that_of_a_slow_simulation(stop, lengths, sizes):
    found = batches(round_robin(lengths, sizes, stop=stop, shuffle=False))
    assert found == cut(in_turn(lengths, sizes, stop), lengths, sizes)


def test_round_robin_over_num_steps_goes_on_in_the_next_epoch():
    order = round_robin([5, 4], 2, num_steps=3, shuffle=False)
    assert batches(order) == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3])]
    assert batches(order, epoch=1) == [(1, [2, 3]), (0, [4, 5]), (1, [4, 5])]


@pytest.mark.parametrize(
    ("stop", "sources"), [("all_exhausted", [0, 0, 1, 0, 0, 1, 1]), ("cycle", [0, 1, 0, 0, 1, 0, 0, 1])]
)
def test_a_mixture_serves_its_sources_in_proportion(stop, sources):
    order = mixture([8, 6], 2, [2, 1], stop=stop, block=3)
    found = [source for source, _ in batches(order)]
    assert sorted(found[:3]) == [0, 0, 1]
    assert sorted(found) == sorted(sources)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_one_source_alone_is_served_once(stop):
    assert batches(mixture([5], 2, stop=stop, shuffle=False)) == [(0, [0, 1]), (0, [2, 3]), (0, [4])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "longest"}, "stop must be one of"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_steps": 1.5}, "num_steps must be an integer"),
        ({"drop_last": True}, "Source 'b' has 3 samples, fewer than a batch of 4"),
    ],
)
def test_contradicting_values_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        mixture([9, 3], 4, **options)


def test_by_sample_a_source_may_be_smaller_than_a_batch_that_is_dropped():
    assert mixture([9, 3], 4, by_sample=True, drop_last=True).mixture.drop_last


@pytest.mark.parametrize(
    "order", [round_robin([9, 3], [2, 1]), mixture([9, 3], 2, num_steps=4)], ids=["turn", "mixture"]
)
def test_a_mixture_describes_itself_in_plain_data(order):
    described = order.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["sources"] == {"a": 9, "b": 3}


def test_what_changes_the_sequence_changes_the_description():
    plain = mixture([9, 3], 2, [2, 1])
    others = [
        mixture([9, 4], 2, [2, 1]),
        mixture([9, 3], [2, 1], [2, 1]),
        mixture([9, 3], 2, [2, 1], seed=1),
        mixture([9, 3], 2, [2, 1], shuffle=False),
        mixture([9, 3], 2, [2, 1], drop_last=True),
        mixture([9, 3], 2, [2, 1], stop="cycle"),
        mixture([9, 3], 2, [2, 1], num_steps=3),
        mixture([9, 3], 2, [2, 1], by_sample=True),
        mixture([9, 3], 2, [2, 1], block=6),
        round_robin([9, 3], 2),
    ]
    assert all(order.describe() != plain.describe() for order in others)


def test_a_mixture_cannot_be_changed_and_equal_ones_are_equal():
    made = mixture([9, 3], 2, [2, 1]).mixture
    assert made == mixture([9, 3], 2, [2, 1]).mixture
    assert hash(made) == hash(replace(made, shares=(Fraction(2, 3), Fraction(1, 3))))
    with pytest.raises(FrozenInstanceError):
        made.seed = 3
