"""Draws steps, resumes and shards with what the library computes: ``python docs/pictures/resumes.py [folder]``."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GRAY, GREEN, ORANGE, PINK, PURPLE, RED, TEAL, box, canvas, cut, draw_all, label, legend

from lightning_stateful import ChunkedDataset
from lightning_stateful.core import Progress, SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.streams.assignment import SlotSlice
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, WorkerSlot

RANKS = [BLUE, ORANGE, GREEN, PURPLE]
STEPS = [BLUE, ORANGE, GREEN, PURPLE, PINK, TEAL]


def draw_tail() -> Figure:
    """The batches of four ranks in the steps of three epochs."""
    figure, axes = canvas(25, 13.8)
    cases = [
        (26, 4, 2.3, 0.6, "26 samples, batch_size=4", "The last step is split."),
        (17, 4, 14.5, 0.6, "17 samples, batch_size=4", "Step 0 leaves 4 samples, one a rank."),
        (6, 1, 2.3, 7.7, "6 samples, batch_size=1", "2 samples are left for 4 ranks."),
    ]
    for number, batch_size, left, top, title, text in cases:
        label(axes, left, top, title, bold=True)
        label(axes, left, top + 5.9, text)
        for rank in range(4):
            label(axes, left - 0.2, top + 2 + rank, f"rank {rank}", align="right")
        plan = SampleBatchOrder(samples=SequentialOrder(number), batch_size=batch_size).plan(0, num_replicas=4)
        seen: set[int] = set()
        for step in range(plan.num_steps):
            x = left + step * (batch_size + 1)
            label(axes, x, top + 1, f"step {step}")
            for rank in range(4):
                _, batch = next(iter(plan.batches(rank, step)))
                for position, sample in enumerate(batch):
                    again = sample in seen
                    box(axes, x + position, top + 1.5 + rank, RED if again else RANKS[rank], sample, outline=again)
                    seen.add(sample)
    label(axes, 9.5, 9.7, "A number is a place in the order of the epoch.")
    label(axes, 9.5, 10.7, "A row of boxes is the batch of one rank in one step.")
    label(axes, 9.5, 11.7, "Dashed: trained on a second time.", color=RED)
    return figure


def draw_elastic() -> Figure:
    """An epoch of 40 samples on 4 ranks, and its rest on 2 and on 3."""
    figure, axes = canvas(25, 16.6)
    whole = _shuffled(batch_size=2)
    color_of: dict[int, str] = {}
    plan = whole.plan(0, num_replicas=4)
    for step in range(plan.num_steps):
        for rank in range(4):
            color_of.update(dict.fromkeys(next(iter(plan.batches(rank, step)))[1], STEPS[step]))
    stop = 2
    progress = plan.progress_after(stop)
    label(axes, 2.2, 0.5, "not stopped: 4 ranks x 2 samples", bold=True)
    _steps(axes, 2.2, 1.5, whole, 4, None, color_of)
    cut(axes, 2.2 + stop * 2.6 - 0.3, 1.9, 6.1, f"checkpoint: {progress.consumed} samples trained on")
    for top, ranks, batch_size, title in [
        (7.3, 2, 4, "the rest on 2 ranks x 4: ranks x batch size stays, so each step has the same samples"),
        (10.9, 3, 2, "the rest on 3 ranks x 2: each sample once, in other steps"),
    ]:
        label(axes, 2.2, top, title, bold=True)
        left = 2.2 + stop * 2.6
        _steps(axes, left, top + 0.2, _shuffled(batch_size), ranks, progress, color_of)
    label(axes, 2.2, 15.9, "A colour is a step of the run that is not stopped; a number is a sample.")
    return figure


def _shuffled(batch_size: int) -> SampleBatchOrder:
    return SampleBatchOrder(samples=ShuffledOrder(40, seed=0), batch_size=batch_size)


def _steps(axes: Axes, left: float, top: float, order: SampleBatchOrder, ranks: int, progress: Progress | None,
           color_of: dict[int, str]) -> None:  # fmt: skip
    plan = order.plan(0, ranks, progress)
    for rank in range(ranks):
        label(axes, left - 0.2, top + 1 + rank, f"rank {rank}", align="right")
    for step in range(plan.num_steps):
        x = left + step * (order.batch_size + 0.6)
        for rank in range(ranks):
            _, batch = next(iter(plan.batches(rank, step)))
            for position, sample in enumerate(batch):
                box(axes, x + position, top + 0.5 + rank, color_of[sample], sample)


SIZE, SHARDS = 8, 15


def draw_shards() -> Figure:
    """The shards that worker slots read, before and after a resume on other ranks."""
    figure, axes = canvas(25, 15)
    stream = ChunkedDataset(
        range(SHARDS), lambda chunk: [[chunk, number] for number in range(SIZE)], buffer_size=0, seed=0
    )
    config = stream.config(batch_size=4).seeded(0)
    begun = StreamState.beginning(config, 0, 2, 2)
    at, served = _after(begun, steps=6)
    label(axes, 0.3, 0.6, f"{SHARDS} shards of {SIZE} samples on 2 ranks with 2 workers each", bold=True)
    _slots(axes, 1.2, begun, served)
    label(axes, 0.3, 7.2, "stopped after 6 steps: the rest of the epoch on 3 ranks without workers", bold=True)
    _slots(axes, 7.8, at.on(3, 1), served)
    entries = [
        (BLUE, "whole shard of one worker slot"),
        (ORANGE, "shard that ranks read together"),
        (GRAY, "trained on by step 6"),
    ]
    legend(axes, 0.3, 12.9, entries, step=8.6)
    label(
        axes,
        0.3,
        14.6,
        "A box is a shard with its number. What is read together is read by each, which keeps its share.",
    )
    return figure


def _after(state: StreamState, steps: int) -> tuple[StreamState, dict[int, int]]:
    """The state after steps of all ranks, and how many samples of each shard were trained on by then."""
    slots = [WorkerSlot(state.config, state.task(slot)) for slot in range(state.num_slots)]
    served = dict.fromkeys(range(SHARDS), 0)
    for step in range(steps):
        for rank in range(state.num_replicas):
            slot = slots[step % state.num_workers * state.num_replicas + rank]
            for chunk, _ in next(slot):
                served[chunk] += 1
    return state.at(tuple(slot.state() for slot in slots), steps), served


def _slots(axes: Axes, top: float, state: StreamState, served: dict[int, int]) -> None:
    per_rank = [(rank, worker) for rank in range(state.num_replicas) for worker in range(state.num_workers)]
    for row, (rank, worker) in enumerate(per_rank):
        y = top + row * 1.35
        name = f"rank {rank}, worker {worker}" if state.num_workers > 1 else f"rank {rank}"
        label(axes, 0.3, y + 0.5, name)
        x = 5.0
        slices: list[SlotSlice] = state.slices[ALONE][worker * state.num_replicas + rank]
        for piece in slices:
            for shard in piece.of.shards:
                color = BLUE if piece.is_whole else ORANGE
                part = served[shard] / SIZE * 2.4
                box(axes, x, y, color, f"{shard}" if not part else "", width=2.4)
                if part:
                    box(axes, x, y, GRAY, width=part)
                    label(axes, x + 1.2, y + 0.53, f"{shard}", align="center", color="white", size=8)
                x += 2.5


if __name__ == "__main__":
    draw_all({"tail.svg": draw_tail, "elastic.svg": draw_elastic, "shards.svg": draw_shards})
