"""Stitches the starts of a run together, and finds what was trained on twice or never."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_stateful.errors import DamagedStateError
from lightning_stateful.ledger.files import Batch, FileHeader, files_of, read_file, read_header

# Epoch and cycle.
Pass = tuple[int, int]
# Items that a finding names.
_NAMED = 5


class Row(NamedTuple):
    """The items of one loader in a batch that the latest weights have been trained on.

    Attributes:
        start: The number of the start, from 0 for the first of the ledger.
        rank: Its rank.
        epoch: The epoch of the Trainer.
        batch: The number of the batch in it.
        items: Indices or keys, of streams :class:`~lightning_stateful.ledger.files.ShardSample`; empty where they are
            not known.
        number: The number of items.
    """

    start: int
    rank: int
    epoch: int
    batch: int
    items: list[Any]
    number: int


@dataclass(frozen=True)
class Finding:
    """Something that an uninterrupted run would not have done.

    Attributes:
        kind: ``"twice"``: items of an epoch that two starts trained on. ``"never"``: items of an epoch that is over
            and that no start trained on. ``"missing"``: batches that are in no file. ``"order"``: batches of a file
            that do not follow one another. ``"damaged"``: a file whose end cannot be read.
        epoch: The epoch; -1 for what concerns none.
        path: The path of the loader; empty for a single one, and for what concerns none.
        starts: The starts that did it, the earlier one first.
        items: The first few items.
        number: How many there are.
        text: All of this in a sentence.
    """

    kind: Literal["twice", "never", "missing", "order", "damaged"]
    epoch: int
    path: str
    starts: tuple[str, ...]
    items: tuple[Any, ...]
    number: int
    text: str


@dataclass
class Start:
    """A start of a run, with the files of its ranks.

    Attributes:
        header: The header of its lowest rank.
        batches: Its batches, by rank.
        headers: The header of each rank.
        damaged: By rank, bytes at the end of the file that are no whole record.
        kept: By rank, how many of the batches the latest weights have been trained on. Those behind the checkpoint
            that a later start was resumed from are lost with their weights.
        until: Epoch and batch that came next at that checkpoint; None of the last start.
    """

    header: FileHeader
    batches: dict[int, list[Batch]]
    headers: dict[int, FileHeader]
    damaged: dict[int, int]
    kept: dict[int, int] = field(default_factory=dict)
    until: tuple[int, int] | None = None

    def kept_batches(self, rank: int) -> list[Batch]:
        """The batches of a rank that the latest weights have been trained on."""
        return self.batches[rank][: self.kept[rank]]

    @property
    def num_kept(self) -> int:
        """Batches of all ranks that the latest weights have been trained on."""
        return sum(_count(self.kept_batches(rank)) for rank in self.batches)

    @property
    def num_lost(self) -> int:
        """Batches of all ranks that were trained on in vain."""
        return sum(_count(batches[self.kept[rank] :]) for rank, batches in self.batches.items())


class Ledger:
    """All batches that the latest weights were trained on, stitched together from the starts that led to them.

    Args:
        starts: The starts, the earliest first, each resumed from a checkpoint of the one before.
        others: Names of starts in the folder that did not lead to the last one.
        unreadable: By start, files without a header that can be read.

    Attributes:
        starts: The starts.
        rows: By the path of a loader, and the epoch and cycle of a pass over it, what was trained on: start by start,
            and in it rank by rank. A cycle is 0, but of a loader that begins again within an epoch. Of a stream whose
            samples have numbers, the epoch is the pass over a source, which may end in another epoch of the Trainer.
        skipped: The same of what ``skip=`` has left out; without indices, numbers of steps.
    """

    starts: list[Start]

    def __init__(
        self, starts: list[Start], *, others: Sequence[str] = (), unreadable: Mapping[str, Sequence[Path]] | None = None
    ) -> None:
        self.starts, self._others, self._unreadable = starts, list(others), dict(unreadable or {})
        self.rows: dict[str, dict[Pass, list[Row]]] = {path: {} for path in starts[-1].header.loaders}
        self.skipped: dict[str, dict[Pass, list[Row]]] = {}
        # Epochs of the Trainer that were left after their last batch.
        self._ended: set[int] = set()
        for start, following in pairwise(starts):
            if (resumed := following.header.resumed) is not None:
                start.until = resumed["epoch"], resumed["batch"]
        for number, start in enumerate(starts):
            for rank, batches in sorted(start.batches.items()):
                behind = (at for at, batch in enumerate(batches) if start.until and batch[:2] >= start.until)
                start.kept[rank] = next(behind, len(batches))
                for batch in start.kept_batches(rank):
                    self._note(number, rank, batch)

    def items(self, epoch: int, path: str = "") -> Counter[Any]:
        """Count the items that were trained on in an epoch of a loader, over all ranks."""
        passes = self.rows.get(path, {}).items()
        return Counter(
            item for (of_epoch, _), rows in passes if of_epoch == epoch for row in rows for item in row.items
        )

    def findings(self) -> list[Finding]:
        """Find what an uninterrupted run would not have done; empty where all is right.

        Items that two starts trained on in one epoch prove nothing, and are not reported, where a loader may give items
        of an epoch twice by itself; see :meth:`notes`.
        """
        found = list(self._missing_starts())
        found += [finding for start in self.starts for finding in (*_damaged(start), *_out_of_order(start))]
        found += [finding for start in self.starts for finding in _missing(start)]
        for path, passes in self.rows.items():
            if self._why_not_compared(path):
                continue
            length = self.starts[-1].header.loaders[path].get("length")
            without_tails = {at: self._without_tail(path, at) for at in sorted(passes)}
            for at, rows in without_tails.items():
                found += self._twice(path, at, rows)
                if length is not None and self._is_whole(path, at):
                    found += self._never(path, at, length)
        return found

    def notes(self) -> list[str]:
        """Sentences on what the findings cannot say: beginnings and loaders that are not known, and other starts."""
        said = []
        header = self.starts[0].header
        if header.resumed is None and header.begins > (0, 0):
            said.append(
                f"What was trained on before batch {header.begins[1]} of epoch {header.begins[0]} is not known: the "
                "first start went on from a checkpoint of a run without a ledger."
            )
        for path in self.rows:
            of = f" of loader {path!r}" if path else ""
            if why := self._why_not_compared(path):
                said.append(f"Whether items{of} came twice or never is not known: {why}.")
            elif number := self._num_counted(path):
                said.append(f"Of {_of(number, 'batch')}{of} not all items are known: nothing is said of them.")
            elif why := self._why_not_complete(path):
                said.append(f"Whether items{of} never came was not asked: {why}.")
        if self._others:
            said.append(f"{_of(len(self._others), 'other start')} of this folder did not lead to the last one here.")
        return said

    def _why_not_compared(self, path: str) -> str:
        """The reason why items say nothing on what came twice or never; empty for none."""
        loaders = [start.header.loaders[path] for start in self.starts if path in start.header.loaders]
        if len({loader.get("data") for loader in loaders}) > 1:
            return "between starts the data or their order were changed, so that an item is no longer the same"
        if not all(loader.get("once", True) for loader in loaders):
            return "an epoch of this stream may begin in one pass over the data and end in the next"
        passes = self.rows[path]
        if not any(row.items for rows in passes.values() for row in rows):
            return "batches were only counted; pass ledger_key"
        if any(_repeats(self._without_tail(path, at)) for at in passes):
            return "the loader itself gives items of an epoch more than once"
        return ""

    def _missing_starts(self) -> Iterator[Finding]:
        header = self.starts[0].header
        if header.resumed is not None:
            name = header.resumed["start"]
            text = f"start {header.start} went on from a checkpoint of start {name}, of which there is no file."
            yield Finding("missing", header.begins[0], "", (name, header.start), (), 1, text)
        for start, files in self._unreadable.items():
            text = f"of start {start} {', '.join(file.name for file in files)} cannot be read."
            yield Finding("damaged", -1, "", (start,), tuple(file.name for file in files), len(files), text)

    def epochs(self) -> list[dict[str, Any]]:
        """Of each pass over each loader: its items, how many of them are distinct, and whether it is over."""
        return [
            {
                "path": path,
                "epoch": at[0],
                "cycle": at[1],
                "items": sum(row.number for row in passes[at]),
                "distinct": len({item for row in passes[at] for item in row.items}),
                "skipped": sum(row.number for row in self._skipped_in(path, at)),
                "length": self.starts[-1].header.loaders[path].get("length"),
                "over": self._is_over(path, at),
            }
            for path, passes in self.rows.items()
            for at in sorted(passes)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Starts, epochs and findings as plain data."""
        starts = [{**asdict(one.header), "kept": one.num_kept, "lost": one.num_lost} for one in self.starts]
        findings = [asdict(one) for one in self.findings()]
        return {"starts": starts, "epochs": self.epochs(), "findings": findings, "notes": self.notes()}

    def __str__(self) -> str:
        lines = []
        for number, start in enumerate(self.starts, 1):
            header = start.header
            resumed = "" if header.resumed is None else f", resumed from {header.resumed['start']}"
            lines.append(
                f"start {number}: {header.start} on {_of(header.num_replicas, 'rank')}, from batch {header.begins[1]} "
                f"of epoch {header.begins[0]}{resumed}: {_of(start.num_kept, 'batch')}, and {start.num_lost:,} that no "
                "later start has kept"
            )
        for row in self.epochs():
            of_length = "" if row["length"] is None else f" of {row['length']:,}"
            lines.append(
                f"{_pass(row['path'], (row['epoch'], row['cycle']))}, {'over' if row['over'] else 'not over'}: "
                f"{_of(row['items'], 'item')}, {row['distinct']:,}{of_length} distinct"
                + (f", {row['skipped']:,} left out by skip=" if row["skipped"] else "")
            )
        lines += [f"{finding.kind}: {finding.text}" for finding in self.findings()]
        return "\n".join([*lines, *self.notes(), *self.verdict()])

    def verdict(self) -> list[str]:
        """A sentence that all is right, as far as that is known."""
        if self.findings() or any(self._why_not_compared(path) or self._num_counted(path) for path in self.rows):
            return []
        is_complete = not self._lacks_beginning and not any(map(self._why_not_complete, self.rows))
        return [f"Nothing was trained on twice{', and nothing was left out' if is_complete else ''}."]

    @property
    def _lacks_beginning(self) -> bool:
        header = self.starts[0].header
        return header.resumed is not None or header.begins > (0, 0)

    def _num_counted(self, path: str) -> int:
        """Batches of which all items, or some, are not known."""
        return sum(len(row.items) < max(row.number, 1) for rows in self.rows[path].values() for row in rows)

    def _why_not_complete(self, path: str) -> str:
        """The reason why nobody can tell whether something never came; empty for none."""
        loader = self.starts[-1].header.loaders[path]
        if loader.get("length") is not None:
            return ""
        if "shards" in loader:
            return "how many samples a shard has is not known"
        return "that is known of the indices of a single loader alone, without limits and drop_last"

    def _note(self, number: int, rank: int, batch: Batch) -> None:
        if not batch.parts:
            self._ended.add(batch.epoch)
        for part in batch.parts:
            items = part.listed(self.starts[number].header.shards_of(part.path))
            row = Row(number, rank, batch.epoch, batch.batch, items, part.number)
            found = self.skipped if part.skipped else self.rows
            found.setdefault(part.path, {}).setdefault((part.epoch, part.cycle), []).append(row)

    def _skipped_in(self, path: str, at: Pass) -> list[Row]:
        return self.skipped.get(path, {}).get(at, [])

    def _is_over(self, path: str, at: Pass) -> bool:
        """Whether a later pass has begun, or the Trainer's epoch has ended of which it is a part."""
        passes = self.rows[path]
        is_trainers = all(row.epoch == at[0] for row in passes[at])
        return max(passes) > at or (is_trainers and at[0] in self._ended)

    def _is_whole(self, path: str, at: Pass) -> bool:
        """Whether a pass is over, and all of it is in the files."""
        rows, begins = self.rows[path][at], self.starts[0].header.begins
        is_known = all(row.items for row in rows)
        return is_known and self._is_over(path, at) and begins <= min((row.epoch, 0) for row in rows)

    def _without_tail(self, path: str, at: Pass) -> list[Row]:
        """The rows of a pass without its last step, in which ranks may repeat items to make it whole."""
        rows = self.rows[path][at]
        if "shards" in self.starts[-1].header.loaders[path] or max(row.rank for row in rows) == 0:
            # Ranks of a stream, and one alone, repeat nothing.
            return rows
        last = max((row.start, row.epoch, row.batch) for row in rows)
        return [row for row in rows if (row.start, row.epoch, row.batch) != last or not self._is_over(path, at)]

    def _twice(self, path: str, at: Pass, rows: list[Row]) -> Iterator[Finding]:
        seen: dict[int, set[Any]] = defaultdict(set)
        for row in rows:
            seen[row.start].update(row.items)
        for later in sorted(seen):
            for earlier in sorted(start for start in seen if start < later):
                if both := sorted(seen[earlier] & seen[later]):
                    starts = self.starts[earlier].header.start, self.starts[later].header.start
                    yield Finding("twice", at[0], path, starts, tuple(both[:_NAMED]), len(both),
                        f"of {_pass(path, at)}, {_of(len(both), 'item')} that start {starts[0]} had trained on "
                        f"came again in start {starts[1]}: {_named(both)}.",
                    )  # fmt: skip

    def _never(self, path: str, at: Pass, length: int) -> Iterator[Finding]:
        seen = np.zeros(length, dtype=bool)
        rows = [*self.rows[path][at], *self._skipped_in(path, at)]
        seen[[item for row in rows for item in row.items if isinstance(item, int) and item < length]] = True
        left = np.flatnonzero(~seen).tolist()
        if left:
            numbers = sorted({row.start for row in self.rows[path][at]})
            yield Finding("never", at[0], path, tuple(self.starts[number].header.start for number in numbers),
                tuple(left[:_NAMED]), len(left),
                f"of {_pass(path, at)}, {_of(len(left), 'item')} of {length:,} never came: {_named(left)}.",
            )  # fmt: skip


