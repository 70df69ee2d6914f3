"""Any sampler or batch sampler that the toolkit has not written, as an order of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch.utils.data import RandomSampler

from lightning_stateful.core.order import Progress
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.errors import PositionError
from lightning_stateful.generators.rng import OwnRandomness
from lightning_stateful.sampler_copies.sampler_facts import Dealing, ResumeMode, SamplerFacts
from lightning_stateful.sampler_copies.sampler_ranks import told
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.shapes import COUNT, CYCLE, EPOCH, Either
from lightning_stateful.state import value_at
from lightning_stateful.user_samplers.resumed_epoch import AwaitedLength, began_as, check_details
from lightning_stateful.user_samplers.sampler_check import check_sampler, has_own_state, sequence_now
from lightning_stateful.user_samplers.sampler_dealing import deal
from lightning_stateful.user_samplers.sampler_memory import SamplerMemory, memory_of
from lightning_stateful.user_samplers.sampler_pass import STATE_STRIDE
from lightning_stateful.user_samplers.sampler_plan import SamplerEpochPlan
from lightning_stateful.user_samplers.sampler_trial import PATIENCE, asked_once, length_now, length_when_told
from lightning_stateful.user_samplers.user_sampler import UserSampler, of_this_rank, rank_of_process

# What to say of each resume mode.
RESUME_MODES: dict[ResumeMode, str] = {
    "fast_forward": "is begun anew on a resume and fast-forwarded, by indices alone.",
    "own_state": "keeps its own state, which a resume goes on from.",
}
# A note of an item, with a digest of the items before the state or, where each rank iterates its own, one of each rank.
_NOTE = (COUNT, str, object)
_NOTED = Either((), [Either((), _NOTE)], _NOTE, (*_NOTE, Either(None, (COUNT, COUNT, str))))
_PASSES = [(EPOCH, CYCLE, range(-1, COUNT.stop), range(1, COUNT.stop))]
_OF_CHANGES = {"began?": str, "changed?": bool, "held?": {str: str}, "set?": {str: str}, "ahead?": (COUNT, COUNT, str)}
_DETAILS = {"passes?": _PASSES, "since?": _PASSES, "items?": Either(None, COUNT), "set_within?": bool, **_OF_CHANGES}
# Options that change how items are dealt out, and not what the sampler yields.
_OF_DEALING = frozenset({"batch_size", "tail", "exact", "shuffles", "is_collated", "is_dealt_out", "is_wrapped"})


@dataclass(frozen=True, eq=False)
class WrappedSampler(UserSampler):
    """Deals what any sampler yields out to the ranks, and resumes it exactly.

    The user's own object is iterated, as torch would: it sees what is set on it, and remembers what it remembers. It
    runs under randomness that is seeded from (seed, epoch) when a pass begins, generators that it holds included, and
    is told the epoch where it has ``set_epoch``. A copy of it is tried before training, to find out what a resume has
    to do, and whether all ranks have one and the same sequence of items (samples or whole batches). That is dealt out;
    samplers that deal out by themselves are left to it, unless they provably yield together what one rank would.

    Its settings are those of :class:`UserSampler`.

    Raises:
        ConfigurationError: It cannot be iterated, or an argument is out of range.
    """

    version: ClassVar[int] = 2
    carries_over: ClassVar[bool] = False

    @property
    def details_shape(self) -> dict[str, Any]:
        """The shape of a progress's details, see :mod:`~lightning_stateful.shapes`."""
        return {self.kind: _NOTED, **_DETAILS}

    @property
    def is_sized(self) -> bool:
        """Whether the length of an epoch is known before its end."""
        return self.num_items is not None

    @property
    def num_items(self) -> int | None:
        """Items of the epoch that the sampler was asked for last; None where that is known only at its end."""
        epoch, cycle = vars(self).get("_asked_for", (0, 0))
        if self.length == "len" and self.facts.changes_in_len:
            vars(self)["_asked"] = found = asked_once(self, epoch, cycle, vars(self).get("_asked"))
            return found.length
        return length_now(self, epoch, cycle)

    @property
    def resume_note(self) -> str:
        """A sentence on how a resume goes on, and on how items come to ranks."""
        note, why = f"{self.name} {RESUME_MODES[self.resume_mode]}", self.facts.error or "a pass over it changes it"
        if self.remembers:
            note += f" Its earlier passes are begun again as well, because {why}."
        if has_own_state(self) and not self.facts.leads_back and (self.facts.length or STATE_STRIDE) >= STATE_STRIDE:
            note += " Its own state is not used: loaded into a fresh copy, it did not lead to the items that came next."
        if self.facts.seconds > PATIENCE:
            note += f" To try its first epoch before training took {self.facts.seconds:.0f} s."
        if type(self.sampler) is RandomSampler and vars(self).get("_met", (1, 0))[0] > 1:
            note += " What it draws is dealt out, where Lightning deals out the whole dataset."
        if self.whole_batches and callable(getattr(self.sampler, "set_epoch", None)):
            note += " Its set_epoch is called in every epoch, which Lightning does for samplers alone."
        return f"{note} {self.dealing.note}".rstrip()

    @cached_property
    def facts(self) -> SamplerFacts:
        """The facts that a trial of a copy has shown; of torch's own nothing is tried."""
        if self.is_known:
            return SamplerFacts()
        memory, key = self.memory, (self.seed, self.draws, self.length, self.batch_size, self.is_cut_by_torch)
        if memory.passes and key in memory.tried and memory.tried[key].remembers:
            # A loader that is built anew in training has the sampler as its passes have left it.
            return memory.tried[key]
        found = check_sampler(self)
        if not memory.passes:
            memory.tried[key] = found
        return found

    @property
    def memory(self) -> SamplerMemory:
        """The passes that were begun over the sampler in this process."""
        return memory_of(self.sampler, self.dataset)

    def meet(self, num_replicas: int, rank: int, *, is_given: bool = False) -> Dealing:
        """Find out how its items come to ranks; processes of a group do so together."""
        known = vars(self).get("_met")
        if known != (num_replicas, rank):
            vars(self)["_dealing"] = found = deal(self, num_replicas, rank, is_given=is_given)
            vars(self)["_met"] = (num_replicas, rank)
            if found.facts is not None:
                vars(self)["facts"] = found.facts
        return self.dealing

    def config(self) -> dict[str, Any]:
        """The configuration that determines the sequence, as far as can be told, and a digest of the first epoch."""
        num_items, dealing = self.num_items, self.dealing
        described: dict[str, Any] = {"class": self.name}
        if self.is_known:
            with told(dealing.settings):
                described |= self.parameters()
        described["length"] = "unknown" if num_items is None else num_items
        config: dict[str, Any] = {"seed": self.seed, "sampler": described, "drop_last": self.tail == "drop"}
        if dealing.is_own and self.is_dealt_out:
            # Of their own are sequences of a sampler that deals out by itself.
            config["ranks"] = vars(self)["_met"][0]
        return config | {"sequence": "" if "nondeterministic" in self.accept else dealing.begins or self.facts.sequence}

    def changed_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Changes that somebody has made to it since :meth:`config` was taken, by name with dots."""
        if not self.is_trained_on or "nondeterministic" in self.accept:
            return {}
        before = of_this_rank(config["sequence"])
        sequence = before if self.is_known else sequence_now(self, before)
        # A process alone may ask this: the len() of one that calls collectives would wait for the others.
        described = {} if self.facts.calls_collectives else self.config()["sampler"]
        held = {f"sampler.{name}": value for name, value in described.items()} | {"sequence": sequence}
        changed = {name: value for name, value in held.items() if of_this_rank(value_at(config, name)) != value}
        if self.dealing.is_own and changed.get("sequence", "changed") != "changed":
            # Each rank has its own.
            changed["sequence"] = f"{rank_of_process()} {sequence}"
        length = changed.get("sampler.length")
        follows = type(length) is int and self.remembers and self.memory.follows(self, length, self.length_of)
        if follows or self.facts.changes_in_len:
            changed.pop("sampler.length", None)
        return changed

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> SamplerEpochPlan:
        """Plan ``epoch``, or the rest of it."""
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        check_details(self, here)
        if vars(self).get("_met", (1, 0))[0] != num_replicas:
            self.meet(num_replicas, detect_topology(num_replicas).rank if num_replicas == 1 else rank_of_process())
        ranks = 1 if self.dealing.is_own else num_replicas
        if progress is not None and progress.epoch < epoch:
            # Other loaders may have gone on in that epoch, in which this one had nothing left.
            plan = SamplerEpochPlan(order=self, num_replicas=ranks, begun=progress)
            self.bring_to(epoch, plan.passes_if_unread())
        if here.consumed:
            self.bring_to(epoch, here.details.get("passes"))
            num_items = self.num_items_in(epoch)
            if num_items is not None and here.consumed > num_items:
                raise PositionError(
                    f"{here.consumed} {self.unit} of epoch {epoch} were consumed, but {self.name} yields only "
                    f"{num_items}. Build it as when the checkpoint was written, or resume from another checkpoint."
                )
        made = SamplerEpochPlan(order=self, num_replicas=ranks, begun=here)
        if here.consumed and self.is_trained_on and self.remembers and made.remaining and made.num_steps:
            self.memory.await_training(epoch)
        return made

    def bring_to(self, epoch: int, passes: Any) -> None:
        """Begin the passes before an epoch that a state tells of."""
        if type(passes) is not list or not self.is_trained_on:
            return
        if len(self.memory.passes) < sum(count for *_, count in passes):
            self.memory.begin_again(self, epoch, passes)

    def num_items_in(self, epoch: int, cycle: int = 0) -> int | None:
        """Items of an epoch, by the ``len()`` of a sampler that is told the epoch; None where it has none."""
        found, awaited = self._num_items_in(epoch, cycle), vars(self).get("_awaited")
        return found if awaited is None or awaited.epoch != epoch else int(awaited.num_items)

    def _num_items_in(self, epoch: int, cycle: int) -> int | None:
        told_epoch = 0 if self.repeats_first_epoch else epoch
        if self.length == "len" and self.has_set_epoch:
            if self.facts.remembers_told or self.facts.hands_epoch_on:
                # It is told when the epoch begins.
                return length_when_told(self, told_epoch, cycle)
            is_iterated, of = vars(self).pop("_is_iterated", False), vars(self).get("_asked_for", (0, 0))[0]
            if (is_iterated or of != told_epoch) and not self.facts.changes_in_len:
                self._tell(told_epoch)
        vars(self)["_asked_for"] = told_epoch, 0 if self.repeats_first_epoch else cycle
        return self.num_items

    def await_length(self, state: Mapping[str, Any], config: Mapping[str, Any], of_ended: int | None = None) -> None:
        """Take an epoch to be as a state says until :meth:`end_awaiting`; see ``began_as``, ``AwaitedLength.of``."""
        vars(self)["_awaited"] = AwaitedLength.of(self, state, config, of_ended) if self.is_trained_on else None
        self.memory.begins_as = began_as(state, config) if self.is_trained_on else ()

    def end_awaiting(self) -> None:
        """Ask the sampler itself from now on, and see that it is as long as it was; see :class:`AwaitedLength`."""
        awaited = vars(self).pop("_awaited", None)
        if awaited is not None:
            awaited.compare(self, self.num_items_in(awaited.epoch))

    def hand_epoch_on(self, epoch: int) -> None:
        """Tell a sampler that tells its dataset, before workers get copies of that."""
        if self.facts.hands_epoch_on:
            self._tell(0 if self.repeats_first_epoch else epoch)

    def _tell(self, epoch: int) -> None:
        with OwnRandomness(derive_seed("sampler", self.seed, epoch, 0)):
            self.memory.tell_epoch(self, epoch)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The same: items are counted alike under any configuration."""
        self.memory.note_accepted(self, progress, saved.get("sequence"), self.config()["sequence"])
        return progress

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> WrappedSampler:
        """The same batches for another use; see :class:`~lightning_stateful.core.order.BatchOrder`."""
        repeats = self.repeats_first_epoch or not shuffle
        return self.replaced(seed=loader_seed(self.seed, path), exact=self.exact or exact, repeats_first_epoch=repeats)

    def singly(self) -> WrappedSampler:
        """The same samples, one a step on each rank, for code that iterates the sampler by hand."""
        made = self.replaced(batch_size=1, tail="pad")
        vars(made).update({name: value for name, value in vars(self).items() if name in ("_met", "_dealing")})
        return made

    def with_repeats(self) -> WrappedSampler:
        """The same, with samples served twice in place of the two at once that ``exact`` makes of single ones."""
        return self.replaced(exact=False, tail="pad")

    def replaced(self, **options: Any) -> WrappedSampler:
        """The same sampler with other options; it is tried again only where these change what it yields."""
        changed = {name: value for name, value in options.items() if value != getattr(self, name)}
        if not changed:
            return self
        made = replace(self, **changed)
        if "facts" in vars(self) and _OF_DEALING.issuperset(changed):
            vars(made)["facts"] = self.facts
        return made
