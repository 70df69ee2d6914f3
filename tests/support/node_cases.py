"""Nodes and shards of numbered samples, which count what is asked of them, and what every node has to obey."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode

from lightning_stateful.stream_nodes import nodes
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode

Make = Callable[[], BaseNode[Any]]


class ListNode(StreamNode[Any]):
    """Items of a list, with an honest state and a count of what is asked of it."""

    def __init__(self, items: Sequence[Any], asked: Counter[str] | None = None) -> None:
        super().__init__()
        self.items, self.asked, self.at = items, Counter[str]() if asked is None else asked, 0

    def reset(self, initial_state: NodeState | None = None) -> None:
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["next"]

    def next(self) -> Any:
        if self.at >= len(self.items):
            raise StopIteration
        self.asked["read"] += 1
        self.at += 1
        return self.items[self.at - 1]

    def skip(self, number: int) -> int:
        skipped = min(number, len(self.items) - self.at)
        self.asked["skipped"] += skipped
        self.at += skipped
        return skipped

    def get_state(self) -> NodeState:
        self.asked["states"] += 1
        return {"next": self.at}

    def close(self) -> None:
        self.asked["closed"] += 1


class NumberedShards(Shards):
    """Shards whose samples are ``(epoch, shard, number)``, and a count of what is asked of them.

    Args:
        sizes: Samples of each shard.
        label: Comes first in every sample, and in names, if there is one.
        knows_sizes: Whether they say how many samples each shard has.
        state_size: Characters in the state of a shard's node; None if it has none.
        fails: At which sample a shard breaks off; -1 if it cannot be opened.
        draws: Whether samples come with numbers drawn from the three generators that all code shares.
        asked: Counts opens, closes, states, and samples read.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        label: str = "",
        knows_sizes: bool = False,
        state_size: int | None = None,
        fails: dict[int, int] | None = None,
        draws: bool = False,
        asked: Counter[str] | None = None,
    ) -> None:
        self.label, self.knows_sizes = label, knows_sizes
        self.counts, self.state_size, self.fails, self.draws = (
            list(sizes),
            state_size,
            {} if fails is None else fails,
            draws,
        )
        self.asked = Counter[str]() if asked is None else asked

    @property
    def num_shards(self) -> int:
        return len(self.counts)

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        return _NumbersNode(self, shard, epoch)

    def name(self, shard: int) -> str:
        return f"{self.label or 'shard'}-{shard}.bin"

    def describe(self) -> dict[str, Any]:
        return {"shards": len(self.counts)}

    def sizes(self) -> list[int] | None:
        return self.counts if self.knows_sizes else None

    def all(self, epoch: int) -> list[Any]:
        """All samples of a pass."""
        return [self.sample(epoch, shard, number) for shard, size in enumerate(self.counts) for number in range(size)]

    def sample(self, epoch: int, shard: int, number: int) -> tuple[Any, ...]:
        """One sample."""
        return (self.label, epoch, shard, number) if self.label else (epoch, shard, number)


class _NumbersNode(BaseNode[Any]):
    def __init__(self, shards: NumberedShards, shard: int, epoch: int) -> None:
        super().__init__()
        self.shards, self.shard, self.epoch, self.at = shards, shard, epoch, 0

    def reset(self, initial_state: NodeState | None = None) -> None:
        super().reset(initial_state)
        if self.shards.fails.get(self.shard) == -1:
            raise FileNotFoundError(f"no shard {self.shard}")
        self.shards.asked["opened"] += 1
        self.at = 0 if initial_state is None else initial_state["next"]

    def next(self) -> Any:
        if self.at == self.shards.fails.get(self.shard):
            raise OSError(f"bad block {self.at}")
        if self.at >= self.shards.counts[self.shard]:
            raise StopIteration
        self.shards.asked["read"] += 1
        self.at += 1
        sample = self.shards.sample(self.epoch, self.shard, self.at - 1)
        return (*sample, *drawn()) if self.shards.draws else sample

    def get_state(self) -> Any:
        self.shards.asked["states"] += 1
        return None if self.shards.state_size is None else {"next": self.at, "padding": "." * self.shards.state_size}


def drawn() -> tuple[int, int, int]:
    """A number of each of the generators that all code shares."""
    return random.randrange(10**9), int(np.random.randint(10**9)), int(torch.randint(10**9, ()))


def noisy(value: Any) -> tuple[Any, ...]:
    """A value as a number, and numbers drawn beside it."""
    return mixed(value), *drawn()


def mixed(value: Any) -> int:
    """A number that follows from what a value looks like."""
    return zlib.crc32(repr(value).encode())


def is_kept(value: Any) -> bool:
    """True for two of three values."""
    return mixed(value) % 3 > 0


def scan(state: int, value: Any) -> tuple[int, int]:
    """A running number that depends on all values before."""
    return mixed((state, value)), mixed((value, state))


def started(node: BaseNode[Any], state: NodeState | None = None) -> Any:
    """A node that has been reset."""
    nodes.reset_to(node, state)
    return node


def assert_resumes(make: Make, *, histories: int = 3, repeats: bool = True) -> list[Any]:
    """A fresh node goes on at every item from a state as JSON, whatever was asked before; returns all items.

    Args:
        make: Makes the node.
        histories: How many random sequences of calls lead to the same items; 0 where items that are asked for together
            are others than those asked for one by one.
        repeats: Whether a reset without a state leads to the same items again.
    """
    whole, node, states = list(make()), started(make()), []
    for number in range(len(whole) + 1):
        state = nodes.state_of(node)
        saved = json.dumps(state)
        states.append((state, saved))
        loaded = json.loads(saved)
        fresh = started(make(), loaded)
        assert list(fresh) == whole[number:]
        assert json.dumps(loaded) == saved
        if number < len(whole):
            assert next(node) == whole[number]
    for _ in range(2):
        assert next(node, None) is None
    assert all(json.dumps(state) == saved for state, saved in states)
    if repeats:
        node.reset()
        assert list(node) == whole
    rng = random.Random(len(whole))
    for _ in range(histories):
        _assert_any_history_gives_the_same(make, whole, rng)
    return whole


def _assert_any_history_gives_the_same(make: Make, whole: list[Any], rng: random.Random) -> None:
    node, number = started(make()), 0
    weights = [rng.random() for _ in range(4)]
    while number < len(whole):
        call = rng.choices(["state", "resume", "skip", "next_many"], weights)[0]
        count = rng.choice([0, 1, 1, 1, 2, 5, 30])
        left = min(count, len(whole) - number)
        if call == "state":
            nodes.state_of(node)
        elif call == "resume":
            node = started(make(), json.loads(json.dumps(nodes.state_of(node))))
        elif call == "skip":
            assert nodes.skip(node, count) == left
            number += left
        else:
            assert nodes.next_many(node, count) == whole[number : number + count]
            number += left
    with pytest.raises(StopIteration):
        next(node)
