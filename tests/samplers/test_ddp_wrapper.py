"""Any sampler is dealt out to ranks: agreement, lengths, epochs, looks at it, states, and nothing changed outside."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_stateful.audit import check_resume
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    PositionError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.samplers import DDPSamplerWrapper, winding

ALL: dict[str, Callable[[], Any]] = {**theirs.PERMUTATIONS, **theirs.DRAWS, **theirs.BATCHED}
every_sampler = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
every_sized = pytest.mark.parametrize("make", [make for name, make in ALL.items() if "without len" not in name])


class Counted(Sampler[int]):
    """Yields so many items, says that there are so many, and notes every epoch that it is told."""

    def __init__(self, yields: int, says: int) -> None:
        self.yields, self.says = yields, says
        self.told: list[int] = []
        self.note = self.told.append
        self.epoch = 0

    def __len__(self) -> int:
        return self.says

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.yields))


class Fails(Sampler[int]):
    """Draws, and fails in the middle."""

    def __init__(self, at: int = 70) -> None:
        self.num_replicas, self.rank = 3, 2
        self.at = at

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            random.random(), torch.rand(()), np.random.rand()
            if number == self.at:
                raise KeyError("theirs")
            yield number


class FailsWithLen(Fails):
    """The same, and says how many there would be."""

    def __len__(self) -> int:
        return 100


class DataAndIndex(Sampler[tuple[int, int]]):
    """Yields pairs that name a sample each."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(0, 10), (1, 11), (2, 12)])


def dealt(make: Callable[[], Any], ranks: int, **options: Any) -> list[list[Any]]:
    return [list(DDPSamplerWrapper(make(), ranks, rank, **options)) for rank in range(ranks)]


def interleaved(ranks: list[list[Any]]) -> list[Any]:
    return [item for step in zip(*ranks, strict=True) for item in step]


def process_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), *numbers[2:]


def fresh_with(make: Callable[[], Any], state: dict[str, Any], *ranks: int, **options: Any) -> DDPSamplerWrapper:
    sampler = DDPSamplerWrapper(make(), *ranks, **options)
    sampler.load_state_dict(state)
    return sampler


