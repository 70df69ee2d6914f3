"""The progress of a run in its checkpoint: read without Lightning, from the callback's state or Lightning's counters.

Nothing here needs a Trainer or imports Lightning, so that the command reads checkpoints with the same functions as a
resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_stateful.errors import DamagedStateError, StateError, StateVersionError
from lightning_stateful.shapes import COUNT, DAMAGED, EPOCH, RANKS, SET_ON_RANK, Either, check_shape
from lightning_stateful.state import VERSION

# Under this key a checkpoint's "callbacks" hold the state of StatefulDataCallback.
CALLBACK_KEY = "StatefulDataCallback"
# Under this key a data module's state holds that of its data, apart from what a subclass adds.
STATE_KEY = "lightning_stateful"
# What to do where a run was saved under another seed.
SEED_REMEDY = (
    "If this script has written the checkpoint, a hook calls seed_everything with another seed, and the checkpoint was "
    "saved behind it: pass StatefulDataCallback(seed=...), which no hook changes. Else pass the saved seed, or call "
    "seed_everything with it before the Trainer is made, or accept the change with accept=('seed',)."
)
TRACKED = ("ready", "started", "processed", "completed")
_CONTENT = {
    "batch": (EPOCH, COUNT),
    "progress": {str: object},
    "read_by": [object],
    "ranks": RANKS,
    "rank": COUNT,
    "settings": str,
    "held?": str,
    "workers?": COUNT,
    "chosen?": (COUNT, object, bool),
    "collectives?": bool,
    "digest": object,
    "means": [object],
}
_FIRST_BATCH = {
    "pass": COUNT,
    "ranks": RANKS,
    "workers": COUNT,
    "held": {str: str},
    "digest": object,
    "means": [object],
    "collectives?": bool,
}
_SETTINGS = {str: {str: (str, str, str)}}
_OPTIONS = ("fx", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "sync", "rank_zero_only")
_LOGGED = {
    **dict.fromkeys(_OPTIONS, object),
    "name": str,
    "metric_attribute": Either(None, str),
    "reduce": str,
    "count": Either(None, COUNT),
    "value": Either(None, float),
    "dtype?": str,
}
_OF_RANK = {
    "logged": {str: _LOGGED},
    "metrics": {str: {"states": object, "count": COUNT}},
    "groups?": {str: [[str]]},
    "generators?": {str: object},
    "waits?": {str: [object]},
    "cut?": {"held?": {str: {str: object}}, "changed?": [str]},
    "remembered?": {str: str},
    "latest?": {str: float},
    "shown?": {"logged_metrics?": {str: float}, "progress_bar_metrics?": {str: float}},
    "set_by_hooks?": {"settings": _SETTINGS, "changed": {str: object}, "streams?": {str: SET_ON_RANK}},
}
# The parts of the callback's state beside the progress and what is compared.
_PARTS = {
    "averaged": bool,
    "module": Either(None, str),
    "seeds": {str: int},
    "trainable": (COUNT, str),
    "epoch_begun": [bool],
    "flags": Either((str, bool), (str, bool, str)),
    "passing": {str: str},
    "settings": {str: str},
    "steps": {"gradients?": [COUNT], "stepped?": (COUNT, COUNT)},
    "gradients": [str],
    "zero_gradients": [str],
    "last_gradients": {str: object},
    "counted": {str: str},
    "missed": [str],
    "again": [str],
    "twice": [str],
    "later": [str],
    "pruned": [str],
    "results": Either(
        {},
        {
            "ranks": [Either(None, _OF_RANK)],
            "buffers?": [Either(None, {str: object})],
            "held_back?": bool,
            "parted?": [COUNT],
            "apart?": [COUNT],
            "hooks?": [str],
            "ended?": {str: float},
        },
    ),
    "tokens": Either(None, {"epoch": EPOCH, "before": {str: object}, "after?": {str: object}}),
    "written": Either(
        {},
        {
            "versions": {str: str},
            "ranks": RANKS,
            "steps": Either(None, COUNT),
            "batch_size": {str: object},
            "workers": {str: object},
            "began_with?": str,
            "alike?": [str],
            "overfits?": bool,
            "reloads?": COUNT,
            "arguments?": {str: str},
            "hashes?": str,
        },
    ),
    "ledger": Either({"start": str, "epoch": EPOCH, "batch": COUNT}, str),
    "content": {str: _CONTENT},
    "first_batches": {str: [_FIRST_BATCH]},
    "first_changes?": {str: {str: object}},
    "dataset_settings": _SETTINGS,
    "build": {str: str},
    "validation": {str: {str: object}},
}
# Counts of a progress that may be below 0: none, or a validation that is due.
_MAY_BE_NONE = ("stepped", "train_reload_epoch", "val_reload_epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgress:
    """The progress of a training run.

    Attributes:
        epoch: Epochs that are over.
        batch: Batches of the running epoch that the model has been trained on, so also the number, from 0, of the batch
            that comes next; 0 between epochs.
        running: An epoch has begun and its end hooks have not run.
        ended: All batches of the running epoch are done, its end hooks are not.
        validate: A validation is due before the next batch.
        plateau: ``"step"`` or ``"epoch"`` if schedulers that monitor a metric have yet to take that step, or empty.
        stepped: Lightning's ``_batches_that_stepped``, the steps that its loggers are told: a batch, or a window of
            ``accumulate_grad_batches`` of them, counts when all that follows it, a validation too, is over.
        train_reload_epoch: Epoch at which the training loaders were built last; -1 for none.
        val_reload_epoch: The same for validation loaders.
        validated: The batch of the running epoch after which a validation was run last, where that batch is trained on
            again because its accumulation window was open; else 0. That validation is not run again.
        stopping: The run has been told to stop, and waits for ``min_epochs`` or ``min_steps``.
        uncounted: The optimizer has taken the step of the latest batch, and schedulers have not; Lightning may not have
            counted it.
    """

    epoch: int = 0
    batch: int = 0
    running: bool = False
    ended: bool = False
    validate: bool = False
    plateau: str = ""
    stepped: int = 0
    train_reload_epoch: int = -1
    val_reload_epoch: int = -1
    validated: int = 0
    stopping: bool = False
    uncounted: bool = False

    @property
    def epoch_and_step(self) -> tuple[int, int]:
        """The epoch and step of the batch that comes next: after the last batch of an epoch, the next epoch."""
        return (self.epoch + 1, 0) if self.ended else (self.epoch, self.batch)

    def has_ended(self, epoch: int) -> bool:
        """Whether it stands behind the last batch of an epoch."""
        return self.ended and self.epoch == epoch

    def at_step(self, step: int, *, ended: bool) -> LoopProgress:
        """The same progress within a running epoch in steps of the present ranks and batch sizes.

        Args:
            step: Batches that the model has been trained on.
            ended: The epoch has no more of them.
        """
        validated = self.validated if step == self.batch else 0
        progress = replace(self, batch=step, ended=ended, validated=validated)
        if ended and not self.validate:
            # Nothing is left on the present ranks. ``validate`` sends Lightning to the end of a batch, where it decides
            # whether a validation is due, and counts that batch once more.
            return replace(progress, validate=True, stepped=self.stepped - 1)
        if self.validate and step != self.batch:
            # Validations fall after certain steps, of which this is no longer one.
            return replace(progress, validate=ended, stepped=self.stepped + (not ended))
        return progress

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoopProgress:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A key is missing or has the wrong type.
        """
        fresh = asdict(cls())
        for key, default in fresh.items():
            if type(data.get(key)) is not type(default):
                raise DamagedStateError(
                    f"The callback's state must hold a {type(default).__name__} under {key!r}, got {data.get(key)!r}. "
                    "Resume from another checkpoint; this one's state is damaged."
                )
            if type(default) is int:
                check_shape(data[key], range(-(key in _MAY_BE_NONE), COUNT.stop), f"The callback's progress.{key}")
        if data["plateau"] not in ("", "step", "epoch"):
            raise DamagedStateError(f"The callback's progress.plateau cannot be {data['plateau']!r}.{DAMAGED}")
        return cls(**{key: data[key] for key in fresh})


