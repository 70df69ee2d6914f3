"""A picture of lengths, their buckets, and what batches hold before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.bucketing.lengths import histogram
from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.bucketing.padding import StepPadding, measure
from lightning_stateful.core.order import BatchOrder
from lightning_stateful.core.permutation import Indices, keyed_permutation
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.report.figures import new_figure
from lightning_stateful.report.padding import order_of
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

_TOKENS, _PADDING, _LINE = "#3b6ea5", "#d9a441", "#444444"
_MOST_BATCHES = 300
_MOST_BARS = 120


def plot_padding(batches: BucketBatchSampler | BatchOrder, path: str | Path, *, num_replicas: int = 1) -> None:
    """Draw the lengths' distribution with the buckets' boundaries, and batches of it before and after.

    Before: as many samples a batch as there are on average after, as a plain shuffle gives them. After: the batches of
    the first epoch. Both as the tokens in a batch, padding on top, for up to 300 batches spread over the epoch.

    Args:
        batches: A :class:`BucketBatchSampler`, or its order.
        path: File to write; its ending chooses the format.
        num_replicas: Ranks to deal the batches out to.

    Raises:
        ConfigurationError: matplotlib is not installed or does not know the format, or the batches know no lengths.
        OSError: The file cannot be written.
    """
    figure = new_figure(10, 6.4)
    order = order_of(batches)
    after = measure(order.plan(0, num_replicas))
    before = _shuffled(order.lengths, max(round(float(after.counts.mean())), 1))
    axes = figure.subplot_mosaic([["lengths", "lengths"], ["before", "after"]])
    _draw_lengths(axes["lengths"], order)
    axes["after"].sharey(axes["before"])
    _draw_batches(axes["before"], before, f"before: shuffled, {int(before.counts[0, 0])} samples a batch")
    _draw_batches(axes["after"], after, f"after: {len(order.buckets.ends)} buckets")
    if order.budget.max_tokens is not None and order.budget.cost is None:
        for name in ("before", "after"):
            axes[name].axhline(order.budget.max_tokens, color=_LINE, linewidth=0.8, linestyle="--", label="budget")
    axes["before"].set_ylabel("tokens in a batch")
    axes["after"].legend(loc="upper right", fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigurationError(f"{str(path)!r} cannot be drawn: {error}") from None


def _draw_lengths(axis: Any, order: BucketOrder) -> None:
    lengths = histogram(order.lengths)
    bars = min(_MOST_BARS, int(lengths.values[-1] - lengths.values[0]) + 1)
    axis.hist(lengths.values, bins=bars, weights=lengths.counts, color=_TOKENS)
    axis.vlines(order.buckets.ends, 0, 0.06, transform=axis.get_xaxis_transform(), color=_LINE, linewidth=0.8)
    title = f"{len(order.lengths):,} samples, {len(order.buckets.ends)} buckets: each ends at a tick"
    axis.set(xlabel="length", ylabel="samples", title=title)


def _draw_batches(axis: Any, found: StepPadding, title: str) -> None:
    padded, tokens = found.padded.ravel(), found.tokens.ravel()
    chosen = np.unique(np.linspace(0, len(padded) - 1, _MOST_BATCHES).astype(np.int64))
    places = np.arange(len(chosen) + 1)
    axis.stairs(padded[chosen], places, fill=True, color=_PADDING, label="padding")
    axis.stairs(tokens[chosen], places, fill=True, color=_TOKENS, label="tokens")
    axis.set(xlabel=f"{len(chosen)} of {len(padded):,} batches", title=f"{title}\n{found.padding():.1%} padding")
    axis.set_xlim(0, len(chosen))


def _shuffled(lengths: NDArray[Any], size: int) -> StepPadding:
    """Batches of one size in a shuffled order."""
    count = max(len(lengths) // size, 1)
    size = min(size, len(lengths))
    samples: Indices = keyed_permutation(len(lengths), 0).take(np.arange(count * size))
    found = lengths[samples].astype(np.int64).reshape(count, size)
    return StepPadding(
        longest=found.max(axis=1, keepdims=True),
        counts=np.full((count, 1), size, dtype=np.int64),
        tokens=found.sum(axis=1, keepdims=True),
    )
