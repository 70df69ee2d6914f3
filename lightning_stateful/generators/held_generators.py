"""Finds the random generators that a dataset or its transforms hold, and seeds them for each batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import Place, can_be_read, reached
from lightning_stateful.generators.generator_states import GeneratorState, comparable_state, identity_of, state_for

T = TypeVar("T")
# Batches in a row before which an object was replaced, after which it is no longer looked at.
_MOST_REPLACED = 8


class HeldGenerators:
    """Random generators that objects hold, seeded before each batch from (seed of the batch, place).

    They are ``numpy.random.Generator``, ``numpy.random.RandomState``, ``random.Random`` and ``torch.Generator`` objects
    of the CPU, and no subclasses of these. They are looked for in all that
    :func:`~lightning_stateful.generators.attributes.reached` goes through. A place is the shortest way there. Those by
    which Hugging Face's ``shuffle`` and ``interleave_datasets`` order samples are left as they are.

    They are looked for once after :meth:`begin`, before and after the first batch: one that was made while it was read
    is seeded, and the batch read once more. They are looked for again where one has been replaced.

    A dataset may draw an order of all its samples while the first is read, and keep it. Seeded by the batch, workers
    would each keep another. The generators of an object that does so are left as they are, and the batch is read again.

    Args:
        is_repeatable: Whether a batch may be read once more. False where that would move a stream on, or change samples
            twice.
        **roots: The objects by name, for example ``dataset`` and ``collate_fn``.

    Attributes:
        is_idle: Whether nothing was found, so that reading takes no more than without.

    Warns:
        StatefulWarning: Generators are left as they are.
    """

    def __init__(self, *, is_repeatable: bool = True, **roots: Any) -> None:
        self._is_repeatable, self._roots = is_repeatable, roots
        # Objects whose generators are left as they are.
        self._spared: list[Any] = []
        self.begin()

    @property
    def places(self) -> set[int]:
        """The places of those that were found."""
        return {state.place for state in self._states}

    def _warn_of_new(self, places: set[int]) -> None:
        """Warn, in the first worker, of generators at other places: they were made as the first sample was read.

        Args:
            places: The places that were known before.
        """
        kinds = {type(state.generator).__qualname__ for state in self._states if state.place not in places}
        worker = get_worker_info()
        if kinds and (worker is None or worker.id == 0):
            warnings.warn(
                f"A random generator ({', '.join(sorted(kinds))}) was made while the first sample or batch was read, "
                "and what was drawn then follows from it as it was made: a resume draws other numbers in its first "
                "batch. Make it in __init__, or leave its seed out: the process's generators are seeded.",
                StatefulWarning,
                stacklevel=4,
            )

    def begin(self) -> None:
        """Look for generators anew at the next batch."""
        self.is_idle, self._is_first, self._num_replaced = False, True, 0
        self._found: dict[int, GeneratorState] = {}
        self._states: list[GeneratorState] = []
        # What leads to generators: value, container and key.
        self._watched: list[tuple[Any, Any, Any]] = []
        self._left: set[int | None] = set()
        self._holders: list[Any] = []
        self._ignored: set[tuple[int, Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # States are addresses in the memory of this process.
        return {"_roots": self._roots, "_spared": self._spared, "_is_repeatable": self._is_repeatable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.begin()

    def __call__(self, seed: int, read: Callable[[], T]) -> T:
        """Run ``read()`` with the generators seeded, which stay where it leaves them."""
        if self._is_first:
            return self._read_first(seed, read)
        self._look_again()
        self._seed(seed)
        return read()

    def isolated(self, seed: int, read: Callable[[], T]) -> T:
        """Run ``read()`` with the generators seeded, and put them back."""
        if self._is_first:
            return self.put_back_after(partial(self, seed, read))
        self._look_again()
        if len(self._states) == 1:
            # As below, in half the time.
            state = self._states[0]
            held = state.exchange(seed)
            try:
                return read()
            finally:
                state.put(held)
        before = [(state, state.exchange(seed)) for state in self._states]
        try:
            return read()
        finally:
            for state, held in before:
                state.put(held)

    def put_back_after(self, read: Callable[[], T]) -> T:
        """Run ``read()``, and put the generators back to where they are now."""
        if self._is_first:
            self._find()
        before = [(state, state.get()) for state in self._states]
        try:
            return read()
        finally:
            for state, held in before:
                if identity_of(state.generator) not in self._left:
                    state.put(held)

    def present(self) -> list[Any]:
        """The present states, equal as long as nothing is drawn."""
        if self._is_first:
            self._find()
            self._is_first, self.is_idle = False, not self._found
        return [comparable_state(state) for state in self._states]

    def _seed(self, seed: int) -> None:
        for state in self._states:
            state.seed(seed)

    def _look_again(self) -> None:
        """Look for generators again, where what was found has been replaced."""
        try:
            for value, container, key in self._watched:
                if container[key] is not value:
                    break
            else:
                if self._num_replaced:
                    self._num_replaced = 0
                return
        except (LookupError, TypeError):
            pass
        self._num_replaced += 1
        if self._num_replaced > _MOST_REPLACED:
            # It is made anew for each batch.
            self._ignored |= {
                (id(container), key) for value, container, key in self._watched if not _is_at(container, key, value)
            }
        self._find()

    def _read_first(self, seed: int, read: Callable[[], T]) -> T:
        """Read a batch; once more if that has shown generators to be seeded, or to be left alone."""
        self._find()
        places = self.places
        known, states = self._found, [(state, state.get()) for state in self._found.values()]
        before = [(holder, dict(vars(holder))) for holder in self._holders]
        self._seed(seed)
        result = read()
        if kept := list(self._orders_in(before)) if self._is_repeatable else []:
            orders = [vars(holder)[name] for holder, name in kept]
            _restore(before, states)
            # Where the generators stand: as without this package.
            read()
            for (holder, name), order in zip(kept, orders, strict=True):
                if list(vars(holder).get(name, ())) != list(order):
                    self._spared.append(holder)
                    _warn(holder, name)
            _restore(before, states)
        self._find()
        if self._is_repeatable and (kept or not self._found.keys() <= known.keys()):
            self._seed(seed)
            result = read()
        elif not self._is_repeatable:
            self._warn_of_new(places)
        self._is_first, self.is_idle = False, not self._found
        return result

    def _orders_in(self, before: list[tuple[Any, dict[str, Any]]]) -> Iterator[tuple[Any, str]]:
        """The objects, and names of attributes, that hold an order of all samples that they did not hold before."""
        for holder, held in before:
            for name, value in vars(holder).items():
                is_new = value is not held.get(name) and _is_order(value)
                if is_new and len(value) in [_length(one) for one in (holder, self._roots.get("dataset"))]:
                    yield holder, name

    def _find(self) -> None:
        """Look for generators, those that are nearest first."""
        self._found, self._holders = {}, []
        self._left = {0, *(identity_of(value) for holder in self._spared for value in vars(holder).values())}
        places: dict[tuple[int, Any], Place] = {}
        for identity, place in held_places((), **self._roots):
            self._note(identity, place, places)
        self._states = list(self._found.values())
        self._watched = [one[1:4] for known, one in places.items() if known not in self._ignored]

    def _note(self, identity: int, place: Place, places: dict[tuple[int, Any], Place]) -> None:
        """Note a generator, and what leads there."""
        above: Place | None = place
        while above is not None:
            if above.container is not None:
                places.setdefault((id(above.container), above.key), above)
            above = above.above
        if identity in self._left:
            return
        holder = None if place.above is None else place.above.value
        if not any(holder is one for one in self._holders) and hasattr(holder, "__dict__"):
            self._holders.append(holder)
        if identity not in self._found:
            self._found[identity] = state_for(place.value, derive_seed("held", *place.path))


def held_places(known: Collection[int], **roots: Any) -> Iterator[tuple[int, Place]]:
    """The places of generators, each with what tells it from others: 0 for those not to be seeded.

    Args:
        known: Objects, by ``id()``, that are not looked into.
        **roots: The objects by name.
    """

    def looks_into(value: Any) -> bool:
        # What was found before is no place: it would be another in a process that has not looked yet.
        return not isinstance(value, HeldGenerators) and id(value) not in known

    for place in reached(roots, looks_into):
        identity = identity_of(place.value)
        if identity is not None and not (place.above is not None and _orders_samples(place.above.value)):
            yield identity, place


def _orders_samples(holder: Any) -> bool:
    """Whether it is a stage or setting of Hugging Face's, which draws an order from a copy of its generator."""
    return type(holder).__module__ == "datasets.iterable_dataset"


