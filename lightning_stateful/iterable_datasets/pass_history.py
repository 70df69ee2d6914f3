"""Tells passes over an iterable dataset from one another: how far they went, what they gave, and what was set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stateful.contents.held_state import HeldState, changed_names
from lightning_stateful.errors import PositionError, some_of
from lightning_stateful.generators.attributes import (
    PLAIN,
    can_be_read,
    is_users,
    text_of_plain,
)
from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.iterable_datasets.dataset_parts import attributes_in, digest_of_dataset, digests_of, parts_of
from lightning_stateful.iterable_datasets.iterable_task import is_told
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents, digest_of_generators
from lightning_stateful.samplers.fingerprint import digest, digest_of_tensor, hex_digest
from lightning_stateful.samplers.state_codec import to_plain
from lightning_stateful.stream_nodes.own_state import has_state

# The first samples of a pass, and those at powers of two behind them, tell it from others.
NUM_FIRST = 8
_MOST_NESTED = 8
_MOST_NUMBERS = 2**14
# Labels and tokens; bytes are mostly images.
_LABEL_TYPES = (torch.int16, torch.int32, torch.int64)


# What is said of a dataset with a state of its own.
LEFT_OUT = (
    "Its own state_dict and load_state_dict leave something out, such as its position in the pass, a buffer, or a "
    "generator of random numbers, or a state that was loaded stays in force for later passes. Have them see to it; "
    'accept=("nondeterministic",) is silent.'
)
INEXACT = f"the resume is not exact. {LEFT_OUT}"
# Of one that has left it out in a pass that is over.
PERHAPS = f"that pass is over, so the resume is exact if later passes do not depend on that. {LEFT_OUT}"


def is_moved_in(state: Mapping[str, Any]) -> bool:
    """Whether passes have changed, or drawn from, anything, by a state that :meth:`PassHistory.noted` is part of."""
    return any(state.get(name) for name in ("changes", "draws", "begins", "outside", "begun", "left"))


class PassHistory(list[int]):
    """The passes over a dataset in this process: of each the batches read, or ``-1 - batches`` of one that ended.

    Attributes:
        changes: Whether the dataset has changed between the first batch of a pass and its end.
        has_loaded: Whether the dataset has loaded a state.
        loaded: Digests of the first two batches behind that state; empty for fewer.
        draws: Whether samples were drawn from random generators that the dataset holds.
        begins: Of a dataset that is told the epoch, whether the beginning of a pass has changed it.
        is_behind: Whether a pass that was over before a resume was left out, and the dataset not brought to its end.
        outside: Values outside of the dataset that its code reaches; None until :meth:`look_outside`.
        seed_pass: Seeds the process's generators as they were for a pass of an earlier epoch; None if nothing did.
        moved: Digests of those that passes have changed, by name, from before the first pass.
        attributes: What passes change in the dataset's own attributes.
        firsts: Of a dataset with a state, texts of attributes behind the first batch of the first pass.
        lasting: The names of those that were others behind the first batch of a later one.
        elsewhere: Random generators that stand elsewhere than before a resume: where they do, and stood then.
        beginning: The state that the dataset had before anybody read it, as plain data; None if it had none.
    """

    changes = draws = begins = is_behind = has_loaded = False
    outside: OutsideValues | None = None
    seed_pass: Callable[[int], object] | None = None
    beginning: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        # Batches of the present pass that are those, one after the other.
        self._num_alike = 0
        self.moved: dict[str, str] = {}
        self.attributes = ChangedAttributes()
        self.firsts: dict[str, str] = {}
        self.lasting: set[str] = set()
        self.elsewhere: dict[str, tuple[Any, str, str]] = {}
        # Digests of what lies outside of the dataset, from before the first pass and before the latest one.
        self._began: dict[str, str] = {}
        self._begun: dict[str, str] = {}
        # What the dataset held after the first batch of the pass, and the states of generators; and both before it.
        self._contents = self._drawn = self._told = ""
        self._length = -1

    @contextmanager
    def seeded_as_in(self, epoch: int) -> Iterator[None]:
        """Seed the process's generators as for the pass of an earlier epoch, and put them back in the end."""
        with keep_randomness():
            if self.seed_pass is not None:
                self.seed_pass(epoch)
            yield

    def note_loaded(self, batch: list[Any], *, is_first: bool) -> None:
        """Note one of the batches behind a loaded state.

        Where all batches are alike they tell nothing: of those behind the first none may be the same.
        """
        told = digest_of_sample(batch, only_labels=False)
        if is_first or told in self.loaded[:1]:
            self.loaded = [told] if is_first else []
        elif len(self.loaded) == 1:
            self.loaded.append(told)

    def is_where_loaded(self, batch: list[Any], number: int) -> bool:
        """Whether the first two batches of a pass are those behind a loaded state, though the pass before has ended.

        Args:
            batch: One of them.
            number: Its number in the pass.
        """
        is_alike = number < len(self.loaded) == 2 and self.loaded[number] == digest_of_sample(batch, only_labels=False)
        follows = number == (self._num_alike if number else 0)
        self._num_alike = number + 1 if is_alike and follows else 0
        if self._num_alike < 2:
            return False
        self.loaded = []
        return len(self) > 1 and self[-2] < 0

    def look_outside(self, dataset: Any) -> dict[str, str]:
        """Digests of values outside of the dataset, from before its first pass in this process."""
        if self.outside is None:
            self.outside = OutsideValues(dataset)
            self._began = self.outside.digests()
        return self._began

    def note_begin(self, dataset: Any) -> None:
        """A pass over the dataset is about to begin, of which it was told the epoch if it has ``set_epoch``."""
        self.look_outside(dataset)
        # Since then hooks may have set something.
        self._begun = self._began if self.outside is None else self.outside.digests()
        self.attributes.note_begin(dataset)
        self._told = _told_apart(dataset) if is_told(dataset) and not self.begins else ""

    @property
    def is_moved(self) -> bool:
        """Whether passes have changed, or drawn from, anything that a later one may follow from."""
        return self.changes or self.draws or self.begins or bool(self.moved)

    def noted(self) -> dict[str, Any]:
        """What a state holds of passes so far."""
        noted = {"changes": self.changes, "draws": self.draws, "outside": dict(self.moved)}
        begins = {"begins": True} if self.begins else {}
        return {**noted, **begins, **self.attributes.state()}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take over what a state holds of passes, but for what they have changed."""
        self.changes, self.draws = self.changes or state["changes"], self.draws or state["draws"]
        self.begins = self.begins or state.get("begins", False)

    def compare_outside(self, dataset: Any, expected: Mapping[str, str], seeded: Collection[str] = ()) -> str:
        """A sentence on what was another before the first pass of the run that wrote a state; empty if nothing was.

        Args:
            dataset: The dataset.
            expected: Digests as :attr:`moved` had them there.
            seeded: Names of random generators that each pass seeds, which are left out.
        """
        now = self.look_outside(dataset)
        others = sorted(name for name, held in expected.items() if now.get(name) != held and name not in seeded)
        self.moved |= expected
        if not others:
            return ""
        return (
            f"changes {', '.join(others[:4])} in a pass, which no checkpoint has, and it was another before the first "
            "pass of the run that wrote the checkpoint: the resume is not exact. Resume in a new process, keep it in "
            "an attribute of the dataset, or let the order follow from set_epoch(epoch)."
        )

    def watch(self, dataset: Any, item: int, *, is_first: bool, is_end: bool, is_early: bool) -> None:
        """Note what a pass changes, and whether samples were drawn from generators.

        Args:
            dataset: The dataset.
            item: Samples, or batches of an iterable of batches, that the pass has given: by its length the last is
                known, behind which nobody may ask for more.
            is_first: Whether the first batch of the pass was read.
            is_end: Whether the pass is at its end.
            is_early: Whether one of the first batches was read.
        """
        outside = self.outside
        if is_first:
            self._length = _length_of(dataset)
            self.begins = self.begins or bool(self._told and self._told != _told_apart(dataset))
        is_end = is_end or item == self._length
        if is_first or is_end:
            self.attributes.note(dataset, is_end=is_end)
            now = {} if outside is None else outside.digests()
            changed = [name for name, held in self._begun.items() if now.get(name, held) != held]
            self.moved |= {name: self._began[name] for name in changed if name in self._began}
        # Behind a state of its iterator, with which a resume goes on, there is no first batch.
        # Of one that a limit cuts nobody sees the end.
        if not self.changes and (is_first or is_end or is_early or not self._contents):
            counted = {} if outside is None else outside.digests(of_generators=False)
            contents, before = digest([digest_of_dataset(dataset), *counted.values()]), self._contents
            before = "" if is_first else before
            is_changed = contents != before if before else is_end
            self.changes, self._contents = (is_end or is_early) and is_changed, before or contents
        if not self.draws and (is_early or is_end):
            drawn = digest_of_generators(*parts_of(dataset), *(() if outside is None else outside.generators()))
            self._drawn = drawn if is_first else self._drawn
            self.draws = bool(drawn and self._drawn and drawn != self._drawn)


class ChangedAttributes:
    """The attributes of a dataset that its own passes change, random generators in them too, as digests.

    Left out are datasets of installed packages, what ``set_epoch`` sets, and attributes that hold sets, which are shown
    in another order in each process.

    Attributes:
        set_by_hooks: Digests of attributes that something else than its passes sets, as they were in the checkpoint:
            these are left out, but where hooks have restored them.

    State:
        By ``class.attribute``: ``built``, as they were before the first pass of the run; ``begun``, before the latest
        pass; ``left``, at its end, and empty before that.
    """

    def __init__(self) -> None:
        self.set_by_hooks: Mapping[str, str] = {}
        self._names: set[str] = set()
        self._built: dict[str, str] | None = None
        self._begun: dict[str, str] = {}
        self._left: dict[str, str] = {}
        # As they were behind the first batch of a resume, until the next one is read.
        self._behind_first: dict[str, str] | None = None

    @property
    def are_changed(self) -> bool:
        """Whether passes change any."""
        return bool(self._names)

    def note_begin(self, dataset: Any) -> None:
        """A pass over the dataset is about to begin."""
        self._begun, self._left = _digests_of_attributes(dataset), {}
        self._built = self._begun if self._built is None else self._built

    def note(self, dataset: Any, *, is_end: bool) -> None:
        """A batch was read, the first or last one of the pass."""
        now = _digests_of_attributes(dataset)
        self._names |= changed_names(self._built or {}, now)
        self._left = now if is_end else {}

    def state(self) -> dict[str, dict[str, str]]:
        """See above."""
        kept = {"built": self._built or {}, "begun": self._begun, "left": self._left}
        return {key: {name: held.get(name, "") for name in self._names if held} for key, held in kept.items()}

    def left(self, dataset: Any) -> dict[str, str]:
        """Digests of them as they are now, where a pass was left before its end."""
        now = _digests_of_attributes(dataset)
        return {name: now.get(name, "") for name in self._names}

    def compare(self, dataset: Any, state: Mapping[str, Any], seeded: Collection[str] = ()) -> tuple[bool, str]:
        """Whether something else has brought the dataset to where the pass of a state began, before any pass here.

        Args:
            dataset: The dataset.
            state: Of the run that wrote the checkpoint.
            seeded: Names of random generators that each pass seeds, which are left out.

        Returns:
            Whether it has, so that earlier passes are not to be begun again; and a sentence if the resume is not exact
            because it did so in part, or has brought it elsewhere.
        """
        built, begun, now = state.get("built", {}), state.get("begun", {}), _digests_of_attributes(dataset)
        self._built, self._names = {**now, **built}, {*built}
        names = sorted(built.keys() - self.set_by_hooks.keys() - {*seeded})
        there = [
            name for name in names if begun.get(name) not in (None, built[name]) and now.get(name, "") == begun[name]
        ]
        if not state["batches"]:
            # What training changes as well is restored as it was in the checkpoint.
            by_both = [name for name in built if name in self.set_by_hooks and now.get(name) != built[name]]
            held = digests_of(dataset, by_both)
            there += [name for name in by_both if held.get(name) == self.set_by_hooks[name]]
        expected = begun if there else built
        others = [name for name in names if name not in there and now.get(name, "") != expected.get(name)]
        if not others:
            return bool(there), ""
        if there:
            return True, (
                f"has {some_of(there)} as a hook has restored it, but not {some_of(others)}, which its passes change "
                "too: the resume is not exact. Restore all of them, or none, and its earlier passes are begun again."
            )
        return False, (
            f"changes {some_of(others)} in each pass, which is another here than before the first pass of the run that "
            "wrote the checkpoint: a hook has restored it, or it was iterated in this process. Its earlier passes are "
            "begun again from there, so the resume is not exact. Let a new process build the dataset as it was, with "
            "a seed for what is random, and leave it to the resume."
        )

    def note_first(self, dataset: Any) -> None:
        """The first batch of a resume was read."""
        self._behind_first = _digests_of_attributes(dataset) if self._names else None

    def set_since_first(self, dataset: Any) -> list[str]:
        """Names of those that something else has set since :meth:`note_first`; none if that was asked before."""
        before, self._behind_first = self._behind_first, None
        if before is None:
            return []
        now = _digests_of_attributes(dataset)
        return [name for name in sorted(self._names - self.set_by_hooks.keys()) if now.get(name) != before.get(name)]


def _digests_of_attributes(dataset: Any) -> dict[str, str]:
    """Digests of a dataset's attributes that another process may compare; see :class:`ChangedAttributes`."""
    found: dict[str, str] = {}
    for name, value in attributes_in(dataset, looks_at=lambda part: is_users(type(part).__module__)):
        if type(value) in PLAIN:
            found[name] = found.get(name, "") + text_of_plain(value)
            continue
        parts = SamplerParts(value)
        if not any(isinstance(part, (set, frozenset)) for part in parts.found):
            own = [one for one in parts.generators.values() if identity_of(one) != 0]
            found[name] = found.get(name, "") + digest_of_contents([value], of_copy=True) + digest_of_generators(*own)
    return {name: hex_digest(text.encode(errors="surrogatepass")) for name, text in found.items()}


