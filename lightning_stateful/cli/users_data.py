"""The training data of a user's factory: built as a Trainer would have it, on any number of ranks, without training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, DataLoader

from lightning_stateful.cli.comparison import MODULE_REMEDY
from lightning_stateful.cli.orders import RestOfEpoch
from lightning_stateful.cli.reading import Checkpoint
from lightning_stateful.cli.training_changes import (
    changed_settings,
    is_rebuilt_next,
    may_be_restored,
    restore_module,
)
from lightning_stateful.errors import (
    ConfigurationError,
    Difference,
    StatefulError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loaders.combined_loaders import CombinedLoaders, name_of
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.loaders.patching import build_patched, drawn_as
from lightning_stateful.loops.saved_progress import SEED_REMEDY
from lightning_stateful.state import walk, warning_of_unknown
from lightning_stateful.stream_loader.loader import StreamLoader
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.trainer.loader_proxy import Structure
from lightning_stateful.trainer.train_loaders import Settings
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler
from lightning_stateful.verify.factory import made_by

# seed_everything's, which loaders without a seed of their own take.
_SEED = "PL_GLOBAL_SEED"
# Begins a default that is the checkpoint's, which int() reads all the same; seed_everything never writes it.
_SAVED = "+"
# Counts in a progress that follow from the steps trained: over all ranks, by source, and by number of ranks.
_AT = ("cycle", "consumed", "served", "segments")


class UsersData(NamedTuple):
    """Training loaders, patched as in a Trainer, as rank 0 has them.

    Attributes:
        combined: The loaders.
        seed: Chooses their orders.
        module: The name of the data module that holds the data's state; None if none does.
        accept: Names of differences that the data module lets pass.
        made: What the factory has made.
        is_restored: Whether all is restored that the module restores of itself on a resume.
    """

    combined: CombinedLoaders
    seed: int
    module: str | None
    accept: tuple[str, ...]
    made: Any
    is_restored: bool


@contextmanager
def seeded_by_default(seed: int | None, *, is_saved: bool) -> Iterator[None]:
    """Let loaders without a seed have this one, unless ``seed_everything`` is called; afterwards as before.

    Args:
        seed: The seed; None for no other than there is.
        is_saved: Whether it is a checkpoint's, which is no default where the data module has a seed of its own.
    """
    before = os.environ.get(_SEED)
    if seed is not None and before is None:
        os.environ[_SEED] = f"{_SAVED * is_saved}{seed}"
    try:
        yield
    finally:
        os.environ.pop(_SEED, None)
        if before is not None:
            os.environ[_SEED] = before


def build_data(
    factory: str,
    *,
    ranks: int,
    accept: Collection[str] = (),
    overfits: bool = False,
    checkpoint: Checkpoint | None = None,
) -> UsersData:
    """Build a factory's training loaders for some ranks, as a Trainer with StatefulDataCallback would.

    Args:
        factory: ``package.module:name``, of a function or class that takes no arguments, or of what it would return: a
            LightningDataModule, a LightningModule with loaders, or a DataLoader or a list or dict of them.
        ranks: Data-parallel ranks.
        accept: Names of differences to let pass.
        overfits: As a Trainer with ``overfit_batches``, which does not shuffle.
        checkpoint: The checkpoint that a data module restores its own state from before it builds loaders.

    Raises:
        ConfigurationError: The factory cannot be found, or fails.
        StatefulError: The loaders cannot be resumed at all.
    """
    made, settings = made_by(factory), Settings()
    holds_state = bool(getattr(made, "holds_data_state", False))
    if holds_state:
        settings = made._settings
        if settings.seed is not None and os.environ.get(_SEED, "").startswith(_SAVED):
            # The saved seed is the module's own; what it holds has the default of a Trainer, maybe since it was made.
            del os.environ[_SEED]
            made = made_by(factory)
            settings = made._settings
    accepted = tuple(dict.fromkeys([*settings.accept, *accept]))
    made_loaders, is_restored = _loaders_of(made, factory, checkpoint)
    structure = Structure.of(made_loaders)
    shared = drawn_as(structure.loaders)
    loaders = {}
    for path, loader in structure.loaders.items():
        loaders[path] = build_patched(
            loader,
            seed=settings.seed,
            path=path,
            drawn_as=shared[path],
            num_replicas=ranks,
            rank=0,
            seed_samples=settings.seed_samples,
            tail=settings.tail,
            shuffle=not overfits,
            accept=accepted,
            where=name_of("training", path),
        )
        loaders[path].leave_out(settings.skip)
    if unknown := warning_of_unknown(accepted, [{path: of.tracker.config} for path, of in loaders.items()]):
        warnings.warn(unknown, StatefulWarning, stacklevel=2)
    combined = CombinedLoaders(loaders, structure.mode or "max_size_cycle")
    name = type(made).__qualname__ if holds_state else None
    return UsersData(combined, seed_or_default(settings.seed), name, accepted, made, is_restored)


def _loaders_of(made: Any, factory: str, checkpoint: Checkpoint | None) -> tuple[Any, bool]:
    """The training loaders of a module, set up as before ``fit``, or loaders alone; and whether all is restored."""
    if isinstance(made, DataLoader) or not hasattr(made, "train_dataloader"):
        return made, True
    try:
        if hasattr(made, "prepare_data"):
            made.prepare_data()
        if hasattr(made, "setup"):
            made.setup("fit")
        is_restored = restore_module(made, checkpoint)
        return made.train_dataloader(), is_restored
    except StatefulError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"The training data of {factory} cannot be made without a Trainer: {type(error).__name__}: {error}"
        ) from error


def resumed(checkpoint: Checkpoint, data: UsersData) -> tuple[int, int]:
    """Load a checkpoint's state into loaders that were built.

    Returns:
        The epoch, and the step at which it goes on, in steps of the present ranks and batch sizes.

    Raises:
        StateMismatchError: With every difference that a resume would refuse.
        StateError: A resume would refuse the checkpoint, whatever the data.
    """
    state, callback = checkpoint.needed(), checkpoint.callback or {}
    where = f"The data state of {checkpoint.path}"
    found = []
    saved_by = callback.get("module")
    if saved_by is not None and saved_by != data.module and "module" not in data.accept:
        found.append(Difference(path="module", saved=saved_by, present=data.module, remedy=MODULE_REMEDY))
    if data.module is not None and callback.get("seeds"):
        # A callback beside the module, which this factory does not show; the loaders have seeds of their own.
        saved, present = callback["seeds"], data.combined.seeds()
        pairs = {(saved.get(path, callback["seed"]), present[path]) for path in present}
        warnings.warn(
            f"The run had a StatefulDataCallback with seed {callback['seed']} beside its data module: a resume with a "
            "callback of another seed is refused.",
            StatefulWarning,
            stacklevel=2,
        )
    else:
        pairs = {(callback["seed"], data.seed)} if "seed" in callback else set()
    if "seed" not in data.accept:
        found += [
            Difference(path="seed", saved=saved, present=present, remedy=SEED_REMEDY)
            for saved, present in pairs
            if saved != present
        ]
    try:
        position = data.combined.load(state, accept=data.accept, where=where)
    except StateMismatchError as error:
        if is_rebuilt_next(checkpoint) and not found and checkpoint.epoch is not None:
            # The Trainer begins the epoch with what it then gets.
            data.combined.refused = error.differences
            data.combined.begin_in(checkpoint.epoch)
            _warn_of_rebuilt(checkpoint.epoch, error.differences)
            return checkpoint.epoch, 0
        known = {one.path for one in found}
        raise StateMismatchError(
            [*found, *(one for one in error.differences if one.path not in known)], where=where
        ) from None
    if found:
        raise StateMismatchError(found, where=where)
    return position


def resumed_if_restored(checkpoint: Checkpoint, data: UsersData) -> tuple[int, int]:
    """Do as :func:`resumed`, and let pass what code of the user's may restore that was not called here.

    What the samplers of the user's yield up to the checkpoint is compared as well.

    Returns:
        The epoch and the step; those of the run that wrote the checkpoint where data were not compared.

    Raises:
        StateMismatchError: With every difference that a resume would refuse.
        StateError: A resume would refuse the checkpoint, whatever the data.
    """
    try:
        epoch, step = resumed(checkpoint, data)
        if not data.combined.refused:
            _compare_samplers(checkpoint, data, epoch, step)
    except StateMismatchError as error:
        refused = [one for one in error.differences if not may_be_restored(one)]
        if data.is_restored or refused or checkpoint.progress is None:
            raise
        data.combined.refused = error.differences
        warnings.warn(
            f"The data differ from those of the checkpoint ({_in_words(error.differences)}). A resume is refused "
            "unless the method that was not called sets them again.",
            StatefulWarning,
            stacklevel=2,
        )
        return checkpoint.progress.epoch_and_step
    return epoch, step


def _compare_samplers(
    checkpoint: Checkpoint, data: UsersData, epoch: int, step: int, *, remembering: bool = True
) -> None:
    """Let samplers yield the batch of a step, with which what they yield before it is compared.

    Args:
        checkpoint: The checkpoint.
        data: The loaders, into which its state was loaded.
        epoch: The epoch.
        step: The step at which it goes on.
        remembering: Whether to do so with samplers that a pass changes, too.

    Raises:
        StateMismatchError: They yield something else than in the run.
        ConfigurationError: A sampler fails.
    """
    for path, loader in data.combined.loaders.items():
        order = loader.order
        if not isinstance(order, WrappedSampler) or (order.remembers and not remembering):
            continue
        if changed_settings(checkpoint, path, loader.tracker.config):
            continue
        plan, at = data.combined.plan_at(path, epoch, step)
        try:
            next(iter(plan.batches(0, at)), None)
        except StatefulError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{order.name} fails in epoch {epoch}: {type(error).__name__}: {error}") from error


def _in_words(differences: Sequence[Difference]) -> str:
    return "; ".join(f"{one.path}: saved {one.saved!r}, now {one.present!r}" for one in differences)


def _warn_of_rebuilt(epoch: int, differences: Sequence[Difference]) -> None:
    warnings.warn(
        f"The training loader is another than that of epoch {epoch - 1} ({_in_words(differences)}), and is not "
        f"compared: the run builds it anew for epoch {epoch} (reload_dataloaders_every_n_epochs).",
        StatefulWarning,
        stacklevel=3,
    )


def limit_of(checkpoint: Checkpoint, data: UsersData) -> int | None:
    """The steps after which the run's epochs were cut by a limit; None where they were not, or that is not known."""
    progress, written = checkpoint.progress, checkpoint.written
    if progress is None or not written or written["steps"] is None or not data.combined.is_sized:
        return None
    loaders = data.combined.loaders
    if any(loader.topology.num_replicas != written["ranks"] for loader in loaders.values()):
        return None
    if written["batch_size"] != {path: loader.batch_size for path, loader in loaders.items()}:
        return None
    whole = from_the_beginning(data).combined.num_batches(max(progress.epoch - (not progress.running), 0))
    return int(written["steps"]) if written["steps"] < whole else None


