"""Loaders over samplers that the toolkit has not written: dealt out, seeded and resumed like any other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from support.samplers import (
    LENGTH,
    LOADERS,
    PERMUTATIONS,
    BatchesWithoutLen,
    ByTheClock,
    Endless,
    GlobalRandom,
    HandedOn,
    OwnState,
    ShuffledBatches,
    ShufflesInPlace,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful.core import SequentialOrder, ShuffledOrder
from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.loaders import StatefulLoader, patch_dataloader, take_over
from lightning_stateful.samplers import DDPSamplerWrapper, StatefulDistributedSampler

DATA = list(range(LENGTH))
Make = Callable[[], DataLoader[Any]]


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def a_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


def batches_of(loader: Any) -> list[list[Any]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def on_ranks(make: Make, num_replicas: int, **options: Any) -> list[StatefulLoader]:
    return [patch_dataloader(make(), num_replicas=num_replicas, rank=rank, **options) for rank in range(num_replicas)]


def samples(loaders: list[Any]) -> list[int]:
    return sorted(index for loader in loaders for batch in batches_of(loader) for index in batch)


def advanced(loader: StatefulLoader, count: int) -> StatefulLoader:
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    return loader


def resumed(make: Callable[[], StatefulLoader], state: Any) -> StatefulLoader:
    loader = make()
    loader.load_state_dict(state)
    return loader


SAMPLED: dict[str, Callable[[], Any]] = {
    **PERMUTATIONS,
    "DistributedSampler": lambda: DistributedSampler(DATA, 2, 1, seed=3),
    "DistributedSampler, unshuffled": lambda: DistributedSampler(DATA, 5, 4, shuffle=False),
    "DistributedSampler, tail dropped": lambda: DistributedSampler(DATA, 4, 0, drop_last=True),
    "torchdata's distributed": lambda: TorchdataDistributedSampler(DATA, 2, 1, seed=3),
    "torchdata's distributed, tail dropped": lambda: TorchdataDistributedSampler(DATA, 4, 1, drop_last=True),
    "torchdata's random": lambda: TorchdataRandomSampler(DATA),
    "ours": lambda: StatefulDistributedSampler(DATA, 2, 1),
    "wrapped": lambda: DDPSamplerWrapper(GlobalRandom()),
    "wrapped with ranks of its own": lambda: DDPSamplerWrapper(GlobalRandom(), seed=3),
    "Lightning's": lambda: DistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1),
    "Lightning's for prediction": lambda: UnrepeatedDistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1),
    "Lightning's around torchdata's": lambda: DistributedSamplerWrapper(
        TorchdataDistributedSampler(DATA, 2, 1), num_replicas=2, rank=0
    ),
    "Lightning's around a wrapper": lambda: DistributedSamplerWrapper(
        DDPSamplerWrapper(GlobalRandom()), num_replicas=2, rank=0
    ),
    "a list": lambda: DATA[::-1],
}


class TestEverySampleOnce:
    @pytest.mark.parametrize("num_replicas", [1, 3])
    @pytest.mark.parametrize("name", SAMPLED)
    def test_over_samples(self, name: str, num_replicas: int) -> None:
        ranks = on_ranks(lambda: a_loader(batch_size=3, sampler=SAMPLED[name]()), num_replicas)

        assert samples(ranks) == DATA
        assert len({len(batches_of(rank)) for rank in ranks}) == 1

    @pytest.mark.parametrize("num_replicas", [2, 3])
    @pytest.mark.parametrize("kind", [ShuffledBatches, ShufflesInPlace, BatchesWithoutLen])
    def test_over_batches(self, kind: Any, num_replicas: int) -> None:
        # Only of fewer samples than ranks, left for the very last step, some come twice.
        counts = Counter(samples(on_ranks(lambda: a_loader(batch_sampler=kind()), num_replicas)))

        assert set(counts) == set(DATA)
        assert counts.total() - LENGTH < num_replicas

    @pytest.mark.parametrize("kind", [DistributedSampler, TorchdataDistributedSampler])
    def test_one_rank_serves_a_distributed_sampler_as_it_is(self, kind: Any) -> None:
        sampler = DistributedSampler(DATA, 1, 0, seed=3)
        expected = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected += list(sampler)
        patched = patch_dataloader(a_loader(batch_size=2, sampler=kind(DATA, 2, 1, seed=3)))

        assert [n for _ in range(2) for batch in batches_of(patched) for n in batch] == expected


class TestLightningsWrappers:
    def test_one_within_another_is_unwrapped(self) -> None:
        sampler = DistributedSamplerWrapper(GlobalRandom(), num_replicas=2, rank=1)
        batches = _IndexBatchSamplerWrapper(BatchSampler(sampler, 4, drop_last=False))

        assert samples(on_ranks(lambda: a_loader(batch_sampler=batches), 2)) == DATA

    @pytest.mark.parametrize("kind", [DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper])
    @pytest.mark.parametrize(
        ("sampler", "order"),
        [(RandomSampler(DATA), ShuffledOrder(LENGTH, 0)), (SequentialSampler(DATA), SequentialOrder(LENGTH))],
    )
    def test_a_plain_shuffle_or_sequence_within_one_is_an_order(self, kind: Any, sampler: Any, order: Any) -> None:
        patched = patch_dataloader(a_loader(batch_size=4, sampler=kind(sampler, num_replicas=2, rank=0)))

        assert patched.order.samples == order


class TestWrappersInALoader:
    @pytest.mark.parametrize(("tail", "count"), [("split", {6: LENGTH}), ("pad", {6: LENGTH + 2}), ("drop", {6: 18})])
    def test_the_tail_of_samples_is_the_wrappers(self, tail: Any, count: dict[int, int]) -> None:
        ranks = on_ranks(lambda: a_loader(batch_size=3, sampler=DDPSamplerWrapper(GlobalRandom(), tail=tail)), 3)
        found = samples(ranks)

        assert len(found) == count[6]
        assert set(found) <= set(DATA)
        assert tail == "drop" or set(found) == set(DATA)

    @pytest.mark.parametrize("where", ["sampler", "batch_sampler"])
    def test_slots_go_to_ranks_in_a_random_order_on_request(self, where: str) -> None:
        def make(**options: Any) -> Make:
            sampler = GlobalRandom() if where == "sampler" else ShuffledBatches()
            size = {"batch_size": 4} if where == "sampler" else {}
            return lambda: a_loader(**{where: DDPSamplerWrapper(sampler, **options)}, **size)

        plain = on_ranks(make(), 2)
        mixed = on_ranks(make(shuffle_samples_between_gpus=True), 2)
        shares = [[batches_of(rank) for rank in ranks] for ranks in (plain, mixed)]

        assert samples(mixed) == DATA
        assert shares[0] != shares[1]
        for one, other in zip(zip(*shares[0], strict=True), zip(*shares[1], strict=True), strict=True):
            assert sorted(n for batch in one for n in batch) == sorted(n for batch in other for n in batch)

    def test_a_length_makes_an_epoch_of_an_endless_sampler(self) -> None:
        patched = patch_dataloader(a_loader(batch_size=4, sampler=DDPSamplerWrapper(Endless(), length=10)))

        assert [len(batch) for batch in batches_of(patched)] == [4, 4, 2]
        assert len(patched) == 3

    def test_the_seed_is_the_wrappers_unless_it_has_none(self) -> None:
        def make(seed: int, own: int | None) -> list[list[int]]:
            sampler = DDPSamplerWrapper(GlobalRandom(), seed=own)
            return batches_of(patch_dataloader(a_loader(batch_size=4, sampler=sampler), seed=seed))

        assert make(1, 5) == make(2, 5)
        assert make(1, None) != make(2, None)
        assert make(5, None) == make(1, 5)
        assert make(5, 0) == make(1, 0)

    def test_ranks_of_the_wrappers_own_are_used(self) -> None:
        ranks = [
            patch_dataloader(a_loader(batch_size=2, sampler=DDPSamplerWrapper(GlobalRandom(), 2, rank)))
            for rank in range(2)
        ]

        assert samples(ranks) == DATA
        assert [rank.topology.rank for rank in ranks] == [0, 1]

    def test_what_the_wrapper_lets_pass_the_loader_lets_pass(self) -> None:
        wrapper = DDPSamplerWrapper(ByTheClock(), accept=("nondeterministic",))

        assert samples([patch_dataloader(a_loader(batch_size=4, sampler=wrapper))]) == DATA

    def test_the_wrapper_itself_does_not_move(self) -> None:
        wrapper = DDPSamplerWrapper(GlobalRandom(), 1, 0)
        before = wrapper.state_dict()
        list(patch_dataloader(a_loader(batch_size=4, sampler=wrapper)))

        assert wrapper.state_dict() == before


class TestRefusedSamplers:
    def test_one_that_differs_from_run_to_run_is_refused_by_name(self) -> None:
        with pytest.raises(UnsupportedLoaderError, match="ByTheClock yields something else when the same epoch is"):
            patch_dataloader(a_loader(sampler=ByTheClock()))


class Strings(Sampler[str]):
    """Names of samples."""

    def __iter__(self) -> Iterator[str]:
        return iter([f"name {number}" for number in torch.randperm(LENGTH).tolist()])

    def __len__(self) -> int:
        return LENGTH


class Pairs(Sampler[tuple[int, str]]):
    """Indices with a choice that the dataset is to make."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter([(number, random.choice("ab")) for number in torch.randperm(LENGTH).tolist()])

    def __len__(self) -> int:
        return LENGTH


