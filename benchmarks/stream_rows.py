"""Streams of cheap rows in small batches beside torch's DataLoader, which keeps no state."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.measure import Row, interleave, median_ratio, report, target
from benchmarks.streams import Parts, line, streamed, table
from lightning_stateful import patch_dataloader

# In a pass, which takes a fifth of a second at the least: a stream that resumes begins and ends each in some 3 ms more.
ROWS = {"json": 12_800, "parquet": 12_800, "text": 128_000}
SHARDS, ROUNDS = 4, 16
SIZES = (4, 8, 64)
CLAIM = (
    f"Rows of Hugging Face's streams as people read them, {ROWS['json']:,} of four columns (text: {ROWS['text']:,} of "
    f"one) in {SHARDS} files, without a function and with one that adds a column. Patched, and as torch's DataLoader "
    "reads them, which cannot go on in the middle. Without workers figures are CPU time; with two workers the CPU time "
    "of all processes."
)


def lengthened(row: dict[str, Any]) -> dict[str, Any]:
    """Adds a column, as cheaply as a function can."""
    return {"length": len(row["text"])}


def write(folder: Path) -> dict[str, list[Path]]:
    """The files by their kind."""
    whole, lines = table(ROWS["json"]), ROWS["text"] // SHARDS
    for shard in range(SHARDS):
        part = whole.shard(SHARDS, shard, contiguous=True)
        part.to_parquet(folder / f"{shard}.parquet")
        part.to_json(folder / f"{shard}.json")
        texts = [f"{line(number)}\n" for number in range(shard * lines, (shard + 1) * lines)]
        (folder / f"{shard}.text").write_text("".join(texts))
    return {kind: sorted(folder.glob(f"*.{kind}")) for kind in ("json", "parquet", "text")}


def measured(files: list[Path], kind: str, num_workers: int, size: int, *, mapped: bool) -> Row:
    """Rows a second of both, and the ratio of their CPU times, part by part of a pass."""

    def make() -> Any:
        data = streamed(files, kind)
        return data.map(lengthened) if mapped else data

    options: dict[str, Any] = {"batch_size": size, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    subjects = {
        "DataLoader": DataLoader(make(), **options),
        "patched": patch_dataloader(DataLoader(make(), **options)),
    }
    rows = ROWS[kind]
    parts = {name: Parts(subject, rows // size // SHARDS) for name, subject in subjects.items()}
    for subject in subjects.values():
        assert sum(1 for _ in subject) == rows // size  # workers start
    interleave(dict(parts), ROUNDS)
    spent = {name: part.spent for name, part in parts.items()}
    return {
        "data": f"{kind}, map(f)" if mapped else kind,
        "workers": num_workers,
        "batch size": size,
        "rows a second of CPU, DataLoader": rows / SHARDS * ROUNDS / sum(spent["DataLoader"]),
        "rows a second of CPU, patched": rows / SHARDS * ROUNDS / sum(spent["patched"]),
        "ratio of CPU, median": median_ratio(spent["DataLoader"], spent["patched"]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder))
        rows = [
            measured(files[kind], kind, num_workers, size, mapped=mapped)
            for num_workers in (0, 2)
            for kind in files
            for mapped in (False, True)
            for size in SIZES
        ]
    ratios = [row["ratio of CPU, median"] for row in rows]
    targets = [target("patched over DataLoader, the least", min(ratios), at_least=0.9)]
    report("stream_rows", CLAIM, {"Rows of Hugging Face, in small batches": rows}, targets)


if __name__ == "__main__":
    main()
