"""A LightningDataModule whose training data resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.samplers.mixture_samplers import refuse_splits
from lightning_stateful.trainer.callback import StatefulDataCallback
from lightning_stateful.trainer.checkpoint import STATE_KEY
from lightning_stateful.trainer.lightning import PACKAGE, _CallbackConnector, check_package, pl
from lightning_stateful.trainer.train_loaders import Settings

_SAMPLES = (str, bytes, list, tuple, dict)


class _EvaluationSet:
    """A dataset whose loader hook exists only while it is set: Lightning takes a hook for a promise of data."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot, self._hook = f"_{name}_set", f"{name}_dataloader"

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else vars(module).get(self._slot)

    def __set__(self, module: Any, dataset: Any) -> None:
        vars(module)[self._slot] = dataset
        if getattr(type(module), self._hook) is not getattr(pl.LightningDataModule, self._hook):
            return  # The subclass says itself where its loaders come from.
        vars(module).pop(self._hook, None)
        if dataset is not None:
            vars(module)[self._hook] = getattr(module, f"_{self._hook}")


class StatefulDataModule(pl.LightningDataModule):
    """Serves datasets so that ``Trainer.fit(ckpt_path=...)`` goes on at the very next batch.

    Two ways to use it. Pass datasets. Or subclass it: call ``super().__init__()``, then set ``self.train`` (and
    ``self.val`` and so on) in ``setup``, or override ``train_dataloader`` and its siblings and return any DataLoader
    over a map-style dataset with any sampler, or a list, dict or CombinedLoader of them.

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
        seed_model: Make what the model draws (dropout) a function of (seed, data-parallel rank, epoch, batch).
        accept: Names of differences between a checkpoint and the present data to let pass.
        log_data: Whenever the trainer logs, log what has been served of every source of a mixture, and the padding of
            batches of like lengths.
        **loader_options: Any other option of :class:`torch.utils.data.DataLoader`, for every loader.

    State:
        The position in the training data (see :mod:`lightning_stateful.state`), under 1 KB. A subclass that overrides
        ``state_dict`` returns ``{**super().state_dict(), ...}``.
    """

    holds_data_state = True

    val = _EvaluationSet()
    test = _EvaluationSet()
    predict = _EvaluationSet()

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
        accept: Collection[str] = (),
        log_data: bool = False,
        **loader_options: Any,
    ) -> None:
        self._callback: StatefulDataCallback | None = None
        self._settings = Settings(
            seed=seed,
            seed_samples=seed_samples,
            seed_model=seed_model,
            accept=accept,
            log_data=log_data,
        )
        super().__init__()
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self._options = {**loader_options, "num_workers": num_workers, "collate_fn": collate_fn}
        self.train = train
        self.val, self.test, self.predict = val, test, predict

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned with one of the module's methods needs neither; as LightningModule has it.
        return {**vars(self), "_trainer": None, "_callback": None}

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
            present = [StatefulDataCallback(brought_along=True)]
            reordered = _CallbackConnector._reorder_callbacks([*callbacks, *present])
            trainer.callbacks = reordered  # type: ignore[attr-defined]
        self._callback = present[0]
        if self._callback.brought_along:
            self._callback.settings = self._settings
        else:
            # Permissions and switches of both hold.
            theirs = self._callback.settings
            self._callback.settings = replace(
                theirs,
                accept=tuple(dict.fromkeys([*theirs.accept, *self._settings.accept])),
                log_data=theirs.log_data or self._settings.log_data,
            )

    def __iter__(self) -> NoReturn:
        # A Trainer of the other package takes a data module for a loader.
        raise ConfigurationError(
            f"A {type(self).__name__} is no loader: iterate what its train_dataloader() returns. If it was passed to "
            f"trainer.fit, the Trainer is not one of {PACKAGE}, which lightning_stateful builds on in this process: "
            "import Lightning's classes from there, or import the Trainer's package before lightning_stateful."
        )

    def train_dataloader(self) -> Any:
        """The training loader, or a list or dict of them."""
        return self._loaders(self.train, shuffle=self.shuffle, drop_last=self.drop_last)

    def _val_dataloader(self) -> Any:
        return self._loaders(self.val, exact=True)

    def _test_dataloader(self) -> Any:
        return self._loaders(self.test, exact=True)

    def _predict_dataloader(self) -> Any:
        return self._loaders(self.predict, exact=True)

    def _loaders(self, data: Any, **how: Any) -> Any:
        if data is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no dataset for this stage. Pass it to the constructor, set it in setup() "
                "(self.train, self.val, self.test, self.predict), or override the dataloader hook."
            )
        for part in (data, *(data.values() if isinstance(data, Mapping) else ())):
            refuse_splits(part, trains="exact" not in how)
        if isinstance(data, DataLoader):
            raise ConfigurationError(
                f"{type(self).__name__} takes datasets, got a {type(data).__name__}. Pass its dataset and its options, "
                "or return the loader from train_dataloader() of a subclass (val_dataloader(), and so on)."
            )
        if isinstance(data, Mapping):
            return {name: self._loader(dataset, str(name), **how) for name, dataset in data.items()}
        if _is_several(data):
            return [self._loader(dataset, str(number), **how) for number, dataset in enumerate(data)]
        return self._loader(data, None, **how)

    def _loader(self, dataset: Any, name: str | None, **how: Any) -> DataLoader[Any]:
        """A loader over a dataset that stands under ``name`` among others, or alone."""
        how = {"batch_size": self.batch_size, **how}
        if how.get("exact") and isinstance(dataset, IterableDataset):
            del how["exact"]
            return DataLoader(dataset, **{**self._options, **how})
        return self._stateful_loader(dataset, **how)

    def _stateful_loader(self, dataset: Any, **how: Any) -> StatefulLoader:
        return StatefulLoader(
            dataset, **{**self._options, "seed": self.seed, "seed_samples": self._settings.seed_samples, **how}
        )

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of every source, at this moment of training; equal on all ranks."""
        return {} if self._callback is None else self._callback.position_report()

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, under a key of its own; empty before there are loaders."""
        state = None if self._callback is None else self._callback.data_state()
        return {} if state is None else {STATE_KEY: state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the callback reads the state where Lightning's loop counters can be set right with it."""


def _is_several(data: Any) -> bool:
    """Whether data is a list of datasets; a list of plain samples is a dataset itself."""
    return isinstance(data, (list, tuple)) and bool(data) and all(map(_is_dataset, data))


def _is_dataset(data: Any) -> bool:
    sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Dataset) or (sized and not isinstance(data, (*_SAMPLES, torch.Tensor, np.ndarray)))