def read_ledger(folder: str | Path, *, start: str | None = None) -> Ledger:
    """Read a ledger, and stitch its starts together by the checkpoints that they were resumed from.

    Args:
        folder: The folder that was given as ``StatefulDataCallback(ledger=...)``.
        start: The name of the start whose weights are asked about; by default the latest.

    Raises:
        FileNotFoundError: The folder has no files of a ledger, or none of this start.
        DamagedStateError: A record cannot be read, or ranks of a start have different headers.
        StateVersionError: A file is of another version of the ledger.
    """
    files = dict(files_of(Path(folder)))
    unreadable = {name: [path for path in paths if not _has_header(path)] for name, paths in files.items()}
    unreadable = {name: paths for name, paths in unreadable.items() if paths}
    files = {name: [path for path in paths if path not in unreadable.get(name, ())] for name, paths in files.items()}
    files = {name: paths for name, paths in files.items() if paths}
    if not files or (start is not None and start not in files):
        what = f"no start {start!r}, but {', '.join(files)}" if files else "no files of a ledger"
        raise FileNotFoundError(f"{folder} has {what}. Pass the folder given as StatefulDataCallback(ledger=...).")
    name, chain = start or max(files), list[Start]()
    while name in files:
        chain.insert(0, _start_of(files.pop(name)))
        resumed = chain[0].header.resumed
        name = "" if resumed is None else resumed["start"]
    used = {one.header.start for one in chain}
    unreadable = {name: paths for name, paths in unreadable.items() if name in used or name not in files}
    return Ledger(chain, others=sorted(files), unreadable=unreadable)


