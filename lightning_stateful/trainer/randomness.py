"""The model's randomness as a function of (seed, data-parallel rank, epoch, batch in the epoch)."""

from __future__ import annotations

import random

import numpy as np
import torch

from lightning_stateful.core.seeding import derive_seed


def seed_model(seed: int, rank: int, stage: str, epoch: int, batch: int) -> None:
    """Seed torch on every device, NumPy and ``random`` for what happens from this batch to the next."""
    derived = derive_seed("model", seed, rank, stage, epoch, batch)
    torch.manual_seed(derived)
    np.random.seed(derived & 0xFFFFFFFF)
    random.seed(derived)
