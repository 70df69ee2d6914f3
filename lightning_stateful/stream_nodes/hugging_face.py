"""A Hugging Face ``IterableDataset`` as shards, each read by a node that resumes by Hugging Face's own state."""

from __future__ import annotations

import atexit
import copy
import inspect
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

from torch.utils.data import get_worker_info

from lightning_stateful.errors import ConfigurationError, DamagedStateError, some_of
from lightning_stateful.generators.generator_states import process_states
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.stream_nodes import hugging_face_pipelines as pipelines
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode

_SECONDS_TO_EXIT = 1.0
_used_at = 0.0
_lock_reset_in: int | None = None


def is_hugging_face(dataset: Any) -> bool:
    """Whether this is a ``datasets.IterableDataset``; ``datasets`` is not imported to find out."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def is_split_otherwise(dataset: Any, num_replicas: int, rank: int) -> bool:
    """Whether ``split_dataset_by_node`` has made this the part of another rank, or of one among other ranks."""
    split = getattr(dataset, "_distributed", None) if is_hugging_face(dataset) else None
    return split is not None and (split.world_size, split.rank) != (num_replicas, rank)


def forget_loaded(parts: Iterable[Any]) -> None:
    """Have the next pass begin at the beginning: a state that was loaded would begin every pass of its epoch."""
    for part in parts:
        if is_hugging_face(part) and hasattr(part, "_starting_state_dict"):
            part._starting_state_dict = None


class HuggingFaceShards(Shards):
    """The shards of a ``datasets.IterableDataset``, which are its files, mostly.

    Shard i is ``dataset.shard(dataset.num_shards, i)``, read whole by whatever worker reads it. A
    ``split_dataset_by_node`` is left out: ranks are dealt shards here. The dataset itself stays as it is.

    Together the shards hold the samples of the dataset as long as every stage looks at one sample at a time. The
    others run in each shard by itself, as Hugging Face has it in workers: batches of a map end with the shard, indices
    begin at 0 in it, ``take(n)`` and ``skip(n)`` are divided among shards, and ``interleave_datasets`` ends where a
    shard's part of a source does. :attr:`warning` says which of them there are.

    A shard resumes by Hugging Face's own state where ``PIPELINE_CLASSES`` knows that to be exact; :attr:`reread` says
    why it is read again otherwise.

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
        self._dataset = _with_pipeline(dataset, _own_copy(dataset._ex_iterable))
        self._num_shards = pipelines.num_shards_of(self._dataset)
        stages = list(pipelines.walk(self._dataset._ex_iterable))
        for stage in stages:
            pipelines.refuse(stage, self._num_shards)
        words = {pipelines.class_of(stage).word for stage in stages}
        # Hugging Face draws the order of files anew in each epoch that it is told, but keeps what is taken of them.
        self.is_shuffled = "shuffle" in words and words.isdisjoint({"take", "skip"})
        self.draws = self.runs_users_code = any(map(pipelines.may_draw, stages))
        found = [text for stage in stages for text in pipelines.warnings_of(stage, self._num_shards)]
        self.warning = " ".join(dict.fromkeys(found))
        self.note = pipelines.note_of(stages, self._num_shards)
        self.reread = pipelines.reread_of(stages)
        reruns = pipelines.gives_tables(dataset._formatting) or any(map(pipelines.reruns_users_code, stages))
        if self.draws and reruns:
            self.reread_if_drawn = "functions that a resume runs once more for some samples have drawn random numbers"
        self._held = HeldGenerators(is_repeatable=False, dataset=self._dataset)
        self._epoch = 0
        # Asked for with every state, of datasets of many thousand files.
        self._description = pipelines.describe(self._dataset)

    @property
    def num_shards(self) -> int:
        """Shards of the whole dataset."""
        return self._num_shards

    def node(self, shard: int, epoch: int) -> HuggingFaceNode:
        """A node over one shard, which reads a copy that is its own."""
        if epoch != self._epoch:
            # A pass may begin with other generators.
            self._held.begin()
            self._epoch = epoch
        reruns = bool(self.reread_if_drawn)
        return HuggingFaceNode(self._shard(shard), epoch, is_exact=not self.reread, reruns=reruns, held=self._held)

    def name(self, shard: int) -> str:
        """Its files, as far as Hugging Face knows them, or its number."""
        stages = pipelines.walk(self._shard(shard)._ex_iterable)
        files = [file for stage in stages for file in pipelines.files_of(stage)]
        return some_of(files) or f"shard {shard} of {self.num_shards}"

    def look_again(self) -> None:
        """Look for the generators anew that functions may draw from."""
        self._held.begin()

    def describe(self) -> dict[str, Any]:
        """Number of shards, columns, stages, and digests of the names of files and of the seeds of stages."""
        return copy.deepcopy(self._description)

    def _shard(self, shard: int) -> Any:
        if hasattr(self._dataset, "shard"):
            part = self._dataset.shard(num_shards=self.num_shards, index=shard)
        else:
            # Before 3.1.
            pipeline = self._dataset._ex_iterable.shard_data_sources(shard, self.num_shards)
            part = _with_pipeline(self._dataset, pipeline)
        # Some stages hand themselves out as their only shard.
        part._ex_iterable = _own_copy(part._ex_iterable)
        return part


