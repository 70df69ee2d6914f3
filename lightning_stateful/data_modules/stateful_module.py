"""A LightningDataModule whose training data resumes exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful.errors import ConfigurationError, DamagedStateError, StatefulWarning
from lightning_stateful.generators.attributes import names_in
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import (
    PACKAGE,
    Checkpoint,
    TrainerFn,
    TrainerStatus,
    check_package,
    pl,
)
from lightning_stateful.loops.saved_progress import STATE_KEY, data_state_in
from lightning_stateful.samplers.mixture_samplers import refuse_splits
from lightning_stateful.state import check, pack_combined, refuse_differences, walk
from lightning_stateful.trainer.callback import StatefulDataCallback
from lightning_stateful.trainer.loader_proxy import Structure
from lightning_stateful.trainer.train_loaders import Settings
from lightning_stateful.user_samplers.user_sampler import Tail

# Types of single samples: a list of these is one dataset, and not several.
_SAMPLES = (str, bytes, list, tuple, dict)

# How Lightning combines the loaders of a list or dict.
_MODE = "max_size_cycle"


class _EvaluationSet:
    """An attribute for a dataset (``val``, ``test``, ``predict``) that brings ``val_dataloader`` and so on along.

    The hook exists only while the dataset is set, because Lightning evaluates wherever a module has the hook.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._stage, self._slot, self._hook = name, f"_{name}_set", f"{name}_dataloader"

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else vars(module).get(self._slot)

    def __set__(self, module: Any, dataset: Any) -> None:
        vars(module)[self._slot] = dataset
        if getattr(type(module), self._hook) is not getattr(pl.LightningDataModule, self._hook):
            return  # The subclass says itself where its loaders come from.
        vars(module).pop(self._hook, None)
        if dataset is not None:
            vars(module)[self._hook] = partial(module._evaluation_loaders, self._stage)


