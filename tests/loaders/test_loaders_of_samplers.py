"""Loaders over samplers of others are unwrapped, dealt out and seeded; those over mixtures and buckets serve theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harm.own_samplers import ShufflesWhenTold
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from support.runs import served_in_loop
from support.samplers import LENGTH, LOADERS, BatchesWithoutLen, ByTheClock, GlobalRandom
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful.core import ShuffledOrder
from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError
from lightning_stateful.loaders import StatefulLoader, build_patched, patch_dataloader
from lightning_stateful.samplers import (
    BucketBatchSampler,
    MixtureBatchSampler,
    RoundRobinBatchSampler,
)
from lightning_stateful.user_samplers import DDPSamplerWrapper

DATA = list(range(LENGTH))

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def patched(dataset: Any = DATA, *, num_replicas: int | None = None, rank: int | None = None, **options: Any) -> Any:
    return patch_dataloader(DataLoader(dataset, **options), num_replicas=num_replicas, rank=rank)


def batches_of(loader: Any) -> list[list[Any]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def samples(loaders: list[Any]) -> list[int]:
    return sorted(index for loader in loaders for batch in batches_of(loader) for index in batch)


SAMPLED: dict[str, Callable[[int], Any]] = {
    "DistributedSampler": lambda rank: DistributedSampler(DATA, 3, rank, seed=3),
    "torchdata's distributed": lambda rank: TorchdataDistributedSampler(DATA, 3, rank),
    "Lightning's": lambda _: DistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1),
    "Lightning's for prediction": lambda _: UnrepeatedDistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1),
    "Lightning's around torchdata's": lambda rank: DistributedSamplerWrapper(
        TorchdataDistributedSampler(DATA, 3, rank), num_replicas=2, rank=0
    ),
    "Lightning's around a wrapper": lambda _: DistributedSamplerWrapper(
        DDPSamplerWrapper(GlobalRandom()), num_replicas=2, rank=0
    ),
}


class TestSamplersThatDealOut:
    @pytest.mark.parametrize("name", SAMPLED)
    def test_every_sample_comes_once_over_the_ranks_in_equal_steps(self, name: str) -> None:
        ranks = [patched(batch_size=3, sampler=SAMPLED[name](rank), num_replicas=3, rank=rank) for rank in range(3)]

        assert samples(ranks) == DATA
        assert len({len(batches_of(rank)) for rank in ranks}) == 1

    @pytest.mark.parametrize("kind", [DistributedSampler, TorchdataDistributedSampler])
    def test_one_that_was_given_other_ranks_than_there_are_is_served_as_it_is(self, kind: Any) -> None:
        sampler, loader = (
            DistributedSampler(DATA, 2, 1, seed=3),
            patched(batch_size=2, sampler=kind(DATA, 2, 1, seed=3)),
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert [index for batch in batches_of(loader) for index in batch] == list(sampler)

    def test_one_of_lightnings_within_another_is_unwrapped(self) -> None:
        sampler = DistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1)
        batches = _IndexBatchSamplerWrapper(BatchSampler(sampler, 4, drop_last=False))

        assert samples([patched(batch_sampler=batches, num_replicas=2, rank=rank) for rank in range(2)]) == DATA

    @pytest.mark.parametrize("kind", [DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper])
    def test_a_plain_shuffle_within_one_is_an_order(self, kind: Any) -> None:
        loader = patched(batch_size=4, sampler=kind(RandomSampler(DATA), num_replicas=2, rank=0))

        assert loader.order.samples == ShuffledOrder(LENGTH, 0)


class TestWrappersInALoader:
    @pytest.mark.parametrize(("tail", "count"), [("split", LENGTH), ("pad", LENGTH + 2), ("drop", 18)])
    def test_the_tail_of_samples_is_the_wrappers(self, tail: Any, count: int) -> None:
        sampler = DDPSamplerWrapper(GlobalRandom(), tail=tail)
        found = samples([patched(batch_size=3, sampler=sampler, num_replicas=3, rank=rank) for rank in range(3)])

        assert len(found) == count
        assert len(set(found)) == min(count, LENGTH)

    def test_the_seed_is_the_wrappers_unless_it_has_none(self) -> None:
        def drawn(seed: int, own: int | None) -> list[list[int]]:
            sampler = DDPSamplerWrapper(GlobalRandom(), seed=own)
            return batches_of(patch_dataloader(DataLoader(DATA, batch_size=4, sampler=sampler), seed=seed))

        assert drawn(1, 5) == drawn(2, 5) == drawn(5, None) != drawn(1, None)
        assert drawn(5, 0) == drawn(1, 0)

    def test_ranks_of_the_wrappers_own_are_used_and_it_does_not_move_itself(self) -> None:
        wrappers = [DDPSamplerWrapper(GlobalRandom(), 2, rank) for rank in range(2)]
        before = [wrapper.state_dict() for wrapper in wrappers]
        ranks = [patched(batch_size=2, sampler=wrapper) for wrapper in wrappers]

        assert samples(ranks) == DATA
        assert [rank.topology.rank for rank in ranks] == [0, 1]
        assert [wrapper.state_dict() for wrapper in wrappers] == before

    def test_a_sampler_that_differs_from_run_to_run_is_warned_of_unless_the_wrapper_lets_it_pass(self) -> None:
        wrapper = DDPSamplerWrapper(ByTheClock(), accept=("nondeterministic",))

        assert samples([patched(batch_size=4, sampler=wrapper)]) == DATA
        with pytest.warns(StatefulWarning, match="ByTheClock yields something else at item"):
            assert samples([patched(sampler=ByTheClock())]) == DATA


class Pairs(Sampler[tuple[int, str]]):
    """Indices with a choice that the dataset is to make."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter([(number, random.choice("ab")) for number in torch.randperm(LENGTH).tolist()])

    def __len__(self) -> int:
        return LENGTH


