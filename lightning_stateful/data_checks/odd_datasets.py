"""Finds datasets that hold a Trainer, warns of those that loaders share and of shared samplers, refuses own lengths."""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_stateful.core import UNKNOWN
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.generators.attributes import attributes_of, closure_of, codes_in, names_in, reached
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loaders.patching import map_style
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import epoch_set_to
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.stream_loader.loader import StreamLoader
from lightning_stateful.user_loaders import users_loader
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


def warn_if_it_follows_workers(loader: StatefulLoader, make_plan: Callable[[], Any], saved: Mapping[str, Any]) -> None:
    """Warn where samples follow from the worker that reads them, and there are other workers than at the save.

    A batch is read by processes that stand for the first and the second worker, twice by each.

    Args:
        loader: The loader, with workers.
        make_plan: Makes a plan that begins with the batch.
        saved: The note of it in a checkpoint, with ``rank`` and, if there were any, ``workers``.

    Warns:
        StatefulWarning: The two have read something else.
    """
    earlier, present = saved.get("workers", 0), loader.num_workers
    most = max(earlier, present)
    if not present or earlier == present or most < 2:
        return
    found = [("", "")]
    # What cannot be read again is not compared.
    with suppress(Exception):
        plan = make_plan()
        read = [loader.read_twice(plan, saved["rank"], worker, most) or () for worker in range(2)]
        found = list(zip(*([digest(batch) for batch in of] for of in read), strict=True))
    if all(one != other for one, other in found) and len({*map(str, found)}) == 1:
        rank_zero_warn(
            "Samples follow from the worker that reads them, by get_worker_info().id or by what worker_init_fn makes, "
            f"and num_workers was {earlier} when the checkpoint was written and is {present}: the resume is not exact. "
            "Pass as many workers, or derive samples from the index and the epoch.",
            category=StatefulWarning,
        )


def say_collectives(name: str) -> None:
    """Say that a batch is not read again on the first process alone: the others would have to meet there."""
    rank_zero_info(
        f"{name} was not compared with the checkpoint: reading it calls collectives, for which all ranks have to meet."
    )


def warn_of_shared_datasets(combined: CombinedLoaders) -> None:
    """Warn of one iterable dataset in several loaders; refuse one that is its own iterator.

    Args:
        combined: The training loaders.

    Raises:
        ConfigurationError: A dataset that is its own iterator is read by several loaders in this process.

    Warns:
        StatefulWarning: A dataset is read by several loaders in turn.
    """
    found: dict[int, str] = {}
    for path, loader in combined.loaders.items():
        dataset = getattr(loader.order, "begun_anew", None)
        other = path if dataset is None else found.setdefault(id(dataset), path)
        if other != path and hasattr(dataset, "__next__") and not loader.num_workers:
            raise ConfigurationError(
                f"The loaders {other!r} and {path!r} share one {type(dataset).__qualname__} object, which is its "
                "own iterator: what each of them gets depends on when the other begins. Give each loader a dataset "
                "of its own."
            )
        if other != path:
            rank_zero_warn(
                f"The loaders {other!r} and {path!r} read one {type(dataset).__qualname__} object in turn. Of what "
                "the one changes in it for the other a checkpoint knows nothing, so a resume may not be exact. "
                "Give each loader a dataset of its own.",
                category=StatefulWarning,
            )


def warn_of_changed_arguments(changed: Collection[str], where: str) -> None:
    """Warn of arguments of a loader that were set too late, by their names; of none nothing is said."""
    if changed:
        rank_zero_warn(
            f"{', '.join(changed)} of {where} was set after the Trainer had asked for it, and training goes on with "
            "what it was then. Let train_dataloader return a loader with the new value, with "
            "Trainer(reload_dataloaders_every_n_epochs=1), or give a batch_sampler of your own, which is iterated.",
            category=StatefulWarning,
        )


def warn_of_shared_samplers(combined: CombinedLoaders, trainer: pl.Trainer, *, is_dealt_out: bool) -> None:
    """Warn of one sampler in several loaders that changes itself while it is iterated.

    A loader of validation is one of them, if it was built before or is built later.

    Args:
        combined: The training loaders, whose samplers were tried in the epoch that the Trainer counts now.
        trainer: The Trainer.
        is_dealt_out: Whether Lightning alone would deal samplers out.

    Warns:
        StatefulWarning: Loaders share one, for each pair of them.
    """
    found: dict[int, str] = {}
    for path, loader in combined.loaders.items():
        order = loader.order
        if not isinstance(order, WrappedSampler) or not order.is_trained_on:
            continue
        # Lightning tells samplers the epoch, and no batch samplers.
        as_tried = partial(epoch_set_to, trainer, trainer.current_epoch)
        order.memory.note_user(as_tried, is_told_first=not order.whole_batches, is_listed=is_dealt_out)
        order.memory.note_use(order)
        if not order.remembers and order.resume_mode != "own_state":
            continue
        parts = SamplerParts(order.sampler, order.dataset).samplers
        shared = [part for part in parts if found.setdefault(id(part), path) != path]
        if shared:
            order.memory.is_shared = True
            rank_zero_warn(
                f"The loaders {found[id(shared[0])]!r} and {path!r} share one {type(shared[0]).__qualname__} object "
                "in samplers that change while they are iterated: what the one gets depends on the passes of the "
                "other, whose order a checkpoint does not hold. So many resumes will be refused, or not be exact. Give "
                "each loader a sampler of its own.",
                category=StatefulWarning,
            )


