"""Several loaders that are served together: finds the plan and the progress of each at any step of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_stateful import state as format_
from lightning_stateful.core.order import UNKNOWN, EpochPlan, Progress
from lightning_stateful.core.skip import without_gaps
from lightning_stateful.errors import ConfigurationError, DamagedStateError, Difference, StatefulWarning
from lightning_stateful.iterable_datasets.rank_draws import ALL_KINDS
from lightning_stateful.loaders.own_iteration import OwnPlan
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.rank_exchange import kinds_found_alike
from lightning_stateful.stream_loader.iterable_order import IterableOrder
from lightning_stateful.stream_loader.order import StreamOrder
from lightning_stateful.stream_loader.reader import StreamReader
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

MODES = ("min_size", "max_size", "max_size_cycle")


def streams_in(loaders: Mapping[str, AnyLoader]) -> dict[str, StreamReader]:
    """What reads those of some loaders, by path, that are of streams and other iterable datasets."""
    orders = {path: loader.order for path, loader in loaders.items()}
    return {path: order for path, order in orders.items() if isinstance(order, StreamReader)}


class CombinedLoaders:
    """Loaders that give one batch each to every training step, as Lightning's ``CombinedLoader`` serves them.

    Args:
        loaders: The loaders by their path in the user's list or dict, with dots; a single loader has the path ``""``.
        mode: When an epoch ends: with the shortest loader (``"min_size"``), with the longest, the others giving None
            once they are done (``"max_size"``), or with the longest, the others starting over (``"max_size_cycle"``).

    State:
        The envelope of a single loader, or one that holds the envelope of each. It is computed for any step of any
        epoch; the object itself only holds the plans with which the epoch of a loaded state goes on.

    Attributes:
        began_with: Digest of the configurations of the loaders that the run began with, where these are others.
        alike: Kinds of the process's generators that stood alike on all ranks before training.
        is_build_followed: Whether values that the method reads which builds them are compared with a checkpoint's.
        refused: Differences to a state that was not loaded, because the loaders are built anew at once.

    Raises:
        ConfigurationError: The mode is none of the three, or needs the length of a loader that has none.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader], mode: str = "max_size_cycle") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"Training loaders can be combined in the modes {MODES}, got {mode!r}.")
        self.loaders = dict(loaders)
        unknown = [path for path, loader in self.loaders.items() if not loader.is_sized]
        if unknown and len(self.loaders) > 1 and mode != "min_size":
            raise ConfigurationError(
                f"Loaders {unknown} do not say where they end, so in the mode {mode!r} a resume cannot know which of "
                "them had ended before. Combine them in the mode 'min_size', or say how much an epoch is: "
                "DDPSamplerWrapper(sampler, length=...), or for a stream StreamDataModule(..., steps_per_epoch=...)."
            )
        self.mode = mode
        self._cycles = mode == "max_size_cycle" and len(self.loaders) > 1
        self._refuse_skip()
        # By path: the epoch whose length was asked for latest, and that.
        self._lengths: dict[str, tuple[int, int]] = {}
        # By path: the plan of the epoch that was asked for latest, and of a later pass within it.
        self._plans: dict[str, EpochPlan] = {}
        self._cycle_plans: dict[str, EpochPlan] = {}
        # By path: plans that begin where a state was loaded, and the step of their epoch at which they all begin.
        self._resumed_plans: dict[str, EpochPlan] = {}
        self._resumed_step = 0
        self.began_with = ""
        self.alike = kinds_found_alike()
        self.is_build_followed = False
        self.refused: Sequence[Difference] = ()

    def num_batches(self, epoch: int = 0) -> int:
        """Steps of a whole epoch; UNKNOWN where its end is not known beforehand."""
        lengths = [self.length(path, epoch) for path in self.loaders]
        return min(lengths) if self.mode == "min_size" else max(lengths)

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known before its end."""
        sized = [loader.is_sized for loader in self.loaders.values()]
        return any(sized) if self.mode == "min_size" else all(sized)

    def seeds(self) -> dict[str, int]:
        """The seeds, by path, of loaders whose samples are seeded."""
        return {path: loader.seed for path, loader in self.loaders.items() if loader.seed_samples}

    def seeds_beside(self, seed: int) -> dict[str, int]:
        """Those of :meth:`seeds` that are others than this one."""
        return {path: one for path, one in self.seeds().items() if one != seed}

    def configs_of_this_rank(self) -> dict[str, dict[str, Any]]:
        """Configurations, by path, of loaders that each rank has for itself: they may differ between ranks."""
        return {path: loader.tracker.config for path, loader in self.loaders.items() if loader.own_rank is not None}

    def digest(self) -> str:
        """Digest of the configurations of all loaders."""
        return digest([[path, repr(loader.tracker.config)] for path, loader in self.loaders.items()])

    def note_ranks(self, configs: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Let states hold all ranks' :meth:`configs_of_this_rank`, for loaders that each rank has for itself."""
        for path, config in self.configs_of_this_rank().items():
            config.update(_by_rank([of_rank[path] for of_rank in configs]), ranks=len(configs))

    def is_unseeded(self, path: str) -> bool:
        """Whether a loader draws from the process's generators as it reads, and nothing seeds them for that."""
        order: Any = self.loaders[path].order
        return bool(order.kind == "iterable" and order.settings.sample_seed is None)

    @property
    def draw_alike_as_model(self) -> bool:
        """Whether iterables that are not seeded draw where the model does, and ranks have to draw alike in them."""
        read_here = {path: loader for path, loader in self.loaders.items() if not loader.num_workers}
        orders: list[Any] = [loader.order for path, loader in read_here.items() if self.is_unseeded(path)]
        return any(order.settings.kinds_alike >= ALL_KINDS for order in orders)

    def iterables_of_this_rank(self) -> dict[str, dict[str, dict[str, str]]]:
        """Of iterable datasets, by path, digests of the lists of files that they hold, and of random generators.

        The latter are those that a pass draws from in torch; each rank may have its own of both.
        """
        found: dict[str, dict[str, dict[str, str]]] = {}
        for path, loader in self.loaders.items():
            order: Any = loader.order
            if order.kind == "iterable":
                found[path] = {"files": order.files, "generators": order.generators}
        return found

    def note_iterables(self, of_ranks: Sequence[Mapping[str, Mapping[str, Mapping[str, str]]]]) -> None:
        """Let states hold the files of all ranks, and ranks draw alike whose generators stood alike."""
        for path in self.iterables_of_this_rank():
            if any(files := [of_rank[path]["files"] for of_rank in of_ranks]):
                config, joined = self.loaders[path].tracker.config, _by_rank(files)
                content = joined if isinstance(joined, Mapping) else {"files": joined}
                config["dataset"] = {**config["dataset"], "content": content}
            order: Any = self.loaders[path].order
            order.note_draws([of_rank[path]["generators"] for of_rank in of_ranks])

    def plan_at(self, path: str, epoch: int, step: int) -> tuple[EpochPlan, int]:
        """The plan that gives a loader's batch for a step of an epoch, and the step of it: its end once exhausted."""
        if not step:
            self._end_streams_together(epoch - 1)
        plan, length, asked = self._plan(path, epoch), self.length(path, epoch), step
        if self._resumed_plans.get(path) is plan:
            # An accumulation window may have begun, on other ranks, before the step of resuming: stay there.
            step = max(step - self._resumed_step, 0)
        cycle = plan.progress_after(0).cycle
        plan_ends_at = plan.num_steps if self._cycles or not cycle else 0
        if step < plan_ends_at:
            return plan, step
        if not length or not self._cycles or self.loaders[path].order.carries_over:
            if length and self._cycles and asked < self.num_batches(epoch):
                warnings.warn(
                    f"Epoch {epoch} ends after {asked} of {self.num_batches(epoch)} steps, because loader {path!r} "
                    "ends there and cannot start over within one. Give it as many steps as the longest loader has.",
                    StatefulWarning,
                    stacklevel=2,
                )
            return plan, plan.num_steps
        # The loader starts over: whole passes of `length` steps follow within the epoch.
        num_whole, step = divmod(step - plan_ends_at, length)
        return self._plan_of_cycle(path, epoch, cycle + 1 + num_whole), step

    def asks_behind_end(self, path: str) -> bool:
        """Whether a loader is asked for more than it has, and an iterable dataset may change itself at its end."""
        return self.mode == "max_size" and getattr(self.loaders[path].order, "begun_anew", None) is not None

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The state before a step of an epoch: fresh plain data, equal on all ranks."""
        found = {path: self.plan_at(path, epoch, step) for path in self.loaders}
        return self._state({path: plan.progress_after(steps) for path, (plan, steps) in found.items()})

    def set_on_rank(self, epoch: int, step: int) -> dict[str, dict[str, Any]]:
        """Of streams, by path, what something else than their passes has set on the data of this rank until a step."""
        found = {}
        for path, order in streams_in(self.loaders).items():
            plan, steps = self.plan_at(path, epoch, step)
            at = plan.progress_after(steps)
            found[path] = order.set_on_rank(at.epoch, at.consumed)
        return found

    def report_at(self, epoch: int, step: int) -> dict[str, dict[str, Any]]:
        """Counts of what each loader has served before a step of an epoch, by path."""
        reports = {}
        for path, loader in self.loaders.items():
            plan, steps = self.plan_at(path, epoch, step)
            reports[path] = {"epoch": epoch, **loader.report_of(plan, steps)}
        return reports

    def refuse_short_sources(self, num_steps: int) -> None:
        """Refuse loaders that would have to start over within an epoch of ``num_steps`` steps, and cannot.

        Loaders whose epochs follow each other (``carries_over``) cannot.
        """
        for path, loader in self.loaders.items() if self._cycles else ():
            if not loader.order.carries_over or len(loader) >= num_steps:
                continue
            remedy = loader.remedy_for_steps(num_steps)
            raise ConfigurationError(
                f"Loader {path!r} has {len(loader)} steps an epoch, and the epoch has {num_steps}; it cannot start "
                f"over within one. Combine the loaders in the mode 'min_size' or 'max_size', or {remedy}."
            )

    def begin_in(self, epoch: int) -> None:
        """Let all loaders begin with an epoch."""
        for loader in self.loaders.values():
            loader.begin_in(epoch)

    def continue_from(self, other: CombinedLoaders, epoch: int) -> None:
        """Let loaders whose epochs follow each other begin ``epoch`` where the same ones of ``other`` have ended.

        Lightning builds loaders anew between epochs (``reload_dataloaders_every_n_epochs``).
        """
        self.began_with = other.began_with or other.digest()
        for path, loader in self.loaders.items():
            loader.begin_in(epoch)
            before = other.loaders.get(path)
            if before is not None and before.order.kind == loader.order.kind == "iterable":
                # By now the generators stand where training has left them.
                order: Any = loader.order
                order.draw_as(before.order)
            if before is not None:
                loader.tracker.take_over_skip(before.tracker)
                self._lengths.clear()
            if before is None or not loader.order.carries_over or not before.order.carries_over:
                continue
            if getattr(loader.order, "begun_anew", None) is not getattr(before.order, "begun_anew", None):
                # Another object begins as the first, as in torch.
                continue
            if callable(warn := getattr(before.order, "warn_if_reloaded", None)):
                warn(epoch)
            state = before.tracker.state_dict(other._plan(path, epoch).progress_after(0))
            now = loader.tracker.state_dict(loader.plan(epoch).progress_after(0))
            changed = format_.differences(state, now, accept=loader.accept, fingerprints=False)
            if changed:
                named = f"Loader {path!r}" if path else "The training loader"
                found = ", ".join(f"{one.path} was {one.saved!r} and is {one.present!r}" for one in changed)
                warnings.warn(
                    f"{named} is another than before, so it begins anew with epoch {epoch}: {found}.",
                    StatefulWarning,
                    stacklevel=2,
                )
                continue
            progress = loader.tracker.progress_in(state, where=f"The state of loader {path!r}")
            self._plans[path] = self._resumed_plans[path] = loader.plan(epoch, progress)

    def begin_streams_at(self, epoch: int, step: int) -> list[str]:
        """Let streams without a saved state begin at a step of an epoch; their names."""
        progress = Progress(epoch=epoch, consumed=step)
        begun = {path: name for path, loader in self.loaders.items() if (name := loader.begin_at(progress))}
        for path in begun:
            self._plans[path] = self._resumed_plans[path] = self.loaders[path].plan(epoch, progress)
        self._resumed_step = step
        return list(begun.values())

    def end_epoch(self, epoch: int) -> None:
        """End ``epoch`` at the step where a state was loaded: streams go on from there in the next epoch."""
        for path, loader in self.loaders.items():
            plan = self._resumed_plans.get(path)
            if plan is not None and plan.epoch == epoch:
                loader.end_at(plan.progress_after(0))

    def load(self, state: Mapping[str, Any], *, accept: Collection[str] = (), where: str) -> tuple[int, int]:
        """Go on where ``state`` was taken, perhaps on other ranks or with other batch sizes.

        Returned are the epoch and the step at which it goes on, counted in epochs as they are on the present ranks:
        ``num_batches(epoch) - step`` steps of it are left.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration; nothing changes then.
        """
        format_.check(state, where=where)
        accepted = (
            *format_.accepted_names(accept),
            *(name for loader in self.loaders.values() for name in loader.accept),
        )
        format_.refuse_differences(
            state, self._state(dict.fromkeys(self.loaders, Progress())), accept=accepted, where=where
        )
        saved = dict(format_.walk(state))
        self.await_lengths(state)
        found = {
            path: loader.tracker.progress_in(saved[path], where=where)
            for path, loader in self.loaders.items()
            if path in saved
        }
        for path, progress in found.items():
            self.loaders[path].tracker.load_skip(saved[path], progress, where=where)
        self._lengths.clear()
        # Where all loaders are new, and accepted as such, they begin with the epoch of the old ones.
        known = [*found.values(), *(Progress.from_dict(part["progress"]) for part in saved.values())]
        epoch = known[0].epoch
        if any(progress.epoch != epoch for progress in known):
            epochs = {path: part["progress"]["epoch"] for path, part in saved.items()}
            raise DamagedStateError(f"{where} is of several epochs: {epochs}. Resume from another checkpoint.")
        # A loader that the state does not know (its absence was accepted) begins with the epoch.
        plans = {path: loader.plan(epoch, found.get(path)) for path, loader in self.loaders.items()}
        self._plans, self._resumed_plans, self._cycle_plans = plans, dict(plans), {}
        steps_left = [self._steps_left(path, plan) for path, plan in plans.items()]
        of_epoch = min(steps_left) if self.mode == "min_size" else max(steps_left)
        self._resumed_step = max(self.num_batches(epoch) - of_epoch, 0)
        return epoch, self._resumed_step

    def await_lengths(self, state: Mapping[str, Any], *, of_ended: int | None = None) -> None:
        """Take the epoch of a state to be as long as it says, until :meth:`end_awaiting`: hooks may set that again.

        It is the epoch ``of_ended`` that is taken so, where that was ended just before.
        """
        saved = dict(format_.walk(state))
        for path, loader in self.loaders.items():
            if isinstance(loader.order, WrappedSampler) and path in saved:
                loader.order.await_length(saved[path], loader.tracker.config, of_ended)

    def end_awaiting(self) -> None:
        """Training begins: hooks have restored what lengths of samplers, and iterable datasets, follow from."""
        for loader in self.loaders.values():
            if isinstance(loader.order, WrappedSampler):
                loader.order.end_awaiting()
            elif isinstance(loader.order, (IterableOrder, StreamOrder)):
                loader.order.note_restored()

    def _refuse_skip(self) -> None:
        """Refuse ranges of batches that would be others of each loader."""
        skips = [of for of in self.loaders.values() if of.tracker.skipping and of.tracker.skipping.skip.ranges]
        if not skips or len(self.loaders) == 1:
            return
        lengths = {without_gaps(loader.plan(0)).num_steps for loader in self.loaders.values()}
        if self._cycles and len(lengths) > 1:
            raise ConfigurationError(
                f"skip leaves out batches by their number in the epoch, and of loaders with {sorted(lengths)} batches "
                "the shorter ones start over within it. Combine them in the mode 'min_size' or 'max_size'."
            )
        if any(loader.order.kind in ("stream", "iterable") for loader in skips):
            raise ConfigurationError(
                "skip cannot be honoured for a stream that is read beside other loaders. Leave it out, or read the "
                "stream alone."
            )

    def _state(self, progress: Mapping[str, Progress]) -> dict[str, Any]:
        """The state of a single loader as it is; of several, their states in one envelope."""
        states = {path: loader.tracker.state_dict(progress[path]) for path, loader in self.loaders.items()}
        return dict(states[""]) if list(states) == [""] else format_.pack_combined(self.mode, states)

    def length(self, path: str, epoch: int) -> int:
        """Steps of a whole epoch of one loader; an order may have epochs of different lengths."""
        known, length = self._lengths.get(path, (-1, 0))
        if known != epoch:
            length = self.loaders[path].plan(epoch).num_steps
            # That of a user's sampler may change until it begins.
            if not isinstance(self.loaders[path].order, WrappedSampler):
                self._lengths[path] = epoch, length
        return length

    def follow_lengths(self) -> bool:
        """Plan an epoch that begins for the lengths that map-style datasets have now; whether any has changed."""
        changed = [path for path, loader in self.loaders.items() if loader.follow_length()]
        for path in changed:
            for known in (self._lengths, self._plans, self._resumed_plans, self._cycle_plans):
                known.pop(path, None)
        return bool(changed)

    def keep_changes(self) -> None:
        """An epoch is cut off: what its end changes is none of what a resume within it begins with."""
        for loader in self.loaders.values():
            loader.tracker.keep_changes()

    def begin_at(self, path: str, epoch: int, step: int) -> tuple[EpochPlan, int]:
        """Find the plan as :meth:`plan_at`, to read it: the epoch keeps the length that it has now."""
        self._lengths[path] = epoch, self.length(path, epoch)
        self.loaders[path].tracker.kept_changes = None
        return self.plan_at(path, epoch, step)

    def _steps_left(self, path: str, plan: EpochPlan) -> int:
        """Steps from the beginning of a plan until the loader has been seen once in the epoch.

        For a loader whose end is not known, whose whole epoch counts as UNKNOWN steps, this is UNKNOWN less the steps
        that were taken: so the step at which the epoch goes on is the length of the epoch less this number either way.
        """
        progress = plan.progress_after(0)
        if progress.cycle:
            # In a later pass within the epoch it has already been seen once.
            return 0
        if plan.num_steps < UNKNOWN:
            return plan.num_steps
        if isinstance(plan, OwnPlan) and plan.skipped:
            return UNKNOWN - plan.skipped
        tracker = self.loaders[path].tracker
        whole = without_gaps(self.loaders[path].plan(plan.epoch))
        consumed_a_step = (whole.plan if isinstance(whole, OwnPlan) else whole).progress_after(1).consumed
        left_out = 0 if tracker.skipping is None else tracker.skipping.skipped_before(progress)
        return UNKNOWN - (progress.consumed - left_out) // consumed_a_step

    def _plan(self, path: str, epoch: int) -> EpochPlan:
        """The plan of an epoch; of its rest, if a state was loaded within it."""
        plan = self._plans.get(path)
        if plan is None or plan.epoch > epoch:
            plan = self._resumed_plans.get(path)
        if plan is None or plan.epoch != epoch:
            plan = self.loaders[path].plan(epoch, None if plan is None else plan.progress_after(0))
        self._plans[path] = plan
        return plan

    def _plan_of_cycle(self, path: str, epoch: int, cycle: int) -> EpochPlan:
        """The plan of a later pass within an epoch."""
        plan = self._cycle_plans.get(path)
        if plan is None or (plan.epoch, plan.progress_after(0).cycle) != (epoch, cycle):
            plan = self._cycle_plans[path] = self.loaders[path].plan(epoch, Progress(epoch=epoch, cycle=cycle))
        return plan

    def _end_streams_together(self, epoch: int) -> None:
        """Let streams of unknown length end an epoch with the shortest; the next epoch goes on in their rests."""
        if self.mode != "min_size" or epoch < 0:
            return
        ends = {path: loader.ended or (-1, 0) for path, loader in self.loaders.items()}
        ended = [steps for last, steps in ends.values() if last == epoch]
        for path, (last, _) in ends.items() if ended else ():
            if last < epoch:
                self.loaders[path].end_at(Progress(epoch=epoch, consumed=min(ended)))


def _by_rank(values: Sequence[Any]) -> Any:
    """Join the values of all ranks: one if they are equal, else a list of them; dicts key by key."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values):
        return {name: _by_rank([value[name] for value in values]) for name in values[0]}
    return list(values)


def name_of(stage: str, path: str) -> str:
    """The name of a loader in errors and warnings."""
    return f"the {stage} loader {path!r}" if path else f"the {stage} loader"
