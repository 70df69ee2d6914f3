"""The part of a pass over an iterable dataset that a worker slot reads, and how torch's DataPipes are told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from lightning_stateful.core.seeding import mixed_seed
from lightning_stateful.stream_nodes.nodes import NodeState
from lightning_stateful.stream_nodes.own_state import has_state

# The state of a worker slot before it has read anything.
FRESH: NodeState = {
    "batches": 0,
    "item": 0,
    "exhausted": False,
    "over": False,
    "left_out": 0,
    "state": None,
    "since": 0,
    "first": None,
    "samples": None,
    "passes": [],
    "changes": False,
    "draws": False,
    "outside": {},
    "built": {},
    "begun": {},
    "left": {},
    "ended": None,
}


class IterableTask(NamedTuple):
    """The part of a pass that a worker slot is to read.

    Attributes:
        slot: Its number, ``worker * num_replicas + rank``; where ranks draw alike that of rank 0.
        worker: Which of its rank's workers it is.
        rank: Its rank.
        epoch: The pass.
        state: Where to begin; None for the beginning of the pass.
        is_here: Whether its dataset stands there already, so that the pass is just begun.
        waits: Whether its first turn is left out, because the batch that comes next is that of a later worker.
        share: ``worker * num_replicas + rank``, and how many such slots all ranks have.
        steps_before: 0: a pass is never divided anew.
        num_workers: Worker slots of a rank.
    """

    slot: int
    worker: int
    rank: int
    epoch: int
    state: NodeState | None = None
    is_here: bool = True
    waits: bool = False
    share: tuple[int, int] = (0, 1)
    steps_before: int = 0
    num_workers: int = 1


def begin_datapipe(dataset: Any, seed: int, epoch: int, share: tuple[int, int]) -> None:
    """Divide and seed one of torch's DataPipes before a pass, as DataLoader does; any other dataset is left alone.

    Its ``sharding_filter`` is told the share of the slot. Its shuffles are seeded alike on all ranks and workers, or
    these would take their shares of different orders.

    Args:
        dataset: The dataset of a DataLoader.
        seed: Chooses the orders, with the pass.
        epoch: The pass.
        share: See :attr:`IterableTask.share`.
    """
    if isinstance(dataset, IterDataPipe):
        number, count = share
        apply_sharding(dataset, count, number)
        apply_random_seed(dataset, torch.Generator().manual_seed(mixed_seed(seed, epoch) >> 1))


def name_of_dataset(dataset: Any) -> str:
    """The class of a dataset, without the wrapper that DataLoader puts around a DataPipe."""
    inner = getattr(dataset, "_datapipe", dataset) if isinstance(dataset, IterDataPipe) else dataset
    return type(inner).__qualname__


def is_told(dataset: Any) -> bool:
    """Whether ``set_epoch`` tells a dataset without a state which pass it begins."""
    return callable(getattr(dataset, "set_epoch", None)) and not has_state(dataset)
