"""Notes attributes of datasets, and of a ``collate_fn``, that hooks set, and warns where a resume does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import ConcatDataset

from lightning_stateful.contents.held_state import HeldState, changed_names
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.samplers.fingerprint import as_array, hex_digest, spread

# Attributes in a checkpoint, and characters of each one's value.
_MOST_ATTRIBUTES, _MOST_CHARACTERS = 16, 40
# Values of a list or dict that are looked at, and bytes of an array or tensor.
_MOST_VALUES, _MOST_BYTES = 1024, 2**22
# Bytes of a digest.
_SIZE = 6
_DEFAULTS = (bool, int, float, str)


class DatasetSettings:
    """Plain values among the attributes of map-style datasets that something else than reading has set.

    A ``collate_fn`` that is an object is looked at as its dataset is. The values are numbers, strings, arrays and
    tensors, and lists, tuples, dicts and sets of such. A hook that makes samples harder with every batch sets one, for
    example. Attributes that change while the first batch of a pass is read, as counters and caches do, are left out. No
    method or property of a dataset is called.

    Args:
        loaders: The loaders, by path.

    State:
        By path and attribute: the value, and the value when the latest pass began.
    """

    def __init__(self, loaders: Mapping[str, StatefulLoader]) -> None:
        self._loaders = loaders
        self._built = {path: _attributes(loader) for path, loader in loaders.items()}
        # When the latest pass began, or that in which persistent workers were started.
        self._at_begin = dict(self._built)
        # Between the beginning of a pass and the first batch that was read of it.
        self._reading: dict[str, dict[str, str]] = {}
        self._changed_by_reading: dict[str, set[str]] = {path: set() for path in loaders}
        # What a checkpoint has, and whether training goes on within an epoch.
        self._expected: Mapping[str, Mapping[str, Any]] = {}
        # By path, names of attributes that a user was told of otherwise.
        self.said: dict[str, set[str]] = {}
        self._is_within_epoch = False

    def expect(self, saved: Mapping[str, Mapping[str, Any]], is_within_epoch: bool) -> None:
        """Compare with a checkpoint when the first pass begins.

        Args:
            saved: The state in it.
            is_within_epoch: Whether training goes on within an epoch.
        """
        self._expected, self._is_within_epoch = saved, is_within_epoch

    def note_begin(self, path: str) -> None:
        """A pass over a loader begins.

        Warns:
            StatefulWarning: An attribute is not what it was in the run that wrote the checkpoint.
        """
        if path not in self._loaders:
            return
        loader, now = self._loaders[path], _attributes(self._loaders[path])
        self._warn(path, now)
        if not (loader.num_workers and loader.persistent_workers and loader._iterator is not None):
            self._at_begin[path] = now
        self._reading[path] = now

    def note_read(self, path: str) -> None:
        """The first batch of a pass has been read, and no hook was called since :meth:`note_begin`."""
        if (before := self._reading.pop(path, None)) is not None:
            self._changed_by_reading[path] |= changed_names(before, _attributes(self._loaders[path]))

    def note_early_workers(self) -> None:
        """Training begins; workers of its first epoch may have been started before."""
        for path in list(self._reading):
            self.note_read(path)

    def state(self) -> dict[str, dict[str, list[str]]]:
        """See above; empty where nothing was set."""
        found: dict[str, dict[str, list[str]]] = {}
        for path, loader in self._loaders.items():
            built, began, now = self._built[path], self._at_begin[path], _attributes(loader)
            names = sorted((changed_names(built, now) | changed_names(built, began)) - self._changed_by_reading[path])
            # What is held by something that was built later, as the samples of a cache are, no hook has set.
            names = [name for name in names if name in built or "." not in name.lstrip("0123456789.")]
            if names:
                found[path] = {name: [now.get(name, ""), began.get(name, "")] for name in names[:_MOST_ATTRIBUTES]}
        return found

    def note_restored(self) -> None:
        """The hooks that restore what a checkpoint has were called; those of an epoch may set something else."""
        for path, of in ({} if self._is_within_epoch else self._expected).items():
            now = _attributes(self._loaders[path]) if path in self._loaders else {}
            self.said.setdefault(path, set()).update(
                name for name, (latest, _) in of.items() if now.get(name) == latest
            )

    def changed(self, path: str) -> str:
        """Digest of the attributes that something else than reading has changed; empty for none."""
        built, now = self._built[path], _attributes(self._loaders[path])
        names = changed_names(built, now) - self._changed_by_reading[path]
        changed = [(name, now.get(name, "")) for name in sorted(names)]
        return hex_digest(repr(changed).encode("utf-8", "replace"), size=_SIZE) if changed else ""

    def _warn(self, path: str, now: Mapping[str, str]) -> None:
        expected = self._expected.get(path, {})
        self._expected = {other: of for other, of in self._expected.items() if other != path}
        loader, built, wrong = self._loaders[path], self._built[path], []
        # Workers have copies from when their pass began, also of what was set later.
        in_workers = self._is_within_epoch and loader.num_workers > 0
        for name, (latest, began) in expected.items():
            if name in self.said.get(path, ()):
                continue
            saved, present = began if in_workers else latest, now.get(name, "")
            if present != saved and (in_workers or present == built.get(name, "")):
                wrong.append(f"{name} was {saved or 'missing'} and is {present or 'missing'}")
        if not wrong:
            return
        copies = " when the workers of this epoch were started" if in_workers else ""
        name = type(_users_of(loader.dataset)[0]).__qualname__
        rank_zero_warn(
            f"Attributes of the dataset, a {name}, were changed in training, by a hook or as later samples were read, "
            f"in the run that wrote the checkpoint, and are others here{copies}: "
            f"{'; '.join(wrong)}. If samples depend on them, the resume is not exact. Set them again before the first "
            "batch: in load_state_dict, on_load_checkpoint or on_train_start.",
            category=StatefulWarning,
        )


def _attributes(loader: StatefulLoader) -> dict[str, str]:
    found: dict[str, str] = {}
    owners = {f"{number}." if number else "": dataset for number, dataset in enumerate(_users_of(loader.dataset))}
    # What functions and methods reach may be anything.
    if not isinstance(loader.collate_fn, (FunctionType, BuiltinFunctionType, MethodType, partial)):
        owners["collate_fn."] = loader.collate_fn
    for prefix, owner in owners.items():
        state = HeldState(owner, containers=False)
        held = {name: text for name, value in state.attributes() if (text := _shown(value))}
        # A default in the class is what an instance has until another is set.
        defaults = {name: repr(value) for name, value in vars(type(owner)).items() if type(value) in _DEFAULTS}
        held = {**{name: text for name, text in defaults.items() if name[:2] != "__"}, **state.plain(), **held}
        found |= {f"{prefix}{name}": _shortened(text) for name, text in held.items()}
    return found


def _shown(value: Any) -> str:
    """A container of plain values, an array or a tensor as text; empty for anything else, and for large arrays."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        value = as_array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not 0 < value.nbytes <= _MOST_BYTES:
            return ""
        return f"an array {hex_digest(np.ascontiguousarray(value).tobytes(), size=_SIZE)} of {value.nbytes} bytes"
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr) if len(value) <= _MOST_VALUES else None
    if not isinstance(value, (list, tuple, dict, deque)):
        return ""
    # Of many values some, evenly apart.
    items: Any = list(value.items()) if isinstance(value, dict) else value
    some = [items[place] for place in spread(len(items), _MOST_VALUES)]
    if not _is_plain(some):
        return ""
    return repr(value) if len(some) == len(items) else f"{len(items)} values, {some!r}"


def _is_plain(values: list[Any]) -> bool:
    """Whether values are plain, or short lists, tuples and dicts of such; of strings no paths."""
    left, number = list(values), len(values)
    while left and number <= 2 * _MOST_VALUES:
        item = left.pop()
        if isinstance(item, (list, tuple, dict, deque)):
            number += len(item)
            left += (item.items() if isinstance(item, dict) else item) if len(item) <= _MOST_VALUES else [object()]
        elif not isinstance(item, (*_DEFAULTS, type(None))) or (isinstance(item, str) and "/" in item):
            return False
    return not left


def _shortened(text: str) -> str:
    return hex_digest(text.encode("utf-8", "replace"), size=_SIZE) if len(text) > _MOST_CHARACTERS else text


def _users_of(dataset: Any) -> list[Any]:
    """The user's datasets within those of this package and torch's ``ConcatDataset``."""
    if isinstance(dataset, PackedDataset):
        return _users_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [user for part in dataset.datasets for user in _users_of(part)]
    return [dataset]
