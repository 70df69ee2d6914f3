"""Brings an iterable dataset without a state to where the earlier passes of a run have left it."""

from __future__ import annotations

import copy
import inspect
import io
import time
from collections.abc import Mapping
from functools import cached_property
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_stateful.contents.code_uses import uses_any_of, uses_of
from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.generators.attributes import (
    attributes_and_defaults,
    attributes_of,
    closure_of,
    function_in,
    is_lightnings,
)
from lightning_stateful.generators.rng import GENERATORS, seed_generator, state_of_generator
from lightning_stateful.iterable_datasets.dataset_parts import (
    attributes_in,
    names_in_methods,
    parts_of,
    places_of_outside,
)
from lightning_stateful.iterable_datasets.iterable_task import is_told
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.iterable_datasets.pass_history import NUM_FIRST, PassHistory, digest_of_sample
from lightning_stateful.iterable_datasets.rank_draws import GOES_ON, KEEPS, keeps_what_it_draws
from lightning_stateful.sampler_copies.sampler_copy import (
    SamplerParts,
    digest_of_contents,
    digest_of_generators,
    generators_in,
)
from lightning_stateful.samplers.fingerprint import is_mapped

# A pass of which so many samples were read, and one of which so many, are followed by the same one if it begins anew.
_FEW, _SOME_MORE = 1, 3
# Seconds for which a copy of a dataset that is told the epoch is read.
_PATIENCE = 20.0
# Seconds after which no further sample is compared.
_SLOW = 1.0
# Seeds generators otherwise than a pass may.
_OTHER_SEED = 0x5EED_0FA1
# Bytes of arrays and tensors in a dataset up to which it is copied.
_MOST_BYTES = 2**31
NOT_TRIED = (
    "is told the epoch, and changes something in its passes as well. Whether that decides later passes could not be "
    "tried on a copy of it, {}, and its earlier passes are not begun again: the resume may not be exact. Let the order "
    'follow from set_epoch(epoch) alone, or give it state_dict and load_state_dict; accept=("nondeterministic",) is '
    "silent."
)

IN_MODULE = (
    "reads its samples from {}, and what that changes in a pass no checkpoint has but weights and buffers. Its earlier "
    "passes are not begun again: the resume is exact only if on_load_checkpoint of the module, or load_state_dict of a "
    "callback, restores all that it reads."
)


class Reader(Protocol):
    """What reads passes over a dataset: an :class:`~.iterables.IterableSlot`."""

    epoch: int

    def begin_pass(self, epoch: int) -> None:
        """Begin a pass."""

    def read_batch(self, epoch: int, number: int) -> list[Any]:
        """The samples of a batch; none at the end."""

    def read_samples(self, number: int) -> list[Any]:
        """The next samples."""

    def reading(self, dataset: Any) -> Reader:
        """The same for a copy of the dataset."""

    def close(self) -> None:
        """Let go of the iterator."""


