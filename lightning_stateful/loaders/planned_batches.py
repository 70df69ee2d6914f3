"""Batches of a plan in place of a DataLoader's samplers, and the dataset that is read by them under their seeds."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, get_worker_info
from torch.utils.data._utils.worker import _generate_state
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_stateful.contents.read_watch import ReadWatch
from lightning_stateful.core.order import UNKNOWN, BatchOrder, EpochPlan, Progress, SampleCountingPlan
from lightning_stateful.core.samples import SampleBatchOrder
from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import StateError, StatefulWarning
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.loaders.own_iteration import OwnPlan, Watch
from lightning_stateful.samplers.state_codec import to_plain
from lightning_stateful.samplers.tracker import Tracker
from lightning_stateful.user_samplers.sampler_memory import ASIDE
from lightning_stateful.user_samplers.sampler_plan import SamplerEpochPlan
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Characters of the indices of a batch that a state has.
_MOST_CHARACTERS = 2**15
# A second pass within an epoch has the order of an epoch that no run gets to.
_PASS_OF_EPOCH = 2**32


class SeededIndex(NamedTuple):
    """A single index (``batch_size=None``) with the seed to read it under; its type tells it from a user's tuples."""

    seed: int
    index: Any


class SeededDataset(Dataset[Any]):
    """A dataset that seeds torch, NumPy and ``random`` before it reads each batch.

    It takes ``(seed, indices)`` for a batch, or a :class:`SeededIndex`. So a batch is read with the same random numbers
    in every process, and collated with the same ones. A dataset with ``__getitems__`` is asked for whole batches, as
    torch does. Every other attribute is the wrapped dataset's.

    Args:
        dataset: A map-style dataset.
        held: The generators to be seeded too; None for those that the dataset holds.
        watch: A :class:`CollateWatch`, which looks at the ``collate_fn`` between batches.
        reads: Looks at the dataset before and after each of the first batches.
    """

    def __init__(
        self, dataset: Any, held: HeldGenerators | None = None, watch: Any = None, reads: ReadWatch | None = None
    ) -> None:
        held = held or HeldGenerators(dataset=dataset)
        # The seed of what is read by hand, and how often that was done under it.
        vars(self).update(dataset=dataset, _held_generators=held, _collate_watch=watch, _reads=reads, _by_hand=None)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before __dict__ is filled.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["dataset"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["dataset"])

    def __getitem__(self, index: Any) -> Any:
        """The sample at a :class:`SeededIndex`; at a bare one by hand, or in a ``worker_init_fn`` that looks in."""
        if isinstance(index, SeededIndex):
            return self._seeded(index.seed, partial(getitem, vars(self)["dataset"], index.index))
        return self._read_by_hand(partial(getitem, vars(self)["dataset"], index))

    def begin_by_hand(self, seed: int) -> None:
        """Seed what a user's ``__iter__`` reads by hand from now on, as often as it does, from ``seed``."""
        vars(self)["_by_hand"] = [seed, 0]

    def _read_by_hand(self, read: Callable[[], Any]) -> Any:
        by_hand = vars(self)["_by_hand"]
        if by_hand is None or get_worker_info() is not None:
            return read()
        by_hand[1] += 1
        return self._seeded(mixed_seed(*by_hand), read)

    def __getitems__(self, batch: Any) -> Any:
        """The samples of a batch, ``(seed, indices)``; of bare indices by hand."""
        if not isinstance(batch, tuple):
            return self._read_by_hand(partial(read_batch, vars(self)["dataset"], batch))
        seed, indices = batch
        watch = vars(self)["_collate_watch"]
        is_watched = watch is not None and not watch.is_over
        if is_watched:
            watch.after()
        samples = self._seeded(seed, partial(read_batch, vars(self)["dataset"], indices))
        if is_watched and not watch.is_over:
            watch.before()
        return samples

    def _seeded(self, seed: int, read: Callable[[], Any]) -> Any:
        held, reads = vars(self)["_held_generators"], vars(self)["_reads"]
        if reads is not None and not reads.is_over:
            read = partial(reads, read)
        if not held.is_idle:
            return held(seed, partial(read_seeded, seed, read))
        return read_seeded(seed, read)


def read_seeded(seed: int, read: Callable[[], Any]) -> Any:
    """What a function reads, with the process's generators seeded for it."""
    seed_randomness(seed)
    if (worker := get_worker_info()) is not None:
        # As in torch it is torch.initial_seed(), for a dataset that derives its own from it. Some versions guard it.
        object.__setattr__(worker, "seed", torch.initial_seed())
    return read()


