"""What a user's sampler yields is dealt out to ranks: every slot once, in equal numbers of steps, from any position."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from lightning_stateful.audit import check_resume
from lightning_stateful.core.steps import StepRule
from lightning_stateful.core.topology import split_evenly
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.position import Position
from lightning_stateful.samplers import DDPSamplerWrapper
from lightning_stateful.samplers.sampler_plan import SamplerCut, SamplerPlan
from lightning_stateful.samplers.user_sampler import UserSampler


class Items(Sampler[Any]):
    """So many items, with or without saying so, in an order of the global generator."""

    def __init__(self, items: list[Any], sized: bool = True) -> None:
        self.items, self.sized = items, sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no len")
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(random.sample(self.items, len(self.items)))


class InOrder(Items):
    """The same, in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.items))


class Cuts:
    """A batch that is no list: it is added to others, and splits itself."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __add__(self, other: Cuts) -> Cuts:
        return Cuts(*self.names, *other.names)

    def split(self, count: int) -> list[Cuts]:
        """So many parts, the sizes of which are as even as it goes."""
        parts = [split_evenly(len(self), count, number) for number in range(count)]
        return [Cuts(*self.names[part.start : part.stop]) for part in parts]


def plan_of(
    sampler: Any, ranks: int, rank: int, *, whole_batches: bool = False, is_collated: bool = False, **rule: Any
) -> SamplerPlan:
    rules = StepRule(**{"batch_size": 1, "num_replicas": ranks, **rule})
    order = UserSampler(sampler, whole_batches=whole_batches, is_collated=is_collated)
    return SamplerPlan(order=order, rule=rules, rank=rank)


def rest(sampler: Any, ranks: int, position: Position, **options: Any) -> list[list[Any]]:
    """What every rank is given from a position on."""
    return [list(plan_of(sampler, ranks, rank, **options).indices(position)) for rank in range(ranks)]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("seed", range(10))
def test_steps_of_samples_are_those_of_the_rule_from_any_slot(seed: int, sized: bool) -> None:
    drawn = random.Random(seed)
    length, ranks, batch_size = drawn.randrange(1, 60), drawn.randrange(1, 6), drawn.randrange(1, 5)
    options = drawn.choice([{}, {"drop_last": True}, {"pad": True}, {"exact": True}])
    consumed = drawn.randrange(length)
    rule = StepRule(batch_size=batch_size, num_replicas=ranks, **options)  # type: ignore[arg-type]
    expected: list[list[list[int]]] = [[] for _ in range(ranks)]
    left = length - consumed
    while rule.num_steps(left):
        for rank, batches in enumerate(expected):
            batches.append((length - left + rule.share(left, rank)).tolist())
        left -= rule.step_size(left)
    found = rest(
        InOrder(list(range(length)), sized), ranks, Position(consumed=consumed), batch_size=batch_size, **options
    )

    assert found == expected


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("seed", range(10))
def test_whole_batches_give_every_sample_once_in_equal_numbers_of_steps(seed: int, sized: bool) -> None:
    drawn = random.Random(seed)
    samples, batches = iter(range(10**6)), []
    for _ in range(drawn.randrange(1, 14)):
        batches.append([next(samples) for _ in range(drawn.randrange(1, 5))])
    ranks, exact = drawn.randrange(1, 6), drawn.random() < 0.5
    consumed = drawn.randrange(len(batches))
    found = rest(InOrder(batches, sized), ranks, Position(consumed=consumed), whole_batches=True, exact=exact)
    due = [sample for batch in batches[consumed:] for sample in batch]
    served = Counter(sample for of_rank in found for batch in of_rank for sample in batch)

    assert len({len(of_rank) for of_rank in found}) == 1
    assert set(served) == set(due)
    assert all(batch for of_rank in found for batch in of_rank)
    # Only samples that are left for the last step, fewer than ranks, come twice.
    tail = batches[consumed:][(len(batches) - consumed) // ranks * ranks :]
    assert served.total() == len(due) or sum(map(len, tail)) < ranks


@pytest.mark.parametrize("seed", range(10))
def test_a_sampler_resumes_on_other_numbers_of_ranks(seed: int) -> None:
    drawn = random.Random(seed)
    length, sized = drawn.randrange(1, 40), drawn.random() < 0.5
    items: list[Any] = list(range(length))
    if seed % 2:
        items = [[3 * index + offset for offset in range(drawn.randrange(1, 4))] for index in range(length)]
    ranks = drawn.randrange(1, 6)
    resize = drawn.sample(range(1, 8), 2)
    shuffles = drawn.random() < 0.5

    def make(num_replicas: int, rank: int) -> DDPSamplerWrapper:
        sampler = Items(items, sized)
        return DDPSamplerWrapper(sampler, num_replicas, rank, shuffle_samples_between_gpus=shuffles, seed=seed)

    result = check_resume(make, num_replicas=ranks, resize=resize)
    assert result, str(result)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_padded_or_cut_sampler_resumes_exactly(seed: int, tail: Any) -> None:
    drawn = random.Random(seed)
    items, sized, ranks = list(range(drawn.randrange(1, 40))), drawn.random() < 0.5, drawn.randrange(1, 6)
    result = check_resume(
        lambda num_replicas, rank: DDPSamplerWrapper(Items(items, sized), num_replicas, rank, tail=tail),
        num_replicas=ranks,
        stops="every",
    )
    assert result, str(result)


@pytest.mark.parametrize(
    "batch",
    [(7, 8, 9), np.array([7, 8, 9]), torch.tensor([7, 8, 9]), range(7, 10)],
    ids=["tuple", "array", "tensor", "range"],
)
def test_batches_of_all_kinds_are_split_in_the_last_step(batch: Any) -> None:
    found = rest(InOrder([batch]), 2, Position(), whole_batches=True, is_collated=True)

    assert found == [[[7, 8]], [[9]]]


def test_a_tuple_names_one_sample_unless_it_is_known_for_a_batch() -> None:
    assert rest(InOrder([(7, 8)]), 2, Position(), whole_batches=True) == [[(7, 8)]] * 2


def named(found: list[list[Any]]) -> list[list[tuple[str, ...]]]:
    return [[batch.names for batch in batches] for batches in found]


@pytest.mark.parametrize(
    ("batches", "last"),
    [
        ([Cuts(*"abcde")], ["ab", "cd", "e"]),
        ([Cuts(*"abc"), Cuts(*"d")], ["ab", "c", "d"]),
        ([Cuts("a"), Cuts("b")], ["a", "b", "a"]),
        ([Cuts("a")], ["a", "a", "a"]),
    ],
    ids=["one", "two", "two with fewer samples than ranks", "one with fewer samples than ranks"],
)
@pytest.mark.parametrize("before", [[], [Cuts(*"uv"), Cuts("w"), Cuts(*"xyz")]], ids=["", "after a full step"])
def test_batches_that_split_themselves_are_joined_and_split_in_the_last_step(
    before: list[Any], batches: list[Any], last: list[str]
) -> None:
    found = rest(InOrder([*before, *batches]), 3, Position(), whole_batches=True)
    full = [[batch.names] for batch in before] or [[], [], []]

    assert named(found) == [[*own, tuple(part)] for own, part in zip(full, last, strict=True)]


def test_the_parts_of_a_batch_that_is_split_have_numbers_of_their_own() -> None:
    ranks = [plan_of(InOrder([[7, 8, 9]]), 2, rank, whole_batches=True, is_collated=True) for rank in (0, 1)]

    assert [list(plan.numbered(Position())) for plan in ranks] == [[(0, [7, 8])], [(1, [9])]]


def test_batches_that_split_themselves_are_padded_whole() -> None:
    found = rest(InOrder([Cuts(*"abc")]), 2, Position(), whole_batches=True, pad=True)

    assert named(found) == [[("a", "b", "c")]] * 2


@pytest.mark.parametrize(
    "batch",
    [
        "abc",
        {7, 8},
        {"a": 1},
        b"abc",
        torch.tensor(3),
    ],
    ids=["text", "set", "dict", "bytes", "a number in a tensor"],
)
def test_a_batch_that_cannot_be_split_is_served_twice(batch: Any) -> None:
    assert rest(InOrder([batch]), 2, Position(), whole_batches=True) == [[batch], [batch]]


def test_whole_batches_pass_as_they_are() -> None:
    batches = [(3, 4), "text", {"a": 5}, 6, range(2), Cuts("a")]
    found = rest(InOrder(batches), 1, Position(), whole_batches=True)[0]

    assert all(mine is yours for mine, yours in zip(found, batches, strict=True))


@pytest.mark.parametrize("batch", [np.array([1, 2]), torch.tensor([1, 2]), [1, 2]], ids=["array", "tensor", "list"])
def test_batches_that_could_be_filled_anew_pass_as_copies_of_their_kind(batch: Any) -> None:
    found = rest(InOrder([batch]), 1, Position(), whole_batches=True)[0][0]

    assert found is not batch
    assert type(found) is type(batch)
    assert list(found) == list(batch)


def test_a_list_that_is_changed_by_whoever_gets_it_is_not_the_samplers() -> None:
    sampler = InOrder([[1, 2], [3]])
    for batch in rest(sampler, 1, Position(), whole_batches=True)[0]:
        batch.clear()

    assert sampler.items == [[1, 2], [3]]


def test_shuffling_between_ranks_moves_slots_within_their_step_only() -> None:
    ranks = [
        DDPSamplerWrapper(InOrder(list(range(20))), 4, rank, shuffle_samples_between_gpus=True) for rank in range(4)
    ]
    steps = list(zip(*ranks, strict=True))

    assert [sorted(step) for step in steps] == [list(range(start, start + 4)) for start in range(0, 20, 4)]
    assert len({tuple(slot % 4 for slot in step) for step in steps}) > 1


def test_shuffling_between_ranks_changes_with_the_epoch() -> None:
    sampler = DDPSamplerWrapper(InOrder(list(range(40))), 4, 0, shuffle_samples_between_gpus=True)

    assert list(sampler) != list(sampler)


def test_another_tail_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tail must be one of .* got 'wrap'"):
        SamplerCut(order=UserSampler([1, 2]), tail="wrap")  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "repeated"), [(8, 0), (7, 1), (2, 2)])
def test_what_is_served_twice_is_told_where_the_length_is_known(length: int, repeated: int) -> None:
    repeats = plan_of(InOrder(list(range(length))), 4, 0).repeats()

    assert len(repeats) == bool(repeated)
    assert plan_of(InOrder(list(range(length)), sized=False), 4, 0).repeats() == []
