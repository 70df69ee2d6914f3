"""A ``collate_fn`` that carries something over from batch to batch is warned of once, and no other."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_stateful import StatefulLoader, patch_dataloader
from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.errors import StatefulWarning

TEXTS = [list(range(length % 7 + 1)) for length in range(40)]


class Packs:
    """Joins samples to rows of 5, and keeps the rest for the next batch."""

    def __init__(self, kind: Callable[[Any], Any] = list) -> None:
        self.kind = kind
        self.buffer = kind([])

    def __call__(self, samples: Any) -> Any:
        tokens = [*list(self.buffer), *(token for sample in samples for token in sample)]
        whole = len(tokens) // 5 * 5
        self.buffer = self.kind(tokens[whole:])
        return torch.tensor(tokens[:whole])

    def collate(self, samples: Any) -> Any:
        return self(samples)


GLOBAL: list[int] = []


def packs_globally(samples: Any) -> Any:
    GLOBAL.extend(token for sample in samples for token in sample)
    whole = len(GLOBAL) // 5 * 5
    row, GLOBAL[:] = GLOBAL[:whole], GLOBAL[whole:]
    return row


BEFORE: Any = None


def mixes_with_the_batch_before(samples: Any) -> Any:
    global BEFORE
    batch = torch.tensor([float(len(sample)) for sample in samples])
    mixed, BEFORE = batch if BEFORE is None else batch + BEFORE, batch
    return mixed


LATEST: Any = None


def notes_the_latest(samples: Any) -> Any:
    global LATEST
    LATEST = torch.tensor([len(sample) for sample in samples])
    return LATEST.clone()


def packs_in_closure() -> Any:
    rest = ""

    def collate(samples: Any) -> Any:
        nonlocal rest
        text = rest + "".join(str(token) for sample in samples for token in sample)
        rest = text[len(text) // 5 * 5 :]
        return text[: len(text) // 5 * 5]

    return collate


WORDS: dict[Any, int] = {}


def numbers_words(samples: Any) -> Any:
    return [WORDS.setdefault((token, len(sample)), len(WORDS)) for sample in samples for token in sample]


class Harmless:
    """Counts, caches, keeps what it has seen, writes into memory of its own, and looks at a dataset's cache."""

    def __init__(self) -> None:
        self.count, self.cache, self.seen = 0, {}, []  # type: ignore[var-annotated]
        self.memory = torch.zeros(4)

    def __call__(self, samples: Any) -> Any:
        self.count += 1
        for sample in samples:
            self.cache.setdefault(str(sample), len(self.cache))
            self.seen.append(len(sample))
        self.memory[: len(samples)] = torch.tensor([float(len(sample)) for sample in samples])
        return [len(sample) for sample in samples]


class Caching(list[Any]):
    """A dataset that fills a cache while it is read, with a ``collate_fn`` of its own."""

    cache: Any = None

    def __getitem__(self, index: Any) -> Any:
        self.cache = deque(maxlen=3) if self.cache is None else self.cache
        self.cache.append(index)
        return super().__getitem__(index)

    def collate(self, samples: Any) -> Any:
        return [len(sample) for sample in samples]


