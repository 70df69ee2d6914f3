"""Facts that trying a copy of a user's sampler shows: what it yields, how items come to ranks, and of its length."""

from __future__ import annotations

import builtins
import dis
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.generators.attributes import PLAIN
from lightning_stateful.sampler_copies.sampler_ranks import Setting

ResumeMode = Literal["fast_forward", "own_state"]


@dataclass(kw_only=True)
class SamplerFacts:
    """The facts that a trial of a copy of a sampler has shown.

    Attributes:
        first: The first item of epoch 0, or None.
        begins: Digest of how epoch 0 begins.
        notes: Digests of items of epoch 0 by index, as passes note them.
        marks: Digests of epoch 0 up to some items, by their number, for other ranks to compare.
        says: Items of an epoch by its ``len()``; None where it has none.
        length: Items of epoch 0; None for more than a million, or one that could not be drawn to its end.
        counts_down: Whether ``len()`` changes while items are drawn, so that only before the first it tells how many.
        changes_in_len: Whether ``len()`` changes it, as by a plan that it makes: copies are asked in its place.
        draws_in_len: Whether ``len()`` draws random numbers, or may.
        seconds: How long that took.
        told_in: How long it took to tell it the epoch.
        begins_in: How long it took to tell it the epoch, and to draw its first 64 items.
        untouched: Digests of attributes that its passes leave alone, of one that calls collectives, as no rank may
            iterate a copy of that by itself. None of all others.
        left_alone: The same of any other, as far as it has been tried.
        asks: Whether it asks torch.distributed for its rank.
        remembers: Whether what it yields depends on its earlier passes or epochs, or may in a later epoch.
        remembers_told: Whether what it yields depends on the epochs that it was told before.
        adds_up: Whether what it yields depends on how often ``set_epoch`` was called.
        hands_epoch_on: Whether it tells its dataset, or what else copies share with it, the epochs that it is told.
        ends_late: Whether a pass changes the sampler behind the last item that ``len()`` says.
        is_harmless: Whether a pass changes the sampler, but not how the next one begins.
        apart_in: The first epoch that begins otherwise on two equal copies which draw alike; None for none.
        by_sets_in: The first epoch that goes by the order of a set of strings that it holds; None for none.
        writes_files: Whether it writes files, so that no copy may be iterated while it is.
        unseen: Types of objects in its items of which nothing more is compared.
        contents: Digest of what the sampler held then, to tell whether it was changed since.
        told: Digest of what the copy held that was told epoch 0; empty if it is told none.
        leads_back: Whether its own state, loaded into a fresh copy, leads to the items that came next.
        error: The reason why it could not be tried; empty if it was.
        fresh: A copy from before anybody has iterated it: of one that remembers, or whose passes change it meanwhile.
    """

    first: Any = None
    begins: str = ""
    notes: dict[int, str] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    says: int | None = None
    length: int | None = None
    counts_down: bool = False
    changes_in_len: bool = False
    draws_in_len: bool = False
    seconds: float = 0.0
    told_in: float = 0.0
    begins_in: float = 0.0
    untouched: dict[str, str] | None = None
    left_alone: dict[str, str] = field(default_factory=dict)
    asks: bool = False
    remembers: bool = False
    remembers_told: bool = False
    adds_up: bool = False
    hands_epoch_on: bool = False
    ends_late: bool = False
    is_harmless: bool = False
    apart_in: int | None = None
    by_sets_in: int | None = None
    writes_files: bool = False
    unseen: list[str] = field(default_factory=list)
    contents: str = ""
    told: str = ""
    leads_back: bool = False
    error: str = ""
    fresh: Any = None

    @property
    def calls_collectives(self) -> bool:
        """Whether it calls collectives, for which all ranks have to meet."""
        return self.untouched is not None

    @property
    def cannot_be_tried(self) -> bool:
        """Whether no copy of it may be iterated: it cannot be, or calls collectives."""
        return bool(self.error) or self.calls_collectives

    @property
    def cannot_be_repeated(self) -> str:
        """Why an epoch, or a later one, cannot be begun again alike, and what to do; empty if all can, or may.

        Of one whose first epoch is apart, training is compared with the trial, and a resume with what was saved.
        """
        if self.by_sets_in is not None:
            epoch, remedy = self.by_sets_in, "Sort the set before you iterate it."
            why = "on a copy with the same set of strings in another order, and each process has an order of its own."
        elif self.apart_in:
            epoch = self.apart_in
            why = (
                "on each of two equal copies, as was tried before training: it draws from a generator that is made "
                "without a seed, goes by the clock, a file that it writes, or something else that no attribute holds."
            )
            remedy = "Draw from the generators of torch, NumPy or random, or from one that is made in __init__."
        else:
            return ""
        return (
            f"begins its epoch {epoch} otherwise {why} So epochs from {epoch} on cannot be resumed exactly: within one "
            f"it is refused, and where one begins others follow. {remedy}"
        )

    def limits(self, accept: Collection[str], is_in_trainer: bool) -> dict[str, str]:
        """Why a resume may not be exact: texts that follow the sampler's name, by the name of each warning.

        Args:
            accept: Names of what the user takes.
            is_in_trainer: Whether a Trainer iterates it, and so nobody else tells it the epoch.
        """
        found = {"trial": why} if (why := self.cannot_be_repeated) else {}
        if self.unseen:
            found["unseen"] = (
                f"yields a {', a '.join(self.unseen[:4])}, of which nothing but the type can be compared: whether a "
                "resume is exact, and whether all ranks have the same items, is not proven. Yield numbers, strings, "
                "tuples or dataclasses."
            )
        if self.adds_up and not is_in_trainer and "nondeterministic" not in accept:
            found["changed"] = (
                "follows from how often its set_epoch was called, which a resume does not repeat, so it may not be "
                "exact behind the first epoch. Let set_epoch begin anew: shuffle a copy of the list, not what the call "
                "before has left."
            )
        return found

    @property
    def sequence(self) -> str:
        """Digests of how epoch 0 begins, and of all of it where its ``len()`` says how long it is; empty if untried."""
        whole = self.marks.get(self.length or 0) if self.says is not None else None
        return self.begins if whole is None else f"{self.begins}-{whole}"