def beginning_of(dataset: Any) -> Any:
    """The state that a dataset had before anybody read it in this process, as plain data; None if it had none.

    The dataset stays as it was: torchdata's ``Loader``, asked for its state first, ignores one that is loaded then.
    """
    history = history_of(dataset)
    if not history and has_state(dataset):
        held = HeldState(dataset, containers=False)
        try:
            history.beginning = to_plain(dataset.state_dict())
        except Exception:
            # Some have a state only once they are iterated.
            history.beginning = None
        finally:
            held.restore()
    return history.beginning


# By the id of a dataset: a reference to it, and its passes in this process.
_histories: dict[int, tuple[Callable[[], Any], PassHistory]] = {}


def _told_apart(dataset: Any) -> str:
    """Digest of what a dataset holds, and of where its random generators stand."""
    return digest_of_dataset(dataset) + digest_of_generators(*parts_of(dataset))


def _length_of(dataset: Any) -> int:
    """How many items a dataset, or an iterable, says that it has; -1 if it does not."""
    try:
        return len(dataset)
    except Exception:
        return -1


def history_of(dataset: Any) -> PassHistory:
    """The passes over a dataset in this process."""
    key = id(dataset)
    holder, history = _histories.get(key, (None, PassHistory()))
    if holder is None or holder() is not dataset:
        history = PassHistory()
        try:
            # Bound to the dict itself: names of the module are gone where the interpreter ends.
            known: dict[int, Any] = _histories
            held: Callable[[], Any] = weakref.ref(dataset, lambda _: known.pop(key, None))
        except TypeError:
            # Its class has no weak references: it is held for good.
            held = repeat(dataset).__next__
        _histories[key] = held, history
    return history


