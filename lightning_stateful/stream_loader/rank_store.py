"""torch's key-value store as ranks use it: requests that are answered at once, and a run's name that is new."""

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

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_LONGEST_PAUSE = 0.1  # Seconds between two looks, so that a wait ends soon after what it waits for, and Ctrl-C at once.
_LOOKS_PER_SECOND = 20_000  # Of all ranks together: a fraction of what a TCPStore answers.
_MAX_VALUE = 4 * 2**20  # A TCPStore cuts the connection at values above 8 MiB.
_WORTH_COMPRESSING = 1024
_NOTHING = b"?nothing?"  # What a look finds where there is nothing.


class _ProcessGroup:
    """What one rank of this process knows of a process group, for as long as its store lives."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Store | None = None
        self.name = ""
        self.num_runs: Counter[str] = Counter()
        # By label and number of a run: the keys in the store that this rank has written.
        self.written: dict[tuple[str, int], dict[str, int]] = {}


_GROUPS: weakref.WeakKeyDictionary[Store, dict[int, _ProcessGroup]] = weakref.WeakKeyDictionary()
_GROUPS_LOCK = threading.Lock()


class RankStore:
    """A key-value store as one of many ranks uses it: only :meth:`wait` and :meth:`begin_run` wait, and handle signals.

    torch's own ``get`` and ``wait`` block in C++, deaf to signals, and a ``wait`` that times out prints two warnings.

    Args:
        store: torch's, the same object for all runs of a process group.
        topology: The ranks, and this one.

    Raises:
        StreamError: From every method: the store does not answer, or somebody else writes to it.
    """

    def __init__(self, store: Store, topology: Topology) -> None:
        with _GROUPS_LOCK:
            self._group = _GROUPS.setdefault(store, {}).setdefault(topology.rank, _ProcessGroup())
        # Others may hold `store` locked in a wait. One connection serves all runs: for each new one, the server would
        # look up the name of its peer.
        if self._group.connection is None:
            try:
                own = store.clone()  # type: ignore[attr-defined]
                # A HashStore is its own clone, which must not keep itself alive.
                self._group.connection = None if own is store else own
            except (AttributeError, NotImplementedError, RuntimeError):
                pass  # Older than clone(), or of somebody's own making.
        self._store: Any = self._group.connection or store
        self._topology = topology
        self._written: dict[str, int] = {}
        self._shortest_pause = min(max(topology.num_replicas / _LOOKS_PER_SECOND, 2e-4), _LONGEST_PAUSE)

    @property
    def has_met(self) -> bool:
        """Whether the ranks of the process group have met, so that a run begins at once."""
        return bool(self._group.name)

    def next_run(self, label: str) -> int:
        """Number of a new run, counted for each label."""
        self._group.num_runs[label] += 1
        return self._group.num_runs[label]

    def begin_run(self, label: str, number: int, timeout: float) -> str:
        """The name of a run: equal on all ranks, and new. The first time, wait for all ranks of the process group.

        Raises:
            StreamError: Not all came in time.
        """
        with self._group.lock:
            if not self._group.name:
                self._group.name = self._follow(timeout) if self._topology.rank else self._lead(timeout)
        self._label, self._number = label, number
        self._group.written[label, number] = self._written
        return f"{self._group.name}/{label}/{number}"

    def delete_earlier_runs(self) -> None:
        """Delete what this rank has left in the store in runs under this label before this one."""
        for label, number in list(self._group.written):
            if label == self._label and number < self._number:
                for key, num_parts in self._group.written.pop((label, number)).items():
                    self._delete(key, num_parts)

    def texts(self, keys: Sequence[str]) -> list[str | None]:
        """The text at each key; None where there is none."""
        return [self._text(key, value) for key, value in zip(keys, self._look_all(keys), strict=True)]

    def read(self, key: str) -> Any:
        """The JSON data at ``key``; None if there is none."""
        text = self._text(key, self._look(key))
        return None if text is None else _parsed(text)

    def put(self, key: str, text: str) -> None:
        """Put a text of any size at ``key``, a large one in parts; not to be put again in another number of parts."""
        value = _packed(text)
        parts = [value[start : start + _MAX_VALUE] for start in range(0, len(value), _MAX_VALUE)]
        self._written[key] = len(parts) if len(parts) > 1 else 0
        if len(parts) > 1:
            for number, part in enumerate(parts):
                self._ask("set", f"{key}.{number}", part)
            value = b"+%d" % len(parts)
        self._ask("set", key, value)

    def delete(self, key: str) -> None:
        """Delete what this rank has put at ``key``."""
        self._delete(key, self._written.pop(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0, and return it; all in one."""
        self._written.setdefault(key, 0)
        return int(self._ask("add", key, amount))

    def number(self, key: str) -> int:
        """The number at ``key``; 0 if there is none."""
        return int(self._look(key) or 0)

    def settle(self, key: str, message: Any, beats: Callable[[Any], bool]) -> Any:
        """Put JSON data where none stand, or some that these beat, whoever else does the same; returns what stands."""
        self._written.setdefault(key, 0)
        value = _packed(json.dumps(message))
        standing = self._ask("compare_set", key, b"", value)
        while standing != value:
            known = _parsed(_unpacked(standing))
            if not beats(known):
                return known
            standing = self._ask("compare_set", key, standing, value)
        return message

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

    def _lead(self, timeout: float) -> str:
        """As rank 0: name the process group and answer every rank's token, until all have found theirs.

        A token that was answered before belongs to a process of an earlier group; one that is replaced belonged to a
        process that died before it was answered: its successor has another.
        """
        others = range(1, self._topology.num_replicas)
        earlier = self.read("group")
        tokens: dict[str, str] = {}
        stale = earlier[1] if earlier else {}
        name, missing = "", list(others)

        def find() -> bool | None:
            nonlocal name, missing
            hellos = dict(zip(others, map(_parsed, self.texts([f"hello/{rank}" for rank in others])), strict=True))
            missing = [rank for rank, hello in hellos.items() if hello is None or hello[0] == stale.get(str(rank))]
            if missing:
                return None
            answered = {str(rank): hello[0] for rank, hello in hellos.items()}
            if answered != tokens or not name:
                name = secrets.token_hex(8)
                tokens.clear()
                tokens.update(answered)
                self.put("group", json.dumps([name, tokens, None]))
            return True if all(hello[1] == name for hello in hellos.values()) else None

        if not self.wait(find, timeout):
            late = f"ranks {missing[:8]} of {len(others) + 1} have not come" if missing else "not all have answered"
            text = (
                f"Rank 0 has waited {timeout:g} s for the other ranks to begin to read a stream together, and {late}. "
                "Look at their logs for an error, a slow start, or a loader that only some ranks iterate."
            )
            self.put("group", json.dumps([name, tokens, text]))
            raise StreamError(text)
        self.put("group", json.dumps([name, tokens, ""]))
        return name

    def _follow(self, timeout: float) -> str:
        """As another rank: leave a token, and wait until rank 0 has answered it and those of all others."""
        rank, token, name = str(self._topology.rank), secrets.token_hex(8), ""
        self.put(f"hello/{rank}", json.dumps([token, ""]))

        def find() -> list[Any] | None:
            nonlocal name
            found: list[Any] | None = self.read("group")
            if found is None or found[1].get(rank) != token:
                return None
            if found[2] is not None:
                return found
            if found[0] != name:
                name = found[0]
                self.put(f"hello/{rank}", json.dumps([token, name]))
            return None

        found = self.wait(find, timeout + min(self._topology.rank * 0.05, 5.0))
        if found is None:
            raise StreamError(
                f"Rank {rank} has waited {timeout:g} s to begin to read a stream with the others: rank 0 has "
                f"{'found not all ranks' if name else 'not come'}. Look at the logs of the others; ranks that were "
                "started anew while others were not have to be started together."
            )
        if found[2]:
            raise StreamError(found[2])
        return str(found[0])

    def _look(self, key: str) -> bytes | None:
        # The one question that all stores answer in one round trip, whether or not the key is there.
        found: bytes = self._ask("compare_set", key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def _look_all(self, keys: Sequence[str]) -> list[bytes | None]:
        # multi_get would wait for keys that are not there.
        if keys and self._store.has_extended_api() and self._ask("check", list(keys)):
            return list(self._ask("multi_get", list(keys)))
        return [self._look(key) for key in keys]

    def _text(self, key: str, value: bytes | None) -> str | None:
        if value is not None and value[:1] == b"+":
            num_parts = int(value[1:])
            parts = self._look_all([f"{key}.{number}" for number in range(num_parts)])
            value = None if None in parts else b"".join(part or b"" for part in parts)
        return None if value is None else _unpacked(value)

    def _delete(self, key: str, num_parts: int) -> None:
        for name in (key, *(f"{key}.{number}" for number in range(num_parts))):
            self._ask("delete_key", name)

    def _ask(self, function: str, keys: str | list[str], *arguments: Any) -> Any:
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
    """The error for values in the store that are none of this package's."""
    return StreamError(
        f"Stale or foreign entries in the key-value store of the run: {what}. Something else writes to the same keys; "
        "give each its own store, or a PrefixStore, and start all ranks anew together."
    )


def _packed(text: str) -> bytes:
    value = text.encode()
    return value if len(value) < _WORTH_COMPRESSING else b"z" + zlib.compress(value, 1)


def _unpacked(value: bytes) -> str:
    try:
        return (zlib.decompress(value[1:]) if value[:1] == b"z" else value).decode()
    except (ValueError, zlib.error):
        raise foreign(f"{value[:80]!r} is none of its messages") from None


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise foreign(f"{text[:80]!r} is none of its messages") from None