class HuggingFaceNode(StreamNode[Any]):
    """Reads a dataset that has one shard.

    State:
        Hugging Face's own, as JSON data. None where only reading again leads: in pipelines whose state is not exact,
        and, where a resume runs functions once more for some samples, after the first random number that they drew.

    Args:
        dataset: The dataset, which nothing else reads.
        epoch: Its epoch.
        is_exact: Whether Hugging Face's state is exact as long as functions do not draw.
        reruns: Whether a resume runs functions of the user's once more for some samples.
        held: The generators that functions may draw from.
    """

    def __init__(self, dataset: Any, epoch: int, *, is_exact: bool, reruns: bool, held: HeldGenerators) -> None:
        super().__init__()
        dataset.set_epoch(epoch)
        self._dataset, self._epoch, self._is_exact, self._reruns = dataset, epoch, is_exact, reruns
        # Of the same keys as any state of this pipeline.
        self._fresh = dataset.state_dict()
        self._samples: Any = None
        # States of the generators before the samples that are read now, where draws are watched.
        self._before: tuple[Any, ...] | None = None
        self._held = held

    def held_objects(self) -> Any:
        """Nothing: a shard shares its functions, and their arguments, with the dataset."""

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Open the shard at its beginning, or at a state.

        Raises:
            DamagedStateError: The state is of another pipeline, another version of ``datasets``, or another epoch.
        """
        super().reset(initial_state)
        self.close()
        _reset_lock()
        state = from_plain(initial_state)
        # Hugging Face ignores a state of another epoch, and whatever is missing from it.
        if state is not None and not (_is_alike(state, self._fresh) and state.get("epoch", self._epoch) == self._epoch):
            raise DamagedStateError(
                f"The state of a shard is of other stages than its dataset has with datasets "
                f"{sys.modules['datasets'].__version__}, or not of epoch {self._epoch}: {initial_state!r}. Read the "
                "dataset that it was taken from, with the version that it was taken with."
            )
        self._dataset.load_state_dict(state)
        self._begun_at, self._has_drawn, self._before = initial_state, False, None
        _wait_at_exit()
        self._samples = type(self._dataset).__iter__(_InNoWorker(self._dataset))

    def __iter__(self) -> Iterator[Any]:
        """Its samples, without a call of this node for each."""
        if self._samples is None:
            self.reset()
        return self._watched() if self._reruns and not self._has_drawn else self._samples

    def read_into(self, samples: list[Any], number: int) -> None:
        """Append the next samples to a list, up to ``number``; what comes before an error stays in it."""
        if not self._reruns or self._has_drawn:
            samples.extend(islice(self._samples, number))
            return
        before = self._generator_states()
        try:
            samples.extend(islice(self._samples, number))
        finally:
            self._has_drawn = self._generator_states() != before

    def _watched(self) -> Iterator[Any]:
        """The samples that are still to come; notes whether functions draw while they are read."""
        self._before = self._generator_states()
        try:
            for sample in self._samples:  # noqa: UP028  # yield from would close them, and later calls read on
                yield sample
        finally:
            self._note_draws()

    def _note_draws(self) -> None:
        if self._before is not None:
            self._has_drawn, self._before = self._has_drawn or self._generator_states() != self._before, None

    def _generator_states(self) -> tuple[Any, ...]:
        return *process_states(), self._held.present()

    def get_state(self) -> NodeState | None:  # type: ignore[override]
        """Hugging Face's state, or None where it is not exact."""
        if inspect.getgeneratorstate(self._samples) == inspect.GEN_CREATED:
            # Hugging Face's is that of the beginning until the first sample.
            return copy.deepcopy(self._begun_at)
        self._note_draws()
        if not self._is_exact or self._has_drawn:
            return None
        state: NodeState = to_plain(self._dataset.state_dict(), owner="dataset")
        return state

    def close(self) -> None:
        """Let go of Hugging Face's readers, which may wait for its threads."""
        if self._samples is not None:
            self._samples.close()
            _wait_at_exit()


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


