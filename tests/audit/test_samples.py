"""The samples of an item are read off integers and strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.audit import identities
from lightning_stateful.errors import ConfigurationError


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (3, [3]),
        (np.int64(3), [3]),
        ("a", ["a"]),
        (torch.tensor(4), [4]),
        (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]),
        (np.array([5, 6], dtype=np.uint8), [5, 6]),
        ([1, (2, "b"), torch.tensor([3])], [1, 2, "b", 3]),
        ([], []),
    ],
)
def test_integers_and_strings_are_flattened(item: Any, expected: list[Any]) -> None:
    assert identities(item) == expected


@pytest.mark.parametrize("item", [1.5, True, None, {"a": 1}, torch.ones(2), torch.tensor([True]), np.ones(2), [1, 2.5]])
def test_anything_else_asks_for_a_key(item: Any) -> None:
    with pytest.raises(ConfigurationError, match="Pass key="):
        identities(item)
