"""Seeds of what a model draws, and of what ``train_dataloader`` draws where Lightning calls it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_stateful.core.seeding import derive_seed_within
from lightning_stateful.errors import Difference, StateMismatchError
from lightning_stateful.generators.rng import (
    KINDS,
    Randomness,
    keep_randomness,
    seed_devices,
    seed_kinds,
    seed_or_default,
    seed_randomness,
)
from lightning_stateful.iterable_datasets.pass_history import history_of
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import (
    epoch_has_begun,
    next_step,
    reloads_every,
    warn_of_draws_before_seeding,
)
from lightning_stateful.loops.ranks import gathered, topology_of
from lightning_stateful.loops.saved_progress import SEED_REMEDY
from lightning_stateful.samplers.rank_exchange import end_comparing, kinds_found_alike


def seed_model(seed: int, rank: int, alike: Collection[str], stage: str, epoch: int, batch: int) -> None:
    """Seed torch on every device, NumPy and ``random`` for what happens from this batch to the next.

    Args:
        seed: The seed.
        rank: The data-parallel rank.
        alike: Kinds of generators from which all ranks draw the same numbers, those of rank 0.
        stage: What happens then.
        epoch: The epoch.
        batch: The batch in it.
    """
    first, second = (0, rank) if "torch" in alike else (rank, 0)
    seed_devices(derive_seed_within(("model", seed, first, stage), epoch, batch))
    others = [kind for kind in KINDS if (kind in alike) != ("torch" in alike)]
    if rank and others:
        seed_kinds(others, derive_seed_within(("model", seed, second, stage), epoch, batch))


def seed_of_run(trainer: pl.Trainer, seed: int | None) -> int:
    """The seed of a run: that of rank 0 where ``seed_everything`` was given another on each and data are not dealt out.

    Ranks draw apart then by their numbers, as their generators stood apart before training. Where data are dealt out,
    ranks that go by other seeds are refused when their loaders are compared. A collective of the trainer's ranks.

    Args:
        trainer: The trainer.
        seed: The seed that was passed; None for that of ``seed_everything``, or 0.
    """
    own = seed_or_default(seed)
    if trainer._accelerator_connector.use_distributed_sampler or topology_of(trainer).num_replicas == 1:
        return own
    seeds: list[int] = gathered(own)
    if len(set(seeds)) > 1:
        said = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(seeds))
        rank_zero_info(f"Ranks were seeded apart ({said}). All go by the seed of rank 0, and each draws by its number.")
    return seeds[0]


def kinds_of_model(combined: CombinedLoaders | None) -> frozenset[str]:
    """The kinds of generators from which the model draws alike on all ranks.

    These are the kinds that stood alike before training, as in torch, where ``seed_everything`` makes all of them so,
    and torch those that nobody seeds. Where iterables that are not seeded have to draw alike, all kinds: these draw
    from the same generators as the model.
    """
    if combined is None:
        return kinds_found_alike()
    return frozenset(KINDS) if combined.draw_alike_as_model else combined.alike


def seed_stage(trainer: pl.Trainer, seed: int, stage: str, combined: CombinedLoaders | None) -> None:
    """Seed what happens in a hook of an epoch, and in those behind it, on each rank as :func:`kinds_of_model` says.

    Args:
        trainer: The trainer.
        seed: The seed.
        stage: The name of the hook.
        combined: The training loaders.

    Warns:
        StatefulWarning: Hooks have drawn as the epoch started, before they were seeded.
    """
    if stage == "epoch start":
        warn_of_draws_before_seeding(trainer)
    seed_model(seed, topology_of(trainer).rank, kinds_of_model(combined), stage, *next_step(trainer))


class PassSeeds:
    """Seeds what loaders draw as they begin a pass, such as an order, where their reads are not seeded.

    The generators of the process are seeded for that. With ``seed_model`` they are by then, for the loader that is read
    first, in ``on_train_epoch_start``. But Lightning fetches the first batch of a loader without length before that
    hook, in a first epoch and on a resume, and does not call the hook where it resumes within an epoch. Without
    ``seed_model`` they are put back once the first batch was read.

    Args:
        trainer: The trainer.
        seed: The seed.
        combined: The training loaders.
        seeds_model: Whether the model is seeded.
    """

    def __init__(self, trainer: pl.Trainer, seed: int, combined: CombinedLoaders, *, seeds_model: bool) -> None:
        self._trainer, self._seed, self._combined, self._seeds_model = trainer, seed, combined, seeds_model
        self._before: Randomness | None = None
        for path, loader in combined.loaders.items():
            if combined.is_unseeded(path) and not loader.num_workers:
                # A resume reads earlier passes again.
                order: Any = loader.order
                history_of(order.dataset).seed_pass = partial(self._seed_pass, path)

    def begin(self, path: str, epoch: int, *, begun: bool) -> None:
        """A pass is about to begin.

        Args:
            path: Of which of the loaders.
            epoch: The epoch.
            begun: Whether that hook was called for the pass, if the loop's counters say that the epoch has begun.
        """
        if not self._combined.is_unseeded(path):
            return
        if not self._seeds_model:
            self._before = self._before or Randomness.now()
        elif begun and path == next(iter(self._combined.loaders)) and epoch_has_begun(self._trainer):
            return
        self._seed_pass(path, epoch)

    def _seed_pass(self, path: str, epoch: int) -> None:
        """Seed the process's generators as they are where a loader begins its pass of an epoch."""
        is_first = self._seeds_model and path == next(iter(self._combined.loaders))
        stage = "epoch start" if is_first else f"pass {path}"
        rank, alike = topology_of(self._trainer).rank, kinds_of_model(self._combined)
        seed_model(self._seed, rank, alike, stage, epoch, 0)

    def end(self) -> None:
        """A batch was read."""
        if self._before is not None:
            self._before.restore()
            self._before = None


