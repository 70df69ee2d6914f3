"""Tells on a resume whether the validation data are those of the run that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders.combined_loaders import name_of
from lightning_stateful.loaders.source_datasets import described_with_content
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import reloads_every
from lightning_stateful.samplers.fingerprint import without_fingerprint
from lightning_stateful.samplers.tracked_loader import TrackedLoader
from lightning_stateful.trainer.loader_proxy import Structure
from lightning_stateful.trainer.run_seeds import drawn_before_training


class ValidationData:
    """Describes the datasets of validation as their loaders are built, without reading a sample.

    State:
        By the path of a loader what can be told of its dataset: its length, its indices, what its attributes show.
    """

    def __init__(self) -> None:
        self._described: dict[str, dict[str, Any]] = {}
        self._saved: Mapping[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """The descriptions, as plain data."""
        return dict(self._described)

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Compare the loaders that are built next with a checkpoint's state."""
        self._saved = saved

    def noted(self, trainer: pl.Trainer, request: Callable[[], Any]) -> Any:
        """Ask for the validation loaders, and describe them.

        Warns:
            StatefulWarning: They are of other data than in the checkpoint.
        """
        with drawn_before_training(trainer):
            raw = request()
        saved, self._saved = self._saved, {}
        self._described = {path: of for path, one in Structure.of(raw).loaders.items() if (of := _description(one))}
        # Loaders that are built anew may be of others every time.
        others = {} if reloads_every(trainer) else saved
        for path in others.keys() & self._described.keys():
            names = sorted(set(_differing(others[path], self._described[path])))
            # Another packing is refused or accepted for the training data.
            if names and "packed" not in names:
                rank_zero_warn(
                    f"{name_of('val', path)}: the data are others, or in another order, than in the run that wrote the "
                    f"checkpoint ({', '.join(names)}). What monitors them (EarlyStopping, ReduceLROnPlateau, "
                    "ModelCheckpoint) may decide otherwise than without the stop. Unless that is intended, sort the "
                    "files, and pass a seed to random_split or to what draws a subset.",
                    category=StatefulWarning,
                )
        return raw


def _description(loader: Any) -> dict[str, Any]:
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return {}
    try:
        if isinstance(loader, TrackedLoader):
            # It has looked at its dataset already.
            return without_fingerprint(dict(loader.tracker.config["dataset"]))[0]
        return without_fingerprint(described_with_content(dataset))[0]
    except Exception:
        # What is wrong with it is for the evaluation itself to report.
        return {}


def _differing(saved: Mapping[str, Any], present: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    # What only one of them shows may be a cache.
    for name in saved.keys() & present.keys():
        before, now = saved[name], present[name]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differing(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name}"
