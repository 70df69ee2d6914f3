"""Measures the padding of an epoch of batches of like lengths on some number of ranks: a table, or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.bucketing.padding import StepPadding, measure
from lightning_stateful.core.order import BatchOrder
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFigures:
    """Figures of some steps.

    Attributes:
        longest: The longest length that these steps are for.
        steps: Steps.
        batches: Batches, over all ranks.
        samples: Samples in them.
        samples_per_batch: Their mean number.
        tokens: Sum of the samples' lengths.
        padded_tokens: The same, padding included.
        padding: The share of these that is padding, 0 to 1.
        budget_use: The share of a batch's budget that is used, padding included, on average.
        straggling: The share of all ranks' time in which they wait for the longest batch of their step.
    """

    longest: int
    steps: int
    batches: int
    samples: int
    samples_per_batch: float
    tokens: int
    padded_tokens: int
    padding: float
    budget_use: float
    straggling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingReport:
    """Figures of an epoch on some number of ranks.

    Attributes:
        num_replicas: Ranks.
        whole: Of all steps.
        buckets: Of the steps of each bucket, the shortest first: a step belongs to the bucket of its longest sample.
        num_dropped: Samples left out because they are too long.
        num_repeated: Samples served twice because ranks take equal steps.
        num_left_out: Samples of a last step that ``drop_last`` leaves out.
    """

    num_replicas: int
    whole: PaddingFigures
    buckets: tuple[PaddingFigures, ...]
    num_dropped: int
    num_repeated: int
    num_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """A table: a line a bucket, and one for all."""
        ranks = "1 rank" if self.num_replicas == 1 else f"{self.num_replicas} ranks"
        lines = [
            f"{ranks}: {self.whole.steps} steps, {self.whole.samples} samples, {self.whole.tokens} tokens",
            *_table([("up to", *_HEADINGS), *(_row(str(each.longest), each) for each in self.buckets)]),
        ]
        said = {
            "dropped": self.num_dropped,
            "repeated": self.num_repeated,
            "left out": self.num_left_out,
        }
        lines += [f"{count} samples {what}" for what, count in said.items() if count]
        return "\n".join(lines)


_HEADINGS = ("batches", "samples", "a batch", "padding", "budget", "straggling")


def summary(reports: list[PaddingReport]) -> str:
    """A table with a line for each number of ranks."""
    rows = [(str(report.num_replicas), str(report.whole.steps), *_row("", report.whole)[1:]) for report in reports]
    return "\n".join(_table([("ranks", "steps", *_HEADINGS), *rows]))


def padding_report(batches: BucketBatchSampler | BatchOrder, *, num_replicas: int = 1, epoch: int = 0) -> PaddingReport:
    """Measure an epoch of batches without training.

    Args:
        batches: A :class:`BucketBatchSampler`, or its order.
        num_replicas: Ranks to deal the batches out to.
        epoch: Which epoch; figures differ very little from one to another.

    Raises:
        ConfigurationError: The batches know no lengths, or there are no ranks.
    """
    order = order_of(batches)
    Topology(num_replicas=num_replicas)
    found = measure(order.plan(epoch, num_replicas))
    served, kept = int(found.counts.sum()), len(order.buckets)
    return PaddingReport(
        num_replicas=num_replicas,
        whole=_figures(found, order, int(found.longest.max(initial=0))),
        buckets=_by_bucket(found, order),
        num_dropped=order.buckets.num_dropped,
        num_repeated=max(served - kept, 0),
        num_left_out=max(kept - served, 0),
    )


def order_of(batches: BucketBatchSampler | BatchOrder) -> BucketOrder:
    """The order of a batch sampler.

    Raises:
        ConfigurationError: It knows no lengths.
    """
    order = getattr(batches, "order", batches)
    if not isinstance(order, BucketOrder):
        raise ConfigurationError(f"A {type(order).__name__} knows no lengths; pass a BucketBatchSampler.")
    return order


def _by_bucket(found: StepPadding, order: BucketOrder) -> tuple[PaddingFigures, ...]:
    ends = np.array(order.buckets.ends[::-1])
    of_step = np.searchsorted(ends, found.longest.max(axis=1))
    numbers = np.unique(of_step).tolist()
    return tuple(_figures(found.where(of_step == number), order, int(ends[number])) for number in numbers)


def _figures(found: StepPadding, order: BucketOrder, longest: int) -> PaddingFigures:
    batches, samples = found.counts.size, int(found.counts.sum())
    return PaddingFigures(
        longest=longest,
        steps=len(found.counts),
        batches=batches,
        samples=samples,
        samples_per_batch=samples / max(batches, 1),
        tokens=int(found.tokens.sum()),
        padded_tokens=int(found.padded.sum()),
        padding=found.padding(),
        budget_use=found.budget_use(order.budget),
        straggling=found.straggling(),
    )


def _row(name: str, figures: PaddingFigures) -> tuple[str, ...]:
    return (
        name,
        str(figures.batches),
        str(figures.samples),
        f"{figures.samples_per_batch:.1f}",
        f"{figures.padding:.2%}",
        f"{figures.budget_use:.2%}",
        f"{figures.straggling:.3%}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
