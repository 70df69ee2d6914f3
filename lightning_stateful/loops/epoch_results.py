"""Averages of the running epoch: what ``self.log(..., on_epoch=True)`` has summed up, kept over a resume.

Lightning saves none of it. A resumed epoch's average would cover the batches since the resume, and whatever monitors it
(ReduceLROnPlateau, EarlyStopping, ModelCheckpoint) would decide otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import DamagedStateError, StatefulWarning
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import next_step
from lightning_stateful.loops.model_generators import ModelGenerators, warn_of_lost
from lightning_stateful.loops.other_callbacks import monitors
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.user_samplers.rank_exchange import post, posted

# Seconds for which rank 0 waits for what the others have summed up.
_PATIENCE = 10.0
# Numbers in the states of a torchmetrics object up to which they are copied before every batch, and saved at all.
_MOST_COPIED, _MOST_SAVED = 10_000, 1_000_000
# Under what name ranks show each other what they have summed up.
_POSTED = "results of the epoch"
_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")
Parts = dict[str, dict[str, Any]]


class EpochResults:
    """Keeps what a training epoch has summed up so far: logged values, and torchmetrics objects in the module.

    State:
        Of each rank, logged values with the options of ``self.log``, states of torchmetrics objects by name, and states
        of random generators of the module and of callbacks. Other ranks show theirs through the store of the process
        group.
    """

    def __init__(self) -> None:
        # Sums as the latest batch began, or the first of a window of accumulated gradients; and a validation.
        self._at_batch: tuple[tuple[int, int], _Sums] = ((-1, -1), _Sums({}, {}))
        self._at_validation = self._at_batch
        # Sums as the epoch ended, perhaps before all its batches, by max_steps: Lightning then forgets them.
        self._at_end: tuple[tuple[int, int], _Sums] | None = None
        # What is still to be added to what is logged.
        self._pending: Parts = {}
        self._metrics: dict[str, Any] | None = None
        self.generators = ModelGenerators()

    def note_batch(self, trainer: pl.Trainer) -> None:
        """Remember the sums as a batch begins, which a save within it has to keep."""
        epoch, batch = next_step(trainer)
        self._at_end = None
        if batch == 0:
            # They may have been replaced.
            self._metrics = None
        if batch % trainer.accumulate_grad_batches == 0:
            self._at_batch = (epoch, batch), self._now(trainer, _MOST_COPIED)

    def note_validation(self, trainer: pl.Trainer) -> None:
        """Remember the sums as a validation begins, which runs again where it is not over."""
        self._at_validation = next_step(trainer), self._now(trainer, _MOST_SAVED)

    def state(self, trainer: pl.Trainer, progress: LoopProgress) -> dict[str, Any]:
        """The sums of all ranks in the running epoch, none between epochs, and the states of generators, as plain data.

        Rank 0 waits a while for what others show it; no process waits for it.
        """
        sums = self._sums_at(trainer, progress) if progress.running else _Sums({}, {})
        results: Any = trainer.fit_loop.epoch_loop._results
        logged = {key: _described(results[key], *of_key) for key, of_key in sums.logged.items()}
        if progress.running:
            # What was loaded may not have been added yet.
            logged = _joined([self._pending, logged])
        own: dict[str, Any] = {
            "logged": logged,
            "metrics": {name: _plain(name, *state) for name, state in sums.metrics.items()},
            "groups": {name: found for name, one in self._collections_in(trainer) if (found := _groups_of(one))},
            "generators": self.generators.state(trainer, progress),
        }
        own = {name: part for name, part in own.items() if part or name in ("logged", "metrics")}
        return {"ranks": _of_all_ranks(trainer, [progress.epoch, progress.batch], own)} if any(own.values()) else {}

    def _sums_at(self, trainer: pl.Trainer, progress: LoopProgress) -> _Sums:
        at, sums = self._at_batch
        if self._at_end is not None and self._at_end[0] == (progress.epoch, progress.batch):
            _, sums = self._at_end
        elif at != (progress.epoch, progress.batch) or progress.ended:
            at, sums = self._at_validation
            if not trainer.validating or at != next_step(trainer):
                # Another callback may save as a validation begins, before it is noted.
                sums = self._now(trainer, _MOST_SAVED)
        return sums

    def load(self, state: Any, trainer: pl.Trainer) -> None:
        """Take over what a state holds for this rank; on another number of ranks rank 0 gets the sums of all.

        Call it when training begins, before the first batch.

        Raises:
            DamagedStateError: It is not what :meth:`state` returns.
        """
        if not state:
            if state is not None:
                self.generators.put_back(trainer, {})
            return
        parts = state.get("ranks") if isinstance(state, Mapping) else None
        if not isinstance(parts, list) or not all(part is None or isinstance(part, dict) for part in parts):
            raise DamagedStateError(f"The callback's state has no results of ranks: {state!r}.")
        known = [part for part in parts if part is not None]
        is_moved = len(parts) != trainer.world_size
        if not is_moved:
            own = parts[trainer.global_rank] or {"logged": {}, "metrics": {}}
            self._pending = dict(own["logged"])
            self._restore(own["metrics"], trainer)
            self._group(own.get("groups", {}), trainer)
            self.generators.put_back(trainer, own.get("generators", {}))
        elif trainer.global_rank == 0:
            self._pending = _joined([part["logged"] for part in known])
            warn_of_lost({place for part in known for place in part.get("generators", ())})
        self._warn_of_partial(parts, trainer, is_moved)

    def _warn_of_partial(self, parts: Sequence[Any], trainer: pl.Trainer, is_moved: bool) -> None:
        known = [part for part in parts if part is not None]
        logged = [one for part in known for one in part["logged"].values()]
        # States of objects of several ranks cannot be joined here.
        lost = {name for part in known for name, one in part["metrics"].items() if is_moved or one["states"] is None}
        names = {one["name"] for one in logged if len(known) < len(parts) or one["metric_attribute"] in lost}
        unlogged = lost - {one["metric_attribute"] for one in logged}
        if partial := sorted((names & monitors(trainer)) | unlogged):
            rank_zero_warn(
                f"Of {', '.join(partial)} the checkpoint does not hold, for each of these ranks, what the epoch had "
                "summed up: the value at its end covers the batches since the resume. If something monitors it, "
                "monitor a value of the validation, or save at the end of an epoch.",
                category=StatefulWarning,
            )

    def _restore(self, metrics: Mapping[str, Any], trainer: pl.Trainer) -> None:
        present = self._metrics_in(trainer)
        for name, saved in metrics.items():
            if name in present and saved["states"] is not None:
                metric = present[name]
                for state, value in from_plain(saved["states"]).items():
                    setattr(metric, state, _moved(value, metric.device))
                metric._update_count = saved["count"]

    def _group(self, groups: Mapping[str, Any], trainer: pl.Trainer) -> None:
        # A collection compares the states of its metrics once, after their first update, and shares equal ones for
        # good: also those that are equal by chance.
        for name, collection in self._collections_in(trainer):
            if sorted(key for group in groups.get(name, ()) for key in group) == sorted(collection.keys(True)):
                collection._groups = {number: [*group] for number, group in enumerate(groups[name])}
                collection._groups_checked = True

    def add(self, trainer: pl.Trainer) -> None:
        """Add what was summed up before the resume, once a value has been logged since; a batch ends."""
        self.generators.note_batch_end()
        if self._pending:
            self._add(trainer)

    def end(self, trainer: pl.Trainer) -> None:
        """Add all of it at the end of an epoch, and remember the sums of one that ends before all its batches."""
        self._add(trainer, at_end=True)
        self._at_end = next_step(trainer, begun=True), self._now(trainer, _MOST_SAVED)
        self.generators.note_end(trainer)

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
            metric, value = results[key], _value(part).to(results[key].value.device)
            metric.value = _reduced(part["reduce"], metric.value, value) if is_logged else value
            if part["count"] is not None:
                metric.cumulated_batch_size = metric.cumulated_batch_size + part["count"]

    def _now(self, trainer: pl.Trainer, most: int) -> _Sums:
        metrics = self._metrics_in(trainer)
        if not metrics and not trainer.fit_loop.epoch_loop._results:
            return _Sums({}, {})
        # Lightning puts new sums in the place of old ones, and does not change them.
        logged = {
            key: (one.value, getattr(one, "cumulated_batch_size", None)) if one.is_tensor else (None, None)
            for key, one in self._logged(trainer).items()
        }
        return _Sums(logged, {name: _copied(one, most) for name, one in metrics.items() if one.update_called})

    def _logged(self, trainer: pl.Trainer) -> dict[str, Any]:
        results: Any = trainer.fit_loop.epoch_loop._results
        return {key: one for key, one in results.items() if one.meta.on_epoch and not one.has_reset}

    def _metrics_in(self, trainer: pl.Trainer) -> dict[str, Any]:
        if self._metrics is None:
            modules = trainer.lightning_module.named_modules()
            self._metrics = {name: module for name, module in modules if _is_metric(module)}
        return self._metrics

    def _collections_in(self, trainer: pl.Trainer) -> list[tuple[str, Any]]:
        modules = trainer.lightning_module.named_modules() if self._metrics_in(trainer) else ()
        return [(name, module) for name, module in modules if hasattr(type(module), "compute_groups")]


class _Sums(NamedTuple):
    """Sums at a moment: of logged values with the number of samples; states of objects with their updates."""

    logged: dict[str, tuple[Any, Any]]
    metrics: dict[str, tuple[Any, int]]


def _copied(metric: Any, most: int) -> tuple[dict[str, Any] | None, int]:
    """Copies of a metric's states, and how often it was updated; None for more than ``most`` numbers."""
    states = metric.metric_state
    if sum(state.numel() for state in states.values() if isinstance(state, torch.Tensor)) > most:
        return None, metric.update_count
    copied = {name: state.clone() if isinstance(state, torch.Tensor) else [*state] for name, state in states.items()}
    return copied, metric.update_count


