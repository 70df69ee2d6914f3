"""Changes of a module by callbacks that Lightning's checkpoints do not hold: frozen parameters, masks, averages."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import prune

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loops.lightning import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
    pl,
)
from lightning_stateful.loops.loop_progress import next_step
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state import (
    counted_batches,
    cut_epochs,
    later_hooks,
    manual_steps,
    module_flags,
    optimizer_steps,
    passing_values,
)
from lightning_stateful.samplers.fingerprint import digest_of_some

_EPOCH_START = "on_train_epoch_start"
# Weights that are named.
_MOST_NAMED = 3
# Some numbers of all weights as training has ended; and the loop's method that calls the hooks of that.
_TRAINED, _RUN_END = "_trained_weights", "on_run_end"
# Hooks behind the end of training.
_ENDS = ("on_train_end", "on_fit_end", "teardown")
# WeightAveraging's exchange of weights and averages, before a validation and after it.
_SWAP = "_swap_models"


class _Watched:
    """Takes the place of a method of a callback during a fit, and counts its calls.

    Args:
        callback: The callback.
        name: The method.
        left_out: Calls to leave out, which were made before the stop.
    """

    def __init__(self, callback: Any, name: str, left_out: int = 0) -> None:
        self._callback, self._name, self._left_out = callback, name, left_out
        self.calls = 0
        self.epoch = -1

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        if self._name == _EPOCH_START:
            self.epoch = args[0].current_epoch
        if self.calls > self._left_out:
            getattr(type(self._callback), self._name)(self._callback, *args)


def watch(trainer: pl.Trainer, saved: Mapping[str, Any] | None = None) -> None:
    """Begin to follow what callbacks do to the module, as training begins.

    Args:
        trainer: The trainer.
        saved: The state of :func:`changes`, if the run is resumed.
    """
    # A fit that failed was not torn down.
    vars(trainer.fit_loop).pop(_TRAINED, None)
    vars(trainer.fit_loop)[_RUN_END] = partial(_end_run, trainer)
    cut_epochs.watch(trainer)
    module_flags.watch(trainer, (saved or {}).get("flags"))
    passing_values.watch(trainer, saved)
    counted_batches.watch(trainer, saved or {})
    later_hooks.watch(trainer, (saved or {}).get("later", []))
    begun = iter((saved or {}).get("epoch_begun", ()))
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            setattr(callback, _EPOCH_START, _Watched(callback, _EPOCH_START, int(next(begun, False))))
        elif isinstance(callback, WeightAveraging):
            setattr(callback, _SWAP, _Watched(callback, _SWAP))


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch` and :func:`prepare_loading`, and forget the buffers and weights."""
    cut_epochs.end_watching(trainer)
    module_flags.end_watching(trainer)
    passing_values.end_watching(trainer)
    counted_batches.end_watching(trainer)
    later_hooks.end_watching(trainer)
    optimizer_steps.end_restoring(trainer)
    for name in ("_weights", _RUN_END):
        vars(trainer.fit_loop).pop(name, None)
    if (handle := vars(trainer.fit_loop).pop("_converting", None)) is not None:
        handle.remove()
    for callback in callbacks_of(trainer):
        for name in (_EPOCH_START, _SWAP):
            if isinstance(vars(callback).get(name), _Watched):
                delattr(callback, name)


def warn_of_averages(trainer: pl.Trainer | None) -> bool:
    """Whether what is being saved holds averages in place of the weights; with a warning."""
    if trainer is None or not _holds_averages(trainer):
        return False
    rank_zero_warn(
        "A checkpoint is being written while a callback has put averages in place of the weights, after training or "
        "within a validation. It is good for evaluation; a resume from it is refused. To resume, keep a checkpoint of "
        "the training itself, as ModelCheckpoint writes it.",
        category=StatefulWarning,
    )
    return True


def _holds_averages(trainer: pl.Trainer) -> bool:
    if any(map(_has_swapped, callbacks_of(trainer))):
        return True
    if not trainer.state.finished and trainer.lightning_module._current_fx_name not in _ENDS:
        return False
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            if callback._initialized and trainer.current_epoch > callback.swa_end:
                return True
        elif isinstance(callback, WeightAveraging) and callback._average_model is not None:
            return True
    return False


