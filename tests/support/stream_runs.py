"""Streams of every kind as trainers are given them, and what is known of their samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed
from torch.utils.data import default_collate

from lightning_stateful import ChunkedDataset, MixedStream, StreamDataModule
from lightning_stateful.bucketing import Budget
from lightning_stateful.packing import Packing
from support import hf_streams
from support.stream_cases import Divided
from support.stream_cases import chunks as chunks_of_numbers

# Samples of nine shards; two lanes and three have unequal shares of them.
SIZES = (3, 2, 4, 1, 3, 2, 2, 1, 3)
OTHER_SIZES = (2, 1, 3, 2, 2, 1)
VAL_SIZES = (2, 1, 3)
OTHER_FIRST, VAL_FIRST = 100, 500
EVERY_SAMPLE = list(range(sum(SIZES)))
OF_OTHERS = list(range(OTHER_FIRST, OTHER_FIRST + sum(OTHER_SIZES)))
VAL_SAMPLES = list(range(VAL_FIRST, VAL_FIRST + sum(VAL_SIZES)))
FILES = ("parquet", "arrow", "json", "text")


def sample(number: int) -> dict[str, torch.Tensor]:
    """A sample that draws one augmentation."""
    return {"id": torch.tensor(number), "x": torch.rand(4) + number / 100}


def plain_sample(number: int) -> dict[str, torch.Tensor]:
    """A sample that draws nothing."""
    return {"id": torch.tensor(number), "x": torch.full((4,), number / 100)}


def length_of(found: dict[str, torch.Tensor]) -> int:
    """The number of tokens of a sample."""
    return 1 + int(found["id"]) ** 2 * 7 % 9


def chunks(sizes: tuple[int, ...] = SIZES, first: int = 0, **options: Any) -> ChunkedDataset:
    """Chunks of numbers, shuffled in small blocks, of which samples are made."""
    return chunks_of_numbers(sizes, first, **{"transform": sample, **options})


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    """A sample of a row of any file; it draws."""
    number = row["n"] if "n" in row else int(row["text"].split()[1])
    return {"id": number, "x": [random.random() + number / 100 for _ in range(4)]}


def of_rows(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Samples of many rows; nothing is drawn."""
    return {"id": batch["n"], "x": [[number / 100] * 4 for number in batch["n"]]}


def is_kept(row: dict[str, Any]) -> bool:
    """Four samples of five."""
    return bool(row["n"] % 5 != 1)


def document(number: int) -> dict[str, list[int]]:
    """A document of up to 17 tokens, of which no other has any."""
    return {"input_ids": [number * 100 + token for token in range(1 + number**2 * 7 % 17)]}


def of_documents(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Documents of many rows, as people tokenize."""
    return {"input_ids": [document(number)["input_ids"] for number in batch["n"]]}


def tokens_in(numbers: Iterable[int]) -> list[int]:
    """All tokens of some documents, sorted."""
    return sorted(token for number in numbers for token in document(number)["input_ids"])


def of_sequences(sequences: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tokens of a batch but for padding, as ids of samples, and all that sequences have of them, as features."""
    batch = default_collate(sequences)
    is_real = batch["document_ids"] >= 0
    columns = [batch[name][is_real] for name in ("input_ids", "position_ids", "document_ids", "labels")]
    return {"id": columns[0], "x": torch.stack(columns, -1) / 1000}


def packed(how: str, train_on: Any, **options: Any) -> StreamDataModule:
    """Batches of two packed sequences."""
    more: dict[str, Any] = {"too_long": "split", "open_sequences": 3} if how == "whole" else {}
    val = chunks(VAL_SIZES, VAL_FIRST, transform=document)
    given = {"val": val, "packing": Packing(12, how=how, **more), "collate_fn": of_sequences, **options}  # type: ignore[arg-type]
    return module(train_on, **given)


def write_files(folder: Path) -> None:
    """Files of every kind for :func:`files_of`."""
    for kind in FILES:
        hf_streams.stream(kind, folder, SIZES)
    hf_streams.stream("json", folder, OTHER_SIZES, first=OTHER_FIRST, name="other")
    hf_streams.stream("parquet", folder, VAL_SIZES, first=VAL_FIRST, name="val")


def files_of(kind: str, folder: Path, name: str = "part") -> Any:
    """A stream over files that are there."""
    suffix = {"json": "jsonl", "text": "txt.gz"}.get(kind, kind)
    files = sorted(map(str, folder.glob(f"{name}*.{suffix}")))
    # Without a folder of its own every process writes into the one of the user.
    options = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    return datasets.load_dataset(kind, data_files=files, **options)


def mapped(dataset: Any) -> Any:
    """A pipeline of Hugging Face's that gives samples."""
    columns = dataset.column_names or ["text"]
    return dataset.map(of_row, remove_columns=columns).with_format("torch")


class Own(Divided):
    """Divides itself among ranks and workers, and draws at every sample."""

    def __init__(self, length: int = len(EVERY_SAMPLE)) -> None:
        super().__init__(length)

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.share())


