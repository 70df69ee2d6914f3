"""A stream's batches as an order, and the steps of one of its epochs as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.stream_loader.epochs import StreamEpochs


@dataclass(frozen=True)
class StreamOrder:
    """Batches of a stream, in the order in which its shards are read: a :class:`~lightning_stateful.core.BatchOrder`.

    It can plan from the beginning of an epoch, from any progress that was saved, and from the steps that were read
    here lately; it cannot compute what comes at a step that nobody has read.

    Attributes:
        epochs: Reads the stream on the present ranks.
        num_steps: Steps of an epoch; :data:`~lightning_stateful.core.UNKNOWN` if they are known only at its end.
    """

    epochs: StreamEpochs
    num_steps: int = UNKNOWN
    kind: ClassVar[str] = "stream"
    version: ClassVar[int] = 1
    carries_over: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What people know the stream by."""
        return self.epochs.name

    def config(self) -> dict[str, Any]:
        """What determines the batches, as plain data to be compared."""
        return self.epochs.config.describe()

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> StreamEpochPlan:
        """Plan ``epoch``, or the rest of it.

        A progress with details brings the stream there; one without is looked up among the steps that were read here.

        Raises:
            ConfigurationError: The stream is read on another number of ranks.
            StateError: The details cannot be continued on these ranks and workers.
        """
        if num_replicas != self.epochs.num_replicas:
            raise ConfigurationError(
                f"{self.name} is read on {self.epochs.num_replicas} ranks and cannot be planned for {num_replicas}. "
                "Build its loader where the ranks are known."
            )
        if progress is not None:
            self._go_on(progress)
        return StreamEpochPlan(
            self, epoch, progress.consumed if progress is not None and progress.epoch == epoch else 0
        )

    def _go_on(self, progress: Progress) -> None:
        details = progress.details
        is_own = isinstance(details, StreamDetails) and details.epochs is self.epochs
        if details and not is_own:
            self.epochs.go_on(progress)
        is_over = progress.consumed and progress.consumed >= self.num_steps
        if is_over and (not is_own or not self.epochs.knows(progress.epoch + 1, 0)):
            self.epochs.end_at(progress)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The same; a plan is refused where the accepted differences change what the details say."""
        return progress

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> StreamOrder:
        """Itself: it is the loader's ``again`` that reads a stream for another use."""
        return self


class StreamEpochPlan:
    """The rest of an epoch of a stream on the present ranks.

    Args:
        order: The stream.
        epoch: Which epoch.
        consumed: Steps of the epoch that were taken before.
    """

    def __init__(self, order: StreamOrder, epoch: int, consumed: int = 0) -> None:
        self.order, self.epoch, self.consumed = order, epoch, consumed
        # Steps of the whole epoch, once this plan was read to its end.
        self._end: int | None = None

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; UNKNOWN until it has been seen, if the stream does not say."""
        end, ended = self._end, self.order.epochs.ended
        if end is None:
            end = ended[1] if ended is not None and ended[0] == self.epoch else self.order.num_steps
        return UNKNOWN if end == UNKNOWN else max(end - self.consumed, 0)

    def read(self, first_step: int = 0) -> Iterator[Any]:
        """Read the batches of this rank from a step on; when the last is handed over, :attr:`num_steps` is known.

        Raises:
            StreamError: The stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands at that step.
        """
        return self.order.epochs.read(self.epoch, self.consumed + first_step, self._end_at)

    def _end_at(self, num_steps: int) -> None:
        self._end = num_steps

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
        return Progress(epoch=self.epoch, consumed=step, details=StreamDetails(self.order.epochs, self.epoch, step))

    def report_after(self, steps: int) -> dict[str, Any]:
        """Steps of the epoch, pass over the stream, and shards not read to their end or left out.

        Raises:
            StreamError: It is too long ago.
        """
        step = self.consumed + steps
        return {"batches": step, **self.order.epochs.state_at(self.epoch, step).report()}

    def repeats(self) -> str:
        """Nothing is served twice."""
        return ""


class StreamDetails(Mapping[str, Any]):
    """Where every worker slot stands before a step, looked up when it is first asked for: a read-only dict.

    Nothing is gathered for the many steps of which nobody writes a state. Copies and pickles are plain dicts.

    Args:
        epochs: Reads the stream.
        epoch: The epoch of the step.
        step: The number of the step.

    Raises:
        PositionError, StreamError: When asked for what nobody knows, or not any more.
    """

    def __init__(self, epochs: StreamEpochs, epoch: int, step: int) -> None:
        self.epochs, self._epoch, self._step = epochs, epoch, step

    @cached_property
    def _data(self) -> dict[str, Any]:
        return self.epochs.state_at(self._epoch, self._step).to_dict()

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
