"""DataLoaders that resume where the model was trained to."""

from lightning_stateful.loaders.batch_reader import SeededDataset
from lightning_stateful.loaders.patching import is_patched, patch_dataloader, take_over
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.samplers.rng import keep_randomness, seed_randomness

__all__ = [
    "SeededDataset",
    "StatefulLoader",
    "is_patched",
    "keep_randomness",
    "patch_dataloader",
    "seed_randomness",
    "take_over",
]
