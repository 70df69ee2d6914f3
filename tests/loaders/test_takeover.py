"""A user's DataLoader is taken over with everything that it does, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index import BlockShuffledOrder, SequentialOrder
from lightning_stateful.loaders import StatefulLoader, take_over
from lightning_stateful.samplers import StatefulDistributedSampler

DATA = list(range(12))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class QuietLoader(DataLoader[int]):
    """A subclass that iterates as its base does."""


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return torch.rand(1).item()


def to_tuple(samples: list[int]) -> tuple[int, ...]:
    return tuple(samples)


def initialise(worker_id: int) -> None:
    pass


def a_loader(**options: Any) -> DataLoader[int]:
    return DataLoader(DATA, **{"batch_size": 5, **options})


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


class TestWhatIsTakenOver:
    @pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": 4}, {"batch_size": 100}])
    def test_a_sequential_loader_serves_the_same_batches(self, options: dict[str, Any]) -> None:
        loader = a_loader(**options)

        assert read(take_over(loader)) == read(loader)
        assert len(take_over(loader)) == len(loader)

    @pytest.mark.parametrize(
        "sampler",
        [
            RandomSampler(DATA),
            RandomSampler(DATA, num_samples=7),
            RandomSampler(DATA, num_samples=30),
            RandomSampler(DATA, replacement=True),
            SubsetRandomSampler([7, 3, 1, 0, 8]),
            WeightedRandomSampler([1.0] * 12, 9),
            WeightedRandomSampler([1.0] * 12, 9, replacement=False),
            SequentialSampler(DATA[:8]),
        ],
        ids=lambda sampler: type(sampler).__name__,
    )
    def test_each_of_torchs_samplers_keeps_its_length_and_samples(self, sampler: Sampler[int]) -> None:
        loader = a_loader(sampler=sampler)
        taken = take_over(loader, seed=1)
        served = [index for batch in read(taken) for index in batch]

        assert [len(batch) for batch in read(taken)] == [len(batch) for batch in read(loader)]
        assert len(served) == len(sampler)
        assert set(served) <= set(getattr(sampler, "indices", DATA))

    def test_shuffle_is_taken_over_with_the_seed_given(self) -> None:
        loader = a_loader(shuffle=True)

        assert sorted(index for batch in read(take_over(loader)) for index in batch) == DATA
        assert read(take_over(loader, seed=1)) == read(StatefulLoader(DATA, batch_size=5, shuffle=True, seed=1))
        assert read(take_over(loader, seed=1)) != read(take_over(loader, seed=2))

    def test_a_batch_sampler_of_torchs_own_is_taken_over(self) -> None:
        loader: DataLoader[int] = DataLoader(
            DATA,
            batch_sampler=BatchSampler(SequentialSampler(DATA), batch_size=5, drop_last=True),
        )

        assert read(take_over(loader)) == read(loader)

    @pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
    def test_a_distributed_sampler_is_dealt_out_anew(self, kind: Any) -> None:
        ranks = [
            take_over(a_loader(sampler=kind(DATA, 2, rank, seed=4)), num_replicas=3, rank=rank_of_three)
            for rank, rank_of_three in ((0, 0), (1, 1), (1, 2))
        ]

        assert sorted(index for rank in ranks for batch in read(rank) for index in batch) == DATA

    def test_every_option_of_a_data_loader_is_kept(self) -> None:
        loader = a_loader(
            num_workers=2,
            collate_fn=to_tuple,
            timeout=7,
            worker_init_fn=initialise,
            multiprocessing_context="fork",
            prefetch_factor=3,
            persistent_workers=True,
        )
        taken = take_over(loader)

        for name in ("num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers"):
            assert getattr(taken, name) == getattr(loader, name)
        assert taken.multiprocessing_context.get_start_method() == "fork"
        assert taken.dataset is loader.dataset

    def test_options_reach_the_batches(self) -> None:
        assert list(take_over(a_loader(collate_fn=to_tuple, num_workers=1))) == [
            (0, 1, 2, 3, 4),
            (5, 6, 7, 8, 9),
            (10, 11),
        ]

    def test_the_loader_that_is_taken_over_is_not_changed(self) -> None:
        loader = a_loader(shuffle=True)
        before = dict(vars(loader))
        list(take_over(loader))

        assert vars(loader) == before

    def test_a_subclass_that_iterates_as_its_base_is_taken_over(self) -> None:
        assert read(take_over(QuietLoader(DATA, batch_size=5))) == read(a_loader())

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_torchdata_loader_is_taken_over(self, shuffle: bool) -> None:
        loader: StatefulDataLoader[int] = StatefulDataLoader(DATA, batch_size=5, shuffle=shuffle, drop_last=True)

        assert read(take_over(loader, seed=1)) == read(
            StatefulLoader(DATA, batch_size=5, shuffle=shuffle, seed=1, drop_last=True)
        )

    def test_a_resumed_take_over_goes_on_exactly(self) -> None:
        loader = take_over(a_loader(shuffle=True))
        whole = read(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        next(iterator)
        fresh = take_over(a_loader(shuffle=True))
        fresh.load_state_dict(loader.state_dict())

        assert read(fresh) == whole[1:]

    def test_samples_are_seeded_unless_told_otherwise(self) -> None:
        loader = DataLoader(Noisy(), batch_size=12)

        assert torch.equal(*[next(iter(take_over(loader))) for _ in range(2)])
        assert not torch.equal(*[next(iter(take_over(loader, seed_samples=False))) for _ in range(2)])

    def test_shuffle_false_serves_every_sample_in_order_whatever_the_sampler(self) -> None:
        assert read(take_over(a_loader(shuffle=True), shuffle=False)) == read(a_loader())
        assert read(take_over(a_loader(sampler=SubsetRandomSampler([1])), shuffle=False)) == read(a_loader())

    def test_evaluation_can_be_exact(self) -> None:
        ranks = [take_over(a_loader(batch_size=1), num_replicas=5, rank=rank, exact=True) for rank in range(5)]

        assert sorted(index for rank in ranks for batch in read(rank) for index in batch) == DATA


class TestStatefulLoaders:
    def test_a_stateful_loader_keeps_its_settings(self) -> None:
        loader = StatefulLoader(
            DATA,
            batch_size=5,
            sampler=BlockShuffledOrder(12, 7, block_size=3),
            seed=7,
            seed_samples=False,
            exact=True,
            accept=("seed",),
            drop_last=True,
            num_replicas=2,
            rank=1,
        )
        taken = take_over(loader, seed=1, num_replicas=3, rank=0, accept=("dataset",))

        assert taken.state_dict() == loader.state_dict()
        assert (taken.seed, taken.seed_samples, taken.cut.exact) == (7, False, True)
        assert taken.accept == ("seed", "dataset")
        assert (taken.batch_size, taken.drop_last) == (5, True)
        assert read(taken) == read(loader)

    def test_one_without_ranks_of_its_own_gets_those_given(self) -> None:
        taken = take_over(StatefulLoader(DATA, batch_size=2), num_replicas=3, rank=1)

        assert read(taken) == [[2, 3], [8, 9]]

    def test_it_can_be_served_in_order(self) -> None:
        taken = take_over(StatefulLoader(DATA, batch_size=5, shuffle=True), shuffle=False)

        assert taken.order == SequentialOrder(12)
        assert read(taken) == read(a_loader())


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: 3, "it is a int and not a torch.utils.data.DataLoader"),
            (lambda: a_loader(in_order=False), "in_order=False hands batches over in no fixed order"),
        ],
    )
    def test_a_loader_that_cannot_be_computed_from_a_position_is_refused_with_the_reason(
        self, make: Any, reason: str
    ) -> None:
        with pytest.raises(UnsupportedLoaderError) as caught:
            take_over(make(), where="train_dataloader")

        assert str(caught.value).startswith("Cannot take over train_dataloader: ")
        assert reason in str(caught.value)

    def test_a_rank_out_of_range_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"rank must be in range\(2\), got 2"):
            len(take_over(a_loader(), num_replicas=2, rank=2))


class TestLoadersOfOneRank:
    @pytest.mark.parametrize(
        "sampler",
        [WeightedRandomSampler([1.0] * 12, 12), SubsetRandomSampler(DATA), RandomSampler(DATA, replacement=True), None],
        ids=["weighted", "subset", "with replacement", "shuffle"],
    )
    def test_what_torch_draws_differs_from_rank_to_rank(self, sampler: Any) -> None:
        def served(rank: int) -> list[int]:
            plain = a_loader(sampler=sampler) if sampler else a_loader(shuffle=True)
            taken = take_over(plain, num_replicas=2, rank=rank, own_rank=rank)
            return [index for batch in taken for index in batch.tolist()]

        assert served(0) == served(0)
        assert len(served(0)) == len(served(1)) == 12
        assert served(0) != served(1)
