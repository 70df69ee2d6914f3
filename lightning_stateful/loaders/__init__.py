"""DataLoaders that resume where the model was trained to."""

from lightning_stateful.generators.rng import keep_randomness, seed_randomness
from lightning_stateful.loaders.packed_dataset import PackedDataset, collate_flat
from lightning_stateful.loaders.patching import build_patched, is_patched, patch_dataloader
from lightning_stateful.loaders.planned_batches import SeededDataset
from lightning_stateful.loaders.stateful_loader import StatefulLoader

__all__ = [
    "PackedDataset",
    "SeededDataset",
    "StatefulLoader",
    "build_patched",
    "collate_flat",
    "is_patched",
    "keep_randomness",
    "patch_dataloader",
    "seed_randomness",
]
