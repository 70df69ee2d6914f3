"""A DataLoader over a map-style dataset that can begin at any batch of an epoch and has a state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sized
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import UNKNOWN, BatchOrder, EpochPlan, Progress
from lightning_stateful.core.samples import SampleBatchOrder, ShuffledOrder
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.core.skip import Skip
from lightning_stateful.errors import ConfigurationError, RankMismatchError, UnsupportedLoaderError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loaders.batch_reader import BatchReader, given, options_of
from lightning_stateful.loaders.description import (
    LoaderDescription,
    LoaderSettings,
    changed_in_state,
    changed_since,
    compare_lengths,
    describe_loader,
    order_of_length,
    refuse_other_length,
    users_own,
    warn_unless_restored,
)
from lightning_stateful.loaders.own_iteration import OwnTracker, Watch
from lightning_stateful.loaders.planned_batches import (
    ChosenBatch,
    CutArguments,
    OwnPasses,
    ServedIndices,
    known_steps,
    steps_before,
)
from lightning_stateful.loaders.source_datasets import with_packed
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.rank_exchange import exchanged
from lightning_stateful.samplers.tracked_loader import TrackedLoader, say_begun_behind_end
from lightning_stateful.samplers.tracker import Tracker, detect_topology
from lightning_stateful.state import accepted_names, differences
from lightning_stateful.user_loaders import (
    Pickled,
    SharedAttributes,
    copied,
    is_torchdatas,
    iterates_as_torch,
    users_loader,
)
from lightning_stateful.user_samplers.iterated_sampler import ToldEpochs
from lightning_stateful.user_samplers.sampler_memory import ASIDE
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class StatefulLoader(TrackedLoader, Pickled, DataLoader[Any]):
    """A map-style DataLoader that resumes at the very next batch.

    A pass begins at the first ``next()``, so a state may still be loaded after ``iter()``. The state counts the batches
    that were handed over, not those that workers have fetched. Once the last batch of an epoch is handed over, the
    state is that of the next epoch. A pass that is broken off is followed by the next epoch too, as in torch by another
    shuffle, unless a state was loaded or ``set_epoch`` called since.

    All ranks get the same number of batches, and every sample of the epoch is served once (see
    :class:`~lightning_stateful.core.steps.StepRule` for the tail).

    Args:
        dataset: A map-style dataset with a length.
        batch_size: Samples in a batch of one rank; None to pass the sampler's items to the dataset as they are.
        shuffle: True for another random order in each epoch, False for the dataset's order.
        sampler: In place of ``shuffle``: any sampler, perhaps in a
            :class:`~lightning_stateful.user_samplers.ddp_wrapper.DDPSamplerWrapper`, or a
            :class:`~lightning_stateful.core.samples.SampleOrder`.
        batch_sampler: In place of ``batch_size``, ``sampler`` and ``drop_last``: any batch sampler, perhaps wrapped
            likewise, or a :class:`~lightning_stateful.core.order.BatchOrder`. If it is one of this package, its batch
            sizes are part of the configuration, and its own progress is ignored: load the state into the loader.
        drop_last: Leave out the last step of an epoch if it is not full.
        seed: Chooses the orders and the randomness of samples; by default the seed of Lightning's ``seed_everything``,
            or 0.
        path: The loader's name among several that are served side by side; each draws from (seed, path).
        num_replicas: Data-parallel ranks; by default taken from the process group at the first batch, or 1.
        rank: This rank; by default taken from the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, path, epoch,
            batch).
        exact: For evaluation: never repeat a sample unless there are fewer samples than ranks.
        accept: Names of differences between a state and the present data to let pass on load: ``"dataset.length"``.
        skip: Batches to leave out, ``{2: range(300, 350)}``, or samples by their index or a function: see docs/skip.md.
        **options: Any other option of :class:`torch.utils.data.DataLoader`.

    State:
        The progress after the batches that were handed over: plain data, equal on all ranks, good for any number of
        ranks and workers and, where the loader cuts samples into batches, any batch size.

    Raises:
        ConfigurationError: An argument is out of range.
        ValueError: Arguments contradict each other; torch's own.
        UnsupportedLoaderError: The dataset is iterable, or the sampler yields something else whenever it is begun.
    """

    is_map_style = True
    path: str
    seed: int
    tracker: OwnTracker | Tracker
    state_name = "The loader's state"

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        seed: int | None = None,
        path: str = "",
        num_replicas: int | None = None,
        rank: int | None = None,
        seed_samples: bool = True,
        exact: bool = False,
        accept: Collection[str] = (),
        skip: Any = None,
        **options: Any,
    ) -> None:
        by_sampler = sampler is not None or batch_sampler is not None
        if isinstance(dataset, IterableDataset) or not (by_sampler or hasattr(dataset, "__len__")):
            raise UnsupportedLoaderError(
                f"{type(dataset).__name__} has no random access by index; StatefulLoader needs a map-style dataset "
                "with __getitem__ and __len__. StreamDataModule and patch_dataloader serve iterable datasets."
            )
        if not options.pop("in_order", True) and options.get("num_workers"):
            raise ConfigurationError(
                "in_order=False hands batches over in no fixed order, as its workers finish them. Leave it out."
            )
        if exact and isinstance(batch_sampler, (StatefulBatchSampler, BatchOrder)):
            raise ConfigurationError(
                "exact=True never repeats a sample, which whole batches cannot promise; leave it out, or evaluate with "
                "batch_size in place of batch_sampler."
            )
        seed, accept = seed_or_default(seed), accepted_names(accept)
        if shuffle and not by_sampler:
            # torch's sampler cannot shuffle a dataset without samples.
            shuffle, sampler = False, ShuffledOrder(len(dataset), seed)
        loader = DataLoader(
            dataset,
            batch_size=batch_size if batch_size is None else as_int("batch_size", batch_size, least=1),
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last and batch_size is not None,
            **options,
        )
        description = describe_loader(loader, seed=seed, exact=exact, accept=accept, drop_last=drop_last)
        how: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "accept": accept, "exact": exact}
        settings = LoaderSettings(seed=seed, path=path, seed_samples=seed_samples, **how)
        self.set_up(loader, description, settings)
        self.leave_out(skip)

    def set_up(
        self,
        loader: DataLoader[Any],
        description: LoaderDescription,
        settings: LoaderSettings,
        holder: tuple[Any, str] | None = None,
        *,
        is_read: bool = False,
    ) -> None:
        """Construct the loader from another one, with its dataset, options and attributes.

        A copy of it reads the batches; a ``holder``, with the name of the attribute, is iterated in its place. The
        user's own object ``is_read`` without this package, if what is set on it later is to come into force.
        """
        # Not torch's constructor: the loader has been constructed. Nor is anything the original's yet.
        vars(self).update(options_of(loader), dataset=loader.dataset, generator=loader.generator)
        # Whether a data module has made it for the Trainer that asks, which reads this very loader, on its own ranks.
        self.is_for_trainer = False
        # Whether the ranks have compared what they have; a Trainer's do before they train.
        self._is_compared = False
        # None also where a checkpoint has what set_epoch of the dataset has set.
        self.told = None if settings.exact else ToldEpochs([loader.dataset])
        self._reader: BatchReader | None = None
        self.seed, self.path, self.seed_samples = settings.seed, settings.path, settings.seed_samples
        self._own_seed = loader_seed(settings.seed, settings.path)
        self._trains, self._keeps_indices = not settings.exact, False
        if (settings.num_replicas, settings.rank) != (None, None):
            description = description._replace(num_replicas=settings.num_replicas, rank=settings.rank)
        # Without the path: from it, the same loader is built for another one.
        self.description = description
        order, dataset = description.order.adapted(path=settings.path), loader.dataset
        if isinstance(order, WrappedSampler):
            ranks = detect_topology(description.num_replicas, description.rank)
            order.meet(ranks.num_replicas, ranks.rank, is_given=description.num_replicas is not None)
            self.told = None if order.facts.hands_epoch_on else self.told
        original = loader._original if isinstance(loader, StatefulLoader) else loader
        self._holder = holder or getattr(loader, "_holder", None) if isinstance(loader, StatefulLoader) else holder
        is_own = self._holder is not None or not (iterates_as_torch(original) or is_torchdatas(original))
        self._watch = Watch() if is_own and not settings.exact else None
        self._passes = OwnPasses(order, partial(_num_replicas, self), self._watch) if is_own else None
        self._track(order, dict.fromkeys([*description.accept, *settings.accept]), original)
        # A wrapped sampler looks at the dataset's length itself.
        self._length = len(dataset) if isinstance(dataset, Sized) and not isinstance(order, WrappedSampler) else None
        self._lists["length"] = self._length
        if isinstance(loader, StatefulLoader):
            if loader.tracker.skipping is not None and not settings.exact:
                self.tracker.skipping = loader.tracker.skipping.fresh()
            # What a subclass of StatefulLoader has beside.
            vars(self).update({name: value for name, value in vars(loader).items() if name not in vars(self)})
        users = users_loader(loader) if isinstance(loader, StatefulLoader) else original
        if self._holder is not None:
            users = self._holder[0] if is_read else copy.copy(self._holder[0])
            self._holder = users, self._holder[1]
        self._users: Any = users if is_read or self._holder is not None else None
        self._original: DataLoader[Any] = copied(original)
        if self._holder is None:
            SharedAttributes(users, self._original).to_copy()

    def _track(self, order: BatchOrder, accept: Iterable[str], original: DataLoader[Any]) -> None:
        """Make the tracker of an order, and the samplers that yield the indices which it hands over."""
        description, config = self.description, self.description.config(order, self.dataset)
        kind = Tracker if self._watch is None else OwnTracker
        self.tracker = kind(
            order,
            config if self._watch is None else {**config, "iteration": "own"},
            num_replicas=description.num_replicas,
            rank=description.rank,
            accept=tuple(accept),
        )
        # The lists of the dataset, as they were seen last.
        self._lists: dict[str, Any] = {}
        self.tracker.changed = partial(changed_in_state, order, self.dataset, self._lists)
        if isinstance(self.tracker, OwnTracker) and self._watch is not None:
            self.tracker.watch, self.tracker.length_of = self._watch, self.own_length
            self.tracker.batch_size = description.batch_size
        size, drop_last = description.batch_size, description.drop_last
        whole, samplers = description.has_whole_batches, (original.sampler, original.batch_sampler)
        indices, served = [
            ServedIndices(self.tracker, users_own(sampler), flat=flat, is_iterated=isinstance(order, WrappedSampler))
            for sampler, flat in zip(samplers, (whole or size is not None, False), strict=True)
        ]
        batches: Any = served if whole else None if size is None else BatchSampler(indices, size, drop_last)
        self._cuts = CutArguments(batches)
        # torch guards these against changes.
        vars(self).update(batch_size=size, drop_last=drop_last, sampler=indices, batch_sampler=batches)

    @property
    def is_plain(self) -> bool:
        """See :class:`TrackedLoader`."""
        return self.description.is_plain

    @property
    def resume_note(self) -> str:
        """Sentences on how a wrapped sampler, and an ``__iter__`` of the user's, are resumed; empty for others."""
        notes = [self.order.resume_note] if isinstance(self.order, WrappedSampler) else []
        if self._watch is not None:
            given_by = type(self._original if self._holder is None else self._holder[0]).__qualname__
            notes.append(
                f"Batches are counted as {given_by}.__iter__ gives them. Where it gave one for each of DataLoader's in "
                "order, a resume begins at the next; otherwise it reads the epoch again up to there."
            )
        return " ".join(filter(None, notes))

    def _reason_against_skip(self, skip: Skip) -> str:
        if self._watch is not None:
            return "the loader iterates by itself, and only it knows which batches it gives. Leave them out there."
        if skip.names_samples and not (isinstance(self.order, SampleBatchOrder) and self.order.is_indexed):
            return (
                f"batches of the kind {self.order.kind!r} are composed of other samples than single ones of one "
                "dataset. Leave samples out of the dataset, with torch.utils.data.Subset, or pass ranges of batches."
            )
        return ""

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank: of the one begun last, or chosen since, also when it is resumed.

        Raises:
            TypeError: The sampler has no ``len()``.
        """
        # Of a sampler without len() no epoch is asked, nor is it told one.
        return known_steps(self.plan(self.tracker.latest_epoch) if self.is_sized else None)

    def follow_length(self) -> bool:
        """See :meth:`TrackedLoader.follow_length`."""
        dataset: Any = self.dataset
        order, own = (order_of_length(one, self._length, dataset) for one in (self.order, self.description.order))
        if order is None:
            return False
        compare_lengths(dataset, self.path)
        self._length, self.description = len(dataset), self.description._replace(order=own or order)
        self.tracker.plan_by(order, self.description.config(order, dataset))
        self.tracker.changed = partial(changed_in_state, order, dataset, self._lists)
        return True

    def begin_in(self, epoch: int) -> None:
        """Begin with an epoch, as a loader that is built anew in training; others begin with the first."""
        if isinstance(self.order, WrappedSampler) and not self.order.memory.passes:
            self.order.memory.first_epoch = epoch

    def plan_aside(self, epoch: int, *, of_copy: bool) -> tuple[EpochPlan, int] | None:
        """See :meth:`TrackedLoader.plan_aside`."""
        order = self.order
        if not isinstance(order, WrappedSampler):
            return self.plan(epoch, None if of_copy else Progress(epoch=epoch, cycle=ASIDE)), 0
        if of_copy:
            order = order.replaced(sampler=order.copied().sampler, repeats_first_epoch=True)
        return order.plan(epoch, self.topology.num_replicas, Progress(epoch=epoch, cycle=ASIDE)), 0

    def changed(self) -> dict[str, Any]:
        """Changes to the dataset and a user's sampler since the loader was built, as in a state."""
        return changed_since(self.order, self.dataset, self._lists, self.tracker.config)

    def warn_unless_restored(self) -> None:
        """Warn, once, of what had been changed when a loaded state was taken, and is as it was built."""
        saved, self.tracker.loaded_changes = self.tracker.loaded_changes, {}
        if saved:
            warn_unless_restored(self.order, self.dataset, self.tracker.config, saved, self.changed())

    @property
    def is_sized(self) -> bool:
        """Whether the number of batches of an epoch is known before its end."""
        order = self.order
        return order.is_sized if isinstance(order, WrappedSampler) else self.plan(0).num_steps != UNKNOWN

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return _LoaderIterator(self)

    def report_of(self, plan: EpochPlan, steps: int) -> dict[str, Any]:
        """Counts of what the epoch has served after some steps of a plan, packed documents among them."""
        return with_packed(plan.report_after(steps), self.dataset, self.order, plan, steps)

    def batches(
        self, plan: EpochPlan, first_step: int = 0, *, isolated: bool = True, looks_ahead: bool = False
    ) -> Iterator[Any]:
        """Read the batches from a step of a plan to its end, without moving the loader.

        See :meth:`~lightning_stateful.loaders.batch_reader.BatchReader.read`.
        """
        refuse_other_length(self.order, self._length, self.dataset)
        if first_step >= plan.num_steps:
            return iter(())
        if self.told is not None:
            self.told.warn([self.dataset])
        self._cuts.compare()
        if isinstance(self.order, WrappedSampler):
            self.order.hand_epoch_on(plan.epoch)
        options = options_of(self)
        reader = self._reader_with(options)
        ranks, how = self.topology, {"isolated": isolated, "looks_ahead": looks_ahead}
        before = steps_before(self.order, plan, ranks.num_replicas) if self.num_workers else 0
        return reader.read(plan, ranks.rank, first_step, steps_before=before, **how)

    def keep_indices(self) -> None:
        """From the next pass on keep the indices of the batch that was given last."""
        self._keeps_indices = True

    @property
    def indices(self) -> Any:
        """The indices of the batch that was given last, where they are kept; None for one that has none."""
        return None if self._reader is None else self._reader.indices

    @property
    def reader(self) -> BatchReader | None:
        """What reads its batches; None before the first one."""
        return self._reader

    def read_twice(self, plan: EpochPlan | ChosenBatch, *how: Any) -> list[Any] | None:
        """Read twice the first batch of a plan, and move nothing: see :meth:`~.batch_reader.BatchReader.read_twice`."""
        return self._reader_with(options_of(self)).read_twice(plan, *how)

    def _reader_with(self, options: dict[str, Any]) -> BatchReader:
        if self._reader is None or not self._reader.reads_by(options):
            seed = self._own_seed if self.seed_samples else None
            how: dict[str, Any] = {"is_batched": self.batch_sampler is not None, "original": self._original}
            how |= {"watch": self._watch, "holder": self._holder, "watches_collate": self._trains}
            how |= {"users": self._users, "own_seed": self._own_seed}
            self._reader = BatchReader(self.dataset, seed, options, **how, passes=self._passes)
        if self._keeps_indices:
            self._reader.keep_indices()
        return self._reader

    def own_length(self, plan: EpochPlan) -> int:
        """Batches that the user's loader says it gives of a plan."""
        if self._holder is None and type(self._original).__len__ is DataLoader.__len__:
            return plan.num_steps
        return self._reader_with(options_of(self)).length(plan)

    def compare_ranks(self) -> None:
        """Make sure, once, that all processes of the group deal out the same data."""
        if self._is_compared or self.tracker.num_replicas is not None:
            return
        self._is_compared = True
        mine, skip = self.tracker.state_dict(Progress()), self._skip_of_ranks()
        mine["config"] |= skip
        states = exchanged(f"the data of {type(self.dataset).__qualname__} {self.path}".rstrip(), mine) or []
        found = [differences(state, mine, accept=self.accept, fingerprints=False) for state in states]
        if differing := next(filter(None, found), []):
            said = "; ".join(f"{one.path}: {one.saved!r} and {one.present!r}" for one in differing)
            raise RankMismatchError(
                f"The ranks have other data, so that samples would be lost ({said}). Build the same dataset with the "
                "same settings on every rank: the loader deals out the samples. Where each rank has a part of its own, "
                "as split_dataset_by_node gives it: patch_dataloader(loader, num_replicas=1, rank=0). Where they hold "
                f"the same all the same: accept=({differing[0].path!r},)."
            )

    @property
    def _iterator(self) -> Any:
        # Where torch keeps persistent workers, and Lightning looks to end them after training.
        return None if self._reader is None else self._reader.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if self._reader is not None:
            self._reader.loader._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        original = vars(self).get("_original")
        if original is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        users = users_loader(self)
        return getattr(users if hasattr(users, name) else original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What this class knows nothing of belongs to the user's loader that it was made of.
        users = users_loader(self) if "_original" in vars(self) else None
        is_users = users is not None and type(users) is not DataLoader
        if is_users and name not in vars(self) and not hasattr(StatefulLoader, name):
            setattr(users, name, value)
        else:
            super().__setattr__(name, value)


def _num_replicas(loader: StatefulLoader) -> int:
    return loader.topology.num_replicas


class _LoaderIterator:
    """The iterator of a loader; behind an error the next call goes on.

    As in torch a batch whose samples cannot be read is left out, and counts as handed over. Where reading itself fails,
    as when a worker has died, the batch is tried again.
    """

    def __init__(self, loader: StatefulLoader) -> None:
        self._loader: StatefulLoader | None = loader
        self._may_be_over = False
        self._tracker, self._read = loader.tracker, partial(loader.batches, looks_ahead=True)
        self._batches = self._tracker.iterate(self._read)

    def __iter__(self) -> _LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self._loader is not None:
            self._loader.compare_ranks()
            # Tells a sampler the epoch that comes, which its len() may follow from.
            self._may_be_over = self._tracker.progress.consumed > 0
            if not self._may_be_over:
                self._loader.follow_length()
            self._loader.warn_unless_restored()
            if isinstance(self._loader.order, WrappedSampler):
                self._loader.order.memory.note_user(None)
            self._loader = None
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._may_be_over:
                raise
            # Nothing was left of an epoch that was resumed behind its last batch.
            self._may_be_over = False
            say_begun_behind_end("sampler", self._tracker.progress.epoch)
            self._batches = self._tracker.iterate(self._read)
            batch = next(self._batches)
        except Exception:
            self._batches = self._tracker.iterate(self._read, resumes=True)
            raise
        self._may_be_over = False
        return given(batch)
