"""The end of a process that was reading Hugging Face's files a moment ago."""

from __future__ import annotations

import atexit
import time
from functools import cache

# Hugging Face waits for five seconds, but behind every interleaved reading, and behind no other.
_SECONDS = 1.0
_closed_at = 0.0


def wait_at_exit() -> None:
    """Have this process end no sooner than a moment from now.

    Behind a parquet reader that has been closed, threads of Arrow's read on for a little. Where Python ends meanwhile,
    they abort the process.
    """
    global _closed_at
    _closed_at = time.monotonic()
    _register()


@cache
def _register() -> None:
    atexit.register(_wait)


def _wait() -> None:
    time.sleep(max(_closed_at + _SECONDS - time.monotonic(), 0))
