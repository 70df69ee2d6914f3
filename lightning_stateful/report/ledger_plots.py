"""Pictures of a ledger: which data came when, a mixture's shares, padding, and time that ranks waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_stateful.ledger.over_time import Coverage, Floats, Integers, Padding, Shares, Waiting
from lightning_stateful.report.figures import GREY, PALETTE, RED, TEXT, in_page, legend

_MOST_DOTS = 20_000
_MOST_LABELS = 8


def coverage_picture(found: Coverage, name: str, sources: Sequence[tuple[str, int]] = ()) -> str:
    """Draw indices over steps: a colour a start, grey where weights were lost, red where an epoch had them before.

    Args:
        found: The indices.
        name: A name that no other picture of the page has.
        sources: Names and lengths of the sources that the indices go through, one after the other.
    """
    num_starts = len(found.begins)
    chosen = chosen_dots(found)
    colours = np.array([PALETTE[start % len(PALETTE)] for start in range(num_starts)])[found.starts[chosen]]
    colours = np.where(found.is_lost[chosen], GREY, colours)
    again = found.is_again[chosen]

    def draw(axis: Any, is_narrow: bool) -> None:
        size = min(max(30_000 / len(chosen), 2), 16) * (0.5 if is_narrow else 1)
        steps, items = found.steps[chosen], found.items[chosen]
        axis.scatter(steps[~again], items[~again], c=colours[~again], s=size, linewidths=0, rasterized=True)
        axis.scatter(steps[again], items[again], c=RED, s=max(2 * size, 8), linewidths=0, rasterized=True)
        _mark_resumes(axis, found.begins)
        _label_epochs(axis, found.epochs, is_narrow)
        _label_sources(axis, sources)
        what = "sample, shard by shard" if found.of_shards else "index of the sample"
        axis.set(xlabel="step of the run", ylabel=what)
        axis.margins(x=0.01, y=0.02)
        axis.grid(visible=False)
        _whole_numbers(axis)
        axis.yaxis.set_major_formatter("{x:,.0f}")

    shown = range(min(num_starts, len(PALETTE)))
    entries = [("dot", PALETTE[start], f"start {start + 1}") for start in shown]
    if num_starts > len(PALETTE):
        entries.append(("dot", TEXT, f"and so on, to start {num_starts}"))
    if found.is_lost.any():
        entries.append(("dot", GREY, "lost with its weights"))
    if found.is_again.any():
        entries.append(("dot", RED, "trained on again in the same epoch"))
    if num_starts > 1:
        entries.append(("dashed", TEXT, "a resume"))
    return legend(entries) + in_page(draw, name, "Indices of samples over the steps of the run")


def shares_picture(found: Shares, name: str) -> str:
    """Draw the shares of a mixture's sources, and what was asked for, dashed."""
    names, got, asked = grouped(found)
    colours = [*PALETTE[: len(names)], *[GREY] * (len(names) - len(PALETTE))]

    def draw(axis: Any, is_narrow: bool) -> None:
        for column, colour in enumerate(colours):
            axis.plot(found.steps, asked[:, column], color=colour, linestyle=(0, (4, 3)), linewidth=1.2)
            axis.plot(found.steps, got[:, column], color=colour, linewidth=1.8, **_dots(found.steps))
        axis.set(xlabel="step of training", ylabel=f"share of {found.unit}", ylim=(0, None))
        _percent(axis)

    entries = [("line", colour, source) for source, colour in zip(names, colours, strict=True)]
    return legend([*entries, ("dashed", TEXT, "asked for")]) + in_page(draw, name, "Shares of sources over steps")


def padding_picture(found: Padding, name: str) -> str:
    """Draw the share of padding over steps."""

    def draw(axis: Any, is_narrow: bool) -> None:
        axis.fill_between(found.steps, found.share, color=PALETTE[1], alpha=0.35, linewidth=0)
        axis.plot(found.steps, found.share, color=PALETTE[1], linewidth=1.8, **_dots(found.steps))
        axis.set(xlabel="step of training", ylabel="padding, of all tokens")
        axis.set_ylim(0, max(1.15 * float(np.nanmax(found.share)), 0.01))
        _percent(axis)

    return in_page(draw, name, "Share of padding over steps")


