"""The topology comes from the caller, or else from the process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import Topology
from lightning_stateful.loaders import StatefulLoader
from lightning_stateful.samplers import StatefulDistributedSampler, detect_topology


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_without_a_process_group_there_is_one_rank() -> None:
    assert detect_topology() == Topology(num_replicas=1, rank=0)


def test_what_is_given_counts() -> None:
    assert detect_topology(3, 1) == Topology(num_replicas=3, rank=1)


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (2, 2), (2, -1), (None, 1)])
def test_what_is_out_of_range_is_refused(num_replicas: int | None, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        detect_topology(num_replicas, rank)


@pytest.mark.usefixtures("rank_2_of_4")
def test_the_process_group_is_asked_for_what_is_not_given() -> None:
    assert detect_topology() == Topology(num_replicas=4, rank=2)
    assert detect_topology(num_replicas=8) == Topology(num_replicas=8, rank=2)
    assert detect_topology(rank=3) == Topology(num_replicas=4, rank=3)
    assert detect_topology(1, 0) == Topology(num_replicas=1, rank=0)


@pytest.mark.usefixtures("rank_2_of_4")
def test_a_sampler_takes_its_rank_from_the_process_group_as_torchs_does() -> None:
    ours, theirs = StatefulDistributedSampler(12, shuffle=False), DistributedSampler(range(12), shuffle=False)

    assert list(ours) == list(theirs) == [2, 6, 10]


@pytest.mark.usefixtures("rank_2_of_4")
def test_a_loader_serves_the_share_of_its_rank() -> None:
    assert [batch.tolist() for batch in StatefulLoader(list(range(16)), batch_size=2)] == [[4, 5], [12, 13]]


def test_a_loader_built_before_the_process_group_finds_its_rank_at_the_first_batch() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    loader = StatefulLoader(list(range(8)), batch_size=2)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
    finally:
        dist.destroy_process_group()
