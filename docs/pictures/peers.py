"""Draws figures beside other packages: ``python docs/pictures/peers.py [folder [results]]``.

The figures are those that ``python -m benchmarks.peers`` has measured, by default ``benchmarks/results/peers.json``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from style import BLUE, GRAY, GREEN, ORANGE, PINK, PURPLE, RED, SLATE, TEAL, TEXT, draw_all

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "peers.json"
# Colour, marker. This package's line is the thick one.
LOOKS = {
    "torch DataLoader": (RED, "o"),
    "torchdata StatefulDataLoader": (ORANGE, "s"),
    "accelerate": (PINK, "^"),
    "grain": (GREEN, "D"),
    "litdata": (PURPLE, "v"),
    "Streaming": (TEAL, "P"),
    "infinibatch": (SLATE, "o"),
    "lhotse": (GREEN, "s"),
    "StatefulLoader": (BLUE, "o"),
    "BucketBatchSampler": (BLUE, "o"),
    "DocumentPacker": (BLUE, "o"),
}
OWN = ("StatefulLoader", "BucketBatchSampler", "DocumentPacker")
LEAST = {"CPU seconds": 1e-4, "MB": 0.1}  # what is below is drawn there


def tables() -> dict[str, list[dict[str, Any]]]:
    """The tables of the results, by title."""
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else FILE
    return {table["title"]: table["rows"] for table in json.loads(file.read_text())["tables"]}


def draw_lines(axes: Axes, title: str, begins: str) -> None:
    """The table whose title begins so, log-log; a row that ends early ends with a cross."""
    rows = next(rows for name, rows in tables().items() if name.startswith(begins))
    unit, along = begins.split(": ")[1].split(", by ")
    heads = [head for head in rows[0] if head != "batches"]
    places = [float(head.replace(",", "")) for head in heads]
    for row in rows:
        own = row["batches"] in OWN
        color, marker = LOOKS[row["batches"]]
        heights = [max(row[head], LEAST[unit]) for head in heads if not isinstance(row[head], str)]
        axes.plot(
            places[: len(heights)], heights, color=color, marker=marker, lw=2.6 if own else 1.1, ms=3.5, zorder=2 + own
        )
        if 0 < len(heights) < len(heads):
            axes.plot(places[len(heights) - 1], heights[-1], color=color, marker="x", ms=9, mew=1.6, zorder=4)
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel=unit)
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.set_xticks(places, heads)
    axes.set_xlim(places[0] / 1.5, places[-1] * 1.5)
    axes.minorticks_off()
    axes.set_title(title, loc="left")
    axes.grid(color=GRAY, alpha=0.25, lw=0.6)


def draw_panels(panels: list[tuple[str, str]]) -> Figure:
    """Panels of lines, each with its title and the beginning of a table's title, above one legend."""
    figure = Figure(figsize=(7.4, 0.8 + 1.4 * len(panels)), layout="constrained")
    for position, (title, begins) in enumerate(panels):
        draw_lines(figure.add_subplot(len(panels) // 2, 2, position + 1), title, begins)
    rows = next(rows for name, rows in tables().items() if name.startswith(panels[0][1]))
    handles = [
        Line2D([], [], color=LOOKS[name][0], marker=LOOKS[name][1], ms=4, lw=2.6 if name in OWN else 1.1, label=name)
        for name in (row["batches"] for row in rows)
    ]
    handles.append(Line2D([], [], color=TEXT, marker="x", ms=8, mew=1.6, lw=0, label="then above 20 s or 2 GB"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def panels_of(kind: str, along: str, *, memory: bool = True) -> list[tuple[str, str]]:
    """Panels of one kind of batches."""
    of = ", each rank" if along == "ranks" else ""
    wanted = {
        "First batch of an epoch": "start: CPU seconds",
        "Resume in the middle": "resume in the middle: CPU seconds",
    }
    if memory:
        wanted |= {"Memory to the first batch": "start: MB", "Memory of a resume": "resume in the middle: MB"}
    return [(title + of, f"{kind}, {begins}, by {along}") for title, begins in wanted.items()]


def draw_lengths() -> Figure:
    """Batches of like lengths, by the numbers of samples and of ranks."""
    return draw_panels(panels_of("like lengths", "samples") + panels_of("like lengths", "ranks", memory=False))


def draw_bars(axes: Axes, title: str, begins: str, column: str) -> None:
    """A column of a table as bars, with their values."""
    rows = next(rows for name, rows in tables().items() if name.startswith(begins))
    names = [next(iter(row.values())) for row in rows]
    values = [row[column] for row in rows]
    bars = axes.barh(names, values, color=[LOOKS[name][0] for name in names], height=0.62)
    axes.bar_label(
        bars, [f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values], padding=3, color=TEXT, fontsize=8.5
    )
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(title, loc="left")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_rates() -> Figure:
    """Throughput, padding and packing."""
    figure = Figure(figsize=(7.4, 5.4), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(5, 3, 2))
    rate, lengths, whole = "M samples/s, best", "like lengths, an epoch", "whole documents"
    draw_bars(figure.add_subplot(grid[0, :]), "Shuffled, million samples a second", "shuffled, an epoch", rate)
    draw_bars(figure.add_subplot(grid[1, 0]), "Like lengths, million samples a second", lengths, rate)
    draw_bars(figure.add_subplot(grid[1, 1]), "Like lengths, % of padding", lengths, "padding, %")
    draw_bars(figure.add_subplot(grid[2, 0]), "Packing, µs a sequence: less is better", whole, "us a sequence, best")
    draw_bars(figure.add_subplot(grid[2, 1]), "Packing, % of padding", whole, "padding, %")
    return figure


if __name__ == "__main__":
    draw_all(
        {
            "peers_samples.svg": lambda: draw_panels(panels_of("shuffled", "samples")),
            "peers_ranks.svg": lambda: draw_panels(panels_of("shuffled", "ranks")),
            "peers_lengths.svg": draw_lengths,
            "peers_rates.svg": draw_rates,
        }
    )
