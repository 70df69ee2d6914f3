"""Orders, plans and progress: pure arithmetic with NumPy. Nothing here holds state or knows torch."""

from lightning_stateful.core.order import UNKNOWN, BatchOrder, EpochPlan, Progress
from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.samples import (
    BlockShuffledOrder,
    SampleBatchOrder,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
)
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule, Topology, split_evenly

__all__ = [
    "UNKNOWN",
    "BatchOrder",
    "BlockShuffledOrder",
    "EpochPlan",
    "KeyedPermutation",
    "Progress",
    "SampleBatchOrder",
    "SampleOrder",
    "SequentialOrder",
    "ShuffledOrder",
    "StepRule",
    "Topology",
    "derive_seed",
    "split_evenly",
]
