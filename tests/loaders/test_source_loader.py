"""A loader over several sources: workers, augmentation, groups and take-overs go on exactly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, RandomSampler

from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.loaders import StatefulLoader, take_over
from lightning_stateful.loaders.group import LoaderGroup
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler, StatefulBatchSampler

LENGTHS = {"a": 7, "b": 12, "c": 4}
Draws = list[list[tuple[int, float]]]
WHERE = "The state of this test"


class Noisy(Dataset[tuple[int, float]]):
    """Every sample draws from torch and NumPy."""

    def __init__(self, length: int, first: int) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index + self.first, torch.rand(1, dtype=torch.double).item() + np.random.rand()


def noisy() -> ConcatDataset[Any]:
    return ConcatDataset([Noisy(length, 100 * place) for place, length in enumerate(LENGTHS.values())])


def a_loader(sampler: Any = None, num_workers: int = 0, **options: Any) -> StatefulLoader:
    sampler = RoundRobinBatchSampler(LENGTHS, 2) if sampler is None else sampler
    return StatefulLoader(noisy(), batch_sampler=sampler, num_workers=num_workers, **options)


def draws(batches: Any) -> Draws:
    return [[(int(index), float(drawn)) for index, drawn in zip(*batch, strict=True)] for batch in batches]


SAMPLERS: dict[str, Any] = {
    "round robin": lambda **ranks: RoundRobinBatchSampler(LENGTHS, 2, **ranks),
    "cycle": lambda **ranks: MixtureBatchSampler(LENGTHS, [1, 2, 3], weights=[2, 1, 1], stop="cycle", **ranks),
    "by sample": lambda **ranks: MixtureBatchSampler(LENGTHS, 4, by="sample", num_steps=9, **ranks),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


class TestBatches:
    @every_sampler
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_loader_serves_the_batches_of_its_sampler_epoch_by_epoch(self, make: Any, rank: int) -> None:
        dataset = list(range(sum(LENGTHS.values())))
        sampler = make(num_replicas=2, rank=rank)
        loader = StatefulLoader(dataset, batch_sampler=make(num_replicas=2, rank=rank))

        for _ in range(3):
            assert [batch.tolist() for batch in loader] == list(sampler)
            assert len(loader) == len(sampler)

    def test_ranks_given_to_the_loader_count_before_the_samplers(self) -> None:
        loader = a_loader(SAMPLERS["cycle"](num_replicas=2, rank=0), num_replicas=3, rank=2)

        assert (loader.topology.num_replicas, loader.topology.rank) == (3, 2)

    def test_a_bare_order_will_do(self) -> None:
        sampler = SAMPLERS["round robin"]()

        assert draws(a_loader(sampler.order)) == draws(a_loader(sampler))

    @pytest.mark.parametrize(
        "options", [{"batch_size": 2}, {"shuffle": True}, {"drop_last": True}, {"sampler": RandomSampler(range(23))}]
    )
    def test_what_the_batch_sampler_decides_is_not_given_twice(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="batch_sampler takes the place of"):
            StatefulLoader(noisy(), batch_sampler=RoundRobinBatchSampler(LENGTHS, 2), **options)

    def test_for_evaluation_nothing_is_repeated_or_exact_is_refused(self) -> None:
        try:
            ranks = [
                a_loader(RoundRobinBatchSampler(LENGTHS, 1), num_replicas=2, rank=rank, exact=True) for rank in (0, 1)
            ]
        except ConfigurationError:
            return
        served = [index for loader in ranks for batch in draws(loader) for index, _ in batch]
        assert len(served) == len(set(served))

    @every_sampler
    def test_those_who_look_at_its_samplers_find_the_rest_of_the_pass(self, make: Any) -> None:
        dataset = list(range(sum(LENGTHS.values())))
        loader = StatefulLoader(dataset, batch_sampler=make(num_replicas=2, rank=1))
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(loader.state_dict())
        expected = [batch.tolist() for batch in loader]
        loader.set_epoch(5)
        loader.set_epoch(0)

        whole = list(loader.batch_sampler)
        assert whole[1:] == expected
        assert list(loader.sampler) == [index for batch in whole for index in batch]
        assert (len(loader.batch_sampler), len(loader.sampler)) == (len(whole), sum(map(len, whole)))
        assert isinstance(loader.sampler, DistributedSampler)


class TestAugmentation:
    @every_sampler
    def test_what_a_sample_draws_does_not_depend_on_workers(self, make: Any) -> None:
        alone, helped = a_loader(make()), a_loader(make(), num_workers=2)

        assert [draws(alone), draws(alone)] == [draws(helped), draws(helped)]

    @every_sampler
    def test_what_a_sample_draws_is_the_same_after_a_resume(self, make: Any) -> None:
        loader = a_loader(make())
        expected = [draws(loader), draws(loader)]
        for stop in range(1, len(expected[0])):
            first = a_loader(make())
            batches = iter(first)
            for _ in range(stop):
                next(batches)
            second = a_loader(make())
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert [draws(second), draws(second)] == [expected[0][stop:], expected[1]]

    def test_what_a_sample_draws_is_the_same_after_a_resume_with_workers(self) -> None:
        expected = draws(a_loader(SAMPLERS["cycle"]()))
        first = a_loader(SAMPLERS["cycle"](), num_workers=2)
        batches = iter(first)
        begun = draws(next(batches) for _ in range(4))
        second = a_loader(SAMPLERS["cycle"](), num_workers=2)
        second.load_state_dict(first.state_dict())

        assert begun + draws(second) == expected

    @pytest.mark.parametrize("kind", ["cycle", "by sample"])
    def test_a_sample_that_comes_again_in_the_epoch_draws_anew(self, kind: str) -> None:
        seen: dict[int, list[float]] = {}
        for batch in draws(a_loader(SAMPLERS[kind]())):
            for index, drawn in batch:
                seen.setdefault(index, []).append(drawn)

        assert max(map(len, seen.values())) > 1
        assert all(len(set(drawn)) == len(drawn) for drawn in seen.values())

    def test_the_same_sample_draws_anew_in_every_epoch(self) -> None:
        loader = a_loader()
        first, second = (dict(sample for batch in draws(loader) for sample in batch) for _ in range(2))

        assert first.keys() == second.keys()
        assert all(first[index] != second[index] for index in first)

    def test_the_models_generators_are_left_alone(self) -> None:
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        list(a_loader())

        assert torch.equal(torch.rand(2), expected)


class TestPositions:
    @every_sampler
    def test_reports_of_loader_and_sampler_agree_at_every_step(self, make: Any) -> None:
        sampler, loader = make(num_replicas=2, rank=0), a_loader(make(num_replicas=2, rank=1))
        for _ in zip(sampler, loader, strict=True):
            assert loader.position_report() == sampler.position_report()

    def test_with_workers_only_what_was_handed_over_is_reported(self) -> None:
        loader = a_loader(num_workers=2)
        batches = iter(loader)
        next(batches)

        assert loader.position_report()["sources"]["a"]["samples"] == 2
        assert loader.position_report()["sources"]["b"]["samples"] == 0

    def test_another_position_is_reported_without_moving(self) -> None:
        loader = a_loader()
        later = loader.plan.after(loader.position, 4)

        assert loader.report_at(later)["sources"]["a"] == {"samples": 4, "epochs": 4 / 7, "share": 0.5}
        assert loader.position_report()["sources"]["a"]["samples"] == 0

    def test_a_state_of_the_sampler_alone_is_one_of_the_loader(self) -> None:
        sampler, loader = SAMPLERS["cycle"](), a_loader(SAMPLERS["cycle"]())
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
        loader.load_state_dict(sampler.state_dict())

        assert loader.state_dict() == sampler.state_dict()

    def test_set_epoch_keeps_a_position_within_the_same_epoch(self) -> None:
        first, second = a_loader(), a_loader()
        batches = iter(first)
        for _ in range(3):
            next(batches)
        second.load_state_dict(first.state_dict())
        second.set_epoch(0)

        assert draws(second) == draws(batches)

    @every_sampler
    def test_set_epoch_moves_forward_and_backward(self, make: Any) -> None:
        loader, reference = a_loader(make()), a_loader(make())
        epochs = [draws(reference) for _ in range(3)]
        for epoch in (2, 0, 1):
            loader.set_epoch(epoch)
            assert draws(loader) == epochs[epoch]


class TestTakenOver:
    def plain(self, sampler: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(noisy(), batch_sampler=sampler, **options)

    @pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in SAMPLERS), ("cycle", 2)])
    def test_a_loader_taken_over_serves_what_it_would_and_resumes(self, kind: str, num_workers: int) -> None:
        make = SAMPLERS[kind]
        loader = take_over(self.plain(make(), num_workers=num_workers), seed=4)
        dataset = noisy()
        expected = [[dataset[index][0] for index in batch] for batch in make()]
        batches = iter(loader)
        begun = draws(next(batches) for _ in range(3))
        fresh = take_over(self.plain(make()), seed=4)
        fresh.load_state_dict(loader.state_dict())
        rest = draws(fresh)

        assert [[index for index, _ in batch] for batch in begun + rest] == expected
        assert draws(batches) == rest

    def test_ranks_given_are_those_of_a_sampler_that_has_none(self) -> None:
        loaders = [take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2)), num_replicas=2, rank=r) for r in (0, 1)]
        served = [index for loader in loaders for batch in draws(loader) for index, _ in batch]

        assert len(served) == len(set(served)) == sum(LENGTHS.values())

    def test_what_the_sampler_accepts_is_accepted(self) -> None:
        loader = take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2, accept="seed")), accept="weights")
        loader.load_state_dict(take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2, seed=8))).state_dict())

        assert loader.accept == ("seed", "weights")

    def test_taken_over_again_it_stays_the_same(self) -> None:
        sampler = MixtureBatchSampler(LENGTHS, 2, weights=[1, 2, 3], seed=3, accept="weights")
        loader = take_over(take_over(self.plain(sampler), seed=4), seed=9, num_replicas=2, rank=1)

        assert (loader.seed, loader.accept, loader.topology.num_replicas) == (4, ("weights",), 2)
        assert loader.order == sampler.order

    def test_for_evaluation_it_is_served_in_the_same_order_every_time(self) -> None:
        loader = take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 3)), shuffle=False)
        first, second = ([[index for index, _ in batch] for batch in draws(loader)] for _ in range(2))

        assert first == second
        assert first[:3] == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]

    def test_the_sampler_that_is_taken_over_is_not_moved(self) -> None:
        sampler = RoundRobinBatchSampler(LENGTHS, 2)
        before = sampler.state_dict()
        list(take_over(self.plain(sampler)))

        assert sampler.state_dict() == before

    def test_a_batch_sampler_derived_from_torchs_is_run_as_it_is(self) -> None:
        class Own(BatchSampler):
            pass

        taken = take_over(self.plain(Own(range(23), 2, False)))

        assert list(taken.batch_sampler)[:2] == [[0, 1], [2, 3]]

    def test_any_batch_sampler_over_an_order_is_taken_over(self) -> None:
        sampler = StatefulBatchSampler(RoundRobinBatchSampler(LENGTHS, 2).order)

        assert len(take_over(self.plain(sampler))) == len(sampler)


def a_group(mode: str, ranks: int = 1, rank: int = 0, length: int = 9, **options: Any) -> LoaderGroup:
    several = a_loader(RoundRobinBatchSampler(LENGTHS, 2, **options), num_replicas=ranks, rank=rank)
    single = StatefulLoader(range(length), batch_size=2, shuffle=True, num_replicas=ranks, rank=rank)
    return LoaderGroup({"several": several, "single": single}, mode)


class TestGroups:
    @pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
    def test_every_step_resumes_in_a_fresh_group(self, mode: str) -> None:
        group = a_group(mode)
        for batch in range(group.num_batches()):
            fresh = a_group(mode)
            state = json.loads(json.dumps(group.state_at(1, batch)))
            assert fresh.load(state, where=WHERE) == (1, batch)
            for later in range(batch, group.num_batches()):
                assert fresh.position("several", 1, later) == group.position("several", 1, later)
            assert fresh.state_at(1, batch) == state

    @pytest.mark.parametrize("mode", ["min_size", "max_size"])
    @pytest.mark.parametrize("after", [1, 3])
    def test_on_other_ranks_what_is_left_is_served_once(self, mode: str, after: int) -> None:
        state = a_group(mode, 2, length=99).state_at(0, 3)
        fresh = a_group(mode, after, length=99)
        _, batch = fresh.load(state, where=WHERE)
        position = fresh.position("several", 0, batch)
        assert position is not None
        served = 0
        for rank in range(after):
            loader = a_group(mode, after, rank, length=99).loaders["several"]
            served += sum(map(len, loader.plan.indices(position)))

        places = state["loaders"]["several"]["progress"]["places"]
        assert served == sum(LENGTHS.values()) - sum(places)

    @pytest.mark.parametrize("mode", ["min_size", "max_size"])
    def test_the_end_of_an_epoch_has_a_state_and_a_report(self, mode: str) -> None:
        group = a_group(mode)
        end = group.num_batches()

        assert group.report_at(0, end).keys() == {"several", "single"}
        assert a_group(mode).load(group.state_at(0, end - 1), where=WHERE) == (0, end - 1)

    def test_the_end_of_an_epoch_has_a_report_beside_a_loader_that_starts_over(self) -> None:
        group = a_group("max_size_cycle")

        assert group.num_batches() == len(group.loaders["several"])
        assert group.report_at(0, group.num_batches()).keys() == {"several", "single"}

    def test_several_sources_that_would_have_to_start_over_are_refused_with_the_remedy(self) -> None:
        group = a_group("max_size_cycle", length=99)

        with pytest.raises(ConfigurationError, match=r"Loader .several. has 12 .* num_steps=50"):
            group.refuse_short_sources(group.num_batches())

    def test_with_the_steps_that_the_message_names_it_works(self) -> None:
        group = a_group("max_size_cycle", length=99, num_steps=50)

        assert group.position("several", 0, 49) is not None

    def test_with_steps_later_epochs_go_on_where_each_source_stands(self) -> None:
        group = a_group("min_size", num_steps=4)
        fresh = a_group("min_size", num_steps=4)
        fresh.load(group.state_at(1, 2), where=WHERE)

        for epoch in (2, 5):
            assert fresh.position("several", epoch, 0) == group.position("several", epoch, 0)

    def test_a_change_is_named_with_the_path_of_the_loader(self) -> None:
        state = a_group("min_size").state_at(0, 2)
        with pytest.raises(StateMismatchError) as caught:
            a_group("min_size", seed=1).load(state, where=WHERE)

        assert [difference.path for difference in caught.value.differences] == ["several.seed"]

    @pytest.mark.parametrize(
        "accept",
        [
            "seed",
            "several.seed",
            "several",
        ],
    )
    def test_a_change_is_accepted_by_its_path(self, accept: str) -> None:
        group = a_group("min_size")
        fresh = a_group("min_size", seed=1)
        fresh.load(group.state_at(0, 2), accept=(accept,), where=WHERE)
        several = fresh.report_at(0, 2)["several"]

        assert several == group.report_at(0, 2)["several"]


@pytest.mark.parametrize("options", [{}, {"num_steps": 5}])
def test_sources_that_are_done_before_the_other_loader_stay_done_after_a_resume(options: dict[str, Any]) -> None:
    def make() -> LoaderGroup:
        sources = StatefulLoader(list(range(20)), batch_sampler=RoundRobinBatchSampler([12, 8], 4, **options))
        return LoaderGroup({"sources": sources, "long": StatefulLoader(list(range(30)), batch_size=2)}, "max_size")

    whole = make()
    for batch in (4, 5, 6, 14):
        resumed = make()
        assert resumed.load(whole.state_at(0, batch), where="The state") == (0, batch)
        for epoch, step in ((0, batch), (1, 0), (1, 3), (2, 4)):
            assert resumed.state_at(epoch, step) == whole.state_at(epoch, step)
            positions = [group.position("sources", epoch, step) for group in (resumed, whole)]
            loader = resumed.loaders["sources"]
            served = [None if at is None else list(loader.plan.indices(at)) for at in positions]
            assert served[0] == served[1]
