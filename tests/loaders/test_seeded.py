"""What a dataset draws is a function of (seed, epoch, sample), whoever reads it."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import Position
from lightning_stateful.loaders import SeededDataset, StatefulLoader, keep_randomness, seed_randomness

LENGTH = 12

Drawn = dict[int, tuple[float, float, float]]


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Draws from torch, NumPy and ``random``."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1, dtype=torch.double).item(), np.random.rand(), random.random()


class NoisyBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


class WholeBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices)


def a_loader(dataset: Any = None, **options: Any) -> StatefulLoader:
    return StatefulLoader(dataset or Noisy(), **{"batch_size": 3, "shuffle": True, **options})


def drawn(*passes: Any) -> Drawn:
    """What each sample drew in one epoch, over the batches of all ranks."""
    rows = [
        row for batches in passes for batch in batches for row in zip(*[part.tolist() for part in batch], strict=True)
    ]
    return {int(index): (one, two, three) for index, one, two, three in rows}


REFERENCE = drawn(a_loader())


class TestSamples:
    def test_every_sample_draws_numbers_of_its_own(self) -> None:
        assert len(REFERENCE) == LENGTH
        assert len({number for numbers in REFERENCE.values() for number in numbers}) == 3 * LENGTH

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_workers_draw_the_same(self, num_workers: int) -> None:
        assert drawn(a_loader(num_workers=num_workers)) == REFERENCE

    @pytest.mark.parametrize("batch_size", [1, 5, 12])
    def test_the_company_in_a_batch_does_not_matter(self, batch_size: int) -> None:
        assert drawn(a_loader(batch_size=batch_size)) == REFERENCE

    def test_the_order_does_not_matter(self) -> None:
        assert drawn(a_loader(shuffle=False)) == REFERENCE

    @pytest.mark.parametrize("num_replicas", [2, 3])
    def test_the_rank_does_not_matter(self, num_replicas: int) -> None:
        ranks = [a_loader(num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)]

        assert drawn(*ranks) == REFERENCE

    def test_a_resumed_run_draws_the_same_on_other_ranks_with_another_batch_size(self) -> None:
        loader = a_loader()
        iterator = iter(loader)
        head = [next(iterator)]
        ranks = [a_loader(batch_size=2, num_replicas=2, rank=rank) for rank in range(2)]
        for rank in ranks:
            rank.load_state_dict(loader.state_dict())

        assert drawn(head, *ranks) == REFERENCE

    def test_what_the_main_process_drew_before_does_not_matter(self) -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

        assert drawn(a_loader()) == REFERENCE

    def test_every_epoch_draws_anew_and_the_same_in_every_run(self) -> None:
        loader = a_loader()
        epochs = [drawn(loader) for _ in range(3)]
        again = a_loader()
        again.set_epoch(2)

        assert epochs[0] == REFERENCE
        assert all(len({epoch[index] for epoch in epochs}) == 3 for index in range(LENGTH))
        assert drawn(again) == epochs[2]

    def test_another_seed_draws_otherwise(self) -> None:
        assert all(numbers != REFERENCE[index] for index, numbers in drawn(a_loader(seed=1)).items())

    def test_seed_and_epoch_do_not_collide(self) -> None:
        numbers = set()
        for seed in range(3):
            loader = a_loader(seed=seed)
            numbers |= {drawn(loader)[0] for _ in range(3)}

        assert len(numbers) == 9

    def test_a_second_pass_over_the_samples_within_an_epoch_draws_anew(self) -> None:
        loader = a_loader()
        again = drawn(loader.batches(Position(epoch=0, consumed=LENGTH)))

        assert all(again[index] != REFERENCE[index] for index in range(LENGTH))

    def test_the_same_sample_twice_in_a_batch_draws_the_same(self) -> None:
        seeded = SeededDataset(Noisy())
        one, other = seeded.__getitems__((7, [4, 4]))

        assert one == other

    def test_it_can_be_switched_off(self) -> None:
        torch.manual_seed(0)
        one = drawn(a_loader(seed_samples=False))
        torch.manual_seed(1)

        assert one.keys() == REFERENCE.keys()
        assert drawn(a_loader(seed_samples=False)) != one


class TestAKeyForEachSample:
    @pytest.mark.parametrize("dataset", [Noisy, NoisyBatches])
    def test_one_key_for_all_is_the_same_as_that_key_for_each(self, dataset: Any) -> None:
        seeded = SeededDataset(dataset())

        assert seeded.__getitems__((5, [3, 1, 2])) == seeded.__getitems__(([5, 5, 5], [3, 1, 2]))

    @pytest.mark.parametrize("dataset", [Noisy, NoisyBatches])
    def test_a_sample_draws_by_its_own_key_whatever_the_others_have(self, dataset: Any) -> None:
        seeded = SeededDataset(dataset())
        mixed = seeded.__getitems__(([5, 6, 5, 6], [3, 3, 1, 1]))

        assert mixed == [seeded.__getitems__((key, [index]))[0] for key, index in ((5, 3), (6, 3), (5, 1), (6, 1))]
        assert mixed[0] != mixed[1]

    def test_keys_and_indices_of_other_numbers_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="argument 2 is longer"):
            SeededDataset(Noisy()).__getitems__(([5], [3, 1]))


class TestCollating:
    @staticmethod
    def collate(samples: list[Any]) -> tuple[list[int], float, float, float]:
        return [sample[0] for sample in samples], torch.rand(1).item(), np.random.rand(), random.random()

    def test_what_the_collate_function_draws_is_the_same_for_any_number_of_workers(self) -> None:
        runs = [list(a_loader(collate_fn=self.collate, num_workers=number)) for number in (0, 1, 2)]

        assert runs[0] == runs[1] == runs[2]
        assert len({number for batch in runs[0] for number in batch[1:]}) == 12

    def test_it_is_the_same_after_a_resume(self) -> None:
        loader = a_loader(collate_fn=self.collate)
        whole = list(loader)
        fresh = a_loader(collate_fn=self.collate)
        fresh.seek(Position(consumed=6))

        assert list(fresh) == whole[2:]


class TestDatasetsThatReadBatches:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_getitems_draws_as_getitem_does(self, num_workers: int) -> None:
        assert drawn(a_loader(NoisyBatches(), num_workers=num_workers)) == REFERENCE

    def test_a_subset_of_either_draws_by_the_number_in_the_subset(self) -> None:
        indices = list(range(LENGTH))[::-1]
        one = drawn(a_loader(Subset(Noisy(), indices)))
        other = drawn(a_loader(Subset(NoisyBatches(), indices)))

        assert one == other
        assert {LENGTH - 1 - index: numbers for index, numbers in one.items()} == REFERENCE

    def test_getitems_that_returns_a_whole_batch_is_refused_with_the_way_out(self) -> None:
        with pytest.raises(ConfigurationError, match=r"WholeBatches.__getitems__\(\[\d+\]\) returned a Tensor"):
            next(iter(a_loader(WholeBatches())))

        options: dict[str, Any] = {"seed_samples": False, "collate_fn": lambda batch: batch}
        assert torch.cat(list(a_loader(WholeBatches(), shuffle=False, **options))).tolist() == list(range(LENGTH))


class TestHuggingFaceDatasets:
    @staticmethod
    def rows() -> datasets.Dataset:
        return datasets.Dataset.from_dict({"x": list(range(LENGTH))})

    @staticmethod
    def noise(rows: dict[str, list[int]]) -> dict[str, Any]:
        return {"x": rows["x"], "noise": [random.random() for _ in rows["x"]]}

    def noisy(self, **options: Any) -> dict[int, float]:
        dataset = self.rows()
        dataset.set_transform(self.noise)
        batches = list(a_loader(dataset, **options))
        return {x: n for batch in batches for x, n in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True)}

    def test_rows_come_as_from_a_data_loader(self) -> None:
        ours = list(a_loader(self.rows(), shuffle=False))
        theirs = list(DataLoader(self.rows(), batch_size=3))

        assert [batch["x"].tolist() for batch in ours] == [batch["x"].tolist() for batch in theirs]

    def test_formatted_rows_come_as_from_a_data_loader(self) -> None:
        batch = next(iter(a_loader(self.rows().with_format("torch"), shuffle=False)))

        assert torch.equal(batch["x"], torch.tensor([0, 1, 2]))

    def test_a_transform_draws_for_every_row_on_its_own(self) -> None:
        reference = self.noisy()

        assert len(set(reference.values())) == LENGTH
        assert self.noisy(num_workers=1) == reference
        assert self.noisy(batch_size=5, shuffle=False) == reference

    def test_a_run_resumes_exactly_and_refuses_other_rows(self) -> None:
        loader = a_loader(self.rows())
        iterator = iter(loader)
        head = [next(iterator)["x"].tolist()]
        state = loader.state_dict()
        fresh = a_loader(self.rows())
        fresh.load_state_dict(state)

        assert head + [batch["x"].tolist() for batch in fresh] == [
            batch["x"].tolist() for batch in a_loader(self.rows())
        ]
        assert state["config"]["dataset"].keys() == {"length", "fingerprint"}
        other = a_loader(self.rows().filter(lambda row: row["x"] != 3, keep_in_memory=True), accept=("dataset.length",))
        with pytest.raises(ValueError, match=r"dataset\.fingerprint"):
            other.load_state_dict(state)


class TestTheWrapper:
    def test_attributes_are_the_datasets(self) -> None:
        dataset = Noisy()
        seeded = SeededDataset(dataset)
        seeded.scale = 3

        assert dataset.scale == seeded.scale == 3
        assert len(seeded) == LENGTH
        with pytest.raises(AttributeError, match="nothing"):
            _ = seeded.nothing

    def test_it_survives_pickling_and_copying(self) -> None:
        seeded = SeededDataset(Noisy())

        for other in (pickle.loads(pickle.dumps(seeded)), copy.copy(seeded), copy.deepcopy(seeded)):
            assert other.__getitems__((1, [2])) == seeded.__getitems__((1, [2]))

    def test_a_sample_is_the_same_alone_and_in_company(self) -> None:
        seeded = SeededDataset(Noisy())

        assert seeded.__getitems__((1, [5])) == seeded.__getitems__((1, [3, 5, 7]))[1:2]

    def test_a_worker_init_function_may_read_a_sample(self) -> None:
        assert SeededDataset([10, 11, 12])[2] == 12


class TestGenerators:
    @staticmethod
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    @pytest.mark.parametrize("seed", [0, 2**31, 2**64 - 1])
    def test_any_64_bit_seed_sets_all_three(self, seed: int) -> None:
        with keep_randomness():
            seed_randomness(seed)
            one = self.draw()
            seed_randomness(seed)
            assert self.draw() == one

    def test_kept_randomness_comes_back_even_after_an_error(self) -> None:
        with keep_randomness():
            expected = self.draw()

        def draw_and_fail() -> None:
            with keep_randomness():
                self.draw()
                raise OSError("x")

        with pytest.raises(OSError, match="x"):
            draw_and_fail()
        assert self.draw() == expected


def test_the_default_collate_function_is_used() -> None:
    batch = next(iter(a_loader()))

    assert [type(part) for part in batch] == [type(part) for part in default_collate([Noisy()[0]])]
