"""What a model was trained on over all starts of a run, and what of that was trained on twice or never."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_stateful.errors import DamagedStateError
from lightning_stateful.ledger.files import Batch, FileHeader, Part, files_of, read_file

_SHOWN = 5


class Trained(NamedTuple):
    """A batch that the weights of the latest start have been trained on.

    Attributes:
        start: The start that trained on it.
        rank: Its rank.
        batch: The batch.
    """

    start: str
    rank: int
    batch: Batch


@dataclass(frozen=True)
class Finding:
    """Something that an uninterrupted run would not have done.

    Attributes:
        kind: ``"twice"``: items of an epoch that two starts trained on; ``"never"``: items of an epoch that is over, and
            that no start trained on; ``"missing"``: batches that are in no file; ``"order"``: batches of a file that do
            not follow one another; ``"damaged"``: a file whose end cannot be read.
        epoch: The epoch of the loader; -1 for what concerns no epoch.
        path: The path of the loader.
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
        kept: By rank, how many of them the latest weights have been trained on. Those behind the checkpoint that a later
            start was resumed from are lost with their weights.
        damaged: By rank, bytes at the end of the file that are no whole record.
    """

    header: FileHeader
    batches: dict[int, list[Batch]]
    kept: dict[int, int] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)

    @property
    def num_lost(self) -> int:
        """Batches, of all ranks, that were trained on in vain."""
        return sum(
            sum(bool(batch.parts) for batch in batches[self.kept.get(rank, len(batches)) :])
            for rank, batches in self.batches.items()
        )


class Ledger:
    """What the latest weights were trained on, stitched together from all starts that led to them.

    Args:
        starts: The starts, the earliest first, each resumed from a checkpoint of the one before.

    Attributes:
        starts: The same.
        begins: Epoch and batch at which the first of them begins.
    """

    def __init__(self, starts: list[Start]) -> None:
        self.starts = starts
        self.begins = starts[0].header.begins
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            resumed = None if following is None else following.header.resumed
            until = None if resumed is None else (resumed["epoch"], resumed["batch"])
            for rank, batches in start.batches.items():
                before = [until is None or _place(batch) < until for batch in batches]
                start.kept[rank] = before.index(False) if False in before else len(batches)

    def trained(self) -> Iterator[Trained]:
        """All batches that the latest weights were trained on: start by start, and in it rank by rank."""
        for start in self.starts:
            for rank, batches in sorted(start.batches.items()):
                for batch in batches[: start.kept[rank]]:
                    if batch.parts:
                        yield Trained(start.header.start, rank, batch)

    def items(self, epoch: int, path: str = "") -> Counter[Any]:
        """How often each item was trained on in an epoch of a loader, over all ranks."""
        found: Counter[Any] = Counter()
        for _, part in self._parts(path):
            if part.epoch == epoch and part.items is not None:
                found.update(_listed(part))
        return found

    def findings(self) -> list[Finding]:
        """What an uninterrupted run would not have done; empty where all is right.

        Of a loader that gives items of an epoch twice by itself, as a sampler that draws with replacement, items that two
        starts trained on prove nothing: they are not reported.
        """
        found = [finding for start in self.starts for finding in _damaged(start)]
        found += [finding for start in self.starts for finding in _out_of_order(start)]
        found += self._missing()
        for path, of_loader in self.starts[-1].header.loaders.items():
            found += self._repeated(path, of_loader.get("length"))
        return found

    def summary(self) -> dict[str, Any]:
        """The starts, epochs and findings as plain data."""
        return {
            "starts": [
                {
                    **asdict(start.header),
                    "batches": sum(start.kept.values()) - self._num_ends(start),
                    "lost": start.num_lost,
                }
                for start in self.starts
            ],
            "epochs": self._epochs(),
            "findings": [asdict(finding) for finding in self.findings()],
        }

    def __str__(self) -> str:
        lines = []
        for number, start in enumerate(self.starts, 1):
            header = start.header
            kept = sum(start.kept.values()) - self._num_ends(start)
            resumed = "from the beginning" if header.resumed is None else f"resumed from {header.resumed['start']}"
            lines.append(
                f"start {number} ({header.start}, {_of(header.num_replicas, 'rank')}): {resumed} at epoch "
                f"{header.begins[0]}, batch {header.begins[1]}; {_of(kept, 'batch')} kept, {start.num_lost} lost "
                "with their weights"
            )
        for row in self._epochs():
            of = f" of loader {row['path']!r}" if row["path"] else ""
            length = "" if row["length"] is None else f" of {row['length']:,}"
            over = "over" if row["over"] else "running"
            lines.append(
                f"epoch {row['epoch']}{of} ({over}): {row['items']:,} items, {row['distinct']:,}{length} distinct"
            )
        findings = self.findings()
        lines += [f"{finding.kind}: {finding.text}" for finding in findings]
        return "\n".join(lines if findings else [*lines, "Nothing was trained on twice, and nothing was left out."])

    def _epochs(self) -> list[dict[str, Any]]:
        rows = []
        for path, of_loader in self.starts[-1].header.loaders.items():
            epochs = sorted({part.epoch for _, part in self._parts(path)})
            for epoch in epochs:
                numbers = [part.number for _, part in self._parts(path) if part.epoch == epoch]
                row: dict[str, Any] = {"epoch": epoch, "path": path, "items": sum(numbers)}
                row |= {"distinct": len(self.items(epoch, path)), "length": of_loader.get("length")}
                rows.append({**row, "over": self._is_over(epoch, path)})
        return rows

    def _parts(self, path: str) -> Iterator[tuple[Trained, Part]]:
        for trained in self.trained():
            for part in trained.batch.parts:
                if part.path == path:
                    yield trained, part

    def _is_over(self, epoch: int, path: str) -> bool:
        """Whether an epoch of a loader is over: a later one has begun, or the Trainer's has ended and is the same."""
        if any(part.epoch > epoch for _, part in self._parts(path)):
            return True
        ended = {
            batch.epoch
            for start in self.starts
            for rank, batches in start.batches.items()
            for batch in batches[: start.kept[rank]]
            if not batch.parts
        }
        return epoch in ended and all(
            trained.batch.epoch == part.epoch for trained, part in self._parts(path) if part.epoch == epoch
        )

    def _repeated(self, path: str, length: int | None) -> Iterator[Finding]:
        """Items that two starts trained on in one epoch, and items that none did."""
        by_epoch: dict[int, dict[str, Counter[Any]]] = defaultdict(lambda: defaultdict(Counter))
        unknown: set[int] = set()
        for trained, part in self._parts(path):
            if part.items is None:
                unknown.add(part.epoch)
            by_epoch[part.epoch][trained.start].update(_listed(part))
        of = f" of loader {path!r}" if path else ""
        repeats = self._repeats_by_itself(path)
        for epoch, by_start in sorted(by_epoch.items()):
            starts = list(by_start)
            for number, later in enumerate(starts if not repeats else []):
                for earlier in starts[:number]:
                    both = sorted(by_start[earlier].keys() & by_start[later].keys())
                    if both:
                        text = (
                            f"in epoch {epoch}{of}, {_of(len(both), 'item')} that start {earlier} had trained on came "
                            f"again in start {later}: {_few(both)}."
                        )
                        yield Finding("twice", epoch, path, (earlier, later), tuple(both[:_SHOWN]), len(both), text)
            begun_before = (epoch, 0) < self.begins
            if length is None or epoch in unknown or repeats or begun_before or not self._is_over(epoch, path):
                continue
            seen = np.zeros(length, dtype=bool)
            for counts in by_start.values():
                seen[[item for item in counts if isinstance(item, int) and item < length]] = True
            left = np.flatnonzero(~seen)
            if len(left):
                text = (
                    f"in epoch {epoch}{of}, {_of(len(left), 'item')} of {length:,} never came: {_few(left.tolist())}."
                )
                yield Finding("never", epoch, path, tuple(starts), tuple(left[:_SHOWN].tolist()), len(left), text)

    def _repeats_by_itself(self, path: str) -> bool:
        """Whether a loader gives items of an epoch twice without any stop: more than the tail of an epoch accounts for."""
        counts: dict[tuple[str, int], Counter[Any]] = defaultdict(Counter)
        for trained, part in self._parts(path):
            counts[trained.start, part.epoch].update(_listed(part))
        for (start, epoch), found in counts.items():
            more = sum(found.values()) - len(found)
            step = sum(
                part.number
                for one, part in self._parts(path)
                if (one.start, one.batch.batch, part.epoch) == (start, 0, epoch)
            )
            if more > max(step, 1):
                return True
        return False

    def _missing(self) -> Iterator[Finding]:
        """Batches between two starts, or ranks, that are in no file."""
        for start, following in zip(self.starts, self.starts[1:], strict=False):
            resumed = following.header.resumed
            if resumed is None:
                continue
            until = resumed["epoch"], resumed["batch"]
            for rank in range(start.header.num_replicas):
                batches = start.batches.get(rank, [])[: start.kept.get(rank, 0)]
                reached = _after(batches[-1]) if batches else start.header.begins
                if reached != until and not (reached[0] + 1 == until[0] and until[1] == 0 and batches):
                    text = (
                        f"start {start.header.start} wrote a checkpoint before batch {until[1]} of epoch {until[0]}, but "
                        f"the file of its rank {rank} ends before batch {reached[1]} of epoch {reached[0]}."
                    )
                    yield Finding("missing", until[0], "", (start.header.start,), (reached, until), 1, text)

    def _num_ends(self, start: Start) -> int:
        return sum(not batch.parts for rank, batches in start.batches.items() for batch in batches[: start.kept[rank]])


