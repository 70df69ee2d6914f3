"""Builds the training loaders of an epoch that has ended, on a resume behind it, and undoes what that changes.

A checkpoint is compared with the loaders that were trained on. Where ``reload_dataloaders_every_n_epochs`` has
Lightning build others for the epoch that comes next, ``train_dataloader`` is called once more than without the stop: a
data module that serves its next part at each call would leave one out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_stateful.contents.held_state import HeldState, are_same, put_back
from lightning_stateful.data_checks.dataset_settings import builder_of
from lightning_stateful.generators.attributes import attributes_of
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import epoch_set_to, is_rebuilt_next
from lightning_stateful.loops.other_callbacks import metrics_set_to
from lightning_stateful.loops.saved_progress import LoopProgress

T = TypeVar("T")
# Bytes of a buffer, and of an array or a tensor in an attribute, up to which it is copied.
_MOST_BYTES = 2**26
_VALUES = (bool, int, float, str, bytes, list, tuple, dict, set, deque, np.ndarray, torch.Tensor)
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_buffers"}


def build_as_of(
    trainer: pl.Trainer,
    progress: LoopProgress,
    request: Callable[[], Any],
    build: Callable[[Callable[[], Any]], T],
    saved: Mapping[str, Any],
) -> tuple[T, bool, Callable[[], None]]:
    """Build the training loaders as in the epoch in which the run had built them.

    Args:
        trainer: The trainer.
        progress: How far the run had got.
        request: Asks the user's side for the loaders.
        build: Builds them of what that gives.
        saved: The callback's state in the checkpoint.

    Returns:
        What ``build`` returns; whether others are built for the next epoch by what a user has restored; and a function
        that puts back what the request has changed of the data module and the LightningModule.
    """
    modules = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]  # set by a connector
    is_called_again = is_rebuilt_next(trainer, progress)
    held = [_Held(one) for one in modules if one is not None and is_called_again]
    values = builder_of(trainer) if held else None
    is_restored = bool(saved.get("build")) and values is not None and values() == saved["build"]

    def asked() -> Any:
        found = request()
        for one in held:
            # The loaders bring samplers and datasets to where the run was: that stays.
            one.keep_changed()
        return found

    # A module may choose samples by what was logged, as by the loss of a validation.
    with epoch_set_to(trainer, max(progress.train_reload_epoch, 0)), metrics_set_to(trainer, saved.get("metrics", {})):
        built = build(asked)

    def undo() -> None:
        for one in held:
            one.restore()

    return built, is_restored, undo


class _Held:
    """What a data module or a LightningModule holds, but for weights, submodules and what it builds when first asked.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._values = {name: value for name, value in attributes_of(module).items() if name not in _OF_MODULES}
        self._inner = HeldState(*self._values.values(), most_bytes=_MOST_BYTES)
        buffers = module.named_buffers() if isinstance(module, torch.nn.Module) else ()
        self._buffers = [(one, one.detach().clone()) for _, one in buffers if one.nbytes <= _MOST_BYTES]

    def keep_changed(self) -> None:
        """Forget what is as it was."""
        now = attributes_of(self._module)
        self._values = {name: one for name, one in self._values.items() if not are_same(one, now.get(name))}
        self._buffers = [(one, copied) for one, copied in self._buffers if not torch.equal(one, copied)]
        self._inner.keep_changed()

    def restore(self) -> None:
        """Put it back: values and containers in attributes, and what is in objects, generators and buffers.

        Hooks that come next may read a dataset that the call has put in the place of another object.
        """
        if not self._inner.is_whole:
            return
        self._inner.restore()
        vars(self._module).update({name: one for name, one in self._values.items() if isinstance(one, _VALUES)})
        for buffer, copied in self._buffers:
            put_back(buffer, copied)
