"""What an iterable dataset and its iterator keep while they are read, and a state of their own may leave out."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import count, cycle
from operator import length_hint
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe

from lightning_stateful.contents.code_uses import uses_of
from lightning_stateful.errors import Remark, some_of
from lightning_stateful.generators.attributes import BUILT_IN, attributes_of, is_users
from lightning_stateful.generators.held_generators import held_places
from lightning_stateful.generators.rng import GENERATORS, state_of_generator
from lightning_stateful.iterable_datasets.dataset_parts import names_in_methods, names_told, parts_of
from lightning_stateful.iterable_datasets.pass_history import PassHistory
from lightning_stateful.samplers.fingerprint import digest_of_tensor, hex_digest, is_plain_tensor
from lightning_stateful.stream_nodes.own_state import has_state

OTHER_GENERATORS = (
    "holds a random generator that does not stand where it stood, because its own state_dict and load_state_dict leave "
    "it out: the resume is not exact in later passes, unless each of them seeds it. Have them see to it; "
    'accept=("nondeterministic",) is silent.'
)
OTHER_VALUES = (
    "does not hold what it held before the stop in {}, because its own state_dict and load_state_dict leave that out. "
    "If later samples depend on it, the resume is not exact. Have them see to it; "
    'accept=("nondeterministic",) is silent.'
)
# Iterators that read from one another, and objects whose attributes are looked at.
_MOST_ITERATORS, _MOST_OBJECTS = 16, 32
# Bytes of an array, values of a dict, and characters of a string, that are looked at.
_MOST_BYTES, _MOST_VALUES, _MOST_CHARACTERS = 2**12, 2**8, 64
# Items of a tuple, likewise.
_MOST_ITEMS = 8
# Random generators that are no attributes of a dataset.
_MOST_GENERATORS = 16
# Objects whose attributes are not looked at.
_APART = (type, FunctionType, torch.nn.Module)
# Iterators that tell how many items are left.
_COUNTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class KeptGenerators:
    """The random generators that datasets hold in attributes, and go on drawing from.

    Left out are those that each pass sets anew: in ``set_epoch``, or before it draws from them.

    Args:
        datasets: A dataset, and the datasets in it.
    """

    def __init__(self, datasets: list[Any]) -> None:
        self._left = [(dataset, _names_set_anew(dataset)) for dataset in datasets]

    def digest(self) -> str:
        """Digest of the states of all of them, the same in every process; empty if there are none."""
        held = ((attributes_of(dataset), names) for dataset, names in self._left)
        texts = _texts_of(value for own, names in held for name, value in own.items() if name not in names)
        return hex_digest("".join(texts).encode()) if texts else ""

    def noted(self) -> dict[str, Any]:
        """What a state holds of them."""
        return {"generators": found} if (found := self.digest()) else {}

    def stand_elsewhere(self, noted: str) -> bool:
        """Whether they stand elsewhere than where a digest was noted."""
        return "" not in (noted, found := self.digest()) and found != noted


def _names_set_anew(dataset: Any) -> set[str]:
    """The names of a dataset's random generators that each pass sets before it draws from them."""
    if isinstance(dataset, IterDataPipe) and callable(getattr(dataset, "set_seed", None)):
        # As a DataLoader seeds it.
        return {*attributes_of(dataset)}
    names = {name for name, value in attributes_of(dataset).items() if isinstance(value, GENERATORS)}
    named = names & names_in_methods(type(dataset)) if names else names
    told = names_told(dataset) or frozenset()
    return {name for name in named if name in told or not uses_of(dataset, name, may_be_called=True).uses}