def read(collate: Any, dataset: Any = TEXTS, **options: Any) -> list[str]:
    loader = StatefulLoader(dataset, batch_size=4, collate_fn=collate, seed=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len(list(loader)) == 10
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize(
    ("collate", "name"),
    [
        (Packs(), "Packs carries 'buffer'"),
        (Packs(deque).collate, "Packs.collate carries 'buffer'"),
        (partial(Packs(torch.tensor)), "partial carries 'buffer'"),
        (packs_in_closure(), "collate carries 'rest'"),
        (packs_globally, "packs_globally carries 'GLOBAL'"),
        (mixes_with_the_batch_before, "mixes_with_the_batch_before carries 'BEFORE'"),
    ],
    ids=["list", "deque of a bound method", "tensor in a partial", "closure", "global", "global that is set"],
)
def test_a_buffer_is_warned_of_once_by_name(collate: Any, name: str) -> None:
    (warning,) = read(collate)
    assert name in warning
    assert "StreamDataModule" in warning


class Resizes:
    """Chooses another size every third batch, as detectors are trained, and cuts more from batch to batch."""

    def __init__(self) -> None:
        self.count, self.size, self.turns = 0, 4, count()

    def __call__(self, samples: Any) -> Any:
        if self.count % 3 == 0:
            self.size = random.choice(range(4, 9))
        self.count += 1
        return [sample[: self.size] for sample in samples]

    def by_turns(self, samples: Any) -> Any:
        return next(self.turns) % 2, len(samples)


NUMBER = 0


def counts_globally(samples: Any) -> Any:
    global NUMBER
    NUMBER += 1
    return len(samples), NUMBER / 100


def counts_in_closure() -> Any:
    number = 0

    def collate(samples: Any) -> Any:
        nonlocal number
        number += 1
        return samples[: 1 + number % 3]

    return collate


class TakesTurns:
    """Shortens every other batch, or by a count in a dict."""

    def __init__(self) -> None:
        self.turn, self.is_short, self.counts = 0, False, {"batches": 0}

    def by_number(self, samples: Any) -> Any:
        self.turn = (self.turn + 1) % 2
        return samples[: 1 + self.turn]

    def by_flag(self, samples: Any) -> Any:
        self.is_short = not self.is_short
        return samples[:1] if self.is_short else samples

    def by_dict(self, samples: Any) -> Any:
        self.counts["batches"] += 1
        return samples[: 1 + self.counts["batches"] % 3]

    def adds_up(self, samples: Any) -> Any:
        """Sets a number to 0 for each batch, and adds up in it."""
        self.turn = 0
        for sample in samples:
            self._add(sample)
        return self.turn

    def _add(self, sample: Any) -> None:
        self.turn += len(sample)


class CountsBatches(Caching):
    """Has a ``collate_fn`` that counts batches, and says now and then how many there were."""

    batches = said = 0

    def collate(self, samples: Any) -> Any:
        self.batches += 1
        if self.batches % 5 == 0:
            print(self.batches)
        return [len(sample) for sample in samples]

    def warm_up(self, samples: Any) -> Any:
        self.said = self.said + 1
        ratio = min(self.said / 20, 0.5)
        return [len(sample) * ratio for sample in samples]


@pytest.mark.parametrize(
    ("collate", "name"),
    [
        (Resizes(), "Resizes changes 'count'"),
        (Resizes().by_turns, "Resizes changes 'turns'"),
        (counts_in_closure(), "collate changes 'number'"),
        (counts_globally, "counts_globally changes 'NUMBER'"),
        (partial(CountsBatches.warm_up, CountsBatches(TEXTS)), "CountsBatches changes 'said'"),
        (TakesTurns().by_number, "TakesTurns changes 'turn'"),
        (TakesTurns().by_flag, "TakesTurns changes 'is_short'"),
        (TakesTurns().by_dict, "TakesTurns changes 'counts'"),
        (numbers_words, "numbers_words changes 'WORDS'"),
    ],
    ids=["count", "iterator", "closure", "global", "of the dataset", "turns", "flag", "dict", "words"],
)
def test_a_count_that_decides_what_a_batch_is_is_warned_of_once_by_name(collate: Any, name: str) -> None:
    (warning,) = read(collate)
    assert f"{name} whenever batches are collated" in warning
    assert "derive it from the samples of the batch" in warning


def test_a_count_of_batches_alone_is_not() -> None:
    data = CountsBatches(TEXTS)
    assert read(data.collate, data) == []
    assert data.batches == 20
    assert read(TakesTurns().adds_up) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_what_counts_caches_or_is_filled_by_reading_is_not(workers: int) -> None:
    data = Caching(TEXTS)
    harmless = (Harmless(), TEXTS), (data.collate, data), (default_collate, [*range(40)]), (notes_the_latest, TEXTS)
    for collate, dataset in harmless:
        assert read(collate, dataset, num_workers=workers) == []


def test_in_a_worker_it_is_warned_of_too() -> None:
    # The tests' filters make an error of it there, which is the batch's.
    for collate, said in ((Packs(), "carries 'buffer' over"), (Resizes(), "changes 'count' whenever batches")):
        loader = StatefulLoader(TEXTS, batch_size=4, collate_fn=collate, seed=0, num_workers=1)
        with pytest.raises(StatefulWarning, match=said):
            list(loader)


class Longest(DataLoader[Any]):
    """Collates by a method that remembers the longest text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TEXTS, batch_size=4, collate_fn=self.collate, **options)
        self.longest = 0

    def collate(self, samples: Any) -> Any:
        self.longest += max(map(len, samples))
        return torch.zeros(self.longest)


class CountsOnly(Longest):
    def collate(self, samples: Any) -> Any:
        self.longest += 1
        return len(samples)


def test_a_method_of_the_loader_is_watched_too() -> None:
    words = "Longest changes 'longest' whenever batches are collated"
    with pytest.warns(StatefulWarning, match=words):
        list(patch_dataloader(Longest(), seed=0))
    # The tests' filters make an error of it there, which is the batch's.
    with pytest.raises(StatefulWarning, match=words):
        list(patch_dataloader(Longest(num_workers=1), seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        list(patch_dataloader(CountsOnly(), seed=0))


def test_what_objects_hold_is_put_back() -> None:
    data, packs, draws = Caching(TEXTS), Packs(deque), random.Random(0)
    holder: dict[str, Any] = {
        "data": data,
        "bytes": bytearray(b"a"),
        "set": {1},
        "array": np.zeros(2),
        "tensor": torch.zeros(2),
    }
    GLOBAL.clear()
    inside = packs_in_closure()
    held, first = HeldState(holder, packs.collate, draws, packs_globally, inside), draws.random()
    data[0], packs([[1, 2, 3]]), packs_globally([[4, 5, 6]]), inside([[7]])
    data.append(7)
    holder["bytes"].append(1)
    holder["set"].clear()
    holder["array"] += 1
    holder["tensor"] += 1
    holder["more"] = 1
    held.restore()
    assert held.is_whole
    assert draws.random() == first
    assert (data, data.cache, packs.buffer, GLOBAL, inside([[1, 2, 3, 4]])) == (TEXTS, None, deque(), [], "")
    assert list(holder) == ["data", "bytes", "set", "array", "tensor"]
    assert (holder["bytes"], holder["set"]) == (b"a", {1})
    assert not holder["array"].any()
    assert not holder["tensor"].any()


def test_evaluation_is_left_alone() -> None:
    assert read(Packs(), exact=True) == []


class Streams(IterableDataset[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from TEXTS


def test_so_is_one_over_an_iterable_dataset() -> None:
    loader = patch_dataloader(DataLoader(Streams(), batch_size=4, collate_fn=Packs()))
    with pytest.warns(StatefulWarning, match="The collate_fn Packs carries 'buffer' over from batch to batch"):
        list(loader)