def _has_swapped(callback: Any) -> bool:
    """Whether a WeightAveraging callback has put its averages in place of the weights, for a validation."""
    watched = vars(callback).get(_SWAP)
    return isinstance(watched, _Watched) and watched.calls % 2 == 1


def prepare_loading(trainer: pl.Trainer) -> None:
    """Make the module double before weights are loaded into it: Lightning does so afterwards, and rounds them."""
    module: Any = trainer.lightning_module
    if trainer.precision != "64-true":
        return

    def convert(*args: Any) -> None:
        if trainer._checkpoint_connector._loaded_checkpoint:
            trainer.precision_plugin.convert_module(module)

    # Not at once: in setup callbacks copy the module as it is without a resume. Public since torch 2.5 only. The handle
    # is kept with the loop.
    vars(trainer.fit_loop)["_converting"] = module._register_load_state_dict_pre_hook(convert)


def changes(trainer: pl.Trainer | None, progress: LoopProgress, started: int) -> dict[str, Any]:
    """What callbacks have changed about the module, as plain data of a few bytes; warns of what is counted twice.

    Args:
        trainer: The trainer; None before there is one.
        progress: The progress of training as it is saved.
        started: Batches of the epoch that were given to ``training_step``.

    Returns:
        ``trainable``: which parameters are trained, and which BatchNorm layers keep statistics, where a BaseFinetuning
        callback decides. ``epoch_begun``: whether each has done so for the epoch that begins. ``pruned``: of each
        ModelPruning callback a digest of its masks, and one of the weights that it goes back to. ``replaced``: within
        a validation, the weights that are others than before it. ``flags``: which parameters are not trained, and
        which submodules are in eval mode. ``passing``: digests of buffers that no checkpoint holds. ``steps``: what
        manual optimization makes inexact. ``gradients`` and ``last_gradients``: see :func:`.optimizer_steps.gradients`.
        ``counted``, ``missed``, ``again`` and ``twice``: see :func:`.counted_batches.counted`. ``later``: see
        :mod:`.later_hooks`.
    """
    if trainer is None:
        return {}
    found: dict[str, Any] = {}
    if finetuning := [one for one in callbacks_of(trainer) if isinstance(one, BaseFinetuning)]:
        flags = [part for part, _ in _flags(trainer)]
        found["trainable"] = [len(flags), zlib.compress(bytes(flags)).hex()]
        if trainer.lightning_module._current_fx_name == _EPOCH_START:
            watched = [vars(one).get(_EPOCH_START) for one in finetuning]
            begun = [isinstance(one, _Watched) and one.epoch == trainer.current_epoch for one in watched]
            found |= {"epoch_begun": begun} if any(begun) else {}
    masks = [_digest_of_masks(one, list(_masks(one))) for one in callbacks_of(trainer) if isinstance(one, ModelPruning)]
    if any(masks):
        found["pruned"] = masks
    if replaced := _replaced_weights(trainer):
        found["replaced"] = replaced
        when, before, other = "within a validation", "before it", "written outside of validations"
        if not trainer.validating:
            when, before, other = "behind training", "as it ended", "of training itself, as ModelCheckpoint writes it"
        rank_zero_warn(
            f"A checkpoint is being written {when}, and weights of the module ({_some(replaced)}) are others than "
            f"{before}: a hook has put averages in their place, say. It is good for evaluation; a resume from it goes "
            f"on with these weights. To resume, keep a checkpoint that is {other}.",
            category=StatefulWarning,
        )
    if known := module_flags.flags(trainer, is_within=counted_batches.is_within(progress, started)):
        found["flags"] = known
    for kind in ("passing", "settings"):
        if of_kind := passing_values.changed(trainer, kind):
            found[kind] = of_kind
    if steps := manual_steps.inexact_steps(trainer):
        found["steps"] = steps
    found |= optimizer_steps.gradients(trainer, progress)
    found |= counted_batches.counted(trainer, progress, started)
    if later := later_hooks.note_save(trainer):
        found["later"] = later
    return found


