"""torch's key-value store as ranks use it, and states as text, of which large parts are stored once."""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError, StreamError
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.rank_exchange import end_comparing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_LONGEST_PAUSE = 0.1  # Seconds between two looks, so that a wait ends soon after what it waits for, and Ctrl-C at once.
_LOOKS_PER_SECOND = 20_000  # Of all ranks together: a fraction of what a TCPStore answers.
_CALM = 1.0  # Seconds of a wait after which, and then again and again, it looks whether another rank has failed.
_LONGEST_DEAFNESS = timedelta(seconds=10)  # To signals, where another rank deletes what is read.
_WORTH_COMPRESSING = 1024
_NOTHING = b"?nothing?"  # What a look finds where there is nothing.
_LARGE = 1024  # Characters from which on what stands under a key "state" is large.
_LARGE_WHOLE = 16_384  # And from which on what is left of a state is.
_PIECE = 2**20  # A large part is cut into pieces of so many: a TCPStore takes no more than 8 MiB at once.

_HOLDERS = (dict, list, tuple)
_dumps = json.JSONEncoder(separators=(",", ":")).encode

Path = tuple[str | int, ...]

_STORES: weakref.WeakKeyDictionary[Store, dict[tuple[int, int], RankStore]] = weakref.WeakKeyDictionary()
_STORES_LOCK = threading.Lock()
_num_fits = 0