def warn_of_cut_epochs(combined: CombinedLoaders, epoch: int, limited: int) -> None:
    """Warn where each epoch begins as if the one before had been served whole, and a limit has cut that.

    Args:
        combined: The training loaders.
        epoch: An epoch.
        limited: Steps of it under the trainer's limit.
    """
    # A stream goes on where the limit has cut it.
    loaders, steps = map_style(combined.loaders).values(), combined.num_batches(epoch)
    if any(loader.order.carries_over for loader in loaders) and limited < steps:
        rank_zero_warn(
            f"limit_train_batches cuts epochs of num_steps={steps} after {limited} steps, and the next epoch goes "
            f"on as if all had been served. Pass num_steps={limited} to miss nothing.",
            category=StatefulWarning,
        )


def warn_of_old_copies(combined: CombinedLoaders) -> None:
    """Warn of a dataset in persistent workers that holds a Trainer or a LightningModule.

    Workers have a copy of the dataset from when they were started. If they live on, ``trainer.current_epoch`` stays
    what it was then, and workers that a resume starts have another one.

    Args:
        combined: The training loaders.

    Warns:
        StatefulWarning: One does, for each such loader.
    """
    for loader in combined.loaders.values():
        dataset = getattr(loader, "dataset", None)
        persistent = getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False)
        found = find_trainer(dataset) if persistent else None
        if found is None:
            continue
        rank_zero_warn(
            f"The dataset, a {type(dataset).__qualname__}, holds a {type(found).__qualname__}, and persistent workers "
            "keep the copy of it that they were started with. What the dataset reads there, such as current_epoch, "
            "stays that of the epoch in which they were started; a resume starts them in a later epoch, and so reads "
            "something else. Pass persistent_workers=False: then each epoch starts workers with a copy of its own.",
            category=StatefulWarning,
        )


def warn_of_reading_ahead(trainer: pl.Trainer, combined: CombinedLoaders, step: int) -> None:
    """Warn, on a resume within an epoch, of data that Lightning reads ahead and that hold a Trainer or weights.

    A loader without length is read one batch ahead, in this process. So a batch is read before the step ahead of it,
    and the first one of a resume behind it.

    Args:
        trainer: The trainer.
        combined: The training loaders.
        step: The step of the epoch at which training goes on; 0 for its beginning.

    Warns:
        StatefulWarning: There are such data, for each loader.
    """
    for loader in combined.loaders.values() if step else ():
        stream = loader.order.dataset if isinstance(loader, StreamLoader) else None
        dataset = loader.dataset if stream is None else stream
        kind = "" if loader.is_sized or loader.num_workers else find_trained(trainer, dataset, loader.collate_fn)
        if kind and (stream is None or _names_step(stream, loader.collate_fn)):
            rank_zero_warn(
                f"The dataset, a {type(dataset).__qualname__}, or its collate_fn holds a {kind}, and Lightning reads "
                "its loader one batch ahead, for want of a length: the first batch of a resume is read where training "
                "stands now, and was read before. If samples depend on global_step or on weights, the resume is not "
                "exact. Give the sampler, or the dataset, a __len__.",
                category=StatefulWarning,
            )


def _names_step(*objects: Any) -> bool:
    """Whether code that some objects reach names ``global_step``; of a stream weights show in its first batch."""
    places = reached({str(number): one for number, one in enumerate(objects)}, _may_depend)
    functions = (place.value for place in places if isinstance(place.value, FunctionType))
    return any("global_step" in names_in(one.__code__) for one in functions)


def find_trainer(dataset: Any) -> pl.Trainer | pl.LightningModule | None:
    """The nearest Trainer or LightningModule that an object holds, or its classes; None without one.

    It is looked for in attributes, containers and closures.

    No property and no method of the objects is called. A data module is not looked into where a method of it is held
    that does not name its trainer, as a transform is.
    """
    of_classes = {name: value for kind in reversed(type(dataset).__mro__) for name, value in vars(kind).items()}
    held = {name: value for name, value in of_classes.items() if isinstance(value, (pl.Trainer, pl.LightningModule))}
    found = reached({"dataset": dataset, **held}, _may_read_trainer)
    return next((place.value for place in found if isinstance(place.value, (pl.Trainer, pl.LightningModule))), None)


