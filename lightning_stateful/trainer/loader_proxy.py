"""Proxies between Lightning's loops and the user's loaders: of hooks that return loaders, and of loaders themselves.

A loop asks its ``_data_source`` for loaders. :func:`intercept` replaces that by an :class:`InterceptedSource`, which
hands the request to the callback; a :class:`Structure` takes apart the lists and dicts that hooks return. What the loop
gets and iterates in place of each DataLoader is a :class:`LoaderProxy`.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_stateful.core.order import EpochPlan
from lightning_stateful.errors import ConfigurationError, InvalidLoaderError
from lightning_stateful.loaders.batch_reader import FailedBatch
from lightning_stateful.loaders.combined_loaders import MODES
from lightning_stateful.loaders.patching import AnyLoader, is_iterable
from lightning_stateful.loops.lightning import (
    CombinedLoader,
    TrainerFn,
    _check_dataloader_iterable,
    _DataLoaderSource,
    _IndexBatchSamplerWrapper,
    _is_leaf_or_primitive_container,
    _worker_check,
    pl,
)
from lightning_stateful.loops.loop_progress import LATER
from lightning_stateful.samplers.tracked_loader import TrackedLoader
from lightning_stateful.trainer.told_samplers import RECORDS, ToldSamplers, shown_in_place
from lightning_stateful.user_loaders import TORCHS, WorkerRestarts, has_of_its_own, users_loader

Request = Callable[[], Any]

# How a warning of Lightning's begins that is wrong of our loaders.
_DOUBT = "Your `IterableDataset` has `__len__` defined"


@dataclass(frozen=True)
class Structure:
    """Loaders by their path, and the way back to the structure that they came in.

    Attributes:
        loaders: The loaders by path, with dots; a single loader has the path ``""``.
        spec: What torch needs to build the structure again.
        mode: Mode of the CombinedLoader that they came in; None if there was none.
    """

    loaders: dict[str, Any]
    spec: Any
    mode: str | None

    @classmethod
    def of(cls, raw: Any) -> Structure:
        """Take apart what a hook returned."""
        combined = raw if isinstance(raw, CombinedLoader) else None
        # As Lightning has it, a list of numbers is a loader of them, and so is an empty list.
        leaves, spec = pytree.tree_flatten_with_path(
            raw if combined is None else combined.iterables, is_leaf=_is_leaf_or_primitive_container
        )
        mode = None if combined is None else combined._mode
        paths = [_path(keys) for keys, _ in leaves]
        # Different keys may give the same path: 0 and "0", or "a.b" and a "b" within "a". These are written by repr.
        loaders = {_path(keys, str if paths.count(_path(keys)) == 1 else repr): leaf for keys, leaf in leaves}
        return cls(loaders, spec, mode)

    def rebuilt(self, loaders: Mapping[str, Any]) -> Any:
        """The same structure of other loaders, by path."""
        tree = pytree.tree_unflatten([loaders[path] for path in self.loaders], self.spec)
        return tree if self.mode is None else CombinedLoader(tree, self.mode)  # type: ignore[arg-type]  # its own mode


def _path(keys: Any, text: Callable[[Any], str] = str) -> str:
    return ".".join(text(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


class InterceptedSource(_DataLoaderSource):
    """A source of loaders whose answer passes through a function.

    The loops ask their source whenever they (re)build loaders: from a data module, from hooks of a LightningModule, or
    for loaders that were passed to ``fit``. What passes here is what the loops use.

    Args:
        original: The loop's source.
        intercept: Gets the request and answers it.
        loop: The loop; the workers of loaders that it has are ended when it gets others.
    """

    def __init__(self, original: _DataLoaderSource, intercept: Callable[[Request], Any], loop: Any = None) -> None:
        super().__init__(original.instance, original.name)
        self.intercept = intercept
        self._loop = loop

    def dataloader(self) -> Any:
        """Answer the loop's request for loaders."""
        try:
            loaders = self.intercept(self.request)
        except BaseException:
            _undo_patches()
            raise
        if self._loop is not None:
            _end_workers(self._loop._combined_loader)
            _advise(self._loop.trainer, loaders, self.name)
        return loaders

    def request(self) -> Any:
        """The user's own loaders, returned by a hook or passed to the trainer."""
        return super().dataloader()


