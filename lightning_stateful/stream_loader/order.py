"""Reads a stream of shards pass by pass, each in one run or more, in even shares of all ranks."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.errors import ShardError, StatefulWarning, some_of
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.iterable_datasets.outside_values import digests_reached
from lightning_stateful.iterable_datasets.pass_history import digest_of_sample
from lightning_stateful.iterable_datasets.set_by_hooks import SetBetweenPasses
from lightning_stateful.iterable_datasets.set_within_passes import SetWithinShards
from lightning_stateful.stream_loader.options import StreamOptions
from lightning_stateful.stream_loader.reader import MOST_EMPTY, StreamReader
from lightning_stateful.stream_loader.recent_states import ServedState
from lightning_stateful.stream_loader.stream_run import StreamRun
from lightning_stateful.stream_loader.worker_slots import draws_in_collation
from lightning_stateful.stream_nodes.document_packer import packed_otherwise
from lightning_stateful.stream_nodes.hugging_face import is_hugging_face
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.streams.stream import Stream
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import StreamConfig

_log = logging.getLogger("lightning.pytorch.lightning_stateful")
# Readings of each shard, on average, from which on a user is told.
_MANY_READS = 1.5


class StreamOrder(StreamReader):
    """Reads a stream of shards.

    An epoch is a pass over the stream unless it is limited, and then the next goes on from there. A pass is read in one
    run or more: where the first rank has nothing left, what the others have is shared evenly, until no step happens on
    all ranks.

    Args:
        loader: The user's loader, which nobody has read yet.
        options: How it is read and served.
        settings: How the stream is read, but for the options.
    """

    kind: ClassVar[str] = "stream"
    state_kind = StreamState

    def __init__(self, loader: DataLoader[Any], options: StreamOptions, settings: StreamConfig) -> None:
        super().__init__(loader, options)
        self._has_warned = self._has_said = self._has_warned_of_epoch = False
        self._empty: set[str] = set()  # Sources that were warned of.
        if not options.seed_samples:
            sources = {name: replace(source, seed_samples=False) for name, source in settings.sources.items()}
            settings = replace(settings, sources=sources)
        if settings.mixing is not None and options.exact:
            # Each sample once.
            settings = replace(settings, mixing=replace(settings.mixing, stop="all_exhausted"))
        self.settings: StreamConfig = settings.at(options.path)
        # Copies in workers that persist are not reached from here.
        is_watched = not (options.exact or "nondeterministic" in options.accept or loader.persistent_workers)
        values = partial(digests_reached, self.dataset, loader.collate_fn)
        how: dict[str, Any] = {"in_workers": loader.num_workers > 0, "values": values}
        self._watch = SetBetweenPasses(self.dataset, **how) if is_watched else None
        self._within: SetWithinShards | None = None
        if self._watch is not None and not loader.num_workers:
            # What is set within a pass does not reach workers.
            self._within = SetWithinShards(self.dataset, values, self._watch.as_begun()[0], loader.batch_size)
        self._epoch_shown = _epoch_shown_by(self.dataset)
        found = [source.shards.warning for source in self.settings.sources.values() if source.shards.warning]
        if found:
            warnings.warn(" ".join(dict.fromkeys(found)), StatefulWarning, stacklevel=4)

    @property
    def seeds_process(self) -> bool:
        """Whether the generators of this process are seeded while batches are read in it."""
        draws = self.settings.seeds_process or draws_in_collation(self.loader.collate_fn)
        return super().seeds_process and draws

    @cached_property
    def first_samples(self) -> dict[str, str]:
        """Digests of the first samples of graphs of nodes, which differ among ranks if a dataset divides itself."""
        found: dict[str, str] = {}
        if self.loader.num_workers:
            # There it would find no other ranks.
            return found
        for source in self.settings.sources.values():
            if source.shards.hides_workers:
                reader = ShardReader(source.shards, [0], 0, seed=self.own_seed)
                # What cannot be read is raised where it is read to be trained on.
                with keep_randomness(), suppress(ShardError), closing(reader):
                    reader.reset()
                    samples = reader.next_many(1)
                    name = f"the first sample of {source.shards.name(0)}, of which each rank has to read all samples,"
                    found[name] = digest_of_sample(samples)
        return found

    def describe(self) -> str:
        """A sentence on how the stream is divided and resumed."""
        shards = [source.shards for source in self.settings.sources.values()]
        reasons = self.reasons_to_read_again()
        number = sum(one.num_shards for one in shards)
        said = (
            f"{self.name} is a stream: its {number} shards are shared evenly among ranks and workers, and a resume "
            f"{f'reads it again, because {reasons}' if reasons else 'goes on within it'}.{self._note_of_epochs()}"
        )
        return " ".join(dict.fromkeys([said, *(one.note for one in shards if one.note)]))

    def reasons_to_read_again(self, *, if_drawn: bool = False) -> str:
        """Why a resume reads samples again, if need be once functions have drawn; empty if it does not."""
        shards = [source.shards for source in self.settings.sources.values()]
        return "; ".join(sorted({one.reread or (if_drawn and one.reread_if_drawn) or "" for one in shards} - {""}))

    def _warn_of_empty_sources(self, state: StreamState) -> None:
        """Say once of each source of a mixture that a whole pass over it, which has ended, gave nothing."""
        for name, source in state.config.sources.items():
            assigned, number = state.assignments[name], source.shards.num_shards
            is_whole = not assigned.begun and len(assigned.whole) == number
            is_empty = all(slot is not None and name in slot["gone"] for slot in state.slots)
            if is_whole and is_empty and name not in self._empty and not self.options.exact:
                self._empty.add(name)
                warnings.warn(
                    f"Source {name!r} of {self.name} has given nothing in pass {state.epoch}, out of {number} "
                    "shards: the others are trained on without it. Look for shards that are empty or missing, or a "
                    "filter that keeps no sample.",
                    StatefulWarning,
                    stacklevel=3,
                )

    def _warn_of_many_reads(self, state: StreamState) -> None:
        """Say once what it costs where there are more worker slots than shards."""
        for name, slots in state.slices.items():
            num_shards = state.config.sources[name].shards.num_shards
            if self._has_warned or self.options.exact or num_shards >= state.num_slots:
                continue
            slices = [(one.of.epoch, shard) for slot in slots for one in slot for shard in one.of.shards]
            times = Counter(slices)
            if len(slices) <= _MANY_READS * len(times):
                continue
            self._has_warned = True
            several, of = sum(1 for number in times.values() if number > 1), f" of source {name!r}" if name else ""
            workers = num_shards // state.num_replicas
            fewer = f"num_workers={workers}, or " if workers else ""
            warnings.warn(
                f"{state.num_replicas} ranks with num_workers={self.loader.num_workers} are {state.num_slots} worker "
                f"slots, more than the {num_shards} shards{of} that {self.name} has. So {several} shards are read by "
                f"several slots, each of which keeps its part of the samples: {len(slices) / len(times):.1f} times as "
                f"much work for reading and decoding. Use {fewer}more and smaller shards (Hugging Face: "
                "dataset.reshard() for parquet files).",
                StatefulWarning,
                stacklevel=2,
            )

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The progress under other settings, packing among them; see :meth:`StreamReader.convert`."""
        if progress.details and _packing_in(saved) != _packing_in(self.config()):
            progress = replace(progress, details=packed_otherwise(progress.details))
        return super().convert(progress, saved)

    def note_restored(self) -> None:
        """Hooks that restore what a checkpoint has were called; those of an epoch may set something else."""
        if self._watch is not None:
            self._watch.note_restored()

    def set_on_rank(self, epoch: int, step: int) -> dict[str, Any]:
        """See :meth:`StreamReader.set_on_rank`: what hooks have set that its functions read."""
        details = {} if self._watch is None else self._watch.state(within=step > 0)
        within = {} if self._within is None else self._within.state(epoch, step)
        return {**details, "set_within": within} if within else details

    def expect_set(self, details: Mapping[str, Any], *, is_within: bool) -> None:
        """See :meth:`StreamReader.expect_set`."""
        if self._watch is not None:
            self._watch.expect(details, is_within=is_within)
        if self._within is not None:
            self._within.expect(details, is_within=is_within)

    @property
    def values(self) -> dict[str, str]:
        """Digests of what its functions reach now."""
        return {} if self._watch is None else self._watch.held()

    @property
    def values_as_begun(self) -> tuple[dict[str, str], dict[str, str]]:
        """Digests of what its functions reach as it was built, and as the latest pass began."""
        return ({}, {}) if self._watch is None else self._watch.as_begun()

    def _load(self, progress: Progress) -> None:
        super()._load(progress)
        self.expect_set(progress.details, is_within=progress.consumed > 0)

    def number_samples(self) -> None:
        """Let batches say the numbers of their samples, unless workers have the settings already."""
        if self.is_unread:
            self.settings = self.settings.numbered()

    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch; see :meth:`StreamReader.read`."""
        self._forget_end(epoch)
        self._warn_if_told_another(epoch)
        if self._watch is not None:
            self._watch.note_begin()
        if self._within is not None:
            self._within.note_begin()
        run = self._run_at(epoch, step)
        num_served = run.num_served
        looks_ahead = self.options.steps_per_epoch is None
        while step < self._limit:
            if self._within is not None:
                self._within.note_outside()
            if not run.goes_on(num_served):
                # Another iteration has taken over what is read.
                run = self._run_at(epoch, step)
            if not run.has_next():
                run = self._with_batches(run, at_start=not step)
                if run.is_over:
                    break
            batch, self.given = run.next(), run.given
            step += 1
            self.recent.note(epoch, step, ServedState(run))
            is_last = step == self._limit
            if looks_ahead and not is_last:
                if not run.has_next():
                    run = self._shared_if_over(run)
                    if not run.is_over:
                        self.recent.note(epoch, step, ServedState(run))
                is_last = run.is_over
            num_served = run.num_served
            if self._within is not None:
                self._within.note_read(epoch, step)
            if is_last:
                self._end(epoch, step, run)
                yield batch
                return
            yield batch
        if not step and self._limit:
            self._warn_of_nothing()
        self._end(epoch, step, run)

    def _warn_if_told_another(self, epoch: int) -> None:
        """Warn once where a hook has told the dataset another epoch than the one that begins."""
        shown, before = _epoch_shown_by(self.dataset), self._epoch_shown
        self._epoch_shown = shown
        if shown in (None, before, epoch) or self._has_warned_of_epoch or self.options.exact:
            return
        self._has_warned_of_epoch = True
        warnings.warn(
            f"Something else has called set_epoch({shown}) of {self.name}, which is read in epoch {epoch}: of a stream "
            "of shards the trainer's epoch alone decides the order, in a resume too. Leave set_epoch out, or tell it "
            "trainer.current_epoch; for another order pass another seed.",
            StatefulWarning,
            stacklevel=3,
        )

    def _begin(self, state: StreamState) -> StreamRun:
        self._warn_of_many_reads(state)
        return super()._begin(state)

    def _with_batches(self, run: StreamRun, *, at_start: bool) -> StreamRun:
        """The run that follows in an epoch where one is over: over what other ranks have left, or the next pass."""
        run = self._shared_if_over(run)
        for _ in range(MOST_EMPTY):
            # A limited epoch may begin where a pass ends; a whole pass in which a rank has nothing is no epoch.
            has_none = self._is_joined and not run.num_served and not run.begun.steps + run.begun.steps_before
            # Where no rank has anything, the epoch is over, as it is on a single rank.
            has_none = has_none and (run.has_next() or not run.gave_nothing)
            begins = at_start and (self._limit != UNKNOWN or has_none)
            if run.has_next() or not (self.options.steps_per_epoch or begins):
                return run
            run = self._shared_if_over(self._begin_after(run, self._following(run)))
        if run.has_next():
            return run
        raise self._gave_nothing()

    def _shared_if_over(self, run: StreamRun) -> StreamRun:
        """A run over what other ranks have left, where a run is over; itself where sharing that gives no step."""
        if not run.has_next() and not run.is_broken and (self._is_joined or run.begun.num_replicas == 1):
            self._warn_of_empty_sources(run.final_state)
        while not run.has_next() and self._is_joined:
            shared = run.final_state.shared_anew()
            if shared is None:
                break
            run = self._begin_after(run, shared)
        return run

    def _following(self, run: StreamRun) -> StreamState:
        """The beginning of the pass after a run that is over."""
        final: StreamState = run.final_state
        ends_alone = self.options.exact or (final.num_replicas > 1 and not self._is_joined)
        following: StreamState = self.beginning_of(final.epoch + 1) if ends_alone else final.following()
        return following

    def _end(self, epoch: int, step: int, run: StreamRun | None = None) -> None:
        self.ended = epoch, step
        if self._watch is not None and run is not None:
            self._say_of_changes(self._watch.note_end())
        if self._within is not None:
            self._within.note_end()
        if self._repeats:
            self.recent.note(epoch + 1, 0, self.beginning_of(0))
        elif run is not None and step != self._limit:
            self.recent.note(epoch + 1, 0, self._following(run))
        else:
            self.recent.copy(epoch + 1, 0, epoch, step)

    def _say_of_changes(self, names: Collection[str]) -> None:
        if names and not self._has_said:
            self._has_said = True
            _log.info(
                f"{some_of(sorted(names))} was changed within an epoch, and functions of {self.name} read it. They are "
                "run on up to 32 samples ahead: if a hook changed it, and not these functions, that comes into force "
                "some batches later than without this package. Let hooks set it between two epochs."
            )


def _epoch_shown_by(dataset: Any) -> int | None:
    """The epoch that a dataset of Hugging Face's, or of this package, was told last; None of another."""
    if is_hugging_face(dataset):
        return getattr(dataset, "epoch", None)
    return dataset.told_epoch if isinstance(dataset, Stream) else None


def _packing_in(config: Mapping[str, Any]) -> list[Any]:
    """The settings of packing in a configuration, of each source."""
    sources = config.get("sources", {})
    return [config.get("packing"), *(sources[name].get("packing") for name in sorted(sources))]