def seed_validation_data(trainer: pl.Trainer, seed: int, settings: Any) -> None:
    """Seed, before validation data are read, what they draw from the generators of the process, or workers begin with.

    A resume may begin with a validation, behind no batch. On several ranks the generators that stood alike draw alike.

    Args:
        trainer: The trainer.
        seed: The seed.
        settings: The callback's; nothing is seeded without its ``seed_model``.
    """
    if settings.seed_model:
        seed_model(seed, topology_of(trainer).rank, kinds_found_alike(), "validation data", *next_step(trainer))


def end_seeding(stage: str, is_seeded: bool) -> None:
    """Leave generators that stood alike on all ranks before a fit so, and compare them anew before the next.

    Args:
        stage: The stage that ends.
        is_seeded: Whether a fit seeds the model.
    """
    end_comparing(were_seeded=stage == "fit" and is_seeded)


def request_by_epoch(trainer: pl.Trainer, request: Callable[[], Any], seed: int | None) -> Any:
    """Ask for training loaders; those that are built anew for an epoch draw by the seed and that epoch, on all ranks.

    By then the generators of the process are seeded for the model: a resume would find them elsewhere. None seeds none.
    """
    if seed is None or not reloads_every(trainer) or trainer.current_epoch <= 0:
        loaders = request()
        # Kept with the loop.
        vars(trainer.fit_loop)[_STOOD] = Randomness.now()
        return loaders
    with keep_randomness():
        seed_randomness(derive_seed_within(("train_dataloader", seed), trainer.current_epoch, 0))
        return request()


# Where generators stood as the training loaders were given to Lightning, until validation loaders are asked for.
_STOOD = "_generators_stood"


@contextmanager
def drawn_before_training(trainer: pl.Trainer) -> Iterator[None]:
    """A block in which ``val_dataloader`` draws from where generators stood as the training loaders were given.

    Lightning asks for it right behind them, or within a later epoch. But of a loader without length it reads the first
    batch in between, for which generators are seeded, and on a resume that is another batch.
    """
    stood: Randomness | None = None if trainer.sanity_checking else vars(trainer.fit_loop).pop(_STOOD, None)
    if stood is None or reloads_every(trainer) or stood.as_texts() == Randomness.now().as_texts():
        yield
        return
    with keep_randomness():
        stood.restore()
        yield


@contextmanager
def naming_remedies(trainer: pl.Trainer, seed: int | None) -> Iterator[None]:
    """Say of data or a seed that differ from a checkpoint's what to do in this run.

    Args:
        trainer: The trainer.
        seed: The seed that was passed; None for that of ``seed_everything``.

    Raises:
        StateMismatchError: As it was raised, with that remedy.
    """
    try:
        yield
    except StateMismatchError as error:
        found = [replace(one, remedy=_remedy(trainer, seed, one)) for one in error.differences]
        raise StateMismatchError(found, where=error.where) from None


def _remedy(trainer: pl.Trainer, seed: int | None, difference: Difference) -> str:
    names = difference.path.split(".")
    if names[-1] == "seed" and seed is None:
        return SEED_REMEDY
    if "dataset" in names and reloads_every(trainer):
        return (
            "train_dataloader is called anew for an epoch (reload_dataloaders_every_n_epochs): let the samples that it "
            "chooses follow from self.trainer.current_epoch; or restore what it reads before the loaders are built, in "
            "load_state_dict of the data module or on_load_checkpoint of the LightningModule; or accept the change "
            f"with accept=({difference.path!r},). If it is restored, and the run was stopped within the epoch "
            "(should_stop, max_steps), on_train_epoch_end may have changed it before the save: resume from a "
            "checkpoint that was written as a batch ended."
        )
    if "dataset" in names:
        return (
            f"{difference.remedy} If a hook changes the data in training, restore that before loaders are built, in "
            "load_state_dict of the data module or on_load_checkpoint of the LightningModule."
        )
    return difference.remedy
