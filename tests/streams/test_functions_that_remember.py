"""Functions of a stream that keep what they were given: no checkpoint has that, so a word is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from lightning_stateful import ChunkedDataset, StreamDataModule, patch_dataloader

Row = dict[str, Any]


def without_duplicates() -> Callable[[Row], bool]:
    """Keeps the first row of each id."""
    seen: set[int] = set()

    def is_new(row: Row) -> bool:
        if row["id"] in seen:
            return False
        seen.add(row["id"])
        return True

    return is_new


class Occurrence:
    """Numbers the rows of each id."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def __call__(self, row: Row) -> Row:
        self.counts[row["id"]] = self.counts.get(row["id"], 0) + 1
        return {"id": row["id"], "number": self.counts[row["id"]]}


class Vocabulary:
    """Gives each new id the next number."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def __call__(self, row: Row) -> Row:
        self.numbers.setdefault(row["id"], len(self.numbers))
        return {"id": self.numbers[row["id"]]}


class EverySecond:
    """Keeps every second row."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __call__(self, row: Row) -> bool:
        self.num_rows += 1
        return self.num_rows % 2 == 0


class Told:
    """Counts rows to write it down."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __call__(self, row: Row) -> Row:
        self.num_rows += 1
        if self.num_rows % 100 == 0:
            print(self.num_rows)
        return row


class Cached:
    """Keeps what follows from a row alone."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def __call__(self, row: Row) -> Row:
        if row["id"] not in self.lengths:
            self.lengths[row["id"]] = len(str(row["id"]))
        return {"id": row["id"], "length": self.lengths[row["id"]]}


def chunks() -> ChunkedDataset:
    return ChunkedDataset(range(4), lambda chunk: [{"id": (chunk * 70 + number) % 150} for number in range(70)])


def rows(folder: Path) -> Any:
    names = [str(folder / f"{chunk}.parquet") for chunk in range(4)]
    for chunk, name in enumerate(names):
        Dataset.from_list([{"id": (chunk * 70 + number) % 150} for number in range(70)]).to_parquet(name)
    return Dataset.from_parquet(names).to_iterable_dataset(num_shards=4)


def said(loader: Any) -> list[str]:
    """What a pass says of functions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    return [str(one.message) for one in caught if "as samples are read" in str(one.message)]


REMEMBER = [
    (without_duplicates, "filter", "is_new changes 'seen'"),
    (Occurrence, "map", "Occurrence changes 'counts'"),
    (Vocabulary, "map", "Vocabulary changes 'numbers'"),
    (EverySecond, "filter", "EverySecond changes 'num_rows'"),
]


@pytest.mark.parametrize("kind", ["chunks", "Hugging Face"])
@pytest.mark.parametrize(("make", "how", "text"), REMEMBER, ids=[make.__name__ for make, *_ in REMEMBER])
def test_a_function_that_remembers_is_warned_of_once(make: Any, how: str, text: str, kind: str, tmp_path: Path) -> None:
    data = getattr(chunks() if kind == "chunks" else rows(tmp_path), how)(make())
    loader = patch_dataloader(DataLoader(data, batch_size=4, collate_fn=list))

    (message,) = said(loader)
    assert f"{text} as samples are read" in message
    assert "not exact" in message
    assert said(loader) == []


def test_workers_tell_the_training_process() -> None:
    data = chunks().filter(EverySecond())
    module = StreamDataModule(data, batch_size=1, num_workers=2, collate_fn=list)

    messages = said(module.train_dataloader())

    assert ["EverySecond changes 'num_rows'" in message for message in messages] == [True]


@pytest.mark.parametrize("make", [Told, Cached])
@pytest.mark.parametrize("kind", ["chunks", "Hugging Face"])
def test_counts_that_are_written_down_and_caches_are_let_be(make: Any, kind: str, tmp_path: Path) -> None:
    data = (chunks() if kind == "chunks" else rows(tmp_path)).map(make())

    assert said(patch_dataloader(DataLoader(data, batch_size=4, collate_fn=list))) == []
