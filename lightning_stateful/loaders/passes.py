"""One pass over a StatefulLoader, and how many batches it has handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_stateful.loaders.stateful_loader import StatefulLoader


class Count:
    """Batches that a pass has handed over.

    Loader and pass share it in place of knowing each other: a cycle would keep worker processes alive until the
    garbage collector finds it.
    """

    __slots__ = ("handed",)

    def __init__(self) -> None:
        self.handed = 0


class Pass:
    """One pass over a loader; it looks up where to begin at the first ``next()``."""

    def __init__(self, loader: StatefulLoader) -> None:
        self._loader = loader
        self._count = Count()
        self._generation = -1
        self._total = 0
        self._fetch: Callable[[], Any] = tuple

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._generation != self._loader._generation:
            self._begin()
        count = self._count
        if count.handed == self._total:
            raise StopIteration
        try:
            batch = self._fetch()
        except StopIteration:
            # The sampler has ended without having said so.
            self._total = count.handed
            began = self._loader._cursor.position.epoch
            self._end()
            if self._loader.epoch == began and not count.handed:
                # An epoch without a batch is over as well.
                self._loader.seek(self._loader.plan.begin(began + 1))
            raise
        except Exception:
            # A sample could not be read: its batch is tried again at the next call.
            self._generation = -1
            raise
        count.handed += 1
        if not self._loader.is_sized and self._loader.is_at_end:
            self._total = count.handed
        if count.handed == self._total:
            self._end()
        return batch

    def _begin(self) -> None:
        loader = self._loader
        # A new pass begins where the last one began, unless it is this one, which goes on.
        origin = loader.position if loader._running is self._count else loader._normal(loader._cursor.position)
        loader._cursor.position, loader._running = origin, self._count
        self._count.handed = 0
        self._generation = loader._generation
        self._total, self._fetch = loader._fetcher(origin)

    def _end(self) -> None:
        loader = self._loader
        if loader._running is self._count:
            loader._cursor.position, loader._running = loader.position, None
