"""Plans of a stream's epochs, and the progress in them, which looks up where the stream stood when it is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn, Protocol

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.errors import ConfigurationError


class ReadStream(Protocol):
    """A stream with a memory of where it stood, as ``StreamReader`` has and documents it."""

    num_steps: int
    ended: tuple[int, int] | None

    @property
    def name(self) -> str:
        """The name of the stream in messages."""

    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from a step on."""

    def state_at(self, epoch: int, step: int) -> Any:
        """The positions of all worker slots before a step."""

    def details_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The same as plain data, with what else a progress holds."""


class StreamEpochPlan:
    """The rest of an epoch of a stream on the present ranks.

    Args:
        order: The stream.
        epoch: Which epoch.
        consumed: Steps of the epoch that were taken before.

    Attributes:
        length: Steps of an epoch by the length of its loader, as a trainer counts them.
    """

    consumed: int
    epoch: int
    order: ReadStream

    def __init__(self, order: ReadStream, epoch: int, consumed: int = 0) -> None:
        self.order, self.epoch, self.consumed = order, epoch, consumed
        self.length: int = order.num_steps

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; UNKNOWN until it has been seen, if the stream does not say."""
        ended = self.order.ended
        end = ended[1] if ended is not None and ended[0] == self.epoch else self.length
        return UNKNOWN if end == UNKNOWN else max(end - self.consumed, 0)

    def read(self, first_step: int = 0) -> Iterator[Any]:
        """Read the batches of this rank from a step on; when the last is handed over, :attr:`num_steps` is known.

        Raises:
            StreamError: The stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands at that step.
        """
        return self.order.read(self.epoch, self.consumed + first_step)

    def batches(self, rank: int, first_step: int = 0) -> NoReturn:
        """A stream has no indices: :meth:`read` gives its batches.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self.order.name} is a stream, which has no indices. Iterate over its loader, or loader.batches(plan)."
        )

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps; its details are looked up when they are asked for."""
        step = self.consumed + steps
        return Progress(epoch=self.epoch, consumed=step, details=StreamDetails(self.order, self.epoch, step))

    def report_after(self, steps: int) -> dict[str, Any]:
        """Steps of the epoch, pass over the stream, and shards not read to their end or left out.

        Raises:
            StreamError: It is too long ago.
        """
        step = self.consumed + steps
        return {"batches": step, **self.order.state_at(self.epoch, step).report()}

    def repeats(self) -> str:
        """Nothing is served twice."""
        return ""


class StreamDetails(Mapping[str, Any]):
    """The positions of all worker slots before a step, looked up when first asked for: a read-only dict.

    Nothing is gathered for the many steps of which nobody writes a state. Copies and pickles are plain dicts.

    Args:
        order: The stream.
        epoch: The epoch of the step.
        step: The number of the step.

    Raises:
        PositionError, StreamError: When asked for what nobody knows, or not any more.
    """

    def __init__(self, order: ReadStream, epoch: int, step: int) -> None:
        self.order, self._epoch, self._step = order, epoch, step

    @cached_property
    def _data(self) -> dict[str, Any]:
        return self.order.details_at(self._epoch, self._step)

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._data,)
