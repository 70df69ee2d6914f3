"""What a dataset draws from generators that it holds is a function of (seed, path of its loader, epoch, batch) too."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support.ranks import Ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders import StatefulLoader

LENGTH, SIZE = 24, 3


class Compose:
    """Holds its generators as albumentations does, which all its transforms share."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms
        self.set_random_seed(7)

    def set_random_seed(self, seed: int) -> None:
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)
        for transform in self.transforms:
            transform.R = self.random_generator

    def __call__(self, value: float) -> float:
        for transform in self.transforms:
            value = transform(value)
        return value + self.py_random.random() + self.random_generator.random()


class Randomizable:
    """Holds a generator of its class until it is seeded, and notes what it drew, as MONAI does."""

    R: Any = np.random.RandomState()
    factors: Any = None

    def __call__(self, value: float) -> float:
        self.factors = self.R.standard_normal(LENGTH)
        return value + float(self.factors.sum())


class Augmented(Dataset[tuple[int, float]]):
    def __init__(self, transform: Callable[[float], float]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.transform(0.0)


def of_albumentations() -> Any:
    albumentations = pytest.importorskip("albumentations")
    compose = albumentations.Compose([albumentations.GaussNoise(p=1), albumentations.RandomGamma(p=0.5)])
    return lambda value: float(compose(image=np.full((8, 8, 1), 0.5, dtype=np.float32))["image"].sum())


def of_monai() -> Any:
    transforms = pytest.importorskip("monai.transforms")
    compose = transforms.Compose([transforms.RandGaussianNoise(prob=1.0), transforms.RandFlip(prob=0.5)])
    return lambda value: float(compose(torch.ones(1, 8, 8)).sum())


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "as albumentations": lambda: Compose([Randomizable(), Randomizable()]),
    "as MONAI": Randomizable,
    "albumentations": of_albumentations,
    "MONAI": of_monai,
}


def served(dataset: Any, epochs: int = 2, first: int = 0, **options: Any) -> list[list[Any]]:
    """The batches of some epochs as plain data, from a batch of each on."""
    loader = StatefulLoader(dataset, **{"batch_size": SIZE, "shuffle": True, **options})
    return [plain(loader.batches(loader.plan(epoch), first)) for epoch in range(epochs)]


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


@pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_each_sample_of_each_epoch_draws_anew_and_a_resume_draws_the_same(make: Any) -> None:
    whole = served(Augmented(make()))
    values = [value for epoch in whole for batch in epoch for value in batch[1]]

    assert len(set(values)) == 2 * LENGTH
    assert served(Augmented(make()), num_workers=2) == whole
    for num_workers in (0, 2):
        assert served(Augmented(make()), first=5, num_workers=num_workers) == [epoch[5:] for epoch in whole]


def test_persistent_workers_draw_the_same() -> None:
    whole = served(Augmented(Compose([Randomizable()])))

    assert served(Augmented(Compose([Randomizable()])), num_workers=2, persistent_workers=True) == whole


