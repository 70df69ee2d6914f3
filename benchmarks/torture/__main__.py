"""Inflicts faults on runs of every kind of data, and counts what was replayed, lost or hung.

``python -m benchmarks.torture --faults 300 --seed 1``. Runs are made until there were so many faults; each is a chain
of starts with real processes, and ends with one that nothing happens to.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CLAIM = (
    "Runs of DDP on CPU, of one to three ranks with and without workers, that faults end at moments drawn from a seed, "
    "and that go on from the newest checkpoint that `lightning-stateful check` lets pass, often on other ranks, "
    "workers and batch sizes. After each start what the weights were trained on is counted: by what each rank wrote "
    "down before each step, by the ledger, and by the weights themselves. Replayed and lost are samples or tokens, "
    "hung are ranks, and refused by name are faults that an error names."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if nothing was replayed or lost, nothing hung, and all fitted together."""
    from benchmarks.torture.kinds import KINDS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="at least so many faults")
    parser.add_argument("--seed", type=int, default=1, help="chooses all that is drawn")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), help="kinds of data")
    parser.add_argument("--keep", type=Path, help="a folder in which the files of all runs stay")
    parser.add_argument("--dry", action="store_true", help="write no result")
    given = parser.parse_args(arguments)
    multiprocessing.set_forkserver_preload(["benchmarks.torture.preload"])
    folder = given.keep or Path(tempfile.mkdtemp(prefix="torture-"))
    from benchmarks.torture.life import torture
    from benchmarks.torture.table import said

    outcomes = torture(given.faults, given.seed, folder, kinds=given.kinds, jobs=given.jobs)
    if given.keep is None and not any(outcome.found.problems for outcome in outcomes):
        shutil.rmtree(folder)
    return said(outcomes, given.seed, CLAIM, write=not given.dry)


if __name__ == "__main__":
    sys.exit(main())
