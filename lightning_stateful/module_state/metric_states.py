"""States of the torchmetrics objects that a LightningModule or a callback holds, which Lightning does not save.

Lightning resets those that ``self.log`` is given at the end of an epoch or validation. Others, such as the best value
of a run, last until their module resets them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import LIGHTNINGS, attributes_of, package_of
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import call_before_epochs
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.samplers.state_codec import from_plain, to_plain

# What MinMaxMetric and Running of torchmetrics keep beside their states.
_BESIDE = ("min_val", "max_val", "_num_vals_seen")
# Copies of an object's states, None for too many numbers, and how often it was updated.
MetricState = tuple[dict[str, Any] | None, int]


class MetricStates:
    """Copies the states of torchmetrics objects, by their names in the module or callback, and puts them back."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] | None = None

    def copied(self, trainer: pl.Trainer, most: int, *, running: bool = True) -> dict[str, MetricState]:
        """Copies of the states of objects that hold something.

        Args:
            trainer: The trainer.
            most: Numbers in the states of an object up to which they are copied.
            running: An epoch runs; behind its end hooks Lightning resets the objects that were logged in it.
        """
        kept = self._kept(trainer, running=running)
        return {name: _copied(one, most) for name, one in kept.items() if one.update_called or _beside(one)}

    def updates(self, trainer: pl.Trainer) -> Counter[str]:
        """How often each object was updated since it was reset."""
        return Counter({name: one.update_count for name, one in self._kept(trainer).items()})

    def groups(self, trainer: pl.Trainer) -> dict[str, list[list[str]]]:
        """By the name of a MetricCollection, its metrics that share their states, once it has compared them."""
        return {
            name: [[*group] for group in one._groups.values()]
            for name, one in self._collections_in(trainer)
            if one._groups_checked and one._groups
        }

    def put_back(self, trainer: pl.Trainer, saved: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        """Put saved states back, now, and before the next epoch those that ``on_train_start`` has reset.

        Warns:
            StatefulWarning: There is no such object.
        """
        self._restore(trainer, saved)
        # A collection compares the states of its metrics once, after their first update, and shares equal ones for
        # good: also those that are equal by chance.
        for name, collection in self._collections_in(trainer):
            if sorted(key for group in groups.get(name, ()) for key in group) == sorted(collection.keys(True)):
                collection._groups = {number: [*group] for number, group in enumerate(groups[name])}
                collection._groups_checked = True
        if missing := sorted(saved.keys() - self._all(trainer).keys()):
            rank_zero_warn(
                f"The checkpoint has states of the torchmetrics objects {', '.join(missing)}, and neither the module "
                "nor a callback has such objects: what they had summed up is lost. Make them in __init__, under the "
                "same names.",
                category=StatefulWarning,
            )
        # Where nobody stops it, a run calls on_train_start once, before it has summed up anything.
        call_before_epochs(trainer, partial(self._restore_reset, trainer, dict(saved)))

    def _restore_reset(self, trainer: pl.Trainer, saved: dict[str, Any]) -> None:
        reset = [name for name, one in self._all(trainer).items() if not one.update_called]
        self._restore(trainer, {name: saved[name] for name in reset if name in saved})
        saved.clear()

    def _restore(self, trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
        present = self._all(trainer)
        for name, one in saved.items():
            if name in present and one["states"] is not None:
                metric = present[name]
                for state, value in from_plain(one["states"]).items():
                    setattr(metric, state, _moved(value, metric.device))
                metric._update_count, metric._computed = one["count"], None

    def _all(self, trainer: pl.Trainer) -> dict[str, Any]:
        if self._metrics is None:
            held = {"": trainer.lightning_module, **_modules_of_callbacks(trainer)}
            # Each once: one that the module holds too has its name there.
            found: dict[int, tuple[str, Any]] = {}
            for of, one in held.items():
                for name, module in one.named_modules():
                    if _is_metric(module):
                        found.setdefault(id(module), (f"{of}.{name}".strip("."), module))
            self._metrics = dict(found.values())
        return self._metrics

    def _kept(self, trainer: pl.Trainer, *, running: bool = True) -> dict[str, Any]:
        """The objects without those that Lightning resets when the present hook is over."""
        if not (metrics := self._all(trainer)):
            # In most runs, at every batch.
            return metrics
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        ends = ([] if running else [epoch_loop]) + ([epoch_loop.val_loop] if trainer.validating else [])
        logged = {id(one.value) for loop in ends for one in loop._results.values() if not one.is_tensor}
        return {name: one for name, one in metrics.items() if id(one) not in logged} if logged else metrics

    def _collections_in(self, trainer: pl.Trainer) -> list[tuple[str, Any]]:
        modules = trainer.lightning_module.named_modules() if self._all(trainer) else ()
        return [(name, module) for name, module in modules if hasattr(type(module), "compute_groups")]


def plain(name: str, states: dict[str, Any] | None, count: int) -> dict[str, Any]:
    """An object's states as plain data."""
    return {"states": None if states is None else to_plain(states, name, "metric"), "count": count}


def _copied(metric: Any, most: int) -> MetricState:
    states = {**metric.metric_state, **_beside(metric)}
    if sum(state.numel() for state in states.values() if isinstance(state, torch.Tensor)) > most:
        return None, metric.update_count
    return {name: _copy_of(state) for name, state in states.items()}, metric.update_count


def _copy_of(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return [*state] if isinstance(state, list) else state


def _beside(metric: Any) -> dict[str, Any]:
    of_torchmetrics = any(kind.__module__.startswith("torchmetrics.wrappers.") for kind in type(metric).__mro__)
    return {name: vars(metric)[name] for name in _BESIDE if name in vars(metric)} if of_torchmetrics else {}


def _modules_of_callbacks(trainer: pl.Trainer) -> dict[str, torch.nn.Module]:
    """The modules that callbacks of the user's hold as attributes, such as torchmetrics objects, by their names."""
    callbacks = callbacks_of(trainer)
    users = [one for one in callbacks if package_of(type(one)) not in (*LIGHTNINGS, "lightning_stateful")]
    return {
        f"{type(callback).__qualname__}.{name}": value
        for callback in users
        for name, value in attributes_of(callback).items()
        if isinstance(value, torch.nn.Module) and value is not trainer.lightning_module
    }


def _is_metric(module: Any) -> bool:
    """Whether it is a torchmetrics object that is updated itself; of a MetricCollection each metric is."""
    return hasattr(type(module), "metric_state") and hasattr(type(module), "update_called")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
