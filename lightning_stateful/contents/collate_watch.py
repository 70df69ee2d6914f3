"""Notices a ``collate_fn`` that remembers what it was given: a resume begins without that memory."""

from __future__ import annotations

import dis
import inspect
import warnings
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_stateful.contents.dataset_content import bytes_of
from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.contents.read_watch import ReadWatch, is_numbered
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import codes_in, function_in, is_users

# Kinds of values in which something may be carried over.
_CARRIED = (list, dict, set, deque, str, bytes, tuple, torch.Tensor, np.ndarray)
# Batches that are looked at, changes by which a container is one that is carried over, and how many of these have to
# be more than additions; and items of a container that are compared.
_NUM_LOOKS, _LEAST_CHANGES, _LEAST_REPLACED, _MOST_WATCHED = 6, 4, 2, 512


class CollateWatch:
    """Looks at what a ``collate_fn`` holds before and after each of the first batches that a process collates.

    A list, deque, string, tuple or tensor that nearly every one of them changes, and not only adds to, is carried over,
    as a buffer of tokens is, or the batch before in a variable of the module. What is only added to is a cache, or
    counts. A number, a dict of numbers or an iterator that nearly every one moves on is warned of if the function's
    code uses it otherwise than to count. Nothing of the function's is called.

    Args:
        collate_fn: The function, or an object that is called.

    Attributes:
        is_over: Whether nothing is looked at any more.
    """

    def __init__(self, collate_fn: Any) -> None:
        self._collate_fn = collate_fn
        self.is_over = False
        self._num_looks = 0
        self._before: dict[str, bytes] | None = None
        # Kept, so that no other tensor gets its id.
        self._held: Any = None
        # By the way to a container: whether each change of it did more than add.
        self._changes: dict[str, list[bool]] = {}
        self._counts = _CountWatch(collate_fn)
        self._function = _function_of(collate_fn)

    def before(self) -> None:
        """The samples of a batch are read, and will be collated."""
        self._before = self._contents()
        self._counts.before()

    def after(self) -> None:
        """The batch has been collated.

        Warns:
            StatefulWarning: The function carries something over; once, in the first worker.
        """
        if self._before is None:
            return
        self._counts.after()
        before, held, self._num_looks = self._before, self._held, self._num_looks + 1
        now = self._contents()
        del held
        self._before = None
        for name in now.keys() | before.keys():
            was, is_now = before.get(name, b""), now.get(name, b"")
            if was != is_now:
                self._changes.setdefault(name, []).append(not is_now.startswith(was))
        if self._num_looks < _NUM_LOOKS:
            return
        self.is_over, self._held = True, None
        changes = self._changes.items()
        found = [name for name, of in changes if len(of) >= _LEAST_CHANGES and sum(of) >= _LEAST_REPLACED]
        worker = get_worker_info()
        if found and (worker is None or worker.id == 0):
            self._warn(min(found, key=len))

    def around(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        """Collate samples, and look before and after."""
        if self.is_over:
            return collate(samples)
        self.before()
        batch = collate(samples)
        self.after()
        return batch

    def _contents(self) -> dict[str, bytes]:
        held = HeldState(self._collate_fn)
        variables = _variables_kept_by(self._function)
        self._held = held, variables
        found = {**held.containers(), **{name: one for name, one in variables.items() if isinstance(one, _CARRIED)}}
        return {name: _content(value) for name, value in found.items()}

    def _warn(self, name: str) -> None:
        function = self._collate_fn
        called = getattr(function, "__qualname__", type(function).__qualname__)
        words = [word for word in name.split(".") if word.isidentifier() and not word.startswith("__")]
        warnings.warn(
            f"The collate_fn {called} carries {words[-1] if words else 'something'!r} over from batch to batch. No "
            "checkpoint has it, so a resume begins with an empty one, and is not exact. Join or pack samples in a "
            "stream in its place (StreamDataModule): what that has read ahead is resumed.",
            StatefulWarning,
            stacklevel=2,
        )


class _CountWatch(ReadWatch):
    """Looks at the numbers and iterators of a ``collate_fn`` before and after each of the first batches."""

    _while = "batches are collated"
    _if = "batches depend on it"
    _remedy = "derive it from the samples of the batch, or from the epoch, or let the LightningModule hold it"

    def __init__(self, collate_fn: Any) -> None:
        # Within another object it is a function that is called.
        super().__init__(partial(collate_fn), keeps=False)
        self._lost = None
        self._held: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        made = _CountWatch(self._dataset.func)
        made.is_over = self.is_over
        return vars(made)

    def before(self) -> None:
        """A batch will be collated."""
        self._held = {} if self.is_over else self._snapshot()

    def after(self) -> None:
        """It has been collated: warn, once, of what that has counted up."""
        if not self.is_over:
            now = self._snapshot()
            found = self._look(self._held, now)
            # A dict that only gets items is a cache, unless they are numbered.
            dicts = [name for name in found if isinstance(now[name], dict)]
            counted = [name for name in dicts if name in self._changes or is_numbered(now[name])]
            self._end_look([name for name in found if self._is_moved(now[name])] + counted)


def _function_of(collate_fn: Any) -> FunctionType | None:
    """The function of the user's that is called; None if it is none."""
    function = function_in(collate_fn)
    function = function if isinstance(function, FunctionType) else inspect.getattr_static(function, "__call__", None)
    return function if isinstance(function, FunctionType) and is_users(function.__module__) else None


def _variables_kept_by(function: FunctionType | None) -> dict[str, Any]:
    """The variables of its module that a function reads, and then sets."""
    names = _names_kept_by(function.__code__) if function else ()
    return {name: function.__globals__.get(name) for name in names} if function else {}


@lru_cache(maxsize=256)
def _names_kept_by(code: CodeType) -> tuple[str, ...]:
    first: dict[str, str] = {}
    steps = [step for one in codes_in(code) for step in dis.get_instructions(one) if step.opname.endswith("_GLOBAL")]
    for step in steps:
        first.setdefault(step.argval, step.opname)
    return tuple(sorted({one.argval for one in steps if one.opname == "STORE_GLOBAL" != first[one.argval]}))


def _content(value: Any) -> bytes:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        # Memory that is written again for each batch is no buffer; another tensor in its place is.
        return f"#{id(value)}#".encode()
    if isinstance(value, (dict, set)):
        value = [key for key in list(value) if isinstance(key, (str, int, tuple))]
    if isinstance(value, (list, tuple, deque)):
        # Longer ones have another beginning, too, where they are consumed.
        return b"".join(b"|" + b"".join(bytes_of(item)) for item in list(value)[:_MOST_WATCHED])
    return value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)
