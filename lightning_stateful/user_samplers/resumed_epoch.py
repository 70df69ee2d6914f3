"""The epoch of a user's sampler that a resume goes on within: what a state says of it, and how many items it has.

A length may follow from what hooks set, and these are called behind the state is loaded. Until they are over, the epoch
is taken to be as long as it was in the run that wrote the state. What the sampler yields may follow from what training
writes: then an epoch that is begun again may go on otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stateful.core.order import Progress
from lightning_stateful.errors import PositionError, some_of
from lightning_stateful.generators.attributes import methods_of, names_in
from lightning_stateful.sampler_copies.sampler_copy import digest_of_contents
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.shapes import refuse_unless
from lightning_stateful.state import value_at
from lightning_stateful.user_samplers.sampler_check import sequence_now
from lightning_stateful.user_samplers.sampler_pass import SamplerPass, warn
from lightning_stateful.user_samplers.sampler_trial import held_by, reads_training
from lightning_stateful.user_samplers.user_sampler import UserSampler

_log = logging.getLogger("lightning.pytorch.lightning_stateful")

# The name of the length in a configuration, and in its changes.
_LENGTH = "sampler.length"
_REMEDY = "set again what its len() follows from: under a Trainer in load_state_dict or on_train_start."


@dataclass(frozen=True)
class AwaitedLength:
    """The items of an epoch that a resume goes on in, until the sampler is asked itself.

    They are certain where the run that wrote the state has noted them as the epoch began.
    """

    epoch: int
    consumed: int
    num_items: int
    is_noted: bool

    @classmethod
    def of(
        cls, order: UserSampler, state: Mapping[str, Any], config: Mapping[str, Any], of_ended: int | None = None
    ) -> AwaitedLength | None:
        """What a state says of the length of its epoch, or of the epoch ``of_ended``; None where others decide."""
        progress, facts = state["progress"], order.facts
        epoch, consumed, noted = (progress.get(name) for name in ("epoch", "consumed", "items"))
        follows = facts.changes_in_len or facts.draws_in_len or facts.counts_down or order.num_items is None
        if follows or value_at(state["config"], _LENGTH) != value_at(config, _LENGTH):
            return None
        if of_ended is not None:
            epoch, consumed, noted = of_ended, 0, None
        if order.has_set_epoch and not consumed:
            # The state may say that of another epoch.
            return None
        said = state.get("changed", {}).get(_LENGTH) if noted is None else noted
        # A hook may have set that of the next epoch before the state was taken.
        is_whole = all(type(number) is int for number in (epoch, consumed, said))
        return cls(epoch, consumed, said, noted is not None) if is_whole and said >= consumed else None

    def compare(self, order: UserSampler, num_items: int | None) -> None:
        """Compare the length with that which the sampler says when all hooks are over that may restore it."""
        if num_items is None or num_items == self.num_items:
            return
        if num_items < self.consumed:
            raise PositionError(
                f"{self.consumed} {order.unit} of epoch {self.epoch} were consumed, but {order.name} yields only "
                f"{num_items} when training begins. In the run that wrote the checkpoint the epoch had "
                f"{self.num_items}. Before the first batch, {_REMEDY}"
            )
        if self.is_noted:
            warn(
                f"{order.name} has {num_items} {order.unit} in epoch {self.epoch} here, as its len() says when "
                f"training begins. In the run that wrote the checkpoint the epoch had {self.num_items}, so the resume "
                f"is not exact. Before the first batch, {_REMEDY}"
            )


def began_as(state: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Digests of the first epoch of a sampler that the epoch of a state may be begun with; none if none is known.

    It is that of when the epoch began; and that of the sampler as it is built, where another warning speaks of that.
    """
    progress, when_saved = state["progress"], state.get("changed", {}).get("sequence")
    # Before training had changed it, it was as built.
    began = progress.get("began") or (value_at(state["config"], "sequence") if when_saved else None)
    if not progress.get("consumed") or not isinstance(began, str):
        return ()
    return (began, config["sequence"]) if when_saved not in (None, config["sequence"]) else (began,)


def begins_as(order: UserSampler, begun: SamplerPass, *, is_changed: bool) -> tuple[str, ...]:
    """Digest of the first epoch of a sampler as it is when a pass begins; none of one that training does not change.

    Warns where an epoch is begun again that was begun when the sampler would have yielded something else.
    """
    before: tuple[str, ...] = order.memory.begins_as
    if order.is_known or not order.is_trained_on:
        return before
    if not (before or is_changed or reads_training(order) or _holds_epoch(order, begun.label[0])):
        return before
    now = sequence_now(order, order.sequence)
    if begun.is_within and before and now not in before and is_noted_here(order):
        warn(
            f"{order.name} goes on with an epoch that was begun when it would have yielded something else than it does "
            "here: it follows from what training changes, such as losses, weights or a count of steps. A resume within "
            "an epoch begins it again, so what is left of the epoch may not be what was left, and the resume is not "
            "exact. Save what the epoch is begun with, and restore that before the first batch; or give the sampler "
            "state_dict and load_state_dict, of its plan and position alone."
        )
    return (now,)


