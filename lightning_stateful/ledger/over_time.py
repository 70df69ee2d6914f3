"""Figures of a ledger by step: which data came when, shares of a mixture, padding, and time that ranks waited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.ledger.files import Batch, FileHeader, Part
from lightning_stateful.ledger.history import Ledger, Start

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Steps are put together to so many points, each of as many steps or more.
_MOST_POINTS, _FEWEST_STEPS = 96, 20
_BITS_OF_PLACE = 40


@dataclass(frozen=True, eq=False)
class Coverage:
    """Indices of a loader, each at the step of the run at which it was trained on.

    Attributes:
        steps: The step, counted over all starts, those that were lost among them; int64 of shape ``(samples,)``.
        items: The index; of the same shape.
        starts: The number of the start; of the same shape.
        is_lost: Whether the weights were lost, because a later start went on before that step; of the same shape.
        is_again: Whether an earlier start had trained on it in the same epoch, which is a finding; of the same shape.
        begins: The step at which each start begins.
        epochs: The steps at which epochs begin, and their numbers.
        of_shards: Whether the indices count the samples of a stream that were trained on, shard by shard.
    """

    steps: Integers
    items: Integers
    starts: Integers
    is_lost: NDArray[np.bool_]
    is_again: NDArray[np.bool_]
    begins: list[int]
    epochs: list[tuple[int, int]]
    of_shards: bool = False


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares of the sources of a mixture over the steps that the latest weights were trained on.

    Attributes:
        names: The sources.
        unit: What the shares are shares of: ``"batches"``, ``"samples"`` or ``"tokens"``.
        steps: The step in the middle of each point; of shape ``(points,)``.
        got: Shares that were trained on around it; of shape ``(points, sources)``, NaN where nothing is known.
        asked: Shares that were asked for; of the same shape, NaN where that is not known.
        samples: Samples of each source in all.
        got_in_all: Shares of all steps; of shape ``(sources,)``.
        asked_in_all: Shares that were asked for, on average over these steps; of the same shape.
    """

    names: tuple[str, ...]
    unit: str
    steps: Floats
    got: Floats
    asked: Floats
    samples: list[int]
    got_in_all: Floats
    asked_in_all: Floats


@dataclass(frozen=True, eq=False)
class Padding:
    """The padding of the batches that the latest weights were trained on.

    Attributes:
        steps: The step in the middle of each point; of shape ``(points,)``.
        share: The share of padding in the tokens of the batches around it, 0 to 1; of the same shape.
        tokens: Tokens of all batches, without padding.
        padded: The same with padding.
    """

    steps: Floats
    share: Floats
    tokens: int
    padded: int

    @property
    def share_in_all(self) -> float:
        """The share of padding in all tokens."""
        return 1 - self.tokens / self.padded


class RankWaits(NamedTuple):
    """Time that a rank waited in a start, but for its first batch.

    Attributes:
        start: The number of the start.
        rank: The rank.
        host: The name of its host.
        first: Seconds that its first batch took to come.
        seconds: Seconds from its first step to its last.
        own: Seconds of them in which its training loop waited for its own batch.
        others: Seconds from its steps' beginnings to those of the last rank, of each step no more than it took.
        steps: Steps.
        last: Steps that it began as the last rank.
        beyond: Steps that the last rank began when this one was beyond them already. Ranks that wait for each other in
            each step have none, by clocks that agree.
    """

    start: int
    rank: int
    host: str
    first: float
    seconds: float
    own: float
    others: float
    steps: int
    last: int
    beyond: int


@dataclass(frozen=True, eq=False)
class Waiting:
    """Time that ranks waited, over the steps of all starts.

    Attributes:
        steps: The step in the middle of each point, counted over all starts; of shape ``(points,)``.
        own: The share of the ranks' time, 0 to 1, in which they waited for their own batch; of the same shape.
        others: The share in which they had begun a step that the last rank had not; of the same shape.
        begins: The step at which each start begins.
        ranks: What each rank waited, start by start.
        num_hosts: Hosts whose clocks are compared, the most of a start.
    """

    steps: Floats
    own: Floats
    others: Floats
    begins: list[int]
    ranks: list[RankWaits]
    num_hosts: int


