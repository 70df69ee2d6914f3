"""Reads iterable datasets that divide themselves, and iterables of batches, pass by pass as torch reads them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from lightning_stateful.contents.dataset_content import named_files
from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.iterable_datasets.dataset_parts import (
    ReadTogether,
    digest_of_dataset,
    digests_as_built,
    parts_of,
)
from lightning_stateful.iterable_datasets.earlier_passes import copied_with_shared_data
from lightning_stateful.iterable_datasets.iterable_state import IterableState, says_how_ranks_draw
from lightning_stateful.iterable_datasets.iterable_task import is_told
from lightning_stateful.iterable_datasets.iterables import IterableConfig
from lightning_stateful.iterable_datasets.kept_values import KeptGenerators
from lightning_stateful.iterable_datasets.outside_values import digests_reached
from lightning_stateful.iterable_datasets.pass_history import beginning_of, history_of
from lightning_stateful.iterable_datasets.persistent_copies import PersistentCopies, is_in_shared_memory
from lightning_stateful.iterable_datasets.rank_draws import (
    generators_of_ranks,
    kinds_alike,
    lightning_seeds_workers,
    where_generators_stand,
)
from lightning_stateful.iterable_datasets.set_by_hooks import SetBetweenPasses
from lightning_stateful.iterable_datasets.set_within_passes import SetWithinPass
from lightning_stateful.samplers.state_codec import from_plain
from lightning_stateful.stream_loader.options import IterableBatches, StreamOptions, batching_of
from lightning_stateful.stream_loader.reader import MOST_EMPTY, StreamReader
from lightning_stateful.stream_loader.recent_states import ServedState
from lightning_stateful.stream_loader.stream_run import StreamRun
from lightning_stateful.stream_nodes.node_shards import draws_orders
from lightning_stateful.stream_nodes.own_state import has_state

# Why what a hook sets behind the first batch of a resume is not what it would have been.
_HAD_BEGUN = "the passes of the dataset change it, and have been begun again as often as before the stop"
_HAD_LOADED = (
    "the dataset had been brought to where it stood, and the run that wrote the checkpoint did not set it there"
)


class IterableOrder(StreamReader):
    """Reads an iterable dataset as torch does: every epoch begins it by ``iter()``, as it stands.

    With ``steps_per_epoch`` an epoch goes on where the last has ended, and ``iter()`` begins the dataset where it ends.

    Attributes:
        files: Digests, by attribute, of the lists of files that the dataset names in this process.
        generators: Where the random generators stood that a Trainer's passes draw from, when this was built.
    """

    kind: ClassVar[str] = "iterable"
    state_kind = IterableState
    _reads_alike: ClassVar[bool] = False
    settings: IterableConfig
    # The epoch of the latest run.
    _epoch = -1
    is_read_twice = False
    # Where a state was loaded that the datasets were not brought to yet.
    _moves_to: tuple[int, int] | None = None
    # Whether a state was loaded since training began.
    _is_restored = False
    # Where the latest iteration began, if a state had been loaded for it.
    _moved_to: tuple[int, int] | None = None
    # Whether it is known if ranks draw alike.
    _knows_draws = False

    def __init__(self, loader: DataLoader[Any], options: StreamOptions) -> None:
        super().__init__(loader, options)
        self.generators = where_generators_stand(loader, is_alone=self.topology.num_replicas == 1)
        if lightning_seeds_workers(loader):
            self.generators = {"workers": str(self.topology.rank)}
        gives_batches = isinstance(loader.dataset, IterableBatches)
        self.settings = IterableConfig(
            dataset=self.dataset,
            seed=self.seed,
            sample_seed=derive_seed("iterable", self.own_seed) if options.seed_samples else None,
            gives_batches=gives_batches,
            stays=not loader.num_workers or loader.persistent_workers,
            is_checked="nondeterministic" not in options.accept,
            beginning=None if gives_batches else beginning_of(self.dataset),
            **batching_of(loader),
        )
        if gives_batches:
            self.items = "batches"
            self._warn_of_drawn_orders()
        self.files = named_files(parts_of(self.dataset))
        # Of one that is told the epoch, what it holds is another in each.
        self._is_untold = self.settings.counts_passes and not is_told(self.dataset)
        self._built = digest_of_dataset(self.dataset) if self._is_untold else ""
        is_watched = self.begins_anew and self.settings.is_checked
        # Nothing of the dataset that lives on in workers is set from here.
        self._copies = PersistentCopies(self.dataset) if is_watched and self._shares_workers else None
        # But for what lies in shared memory.
        how: dict[str, Any] = {"in_workers": loader.num_workers > 0}
        how = {"in_workers": False, "looks_at": is_in_shared_memory} if self._shares_workers else how
        together = ReadTogether.by(loader, self.dataset)
        self._watch = SetBetweenPasses(together, **how) if is_watched else None
        is_compared = is_watched and (has_state(self.dataset) or not loader.num_workers)
        of_dataset = digests_as_built(self.dataset) if is_compared and has_state(self.dataset) else {}
        self.settings = replace(self.settings, built=of_dataset)
        # What is set within a pass does not reach workers.
        is_here = is_watched and not loader.num_workers
        self._within = SetWithinPass(together, digests_as_built(together)) if is_here else None
        # Of workers that end with the epoch, each draws from a copy of what it holds here.
        is_copied = is_watched and not self.settings.stays and not has_state(self.dataset)
        self._copied = KeptGenerators(parts_of(self.dataset)) if is_copied else None
        self._stood = ""
        # What its passes change here, with which hooks may see to it too.
        is_changed_here = self._is_untold and not loader.num_workers
        self._attributes = history_of(self.dataset).attributes if is_changed_here else None
        # What it held as it was built, and as its first pass began.
        self._values_built = {} if options.exact else self.values
        self._values_begun = self._values_built
        # Of one that is built for a later epoch another warning speaks.
        self._is_first = not history_of(self.dataset)

    def _warn_of_drawn_orders(self) -> None:
        if draws_orders(getattr(self.dataset, "root", None)):
            warnings.warn(
                f"{self.name} has a sampler that draws its order from a generator, and its state does "
                "not say which order: a resume within an epoch repeats samples and leaves out others. Train on the "
                "graph, with StreamDataModule(graph), which seeds the sampler by epoch; or give it a sampler with "
                "set_epoch.",
                StatefulWarning,
                stacklevel=4,
            )

    def config(self) -> dict[str, Any]:
        """The settings that determine the batches, and the files that the dataset names, on a single rank.

        Of several ranks each may have files of its own, and a state is equal on all: a Trainer's ranks exchange them.
        """
        described = super().config()
        if self.files and self.topology.num_replicas == 1 and os.environ.get("WORLD_SIZE", "1") == "1":
            described["dataset"] = {**described["dataset"], "content": self.files}
        return described

    def describe(self) -> str:
        """A sentence on how the dataset is divided and resumed."""
        if self.settings.gives_batches:
            divided = "is no DataLoader: each rank trains on what its own gives, without seed_samples"
        else:
            divided = "is a stream: every rank and worker trains on what its own dataset gives it"
        reasons = self.reasons_to_read_again()
        resumes = f"reads it again, because {reasons}" if reasons else "is as exact as its own state_dict"
        said = f"{self.name} {divided}, and a resume {resumes}.{self._note_of_epochs()}"
        if self.settings.sample_seed is None or self.settings.gives_batches:
            return said
        # Workers may have to draw the same order, each to find its part of it.
        holds = HeldGenerators(dataset=self.dataset).present()
        return f"{said} Random generators that it holds are not seeded, but left as they are." if holds else said

    def reasons_to_read_again(self, *, if_drawn: bool = False) -> str:
        """Why a resume reads samples again; empty if it does not."""
        return "" if has_state(self.dataset) else "it has no state_dict and load_state_dict"

    def note_draws(self, of_ranks: Sequence[Mapping[str, str]]) -> None:
        """Let ranks draw alike where their generators stood alike, unless a state that was loaded says how they draw.

        Args:
            of_ranks: :attr:`generators` of all ranks.
        """
        if not self._knows_draws:
            self._set_draws(kinds_alike(of_ranks))

    def draw_as(self, other: IterableOrder) -> None:
        """Let ranks draw as in another reader's, which has been built before anything was drawn."""
        self._set_draws(other.settings.kinds_alike)

    def _set_draws(self, alike: Collection[str]) -> None:
        self._knows_draws = True
        self.settings = replace(self.settings, kinds_alike=frozenset(alike))

    @property
    def values(self) -> dict[str, str]:
        """Digests of what the dataset holds now, and of what its ``collate_fn`` reaches."""
        return {**digests_as_built(self.dataset), **digests_reached(self.loader.collate_fn)}

    @property
    def values_as_begun(self) -> tuple[dict[str, str], dict[str, str]]:
        """The same as it was built, and as its first pass began."""
        return self._values_built, self._values_begun

    @property
    def begun_pass(self) -> int | None:
        """As of other readers, but of the first pass alone: later ones may depend on those before.

        None where the dataset holds random generators, which are left as they are and looked at elsewhere.
        """
        is_seeded = self.settings.sample_seed is not None and not self.settings.gives_batches
        is_first = is_seeded and super().begun_pass == 0
        return 0 if is_first and not HeldGenerators(dataset=self.dataset).present() else None

    @property
    def begins_anew(self) -> bool:
        """Whether every epoch begins the dataset by ``iter()``."""
        return self.options.steps_per_epoch is None

    @property
    def begun_anew(self) -> Any:
        """The dataset that every epoch begins by ``iter()``; None where epochs go on."""
        return self.dataset if self.begins_anew else None

    def warn_if_reloaded(self, epoch: int) -> None:
        """Warn where passes have changed the dataset of this process, and loaders are built of it again for an epoch.

        Lightning then begins a pass more than it trains on, of which a checkpoint between two epochs knows nothing.
        """
        if self._is_untold and self._built != digest_of_dataset(self.dataset):
            warnings.warn(
                f"{self.name} changes itself from pass to pass, and a new loader of it was built for epoch {epoch}, "
                "for which Lightning begins it once more than it trains on. A resume from between two epochs is not "
                "exact. Make the dataset anew in train_dataloader, or give it state_dict and load_state_dict.",
                StatefulWarning,
                stacklevel=4,
            )

    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch; see :meth:`StreamReader.read`."""
        self._forget_end(epoch)
        is_moved = (epoch, step) == self._moves_to
        self._note_moved((epoch, step), is_moved)
        run = self._run_at(epoch, step)
        num_served, run.is_iterated = run.num_served, True
        try:
            while step < self._limit:
                if not run.goes_on(num_served):
                    # Another iteration has taken over what is read; one iterator of torch's serves persistent workers.
                    latest = self._run if self._shares_workers else None
                    run = self._run_at(epoch, step) if latest is None or latest.is_closed else latest
                if not run.has_next() and not self.begins_anew:
                    run = self._next_pass(run)
                if not run.has_next():
                    break
                batch = run.next()
                step, num_served = step + 1, run.num_served
                if self._watch is not None:
                    self._watch.note_read()
                if self._within is not None:
                    self._within.note_read(epoch, step)
                if self._attributes is not None and is_moved:
                    self._attributes.note_first(self.dataset)
                self.recent.note(epoch, step, ServedState(run))
                if step == self._limit:
                    self._end(epoch, step, run)
                yield batch
                if self._within is not None:
                    self._within.note_outside()
                if self._attributes is not None and is_moved:
                    self._warn_if_set(self._attributes.set_since_first(self.dataset), _HAD_BEGUN)
                    is_moved = False
            if not step and self._limit:
                self._warn_of_nothing()
            if step == self._limit and self.begins_anew and run.goes_on(num_served) and not run.is_over:
                # Asked for one more than the limit, as of a loader without length: torch's would have read it.
                run.read_beyond()
            self._end(epoch, step, run)
        finally:
            run.is_iterated = False
            if run is not self._run:
                run.close()

    def _note_moved(self, at: tuple[int, int], is_moved: bool) -> None:
        """Warn where the pass that a resume begins with is begun a second time, by a hook or by Lightning 2.5.0."""
        is_again = not is_moved and at == self._moved_to and self.settings.is_checked and self._is_first
        if is_again and self._attributes is not None and self._attributes.are_changed:
            warnings.warn(
                f"{self.name} changes itself from pass to pass, and the first pass of the resume was begun twice: by a "
                "hook that looks at a batch, or by Lightning 2.5.0. The resume is not exact. Look at batches of a "
                "loader of its own, install a later version of Lightning, or give it state_dict and load_state_dict.",
                StatefulWarning,
                stacklevel=4,
            )
        self._moved_to = at if is_moved else None

    def _warn_if_set(self, names: list[str], though: str) -> None:
        if names and self.settings.is_checked:
            warnings.warn(
                f"{some_of(names)} was set when the first batch of the resume had been read, as in "
                f"on_train_start, though {though}: later batches are not what they would have been. Restore it in "
                "load_state_dict of a callback, or not at all.",
                StatefulWarning,
                stacklevel=4,
            )

    @property
    def _shares_workers(self) -> bool:
        return bool(self.loader.num_workers and self.loader.persistent_workers)

    def _begin(self, state: IterableState) -> StreamRun:
        run = self._run
        state = self._with_draws(state)
        if run is not None and run.is_iterated and self.begins_anew:
            if not self.is_read_twice:
                warnings.warn(
                    f"{self.name} is read by two iterations of its loader at once. A checkpoint knows only of the "
                    "later one, so a resume is not exact. Give each a loader and a dataset of its own.",
                    StatefulWarning,
                    stacklevel=4,
                )
            self.is_read_twice = True
            # From now on either may change the dataset between two passes of the other.
            self._watch = self._within = None
            if not (self._shares_workers or self._is_joined):
                # Both go on, as in torch.
                self._run = None
        return super()._begin(state)

    def _with_draws(self, state: IterableState) -> IterableState:
        """The state, in which ranks draw as they do; before the first pass they tell each other."""
        if self._is_joined and not self._knows_draws:
            of_ranks = generators_of_ranks(self.loader, self.name, self.options.timeout)
            if len(of_ranks) != self.topology.num_replicas:
                self._knows_draws = True
            else:
                self.note_draws(of_ranks)
        return replace(state, config=self.settings)

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the dataset stood."""
        super().begin_at(progress)
        self._moves_to = None

    def end_at(self, progress: Progress) -> None:
        """The epoch of a known progress ends there; the datasets are yet to be brought to where it has left them."""
        super().end_at(progress)
        if self._moves_to == (progress.epoch, progress.consumed):
            self._moves_to = progress.epoch + 1, 0

    def _load(self, progress: Progress) -> None:
        super()._load(progress)
        if says_how_ranks_draw(progress.details):
            self._set_draws(progress.details.get("alike", ()))
        self._moves_to, self._is_restored = (progress.epoch, progress.consumed), True
        self.expect_set(progress.details, is_within=progress.consumed > 0)
        self._stood = "" if self.topology.rank else self._stood

    def expect_set(self, details: Mapping[str, Any], *, is_within: bool) -> None:
        """See :meth:`StreamReader.expect_set`."""
        if self._watch is not None:
            self._watch.expect(details, is_within=is_within)
        if self._within is not None:
            self._within.expect(details, is_within=is_within)
        self._stood = "" if is_within else details.get("generators", "")
        # What was set before the first pass alone, of which there is no first value, does not count.
        first = details.get("first", {})
        set_between = {name: held for name, held in details.get("set", {}).items() if first.get(name)}
        by_hooks = {**details.get("set_within", {}).get("within", {}), **set_between}
        self.settings = replace(self.settings, set_by_hooks=dict(sorted(by_hooks.items())))
        if self._attributes is not None:
            self._attributes.set_by_hooks = by_hooks
        if self._copies is not None and self._moves_to != (0, 0):
            self._copies.expect(details.get("copies", {}))

    def note_restored(self) -> None:
        """Hooks that restore what a checkpoint has were called; those of an epoch may set something else.

        Without the stop these find a dataset of this process as the pass before has left it: it is brought there.
        """
        if not self._is_restored:
            return
        self._is_restored, at = False, self._moves_to
        if at is not None and not at[1] and not self.loader.num_workers:
            state = self._with_draws(self.state_at(*at))
            if has_state(self.dataset) and not state.is_here:
                for task in state.tasks(self.topology.rank):
                    self.settings.open(task).bring_early()
        if self._watch is not None:
            self._watch.note_restored()
        if self._within is not None:
            self._warn_if_set(self._within.note_restored(self.settings.set_by_hooks), _HAD_LOADED)

    def set_on_rank(self, epoch: int, step: int) -> dict[str, Any]:
        """See :meth:`StreamReader.set_on_rank`."""
        if not step and self._epoch == epoch - 1:
            self._note_cut()
        details = {} if self._watch is None else self._watch.state(within=step > 0)
        details |= {} if self._copied is None or step else self._copied.noted()
        within = {} if self._within is None else self._within.state(epoch, step)
        details |= {"set_within": within} if within else {}
        copies = {} if self._copies is None else self._copies.state()
        return {**details, "copies": copies} if copies else details

    def _note_cut(self) -> None:
        """The latest pass is left where it is, perhaps before its end: what has changed since was set by others."""
        if self._watch is not None and self._within is not None:
            self._watch.note_set(self._within.changed(with_told=False))

    def _note_own_state(self, watch: SetBetweenPasses, state: IterableState) -> None:
        """Try on a copy which attributes the state of the dataset's own restores, if it can be copied."""
        states = [slot["state"] if slot else None for slot in state.slots]
        if None in states[self.topology.rank :: state.num_replicas]:
            # A worker that had read nothing of the pass begins it with the dataset as it is here.
            return
        own = next(held["dataset"] for held in states if held)
        with suppress(Exception):
            copied = copied_with_shared_data(self.dataset)
            copied.load_state_dict(from_plain(own))
            watch.note_own_state(copied)

    def _beginning_of_run(self, epoch: int, step: int) -> IterableState:
        is_moved, self._moves_to = (epoch, step) == self._moves_to, None
        if self._shares_workers or not self.settings.stays:
            # Workers read copies of the dataset as it is now, or was when they were started.
            self.settings.warn_of_others(epoch, lives_on=self._shares_workers)
        if self._copied is not None and self._copied.stand_elsewhere(self._stood):
            warnings.warn(
                f"{self.name} holds a random generator that does not stand where it stood when the checkpoint was "
                "written, and of which each worker has a copy: the resume is not exact, unless each pass seeds it. "
                "Make it from a seed, or restore it in load_state_dict of a callback.",
                StatefulWarning,
                stacklevel=4,
            )
        self._stood = ""
        if self._copies is not None:
            self._copies.note_begin(is_started=self.worker_iterator is not None)
        if not step:
            self._note_cut()
        state = self.state_at(epoch, step)
        if self._watch is not None:
            if is_moved and step and self._watch.is_awaiting and has_state(self.dataset):
                self._note_own_state(self._watch, state)
            self._watch.note_begin()
        if self._within is not None:
            self._within.note_begin()
        self._epoch = epoch
        if not (epoch or step or self.options.exact):
            self._values_begun = self.values
        # The datasets of this process stand where the epochs before have left them.
        is_here = self.begins_anew and not step and not is_moved
        return replace(state, is_here=True) if is_here else state

    def _limit_after(self, state: IterableState) -> int:
        return self._limit - state.steps if self.begins_anew and self._limit < UNKNOWN else UNKNOWN

    def _next_pass(self, run: StreamRun) -> StreamRun:
        """The run of the next pass that has a batch on all ranks, within an epoch of so many steps."""
        for _ in range(MOST_EMPTY):
            # With where the pass before has left each worker: one that has given nothing yet may be asked for it.
            run = self._begin_after(run, replace(self._left(run), is_here=True))
            if run.has_next():
                return run
        raise self._gave_nothing()

    def _end(self, epoch: int, step: int, run: StreamRun | None = None) -> None:
        self.ended = epoch, step
        if self._watch is not None and run is not None:
            self._watch.note_end()
        if self._within is not None and run is not None:
            self._within.note_end()
        if not self.begins_anew:
            self.recent.copy(epoch + 1, 0, epoch, step)
            return
        if self._run is None or self._epoch != epoch or self._run.is_closed:
            state: IterableState = self.state_at(epoch, step)
            self.recent.note(epoch + 1, 0, state.following())
        else:
            self.recent.note(epoch + 1, 0, self._left(self._run))

    def state_at(self, epoch: int, step: int) -> IterableState:
        """The positions of all worker slots before ``step`` of ``epoch``; see :meth:`StreamReader.state_at`."""
        is_left = not step and (epoch, 0) not in self.recent and self._epoch == epoch - 1 and self.begins_anew
        if is_left and self._run is not None and not self._run.is_closed:
            # A loop has left the epoch before.
            return self._left(self._run)
        state: IterableState = super().state_at(epoch, step)
        return state

    def _left(self, run: StreamRun) -> IterableState:
        """The beginning of the pass after the one that a run reads, which is left where it is."""
        left: IterableState = run.left()
        begins = left.following(run.num_asked())
        if self._attributes is None or left.num_slots != 1 or begins.slots[0] is None or begins.slots[0]["begun"]:
            return begins
        # It is left before its end, of which a rank knows no more than of its own dataset.
        return begins.at(({**begins.slots[0], "begun": self._attributes.left(self.dataset)},))


def is_sized(loader: Any) -> bool:
    """Whether a loader, or an iterable of batches, says how many batches it has."""
    try:
        return len(loader) < UNKNOWN
    except (TypeError, NotImplementedError):
        return False
