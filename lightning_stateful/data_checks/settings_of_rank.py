"""Compares what hooks had set on the data of one rank, where it was not as on rank 0, which writes checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning_stateful.data_checks.dataset_settings import DatasetSettings
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders.combined_loaders import streams_in
from lightning_stateful.loaders.patching import AnyLoader, map_style
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.ranks import gathered
from lightning_stateful.state import holds

# Of a sampler, the change in what it yields, and how people call it.
_SEQUENCE = "sequence"
_SAID = {_SEQUENCE: "what the sampler yields"}


class SettingsOfRank:
    """What hooks have set on the data and samplers of this rank.

    Ranks show it to rank 0 with what they have logged. On a resume a rank that had other values of its own compares
    with those; callbacks and modules restore what they have saved on rank 0.

    Args:
        loaders: The loaders, by path.
        settings: What hooks set on their datasets.
        trainer: The trainer; a process alone has nothing to show.

    State:
        ``settings``: that of :class:`DatasetSettings`; ``changed``: by path, what has changed of data and samplers;
        ``streams``: what was set on the data of streams, by path.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader], settings: DatasetSettings, trainer: pl.Trainer) -> None:
        self._loaders, self._streams, self._settings = map_style(loaders), streams_in(loaders), settings
        self._rank, self._num_ranks = trainer.global_rank, trainer.world_size
        # What a checkpoint has of this rank, and of rank 0; empty where both are the same.
        self._own: Mapping[str, Any] = {}
        self._of_first: Mapping[str, Any] = {}
        # When the hooks were over that restore what a checkpoint has, ahead of those of an epoch's end or beginning:
        # names of settings that were others than in it, and by path what had changed.
        self._restored: tuple[list[str], Mapping[str, Mapping[str, Any]]] | None = None

    def state(self, settings: Mapping[str, Any], streams: Mapping[str, Any]) -> dict[str, Any]:
        """See above; empty where nothing was set.

        Args:
            settings: The state of :class:`DatasetSettings`.
            streams: By path, what was set on the data of streams.
        """
        if self._num_ranks == 1:
            return {}
        changed = {path: loader.changed() for path, loader in self._loaders.items()}
        found: dict[str, Any] = {"settings": settings, "changed": {path: of for path, of in changed.items() if of}}
        # Of a rank where nothing was set too, as rank 0 may have something.
        found |= {"streams": dict(streams)} if streams else {}
        return found if any(found.values()) else {}

    def expect(self, saved: Mapping[str, Any], *, is_within_epoch: bool) -> None:
        """Compare with a checkpoint.

        Args:
            saved: The callback's state in it.
            is_within_epoch: Whether training goes on within an epoch.
        """
        parts = saved.get("results", {}).get("ranks", [])
        part = parts[self._rank] if self._rank and len(parts) == self._num_ranks else None
        self._own, self._of_first = (part or {}).get("set_by_hooks", {}), saved.get("dataset_settings", {})
        settings = self._own["settings"] if self._own else self._of_first
        self._settings.expect(settings, is_within_epoch=is_within_epoch, is_of_rank=bool(self._own))
        for path, of_stream in self._own.get("streams", {}).items():
            if path in self._streams:
                self._streams[path].expect_set(of_stream, is_within=is_within_epoch)

    def note_restored(self) -> None:
        """The hooks that restore what a checkpoint has were called; those of an epoch may set something else."""
        settings = self._own["settings"] if self._own else self._of_first
        changed = {path: dict(loader.changed()) for path, loader in self._loaders.items()}
        self._restored = (self._settings.unlike(settings), changed) if self._num_ranks > 1 else None

    def compare(
        self,
        states: Mapping[str, Mapping[str, Any]],
        warn_of_left: Callable[[str, Mapping[str, Any], Mapping[str, Any], bool], None],
    ) -> None:
        """Compare what this rank had of its own; all ranks do so together.

        Args:
            states: By path, the states of the loaders in the checkpoint, which are those of rank 0.
            warn_of_left: Warns of what is as it was built; takes path, state, present changes, and False.

        Warns:
            StatefulWarning: Data or samplers are as built; or are not what they were, and those of rank 0 are.
        """
        if self._num_ranks == 1:
            return
        first = {path: state.get("changed", {}) for path, state in states.items()}
        settings, changed = (self._own["settings"], self._own["changed"]) if self._own else (self._of_first, first)
        names = {name: False for of in settings.values() for name in of}
        unlike, before = self._restored or (self._settings.unlike(settings), {})
        names |= dict.fromkeys(unlike, True)
        for path in changed.keys() & states.keys() & self._loaders.keys():
            now, config = self._loaders[path].changed(), self._loaders[path].tracker.config
            if self._own:
                # Of what has changed on rank 0 too that warns.
                alone = {name: value for name, value in changed[path].items() if name not in first[path]}
                warn_of_left(path, {**states[path], "changed": alone}, now, False)
            held = _without_rank(changed[path])
            # What was restored before the loaders were built is in their configuration.
            present = {name: held[name] for name, value in changed[path].items() if holds(config, name, value)}
            present |= _without_rank(before.get(path, now))
            names |= {_SAID.get(name, name): present.get(name) != value for name, value in held.items()}
        of_first, *_ = gathered(names)
        if lost := sorted(name for name, is_other in names.items() if is_other and of_first.get(name) is False):
            warnings.warn(
                f"{', '.join(lost)} of rank {self._rank} is not what it was when the checkpoint was written, "
                "and that of rank 0 is. A checkpoint has what callbacks and modules of rank 0 save, so the resume is "
                "not exact where a hook restores that on all ranks. Save the values of all ranks (all_gather), and let "
                "each restore its own; or let them be the same on all ranks.",
                StatefulWarning,
                stacklevel=2,
            )


def _without_rank(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Changes, of which that in what a sampler yields may begin with the rank."""
    found = dict(changed)
    if _SEQUENCE in found:
        found[_SEQUENCE] = str(found[_SEQUENCE]).rpartition(" ")[2]
    return found
