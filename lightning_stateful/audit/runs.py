"""One object on its way through the epochs, and what an uninterrupted one yields."""

from __future__ import annotations

import json
import pickle  # only measures states that are no plain data; nothing is loaded
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_stateful.audit.compare import difference
from lightning_stateful.audit.result import END, Divergence
from lightning_stateful.errors import ConfigurationError

Factory = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one rank is given in an uninterrupted run.

    Attributes:
        passes: The items of every epoch, closed by ``END`` unless they were cut off.
    """

    passes: tuple[list[Any], ...]

    @property
    def lengths(self) -> list[int]:
        """Items of every epoch."""
        return [len(items) - (bool(items) and items[-1] is END) for items in self.passes]

    def after(self, epoch: int, step: int) -> tuple[int, int]:
        """Where a run goes on after ``step`` items of ``epoch``: the end of one is the beginning of the next."""
        return (epoch + 1, 0) if step and step == self.lengths[epoch] else (epoch, step)


@dataclass(slots=True)
class Tally:
    """Counts what an audit did."""

    num_comparisons: int = 0
    num_resumes: int = 0
    state_bytes: int = 0

    def weigh(self, state: Any) -> None:
        """Note the size of a state."""
        try:
            size = len(json.dumps(state))
        except (TypeError, ValueError):
            size = len(pickle.dumps(state))
        self.state_bytes = max(self.state_bytes, size)


class Run:
    """A fresh object of one rank that is iterated epoch by epoch.

    Args:
        factory: Makes the object.
        num_replicas: Ranks of the run.
        rank: Whose object.
        set_epoch: Whether to call ``set_epoch`` before every pass where the object has it.
    """

    def __init__(self, factory: Factory, num_replicas: int, rank: int, *, set_epoch: bool = False) -> None:
        self.rank = rank
        self.epoch = 0
        self.step = 0
        self.num_items = 0
        self._label = f"rank {rank} of {num_replicas}"
        self._set_epoch = set_epoch
        self._iterator: Iterator[Any] | None = None
        with self._context("while making the object"):
            self.source = factory(num_replicas, rank)
        for name in ("state_dict", "load_state_dict", "__iter__"):
            if not callable(getattr(self.source, name, None)):
                raise ConfigurationError(
                    f"The factory returned a {type(self.source).__qualname__} without {name}(). It must return a "
                    "fresh object with state_dict(), load_state_dict(state) and __iter__()."
                )

    def load(self, state: Any, place: tuple[int, int]) -> Run:
        """Load a state that was taken at ``place``."""
        self.epoch, self.step = place
        with self._context("while loading a state"):
            self.source.load_state_dict(state)
        return self

    def state(self) -> Any:
        """The object's state, as it returns it."""
        with self._context("while taking a state"):
            return self.source.state_dict()

    def open(self) -> None:
        """Begin a pass unless one is running."""
        if self._iterator is None:
            with self._context("while beginning a pass"):
                if self._set_epoch and hasattr(self.source, "set_epoch"):
                    self.source.set_epoch(self.epoch)
                self._iterator = iter(self.source)

    def next(self) -> Any:
        """The next item, or ``END``; the call after that begins the next epoch."""
        self.open()
        with self._context("while iterating"):
            item = next(self._iterator, END)  # type: ignore[arg-type]  # open() has set it
        if item is END:
            self._iterator = None
            self.epoch, self.step = self.epoch + 1, 0
        else:
            self.step += 1
            self.num_items += 1
        return item

    def is_done(self, reference: Reference) -> bool:
        """Whether the uninterrupted run has nothing more to compare with."""
        passes = reference.passes
        return self.epoch >= len(passes) or self.step >= len(passes[self.epoch])

    def advance(self, reference: Reference, tally: Tally, *, law: str, stop: int | None = None) -> Divergence | None:
        """Take one item, or the end of a pass, and compare it with the uninterrupted run's."""
        epoch, step = self.epoch, self.step
        expected, got = reference.passes[epoch][step], self.next()
        tally.num_comparisons += got is not END
        what = difference(expected, got)
        if not what:
            return None
        return Divergence(
            law=law, what=what, epoch=epoch, step=step, rank=self.rank, stop=stop, expected=expected, got=got
        )

    def follow(self, reference: Reference, tally: Tally, *, law: str, stop: int | None = None) -> Divergence | None:
        """Compare everything from here to the end of the uninterrupted run."""
        while not self.is_done(reference):
            divergence = self.advance(reference, tally, law=law, stop=stop)
            if divergence:
                return divergence
        return None

    @contextmanager
    def _context(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"Raised {doing}, {self._label}, at epoch {self.epoch}, step {self.step}.")
            raise


def observe(run: Run, num_epochs: int, max_items: int | None = None) -> Reference:
    """Run a fresh object without a stop."""
    passes: list[list[Any]] = [[] for _ in range(num_epochs)]
    while run.epoch < num_epochs and run.num_items != max_items:
        items = passes[run.epoch]
        items.append(run.next())
    return Reference(passes=tuple(items for items in passes if items))
