"""Checks, before anything is trained, that a wrapped sampler yields the same sequence again."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from lightning_stateful.core.order import UNKNOWN
from lightning_stateful.errors import ConfigurationError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.samplers.fast_forward import STATE_STRIDE, digest
from lightning_stateful.samplers.rng_isolation import IsolatedCopy

if TYPE_CHECKING:
    from lightning_stateful.samplers.wrapped_sampler import WrappedSampler

ResumeMode = Literal["fast_forward", "own_state"]

# Items at the beginning of an epoch that are compared, epochs in which one may chance to begin like another, and items
# after which a sampler is not followed further. All ranks count items, so that they come to the same verdict.
_COMPARED, _EPOCHS, _FOLLOWED = 64, 8, 4096


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """Result of :func:`check_determinism`.

    Attributes:
        begins: Digest of how epoch 0 begins, equal on all ranks and in a resumed run; empty of torch's own samplers,
            which are not looked at, and where no two runs are alike.
        first: The first item of epoch 0, or None.
        resume_mode: How the sampler is brought to an item.
        is_repeatable: Whether two runs are alike.
        has_ended: Whether the end of a pass was looked at, too.
    """

    begins: str = ""
    first: Any = None
    resume_mode: ResumeMode = "fast_forward"
    is_repeatable: bool = True
    has_ended: bool = False


def check_determinism(order: WrappedSampler) -> CheckResult:
    """Let fresh copies of a sampler begin epoch 0, and follow one of them to its end or for some thousand items.

    Raises:
        UnsupportedLoaderError: It does not yield the same again, counts its epochs by itself or draws in a thread, and
            that is not accepted.
        ConfigurationError: It yields more or fewer items than its ``len``.
    """
    followed, other = order.copied(), order.copied()
    whole = _begin(order, followed, to_the_end=True)
    is_alike = _begin(order, other).digests == whole.digests
    mode: ResumeMode = "own_state" if has_own_state(order) else "fast_forward"
    if not is_alike or _counts_epochs(order, whole, followed, other):
        if "nondeterministic" not in order.accept:
            raise UnsupportedLoaderError(order.name + (_COUNTS_EPOCHS if is_alike else _DIFFERS))
        return CheckResult(first=whole.first, resume_mode=mode, is_repeatable=False)
    if order.num_items is not None and whole.length is not None:
        most = UNKNOWN if order.is_cut else order.num_items
        if not order.num_items <= whole.length <= most:
            raise wrong_length(order, whole.length, 0)
    if mode == "own_state" and len(whole.digests) > STATE_STRIDE and not _state_leads_back(order):
        mode = "fast_forward"
    return CheckResult(begins=digest(whole.digests), first=whole.first, resume_mode=mode)


def check_after_pass(order: WrappedSampler, ended: IsolatedCopy, epoch: int) -> None:
    """Make sure, when the first whole pass has been drawn, that its end has changed nothing but the copy.

    Args:
        order: The sampler.
        ended: The copy that was iterated to its end.
        epoch: The epoch of that pass.

    Raises:
        UnsupportedLoaderError: It has changed what copies share: how epochs begin depends on those before.
    """
    checked = order.check()
    if checked.has_ended or not checked.begins or order.repeats_first_epoch:
        return
    fresh = _begin(order, order.copied()).digests
    if digest(fresh) != checked.begins:
        if "nondeterministic" not in order.accept:
            raise UnsupportedLoaderError(order.name + _CHANGES_DATA)
    elif _begin(order, ended, epoch + 1).digests != fresh and _epochs_are_alike(order, fresh):
        warnings.warn(f"{order.name}{_COUNTS_LATE}", StatefulWarning, stacklevel=2)
    checked.has_ended = True


def has_own_state(order: WrappedSampler) -> bool:
    """Whether a sampler has a state of its own that it can be resumed by."""
    methods = ("state_dict", "load_state_dict")
    return order.as_one_rank and all(callable(getattr(order.sampler, name, None)) for name in methods)


def wrong_length(order: WrappedSampler, found: int | str, epoch: int) -> ConfigurationError:
    """The error for a sampler that yields more or fewer items than it says."""
    length = order.num_items
    says = f"length={length} was given" if order.is_cut else f"its len() is {length} (when it was wrapped)"
    return ConfigurationError(
        f"{order.name} yields {found} items in epoch {epoch}, but {says}. Steps and the end of an epoch follow from "
        "that: correct it, or wrap the sampler in DDPSamplerWrapper(sampler, length='unknown'), which finds out where "
        "it ends."
    )


_DIFFERS = (
    " yields something else when the same epoch is begun a second time, though torch, NumPy, random and the generators "
    "that it holds were seeded alike. So neither could ranks agree on it, nor a resumed run go on in it. Let it draw "
    "from those (not from the time, the system or the order of a set), or from a generator seeded in set_epoch(epoch), "
    "and begin anew whenever it is iterated, as an iterator does not; let it copy lists before it changes them, if it "
    "holds more than 65,536 in one list; or accept an inexact resume with accept=('nondeterministic',)."
)
_COUNTS_EPOCHS = (
    " counts its epochs by itself, so a resumed run could not say which one it is. Give it set_epoch(epoch), and let "
    "the order depend on that."
)
_DRAWS_IN_A_THREAD = (
    " draws in a thread of its own, whose randomness cannot be told from the process's. Let it draw in __iter__ "
    "itself, or accept an inexact resume with accept=('nondeterministic',)."
)
_CHANGES_DATA = (
    " changed data in the course of a pass that copies of it share: those of a dataset, objects in a list of more than "
    "1,024, or lists in one of more than 65,536. So an epoch depends on those before it, and a resumed run could not "
    "know them. Let it copy what it changes, or draw anew in __iter__; or accept an inexact resume with "
    "accept=('nondeterministic',)."
)
_COUNTS_LATE = (
    " changes itself at the end of a pass, and a pass begins with a fresh copy of it: all epochs are alike, in the "
    "order of the first. Give it set_epoch(epoch), and let the order depend on that."
)


@dataclass(slots=True)
class _Beginning:
    """The beginning of a pass: its first item, digests of the first items and of those that follow, and its length."""

    first: Any = None
    digests: list[str] = field(default_factory=list)
    following: list[str] = field(default_factory=list)
    length: int | None = None


def _begin(order: WrappedSampler, made: IsolatedCopy, epoch: int = 0, *, to_the_end: bool = False) -> _Beginning:
    found = _Beginning()
    with made.entered():
        threads = set(threading.enumerate())
        items = made.begin(epoch, 0)
        for item in islice(items, _COMPARED):
            if not found.digests:
                found.first = item
                if set(threading.enumerate()) - threads and "nondeterministic" not in order.accept:
                    raise UnsupportedLoaderError(order.name + _DRAWS_IN_A_THREAD)
            # Digests, because a sampler may change later what it has yielded.
            found.digests.append(digest(item))
        # A sampler that fails further on is another matter, to be seen when it gets there.
        with suppress(Exception):
            if to_the_end:
                found.following = [digest(item) for item in islice(items, _COMPARED)]
                compared = len(found.digests) + len(found.following)
                rest = 0 if compared < 2 * _COMPARED else sum(1 for _ in islice(items, _FOLLOWED - compared))
                found.length = compared + rest if compared + rest < _FOLLOWED else None
    return found


def _counts_epochs(order: WrappedSampler, whole: _Beginning, followed: IsolatedCopy, other: IsolatedCopy) -> bool:
    """Whether a second pass over one copy is another one, and nothing that it is told decides which."""
    if order.repeats_first_epoch:
        return False
    # The other copy was left after its first items, where some samplers go on.
    again = _begin(order, other).digests in (whole.digests, whole.following)
    if again and (whole.length is None or _begin(order, followed).digests == whole.digests):
        return False
    return _epochs_are_alike(order, whole.digests)


def _epochs_are_alike(order: WrappedSampler, first: list[str]) -> bool:
    """Whether fresh copies begin all epochs like the first one."""
    return all(_begin(order, order.copied(), epoch).digests == first for epoch in range(1, _EPOCHS))


def _state_leads_back(order: WrappedSampler) -> bool:
    """Whether a copy goes on from the state of another one as that does."""
    ahead, behind = order.copied(), order.copied()
    with suppress(Exception):
        with ahead.entered():
            items = ahead.begin(0, 0)
            for _ in range(STATE_STRIDE):
                next(items)
            state = ahead.state(0, 0, STATE_STRIDE)
            expected = [digest(item) for item in islice(items, STATE_STRIDE)]
        with behind.entered():
            items = behind.begin(0, 0, STATE_STRIDE, state)
            return [digest(item) for item in islice(items, STATE_STRIDE)] == expected
    return False