class Opaque:
    """A batch that only its dataset understands; it can be told apart by its id."""

    def __init__(self, number: int) -> None:
        self.id = f"cut {number}"


class OpaqueBatches(Sampler[Opaque]):
    def __iter__(self) -> Iterator[Opaque]:
        return iter([Opaque(number) for number in torch.randperm(9).tolist()])


def mappings() -> list[dict[str, Any]]:
    """Each says by a dict what to read."""
    return [{"file": "a", "rows": [number, number + 1]} for number in range(9)]


class Reads(Dataset[Any]):
    """Answers to whatever it is asked for; it has no length."""

    def __getitem__(self, index: Any) -> str:
        return index.id if isinstance(index, Opaque) else f"{type(index).__name__} {index}"


class TestWithoutBatchSize:
    @pytest.mark.parametrize(("kind", "count"), [(OpaqueBatches, 9), (mappings, 9), (Pairs, LENGTH)])
    def test_objects_are_dealt_out_as_they_are_and_go_on_exactly(self, kind: Any, count: int) -> None:
        ranks, others = (
            [patched(Reads(), batch_size=None, sampler=kind(), num_replicas=3, rank=r) for r in range(3)] for _ in "ab"
        )
        served, states = [], []
        for loader in ranks:
            batches = iter(loader)
            served.append([next(batches), next(batches)])
            states.append(loader.state_dict())
        rest = []
        for loader in others:
            loader.load_state_dict(states[0])
            rest.append(list(loader))
        found = [batch for rank in [*served, *rest] for batch in rank]

        assert states == [states[0]] * 3
        assert len(set(found)) == count
        assert all(name.startswith("tuple") for name in found) == (kind is Pairs)


