"""A DataLoader over a stream, which goes on where the model stands, on any ranks and workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import DamagedStateError, PositionError, StateMismatchError
from lightning_stateful.index.position import Position
from lightning_stateful.index.step_plan import ENDLESS
from lightning_stateful.loaders.kinds import Pickled, copied
from lightning_stateful.loaders.stream_course import StreamCourse
from lightning_stateful.loaders.stream_options import StreamOptions
from lightning_stateful.loaders.stream_order import StreamOrder, StreamPlan
from lightning_stateful.loaders.stream_setup import StreamSetup
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.rng import keep_if_drawn, seed_or_default
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.state import accepted_names, differences
from lightning_stateful.streams.lane import StreamConfig


class StreamLoader(Pickled, DataLoader[Any]):
    """Serves a stream so that a resume goes on at the very next batch.

    Ranks and workers take the stream's shards in turn. Each rank makes known how far it has read in its shards, through
    the key-value store of the process group, so that every state has all of them, of the very same step; and all ranks
    stop at the same step, known one step ahead. On the same ranks and workers a resume goes on in exactly the same
    order; on others, what is left of the shards is dealt out anew.

    An iterable dataset without shards divides itself, and needs the same ranks and workers within an epoch. If it has
    no ``state_dict`` either, it is read again up to its place.

    Args:
        loader: The user's loader; a copy of it is read, of its class and with its attributes.
        config: How the stream is read; by default as the loader says.
        options: How it is served.
        seed: Chooses the randomness of what has none of its own; by default that of Lightning's ``seed_everything``,
            or 0.
        path: Where several loaders are served side by side, which of them this is: each draws from (seed, path).
        seed_samples: Seed what torch, NumPy and ``random`` draw, by (seed, path, epoch, shard, sample).
        num_replicas: Data-parallel ranks; by default those of the process group at the first batch, or 1.
        rank: This rank.
        accept: Names of differences between a state and this configuration to let pass.

    State:
        The position after the batches handed over, and where in its shards each lane stands; equal on all ranks.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        config: StreamConfig | None = None,
        options: StreamOptions | None = None,
        seed: int | None = None,
        path: str = "",
        seed_samples: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        # Not torch's constructor: the copy has been constructed.
        self.__dict__["_original"] = copied(loader)
        vars(self._original).update(_iterator=None)
        self.seed, self.path, self.seed_samples = seed_or_default(seed), path, seed_samples
        self.options = StreamOptions() if options is None else options
        self.accept = accepted_names(accept)
        self._config, self._num_replicas, self._rank = config, num_replicas, rank
        setup = StreamSetup(
            self._original,
            config,
            self.options,
            self.seed,
            path=path,
            seed_samples=seed_samples,
            num_replicas=num_replicas,
            rank=rank,
            accept=self.accept,
        )
        self.course = StreamCourse(setup)
        self.order = StreamOrder(setup.name, self.course.config.describe(), len(self) if self.is_sized else ENDLESS)
        self._cursor = Cursor(self.order, {})
        self._began: Position | None = None
        self._handed = 0
        self._latest: object = None

    def again(
        self, *, path: str = "", num_replicas: int | None = None, rank: int | None = None, exact: bool = False
    ) -> StreamLoader:
        """A loader of the same stream that nobody has read yet.

        Args:
            path: As in the constructor.
            num_replicas: Data-parallel ranks, if this loader was not given theirs.
            rank: This rank.
            exact: Whether it is for evaluation: each rank serves what it has, of every source.
        """
        if (self._num_replicas, self._rank) != (None, None):
            num_replicas, rank = self._num_replicas, self._rank
        made: StreamLoader = type(self)(
            self._original,
            config=self._config,
            options=replace(self.options, exact=True, steps_per_epoch=None) if exact else self.options,
            seed=self.seed,
            path=path,
            seed_samples=self.seed_samples,
            num_replicas=num_replicas,
            rank=rank,
            accept=self.accept,
        )
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # What reads for this loader stays here: a copy in another process begins anew, or where a state is loaded.
        unread = self.course._run is None and self.course._reader is None
        return super().__reduce_ex__(protocol) if unread else self.again(path=self.path).__reduce_ex__(protocol)

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known beforehand."""
        return self.options.steps_per_epoch is not None

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return detect_topology(self._num_replicas, self._rank)

    @property
    def plan(self) -> StreamPlan:
        """Counts steps."""
        return StreamPlan(width=self.topology.num_replicas, num_steps=len(self.order))

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
        if self.options.steps_per_epoch is None:
            raise TypeError(f"{self.order.name} is a stream; how many batches it gives is known at its end.")
        return self.options.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        latest = self._latest = object()
        began = self._began = self._cursor.position
        self._handed = 0
        empty = True
        for batch, is_last in self._read(began):
            empty = False
            if self._latest is latest:
                self._handed += 1
                if is_last:
                    self._stand(self.plan.begin(began.epoch + 1))
            yield batch
        if empty and self._latest is latest:
            self._stand(self.plan.begin(began.epoch + 1))

    def batches(self, position: Position, *, isolated: bool = True) -> Iterator[Any]:
        """The batches from ``position`` to the end of the epoch, without moving the loader.

        Args:
            position: Where to begin.
            isolated: Whether the process's generators are put back after a batch that is read in this process; not
                where they are seeded then anyway.
        """
        return (batch for batch, _ in self._read(position, isolated=isolated))

    def _read(self, position: Position, *, isolated: bool = True) -> Iterator[tuple[Any, bool]]:
        """The batches from ``position`` on, and whether each is the last."""
        batches = self.course.read(position)
        if self.num_workers or not (self.seed_samples and isolated):
            yield from batches
            return
        while True:
            # Samples are seeded, and the process draws from the same generators.
            with keep_if_drawn():
                found = next(batches, None)
            if found is None:
                return
            yield found

    def set_epoch(self, epoch: int) -> None:
        """Stand at the beginning of ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            self.seek(self.plan.begin(epoch))

    def seek(self, position: Position) -> None:
        """Stand at ``position``, from the next pass on."""
        self._stand(position)
        self._latest = None

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed over: fresh plain data, equal on all ranks."""
        return self.state_at(self.position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Stand where ``state_dict`` was taken.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration.
        """
        where = "The loader's state"
        self._cursor.read(state_dict, accept=self.accept, where=where)
        self.seek(self.locate(state_dict, cyclic=False, where=where))

    def state_at(self, position: Position) -> dict[str, Any]:
        """The state at another position.

        Raises:
            StreamError: It is too long ago.
        """
        state = self._cursor.state_dict(replace(position, width=self.topology.num_replicas))
        state["progress"].update(self.course.standing_at(position).to_dict())
        return state

    def report_at(self, position: Position) -> dict[str, Any]:
        """Epoch, steps, pass over the stream, and shards not read to their end or left out."""
        return {"epoch": position.epoch, "batches": position.consumed, **self.course.standing_at(position).report()}

    def position_report(self) -> dict[str, Any]:
        """:meth:`report_at` after what was handed over."""
        return self.report_at(self.position)

    def locate(self, state_dict: Mapping[str, Any], *, cyclic: bool, where: str) -> Position:
        """The position in a state whose differences were looked at before.

        Raises:
            StateError: It is damaged, or cannot be continued on these ranks and workers.
        """
        position = self._cursor.locate(state_dict, cyclic=cyclic, where=where)
        here = replace(position, width=self.topology.num_replicas)
        try:
            self.course.go_on(here, state_dict["progress"], position.width, where=where)
        except (DamagedStateError, PositionError) as error:
            # Accepted, and yet it changes what the state's places say.
            changed = differences(state_dict, self._cursor.state_dict(), fingerprints=False)
            if not changed:
                raise
            remedy = "Within a pass this cannot be let pass. Put it back, or resume where a pass begins."
            raise StateMismatchError([replace(one, remedy=remedy) for one in changed], where=where) from error
        return here

    @property
    def _iterator(self) -> Any:  # torch's attribute, by which Lightning ends workers
        return self.course.iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None:
            self.course.end_workers()

    def _stand(self, position: Position) -> None:
        self._cursor.position = position
        self._began, self._handed = None, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_original" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the user's loader has is set there: a worker_init_fn, persistent workers to be ended.
        if name in vars(self._original) and name not in vars(self) and name != "_iterator":
            setattr(self._original, name, value)
        else:
            object.__setattr__(self, name, value)
