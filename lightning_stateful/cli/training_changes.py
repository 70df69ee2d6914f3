"""Changes that a run's own code has made to its data, as far as a checkpoint shows them and a factory restores them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from traceback import walk_tb
from typing import Any

from lightning_stateful.cli.plain_pickle import Opaque
from lightning_stateful.cli.reading import Checkpoint
from lightning_stateful.data_checks.dataset_settings import DatasetSettings, values_of_builder
from lightning_stateful.errors import ConfigurationError, Difference, StatefulWarning
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loaders.patching import map_style
from lightning_stateful.loops.lightning import pl
from lightning_stateful.state import value_at

_MOST_NAMED = 4
# Differences that no code of a data module restores: the Trainer's, and the package's.
_NOT_RESTORED = ("seed", "module", "order_version", "ranks")


def restore_module(made: Any, checkpoint: Checkpoint | None) -> bool:
    """Call ``load_state_dict`` of a data module as a Trainer would, before its loaders are built.

    Args:
        made: What a factory has made.
        checkpoint: The checkpoint; None for nothing to restore.

    Returns:
        Whether all is restored that the module may restore.

    Raises:
        ConfigurationError: The method fails.

    Warns:
        StatefulWarning: The module has something to restore that cannot be restored here.
    """
    name = type(made).__qualname__
    if checkpoint is None or not isinstance(made, (pl.LightningDataModule, pl.LightningModule)):
        return True
    if isinstance(made, pl.LightningModule):
        if type(made).on_load_checkpoint is pl.LightningModule.on_load_checkpoint:
            return True
        _warn(f"{name}.on_load_checkpoint is not called here: what it restores is as it was built.")
        return False
    state = checkpoint.contents.get(name)
    if not isinstance(state, Mapping) or _is_the_packages(type(made).load_state_dict):
        return True
    if any(isinstance(value, Opaque) for value in _values_in(state)):
        _warn(
            f"{name}.load_state_dict is not called here: its state in the checkpoint has tensors, arrays or objects, "
            "which are not read. What it restores is as it was built."
        )
        return False
    try:
        made.load_state_dict(deepcopy(dict(state)))
    except Exception as error:
        if _asks_for_trainer(error):
            _warn(
                f"{name}.load_state_dict cannot be called here, because it asks for its Trainer: {error}. What it "
                "restores is as it was built, or in part."
            )
            return False
        raise ConfigurationError(
            f"{name}.load_state_dict fails without a Trainer: {type(error).__name__}: {error}"
        ) from error
    if hasattr(made, "take_loaded_state"):
        # The loaders get the state of the data by themselves.
        made.take_loaded_state()
    return True


def _asks_for_trainer(error: Exception) -> bool:
    """Whether code has failed because the ``trainer`` that it names is None."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    is_of_none = isinstance(error, AttributeError) and error.obj is None
    return is_of_none and any("trainer" in frame.f_code.co_names for frame in frames)


def _is_the_packages(method: Any) -> bool:
    return (method.__module__ or "").partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_stateful")


def _values_in(value: Any, depth: int = 0) -> Iterator[Any]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    yield value
    for part in parts if depth < 32 else (Opaque(),):
        yield from _values_in(part, depth + 1)


def _warn(text: str) -> None:
    warnings.warn(text, StatefulWarning, stacklevel=3)


def not_restored(checkpoint: Checkpoint, made: Any, combined: CombinedLoaders) -> list[str]:
    """Names of what training had changed by a checkpoint, and what is not so in the data of a factory.

    Args:
        checkpoint: The checkpoint.
        made: What the factory has made.
        combined: Its loaders.
    """
    found = [
        f"{getattr(loader.order, 'name', type(loader.order).__name__)} ({', '.join(changed)})"
        for path, loader in combined.loaders.items()
        if (changed := changed_settings(checkpoint, path, loader.tracker.config))
    ]
    saved = (checkpoint.callback or {}).get("dataset_settings") or {}
    now = DatasetSettings(map_style(combined.loaders), values_of_builder(made, "train_dataloader"))
    names = list(dict.fromkeys(now.unlike(saved)))
    return [*found, *names[:_MOST_NAMED], *(["others"] if len(names) > _MOST_NAMED else [])]


def changed_settings(checkpoint: Checkpoint, path: str, config: Mapping[str, Any]) -> list[str]:
    """The settings of a loader's data and sampler that training had changed, and that are others here."""
    changed = checkpoint.loaders[path].get("changed", {}) if path in checkpoint.loaders else {}
    return [name for name, value in changed.items() if value_at(config, name) not in (None, value)]


def may_be_restored(difference: Difference) -> bool:
    """Whether a ``load_state_dict`` or ``on_load_checkpoint`` that was not called may set again what differs."""
    return difference.path.split(".")[-1] not in _NOT_RESTORED


def is_rebuilt_next(checkpoint: Checkpoint) -> bool:
    """Whether the run would have built its training loaders anew for the epoch that comes next."""
    progress, every = checkpoint.progress, checkpoint.written.get("reloads", 0)
    if progress is None or not every or (progress.running and not progress.ended):
        return False
    epoch, step = progress.epoch_and_step
    return not step and epoch - progress.train_reload_epoch >= every
