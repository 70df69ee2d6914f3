"""Counts what a run was trained on, by what its ranks wrote down, by its weights, and by its ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.torture.kinds import KINDS, Kind
from benchmarks.torture.rank import Start
from lightning_stateful.audit import Ledger, read_ledger


class Line(NamedTuple):
    """A batch that a rank was about to train on.

    Attributes:
        epoch: The epoch.
        batch: Its number in the epoch.
        step: Optimizer steps that had been taken before it.
        samples: The numbers in each of its samples.
    """

    epoch: int
    batch: int
    step: int
    samples: list[list[int]]


@dataclass
class Found:
    """What an audit found.

    Attributes:
        replayed: Numbers that the weights were trained on more often than they should have been.
        lost: Numbers of epochs that are over that the weights were not trained on.
        problems: What does not fit together, in sentences.
    """

    replayed: int = 0
    lost: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Trail:
    """The starts of a run, each with the start and optimizer step of the checkpoint that it went on from.

    Attributes:
        starts: The starts, in time.
        origins: By the number of a start: the number of the start that wrote its checkpoint, and the checkpoint's step.
        names: By the number of a start: its name in the ledger, if it wrote one.
    """

    starts: list[Start] = field(default_factory=list)
    origins: dict[int, tuple[int, int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def kept(self, number: int, until: int | None = None) -> list[tuple[Start, list[list[Line]]]]:
        """The lines of all starts that led to a start and, there, to an optimizer step: by start, by rank."""
        found: list[tuple[Start, list[list[Line]]]] = []
        at: tuple[int, int | None] | None = (number, until)
        while at is not None:
            start = self.starts[at[0]]
            ranks = [
                [line for line in lines_of(start, rank) if at[1] is None or line.step < at[1]]
                for rank in range(start.how.ranks)
            ]
            found.insert(0, (start, ranks))
            at = self.origins.get(at[0])
        return found


def lines_of(start: Start, rank: int) -> list[Line]:
    """What a rank wrote down."""
    path = start.lines(rank)
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [Line(*json.loads(line)) for line in whole.splitlines()]


def audit(trail: Trail, *, is_over: bool) -> Found:
    """Count what the weights of the latest start were trained on.

    Args:
        trail: The starts.
        is_over: Whether the run has come to its end.
    """
    last, found = trail.starts[-1], Found()
    kind, kept = KINDS[last.kind], trail.kept(last.number)
    _count(kind, last, kept, found, is_over=is_over)
    if trail.names:
        _compare_ledger(trail, read_ledger(last.folder / "ledger"), kind, found)
    return found


def _count(
    kind: Kind, last: Start, kept: Sequence[tuple[Start, list[list[Line]]]], found: Found, *, is_over: bool
) -> None:
    by_epoch = {epoch: Counter[int]() for epoch in range(last.num_epochs)}
    for epoch, counts in by_epoch.items():
        steps: dict[tuple[int, int], list[list[int]]] = {}
        for start, ranks in kept:
            for lines in ranks:
                for line in lines:
                    if line.epoch == epoch:
                        steps.setdefault((start.number, line.batch), []).extend(line.samples)
        for at, samples in steps.items():
            # Fewer samples are left of an epoch than there are ranks: some are served twice, as is documented.
            distinct = sorted({tuple(one) for one in samples})
            is_short = at == max(steps) and len(distinct) < ranks_of(kept, at[0])
            counts.update(number for one in (distinct if is_short else samples) for number in one)
    reached = max((epoch for epoch, counts in by_epoch.items() if counts), default=0)
    over = range(last.num_epochs if is_over else reached)
    if not kind.is_stream:
        for epoch, counts in by_epoch.items():
            found.replayed += sum(count - 1 for count in counts.values() if count > 1)
            found.lost += kind.num_keys - len(counts) if epoch in over else 0
        return
    # What is left of a pass, less than a step of all ranks, comes first in the next epoch; one rank leaves nothing.
    total = Counter[int]()
    for epoch in range(reached + 1):
        total += by_epoch[epoch]
        is_last = is_over and epoch == reached
        least = epoch + 1 if is_last and last.how.ranks == 1 else epoch if epoch in over else 0
        for number in range(kind.num_keys):
            found.replayed += max(total[number] - (epoch + 1), 0)
            found.lost += max(least - total[number], 0)


def ranks_of(kept: Sequence[tuple[Start, list[list[Line]]]], number: int) -> int:
    """The ranks of a start."""
    return next(start.how.ranks for start, _ in kept if start.number == number)


def compare_weights(trail: Trail, path: Path, number: int) -> tuple[int, list[str]]:
    """Compare the weights in a checkpoint with the lines of the starts that led to it.

    Args:
        trail: The starts.
        path: The checkpoint.
        number: The start that wrote it.

    Returns:
        Its optimizer step, and what differs.
    """
    checkpoint = torch.load(path, weights_only=True)
    step: int = checkpoint["global_step"]
    weights = checkpoint["state_dict"]["counts"].round().to(torch.int64)
    expected, kept = torch.zeros_like(weights), trail.kept(number, step)
    num_keys = KINDS[trail.starts[number].kind].num_keys
    at = [
        line.epoch * num_keys + key
        for _, ranks in kept
        for lines in ranks
        for line in lines
        for one in line.samples
        for key in one
    ]
    expected.index_add_(0, torch.tensor(at, dtype=torch.int64), torch.ones(len(at), dtype=torch.int64))
    differ = int((expected != weights).sum())
    return step, [f"{path}: {differ} weights are not what its ranks wrote down"] if differ else []


def compare_order(trail: Trail, whole: Start) -> list[str]:
    """Compare what was trained on with a run without a stop, batch by batch on every rank."""
    kept = trail.kept(trail.starts[-1].number)
    for rank in range(whole.how.ranks):
        got = [(line.epoch, line.batch, line.samples) for _, ranks in kept for line in ranks[rank]]
        expected = [(line.epoch, line.batch, line.samples) for line in lines_of(whole, rank)]
        if got != expected[: len(got)]:
            at = next(at for at, pair in enumerate(zip(got, [*expected, None], strict=False)) if pair[0] != pair[1])
            return [f"rank {rank} trained on {got[at]}, and without a stop on {[*expected, None][at]}"]
    return []


def _compare_ledger(trail: Trail, ledger: Ledger, kind: Kind, found: Found) -> None:
    found.problems += [f"ledger: {finding.kind}: {finding.text}" for finding in ledger.findings()]
    numbers = {name: number for number, name in trail.names.items()}
    chain = [numbers[start.header.start] for start in ledger.starts]
    # A start that failed before its first batch has written nothing.
    expected = [(start, ranks) for start, ranks in trail.kept(chain[-1]) if start.number in trail.names]
    if chain != [start.number for start, _ in expected]:
        found.problems.append(f"ledger: its starts are {chain}, and not {[start.number for start, _ in expected]}")
        return
    for of, (start, ranks) in zip(ledger.starts, expected, strict=True):
        for rank, lines in enumerate(ranks):
            kept = of.batches.get(rank, [])[: of.kept.get(rank, 0)]
            batches = [batch for batch in kept if batch.parts]
            got = [(batch.epoch, batch.batch, _items(batch, kind)) for batch in batches]
            due = [(line.epoch, line.batch, _keys(line, kind)) for line in lines]
            # A killed rank may have begun a batch that it wrote no line of; where it is alone, it holds back a second.
            is_last, more = start.number == chain[-1], len(got) - len(due)
            if got[: len(due)] != due[: len(got)] or (more if not is_last else more > 1):
                found.problems.append(
                    f"ledger: start {start.number}, rank {rank} has {len(got)} batches that end in {got[-1:]}, and "
                    f"wrote down {len(due)} that end in {due[-1:]}"
                )


def _items(batch: Any, kind: Kind) -> Any:
    items = batch.parts[0].listed()
    return len(items) if _has_sequences(kind) else items


def _keys(line: Line, kind: Kind) -> Any:
    # An index counts sequences where documents are packed.
    return len(line.samples) if _has_sequences(kind) else [key for one in line.samples for key in one]


def _has_sequences(kind: Kind) -> bool:
    return kind.has_index and kind in (KINDS["packed, split"], KINDS["packed, whole"])
