"""Shuffles a stream in blocks, which are read again on a resume and never saved."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import PositionError
from lightning_stateful.streams.nodes import NodeState, StreamNode, next_many, reset_to, state_of

T = TypeVar("T")


class BlockShuffle(StreamNode[T]):
    """Shuffles consecutive blocks of items, each in an order of its own.

    An item moves by less than the size of a block. The order follows from the seed and the number of the block.

    Args:
        source: What is shuffled.
        size: Items of a block; the last may have fewer. A block that was begun keeps the size that it had.
        seed: Chooses the orders.

    State:
        ``source``, its state where the block begins; ``block``, the number of the block; ``served``, how many of its
        items have been given; ``size``, how many it has at most.

    Raises:
        ConfigurationError: ``size`` or ``seed`` is no integer, or ``size`` is below 1.
        PositionError: A block that was begun has fewer items than were given of it.
    """

    context: ClassVar[tuple[str, ...]] = ("seed",)

    def __init__(self, source: BaseNode[T], size: int, *, seed: int) -> None:
        super().__init__()
        self.source = source
        self._size, self._seed = as_int("size", size, least=1), as_int("seed", seed)

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or read the block again in which a state was taken."""
        super().reset(initial_state)
        reset_to(self.source, None if initial_state is None else initial_state["source"])
        # The number of the next block; the items of this one as they are given, and how many of them have been.
        self._next_block: int = 0 if initial_state is None else initial_state["block"]
        self._items: list[T] = []
        self._served = 0
        if initial_state is not None and initial_state["served"]:
            self._read_block(initial_state["size"])
            self._served = initial_state["served"]
            if self._served > len(self._items):
                raise PositionError(
                    f"{self._served} items of a shuffled block were used, but now it has {len(self._items)}. Read the "
                    "same data, or resume from another checkpoint."
                )

    def next(self) -> T:
        """The next item."""
        if self._served == len(self._items) and not self._read_block(self._size):
            raise StopIteration
        self._served += 1
        return self._items[self._served - 1]

    def next_many(self, number: int) -> list[T]:
        """The next items, up to ``number``."""
        items: list[T] = []
        while len(items) < number and (self._served < len(self._items) or self._read_block(self._size)):
            stop = self._served + number - len(items)
            items += self._items[self._served : stop]
            self._served = min(stop, len(self._items))
        return items

    def get_state(self) -> NodeState:
        """Where the block begins, and how many of its items have been given."""
        if self._served == len(self._items):
            return {"source": state_of(self.source), "block": self._next_block, "served": 0, "size": self._size}
        block = {"block": self._next_block - 1, "served": self._served, "size": self._block_size}
        return {"source": self._block_state, **block}

    def _read_block(self, size: int) -> bool:
        """Read and shuffle the next block; False if there is none."""
        self._block_state: Any = state_of(self.source)
        items: list[T] = next_many(self.source, size)
        order = KeyedPermutation(len(items), derive_seed("block", self._seed, self._next_block))
        self._items = [items[number] for number in order.take(np.arange(len(items))).tolist()] if items else []
        self._served, self._block_size = 0, size
        self._next_block += bool(items)
        return bool(items)
