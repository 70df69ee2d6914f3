"""Two iterable datasets that divide themselves among ranks, before and after they are given to any ranks and workers.

Both tokenize text on the way and cut it into windows, as language models are trained. One has the arguments of
torchtitan's (``dp_rank``, ``dp_world_size``) and a state with a token buffer in it, the other ``rank`` and
``world_size`` and no state. Each is left as it is: told of as many ranks as there are to be shards, its parts are the
shards of a stream. Then a run is stopped and resumed, and what is left of an epoch is read on three ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import torch
from byte_model import ByteModel
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import BaseNode, IterableWrapper

from lightning_stateful import StreamDataModule, patch_dataloader
from lightning_stateful.streams import NodeShards
from lightning_stateful.streams.stream import as_stream

WIDTH, BATCH_SIZE = 64, 8
# Parts of the data: at least ranks times workers. The number of files should be a multiple: else each part of a Hugging
# Face dataset reads all of them.
NUM_SHARDS = 6

Tokenizer = Callable[[str], list[int]]


def tokenize(text: str) -> list[int]:
    """Bytes as tokens, and the end of a document."""
    return [*text.encode(), 0]


# Before. These two are as people have them; nothing below changes them.


class HuggingFaceTextDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Windows of the documents of one rank, with torchtitan's arguments and the protocol of its states."""

    def __init__(
        self,
        dataset_name: str,
        tokenizer: Tokenizer,
        seq_len: int = 2048,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = False,
    ) -> None:
        files = {"train": sorted(map(str, Path(dataset_name).glob("*.jsonl")))}
        documents = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        self._documents = split_dataset_by_node(documents, dp_rank, dp_world_size)
        self._tokenizer, self._seq_len, self._infinite = tokenizer, seq_len, infinite
        self._token_buffer: list[int] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            # What a resumed buffer holds may be more than a window.
            yield from self._windows()
            for document in self._documents:
                self._token_buffer += self._tokenizer(document["text"])
                yield from self._windows()
            if not self._infinite:
                return

    def _windows(self) -> Iterator[dict[str, torch.Tensor]]:
        while len(self._token_buffer) > self._seq_len:
            window, self._token_buffer = self._token_buffer[: self._seq_len], self._token_buffer[self._seq_len :]
            yield {"bytes": torch.tensor(window)}

    def state_dict(self) -> dict[str, Any]:
        """The tokens that are left, and the place in the documents."""
        return {"token_buffer": list(self._token_buffer), "data": self._documents.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there."""
        self._token_buffer = list(state_dict["token_buffer"])
        self._documents.load_state_dict(state_dict["data"])


class HuggingFaceDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Windows of every ``world_size``-th file of a folder; it has no state."""

    folder: str

    def __init__(self, tokenizer: Tokenizer, context_length: int, rank: int, world_size: int) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens: list[int] = []
        for path in sorted(Path(self.folder).glob("*.jsonl"))[self.rank :: self.world_size]:
            for line in path.read_text().splitlines():
                tokens += self.tokenizer(json.loads(line)["text"])
                while len(tokens) >= self.context_length:
                    yield {"bytes": torch.tensor(tokens[: self.context_length])}
                    tokens = tokens[self.context_length :]


def titan_before(folder: str, rank: int, world_size: int, infinite: bool = True) -> DataLoader[Any]:
    """The loader of one rank; its state is that rank's, and of use to as many ranks only."""
    dataset = HuggingFaceTextDataset(folder, tokenize, WIDTH, rank, world_size, infinite)
    return DataLoader(dataset, batch_size=BATCH_SIZE)


def own_before(folder: str, rank: int, world_size: int, infinite: bool = False) -> DataLoader[Any]:
    """The loader of one rank, which cannot go on within an epoch."""
    HuggingFaceDataset.folder = folder
    return DataLoader(HuggingFaceDataset(tokenize, WIDTH, rank, world_size), batch_size=BATCH_SIZE)


# After. A shard is the part that rank ``shard`` of NUM_SHARDS would have; ranks and workers are dealt shards.


def titan_shards(folder: str) -> NodeShards:
    """A resume goes on by the dataset's own state."""

    def part(shard: int) -> BaseNode[Any]:
        # A shard ends: an epoch is followed by the next without infinite=True.
        dataset = HuggingFaceTextDataset(folder, tokenize, WIDTH, dp_rank=shard, dp_world_size=NUM_SHARDS)
        return IterableWrapper(dataset)

    return NodeShards(part, num_shards=NUM_SHARDS)


def own_shards(folder: str) -> NodeShards:
    """A resume reads the shards that are open again, up to where they stood; no more than these."""
    HuggingFaceDataset.folder = folder

    def part(shard: int) -> BaseNode[Any]:
        return IterableWrapper(HuggingFaceDataset(tokenize, WIDTH, rank=shard, world_size=NUM_SHARDS))

    return NodeShards(part, num_shards=NUM_SHARDS)


# What it is worth


class Ledger(pl.Callback):
    """Remembers the windows of every batch."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the windows."""
        self.batches.append(windows_of(batch))


def windows_of(batch: Any) -> list[tuple[int, ...]]:
    """The windows of a batch as tuples."""
    return [tuple(window) for window in batch["bytes"].tolist()]


def train(shards: NodeShards, ckpt_path: Path | None = None, **limits: Any) -> tuple[pl.Trainer, list[Any]]:
    """Fit a fresh model."""
    torch.manual_seed(0)
    ledger = Ledger()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[ledger], enable_model_summary=False, **options, **limits)
    data = StreamDataModule(shards, batch_size=BATCH_SIZE, num_workers=2)
    trainer.fit(ByteModel(), datamodule=data, ckpt_path=ckpt_path)
    return trainer, ledger.batches