class KeptValues:
    """What a pass over a dataset with a state of its own keeps beside its position.

    These are random generators in attributes of the dataset, and in local variables of its iterator; and numbers,
    strings, lists, sets, counts by key and small arrays in either that change while the pass is read. A ``state_dict``
    that leaves one of them out leads to the right samples at first. Later the generator draws the order of another
    block, or a sample is not left out that has come already. Values that are others as a later pass begins, such as a
    count of passes, are kept at its end as well.

    Attributes are those of objects of the user's classes, which these or local variables hold in turn. Local variables
    are those of generator functions, and of such that these read from, also by way of iterators such as ``map``. Random
    generators are looked for in containers, modules and variables outside of the dataset as well. Of these, and of such
    in objects, one that stands elsewhere is named once a pass, or a later one, draws from it.

    Args:
        dataset: The dataset.
        iterator: Its iterator.
        history: The passes over it in this process.
        stays: Whether the same object is read in later passes.
        is_checked: Whether anything is looked at.
    """

    def __init__(self, dataset: Any, iterator: Any, history: PassHistory, *, stays: bool, is_checked: bool) -> None:
        self._history = history
        parts = parts_of(dataset) if is_checked and has_state(dataset) else []
        self._parts = [part for part in parts if is_users(type(part).__module__)]
        self._iterator = iterator if is_checked else None
        # Of a copy that ends with the pass nothing is drawn later.
        self._generators = KeptGenerators(parts if stays else [])
        self._within = _generators_within(dataset, parts) if self._parts else {}
        self._stays = stays
        # Values before the first sample, or as they were first seen, and the names of those that were others since.
        self._first: dict[str, str] = _values(self._held()) if self._parts else {}
        self._changed: set[str] = set()
        # Random generators that stand elsewhere than before a resume: where they stand, and where they stood then.
        before = history.elsewhere.items()
        self._elsewhere = {name: at for name, (one, *at) in before if self._within.get(name) is one}

    def noted(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """What a state holds of them.

        Args:
            before: What it has held so far.
        """
        held = [*self._held()]
        found = _values(held)
        self._changed |= {name for name, value in found.items() if self._first.setdefault(name, value) != value}
        lasting = self._lasting(found, before)
        self._changed |= before.get("kept", {}).keys() | lasting
        drawn = {**self._drawn(held), **{name: stood for name, (_, stood) in self._elsewhere.items()}}
        changed = {name: value for name, value in found.items() if name in self._changed}
        kept = {**self._generators.noted(), "kept": {**drawn, **changed}}
        lasting |= self._within.keys() & drawn.keys() if self._stays else set()
        return {**kept, "lasting": sorted(lasting)} if lasting else kept

    def _lasting(self, found: Mapping[str, str], before: Mapping[str, Any]) -> set[str]:
        """The names of attributes that were others behind the first batch of a pass than behind an earlier one's."""
        firsts, lasting = self._history.firsts, self._history.lasting
        lasting |= {*before.get("lasting", ())}
        if not before["batches"]:
            of_parts = tuple(f"{type(part).__qualname__}." for part in self._parts)
            own = {name: value for name, value in found.items() if name.startswith(of_parts)}
            # One that is missing at first is that of the class.
            lasting |= {name for name, value in own.items() if firsts and firsts.get(name) != value}
            self._history.firsts = {**own, **firsts}
        return lasting & found.keys()

    def said(self, noted: Mapping[str, Any], name: str) -> list[str]:
        """Texts on what is another than noted.

        Numbers and lists are named in the log: many are for a log themselves, or say what is open or was fetched.

        Args:
            noted: What :meth:`noted` gave at the same place of the pass, and more.
            name: The dataset's name.
        """
        if self._generators.stand_elsewhere(noted.get("generators", "")):
            return [f"{name} {OTHER_GENERATORS}"]
        held = [*self._held()]
        before, drawn, values = noted.get("kept", {}), self._drawn(held), _values(held)
        # What had not changed by then is as it was first seen.
        self._first = {**values, **self._first}
        are_others = {name for name in drawn if name in before and before[name] != drawn[name]}
        self._elsewhere = {name: [drawn[name], before[name]] for name in are_others}
        self._hand_on()
        others = [name for name, value in before.items() if values.get(name, value) != value]
        return [Remark(f"{name} {OTHER_VALUES.format(some_of(others))}")] if others else []

    def late(self, name: str) -> list[str]:
        """A text once a random generator is drawn from that stands elsewhere than before a resume.

        Until then it may have drawn what the state has, such as an order, and nothing else.

        Args:
            name: The dataset's name.
        """
        if not self._elsewhere:
            return []
        drawn = self._drawn(self._held())
        others = [one for one, (stands, _) in self._elsewhere.items() if drawn.get(one, stands) != stands]
        self._elsewhere = {} if others else self._elsewhere
        self._hand_on()
        return [f"{name} {OTHER_VALUES.format(some_of(others))}"] if others else []

    def _hand_on(self) -> None:
        """Hand those that stand elsewhere, and are there in later passes, on to these."""
        lasting = self._elsewhere.keys() & self._within.keys() if self._stays else ()
        self._history.elsewhere = {name: (self._within[name], *self._elsewhere[name]) for name in lasting}

    def _drawn(self, held: Iterable[tuple[str, Any]]) -> dict[str, str]:
        """Digests of the states of random generators."""
        return _drawn([*held, *self._within.items()])

    def _held(self) -> Iterator[tuple[str, Any]]:
        """Attributes of the datasets, and local variables; then attributes of objects of the user's among these."""
        left = [(type(part).__qualname__, attributes_of(part)) for part in self._parts]
        left += [(name, _variables_of(one)) for name, one in _named(_iterators_behind(self._iterator))]
        seen = {id(part) for part in self._parts}
        for number, (name, held) in enumerate(left):
            for variable, value in held.items():
                yield f"{name}.{variable}", value
                is_object = type(value) not in BUILT_IN and is_users(type(value).__module__)
                if is_object and id(value) not in seen and number < _MOST_OBJECTS and not isinstance(value, _APART):
                    seen.add(id(value))
                    left.append((f"{name}.{variable}", attributes_of(value)))


def _generators_within(dataset: Any, parts: list[Any]) -> dict[str, Any]:
    """The random generators that code of a dataset reaches, but those in attributes of it and of datasets in it.

    Left out are those that are only held, or made anew before they are drawn from.

    Args:
        dataset: The dataset.
        parts: It and the datasets in it.
    """
    own = {id(value) for part in parts for value in attributes_of(part).values()}
    found: dict[str, Any] = {}
    uses = lru_cache(lambda name: uses_of(dataset, name, is_variable=True, may_be_called=True).uses)
    for identity, place in held_places((), **{type(dataset).__qualname__: dataset}):
        names = [name for name in place.path[1:] if name.isidentifier()]
        if len(found) == _MOST_GENERATORS:
            break
        # One comes for each way that leads there.
        is_new = identity and id(place.value) not in own and not any(one is place.value for one in found.values())
        if is_new and any(map(uses, names)):
            found[".".join(place.path)] = place.value
    return found


def _drawn(held: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Digests of the states of random generators."""
    found = ((name, text) for name, value in held for text in _texts_of([value]))
    return {name: hex_digest(text.encode()) for name, text in found}


def _values(held: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Of numbers, lists, sets, counts by key and arrays, what tells that they were changed."""
    return {name: text for name, value in held if (text := _text_of(value))}


def _iterators_behind(iterator: Any) -> list[Any]:
    """An iterator and those that it reads from, such as the one of a ``for`` loop, which is in no variable."""
    found, left = dict[int, Any](), [iterator]
    while left and len(found) < _MOST_ITERATORS:
        one = left.pop(0)
        if id(one) in found or not issubclass(type(one), Iterator):
            continue
        found[id(one)] = one
        is_own = not inspect.isgenerator(one) and is_users(type(one).__module__)
        held = [*attributes_of(one).values()] if is_own else gc.get_referents(one)
        # Of zip() they are in a tuple.
        left += [part for value in held for part in (value if type(value) is tuple else [value])]
    return [*found.values()]


def _variables_of(iterator: Any) -> dict[str, Any]:
    """The local variables of a generator function of the user's, or the attributes of an iterator of such a class."""
    if not inspect.isgenerator(iterator):
        return attributes_of(iterator) if is_users(type(iterator).__module__) else {}
    frame = iterator.gi_frame
    return frame.f_locals if frame is not None and is_users(frame.f_globals.get("__name__")) else {}


def _named(iterators: list[Any]) -> Iterator[tuple[str, Any]]:
    """Iterators by the name of their function or class, which has a number where there are several."""
    numbers = Counter[str]()
    for one in iterators:
        name = one.__name__ if inspect.isgenerator(one) else type(one).__qualname__
        numbers[name] += 1
        yield name if numbers[name] == 1 else f"{name} {numbers[name]}", one


def _text_of(value: Any) -> str:
    """A number, None or a short string; how long a list or set is, the sum of counts, a digest of a small array.

    Of an iterator over a list, what is left. Empty for anything else.
    """
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return repr(value) if type(value) is not str or len(value) <= _MOST_CHARACTERS else ""
    if isinstance(value, torch.Tensor):
        is_read = is_plain_tensor(value) and value.nbytes <= _MOST_BYTES
        return digest_of_tensor(value.detach()) if is_read else ""
    if isinstance(value, _COUNTED):
        return f"{length_hint(value)} left"
    if type(value) is cycle:
        return _text_of_cycle(value)
    if type(value) is count or (type(value) is tuple and len(value) <= _MOST_ITEMS and {*map(type, value)} <= BUILT_IN):
        return repr(value)[:_MOST_CHARACTERS]
    if isinstance(value, (list, set, deque)):
        return f"{type(value).__name__} {len(value)}"
    if isinstance(value, dict) and 0 < len(value) <= _MOST_VALUES and all(type(one) is int for one in value.values()):
        # A dict of anything else may be a cache.
        return f"{type(value).__name__} {len(value)} {sum(value.values())}"
    if isinstance(value, (np.ndarray, bytearray)):
        size = value.nbytes if isinstance(value, np.ndarray) else len(value)
        is_read = size <= _MOST_BYTES and not getattr(value, "dtype", np.dtype(int)).hasobject
        return hex_digest(bytes(value)) if is_read else ""
    return ""


def _text_of_cycle(value: Any) -> str:
    """How many items ``itertools.cycle`` has kept, and how many are left of a round over them."""
    with warnings.catch_warnings():
        # Python 3.12 warns of what 3.14 has no more.
        warnings.simplefilter("ignore")
        with suppress(Exception):
            _, (items,), (kept, _) = value.__reduce__()
            return f"{len(kept)} kept, {_text_of(items)}"
    return ""


def _texts_of(values: Iterable[Any]) -> list[str]:
    """The states of those among some values that are random generators; one by the operating system has none."""
    found: list[str] = []
    for value in values:
        if isinstance(value, GENERATORS):
            with suppress(Exception):
                found.append(state_of_generator(value))
    return found
