"""Items are shuffled in blocks: the same ones from every state, none stored, none moved further than a block."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.node_cases import ListNode, NumberedShards, assert_resumes, started

from lightning_stateful.errors import ConfigurationError, PositionError, ShardError
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import ShardReader


def shuffled(length: int = 55, size: int = 8, seed: int = 0, asked: Counter[str] | None = None) -> BlockShuffle[int]:
    return BlockShuffle(ListNode(range(length), asked), size, seed=seed)


def over_shards(size: int, on_error: Any = "raise", **options: Any) -> BlockShuffle[Any]:
    reader = ShardReader(NumberedShards([7, 0, 12, 30], **options), (3, 0, 1, 2), 0, on_error=on_error)
    return BlockShuffle(reader, size, seed=0)


@pytest.mark.parametrize("size", [1, 8, 55, 1000])
def test_it_resumes_at_every_item(size: int) -> None:
    items = assert_resumes(lambda: shuffled(size=size))
    blocks = [sorted(items[first : first + size]) for first in range(0, 55, size)]
    assert blocks == [list(range(first, min(first + size, 55))) for first in range(0, 55, size)]
    assert (items == list(range(55))) == (size == 1)


@pytest.mark.parametrize("size", [2, 8, 60])
@pytest.mark.parametrize("state_size", [None, 0])
def test_blocks_span_shards(size: int, state_size: int | None) -> None:
    items = assert_resumes(lambda: over_shards(size, state_size=state_size))
    assert len(items) == len(set(items)) == 49


def test_blocks_are_in_orders_of_their_own_by_seed_and_number() -> None:
    blocks = np.array(list(shuffled(800))).reshape(-1, 8) % 8
    assert len({tuple(block) for block in blocks.tolist()}) > 95
    # Each place of a block is taken by each of its items about as often.
    assert max(np.bincount(column, minlength=8).max() for column in blocks.T) < 30
    assert len({str(list(shuffled(seed=seed))) for seed in range(5)}) == 5


def test_the_order_is_always_this_one() -> None:
    # In another one, a state that was taken within a block would be worth nothing.
    assert list(shuffled(14, 6, seed=5)) == [2, 3, 4, 5, 1, 0, 6, 10, 8, 9, 11, 7, 12, 13]


def test_going_on_reads_one_block_again_and_between_blocks_nothing() -> None:
    node = started(shuffled(400, 50))
    for skipped, again in ((333, 50), (17, 0)):
        node.skip(skipped)
        asked: Counter[str] = Counter()
        started(shuffled(400, 50, asked=asked), node.state_dict())
        assert (asked["read"], asked["skipped"]) == (again, 0)


def test_a_block_that_was_begun_keeps_the_size_that_it_had() -> None:
    node = started(shuffled(40, 10))
    begun = node.next_many(13)
    rest = list(started(shuffled(40, 4), node.state_dict()))
    assert begun + rest[:7] == list(shuffled(40, 10))[:20]
    assert [sorted(rest[first : first + 4]) for first in range(7, 27, 4)] == [
        list(range(first, first + 4)) for first in range(20, 40, 4)
    ]


def test_a_block_keeps_its_size_over_several_resumes() -> None:
    node = started(shuffled(size=8))
    node.skip(3)
    state = node.state_dict()
    for size in (20, 30):
        state = started(shuffled(size=size), state).state_dict()
    rest = list(started(shuffled(size=8), state))
    assert rest == list(shuffled(size=8))[3:]


@pytest.mark.parametrize("state_size", [None, 0])
@pytest.mark.parametrize("size", [7, 60])
def test_shards_left_out_count_once_and_keep_what_came_before(size: int, state_size: int | None) -> None:
    options: dict[str, Any] = {"on_error": "skip", "fails": {3: 20, 2: 0, 0: -1}, "state_size": state_size}
    assert len(assert_resumes(lambda: over_shards(size, **options))) == 20
    node = started(over_shards(size, **options))
    for _ in range(20):
        next(node)
        node = started(over_shards(size, **options), node.state_dict())
    assert next(node, None) is None
    assert node.state_dict()["source"]["skipped_shards"] == 3


@pytest.mark.parametrize("fail", [0, 19])
def test_an_error_within_a_block_is_met_before_any_of_its_items(fail: int) -> None:
    node = started(over_shards(10, fails={3: fail}))
    taken = node.next_many(fail // 10 * 10)
    state = json.dumps(node.state_dict())
    with pytest.raises(ShardError, match=f"at its sample {fail}"):
        next(node)
    assert taken + list(started(over_shards(10), json.loads(state))) == list(over_shards(10))


@pytest.mark.parametrize("now", [20, 25])
def test_a_source_that_became_shorter_within_a_block_is_refused(now: int) -> None:
    node = started(shuffled(30, 10))
    node.skip(26)
    with pytest.raises(PositionError, match=f"6 of 10 items of a block were used, and now it has {now - 20}.*seed"):
        started(shuffled(now, 10), node.state_dict())


@pytest.mark.parametrize(("wrong", "said"), [({"size": 0}, "size must be at least 1"), ({"seed": 0.5}, "seed must be")])
def test_wrong_arguments_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        shuffled(**wrong)