def note_weights(trainer: pl.Trainer) -> None:
    """Note the sums of all weights as a validation begins, ahead of all hooks."""
    later_hooks.compare(trainer)
    passing_values.note_again(trainer)
    # Kept with the loop.
    vars(trainer.fit_loop)["_weights"] = next_step(trainer), _sums_of_weights(trainer)
    counted_batches.note_validation(trainer)
    module_flags.note_validation(trainer)


def _sums_of_weights(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    parts = {name: getattr(one, "_local_tensor", one) for name, one in trainer.lightning_module.named_parameters()}
    with torch.no_grad():
        return {name: part.sum(dtype=torch.float64) for name, part in parts.items() if part.is_floating_point()}


def _end_run(trainer: pl.Trainer) -> None:
    """Training has ended: note some numbers of all weights, ahead of the hooks ``on_train_end``."""
    kept = vars(trainer.fit_loop)
    kept.pop(_RUN_END, None)
    kept[_TRAINED] = next_step(trainer), _some_of_weights(trainer)
    trainer.fit_loop.on_run_end()


def _some_of_weights(trainer: pl.Trainer) -> dict[str, str]:
    # Not their sums: they may have been moved to another device by the time of a save.
    return {name: digest_of_some([one]) for name, one in trainer.lightning_module.named_parameters()}


def _replaced_weights(trainer: pl.Trainer) -> list[str]:
    """The first weights that are others than before a validation within training, while it goes on, or at its end."""
    is_over = _TRAINED in vars(trainer.fit_loop)
    at, before = vars(trainer.fit_loop).get(_TRAINED if is_over else "_weights", (None, {}))
    is_looked_at = is_over or (trainer.validating and not trainer.sanity_checking)
    if not is_looked_at or at != next_step(trainer) or _holds_averages(trainer):
        return []
    now = _some_of_weights(trainer) if is_over else _sums_of_weights(trainer)
    # Where training has diverged, both are not a number.
    others = [name for name, one in before.items() if name in now and _shown(one) != _shown(now[name])]
    return others[:_MOST_NAMED]


def _shown(noted: str | torch.Tensor) -> str:
    return noted if isinstance(noted, str) else repr(noted.item())


def _some(names: list[str]) -> str:
    return f"{', '.join(names)}{' and others' if len(names) == _MOST_NAMED else ''}"


def restore(trainer: pl.Trainer, saved: Mapping[str, Any], progress: LoopProgress) -> None:
    """Change the module of a resumed run as callbacks had changed it before the stop, or warn of what cannot be.

    Args:
        trainer: The trainer.
        saved: What :func:`changes` gave.
        progress: Where the run goes on.
    """
    callbacks = callbacks_of(trainer)
    manual_steps.warn_of_inexact_steps(saved.get("steps", {}))
    optimizer_steps.restore_gradients(trainer, saved)
    if replaced := saved.get("replaced"):
        rank_zero_warn(
            f"The checkpoint was written within a validation, or behind training, when weights of the module "
            f"({_some(list(replaced))}) were others than training had left them, such as averages. Training goes on "
            "with these, so the resume is not exact. Resume from a checkpoint that was written outside of that.",
            category=StatefulWarning,
        )
    if any(isinstance(one, BaseFinetuning) for one in callbacks):
        _restore_trainable(trainer, saved.get("trainable"), progress)
    digests = iter(saved.get("pruned", ()))
    for callback in callbacks:
        if isinstance(callback, ModelPruning) and not any(True for _ in _masks(callback)):
            _restore_masks(callback, next(digests, ""), progress)


def _restore_trainable(trainer: pl.Trainer, saved: Any, progress: LoopProgress) -> None:
    """Train again what was trained: on a resume BaseFinetuning freezes all that it freezes at first, for good."""
    flags = list(_flags(trainer))
    if saved is not None and saved[0] == len(flags):
        for (_, (part, name)), value in zip(flags, zlib.decompress(bytes.fromhex(saved[1])), strict=True):
            setattr(part, name, bool(value))
        return
    for callback in callbacks_of(trainer):
        if isinstance(callback, BackboneFinetuning):
            if progress.epoch + progress.running > callback.unfreeze_backbone_at_epoch:
                callback.make_trainable(trainer.lightning_module.backbone)
        elif isinstance(callback, BaseFinetuning) and progress.epoch + progress.running:
            rank_zero_warn(
                f"{type(callback).__name__} has frozen parts of the model again, as Lightning does on a resume, and "
                "the checkpoint does not say what had been unfrozen: that is trained on no more. Unfreeze it in "
                "on_train_start.",
                category=StatefulWarning,
            )


def _flags(trainer: pl.Trainer) -> Iterator[tuple[bool, tuple[Any, str]]]:
    """What BaseFinetuning sets, in the module's order: the value, and the object and name under which it stands."""
    module = trainer.lightning_module
    for parameter in module.parameters():
        yield parameter.requires_grad, (parameter, "requires_grad")
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            yield bool(layer.track_running_stats), (layer, "track_running_stats")


def _masks(callback: Any) -> Iterator[torch.Tensor]:
    """The masks of a ModelPruning callback; none before it has pruned, or after training."""
    for module, name in callback._parameters_to_prune:
        if (mask := getattr(module, f"{name}_mask", None)) is not None:
            yield mask != 0


def _originals(callback: Any) -> list[tuple[Any, Any, str]]:
    """The copies of modules that a lottery ticket goes back to, each with its module and a parameter's name."""
    layers = (callback._original_layers or {}).values()
    return [
        (layer["data"], callback._parameters_to_prune[at][0], name) for layer in layers for at, name in layer["names"]
    ]


def _digest_of_masks(callback: Any, masks: list[torch.Tensor], *, is_shared: bool | None = None) -> str:
    """A digest of masks, and of the weights that a lottery ticket goes back to; empty without masks.

    Args:
        callback: The ModelPruning callback.
        masks: Its masks.
        is_shared: Whether the copies of weights share the memory of the module's, as they do on one device once
            Lightning has gone back to them; None to see.
    """
    if not masks:
        return ""
    originals = _originals(callback)
    if is_shared is None:
        pairs = [(getattr(copy, name), getattr(module, f"{name}_orig", None)) for copy, module, name in originals]
        is_shared = bool(pairs) and all(now is not None and one.data_ptr() == now.data_ptr() for one, now in pairs)
    found = hashlib.sha256()
    for mask in masks:
        found.update(mask.cpu().numpy().tobytes())
    for copy, _, name in () if is_shared else originals:
        found.update(repr(getattr(copy, name).detach().double().sum().item()).encode())
    return ("shared " if is_shared else "") + found.hexdigest()[:16]


def _restore_masks(callback: Any, digest: str, progress: LoopProgress) -> None:
    """Mask again what was pruned: a checkpoint of ModelPruning has zeros in place of masks."""
    pruned, is_shared = callback._parameters_to_prune, digest.startswith("shared ")
    masks = [getattr(module, name).detach() != 0 for module, name in pruned]
    if digest and _digest_of_masks(callback, masks, is_shared=is_shared) == digest:
        for (module, name), mask in zip(pruned, masks, strict=True):
            prune.custom_from_mask(module, name, mask)  # type: ignore[no-untyped-call]
        for copy, module, name in _originals(callback) if is_shared else ():
            getattr(copy, name).data = getattr(module, f"{name}_orig").data
    elif digest or (progress.epoch and not all(mask.all() for mask in masks)):
        rank_zero_warn(
            "ModelPruning's masks are not in Lightning's checkpoints, and do not follow from this one's weights, or "
            "the weights that it goes back to are others (seed_everything): what was pruned is trained on again until "
            "it prunes next, and the resume is not exact.",
            category=StatefulWarning,
        )


def look_at_start(trainer: pl.Trainer) -> None:
    """An epoch begins: look at what the end of the one before has changed, and at attributes of the module."""
    later_hooks.compare(trainer, _EPOCH_START)
    passing_values.look_at_start(trainer)


def note_buffers(trainer: pl.Trainer) -> None:
    """Note what a batch that begins may change and a resume does not: buffers, averages, and what callbacks count."""
    counted_batches.note_batch(trainer)
    later_hooks.compare(trainer, "on_train_batch_start")
    counted_batches.note_tensors(trainer)
