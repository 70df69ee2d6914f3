"""Writes what this rank trains on into the files of a ledger, while a Trainer trains."""

from __future__ import annotations

import socket
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.core.order import Progress
from lightning_stateful.core.samples import SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.ledger.files import SUFFIX, Batch, FileHeader, Items, LedgerFile, Part, as_items
from lightning_stateful.loaders.own_iteration import OwnTracker
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import next_step, num_started
from lightning_stateful.loops.ranks import gathered, topology_of
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.stream_nodes.nodes import Shards
from lightning_stateful.stream_nodes.numbered import by_pass
from lightning_stateful.trainer.batch_counts import BatchCounts

# Of more shards a header has their number alone.
_MOST_NAMES = 1000
_PACKAGES = ("lightning_stateful", "torch", "lightning", "pytorch_lightning")


@dataclass(slots=True)
class _Fetched:
    """A batch that was fetched and not trained on yet: its parts by the path of their loader, and seconds waited."""

    parts: dict[str, list[Part]] = field(default_factory=dict)
    waited: float = 0.0


class LedgerWriter:
    """Notes the items of batches as loaders hand them over, and writes those that were trained on.

    Args:
        folder: The folder of the ledger; None to write nothing.
        key: Gives the keys of a batch's samples, where loaders have no index or it says too little.

    Attributes:
        start: The name of the latest start; empty before training begins.

    Raises:
        ConfigurationError: There is a key and no folder.
    """

    def __init__(self, folder: str | Path | None = None, key: Callable[[Any], Any] | None = None) -> None:
        if folder is None and key is not None:
            raise ConfigurationError("ledger_key says what a ledger holds. Pass its folder, ledger=, too.")
        self.folder, self._key = None if folder is None else Path(folder), key
        self.start = ""
        self._resumed: dict[str, Any] | None = None
        self._file: LedgerFile | None = None
        self._fetched: deque[_Fetched] = deque()
        self._counts: dict[str, BatchCounts] = {}
        # By path, the latest pass over a stream.
        self._passes: dict[str, int] = {}
        # By the clock of the header's time.
        self._began_at = 0.0
        # Whether a checkpoint of another rank may have a batch that this one is killed in.
        self._has_peers = False
        # The batch that is trained on now, and the one that is due after the latest, until its epoch is over.
        self._begun: Batch | None = None
        # Tells of that batch, later on, whether the module has refused it.
        self._is_refused: Callable[[], bool] = bool
        self._due: tuple[int, int] | None = None
        # Whether the key has given what a ledger can hold: what it does from then on ends no run.
        self._key_works = False

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self.folder is not None

    def state(self) -> str | dict[str, Any]:
        """The start that a checkpoint continues: this one or, before it begins, the one that it goes on from."""
        return self.start if self._resumed is None else dict(self._resumed)

    def resumed_from(self, state: str | dict[str, Any], at: tuple[int, int]) -> None:
        """The next start goes on from a checkpoint that an earlier one wrote before a batch.

        Args:
            state: The name of the earlier start, empty where it wrote no ledger; or what :meth:`state` gave.
            at: Epoch and number of that batch, as the earlier start counted.
        """
        if isinstance(state, dict):
            self._resumed = dict(state)
        else:
            self._resumed = {"start": state, "epoch": at[0], "batch": at[1]} if state else None

    def prepare(self, loader: AnyLoader) -> None:
        """Let a loader that nobody has read yet say which samples its batches have."""
        if self.is_on and (loader.is_map_style or self._key is None):
            loader.keep_indices()

    def begin(self, trainer: pl.Trainer, loaders: Mapping[str, AnyLoader], begins: tuple[int, int]) -> None:
        """Begin the file of this start. A collective, where there are several processes.

        Args:
            trainer: The trainer.
            loaders: The loaders by path.
            begins: Epoch and batch that come next.

        Raises:
            ConfigurationError: The folder cannot be written, on any rank.
        """
        if self.folder is None:
            self._resumed = None
            return
        # Names sort by time.
        name = f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S-%f}-{uuid.uuid4().hex[:6]}"
        self.start = gathered(name)[0] if trainer.world_size > 1 else name
        topology = topology_of(trainer)
        header = FileHeader(
            self.start,
            topology.rank,
            topology.num_replicas,
            _described(trainer, loaders, has_key=self._key is not None),
            begins,
            self._resumed,
            _versions(),
            time.time(),
            socket.gethostname(),
        )
        self._began_at = time.perf_counter()
        self._resumed, self._has_peers = None, trainer.world_size > 1
        # A start may go on where nothing is left of an epoch but its end.
        self._due = begins if begins[1] else None
        failure = ""
        # Processes that share a data-parallel rank read the same.
        file = self.folder / self.start / f"rank-{topology.rank:05}{_part_of(trainer)}{SUFFIX}"
        try:
            self._file = LedgerFile(file, header)
        except OSError as error:
            failure = str(error)
        failures = [one for one in (gathered(failure) if trainer.world_size > 1 else [failure]) if one]
        if failures:
            raise ConfigurationError(
                f"The ledger in {str(self.folder)!r} cannot be written: {failures[0]}. Pass "
                "StatefulDataCallback(ledger=...) a folder that all ranks may write to."
            )
        rank_zero_info(f"What is trained on is written to {file.parent}.")

    def note(self, path: str, loader: AnyLoader, at: Progress, batch: Any, waited: float, left_out: Any = None) -> None:
        """Note a batch that a loader is about to hand over.

        Args:
            path: The loader's path.
            loader: The loader.
            at: Progress in the loader's epoch as the pass began.
            batch: The batch.
            waited: Seconds that it took to come.
            left_out: What skip= has left out since the batch before: indices, or a number of steps.
        """
        if path not in self._counts or self._counts[path].loader is not loader:
            self._counts[path] = BatchCounts(loader)
        counts = self._counts[path]
        # A user's __iter__ decides what becomes of a batch that was read.
        indices = None if isinstance(loader.tracker, OwnTracker) else loader.indices
        numbers = loader.numbers if self._key is None else None
        if numbers is not None:
            # A pass over a source may end within a batch; of packed documents none may begin in it.
            passes = by_pass(numbers) or [(self._passes.get(path, at.epoch), np.empty(0, dtype=np.uint64))]
            self._passes[path] = passes[-1][0]
            parts = [Part(path, number, places, len(places), at.cycle) for number, places in passes]
        elif self._key is not None:
            parts = [Part(path, at.epoch, *self._keys_of(batch, self._key, indices), at.cycle)]
        else:
            parts = [Part(path, at.epoch, *((None, 0) if indices is None else as_items(indices)), at.cycle)]
        # Indices say themselves of which source they are.
        sources = counts.sources(indices) if self._key is not None or indices is None else ()
        tokens, padded = counts.padding(indices)
        parts[0] = parts[0]._replace(sources=sources, tokens=tokens, padded=padded)
        if left_out is not None:
            skipped = (None, left_out) if isinstance(left_out, int) else as_items(left_out)
            parts.append(Part(path, at.epoch, *skipped, at.cycle, skipped=True))
        if not self._fetched or path in self._fetched[-1].parts:
            self._fetched.append(_Fetched())
        self._fetched[-1].parts[path] = parts
        self._fetched[-1].waited += waited

    def _keys_of(self, batch: Any, key: Callable[[Any], Any], indices: Any) -> tuple[Items, int]:
        """The keys of a batch.

        Raises:
            ConfigurationError: The first batch has none.
        """
        try:
            given = key(batch)
            items, number = as_items(given)
            failure = f"gave {given!r}" if given is None or isinstance(given, bool) or not number else ""
            expected = as_items(indices)[1] if indices is not None else number
            failure = failure or (f"gave {number} keys for {expected} samples" if number != expected else "")
        except Exception as error:
            failure = f"raised {type(error).__name__}: {error}"
        if not failure:
            self._key_works = True
            return items, number
        said = f"ledger_key {failure}. Let it give an integer or a string for each sample of a batch."
        if not self._key_works:
            raise ConfigurationError(said)
        rank_zero_warn(f"{said} The ledger only counts such batches.", category=StatefulWarning)
        return None, 0

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Training begins on the batch that was fetched first."""
        if not self.is_on:
            return
        self._take_back()
        fetched = self._fetched.popleft() if self._fetched else _Fetched()
        if not fetched.parts:
            return
        began, parts = time.perf_counter() - self._began_at, chain.from_iterable(fetched.parts.values())
        self._begun = begun = Batch(*next_step(trainer), tuple(parts), began, fetched.waited)
        self._is_refused = partial(_is_refused, trainer, num_started(trainer))
        self._write(lambda file: file.add(begun))
        if self._has_peers:
            # Once all ranks have given their gradients, rank 0 may save while another is killed in the same batch.
            self._write(LedgerFile.flush)

    def end_batch(self) -> None:
        """The batch has been trained on, unless the module's ``on_train_batch_start`` has refused it by a -1."""
        if self._begun is not None and self._is_refused():
            self._take_back()
        begun, self._begun = self._begun, None
        if begun is not None:
            self._due = begun.epoch, begun.batch + 1

    def _take_back(self) -> None:
        """Write that a batch was begun and not trained on."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._write(lambda file: file.take_back(begun))

    def end_epoch(self, at: tuple[int, int], *, is_over: bool) -> None:
        """Training leaves an epoch before the batch ``at``, after the last one of it or in the middle."""
        # Fetched, and not trained on.
        self._fetched.clear()
        self.end_batch()
        if is_over and self._due is not None:
            self._due = None
            self._write(lambda file: file.add(Batch(*at, ())))

    def save(self, at: tuple[int, int]) -> None:
        """Write all that a checkpoint holds, of which ``at`` is the batch that comes next."""
        if self._begun is not None and self._begun[:2] < at:
            self.end_batch()
        if self._due is not None and at == (self._due[0] + 1, 0):
            # Before the hooks at the end of the epoch.
            self.end_epoch(self._due, is_over=True)
        self._write(LedgerFile.flush)

    def close(self) -> None:
        """Write all that was trained on, and close the file."""
        self._take_back()
        self._write(LedgerFile.close)
        self._file = self._due = None
        self._fetched.clear()

    def _write(self, write: Callable[[LedgerFile], None]) -> None:
        if self._file is None:
            return
        try:
            write(self._file)
        except OSError as error:
            # Training is worth more than its ledger.
            self._file = None
            warnings.warn(
                f"The ledger in {str(self.folder)!r} could not be written any more: {error}. Training goes on without "
                "it; a report will miss what comes now.",
                StatefulWarning,
                stacklevel=4,
            )


def _described(trainer: pl.Trainer, loaders: Mapping[str, AnyLoader], *, has_key: bool) -> dict[str, dict[str, Any]]:
    """The meaning of the items of each loader, as the header of a file has it."""
    # Epochs that are cut do not have them all, by a limit or by the end of another loader.
    is_whole = len(loaders) == 1 and trainer.limit_train_batches == 1.0 and not trainer.overfit_batches  # type: ignore[attr-defined]
    return {
        path: {
            "length": _num_once(loader) if is_whole and not has_key else None,
            "once": loader.has_each_once,
            "data": digest(_numbered_by(loader, counts.get("mixture", {}))),
            **_shards_in(loader),
            **counts,
        }
        for path, loader in loaders.items()
        for counts in (BatchCounts(loader).described(),)
    }


def _numbered_by(loader: AnyLoader, mixture: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings by which items are numbered."""
    config = loader.tracker.config
    has_indices = "dataset" in config or "lengths" in mixture
    if not loader.is_map_style or "packing" in config or not has_indices:
        return config
    # An index is of the same sample under any order.
    return {"dataset": config.get("dataset"), **{name: mixture.get(name) for name in ("names", "lengths")}}


