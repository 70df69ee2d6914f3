"""The files of a ledger: one for each rank and start of a run, written batch by batch.

A file is a line of JSON, the header, and then frames: the number of bytes that follow, their CRC-32, and a record of
one batch. Nothing that was written is changed later. A process that is killed leaves whole frames and perhaps a part
of one, which a reader leaves out.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import DamagedStateError, StateVersionError
from lightning_stateful.shapes import Either, check_shape

VERSION = 2
# Records of version 1 end behind their parts.
_READABLE = (1, VERSION)
SUFFIX = ".ledger"
Items = NDArray[np.uint64] | tuple[str, ...] | None

_FRAME = struct.Struct("<II")  # bytes of the record, their CRC-32
_BATCH = struct.Struct("<IIB")  # epoch, number of the batch in it, number of parts; no parts: the epoch's end
_PART = struct.Struct("<BBIII")  # number of the loader, kind of items, epoch of the loader, cycle, number of items
# Behind the parts come sections, each with the number of its kind.
_TIMES, _COUNTS = 1, 2
# Since the batch before began, and waited for data, in units of 10 microseconds.
_TIMES_OF = struct.Struct("<BII")
# Number of the part, its tokens, the same with padding, number of sources; and of each source its number and samples.
_COUNTS_OF, _SOURCE = struct.Struct("<BBIIH"), struct.Struct("<HI")
_UNITS, _MOST_UNITS = 100_000, 2**32 - 1
# Kinds of items beside the widths of indices, 1 to 8 bytes.
_TEXTS, _UNKNOWN = 16, 17
# Added to the kind of items that were left out and not trained on.
_SKIPPED = 32
# In place of a number of parts: the batch before was begun, and not trained on.
_TAKEN_BACK = 255
_HEADER = {
    "start": str,
    "rank": int,
    "num_replicas": int,
    "loaders": {str: {str: object}},
    "begins": (int, int),
    "resumed?": Either(None, {"start": str, "epoch": int, "batch": int}),
    **dict.fromkeys(("versions?", "time?", "host?"), object),
}
_MOST_HELD, _MOST_SECONDS = 1 << 16, 1.0


@dataclass(frozen=True)
class FileHeader:
    """The first line of a file of a ledger.

    Attributes:
        start: The name of the start, the same on all its ranks; later starts have greater names.
        rank: The rank, of data-parallel ranks.
        num_replicas: The number of ranks.
        loaders: By the path of a loader (empty for a single one): ``length``, the number of items that a whole epoch
            has once each, None where that is not known; ``once``, False where an epoch may have an item twice;
            ``data``, a digest of the settings by which items are numbered; of a mixture, ``mixture``, what was asked
            for; and of a stream whose samples have numbers, ``shards``, the names of its shards, or their number where
            there are many.
        begins: Epoch and batch at which the start begins.
        resumed: Where the checkpoint that it was resumed from was written: ``start``, ``epoch`` and ``batch`` of the
            batch that was to come. None for a start without a checkpoint.
        versions: Versions of this package, torch and Lightning.
        time: Seconds since 1970 by the clock of this rank's host, from which :attr:`Batch.began` counts.
        host: The name of that host.
    """

    start: str
    rank: int
    num_replicas: int
    loaders: dict[str, dict[str, Any]]
    begins: tuple[int, int] = (0, 0)
    resumed: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    time: float = 0.0
    host: str = ""

    def shards_of(self, path: str) -> Sequence[str] | int:
        """The names of a stream's shards, or their number where there are many; 0 of other data."""
        found: Sequence[str] | int = self.loaders.get(path, {}).get("shards", 0)
        return found


class ShardSample(NamedTuple):
    """A sample of a stream.

    Attributes:
        shard: The name of its shard.
        number: Its place among the samples of the shard, from 0.
    """

    shard: str
    number: int

    def __str__(self) -> str:
        return f"sample {self.number} of {self.shard}"


