"""Tells by its code that a function draws no random numbers."""

from __future__ import annotations

import builtins
import datetime
import dis
import inspect
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from lightning_stateful.generators.attributes import codes_in

_PLAIN = (str, int, float, complex, bool, bytes)
_MODULES = {math: dir(math), json: json.__all__, re: re.__all__}
# Methods of values in a row. None of them is the name of a method by which tensors, arrays or tables draw.
_TYPES = (*_PLAIN, bytearray, list, tuple, dict, set, frozenset, range, slice, re.Pattern, re.Match, datetime.datetime)
_METHODS = frozenset(
    name for names in (*map(dir, _TYPES), *_MODULES.values()) for name in names if not name.startswith("_")
)
_NAMES = (
    "abs all any ascii bin bool bytes chr complex dict divmod enumerate filter float format frozenset hash hex int "
    "isinstance len list map max min next oct ord pow print range repr reversed round set slice sorted str sum tuple "
    "zip Exception IndexError KeyError TypeError ValueError UnicodeDecodeError UnicodeEncodeError"
)
_BUILTINS = tuple(getattr(builtins, name) for name in _NAMES.split())
# Of what a function names: more than that is a table whose content nobody wants to go through.
_MOST_VALUES = 1000
_CONCURRENT = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def draws_nothing(value: Any) -> bool:
    """Whether a function draws no random numbers, as far as its code can tell; False where that is not certain.

    Its code, and that of functions which it calls, may name builtin functions, the modules ``math``, ``json`` and
    ``re``, regular expressions, and plain values. It may call methods that Python's own types have. A name that is None
    might stand for something that is loaded later.

    Args:
        value: A function, a ``functools.partial``, or a plain value that one is given.
    """
    return _is_harmless(value, set(), [_MOST_VALUES])


def _is_harmless(value: Any, seen: set[int], left: list[int]) -> bool:
    left[0] -= 1
    if left[0] < 0:
        return False
    kind = type(value)
    if kind in _PLAIN or kind is re.Pattern or any(value is module for module in _MODULES):
        return True
    if id(value) in seen:
        return True
    seen.add(id(value))
    if kind in (list, tuple, set, frozenset):
        return all(_is_harmless(one, seen, left) for one in value)
    if kind is dict:
        return all(_is_harmless(one, seen, left) for pair in value.items() for one in pair)
    if kind is partial:
        held = (value.func, *value.args, *value.keywords.values())
        return all(_is_harmless(one, seen, left) for one in held)
    if kind is not FunctionType:
        return any(value is one for one in _BUILTINS)
    return all(_is_harmless(one, seen, left) for one in _held_by(value)) and _is_plain_code(value, seen, left)


def _held_by(function: FunctionType) -> Iterator[Any]:
    """The default arguments and the values of the closure; a cell that is empty stands for the unknown."""
    yield from (one for one in function.__defaults__ or () if one is not None)
    yield from (one for one in (function.__kwdefaults__ or {}).values() if one is not None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield object()


def _is_plain_code(function: FunctionType, seen: set[int], left: list[int]) -> bool:
    """Whether all that the code names is harmless."""
    for code in codes_in(function.__code__):
        if code.co_flags & _CONCURRENT:
            return False
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                if not _is_harmless(_value_of(function, step.argval), seen, left):
                    return False
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if step.argval not in _METHODS:
                    return False
            elif step.opcode in dis.hasname:
                # It imports, or sets a name or an attribute.
                return False
            elif step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars:
                return False
    return True


def _value_of(function: FunctionType, name: str) -> Any:
    """The value of a global name; None, which is not harmless, if there is none yet."""
    return function.__globals__.get(name, getattr(builtins, name, None))