class FirstSamples(NamedTuple):
    """Digests of the first samples of a pass, and of those at powers of two behind them.

    Attributes:
        labels: Digest of their integers and strings, which no augmentation changes.
        whole: Digest of all that they hold.
        one: Digest of the labels of the very first one.
        differ: Whether others have other labels, so that labels tell samples apart.
    """

    labels: str = ""
    whole: str = ""
    one: str = ""
    differ: bool = False

    def behind(self, batch: list[Any], item: int) -> FirstSamples:
        """The same after another batch.

        Args:
            batch: Its samples.
            item: Samples of the pass before it.
        """
        numbers = set(range(item, min(item + len(batch), NUM_FIRST)))
        power = 1 << max(item - 1, 0).bit_length()
        while power < item + len(batch):
            numbers |= {power} if power >= item else set()
            power *= 2
        labels, whole, one, differ = self
        for number in sorted(numbers):
            sample = batch[number - item]
            present = digest_of_sample(sample, only_labels=True)
            one, differ = one or present, differ or present != (one or present)
            labels = digest_of_sample(sample, labels, only_labels=True)
            whole = digest_of_sample(sample, whole, only_labels=False)
        return FirstSamples(labels, whole, one, differ)

    def compare(
        self, noted: Any, where: str, *, is_as_long: bool, is_seeded: bool, known: Sequence[str] = ()
    ) -> list[str]:
        """Compare samples that were read again with those before a resume.

        Args:
            noted: Those before, as plain data; None if nothing was noted of them.
            where: Where they begin, for the error.
            known: What is known of the dataset that may be the cause, for the error.
            is_as_long: Whether as many were read again.
            is_seeded: Whether their random draws follow a seed, so that all values are the same again.

        Returns:
            A warning, if only labels are the same.

        Raises:
            PositionError: These are other samples.
        """
        before = self if noted is None else FirstSamples(*noted)
        if not is_as_long or self.labels != before.labels or (self.whole != before.whole and not before.differ):
            raise PositionError(
                f"{where} with other samples than before the resume, so that nobody can say which of its samples "
                "were trained on. It is read again from its beginning: give a new process the dataset as it was built, "
                "of the same files, vocabulary and lengths (a set of strings has another order in each process: use "
                "sorted()). Let no hook restore its position or a count; what a hook sets by the epoch, and what it "
                "reads from, such as a replay buffer, restore as it was when the epoch began, in load_state_dict: a "
                "loader without length is read before on_train_start. Better, give it state_dict and load_state_dict, "
                "or an order that follows from set_epoch(epoch); or resume from the end of an epoch. "
                f'accept=("nondeterministic",) reads on behind as many samples.{"".join(f" {one}" for one in known)}'
            )
        if self.whole == before.whole or not is_seeded:
            return []
        return [
            f"{where} with samples that have the integers and strings of those before the resume, and other values: "
            "they are others, or were augmented by a random generator that follows no seed. The resume is not exact. "
            "Give it state_dict and load_state_dict, or an order that follows from set_epoch(epoch); "
            'accept=("nondeterministic",) is silent.'
        ]


