"""The faults: what goes wrong in a start, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.torture.kinds import KINDS, TROUBLE, How, files_of
from benchmarks.torture.rank import Inside, Start

FAULTS = (
    "SIGKILL of a rank",
    "SIGKILL of all ranks",
    "SIGKILL of a worker",
    "SIGTERM",
    "exception in the model",
    "exception in the data",
    "full disk",
    "truncated checkpoint",
    "flipped bit",
    "missing shard",
)
# What a rank must print, or the check of a checkpoint, where the fault has come and is named.
NAMED = {
    "SIGKILL of a worker": ("DataLoader worker", "killed by signal"),
    "exception in the model": ("torture: in",),
    "exception in the data": ("torture: sample",),
    "full disk": ("File too large",),
}
# How torch says that a worker is gone that was killed while it passed a batch on.
CUT_OFF = ("ConnectionResetError", "EOFError", "ConnectionRefusedError")
HOOKS = ("on_train_batch_start", "training_step", "on_after_backward", "on_train_batch_end", "on_save_checkpoint")
# Batches of a start before its fault.
_MOST_BATCHES = 10


@dataclass
class Fault:
    """A fault of one start.

    Attributes:
        name: One of ``FAULTS``.
        inside: What a rank does to itself.
        after: What comes from outside comes after so many batches of rank 0, and so many seconds.
        delay: Those seconds.
        of_all: Whether all ranks go wrong together, so that a checkpoint may be written on the exception: where one
            does, Lightning's save on it waits for the others, and they for its gradients.
        at: A number that chooses the place of a damage, below 1.
        missing: The file that is missing.
    """

    name: str
    inside: Inside | None = None
    after: int = 0
    delay: float = 0.0
    of_all: bool = False
    at: float = 0.0
    missing: Path | None = None

    @property
    def is_sudden(self) -> bool:
        """Whether the start ends by SIGKILL of all ranks."""
        return self.name in ("SIGKILL of all ranks", "truncated checkpoint", "flipped bit")


def faults_of(kind: str) -> list[str]:
    """The faults that a kind of data may meet."""
    return [name for name in FAULTS if name != "missing shard" or KINDS[kind].has_shards]


def shards_of(kind: str, folder: Path) -> list[Path]:
    """The files that a kind of data reads."""
    names = ("part", "other") if kind == "mixed stream" else ("part",)
    return [path for name in names for path in files_of(folder, name)]


def drawn(name: str, kind: str, folder: Path, how: How, draws: random.Random) -> Fault:
    """A fault of a name, at a moment that is drawn."""
    fault = Fault(name, after=draws.randint(1, _MOST_BATCHES), delay=draws.random() * 0.05, at=draws.random())
    rank, hook = draws.randrange(how.ranks), draws.choice(HOOKS)
    calls = draws.randrange(3) if hook == "on_save_checkpoint" else fault.after
    if hook == "on_save_checkpoint":
        # Rank 0 gathers and writes; it is there that a save is cut off.
        rank = 0
    fault.of_all = how.ranks == 1 or (name == "exception in the model" and draws.random() < 0.5) or name == "SIGTERM"
    if name == "SIGKILL of a rank":
        fault.inside = Inside("kill", hook, calls, rank)
    elif name == "exception in the model":
        fault.inside = Inside("raise", hook, calls, None if fault.of_all else rank)
    elif name == "full disk":
        fault.inside = Inside("full disk", "on_train_batch_start", fault.after, 0)
    elif name == "missing shard":
        fault.missing = draws.choice(shards_of(kind, folder))
    return fault


def prepare(fault: Fault, start: Start) -> None:
    """Prepare what is wrong before the start begins."""
    if fault.name == "exception in the data":
        workers = max(start.how.workers, 1)
        least = fault.after * start.how.batch_size // workers
        (start.folder / TROUBLE).write_text(json.dumps(least))
    if fault.missing is not None and fault.at < 0.5:
        hide(fault.missing)


def hide(path: Path) -> None:
    """Let a file be missing."""
    if path.exists():
        path.rename(path.with_suffix(".hidden"))


def mend(fault: Fault, folder: Path) -> None:
    """Take away what was prepared."""
    (folder / TROUBLE).unlink(missing_ok=True)
    if fault.missing is not None and not fault.missing.exists():
        fault.missing.with_suffix(".hidden").rename(fault.missing)


def strike(fault: Fault, ranks: list[int]) -> None:
    """Let come what comes from outside.

    Args:
        fault: The fault.
        ranks: The processes of the ranks that live.
    """
    if fault.is_sudden:
        for pid in ranks:
            os.killpg(pid, signal.SIGKILL)
    elif fault.name == "SIGTERM":
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
    elif fault.name == "SIGKILL of a worker":
        workers = [child for pid in ranks for child in psutil.Process(pid).children()]
        if workers:
            workers[int(fault.at * len(workers))].kill()
    elif fault.missing is not None:
        hide(fault.missing)


def damage(fault: Fault, path: Path) -> None:
    """Cut a checkpoint off, or flip a bit of it."""
    content = bytearray(path.read_bytes())
    place = int(fault.at * len(content))
    if fault.name == "truncated checkpoint":
        del content[place:]
    else:
        content[place] ^= 1 << place % 8
    path.write_bytes(content)
