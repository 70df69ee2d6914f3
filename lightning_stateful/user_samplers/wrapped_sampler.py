"""Any sampler or batch sampler that the toolkit has not written, as an order of batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import Progress
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.rng import OwnRandomness
from lightning_stateful.sampler_copies.sampler_copy import SamplerCopy, SamplerParts
from lightning_stateful.sampler_copies.sampler_facts import Dealing, RankDraws, ResumeMode, SamplerFacts
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks, Setting, told
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.shapes import COUNT, CYCLE, EPOCH, Either
from lightning_stateful.state import accepted_names, value_at
from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler
from lightning_stateful.user_samplers.resumed_epoch import AwaitedLength, began_as, check_details, refuse_beyond
from lightning_stateful.user_samplers.sampler_check import check_sampler, has_own_state, sequence_now
from lightning_stateful.user_samplers.sampler_dealing import deal
from lightning_stateful.user_samplers.sampler_memory import SamplerMemory, memory_of
from lightning_stateful.user_samplers.sampler_pass import STATE_STRIDE
from lightning_stateful.user_samplers.sampler_plan import SamplerEpochPlan
from lightning_stateful.user_samplers.sampler_trial import PATIENCE, asked_once, length_now, length_when_told

# What to say of each resume mode.
RESUME_MODES: dict[ResumeMode, str] = {
    "fast_forward": "is begun anew on a resume and fast-forwarded, by indices alone.",
    "own_state": "keeps its own state, which a resume goes on from.",
}
Length = int | Literal["len", "unknown"]
Tail = Literal["split", "pad", "drop"]
TAILS = ("split", "pad", "drop")

_TORCHS_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Parameters of these that decide what they yield.
_PARAMETERS = ("weights", "indices", "num_samples", "replacement", "shuffle", "seed", "drop_last", "batch_size")
# A note of an item, with a digest of the items before the state or, where each rank iterates its own, one of each rank.
_NOTE = (COUNT, str, object)
_NOTED = Either((), [Either((), _NOTE)], _NOTE, (*_NOTE, Either(None, (COUNT, COUNT, str))))
_PASSES = [(EPOCH, CYCLE, range(-1, COUNT.stop), range(1, COUNT.stop))]
_OF_CHANGES = {"began?": str, "changed?": bool, "held?": {str: str}, "set?": {str: str}, "ahead?": (COUNT, COUNT, str)}
_DETAILS = {"passes?": _PASSES, "since?": _PASSES, "items?": Either(None, COUNT), "set_within?": bool, **_OF_CHANGES}
# Options that change how items are dealt out, and not what the sampler yields.
_OF_DEALING = frozenset({"batch_size", "tail", "exact", "shuffles", "is_collated", "is_dealt_out", "is_wrapped"})


@dataclass(frozen=True, eq=False)
class WrappedSampler:
    """Deals what any sampler yields out to the ranks, and resumes it exactly.

    The user's own object is iterated, as torch would: it sees what is set on it, and remembers what it remembers. It
    runs under randomness that is seeded from (seed, epoch) when a pass begins, generators that it holds included, and
    is told the epoch where it has ``set_epoch``. A copy of it is tried before training, to find out what a resume has
    to do, and whether all ranks have one and the same sequence of items (samples or whole batches). That is dealt out;
    samplers that deal out by themselves are left to it, unless they provably yield together what one rank would.

    Attributes:
        sampler: Any iterable over an epoch of indices, or of batches of them.
        seed: Chooses its randomness.
        length: Items of an epoch: ``"len"`` for its own ``len()`` if it has one, ``"unknown"`` to find out where
            it ends, or a number after which an epoch is cut off.
        batch_size: Samples in a full batch of one rank; None for a sampler that yields whole batches.
        is_collated: Whether these are certainly batches of indices, of whatever type; else a tuple names one sample.
        tail: What becomes of a last step that is not full: samples are ``"split"`` as evenly as it goes, while whole
            batches, which are never cut, are repeated; ``"pad"`` with items of its own; or ``"drop"``.
        exact: For evaluation: never repeat an item unless there are fewer items than ranks.
        shuffles: Whether the items of a step go to ranks in a random order.
        is_dealt_out: Whether ranks share one sequence. Otherwise each rank iterates its own.
        is_wrapped: Whether the user asks to have it dealt out, whatever ranks it was built for.
        is_cut_by_torch: Whether torch's BatchSampler would cut its samples into batches.
        accept: ``"nondeterministic"``: cannot be repeated; ``"sequence"``: may yield something else on a resume.
        dataset: The loader's dataset, which copies share with the sampler.
        repeats_first_epoch: Whether every epoch is the first one again; to overfit on.
        draws: What each rank draws for itself, where it iterates its own; None for nothing.

    Raises:
        ConfigurationError: It cannot be iterated, or an argument is out of range.
    """

    sampler: Any
    _: KW_ONLY
    seed: int = 0
    length: Length = "len"
    batch_size: int | None = 1
    is_collated: bool = False
    tail: Tail = "split"
    exact: bool = False
    shuffles: bool = False
    is_dealt_out: bool = True
    is_wrapped: bool = False
    is_cut_by_torch: bool = False
    accept: Collection[str] = ()
    dataset: Any = None
    repeats_first_epoch: bool = False
    draws: RankDraws | None = None
    version: ClassVar[int] = 2
    carries_over: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ConfigurationError(f"tail must be one of {TAILS}, got {self.tail!r}.")
        if not hasattr(type(self.sampler), "__iter__") and not hasattr(type(self.sampler), "__getitem__"):
            raise ConfigurationError(
                f"{self.name} cannot be iterated; a sampler has __iter__ or __getitem__. If it is meant as an order, "
                "members are missing, or it is passed under the wrong name: sampler= takes a SampleOrder (kind, "
                "version, __len__, take, config), batch_sampler= a BatchOrder (kind, version, carries_over, config, "
                "plan, convert, adapted)."
            )
        object.__setattr__(self, "seed", as_int("seed", self.seed))
        object.__setattr__(self, "accept", accepted_names(self.accept))
        if not isinstance(self.length, str):
            object.__setattr__(self, "length", as_int("length", self.length))
        if self.length not in ("len", "unknown") and (isinstance(self.length, str) or self.length < 1):
            raise ConfigurationError(f"length must be at least 1, 'len' or 'unknown', got {self.length!r}.")
        self.memory  # noqa: B018  # begins before anybody iterates the sampler

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__qualname__

    @property
    def kind(self) -> str:
        """The name under which a state knows such a sequence."""
        return "batch_sampler" if self.whole_batches else "sampler"

    @property
    def details_shape(self) -> dict[str, Any]:
        """The shape of a progress's details, see :mod:`~lightning_stateful.shapes`."""
        return {self.kind: _NOTED, **_DETAILS}

    @property
    def whole_batches(self) -> bool:
        """Whether its items are whole batches."""
        return self.batch_size is None

    @property
    def cuts_samples(self) -> bool:
        """Whether its samples are cut into batches by torch's own BatchSampler."""
        return self.is_cut_by_torch and not (self.whole_batches or self.is_wrapped)

    @property
    def unit(self) -> str:
        """The unit of items: "batches" or "samples"."""
        return "batches" if self.whole_batches else "samples"

    @property
    def innermost(self) -> Any:
        """The sampler of whose samples torch's own batch samplers make batches."""
        inner = self.sampler
        while type(inner) is BatchSampler:
            inner = inner.sampler
        return inner

    @property
    def is_known(self) -> bool:
        """Whether it is torch's own, which yields the same again when it is seeded alike."""
        return type(self.innermost) in _TORCHS_OWN

    @property
    def is_sized(self) -> bool:
        """Whether the length of an epoch is known before its end."""
        return self.num_items is not None

    @property
    def is_cut(self) -> bool:
        """Whether epochs are cut off at a given length."""
        return isinstance(self.length, int)

    @property
    def num_items(self) -> int | None:
        """Items of the epoch that the sampler was asked for last; None where that is known only at its end."""
        epoch, cycle = vars(self).get("_asked_for", (0, 0))
        if self.length == "len" and self.facts.changes_in_len:
            vars(self)["_asked"] = found = asked_once(self, epoch, cycle, vars(self).get("_asked"))
            return found.length
        return length_now(self, epoch, cycle)

    def length_of(self, sampler: Any) -> int | None:
        """Items of an epoch as the sampler, or a copy of it, says now; None where that is known only at its end."""
        if self.length != "len":
            return self.length if isinstance(self.length, int) else None
        try:
            return len(sampler)
        except (TypeError, NotImplementedError):
            return None

    @cached_property
    def has_set_epoch(self) -> bool:
        """Whether it, or a sampler in it, is told the epoch."""
        parts = SamplerParts(self.sampler, self.dataset).samplers
        return any(callable(getattr(part, "set_epoch", None)) for part in parts)

    @property
    def is_trained_on(self) -> bool:
        """Whether a run may be resumed within it."""
        return not (self.exact or self.repeats_first_epoch)

    @property
    def resume_mode(self) -> ResumeMode:
        """Way in which a resume brings it to an item; see :data:`RESUME_MODES`."""
        is_own_state = not self.is_known and not self.dealing.is_own and self.facts.leads_back
        return "own_state" if is_own_state else "fast_forward"

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

    @property
    def remembers(self) -> bool:
        """Whether a resume begins earlier passes again, because what it yields depends on them.

        One with a state of its own is brought by that to an item, and by its passes to the beginning of an epoch.
        """
        return self.facts.remembers or (self.memory.has_changed and not self.facts.is_harmless)

    @cached_property
    def facts(self) -> SamplerFacts:
        """The facts that a trial of a copy has shown; of torch's own nothing is tried.

        Raises:
            UnsupportedLoaderError: It cannot be tried without a trace.
            ConfigurationError: It yields more or fewer items than its ``len``.
        """
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
    def dealing(self) -> Dealing:
        """The way its items come to ranks, once :meth:`meet` has found out."""
        found: Dealing = vars(self).get("_dealing") or Dealing()
        return found

    @property
    def memory(self) -> SamplerMemory:
        """The passes that were begun over the sampler in this process."""
        return memory_of(self.sampler, self.dataset)

    def meet(self, num_replicas: int, rank: int, *, is_given: bool = False) -> Dealing:
        """Find out how its items come to ranks; processes of a group do so together.

        Raises:
            RankMismatchError: The ranks cannot share them.
        """
        known = vars(self).get("_met")
        if known != (num_replicas, rank):
            vars(self)["_dealing"] = found = deal(self, num_replicas, rank, is_given=is_given)
            vars(self)["_met"] = (num_replicas, rank)
            if found.facts is not None:
                vars(self)["facts"] = found.facts
        return self.dealing

    @property
    def yields_containers(self) -> bool:
        """Whether what it yields may be filled again by it before it is used, and has to be copied."""
        if vars(self).get("_met", (1, 0))[0] == 1 and not self.exact:
            # Nothing is drawn ahead.
            return False
        return self.whole_batches or not (self.is_known or isinstance(self.facts.first, int))

    def copied(self) -> SamplerCopy:
        """A fresh copy of the sampler, as the user has it now."""
        return SamplerCopy(self.sampler, self.dataset)

    def iterated(self) -> IteratedSampler:
        """The sampler itself, to be iterated."""
        asked = AskedRanks(1, 0) if self.dealing.answers else None
        # To overfit on its first epoch, one that changes itself begins as often with a copy.
        repeats = self.repeats_first_epoch and self.facts.remembers and not self.facts.is_harmless
        sampler, settings = self.copied().sampler if repeats else self.sampler, self.dealing.settings
        return self.iterating(sampler, settings, asked)

    def iterating(
        self, sampler: Any, settings: Sequence[Setting] = (), asked: AskedRanks | None = None
    ) -> IteratedSampler:
        """The sampler, or a copy of it, to be iterated under the randomness of epochs."""
        return IteratedSampler(
            sampler,
            self.seed,
            dataset=self.dataset,
            settings=settings,
            asked=asked,
            generators=self.memory.generators,
            outside=() if self.is_known else self.memory.generators_outside(self.sampler, self.dataset),
            tell=partial(self.memory.tell_epoch, self) if sampler is self.sampler else None,
            draws=self.dealing.draws or self.draws,
        )

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

    @property
    def sequence(self) -> str:
        """Digest of the first epoch, of this rank, as it was tried."""
        return str(_of_this_rank(self.dealing.begins or self.facts.sequence))

    def changed_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Changes that somebody has made to it since :meth:`config` was taken, by name with dots."""
        if not self.is_trained_on or "nondeterministic" in self.accept:
            return {}
        before = _of_this_rank(config["sequence"])
        sequence = before if self.is_known else sequence_now(self, before)
        # A process alone may ask this: the len() of one that calls collectives would wait for the others.
        described = {} if self.facts.calls_collectives else self.config()["sampler"]
        held = {f"sampler.{name}": value for name, value in described.items()} | {"sequence": sequence}
        changed = {name: value for name, value in held.items() if _of_this_rank(value_at(config, name)) != value}
        if self.dealing.is_own and changed.get("sequence", "changed") != "changed":
            # Each rank has its own.
            changed["sequence"] = f"{_rank_of_process()} {sequence}"
        length = changed.get("sampler.length")
        follows = type(length) is int and self.remembers and self.memory.follows(self, length, self.length_of)
        if follows or self.facts.changes_in_len:
            changed.pop("sampler.length", None)
        return changed

    def parameters(self) -> dict[str, Any]:
        """The parameters of torch's own samplers, long ones as digests."""
        found, inner = {}, self.sampler
        while inner is not None:
            for name in _PARAMETERS:
                value = vars(inner).get(name)
                if isinstance(value, (torch.Tensor, np.ndarray, list, tuple, range)):
                    array = np.ascontiguousarray(np.asarray(value))
                    value = digest(array.tolist() if array.dtype.kind == "O" else array.tobytes())
                if isinstance(value, (bool, int, str)):
                    found[name] = value
            inner = inner.sampler if type(inner) is BatchSampler else None
        return found

    def rule(self, num_replicas: int) -> StepRule:
        """The rule by which its items are cut into steps of so many ranks."""
        return StepRule(
            batch_size=1 if self.batch_size is None else self.batch_size,
            num_replicas=num_replicas,
            drop_last=self.tail == "drop",
            exact=self.exact,
            pad=self.tail == "pad",
        )

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> SamplerEpochPlan:
        """Plan ``epoch``, or the rest of it.

        Raises:
            PositionError: More items were consumed than the epoch has.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        check_details(self, here)
        if vars(self).get("_met", (1, 0))[0] != num_replicas:
            self.meet(num_replicas, detect_topology(num_replicas).rank if num_replicas == 1 else _rank_of_process())
        ranks = 1 if self.dealing.is_own else num_replicas
        if progress is not None and progress.epoch < epoch:
            # Other loaders may have gone on in that epoch, in which this one had nothing left.
            plan = SamplerEpochPlan(order=self, num_replicas=ranks, begun=progress)
            self.bring_to(epoch, plan.passes_if_unread())
        if here.consumed:
            self.bring_to(epoch, here.details.get("passes"))
            refuse_beyond(self, here, self.num_items_in(epoch))
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
        """The same batches for another use; see :class:`~lightning_stateful.core.order.BatchOrder`.

        Args:
            path: The place of its loader among several.
            exact: Never repeat an item.
            shuffle: False for the first epoch over and over.
        """
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


def _of_this_rank(value: Any) -> Any:
    """A value of a configuration on this rank, of one that may list those of all ranks."""
    return value[min(_rank_of_process(), len(value) - 1)] if isinstance(value, list) else value


def _rank_of_process() -> int:
    """The rank of this process in its group; 0 without one, where nobody can tell."""
    return detect_topology(2, 0).rank if not torch.distributed.is_initialized() else detect_topology().rank
