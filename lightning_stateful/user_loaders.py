"""A user's DataLoader: its copy, the attributes of both, its pickle, and the class that a patched one has."""

from __future__ import annotations

import copy
import dis
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_stateful.errors import UnsupportedLoaderError


def copied(loader: Any) -> Any:
    """Copy a user's loader, without Lightning's record of what was set on it, from which it builds loaders again."""
    made = copy.copy(loader)
    vars(made).pop("__pl_attrs_record", None)
    return made


# Attributes of torch's loaders, and one that is set here.
TORCHS = frozenset({*vars(DataLoader([])), "_get_iterator", "_iterator"})  # type: ignore[arg-type]  # a list is a dataset


class SharedAttributes:
    """Keeps the attributes of a user's loader, and those of the copy that is read in its place, the same.

    Hooks set them on the user's object, and its ``__iter__`` on the copy. A block in which the latter runs begins with
    those of the user's object, and hands on what it sets. Torch's own attributes are left alone.

    Args:
        users: The user's loader, or an object that holds one.
        copied: The copy, which has the attributes as they were.
        left_out: Names of further attributes to leave alone.
    """

    def __init__(self, users: Any, copied: Any, *left_out: str) -> None:
        self._users, self._copied = users, copied
        self._slots = [name for kind in type(users).__mro__ for name in _slots_of(kind)]
        self._left_out = {*left_out, "__pl_attrs_record", *(TORCHS if isinstance(users, DataLoader) else ())}
        self._same = self._held_by(copied)

    def to_copy(self) -> None:
        """Hand on to the copy what was set on the user's object."""
        self._hand_on(self._users, self._copied)

    __enter__ = to_copy

    def __exit__(self, *error: object) -> None:
        self._hand_on(self._copied, self._users)

    def _hand_on(self, of: Any, to: Any) -> None:
        now = self._held_by(of)
        for name in now.keys() | self._same.keys():
            if now.get(name, _MISSING) is self._same.get(name, _MISSING) or name in self._left_out:
                continue
            if name in self._slots:
                _set_slot(to, name, now.get(name, _MISSING))
            elif name in now:
                vars(to)[name] = now[name]
            else:
                vars(to).pop(name, None)
        self._same = now

    def _held_by(self, one: Any) -> dict[str, Any]:
        # A copy: a thread of the loader's may set attributes.
        held = dict(getattr(one, "__dict__", ()))
        for name in self._slots:
            with suppress(AttributeError):
                held[name] = object.__getattribute__(one, name)
        return held


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _set_slot(one: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        object.__delattr__(one, name)
    else:
        object.__setattr__(one, name, value)


_MISSING = object()
_NOT_USERS = {"builtins", "lightning_stateful", "torch", "torchdata", "typing"}


def is_torchdatas(value: object) -> bool:
    """Whether the class of ``value`` is torchdata's: one of torch's with a state, which this package keeps itself."""
    return type(value).__module__.startswith("torchdata.")


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class leaves iteration to torch, so that nothing but torch sees its batches on their way."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def users_loader(patched: Any) -> Any:
    """What a patched loader was made of: the user's loader or iterable, or a copy where it is not Lightning's."""
    own = vars(patched)
    return next(own[name] for name in ("_users", "iterable", "_original") if own.get(name) is not None)


def has_of_its_own(loader: Any, name: str) -> bool:
    """Whether an attribute of a loader is of a user's object or class, and torch knows none of that name."""
    if name in TORCHS or name.startswith("__"):
        return False
    if not isinstance(loader, DataLoader):
        return hasattr(loader, name)
    kinds = (kind for kind in type(loader).__mro__ if kind.__module__.partition(".")[0] not in _NOT_USERS)
    return name in vars(loader) or any(name in vars(kind) for kind in kinds)


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
        # It is not read in another process.
        state |= {"_users": None} if "_users" in state else {}
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
    found = {name: value for base in reversed(theirs) for name, value in vars(base).items() if name[:2] != "__"}
    functions = [value for value in found.values() if isinstance(value, FunctionType)]
    # What methods set under names that ours has too is of the user's object: these are called on that.
    set_there = {name for one in functions for name in names_set(one.__code__)}
    hidden = set_there & {*_SET_BY_OURS, *dir(ours)} - {*dir(DataLoader)}
    values = {
        name: _of_original(name)
        for name, value in found.items()
        if not hasattr(ours, name)
        and (
            isinstance(value, property)
            or not hasattr(type(value), "__get__")
            or (isinstance(value, FunctionType) and not hidden.isdisjoint(value.__code__.co_names))
        )
    }
    return type(f"Stateful{kind.__name__}", (ours, kind), {**values, "__doc__": kind.__doc__, "_made_of": (ours, kind)})


# Attributes of the stateful loader's instances.
_SET_BY_OURS = ("seed", "path", "seed_samples", "tracker", "description", "is_for_trainer")


def names_set(code: CodeType) -> set[str]:
    """The attributes that code sets, of whatever objects."""
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}


def _of_original(name: str) -> Any:
    """Make a property that reads and sets a class attribute, or a property, of the user's loader on that loader."""

    def read(self: Any) -> Any:
        own = vars(self)
        return own[name] if name in own else getattr(users_loader(self), name)

    def write(self: Any, value: Any) -> None:
        # Names that ours sets while it is built, such as seed and path, are its own.
        own = vars(self)
        if name in own or own.get("_original") is None:
            own[name] = value
        else:
            setattr(users_loader(self), name, value)

    return property(read, write)


def loader_within(iterable: Any, name: str, loader: DataLoader[Any]) -> Any:
    """A copy of an object that holds a DataLoader, with another one in its place."""
    made = _shallow_copy(iterable)
    object.__setattr__(made, name, loader)
    return made


