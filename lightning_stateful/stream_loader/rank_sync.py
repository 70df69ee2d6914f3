"""Synchronizes ranks that read a stream, without collectives: where each stands, and before which step all stop."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError, PositionError, RankMismatchError, StreamError
from lightning_stateful.stream_loader.rank_store import (
    RankStore,
    StateEncoder,
    StateText,
    decode,
    digest_of,
    foreign,
    in_pieces,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The node states of a rank's worker slots: plain JSON data.
Record = list[Any]

RANKS_A_STEP = 64  # Up to so many ranks send each step by itself; more send groups of two, three, ... steps.
_COUNTERS = 4  # A group is complete before the third after it is begun, so that counters take turns.
_SPARE = 8  # Groups that are kept beside those asked for: others may be ahead of rank 0.
_KEPT_RUNS = 4  # This one, and some before until it has got as far as records are kept.
_NOTICE = 2**40  # In a counter, above the number of ranks: some rank has ended or failed.
_MOST_NAMED = 8  # Ranks in an error.
_ALONE = 16  # Up to so many ranks, each gathers the records of all for itself: that is quicker than to ask for a copy.
_PATIENCE = 2.0  # Seconds to wait for a copy that another rank gathers, before this rank gathers for itself.
_COPIES = 4  # Steps of which there may be a copy at the same time.
_LONGEST_FAREWELL = 30.0  # Seconds that a rank that has failed waits for ranks that have not come yet.


class _Group(NamedTuple):
    """A rank's records of one group of steps, as JSON; if it ends within the group, the last is that of its end."""

    has_end: bool
    lines: list[str]


