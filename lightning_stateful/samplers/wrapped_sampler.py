"""Any sampler or batch sampler that the toolkit has not written, as an order of batches."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, reduce
from itertools import islice
from operator import add
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
from lightning_stateful.core.order import UNKNOWN, Progress, say_repeats
from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.core.steps import StepRule, split_evenly
from lightning_stateful.errors import ConfigurationError, PositionError
from lightning_stateful.samplers.determinism_check import (
    CheckResult,
    ResumeMode,
    check_after_pass,
    check_determinism,
    wrong_length,
)
from lightning_stateful.samplers.fast_forward import FastForward
from lightning_stateful.samplers.rng_isolation import IsolatedCopy
from lightning_stateful.state import accepted_names

# What to say of each resume mode.
RESUME_MODES: dict[ResumeMode, str] = {
    "fast_forward": "is begun anew on a resume and fast-forwarded, by indices alone.",
    "own_state": "keeps its own state, which a resume goes on from.",
}
Length = int | Literal["len", "unknown"]
Tail = Literal["split", "pad", "drop"]
TAILS = ("split", "pad", "drop")

_log = logging.getLogger("lightning_stateful")
# What the numbers of batches are apart from one pass of an epoch to the next.
_MANY_ITEMS = 2**40
_TORCHS_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Options that change how items are dealt out, and not what the sampler yields.
_OF_DEALING = frozenset({"batch_size", "tail", "exact", "shuffles", "is_collated"})


@dataclass(frozen=True, eq=False)
class WrappedSampler:
    """Deals what any sampler yields out to the ranks, and resumes it exactly.

    In every pass a deep copy of the sampler is iterated, so that the user's object stays as it is and an epoch follows
    from (seed, epoch) alone: the copy runs under randomness seeded from these, generators that it holds included,
    is told the epoch where it has ``set_epoch``, and believes that there is one rank. So every rank, and every resumed
    run, sees one and the same sequence of items: samples or whole batches.

    Attributes:
        sampler: Any iterable over an epoch of indices, or of batches of them.
        seed: Chooses its randomness.
        length: Items of an epoch: ``"len"`` for its own ``len()`` if it has one, ``"unknown"`` to find out where
            it ends, or a number after which an epoch is cut off.
        batch_size: Samples in a full batch of one rank; None for a sampler that yields whole batches.
        is_collated: Whether these are certainly batches of indices, of whatever type; else a tuple names one sample.
        tail: What becomes of a last step that is not full: ``"split"`` as evenly as it goes, whole batches sample by
            sample; ``"pad"`` with items of its own; or ``"drop"``.
        exact: For evaluation: never repeat an item unless there are fewer items than ranks.
        shuffles: Whether the items of a step go to ranks in a random order.
        as_one_rank: Whether samplers in it that deal out to ranks are told that there is one rank. Otherwise each rank
            has a sequence of its own, of which a progress keeps no more than a count.
        accept: With ``"nondeterministic"`` in it, a sampler that cannot be repeated is accepted; with ``"sequence"``,
            one that yields something else on a resume.
        dataset: The loader's dataset, which copies share with the sampler.
        repeats_first_epoch: Whether every epoch is the first one again; to overfit on.

    Raises:
        ConfigurationError: It cannot be iterated, or an argument is out of range.
        UnsupportedLoaderError: It deals out to ranks and cannot be told that there is one.
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
    as_one_rank: bool = True
    accept: Collection[str] = ()
    dataset: Any = None
    repeats_first_epoch: bool = False
    version: ClassVar[int] = 1
    carries_over: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ConfigurationError(f"tail must be one of {TAILS}, got {self.tail!r}.")
        if not hasattr(self.sampler, "__iter__"):
            raise ConfigurationError(
                f"{self.name} cannot be iterated; a sampler has __iter__. If it is meant as an order, members are "
                "missing, or it is passed under the wrong name: sampler= takes a SampleOrder (kind, version, __len__, "
                "take, config), batch_sampler= a BatchOrder (kind, version, carries_over, config, plan, convert, "
                "adapted)."
            )
        object.__setattr__(self, "seed", as_int("seed", self.seed))
        object.__setattr__(self, "accept", accepted_names(self.accept))
        if not isinstance(self.length, str):
            object.__setattr__(self, "length", as_int("length", self.length))
        if self.length not in ("len", "unknown") and (isinstance(self.length, str) or self.length < 1):
            raise ConfigurationError(f"length must be at least 1, 'len' or 'unknown', got {self.length!r}.")
        self.num_items  # noqa: B018  # asked now, because a sampler may change

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
    def unit(self) -> str:
        """The unit of items: "batches" or "samples"."""
        return "batches" if self.whole_batches else "samples"

    @property
    def is_known(self) -> bool:
        """Whether it is torch's own, which yields the same again when it is seeded alike."""
        inner = self.sampler
        while type(inner) is BatchSampler:
            inner = inner.sampler
        return type(inner) in _TORCHS_OWN

    @property
    def is_sized(self) -> bool:
        """Whether the length of an epoch is known before its end."""
        return self.num_items is not None

    @property
    def is_cut(self) -> bool:
        """Whether epochs are cut off at a given length."""
        return isinstance(self.length, int)

    @cached_property
    def num_items(self) -> int | None:
        """Items of an epoch; None where that is known only at its end."""
        if self.length != "len":
            return self.length if isinstance(self.length, int) else None
        try:
            return len(self.copied().sampler)
        except (TypeError, NotImplementedError):
            return None

    @property
    def resume_mode(self) -> ResumeMode:
        """Way in which a resume brings it to an item; see :data:`RESUME_MODES`."""
        return self.check().resume_mode

    def check(self) -> CheckResult:
        """Make sure, once, that the sampler yields the same again.

        Returns:
            What was found, ``begins`` and ``first`` among it: the digest of how epoch 0 begins, and its first item.

        Raises:
            UnsupportedLoaderError: It does not, and that is not accepted.
            ConfigurationError: It yields more or fewer items than its ``len``.
        """
        return self._checked

    @cached_property
    def _checked(self) -> CheckResult:
        return CheckResult() if self.is_known else check_determinism(self)

    def check_after_pass(self, ended: IsolatedCopy, epoch: int) -> None:
        """Make sure, once, that a pass leaves alone what copies share; see :func:`check_after_pass`."""
        check_after_pass(self, ended, epoch)

    @cached_property
    def yields_containers(self) -> bool:
        """Whether what it yields may be filled again by it, and has to be copied."""
        return self.whole_batches or not (self.is_known or isinstance(self.check().first, int))

    def copied(self) -> IsolatedCopy:
        """A fresh copy of the sampler, as the user has it now."""
        return IsolatedCopy(
            self.sampler,
            seed=self.seed,
            dataset=self.dataset,
            as_one_rank=self.as_one_rank,
        )

    def config(self) -> dict[str, Any]:
        """The configuration that determines the sequence, as far as can be told, and a digest of its beginning."""
        length = "unknown" if self.num_items is None else self.num_items
        return {
            "seed": self.seed,
            "sampler": {"class": self.name, "resume_mode": self.resume_mode, "length": length},
            "sequence": self.check().begins,
            "drop_last": self.tail == "drop",
        }

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> WrappedEpochPlan:
        """Plan ``epoch``, or the rest of it.

        Raises:
            PositionError: More items were consumed than the epoch has.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        if self.num_items is not None and here.consumed > self.num_items:
            raise PositionError(
                f"{here.consumed} {self.unit} of epoch {epoch} were consumed, but {self.name} yields only "
                f"{self.num_items}. Build it as when the checkpoint was written, or resume from another checkpoint."
            )
        rule = StepRule(
            batch_size=1 if self.batch_size is None else self.batch_size,
            num_replicas=num_replicas,
            drop_last=self.tail == "drop",
            exact=self.exact,
            pad=self.tail == "pad",
        )
        return WrappedEpochPlan(order=self, rule=rule, begun=here)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The same: items are counted alike under any configuration."""
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

    def with_repeats(self) -> WrappedSampler:
        """The same, with samples served twice in place of the two at once that ``exact`` makes of single ones."""
        return self.replaced(exact=False, tail="pad")

    def replaced(self, **options: Any) -> WrappedSampler:
        """The same sampler with other options; it is checked again only where these change what it yields."""
        changed = {name: value for name, value in options.items() if value != getattr(self, name)}
        if not changed:
            return self
        made = replace(self, **changed)
        if "_checked" in vars(self) and _OF_DEALING.issuperset(changed):
            vars(made)["_checked"] = self._checked
        return made


