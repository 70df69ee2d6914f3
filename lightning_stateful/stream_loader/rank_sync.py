"""Synchronizes ranks that read a stream, without collectives: where each stands, and before which step all stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError, PositionError, RankMismatchError, StreamError
from lightning_stateful.stream_loader.rank_store import RankStore, foreign
from lightning_stateful.stream_loader.state_text import StateEncoder, StateText, decode, digest_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Plain JSON data: the node states of a rank's worker slots.
Record = list[Any]

_RANKS_A_STEP = 64  # Up to so many ranks publish at every step; of more, at every second, third, ... step.
_LEAD = 2  # Groups of steps that a rank may have sent beyond that of the step it asks about.
_COUNTERS = 4  # A group is complete before the third after it is begun, so that counters take turns.
_SPARE = 8  # Groups that are kept beside those asked for: others may be ahead of rank 0.
_NOTICE = 2**40  # In a counter, above the number of ranks: some rank has ended or failed.
_MOST_NAMED = 8  # Ranks in an error.


class _Group(NamedTuple):
    """A rank's records of one group of steps, as JSON; the last is that of its end, if the rank ends within it."""

    ends: bool
    lines: list[str]

    def line(self, index: int) -> str | None:
        return self.lines[index] if index < len(self.lines) - self.ends else None