def intercept(
    trainer: pl.Trainer, training: Callable[[Request], Any], evaluation: Callable[[str, Request], Any]
) -> None:
    """Let all loader requests of a trainer's loops pass through two functions, once however often it is called.

    Args:
        trainer: The trainer, with its sources attached.
        training: Gets the request for training loaders.
        evaluation: Gets the stage (``"val"``, ``"test"`` or ``"predict"``) and its request.
    """
    for stage, loop in _loops(trainer):
        function = training if stage == "train" else partial(evaluation, stage)
        if isinstance(loop._data_source, InterceptedSource):
            loop._data_source.intercept = function
        else:
            loop._data_source = InterceptedSource(loop._data_source, function, loop)


def release(trainer: pl.Trainer) -> None:
    """Undo :func:`intercept`."""
    for _, loop in _loops(trainer):
        source = loop._data_source
        if isinstance(source, InterceptedSource):
            loop._data_source = _DataLoaderSource(source.instance, source.name)


def _loops(trainer: pl.Trainer) -> list[tuple[str, Any]]:
    """The loops that ask for loaders, with the stage of each."""
    return [
        ("train", trainer.fit_loop),
        ("val", trainer.fit_loop.epoch_loop.val_loop),
        ("val", trainer.validate_loop),
        ("test", trainer.test_loop),
        ("predict", trainer.predict_loop),
    ]


def request_training_loaders(trainer: pl.Trainer) -> Any:
    """Ask the user's side for the training loaders, as the fit loop would."""
    source = trainer.fit_loop._data_source
    return source.request() if isinstance(source, InterceptedSource) else source.dataloader()


def refuse_no_loaders(trainer: pl.Trainer, structure: Structure) -> None:
    """Refuse what Lightning would refuse to train on, by the hook that returned it.

    Raises:
        InvalidLoaderError: Part of it cannot be iterated.
        ConfigurationError: A CombinedLoader's mode is for evaluation only.
    """
    source = trainer.fit_loop._data_source
    for loader in structure.loaders.values():
        if is_iterable(loader):
            continue
        try:
            _check_dataloader_iterable(loader, source, TrainerFn.FITTING)
        except TypeError as error:
            mend = "Is a return missing?" if loader is None else "Return a DataLoader, or a list or dict of them."
            raise InvalidLoaderError(f"{error} {mend}") from None
    if structure.mode is not None and structure.mode not in MODES:
        module = source.instance if source.is_module() else trainer
        origin = f"{type(module).__name__}.{source.name if source.is_module() else 'fit'}()"
        raise ConfigurationError(
            f"The training loaders of {origin} are a CombinedLoader of the mode {structure.mode!r}, which is for "
            f"evaluation. Training has the modes {', '.join(map(repr, MODES))}."
        )


def discard_training_loaders(trainer: pl.Trainer) -> None:
    """Throw away the loaders that the fit loop has built, and end their workers, so that it asks for them anew."""
    fit_loop: Any = trainer.fit_loop
    if fit_loop._combined_loader is None:
        return
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    # Lightning's own teardown fails on a fetcher that has been torn down.
    fit_loop._combined_loader = fit_loop._data_fetcher = None


def is_iterated_by_loop(trainer: pl.Trainer, iterator: Any) -> bool:
    """Whether an iterator of a training proxy is the fit loop's, and none that a hook has made to look at a batch."""
    combined: Any = trainer.fit_loop._combined_loader
    running = None if combined is None else combined._iterator
    return running is None or any(one is iterator for one in running.iterators)


def in_hook(trainer: pl.Trainer, name: str) -> bool:
    """Whether the trainer is calling a hook of its callbacks or module."""
    return trainer.lightning_module._current_fx_name == name


