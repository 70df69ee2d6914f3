"""Functions of a stream that keep what they were given: no checkpoint has that, so a word is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
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


class Packs:
    """Joins ids to rows of 3, and keeps the rest for the next call."""

    def __init__(self) -> None:
        self.rest: list[int] = []

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[list[int]]]:
        packed = []
        for one in batch["id"]:
            self.rest += [one] * (1 + one % 7)
            while len(self.rest) >= 3:
                packed.append(self.rest[:3])
                self.rest = self.rest[3:]
        return {"packed": packed}


class PacksColumns:
    """Likewise, of several columns."""

    def __init__(self) -> None:
        self.rest: dict[str, list[int]] = {"id": []}

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[list[int]]]:
        for name, values in batch.items():
            self.rest[name].extend(values)
        packed = []
        while len(self.rest["id"]) >= 3:
            packed.append(self.rest["id"][:3])
            del self.rest["id"][:3]
        return {"packed": packed}


def packs_text() -> Callable[[Any], Any]:
    """Likewise, of characters, in a closure."""
    rest = ""

    def pack(batch: dict[str, list[int]]) -> dict[str, list[str]]:
        nonlocal rest
        text = rest + "".join(str(one) for one in batch["id"])
        whole = len(text) // 3 * 3
        rest = text[whole:]
        return {"packed": [text[begin : begin + 3] for begin in range(0, whole, 3)]}

    return pack


class TakesFromPool:
    """Takes ids out of a pool that it fills."""

    def __init__(self) -> None:
        self.pool: list[int] = []

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[int]]:
        self.pool.extend(batch["id"])
        self.pool.sort()
        return {"packed": [self.pool.pop(0) for _ in range(len(self.pool) - 2)]}


class WorksInLists:
    """Sets lists anew, or empties them, before it uses them."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.more: list[int] = []
        self.latest: list[str] = []

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[int]]:
        self.found = []
        self.more.clear()
        self.latest = [str(one) for one in batch["id"]]
        for one in batch["id"]:
            self.found.append(one)
            self.more.append(one + 1)
        return {"packed": self.found + self.more + self.doubled()}

    def doubled(self) -> list[int]:
        return [2 * int(one) for one in self.latest]


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


PACKS = [
    (Packs, "Packs changes 'rest'"),
    (PacksColumns, "PacksColumns changes \"rest['id']\""),
    (packs_text, "pack changes 'rest'"),
    (TakesFromPool, "TakesFromPool changes 'pool'"),
]


@pytest.mark.parametrize("ours", [True, False], ids=["our stream", "a plain DataLoader"])
@pytest.mark.parametrize(("make", "text"), PACKS, ids=[make.__name__ for make, _ in PACKS])
def test_what_packing_leaves_for_the_next_call_is_warned_of(make: Any, text: str, ours: bool, tmp_path: Path) -> None:
    data = rows(tmp_path).map(make(), batched=True, batch_size=6, remove_columns=["id"])
    module = StreamDataModule(data, batch_size=4, buffer_size=0, collate_fn=list)

    loader = module.train_dataloader() if ours else patch_dataloader(DataLoader(data, batch_size=4, collate_fn=list))

    (message,) = said(loader)
    assert f"{text} as samples are read" in message


def test_lists_that_are_set_anew_are_let_be(tmp_path: Path) -> None:
    data = rows(tmp_path).map(WorksInLists(), batched=True, batch_size=6, remove_columns=["id"])

    assert said(patch_dataloader(DataLoader(data, batch_size=4, collate_fn=list))) == []


class Noise:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def draw(self) -> float:
        return float(self.generator.random())


class Noisy:
    """Adds noise from a generator that another object holds."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    def __call__(self, row: Row) -> Row:
        return {"id": int(row["text"]), "noise": self.noise.draw()}


def test_what_looks_at_functions_is_no_way_to_the_generators_that_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"{number}\n" for number in range(20)))

    def make() -> Any:
        rows: Any = datasets.load_dataset(
            "text", data_files=str(path), streaming=True, split="train", cache_dir=str(tmp_path)
        )
        rows = rows.map(Noisy(Noise())).remove_columns("text")
        return patch_dataloader(DataLoader(rows, batch_size=4, collate_fn=list), seed=0)

    loader = make()
    whole = [list(loader), list(loader)]
    first, again = make(), make()
    list(first)
    again.load_state_dict(first.state_dict())
    assert list(again) == whole[1]
