"""Floor 0: pure arithmetic on positions. NumPy only; nothing here holds state or knows torch.

An *order* says which sample stands at which *slot* of an epoch. A *position* says how many slots of which epoch the
model has been trained on. A *step rule* cuts the rest of the epoch into steps and every step into one share a rank.
All three are frozen values, so where a run goes on is computed and never replayed. A *batch order* is an order whose
slots are whole batches, dealt out by a *slot plan*; a *mixture* of several sources is one,
*buckets* and *windows* of like lengths are others.
"""

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.core.topology import Topology, split_evenly
from lightning_stateful.index.blocks import BlockShuffledOrder
from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.draws import ReplacementOrder, SubsetOrder, WeightedOrder
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.mixture_order import MixtureOrder
from lightning_stateful.index.orders import Order, SequentialOrder, ShuffledOrder
from lightning_stateful.index.position import Position
from lightning_stateful.index.schedule import WeightSchedule
from lightning_stateful.index.slots import BatchOrder, SlotPlan
from lightning_stateful.index.sources import Sources
from lightning_stateful.index.window_order import WindowOrder
from lightning_stateful.index.windows import Windows

__all__ = [
    "BatchOrder",
    "BlockShuffledOrder",
    "BucketOrder",
    "Buckets",
    "Budget",
    "KeyedPermutation",
    "Mixture",
    "MixtureOrder",
    "Order",
    "Position",
    "QuadraticCost",
    "ReplacementOrder",
    "SequentialOrder",
    "ShuffledOrder",
    "SlotPlan",
    "Sources",
    "StepRule",
    "SubsetOrder",
    "Topology",
    "WeightSchedule",
    "WeightedOrder",
    "WindowOrder",
    "Windows",
    "derive_seed",
    "split_evenly",
]
