"""Checks that every sample of an epoch comes once, whatever the numbers of ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stateful.audit.compare import END, Key, difference
from lightning_stateful.audit.runner import ContractError, Divergence, Recorder, Recording, Stop

Table = Sequence[Sequence[Any]]  # of items, by rank and step

_UNEVEN = "The tail of an epoch must be split, padded or dropped for all ranks alike."
_NOT_LOADED = "The epoch begins anew on other ranks: the position is not loaded there."
_OWN_COUNT = (
    "The state holds the rank's own count of items: it must hold how much all ranks were served together. Or the "
    "factory does not pass num_replicas and rank on, so that every rank is served everything."
)
_IGNORED = "The factory does not pass num_replicas and rank on. Check a single rank of what is not dealt out."
_DEALT = "What is left must be dealt to the ranks anew, from an order that does not depend on their number."


def check_even(recordings: Sequence[Recording]) -> None:
    """Raise if ranks would wait for each other for ever."""
    for rank, recording in enumerate(recordings):
        for epoch, (expected, got) in enumerate(zip(recordings[0].lengths, recording.lengths, strict=False)):
            if expected != got:
                what = f"rank {rank} has {got} items and rank 0 has {expected}; a collective would hang"
                raise ContractError(
                    Divergence(law="even", what=what, epoch=epoch, rank=rank, expected=expected, got=got, cause=_UNEVEN)
                )


def check_apart(recordings: Sequence[Recording]) -> None:
    """Raise if all ranks are given the same items, and these differ among each other."""
    first = recordings[0].passes[0]
    are_several = len(recordings) > 1 and any(difference(first[0], item) for item in first[1:])
    if are_several and not any(difference(first, one.passes[0]) for one in recordings[1:]):
        what = f"all {len(recordings)} ranks are given the same items, so each of them trains on all of the data"
        raise ContractError(
            Divergence(law="rank-free", what=what, epoch=0, expected="other items", got=first[0], cause=_IGNORED)
        )


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The samples that an epoch has to serve.

    Attributes:
        number: Which epoch.
        due: Its samples, in the order of one rank.
        largest: Samples of the largest item.
        drop_last: Whether less than a step's samples may be left out.
        key: Which samples an item holds.
    """

    number: int
    due: Sequence[Hashable]
    largest: int
    drop_last: bool
    key: Key

    def names(self, tables: Sequence[Table]) -> list[Hashable]:
        """The samples that were served."""
        return [name for table in tables for items in table for item in items for name in self.key(item)]

    def may_end(self, tables: Sequence[Table], num_replicas: int) -> bool:
        """Whether what was not served yet is less than a step, and may be left out."""
        missing = Counter(self.due) - Counter(self.names(tables))
        return self.drop_last and missing.total() < self.largest * num_replicas

    def check(self, tables: Sequence[Table], num_replicas: int, stop: int) -> None:
        """Raise if tables, one after the other, the last on so many ranks, serve a sample twice or never."""
        found = next(self._faults(tables, num_replicas), None)
        if found:
            found = {"law": "rank-free", "cause": self._explain(tables), **found}
            raise ContractError(Divergence(epoch=self.number, stop=stop, **found))

    def _faults(self, tables: Sequence[Table], num_replicas: int) -> Iterator[dict[str, Any]]:
        due, served = Counter(self.due), Counter[Hashable]()
        for table in tables:
            lengths = [len(items) for items in table]
            if len(set(lengths)) > 1:
                what = f"the {len(table)} ranks were given {lengths} items"
                yield {"law": "even", "what": what, "expected": lengths[0], "got": lengths, "cause": _UNEVEN}
            for step, items in enumerate(zip(*table, strict=True)):
                surplus = []
                for rank, name in [(rank, name) for rank, item in enumerate(items) for name in self.key(item)]:
                    served[name] += 1
                    # With drop_last the epoch on one rank may have left out what comes now.
                    if served[name] > max(due[name], self.drop_last):
                        surplus.append((rank, name))
                # Ranks left without a sample repeat one, in the very last step.
                if surplus and (due - served or self.drop_last or len(surplus) >= len(table)):
                    rank, name = surplus[0]
                    what = f"sample {name!r} was served once too often, in step {step} on {len(table)} ranks"
                    yield {"what": what, "expected": due[name], "got": served[name], "step": step, "rank": rank}
        missing = due - served
        if missing and not self.may_end(tables, num_replicas):
            name = next(iter(missing))
            what = f"{missing.total()} samples were never served on {num_replicas} ranks, for example {name!r}"
            if not self.drop_last:
                what += " (if the last incomplete step is meant to be left out, pass drop_last=True)"
            yield {"what": what, "expected": due[name], "got": served[name]}

    def _explain(self, tables: Sequence[Table]) -> str:
        """The usual fault behind the last table, if there is one."""
        served, first = len(self.names(tables[:-1])), self.names(tables[-1:])[:1]
        begin = self.due.index(first[0]) if first and first[0] in self.due else served
        if len(tables) < 2 or begin == served:
            return _DEALT
        if begin == 0:
            return _NOT_LOADED
        return _OWN_COUNT if begin * len(tables[-2]) == served * len(tables[-1]) else _DEALT