def _may_read_trainer(value: Any) -> bool:
    """False for a method of a data module that does not name its trainer."""
    if not isinstance(value, MethodType) or not isinstance(value.__self__, pl.LightningDataModule):
        return True
    return isinstance(value.__func__, FunctionType) and "trainer" in names_in(value.__func__.__code__)


# What a LightningModule has that changes with training, beside its layers, parameters and buffers.
_CHANGING = frozenset(
    {"trainer", "current_epoch", "global_step", "optimizers", "lr_schedulers", "forward", "__call__", "state_dict"}
    | {"parameters", "named_parameters", "children", "modules", "buffers", "named_buffers", "get_submodule"}
)


def find_trained(trainer: pl.Trainer, *objects: Any) -> str:
    """The kind of the nearest object by which samples may depend on how far training has got; empty without one.

    That is a Trainer, a LightningModule, an optimizer or a learning rate scheduler, or what holds weights or buffers of
    the module that is trained. A method of a LightningModule counts where its code names any of these.

    Args:
        trainer: The trainer.
        objects: A dataset, and functions that make batches of its samples.
    """
    module = trainer.lightning_module
    weights = {_memory_of(part) for part in (*module.parameters(), *module.buffers())} - {0}
    roots = {str(number): one for number, one in enumerate(objects)}
    found = (place.value for place in reached(roots, _may_depend))
    return next((type(value).__qualname__ for value in found if _is_trained(value, weights)), "")


def _is_trained(value: Any, weights: Collection[int]) -> bool:
    if isinstance(value, (pl.Trainer, pl.LightningModule, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return True
    if isinstance(value, torch.nn.Module):
        parts: Any = [*value.parameters(), *value.buffers()]
    else:
        held = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
        named = closure_of(value) if isinstance(value, FunctionType) else attributes_of(value)
        parts = [*held, *named.values()]
    return any(_memory_of(part) in weights for part in parts if isinstance(part, torch.Tensor))


def _memory_of(tensor: torch.Tensor) -> int:
    """Where the numbers of a tensor are; 0 for one that has none."""
    # A subclass may raise anything.
    with suppress(Exception):
        return tensor.untyped_storage().data_ptr()
    return 0


def _may_depend(value: Any) -> bool:
    """False for a method of a data module or LightningModule that names nothing of what changes with training."""
    if not isinstance(value, MethodType) or not isinstance(value.__self__, pl.LightningModule):
        return _may_read_trainer(value)
    module, functions = value.__self__, [value.__func__]
    named = {name for held in ("_modules", "_parameters", "_buffers") for name in vars(module)[held]} | _CHANGING
    for function in functions:
        if not isinstance(function, FunctionType) or named & set(names_in(function.__code__)) or _gives_self(function):
            return True
        # Other methods that it calls.
        called = [getattr(type(module), name, None) for name in names_in(function.__code__)]
        functions += [one for one in called if isinstance(one, FunctionType) and one not in functions]
    return False


def _gives_self(function: FunctionType) -> bool:
    """Whether a method does anything else with its object than read attributes, as calling it or handing it on."""
    name, last = function.__code__.co_varnames[:1], ""
    for code in codes_in(function.__code__):
        for step in dis.get_instructions(code):
            if last and step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return True
            last = step.opname if step.opname in _LOADS and (step.argval,) == name else ""
    return False


_LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})


def refuse_own_length(trainer: pl.Trainer, combined: CombinedLoaders) -> None:
    """Refuse a loader whose own length, by which Lightning alone counts an epoch, is not that of what it gives.

    Raises:
        ConfigurationError: There is one, and no number of batches limits an epoch.
    """
    limit: Any = trainer.limit_train_batches
    for loader in combined.loaders.values():
        # Streams know nothing of lengths here, and one that iterates in its own way may end by itself.
        users: Any = users_loader(loader) if isinstance(loader, StatefulLoader) else None
        kind = type(users)
        own = isinstance(users, DataLoader) and kind.__len__ is not DataLoader.__len__
        if not own or kind.__iter__ is not DataLoader.__iter__ or not isinstance(loader, StatefulLoader):
            continue
        name, said = kind.__qualname__, loader.own_length(loader.plan(0))
        given = loader.plan(0).num_steps if loader.is_sized else UNKNOWN
        if said in (given, UNKNOWN) or (isinstance(limit, int) and limit <= min(said, given)):
            continue
        says = f"{name} says in its own __len__ that an epoch has {said} batches, and "
        if given == UNKNOWN:
            says += f"its {getattr(loader.order, 'name', 'sampler')} has no len()"
        else:
            says += f"it gives {given}"
        if said < given:
            raise ConfigurationError(
                f"{says}. Lightning alone would end each epoch there; here it would go on to the end. Pass "
                f"Trainer(limit_train_batches={said}), or leave __len__ to DataLoader and the sampler."
            )
        raise ConfigurationError(
            f"{says}. Schedules and validations that follow from the number of batches would be others than in "
            "Lightning alone. Leave __len__ to DataLoader, or correct it."
        )