def _is_metric(module: Any) -> bool:
    """Whether it is a torchmetrics object that is updated itself; of a MetricCollection each metric is."""
    return hasattr(type(module), "metric_state") and hasattr(type(module), "update_called")


def _groups_of(collection: Any) -> list[list[str]]:
    """The metrics of a MetricCollection that share their states, once it has compared them."""
    return [[*group] for group in collection._groups.values()] if collection._groups_checked else []


def _plain(name: str, states: Any, count: int) -> dict[str, Any]:
    return {"states": None if states is None else to_plain(states, name, "metric"), "count": count}


def _described(metric: Any, value: Any, count: Any) -> dict[str, Any]:
    """A logged value as plain data."""
    meta = metric.meta
    described = {name: getattr(meta, name) for name in _OPTIONS}
    described |= {"sync": bool(meta.sync.should), "rank_zero_only": bool(meta.sync.rank_zero_only)}
    described |= {"reduce": meta.reduce_fx.__name__, "count": None if count is None else int(count)}
    if value is None:
        return described | {"value": None}
    return described | {"value": float(value), "dtype": str(value.dtype).removeprefix("torch.")}


def _of_all_ranks(trainer: pl.Trainer, at: list[int], own: dict[str, Any]) -> list[Any]:
    """By rank, what it has summed up at a batch; on others than rank 0, whose file a resume reads, their own alone."""
    if trainer.world_size == 1:
        return [own]
    post(_POSTED, [at, own])
    if trainer.global_rank:
        return [own if rank == trainer.global_rank else None for rank in range(trainer.world_size)]
    found: list[Any] = posted(_POSTED)
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends and not all(one is not None and one[0] == at for one in found):
        time.sleep(0.01)
        found = posted(_POSTED)
    return [one[1] if one is not None and one[0] == at else None for one in found]


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


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
