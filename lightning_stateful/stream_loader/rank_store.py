"""torch's key-value store as ranks use it: requests that are answered at once, under the name of a run that is new."""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import StreamError
from lightning_stateful.stream_loader.state_text import digest_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_LONGEST_PAUSE = 0.1  # Seconds between two looks, so that a wait ends soon after what it waits for, and Ctrl-C at once.
_LOOKS_PER_SECOND = 20_000  # Of all ranks together: a fraction of what a TCPStore answers.
_WORTH_COMPRESSING = 1024
_NOTHING = b"?nothing?"  # What a look finds where there is nothing.


class _ProcessGroup:
    """What one rank of this process knows of a process group, for as long as its store lives."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Store | None = None
        self.name = ""
        self.num_runs: Counter[str] = Counter()
        # By label: the keys that this rank has written in each run that is not deleted yet.
        self.written: dict[str, list[set[str]]] = {}


_GROUPS: weakref.WeakKeyDictionary[Store, dict[int, _ProcessGroup]] = weakref.WeakKeyDictionary()
_GROUPS_LOCK = threading.Lock()


class RankStore:
    """A key-value store as one of many ranks uses it: only :meth:`wait` and :meth:`begin_run` wait, and handle signals.

    torch's own ``get`` and ``wait`` block in C++, deaf to signals, and a ``wait`` that times out prints two warnings.

    Args:
        store: torch's, the same object for all runs of a process group.
        topology: The ranks, and this one.

    Raises:
        StreamError: From every method: the store does not answer, or holds what is not of this package.
    """

    def __init__(self, store: Store, topology: Topology) -> None:
        self._topology, self._written = topology, set[str]()
        self._shortest_pause = min(max(topology.num_replicas / _LOOKS_PER_SECOND, 2e-4), _LONGEST_PAUSE)
        with _GROUPS_LOCK:
            self._group = _GROUPS.setdefault(store, {}).setdefault(topology.rank, _ProcessGroup())
            if self._group.connection is None:
                self._group.connection = _connection_beside(store)
        self._store: Any = self._group.connection or store

    @property
    def has_met(self) -> bool:
        """Whether the ranks of the process group have met, so that a run begins at once."""
        return bool(self._group.name)

    def begin_run(self, label: str, timeout: float) -> str:
        """The name of this rank's next run under a label; the first time, wait for all ranks of the process group.

        Raises:
            StreamError: Not all came in time.
        """
        with self._group.lock:
            self._group.name = self._group.name or self._meet(timeout)
        self._group.num_runs[label] += 1
        self._group.written.setdefault(label, []).append(self._written)
        return f"{self._group.name}/{label}/{self._group.num_runs[label]}"

    def delete_earlier_runs(self, label: str, *, kept: int = 0) -> None:
        """Delete what this rank has written in runs before this one, but for so many of the latest."""
        runs = self._group.written[label]
        while len(runs) > kept + 1:
            for key in runs.pop(0):
                self._ask("delete_key", key)

    def texts(self, keys: Sequence[str]) -> list[str | None]:
        """The text at each key; None where there is none."""
        # multi_get would wait for keys that are not there.
        if keys and self._store.has_extended_api() and self._ask("check", keys):
            return [_unpacked(value) for value in self._ask("multi_get", keys)]
        return [self.text(key) for key in keys]

    def text(self, key: str) -> str | None:
        """The text at ``key``; None if there is none."""
        # The one question that all stores answer in one round trip, whether or not the key is there.
        value = self._ask("compare_set", key, _NOTHING, _NOTHING)
        return None if value == _NOTHING else _unpacked(value)

    def put(self, key: str, text: str) -> None:
        """Put a text at ``key``."""
        self._written.add(key)
        self._ask("set", key, _packed(text))

    def delete(self, key: str) -> None:
        """Delete what this rank has put at ``key``."""
        self._written.discard(key)
        self._ask("delete_key", key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0, and return it; all in one."""
        self._written.add(key)
        return int(self._ask("add", key, amount))

    def settle(self, key: str, message: Any, beats: Callable[[Any], bool]) -> Any:
        """Put JSON data where none stand, or some that these beat, whoever else does the same; returns what stands."""
        self._written.add(key)
        value = _packed(json.dumps(message))
        standing = self._ask("compare_set", key, b"", value)
        while standing != value and beats(json.loads(_unpacked(standing))):
            standing = self._ask("compare_set", key, standing, value)
        return json.loads(_unpacked(standing))

    def wait(self, find: Callable[[], T | None], timeout: float) -> T | None:
        """What ``find`` returns once it is not None; None if it still is after ``timeout`` seconds."""
        began = time.monotonic()
        while (found := find()) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return None
            # An eighth of the time waited so far: what is close is found quickly, what is far costs few looks.
            pause = min(max(waited / 8, self._shortest_pause), _LONGEST_PAUSE)
            time.sleep(min(pause, timeout - waited))
        return found

    def _meet(self, timeout: float) -> str:
        """Wait for all ranks of the process group, and name it after tokens of all its processes.

        A name holds for those who count themselves under it, and all have to. So a token that a process has left behind
        which has died meanwhile does no harm: once its successor has come, all find another name.
        """
        keys = [f"token/{rank}" for rank in range(self._topology.num_replicas)]
        token, name, seen = secrets.token_hex(8), "", 0
        self._ask("set", keys[self._topology.rank], token.encode())
        self._ask("add", "arrivals", 1)

        def find() -> bool | None:
            nonlocal name, seen
            arrivals = int(self.text("arrivals") or 0)
            if len(keys) <= arrivals != seen:
                seen = arrivals
                tokens = [said.split()[0] for said in self.texts(keys) if said is not None]
                found = digest_of("".join(tokens))[:12] if len(tokens) == len(keys) else ""
                if found != name:
                    name = found
                    self._ask("set", keys[self._topology.rank], f"{token} {name}".encode())
                    self.add(f"{name}/met", 1)
            return True if name and int(self.text(f"{name}/met") or 0) >= len(keys) else None

        if not self.wait(find, timeout):
            said = enumerate(self.texts(keys))
            missing = [rank for rank, text in said if text is None or not text.endswith(name)]
            raise StreamError(
                f"Rank {self._topology.rank} has waited {timeout:g} s to begin to read a stream with the others, and "
                f"ranks {missing[:8]} of {len(keys)} have not come. Look at their logs for an error, a slow start, or "
                "a loader that only some ranks iterate; ranks that were started anew while others were not have to be "
                "started together."
            )
        return name

    def _ask(self, function: str, keys: str | Sequence[str], *arguments: Any) -> Any:
        prefix = "lightning_stateful/"
        names = prefix + keys if isinstance(keys, str) else [prefix + key for key in keys]
        try:
            return getattr(self._store, function)(names, *arguments)
        except RuntimeError as error:
            raise StreamError(
                "The key-value store of the run does not answer; the process that serves it (rank 0, or the launcher) "
                f"has most likely ended. Look for the reason in its log. {type(error).__name__}: {error}"
            ) from error


def foreign(what: str) -> StreamError:
    """The error for what stands in the store and is not of this package."""
    return StreamError(
        f"Stale or foreign entries in the key-value store of the run: {what}. Something else writes to the same keys; "
        "give each its own store, or a PrefixStore, and start all ranks anew together."
    )


def _connection_beside(store: Store) -> Store | None:
    """A connection beside ``store``, which others may hold locked in a wait; None if it has none.

    One for all runs: at each new one, the server would look up the name of its peer, and everybody else wait.
    """
    try:
        own: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # Older than clone(), or of somebody's own making.
    # A HashStore is its own clone, which must not keep itself alive.
    return None if own is store else own


def _packed(text: str) -> bytes:
    value = text.encode()
    return value if len(value) < _WORTH_COMPRESSING else b"z" + zlib.compress(value, 1)


def _unpacked(value: bytes) -> str:
    try:
        return (zlib.decompress(value[1:]) if value[:1] == b"z" else value).decode()
    except (ValueError, zlib.error):
        raise foreign(f"{value[:80]!r} is none of its messages") from None
