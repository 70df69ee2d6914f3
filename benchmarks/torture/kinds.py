"""The data that are tortured: samplers and streams of every kind, whose samples are known by numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, default_collate
from torch.utils.data import get_worker_info as worker_info

from lightning_stateful import (
    BucketDataModule,
    ChunkedDataset,
    MixedStream,
    MixtureDataModule,
    PackedDataModule,
    Packing,
    RoundRobinDataModule,
    StatefulDataModule,
    StreamDataModule,
)

# Shards of unequal sizes, and as many of a second source; documents by their numbers of tokens.
SIZES, OTHER_SIZES = (11, 3, 7, 9, 5, 12, 8, 6), (4, 7, 2, 6)
NUM_SAMPLES, NUM_OTHERS = sum(SIZES), sum(OTHER_SIZES)
# Rank and worker slots get equal shares of these.
NUM_DIVIDED = 64
LENGTHS = [1 + number**2 * 7 % 17 for number in range(NUM_SAMPLES)]
FIRST_TOKENS = [0, *accumulate(LENGTHS)]
# A file whose first reader fails; and of this process, the samples that it has read.
TROUBLE = "trouble.json"
_num_read = 0


def read(number: int) -> int:
    """Read a sample; fail where the file ``trouble.json`` of this run says so, in one process."""
    global _num_read
    _num_read += 1
    trouble = Path(os.environ["TORTURE_FOLDER"]) / TROUBLE
    if trouble.exists() and _num_read > json.loads(trouble.read_text()):
        trouble.rename(trouble.with_suffix(".done"))
        raise OSError(f"torture: sample {number} cannot be read")
    return number


def sample(number: int) -> dict[str, torch.Tensor]:
    """The sample of a number."""
    return {"id": torch.tensor(read(number))}


def row(line: dict[str, Any]) -> dict[str, Any]:
    """The sample of a row of Hugging Face's."""
    return {"id": read(line["id"])}


def document(number: int) -> dict[str, list[int]]:
    """The tokens of a document, of which no other has any."""
    first = FIRST_TOKENS[read(number)]
    return {"input_ids": list(range(first, first + LENGTHS[number]))}