def _start_of(paths: list[Path]) -> Start:
    read = [read_file(path) for path in paths]
    header = min((header for header, _, _ in read), key=lambda header: header.rank)
    if any(other.num_replicas != header.num_replicas for other, _, _ in read):
        raise DamagedStateError(f"The files in {paths[0].parent} are of different numbers of ranks.")
    return Start(
        header,
        batches={header.rank: batches for header, batches, _ in read},
        headers={header.rank: header for header, _, _ in read},
        damaged={header.rank: left for header, _, left in read if left},
    )


def _damaged(start: Start) -> Iterator[Finding]:
    for rank, left in start.damaged.items():
        # Behind the checkpoint of a later start nothing is missed.
        if start.kept[rank] == len(start.batches[rank]):
            text = f"the last {left:,} bytes of rank {rank} of start {start.header.start} are no whole record."
            yield Finding("damaged", -1, "", (start.header.start,), (rank,), left, text)


def _out_of_order(start: Start) -> Iterator[Finding]:
    for rank in start.batches:
        due = start.header.begins
        for batch in start.kept_batches(rank):
            begins_epoch = batch.epoch > due[0] and not batch.batch
            if batch.parts and batch[:2] != due and not begins_epoch:
                text = (
                    f"rank {rank} of start {start.header.start} trained on batch {batch.batch} of epoch {batch.epoch} "
                    f"where batch {due[1]} of epoch {due[0]} was due."
                )
                yield Finding("order", batch.epoch, "", (start.header.start,), (due, batch[:2]), 1, text)
            due = _after(batch)


