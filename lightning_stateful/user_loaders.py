"""A user's DataLoader: its copy, its pickle, and the class that a patched one has."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch.utils.data import DataLoader


def copied(loader: Any) -> Any:
    """Copy a user's loader, without Lightning's record of what was set on it, from which it builds loaders again."""
    made = copy.copy(loader)
    vars(made).pop("__pl_attrs_record", None)
    return made


def is_torchdatas(value: object) -> bool:
    """Whether the class of ``value`` is torchdata's: one of torch's with a state, which this package keeps itself."""
    return type(value).__module__.startswith("torchdata.")


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class leaves iteration to torch, so that nothing but torch sees its batches on their way."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


class Pickled:
    """Pickles a loader without its reader: also while it is read, and if its class was made of a user's class.

    A data module or trainer that holds loaders is pickled where a worker is spawned that needs one of its methods.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Lightning's record of set attributes would pickle the same once more.
        state = {name: value for name, value in vars(self).items() if name != "__pl_attrs_record"}
        if state.get("_reader") is not None:
            # The reader may read with the original. A generator's pickle names a tensor in shared memory, which is gone
            # before a worker has opened it.
            state |= {"_reader": None, "_original": copied(state["_original"])}
            vars(state["_original"]).update(_iterator=None, generator=None)
            vars(state["_original"]).pop("_get_iterator", None)
        return _blank, getattr(type(self), "_made_of", (type(self), type(self))), state


def class_of_patched(ours: Any, kind: Any) -> Any:
    """Make a subclass of a class of this package and of a user's class, with the methods of both.

    Args:
        ours: A subclass of DataLoader which holds the user's loader as ``_original``.
        kind: The class of the user's loader.
    """
    if issubclass(kind, ours):
        return kind
    return ours if issubclass(ours, kind) else _made_of(ours, kind)


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
        if not name.startswith("__") and not hasattr(ours, name) and not hasattr(type(value), "__get__")
    }
    return type(f"Stateful{kind.__name__}", (ours, kind), {**values, "__doc__": kind.__doc__, "_made_of": (ours, kind)})


def _of_original(name: str) -> Any:
    """Make a property that reads and sets a class attribute of the user's loader on that loader."""

    def read(self: Any) -> Any:
        own = vars(self)
        return own[name] if name in own else getattr(own["_original"], name)

    def write(self: Any, value: Any) -> None:
        # Names that ours sets while it is built, such as seed and path, are its own.
        own = vars(self)
        if name in own or own.get("_original") is None:
            own[name] = value
        else:
            setattr(own["_original"], name, value)

    return property(read, write)
