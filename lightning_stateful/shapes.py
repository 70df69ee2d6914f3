"""Shapes of plain data: the keys, types and ranges that a part of a state must have, checked before any of it is used.

A shape is written in plain Python:

==================  =====================================================================================
``range(2**40)``    an integer in it; True and False are none
``bool``, ``str``   a value of that very type
``None``            None
``object``          anything: what belongs to an object of the user's
``[shape]``         a list, each item of that shape
``(one, other)``    a list of as many items, each of its own shape
``{str: shape}``    a dict with any strings as keys, each value of that shape
``{"key": shape}``  a dict with these keys; one that ends with ``?`` may be missing
``Either(*shapes)`` a value of one of these shapes
==================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.errors import DamagedStateError

# Counts of samples, batches and steps; ranks, and workers of a rank. Larger ones overflow, or take all memory.
COUNT = range(2**48)
EPOCH = range(2**40 + 1)
CYCLE = range(2**20)
RANKS = range(1, 2**20)
# What something else than the passes over an iterable dataset has set on it.
SET_ON_RANK = {
    "set?": {str: str},
    "first?": {str: str},
    "later?": {str: str},
    "drawn?": [str],
    "set_within?": {"within": {str: str}, "ahead": [str], "used?": [str]},
    "copies?": {str: str},
    "generators?": str,
}
# The end of errors about what is damaged.
DAMAGED = " Resume from another checkpoint; this one's data state is damaged."
# Levels of dicts and lists, values in copies of parts that are held several times, and bits of an integer.
_MOST_NESTED, _MOST_COPIES, _MOST_BITS = 300, 2**22, 2**12
# Of a value in an error.
_MOST_CHARACTERS = 80


class Either(tuple[Any, ...]):
    """A value of one of several shapes; an error is that of the last one."""

    def __new__(cls, *shapes: Any) -> Either:
        """A tuple of these shapes."""
        return super().__new__(cls, shapes)


# In a state, what skip= leaves out: of the run that wrote it the ranks, what a step of them adds to the progress, and
# what it had left out of the epoch it was in; of each range its epoch, its batches as they were given, and where it
# begins and ends in that unit; and what is left out by index.
SKIP = {
    "ranks": RANKS,
    "unit": range(1, COUNT.stop),
    "skipped": COUNT,
    "ranges": [(EPOCH, COUNT, COUNT, COUNT, COUNT)],
    "samples?": Either(
        {"count": COUNT, "digest": str}, {"function": str}, {"count": COUNT, "digest": str, "function": str}
    ),
}


def check_shape(value: Any, shape: Any, path: str) -> None:
    """Refuse data of another shape.

    Args:
        value: The data.
        shape: The shape, see above.
        path: The name of the data, with which an error begins: ``progress.segments[1]``.

    Raises:
        DamagedStateError: It has another shape; with the path of the very part.
    """
    if isinstance(shape, Either):
        *others, last = shape
        if not any(_fits(value, other) for other in others):
            check_shape(value, last, path)
    elif isinstance(shape, list):
        refuse_unless(isinstance(value, (list, tuple)), value, "a list", path)
        for number, item in enumerate(value):
            check_shape(item, shape[0], f"{path}[{number}]")
    elif isinstance(shape, tuple):
        is_row = isinstance(value, (list, tuple)) and len(value) == len(shape)
        refuse_unless(is_row, value, f"a list of {len(shape)}", path)
        for number, (item, of_item) in enumerate(zip(value, shape, strict=True)):
            check_shape(item, of_item, f"{path}[{number}]")
    elif isinstance(shape, Mapping):
        _check_keys(value, shape, path)
    elif isinstance(shape, range):
        words = f"an integer from {shape.start} to {shape.stop - 1}"
        refuse_unless(type(value) is int and value in shape, value, words, path)
    elif shape is None:
        refuse_unless(value is None, value, "None", path)
    elif shape is not object:
        refuse_unless(type(value) is shape, value, f"a {shape.__name__}", path)


def refuse_unless(is_right: bool, value: Any, wanted: str, path: str) -> None:
    """Refuse a value that is not what is wanted.

    Raises:
        DamagedStateError: That is so.
    """
    if not is_right:
        found = repr(value)
        found = found if len(found) <= _MOST_CHARACTERS else f"{found[:_MOST_CHARACTERS]}..."
        raise DamagedStateError(f"{path} must be {wanted}, got {found}.")


def _check_keys(value: Any, shape: Mapping[Any, Any], path: str) -> None:
    refuse_unless(isinstance(value, Mapping), value, "a dict", path)
    if str in shape:
        for key in value:
            check_shape(value[key], shape[str], f"{path}.{key}")
        return
    known = {key.removesuffix("?"): of_key for key, of_key in shape.items()}
    missing = [key for key in shape if not key.endswith("?") and key not in value]
    unknown = [key for key in value if key not in known]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing)
        wrong += [f"has {', '.join(map(str, unknown))}, which is unknown"] * bool(unknown)
        raise DamagedStateError(f"{path} {' and '.join(wrong)}; its keys are {', '.join(known)}.")
    for key in value:
        check_shape(value[key], known[key], f"{path}.{key}")


def _fits(value: Any, shape: Any) -> bool:
    try:
        check_shape(value, shape, "")
    except DamagedStateError:
        return False
    return True


def refuse_vast(state: Mapping[str, Any], where: str) -> None:
    """Refuse data that is nested deeper than any state, or of which copies of shared parts would take all memory.

    Raises:
        DamagedStateError: That is so, or an integer has more digits than any.
    """
    copies, level = 0, {id(state): (state, 1)}
    for _ in range(_MOST_NESTED):
        below: dict[int, tuple[Any, int]] = {}
        for part, times in level.values():
            copies += (times - 1) * (1 + len(part))
            for item in part.values() if isinstance(part, Mapping) else part:
                if type(item) is int and item.bit_length() > _MOST_BITS:
                    raise DamagedStateError(f"{where} has an integer of {item.bit_length()} bits.{DAMAGED}")
                if isinstance(item, (Mapping, list, tuple)):
                    below[id(item)] = item, times + below.get(id(item), (item, 0))[1]
        if not below:
            return
        if copies > _MOST_COPIES:
            raise DamagedStateError(f"{where} holds the same parts more than {_MOST_COPIES} times.{DAMAGED}")
        level = below
    raise DamagedStateError(f"{where} is nested in more than {_MOST_NESTED} levels.{DAMAGED}")
