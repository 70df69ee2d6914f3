"""A dataset that keeps samples which it has drawn is warned of once by name; no other cache is."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import numbers_module, stopped, train
from torch.utils.data import Dataset

from lightning_stateful import StatefulLoader
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders import batch_reader

SIZE = 12


class Caches(Dataset[Any]):
    """Reads a sample by a function, and has something to keep samples in."""

    def __init__(self, read: Callable[[Any, int], Any], cache: Any = None) -> None:
        self.read, self.cache, self.rng = read, {} if cache is None else cache, np.random.default_rng(0)
        self.values = torch.zeros(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "x": torch.ones(4) * torch.as_tensor(self.read(self, index)).sum()}


def augmented(dataset: Caches, index: int) -> Any:
    if index not in dataset.cache:
        dataset.cache[index] = index + torch.rand(4)
    return dataset.cache[index].clone()


def in_list(dataset: Caches, index: int) -> Any:
    if dataset.cache[index] is None:
        dataset.cache[index] = index + dataset.rng.random()
    return dataset.cache[index]


def in_tensor(dataset: Caches, index: int) -> Any:
    if not dataset.cache[index]:
        dataset.values[index] = index + torch.rand(())
        dataset.cache[index] = True
    return dataset.values[index].clone()


def plain_in_tensor(dataset: Caches, index: int) -> Any:
    if not dataset.cache[index]:
        dataset.values[index] = index
        dataset.cache[index] = True
    return dataset.values[index] + torch.rand(())


def plain(dataset: Caches, index: int) -> Any:
    return dataset.cache.setdefault(index, float(index))


def plain_then_augmented(dataset: Caches, index: int) -> Any:
    return dataset.cache.setdefault(index, float(index)) + (dataset.rng.random() < 0.1)


def in_pairs(dataset: Caches, index: int) -> Any:
    other = random.randrange(SIZE)
    return torch.tensor([dataset.cache.setdefault(one, float(one)) for one in (index, other)])


@lru_cache
def squared(index: int) -> float:
    return float(index * index)


def by_lru_cache(dataset: Caches, index: int) -> Any:
    return squared(index) + torch.rand(())


def drawn_by_lru_cache() -> Caches:
    @lru_cache
    def cache(index: int) -> float:
        return index + random.random()

    return Caches(lambda dataset, index: cache(index))


def drawn_by_cached_method() -> Caches:
    class Caching(Caches):
        __qualname__ = "Caches"

        @lru_cache  # noqa: B019
        def cache(self, index: int) -> Any:
            return index + torch.rand(())

        def __getitem__(self, index: int) -> Any:
            return {"id": index, "x": self.cache(index)}

    made = Caching(plain)
    del made.cache
    return made


KEPT = {
    "dict": lambda: Caches(augmented),
    "list": lambda: Caches(in_list, [None] * SIZE),
    "tensor and mask": lambda: Caches(in_tensor, torch.zeros(SIZE, dtype=torch.bool)),
    "array as mask": lambda: Caches(in_tensor, np.zeros(SIZE, dtype=bool)),
    "list as mask": lambda: Caches(in_tensor, [False] * SIZE),
    "lru_cache": drawn_by_lru_cache,
    "lru_cache of a method": drawn_by_cached_method,
}
HARMLESS: dict[str, Callable[[], Caches]] = {
    "plain": lambda: Caches(plain),
    "tensor, augmented later": lambda: Caches(plain_in_tensor, torch.zeros(SIZE, dtype=torch.bool)),
    "augmented later": lambda: Caches(plain_then_augmented),
    "pairs": lambda: Caches(in_pairs),
    "lru_cache, augmented later": lambda: Caches(by_lru_cache),
}


def read(make: Callable[[], Caches], **options: Any) -> tuple[list[Any], list[str]]:
    """The batches of three passes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = StatefulLoader(make(), batch_size=4, shuffle=True, seed=0, **options)
        batches = [batch for _ in range(3) for batch in loader]
    return batches, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("name", [*KEPT, *HARMLESS])
def test_only_what_was_drawn_is_warned_of_and_nothing_is_read_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Any = (KEPT | HARMLESS)[name]
    batches, said = read(make)
    assert len(said) == (name in KEPT)
    assert all("keeps samples in 'cache' that it has drawn random numbers for" in one for one in said)
    monkeypatch.setattr(batch_reader, "ReadWatch", lambda *args, **options: None)
    assert str(read(make)[0]) == str(batches)


def test_workers_that_live_on_warn_and_others_keep_nothing() -> None:
    # The tests' filters make an error of it there, which is the batch's.
    loader = StatefulLoader(KEPT["dict"](), batch_size=1, seed=0, num_workers=2, persistent_workers=True)
    with pytest.raises(StatefulWarning, match="Caches keeps samples in 'cache'"):
        assert [*loader, *loader, *loader]
    assert read(KEPT["dict"], num_workers=1)[1] == []


@pytest.mark.parametrize(("options", "said"), [({}, 1), ({"num_workers": 1}, 0)], ids=str)
def test_a_resume_says_it_before_its_first_step(tmp_path: Path, options: Any, said: int) -> None:
    path = tmp_path / "stop.ckpt"

    def module() -> Any:
        return numbers_module(train=KEPT["dict"](), **options)

    stopped(path, module, batch=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, ckpt_path=path, max_epochs=1)
    found = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    assert len(found) == said
