"""Leaves what copies of a user's sampler share with it as it was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch

from lightning_stateful.contents.held_state import HeldState, put_back
from lightning_stateful.generators.attributes import (
    PLAIN,
    attributes_of,
    can_be_read,
    is_users,
    named_outside,
    names_in,
)
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, shown, surroundings_of
from lightning_stateful.samplers.fingerprint import hex_digest

# Objects in lists of more than 1,024 are shared too.
_MOST_SHARED = 64
# Of an array or tensor.
_MOST_BYTES = 2**27


class _HeldModules:
    """The attributes and buffers of modules and of those in them, to be put back; parameters are left alone."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._held = [(part, dict(vars(part)), dict(part._buffers)) for part in modules]
        buffers = {id(value): value for _, _, held in self._held for value in held.values() if value is not None}
        readable = (one for one in buffers.values() if can_be_read(one) and one.nbytes <= _MOST_BYTES)
        self._buffers = [(one, one.detach().clone()) for one in readable]

    def restore(self) -> None:
        for part, attributes, buffers in self._held:
            put_back(part, attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for value, copied in self._buffers:
            put_back(value, copied)


class SharedObjects:
    """What copies of a sampler share with it, its dataset above all: the end of a block puts their attributes back.

    Copies are iterated within the block. A ``set_epoch`` or an ``__iter__`` that hands the epoch on to the dataset
    would else leave there the epoch that the copy was told.

    Args:
        sampler: The sampler.
        dataset: Another object that copies share, or None.
        in_training: Whether training goes on, so that containers, arrays and tensors are put back too that the code of
            the sampler names: in what copies share, in its classes, and in variables. Before training a sampler that
            changes such is refused.
    """

    def __init__(self, sampler: Any, dataset: Any = None, *, in_training: bool = False) -> None:
        parts = SamplerParts(sampler, dataset)
        self._shared = list(islice(parts.shared, _MOST_SHARED))
        outside = _named_outside(parts)
        self._named = _named_by(parts, self._shared, outside) if in_training else []
        self._modules = _modules_in(parts, outside)

    def keep(self) -> None:
        """Keep what the attributes are now, to put that back."""
        # Without containers: they may be large, and a thread may read them meanwhile.
        self._held = HeldState(*self._shared, containers=False)
        self._contents = HeldState(*self._named, most_bytes=_MOST_BYTES)
        self._of_modules = _HeldModules(self._modules)

    def put_back(self) -> None:
        """Set the attributes as they were."""
        self._held.restore()
        self._contents.restore()
        self._of_modules.restore()

    def __enter__(self) -> SharedObjects:
        self.keep()
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back()


def _named_by(parts: SamplerParts, shared: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
    """What the code of a sampler names, outside of it and in what copies share with it, but for plain values."""
    names = {name for part in shared if isinstance(part, FunctionType) for name in names_in(part.__code__)}
    kinds = {kind for part in parts.found for kind in type(part).__mro__}
    # Methods of what is shared, too, that it calls.
    for of in (kinds, {kind for part in shared for kind in type(part).__mro__}):
        functions = [one for kind in of if is_users(kind.__module__) for one in vars(kind).values()]
        codes = [one.__code__ for one in functions if isinstance(one, FunctionType)]
        names |= {name for code in codes if of is kinds or code.co_name in names for name in names_in(code)}
    holders = [*shared, *(value for value in outside if is_users(type(value).__module__))]
    within = [value for part in holders for name, value in attributes_of(part).items() if name in names]
    return [value for value in (*within, *outside) if type(value) not in PLAIN and not callable(value)]


def _named_outside(parts: SamplerParts) -> list[Any]:
    """What the code of a sampler, of objects in it, and of functions that it holds, names outside of them."""
    functions = (part for part in parts.shared if isinstance(part, FunctionType))
    return [value for part in (*parts.found, *functions) for value in named_outside(part).values()]


def _modules_in(parts: SamplerParts, outside: Sequence[Any]) -> list[torch.nn.Module]:
    """The modules that a sampler holds, or that its code names, and those in them, each once."""
    found = [one for one in (*parts.shared, *outside) if isinstance(one, torch.nn.Module)]
    # Not by a method of the user's.
    return list(dict.fromkeys(part for one in found for part in torch.nn.Module.modules(one)))


def surroundings_in_trial(sampler: Any, dataset: Any = None, parts: SamplerParts | None = None) -> dict[str, str]:
    """As :func:`surroundings_of`, and what modules hold, and those in them, which training changes from batch to batch.

    Args:
        sampler: The sampler.
        dataset: As there.
        parts: As there.
    """
    found = dict[str, list[str]]()
    parts = SamplerParts(sampler, dataset) if parts is None else parts
    for part in _modules_in(parts, _named_outside(parts)):
        kind = type(part).__name__
        for name, value in {**vars(part), **part._buffers}.items():
            if type(value) in PLAIN or isinstance(value, torch.Tensor):
                found.setdefault(f"{kind}.{name}", []).append(shown(value))
        for name, weights in part._parameters.items():
            if weights is not None:
                found.setdefault(f"{kind}.{name}", []).append(str(weights._version))
    of_modules = {name: hex_digest(repr(values).encode()) for name, values in found.items()}
    return {**surroundings_of(sampler, dataset, parts), **of_modules}


def changed_names(sampler: Any, dataset: Any, before: dict[str, str]) -> list[str]:
    """The names of what copies of a sampler share with it and now hold otherwise than in a trial's surroundings."""
    now = surroundings_in_trial(sampler, dataset)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def said_of_changes(names: Sequence[str], why: str) -> str:
    """Why a sampler is refused that changes what copies share with it, and what to do; without its name."""
    return (
        f" changes {', '.join(f'`{name}`' for name in names[:4])} while it is iterated, and {why}. It is tried before "
        "training, on a copy that shares this with it, so that training would begin with what the trial has left. Let "
        "the sampler keep what it changes in attributes of its own, or set it before training. (A cache is let "
        "through: one that a second pass leaves as it is, and with which the same comes.)"
    )
