"""Iterates a user's sampler from any item on, by its own state or by dropping items, under randomness of the epoch."""

from __future__ import annotations

import copy
import time
import warnings
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice, repeat
from types import GeneratorType
from typing import Any, Protocol

import numpy as np
import torch

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.rng import OwnRandomness, seed_generator
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.user_samplers.rank_exchange import post, posted
from lightning_stateful.user_samplers.sampler_copy import Path, SamplerParts, held_at
from lightning_stateful.user_samplers.sampler_facts import Dealing, ResumeMode, SamplerFacts
from lightning_stateful.user_samplers.sampler_ranks import AskedRanks, Setting, told

# A sampler that has a state of its own is noted so often.
STATE_STRIDE = 16
# Others are noted at the items 0, 1, 2, 4, 8 and so on, then at the multiples of this.
_DIGEST_STRIDE = 1024
# Prefetching workers and open accumulation windows are as far as training may lie behind what was drawn.
_KEPT_NOTES = 512
# Notes that other ranks see, where each iterates its own.
_NUM_POSTED = 16
# Seconds from which on the cost of fast-forwarding is worth a word.
LONG_FAST_FORWARD = 1.0

_END = object()
_NOTHING = nullcontext()
_OF_KEPT: frozenset[Any] = frozenset({type(iter([])), type(iter(())), type(iter(range(0)))})
_next: Callable[[Iterator[Any]], Any] = next


