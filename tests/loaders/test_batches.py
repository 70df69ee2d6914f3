"""The batches of a rank are its share of every step, from whatever position they are asked for."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_stateful.core.steps import StepRule
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import BlockShuffledOrder, Position, SequentialOrder, ShuffledOrder
from lightning_stateful.loaders.batches import BatchPlan, Cut, PassIndices, PositionedBatches
from lightning_stateful.samplers import Cursor

ORDERS = st.one_of(
    st.builds(SequentialOrder, st.integers(0, 60)),
    st.builds(ShuffledOrder, st.integers(1, 60), st.integers(0, 3)),
    st.builds(ShuffledOrder, st.integers(1, 20), st.integers(0, 3), st.integers(1, 60)),
)
PLANS = st.integers(1, 6).flatmap(
    lambda ranks: st.builds(
        BatchPlan,
        order=ORDERS,
        rule=st.builds(
            StepRule,
            batch_size=st.integers(1, 7),
            num_replicas=st.just(ranks),
            drop_last=st.booleans(),
            exact=st.booleans(),
        ),
        rank=st.integers(0, ranks - 1),
    )
)


def a_plan(order: Any, rank: int = 0, **rule: Any) -> BatchPlan:
    return BatchPlan(order=order, rule=StepRule(**{"batch_size": 2, **rule}), rank=rank)


def whole(plan: BatchPlan, epoch: int = 0, number: int = 0) -> list[list[int]]:
    """All batches of one pass, each cut from the order by asking the rule for one step after another."""
    batches, slot, remaining = [], number * len(plan.order), len(plan.order)
    while plan.rule.num_steps(remaining):
        share = plan.rule.share(remaining, plan.rank)
        batches.append(plan.order.take(slot + share, epoch).tolist())
        slot += plan.rule.step_size(remaining)
        remaining -= plan.rule.step_size(remaining)
    return batches


class TestBatchPlan:
    @given(PLANS, st.integers(0, 5))
    def test_the_batches_of_an_epoch_are_the_ranks_share_of_every_step(self, plan: BatchPlan, epoch: int) -> None:
        assert list(plan.indices(Position(epoch=epoch))) == whole(plan, epoch)

    @given(PLANS, st.integers(0, 5))
    def test_the_batches_from_any_step_are_the_tail_of_the_whole(self, plan: BatchPlan, epoch: int) -> None:
        batches = whole(plan, epoch)
        for step in range(len(batches)):
            position = plan.after(Position(epoch=epoch), step)
            assert list(plan.indices(position)) == batches[step:], step

    @given(PLANS, st.integers(1, 4))
    def test_a_later_pass_goes_on_counting_slots_and_is_cut_like_the_first(self, plan: BatchPlan, number: int) -> None:
        batches = whole(plan, 2, number)
        start = Position(epoch=2, consumed=number * len(plan.order))

        assert list(plan.indices(start)) == batches
        for step in range(len(batches)):
            assert list(plan.indices(plan.after(start, step))) == batches[step:], step

    @given(PLANS, st.data())
    def test_from_any_slot_the_rest_is_cut_as_an_epoch_of_that_length(self, plan: BatchPlan, data: Any) -> None:
        length = len(plan.order)
        consumed = data.draw(st.integers(0, max(3 * length - 1, 0)))
        left = length - consumed % length if length else 0
        offsets = whole(BatchPlan(order=SequentialOrder(left), rule=plan.rule, rank=plan.rank))
        expected = [plan.order.take(consumed + np.array(batch, dtype=np.int64), 1).tolist() for batch in offsets]

        assert list(plan.indices(Position(epoch=1, consumed=consumed))) == expected

    @given(PLANS, st.integers(0, 150))
    def test_the_number_of_batches_is_that_of_the_indices(self, plan: BatchPlan, consumed: int) -> None:
        position = Position(consumed=consumed)

        assert plan.num_batches(position) == len(list(plan.indices(position)))
        assert plan.num_batches() == len(whole(plan))

    @given(PLANS)
    def test_the_number_of_samples_is_that_of_the_ranks_whole_epoch(self, plan: BatchPlan) -> None:
        assert plan.num_samples() == sum(len(batch) for batch in whole(plan))

    @given(PLANS)
    def test_the_ranks_together_serve_every_slot_once_or_as_the_rule_counts(self, plan: BatchPlan) -> None:
        length, rule = len(plan.order), plan.rule
        plans = [BatchPlan(order=SequentialOrder(length), rule=rule, rank=rank) for rank in range(rule.num_replicas)]
        served = Counter(index for each in plans for batch in each.indices(Position()) for index in batch)

        assert len(served) == length - rule.num_dropped(length)
        assert served.total() == len(served) + rule.num_repeated(length)

    @given(PLANS)
    def test_the_number_of_batches_is_equal_on_all_ranks(self, plan: BatchPlan) -> None:
        lengths = {
            len(list(BatchPlan(order=plan.order, rule=plan.rule, rank=rank).indices(Position())))
            for rank in range(plan.rule.num_replicas)
        }

        assert lengths == {plan.num_batches()}

    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize(("length", "batch_size"), [(50_001, 2), (50_001, 9_000), (24_576, 1), (8_192, 8_192)])
    def test_epochs_of_many_blocks_are_cut_like_short_ones(self, length: int, batch_size: int, rank: int) -> None:
        plan = a_plan(ShuffledOrder(length, 3), rank, batch_size=batch_size, num_replicas=3)
        batches = whole(plan)
        middle = len(batches) // 2

        assert list(plan.indices(Position())) == batches
        assert list(plan.indices(plan.after(Position(), middle))) == batches[middle:]

    def test_an_order_that_shuffles_by_blocks_is_cut_too(self) -> None:
        plan = a_plan(BlockShuffledOrder(23, 4, 3, 2), 1, num_replicas=2)

        assert list(plan.indices(Position(epoch=1))) == whole(plan, 1)

    def test_the_first_batches_of_a_huge_epoch_are_there_at_once(self) -> None:
        plan = a_plan(SequentialOrder(2**40), 1, num_replicas=2)

        assert list(islice(plan.indices(Position(consumed=2**39)), 2)) == [
            [2**39 + 2, 2**39 + 3],
            [2**39 + 6, 2**39 + 7],
        ]
        assert plan.num_samples() == 2**39

    def test_the_position_after_all_steps_lies_at_the_end_of_its_pass(self) -> None:
        plan = a_plan(SequentialOrder(7), drop_last=True)

        assert plan.after(Position(epoch=3, width=4), 3) == Position(epoch=3, consumed=7, width=4)
        assert plan.after(Position(consumed=7), 1) == Position(consumed=9)
        assert plan.after(Position(consumed=9), 2) == Position(consumed=14)

    def test_no_steps_lead_nowhere(self) -> None:
        assert a_plan(SequentialOrder(7)).after(Position(epoch=1, consumed=4), 0) == Position(epoch=1, consumed=4)

    def test_an_empty_order_has_no_batches(self) -> None:
        plan = a_plan(SequentialOrder(0))

        assert (plan.num_batches(), plan.num_samples(), plan.remaining(Position())) == (0, 0, 0)
        assert list(plan.indices(Position())) == []

    def test_a_rest_that_is_dropped_has_no_batches(self) -> None:
        plan = a_plan(SequentialOrder(7), batch_size=2, num_replicas=2, drop_last=True)

        assert plan.num_batches(Position(consumed=4)) == 0
        assert list(plan.indices(Position(consumed=4))) == []

    def test_indices_are_plain_integers(self) -> None:
        batches = list(a_plan(SequentialOrder(5)).indices(Position()))

        assert {type(index) for batch in batches for index in batch} == {int}


class TestCut:
    def test_without_a_process_group_there_is_one_rank(self) -> None:
        cut = Cut(order=SequentialOrder(5), batch_size=2)

        assert cut.topology() == Topology(num_replicas=1, rank=0)
        assert list(cut.plan().indices(Position())) == [[0, 1], [2, 3], [4]]

    @given(PLANS)
    def test_a_cut_for_given_ranks_gives_the_plan_of_its_rank(self, plan: BatchPlan) -> None:
        rule = plan.rule
        cut = Cut(
            order=plan.order,
            batch_size=rule.batch_size,
            drop_last=rule.drop_last,
            exact=rule.exact,
            num_replicas=rule.num_replicas,
            rank=plan.rank,
        )

        assert cut.plan() == plan

    @pytest.mark.parametrize("ranks", [(0, 0), (2, 2), (2, -1)])
    def test_a_rank_outside_the_replicas_is_refused(self, ranks: tuple[int, int]) -> None:
        cut = Cut(order=SequentialOrder(5), batch_size=2, num_replicas=ranks[0], rank=ranks[1])
        with pytest.raises(ConfigurationError):
            cut.plan()

    def test_a_batch_size_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="batch_size must be an int of at least 1, got 0"):
            Cut(order=SequentialOrder(5), batch_size=0).plan()


class TestPositionedBatches:
    def test_without_a_seed_it_yields_bare_indices_from_the_start(self) -> None:
        plan = a_plan(ShuffledOrder(11, 1))
        batches = PositionedBatches(plan, None)
        batches.start = Position(epoch=2, consumed=4)

        assert list(batches) == whole(plan, 2)[2:]

    def test_it_begins_with_the_first_epoch(self) -> None:
        plan = a_plan(ShuffledOrder(11, 1))

        assert list(PositionedBatches(plan, None)) == whole(plan, 0)

    def test_every_pass_begins_at_the_start_that_holds_then(self) -> None:
        plan = a_plan(SequentialOrder(6))
        batches = PositionedBatches(plan, None)
        first = iter(batches)
        batches.start = Position(consumed=4)

        assert list(first) == [[0, 1], [2, 3], [4, 5]]
        assert list(batches) == list(batches) == [[4, 5]]

    def test_with_a_seed_every_batch_carries_one_of_its_own(self) -> None:
        plan = a_plan(ShuffledOrder(11, 1))
        keyed = list(PositionedBatches(plan, 5))

        assert [indices for _, indices in keyed] == whole(plan)
        assert len({key for key, _ in keyed}) == len(keyed)

    def test_it_does_not_depend_on_where_in_the_pass_one_begins(self) -> None:
        plan = a_plan(ShuffledOrder(11, 1))
        batches = PositionedBatches(plan, 5)
        keyed = list(batches)
        for step in range(1, len(keyed)):
            batches.start = plan.after(Position(), step)
            assert list(batches) == keyed[step:]

    def test_seeds_epochs_and_passes_have_keys_of_their_own(self) -> None:
        keys = set()
        for seed in range(3):
            for epoch in range(3):
                for number in range(3):
                    batches = PositionedBatches(a_plan(SequentialOrder(4)), seed)
                    batches.start = Position(epoch=epoch, consumed=4 * number)
                    keys.add(next(iter(batches))[0])

        assert len(keys) == 27

    def test_a_key_is_a_plain_integer(self) -> None:
        assert type(next(iter(PositionedBatches(a_plan(SequentialOrder(4)), 5)))[0]) is int

    @pytest.mark.parametrize("start", [0, 4, 10])
    def test_its_length_is_that_of_a_whole_epoch_wherever_it_begins(self, start: int) -> None:
        batches = PositionedBatches(a_plan(SequentialOrder(11)), None)
        batches.start = Position(consumed=start)

        assert len(batches) == 6

    def test_an_empty_epoch_has_no_batches_with_a_seed_either(self) -> None:
        batches = PositionedBatches(a_plan(SequentialOrder(0)), 5)

        assert list(batches) == []
        assert len(batches) == 0


class TestPassIndices:
    def indices(self, rank: int = 0, **position: int) -> tuple[PassIndices, BatchPlan]:
        cut = Cut(order=ShuffledOrder(11, 1), batch_size=2, num_replicas=2, rank=rank)
        cursor = Cursor(cut.order, {})
        cursor.position = Position(**position)
        return PassIndices(cut, cursor), cut.plan()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_they_are_the_ranks_batches_from_where_the_cursor_stands_one_by_one(self, rank: int) -> None:
        indices, plan = self.indices(rank, epoch=3, consumed=4)

        assert list(indices) == [index for batch in whole(plan, 3)[1:] for index in batch]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_their_length_is_that_of_the_whole_epoch(self, rank: int) -> None:
        indices, plan = self.indices(rank, consumed=4)

        assert len(indices) == sum(len(batch) for batch in whole(plan))

    def test_a_set_epoch_moves_nothing(self) -> None:
        indices, plan = self.indices()
        indices.set_epoch(5)

        assert list(indices) == [index for batch in whole(plan, 0) for index in batch]

    def test_they_pass_for_a_distributed_sampler(self) -> None:
        assert isinstance(self.indices()[0], DistributedSampler)