class Drawn(Dataset[Any]):
    """Samples that say which they are and what was drawn for them from torch, NumPy and ``random``."""

    def __getitem__(self, index: Any) -> tuple[str, tuple[float, float, float]]:
        return str(index), (torch.rand(1).item(), float(np.random.rand()), random.random())


def as_list(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]


INDICES: dict[str, Callable[[], Any]] = {
    "ints": GlobalRandom,
    "NumPy's ints": lambda: list(np.arange(LENGTH)[::-1]),
    "tensors": lambda: list(torch.arange(LENGTH)),
    "strings": Strings,
    "tuples": Pairs,
    "own state": OwnState,
}


def drawn(sampler: str, *, batch_size: int | None = 3, **options: Any) -> dict[str, Any]:
    """What was drawn for each sample of an epoch."""
    loader = DataLoader(Drawn(), batch_size=batch_size, sampler=INDICES[sampler](), collate_fn=as_list, **options)
    epoch = dict(sample for batch in patch_dataloader(loader) for sample in batch)
    assert len(epoch) == LENGTH
    return epoch


class TestAugmentation:
    @pytest.mark.parametrize(
        ("name", "batch_size"),
        [("ints", 3), ("NumPy's ints", 3), ("tensors", None), ("strings", 3), ("tuples", None), ("own state", 3)],
    )
    def test_it_is_alike_for_any_number_of_workers(self, name: str, batch_size: int | None) -> None:
        assert drawn(name, batch_size=batch_size) == drawn(name, batch_size=batch_size, num_workers=2)


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
        return index.id if isinstance(index, Opaque) else str(index)


