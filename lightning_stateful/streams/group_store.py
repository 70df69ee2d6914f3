"""What the ranks of one run tell each other through torch's key-value store, and how they meet in it."""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import RankMismatchError, StreamError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# Longest pause between two looks, so that a wait ends soon after what it waits for, and Ctrl-C at once.
_LONGEST_PAUSE = 0.1
# Looks in a second of all ranks together: a fraction of what a TCPStore answers.
_LOOKS_PER_SECOND = 20_000
# A TCPStore cuts the connection at values above 8 MiB.
_MAX_VALUE = 4 * 2**20
_WORTH_COMPRESSING = 1024
# What a look finds where there is nothing.
_NOTHING = b"?nothing?"
# What is kept under a run's name, beside what its owner keeps there.
_NAMES = ("begins", "refused", "joined")

_CONNECTIONS: weakref.WeakKeyDictionary[Store, Store] = weakref.WeakKeyDictionary()
_CONNECTING = threading.Lock()


def _own_connection(store: Store) -> Store:
    """A connection beside ``store``, which others may hold locked in a wait; one for all passes of a process.

    A new one for each pass would make the server look up the name of its peer every time, and everybody else wait.
    """
    with _CONNECTING:
        if store in _CONNECTIONS:
            return _CONNECTIONS[store]
        try:
            own: Store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError):
            return store  # Older than clone(), or of somebody's own making.
        # A HashStore is its own clone, which must not keep itself alive here.
        if own is not store:
            _CONNECTIONS[store] = own
        return own


