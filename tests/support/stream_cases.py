"""Small streams, loaders over them without a trainer, and what becomes of them when they are stopped and resumed."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import ChunkedDataset, MixedStream
from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.packing import Packing
from lightning_stateful.stream_loader import StreamLoader, StreamOptions
from lightning_stateful.stream_nodes.read_ahead import LengthBatcher
from lightning_stateful.streams import DocumentPacker, Stream
from lightning_stateful.streams.worker_slot import StreamConfig

# What a pass over a loader ends with.
END = "end"
SIZES = (3, 8, 0, 5, 1, 6)
OTHER_SIZES = (2, 6, 1, 4, 5)

Make = Callable[[], Any]


def read_numbers(ref: tuple[int, int]) -> Iterator[int]:
    """The numbers of a chunk."""
    return iter(range(ref[0], ref[0] + ref[1]))


def refs(sizes: Sequence[int] = SIZES, first: int = 0) -> list[tuple[int, int]]:
    """Chunks that follow one another."""
    return list(zip(accumulate(sizes, initial=first), sizes, strict=False))


def chunks(sizes: Sequence[int] = SIZES, first: int = 0, read: Any = read_numbers, **options: Any) -> ChunkedDataset:
    """Chunks of numbers, shuffled in small blocks."""
    return ChunkedDataset(refs(sizes, first), read, **{"buffer_size": 5, "seed": 3, **options})


def mixed(**options: Any) -> MixedStream:
    """Two streams, the numbers of the second from 100 on."""
    return MixedStream({"one": chunks(), "two": chunks(OTHER_SIZES, 100, seed=4)}, **options)


def write_lines(folder: Path, sizes: Sequence[int] = SIZES) -> list[str]:
    """Compressed files of numbers, one a line."""
    files = [str(folder / f"shard-{number}.gz") for number in range(len(sizes))]
    for file, (first, size) in zip(files, refs(sizes), strict=True):
        with gzip.open(file, "wt") as opened:
            opened.writelines(f"{number}\n" for number in range(first, first + size))
    return files


def read_lines(file: str) -> Iterator[int]:
    """The numbers of a compressed file."""
    with gzip.open(file, "rt") as opened:
        yield from map(int, opened)


def drawn(value: Any) -> tuple[Any, float, float]:
    """A value beside numbers of two generators that all code shares."""
    return value, random.random(), float(torch.rand(()))


def length_of(number: int) -> int:
    """The number of tokens that a number counts for."""
    return 1 + number * 7 % 9


def budgeted(stream: Stream, window: int = 7, length: Callable[[int], int] = length_of) -> StreamConfig:
    """The configuration that ``StreamDataModule(max_tokens=12)`` makes of a stream."""
    cut = stream.then(LengthBatcher, window=window, budget=Budget(max_tokens=12), length=length)
    return cut.config(batch_size=None)


def document(number: int) -> list[int]:
    """A document of 1 to 9 tokens, of which no other has any."""
    return [number * 10 + token for token in range(length_of(number))]


def drawn_document(number: int) -> list[int]:
    """The beginning of a document, of a length that is drawn."""
    return document(number)[: random.randint(1, 9)]


def packed(stream: Stream, how: Any = "split", document: Callable[[int], list[int]] = document) -> Stream:
    """Sequences of 12 tokens out of a stream of numbers."""
    more: dict[str, Any] = {"open_sequences": 3} if how == "whole" else {}
    return stream.map(document).then(DocumentPacker, packing=Packing(12, how=how, **more))


def tokens(sequences: list[Any]) -> list[int]:
    """The tokens in sequences but for padding."""
    return [token for one in sequences for token in one["input_ids"][one["document_ids"] >= 0].tolist()]


def rank_and_ranks() -> tuple[int, int]:
    """The number of this process, and of all."""
    is_one = not torch.distributed.is_initialized()
    return (0, 1) if is_one else (torch.distributed.get_rank(), torch.distributed.get_world_size())


class Divided(IterableDataset[Any]):
    """Numbers that it divides among ranks and workers, with draws; its order follows from the epoch."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self) -> list[int]:
        """The numbers that this worker reads."""
        info, (rank, ranks) = get_worker_info(), rank_and_ranks()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return random.Random(self.epoch).sample(range(self.length), self.length)[
            worker * ranks + rank :: workers * ranks
        ]

    def __iter__(self) -> Iterator[Any]:
        return map(drawn, self.share())


class Remembers(Divided):
    """The same, and knows where it stands, as torchdata has it."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        for number in self.share()[self.at :]:
            self.at += 1
            yield drawn(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class RemembersWhereItReads(Divided):
    """The same, and its iterator knows where it stands."""

    def __iter__(self) -> Any:
        return _Reader(self.share())


class _Reader:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return drawn(self.numbers[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class InThisProcess(DataLoader[Any]):
    """Runs its workers in this process, in torch's order: many more cases fit into the time of a few processes."""

    def _get_iterator(self) -> Any:
        return _Turns(self) if self.num_workers else super()._get_iterator()


