"""Trains a model that only records, on a user's data, in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulError, StatefulWarning
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.ledger.files import as_items
from lightning_stateful.loaders.patching import is_patched
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import PACKAGE, pl
from lightning_stateful.trainer.callback import StatefulDataCallback
from lightning_stateful.trainer.ledger import LedgerWriter
from lightning_stateful.trainer.loader_proxy import LoaderProxy, Structure
from lightning_stateful.verify.batches import digests_of, shown
from lightning_stateful.verify.conditions import set_num_workers
from lightning_stateful.verify.factory import imported, made_by
from lightning_stateful.verify.records import Job, RecordFile

# Others may hold the store of the process group, or a lock of gloo's, for so long.
_SETTLE = 0.05


def run(job: Job) -> None:
    """Do a job, and stay until this process is killed: rank 0 has a store that other ranks may still ask."""
    os.environ.update(job.environment)
    *search, here = job.search
    sys.path[:] = search
    os.chdir(here)
    file = RecordFile(job.record)
    # Each is written once, whatever the user's own filters say.
    warnings.simplefilter("always", StatefulWarning)
    warnings.showwarning = lambda message, category, *_: (
        file.write("warned", str(message)) if issubclass(category, StatefulWarning) else None
    )
    logging.getLogger(job.package.partition(".")[0]).setLevel(logging.ERROR)
    try:
        job.conditions.apply(job.package)
        if job.run.workers is not None:
            set_num_workers(job.run.workers)
        made = made_by(job.factory, job.arguments)
        other = _other_package(made)
        if other:
            file.write("other_package", other)
        elif job.run.begins_twice:
            file.write("changes", _begun_twice(job, made))
        else:
            _train(job, made, file)
        file.write("ended", True)
    except ConfigurationError as error:
        # Of the factory, or of the data.
        kind = "failed" if "cannot be made" in str(error) or "is needed" in str(error) else "refused"
        file.write(kind, f"{type(error).__name__}: {error}")
    except StatefulError as error:
        file.write("refused", f"{type(error).__name__}: {error}")
    except BaseException as error:
        traceback.print_exc()
        file.write("failed", f"{type(error).__name__}: {error}")
    job.record.with_suffix(".done").touch()
    time.sleep(3600)


def _other_package(made: Any) -> str:
    """The package of Lightning that an object is of, if it is not the one that this process builds on."""
    names = {kind.__module__.partition(".")[0] for kind in type(made).__mro__}
    of = "pytorch_lightning" if "pytorch_lightning" in names else "lightning.pytorch" if "lightning" in names else ""
    return "" if of in ("", PACKAGE) else of


def _train(job: Job, made: Any, file: RecordFile) -> None:
    indices, callbacks = _Indices(), []
    if isinstance(made, StatefulDataModule):
        # It brings the callback.
        made._settings = replace(made._settings, ledger=indices)
    elif job.callback:
        callback = StatefulDataCallback()
        callback.settings = replace(callback.settings, ledger=indices)
        callbacks.append(callback)
    validates = _has_evaluation(made)
    file.write("validates", validates)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=job.epochs,
        limit_train_batches=job.batches,
        limit_val_batches=1 if validates else 0,
        val_check_interval=job.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, _Saves(job, file)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"strategy": "ddp", "devices": job.run.ranks} if job.run.ranks > 1 else {"devices": 1}),
    )
    data: dict[str, Any] = {"train_dataloaders": made}
    if isinstance(made, pl.LightningDataModule):
        data = {"datamodule": made}
    elif hasattr(made, "train_dataloader"):
        data = {"datamodule": _LoadersOf(made)}
    trainer.fit(_Records(job, file, indices), **data, ckpt_path=job.run.checkpoint)


def _has_evaluation(made: Any) -> bool:
    """Whether a module has evaluation loaders."""
    hook = getattr(made, "val_dataloader", None)
    if hook is None:
        return False
    bases = (pl.LightningDataModule, pl.LightningModule)
    return not any(getattr(hook, "__func__", None) is base.val_dataloader for base in bases)


class _LoadersOf(pl.LightningDataModule):
    """The loaders of a user's LightningModule, without its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        if _has_evaluation(module):
            self.__dict__["val_dataloader"] = lambda: self.module.val_dataloader()

    def prepare_data(self) -> None:
        self.module.prepare_data()

    def setup(self, stage: str) -> None:
        self.module.trainer = self.trainer
        self.module.setup(stage)

    def train_dataloader(self) -> Any:
        return self.module.train_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.module.on_after_batch_transfer(batch, dataloader_idx)


class _Indices(LedgerWriter):
    """Knows the indices of the batch that is trained on, and writes no ledger."""

    is_on = True  # there is no folder

    def begin(self, *arguments: Any) -> None:
        """There is no file."""

    def items(self, path: str) -> list[Any] | None:
        """The indices of the batch that is trained on, of one loader; None where it has none."""
        parts = self._begun.parts if self._begun else ()
        found = [part for part in parts if part.path == path and part.items is not None]
        return found[0].listed() if found else None


