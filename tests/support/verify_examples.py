"""The data of the examples, small."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import mix_corpora
from byte_model import SourceBytes

from lightning_stateful import (
    MixtureDataModule,
    StatefulDataModule,
)

# The same in all processes of a test, in whichever it is written first.
FOLDER = Path(tempfile.gettempdir())


def train_bytes() -> StatefulDataModule:
    return StatefulDataModule(SourceBytes(90), val=SourceBytes(20, skip=90), batch_size=4, num_workers=1, seed=0)


def mixture() -> MixtureDataModule:
    return mix_corpora.corpora()
