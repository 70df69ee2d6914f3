"""Sets what differs between two processes: the order of files, the clock, global generators, workers of loaders."""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a process that no run may depend on.

    Attributes:
        hash_seed: Which of two values ``PYTHONHASHSEED`` has; the order of sets of strings follows from it.
        reversed_files: List folders in reverse. Their order is the file system's, and nobody promises it.
        held_clock: What ``time.time()`` and ``datetime.now()`` always say, in seconds; None to let the clock run.
        seed: Passed to ``seed_everything``; None to leave global generators unseeded, as a new process has them.
    """

    hash_seed: int = 0
    reversed_files: bool = False
    held_clock: float | None = None
    seed: int | None = None

    def apply(self, package: str) -> None:
        """Change this process; ``hash_seed`` is that of the process it was forked from.

        Args:
            package: ``lightning.pytorch`` or ``pytorch_lightning``.
        """
        _seed_from_entropy()
        if self.reversed_files:
            _reverse_listings()
        if self.held_clock is not None:
            _hold_clock(self.held_clock)
        if self.seed is not None:
            import_module(package).seed_everything(self.seed, verbose=False)


def _seed_from_entropy() -> None:
    """Forked processes share the states of generators; those that are launched one by one do not."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()
    if "datasets.fingerprint" in sys.modules:
        sys.modules["datasets.fingerprint"].fingerprint_rng.seed()


class _Listing(Iterator[Any], AbstractContextManager[Any]):
    """A folder's entries, as ``os.scandir`` gives them: an iterator that can be closed."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._left = iter(list(entries)[::-1])

    def __next__(self) -> Any:
        return next(self._left)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what is left."""
        self._left = iter(())


def _reverse_listings() -> None:
    system: Any = os
    listdir, scandir = os.listdir, os.scandir
    system.listdir = wraps(listdir)(lambda *path: listdir(*path)[::-1])
    system.scandir = wraps(scandir)(lambda *path: _Listing(scandir(*path)))


def _hold_clock(seconds: float) -> None:
    real: Any = datetime.datetime

    class Held(type(real)):  # type: ignore[misc]
        """Lets dates that were made elsewhere pass for instances."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class HeldDatetime(real, metaclass=Held):  # type: ignore[misc]
        """A datetime whose clock stands."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.fromtimestamp(seconds, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return real.fromtimestamp(seconds, datetime.timezone.utc).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return real.fromtimestamp(seconds)

    time.time = lambda: seconds
    time.time_ns = lambda: int(seconds * 1e9)
    datetime.datetime = HeldDatetime  # type: ignore[misc]


def set_num_workers(num_workers: int) -> None:
    """Let every DataLoader that is made from now on have so many workers, whatever it is told."""
    from torch.utils.data import DataLoader

    kinds: list[Any] = [DataLoader]
    with suppress(ImportError):
        # It does not call the constructor of torch's.
        kinds.append(import_module("torchdata.stateful_dataloader").StatefulDataLoader)
    for kind in kinds:
        kind.__init__ = _with_workers(kind.__init__, num_workers)


def _with_workers(init: Callable[..., None], num_workers: int) -> Callable[..., None]:
    import inspect

    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: N807
        # torch sets attributes by way of this while it is built, so arguments are passed on by name.
        bound = signature.bind(self, *arguments, **options).arguments
        own = {name: value for name, value in bound.items() if name != "self"}
        own |= own.pop("kwargs", {})
        own["num_workers"] = num_workers
        if num_workers == 0:
            for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context", "in_order"):
                own.pop(name, None)
        init(self, **own)

    return __init__