def read_batch(dataset: Any, indices: Any) -> Any:
    """Read the samples of a dataset at ``indices`` as torch does: all at once if it has ``__getitems__``."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


class ChosenBatch(NamedTuple):
    """A plan of a single batch, of which is known what it was; by its number it is seeded."""

    epoch: int
    number: int
    indices: Any

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batch, whatever the rank."""
        return iter([(self.number, self.indices)])


def known_steps(plan: EpochPlan | None) -> int:
    """The number of steps of a plan; None for one of a sampler that does not say it."""
    if plan is None or plan.num_steps >= UNKNOWN:
        raise TypeError("The sampler has no len(), so its loader has none.")
    return plan.num_steps


def steps_before(order: BatchOrder, plan: EpochPlan, num_replicas: int) -> int:
    """Steps of its epoch before a plan, if they were taken on as many ranks; 0 where their number is not known."""
    begun = (plan.plan if isinstance(plan, OwnPlan) else plan).progress_after(0)
    if not begun.consumed:
        return 0
    if isinstance(order, WrappedSampler):
        return order.rule(num_replicas).num_steps(begun.consumed)
    whole = order.plan(plan.epoch, num_replicas, Progress(epoch=plan.epoch, cycle=begun.cycle))
    is_known = max(whole.num_steps, plan.num_steps) < UNKNOWN
    return max(whole.num_steps - plan.num_steps, 0) if is_known else 0


class OwnPasses:
    """Plans the passes that a user's ``__iter__`` begins within an epoch: over batches, or over a sampler by hand.

    ``watch`` is told that the loader does not hand on one pass of DataLoader's; it is None in evaluation.
    """

    def __init__(self, order: BatchOrder, num_replicas: Callable[[], int], watch: Watch | None) -> None:
        self._order, self._num_replicas, self._watch = order, num_replicas, watch
        self._singly = _singly(order)
        self._has_warned = False

    @property
    def cuts_samples(self) -> bool:
        """Whether batches are cut from the samples of the loader's sampler."""
        return self._singly is not None

    def again(self, plan: EpochPlan, number: int) -> EpochPlan:
        """Plan a pass after others in an epoch: as torch's, in an order of its own; a user's sampler goes on."""
        if self._watch is not None:
            self._watch.note_other()
        return self._plan(self._order, plan, number)

    def singly(self, plan: EpochPlan, number: int) -> EpochPlan:
        """Plan a pass over single samples: every rank has as many, as of torch's DistributedSampler."""
        return self._plan(self._order if self._singly is None else self._singly, plan, number)

    def _plan(self, order: BatchOrder, plan: EpochPlan, number: int) -> EpochPlan:
        begun = (plan.plan if isinstance(plan, OwnPlan) else plan).progress_after(0)
        if not isinstance(order, WrappedSampler):
            start = None if number else Progress(epoch=plan.epoch, cycle=begun.cycle)
            return order.plan(plan.epoch + number * _PASS_OF_EPOCH, self._num_replicas(), start)
        if begun.cycle + number >= ASIDE:
            self._warn_of_many()
        cycle = min(begun.cycle + number, ASIDE - 1)
        details = {name: value for name, value in begun.details.items() if name == "passes" and not number}
        return order.plan(plan.epoch, self._num_replicas(), Progress(epoch=plan.epoch, cycle=cycle, details=details))

    def _warn_of_many(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The loader's own __iter__ reads its data more than {ASIDE} times in an epoch. Later passes draw the "
                "same random numbers, and a resume in this epoch or a later one may not be exact. End the epoch "
                "earlier.",
                StatefulWarning,
                stacklevel=2,
            )


def _singly(order: BatchOrder) -> BatchOrder | None:
    """The order with one sample a step on each rank; None for whole batches."""
    if isinstance(order, SampleBatchOrder):
        return replace(order, batch_size=None, drop_last=False, exact=False)
    return order.singly() if isinstance(order, WrappedSampler) and not order.whole_batches else None


