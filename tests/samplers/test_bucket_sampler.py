"""A sampler of batches of like lengths goes on from any state, and takes no state and no argument but its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.bucketing import QuadraticCost
from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

LENGTHS = [*np.random.default_rng(5).integers(1, 41, 149).tolist(), 40]


def make(lengths: Any = LENGTHS, **options: Any) -> BucketBatchSampler:
    budget = {} if "batch_size" in options else {"max_tokens": 100}
    buckets = {} if "boundaries" in options else {"num_buckets": 4}
    return BucketBatchSampler(lengths, **{**budget, **buckets, **options})


def take(sampler: BucketBatchSampler, count: int) -> list[list[int]]:
    batches = iter(sampler)
    return [next(batches) for _ in range(count)]


def epochs(sampler: BucketBatchSampler, count: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(count)]


def resumed(state: dict[str, Any], **options: Any) -> BucketBatchSampler:
    sampler = make(**options)
    sampler.load_state_dict(state)
    return sampler


def state_after(count: int, **options: Any) -> dict[str, Any]:
    sampler = make(**options)
    take(sampler, count)
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"max_tokens": None}, "either max_tokens or batch_size, got max_tokens=None, batch_size=None"),
            ({"max_tokens": 30}, r"\d+ of 150 samples are longer than max_tokens=30 allows; the longest has 40"),
            ({"seed": 1.5}, "seed must be an integer, got 1.5"),
            ({"num_replicas": 2, "rank": 2}, "rank"),
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused_with_its_value(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            make(**options)

    def test_only_its_lengths_are_passed_without_a_name(self) -> None:
        with pytest.raises(TypeError):
            BucketBatchSampler(LENGTHS, 100)  # type: ignore[misc]  # the very mistake

    def test_integers_of_numpy_are_as_good_as_pythons(self) -> None:
        plain = make(max_tokens=200, multiple=2, seed=3, max_samples=9, boundaries=[10, 40])
        numpy = make(
            np.array(LENGTHS, dtype=np.uint8),
            max_tokens=np.int32(200),
            multiple=np.uint8(2),
            seed=np.int64(3),
            max_samples=np.int64(9),
            boundaries=np.array([10, 40]),
        )

        assert json.dumps(numpy.state_dict()) == json.dumps(plain.state_dict())
        assert list(numpy) == list(plain)

    def test_a_file_of_lengths_stays_memory_mapped(self, tmp_path: Path) -> None:
        np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.uint16))
        for path in (tmp_path / "lengths.npy", str(tmp_path / "lengths.npy")):
            sampler = make(path)
            assert isinstance(sampler.order.lengths.base, np.memmap)  # type: ignore[attr-defined]  # a BucketOrder
            assert list(sampler) == list(make())

    def test_samples_left_out_are_counted(self) -> None:
        longer = {index for index, length in enumerate(LENGTHS) if length > 30}
        sampler = make(max_tokens=30, too_long="drop")

        assert (sampler.num_dropped, make().num_dropped) == (len(longer), 0)
        assert {index for batch in sampler for index in batch} == set(range(150)) - longer

    def test_the_seed_is_that_of_seed_everything_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PL_GLOBAL_SEED", "9")

        assert list(make()) == list(make(seed=9)) != list(make(seed=0))

    def test_unshuffled_the_longest_bucket_comes_first_in_every_epoch(self) -> None:
        first, second = epochs(make(boundaries=[10, 25, 40], shuffle=False), 2)
        of_batch = [np.searchsorted([10, 25, 40], max(LENGTHS[index] for index in batch)) for batch in first]

        assert first == second
        assert of_batch == sorted(of_batch, reverse=True)
        assert set(of_batch) == {0, 1, 2}


class TestEpochs:
    def test_other_samples_meet_in_every_epoch(self) -> None:
        first, second = ({frozenset(batch) for batch in batches} for batches in epochs(make(), 2))

        assert len(first & second) < len(first) // 4

    def test_iterating_draws_nothing_from_global_generators(self) -> None:
        before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
        list(make())

        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


class TestResizing:
    def test_however_often_it_is_resized_a_state_stays_small_and_exact(self) -> None:
        longer = LENGTHS * 20
        state, served = make(longer).state_dict(), 0
        for number in range(40):
            ranks = 1 + number % 3
            samplers = [resumed(state, lengths=longer, num_replicas=ranks, rank=rank) for rank in range(ranks)]
            assert samplers[0].position_report() == {"epoch": 0, "samples": served}
            served += sum(len(take(sampler, 1)[0]) for sampler in samplers)
            state = samplers[-1].state_dict()

        assert state["progress"]["epoch"] == 0
        assert samplers[0].position_report()["samples"] == served
        assert len(json.dumps(state)) < 1024


class TestRefusedStates:
    def refusal(self, state: dict[str, Any], other: BucketBatchSampler) -> dict[str, tuple[Any, Any]]:
        before = other.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            other.load_state_dict(state)
        assert other.state_dict() == before
        return {each.path: (each.saved, each.present) for each in caught.value.differences}

    def test_every_difference_is_named_at_once_with_a_remedy(self) -> None:
        with pytest.raises(StateMismatchError, match=r"4 differences") as caught:
            make(num_buckets=7, max_tokens=90, seed=2, drop_last=True).load_state_dict(state_after(3))

        assert {each.path for each in caught.value.differences} == {"num_buckets", "max_tokens", "seed", "drop_last"}
        assert all("accept=(" in each.remedy for each in caught.value.differences)

    def test_other_lengths_are_named_by_number_and_digest(self) -> None:
        assert self.refusal(state_after(3), make([*LENGTHS[1:], LENGTHS[0]])).keys() == {"lengths.digest"}
        assert self.refusal(state_after(3), make([*LENGTHS, 3])).keys() == {"lengths.digest", "lengths.samples"}


CHANGES = [{"max_tokens": 200}, {"cost": QuadraticCost(50)}, {"seed": 4}]
NAMES = {"cost": "quadratic_length"}


class TestAcceptedChanges:
    @pytest.mark.parametrize("options", CHANGES, ids=str)
    def test_at_the_beginning_of_an_epoch_a_change_is_let_pass(self, options: dict[str, Any]) -> None:
        (name,) = (NAMES.get(key, key) for key in options)
        old = make()
        fresh = resumed(old.state_dict(num_batches=len(old)), accept=(name,), **options)

        assert fresh.epoch == 1
        assert list(fresh) == epochs(make(**options), 2)[1]

    @pytest.mark.parametrize("options", CHANGES, ids=str)
    def test_within_an_epoch_it_is_refused_whatever_is_accepted(self, options: dict[str, Any]) -> None:
        (name,) = (NAMES.get(key, key) for key in options)
        sampler = make(accept=(name, "lengths"), **options)
        before = sampler.state_dict()
        with pytest.raises(StateMismatchError, match="cannot change within an epoch") as caught:
            sampler.load_state_dict(state_after(1))

        assert [difference.path for difference in caught.value.differences] == [name]
        assert sampler.state_dict() == before

    def test_other_lengths_are_let_pass_between_epochs_only(self) -> None:
        old, other = make(), [*LENGTHS, 7, 7, 30]
        fresh = make(other, accept="lengths")
        fresh.load_state_dict(old.state_dict(num_batches=len(old)))

        assert sorted(index for batch in fresh for index in batch) == list(range(153))
        with pytest.raises(StateMismatchError, match="cannot change within an epoch"):
            make(other, accept="lengths").load_state_dict(state_after(1))
