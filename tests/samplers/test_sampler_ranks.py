"""Samplers that know of ranks: told of one if that is proven to be the same, or left to their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from support.rank_threads import CountedStore
from support.ranks import Ranks
from support.samplers import Bag
from torch.distributed import HashStore

from lightning_stateful.core.steps import Topology
from lightning_stateful.sampler_copies.sampler_ranks import (
    AskedRanks,
    name_of_rank,
    numbers_in,
    ranks_held,
    settings_of_one_rank,
    told,
    yields_as_one,
)
from lightning_stateful.samplers import rank_exchange
from lightning_stateful.samplers.rank_exchange import exchanged, failing_together, post, posted
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class Stubborn(Bag):
    """Does not let its rank be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Share(Bag):
    """Yields its rank's share of 12 indices, from wherever that says."""

    def __len__(self) -> int:
        return 12 // self.world_size  # type: ignore[attr-defined,no-any-return]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, self.world_size))  # type: ignore[attr-defined]


class Asks:
    """Asks torch which share of 12 indices is its rank's."""

    def __len__(self) -> int:
        return 12 // torch.distributed.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.distributed.get_rank(), 12, torch.distributed.get_world_size()))


class FirstOfAll(Share):
    """Yields something else where it is told of one rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12)) if self.world_size > 1 else iter([0] * 12)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"num_replicas": 4, "rank": 3}, {"num_replicas": 1, "rank": 0}),
        ({"world_size": 4, "rank": 3}, {"world_size": 1, "rank": 0}),
        ({"num_replicas": 2, "rank": 1, "num_samples": 5}, {"num_replicas": 1, "rank": 0, "num_samples": 10}),
        (
            {"num_replicas": 4, "rank": 1, "num_samples": 30, "total_size": 120, "num_selected_samples": 10},
            {"num_replicas": 1, "rank": 0, "num_samples": 120, "total_size": 120, "num_selected_samples": 40},
        ),
        ({"num_replicas": 1, "rank": 0, "num_samples": 3}, {"num_replicas": 1, "rank": 0, "num_samples": 3}),
        ({"rank": 3}, {"rank": 3}),
    ],
)
def test_what_says_that_there_are_ranks_is_set_for_the_block(held: Any, expected: Any) -> None:
    inner = Bag(**held)
    with told(settings_of_one_rank(Bag(inner=inner), by_dataset=False)):
        assert vars(inner) == expected

    assert vars(inner) == held


def test_arguments_that_a_sampler_keeps_are_told_too_and_other_objects_are_not() -> None:
    kept, config = {"world_size": 4, "rank": 3}, SimpleNamespace(world_size=4, rank=3)
    sampler = Bag(kwargs=kept, config=config)
    with told(settings_of_one_rank(sampler, by_dataset=True)):
        assert kept == {"world_size": 1, "rank": 0}

    assert kept == vars(config) == {"world_size": 4, "rank": 3}
    assert ranks_held(Bag(inner=Bag(**kept), one=Bag(world_size=1, rank=0))) == (4, 3)


def test_one_that_does_not_let_itself_be_told_is_left_as_it_was() -> None:
    stubborn = Stubborn(num_replicas=2, rank=1)
    with pytest.raises(AttributeError), told(settings_of_one_rank(stubborn, by_dataset=False)):
        pass

    assert vars(stubborn) == {"num_replicas": 2, "rank": 1}


def test_torch_answers_with_other_ranks_within_the_block_alone() -> None:
    asked = AskedRanks(3, 2)
    with asked.answering():
        assert not asked.was_asked
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (2, 3)
        assert torch.distributed.is_initialized()

    assert asked.was_asked
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("ranks", "one", "alike"),
    [
        ([[0, 2], [1, 3]], [3, 2, 1, 0], True),
        ([[0, 2], [1, 0]], [0, 1, 2], True),
        ([[0, 2], [1, 2, 0, 1]], [0, 1, 2], False),
        ([[0], [1]], [0, 1, 2], False),
        ([[[0, 1]], [[2, 3]]], [np.array([0, 1]), torch.tensor([3, 2])], True),
        ([[["a"]], [["b"], ["b again"]]], [["a"], ["b"]], True),
        ([[0, 1], [0, 1]], [0, 1], False),
    ],
)
def test_ranks_yield_together_what_one_does_but_for_a_last_step(ranks: Any, one: Any, alike: bool) -> None:
    assert yields_as_one(ranks, one) == alike


def test_the_number_that_is_the_rank_on_every_rank_is_found_by_its_name() -> None:
    found = [numbers_in(Bag(length=2, which=rank, inner=Bag(seed=0))) for rank in range(3)]

    assert name_of_rank(found) == "1.which"
    assert name_of_rank(found[:1] * 3) is None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("ranks"))


def exchanges(folder: Path) -> Any:
    """Exchange values, fail on rank 1, and exchange again, beside a process group."""
    rank = torch.distributed.get_rank()
    found: list[Any] = [exchanged("number", {"is": rank}), exchanged("number", rank + 10)]
    try:
        with failing_together():
            if rank == 1:
                raise KeyError("theirs")
            exchanged("number", rank)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    with failing_together():
        found.append(exchanged("another", rank + 20))
    return found


def shares(folder: Path) -> Any:
    """Whether samplers that know of ranks deal out by themselves, and what they yield."""
    rank = torch.distributed.get_rank()
    orders = [WrappedSampler(kind(world_size=2, rank=rank)) for kind in (Share, FirstOfAll)]
    orders.append(WrappedSampler(Asks()))
    return [
        [order.meet(2, rank).is_own, sorted(index for _, (index,) in order.plan(0, 2).batches(rank))]
        for order in orders
    ]


class TestRanks:
    def test_ranks_hear_values_and_failures_of_one_another(self, ranks: Ranks) -> None:
        first, second = ranks.of(exchanges)

        assert first[:2] == second[:2] == [[{"is": 0}, {"is": 1}], [10, 11]]
        assert first[2:] == ["RankMismatchError: rank 1 failed: KeyError: 'theirs'", [20, 21]]
        assert second[2:] == ["KeyError: 'theirs'", [20, 21]]

    def test_a_sampler_is_told_of_one_rank_if_that_is_proven_and_left_to_its_ranks_if_not(self, ranks: Ranks) -> None:
        proven, own, asks = zip(*ranks.of(shares), strict=True)

        assert list(asks) == list(proven) == [[False, [0, 2, 4, 6, 8, 10]], [False, [1, 3, 5, 7, 9, 11]]]
        assert list(own) == [[True, list(range(12))]] * 2

    def test_the_values_of_many_ranks_are_a_few_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, num_ranks = CountedStore(HashStore()), 40
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(rank_exchange, "detect_topology", lambda: Topology(num_replicas=num_ranks, rank=0))
        # As the others do, who have come before.
        key = f"lightning_stateful/{rank_exchange._BLOCKS[0]}/many 0"
        for rank in range(1, num_ranks):
            store.inner.set(f"{key}/{rank}", str(rank))
            store.inner.add(f"{key}/came", 1)
            store.inner.set(f"lightning_stateful/posted/many/{rank}", str(rank))
        post("many", 0)

        assert exchanged("many", 0) == posted("many") == list(range(num_ranks))
        assert store.requests <= 10

    def test_without_others_there_is_nothing_to_exchange(self) -> None:
        assert exchanged("number", 1) is None
