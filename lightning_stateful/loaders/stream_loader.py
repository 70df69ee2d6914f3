"""A DataLoader over an iterable dataset, which is read again up to where it is to go on."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from lightning_stateful.errors import Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.index.checks import as_int
from lightning_stateful.index.position import Position
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.index.step_plan import ENDLESS, StepPlan
from lightning_stateful.index.steps import StepRule
from lightning_stateful.index.topology import Topology
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.randomness import Randomness, keep_randomness, seed_randomness
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.state import accepted_names

_END = object()


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """Batches of a stream: as many as come, in the order in which they come."""

    name: str
    seed: int
    num_workers: int
    kind: ClassVar[str] = "stream"
    order_version: ClassVar[int] = 1

    def __len__(self) -> int:
        return ENDLESS

    def take(self, slots: Any, epoch: int) -> Any:
        """The batches by number: nothing else is known of them."""
        return slots

    def describe(self) -> dict[str, Any]:
        """What the batches follow from, as far as it is known."""
        return {"seed": self.seed, "dataset": {"class": self.name}, "num_workers": self.num_workers}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan(StepPlan):
    """Counts steps; a rank is given what its own stream gives.

    Attributes:
        rule: One batch a step.
        rank: 0: there is one stream for each rank.
        width: Data-parallel ranks.
    """

    rule: StepRule
    rank: int
    width: int

    def num_slots(self) -> int:
        """More than there will be."""
        return ENDLESS

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``."""
        return Position(epoch=epoch, width=self.width)

    def is_over(self, position: Position) -> bool:
        """False: the end is not known before it is there."""
        return False

    def repeats(self) -> list[str]:
        """Nothing that is known."""
        return []


