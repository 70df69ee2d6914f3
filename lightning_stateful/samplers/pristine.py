"""A sampler's own data as they were when it was wrapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_stateful.samplers.surroundings import OF_RANKS

_SCALARS = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, deque, dict, set, tuple, bytearray, np.ndarray, torch.Tensor)
# Larger arrays are left as they are.
_MOST_BYTES = 2**28
# From so many on, lists in a list are not told apart one by one.
_MANY = 1024

Memo = dict[int, "_Held"]


class Pristine:
    """Remembers the numbers and containers that samplers hold, and puts them back in place.

    Many samplers shuffle a list of theirs in place whenever they are iterated, so that an epoch depends on all those
    before. Begun from what they held at first, it is a function of the epoch alone. Lists, dicts, sets, tuples,
    deques, arrays and tensors are remembered, containers in containers too; every other object is left as it is. What
    somebody else sets on a sampler in between is remembered from then on.

    Args:
        samplers: The samplers.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "__dict__")]
        memo: Memo = {}
        self._held = [
            {name: _remember(value, memo) for name, value in vars(sampler).items() if _is_data(name, value)}
            for sampler in self._samplers
        ]
        self._left: list[dict[str, Any]] = []
        self._changed: list[set[str]] = [set() for _ in self._samplers]

    def restore(self) -> None:
        """Put everything back, in the very containers that held it, so that other names for them see it too."""
        self._take_in()
        for sampler, held in zip(self._samplers, self._held, strict=True):
            for name, part in held.items():
                vars(sampler)[name] = part.put_back()
        self.leave()

    def note_changed(self) -> None:
        """Note what is no longer as it was, after the sampler has been iterated."""
        for sampler, held, changed in zip(self._samplers, self._held, self._changed, strict=True):
            changed |= {name for name, part in held.items() if part.is_changed(vars(sampler).get(name))}

    def keep_changed(self) -> None:
        """Remember from now on only what was noted to change: what iterating leaves alone is the user's."""
        self._held = [
            {name: part for name, part in held.items() if name in changed}
            for held, changed in zip(self._held, self._changed, strict=True)
        ]

    def leave(self) -> None:
        """Note what the sampler's own iterating has left in it."""
        self._left = [
            {name: value for name, value in vars(sampler).items() if _is_data(name, value)}
            for sampler in self._samplers
        ]

    def _take_in(self) -> None:
        for sampler, held, left in zip(self._samplers, self._held, self._left, strict=False):
            for name, value in vars(sampler).items():
                before = left.get(name, held)
                same = value is before or (isinstance(value, _SCALARS) and value == before)
                if name in held and _is_data(name, value) and not same:
                    held[name] = _remember(value, {})


class _Held:
    """A value that is left as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def put_back(self) -> Any:
        """The value, with what it held at first."""
        return self.value

    def is_changed(self, now: Any) -> bool:
        """Whether something else stands in its place, or it holds something else."""
        return now is not self.value and not (isinstance(now, _SCALARS) and now == self.value)


class _List(_Held):
    def fill(self, memo: Memo) -> None:
        self.items = list(self.value)
        self.parts = [] if _is_flat(self.value) else [_remember(item, memo) for item in self.value]
        self.is_busy = False

    def is_changed(self, now: Any) -> bool:
        if super().is_changed(now) or len(self.value) != len(self.items):
            return True
        if not self.parts:
            return list(self.value) != self.items
        if self.is_busy:
            return False
        self.is_busy = True
        changed = any(part.is_changed(item) for part, item in zip(self.parts, self.value, strict=True))
        self.is_busy = False
        return changed

    def put_back(self) -> Any:
        parts, self.parts = self.parts, []  # a list may hold itself
        items = [part.put_back() for part in parts] or self.items
        self.parts = parts
        if not isinstance(self.value, tuple):
            self.value.clear()
            self.value.extend(items)
        return self.value


class _Lists(_Held):
    """A long list of flat lists, remembered in one go."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.items = list(value)
        self.copies = list(map(tuple, value))

    def is_changed(self, now: Any) -> bool:
        same = not super().is_changed(now) and len(self.value) == len(self.items)
        return not same or any(
            item is not first or tuple(item) != copied
            for item, first, copied in zip(self.value, self.items, self.copies, strict=True)
        )

    def put_back(self) -> Any:
        for item, copied in zip(self.items, self.copies, strict=True):
            item[:] = copied
        self.value[:] = self.items
        return self.value


class _Dict(_Held):
    is_busy = False

    def is_changed(self, now: Any) -> bool:
        if super().is_changed(now) or list(self.value) != list(self.parts):
            return True
        if self.is_busy:
            return False
        self.is_busy = True
        changed = any(part.is_changed(self.value[key]) for key, part in self.parts.items())
        self.is_busy = False
        return changed

    def fill(self, memo: Memo) -> None:
        self.parts = {key: _remember(item, memo) for key, item in self.value.items()}

    def put_back(self) -> Any:
        if not self.is_busy:  # a dict may hold itself
            self.is_busy = True
            items = {key: part.put_back() for key, part in self.parts.items()}
            self.is_busy = False
            self.value.clear()
            self.value.update(items)
        return self.value


class _Copied(_Held):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.copied: Any = value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()

    def is_changed(self, now: Any) -> bool:
        if super().is_changed(now):
            return True
        if isinstance(self.value, torch.Tensor):
            return not torch.equal(self.value, self.copied)
        if isinstance(self.value, np.ndarray):
            return bool(self.value.tobytes() != self.copied.tobytes())
        return bool(self.value != self.copied)

    def put_back(self) -> Any:
        value, copied = self.value, self.copied
        if isinstance(value, np.ndarray):
            value[...] = copied
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(copied)
        elif isinstance(value, set):
            value.clear()
            value.update(copied)
        else:
            value[:] = copied
        return value


def _is_data(name: str, value: Any) -> bool:
    return name not in OF_RANKS and isinstance(value, (*_SCALARS, *_CONTAINERS))


def _remember(value: Any, memo: Memo) -> _Held:
    if not isinstance(value, _CONTAINERS):
        return _Held(value)
    if id(value) not in memo:
        memo[id(value)] = made = _kind_of(value)
        if isinstance(made, (_List, _Dict)):
            made.fill(memo)
    return memo[id(value)]


def _kind_of(value: Any) -> _Held:
    if isinstance(value, np.ndarray):
        own = value.flags.writeable and value.nbytes <= _MOST_BYTES and not _is_mapped(value)
        return _Copied(value) if own else _Held(value)
    if isinstance(value, torch.Tensor):
        dense = value.layout == torch.strided and value.is_contiguous() and not value.is_inference()
        dense = dense and not value.is_shared()  # type: ignore[no-untyped-call]  # torch's
        return _Copied(value) if dense and value.nbytes <= _MOST_BYTES else _Held(value)
    if isinstance(value, (set, bytearray)):
        return _Copied(value)
    if isinstance(value, dict):
        return _Dict(value)
    if type(value) is list and len(value) > _MANY and set(map(type, value)) == {list} and _is_flat(chain(*value)):
        return _Lists(value)
    return _List(value)


def _is_mapped(array: Any) -> bool:
    # What is written there goes to a file, which others may write to as well.
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _is_flat(items: Iterable[Any]) -> bool:
    return not any(issubclass(kind, _CONTAINERS) for kind in set(map(type, items)))
