"""A stream's order and plans keep the protocol that loaders, samplers and the group of loaders are built on."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from support.stream_cases import SIZES, chunks, numbers, plain, saved, stream_loader

from lightning_stateful.core import UNKNOWN, Progress
from lightning_stateful.errors import ConfigurationError, PositionError, StateMismatchError


def batches(loader: Any, plan: Any, first_step: int = 0) -> list[Any]:
    return [plain(batch) for batch in loader.batches(plan, first_step)]


def stored(progress: Progress) -> Progress:
    """A progress as it comes out of a checkpoint."""
    return Progress.from_dict(json.loads(json.dumps(progress.to_dict())))


@pytest.fixture
def loader() -> Any:
    return stream_loader(chunks())


@pytest.fixture(scope="module")
def whole() -> list[list[Any]]:
    """The batches of three epochs."""
    other = stream_loader(chunks())
    return [[plain(batch) for batch in other] for _ in range(3)]


def test_a_plan_gives_the_batches_of_its_epoch_from_any_step_and_moves_nothing(loader: Any, whole: Any) -> None:
    before, plan = saved(loader), loader.plan(0)

    assert batches(loader, plan) == whole[0]
    assert batches(loader, plan, 4) == whole[0][4:]
    assert saved(loader) == before


def test_the_number_of_steps_is_known_when_the_last_batch_is_handed_over(loader: Any, whole: Any) -> None:
    plan = loader.plan(0)
    known = []
    for _ in loader.batches(plan):
        known.append(plan.num_steps)

    total = len(whole[0])
    assert known == [UNKNOWN] * (total - 1) + [total]
    # Of another plan of this epoch too.
    assert loader.plan(0, plan.progress_after(3)).num_steps == total - 3


def test_a_run_is_a_chain_of_plans_and_progress_through_files(whole: Any) -> None:
    found, progress = [], None
    for steps in (4, 3, None):
        loader = stream_loader(chunks())
        plan = loader.plan(0, progress)
        read = loader.batches(plan)
        found += [plain(batch) for batch, _ in zip(read, range(steps or 99), strict=False)]
        progress = None if steps is None else stored(plan.progress_after(steps))

    assert found == whole[0]
    loader = stream_loader(chunks())
    rest = loader.plan(0, stored(plan.progress_after(plan.num_steps - 1)))
    assert batches(loader, rest) == whole[0][-1:]
    assert batches(loader, loader.plan(1, rest.progress_after(rest.num_steps))) == whole[1]


def test_an_epoch_of_so_many_steps_is_followed_by_what_comes_next(whole: Any) -> None:
    first, second = (stream_loader(chunks(), steps_per_epoch=5) for _ in range(2))
    plan = first.plan(0)
    assert batches(first, plan) == whole[0][:5]
    assert batches(second, second.plan(1, stored(plan.progress_after(5)))) == whole[0][5:10]


def test_a_state_at_a_progress_is_the_state_of_a_loader_that_stands_there(loader: Any) -> None:
    iterator, plan, states = iter(loader), loader.plan(0), []
    for _ in range(4):
        next(iterator)
        states.append(saved(loader))

    assert [loader.tracker.state_dict(plan.progress_after(step)) for step in range(1, 5)] == states
    known = [loader.plan(0, Progress(consumed=step)).progress_after(0) for step in range(1, 5)]
    assert [loader.tracker.state_dict(progress) for progress in known] == states
    assert states[3]["progress"] == plan.progress_after(4).to_dict()


def test_a_report_tells_steps_and_the_pass(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator), next(iterator)

    report = loader.plan(0).report_after(2)
    assert loader.position_report() == {"epoch": 0, **report}
    assert (report["batches"], report["pass"], report["shards_left"]) == (2, 0, len(SIZES))


def test_a_plan_that_is_read_can_be_pickled_and_its_copy_reads_the_epoch_itself(whole: Any) -> None:
    loader = stream_loader(chunks(), num_workers=1)
    plan = loader.plan(0)
    read = loader.batches(plan)
    first = plain(next(read))
    twin = pickle.loads(pickle.dumps(plan))

    assert list(map(plain, twin.read())) == whole[0]
    assert [first, *map(plain, read)] == whole[0]


def test_where_nobody_was_is_not_known(loader: Any) -> None:
    with pytest.raises(PositionError, match=r"before step 3 of epoch 0 is not known.*Resume from a checkpoint"):
        dict(loader.plan(0, Progress(consumed=3)).progress_after(0).details)
    loader.order.begin_at(Progress(consumed=3))
    assert dict(loader.plan(0, Progress(consumed=3)).progress_after(0).details)["pass"] == 0


def test_an_epoch_may_end_where_others_do_and_the_next_goes_on(loader: Any, whole: Any) -> None:
    plan = loader.plan(0)
    read = loader.batches(plan)
    for _ in range(3):
        next(read)
    loader.order.end_at(plan.progress_after(3))

    assert loader.order.ended == (0, 3)
    assert plan.num_steps == 3
    assert batches(loader, loader.plan(1)) == whole[0][3:]


def test_other_ranks_than_those_it_is_read_on_are_refused(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="is read on 1 ranks and cannot be planned for 2"):
        loader.order.plan(0, 2)


def test_there_are_no_indices(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has no indices.*loader\.batches\(plan\)"):
        loader.plan(0).batches(0)


def test_a_progress_of_other_ranks_goes_on_with_what_is_left() -> None:
    taken: list[Any] = []
    for rank in range(2):
        loader = stream_loader(chunks(), num_replicas=2, rank=rank)
        iterator = iter(loader)
        taken += [plain(next(iterator)) for _ in range(2)]
    alone = stream_loader(chunks())

    # In one process ranks know nothing of each other, so nobody knows what is left.
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2, now 1"):
        alone.plan(0, stored(loader.tracker.progress))
    at_the_beginning = stored(stream_loader(chunks(), num_replicas=2, rank=0).plan(0).progress_after(0))
    assert sum(numbers(batches(alone, alone.plan(0, at_the_beginning))).values()) == sum(SIZES)
