"""Reads the batches of a plan: in this process, or with torch's DataLoader and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stateful.core.order import UNKNOWN, EpochPlan
from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.rng import IsolatedReads, keep_randomness, seed_randomness
from lightning_stateful.user_loaders import is_torchdatas, iterates_as_torch

# Attributes of a DataLoader that say what it reads, and not how.
_WHAT = {"dataset", "sampler", "batch_sampler", "generator", "_iterator"}
# A pass that has more steps than this to go is one whose end is not known: it ends when the sampler does.
_NEVER = 2**40
_END = object()


class FailedBatch(NamedTuple):
    """Takes the place of a batch that the dataset or its ``collate_fn`` raised an error for."""

    error: Exception


class SeededIndex(NamedTuple):
    """A single index (``batch_size=None``) with the seed to read it under; its type tells it from a user's tuples."""

    seed: int
    index: Any


class SeededDataset(Dataset[Any]):
    """A dataset that seeds torch, NumPy and ``random`` before it reads each batch.

    It takes ``(seed, indices)`` for a batch, or a :class:`SeededIndex`. So a batch is read with the same random numbers
    in every process, and collated with the same ones. Generators that the dataset holds itself are out of reach. A
    dataset with ``__getitems__`` is asked for whole batches, as torch does. Every other attribute is the wrapped
    dataset's.

    Args:
        dataset: A map-style dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset

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
        """The sample at a :class:`SeededIndex`; at a bare one unseeded, for a ``worker_init_fn`` that looks in."""
        if isinstance(index, SeededIndex):
            seed_randomness(index.seed)
            index = index.index
        return self.__dict__["dataset"][index]

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """The samples of a batch, ``(seed, indices)``."""
        seed, indices = batch
        seed_randomness(seed)
        return read_batch(self.__dict__["dataset"], indices)


def read_batch(dataset: Any, indices: Any) -> Any:
    """Read the samples of a dataset at ``indices`` as torch does: all at once if it has ``__getitems__``."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def known_steps(plan: EpochPlan) -> int:
    """The number of steps of a plan.

    Raises:
        TypeError: Its end is not known yet.
    """
    if plan.num_steps >= UNKNOWN:
        raise TypeError("The sampler has no len(), so its loader has none.")
    return plan.num_steps


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes of a DataLoader that say how it reads, at least all that this version of torch knows."""
    defaults = vars(DataLoader([])).items()  # type: ignore[arg-type]  # a list is a dataset
    return {name: getattr(loader, name, value) for name, value in defaults if name not in _WHAT}


class PlannedBatches:
    """A batch sampler, or a sampler of single indices, that yields the batches of a plan for one rank.

    Args:
        seed: Chooses the seed of each batch, from (seed, epoch, number of the batch), which is yielded with the
            indices for :class:`SeededDataset`. None for bare indices.
        is_batched: Whether the loader collates batches.
    """

    def __init__(self, seed: int | None, *, is_batched: bool) -> None:
        self.seed, self.is_batched = seed, is_batched
        # What the plan raised, as opposed to the dataset.
        self.error: Exception | None = None
        self.plan: EpochPlan
        self.rank = self.first_step = 0

    def __iter__(self) -> Iterator[Any]:
        self.error = None
        try:
            yield from self._indices()
        except Exception as error:
            self.error = error
            raise

    def _indices(self) -> Iterator[Any]:
        batches = self.plan.batches(self.rank, self.first_step)
        if self.seed is None:
            return (batch for _, batch in batches)
        seed = derive_seed("batch", self.seed, self.plan.epoch)
        if self.is_batched:
            # Plain tuples are sent to workers faster.
            return ((mixed_seed(seed, number), batch) for number, batch in batches)
        return (SeededIndex(mixed_seed(seed, number), index) for number, index in batches)

    def __len__(self) -> int:
        return known_steps(self.plan) - self.first_step


class BatchReader:
    """Reads batches with a DataLoader of torch's or of a user's class, which is kept for its persistent workers.

    Args:
        dataset: The user's dataset.
        seed: Seeds the reading of samples; None to leave random generators alone.
        options: Attributes of the loader, see :func:`options_of`.
        is_batched: Whether batches are collated.
        original: A copy of the user's own loader, to be read with so that its class, attributes and further options
            stay in force.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int | None,
        options: dict[str, Any],
        *,
        is_batched: bool,
        original: DataLoader[Any],
    ) -> None:
        self.options = options
        self._dataset = dataset
        self._batches = batches = PlannedBatches(seed, is_batched=is_batched)
        self._generator = torch.Generator()
        self._isolate = IsolatedReads()
        if is_torchdatas(original):
            # torchdata's would keep a state of its own.
            original = DataLoader.__new__(DataLoader)
        self.loader: DataLoader[Any] = original
        sampler: Any = {"batch_sampler": batches} if is_batched else {"batch_sampler": None, "sampler": batches}
        # Past torch's guard against changes: workers begin anew.
        vars(original).update(
            options,
            dataset=dataset if seed is None else SeededDataset(dataset),
            generator=self._generator,
            _iterator=None,
            **sampler,
        )

    def read(self, plan: EpochPlan, rank: int, first_step: int, base_seed: int, *, isolated: bool) -> Iterator[Any]:
        """Read the batches of ``rank`` from a step of a plan to its end.

        Args:
            plan: The plan.
            rank: The rank.
            first_step: The first step.
            base_seed: Seeds torch's workers.
            isolated: Restore the process's random generators after a batch that is read in this process. False if the
                caller seeds them then anyway.

        Yields:
            Collated batches; a :class:`FailedBatch` for one that cannot be read, behind which it goes on as torch does.

        Raises:
            ConfigurationError: The dataset, its collate function or an overridden ``__iter__`` gives more or fewer
                batches than planned.
        """
        batches, loader = self._batches, self.loader
        batches.plan, batches.rank, batches.first_step = plan, rank, first_step
        count = plan.num_steps - first_step
        is_plain = iterates_as_torch(loader)
        if is_plain and not (loader.num_workers or loader.pin_memory):
            fetch = self._fetch_in_process(isolated)
        else:
            # torch draws a base seed for its workers here; not from the generator that the model uses.
            self._generator.manual_seed(base_seed)
            iterator = iter(loader)
            fetch = self._fetch_from(iterator if is_plain else _counted(iterator, count, type(loader).__qualname__))
            if isolated and batches.seed is not None and not loader.num_workers:
                # Worker processes have generators of their own; here the model uses the same ones.
                fetch = keep_randomness()(fetch)
        for served in range(count):
            try:
                batch = fetch()
            except StopIteration:
                if count < _NEVER:
                    raise ConfigurationError(
                        f"{type(self._dataset).__qualname__} or its collate_fn raised StopIteration at batch {served} "
                        f"of {count}, as if the epoch were over. Let it raise another error, or give the batch."
                    ) from None
                return
            yield batch

    def _fetch_from(self, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that takes the next batch from an iterator, and tells a failed batch from failed workers."""

        def fetch() -> Any:
            number = getattr(iterator, "_rcvd_idx", None)
            try:
                return next(iterator)
            except Exception as error:
                # torch counts a batch as received before it raises the error of its dataset; not where workers died.
                is_over = isinstance(error, StopIteration) or error is self._batches.error
                if is_over or (number is not None and number == getattr(iterator, "_rcvd_idx", None)):
                    raise
                return FailedBatch(error)

        return fetch

    def _fetch_in_process(self, isolated: bool) -> Callable[[], Any]:
        """A function that reads the next batch as torch does without workers, but without its cost for each batch."""
        collate, batches, isolate = self.loader.collate_fn, iter(self._batches), self._isolate
        read = partial(read_batch if self._batches.is_batched else getitem, self._dataset)
        is_seeded = self._batches.seed is not None

        def fetch() -> Any:
            index = next(batches)
            seed, index = index if is_seeded else (None, index)
            try:
                if seed is not None and isolated:
                    return isolate(seed, lambda: collate(read(index)))
                if seed is not None:
                    seed_randomness(seed)
                return collate(read(index))
            except StopIteration:
                raise
            except Exception as error:
                return FailedBatch(error)

        return fetch


def _counted(batches: Iterator[Any], count: int, name: str) -> Iterator[Any]:
    """The batches of an overridden ``__iter__``; refuses more or fewer than planned."""
    served = 0
    for served, batch in enumerate(batches, 1):
        # What it does after its last batch is part of it.
        if served == count and next(batches, _END) is not _END:
            raise _other_count(name, "more", count)
        yield batch
    if served < count < _NEVER:
        raise _other_count(name, f"only {served}", count)


def _other_count(name: str, served: str, count: int) -> ConfigurationError:
    return ConfigurationError(
        f"{name}.__iter__ gave {served} of {count} batches, so what was trained on cannot be told from their number. "
        "Let it give one batch for each of DataLoader's, or do its work in the dataset or collate_fn."
    )
