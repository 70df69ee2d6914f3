"""A DataLoader over an order, which can begin anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index.checks import as_int
from lightning_stateful.index.orders import Order
from lightning_stateful.index.position import Position
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.index.slots import BatchOrder, SlotPlan
from lightning_stateful.index.topology import Topology
from lightning_stateful.loaders.batches import BatchPlan, Cut, PassBatches, PassIndices, PositionedBatches
from lightning_stateful.loaders.cutting import cutting_of
from lightning_stateful.loaders.engine import Engine
from lightning_stateful.loaders.seeded import SeededDataset, keep_randomness
from lightning_stateful.state import accepted_names

# What the inner DataLoader takes over from this one, where this version of torch has it.
OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class StatefulLoader(DataLoader[Any]):
    """A map-style DataLoader whose batches are a function of a position.

    A pass begins where the loader stands, which is looked up at the first ``next()``: any number of ``iter()`` calls,
    and a state loaded after them, cost nothing and change nothing. What counts is what has been handed over, not what
    workers have fetched. When the last batch of an epoch is handed over, the loader stands at the next epoch; a pass
    that is broken off leaves it at the beginning of that pass, so that the next ``iter()`` begins there again.

    All ranks get the same number of batches, and every sample of the epoch is served once (see
    :class:`~lightning_stateful.index.steps.StepRule` for the tail).

    Args:
        dataset: A map-style dataset with a length.
        batch_size: Samples in a batch of one rank.
        shuffle: Whether each epoch has an order of its own.
        sampler: In place of ``shuffle``: one of torch's own samplers, of which the kind and the parameters are
            taken, or an :class:`~lightning_stateful.index.orders.Order`.
        batch_sampler: In place of ``batch_size``, ``sampler`` and ``drop_last``: a ``torch.utils.data.BatchSampler``
            around one of torch's own samplers, a batch sampler of this package, or a
            :class:`~lightning_stateful.index.slots.BatchOrder`. Of one of this package's, batch sizes are part of the
            configuration, and a position that it holds is left behind: load the state into the loader.
        drop_last: Leave out the last step of an epoch if it is not full.
        seed: Chooses the orders and the randomness of samples.
        num_replicas: Data-parallel ranks; by default those of the process group at the first batch, or 1.
        rank: This rank; by default that of the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, epoch,
            sample).
        exact: For evaluation: never repeat a sample unless there are fewer samples than ranks.
        accept: Names of differences between a state and this configuration to let pass on load, for example
            ``("dataset.length",)``.
        **options: Any other option of :class:`torch.utils.data.DataLoader`.

    State:
        The position after the batches that the present pass has handed over: under 1 KB, equal on all ranks, good for
        any number of ranks and workers and any batch size.

    Raises:
        ConfigurationError: An argument is out of range.
        UnsupportedLoaderError: The dataset is iterable, or the sampler is none of torch's own.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Sampler[Any] | Order | None = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed_samples: bool = True,
        exact: bool = False,
        accept: Collection[str] = (),
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UnsupportedLoaderError(
                f"{type(dataset).__name__} has no random access by index; StatefulLoader needs a map-style dataset "
                "with __getitem__ and __len__."
            )
        if not options.pop("in_order", True):
            raise ConfigurationError("in_order=False hands batches over in no fixed order and cannot be resumed.")
        self.seed = seed = as_int("seed", seed)
        self.seed_samples = seed_samples
        self.cut, self._cursor, accepted = cutting_of(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            seed=seed,
            exact=exact,
            num_replicas=num_replicas,
            rank=rank,
        )
        self.order = self.cut.order
        self.accept = (*accepted, *accepted_names(accept))
        self._generation = 0
        self._running: _Count | None = None
        self._engine: Engine | None = None
        indices = PassIndices(self.cut, self._cursor)
        if isinstance(self.cut, Cut):
            how: dict[str, Any] = {
                "batch_size": self.cut.batch_size,
                "sampler": indices,
                "drop_last": self.cut.drop_last,
            }
            super().__init__(dataset, **how, **options)
        else:
            super().__init__(dataset, batch_sampler=PassBatches(self.cut, self._cursor), **options)
            # torch puts a sampler of its own beside a batch sampler, in which Fabric would see something to replace.
            object.__setattr__(self, "sampler", indices)

    @property
    def topology(self) -> Topology:
        """The ranks that batches are dealt out to."""
        return self.cut.topology()

    @property
    def plan(self) -> BatchPlan | SlotPlan:
        """The batches of this rank, as a function of a position."""
        return self.cut.plan()

    @property
    def position(self) -> Position:
        """Where the model stands that was trained on all batches handed over."""
        origin = self._cursor.position
        handed = 0 if self._running is None else self._running.handed
        return self._normal(self.plan.after(origin, handed) if handed else origin)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.position.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the loader stands."""
        return self.plan.num_batches()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return _Pass(self)

    @property
    def _iterator(self) -> Any:
        # Where torch keeps persistent workers, and Lightning looks to end them after training.
        return None if self._engine is None else self._engine.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if self._engine is not None:
            self._engine.loader._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Stand at the beginning of ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            self.seek(self.plan.begin(epoch, self._cursor.position))

    def seek(self, position: Position) -> None:
        """Stand at ``position``; a pass that is running goes on from there."""
        self._cursor.position = position
        self._running = None
        self._generation += 1

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed over: fresh plain data, equal on all ranks."""
        return self._cursor.state_dict(self.position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Stand where ``state_dict`` was taken.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration; nothing changes then.
        """
        self.seek(self.read(state_dict))

    def position_report(self) -> dict[str, Any]:
        """Where the loader stands: epoch, and slots consumed or what has been served of every source."""
        return self.report_at(self.position)

    def report_at(self, position: Position) -> dict[str, Any]:
        """:meth:`position_report` at another position."""
        if isinstance(self.order, BatchOrder):
            return {"epoch": position.epoch, **self.order.report(position)}
        return {"epoch": position.epoch, "samples": position.consumed}

    def state_at(self, position: Position) -> dict[str, Any]:
        """The state of this loader at another position."""
        return self._cursor.state_dict(position)

    def read(self, state_dict: Mapping[str, Any], *, where: str = "The loader's state") -> Position:
        """The position that a state names, without moving there; see :meth:`Cursor.read`."""
        return self._cursor.read(state_dict, accept=self.accept, where=where)

    def locate(self, state_dict: Mapping[str, Any], *, cyclic: bool, where: str) -> Position:
        """The position in a state whose differences were looked at before; see :meth:`Cursor.locate`."""
        return self._cursor.locate(state_dict, cyclic=cyclic, where=where)

    def batches(self, position: Position) -> Iterator[Any]:
        """The batches from ``position`` to the end of its pass, without moving the loader."""
        count, fetch = self._fetcher(position)
        for _ in range(count):
            yield fetch()

    def _fetcher(self, position: Position) -> tuple[int, Callable[[], Any]]:
        """How many batches there are from ``position`` on, and what gets the next of them."""
        plan = self.plan
        count = plan.num_batches(position)
        if not count:
            return 0, tuple
        if self._engine is None or self._engine.batches.plan != plan:
            self._engine = self._build_engine(plan)
        engine = self._engine
        engine.batches.start = position
        if not self.num_workers and not self.pin_memory:
            fetch = engine.fetch_in_process()
        else:
            # torch draws a base seed for its workers here; not from the generator that the model uses.
            base = derive_seed("workers", self.seed, self.topology.rank, position.epoch, position.consumed)
            engine.generator.manual_seed(base)
            fetch = iter(engine.loader).__next__
        if self.num_workers or not self.seed_samples:
            return count, fetch

        def fetch_aside() -> Any:
            # Worker processes have generators of their own; here the model uses the same ones.
            with keep_randomness():
                return fetch()

        return count, fetch_aside

    def _normal(self, position: Position) -> Position:
        """The beginning of the next epoch in place of the end of one."""
        plan = self.plan
        return plan.begin(position.epoch + 1, position) if position.consumed and plan.is_over(position) else position

    def _build_engine(self, plan: BatchPlan | SlotPlan) -> Engine:
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name, None)}
        batches = PositionedBatches(plan, derive_seed("samples", self.seed) if self.seed_samples else None)
        generator = torch.Generator()
        loader = DataLoader(
            SeededDataset(self.dataset) if self.seed_samples else self.dataset,
            batch_sampler=batches,
            generator=generator,
            **options,
        )
        return Engine(loader, batches, generator)


class _Count:
    """Batches that a pass has handed over.

    Loader and pass share it in place of knowing each other: a cycle would keep worker processes alive until the
    garbage collector finds it.
    """

    __slots__ = ("handed",)

    def __init__(self) -> None:
        self.handed = 0


class _Pass:
    """One pass over a loader; it looks up where to begin at the first ``next()``."""

    def __init__(self, loader: StatefulLoader) -> None:
        self._loader = loader
        self._count = _Count()
        self._generation = -1
        self._total = 0
        self._fetch: Callable[[], Any] = tuple

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._generation != self._loader._generation:
            self._begin()
        count = self._count
        if count.handed == self._total:
            raise StopIteration
        try:
            batch = self._fetch()
        except Exception:
            # A sample could not be read: its batch is tried again at the next call.
            self._generation = -1
            raise
        count.handed += 1
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
