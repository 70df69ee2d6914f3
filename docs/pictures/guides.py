"""Draws the pictures of the guides with what the library computes: ``python docs/pictures/guides.py [folder]``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    SLATE,
    TEAL,
    box,
    canvas,
    cut,
    draw_all,
    label,
    legend,
    row,
)
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import (
    MixtureBatchSampler,
    PackedDataset,
    Packing,
    RoundRobinBatchSampler,
    StatefulLoader,
    patch_dataloader,
)
from lightning_stateful.user_samplers.user_sampler import Tail

NEWS, CODE = 96, 20  # samples of each dataset


def draw_mixtures() -> Figure:
    """Whose batch each step of an epoch is, by stop rule and by weights."""
    sizes, batch_size = {"news": NEWS, "code": CODE}, {"news": 8, "code": 4}
    samplers = {
        'round robin, stop="all_exhausted": every sample once': RoundRobinBatchSampler(sizes, batch_size),
        'round robin, stop="first_exhausted": until code has no batch for its turn': RoundRobinBatchSampler(
            sizes, batch_size, stop="first_exhausted"
        ),
        'round robin, stop="cycle": code starts over until news has been served once': RoundRobinBatchSampler(
            sizes, batch_size, stop="cycle"
        ),
        "mixture, weights 0.7 and 0.3: 7 and 3 batches in every period of 10": MixtureBatchSampler(
            sizes, 4, weights={"news": 0.7, "code": 0.3}, num_steps=20
        ),
    }
    figure, axes = canvas(25, 11.6)
    for number, (title, sampler) in enumerate(samplers.items()):
        top, seen = 0.2 + 2.6 * number, {NEWS: 0, CODE: 0}
        label(axes, 0.3, top + 0.4, title)
        cells = []
        for batch in sampler:
            source = NEWS if batch[0] < NEWS else CODE
            seen[source] += 1
            cells.append((BLUE if source == NEWS else ORANGE, seen[source]))
        row(axes, 0.2, top + 0.9, cells)
    for period in range(2):
        box(axes, 0.1 + 10 * period, top + 0.8, GRAY, width=10.1, height=1.2, outline=True)
    legend(axes, 0.3, 10.6, [(BLUE, "news, 96 samples"), (ORANGE, "code, 20 samples")], step=6.5)
    label(axes, 13.8, 10.97, "a cell is a step; its number counts batches")
    return figure


def draw_packing() -> Figure:
    """Documents, and the sequences that both ways make of them."""
    colors = (BLUE, ORANGE, GREEN, PURPLE, TEAL, PINK, SLATE, RED)
    sizes, scale = [9, 5, 14, 3, 7, 11, 4, 9], 0.68
    documents = [[1] * size for size in sizes]
    figure, axes = canvas(25, 11)

    def draw(x: float, y: float, document: int, num_tokens: int) -> None:
        box(axes, x, y, colors[document], "ABCDEFGH"[document], width=num_tokens * scale)

    label(axes, 0.3, 0.6, f"{len(sizes)} documents of {min(sizes)} to {max(sizes)} tokens", bold=True)
    x, y = 0.2, 1.1
    for document, size in enumerate(sizes):
        if x + size * scale > 24.5:
            x, y = 0.2, y + 1.1
        draw(x, y, document, size)
        x += size * scale + 0.2
    for left, how, title in ((0.2, "split", "joined and cut"), (13.2, "whole", "put together whole")):
        packing = Packing(16, how=how)
        packed = PackedDataset(documents, lengths=sizes, packing=packing, seed=3)
        label(axes, left + 0.1, 4.4, f'how="{how}": {title}', bold=True)
        for sequence in range(len(packed)):
            x, y = left, 4.9 + 1.1 * sequence
            for part in packed.parts(sequence):
                draw(x, y, part.document, part.end - part.first)
                x += (part.end - part.first) * scale
            if (rest := left + 16 * scale - x) > 0.1:
                box(axes, x, y, GRAY, "padding" if rest > 2.5 else "", width=rest, outline=True)
    label(axes, 0.3, 10.5, "a row is a sequence of 16 tokens; a dashed box is padding")
    return figure


class Yields(Sampler[Any]):
    """Yields what it is given, and knows nothing of ranks."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


BATCHES, SAMPLES = [[number] for number in range(1, 9)], list(range(1, 17))


def loaders_of(num_ranks: int, state: dict[str, Any] | None = None, **options: Any) -> list[StatefulLoader]:
    """The loaders of all ranks, where a state says."""
    loaders = []
    for rank in range(num_ranks):
        how = {"num_replicas": num_ranks, "rank": rank, "tail": options.get("tail")}
        by = {key: option for key, option in options.items() if key != "tail"}
        loaders.append(patch_dataloader(DataLoader(range(100), **by), **how))
        if state is not None:
            loaders[-1].load_state_dict(state)
    return loaders


def draw_steps(
    axes: Axes, x: float, y: float, steps: Iterable[tuple[Any, ...]], *, seen: set[int], width: int = 1
) -> None:
    """A row for each rank, a column for each step; what came before is red."""
    step_width = width if width == 1 else width + 0.2
    for number, step in enumerate(steps):
        for rank, batch in enumerate(step):
            for position, sample in enumerate(batch.tolist()):
                color = RED if sample in seen else BLUE
                box(axes, x + number * step_width + position, y + rank, color, sample)
            seen.update(batch.tolist())


def draw_samplers() -> Figure:
    """Batches and samples of a sampler, dealt out to ranks, and the rest of them to others."""
    figure, axes = canvas(25, 14.8)
    label(axes, 0.3, 0.6, "a batch sampler yields 8 batches", bold=True)
    row(axes, 0.2, 1.1, [(BLUE, number) for (number,) in BATCHES])
    for x, title, tail in ((0.2, 'on 3 ranks, "split" or "pad"', "split"), (8.6, 'on 3 ranks, "drop"', "drop")):
        label(axes, x + 0.1, 2.8, title)
        steps = zip(*loaders_of(3, batch_sampler=Yields(BATCHES), tail=tail), strict=True)
        draw_steps(axes, x, 3.3, steps, seen=set())
    label(axes, 17.1, 2.8, "stopped on 3 ranks, resumed on 2")
    loaders, seen = loaders_of(3, batch_sampler=Yields(BATCHES)), set[int]()
    draw_steps(axes, 17, 3.3, islice(zip(*loaders, strict=True), 1), seen=seen)
    cut(axes, 18.15, 3.3, 6.3, "")
    others = loaders_of(2, loaders[0].state_dict(), batch_sampler=Yields(BATCHES))
    draw_steps(axes, 18.3, 3.3, zip(*others, strict=True), seen=seen)
    label(axes, 0.3, 7.4, "a sampler yields 16 samples, batch_size=2", bold=True)
    row(axes, 0.2, 7.9, [(BLUE, sample) for sample in SAMPLES])
    for number, tail in enumerate(get_args(Tail)):
        x = 0.2 + 8.4 * number
        label(axes, x + 0.1, 9.6, f'on 3 ranks, "{tail}"')
        steps = zip(*loaders_of(3, sampler=Yields(SAMPLES), batch_size=2, tail=tail), strict=True)
        draw_steps(axes, x, 10.1, steps, seen=set(), width=2)
    legend(axes, 0.3, 13.8, [(RED, "again, so that ranks stay in step")])
    label(axes, 12, 14.17, "a row is a rank, a column a step")
    return figure


if __name__ == "__main__":
    draw_all({"mixtures.svg": draw_mixtures, "packing.svg": draw_packing, "samplers.svg": draw_samplers})
