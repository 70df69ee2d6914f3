"""Several datasets one after the other: their samples, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.mixtures import make_sources, mixture

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture import Sources


def take(sources: Sources, source: int, offsets: Any, seed: Any) -> list[int]:
    found = np.asarray(offsets, dtype=np.int64)
    return sources.take(np.full_like(found, source), found, np.ones_like(found), seed).tolist()


@pytest.mark.parametrize("seed", [None, ("mixture", 1, 2)])
def test_every_pass_has_each_sample_of_its_source_once(seed: Any) -> None:
    first, second = (take(make_sources([5, 3], 1), source, range(10), seed) for source in (0, 1))
    assert [sorted(first[:5]), sorted(first[5:])] == [[0, 1, 2, 3, 4]] * 2
    assert [sorted(second[:3]), sorted(second[3:6])] == [[5, 6, 7]] * 2


def test_a_source_keeps_its_order_when_others_come_and_go() -> None:
    alone, both = Sources(("b",), (40,), (1,)), Sources(("a", "b"), (7, 40), (1, 1))
    assert [index - 7 for index in take(both, 1, range(80), (3,))] == take(alone, 0, range(80), (3,))


@pytest.mark.parametrize(
    ("lengths", "sizes", "message"),
    [
        ([], [], "There are no sources"),
        ([3, 0], [1, 1], "Source 'b' is empty"),
        ([3, 4.5], [1, 1], "The length of source 'b' must be an integer"),
        ([3, 4], [1, 0], "The batch size of source 'b' must be at least 1"),
        ([3, 2**40 + 1], [1, 1], r"must have 1 to 2"),
    ],
)
def test_illegal_sources_are_refused_by_name(lengths: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_sources(lengths, sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "longest"}, "stop must be one of"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"drop_last": True}, "Source 'b' has 3 samples, fewer than a batch of 4"),
    ],
)
def test_contradicting_values_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mixture([9, 3], 4, **options)


def test_by_sample_a_source_may_be_smaller_than_a_batch_that_is_dropped() -> None:
    assert mixture([9, 3], 4, by="sample", drop_last=True).plan(0, 1).num_steps == 3
