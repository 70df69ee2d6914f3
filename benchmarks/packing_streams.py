"""Packing streams of documents: speed, padding, states and resumes, beside plain loops and, where installed, grain."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from benchmarks.measure import Row, interleave, median_ratio, report, target
from lightning_stateful import Packing
from lightning_stateful.stream_nodes.nodes import NodeState, StreamNode
from lightning_stateful.streams import DocumentPacker

DOCUMENTS, OPEN, ROUNDS = 30_000, 64, 5
LENGTHS = (512, 2_048, 8_192)
HAS_GRAIN = importlib.util.find_spec("grain") is not None
CLAIM = (
    f"{DOCUMENTS:,} documents of the lengths of real text (4 to 512 tokens), or a third as many of log-normal lengths "
    "(median 600 tokens). The plain loops keep a list of tokens, extend it by each document and cut tensors off; the "
    "first has tokens alone, the second positions too, as torchtitan's. Grain "
    f"{version('grain') if HAS_GRAIN else '(not installed here)'} reads arrays, in this process. Sequences of the node "
    "have input_ids, labels, position_ids and document_ids. CPU times; with how='whole', 64 sequences are open."
)


class Documents(StreamNode[Any]):
    """Documents in memory.

    Args:
        documents: The documents.
    """

    def __init__(self, documents: Sequence[Any]) -> None:
        super().__init__()
        self._documents, self.num_read = documents, 0

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken."""
        super().reset(initial_state)
        self._at = 0 if initial_state is None else initial_state["at"]

    def next_many(self, number: int) -> list[Any]:
        """The next documents."""
        found = list(self._documents[self._at : self._at + number])
        self._at += len(found)
        self.num_read += len(found)
        return found

    def get_state(self) -> NodeState:
        """The number of the next document."""
        return {"at": self._at}


