"""An iterable dataset's own state: that of its ``state_dict``, or of what ``iter()`` makes of it, as plain data."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from typing import Any

from lightning_stateful.errors import StateError
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.stream_nodes.nodes import NodeState

# A state is taken after the first batch, and then after one more sample, or batch of an iterable of them, for each so
# many of its characters as JSON. It is kept once two batches were read behind it, which a resume reads again.
_CHARACTERS_A_SAMPLE, _CHARACTERS_A_BATCH = 16, 2**14

# Errors of a load_state_dict, or of a node's reset, that is given what it never gave.
OF_STATES = (TypeError, KeyError, IndexError, AttributeError, ValueError)


def is_due(state: NodeState, since: int, batch_size: int | None) -> bool:
    """Whether a state is due, so many batches after one of this size.

    Args:
        state: The latest state.
        since: Batches since.
        batch_size: Samples of a batch; None of an iterable of batches.
    """
    size = len(json.dumps(state))
    if batch_size is None:
        return since > size // _CHARACTERS_A_BATCH
    return since * batch_size >= size // _CHARACTERS_A_SAMPLE


def own_state(dataset: Any, iterator: Any, name: str) -> NodeState:
    """The states of a dataset and of its iterator, each or None; that of one that is its own iterator is the latter.

    Args:
        dataset: The dataset.
        iterator: What ``iter()`` made of it.
        name: How an error calls it.

    Raises:
        StateError: A state cannot be kept in a checkpoint.
    """
    holders = {"dataset": None if iterator is dataset else dataset, "iterator": iterator}
    try:
        return {
            part: to_plain(holder.state_dict(), owner=part) if has_state(holder) else None
            for part, holder in holders.items()
        }
    except Exception as error:
        if asked := [argument for holder in holders.values() for argument in _needed_by_state_dict(holder)]:
            raise StateError(
                f"state_dict() of {name} takes arguments ({', '.join(asked)}), "
                "which only the loader of its own package knows: no state of it can be taken here. "
                "Either train on an iterable that is no DataLoader and holds "
                "that loader, with __iter__, state_dict and load_state_dict that call the loader's "
                "(docs/compatibility.md); or give it, in a subclass, a state_dict() without arguments."
            ) from error
        raise StateError(
            f"state_dict() of {name} gave nothing that can be kept in a checkpoint: {type(error).__name__}: {error}"
        ) from error


def _needed_by_state_dict(holder: Any) -> list[str]:
    """The names of arguments without which an object's ``state_dict`` cannot be called."""
    try:
        arguments = inspect.signature(holder.state_dict).parameters.values() if has_state(holder) else ()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in arguments if one.default is one.empty and one.kind not in kinds]


def iterator_at(dataset: Any, state: NodeState) -> Any:
    """Begin a pass at a state, as torchdata does: that of the dataset, ``iter()``, that of the iterator.

    Args:
        dataset: The dataset.
        state: What :func:`own_state` gave.
    """
    of_iterator = state["iterator"]
    if state["dataset"] is not None:
        dataset.load_state_dict(from_plain(state["dataset"]))
    elif has_state(dataset):
        # It is its own iterator; some open there, at iter(), what they go on in, and others have no state before.
        with suppress(Exception):
            dataset.load_state_dict(from_plain(of_iterator))
    iterator = iter(dataset)
    if of_iterator is not None and not (iterator is dataset and to_plain(iterator.state_dict()) == of_iterator):
        iterator.load_state_dict(from_plain(of_iterator))
    return iterator


def has_state(holder: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))