def rests_of(data: UsersData, epoch: int, step: int) -> dict[str, RestOfEpoch]:
    """The rest of the epoch of each loader that was resumed, by path."""
    rests = {}
    for path, loader in data.combined.loaders.items():
        plan, at = data.combined.plan_at(path, epoch, step)
        rest = RestOfEpoch.of(plan, data.combined.length(path, epoch))
        if isinstance(loader, StreamLoader):
            rest = rest._replace(shards=_shards(loader.order.state_at(epoch, plan.progress_after(at).consumed)))
        rests[path] = rest
    return rests


def _shards(state: Any) -> dict[str, int] | None:
    """The shards that are left of a stream, and how many of these several ranks read together."""
    if not isinstance(state, StreamState):
        return None
    readers = state.shards_left().values()
    return {"left": len(readers), "read_by_several_ranks": sum(len(ranks) > 1 for ranks in readers)}


def from_the_beginning(data: UsersData) -> UsersData:
    """The same loaders as before any state was loaded into them."""
    return data._replace(combined=CombinedLoaders(data.combined.loaders, data.combined.mode))


def notes_on_indices(data: UsersData) -> list[str]:
    """Notes on loaders whose indices are no indices of the user's samples: those of packed data."""
    packed = []
    for path, loader in data.combined.loaders.items():
        dataset = loader.dataset
        parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
        if any(isinstance(part, PackedDataset) for part in parts):
            packed.append(
                f"{name_of('training', path)} reads packed data: the numbers are those of sequences, not of documents; "
                "PackedDataset.parts tells the documents in a sequence."
            )
    return packed