class EarlierPasses:
    """The passes that a run has begun over a dataset before its checkpoint, which are begun again on a resume.

    They are read, too, where that changes how the next one begins, as copies of the dataset tell. Of a dataset with
    ``set_epoch`` none is begun where its passes change nothing, or copies tell that the epoch alone decides.

    Args:
        reader: Reads the dataset.
        config: How the dataset is read.
        history: The passes over it in this process.
        state: The state of the pass that goes on, or begins.
    """

    def __init__(self, reader: Reader, config: Any, history: PassHistory, state: Mapping[str, Any]) -> None:
        self._reader, self._config, self._history, self._state = reader, config, history, state
        self._dataset = config.dataset
        history.go_on(state)

    def begin(self) -> list[str]:
        """Begin them; texts on why the resume may not be exact."""
        passes, history = self._state["passes"], self._history
        if not history and get_worker_info() is not None:
            # A hook may have told the trainer's epoch before this worker got its copy.
            self._config.told[0].note_told(self._config.holders(), self._reader.epoch)
        outside = history.compare_outside(self._dataset, self._state["outside"])
        if len(passes) > len(history) and is_told(self._dataset):
            try:
                follows, why = self._follows_epoch(passes[len(history) :])
            except Exception as error:
                follows, why = False, f"which raised {type(error).__name__}: {error}"
            if follows or why:
                history += passes[len(history) :]
                return [NOT_TRIED.format(why)] if why and self._config.is_checked else []
        if len(passes) > len(history) and (source := _source_in_module(self._dataset)):
            history += passes[len(history) :]
            return [IN_MODULE.format(source)] if self._config.is_checked else []
        is_there, changed = history.attributes.compare(self._dataset, self._state)
        if (changed or outside) and (seeded := self._seeded[0]):
            outside = history.compare_outside(self._dataset, self._state["outside"], seeded)
            is_there, changed = history.attributes.compare(self._dataset, self._state, seeded)
        history += passes[len(history) :] if is_there else []
        return [*filter(None, (changed, outside)), *self._begin(passes[len(history) :])]

    def _begin(self, missing: list[int]) -> list[str]:
        if not missing:
            return []
        said = list[str]()
        is_alike, draws_alike = self._begins_alike(max(map(_num_batches, missing)))
        # Of one that its passes change, copies have been read to the end of one.
        goes_on = self._history.draws and is_alike and not (self._history.changes and draws_alike)
        if goes_on and not self._seeded[1]:
            said.append(GOES_ON)
        seed_pass = self._history.seed_pass
        is_unseeded = self._config.gives_batches or self._config.sample_seed is None
        if is_unseeded and keeps_what_it_draws(self._dataset, is_begun_alike=seed_pass is not None):
            said.append(KEEPS)
        for number in missing:
            epoch = len(self._history)
            if seed_pass is not None:
                seed_pass(epoch)
            self._reader.begin_pass(epoch)
            if not is_alike:
                # Up to an empty one.
                all(self._reader.read_batch(epoch, batch) for batch in range(_num_batches(number) + (number < 0)))
            else:
                self._reader.read_samples(1)
            self._history[-1] = number
            self._reader.close()
        return said

    def _copies(self, outside: OutsideValues) -> list[tuple[Reader, Any]]:
        """Readers of two copies of the dataset, and these; none if there can be none, or what they change stays."""
        if not outside.can_be_restored:
            return []
        try:
            copies = [copied_with_shared_data(self._dataset) for _ in range(2)]
            return [(self._reader.reading(one), one) for one in copies]
        except Exception:
            return []

    def _begins_alike(self, most: int) -> tuple[bool, bool]:
        """Whether a pass begins in the same way however much of the one before was read, as copies tell.

        Args:
            most: Batches that a copy reads where a pass changes the dataset.

        Returns:
            That; and whether the random generators stand alike that the dataset holds, too.
        """
        outside, epoch, firsts = OutsideValues(self._dataset), len(self._history), list[list[str]]()
        drawn, values, copies = list[str](), list[dict[str, str]](), self._copies(outside)
        for (reader, copied), number in zip(copies, (_FEW, _SOME_MORE), strict=False):
            reader.begin_pass(epoch)
            reader.read_samples(number)
            many = most if number == _SOME_MORE and self._history.changes else 0
            all(reader.read_batch(epoch, 0) for _ in range(many))
            firsts.append(_firsts(reader, epoch + 1, len(firsts[0]) if firsts else None))
            drawn.append(_generators_of(copied, outside))
            values.append(outside.digests(of_generators=False))
            outside.restore()
        if not copies or firsts[0] != firsts[1]:
            return False, False
        (_, one), (_, other) = copies
        draws_alike = drawn[0] == drawn[1]
        # A part of it that comes later may have changed.
        is_same = draws_alike and values[0] == values[1] and not _used_apart(one, other)
        return is_same or not self._history.changes, draws_alike

    @cached_property
    def _seeded(self) -> tuple[set[str], bool]:
        """The names of random generators that each pass seeds before it draws from them, as copies tell.

        In one of two copies all generators are seeded otherwise before a pass, which has to begin as in the other one.

        Returns:
            The names; and whether there are no others.
        """
        outside, epoch = OutsideValues(self._dataset), len(self._history)
        firsts, stands, all_stand = list[list[str]](), list[dict[str, str]](), list[str]()
        try:
            refuse_open(self._dataset)
            for reader, copied in self._copies(outside):
                reader.begin_pass(epoch)
                reader.read_samples(_FEW)
                for generator in generators_in(*parts_of(copied), *outside.generators()) if firsts else ():
                    seed_generator(generator, _OTHER_SEED)
                firsts.append(_firsts(reader, epoch + 1, len(firsts[0]) if firsts else None))
                stands.append(_generators_by_name(copied, outside))
                all_stand.append(_generators_of(copied, outside))
                outside.restore()
        except Exception:
            return set(), False
        finally:
            outside.restore()
        if not firsts or firsts[0] != firsts[1]:
            return set(), False
        return {name for name, held in stands[0].items() if stands[1].get(name) == held}, all_stand[0] == all_stand[1]

    def _follows_epoch(self, passes: list[int]) -> tuple[bool, str]:
        """Whether the epoch that it is told decides how the pass begins that is resumed, and not the one before.

        Args:
            passes: Those before it that have not been begun here.

        Returns:
            That, and why it could not be tried; empty if it could.
        """
        if not self._history.is_moved:
            return True, ""
        outside, epoch, began = OutsideValues(self._dataset), len(self._history) + len(passes), time.perf_counter()
        # A few samples of the pass before tell it of most.
        for most in (0, _num_batches(passes[-1]) + 1):
            copies = self._copies(outside)
            if not copies:
                return False, "which cannot be made"
            (reader, fresh), (later, used) = copies
            firsts, stands = _firsts(reader, epoch), _generators_of(fresh, outside)
            values = outside.digests(of_generators=False)
            outside.restore()
            later.begin_pass(epoch - 1)
            later.read_samples(_SOME_MORE)
            is_late = False
            for _ in range(most):
                is_late = time.perf_counter() - began > _PATIENCE
                if is_late or not later.read_batch(epoch - 1, 0):
                    break
            is_alike = firsts == _firsts(later, epoch, len(firsts)) and stands == _generators_of(used, outside)
            moved = changed_names(values, outside.digests(of_generators=False))
            outside.restore()
            if not is_alike or _used_apart(fresh, used) or uses_any_of(self._dataset, moved):
                return False, ""
            if is_late:
                return False, f"which took more than {_PATIENCE:.0f} s"
        return True, ""


