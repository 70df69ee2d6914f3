"""Functions that measure samples in other processes, and tell how often they were called, by whom, and how far."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning_stateful.loaders import length_cache
from lightning_stateful.loaders.length_cache import lengths_of

TEXTS = ["a" * (index % 7) for index in range(40)]


class Counting:
    """The length of a sample; every call leaves a line with its process.

    Args:
        calls: The file of lines.
        stays: As long as this file is there, the sixth call never returns.
    """

    def __init__(self, calls: Path, stays: Path | None = None) -> None:
        self.calls, self.stays = calls, stays

    def __call__(self, sample: str) -> int:
        """Count, be slow, and measure."""
        with self.calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.005)
        while self.stays is not None and self.stays.exists() and len(self.calls.read_text().split()) >= 6:
            time.sleep(0.01)
        return len(sample)


def calls(path: Path) -> list[str]:
    """The process of every call so far."""
    return path.read_text().split() if path.exists() else []


def measure_together(folder: Path, barrier: Any, results: Any) -> None:
    """Wait for the others, ask for the lengths, and send them."""
    counting = Counting(folder / "calls")
    barrier.wait()
    results.put((os.getpid(), lengths_of(TEXTS, counting, cache_file=folder / "cache" / "lengths.npy").tolist()))


def measure(folder: Path, num_workers: int) -> None:
    """Ask for the lengths."""
    counting = Counting(folder / "calls", folder / "stays")
    lengths_of(TEXTS, counting, cache_file=folder / "cache" / "lengths.npy", num_workers=num_workers)


def measure_and_die_before_the_lengths(folder: Path) -> None:
    """Ask for the lengths, and be killed once the digest is written, and before the lengths are."""
    length_cache.np.save = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    measure(folder, 0)