class RankSync:
    """Synchronizes the ranks that read a stream: a step is one batch of each rank, counted from 0.

    Each rank publishes a record for each of its batches before it is handed it. A step *happens* if all ranks have one
    for it, so all stop before the same step, and where each stands is known on all. Records are published a step before
    they are needed, so ranks hardly ever wait; while they do, signals are handled.

    Steps are sent in groups, the same on all ranks: for each, a message under the rank's key, an addition to a counter,
    and a look at it. All ranks construct theirs in the same order for each label; the constructor does not wait. The
    first step of a process group waits until all its ranks have met, under a name that no earlier group had.

    Args:
        store: The process group's, the same object at each call; a connection of its own is made to it.
        topology: The ranks, and this one.
        label: Keeps apart streams that are read at the same time.
        keep: Steps back for which records can be had.
        timeout: Seconds to wait for others, at each step anew; on ranks other than 0 up to five more.
        group_size: Steps of a group; None for one up to 127 ranks, two up to 191, and so on.
        describe: Says in words what a rank was doing at a record of its, for errors.
        terms: What has to be equal on all ranks beside these arguments, as plain JSON data by name.

    Attributes:
        run: Name of this run of reading, the same on all ranks and never used before; empty until the ranks have met.
        stop: The step before which all stop, once :meth:`happens` has found it; until then None.

    Raises:
        ConfigurationError: An argument is out of range.
        StreamError: From all methods but the constructor: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        *,
        label: str,
        keep: int = 64,
        timeout: float = 1800.0,
        group_size: int | None = None,
        describe: Callable[[int, Record], str] = lambda rank, record: f"stood at {json.dumps(record)[:200]}",
        terms: Mapping[str, Any] | None = None,
    ) -> None:
        usual = max(topology.num_replicas // _RANKS_A_STEP, 1)
        size, keep = usual if group_size is None else as_int("group_size", group_size), as_int("keep", keep)
        for name, value in (("keep", keep), ("group_size", size)):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}.")
        self.topology, self.timeout, self.run = topology, timeout, ""
        self.stop: int | None = None
        self._describe, self._size, self._num_kept = describe, size, -(-keep // size) + _SPARE
        terms = {"num_replicas": topology.num_replicas, "keep": keep, "group_size": size, **(terms or {})}
        self._terms: dict[str, Any] = json.loads(json.dumps(terms))
        self._store = RankStore(store, topology)
        self._label, self._number = label, self._store.next_run(label)
        self._encoders: list[StateEncoder] = []
        self._records: list[tuple[str, dict[str, str]]] = []  # Not yet sent: JSON, and large parts by digest.
        self._stored: dict[str, int] = {}  # Large parts in the store, by digest: the last group that has it.
        self._published = self._next = 0  # Steps.
        self._sent = self._complete = 0  # Groups.
        self._end: int | None = None
        self._failed = self._noticed = False

    def horizon(self, step: int) -> int:
        """Below which step this rank has to have published its records before it asks about ``step``."""
        return (self._group(step + 1) + 1) * self._size

    def publish(self, record: Sequence[Any]) -> None:
        """Publish that this rank has the next batch, and where its worker slots stand after it; does not wait.

        Args:
            record: The node state of each worker slot, or its :class:`~.state_text.StateText` with all large parts.

        Raises:
            ConfigurationError: The rank has ended.
        """
        if self._end is not None:
            raise ConfigurationError(f"Rank {self.topology.rank} has ended at step {self._end} and has no next batch.")
        self._append(record)
        self._published += 1
        self._send()

    def publish_end(self, record: Sequence[Any]) -> None:
        """Publish that this rank has no more batches, and where its worker slots stand now that it knows."""
        if self._end is None:
            self._append(record)
            self._end = self._published
            self._send()

    def publish_failure(self, text: str) -> None:
        """Publish that this rank's stream raised: no step happens that it has no record for, and nobody waits for one.

        Waits half a minute at most, for ranks that have not met yet. Raises nothing where the store does not answer:
        there is an error to raise already.
        """
        if self._failed:
            return
        with suppress(StreamError):
            self._begin(min(self.timeout, 30.0))
            self._send()
            self._failed = True
            # Records that are too far ahead to be sent are given up.
            is_due = self._sent <= self._group(self._next) + _LEAD
            step = self._published if is_due else self._sent * self._size
            self._post(step, "failed", f"The stream of rank {self.topology.rank} broke off before step {step}: {text}")
            if is_due and (self._end is None or self._group(self._end) >= self._sent):
                self._send_group(ends=False)

    def happens(self, step: int) -> bool:
        """Whether ``step`` happens; the same on all ranks. Waits until that is known.

        A step that all ranks have published happens even if one has failed since.

        Raises:
            ConfigurationError: This rank has not published its records up to :meth:`horizon`.
            RankMismatchError: The terms differ between ranks; on all ranks.
            StreamError: A rank broke off before ``step``, or did not publish it in time; on all ranks.
        """
        self._check(step)
        self._begin(self.timeout)
        for group in range(self._group(self._next), self._group(step) + 1):
            if self._is_known(step):
                break
            self._next = max(self._next, group * self._size)
            self._send()
            self._wait_for(group, step)
        if self.stop is not None and self.stop <= step:
            return False
        if not self._next:
            # All ranks have left the runs before.
            self._store.delete_earlier_runs()
        self._next = max(self._next, step + 1)
        return True

    def records_at(self, step: int) -> list[Record]:
        """The record of every rank after all steps below ``step``, rank 0 first; at once, on this rank alone.

        Raises:
            PositionError: ``step`` is 0, nothing is known of it yet, or no longer.
            StreamError: What is in the store is not of this run.
        """
        return [record for record in self._decoded(self._lines_at(step)) if record is not None]

    def final_records(self, step: int) -> list[Record | None]:
        """:meth:`records_at` for all ranks, which all call it: rank 0 reads the records and passes them on.

        Of ranks that ended just there it gives the record of their end; before step 0, None for the others.

        Raises:
            PositionError: On rank 0: nothing is known of the step yet, or no longer.
            StreamError: What is in the store is not of this run, or rank 0 did not pass on the records.
        """
        key = f"{self.run}/final/{step}"
        if not self.topology.rank:
            self._pass_on(key, step)

        def find() -> list[str | None] | None:
            found: list[str | None] | None = self._store.read(key)
            if found is None:
                self._read_stop(step)
            return found

        passed_on = self._store.wait(find, self.timeout)
        if passed_on is None:
            raise StreamError(f"Rank 0 did not pass on the records at step {step} in {self.timeout:g} s: see its log.")
        return self._decoded(passed_on)

    def _group(self, step: int) -> int:
        return step // self._size

    def _is_known(self, step: int) -> bool:
        return step < self._next or (self.stop is not None and self.stop <= step)

    def _check(self, step: int) -> None:
        has_ended = self._failed or self._end is not None
        if step < 0 or (not self._is_known(step) and not has_ended and self._published < self.horizon(step)):
            raise ConfigurationError(
                f"Rank {self.topology.rank} has to publish its records below step {self.horizon(step)}, or its end, "
                f"before it asks about step {step}; it has published those below step {self._published}."
            )

    def _begin(self, timeout: float) -> None:
        """Name the run, and compare the terms with those of the rank that began first."""
        if self.run:
            return
        self.run = self._store.begin_run(self._label, self._number, timeout)
        own = [self.topology.rank, self._terms]
        rank, terms = self._store.settle(f"{self.run}/terms", own, lambda standing: False)
        if terms != self._terms:
            names = [name for name in {**terms, **self._terms} if terms.get(name) != self._terms.get(name)]
            sides = ", ".join(f"{name} is {terms.get(name)!r} and {self._terms.get(name)!r}" for name in names)
            text = f"The ranks disagree about their stream: on ranks {rank} and {self.topology.rank}, {sides}."
            self._post(0, "mismatch", text)

    def _append(self, record: Sequence[Any]) -> None:
        while len(self._encoders) < len(record):
            self._encoders.append(StateEncoder())
        texts = [
            state if isinstance(state, StateText) else encoder.encode(state)
            for state, encoder in zip(record, self._encoders, strict=False)
        ]
        self._records.append((f"[{','.join(state.text for state in texts)}]", {}))
        for state in texts:
            self._records[-1][1].update(state.large)

    def _send(self) -> None:
        """Send groups that are full, or in which this rank ends, unless that is too early."""
        if not self.run and self._store.has_met:
            self._begin(self.timeout)
        while self.run and self._sent <= self._group(self._next) + _LEAD and not self._failed:
            ends = self._end is not None and self._group(self._end) == self._sent
            if not ends and len(self._records) < self._size:
                break
            if ends:
                self._settle_stop(self._published, "ended", "")
            self._send_group(ends)

    def _send_group(self, ends: bool) -> None:
        group, records = self._sent, self._records[: self._size]
        del self._records[: self._size]
        for _, large in records:
            for digest, text in large.items():
                self._put_large(digest, text, group)
        header = json.dumps([self.run, group, ends])
        self._store.put(
            self._record_key(self.topology.rank, group), "\n".join([header, *(line for line, _ in records)])
        )
        self._drop_large(group)
        self._sent = group + 1
        self._count(group, self._store.add(self._counter(group), 1 + ends * _NOTICE))

    def _put_large(self, digest: str, text: str, group: int) -> None:
        """Store a large part, once for as long as it is in a record that is kept."""
        if digest not in self._stored:
            self._store.put(self._large_key(self.topology.rank, digest), text)
        self._stored[digest] = group

    def _drop_large(self, group: int) -> None:
        for digest in [digest for digest, last in self._stored.items() if last <= group - self._num_kept]:
            self._store.delete(self._large_key(self.topology.rank, digest))
            del self._stored[digest]

    def _counter(self, group: int) -> str:
        return f"{self.run}/sent/{group % _COUNTERS}"

    def _record_key(self, rank: int, group: int) -> str:
        return f"{self.run}/records/{rank}/{group % self._num_kept}"

    def _large_key(self, rank: int, digest: str) -> str:
        return f"{self.run}/large/{rank}/{digest}"

    def _count(self, group: int, counter: int) -> None:
        # It has counted all ranks once for each of its groups that are complete.
        if counter % _NOTICE >= self.topology.num_replicas * (group // _COUNTERS + 1):
            self._complete = max(self._complete, group + 1)
        self._noticed = self._noticed or counter >= _NOTICE

    def _wait_for(self, group: int, step: int) -> None:
        """Wait until ``group`` is complete; raise if ``step`` cannot be reached."""

        def find() -> bool | None:
            if self._complete <= group:
                self._count(group, self._store.number(self._counter(group)))
            if self._noticed:
                self._read_stop(step)
            return True if self._complete > group or self._is_known(step) else None

        # The lowest rank that waits finds out who is late, and tells the others.
        patience = self.timeout + min(self.topology.rank * 0.05, 5.0)
        while self._store.wait(find, patience) is None:
            self._blame(group, step)

    def _read_stop(self, step: int) -> None:
        """Raise if a rank has failed up to ``step``; note where all stop, once nobody can end earlier."""
        found = self._store.read(f"{self.run}/stop")
        if found is None:
            return
        at, kind, text = found
        if kind == "ended":
            self.stop = at if self._group(at) < self._complete else None
        elif at <= step:
            raise (RankMismatchError if kind == "mismatch" else StreamError)(text)

    def _settle_stop(self, step: int, kind: str, text: str) -> None:
        """The earliest stop stands; a failure rather than an end."""
        own = [step, kind, text[:4000]]
        self._store.settle(f"{self.run}/stop", own, lambda old: (step, kind == "ended") < (old[0], old[1] == "ended"))

    def _post(self, step: int, kind: str, text: str) -> None:
        self._settle_stop(step, kind, text)
        for number in range(_COUNTERS):
            self._store.add(self._counter(number), _NOTICE)
        self._noticed = True

    def _blame(self, group: int, step: int) -> None:
        """Name the ranks that have kept ``group`` waiting, here and on all ranks that wait."""
        ranks = range(self.topology.num_replicas)
        late = [rank for rank, sent in zip(ranks, self._groups(group, ranks), strict=True) if sent is None]
        if not late:
            return
        named = ""
        for rank, sent in zip(late, self._groups(group - 1, late[:_MOST_NAMED]), strict=False):
            (record,) = self._decoded([sent.lines[-1] if sent else None], [rank])
            named += f"\n  - rank {rank}: {'nothing yet' if record is None else self._describe(rank, record)}"
        text = (
            f"Step {step} was waited for in vain for {self.timeout:g} s: {len(late)} of {len(ranks)} ranks have not "
            f"published their batch, among them{named}\nA slow shard, or a dead process? Look at their logs; if they "
            "are only slow, raise the timeout."
        )
        self._post(step, "failed", text)
        raise StreamError(text)

    def _pass_on(self, key: str, step: int) -> None:
        """Write the records of all ranks at ``step`` for all."""
        ranks = range(self.topology.num_replicas)
        try:
            lines: list[str | None] = [*self._lines_at(step)] if step else [None for _ in ranks]
            for rank, sent in enumerate(self._groups(self._group(step), ranks)):
                if sent is not None and sent.ends and len(sent.lines) == step % self._size + 1:
                    lines[rank] = sent.lines[-1]
        except (PositionError, StreamError) as error:
            self._post(step, "failed", f"Rank 0 could not read the records at step {step}: {error}")
            raise
        self._store.put(key, json.dumps(lines))

    def _lines_at(self, step: int) -> list[str]:
        """The record of every rank after all steps below ``step``, as JSON."""
        group, ranks = self._group(step - 1), range(self.topology.num_replicas)
        if step < 1 or group >= self._complete:
            known = f"after step 0 and up to step {self._complete * self._size}"
            raise PositionError(f"Where ranks stand is known {known}, not at step {step}; ask if it happens first.")
        found = self._groups(group, ranks)
        if None in found:
            rank = found.index(None)
            raise PositionError(
                f"Where rank {rank} stood at step {step} is not kept any more: it has published later steps since. "
                "Raise `keep`, or ask for records of later steps."
            )
        lines = [sent and sent.line((step - 1) % self._size) for sent in found]
        if short := [rank for rank, line in enumerate(lines) if line is None]:
            raise PositionError(f"Ranks {short[:_MOST_NAMED]} end before step {step}, and so do all.")
        return [line for line in lines if line is not None]

    def _groups(self, group: int, ranks: Sequence[int]) -> list[_Group | None]:
        """What these ranks have sent as a group of steps; None where that is not there, or not any more."""
        found: list[_Group | None] = []
        for rank, text in zip(ranks, self._store.texts([self._record_key(rank, group) for rank in ranks]), strict=True):
            header, *lines = (text or "null").split("\n")
            try:
                run, number, ends = json.loads(header) or (self.run, -1, False)
            except (ValueError, TypeError):
                run = None
            if run != self.run:
                raise foreign(f"where rank {rank} leaves records of run {self.run} there is {header[:80]}")
            found.append(_Group(ends, lines) if number == group else None)
        return found

    def _decoded(self, lines: Sequence[str | None], ranks: Sequence[int] | None = None) -> list[Record | None]:
        """Records of all ranks, or of some, with their large parts."""
        parsed = [json.loads(line or "null") for line in lines]
        keys = {
            (rank, digest): self._large_key(rank, digest)
            for rank, record in zip(ranks or range(len(lines)), parsed, strict=True)
            for _, *places in record or ()
            for _, digest in places
        }
        large: dict[str, str] = {}
        for (rank, digest), text in zip(keys, self._store.texts(list(keys.values())), strict=True):
            if text is None or digest_of(text) != digest:
                raise foreign(f"a large state of rank {rank} of run {self.run} is {str(text)[:80]}")
            large[digest] = text
        return [None if record is None else [decode(state, large) for state in record] for record in parsed]
