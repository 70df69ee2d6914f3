"""Bytes of a loader's state and the time it takes to ask for it, beside torchdata's StatefulDataLoader."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.measure import Row, interleave, report, seconds, short, target
from lightning_stateful.loaders import StatefulLoader

CLAIM = (
    "A state is plain data under 1 KB, whatever the size of the dataset and the number of workers, and is made when it "
    "is asked for. (torchdata with workers makes it at every step and hands out what it holds.)"
)
BATCH = 16
SERVED = 5
CALLS = 200
ROUNDS = 7
# torchdata's shuffle holds a list of all indices: 1e9 of them do not fit into memory.
SUBJECTS = [
    ("StatefulDataLoader", StatefulDataLoader, 10**3, 0),
    ("StatefulDataLoader", StatefulDataLoader, 10**3, 2),
    ("StatefulLoader", StatefulLoader, 10**3, 0),
    ("StatefulLoader", StatefulLoader, 10**3, 2),
    ("StatefulLoader", StatefulLoader, 10**9, 0),
    ("StatefulLoader", StatefulLoader, 10**9, 2),
]


def json_bytes(state: dict[str, Any]) -> int:
    """Length as compact JSON, with a tensor written as the list of its numbers."""
    return len(json.dumps(state, separators=(",", ":"), default=lambda tensor: tensor.tolist()))


def torch_bytes(state: dict[str, Any]) -> int:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.tell()


def is_plain(state: dict[str, Any]) -> bool:
    try:
        json.dumps(state)
    except TypeError:
        return False
    return True


def ask(loader: Any) -> Callable[[], float]:
    """Seconds of one ``state_dict()``, over many calls."""

    def run() -> None:
        for _ in range(CALLS):
            loader.state_dict()

    return lambda: seconds(run) / CALLS


def loader_states() -> list[Row]:
    running = []
    for name, kind, length, num_workers in SUBJECTS:
        loader: Any = kind(range(length), batch_size=BATCH, shuffle=True, num_workers=num_workers)
        iterator = iter(loader)
        for _ in itertools.islice(iterator, SERVED):
            pass
        running.append((name, length, num_workers, loader, iterator))
    figures = interleave({str(i): ask(loader) for i, (*_, loader, _) in enumerate(running)}, ROUNDS)
    rows: list[Row] = []
    for i, (name, length, num_workers, loader, _) in enumerate(running):
        state = loader.state_dict()
        rows.append(
            {
                "loader": name,
                "samples": short(length),
                "workers": num_workers,
                "bytes as JSON": json_bytes(state),
                "bytes by torch.save": torch_bytes(state),
                "plain data": is_plain(state),
                "us for state_dict()": min(figures[str(i)]) * 1e6,
            }
        )
    return rows


def main() -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    rows = loader_states()
    ours = [row for row in rows if row["loader"] == "StatefulLoader"]
    targets = [target("largest state as JSON, bytes", max(row["bytes as JSON"] for row in ours), at_most=1024)]
    tables = {f"State of a shuffled loader after {SERVED} batches of {BATCH}": rows}
    report("checkpoint", CLAIM, tables, targets)


if __name__ == "__main__":
    main()