def _shallow_copy(value: Any) -> Any:
    """Copy an object, also one whose ``__getattr__`` reads an attribute that the copy has yet to get."""
    kind = type(value)
    if hasattr(kind, "__copy__") or any("__slots__" in vars(one) for one in kind.__mro__):
        return copy.copy(value)
    made = object.__new__(kind)
    vars(made).update(vars(value))
    return made


def without_repeats(loader: Any) -> Any:
    """A plain DataLoader in place of one that never ends its workers, as timm's and ultralytics' do.

    These wrap their batch sampler in one that repeats it for ever, and give ``len()`` batches an epoch of an iterator
    that they keep. That is proven on a copy; then torch's persistent workers do the same.

    Raises:
        UnsupportedLoaderError: The loader keeps an iterator, and it is not proven what it gives.
    """
    held = vars(loader) if isinstance(loader, DataLoader) else {}
    kept = [name for name, value in held.items() if isinstance(value, _BaseDataLoaderIter) and name != "_iterator"]
    if not kept:
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    repeated = held[name]
    if len(kept) > 1 or not (_repeats(repeated) and _gives_len_each(loader, kept[0], name)):
        raise UnsupportedLoaderError(
            f"{type(loader).__qualname__} keeps an iterator of torch's under {', '.join(kept)}, and it could not be "
            "shown that an epoch is len() batches of it, of a sampler that is repeated for ever. Pass a DataLoader "
            "with persistent_workers=True, which keeps its workers too."
        )
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    vars(plain).update({key: value for key, value in held.items() if key not in kept}, _iterator=None)
    vars(plain).update({name: repeated.sampler, "persistent_workers": loader.num_workers > 0})
    vars(plain)[_KEPT] = KeptIterator(loader, kept[0])
    return plain


# Where a plain loader knows the iterator that the user's keeps.
_KEPT = "_kept_iterator"


class KeptIterator:
    """The iterator that a user's loader keeps, of which a copy in another process knows nothing.

    Args:
        loader: The loader.
        name: The attribute that holds the iterator.

    Attributes:
        methods: Names of methods that put another one in its place, so that its workers end.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self.methods, self._name = _restarting(type(loader), name), name
        self._loader: Any = loader
        self._latest = weakref.ref(vars(loader)[name])

    def __getstate__(self) -> dict[str, Any]:
        return {"methods": self.methods, "_name": self._name, "_loader": None, "_latest": None}

    def is_replaced(self) -> bool:
        """Whether the loader has another one than when this was asked last."""
        now = None if self._loader is None else vars(self._loader).get(self._name)
        if now is None or now is self._latest():
            return False
        self._latest = weakref.ref(now)
        return True


class WorkerRestarts:
    """Starts the workers of a loader anew where a hook asks for it, as a method of the user's class would.

    Args:
        loader: The loader.

    Attributes:
        names: Names of methods that replace the iterator which a user's loader keeps, so that its workers end.
        note: Called when they are about to be started.
    """

    def __init__(self, loader: Any) -> None:
        self._kept: KeptIterator | None = getattr(users_loader(loader), "__dict__", {}).get(_KEPT)
        self.names: frozenset[str] = self._kept.methods if self._kept else frozenset()
        self._is_asked = False
        self.note: Callable[[], object] = bool

    def ask(self) -> None:
        """Let other workers read what comes next."""
        self._is_asked = True

    def is_due(self) -> bool:
        """Whether a hook has asked since this was called last."""
        is_asked, self._is_asked = self._has_asked(), False
        if is_asked:
            self.note()
        return is_asked

    def _has_asked(self) -> bool:
        # By a method of the trainer's loader, or of the user's object.
        self._is_asked = self._is_asked or (self._kept is not None and self._kept.is_replaced())
        return self._is_asked

    def around(self, read: Iterable[Any], again: Callable[[int], Iterable[Any]]) -> Iterable[Any]:
        """Batches of a pass.

        Args:
            read: The batches as they are read now.
            again: Called with the number of batches that were given; gives those that are left, by other workers.
        """
        return self._around(read, again) if self._kept is not None else read

    def _around(self, read: Iterable[Any], again: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        number = 0
        while True:
            if self.is_due():
                read = again(number)
            for batch in read:
                number += 1
                yield batch
                if self._has_asked():
                    break
            else:
                return


def _restarting(kind: type, kept: str) -> frozenset[str]:
    """The methods of a class that do nothing but put an iterator of torch's in the place of the one that it keeps."""
    functions = {name: value for one in reversed(kind.__mro__) for name, value in vars(one).items()}
    codes = {name: value.__code__ for name, value in functions.items() if isinstance(value, FunctionType)}
    return frozenset(name for name, code in codes.items() if {*code.co_names} == {kept, "_get_iterator"})


def _repeats(sampler: Any) -> bool:
    """Whether a sampler yields what its ``sampler`` does, over and over, as a copy of it with another one shows."""
    try:
        probe = copy.copy(sampler)
        probe.sampler = [3, 1, 2]
        return list(islice(iter(probe), 8)) == [3, 1, 2, 3, 1, 2, 3, 1]
    except Exception:
        return False


def _gives_len_each(loader: Any, kept: str, name: str) -> bool:
    """Whether a pass over a loader gives ``len()`` items of the iterator it keeps, as a copy of it shows."""
    try:
        probe, repeated = copy.copy(loader), copy.copy(vars(loader)[name])
        repeated.sampler = [0, 0, 0]
        vars(probe).update({kept: iter(range(9)), name: repeated})
        if name == "sampler":
            vars(probe)["batch_sampler"] = None
        return [list(probe), list(probe)] == [[0, 1, 2], [3, 4, 5]]
    except Exception:
        return False
