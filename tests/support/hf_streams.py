"""Small Hugging Face streams, read from real files, and functions for them that workers can import."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import get_worker_info

# Every load_dataset would be counted on a server, and waits for that.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

FILES = ("parquet", "arrow", "json", "csv", "text")
KINDS = (*FILES, "generator", "table")
_SUFFIXES = {"json": "jsonl", "text": "txt.gz"}
_SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


def rows(first: int, size: int) -> dict[str, list[Any]]:
    """Columns of consecutive numbers and their words."""
    return {"n": list(range(first, first + size)), "text": [f"row {number}" for number in range(first, first + size)]}


def write(kind: str, file: Path, first: int, size: int, *, chunk: int = 3) -> None:
    """One file of rows; tables in it have ``chunk`` rows."""
    table = pa.table(rows(first, size), schema=_SCHEMA)
    if kind == "parquet":
        with pq.ParquetWriter(file, _SCHEMA) as writer:
            for batch in table.to_batches(chunk):
                writer.write_batch(batch)
    elif kind == "arrow":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            writer.write_table(table, max_chunksize=chunk)
    elif kind == "json":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    elif kind == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerows([_SCHEMA.names, *(row.values() for row in table.to_pylist())])
    else:
        with gzip.open(file, "wt") as opened:
            opened.writelines(f"{row['text']}\n" for row in table.to_pylist())


def stream(kind: str, folder: Path, sizes: Sequence[int], *, first: int = 0, chunk: int = 3, name: str = "part") -> Any:
    """A stream with one shard for each of ``sizes``; its rows are numbered from ``first``."""
    if kind == "table":
        table = pa.table(rows(first, sum(sizes)), schema=_SCHEMA)
        return datasets.Dataset(table).to_iterable_dataset(num_shards=len(sizes))
    starts = [first + sum(sizes[:number]) for number in range(len(sizes))]
    if kind == "generator":
        parts = list(zip(starts, sizes, strict=True))
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": parts})
    files = [folder / f"{name}{number}.{_SUFFIXES.get(kind, kind)}" for number in range(len(sizes))]
    folder.mkdir(exist_ok=True)
    for file, start, size in zip(files, starts, sizes, strict=True):
        write(kind, file, start, size, chunk=chunk)
    options = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    # What csv and text find out from the first file, they do not where that is empty.
    if kind == "csv":
        options["features"] = datasets.Features.from_arrow_schema(_SCHEMA)
    return datasets.load_dataset(kind, data_files=[str(file) for file in files], **options)


def generate(parts: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """A generator of rows."""
    for first, size in parts:
        for number in range(first, first + size):
            yield {"n": number, "text": f"row {number}"}


def generate_draws(parts: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """A generator that draws."""
    for row in generate(parts):
        yield {**row, "drawn": drawn()}


def drawn() -> list[float]:
    """A number of each of the generators that all code shares."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def plus(row: dict[str, Any]) -> dict[str, Any]:
    return {"more": row["n"] + 1}


def plus_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"more": [number + 1 for number in batch["n"]]}


def twice(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: [value for value in values for _ in range(2)] for name, values in batch.items()}


def of_three(row: dict[str, Any]) -> bool:
    return bool(row["n"] % 3 != 1)


def of_three_batch(batch: dict[str, list[Any]]) -> list[bool]:
    return [number % 3 != 1 for number in batch["n"]]


def plus_table(table: pa.Table) -> pa.Table:
    return table.append_column("more", pa.array([number + 1 for number in table["n"].to_pylist()], pa.int64()))


def of_three_table(table: pa.Table) -> list[bool]:
    return of_three_batch({"n": table["n"].to_pylist()})


def same_table(table: pa.Table) -> pa.Table:
    return table


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row


async def plus_later(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return plus(row)


def draw(row: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": drawn()}


def draw_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"drawn": [drawn() for _ in batch["n"]]}


def draw_table(table: pa.Table) -> pa.Table:
    return table.append_column("drawn", pa.array([drawn() for _ in range(len(table))]))


def by_chance(row: dict[str, Any]) -> bool:
    return random.random() < 0.6


def in_worker(row: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    return {"worker": -1 if info is None else info.id}


def plain(sample: Any) -> Any:
    """A sample of any format as data that can be compared, with its types."""
    if isinstance(sample, pa.Table):
        return "table", plain(sample.to_pydict())
    if hasattr(sample, "to_dict"):
        return "frame", plain(sample.to_dict("list"))
    if isinstance(sample, dict):
        return {name: plain(value) for name, value in sample.items()}
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return type(sample).__name__, str(sample.dtype), sample.tolist()
    if isinstance(sample, np.generic):
        return str(sample.dtype), sample.item()
    return [plain(value) for value in sample] if isinstance(sample, (list, tuple)) else sample
