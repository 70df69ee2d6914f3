"""Floor 2: DataLoaders that are a function of a position."""

from lightning_stateful.loaders.patched import is_patched
from lightning_stateful.loaders.seeded import SeededDataset
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.stream_loader import StreamLoader
from lightning_stateful.loaders.stream_options import StreamOptions
from lightning_stateful.loaders.takeover import patch_dataloader, take_over
from lightning_stateful.loaders.torch_samplers import order_of
from lightning_stateful.samplers.rng import keep_randomness, seed_randomness

__all__ = [
    "SeededDataset",
    "StatefulLoader",
    "StreamLoader",
    "StreamOptions",
    "is_patched",
    "keep_randomness",
    "order_of",
    "patch_dataloader",
    "seed_randomness",
    "take_over",
]
