"""Compares items: where two of them differ, which samples they hold, and what usually causes a difference."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_stateful.errors import ConfigurationError

Key: TypeAlias = Callable[[Any], list[Hashable]]
Place: TypeAlias = tuple[int, int]  # an epoch, counted from the beginning of the run, and a step in it
Passes: TypeAlias = list[list[Any]]  # the items of every epoch

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
# So many items in a row, found again in the recording, are no coincidence.
_ENOUGH = 3


class _End:
    """The end of a pass, where an item might have been; ``None`` may be an item."""

    def __repr__(self) -> str:
        return "<end of the epoch>"


END = _End()


def difference(expected: Any, got: Any, path: str = "item") -> str:
    """The first place where two items differ.

    Items are compared by structure: mappings, lists, tuples, tensors and arrays (type, shape, dtype and every
    element), dataclasses and objects without an ``__eq__`` of their own by their attributes, everything else by
    ``==``. NaN equals NaN, and 1 differs from 1.0 and True.

    Args:
        expected: What should be there.
        got: What is there.
        path: How the answer calls the item.

    Returns:
        For example ``"item['x'][3]: expected 4, got 5"``, or ``""`` for equal items.
    """
    return _difference(expected, got, path, frozenset())


def shorten(value: Any) -> str:
    """One line that says what ``value`` is, cut to a readable length."""
    return " ".join(_SHORT.repr(value).split())


def identities(item: Any) -> list[Hashable]:
    """The samples of an item that consists of their indices or names.

    Integers and strings stand for themselves; tensors and arrays of integers, lists and tuples are flattened.

    Raises:
        ConfigurationError: The item holds something else, so that a ``key`` must say which samples it has.
    """
    if isinstance(item, (torch.Tensor, np.ndarray)):
        array = _as_array(item)
        if np.issubdtype(array.dtype, np.integer):
            return [int(index) for index in array.reshape(-1)]
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return [int(item)]
    if isinstance(item, str):
        return [item]
    if isinstance(item, (list, tuple)):
        return [identity for part in item for identity in identities(part)]
    raise ConfigurationError(
        f"Cannot tell which samples a {type(item).__name__} holds. Pass key=, a function from an item to the list of "
        "its samples' identities, for example key=lambda batch: batch['index'].tolist()."
    )


def samples(item: Any, key: Key) -> list[Hashable] | None:
    """The samples of an item, or None where ``key`` cannot tell them."""
    try:
        return None if item is END else list(key(item))
    except Exception:  # a key of the user's may fail in any way on an item that should not have come
        return None


def explain(ranks: Sequence[Passes], rank: int, start: Place, place: Place, rest: list[Any], key: Key) -> str:
    """The usual cause of a resumed run that goes on otherwise.

    Args:
        ranks: For every rank the items of every epoch of the run that was not stopped.
        rank: Whose run was resumed.
        start: Where it was resumed.
        place: Where it differs.
        rest: What came from there to the end of the pass.
        key: Which samples an item holds.

    Returns:
        A sentence, or ``""`` if what came has nothing to do with the run that was not stopped.
    """
    epoch, step = place
    passes = ranks[rank]
    came = [item for item in rest if item is not END]
    if not came and step:
        return "The pass ended too early: what was consumed is taken off twice, or prefetched items are counted."
    if not came:
        return "Nothing was left: at the end of an epoch the state must be that of the next one's beginning."
    if step >= len(passes[epoch]):
        return "The pass is too long: it must end after the items that are left, not after as many as a whole one has."
    if samples(came[0], key) and samples(came[0], key) == samples(passes[epoch][step], key):
        return "The same samples with other values: seed augmentation by epoch and sample, not by a running generator."
    found = _find(came, passes[epoch], key)
    if found is not None and epoch > start[0] and found == start[1]:
        return "A later pass begins where the resumed one did: a position that is loaded is good for one pass only."
    if found == 0:
        return "The epoch's first items came again: the state was not loaded, or iter() starts over."
    if found is not None and found > step:
        return (
            f"The pass goes on {found - step} too far ahead: what was prefetched is counted, not what was handed over."
        )
    if found is not None:
        return f"The pass goes on {step - found} too far back: the state lags behind (it is set after the yield?)."
    for other, items in enumerate(passes):
        if _find(came, items, key) is not None:
            if other > epoch:
                return (
                    f"These are items of epoch {other}: loading counts the epoch and iter() again, or a pass ended too "
                    "early."
                )
            return f"These are items of epoch {other}: the epoch is not in the state, or the order ignores it."
    if any(_find(came, other[epoch], key) is not None for other in ranks if epoch < len(other)):
        return "These are items of another rank: the state holds the rank that saved it, or what that rank was served."
    served = [name for other in ranks for items in other[epoch : epoch + 1] for name in _names(items, key)]
    if _names(came, key) and set(_names(came, key)) <= set(served):
        return "The same samples in another order: it is drawn from a generator that is not in the state."
    return ""


def _find(came: list[Any], items: list[Any], key: Key) -> int | None:
    """At which step of a pass the items that came are found."""
    first = came[:_ENOUGH]
    for step in range(len(items) - len(first) + 1):
        if all(_is_same(one, other, key) for one, other in zip(first, items[step:], strict=False)):
            return step
    return None


def _is_same(one: Any, other: Any, key: Key) -> bool:
    names = samples(one, key)
    return not difference(one, other) if names is None else names == samples(other, key)


def _names(items: list[Any], key: Key) -> list[Hashable]:
    return [name for item in items for name in samples(item, key) or []]


def _difference(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    pair = (id(expected), id(got))
    if expected is got or pair in above:
        return ""
    if type(expected) is not type(got):
        return _unequal(path, expected, got)
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            wanted, found = (f"{tuple(array.shape)} of {array.dtype}" for array in (expected, got))
            return f"{path} is {found}, expected {wanted}: {shorten(got)}, not {shorten(expected)}"
        expected, got = _as_array(expected), _as_array(got)
        if expected.dtype != object:
            return _of_arrays(expected, got, path)
    parts = _parts(expected)
    if parts is None:
        return _of_leaves(expected, got, path, above)
    others = _parts(got) or {}
    if len(parts) != len(others):
        return f"{path} has {len(others)} elements, expected {len(parts)}: {shorten(got)}, not {shorten(expected)}"
    if parts.keys() != others.keys():
        return f"{path} has {shorten(list(others))}, expected {shorten(list(parts))}"
    for name, part in parts.items():
        found = _difference(part, others[name], f"{path}{name}", above | {pair})
        if found:
            return found
    return ""


def _parts(value: Any) -> dict[str, Any] | None:
    """The parts of a container or an object by path; None if it defines its own equality."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, np.ndarray):
        return {str(list(index)): item for index, item in np.ndenumerate(value)}
    if dataclasses.is_dataclass(value):
        return {f".{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
    decides = any("__eq__" in vars(kind) for kind in type(value).__mro__ if kind is not object)
    if decides or not hasattr(value, "__dict__"):
        return None
    return {f".{name}": item for name, item in vars(value).items()}


def _of_leaves(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    verdict = expected == got
    if not isinstance(verdict, (bool, np.bool_)):
        # Tables and arrays of other libraries answer element by element.
        return _difference(np.asarray(expected), np.asarray(got), path, above)
    return "" if verdict or (expected != expected and got != got) else _unequal(path, expected, got)


def _of_arrays(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any], path: str) -> str:
    unequal = (expected != got) & ~((expected != expected) & (got != got))
    if not unequal.any():
        return ""
    index = tuple(int(offset) for offset in np.argwhere(unequal)[0])
    return _unequal(f"{path}{list(index)}" if index else path, expected[index].item(), got[index].item())


def _as_array(array: torch.Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    dense = array.detach().cpu().to_dense()
    # NumPy knows no bfloat16; every one of its values is a float32.
    return np.asarray((dense.float() if dense.dtype is torch.bfloat16 else dense).numpy())


def _unequal(path: str, expected: Any, got: Any) -> str:
    return f"{path}: expected {shorten(expected)}, got {shorten(got)}"
