"""Figures of padding, budget use and straggling are those that plain Python finds in the batches that are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.bucket_cases import in_budget

from lightning_stateful.bucketing import QuadraticCost
from lightning_stateful.core import SampleBatchOrder, SequentialOrder
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.report.padding import PaddingFigures, padding_report, summary
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler, StatefulBatchSampler

LENGTHS = [1 + (index * index) % 37 for index in range(211)]

CASES: dict[str, dict[str, Any]] = {
    "tokens": {"max_tokens": 90, "num_buckets": 4},
    "quadratic cost": {"max_tokens": 120, "cost": QuadraticCost(20), "num_buckets": 3},
    "tail dropped": {"max_tokens": 90, "num_buckets": 4, "drop_last": True},
    "too long dropped": {"max_tokens": 30, "num_buckets": 4, "too_long": "drop"},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def sampler(lengths: Any = LENGTHS, **options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(lengths, **in_budget(options))


def steps_of(options: dict[str, Any], ranks: int, epoch: int = 0) -> list[list[list[int]]]:
    """Of every step, the lengths of each rank's batch, as they are served."""
    samplers = [sampler(num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    for each in samplers:
        each.set_epoch(epoch)
    return [[[LENGTHS[index] for index in batch] for batch in step] for step in zip(*samplers, strict=True)]


def use_of(batch: list[int], options: dict[str, Any]) -> Any:
    """The share of its budget that a batch uses."""
    longest, size = max(batch), options.get("batch_size")
    if size is not None:
        return len(batch) / size
    cost = longest + longest**2 / options["cost"].length if "cost" in options else longest
    return len(batch) * cost / options["max_tokens"]


def expect(figures: PaddingFigures, steps: list[list[list[int]]], options: dict[str, Any]) -> None:
    batches = [batch for step in steps for batch in step]
    padded = [[len(batch) * max(batch) for batch in step] for step in steps]
    total, tokens = sum(map(sum, padded)), sum(map(sum, batches))
    longest_wait = sum(map(max, padded))
    assert figures.steps == len(steps)
    assert figures.batches == len(batches)
    assert figures.samples == sum(map(len, batches))
    assert figures.samples_per_batch == pytest.approx(figures.samples / len(batches))
    assert figures.tokens == tokens
    assert figures.padded_tokens == total
    assert figures.padding == pytest.approx(1 - tokens / total)
    assert figures.budget_use == pytest.approx(sum(use_of(batch, options) for batch in batches) / len(batches))
    assert figures.straggling == pytest.approx(1 - total / len(steps[0]) / longest_wait)


@every_case
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_whole_and_each_bucket_are_what_is_served(options: dict[str, Any], ranks: int) -> None:
    report, steps = padding_report(sampler(**options), num_replicas=ranks), steps_of(options, ranks)
    shortest = 0
    for figures in report.buckets:
        own = [step for step in steps if shortest < max(map(max, step)) <= figures.longest]
        expect(figures, own, options)
        shortest = figures.longest

    assert report.num_replicas == ranks
    assert report.whole.longest == max(max(batch) for step in steps for batch in step)
    assert sum(figures.steps for figures in report.buckets) == len(steps)
    expect(report.whole, steps, options)


@every_case
def test_samples_left_out_and_repeated_are_counted(options: dict[str, Any]) -> None:
    for ranks in (1, 5):
        report = padding_report(sampler(**options), num_replicas=ranks)
        longer = sum(length > options.get("max_tokens", 99) for length in LENGTHS)
        served = {
            index
            for rank in range(ranks)
            for batch in sampler(num_replicas=ranks, rank=rank, **options)
            for index in batch
        }
        dropped = longer if options.get("too_long") == "drop" else 0
        assert report.num_dropped == dropped
        assert report.num_left_out == len(LENGTHS) - dropped - len(served)
        assert report.num_repeated == report.whole.samples - len(served)


def test_measuring_does_not_move_the_sampler() -> None:
    measured, untouched = (sampler(max_tokens=90, num_replicas=2, rank=1) for _ in range(2))
    padding_report(measured, num_replicas=3, epoch=2)

    assert measured.state_dict() == untouched.state_dict()
    assert list(measured) == list(untouched)


def test_a_bare_order_is_measured_alike() -> None:
    batches = sampler(max_tokens=90)

    assert padding_report(batches.order, num_replicas=2) == padding_report(batches, num_replicas=2)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: StatefulBatchSampler(SampleBatchOrder(samples=SequentialOrder(5))), "SampleBatchOrder"),
        (lambda: SampleBatchOrder(samples=SequentialOrder(5)), "SampleBatchOrder"),
        (lambda: LENGTHS, "list"),
    ],
)
def test_batches_that_know_no_lengths_are_refused(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"A {name} knows no lengths; pass a BucketBatchSampler"):
        padding_report(make())


class TestWords:
    report = padding_report(sampler(**CASES["too long dropped"]), num_replicas=2)

    def test_json_is_the_plain_data(self) -> None:
        data = json.loads(self.report.to_json())

        assert data == json.loads(json.dumps(self.report.to_dict()))
        assert data["num_replicas"] == 2
        assert data["whole"]["padding"] == self.report.whole.padding
        assert [bucket["longest"] for bucket in data["buckets"]] == [each.longest for each in self.report.buckets]

    def test_the_table_has_a_line_a_bucket(self) -> None:
        first, headings, *lines, last = str(self.report).splitlines()
        whole = self.report.whole

        assert first == f"2 ranks: {whole.steps} steps, {whole.samples} samples, {whole.tokens} tokens"
        assert headings.split()[:3] == ["up", "to", "batches"]
        assert [line.split()[:3] for line in lines] == [
            [str(each.longest), str(each.batches), str(each.samples)] for each in self.report.buckets
        ]
        assert last == f"{self.report.num_dropped} samples dropped"
        assert len({len(line) for line in (headings, *lines)}) == 1

    def test_shares_are_percentages(self) -> None:
        figures = self.report.buckets[0]
        line = str(self.report).splitlines()[2].split()

        assert line[4:] == [f"{figures.padding:.2%}", f"{figures.budget_use:.2%}", f"{figures.straggling:.3%}"]

    def test_a_summary_has_a_line_for_each_number_of_ranks(self) -> None:
        reports = [padding_report(sampler(max_tokens=90), num_replicas=ranks) for ranks in (1, 4, 16)]
        _, *lines = summary(reports).splitlines()

        assert [line.split()[:3] for line in lines] == [
            [str(each.num_replicas), str(each.whole.steps), str(each.whole.batches)] for each in reports
        ]