def _wait_at_exit() -> None:
    """Have this process end no sooner than a moment from now.

    Threads of Arrow read on for a little in a parquet file, closed or not. Where Python ends meanwhile, they abort it.
    """
    global _used_at
    _used_at = time.monotonic()
    _register_wait()


@cache
def _register_wait() -> None:
    atexit.register(lambda: time.sleep(max(_used_at + _SECONDS_TO_EXIT - time.monotonic(), 0)))


def _with_pipeline(dataset: Any, pipeline: Any) -> Any:
    """A dataset like another one, of another pipeline, and not split by node."""
    options = {"shuffling": copy.deepcopy(dataset._shuffling)} if hasattr(dataset, "_shuffling") else {}
    return sys.modules["datasets"].IterableDataset(
        ex_iterable=pipeline,
        info=dataset.info.copy(),
        split=dataset.split,
        formatting=dataset._formatting,
        token_per_repo_id=dataset._token_per_repo_id,
        **options,
    )


def _own_copy(stage: Any) -> Any:
    """A copy of a stage and of those before it, which neither waits nor looks at all files for each shard."""
    if type(stage).__name__ == "InterleavedShardsExamplesIterable" and stage.num_shards == 1:
        # There is nothing to interleave, but Hugging Face would read ahead in a thread.
        return _own_copy(stage.ex_iterable)
    own = copy.copy(stage)
    if hasattr(own, "_sleep_on_threads_shutdown"):
        # Hugging Face waits for five seconds behind each interleaved reading; here it is once, where the process ends.
        own._sleep_on_threads_shutdown = False
        if stage.num_shards > 1:
            own.shard_data_sources = partial(_part_of, stage)
    if hasattr(own, "ex_iterable"):
        own.ex_iterable = _own_copy(own.ex_iterable)
    elif hasattr(own, "ex_iterables"):
        own.ex_iterables = [_own_copy(source) for source in own.ex_iterables]
    return own


def _part_of(stage: Any, num_shards: int, index: int, contiguous: bool = True) -> Any:
    """The same as ``shard_data_sources`` of a stage that reads files, without dividing all files first.

    Hugging Face takes 50 milliseconds for a shard of 10,000, and minutes where two such datasets are concatenated.
    """
    numbers = stage.split_shard_indices_by_worker(num_shards, index, contiguous=contiguous)
    part = copy.copy(stage)
    part._state_dict = None
    part.kwargs = {
        name: [value[number] for number in numbers] if isinstance(value, list) else value
        for name, value in stage.kwargs.items()
    }
    return part


def _is_alike(saved: Any, fresh: Any) -> bool:
    """Whether a state has the keys of a fresh one, of the same stages."""
    if isinstance(fresh, dict):
        is_dict = isinstance(saved, dict) and saved.keys() == fresh.keys() and saved.get("type") == fresh.get("type")
        return is_dict and all(_is_alike(saved[key], fresh[key]) for key in fresh)
    if isinstance(fresh, list):
        return isinstance(saved, list) and len(saved) == len(fresh) and all(map(_is_alike, saved, fresh))
    return True


def _reset_lock() -> None:
    """Do once in a worker what Hugging Face does there: a lock that was held while it was forked is never released."""
    global _lock_reset_in
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None and get_worker_info() is not None and _lock_reset_in != os.getpid():
        asyn.reset_lock()
        _lock_reset_in = os.getpid()