class OwnWithState(Own):
    """The same, with the protocol of torchdata, of whose state it counts how often it is taken."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.share()
        while self.position < len(numbers):
            self.position += 1
            yield sample(numbers[self.position - 1])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.position, "about": torch.arange(self.length)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["about"], torch.arange(self.length))
        self.position = state["progress"]


class Batches:
    """An iterable of batches, more of them on later ranks, in an order of its rank and of the pass that it counts."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.epoch += 1
        numbers = random.Random(f"{rank} {self.epoch}").sample(
            range(100 * rank, 100 * rank + 10 + 4 * rank), 8 + 4 * rank
        )
        return (default_collate([plain_sample(n) for n in numbers[at : at + 2]]) for at in range(0, len(numbers), 2))


class BatchesWithState(Batches):
    """The same, with a state."""

    at = first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        if first:
            self.epoch -= 1
        for at, batch in enumerate(super().__iter__()):
            self.at = at + 1
            if at >= first:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.first = state["epoch"], state["at"]


def hugging_face(folder: Path, kind: str) -> Any:
    """A pipeline of one kind over the files in a folder."""
    if kind in FILES:
        return mapped(files_of(kind, folder))
    # Parquet files would do as well, but between them Hugging Face's threads are waited for: five seconds a shard.
    one, other = files_of("json" if kind == "interleave" else "parquet", folder), files_of("json", folder, "other")
    if kind == "filter":
        return mapped(one.filter(is_kept))
    if kind == "batched map":
        return one.map(of_rows, batched=True, batch_size=3, remove_columns=["n", "text"]).with_format("torch")
    if kind == "tokenized":
        return one.map(of_documents, batched=True, batch_size=3, remove_columns=["n", "text"])
    if kind == "interleave":
        # Hugging Face runs what stands before in threads, where nothing can be seeded.
        pair, strategy = [one, other], "all_exhausted_without_replacement"
        found = datasets.interleave_datasets(pair, probabilities=[0.7, 0.3], seed=5, stopping_strategy=strategy)
        return mapped(found)
    if kind == "concatenate":
        return datasets.concatenate_datasets([mapped(one), mapped(other)])
    return mapped(one.shuffle(seed=5, buffer_size=4))


def two_streams(folder: Path) -> dict[str, Any]:
    """Two that may be mixed; the second is Hugging Face's."""
    return {"news": chunks(), "code": mapped(files_of("json", folder, "other"))}


def module(train_on: Any, **options: Any) -> StreamDataModule:
    """Batches of two, and samples for validation."""
    defaults: dict[str, Any] = {
        "val": chunks(VAL_SIZES, VAL_FIRST),
        "batch_size": None if {"max_tokens", "budget"} & options.keys() else 2,
        "buffer_size": 5,
        "seed": 7,
    }
    return StreamDataModule(train_on, **{**defaults, **options})


# From a folder of files to a data module.
MODULES: dict[str, Callable[..., StreamDataModule]] = {
    "chunks": lambda folder, **options: module(chunks(), **options),
    **{
        kind: lambda folder, kind=kind, **options: module(hugging_face(folder, kind), **options)
        for kind in (*FILES, "filter", "batched map", "interleave", "concatenate", "shuffle")
    },
    "tokens": lambda folder, **options: module(
        chunks(), budget=Budget(max_tokens=18, multiple=2), length=length_of, read_ahead=6, **options
    ),
    "in turn": lambda folder, **options: module(MixedStream(two_streams(folder)), **options),
    "mixed by sample": lambda folder, **options: module(
        MixedStream(two_streams(folder), weights={"news": 2, "code": 1}, by="sample", seed=4), **options
    ),
    "first exhausted": lambda folder, **options: module(
        MixedStream(two_streams(folder), weights=[0.7, 0.3], stop="first_exhausted"), **options
    ),
    "cycle": lambda folder, **options: module(
        MixedStream(two_streams(folder), weights=[0.5, 0.5], stop="cycle"), **options
    ),
    "packed split": lambda folder, **options: packed("split", chunks(transform=document), **options),
    "packed whole": lambda folder, **options: packed("whole", chunks(transform=document), **options),
    "packed tokens": lambda folder, **options: packed("whole", hugging_face(folder, "tokenized"), **options),
    "packed mixture": lambda folder, **options: packed(
        "split",
        MixedStream(
            {
                "news": chunks(transform=document),
                "code": chunks(OTHER_SIZES, OTHER_FIRST, transform=document, seed=4),
            },
            weights={"news": 2, "code": 1},
            by="sample",
            seed=4,
        ),
        **options,
    ),
    "own with a state": lambda folder, **options: module(OwnWithState(), **options),
    "own": lambda folder, **options: module(Own(), **options),
}