def _source_in_module(dataset: Any) -> str:
    """The name of a generator function of a LightningModule, or of one around it, that a dataset holds; or empty.

    What it changes there is no part of the dataset, and training changes it too.
    """
    for part in parts_of(dataset):
        for value in attributes_of(part).values():
            function = function_in(value)
            if isinstance(function, FunctionType) and inspect.isgeneratorfunction(function):
                owner = getattr(value, "__self__", None)
                if any(is_lightnings(one) for one in (owner, *closure_of(function).values())):
                    return function.__qualname__
    return ""


def _generators_of(dataset: Any, outside: OutsideValues) -> str:
    """Digest of the random generators that a dataset holds, or that its code reaches."""
    return digest_of_generators(*parts_of(dataset), *outside.generators())


def _generators_by_name(dataset: Any, outside: OutsideValues) -> dict[str, str]:
    """Digests of those among them that are attributes, or variables, of a name."""
    found = {name: held for name, held in outside.digests().items() if name in outside.names_of_generators()}
    for name, value in attributes_in(dataset):
        if isinstance(value, GENERATORS):
            found[name] = found.get(name, "") + state_of_generator(value)
    return found


def refuse_open(dataset: Any) -> None:
    """Refuse a dataset that two processes cannot read side by side, as one with an open file, there or in its module.

    Raises:
        Exception: It cannot be copied, or its code names a file, a socket or a queue outside of it, or ``os.read``.
    """
    outside = {name: read() for name, read in places_of_outside(dataset).items()}
    if found := [name for name, value in outside.items() if _is_open(value)]:
        raise ValueError(f"{', '.join(found)} would be read on in two processes")
    if any({"os", "read"} <= names_in_methods(type(part)) for part in parts_of(dataset)):
        raise ValueError("os.read would be called in two processes")
    parts = [SamplerParts(part) for part in parts_of(dataset)]
    # What is large is not looked into.
    large = [value for part in parts for value in (*part.long.values(), *filter(_is_array, part.found))]
    copy.deepcopy(dataset, {id(value): value for value in large})


def _is_open(value: Any) -> bool:
    """Whether it stands at a position that processes share, or hands each thing to one of them."""
    module = type(value).__module__.partition(".")[0]
    return isinstance(value, io.IOBase) or module in ("socket", "_socket", "queue", "_queue", "multiprocessing", "_io")


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor))


def copied_with_shared_data(dataset: Any) -> Any:
    """A deep copy of a dataset, which shares arrays with it that are read-only or mapped from a file.

    Raises:
        MemoryError: Other arrays and tensors in it are larger than a copy may be.
    """
    held = [value for part in parts_of(dataset) for value in SamplerParts(part).found]
    arrays = {id(value): value for value in filter(_is_array, held)}
    shared = {
        key: value
        for key, value in arrays.items()
        if isinstance(value, np.ndarray) and (is_mapped(value) or not value.flags.writeable)
    }
    if sum(value.nbytes for key, value in arrays.items() if key not in shared) > _MOST_BYTES:
        raise MemoryError
    return copy.deepcopy(dataset, shared)


def _firsts(reader: Reader, epoch: int, number: int | None = None) -> list[str]:
    """Digests of so many samples that a pass begins with; by default eight, or fewer of one that is slow."""
    reader.begin_pass(epoch)
    if number is not None:
        return [digest_of_sample(sample) for sample in reader.read_samples(number)]
    found, began = list[str](), time.perf_counter()
    while len(found) < NUM_FIRST and time.perf_counter() - began < _SLOW and (read := reader.read_samples(1)):
        found += [digest_of_sample(sample) for sample in read]
    return found


def _used_apart(one: Any, other: Any) -> bool:
    """Whether two copies of a dataset differ in attributes which code does more with than to count them."""
    for part, of_other in zip(parts_of(one), parts_of(other), strict=False):
        own, others = attributes_and_defaults(part), attributes_and_defaults(of_other)
        apart = [name for name, value in own.items() if _shown(value) != _shown(others.get(name))]
        # Of code of installed packages nothing is known.
        named = names_in_methods(type(part))
        if any(name not in named or uses_of(one, name, may_be_called=True).uses for name in apart):
            return True
    return False


def _shown(value: Any) -> str:
    return digest_of_contents([value], of_copy=True)


def _num_batches(number: int) -> int:
    """The batches of a pass as a history has it."""
    return number if number >= 0 else -1 - number
