"""A DataLoader over an order, which can begin anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.loaders.batches import AnyPlan, PassBatches, PassIndices, PositionedBatches, SlotCut
from lightning_stateful.loaders.cutting import cutting_of, length_of, refuse_other_length
from lightning_stateful.loaders.engine import OPTIONS, Engine
from lightning_stateful.loaders.kinds import Pickled, copied
from lightning_stateful.loaders.origins import is_torchdatas
from lightning_stateful.loaders.passes import Count, Pass
from lightning_stateful.loaders.seeded import SeededDataset
from lightning_stateful.samplers.rng import IsolatedReads, keep_randomness, seed_or_default
from lightning_stateful.samplers.sampler_plan import SamplerCut
from lightning_stateful.samplers.user_sampler import UserSampler
from lightning_stateful.state import accepted_names


class StatefulLoader(Pickled, DataLoader[Any]):
    """A map-style DataLoader whose batches are a function of a position.

    A pass begins where the loader stands, which is looked up at the first ``next()``: any number of ``iter()`` calls,
    and a state loaded after them, cost nothing and change nothing. What counts is what has been handed over, not what
    workers have fetched. When the last batch of an epoch is handed over, the loader stands at the next epoch; a pass
    that is broken off leaves it at the beginning of that pass, so that the next ``iter()`` begins there again.

    All ranks get the same number of batches, and every sample of the epoch is served once (see
    :class:`~lightning_stateful.core.steps.StepRule` for the tail).

    Args:
        dataset: A map-style dataset with a length.
        batch_size: Samples in a batch of one rank; None to hand what the sampler yields to the dataset as it is.
        shuffle: Whether each epoch has an order of its own.
        sampler: In place of ``shuffle``: any sampler, perhaps in a
            :class:`~lightning_stateful.samplers.ddp_wrapper.DDPSamplerWrapper`, or an
            :class:`~lightning_stateful.index.orders.Order`.
        batch_sampler: In place of ``batch_size``, ``sampler`` and ``drop_last``: any batch sampler, perhaps wrapped
            likewise, or a :class:`~lightning_stateful.index.slots.BatchOrder`. Of one of this package's, batch sizes
            are part of the configuration, and a position that it holds is left behind: load the state into the loader.
        drop_last: Leave out the last step of an epoch if it is not full.
        seed: Chooses the orders and the randomness of samples; by default the seed of Lightning's ``seed_everything``,
            or 0.
        path: Where several loaders are served side by side, which of them this is: each draws from (seed, path).
        num_replicas: Data-parallel ranks; by default those of the process group at the first batch, or 1.
        rank: This rank; by default that of the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, path, epoch,
            batch).
        exact: For evaluation: never repeat a sample unless there are fewer samples than ranks.
        replace_samplers: Replace torch's own random samplers by orders of the same distribution, of which every place
            is reached at once. A plain shuffle always is such an order.
        accept: Names of differences between a state and the present data to let pass on load: ``"dataset.length"``.
        **options: Any other option of :class:`torch.utils.data.DataLoader`.

    State:
        The position after the batches handed over in the present pass: under 1 KB, equal on all ranks, good for any
        ranks, workers and batch size.

    Raises:
        ConfigurationError: An argument is out of range.
        UnsupportedLoaderError: The dataset is iterable, or the sampler yields something else whenever it is begun.
    """

    own_rank: int | None = None  # The rank that it is of alone, where it is not dealt out.

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        seed: int | None = None,
        path: str = "",
        num_replicas: int | None = None,
        rank: int | None = None,
        seed_samples: bool = True,
        exact: bool = False,
        replace_samplers: bool = False,
        accept: Collection[str] = (),
        **options: Any,
    ) -> None:
        by_sampler = sampler is not None or batch_sampler is not None
        if isinstance(dataset, IterableDataset) or not (by_sampler or hasattr(dataset, "__len__")):
            raise UnsupportedLoaderError(
                f"{type(dataset).__name__} has no random access by index; StatefulLoader needs a map-style dataset "
                "with __getitem__ and __len__. StreamDataModule and patch_dataloader serve iterable datasets."
            )
        if not options.pop("in_order", True):
            raise ConfigurationError("in_order=False hands batches over in no fixed order and cannot be resumed.")
        self._original: DataLoader[Any] | None = None
        self.seed = seed = seed_or_default(seed)
        self.path, self._own_seed = path, loader_seed(seed, path)
        self.seed_samples = seed_samples
        self.cut, self.order_alone, self._cursor, accepted = cutting_of(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            seed=seed,
            path=path,
            exact=exact,
            replace_samplers=replace_samplers,
            generator=options.get("generator"),
            accept=accepted_names(accept),
            num_replicas=num_replicas,
            rank=rank,
        )
        self.order = self.cut.order
        self.accept = tuple(dict.fromkeys([*accepted, *accepted_names(accept)]))
        self._length = length_of(dataset, self.cut)
        self._generation = 0
        self._running: Count | None = None
        self._engine: Engine | None = None
        self._isolate = IsolatedReads()
        is_batched = batch_size is not None
        indices = PassIndices(self.cut, self._cursor, is_batched=is_batched)
        # Not super(): between this class and torch's there may be a user's, which has been constructed already.
        if isinstance(self.cut, SlotCut) or (
            isinstance(self.cut, SamplerCut) and self.cut.order.whole_batches and is_batched
        ):
            DataLoader.__init__(self, dataset, batch_sampler=PassBatches(self.cut, self._cursor), **options)
            # torch puts a sampler of its own beside a batch sampler, in which Fabric would see something to replace.
            object.__setattr__(self, "sampler", indices)
        else:
            how: dict[str, Any] = {"drop_last": self.cut.drop_last} if is_batched else {}
            size = self.cut.batch_size if is_batched else None
            DataLoader.__init__(self, dataset, batch_size=size, sampler=indices, **how, **options)

    @property
    def topology(self) -> Topology:
        """The ranks that batches are dealt out to."""
        return self.cut.topology()

    @property
    def plan(self) -> AnyPlan:
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
        """Batches of a whole epoch, wherever the loader stands.

        Raises:
            TypeError: The sampler does not know its length.
        """
        if not self.is_sized:
            raise TypeError(f"The sampler {self.order.name} has no len(), so this loader has none.")  # type: ignore[union-attr]
        return self.plan.num_batches()

    @property
    def is_sized(self) -> bool:
        """Whether the number of batches of an epoch is known before its end."""
        return not isinstance(self.order, UserSampler) or self.order.is_sized

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return Pass(self)

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
        if isinstance(self.order, (BatchOrder, UserSampler)):
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

    def batches(self, position: Position, *, isolated: bool = True) -> Iterator[Any]:
        """The batches from ``position`` to the end of its pass, without moving the loader.

        Args:
            position: Where to begin.
            isolated: Whether the process's generators are put back after a batch that is read in this process; not
                where they are seeded then anyway.
        """
        count, fetch = self._fetcher(position, isolated=isolated)
        learns = isinstance(self.order, UserSampler) and self.order.way == "feedback"
        for step in range(count):
            try:
                batch = fetch()
            except StopIteration:
                return
            # Of an end that it cannot know, Lightning asks one batch ahead: the one before is trained on next.
            next_step = step if self.is_sized else step - 1
            if learns and next_step >= 0:
                self.order.note_handed(self.plan.after(position, next_step))  # type: ignore[union-attr]  # by its way
            yield batch

    def _fetcher(self, position: Position, *, isolated: bool = True) -> tuple[int, Callable[[], Any]]:
        """How many batches there are from ``position`` on, and what gets the next of them."""
        plan = self.plan
        count = plan.num_batches(position)
        refuse_other_length(self.dataset, self._length)
        if not count:
            return 0, tuple
        options = self._options()
        if self._engine is None or self._engine.batches.plan != plan or self._engine.options != options:
            self._engine = self._build_engine(plan, options)
        engine = self._engine
        engine.batches.start = position
        if not self.num_workers and not self.pin_memory and engine.is_plain:
            return count, engine.fetch_in_process(self.dataset, self._isolate if isolated else None)
        # torch draws a base seed for its workers here; not from the generator that the model uses.
        base = derive_seed("workers", self._own_seed, self.topology.rank, position.epoch, position.consumed)
        engine.generator.manual_seed(base)
        fetch = engine.fetch(count)
        if self.num_workers or not (self.seed_samples and isolated):
            return count, fetch

        def fetch_aside() -> Any:
            # Worker processes have generators of their own; here the model uses the same ones.
            with keep_randomness():
                return fetch()

        return count, fetch_aside

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left of the epoch of which the latest batch was handed over."""
        if isinstance(self.order, UserSampler) and (self.order.live is None or self.order.live.end is None):
            return False
        plan, handed = self.plan, 0 if self._running is None else self._running.handed
        return plan.is_over(plan.after(self._cursor.position, handed))

    def _normal(self, position: Position) -> Position:
        """The beginning of the next epoch in place of the end of one."""
        plan = self.plan
        return plan.begin(position.epoch + 1, position) if position.consumed and plan.is_over(position) else position

    def _options(self) -> dict[str, Any]:
        """Options of torch's loader, which may be set anew between epochs."""
        return {name: getattr(self, name) for name in OPTIONS if getattr(self, name, None)}

    def _build_engine(self, plan: AnyPlan, options: dict[str, Any]) -> Engine:
        batches = PositionedBatches(
            plan, self._own_seed if self.seed_samples else None, is_batched=self.batch_sampler is not None
        )
        dataset = SeededDataset(self.dataset) if self.seed_samples else self.dataset
        if self._original is not None and not is_torchdatas(self._original):
            return Engine.within(self._original, dataset, batches, options)
        return Engine.of(dataset, batches, options)

    def adopt(self, original: DataLoader[Any]) -> None:
        """Read through a copy of the loader that this one was made of, and have its attributes."""
        self._original = copied(original)

    def __getattr__(self, name: str) -> Any:
        original = vars(self).get("_original")
        if original is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = vars(self).get("_original")
        # What this class knows nothing of belongs to the loader that it was made of.
        if original is not None and name not in vars(self) and not hasattr(StatefulLoader, name):
            setattr(original, name, value)
        else:
            super().__setattr__(name, value)