def _is_order(value: Any) -> bool:
    """Whether this may be an order of samples: distinct integers."""
    if isinstance(value, np.ndarray):
        is_integer = value.ndim == 1 and value.dtype.kind in "iu"
    elif isinstance(value, torch.Tensor):
        is_integer = can_be_read(value) and value.ndim == 1 and not (value.is_floating_point() or value.is_complex())
    else:
        is_integer = type(value) in (list, tuple) and all(isinstance(item, (int, np.integer)) for item in value)
    return is_integer and len(value) > 1 and len({int(item) for item in value}) == len(value)


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:
        return -1


def _is_at(container: Any, key: Any, value: Any) -> bool:
    try:
        return container[key] is value
    except (LookupError, TypeError):
        return False


def _restore(attributes: list[tuple[Any, dict[str, Any]]], states: list[tuple[GeneratorState, Any]]) -> None:
    for holder, held in attributes:
        vars(holder).clear()
        vars(holder).update(held)
    for state, value in states:
        state.put(value)


def _warn(holder: Any, name: str) -> None:
    kind = type(holder).__qualname__
    warnings.warn(
        f"{kind} draws an order of its samples, {kind}.{name}, from a generator that it holds while a batch is read, "
        "and keeps it. So that all workers keep the same, its generators are left as they are: what else it draws from "
        "them is not seeded, and does not come again on a resume. Draw the order in __init__.",
        StatefulWarning,
        stacklevel=4,
    )
