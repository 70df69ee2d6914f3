"""A loader over batches of like lengths: its dataset, workers, plain DataLoaders and patched ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.loaders import StatefulLoader, take_over
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

LENGTHS = [random.Random(seed).randint(1, 12) for seed in range(60)]
Draws = list[list[tuple[int, float]]]


class Noisy(Dataset[tuple[int, float]]):
    """Every sample draws from torch, NumPy and random."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(1, dtype=torch.double).item() + np.random.rand() + random.random()


class Tokens(Dataset[torch.Tensor]):
    """Samples as long as they are said to be."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LENGTHS[index],), index)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def make(**options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(LENGTHS, **{"max_tokens": 30, "num_buckets": 3, **options})


def a_loader(sampler: Any = None, **options: Any) -> StatefulLoader:
    return StatefulLoader(Noisy(), batch_sampler=make() if sampler is None else sampler, **options)


def draws(batches: Any) -> Draws:
    return [[(int(index), float(drawn)) for index, drawn in zip(*batch, strict=True)] for batch in batches]


def indices(batches: Any) -> list[list[int]]:
    return [[index for index, _ in batch] for batch in draws(batches)]


class TestBatches:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_loader_serves_the_batches_of_its_sampler_epoch_by_epoch(self, rank: int) -> None:
        sampler, loader = (make(num_replicas=2, rank=rank) for _ in range(2))
        loader = a_loader(loader)

        for _ in range(3):
            assert indices(loader) == list(sampler)
            assert len(loader) == len(sampler)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_no_batch_is_longer_than_its_budget_when_it_is_padded(self, num_workers: int) -> None:
        loader = StatefulLoader(Tokens(), batch_sampler=make(), collate_fn=pad, num_workers=num_workers)
        batches = list(loader)

        assert max(batch.numel() for batch in batches) <= 30
        assert sum(int((batch >= 0).sum()) for batch in batches) == sum(LENGTHS)

    @pytest.mark.parametrize("length", [59, 61])
    def test_a_dataset_of_another_length_is_refused_with_both_numbers(self, length: int) -> None:
        for batches in (make(), make().tracker.order):
            with pytest.raises(ConfigurationError, match=f"There are 60 lengths, and the dataset has {length} samples"):
                StatefulLoader(range(length), batch_sampler=batches)


class TestStates:
    def refusal(self, state: dict[str, Any], loader: StatefulLoader) -> set[str]:
        before = loader.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        return {difference.path for difference in caught.value.differences}

    def test_another_dataset_of_the_same_lengths_is_refused(self) -> None:
        class Other(Noisy):
            def describe(self) -> dict[str, Any]:
                return {"version": 2}

        other = StatefulLoader(Other(), batch_sampler=make())

        assert self.refusal(a_loader().state_dict(), other) == {"dataset.version"}

    def test_a_state_of_the_sampler_alone_is_refused_only_for_what_it_does_not_say(self) -> None:
        assert self.refusal(make().state_dict(), a_loader(make())) == {"dataset"}
        loader = a_loader(make(), accept="dataset")
        loader.load_state_dict(make().state_dict(num_batches=4))

        assert indices(loader) == list(make())[4:]

    def test_what_the_sampler_accepts_the_loader_accepts(self) -> None:
        state = a_loader(make()).state_dict()
        loader = a_loader(make(max_tokens=40, accept="max_tokens"))
        loader.load_state_dict(state)

        assert indices(loader) == list(make(max_tokens=40))


class TestTakenOver:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_loader_taken_over_serves_what_it_would_and_resumes(self, num_workers: int) -> None:
        loader, fresh = (
            take_over(DataLoader(Noisy(), batch_sampler=make(), num_workers=num_workers), seed=4) for _ in range(2)
        )
        batches = iter(loader)
        begun = draws(next(batches) for _ in range(4))
        fresh.load_state_dict(loader.state_dict())
        rest = draws(fresh)

        assert [[index for index, _ in batch] for batch in begun + rest] == list(make())
        assert draws(batches) == rest