class _Turns:
    """Takes from one worker after the other what it gives."""

    def __init__(self, loader: Any) -> None:
        self._infos: list[Any] = []
        for worker in range(loader.num_workers):
            # Of its own, as in a process.
            dataset = copy.deepcopy(loader.dataset, {id(queue): queue for queue in loader.dataset.queues})
            vars(dataset).update(_process=None)
            self._infos.append(
                torch_worker.WorkerInfo(id=worker, num_workers=loader.num_workers, seed=worker, dataset=dataset)
            )
        self._reset(loader)

    def _reset(self, loader: Any) -> None:
        """Begin again, as torch has persistent workers do."""
        self._workers = [[info, iter(info.dataset)] for info in self._infos]

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> Any:
        while self._workers:
            worker = self._workers.pop(0)
            torch_worker._worker_info, kept = worker[0], torch_worker._worker_info
            try:
                found = next(worker[1])
            except StopIteration:
                continue
            finally:
                # A lane puts its own in this place.
                worker[0], torch_worker._worker_info = torch_worker._worker_info, kept
            self._workers.append(worker)
            return found
        raise StopIteration


def stream_loader(dataset: Any, *, config: StreamConfig | None = None, kind: Any = DataLoader, **how: Any) -> Any:
    """A loader of streams.

    Args:
        dataset: The dataset.
        config: As StreamLoader has it.
        kind: The class of the user's loader.
        **how: StreamOptions, and options of the user's loader; ``slow`` is the latter's timeout.
    """
    options = {name: how.pop(name) for name in StreamOptions.__dataclass_fields__ if name in how}
    how["timeout"] = how.pop("slow", 0)
    if how.get("num_workers") and "multiprocessing_context" not in how:
        how["multiprocessing_context"] = "fork"
    user = kind(dataset, **{"batch_size": 2 if config is None else 1, **how})
    return StreamLoader(user, StreamOptions(config=config, **{"seed": 3, **options}))


def plain(batch: Any) -> Any:
    """A batch as plain data."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def steps(loader: Any) -> Iterator[Any]:
    """Batches of epoch after epoch; END behind each epoch."""
    while True:
        yield from map(plain, loader)
        yield END


def numbers(items: Any) -> Counter[int]:
    """The number of times that each number was served."""
    found: Counter[int] = Counter()
    for item in items if isinstance(items, list) else []:
        found.update([item] if type(item) is int else numbers(item))
    return found


def saved(loader: Any) -> Any:
    """A loader's state as it comes out of a file."""
    state = loader.state_dict()
    written = json.loads(json.dumps(state, allow_nan=False))
    assert written == state, "the state is no plain data"
    return written


def position_in(state: Any) -> Any:
    """A state without what a resume only names in the log, of which each run knows what it has seen change."""
    if isinstance(state, dict):
        return {
            name: position_in(value) for name, value in state.items() if name not in ("kept", "lasting", "checksum")
        }
    return [position_in(value) for value in state] if isinstance(state, list) else state


def loaded(loader: Any, state: Any) -> Any:
    """A loader that has loaded a state, which stays as it is and comes back."""
    given = copy.deepcopy(state)
    loader.load_state_dict(given)
    assert given == state, "loading has changed the state"
    assert saved(loader) == state, "the loader stands elsewhere than the state that it has loaded"
    return loader


def observe(make: Make, total: int) -> tuple[list[Any], list[Any]]:
    """The items of an uninterrupted run, and its state before each of them and after the last."""
    loader = make()
    items, states = [], [saved(loader)]
    for item in islice(steps(loader), total):
        items.append(item)
        states.append(saved(loader))
    return items, states


def assert_goes_on(make: Make, legs: Sequence[int], total: int = 30, observed: Any = None) -> None:
    """A run that is stopped after each of ``legs`` is given what it is without a stop, and stands where that does."""
    items, states = observe(make, total) if observed is None else observed
    assert any(item != END for item in items)
    at, state = 0, None
    for leg in (*legs, total):
        loader = make() if state is None else loaded(make(), state)
        while at < total and items[at] == END and states[at] == states[at + 1]:
            # The end of an epoch is the beginning of the next.
            at += 1
        for number, item in enumerate(islice(steps(loader), min(leg, total - at))):
            # Where nothing was left of an epoch, it is the next one's.
            at += bool(state is not None and not number and items[at] == END != item)
            assert item == items[at], f"at {at}, resumed after the legs {legs}"
            at += 1
            assert position_in(saved(loader)) == position_in(states[at]), (
                f"the state at {at}, resumed after the legs {legs}"
            )
        state = saved(loader)
    assert at == total


def random_legs(seed: int, number: int = 6) -> list[int]:
    """Stops at random moments, some at once after a resume."""
    return random.Random(seed).choices((0, 1, 1, 2, 3, 5, 8), k=number)
