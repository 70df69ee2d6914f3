"""The exceptions and warnings of the toolkit.

::

    StatefulError
    ├── ConfigurationError (ValueError)       an argument is wrong, alone or beside another
    │   └── UnsupportedLoaderError            a loader that cannot be patched
    │       └── InvalidLoaderError (TypeError)   no loader at all
    ├── RankMismatchError (RuntimeError)      ranks disagree about lengths or configuration
    ├── StreamError (RuntimeError)            a stream broke off; the state is that of the last batch handed over
    │   └── ShardError                        a shard could not be read
    └── StateError (ValueError)               a state cannot be used
        ├── DamagedStateError                 keys are missing or values have the wrong type
        ├── StateVersionError                 written by a version that this one cannot read
        ├── PositionError                     the position lies outside the data
        └── StateMismatchError                state and configuration differ; ``.differences`` lists how

    StatefulWarning (UserWarning)             the run goes on, but not quite as one might think
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


class StatefulError(Exception):
    """Root of every exception that this package raises on purpose."""


class ConfigurationError(StatefulError, ValueError):
    """An argument is outside its legal range or contradicts another one."""


class UnsupportedLoaderError(ConfigurationError):
    """A loader whose order cannot be computed from a position."""


class InvalidLoaderError(UnsupportedLoaderError, TypeError):
    """A hook returned, or a Trainer was given, something that is no loader; a TypeError, as Lightning's is."""


class RankMismatchError(StatefulError, RuntimeError):
    """The ranks of one run disagree about their data; raised on every rank alike."""


class StreamError(StatefulError, RuntimeError):
    """A stream broke off, here or on another rank; the state is that of the last batch handed over."""


class ShardError(StreamError):
    """A shard could not be read, or what it holds could not be made a sample of."""


class StateError(StatefulError, ValueError):
    """A state cannot be used."""


class DamagedStateError(StateError):
    """A state lacks keys or holds values of the wrong type."""


class StateVersionError(StateError):
    """A state was written in a format that this version does not know."""


class PositionError(StateError):
    """A position lies outside the data it should point into."""


# In place of a value that is not there.
MISSING = "<nothing>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs between a saved state and the present configuration.

    Attributes:
        path: Where, with dots, for example ``"train.dataset.length"``.
        saved: The value in the state.
        present: The value of the object that should load the state.
        remedy: What the user can do.
    """

    path: str
    saved: Any
    present: Any
    remedy: str

    @property
    def is_source_that_comes_or_goes(self) -> bool:
        """Whether a source of a mixture is new, is no longer there, or stands at another place."""
        is_new_or_gone = self.path.startswith("sources.") and MISSING in (self.saved, self.present)
        return is_new_or_gone or self.path == "sources.(order)"

    def __str__(self) -> str:
        return f"{self.path}: saved {self.saved!r}, now {self.present!r}. {self.remedy}"


class StateMismatchError(StateError):
    """A state belongs to another configuration.

    Attributes:
        differences: Every difference, not only the first.
    """

    def __init__(self, differences: list[Difference], *, where: str = "the state") -> None:
        # Of another number of ranks others follow.
        self.differences: list[Difference] = sorted(differences, key=lambda one: one.path.rpartition(".")[2] != "ranks")
        self.where = where
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """The lines of the message: the first says what does not fit, each other one a difference."""
        count = "1 difference" if len(self.differences) == 1 else f"{len(self.differences)} differences"
        first = f"{self.where} does not fit the present configuration ({count}); nothing was loaded:"
        return [first, *(f"  - {difference}" for difference in self.differences)]

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their arguments, which are not this one's message.
        return partial(type(self), where=self.where), (self.differences,)


class Remark(str):
    """A text that a reader of data has for the log: a warning would be too much."""

    __slots__ = ()


class StatefulWarning(UserWarning):
    """Something the user should know that does not stop the run."""


def some_of(names: Sequence[str]) -> str:
    """Names for a message: of many the first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
