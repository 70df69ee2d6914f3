"""Samplers as users write them for themselves, orderly and not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed
from torch.utils.data import DistributedSampler, Sampler

from harm.basics import LABELS, LENGTH, LENGTHS, Indices, num_ranks, own_rank, permutation


class Sized(Sampler[Any]):
    """Says that it yields every sample once."""

    def __len__(self) -> int:
        return LENGTH


# A share of a rank, in places that no attribute named ``rank`` tells of


class RankShare(Sampler[list[int]]):
    """Keeps the batches of its rank, under a name of its own; nothing else says that there are ranks."""

    def __init__(self) -> None:
        batches = [[index, index + 1] for index in range(0, LENGTH, 2)]
        self.batches_per_rank = batches[own_rank() :: num_ranks()]

    def __len__(self) -> int:
        return len(self.batches_per_rank)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches_per_rank)


class InSlots:
    """Keeps rank and number of ranks in slots."""

    __slots__ = ("rank", "world_size")

    def __init__(self) -> None:
        self.rank, self.world_size = own_rank(), num_ranks()

    def __len__(self) -> int:
        return LENGTH // self.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, LENGTH, self.world_size))


class InProperties(InSlots):
    """Offers them as properties, which cannot be set."""

    __slots__ = ()
    rank = property(lambda self: own_rank())
    world_size = property(lambda self: num_ranks())

    def __init__(self) -> None:
        pass


class AsksTorch(Sampler[int]):
    """Asks torch.distributed in ``__iter__`` and ``__len__``, and keeps nothing."""

    def __len__(self) -> int:
        return LENGTH // num_ranks()

    def __iter__(self) -> Iterator[int]:
        return iter(range(own_rank(), LENGTH, num_ranks()))


# Subclasses of torch's DistributedSampler


class Distributed(DistributedSampler[Any]):
    """torch's, of the ranks that there are."""

    def __init__(self) -> None:
        super().__init__(Indices(), num_ranks(), own_rank(), seed=2)


class RepeatsThrice(Distributed):
    """Every sample of its share three times."""

    def __len__(self) -> int:
        return 3 * self.num_samples

    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() for _ in range(3))


class DrawsWithReplacement(Distributed):
    """40 samples a rank, whatever the number of ranks, seeded by epoch and rank."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1000 * self.epoch + self.rank)
        return iter(torch.randint(LENGTH, (40,), generator=generator).tolist())


class CountsAllRanks(Distributed):
    """Its len is that of all ranks together."""

    def __len__(self) -> int:
        return self.total_size


class AllOnEachRank(Distributed):
    """Every rank goes through the whole dataset, in an order of its own."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(1000 * self.epoch + self.rank))


# Samplers that remember something from epoch to epoch


class CountsAtStart(Sized):
    """``self.epoch += 1`` when ``__iter__`` begins."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(permutation(self.epoch))


class CountsAtEnd(CountsAtStart):
    """``self.epoch += 1`` when an epoch has been iterated."""

    def __iter__(self) -> Iterator[int]:
        yield from permutation(self.epoch)
        self.epoch += 1


class CountsInFinally(CountsAtStart):
    """Counts a pass in ``finally``, so that one that is broken off counts too."""

    def __iter__(self) -> Iterator[int]:
        try:
            yield from permutation(self.epoch)
        finally:
            self.epoch += 1


class KeepsItsSubset(Sampler[int]):
    """Draws half of the samples in its first pass and keeps to them, in another order each time."""

    subset: list[int] | None = None

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[int]:
        if self.subset is None:
            self.subset = random.sample(range(LENGTH), LENGTH // 2)
        return iter(random.sample(self.subset, len(self.subset)))


class ShufflesInPlace(Sized):
    """Shuffles its own list by a seed: each order is made of the one before."""

    def __init__(self) -> None:
        self.indices = list(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        random.Random(3).shuffle(self.indices)
        return iter(list(self.indices))


class ShufflesWhenTold(Sampler[int]):
    """Shuffles what the call of ``set_epoch`` before has left, by a seed of the epoch."""

    def __init__(self, length: int = LENGTH) -> None:
        self.order = list(range(length))

    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch + 5).shuffle(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order))


class StoresItsPlan(Sampler[list[int]]):
    """Plans an epoch's batches when ``__iter__`` is called and keeps the plan, which ``len`` is taken of."""

    plan: list[list[int]] | None = None

    def _planned(self) -> list[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        return [order[start : start + 2] for start in range(0, LENGTH, 2)]

    def __len__(self) -> int:
        if self.plan is None:
            self.plan = self._planned()
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        self.plan = self._planned()
        return iter(self.plan)


class GoesOn(Sized):
    """Holds a generator that was begun when it was made, and takes an epoch's samples from it."""

    def __init__(self) -> None:
        self.stream = (index for epoch in itertools.count() for index in permutation(epoch))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.stream, LENGTH)


