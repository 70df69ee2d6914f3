"""Several loaders that are served together, and where each stands at any step of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_stateful import state as format_
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError, StatefulWarning
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder, SlotPlan
from lightning_stateful.index.step_plan import StepPlan
from lightning_stateful.loaders.iterable_loader import IterableLoader
from lightning_stateful.loaders.patched import AnyLoader
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.stream_loader import StreamLoader
from lightning_stateful.loaders.stream_order import StreamOrder, StreamPlan
from lightning_stateful.samplers.cursor import read_position
from lightning_stateful.samplers.user_sampler import UserSampler

MODES = ("min_size", "max_size", "max_size_cycle")


class LoaderGroup:
    """Loaders that give one batch each to every training step, as Lightning's ``CombinedLoader`` serves them.

    Args:
        loaders: The loaders by their path in the user's list or dict; a single loader has the path ``""``.
        mode: When an epoch ends: with the shortest loader (``"min_size"``), with the longest, the others giving None
            once they are done (``"max_size"``), or with the longest, the others starting over (``"max_size_cycle"``).

    State:
        One loader's envelope, or one envelope a loader. Where an epoch goes on is held as the positions of the loaders
        at one step; every other step of that epoch, and all later epochs, are computed from it.

    Raises:
        ConfigurationError: The mode is none of the three, or has to know where a loader ends that does not say.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader], mode: str = "max_size_cycle") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"Training loaders can be combined in the modes {MODES}, got {mode!r}.")
        self.loaders = dict(loaders)
        unknown = [path for path, loader in self.loaders.items() if not loader.is_sized]
        if unknown and len(self.loaders) > 1 and mode != "min_size":
            raise ConfigurationError(
                f"Loaders {unknown} do not say where they end, so in the mode {mode!r} nobody knows, on a resume, "
                "which of them had ended before. Combine them in the mode 'min_size', or say how much an epoch is: "
                "DDPSamplerWrapper(sampler, length=...), or for a stream StreamDataModule(..., steps_per_epoch=...)."
            )
        self.mode = mode
        self._cyclic = mode == "max_size_cycle" and len(self.loaders) > 1
        self._anchor: dict[str, Position] = {}
        self._anchor_batch = 0
        self._begun: dict[str, Position] = {}

    def num_batches(self) -> int:
        """Steps of a whole epoch."""
        lengths = [loader.plan.num_batches() for loader in self.loaders.values()]
        return min(lengths) if self.mode == "min_size" else max(lengths)

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known before its end."""
        sized = [loader.is_sized for loader in self.loaders.values()]
        return any(sized) if self.mode == "min_size" else all(sized)

    def configs_of_this_rank(self) -> dict[str, dict[str, Any]]:
        """Configurations, by path, of loaders that are not dealt out: they may differ between ranks."""
        return {
            path: loader._cursor.config
            for path, loader in self.loaders.items()
            if isinstance(loader, StatefulLoader) and loader.own_rank is not None
        }

    def note_ranks(self, configs: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Let states hold, of loaders that are not dealt out, what determines them on every rank.

        Args:
            configs: By rank, and by the loader's path, what a state compares.
        """
        for path, config in self.configs_of_this_rank().items():
            config.update(_by_rank([of_rank[path] for of_rank in configs]), ranks=len(configs))

    def position(self, path: str, epoch: int, batch: int) -> Position | None:
        """Where the loader at ``path`` stands before step ``batch`` of ``epoch``; None when it is exhausted."""
        if not batch:
            self._end_together(epoch - 1)
        loader = self.loaders[path]
        plan = loader.plan
        origin, steps = self._origin(path, epoch), batch
        if path in self._anchor and origin is self._anchor[path]:
            # An accumulation window may have begun, on other ranks, before the place of resuming: stay there.
            steps = max(steps - self._anchor_batch, 0)
        if not plan.num_batches():
            return None
        in_pass = plan.num_batches(origin) if self._cyclic or plan.in_first_pass(origin) else 0
        if steps < in_pass:
            return plan.after(origin, steps)
        if not self._cyclic:
            return None
        if isinstance(plan, SlotPlan):
            # Nothing but the end of the epoch: see refuse_short_sources.
            return None
        # On to the passes that follow within the epoch, all of them whole.
        passes, steps = divmod(steps - in_pass, plan.num_batches())
        return plan.after(plan.pass_after(origin, 1 + passes), steps)

    def state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        """The state before step ``batch`` of ``epoch``: fresh plain data, equal on all ranks."""
        states = {
            path: loader.state_at(self._position_or_end(path, epoch, batch)) for path, loader in self.loaders.items()
        }
        return states[""] if list(states) == [""] else format_.pack_combined(self.mode, states)

    def report_at(self, epoch: int, batch: int) -> dict[str, dict[str, Any]]:
        """What each loader has served before step ``batch`` of ``epoch``, by path."""
        return {
            path: loader.report_at(self._position_or_end(path, epoch, batch)) for path, loader in self.loaders.items()
        }

    def refuse_short_sources(self, num_steps: int) -> None:
        """Refuse whole batches, and streams, that would have to start over within an epoch of ``num_steps`` steps.

        Raises:
            ConfigurationError: With the remedy.
        """
        for path, loader in self.loaders.items() if self._cyclic else ():
            if not isinstance(loader.plan, (SlotPlan, StreamPlan)) or len(loader) >= num_steps:
                continue
            if isinstance(loader, IterableLoader):
                raise ConfigurationError(
                    f"Loader {path!r}, a {loader.order.name}, gives {len(loader)} batches an epoch, and the epoch has "
                    f"{num_steps} steps; what is no DataLoader is begun once an epoch. Combine the loaders in the mode "
                    "'min_size' or 'max_size', or let it give as many."
                )
            if isinstance(loader.plan, StreamPlan):
                raise ConfigurationError(
                    f"Stream {path!r} has {len(loader)} steps an epoch, and the epoch has {num_steps}; it cannot start "
                    f"over within an epoch. Pass steps_per_epoch={num_steps}, and it goes on through its passes, or "
                    "combine the loaders in the mode 'min_size' or 'max_size'."
                )
            raise ConfigurationError(
                f"Loader {path!r} has {len(loader)} whole batches an epoch, and the epoch has {num_steps}; it cannot "
                "start over within an epoch. Combine the loaders in the mode 'min_size' or 'max_size', or give a "
                f"mixture num_steps={num_steps}."
            )

    def continue_from(self, other: LoaderGroup, epoch: int) -> None:
        """At the beginning of ``epoch``, let sources whose places carry over go on where another group's stand."""
        for path, loader in self.loaders.items():
            before = other.loaders.get(path)
            if before is None or not _carries_over(loader) or not _carries_over(before):
                continue
            state = before.state_at(other._origin(path, epoch))
            now = loader.state_at(loader.plan.begin(epoch))
            changed = format_.differences(state, now, accept=loader.accept, fingerprints=False)
            if changed:
                found = " ".join(map(str, changed))
                warnings.warn(
                    f"Loader {path!r} is another than before, so it begins anew with epoch {epoch}: {found}",
                    StatefulWarning,
                    stacklevel=2,
                )
                continue
            self._begun[path] = loader.locate(state, cyclic=False, where=f"The state of loader {path!r}")

    def begin_streams_at(self, epoch: int, batch: int) -> list[str]:
        """Begin streams at step ``batch`` of ``epoch``, of which no state says where they stood; their names."""
        streams = {path: loader for path, loader in self.loaders.items() if isinstance(loader, StreamLoader)}
        for path, loader in streams.items():
            self._anchor[path] = replace(loader.plan.begin(epoch), consumed=batch)
            loader.course.begin_at(self._anchor[path])
        self._anchor_batch = batch
        return [loader.order.name for loader in streams.values()]

    def end_epoch(self, epoch: int) -> None:
        """The epoch ends where a state was loaded: streams go on from there in the next."""
        for path, loader in self.loaders.items():
            held = self._anchor.get(path)
            if isinstance(loader, StreamLoader) and held is not None and held.epoch == epoch:
                loader.course.end_at(held)

    def _end_together(self, epoch: int) -> None:
        """Streams of unknown length end an epoch with the shortest, and keep what they have left for the next."""
        if self.mode != "min_size" or epoch < 0:
            return
        courses = [loader.course for loader in self.loaders.values() if isinstance(loader, StreamLoader)]
        ended = [course.ended[1] for course in courses if course.ended is not None and course.ended[0] == epoch]
        for course in courses if ended else ():
            if course.ended is None or course.ended[0] < epoch:
                course.end_at(Position(epoch=epoch, consumed=min(ended)))

    def _position_or_end(self, path: str, epoch: int, batch: int) -> Position:
        position = self.position(path, epoch, batch)
        return self.loaders[path].plan.end(self._origin(path, epoch)) if position is None else position

    def load(self, state: Mapping[str, Any], *, accept: Collection[str] = (), where: str) -> tuple[int, int]:
        """Go on where ``state`` was taken, perhaps on other ranks or with other batch sizes.

        Returns:
            The epoch, and the step of this group's whole epoch at which it goes on: what is left are
            ``num_batches() - step`` steps.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration; nothing changes then.
        """
        format_.check(state, where=where)
        accepted = (
            *format_.accepted_names(accept),
            *(name for loader in self.loaders.values() for name in loader.accept),
        )
        format_.refuse_differences(state, self.state_at(0, 0), accept=accepted, where=where)
        saved = dict(format_.walk(state))
        positions = {
            path: loader.locate(saved[path], cyclic=len(self.loaders) > 1, where=where)
            for path, loader in self.loaders.items()
            if path in saved
        }
        # Where all loaders are new, and accepted as such, they begin with the epoch of the old ones.
        known = positions.values() or [read_position(part, where=where) for part in saved.values()]
        epochs = {position.epoch for position in known}
        if len(epochs) != 1:
            raise DamagedStateError(f"{where} has loaders in the epochs {sorted(epochs)}; all must be in the same.")
        epoch = epochs.pop()
        for path, position in positions.items():
            plan = self.loaders[path].plan
            if not self._cyclic and isinstance(plan, StepPlan) and position.consumed > plan.num_slots():
                raise PositionError(
                    f"{where}, loader {path!r}, has consumed {position.consumed} samples of an epoch that has only "
                    f"{plan.num_slots()}. Resume from a checkpoint of this dataset."
                )
        # A loader that the state does not know (its absence was accepted) begins with the epoch.
        self._begun, self._anchor = {}, {}
        new = {path: self._fresh(path, epoch) for path in self.loaders if path not in positions}
        self._begun, self._anchor = {}, {**positions, **new}
        for loader in self.loaders.values():
            if isinstance(loader.order, UserSampler):
                loader.order.live = None  # Where an earlier run of it stands is not asked any more.
        self._anchor_batch = max(self.num_batches() - self._remaining(), 0)
        return epoch, self._anchor_batch

    def _remaining(self) -> int:
        """Steps from the anchor to the end of its epoch."""
        lefts = []
        for path, position in self._anchor.items():
            plan = self.loaders[path].plan
            # A loader in a later pass within the epoch has already been seen once and holds nothing up.
            lefts.append(plan.num_batches(position) if plan.in_first_pass(position) else 0)
        return min(lefts) if self.mode == "min_size" else max(lefts)

    def _origin(self, path: str, epoch: int) -> Position:
        held = self._anchor.get(path)
        return held if held is not None and held.epoch == epoch else self._fresh(path, epoch)

    def _fresh(self, path: str, epoch: int) -> Position:
        held = self._begun.get(path)
        if held is None or held.epoch > epoch:
            held = self._anchor.get(path)
        # Kept, because an epoch may be found by going on from the one before.
        self._begun[path] = self.loaders[path].plan.begin(epoch, held)
        return self._begun[path]


def _carries_over(loader: AnyLoader) -> bool:
    order = loader.order
    if isinstance(order, StreamOrder):
        return True
    if isinstance(order, UserSampler):
        return order.way == "feedback"
    return isinstance(order, BatchOrder) and order.carries_over


def _by_rank(values: Sequence[Any]) -> Any:
    """One value where all ranks have the same, and a list of values by rank where they differ; dicts key by key."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values):
        return {name: _by_rank([value[name] for value in values]) for name in values[0]}
    return list(values)