def coverage_of(ledger: Ledger, path: str = "") -> Coverage | None:
    """Find which index came at which step; None where items of a loader are no indices."""
    found: list[tuple[Integers, int, int, bool, NDArray[np.bool_]]] = []
    epochs: dict[int, int] = {}
    # By pass, of epochs that have such findings: what earlier starts trained on.
    seen: dict[tuple[int, int], set[int]] = {}
    twice = {(one.epoch, one.starts[1]) for one in ledger.findings() if one.kind == "twice" and one.path == path}
    with_findings = {epoch for epoch, _ in twice}
    begins = _begins(ledger)
    for number, (start, begin) in enumerate(zip(ledger.starts, begins, strict=True)):
        new: dict[tuple[int, int], set[int]] = {}
        for rank, batches in sorted(start.batches.items()):
            kept = start.kept[rank]
            for step, place, batch, part in _parts_over(batches, path, begin):
                items, key, is_lost = _indices(part, start.header), (part.epoch, part.cycle), place >= kept
                is_again = np.zeros(len(items), dtype=bool)
                if not is_lost and part.epoch in with_findings:
                    new.setdefault(key, set()).update(items.tolist())
                    if (part.epoch, start.header.start) in twice:
                        is_again = np.array([item in seen.get(key, ()) for item in items.tolist()], dtype=bool)
                epochs.setdefault(batch.epoch, step)
                found.append((items, step, number, is_lost, is_again))
        for key, of_start in new.items():
            seen.setdefault(key, set()).update(of_start)
    if not found:
        return None
    sizes = [len(one[0]) for one in found]
    steps, starts, is_lost_of = (np.repeat([one[column] for one in found], sizes) for column in (1, 2, 3))
    items, again = (np.concatenate([one[column] for one in found]) for column in (0, 4))
    of_shards = bool(ledger.starts[-1].header.shards_of(path))
    if of_shards:
        items = np.unique(items, return_inverse=True)[1]
    at = sorted((step, of) for of, step in epochs.items())
    return Coverage(steps, items, starts, is_lost_of, again, begins, at, of_shards)


def shares_of(ledger: Ledger, path: str = "") -> Shares | None:
    """Find the shares of a mixture's sources, and those that were asked for; None for other loaders."""
    described = enumerate(start.header.loaders.get(path, {}).get("mixture") for start in ledger.starts)
    mixtures: dict[int, dict[str, Any]] = {number: mixture for number, mixture in described if mixture is not None}
    steps = [one for one in _kept(ledger) if one[0] in mixtures]
    if not steps:
        return None
    names = tuple(dict.fromkeys(name for mixture in mixtures.values() for name in mixture["names"]))
    unit, header = mixtures[max(mixtures)]["unit"], ledger.starts[0].header
    amounts, asked = np.zeros((len(steps), len(names))), np.full((len(steps), len(names)), np.nan)
    samples = np.zeros(len(names), dtype=np.int64)
    is_whole = header.resumed is None and header.begins == (0, 0) and len(mixtures) == len(ledger.starts)
    for step, (number, at, batches) in enumerate(steps):
        mixture = mixtures[number]
        columns = [names.index(name) for name in mixture["names"]]
        for batch in batches:
            counts = _samples_of(_part_of(batch, path), mixture)
            samples[columns] += counts
            amounts[step, columns] += _amounts(counts, mixture, unit)
        if (asked_here := _asked_at(mixture, at, step if is_whole else None)) is not None:
            asked[step] = 0
            asked[step, columns] = asked_here
    if not samples.any():
        return None
    edges = _edges(len(steps))
    in_all = amounts.sum(axis=0) / amounts.sum()
    averages = _together(asked, edges) / np.diff(edges)[:, None], asked.mean(axis=0)
    got = _together(amounts, edges)
    with np.errstate(invalid="ignore"):
        got = got / got.sum(axis=1, keepdims=True)
    return Shares(names, unit, _middles(edges), got, averages[0], samples.tolist(), in_all, averages[1])


def padding_of(ledger: Ledger, path: str = "") -> Padding | None:
    """Find the padding of a loader's batches; None where none of them says it."""
    parts = [[part for batch in batches if (part := _part_of(batch, path))] for _, _, batches in _kept(ledger)]
    counts = np.array(
        [[sum(part.tokens for part in of_step), sum(part.padded for part in of_step)] for of_step in parts]
    )
    if not len(counts) or not counts[:, 1].any():
        return None
    edges = _edges(len(counts))
    tokens, padded = _together(counts, edges).T
    with np.errstate(invalid="ignore"):
        share = 1 - tokens / padded
    return Padding(_middles(edges), share, int(counts[:, 0].sum()), int(counts[:, 1].sum()))


