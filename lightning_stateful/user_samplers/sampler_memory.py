"""Remembers what was iterated of a user's sampler in this process, and begins earlier passes again on a resume."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

from lightning_stateful.contents.code_uses import uses_any_of
from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.core.order import Progress
from lightning_stateful.errors import PositionError
from lightning_stateful.generators.attributes import methods_of
from lightning_stateful.generators.generator_states import GeneratorState
from lightning_stateful.sampler_copies.sampler_copy import Path, SamplerParts, digest_of_contents, generators_outside
from lightning_stateful.sampler_copies.sampler_facts import SamplerFacts
from lightning_stateful.user_samplers import sampler_check, sampler_trial
from lightning_stateful.user_samplers.earlier_passes import (
    CopyInStep,
    LeftIterator,
    PassesHere,
    begin_pass,
    contents_of,
    put_together,
    refuse_iterated,
    spelled_out,
)
from lightning_stateful.user_samplers.iterated_sampler import ToldEpochs
from lightning_stateful.user_samplers.resumed_epoch import begins_as, warn_of_others
from lightning_stateful.user_samplers.sampler_pass import LONG_FAST_FORWARD, SamplerPass, warn
from lightning_stateful.user_samplers.user_sampler import UserSampler

_InEpoch: TypeAlias = Callable[[], AbstractContextManager[None]]
# The cycle of passes that something else than training begins within an epoch.
ASIDE = 2**16
# Memories of samplers by their id, beside a reference to each.
_MEMORIES: dict[int, tuple[Callable[[], Any], SamplerMemory]] = {}


class SamplerMemory:
    """Passes that were begun over a sampler in this process, and whether something has changed it between or in them.

    A sampler that changes itself while it is iterated yields what follows from its earlier passes. Their number is kept
    in the state, and a resume begins them again.

    Attributes:
        generators: Where the generators are that the sampler holds.
        passes: Of each pass its epoch, its cycle, and the items drawn of one that was broken off, or -1.
        has_changed: Whether a pass has changed the sampler.
        first_epoch: The epoch that it begins with: another one than 0 where a loader was built anew in training.
        is_in_trainer: Whether a Trainer iterates it, which asks for no more than it counts.
        is_told_first: Whether the next epoch is told before the iterator of the latest is dropped, as Lightning does.
        is_listed: Whether Lightning alone would deal a sampler of samples out of a list of all that it yields.
        looked_at: What decided what the sampler yields when a save has last compared that; empty before.
        begins_as: Of one that training changes, or may, digest of its first epoch as it was when the latest began, or
            several that are right for an epoch to be begun again.
        is_as_tried: Whether nobody has changed the sampler between its trial and its first pass; not of torch's own.
        held: Digests of what it held when the latest pass began, by name, where something else may set it.
        tried: The facts of trying it before anybody had iterated it, by what they depend on.
        is_shared: Whether several loaders that are trained on share it.
    """

    def __init__(self, parts: SamplerParts) -> None:
        self.generators: tuple[Path, ...] = tuple(parts.generators)
        self._outside: list[tuple[Path, GeneratorState]] | None = None
        self.passes: list[list[int]] = []
        # Of each of them, whether a loader that is trained on has begun it in this process.
        self._of_training: list[bool] = []
        # Whether loaders that are trained on use it, and whether others do.
        self._uses: set[bool] = set()
        # The epoch within which training is to go on, until it has begun here.
        self._awaited: int | None = None
        self.first_epoch = 0
        self.has_changed = self.is_shared = self.is_in_trainer = self.is_told_first = self.is_listed = False
        self._as_tried: _InEpoch = nullcontext
        self.looked_at, self.begins_as, self.held = tuple[Any, ...](), tuple[str, ...](), dict[str, str]()
        self.tried: dict[tuple[Any, ...], SamplerFacts] = {}
        self._latest: SamplerPass | None = None
        # The passes of the latest state that were begun again.
        self._begun_again: list[list[int]] | None = None
        self._told = ToldEpochs(parts.samplers, once=True)
        # What the sampler held when the latest pass began, and when it ended.
        self._began_with = self._ended_with = ""
        # What it held in a pass that was broken off, before it was told another epoch.
        self._left_with = ""
        self._left: LeftIterator | None = None  # Of the latest pass that was begun again.
        # What it holds, and what decides what it yields beside that, as of the beginning of an epoch.
        self._contents: tuple[str, dict[str, str]] = ("", {})
        self._in_step = CopyInStep()
        self.is_as_tried = False
        self._warned: set[str] = set()
        # Whether the next pass, and whether the latest one, is a hook's that looks at batches before an epoch.
        self._looks_next = self._is_look = False

    def generators_outside(self, sampler: Any, dataset: Any) -> list[tuple[Path, GeneratorState]]:
        """The generators outside of the sampler that its code reaches, found before anybody has iterated it."""
        if self._outside is None:
            self._outside = generators_outside(sampler, dataset)
        return self._outside

    def note_use(self, order: UserSampler) -> None:
        """Warn where loaders of training and of validation share a sampler that changes while it is iterated."""
        self._uses.add(order.is_trained_on)
        if len(self._uses) == 2 and order.remembers:
            self.warn_once(
                f"The loaders of training and of validation share one {order.name} object, which changes while it is "
                "iterated, so what the one gets depends on the passes of the other. After a resume validation gets "
                "other samples, and so may training where a validation comes within an epoch; a checkpoint from within "
                f"an epoch may be refused. Give each a {order.name} of its own.",
                once="shared",
            )

    def note_user(self, as_tried: _InEpoch | None, *, is_told_first: bool = False, is_listed: bool = False) -> None:
        """From now on a Trainer iterates it, with ``as_tried`` a block in the epoch of the trial; or, None, a loop."""
        self.is_in_trainer, self._as_tried = as_tried is not None, as_tried or nullcontext
        self.is_told_first, self.is_listed = is_told_first, is_listed

    def await_training(self, epoch: int) -> None:
        """Training is to go on within an epoch; the passes before it have been begun."""
        self._awaited = None if any(self._of_training) else epoch

    def _refuse_to_come_first(self, order: UserSampler) -> None:
        if order.is_trained_on:
            self._awaited = None
        elif self._awaited is not None:
            raise PositionError(
                f"The loaders of training and of validation share one {order.name} object, which changes while it is "
                f"iterated. The checkpoint was written within epoch {self._awaited}, just before a validation: that "
                f"would iterate the {order.name} before training goes on with it, and training would get other samples "
                f"than without the stop. Resume from a checkpoint that was written at another batch, or give "
                f"validation a {order.name} of its own."
            )

    @property
    def remedy(self) -> str:
        """What to do of what something else than its passes sets on the sampler."""
        if self.is_in_trainer:
            return "Save it in a callback, and set it again in on_train_start."
        return "Save it beside the loader's state, and set it again before the first batch."

    @property
    def is_changed(self) -> bool:
        """Whether something else than its passes is known to change the sampler."""
        return "changed" in self._warned

    def note_accepted(self, order: UserSampler, here: Progress, saved: Any, now: Any) -> None:
        """Warn of an epoch that begins with another sequence than the saved one."""
        if now and order.is_trained_on and not here.consumed and saved not in ("", None, now):
            self.warn_once(
                f"{order.name} does not yield its first epoch as it did, as was accepted, so epochs from {here.epoch} "
                "on may not be those of the run that wrote the checkpoint."
            )

    def note_look(self) -> None:
        """The next pass is begun by a hook before an epoch, and the epoch begins another one."""
        self._looks_next = True

    def note_begin(self, order: UserSampler, begun: SamplerPass, earlier: list[list[int]] | None) -> None:
        """A pass begins: begin those before it that a state tells of and this process has not."""
        self._refuse_to_come_first(order)
        if self._latest is not None:
            if order.is_trained_on:  # A validation within an epoch leaves the rest of that to training.
                self._latest.finish()
            self._warn_if_left(order, self._latest)
        if self._latest is not None and not self._ended_with and order.is_trained_on:
            # It was left within a pass.
            left = self._left_with or digest_of_contents(order.sampler, order.dataset, epoch=self._latest.label[0])
            self.has_changed = self.has_changed or left != self._began_with
        self._left_with = ""
        self._is_look, self._looks_next = self._looks_next, False
        self._close()
        if earlier is not None and order.is_trained_on:
            self.begin_again(order, begun.label[0], earlier)
            if begun.held:
                warn_of_others(order, begun.held)
        elif self._lacks_passes(order, begun):
            self.warn_once(
                f"{order.name} changes itself in each of its passes, and begins with epoch {begun.label[0]} here, "
                "without those of the epochs before, so its batches may not be those of an uninterrupted run. "
                "Resume from a checkpoint that StatefulDataCallback has written, or shuffle by set_epoch(epoch)."
            )
        if begun.label[1] >= ASIDE and order.remembers and order.is_trained_on:
            self.warn_once(
                f"{order.name} changes itself while it is iterated, and a hook has iterated its loader within epoch "
                f"{begun.label[0]}, which counts as a pass of it, as in torch. A resume does not repeat such a pass, "
                "so it may not be exact from here on. Look at batches of a loader of its own.",
                once="aside",
            )
        if order.is_trained_on:
            for once, what in order.facts.limits(order.accept, self.is_in_trainer).items():
                self.warn_once(f"{order.name} {what}", once=once)
        self._drop_left(order, *begun.label)
        now = self.compare_epochs(order, begun.label[0])
        if not any(self._contents) or not self.passes:
            parts = SamplerParts(order.sampler, order.dataset)
            now = digest_of_contents(order.sampler, order.dataset, epoch=begun.label[0], parts=parts)
            self._contents = self._contents if any(self._contents) else contents_of(order, now, parts)
            if not self.passes and not order.is_known:
                self.is_as_tried = order.facts.contents in ("", now)
        is_restored = not (self.passes or self.is_as_tried) and begun.label[0] > self.first_epoch
        self.begins_as = begins_as(order, begun, is_changed=self.is_changed or is_restored)
        begun.entry = [*begun.label, 0]
        self._append(begun.entry, order.is_trained_on)
        self._latest, self._ended_with, self._began_with = begun, "", now

    def _warn_if_left(self, order: UserSampler, left: SamplerPass) -> None:
        if left.is_assumed and left.end is None and order.facts.ends_late:
            self.warn_once(
                f"{order.name} changes itself behind the last item of an epoch. After the last batch of epoch "
                f"{left.label[0]} a state was taken, and then no further one was asked for, which a for loop does. A "
                "resume from that state brings the sampler to its end, so it may not be exact. Iterate the loader to "
                "its end, or change the sampler where its __iter__ begins."
            )

    def _lacks_passes(self, order: UserSampler, begun: SamplerPass) -> bool:
        """Whether a sampler that remembers its passes begins with an epoch for which they would have to be known."""
        is_first = not self.passes and begun.label[0] > self.first_epoch
        return is_first and order.remembers and order.is_trained_on and not begun.has_state

    def compare_epochs(self, order: UserSampler, epoch: int) -> str:
        """Warn where something else than its own iteration has changed the sampler, or what it yields, before an epoch.

        What it yields is shown by a copy of it as it is now, which begins the first epoch once more.

        A digest of what the sampler holds now is returned; empty if none is known.
        """
        if not (self.passes and order.is_trained_on) or "changed" in self._warned or "nondeterministic" in order.accept:
            return ""
        if epoch <= self.passes[-1][0]:
            return ""
        parts = SamplerParts(order.sampler, order.dataset)
        self._told.warn(parts.samplers, epoch)
        now = digest_of_contents(order.sampler, order.dataset, epoch=epoch, parts=parts)
        if self._ended_with not in ("", now) and not order.has_set_epoch:
            latest = digest_of_contents(order.sampler, order.dataset, epoch=self.passes[-1][0])
            if self._ended_with != latest:
                self.warn_once(
                    f"{order.name} was changed between two epochs by something else than its own iteration. A resume "
                    f"from here on is exact only if the same is set again before its first batch. {self.remedy}",
                    once="changed",
                )
                return now
        held, self._contents = self._contents, contents_of(order, now, parts)
        if held == self._contents:
            return now
        with self._as_tried():
            is_changed = self._is_changed_by_others(order, held)
        if is_changed:
            unsure, sure = "may yield other items than before training", "no longer yields what it did before training"
            found = sure if sampler_check.can_be_tried(order) else unsure
            self.warn_once(
                f"{order.name} {found}: training, its dataset, a callback or one "
                "of its own later passes has changed what it draws from. But for weights and buffers of the module no "
                f"checkpoint holds that, so a resume is exact only if it is set again. {self.remedy}",
                once="changed",
            )
        # Trying copies may have changed what they share with it.
        return ""

    def _is_changed_by_others(self, order: UserSampler, held: tuple[str, dict[str, str]]) -> bool:
        """Whether it yields something else than when it was tried, for another reason than its passes."""
        if order.facts.writes_files:
            return False
        if order.is_known:
            return True
        if order.facts.calls_collectives:
            return sampler_trial.is_touched(order)
        if not order.facts.remembers:
            is_as_tried = order.has_set_epoch and held[1] == self._contents[1] and sampler_trial.holds_as_tried(order)
            return not is_as_tried and sampler_check.yields_otherwise(order)
        names = changed_names(held[1], self._contents[1])
        if names and not sampler_check.can_be_tried(order):
            return uses_any_of(methods_of(order.sampler), names)
        if names and sampler_check.yields_otherwise(order):
            return True
        if held[0] == self._contents[0] or order.facts.cannot_be_tried:
            return False
        first = partial(sampler_check.first_sequence, order)
        with suppress(Exception):
            now = first(order.sampler)
            return now != order.facts.sequence and not self.follows(order, now, first)
        return False

    def follows(self, order: UserSampler, value: object, of: Callable[[Any], object]) -> bool:
        """Whether a value of the sampler, as ``of`` gives it, follows from its passes alone.

        It does if it is the value of a copy from before training on which the same passes were begun.
        """
        self._close()
        if order.facts.cannot_be_tried:
            return False
        return self._in_step.gives(order, self.passes if order.facts.remembers else self.passes[-1:], value, of)

    def note_contents(self, order: UserSampler, begun: SamplerPass) -> None:
        """Note what the sampler holds when a pass has begun, to see whether the pass changes it."""
        if order.is_trained_on:
            self._told.warn(SamplerParts(order.sampler, order.dataset).samplers, begun.label[0])
        if not self._began_with or order.has_set_epoch:
            self._began_with = digest_of_contents(order.sampler, order.dataset, epoch=begun.label[0])
        self.held = sampler_trial.held_by(order.sampler, order.dataset) if order.facts.left_alone else {}

    def note_last(self, order: UserSampler, latest: SamplerPass, *, goes_on: bool) -> None:
        """The last item that an epoch serves was drawn: what the sampler holds now, only its end and others change.

        If it ``goes_on``, one who asks for more has the sampler come to its end.
        """
        latest.entry[2] = latest.drawn
        latest.goes_on = latest.goes_on or (goes_on and not self.is_in_trainer)
        if self._latest is latest:
            self._note_ending(order, latest)

    def note_end(self, order: UserSampler, ended: SamplerPass) -> None:
        """A pass has come to the sampler's end."""
        ended.entry[2] = -1
        if self._latest is ended:
            self._told.note_iterated(SamplerParts(order.sampler, order.dataset).samplers)
            self._close()
            self._note_ending(order, ended)

    @contextmanager
    def leaving(self, order: UserSampler, left: SamplerPass) -> Iterator[None]:
        """A block in which a pass lets go of an iterator that was not brought to its end, which may change the sampler.

        What others have changed since its last item is not taken for that.
        """
        is_own = self._latest is left and order.facts.ends_late and self._ended_with != ""
        is_own = is_own and self._ended_with == digest_of_contents(order.sampler, order.dataset, epoch=left.label[0])
        yield
        if is_own:
            self._told.note_iterated(SamplerParts(order.sampler, order.dataset).samplers)
            self._note_ending(order, left)

    def _note_ending(self, order: UserSampler, ended: SamplerPass) -> None:
        self._ended_with = digest_of_contents(order.sampler, order.dataset, epoch=ended.label[0])
        self.has_changed = self.has_changed or self._ended_with != self._began_with

    def tell_epoch(self, order: UserSampler, epoch: int) -> None:
        """Call ``set_epoch`` of a sampler and of those in it, but of one that somebody else has told another epoch.

        A loop of the user's may have told this one, which is not done again where it adds up.
        """
        if self._latest is not None and not (self._ended_with or self._left_with) and epoch != self._latest.label[0]:
            self._left_with = digest_of_contents(order.sampler, order.dataset, epoch=self._latest.label[0])
        once = order.facts.adds_up and not self.is_in_trainer
        self._told.tell(SamplerParts(order.sampler, order.dataset).samplers, epoch, once=once)

    def compare_with_check(self, order: UserSampler, at: SamplerPass, index: int, found: str) -> None:
        """Compare the digest of an item of the first pass with what a copy of the sampler yielded before training."""
        expected = order.facts.notes.get(index)
        is_first = self.passes == [[0, 0, 0]] and self._latest is at and order.is_trained_on and self.is_as_tried
        if index and at.has_states != order.facts.leads_back:
            # Noted in another way.
            return
        if is_first and expected not in (None, found) and "nondeterministic" not in order.accept:
            self.warn_once(
                f"{order.name} yields something else at item {index} of its first epoch than when it was tried before "
                "training: it depends on a count or a generator of its own that no attribute holds, or on training, "
                "time, a thread or another process. A resume from here is exact only if it yields the same again. "
                "Other items before a stop are refused within an epoch; what comes behind it nobody can tell.",
                once="trial",
            )

    def passes_before(self, epoch: int, cycle: int) -> PassesHere:
        """The passes before one, for a state: ``[epoch, cycle, items or -1, number of epochs that follow alike]``."""
        self._close()
        passes, latest = self.passes[: self._place_of(epoch, cycle)], self._latest
        if latest is not None and latest.goes_on and latest.end is None and passes and passes[-1] is latest.entry:
            # A loop of the user's asks for more behind the last batch.
            passes[-1] = [*latest.label, -1]
        return put_together(passes)

    def note_state(self) -> None:
        """A state is taken in a loop of the user's, perhaps at the last item of a pass."""
        if self._latest is not None:
            self._latest.is_assumed = self._latest.goes_on

    def passes_since(self, epoch: int, cycle: int) -> PassesHere:
        """The passes of evaluation loaders that share the sampler, begun since one of training was, likewise."""
        self._close()
        behind = self._place_of(epoch, cycle) + 1
        of_training = zip(self.passes[behind:], self._of_training[behind:], strict=True)
        return put_together([passed for passed, is_own in of_training if not is_own])

    def _place_of(self, epoch: int, cycle: int) -> int:
        """The place of the pass of training with these labels, of the latest fit; behind all passes where none is."""
        end = len(self.passes)
        for place in reversed(range(end)):
            label = self.passes[place][:2]
            if self._of_training[place] and label <= [epoch, cycle]:
                is_look = self._is_look and place == end - 1
                return place if label == [epoch, cycle] and not is_look else end
        return end

    def _append(self, passed: list[int], is_of_training: bool) -> None:
        self.passes.append(passed)
        self._of_training.append(is_of_training)

    def begin_again(self, order: UserSampler, epoch: int, told_of: list[list[int]]) -> None:
        """Begin the passes that :meth:`passes_before` told of an epoch, but for those begun in this process."""
        earlier, started, known = spelled_out(told_of), time.perf_counter(), len(self.passes)
        if told_of is self._begun_again:
            # Since then a hook has looked at a batch, as in the run that is resumed.
            return
        if self.passes != earlier[:known] and order.facts.is_harmless:
            self._begun_again = told_of
            self.warn_once(
                f"{order.name} changes itself while it is iterated. It has been iterated {known} times in this "
                f"process, and {len(earlier)} times before epoch {epoch} in the run that wrote the checkpoint. Its "
                "second epoch does not depend on that, but later ones may, so the resume may not be exact. Make a new "
                f"{order.name} for the resumed run, and do not iterate it before."
            )
            return
        if self.passes != earlier[:known]:
            refuse_iterated(order, known, len(earlier), epoch)
        # A plain loop tells the epoch, as of torch's DistributedSampler, before the passes ahead of it are begun.
        self._told.note_told(SamplerParts(order.sampler, order.dataset).samplers, epoch)
        self._begin(order, earlier[known:])
        self._begun_again = told_of
        seconds = time.perf_counter() - started
        if seconds > LONG_FAST_FORWARD:
            warn(
                f"{order.name} changes itself while it is iterated, so its {len(earlier)} earlier passes were begun "
                f"again, by indices alone, which took {seconds:.1f} s."
            )

    def begin_since(self, order: UserSampler, told_of: list[list[int]]) -> None:
        """Begin the passes of evaluation loaders again that a state tells of since its pass of training was begun."""
        self._begin(order, spelled_out(told_of))

    def _begin(self, order: UserSampler, passes: list[list[int]]) -> None:
        for passed in passes:
            self._drop_left(order, *passed[:2])
            self._left = begin_pass(order, order.iterated(), passed)
            self._append(passed, False)
            if not self._tells_first(order):
                self._left.drop()

    def _drop_left(self, order: UserSampler, epoch: int, cycle: int) -> None:
        """Drop the iterator of the pass before, of which training has begun to tell the next."""
        if self._left is not None:
            if self._tells_first(order):
                order.iterated().tell(epoch, cycle)
            self._left.drop()
            self._left = None

    def _tells_first(self, order: UserSampler) -> bool:
        return self.is_told_first and order.has_set_epoch and not order.facts.adds_up

    def _close(self) -> None:
        if self._latest is not None:
            self._latest.entry[2] = self._latest.drawn if self._latest.end is None else -1

    def warn_once(self, message: str, once: str = "") -> None:
        """Warn, but not again of what has the same name ``once``, or else the same text."""
        if (once or message) not in self._warned:
            self._warned.add(once or message)
            warn(message)


def memory_of(sampler: Any, dataset: Any = None) -> SamplerMemory:
    """The memory of a sampler, the same for all that iterate it in this process; a dataset in it is not looked into."""
    held, memory = _MEMORIES.get(id(sampler), (None, None))
    if held is not None and memory is not None and held() is sampler:
        return memory
    key, made, memories = id(sampler), SamplerMemory(SamplerParts(sampler, dataset)), _MEMORIES
    try:
        # Bound to the dict itself: names of the module are gone where the interpreter ends.
        reference: Callable[[], Any] = weakref.ref(sampler, lambda _: memories.pop(key, None))
    except TypeError:
        # Its class has no weak references: it is held for good.
        reference = repeat(sampler).__next__
    memories[key] = reference, made
    return made
