"""Draws the three ideas with what runs show: ``python docs/pictures/ideas.py [folder]``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from matplotlib.figure import Figure
from style import BLUE, GRAY, GREEN, ORANGE, RED, box, canvas, cut, draw_all, label, legend
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stateful import StatefulLoader
from lightning_stateful.core import ShuffledOrder

EPOCHS, LENGTH, CONSUMED = 3, 16, 10


def draw_order() -> Figure:
    """The order of three epochs, and a progress in the second of them."""
    figure, axes = canvas(21, 8.4)
    order = ShuffledOrder(LENGTH, seed=0)
    label(axes, 0.3, 0.5, "the sample at each place of each epoch, computed from seed, epoch and place", bold=True)
    for epoch in range(EPOCHS):
        y = 1.4 + 1.8 * epoch
        label(axes, 3.3, y + 0.5, f"epoch {epoch}", align="right")
        for place, sample in enumerate(order.take(np.arange(LENGTH), epoch, 0).tolist()):
            trained = (epoch, place) < (1, CONSUMED)
            box(axes, 3.7 + place, y, BLUE if trained else GRAY, sample, outline=not trained)
    cut(axes, 3.7 + CONSUMED, 3.0, 4.4, "")
    label(axes, 14.0, 2.8, f"progress: epoch 1, {CONSUMED} consumed", color=RED)
    legend(axes, 0.3, 7.2, [(BLUE, "trained on")], step=6)
    label(axes, 5.7, 7.57, "dashed: comes next, on any number of ranks", color=GRAY)
    return figure


class Counted(Sampler[int]):
    """The numbers from 0 on; counts what it has given."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(64):
            self.given += 1
            yield number


def draw_consumed() -> Figure:
    """Batches at the end of a step: trained on, read ahead by workers, and not asked for yet."""
    trained, batch_size = 7, 4
    sampler = Counted()
    loader = DataLoader(list(range(64)), batch_size, sampler=sampler, num_workers=2)
    stateful = StatefulLoader(list(range(64)), batch_size=batch_size, num_workers=2)
    for _ in itertools.islice(zip(loader, stateful, strict=True), trained):
        pass
    counted, consumed = sampler.given // batch_size, stateful.state_dict()["progress"]["consumed"] // batch_size
    figure, axes = canvas(21, 6.6)
    label(axes, 0.3, 0.5, f"batches of an epoch when step {trained} is done, with 2 workers", bold=True)
    for batch in range(16):
        color = BLUE if batch < trained else ORANGE if batch < counted else GRAY
        box(axes, 0.3 + batch * 1.25, 2.7, color, batch, width=1.25, outline=batch >= counted)
    cut(axes, 0.3 + 1.25 * consumed, 2.3, 4, f"our state: {consumed}")
    cut(axes, 0.3 + 1.25 * counted, 2.3, 4, f"a count in the sampler: {counted}", color=ORANGE)
    entries = [(BLUE, "trained on"), (ORANGE, "read ahead, would be lost"), (GRAY, "not asked for yet")]
    legend(axes, 0.3, 5.2, entries, step=6.8)
    return figure


class Drawn(Dataset[str]):
    """Samples that draw a random number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> str:
        return f"{torch.rand(1).item():.3f}"


def drawn(num_workers: int, stop: int | None = None) -> list[str]:
    """The number that the first sample of each batch draws; stopped after ``stop`` batches and resumed."""

    def make(workers: int) -> StatefulLoader:
        return StatefulLoader(Drawn(), batch_size=4, shuffle=True, seed=0, num_workers=workers, collate_fn=list)

    loader = make(num_workers)
    if stop is None:
        return [batch[0] for batch in loader]
    before = [batch[0] for batch in itertools.islice(loader, stop)]
    torch.rand(100)  # whatever else the process has drawn
    resumed = make(0)
    resumed.load_state_dict(loader.state_dict())
    return before + [batch[0] for batch in resumed]


def draw_randomness() -> Figure:
    """What the first sample of each batch draws, in three runs."""
    figure, axes = canvas(22, 7.4)
    label(axes, 0.3, 0.5, "torch.rand(1) in the first sample of each batch of epoch 0", bold=True)
    runs = {"no workers": drawn(0), "3 workers": drawn(3), "2 workers, resumed with none": drawn(2, stop=3)}
    for batch in range(6):
        label(axes, 9.6 + 2 * batch, 1.6, f"batch {batch}", align="center")
    for number, (name, values) in enumerate(runs.items()):
        y = 2.1 + 1.4 * number
        label(axes, 0.3, y + 0.5, name)
        for batch, value in enumerate(values):
            color = GREEN if number == 2 and batch >= 3 else BLUE
            box(axes, 8.6 + 2 * batch, y, color, value, width=2)
    cut(axes, 8.6 + 6, 4.75, 6.1, "")
    label(axes, 0.3, 6.7, "The same numbers in all runs: a batch is seeded by (seed, loader, epoch, batch).")
    return figure


if __name__ == "__main__":
    draw_all({"order.svg": draw_order, "consumed.svg": draw_consumed, "randomness.svg": draw_randomness})