def of_sequences(sequences: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokens of each sequence of a batch but for padding."""
    batch = default_collate(sequences)
    return {"sequences": [of[has >= 0] for of, has in zip(batch["input_ids"], batch["document_ids"], strict=True)]}


def samples_of(batch: dict[str, Any]) -> list[list[int]]:
    """The numbers in each sample of a batch: one, or the tokens of a sequence."""
    if "sequences" in batch:
        return [sequence.tolist() for sequence in batch["sequences"]]
    return [[number] for number in batch["id"].tolist()]


def keys_of(batch: dict[str, Any]) -> list[int]:
    """The numbers in a batch, as ``ledger_key``."""
    return [number for one in samples_of(batch) for number in one]


class Indexed(Dataset[Any]):
    """Samples with an index."""

    def __init__(self, length: int, first: int = 0, of: Callable[[int], Any] = sample) -> None:
        self.length, self.first, self.of = length, first, of

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.of(index + self.first)


class OwnSampler(Sampler[int]):
    """Shuffles by a generator of its own, as people write samplers."""

    def __init__(self, length: int) -> None:
        self.length, self.generator = length, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=self.generator).tolist()


class Divided(IterableDataset[Any]):
    """Divides its samples among ranks and workers; its order follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def share(self) -> list[int]:
        """The numbers of this worker of this rank."""
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        worker = worker_info()
        at, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(NUM_DIVIDED, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return order[rank * of + at :: ranks * of]

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.share())


class DividedWithState(Divided):
    """The same, with the protocol of torchdata."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.share()
        while self.at < len(numbers):
            self.at += 1
            yield sample(numbers[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.at = state["at"]


def write_shards(folder: Path) -> None:
    """Write the files that streams read."""
    folder.mkdir()
    for name, sizes, first in (("part", SIZES, 0), ("other", OTHER_SIZES, NUM_SAMPLES)):
        for number, at in enumerate(accumulate(sizes[:-1], initial=first)):
            lines = [json.dumps({"id": key}) for key in range(at, at + sizes[number])]
            (folder / f"{name}-{number:02}.jsonl").write_text("\n".join(lines) + "\n")


def read_shard(path: Path) -> list[int]:
    """The numbers in a file."""
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a source, whether they are there or not."""
    return [folder / "shards" / f"{name}-{at:02}.jsonl" for at in range(len(SIZES if name == "part" else OTHER_SIZES))]


def chunks(folder: Path, name: str = "part", of: Callable[[int], Any] = sample) -> ChunkedDataset:
    """Files behind a function that reads one."""
    return ChunkedDataset(files_of(folder, name), read_shard, buffer_size=10, seed=3, transform=of)


def hugging_face(folder: Path, name: str = "part") -> Any:
    """The same files as a stream of Hugging Face's."""
    files = list(map(str, files_of(folder, name)))
    options = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    return datasets.load_dataset("json", data_files=files, **options).map(row).with_format("torch")


@dataclass(frozen=True)
class How:
    """How one start reads the data.

    Attributes:
        ranks: Data-parallel ranks.
        workers: Workers of each.
        batch_size: Samples, or sequences, in a batch of one rank.
    """

    ranks: int = 2
    workers: int = 0
    batch_size: int = 2

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of loaders and data modules."""
        workers = {"num_workers": self.workers, "persistent_workers": True} if self.workers else {}
        return {"batch_size": self.batch_size, **workers}


Make = Callable[[Path, How], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of data.

    Attributes:
        make: Makes a data module, or a loader, out of the folder of a run and how it is read.
        num_keys: The numbers in the data, each of which a pass gives once.
        changes: What may change between starts: ``"ranks"``, ``"workers"``, ``"batch_size"``.
        ranks: Numbers of ranks.
        is_stream: Whether what is left at the end of an epoch comes first in the next.
        has_shards: Whether files can be missing.
        has_index: Whether the ledger has indices without ``ledger_key``.
    """

    make: Make
    num_keys: int = NUM_SAMPLES
    changes: Sequence[str] = ("ranks", "workers", "batch_size")
    ranks: Sequence[int] = (1, 2, 3)
    is_stream: bool = False
    has_shards: bool = False
    has_index: bool = True


def _two_sources() -> dict[str, Indexed]:
    return {"one": Indexed(NUM_SAMPLES), "other": Indexed(NUM_OTHERS, NUM_SAMPLES)}


def _packed(how: str) -> Make:
    packing = Packing(12, how=how, **({"too_long": "split"} if how == "whole" else {}))  # type: ignore[arg-type]

    def make(folder: Path, how: How) -> Any:
        documents = Indexed(NUM_SAMPLES, of=document)
        options = {"packing": packing, "collate_fn": of_sequences, "seed": 3, **how.loading}
        return PackedDataModule(documents, lengths=LENGTHS, **options)  # type: ignore[arg-type]

    return make


def _packed_stream(how: str) -> Make:
    more: dict[str, Any] = {"too_long": "split", "open_sequences": 3} if how == "whole" else {}
    packing = Packing(12, how=how, **more)  # type: ignore[arg-type]

    def make(folder: Path, how: How) -> Any:
        return _stream(chunks(folder, of=document), how, packing=packing, collate_fn=of_sequences)

    return make


def _stream(train_on: Any, how: How, **options: Any) -> StreamDataModule:
    # Those who wait for the dead give up before a run counts as hung.
    return StreamDataModule(train_on, **{"seed": 3, "timeout": 20, **how.loading, **options})


def _loader(dataset: Any, how: How, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **how.loading, **options)


def _distributed(folder: Path, how: How) -> DataLoader[Any]:
    dataset, rank = Indexed(NUM_SAMPLES), int(os.environ.get("RANK", 0))
    return _loader(dataset, how, sampler=DistributedSampler(dataset, how.ranks, rank, seed=3))


_OF_STREAM: dict[str, Any] = {
    "is_stream": True,
    "has_shards": True,
    "has_index": False,
    "changes": ("ranks", "workers"),
}
_PINNED: dict[str, Any] = {"num_keys": NUM_DIVIDED, "changes": (), "ranks": (1, 2), "has_index": False}
_BOTH, _TOKENS = NUM_SAMPLES + NUM_OTHERS, FIRST_TOKENS[-1]

KINDS: dict[str, Kind] = {
    "shuffle": Kind(lambda folder, how: StatefulDataModule(Indexed(NUM_SAMPLES), seed=3, **how.loading)),
    "DataLoader(shuffle=True)": Kind(lambda folder, how: _loader(Indexed(NUM_SAMPLES), how, shuffle=True)),
    "DistributedSampler": Kind(_distributed),
    "sampler of a user": Kind(lambda folder, how: _loader(Indexed(NUM_SAMPLES), how, sampler=OwnSampler(NUM_SAMPLES))),
    "round robin": Kind(
        lambda folder, how: RoundRobinDataModule(_two_sources(), seed=3, accept=("batch_size",), **how.loading), _BOTH
    ),
    "mixture": Kind(
        lambda folder, how: MixtureDataModule(
            _two_sources(), weights=[2, 1], by="sample", seed=3, accept=("batch_size",), **how.loading
        ),
        _BOTH,
    ),
    "buckets": Kind(
        lambda folder, how: BucketDataModule(
            Indexed(NUM_SAMPLES), lengths=LENGTHS, max_tokens=34, seed=3, **{**how.loading, "batch_size": None}
        ),
        changes=("ranks", "workers"),
    ),
    "packed, split": Kind(_packed("split"), _TOKENS),
    "packed, whole": Kind(_packed("whole"), _TOKENS),
    "Hugging Face stream": Kind(lambda folder, how: _stream(hugging_face(folder), how, buffer_size=10), **_OF_STREAM),
    "chunks": Kind(lambda folder, how: _stream(chunks(folder), how), **_OF_STREAM),
    "mixed stream": Kind(
        lambda folder, how: _stream(
            MixedStream({"one": chunks(folder), "other": hugging_face(folder, "other")}, weights=[2, 1], by="sample"),
            how,
        ),
        _BOTH,
        **_OF_STREAM,
    ),
    "packed stream, split": Kind(_packed_stream("split"), _TOKENS, **_OF_STREAM),
    "packed stream, whole": Kind(_packed_stream("whole"), _TOKENS, **_OF_STREAM),
    "iterable": Kind(lambda folder, how: _loader(Divided(), how), **_PINNED),
    "iterable with a state": Kind(lambda folder, how: _loader(DividedWithState(), how), **_PINNED),
}


def made() -> Any:
    """The data that the environment names, for ``lightning-stateful check``."""
    given = json.loads(os.environ["TORTURE_DATA"])
    return KINDS[given["kind"]].make(Path(os.environ["TORTURE_FOLDER"]), How(**given["how"]))
