"""Train the byte model on a stream of compressed text shards, stop in the middle of an epoch, and go on.

The sources of Python's standard library, or any text file, are written into gzip shards on the spot. They are read
as they come, shuffled in blocks, and cut into windows of bytes on the fly; nothing has an index or a length. The run is
stopped, resumed in fresh objects, and compared with one that is not stopped. Then it is resumed with another number of
workers, to show that the rest of the epoch is still what had not been trained on.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from byte_model import ByteModel

from lightning_stateful import ChunkedDataset, StreamDataModule

WIDTH = 64


def write_shards(folder: Path, text: Path | None, num_shards: int, lines_a_shard: int) -> list[Path]:
    """Numbered lines of text in gzip files."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) if text is None else [text]
    lines = (line for path in sources for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    shards = []
    for shard in range(num_shards):
        path = folder / f"{shard:03}.txt.gz"
        with gzip.open(path, "wt", encoding="utf-8") as file:
            for number, line in zip(range(lines_a_shard), lines, strict=False):
                file.write(f"{shard * lines_a_shard + number}\t{line}\n")
        shards.append(path)
    return shards


def read_lines(shard: Path) -> Iterator[tuple[int, str]]:
    """The lines of a shard, one after the other, each with its number."""
    with gzip.open(shard, "rt", encoding="utf-8") as file:
        for line in file:
            number, text = line.rstrip("\n").split("\t", 1)
            yield int(number), text


def as_bytes(line: tuple[int, str]) -> dict[str, torch.Tensor]:
    """A window of bytes that begins somewhere in the line: an augmentation that draws."""
    number, text = line
    raw = text.encode()
    start = int(torch.randint(max(len(raw) - WIDTH, 0) + 1, ()))
    window = raw[start : start + WIDTH].ljust(WIDTH)
    return {"index": torch.tensor(number), "bytes": torch.tensor(list(window))}


class Ledger(pl.Callback):
    """Remembers which lines every batch held."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the lines."""
        self.batches.append(batch["index"].tolist())


def train(data: StreamDataModule, ckpt_path: Path | None = None, **limits: Any) -> tuple[pl.Trainer, list[list[int]]]:
    """Fit a fresh model."""
    torch.manual_seed(0)
    ledger = Ledger()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ledger],
        **limits,
    )
    trainer.fit(ByteModel(), datamodule=data, ckpt_path=ckpt_path)
    return trainer, ledger.batches


def main() -> None:
    """Train without a stop, with one, and with one and other workers; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file, in place of the standard library")
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--lines", type=int, default=200, help="lines of a shard")
    parser.add_argument("--stop", type=int, default=50, help="step after which the second run is stopped")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder), options.text, options.shards, options.lines)

        def data(num_workers: int = 2) -> StreamDataModule:
            lines = ChunkedDataset(shards, read_lines, buffer_size=300, seed=0, transform=as_bytes)
            return StreamDataModule(lines, batch_size=16, num_workers=num_workers)

        checkpoint = Path(folder) / "stopped.ckpt"
        whole, expected = train(data(), max_epochs=1)
        stopped, first = train(data(), max_steps=options.stop)
        stopped.save_checkpoint(checkpoint)
        resumed, second = train(data(), checkpoint, max_epochs=1)
        _, rest = train(data(num_workers=3), checkpoint, max_epochs=1)

    models = [trainer.lightning_module.state_dict().values() for trainer in (whole, resumed)]
    same_weights = all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    same_batches = first + second == expected
    times = Counter(Counter(line for batch in first + rest for line in batch).values())
    print(f"{len(shards)} shards, {sum(map(len, expected))} lines, {len(expected)} batches in two workers")
    print(f"stopped after step {options.stop} and resumed: same batches {same_batches}, same weights {same_weights}")
    print(f"resumed in three workers: {times[1]} lines once, {sum(times.values()) - times[1]} more than once")
    if not (same_batches and same_weights and times == {1: sum(map(len, expected))}):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
