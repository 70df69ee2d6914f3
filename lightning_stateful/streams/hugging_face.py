"""A Hugging Face ``IterableDataset`` as shards, each of which goes on from Hugging Face's own state."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_stateful.errors import ConfigurationError, DamagedStateError
from lightning_stateful.samplers.rng import Randomness
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.streams import hugging_face_stages as stages
from lightning_stateful.streams import hugging_face_versions as versions
from lightning_stateful.streams.hugging_face_exit import wait_at_exit
from lightning_stateful.streams.shards import ShardIterator, Shards

_FEW_NAMES = 3
_lock_reset_in: int | None = None


def is_hugging_face(dataset: Any) -> bool:
    """Whether this is a ``datasets.IterableDataset``; ``datasets`` is not imported to find out."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


class HuggingFaceShards(Shards):
    """The shards of a ``datasets.IterableDataset``, which are its files, mostly.

    Shard i is ``dataset.shard(dataset.num_shards, i)``, read whole by whatever worker reads it. A
    ``split_dataset_by_node`` is undone: ranks are dealt shards here. The dataset itself stays as it is.

    Together the shards hold the samples of the dataset as long as every stage looks at one sample at a time. The
    others run in each shard by itself, as Hugging Face has it in workers: batches of a map end with the shard, indices
    begin at 0 in it, ``take(n)`` and ``skip(n)`` are divided among shards, and ``interleave_datasets`` ends where a
    shard's part of a source does. :attr:`warning` says which of them there are.

    A shard goes on from Hugging Face's own state, at every sample. Where that is not exact the state is None, so that
    the shard is read again: after stages that hold samples back (``shuffle``, ``batch(by_column=...)``), after a
    generator of the user's, which has to make every sample again anyway, after async functions, and once functions
    were seen to draw random numbers that a resume would run again together, as those of a batched map. Hugging Face
    runs what comes before an ``interleave_datasets`` in threads: what that draws follows no seed.

    Args:
        dataset: The dataset. Functions in it are pickled into workers that are spawned.

    Raises:
        ConfigurationError: It is another kind of dataset, cannot be repeated, or cannot be dealt out.
    """

    def __init__(self, dataset: Any) -> None:
        if not is_hugging_face(dataset):
            raise ConfigurationError(
                f"Expected a datasets.IterableDataset, got {type(dataset).__qualname__}. A map-style datasets.Dataset "
                "is no stream; its to_iterable_dataset(num_shards=...) is."
            )
        # Not copy.copy: Hugging Face gives such a copy the attributes' dict of the original.
        self._dataset = object.__new__(type(dataset))
        vars(self._dataset).update(vars(dataset), _distributed=None)
        self._dataset._ex_iterable = stages.easily_divided(dataset._ex_iterable)
        found = list(stages.walk(self._dataset._ex_iterable))
        for stage in found:
            versions.refuse_broken(stages.word_of(stage))
        self._num_shards = versions.num_shards_of(self._dataset)
        for stage in found:
            stages.refuse(stage, self._num_shards)
        self.draws = any(map(stages.runs_users_code, found))
        self.warning = _once(" ", (text for stage in found for text in stages.warnings_of(stage, self._num_shards)))
        self.reread = _once(", and ", [versions.loss_of_version(), *map(stages.loss_of, found)])
        # Asked for with every state, of datasets of many thousand files.
        self._described = stages.describe(self._dataset)

    @property
    def num_shards(self) -> int:
        """Shards of the whole dataset."""
        return self._num_shards

    def read(self, shard: int, epoch: int, state: Any = None) -> HuggingFaceIterator:
        """The samples of a shard; a ``state`` has to be of the same shard and epoch.

        Raises:
            DamagedStateError: The state is of other stages, or of another epoch.
        """
        return HuggingFaceIterator(self._shard(shard), epoch, state, is_exact=not self.reread)

    def name(self, shard: int) -> str:
        """Its files, as far as Hugging Face knows them, or its number."""
        files = [file for stage in stages.walk(self._shard(shard)._ex_iterable) for file in stages.files_of(stage)]
        more = f" and {len(files) - _FEW_NAMES} more" if len(files) > _FEW_NAMES else ""
        return ", ".join(files[:_FEW_NAMES]) + more or f"shard {shard} of {self.num_shards}"

    def describe(self) -> dict[str, Any]:
        """Number of shards, columns, stages, and digests of the names of files and of the seeds of stages."""
        return copy.deepcopy(self._described)

    def sizes(self) -> list[int] | None:
        """Known of tables in memory or mapped from disk, unless a stage chooses samples by what is in them."""
        return stages.sizes_of(self._dataset._ex_iterable)

    def _shard(self, shard: int) -> Any:
        return versions.shard_of(self._dataset, shard)


