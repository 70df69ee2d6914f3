"""Functions that go wrong at one sample of a stream, as long as a file is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Trouble:
    """Something that a marker on the disk makes go wrong at one sample, in whatever process.

    Args:
        folder: Where the marker is.
        number: The sample.
        what: What goes wrong there.
    """

    def __init__(self, folder: Path, number: int, what: Callable[[Path], Any]) -> None:
        self.marker, self.number, self.what = folder / "marker", number, what

    def __call__(self, number: int) -> int:
        if number == self.number and self.marker.exists():
            self.what(self.marker)
        return number

    def read(self, ref: tuple[int, int]) -> Iterator[int]:
        """A chunk in which it happens."""
        return map(self, range(ref[0], ref[0] + ref[1]))


def fail(marker: Path) -> None:
    raise OSError("the disk is gone")


def stand_still(marker: Path) -> None:
    """Wait as long as the marker is there."""
    deadline = time.monotonic() + 30
    while marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
