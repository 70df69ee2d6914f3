"""A tracker goes through passes, keeps what was handed over, and turns that into a state and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.orders import but_ahead
from support.samplers import ShuffledBatches, WithoutLen

from lightning_stateful.bucketing import BucketOrder, Buckets, Budget
from lightning_stateful.core import (
    BlockShuffledOrder,
    EpochPlan,
    Progress,
    SampleBatchOrder,
    SequentialOrder,
    ShuffledOrder,
    Topology,
)
from lightning_stateful.errors import (
    ConfigurationError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.mixture import MixtureOrder, Sources
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.tracker import Tracker, detect_topology
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

Batches = list[list[int]]
WHERE = "The train state"


SAMPLES = SampleBatchOrder(samples=ShuffledOrder(31, 3), batch_size=2)
BUCKETS = BucketOrder(Buckets.of([1 + n % 9 for n in range(40)], Budget(max_tokens=12), num_buckets=3), seed=3)
MIXED = MixtureOrder(sources=Sources(("a", "b"), (15, 40), (2, 3)), draws=(1, 2), num_steps=9, seed=3)
ORDERS = {
    "samples": SAMPLES,
    "buckets": BUCKETS,
    "sources that carry over": MIXED,
    "of unknown length": WrappedSampler(WithoutLen(), batch_size=2),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def a_tracker(order: Any = SAMPLES, num_replicas: int = 2, rank: int = 1, **options: Any) -> Tracker:
    return Tracker(order, num_replicas=num_replicas, rank=rank, **options)


def passing(tracker: Tracker, **options: Any) -> Iterator[list[int]]:
    def read(plan: EpochPlan, first_step: int) -> Iterator[list[int]]:
        return (indices for _, indices in plan.batches(tracker.topology.rank, first_step))

    return tracker.iterate(read, **options)


def take(tracker: Tracker, count: int, **options: Any) -> Batches:
    batches = passing(tracker, **options)
    return [next(batches) for _ in range(count)]


def epochs(order: Any, count: int) -> list[Batches]:
    tracker = a_tracker(order)
    return [list(passing(tracker)) for _ in range(count)]


def resumed(tracker: Tracker, **options: Any) -> Tracker:
    """Another tracker, from the state of one."""
    fresh = a_tracker(tracker.order, **options)
    fresh.load_state_dict(tracker.state_dict(), where=WHERE)
    return fresh


class TestPasses:
    @every_order
    def test_the_end_of_a_pass_moves_on_to_the_next_epoch(self, order: Any) -> None:
        tracker = a_tracker(order)
        found = [list(passing(tracker)) for _ in range(3)]

        assert found == [[indices for _, indices in order.plan(epoch, 2).batches(1)] for epoch in range(3)]
        assert tracker.epoch == 3

    @every_order
    def test_a_pass_that_is_broken_off_is_followed_by_the_next_epoch(self, order: Any) -> None:
        tracker, plan = a_tracker(order), order.plan(0, 2)
        take(tracker, 3)
        before = tracker.state_dict()
        batches = passing(tracker)
        assert tracker.state_dict() == before
        fresh = resumed(tracker)
        following = [indices for _, indices in order.plan(1, 2, plan.progress_after(3)).batches(1)]

        assert (list(batches), tracker.epoch) == (following, 2)
        # Not before an item was handed over since the state was loaded.
        passing(fresh)
        assert take(fresh, 2) == [indices for _, indices in plan.batches(1, 3)][:2]
        assert (next(passing(fresh)), fresh.epoch) == (next(order.plan(1, 2, plan.progress_after(5)).batches(1))[1], 1)

    def test_a_pass_may_go_on_after_what_was_handed_over(self) -> None:
        tracker = a_tracker()

        assert take(tracker, 3, resumes=True) + list(passing(tracker, resumes=True)) == epochs(SAMPLES, 1)[0]

    @every_order
    def test_only_the_pass_that_began_last_is_counted(self, order: Any) -> None:
        tracker = a_tracker(order)
        first, second = passing(tracker), passing(tracker)
        next(first)
        next(second)
        with pytest.warns(StatefulWarning, match="goes on, though a later pass"):
            list(first)

        assert (tracker.progress, tracker.epoch) == (tracker.progress_after(1), 1)
        assert list(passing(resumed(tracker))) == list(second)

    @pytest.mark.parametrize("done", [0, 3])
    @every_order
    def test_a_state_that_is_loaded_before_or_while_a_pass_runs_moves_it(self, order: Any, done: int) -> None:
        tracker, fresh = a_tracker(order), a_tracker(order)
        take(tracker, 4)
        whole = epochs(order, 2)
        batches = passing(fresh)
        for _ in range(done):
            next(batches)
        fresh.load_state_dict(tracker.state_dict(), where=WHERE)

        assert list(batches) == whole[0][4:]
        assert list(passing(fresh)) == whole[1]

    @pytest.mark.parametrize(
        "order",
        [
            SampleBatchOrder(samples=SequentialOrder(0)),
            SampleBatchOrder(samples=SequentialOrder(3), batch_size=2, drop_last=True),
            WrappedSampler(ShuffledBatches([])),
            WrappedSampler([], length="unknown"),
        ],
        ids=["empty", "dropped", "sampler", "unknown"],
    )
    def test_an_epoch_without_a_step_ends_at_once(self, order: Any) -> None:
        tracker = a_tracker(order)

        assert [(list(passing(tracker)), tracker.epoch) for _ in range(2)] == [([], 1), ([], 2)]

    def test_where_other_ranks_have_nothing_left_the_next_epoch_begins(self) -> None:
        order = SampleBatchOrder(samples=ShuffledOrder(7), drop_last=True)
        tracker = a_tracker(order, 1, 0)
        take(tracker, 6)
        fresh = resumed(tracker)

        assert fresh.epoch == 1
        assert list(passing(fresh)) == epochs(order, 2)[1]

    def test_a_state_before_the_first_step_serves_the_epoch_on_ranks_that_have_steps(self) -> None:
        order = SampleBatchOrder(samples=ShuffledOrder(7), batch_size=4, drop_last=True)
        fresh = resumed(a_tracker(order), num_replicas=1, rank=0)

        assert list(passing(fresh)) == [indices for _, indices in order.plan(0, 1).batches(0)]


class TestSetEpoch:
    @every_order
    def test_an_epoch_can_be_chosen_forward_and_backward(self, order: Any) -> None:
        tracker, expected = a_tracker(order), epochs(order, 4)
        for epoch in (2, 0, 3, 3, 1):
            tracker.set_epoch(epoch)
            assert tracker.epoch == epoch
            assert list(passing(tracker)) == expected[epoch]

    @every_order
    def test_the_same_epoch_keeps_progress_and_another_gives_it_up(self, order: Any) -> None:
        tracker, whole = a_tracker(order), epochs(order, 2)
        take(tracker, 3)
        before = tracker.state_dict()
        tracker.set_epoch(0)
        assert tracker.state_dict() == before
        same, other = resumed(tracker), resumed(tracker)
        same.set_epoch(0)
        other.set_epoch(1)

        assert take(same, 1) == whole[0][3:4]
        same.set_epoch(0)
        assert list(passing(same)) == whole[0]
        assert list(passing(tracker)) == whole[0]
        assert list(passing(other)) == whole[1]

    @every_order
    def test_an_epoch_set_again_begins_anew_and_counts_steps_in_the_pass_that_workers_fetched(self, order: Any) -> None:
        tracker = a_tracker(order)
        take(tracker, 4)
        fresh = resumed(tracker)
        take(later := a_tracker(order), 5)
        expected = later.progress_after(5)
        list(passing(fresh))
        fresh.set_epoch(0)

        assert but_ahead(fresh.progress_after(1)) == but_ahead(expected)
        assert fresh.state_dict() == a_tracker(order).state_dict()
        assert list(passing(fresh)) == epochs(order, 1)[0]


class TestProgress:
    @every_order
    def test_the_last_step_is_the_beginning_of_the_next_epoch(self, order: Any) -> None:
        tracker = a_tracker(order)
        count = len(list(passing(tracker)))

        assert tracker.progress_after(count) == tracker.progress == order.plan(1, 2).progress_after(0)
        assert tracker.progress_after(count - 1).epoch == 0

    @pytest.mark.parametrize("steps", [-1, 9])
    def test_more_steps_than_the_pass_has_are_refused(self, steps: int) -> None:
        with pytest.raises(ConfigurationError, match=f"must be from 0 to 8, the length of this pass, got {steps}"):
            a_tracker().progress_after(steps)


class TestStates:
    def test_accepted_differences_are_let_pass_and_named_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", logger="lightning.pytorch")
        saved = a_tracker(SampleBatchOrder(samples=SequentialOrder(31), batch_size=5))
        tracker = a_tracker(accept=("kind", "shuffle", "seed"))
        # Between epochs without a warning.
        tracker.load_state_dict(saved.state_dict(), where=WHERE)
        (said,) = caplog.messages
        assert said.endswith("differs from the present configuration, as was accepted: kind, shuffle, seed.")
        take(saved, 2)
        with pytest.warns(StatefulWarning, match="epoch 0, goes on with another kind, shuffle, seed.*a second time"):
            tracker.load_state_dict(saved.state_dict(), where=WHERE)

        assert tracker.progress == Progress(consumed=20)

    def test_whatever_an_order_does_not_call_harmless_is_warned_of(self) -> None:
        def blocks(size: int) -> Tracker:
            order = SampleBatchOrder(samples=BlockShuffledOrder(31, block_size=size), batch_size=5)
            return a_tracker(order, accept=("block_size",))

        saved = blocks(4)
        take(saved, 1)
        with pytest.warns(StatefulWarning, match=r"goes on with another block_size.*a second time"):
            blocks(8).load_state_dict(saved.state_dict(), where=WHERE)

    def test_names_that_a_state_holds_beside_a_configuration_are_refused_in_it(self) -> None:
        class Named(SampleBatchOrder):
            def config(self) -> dict[str, Any]:
                return {"kind": "mine", "order_version": 3}

        with pytest.raises(ConfigurationError, match=r"Named.config\(\) has \['kind', 'order_version'\]"):
            a_tracker(Named(samples=SequentialOrder(3)))

    @pytest.mark.parametrize(("saved", "present"), [(SAMPLES, BUCKETS), (BUCKETS, SAMPLES)])
    def test_a_number_of_samples_is_never_taken_for_a_number_of_batches(self, saved: Any, present: Any) -> None:
        names = ("kind", *saved.config(), *present.config())

        with pytest.raises(StateMismatchError, match="kind: saved") as caught:
            a_tracker(present, accept=names).load_state_dict(a_tracker(saved).state_dict(), where=WHERE)
        assert "accept" not in caught.value.differences[0].remedy


class TestTopology:
    def test_without_a_process_group_there_is_one_rank(self) -> None:
        assert detect_topology() == Tracker(SAMPLES).topology == Topology(num_replicas=1, rank=0)

    @pytest.mark.usefixtures("rank_2_of_4")
    def test_the_process_group_is_asked_for_what_is_not_given(self) -> None:
        assert detect_topology() == Topology(num_replicas=4, rank=2)
        assert detect_topology(num_replicas=8) == Topology(num_replicas=8, rank=2)
        assert detect_topology(rank=3) == Topology(num_replicas=4, rank=3)
        assert detect_topology(1, 0) == Topology(num_replicas=1, rank=0)

    def test_a_tracker_built_before_the_process_group_finds_its_rank_at_the_first_batch(
        self, request: pytest.FixtureRequest
    ) -> None:
        saved, tracker = a_tracker(), Tracker(SAMPLES)
        take(saved, 2)
        batches = passing(tracker)
        tracker.load_state_dict(saved.state_dict(), where=WHERE)
        assert tracker.progress == Progress(consumed=8)
        request.getfixturevalue("rank_2_of_4")

        assert list(batches) == [indices for _, indices in SAMPLES.plan(0, 4, Progress(consumed=8)).batches(2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd(SampleBatchOrder):
    """An order whose configuration holds whatever it is given."""

    weight: Any = None

    def config(self) -> dict[str, Any]:
        return {**SampleBatchOrder.config(self), "weight": self.weight}


class TestOrdersOfOnesOwn:
    def test_a_configuration_that_no_state_can_hold_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Odd\.config\(\)\.weight is a ndarray; .*Give plain numbers"):
            Tracker(Odd(samples=ShuffledOrder(8), weight=np.arange(3)))

    def test_a_kind_and_a_version_are_needed(self) -> None:
        nameless = type("Nameless", (Odd,), {"version": None})
        with pytest.raises(ConfigurationError, match=r"Nameless has kind='shuffled' and version=None"):
            Tracker(nameless(samples=ShuffledOrder(8)))

    def test_an_order_of_samples_is_told_from_one_of_batches(self) -> None:
        with pytest.raises(ConfigurationError, match=r"ShuffledOrder is no BatchOrder.*sampler=order"):
            StatefulBatchSampler(ShuffledOrder(8))  # type: ignore[arg-type]
