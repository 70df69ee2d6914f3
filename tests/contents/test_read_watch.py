"""A dataset that remembers what was read is warned of once by name, and no other; what is trained on stays the same."""

from __future__ import annotations

import copy
import importlib
import itertools
import multiprocessing
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset

from lightning_stateful import StatefulLoader
from lightning_stateful.contents import read_watch
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders import batch_reader

SIZE = 40


class Remembers(Dataset[Any]):
    """A dataset with a function that reads a sample, and a place to remember something."""

    count = 0

    def __init__(self, read: Callable[[Any, int], Any], **held: Any) -> None:
        self.read = read
        vars(self).update(held)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


class Transform:
    """Counts what it is called with."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, dataset: Any, index: int) -> float:
        self.calls += 1
        return index / 2 + (self.calls > 99)


class Jitter:
    """Draws its parameters for each sample, and notes them, as transforms for sound do."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}

    def __call__(self, dataset: Any, index: int) -> Any:
        self.draw()
        return self.applied(index) if self.parameters["is_on"] else index

    def draw(self) -> None:
        self.parameters["is_on"] = random.random() < 0.5
        if self.parameters["is_on"]:
            self.parameters["scale"] = random.uniform(0.5, 2)

    def applied(self, index: int) -> float:
        return index * self.parameters["scale"]


class Queue(Remembers):
    """Mixes a sample with one that was read before."""

    def __getitem__(self, index: int) -> Any:
        other = random.choice(self.held) if self.held else -1  # type: ignore[attr-defined]
        self.held.append(index)  # type: ignore[attr-defined]
        return index, other


class CountsInClass(Remembers):
    """Counts in its class."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        CountsInClass.count += 1
        return min(index, CountsInClass.count + SIZE)


COUNTS = {"all": 0}


def by_bins(dataset: Any, index: int) -> int:
    bins = [0, 0]
    dataset.reads[index % 2] += 1
    bins[dataset.reads[0] > 15] += index
    return bins[0]


def counts_in_module(dataset: Any, index: int) -> int:
    COUNTS["all"] += 1
    return min(index, COUNTS["all"] + SIZE)


def counts_in_closure() -> Any:
    count = 0

    def read(dataset: Any, index: int) -> int:
        nonlocal count
        count += 1
        return min(index, count + SIZE)

    return read


def by_reads(dataset: Any, index: int) -> int:
    dataset.reads += 1
    return index + (100 if dataset.reads > 30 else 0)


class Words(Remembers):
    """Numbers words as they come."""

    def __init__(self, read: Any) -> None:
        super().__init__(read, words=[], number={}, made=defaultdict(lambda: len(self.made)))

    def number_of(self, word: str) -> int:
        if word not in self.number:
            self.number[word] = len(self.words)
            self.words.append(word)
        return int(self.number[word])


def words_in_order(dataset: Any, index: int) -> Any:
    return [dataset.number_of(word) for word in (f"w{index}", f"w{index % 5}")]


def words_by_default(dataset: Any, index: int) -> Any:
    return [dataset.made[word] for word in (f"w{index}", f"w{index % 5}")]


def takes(dataset: Any, index: int) -> Any:
    dataset.number = index
    return dataset.held.pop()


def opened(dataset: Any, index: int) -> Any:
    """Keeps one shard open, the number of the sample that is being read, and a cache of bounded size."""
    dataset.index = index
    if dataset.shard != index % 3:
        dataset.shard, dataset.values = index % 3, torch.arange(3) * (index % 3)
    dataset.cache[index] = dataset.cache.pop(index, index * 2)
    if len(dataset.cache) > 2:
        dataset.cache.popitem(last=False)
    dataset.recent.append(index)
    del dataset.recent[:-4]
    dataset.flip = dataset.rng.random() < 0.5
    return dataset.values + dataset.flip


def cached(dataset: Any, index: int) -> Any:
    dataset.handle = dataset.handle or object()
    dataset.seen.add(index)
    dataset.buffer += index
    return dataset.samples.setdefault(index, index * 2) + random.random()


class Counts(Remembers):
    """Counts in many ways, and reads by none of it."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        global NUM_READ
        NUM_READ += 1
        Counts.count += 1
        self.reads += 1
        self.by_key[index % 2] += index  # type: ignore[attr-defined]
        self.times.append(self.reads_of(index))  # type: ignore[attr-defined]
        return index

    def reads_of(self, index: int) -> int:
        COUNTS["all"] += 1
        return index

    def report(self) -> int:
        return self.reads + NUM_READ