class HuggingFaceIterator(ShardIterator):
    """The samples of a dataset that has one shard.

    Args:
        dataset: The dataset, which nothing else reads.
        epoch: Its epoch.
        state: Where to begin.
        is_exact: Whether Hugging Face's state is exact as long as functions do not draw.

    Raises:
        DamagedStateError: The state is of other stages, or of another epoch.
    """

    def __init__(self, dataset: Any, epoch: int, state: Any = None, *, is_exact: bool = True) -> None:
        _reset_lock()
        self._is_exact = is_exact
        found = stages.walk(dataset._ex_iterable)
        self._leaves_threads = any(getattr(stage, "_sleep_on_threads_shutdown", False) for stage in found)
        self._watches: list[_Watch] = []
        # What is given out as tables is cut into batches at the end.
        is_cut = versions.is_table(dataset._formatting)
        dataset._ex_iterable = _copy(dataset._ex_iterable, self._watches, _Behind(asks_again=is_cut))
        dataset.set_epoch(epoch)
        if state is not None:
            # Hugging Face ignores a state of another epoch, and whatever is missing from it.
            dataset._prepare_ex_iterable_for_iteration()
            if not _is_alike(from_plain(state), dataset.state_dict()):
                raise DamagedStateError(
                    f"The state of a shard is of other stages than its dataset has now, or not of epoch {epoch}: "
                    f"{state!r}. Read the dataset that it was taken from."
                )
            dataset.load_state_dict(from_plain(state))
        self._dataset, self._begun_at = dataset, copy.deepcopy(state)
        self._samples: Any = type(dataset).__iter__(_InNoWorker(dataset))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)

    def __next__(self) -> Any:
        return next(self._samples)

    def state(self) -> Any:
        """Hugging Face's state, or None where it is not exact."""
        if inspect.getgeneratorstate(self._samples) == inspect.GEN_CREATED:
            return copy.deepcopy(self._begun_at)
        if not self._is_exact or any(watch.has_drawn for watch in self._watches):
            return None
        return to_plain(self._dataset.state_dict(), owner="dataset")

    def close(self) -> None:
        """Let go of Hugging Face's readers, which may wait for its threads."""
        self._samples.close()
        if self._leaves_threads:
            wait_at_exit()


class _InNoWorker:
    """Stands for a dataset that is iterated.

    Hugging Face divides the shards of what is an ``IterableDataset`` of torch's among its workers; this is none. So
    nothing global has to change for it, and functions of the user's still see the worker they are in.
    """

    __slots__ = ("_of",)

    def __init__(self, dataset: Any) -> None:
        self._of = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


@dataclass
class _Watch:
    """Whether functions drew random numbers, from the first call of a round to the end of the last one."""

    has_drawn: bool = False
    before: Randomness | None = None

    def begin(self) -> None:
        if self.before is None and not self.has_drawn:
            self.before = Randomness.now()

    def end(self) -> None:
        if self.before is not None:
            self.has_drawn, self.before = not _is_same(self.before, Randomness.now()), None


@dataclass(frozen=True)
class _Watched:
    """A function that a resume may run again, together with others, under another seed."""

    function: Callable[..., Any]
    watch: _Watch
    is_last: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What Hugging Face adds by itself does not draw, but may end what a function of the user's has begun.
        if stages.is_of_user(self.function):
            self.watch.begin()
        result = self.function(*args, **kwargs)
        if self.is_last:
            self.watch.end()
        return result