def _shards_in(loader: AnyLoader) -> dict[str, Any]:
    """The shards of a stream whose samples have numbers, of each of which a pass has every sample once."""
    config = loader.stream_config
    if config is None or any(source.numbering is None for source in config.sources.values()):
        return {}
    shards = {name: source.shards for name, source in config.sources.items()}
    described: dict[str, Any] = {"once": True, "data": digest([(name, of.describe()) for name, of in shards.items()])}
    number = sum(of.num_shards for of in shards.values())
    if number > _MOST_NAMES:
        return {**described, "shards": number}
    pairs = [(name, _name_of(of, shard)) for name, of in shards.items() for shard in range(of.num_shards)]
    names = [f"{source}: {name}" if source else name for source, name in pairs]
    repeats = len(set(names)) < number
    return {**described, "shards": [f"{name} (shard {at})" if repeats else name for at, name in enumerate(names)]}


def _name_of(shards: Shards, shard: int) -> str:
    # Of data with an index all samples are numbered as those of the first shard.
    if not shards.has_index:
        return shards.name(shard)
    return f"by index, {shard}" if shard else "by index"


def _num_once(loader: AnyLoader) -> int | None:
    order: Any = loader.order
    if not isinstance(order, SampleBatchOrder) or order.drop_last:
        return None
    return len(order.samples) if isinstance(order.samples, (SequentialOrder, ShuffledOrder)) else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _part_of(trainer: pl.Trainer) -> str:
    """A part of the file's name that tells processes apart which share a data-parallel rank."""
    topology = topology_of(trainer)
    return "" if trainer.world_size == topology.num_replicas else f"-process-{trainer.global_rank:05}"


def _is_refused(trainer: pl.Trainer, started: int) -> bool:
    """Whether a batch, before which so many were started, has not been: ``on_train_batch_start`` has returned -1."""
    return num_started(trainer) == started