def digest_of_sample(sample: Any, before: str | None = None, *, only_labels: bool | None = None) -> str:
    """Digest of a sample, chained to that of the samples before.

    Args:
        sample: The sample, or samples.
        before: The digest of those before.
        only_labels: Whether only its labels are looked at; None for all that it holds if it has none. Floats and images
            may be augmented otherwise each time.
    """
    parts = _parts_of(sample, only_labels=True) if only_labels is not False else []
    return digest(parts if parts or only_labels else _parts_of(sample, only_labels=False), before or "")


def _parts_of(value: Any, *, only_labels: bool, depth: int = 0) -> list[Any]:
    """The numbers and strings in a sample, and shapes and first numbers of arrays; or only integers and strings."""
    if issubclass(type(value), Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < _MOST_NESTED:
        return [part for item in value for part in _parts_of(item, only_labels=only_labels, depth=depth + 1)]
    if isinstance(value, torch.Tensor) and can_be_read(value):
        if only_labels and value.dtype not in _LABEL_TYPES:
            return []
        return [*value.shape, digest_of_tensor(value.detach().reshape(-1)[:_MOST_NUMBERS])]
    if isinstance(value, np.ndarray):
        if only_labels and (value.dtype.kind not in "iuSU" or value.itemsize == 1):
            return []
        first = value.reshape(-1)[:_MOST_NUMBERS]
        read = first if value.dtype.hasobject else hex_digest(str(value.dtype).encode(), first.tobytes())
        return [*value.shape, read]
    is_label = isinstance(value, (int, str, bytes, np.integer))
    if only_labels and not is_label:
        return []
    return [value if is_label or isinstance(value, float) else type(value).__qualname__]
