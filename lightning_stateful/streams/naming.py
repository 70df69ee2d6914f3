"""What errors and states call the user's functions, and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.stage import Item

# From the number of a shard to what people know it by.
NameShard = Callable[[int], str]


def name_of(function: Any) -> str:
    """What a function, or an object that can be called, goes by; a column by its name."""
    if isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_function(what: str, function: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        ConfigurationError: That is so.
    """
    if not callable(function):
        raise ConfigurationError(f"{what} must be a function, got {function!r}.")


def by_number(shard: int) -> str:
    """A shard by its number, where nothing else is known of it."""
    return f"shard {shard}"


def sample_of(item: Item, name_shard: NameShard) -> str:
    """A sample by its number and its shard."""
    return f"sample {item.number} of {name_shard(item.shard)}"
