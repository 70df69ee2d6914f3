"""Loaders of this package that are instances of a user's class as well."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch.utils.data import DataLoader


def class_of_patched(ours: Any, kind: Any) -> Any:
    """A class of this package that is a subclass of ``kind`` too, and has its methods.

    Args:
        ours: A subclass of DataLoader which holds the user's loader as ``_original``.
        kind: The class of the user's loader.
    """
    return ours if issubclass(ours, kind) else _made_of(ours, kind)


def copied(loader: Any) -> Any:
    """A copy of a user's loader of which Lightning, while it records what is set on loaders, has a record of its own.

    From the record of the user's loader Lightning may build it again, with whatever was set.
    """
    made = copy.copy(loader)
    vars(made).pop("__pl_attrs_record", None)
    return made


@cache
def _made_of(ours: Any, kind: Any) -> Any:
    theirs = [base for base in kind.__mro__ if issubclass(base, DataLoader) and not issubclass(DataLoader, base)]
    values = {
        name: _of_original(name)
        for base in reversed(theirs)
        for name, value in vars(base).items()
        if not name.startswith("__") and not hasattr(DataLoader, name) and not hasattr(type(value), "__get__")
    }
    return type(f"Stateful{kind.__name__}", (ours, kind), {**values, "__doc__": kind.__doc__})


def _of_original(name: str) -> Any:
    """What stands as a plain value in the user's class may stand in the loader as well, and is read and set there."""
    return property(
        lambda self: getattr(self._original, name), lambda self, value: setattr(self._original, name, value)
    )