class WrappedEpochPlan:
    """The rest of an epoch of a wrapped sampler, which can only be walked forward.

    Each call of :meth:`batches` walks a fresh copy of the sampler. What the latest walk has noted on its way goes into
    a progress, to be compared on a resume.

    Args:
        order: The sampler.
        rule: How it is cut into steps: each gives every rank ``batch_size`` items. Whole batches that are left at the
            end, fewer than ranks, are split over the ranks sample by sample.
        begun: Where the plan begins.
    """

    def __init__(self, *, order: WrappedSampler, rule: StepRule, begun: Progress) -> None:
        self.order, self.rule, self._begun = order, rule, begun
        self._end = order.num_items
        self._latest: FastForward | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self._begun.epoch

    @property
    def remaining(self) -> int | None:
        """Items left; None until the end of a sampler without ``len`` has been seen."""
        if self._end is None and self._latest is not None:
            self._end = self._latest.end
        return None if self._end is None else max(self._end - self._begun.consumed, 0)

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; :data:`UNKNOWN` until the end of a sampler without ``len`` has been seen."""
        return UNKNOWN if self.remaining is None else self.rule.num_steps(self.remaining)

    @property
    def ends_in_pairs(self) -> bool:
        """Whether what is left at the end is served in one batch with what comes before."""
        order = self.order
        can_be_joined = order.is_sized and (not order.whole_batches or order.is_collated)
        return can_be_joined and self.rule.ends_in_pairs(self.remaining or 0)

    def num_samples(self, rank: int) -> int:
        """Samples of ``rank`` in this plan.

        Raises:
            TypeError: It cannot be known before the epoch is over.
        """
        if not self.order.is_sized or self.order.whole_batches:
            raise TypeError(f"{self.order.name} does not say how many samples it yields.")
        return self.rule.num_samples(self.remaining or 0, rank)

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank``; numbered by its first item, far apart for the passes of an epoch."""
        order, begun = self.order, self.progress_after(first_step)
        seen = 0 if self._latest is None else self._latest.drawn
        if self.remaining is None and seen < begun.consumed + self.rule.full:
            # It may end before that: only the steps themselves tell how large the last ones are.
            begun = self.progress_after(0)
        else:
            first_step = 0
        walk = FastForward(order, self.epoch, begun.cycle, begun.consumed, begun.details[order.kind])
        self._latest = walk
        for first, own in islice(self._steps(walk, begun.consumed, rank), first_step, None):
            yield (
                begun.cycle * _MANY_ITEMS + first,
                own if not order.whole_batches else own[0] if len(own) == 1 else _joined(own),
            )

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps, with what the latest walk has noted by then."""
        begun, remaining, kind = self._begun, self.remaining, self.order.kind
        # After 0 steps nothing counts as served, even what drop_last drops here: fewer ranks may still serve it.
        served = steps * self.rule.full if remaining is None or not steps else self.rule.served(remaining, steps)
        noted: Sequence[Any] = begun.details.get(kind, [])
        if served and self._latest is not None and self.order.as_one_rank:
            noted = self._latest.noted_before(begun.consumed + served) or noted
        return replace(begun, consumed=begun.consumed + served, details={kind: noted})

    def report_after(self, steps: int) -> dict[str, Any]:
        """Items served in the epoch, and how the sampler is brought there, as plain data."""
        begun, order = self.progress_after(steps), self.order
        served = begun.cycle * (order.num_items or 0) + begun.consumed
        return {order.unit: served, "sampler": {"class": order.name, "resume_mode": order.resume_mode}}

    def repeats(self) -> str:
        """Items that are served twice, in words; empty if none are, or it is known only at the end of the epoch."""
        if self.remaining is None or (self.order.whole_batches and not self.rule.pad):
            return ""
        return say_repeats(self.rule.num_repeated(self.remaining), self._end or 0, self.order.unit)

    def __getstate__(self) -> dict[str, Any]:
        # A walk cannot be copied; a copy begins one of its own.
        return {**vars(self), "_latest": None}

    def _steps(self, walk: FastForward, index: int, rank: int) -> Iterator[tuple[int, list[Any]]]:
        """The items of ``rank`` step by step, each with the number of the first."""
        rule, full, end = self.rule, self.rule.full, self.order.num_items
        while True:
            # Of an end that is not announced, the last steps have to know before they begin.
            ready = walk.look_ahead(2 * full if end is None else min(full, end - index))
            left = ready if end is None else end - index
            plain = min(ready // full, rule.num_alike(left))
            if plain:
                items, own = walk.take(plain * full), slice(rank * rule.batch_size, (rank + 1) * rule.batch_size)
                for start in range(0, plain * full, full):
                    yield index + own.start, self._in_order(items[start : start + full], index)[own]
                    index += full
                continue
            if not rule.num_steps(left):
                return
            step = rule.step_size(left)
            ready = walk.look_ahead(step)
            if ready < step:
                raise wrong_length(self.order, f"only {index + ready}", self.epoch)
            items = walk.take(step)
            # Before what may be the last batch that anybody asks for.
            self._check_end(walk, index + step)
            # Parts of one batch have numbers of their own.
            first = rank if self.order.whole_batches else int(rule.share(left, rank)[0])
            yield index + first, self._last_share(items, left, index, rank)
            index += step

    def _last_share(self, items: list[Any], left: int, index: int, rank: int) -> list[Any]:
        """The items of ``rank``, or its part of them, in one of the last steps."""
        rule, ranks = self.rule, self.rule.num_replicas
        if not self.order.whole_batches or rule.pad or len(items) == ranks:
            ordered = self._in_order(items, index)
            return [ordered[offset] for offset in rule.share(left, rank).tolist()]
        if not all(_can_be_split(batch, self.order.is_collated) for batch in items):
            return [self._part_of_objects(items, rank)]
        whole, rest = items[: len(items) // ranks * ranks], items[len(items) // ranks * ranks :]
        # Evaluation serves what is left together with the last full step, which has a batch for each rank.
        own_batch = [whole[rank]] if whole else []
        samples = _joined(rest)
        part = split_evenly(len(samples), ranks, rank)
        share = samples[part.start : part.stop]
        if not share and not own_batch:
            self._log_repeats("samples", len(samples), rank)
            share = [samples[rank % len(samples)]]
        return [*own_batch, share] if share else own_batch

    def _part_of_objects(self, items: list[Any], rank: int) -> Any:
        """The part of ``rank`` of batches that are objects: split if they know how to, as lhotse's do."""
        ranks = self.rule.num_replicas
        if all(map(knows_how_to_split, items)):
            joined = reduce(add, items)
            if len(joined) >= ranks:
                return joined.split(ranks)[rank]
        self._log_repeats("batches", len(items), rank)
        return items[rank % len(items)]

    def _in_order(self, items: list[Any], index: int) -> list[Any]:
        """The items of a step that begins at ``index``, in the order in which ranks take them."""
        order = self.order
        if not order.shuffles:
            return items
        labels = (0, 0) if order.repeats_first_epoch else (self.epoch, self._begun.cycle)
        shuffled = keyed_permutation(len(items), derive_seed("ranks", order.seed, *labels, index))
        return [items[offset] for offset in shuffled.take(np.arange(len(items), dtype=np.int64)).tolist()]

    def _log_repeats(self, what: str, count: int, rank: int) -> None:
        ranks = self.rule.num_replicas
        if rank == ranks - 1:
            left = f"{count} {what} were left for the last step of epoch {self.epoch} on {ranks} ranks"
            _log.warning("%s: %s; %d of them are served twice.", self.order.name, left, ranks - count)

    def _check_end(self, walk: FastForward, index: int) -> None:
        """Make sure, once no step is left, that a sampler with a length ends where it says."""
        order, end = self.order, self.order.num_items
        if end is None or order.is_cut or self.rule.num_steps(end - index):
            return
        found = index + walk.look_ahead(end - index + 1)
        if found != end:
            raise wrong_length(order, f"more than {end}" if found > end else f"only {found}", self.epoch)


def knows_how_to_split(batch: object) -> bool:
    """Whether a batch is an object that can be joined with others and split, as lhotse's are."""
    others = (str, bytes, bytearray, torch.Tensor)
    return not isinstance(batch, others) and all(hasattr(type(batch), name) for name in ("__add__", "__len__", "split"))


def _can_be_split(batch: object, is_collated: bool) -> bool:
    if isinstance(batch, (np.ndarray, torch.Tensor)):
        return batch.ndim > 0
    plain = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    return plain and (is_collated or not isinstance(batch, tuple))


def _joined(batches: Sequence[Any]) -> list[Any]:
    arrays = (np.ndarray, torch.Tensor)
    return [sample for batch in batches for sample in (batch.tolist() if isinstance(batch, arrays) else batch)]
