"""A sampler of batches of like lengths goes on from any position, and takes no state and no argument but its own."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.audit import check_resume
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    PositionError,
    StateError,
    StateMismatchError,
)
from lightning_stateful.index.budget import QuadraticCost
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.buckets import BucketBatchSampler

LENGTHS = [*np.random.default_rng(5).integers(1, 41, 149).tolist(), 40]
KEYS = [index % 4 for index in range(len(LENGTHS))]
Make = Callable[..., StatefulBatchSampler]


def buckets(lengths: Any = LENGTHS, **options: Any) -> BucketBatchSampler:
    budget = {} if "batch_size" in options else {"max_tokens": 100}
    return BucketBatchSampler(lengths, **{**budget, **options})


def windows(lengths: Any = LENGTHS, **options: Any) -> BucketBatchSampler:
    return buckets(lengths, **{"window": 40, **options})


MAKES: dict[str, Make] = {
    "buckets": lambda **options: buckets(num_buckets=4, **options),
    "batch sizes": lambda **options: buckets(batch_size=[8, 5, 2], boundaries=[10, 25, 40], **options),
    "windows": windows,
    "windows, keys": lambda **options: windows(**{"boundary_key": KEYS, **options}),
}
WITH_KEYS = MAKES["windows, keys"]
every_kind = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def take(sampler: StatefulBatchSampler, count: int) -> list[list[int]]:
    batches = iter(sampler)
    return [next(batches) for _ in range(count)]


def epochs(sampler: StatefulBatchSampler, count: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(count)]


def resumed(make: Make, state: dict[str, Any], **options: Any) -> StatefulBatchSampler:
    sampler = make(**options)
    sampler.load_state_dict(state)
    return sampler


def state_after(make: Make, count: int, **options: Any) -> dict[str, Any]:
    sampler = make(**options)
    take(sampler, count)
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"max_tokens": None}, "either max_tokens or batch_size, got max_tokens=None, batch_size=None"),
            ({"max_tokens": 9, "batch_size": 2}, "either max_tokens or batch_size"),
            ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
            ({"max_tokens": -3}, "max_tokens must be at least 1, got -3"),
            ({"max_tokens": 9.5}, "max_tokens must be an integer, got 9.5"),
            ({"max_tokens": "90"}, "max_tokens must be an integer, got '90'"),
            ({"max_tokens": True}, "max_tokens must be at least 1, got True"),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"batch_size": 2.0}, "batch_size must be an integer, got 2.0"),
            ({"batch_size": "2"}, "batch_size must be an integer, got '2'"),
            ({"batch_size": []}, "Several batch sizes belong to given boundaries"),
            ({"batch_size": [4, 2], "boundaries": [10, 25, 40]}, r"names 2 buckets, and there are 3, .*\(10, 25, 40\)"),
            ({"batch_size": [2, 4], "boundaries": [10, 40]}, r"not grow with the length, got \(2, 4\)"),
            ({"batch_size": [4, 0], "boundaries": [10, 40]}, "batch_size must be at least 1, got 0"),
            ({"batch_size": [4, 1.5], "boundaries": [10, 40]}, "batch_size must be an integer, got 1.5"),
            ({"batch_size": [4, 2]}, "Several batch sizes belong to given boundaries; pass these, too"),
            ({"batch_size": [4, 2], "window": 40}, r"batch_size must be an integer, got \[4, 2\]"),
            ({"batch_size": 3, "max_samples": 2}, "max_samples and cost limit batches of max_tokens"),
            ({"batch_size": 3, "cost": QuadraticCost(5)}, "max_samples and cost limit batches of max_tokens"),
            ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
            ({"multiple": 0}, "multiple must be at least 1, got 0"),
            ({"multiple": 2.5}, "multiple must be an integer, got 2.5"),
            ({"cost": 5}, "cost must be a QuadraticCost, got 5"),
            ({"num_buckets": 0}, "num_buckets must be at least 1, got 0"),
            ({"num_buckets": 1.5}, "num_buckets must be an integer, got 1.5"),
            ({"num_buckets": 2, "boundaries": [10, 40]}, "boundaries say how many buckets there are"),
            ({"boundaries": "equal"}, "one of .*least_padding.*equal_counts.*, got 'equal'"),
            ({"boundaries": []}, r"positive and rising, got \[\]"),
            ({"boundaries": [10, 10, 40]}, r"positive and rising, got \[10, 10, 40\]"),
            ({"boundaries": [0, 40]}, r"positive and rising, got \[0, 40\]"),
            ({"boundaries": [1.5, 40]}, "a boundary must be an integer, got 1.5"),
            ({"boundary_key": KEYS}, "boundary_key divides windows; pass window"),
            ({"window": 0}, "window must be at least 1, got 0"),
            ({"window": 2.5}, "window must be an integer, got 2.5"),
            ({"window": 40, "num_buckets": 3}, "window takes the place of buckets"),
            ({"window": 40, "boundaries": "equal_counts"}, "window takes the place of buckets"),
            ({"window": 40, "boundaries": [10, 40]}, "window takes the place of buckets"),
            ({"window": 40, "boundary_key": KEYS[1:]}, "boundary_key has 149 keys for 150 samples"),
            ({"window": 40, "boundary_key": [0.5] * 150}, "boundary_key must be integers, got float64"),
            ({"too_long": "skip"}, "too_long must be one of .*'error', 'drop', 'alone'.*, got 'skip'"),
            ({"max_tokens": 30}, r"\d+ of 150 samples are longer than max_tokens=30 allows; the longest has 40"),
            ({"max_tokens": 30, "window": 40}, r"\d+ of 150 samples are longer than max_tokens=30 allows"),
            ({"seed": 1.5}, "seed must be an integer, got 1.5"),
            ({"seed": "a"}, "seed must be an integer, got 'a'"),
            ({"num_replicas": 2, "rank": 2}, "rank"),
            ({"num_replicas": 0, "rank": 0}, "num_replicas"),
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused_with_its_value(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            buckets(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {"boundaries": 5},
            {"boundaries": np.array([10, 40]), "window": 40},
        ],
        ids=str,
    )
    def test_what_is_no_list_is_refused_clearly(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            buckets(**options)

    def test_batch_sizes_of_buckets_are_multiples_too(self) -> None:
        sampler = buckets(batch_size=[9, 5], boundaries=[10, 40], multiple=4, num_replicas=1, rank=0)

        assert all(len(batch) < 4 or len(batch) % 4 == 0 for batch in list(sampler)[:-1])

    def test_dropping_all_samples_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="would leave no sample"):
            buckets([50, 60], max_tokens=9, too_long="drop")

    def test_only_its_lengths_are_passed_without_a_name(self) -> None:
        with pytest.raises(TypeError):
            BucketBatchSampler(LENGTHS, 100)  # type: ignore[misc]  # the very mistake

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_integers_of_numpy_are_as_good_as_pythons(self, kind: Make) -> None:
        plain = kind(max_tokens=200, multiple=2, seed=3, max_samples=9)
        other = kind(max_tokens=np.int32(200), multiple=np.uint8(2), seed=np.int64(3), max_samples=np.int64(9))

        assert json.dumps(other.state_dict()) == json.dumps(plain.state_dict())
        assert list(other) == list(plain)

    def test_boundaries_may_be_an_array(self) -> None:
        other = buckets(boundaries=np.array([10, 25, 40]))

        assert json.dumps(other.state_dict()) == json.dumps(buckets(boundaries=[10, 25, 40]).state_dict())

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_samples_left_out_and_alone_are_counted(self, kind: Make) -> None:
        longer = sum(length > 30 for length in LENGTHS)
        dropped, alone = (kind(max_tokens=30, too_long=what) for what in ("drop", "alone"))

        assert (dropped.num_dropped, dropped.num_alone) == (longer, 0)
        assert (alone.num_dropped, alone.num_alone) == (0, longer)
        assert (kind().num_dropped, kind().num_alone) == (0, 0)

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_what_is_too_long_is_left_out_or_alone(self, kind: Make) -> None:
        longer = {index for index, length in enumerate(LENGTHS) if length > 30}
        served = {index for batch in kind(max_tokens=30, too_long="drop") for index in batch}
        batches = list(kind(max_tokens=30, too_long="alone"))

        assert served == set(range(150)) - longer
        assert {index for batch in batches for index in batch} == set(range(150))
        assert all(len(batch) == 1 for batch in batches if longer & set(batch))

    def test_batches_of_a_window_hold_samples_of_one_key(self) -> None:
        assert all(len({KEYS[index] for index in batch}) == 1 for batch in MAKES["windows, keys"]())

    def test_every_bucket_has_its_batch_size(self) -> None:
        sizes = {10: 8, 25: 5, 40: 2}
        *batches, _ = MAKES["batch sizes"](num_replicas=1, rank=0)
        for batch in batches:
            longest = max(LENGTHS[index] for index in batch)
            assert len(batch) == next(size for end, size in sizes.items() if longest <= end)

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_unshuffled_every_epoch_is_alike(self, kind: Make) -> None:
        first, second = epochs(kind(shuffle=False), 2)

        assert first == second

    def test_unshuffled_the_longest_bucket_comes_first(self) -> None:
        batches = buckets(boundaries=[10, 25, 40], shuffle=False)
        of_batch = [np.searchsorted([10, 25, 40], max(LENGTHS[index] for index in batch)) for batch in batches]

        assert of_batch == sorted(of_batch, reverse=True)
        assert set(of_batch) == {0, 1, 2}

    def test_unshuffled_windows_follow_the_dataset(self) -> None:
        served = [index for batch in windows(shuffle=False) for index in batch]

        assert all(
            set(served[start : start + 40]) == set(range(150)[start : start + 40]) for start in range(0, 150, 40)
        )

    @every_kind
    def test_another_seed_makes_other_batches(self, make: Make) -> None:
        assert list(make(seed=1)) != list(make(seed=2))


class TestEpochs:
    @every_kind
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_every_sample_is_served_once_and_the_number_of_batches_stays(self, make: Make, ranks: int) -> None:
        samplers = [make(num_replicas=ranks, rank=rank) for rank in range(ranks)]
        for _ in range(3):
            found = [list(sampler) for sampler in samplers]
            assert {len(batches) for batches in found} == {len(samplers[0])}
            assert sorted(index for batches in found for batch in batches for index in batch) == list(range(150))

    @every_kind
    def test_other_samples_meet_in_every_epoch(self, make: Make) -> None:
        first, second = ({frozenset(batch) for batch in batches} for batches in epochs(make(), 2))

        assert len(first & second) < len(first) // 4

    @every_kind
    def test_the_loop_that_sets_every_epoch_trains_as_the_one_that_does_not(self, make: Make) -> None:
        sampler, found = make(), []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(list(sampler))

        assert found == epochs(make(), 3)

    @every_kind
    def test_an_epoch_can_be_chosen_forward_and_backward(self, make: Make) -> None:
        expected, sampler = epochs(make(), 4), make()
        for epoch in (2, 0, 3, 1):
            sampler.set_epoch(epoch)
            assert list(sampler) == expected[epoch]

    @every_kind
    def test_setting_the_same_epoch_keeps_a_loaded_position(self, make: Make) -> None:
        fresh = resumed(make, state_after(make, 3))
        fresh.set_epoch(0)

        assert list(fresh) == epochs(make(), 1)[0][3:]

    @every_kind
    def test_setting_another_epoch_gives_a_loaded_position_up(self, make: Make) -> None:
        fresh = resumed(make, state_after(make, 3))
        fresh.set_epoch(1)

        assert list(fresh) == epochs(make(), 2)[1]

    @every_kind
    def test_setting_another_epoch_gives_a_history_of_ranks_up(self, make: Make) -> None:
        state = state_after(make, 2, num_replicas=3, rank=0)
        fresh = resumed(make, state, num_replicas=1, rank=0)
        take(fresh, 1)
        fresh.set_epoch(2)

        assert fresh.state_dict()["progress"]["since"] == 0
        assert list(fresh) == epochs(make(), 3)[2]

    @every_kind
    def test_a_negative_epoch_is_refused(self, make: Make) -> None:
        with pytest.raises(PositionError, match="got epoch=-1"):
            make().set_epoch(-1)


class TestIterators:
    @every_kind
    def test_an_abandoned_iterator_leaves_the_beginning_of_its_pass(self, make: Make) -> None:
        sampler = make()
        take(sampler, 3)

        assert list(sampler) == epochs(make(), 1)[0]

    @every_kind
    def test_after_a_resume_an_abandoned_iterator_leaves_the_place_of_resuming(self, make: Make) -> None:
        fresh = resumed(make, state_after(make, 2))
        take(fresh, 2)

        assert list(fresh) == epochs(make(), 1)[0][2:]

    @every_kind
    def test_after_a_resume_on_other_ranks_an_abandoned_iterator_leaves_the_place_of_resuming(self, make: Make) -> None:
        state = state_after(make, 2, num_replicas=3, rank=0)
        expected = list(resumed(make, state, num_replicas=2, rank=1))
        fresh = resumed(make, state, num_replicas=2, rank=1)
        take(fresh, 2)

        assert list(fresh) == expected

    @every_kind
    def test_a_state_may_be_loaded_after_iter(self, make: Make) -> None:
        fresh = make()
        late = iter(fresh)
        fresh.load_state_dict(state_after(make, 3))

        assert list(late) == epochs(make(), 1)[0][3:]

    @every_kind
    def test_an_iterator_that_was_replaced_does_not_end_the_epoch(self, make: Make) -> None:
        sampler = make()
        first, second = iter(sampler), iter(sampler)
        next(first)
        next(second)
        list(first)

        assert sampler.epoch == 0
        assert list(resumed(make, sampler.state_dict())) == list(second)


class TestStates:
    @every_kind
    def test_num_batches_leaves_out_what_was_only_fetched(self, make: Make) -> None:
        sampler = make()
        batches = take(sampler, 5)

        assert take(resumed(make, sampler.state_dict(num_batches=2)), 3) == batches[2:]

    @every_kind
    def test_more_batches_than_the_pass_has_are_refused(self, make: Make) -> None:
        for number in (-1, 10**6):
            with pytest.raises(ConfigurationError, match=f"num_batches must be from 0 to .* got {number}"):
                make().state_dict(num_batches=number)

    @every_kind
    def test_a_state_loads_with_weights_only(self, make: Make) -> None:
        file = io.BytesIO()
        torch.save(state_after(make, 3), file)
        file.seek(0)

        assert torch.load(file, weights_only=True) == state_after(make, 3)

    @every_kind
    def test_states_are_equal_on_all_ranks_at_every_step(self, make: Make) -> None:
        ranks = [make(num_replicas=3, rank=rank) for rank in range(3)]
        for _ in zip(*ranks, strict=True):
            states = [json.dumps(sampler.state_dict()) for sampler in ranks]
            assert states[0] == states[1] == states[2]

    @pytest.mark.parametrize(
        "options",
        [
            {"max_tokens": 10**7, "max_samples": 1, "multiple": 8, "cost": QuadraticCost(4096)},
            {"batch_size": [3, 2, 1], "boundaries": [10, 20, 40_000]},
        ],
        ids=["tokens", "batch sizes"],
    )
    def test_after_forty_resizings_a_state_is_under_a_kilobyte(self, options: dict[str, Any]) -> None:
        lengths = np.full(10**6, 39_999, dtype=np.uint16)
        sampler = BucketBatchSampler(lengths, seed=2**40, num_replicas=2, rank=0, **options)
        legs = [(1 + number % 3, 10_000 + number) for number in range(40)]
        since = 2 * sum(steps for _, steps in legs)
        state = tampered(
            sampler.state_dict(), epoch=123, consumed=since + 2, width=2, since=since, history=[*sum(legs, ())]
        )
        sampler.load_state_dict(state)

        assert sampler.state_dict() == state
        assert len(json.dumps(state)) < 1024

    @every_kind
    def test_however_often_it_is_resized_a_state_stays_small_and_exact(self, make: Make) -> None:
        def longer(**options: Any) -> StatefulBatchSampler:
            return make(lengths=LENGTHS * 20, **({"boundary_key": KEYS * 20} if make is WITH_KEYS else {}), **options)

        state, served = longer().state_dict(), 0
        for number in range(40):
            ranks = 1 + number % 3
            samplers = [resumed(longer, state, num_replicas=ranks, rank=rank) for rank in range(ranks)]
            served += sum(len(take(sampler, 1)[0]) for sampler in samplers)
            state = samplers[-1].state_dict()

        assert state["progress"]["epoch"] == 0
        assert samplers[0].position_report()["samples"] == served
        assert len(json.dumps(state)) < 1024

    @every_kind
    def test_a_sampler_can_be_pickled_and_copied_with_its_place(self, make: Make) -> None:
        state = state_after(make, 2, num_replicas=3, rank=0)
        sampler = resumed(make, state, num_replicas=2, rank=1)
        take(sampler, 3)
        for other in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
            assert other.state_dict() == sampler.state_dict()
            assert list(other) == list(resumed(make, state, num_replicas=2, rank=1))

    @every_kind
    def test_iterating_draws_nothing_from_global_generators(self, make: Make) -> None:
        before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
        list(make())

        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


class TestRefusedStates:
    def refusal(self, state: dict[str, Any], other: StatefulBatchSampler) -> dict[str, tuple[Any, Any]]:
        before = other.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            other.load_state_dict(state)
        assert other.state_dict() == before
        return {each.path: (each.saved, each.present) for each in caught.value.differences}

    @pytest.mark.parametrize(
        ("options", "path", "values"),
        [
            ({"max_tokens": 101}, "max_tokens", (100, 101)),
            ({"max_samples": 50}, "max_samples", ("<nothing>", 50)),
            ({"multiple": 2}, "multiple", ("<nothing>", 2)),
            ({"cost": QuadraticCost(99)}, "quadratic_length", ("<nothing>", 99)),
            ({"too_long": "drop"}, "too_long", ("error", "drop")),
            ({"shuffle": False}, "shuffle", (True, False)),
            ({"seed": 3}, "seed", (0, 3)),
            ({"drop_last": True}, "drop_last", (False, True)),
        ],
    )
    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_one_other_setting_is_the_only_difference_named(
        self, kind: Make, options: dict[str, Any], path: str, values: tuple[Any, Any]
    ) -> None:
        options = {"num_buckets": 4, **options} if kind is buckets else options
        make: Make = (lambda **more: buckets(num_buckets=4, **more)) if kind is buckets else windows
        found = self.refusal(state_after(make, 3), kind(**options))

        # Unshuffled, the batches of windows are not shuffled either.
        found.pop("shuffle_batches", None)
        assert found == {path: values}

    @pytest.mark.parametrize(
        ("kind", "options", "path"),
        [
            (buckets, {"num_buckets": 5}, "num_buckets"),
            (buckets, {"num_buckets": 4, "boundaries": "equal_counts"}, "boundaries"),
            (windows, {"window": 41}, "window"),
            (windows, {"shuffle_batches": False}, "shuffle_batches"),
            (windows, {"boundary_key": KEYS}, "boundary_key"),
        ],
    )
    def test_another_way_of_sorting_is_named(self, kind: Make, options: dict[str, Any], path: str) -> None:
        state = state_after(MAKES["buckets"] if kind is buckets else windows, 3)

        assert self.refusal(state, kind(**options)).keys() == {path}

    def test_other_boundaries_of_as_many_buckets_are_named(self) -> None:
        state = state_after(lambda: buckets(boundaries=[10, 25, 40]), 3)

        assert self.refusal(state, buckets(boundaries=[10, 26, 40])).keys() == {"boundaries"}

    def test_other_batch_sizes_of_buckets_are_named(self) -> None:
        other = buckets(batch_size=[8, 4, 2], boundaries=[10, 25, 40])

        assert self.refusal(state_after(MAKES["batch sizes"], 3), other).keys() == {"batch_size"}

    def test_every_difference_is_named_at_once_with_a_remedy(self) -> None:
        with pytest.raises(StateMismatchError, match=r"4 differences") as caught:
            buckets(num_buckets=7, max_tokens=90, seed=2, drop_last=True).load_state_dict(
                state_after(MAKES["buckets"], 3)
            )

        assert {each.path for each in caught.value.differences} == {"num_buckets", "max_tokens", "seed", "drop_last"}
        assert all("accept=(" in each.remedy for each in caught.value.differences)

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_other_lengths_are_named_by_number_and_digest(self, kind: Make) -> None:
        options = {"num_buckets": 4} if kind is buckets else {}
        state = state_after(lambda: kind(**options), 3)

        assert self.refusal(state, kind([*LENGTHS[1:], LENGTHS[0]], **options)).keys() == {"lengths.digest"}
        assert self.refusal(state, kind([*LENGTHS, 3], **options)).keys() == {"lengths.digest", "lengths.samples"}

    @pytest.mark.parametrize(("first", "second"), [("buckets", "windows"), ("windows", "buckets")])
    def test_buckets_and_windows_do_not_take_each_others_states(self, first: str, second: str) -> None:
        assert "kind" in self.refusal(state_after(MAKES[first], 3), MAKES[second]())

    @pytest.mark.parametrize(("first", "second"), [("buckets", "windows"), ("windows", "buckets")])
    def test_that_cannot_be_accepted_either(self, first: str, second: str) -> None:
        every = ("kind", "max_tokens", "num_buckets", "boundaries", "window", "shuffle_batches", "lengths")

        assert self.refusal(state_after(MAKES[first], 3), MAKES[second](accept=every)).keys() == {"kind"}


def tampered(state: dict[str, Any], **position: Any) -> dict[str, Any]:
    return {**state, "progress": {**state["progress"], **position}}


class TestDamagedStates:
    @every_kind
    @pytest.mark.parametrize("key", ["epoch", "consumed", "width", "since", "history or served"])
    def test_a_position_without_one_of_its_keys_is_refused(self, make: Make, key: str) -> None:
        state = state_after(make, 3)
        for name in key.split(" or "):
            state["progress"].pop(name, None)

        with pytest.raises(StateError):
            make().load_state_dict(state)

    @every_kind
    @pytest.mark.parametrize(
        "progress",
        [
            {"history": [1], "served": [1]},
            {"history": [1, 2], "served": [1, 2]},
            {"history": [0, 2], "served": [0, 2]},
            {"history": [1, -2], "served": [1, -2]},
            {"history": [1, 2.0], "served": [1, 2.0]},
            {"history": [True, 2], "served": [True, 2]},
            {"history": "ab", "served": "ab"},
            {"history": {"1": 2}, "served": {"1": 2}},
            {"history": None, "served": None},
            {"since": 1},
            {"since": -1},
            {"since": 99},
            {"since": 1.0},
            {"since": None},
            {"since": True},
            {"consumed": -1},
            {"consumed": "3"},
            {"consumed": 10**9},
            {"width": 0},
            {"width": None},
            {"epoch": -1},
        ],
        ids=str,
    )
    def test_a_position_of_other_values_is_refused(self, make: Make, position: dict[str, Any]) -> None:
        sampler = make()
        with pytest.raises((DamagedStateError, PositionError), match="The sampler's state"):
            sampler.load_state_dict(tampered(state_after(make, 3), **position))

        assert sampler.state_dict() == make().state_dict()

    @every_kind
    def test_slots_that_are_no_multiple_of_the_width_are_refused(self, make: Make) -> None:
        state = state_after(make, 2, num_replicas=2, rank=0)

        with pytest.raises(DamagedStateError, match=r"come in groups of width=2"):
            make().load_state_dict(tampered(state, consumed=3))

    def test_a_history_of_more_steps_than_there_were_is_refused(self) -> None:
        state = state_after(MAKES["buckets"], 2, num_replicas=2, rank=0)
        elastic = resumed(MAKES["buckets"], state, num_replicas=3, rank=0).state_dict(num_batches=1)
        assert elastic["progress"]["history"] == [2, 2]

        with pytest.raises(DamagedStateError, match="has 500 steps on 2 ranks where"):
            MAKES["buckets"]().load_state_dict(tampered(elastic, history=[2, 500], since=1500, consumed=1503))

    def test_more_batches_served_than_windows_have_are_refused(self) -> None:
        state = state_after(windows, 2, num_replicas=2, rank=0)
        elastic = resumed(windows, state, num_replicas=3, rank=0).state_dict(num_batches=1)
        assert elastic["progress"]["served"] == [4, 2]

        with pytest.raises((DamagedStateError, PositionError)):
            windows().load_state_dict(tampered(elastic, served=[10**6, 2]))

    @every_kind
    def test_a_position_past_the_end_is_refused(self, make: Make) -> None:
        with pytest.raises(PositionError, match="has consumed 500 batches of epoch 0, but an epoch has only"):
            make().load_state_dict(tampered(make().state_dict(), consumed=500))


BUDGETS = [{"max_tokens": 200}, {"max_samples": 3}, {"multiple": 2}, {"cost": QuadraticCost(50)}, {"drop_last": True}]
NAMES = {"cost": "quadratic_length"}


class TestAcceptedChanges:
    @pytest.mark.parametrize("options", BUDGETS, ids=str)
    @pytest.mark.parametrize("kind", ["buckets", "windows"])
    def test_at_the_beginning_of_an_epoch_a_change_is_let_pass(self, kind: str, options: dict[str, Any]) -> None:
        (name,) = (NAMES.get(key, key) for key in options)
        old = MAKES[kind]()
        state = old.state_dict(num_batches=len(old))
        fresh = resumed(MAKES[kind], state, accept=name, **options)

        assert fresh.epoch == 1
        assert list(fresh) == epochs(MAKES[kind](**options), 2)[1]

    @pytest.mark.parametrize("options", BUDGETS, ids=str)
    @pytest.mark.parametrize("kind", ["buckets", "windows"])
    def test_within_an_epoch_it_is_refused_whatever_is_accepted(self, kind: str, options: dict[str, Any]) -> None:
        (name,) = (NAMES.get(key, key) for key in options)
        sampler = MAKES[kind](accept=(name, "lengths", "progress"), **options)
        before = sampler.state_dict()

        with pytest.raises(StateMismatchError, match="cannot change within an epoch") as caught:
            sampler.load_state_dict(state_after(MAKES[kind], 1))

        assert [difference.path for difference in caught.value.differences] == [name]
        assert sampler.state_dict() == before

    @pytest.mark.parametrize("kind", [buckets, windows])
    def test_other_lengths_are_let_pass_between_epochs_only(self, kind: Make) -> None:
        other = [*LENGTHS, 7, 7, 30]
        options: dict[str, Any] = {"num_buckets": 4} if kind is buckets else {}
        state = kind(**options).state_dict()
        fresh = kind(other, accept="lengths", **options)
        fresh.load_state_dict(tampered(state, epoch=3))

        assert sorted(index for batch in fresh for index in batch) == list(range(153))
        with pytest.raises(StateMismatchError, match="cannot change within an epoch"):
            kind(other, accept="lengths", **options).load_state_dict(state_after(lambda: kind(**options), 1))

    def test_what_is_not_accepted_is_refused_at_the_beginning_too(self) -> None:
        with pytest.raises(StateMismatchError) as caught:
            buckets(max_tokens=90, num_buckets=5, accept="max_tokens").load_state_dict(MAKES["buckets"]().state_dict())

        assert [difference.path for difference in caught.value.differences] == ["num_buckets"]

    @pytest.mark.parametrize("kind", ["buckets", "windows"])
    def test_an_accepted_seed_loses_no_sample_within_an_epoch(self, kind: str) -> None:
        sampler = MAKES[kind]()
        served = take(sampler, 6)
        try:
            served += list(resumed(MAKES[kind], sampler.state_dict(), seed=1, accept="seed"))
        except StateMismatchError:
            return
        assert sorted(index for batch in served for index in batch) == list(range(150))


class TestResizing:
    @every_kind
    @pytest.mark.parametrize("legs", [((2, 3), (3, 2), (1, None)), ((4, 1), (1, 7), (5, 1), (2, None))], ids=str)
    def test_whatever_the_history_of_ranks_every_sample_is_served_once(
        self, make: Make, legs: tuple[tuple[int, int | None], ...]
    ) -> None:
        state, served = make().state_dict(), []
        for ranks, count in legs:
            samplers = [resumed(make, state, num_replicas=ranks, rank=rank) for rank in range(ranks)]
            for sampler in samplers:
                served += list(sampler) if count is None else take(sampler, count)
            state = json.loads(json.dumps(samplers[-1].state_dict()))

        assert sorted(index for batch in served for index in batch) == list(range(150))
        assert (state["progress"]["epoch"], state["progress"]["consumed"]) == (1, 0)

    @every_kind
    def test_after_a_resize_every_sample_of_the_next_epoch_comes_as_if_there_had_been_none(self, make: Make) -> None:
        sampler = resumed(make, state_after(make, 3, num_replicas=3, rank=0), num_replicas=2, rank=1)
        list(sampler)

        assert list(sampler) == epochs(make(num_replicas=2, rank=1), 2)[1]

    @every_kind
    def test_a_resize_back_without_a_step_between_changes_nothing(self, make: Make) -> None:
        state = state_after(make, 3, num_replicas=3, rank=0)
        other = resumed(make, state, num_replicas=2, rank=0).state_dict()

        assert list(resumed(make, other, num_replicas=3, rank=1)) == epochs(make(num_replicas=3, rank=1), 1)[0][3:]

    @pytest.mark.parametrize("seed", range(10))
    def test_any_configuration_resumes_exactly_on_any_ranks(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.randint(0 if rng.random() < 0.1 else 1, rng.choice([5, 60])) for _ in range(rng.randint(1, 90))]
        options: dict[str, Any] = {
            "shuffle": rng.random() < 0.8,
            "drop_last": rng.random() < 0.3,
            "multiple": rng.choice([1, 1, 2, 8]),
            "seed": seed,
        }
        if rng.random() < 0.3:
            options["batch_size"] = rng.randint(1, 6)
        else:
            options |= {"max_tokens": rng.choice([25, 60, 300]), "too_long": rng.choice(["drop", "alone"])}
            options |= {"max_samples": rng.choice([None, 4]), "cost": rng.choice([None, QuadraticCost(30)])}
        if seed % 2:
            options["window"] = rng.randint(1, 40)
            options["boundary_key"] = rng.choice([None, [index % 3 for index in range(len(lengths))]])
        else:
            options |= rng.choice(
                [{}, {"num_buckets": rng.randint(1, 9)}, {"boundaries": "equal_counts"}, {"boundaries": [3, 20, 70]}]
            )
        result = check_resume(
            lambda num_replicas, rank: BucketBatchSampler(lengths, num_replicas=num_replicas, rank=rank, **options),
            num_replicas=rng.randint(1, 4),
            resize=rng.sample([1, 2, 3, 5], 2),
            drop_last=options["drop_last"],
            set_epoch=rng.random() < 0.5,
        )

        assert result.ok, (result, options)
        assert result.num_resumes > 0
        assert result.state_bytes < 1024


class TestReports:
    @every_kind
    def test_samples_served_are_counted_over_all_ranks(self, make: Make) -> None:
        ranks, served = [make(num_replicas=2, rank=rank) for rank in range(2)], 0
        assert ranks[0].position_report() == {"epoch": 0, "samples": 0}
        for number, batches in enumerate(zip(*ranks, strict=True), 1):
            served += sum(map(len, batches))
            expected = {"epoch": 0, "samples": served} if number < len(ranks[0]) else {"epoch": 1, "samples": 0}
            assert [sampler.position_report() for sampler in ranks] == [expected, expected]

        assert served == 150

    @every_kind
    def test_a_report_survives_resumes_on_other_ranks(self, make: Make) -> None:
        state, served = make().state_dict(), 0
        for ranks in (3, 2, 4):
            samplers = [resumed(make, state, num_replicas=ranks, rank=rank) for rank in range(ranks)]
            assert samplers[0].position_report() == {"epoch": 0, "samples": served}
            served += sum(len(batch) for sampler in samplers for batch in take(sampler, 2))
            state = samplers[0].state_dict()
            assert {sampler.position_report()["samples"] for sampler in samplers} == {served}

    @pytest.mark.parametrize("kind", ["buckets", "windows"])
    def test_samples_left_out_are_not_counted(self, kind: str) -> None:
        sampler = MAKES[kind](max_tokens=30, too_long="drop")
        count = len(sampler) - 1
        served = sum(map(len, take(sampler, count)))

        assert sampler.position_report()["samples"] == served
