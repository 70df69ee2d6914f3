"""Iterable datasets that divide themselves, and iterables of batches: the batches that one worker of a rank reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch.utils.data import get_worker_info

from lightning_stateful.core.seeding import mixed_seed
from lightning_stateful.errors import PositionError, Remark, ShardError, StateError, some_of
from lightning_stateful.generators.rng import OwnRandomness, Randomness, keep_randomness
from lightning_stateful.iterable_datasets.dataset_parts import SetSinceBuilt, parts_of
from lightning_stateful.iterable_datasets.earlier_passes import EarlierPasses
from lightning_stateful.iterable_datasets.iterable_task import (
    FRESH,
    IterableTask,
    begin_datapipe,
    name_of_dataset,
)
from lightning_stateful.iterable_datasets.kept_values import KeptValues
from lightning_stateful.iterable_datasets.pass_history import (
    INEXACT,
    NUM_FIRST,
    PERHAPS,
    FirstSamples,
    digest_of_sample,
    history_of,
)
from lightning_stateful.iterable_datasets.rank_draws import UnseededDraws, seed_reads
from lightning_stateful.samplers.state_codec import from_plain
from lightning_stateful.stream_nodes.hugging_face import forget_loaded
from lightning_stateful.stream_nodes.nodes import NodeState
from lightning_stateful.stream_nodes.own_state import OF_STATES, has_state, is_due, iterator_at, own_state
from lightning_stateful.user_samplers.iterated_sampler import ToldEpochs

# So many batches are read again from the beginning of a pass, in place of the state behind the first one.
_FROM_BEGINNING = 2


@dataclass(frozen=True, kw_only=True)
class IterableConfig:
    """Settings by which an iterable dataset is read, pickled into workers together with the dataset.

    Attributes:
        dataset: The dataset, or the iterable of batches.
        seed: The user's seed.
        sample_seed: Seeds torch, NumPy and ``random`` before each batch is read, by (seed, pass, slot, batch of the
            slot); None to leave them.
        batch_size: Samples in a batch; None to hand over samples one by one.
        is_batched: Whether the loader collates batches.
        drop_last: Leave out the samples of a batch that is not full.
        gives_batches: Whether it is an iterable of batches, whose samplers are told the epoch too.
        stays: Whether the same object is read in every pass, and not a copy in a worker that ends with the pass.
        is_checked: Whether its samples tell that it is read again as before.
        beginning: The state that it had before anybody read it, as plain data; None if it had none.
        kinds_alike: Kinds of the process's generators whose seeds are the same on all ranks, those of rank 0.
        told: Tells the epoch to those that have ``set_epoch``.
        set_by_hooks: Digests of attributes that hooks had set, by name, from when the state was taken that is loaded.
        built: Of one with a state, digests of its attributes as it was built.
        early: The slot of a dataset in this process that was brought to the end of a pass, before hooks of the next.
    """

    dataset: Any
    seed: int = 0
    sample_seed: int | None = None
    batch_size: int | None = 1
    is_batched: bool = True
    drop_last: bool = False
    gives_batches: bool = False
    stays: bool = True
    is_checked: bool = True
    beginning: Any = None
    kinds_alike: frozenset[str] = frozenset()
    told: list[ToldEpochs] = field(default_factory=list, compare=False)
    set_by_hooks: Mapping[str, str] = field(default_factory=dict, compare=False)
    built: Mapping[str, str] = field(default_factory=dict, compare=False)
    early: list[IterableSlot] = field(default_factory=list, compare=False)
    # It finds out its worker from torch.utils.data.get_worker_info().
    hides_workers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.told:
            self.told.append(ToldEpochs(self.holders()))

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        described = {"dataset": {"class": self.name}, "seed": self.seed, "drop_last": self.drop_last}
        return described if self.batch_size is None else {**described, "batch_size": self.batch_size}

    @property
    def name(self) -> str:
        """The dataset's class."""
        return name_of_dataset(self.dataset)

    def name_of_slot(self, rank: int, worker: int) -> str:
        """The dataset's class, rank and worker, for errors."""
        return f"{self.name} (rank {rank})" if self.gives_batches else f"{self.name} (rank {rank}, worker {worker})"

    @property
    def counts_passes(self) -> bool:
        """Whether earlier passes may decide what a pass gives, and no state says so."""
        return self.stays and not has_state(self.dataset)

    def open(self, task: IterableTask) -> IterableSlot:
        """Open the reader of a worker slot's batches."""
        early = self.early.pop() if self.early else None
        return early if early is not None and early.is_of(task) else IterableSlot(self, task)

    def set_epoch(self, epoch: int) -> None:
        """Tell all that have ``set_epoch`` the epoch, but those that somebody else has told another."""
        with OwnRandomness(mixed_seed(self.seed, epoch)):  # On all ranks and workers alike.
            self.told[0].tell(self.holders(), epoch)
        self.warn_of_others(epoch)

    def warn_of_others(self, epoch: int, *, lives_on: bool = False) -> None:
        """Warn where somebody else has told the dataset of this process another epoch, and what lives on in workers."""
        self.told[0].warn(self.holders(), epoch, lives_on=lives_on)

    def holders(self) -> list[Any]:
        """The dataset, and the samplers that an iterable of batches has, as Lightning looks for them."""
        batches = getattr(self.dataset, "batch_sampler", None) if self.gives_batches else None
        sampler = getattr(self.dataset, "sampler", None) if self.gives_batches else None
        return [self.dataset, sampler, getattr(batches, "sampler", None)]


