"""Averages of the running epoch: what ``self.log(..., on_epoch=True)`` has summed up, kept over a resume.

Lightning saves none of it. A resumed epoch's average would cover the batches since the resume, and whatever monitors it
(ReduceLROnPlateau, EarlyStopping, ModelCheckpoint) would decide otherwise. With it go torchmetrics objects, also those
that live longer than an epoch (``metric_states.py``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import DamagedStateError, StatefulWarning
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import next_step, read_progress
from lightning_stateful.loops.other_callbacks import monitors, restore_metrics
from lightning_stateful.loops.rank_waits import go_on_waiting, waits_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state import cut_epochs
from lightning_stateful.module_state.metric_states import MetricState, MetricStates, plain
from lightning_stateful.module_state.model_generators import ModelGenerators, warn_of_lost
from lightning_stateful.module_state.module_changes import note_buffers
from lightning_stateful.module_state.module_flags import look_again
from lightning_stateful.module_state.passing_values import (
    changed,
    expect_attributes,
    look_at_settings,
    look_once,
    note_again,
)
from lightning_stateful.module_state.rank_buffers import RankBuffers, put_back, warn_of_parted
from lightning_stateful.samplers.rank_exchange import post, posted

# Seconds for which rank 0 waits for what the others have summed up.
_PATIENCE = 10.0
# Numbers in the states of a torchmetrics object up to which they are copied before every batch, and saved at all.
_MOST_COPIED, _MOST_SAVED = 10_000, 1_000_000
# Under what name ranks show each other what they have summed up.
_POSTED = "results of the epoch"
# Lightning's method that adds a logged value to its sum.
_UPDATE = "update_metrics"
_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")
Parts = dict[str, dict[str, Any]]


class EpochResults:
    """Keeps what a training epoch has summed up so far, and what torchmetrics objects in the module hold at any time.

    Args:
        trainer: The trainer that begins a fit; None before there is one.
        before: The results of an earlier fit, perhaps of this trainer.

    State:
        Of each rank, logged values with the options of ``self.log``, states of torchmetrics objects by name, states of
        random generators of the module, callbacks and optimizers, and what EarlyStopping has counted, also before the
        end of an epoch that was cut; and buffers of the module that each rank has for itself. Other ranks show theirs
        through the store of the process group.
    """

    def __init__(self, trainer: pl.Trainer | None = None, before: EpochResults | None = None) -> None:
        # Sums as the latest batch began, or the first of a window of accumulated gradients; and a validation.
        self._at_batch: tuple[tuple[int, int], _Sums] = ((-1, -1), _Sums({}, {}, {}))
        self._at_validation = self._at_batch
        # Sums as the epoch ended, perhaps before all its batches, by max_steps: Lightning then forgets them.
        self._at_end: tuple[tuple[int, int], _Sums] | None = None
        # What this rank had summed up in an epoch that was cut, with the trainer, for a second fit that goes on in it.
        self._cut: tuple[pl.Trainer | None, dict[str, Any]] = (None, {})
        self._earlier: dict[str, Any] = {}
        if trainer is not None and before is not None and before._cut[0] is trainer:
            # Before this fit sets up schedulers of its own.
            self._earlier = {**before._cut[1], "cut": cut_epochs.state_of_cut(trainer)}
        # What a checkpoint holds that a run was resumed from which had nothing left to train on.
        self._unread: dict[str, Any] | None = None
        # What is still to be added to what is logged.
        self._pending: Parts = {}
        # Whether no batch has begun since a resume.
        self._is_resumed = False
        self._metrics = MetricStates()
        # Updates of objects as the latest validation began, until a batch follows it; and by validations of a window.
        self._before_validation: Counter[str] | None = None
        self._by_validations: Counter[str] = Counter()
        self.generators = ModelGenerators()
        self._buffers = RankBuffers()
        # States that were taken, which all ranks take together.
        self._num_taken = 0
        if trainer is not None and trainer.world_size > 1:
            # An earlier fit may have come as far.
            post(_POSTED, None)

    def note_batch(self, trainer: pl.Trainer) -> None:
        """Remember the sums as a batch begins, which a save within it has to keep, and the module's buffers."""
        epoch, batch = next_step(trainer)
        note_buffers(trainer)
        look_once(trainer)
        self._at_end, self._cut = None, (None, {})
        cut_epochs.forget_end(trainer)
        if self._is_resumed and batch:
            # Else, if logged in turns with others, what it logs would be dropped, as in the first batch of an epoch.
            trainer._logger_connector._first_loop_iter = False
        if self._is_resumed or batch == 0:
            self._buffers.note(trainer)
        self._is_resumed = False
        if not self._pending:
            # Of an earlier fit that has failed, too.
            vars(trainer.fit_loop.epoch_loop._results).pop(_UPDATE, None)
        self._note_validated(trainer)
        if batch == 0:
            # They may have been replaced.
            self._metrics = MetricStates()
        if batch % trainer.accumulate_grad_batches == 0:
            self._at_batch = (epoch, batch), self._now(trainer, _MOST_COPIED)
            self._by_validations.clear()

    def note_validation(self, trainer: pl.Trainer) -> None:
        """Remember the sums as a validation begins, which runs again where it is not over."""
        self._note_validated(trainer)
        self._at_validation = next_step(trainer), self._now(trainer, _MOST_SAVED)
        self._before_validation = self._metrics.updates(trainer)

    def _note_validated(self, trainer: pl.Trainer) -> None:
        if self._before_validation is not None:
            self._by_validations.update(self._metrics.updates(trainer))
            self._by_validations.subtract(self._before_validation)
            self._before_validation = None

    def state(self, trainer: pl.Trainer, progress: LoopProgress, set_by_hooks: Mapping[str, Any]) -> dict[str, Any]:
        """What all ranks have logged in the running epoch, and the states of objects and generators, as plain data.

        Rank 0 waits a while for what others show it; no process waits for it.

        Args:
            trainer: The trainer.
            progress: Where it is.
            set_by_hooks: What hooks have set on the data of this rank, which is kept where it is another on rank 0.
        """
        self._num_taken += 1
        if self._unread is not None:
            return deepcopy(self._unread)
        metrics = cut_epochs.all_metrics_at(trainer, progress)
        own: dict[str, Any] = {
            **self._summed_up(trainer, progress),
            "generators": self.generators.state(trainer, progress),
            "waits": waits_of(trainer),
            "cut": cut_epochs.state_of_cut(trainer, progress.epoch) if progress.running else {},
            "buffers": self._buffers.show(trainer, progress),
            "weights": self._buffers.digest_of_weights(trainer),
            "remembered": changed(trainer, "remembered"),
            "set_by_hooks": dict(set_by_hooks),
            "latest": metrics.pop("callback_metrics") if trainer.world_size > 1 else {},
            "shown": {kind: known for kind, known in metrics.items() if known and kind != "callback_metrics"},
            "ended": self._ended(trainer, progress),
        }
        own = {name: part for name, part in own.items() if part or name in ("logged", "metrics")}
        # The same epoch and batch are reached in several hooks.
        at = [progress.epoch, progress.batch, trainer.lightning_module._current_fx_name]
        if not any(own.values()):
            return {}
        ranks, apart = _of_all_ranks(trainer, at, own, self._num_taken)
        digests = [None if part is None else part.pop("buffers", "") for part in ranks]
        weights = [None if part is None else part.pop("weights", "") for part in ranks]
        found: dict[str, Any] = {
            "buffers": self._buffers.of_ranks(trainer, digests),
            "parted": self._buffers.parted(trainer, weights),
            "hooks": self._buffers.hooks,
            "held_back": self._buffers.is_held_back,
            "apart": self._buffers.apart(apart, progress),
        }
        ended = [None if part is None else part.pop("ended", {}) for part in ranks]
        if all(ended):
            joined = _joined([part for part in ended if part])
            found["ended"] = _values_of(joined)
            for kind, option in (("logged_metrics", "logger"), ("progress_bar_metrics", "prog_bar")):
                values = _values_of({key: part for key, part in joined.items() if part[option]})
                for part in filter(None, ranks):
                    shown = part.setdefault("shown", {})
                    shown[kind] = {**shown.get(kind, {}), **values}
        for name in ("set_by_hooks", "latest"):
            # The callback's state has that of rank 0 in any case.
            of_first = ranks[0].get(name, {}) if ranks[0] else {}
            for part in filter(None, ranks):
                if part.get(name, {}) == of_first:
                    part.pop(name, None)
        found = {name: of_ranks for name, of_ranks in found.items() if of_ranks}
        is_empty = all(part is not None and not any(part.values()) for part in ranks)
        return {} if is_empty and not found else {"ranks": ranks, **found}

    def _summed_up(self, trainer: pl.Trainer, progress: LoopProgress) -> dict[str, Any]:
        """Logged values and states of objects on this rank, as plain data."""
        sums = self._sums_at(trainer, progress)
        results: Any = trainer.fit_loop.epoch_loop._results
        logged = {key: _described(results[key], *of_key) for key, of_key in sums.logged.items()}
        if progress.running:
            # What was loaded may not have been added yet.
            logged = _joined([sums.pending, logged])
        metrics = {name: plain(name, *state) for name, state in sums.metrics.items()}
        return {"logged": logged, "metrics": metrics, "groups": self._metrics.groups(trainer)}

    def _ended(self, trainer: pl.Trainer, progress: LoopProgress) -> Parts:
        """Sums of this rank, of an epoch at its end, whose averages Lightning takes over all ranks."""
        if trainer.world_size == 1 or progress.plateau != "epoch":
            return {}
        unsynced = [(key, one) for key, one in self._logged(trainer).items() if one.is_tensor and one.meta.sync.should]
        return {
            key: _described(one, one.value, getattr(one, "cumulated_batch_size", None))
            for key, one in unsynced
            if one._computed is None
        }

    def _sums_at(self, trainer: pl.Trainer, progress: LoopProgress) -> _Sums:
        at = progress.epoch, progress.batch
        if progress.running and cut_epochs.stops_by_validation(trainer, at) and self._at_validation[0] == at:
            return self._at_validation[1]
        if progress.running and self._at_end is not None and self._at_end[0] == at:
            return self._at_end[1]
        if progress.running and self._at_batch[0] == at and not progress.ended:
            return self._window_begun(trainer, progress)
        # Another callback may save as a validation begins, before it is noted.
        if trainer.validating and progress.validate and self._at_validation[0] == next_step(trainer):
            return self._at_validation[1]
        return self._now(trainer, _MOST_SAVED, running=progress.running)

    def _window_begun(self, trainer: pl.Trainer, progress: LoopProgress) -> _Sums:
        """The sums as the latest batch or window began, with what validations have added that are not run again."""
        sums, is_over = self._at_batch[1], self._at_validation[0][1] <= progress.validated
        now, by_validations = self._metrics.updates(trainer), Counter(self._by_validations)
        if self._before_validation is not None and is_over:
            by_validations.update(now)
            by_validations.subtract(self._before_validation)
        moved = {name for name, updates in by_validations.items() if updates}
        if not moved:
            return sums
        present, begun = self._now(trainer, _MOST_SAVED).metrics, sums.metrics
        for name in moved:
            count = begun[name][1] if name in begun else 0
            is_only_validated = now[name] - count == by_validations[name] and name in present
            # What batches have added too comes again, and cannot be told from it.
            begun = {**begun, name: present[name] if is_only_validated else (None, now[name])}
        return sums._replace(metrics=begun)

    def load(self, state: Any, trainer: pl.Trainer) -> None:
        """Take over what a state holds for this rank; on another number of ranks rank 0 gets the sums of all.

        Call it when training begins, before the first batch.

        Raises:
            DamagedStateError: It is not what :meth:`state` returns.
        """
        self._is_resumed = True
        if state is None and trainer.ckpt_path is None:
            self._go_on(trainer)
        else:
            cut_epochs.forget_end(trainer)
        if not state:
            if state is not None:
                self.generators.put_back(trainer, {})
            return
        parts = state.get("ranks") if isinstance(state, Mapping) else None
        if not isinstance(parts, list) or not all(part is None or isinstance(part, dict) for part in parts):
            raise DamagedStateError(f"The callback's state has no results of ranks: {state!r}.")
        restore_metrics(trainer, state.get("ended", {}))
        put_back(trainer, state.get("buffers", []), is_held_back=state.get("held_back", False))
        warn_of_parted(state.get("parted", []), state.get("hooks", []), state.get("apart", []))
        known = [part for part in parts if part is not None]
        is_moved = len(parts) != trainer.world_size
        if not is_moved:
            own = parts[trainer.global_rank] or {"logged": {}, "metrics": {}}
            self._pending = dict(own["logged"])
            restore_metrics(trainer, own.get("latest", {}), are_newer=True)
            self._metrics.put_back(trainer, own["metrics"], own.get("groups", {}))
            self.generators.put_back(trainer, own.get("generators", {}))
        elif trainer.global_rank == 0:
            self._pending = _joined([part["logged"] for part in known])
            warn_of_lost({place for part in known for place in part.get("generators", ())})
        expect_attributes(trainer, [(part or {}).get("remembered", {}) for part in parts])
        self._follow_logging(trainer)
        go_on_waiting(trainer, [None if part is None else part.get("waits", {}) for part in parts])
        of_rank = parts[0 if is_moved else trainer.global_rank]
        cut_epochs.put_back(trainer, (of_rank or {}).get("cut", {}))
        for kind, metrics in (of_rank or parts[0] or {}).get("shown", {}).items():
            restore_metrics(trainer, metrics, kind=kind)
        self._warn_of_partial(parts, trainer, is_moved)

    def _go_on(self, trainer: pl.Trainer) -> None:
        """Take over what an earlier fit of this trainer had summed up in the epoch that a second one goes on in."""
        if own := self._earlier:
            self._pending = dict(own["logged"])
            self._metrics.put_back(trainer, own["metrics"], own["groups"])
            self._follow_logging(trainer)
            cut_epochs.put_back(trainer, own["cut"])

    def keep(self, trainer: pl.Trainer, saved: dict[str, Any] | None) -> None:
        """Keep what was to be loaded: nothing is left to train on, so that :meth:`load` was not called.

        Args:
            trainer: The trainer.
            saved: What a checkpoint holds; None if there is nothing, or no checkpoint.
        """
        if self._is_resumed:
            return
        self._unread = saved
        if trainer.ckpt_path is None and self._earlier:
            own = self._earlier
            self._cut = trainer, own
            self._unread = {"ranks": [own if n == trainer.global_rank else None for n in range(trainer.world_size)]}

    def _warn_of_partial(self, parts: Sequence[Any], trainer: pl.Trainer, is_moved: bool) -> None:
        known = [part for part in parts if part is not None]
        logged = [one for part in known for one in part["logged"].values()]
        # States of objects of several ranks cannot be joined here.
        lost = {name for part in known for name, one in part["metrics"].items() if is_moved or one["states"] is None}
        names = {one["name"] for one in logged if len(known) < len(parts) or one["metric_attribute"] in lost}
        unlogged = lost - {one["metric_attribute"] for one in logged}
        if partial := sorted((names & monitors(trainer)) | unlogged):
            rank_zero_warn(
                f"Of {', '.join(partial)} the checkpoint does not hold, for each of these ranks, what had been summed "
                "up: the value covers the batches since the resume. If something monitors it, monitor a value of the "
                "validation, or save at the end of an epoch.",
                category=StatefulWarning,
            )

    def _follow_logging(self, trainer: pl.Trainer) -> None:
        """Have each value that is logged from now on added to what was summed up before the resume."""
        results: Any = trainer.fit_loop.epoch_loop._results
        if self._pending:
            results.update_metrics = partial(self._update, results)

    def _update(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        """In place of Lightning's method: begin with the saved sum, so that the order of additions stays."""
        if key in self._pending and results[key].is_tensor and self._pending[key]["value"] is not None:
            _add_part(results[key], self._pending.pop(key))
        type(results).update_metrics(results, key, value, batch_size)

    def add(self, trainer: pl.Trainer) -> None:
        """Add what was summed up before the resume, once a value has been logged since; a batch ends."""
        self.generators.note_batch_end()
        look_again(trainer)
        look_at_settings(trainer)
        if self._pending:
            self._add(trainer)

    def end(self, trainer: pl.Trainer) -> None:
        """Add all of it at the end of an epoch, and remember the sums of one that ends before all its batches."""
        self._add(trainer, at_end=True)
        note_again(trainer)
        self._at_end = next_step(trainer, begun=True), self._now(trainer, _MOST_SAVED)
        if cut_epochs.is_cut(trainer):
            self._cut = trainer, self._summed_up(trainer, read_progress(trainer))
        self.generators.note_end(trainer)
        self._buffers.note(trainer)
        look_again(trainer, at_end=True)

    def _add(self, trainer: pl.Trainer, *, at_end: bool = False) -> None:
        results: Any = trainer.fit_loop.epoch_loop._results
        for key, part in list(self._pending.items()):
            is_logged = key in results and not results[key].has_reset
            if not is_logged and not at_end:
                continue
            del self._pending[key]
            if not is_logged:
                _log(part, results, trainer)
            if part["value"] is None:
                # An object has its states back already.
                continue
            _add_part(results[key], part, is_empty=not is_logged)

    def _now(self, trainer: pl.Trainer, most: int, *, running: bool = True) -> _Sums:
        # Lightning puts new sums in the place of old ones, and does not change them.
        logged = {
            key: (one.value, getattr(one, "cumulated_batch_size", None)) if one.is_tensor else (None, None)
            for key, one in (self._logged(trainer) if running else {}).items()
        }
        return _Sums(logged, self._metrics.copied(trainer, most, running=running), dict(self._pending))

    def _logged(self, trainer: pl.Trainer) -> dict[str, Any]:
        results: Any = trainer.fit_loop.epoch_loop._results
        return {key: one for key, one in results.items() if one.meta.on_epoch and not one.has_reset}


class _Sums(NamedTuple):
    """Sums at a moment: of logged values with the number of samples; states of objects with their updates.

    What a checkpoint had summed up, and nothing has been added to yet, is apart from the others.
    """

    logged: dict[str, tuple[Any, Any]]
    metrics: dict[str, MetricState]
    pending: Parts


def _described(metric: Any, value: Any, count: Any) -> dict[str, Any]:
    """A logged value as plain data."""
    meta = metric.meta
    described = {name: getattr(meta, name) for name in _OPTIONS}
    described |= {"sync": bool(meta.sync.should), "rank_zero_only": bool(meta.sync.rank_zero_only)}
    described |= {"reduce": meta.reduce_fx.__name__, "count": None if count is None else int(count)}
    if value is None:
        return described | {"value": None}
    return described | {"value": float(value), "dtype": str(value.dtype).removeprefix("torch.")}


def _of_all_ranks(
    trainer: pl.Trainer, at: list[Any], own: dict[str, Any], number: int
) -> tuple[list[Any], dict[int, list[int]]]:
    """By rank, what it has summed up at a batch; on others than rank 0, whose file a resume reads, their own alone.

    Args:
        trainer: The trainer.
        at: Epoch, batch and hook.
        own: What this rank has summed up.
        number: Of the state that is taken.

    Returns:
        That, None for a rank of which it is not known; and epoch and batch of ranks that stand elsewhere.
    """
    if trainer.world_size == 1:
        return [own], {}
    post(_POSTED, [at, own, number])
    if trainer.global_rank:
        return [own if rank == trainer.global_rank else None for rank in range(trainer.world_size)], {}
    found: list[Any] = posted(_POSTED)
    ends = time.monotonic() + _PATIENCE
    # One that stands elsewhere never comes here.
    while time.monotonic() < ends and any(one is None or (one[0] != at and one[2] < number) for one in found):
        time.sleep(0.01)
        found = posted(_POSTED)
    taken = {rank: one[0][:2] for rank, one in enumerate(found) if one is not None and one[2] == number}
    apart = {rank: elsewhere for rank, elsewhere in taken.items() if elsewhere != at[:2]}
    return [one[1] if one is not None and one[0] == at else None for one in found], apart


def _joined(parts: Sequence[Parts]) -> Parts:
    """Sums of several as one."""
    joined: Parts = {}
    for part in parts:
        for key, one in part.items():
            if key not in joined or one["value"] is None:
                joined[key] = dict(one)
                continue
            joined[key]["value"] = float(_reduced(one["reduce"], _value(joined[key]), _value(one)))
            if one["count"] is not None:
                joined[key]["count"] += one["count"]
    return joined


def _add_part(metric: Any, part: Mapping[str, Any], *, is_empty: bool = False) -> None:
    value = _value(part).to(metric.value.device)
    metric.value = value if is_empty else _reduced(part["reduce"], metric.value, value)
    if part["count"] is not None:
        metric.cumulated_batch_size = metric.cumulated_batch_size + part["count"]


def _values_of(parts: Parts) -> dict[str, float]:
    """What Lightning would compute of sums over all ranks, under the names that it gives them."""
    found: dict[str, float] = {}
    for part in parts.values():
        name = f"{part['name']}_epoch" if part["on_step"] and part["on_epoch"] else part["name"]
        value = _value(part)
        found[name] = float(value if part["count"] is None else value / part["count"])
    return found


def _value(part: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(part["value"], dtype=getattr(torch, part["dtype"]))


def _reduced(reduce: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if reduce in ("min", "max"):
        return torch.minimum(one, other) if reduce == "min" else torch.maximum(one, other)
    return one + other


def _log(part: Mapping[str, Any], results: Any, trainer: pl.Trainer) -> None:
    """Log a value of which only the batches before the resume have said anything."""
    is_object = part["value"] is None
    results.log(
        value=attrgetter(part["metric_attribute"])(trainer.lightning_module) if is_object else _value(part),
        reduce_fx=part["reduce"],
        sync_dist=part["sync"],
        sync_dist_fn=trainer.strategy.reduce,
        rank_zero_only=part["rank_zero_only"],
        batch_size=0,
        **{name: part[name] for name in _OPTIONS},
    )
