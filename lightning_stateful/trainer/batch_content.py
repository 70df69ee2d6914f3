"""Compares a batch that was trained on before a checkpoint with what the loader reads in its place on a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.core.order import EpochPlan, Progress
from lightning_stateful.core.skip import is_whole_at, whole_plan
from lightning_stateful.errors import Difference, StatefulWarning, StateMismatchError
from lightning_stateful.loaders.dataset_content import digest_of_batch, is_same_batch
from lightning_stateful.loaders.held_state import HeldState
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import epoch_set_to
from lightning_stateful.loops.ranks import gathered
from lightning_stateful.state import differences, is_accepted, value_at, walk
from lightning_stateful.trainer.dataset_settings import DatasetSettings
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

PATH = "dataset.content"
# Batches from one whose content is noted to the next.
_NOTED_EVERY = 100


class BatchContent:
    """Digests every hundredth batch of a rank from the first on, as a loader gave it, and keeps the latest of each.

    Args:
        loaders: The loaders, by path.

    State:
        By the path of a map-style loader: where the batch was (``"batch"``, epoch and number; ``"progress"``,
        ``"ranks"`` and ``"rank"``), its size and seed, the digest of its content, and one of the dataset's
        settings where it had changed them.

    Attributes:
        settings: Attributes of the datasets that hooks set.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader]) -> None:
        self._num_loaders = len(loaders)
        self._map_style = {path: loader for path, loader in loaders.items() if isinstance(loader, StatefulLoader)}
        # A user's sampler would have to be iterated to read a batch of it again.
        self._loaders = {
            path: loader for path, loader in self._map_style.items() if not isinstance(loader.order, WrappedSampler)
        }
        # Of the datasets as they were built.
        self._settings = {path: _settings_of(loader) for path, loader in self._loaders.items()}
        self.latest: dict[str, dict[str, Any]] = {}
        self.settings = DatasetSettings(self._map_style)

    @property
    def is_map_style(self) -> bool:
        """Whether all loaders are of map-style datasets."""
        return len(self._map_style) == self._num_loaders

    def note(self, path: str, plan: EpochPlan, step: int, batch: Any, at: Callable[[], tuple[int, int]]) -> None:
        """Digest a batch that is about to be handed over, if it is a hundredth one.

        Args:
            path: The loader's.
            plan: The plan that it is of.
            step: Its step of the plan.
            batch: The batch.
            at: Gives its epoch and number, for people.
        """
        self.settings.note_read(path)
        if path not in self._loaders or step % _NOTED_EVERY or not is_whole_at(plan, step):
            return
        plan, step = whole_plan(plan, step)
        loader = self._loaders[path]
        topology = loader.topology
        try:
            content = digest_of_batch(batch)
        except Exception as error:
            rank_zero_info(f"A batch could not be digested, and will not be compared on a resume: {error!r}")
            self.latest.pop(path, None)
            return
        held = self.settings.changed_containers(path)
        self.latest[path] = {
            "batch": list(at()),
            "progress": plan.progress_after(step).to_dict(),
            "read_by": _read_by(loader),
            "ranks": topology.num_replicas,
            "rank": topology.rank,
            "settings": self._changed_settings(path),
            **({"held": held} if held else {}),
            **content,
        }

    def state(self) -> dict[str, Any]:
        """The parts of a checkpoint that are about batches and attributes of datasets."""
        # A batch that was read before the data were changed is no longer what is read in its place.
        content = {path: of for path, of in self.latest.items() if self._is_as_noted(path, of)}
        return {"content": deepcopy(content), "dataset_settings": self.settings.state()}

    def _is_as_noted(self, path: str, noted: Mapping[str, Any]) -> bool:
        now = self._changed_settings(path), self.settings.changed_containers(path)
        return path in self._loaders and (noted["settings"], noted.get("held", "")) == now

    def expect(
        self,
        trainer: pl.Trainer,
        saved: Mapping[str, Any],
        states: tuple[Mapping[str, Any] | None, Callable[[], Mapping[str, Any]]],
        accept: Collection[str],
        at: tuple[int, int],
    ) -> Callable[[], None] | None:
        """Take a checkpoint's state.

        Args:
            trainer: The trainer.
            saved: The callback's state in the checkpoint.
            states: The data's state in it, None if there is none, and a function that gives it as it is here.
            accept: Names of differences to let pass.
            at: The epoch and step that the run goes on at.

        Returns:
            Compares batches by :meth:`compare`, to be called before the first one is read; None if there is nothing
            to compare.
        """
        content, (state, present), (epoch, step) = saved.get("content"), states, at
        self.settings.expect(saved.get("dataset_settings", {}), is_within_epoch=step > 0)
        if state is None or not (content or self.is_map_style):
            return None
        content = content if isinstance(content, Mapping) else {}
        self.latest = {path: dict(of) for path, of in content.items()}
        is_changed = bool(differences(state, present(), fingerprints=False))
        return partial(self.compare, trainer, content, accept, None if is_changed else dict(walk(state)), epoch)

    def compare(
        self,
        trainer: pl.Trainer,
        saved: Any,
        accept: Collection[str],
        states: Mapping[str, Mapping[str, Any]] | None,
        epoch: int,
    ) -> None:
        """Read the batches of a checkpoint again, each twice, on the process that wrote it: the first.

        Args:
            trainer: The trainer; all its processes hear of a difference.
            saved: What :attr:`latest` was when the checkpoint was written.
            accept: Names of differences to let pass.
            states: By path, the states of the loaders in the checkpoint. None where the loaders are others in a way
                that was accepted, so that batches need not be the same.
            epoch: The epoch that the run goes on in.

        Raises:
            StateMismatchError: On all processes, if a batch has another content, twice the same.

        Warns:
            StatefulWarning: Data or a sampler had been changed in training, and are as they were built.
        """
        found: list[tuple[str, str, str, str]] = []
        if trainer.is_global_zero and states is not None:
            for path, loader in self._map_style.items():
                full, now = f"{path}.{PATH}" if path else PATH, loader.changed()
                if path not in states or is_accepted((full, PATH), (*accept, *loader.accept)):
                    continue
                is_of_epoch = path in self._loaders and path in saved and saved[path]["batch"][0] == epoch
                self.settings.said[path] = _warn_unless_restored(loader, states[path], now, is_of_epoch)
                # Of data that change from epoch to epoch, a batch of an earlier epoch tells nothing.
                is_changing = any(name.startswith(PATH) for name in (*states[path].get("changed", {}), *now))
                # A hook may have set the data for another epoch.
                is_held = path in saved and saved[path].get("held", "") == self.settings.changed_containers(path)
                if path in self._loaders and path in saved and (is_of_epoch or (is_held and not is_changing)):
                    found += self._compared(trainer, path, full, saved[path])
        if trainer.world_size > 1:
            found = gathered(found)[0]
        if found:
            raise StateMismatchError([_difference(*one) for one in found], where="The checkpoint's data state")

    def _changed_settings(self, path: str) -> str:
        """Digest of a dataset's settings, where it has changed them since it was built; else empty."""
        now = _settings_of(self._loaders[path])
        return "" if now == self._settings[path] else now

    def _compared(
        self, trainer: pl.Trainer, path: str, full: str, saved: Mapping[str, Any]
    ) -> list[tuple[str, str, str, str]]:
        loader, (epoch, number) = self._loaders[path], saved["batch"]
        name = f"Batch {number} of epoch {epoch}"
        with epoch_set_to(trainer, epoch):
            if saved["read_by"] != _read_by(loader) or saved["settings"] != self._changed_settings(path):
                # Other batches, or other draws; or the dataset changes itself, or is told the epoch.
                return []
            try:
                read = loader.read_twice(Progress.from_dict(saved["progress"]), saved["ranks"], saved["rank"])
            except Exception as error:
                rank_zero_info(f"{name} of the checkpoint could not be read again, and was not compared: {error!r}")
                return []
        if read is None:
            return []
        once, again = map(digest_of_batch, read)
        if is_same_batch(saved, once):
            return []
        if once != again:
            rank_zero_warn(
                f"{name} has another content whenever it is read. Either the dataset, a transform or the collate_fn "
                "remembers what was read (a count of reads, a queue, the sample before), or it draws from the system's "
                "entropy or from a generator that is out of reach. The resume is not exact, unless this does not "
                "matter, and nobody can tell whether the data are those of the checkpoint. Derive samples from the "
                "index and the epoch. Draw from torch's, NumPy's or Python's global generators, or from generators "
                "that are attributes of the dataset.",
                category=StatefulWarning,
            )
            return []
        return [(full, name, _shown(saved, once), _shown(once, saved))]


