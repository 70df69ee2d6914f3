"""What the benchmarks share: interleaved timing, memory of a child process, tables, and a result with its machine."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Answer = TypeVar("Answer")
_STARTED = time.perf_counter()


def seconds(task: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call; earlier garbage is collected before it, and what it returns is freed after it.

    Args:
        task: What to run.
        clock: Wall time, or ``time.process_time`` for work in this process alone that other programs may interrupt.
    """
    gc.collect()
    began = clock()
    kept = task()
    took = clock() - began
    del kept
    return took


def interleave(tasks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every task ``repeats`` times, round after round, each round beginning with another one.

    Args:
        tasks: A name and what to run; a task returns the seconds that count, see :func:`seconds`.
        repeats: Number of rounds.

    Returns:
        For each name its figures, round by round, so that figures at the same place were measured close together.
    """
    names = list(tasks)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(tasks[name]())
    return figures


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of ``above / below``, round by round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def in_child(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call ``function`` in a fresh process, whose memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def with_memory(task: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Row:
    """:func:`seconds` of one call, and by how many MB the peak of this process rose above what it held before.

    Call it through :func:`in_child`: where a peak cannot be reset, it is that of the process so far, imports included,
    and the figure is too high rather than too low.
    """
    _reset_peak()
    held = psutil.Process().memory_info().rss
    took = seconds(task, clock)
    return {"seconds": took, "MB": (_peak() - held) / 1e6}


def _reset_peak() -> None:
    # Of Linux: 5 sets VmHWM to what is held now.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    # On Linux ru_maxrss is inherited from the process that started this one; VmHWM is this program's alone.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine() -> Row:
    """Processor, memory and versions; nothing that names the machine."""
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = models[0] if models else processor
    return {
        "processor": processor or platform.machine(),
        "CPUs": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchdata", "lightning", "numpy")},
    }


def short(number: int) -> str:
    """A power of ten as people write it: ``1e9``."""
    return f"{number:.0e}".replace("e+0", "e").replace("e+", "e")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def text_table(rows: Sequence[Row], *, markdown: bool = False) -> list[str]:
    """Lines of an aligned table; the first row names the columns, numbers stand on the right."""
    names = list(rows[0])
    cells = [names, *([_text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    left = [any(isinstance(row[name], str) and row[name] != "-" for row in rows) for name in names]
    lines = [
        (" | " if markdown else "  ").join(
            cell.ljust(width) if words else cell.rjust(width)
            for cell, width, words in zip(line, widths, left, strict=True)
        )
        for line in cells
    ]
    if not markdown:
        return [line.rstrip() for line in lines]
    rule = " | ".join("-" * (w - 1) + ("-" if words else ":") for w, words in zip(widths, left, strict=True))
    return [f"| {line} |" for line in [lines[0], rule, *lines[1:]]]


def target(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> Row:
    """One row of a result's targets."""
    if at_least is not None:
        return {"target": what, "limit": f">= {at_least:g}", "value": value, "met": value >= at_least}
    if at_most is None:
        raise ValueError("A target has a limit: pass at_least or at_most.")
    return {"target": what, "limit": f"<= {at_most:g}", "value": value, "met": value <= at_most}


def report(
    name: str, claim: str, tables: Mapping[str, Sequence[Row]], targets: Sequence[Row] = (), folder: Path = RESULTS
) -> None:
    """Print the tables of a benchmark and write ``<name>.json``.

    Args:
        name: The script's name.
        claim: What is measured, in a sentence or two.
        tables: A title and rows; every row has the same columns.
        targets: Rows of :func:`target`.
        folder: Where the result is written.
    """
    for title, rows in (*tables.items(), *([("Targets", targets)] if targets else [])):
        print("\n".join([title, *(f"  {line}" for line in text_table(rows)), ""]))
    result = {
        "name": name,
        "claim": claim,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "seconds": time.perf_counter() - _STARTED,
        "tables": [{"title": title, "rows": list(rows)} for title, rows in tables.items()],
        "targets": list(targets),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
