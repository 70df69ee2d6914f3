"""The callback that makes a Trainer resume exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import ConfigurationError, StateError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.rng import seed_or_default
from lightning_stateful.state import VERSION
from lightning_stateful.trainer import loop_progress, other_callbacks
from lightning_stateful.trainer.checkpoint import (
    drop_loader_states,
    find_data_state,
    fits_our_module,
    module_name,
    put_data_state,
    read_callback_state,
    refuse_other_seed,
    warn_of_missing_loops,
)
from lightning_stateful.trainer.eval_loaders import exact_evaluation
from lightning_stateful.trainer.lightning import TrainerFn, pl
from lightning_stateful.trainer.loader_hooks import Request, intercept, release
from lightning_stateful.trainer.logs import log_data
from lightning_stateful.trainer.loop_progress import LoopProgress
from lightning_stateful.trainer.other_callbacks import monitored_metrics, restore_metrics
from lightning_stateful.trainer.ranks import topology_of
from lightning_stateful.trainer.signals import HeldSignals
from lightning_stateful.trainer.train_loaders import FitData, Settings, TrainingData, seed_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a run goes on with, until its first batch or validation.

    Attributes:
        progress: Where, in steps of the present topology.
        global_step: Optimizer steps taken.
        metrics: Values of monitored metrics.
    """

    progress: LoopProgress
    global_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class StatefulDataCallback(pl.Callback):
    """Makes ``Trainer.fit(ckpt_path=...)`` go on at the very next batch, wherever the loaders come from.

    Training loaders over map-style datasets, with whatever sampler, are replaced by loaders whose batches are a
    function of Lightning's own counters; evaluation loaders by ones that give every sample once over all ranks. A
    :class:`StatefulDataModule` brings a callback of its own along; add one yourself for loaders that come from
    anywhere else.

    Args:
        seed: Chooses the orders of loaders that are not yet stateful, and the randomness; by default the seed of
            Lightning's ``seed_everything``, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside datasets a function of (seed, path of the
            loader, epoch, batch).
        seed_model: Make what the model draws (dropout) a function of (seed, data-parallel rank, epoch, batch).
        accept: Names of differences between a checkpoint and the present data to let pass, for example
            ``("dataset.length", "seed")``; with ``"nondeterministic"`` also samplers that cannot be repeated.
        log_data: Whenever the trainer logs, log what has been served of every source of a mixture, and
            ``padding/share``, ``tokens`` and ``budget_use`` of batches of like lengths.
        brought_along: Whether a data module made this callback, and may change its settings.

    State:
        The progress of training that the checkpoint belongs to, and, where no :class:`StatefulDataModule` holds it, the
        position of the data.

    Raises:
        UnsupportedLoaderError: At the start of training, for loaders that cannot be taken over.
        RankMismatchError: At the start of training, if the ranks' data differ.
        StateError: On resume, if the checkpoint does not fit the data; nothing has been trained then.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        seed_samples: bool = True,
        seed_model: bool = True,
        accept: Collection[str] = (),
        log_data: bool = False,
        brought_along: bool = False,
    ) -> None:
        self.brought_along = brought_along
        self.settings = Settings(
            seed=seed,
            seed_samples=seed_samples,
            seed_model=seed_model,
            accept=accept,
            log_data=log_data,
        )
        self._trainer: pl.Trainer | None = None
        self._seed = 0
        self._fit: FitData | None = None
        # What the run goes on with, up to its first batch or validation.
        self._resume: Resume | None = None
        self._in_resumed_epoch = False
        self._validation_epoch = -1
        self._batch: loop_progress.BatchBegun | None = None
        self._unchecked = True
        self._interrupted: LoopProgress | None = None
        self._signals = HeldSignals()

    @property
    def state_key(self) -> str:
        """The same in every run, so that a checkpoint finds it."""
        return "StatefulDataCallback"

    # Loaders

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Step between the trainer's loops and their loaders."""
        if stage == "fit" and self.brought_along and not fits_our_module(trainer):
            # The data module that brought it is not trained on any more.
            self._fit, self._resume = None, None
            trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
            release(trainer)
            return
        if stage == "fit":
            earlier = self._data if trainer is self._trainer else None
            self._trainer, self._fit, self._resume = trainer, FitData(trainer, self.settings, earlier), None
            self._seed = seed_or_default(self.settings.seed)
        intercept(trainer, self._training_loaders, partial(self._evaluation_loaders, trainer))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the trainer as it was."""
        loop_progress.restore_max_steps(trainer)
        self._signals.end()
        if self._resume is not None and stage == "fit":
            other_callbacks.finish_averaging(trainer)

    @property
    def _data(self) -> TrainingData | None:
        return None if self._fit is None else self._fit.data

    def _training_loaders(self, request: Request) -> Any:
        return self._fitting().loaders(request)

    def _evaluation_loaders(self, trainer: pl.Trainer, stage: str, request: Request) -> Any:
        epoch = -1
        if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
            epoch, self._validation_epoch = self._validation_epoch, -1
        with loop_progress.validation_loaders_as_of(trainer, epoch):
            return exact_evaluation(trainer, request, self.settings, stage)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The progress of training, and the data's state where no data module holds it; fresh plain data."""
        module = module_name(self._trainer)
        progress = self._progress()
        return {
            "version": VERSION,
            "restored": self._fit is None or not self._fit.awaits_start,
            "averaged": other_callbacks.holds_averages(self._trainer),
            "module": module,
            "seed": self._seed,
            "progress": progress.to_dict(),
            "monitored": self._monitored(progress),
            "data": self.data_state() if module is None else None,
        }

    def data_state(self) -> dict[str, Any] | None:
        """The state of the training data at this progress; None before there are loaders."""
        data = self._data
        return None if data is None else data.combined.state_at(*self._progress().data)

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of every source, at this progress; equal on all ranks.

        Of several loaders a dict by path; empty before there are loaders.
        """
        data = self._data
        return {} if data is None else data.report_at(*self._progress().data)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep this trainer's data state, where the data module has left it out, or has served another trainer since.

        Raises:
            StateError: This callback has served another trainer since.
        """
        if self._trainer not in (None, trainer):
            raise StateError(
                "This StatefulDataCallback has been fitted in another trainer since, and knows only its position. "
                "Give every trainer a callback of its own, and save a checkpoint before the next trainer is fitted."
            )
        drop_loader_states(checkpoint)
        if (name := module_name(trainer)) is not None:
            put_data_state(checkpoint, name, self.state_key, self.data_state())

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remember the progress: Lightning soon forgets whether it was validating."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._interrupted = self._progress()
            self._signals.end(failed=True)

    def _progress(self) -> LoopProgress:
        if self._resume is not None:
            return self._resume.progress
        if self._interrupted is not None:
            return self._interrupted
        return LoopProgress() if self._trainer is None else loop_progress.read_progress(self._trainer, self._batch)

    def _monitored(self, progress: LoopProgress) -> dict[str, float]:
        if self._resume is not None:
            return dict(self._resume.metrics)
        return {} if self._trainer is None else monitored_metrics(self._trainer, epoch_ended=progress.ended)

    # Resuming

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Place the data and rewrite the loop counters that Lightning is about to restore.

        Raises:
            StateError: The checkpoint does not fit the data.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.limit_train_batches == 0:
            return
        other_callbacks.refuse_finders(trainer)
        loops = checkpoint.get("loops")
        if loops is None:
            warn_of_missing_loops(checkpoint)
            return
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        progress, metrics = (loop_progress.locate(loops["fit_loop"]), {}) if own is None else read_callback_state(own)
        state = find_data_state(checkpoint, own, module_name(trainer), self.settings.accept)
        progress = self._fitting().place(state, progress)
        if own is not None:
            refuse_other_seed(own, self._seed, self.settings.accept)
        loops["fit_loop"] = loop_progress.rewritten(loops["fit_loop"], progress)
        self._go_on(Resume(progress=progress, global_step=checkpoint["global_step"], metrics=metrics))
        if trainer.strategy.restore_checkpoint_after_setup:
            # Such strategies restore after on_fit_start.
            loop_progress.lift_max_steps(trainer, progress, checkpoint["global_step"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where a trainer is fitted again after it was stopped within an epoch, go on at the next batch."""
        earlier = self._fitting().earlier
        if self._resume is None and trainer.ckpt_path is None and earlier is not None:
            self._fit_again(trainer, earlier)
        self._interrupted = self._batch = None
        if self._resume is not None:
            loop_progress.lift_max_steps(trainer, self._resume.progress, self._resume.global_step)

    def _fit_again(self, trainer: pl.Trainer, earlier: TrainingData) -> None:
        progress = self._progress()
        if not progress.running:
            return
        try:
            progress = self._fitting().place(earlier.combined.state_at(*progress.data), progress)
        except StateMismatchError as error:
            rank_zero_warn(
                f"This trainer was stopped after batch {progress.batch} of epoch {progress.epoch} and is fitted again "
                f"on other data. The rest of that epoch is not trained on. {error}",
                category=StatefulWarning,
            )
            return
        loop_progress.continue_from(trainer, progress)
        self._go_on(Resume(progress=progress, global_step=trainer.global_step))

    def _go_on(self, resume: Resume) -> None:
        self._resume, self._validation_epoch = resume, resume.progress.val_reload_epoch

    # Training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the first epoch after a resume run as it would have without the stop."""
        self._fitting().begin()
        self._unchecked = True
        self._in_resumed_epoch = self._resume is not None
        if self._resume is not None:
            restore_metrics(trainer, self._resume.metrics)
            loop_progress.step_plateau_schedulers(trainer, self._resume.progress)
            loop_progress.prepare_first_epoch(trainer, self._resume.progress)
        self._signals.begin(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws before the first batch of an epoch."""
        self._resume, self._unchecked = None, True
        self._seed_model(trainer, "epoch start")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """From here on the loop's counters say where training is."""
        self._signals.hold()
        self._resume = None
        if self._unchecked:
            self._fitting().check_in_use()
        self._unchecked = False
        self._batch = loop_progress.note_batch(trainer)
        other_callbacks.clear_stale_gradients(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Refuse a step that took several batches through ``dataloader_iter``; log what is asked for.

        Raises:
            ConfigurationError: A step with ``dataloader_iter`` took more or fewer than one batch.
        """
        loop_progress.skip_repeated_validation(trainer)
        if self._data is not None:
            self._data.check_one_batch_a_step()
            log_data(trainer, pl_module, self._data, self.settings)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws during a validation within training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._resume = None
            self._seed_model(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let learning rate schedulers that monitor a metric step in a resumed epoch too."""
        self._resume = None
        if self._in_resumed_epoch:
            loop_progress.end_resumed_epoch(trainer)
        self._in_resumed_epoch = False
        self._seed_model(trainer, "epoch end")

    def _seed_model(self, trainer: pl.Trainer, stage: str) -> None:
        if self.settings.seed_model:
            seed_model(self._seed, topology_of(trainer).rank, stage, *loop_progress.next_step(trainer))

    def _fitting(self) -> FitData:
        if self._fit is None:
            raise ConfigurationError(
                "StatefulDataCallback works inside a Trainer; pass it to Trainer(callbacks=[...])."
            )
        return self._fit
