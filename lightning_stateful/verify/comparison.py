"""Compares runs batch by batch on the same ranks, and sample by sample on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stateful.verify.records import Batch, Record, some_of

Rows = Sequence[Sequence[Batch]]  # by rank


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first batch that was not as in the run without a stop.

    Attributes:
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 1.
        rank: The rank it was given to.
        what: The difference in words.
        expected: The batch of the run without a stop, in words.
        came: The batch that came in its place, in words.
    """

    epoch: int
    batch: int
    rank: int
    what: str
    expected: str
    came: str

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, batch {self.batch}, rank {self.rank}: {self.what}"
        return f"{where}\n  expected  {self.expected}\n  came      {self.came}"


def first_divergence(expected: Rows, came: Rows) -> Divergence | None:
    """The first batch in which runs on the same ranks differ, over all that is in them; None if none does.

    Args:
        expected: The batches of each rank in a run without a stop.
        came: The batches of each rank in the run that is compared; as many.
    """
    for position in range(max(map(len, [*expected, *came]), default=0)):
        for rank, (ours, theirs) in enumerate(zip(expected, came, strict=True)):
            one = ours[position] if position < len(ours) else None
            other = theirs[position] if position < len(theirs) else None
            what = _difference(one, other)
            if what:
                at = one or other
                said = {"expected": str(one or "nothing more"), "came": str(other or "nothing more")}
                return Divergence(epoch=at.epoch, batch=at.number, rank=rank, what=what, **said)  # type: ignore[union-attr]
    return None


def _difference(expected: Batch | None, came: Batch | None) -> str:
    if expected is None or came is None:
        return "" if expected is came else "the run is longer" if expected is None else "the run has ended"
    if (expected.epoch, expected.number) != (came.epoch, came.number):
        return f"the run has come to epoch {came.epoch}, batch {came.number}"
    if expected.content == came.content:
        return ""
    if any(part.items is None for part in (*expected.parts, *came.parts)):
        same = sorted(map(str, expected.names)) == sorted(map(str, came.names))
        return "the same samples in another order" if same else "other content"
    if expected.names == came.names:
        return f"the same samples with other values ({_others(expected, came)})"
    return "other samples" if set(expected.names) != set(came.names) else "the same samples in another order"


def _others(expected: Batch, came: Batch) -> str:
    pairs = [
        (name, one == other)
        for ours, theirs in zip(expected.parts, came.parts, strict=True)
        for name, one, other in zip(ours.names, ours.digests, theirs.digests, strict=False)
    ]
    others = [item for (_, item), is_same in pairs if not is_same]
    return f"{len(others)} of {len(pairs)}: {some_of(others, 6)}"


@dataclass(frozen=True)
class Tally:
    """The result of counting the samples of an epoch on other ranks or workers.

    Attributes:
        fault: A sample that came too often or never; None if none did.
        compared: Whether samples could be told apart.
    """

    fault: Divergence | None
    compared: bool = True


def count_samples(epoch: int, before: Rows, after: Rows, whole: Rows, there: Rows, *, spare: int | None) -> Tally:
    """Count the samples of an epoch that was begun on some ranks and ended on others.

    Every sample is to come as often as in an epoch without a stop, here or there. Where some are left for less than a
    step, ranks repeat as few as they need.

    Args:
        epoch: The epoch.
        before: The batches of each rank before the stop.
        after: The batches of each rank after it.
        whole: The batches of the epoch on the ranks before, without a stop.
        there: The batches of the epoch on the ranks after, without a stop.
        spare: So many samples may be left to the next epoch; None where epochs are cut, so that none needs to come.
    """
    due, other, came = _counted(whole), _counted(there), _counted([*before, *after])
    if (due & other).total() * 2 < min(due.total(), other.total()):
        return Tally(None, compared=False)
    most = due | other
    surplus = {name: number for name, number in came.items() if number > max(most[name], 1)}
    usual = Counter(most.values()).most_common(1)
    is_once = not usual or usual[0][0] == 1
    least = min((came[name] for name in most), default=0)
    if is_once and sum(came[name] - max(most[name], 1) for name in surplus) < max(len(after), 1):
        surplus = {}
    elif not is_once:
        # Of data that begin again within an epoch, some are one pass ahead.
        surplus = {name: number for name, number in surplus.items() if number > least + 1}
    if surplus:
        return Tally(_fault(epoch, after, surplus, most))
    missing = due - came
    if spare is not None and missing.total() > spare and due == other:
        name = next(iter(missing))
        some = f"{missing.total()} samples never came, for example {_named(name)}"
        number = max((len(rows) for rows in after), default=0)
        said = {"expected": f"{_named(name)} once", "came": "never"}
        return Tally(Divergence(epoch=epoch, batch=number, rank=0, what=some, **said))
    return Tally(None)


