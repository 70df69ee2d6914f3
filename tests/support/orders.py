"""The laws that every order of batches keeps, whatever it serves.

A test puts an order through all of them::

    @every_law
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_the_laws_of_orders(law, case):
        law(case)
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import pytest

from lightning_stateful.core import BatchOrder, EpochPlan, Progress
from lightning_stateful.errors import PositionError

RANKS = (1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """An order, and what a test may expect of it.

    Attributes:
        order: The order.
        samples: What every epoch serves, each once; None where an epoch is no pass over the data.
        drops: Some samples of an epoch may be left out at its end.
        shuffled: Seeds and epochs have sequences of their own.
        forward: The number of steps is known only when the end has been met.
        tells_repeats: ``repeats`` knows beforehand whether the last step serves samples twice.
        cycles: An epoch may hold several passes, each with a sequence of its own.
        longer: The same order of more data, the end of which lies beyond the end of this one.
    """

    order: BatchOrder
    samples: Collection[int] | None
    drops: bool = False
    shuffled: bool = True
    forward: bool = False
    tells_repeats: bool = True
    cycles: bool = True
    longer: BatchOrder | None = None


@dataclass
class Served:
    """The part of an epoch that some ranks were served.

    Attributes:
        steps: For every step the batches of all ranks: pairs of a number and indices.
        progress: The progress at the beginning and after every step.
        plan: The plan of the last rank.
    """

    steps: list[list[tuple[int, Any]]]
    progress: list[Progress]
    plan: EpochPlan

    @property
    def batches(self) -> list[list[int]]:
        """The batches of all ranks, step after step."""
        return [indices for step in self.steps for _, indices in step]

    @property
    def samples(self) -> list[int]:
        """The samples of all batches."""
        return [index for batch in self.batches for index in batch]


def through_json(progress: Progress) -> Progress:
    """A progress as a checkpoint gives it back."""
    return Progress.from_dict(json.loads(json.dumps(progress.to_dict())))


def but_ahead(progress: Progress) -> Progress:
    """A progress without what it says of items that were drawn ahead of it."""
    return replace(progress, details={name: value for name, value in progress.details.items() if name != "ahead"})


def serve(
    order: BatchOrder, epoch: int, num_replicas: int, progress: Progress | None = None, count: int | None = None
) -> Served:
    """Serve an epoch, or ``count`` steps of it, to some ranks, each of which makes a plan of its own."""
    ranks = []
    for rank in range(num_replicas):
        plan = order.plan(epoch, num_replicas, progress)
        seen = [plan.progress_after(0)]
        batches = []
        for step, batch in enumerate(islice(plan.batches(rank), count), 1):
            batches.append(batch)
            seen.append(plan.progress_after(step))
        ranks.append((batches, seen))
    for _, seen in ranks:
        assert seen == ranks[0][1], "ranks disagree about the progress"
    steps = [list(step) for step in zip(*(batches for batches, _ in ranks), strict=True)]
    return Served(steps, ranks[0][1], plan)


def beginning(case: OrderCase, epoch: int, num_replicas: int) -> Progress | None:
    """The progress that an epoch begins from: of orders that carry over, the end of the one before."""
    if not case.order.carries_over or not epoch:
        return None
    return serve(case.order, epoch - 1, num_replicas, beginning(case, epoch - 1, num_replicas)).progress[-1]


def some_steps(count: int) -> list[int]:
    """The first and the last steps, and some between."""
    return sorted({*range(min(3, count + 1)), *range(0, count, max(count // 4, 1)), max(count - 1, 0), count})


def it_is_an_order_that_describes_itself_in_plain_data(case: OrderCase) -> None:
    """Kind, version and configuration are what a state compares."""
    order = case.order
    config = order.config()

    assert isinstance(order, BatchOrder)
    assert (type(order.kind), type(order.version), type(order.carries_over)) == (str, int, bool)
    assert json.loads(json.dumps(config)) == config == order.config()


def an_epoch_is_dealt_out_once_over_any_ranks(case: OrderCase) -> None:
    """Every sample of an epoch comes once, but for what ``repeats`` tells of and what is dropped."""
    for num_replicas in RANKS:
        for epoch in (0, 2) if case.samples is not None else ():
            check_once(case, [serve(case.order, epoch, num_replicas)])


def check_once(case: OrderCase, legs: list[Served]) -> None:
    """Fail unless an epoch that went over these plans has served every sample once, but for some of the last step."""
    assert case.samples is not None
    samples = [sample for leg in legs for sample in leg.samples]
    *_, last_step = (step for leg in legs for step in leg.steps)
    last = sum(len(batch) for _, batch in last_step)
    twice = {sample for sample, count in Counter(samples).items() if count > 1}

    assert set(samples) <= set(case.samples)
    assert case.drops or set(samples) == set(case.samples)
    assert twice <= set(samples[len(samples) - last :])
    if case.tells_repeats:
        assert not twice or any(leg.plan.repeats() for leg in legs)
        assert len(legs) > 1 or bool(legs[0].plan.repeats()) == bool(twice)


def ranks_take_the_steps_that_the_plan_counts(case: OrderCase) -> None:
    """All ranks have ``num_steps`` batches, and none is empty."""
    for num_replicas in RANKS:
        expected = None if case.forward else case.order.plan(0, num_replicas).num_steps
        served = serve(case.order, 0, num_replicas)
        assert served.plan.num_steps == len(served.steps)
        assert expected in (None, len(served.steps))
        assert all(served.batches)


def a_plan_from_any_progress_is_the_rest(case: OrderCase) -> None:
    """On the same ranks a resumed run is served what it would have been, numbers and progress too."""
    for num_replicas in (1, 3):
        start = beginning(case, 1, num_replicas)
        whole = serve(case.order, 1, num_replicas, start)
        for step in some_steps(len(whole.steps)):
            rest = serve(case.order, 1, num_replicas, through_json(whole.progress[step]))
            assert rest.steps == whole.steps[step:], step
            assert rest.progress == whole.progress[step:], step


def batches_from_a_later_step_are_the_rest(case: OrderCase) -> None:
    """``first_step`` leaves out what comes before and nothing else."""
    for num_replicas in (1, 3):
        start, rank = beginning(case, 1, num_replicas), num_replicas - 1
        whole = list(case.order.plan(1, num_replicas, start).batches(rank))
        # Where the end is not known, nor is whether the last steps but one are full.
        for step in some_steps(len(whole) - 2 * case.forward):
            assert list(case.order.plan(1, num_replicas, start).batches(rank, step)) == whole[step:], step


def histories(seed: int) -> list[tuple[int, int]]:
    """Pairs of ranks and the steps that are taken on them."""
    rng = random.Random(seed)
    return [(rng.randint(1, 5), rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]


def replay(case: OrderCase, history: list[tuple[int, int]]) -> list[Served]:
    """Serve an epoch over a history of ranks, and its rest on two."""
    legs: list[Served] = []
    progress: Progress | None = None
    for num_replicas, count in [*history, (2, 10**6)]:
        legs.append(serve(case.order, 0, num_replicas, progress, count))
        progress = through_json(legs[-1].progress[-1])
        if not case.order.plan(0, num_replicas, progress).num_steps:
            break
    return legs


def a_chain_of_resizings_serves_every_sample_once(case: OrderCase) -> None:
    """Over whatever ranks an epoch goes, every sample comes once, and a plan begins where the one before stopped."""
    for seed in range(25):
        legs = replay(case, histories(seed))
        for before, after in pairwise(legs):
            assert after.progress[0].consumed == before.progress[-1].consumed, seed
        if case.samples is not None:
            check_once(case, legs)


def a_number_tells_a_batch_from_all_others_of_its_epoch(case: OrderCase) -> None:
    """Over all ranks and resizings, two batches have one number only if they are the same batch."""
    for seed in range(12):
        found: dict[int, Any] = {}
        for leg in replay(case, histories(seed)):
            for step in leg.steps:
                for number, indices in step:
                    assert type(number) is int
                    assert found.setdefault(number, indices) == indices, (seed, number)


def progress_counts_up_within_its_epoch_and_survives_json(case: OrderCase) -> None:
    """Progress is plain data that only grows."""
    for num_replicas in (1, 3):
        served = serve(case.order, 2, num_replicas, beginning(case, 2, num_replicas))
        consumed = [progress.consumed for progress in served.progress]
        assert [through_json(progress) for progress in served.progress] == served.progress
        assert {progress.epoch for progress in served.progress} == {2}
        assert consumed == sorted(set(consumed))


def later_passes_of_an_epoch_are_whole_and_draw_anew(case: OrderCase) -> None:
    """A short loader starts over beside a longer one; batches of all passes have numbers of their own."""
    passes = [serve(case.order, 1, 2, Progress(epoch=1, cycle=cycle)) for cycle in range(3 if case.cycles else 0)]
    numbers = [{number for step in served.steps for number, _ in step} for served in passes]

    assert len(set().union(*numbers)) == sum(map(len, numbers))
    assert len({str(served.batches) for served in passes}) == (len(passes) if case.shuffled else bool(passes))
    for cycle, served in enumerate(passes):
        assert {progress.cycle for progress in served.progress} == {cycle}
        rest = serve(case.order, 1, 2, through_json(served.progress[2]))
        assert (rest.steps, rest.progress) == (served.steps[2:], served.progress[2:])


def another_epoch_begins_anew_unless_epochs_carry_over(case: OrderCase) -> None:
    """The progress of another epoch is looked at by orders that carry over, and by no others."""
    if case.order.carries_over:
        ahead, reached = serve(case.order, 2, 2), serve(case.order, 2, 2, beginning(case, 2, 2))
        assert (ahead.steps, ahead.progress) == (reached.steps, reached.progress)
        return
    progress = serve(case.order, 0, 2, count=1).progress[-1]
    assert serve(case.order, 1, 3, progress).steps == serve(case.order, 1, 3).steps


def epochs_seeds_and_paths_have_sequences_of_their_own(case: OrderCase) -> None:
    """Loaders that are served side by side, and epochs, do not draw alike."""
    order = case.order
    orders = [order, order.adapted(path="0"), order.adapted(path="1.train")]
    sequences = {str(serve(order, 1, 1, beginning(case, 1, 1)).batches)} if not order.carries_over else set()
    sequences |= {str(serve(each, 0, 1).batches) for each in orders}

    assert len(sequences) == (1 if not case.shuffled else 3 + (not order.carries_over))
    assert serve(order.adapted(), 0, 2).steps == serve(order, 0, 2).steps
    assert serve(order.adapted(path="0"), 0, 2).steps == serve(orders[1], 0, 2).steps


def an_unshuffled_order_serves_the_same_in_every_epoch(case: OrderCase) -> None:
    """Evaluation reads the same batches each time, and no others than training."""
    order = case.order.adapted(shuffle=False)
    if order.carries_over:
        return
    assert serve(order, 3, 2).batches == serve(order, 0, 2).batches
    if case.samples is not None and not case.drops:
        assert set(serve(order, 0, 2).samples) == set(case.samples)


def a_report_counts_on_over_resizings(case: OrderCase) -> None:
    """A report is plain data, and does not depend on when a plan was made."""
    served = serve(case.order, 0, 3, count=2)
    told = served.plan.report_after(len(served.steps))

    assert json.loads(json.dumps(told)) == told != served.plan.report_after(0)
    for num_replicas in (3, 2):
        assert case.order.plan(0, num_replicas, served.progress[-1]).report_after(0) == told


def progress_beyond_the_end_is_refused(case: OrderCase) -> None:
    """A run on more data cannot go on where this order has nothing left."""
    if case.longer is None:
        return
    progress = serve(case.longer, 0, 1).progress[-1]
    with pytest.raises(PositionError):
        case.order.plan(0, 1, progress)


LAWS: tuple[Callable[[OrderCase], None], ...] = (
    it_is_an_order_that_describes_itself_in_plain_data,
    an_epoch_is_dealt_out_once_over_any_ranks,
    ranks_take_the_steps_that_the_plan_counts,
    a_plan_from_any_progress_is_the_rest,
    batches_from_a_later_step_are_the_rest,
    a_chain_of_resizings_serves_every_sample_once,
    a_number_tells_a_batch_from_all_others_of_its_epoch,
    progress_counts_up_within_its_epoch_and_survives_json,
    later_passes_of_an_epoch_are_whole_and_draw_anew,
    another_epoch_begins_anew_unless_epochs_carry_over,
    epochs_seeds_and_paths_have_sequences_of_their_own,
    an_unshuffled_order_serves_the_same_in_every_epoch,
    a_report_counts_on_over_resizings,
    progress_beyond_the_end_is_refused,
)
every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