def check_resize(
    recorder: Recorder,
    recordings: Sequence[Recording],
    stops: Sequence[Stop],
    resize: Sequence[int],
    *,
    key: Key,
    drop_last: bool,
) -> None:
    """Resume states on other numbers of ranks, and raise if samples come twice or never."""
    num_epochs = len(recordings[0].passes)
    alone = recorder.observe(1, num_epochs)[0].passes
    due = [[name for item in items for name in key(item)] for items in alone]
    sizes = {len(key(item)) for items in alone for item in items}
    epochs: list[Epoch] = []
    for num_replicas in resize:
        # One epoch more, because the resumed run may have gone on to it.
        others = recorder.observe(num_replicas, num_epochs + 1)
        check_even(others)
        sizes |= {len(key(item)) for item in others[0].passes[0]}
        largest = max(sizes, default=0)
        epochs = [
            Epoch(number=number, due=names, largest=largest, drop_last=drop_last, key=key)
            for number, names in enumerate(due)
        ]
        for stop in stops:
            epoch = stop.place[0]
            # An epoch without a step says nothing on where the next one begins.
            if epoch < num_epochs and recordings[0].lengths[epoch]:
                _resume_elsewhere(recorder, epochs[epoch], recordings, stop, others)
    _check_history(recorder, epochs[0], (len(recordings), *resize))


def _resume_elsewhere(
    recorder: Recorder, epoch: Epoch, recordings: Sequence[Recording], stop: Stop, others: Sequence[Recording]
) -> None:
    runs = [recorder.load(stop, recorder.run(len(others), rank)) for rank in range(len(others))]
    step = stop.place[1]
    before = [recording.passes[epoch.number][:step] for recording in recordings]
    after = [run.take(len(epoch.due) + 1) for run in runs]
    following = [other.passes[epoch.number + 1] for other in others]
    if step and epoch.drop_last and not difference(following, after):
        # Less than a step was left, so that the resumed run began with the next epoch at once.
        for run in runs:
            run.place = (run.place[0] + 1, 0)
        after = [[] for _ in runs]
    epoch.check([before, after], len(runs), stop.num_items)
    for rank, run in enumerate(runs):
        start = run.place
        followed = run.follow(others[rank].from_place(start))
        recorder.demand_equal("rank-free", others, rank, start, followed, stop=stop.num_items, key=epoch.key)


def _check_history(recorder: Recorder, epoch: Epoch, numbers: Sequence[int]) -> None:
    """One step on every number of ranks in turn, and the rest of the epoch on the last one."""
    state: Any = None
    tables: list[Table] = []
    for number, num_replicas in enumerate(numbers):
        if epoch.may_end(tables, num_replicas):
            break
        runs = [recorder.run(num_replicas, rank) for rank in range(num_replicas)]
        if number:
            recorder.num_resumes += len([run.load(copy.deepcopy(state), (0, number)) for run in runs])
        limit = 1 if number < len(numbers) - 1 else len(epoch.due) + 1
        tables.append([run.take(limit) for run in runs])
        state = runs[0].state()
        if runs[0].next() is END:
            break
    epoch.check(tables, num_replicas, len(tables) - 1)