def waiting_of(ledger: Ledger) -> Waiting | None:
    """Find how long ranks waited: for their own batch, and for the last rank; None where no times are recorded.

    Steps that are not in the files of all ranks are left out. The clocks of hosts are taken to agree.
    """
    points: list[tuple[Floats, ...]] = []
    ranks: list[RankWaits] = []
    num_hosts, begins = 0, _begins(ledger)
    for number, (start, begin) in enumerate(zip(ledger.starts, begins, strict=True)):
        if (times := _times_of(start)) is None:
            continue
        headers, steps, began, waited = times
        behind = began.max(axis=1, keepdims=True) - began
        # The time of a step goes from the beginning of the one before, in which ranks waited for the last one.
        took, own = np.diff(began, axis=0), waited[1:]
        others = np.clip(behind[:-1], 0, np.maximum(took - own, 0))
        beyond = (behind[:-1] > took).sum(axis=0).tolist()
        for column, header in enumerate(headers):
            seconds, own_of, others_of = (float(values[:, column].sum()) for values in (took, own, others))
            is_last = int((behind[:, column] == 0).sum())
            who = number, header.rank, header.host, float(waited[0, column])
            ranks.append(RankWaits(*who, seconds, own_of, others_of, len(began), is_last, beyond[column]))
        num_hosts = max(num_hosts, len({header.host for header in headers}))
        edges = _edges(len(took))
        time = np.maximum(_together(took.sum(axis=1), edges), 1e-9)
        shares = (np.clip(_together(values.sum(axis=1), edges) / time, 0, 1) for values in (own, others))
        middles = _together(begin + steps[1:], edges) / np.diff(edges)
        points.append((middles, *shares))
    if not points:
        return None
    at, own_of_all, others_of_all = (np.concatenate(column) for column in zip(*points, strict=True))
    return Waiting(at, own_of_all, others_of_all, begins, ranks, num_hosts)


def in_numbers(ledger: Ledger) -> dict[str, Any]:
    """Sums of all steps as plain data: ``mixture`` and ``padding`` by the paths of loaders, and ``waiting``."""
    mixture, padding = {}, {}
    for path in ledger.rows:
        if shares := shares_of(ledger, path):
            columns = shares.samples, shares.got_in_all.tolist(), shares.asked_in_all.tolist()
            mixture[path] = {
                "unit": shares.unit,
                "sources": {
                    name: {"samples": samples, "share": got, "asked": None if np.isnan(asked) else asked}
                    for name, samples, got, asked in zip(shares.names, *columns, strict=True)
                },
            }
        if found := padding_of(ledger, path):
            padding[path] = {"tokens": found.tokens, "padded": found.padded, "share": found.share_in_all}
    waiting = waiting_of(ledger)
    ranks = [] if waiting is None else [one._asdict() for one in waiting.ranks]
    return {"mixture": mixture, "padding": padding, "waiting": ranks}


def _times_of(start: Start) -> tuple[list[FileHeader], Integers, Floats, Floats] | None:
    """Times of the steps that all ranks of a start have in their files; None for fewer than two.

    Returns:
        The ranks' headers; the steps, counted from the beginning of the start; and of shape ``(steps, ranks)`` when
        each began, in seconds by one clock, and how long its batch took to come.
    """
    by_rank = [
        {batch[:2]: (step, batch) for step, (_, batch) in enumerate(_trained(batches)) if batch.began is not None}
        for _, batches in sorted(start.batches.items())
    ]
    common = sorted(set.intersection(*map(set, by_rank))) if by_rank else []
    if len(common) < 2:
        return None
    headers = [start.headers[rank] for rank in sorted(start.batches)]
    rows = [[of_rank[at][1] for of_rank in by_rank] for at in common]
    began = np.array([[batch.began or 0.0 for batch in row] for row in rows])
    began += np.array([header.time - headers[0].time for header in headers])
    waited = np.array([[batch.waited for batch in row] for row in rows])
    return headers, np.array([by_rank[0][at][0] for at in common]), began, waited


def _begins(ledger: Ledger) -> list[int]:
    """The step of the run at which each start begins."""
    lengths = [
        max((sum(bool(batch.parts) for batch in batches) for batches in start.batches.values()), default=0)
        for start in ledger.starts
    ]
    return [0, *np.cumsum(lengths).tolist()][: len(lengths)]


