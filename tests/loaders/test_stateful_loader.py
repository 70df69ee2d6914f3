"""A StatefulLoader goes on from any position, with everything that a DataLoader can do."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.loaders import StatefulLoader, build_patched
from lightning_stateful.state import sealed


class Numbers(Dataset[int]):
    """Samples are their indices; at module level, so that spawned workers find it."""

    sleeps_at: int | None = None

    def __init__(self, length: int = 12, fails_at: int | None = None) -> None:
        self.length, self.fails_at = length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.fails_at:
            raise OSError(f"sample {index} cannot be read")
        if index == self.sleeps_at:
            time.sleep(3)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def to_tuple(samples: list[int]) -> tuple[int, ...]:
    return tuple(samples)


def shift_by_the_workers_number(worker_id: int) -> None:
    get_worker_info().dataset.length += 1000 * (worker_id + 1)


class ReportsItsLength(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.length


def a_loader(length: int = 12, **options: Any) -> StatefulLoader:
    return StatefulLoader(Numbers(length), **{"batch_size": 2, "shuffle": True, **options})


def read(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def take(loader: StatefulLoader, count: int) -> list[list[int]]:
    """The first ``count`` batches of a pass that is then broken off."""
    iterator = iter(loader)
    return read(next(iterator) for _ in range(count))


def resumed(state: dict[str, Any], **options: Any) -> StatefulLoader:
    loader = a_loader(**options)
    loader.load_state_dict(state)
    return loader


def moved(state: dict[str, Any], **progress: Any) -> dict[str, Any]:
    """A state that was taken elsewhere in the epoch."""
    return sealed({**state, "progress": {**state["progress"], **progress}})


EPOCHS = [read(batches) for loader in [a_loader()] for batches in (list(loader), list(loader))]


class TestPasses:
    @pytest.mark.parametrize("options", [{}, {"seed_samples": False}, {"num_workers": 2}], ids=str)
    def test_a_batch_that_cannot_be_read_is_left_out_as_in_torch(self, options: dict[str, Any]) -> None:
        loader = StatefulLoader(Numbers(12, fails_at=5), batch_size=2, **options)
        iterator = iter(loader)
        read([next(iterator), next(iterator)])

        with pytest.raises(OSError, match="sample 5 cannot be read"):
            next(iterator)
        workers = loader._iterator
        assert loader.state_dict()["progress"]["consumed"] == 6
        assert read(iterator) == [[6, 7], [8, 9], [10, 11]]
        assert (loader.epoch, loader._iterator) == (1, workers)

    def test_a_batch_is_tried_again_where_a_worker_has_died(self) -> None:
        dataset = Numbers(12)
        loader = StatefulLoader(dataset, batch_size=2, num_workers=1, prefetch_factor=1, timeout=1)
        iterator = iter(loader)
        dataset.sleeps_at = 5
        read([next(iterator), next(iterator)])

        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        dataset.sleeps_at = None
        assert read(iterator) == [[4, 5], [6, 7], [8, 9], [10, 11]]


class TestEpochs:
    def test_the_sampler_that_lightning_looks_at_is_distributed_and_ignores_its_epochs(self) -> None:
        loader = a_loader()
        loader.sampler.set_epoch(5)

        assert isinstance(loader.sampler, DistributedSampler)
        assert list(loader.sampler) == [index for batch in EPOCHS[0] for index in batch]
        assert len(loader.sampler) == 12
        assert read(loader) == EPOCHS[0]

    @pytest.mark.parametrize("length", [0, 2, 7])
    def test_the_samplers_length_is_the_number_of_its_indices_on_every_rank(self, length: int) -> None:
        for rank in range(3):
            loader = a_loader(length, num_replicas=3, rank=rank)
            assert len(loader.sampler) == len(list(loader.sampler))


class TestOptionsOfADataLoader:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
            {"pin_memory": True},
        ],
    )
    def test_workers_change_neither_batches_nor_states(self, options: dict[str, Any]) -> None:
        loader = a_loader(**options)
        iterator = iter(loader)
        head = read([next(iterator), next(iterator)])
        state = loader.state_dict()
        del iterator
        fresh = resumed(state, **options)

        assert head == EPOCHS[0][:2]
        assert state["progress"]["consumed"] == 4
        assert [read(fresh), read(fresh)] == [EPOCHS[0][2:], EPOCHS[1]]

    def test_persistent_workers_begin_anywhere_and_again(self) -> None:
        loader = a_loader(num_workers=1, persistent_workers=True)
        take(loader, 2)
        loader.load_state_dict(moved(loader.state_dict(), consumed=8))
        rest = read(loader)
        loader.set_epoch(0)

        assert rest == EPOCHS[0][4:]
        assert read(loader) == EPOCHS[0]

    def test_the_workers_of_a_dropped_loader_end_without_the_garbage_collector(self) -> None:
        gc.collect()
        others = set(multiprocessing.active_children())
        gc.disable()
        try:
            loader = a_loader(num_workers=1, persistent_workers=True)
            iterator = iter(loader)
            next(iterator)
            del iterator, loader

            assert set(multiprocessing.active_children()) <= others
        finally:
            gc.enable()

    def test_a_worker_init_function_reaches_the_dataset_of_its_worker(self) -> None:
        loader = StatefulLoader(
            ReportsItsLength(4),
            num_workers=1,
            worker_init_fn=shift_by_the_workers_number,
            collate_fn=to_tuple,
        )

        assert list(loader) == [((index, 1004),) for index in range(4)]


class TestRefusals:
    def test_a_dataset_without_random_access_is_refused(self) -> None:
        with pytest.raises(UnsupportedLoaderError, match="Stream has no random access by index"):
            StatefulLoader(Stream())
        with pytest.raises(UnsupportedLoaderError, match="list_iterator has no random access by index"):
            StatefulLoader(iter([1]))


class TestRandomness:
    @staticmethod
    def generators() -> list[Any]:
        return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]

    @pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"pin_memory": True}])
    def test_iterating_leaves_the_generators_of_the_main_process_untouched(self, options: dict[str, Any]) -> None:
        loader = a_loader(**options)
        before = self.generators()
        seen = []
        for _ in loader:
            seen.append(self.generators() == before)
        take(loader, 2)
        loader.load_state_dict(loader.state_dict())

        assert seen == [True] * 6
        assert self.generators() == before


class TestWithoutLightning:
    def test_a_subclass_is_served_as_one_that_knows_nothing_of_its_constructor(self) -> None:
        class Mine(StatefulLoader):
            def __init__(self, scale: int) -> None:
                super().__init__(Numbers(), batch_size=2, shuffle=True)
                self.scale = scale

        taken: Any = build_patched(Mine(3), num_replicas=2, rank=0)

        assert (type(taken), taken.scale, len(taken)) == (Mine, 3, 3)


@pytest.mark.parametrize("how", [{"shuffle": True}, {"sampler": torch.utils.data.RandomSampler(range(6), True)}])
def test_a_state_has_the_users_seed_and_not_the_one_derived_for_the_loaders_path(how: dict[str, Any]) -> None:
    alone, beside = (StatefulLoader(Numbers(), batch_size=2, seed=5, path=path, **how) for path in ("", "a"))

    assert alone.state_dict()["config"]["seed"] == beside.state_dict()["config"]["seed"] == 5
    assert [batch.tolist() for batch in alone] != [batch.tolist() for batch in beside]