class TestDealing:
    @every_sampler
    def test_ranks_with_other_global_seeds_deal_out_one_sequence(self, make: Callable[[], Any]) -> None:
        found = []
        for rank in range(2):
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            found.append(list(DDPSamplerWrapper(make(), 2, rank, tail="drop")))
        alone = list(DDPSamplerWrapper(make()))

        assert interleaved(found) == alone[: len(alone) // 2 * 2]

    @pytest.mark.parametrize("ranks", [1, 2, 3, 5, 30])
    @pytest.mark.parametrize("make", theirs.PERMUTATIONS.values(), ids=theirs.PERMUTATIONS)
    def test_every_sample_comes_in_equal_numbers_of_items(self, make: Callable[[], Any], ranks: int) -> None:
        found = dealt(make, ranks)

        assert {len(items) for items in found} == {-(-theirs.LENGTH // ranks)}
        assert {item for items in found for item in items} == set(range(theirs.LENGTH))

    @pytest.mark.parametrize(("tail", "count"), [("split", 6), ("pad", 6), ("drop", 5)])
    def test_the_tail_of_samples_is_served_twice_or_left_out(self, tail: Any, count: int) -> None:
        found = dealt(lambda: range(22), 4, tail=tail)

        assert {len(items) for items in found} == {count}
        assert sorted({item for items in found for item in items}) == list(range(22 if count == 6 else 20))

    @pytest.mark.parametrize(
        ("tail", "last"), [("split", [[[0, 1]], [[2]]]), ("pad", [[[0, 1, 2]], [[0, 1, 2]]]), ("drop", [[], []])]
    )
    def test_the_tail_of_batches_is_split_or_served_twice_or_left_out(self, tail: Any, last: Any) -> None:
        assert dealt(lambda: [[0, 1, 2]], 2, tail=tail) == last

    @every_sized
    @pytest.mark.parametrize("tail", ["split", "pad", "drop"])
    def test_its_length_is_the_number_of_its_items(self, make: Callable[[], Any], tail: Any) -> None:
        for rank in range(4):
            sampler = DDPSamplerWrapper(make(), 4, rank, tail=tail)
            assert len(sampler) == len(list(sampler))

    def test_without_a_length_it_has_none(self) -> None:
        with pytest.raises(TypeError, match="BatchesWithoutLen has no len"):
            len(DDPSamplerWrapper(theirs.BatchesWithoutLen()))

    def test_wrapping_twice_is_wrapping_once(self) -> None:
        inner = theirs.GlobalRandom()
        found = [list(DDPSamplerWrapper(DDPSamplerWrapper(inner, 4, rank), 2, rank)) for rank in range(2)]

        assert found == dealt(theirs.GlobalRandom, 2)
        assert DDPSamplerWrapper(DDPSamplerWrapper(inner)).sampler is inner

    def test_wrapping_again_keeps_what_the_first_wrapper_was_told(self) -> None:
        inner = DDPSamplerWrapper(theirs.Endless(), length=6, seed=4, tail="drop")

        assert list(islice(DDPSamplerWrapper(inner), 7)) == list(inner)

    def test_pairs_that_name_a_sample_are_not_torn_apart(self) -> None:
        found = dealt(DataAndIndex, 2)

        assert {item for items in found for item in items} == {(0, 10), (1, 11), (2, 12)}

    def test_a_data_loader_takes_it_as_a_sampler_and_as_a_batch_sampler(self) -> None:
        data = theirs.Numbers(theirs.LENGTH)
        as_sampler = DataLoader(data, sampler=DDPSamplerWrapper(theirs.GlobalRandom(), 2, 0), batch_size=3)
        as_batches = DataLoader(data, batch_sampler=DDPSamplerWrapper(theirs.ShuffledBatches(), 2, 0))

        assert (len(as_sampler), len(list(as_sampler))) == (4, 4)
        assert (len(as_batches), len(list(as_batches))) == (4, 4)


class TestLengths:
    @pytest.mark.parametrize("tail", ["split", "pad", "drop"])
    @pytest.mark.parametrize("length", [20, 100])
    def test_fewer_items_than_announced_are_found_with_both_numbers(self, length: int, tail: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=rf"Counted yields (only )?{length - 3} .* its len\(\) is {length}"
        ):
            dealt(lambda: Counted(length - 3, length), 4, tail=tail)

    @pytest.mark.parametrize("length", [20, 100])
    @pytest.mark.parametrize("tail", ["split", "pad", "drop"])
    def test_more_items_than_announced_are_found_with_both_numbers(self, length: int, tail: Any) -> None:
        with pytest.raises(ConfigurationError, match=rf"Counted yields .* its len\(\) is {length}"):
            dealt(lambda: Counted(length + 3, length), 4, tail=tail)

    def test_more_items_are_found_also_where_a_tail_is_dropped(self) -> None:
        with pytest.raises(ConfigurationError, match=r"its len\(\) is 102"):
            dealt(lambda: Counted(110, 102), 4, tail="drop")

    def test_one_missing_item_is_found_where_a_tail_is_dropped(self) -> None:
        with pytest.raises(ConfigurationError, match=r"yields 101 .* its len\(\) is 102"):
            dealt(lambda: Counted(101, 102), 4, tail="drop")

    @pytest.mark.parametrize("length", [5, 100])
    def test_an_endless_sampler_is_cut_at_a_length(self, length: int) -> None:
        sampler = DDPSamplerWrapper(theirs.Endless(), 2, 0, length=length)

        assert [len(list(sampler)) for _ in range(2)] == [-(-length // 2)] * 2
        assert sampler.epoch == 2

    def test_a_length_of_numpys_cuts(self) -> None:
        assert len(list(DDPSamplerWrapper(theirs.Endless(), length=np.int64(5)))) == 5  # type: ignore[arg-type]

    @pytest.mark.parametrize("yields", [6, 100])
    def test_a_sampler_that_ends_before_the_length_to_cut_at_is_found(self, yields: int) -> None:
        with pytest.raises(ConfigurationError, match=rf"{yields} items in epoch 0, but length=150 was given"):
            list(DDPSamplerWrapper(Counted(yields, yields), length=150))

    @pytest.mark.parametrize("length", [0, -1, 1.5, "all", None])
    def test_another_length_is_refused(self, length: Any) -> None:
        with pytest.raises(ConfigurationError, match="length must be"):
            DDPSamplerWrapper(theirs.Endless(), length=length)

    def test_without_a_length_an_endless_sampler_runs_on(self) -> None:
        assert len(list(islice(DDPSamplerWrapper(theirs.Endless(), 3, 1), 500))) == 500


class TestEpochs:
    @every_sampler
    def test_epochs_follow_each_other_and_can_be_chosen(self, make: Callable[[], Any]) -> None:
        running, chosen = DDPSamplerWrapper(make()), DDPSamplerWrapper(make())
        expected = [list(running) for _ in range(4)]
        for epoch in (2, 0, 3, 1):
            chosen.set_epoch(epoch)
            assert list(chosen) == expected[epoch]

        assert expected[0] != expected[1] != expected[2]

    @every_sampler
    def test_a_fresh_wrapper_reproduces_a_later_epoch(self, make: Callable[[], Any]) -> None:
        running, fresh = DDPSamplerWrapper(make()), DDPSamplerWrapper(make())
        fresh.set_epoch(2)

        assert list(fresh) == [list(running) for _ in range(3)][2]

    @pytest.mark.parametrize(
        "nest",
        [
            lambda sampler: sampler,
            lambda sampler: BatchSampler(sampler, 2, False),
            lambda s: BatchSampler(BatchSampler(s, 2, False), 2, False),
        ],
        ids=["itself", "within", "within twice"],
    )
    def test_the_epoch_is_forwarded_however_deep(self, nest: Callable[[Any], Any]) -> None:
        inner = Counted(8, 8)
        sampler = DDPSamplerWrapper(nest(inner))
        sampler.set_epoch(3)
        next(iter(sampler))

        assert inner.epoch == 3

    @every_sampler
    def test_looks_at_it_do_not_shift_epochs(self, make: Callable[[], Any]) -> None:
        sampler, other = DDPSamplerWrapper(make()), DDPSamplerWrapper(make())
        expected = [list(other) for _ in range(2)]
        for epoch in expected:
            for _ in range(3):
                next(iter(sampler))
                iter(sampler)

            assert list(sampler) == epoch

    def test_an_abandoned_iterator_does_not_move_on(self) -> None:
        sampler = DDPSamplerWrapper(theirs.GlobalRandom())
        abandoned = iter(sampler)
        for _ in range(5):
            next(abandoned)
        items = iter(sampler)
        next(items)
        list(abandoned)

        assert (sampler.epoch, sampler.position.consumed) == (0, 1)

    @pytest.mark.parametrize(("epoch", "error"), [(-1, PositionError), (1.5, ConfigurationError)])
    def test_an_epoch_out_of_range_is_refused(self, epoch: Any, error: Any) -> None:
        with pytest.raises(error, match="epoch"):
            DDPSamplerWrapper([1]).set_epoch(epoch)


class TestOutside:
    @every_sampler
    def test_the_generators_of_the_process_are_untouched_even_in_the_middle_of_a_pass(self, make: Any) -> None:
        sampler = make()
        before = process_state()
        items = iter(DDPSamplerWrapper(sampler, 2, 1))
        for _ in range(3):
            next(items)
            assert process_state() == before
        list(items)

        assert process_state() == before

    def test_ranks_of_the_wrapped_sampler_are_untouched_even_in_the_middle_of_a_pass(self) -> None:
        inner = DistributedSampler(range(22), 4, 3)  # type: ignore[arg-type]
        before = {name: value for name, value in vars(inner).items() if name != "epoch"}
        for number, _ in enumerate(DDPSamplerWrapper(inner, 2, 1)):
            assert {name: value for name, value in vars(inner).items() if name != "epoch"} == before, number

        assert len(inner) == 6

    def test_an_exception_in_the_middle_comes_out_and_leaves_everything_as_it_was(self) -> None:
        inner = Fails()
        before = process_state()
        with pytest.raises(KeyError, match="theirs"):
            list(DDPSamplerWrapper(inner))

        assert process_state() == before
        assert (inner.num_replicas, inner.rank) == (3, 2)

    def test_after_an_exception_the_pass_begins_anew(self) -> None:
        sampler = DDPSamplerWrapper(Fails(at=70))
        for _ in range(2):
            with pytest.raises(KeyError):
                list(sampler)

            assert (sampler.epoch, next(iter(sampler))) == (0, 0)

    @pytest.mark.parametrize(("make", "served"), [(Fails, 69), (FailsWithLen, 70)], ids=["unsized", "sized"])
    def test_items_before_an_exception_are_served_except_those_that_are_looked_at_for_the_end(
        self, make: Callable[[], Any], served: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(winding, "_LONG_DRAW", math.inf)
        items = iter(DDPSamplerWrapper(make()))
        found: list[int] = []
        with pytest.raises(KeyError, match="theirs"):
            found.extend(items)

        assert found == list(range(served))


class TestStates:
    @pytest.mark.parametrize("tail", ["split", "pad", "drop"])
    @every_sampler
    def test_it_resumes_exactly_from_everywhere(self, make: Callable[[], Any], tail: Any) -> None:
        result = check_resume(
            lambda num_replicas, rank: DDPSamplerWrapper(make(), num_replicas, rank, tail=tail), num_replicas=3
        )
        assert result, str(result)

    @every_sampler
    def test_it_resumes_on_other_numbers_of_ranks(self, make: Callable[[], Any]) -> None:
        result = check_resume(
            lambda num_replicas, rank: DDPSamplerWrapper(make(), num_replicas, rank), num_replicas=2, resize=(1, 3, 7)
        )
        assert result, str(result)

    @every_sampler
    def test_states_are_equal_on_all_ranks_and_small(self, make: Callable[[], Any]) -> None:
        ranks = [DDPSamplerWrapper(make(), 3, rank, tail="drop") for rank in range(3)]
        for _ in zip(*ranks, strict=True):
            states = [rank.state_dict() for rank in ranks]
            assert states[0] == states[1] == states[2]
            assert len(json.dumps(states[0])) < 1024

    @every_sampler
    def test_a_state_may_be_loaded_after_iter(self, make: Callable[[], Any]) -> None:
        sampler = DDPSamplerWrapper(make())
        items = iter(sampler)
        next(items), next(items)
        fresh = DDPSamplerWrapper(make())
        late = iter(fresh)
        fresh.load_state_dict(sampler.state_dict())

        assert list(late) == list(items)

    def test_a_state_loads_with_weights_only(self) -> None:
        sampler, file = DDPSamplerWrapper(theirs.OwnState()), io.BytesIO()
        next(iter(sampler))
        torch.save(sampler.state_dict(), file)
        file.seek(0)

        assert torch.load(file, weights_only=True) == sampler.state_dict()

    @pytest.mark.parametrize("num_items", [-1, 23])
    def test_more_items_than_the_pass_has_are_refused(self, num_items: int) -> None:
        with pytest.raises(ConfigurationError, match=rf"from 0 to 22, .* got {num_items}"):
            DDPSamplerWrapper(theirs.GlobalRandom()).state_dict(num_items=num_items)

    def test_num_items_leaves_out_what_was_only_fetched(self) -> None:
        sampler = DDPSamplerWrapper(theirs.GlobalRandom(), 2, 0)
        found = list(islice(sampler, 8))

        assert list(fresh_with(theirs.GlobalRandom, sampler.state_dict(num_items=3), 2, 0))[:5] == found[3:]

    @pytest.mark.parametrize(
        ("make", "options", "path"),
        [
            (theirs.GlobalRandom, {"seed": 1}, "seed"),
            (theirs.GlobalRandom, {"tail": "drop"}, "drop_last"),
            (theirs.GlobalRandom, {"length": 7}, "sampler.length"),
            (lambda: Counted(22, 22), {}, "sampler.class"),
            (theirs.OwnState, {}, "sampler.way"),
        ],
        ids=["seed", "tail", "length", "class", "way"],
    )
    def test_another_configuration_is_refused_by_its_path(self, make: Any, options: Any, path: str) -> None:
        state = DDPSamplerWrapper(theirs.GlobalRandom()).state_dict()
        with pytest.raises(StateMismatchError) as caught:
            fresh_with(make, state, **options)

        assert path in [difference.path for difference in caught.value.differences]

    def test_the_state_of_batches_is_none_of_samples(self) -> None:
        state = DDPSamplerWrapper(theirs.ShuffledBatches()).state_dict()
        with pytest.raises(StateMismatchError):
            fresh_with(theirs.GlobalRandom, state)

    @pytest.mark.parametrize("damage", [{"sampler": None}, {"sampler": {"slot": -1}}, {"consumed": "x"}])
    def test_a_damaged_position_is_refused(self, damage: dict[str, Any]) -> None:
        state = DDPSamplerWrapper(theirs.GlobalRandom()).state_dict()
        state["progress"].update(damage)
        with pytest.raises(DamagedStateError, match="Resume from another checkpoint"):
            fresh_with(theirs.GlobalRandom, state)

    def test_a_position_behind_the_end_is_refused(self) -> None:
        state = DDPSamplerWrapper(theirs.GlobalRandom()).state_dict()
        state["progress"]["consumed"] = 23
        with pytest.raises(PositionError):
            fresh_with(theirs.GlobalRandom, state)

    def test_the_report_says_how_it_goes_on(self) -> None:
        sampler = DDPSamplerWrapper(theirs.OwnState())
        list(islice(sampler, 3))

        assert sampler.position_report() == {
            "epoch": 0,
            "samples": 3,
            "sampler": {"class": "OwnState", "way": "own_state"},
        }

    def test_a_resume_of_what_differs_is_accepted_with_a_warning(self) -> None:
        sampler = DDPSamplerWrapper(theirs.ByTheClock(), accept=("nondeterministic",))
        list(islice(sampler, 3))
        fresh = fresh_with(theirs.ByTheClock, sampler.state_dict(), accept=("nondeterministic",))
        with pytest.warns(StatefulWarning):
            assert len(list(fresh)) == theirs.LENGTH - 3


class TestCopies:
    def test_it_can_be_pickled(self) -> None:
        sampler = DDPSamplerWrapper(theirs.ShufflesInPlace())

        assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)

    def test_a_copy_is_one_of_its_own(self) -> None:
        expected = DDPSamplerWrapper(theirs.ShufflesInPlace())
        copied = copy.deepcopy(DDPSamplerWrapper(theirs.ShufflesInPlace()))

        assert [list(copied) for _ in range(3)] == [list(expected) for _ in range(3)]
