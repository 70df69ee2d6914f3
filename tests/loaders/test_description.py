"""The order that is read from the arguments of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.samplers import GlobalRandom, KeepsItsPlace, OwnState
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as TorchdataBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful.core.samples import SequentialOrder, ShuffledOrder
from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.loaders import StatefulLoader, patch_dataloader
from lightning_stateful.samplers import RoundRobinBatchSampler, StatefulDistributedSampler

DATA = list(range(22))
WEIGHTS = [0.0, 1.0, 2.0, 3.0]


class Reversed(SequentialSampler):
    """A subclass of one of torch's may yield anything."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class OneBack(KeepsItsPlace):
    """Beyond ``first`` it goes on one too early."""

    def __init__(self, first: int) -> None:
        super().__init__(200)
        self.first = first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"] - (state["place"] > self.first)


def patched(**options: Any) -> StatefulLoader:
    return patch_dataloader(DataLoader(DATA, **options), seed=7)


def samples_of(loader: StatefulLoader) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, SequentialOrder(22)),
        ({"shuffle": True, "generator": torch.Generator()}, ShuffledOrder(22, 7)),
        ({"shuffle": True, "batch_size": None}, ShuffledOrder(22, 7)),
        ({"sampler": SequentialSampler(DATA[:4])}, SequentialOrder(4)),
        ({"sampler": RandomSampler(DATA)}, ShuffledOrder(22, 7)),
        ({"sampler": TorchdataRandomSampler(DATA)}, ShuffledOrder(22, 7)),
        ({"sampler": StatefulDistributedSampler(DATA, 2, 1, seed=8)}, ShuffledOrder(22, 8)),
        ({"sampler": StatefulDistributedSampler(DATA, 2, 1, shuffle=False)}, SequentialOrder(22)),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 2, True)}, SequentialOrder(22)),
        ({"batch_sampler": TorchdataBatchSampler(TorchdataRandomSampler(DATA), 2, True)}, ShuffledOrder(22, 7)),
    ],
)
def test_all_samples_in_turn_or_shuffled_as_a_whole_are_a_plain_order(options: dict[str, Any], samples: Any) -> None:
    assert patched(**options).order.samples == samples


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(DATA, replacement=True, num_samples=13),
        lambda: RandomSampler(DATA, generator=torch.Generator()),
        lambda: WeightedRandomSampler(WEIGHTS, 30),
        lambda: TorchdataDistributedSampler(DATA, 1, 0, shuffle=False),
        lambda: Reversed(DATA),
        GlobalRandom,
    ],
)
def test_any_other_sampler_runs_as_it_is(make: Any) -> None:
    loader = patched(sampler=make(), batch_size=4)
    state = loader.state_dict()

    assert state["kind"] == "sampler"
    assert state["config"]["sampler"]["class"] == type(make()).__name__
    assert len(samples_of(loader)) == len(list(make()))


def test_what_a_generator_that_a_sampler_holds_has_drawn_before_does_not_matter() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    found = [list(patched(sampler=RandomSampler(DATA, generator=generator))) for generator in generators]

    assert str(found[0]) == str(found[1])


class TestContradictions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"in_order": False, "num_workers": 1}, "in_order=False hands batches over in no fixed order"),
            ({"sampler": Reversed(DATA), "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
            ({"batch_sampler": [[0, 1]], "batch_size": 3}, "batch_sampler option is mutually exclusive with"),
            ({"num_replicas": 2, "rank": 2}, r"rank must be in range\(2\), got 2"),
            ({"sampler": 3}, "int cannot be iterated"),
        ],
    )
    def test_arguments_that_contradict_each_other_or_are_out_of_range_are_refused(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            StatefulLoader(DATA, **options)

    def test_whole_batches_cannot_promise_to_repeat_nothing(self) -> None:
        sampler = RoundRobinBatchSampler([12, 10], 2)
        for batches in (sampler, sampler.tracker.order):
            with pytest.raises(ConfigurationError, match="exact=True never repeats a sample"):
                StatefulLoader(DATA, batch_sampler=batches, exact=True)


def test_a_state_of_the_samplers_own_that_is_not_used_is_named() -> None:
    said = "Its own state is not used"

    assert said in patched(sampler=OneBack(0)).resume_note
    assert said not in patched(sampler=OwnState()).resume_note
    assert said not in patched(sampler=GlobalRandom()).resume_note


def test_a_state_of_the_samplers_own_that_misleads_later_is_named_in_the_refusal() -> None:
    loader, fresh = (patch_dataloader(DataLoader(range(200), 10, sampler=OneBack(100))) for _ in range(2))
    batches = iter(loader)
    for _ in range(15):
        next(batches)
    fresh.load_state_dict(loader.state_dict())

    with pytest.raises(StateMismatchError, match=r"See that OneBack\.load_state_dict leads back to this very item"):
        next(iter(fresh))