NUM_READ = 0


def cached_in_list(dataset: Any, index: int) -> Any:
    """As torch_geometric's InMemoryDataset keeps samples."""
    if dataset.samples is None:
        dataset.samples = SIZE * [None]
    elif dataset.samples[index] is not None:
        return copy.copy(dataset.samples[index])
    dataset.samples[index] = [index]
    return copy.copy(dataset.samples[index])


class CachedByFlag(Remembers):
    """Keeps numbers in an array, and which of them it has."""

    def __getitem__(self, index: int) -> Any:
        if not self.is_read[index]:
            self.buffer[index] = float(index)
            self.is_read[index] = True
        return self.buffer[index] + random.random()


def by_iterator(dataset: Any, index: int) -> int:
    return index + int(next(dataset.turns))


def by_shared(dataset: Any, index: int) -> int:
    with dataset.shared.get_lock():
        dataset.shared.value += 1
    return index + int(dataset.shared.value)


def by_shared_array(dataset: Any, index: int) -> int:
    dataset.shared[0] = dataset.shared[0] + 1
    return index + int(dataset.shared[0])


def by_default() -> Any:
    class ByDefault(Remembers):
        """Counts in a default argument of one of its methods, by way of a property."""

        @property
        def flip(self) -> int:
            return self.take()

        def take(self, box: list[int] = [0]) -> int:  # noqa: B006  # as users write it
            box[0] += 1
            return box[0]

        def __getitem__(self, index: int) -> int:
            return index + self.flip

    return ByDefault(len)


def in_default() -> Any:
    def read(dataset: Any, index: int, box: Any = deque(maxlen=3)) -> Any:  # noqa: B006  # as users write it
        box.append(index)
        return index, box[0]

    return Remembers(read)


def turns() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def logged(dataset: Any, index: int) -> int:
    """Writes down how many it has read, now and then, and counts in all ways; the epoch is told by training."""
    dataset.reads += 1
    dataset.reads = dataset.reads + 1
    dataset.seen[index % 2] = dataset.seen[index % 2] + 1
    with dataset.shared.get_lock():
        dataset.shared.value += 1
    next(dataset.turns)
    if dataset.reads % 10 == 0 and dataset.verbose:
        print(f"{dataset.reads} and {dataset.shared.value} samples were read")
        if dataset.reads > 30:
            dataset.reads = 0
    return index + int(dataset.epoch.value)


def seen_before(dataset: Any, index: int) -> Any:
    is_first = index not in dataset.seen
    dataset.seen.add(index)
    return index, is_first


def reads_of_each(dataset: Any, index: int) -> Any:
    dataset.reads[index] = dataset.reads.get(index, 0) + 1
    return index, dataset.reads[index]


def from_bank(dataset: Any, index: int) -> Any:
    other = random.choice(dataset.bank) if len(dataset.bank) > 3 else index
    if len(dataset.bank) < 7:
        dataset.bank.append(index)
    return index, other


class Weights(Remembers):
    """Uses a count by way of a mean, and in an attribute of a sample."""

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.mean += (index - self.mean) / self.reads
        sample = Transform()
        sample.calls = self.reads
        return index, self.mean, sample.calls


class ByFlag(Remembers):
    """Reads in another way once all were read."""

    def __getitem__(self, index: int) -> Any:
        self.seen.add(index)
        if len(self.seen) == SIZE:
            self.is_full = True
        return index, self.is_full