@dataclass(frozen=True)
class _Behind:
    """What stands behind a stage.

    Attributes:
        watch: That of the map that makes a batch of what the stage gives.
        asks_again: Whether a stage behind it asks for some samples again on a resume.
        in_thread: Whether a stage behind it reads ahead in threads, where nothing can be watched.
    """

    watch: _Watch | None = None
    asks_again: bool = False
    in_thread: bool = False


def _copy(stage: Any, watches: list[_Watch], behind: _Behind) -> Any:
    """A copy of a stage and of those before it, for one reader; their functions' watches are added to ``watches``."""
    kind = type(stage).__name__
    if kind == stages.SHARDS_INTERLEAVED and stage.num_shards == 1:
        # There is nothing to interleave, but Hugging Face would read ahead in a thread.
        return _copy(stage.ex_iterable, watches, behind)
    own = copy.copy(stage)
    if hasattr(own, "_sleep_on_threads_shutdown"):
        # Hugging Face waits for seconds behind each interleaved reading; here it is once, where the process ends.
        own._sleep_on_threads_shutdown = False
    function = stages.function_of(own)
    if function is not None:
        is_async = inspect.iscoroutinefunction(function)
        behind = replace(behind, asks_again=behind.asks_again or is_async)
        if not is_async and not behind.in_thread:
            is_last = behind.watch is None and (behind.asks_again or stages.is_batched(own))
            if is_last:
                watches.append(_Watch())
                behind = replace(behind, watch=watches[-1])
            if behind.watch is not None:
                _set_function(own, _Watched(function, behind.watch, is_last))
    if kind == stages.REBATCHED:
        behind = replace(behind, asks_again=True)
    if kind in stages.INTERLEAVED:
        behind = replace(behind, in_thread=True)
    copies = [_copy(source, watches, behind) for source in stages.sources_of(own)]
    if hasattr(own, "ex_iterable"):
        own.ex_iterable = _in_batches(own, copies[0])
    elif copies:
        own.ex_iterables = copies
    return own


def _set_function(stage: Any, watched: _Watched) -> None:
    if hasattr(stage, "mask_function"):
        stage.mask_function = watched
        stage.function = partial(stage.function.func, watched, **stage.function.keywords)
    else:
        stage.function = watched


def _in_batches(stage: Any, before: Any) -> Any:
    """What comes before a map or a filter, never further ahead of it than its batch.

    Hugging Face sees to that when a stage is added. It does not where sources that read tables are concatenated with
    others that do not, of which a shard then has but one.
    """
    is_ahead = stages.function_of(stage) is not None and type(before).__name__ == stages.FORMATTED
    if is_ahead and before.ex_iterable.iter_arrow and type(before.ex_iterable).__name__ != stages.REBATCHED:
        rebatched = vars(sys.modules[type(stage).__module__])[stages.REBATCHED]
        before.ex_iterable = rebatched(before.ex_iterable, batch_size=stage.batch_size if stage.batched else 1)
    return before


def _is_same(one: Randomness, other: Randomness) -> bool:
    return (
        torch.equal(one.of_torch, other.of_torch)
        and one.of_python == other.of_python
        and one.of_numpy[2:] == other.of_numpy[2:]
        and bool((one.of_numpy[1] == other.of_numpy[1]).all())
    )


def _is_alike(saved: Any, fresh: Any) -> bool:
    """Whether a state has the stages of a fresh one, and its epoch."""
    if isinstance(fresh, dict) and isinstance(saved, dict):
        same = all(saved.get(name) == fresh[name] for name in ("type", "epoch") if name in fresh)
        return same and saved.keys() == fresh.keys() and all(_is_alike(saved[name], fresh[name]) for name in fresh)
    if isinstance(fresh, list) and isinstance(saved, list):
        return len(saved) == len(fresh) and all(map(_is_alike, saved, fresh))
    return isinstance(saved, dict) >= isinstance(fresh, dict) and isinstance(saved, list) >= isinstance(fresh, list)


def _reset_lock() -> None:
    """Do once in a worker what Hugging Face does there: a lock that was held while it was forked is never released."""
    global _lock_reset_in
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None and get_worker_info() is not None and _lock_reset_in != os.getpid():
        asyn.reset_lock()
        _lock_reset_in = os.getpid()


def _once(between: str, texts: Iterable[str]) -> str:
    return between.join(dict.fromkeys(text for text in texts if text))