class Part(NamedTuple):
    """The items that a batch has of one loader.

    Attributes:
        path: The path of the loader.
        epoch: The epoch of the loader; of a stream whose samples have numbers, the pass over their source.
        items: Indices, or keys as text; None where it is not known what the batch consists of. Of a stream: the place
            of a sample in its shard, multiplied by the number of shards, plus the number of the shard.
        number: The number of items.
        cycle: Passes before in the epoch, of a loader that begins again within it.
        sources: Samples of each source of a mixture, where the items do not say it: pairs of its number among the
            names in the header, and how many.
        tokens: Tokens in the batch without padding, where the loader knows lengths.
        padded: The same with padding; 0 where that is not known.
        skipped: Whether the items were left out since the batch before. Of data without an index, steps of all ranks.
    """

    path: str
    epoch: int
    items: Items
    number: int
    cycle: int = 0
    sources: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    padded: int = 0
    skipped: bool = False

    def listed(self, shards: Sequence[str] | int = 0) -> list[Any]:
        """The items as a list; empty where they are not known.

        Args:
            shards: Those of a stream, as the header has them.
        """
        if self.items is None:
            return []
        if isinstance(self.items, tuple):
            return list(self.items)
        if not shards:
            return list(self.items.tolist())
        names, total = (None, shards) if isinstance(shards, int) else (shards, len(shards))
        places = (divmod(item, total) for item in self.items.tolist())
        return [ShardSample(names[shard] if names else f"shard {shard}", place) for place, shard in places]


class Batch(NamedTuple):
    """A batch that was trained on.

    Attributes:
        epoch: The epoch of the Trainer.
        batch: Its number in the epoch.
        parts: Its items, of each loader; empty for the end of the epoch, which comes after its last batch.
        began: When this rank began its step, with the batch on the device: seconds after :attr:`FileHeader.time`; None
            where it was not measured.
        waited: Seconds that the training loop waited for the batch.
    """

    epoch: int
    batch: int
    parts: tuple[Part, ...]
    began: float | None = None
    waited: float = 0.0


