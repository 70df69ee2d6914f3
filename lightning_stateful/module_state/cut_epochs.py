"""Epochs that end before all their batches, by ``max_steps`` say: Lightning calls the hooks of their end all the same.

It calls them again where the rest of the epoch has been trained on. What counts in them has then counted the epoch
twice: EarlyStopping is given back what it held before, and logged values are those of before; what else has changed is
named. So it is with the validation that Lightning runs where a run is told to stop within an epoch, by ``max_time``
say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.contents.dataset_content import bytes_of
from lightning_stateful.errors import DamagedStateError, StatefulWarning
from lightning_stateful.generators.attributes import names_in
from lightning_stateful.loops.lightning import Checkpoint, EarlyStopping, Timer, pl
from lightning_stateful.loops.loop_progress import CUT_AT, next_step, read_progress
from lightning_stateful.loops.other_callbacks import Metrics, callbacks_of, logged_metrics
from lightning_stateful.loops.saved_progress import CALLBACK_KEY, LoopProgress
from lightning_stateful.module_state import later_hooks, manual_steps, module_flags, passing_values
from lightning_stateful.module_state.optimizer_steps import settings_of_optimizers
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.shapes import DAMAGED

# The hook that is called twice.
_HOOK = "on_train_epoch_end"
_HOOKS = (_HOOK, "on_validation_start", "on_validation_epoch_end", "on_validation_end")
# Ours, kept with the loop: what was there before; and where a validation was run only because the run is to stop.
_HELD, _STOPS = "_held_at_cut", "_stops_by_validation"
_SCHEDULERS, _SETTINGS = "learning rate schedulers", "settings of optimizers, such as learning rates,"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _BeforeEnd(NamedTuple):
    """What there was before the end of an epoch that was cut.

    Attributes:
        at: Epoch and number of the batch that would have come next.
        stops: States of EarlyStopping callbacks.
        digests: What tells whether others, and the module, change.
        metrics: The latest logged values, as :func:`.logged_metrics` gives them.
    """

    at: tuple[int, int]
    stops: dict[str, Any]
    digests: dict[str, tuple[str, str]]
    metrics: Metrics


def watch(trainer: pl.Trainer) -> None:
    """Until :func:`end_watching`, remember what callbacks hold as an epoch is cut, ahead of all hooks of its end."""
    trainer.fit_loop.advance = partial(_run_epoch, trainer)  # type: ignore[method-assign]


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`; what was remembered of the end stays, for a checkpoint that is written after the fit."""
    vars(trainer.fit_loop).pop("advance", None)


def _run_epoch(trainer: pl.Trainer) -> None:
    """In place of Lightning's method, which runs all batches of an epoch."""
    type(trainer.fit_loop).advance(trainer.fit_loop)
    later_hooks.compare(trainer)
    progress, at = read_progress(trainer), next_step(trainer, begun=True)
    if progress.running and not progress.ended:
        kept: Any = trainer.fit_loop.epoch_loop
        vars(kept)[CUT_AT] = at, trainer.should_stop
        if not stops_by_validation(trainer, at):
            _note(trainer)
    else:
        forget_end(trainer)


def note_validation(trainer: pl.Trainer) -> None:
    """A validation is about to begin: remember what callbacks hold, if it is run only because the run is to stop."""
    if trainer.sanity_checking or not trainer.should_stop:
        return
    kept: Any = trainer.fit_loop.epoch_loop
    fetcher: Any = trainer.fit_loop._data_fetcher
    trainer.should_stop = False
    try:
        is_due = kept._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = True
    if not is_due:
        _note(trainer)
        vars(kept)[_STOPS] = next_step(trainer, begun=True)


def stops_by_validation(trainer: pl.Trainer, at: tuple[int, int]) -> bool:
    """Whether such a validation was run behind a batch: at epoch and number of the one that would have come next."""
    return vars(trainer.fit_loop.epoch_loop).get(_STOPS) == at


def _note(trainer: pl.Trainer) -> None:
    stops = {one.state_key: _plain_state(one) for one in callbacks_of(trainer) if isinstance(one, EarlyStopping)}
    plain = {key: state for key, state in stops.items() if state}
    metrics = logged_metrics(trainer, is_step=True)
    held = _BeforeEnd(next_step(trainer, begun=True), plain, _digests(trainer, plain), metrics)
    kept: Any = trainer.fit_loop.epoch_loop
    vars(kept)[_HELD] = held
    for part in (manual_steps, module_flags, passing_values):
        part.note_cut(trainer)


def is_cut(trainer: pl.Trainer) -> bool:
    """Whether the epoch that ends, or has ended last, has further batches."""
    return CUT_AT in vars(trainer.fit_loop.epoch_loop)


def forget_end(trainer: pl.Trainer) -> None:
    """Forget the end of an epoch, as a further batch begins."""
    kept: Any = trainer.fit_loop.epoch_loop
    for name in (CUT_AT, _HELD, _STOPS):
        vars(kept).pop(name, None)


def metrics_at(trainer: pl.Trainer | None, progress: LoopProgress) -> dict[str, float]:
    """The values that ``trainer.callback_metrics`` has where a run goes on."""
    return {} if trainer is None else all_metrics_at(trainer, progress)["callback_metrics"]


