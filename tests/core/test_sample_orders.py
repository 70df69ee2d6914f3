"""Orders of samples, and plans that cut them into batches, against batches that are cut one step after another."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core import Progress, SampleBatchOrder, SequentialOrder, ShuffledOrder, StepRule
from lightning_stateful.core.samples import SampleEpochPlan
from lightning_stateful.errors import ConfigurationError

both_kinds = pytest.mark.parametrize("kind", [SequentialOrder, ShuffledOrder])
SAMPLES = st.builds(SequentialOrder, st.integers(0, 60)) | st.builds(ShuffledOrder, st.integers(0, 60))
ORDERS = st.builds(
    SampleBatchOrder,
    samples=SAMPLES,
    batch_size=st.integers(1, 7),
    drop_last=st.booleans(),
    exact=st.booleans(),
)
RANKS = st.integers(1, 6)


def an_order(length: int, *, seed: int | None = None, **options: Any) -> SampleBatchOrder:
    samples = SequentialOrder(length) if seed is None else ShuffledOrder(length, seed)
    return SampleBatchOrder(samples=samples, **options)


def by_hand(order: SampleBatchOrder, rank: int, num_replicas: int, start: Progress) -> list[list[int]]:
    """The batches of a rank, by asking the rule for one step after another."""
    rule = StepRule(
        batch_size=order.batch_size, num_replicas=num_replicas, drop_last=order.drop_last, exact=order.exact
    )
    batches, offset = [], start.consumed
    while rule.num_steps(len(order.samples) - offset):
        share = offset + rule.share(len(order.samples) - offset, rank)
        batches.append(order.samples.take(share, start.epoch, start.cycle).tolist())
        offset += rule.step_size(len(order.samples) - offset)
    return batches


def batches_of(plan: SampleEpochPlan, rank: int = 0, first_step: int = 0) -> list[list[int]]:
    return [indices for _, indices in plan.batches(rank, first_step)]


class TestSampleOrders:
    @both_kinds
    @pytest.mark.parametrize("length", [-1, 2**40 + 1, 2**70])
    def test_a_length_out_of_range_is_refused(self, kind: type, length: int) -> None:
        with pytest.raises(ConfigurationError, match=rf"0 to 2\*\*40 samples, got {length}"):
            kind(length)

    @pytest.mark.parametrize(
        ("length", "epoch", "cycle", "samples"),
        [
            (10, 0, 0, [6, 9, 1, 0, 3, 4, 5, 2, 7, 8]),
            (10, 1, 0, [0, 9, 8, 1, 3, 2, 5, 7, 6, 4]),
            (7, 1, 1, [1, 2, 3]),
            (10**6, 0, 0, [188432, 419257, 604946, 787407]),
        ],
    )
    def test_version_1_of_the_shuffled_order_never_changes(
        self, length: int, epoch: int, cycle: int, samples: list[int]
    ) -> None:
        order = ShuffledOrder(length, 3)

        assert order.version == 1
        assert order.take(np.arange(len(samples)), epoch, cycle).tolist() == samples


class TestPlans:
    @given(ORDERS, RANKS, st.integers(0, 5), st.integers(0, 2), st.data())
    def test_the_batches_of_every_rank_are_those_cut_by_hand(
        self, order: SampleBatchOrder, num_replicas: int, epoch: int, cycle: int, data: st.DataObject
    ) -> None:
        consumed = data.draw(st.integers(0, len(order.samples)))
        start = Progress(epoch=epoch, cycle=cycle, consumed=consumed)
        plan = order.plan(epoch, num_replicas, start)
        for rank in range(num_replicas):
            expected = by_hand(order, rank, num_replicas, start)
            assert plan.num_steps == len(expected)
            assert plan.num_samples(rank) == sum(map(len, expected))
            for first_step in {0, 1, len(expected) // 2, len(expected)}:
                assert batches_of(plan, rank, first_step) == expected[first_step:]

    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize(("length", "batch_size"), [(50_001, 2), (50_001, 9_000), (24_576, 1)])
    def test_epochs_that_are_read_in_many_chunks_are_cut_like_short_ones(
        self, length: int, batch_size: int, rank: int
    ) -> None:
        order = an_order(length, seed=3, batch_size=batch_size)
        plan = order.plan(0, 3)
        batches = by_hand(order, rank, 3, Progress())

        assert batches_of(plan, rank) == batches
        assert batches_of(plan, rank, len(batches) // 2) == batches[len(batches) // 2 :]

    def test_the_first_batches_of_a_huge_epoch_are_there_at_once(self) -> None:
        plan = an_order(2**40, batch_size=2).plan(0, 2, Progress(consumed=2**39))

        assert list(islice(plan.batches(1), 2)) == [
            (2**39 + 2, [2**39 + 2, 2**39 + 3]),
            (2**39 + 6, [2**39 + 6, 2**39 + 7]),
        ]
        assert plan.num_samples(1) == 2**38


class TestBatchOrders:
    def test_the_batch_size_is_not_compared(self) -> None:
        configs = [an_order(9, seed=2, batch_size=size, drop_last=True).config() for size in (1, 4)]

        assert configs == [{"shuffle": True, "seed": 2, "drop_last": True}] * 2

    def test_an_exact_order_serves_no_sample_twice(self) -> None:
        order = an_order(10, seed=2)

        assert order.adapted(exact=True).exact
        assert not order.adapted().exact
        assert order.adapted(exact=True).adapted().exact

    def test_samples_that_are_not_collated_come_one_by_one_and_never_in_pairs(self) -> None:
        order = an_order(10, batch_size=None, exact=True)
        plan = order.plan(0, 4)

        assert list(plan.batches(1)) == [(1, 1), (5, 5), (9, 9)]
        assert not plan.ends_in_pairs
        assert plan.repeats() == "2 of 10 samples are served twice in every epoch"

    def test_an_exact_order_can_be_told_to_repeat_instead(self) -> None:
        order = an_order(10, exact=True).with_repeats()

        assert batches_of(order.plan(0, 4), 1) == [[1], [5], [9]]