class TestBatches:
    def test_batches_as_arrays_and_as_generators_are_read(self) -> None:
        class Lazy(Sampler[Any]):
            def __iter__(self) -> Iterator[Any]:
                return (range(n, n + 2) for n in DATA[::2])

        for make in (torch.tensor, np.array):
            batches = [make([n, n + 1]) for n in DATA[::2]]
            assert (
                samples([patched(batch_sampler=batches[1:], num_replicas=2, rank=rank) for rank in (0, 1)]) == DATA[2:]
            )
        assert samples([patched(batch_sampler=Lazy())]) == DATA

    def test_a_state_from_behind_the_last_batch_says_that_the_first_loop_is_the_next_epoch(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        whole, resumed = (patched(batch_sampler=BatchesWithoutLen()) for _ in range(2))
        states = [whole.state_dict() for _ in whole]
        resumed.load_state_dict(states[-1])
        assert batches_of(resumed) == batches_of(whole)
        assert "epoch 0, which a sampler without length shows only now. This pass is epoch 1" in caplog.text

    def test_those_who_look_at_a_batch_sampler_move_nothing_and_find_no_length_where_there_is_none(self) -> None:
        whole = batches_of(patched(batch_sampler=BatchesWithoutLen()))
        loader = patched(batch_sampler=BatchesWithoutLen())
        iterator = iter(loader)
        next(iterator)

        assert list(loader.batch_sampler) == whole
        assert batches_of(iterator) == whole[1:]
        for each in (loader, loader.batch_sampler):
            with pytest.raises(TypeError, match=r"The sampler has no len\(\)"):
                len(each)


@pytest.mark.parametrize("name", ["own state", "class balanced", "batches handed on"])
def test_a_patched_loader_that_is_patched_again_serves_the_same(name: str) -> None:
    def ids(loader: StatefulLoader) -> list[Any]:
        return [(batch["id"].tolist(), batch["x"].tolist()) for batch in loader]

    once = patch_dataloader(LOADERS[name](), num_replicas=2, rank=1)
    twice = build_patched(patch_dataloader(LOADERS[name]()), num_replicas=2, rank=1)

    assert twice.state_dict() == once.state_dict()
    assert ids(twice) == ids(once)


# Over mixtures and buckets


SOURCES = {"a": 7, "b": 12, "c": 4}
LENGTHS = [random.Random(seed).randint(1, 12) for seed in range(23)]
OF_SOURCES = list(range(23))


class Versioned(list[int]):
    """Says what it is."""

    def describe(self) -> dict[str, Any]:
        return {"version": 2}


SAMPLERS: dict[str, Any] = {
    "round robin": lambda **options: RoundRobinBatchSampler(SOURCES, 2, **options),
    "cycle": lambda **options: MixtureBatchSampler(SOURCES, [1, 2, 3], weights=[2, 1, 1], stop="cycle", **options),
    "by sample": lambda **options: MixtureBatchSampler(SOURCES, 4, by="sample", num_steps=9, **options),
    "buckets": lambda **options: BucketBatchSampler(LENGTHS, max_tokens=30, num_buckets=3, **options),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
round_robin, buckets = SAMPLERS["round robin"], SAMPLERS["buckets"]


def a_loader(sampler: Any, **options: Any) -> StatefulLoader:
    return StatefulLoader(OF_SOURCES, batch_sampler=sampler, **options)


def plain(sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(OF_SOURCES, batch_sampler=sampler, **options)


class TestPlannedBatches:
    @every_sampler
    def test_it_serves_those_of_its_sampler_and_shows_the_rest_of_the_pass(self, make: Any) -> None:
        sampler, loader = make(num_replicas=2, rank=1), a_loader(make(num_replicas=2, rank=1))
        assert [batches_of(loader), batches_of(loader)] == [list(sampler), list(sampler)]
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        batches = list(loader.batch_sampler)

        assert list(loader.sampler) == [index for batch in batches for index in batch]
        assert batches_of(loader) == batches
        loader.set_epoch(5)
        assert len(list(loader.batch_sampler)) == len(loader.batch_sampler) == len(loader)
        assert isinstance(loader.sampler, DistributedSampler)

    def test_ranks_given_to_the_loader_count_before_the_samplers_which_may_be_an_order_alone(self) -> None:
        loader = a_loader(round_robin(num_replicas=2, rank=0), num_replicas=3, rank=2)
        bare = a_loader(round_robin().order, num_replicas=3, rank=2)

        assert (loader.topology.num_replicas, loader.topology.rank) == (3, 2)
        assert batches_of(bare) == batches_of(loader)

    def test_a_dataset_of_another_length_is_refused_with_both_numbers(self) -> None:
        for batches in (buckets(), buckets().order):
            with pytest.raises(ConfigurationError, match="There are 23 lengths, and the dataset has 24 samples"):
                StatefulLoader(range(24), batch_sampler=batches)


class TestStatesOfPlannedBatches:
    def test_another_dataset_of_the_same_lengths_is_refused(self) -> None:
        with pytest.raises(StateMismatchError, match=r"dataset\.version"):
            StatefulLoader(Versioned(OF_SOURCES), batch_sampler=buckets()).load_state_dict(
                a_loader(buckets()).state_dict()
            )

    def test_a_state_of_the_sampler_alone_is_one_of_the_loader_but_for_what_it_does_not_say(self) -> None:
        state = buckets().state_dict(num_batches=4)
        with pytest.raises(StateMismatchError, match="dataset"):
            a_loader(buckets()).load_state_dict(state)
        accepting = a_loader(buckets(), accept="dataset")
        accepting.load_state_dict(state)
        assert batches_of(accepting) == list(buckets())[4:]


class TestPatchedPlannedBatches:
    def test_what_the_sampler_accepts_is_accepted_when_it_is_patched_again_too(self) -> None:
        loader = build_patched(plain(round_robin(accept="seed")), accept="weights", seed=4)
        again = build_patched(loader, seed=9, num_replicas=2, rank=1)
        again.load_state_dict(build_patched(plain(round_robin(seed=8))).state_dict())

        assert (again.accept, again.seed, again.topology.num_replicas) == (("seed", "weights"), 4, 2)

    def test_for_evaluation_it_is_served_in_the_same_order_every_time(self) -> None:
        loader = build_patched(plain(RoundRobinBatchSampler(SOURCES, 3)), shuffle=False)
        first, second = batches_of(loader), batches_of(loader)

        assert first == second
        assert first[:3] == [[0, 1, 2], [7, 8, 9], [19, 20, 21]]

    def test_a_batch_sampler_derived_from_torchs_is_run_as_it_is(self) -> None:
        class Own(BatchSampler):
            pass

        assert list(build_patched(plain(Own(range(23), 2, False))).batch_sampler)[:2] == [[0, 1], [2, 3]]


class Draws(Sampler[int]):
    """Draws by weights that the training loop sets."""

    def __init__(self) -> None:
        self.weights = torch.ones(12)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 12, replacement=True).tolist())


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs")
def test_a_sampler_that_a_plain_loop_has_set_and_that_is_not_set_again_is_warned_of() -> None:
    sampler = Draws()
    loader = patch_dataloader(DataLoader(range(12), batch_size=4, sampler=sampler), seed=0)  # type: ignore[arg-type]
    list(loader)
    sampler.weights = torch.arange(1.0, 13)
    state, rest = loader.state_dict(), [batch.tolist() for batch in loader]
    for restored in (True, False):
        sampler = Draws()
        resumed = patch_dataloader(DataLoader(range(12), batch_size=4, sampler=sampler), seed=0)  # type: ignore[arg-type]
        resumed.load_state_dict(state)
        if restored:
            sampler.weights = torch.arange(1.0, 13)
            assert [batch.tolist() for batch in resumed] == rest
            continue
        with pytest.warns(StatefulWarning, match="Draws had been changed in training when the checkpoint was written"):
            assert [batch.tolist() for batch in resumed] != rest


def test_an_accepted_sequence_is_warned_of_where_an_epoch_begins() -> None:
    loader = patch_dataloader(DataLoader(range(12), batch_size=4, sampler=Draws()), seed=0)  # type: ignore[arg-type]
    list(loader)
    state, other = loader.state_dict(), Draws()
    other.weights = torch.arange(1.0, 13)
    data: Any = DataLoader(range(12), batch_size=4, sampler=other)  # type: ignore[arg-type]
    with pytest.warns(StatefulWarning, match="does not yield its first epoch as it did, as was accepted"):
        patch_dataloader(data, seed=0, accept=("sequence",)).load_state_dict(state)


class ToldByLoops(Sampler[int]):
    """Is told the epoch by the training loop, as torch's DistributedSampler is."""

    def __init__(self, draw: Callable[[list[int], int], Any] | None) -> None:
        self.epoch, self.draw, self.order = 0, draw, list(range(12))

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = (self.draw is not None and self.draw(self.order, epoch)) or self.order

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(self.order, 12) if self.draw is None else self.order)