def notes_on_epoch(checkpoint: Checkpoint, data: UsersData, epoch: int, steps: int) -> list[str]:
    """Notes on an epoch whose first ``steps`` steps were computed as if it had these data from its beginning on.

    The first says so. Another follows for each loader of which the checkpoint has another position after these steps.

    Args:
        checkpoint: The checkpoint.
        data: The loaders, as before any state was loaded into them.
        epoch: The epoch.
        steps: Steps of it that a run had trained by the checkpoint.
    """
    notes = [
        f"epoch {epoch} is listed as of the present ranks, batch size and seed. Whether it was begun with others, "
        "or left before its end (on_train_batch_start returned -1), a checkpoint does not say; a ledger does "
        "(StatefulDataCallback(ledger=...))."
    ]
    if checkpoint.written.get("reloads"):
        notes.append(
            "the run built its training loaders anew between epochs (reload_dataloaders_every_n_epochs), and the "
            f"indices are those of the loaders that it would get now: epoch {epoch} may have had others."
        )
    computed = dict(walk(data.combined.state_at(epoch, steps)))
    for path, state in checkpoint.loaders.items():
        saved, listed = state["progress"], computed[path]["progress"] if path in computed else {}
        if saved["epoch"] != listed.get("epoch"):
            continue
        if found := [
            f"{name} {saved[name]}, not {listed[name]}" for name in _AT if saved.get(name) != listed.get(name)
        ]:
            notes.append(
                f"{name_of('training', path)} was not trained so: after {steps:,} steps of epoch {epoch} the "
                f"checkpoint has {', '.join(found)}. Ranks, batch size or data changed within the epoch: these steps "
                "are not those of the run."
            )
    return notes