def _trained(batches: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
    """Batches, without the ends of epochs, and the place of each in the file."""
    return ((place, batch) for place, batch in enumerate(batches) if batch.parts)


def _kept(ledger: Ledger) -> Iterator[tuple[int, tuple[int, int], list[Batch]]]:
    """Steps that the latest weights were trained on: number of the start, epoch and batch, and the ranks' batches."""
    for number, start in enumerate(ledger.starts):
        steps: dict[tuple[int, int], list[Batch]] = {}
        for rank in sorted(start.batches):
            for _, batch in _trained(start.kept_batches(rank)):
                steps.setdefault((batch.epoch, batch.batch), []).append(batch)
        for at in sorted(steps):
            yield number, at, steps[at]


def _parts_over(batches: Sequence[Batch], path: str, begin: int) -> Iterator[tuple[int, int, Batch, Part]]:
    """Parts with numbers of a loader's batches: the step, counted from ``begin``, the place in the file, the batch."""
    for step, (place, batch) in enumerate(_trained(batches), begin):
        for part in batch.parts:
            if part.path == path and not part.skipped and isinstance(part.items, np.ndarray):
                yield step, place, batch, part


def _indices(part: Part, header: FileHeader) -> Integers:
    """The items of a part; of a stream's samples, numbers in the order of shards and of places in them."""
    items = np.asarray(part.items, dtype=np.int64)
    shards = header.shards_of(part.path)
    total = shards if isinstance(shards, int) else len(shards)
    return items if not total else (items % total << _BITS_OF_PLACE) + items // total


def _part_of(batch: Batch, path: str) -> Part | None:
    return next((part for part in batch.parts if part.path == path), None)


def _samples_of(part: Part | None, mixture: Mapping[str, Any]) -> Integers:
    """Samples of each source in a batch, as it says or as its indices do."""
    num_sources = len(mixture["names"])
    counts = np.zeros(num_sources, dtype=np.int64)
    if part is None:
        return counts
    if part.sources:
        numbers, samples = zip(*part.sources, strict=True)
        counts[list(numbers)] = samples
    elif "lengths" in mixture and isinstance(part.items, np.ndarray):
        bounds = np.cumsum(mixture["lengths"])
        found = np.searchsorted(bounds, part.items.astype(np.int64) % bounds[-1], side="right")
        counts = np.bincount(found, minlength=num_sources)
    return counts


def _amounts(counts: Integers, mixture: Mapping[str, Any], unit: str) -> Floats:
    """The amount that samples of each source make in a unit."""
    if unit == "batches":
        return counts / max(int(counts.sum()), 1)
    return counts * np.array(mixture.get("tokens", 1.0)) if unit == "tokens" else counts.astype(np.float64)


def _asked_at(mixture: Mapping[str, Any], at: tuple[int, int], counted: int | None) -> Floats | None:
    """The shares that were asked for at a batch; None where that is not known.

    Args:
        mixture: What the header says.
        at: Epoch and batch.
        counted: Steps of training before, if the ledger has all of them.
    """
    points, step = mixture["at"], counted
    if "steps" in mixture:
        step = at[0] * mixture["steps"] + at[1]
    if len(points) == 1:
        step = 0
    if step is None:
        return None
    place = int(np.searchsorted(points, step, side="right")) - 1
    shares = np.array(mixture["shares"][place], dtype=np.float64)
    if mixture["between"] == "linear" and place + 1 < len(points):
        part = (step - points[place]) / (points[place + 1] - points[place])
        shares = (1 - part) * shares + part * np.array(mixture["shares"][place + 1])
    shares *= np.array(mixture.get("draw", 1.0))
    shares /= shares.sum()
    return shares


def _edges(num_steps: int) -> Integers:
    """The first step of each point and, last, the number of steps."""
    number = min(max(num_steps // _FEWEST_STEPS, 1), _MOST_POINTS)
    return np.arange(number + 1) * num_steps // number


def _together(values: NDArray[Any], edges: Integers) -> NDArray[Any]:
    """The sums of values between edges."""
    return np.add.reduceat(values, edges[:-1], axis=0)


def _middles(edges: Integers) -> Floats:
    middles: Floats = (edges[:-1] + edges[1:] - 1) / 2
    return middles