def _holds_epoch(order: UserSampler, epoch: int) -> bool:
    """Whether hooks have set the number of the epoch on a sampler that is not told it, and nothing else."""
    if order.has_set_epoch or not epoch:
        return False
    begun, at_first = (digest_of_contents(order.sampler, order.dataset, epoch=number) for number in (epoch, 0))
    return begun == order.facts.contents != at_first


def is_noted_here(order: UserSampler) -> bool:
    """Whether a state holds digests of this rank's sampler: rank 0 writes it, and ranks may have their own."""
    return not (order.dealing.is_own and detect_topology().rank)


# Epochs of a fit before this one, at most.
_MOST_OF_OTHERS = 2**12


def warn_of_others(order: UserSampler, held: Mapping[str, str]) -> None:
    """Warn of attributes that differ from :func:`held_by` before the stop, though its passes have been begun again."""
    if not is_noted_here(order):
        return
    now = held_by(order.sampler)
    if others := sorted(name for name, was in held.items() if now.get(name, was) != was):
        warn(
            f"{some_of([f'{order.name}.{name}' for name in others])} had been changed by something else than passes of "
            "the sampler when the checkpoint was written, and is another here: the resume is not exact if what it "
            f"yields depends on that. {order.memory.remedy}"
        )


def set_before_effect(order: UserSampler) -> dict[str, str]:
    """Digests of attributes that a hook has set on a sampler, and that may matter only in a later epoch.

    They are those that neither its passes nor ``set_epoch`` change, and that are others than as built, of a sampler
    that begins as it did. Of one that does not more is compared.
    """
    built = order.facts.left_alone if order.is_trained_on and "nondeterministic" not in order.accept else {}
    now = held_by(order.sampler, order.dataset) if built and not order.facts.remembers else {}
    changed = {name: now[name] for name, was in built.items() if now.get(name, was) != was}
    return changed if changed and sequence_now(order, order.sequence) == order.sequence else {}


def is_set_within(order: UserSampler, names: Mapping[str, str]) -> bool:
    """Whether one of the attributes that :func:`set_before_effect` gave was another when the latest pass began."""
    return any(order.memory.held.get(name, now) != now for name, now in names.items())


def warn_of_unset(order: UserSampler, names: Collection[str], *, is_within: bool) -> None:
    """Tell of attributes that a hook had set before a stop, and that are as built where the epoch is begun here.

    Within an epoch, of which none was set since it began (``is_within``), it is said in the log: a hook that sets them
    as an epoch starts comes again. So it is of those that no method of the sampler names.

    Warns:
        StatefulWarning: An epoch begins, or one was set within it, and a method names one.
    """
    built = order.facts.left_alone
    now = held_by(order.sampler, order.dataset) if built.keys() & names else {}
    left = sorted(name for name in names if name in now and now[name] == built.get(name))
    if not left:
        return
    named = {one for method in methods_of(order.sampler) for one in names_in(method.__code__)}
    is_named = any("." in name or name in named for name in left)
    # A variable of a module has a dot.
    said = [name if "." in name else f"{order.name}.{name}" for name in left]
    text = (
        f"{some_of(said)} had been set in training when the checkpoint was "
        "written, and is as it was built here. If what it yields in a later epoch depends on that, and no hook sets it "
        f"again as an epoch starts, the resume is not exact. {order.memory.remedy}"
    )
    warn(text) if is_named and not is_within else _log.info(text)


def check_details(order: UserSampler, here: Progress) -> None:
    """Refuse notes of items behind a progress, a state where the sampler takes none, and too many passes."""
    noted, path = here.details.get(order.kind) or [], f"progress.{order.kind}"
    if noted and not isinstance(noted[0], list):
        behind = max([noted[0] + 1, *((noted[3:] or [None])[0] or [])[:2]])
        refuse_unless(behind <= here.consumed, noted, f"notes of items before {here.consumed}", path)
        takes = noted[2] is None or callable(getattr(order.sampler, "load_state_dict", None))
        refuse_unless(takes, noted[2], f"None, as {order.name} has no load_state_dict", f"{path}[2]")
    for number, (_, _, _, count) in enumerate(here.details.get("passes") or ()):
        # A fit before this one in the same process may have had later epochs.
        is_number = count <= max(here.epoch + 1, _MOST_OF_OTHERS)
        refuse_unless(is_number, count, "a number of earlier passes", f"progress.passes[{number}][3]")
