"""Reads the batches of a plan: in this process, or with torch's DataLoader and its workers."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_stateful.contents.collate_watch import CollateWatch
from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.contents.read_watch import ReadWatch, moved_for_good
from lightning_stateful.core.order import UNKNOWN, EpochPlan
from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import StatefulWarning, UnsupportedLoaderError
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.generators.rng import IsolatedReads, keep_randomness, seed_randomness
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.loaders.own_iteration import OwnPlan, Watch
from lightning_stateful.loaders.planned_batches import (
    ChosenBatch,
    OwnPasses,
    PlannedBatches,
    SeededDataset,
    ShownSampler,
    WorkersInTurn,
    read_batch,
    read_seeded,
    stand_for,
    users_sampler,
)
from lightning_stateful.samplers.rank_exchange import collectives_begun
from lightning_stateful.user_loaders import SharedAttributes, is_torchdatas, iterates_as_torch, loader_within
from lightning_stateful.user_samplers.sampler_plan import SamplerEpochPlan

# Attributes of a DataLoader that say what it reads, and not how.
_WHAT = {"dataset", "sampler", "batch_sampler", "generator", "_iterator"}
# A pass that has more steps than this to go is one whose end is not known: it ends when the sampler does.
_NEVER = 2**40


class FailedBatch(NamedTuple):
    """Takes the place of a batch that the dataset or its ``collate_fn`` raised an error for."""

    error: Exception


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes of a DataLoader that say how it reads, at least all that this version of torch knows."""
    defaults = vars(DataLoader([])).items()  # type: ignore[arg-type]  # a list is a dataset
    return {name: getattr(loader, name, value) for name, value in defaults if name not in _WHAT}


def _beside(collate_fn: Any) -> dict[str, Any]:
    """What a user's loader has of its own, beside torch's attributes, if the ``collate_fn`` is a method of it."""
    owner = getattr(collate_fn, "__self__", None)
    torchs = vars(DataLoader([])) if isinstance(owner, DataLoader) else {}  # type: ignore[arg-type]
    return {name: value for name, value in vars(owner).items() if name not in torchs} if torchs else {}


def given(batch: Any) -> Any:
    """A batch; the error of one that cannot be read is raised."""
    if isinstance(batch, FailedBatch):
        raise batch.error
    return batch


