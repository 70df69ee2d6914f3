"""The loader proxy: what Lightning's loops iterate in place of a DataLoader, from whatever batch comes next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_stateful.core.order import EpochPlan
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.trainer.lightning import _IndexBatchSamplerWrapper, pl

# Lightning keeps the arguments of a user's DataLoader(...) in attributes that begin so, and reads there whether it
# shuffles.
_RECORDS = "__pl_saved_"

# How a warning of Lightning's begins that is wrong of our loaders.
_DOUBT = "Your `IterableDataset` has `__len__` defined"


def _shown(loader: AnyLoader, original: Any, overfits: bool, is_dealt_out: bool) -> Any:
    """The object whose ``sampler`` and ``batch_sampler`` a proxy shows.

    It is the user's loader, or, where Lightning by itself would have replaced the sampler, an object with the one that
    Lightning would have put there.
    """
    if not isinstance(original, DataLoader):
        return original
    topology, dataset = loader.topology, cast("Any", original.dataset)
    plain = type(original.sampler) in (RandomSampler, SequentialSampler) and original.batch_size is not None
    if overfits:
        sampler: Any = SequentialSampler(dataset)
    elif plain and (is_dealt_out or topology.num_replicas > 1):
        sampler = DistributedSampler(
            dataset, topology.num_replicas, topology.rank, shuffle=type(original.sampler) is RandomSampler
        )
    else:
        return original
    batches = None
    if original.batch_sampler is not None:
        batches = BatchSampler(sampler, original.batch_size or 1, original.drop_last)
    shuffles = not overfits and type(original.sampler) is RandomSampler
    return SimpleNamespace(sampler=sampler, batch_sampler=batches, **{f"{_RECORDS}kwargs": {"shuffle": shuffles}})


class LoaderProxy:
    """An iterable over a loader that asks where to begin at the first ``next()`` of every pass.

    It is no DataLoader, so Lightning neither injects a sampler nor rebuilds it. Its attributes are those of the
    stateful loader. Only ``sampler`` and ``batch_sampler``, for hooks that look at them, are those of the user's
    loader, or those that Lightning would have put in their place.

    Args:
        loader: The loader.
        locate: Called at the first ``next()`` of a pass. Returns the plan and the step of it to begin at, or None if
            the loader is exhausted.
        before_batch: Called after a batch is read and before it is handed over.
        at_end: Called when there is no further batch, which Lightning asks for ahead where it cannot know.
        isolated: Whether the process's generators are put back after a batch that is read in this process.
        keeps_indices: Also offer the indices of each batch, as Lightning's prediction writers want them.
        original: The user's loader, of which ``loader`` was made.
        overfits: Show a sampler that goes through the dataset in order, as Lightning does with ``overfit_batches``.
        is_dealt_out: Show a DistributedSampler on a single rank too, as Lightning does under DDP.
    """

    is_proxy = True

    def __init__(
        self,
        loader: AnyLoader,
        locate: Callable[[], tuple[EpochPlan, int] | None],
        before_batch: Callable[[], None] | None = None,
        at_end: Callable[[], None] | None = None,
        *,
        isolated: bool = True,
        keeps_indices: bool = False,
        original: Any = None,
        overfits: bool = False,
        is_dealt_out: bool = False,
    ) -> None:
        self.loader = loader
        self.original = loader if original is None else getattr(original, "original", original)
        self._shown = _shown(loader, self.original, overfits, is_dealt_out)
        self._locate = locate
        self._before_batch = before_batch
        self._at_end = at_end
        self._isolated = isolated
        # The pattern of the warnings filter that this proxy has set, if any. A regular expression's comment, (?#id),
        # tells it from those of other proxies.
        self._ignored = ""
        if loader.is_sized and isinstance(loader.dataset, IterableDataset):
            # Lightning doubts the length of any iterable dataset; this one is a number of steps, for all workers.
            self._ignored = f"{_DOUBT}(?#{id(self)})"
            warnings.filterwarnings("ignore", message=self._ignored)
        if keeps_indices and loader.is_sized and loader.batch_sampler is not None:
            self.batch_sampler = _IndexBatchSamplerWrapper(loader.batch_sampler)  # type: ignore[arg-type]  # never None here
            vars(self.batch_sampler)["sampler"] = self._shown.sampler

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self._batches())

    def _batches(self) -> Iterator[Any]:
        # A generator: it runs from the first next() on, when Lightning's counters are those of the batch to come.
        self._end_filter()
        found = self._locate()
        if found is None:
            return
        plan: Any  # a stream's loader reads plans of its own kind
        plan, step = found
        if "batch_sampler" in vars(self):
            batches = plan.batches(self.loader.topology.rank, step)
            self.batch_sampler.seen_batch_indices = [indices for _, indices in batches]
        for batch in self.loader.batches(plan, step, isolated=self._isolated):
            if self._before_batch is not None:
                self._before_batch()
            yield batch
        if self._at_end is not None:
            self._at_end()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        of_user = name in ("sampler", "batch_sampler") or name.startswith(_RECORDS)
        if "_shown" not in vars(self) or (name.startswith("__") and not of_user):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "sampler" and pl.__version__ < "2.6" and not _has_sampler(self._shown):  # type: ignore[attr-defined]  # not exported
            # Where there is a sampler, Lightning 2.5 looks for one in the batch sampler too.
            raise AttributeError("This loader's batch sampler has no sampler of its own.")
        return getattr(self._shown if of_user else self.loader, name)

    @property
    def _iterator(self) -> Any:
        """Persistent workers, which Lightning ends here after training."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator
        self._end_filter()

    def end_workers(self) -> None:
        """End workers that persist."""
        iterator = self._iterator
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
        self._iterator = None

    @property
    def worker_init_fn(self) -> Any:
        """The loader's; ``seed_everything(workers=True)`` sets it here."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position travels in the state of the data module or callback. Without this Lightning warns."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing: Lightning calls this too early, or not at all."""

    def _end_filter(self) -> None:
        """Remove the warnings filter that this proxy has set."""
        kept = [entry for entry in warnings.filters if getattr(entry[1], "pattern", None) != self._ignored]
        warnings.filters[:] = kept  # type: ignore[index]  # a list


def _has_sampler(loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    return batches is None or hasattr(batches, "sampler")


class _Pass:
    """One pass over a proxy. It can be pickled, but what is unpickled is empty."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)