class StatefulDataModule(pl.LightningDataModule):
    """Serves datasets so that ``Trainer.fit(ckpt_path=...)`` goes on at the very next batch.

    Two ways to use it. Pass datasets. Or subclass it: call ``super().__init__()``, then set ``self.train`` (and
    ``self.val`` and so on) in ``setup``, or override ``train_dataloader`` and its siblings and return any DataLoader
    over a map-style dataset with any sampler or order, or a list, dict or CombinedLoader of them.

    The module brings a :class:`StatefulDataCallback` along into its trainer, unless there is one already.

    Args:
        train: A map-style dataset, or a list or dict of datasets of which each step gets one batch each. The splits of
            one dataset, as ``load_dataset`` gives them without ``split=``, are refused.
        val: The same for validation, each sample once over all ranks, in order.
        test: The same for testing.
        predict: The same for prediction.
        batch_size: Samples in a batch of one rank.
        shuffle: Whether training has an order of its own in each epoch.
        drop_last: Leave out the last training step of an epoch if it is not full.
        seed: Chooses the orders and the randomness; by default the seed of Lightning's ``seed_everything``, or 0.
        num_workers: Worker processes of each loader.
        collate_fn: Makes a batch of samples.
        seed_samples: Make what torch, NumPy and ``random`` draw inside datasets a function of (seed, path of the
            loader, epoch, batch).
        seed_model: Make what the model draws (dropout) follow from (seed, epoch, batch); ranks draw alike as in torch.
        tail: What becomes of the last items of a training sampler of yours that are fewer than a step of all ranks
            takes: ``"split"`` (the default; whole batches are repeated), ``"pad"`` or ``"drop"``. See
            :class:`~lightning_stateful.user_samplers.ddp_wrapper.DDPSamplerWrapper`.
        accept: Names of differences between a checkpoint and the present data to let pass.
        log_data: Whenever the trainer logs, log position, samples, tokens, the share of every source, and padding, as
            ``data/samples`` and so on; docs/logs.md has all names.
        check_content: As in :class:`StatefulDataCallback`: compare a batch of a checkpoint with what a resume reads in
            its place.
        max_tokens_total: Stop training after the first step by which so many tokens of packed documents were served
            since it began, over all ranks, separators among them and padding left out; exact over resumes.
        skip: Batches and samples to leave out of training: ``{2: range(300, 350)}`` for batches 300 to 349 of epoch 2,
            a set of indices of the dataset, a function of an array of indices, or a list of these. On a resume it may
            be another.
        **loader_options: Any other option of :class:`torch.utils.data.DataLoader`, for every loader, those of
            evaluation among them. So no sampler: return a loader with it from ``train_dataloader`` of a subclass.

    State:
        The position in the training data (see :mod:`lightning_stateful.state`), under 1 KB. In a Trainer it is that of
        what the model has been trained on; without one, of the batches that the loader of :meth:`train_dataloader` has
        handed over. A subclass that overrides ``state_dict`` returns ``{**super().state_dict(), ...}``.
    """

    holds_data_state = True

    val: _EvaluationSet = _EvaluationSet()
    test: _EvaluationSet = _EvaluationSet()
    predict: _EvaluationSet = _EvaluationSet()

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
        seed_model: bool = True,
        tail: Tail | None = None,
        accept: Collection[str] = (),
        log_data: bool = False,
        check_content: bool = True,
        max_tokens_total: int | None = None,
        skip: Any = None,
        **loader_options: Any,
    ) -> None:
        self._callback: StatefulDataCallback | None = None
        # What was loaded, until training goes on there.
        self._loaded: Mapping[str, Any] | None = None
        # The latest training loaders, by path.
        self._built: dict[str, Any] = {}
        self._settings = Settings(
            seed=seed,
            seed_samples=seed_samples,
            seed_model=seed_model,
            tail=tail,
            accept=accept,
            log_data=log_data,
            check_content=check_content,
            max_tokens_total=max_tokens_total,
            skip=skip,
        )
        super().__init__()
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self._options = {**loader_options, "num_workers": num_workers, "collate_fn": collate_fn}
        _refuse_unknown(type(self).__name__, loader_options)
        self.train = train
        self.val, self.test, self.predict = val, test, predict

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned with one of the module's methods needs none; as LightningModule has it.
        return {**vars(self), "_trainer": None, "_callback": None, "_built": {}}

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer that this module is attached to."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        # Lightning attaches a data module before it calls any hook: early enough to bring a callback along.
        if "_settings" not in vars(self):
            raise ConfigurationError(
                f"{type(self).__name__}.__init__ must call super().__init__(), with the arguments of "
                "StatefulDataModule that it wants to set."
            )
        self._trainer = trainer
        if trainer is None:
            return
        check_package(trainer)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        present = [callback for callback in callbacks if isinstance(callback, StatefulDataCallback)]
        if not present:
            present = [StatefulDataCallback()]
            present[0].brought_along = True
            # Lightning keeps callbacks that save checkpoints at the end.
            last = sum(not isinstance(callback, Checkpoint) for callback in callbacks)
            trainer.callbacks = [*callbacks[:last], *present, *callbacks[last:]]  # type: ignore[attr-defined]
        self._callback = present[0]
        if self._callback.brought_along:
            self._callback.settings = self._settings
        else:
            # Permissions and switches of both hold.
            theirs = self._callback.settings
            _warn_of_two_seeds(type(self).__name__, self._settings.seed, theirs.seed)
            self._callback.settings = replace(
                theirs,
                accept=tuple(dict.fromkeys([*theirs.accept, *self._settings.accept])),
                log_data=theirs.log_data or self._settings.log_data,
                check_content=theirs.check_content and self._settings.check_content,
                max_tokens_total=self._settings.max_tokens_total or theirs.max_tokens_total,
                skip=self._settings.skip or theirs.skip,
            )

    def __iter__(self) -> NoReturn:
        # A Trainer of the other package takes a data module for a loader.
        raise ConfigurationError(
            f"A {type(self).__name__} is no loader: iterate what its train_dataloader() returns. If it was passed to "
            f"trainer.fit, the Trainer is not one of {PACKAGE}, which lightning_stateful builds on in this process: "
            "import Lightning's classes from there, or import the Trainer's package before lightning_stateful."
        )

    def train_dataloader(self) -> Any:
        """The training loader, or a list or dict of them; without a Trainer they go on where a state was loaded.

        Raises:
            StateError: That state does not fit the data.
        """
        loaders = self._loaders(self.train, "train")
        self._built = Structure.of(loaders).loaders
        for loader in self._built.values() if self._running is None and self._settings.skip else ():
            loader.leave_out(self._settings.skip)
        if self._loaded is not None and self._running is None:
            self._load_into_built(self._loaded)
            # From now on these loaders say where the data stand, and no trainer that it has served before.
            self._loaded = self._callback = None
        return loaders

    def _evaluation_loaders(self, stage: str) -> Any:
        return self._loaders(getattr(self, stage), stage)

    def _loaders(self, data: Any, stage: str) -> Any:
        """The loaders of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``, in the structure of its datasets."""
        if data is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no dataset for this stage. Pass it to the constructor, set it in setup() "
                "(self.train, self.val, self.test, self.predict), or override the dataloader hook."
            )
        if isinstance(data, DataLoader):
            raise ConfigurationError(
                f"{type(self).__name__} takes datasets, got a {type(data).__name__}. Pass its dataset and its options, "
                "or return the loader from train_dataloader() of a subclass (val_dataloader(), and so on)."
            )
        if isinstance(data, Mapping):
            for part in (data, *data.values()):
                refuse_splits(part, trains=stage == "train")
            return {name: self._loader(dataset, str(name), stage) for name, dataset in data.items()}
        if _is_several(data):
            return [self._loader(dataset, str(number), stage) for number, dataset in enumerate(data)]
        return self._loader(data, None, stage)

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        """A loader over a dataset of a stage that stands under ``name`` among others, or alone."""
        how = {"batch_size": self.batch_size, **how}
        if stage == "train":
            return self._stateful_loader(dataset, name, shuffle=self.shuffle, drop_last=self.drop_last, **how)
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, **{**self._options, **how})
        return self._stateful_loader(dataset, name, exact=True, **how)

    def _stateful_loader(self, dataset: Any, name: str | None = None, **how: Any) -> StatefulLoader:
        settings = {
            "seed": self.seed,
            "path": name or "",
            "seed_samples": self._settings.seed_samples,
            "accept": self._settings.accept,
        }
        loader = StatefulLoader(dataset, **{**self._options, **settings, **how})
        loader.is_for_trainer = self._running is not None
        return loader

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of every source, at this moment of training; equal on all ranks."""
        if self._callback is not None:
            return self._callback.position_report()
        reports: dict[str, dict[str, Any]] = {path: of.position_report() for path, of in self._built.items()}
        return reports.get("", reports)

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, under a key of its own; empty before there are loaders.

        A state that was loaded is given back until training goes on there.

        Warns:
            StatefulWarning: Without a Trainer, a subclass returns loaders of its own, which this module does not see.
        """
        state = self._loaded
        if state is None and self._callback is not None:
            state = self._callback.data_state()
        if state is None and self._built and self._running is None:
            state = self._state_of_built()
        if state is None:
            self._warn_of_own_loaders("state_dict() is empty")
        return {} if state is None else {STATE_KEY: deepcopy(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state that the next training loaders go on from.

        In ``Trainer.fit(ckpt_path=...)`` the callback takes it from here, together with the loop counters that it
        belongs to. Validation, testing and prediction with ``ckpt_path`` leave training data where they are.

        Args:
            state_dict: A state from :meth:`state_dict`, with a data module's or a checkpoint's own beside it; without a
                Trainer also one of the loader that :meth:`train_dataloader` has returned.

        Raises:
            DamagedStateError: Without a Trainer, there is no position in it.

        Warns:
            StatefulWarning: It is empty, and as in :meth:`state_dict`.
        """
        if not state_dict:
            self._warn_of_own_loaders("the state that is loaded is empty, so training data begin from the beginning")
        if self._running is None and state_dict and STATE_KEY not in state_dict:
            if "kind" not in state_dict:
                raise DamagedStateError(
                    f"There is no {STATE_KEY!r} among the keys of the state, {sorted(map(str, state_dict))}, so it "
                    f"says nothing about training data. Load what {type(self).__name__}.state_dict() has returned; of "
                    "a checkpoint, that is checkpoint[type(module).__qualname__]."
                )
            state_dict = {STATE_KEY: state_dict}
        if self._running in (None, TrainerFn.FITTING):
            self._loaded = deepcopy(data_state_in(state_dict))

    def _warn_of_own_loaders(self, what: str) -> None:
        """Warn where a subclass leaves states to this module, though it returns loaders of its own in no Trainer."""
        kind: Any = type(self)
        if self._trainer is not None or self._built or kind.state_dict is not StatefulDataModule.state_dict:
            return
        hook = inspect.unwrap(kind.train_dataloader)
        if hook is not StatefulDataModule.train_dataloader and "super" not in names_in(hook.__code__):
            rank_zero_warn(
                f"{kind.__name__}.train_dataloader is your own, and there is no Trainer: {what}, and a resume by it "
                "trains on all of the epoch again. Return patch_dataloader(loader), and save and load the state_dict "
                "of that; or train in a Trainer.",
                category=StatefulWarning,
                stacklevel=4,
            )

    def take_loaded_state(self) -> Mapping[str, Any] | None:
        """The state that was loaded, if no loaders have gone on from it; it counts as used from now on."""
        state, self._loaded = self._loaded, None
        return state

    @property
    def _running(self) -> TrainerFn | None:
        """The stage of the trainer that runs this module now."""
        trainer = self._trainer
        if trainer is None or trainer.state.status != TrainerStatus.RUNNING:
            return None
        return trainer.state.fn

    def _state_of_built(self) -> dict[str, Any]:
        states = {path: loader.state_dict() for path, loader in self._built.items()}
        return dict(states[""]) if "" in states else pack_combined(_MODE, states)

    def _load_into_built(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loaders that were built, without a Trainer."""
        where = f"The state of this {type(self).__name__}"
        if "" in self._built:
            self._built[""].load_state_dict(state)
            return
        check(state, where=where)
        refuse_differences(state, self._state_of_built(), accept=self._settings.accept, where=where)
        parts = dict(walk(state))
        for path, loader in self._built.items():
            if path in parts:
                loader.load_state_dict(parts[path])
            else:
                # Accepted as new: it begins with the epoch of the others.
                loader.set_epoch(next(iter(parts.values()))["progress"]["epoch"])


def _refuse_unknown(name: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments that no DataLoader has, which would fail within ``fit`` only.

    Raises:
        ConfigurationError: There are some.
    """
    known = {*inspect.signature(DataLoader).parameters, *inspect.signature(StatefulLoader).parameters}
    unknown = [option for option in options if option not in known]
    if unknown:
        where = ""
        if any(option.startswith("ledger") for option in unknown):
            where = " The ledger is the callback's: Trainer(callbacks=[StatefulDataCallback(ledger=...)])."
        raise ConfigurationError(
            f"{name} and torch's DataLoader have no argument {', '.join(map(repr, unknown))}.{where}"
        )


def _warn_of_two_seeds(name: str, own: int | None, theirs: int | None) -> None:
    if own is not None and theirs is not None and own != theirs:
        rank_zero_warn(
            f"{name} has seed={own} and the StatefulDataCallback seed={theirs}. The order of the data, and what "
            f"samples draw, follow from {own}; what the model draws, from {theirs}. Pass one of them for both.",
            category=StatefulWarning,
        )


def _is_several(data: Any) -> bool:
    """Whether data is a list of datasets; a list of plain samples is a dataset itself."""
    return isinstance(data, (list, tuple)) and bool(data) and all(map(_is_dataset, data))


def _is_dataset(data: Any) -> bool:
    sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Dataset) or (sized and not isinstance(data, (*_SAMPLES, torch.Tensor, np.ndarray)))
