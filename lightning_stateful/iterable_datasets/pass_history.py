"""Tells passes over an iterable dataset from one another: how far they went, what they gave, and what was set."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import repeat
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.errors import PositionError, StatefulWarning
from lightning_stateful.generators.attributes import PLAIN, attributes_and_defaults, attributes_of, can_be_read
from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import GENERATORS, get_generator_state, state_of_generator
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents, digest_of_generators
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.state_codec import to_plain
from lightning_stateful.stream_nodes.own_state import has_state

# The first samples of a pass, and those at powers of two behind them, tell it from others.
NUM_FIRST = 8
_MOST_NESTED = 8
# Datasets in one that are looked into for others in turn.
_MOST_PARTS = 64
# Lightning reads the first batch before it builds loaders of validation.
_LOOKS_AT = 2
_MOST_NUMBERS = 2**14
# Labels and tokens; bytes are mostly images.
_LABEL_TYPES = (torch.int16, torch.int32, torch.int64)


# What is said of a dataset with a state of its own.
INEXACT = (
    "the resume is not exact. Its own state_dict and load_state_dict leave something out, such as its position in the "
    "pass, a buffer, or a generator of random numbers, or a state that was loaded stays in force for later passes. "
    'Have them see to it; accept=("nondeterministic",) is silent.'
)
OTHER_GENERATORS = (
    "holds a random generator that does not stand where it stood, because its own state_dict and load_state_dict leave "
    "it out: the resume is not exact in later passes, unless each of them seeds it. Have them see to it; "
    'accept=("nondeterministic",) is silent.'
)


class PassHistory(list[int]):
    """The passes over a dataset in this process: of each the batches read, or ``-1 - batches`` of one that ended.

    Attributes:
        changes: Whether the dataset has changed between the first batch of a pass and its end.
        loaded: Digest of the first batch behind a state that the dataset has loaded; empty if it has loaded none.
        draws: Whether samples were drawn from random generators that the dataset holds.
        is_behind: Whether a pass that was over before a resume was left out, and the dataset not brought to its end.
        outside: Values outside of the dataset that its code reaches; None until :meth:`look_outside`.
        moved: Digests of those that passes have changed, by name, from before the first pass.
    """

    changes = draws = is_behind = False
    loaded = ""
    outside: OutsideValues | None = None

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, str] = {}
        self._began: dict[str, str] = {}
        # What the dataset held after the first batch of the pass, and the states of generators.
        self._contents = self._drawn = ""
        self._length = -1

    def is_where_loaded(self, batch: list[Any]) -> bool:
        """Whether a batch is the first one behind a loaded state, though the pass before the present one has ended.

        Not where all batches are alike: of those behind the state none may be the same.
        """
        is_alike = bool(self.loaded) and self.loaded == digest_of_sample(batch, only_labels=False)
        self.loaded = "" if is_alike else self.loaded
        return is_alike and len(self) > 1 and self[-2] < 0

    def look_outside(self, dataset: Any) -> dict[str, str]:
        """Digests of values outside of the dataset, from before its first pass in this process."""
        if self.outside is None:
            self.outside = OutsideValues(dataset)
            self._began = self.outside.digests()
        return self._began

    def noted(self) -> dict[str, Any]:
        """What a state holds of passes so far."""
        return {"changes": self.changes, "draws": self.draws, "outside": dict(self.moved)}

    def compare_outside(self, dataset: Any, expected: Mapping[str, str]) -> str:
        """A sentence on what was another before the first pass of the run that wrote a state; empty if nothing was.

        Args:
            dataset: The dataset.
            expected: Digests as :attr:`moved` had them there.
        """
        now = self.look_outside(dataset)
        others = sorted(name for name, held in expected.items() if now.get(name) != held)
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
        is_end = is_end or item == self._length
        if is_first or is_end:
            now = {} if outside is None else outside.digests()
            self.moved |= {name: held for name, held in self._began.items() if now.get(name, held) != held}
        if not self.changes and (is_first or is_end):
            counted = {} if outside is None else outside.digests(of_generators=False)
            contents, before = digest([digest_of_dataset(dataset), *counted.values()]), self._contents
            before = "" if is_first else before
            self.changes, self._contents = is_end and contents != before, before or contents
        if not self.draws and (is_early or is_end):
            drawn = digest_of_generators(*parts_of(dataset), *(() if outside is None else outside.generators()))
            self._drawn = drawn if is_first else self._drawn
            self.draws = bool(drawn and self._drawn and drawn != self._drawn)


class KeptGenerators:
    """The random generators that datasets hold in attributes, and go on drawing from.

    Args:
        datasets: A dataset, and the datasets in it.
    """

    def __init__(self, datasets: list[Any]) -> None:
        self._datasets = datasets

    def digest(self) -> str:
        """Digest of the states of all of them, the same in every process; empty if there are none."""
        held = [value for dataset in self._datasets for value in attributes_of(dataset).values()]
        states = [get_generator_state(value) for value in held if isinstance(value, GENERATORS)]
        return digest(states) if states else ""

    def noted(self) -> dict[str, str]:
        """What a state holds of them."""
        return {"generators": found} if (found := self.digest()) else {}

    def stand_elsewhere(self, noted: str) -> bool:
        """Whether they stand elsewhere than where a digest was noted."""
        return "" not in (noted, found := self.digest()) and found != noted


class SetBetweenPasses:
    """Notices attributes of a dataset that something else than its passes sets between two of them, as a hook does.

    Datasets with ``set_epoch`` are left out: what that sets is looked at elsewhere.

    Args:
        dataset: The dataset, as it is in this process.
        in_workers: Whether workers read copies of it, so that no pass changes it here.
        looks_at: Whether to look at a value; by default at all.

    Attributes:
        expected: Digests by attribute, as a checkpoint has them from :meth:`found`, until the first pass begins.
        is_within: Whether these are of a pass that goes on, and not of one that is over.
    """

    def __init__(self, dataset: Any, *, in_workers: bool, looks_at: Callable[[Any], bool] = lambda value: True) -> None:
        self._dataset, self._in_workers, self._looks_at = dataset, in_workers, looks_at
        self.expected: dict[str, str] = {}
        self.is_within = False
        self._built = self._held()
        # What it held when the latest pass had ended; None within a pass that may change it.
        self._left: dict[str, str] | None = None
        # What it held when the latest pass began, and of that what was set between passes.
        self._begun: dict[str, str] = {}
        self._begun_with: dict[str, str] = {}
        self._set: set[str] = set()
        # Where the generators stood then that it holds, by their ids.
        self._stood: dict[int, str] = {}
        self._num_read = 0

    def note_begin(self) -> None:
        """A pass is about to begin."""
        self._begun = now = self._compare()
        present = self._digests(self.expected)
        lost = sorted(name for name, held in self.expected.items() if present.get(name, "") != held)
        if not self.is_within:
            # A hook sets something else for the next epoch.
            lost = [name for name in lost if now.get(name) == self._built.get(name)]
        if lost:
            _warn(
                f"{', '.join(lost)} was set between two epochs in the run that wrote the checkpoint, by something else "
                "than the dataset's own iteration, and is another here: the resume is not exact. Set the same again "
                "before the first batch, as in load_state_dict of a callback."
            )
        self.expected, self._left = {}, now if self._in_workers else None
        self._begun_with = self._digests(self._set)
        if self._num_read < _LOOKS_AT and not self._in_workers:
            found = {id(one): one for _, one in _generators_in(self._dataset)}
            self._stood = {key: state_of_generator(one) for key, one in found.items()}

    def note_read(self) -> None:
        """A batch was read: at the second one loaders of validation have been built.

        Warns:
            StatefulWarning: The pass has changed something that a dataset of validation holds too, or has drawn from a
                random generator in it; once.
        """
        self._num_read += 1
        if self._in_workers or self._num_read != _LOOKS_AT:
            return
        now = self._held()
        others = [value for dataset in list(_EVALUATED.values()) for _, value in attributes_in(dataset)]
        ids = {id(value) for value in others if type(value) not in PLAIN and not isinstance(value, Enum)}
        changed = {name for name in {*now, *self._begun} if now.get(name) != self._begun.get(name)}
        shared = {name for name, value in attributes_in(self._dataset) if id(value) in ids} & changed
        drawn = {id(one) for dataset in list(_EVALUATED.values()) for _, one in _generators_in(dataset)}
        shared |= {
            name
            for name, one in _generators_in(self._dataset)
            if id(one) in drawn and self._stood.get(id(one)) != state_of_generator(one)
        }
        if names := sorted(shared):
            _warn(
                f"The datasets of training and of validation share one object, {', '.join(names)}, which a pass "
                "changes: what the one gets depends on the passes of the other, of which a checkpoint knows nothing. "
                "So a resume may not be exact, or be refused. Give each dataset a copy of its own."
            )

    def note_end(self) -> None:
        """A pass has ended."""
        if not self._in_workers:
            self._left = self._held()

    def found(self, *, within: bool = False) -> dict[str, str]:
        """Digests of the attributes that were set between passes, by ``class.attribute``, the same in every process.

        Args:
            within: As they were when the latest pass began; else as they are now.
        """
        if self.expected:
            return self.expected
        if within:
            return dict(self._begun_with)
        self._compare()
        return self._digests(self._set)

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        """Digests of attributes as they are now, which another process may compare."""
        found: dict[str, str] = {}
        for name, value in attributes_in(self._dataset) if names else ():
            if name in names:
                found[name] = digest(value, found.get(name, ""))
        return {name: found.get(name, "") for name in sorted(names)}

    def _compare(self) -> dict[str, str]:
        """Digests of what the dataset holds now; warns of attributes that were set since the latest pass."""
        now, left = self._held(), self._left
        if left is not None:
            changed = {name for name in {*now, *left} if now.get(name) != left.get(name)} - self._set
            if changed:
                self._set |= changed
                _warn(
                    f"{', '.join(sorted(changed))} was changed between two epochs by something else than the dataset's "
                    "own iteration. A resume from here on is exact only if the same is set again before its first "
                    "batch, as in load_state_dict of a callback."
                )
        return now

    def _held(self) -> dict[str, str]:
        """Digests of all attributes, to be compared in this process."""
        held: dict[str, str] = {}
        for name, value in filter(lambda item: self._looks_at(item[1]), attributes_in(self._dataset)):
            held[name] = held.get(name, "") + digest_of_contents({name.rpartition(".")[2]: value})
        return held


def beginning_of(dataset: Any) -> Any:
    """The state of a dataset that nobody has read yet, as plain data; None if it has none.

    The dataset stays as it was: torchdata's ``Loader``, asked for its state first, ignores one that is loaded then.
    """
    if not has_state(dataset):
        return None
    held = HeldState(dataset, containers=False)
    try:
        return to_plain(dataset.state_dict())
    except Exception:
        # Some have a state only once they are iterated.
        return None
    finally:
        held.restore()


def attributes_in(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a dataset and of the datasets in it, by ``class.attribute``, but for those told the epoch."""
    for part in parts_of(dataset):
        if callable(getattr(part, "set_epoch", None)):
            continue
        held = attributes_and_defaults(part)
        yield from ((f"{type(part).__qualname__}.{name}", value) for name, value in held.items())


