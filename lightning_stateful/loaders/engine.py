"""What reads batches behind a StatefulLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.batches import PositionedBatches
from lightning_stateful.loaders.seeded import read_batch
from lightning_stateful.samplers.rng import IsolatedReads, seed_randomness

# What is taken over from the loader in front, where this version of torch has it.
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


class Engine(NamedTuple):
    """torch's loader behind this one; kept, because persistent workers live in it."""

    loader: DataLoader[Any]
    batches: PositionedBatches
    generator: torch.Generator
    options: dict[str, Any]

    @classmethod
    def of(cls, dataset: Any, batches: PositionedBatches, options: dict[str, Any]) -> Engine:
        """A loader of torch's over batches."""
        how: dict[str, Any] = {"batch_sampler": batches}
        if not batches.is_batched:
            how = {"batch_size": None, "sampler": batches}
        generator = torch.Generator()
        return cls(DataLoader(dataset, **how, generator=generator, **options), batches, generator, options)

    @classmethod
    def within(
        cls, loader: DataLoader[Any], dataset: Any, batches: PositionedBatches, options: dict[str, Any]
    ) -> Engine:
        """A user's own loader, with its class, its attributes and options that this version knows nothing of."""
        generator = torch.Generator()
        which = "batch_sampler" if batches.is_batched else "sampler"
        known = {name: value for name, value in options.items() if name in vars(loader)}
        # Past torch's guard against changes: workers begin anew.
        vars(loader).update({**known, which: batches, "dataset": dataset, "generator": generator, "_iterator": None})
        return cls(loader, batches, generator, options)

    @property
    def is_plain(self) -> bool:
        """Whether nobody has changed how the loader is iterated."""
        kind = type(self.loader)
        return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator

    def fetch_in_process(self, dataset: Any, isolate: IsolatedReads | None) -> Callable[[], Any]:
        """What torch's iterator does without workers or pinned memory, without its bookkeeping for each batch.

        Args:
            dataset: The user's dataset.
            isolate: Puts the process's generators back after each batch that is seeded; None to leave them seeded.
        """
        collate, batches = self.loader.collate_fn, iter(self.batches)
        if self.batches.is_batched:

            def read(index: Any) -> Any:
                return collate(read_batch(dataset, index))

        else:

            def read(index: Any) -> Any:
                return collate(dataset[index])

        if self.batches.seed is None:
            return lambda: read(next(batches))

        def fetch() -> Any:
            seed, index = next(batches)
            if isolate is not None:
                return isolate(seed, lambda: read(index))
            seed_randomness(seed)
            return read(index)

        return fetch

    def fetch(self, count: int) -> Callable[[], Any]:
        """What the loader's own iterator does, for a pass of ``count`` batches."""
        iterator = iter(self.loader)
        return iterator.__next__ if self.is_plain else _counted(iterator, count, type(self.loader).__qualname__)


def _counted(iterator: Any, count: int, name: str) -> Callable[[], Any]:
    """Batches of a loader with an ``__iter__`` of its own, which has to give one for each that was planned."""
    served = 0

    def fetch() -> Any:
        nonlocal served
        batch = next(iterator, _END)
        if batch is _END and served < count and count < _NEVER:
            raise _other_count(name, f"only {served}", count)
        if batch is _END:
            raise StopIteration
        served += 1
        # What it does after its last batch is part of it.
        if served == count and next(iterator, _END) is not _END:
            raise _other_count(name, "more", count)
        return batch

    return fetch


_END = object()
# Passes of which the end is not known are planned to have more batches than this.
_NEVER = 2**40


def _other_count(name: str, served: str, count: int) -> ConfigurationError:
    return ConfigurationError(
        f"{name}.__iter__ gave {served} of {count} batches, so what was trained on cannot be told from their number. "
        "Let it give one batch for each of DataLoader's, or do its work in the dataset or collate_fn."
    )