class _Records(pl.LightningModule):
    """One weight; it writes down the samples of every batch."""

    def __init__(self, job: Job, file: RecordFile, indices: _Indices) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self._job, self._file, self._indices = job, file, indices
        self._paths: list[str] = [""]
        self._num_begun = 0
        self._key = None if job.key is None else imported(job.key)

    def on_train_start(self) -> None:
        self._paths = self._write_facts()

    def _write_facts(self) -> list[str]:
        """Write what is known of the training loaders at this moment, and return their paths."""
        loaders = Structure.of(self.trainer.train_dataloader).loaders
        self._file.write("facts", {path: _facts(of) for path, of in loaders.items()})
        return list(loaders)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self._num_begun > self._job.epochs * (self._job.batches + 1):
            raise RuntimeError("the epoch does not end")
        self._num_begun += 1
        parts = Structure.of(batch).loaders if len(self._paths) > 1 else {self._paths[0]: batch}
        if list(parts) != self._paths:
            # Samples in containers of their own: what each loader gave is one level below.
            parts = dict(zip(self._paths, batch.values() if isinstance(batch, Mapping) else batch, strict=False))
        self._file.write(
            "batch", [self.current_epoch, batch_idx + 1, [self._part(path, of) for path, of in parts.items()]]
        )
        if self._job.run.kill_after is not None and self._num_begun > self._job.run.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight * 0.0

    def _part(self, path: str, batch: Any) -> list[Any]:
        items = self._indices.items(path) if self._key is None else as_items(self._key(batch))[0]
        items = items if items is None or isinstance(items, list) else np.asarray(items).tolist()
        return [path, items, digests_of(batch, None if items is None else len(items)), shown(batch)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only loaders are of interest."""

    def on_train_end(self) -> None:
        self._write_facts()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _facts(loader: Any) -> dict[str, Any]:
    """Facts that explain how a user's loader is resumed, as plain data."""
    is_shown = isinstance(loader, LoaderProxy)
    original, ours = (loader.users_loader, loader.stateful_loader) if is_shown else (loader, loader)
    is_map_style = isinstance(ours, StatefulLoader)
    return {
        "patched": is_patched(ours),
        "map_style": is_map_style,
        "class": type(original).__qualname__,
        "wrapper": not isinstance(original, DataLoader),
        "changed": _changed(original, ours) if is_map_style else [],
    }


def _changed(original: Any, ours: StatefulLoader) -> list[str]:
    """Classes of the parts of a user's loader that something else than reading has changed in training."""
    found = []
    for name in ours.changed():
        held = [original.dataset] if name.startswith("dataset") else [original.batch_sampler, original.sampler]
        own = [part for part in held if part is not None and not type(part).__module__.startswith("torch.")]
        found += [type(part).__qualname__ for part in own[:1]] or [name]
    return list(dict.fromkeys(found))


class _Saves(pl.Callback):
    """Writes checkpoints at moments of a run."""

    def __init__(self, job: Job, file: RecordFile) -> None:
        self._job, self._file, self._num_trained = job, file, 0

    def on_train_epoch_start(self, *args: Any) -> None:
        if self._job.run.ranks > 1:
            # A fork hangs if a thread of gloo's is busy with a collective that has just ended.
            time.sleep(_SETTLE)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._num_trained += 1
        self._save(trainer, "on_train_batch_end")

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "on_validation_batch_start")

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "on_train_epoch_end")

    def _save(self, trainer: pl.Trainer, hook: str) -> None:
        for moment, path in self._job.run.moments:
            if (moment.hook, moment.after) == (hook, self._num_trained):
                trainer.save_checkpoint(path)
                self._file.write("saved", [moment.name, self._num_trained])


def _begun_twice(job: Job, made: Any) -> list[str]:
    """Names of what a user's loaders iterate that gives other samples when it is begun a second time."""
    found: list[str] = []
    for loader in _loaders(made):
        parts = {"loader": loader if not isinstance(loader, DataLoader) else None}
        for name in ("sampler", "batch_sampler", "dataset"):
            part = getattr(loader, name, None)
            is_iterated = name != "dataset" or isinstance(part, IterableDataset)
            parts[name] = part if is_iterated and not type(part).__module__.startswith("torch.") else None
        for part in parts.values():
            if part is not None and _changes_in_iter(part):
                found.append(type(part).__qualname__)
    return list(dict.fromkeys(found))


def _loaders(made: Any) -> Iterator[Any]:
    if not isinstance(made, DataLoader) and hasattr(made, "train_dataloader"):
        for hook, arguments in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(made, hook, lambda *_: None)(*arguments)
        made = made.train_dataloader()
    yield from Structure.of(made).loaders.values()


def _changes_in_iter(part: Any) -> bool:
    once, twice = deepcopy(part), part

    def first_of(iterable: Any) -> list[str]:
        seed_randomness(0)
        return digests_of(list(islice(iter(iterable), 1)))

    first = first_of(once)
    return [first_of(twice), first_of(twice)][1] != first
