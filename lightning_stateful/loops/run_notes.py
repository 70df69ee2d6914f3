"""The lines of the log on where a run goes on and what makes its data exact, and a checkpoint's note of how it was run.

The note is for people. Of it a resume uses the digest of the loaders that the run began with, for a warning, and from
which generators ranks drew alike.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from lightning_stateful.core.order import UNKNOWN
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.generators.attributes import is_users, variables_in
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loaders.patching import AnyLoader, map_style
from lightning_stateful.loops.lightning import GradientAccumulationScheduler, StochasticWeightAveraging, pl
from lightning_stateful.loops.loop_progress import reloads_every
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.ranks import topology_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.loops.single_samples import warn_of_single_samples
from lightning_stateful.samplers.rank_exchange import expect_alike
from lightning_stateful.state import order_in_words
from lightning_stateful.stream_loader.loader import StreamLoader
from lightning_stateful.stream_loader.rank_sync import RANKS_A_STEP
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Arguments of the Trainer by which training goes, with their defaults.
_DEFAULTS: dict[str, Any] = {
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "precision": "32-true",
}


class ServesTraining(Protocol):
    """The training loaders of a trainer, as they are needed here."""

    combined: CombinedLoaders

    def num_batches(self, epoch: int) -> int:
        """The batches of an epoch under the trainer's limit."""


def note_of_run(trainer: pl.Trainer, combined: CombinedLoaders) -> dict[str, Any]:
    """A note on how a run trains, for people who read its checkpoint, as plain data.

    Returns:
        The versions of packages, but for Lightning's, which a checkpoint has anyway; ``ranks``; ``steps``, the batches
        of the running epoch under the trainer's limit, or None where they are not known; and by the path of the loader
        ``batch_size`` (None for whole batches) and ``workers``; with ``overfit_batches`` also ``overfits``, and with
        ``reload_dataloaders_every_n_epochs`` that number as ``reloads``. Arguments of the Trainer by which training
        goes, and that are not left at their defaults, are ``arguments``, as text. A digest of the loaders that the run
        began with, where later ones were built, is ``began_with``. Where code of the data calls ``hash()``, what that
        gives for a string in this process is ``hashes``.
    """
    reloads = reloads_every(trainer)
    steps = float(trainer.fit_loop.max_batches)
    return {
        "versions": {
            "lightning_stateful": sys.modules["lightning_stateful"].__version__,
            "torch": str(torch.__version__),
        },
        "ranks": topology_of(trainer).num_replicas,
        "steps": int(steps) if steps < UNKNOWN else None,
        "batch_size": {path: loader.batch_size for path, loader in combined.loaders.items()},
        "workers": {path: loader.num_workers for path, loader in combined.loaders.items()},
        **({"began_with": combined.began_with} if combined.began_with else {}),
        **({"reloads": reloads} if reloads else {}),
        **({"arguments": arguments} if (arguments := _arguments(trainer)) else {}),
        **({"alike": sorted(combined.alike)} if topology_of(trainer).num_replicas > 1 else {}),
        **({"hashes": str(hash("hashes"))} if _calls_hash(combined) else {}),
        **({"overfits": True} if trainer.overfit_batches else {}),  # type: ignore[attr-defined]  # set by a connector
    }


def _arguments(trainer: Any) -> dict[str, str]:
    present = {name: getattr(trainer, name, value) for name, value in _DEFAULTS.items()}
    if any(isinstance(one, GradientAccumulationScheduler) for one in callbacks_of(trainer)):
        # It sets that as epochs begin.
        present.pop("accumulate_grad_batches")
    for one in callbacks_of(trainer) if trainer.fit_loop._skip_backward else ():
        if isinstance(one, StochasticWeightAveraging):
            # It sets another one for the epoch that it adds.
            present["accumulate_grad_batches"] = one._accumulate_grad_batches
    return {name: repr(value) for name, value in present.items() if value != _DEFAULTS[name]}


