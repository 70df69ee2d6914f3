"""Datasets and iterables that hand on what a DataLoader in them gives, which may change from pass to pass."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import assert_goes_on_from_every_moment, ended, train_alone
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.iterable_datasets.dataset_parts import parts_of

MOMENTS = [
    ("on_train_batch_end", 0, 3),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_end", 1, 4),
]
pytestmark = pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")


class Rows(Dataset[Any]):
    """22 samples that are the same whenever they are read."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.full((4,), index / 100)}


NUMBERS = Rows()


class Wraps(IterableDataset[Any]):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Prefetches:
    """No dataset, and one batch ahead."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        following = next(iterator, None)
        while following is not None:
            present, following = following, next(iterator, None)
            yield present


class PrefetchesSome(Prefetches):
    """Says how many there are, so that nobody asks for more behind the last."""

    def __len__(self) -> int:
        return 11


class CountsAtEnd(IterableDataset[Any]):
    """Shuffles by its passes, which it counts when one has ended."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        yield from map(NUMBERS.__getitem__, random.Random(self.passes).sample(range(22), 22))
        self.passes += 1


class Caches(IterableDataset[Any]):
    """Goes through a cache backwards once it has one."""

    cache: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self.cache is None:
            yield from map(NUMBERS.__getitem__, range(22))
            self.cache = list(range(22))
        else:
            yield from map(NUMBERS.__getitem__, self.cache[::-1])


class InPlace(IterableDataset[Any]):
    def __init__(self) -> None:
        self.order = list(range(22))

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.order)
        yield from map(NUMBERS.__getitem__, self.order)


class Carries(IterableDataset[Any]):
    """Keeps what is left of a pass for the next."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(22):
            self.left.append(number)
            if len(self.left) == 4:
                found, self.left = self.left, []
                yield default_collate([NUMBERS[one] for one in found])


class Ordered(Sampler[int]):
    passes = 0

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.passes).sample(range(22), 22)
        self.passes += 1


class Collates:
    """Turns batches round from the second pass on."""

    batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return default_collate(samples if self.batches <= 11 else samples[::-1])


KINDS: dict[str, Any] = {
    "counts": lambda: DataLoader(CountsAtEnd(), batch_size=2),
    "caches": lambda: DataLoader(Caches(), batch_size=2),
    "in place": lambda: DataLoader(InPlace(), batch_size=2),
    "carries": lambda: DataLoader(Carries(), batch_size=None),
    "nested twice": lambda: DataLoader(Wraps(DataLoader(CountsAtEnd(), batch_size=2)), batch_size=None),
    "sampler": lambda: DataLoader(NUMBERS, batch_size=2, sampler=Ordered()),
    "batch sampler": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(Ordered(), 2, False)),
    "collate": lambda: DataLoader(NUMBERS, batch_size=2, collate_fn=Collates()),
    "map": lambda: DataLoader(NUMBERS, batch_size=2, shuffle=True),
}
# The callback reads a DataLoader with samples by index itself, where an object that is no dataset holds one.
OF_PLAIN_CLASS = ("counts", "caches", "carries", "nested twice", "sampler", "map")


@pytest.mark.parametrize(
    ("wraps", "kind"),
    [(Wraps, kind) for kind in KINDS]
    + [(Prefetches, kind) for kind in OF_PLAIN_CLASS]
    + [(PrefetchesSome, "counts"), (PrefetchesSome, "caches")],
)
def test_a_run_on_what_a_loader_in_a_dataset_gives_goes_on_exactly(tmp_path: Path, wraps: Any, kind: str) -> None:
    def make() -> Any:
        held = wraps(KINDS[kind]())
        return DataLoader(held, batch_size=None) if wraps is Wraps else held

    assert_goes_on_from_every_moment(tmp_path, make, MOMENTS, train_alone, max_epochs=3)


class Augments:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] + torch.rand(1, generator=self.generator)}


@pytest.mark.parametrize("options", [{"generator": torch.Generator(), "shuffle": True}, {"collate_fn": Augments()}])
def test_a_generator_that_an_inner_loader_goes_on_drawing_from_is_warned_of(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def make() -> Any:
        return DataLoader(Wraps(DataLoader(NUMBERS, batch_size=2, **copy.deepcopy(options))), batch_size=None)

    ended(tmp_path / "end.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="Wraps .* holds a random generator that goes on from pass to pass"):
        train_alone(make, ckpt_path=tmp_path / "end.ckpt", max_epochs=2)


class Groups:
    """Batches of four samples of one parity; those that are left over wait for the next pass."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.left = loader, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        for sample in self.loader:
            kept = [one for one in self.left if (one["id"] - sample["id"]) % 2 == 0]
            self.left.append(sample)
            if len(kept) == 3:
                self.left = [one for one in self.left if (one["id"] - sample["id"]) % 2]
                yield default_collate([*kept, sample])


class Forever(IterableDataset[Any]):
    """Samples in a mixed order, without an end, with noise of their own."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            for index in random.Random(5).sample(range(22), 22):
                yield {**NUMBERS[index], "x": torch.rand(4)}


FROM_MODEL = pytest.mark.filterwarnings(
    "ignore:.*from where the model has left them:lightning_stateful.errors.StatefulWarning"
)


@FROM_MODEL
@pytest.mark.parametrize("kind", ["in place", "grouped", pytest.param("grouped, lasting", marks=pytest.mark.slow)])
def test_what_an_iterable_keeps_of_draws_at_the_beginning_of_a_pass_is_drawn_again(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        if kind == "in place":
            return Prefetches(DataLoader(InPlace(), batch_size=2))
        how: dict[str, Any] = {"batch_size": None, "num_workers": 1, "persistent_workers": kind != "grouped"}
        return Groups(DataLoader(Forever(), **how))

    assert_goes_on_from_every_moment(tmp_path, make, MOMENTS, train_alone, max_epochs=3, limit_train_batches=8)


@FROM_MODEL
def test_an_iterable_that_keeps_what_is_drawn_later_in_a_pass_is_warned_of_behind_an_epoch(tmp_path: Path) -> None:
    def make() -> Any:
        return Groups(DataLoader(Forever(), batch_size=None))

    ended(tmp_path / "end.ckpt", make, run=train_alone, max_epochs=1, limit_train_batches=8)
    with pytest.warns(StatefulWarning, match="Groups .* keeps what it draws from torch, NumPy or random in a pass"):
        train_alone(make, ckpt_path=tmp_path / "end.ckpt", max_epochs=2, limit_train_batches=8)


def test_nothing_is_said_of_a_loader_that_begins_alike(tmp_path: Path) -> None:
    def make() -> Any:
        return Prefetches(DataLoader(NUMBERS, batch_size=2, shuffle=True, num_workers=1))

    ended(tmp_path / "end.ckpt", make, run=train_alone, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        train_alone(make, ckpt_path=tmp_path / "end.ckpt", max_epochs=2)


def test_the_parts_of_a_dataset_are_what_its_loaders_read_each_once() -> None:
    inner, sampler, collate = CountsAtEnd(), Ordered(), Collates()
    loaders = [
        DataLoader(inner, batch_size=2, collate_fn=collate),
        DataLoader(NUMBERS, batch_sampler=BatchSampler(sampler, 2, False), collate_fn=collate.__call__),
    ]
    outer = Wraps(loaders)
    found = parts_of(DataLoader(outer).dataset)
    assert [sum(part is one for part in found) for one in (outer, inner, NUMBERS, sampler, collate)] == [1] * 5
    assert not any(isinstance(part, (DataLoader, BatchSampler)) for part in found)
