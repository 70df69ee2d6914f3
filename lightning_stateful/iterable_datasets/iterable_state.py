"""The positions of all workers in a pass over an iterable dataset that divides itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_stateful.errors import PositionError, StatefulWarning
from lightning_stateful.iterable_datasets.dataset_parts import holds_data_alone
from lightning_stateful.iterable_datasets.iterable_task import FRESH, IterableTask
from lightning_stateful.iterable_datasets.iterables import IterableConfig
from lightning_stateful.iterable_datasets.pass_history import is_moved_in
from lightning_stateful.iterable_datasets.rank_draws import ALL_KINDS
from lightning_stateful.shapes import COUNT, EPOCH, RANKS, SET_ON_RANK, Either, check_shape, refuse_unless
from lightning_stateful.state import copy_plain
from lightning_stateful.stream_nodes.nodes import NodeState
from lightning_stateful.stream_nodes.own_state import has_state

# Batches that are read again one by one, in place of a state.
_FEW = range(2**20)
_OWN = Either(None, {"dataset": object, "iterator": object})
_OF_PASS = {"state": _OWN, "since": COUNT, "first": Either(None, str), "over": bool, "left_out": COUNT}
_OF_PASS |= {"generators?": str, "kept?": {str: str}}
_SLOT = {
    **_OF_PASS,
    "batches": COUNT,
    "item": COUNT,
    "exhausted": bool,
    "passes": [range(-COUNT.stop, COUNT.stop)],
    "changes": bool,
    "draws": bool,
    "begins?": bool,
    "outside?": {str: str},
    "built?": {str: str},
    "begun?": {str: str},
    "left?": {str: str},
    "lasting?": [str],
    "samples": Either(None, (str, str, str, bool)),
    "ended": Either(None, {**_OF_PASS, "since": _FEW, "number": COUNT, "more": _FEW}),
}
_SHAPE = {
    "num_replicas": RANKS,
    "pass": EPOCH,
    "workers": RANKS,
    "steps": COUNT,
    "slots": [Either(None, _SLOT)],
    "alike?": [str],
    **SET_ON_RANK,
}


@dataclass(frozen=True, kw_only=True)
class IterableState:
    """A pass over an iterable dataset: where each worker slot stands, which is slot ``worker * num_replicas + rank``.

    Attributes:
        config: How the dataset is read.
        epoch: The number of the pass.
        num_replicas: Ranks.
        num_workers: Worker slots of a rank.
        slots: The state of each slot; None for a slot that has not begun.
        steps: Batches of each rank in the pass.
        is_here: Whether the datasets stand there already, so that the pass is just begun.
    """

    config: IterableConfig
    epoch: int
    num_replicas: int
    num_workers: int
    slots: tuple[NodeState | None, ...]
    steps: int = 0
    is_here: bool = False
    # A pass is never divided anew: what is left of it cannot be given to other ranks or workers.
    steps_before: ClassVar[int] = 0
    is_known: ClassVar[bool] = False

    @classmethod
    def beginning(cls, config: IterableConfig, epoch: int, num_replicas: int, num_workers: int) -> IterableState:
        """The beginning of a pass over datasets as they stand."""
        slots = (None,) * (num_replicas * num_workers)
        ranks = {"num_replicas": num_replicas, "num_workers": num_workers}
        return cls(config=config, epoch=epoch, slots=slots, is_here=True, **ranks)

    @property
    def num_slots(self) -> int:
        """Worker slots of all ranks."""
        return self.num_replicas * self.num_workers

    @property
    def has_begun(self) -> bool:
        """Whether something of the pass was served, or one before has left something that it may depend on."""
        before = [slot for slot in self.slots if slot and (slot["ended"] or slot["passes"])]
        if self.steps or any(slot["ended"] or is_moved_in(slot) for slot in before):
            return True
        # Passes that have changed nothing may have moved on what cannot be looked at, such as an open file.
        return bool(before) and not holds_data_alone(self.config.dataset)

    def on(self, num_replicas: int, num_workers: int) -> IterableState:
        """The beginning of the pass on other ranks and workers.

        Args:
            num_replicas: Ranks.
            num_workers: Worker slots of a rank.
        """
        if self.has_begun:
            warnings.warn(
                f"{self.config.name} goes on from pass to pass, and is read by other ranks or workers than before: "
                f"they begin pass {self.epoch} as the first, so a resume from here is not exact.",
                StatefulWarning,
                stacklevel=4,
            )
        return self.beginning(self.config, self.epoch, num_replicas, num_workers)

    def tasks(self, rank: int) -> list[IterableTask]:
        """The tasks of the worker slots of a rank; those before the one whose batch comes next leave out a turn."""
        slots = [self.slots[worker * self.num_replicas + rank] for worker in range(self.num_workers)]
        served = {worker: (slot or {}).get("batches", 0) for worker, slot in enumerate(slots)}
        going = [worker for worker, slot in enumerate(slots) if not (slot or {}).get("over")]
        first = min(going, key=lambda worker: (served[worker], worker), default=0)
        return [
            IterableTask(
                slot=worker * self.num_replicas + (0 if self.config.kinds_alike >= ALL_KINDS else rank),
                worker=worker,
                rank=rank,
                epoch=self.epoch,
                state=slot,
                is_here=self.is_here,
                waits=worker < first,
                share=(worker * self.num_replicas + rank, self.num_workers * self.num_replicas),
                num_workers=self.num_workers,
            )
            for worker, slot in enumerate(slots)
        ]

    def at(self, slots: tuple[NodeState | None, ...], steps: int = 0) -> IterableState:
        """The same pass, with slots standing elsewhere."""
        return replace(self, slots=slots, steps=steps, is_here=False)

    def following(self, asked: Sequence[int] = ()) -> IterableState:
        """The beginning of the next pass, of which it depends on the datasets how they were left.

        Args:
            asked: By worker, the batches of the pass that it was asked for; none but those of this state by default.
        """
        begun = self.beginning(self.config, self.epoch + 1, self.num_replicas, self.num_workers)
        if not self.config.stays:
            return begun
        slots = [
            None if slot is None else self._left(slot, asked[number // self.num_replicas] if asked else 0)
            for number, slot in enumerate(self.slots)
        ]
        return begun.at(tuple(slots))

    def _left(self, slot: NodeState, asked: int) -> NodeState:
        """The state of a slot that is to begin the next pass."""
        fresh = dict(FRESH)
        batches = slot["batches"] if slot["over"] else max(slot["batches"], asked)
        if has_state(self.config.dataset):
            names = ("state", "since", "first", "over", "left_out", "generators")
            ended = {name: slot[name] for name in names if name in slot}
            if kept := {name: slot["kept"][name] for name in slot.get("lasting", ()) if name in slot["kept"]}:
                ended["kept"] = kept
            more = {"number": slot["batches"] - slot["since"], "more": batches - slot["batches"]}
            return {**fresh, "ended": {**ended, **more}}
        if self.config.counts_passes:
            passes = [*slot["passes"], -1 - batches if slot["over"] else batches]
            # Of batches that a worker has read ahead nobody knows whether the last was the end.
            changes = slot["changes"] or batches > slot["batches"]
            kept = {name: slot[name] for name in slot if name in ("draws", "begins", "outside", "built")}
            return {**fresh, "passes": passes, "changes": changes, **kept, "begun": slot.get("left", {})}
        return fresh

    def shards_at(self, slot: int, state: NodeState | None) -> list[str]:
        """The dataset, rank and worker of a slot, unless its pass is over."""
        return [] if state is not None and state["over"] else [self._name(slot)]

    def read_again(self, slots: Iterable[int] | None = None) -> dict[str, int]:
        """Samples, or batches, that are read again for want of a state, by the slot that reads them.

        Args:
            slots: Of these; None for all.
        """
        found: dict[str, int] = {}
        for number in range(self.num_slots) if slots is None else slots:
            slot = self.slots[number]
            if slot is not None and slot["state"] is None and slot["item"]:
                found[self._name(number)] = slot["item"]
        return found

    def begun_again(self) -> IterableState:
        """The same pass, with every slot at its beginning."""
        return self.at((dict(FRESH),) * self.num_slots, self.steps)

    def report(self) -> dict[str, int]:
        """The pass."""
        return {"pass": self.epoch}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return {
            "num_replicas": self.num_replicas,
            "pass": self.epoch,
            "workers": self.num_workers,
            "steps": self.steps,
            "slots": [copy_plain(slot) for slot in self.slots],
            **({"alike": sorted(self.config.kinds_alike)} if self.config.kinds_alike and self.num_replicas > 1 else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], config: IterableConfig) -> IterableState:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: The plain data.
            config: How the dataset is read.

        Raises:
            DamagedStateError, PositionError: It is no state of worker slots.
        """
        check_shape(dict(data), _SHAPE, "progress")
        slots = tuple(copy_plain(slot) for slot in data["slots"])
        if says_how_ranks_draw(data):
            config = replace(config, kinds_alike=frozenset(data.get("alike", ())))
        state = cls(
            config=config,
            epoch=data["pass"],
            num_replicas=data["num_replicas"],
            num_workers=data["workers"],
            slots=slots,
            steps=data["steps"],
        )
        if len(slots) != state.num_slots:
            raise PositionError(f"A dataset's progress has {len(slots)} worker slots of {state.num_slots}.")
        for number, slot in enumerate(slots):
            if slot is not None:
                since, batches, path = slot["since"], slot["batches"], f"progress.slots[{number}].since"
                is_right = since == batches if slot["state"] is None else since <= max(batches, 1)
                refuse_unless(is_right, since, f"{batches} or, beside a state, fewer", path)
        return state

    def _name(self, slot: int) -> str:
        worker, rank = divmod(slot, self.num_replicas)
        return self.config.name_of_slot(rank, worker)


def says_how_ranks_draw(data: Mapping[str, Any]) -> bool:
    """Whether a state of several ranks has them draw alike or apart: of a run that has begun.

    Args:
        data: What :meth:`IterableState.to_dict` wrote.
    """
    return data["num_replicas"] > 1 and bool("alike" in data or data["pass"] or data["steps"] or any(data["slots"]))
