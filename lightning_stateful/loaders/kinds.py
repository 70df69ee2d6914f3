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


class Pickled:
    """Lets a loader be pickled while it is read, and if its class was made of a user's: without what reads it.

    A data module or trainer that holds loaders is pickled where a worker is spawned that needs one of its methods.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Lightning's record of what was set holds the same.
        state = {name: value for name, value in vars(self).items() if name != "__pl_attrs_record"}
        if state.get("_engine") is not None:
            state["_engine"] = None
            if state["_original"] is not None:
                # It may be what reads. A generator is pickled by a tensor that is gone before a worker has opened it.
                state["_original"] = copied(state["_original"])
                vars(state["_original"]).update(_iterator=None, generator=None)
        return _blank, getattr(type(self), "_made_of", (type(self), type(self))), state


def _blank(ours: Any, kind: Any) -> Any:
    made = class_of_patched(ours, kind)
    return made.__new__(made)


@cache
def _made_of(ours: Any, kind: Any) -> Any:
    theirs = [base for base in kind.__mro__ if issubclass(base, DataLoader) and not issubclass(DataLoader, base)]
    values = {
        name: _of_original(name)
        for base in reversed(theirs)
        for name, value in vars(base).items()
        if not name.startswith("__") and not hasattr(DataLoader, name) and not hasattr(type(value), "__get__")
    }
    return type(f"Stateful{kind.__name__}", (ours, kind), {**values, "__doc__": kind.__doc__, "_made_of": (ours, kind)})


def _of_original(name: str) -> Any:
    """What stands as a plain value in the user's class may stand in the loader as well, and is read and set there."""
    return property(
        lambda self: getattr(self._original, name), lambda self, value: setattr(self._original, name, value)
    )