def read_callback_state(state: Any) -> tuple[LoopProgress, dict[str, float]]:
    """The progress and the logged metrics in the callback's state.

    Raises:
        DamagedStateError: It is not what the callback writes.
        StateVersionError: A version wrote it that this one cannot read.
        StateError: The run that wrote it had not restored itself, or its weights had been replaced by averages.
    """
    if not isinstance(state, Mapping) or type(state.get("version")) is not int:
        raise DamagedStateError(f"The callback's state has no version: {state!r}. Resume from another checkpoint.")
    if state["version"] != VERSION:
        raise StateVersionError(
            f"The callback's state has version {state['version']}, this installation reads version {VERSION}. "
            "Install the version of lightning-stateful that wrote it."
        )
    if state.get("restored") is not True:
        raise StateError(
            "This checkpoint was written by a run that was itself being resumed and had not yet restored its "
            "optimizers and loops. Resume from the checkpoint that that run was resumed from."
        )
    if state.get("averaged"):
        raise StateError(
            "This checkpoint was written while a callback had put averages in place of the weights, during a "
            "validation or after training had ended, and training cannot go on with them. Resume from a checkpoint of "
            "the training itself, or load these weights into the model, and call fit without ckpt_path."
        )
    if not isinstance(state.get("progress"), Mapping):
        raise DamagedStateError(f"The callback's state has no progress: {state!r}. Resume from another checkpoint.")
    for part in _PARTS.keys() & state.keys():
        try:
            check_shape(state[part], _PARTS[part], part)
        except DamagedStateError as error:
            raise DamagedStateError(f"The callback's {error}{DAMAGED}") from None
    metrics = state.get("metrics")
    if not isinstance(metrics, Mapping) or not all(type(value) is float for value in metrics.values()):
        raise DamagedStateError(f"The callback's state has no metrics: {state!r}. Resume from another checkpoint.")
    return LoopProgress.from_dict(state["progress"]), dict(metrics)


