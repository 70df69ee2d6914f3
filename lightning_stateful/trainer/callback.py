"""The callback that makes a Trainer resume exactly.

A fit goes through phases (``phases.py``). While it is resumed or interrupted the phase says how far training has got;
else the loop's counters do. On a save Lightning calls ``state_dict``, then ``on_save_checkpoint``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StateError, StatefulWarning, StateMismatchError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loops import loop_progress, other_callbacks
from lightning_stateful.loops.checkpoint import (
    find_data_state,
    refuse_empty_loops,
    refuse_other_seed,
    refuse_restored_loops,
    refuse_unused_state,
    stateful_module,
    trains_on_our_module,
    warn_of_missing_loops,
    warn_of_unknown_position,
)
from lightning_stateful.loops.lightning import TrainerFn, check_trainer, pl
from lightning_stateful.loops.run_notes import note_of_run, say_first_step, say_resumed
from lightning_stateful.loops.saved_progress import (
    CALLBACK_KEY,
    STATE_KEY,
    LoopProgress,
    read_callback_state,
    read_counters,
    rewritten,
)
from lightning_stateful.loops.signals import HeldSignals
from lightning_stateful.module_state import cut_epochs, module_changes, optimizer_steps
from lightning_stateful.module_state.epoch_results import EpochResults
from lightning_stateful.state import VERSION
from lightning_stateful.stream_loader.rank_store import begin_anew, tell_failure
from lightning_stateful.trainer.eval_loaders import exact_evaluation
from lightning_stateful.trainer.ledger import LedgerWriter
from lightning_stateful.trainer.loader_proxy import Request, discard_training_loaders, intercept, release
from lightning_stateful.trainer.logs import log_data
from lightning_stateful.trainer.phases import Interrupted, Resumed, SetUp, Training
from lightning_stateful.trainer.run_seeds import end_seeding, seed_stage, seed_validation_data
from lightning_stateful.trainer.token_limit import TokenLimit
from lightning_stateful.trainer.train_loaders import Settings, TrainLoaders, refuse_other_loaders
from lightning_stateful.trainer.validation_data import ValidationData
from lightning_stateful.user_samplers.user_sampler import Tail


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
        seed_model: Make what the model draws (dropout) follow from (seed, epoch, batch); ranks draw alike as in torch.
        tail: What becomes of the last items of a training sampler of yours that are fewer than a step of all ranks
            takes: ``"split"`` (the default; whole batches are repeated), ``"pad"`` or ``"drop"``. See
            :class:`~lightning_stateful.user_samplers.ddp_wrapper.DDPSamplerWrapper`.
        accept: Names of differences between a checkpoint and the present data to let pass, for example
            ``("dataset.length", "seed")``; with ``"nondeterministic"`` also samplers that cannot be repeated.
        log_data: Whenever the trainer logs, log position, samples, tokens, the share of every source, and padding, as
            ``data/samples`` and so on; docs/logs.md has all names.
        check_content: Keep a digest of every hundredth batch of map-style loaders in checkpoints, and of first batches
            of passes over streams, and read one again on a resume, to refuse data that are others than before.
        ledger: A folder to which each rank writes what it trains on: of data with an index the indices, of streams
            shard and number of each sample. Read it with :func:`~lightning_stateful.ledger.read_ledger`.
        ledger_key: Gives keys of a batch's samples, integers or strings, for the ledger of data that have neither:
            ``lambda batch: batch["id"]``.
        max_tokens_total: Stop training after the first step by which so many tokens of packed documents were served
            since it began, over all ranks, separators among them and padding left out; exact over resumes.
        skip: Batches and samples to leave out of training: ``{2: range(300, 350)}`` for batches 300 to 349 of epoch 2,
            a set of indices of the dataset, a function of an array of indices, or a list of these. On a resume it may
            be another.

    State:
        The loop progress that the checkpoint belongs to, and, where no :class:`StatefulDataModule` holds it, the
        position of the data.

    Raises:
        UnsupportedLoaderError: At the start of training, for loaders that cannot be patched.
        RankMismatchError: At the start of training, if the ranks' data differ.
        StateError: On resume, if the checkpoint does not fit the data; nothing has been trained then.
    """

    # Made by a data module, which sets its settings and whose trainer drops it when other data are fitted.
    brought_along = False

    def __init__(
        self,
        *,
        seed: int | None = None,
        seed_samples: bool = True,
        seed_model: bool = True,
        tail: Tail | None = None,
        accept: Collection[str] = (),
        log_data: bool = False,
        check_content: bool = True,
        ledger: str | Path | None = None,
        ledger_key: Callable[[Any], Any] | None = None,
        max_tokens_total: int | None = None,
        skip: Any = None,
    ) -> None:
        self.settings: Settings = Settings(
            seed=seed,
            seed_samples=seed_samples,
            seed_model=seed_model,
            tail=tail,
            accept=accept,
            log_data=log_data,
            check_content=check_content,
            ledger=LedgerWriter(ledger, ledger_key),
            max_tokens_total=max_tokens_total,
            skip=skip,
        )
        self._trainer: pl.Trainer | None = None
        self._loaders: TrainLoaders | None = None
        self._phase: SetUp | Resumed | Training | Interrupted = SetUp()
        self._signals = HeldSignals()
        self._results = EpochResults()
        self._tokens = TokenLimit()
        self._validation = ValidationData()

    @property
    def state_key(self) -> str:
        """The same in every run, so that a checkpoint finds it."""
        return CALLBACK_KEY

    # Loaders

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """From now on get all loaders that the trainer's loops ask for, and answer with stateful ones.

        Raises:
            ConfigurationError: The trainer is of the other package that Lightning comes in, or of an unknown version.
        """
        check_trainer(trainer)
        if stage == "fit" and self.brought_along and not trains_on_our_module(trainer):
            # The data module that brought it is not trained on any more.
            self._loaders, self._phase = None, SetUp()
            trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
            release(trainer)
            return
        if stage == "fit":
            begin_anew()
            module_changes.prepare_loading(trainer)
            begins_at = loop_progress.next_step(trainer)
            self._tokens = self._tokens.of(self.settings.max_tokens_total, anew=trainer is not self._trainer)
            if trainer is self._trainer and self._loaders is not None:
                self._phase = SetUp(earlier=self._loaders, stopped_at=self._progress(), begins_at=begins_at)
            else:
                self._phase = SetUp(begins_at=begins_at)
            self._trainer, self._loaders, self._results = trainer, None, EpochResults(trainer, self._results)
            self.settings.ledger.close()
            # Lightning may have built the user's own loaders before this hook.
            discard_training_loaders(trainer)
        intercept(trainer, partial(self._training_loaders, trainer), partial(self._evaluation_loaders, trainer))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the trainer as it was."""
        loop_progress.end_following(trainer)
        optimizer_steps.forget_steps(trainer)
        module_changes.end_watching(trainer)
        self._results.generators.end_watching(trainer)
        self._signals.end()
        self.settings.ledger.close()
        end_seeding(stage, self.settings.seed_model)
        if isinstance(self._phase, Resumed) and stage == "fit":
            other_callbacks.finish_averaging(trainer)

    def _training_loaders(self, trainer: pl.Trainer, request: Request) -> Any:
        """Answer the fit loop's request for training loaders; see :func:`intercept`."""
        phase, before = self._phase, self._loaders
        if isinstance(phase, Resumed) and not phase.training_began and before is not None:
            # They are built already, and Lightning may ask several times before it trains.
            return before.structure
        if before is None and isinstance(phase, SetUp):
            before = phase.earlier
        self._loaders = TrainLoaders.build(trainer, request, self.settings)
        if before is not None:
            self._loaders.continue_from(before)
        return self._loaders.structure

    def _evaluation_loaders(self, trainer: pl.Trainer, stage: str, request: Request) -> Any:
        epoch = -1
        if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
            epoch, request = self._validation_epoch(), partial(self._validation.noted, trainer, request)
        with loop_progress.validation_loaders_as_of(trainer, epoch):
            return exact_evaluation(trainer, request, self.settings, stage)

    def _validation_epoch(self) -> int:
        if isinstance(self._phase, Resumed):
            return self._phase.progress.val_reload_epoch
        return self._phase.validation_epoch if isinstance(self._phase, Training) else -1

    def state_dict(self) -> dict[str, Any]:
        """The loop progress, and the data's state where no data module holds it; fresh plain data.

        Raises:
            BaseException: The error that has ended the fit before it was restored: a checkpoint written on an error, as
                by OnExceptionCheckpoint, would take the place of the very one that it was to go on from.
        """
        error = sys.exc_info()[1]
        if error is not None and isinstance(self._phase, Interrupted) and not self._phase.was_restored:
            raise error
        progress, module, loaders = self._progress(), stateful_module(self._trainer), self._loaders
        self.settings.ledger.save(progress.epoch_and_step)
        tokens = self._tokens.state(loaders.combined, progress) if loaders else None
        asked_for = {"tokens": tokens, "ledger": self.settings.ledger.state(), "validation": self._validation.state()}
        content = loaders.content.state() if loaders else {}
        set_on_rank = loaders.combined.set_on_rank(*progress.epoch_and_step) if loaders else {}
        of_rank = loaders.content.of_rank.state(content["dataset_settings"], set_on_rank) if loaders else {}
        asked_for |= content
        asked_for |= module_changes.changes(self._trainer, progress, loop_progress.num_started(self._trainer))
        return {
            "version": VERSION,
            "restored": self._restored(),
            "averaged": module_changes.warn_of_averages(self._trainer),
            "module": None if module is None else type(module).__qualname__,
            "seed": self._seed,
            "seeds": loaders.combined.seeds_beside(self._seed) if loaders else {},
            "progress": progress.to_dict(),
            "metrics": self._logged(progress),
            "results": {} if self._trainer is None else self._results.state(self._trainer, progress, of_rank),
            "data": self._data_state_at(progress) if module is None else None,
            "written": note_of_run(self._trainer, loaders.combined) if self._trainer and loaders else {},
            **{name: value for name, value in asked_for.items() if value},
        }

    def _restored(self) -> bool:
        """Whether Lightning has restored its loops and optimizers, which it does just before training."""
        phase, trainer = self._phase, self._trainer
        if isinstance(phase, Interrupted):
            return phase.was_restored
        if not isinstance(phase, Resumed) or phase.training_began:
            return True
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return False
        # Between the two and training there is no hook; Lightning drops the checkpoint when all of it is restored.
        return not trainer._checkpoint_connector._loaded_checkpoint

    def data_state(self) -> dict[str, Any] | None:
        """The state of the training data at this point of training; None before there are loaders."""
        return self._data_state_at(self._progress())

    def _data_state_at(self, progress: LoopProgress) -> dict[str, Any] | None:
        return None if self._loaders is None else self._loaders.combined.state_at(*progress.epoch_and_step)

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of every source, at this point of training; equal on all ranks.

        Of several loaders a dict by path; empty before there are loaders.
        """
        if self._loaders is None:
            return {}
        reports = self._loaders.combined.report_at(*self._progress().epoch_and_step)
        return reports[""] if list(reports) == [""] else reports

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the data state into the data module's entry, whatever its ``state_dict`` has returned.

        Raises:
            StateError: This callback has served another trainer since.
        """
        if self._trainer not in (None, trainer):
            raise StateError(
                "This StatefulDataCallback has been fitted in another trainer since, and knows only its position. "
                "Give every trainer a callback of its own, and save a checkpoint before the next trainer is fitted."
            )
        if self._trainer is None:
            warn_of_unknown_position(trainer)
        # Lightning has saved empty states of the proxies, which a Trainer of plain loaders would refuse.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        if (module := stateful_module(trainer)) is None:
            return
        progress = LoopProgress.from_dict(checkpoint["callbacks"][self.state_key]["progress"])
        if (data := self._data_state_at(progress)) is not None:
            # A module that overrides state_dict leaves it out, and one in two trainers may have that of the other.
            name = type(module).__qualname__
            checkpoint[name] = {**checkpoint.get(name, {}), STATE_KEY: data}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remember how far the run got, and tell ranks that wait for this one."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        tell_failure(exception)
        was_restored = self._restored() and (trainer.ckpt_path is None or not isinstance(self._phase, SetUp))
        if not isinstance(self._phase, Resumed) or not was_restored:
            self._phase = Interrupted(self._progress(), was_restored)
        self._signals.end(failed=True)
        self.settings.ledger.save(self._progress().epoch_and_step)
        self.settings.ledger.close()

    def _progress(self) -> LoopProgress:
        """The progress of training."""
        phase = self._phase
        if isinstance(phase, (Resumed, Interrupted)):
            return phase.progress
        if isinstance(phase, SetUp) and phase.stopped_at is not None:
            return phase.stopped_at
        batch = phase.batch if isinstance(phase, Training) else None
        return LoopProgress() if self._trainer is None else loop_progress.read_progress(self._trainer, batch)

    def _logged(self, progress: LoopProgress) -> dict[str, float]:
        if isinstance(self._phase, Resumed):
            return dict(self._phase.metrics)
        return cut_epochs.metrics_at(self._trainer, progress)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that a finished run has been restored, which Lightning ends without training."""
        if isinstance(self._phase, Resumed):
            self._results.keep(trainer, self._phase.saved.get("results"))
            self._phase = replace(self._phase, training_began=True)

    # Resuming

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Build the loaders where the run goes on, and rewrite the loop counters that Lightning is about to restore.

        Raises:
            StateError: The checkpoint does not fit the data.
        """
        if trainer.state.fn != TrainerFn.FITTING or trainer.limit_train_batches == 0:
            return
        other_callbacks.prepare_resume(trainer)
        if (loops := checkpoint.get("loops")) is None:
            warn_of_missing_loops(checkpoint)
            return
        refuse_empty_loops(loops)
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        # Where it was written without this callback, Lightning's counters tell.
        progress, metrics = read_callback_state(saved) if saved is not None else (read_counters(loops["fit_loop"]), {})
        state = find_data_state(checkpoint, saved, stateful_module(trainer), self.settings.accept)
        before = progress
        loaders, progress = TrainLoaders.build_at(trainer, self.settings, state, progress, saved)
        if saved is not None:
            refuse_other_seed(saved, loaders.seed, loaders.combined.seeds(), self.settings.accept)
            loaders.expect(saved, state)
        self._validation.expect((saved or {}).get("validation", {}))
        self._tokens.load(loaders.combined, (saved or {}).get("tokens"), progress)
        loops["fit_loop"] = rewritten(loops["fit_loop"], progress)
        global_step = checkpoint["global_step"] + progress.uncounted
        self._loaders, self._phase = loaders, Resumed(progress, global_step, metrics, saved or {})
        self.settings.ledger.resumed_from((saved or {}).get("ledger", ""), before.epoch_and_step)
        if state is not None:
            say_resumed(trainer, loaders, progress, before, (saved or {}).get("written") or {}, global_step=global_step)
        if trainer.strategy.restore_checkpoint_after_setup:
            # Such strategies restore after on_fit_start.
            loop_progress.lift_max_steps(trainer, progress, global_step)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on at the next batch in a trainer that is fitted again after it was stopped within an epoch.

        Raises:
            ConfigurationError: A state was loaded into the data module by hand, and there is no ``ckpt_path``.
        """
        refuse_unused_state(trainer)
        if isinstance(self._phase, SetUp):
            if trainer.ckpt_path is None:
                self._fit_again(trainer, self._phase)
            if isinstance(self._phase, SetUp):
                self._phase = replace(self._phase, stopped_at=None)
                if trainer.ckpt_path is None:
                    loop_progress.forget_restart(trainer)
        if isinstance(self._phase, Resumed):
            loop_progress.follow_lengths(trainer)
            loop_progress.lift_max_steps(trainer, self._phase.progress, self._phase.global_step)

    def _fit_again(self, trainer: pl.Trainer, phase: SetUp) -> None:
        earlier, progress = phase.earlier, phase.stopped_at
        if earlier is None or progress is None or not progress.running:
            return
        try:
            state, before = earlier.combined.state_at(*progress.epoch_and_step), progress
            self._loaders, progress = TrainLoaders.build_at(trainer, self.settings, state, progress)
        except StateMismatchError as error:
            rank_zero_warn(
                f"This trainer was stopped after batch {progress.batch} of epoch {progress.epoch} and is fitted again "
                f"on other data. The rest of that epoch is not trained on. {error}",
                category=StatefulWarning,
            )
            return
        say_resumed(trainer, self._loaders, progress, before, global_step=trainer.global_step)
        loop_progress.continue_from(trainer, progress)
        self.settings.ledger.resumed_from(self.settings.ledger.state(), before.epoch_and_step)
        self._phase = Resumed(progress, trainer.global_step)

    # Training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the first epoch after a resume run as it would have without the stop.

        Raises:
            StateError: Lightning has restored its loops, and has not called this callback with the checkpoint.
        """
        if isinstance(self._phase, SetUp) and trainer.ckpt_path is not None:
            refuse_restored_loops(self._phase.begins_at, loop_progress.next_step(trainer))
        refuse_other_loaders(trainer, self._loaders)
        if self._loaders is not None:
            self._loaders.begin()
            self.settings.ledger.begin(trainer, self._loaders.combined.loaders, self._progress().epoch_and_step)
        module_changes.watch(trainer, self._phase.saved if isinstance(self._phase, Resumed) else None)
        if isinstance(self._phase, Resumed):
            self._phase = replace(self._phase, training_began=True)
            other_callbacks.restore_metrics(trainer, self._phase.metrics)
            module_changes.restore(trainer, self._phase.saved, self._phase.progress)
            self._results.load(self._phase.saved.get("results"), trainer)
            optimizer_steps.take_due_steps(trainer, self._phase.progress)
            loop_progress.prepare_first_epoch(trainer, self._phase.progress)
            say_first_step(trainer)
        else:
            self._phase = Training()
        self._tokens.begin(trainer, None if self._loaders is None else self._loaders.combined)
        optimizer_steps.watch_steps(trainer)
        self._results.generators.watch(trainer, partial(seed_validation_data, trainer, self._seed, self.settings))
        self._signals.begin(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws before the first batch of an epoch."""
        self._phase = replace(self._in_training(), batch=None)
        module_changes.look_at_start(trainer)
        self._seed_model(trainer, "epoch start")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """From here on the loop's counters say where training is."""
        self._signals.hold()
        phase = self._in_training()
        if phase.batch is None:
            refuse_other_loaders(trainer, self._loaders)
        self._phase = Training(loop_progress.note_batch(trainer), phase.validation_epoch)
        self._results.note_batch(trainer)
        self.settings.ledger.begin_batch(trainer)
        optimizer_steps.begin_batch(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Refuse a step that took several batches through ``dataloader_iter``; log what is asked for.

        Raises:
            ConfigurationError: A step with ``dataloader_iter`` took more or fewer than one batch.
        """
        loop_progress.skip_repeated_validation(trainer)
        self._results.add(trainer)
        self.settings.ledger.end_batch()
        if self._loaders is not None:
            self._loaders.check_one_batch_a_step()
            self._tokens.after_batch(trainer, self._loaders.combined)
            if self.settings.log_data:
                log_data(trainer, pl_module, self._loaders.combined)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws during a validation within training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._phase = self._in_training()
            self._results.note_validation(trainer)
            self._seed_model(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let learning rate schedulers that monitor a metric step in a resumed epoch too."""
        self._phase = self._in_training()
        reached = loop_progress.next_step(trainer, begun=True)
        self.settings.ledger.end_epoch(reached, is_over=self._progress().epoch_and_step[0] > reached[0])
        if self._loaders is not None and cut_epochs.is_cut(trainer):
            self._loaders.combined.keep_changes()
            self._loaders.content.settings.keep_changes()
        self._results.end(trainer)
        optimizer_steps.end_resumed_epoch(trainer)
        self._seed_model(trainer, "epoch end")

    def _in_training(self) -> Training:
        """The phase of a run that trains by now."""
        return self._phase if isinstance(self._phase, Training) else Training(None, self._validation_epoch())

    @property
    def _seed(self) -> int:
        # That of seed_everything within setup() of a module, too.
        return seed_or_default(self.settings.seed) if self._loaders is None else self._loaders.seed

    def _seed_model(self, trainer: pl.Trainer, stage: str) -> None:
        if self.settings.seed_model:
            seed_stage(trainer, self._seed, stage, self._loaders.combined if self._loaders else None)