def _counted(rows: Rows) -> Counter[Any]:
    return Counter(name for batches in rows for batch in batches for name in batch.names)


def _fault(epoch: int, after: Rows, surplus: dict[Any, int], most: Counter[Any]) -> Divergence:
    for number in range(max(map(len, after), default=0)):
        for rank, batches in enumerate(after):
            for name in batches[number].names if number < len(batches) else ():
                if name in surplus:
                    what = f"{len(surplus)} samples came too often, first {_named(name)}"
                    times = max(most[name], 1)
                    expected = f"{_named(name)} {'once' if times == 1 else f'{times} times'}"
                    at = {"epoch": epoch, "batch": batches[number].number, "rank": rank}
                    return Divergence(**at, what=what, expected=expected, came=f"{surplus[name]} times")
    name = next(iter(surplus))
    what = f"{len(surplus)} samples came too often, for example {_named(name)}"
    return Divergence(epoch=epoch, batch=1, rank=0, what=what, expected="once", came=f"{surplus[name]} times")


def _named(name: Any) -> str:
    path, item = name
    return f"sample {item}" + (f" of {path}" if path else "")


def step_size(records: Sequence[Record]) -> int:
    """The samples that all ranks have in the largest step of a run."""
    steps = zip(*(record.batches for record in records), strict=False)
    return max((sum(len(batch.names) for batch in step) for step in steps), default=0)


def rows_of(records: Sequence[Record], first: int = 0, last: int | None = None) -> list[list[Batch]]:
    """The batches of each rank, or some of them."""
    return [record.batches[first:last] for record in records]


def of_epoch(records: Sequence[Record], epoch: int) -> list[list[Batch]]:
    """The batches of an epoch on each rank."""
    return [record.of_epoch(epoch) for record in records]


def form_of(whole: Sequence[Record], start: int, divergence: Divergence, came: Rows) -> str:
    """The usual fault that makes a resumed run go on like this, as samplers and loaders are checked for it.

    Args:
        whole: The run without a stop.
        start: Batches that were trained on before the resumed run.
        divergence: The first difference.
        came: The batches of each rank of the resumed run.
    """
    from lightning_stateful.audit.compare import explain

    def item(batch: Batch) -> Any:
        return {"names": batch.names, "content": batch.content}

    epochs = range(1 + max((batch.epoch for record in whole for batch in record.batches), default=0))
    passes = [[[item(batch) for batch in record.of_epoch(epoch)] for epoch in epochs] for record in whole]
    first = whole[divergence.rank].batches[start] if start < len(whole[divergence.rank].batches) else None
    begin = (first.epoch, first.number - 1) if first else (divergence.epoch, divergence.batch - 1)
    rest = [
        item(batch)
        for batch in came[divergence.rank]
        if batch.epoch == divergence.epoch and batch.number >= divergence.batch
    ]
    place = (divergence.epoch, divergence.batch - 1)
    if divergence.epoch >= len(passes[0]):
        return ""
    return explain(passes, divergence.rank, begin, place, rest, lambda one: one["names"])