def on_a_rank(folder: Path, num_workers: int) -> Any:
    def epochs(stop: int | None) -> list[Any]:
        loader: Any = patch_dataloader(
            DataLoader(Augmented(Compose([Randomizable()])), batch_size=SIZE, num_workers=num_workers), seed=3
        )
        found = []
        if stop is not None:
            iterator = iter(loader)
            for _ in range(stop):
                next(iterator)
            state, loader = loader.state_dict(), None
            loader = patch_dataloader(DataLoader(Augmented(Compose([Randomizable()])), batch_size=SIZE), seed=3)
            loader.load_state_dict(state)
        for _ in range(2):
            found += plain(loader)
        return found

    return epochs(None), epochs(2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_draw_apart_and_a_resume_draws_the_same(ranks: Ranks) -> None:
    found = ranks.of(on_a_rank, 2)

    assert all(resumed == whole[2:] for whole, resumed in found)
    assert len({value for whole, _ in found for batch in whole for value in batch[1]}) == 2 * LENGTH


@pytest.mark.parametrize("isolated", [True, False])
def test_the_training_process_finds_its_generators_as_they_were(isolated: bool) -> None:
    compose = Compose([])
    expected = (np.random.default_rng(7).random(), random.Random(7).random())
    loader = StatefulLoader(Augmented(compose), batch_size=SIZE)
    for _ in loader.batches(loader.plan(0), isolated=isolated):
        pass

    assert (compose.random_generator.random(), compose.py_random.random()) == expected
    for _ in StatefulLoader(Augmented(compose), batch_size=SIZE, pin_memory=True):
        pass
    assert compose.random_generator.random() == np.random.default_rng(7).random(2)[1]


def test_they_are_left_alone_without_seed_samples() -> None:
    ours = served(Augmented(Compose([])), epochs=1, shuffle=False, seed_samples=False)

    assert ours == [plain(DataLoader(Augmented(Compose([])), batch_size=SIZE))]


class Mixes:
    """A collate function that draws, from what it shares with the dataset."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, samples: list[Any]) -> Any:
        return [sample[0] for sample in samples], self.generator.random()


def test_a_collate_function_shares_its_generator_with_the_dataset_in_a_worker_that_was_sent_both() -> None:
    def run(**options: Any) -> Any:
        compose = Compose([])
        return served(Augmented(compose), collate_fn=Mixes(compose.random_generator), **options)

    whole = run()
    assert len({batch[1] for epoch in whole for batch in epoch}) == 2 * LENGTH // SIZE
    assert run(num_workers=1, persistent_workers=True, multiprocessing_context="forkserver") == whole


class OrderedLate(Dataset[tuple[int, float]]):
    """Draws the order of its samples when the first is read."""

    def __init__(self) -> None:
        self.generator, self.order = np.random.default_rng(1), None
        self.noise = np.random.default_rng(2)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        if self.order is None:
            self.order = self.generator.permutation(LENGTH)
        return int(self.order[index]), float(self.noise.random())


@pytest.mark.filterwarnings("ignore:OrderedLate draws an order")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_order_that_is_drawn_late_and_kept_is_the_one_that_torch_has(num_workers: int) -> None:
    theirs = plain(DataLoader(OrderedLate(), batch_size=SIZE))
    with warnings.catch_warnings() if num_workers else pytest.warns(StatefulWarning, match="draws an order of its"):
        ours = served(OrderedLate(), epochs=1, shuffle=False, num_workers=num_workers)[0]

    assert [batch[0] for batch in ours] == [batch[0] for batch in theirs]


class LoadedLate(OrderedLate):
    """Its order is no matter of chance."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.order = list(range(LENGTH)) if self.order is None else self.order
        return self.order[index], float(self.generator.random())


def test_an_order_that_was_not_drawn_leaves_generators_seeded() -> None:
    whole = served(LoadedLate())

    assert served(LoadedLate(), first=4, num_workers=2) == [epoch[4:] for epoch in whole]
    assert len({value for epoch in whole for batch in epoch for value in batch[1]}) == 2 * LENGTH


@pytest.mark.parametrize("batch_size", [1, 7])
def test_functions_of_hugging_faces_streams_and_collating_draw_the_same_on_a_resume(batch_size: int) -> None:
    def make() -> Any:
        compose, other = Compose([Randomizable()]), np.random.RandomState(5)
        rows = datasets.Dataset.from_dict({"x": [float(number) for number in range(1200)]})
        stream = rows.to_iterable_dataset(num_shards=2).map(
            lambda batch: {"y": [compose(0.0) for _ in batch["x"]]}, batched=True, batch_size=batch_size
        )

        def collate(samples: list[Any]) -> list[Any]:
            return [[sample["y"] for sample in samples], other.rand()]

        return patch_dataloader(DataLoader(stream, batch_size=4, collate_fn=collate), seed=3)

    loader = make()
    whole = list(loader)
    again = list(loader)
    other = make()
    iterator = iter(other)
    for _ in range(66):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(other.state_dict())

    assert list(resumed) == whole[66:]
    values = [value for batch in (*whole, *again) for value in (*batch[0], batch[1])]
    assert len(set(values)) == len(values)


class DividesItself(IterableDataset[int]):
    """Every worker draws the same order, and reads its part of it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        order = self.generator.permutation(LENGTH).tolist()
        yield from order if info is None else order[info.id :: info.num_workers]


def test_an_iterable_that_divides_itself_by_an_order_that_it_draws_gives_each_sample_once() -> None:
    loader: Any = patch_dataloader(DataLoader(DividesItself(), batch_size=SIZE, num_workers=2), seed=3)

    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(LENGTH))
    assert loader.resume_note.endswith("Random generators that it holds are not seeded, but left as they are.")
