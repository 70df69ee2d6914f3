"""Loaders that iterate in a way of their own: subclasses of DataLoader with ``__iter__``, and objects that hold one.

Batches are counted as such a loader gives them. As long as it hands on the very batches that DataLoader reads, in
order and as many as its ``len()`` says, a resume begins DataLoader at the next one. Otherwise its epoch is read again,
up to where the model stood. Attributes that it changes, and what its code names of classes and modules, are compared
too: what it keeps from epoch to epoch a new loader has not, and a resume there is refused.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from lightning_stateful import state as format_
from lightning_stateful.contents.code_uses import forgets
from lightning_stateful.contents.held_state import changed_names, is_handed_on, values_in
from lightning_stateful.core.order import UNKNOWN, EpochPlan, Progress
from lightning_stateful.errors import DamagedStateError, Difference, StatefulWarning, StateMismatchError
from lightning_stateful.generators.attributes import named_outside, places_outside
from lightning_stateful.generators.rng import GENERATORS, state_of_generator
from lightning_stateful.iterable_datasets.dataset_parts import names_told
from lightning_stateful.loaders.loaders_beside import (
    LoadersBeside,
    counts_batches,
    digests_of_attributes,
    is_short,
    named_in,
    portable_digest,
    told_by_iteration,
)
from lightning_stateful.sampler_copies.sampler_copy import shown
from lightning_stateful.samplers.tracker import Tracker
from lightning_stateful.shapes import COUNT, DAMAGED, RANKS, check_shape
from lightning_stateful.user_loaders import copied

_SET = {"within": {str: str}, "ahead": [str]}
_GIVEN = {"ranks": RANKS, "batch_size": object, "batches": COUNT, "kept": [str], "set?": _SET}
_REMEDY = "Put it back, or resume from a checkpoint of the end of an epoch."


class Watch:
    """Compares the batches that a loader gives with those that DataLoader has read for it.

    Attributes:
        differs: Whether it has ever given other batches than DataLoader's own, in order: more or fewer of them, some
            that it has changed, or those of a second pass. What it gives may then depend on those before.
        is_known: Whether it gave more than one batch, and never differed: at its first it might give that twice.
        changes: Whether an attribute of the loader has changed from batch to batch, or its code counts batches.
        reads_in_thread: Whether DataLoader was read in another thread than the one that takes the batches.
        reads_by_hand: Whether a sampler was iterated by hand.
        asks_length: Whether the number of batches was asked for while they were read. It is that of the whole epoch.
        kept: Attributes that a pass began with otherwise than the first one, in this run or before a resume.
        set_by_others: Attributes that something else than its iteration has set since its first batch, as a hook does:
            by name, the epoch and the number of batches of it that had been given.
    """

    def __init__(self) -> None:
        self.differs = self.is_known = self.changes = self.reads_in_thread = False
        self.reads_by_hand = self.asks_length = self._is_rest = self._has_warned = False
        self.kept: set[str] = set()
        self.set_by_others: dict[str, tuple[int, int]] = {}
        # What its own iteration has set, and what the loader's ``set_epoch`` may set.
        self._own: set[str] = set()
        self._told: frozenset[str] = frozenset()
        # What a checkpoint has of such, until the first batch is asked for.
        self._expected: dict[str, Any] = {}
        self._num_passes = self._epoch = 0
        self._holders: tuple[Any, ...] = ()
        self._share: Callable[[], object] = bool
        # What reads variables elsewhere that their code names.
        self._places: dict[str, Callable[[], Any]] = {}
        self._beside: LoadersBeside | None = None
        # The digests of attributes before the first pass, as it read its first batch, and after the latest batch.
        self._before = self._first = self._latest = dict[str, str]()
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        # What is unpickled reads nothing, and torch's iterators in the loaders cannot be pickled.
        return {**vars(self), "_holders": (), "_beside": None, "_ahead": deque(), "_share": bool, "_places": {}}

    def begin(
        self,
        epoch: int = 0,
        holders: tuple[Any, ...] = (),
        *,
        is_rest: bool = False,
        seed: int | None = None,
        share: Callable[[], None] | None = None,
        users: Any = None,
        is_within: bool = False,
    ) -> None:
        """A pass begins.

        ``holders`` is what is iterated, and the loader in it; ``users`` the user's object, if that is another. ``seed``
        seeds what other loaders draw that it reads beside; None leaves them alone. ``share`` hands on what hooks have
        set on the user's object. DataLoader reads the rest of the epoch alone if ``is_rest``; a resume goes on within
        the epoch if ``is_within``.
        """
        self.num_read = self.num_given = 0
        self._is_rest = is_rest
        # Batches that were read and not given yet, with what they held.
        self._ahead: deque[tuple[Any, list[Any]]] = deque()
        self._has_asked, self._epoch, self._holders = False, epoch, holders
        self._share, self._thread = share or bool, threading.get_ident()
        if holders:
            self._num_passes += 1
            self._places = {name: read for holder in holders for name, read in places_outside(holder).items()}
            if self._beside is None:
                self._beside = LoadersBeside(holders)
            if seed is not None:
                self._beside.seed(holders, seed)
            self._share()
            found, self.changes = self._found_now(), self.changes or counts_batches(type(holders[0]))
            if self._num_passes > 1:
                self._note_set(changed_names(self._latest, found))
            self._latest = found
            self._told = names_told(holders[0]) or frozenset()
            self._tell_again(holders[0] if users is None else users, is_within)
            self._before = self._before if self._num_passes > 1 else self._found_at_pass()

    def note_ask(self) -> None:
        """Something is read or given: by the first of a pass, what is set anew for each pass is set."""
        if not self._has_asked and self._holders:
            self._has_asked, found = True, self._found_at_pass()
            self._compare_set()
            self._first = found if self._num_passes == 1 else self._first
            self.kept |= self._kept_since(self._first, found)

    def _kept_since(self, before: dict[str, str], now: dict[str, str]) -> set[str]:
        """Attributes that differ, but for those that others tell anew, or ``__iter__`` before it uses them."""
        # One that was unpickled holds none.
        kind, changed = type(next(iter(self._holders), None)), changed_names(before, now) - self._told_by_others
        return {name for name in changed if not forgets(kind, "__iter__", name)}

    def _found_at_pass(self) -> dict[str, str]:
        """Digests of attributes, and of what the loader's code names elsewhere, which a new loader may find otherwise.

        The latter are looked at once a pass.
        """
        beside = {} if self._beside is None else self._beside.digests(self._holders, self._epoch)
        return (
            digests_of_attributes(self._holders)
            | beside
            | {
                name: state_of_generator(value) if isinstance(value, GENERATORS) else shown(value)
                for holder in self._holders
                for name, value in named_outside(holder).items()
            }
        )

    def kept_at(self, epoch: int, *, is_end: bool) -> list[str]:
        """Attributes that a new loader may have otherwise, within an epoch or at its end."""
        is_behind_first = self._num_passes == 1 and (is_end or epoch > self._epoch)
        if not is_behind_first:
            return sorted(self.kept)
        self.note_outside()
        return sorted(self.kept | self._kept_since(self._before, self._found_at_pass()))

    def count(self, iterator: Any) -> Any:
        """Count what an iterator of torch reads from now on; the iterator."""
        # Not around it: torch resets it for persistent workers, and Lightning looks at its type. A weak reference, so
        # that workers end with it.
        iterator._next_data = partial(_next_counted, weakref.ref(iterator), self)
        return iterator

    def note(self, batch: Any) -> None:
        """A batch is given."""
        # One that has read none of DataLoader's.
        self.note_ask()
        self.num_given += 1
        found = self._found_now()
        own = changed_names(self._latest, found)
        self.changes = self.changes or bool(own and self.num_given > 1)
        if self._beside is not None and self.num_given > 1:
            self._beside.warn_of_told(self._holders[0], own)
        # What its own iteration changes too is no setting of somebody else's.
        self._own |= own
        self.set_by_others = {name: at for name, at in self.set_by_others.items() if name not in own}
        self._latest = found
        if self.differs:
            return
        read, held = self._ahead.popleft() if self._ahead else (None, [])
        if not is_handed_on(read, held, batch):
            self.note_other()
        elif self.num_given > 1:
            self.is_known = True

    def note_outside(self) -> None:
        """The next batch is about to be asked for, or a state is taken: what has changed was set by something else."""
        if self.num_given and not self.reads_in_thread:
            self._share()
            found = self._found_now()
            self._note_set(changed_names(self._latest, found))
            self._latest = found

    def _note_set(self, names: Collection[str]) -> None:
        self.set_by_others |= dict.fromkeys(names, (self._epoch, self.num_given))

    @property
    def _told_by_others(self) -> set[str]:
        """What hooks alone set, by the loader's ``set_epoch``: a resume tells it again."""
        return (self.set_by_others.keys() & self._told) - self._own

    def _tell_again(self, users: Any, is_within: bool) -> None:
        """Tell a loader the epoch by its ``set_epoch`` on a resume, where that restores what hooks had told it.

        Lightning does not call their ``on_train_epoch_start`` in the middle of an epoch.
        """
        expected = {name: held for name, held in self._expected.get("within", {}).items() if name in self._told}
        if not expected or self._digests(expected) == expected:
            return
        for epoch in (self._epoch, self._epoch - 1):
            with suppress(Exception):
                probe = copied(users)
                probe.set_epoch(epoch)
                held = {name: portable_digest(value) for name, value in named_in((probe,)).items()}
                if expected.items() <= held.items():
                    users.set_epoch(epoch if is_within else self._epoch)
                    self._share()
                    self._latest = self._found_now()
                    if not is_within:
                        within = self._expected["within"]
                        self._expected = {**self._expected, "within": within | self._digests(expected)}
                    return

    def set_at(self, epoch: int, num_given: int) -> dict[str, Any]:
        """What a state has of attributes that something else has set; empty if there are none.

        ``num_given`` batches of the epoch were trained on: one that was given since was read before the latest.
        """
        if self._expected:
            return self._expected
        self.note_outside()
        ahead = sorted(name for name, (of, given) in self.set_by_others.items() if of == epoch and given > num_given)
        return {"within": self._digests(self.set_by_others), "ahead": ahead} if self.set_by_others else {}

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Compare with what a checkpoint has of such attributes when the first batch is asked for."""
        self._expected = dict(saved)
        self.set_by_others = dict.fromkeys(saved.get("within", ()), (-1, 0))

    def _compare_set(self) -> None:
        expected, self._expected = self._expected, {}
        within, kind = expected.get("within", {}), type(self._holders[0]).__qualname__
        now = self._digests(within)
        lost = sorted(name for name, held in within.items() if held and now[name] != held)
        if lost or expected.get("ahead"):
            said = (
                "by something else than the loader's own iteration, and is another here: the resume is not exact. Set "
                "the same again before the first batch, as in load_state_dict of a callback."
                if lost
                else "after the batch had been read that comes first here, as a loader without a length is read one "
                "batch ahead: the resume is not exact in that batch. Set it between two epochs, or give the loader a "
                "__len__."
            )
            names = ", ".join(one if "." in one else f"{kind}.{one}" for one in lost or expected["ahead"])
            warnings.warn(
                f"{names} was set in the run that wrote the checkpoint, {said}", StatefulWarning, stacklevel=3
            )

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        held = {**{name: self._places[name]() for name in names & self._places.keys()}, **named_in(self._holders)}
        return {name: portable_digest(held[name]) if name in held else "" for name in sorted(names)}

    def note_own(self) -> None:
        """Its iteration has gone on without giving a batch."""
        self._latest = self._found_now()

    def _found_now(self) -> dict[str, str]:
        """Digests of attributes, and of variables elsewhere that the loader's code names, in this process."""
        outside = {name: value for name, read in self._places.items() if is_short(value := read())}
        found = digests_of_attributes(self._holders) | told_by_iteration(self._holders)
        return found | {name: shown(value) for name, value in outside.items()}

    def note_other(self) -> None:
        """The loader gives other batches than those that DataLoader reads for it, one after the other."""
        if not self.differs:
            self._warn_of_rest("gives other batches now")
        self.differs, self.is_known = True, False
        self._ahead.clear()

    def note_by_hand(self) -> None:
        """A sampler of the loader's is iterated by hand."""
        self.note_ask()
        self.reads_by_hand = True
        self.note_other()

    def note_length(self) -> None:
        """The number of batches is asked for within a pass."""
        if not self.asks_length:
            self._warn_of_rest("asks for len() now, which is that of the whole epoch")
        self.asks_length = True

    def _warn_of_rest(self, found: str) -> None:
        """Warn where a resume has begun at the next batch, because nothing spoke against it up to there."""
        if self._is_rest and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self._holders[0]).__qualname__}.__iter__ had handed on DataLoader's batches as they are up to "
                f"the checkpoint, so the resume began it at the next one; it {found}, so the batches of epoch "
                f"{self._epoch} may not be those of a run without a stop. Change batches from the first on, or in the "
                "collate_fn, or resume from a checkpoint of the end of an epoch.",
                StatefulWarning,
                stacklevel=3,
            )

    def note_read(self, batch: Any) -> None:
        """DataLoader has read a batch."""
        self.num_read += 1
        self.reads_in_thread = self.reads_in_thread or threading.get_ident() != self._thread
        if not self.differs:
            self._ahead.append((batch, values_in(batch)))


