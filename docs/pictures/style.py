"""The look of the pictures in these pages.

A picture is an SVG file with a transparent background. All colours have the same luminance (0.195): text in them, on
them (white) and beside them is readable on white and on dark pages, so that one file serves both.

A script beside this file draws the pictures of one or several pages, with data that the library has computed::

    python docs/pictures/guides.py

Coordinates are cells: x goes to the right, y goes down, and a cell is ``CELL`` inches wide and high. A page shows up
to 25 cells at their full size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

GRAY, SLATE, BLUE, RED = "#7a7a7a", "#717b8a", "#2f7bd3", "#d34d43"
GREEN, ORANGE, PURPLE, TEAL, PINK = "#238b57", "#b9640f", "#9463cb", "#1a8791", "#cb4b8b"
TEXT = GRAY
CELL = 0.3  # inches
FOLDER = Path(__file__).parent

mpl.rcParams.update(
    {
        "svg.hashsalt": "lightning-stateful",  # the same ids in every run
        "svg.fonttype": "path",  # the same letters everywhere
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": TEXT,
        "axes.edgecolor": TEXT,
        "axes.labelcolor": TEXT,
        "axes.titlecolor": TEXT,
        "axes.titlesize": 10,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` cells without axes; y goes down."""
    figure = Figure(figsize=(width * CELL, height * CELL))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, color: str, text: object = "", *, width: float = 1, height: float = 1,
    outline: bool = False, size: float = 8,
) -> None:  # fmt: skip
    """A filled box with white text, or with ``outline=True`` an empty one, dashed, with coloured text."""
    gap = 0.06
    axes.add_patch(
        FancyBboxPatch(
            (x + gap, y + gap),
            width - 2 * gap,
            height - 2 * gap,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="none" if outline else color,
            edgecolor=color,
            linewidth=1,
            linestyle=(0, (2, 2)) if outline else "-",
        )
    )
    ink = color if outline else "white"
    axes.text(x + width / 2, y + height / 2 + 0.03, str(text), ha="center", va="center", color=ink, size=size)


def row(axes: Axes, x: float, y: float, cells: Sequence[tuple[str, object]], *, outline: bool = False) -> None:
    """Boxes side by side; each is a (colour, text)."""
    for position, (color, text) in enumerate(cells):
        box(axes, x + position, y, color, text, outline=outline)


def label(
    axes: Axes, x: float, y: float, text: str, *, align: str = "left", color: str = TEXT, bold: bool = False,
    size: float = 9,
) -> None:  # fmt: skip
    """Text whose vertical middle is ``y``; ``align`` is ``"left"``, ``"center"`` or ``"right"``."""
    axes.text(x, y, text, ha=align, va="center", color=color, size=size, weight="bold" if bold else "normal")


def legend(axes: Axes, x: float, y: float, entries: Sequence[tuple[str, str]], *, step: float = 5) -> None:
    """Small boxes with their meaning, side by side, ``step`` cells apart; each is a (colour, meaning)."""
    for position, (color, meaning) in enumerate(entries):
        box(axes, x + position * step, y, color, width=0.7, height=0.7)
        label(axes, x + position * step + 0.9, y + 0.37, meaning)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = TEXT) -> None:
    """A thin arrow from ``start`` to ``end``."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1, "shrinkA": 0, "shrinkB": 0})


def cut(axes: Axes, x: float, top: float, bottom: float, text: str, *, color: str = RED) -> None:
    """A dashed vertical line with text above it: where a run stops."""
    axes.plot([x, x], [top, bottom], color=color, lw=1.2, ls=(0, (3, 2)))
    label(axes, x, top - 0.45, text, align="center", color=color)


def save(figure: Figure, name: str) -> None:
    """Write ``name`` beside this file, the same bytes in every run; with a folder as argument of the script, there."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    figure.savefig(folder / name, transparent=True, metadata={"Date": None, "Creator": None})


def draw_all(pictures: dict[str, Callable[[], Figure]]) -> None:
    """Draw and save pictures: file names, and the functions that draw them."""
    for name, draw in pictures.items():
        save(draw(), name)