class TestWithoutBatchSize:
    @pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": GlobalRandom()}])
    @pytest.mark.parametrize("num_replicas", [1, 11])
    def test_single_samples_come_once_each(self, options: dict[str, Any], num_replicas: int) -> None:
        ranks = on_ranks(lambda: a_loader(batch_size=None, **options), num_replicas)

        assert sorted(int(sample) for rank in ranks for sample in rank) == DATA
        assert [len(rank) for rank in ranks] == [LENGTH // num_replicas] * num_replicas
        assert all(rank.batch_size is None and rank.batch_sampler is None for rank in ranks)

    @pytest.mark.parametrize("num_replicas", [1, 2, 3])
    def test_ready_batches_are_handed_to_the_dataset_and_split_at_the_end(self, num_replicas: int) -> None:
        def make() -> DataLoader[Any]:
            return DataLoader(HandedOn(), batch_size=None, sampler=BatchSampler(GlobalRandom(), 3, drop_last=False))

        ranks = on_ranks(make, num_replicas)
        served = [n for rank in ranks for batch in rank for n in batch["id"].tolist()]
        assert sorted(served) == DATA

    @pytest.mark.parametrize("kind", [OpaqueBatches, mappings])
    def test_objects_are_dealt_out_as_they_are(self, kind: Any) -> None:
        ranks = on_ranks(lambda: DataLoader(Reads(), batch_size=None, sampler=kind()), 3)
        served = sorted(batch for rank in ranks for batch in rank)

        assert len(served) == len(set(served)) == 9

    @pytest.mark.parametrize(("kind", "num_workers"), [(OpaqueBatches, 2), (mappings, 0), (GlobalRandom, 0)])
    def test_resumed_it_goes_on_exactly(self, kind: Any, num_workers: int) -> None:
        def make() -> StatefulLoader:
            return patch_dataloader(DataLoader(Reads(), batch_size=None, sampler=kind(), num_workers=num_workers))

        patched = make()
        iterator = iter(patched)
        [next(iterator) for _ in range(4)]

        assert list(resumed(make, patched.state_dict())) == list(iterator)


class TestDatasets:
    def test_tuples_are_handed_to_the_dataset_as_they_are_one_by_one(self) -> None:
        asked: list[Any] = []

        class Asked(Dataset[Any]):
            def __getitem__(self, index: Any) -> Any:
                asked.append(index)
                return 0

        for rank in on_ranks(lambda: DataLoader(Asked(), batch_size=None, sampler=Pairs()), 3):
            list(rank)

        assert {type(index) for index in asked} == {tuple}

    def test_batches_as_arrays_are_read(self) -> None:
        for make in (torch.tensor, np.array):
            batches = [make([n, n + 1]) for n in DATA[::2]]
            found = on_ranks(lambda batches=batches: a_loader(batch_sampler=batches), 3)
            assert samples(found) == DATA

    def test_batches_as_generators_are_read_on_one_rank(self) -> None:
        class Lazy(Sampler[Any]):
            def __iter__(self) -> Iterator[Any]:
                return (range(n, n + 2) for n in DATA[::2])

        assert samples([patch_dataloader(a_loader(batch_sampler=Lazy()))]) == DATA


class TestThoseWhoLook:
    @pytest.mark.parametrize("kind", [ShuffledBatches, BatchesWithoutLen])
    def test_at_its_batch_sampler_move_nothing(self, kind: Any) -> None:
        def make() -> StatefulLoader:
            return patch_dataloader(a_loader(batch_sampler=kind()))

        whole = batches_of(make())
        patched = make()
        iterator = iter(patched)
        next(iterator)

        assert list(patched.batch_sampler) == whole
        assert batches_of(resumed(make, patched.state_dict())) == batches_of(iterator) == whole[1:]

    def test_for_a_length_find_none_where_the_sampler_has_none(self) -> None:
        patched = patch_dataloader(a_loader(batch_sampler=BatchesWithoutLen()))

        for each in (patched, patched.batch_sampler):
            with pytest.raises(TypeError, match=r"The sampler has no len\(\)"):
                len(each)


class TestWorkers:
    @pytest.mark.parametrize("name", sorted(set(LOADERS) - {"torchdata's loader"})[::3])
    def test_what_workers_fetch_ahead_does_not_count(self, name: str) -> None:
        def make(num_workers: int) -> StatefulLoader:
            plain = LOADERS[name]()
            how: dict[str, Any] = {"batch_sampler": plain.batch_sampler}
            if type(plain.batch_sampler) in (BatchSampler, type(None)):
                how = {"sampler": plain.sampler, "batch_size": plain.batch_size}
            plain = DataLoader(plain.dataset, collate_fn=plain.collate_fn, num_workers=num_workers, **how)
            return patch_dataloader(plain)

        alone = advanced(make(0), 3)
        patched = make(2)
        iterator = iter(patched)
        [next(iterator) for _ in range(3)]

        assert patched.state_dict() == alone.state_dict()
        rest = [batch["id"].tolist() for batch in iterator]
        assert [batch["id"].tolist() for batch in resumed(lambda: make(1), alone.state_dict())] == rest


class TestTakingOverAgain:
    @pytest.mark.parametrize("name", LOADERS)
    def test_a_patched_loader_that_is_taken_over_serves_the_same(self, name: str) -> None:
        def ids(loader: StatefulLoader) -> list[Any]:
            return [(batch["id"].tolist(), batch["x"].tolist()) for batch in loader]

        for rank in range(2):
            once = patch_dataloader(LOADERS[name](), num_replicas=2, rank=rank)
            twice = take_over(patch_dataloader(LOADERS[name]()), num_replicas=2, rank=rank)
            assert twice.state_dict() == once.state_dict()
            assert ids(twice) == ids(once)