def _missing(start: Start) -> Iterator[Finding]:
    """Batches before the checkpoint of a later start that are in no file."""
    until = start.until
    for rank in range(start.header.num_replicas):
        if rank not in start.batches:
            text = f"of start {start.header.start}, on {start.header.num_replicas} ranks, rank {rank} has no file."
            yield Finding("missing", start.header.begins[0], "", (start.header.start,), (rank,), 1, text)
            continue
        batches = start.kept_batches(rank)
        reached = _after(batches[-1]) if batches else start.header.begins
        if until is None or reached >= until:
            continue
        text = (
            f"start {start.header.start} wrote a checkpoint before batch {until[1]} of epoch {until[0]}, but the file "
            f"of its rank {rank} ends before batch {reached[1]} of epoch {reached[0]}."
        )
        yield Finding("missing", until[0], "", (start.header.start,), (reached, until), 1, text)


def _has_header(path: Path) -> bool:
    try:
        read_header(path)
    except DamagedStateError:
        return False
    return True


def _repeats(rows: Iterable[Row]) -> bool:
    """Whether a start has given an item twice in an epoch, without any stop."""
    by_start: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        by_start[row.start] += row.items
    return any(len(set(items)) < len(items) for items in by_start.values())


def _after(batch: Batch) -> tuple[int, int]:
    """Epoch and number of the batch that comes next."""
    return (batch.epoch, batch.batch + 1) if batch.parts else (batch.epoch + 1, 0)


def _count(batches: list[Batch]) -> int:
    return sum(bool(batch.parts) for batch in batches)


def _pass(path: str, at: Pass) -> str:
    again = f", pass {at[1] + 1}" if at[1] else ""
    return f"epoch {at[0]}{again} of loader {path!r}" if path else f"epoch {at[0]}{again}"


def _of(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _named(items: list[Any]) -> str:
    return ", ".join(map(str, items[:_NAMED])) + (", ..." if len(items) > _NAMED else "")