def data_state_in(module_state: Any) -> Mapping[str, Any] | None:
    """The data's state within a data module's state, which may hold more of the user's own."""
    return module_state.get(STATE_KEY) if isinstance(module_state, Mapping) else None


def read_counters(fit_loop_state: Mapping[str, Any], *, max_batches: float = float("inf")) -> LoopProgress:
    """The progress of training by a fit loop's saved counters, whatever hook they were saved in.

    Args:
        fit_loop_state: ``fit_loop.state_dict()``, or ``checkpoint["loops"]["fit_loop"]``.
        max_batches: Batches of a limited epoch, if known.
    """
    epoch = fit_loop_state["epoch_progress"]["current"]
    batches = fit_loop_state["epoch_loop.batch_progress"]
    batch = batches["current"]
    stepped = fit_loop_state["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    if epoch["ready"] > epoch["started"]:
        return LoopProgress(epoch=epoch["ready"] - 1, stepped=stepped)
    if epoch["started"] == 0:
        return LoopProgress(stepped=stepped)
    is_last = batches["is_last_batch"] and batch["processed"] == batch["ready"]
    ended = is_last or batch["processed"] >= max_batches
    if ended and epoch["processed"] >= epoch["started"]:
        return LoopProgress(epoch=epoch["started"], stepped=stepped)
    return LoopProgress(
        epoch=epoch["started"] - 1, batch=batch["processed"], running=True, ended=ended, stepped=stepped
    )


def hook_begun(fit_loop_state: Mapping[str, Any], progress: LoopProgress) -> str:
    """The hook that begins an epoch or a batch, which was called ahead of a save and which a resume calls again.

    Args:
        fit_loop_state: As for :func:`read_counters`.
        progress: The progress as it is saved.
    """
    epochs = fit_loop_state["epoch_progress"]["current"]
    if not progress.running:
        return "on_train_epoch_start" if epochs["ready"] > epochs["started"] else ""
    batches = fit_loop_state["epoch_loop.batch_progress"]["current"]
    return "on_train_batch_start" if not progress.ended and batches["ready"] > progress.batch else ""


def rewritten(fit_loop_state: Mapping[str, Any], progress: LoopProgress) -> dict[str, Any]:
    """A fit loop's state whose counters say ``progress`` in the one form that Lightning resumes from exactly.

    In that form a batch is either over in all four counts (ready, started, processed, completed) or in none, and an
    epoch that is running is ready and started, not processed and not completed.
    """
    state: dict[str, Any] = count_step(fit_loop_state) if progress.uncounted else deepcopy(dict(fit_loop_state))
    state["state_dict"].pop("combined_loader", None)
    old = state["epoch_loop.batch_progress"]
    before = old["total"]["processed"] - old["current"]["processed"]
    begun = progress.epoch + 1 if progress.running else progress.epoch
    state["epoch_progress"] = {
        scope: dict(zip(TRACKED, (begun, begun, progress.epoch, progress.epoch), strict=True))
        for scope in ("total", "current")
    }
    if not progress.running:
        before += old["current"]["processed"]
    state["epoch_loop.batch_progress"] = {
        "total": dict.fromkeys(TRACKED, before + progress.batch),
        "current": dict.fromkeys(TRACKED, progress.batch),
        "is_last_batch": progress.ended or not progress.running,
    }
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = progress.stepped
    for key in ("epoch_loop.scheduler_progress", "epoch_loop.manual_optimization.optim_step_progress"):
        _set_counts(state.get(key, {}))
    optimizer = state.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {})
    for counts in optimizer.values():
        _set_counts(counts)
    validation = state.get("epoch_loop.val_loop.batch_progress", {})
    _set_counts(validation, 0)
    if "is_last_batch" in validation:
        validation["is_last_batch"] = False
    return state


def count_step(fit_loop_state: Mapping[str, Any]) -> dict[str, Any]:
    """A fit loop's state in which the batch and the optimizer step that have begun are over."""
    state: dict[str, Any] = deepcopy(dict(fit_loop_state))
    batches = state["epoch_loop.batch_progress"]
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for scope in ("total", "current"):
        batches[scope]["processed"] = batches[scope]["ready"]
        steps[scope]["completed"] = steps[scope]["ready"]
    return state


def _set_counts(counts: dict[str, Any], number: int | None = None) -> None:
    """Set all counts of a progress to a number, or to what is completed."""
    for scope in counts.keys() & {"total", "current"}:
        counts[scope] = dict.fromkeys(counts[scope], counts[scope]["completed"] if number is None else number)
