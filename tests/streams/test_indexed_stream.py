"""Datasets with an index as streams: every sample once an epoch, and resumes that read next to nothing again."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams import IndexedStream

LENGTH = 1500
# A state of a shard's node is taken at the latest so many samples after the one before: two runs of 32 beside 256.
MOST_AGAIN = 256 + 2 * 32


class Asked:
    """Numbers with an index, which remembers what it was asked for."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def test_each_epoch_has_every_sample_once_in_an_order_of_the_whole_dataset() -> None:
    stream = IndexedStream(Asked(), seed=3)
    first, second = list(stream), list(stream)
    assert sorted(first) == sorted(second) == list(range(LENGTH))
    assert first != second
    # The first samples come from anywhere.
    assert max(first[:50]) - min(first[:50]) > LENGTH / 2
    assert list(IndexedStream(Asked(40), shuffle=False, shard_size=7)) == list(range(40))


@pytest.mark.parametrize("shard_size", [1000, 37])
def test_a_resume_goes_on_at_the_next_index(shard_size: int) -> None:
    whole = list(IndexedStream(Asked(), shard_size=shard_size, seed=3))
    stream = IndexedStream(Asked(), shard_size=shard_size, seed=3)
    samples = iter(stream)
    for at in range(0, LENGTH, 250):
        state = json.loads(json.dumps(stream.state_dict()))
        dataset = Asked()
        resumed = IndexedStream(dataset, shard_size=shard_size, seed=3)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[at:]
        assert len(dataset.asked) <= LENGTH - at + min(MOST_AGAIN, shard_size)
        assert list(islice(samples, 250)) == whole[at : at + 250]


@pytest.mark.parametrize("other", [{"a": 1}, {1, 2}, iter([1])])
def test_what_has_no_index_is_refused(other: Any) -> None:
    with pytest.raises(ConfigurationError, match="IndexedStream takes a dataset with __getitem__ and __len__"):
        IndexedStream(other)