def read_ledger(folder: str | Path, *, start: str | None = None) -> Ledger:
    """Read a ledger, and stitch its starts together by the checkpoints that they were resumed from.

    Args:
        folder: The folder that was given as ``StatefulDataCallback(ledger=...)``.
        start: The name of the start whose weights are asked about; by default the latest.

    Raises:
        FileNotFoundError: The folder has no files of a ledger, or none of this start.
        DamagedStateError: A file has no readable header.
    """
    folder = Path(folder)
    files = files_of(folder)
    if not files or (start is not None and start not in files):
        what = "no files of a ledger" if start is None else f"no start {start!r}; it has {', '.join(files) or 'none'}"
        raise FileNotFoundError(f"{folder} has {what}. Pass the folder given as StatefulDataCallback(ledger=...).")
    name: str | None = start or max(files)
    chain: list[Start] = []
    while name is not None and name in files:
        found = _start_of(files.pop(name))
        chain.insert(0, found)
        name = None if found.header.resumed is None else found.header.resumed["start"]
    return Ledger(chain)


def _start_of(paths: list[Path]) -> Start:
    read = [read_file(path) for path in paths]
    headers = [header for header, _, _ in read]
    if len({header.num_replicas for header in headers}) > 1:
        raise DamagedStateError(f"The files in {paths[0].parent} are of different numbers of ranks.")
    return Start(
        min(headers, key=lambda header: header.rank),
        {header.rank: batches for header, batches, _ in read},
        damaged={header.rank: left for header, _, left in read if left},
    )