def _generators_in(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Random generators in a dataset and its parts, but the process's, by the ``class.attribute`` that leads there."""
    for part in parts_of(dataset):
        for path, generator in SamplerParts(part).generators.items():
            if identity_of(generator) != 0:
                yield ".".join((type(part).__qualname__, *map(str, path[:1]))), generator


# By their ids: the iterable datasets of loaders of validation.
_EVALUATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_validation(dataset: Any) -> None:
    """A loader of validation reads a dataset in this process."""
    with suppress(TypeError):
        _EVALUATED[id(dataset)] = dataset


def _warn(message: str) -> None:
    warnings.warn(message, StatefulWarning, stacklevel=5)


# By the id of a dataset: a reference to it, and its passes in this process.
_histories: dict[int, tuple[Callable[[], Any], PassHistory]] = {}


def parts_of(dataset: Any) -> list[Any]:
    """A dataset, the datasets in it, and what loaders that these hold read with, each once."""
    parts: dict[int, Any] = {id(dataset): dataset}
    left = [dataset]
    for part in left:
        for held in SamplerParts(part).shared:
            found = _parts_of_loader(held) if isinstance(held, DataLoader) else [held]
            new = {id(one): one for one in found if one is not held or isinstance(one, Dataset)}
            left += [one for key, one in new.items() if key not in parts and len(left) < _MOST_PARTS]
            parts |= new
    return list(parts.values())


def _parts_of_loader(loader: Any) -> list[Any]:
    """The dataset, the samplers and the object that collates of a loader: what its passes in this process change."""
    batches, collate = loader.batch_sampler, loader.collate_fn
    # Torch's own holds a sampler, and nothing else that changes.
    sampler = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    found = [loader.dataset, sampler, getattr(collate, "__self__", collate)]
    return [part for part in found if not isinstance(part, (FunctionType, BuiltinFunctionType))]


def digest_of_dataset(dataset: Any) -> str:
    """Digest of what a dataset holds, and its parts."""
    return digest([digest_of_contents(part) for part in parts_of(dataset)])


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
            held: Callable[[], Any] = weakref.ref(dataset, lambda _: _histories.pop(key, None))
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

    def compare(self, noted: Any, where: str, *, is_as_long: bool, is_seeded: bool) -> list[str]:
        """Compare samples that were read again with those before a resume.

        Args:
            noted: Those before, as plain data; None if nothing was noted of them.
            where: Where they begin, for the error.
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
                "were trained on. Give it state_dict and load_state_dict, or an order that follows from "
                "set_epoch(epoch), and make it anew for a resume; or resume from the end of an epoch. "
                'accept=("nondeterministic",) reads on behind as many samples.'
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
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < _MOST_NESTED:
        return [part for item in value for part in _parts_of(item, only_labels=only_labels, depth=depth + 1)]
    if isinstance(value, torch.Tensor) and can_be_read(value):
        is_label = value.dtype in _LABEL_TYPES
        parts = [*value.shape, value.detach().reshape(-1)[:_MOST_NUMBERS]]
    elif isinstance(value, np.ndarray):
        is_label = value.dtype.kind in "iuSU" and value.itemsize > 1
        parts = [*value.shape, value.reshape(-1)[:_MOST_NUMBERS]]
    else:
        is_label = isinstance(value, (int, str, bytes, np.integer))
        parts = [value if is_label or isinstance(value, float) else type(value).__qualname__]
    return parts if is_label or not only_labels else []
