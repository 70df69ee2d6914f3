"""Records of a run: a job says what a process does, and a file of JSON lines what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stateful.verify.conditions import Conditions


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment at which a checkpoint is written.

    Attributes:
        name: For people.
        hook: The hook of a callback that writes it.
        after: Batches that were trained on by then, since the run began.
    """

    name: str
    hook: str
    after: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on all of its ranks.

    Attributes:
        ranks: Their number.
        workers: Workers of each loader; None to leave them as they are.
        resumed: Whether it has the conditions of a later start: other orders of sets and files than the first.
        alike: Conditions of all ranks, in place of different ones.
        checkpoint: The checkpoint that it goes on from.
        moments: When it writes checkpoints, and to which files.
        kill_after: Batches after which each process kills itself with SIGKILL, in the step of the next.
        begins_twice: In place of training, try whether what is iterated gives other samples when it is begun again.
    """

    ranks: int
    workers: int | None
    resumed: bool = False
    alike: Conditions | None = None
    checkpoint: Path | None = None
    moments: tuple[tuple[Moment, Path], ...] = ()
    kill_after: int | None = None
    begins_twice: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as one process is told of it.

    Attributes:
        factory: The import path of the user's data.
        arguments: Of the factory, as a LightningCLI's YAML file has them.
        search: ``sys.path`` and the working folder, as the user has them.
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        run: The run.
        rank: The rank of this process.
        epochs: Epochs of the run.
        batches: The most batches of an epoch.
        validate_every: Batches from one validation to the next.
        callback: Whether StatefulDataCallback is added where the data module brings none.
        key: The import path of a function from a batch to the names of its samples.
        conditions: Of the process.
        environment: Variables beside those of the server.
        record: The file that is written.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    search: tuple[str, ...] = ()
    package: str = "lightning.pytorch"
    run: Run = Run(ranks=1, workers=None)
    rank: int = 0
    epochs: int = 2
    batches: int = 30
    validate_every: int = 5
    callback: bool = True
    key: str | None = None
    conditions: Conditions = field(default_factory=Conditions)
    environment: Mapping[str, str] = field(default_factory=dict)
    record: Path = Path()


@dataclass(frozen=True)
class Part:
    """The samples that one loader gave in a batch.

    Attributes:
        path: The loader's path; empty for a single one.
        items: Indices of the samples in the dataset; None where there are none.
        digests: Digests of the samples' content.
        shown: A line for people.
    """

    path: str
    items: list[Any] | None
    digests: list[str]
    shown: str

    @property
    def names(self) -> list[tuple[str, Any]]:
        """The identities of the samples: indices where there are some, else their content."""
        return [(self.path, item) for item in (self.digests if self.items is None else self.items)]


@dataclass(frozen=True)
class Batch:
    """A batch that a rank was trained on.

    Attributes:
        epoch: Its epoch, from 0.
        number: Its number in the epoch, from 1.
        parts: Its samples, of each loader.
    """

    epoch: int
    number: int
    parts: tuple[Part, ...]

    @property
    def names(self) -> list[tuple[str, Any]]:
        """The identities of its samples."""
        return [name for part in self.parts for name in part.names]

    @property
    def content(self) -> list[list[str]]:
        """The digests of its samples, by loader."""
        return [part.digests for part in self.parts]

    def __str__(self) -> str:
        said = []
        for part in self.parts:
            label = f"{part.path}: " if part.path else ""
            some = "" if part.items is None else f"samples {some_of(part.items, 8)}: "
            said.append(f"{label}{some}{part.shown}")
        return " | ".join(said)


def some_of(items: Sequence[Any], most: int) -> str:
    """The first few items in words."""
    return " ".join(map(str, items[:most])) + " ..." * (len(items) > most)


@dataclass
class Record:
    """The record of a run on one rank.

    Attributes:
        batches: The batches it began to train on, in turn.
        saved: By the name of a moment, the batches trained on when its checkpoint was written.
        facts: On the user's loaders; by their paths.
        warned: Warnings of this package.
        validates: Whether there are evaluation loaders.
        refused: The error by which this package has refused the run; empty if it has not.
        failed: Any other error, or how the process has ended; empty if it came to its end.
        other_package: The package of Lightning that the user's data are of, if it is not the job's.
        changes: Names of what gave other samples when begun again, of a job that tries that.
        log: The end of what the process has printed.
    """

    batches: list[Batch] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    validates: bool = False
    refused: str = ""
    failed: str = ""
    other_package: str = ""
    changes: list[str] = field(default_factory=list)
    log: str = ""

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what a process has written by now; a line that a kill has cut is left out."""
        made = cls()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                kind, value = json.loads(line)
            except ValueError:
                continue
            if kind == "batch":
                epoch, number, parts = value
                made.batches.append(Batch(epoch, number, tuple(Part(*part) for part in parts)))
            elif kind == "saved":
                made.saved[value[0]] = value[1]
            elif kind == "warned":
                made.warned.append(value)
            elif kind != "ended":
                setattr(made, kind, value)
        return made

    def of_epoch(self, epoch: int) -> list[Batch]:
        """The batches of an epoch."""
        return [batch for batch in self.batches if batch.epoch == epoch]


class RecordFile:
    """Writes a record, line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, value: Any) -> None:
        """Write a line, so that a kill leaves it."""
        self._file.write(json.dumps([kind, value], default=str) + "\n")