def texts(name: str) -> list[list[int]]:
    """Documents as lists of tokens, as tokenizers give them."""
    rng = np.random.default_rng(1)
    if name == "log-normal":
        lengths = np.maximum(rng.lognormal(np.log(600), 1, DOCUMENTS // 3).astype(np.int64), 1)
    else:
        found = json.loads((Path(__file__).parent / "wikitext_lengths.json").read_text())
        counts = np.array(found["counts"])
        lengths = rng.choice(found["lengths"], DOCUMENTS, p=counts / counts.sum())
    return [rng.integers(0, 50_000, length).tolist() for length in lengths.tolist()]


def tokens_alone(documents: Iterable[list[int]], length: int) -> Iterator[Any]:
    """Join and cut in plain Python: inputs and labels."""
    held: list[int] = []
    for document in documents:
        held.extend(document)
        while len(held) > length:
            cut = torch.LongTensor(held[: length + 1])
            held = held[length + 1 :]
            yield {"input": cut[:-1]}, cut[1:]


def with_positions(documents: Iterable[list[int]], length: int) -> Iterator[Any]:
    """The same with a list of positions in documents."""
    held: list[int] = []
    positions: list[int] = []
    for document in documents:
        held.extend(document)
        positions.extend(range(len(document)))
        while len(held) > length:
            cut, where = torch.LongTensor(held[: length + 1]), torch.LongTensor(positions[:length])
            held, positions = held[length + 1 :], positions[length + 1 :]
            yield {"input": cut[:-1], "positions": where}, cut[1:]


def grains(documents: Sequence[Any], length: int, how: str) -> Iterator[Any]:
    """Grain's iterator over packed sequences."""
    # Not among the requirements.
    grain, packers = map(importlib.import_module, ("grain", "grain.experimental"))
    given = [{"input_ids": document} for document in documents]
    source = grain.MapDataset.source(given).to_iter_dataset(grain.ReadOptions(num_threads=0))
    lengths = {"input_ids": length}
    if how == "split":
        return iter(packers.ConcatThenSplitIterDataset(source, length_struct=lengths))
    return iter(
        packers.BestFitPackIterDataset(source, length_struct=lengths, num_packing_bins=OPEN, shuffle_bins=False)
    )


def packing_of(how: Any, length: int) -> Packing:
    """The settings of a node."""
    return Packing(length, how=how, **({"too_long": "truncate", "open_sequences": OPEN} if how == "whole" else {}))


def packed(documents: Sequence[Any], length: int, how: str) -> BaseNode[Any]:
    """The node over documents in memory."""
    return DocumentPacker(Documents(documents), packing_of(how, length))


def microseconds(make: Callable[[], Iterable[Any]]) -> float:
    """CPU time of a sequence."""
    began = time.process_time()
    count = sum(1 for _ in make())
    return (time.process_time() - began) / count * 1e6


def speed(name: str, lists: list[list[int]]) -> list[Row]:
    """Microseconds of a sequence by every way to pack."""
    rows = []
    arrays = [np.array(document, dtype=np.int64) for document in lists]
    for length, how in itertools.product(LENGTHS, ("split", "whole")):
        short = [document[:length] for document in arrays] if how == "whole" else arrays
        tasks: dict[str, Callable[[], float]] = {}
        if how == "split":
            tasks["loop, tokens alone"] = partial(microseconds, partial(tokens_alone, lists, length))
            tasks["loop, positions"] = partial(microseconds, partial(with_positions, lists, length))
        if HAS_GRAIN:
            tasks["grain, arrays"] = partial(microseconds, partial(grains, short, length, how))
        tasks["node, lists"] = partial(microseconds, partial(packed, lists, length, how))
        tasks["node, arrays"] = partial(microseconds, partial(packed, arrays, length, how))
        figures = interleave(tasks, ROUNDS)
        for task, found in figures.items():
            own = figures["node, arrays" if "arrays" in task else "node, lists"]
            times = 1.0 if task.startswith("node") else median_ratio(found, own)
            rows.append(
                {"documents": name, "how": how, "length": length, "packed by": task, "us a sequence": min(found)}
                | {"node is faster, times": times}
            )
    return rows


def padding(name: str, lists: list[list[int]]) -> list[Row]:
    """Share of padding in all sequences, the last ones included."""
    rows = []
    for length in (512, 2_048):
        short = [np.array(document[:length], dtype=np.int64) for document in lists]
        ways: dict[str, Any] = {"node": (packed, "document_ids", -1)}
        if HAS_GRAIN:
            ways["grain"] = (grains, "input_ids_segment_ids", 0)
        for way, (make, column, pad) in ways.items():
            sequences = [sequence[column] for sequence in make(short, length, "whole")]
            share = float(np.mean([np.mean(sequence == pad) for sequence in sequences]))
            rows.append({"documents": name, "length": length, "packed by": way, "sequences": len(sequences)})
            rows[-1]["padding, %"] = 100 * share
    return rows


def held_tokens(documents: Iterable[list[int]], length: int) -> int:
    """The most bytes, as JSON, of the list of tokens that the plain loop would save behind a sequence."""
    held: list[int] = []
    most = count = 0
    for document in documents:
        held.extend(document)
        while len(held) > length:
            held = held[length + 1 :]
            count += 1
            if count % 31 == 0:
                most = max(most, len(json.dumps(held, separators=(",", ":"))))
    return most


def states(name: str, lists: list[list[int]]) -> list[Row]:
    """Bytes of a state as JSON, and what a resume reads again."""
    rows = []
    for length, how in itertools.product((2_048, 8_192), ("split", "whole")):
        source = Documents(lists)
        node: Any = DocumentPacker(source, packing_of(how, length))
        node.reset()
        sizes, again, took = [], [], []
        while node.skip(31) == 31:
            state = json.loads(json.dumps(node.state_dict()))
            sizes.append(len(json.dumps(state, separators=(",", ":"))))
            source.num_read = 0
            began = time.process_time()
            fresh: Any = DocumentPacker(source_again := Documents(lists), packing_of(how, length))
            fresh.reset(state)
            took.append(time.process_time() - began)
            again.append(source_again.num_read)
        rows.append(
            {"documents": name, "how": how, "length": length, "states": len(sizes), "bytes, most": max(sizes)}
            | {
                "documents read again, most": max(again),
                "ms, most": 1e3 * max(took),
                "bytes of the loop's list, most": held_tokens(lists, length),
            }
        )
    return rows


def main() -> None:
    """Measure, print and write the result."""
    speeds: list[Row] = []
    paddings: list[Row] = []
    kept: list[Row] = []
    for name in ("WikiText", "log-normal"):
        lists = texts(name)
        speeds += speed(name, lists)
        paddings += padding(name, lists)
        kept += states(name, lists)
    of = {way: [row["node is faster, times"] for row in speeds if row["packed by"] == way] for way in WAYS}
    targets = [
        target(f"node against the {way}, least of all, times", min(found), at_least=1.5)
        for way, found in of.items()
        if found
    ]
    targets.append(target("state of a node, most, bytes", max(row["bytes, most"] for row in kept), at_most=300))
    report("packing_streams", CLAIM, {"Speed": speeds, "Padding, whole": paddings, "States and resumes": kept}, targets)


WAYS = ("loop, positions", "loop, tokens alone", "grain, arrays")

if __name__ == "__main__":
    main()