class StreamLoader(DataLoader[Any]):
    """Goes on in an iterable dataset by reading again, and leaving out, what was trained on.

    Every rank reads the stream that its own dataset gives it: dealing data out to ranks is the dataset's task. The
    dataset is told the epoch by ``set_epoch`` where it has that. What torch, NumPy and ``random`` draw while it is
    read is seeded from (seed, epoch, rank), in workers as well. One batch is read ahead, to know the last.

    A resume takes as long as reading what came before in the epoch, and says so in a warning. It needs the same number
    of ranks and workers.

    Args:
        loader: The user's loader; a copy of it is read, of its class and with its attributes.
        seed: Chooses the randomness.
        num_replicas: Data-parallel ranks; by default those of the process group at the first batch, or 1.
        rank: This rank.
        accept: Names of differences between a state and this configuration to let pass.

    State:
        The position after the batches handed over, counted on every rank alike.
    """

    is_sized = False

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        # Not torch's constructor: the copy has been constructed.
        self.__dict__["_original"] = copy.copy(loader)
        vars(self._original).update(_iterator=None, generator=torch.Generator())
        self.seed = as_int("seed", seed)
        self.accept = accepted_names(accept)
        self._num_replicas, self._rank = num_replicas, rank
        self.order = StreamOrder(type(loader.dataset).__qualname__, self.seed, loader.num_workers)
        self._cursor = Cursor(self.order, {})
        self._began: Position | None = None
        self._handed = 0
        self._latest: object = None

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return detect_topology(self._num_replicas, self._rank)

    @property
    def plan(self) -> StreamPlan:
        """Counts steps."""
        return StreamPlan(rule=StepRule(batch_size=1), rank=0, width=self.topology.num_replicas)

    @property
    def position(self) -> Position:
        """Where the model stands that was trained on all batches handed over."""
        began = self._cursor.position if self._began is None else self._began
        return replace(began, consumed=began.consumed + self._handed, width=self.topology.num_replicas)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.position.epoch

    def __len__(self) -> int:
        raise TypeError(f"{self.order.name} is a stream; how many batches it gives is known at its end.")

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        latest = self._latest = object()
        began = self._began = self._cursor.position
        self._handed = 0
        for batch, is_last in self._read(began):
            if self._latest is latest:
                self._handed += 1
                if is_last:
                    self.seek(self.plan.begin(began.epoch + 1))
            yield batch

    def batches(self, position: Position) -> Iterator[Any]:
        """The batches from ``position`` to the end of the epoch, without moving the loader."""
        return (batch for batch, _ in self._read(position))

    def set_epoch(self, epoch: int) -> None:
        """Stand at the beginning of ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            self.seek(self.plan.begin(epoch))

    def seek(self, position: Position) -> None:
        """Stand at ``position``, from the next pass on."""
        self._cursor.position = position
        self._began, self._handed, self._latest = None, 0, None

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed over: fresh plain data, equal on all ranks."""
        return self.state_at(self.position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Stand where ``state_dict`` was taken.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration.
        """
        where = "The loader's state"
        position = self._cursor.read(state_dict, accept=self.accept, where=where)
        self.seek(self._of_these_ranks(position, where))

    def state_at(self, position: Position) -> dict[str, Any]:
        """The state at another position."""
        return self._cursor.state_dict(replace(position, width=self.topology.num_replicas))

    def report_at(self, position: Position) -> dict[str, Any]:
        """Epoch, and batches of each rank."""
        return {"epoch": position.epoch, "batches": position.consumed}

    def position_report(self) -> dict[str, Any]:
        """Epoch, and batches of each rank, after what was handed over."""
        return self.report_at(self.position)

    def locate(self, state_dict: Mapping[str, Any], *, cyclic: bool, where: str) -> Position:
        """The position in a state whose differences were looked at before."""
        return self._of_these_ranks(self._cursor.locate(state_dict, cyclic=cyclic, where=where), where)

    def _of_these_ranks(self, position: Position, where: str) -> Position:
        ranks = self.topology.num_replicas
        if position.consumed and position.width != ranks:
            remedy = (
                f"What {self.order.name} gives to one rank cannot be given to others: resume on {position.width}, or "
                "from a checkpoint at the end of an epoch."
            )
            changed = Difference(path="ranks", saved=position.width, present=ranks, remedy=remedy)
            raise StateMismatchError([changed], where=where)
        return replace(position, width=ranks)

    def _read(self, position: Position) -> Iterator[tuple[Any, bool]]:
        """Batches from ``position`` on, and whether each is the last."""
        fetch = self._begin(position)
        started = time.perf_counter()
        for done in range(position.consumed):
            if fetch() is _END:
                raise PositionError(
                    f"{position.consumed} batches of {self.order.name} were used in epoch {position.epoch}, but now it "
                    f"ends after {done}. Read the same data, or resume from another checkpoint."
                )
        if position.consumed:
            seconds = time.perf_counter() - started
            warnings.warn(
                f"{position.consumed} batches of {self.order.name} were read again, and left out, to go on in epoch "
                f"{position.epoch}, which took {seconds:.1f} s. A map-style dataset is there at once.",
                StatefulWarning,
                stacklevel=2,
            )
        batch = fetch()
        while batch is not _END:
            upcoming = fetch()
            yield batch, upcoming is _END
            batch = upcoming

    def _begin(self, position: Position) -> Any:
        loader: Any = self._original
        seed = derive_seed("stream", self.seed, position.epoch, self.topology.rank)
        if callable(getattr(loader.dataset, "set_epoch", None)):
            loader.dataset.set_epoch(position.epoch)
        loader.generator.manual_seed(seed)
        if loader.num_workers:
            iterator = iter(loader)
            return lambda: next(iterator, _END)
        with keep_randomness():
            seed_randomness(seed)
            iterator, held = iter(loader), Randomness.now()

        def fetch() -> Any:
            nonlocal held
            # The model draws from the same generators in between.
            with keep_randomness():
                held.restore()
                batch = next(iterator, _END)
                held = Randomness.now()
            return batch

        return fetch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_original" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the user's loader has is set there: a worker_init_fn, persistent workers to be ended.
        if name in vars(self._original) and name not in vars(self):
            setattr(self._original, name, value)
        else:
            object.__setattr__(self, name, value)