class GroupStore:
    """A key-value store as one of many ranks uses it: what it asks is answered at once, only :meth:`wait` waits.

    torch's own ``get`` and ``wait`` block in C++, deaf to signals, and a ``wait`` that times out prints two warnings.

    Args:
        store: torch's.
        label: Keeps apart what uses the same store.
        num_replicas: Ranks that use it at a time; the more, the longer the pauses of their waits.

    Raises:
        StreamError: From every method: the store does not answer.
    """

    def __init__(self, store: Store, label: str, num_replicas: int) -> None:
        self._store: Any = _own_connection(store)
        self._prefix = f"lightning_stateful/{label}/"
        self._shortest_pause = min(max(num_replicas / _LOOKS_PER_SECOND, 2e-4), _LONGEST_PAUSE)

    def look(self, key: str) -> bytes | None:
        """What stands at ``key``, or None."""
        # The one question that all stores answer in one round trip, whether or not the key is there.
        found: bytes = self._ask(self._store.compare_set, self._prefix + key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def look_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """What stands at each key."""
        names = [self._prefix + key for key in keys]
        # multi_get would wait for keys that are not there.
        if self._ask(self._store.has_extended_api) and self._ask(self._store.check, names):
            return list(self._ask(self._store.multi_get, names))
        return [self.look(key) for key in keys]

    def write(self, key: str, value: bytes) -> None:
        """Put ``value`` at ``key``."""
        self._ask(self._store.set, self._prefix + key, value)

    def number(self, key: str) -> int:
        """The number at ``key``; 0 if there is none."""
        return int(self.look(key) or 0)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0, and return it; all in one."""
        return int(self._ask(self._store.add, self._prefix + key, amount))

    def settle(self, key: str, message: Any, beats: Callable[[Any], bool]) -> None:
        """Put a message where none stands, or one that this one beats, whoever else does the same meanwhile."""
        value, standing = pack(message), self.look(key)
        while standing is None or beats(unpack(standing)):
            found = self._ask(self._store.compare_set, self._prefix + key, standing or b"", value)
            if found == value:
                return
            standing = found

    def say(self, key: str, message: Any) -> None:
        """Put a message of any size at ``key``; a large one in parts."""
        value = pack(message)
        if len(value) > _MAX_VALUE:
            parts = [value[start : start + _MAX_VALUE] for start in range(0, len(value), _MAX_VALUE)]
            for number, part in enumerate(parts):
                self.write(f"{key}.{number}", part)
            value = b"+" + pack([len(parts), zlib.crc32(value)])
        self.write(key, value)

    def hear(self, key: str) -> Any:
        """The message at ``key``; None if there is none, or it is being replaced."""
        return self._whole(key, self.look(key))

    def hear_all(self, keys: Sequence[str]) -> list[Any]:
        """The message at each key."""
        return [self._whole(key, value) for key, value in zip(keys, self.look_all(keys), strict=True)]

    def _whole(self, key: str, value: bytes | None) -> Any:
        if value is None or not value.startswith(b"+"):
            return None if value is None else unpack(value)
        num_parts, digest = unpack(value[1:])
        joined = b"".join(part or b"" for part in self.look_all([f"{key}.{number}" for number in range(num_parts)]))
        return unpack(joined) if zlib.crc32(joined) == digest else None

    def forget(self, keys: Sequence[str]) -> None:
        """Take away what stands at these keys."""
        for key in keys:
            value = self.look(key)
            if value is None:
                continue
            num_parts = unpack(value[1:])[0] if value.startswith(b"+") else 0
            for name in (key, *(f"{key}.{number}" for number in range(num_parts))):
                self._ask(self._store.delete_key, self._prefix + name)

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

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise StreamError(
                "The key-value store of the run does not answer; the process that serves it (rank 0, or the launcher) "
                f"has most likely ended. Look for the reason in its log. {type(error).__name__}: {error}"
            ) from error


def pack(message: Any) -> bytes:
    """Plain JSON data as bytes, compressed if that is worth it."""
    value = json.dumps(message, separators=(",", ":")).encode()
    return value if len(value) < _WORTH_COMPRESSING else zlib.compress(value, 1)


def unpack(value: bytes) -> Any:
    """The message in ``value``.

    Raises:
        StreamError: :func:`pack` did not make it.
    """
    try:
        return json.loads(zlib.decompress(value) if value[:1] == b"x" else value)
    except (ValueError, zlib.error):
        raise StreamError(
            f"Stale or foreign entries in the key-value store of the run: {value[:80]!r} is none of its messages. "
            "Something else writes to the same keys; give each its own store, or a PrefixStore."
        ) from None


def meet(store: GroupStore, topology: Topology, terms: dict[str, Any], names: Sequence[str], timeout: float) -> str:
    """Wait for all ranks and agree on the name of a run that nobody else has, now or before.

    Every rank leaves a token of its own; rank 0 names the run and returns each token with the name; whoever finds its
    token again is there, and once all are, rank 0 has it begin. So what a process left behind that has died meanwhile
    is not taken for its successor, however often and unevenly ranks were started anew.

    Args:
        store: Of all ranks.
        topology: The ranks.
        terms: What has to be equal on all ranks.
        names: What the caller keeps under the name of a run; of earlier runs, it is taken away.
        timeout: Seconds.

    Raises:
        StreamError: Not all came in time.
        RankMismatchError: The terms differ.
    """
    if topology.rank:
        return _follow(store, topology.rank, terms, timeout)
    return _lead(store, topology.num_replicas, terms, names, timeout)


def _lead(store: GroupStore, num_replicas: int, terms: dict[str, Any], names: Sequence[str], timeout: float) -> str:
    others = range(1, num_replicas)
    used = dict(zip(others, store.hear_all([f"welcome/{rank}" for rank in others]), strict=True))
    runs: list[str] = store.hear("runs") or []
    tokens: dict[int, Any] = {}
    welcomed: dict[int, Any] | None = None
    missing = list(others)

    def find() -> str | None:
        nonlocal welcomed, missing
        asked = missing or others
        tokens.update(zip(asked, store.hear_all([f"hello/{rank}" for rank in asked]), strict=True))
        missing = [rank for rank in others if tokens[rank] in (None, _token_of(used[rank]))]
        if missing:
            return None
        if tokens != welcomed:
            # Again if one was left behind by a process that has died: its successor has another by now.
            welcomed = dict(tokens)
            runs.append(f"{store.add('num_runs', 1)}-{secrets.token_hex(4)}")
            store.say("runs", runs)
            for rank, token in welcomed.items():
                store.say(f"welcome/{rank}", [token, runs[-1], terms])
        refused: str | None = store.hear(f"{runs[-1]}/refused")
        return "" if refused is None and store.number(f"{runs[-1]}/joined") == len(others) else refused

    refused = store.wait(find, timeout)
    if refused is None:
        came = f"ranks {missing[:8]} of {num_replicas} have not come" if missing else "not all of them have answered"
        raise StreamError(
            f"The ranks have waited {timeout:g} s to begin a pass over the stream together, and {came}. Look at their "
            "logs for an error, a slow start, or a loader that only some ranks iterate."
        )
    store.say(f"{runs[-1]}/begins", refused)
    if refused:
        raise RankMismatchError(refused)
    # All are here, so nobody is left in an earlier one.
    store.forget([f"{run}/{name}" for run in runs[:-1] for name in (*_NAMES, *names)])
    store.say("runs", runs[-1:])
    return runs[-1]


def _follow(store: GroupStore, rank: int, terms: dict[str, Any], timeout: float) -> str:
    token, run = secrets.token_hex(8), ""
    store.say(f"hello/{rank}", token)

    def find() -> str | None:
        nonlocal run
        welcome = store.hear(f"welcome/{rank}")
        if _token_of(welcome) != token:
            return None
        if run != welcome[1]:
            run = welcome[1]
            if welcome[2] != terms:
                differing = [name for name in terms if welcome[2].get(name) != terms[name]]
                sides = ", ".join(f"{name} is {welcome[2].get(name)!r} and {terms[name]!r}" for name in differing)
                store.say(f"{run}/refused", f"The ranks disagree about their stream: on ranks 0 and {rank}, {sides}.")
            else:
                store.add(f"{run}/joined", 1)
        begins: str | None = store.hear(f"{run}/begins")
        return begins

    refused = store.wait(find, timeout)
    if refused is None:
        reason = "rank 0 has found not all ranks" if run else "rank 0 has not come"
        raise StreamError(
            f"Rank {rank} has waited {timeout:g} s to begin a pass over the stream with the others: {reason}. Look at "
            "the logs of the others; ranks that were started anew while others were not have to be started together."
        )
    if refused:
        raise RankMismatchError(refused)
    return run


def _token_of(welcome: Any) -> Any:
    return welcome[0] if isinstance(welcome, list) and len(welcome) == 3 else None