class PlannedBatches:
    """A batch sampler, or a sampler of single indices, that yields the batches of a plan for one rank.

    Args:
        seed: Chooses the seed of each batch, from (seed, epoch, number of the batch), which is yielded with the
            indices for :class:`SeededDataset`. None for bare indices.
        is_batched: Whether the loader collates batches.
        passes: Plans further passes within an epoch, which an ``__iter__`` of the user's may begin.
        watch: Is told what that reads.
    """

    def __init__(
        self, seed: int | None, *, is_batched: bool, passes: OwnPasses | None = None, watch: Watch | None = None
    ) -> None:
        self.seed, self.is_batched, self._passes, self._watch = seed, is_batched, passes, watch
        # What the plan raised, as opposed to the dataset.
        self.error: Exception | None = None
        # Numbers and indices of batches of the pass that were asked for and not given yet; None to keep none.
        self.asked: deque[Any] | None = None
        self.plan: EpochPlan
        self.rank = self.first_step = self._num_passes = self._steps_before = 0

    def begin(self, plan: EpochPlan, rank: int, first_step: int = 0, steps_before: int = 0) -> None:
        """Serve the batches of a rank, from a step of a plan on, before which there were others in the epoch."""
        self.plan, self.rank, self.first_step, self._num_passes = plan, rank, first_step, 0
        self._steps_before = steps_before
        if self.asked is not None:
            self.asked = deque()

    @property
    def first_in_epoch(self) -> int:
        """The number in the epoch of the batch that the next pass begins with."""
        return 0 if self._num_passes else self._steps_before + self.first_step

    def __iter__(self) -> Iterator[Any]:
        self.error = None
        plan, first_step = self.plan, self.first_step
        # At its first batch: with workers, torch calls this twice for a pass.
        if self._num_passes and self._passes is not None:
            plan, first_step = self._passes.again(plan, self._num_passes), 0
        self._num_passes += 1
        try:
            yield from self.of(plan, self.rank, first_step)
        except Exception as error:
            self.error = error
            raise

    def of(self, plan: EpochPlan | ChosenBatch, rank: int, first_step: int = 0) -> Iterator[Any]:
        """The batches of a plan for a rank, with the seeds to read them under."""
        batches = plan.batches(rank, first_step)
        if self.asked is not None:
            batches = self._kept(batches, self.asked)
        if self.seed is None:
            return (batch for _, batch in batches)
        seed = derive_seed("batch", self.seed, plan.epoch)
        if self.is_batched:
            # Plain tuples are sent to workers faster.
            return ((mixed_seed(seed, number), batch) for number, batch in batches)
        return (SeededIndex(mixed_seed(seed, number), index) for number, index in batches)

    def _kept(self, batches: Iterator[tuple[int, Any]], asked: deque[Any]) -> Iterator[tuple[int, Any]]:
        for number, batch in batches:
            asked.append((number, batch))
            yield number, batch

    def __len__(self) -> int:
        """Batches of the whole epoch, also where the rest of it is read: code that asks expects what torch says."""
        self._note_length()
        return known_steps(self._whole())

    def indices(self) -> Iterator[Any]:
        """The plain indices of each batch of the epoch, for code that iterates the batch sampler by itself."""
        plan, number = self._begin_by_hand()
        plan = plan if self._passes is None or not number else self._passes.again(plan, number)
        yield from (batch for _, batch in plan.batches(self.rank))

    def samples(self) -> Iterator[Any]:
        """The indices of the epoch's samples one by one, for code that iterates the sampler by itself."""
        plan, number = self._begin_by_hand()
        singly = plan if self._passes is None else self._passes.singly(plan, number)
        found = (index for _, index in singly.batches(self.rank))
        # What is not collated is an item as it is; of a sampler of the user's a step has a list of samples.
        is_list = self.is_batched and isinstance(singly, SamplerEpochPlan)
        yield from chain.from_iterable(found) if is_list else found

    def num_samples(self) -> int:
        """Samples that :meth:`samples` yields."""
        self._note_length()
        return known_steps(self._whole() if self._passes is None else self._passes.singly(self._whole(), 0))

    def _begin_by_hand(self) -> tuple[EpochPlan, int]:
        """The plan of the whole epoch, and the passes that were begun in it before."""
        if self._watch is not None:
            self._watch.note_by_hand()
        self._num_passes += 1
        return self._whole(), self._num_passes - 1

    def _note_length(self) -> None:
        # Between passes, the plan is that of DataLoader's batches.
        if isinstance(self.plan, OwnPlan) and self._watch is not None:
            self._watch.note_length()

    def _whole(self) -> EpochPlan:
        return self.plan.whole() if isinstance(self.plan, OwnPlan) else self.plan


def stand_for(number: int, num_workers: int, seed: int, begin: Callable[[int], object] | None, _: int) -> None:
    """Begin a worker that is alone as one of several, under the seeds that it has in torch."""
    info = get_worker_info()
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).item())
    for name, value in {"id": number, "num_workers": num_workers, "seed": base_seed + number}.items():
        # torch guards them.
        object.__setattr__(info, name, value)
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    np.random.seed(_generate_state(base_seed, number))  # type: ignore[no-untyped-call]
    if begin is not None:
        begin(number)


