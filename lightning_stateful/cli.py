"""The command ``lightning-stateful``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_stateful.bucketing.budget import Budget, QuadraticCost
from lightning_stateful.errors import StatefulError
from lightning_stateful.report.padding import padding_report, summary
from lightning_stateful.report.padding_plot import plot_padding
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command line; by default that of the process.

    Returns:
        0, or 2 where an argument is of no use; the reason is on standard error.
    """
    parser = argparse.ArgumentParser(prog="lightning-stateful", description="Look at data before and after training.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_padding(commands)
    asked = parser.parse_args(arguments)
    try:
        print(asked.run(asked))
    except (StatefulError, OSError) as error:
        print(f"lightning-stateful: {error}", file=sys.stderr)
        return 2
    return 0


_BOUNDARIES = '"least_padding", "equal_counts", or the longest length of each bucket: 16,64,512'


def _add_padding(commands: Any) -> None:
    parser = commands.add_parser(
        "padding",
        help="padding, budget use and straggling of batches of like lengths",
        description="Measure an epoch of a BucketBatchSampler on some numbers of ranks, without training.",
    )
    parser.set_defaults(run=_padding)
    add = parser.add_argument
    add("--lengths", required=True, help="a .npy file with one integer a sample")
    add("--max-tokens", type=int, help="what a batch may hold, padding included")
    add("--batch-size", type=int, help="in place of --max-tokens: samples in a batch")
    add("--max-samples", type=int, help="samples that a batch never exceeds, beside --max-tokens")
    add("--multiple", type=int, default=1, help="batches have a multiple of so many samples")
    add("--quadratic-length", type=int, help="length at which attention costs as much as all the rest")
    add("--num-buckets", type=int, help="number of buckets; by default up to 128")
    add("--boundaries", type=_boundaries, default="least_padding", help=_BOUNDARIES)
    add("--too-long", choices=("error", "drop"), default="error", help="what to do about too long samples")
    add("--drop-last", action="store_true", help="leave out the last step if it is not full")
    add("--seed", type=int, default=0, help="chooses the orders")
    add("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks, for example: 1 8 64")
    add("--buckets", action="store_true", help="a line for each bucket, too")
    add("--json", action="store_true", help="JSON in place of a table")
    add("--picture", type=Path, help="also draw lengths and batches to this file (needs matplotlib)")


def _padding(asked: argparse.Namespace) -> str:
    budget = Budget(
        max_tokens=asked.max_tokens,
        batch_size=asked.batch_size,
        max_samples=asked.max_samples,
        multiple=asked.multiple,
        cost=None if asked.quadratic_length is None else QuadraticCost(asked.quadratic_length),
        too_long=asked.too_long,
    )
    batches = BucketBatchSampler(
        asked.lengths,
        budget=budget,
        num_buckets=asked.num_buckets,
        boundaries=asked.boundaries,
        drop_last=asked.drop_last,
        seed=asked.seed,
    )
    reports = [padding_report(batches, num_replicas=ranks) for ranks in asked.ranks]
    if asked.picture is not None:
        plot_padding(batches, asked.picture, num_replicas=asked.ranks[0])
    if asked.json:
        return json.dumps([report.to_dict() for report in reports], indent=2)
    tables = [str(report) for report in reports] if asked.buckets else []
    dropped = batches.num_dropped
    notes = [f"{dropped} samples are longer than the budget: left out"] if dropped else []
    return "\n\n".join([*tables, summary(reports), *notes])


def _boundaries(text: str) -> list[int] | str:
    return text if text.replace("_", "").isalpha() else _numbers(text)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and no numbers with commas between them") from None


if __name__ == "__main__":
    sys.exit(main())