def _say_other_arguments(saved: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Log which arguments of the Trainer are others than in the run that wrote a checkpoint."""
    others = [
        f"{name} was {saved.get(name, default)} and is {present.get(name, default)}"
        for name, default in _DEFAULTS.items()
        if saved.get(name) != present.get(name)
    ]
    if others:
        rank_zero_info(
            f"Arguments of the Trainer are others than in the run that wrote the checkpoint: {', '.join(others)}. "
            "Training goes on by those of now."
        )


def _calls_hash(combined: CombinedLoaders) -> str:
    """The name of a sampler, dataset or ``collate_fn`` whose own code calls ``hash()``; empty for none."""
    for loader in combined.loaders.values():
        order: Any = loader.order
        for one in (getattr(order, "sampler", None), getattr(loader, "dataset", None), loader.collate_fn):
            kinds = [kind for kind in type(one).__mro__ if is_users(kind.__module__)]
            found = [one, *(value for kind in kinds for value in vars(kind).values())]
            if any("hash" in variables_in(of.__code__) for of in found if isinstance(of, FunctionType)):
                return getattr(one, "__qualname__", type(one).__qualname__)
    return ""


def _say_other_hashes(combined: CombinedLoaders, saved: str, present: str) -> None:
    """Log that ``hash()`` gives other numbers for strings than in the run that wrote a checkpoint."""
    if saved and present and saved != present:
        rank_zero_info(
            f"{_calls_hash(combined)} calls hash(), which gives other numbers for strings in each process: what "
            "follows from that may be others than in the run that wrote the checkpoint. Use "
            "zlib.crc32(text.encode()), or set PYTHONHASHSEED for all runs."
        )


def _say_other_workers(combined: CombinedLoaders, saved: Mapping[str, int]) -> None:
    """Say what nobody can compare where other workers read samples than in the run that wrote a checkpoint.

    Workers ask a sampler for more than is trained on, and for what comes behind the last item.

    Warns:
        StatefulWarning: A sampler changes itself behind its last item.
    """
    for path, loader in map_style(combined.loaders).items():
        earlier, present = saved.get(path, loader.num_workers), loader.num_workers
        if earlier == present:
            continue
        was = f"num_workers was {earlier} in the run that wrote the checkpoint, and is {present}"
        if earlier > 1 and not present:
            rank_zero_info(
                f"{was}: samples that follow from the worker that reads them, by get_worker_info() or worker_init_fn, "
                "would be others."
            )
        order = loader.order
        if isinstance(order, WrappedSampler) and order.remembers:
            text = (
                f"{was}. {order.name} changes itself while it is iterated, and workers ask it for more items than are "
                "trained on, so a later epoch may have others than with as many workers as before."
            )
            if order.facts.ends_late:
                rank_zero_warn(text, category=StatefulWarning)
            else:
                rank_zero_info(text)


def say_resumed(
    trainer: pl.Trainer,
    loaders: ServesTraining,
    progress: LoopProgress,
    saved: LoopProgress,
    note: Mapping[str, Any] | None = None,
    *,
    global_step: int,
) -> None:
    """Log in one line where a run goes on; say which loaders do not fit, and are built anew.

    Args:
        trainer: The trainer.
        loaders: Its loaders, at the state that was loaded.
        progress: Where it goes on, in steps of the present ranks and batch sizes.
        saved: The progress as it was saved.
        note: The checkpoint's own :func:`note_of_run`, empty if it has none; None where the same trainer is fitted
            again without a checkpoint.
        global_step: Optimizer steps that are taken.
    """
    combined, num_batches, again = loaders.combined, loaders.num_batches, note is None
    if note is not None:
        combined.began_with = note.get("began_with", "")
        if note.get("ranks", 1) > 1:
            combined.alike = expect_alike(note.get("alike", ()))
    if combined.refused:
        _say_others(combined, saved)
    now = note_of_run(trainer, combined)
    note = now if note is None else note
    epoch, batch = progress.epoch_and_step
    where = f"the beginning of epoch {epoch}"
    if saved.running:
        of = f" of {note['steps']}" if note.get("steps") else ""
        where = f"epoch {saved.epoch}, batch {saved.batch}{of}{_samples(combined, *progress.epoch_and_step)}"
    runs = f"goes on on {_ranks_in_words(now)}"
    if note:
        runs = f"saved on {_ranks_in_words(note)}, {runs}"
    following = ""
    if limits := _reached(trainer, epoch, global_step):
        following = f"; no batch is left to train on: {limits} is reached"
    elif combined.is_sized and batch < num_batches(epoch):
        following = f"; next is batch {batch + 1} of {num_batches(epoch)}" + (f" of epoch {epoch}" * progress.ended)
    if again:
        following += ". This trainer is fitted again: it goes on in its epoch, where Lightning alone begins the next"
    rank_zero_info(f"Resumed at {where}: {runs}{following}.")
    if note:
        _say_other_arguments(note.get("arguments", {}), now.get("arguments", {}))
        _say_other_hashes(combined, note.get("hashes", ""), now.get("hashes", ""))
        _say_other_workers(combined, note.get("workers", {}))
    is_within = saved.running and not (again or progress.ended) and bool(note)
    if is_within and combined.is_sized and reloads_every(trainer) and _ranks_in_words(now) == _ranks_in_words(note):
        _warn_of_other_length(epoch, note.get("steps"), num_batches(epoch))


def _warn_of_other_length(epoch: int, saved: int | None, present: int) -> None:
    if saved not in (None, present):
        rank_zero_warn(
            f"Epoch {epoch} has {present} batches here, and had {saved} in the run that wrote the checkpoint: the "
            "resume is not exact. Loaders that are built anew for each epoch keep the length that they have then. "
            "Restore what it follows from before, in on_load_checkpoint or load_state_dict of the module or data "
            "module, or build the loader by the epoch.",
            category=StatefulWarning,
        )


def say_first_step(trainer: pl.Trainer) -> None:
    """Log that the first step of a resumed run may add up gradients in another order than a later one, under DDP."""
    model, num_ranks = trainer.strategy.model, topology_of(trainer).num_replicas
    if num_ranks > 2 and isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
        rank_zero_info(
            f"On {num_ranks} ranks DDP adds up the gradients of this first step in another order than those of "
            "later ones, as torch orders them anew behind it: weights may differ in their last bit from a run without "
            "the stop, and batches do not. DDPStrategy(find_unused_parameters=True) keeps to one order."
        )


def _say_others(combined: CombinedLoaders, saved: LoopProgress) -> None:
    """Say of loaders that do not fit a checkpoint, and are built anew for the next epoch, that they do not.

    Nothing in a checkpoint says which loaders come next. Those that the run began with are what ``train_dataloader``
    gives where nothing was restored; but where values that it reads are compared, hooks may still restore them.

    Warns:
        StatefulWarning: They are those that the run began with, were others by then, and no such value was set.
    """
    found = "; ".join(f"{one.path}: saved {one.saved!r}, now {one.present!r}" for one in combined.refused)
    epoch = saved.epoch if saved.running else saved.epoch - 1
    others = (
        f"The training loader of epoch {epoch} is another here than in the run that wrote the checkpoint ({found}),"
    )
    if combined.digest() != combined.began_with or combined.is_build_followed:
        rank_zero_info(f"{others} and is not compared: it is built anew for epoch {epoch + 1}.")
        return
    rank_zero_warn(
        f"{others} and is the one that the run began with. It is built anew for epoch {epoch + 1}: the resume is not "
        "exact if train_dataloader depends on its earlier calls, or on what training has changed and nothing has "
        "restored by now. Restore that in load_state_dict or on_load_checkpoint, or let train_dataloader follow from "
        "trainer.current_epoch.",
        category=StatefulWarning,
    )


def say_what_is_exact(
    combined: CombinedLoaders,
    model_seed: int | None,
    seed_samples: bool,
    more: Mapping[str, str],
) -> None:
    """Log in one line for each loader which order it serves, and what a resume does to go on within it.

    Args:
        combined: The loaders.
        model_seed: Chooses what the model draws; None where that is not seeded.
        seed_samples: Whether samples are seeded.
        more: By path, a sentence to add.
    """
    drawing = "Samplers and samples draw" if seed_samples else "Samplers draw"
    seeds = sorted({loader.seed for loader in combined.loaders.values()})
    of_model = f"; the model by seed {model_seed}" if model_seed not in (None, *seeds) else ""
    rank_zero_info(
        f"{drawing} random numbers by (seed {' or '.join(map(str, seeds))}, epoch, batch){of_model}, and not from "
        "where the generators of the process stand."
    )
    if model_seed is not None and combined.alike:
        kinds = ", ".join(sorted(combined.alike))
        rank_zero_info(
            f"The model draws the same numbers on all ranks from {kinds}, which stood alike before training."
        )
    for path, loader in combined.loaders.items():
        where = f"Training data {path!r}" if path else "Training data"
        notes = [computed_note(loader), loader.resume_note, more[path]]
        if repeats := loader.plan(0).repeats():
            notes.append(
                f"{repeats}, because {loader.topology.num_replicas} ranks take equal steps. "
                "drop_last=True, or tail='drop' for a sampler of yours, leaves incomplete steps out instead."
            )
        rank_zero_info(f"{where}: {' '.join(filter(None, notes))}")


def say_cut(loader: AnyLoader, name: str, steps: int) -> None:
    """Log that a limit cuts the epochs of a stream, and that the next ones go on there.

    Raises:
        ConfigurationError: Batches of the stream are left out, so that the limit would cut each epoch elsewhere.
    """
    if loader.tracker.skipping is not None:
        raise ConfigurationError(
            f"skip cannot be honoured here: limit_train_batches cuts epochs of {name} after {steps} steps, and the "
            "next epoch goes on there. Say how long an epoch is by steps_per_epoch, without limit_train_batches."
        )
    rank_zero_info(
        f"limit_train_batches cuts epochs of {name} after {steps} steps, and the next epoch goes on there; Lightning "
        "alone begins its data anew."
    )


def say_at_start(trainer: pl.Trainer, combined: CombinedLoaders, epoch: int) -> None:
    """Log in one line for each loader what training leaves out, and warn of batches that BatchNorm may refuse."""
    warn_of_single_samples(trainer, combined, epoch)
    for path, loader in combined.loaders.items():
        skipping = loader.tracker.skipping
        notes = [] if skipping is None else skipping.notes()
        may_end_early = combined.mode == "min_size" and len(combined.loaders) > 1
        if may_end_early and loader.goes_on_behind_limit:
            notes += [
                "Where a shorter loader ends an epoch, as in the mode min_size, the next epoch of this one goes on "
                "there; Lightning alone begins its data anew."
            ]
        elif isinstance(loader, StreamLoader) and trainer.world_size >= 2 * RANKS_A_STEP and not loader.is_sized:
            notes += [
                "It is read some batches further than by Lightning alone, as so many ranks tell each other of several "
                "batches at once whether they have them: a source that goes on at the next iter() loses them where an "
                "epoch ends early, and what a hook sets within an epoch comes into force later."
            ]
        if trainer.limit_train_batches != 1.0 and (late := _left_late(loader)):
            notes.append(
                f"{late} changes itself behind its last item. Where limit_train_batches cuts an epoch, "
                "what it does there, as in a finally, is done before the next epoch begins; in Lightning alone its "
                "workers, which do not persist, begin that epoch first."
            )
        if notes:
            where = f"Training data {path!r}" if path else "Training data"
            rank_zero_info(f"{where}: {' '.join(notes)}")


def _left_late(loader: AnyLoader) -> str:
    """A sampler with more to do where it is dropped, which torch's workers do when they have begun the next epoch."""
    order: Any = loader.order
    begins_anew = loader.is_map_style and loader.num_workers > 0 and not loader.persistent_workers
    return str(order.name) if begins_anew and isinstance(order, WrappedSampler) and order.facts.ends_late else ""


def computed_note(loader: AnyLoader) -> str:
    """A sentence on an order that is computed from its progress; empty for one that is read or iterated again."""
    if not loader.is_map_style or isinstance(loader.order, WrappedSampler):
        return ""
    words = order_in_words(loader.order.kind, loader.tracker.config)
    if loader.resume_note:
        # Its own iteration decides.
        return f"{words}."
    ranks = "any number of ranks" if loader.own_rank is None else "these ranks, each of which has loaders of its own"
    return f"{words}. Its order is computed: a resume goes on at any batch at once, on {ranks}."


def _samples(combined: CombinedLoaders, epoch: int, step: int) -> str:
    """The samples that a single plain loader has served, of all; empty for others."""
    loader = combined.loaders.get("")
    if loader is None or not loader.is_plain or not step:
        return ""
    served = combined.report_at(epoch, step)[""].get("samples")
    total = loader.tracker.config.get("dataset", {}).get("length")
    return f" ({served:,} of {total:,} samples)" if isinstance(served, int) and isinstance(total, int) else ""


def _reached(trainer: pl.Trainer, epoch: int, global_step: int) -> str:
    """The limit of the trainer that leaves nothing to train on; empty for none."""
    if 0 <= trainer.max_steps <= global_step:
        return f"max_steps={trainer.max_steps}"
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch:
        return f"max_epochs={trainer.max_epochs}"
    return ""


def _ranks_in_words(note: Mapping[str, Any]) -> str:
    """The ranks and, of a single loader, the batch size of a run."""
    ranks = f"{note['ranks']} rank{'s' * (note['ranks'] != 1)}"
    size = note["batch_size"].get("")
    return ranks if size is None else f"{ranks} x {size}"