class WorkersInTurn(_MultiProcessingDataLoaderIter):
    """torch's iterator, which goes on within an epoch with the worker whose turn it is: samples may follow from it."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._passed_over = self._index_sampler.first_in_epoch % self._num_workers
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        while self._passed_over:
            self._passed_over -= 1
            next(self._worker_queue_idx_cycle)
        super()._try_put_index()


class ShownSampler:
    """Stands for a loader's sampler where the user's ``__iter__`` looks at it, and yields the indices of this epoch.

    Everything else is the user's own sampler's.
    """

    def __init__(
        self, sampler: Any, read: Callable[[], Iterator[Any]], length: Callable[[], int], /, **parts: Any
    ) -> None:
        vars(self).update(_stands_for=sampler, _read=read, _length=length, **parts)

    def __iter__(self) -> Iterator[Any]:
        read: Callable[[], Iterator[Any]] = vars(self)["_read"]
        return read()

    def __len__(self) -> int:
        return int(vars(self)["_length"]())

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_stands_for"], name, value)

    @property  # type: ignore[misc]  # for isinstance()
    def __class__(self) -> Any:
        return type(vars(self)["_stands_for"])

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere there is no epoch: a copy is the user's sampler itself.
        return users_sampler, (vars(self)["_stands_for"],)


def users_sampler(sampler: Any) -> Any:
    """The user's sampler behind one that is shown in its place."""
    return vars(sampler)["_stands_for"] if type(sampler) is ShownSampler else sampler


def plain_indices(indices: Any) -> list[Any] | None:
    """The indices of a batch as a state has them, and whether they are items of a list; None for others, or too many.

    Numbers of NumPy and tensors take a thousandth of the space in an array.
    """
    if indices is None:
        return None
    is_listed = type(indices) is list
    if len(kinds := {*map(type, indices)} if is_listed else ()) == 1:
        kind = next(iter(kinds))
        with suppress(Exception):
            indices = torch.stack(indices) if kind is torch.Tensor else indices
            indices = np.array(indices) if issubclass(kind, np.generic) else indices
    with suppress(StateError):
        plain = to_plain(indices)
        return [plain, is_listed] if len(repr(plain)) <= _MOST_CHARACTERS else None
    return None


class ServedIndices(DistributedSampler[Any]):
    """The loader's ``sampler`` or ``batch_sampler``: what this rank is served in the current pass, from its beginning.

    It is a DistributedSampler by type, so that Lightning and Fabric see that the ranks are taken care of. The epoch
    that they set here only counts their ``iter()`` calls, and is ignored. Everything else is the user's own sampler's.

    Where the user's sampler ``is_iterated``, what is set on that comes into force. ``flat`` are the indices of batches
    one by one.
    """

    def __init__(self, tracker: Tracker, users: Any, *, flat: bool = False, is_iterated: bool = True) -> None:
        vars(self).update(_tracker=tracker, _users=users, _flat=flat, _is_iterated=is_iterated)

    def __iter__(self) -> Iterator[Any]:
        batches = (batch for _, batch in self._tracker.current_plan().batches(self._tracker.topology.rank))
        return chain.from_iterable(batches) if self._flat else batches

    def __len__(self) -> int:
        plan = self._tracker.plan_epoch(self._tracker.latest_epoch)
        if not self._flat:
            return known_steps(plan)
        if not isinstance(plan, SampleCountingPlan):
            raise TypeError("The samples of whole batches are counted only when they are served.")
        return plan.num_samples(self._tracker.topology.rank)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader's own :meth:`StatefulLoader.set_epoch` decides."""

    def __getattr__(self, name: str) -> Any:
        users = vars(self).get("_users")
        if users is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(users, name)

    def __setattr__(self, name: str, value: Any) -> None:
        users = self._users
        if users is not None and not self._is_iterated:
            _warn_of(f"{name} of {type(users).__qualname__}")
        if users is None:
            super().__setattr__(name, value)
        else:
            setattr(users, name, value)


class CutArguments:
    """The arguments of a loader's ``BatchSampler`` of torch's, which are read once; warns where one is set later."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._known = batches, self._present(batches)

    @staticmethod
    def _present(batches: Any) -> dict[str, Any]:
        return dict(vars(batches)) if type(batches) is BatchSampler else {}

    def compare(self) -> None:
        """Warn of what was set since."""
        known, self._known = self._known, self._present(self._batches)
        if changed := [name for name, value in self._known.items() if known.get(name) is not value]:
            _warn_of(f"{', '.join(changed)} of BatchSampler")


def _warn_of(what: str) -> None:
    warnings.warn(
        f"{what} was set on a patched loader, which has read it before, so it has no effect. Make a new loader with "
        "the new value, or give it a sampler or batch sampler class of your own, which is iterated.",
        StatefulWarning,
        stacklevel=3,
    )
