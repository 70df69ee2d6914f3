"""Draws the pictures of the guides with what the library computes: ``python docs/pictures/guides.py [folder]``."""

from __future__ import annotations

from matplotlib.figure import Figure
from style import BLUE, GRAY, GREEN, ORANGE, PINK, PURPLE, RED, SLATE, TEAL, box, canvas, draw_all, label, legend, row

from lightning_stateful import MixtureBatchSampler, PackedDataset, Packing, RoundRobinBatchSampler

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


if __name__ == "__main__":
    draw_all({"mixtures.svg": draw_mixtures, "packing.svg": draw_packing})
