"""The share of one rank in what a user's sampler yields."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np
import torch

from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.core.topology import Topology, split_evenly
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import say_repeats
from lightning_stateful.index.step_plan import StepPlan
from lightning_stateful.samplers.items import knows_how_to_split
from lightning_stateful.samplers.trial import wrong_length
from lightning_stateful.samplers.user_sampler import UserSampler
from lightning_stateful.samplers.winding import Winding
from lightning_stateful.samplers.world import detect_topology

Tail = Literal["split", "pad", "drop"]
TAILS = ("split", "pad", "drop")

_log = logging.getLogger("lightning_stateful")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPlan(StepPlan):
    """Deals what a sampler yields out to ranks, in steps.

    A step gives every rank ``rule.batch_size`` slots; of whole batches that is one. Whole batches that are left at the
    end of an epoch, fewer than ranks, are split over the ranks sample by sample.

    Attributes:
        order: The sampler.
        rule: How steps are cut.
        rank: Whose share.
        shuffles: Whether the slots of a step go to ranks in a random order of its own.
    """

    order: UserSampler
    rule: StepRule
    rank: int
    shuffles: bool = False

    def num_slots(self) -> int:
        """Slots of a whole epoch; more than there will be where its end is found only when it is there."""
        return len(self.order)

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``, with what is already known of the sampler there."""
        carried = held.carried if held is not None and (held.epoch, held.consumed) == (epoch, 0) else ""
        return Position(epoch=epoch, width=self.num_replicas, carried=carried)

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left of the position's epoch, as far as is known."""
        end = self.order.known_end(position)
        if end is not None:
            return not self.rule.num_steps(max(end - position.consumed, 0))
        return not self.in_first_pass(position) or not self.num_batches(position)

    def repeats(self) -> list[str]:
        """What is served twice, in words; empty if nothing is, or it is known only at the end of an epoch."""
        if not self.order.is_sized or (self.order.whole_batches and not self.rule.pad):
            return []
        repeated = self.rule.num_repeated(len(self.order))
        if self.order.whole_batches:
            return [f"{repeated} of {len(self.order)} batches are served twice in every epoch"] if repeated else []
        return say_repeats(repeated, len(self.order))

    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch.

        Raises:
            TypeError: It cannot be known before the epoch is over.
        """
        if not self.order.is_sized or self.order.whole_batches:
            raise TypeError(f"{self.order.name} does not say how many samples it yields.")
        return self.num_shared()

    def indices(self, position: Position) -> Iterator[Any]:
        """The rank's batches from ``position`` to the end of the pass."""
        return (batch for _, batch in self.numbered(position))

    def numbered(self, position: Position) -> Iterator[tuple[int, Any]]:
        """The rank's batches, each with the number of its first slot, from ``position`` to the end of the pass."""
        steps = self._steps(self.order.wind(position), position)
        if not self.order.whole_batches:
            return steps
        return ((slot, batch[0] if len(batch) == 1 else _joined(batch)) for slot, batch in steps)

    def _steps(self, winding: Winding, position: Position) -> Iterator[tuple[int, list[Any]]]:
        rule, full, size, rank = self.rule, self.rule.full, self.rule.batch_size, self.rank
        slot = position.consumed
        remaining = self.remaining(position) if self.order.is_sized else 0
        # Of an end that is not announced, the last steps have to know before they begin.
        ahead = min(full, remaining) if remaining else 2 * full
        while True:
            ready = winding.look_ahead(ahead)
            left = remaining if self.order.is_sized else ready
            if ready < min(ahead, left):
                raise self._too_few(slot, ready, position.epoch)
            plain = min(ready // full, left // full - 1)
            if plain > 0:
                slots = winding.take(plain * full)
                for start in range(0, plain * full, full):
                    yield slot + start + rank * size, self._own(slots, start, full, size, position.epoch, slot + start)
                slot, remaining = slot + plain * full, remaining - plain * full
                continue
            step = rule.step_size(left)
            if not step or not rule.num_steps(left):
                break
            ready = winding.look_ahead(step)
            if ready < step:
                raise self._too_few(slot, ready, position.epoch)
            slots = winding.take(step)
            remaining -= step
            # Before what may be the last batch that anybody asks for.
            self._check_end(winding, remaining, position.epoch)
            # Parts of one batch have numbers of their own.
            first = rank if self.order.whole_batches else int(rule.share(left, rank)[0])
            yield slot + first, self._last(slots, left, position.epoch, slot)
            slot += step
            ahead = min(full, remaining) if self.order.is_sized else 2 * full

    def _own(self, slots: list[Any], start: int, full: int, size: int, epoch: int, slot: int) -> list[Any]:
        """The rank's slots of a full step that begins at ``start``."""
        first = start + self.rank * size
        if not self.shuffles:
            return slots[first : first + size]
        own = self.rank * size + np.arange(size, dtype=np.int64)
        return [slots[start + offset] for offset in self._shuffled(full, own, epoch, slot).tolist()]

    def _last(self, slots: list[Any], left: int, epoch: int, slot: int) -> list[Any]:
        """The rank's slots, or its part of them, of one of the last steps."""
        rule, ranks = self.rule, self.num_replicas
        if not self.order.whole_batches or rule.pad or len(slots) == ranks:
            own = rule.share(left, self.rank)
            own = self._shuffled(len(slots), own, epoch, slot) if self.shuffles else own
            return [slots[offset] for offset in own.tolist()]
        if not all(map(self._can_be_split, slots)):
            return [self._part_of_objects(slots, epoch)]
        whole, rest = slots[: len(slots) // ranks * ranks], slots[len(slots) // ranks * ranks :]
        # Evaluation serves what is left together with the last full step, which has a batch for each rank.
        own_batch = [whole[self.rank]] if whole else []
        samples = [sample for batch in rest for sample in _listed(batch)]
        part = split_evenly(len(samples), ranks, self.rank)
        share = samples[part.start : part.stop]
        if not share and not own_batch:
            self._log_repeats("samples", len(samples), epoch)
            share = [samples[self.rank % len(samples)]]
        return [*own_batch, share] if share else own_batch

    def _can_be_split(self, batch: Any) -> bool:
        if isinstance(batch, (np.ndarray, torch.Tensor)):
            return batch.ndim > 0
        plain = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
        return plain and (self.order.is_collated or not isinstance(batch, tuple))

    def _part_of_objects(self, slots: list[Any], epoch: int) -> Any:
        """The rank's part of batches that are objects of some kind: split if they know how to, as lhotse's do."""
        ranks = self.num_replicas
        if all(map(knows_how_to_split, slots)):
            joined = reduce(add, slots)
            if len(joined) >= ranks:
                return joined.split(ranks)[self.rank]
        self._log_repeats("batches", len(slots), epoch)
        return slots[self.rank % len(slots)]

    def _shuffled(self, count: int, own: Indices, epoch: int, slot: int) -> Indices:
        return keyed_permutation(count, derive_seed("ranks", self.order.own_seed, epoch, slot)).take(own)

    def _log_repeats(self, what: str, count: int, epoch: int) -> None:
        if self.rank == self.num_replicas - 1 and not self.order.has_reported:
            self.order.has_reported = True
            _log.warning(
                "%s: %d %s were left for the last step of epoch %d on %d ranks; %d of them are served twice.",
                self.order.name,
                count,
                what,
                epoch,
                self.num_replicas,
                self.num_replicas - count,
            )

    def _too_few(self, slot: int, ready: int, epoch: int) -> ConfigurationError:
        return wrong_length(self.order, f"only {slot % (len(self.order) or 1) + ready}", epoch)

    def _check_end(self, winding: Winding, remaining: int, epoch: int) -> None:
        """Make sure, once no step is left, that a sampler with a length ends where it says."""
        order = self.order
        if not order.is_sized or order.is_cut or order.way == "feedback" or self.rule.num_steps(remaining):
            return
        found = winding.look_ahead(remaining + 1)
        if found > remaining:
            raise wrong_length(order, f"more than {len(order)}", epoch)
        if found < remaining:
            raise wrong_length(order, f"only {len(order) - remaining + found}", epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCut:
    """How a user's sampler is dealt out, on however many ranks there turn out to be.

    Attributes:
        order: The sampler.
        batch_size: Samples in a full batch of one rank; 1 where the sampler yields whole batches.
        tail: What becomes of a last step that is not full: ``"split"`` as evenly as it goes, ``"pad"`` with what it
            has, or ``"drop"``.
        exact: Never repeat a sample for evaluation.
        shuffles: Whether the slots of a step go to ranks in a random order.
        num_replicas: Number of ranks; None for those of the process group.
        rank: This rank; None for that of the process group.

    Raises:
        ConfigurationError: ``tail`` is none of the three.
    """

    order: UserSampler
    batch_size: int = 1
    tail: Tail = "split"
    exact: bool = False
    shuffles: bool = False
    num_replicas: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ConfigurationError(f"tail must be one of {TAILS}, got {self.tail!r}.")

    @property
    def drop_last(self) -> bool:
        """Whether a last step that is not full is left out."""
        return self.tail == "drop"

    def topology(self) -> Topology:
        """The ranks that slots are dealt out to."""
        return detect_topology(self.num_replicas, self.rank)

    def plan(self) -> SamplerPlan:
        """The share of this rank."""
        topology = self.topology()
        rule = StepRule(
            batch_size=self.batch_size,
            num_replicas=topology.num_replicas,
            drop_last=self.drop_last,
            exact=self.exact,
            pad=self.tail == "pad",
        )
        return SamplerPlan(order=self.order, rule=rule, rank=topology.rank, shuffles=self.shuffles)

    def describe(self) -> dict[str, Any]:
        """What decides which samples are served, as plain data to be compared."""
        return {**self.order.describe(), "drop_last": self.drop_last}


def _listed(batch: Any) -> list[Any]:
    return batch.tolist() if isinstance(batch, (np.ndarray, torch.Tensor)) else list(batch)


def _joined(batches: list[Any]) -> list[Any]:
    return [sample for batch in batches for sample in _listed(batch)]
