"""Documents with an index, data modules that pack them, and what their batches show."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_stateful import PackedDataModule, Packing
from support.stream_runs import document, of_sequences

NUM_DOCUMENTS, VAL_FIRST, NUM_VAL = 67, 500, 9
# Of the datasets of a mixture.
SIZES, FIRSTS = {"a": 11, "b": 40}, {"a": 0, "b": 100}
PACKINGS = {
    "split": Packing(12),
    "whole": Packing(12, how="whole", too_long="split"),
}


class Documents(Dataset[Any]):
    """Documents of up to 17 tokens, of which no other has any; a column is drawn."""

    def __init__(self, length: int = NUM_DOCUMENTS, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = document(self.first + index)
        return {**found, "weight": torch.rand(len(found["input_ids"]))}


def length_of(sample: dict[str, Any]) -> int:
    """Tokens of a document."""
    return len(sample["input_ids"])


def collated(sequences: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tokens of a batch but for padding, as ids of samples; the drawn column is a feature."""
    batch = of_sequences(sequences)
    drawn = np.concatenate([sequence["weight"][sequence["document_ids"] >= 0] for sequence in sequences])
    batch["x"][:, 3] = torch.from_numpy(drawn)
    return batch


def packed(name: str, num_documents: int = NUM_DOCUMENTS, **options: Any) -> PackedDataModule:
    """Batches of two packed sequences."""
    given: dict[str, Any] = {
        "train": Documents(num_documents),
        "val": Documents(NUM_VAL, VAL_FIRST),
        "lengths": length_of,
        "packing": PACKINGS[name],
        "batch_size": 2,
        "seed": 7,
        "collate_fn": collated,
    }
    return PackedDataModule(**{**given, **options})


def mixed(how: str = "split", **options: Any) -> PackedDataModule:
    """A mixture of two packed datasets, three sequences of the second to one of the first."""
    given: dict[str, Any] = {
        "train": {"a": (Documents(SIZES["a"]), length_of), "b": Documents(SIZES["b"], FIRSTS["b"])},
        "val": None,
        "lengths": {"b": [length_of(document(FIRSTS["b"] + number)) for number in range(SIZES["b"])]},
        "weights": {"a": 1, "b": 3},
        "packing": PACKINGS[how],
    }
    return packed("split", **{**given, **options})


def source_of(token: int) -> str:
    """The dataset of a mixture that a token is of."""
    return "b" if token >= document(FIRSTS["b"])["input_ids"][0] else "a"


def tokens_of(num_documents: int = NUM_DOCUMENTS, first: int = 0) -> list[int]:
    """All tokens of documents, sorted."""
    return sorted(token for number in range(num_documents) for token in document(first + number)["input_ids"])