class RankStore:
    """A key-value store as one of many ranks uses it: only :meth:`wait` and :meth:`begin_run` wait, and handle signals.

    torch's own ``get`` and ``wait`` block in C++, deaf to signals, and a ``wait`` that times out prints two warnings.

    Several processes may share a data-parallel rank, as under tensor parallelism. They are in *columns*, each with one
    process of every rank.

    Args:
        store: torch's, the same object for all runs of a process group.
        topology: The data-parallel ranks, and this one.
        world: The processes, and this one; None where each is a data-parallel rank.

    Attributes:
        column: That of this process, once the processes have met.
        num_columns: Processes of a data-parallel rank.

    Raises:
        StreamError: From every method but those that delete: the store does not answer, or holds what is not of this
            package.
    """

    @classmethod
    def of(cls, store: Store, topology: Topology, world: Topology | None = None) -> RankStore:
        """The one of a process group, for as long as torch's store lives."""
        key = (topology if world is None else world).rank, topology.num_replicas
        with _STORES_LOCK:
            stores = _STORES.setdefault(store, {})
            if key not in stores:
                stores[key] = cls(store, topology, world)
            return stores[key]

    def __init__(self, store: Store, topology: Topology, world: Topology | None = None) -> None:
        self._topology, self._world = topology, topology if world is None else world
        self._store, self._name = _connection_beside(store), ""
        self.column, self.num_columns = 0, 1
        self._shortest_pause = min(max(self._world.num_replicas / _LOOKS_PER_SECOND, 2e-4), _LONGEST_PAUSE)
        self._lock = threading.Lock()
        self._num_runs: Counter[str] = Counter()
        self._runs: dict[str, list[str]] = {}  # By label: those that are not deleted yet.
        self._keys: set[str] = set()  # What this rank has written.

    @property
    def has_met(self) -> bool:
        """Whether the ranks of the process group have met, so that a run begins at once."""
        return bool(self._name)

    def begin_run(self, label: str, timeout: float) -> str:
        """The name of the next run under a label, of all columns; the first time, wait for the whole process group.

        Raises:
            ConfigurationError: Data-parallel ranks have different numbers of processes.
            StreamError: Not all came in time.
        """
        with self._lock:
            self._name = self._name or self._meet(timeout)
        self._num_runs[label] += 1
        run = f"{self._name}/{json.dumps(label)}/{self._num_runs[label]}"
        self._runs.setdefault(label, []).append(run)
        return run

    def delete_runs(self, label: str, *, but: int) -> None:
        """Delete what this rank has written in its runs under a label, but for so many of the latest."""
        runs = self._runs[label]
        while len(runs) > but:
            prefix = f"{runs.pop(0)}/"
            for key in [key for key in self._keys if key.startswith(prefix)]:
                self.delete(key)

    def texts(self, keys: Sequence[str]) -> list[str | None]:
        """The text at each key; None where there is none."""
        # multi_get would wait for keys that are not there.
        if len(keys) > 1 and self._store.has_extended_api() and self._ask("check", keys):
            return [_unpacked(value) for value in self._ask("multi_get", keys)]
        return [self.text(key) for key in keys]

    def text(self, key: str) -> str | None:
        """The text at ``key``; None if there is none."""
        # The one question that all stores answer in one round trip, whether or not the key is there.
        value = self._ask("compare_set", key, _NOTHING, _NOTHING)
        return None if value == _NOTHING else _unpacked(value)

    def put(self, key: str, text: str) -> None:
        """Put a text at ``key``."""
        self._keys.add(key)
        self._ask("set", key, _packed(text))

    def delete(self, key: str) -> None:
        """Delete what this rank has put at ``key``, if the store is still there."""
        self._keys.discard(key)
        # With rank 0, which may have come to its end and left, the store is gone.
        with suppress(StreamError):
            self._ask("delete_key", key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0, and return it; all in one."""
        self._keys.add(key)
        return int(self._ask("add", key, amount))

    def settle(self, key: str, message: Any, beats: Callable[[Any], bool] = lambda standing: False) -> Any:
        """Put JSON data where none stand, or some that these beat, whoever else does the same; returns what stands."""
        self._keys.add(key)
        value = _packed(json.dumps(message))
        standing = self._ask("compare_set", key, b"", value)
        while standing != value and beats(json.loads(_unpacked(standing))):
            standing = self._ask("compare_set", key, standing, value)
        return json.loads(_unpacked(standing))

    def wait(self, find: Callable[[], T | None], timeout: float, *, heeds_failures: bool = True) -> T | None:
        """Call ``find`` until it returns something; None if it has not after ``timeout`` seconds.

        Raises:
            StreamError: A rank has told by :func:`tell_failure` that it will not come, unless that is not heeded.
        """
        began, calm = time.monotonic(), _CALM
        while (found := find()) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return None
            if waited > calm and heeds_failures and self._name:
                calm += _CALM
                if failed := self.text(f"{self._name}/failed/{_num_fits}"):
                    raise StreamError(failed)
            # An eighth of the time waited so far: what is close is found quickly, what is far costs few looks.
            pause = min(max(waited / 8, self._shortest_pause), _LONGEST_PAUSE)
            time.sleep(min(pause, timeout - waited))
        return found

    def _meet(self, timeout: float) -> str:
        """Wait for all processes of the group, name it, and find the column of this one.

        Each process leaves a token, process 0 answers each token with a name for all of them and a column, and each
        counts itself under that name, which holds once all have. So a token that a process has left behind which has
        died meanwhile does no harm: once its successor has come, process 0 answers with another name.
        """
        ranks, world = self._topology, self._world
        token, answered, name = f"{secrets.token_hex(8)}-{ranks.rank}", list[str | None](), ""
        meeting = "" if ranks.num_replicas == world.num_replicas else f"{ranks.num_replicas} ranks/"
        keys = [f"{meeting}token/{other}" for other in range(world.num_replicas)]
        self.put(keys[world.rank], token)

        def find() -> bool | None:
            nonlocal answered, name
            if not world.rank and (tokens := self.texts(keys)) != answered and None not in tokens:
                answered = tokens
                group = digest_of("".join(map(str, tokens)))[:12]
                for other, column in zip(tokens, _columns(tokens, ranks.num_replicas), strict=True):
                    self._ask("set", f"answer/{other}", f"{group} {column}".encode())
            if answer := self.text(f"answer/{token}"):
                name, column, num_columns = answer.split()
                self.column, self.num_columns = int(column), int(num_columns)
                self.add(f"{name}/met", 1)
                # Taken, unless there is another one by now.
                self._ask("compare_set", f"answer/{token}", answer, b"")
            return True if name and int(self.text(f"{name}/met") or 0) >= len(keys) else None

        if not self.wait(find, timeout):
            raise self._not_met(token, keys, timeout)
        # By process 0 alone, whose multi_get would wait for those that are gone.
        for key in () if world.rank else [*keys, *(f"answer/{other}" for other in answered)]:
            self.delete(key)
        if not self.num_columns:
            raise ConfigurationError(
                f"{world.num_replicas} processes were to be {ranks.num_replicas} data-parallel ranks with the same "
                f"number of processes each, but they are not: process {world.rank} has said that it is rank "
                f"{ranks.rank}. Give every process num_replicas and rank of its place among the data-parallel ranks."
            )
        return name

    def _not_met(self, token: str, keys: Sequence[str], timeout: float) -> StreamError:
        """The error that not all ranks have come, or that this one came when others had given up."""
        rank, left = self._world.rank, [self.text(key) for key in keys]
        missing = [other for other, its in enumerate(left) if its is None or self.text(f"answer/{its}")] or [0]
        notes = [json.loads(self.text(f"gave_up/{other}") or "[null, []]") for other in range(len(keys))]
        self.put(f"gave_up/{rank}", json.dumps([token, missing]))
        # The note of a process that was started anew since has another token.
        waited = [other for other, (its, late) in enumerate(notes) if its and its == left[other] and rank in late]
        if waited:
            return StreamError(
                f"Rank {rank} has come too late: ranks {waited[:8]} had waited for it to begin to read a stream with "
                "them, and given up. Look in its log for what held it up, such as a slow first shard; if it is only "
                "slow, raise the timeout."
            )
        return StreamError(
            f"Rank {rank} has waited {timeout:g} s to begin to read a stream with the others, and "
            f"ranks {missing[:8]} of {len(keys)} have not come. Look at their logs for an error, a slow "
            "start, or a loader that only some ranks iterate; ranks that were started anew while others were not "
            "have to be started together."
        )

    def _ask(self, function: str, keys: str | Sequence[str], *arguments: Any) -> Any:
        prefix = "lightning_stateful/"
        names = prefix + keys if isinstance(keys, str) else [prefix + key for key in keys]
        try:
            return getattr(self._store, function)(names, *arguments)
        except RuntimeError as error:
            if str(error).startswith("DataLoader worker"):
                # Of a worker that has died: torch raises it in the main thread, wherever that stands.
                raise
            raise StreamError(
                "The key-value store of the run does not answer; the process that serves it (rank 0, or the launcher) "
                "has most likely ended. Look for the reason in its log. One that leaves by os._exit when it is done "
                f"has to wait for the others first: torch.distributed.barrier(). {type(error).__name__}: {error}"
            ) from error


def begin_anew() -> None:
    """Begin another fit, on all ranks: of earlier ones, which may have failed, nothing is heeded any more."""
    global _num_fits
    _num_fits += 1
    end_comparing(were_seeded=False)


def tell_failure(error: BaseException) -> None:
    """Tell all ranks that wait for this one, now or later in this fit, that it has failed; raises nothing itself."""
    with _STORES_LOCK:
        met = [store for stores in _STORES.values() for store in stores.values() if store.has_met]
    for store in met:
        text = f"Rank {store._topology.rank} has failed: {type(error).__name__}: {error}"
        with suppress(StreamError):
            store.put(f"{store._name}/failed/{_num_fits}", text[:4000])


def _columns(tokens: Sequence[str | None], num_ranks: int) -> list[str]:
    """Of each token of a process, its column and their number; no columns where ranks differ in their processes."""
    seen: Counter[str] = Counter()
    columns = []
    for token in tokens:
        rank = str(token).rpartition("-")[2]
        columns.append(seen[rank])
        seen[rank] += 1
    number = len(tokens) // num_ranks if set(seen.values()) == {len(tokens) / num_ranks} else 0
    return [f"{column} {number}" for column in columns]


def foreign(what: str) -> StreamError:
    """The error for what stands in the store and is not of this package."""
    return StreamError(
        f"Stale or foreign entries in the key-value store of the run: {what}. Something else writes to the same keys; "
        "give each its own store, or a PrefixStore, and start all ranks anew together."
    )


def _connection_beside(store: Store) -> Any:
    """A connection beside ``store``, which others may hold locked in a wait; the store itself where it has none.

    One for all runs: at each new one, the server would look up the name of its peer, and everybody else wait.
    """
    try:
        own: Any = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        own = store  # Older than clone(), or of somebody's own making.
    if own is store:
        # As a HashStore is its own clone. What is known of a store must not keep it alive.
        return weakref.proxy(store)
    own.set_timeout(_LONGEST_DEAFNESS)
    return own


def _packed(text: str) -> bytes:
    value = text.encode()
    return value if len(value) < _WORTH_COMPRESSING else b"z" + zlib.compress(value, 1)


def _unpacked(value: bytes) -> str:
    try:
        return (zlib.decompress(value[1:]) if value[:1] == b"z" else value).decode()
    except (ValueError, zlib.error):
        raise foreign(f"{value[:80]!r} is none of its messages") from None


class StateText(NamedTuple):
    """A node state as JSON text.

    Attributes:
        text: ``[state, [path, digests], ...]``: the state without its large parts, and where each belongs; one line.
        large: Pieces of large parts by digest.
    """

    text: str
    large: Mapping[str, str]


# A StateText for somebody who has the one before: None for a piece that was in that.
Changes = tuple[str, Mapping[str, str | None]]


class StateEncoder:
    """Encodes the states of one worker slot, one after the other.

    What stands under a key ``"state"`` may be the state of a user's dataset, and large: it is encoded once for as long
    as it is the same object, which must not be changed in place.
    """

    def __init__(self) -> None:
        # By path: the latest object, kept alive so that it is not taken for another; its pieces, none if it is small.
        self._known: dict[Path, tuple[Any, list[tuple[str, str]]]] = {}
        self._latest: Mapping[str, str] = {}  # Pieces of the latest state.

    def encode(self, state: Any) -> StateText:
        """Encode a state, plain JSON data."""
        if not self._latest and len(text := _dumps(state)) < _LARGE:
            return StateText(f"[{text}]", {})
        parts: dict[Path, list[tuple[str, str]]] = {}
        text = _dumps(self._short(state, (), parts) if isinstance(state, _HOLDERS) else state)
        if len(text) >= _LARGE_WHOLE:
            text, parts = "null", {(): in_pieces(text), **parts}
        places = [f",{_dumps([path, [digest for digest, _ in pieces]])}" for path, pieces in parts.items()]
        self._latest = {digest: piece for pieces in parts.values() for digest, piece in pieces}
        return StateText(f"[{text}{''.join(places)}]", self._latest)

    def encode_changes(self, state: Any) -> Changes:
        """Encode a state for somebody who was given all before, which :func:`complete` puts together again."""
        before = self._latest
        text, large = self.encode(state)
        return text, {digest: None if digest in before else piece for digest, piece in large.items()}

    def _short(self, value: Any, path: Path, parts: dict[Path, list[tuple[str, str]]]) -> Any:
        """A copy without large parts, which are put into ``parts``."""
        short: Any = dict(value) if isinstance(value, dict) else list(value)
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            here = (*path, key)
            # A slot's state of a source is a node's, which may have a large one of the user's in it.
            if key == "state" and not (len(path) == 2 and path[0] == "of"):
                if pieces := self._pieces_if_large(part, here):
                    short[key], parts[here] = None, pieces
            elif isinstance(part, _HOLDERS):
                short[key] = self._short(part, here, parts)
        return short

    def _pieces_if_large(self, state: Any, path: Path) -> list[tuple[str, str]]:
        known, pieces = self._known.get(path, (None, []))
        if known is not state:
            text = _dumps(state)
            pieces = in_pieces(text) if len(text) >= _LARGE else []
            self._known[path] = state, pieces
        return pieces


def complete(changes: Changes, before: StateText | None) -> StateText:
    """Undo :meth:`StateEncoder.encode_changes`: add the pieces that the text before it has."""
    text, large = changes
    known = before.large if before else {}
    return StateText(text, {digest: known[digest] if piece is None else piece for digest, piece in large.items()})


def decode(text: str | list[Any], large: Mapping[str, str]) -> Any:
    """The state in :attr:`StateText.text`, which may be parsed already."""
    state, *places = json.loads(text) if isinstance(text, str) else text
    for path, digests in places:
        part = json.loads("".join(large[digest] for digest in digests))
        if not path:
            state = part
            continue
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = part
    return state


def digest_of(piece: str) -> str:
    """The digest under which a piece of a large part is kept."""
    return hex_digest(piece.encode(), size=16)


def in_pieces(text: str) -> list[tuple[str, str]]:
    """A text cut into pieces, each with its digest."""
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [(digest_of(piece), piece) for piece in pieces]
