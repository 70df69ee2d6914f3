"""Orders of batches from several datasets, in turn or in proportion: pure arithmetic with NumPy."""

from lightning_stateful.mixture.order import MixtureOrder
from lightning_stateful.mixture.sources import By, Sources, Stop
from lightning_stateful.mixture.weights import WeightSchedule

__all__ = ["By", "MixtureOrder", "Sources", "Stop", "WeightSchedule"]