class OwnIterator(Sized):
    """Returns itself from ``__iter__``."""

    epoch = -1

    def __iter__(self) -> OwnIterator:
        self.epoch += 1
        self.left = permutation(self.epoch)
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


# Samplers that look at the training


class ByLoss(Sized):
    """Samples of high losses first, as training has written them."""

    def __init__(self) -> None:
        self.losses = np.zeros(LENGTH)

    def __iter__(self) -> Iterator[int]:
        return iter(np.argsort(-self.losses, kind="stable").tolist())


class WritesLosses(pl.Callback):
    """Writes a number for every sample trained on."""

    def __init__(self, sampler: ByLoss) -> None:
        self.sampler = sampler

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sampler.losses[batch.numpy()] = (batch_idx * 7 + trainer.current_epoch) % 5


class Weighted(Sized):
    """Three times those samples, shuffled, that have a weight."""

    def __init__(self) -> None:
        self.weights = torch.ones(LENGTH)
        self.weights[8:] = 0

    def __iter__(self) -> Iterator[int]:
        chosen = self.weights.nonzero().flatten().tolist() * 3
        return (chosen[i] for i in torch.randperm(len(chosen)).tolist())


class SetsWeights(pl.Callback):
    """Gives weights to another third of the samples at the end of every epoch, and where a run begins."""

    def __init__(self, sampler: Weighted) -> None:
        self.sampler = sampler

    def _set(self, epoch: int) -> None:
        self.sampler.weights[:] = 0
        self.sampler.weights[8 * (epoch % 3) : 8 * (epoch % 3) + 8] = 1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._set(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._set(trainer.current_epoch + 1)


class AsksTheTrainer(Sized):
    """Seeds itself by ``trainer.current_epoch``."""

    trainer: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.trainer.current_epoch))


class GivesTheTrainer(pl.Callback):
    """Hands the trainer to a sampler."""

    def __init__(self, sampler: AsksTheTrainer) -> None:
        self.sampler = sampler

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.sampler.trainer = trainer


# Lengths


class Grows(Sampler[int]):
    """Has six samples more in each epoch that it is told of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12 + 6 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.epoch)[: len(self)])


class Shuffled(Sized):
    """Every sample once, in an order that follows from ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.epoch))


class ToldOfOne(Shuffled):
    """Was built before ranks were known, so that each holds that there is one."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 1, 0

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.epoch)[self.rank :: self.num_replicas])


class TokenBatches(Sampler[list[int]]):
    """Batches of up to ``max_tokens`` of what another sampler yields: another number of them in each epoch."""

    def __init__(self, sampler: Sampler[int], max_tokens: int) -> None:
        self.sampler, self.max_tokens = sampler, max_tokens

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            if batch and sum(LENGTHS[i] for i in batch) + LENGTHS[index] > self.max_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WithoutLen(Sampler[int]):
    """Every sample once, in an order of the global NumPy."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(LENGTH).tolist())


class SaysTooMuch(Sampler[int]):
    """Says six more than it yields."""

    says = LENGTH + 6

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


class SaysTooLittle(SaysTooMuch):
    """Says six less than it yields."""

    says = LENGTH - 6


class Endless(Sampler[int]):
    """Never ends: shuffles, one after the other."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from random.sample(range(LENGTH), LENGTH)


# Batches


class OfNames(Sampler[list[str]]):
    """Batches of the names of samples, popped from a set."""

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[list[str]]:
        names = {f"sample {index}" for index in range(LENGTH)}
        while names:
            yield [names.pop(), names.pop()]


class PTimesK(Sampler[list[int]]):
    """Seven batches of two classes with two instances each, from the global ``random``."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(7):
            for_batch = random.sample(range(4), 2)
            members = [[i for i, label in enumerate(LABELS) if label == chosen] for chosen in for_batch]
            yield [index for of_class in members for index in random.sample(of_class, 2)]


# Random generators


class HoldsNumpy(Sized):
    """Draws from a NumPy generator that it holds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(LENGTH).tolist())


class HoldsRandom(Sized):
    """Draws from a ``random.Random`` that it holds."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(LENGTH), LENGTH))


class HoldsTorch(Sized):
    """Draws from a ``torch.Generator`` that it holds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH, generator=self.generator).tolist())


class DrawsLazily(Sized):
    """Draws each sample when it is asked for it, from all three global generators in turn."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            draws = (random.random(), float(np.random.random()), float(torch.rand(())))
            yield left.pop(int(draws[len(left) % 3] * len(left)))


# States


class RightState(Sized):
    """Its state is its epoch and its place in it."""

    epoch = place = begins_at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.place, self.begins_at = self.begins_at, 0
        for index in permutation(self.epoch)[self.place :]:
            self.place += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.begins_at = state["epoch"], state["place"]


class IgnoresState(RightState):
    """Takes its state and begins anew all the same."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class StateOneOff(RightState):
    """Goes on one sample too far."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.begins_at = state["epoch"], state["place"] + 1
