import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.topology import Topology, split_evenly
from lightning_stateful.errors import ConfigurationError


def test_a_topology_is_one_rank_unless_told_otherwise():
    assert Topology() == Topology(num_replicas=1, rank=0)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_and_the_last_rank_are_legal(rank):
    assert Topology(num_replicas=4, rank=rank).rank == rank


@pytest.mark.parametrize("num_replicas", [0, -1])
def test_fewer_than_one_replica_is_refused_with_the_number(num_replicas):
    with pytest.raises(ConfigurationError, match=rf"num_replicas must be at least 1, got {num_replicas}\."):
        Topology(num_replicas=num_replicas)


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_a_rank_outside_its_replicas_is_refused_with_the_range(rank):
    with pytest.raises(ConfigurationError, match=rf"rank must be in range\(4\), got {rank}\."):
        Topology(num_replicas=4, rank=rank)


def test_a_topology_is_told_by_keyword():
    with pytest.raises(TypeError):
        Topology(4, 0)


def test_a_topology_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology().rank = 1


@pytest.mark.parametrize(
    ("count", "num_parts", "shares"),
    [
        (10, 3, [range(0, 4), range(4, 7), range(7, 10)]),
        (6, 3, [range(0, 2), range(2, 4), range(4, 6)]),
        (2, 3, [range(0, 1), range(1, 2), range(2, 2)]),
        (0, 2, [range(0, 0), range(0, 0)]),
        (5, 1, [range(0, 5)]),
    ],
)
def test_known_shares(count, num_parts, shares):
    assert [split_evenly(count, num_parts, part) for part in range(num_parts)] == shares


@given(st.integers(0, 500), st.integers(1, 60))
def test_shares_laid_end_to_end_are_the_whole_in_order(count, num_parts):
    laid = [item for part in range(num_parts) for item in split_evenly(count, num_parts, part)]
    assert laid == list(range(count))


@given(st.integers(0, 2**40), st.integers(1, 60))
def test_shares_differ_by_at_most_one(count, num_parts):
    sizes = [len(split_evenly(count, num_parts, part)) for part in range(num_parts)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 2**40), st.integers(1, 60))
def test_the_longer_shares_come_first(count, num_parts):
    sizes = [len(split_evenly(count, num_parts, part)) for part in range(num_parts)]
    assert sizes == sorted(sizes, reverse=True)
