"""A batch sampler over several sources goes on from any position: epochs, iterators, states, reports and workers."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader

from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError, StateError
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler, StatefulBatchSampler

LENGTHS = {"a": 9, "b": 14, "c": 5}
Make = Callable[..., StatefulBatchSampler]
MAKES: dict[str, Make] = {
    "round robin": lambda **ranks: RoundRobinBatchSampler(LENGTHS, 2, **ranks),
    "mixture": lambda **ranks: MixtureBatchSampler(LENGTHS, [1, 2, 3], weights=[3, 1, 1], **ranks),
    "cycle": lambda **ranks: MixtureBatchSampler(LENGTHS, 2, stop="cycle", **ranks),
    "steps": lambda **ranks: MixtureBatchSampler(LENGTHS, 3, by="sample", num_steps=7, **ranks),
}
every_kind = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def take(sampler: StatefulBatchSampler, count: int) -> list[list[int]]:
    batches = iter(sampler)
    return [next(batches) for _ in range(count)]


def epochs(sampler: StatefulBatchSampler, count: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(count)]


def resumed(make: Make, state: dict[str, Any], **ranks: Any) -> StatefulBatchSampler:
    sampler = make(**ranks)
    sampler.load_state_dict(state)
    return sampler


class TestEpochs:
    @every_kind
    def test_the_end_of_a_pass_moves_on_to_the_next_epoch(self, make: Make) -> None:
        sampler = make()
        list(sampler)

        assert (sampler.epoch, sampler.position.consumed) == (1, 0)

    @every_kind
    def test_an_epoch_can_be_chosen_forward_and_backward(self, make: Make) -> None:
        expected, sampler = epochs(make(), 4), make()
        for epoch in (2, 0, 3, 1):
            sampler.set_epoch(epoch)
            assert list(sampler) == expected[epoch]

    @every_kind
    def test_the_loop_that_sets_every_epoch_trains_as_the_one_that_does_not(self, make: Make) -> None:
        sampler, found = make(), []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(list(sampler))

        assert found == epochs(make(), 3)

    @every_kind
    def test_setting_the_same_epoch_keeps_a_loaded_position(self, make: Make) -> None:
        sampler = make()
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
        fresh = resumed(make, sampler.state_dict())
        fresh.set_epoch(0)

        assert list(fresh) == list(batches)

    @every_kind
    def test_setting_another_epoch_gives_a_loaded_position_up(self, make: Make) -> None:
        sampler = make()
        take(sampler, 3)
        fresh = resumed(make, sampler.state_dict())
        fresh.set_epoch(1)

        assert list(fresh) == epochs(make(), 2)[1]

    @every_kind
    def test_its_length_is_that_of_a_whole_epoch_wherever_it_stands(self, make: Make) -> None:
        sampler = make()
        take(sampler, 3)

        assert len(resumed(make, sampler.state_dict())) == len(sampler) == len(list(make()))

    @pytest.mark.parametrize("epoch", [1.5, "1"])
    def test_an_epoch_that_is_no_integer_is_refused(self, epoch: Any) -> None:
        with pytest.raises(ConfigurationError, match="epoch must be an integer"):
            MAKES["steps"]().set_epoch(epoch)

    @pytest.mark.parametrize(
        "kind",
        [
            "round robin",
            "cycle",
            "steps",
        ],
    )
    def test_a_negative_epoch_is_refused(self, kind: str) -> None:
        with pytest.raises(PositionError, match=r"epoch >= 0, .* got epoch=-1"):
            MAKES[kind]().set_epoch(-1)


class TestIterators:
    @every_kind
    def test_an_abandoned_iterator_leaves_the_beginning_of_its_pass(self, make: Make) -> None:
        sampler = make()
        take(sampler, 3)

        assert list(sampler) == epochs(make(), 1)[0]

    @every_kind
    def test_after_a_resume_an_abandoned_iterator_leaves_the_place_of_resuming(self, make: Make) -> None:
        sampler = make()
        take(sampler, 2)
        fresh = resumed(make, sampler.state_dict())
        take(fresh, 2)

        assert list(fresh) == epochs(make(), 1)[0][2:]

    @every_kind
    def test_iter_twice_counts_the_iterator_that_began_last(self, make: Make) -> None:
        sampler = make()
        first, second = iter(sampler), iter(sampler)
        for _ in range(4):
            next(first)
        next(second)
        next(first)

        assert list(resumed(make, sampler.state_dict())) == list(second)

    @every_kind
    def test_an_iterator_that_was_replaced_does_not_end_the_epoch(self, make: Make) -> None:
        sampler = make()
        first, second = iter(sampler), iter(sampler)
        next(first)
        next(second)
        list(first)

        assert sampler.epoch == 0
        assert list(resumed(make, sampler.state_dict())) == list(second)

    @every_kind
    def test_a_state_may_be_loaded_after_iter(self, make: Make) -> None:
        sampler = make()
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
        fresh = make()
        late = iter(fresh)
        fresh.load_state_dict(sampler.state_dict())

        assert list(late) == list(batches)

    @every_kind
    def test_a_state_loaded_in_the_middle_of_a_pass_replaces_its_place(self, make: Make) -> None:
        sampler, other = make(), make()
        take(sampler, 3)
        running = iter(other)
        next(running)
        other.load_state_dict(sampler.state_dict())
        next(running)

        assert other.state_dict() == sampler.state_dict()


class TestStates:
    @every_kind
    def test_num_batches_leaves_out_what_was_only_fetched(self, make: Make) -> None:
        sampler = make()
        batches = take(sampler, 5)

        assert take(resumed(make, sampler.state_dict(num_batches=2)), 3) == batches[2:]

    @every_kind
    def test_num_batches_of_a_whole_pass_are_the_beginning_of_the_next(self, make: Make) -> None:
        sampler = make()
        list(sampler)
        expected = epochs(make(), 2)

        assert list(resumed(make, sampler.state_dict(num_batches=len(sampler)))) == expected[1]
        assert list(resumed(make, sampler.state_dict(num_batches=len(sampler) - 1))) == expected[0][-1:]

    @every_kind
    def test_num_batches_counts_from_the_place_of_resuming(self, make: Make) -> None:
        sampler = make()
        take(sampler, 2)
        fresh = resumed(make, sampler.state_dict())
        take(fresh, 3)

        assert list(resumed(make, fresh.state_dict(num_batches=1))) == epochs(make(), 1)[0][3:]

    @pytest.mark.parametrize("num_batches", [-1, 99])
    def test_more_batches_than_the_pass_has_are_refused(self, num_batches: int) -> None:
        with pytest.raises(ConfigurationError, match=rf"from 0 to 15, .* got {num_batches}"):
            MAKES["round robin"]().state_dict(num_batches=num_batches)

    @every_kind
    def test_a_state_loads_with_weights_only(self, make: Make) -> None:
        sampler, file = make(), io.BytesIO()
        take(sampler, 3)
        torch.save(sampler.state_dict(), file)
        file.seek(0)

        assert torch.load(file, weights_only=True) == sampler.state_dict()

    @every_kind
    def test_states_are_equal_on_all_ranks_at_every_step(self, make: Make) -> None:
        ranks = [make(num_replicas=3, rank=rank) for rank in range(3)]
        for _ in zip(*ranks, strict=True):
            states = [json.dumps(sampler.state_dict()) for sampler in ranks]
            assert states[0] == states[1] == states[2]

    @pytest.mark.parametrize(
        ("num_steps", "elastic"),
        [
            (500_000, False),
            (500_000, True),
            (None, False),
            (None, True),
        ],
    )
    def test_with_sixteen_sources_a_state_is_under_a_kilobyte(self, num_steps: int | None, elastic: bool) -> None:
        names = [f"lang{number:02}" for number in range(16)]
        lengths = {name: 9_000_000 + number for number, name in enumerate(names)}
        sizes = {name: 8 + number for number, name in enumerate(names)}
        weights = {name: 1.2345 + number / 70 for number, name in enumerate(names)}

        def make(ranks: int) -> StatefulBatchSampler:
            return MixtureBatchSampler(lengths, sizes, weights=weights, num_steps=num_steps, num_replicas=ranks, rank=0)

        state = make(8).state_dict(num_batches=400_000)
        if elastic:
            state = resumed(lambda **_: make(7), state).state_dict(num_batches=50_000)

        assert len(json.dumps(state)) < 1024
        assert all(place >= 1_000_000 for place in state["progress"]["places"])

    def test_a_sampler_can_be_pickled_and_copied_with_its_place(self) -> None:
        for make in MAKES.values():
            sampler = make()
            take(sampler, 3)
            for other in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
                assert other.state_dict() == sampler.state_dict()


def tampered(state: dict[str, Any], **position: Any) -> dict[str, Any]:
    return {**state, "progress": {**state["progress"], **position}}


class TestDamagedStates:
    @every_kind
    @pytest.mark.parametrize("key", ["epoch", "consumed", "width", "since", "origin", "places"])
    def test_a_position_without_one_of_its_keys_is_refused(self, make: Make, key: str) -> None:
        sampler = make()
        take(sampler, 3)
        state = sampler.state_dict()
        del state["progress"][key]

        with pytest.raises(StateError):
            make().load_state_dict(state)

    @every_kind
    @pytest.mark.parametrize(
        "progress",
        [
            {"places": []},
            {"places": [4, 4]},
            {"places": [4, 4, 2, 0]},
            {"places": [4, -2, 2]},
            {"places": [4, 4.0, 2]},
            {"places": [4, True, 2]},
            {"places": {"a": 4}},
            {"places": None},
            {"origin": [1]},
            {"origin": [0, 0, -1]},
            {"origin": "abc"},
            {"since": -1},
            {"since": 99},
            {"since": 1.0},
            {"since": None},
            {"consumed": -1},
            {"consumed": "3"},
            {"width": 0},
            {"epoch": -1},
        ],
        ids=str,
    )
    def test_a_position_of_other_values_is_refused(self, make: Make, position: dict[str, Any]) -> None:
        sampler = make()
        take(sampler, 3)

        with pytest.raises((DamagedStateError, PositionError), match="The sampler's state"):
            make().load_state_dict(tampered(sampler.state_dict(), **position))

    @every_kind
    def test_a_refused_state_leaves_the_sampler_where_it_was(self, make: Make) -> None:
        sampler = make()
        take(sampler, 3)
        before = sampler.state_dict()
        with pytest.raises(StateError):
            sampler.load_state_dict(tampered(before, places=[]))

        assert sampler.state_dict() == before

    @every_kind
    def test_slots_that_are_no_multiple_of_the_width_are_refused(self, make: Make) -> None:
        sampler = make(num_replicas=2, rank=0)
        take(sampler, 2)
        state = sampler.state_dict()
        assert state["progress"]["consumed"] == 4

        with pytest.raises(DamagedStateError, match=r"come in groups of width=2"):
            make().load_state_dict(tampered(state, consumed=3, since=0))

    @pytest.mark.parametrize("kind", ["round robin", "mixture", "cycle"])
    def test_places_that_are_not_those_of_the_position_are_refused(self, kind: str) -> None:
        sampler = MAKES[kind]()
        take(sampler, 4)
        state = sampler.state_dict()
        places = state["progress"]["places"]

        with pytest.raises(DamagedStateError, match="are not those of the position"):
            MAKES[kind]().load_state_dict(tampered(state, places=[places[0] + 1, *places[1:]]))

    @pytest.mark.parametrize("kind", ["round robin", "mixture", "cycle"])
    def test_a_position_past_the_end_is_refused(self, kind: str) -> None:
        with pytest.raises(PositionError, match="has consumed 500 batches of epoch 0, but an epoch has only"):
            MAKES[kind]().load_state_dict(tampered(MAKES[kind]().state_dict(), consumed=500))

    @pytest.mark.parametrize("kind", ["round robin", "mixture", "cycle"])
    def test_places_at_the_beginning_of_an_epoch_are_refused(self, kind: str) -> None:
        with pytest.raises(StateError):
            MAKES[kind]().load_state_dict(tampered(MAKES[kind]().state_dict(), places=[4, 4, 2]))

    def test_places_beyond_any_number_of_samples_are_refused(self) -> None:
        with pytest.raises(StateError):
            list(resumed(MAKES["steps"], tampered(MAKES["steps"]().state_dict(), places=[10**30, 0, 0])))

    @pytest.mark.parametrize("sources", [None, [1, 2], {"a": "x", "b": 14}, {"a": 0, "b": 14}, {"a": "", "b": 14}])
    def test_saved_sources_that_cannot_be_read_are_a_damaged_state(self, sources: Any) -> None:
        sampler = RoundRobinBatchSampler({"a": 9, "b": 14}, 2, accept="sources")
        state = sampler.state_dict()
        state["config"]["sources"] = sources

        with pytest.raises(DamagedStateError):
            sampler.load_state_dict(state)


class TestRanks:
    def test_a_sampler_built_before_the_process_group_finds_its_rank_at_the_first_batch(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        sampler = RoundRobinBatchSampler(LENGTHS, 2)
        batches = iter(sampler)
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            found, length, width = list(batches), len(sampler), sampler.state_dict()["progress"]["width"]
        finally:
            dist.destroy_process_group()

        assert found == list(RoundRobinBatchSampler(LENGTHS, 2, num_replicas=2, rank=1))
        assert (length, width) == (len(found), 2)

    @every_kind
    def test_an_unshuffled_copy_serves_every_epoch_alike_and_leaves_its_original(self, make: Make) -> None:
        sampler = make(num_replicas=2, rank=1)
        copied = sampler.unshuffled()

        assert list(copied) == list(copied)
        assert len(list(copied)) == len(copied)
        assert list(sampler) == list(make(num_replicas=2, rank=1))

    def test_where_places_carry_over_an_unshuffled_copy_serves_every_sample(self) -> None:
        copied = MAKES["steps"]().unshuffled()

        assert {index for batch in copied for index in batch} == set(range(sum(LENGTHS.values())))


class TestReports:
    def test_samples_passes_shares_and_tokens_are_counted_for_each_source(self) -> None:
        sampler = RoundRobinBatchSampler({"a": 4, "b": 20}, [2, 3], stop="cycle")
        assert sampler.position_report() == {
            "epoch": 0,
            "sources": {name: {"samples": 0, "epochs": 0.0, "share": 0.0} for name in "ab"},
        }
        take(sampler, 5)

        assert sampler.position_report() == {
            "epoch": 0,
            "sources": {
                "a": {"samples": 6, "epochs": 1.5, "share": 0.5},
                "b": {"samples": 6, "epochs": 0.3, "share": 0.5},
            },
        }

    def test_where_places_carry_over_they_are_counted_since_training_began(self) -> None:
        sampler = RoundRobinBatchSampler({"a": 4, "b": 20}, 2, num_steps=4)
        for number in range(1, 4):
            list(sampler)
            report = sampler.position_report()
            assert report["epoch"] == number
            assert report["sources"]["a"] == {"samples": 4 * number, "epochs": number, "share": 0.5}

    def test_after_whole_passes_tokens_are_exact(self) -> None:
        tokens = [[7, 1, 3, 5], [2, 2, 9, 1]]
        sampler = MixtureBatchSampler([4, 4], 2, by="token", token_lengths=tokens, weights=[1, 1], num_steps=30)
        seen, found = [0, 0], 0
        for batch in sampler:
            for index in batch:
                seen[index // 4] += tokens[index // 4][index % 4]
            for number, counts in enumerate(sampler.position_report()["sources"].values()):
                if counts["epochs"] == int(counts["epochs"]):
                    found += 1
                    assert counts["tokens"] == seen[number]

        assert found > 20

    @every_kind
    def test_reports_are_equal_on_all_ranks_and_count_what_they_all_were_served(self, make: Make) -> None:
        ranks = [make(num_replicas=2, rank=rank) for rank in range(2)]
        served = 0
        for batches in list(zip(*ranks, strict=True))[:4]:
            served += sum(map(len, batches))
        states = [sampler.state_dict(num_batches=4) for sampler in ranks]
        reports = [resumed(make, state, num_replicas=2, rank=0).position_report() for state in states]

        assert reports[0] == reports[1]
        assert sum(counts["samples"] for counts in reports[0]["sources"].values()) == served
        assert sum(counts["share"] for counts in reports[0]["sources"].values()) == pytest.approx(1)

    @every_kind
    def test_a_report_survives_a_resume_on_other_ranks(self, make: Make) -> None:
        sampler = make(num_replicas=2, rank=1)
        take(sampler, 3)
        fresh = resumed(make, sampler.state_dict(), num_replicas=3, rank=2)

        assert fresh.position_report() == sampler.position_report()


class TestInADataLoader:
    dataset = ConcatDataset([[100 * place + index for index in range(n)] for place, n in enumerate(LENGTHS.values())])

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_plain_data_loader_serves_its_batches_epoch_by_epoch(self, num_workers: int) -> None:
        sampler, fresh = (RoundRobinBatchSampler(LENGTHS, 4, num_replicas=2, rank=1) for _ in range(2))
        loader = DataLoader(self.dataset, batch_sampler=sampler, num_workers=num_workers)
        for _ in range(2):
            expected = [[self.dataset[index] for index in batch] for batch in fresh]
            assert [batch.tolist() for batch in loader] == expected
            assert len(loader) == len(expected)

    def test_with_workers_the_state_of_what_was_trained_on_resumes_exactly(self) -> None:
        def make() -> RoundRobinBatchSampler:
            return RoundRobinBatchSampler(LENGTHS, 2, num_replicas=2, rank=0)

        sampler = make()
        batches = iter(DataLoader(self.dataset, batch_sampler=sampler, num_workers=2))
        for _ in range(3):
            next(batches)
        state = sampler.state_dict(num_batches=3)
        fresh = make()
        fresh.load_state_dict(state)
        rest = [batch.tolist() for batch in DataLoader(self.dataset, batch_sampler=fresh, num_workers=2)]

        assert rest == [batch.tolist() for batch in batches]
        assert sampler.position.consumed != state["progress"]["consumed"] or not rest