class BatchReader:
    """Reads batches with a DataLoader of torch's or of a user's class, which is kept for its persistent workers.

    Args:
        dataset: The user's dataset.
        seed: Seeds the reading of samples; None to leave random generators alone.
        options: Attributes of the loader, see :func:`options_of`.
        own_seed: Seeds worker processes as they start.
        is_batched: Whether batches are collated.
        original: A copy of the user's own loader, to be read with so that its class, attributes and further options
            stay in force.
        watch: Compares what a loader with an ``__iter__`` of its own gives with what it reads; None for others.
        holder: An object that holds the loader and is iterated in its place, and the name of the attribute.
        watches_collate: Warn of a ``collate_fn`` that carries something over from batch to batch.
        passes: Plans what an ``__iter__`` of the user's reads; None for loaders without.
        users: The user's object that would be iterated without this package; None where another one would be.

    Attributes:
        indices: The indices of the batch that was read for the one that was given last, where they are kept; else None.
        number: The number of that batch, by which it is seeded.
        calls_collectives: Whether reading a batch in this process has begun a collective, as in ``collate_fn``.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int | None,
        options: dict[str, Any],
        *,
        own_seed: int,
        is_batched: bool,
        original: DataLoader[Any],
        watch: Watch | None = None,
        holder: tuple[Any, str] | None = None,
        watches_collate: bool = False,
        passes: OwnPasses | None = None,
        users: Any = None,
    ) -> None:
        self.options, self._own_seed = options, own_seed
        self._dataset = dataset
        self._batches = batches = PlannedBatches(seed, is_batched=is_batched, passes=passes, watch=watch)
        # Of the batch that was given last.
        self.number, self.indices, self.calls_collectives = 0, None, False
        self._generator = torch.Generator()
        self._isolate = IsolatedReads()
        self._collate_watch = CollateWatch(options["collate_fn"]) if watches_collate and is_batched else None
        begin = options.get("worker_init_fn")
        num_workers = options["num_workers"]
        keeps = not num_workers or options["persistent_workers"]
        self._reads = ReadWatch(dataset, keeps=keeps, in_workers=num_workers > 0) if watches_collate else None
        is_repeatable = seed is None or not any(is_used for *_, is_used in moved_for_good(dataset))
        collate = options["collate_fn"]
        roots = {"dataset": dataset, "collate_fn": collate, "worker_init_fn": begin, "loader": _beside(collate)}
        self._held = HeldGenerators(is_repeatable=is_repeatable, **roots)
        of_users = users_sampler(original.sampler), users_sampler(original.batch_sampler)
        if is_torchdatas(original):
            # torchdata's would keep a state of its own.
            original = DataLoader.__new__(DataLoader)
        self.loader: DataLoader[Any] = original
        sampler: Any = {"batch_sampler": batches} if is_batched else {"batch_sampler": None, "sampler": batches}
        # Past torch's guard against changes: workers begin anew.
        vars(original).update(
            options,
            dataset=dataset if seed is None else SeededDataset(dataset, self._held, self._collate_watch, self._reads),
            generator=self._generator,
            _iterator=None,
            **sampler,
        )
        self._watch, self._has_warned, self._has_begun = watch, False, False
        if type(original)._get_iterator is DataLoader._get_iterator:
            if passes is not None:
                vars(original).update(_shown_samplers(of_users, batches, cuts_samples=passes.cuts_samples))
            vars(original)["_get_iterator"] = partial(_begun, weakref.ref(original), sampler, watch)
        self._users = users
        self._given_by = original if holder is None else loader_within(*holder, original)
        is_plain = users is None or type(users) is DataLoader
        # Around what runs code of the user's loader.
        self._sharing: Any = nullcontext() if is_plain else SharedAttributes(users, self._given_by, *(holder or ())[1:])

    def reads_by(self, options: dict[str, Any]) -> bool:
        """Whether it reads as these say; workers that persist have begun with the ``worker_init_fn`` that there was.

        Lightning sets one, for ``seed_everything(workers=True)``, when it has tried ``iter()``.
        """
        goes_on = options["persistent_workers"] and self.loader._iterator is not None
        begun = {"worker_init_fn": self.options["worker_init_fn"]} if goes_on else {}
        return self.options == options | begun

    def keep_indices(self) -> None:
        """From the next pass on keep the indices of the batch that was given last in :attr:`indices`."""
        if self._batches.asked is None:
            self._batches.asked = deque()

    def read_twice(
        self, plan: EpochPlan | ChosenBatch, rank: int, number: int, num_workers: int | None = None
    ) -> list[Any] | None:
        """Read the first batch of a plan twice, in a worker of its own if the loader has workers; else leave no trace.

        It is known by its number in the epoch, and by that of all workers where these are others. The batches are as an
        ``__iter__`` of the user's is given them; None where too much is held to be put back.
        """
        loader, dataset = self.loader, self._dataset
        batches = PlannedBatches(self._batches.seed, is_batched=self._batches.is_batched)
        first = next(batches.of(plan, rank))
        count = num_workers or loader.num_workers
        if not count:
            collate: Any = loader.collate_fn
            own = _beside(collate)
            held = HeldState(dataset, collate, own)
            if not held.is_whole:
                return None
            outside, fetch = OutsideValues(dataset), self._fetch_in_process(iter([first] * 2), collate, False)
            try:
                with keep_randomness():
                    return [given(fetch()) for _ in range(2)]
            finally:
                held.restore()
                outside.restore()
                if own:
                    vars(collate.__self__).update(own)
        dataset = dataset if batches.seed is None else SeededDataset(dataset, self._held, reads=self._reads)
        seed = self._seed_of_workers(rank, plan.epoch)
        begin = partial(stand_for, number % count, count, seed, loader.worker_init_fn)
        how: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": begin}
        how |= {"batch_sampler": [first] * 2} if batches.is_batched else {"sampler": [first] * 2, "batch_size": None}
        how |= {"num_workers": 1, "multiprocessing_context": loader.multiprocessing_context}
        with keep_randomness():
            return list(DataLoader(dataset, generator=torch.Generator(), **how))

    def _seed_of_workers(self, rank: int, epoch: int) -> int:
        # Those that persist keep what they draw as they start, and a resume starts them in any epoch.
        return derive_seed("workers", self._own_seed, rank, 0 if self.options["persistent_workers"] else epoch)

    @property
    def _is_own(self) -> bool:
        """Whether an ``__iter__`` of the user's decides what a batch is."""
        return self._given_by is not self.loader or not iterates_as_torch(self.loader)

    def length(self, plan: EpochPlan) -> int:
        """Batches that the loader, or what holds it, says it gives of a plan; UNKNOWN where it does not."""
        batches = self._batches
        before = vars(batches).copy()
        batches.plan, batches.first_step = plan, 0
        try:
            with self._sharing:
                return len(self._given_by)
        except (TypeError, NotImplementedError):
            return UNKNOWN
        finally:
            vars(batches).update(before)

    def read(
        self,
        plan: EpochPlan,
        rank: int,
        first_step: int,
        *,
        isolated: bool,
        looks_ahead: bool = False,
        steps_before: int = 0,
    ) -> Iterator[Any]:
        """Read the batches of ``rank`` from a step of a plan to its end.

        One that is ``isolated`` restores the process's random generators after a batch that is read in this process.
        One that ``looks_ahead`` sees before the last batch whether a loader with an ``__iter__`` of its own gives more
        than it says, which a Trainer never asks. ``steps_before`` the plan in its epoch tell whose turn it is among the
        workers.

        Yields:
            Collated batches; a :class:`FailedBatch` for one that cannot be read, behind which it goes on as torch does.

        Raises:
            UnsupportedLoaderError: An object that holds the loader gives batches and has not read the loader.

        Warns:
            StatefulWarning: The dataset or its collate function ends the epoch, as it does in torch, by StopIteration.
        """
        batches, loader = self._batches, self.loader
        is_own = self._is_own
        left_out = 0
        if isinstance(plan, OwnPlan) and plan.is_reread_at(first_step):
            left_out = plan.skipped + first_step
        if isinstance(plan, SamplerEpochPlan):
            plan.read_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        batches.begin(plan, rank, 0 if left_out else first_step, steps_before)
        self._held.begin()
        if is_own or loader.num_workers or loader.pin_memory:
            fetch = self._noting_collectives(self._fetch_by_torch(plan, rank, first_step, left_out, isolated))
        else:
            collate, watch = loader.collate_fn, self._collate_watch
            if watch is not None and not watch.is_over:
                collate = partial(watch.around, collate)
            fetch = self._fetch_in_process(iter(batches), collate, isolated)
        if is_own:
            yield from self._read_own(fetch, plan, first_step, left_out, looks_ahead)
        else:
            yield from self._read_planned(fetch, plan, first_step)

    def _fetch_by_torch(
        self, plan: EpochPlan, rank: int, first_step: int, left_out: int, isolated: bool
    ) -> Callable[[], Any]:
        """A function that takes the next batch of the loader, or of what holds it; it is iterated from now on."""
        batches, loader, is_own = self._batches, self.loader, self._is_own
        # torch draws a base seed for its workers here; not from the generator that the model uses.
        self._generator.manual_seed(self._seed_of_workers(rank, plan.epoch))
        if self._watch is not None:
            holders = (self._given_by, *([loader] if self._given_by is not loader else []))
            is_rest = isinstance(plan, OwnPlan) and (plan.is_rest or (first_step > 0 and not left_out))
            of_others = None if batches.seed is None else derive_seed("beside", batches.seed, plan.epoch)
            share = self._sharing.to_copy if isinstance(self._sharing, SharedAttributes) else None
            how: dict[str, Any] = {"is_rest": is_rest, "seed": of_others, "is_within": is_rest or left_out > 0}
            self._watch.begin(plan.epoch, holders, **how, share=share, users=self._users)
        for looks in (self._collate_watch, self._reads):
            if looks is not None and loader.num_workers and self._has_begun:
                # Workers of later passes need not look again.
                looks.is_over = True
        self._has_begun = True
        with self._sharing:
            fetch = self._fetch_from(iter(self._given_by))
        if is_own and batches.seed is not None:
            seed = derive_seed("iteration", batches.seed, plan.epoch)
            fetch = self._fetch_drawing(fetch, seed, 0 if left_out else first_step)
        if batches.seed is not None and (is_own or not loader.num_workers):
            # Worker processes have generators of their own; here the model uses the same ones.
            fetch = partial(self._held.put_back_after, keep_randomness()(fetch) if isolated else fetch)
        return fetch

    def _read_planned(self, fetch: Callable[[], Any], plan: EpochPlan, first_step: int) -> Iterator[Any]:
        """The batches of a plan."""
        asked, left = self._batches.asked, plan.num_steps - first_step
        for served in range(left):
            try:
                batch = fetch()
            except StopIteration:
                if left < _NEVER and first_step + served < plan.num_steps:
                    warnings.warn(
                        f"{type(self._dataset).__qualname__} or its collate_fn raised StopIteration at batch {served} "
                        f"of {left}, which ends the epoch there. Let it raise another error, or give the batch.",
                        StatefulWarning,
                        stacklevel=3,
                    )
                return
            self.number, self.indices = asked.popleft() if asked else (0, None)
            yield batch
        # Asked for more, as torch at its end: what the sampler does behind its last item is part of it.
        with suppress(StopIteration):
            fetch()

    def _read_own(
        self, fetch: Callable[[], Any], plan: EpochPlan, step: int, left_out: int, looks_ahead: bool
    ) -> Iterator[Any]:
        """The batches of a user's ``__iter__``, to its own end; the plan is told where that is."""
        end = object()
        take = partial(_next_or, fetch, end)
        for _ in range(left_out):
            self._note(take())
        batch = take()
        while batch is not end:
            self._note(batch)
            step += 1
            following = None
            if looks_ahead and step == plan.num_steps:
                # What it does after its last batch is part of it.
                following = take()
                if self._watch is not None:
                    self._watch.note_own()
                if following is not end and isinstance(plan, OwnPlan):
                    plan.num_steps = UNKNOWN
            yield batch
            if self._watch is not None and following is None:
                self._watch.note_outside()
            batch = take() if following is None else following
        if self._watch is not None:
            self._watch.note_own()
        if isinstance(plan, OwnPlan):
            plan.num_steps = step

    def _note(self, batch: Any) -> None:
        asked = self._batches.asked
        self.number, self.indices = asked.popleft() if asked else (0, None)
        if self._watch is None:
            return
        self._watch.note(batch)
        if self._watch.reads_in_thread and self._batches.seed is not None and not self.loader.num_workers:
            self._warn_of_thread()
        if not (self._watch.num_read or self._watch.reads_by_hand) and self._given_by is not self.loader:
            raise UnsupportedLoaderError(
                f"{type(self._given_by).__qualname__} holds a {type(self.loader).__qualname__} and gives batches "
                "without reading it, so a resume could not be exact. Pass the DataLoader itself."
            )

    def _warn_of_thread(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self._given_by).__qualname__} reads its batches in a thread of this process. Samples and the "
                "model draw from the same random generators there, as the threads happen to run, so that random "
                "numbers differ from run to run, and after a resume. Give its DataLoader num_workers=1: a worker has "
                "generators of its own.",
                StatefulWarning,
                stacklevel=4,
            )

    def _fetch_from(self, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that takes the next batch from an iterator, and tells a failed batch from failed workers."""

        def fetch() -> Any:
            number = getattr(iterator, "_rcvd_idx", None)
            try:
                with self._sharing:
                    return next(iterator)
            except Exception as error:
                # torch counts a batch as received before it raises the error of its dataset; not where workers died.
                is_over = isinstance(error, StopIteration) or error is self._batches.error
                if is_over or (number is not None and number == getattr(iterator, "_rcvd_idx", None)):
                    raise
                return FailedBatch(error)

        return fetch

    def _fetch_drawing(self, fetch: Callable[[], Any], seed: int, number: int) -> Callable[[], Any]:
        """A function that takes the next batch of a user's ``__iter__``, whose own draws follow from its number."""
        numbers, watch, dataset = count(number), self._watch, vars(self.loader)["dataset"]

        def draw() -> Any:
            of_batch = mixed_seed(seed, next(numbers))
            if watch is None or self.loader.num_workers or not watch.reads_in_thread:
                seed_randomness(of_batch)
                if isinstance(dataset, SeededDataset):
                    dataset.begin_by_hand(of_batch)
            return fetch()

        return draw

    def _fetch_in_process(
        self, batches: Iterator[Any], collate: Callable[[Any], Any], isolated: bool
    ) -> Callable[[], Any]:
        """A function that reads the next batch as torch does without workers, but without its cost for each batch."""
        read = partial(read_batch if self._batches.is_batched else getitem, self._dataset)
        is_seeded, held, reads = self._batches.seed is not None, self._held, self._reads
        run = self._isolate if isolated else read_seeded

        def read_and_collate(seed: int | None, one: Callable[[], Any]) -> Any:
            if seed is None:
                return collate(one())
            if held.is_idle:
                return run(seed, lambda: collate(one()))
            return held.isolated(seed, partial(run, seed, lambda: collate(one())))

        # Not of the sampler, which is not asked where a batch is read again.
        read_and_collate = self._noting_collectives(read_and_collate)

        def fetch() -> Any:
            index = next(batches)
            seed, index = index if is_seeded else (None, index)
            try:
                one: Callable[[], Any] = partial(read, index)
                if reads is not None and not reads.is_over:
                    one = partial(reads, one)
                return read_and_collate(seed, one)
            except StopIteration:
                raise
            except Exception as error:
                return FailedBatch(error)

        return fetch

    def _noting_collectives(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reads, and notes whether that begins a collective; the same one without process groups."""
        if not collectives_begun():
            return read

        def noting(*args: Any) -> Any:
            before = collectives_begun()
            try:
                return read(*args)
            finally:
                self.calls_collectives = self.calls_collectives or collectives_begun() != before

        return noting


def _next_or(fetch: Callable[[], Any], end: object) -> Any:
    try:
        return fetch()
    except StopIteration:
        return end


def _shown_samplers(users: tuple[Any, Any], batches: PlannedBatches, *, cuts_samples: bool) -> dict[str, Any]:
    """The sampler and batch sampler that a user's ``__iter__`` finds, which yield the plain indices of the epoch."""
    sampler, batch_sampler = users
    if not batches.is_batched:
        return {"sampler": ShownSampler(sampler, batches.samples, batches.num_samples)}
    parts = {"sampler": ShownSampler(sampler, batches.samples, batches.num_samples)} if cuts_samples else {}
    return {**parts, "batch_sampler": ShownSampler(batch_sampler, batches.indices, batches.__len__, **parts)}


def _begun(reference: Any, samplers: dict[str, Any], watch: Watch | None) -> Any:
    """Begin torch's iterator of a loader, over seeded batches; what shows the user plain indices is put back."""
    held = vars(reference())
    shown = {name: held[name] for name in samplers}
    held.update(samplers)
    try:
        if reference().num_workers:
            reference().check_worker_number_rationality()
            iterator: Any = WorkersInTurn(reference())
        else:
            iterator = DataLoader._get_iterator(reference())
    finally:
        held.update(shown)
    return iterator if watch is None else watch.count(iterator)
