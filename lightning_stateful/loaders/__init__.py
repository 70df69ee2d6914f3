"""Floor 2: DataLoaders that are a function of a position."""

from lightning_stateful.loaders.seeded import SeededDataset, keep_randomness, seed_randomness
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.takeover import take_over
from lightning_stateful.loaders.torch_samplers import order_of

__all__ = ["SeededDataset", "StatefulLoader", "keep_randomness", "order_of", "seed_randomness", "take_over"]
