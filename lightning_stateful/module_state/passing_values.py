"""What a module and its callbacks remember and no checkpoint holds: buffers with ``persistent=False``, and attributes.

A temperature that ``on_train_epoch_start`` sets, a running average, a queue of samples: plain attributes that training
has changed are lost by a resume, unless a hook restores them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import attributes_of, is_users
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import call_before_epochs
from lightning_stateful.samplers.fingerprint import digest, spread

# Kept with the loop.
_WATCH = "_passing_values"
# Numbers in a buffer or tensor up to which it is looked at: a metric, a queue.
_MOST_NUMBERS = 2**16
# Values of a list or dict that are looked at, evenly apart; attributes in a checkpoint; and characters of a value.
_MOST_VALUES, _MOST_NAMES, _MOST_CHARACTERS = 64, 64, 40
# Begins what is no value itself.
_DIGEST = "#"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Texts = dict[str, str]


class _Watch:
    """What is known of such values in a fit.

    Args:
        saved: What :func:`changed` gave, of the checkpoint that the run is resumed from.
    """

    def __init__(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        self.saved = saved
        # By kind, as the first epoch began; None before.
        self.begun: dict[str, Texts] | None = None
        # Those that are others, as the fit ended.
        self.at_end: dict[str, Texts] | None = None
        # Whether attributes are still to be compared, as the first batch begins.
        self.is_awaiting = bool(saved.get("remembered"))


def watch(trainer: pl.Trainer, saved: Mapping[str, Any] | None) -> None:
    """Begin to follow the values; to be called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: A state that has what :func:`changed` gave, if the run is resumed from a checkpoint.
    """
    vars(trainer.fit_loop)[_WATCH] = _Watch({kind: (saved or {}).get(kind, {}) for kind in _KINDS})
    call_before_epochs(trainer, partial(_begin, trainer))


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`, but keep what was changed: the model may be used before another checkpoint is written."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.at_end is None:
        known.at_end = changed(trainer)


def changed(trainer: pl.Trainer) -> dict[str, Texts]:
    """What no checkpoint holds and is another value than before the first epoch, by kind and name.

    Returns:
        ``passing``: digests of small buffers. ``remembered``: numbers as text, and digests of other attributes.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None:
        return {}
    if known.at_end is not None:
        return known.at_end
    if known.begun is None:
        return {kind: dict(saved) for kind, saved in known.saved.items() if saved}
    found: dict[str, Texts] = {}
    for kind, look in _KINDS.items():
        begun, saved, now = known.begun[kind], known.saved[kind], look(trainer)
        others = [name for name, held in now.items() if name in saved or begun.get(name) != held]
        found |= {kind: {name: now[name] for name in others[:_MOST_NAMES]}} if others else {}
    return found


def _begin(trainer: pl.Trainer) -> None:
    """Compare buffers with the checkpoint, once: behind the hooks ``on_train_start``, which may restore them.

    Warns:
        StatefulWarning: Some are others than at the save.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or known.begun is not None:
        return
    known.begun = {kind: look(trainer) for kind, look in _KINDS.items()}
    now = known.begun["passing"]
    if others := sorted(name for name, held in known.saved["passing"].items() if now.get(name) != held):
        rank_zero_warn(
            f"Buffers of the module that no checkpoint holds (persistent=False) had been changed in training when the "
            f"checkpoint was written, and are others here: {some_of(others)}. If training "
            "depends on them, as on a metric that they sum up, the resume is not exact. Register them with "
            "persistent=True, or restore them in on_load_checkpoint or on_train_start.",
            category=StatefulWarning,
        )


def look_once(trainer: pl.Trainer) -> None:
    """Log, as the first batch of a resume begins, which attributes are others than at the save and were not set since.

    A warning would be too much: many remember a loss for the log alone.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or not known.is_awaiting or known.begun is None:
        # In most runs, at every batch.
        return
    known.is_awaiting = False
    now, begun = _attributes(trainer), known.begun["remembered"]
    others = {name: was for name, was in known.saved["remembered"].items() if now.get(name) != was}
    if left := [name for name in others if now.get(name) == begun.get(name)]:
        said = [_change(name, others[name], now.get(name, "missing")) for name in left]
        rank_zero_info(
            "Attributes of the module or of callbacks that no checkpoint holds had been changed in training when this "
            f"one was written, and are others here: {some_of(said)}. If training depends on them, the resume is not "
            "exact: save them in on_save_checkpoint, or in state_dict of a callback, or set them in on_train_start."
        )


def _change(name: str, was: str, now: str) -> str:
    return name if _DIGEST in (was[:1], now[:1]) else f"{name} was {was} and is {now}"


def _buffers(trainer: pl.Trainer) -> Texts:
    found: Texts = {}
    for prefix, part in trainer.lightning_module.named_modules():
        held = vars(part)
        for name in sorted(held.get("_non_persistent_buffers_set", ())):
            buffer = held["_buffers"].get(name)
            if isinstance(buffer, torch.Tensor) and buffer.numel() <= _MOST_NUMBERS:
                found[f"{prefix}.{name}".lstrip(".")] = digest(buffer.detach().cpu())
    return found


def _attributes(trainer: pl.Trainer) -> Texts:
    found: Texts = {}
    for prefix, owner in _owners(trainer):
        for name, value in attributes_of(owner).items():
            if name not in _names_of_lightning() and (text := _text(value)):
                found[f"{prefix}.{name}".lstrip(".")] = text
    return found


def _owners(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The module, its parts and the callbacks that are a user's own."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    named = [(type(one).__qualname__, one) for one in callbacks]
    for name, one in (*trainer.lightning_module.named_modules(), *named):
        if is_users(type(one).__module__):
            yield name, one


@lru_cache(maxsize=1)
def _names_of_lightning() -> frozenset[str]:
    return frozenset({*vars(pl.LightningModule()), "_hparams", "_hparams_initial", "_hparams_name"})


_KINDS: dict[str, Callable[[pl.Trainer], Texts]] = {"passing": _buffers, "remembered": _attributes}


def _text(value: Any) -> str:
    """A number or short string itself; a digest of a longer one, a small array or a container; empty for others."""
    if type(value) in _PLAIN:
        text = repr(value)
        return text if len(text) <= _MOST_CHARACTERS else _DIGEST + digest(text)
    if isinstance(value, np.ndarray):
        return _DIGEST + digest(value) if value.size <= _MOST_NUMBERS and not value.dtype.hasobject else ""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        is_read = value.numel() <= _MOST_NUMBERS and value.layout == torch.strided and not value.is_meta
        return _DIGEST + digest(value.detach().cpu()) if is_read else ""
    if isinstance(value, (set, frozenset)):
        # In no order of their own.
        value = sorted(map(repr, value)) if len(value) <= _MOST_VALUES else [len(value)]
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if not isinstance(value, (list, tuple, deque)):
        return ""
    parts = [_text(value[place]) for place in spread(len(value), _MOST_VALUES)]
    return f"{_DIGEST}{len(value)} {digest(parts)}" if all(parts) else ""