def _damaged(start: Start) -> Iterator[Finding]:
    for rank, left in start.damaged.items():
        # Behind the checkpoint that was gone on from nothing is missed.
        if start.kept[rank] < len(start.batches[rank]):
            continue
        text = f"the last {left} bytes of the file of rank {rank} of start {start.header.start} are no whole record."
        yield Finding("damaged", -1, "", (start.header.start,), (rank,), left, text)


def _out_of_order(start: Start) -> Iterator[Finding]:
    """Batches of a file of which one does not follow the one before."""
    for rank, batches in start.batches.items():
        reached = start.header.begins
        for batch in batches[: start.kept[rank]]:
            place = _place(batch)
            begins_epoch = place[1] == 0 and place[0] > reached[0]
            if batch.parts and place != reached and not begins_epoch:
                text = (
                    f"rank {rank} of start {start.header.start} trained on batch {place[1]} of epoch {place[0]} where "
                    f"batch {reached[1]} of epoch {reached[0]} was to come."
                )
                yield Finding("order", place[0], "", (start.header.start,), (reached, place), 1, text)
            reached = _after(batch)


def _place(batch: Batch) -> tuple[int, int]:
    """Epoch and number; of an epoch's end those of the batch that would follow its last."""
    return batch.epoch, batch.batch


def _after(batch: Batch) -> tuple[int, int]:
    return (batch.epoch, batch.batch + 1) if batch.parts else (batch.epoch + 1, 0)


def _listed(part: Part) -> list[Any]:
    if part.items is None:
        return []
    return list(part.items) if isinstance(part.items, tuple) else part.items.tolist()


def _of(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _few(items: list[Any]) -> str:
    return ", ".join(map(str, items[:_SHOWN])) + (", ..." if len(items) > _SHOWN else "")
