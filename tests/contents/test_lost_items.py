"""Items that a dataset loses now and then, as of samples that cannot be read, are named; a cache loses none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_stateful import StatefulLoader
from lightning_stateful.contents import read_watch
from lightning_stateful.errors import StatefulWarning

SIZE = 40


class Remembers(Dataset[Any]):
    """A dataset with a function that reads a sample, and what it may lose."""

    def __init__(self, read: Callable[[Any, int], Any], good: Any) -> None:
        self.read, self.good = read, good

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


def forgets_bad(dataset: Any, index: int) -> int:
    """Takes another sample in place of one that cannot be read, and forgets that one."""
    while index % 17 == 3:
        dataset.good.discard(index)
        index = min(dataset.good, key=lambda other: abs(other - index))
    return index


def drops_bad(dataset: Any, index: int) -> int:
    """The same with a list, which is another one each time."""
    if index % 17 == 3:
        dataset.good = [other for other in dataset.good if other != index]
    return dataset.good[index % len(dataset.good)]


def clears_bad(dataset: Any, index: int) -> int:
    """The same with a mask."""
    if index % 17 == 3:
        dataset.good[index] = False
    return int(np.flatnonzero(dataset.good)[-1]) if index % 17 == 3 else index


def evicts(dataset: Any, index: int) -> int:
    """A cache that is emptied when it is full."""
    if len(dataset.good) > 9:
        dataset.good.clear()
    return dataset.good.setdefault(index, index)


def by_index(dataset: Any, index: int) -> int:
    """Reads its list, and changes nothing."""
    return int(dataset.good[0] * 0 + index)


LOSING = {
    "a set": lambda: Remembers(forgets_bad, good={*range(SIZE)}),
    "a list": lambda: Remembers(drops_bad, good=[*range(SIZE)]),
    "a mask": lambda: Remembers(clears_bad, good=np.ones(SIZE, bool)),
    "a mask of torch": lambda: Remembers(clears_bad, good=torch.ones(SIZE, dtype=torch.bool)),
}


def said_of(dataset: Any, **options: Any) -> list[str]:
    """The warnings of two passes."""
    loader = StatefulLoader(dataset, batch_size=4, seed=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len([*loader, *loader]) == 20
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("name", LOSING)
def test_items_that_are_lost_now_and_then_are_named(name: str) -> None:
    for keys in (sorted, reversed):
        said = said_of(Subset(LOSING[name](), [*keys(range(SIZE))]))
        assert ["Remembers has lost items of 'good'" in one for one in said] == [True], said


def test_in_each_worker_that_loses_items_too() -> None:
    loader = StatefulLoader(Subset(LOSING["a set"](), [*range(3)]), batch_size=1, seed=0, num_workers=2)
    assert len([*loader]) == 3
    loader = StatefulLoader(LOSING["a set"](), batch_size=4, seed=0, num_workers=2)
    with pytest.raises(StatefulWarning, match="Remembers has lost items of 'good'"):
        list(loader)


def test_a_cache_that_is_emptied_and_what_a_hook_takes_away_lose_nothing() -> None:
    assert said_of(Remembers(evicts, good={})) == []
    dataset = Remembers(by_index, good=[*range(SIZE)])
    loader = StatefulLoader(dataset, batch_size=4, seed=0)
    for _ in loader:
        dataset.good.pop()


def test_code_that_cannot_be_read_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(dataset: Any, name: Any) -> Any:
        raise OSError("no source")

    monkeypatch.setattr(read_watch, "_uses", fails)
    assert len(said_of(LOSING["a set"]())) == 1