def _next_counted(reference: Any, watch: Watch) -> Any:
    iterator = reference()
    watch.note_ask()
    batch = type(iterator)._next_data(iterator)
    watch.note_read(batch)
    return batch


class OwnPlan:
    """A plan of DataLoader's batches, in steps of the batches that the loader gives.

    ``skipped`` are batches that it gives first and that the model has been trained on before; ``given_on`` is what
    batches depend on beside the configuration.
    """

    def __init__(
        self,
        plan: EpochPlan,
        num_steps: int,
        skipped: int,
        watch: Watch,
        given_on: Mapping[str, int | None],
        whole: Callable[[], EpochPlan],
    ) -> None:
        self.plan, self.skipped = plan, skipped
        self._plan_whole = whole
        # One that gave as many as it says, or more, says nothing about its end.
        is_known = num_steps < UNKNOWN and not (skipped and skipped >= num_steps)
        self.num_steps: int = num_steps - skipped if is_known else UNKNOWN
        self._watch, self._given_on = watch, given_on

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self.plan.epoch

    @property
    def is_rest(self) -> bool:
        """Whether DataLoader has been read before in this epoch."""
        return self.plan.progress_after(0).consumed > 0

    def whole(self) -> EpochPlan:
        """The plan of all of DataLoader's batches of the epoch."""
        return self._plan_whole() if self.is_rest else self.plan

    def is_reread_at(self, step: int) -> bool:
        """Whether a resume at a step has to read the epoch again from where this plan's begins."""
        watch = self._watch
        differs = watch.differs or watch.changes or watch.asks_length or (step == 1 and not watch.is_known)
        # One that says that it gives another number of batches may yet do so, or read its data once more.
        says_other = self.num_steps != self.plan.num_steps
        return self.skipped > 0 or (step > 0 and (differs or says_other))

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """DataLoader's batches of a rank."""
        return self.plan.batches(rank, first_step)

    def progress_after(self, steps: int) -> Progress:
        """The progress of a run that was given ``steps`` batches."""
        skipped, read = 0, min(steps, self.plan.num_steps)
        is_end = steps > 0 and steps == self.num_steps
        if is_end:
            read = self.plan.num_steps if self.plan.num_steps < UNKNOWN else read
        elif self.is_reread_at(steps):
            skipped, read = self.skipped + steps, 0
        progress = self.plan.progress_after(read)
        given: dict[str, Any] = {
            **self._given_on,
            "batches": skipped,
            "kept": self._watch.kept_at(self.epoch, is_end=is_end),
        }
        given |= {"set": found} if (found := self._watch.set_at(self.epoch, self.skipped + steps)) else {}
        return replace(progress, details={**progress.details, "given": given})

    def report_after(self, steps: int) -> dict[str, Any]:
        """Counts of what DataLoader has served."""
        return self.plan.report_after(min(self.skipped + steps, self.plan.num_steps))

    def repeats(self) -> str:
        """As of DataLoader's batches."""
        return self.plan.repeats()


