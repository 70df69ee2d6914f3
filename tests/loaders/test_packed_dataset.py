"""A dataset of packed sequences, in torch's loader and ours, and the errors of documents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packing_cases import APART, documents, real
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_stateful import PackedDataset, Packing, StatefulLoader
from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.loaders import collate_flat

DOCUMENTS = documents(random.Random(5), 60, 40)
LENGTHS = [len(document) for document in DOCUMENTS]
PACKINGS = {
    "split": Packing(32),
    "separated": Packing(32, separator=999),
    "whole": Packing(32, how="whole", too_long="split", padding=3),
}
TOKENS = sorted(token for document in DOCUMENTS for token in document)


def packed(packing: Any = PACKINGS["split"], given: Any = DOCUMENTS, **options: Any) -> PackedDataset:
    return PackedDataset(given, **{"lengths": LENGTHS, "packing": packing, "seed": 2, **options})


def alike(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", PACKINGS)
def test_an_epoch_has_every_token_once_and_sequences_what_their_documents_have(name: str) -> None:
    data = packed(PACKINGS[name])
    for epoch in (0, 1):
        data.set_epoch(epoch)
        found = list(data)
        assert len(found) == len(data)
        assert [token for token in real(found) if token != 999] == TOKENS
        for index, sequence in enumerate(found):
            assert {column.shape for column in sequence.values()} == {(32,)}
            is_real = sequence["document_ids"] >= 0
            tokens = sequence["input_ids"]
            assert set(tokens[~is_real].tolist()) <= {3 if name == "whole" else 0}
            parts = data.parts(index)
            expected = [([*DOCUMENTS[part.document], 999])[part.first : part.end] for part in parts]
            assert tokens[is_real].tolist() == [token for part in expected for token in part]
            assert sequence["document_ids"][is_real].tolist() == [n for n, part in enumerate(expected) for _ in part]
            assert sequence["position_ids"][is_real].tolist() == [at for part in expected for at in range(len(part))]


def test_an_index_names_its_epoch_or_is_of_the_one_that_was_told() -> None:
    data, told = packed(), packed()
    told.set_epoch(3)
    for index in (0, 4, len(data) - 1):
        assert alike(told[index], data[3 * len(data) + index])
        assert alike(told[2 * len(data) + index], data[2 * len(data) + index])
        assert not alike(data[index], told[index])
    # Those of several epochs in one batch, too.
    indices = [3, 2 * len(data) - 1, 2 * len(data), 3 * len(data) + 4, 3]
    for one, index in zip(told.__getitems__(indices), indices, strict=True):
        assert alike(one, told[index])
        assert alike(one, data[index + 3 * len(data) * (index < len(data))])
    for wrong in (data.__getitem__, data.parts, lambda index: data.__getitems__([2, index])):
        with pytest.raises(IndexError, match="-1"):
            wrong(-1)


class Drawing(Dataset[Any]):
    """Documents that count how often they are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(DOCUMENTS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"input_ids": torch.tensor(DOCUMENTS[index]), "loss_mask": [1.0] * LENGTHS[index], "name": str(index)}


def test_a_document_is_read_once_a_batch_and_nothing_is_kept_between_batches() -> None:
    given = Drawing()
    data = packed(given=given)
    batch = data.__getitems__(list(range(len(data))))
    assert sorted(given.read) == list(range(len(DOCUMENTS)))
    assert batch[0]["loss_mask"].dtype == np.float64
    assert "name" not in batch[0]
    data[0]
    first = len(given.read)
    data[0]
    assert given.read[first:] == given.read[len(DOCUMENTS) : first]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_and_ours_read_it(num_workers: int) -> None:
    data = packed()
    theirs = DataLoader(data, batch_size=4, num_workers=num_workers)
    data.set_epoch(1)
    ours = StatefulLoader(packed(), sampler=data.order, batch_size=4, num_workers=num_workers)
    ours.set_epoch(1)
    batches = list(theirs)
    assert batches[0]["input_ids"].shape == (4, 32)
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(batches, ours, strict=True))


def test_the_flat_form_has_the_bounds_of_documents_and_no_padding() -> None:
    data = packed(PACKINGS["whole"])
    sequences = [data[index] for index in range(5)]
    flat = collate_flat(sequences)
    sizes = [part.end - part.first for index in range(5) for part in data.parts(index)]
    assert flat["cu_seqlens"].dtype == torch.int32
    assert flat["cu_seqlens"].tolist() == np.cumsum([0, *sizes]).tolist()
    assert flat["max_seqlen"] == max(sizes)
    stacked = default_collate(sequences)
    is_real = stacked["document_ids"] >= 0
    assert torch.equal(flat["input_ids"], stacked["input_ids"][is_real])
    assert torch.equal(flat["position_ids"], stacked["position_ids"][is_real])
    # Sequences stay as they are, and what stands before one is no text that goes on in it.
    split = [packed()[index] for index in range(3)]
    starts = [0, 32, 64]
    labels = collate_flat(split)["labels"]
    assert [at for at, label in enumerate(labels.tolist()) if label == -100] == starts
    assert all((sequence["labels"] != -100).all() for sequence in split)


def test_a_state_refuses_other_settings_lengths_or_documents_by_name() -> None:
    def loader(data: PackedDataset) -> StatefulLoader:
        return StatefulLoader(data, sampler=data.order, batch_size=2)

    state = loader(packed()).state_dict()
    others = {
        "packing.separator": packed(PACKINGS["separated"]),
        "lengths": packed(lengths=[*LENGTHS[1:], LENGTHS[0]]),
        "seed": packed(seed=3),
        "of.length": packed(given=[*DOCUMENTS, [1]], lengths=[*LENGTHS, 1]),
    }
    for name, other in others.items():
        with pytest.raises(StateMismatchError, match=name):
            loader(other).load_state_dict(state)


class Endless(IterableDataset[Any]):
    """Has no index."""

    def __iter__(self) -> Any:
        return iter(DOCUMENTS)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Endless has not"):
        packed(given=Endless())
    with pytest.raises(ConfigurationError, match="Document 1 has no tokens"):
        PackedDataset([[1], [], [2]], lengths=[1, 0, 1], packing=Packing(4))
    with pytest.raises(ConfigurationError, match="empty"):
        PackedDataset([], lengths=[], packing=Packing(4))
    with pytest.raises(ConfigurationError, match="All 2 documents are longer"):
        PackedDataset([[1] * 5] * 2, lengths=[5, 5], packing=Packing(4, how="whole", too_long="drop"))
    with pytest.raises(ConfigurationError, match="2 lengths for the 3 samples"):
        PackedDataset([[1]] * 3, lengths=[1, 1], packing=Packing(4))
    wrong = PackedDataset([[1], [1, 2], [3]], lengths=[1, 1, 1], packing=Packing(3), shuffle=False)
    with pytest.raises(ConfigurationError, match="Document 1 has 2 tokens, and lengths say 1"):
        wrong[0]
    with pytest.raises(ConfigurationError, match="input_ids of document 0 must be integers, got float64"):
        PackedDataset([[1.5]], lengths=[1], packing=Packing(3))[0]
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.uint8))
    for lengths in (tmp_path / "lengths.npy", len):
        assert alike(packed(lengths=lengths)[5], packed()[5])
    assert max(LENGTHS) < APART
