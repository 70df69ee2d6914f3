"""Streams of numbered samples, and ranks and workers that read them together without a loader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_stateful.streams.source import Mixing, Source
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig, WorkerSlot
from support.node_cases import NumberedShards

Steps = list[list[list[Any]]]


def source(sizes: Sequence[int], *, of: Mapping[str, Any] | None = None, **options: Any) -> Source:
    """A source of numbered samples; ``of`` are options of its shards."""
    return Source(shards=NumberedShards(sizes, **(of or {})), **options)


def alone(sizes: Sequence[int], *, batching: Mapping[str, Any] | None = None, **options: Any) -> StreamConfig:
    """A stream of one source; ``batching`` are options of the configuration."""
    return StreamConfig(sources={ALONE: source(sizes, **options)}, **{"batch_size": 2, **(batching or {})})


def mixture(sources: Mapping[str, Any], *, batching: Mapping[str, Any] | None = None, **options: Any) -> StreamConfig:
    """A mixture of sources, or of sizes of their shards, whose samples begin with the name of their source."""
    made = {
        name: replace(one if isinstance(one, Source) else source(one, of={"label": name}), path=name)
        for name, one in sources.items()
    }
    how = {"weights": None, "temperature": 1, "by": "batch", "stop": "all_exhausted", "seed": 0, **options}
    return StreamConfig(sources=made, mixing=Mixing.of(list(made), **how), **{"batch_size": 1, **(batching or {})})


def slot_of(config: StreamConfig, slot: int = 0, ranks: int = 1, workers: int = 1, **how: Any) -> WorkerSlot:
    """A worker slot at the beginning of a pass, or at a ``state``."""
    begun = StreamState.beginning(config, how.get("epoch", 0), ranks, workers)
    return WorkerSlot(config, begun.task(slot, how.get("state")))


def round_trip(state: StreamState) -> StreamState:
    """A state as a checkpoint would bring it back."""
    return StreamState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False)), state.config)


def take(state: StreamState, *batches: int | None) -> tuple[list[Any], StreamState]:
    """So many batches of each slot, or all of them: the samples, and where that leads."""
    slots = [WorkerSlot(state.config, state.task(slot)) for slot in range(state.num_slots)]
    served: list[Any] = []
    for slot, number in zip(slots, batches, strict=True):
        count = 0
        while (number is None or count < number) and (batch := next(slot, None)) is not None:
            served += batch
            count += 1
    states = tuple(slot.state() for slot in slots)
    for slot in slots:
        slot.close()
    return served, round_trip(state.at(states, state.steps + 1))


def serve(state: StreamState, most: int | None = None) -> tuple[Steps, StreamState, bool]:
    """Take steps of all ranks as they do together: the batches of each, where that leads, and whether it ended."""
    ranks = state.num_replicas
    slots = [WorkerSlot(state.config, state.task(slot)) for slot in range(state.num_slots)]
    states = [slot.state() for slot in slots]
    turns = [state.workers_in_turn(rank) for rank in range(ranks)]
    steps: Steps = []
    while most is None or len(steps) < most:
        step = []
        for rank in range(ranks):
            while turns[rank]:
                worker = turns[rank].pop(0)
                number = worker * ranks + rank
                batch = next(slots[number], None)
                if batch is not None:
                    step.append((number, batch))
                    turns[rank].append(worker)
                    break
                states[number] = slots[number].state()
        if len(step) < ranks:
            break
        for number, _ in step:
            states[number] = slots[number].state()
        steps.append([batch for _, batch in step])
    ended = most is None or len(steps) < most
    for slot in slots:
        slot.close()
    return steps, round_trip(state.at(tuple(states), state.steps + len(steps))), ended


def serve_epoch(state: StreamState, most: int | None = None) -> tuple[Steps, StreamState, bool]:
    """All steps of an epoch, in which what is left is shared anew."""
    steps, state, ended = serve(state, most)
    while ended and (shared := state.shared_anew()) is not None:
        more, state, ended = serve(round_trip(shared), None if most is None else most - len(steps))
        steps += more
    return steps, state, ended


def serve_rest(state: StreamState) -> tuple[list[Any], StreamState]:
    """All samples that are left of a pass, those of batches that are not full too, and where that leads."""
    mixing = state.config.mixing
    every = replace(state.config, drop_last=False, mixing=mixing and replace(mixing, stop="all_exhausted"))
    steps, end, _ = serve_epoch(replace(state, config=every).on(state.num_replicas + 1, 1).on(1, 1))
    return flat(steps), end


def all_samples(state: StreamState) -> list[Any]:
    """The samples of all passes that a state has begun, of all sources."""
    found: list[Any] = []
    for name, assignment in state.assignments.items():
        shards: Any = state.config.sources[name].shards
        found += [sample for epoch in range(assignment.epoch + 1) for sample in shards.all(epoch)]
    return found


def flat(steps: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """The samples of all steps."""
    return [sample for step in steps for batch in step for sample in batch]