def waiting_picture(found: Waiting, name: str) -> str:
    """Draw the share of the ranks' time in which they waited: for their own batches and, above, for the last rank."""
    is_alone = max((one.rank for one in found.ranks), default=0) == 0

    def draw(axis: Any, is_narrow: bool) -> None:
        # A start has points of its own, and no area leads from one to the next.
        starts = np.searchsorted(found.begins, found.steps, side="right")
        for start in np.unique(starts):
            steps, own, others = (values[starts == start] for values in (found.steps, found.own, found.others))
            axis.fill_between(steps, own, color=PALETTE[0], alpha=0.75, linewidth=0)
            axis.fill_between(steps, own, own + others, color=PALETTE[1], alpha=0.75, linewidth=0)
            axis.plot(steps, own + others, color=TEXT, linewidth=0.8, **_dots(steps))
        _mark_resumes(axis, found.begins)
        axis.set(xlabel="step of the run", ylabel="share of the ranks' time")
        axis.set_ylim(0, min(max(1.15 * float((found.own + found.others).max()), 0.05), 1.02))
        _percent(axis)

    entries = [("area", PALETTE[0], "waiting for its own batch")]
    if not is_alone:
        entries.append(("area", PALETTE[1], "waiting for the last rank to begin the step"))
    if len(found.begins) > 1:
        entries.append(("dashed", TEXT, "a resume"))
    return legend(entries) + in_page(draw, name, "Share of time that ranks waited over steps")


def chosen_dots(found: Coverage) -> Integers:
    """Numbers of the samples to be drawn: of very many some, spread evenly; those that came again are thinned apart."""
    again, others = np.flatnonzero(found.is_again), np.flatnonzero(~found.is_again)
    return np.sort(np.concatenate([_thinned(again), _thinned(others)]))


def grouped(found: Shares) -> tuple[list[str], Floats, Floats]:
    """The names of the largest sources, as many as there are colours, and their shares; all others as one."""
    if len(found.names) <= len(PALETTE):
        return list(found.names), found.got, found.asked
    order = np.argsort(-found.got_in_all, kind="stable")
    largest, rest = np.sort(order[: len(PALETTE) - 1]), order[len(PALETTE) - 1 :]
    got, asked = (
        np.concatenate([shares[:, largest], shares[:, rest].sum(axis=1, keepdims=True)], axis=1)
        for shares in (found.got, found.asked)
    )
    return [*(found.names[source] for source in largest), f"{len(rest)} others"], got, asked


def _thinned(numbers: Integers) -> Integers:
    chosen = np.unique(np.linspace(0, max(len(numbers) - 1, 0), _MOST_DOTS).astype(np.int64))
    return numbers[chosen] if len(numbers) else numbers


def _mark_resumes(axis: Any, begins: Sequence[int]) -> None:
    for begin in begins[1:]:
        axis.axvline(begin - 0.5, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))


def _label_epochs(axis: Any, epochs: Sequence[tuple[int, int]], is_narrow: bool) -> None:
    """Mark where epochs begin, with as many of their numbers above as there is room for."""
    every = -(-len(epochs) // (5 if is_narrow else 10))
    for step, _ in epochs[1:] if len(epochs) < 60 else ():
        axis.axvline(step - 0.5, color=TEXT, linewidth=0.6, alpha=0.25)
    for step, epoch in epochs[::every]:
        axis.annotate(
            f"epoch {epoch}", (step, 1), xycoords=("data", "axes fraction"), xytext=(2, 3),
            textcoords="offset points", fontsize=8, color=TEXT, annotation_clip=False,
        )  # fmt: skip


def _label_sources(axis: Any, sources: Sequence[tuple[str, int]]) -> None:
    if not 1 < len(sources) <= _MOST_LABELS:
        return
    bounds = np.cumsum([0, *(length for _, length in sources)])
    for bound in bounds[1:-1]:
        axis.axhline(bound - 0.5, color=TEXT, linewidth=0.6, alpha=0.4)
    for (source, length), begin in zip(sources, bounds, strict=False):
        axis.annotate(
            source, (1, begin + length / 2), xycoords=("axes fraction", "data"), xytext=(4, 0), va="center",
            textcoords="offset points", fontsize=9, color=TEXT, annotation_clip=False,
        )  # fmt: skip


def _dots(steps: Floats) -> dict[str, Any]:
    """A mark where a line of few points might not be seen."""
    return {"marker": "o", "markersize": 3} if len(steps) < 3 else {}


def _percent(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.margins(x=0.01)
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    digits = 0 if axis.get_ylim()[1] >= 0.05 else 1 if axis.get_ylim()[1] >= 0.005 else 2
    axis.yaxis.set_major_formatter(f"{{x:.{digits}%}}")
    _whole_numbers(axis)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.xaxis.set_major_formatter("{x:,.0f}")