class OwnTracker(Tracker):
    """A tracker whose plans count the batches that a loader gives by an ``__iter__`` of its own."""

    watch: Watch
    length_of: Callable[[EpochPlan], int]
    batch_size: int | None = None
    _known_own: tuple[Progress, int, int, OwnPlan] | None = None
    more_details: ClassVar[Mapping[str, Any]] = {"given?": _GIVEN}

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> OwnPlan:
        """Plan an epoch, or the rest of it."""
        ranks = self.topology.num_replicas
        known = self._known_own
        if known is not None and known[0] is progress and known[1:3] == (epoch, ranks):
            return known[3]
        given_on = {"ranks": ranks, "batch_size": self.batch_size}
        inner, skipped = progress, 0
        if progress is not None and "given" in progress.details:
            details = dict(progress.details)
            given = details.pop("given")
            inner = replace(progress, details=details)
            skipped = given["batches"] if progress.epoch == epoch else 0
            changed = [
                Difference(path=name, saved=given[name], present=now, remedy=_REMEDY)
                for name, now in given_on.items()
                if skipped and given[name] != now
            ]
            if changed:
                raise StateMismatchError(changed, where="The batches that the loader's own __iter__ gives")
        plan = super().plan_epoch(epoch, inner)
        start = plan.progress_after(0)
        is_whole = not (start.consumed or start.cycle)
        length = self.length_of(plan)
        length = length if is_whole or length == UNKNOWN else plan.num_steps
        made = OwnPlan(plan, length, skipped, self.watch, given_on, partial(Tracker.plan_epoch, self, epoch))
        if progress is not None:
            self._known_own = progress, epoch, ranks, made
        return made

    def progress_in(self, state: Mapping[str, Any], *, where: str) -> Progress:
        """As of any tracker; within an epoch that is read again, no difference is let pass."""
        given = state["progress"].get("given", {"batches": 0})
        if "given" in state["progress"]:
            try:
                check_shape(given, _GIVEN, "progress.given")
            except DamagedStateError as error:
                raise DamagedStateError(f"{where}: {error}{DAMAGED}") from None
        changed = format_.differences(state, self.state_dict(Progress()), fingerprints=False)
        if given["batches"] and changed:
            raise StateMismatchError([replace(one, remedy=_REMEDY) for one in changed], where=where)
        if kept := given.get("kept"):
            self._refuse_kept(kept, where)
        self.watch.expect({} if "iteration" in self.accept else given.get("set", {}))
        return super().progress_in(state, where=where)

    def _refuse_kept(self, kept: list[str], where: str) -> None:
        """Refuse a loader that has something of earlier passes, which a new one has not; or warn where accepted."""
        if "iteration" not in self.accept:
            remedy = (
                "The loader's own __iter__, or a hook, changes these, and it may give other batches for it. Set them "
                'by the epoch, or pass accept=("iteration",) to go on with them as they are now.'
            )
            saving = f"{', '.join(kept)} as earlier epochs have left it"
            raise StateMismatchError(
                [Difference(path="iteration", saved=saving, present="anew", remedy=remedy)], where=where
            )
        self.watch.kept |= set(kept)
        warnings.warn(
            f"The loader's own __iter__ has changed {', '.join(kept)} in earlier epochs, and goes on with what is "
            "there now, so the resume may not be exact.",
            StatefulWarning,
            stacklevel=4,
        )