class RankDraws(NamedTuple):
    """Draws that are other ones on each rank, because generators stand otherwise there.

    Attributes:
        rank: The rank.
        kinds: Which generators: ``"held"`` for those that a sampler holds, and kinds of those of the process.
    """

    rank: int
    kinds: frozenset[str]

    def seed_of(self, seed: int) -> int:
        """Their seed, where ``seed`` is that of draws that are alike on all ranks."""
        return loader_seed(seed, f"@{self.rank}")


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """The way a sampler's items come to ranks.

    Attributes:
        is_own: Whether each rank iterates its own sampler, and nothing is dealt out.
        draws: What each rank draws for itself; None for nothing.
        settings: Attributes that are set on the sampler while it is iterated, to tell it of one rank.
        answers: Whether torch.distributed answers it that there is one rank.
        facts: What trying a copy that was told of one rank has shown; None where it is not told.
        begins: Digest of how epoch 0 begins; of each rank where these are their own.
        note: A sentence for the log; empty if there is nothing to say.
    """

    is_own: bool = False
    draws: RankDraws | None = None
    settings: tuple[Setting, ...] = ()
    answers: bool = False
    facts: SamplerFacts | None = None
    begins: str | list[str] = ""
    note: str = ""


# What a length may be computed with: nothing of this changes plain values, or containers of them.
_COUNTING = frozenset({"len", "int", "float", "bool", "sum", "max", "min", "abs", "round", "map"})
_COUNTING_METHODS = frozenset({"values", "keys", "items", "ceil", "floor"})
_COUNTED = frozenset({list, tuple, dict, set, frozenset, deque})


def len_only_reads(value: object) -> bool:
    """Whether the code of ``len(value)`` is seen to change nothing: False also where that cannot be seen.

    It may read attributes of the object that are plain or hold plain values, or containers of them, count and compute.
    """
    kind, held = type(value), getattr(value, "__dict__", {})
    function = next((vars(of)["__len__"] for of in kind.__mro__ if "__len__" in vars(of)), None)
    if not isinstance(function, FunctionType) or kind.__getattribute__ is not object.__getattribute__:
        return False
    code, before = function.__code__, ("", None)
    if code.co_freevars or len(code.co_varnames) > 1 or any(isinstance(of, CodeType) for of in code.co_consts):
        return False
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname.startswith(("STORE", "DELETE", "IMPORT", "YIELD")):
            return False
        if step.opname == "LOAD_GLOBAL":
            named = function.__globals__.get(name, getattr(builtins, name, None))
            counts = name in _COUNTING and named is getattr(builtins, name)
            if not counts and named is not math:
                return False
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name not in _COUNTING_METHODS:
            is_own = before[0].startswith("LOAD_FAST") and not any(name in vars(of) for of in kind.__mro__)
            if not is_own or name not in held or not _is_counted(held[name]):
                return False
        before = step.opname, name
    return True


def _is_counted(value: object) -> bool:
    """Whether code that counts and computes cannot run code of a user's by this value."""
    if isinstance(value, np.ndarray):
        return type(value) is np.ndarray and not value.dtype.hasobject
    if type(value) not in _COUNTED:
        return type(value) in PLAIN or type(value) is torch.Tensor
    items: Any = value.values() if isinstance(value, dict) else value
    return all(of in PLAIN or of in _COUNTED for of in set(map(type, items)))
