"""The draws of a dataset are a function of (seed, path of its loader, epoch, batch), whoever reads it."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, get_worker_info

from lightning_stateful.core import Progress
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders import SeededDataset, StatefulLoader, keep_randomness

LENGTH = 12


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Draws from torch, NumPy and ``random``."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1, dtype=torch.double).item(), np.random.rand(), random.random()


class SeededByWorker(Noisy):
    """Derives a seed of its own from its worker's, as torch advises."""

    def __getitem__(self, index: int) -> tuple[int, float]:  # type: ignore[override]
        worker: Any = get_worker_info()
        assert worker.seed == torch.initial_seed()
        return index, np.random.default_rng((worker.seed + index) % 2**31).random()


class Mixup(Noisy):
    """Reads a batch at a time, and mixes its samples."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        share = random.random()
        return [
            (index, share * index + (1 - share) * other) for index, other in zip(indices, indices[::-1], strict=True)
        ]


def a_loader(dataset: Any = None, **options: Any) -> StatefulLoader:
    return StatefulLoader(dataset or Noisy(), **{"batch_size": 3, "shuffle": True, **options})


def drawn(batches: Any) -> list[list[list[float]]]:
    """Index and numbers of every sample, batch by batch."""
    return [[part.tolist() for part in batch] for batch in batches]


def numbers(batches: list[list[list[float]]]) -> set[float]:
    return {number for batch in batches for part in batch[1:] for number in part}


REFERENCE = drawn(a_loader())


class TestBatches:
    def test_every_sample_of_every_epoch_draws_numbers_of_its_own(self) -> None:
        loader = a_loader()
        epochs = [drawn(loader) for _ in range(3)]

        assert epochs[0] == REFERENCE
        assert len(set.union(*map(numbers, epochs))) == 3 * 3 * LENGTH

    def test_workers_draw_the_same_whatever_the_main_process_drew(self) -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

        assert drawn(a_loader(num_workers=2)) == REFERENCE

    def test_the_seed_of_a_worker_follows_from_the_batch_so_that_a_resume_may_read_it_in_another(self) -> None:
        loader, fresh = (a_loader(SeededByWorker(), num_workers=workers) for workers in (2, 1))
        whole = [drawn(loader) for _ in range(2)]

        assert len(set.union(*map(numbers, whole))) == 2 * LENGTH
        assert drawn(fresh.batches(fresh.plan(1), 1)) == whole[1][1:]

    @pytest.mark.parametrize("others", [({}, {"seed": 1}), ({}, {"path": "b"}), ({"rank": 0}, {"rank": 1})])
    def test_seeds_paths_and_ranks_draw_apart(self, others: tuple[dict[str, Any], ...]) -> None:
        one, other = (numbers(drawn(a_loader(num_replicas=2, **{"rank": 0, **how}))) for how in others)

        assert not one & other

    @pytest.mark.parametrize("how", [{}, {"sampler": SubsetRandomSampler(range(LENGTH)), "shuffle": False}])
    def test_a_second_pass_over_the_samples_within_an_epoch_draws_anew(self, how: dict[str, Any]) -> None:
        loader = a_loader(**how)
        first, again = (drawn(loader.batches(loader.plan(0, Progress(cycle=cycle)))) for cycle in (0, 1))

        assert len(first) == len(again) == len(REFERENCE)
        assert not numbers(first) & numbers(again)

    def test_seeding_can_be_switched_off(self) -> None:
        torch.manual_seed(0)
        one = drawn(a_loader(seed_samples=False))
        torch.manual_seed(1)

        assert [batch[0] for batch in one] == [batch[0] for batch in REFERENCE]
        assert drawn(a_loader(seed_samples=False)) != one

    def test_single_samples_that_are_not_collated_are_seeded_too(self) -> None:
        one = list(a_loader(batch_size=None))
        loader = a_loader(batch_size=None, num_workers=1)

        assert list(loader.batches(loader.plan(0), 4)) == one[4:]
        assert len({sample[1] for sample in one}) == LENGTH


class TestCollating:
    @staticmethod
    def collate(samples: list[Any]) -> tuple[list[int], float, float, float]:
        return [sample[0] for sample in samples], torch.rand(1).item(), np.random.rand(), random.random()

    def test_what_the_collate_function_draws_follows_from_the_batch(self) -> None:
        runs = [list(a_loader(collate_fn=self.collate, num_workers=number)) for number in (0, 2)]
        loader = a_loader(collate_fn=self.collate)

        assert runs[0] == runs[1]
        assert len({number for batch in runs[0] for number in batch[1:]}) == 12
        assert list(loader.batches(loader.plan(0), 2)) == runs[0][2:]


class TestDatasetsThatReadBatches:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_they_are_asked_for_whole_batches(self, num_workers: int) -> None:
        loader = a_loader(Mixup(), num_workers=num_workers, shuffle=False)
        mixed = [mixed for batch in loader for mixed in batch[1].tolist()]

        # A sample by itself would be mixed with itself.
        assert all(value != index for index, value in enumerate(mixed) if index % 3 != 1)
        assert len(set(mixed)) == LENGTH

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_transform_of_hugging_face_may_pad_its_batch(self, num_workers: int) -> None:
        rows = datasets.Dataset.from_dict({"x": [[1] * (1 + number % 5) for number in range(LENGTH)]})
        rows.set_transform(lambda batch: {"x": torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, batch["x"])], True)})
        ours = [batch["x"].tolist() for batch in a_loader(rows, shuffle=False, num_workers=num_workers)]

        assert ours == [batch["x"].tolist() for batch in DataLoader(rows, batch_size=3)]


class TestTheWrapper:
    def test_it_survives_pickling_and_copying_and_may_be_read_by_a_worker_init_function(self) -> None:
        seeded = SeededDataset(Noisy())

        for other in (pickle.loads(pickle.dumps(seeded)), copy.copy(seeded), copy.deepcopy(seeded)):
            assert other.__getitems__((1, [2])) == seeded.__getitems__((1, [2]))
            assert other[2][0] == 2


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.rand(), random.random()


class DrawsLate(Noisy):
    """Draws from its sample 48 on."""

    fails = False

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        drawn = random.random() + np.random.rand() if index >= 48 else 0.0
        if self.fails and drawn:
            raise OSError("x")
        return index, drawn


class TestTheGeneratorsOfTheProcess:
    def test_a_dataset_that_draws_for_the_first_time_late_is_seeded_all_the_same(self) -> None:
        with keep_randomness():
            expected = [draw() for _ in range(20)]
        late = [(drawn([batch]), draw()) for batch in a_loader(DrawsLate(), shuffle=False)]

        assert [batch for batches, _ in late for batch in batches] == drawn(
            a_loader(DrawsLate(), shuffle=False, num_workers=1)
        )
        assert [found for _, found in late] == expected

    def test_an_error_of_the_dataset_leaves_them_alone(self) -> None:
        dataset = DrawsLate()
        dataset.fails = True
        iterator = iter(a_loader(dataset, shuffle=False))
        for _ in range(16):
            next(iterator)
        with keep_randomness():
            expected = draw()
        with pytest.raises(OSError, match="x"):
            next(iterator)
        assert draw() == expected


class Stops(Noisy):
    """Lets an iterator's end out."""

    def __getitem__(self, index: int) -> Any:
        return next(iter(())) if index == 7 else index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_the_dataset_breaks_off_ends_with_a_warning_as_in_torch(num_workers: int) -> None:
    loader = a_loader(Stops(), shuffle=False, num_workers=num_workers)

    with pytest.warns(StatefulWarning, match="Stops or its collate_fn raised StopIteration at batch 2 of 4"):
        assert len(list(loader)) == 2
    assert loader.tracker._start.epoch == 1
