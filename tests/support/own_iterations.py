"""Loaders that iterate in a way of their own, as timm, ultralytics and others write them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader


class RepeatSampler:
    """Repeats a batch sampler for ever."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """Keeps its workers over epochs, as timm's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler: Any = RepeatSampler(self.sampler)
        else:
            self.batch_sampler: Any = RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.sampler) if self.batch_sampler is None else len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Infinite(DataLoader[Any]):
    """Keeps its workers over epochs, as ultralytics'."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        batches: Any = self.batch_sampler
        return len(batches.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


class SkipsFirst(Infinite):
    """Keeps an iterator, and leaves a batch of it out in every epoch."""

    def __iter__(self) -> Any:
        next(self.iterator)
        yield from super().__iter__()


class Twice(DataLoader[Any]):
    """Gives each batch twice; Lightning stops at half of them, as its length says."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


class TwiceAsLong(Twice):
    """Gives each batch twice, and says so."""

    def __len__(self) -> int:
        return 2 * super().__len__()


class LeavesOut(DataLoader[Any]):
    """Leaves out every third batch."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number % 3 != 1:
                yield batch


class PassesTwice(DataLoader[Any]):
    """Reads its data twice in an epoch, and says so."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __iter__(self) -> Any:
        for _ in range(2):
            yield from super().__iter__()


class PassesByLength(PassesTwice):
    """Reads its data as often as its length says."""

    def __iter__(self) -> Any:
        given = 0
        while given < len(self):
            for batch in DataLoader.__iter__(self):
                given += 1
                yield batch


class HalfOfLength(DataLoader[Any]):
    """Gives the first half of its batches, as many as its length says."""

    def __len__(self) -> int:
        return super().__len__() // 2

    def __iter__(self) -> Any:
        return islice(super().__iter__(), len(self))


class ByShare(DataLoader[Any]):
    """Changes each batch by the share of the epoch that is over."""

    def __iter__(self) -> Any:
        length = len(self)
        for number, batch in enumerate(super().__iter__()):
            yield {**batch, "x": batch["x"] * number / length}


class CountsOff(DataLoader[Any]):
    """Hands on as many batches as its length says."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        for _ in range(len(self)):
            yield next(batches)


class Echoes(DataLoader[Any]):
    """Gives each batch once more, with noise."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield {**batch, "x": batch["x"] + torch.rand(1)}


class ChangesInPlace(DataLoader[Any]):
    """Changes a tensor of each batch by its number."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            batch["id"] += 100 * number
            yield batch


class PutsInto(DataLoader[Any]):
    """Puts another tensor into each batch but the first."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number:
                batch["id"] = batch["id"] + 100 * number
            yield batch


class ByHand(DataLoader[Any]):
    """Reads what its sampler yields by hand."""

    def __iter__(self) -> Any:
        samples: list[Any] = []
        for index in self.sampler:
            samples.append(self.dataset[index])
            if len(samples) == self.batch_size:
                yield self.collate_fn(samples)
                samples = []
        if samples and not self.drop_last:
            yield self.collate_fn(samples)


class BatchesByHand(DataLoader[Any]):
    """Reads what its batch sampler yields by hand."""

    def __iter__(self) -> Any:
        for indices in self.batch_sampler or ():
            yield self.collate_fn([self.dataset[index] for index in indices])


class ShufflesItself(DataLoader[Any]):
    """Draws its order by itself."""

    def __iter__(self) -> Any:
        for indices in torch.randperm(len(self.dataset)).split(self.batch_size or 1):  # type: ignore[arg-type]
            yield self.collate_fn([self.dataset[index] for index in indices.tolist()])


class CountsByHand(ByHand):
    """Counts its passes, and reads its sampler by hand."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        yield from super().__iter__()


class CountsUnread(ShufflesItself):
    """Counts its passes, and reads no sampler."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        yield from super().__iter__()


class ChangesLate(DataLoader[Any]):
    """Changes the batch of sample 6."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {**batch, "id": batch["id"] + 100} if 6 in batch["id"] else batch


class AsksLate(DataLoader[Any]):
    """Asks for its length at the batch of sample 6."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch if 6 not in batch["id"] or len(self) else None


class Pairs(DataLoader[Any]):
    """Gives each batch together with one of a second pass, for a loss over pairs."""

    def __iter__(self) -> Any:
        for one, other in zip(super().__iter__(), super().__iter__(), strict=True):
            yield {name: torch.cat([one[name], other[name]]) for name in one}


class ByNumber(DataLoader[Any]):
    """Changes each batch by its number in the epoch."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            yield {**batch, "x": batch["x"] + 100 * number, "id": batch["id"] + 100 * number}


class KeepsBack(DataLoader[Any]):
    """Gives as many batches as it reads: the first twice, and the last not at all."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        kept = next(batches)
        yield kept
        for batch in batches:
            yield kept
            kept = batch


