"""A dataset is described by what is cheap to read and equal for equal data; an item of a sampler by a digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers import describe_dataset
from lightning_stateful.samplers.fingerprint import digest, types_not_compared


class Files:
    def __init__(self, files: list[Any]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)


class Described:
    def __init__(self, said: Any) -> None:
        self.said = said

    def __len__(self) -> int:
        return 5

    def describe(self) -> Any:
        return self.said


class Table(Described):
    """Has a method of that name for something else."""

    def describe(self, column: str) -> Any:
        return {column: 1}


def some_files(folder: Path, *contents: str) -> Files:
    folder.mkdir()
    paths = [folder / f"{number}.txt" for number, _ in enumerate(contents)]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return Files(list(paths))


@pytest.mark.parametrize(
    ("dataset", "described"),
    [
        ([1, 2, 3], {"length": 3}),
        (TensorDataset(torch.zeros(4, 2)), {"length": 4}),
        (Files([1, 2]), {"length": 2}),
        (Files([]), {"length": 0}),
        (Described({"version": 3, "files": ["a"]}), {"length": 5, "version": 3, "files": ["a"]}),
        (Described("summary statistics"), {"length": 5}),
        (Table(None), {"length": 5}),
    ],
    ids=["list", "tensors", "files of something else", "no files", "says so", "says something else", "asks back"],
)
def test_a_dataset_is_its_length_and_what_it_says_in_a_way_that_is_understood(dataset: Any, described: Any) -> None:
    assert describe_dataset(dataset) == described


def test_the_same_files_in_another_folder_are_the_same_data(tmp_path: Path) -> None:
    here, there = some_files(tmp_path / "a", "xx", "y"), some_files(tmp_path / "b", "xx", "y")

    assert describe_dataset(here) == describe_dataset(there)
    assert describe_dataset(here) == describe_dataset(Files([str(path) for path in there.files]))
    assert describe_dataset(here)["files"].startswith("2 files, ")


def test_files_of_another_name_size_order_or_number_are_other_data(tmp_path: Path) -> None:
    files = some_files(tmp_path / "a", "xx", "y").files
    others = [
        some_files(tmp_path / "b", "xx", "yy").files,
        [files[0], tmp_path / "c.txt"],
        files[::-1],
        [*files, files[0]],
        [files[0], tmp_path / "missing" / "1.txt"],
    ]

    assert all(describe_dataset(Files(files)) != describe_dataset(Files(other)) for other in others)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_subset_is_the_chosen_indices_of_something(kind: Any) -> None:
    data = list(range(10))
    described = describe_dataset(Subset(data, kind([1, 3, 5])))

    assert described["length"] == 3
    assert described["of"] == {"length": 10}
    assert described == describe_dataset(Subset(data, [1, 3, 5]))
    assert described != describe_dataset(Subset(data, [1, 3, 6]))
    assert described != describe_dataset(Subset(data, [3, 1, 5]))


def test_a_subset_of_a_range_an_empty_and_a_nested_subset_are_described() -> None:
    data = list(range(10))

    assert describe_dataset(Subset(data, range(3))) == describe_dataset(Subset(data, [0, 1, 2]))
    assert describe_dataset(Subset(data, []))["length"] == 0
    assert describe_dataset(Subset(Subset(data, [1, 2, 3]), [0]))["of"]["of"] == {"length": 10}


def test_a_concatenation_is_the_lengths_of_its_parts() -> None:
    parts = [[0] * 3, [0] * 7], [[0] * 7, [0] * 3]
    one, other = (describe_dataset(ConcatDataset(some)) for some in parts)

    assert one["length"] == other["length"] == 10
    assert one != other


def test_what_a_dataset_says_of_itself_is_made_plain_whatever_its_types() -> None:
    said = {
        "mean": np.float32(0.5),
        "count": np.int64(3),
        0: "int",
        "0": "text",
        "sizes": np.array([1, 2]),
        "names": {"b", "a"},
        "nested": {1: (Path("data"), None, np.bool_(False), float("nan"))},
    }
    plain = describe_dataset(Described(said))

    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "length": 5,
        "mean": 0.5,
        "count": 3,
        "int 0": "int",
        "0": "text",
        "sizes": [1, 2],
        "names": ["a", "b"],
        "nested": {"1": ["data", None, False, "nan"]},
    }
    assert describe_dataset(Described({"scores": np.arange(1000)})) != describe_dataset(
        Described({"scores": np.arange(1000) + 1})
    )


def test_of_an_object_in_a_description_only_the_type_is_compared_with_a_warning() -> None:
    with pytest.warns(StatefulWarning, match=r"dataset.describe\(\).reader\[0\] is a Files, of which"):
        assert describe_dataset(Described({"reader": [Files([])]})) == {"length": 5, "reader": ["a Files"]}


def test_a_hugging_face_dataset_is_its_columns_and_some_rows_past_any_transform() -> None:
    rows = datasets.Dataset.from_dict({"n": list(range(100)), "text": [str(n) for n in range(100)]})
    described = describe_dataset(rows)
    fails = describe_dataset(rows.with_transform(lambda batch: 1 / 0))
    again = describe_dataset(rows.map(lambda row: row, new_fingerprint="another"))

    assert {**described, "fingerprint": "another"} == again
    assert {key: described[key] for key in ("length", "columns", "rows")} == {
        key: fails[key] for key in ("length", "columns", "rows")
    }
    assert describe_dataset(rows.shuffle(seed=1))["rows"] != describe_dataset(rows.shuffle(seed=2))["rows"]
    assert describe_dataset(rows.rename_column("n", "m"))["columns"] != described["columns"]


def test_of_very_many_files_all_names_and_some_sizes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def note(path: Path) -> Any:
        read.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "stat", note)
    names = [f"/mount/{number}.jpg" for number in range(10_000)]
    described = describe_dataset(Files(names))["files"]

    assert len(read) == len(set(read)) <= 100
    names[5001] = "/mount/other.jpg"
    assert describe_dataset(Files(names))["files"] != described


@dataclass(frozen=True)
class Named:
    """Something with an id."""

    id: str
    text: str = ""


class Opaque:
    """An object of which nothing but the type can be told."""

    def __repr__(self) -> str:
        return "Opaque()"


@dataclass
class Window:
    """Fields, one of which is no part of the value."""

    start: int
    length: int = 3
    read: Any = dataclass_field(default=None, compare=False)


class Point:
    """Attributes, one of which is there once it is asked for, and another object."""

    def __init__(self, start: int) -> None:
        self.window = Window(start)

    @cached_property
    def end(self) -> int:
        return self.window.start + 3


class Slotted:
    """Slots, and a text that differs from process to process."""

    __slots__ = ("start",)

    def __init__(self, start: int) -> None:
        self.start = start

    def __repr__(self) -> str:
        return f"Slotted at {id(self)}"


class Split(Enum):
    """Members with objects as values."""

    TRAIN = object()
    VAL = object()


class Linked:
    """Leads back to itself, by two ways."""

    def __init__(self, number: int) -> None:
        self.number, self.other, self.others = number, self, [self, self]


def dict_of(one: Any) -> dict[str, Any]:
    """A dict with a value."""
    return {"key": one}


BY_VALUE: list[Callable[[int], Any]] = [
    *(lambda n: slice(n, n + 3), Window, Slotted, Point, Linked, np.float32, Decimal, complex),
    *(lambda n: Path(f"/data/{n}"), lambda n: date(2020, 1, n), lambda n: timedelta(n), lambda n: list(Split)[n - 1]),
    *(lambda n: np.array([(n, 2)], dtype=[("a", int), ("b", float)])[0], lambda n: np.datetime64(n, "D")),
    *(lambda n: partial(Window, n), lambda n: frozenset({f"a{n}", "b"})),
]
DIFFERENT: list[Any] = [
    *(0, 1, -1, 2**70, 1.5, "1", b"1", None),
    *([1], [1, 2], [2, 1], [12], [[1], 2], [[1, 2]], [[1], [2]], [], [[]]),
    *(["a", "b"], ["ab"], ["a;strb"], (1, "a"), ("a", 1)),
    *({"a": 1}, {"b": 1}, {"a": 2}),
    *(np.array([1, 3]), np.array([[1, 3]]), torch.tensor([0.5])),
    *(Named("x"), Named("y"), {Named("x"), Named("y")}, Opaque()),
    *(of(number) for number in (1, 2) for of in BY_VALUE),
    *(within(of(number)) for number in (1, 2) for of in BY_VALUE[:3] for within in (lambda one: ("a", one), dict_of)),
]


class TestDigest:
    def test_different_items_have_different_digests(self) -> None:
        assert len({digest(item) for item in DIFFERENT}) == len(DIFFERENT)

    @pytest.mark.parametrize(
        ("item", "same"),
        [
            ([1, 2], np.array([1, 2])),
            ([1, 2], torch.tensor([1, 2])),
            ((1, 2), [1, 2]),
            (range(1, 3), [1, 2]),
            (3, np.int32(3)),
            (Named("x", "one"), Named("x", "two")),
            (Opaque(), Opaque()),
            (Window(1), Window(1, read="since")),
            *((of(1), of(1)) for of in BY_VALUE),
        ],
    )
    def test_equal_indices_and_objects_of_equal_id_have_one_digest(self, item: Any, same: Any) -> None:
        assert digest(item) == digest(same)

    def test_what_was_asked_of_an_object_is_no_part_of_its_value(self) -> None:
        asked = Point(1)
        assert asked.end == 4

        assert digest(asked) == digest(Point(1))

    def test_types_of_which_nothing_is_compared_are_named(self) -> None:
        assert [types_not_compared(of(1)) for of in BY_VALUE] == [[]] * len(BY_VALUE)
        assert types_not_compared([1, (Opaque(), object()), Opaque()]) == ["Opaque", "object"]
        assert types_not_compared({"data": (1, TensorDataset(torch.zeros(2)))}) == ["TensorDataset"]
        assert types_not_compared(lambda: Opaque) == []

    def test_a_digest_depends_on_all_that_came_before(self) -> None:
        first = digest(1), digest(2)

        assert digest(3, first[0]) != digest(3, first[1])
        assert digest(3, first[0]) != digest(3)

    def test_digests_are_the_same_on_every_platform(self) -> None:
        assert (digest(3), digest([1, 2]), digest("a")) == ("50163cd4ae7e6fb1", "74f912167ab67550", "035081a1cd3e973d")
