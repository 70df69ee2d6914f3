"""Compares a batch that was trained on before a checkpoint with what the loader reads in its place on a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.contents.dataset_content import PATH, digest_of_batch, is_same_batch, show_batch
from lightning_stateful.contents.held_state import HeldState, changed_names
from lightning_stateful.contents.read_watch import moved_for_good
from lightning_stateful.core.order import EpochPlan, Progress
from lightning_stateful.core.skip import is_whole_at, whole_plan
from lightning_stateful.data_checks.dataset_settings import DatasetSettings, builder_of
from lightning_stateful.data_checks.odd_datasets import find_trained, say_collectives, warn_if_it_follows_workers
from lightning_stateful.data_checks.repeated_changes import (
    HeldLists,
    say_third_values,
    warn_of_same_change,
    warn_of_shuffled_lists,
)
from lightning_stateful.data_checks.settings_of_rank import SettingsOfRank
from lightning_stateful.data_checks.stream_content import StreamContent, names_of_content
from lightning_stateful.errors import Difference, StatefulWarning, StateMismatchError
from lightning_stateful.loaders.description import warn_unless_restored
from lightning_stateful.loaders.own_iteration import OwnTracker
from lightning_stateful.loaders.patching import AnyLoader, map_style
from lightning_stateful.loaders.planned_batches import ChosenBatch, plain_indices
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import epoch_set_to, is_rebuilt_now
from lightning_stateful.loops.ranks import gathered
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.state_codec import from_plain
from lightning_stateful.state import differences, is_accepted, walk
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Batches from one whose content is noted to the next.
_NOTED_EVERY = 100
# Names of changes that decide which samples there are.
_OF_SAMPLES = (PATH, "dataset.indices", "dataset.of.")


class BatchContent:
    """Digests every hundredth batch of a rank from the first on, as a loader gave it, and keeps the latest of each.

    Args:
        loaders: The loaders, by path.
        trainer: The trainer.

    State:
        By the path of a map-style loader: where the batch was (``"batch"``, epoch and number; ``"progress"``,
        ``"ranks"`` and ``"rank"``), its size and seed, the digest of its content, and one of the dataset's
        settings where it had changed them.

    Attributes:
        settings: Attributes of the datasets that hooks set.
        of_rank: What hooks set on the data of this rank alone.
        streams: The first batches of passes over streams.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader], trainer: pl.Trainer) -> None:
        self._num_loaders = len(loaders)
        self._loaders = map_style(loaders)
        self.streams = StreamContent(loaders)
        # A user's sampler would have to be iterated to know a batch of it again, so its indices are kept.
        for loader in filter(_has_sampler, self._loaders.values()):
            loader.keep_indices()
        # Of the datasets as they were built; as a pass began; and the names of those that reading changes.
        self._built = {path: _settings_of(loader) for path, loader in self._loaders.items()}
        self._at_begin: dict[str, dict[str, str]] = {}
        self._changed_by_reading: dict[str, set[str]] = {path: set() for path in self._loaders}
        self.latest: dict[str, dict[str, Any]] = {}
        self._is_first = trainer.is_global_zero
        self._build = builder_of(trainer)
        self.settings = DatasetSettings(self._loaders, self._build)
        self.of_rank = SettingsOfRank(loaders, self.settings, trainer)
        # By path: what was read on a resume in the place of a batch of an epoch that is over.
        self._before_hooks: dict[str, dict[str, Any] | None] = {}
        # On a resume from the end of an epoch, until batches are compared. By path: what had changed as training began,
        # and what was as built then, and was changed by hooks at the end of that epoch.
        self._is_over = self._begins_epoch = False
        self._changed_first: dict[str, Mapping[str, Any]] | None = None
        self._changed_late: dict[str, set[str]] = {}
        self._lists: dict[str, HeldLists] = {}
        # By path: the first other value of what a sampler yields than as it was built.
        self._first_changes: dict[str, dict[str, Any]] = {}
        # By path: the states of loaders that a checkpoint has.
        self._states: dict[str, Mapping[str, Any]] = {}

    @property
    def is_map_style(self) -> bool:
        """Whether all loaders are of map-style datasets."""
        return len(self._loaders) == self._num_loaders

    def note_begin(self, path: str) -> None:
        """A pass over a loader begins."""
        self.settings.note_begin(path)
        if path in self._loaders and self._is_first:
            self._at_begin[path] = _settings_of(self._loaders[path])

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
        if not self._is_first:
            return
        before = self._at_begin.pop(path, None)
        if before is not None and not (_has_sampler(self._loaders[path]) or _has_iteration(self._loaders[path])):
            # The index in hand, say. A sampler, or a loader, may have set what samples follow from.
            self._changed_by_reading[path] |= changed_names(before, _settings_of(self._loaders[path]))
        if not step:
            self.streams.note(path, batch)
            self._note_first_changes(path)
        if path not in self._loaders or step % _NOTED_EVERY or not is_whole_at(plan, step):
            return
        plan, step = whole_plan(plan, step)
        loader = self._loaders[path]
        kept, reader = plain_indices(loader.indices) if _has_sampler(loader) else [], loader.reader
        if kept is None:
            self.latest.pop(path, None)
            return
        chosen = {"chosen": [reader.number if reader else 0, *kept]} if kept else {}
        topology = loader.topology
        try:
            content = digest_of_batch(batch)
        except Exception as error:
            rank_zero_info(f"A batch could not be digested, and will not be compared on a resume: {error!r}")
            self.latest.pop(path, None)
            return
        held = self.settings.changed(path)
        self.latest[path] = {
            "batch": list(at()),
            "progress": {} if chosen else plan.progress_after(step).to_dict(),
            **chosen,
            "read_by": _read_by(loader),
            "ranks": topology.num_replicas,
            "rank": topology.rank,
            "settings": self._changed_settings(path),
            **({"held": held} if held else {}),
            **({"workers": loader.num_workers} if loader.num_workers else {}),
            **({"collectives": True} if reader and reader.calls_collectives else {}),
            **content,
        }

    def _note_first_changes(self, path: str) -> None:
        """Note what a user's sampler yields first where a hook has changed that."""
        loader = self._loaders.get(path)
        if loader is None or not isinstance(loader.order, WrappedSampler) or self._first_changes.get(path):
            return
        memory = loader.order.memory
        if memory.is_changed or not memory.is_as_tried:
            self._first_changes[path] = loader.order.changed_settings(loader.tracker.config)

    def state(self) -> dict[str, Any]:
        """The parts of a checkpoint that are about batches, attributes of datasets, and what loaders are built from."""
        # A batch that was read before the data were changed is no longer what is read in its place.
        content = {path: of for path, of in self.latest.items() if self._is_as_noted(path, of)}
        build = {} if self._build is None else self._build()
        return {
            "content": deepcopy(content),
            "first_batches": self.streams.state(),
            "first_changes": deepcopy(self._first_changes),
            "dataset_settings": self.settings.state(),
            "build": build,
        }

    def _is_as_noted(self, path: str, noted: Mapping[str, Any]) -> bool:
        if path not in self._loaders or not _hands_on(self._loaders[path]):
            return False
        return (noted["settings"], noted.get("held", "")) == (self._changed_settings(path), self.settings.changed(path))

    def expect(
        self,
        trainer: pl.Trainer,
        saved: Mapping[str, Any],
        states: tuple[Mapping[str, Any] | None, Callable[[], Mapping[str, Any]]],
        accept: Collection[str],
        epoch: int,
    ) -> Callable[[], None] | None:
        """Take a checkpoint's state.

        Args:
            trainer: The trainer.
            saved: The callback's state in the checkpoint.
            states: The data's state in it, None if there is none, and a function that gives it as it is here.
            accept: Names of differences to let pass.
            epoch: The epoch that the run goes on within; -1 where all that was trained on is of epochs that are over.

        Returns:
            Compares batches by :meth:`compare`, to be called before the first one is read; None if there is nothing
            to compare.
        """
        content, (state, present) = saved.get("content"), states
        self.of_rank.expect(saved, is_within_epoch=epoch >= 0)
        if state is None:
            return None
        is_changed = bool(differences(state, present(), fingerprints=False))
        self.streams.expect(trainer, {} if is_changed else saved.get("first_batches", {}), accept)
        if not (content or self.is_map_style):
            return None
        self._first_changes = {} if is_changed else dict(saved.get("first_changes", {}))
        content = content if isinstance(content, Mapping) else {}
        self.latest = {path: dict(of) for path, of in content.items()}
        self._is_over = self._begins_epoch = epoch < 0
        if epoch < 0 and not is_changed and trainer.is_global_zero:
            # Once before callbacks are given what they saved, and hooks set the data for the next epoch.
            known = filter(self._loaders.__contains__, content)
            over = [path for path in known if not is_accepted(names_of_content(path), accept)]
            self._before_hooks = {path: self._read(trainer, path, content[path], is_first=True) for path in over}
        self._states = {} if is_changed else dict(walk(state))
        return partial(self.compare, trainer, content, accept, None if is_changed else self._states, epoch)

    def note_before_epoch(self, trainer: pl.Trainer) -> None:
        """An epoch is about to begin: the hooks that restore what a checkpoint has were called, and none of its own."""
        if not self._is_over:
            return
        changed = {path: loader.changed() for path, loader in self._loaders.items()}
        if self._changed_first is None:
            self._changed_first = {path: dict(now) for path, now in changed.items()}
            self._lists = {path: HeldLists(loader.dataset, loader.order) for path, loader in self._loaders.items()}
            self.of_rank.note_restored()
            self.settings.note_restored()
        else:
            self._changed_late = {path: now.keys() - self._changed_first[path].keys() for path, now in changed.items()}
        if is_rebuilt_now(trainer):
            # These loaders are not read again, so that nothing else is compared.
            self._is_over = False
            for path, now in changed.items() if trainer.is_global_zero else ():
                if path in self._states:
                    self._warn_of_left(path, self._states[path], now, False)
            self.settings.note_build()

    def _warn_of_left(self, path: str, saved: Mapping[str, Any], now: Mapping[str, Any], is_of_epoch: bool) -> None:
        """Warn of what had changed when a state was saved, and was as built as training began."""
        # The items that a sampler gave of the epoch are compared too, but later ones may differ all the same.
        is_compared = is_of_epoch and saved["progress"]["consumed"] > 0
        changed = saved.get("changed", {}).items()
        of = {name: value for name, value in changed if not (is_compared and name.startswith(PATH))}
        loader, restored = self._loaders[path], now.keys() - self._changed_late.get(path, set())
        left = warn_unless_restored(loader.order, loader.dataset, loader.tracker.config, of, restored)
        self.settings.note_told(path, left)

    def _warn_of_changes_again(self, path: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Warn of what hooks of the first epoch here have changed anew, where nobody had restored it."""
        order, before = self._loaders[path].order, (self._changed_first or {}).get(path, saved)
        others = {*before, *self._changed_late.get(path, ())}
        again = {name: now[name] for name in saved if name in now and name not in others}
        if isinstance(order, WrappedSampler):
            say_third_values(order, saved, before, now)
            warn_of_same_change(order, [saved, self._first_changes.get(path, {})], again)
        if path in self._lists and not others.intersection(saved):
            warn_of_shuffled_lists(self._lists[path].shuffled() if saved else [])

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
            epoch: As for :meth:`expect`.

        Raises:
            StateMismatchError: On all processes, if a batch has another content, twice the same.

        Warns:
            StatefulWarning: Data or a sampler had been changed in training, and are as they were built.
        """
        found: list[Difference] = []
        self._is_over = False
        if states is not None:
            self.of_rank.compare(states, self._warn_of_left)
        if trainer.is_global_zero and states is not None:
            for path, loader in self._loaders.items():
                now = loader.changed()
                if path not in states or is_accepted(names_of_content(path), (*accept, *loader.accept)):
                    continue
                is_of_epoch = path in saved and saved[path]["batch"][0] == epoch
                tells = is_of_epoch and not _has_sampler(loader) and self._is_read_alike(path, saved[path])
                self._warn_of_left(path, states[path], now, tells)
                if epoch < 0:
                    self._warn_of_changes_again(path, states[path].get("changed", {}), now)
                # Of data that change from epoch to epoch, a batch of an earlier epoch tells nothing.
                is_changing = any(name.startswith(_OF_SAMPLES) for name in (*states[path].get("changed", {}), *now))
                # A hook may have set the data for another epoch.
                is_held = path in saved and saved[path].get("held", "") == self.settings.changed(path)
                if path in saved and (is_of_epoch or (is_held and not is_changing)):
                    found += self._compared(trainer, path, saved[path])
        if trainer.world_size > 1:
            found = gathered(found)[0]
        if found:
            raise StateMismatchError(found, where="The checkpoint's data state")

    def _changed_settings(self, path: str) -> str:
        """Digest of what else than reading has changed of a dataset's settings since it was built; empty for none."""
        built, now = self._built[path], _settings_of(self._loaders[path])
        names = changed_names(built, now) - self._changed_by_reading[path]
        changed = "\n".join(f"{name}={now.get(name)}" for name in sorted(names))
        return hex_digest(changed.encode(errors="surrogatepass"), size=6) if names else ""

    def _compared(self, trainer: pl.Trainer, path: str, saved: Mapping[str, Any]) -> list[Difference]:
        looked, before = path in self._before_hooks, self._before_hooks.get(path)
        warn_if_it_follows_workers(self._loaders[path], partial(_plan_of, self._loaders[path], saved), saved)
        if before is not None and is_same_batch(saved, before):
            return []
        now = self._read(trainer, path, saved)
        if now is None or is_same_batch(saved, now):
            return []
        name = _name_of(saved)
        if looked and (before is None or not is_same_batch(before, now)):
            rank_zero_info(
                f"{name} was not compared on the resume: it is of an epoch that is over, and a hook has changed the "
                "data since."
            )
            return []
        loader = self._loaders[path]
        # Workers have a copy of when they were started.
        kind = "" if loader.num_workers else find_trained(trainer, loader.dataset, loader.collate_fn)
        if kind:
            _warn_of_dependence(name, kind)
            return []
        if _has_sampler(loader) or _has_iteration(loader):
            _warn_of_other_content(name, show_batch(saved, now), show_batch(now, saved))
            return []
        return [_difference(names_of_content(path)[0], name, show_batch(saved, now), show_batch(now, saved))]

    def _is_read_alike(self, path: str, saved: Mapping[str, Any]) -> bool:
        """Whether a batch is read as when it was noted; else there are other batches or draws, or data change by epoch.

        The dataset may change itself, be told the epoch, or have been changed by a hook that has not done so here.
        """
        return bool(
            saved["read_by"] == _read_by(self._loaders[path]) and saved["settings"] == self._changed_settings(path)
        )

    def _read(
        self, trainer: pl.Trainer, path: str, saved: Mapping[str, Any], *, is_first: bool = False
    ) -> dict[str, Any] | None:
        """Describe what a loader reads in the place of a batch; None where that tells nothing.

        Args:
            trainer: The trainer.
            path: The path of the loader.
            saved: The batch as it was noted.
            is_first: It will be read again, so that nothing has to be said yet.
        """
        loader, name = self._loaders[path], _name_of(saved)
        with epoch_set_to(trainer, saved["batch"][0]):
            if not self._is_read_alike(path, saved):
                return None
            if saved.get("collectives"):
                if not is_first:
                    say_collectives(name)
                return None
            if moved := moved_for_good(loader.dataset):
                if not is_first:
                    _say_moved(name, moved)
                return None
            try:
                read = loader.read_twice(_plan_of(loader, saved), saved["rank"], saved["batch"][1])
            except StatefulWarning:
                raise
            except Exception as error:
                if not is_first:
                    rank_zero_info(f"{name} of the checkpoint could not be read again, and was not compared: {error!r}")
                return None
        if read is None:
            return None
        once, again = map(digest_of_batch, read)
        is_alike = once == again or is_same_batch(once, again)
        # Workers that end with an epoch forget what they remember: one that reads it first has read the same.
        forgets = self._begins_epoch and loader.num_workers > 0 and not loader.persistent_workers
        if is_alike or (forgets and is_same_batch(saved, once)):
            return once
        if not is_first and not loader.seed_samples:
            rank_zero_warn(
                f"{name} has another content whenever it is read, and seed_samples=False leaves the process's random "
                "generators as they stand. If samples draw from them, a resume within an epoch is not exact in that. "
                "Leave seed_samples on, or derive samples from the index and the epoch.",
                category=StatefulWarning,
            )
        elif not is_first:
            rank_zero_warn(
                f"{name} has another content whenever it is read. Either the dataset, a transform or the collate_fn "
                "remembers what was read (a count of reads, a queue, the sample before), or it draws from the system's "
                "entropy or from a generator that is out of reach. The resume is not exact, unless this does not "
                "matter, and nobody can tell whether the data are those of the checkpoint. Derive samples from the "
                "index and the epoch. Draw from torch's, NumPy's or Python's global generators, or from generators "
                "that are attributes of the dataset.",
                category=StatefulWarning,
            )
        # The first reading of a process may well be what it was in the other one.
        return once if not is_first and is_same_batch(saved, once) else None


def _has_sampler(loader: StatefulLoader) -> bool:
    return isinstance(loader.order, WrappedSampler)


def _has_iteration(loader: StatefulLoader) -> bool:
    """Whether it is a loader with an ``__iter__`` of its own."""
    return isinstance(loader.tracker, OwnTracker)


def _hands_on(loader: StatefulLoader) -> bool:
    """Whether a loader gives the batches that DataLoader reads, as one with an ``__iter__`` of its own may not."""
    watch = loader.tracker.watch if isinstance(loader.tracker, OwnTracker) else None
    return watch is None or (watch.is_known and not watch.differs)


def _plan_of(loader: StatefulLoader, saved: Mapping[str, Any]) -> Any:
    """A plan that begins with a batch as it was noted."""
    if chosen := saved.get("chosen"):
        number, plain, is_listed = chosen
        indices = from_plain(plain)
        return ChosenBatch(saved["batch"][0], number, [*indices] if is_listed else indices)
    progress = Progress.from_dict(saved["progress"])
    return loader.order.plan(progress.epoch, saved["ranks"], progress)


def _warn_of_other_content(name: str, saved: str, present: str) -> None:
    rank_zero_warn(
        f"{name} has another content than when the checkpoint was written, by the same indices (saved {saved}, now "
        f"{present}): the data or their transforms are others, or in another order, or samples follow from something "
        f"that your sampler, your loader's own __iter__ or a hook sets. If they are others, the resume is not exact. "
        f"Sort the files, pass a seed to random_split or shuffle; accept=({PATH!r},) is silent.",
        category=StatefulWarning,
    )


def _say_moved(name: str, moved: Collection[tuple[str, str, bool]]) -> None:
    """Say that a batch was not compared, and warn where samples may depend on what reading it would have moved."""
    holder, attribute, is_used = max(moved, key=itemgetter(2))
    said = (
        f"{holder} changes {attribute!r} whenever samples are read. Nothing can put that back, so {name} was not "
        "compared on the resume."
    )
    if is_used:
        more = (
            "No checkpoint has it: if samples depend on it, the resume is not exact. Derive them from index and epoch."
        )
        rank_zero_warn(f"{said} {more}", category=StatefulWarning)
    else:
        rank_zero_info(said)


def _warn_of_dependence(name: str, kind: str) -> None:
    rank_zero_warn(
        f"{name} has another content than before the checkpoint, and the data hold a {kind}: batches depend on "
        "training, by its step or its weights, so that nobody can tell whether the data are those of the checkpoint. "
        "The resume is exact only if they are, and if all that samples read there is restored, as the trainer's "
        "counters and the module's weights and buffers are.",
        category=StatefulWarning,
    )


def _name_of(saved: Mapping[str, Any]) -> str:
    epoch, number = saved["batch"]
    return f"Batch {number} of epoch {epoch}"


def _read_by(loader: StatefulLoader) -> list[Any]:
    return [loader.batch_size, loader.seed if loader.seed_samples else None]


def _settings_of(loader: StatefulLoader) -> dict[str, str]:
    return HeldState(loader.dataset, containers=False).plain()


def _difference(path: str, name: str, saved: str, present: str) -> Difference:
    remedy = (
        f"{name} is not what it was when the checkpoint was written: the data or their transforms are others, "
        "or in another order, or a cache held samples that were drawn at random, or workers read the trainer or "
        "weights, of which they have copies. Sort the files, "
        "pass a seed to random_split or shuffle; what a hook sets in the dataset, "
        f"set it again in on_train_start; or accept the change with accept=({PATH!r},)."
    )
    return Difference(path=path, saved=f"{name}, {saved}", present=f"{name}, {present}", remedy=remedy)
