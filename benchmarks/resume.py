"""From a fresh loader and a state to the first batch, after 1e3 and 1e6 batches, beside torchdata's loader."""

from __future__ import annotations

import copy
import itertools
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.measure import Row, in_child, interleave, report, seconds, target, with_memory
from lightning_stateful.core import Progress
from lightning_stateful.loaders import StatefulLoader

CLAIM = "A resume costs what a start costs, wherever the run was stopped."
LENGTH = 20_000_000
BATCH = 16
STOPS = {"fresh start": 0, "after 1e3 batches": 10**3, "after 1e6 batches": 10**6}
NAMES = {"torchdata": "StatefulDataLoader", "ours": "StatefulLoader"}
ROUNDS = {"torchdata": 3, "ours": 60}


def build(kind: str, length: int = LENGTH) -> Any:
    if kind == "ours":
        return StatefulLoader(range(length), batch_size=BATCH, shuffle=True, seed=1)
    generator = torch.Generator().manual_seed(1)
    return StatefulDataLoader(range(length), batch_size=BATCH, shuffle=True, generator=generator)


def moved(kind: str, state: dict[str, Any], batches: int) -> dict[str, Any]:
    """A state of the loader as it is after ``batches`` batches, made from one of an earlier place in the epoch.

    A million batches are not iterated: torchdata's state counts batches and samples, and these counters are set. That
    it would write the same itself is checked by :func:`check`.
    """
    if kind == "ours":
        ours: dict[str, Any] = build("ours").tracker.state_dict(Progress(consumed=batches * BATCH))
        return ours
    state = copy.deepcopy(state)
    state["_sampler_iter_yielded"] = state["_num_yielded"] = batches
    sampler = state["_sampler_iter_state"]
    sampler["samples_yielded"] = sampler["sampler_iter_state"]["yielded"] = batches * BATCH
    return state


def iterated(kind: str, batches: int, length: int = LENGTH) -> tuple[dict[str, Any], Any]:
    """The state after ``batches`` batches that were really served, and the batch that follows."""
    loader = build(kind, length)
    iterator = iter(loader)
    for _ in itertools.islice(iterator, batches):
        pass
    return loader.state_dict(), next(iterator)


def first_batch(kind: str, state: dict[str, Any] | None) -> tuple[torch.Tensor, Any]:
    """The first batch of a fresh loader, and the iterator behind it."""
    loader = build(kind)
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    return next(iterator), iterator


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors in them byte for byte."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def check(kind: str) -> dict[str, Any]:
    """Check :func:`moved` against states really iterated to; a state of the full dataset after 1e3 batches."""
    if kind == "torchdata":
        early, late = (iterated(kind, batches, 200_000)[0] for batches in (5, 10_000))
        assert equal(moved(kind, early, 10_000), late)
    state, following = iterated(kind, 1000)
    assert equal(moved(kind, state, 1000), state)
    assert torch.equal(first_batch(kind, state)[0], following)
    return state


def memory_of(kind: str, state: dict[str, Any] | None) -> float:
    """Peak extra MB to the first batch; for a child process."""
    warnings.simplefilter("ignore")
    return float(with_memory(lambda: first_batch(kind, state))["MB"])


def measure(kind: str, states: dict[str, dict[str, Any] | None]) -> dict[str, list[float]]:
    def timed(stop: str) -> Callable[[], float]:
        return lambda: seconds(lambda: first_batch(kind, states[stop]))

    return interleave({stop: timed(stop) for stop in STOPS}, ROUNDS[kind])


def main() -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    states: dict[str, dict[str, dict[str, Any] | None]] = {}
    for kind in NAMES:
        state = check(kind)
        states[kind] = {stop: moved(kind, state, batches) if batches else None for stop, batches in STOPS.items()}
    # Ours takes milliseconds and the other seconds: ours is measured before and after the other.
    before = measure("ours", states["ours"])
    figures = {"torchdata": measure("torchdata", states["torchdata"])}
    after = measure("ours", states["ours"])
    figures["ours"] = {stop: before[stop] + after[stop] for stop in STOPS}

    best = {kind: {stop: min(figures[kind][stop]) for stop in STOPS} for kind in NAMES}
    rows: list[Row] = [
        {
            "resume": stop,
            "loader": name,
            "ms, best": best[kind][stop] * 1e3,
            "ms, median": statistics.median(figures[kind][stop]) * 1e3,
            "of a fresh start": best[kind][stop] / best[kind]["fresh start"],
            "times faster": best["torchdata"][stop] / best[kind][stop],
            "extra MB": in_child(memory_of, kind, states[kind][stop]),
        }
        for stop in STOPS
        for kind, name in NAMES.items()
    ]
    last = "after 1e6 batches"
    targets = [
        target(
            "a resume after 1e6 batches over a fresh start",
            best["ours"][last] / best["ours"]["fresh start"],
            at_most=1.2,
        ),
        *(
            target(
                f"times faster than StatefulDataLoader, {stop}",
                best["torchdata"][stop] / best["ours"][stop],
                at_least=20,
            )
            for stop in STOPS
            if STOPS[stop]
        ),
    ]
    title = f"Fresh loader and load_state_dict to the first batch of {BATCH}, {LENGTH:,} shuffled samples, no workers"
    report("resume", CLAIM, {title: rows}, targets)


if __name__ == "__main__":
    main()
