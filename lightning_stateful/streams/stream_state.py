"""The positions of all worker slots in a pass over a stream, and how they are carried to other ranks and workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.packing.plan import Counts, reported
from lightning_stateful.shapes import COUNT, EPOCH, RANKS, check_shape, refuse_unless
from lightning_stateful.state import copy_plain
from lightning_stateful.stream_nodes.nodes import NodeState, innermost, sources_of
from lightning_stateful.stream_nodes.shard_reader import num_read_again
from lightning_stateful.streams.assignment import Assignment, ShardSlice, SlotProgress, SlotSlice, check_seen, left_of
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.source_reader import FRESH, NOTHING_GIVEN, SourceTask, skipped_in
from lightning_stateful.streams.worker_slot import ALONE, SLOT_SHAPE, SlotTask, StreamConfig, WorkerSlot

_COUNTS = ("shards_skipped", "samples_skipped", "samples_too_long")
_SHAPE = {
    "num_replicas": RANKS,
    "pass": EPOCH,
    "workers": RANKS,
    "steps": COUNT,
    "steps_before": COUNT,
    "skipped": (COUNT,) * len(_COUNTS),
    "sources": {str: object},
    "given?": {str: (COUNT,) * len(NOTHING_GIVEN)},
    "passed?": COUNT,
    "slots": [object],
    # What hooks have set, see SetBetweenPasses and SetWithinShards.
    "set?": {str: str},
    "first?": {str: str},
    "later?": {str: str},
    "set_within?": {"within": {str: str}, "ahead": [str]},
}


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A pass over a stream: what was assigned to worker slots, and where each of them stands.

    Slots are numbered worker by worker: slot ``worker * num_replicas + rank``. Shards are assigned at the beginning of
    a pass; on other ranks or workers, and where the first rank has nothing left, what is left is assigned anew.

    Attributes:
        config: How the stream is read.
        epoch: The number of the pass.
        num_replicas: Ranks.
        num_workers: Worker slots of a rank.
        assignments: What was assigned of every source.
        slots: The state of each slot; None for a slot that has not begun.
        steps: Batches of each rank since shards were assigned.
        steps_before: Batches of each rank in the same pass before that.
        skipped: What had been left out by then, since the beginning of training: shards, samples on which a function
            failed, samples that are too long.
        given: By source, what had been given by then, since the beginning of training: samples and, of packed
            documents, padding, documents and those that were cut.
        passed: Batches of each rank in earlier passes, which a schedule of weights goes by.
    """

    config: StreamConfig
    epoch: int
    num_replicas: int
    num_workers: int
    assignments: Mapping[str, Assignment]
    slots: tuple[NodeState | None, ...]
    steps: int = 0
    steps_before: int = 0
    skipped: tuple[int, ...] = (0, 0, 0)
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    passed: int = 0

    @classmethod
    def beginning(cls, config: StreamConfig, epoch: int, num_replicas: int, num_workers: int) -> StreamState:
        """The beginning of a pass before which nothing was left."""
        return cls(
            config=config,
            epoch=epoch,
            num_replicas=num_replicas,
            num_workers=num_workers,
            assignments={
                name: Assignment.of_pass(epoch, source.order(epoch)) for name, source in config.sources.items()
            },
            slots=(None,) * (num_replicas * num_workers),
        )

    @property
    def num_slots(self) -> int:
        """Worker slots of all ranks."""
        return self.num_replicas * self.num_workers

    @cached_property
    def slices(self) -> Mapping[str, list[list[SlotSlice]]]:
        """The slices of each slot, by source."""
        return {
            name: assignment.slots(
                self.num_replicas,
                self.num_workers,
                sizes=self.config.sources[name].shards.sizes(),
            )
            for name, assignment in self.assignments.items()
        }

    def task(self, slot: int, state: NodeState | None = None) -> SlotTask:
        """The task of a slot from its present position, or from another state."""
        return SlotTask(
            slot=slot,
            worker=slot // self.num_replicas,
            of={name: self._source_task(name, slot) for name in self.assignments},
            state=self.slots[slot] if state is None else state,
            epoch=self.epoch,
            steps_before=self.steps_before,
            num_workers=self.num_workers,
            passed=self.passed,
        )

    def _source_task(self, name: str, slot: int) -> SourceTask:
        return SourceTask(slot, self.num_slots, self.slices[name][slot], self.assignments[name].epoch)

    def _progress(self, name: str, slot: int, state: NodeState | None = None) -> SlotProgress:
        """The position of a slot in a source, now or by another state."""
        state = state or self.slots[slot]
        held = FRESH if state is None else state["of"][name]
        return self._source_task(name, slot).progress(self.config.sources[name], held)

    def at(self, slots: tuple[NodeState | None, ...], steps: int = 0) -> StreamState:
        """The same pass, with slots standing elsewhere."""
        moved = replace(self, slots=slots, steps=steps)
        # A cached property lives here; it is the same.
        vars(moved)["slices"] = self.slices
        return moved

    def on(self, num_replicas: int, num_workers: int) -> StreamState:
        """The rest of the pass, assigned to other slots; the same if they are as many."""
        if (num_replicas, num_workers) == (self.num_replicas, self.num_workers):
            return self
        assignments = {name: self._left(name).shared() for name in self.assignments}
        return self._assigned_anew(assignments, num_replicas=num_replicas, num_workers=num_workers)

    def shared_anew(self) -> StreamState | None:
        """The rest of the pass, shared evenly among the same slots; None where that would give no more steps.

        Of a mixture, sources that some slots have served and others have not; the other slots go on in the others.
        """
        shared = {}
        for name in filter(self._is_uneven, self.assignments):
            if not self.steps and self.assignments[name].is_spread:
                # It has been shared by all, and there was not enough for a step.
                continue
            left = self._left(name)
            if len(left.whole) < self.num_slots or not self.steps:
                left = left.spread()
            # Else slots go on in the shards that they have open.
            if left.begun or left.whole:
                shared[name] = left
        if not shared:
            return None
        assigned = self._assigned_anew(shared)
        kept = self.assignments.keys() - shared.keys()
        return replace(assigned, slots=tuple(self._kept(slot, kept) for slot in self.slots)) if kept else assigned

    def following(self) -> StreamState:
        """The beginning of the next pass: first what is left of this one, then all shards once more."""
        mixing = self.config.mixing
        # Until there was not enough for a step, which is not worth being shared once more.
        was_shared = self.num_replicas > 1 and (mixing is None or mixing.stop == "all_exhausted")
        assignments = {}
        for name, source in self.config.sources.items():
            latest, left = self._latest(name), self._left(name).shared()
            if not self._has_plenty(left, source):
                if was_shared:
                    left = left.unshared(self.num_slots)
                order = tuple((latest + 1, shard) for shard in source.order(latest + 1))
                left = Assignment(latest + 1, left.begun, (*left.whole, *order))
            assignments[name] = left
        is_scheduled = mixing is not None and mixing.schedule is not None
        passed = self.passed + self.steps_before + self.steps if is_scheduled else 0
        return self._assigned_anew(assignments, epoch=self.epoch + 1, steps_before=0, passed=passed)

    def tasks(self, rank: int) -> list[SlotTask]:
        """The tasks of the worker slots of a rank, the one first whose batch comes next."""
        return [self.task(worker * self.num_replicas + rank) for worker in self.workers_in_turn(rank)]

    def workers_in_turn(self, rank: int) -> list[int]:
        """A rank's workers, the one first whose batch comes next."""
        slots = [self.slots[slot] or {} for slot in range(rank, self.num_slots, self.num_replicas)]
        served = {
            worker: state.get("batches", 0)
            for worker, state in enumerate(slots)
            if not state.get("over") and self._has_slices(worker * self.num_replicas + rank)
        }
        # They take turns from the first on.
        first = min(served, key=lambda worker: (served[worker], worker), default=0)
        return [(first + number) % self.num_workers for number in range(self.num_workers)]

    @property
    def is_known(self) -> bool:
        """Whether each slot that was assigned something has said where it stands."""
        return all(state is not None or not self._has_slices(slot) for slot, state in enumerate(self.slots))

    @property
    def left_out(self) -> tuple[int, ...]:
        """The samples left out since the beginning of training, counted by cause."""
        return self._left_out_with(self.assignments)

    def report(self) -> dict[str, Any]:
        """The pass, and shards not read to their end or left out; of mixtures and packed documents, what was given.

        Of a mixture that is by ``sources``; of several worker slots, those that have said where they stand.
        """
        report: dict[str, Any] = {"pass": self.epoch, "shards_left": len(self.shards_left())}
        report |= dict(zip(_COUNTS, self.left_out, strict=True))
        if not self.config.counts_given:
            return report
        given, packing = {name: self._given_of(name) for name in self.assignments}, self.config.packing
        total, sources = sum(samples for samples, *_ in given.values()), dict[str, Any]()
        for name, (samples, padding, *counts) in given.items():
            room = 0 if packing is None else samples * packing.sequence_length
            packed = {} if packing is None else reported(room, Counts(room - padding, *counts))
            sources[name] = {"samples": samples, "share": samples / max(total, 1), **packed}
        if self.config.mixing is not None:
            return {**report, "sources": sources}
        alone = sources[ALONE]
        return {**report, **{name: alone[name] for name in alone if name != "share"}}

    def shards_left(self) -> dict[tuple[str, int, int], set[int]]:
        """The shards that are not read to their end, by source, pass and number, with the ranks that go on in each."""
        found: dict[tuple[str, int, int], set[int]] = {}
        for slot in range(self.num_slots):
            for name in self.assignments:
                here = self._progress(name, slot)
                for slot_slice in here.slices[here.current :]:
                    at = here.state if slot_slice is here.reading else None
                    first = 0 if at is None or at["source"] is None else innermost(at)["shard"]
                    for shard in slot_slice.of.shards[first:]:
                        found.setdefault((name, slot_slice.of.epoch, shard), set()).add(slot % self.num_replicas)
        return found

    def shards_at(self, slot: int, state: NodeState | None) -> list[str]:
        """The shards that a slot has open in a state, by name."""
        names = []
        for name, source in self.config.sources.items():
            here = self._progress(name, slot, state)
            if here.reading is not None:
                names.append(source.shards.name(here.reading.of.shards[max(here.num_opened - 1, 0)]))
        return names

    def read_again(self, slots: Iterable[int] | None = None) -> dict[str, int]:
        """Samples that have to be read again to come to where slots stand, by what they are samples of.

        Args:
            slots: Of these; None for all.
        """
        found: dict[str, int] = {}
        for slot in range(self.num_slots) if slots is None else slots:
            for name, source in self.config.sources.items():
                here = self._progress(name, slot)
                for slot_slice in here.slices[here.current :]:
                    begin = (here.state if slot_slice is here.reading else None) or slot_slice.of.state
                    if begin is None or begin["source"] is None:
                        continue
                    at = innermost(begin)
                    if num_read_again(source.shards, at):
                        found[source.shards.name(slot_slice.of.shards[at["shard"]])] = at["since"]
        return found

    def begun_again(self) -> StreamState:
        """The same pass, with every slot at the beginning of what it was assigned."""
        slots = (WorkerSlot(self.config, self.task(slot)._replace(state=None)) for slot in range(self.num_slots))
        return self.at(tuple(slot.state() for slot in slots), self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        sources = {
            name: assignment.to_dict(self.config.sources[name].order(assignment.epoch))
            for name, assignment in self.assignments.items()
        }
        return {
            "num_replicas": self.num_replicas,
            "pass": self.epoch,
            "workers": self.num_workers,
            "steps": self.steps,
            "steps_before": self.steps_before,
            "skipped": list(self.skipped),
            "sources": sources,
            **self._counts(),
            "slots": [copy_plain(state) for state in self.slots],
        }

    def _counts(self) -> dict[str, Any]:
        """Counts of what has been given, and of steps of earlier passes, where anybody asks for them."""
        mixing, found = self.config.mixing, dict[str, Any]()
        if self.config.counts_given:
            found["given"] = {name: list(self.given.get(name, NOTHING_GIVEN)) for name in self.assignments}
        if mixing is not None and mixing.schedule is not None:
            found["passed"] = self.passed
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], config: StreamConfig) -> StreamState:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: The plain data.
            config: How the stream is read on the ranks and workers that wrote it.

        Raises:
            DamagedStateError, PositionError: It is that of a stream with other sources, shards or steps.
        """
        check_shape(dict(data), _SHAPE, "progress")
        if set(data["sources"]) != set(config.sources):
            raise DamagedStateError(
                f"A stream's progress has the sources {list(data['sources'])}, and there are {list(config.sources)}."
            )
        state = cls(
            config=config,
            epoch=data["pass"],
            num_replicas=data["num_replicas"],
            num_workers=data["workers"],
            assignments={
                name: Assignment.from_dict(
                    data["sources"][name],
                    source.order,
                    f"progress.sources.{name}",
                    data["num_replicas"] * data["workers"],
                )
                for name, source in config.sources.items()
            },
            slots=tuple(copy_plain(slot) for slot in data["slots"]),
            steps=data["steps"],
            steps_before=data["steps_before"],
            skipped=tuple(data["skipped"]),
            given={name: tuple(counts) for name, counts in data.get("given", {}).items()},
            passed=data.get("passed", 0),
        )
        state.check()
        return state

    def check(self) -> None:
        """Refuse states that were taken in a stream whose nodes are others, or that was assigned less.

        Raises:
            DamagedStateError: A state has other keys than the nodes of this configuration write.
            PositionError: It lies beyond what the slot was assigned.
        """
        if len(self.slots) != self.num_slots:
            raise PositionError(f"A stream's progress has {len(self.slots)} worker slots of {self.num_slots}.")
        for slot, state in enumerate(self.slots):
            if state is not None:
                self._check_slot(state, f"progress.slots[{slot}]")
        for name, source in self.config.sources.items():
            for number, piece in enumerate(self.assignments[name].begun):
                _check_state(piece.state, source, piece.shards, f"progress.sources.{name}.begun[{number}].state")
            for slot, state in enumerate(self.slots):
                if state is None:
                    continue
                path = f"progress.slots[{slot}].of.{name}.state"
                here = self._progress(name, slot)
                if not 0 <= here.current <= len(here.slices):
                    raise PositionError(f"Worker slot {slot} stands in slice {here.current} of {len(here.slices)}.")
                shards = () if here.reading is None else here.reading.of.shards
                if not 0 <= here.num_opened <= len(shards):
                    raise PositionError(f"Worker slot {slot} has opened {here.num_opened} of {len(shards)} shards.")
                if here.reading is not None:
                    _check_state(here.state, source, shards, path)
                    if here.state is not None:
                        check_seen(here.state["seen"], len(here.reading.of.served), f"{path}.seen")

    def _check_slot(self, state: Any, path: str) -> None:
        """Refuse the state of a slot that has another shape, or other sources."""
        check_shape(state, SLOT_SHAPE, path)
        check_shape(state["of"], dict.fromkeys(self.assignments, object), f"{path}.of")
        for key in ("ended", "again", "gone"):
            refuse_unless(set(state[key]) <= self.assignments.keys(), state[key], "names of sources", f"{path}.{key}")
        begins_again = self.config.mixing is not None and self.config.mixing.stop == "cycle"
        for name, held in state["of"].items():
            refuse_unless(begins_again or not held["round"], held["round"], "0", f"{path}.of.{name}.round")
            is_open = held["state"] is not None or not held["opened"]
            refuse_unless(is_open, held["opened"], "0 beside no state", f"{path}.of.{name}.opened")

    def _left(self, name: str) -> Assignment:
        """The rest of a source."""
        source, latest = self.config.sources[name], self._latest(name)
        slots = []
        for slot, assigned in enumerate(self.slices[name]):
            here = self._progress(name, slot)
            if here.slices is not assigned:
                # One that has begun the source again has served its part of what it shares with others.
                here = here._replace(slices=[*assigned, *here.slices], current=len(assigned) + here.current)
            slots.append(here)
        return left_of(slots, latest, source.order(latest))

    def _left_out_with(self, names: Iterable[str]) -> tuple[int, ...]:
        """The samples left out before, and in some sources since shards were assigned.

        Of what several slots read, what its first reader has met. Where shards are assigned anew, all go on from
        the reader that is last: the count may differ by what lies between the two.
        """
        found: list[Sequence[int]] = [self.skipped]
        for name in names:
            for slot, state in enumerate(self.slots):
                here = self._progress(name, slot)
                if state is not None:
                    found.append(state["of"][name].get("skipped", (0,) * len(_COUNTS)))
                if here.reading is not None and not here.reading.reader:
                    found.append(skipped_in(here.state))
        return tuple(map(sum, zip(*found, strict=True)))

    def _given_of(self, name: str) -> tuple[int, ...]:
        """Counts of what a source has given since the beginning of training."""
        found = [self.given.get(name, NOTHING_GIVEN)]
        found += [state["of"][name].get("given", NOTHING_GIVEN) for state in self.slots if state is not None]
        return tuple(map(sum, zip(*found, strict=True)))

    def _is_uneven(self, name: str) -> bool:
        """Whether slots have served all of a source that others have something left of; always of a single source."""
        mixing = self.config.mixing
        if mixing is not None and mixing.stop == "cycle":
            return False
        slots = [self._progress(name, slot) for slot in range(self.num_slots)]
        return mixing is None or any(here.reading is None for here in slots)

    def _kept(self, slot: NodeState | None, names: Iterable[str]) -> NodeState | None:
        """The state of a slot with what it has of some sources; those of others are assigned anew."""
        if slot is None:
            return None
        turn = max(state["turn"] for state in self.slots if state is not None)
        of = {name: slot["of"][name] if name in names else FRESH for name in self.assignments}
        ended = [name for name in slot["ended"] if name in names]
        return {"batches": 0, "over": False, "turn": turn, "ended": ended, "again": [], "gone": [], "of": of}

    def _has_plenty(self, left: Assignment, source: Source) -> bool:
        """Whether so much is left of a source that it is not begun anew yet, lest passes grow longer and longer."""
        mixing, number = self.config.mixing, len(left.whole)
        if mixing is None or mixing.stop == "all_exhausted":
            return False
        if mixing.stop == "cycle":
            # It begins again by itself within the pass.
            number += len({shard for piece in left.begun for shard in piece.shards})
            return 2 * number > source.shards.num_shards
        return number >= self.num_slots and 2 * number > source.shards.num_shards

    def _latest(self, name: str) -> int:
        """The latest pass of a source's shards that a slot has come to."""
        rounds = [state["of"][name]["round"] for state in self.slots if state is not None]
        return self.assignments[name].epoch + max(rounds, default=0)

    def _has_slices(self, slot: int) -> bool:
        return any(slots[slot] for slots in self.slices.values())

    def _assigned_anew(self, assignments: Mapping[str, Assignment], **changes: int) -> StreamState:
        """The state in which these sources are assigned anew, before any slot has begun."""
        changes = {"steps": 0, "steps_before": self.steps_before + self.steps, **changes}
        skipped, given = self._left_out_with(assignments), self.given
        if self.config.counts_given:
            given = {**given, **{name: self._given_of(name) for name in assignments}}
        every = {**self.assignments, **assignments}
        made = replace(self, assignments=every, skipped=skipped, given=given, **changes)  # type: ignore[arg-type]
        return replace(made, slots=(None,) * made.num_slots)


def _check_state(saved: NodeState | None, source: Source, shards: Sequence[int], path: str) -> None:
    """Compare where a slot stands in a slice with what the nodes of its source write, and its shard with the slice."""
    if saved is None or saved["source"] is None:
        refuse_unless(saved is None or not any(saved["seen"]), saved, "the beginning of a slice", path)
        return
    state, path, (node, _) = saved["source"], f"{path}.source", source.open(ShardSlice(0, ()))
    while True:
        node.check_state(state, path)
        below: list[Any] = sources_of(node)
        if not below:
            if state["shard"] > len(shards):
                raise PositionError(f"{path} lies in shard {state['shard']} of {len(shards)}.")
            return
        node, state, path = below[0], state["source"], f"{path}.source"