class LedgerFile:
    """Writes the file of a rank and start.

    Records are collected for at most a second, or 64 KiB, and at :meth:`flush`. The handler of a signal may raise in
    any method, as that of torch does for a worker that has died: every record is in the file once or not at all.

    Args:
        path: The file, which must not exist.
        header: What it says of the start.

    Raises:
        OSError: The file exists, or cannot be written.
    """

    def __init__(self, path: Path, header: FileHeader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._numbers = {name: number for number, name in enumerate(header.loaders)}
        self._file = path.open("xb", buffering=0)
        # What comes next in the file, and where in it that begins.
        self._held, self._begins = json.dumps({"version": VERSION, **asdict(header)}).encode() + b"\n", 0
        self._flushed = 0.0
        # The time that the batches so far add up to, so that nothing is lost by rounding.
        self._units = 0
        self.flush()

    def add(self, batch: Batch) -> None:
        """Add a batch that training begins on, or the end of an epoch."""
        record = bytearray(_BATCH.pack(batch.epoch, batch.batch, len(batch.parts)))
        for part in batch.parts:
            kind, items = _encoded(part.items)
            kind += _SKIPPED * part.skipped
            record += _PART.pack(self._numbers[part.path], kind, part.epoch, part.cycle, part.number) + items
        if batch.began is not None:
            passed = min(max(round(batch.began * _UNITS) - self._units, 0), _MOST_UNITS)
            self._units += passed
            record += _TIMES_OF.pack(_TIMES, passed, min(round(batch.waited * _UNITS), _MOST_UNITS))
        for number, part in enumerate(batch.parts):
            if part.sources or part.padded:
                record += _COUNTS_OF.pack(_COUNTS, number, part.tokens, part.padded, len(part.sources))
                record += b"".join(_SOURCE.pack(*pair) for pair in part.sources)
        self._hold(record)

    def take_back(self, batch: Batch) -> None:
        """Note that the batch that was added last, if it was this one, was not trained on."""
        self._hold(_BATCH.pack(batch.epoch, batch.batch, _TAKEN_BACK))

    def _hold(self, record: bytes | bytearray) -> None:
        self._held += _FRAME.pack(len(record), zlib.crc32(record)) + record
        if len(self._held) > _MOST_HELD or time.monotonic() - self._flushed > _MOST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand all records to the operating system, so that they outlive this process."""
        self._flushed = time.monotonic()
        while True:
            # The file alone knows what was written where a handler has raised behind a write.
            at = self._file.tell()
            self._held, self._begins = self._held[at - self._begins :], at
            if not self._held:
                return
            self._file.write(self._held)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()


def as_items(values: Any) -> tuple[Items, int]:
    """Indices or keys as they are kept, and their number.

    Args:
        values: An index or a key, or several in any iterable, array or tensor. Indices are integers that are not
            negative; other values are kept as text.
    """
    if hasattr(values, "reshape"):
        # An array or a tensor.
        values = values.reshape(-1).tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        values = [values]
    listed = list(values)
    if all(kind is not bool and issubclass(kind, (int, np.integer)) for kind in set(map(type, listed))):
        try:
            return np.array(listed, dtype=np.uint64), len(listed)
        except OverflowError:
            # Negative, or of more than 64 bits.
            pass
    return tuple(map(str, listed)), len(listed)


def read_header(path: Path) -> FileHeader:
    """Read the first line of a file of a ledger.

    Raises:
        DamagedStateError: It is no header.
        StateVersionError: It is of another version.
    """
    with path.open("rb") as file:
        first = file.readline()
    try:
        given = json.loads(first)
        version = given.pop("version")
        check_shape(given, _HEADER, "header")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedStateError(f"{path} is no file of a ledger: its first line is {first[:80]!r}.") from error
    if version not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        raise StateVersionError(f"{path} is of version {version!r} of the ledger; this package reads {known}.")
    return FileHeader(**{**given, "begins": tuple(given["begins"])})


def read_file(path: Path) -> tuple[FileHeader, list[Batch], int]:
    """Read a file of a ledger.

    Returns:
        The header, the batches in the order in which they were trained on, and the number of bytes at the end that are
        no whole record: of a process that was killed while it wrote, or of a damaged file. The last batch of a process
        that was killed may have been begun alone.

    Raises:
        DamagedStateError: It has no header of a known version.
    """
    content = path.read_bytes()
    header, first = read_header(path), content.partition(b"\n")[0]
    paths, at, batches, began = list(header.loaders), len(first) + 1, list[Batch](), 0.0
    while at + _FRAME.size <= len(content):
        size, checksum = _FRAME.unpack_from(content, at)
        record = content[at + _FRAME.size : at + _FRAME.size + size]
        if len(record) < max(size, _BATCH.size) or zlib.crc32(record) != checksum:
            break
        try:
            if record[_BATCH.size - 1] == _TAKEN_BACK:
                if batches and batches[-1][:2] == _BATCH.unpack(record)[:2]:
                    batches.pop()
                at += _FRAME.size + size
                continue
            batch = _decoded(record, paths)
        except (ValueError, IndexError, struct.error) as error:
            raise DamagedStateError(f"{path} has a record that is none of version {VERSION}, at byte {at}.") from error
        if batch.began is not None:
            began += batch.began
            batch = batch._replace(began=began)
        batches.append(batch)
        at += _FRAME.size + size
    return header, batches, len(content) - at


def _encoded(items: Items) -> tuple[int, bytes]:
    if items is None:
        return _UNKNOWN, b""
    if isinstance(items, tuple):
        text = json.dumps(items).encode()
        return _TEXTS, len(text).to_bytes(4, "little") + text
    width = np.min_scalar_type(int(items.max()) if len(items) else 0)
    return width.itemsize, items.astype(width.newbyteorder("<")).tobytes()


def _decoded(record: bytes, paths: Sequence[str]) -> Batch:
    epoch, number, num_parts = _BATCH.unpack_from(record)
    at, parts = _BATCH.size, []
    for _ in range(num_parts):
        loader, kind, loader_epoch, cycle, count = _PART.unpack_from(record, at)
        at += _PART.size
        items: Items = None
        skipped, kind = divmod(kind, _SKIPPED)
        if kind == _TEXTS:
            size = int.from_bytes(record[at : at + 4], "little")
            items = tuple(json.loads(record[at + 4 : at + 4 + size]))
            at += 4 + size
        elif kind != _UNKNOWN:
            items = np.frombuffer(record, f"<u{kind}", count, at).astype(np.uint64)
            at += kind * count
        parts.append(Part(paths[loader], loader_epoch, items, count, cycle, skipped=bool(skipped)))
    passed, waited = _read_sections(record, at, parts)
    return Batch(epoch, number, tuple(parts), passed, waited)


def _read_sections(record: bytes, at: int, parts: list[Part]) -> tuple[float | None, float]:
    """Read what stands behind the parts, and complete these.

    Returns:
        Seconds since the batch before began, None where they are not there; and seconds waited.
    """
    passed, waited = None, 0.0
    while at < len(record):
        if record[at] == _TIMES:
            _, *units = _TIMES_OF.unpack_from(record, at)
            passed, waited = (number / _UNITS for number in units)
            at += _TIMES_OF.size
        elif record[at] == _COUNTS:
            _, number, tokens, padded, num_sources = _COUNTS_OF.unpack_from(record, at)
            at += _COUNTS_OF.size
            end = at + num_sources * _SOURCE.size
            sources = tuple(_SOURCE.iter_unpack(record[at:end]))
            parts[number] = parts[number]._replace(sources=sources, tokens=tokens, padded=padded)
            at = end
        else:
            raise ValueError(record[at])
    return passed, waited


def files_of(folder: Path) -> Mapping[str, list[Path]]:
    """The files of a ledger by the name of their start, the earliest start first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        found.setdefault(path.parent.name, []).append(path)
    return found