class IterableSlot:
    """The batches that one worker of a rank reads of an iterable dataset, by ``iter()`` as torch reads it.

    A dataset that stands where the pass begins is just begun. Otherwise it is brought there: by its state, or that of
    its iterator, as torchdata does; or its earlier passes are begun again, and this one is read up to there.

    Args:
        config: How the dataset is read.
        task: What the slot reads.

    State:
        ``batches`` and ``item``, the batches and samples given in the pass; ``exhausted`` once the end was met, and
        ``over`` once it was asked for more, with the samples ``left_out`` then by ``drop_last``. ``state``:
        ``{"dataset": its state_dict(), "iterator": that of its iterator}``, each or None, that was taken ``since``
        batches ago; of one that is its own iterator the latter alone. ``first``, a digest of the batches since, but for
        the first of several, or of the first one of a pass; ``generators``, one of random generators that it holds;
        ``kept``, what else it keeps. Without a state: ``samples``, digests of some samples; ``passes``, of each
        pass before, in the same process, the batches read, as ``-1 - batches`` if read to its end; ``changes``, whether
        the end of one of them has changed the dataset; ``draws``, whether samples were drawn from a random generator in
        it; ``outside``, digests of what passes have changed outside of it, from before the first pass; ``built``,
        ``begun`` and ``left``, see :class:`~.pass_history.ChangedAttributes`. Up to the second batch ``ended``, the
        same of the pass before, with ``number`` (the batch behind the state) and ``more`` (batches never handed over).

    Attributes:
        said: Texts that a user should read, which whoever shows them takes out.

    Raises:
        ShardError: The dataset could not be brought to a state.
        Exception: It could not be read; its own error.
        PositionError: It does not give again what it gave before.
        StateError: Its state cannot be kept in a checkpoint.
    """

    goes_on = True

    def __init__(self, config: IterableConfig, task: IterableTask) -> None:
        self._config, self._dataset, self._task, self.epoch = config, config.dataset, task, task.epoch
        self._held: NodeState = {**FRESH, **(task.state or {})}
        self._history = history_of(self._dataset)
        self._samples: Any = None
        self._iterator: Any = None
        self.said: list[str] = []
        self._draws = UnseededDraws(self._dataset, gives_batches=config.gives_batches)
        self._is_exhausted = False
        # Samples of a last batch that is not full, left out by drop_last.
        self._left_out = 0
        # Samples of the pass, where that was found to have begun already, and where generators stood behind them.
        self._found: list[Any] = []
        self._drawn: Randomness | None = None
        self._number = 0  # Of the pass, in the history.
        # Whether the pass before has given the same again, where it was read again and this one has not begun yet.
        self._is_same: bool | None = None
        self._set_here: SetSinceBuilt | None = None
        # The state after the latest batch, and that after the one before: either is kept two batches later.
        self._next_state: NodeState | None = None
        self._waiting: NodeState | None = None

    def __iter__(self) -> IterableSlot:
        return self

    def __next__(self) -> list[Any]:
        if self._held["over"]:
            self._history.is_behind |= self._samples is None and not self._task.is_here
            raise StopIteration
        is_brought = (self._samples is None or self._is_same is not None) and not self._task.is_here
        try:
            if self._samples is None or self._is_same is not None:
                self._open()
                is_brought = False
            batch = self.read_batch(self.epoch, self._held["batches"])
        except Exception as error:
            where = f"{self._name()} could not be read at its sample {self._held['item']}"
            if is_brought and not isinstance(error, StateError):
                kind = StateError if isinstance(error, OF_STATES) else ShardError
                raise kind(f"{where}, where a state was taken: {type(error).__name__}: {error}") from error
            # As it is, for a loop that catches it; Python 3.10 has no notes.
            if hasattr(error, "add_note"):
                error.add_note(where)
            raise
        self._note(batch)
        if not batch:
            raise StopIteration
        return batch

    def state(self) -> NodeState:
        """The slot's position after the latest batch: plain data that later batches leave as it is."""
        return self._held

    def reading(self, dataset: Any) -> IterableSlot:
        """The same for a copy of the dataset."""
        return IterableSlot(replace(self._config, dataset=dataset, told=[]), self._task)

    def bring_early(self) -> None:
        """Bring a dataset of this process to where the pass before has left it, ahead of hooks that change it then."""
        held = self._held
        if held["state"] is None and held["ended"] is not None and held["ended"]["state"] is not None:
            with self._history.seeded_as_in(self.epoch - 1), suppress(Exception):
                self._read_pass_before(held["ended"])
                self._config.early.append(self)

    def is_of(self, task: IterableTask) -> bool:
        """Whether it reads a task."""
        return self._task == task

    def close(self) -> None:
        """Let go of the iterator."""
        self._samples = self._iterator = None

    def _open(self) -> None:
        held, is_here = self._held, self._task.is_here and not self._history.is_behind
        self._history.is_behind = False
        if not is_here:
            # The state behind the first batch would be used unproven, or by a batch that may be drawn otherwise.
            again = {**held, "state": None, "since": held["batches"]} if self._can_begin_again(held) else held
            self._bring(again)
        if self._samples is None:
            self.begin_pass(self.epoch)
        if not is_here and again["since"]:
            self._read_again(again)
        self._is_exhausted = self._is_exhausted or (held["exhausted"] and not held["since"])
        passes = self._history[: self._number] if self._config.counts_passes else []
        ended = held["ended"] if held["batches"] <= _FROM_BEGINNING else None
        self._held = {**held, "ended": ended, "passes": passes, **self._history.noted()}

    def _can_begin_again(self, held: NodeState) -> bool:
        """Whether the one or two batches given behind a known beginning of the pass can be read again from there."""
        is_known = not (has_state(self._dataset) and self._config.stays and self.epoch) or held["ended"]
        # Without seeds another order may be drawn there; and hooks may have set something for the pass.
        can_be = held["state"] is not None and self._config.sample_seed is not None and not self._config.set_by_hooks
        return bool(0 < held["batches"] <= _FROM_BEGINNING and can_be and is_known)

    def begin_pass(self, epoch: int) -> None:
        """Begin a pass as torch does, with the dataset as it stands."""
        self._config.set_epoch(epoch)
        self._seed(epoch, 0)
        if self._history.has_loaded:
            forget_loaded(parts_of(self._dataset))
        self._note_pass()
        begin_datapipe(self._dataset, self._config.seed, epoch, self._task.share)
        self._set_iterator(iter(self._dataset))

    def _note_pass(self) -> None:
        self._number = len(self._history)
        if self._config.counts_passes:
            self._history.note_begin(self._dataset)
        self._history.append(0)

    def _set_iterator(self, iterator: Any) -> None:
        self._samples, self._iterator, self._is_exhausted = iterator, iterator, False
        how = {"stays": self._config.stays, "is_checked": self._config.is_checked}
        self._kept = KeptValues(self._dataset, iterator, self._history, **how)

    def _bring(self, held: NodeState) -> None:
        """Bring the dataset to where the pass begins, or to the state in it."""
        if self._config.counts_passes:
            with keep_randomness():  # This pass draws from where the process stands, as without the stop.
                earlier = EarlierPasses(self, self._config, self._history, held)
                self.said += [f"{self._name()} {one}" for one in earlier.begin()]
        if held["state"] is not None:
            self._load(held["state"], self.epoch)
        elif has_state(self._dataset) and held["ended"] is not None and held["ended"]["state"] is not None:
            self._end_pass_before(held["ended"])
        elif self._history and self._config.beginning is not None and not held["passes"]:
            # It was read in this process, and is to begin as one that nobody has read.
            self._dataset.load_state_dict(from_plain(self._config.beginning))

    def _load(self, state: NodeState, epoch: int) -> None:
        """Begin a pass at a state, as torchdata does: that of the dataset, ``iter()``, that of the iterator."""
        self._config.set_epoch(epoch)
        self._note_pass()
        self._history.has_loaded = True
        self._set_iterator(iterator_at(self._dataset, state))

    def _end_pass_before(self, ended: NodeState) -> None:
        """Bring the dataset to where the pass before has left it."""
        if self._is_same is None:
            with self._history.seeded_as_in(self.epoch - 1):
                self._read_pass_before(ended)
        (is_same, self._is_same), number = (self._is_same, None), ended["number"]
        if ended["over"] and not self._is_exhausted:
            # From a state at its end some begin anew at once, and others once they have found nothing. What is found is
            # the first sample of the pass, and draws as such.
            self._seed(self.epoch, 0)
            found = self.read_samples(1)
            if found and is_same:
                self._found, self._drawn = found, Randomness.now()
                return
        is_at_end = ended["over"] and self._is_exhausted
        if not is_same:
            set_here = [] if self._set_here is None else self._set_here.names
            self._say_other(number, [*self._config.set_by_hooks] or set_here, is_at_end=is_at_end)
        elif is_at_end:
            self.said += self._kept.said(ended, self._name())
        self.close()

    def _read_pass_before(self, ended: NodeState) -> None:
        """Load the state of the pass before, and read again what it gave since, to where it was left."""
        epoch, number, since = self.epoch - 1, ended["number"], ended["since"]
        # What hooks have set in a dataset that a worker has a copy of is for the epoch that comes.
        is_late = get_worker_info() is not None and not self._held["batches"]
        built = {} if self._history else self._config.built
        set_here = SetSinceBuilt(self._dataset, built, None if is_late else self._config.set_by_hooks)
        self._set_here = set_here if is_late else None
        self._load(ended["state"], epoch)
        self._is_same = self._is_read_again(ended, epoch, number)
        for later in range(number + since, number + since + ended["more"]):
            if not self.read_batch(epoch, later):
                break
        if not since + ended["more"] and not ended["over"] and inspect.isgenerator(self._samples):
            self.said.append(
                f"{self._name()} was left behind the first batch of pass {epoch}, with its state of there. A "
                "generator that uses that state only when it is read begins the next pass with it, so a resume from "
                "here may not be exact. Let an epoch have more batches than workers, or resume within one."
            )
        self.read_samples(ended["left_out"])
        many = number + since + ended["more"]
        self._history.lasting |= ended.get("kept", {}).keys()
        self._history[self._number] = -1 - many if ended["over"] else many
        set_here.put_back()

    def _say_other(self, number: int, by_hooks: Sequence[str], *, is_at_end: bool) -> None:
        """Say that the pass before has given other samples; if it ends where it did, hooks may be the cause."""
        said = f"{self._name()} gives other samples from batch {number} of pass {self.epoch - 1} on"
        if by_hooks and is_at_end:
            self.said.append(Remark(f"{said}, perhaps because hooks have set {some_of(by_hooks)} since: {PERHAPS}"))
        else:
            self.said.append(f"{said}: {PERHAPS}")

    def _read_again(self, held: NodeState) -> None:
        """Read, and leave out, what was given since the state, or the beginning of the pass."""
        if self._held["state"] is not None:
            self._is_read_again(held, self.epoch, held["batches"] - held["since"])
            return
        found, first = 0, FirstSamples()
        for number in range(held["batches"]):
            batch = self.read_batch(self.epoch, number)
            if not batch:
                raise PositionError(
                    f"{held['batches']} batches of {self._name()} were used, but now it ends after {number}. Read the "
                    "same data, or resume from another checkpoint."
                )
            first = first.behind(batch, found)
            found += len(batch)
            self._watch_contents(found, is_first=not number)
        if self._config.is_checked:
            where, is_seeded = f"{self._name()} begins pass {self.epoch}", self._config.sample_seed is not None
            how = {"is_as_long": found == held["item"], "is_seeded": is_seeded}
            self.said += first.compare(held["samples"], where, known=self.said, **how)

    def _is_read_again(self, held: NodeState, epoch: int, number: int) -> bool:
        """Read again what was given since a state of the dataset's own, and say if that is other in this pass.

        Returns:
            Whether it is the same.
        """
        first = None
        for later in range(number, number + held["since"]):
            batch = self.read_batch(epoch, later)
            if number:
                self._history.note_loaded(batch, is_first=later == number)
            if later > number or held["since"] == 1:
                first = self._digest_of(batch, first)
            if epoch == self.epoch:
                self._take_state_again(later + 1)
        is_same = not held["since"] or not self._config.is_checked or first == held["first"]
        if not is_same and epoch == self.epoch:
            self.said.append(f"{self._name()} gives other samples from batch {number} of pass {epoch} on: {INEXACT}")
        if is_same and not held.get("more") and not held["over"]:
            self.said += self._kept.said(held, self._name())
        return is_same

    def read_batch(self, epoch: int, number: int) -> list[Any]:
        """The samples of a batch; fewer at the end, and then none."""
        size = 1 if self._config.batch_size is None or not self._config.is_batched else self._config.batch_size
        if self._is_exhausted:
            return []
        self._seed(epoch, number)
        batch, self._found = self._found, []
        if batch and self._drawn is not None and self._config.sample_seed is not None:
            self._drawn.restore()
        batch += self.read_samples(size - len(batch))
        if len(batch) == size or not self._config.drop_last:
            return batch
        self._left_out = len(batch)
        return []

    def read_samples(self, number: int) -> list[Any]:
        """The next samples, up to ``number``; not by islice(), because some begin anew at every iter()."""
        samples: list[Any] = []
        try:
            while len(samples) < number:
                samples.append(next(self._samples))
        except StopIteration:
            self._is_exhausted = True
        return samples

    def _note(self, batch: list[Any]) -> None:
        """Note where the slot stands after a batch, or at the end of the pass."""
        held = self._held
        number, item = held["batches"] + bool(batch), held["item"] + len(batch)
        self._history[self._number] = number if batch else -1 - number
        self.said += [*self._draws.said(self._name()), *self._kept.late(self._name())]
        changes: NodeState = {"batches": number, "item": item, "over": not batch, "since": number}
        changes |= {"exhausted": self._is_exhausted, "left_out": self._left_out}
        self._watch_contents(item, is_first=not held["batches"])
        changes |= self._history.noted()
        if has_state(self._dataset) or has_state(self._iterator):
            self._compare_with_loaded(batch)
            changes |= {**self._state_after(batch), **self._kept.noted(held)}
        elif self._config.is_checked and batch:
            changes["samples"] = list(FirstSamples(*held["samples"] or ()).behind(batch, held["item"]))
        self._held = {**held, **changes}

    def _watch_contents(self, item: int, *, is_first: bool) -> None:
        """Note what the dataset holds after the first batch of a pass, and whether that has changed by its end."""
        if self._config.counts_passes:
            is_early = self._held["batches"] < NUM_FIRST
            self._history.watch(self._dataset, item, is_first=is_first, is_end=self._is_exhausted, is_early=is_early)

    def _state_after(self, batch: list[Any]) -> NodeState:
        """A state of the dataset's own, from before the batch but for the first one, and a digest of what is behind."""
        held = self._held
        if held["state"] is None:
            # From some there is none before.
            return {
                "state": own_state(self._dataset, self._iterator, self._name()),
                "since": 0,
                "first": self._digest_of(batch, None) if batch else None,
            }
        if not batch:
            return {"since": held["since"]}
        since = held["since"] + 1
        # Of several batches the first one is not compared: numbers may have been drawn on the way there.
        changes: NodeState = {"since": since, "first": self._digest_of(batch, held["first"] if since > 2 else None)}
        if self._waiting is not None:
            changes = {"state": self._waiting, "since": 2, "first": self._digest_of(batch, None)}
        self._take_state(changes.get("state") or held["state"], changes["since"])
        return {**changes, "ended": held["ended"] if held["batches"] < _FROM_BEGINNING else None}

    def _take_state(self, state: Any, since: int) -> None:
        """Take the dataset's state if it is due, so many batches after the one that is kept."""
        self._waiting, size = self._next_state, None if self._config.gives_batches else self._config.batch_size or 1
        kept, since = (state, since) if self._waiting is None else (self._waiting, 1)
        self._next_state = own_state(self._dataset, self._iterator, self._name()) if is_due(kept, since, size) else None

    def _take_state_again(self, number: int) -> None:
        """Take the states that were taken before a resume behind one of the last batches, of which so many are read."""
        state, since = self._held["state"], self._held["since"]
        behind = number - self._held["batches"] + since
        if behind >= max(since - 1, 1):
            self._take_state(state, behind)

    def _compare_with_loaded(self, batch: list[Any]) -> None:
        """Say if a pass after one that has ended begins where a state was loaded."""
        number = self._held["batches"]
        if number and number == (self._task.state or {}).get("batches"):
            self._history.note_loaded(batch, is_first=False)
        elif number < 2 and self._config.is_checked and self._history.is_where_loaded(batch, number):
            self.said.append(f"{self._name()} begins pass {self.epoch} where the resume began: {INEXACT}")

    def _digest_of(self, batch: list[Any], before: str | None) -> str:
        # What is drawn and not seeded may be augmented otherwise.
        is_drawn = self._config.sample_seed is None and self._draws.are_found()
        return digest_of_sample(batch[:NUM_FIRST], before, only_labels=is_drawn)

    def _seed(self, epoch: int, number: int) -> None:
        seed_reads(self._config.sample_seed, self._config.kinds_alike, self._task, epoch, number)
        self._draws.note_seeded(self._config.sample_seed)

    def _name(self) -> str:
        return self._config.name_of_slot(self._task.rank, self._task.worker)
