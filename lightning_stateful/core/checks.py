"""Checks of arguments: integers, and lengths of datasets."""

from __future__ import annotations

import operator
from typing import Any

from lightning_stateful.core.permutation import MAX_LENGTH
from lightning_stateful.errors import ConfigurationError


def as_int(name: str, value: Any, *, least: int | None = None) -> int:
    """Convert any integer, NumPy's among them, to a Python int; a state can hold no other kind.

    Args:
        name: The argument's name, for the error.
        value: Its value.
        least: The smallest value of a count; True and False are no counts. By default any integer will do, and they
            are 1 and 0.

    Raises:
        ConfigurationError: ``value`` is no integer, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and isinstance(value, bool)):
        raise ConfigurationError(f"{name} must be an integer, got {value!r}.")
    if least is not None and number < least:
        raise ConfigurationError(f"{name} must be at least {least}, got {number}.")
    return number


def check_length(length: int) -> None:
    """Refuse a dataset length outside ``0..2**40``."""
    if not 0 <= length <= MAX_LENGTH:
        raise ConfigurationError(f"A dataset has 0 to 2**40 samples, got {length}.")