def refuse_changed_samplers(checkpoint: Checkpoint, data: UsersData, asked: int, epoch: int, step: int) -> None:
    """Refuse to list what a sampler gave that training had changed.

    Args:
        checkpoint: The checkpoint.
        data: The loaders, into which its state was loaded.
        asked: The epoch that is to be listed.
        epoch: The epoch in which the checkpoint was written, if it was written within one.
        step: The step at which it goes on.

    Raises:
        ConfigurationError: It is as it was built here, or the change was after the epoch that is to be listed.
        StateMismatchError: It does not yield here what it did up to the checkpoint.
    """
    for path, loader in data.combined.loaders.items():
        if not isinstance(order := loader.order, WrappedSampler):
            continue
        changed = checkpoint.loaders[path].get("changed", {}) if path in checkpoint.loaders else {}
        is_changed = any(not name.startswith("dataset.") for name in changed)
        is_compared = asked == epoch and not order.remembers
        if (is_changed and not is_compared) or changed_settings(checkpoint, path, loader.tracker.config):
            raise ConfigurationError(
                f"{order.name} had been changed in training when {checkpoint.path} was written. Which indices it gave "
                "in which epoch is known to the run alone; a ledger has them (StatefulDataCallback(ledger=...))."
            )
    if not data.combined.refused:
        _compare_samplers(checkpoint, data, epoch, step, remembering=False)


def batches_of(data: UsersData, path: str, epoch: int, rank: int, num_steps: int) -> Iterator[Any]:
    """The indices of the batches of a rank in the first steps of an epoch; None once the loader has ended.

    Raises:
        ConfigurationError: They do not follow from the epoch alone.
    """
    loader, step = data.combined.loaders[path], 0
    if not loader.is_map_style:
        raise ConfigurationError(f"{name_of('training', path)} is a stream, whose samples have no indices.")
    if isinstance(loader.order, WrappedSampler) and loader.order.remembers and epoch:
        raise ConfigurationError(
            f"What {loader.order.name} yields depends on its earlier passes, so the indices of epoch {epoch} are known "
            "to the run alone."
        )
    while step < num_steps:
        plan, at = data.combined.plan_at(path, epoch, step)
        batches = islice(plan.batches(rank, at), num_steps - step)
        before = step
        for _, indices in batches:
            yield indices
            step += 1
        if step == before:
            yield from [None] * (num_steps - step)
            return