def _undo_patches() -> None:
    """Undo Lightning's patches of torch's classes, which it leaves in place where a hook raises an error."""
    for base in (DataLoader, BatchSampler):
        for kind in (base, *get_all_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if f"__old{name}" in vars(kind):
                    setattr(kind, name, getattr(kind, f"__old{name}"))
                    delattr(kind, f"__old{name}")


def _advise(trainer: pl.Trainer, loaders: Any, name: str) -> None:
    """Give Lightning's advice on workers, which it has for a DataLoader only."""
    for proxy in Structure.of(loaders).loaders.values():
        if isinstance(proxy, LoaderProxy):
            _worker_check(trainer, proxy.users_loader, name)


def _end_workers(combined: CombinedLoader | None) -> None:
    """End the workers of our loaders that are replaced; references in a circle would keep them alive for long."""
    if combined is None:
        return
    proxies = [leaf for leaf in combined.flattened if isinstance(leaf, LoaderProxy)]
    for proxy in proxies:
        proxy.starts_early = bool
    if combined._iterator is not None and len(proxies) == len(combined.flattened):
        # A pass that was broken off has workers too. iter() drops it; the new pass starts none before its first batch.
        iter(combined)
    for proxy in proxies:
        proxy.end_workers()


def _arguments_of(shown: Any) -> dict[str, Any]:
    """The arguments of a user's loader, and of a batch sampler of torch's, that were read when it was patched."""
    if isinstance(shown, TrackedLoader):
        return {}
    held = getattr(shown, "__dict__", {})
    found = {name: held.get(name) for name in ("collate_fn", "worker_init_fn", "num_workers", "batch_sampler")}
    batches = found["batch_sampler"]
    # A batch sampler of the user's is iterated itself, so what is set on it comes into force.
    if type(batches) is BatchSampler:
        names = ("batch_size", "drop_last", "sampler")
        found |= {f"batch_sampler.{name}": getattr(batches, name) for name in names}
    return found


class LoaderProxy:
    """An iterable over a loader that asks where to begin at the first ``next()`` of every pass.

    It is no DataLoader, so Lightning neither injects a sampler nor rebuilds it. Its attributes are those of the
    stateful loader. Only ``sampler`` and ``batch_sampler``, for hooks that look at them, are those of the user's
    loader, or those that Lightning would have put in their place.

    Args:
        loader: The loader.
        locate: Called at the first ``next()`` of a pass. Returns the plan and the step of it to begin at, or None if
            the loader is exhausted.
        after_read: Called after a batch is read and before it is handed over, and when there is no further one, which
            Lightning asks for ahead where it cannot know.
        isolated: Whether the process's generators are put back after a batch that is read in this process.
        keeps_indices: Also offer the indices of each batch, as Lightning's prediction writers want them.
        original: The user's loader, of which ``loader`` was made.
        overfits: Show a sampler that goes through the dataset in order, as Lightning does with ``overfit_batches``.
        is_dealt_out: Show a DistributedSampler on a single rank too, as Lightning does under DDP.
        length: Called for the steps of the epoch that training is in; by default they are the loader's.
        at_end: Called when the loader has no further batch.
        starts_early: Tells whether workers are started when a pass is begun, and not by the first ``next()``.
        note: Called with the plan, the step and the batch before a batch is handed over.
        aside: Called with an iterator of the proxy. Returns where it begins if something else than the loop has made
            it, as a hook that looks at a batch; :data:`LATER` if the loop reads again before it trains; or None.

    Attributes:
        stateful_loader: The loader.
        users_loader: The user's loader.
        starts_early: As the argument.
        num_handed: Batches that the latest pass has handed over.
        seconds_waited: Seconds that the latest batch took to come.
    """

    is_proxy = True
    num_handed = 0
    # A pass that was begun before its first next(), and the iterator that is to read it.
    _early: tuple[Any, int, Iterator[Any]] | None = None
    _holder: Callable[[], Any] | None = None

    def __init__(
        self,
        loader: AnyLoader,
        locate: Callable[[], tuple[EpochPlan, int] | None],
        after_read: Callable[[], None] | None = None,
        *,
        isolated: bool = True,
        keeps_indices: bool = False,
        original: Any = None,
        overfits: bool = False,
        is_dealt_out: bool = False,
        length: Callable[[], int] | None = None,
        at_end: Callable[[], None] | None = None,
        starts_early: Callable[[], bool] = bool,
        note: Callable[[EpochPlan, int, Any], None] | None = None,
        aside: Callable[[Any], Any] | None = None,
    ) -> None:
        self.stateful_loader, self._length, self._at_end, self.starts_early = loader, length, at_end, starts_early
        self.restarts = WorkerRestarts(loader)
        users: Any = loader if original is None else original
        self.users_loader: Any = users.users_loader if isinstance(users, LoaderProxy) else users
        self._shown = shown_in_place(loader, self.users_loader, overfits=overfits, is_dealt_out=is_dealt_out)
        self._given, self._told = _arguments_of(self._shown), ToldSamplers(getattr(loader, "order", None))
        self._locate, self._aside, self._after_read = locate, aside, after_read
        self._isolated, self._note, self.seconds_waited = isolated, note, 0.0
        # The pattern of the warnings filter that this proxy has set, if any. A regular expression's comment, (?#id),
        # tells it from those of other proxies.
        self._ignored = ""
        if loader.is_sized and isinstance(loader.dataset, IterableDataset):
            # Lightning doubts the length of any iterable dataset; this one is a number of steps, for all workers.
            self._ignored = f"{_DOUBT}(?#{id(self)})"
            warnings.filterwarnings("ignore", message=self._ignored)
        if keeps_indices and loader.is_sized and loader.batch_sampler is not None:
            self.batch_sampler = _IndexBatchSamplerWrapper(loader.batch_sampler)  # type: ignore[arg-type]  # never None here
            vars(self.batch_sampler)["sampler"] = self._shown.sampler
        self._is_made = True

    def changed_arguments(self) -> list[str]:
        """Arguments of the user's loader or its batch sampler that were set since the latest call, in vain."""
        now, loader = _arguments_of(self._shown), self.stateful_loader
        changed = [name for name, value in self._given.items() if now.get(name, value) is not value]
        self._given = now
        if "collate_fn" in changed and loader.is_map_style and users_loader(loader) is self.users_loader:
            # Lightning alone would read with the user's object.
            loader.collate_fn = now["collate_fn"]
            changed.remove("collate_fn")
        return changed

    def __iter__(self) -> Iterator[Any]:
        made = _ProxyIterator()
        is_early = (self._holder is None or self._holder() is None) and self.starts_early()
        made.batches = self._batches(weakref.ref(made), self._begin_early() if is_early else None)
        if is_early:
            self._holder = weakref.ref(made)
        return made

    def _begin_early(self) -> tuple[Any, int, Iterator[Any]] | None:
        """Begin a pass and start its workers: one, also where Lightning tries iter() and drops the iterator."""
        if self._early is None and (begun := self._begin()) is not None:
            plan, step, batches = begun
            self._early = plan, step, chain(list(islice(batches, 1)), batches)
        return self._early

    def _begin(self) -> tuple[Any, int, Iterator[Any]] | None:
        """The plan, the step and the batches from there on; None where there are none."""
        found = self._locate()
        if found is None:
            return None
        plan: Any  # a stream's loader reads plans of its own kind
        plan, step = found
        return plan, step, self.stateful_loader.batches(plan, step, isolated=self._isolated)

    def _read_again(self, plan: Any, step: int, num_read: int) -> Iterator[Any]:
        self.end_workers()
        return self.stateful_loader.batches(plan, step + num_read, isolated=self._isolated)

    def _batches(self, made: Callable[[], Any], begun: tuple[Any, int, Iterator[Any]] | None) -> Iterator[Any]:
        # A generator: it runs from the first next() on, when Lightning's counters are those of the batch to come.
        self._end_filter()
        if begun is None and self._aside is not None and (beside := self._aside(made())) is not None:
            # Nothing of it is trained on, and so nothing is counted.
            yield from [LATER] if beside is LATER else self.stateful_loader.batches(*beside, isolated=True)
            return
        asked = time.perf_counter()
        # Neither could be pickled with the trainer.
        self._early = self._holder = None
        if begun is None and self.restarts.is_due():
            self.end_workers()
        if (begun := begun or self._begin()) is None:
            return
        plan, step, read = begun
        if "batch_sampler" in vars(self):
            batches = plan.batches(self.stateful_loader.topology.rank, step)
            self.batch_sampler.seen_batch_indices = [indices for _, indices in batches]
        self.num_handed = 0
        for batch in self.restarts.around(read, partial(self._read_again, plan, step)):
            self.seconds_waited = time.perf_counter() - asked
            if isinstance(batch, FailedBatch):
                raise batch.error
            if self._note is not None:
                self._note(plan, step + self.num_handed, batch)
            self.num_handed += 1
            if self._after_read is not None:
                self._after_read()
            yield batch
            asked = time.perf_counter()
        if self._at_end is not None:
            self._at_end()
        if self._after_read is not None:
            self._after_read()

    def __len__(self) -> int:
        # A loader whose length is not known has to say so itself.
        return (
            self._length() if self._length is not None and self.stateful_loader.is_sized else len(self.stateful_loader)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # What hooks set on ``trainer.train_dataloader`` is set on a user's loader, also under names of this package's.
        is_own = "_is_made" not in vars(self) or name in vars(self) or hasattr(LoaderProxy, name)
        users = None if is_own else users_loader(self.stateful_loader)
        if not is_own and name in TORCHS:
            # As torch has it: in force from the next pass on, or an error. Of a stream it is set in vain.
            setattr(self.stateful_loader if self.stateful_loader.is_map_style else self.users_loader, name, value)
        elif is_own or type(users) is DataLoader:
            super().__setattr__(name, value)
        else:
            setattr(users, name, value)

    def __getattr__(self, name: str) -> Any:
        of_user = name in ("sampler", "batch_sampler") or name.startswith(RECORDS)
        if "_shown" not in vars(self) or (name.startswith("__") and not of_user):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "sampler" and pl.__version__ < "2.6" and not _has_sampler(self._shown):  # type: ignore[attr-defined]  # not exported
            # Where there is a sampler, Lightning 2.5 looks for one in the batch sampler too.
            raise AttributeError("This loader's batch sampler has no sampler of its own.")
        if of_user:
            return self._told.found(name, getattr(self._shown, name))
        if name in self.restarts.names:
            return self.restarts.ask
        users = users_loader(self.stateful_loader)
        return getattr(users if has_of_its_own(users, name) else self.stateful_loader, name)

    @property
    def _iterator(self) -> Any:
        """Persistent workers, which Lightning ends here after training."""
        return self.stateful_loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.stateful_loader._iterator = iterator
        self._end_filter()

    def end_workers(self) -> None:
        """End workers that persist."""
        iterator = self._iterator
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
        self._iterator = None

    @property
    def worker_init_fn(self) -> Any:
        """The loader's; ``seed_everything(workers=True)`` sets it here."""
        return self.stateful_loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.stateful_loader.worker_init_fn = function

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position travels in the state of the data module or callback. Without this Lightning warns."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing: Lightning calls this too early, or not at all."""

    def _end_filter(self) -> None:
        """Remove the warnings filter that this proxy has set."""
        kept = [entry for entry in warnings.filters if getattr(entry[1], "pattern", None) != self._ignored]
        warnings.filters[:] = kept  # type: ignore[index]  # a list


def _has_sampler(loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    return batches is None or hasattr(batches, "sampler")


class _ProxyIterator:
    """One pass over a proxy. It can be pickled, but what is unpickled is empty."""

    batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)
