"""Samplers as other people write them, over 22 samples (``Numbers(22)``) of three classes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from support.ledger import Numbers

LENGTH = 22
LABELS = [number % 3 for number in range(LENGTH)]
WEIGHTS = [1.0 + number % 5 for number in range(LENGTH)]
BATCHES = [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9], [10, 11, 12], [13, 14], [15, 16, 17, 18], [19, 20, 21]]


class Fails(Sampler[int]):
    """Draws, and fails in the middle."""

    def __iter__(self) -> Iterator[int]:
        for number in range(70):
            random.random(), torch.rand(()), np.random.rand()
            yield number
        raise KeyError("theirs")


class ClassBalanced(Sampler[list[int]]):
    """Batches of so many classes, each with so many instances, drawn with a NumPy generator of its own."""

    def __init__(self, labels: list[int] = LABELS, classes: int = 2, instances: int = 2, num_batches: int = 9) -> None:
        self.by_class = {label: [n for n, of in enumerate(labels) if of == label] for label in sorted(set(labels))}
        self.classes, self.instances, self.num_batches = classes, instances, num_batches
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.num_batches):
            chosen = self.rng.choice(list(self.by_class), self.classes, replace=False)
            yield [int(n) for label in chosen for n in self.rng.choice(self.by_class[int(label)], self.instances)]


class ShuffledBatches(Sampler[list[int]]):
    """Fixed batches in an order of a torch generator of its own, and told the epoch nowhere."""

    def __init__(self, batches: list[list[int]] = BATCHES) -> None:
        self.batches = batches
        self.generator = torch.Generator()
        self.generator.manual_seed(1)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[number]


class ShufflesInPlace(Sampler[list[int]]):
    """Shuffles its own lists, and lists in them, whenever it is iterated."""

    def __init__(self) -> None:
        self.batches = [list(batch) for batch in BATCHES]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        for batch in self.batches:
            random.shuffle(batch)
            yield batch


class GlobalRandom(Sampler[int]):
    """Draws from Python's global ``random``, sample by sample."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(random.randrange(len(left)))


class WithoutLen(Sampler[int]):
    """Every sample once, in an order of NumPy's global generator; it does not say how many there are."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(LENGTH).tolist()


class BatchesWithoutLen(Sampler[list[int]]):
    """Batches of a size that is drawn; nobody knows how many there will be."""

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(LENGTH).tolist()
        while left:
            size = random.randint(1, 4)
            yield left[:size]
            left = left[size:]


class Endless(Sampler[int]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(LENGTH)


class OwnState(Sampler[int]):
    """Knows its epoch and where it stands in it."""

    def __init__(self) -> None:
        self.epoch, self.served, self.goes_on_at = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([3, self.epoch]).permutation(LENGTH).tolist()
        self.served, self.goes_on_at = self.goes_on_at, 0
        for index in order[self.served :]:
            self.served += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.goes_on_at = state["served"]


class KeepsItsPlace(Sampler[Any]):
    """Its state is its place; at its end it begins anew."""

    def __init__(self, length: int = 50) -> None:
        self.length, self.place, self.rng = length, 0, np.random.default_rng(3)

    def __len__(self) -> int:
        return self.length

    def item(self) -> Any:
        """The item at its place."""
        return self.place

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            item = self.item()
            self.place += 1
            yield item
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class CountsEpochs(Sampler[int]):
    """Has another order whenever it is iterated, by a count of its own."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(np.random.default_rng(self.times).permutation(LENGTH).tolist())


class ByTheClock(Sampler[int]):
    """Seeds itself by the time."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(time.perf_counter_ns()).permutation(LENGTH).tolist())


class Bag:
    """Holds whatever it is given, and can be iterated."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Any:
        return iter(())


class Proxy:
    """Hands every attribute of another sampler on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Unpicklable(Proxy):
    """The same, and cannot be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not to be pickled")


class SaysTooMuch(ShuffledBatches):
    """Says that it has one more batch than it yields."""

    def __len__(self) -> int:
        return len(self.batches) + 1


class SaysTooLittle(ShuffledBatches):
    """Says that it has one batch less than it yields."""

    def __len__(self) -> int:
        return len(self.batches) - 1


def loader(**options: Any) -> DataLoader[Any]:
    """A plain DataLoader over the samples."""
    return DataLoader(Numbers(LENGTH), **options)


# Samplers that yield every sample once, those that draw them, and those that yield whole batches, by name.
PERMUTATIONS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(LENGTH), generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(list(range(LENGTH))),
    "global random": GlobalRandom,
    "without len": WithoutLen,
    "own state": OwnState,
}
DRAWS: dict[str, Callable[[], Any]] = {
    "random with replacement": lambda: RandomSampler(range(LENGTH), replacement=True),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, LENGTH),
    "weighted without replacement": lambda: WeightedRandomSampler(WEIGHTS, 15, replacement=False),
}
BATCHED: dict[str, Callable[[], Any]] = {
    "class balanced": ClassBalanced,
    "shuffled batches": ShuffledBatches,
    "shuffled in place": ShufflesInPlace,
    "batches without len": BatchesWithoutLen,
}
# Whole loaders: every way in which a sampler may stand in one.
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{
        name: lambda make=make: loader(sampler=make(), batch_size=2) for name, make in {**PERMUTATIONS, **DRAWS}.items()
    },
    **{name: lambda make=make: loader(batch_sampler=make()) for name, make in BATCHED.items()},
    "unbatched": lambda: loader(sampler=GlobalRandom(), batch_size=None, collate_fn=as_batch),
    "unbatched, by itself": lambda: loader(batch_size=None, collate_fn=as_batch),
    "batches handed on": lambda: DataLoader(
        HandedOn(), sampler=BatchSampler(GlobalRandom(), 3, False), batch_size=None
    ),
    "torchdata's distributed": lambda: loader(
        sampler=TorchdataDistributedSampler(range(LENGTH), num_replicas=1, rank=0, seed=3), batch_size=2
    ),
    "torchdata's loader": lambda: StatefulDataLoader(Numbers(LENGTH), batch_sampler=ShuffledBatches()),
}


def as_batch(sample: Any) -> Any:
    """A batch of a single sample."""
    return {name: torch.as_tensor(value).unsqueeze(0) for name, value in sample.items()}


class HandedOn(Numbers):
    """Answers to whole lists of indices, and has no length."""

    def __init__(self) -> None:
        super().__init__(LENGTH)

    def __getitem__(self, indices: Any) -> Any:
        return torch.utils.data.default_collate([super(HandedOn, self).__getitem__(index) for index in indices])