def _warn_unless_restored(
    loader: StatefulLoader, saved: Mapping[str, Any], now: Mapping[str, Any], by_batch: bool
) -> set[str]:
    """Warn of data or a sampler that had changed when a state was taken, and are as they were built.

    Args:
        loader: The loader.
        saved: Its state.
        now: What has changed since the loader was built.
        by_batch: The data are compared by a batch of the epoch that goes on.

    Returns:
        The names of the attributes of data among them.
    """
    config, left, names = loader.tracker.config, list[str](), set[str]()
    is_begun = saved["progress"]["consumed"] > 0
    for name, value in saved.get("changed", {}).items():
        # The items that a sampler gave of the epoch are compared too, but those to come may differ where these do not.
        is_compared = is_begun and by_batch and name.startswith(PATH)
        if not is_compared and name not in now and value_at(config, name) not in (None, value):
            names |= {name.removeprefix(f"{PATH}.")} if name.startswith(PATH) else set()
            owner = loader.dataset if name.startswith(PATH) else loader.order.sampler  # type: ignore[attr-defined]  # a user's
            left.append(
                f"{type(owner).__qualname__}{name.removeprefix(PATH).removeprefix('sampler').removeprefix('sequence')}"
            )
    if left:
        rank_zero_warn(
            f"{', '.join(dict.fromkeys(left))} had been changed in training when the checkpoint was written, and is as "
            "it was built now, so the resume may not be exact. If your code changes it, restore it before the first "
            "batch: in load_state_dict, on_load_checkpoint or on_train_start.",
            category=StatefulWarning,
        )
    return names


def _shown(content: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The digest of a batch, and those of its means that differ from another's."""
    pairs = zip(content["means"], other["means"], strict=False)
    differing = [one for one, of_other in pairs if not np.isclose(one, of_other, 1e-3, 1e-6)]
    return " ".join(map(str, (content["digest"], *differing[:2])))


def _read_by(loader: StatefulLoader) -> list[Any]:
    return [loader.batch_size, loader.seed if loader.seed_samples else None]


def _settings_of(loader: StatefulLoader) -> str:
    return HeldState(loader.dataset, containers=False).settings()


def _difference(path: str, name: str, saved: str, present: str) -> Difference:
    remedy = (
        f"{name} is not what it was when the checkpoint was written: the data or their transforms are others, "
        "or in another order. Sort the files, pass a seed to random_split or shuffle; what a hook sets in the dataset, "
        f"set it again in on_train_start; or accept the change with accept=({PATH!r},)."
    )
    return Difference(path=path, saved=f"{name}, {saved}", present=f"{name}, {present}", remedy=remedy)
