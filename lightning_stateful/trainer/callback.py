"""The callback that makes a Trainer resume exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError
from lightning_stateful.state import VERSION
from lightning_stateful.trainer import counters
from lightning_stateful.trainer.checkpoint import find_data_state, read_callback_state
from lightning_stateful.trainer.counters import Moment
from lightning_stateful.trainer.evaluation_data import exact_evaluation
from lightning_stateful.trainer.metrics import monitored_metrics, restore_metrics
from lightning_stateful.trainer.randomness import seed_model
from lightning_stateful.trainer.source import Request, intercept, request_training_loaders
from lightning_stateful.trainer.training_data import Settings, TrainingData, topology_of


class StatefulDataCallback(pl.Callback):
    """Makes ``Trainer.fit(ckpt_path=...)`` go on at the very next batch, wherever the loaders come from.

    Training loaders over map-style datasets with torch's own samplers are replaced by loaders whose batches are a
    function of Lightning's own counters; evaluation loaders by ones that give every sample once over all ranks. A
    :class:`StatefulDataModule` brings a callback of its own along; add one yourself for loaders that come from
    anywhere else.

    Args:
        seed: Chooses the orders of loaders that are not yet stateful, and the randomness.
        seed_samples: Make what torch, NumPy and ``random`` draw inside datasets a function of (seed, epoch, sample).
        seed_model: Make what the model draws (dropout) a function of (seed, data-parallel rank, epoch, batch).
        accept: Names of differences between a checkpoint and the present data to let pass, for example
            ``("dataset.length", "seed")``.
        brought_along: Whether a data module made this callback, and may change its settings.

    State:
        The moment of training that the checkpoint belongs to, and, where no :class:`StatefulDataModule` holds it, the
        position of the data.

    Raises:
        UnsupportedLoaderError: At the start of training, for loaders that cannot be taken over.
        RankMismatchError: At the start of training, if the ranks' data differ.
        StateError: On resume, if the checkpoint does not fit the data; nothing has been trained then.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        seed_samples: bool = True,
        seed_model: bool = True,
        accept: Collection[str] = (),
        brought_along: bool = False,
    ) -> None:
        self.brought_along = brought_along
        self.settings = Settings(seed=seed, seed_samples=seed_samples, seed_model=seed_model, accept=accept)
        self._data: TrainingData | None = None
        self._prepared: TrainingData | None = None
        self._previous: TrainingData | None = None
        self._resumed: Moment | None = None
        self._state: Mapping[str, Any] | None = None
        self._metrics: dict[str, float] = {}
        self._in_resumed_epoch = False
        self._trainer: pl.Trainer | None = None

    @property
    def state_key(self) -> str:
        """The same in every run, so that a checkpoint finds it."""
        return "StatefulDataCallback"

    # Loaders

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Step between the trainer's loops and their loaders."""
        self._trainer = trainer
        if stage == "fit":
            self._previous, self._data, self._prepared, self._resumed = self._data, None, None, None
        intercept(trainer, self._training_loaders, self._evaluation_loaders)

    def _training_loaders(self, request: Request) -> Any:
        data, self._prepared = self._prepared, None
        if data is None and self._resumed is not None:
            data = self._build_again(self._resumed)
        self._data = data or self._build(request)
        return self._data.structure

    def _build(self, request: Request) -> TrainingData:
        return TrainingData.build(self._attached(), request, self.settings)

    def _evaluation_loaders(self, stage: str, request: Request) -> Any:
        return exact_evaluation(self._attached(), request(), self.settings, stage)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The moment of training, and the data's state where no data module holds it; fresh plain data."""
        module = self._module_name(self._trainer)
        return {
            "version": VERSION,
            "module": module,
            "moment": self._moment().to_dict(),
            "monitored": self._monitored(),
            "data": self.data_state() if module is None else None,
        }

    def data_state(self) -> dict[str, Any] | None:
        """The state of the training data at this moment; None before there are loaders."""
        data = self._data or self._prepared
        return None if data is None else data.group.state_at(*self._moment().data)

    def _monitored(self) -> dict[str, float]:
        if self._resumed is not None:
            return dict(self._metrics)
        return {} if self._trainer is None else monitored_metrics(self._trainer)

    def _moment(self) -> Moment:
        if self._resumed is not None:
            return self._resumed  # Lightning has not restored its counters yet.
        return Moment() if self._trainer is None else counters.read_moment(self._trainer)

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
        loops = checkpoint["loops"]
        own = checkpoint["callbacks"].get(self.state_key)
        moment, metrics = (counters.locate(loops["fit_loop"]), {}) if own is None else read_callback_state(own)
        state = find_data_state(checkpoint, own, self._module_name(trainer), self.settings.accept)
        data = self._build_as_of(moment)
        if state is not None:
            moment = data.load(state, moment)
        elif moment.data != (0, 0):
            _warn_of_missing_state(moment)
        loops["fit_loop"] = counters.rewritten(loops["fit_loop"], moment)
        self._resume(data, moment, state, metrics)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where a trainer is fitted again after it was stopped within an epoch, go on at the next batch."""
        if trainer.ckpt_path is not None or self._resumed is not None or self._previous is None:
            return
        moment = counters.read_moment(trainer)
        if not moment.running:
            return
        state = self._previous.group.state_at(*moment.data)
        data = self._build_as_of(moment)
        try:
            moment = data.load(state, moment)
        except StateMismatchError as error:
            rank_zero_warn(
                f"This trainer was stopped after batch {moment.batch} of epoch {moment.epoch} and is fitted again on "
                f"other data. The rest of that epoch is not trained on. {error}",
                category=StatefulWarning,
            )
            return
        counters.continue_from(trainer, moment)
        self._resume(data, moment, state, {})

    def _resume(
        self, data: TrainingData, moment: Moment, state: Mapping[str, Any] | None, metrics: dict[str, float]
    ) -> None:
        self._prepared, self._resumed, self._state, self._metrics = data, moment, state, metrics

    def _build_as_of(self, moment: Moment) -> TrainingData:
        """Build the loaders under the epoch at which an uninterrupted run would have built them."""
        trainer = self._attached()
        with counters.epoch_set_to(trainer, max(moment.train_reload_epoch, 0)):
            return self._build(lambda: request_training_loaders(trainer))

    def _build_again(self, moment: Moment) -> TrainingData:
        """Build loaders that Lightning asks for once more before the first batch, at the same place."""
        data = self._build_as_of(moment)
        if self._state is not None and (again := data.load(self._state, moment)) != moment:
            raise ConfigurationError(
                f"The data would now go on at batch {again.batch} of epoch {moment.epoch}, and not at batch "
                f"{moment.batch} as when the checkpoint was loaded: the batch size has changed since. Set it before."
            )
        return data

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the first epoch after a resume run as it would have without the stop."""
        self._previous = None
        if self._resumed is not None:
            restore_metrics(trainer, self._metrics)
            counters.step_plateau_schedulers(trainer, self._resumed)
            counters.prepare_first_epoch(trainer, self._resumed)
        self._in_resumed_epoch = self._resumed is not None
        self._resumed = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let learning rate schedulers that monitor a metric step in a resumed epoch too."""
        if self._in_resumed_epoch:
            counters.allow_plateau_schedulers(trainer)
        self._in_resumed_epoch = False

    # Randomness and checks while training

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws before the first batch of an epoch."""
        self._seed_model(trainer, "epoch start")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed what the model draws during a validation within training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._seed_model(trainer, "validation")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Refuse steps that take another number of batches than Lightning counts.

        Raises:
            ConfigurationError: A step with ``dataloader_iter`` took more or fewer than one batch.
        """
        if self._data is not None:
            self._data.check_one_batch_a_step()

    def _seed_model(self, trainer: pl.Trainer, stage: str) -> None:
        if self.settings.seed_model:
            seed_model(self.settings.seed, topology_of(trainer).rank, stage, *counters.next_step(trainer))

    def _attached(self) -> pl.Trainer:
        if self._trainer is None:
            raise ConfigurationError(
                "StatefulDataCallback works inside a Trainer; pass it to Trainer(callbacks=[...])."
            )
        return self._trainer

    @staticmethod
    def _module_name(trainer: pl.Trainer | None) -> str | None:
        """The key under which Lightning saves the data module's state, if it holds the data's."""
        module = None if trainer is None else getattr(trainer, "datamodule", None)
        return type(module).__qualname__ if getattr(module, "holds_data_state", False) else None


def _warn_of_missing_state(moment: Moment) -> None:
    rank_zero_warn(
        "The checkpoint has no data state: it was made without lightning-stateful, or before there were loaders. The "
        f"run goes on at batch {moment.batch} of epoch {moment.epoch}, as the loop counters say, in this toolkit's "
        "order. The checkpoint's run had another order, so some samples of this epoch are trained on twice and others "
        "not at all; from the next epoch on every sample comes once.",
        category=StatefulWarning,
    )
