"""DataLoaders over streams, which go on where the model stands, on any ranks and workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import DataLoader

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.core.skip import Skip, SkippingPlan
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.rng import keep_randomness, seed_or_default
from lightning_stateful.samplers.tracked_loader import TrackedLoader, say_begun_behind_end
from lightning_stateful.samplers.tracker import Tracker, detect_topology
from lightning_stateful.stream_loader.iterable_order import IterableOrder, is_sized
from lightning_stateful.stream_loader.options import IterableBatches, StreamOptions, batching_of
from lightning_stateful.stream_loader.order import StreamOrder
from lightning_stateful.stream_loader.plan import StreamEpochPlan
from lightning_stateful.stream_loader.reader import StreamReader
from lightning_stateful.stream_nodes.hugging_face import is_split_otherwise
from lightning_stateful.streams.stream import as_stream
from lightning_stateful.streams.worker_slot import StreamConfig
from lightning_stateful.user_loaders import Pickled, copied

_END = object()


class StreamLoader(TrackedLoader, Pickled, DataLoader[Any]):
    """Serves a stream so that a resume goes on at the very next batch.

    Ranks and workers read the stream's shards in even shares. Each rank publishes how far it has read in its shards,
    through the key-value store of the process group, so that every state has all of them, of the very same step; and
    all ranks stop at the same step, known one step ahead. On the same ranks and workers a resume goes on in exactly the
    same order; on others, what is left of the shards is assigned anew.

    An iterable dataset without shards divides itself, and needs the same ranks and workers within an epoch. If it has
    no ``state_dict`` either, it is read again up to where it stood.

    Args:
        loader: The user's loader; a copy of it is read, of its class and with its attributes.
        options: How it is read and served.

    Attributes:
        options: The same.
        seed: The seed, as given or found.
        tracker: Holds where the loader stands.

    State:
        The progress after the batches handed over, with where in its shards each worker slot stands; equal on all
        ranks.
    """

    state_name = "The loader's state"
    _divides_itself = False
    # The most batches of an epoch, by the length that a trainer has asked for first.
    _longest = UNKNOWN

    def __init__(self, loader: DataLoader[Any], options: StreamOptions | None = None) -> None:
        # Not torch's constructor: the copy has been constructed.
        self.__dict__["_original"] = copied(loader)
        vars(self._original).update(_iterator=None)
        self.options = options = StreamOptions() if options is None else options
        self.seed: int = seed_or_default(options.seed)
        self.seed_samples = options.seed_samples
        order = self._reader(options)
        self.tracker: Tracker = Tracker(
            order, num_replicas=options.num_replicas, rank=options.rank, accept=options.accept
        )

    def _reader(self, options: StreamOptions) -> StreamReader:
        """The reader of the loader's dataset: of a stream of shards, or of a dataset that divides itself."""
        config, dataset = options.config, self._original.dataset
        if config is None and is_dealt_out(dataset, detect_topology(options.num_replicas, options.rank)):
            stream: Any = as_stream(dataset, seed_samples=options.seed_samples)
            config = stream.config(**batching_of(self._original))
        if config is not None:
            return StreamOrder(self._original, options, config.seeded(self.seed))
        self._divides_itself = True
        return IterableOrder(self._original, options)

    def fresh_copy(self, **changes: Any) -> StreamLoader:
        """A loader of the same stream that nobody has read yet.

        Args:
            **changes: Other options; ranks only if this loader was not given its own.
        """
        if (self.options.num_replicas, self.options.rank) != (None, None):
            changes = {name: value for name, value in changes.items() if name not in ("num_replicas", "rank")}
        made: StreamLoader = type(self)(self._original, replace(self.options, **{"seed": self.seed, **changes}))
        if self.tracker.skipping is not None and not made.options.exact:
            made.tracker.skipping = self.tracker.skipping.fresh()
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # What reads for this loader stays here: a copy in another process begins anew, or where a state is loaded.
        loader = self if self.order.is_unread else self.fresh_copy()
        return super(StreamLoader, loader).__reduce_ex__(protocol)

    @property
    def order(self) -> StreamReader:
        """The reader of the batches, which offers plans as a :class:`~lightning_stateful.core.BatchOrder` does."""
        return cast(StreamReader, self.tracker.order)

    @property
    def goes_on_behind_limit(self) -> bool:
        """Whether an epoch that a trainer's limit has cut is followed by what comes behind the cut."""
        return not getattr(self.order, "begins_anew", False)

    @property
    def ended(self) -> tuple[int, int] | None:
        """The epoch whose end was found latest, and its steps."""
        return self.order.ended

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer; see :meth:`StreamReader.prepare`."""
        if self.tracker.skipping is not None:
            # A trainer that fetches a batch ahead has read over those that are left out, and its limit counts others.
            limit, lag = None, lag + self.tracker.skipping.longest
        self.order.prepare(label, limit=limit, lag=lag, repeats=repeats)
        if self.is_sized and self.options.steps_per_epoch is None:
            # As Lightning, which asks for the length once, reads no more in later epochs.
            self._longest = len(self._sized)

    def _reason_against_skip(self, skip: Skip) -> str:
        if skip.names_samples:
            return f"{self.order.name} is a stream, whose samples have no index. Pass ranges of batches, or filter it."
        return ""

    def begin_at(self, progress: Progress) -> str:
        """Begin a pass at a progress of which no state says where the stream stood; the stream's name."""
        self.order.begin_at(progress)
        return self.order.name

    def end_at(self, progress: Progress) -> None:
        """Let the epoch of a known progress end there; the next goes on from it."""
        self.order.end_at(progress)

    def config_of_ranks(self) -> dict[str, Any]:
        """The configuration as ranks compare it."""
        # By another name, because a difference between ranks' shards is not to be accepted.
        config, order_of_sources = dict(self.tracker.config), list(self.tracker.config.get("sources") or ())
        config["stream"] = config.pop("dataset", None) or config.pop("sources", None)
        return {**config, "order of sources": order_of_sources, **self._skip_of_ranks()}

    @property
    def most_tokens_a_step(self) -> int:
        """Tokens of packed documents that a step of all ranks may have."""
        config = self.stream_config
        if config is None or config.packing is None:
            return 0
        return config.packing.sequence_length * (config.batch_size or 1) * self.order.topology.num_replicas

    @property
    def stream_config(self) -> StreamConfig | None:
        """The settings by which a stream of shards is read; None of a dataset that divides itself."""
        return None if self._divides_itself else self.order.settings

    @property
    def numbers(self) -> Any:
        """The numbers of the samples in the latest batch, where they are kept; else None."""
        return self.order.given.numbers

    def plan_aside(self, epoch: int, *, of_copy: bool) -> None:
        """None: whatever iterates the loader begins a pass of the stream.

        Warns:
            StatefulWarning: A hook does so on a resume, before the pass that goes on (``of_copy``).
        """
        if of_copy and getattr(self.order, "begun_anew", None) is not None:
            warnings.warn(
                f"A hook has looked at a batch of {self.order.name} before the first one of the resume, which begins a "
                "pass of it that the run without the stop has not begun. If passes change the dataset, or it goes on "
                "at iter(), the resume is not exact. Look at batches of a loader of its own.",
                StatefulWarning,
                stacklevel=2,
            )

    def keep_indices(self) -> None:
        """Let batches say the numbers of their samples, where these have numbers."""
        self.order.number_samples()

    @property
    def has_each_once(self) -> bool:
        """Whether an epoch is a pass over the data; else it may begin in one pass and end in the next."""
        is_cut = self.options.steps_per_epoch or self.order.config().get("drop_last")
        return self.order.topology.num_replicas == 1 and not is_cut

    def remedy_for_steps(self, num_steps: int) -> str:
        """The way to give epochs as many steps, in words."""
        return f"pass steps_per_epoch={num_steps}"

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known beforehand."""
        return self.options.steps_per_epoch is not None or (self._divides_itself and is_sized(self._sized))

    @property
    def _sized(self) -> Any:
        """The part that knows its number of batches."""
        return self._original

    @property
    def resume_note(self) -> str:
        """A sentence on how a resume goes on."""
        return self.order.describe()

    def __len__(self) -> int:
        if self.is_sized and self.tracker.skipping is not None:
            return int(self.plan(self.tracker.latest_epoch).num_steps)
        return self._whole_length

    @property
    def _whole_length(self) -> int:
        """Batches of an epoch, those left out among them."""
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        if self.is_sized:
            return min(len(self._sized), self._longest)
        raise TypeError(f"{self.order.name} is a stream; how many batches it gives is known at its end.")

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return _Batches(self)

    def plan(self, epoch: int, progress: Progress | None = None) -> StreamEpochPlan | SkippingPlan:
        """The plan of an epoch, or of the rest of it, on the present ranks; the loader stays where it is.

        Raises:
            StateError: The stream cannot go on from there.
        """
        plan = self.order.plan(epoch, self.topology.num_replicas, progress)
        if self.is_sized:
            plan.length = self._whole_length
        found: StreamEpochPlan | SkippingPlan = self.tracker.without_skipped(plan, epoch, progress)
        return found

    def batches(self, plan: Any, first_step: int = 0, *, isolated: bool = True) -> Iterator[Any]:
        """Read the batches of this rank from a step of a plan to the end of the epoch, without moving the loader.

        Args:
            plan: A :class:`StreamEpochPlan` of this loader's.
            first_step: Where to begin.
            isolated: Whether the process's generators are put back after a batch that is read in this process; not
                where they are seeded then anyway.
        """
        if isinstance(plan, SkippingPlan):
            of_all: Any = plan.plan
            batches: Iterator[Any] = plan.kept_of(of_all.read(plan.all_before(first_step)), first_step, drains=True)
        else:
            batches = plan.read(first_step)
        # What is seeded in this process draws from the generators that it draws from.
        return _isolated(batches) if isolated and self.order.seeds_process else batches

    @property
    def _iterator(self) -> Any:  # torch's attribute, by which Lightning ends workers
        return self.order.worker_iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None:
            self.order.end_workers()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_original" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the user's loader has is set there: a worker_init_fn, persistent workers to be ended.
        if name in vars(self._original) and name not in vars(self) and name != "_iterator":
            setattr(self._original, name, value)
        else:
            object.__setattr__(self, name, value)


class IterableLoader(StreamLoader):
    """Serves the batches of an iterable that is no DataLoader: torchdata.nodes, WebDataset, DALI, or a user's own.

    Each rank serves its own, and goes on at what the model was trained on. Every epoch begins the iterable anew. If it,
    or what ``iter()`` makes of it, has ``state_dict`` and ``load_state_dict``, a resume goes on by the state that it
    had after the very batch; otherwise it is read again up to there. What it draws is not seeded. Attributes are those
    of the iterable.

    Args:
        loader: What :func:`of_batches` made of the iterable.
        options: How it is served; ``accept=("replay",)`` begins the iterable anew on a resume within an epoch where it
            would have to be read again.
    """

    def __init__(self, loader: DataLoader[Any], options: StreamOptions | None = None) -> None:
        dataset: Any = loader.dataset
        self.__dict__["iterable"] = dataset.iterable
        super().__init__(loader, replace(options or StreamOptions(), seed_samples=False))

    @property
    def _sized(self) -> Any:
        return self.iterable

    def remedy_for_steps(self, num_steps: int) -> str:
        """The way to give epochs as many steps, in words."""
        return "let it give as many batches"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(iterable := vars(self).get("iterable"), name):
            return getattr(iterable, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        # What its constructor sets is its own.
        is_known = "tracker" not in own or name in own or hasattr(type(self), name)
        if is_known or not hasattr(self.iterable, name):
            super().__setattr__(name, value)
        else:
            setattr(self.iterable, name, value)


class _Batches:
    """One pass over a loader, which goes on behind a batch that could not be read, as torch does.

    Where nothing is left of an epoch that was resumed, it is the pass over the next one.
    """

    def __init__(self, loader: StreamLoader) -> None:
        self._loader, self._batches = loader, loader.tracker.iterate(loader.batches)
        # Whether nothing has come of an epoch that was resumed within; None until it is read.
        self._may_be_over: bool | None = None

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        tracker = self._loader.tracker
        if self._may_be_over is None:
            self._may_be_over = tracker.progress.consumed > 0
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._may_be_over:
                raise
            say_begun_behind_end("dataset", tracker.progress.epoch)
            self._batches = tracker.iterate(self._loader.batches)
            batch = next(self._batches)
        except Exception:
            self._batches = tracker.iterate(self._loader.batches, resumes=True)
            raise
        finally:
            self._may_be_over = False
        return batch


def is_dealt_out(dataset: Any, topology: Topology) -> bool:
    """Whether a dataset is a stream of shards, and not the part that its user has made of one for some other rank."""
    is_part = is_split_otherwise(dataset, topology.num_replicas, topology.rank)
    return not is_part and as_stream(dataset) is not None


def of_batches(iterable: Any) -> DataLoader[Any]:
    """A DataLoader that hands over the batches of an iterable as they are.

    Args:
        iterable: The iterable.
    """
    return DataLoader(IterableBatches(iterable), batch_size=None, collate_fn=_unchanged)


def _isolated(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches, of which none leaves a trace in the process's random generators."""
    while True:
        with keep_randomness():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _unchanged(batch: Any) -> Any:
    return batch
