"""The tables of what became of all faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.measure import Row, report, target
from benchmarks.torture.faults import FAULTS
from benchmarks.torture.life import Outcome


def said(outcomes: Sequence[Outcome], seed: int, claim: str, *, write: bool) -> int:
    """Print the tables, and write them as a result; 0 if all is right."""
    faults = [outcome for outcome in outcomes if outcome.fault]
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    problems = [problem for outcome in outcomes for problem in outcome.found.problems]
    totals = {
        "replayed": sum(outcome.found.replayed for outcome in outcomes),
        "lost": sum(outcome.found.lost for outcome in outcomes),
        "hung": sum(outcome.hung for outcome in outcomes),
        "contradictions between the counts": len(problems),
    }
    if write:
        num_starts = len(outcomes)
        report(
            "torture",
            f"{claim} Seed {seed}: {len(faults)} faults in {num_starts} starts.",
            {
                "By kind of data": [row("data", kind, (one for one in outcomes if one.kind == kind)) for kind in kinds],
                "By fault": [row("fault", fault, (one for one in faults if one.fault == fault)) for fault in FAULTS],
                "Faults of each kind": [
                    {
                        "data": kind,
                        **{fault: sum((one.kind, one.fault) == (kind, fault) for one in faults) for fault in FAULTS},
                    }
                    for kind in kinds
                ],
            },
            [target(what, value, at_most=0) for what, value in totals.items()],
        )
    print(f"{len(faults)} faults: {totals}")
    return int(any(totals.values()))


def row(column: str, name: str, outcomes: Iterable[Outcome]) -> Row:
    """What became of some faults."""
    some = list(outcomes)
    return {
        column: name,
        "faults": sum(bool(one.fault) for one in some),
        "batches": sum(one.batches for one in some),
        "replayed": sum(one.found.replayed for one in some),
        "lost": sum(one.found.lost for one in some),
        "hung": sum(one.hung for one in some),
        "refused by name": sum(one.named for one in some),
    }
