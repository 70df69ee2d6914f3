"""The data of the examples, small; files are in the folder that ``VERIFY_FOLDER`` names.

Each process imports what it needs alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
from byte_model import SourceBytes

from lightning_stateful import (
    BucketDataModule,
    ChunkedDataset,
    MixtureDataModule,
    Packing,
    StatefulDataModule,
    StreamDataModule,
)


def folder() -> Path:
    return Path(os.environ["VERIFY_FOLDER"])


def write_files() -> None:
    """All that the data are read from."""
    import pretrain_text
    import stream_text

    stream_text.write_shards(folder(), None, 4, 20)
    pretrain_text.write_documents(folder(), 4, 10)


def source_bytes() -> StatefulDataModule:
    return StatefulDataModule(SourceBytes(90), val=SourceBytes(20, skip=90), batch_size=4, num_workers=0, seed=0)


def mixed_corpora() -> MixtureDataModule:
    import mix_corpora

    mixed = mix_corpora.corpora()
    mixed.num_steps = 12
    return mixed


def bucketed_text() -> BucketDataModule:
    """As in ``bucket_text.py``, of words in place of tokens."""
    words = [torch.arange(1 + number * 7 % 60) for number in range(150)]
    pad = torch.nn.utils.rnn.pad_sequence
    return BucketDataModule(words, lengths=len, max_tokens=300, collate_fn=pad, seed=0)


def streamed_text() -> StreamDataModule:
    import stream_text

    shards = sorted(folder().glob("*.txt.gz"))
    lines = ChunkedDataset(shards, stream_text.read_lines, buffer_size=30, seed=0, transform=stream_text.as_bytes)
    return StreamDataModule(lines, batch_size=8, num_workers=0)


def numbers_of_lines(batch: Any) -> Any:
    return batch["index"]


def packed_text() -> StreamDataModule:
    import datasets
    import pretrain_text

    files = sorted(map(str, folder().glob("*.jsonl")))
    documents = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    tokenizer = pretrain_text.train_tokenizer(files)
    tokens = documents.map(
        pretrain_text.tokenize,
        batched=True,
        batch_size=16,
        remove_columns=["text", "document"],
        fn_kwargs={"tokenizer_json": tokenizer},
    )
    packing = Packing(128, separator=pretrain_text.END_OF_TEXT)
    return StreamDataModule(tokens, packing=packing, batch_size=4, num_workers=0, seed=0)
