"""The rest of an epoch of a user's sampler, cut into steps of all ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from itertools import islice
from operator import add
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_stateful.core.order import UNKNOWN, Progress, say_repeats
from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import PositionError
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.user_samplers.resumed_epoch import (
    is_noted_here,
    is_set_within,
    set_before_effect,
    warn_of_unset,
)
from lightning_stateful.user_samplers.sampler_pass import SamplerPass, warn
from lightning_stateful.user_samplers.sampler_trial import held_by
from lightning_stateful.user_samplers.user_sampler import UserSampler

# What the numbers of batches are apart from one pass of an epoch to the next.
_MANY_ITEMS = 2**40


class SamplerEpochPlan:
    """The rest of an epoch of a wrapped sampler, which can only be walked forward.

    Each call of :meth:`batches` begins a pass over the sampler. What the latest pass has noted on its way goes into a
    progress, to be compared on a resume.

    Attributes:
        read_ahead: Steps behind the epoch that workers are given of a sampler that goes on there, as torch gives them.
    """

    read_ahead = 0

    def __init__(self, *, order: UserSampler, num_replicas: int, begun: Progress) -> None:
        self.order, self._num_replicas, self._begun = order, num_replicas, begun
        self._latest: SamplerPass | None = None
        if (began := begun.details.get("began")) and not order.memory.begins_as:
            order.memory.begins_as = (began,)
        # Items of the epoch, once a pass has begun or ended before its time; until then the sampler is asked.
        self._fixed: tuple[int | None] | None = None
        # Those that the sampler itself has said as the pass began, or did in the run that is resumed.
        self._noted: int | None = begun.details.get("items")
        # Items of one whose length is what is left, so that it may not be set to where the run goes on.
        self._least = (order.num_items or 0) if begun.consumed and order.facts.counts_down else 0

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self._begun.epoch

    @property
    def _length(self) -> int | None:
        """Items of the epoch; None where that is not known."""
        if self._fixed is not None:
            return self._fixed[0]
        self.order.bring_to(self.epoch, self._begun.details.get("passes"))
        found = self.order.num_items_in(self.epoch, self._begun.cycle)
        if found is not None and found < self._least:
            raise PositionError(
                f"{self.order.name} says that it has {found} {self.order.unit} left, and had {self._least} when the "
                f"state was loaded. {self._begun.consumed} of the epoch were used, which a resume leaves out by "
                "itself: do not set the sampler to where the run stopped."
            )
        return found

    @cached_property
    def rule(self) -> StepRule:
        """The rule by which it is cut into steps: each gives every rank ``batch_size`` items."""
        return self.order.rule(self._num_replicas)

    @property
    def remaining(self) -> int | None:
        """Items left; None until the end of a sampler without ``len`` has been seen."""
        end = self._length
        if end is None and self._latest is not None:
            end = self._latest.end
        return None if end is None else max(end - self._begun.consumed, 0)

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; :data:`UNKNOWN` until the end of a sampler without ``len`` has been seen."""
        return UNKNOWN if self.remaining is None else self.rule.num_steps(self.remaining)

    @property
    def ends_in_pairs(self) -> bool:
        """Whether what is left at the end is served in one batch with what comes before."""
        order = self.order
        can_be_joined = self._length is not None and (not order.whole_batches or order.is_collated)
        return can_be_joined and self.rule.ends_in_pairs(self.remaining or 0)

    def num_samples(self, rank: int) -> int:
        """Samples of ``rank`` in this plan."""
        if self.order.num_items is None or self.order.whole_batches:
            raise TypeError(f"{self.order.name} does not say how many samples it yields.")
        return self.rule.num_samples(self.remaining or 0, rank)

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank``; numbered by its first item, far apart for the passes of an epoch."""
        # What has changed between two epochs is looked for when the pass begins.
        order, begun = self.order, self._served_after(first_step)
        rank = 0 if order.dealing.is_own else rank
        seen = 0 if self._latest is None else self._latest.drawn
        if self.remaining is None and seen < begun.consumed + self.rule.full:
            # It may end before that: only the steps themselves tell how large the last ones are.
            begun = self._served_after(0)
        else:
            first_step = 0
        noted, earlier = begun.details[order.kind], self._begun.details.get("passes")
        if order.dealing.is_own or (noted and isinstance(noted[0], list)):
            # Those of each rank, where each iterates its own.
            own_rank = detect_topology().rank if order.dealing.is_own else len(noted)
            noted = noted[own_rank] if own_rank < len(noted) and isinstance(noted[own_rank], list) else []
        if self._begun.details.get("changed"):
            order.memory.warn_once(
                f"{order.name}.state_dict() holds something that training changes as well, such as losses. The "
                "checkpoint has it as of an earlier item, and what was changed since is lost: the resume is not exact. "
                f"Leave it out of that state. {order.memory.remedy}",
                once="own state",
            )
        since = self._begun.details.get("since")
        self._latest = walk = SamplerPass(order, self.epoch, begun.cycle, begun.consumed, noted, earlier, since)
        walk.held = self._begun.details.get("held", {})
        if order.is_trained_on and is_noted_here(order) and not {"sequence", "nondeterministic"} & {*order.accept}:
            walk.ahead = self._begun.details.get("ahead") or ()
            if names := self._begun.details.get("set"):
                is_within = self._begun.consumed > 0 and not self._begun.details.get("set_within")
                walk.when_there = partial(warn_of_unset, order, names, is_within=is_within)
        if self._is_listed:
            walk.listed, walk.goes_on = self._length, True
        steps = self._steps(walk, begun.consumed, rank, begun.cycle * _MANY_ITEMS)
        try:
            yield from islice(steps, first_step, None) if first_step else steps
        finally:
            # Dropped where torch would drop the sampler's iterator, though a plan is kept for longer.
            steps.close()
            walk.leave()
            # Behind its last item it may have gone on to another epoch by itself.
            vars(order)["_is_iterated"] = True

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps, with what the latest pass has noted by then."""
        if not self._begun.consumed + steps:
            self.order.memory.compare_epochs(self.order, self.epoch)
        return self._progress_after(steps)

    def _served_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps, with notes of the items alone."""
        begun, remaining, order = self._begun, self.remaining, self.order
        # After 0 steps nothing counts as served, even what drop_last drops here: fewer ranks may still serve it.
        served = steps * self.rule.full if remaining is None or not steps else self.rule.served(remaining, steps)
        details: dict[str, Any] = {order.kind: begun.details.get(order.kind, [])}
        if served and self._latest is not None:
            is_own, index = order.dealing.is_own, begun.consumed + served
            noted = self._latest.noted_by_ranks(index) if is_own else self._latest.noted_before(index)
            details[order.kind] = noted or details[order.kind]
        return replace(begun, consumed=begun.consumed + served, details=details)

    def _progress_after(self, steps: int) -> Progress:
        begun, order, found = self._begun, self.order, self._served_after(steps)
        details = dict(found.details)
        if order.is_trained_on and order.remembers:
            loaded = begun.details.get("passes")
            before = order.memory.passes_before(begun.epoch, begun.cycle)
            is_unread = loaded is not None and self._latest is None
            details["passes"] = loaded if is_unread else before
            since = begun.details.get("since") if is_unread else order.memory.passes_since(begun.epoch, begun.cycle)
            # Only where an evaluation loader shares the sampler.
            details |= {"since": since} if since else {}
        if order.is_trained_on:
            details |= self._details_of_changes(found.consumed - begun.consumed)
            details["items"] = self._noted if found.consumed else None
        return replace(found, details=details)

    def _details_of_changes(self, served: int) -> dict[str, Any]:
        """What a state says of changes of the sampler by something else than its passes, after so many items."""
        begun, order, latest = self._begun, self.order, self._latest
        loaded = begun.details if latest is None else {}
        if not begun.consumed + served:
            # One that is told the epoch may keep it.
            if not order.remembers or order.has_set_epoch:
                return self._set_by_others()
            held = loaded.get("held") or (held_by(order.sampler) if order.memory.is_changed else {})
            return {"held": held} if held else {}
        began = loaded.get("began") if latest is None else next(iter(order.memory.begins_as), "")
        is_changed = latest.is_changed_by_others() if latest is not None and served else begun.details.get("changed")
        ahead = loaded.get("ahead") if latest is None else latest.taken_ahead(begun.consumed + served)
        found = {"began": began, "changed": bool(is_changed), "ahead": ahead, **self._set_by_others()}
        return {name: value for name, value in found.items() if value}

    def _set_by_others(self) -> dict[str, Any]:
        """What hooks have set for a later epoch, or had in the run that is resumed where this has not gone on here."""
        loaded = self._begun.details
        if self._latest is None and loaded.get("set"):
            return {name: loaded[name] for name in ("set", "set_within") if name in loaded}
        found = set_before_effect(self.order)
        is_within = self._latest is not None and is_set_within(self.order, found)
        return {"set": found, **({"set_within": True} if is_within else {})} if found else {}

    def passes_if_unread(self) -> list[list[int]] | None:
        """The passes that a state tells of and the one that it was taken in, if that has not been begun again here."""
        begun, passes = self._begun, self._begun.details.get("passes")
        if type(passes) is not list or not begun.consumed:
            return None
        left = self.remaining or 0
        sees_end = self._is_listed or (self._is_iterated_behind(left) and not self.rule.num_steps(left))
        return [*passes, [begun.epoch, begun.cycle, -1 if sees_end else begun.consumed, 1]]

    def report_after(self, steps: int) -> dict[str, Any]:
        """Items served in the epoch, and how the sampler is brought there, as plain data."""
        begun, order = self.progress_after(steps), self.order
        served = begun.cycle * (self._length or 0) + begun.consumed
        return {order.unit: served, "sampler": {"class": order.name, "resume_mode": order.resume_mode}}

    def repeats(self) -> str:
        """Items that are served twice, in words; empty if none are, or it is known only at the end of the epoch."""
        if self.remaining is None:
            return ""
        return say_repeats(self.rule.num_repeated(self.remaining), self._length or 0, self.order.unit)

    def __getstate__(self) -> dict[str, Any]:
        # A pass cannot be copied; a copy begins one of its own.
        return {**vars(self), "_latest": None}

    def _steps(self, walk: SamplerPass, index: int, rank: int, before: int) -> Generator[tuple[int, Any], None, None]:
        """The batch of ``rank`` step by step, each with the number of its first item, and of those ``before``."""
        rule, shuffles, is_whole = self.rule, self.order.shuffles, self.order.whole_batches
        full, pads, num_replicas = rule.full, rule.pad, rule.num_replicas
        # Of an end that is not announced, other ranks have to know before the last steps begin.
        ahead = 1 if rule.num_replicas == 1 and not rule.exact else 2
        is_first = True
        while True:
            end = self._length
            if not (pads or is_first or end is None):
                # Most steps are alike.
                for items in walk.steps(full, (end - index) // full - 1):
                    items = self._in_order(items, index) if shuffles else items
                    yield before + index + rank, items[rank] if is_whole else items[rank::num_replicas]
                    index += full
            if end is not None and not rule.num_steps(end - index):
                break
            ready = walk.look_ahead(ahead * full if end is None else min(full, end - index))
            if is_first and walk.end is None:
                # Some samplers know their length when a pass has begun.
                end, is_first = self._begun_length(end), False
            left = ready if end is None else end - index
            step = rule.step_size(left)
            if ready < step and (ready := walk.look_ahead(step)) < step:
                self._end_early(index + ready)
                continue
            if not step:
                break
            items = self._in_order(walk.take(step), index)
            if not rule.num_steps(left - step):
                goes_on = end is not None and self._is_iterated_behind(left - step)
                self.order.memory.note_last(self.order, walk, goes_on=goes_on)
                if rule.num_replicas > 1 or walk.listed is not None or (self.order.cuts_samples and step < full):
                    # Lightning iterates a sampler that it deals out to its end, torch one whose last batch is not full.
                    self._look_behind_end(walk, index + step)
            share = _share(items, rank, rule)
            own = [items[offset] for offset in share]
            yield before + index + int(share[0]), own if not is_whole else own[0] if len(own) == 1 else _joined(own)
            index += step
        self._look_behind_end(walk, index)
        if self._length is not None and rule.num_replicas == 1 and self._is_iterated_behind(0):
            yield from self._steps_behind(walk, before + index)

    def _steps_behind(self, walk: SamplerPass, first: int) -> Iterator[tuple[int, Any]]:
        """Steps behind the end that ``len()`` says, which are read and not served; none where the sampler ends there.

        The next epoch of one that goes on with its items begins behind those.
        """
        full, left = self.rule.full, self.read_ahead
        while left and walk.end is None and (step := self.rule.step_size(walk.look_ahead(full))):
            items = walk.take(step)
            yield first, items[0] if self.order.whole_batches else items
            first, left = first + step, left - 1

    def _begun_length(self, before: int | None) -> int | None:
        order, known = self.order, before
        is_cut = order.is_cut or order.facts.counts_down or order.facts.changes_in_len
        if before is not None and not is_cut:
            # Of one that has gone on to the next epoch by now, it is the length of that: more is not missed.
            known = max(before, order.num_items or 0)
            consumed, num_steps = self._begun.consumed, self.rule.num_steps
            if order.is_trained_on and num_steps(known - consumed) > num_steps(max(before - consumed, 0)):
                # Lightning and the loader's workers count on what they were told before.
                warn(
                    f"{order.name} said that epoch {self.epoch} has {before} {order.unit}, and says {known} now that "
                    f"it has begun. The epoch ends after {before}, so that others never come if there are more. "
                    "Let len() say before an epoch how long it will be: make its plan in set_epoch or in "
                    "len(), and not in __iter__, or serve all with DDPSamplerWrapper(sampler, length='unknown')."
                )
        # With ranks of their own they differ from one to the other.
        self._noted = before if known == before and not (is_cut or order.dealing.is_own) else None
        self._fixed = (known,)
        return known

    def _in_order(self, items: list[Any], index: int) -> list[Any]:
        """The items of a step that begins at ``index``, in the order in which ranks take them."""
        order = self.order
        if not order.shuffles:
            return items
        labels = (0, 0) if order.repeats_first_epoch else (self.epoch, self._begun.cycle)
        shuffled = keyed_permutation(len(items), derive_seed("ranks", order.seed, *labels, index))
        return [items[offset] for offset in shuffled.take(np.arange(len(items), dtype=np.int64)).tolist()]

    def _end_early(self, end: int) -> None:
        """The sampler has ended before its length."""
        order = self.order
        if self._length is not None:
            warn(f"{order.name} ended epoch {self.epoch} after {end} {order.unit}, and its len() is {self._length}.")
        self._fixed = (end,)

    @property
    def _is_listed(self) -> bool:
        """Whether Lightning alone would list a sampler that it matters for, as it deals one out of a list."""
        order = self.order
        is_wrapped = order.is_wrapped or isinstance(order.sampler, DistributedSampler)
        can_be_listed = not (order.whole_batches or is_wrapped or order.is_cut or self.rule.exact)
        is_listed = can_be_listed and order.memory.is_listed and order.is_trained_on and order.remembers
        return is_listed and order.num_items is not None

    def _is_iterated_behind(self, left: int) -> bool:
        """Whether the sampler is iterated to its end where the epoch leaves out so many items."""
        # torch draws what it leaves out, too.
        return not (self.order.is_cut or self.rule.exact) and (not left or self.order.cuts_samples)

    def _look_behind_end(self, walk: SamplerPass, index: int) -> None:
        """Let a sampler with a length come to its end, as code behind its last item may count."""
        order, end = self.order, self._length
        left = 0 if end is None else max(end - index, 0)
        if end is None or walk.end is not None or not self._is_iterated_behind(left):
            return
        # A state that is its generator alone begins to count anew.
        is_more = walk.look_ahead(left + 1) > left
        # Nor are they in a Trainer without this package.
        if is_more and not (walk.has_state or order.memory.is_in_trainer):
            warn(
                f"{order.name} yields more than the {end} {order.unit} in epoch {self.epoch} that its len() says, and "
                "these are not served. DDPSamplerWrapper(sampler, length='unknown') serves all of one that ends."
            )


def _share(items: list[Any], rank: int, rule: StepRule) -> list[int]:
    """The offsets of the items of a rank in a step: every so many, as torch's DistributedSampler deals out."""
    if rule.pad or len(items) < rule.num_replicas:
        return [int(offset) % len(items) for offset in rule.share(len(items), rank)]
    return list(range(rank, len(items), rule.num_replicas))


def _joined(batches: Sequence[Any]) -> Any:
    """Whole batches as one, for evaluation, where a rank serves two at the end."""
    if all(isinstance(batch, (list, tuple, np.ndarray, torch.Tensor)) for batch in batches):
        arrays = (np.ndarray, torch.Tensor)
        return [sample for batch in batches for sample in (batch.tolist() if isinstance(batch, arrays) else batch)]
    return reduce(add, batches)