def all_metrics_at(trainer: pl.Trainer, progress: LoopProgress) -> Metrics:
    """Those that each of its dicts of metrics has: within an epoch that was cut, of before its end."""
    held: _BeforeEnd | None = vars(trainer.fit_loop.epoch_loop).get(_HELD)
    if held is not None and progress.running and held.at[0] == progress.epoch:
        return {kind: dict(metrics) for kind, metrics in held.metrics.items()}
    return logged_metrics(trainer, epoch_over=progress.plateau == "epoch")


def state_of_cut(trainer: pl.Trainer, epoch: int | None = None) -> dict[str, Any]:
    """What a resume within an epoch that was cut has to put back, or to name, as plain data.

    Args:
        trainer: The trainer.
        epoch: The epoch within which a checkpoint is being written; None for the one that was cut.

    Returns:
        ``"held"``: by callback what it held before the end. ``"changed"``: what else that end has changed. Empty where
        the epoch was not cut.
    """
    held: _BeforeEnd | None = vars(trainer.fit_loop.epoch_loop).get(_HELD)
    if held is None or epoch not in (None, held.at[0]):
        return {}
    before, now = held.digests, _digests(trainer, held.stops)
    names = {name for key, (name, digest) in now.items() if before.get(key) != (name, digest)}
    # Schedulers that have stepped have set learning rates.
    changed = sorted(names - {_SETTINGS} if _SCHEDULERS in names else names)
    return {name: part for name, part in {"held": held.stops, "changed": changed}.items() if part}


def put_back(trainer: pl.Trainer, cut: Mapping[str, Any]) -> None:
    """Give callbacks back what they held before the end of the epoch that goes on.

    Args:
        trainer: The trainer.
        cut: What :func:`state_of_cut` gave.

    Raises:
        DamagedStateError: A callback cannot load it.

    Warns:
        StatefulWarning: That end has changed what cannot be put back.
    """
    held = cut.get("held", {})
    for callback in callbacks_of(trainer):
        if isinstance(callback, EarlyStopping) and callback.state_key in held:
            _load(callback, held[callback.state_key])
    if changed := cut.get("changed"):
        rank_zero_warn(
            f"The epoch that goes on was cut, by max_steps say, and Lightning has called {_HOOK} for it, as it will "
            f"once more at its end. In that hook, or those of a validation that the stop has brought, "
            f"{' and '.join(changed)} changed: what is counted "
            "there, or follows from what was there before, is so twice, and then the resume is not exact. Resume from "
            "a checkpoint that was saved in on_train_batch_end, as ModelCheckpoint(every_n_train_steps=...) does.",
            category=StatefulWarning,
        )


def _digests(trainer: pl.Trainer, known: Collection[str]) -> dict[str, tuple[str, str]]:
    """By key, name and digest: what callbacks with those hooks save, but for known ones; weights; optimizers."""
    found: dict[str, tuple[str, str]] = {}
    for callback in callbacks_of(trainer):
        kind = type(callback)
        is_other = not isinstance(callback, (Checkpoint, Timer)) and callback.state_key not in {*known, CALLBACK_KEY}
        if is_other and any(getattr(kind, hook) is not getattr(pl.Callback, hook) for hook in _HOOKS):
            # What cannot be had is not compared.
            with suppress(Exception):
                digest = hex_digest(*bytes_of(callback.state_dict()), size=6)
                found[callback.state_key] = kind.__qualname__, digest
    module, schedulers = trainer.lightning_module, [config.scheduler for config in trainer.lr_scheduler_configs]
    steps = [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]
    found["schedulers"] = _SCHEDULERS, repr(steps)
    found["saved"] = "attributes that the module saves", repr(_saved_attributes(trainer))
    found["optimizers"] = _SETTINGS, repr(settings_of_optimizers(trainer))
    if not trainer.strategy.restore_checkpoint_after_setup:
        # Else they are sharded.
        with suppress(Exception):
            sums = [(name, _sum(part)) for name, part in (*module.named_parameters(), *module.named_buffers())]
            found["weights"] = "weights or buffers of the module", repr(sums)
    return found


def _saved_attributes(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """Names and texts of those attributes of the module that its own ``on_save_checkpoint`` names."""
    save: Any = type(trainer.lightning_module).on_save_checkpoint
    if save is pl.LightningModule.on_save_checkpoint:
        return []
    named = names_in(save.__code__) if hasattr(save, "__code__") else ()
    texts = passing_values.texts_of_attributes(trainer)
    return sorted((name, text) for name, text in texts.items() if re.split(r"[.[]", name)[0] in named)


def _sum(part: torch.Tensor) -> int:
    """The sum of the bits of a tensor's numbers, which is the same in any order and so on any device."""
    return int(part.detach().view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64))


def _load(callback: Any, state: Any) -> None:
    try:
        callback.load_state_dict(from_plain(state))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedStateError(
            f"The state of {callback.state_key} before the end of an epoch that was cut cannot be loaded: "
            f"{error!r}.{DAMAGED}"
        ) from error


def _plain_state(callback: Any) -> Any:
    """A callback's state as plain data; None for one that a checkpoint of ours cannot hold."""
    try:
        return to_plain(callback.state_dict())
    except Exception:
        # An error of the user's comes when a checkpoint is written, which may be never.
        return None