class CountsInVariable(DataLoader[Any]):
    """Changes batches from the fifth on, which it counts in a variable."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            yield batch if number < 4 else {**batch, "x": -batch["x"]}


class KeepsGenerator(DataLoader[Any]):
    """Goes on with a generator over epochs, of which each has one batch less than it reads."""

    reading: Any = None

    def __len__(self) -> int:
        return super().__len__() - 1

    def _read(self) -> Any:
        while True:
            yield from super().__iter__()

    def __iter__(self) -> Any:
        if self.reading is None:
            self.reading = self._read()
        for _ in range(len(self)):
            yield next(self.reading)


def read_ahead(batches: Any) -> Iterator[Any]:
    """Batches, changed, one behind what is read, as a prefetcher that copies to a device."""
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = {**batch, "x": batch["x"] * 2}
    if held is not None:
        yield held


class ReadsAhead(DataLoader[Any]):
    """Has read one more batch than it has given."""

    def __iter__(self) -> Any:
        return read_ahead(super().__iter__())


class InBackground(DataLoader[Any]):
    """Hands on batches that a thread reads ahead."""

    def __iter__(self) -> Any:
        ready: queue.Queue[Any] = queue.Queue(3)

        def read() -> None:
            for one in [*super(InBackground, self).__iter__(), None]:
                ready.put(one)

        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not None:
            yield batch


class Prefetching:
    """Holds a loader and reads it ahead, as timm's PrefetchLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.mean = 0.5

    def __iter__(self) -> Any:
        return read_ahead(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class HandsOn(Prefetching):
    """Holds a loader and hands its batches on."""

    def __iter__(self) -> Any:
        yield from self.loader


class HalfOfHeld(Prefetching):
    """Holds a loader and gives the first half of its batches, each changed in place."""

    def __len__(self) -> int:
        return len(self.loader) // 2

    def __iter__(self) -> Any:
        for number, batch in enumerate(islice(self.loader, len(self))):
            batch["id"] += 100 * number
            yield batch


class Unsized:
    """Holds a loader, reads it ahead and says nothing of its length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return read_ahead(self.loader)


class PreloadsNext(Prefetching):
    """Is its own iterator, whose ``__next__`` has read the next batch already, as NVIDIA's data_prefetcher."""

    def __iter__(self) -> Any:
        self.batches = iter(self.loader)
        self.preload()
        return self

    def preload(self) -> None:
        self.next = next(self.batches, None)

    def __next__(self) -> Any:
        batch = self.next
        if batch is None:
            raise StopIteration
        self.preload()
        return batch


class HasBegun(Prefetching):
    """Holds a loader and reads what it has begun before."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.begun = [iter(loader)]

    def __iter__(self) -> Any:
        return self.begun[0]


PASSES = {"begun": 0}


class CountsInModule(DataLoader[Any]):
    """Counts its passes in a dict of its module."""

    def __iter__(self) -> Any:
        _note_pass()
        for batch in super().__iter__():
            yield {**batch, "pass": PASSES["begun"]}


def _note_pass() -> None:
    PASSES["begun"] += 1


class CountsInClass(DataLoader[Any]):
    """Counts its passes in its class."""

    begun = 0

    def __iter__(self) -> Any:
        type(self).begun += 1
        for batch in super().__iter__():
            yield {**batch, "pass": self.begun}


def counts_around() -> Any:
    """A class that counts its passes in a variable of a function."""
    begun = 0

    class CountsAround(DataLoader[Any]):
        def __iter__(self) -> Any:
            nonlocal begun
            begun += 1
            yield from super().__iter__()

    return CountsAround


class CountsPasses(DataLoader[Any]):
    """Negates every second pass that it begins."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        for batch in super().__iter__():
            yield {**batch, "id": batch["id"] * (-1) ** self.num_passes}


class CountsAtEnd(CountsPasses):
    """Counts those that come to their end."""

    def __iter__(self) -> Any:
        for batch in DataLoader.__iter__(self):
            yield {**batch, "id": batch["id"] * (-1) ** self.num_passes}
        self.num_passes += 1


class Mixes(DataLoader[Any]):
    """Adds to each batch the one before, in this epoch or the last."""

    before: Any = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            mixed = {**batch, "id": batch["id"] + 100 * self.before}
            self.before = batch["id"]
            yield mixed


class StepsOn(Unsized):
    """Gives 4 batches an epoch of an iterator that goes on."""

    batches: Any = None

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for _ in range(4):
            batch = None if self.batches is None else next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            yield batch


class Beside(DataLoader[Any]):
    """Adds to each batch one of another loader."""

    def __init__(self, *args: Any, other: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.others = [other]

    def __iter__(self) -> Any:
        for batch, beside in zip(super().__iter__(), self.others[0], strict=True):
            yield {**batch, "id": batch["id"] + 100 * beside["id"]}


class KeepsBoth:
    """Takes turns between two loaders, of iterators that go on from epoch to epoch."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders
        self.batches: list[Any] = [None for _ in loaders]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        for number in range(6):
            turn = number % 2
            batch = None if self.batches[turn] is None else next(self.batches[turn], None)
            if batch is None:
                self.batches[turn] = iter(self.loaders[turn])
                batch = next(self.batches[turn])
            yield batch


class KeepsIterator(DataLoader[Any]):
    """Keeps the iterator of the pass in hand, as speechbrain's, and makes another for each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: Any = None

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        self.kept = iterator
        return iterator


class SaysItsEnd(Prefetching):
    """Says when its last batch is out, as Accelerate's loaders do, and takes that back behind its first read."""

    is_over = False

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        ready = next(batches)
        self.is_over = False
        for following in batches:
            yield ready
            ready = following
        self.is_over = True
        yield ready


class UsesIterator(KeepsIterator):
    """Asks the iterator of the pass before how far that came."""

    def __iter__(self) -> Any:
        came = self.come_to()
        self.kept = super().__iter__()
        return iter(list(self.kept)[came % 2 :])

    def come_to(self) -> int:
        return 0 if self.kept is None else int(self.kept._num_yielded) + 1