def goes_on_exactly(make: Callable[[], NodeShards], path: Path, stop: int) -> bool:
    """Whether a run that is stopped and resumed has the batches and weights of one that is not."""
    whole, expected = train(make(), max_epochs=1)
    stopped, first = train(make(), max_steps=stop)
    stopped.save_checkpoint(path)
    resumed, second = train(make(), path, max_epochs=1)
    models = [trainer.lightning_module.state_dict().values() for trainer in (whole, resumed)]
    return first + second == expected and all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def on_three_ranks(make: Callable[[], NodeShards], stop: int) -> Counter[tuple[int, ...]]:
    """The windows of an epoch that one rank begins and three go on with, as if each ran in a process of its own."""

    def loader(num_replicas: int, rank: int) -> Any:
        stream = DataLoader(as_stream(make()), batch_size=BATCH_SIZE)
        return patch_dataloader(stream, seed=0, num_replicas=num_replicas, rank=rank)

    one = loader(1, 0)
    found = [window for _, batch in zip(range(stop), one, strict=False) for window in windows_of(batch)]
    state = one.state_dict()
    for rank in range(3):
        three = loader(3, rank)
        three.load_state_dict(state)
        found += [window for batch in three for window in windows_of(batch)]
    return Counter(found)


def write_documents(folder: Path, num_documents: int, num_files: int, length: int) -> None:
    """Sources of the standard library as documents of so many characters, in files of JSON lines."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_documents]
    for number in range(num_files):
        lines = [json.dumps({"text": path.read_text(encoding="utf-8")[:length]}) for path in paths[number::num_files]]
        (folder / f"{number:03}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Compare what the shards give with what all ranks gave together; stop, resume, and change the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--stop", type=int, default=60, help="step after which a run is stopped")
    parser.add_argument("--fast", action="store_true", help="a few documents")
    options = parser.parse_args()
    documents, length, stop = (12, 900, 5) if options.fast else (options.documents, 3000, options.stop)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    datasets.disable_progress_bars()

    is_exact = True
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder), documents, 2 * NUM_SHARDS, length)
        both = {"torchtitan's": (titan_before, titan_shards), "of one's own": (own_before, own_shards)}
        for name, (before, after) in both.items():
            ranks = [before(folder, rank, NUM_SHARDS, infinite=False) for rank in range(NUM_SHARDS)]
            expected = Counter(window for loader in ranks for batch in loader for window in windows_of(batch))
            make = partial(after, folder)
            same_run = goes_on_exactly(make, Path(folder) / "stopped.ckpt", stop)
            same_windows = on_three_ranks(make, stop) == expected
            print(f"{name}: {expected.total()} windows of {NUM_SHARDS} ranks before are those of {NUM_SHARDS} shards")
            print(f"  stopped after step {stop} and resumed: same batches and weights {same_run}")
            print(f"  begun on one rank, read on by three: every window once {same_windows}")
            is_exact = is_exact and same_run and same_windows
    if not is_exact:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
