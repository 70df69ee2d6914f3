"""Items are compared by structure, and the answer says where they differ."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.audit import difference, identities
from lightning_stateful.errors import ConfigurationError


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@dataclasses.dataclass
class Pair:
    image: Any
    label: Any


Named = namedtuple("Named", "image label")


def nested() -> dict[str, Any]:
    return {
        "image": torch.arange(6.0).reshape(2, 3),
        "mask": np.array([[True, False]]),
        "boxes": [(1, 2), (3, 4)],
        "text": "a",
        "none": None,
        "plain": Plain(x=1, y=[torch.ones(2)]),
        "named": Named(1, torch.zeros(1)),
        "set": {1, 2},
        "nan": float("nan"),
        "bytes": b"x",
        "half": torch.ones(2, dtype=torch.bfloat16),
        "objects": np.array([{"a": 1}, "b"], dtype=object),
    }


def test_equal_nested_items_have_no_difference() -> None:
    assert difference(nested(), nested()) == ""


@pytest.mark.parametrize(
    ("expected", "got", "where"),
    [
        (1, 1.0, "item: expected 1, got 1.0"),
        ([1, 2], (1, 2), "item: expected [1, 2], got (1, 2)"),
        ([1, 2], [1], "item has 1 elements, expected 2: [1], not [1, 2]"),
        ({"a": {"b": [0]}}, {"a": {"b": [1]}}, "item['a']['b'][0]: expected 0, got 1"),
        ({"a": 1}, OrderedDict(a=1), "item: expected {'a': 1}, got OrderedDict"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "item[1]: expected 2, got 3"),
        (torch.tensor([1]), torch.tensor([1.0]), "item is (1,) of torch.float32, expected (1,) of torch.int64"),
        (torch.zeros(2), torch.zeros(1, 2), "item is (1, 2) of torch.float32, expected (2,)"),
        (np.array([{"a": 1}]), np.array([{"a": 2}]), "item[0]['a']: expected 1, got 2"),
        (Plain(x=[1]), Plain(x=[2]), "item.x[0]: expected 1, got 2"),
        (Pair(1, 2), Pair(1, 3), "item.label: expected 2, got 3"),
        (Named(1, [2]), Named(1, [3]), "item[1][0]: expected 2, got 3"),
        (float("nan"), 0.0, "item: expected nan, got 0.0"),
    ],
)
def test_the_first_difference_is_named_with_its_path(expected: Any, got: Any, where: str) -> None:
    assert difference(expected, got).startswith(where)


def test_objects_that_contain_themselves_are_compared() -> None:
    one, other = Plain(x=1), Plain(x=1)
    one.__dict__["me"], other.__dict__["me"] = one, other

    assert difference(one, other) == ""
    other.__dict__["x"] = 2
    assert difference(one, other) == "item.x: expected 1, got 2"


def test_objects_that_compare_element_by_element_are_compared_as_arrays() -> None:
    class Table:
        def __init__(self, *values: int) -> None:
            self.values = np.array(values)

        def __eq__(self, other: object) -> Any:
            return self.values == other.values if isinstance(other, Table) else NotImplemented

        def __hash__(self) -> int:
            return 0

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self.values

    assert difference(Table(1, 2), Table(1, 2)) == ""
    assert difference(Table(1, 2), Table(1, 3)) == "item[1]: expected 2, got 3"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (3, [3]),
        ("a", ["a"]),
        (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]),
        (np.array([5, 6], dtype=np.uint8), [5, 6]),
        ([1, (2, "b"), torch.tensor([3])], [1, 2, "b", 3]),
    ],
)
def test_integers_and_strings_are_flattened(item: Any, expected: list[Any]) -> None:
    assert identities(item) == expected


@pytest.mark.parametrize("item", [1.5, True, {"a": 1}, torch.ones(2), torch.tensor([True]), [1, 2.5]])
def test_anything_else_asks_for_a_key(item: Any) -> None:
    with pytest.raises(ConfigurationError, match="Pass key="):
        identities(item)