class LongerEachEpoch(ToldByLoops):
    """Has as many samples as the epoch says."""

    def __len__(self) -> int:
        return 8 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(12), k=len(self)))


def looped(sampler: Any, *, state: Any = None, stop: int = -1) -> tuple[list[list[int]], Any]:
    """Batches of four epochs of a plain loop that tells a sampler the epoch, and the state after ``stop`` of them."""
    loader: Any = patch_dataloader(DataLoader(range(12), batch_size=4, sampler=sampler), seed=0)  # type: ignore[arg-type]
    served = list[list[int]]()
    if state is not None:
        loader.load_state_dict(state)
    for epoch in range(0 if state is None else state["progress"]["epoch"], 4):
        sampler.set_epoch(epoch)
        for batch in loader:
            served.append(batch.tolist())
            if len(served) == stop:
                return served, loader.state_dict()
    return served, None


DRAWS: dict[str, Callable[[list[int], int], Any] | None] = {
    "by the epoch": None,
    "drawn": lambda _, __: random.sample(range(12), 12),
    "drawn in every second epoch": lambda _, epoch: None if epoch % 2 else random.sample(range(12), 12),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_plain_loop_that_tells_a_sampler_the_epoch_is_resumed_where_an_epoch_ends_and_within_it(draw: Any) -> None:
    served, _ = looped(ToldByLoops(draw))
    for stop in (3, 5, 6, 9):
        before, state = looped(ToldByLoops(draw), stop=stop)

        assert before + looped(ToldByLoops(draw), state=state)[0] == served


def test_one_that_shuffles_what_it_was_left_with_whenever_it_is_told_is_warned_of_in_the_run_and_on_a_resume() -> None:
    def shuffle(order: list[int], _: int) -> None:
        random.shuffle(order)

    with pytest.warns(StatefulWarning, match="follows from how often its set_epoch was called"):
        _, state = looped(ToldByLoops(shuffle), stop=6)
    with pytest.warns(StatefulWarning, match="follows from how often its set_epoch was called"):
        looped(ToldByLoops(shuffle), state=state)


class NotesTheEpoch(ShufflesWhenTold):
    """Has the epoch in an attribute of the usual name, 0 before it is told any."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


@pytest.mark.filterwarnings("ignore:.*follows from how often its set_epoch was called")
@pytest.mark.parametrize("kind", [ShufflesWhenTold, NotesTheEpoch])
def test_one_that_adds_up_what_a_plain_loop_tells_it_is_told_once(kind: Any) -> None:
    sampler, expected = kind(12), list[list[int]]()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in DataLoader(range(12), batch_size=4, sampler=sampler)]  # type: ignore[arg-type]
    assert looped(kind(12))[0] == expected


def test_a_length_that_follows_from_the_epoch_is_no_change_that_a_plain_loop_has_made() -> None:
    def served(state: Any = None, stop: int = -1) -> tuple[list[list[int]], Any]:
        loader: Any = patch_dataloader(DataLoader(range(12), batch_size=4, sampler=LongerEachEpoch(None)), seed=0)  # type: ignore[arg-type]
        return served_in_loop(loader, 3, state, stop)

    for stop in (2, 3, 5):
        before, state = served(stop=stop)

        assert before + served(state)[0] == served()[0]