class RankSync:
    """Synchronizes the ranks that read a stream: a step is one batch of each rank, counted from 0.

    Each rank publishes a record for each of its batches before it is handed it. A step *happens* if all ranks have one
    for it, so all stop before the same step, and where each stands is known. Records are published a step before they
    are needed, so ranks hardly ever wait; while they do, signals are handled. Where ``reads_ahead`` is False, they are
    published as they are needed, so that no rank reads further than it is asked to.

    Records are sent in groups of steps: for each, a message under the rank's key, an addition to a counter, and a look
    at it. Large parts of records are stored beside them under their digest, once, until no kept record has them.

    The constructor does not wait; the first step of a process group waits until all its ranks have come. Ranks have to
    read runs with the same label in the same order, and to ask about steps one after the other.

    Where several processes share a data-parallel rank, each column of them, with one process of every rank, is in step
    apart from the others: they read the same. All begin at the same place, and an error is raised in all columns.

    Args:
        store: The process group's, the same object for all runs; a connection of its own is made to it.
        topology: The data-parallel ranks, and this one.
        label: Keeps apart streams that are read at the same time.
        keep: For how many steps back records can be had.
        timeout: Seconds to wait for others, at each step anew; on ranks other than 0 up to five more.
        group_size: Steps of a group; None for one up to 127 ranks, two up to 191, and so on.
        reads_ahead: Whether to read a step ahead; groups of several steps are read ahead in any case.
        describe: Says in words what a rank was doing at a record, for errors.
        world: The processes, and this one; None where each is a data-parallel rank.
        terms: What has to be equal on all ranks, beside these arguments: plain JSON data by name.

    Attributes:
        run: Name of this run of reading, on all ranks of this column and never used before; empty until the ranks have
            met.
        stop: The step before which all stop, once :meth:`happens` has found it; until then None.

    Raises:
        ConfigurationError: An argument is out of range; later, ranks have different numbers of processes.
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
        reads_ahead: bool = True,
        describe: Callable[[int, Record], str] = lambda rank, record: f"stood at {json.dumps(record)[:200]}",
        world: Topology | None = None,
        terms: Mapping[str, Any] | None = None,
    ) -> None:
        usual = max((world or topology).num_replicas // RANKS_A_STEP, 1)
        self._size = usual if group_size is None else as_int("group_size", group_size, least=1)
        self._reads_ahead = reads_ahead or self._size > 1
        self._keep = as_int("keep", keep, least=1)
        self.topology, self.timeout, self.run, self._all_columns = topology, timeout, "", ""
        self.stop: int | None = None
        self._store, self._alive = RankStore.of(store, topology, world), store
        self._label, self._describe = label, describe
        own = {"num_replicas": topology.num_replicas, "keep": self._keep, "group_size": self._size}
        self._terms: dict[str, Any] = json.loads(json.dumps({**own, **(terms or {})}))
        self._num_kept = -(-self._keep // self._size) + _SPARE
        self._encoders: defaultdict[int, StateEncoder] = defaultdict(StateEncoder)  # By worker.
        self._records: list[StateText] = []  # Not yet sent.
        self._stored: dict[str, int] = {}  # Large parts in the store, by digest: the last group that has it.
        self._published = self._next = 0  # Steps: with a record of this rank, and to be asked about.
        self._sent = self._complete = 0  # Groups: of this rank, and of all.
        self._end: int | None = None
        self._has_failed = self._is_noticed = False

    def horizon(self, step: int) -> int:
        """Below which step this rank has to have published its records, and no others, to ask about ``step``."""
        # The first batch is read alone, as by torch: Lightning begins a pass that it gives up behind that.
        is_alone = not self._reads_ahead or (step == 0 and self._size == 1)
        return step + 1 if is_alone else ((step + 1) // self._size + 1) * self._size

    def publish(self, record: Sequence[Any], *, is_end: bool = False) -> None:
        """Publish that this rank has the next batch, and where it stands after it; does not wait.

        Args:
            record: The node state of each worker slot, or its ``StateText`` with all large parts.
            is_end: Whether it has no more batches, and stands there now that it knows; nothing may follow.
        """
        if is_end:
            self._end = self._published
        else:
            self._published += 1
        texts = [
            state if isinstance(state, StateText) else self._encoders[worker].encode(state)
            for worker, state in enumerate(record)
        ]
        large = {digest: piece for text in texts for digest, piece in text.large.items()}
        self._records.append(StateText(f"[{','.join(text.text for text in texts)}]", large))
        if self.run:
            self._send()
        elif self._store.has_met:
            self._begin(self.timeout)

    def publish_failure(self, text: str) -> None:
        """Publish that this rank's stream raised: no step happens that it has not sent, and nobody waits for one.

        Waits half a minute at most, for ranks that have not come yet. Raises nothing where the store does not answer:
        there is an error to raise already.
        """
        if self._has_failed:
            return
        with suppress(StreamError):
            self._begin(min(self.timeout, _LONGEST_FAREWELL))
            self._has_failed, step = True, self._sent * self._size
            text = f"The stream of rank {self.topology.rank} broke off before step {step}: {text}"
            self._post_stop(step, "failed", text)

    def happens(self, step: int) -> bool:
        """Whether ``step`` happens; the same on all ranks. Waits until that is known.

        A step that all ranks have sent happens even if one has failed since.

        Raises:
            ConfigurationError: This rank has not published its records up to :meth:`horizon`, or not asked about the
                step before.
            RankMismatchError: The terms differ between ranks; on all ranks.
            StreamError: A rank broke off before ``step``, or did not publish it in time; on all ranks.
        """
        is_over = self._has_failed or self._end is not None
        if not 0 <= step <= self._next or not (is_over or self._published >= self.horizon(step)):
            raise ConfigurationError(
                f"Rank {self.topology.rank} has to publish its records below step {self.horizon(step)}, or its end, "
                f"and to ask about each step in turn, before it asks about step {step}; it has published those below "
                f"step {self._published}, and step {self._next} is next."
            )
        self._begin(self.timeout)
        if step == self._next:
            self._wait_for(step)
            if self.stop is not None and self.stop <= step:
                return False
            self._next += 1
            # All ranks have left the runs before; where those ended may be asked for a little longer.
            if step in (0, self._keep):
                self._store.delete_runs(self._label, but=1 if step else _KEPT_RUNS)
        return True

    def records_at(self, step: int) -> list[Record]:
        """The record of every rank after all steps below ``step``, rank 0 first; no other rank needs to ask.

        Of many ranks the first that asks gathers the records and leaves a copy for the others, which wait for it for
        two seconds at most, and then gather for themselves.

        Raises:
            PositionError: ``step`` is 0, nothing is known of it yet, or no longer.
            StreamError: What is in the store is not of this run.
        """
        self._refuse_unknown(step)
        text = None if self.topology.num_replicas <= _ALONE else self._copied(step)
        text = text or f"[{','.join(self._lines_at(step))}]"
        return [record for record in self._decoded(json.loads(text)) if record is not None]

    def final_records(self, step: int) -> list[Record | None]:
        """:meth:`records_at` for all ranks, which all call it: rank 0 reads the records and passes them on.

        Of ranks that ended just there it gives the record of their end; before step 0, None for the others.

        Raises:
            PositionError: On rank 0: nothing is known of the step yet, or no longer.
            StreamError: What is in the store is not of this run, or rank 0 did not pass on the records.
        """
        key = f"{self.run}/final/{step}"
        if not self.topology.rank:
            if step:
                self._refuse_unknown(step)
            lines = self._lines_at(step) if step else ["null"] * self.topology.num_replicas
            for rank, sent in enumerate(self._groups(step // self._size)):
                if sent is not None and sent.has_end and len(sent.lines) == step % self._size + 1:
                    lines[rank] = sent.lines[-1]
            self._store.put(key, json.dumps(self._put_pieces(key, f"[{','.join(lines)}]")))
        digests = self._store.wait(lambda: self._store.text(key), self.timeout)
        if digests is None:
            raise StreamError(f"Rank 0 did not pass on the records at step {step} in {self.timeout:g} s: see its log.")
        text = self._joined(key, json.loads(digests))
        if text is None:
            raise foreign(f"where {key} should be the records at step {step} there is something else")
        return self._decoded(json.loads(text))

    def _begin(self, timeout: float) -> None:
        """Name the run, compare the terms with those of the rank that began first, and send what was published."""
        if self.run:
            return
        self._all_columns = self._store.begin_run(self._label, timeout)
        self.run = f"{self._all_columns}/{self._store.column}"
        rank, terms = self._store.settle(f"{self._all_columns}/terms", [self.topology.rank, self._terms])
        if terms != self._terms:
            names = [name for name in {**terms, **self._terms} if terms.get(name) != self._terms.get(name)]
            sides = ", ".join(f"{name} is {terms.get(name)!r} and {self._terms.get(name)!r}" for name in names)
            text = f"The ranks disagree about their stream: on ranks {rank} and {self.topology.rank}, {sides}."
            self._post_stop(0, "mismatch", text)
        self._send()

    def _send(self) -> None:
        """Send groups that are full, or in which this rank ends."""
        while self._records and not self._has_failed:
            has_end = self._end is not None and self._end // self._size == self._sent
            if not has_end and len(self._records) < self._size:
                return
            if has_end:
                self._settle_stop(self._published, "ended", "")
            self._send_group(self._sent, self._records[: self._size], has_end=has_end)
            self._records, self._sent = self._records[self._size :], self._sent + 1

    def _send_group(self, group: int, records: list[StateText], *, has_end: bool) -> None:
        rank = self.topology.rank
        for record in records:
            for digest, piece in record.large.items():
                if digest not in self._stored:
                    self._store.put(self._large_key(rank, digest), piece)
                self._stored[digest] = group
        header = json.dumps([self.run, group, has_end])
        self._store.put(self._record_key(rank, group), "\n".join([header, *(record.text for record in records)]))
        for digest in [digest for digest, last in self._stored.items() if last <= group - self._num_kept]:
            self._store.delete(self._large_key(rank, digest))
            del self._stored[digest]
        self._count(group, self._store.add(self._counter(group), 1 + has_end * _NOTICE))

    def _counter(self, group: int, run: str = "") -> str:
        return f"{run or self.run}/sent/{group % _COUNTERS}"

    def _record_key(self, rank: int, group: int) -> str:
        return f"{self.run}/records/{rank}/{group % self._num_kept}"

    def _large_key(self, rank: int, digest: str) -> str:
        return f"{self.run}/large/{rank}/{digest}"

    def _count(self, group: int, counter: int) -> None:
        # It has counted all ranks once for each of its groups that are complete.
        if counter % _NOTICE >= self.topology.num_replicas * (group // _COUNTERS + 1):
            self._complete = max(self._complete, group + 1)
        self._is_noticed = self._is_noticed or counter >= _NOTICE

    def _wait_for(self, step: int) -> None:
        """Wait until all ranks have sent the group of ``step``; raise if they cannot."""
        group = step // self._size

        def find() -> bool | None:
            # This column may be complete, and another one broken: then its processes would hang in the next step.
            if self._complete <= group or self._store.num_columns > 1:
                self._count(group, int(self._store.text(self._counter(group)) or 0))
            if self._is_noticed:
                self._read_stop(step)
            return True if self._complete > group else None

        # The lowest rank that waits finds out who is late, and tells the others.
        patience = self.timeout + min(self.topology.rank * 0.05, 5.0)
        if self.stop is None and not self._store.wait(find, patience):
            self._blame(group, step)
            find()

    def _read_stop(self, step: int) -> None:
        """Raise if a rank has failed up to ``step``; note where all stop, once nobody can end earlier."""
        at, kind, text = json.loads(self._store.text(f"{self.run}/stop") or "[0, null, null]")
        if kind == "ended" and at // self._size < self._complete:
            self.stop = at
        if kind in ("failed", "mismatch") and at <= step:
            raise (StreamError if kind == "failed" else RankMismatchError)(text)

    def _settle_stop(self, step: int, kind: str, text: str, run: str = "") -> None:
        """Note that this rank stops before a step; the earliest stands, and a failure rather than an end."""
        own, key = [step, kind, text[:4000]], f"{run or self.run}/stop"
        self._store.settle(key, own, lambda old: (step, kind == "ended") < (old[0], old[1] == "ended"))

    def _post_stop(self, step: int, kind: str, text: str) -> None:
        """Note that no rank of any column can go on at a step, and have those look there that wait for any group."""
        for column in range(self._store.num_columns):
            run = f"{self._all_columns}/{column}"
            self._settle_stop(step, kind, text, run)
            for number in range(_COUNTERS):
                self._store.add(self._counter(number, run), _NOTICE)
        self._is_noticed = True

    def _blame(self, group: int, step: int) -> None:
        """Name the ranks that have kept ``group`` waiting, here and on all ranks that wait."""
        late = [rank for rank, sent in enumerate(self._groups(group)) if sent is None]
        if not late:
            # A rank died between its records and the counter. It will be late in the next group.
            self._complete, self._is_noticed = group + 1, True
            return
        before, named = self._groups(group - 1), ""
        for rank in late[:_MOST_NAMED]:
            sent = before[rank]
            (record,) = self._decoded([json.loads(sent.lines[-1]) if sent else None], first_rank=rank)
            named += f"\n  - rank {rank}: {'nothing yet' if record is None else self._describe(rank, record)}"
        text = (
            f"Step {step} was waited for in vain for {self.timeout:g} s: {len(late)} of {len(before)} ranks have not "
            f"published their batch, among them{named}\nA slow shard, or a dead process? Look at their logs; if they "
            "are only slow, raise the timeout."
        )
        self._post_stop(step, "failed", text)
        raise StreamError(text)

    def _copied(self, step: int) -> str | None:
        """The records of all ranks after all steps below ``step`` as another rank has gathered them, or this one now.

        None if the rank that gathers them does not come to an end, or the place is taken by a later step.
        """
        key = f"{self.run}/copies/{step % _COPIES}"
        own = [step, self.topology.rank, None]
        standing = self._store.settle(key, own, lambda old: old[0] < step)
        if standing == own:
            return self._leave_copy(step, key)

        def find() -> list[Any] | None:
            found: list[Any] = json.loads(self._store.text(key) or "[-1, 0, []]")
            return None if found[0] == step and found[2] is None else found

        found = standing if standing[2] is not None else self._store.wait(find, _PATIENCE, heeds_failures=False)
        return self._joined(key, found[2]) if found and found[0] == step and found[2] else None

    def _leave_copy(self, step: int, key: str) -> str:
        """Gather the records of all ranks, and leave them at a key; or that they are not to be had."""
        rank, digests = self.topology.rank, list[str]()
        try:
            text = f"[{','.join(self._lines_at(step))}]"
            digests = self._put_pieces(key, text)
        finally:
            self._store.settle(key, [step, rank, digests], lambda old: old == [step, rank, None])
        return text

    def _put_pieces(self, key: str, text: str) -> list[str]:
        """Put a text below a key, for :meth:`_joined`; returns the digests of its pieces."""
        pieces = in_pieces(text)
        for number, (_, piece) in enumerate(pieces):
            self._store.put(f"{key}/{number}", piece)
        return [digest for digest, _ in pieces]

    def _joined(self, key: str, digests: Sequence[str]) -> str | None:
        """The text that stands below a key in pieces; None if that has been replaced."""
        pieces = self._store.texts([f"{key}/{number}" for number in range(len(digests))])
        found = [piece for piece, digest in zip(pieces, digests, strict=True) if piece and digest_of(piece) == digest]
        return "".join(found) if len(found) == len(digests) else None

    def _refuse_unknown(self, step: int) -> None:
        if not 1 <= step <= self._next:
            known = f"after step 0 and up to step {self._next}"
            raise PositionError(f"Where ranks stand is known {known}, not at step {step}; ask if it happens first.")

    def _lines_at(self, step: int) -> list[str]:
        """The record of every rank after all steps below ``step``, as JSON."""
        group, index = divmod(step - 1, self._size)
        lines = []
        for rank, sent in enumerate(self._groups(group)):
            if sent is None:
                raise PositionError(
                    f"Where rank {rank} stood at step {step} is not kept any more: it has published later steps since. "
                    "Raise `keep`, or ask for records of later steps."
                )
            lines.append(sent.lines[index])
        return lines

    def _groups(self, group: int) -> list[_Group | None]:
        """The messages of all ranks for a group of steps; None where one is not there, or not any more."""
        found: list[_Group | None] = []
        keys = [self._record_key(rank, group) for rank in range(self.topology.num_replicas)]
        for rank, text in enumerate(self._store.texts(keys)):
            if text is None:
                found.append(None)
                continue
            header, *lines = text.split("\n")
            try:
                run, number, has_end = json.loads(header)
            except (ValueError, TypeError):
                run = None
            if run != self.run:
                raise foreign(f"where rank {rank} leaves records of run {self.run} there is {text[:80]}")
            found.append(_Group(has_end, lines) if number == group else None)
        return found

    def _decoded(self, records: Sequence[Any], first_rank: int = 0) -> list[Record | None]:
        """Records of ranks one after the other, as they were sent, with their large parts; None where there is none."""
        wanted = {
            self._large_key(rank, digest): digest
            for rank, record in enumerate(records, first_rank)
            for _, *places in record or ()
            for _, digests in places
            for digest in digests
        }
        pieces = self._pieces(wanted)
        return [None if record is None else [decode(state, pieces) for state in record] for record in records]

    def _pieces(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Pieces of large texts by digest, of which each has a key."""
        pieces: dict[str, str] = {}
        for (key, digest), piece in zip(wanted.items(), self._store.texts(list(wanted)), strict=True):
            if piece is None or digest_of(piece) != digest:
                raise foreign(f"where {key} should be a large state there is {str(piece)[:80]}")
            pieces[digest] = piece
        return pieces