class OverridesCount(CountsInClass):
    """Calls the method that counts."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Caches(Remembers):
    """Caches plain samples in many ways, up to a number or a size, and notes a mean."""

    def __getitem__(self, index: int) -> Any:
        self.params = {"scale": random.random()}
        value = self.loaded(index)
        sample = value * self.params["scale"] + self.listed(index) + self.bounded(index)
        self.reads += 1
        self.mean += (value.float().mean().item() - self.mean) / self.reads
        return sample

    def loaded(self, index: int) -> Any:
        if index in self.seen:
            return self.values[index].clone()
        value = torch.tensor(index)
        self.seen.add(index)
        self.values[index] = value
        self.share = len(self.seen) / SIZE
        if len(self.seen) == SIZE:
            self.is_full = True
        if index not in self.noted:
            self.noted.add(index)
            self.num_noted += 1
        self.log.append(index)
        if len(self.log) > 9:
            self.log = self.log[-3:]
        if len(self.seen) > SIZE:
            raise RuntimeError("an index was outside")
        return value

    def listed(self, index: int) -> Any:
        if index not in self.places:
            self.places[index] = len(self.items)
            self.items.append(index)
        return self.items[self.places[index]]

    def bounded(self, index: int) -> Any:
        if index in self.few:
            sample = self.few[index]
        else:
            sample = index * 2
            if self.size + 8 <= self.most:
                self.few[index] = sample
                self.size += 8
        if not self.names:
            self.names.extend(["a", "b"])
        try:
            if index % 4 == 3:
                raise OSError
        except OSError:
            self.bad.add(index)
        return sample if index not in self.bad else len(self.names)


class CountsInShared(Remembers):
    """Counts by a lock, in place of a class that uses the count."""

    def __getitem__(self, index: int) -> Any:
        with self.shared.get_lock():
            self.shared.value += 1
        return index


class UsesShared(Remembers):
    def __getitem__(self, index: int) -> Any:
        return by_shared(self, index) + self.shared.value


class OverridesShared(UsesShared):
    __getitem__ = CountsInShared.__getitem__


HARMLESS = {
    "caches": lambda: Caches(
        len,
        seen=set(),
        values={},
        params={},
        reads=0,
        mean=0.0,
        places={},
        items=[],
        few={},
        size=0,
        most=50,
        names=[],
        bad=set(),
        noted=set(),
        num_noted=0,
        log=[],
    ),
    "count in place of one that is used": lambda: OverridesShared(len, shared=multiprocessing.Value("i", 0)),
    "logged": lambda: Remembers(
        logged,
        reads=0,
        seen={0: 0, 1: 0},
        shared=multiprocessing.Value("i", 0),
        turns=itertools.count(),
        epoch=multiprocessing.Value("i", 0),
        verbose=True,
    ),
    "counts": lambda: Counts(len, reads=0, by_key=[0, 0], times=deque(maxlen=9)),
    "open": lambda: Remembers(
        opened,
        index=0,
        shard=-1,
        values=None,
        cache=OrderedDict(),
        recent=[1, 2, 3, 4],
        flip=False,
        rng=random.Random(),
    ),
    "drawn": lambda: Remembers(Jitter()),
    "cached by a flag": lambda: CachedByFlag(len, is_read=[False] * SIZE, buffer=np.zeros(SIZE)),
    "cached in a list": lambda: Remembers(cached_in_list, samples=None),
    "cached": lambda: Remembers(cached, handle=None, seen={-1}, samples={}, buffer=np.zeros(3)),
}
REMEMBERING = {
    "seen indices": (lambda: Remembers(seen_before, seen=set()), "Remembers changes 'seen' whenever"),
    "flag by seen indices": (lambda: ByFlag(len, seen=set(), is_full=False), "ByFlag changes 'seen' whenever"),
    "reads of each": (lambda: Remembers(reads_of_each, reads={}), "Remembers changes 'reads' whenever"),
    "bank that is soon full": (lambda: Remembers(from_bank, bank=[]), "Remembers changes 'bank' whenever"),
    "mean that is used": (lambda: Weights(len, reads=0, mean=0.0), "Weights changes 'mean' and 'reads' whenever"),
    "count of a base class": (lambda: OverridesCount(len), "changes 'CountsInClass.count'"),
    "iterator": (lambda: Remembers(by_iterator, turns=itertools.count()), "Remembers changes 'turns' whenever"),
    "generator": (lambda: Remembers(by_iterator, turns=turns()), "Remembers changes 'turns' whenever"),
    "cycle": (lambda: Remembers(by_iterator, turns=itertools.cycle(range(3))), "Remembers changes 'turns' whenever"),
    "shared": (lambda: Remembers(by_shared, shared=multiprocessing.Value("i", 0)), "Remembers changes 'shared' when"),
    "shared array": (lambda: Remembers(by_shared_array, shared=multiprocessing.Array("i", 2)), "changes 'shared' when"),
    "default of a method": (by_default, "ByDefault.take.box' whenever"),
    "default of a function": (in_default, "read changes 'box' whenever"),
    "count": (lambda: Remembers(by_reads, reads=0), "Remembers changes 'reads' whenever"),
    "counts by key": (lambda: Remembers(by_bins, reads=[0, 0]), "Remembers changes 'reads'"),
    "count of a transform": (lambda: Subset(Remembers(Transform()), range(SIZE)), "Transform changes 'calls'"),
    "count in the class": (lambda: CountsInClass(len), "CountsInClass changes 'CountsInClass.count'"),
    "count in a module": (lambda: Remembers(counts_in_module), "counts_in_module changes 'COUNTS'"),
    "count in a closure": (lambda: Remembers(counts_in_closure()), "counts_in_closure.<locals>.read changes 'c"),
    "queue": (lambda: StackDataset(Queue(len, held=deque(maxlen=8))), "Queue changes 'held'"),
    "words in their order": (lambda: Words(words_in_order), "Words changes 'number' whenever"),
    "words by a default": (lambda: Words(words_by_default), "Words changes 'made' whenever"),
    "taken from a list": (lambda: Remembers(takes, number=0, held=[*range(999)]), "Remembers has lost items of 'held'"),
}


def read(dataset: Any, **options: Any) -> tuple[list[Any], list[str]]:
    """The batches of two passes, and the warnings."""
    loader = StatefulLoader(dataset, batch_size=4, seed=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [*loader, *loader]
    return batches, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_is_remembered_is_warned_of_once_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = REMEMBERING[name]
    batches, said = read(make())
    (warning,) = said
    assert words in warning
    assert "derive it from the index and the epoch" in warning
    monkeypatch.setattr(batch_reader, "ReadWatch", lambda *options, **more: None)
    assert str(read(make())[0]) == str(batches)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_open_cached_or_in_hand_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, said = read(HARMLESS[name](), shuffle=True)
    assert said == []
    monkeypatch.setattr(batch_reader, "ReadWatch", lambda *options, **more: None)
    assert str(read(HARMLESS[name](), shuffle=True)[0]) == str(batches)


def with_log(dataset: Any, index: int) -> int:
    """Keeps the index in hand, and writes down what it reads."""
    dataset.index = index
    with dataset.log.open("a") as log:
        print(dataset.index, file=log)
    return int(dataset.index)


def test_nothing_is_read_a_second_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _, said = read(Remembers(with_log, index=0, log=log))
    assert said == []
    assert [int(line) for line in log.read_text().split()] == [*range(SIZE)] * 2


def test_in_a_worker_it_is_warned_of_too() -> None:
    # The tests' filters make an error of it there, which is the batch's.
    loader = StatefulLoader(Queue(len, held=deque(maxlen=8)), batch_size=4, seed=0, num_workers=2)
    with pytest.raises(StatefulWarning, match="Queue changes 'held'"):
        list(loader)


def test_evaluation_and_plain_loaders_are_left_alone() -> None:
    assert read(Remembers(by_reads, reads=0), exact=True)[1] == []
    dataset = Remembers(by_reads, reads=0)
    list(DataLoader(dataset))
    assert dataset.reads == SIZE


def test_a_look_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(dataset: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(read_watch, "_snapshot", fails)
    batches, said = read(Remembers(by_reads, reads=0))
    assert (len(batches), said) == (20, [])


@pytest.mark.parametrize("lines", ["return [(", "self.reads += 1\n        return index"])
def test_source_that_was_changed_while_it_runs_is_not_read(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "edited_data.py"
    begin = "class Edited:\n    reads = 0\n\n    def __len__(self):\n        return 40\n\n"
    path.write_text(
        f"{begin}    def __getitem__(self, index):\n        self.reads += 1\n        return index + 100 * self.reads\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited_data", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    dataset = importlib.import_module("edited_data").Edited()
    path.write_text(f"{begin}    def __getitem__(self, index):\n        {lines}\n")

    batches, said = read(dataset)

    assert len(batches) == 20
    # Without source, a count that code names is taken as used.
    assert len(said) == 1
    assert "Edited changes 'reads'" in said[0]
