"""Draws batches of like lengths: ``python docs/pictures/buckets.py [folder]``.

The lengths are those of the benchmarks: lines of WikiText-2 in tokens, ``benchmarks/wikitext_lengths.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import BLUE, ORANGE, TEXT, canvas, draw_all, label, legend
from torch.utils.data import BatchSampler, RandomSampler

from lightning_stateful import BucketBatchSampler

NUM_SAMPLES, MANY, BUDGET = 100, 1_164_464, 1536
FILE = Path(__file__).parents[2] / "benchmarks" / "wikitext_lengths.json"


def text_lengths(count: int) -> np.ndarray:
    """``count`` lengths drawn from those of the text, as the benchmarks draw them."""
    found = json.loads(FILE.read_text())
    counts = np.array(found["counts"])
    return np.random.default_rng(0).choice(found["lengths"], count, p=counts / counts.sum())


def draw_batches(axes: Axes, top: float, title: str, lengths: np.ndarray, batches: list[list[int]]) -> None:
    """Each batch as its tokens (blue) within what is allocated (orange): a row for each sample."""
    scale_x, scale_y = 1 / 155, 0.24
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    share = 1 - sum(lengths[batch].sum() for batch in batches) / padded
    label(axes, 0.3, top, f"{title}: {share:.0%} padding", bold=True)
    x = 0.3
    for batch in batches:
        longest = lengths[batch].max() * scale_x
        axes.add_patch(Rectangle((x, top + 0.7), longest, len(batch) * scale_y, facecolor=ORANGE, alpha=0.45, lw=0))
        for position, sample in enumerate(batch):
            y = top + 0.7 + position * scale_y
            axes.add_patch(Rectangle((x, y), lengths[sample] * scale_x, scale_y * 0.86, facecolor=BLUE, lw=0))
        x += longest + 0.35


def draw_buckets() -> Figure:
    """The batches of a hundred samples, shuffled and in buckets."""
    lengths = text_lengths(NUM_SAMPLES)
    sampler = RandomSampler(lengths, generator=torch.Generator().manual_seed(0))
    shuffled = list(BatchSampler(sampler, 10, drop_last=False))
    in_buckets = list(BucketBatchSampler(lengths, max_tokens=BUDGET, num_buckets=6))
    figure, axes = canvas(24.5, 12.4)
    draw_batches(axes, 0.6, f"{NUM_SAMPLES} samples, shuffled, in batches of 10", lengths, shuffled)
    draw_batches(axes, 4.9, f"the same in buckets, max_tokens={BUDGET}", lengths, in_buckets)
    legend(axes, 0.3, 11.5, [(BLUE, "tokens")])
    axes.add_patch(Rectangle((4.3, 11.55), 0.6, 0.6, facecolor=ORANGE, alpha=0.45, lw=0))
    label(axes, 5.2, 11.87, "padding")
    label(axes, 9, 11.87, "a block is a batch, a line in it a sample")
    return figure


def draw_lengths() -> Figure:
    """How many samples have which length, and where 128 buckets end."""
    lengths = text_lengths(MANY)
    sampler = BucketBatchSampler(lengths, max_tokens=16_384)
    ends = sampler.order.buckets.ends
    figure = Figure(figsize=(7.4, 2.5), layout="constrained")
    axes = figure.add_subplot()
    counts, edges = np.histogram(lengths, bins=120)
    axes.stairs(counts / 1000, edges, fill=True, color=BLUE)
    axes.vlines(ends, -0.09, -0.02, transform=axes.get_xaxis_transform(), color=TEXT, linewidth=0.8, clip_on=False)
    axes.tick_params(axis="x", pad=14, length=0)
    axes.set(xlabel="tokens of a sample; a tick is the end of a bucket", ylabel="thousand samples", xlim=(0, 516))
    axes.set_title(f"{len(lengths):,} samples, {len(ends)} buckets", loc="left")
    return figure


if __name__ == "__main__":
    draw_all({"buckets.svg": draw_buckets, "bucket_lengths.svg": draw_lengths})
