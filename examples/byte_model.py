"""A byte-level language model on text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Sample = dict[str, Tensor]


class SourceBytes(Dataset[Sample]):
    """Windows of bytes from the standard library, each with its index.

    Args:
        num_samples: Windows to take.
        length: Bytes in a window; the model predicts each from those before it.
        skip: Windows to leave out at the beginning.
        pattern: Which files of the standard library.
    """

    def __init__(self, num_samples: int, length: int = 64, *, skip: int = 0, pattern: str = "*.py") -> None:
        self.num_samples = num_samples
        self.length = length
        needed = (skip + num_samples) * length
        text = b"".join(self._sources(needed, pattern))
        self.bytes = np.frombuffer(text, dtype=np.uint8)[skip * length : needed]

    @staticmethod
    def _sources(needed: int, pattern: str) -> list[bytes]:
        parts, size = [], 0
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern)):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size >= needed:
                return parts
        raise ValueError(f"The standard library has {size} bytes in {pattern}, but {needed} were asked for.")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        window = self.bytes[index * self.length : (index + 1) * self.length].astype(np.int64)
        return {"index": torch.tensor(index), "bytes": torch.from_numpy(window)}


class ByteModel(pl.LightningModule):
    """A small GRU with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte: ``(batch, length)`` -> ``(batch, length, 256)``."""
        return self.head(self.drop(self.gru(self.embed(text))[0]))

    def _loss(self, batch: Sample) -> Tensor:
        text = batch["bytes"]
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        """Log the loss of one batch."""
        self.log("val_loss", self._loss(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)
