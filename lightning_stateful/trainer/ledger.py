"""Writes what this rank trains on into the files of a ledger, while a Trainer trains."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_stateful.errors import ConfigurationError, StatefulWarning, warn
from lightning_stateful.ledger.files import SUFFIX, Batch, FileHeader, LedgerFile, Part, as_items
from lightning_stateful.trainer.lightning import pl
from lightning_stateful.trainer.ranks import gathered, topology_of

_PACKAGES = ("lightning_stateful", "torch", "lightning", "pytorch_lightning")


class LedgerWriter:
    """Notes the items of batches as loaders hand them over, and writes those that were trained on.

    Args:
        folder: The folder of the ledger.
        key: Gives the keys of a batch's samples, where loaders have no index or it says too little.

    Attributes:
        start: The name of this start; empty before training begins.
    """

    def __init__(self, folder: str | Path, key: Callable[[Any], Any] | None = None) -> None:
        self.folder, self._key = Path(folder), key
        self.start = ""
        self._file: LedgerFile | None = None
        # Batches that were fetched and not trained on yet, by the path of their loader.
        self._fetched: deque[dict[str, Part]] = deque()
        # The batch that is trained on now.
        self._begun: Batch | None = None

    def begin(
        self,
        trainer: pl.Trainer,
        loaders: Mapping[str, dict[str, Any]],
        begins: tuple[int, int],
        resumed: dict[str, Any] | None,
    ) -> None:
        """Begin the file of this start. A collective, where there are several processes.

        Args:
            trainer: The trainer.
            loaders: As in :class:`~lightning_stateful.ledger.files.FileHeader`.
            begins: Epoch and batch that come next.
            resumed: Where the checkpoint was written.

        Raises:
            ConfigurationError: The folder cannot be written, on any rank.
        """
        self.close()
        name = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
        self.start = gathered(name)[0] if trainer.world_size > 1 else name
        topology = topology_of(trainer)
        header = FileHeader(
            self.start, topology.rank, topology.num_replicas, dict(loaders), begins, resumed, _versions()
        )
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

    def note(self, path: str, epoch: int, indices: Any, batch: Any) -> None:
        """Note a batch that a loader is about to hand over.

        Args:
            path: The loader's path.
            epoch: The loader's epoch.
            indices: The indices that it was read at; None where there are none.
            batch: The batch.
        """
        if self._file is None:
            return
        items, number = as_items(self._key(batch)) if self._key is not None else as_items(indices)
        if not self._fetched or path in self._fetched[-1]:
            self._fetched.append({})
        self._fetched[-1][path] = Part(path, epoch, items, number)

    def begin_epoch(self) -> None:
        """Forget what was fetched in the epoch before and not trained on."""
        self._fetched.clear()
        self._begun = None

    def begin_batch(self, at: tuple[int, int]) -> None:
        """Training begins on the batch that was fetched first."""
        parts = self._fetched.popleft() if self._fetched else {}
        self._begun = Batch(*at, tuple(parts.values()))

    def end_batch(self) -> None:
        """The batch has been trained on."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.parts:
            self._write(lambda file: file.add(begun))

    def end_epoch(self, at: tuple[int, int]) -> None:
        """An epoch is over, before the batch that would be the next of it."""
        self._write(lambda file: file.add(Batch(*at, ())))

    def save(self, at: tuple[int, int]) -> None:
        """Write all that a checkpoint holds, of which ``at`` is the batch that comes next."""
        if self._begun is not None and self._begun[:2] < at:
            self.end_batch()
        self._write(LedgerFile.flush)

    def close(self) -> None:
        """Write all that was trained on, and close the file."""
        self._write(LedgerFile.close)
        self._file, self._begun = None, None
        self._fetched.clear()

    def _write(self, write: Callable[[LedgerFile], None]) -> None:
        if self._file is None:
            return
        try:
            write(self._file)
        except OSError as error:
            # Training is worth more than its ledger.
            self._file = None
            warn(
                f"The ledger in {str(self.folder)!r} could not be written any more: {error}. Training goes on without "
                "it; a report will miss what comes now.",
                StatefulWarning,
            )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _part_of(trainer: pl.Trainer) -> str:
    """What tells the files of processes apart that share a data-parallel rank."""
    topology = topology_of(trainer)
    return "" if trainer.world_size == topology.num_replicas else f"-process-{trainer.global_rank:05}"
