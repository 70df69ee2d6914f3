"""A user's sampler with its settings: what is known of it, and iterating it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, Literal

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
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.sampler_copies.sampler_copy import SamplerCopy, SamplerParts
from lightning_stateful.sampler_copies.sampler_facts import Dealing, RankDraws, ResumeMode, SamplerFacts
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks, Setting
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.state import accepted_names
from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler

Length = int | Literal["len", "unknown"]
Tail = Literal["split", "pad", "drop"]
TAILS = ("split", "pad", "drop")

_TORCHS_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Parameters of these that decide what they yield.
_PARAMETERS = ("weights", "indices", "num_samples", "replacement", "shuffle", "seed", "drop_last", "batch_size")


@dataclass(frozen=True, eq=False)
class UserSampler:
    """A user's sampler with its settings, of which :class:`WrappedSampler` makes an order.

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
    def facts(self) -> SamplerFacts:
        """The facts that a trial of a copy has shown."""
        raise NotImplementedError

    @property
    def memory(self) -> Any:
        """The passes that were begun over it in this process."""
        raise NotImplementedError

    @property
    def num_items(self) -> int | None:
        """Items of the epoch that it was asked for last; None where that is known only at its end."""
        raise NotImplementedError

    def num_items_in(self, epoch: int, cycle: int = 0) -> int | None:
        """Items of an epoch; None where that is known only at its end."""
        raise NotImplementedError

    def bring_to(self, epoch: int, passes: Any) -> None:
        """Begin the passes before an epoch that a state tells of."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__qualname__

    @property
    def kind(self) -> str:
        """The name under which a state knows such a sequence."""
        return "batch_sampler" if self.whole_batches else "sampler"

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
    def is_cut(self) -> bool:
        """Whether epochs are cut off at a given length."""
        return isinstance(self.length, int)

    @property
    def is_trained_on(self) -> bool:
        """Whether a run may be resumed within it."""
        return not (self.exact or self.repeats_first_epoch)

    @cached_property
    def has_set_epoch(self) -> bool:
        """Whether it, or a sampler in it, is told the epoch."""
        parts = SamplerParts(self.sampler, self.dataset).samplers
        return any(callable(getattr(part, "set_epoch", None)) for part in parts)

    def length_of(self, sampler: Any) -> int | None:
        """Items of an epoch as the sampler, or a copy of it, says now; None where that is known only at its end."""
        if self.length != "len":
            return self.length if isinstance(self.length, int) else None
        try:
            return len(sampler)
        except (TypeError, NotImplementedError):
            return None

    @property
    def dealing(self) -> Dealing:
        """The way its items come to ranks, once :meth:`meet` has found out."""
        found: Dealing = vars(self).get("_dealing") or Dealing()
        return found

    @property
    def resume_mode(self) -> ResumeMode:
        """Way in which a resume brings it to an item; see :data:`RESUME_MODES`."""
        is_own_state = not self.is_known and not self.dealing.is_own and self.facts.leads_back
        return "own_state" if is_own_state else "fast_forward"

    @property
    def remembers(self) -> bool:
        """Whether a resume begins earlier passes again, because what it yields depends on them.

        One with a state of its own is brought by that to an item, and by its passes to the beginning of an epoch.
        """
        return self.facts.remembers or (self.memory.has_changed and not self.facts.is_harmless)

    @property
    def sequence(self) -> str:
        """Digest of the first epoch, of this rank, as it was tried."""
        return str(of_this_rank(self.dealing.begins or self.facts.sequence))

    @property
    def yields_containers(self) -> bool:
        """Whether what it yields may be filled again by it before it is used, and has to be copied."""
        if vars(self).get("_met", (1, 0))[0] == 1 and not self.exact:
            # Nothing is drawn ahead.
            return False
        return self.whole_batches or not (self.is_known or isinstance(self.facts.first, int))

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


def of_this_rank(value: Any) -> Any:
    """A value of a configuration on this rank, of one that may list those of all ranks."""
    return value[min(rank_of_process(), len(value) - 1)] if isinstance(value, list) else value


def rank_of_process() -> int:
    """The rank of this process in its group; 0 without one, where nobody can tell."""
    return detect_topology(2, 0).rank if not torch.distributed.is_initialized() else detect_topology().rank