class IteratedSampler:
    """Iterates a sampler under randomness of its own, perhaps told of other ranks than those that there are.

    Args:
        sampler: The sampler.
        seed: Chooses the randomness, together with epoch, cycle and item.
        dataset: What is not looked into to find samplers and generators, or None.
        settings: Attributes to set while it is iterated.
        asked: Answers for torch.distributed while it is iterated; None to leave torch alone.
        generators: Where the generators are that it held before anybody iterated it. One that it makes on the way would
            not be there in a resumed run.
        tell: Tells it the epoch; None to call every ``set_epoch`` in it.
    """

    def __init__(
        self,
        sampler: Any,
        seed: int,
        *,
        dataset: Any = None,
        settings: Sequence[Setting] = (),
        asked: AskedRanks | None = None,
        generators: Collection[Path] = (),
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self._tell = partial(_tell_epoch, sampler, dataset) if tell is None else tell
        self.sampler, self._seed, self._dataset, self._generators = sampler, seed, dataset, generators
        self._settings, self._asked = settings, asked
        self._random = OwnRandomness(seed)

    def begin(
        self,
        epoch: int,
        cycle: int,
        drawn: int = 0,
        state: Any = None,
        *,
        before_iter: Callable[[], object] = tuple,
    ) -> Iterator[Any]:
        """Begin a pass; what is returned is to be iterated within :meth:`entered`.

        Args:
            epoch: Which epoch.
            cycle: Which pass within the epoch.
            drawn: How many items it had yielded when it gave a state.
            state: What :meth:`state` returned then; None to begin with the first item.
            before_iter: Called when the sampler has been told the epoch.
        """
        self._reseed(epoch, cycle)
        with self.entered():
            self._tell(epoch)
        before_iter()
        if state is not None:
            self._reseed(epoch, cycle, drawn)
        with self.entered():
            if state is not None:
                self.sampler.load_state_dict(from_plain(state))
            iterator = iter(self.sampler)
        # A sampler that is its own iterator may begin anew at iter(), which islice() calls: let only next() be called.
        return map(_next, repeat(iterator)) if hasattr(type(iterator).__iter__, "__code__") else iterator

    def state(self, epoch: int, cycle: int, drawn: int) -> Any:
        """The sampler's own state after it has yielded ``drawn`` items, as plain data."""
        # Seeded first: a state may hold generators, which a resume then puts where they are now.
        self._reseed(epoch, cycle, drawn)
        with self.entered():
            return to_plain(self.sampler.state_dict(), f"{type(self.sampler).__qualname__}.state_dict()")

    def entered(self) -> AbstractContextManager[None]:
        """A block in which to run the sampler's code: it sees its own randomness, and the ranks that it is told of."""
        return self._told_of_ranks() if self._settings or self._asked is not None else self._random

    @contextmanager
    def _told_of_ranks(self) -> Iterator[None]:
        with self._random, told(self._settings), nullcontext() if self._asked is None else self._asked.answering():
            yield

    def _reseed(self, *labels: int) -> None:
        self._random.seed(derive_seed("sampler", self._seed, *labels))
        for path in self._generators:
            seed_generator(held_at(self.sampler, path), derive_seed("held generator", repr(path), self._seed, *labels))


class UserSampler(Protocol):
    """A user's sampler with its settings, as ``WrappedSampler`` has and documents them."""

    @property
    def name(self) -> str:
        """Its class."""

    @property
    def sampler(self) -> Any:
        """The user's own object."""

    @property
    def dataset(self) -> Any:
        """The loader's dataset, which copies share with it."""

    @property
    def kind(self) -> str:
        """The name under which a state knows such a sequence."""

    @property
    def unit(self) -> str:
        """Either "batches" or "samples"."""

    @property
    def seed(self) -> int:
        """Chooses its randomness."""

    @property
    def accept(self) -> Collection[str]:
        """Names of differences to let pass."""

    @property
    def memory(self) -> PassNotes:
        """Notes of the passes over it in this process."""

    @property
    def facts(self) -> SamplerFacts:
        """Facts that trying a copy has shown."""

    @property
    def dealing(self) -> Dealing:
        """The way its items come to ranks."""

    @property
    def resume_mode(self) -> ResumeMode:
        """The way in which a resume brings it to an item."""

    @property
    def innermost(self) -> Any:
        """The sampler in torch's batch samplers."""

    @property
    def num_items(self) -> int | None:
        """Items of the epoch that it was told last, if known."""

    @property
    def remembers(self) -> bool:
        """Whether what it yields depends on its earlier passes."""

    @property
    def shuffles(self) -> bool:
        """Whether the items of a step are shuffled."""

    @property
    def whole_batches(self) -> bool:
        """Whether its items are whole batches."""

    @property
    def cuts_samples(self) -> bool:
        """Whether torch cuts its samples into batches."""

    @property
    def yields_containers(self) -> bool:
        """Whether what it yields has to be copied."""

    @property
    def has_set_epoch(self) -> bool:
        """Whether it is told the epoch."""

    @property
    def repeats_first_epoch(self) -> bool:
        """Whether every epoch is the first one again."""

    @property
    def is_known(self) -> bool:
        """Whether it is torch's own."""

    @property
    def is_cut(self) -> bool:
        """Whether epochs are cut off at a given length."""

    @property
    def is_collated(self) -> bool:
        """Whether its items are certainly batches of indices."""

    @property
    def is_wrapped(self) -> bool:
        """Whether the user asks to have it dealt out."""

    @property
    def is_dealt_out(self) -> bool:
        """Whether ranks share one sequence."""

    @property
    def is_trained_on(self) -> bool:
        """Whether a run may be resumed within it."""

    def iterated(self) -> IteratedSampler:
        """The sampler itself, to be iterated."""

    def iterating(self, sampler: Any, settings: Sequence[Setting] = (), asked: Any = None) -> IteratedSampler:
        """It, or a copy of it, to be iterated."""

    def length_of(self, sampler: Any) -> int | None:
        """Items of an epoch as a copy of it says now."""

    def num_items_in(self, epoch: int) -> int | None:
        """Items of an epoch, if known."""

    def rule(self, num_replicas: int) -> StepRule:
        """The rule by which its items are cut into steps."""

    def bring_to(self, epoch: int, passes: Any) -> None:
        """Begin the passes before an epoch that a state tells of."""

    def parameters(self) -> dict[str, Any]:
        """The parameters of torch's own samplers."""


class PassNotes(Protocol):
    """Is told of the passes over a sampler, and knows those that were begun before."""

    def note_begin(self, order: UserSampler, begun: SamplerPass, earlier: list[list[int]] | None) -> None:
        """A pass begins."""

    def note_contents(self, order: UserSampler, begun: SamplerPass) -> None:
        """A pass has begun, and the sampler was told its epoch."""

    def note_last(self, order: UserSampler, latest: SamplerPass) -> None:
        """The last item that an epoch serves was drawn."""

    def note_end(self, order: UserSampler, ended: SamplerPass) -> None:
        """A pass has come to the sampler's end."""

    def compare_with_check(self, order: UserSampler, at: SamplerPass, index: int, found: str) -> None:
        """An item of a pass has the digest ``found``."""

    def compare_epochs(self, order: UserSampler, epoch: int) -> None:
        """An epoch is about to begin."""

    def passes_before(self, epoch: int, cycle: int) -> list[list[int]]:
        """The passes before one, for a state."""


class SamplerPass:
    """One pass over the user's sampler itself, from any item on; nothing is drawn before it is asked for.

    It begins when it is first asked for items: by the sampler's own state, or at the pass's first item, and drops what
    comes before. On its way it notes items with a digest of what was yielded there, and with the sampler's own state
    before that, if it has one. A resume compares the digest of the note that it begins from.

    Args:
        order: The sampler.
        epoch: Which epoch.
        cycle: Which pass within the epoch.
        first: The index of the first item that is wanted.
        noted: A note of an earlier run: the index of an item, its digest, and the sampler's own state or None. Empty
            for none.
        earlier: Passes that the run has begun before, as a state has them, in a list; None, or a ``PassesHere``, for a
            pass that follows those of this process.

    Attributes:
        drawn: Items of the pass that the sampler has yielded.
        end: Items of the pass once the sampler was seen to end; None before that.
        has_states: Whether items are noted with the sampler's own state.
        label: Epoch and cycle by which it is seeded.
    """

    def __init__(
        self, order: UserSampler, epoch: int, cycle: int, first: int, noted: Sequence[Any], earlier: Any = None
    ) -> None:
        self.drawn = 0
        self.end: int | None = None
        self.label = (0, 0) if order.repeats_first_epoch else (epoch, cycle)
        self._order, self._epoch, self._first, self._earlier = order, epoch, first, earlier
        self._expected = noted or (0, "", None)
        self.has_states = order.resume_mode == "own_state"
        self._iterated: IteratedSampler | None = None
        self._iterator: Iterator[Any] = iter(())
        self._ready: list[Any] = []
        self._failure: Exception | None = None
        self._notes: deque[list[Any]] = deque(maxlen=_KEPT_NOTES)

    @property
    def has_state(self) -> bool:
        """Whether it begins by the sampler's own state."""
        return self._expected[2] is not None

    def look_ahead(self, count: int) -> int:
        """Draw until ``count`` items are ready, unless the sampler ends; how many are."""
        while len(self._ready) < count and self.end is None and self._failure is None:
            try:
                self._draw(count - len(self._ready))
            except Exception as error:
                # What came before it is served first.
                self._failure = error
        if self._failure is not None and len(self._ready) < count:
            raise self._failure
        return len(self._ready)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` items, which have to be ready."""
        ready = self._ready
        taken, self._ready = (ready, []) if len(ready) == count else (ready[:count], ready[count:])
        return taken

    def noted_before(self, index: int) -> list[Any]:
        """The latest note of an earlier item, for a progress at ``index``; empty if there is none."""
        return next((note for note in reversed(self._notes) if note[0] < index), [])

    def noted_by_ranks(self, index: int) -> list[list[Any]]:
        """The latest notes of an earlier item that all ranks have posted, where each iterates its own sampler."""
        found: list[list[Any]] = []
        for of_rank in posted(self._posted_as):
            notes = of_rank["notes"] if of_rank is not None and of_rank["label"] == list(self.label) else []
            found.append(next((note for note in reversed(notes) if note[0] < index), []))
        return found

    @property
    def _posted_as(self) -> str:
        return f"{self._order.name} {self._order.seed}"

    def _draw(self, count: int) -> None:
        """Draw ``count`` items, or fewer at the end."""
        if self._iterated is None:
            self._begin()
        iterated, target = self._iterated, len(self._ready) + count
        if iterated is None:
            return
        while len(self._ready) < target and self.end is None:
            self._pull(iterated, target - len(self._ready))
        if self.end is not None:
            self._order.memory.note_end(self._order, self)

    def _begin(self) -> None:
        """Iterate the sampler, and drop what comes before the first item."""
        order, started = self._order, time.perf_counter()
        index, _, state = self._expected
        is_loaded = state is None and type(self._earlier) is list
        order.memory.note_begin(order, self, self._earlier if is_loaded else None)
        self.drawn = index if state is not None else 0
        self._iterated = iterated = order.iterated()
        self._copies = order.yields_containers
        note = partial(order.memory.note_contents, order, self)
        self._iterator = iterated.begin(*self.label, index, state, before_iter=note)
        distance = self._first - self.drawn
        while self.drawn < self._first and self.end is None:
            self._pull(iterated, self._first - self.drawn)
        if self.drawn < self._first:
            raise PositionError(
                f"{self._first} items of {order.name} were used in epoch {self._epoch}, but now it ends before "
                "that. Build it as when the checkpoint was written, or resume from another checkpoint."
            )
        seconds = time.perf_counter() - started
        if distance and seconds > LONG_FAST_FORWARD:
            warn(
                f"{order.name} was fast-forwarded by {distance} items to item {self._first} of epoch {self._epoch}, "
                f"which took {seconds:.1f} s. A sampler with state_dict() and load_state_dict() is there at once."
            )

    def _pull(self, iterated: IteratedSampler, wanted: int) -> None:
        """Let the sampler yield items as far as the next one that is noted, or that one alone."""
        began, before, state = self.drawn, len(self._ready), None
        is_noted = began == (noted := self._next_note(began))
        if is_noted and self.has_states:
            index, _, state = self._expected
            if began != index:
                state = iterated.state(*self.label, began) if began else None
        wanted = 1 if is_noted else min(wanted, noted - began)
        with _NOTHING if gives_kept(self._iterator, wanted) else iterated.entered():
            if began < self._first:
                # Dropped at the speed of the sampler itself.
                item = next(islice(self._iterator, wanted - 1, None), _END)
                self.drawn += 0 if item is _END else wanted
            else:
                items = islice(self._iterator, wanted)
                try:
                    # What a sampler yielded before it failed stays.
                    self._ready.extend(map(_kept, items) if self._copies else items)
                finally:
                    self.drawn += len(self._ready) - before
                item = self._ready[-1] if self._ready else _END
        if self.drawn < began + wanted:
            self.end = self.drawn
        elif is_noted:
            self._note(began, item, state)

    def _next_note(self, index: int) -> int:
        """The first item at or after ``index`` that is noted."""
        return -(-index // STATE_STRIDE) * STATE_STRIDE if self.has_states else next_digest_index(index)

    def _note(self, index: int, item: Any, state: Any) -> None:
        # Chained where a resume comes by the same notes again, and so sees all of them changed.
        found = digest(item, self._notes[-1][1] if self._notes and not self.has_states else "")
        self._notes.append([index, found, state])
        order, (at, expected, _) = self._order, self._expected
        if order.dealing.is_own and order.is_trained_on:
            notes = list(islice(self._notes, max(len(self._notes) - _NUM_POSTED, 0), None))
            post(self._posted_as, {"label": self.label, "notes": notes})
        order.memory.compare_with_check(order, self, index, found)
        if index != at or found == expected or not expected:
            return
        if "nondeterministic" in order.accept:
            warn(
                f"{order.name} differs from run to run. What is left of epoch {self._epoch} is not what was left when "
                "the checkpoint was written: some samples come twice, and others never."
            )
            return
        of_state = "" if state is None else f"See that {order.name}.load_state_dict leads back to this very item. "
        remedy = (
            f"{order.name} no longer yields what it did up to this item: build it with the same data and settings. "
            f"{of_state}If it depends on anything else (training, time, the order of a set, another process), make it "
            "depend on its epoch alone. accept=('sequence',) goes on all the same."
        )
        changed = Difference(path=f"sequence at item {index}", saved=expected, present=found, remedy=remedy)
        if "sequence" not in order.accept:
            raise StateMismatchError([changed], where=f"The sampler's state in epoch {self._epoch}")
        warn(f"Accepted: {changed}")


def _tell_epoch(sampler: Any, dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler and of those in it, from the inside out."""
    for part in SamplerParts(sampler, dataset).samplers:
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def warn(message: str) -> None:
    """Warn the user of a sampler."""
    warnings.warn(message, StatefulWarning, stacklevel=3)


def gives_kept(iterator: Any, count: int) -> bool:
    """Whether the next items come out of a list or a range, so that no code of the sampler's runs for them.

    A generator at ``yield from`` goes on with its own code only when that has ended.
    """
    while type(iterator) is GeneratorType:
        iterator = iterator.gi_yieldfrom
    return type(iterator) in _OF_KEPT and iterator.__length_hint__() >= count


def next_digest_index(index: int) -> int:
    """The first item at or after ``index`` of which a digest is noted."""
    if index >= _DIGEST_STRIDE:
        return -(-index // _DIGEST_STRIDE) * _DIGEST_STRIDE
    return index if index < 2 else 1 << (index - 1).bit_length()


_INTEGERS = (int, np.integer)
# Containers that a sampler may fill again after it has yielded them; of another object nothing is known.
_CONTAINERS = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray, np.ndarray, torch.Tensor)


def _kept(batch: Any) -> Any:
    """Copy a batch, so that it stays as it was yielded: a sampler may fill the very container again."""
    # The common case at the speed of a list: batches hold things of one kind.
    if type(batch) is list and (not batch or isinstance(batch[0], _INTEGERS)):
        return batch.copy()
    return copy.deepcopy(batch) if isinstance(batch, _CONTAINERS) else batch
