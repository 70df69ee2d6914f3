"""A page of a ledger: starts, epochs and findings in tables, and a picture of which data came when."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.ledger import Ledger

# Colours that can be told apart on white and on black, also by most people who are colour-blind.
_OF_STARTS = ("#3b82c4", "#d9902f", "#3f9e77", "#9a6fc0", "#8c7a4f")
_LOST, _TWICE, _LINE = "#8a8a8a", "#d93636", "#808080"
_MOST_POINTS = 20_000
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8886; white-space: nowrap; }
td.number, th.number { text-align: right; }
.wrong { border-left: .3rem solid #d93636; padding-left: .8rem; }
.right { border-left: .3rem solid #3f9e77; padding-left: .8rem; }
svg { width: 100%; min-width: 36rem; height: auto; }
code { overflow-wrap: anywhere; }
"""


class _Points(NamedTuple):
    """Items of one loader in the order in which they were trained on: a step of the run, an item, and its colour."""

    steps: list[int]
    items: list[int]
    colours: list[str]


def write_page(ledger: Ledger, path: str | Path) -> None:
    """Write a page of HTML that needs no network, for light and dark screens, wide and narrow ones.

    Args:
        ledger: What was trained on.
        path: The file to write.

    Raises:
        ConfigurationError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    findings = ledger.findings()
    parts = [
        "<h1>What a run was trained on</h1>",
        _verdict([finding.text for finding in findings], ledger.verdict()),
        *(f"<p>{escape(note)}</p>" for note in ledger.notes()),
        "<h2>Starts</h2>",
        _table(
            ("", "start", "ranks", "from epoch", "batch", "batches kept", "lost with their weights"),
            [
                (number, one.header.start, one.header.num_replicas, *one.header.begins, one.num_kept, one.num_lost)
                for number, one in enumerate(ledger.starts, 1)
            ],
        ),
        "<h2>Epochs</h2>",
        _table(("epoch", "items", "distinct", "of", ""), [_cells(row) for row in ledger.epochs()]),
    ]
    for loader in ledger.rows:
        if picture := _picture(ledger, loader):
            name = f" of loader {escape(repr(loader))}" if loader else ""
            parts += [f"<h2>Which samples{name} came when</h2>", f"<p>{_CAPTION}</p>", picture]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>What a run was trained on</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    Path(path).write_text(
        f'<!doctype html><html lang="en"><head>{head}{title}</head>\n<body>\n{body}\n</body></html>\n'
    )


_CAPTION = (
    "Each point is a sample, at the step of the run in which it was trained on; steps are counted over all starts. A "
    "colour is a start. Grey: lost with the weights, because a later start went on before it. Red: trained on twice in "
    "one epoch."
)


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    again = f", pass {row['cycle'] + 1}" if row["cycle"] else ""
    epoch = f"{row['epoch']}{again} of {row['path']}" if row["path"] else f"{row['epoch']}{again}"
    length = "" if row["length"] is None else row["length"]
    return epoch, row["items"], row["distinct"], length, "over" if row["over"] else "not over"


def _verdict(findings: Sequence[str], right: Sequence[str]) -> str:
    if not findings:
        return "".join(f'<p class="right">{escape(text)}</p>' for text in right)
    lines = "".join(f"<li>{escape(text)}</li>" for text in findings)
    return f'<div class="wrong"><p>An uninterrupted run would not have done this:</p><ul>{lines}</ul></div>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    listed = [list(row) for row in rows]
    numeric = [all(isinstance(row[at], int) for row in listed) for at in range(len(titles))]

    def line(cells: Sequence[Any], tag: str) -> str:
        found = ""
        for cell, is_number in zip(cells, numeric, strict=True):
            text = f"{cell:,}" if isinstance(cell, int) else escape(str(cell))
            found += f'<{tag} class="number">{text}</{tag}>' if is_number else f"<{tag}>{text}</{tag}>"
        return f"<tr>{found}</tr>"

    body = "".join(line(row, "td") for row in listed)
    return f'<div class="scroll"><table>{line(titles, "th")}{body}</table></div>'


def _picture(ledger: Ledger, path: str) -> str:
    """A picture of the items over the steps, as SVG; empty for a loader whose items are no numbers."""
    points, borders = _points(ledger, path)
    if not points.items:
        return ""
    figure = _new_figure()
    axis = figure.subplots()
    chosen = np.unique(np.linspace(0, len(points.items) - 1, _MOST_POINTS).astype(np.int64))
    steps, items = np.array(points.steps)[chosen], np.array(points.items)[chosen]
    size = min(max(60_000 / len(chosen), 4), 25)
    axis.scatter(steps, items, c=[points.colours[at] for at in chosen], s=size, linewidths=0, rasterized=True)
    for border in borders[1:]:
        axis.axvline(border - 0.5, color=_LINE, linewidth=0.8, linestyle="--")
    axis.set(xlabel="step of the run (dashed: a resume)", ylabel="index of the sample")
    axis.tick_params(colors=_LINE)
    for part in (axis.xaxis.label, axis.yaxis.label):
        part.set_color(_LINE)
    for spine in axis.spines.values():
        spine.set_color(_LINE)
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, dpi=150)
    text = written.getvalue()
    return f'<div class="scroll">{text[text.index("<svg") :]}</div>'


def _points(ledger: Ledger, path: str) -> tuple[_Points, list[int]]:
    """The items of a loader, and the step of the run at which each start begins."""
    points, borders, at = _Points([], [], []), [], 0
    seen: set[tuple[int, int, int]] = set()
    twice = {(one.epoch, one.starts[1]) for one in ledger.findings() if one.kind == "twice" and one.path == path}
    for number, start in enumerate(ledger.starts):
        borders.append(at)
        colour, new = _OF_STARTS[number % len(_OF_STARTS)], set()
        for rank, batches in sorted(start.batches.items()):
            trained = [batch for batch in batches if batch.parts]
            num_kept = sum(bool(batch.parts) for batch in batches[: start.kept[rank]])
            for step, batch in enumerate(trained):
                is_kept = step < num_kept
                for part in batch.parts if isinstance(batch.parts, tuple) else ():
                    for item in part.listed() if part.path == path else ():
                        if not isinstance(item, int):
                            continue
                        key = (part.epoch, part.cycle, item)
                        is_again = key in seen and (part.epoch, start.header.start) in twice
                        points.steps.append(at + step)
                        points.items.append(item)
                        points.colours.append(_TWICE if is_kept and is_again else colour if is_kept else _LOST)
                        if is_kept:
                            new.add(key)
        seen |= new
        at += max((sum(bool(batch.parts) for batch in batches) for batches in start.batches.values()), default=0)
    return points, borders


def _new_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "A page with a picture needs matplotlib; install it with: pip install 'lightning-stateful[plots]'"
        ) from None
    return Figure(figsize=(9, 4), layout="constrained")
