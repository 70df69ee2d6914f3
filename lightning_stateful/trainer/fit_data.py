"""The training loaders of one ``Trainer.fit``: built when Lightning asks for them, placed where a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.patching import is_patched
from lightning_stateful.trainer import counters
from lightning_stateful.trainer.checkpoint import warn_of_missing_state
from lightning_stateful.trainer.lightning import pl
from lightning_stateful.trainer.moment import Moment
from lightning_stateful.trainer.source import Request, discard_training_loaders, request_training_loaders
from lightning_stateful.trainer.training_data import Settings, TrainingData


class FitData:
    """Builds the training loaders of one fit, and sees to it that Lightning trains on those that a resume has placed.

    Lightning builds loaders before it restores a checkpoint wherever ``trainer.estimated_stepping_batches`` is asked
    for in ``setup``, ``configure_model`` or, under strategies that restore late, in ``configure_optimizers``, and would
    train on them. It is made to ask again.

    Args:
        trainer: The trainer.
        settings: How loaders are taken over.
        earlier: The training data of an earlier fit of the same trainer, which streams go on from.

    Attributes:
        data: The latest loaders; None before there are any.
        earlier: As it was given, until training begins.
        awaits_start: A resume has placed the loaders, and training has not begun.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings, earlier: TrainingData | None = None) -> None:
        self._trainer, self._settings = trainer, settings
        self.data: TrainingData | None = None
        self.earlier = earlier
        self.awaits_start = False
        # What loaders that are built anew before the first batch are placed by; whether Lightning has asked since.
        self._state: Mapping[str, Any] | None = None
        self._moment = Moment()
        self._has_asked = True
        # Those of whoever asked for the user's own before the callback stood between.
        discard_training_loaders(trainer)

    def loaders(self, request: Request) -> Any:
        """What the fit loop gets when it asks for its loaders."""
        if not self._has_asked and self.data is not None:
            data = self.data
        elif self.awaits_start:
            data = self._build_again()
        else:
            data, before = self._build(request), self.data or self.earlier
            if before is not None:
                data.combined.continue_from(before.combined, counters.next_step(self._trainer)[0])
        self.data, self._has_asked = data, True
        return data.structure

    def place(self, state: Mapping[str, Any] | None, moment: Moment) -> Moment:
        """Build the loaders anew where a run goes on, and throw away what Lightning has built before.

        Args:
            state: The data's state; None to go on as the moment alone says.
            moment: Where the run goes on.

        Returns:
            The moment in steps of the present ranks and batch sizes.

        Raises:
            StateError: The state does not fit the data; nothing changes then.
        """
        data = self._build_as_of(moment)
        if state is not None:
            moment = data.load(state, moment)
        else:
            begun_anew = data.go_on_without_state(moment)
            if moment.data != (0, 0):
                warn_of_missing_state(moment, begun_anew)
        self.data, self._has_asked, self.awaits_start = data, False, True
        self._state, self._moment = state, moment
        discard_training_loaders(self._trainer)
        return moment

    def begin(self) -> None:
        """Training begins: from now on loaders are built where the loop's counters stand."""
        self.earlier, self._state, self.awaits_start = None, None, False
        self.check_in_use()
        if self.data is not None:
            self.data.pending = None

    def check_in_use(self) -> None:
        """Make sure that the fit loop's loaders are these, and not others that something put in their place.

        Raises:
            ConfigurationError: They are not.
        """
        combined: Any = self._trainer.fit_loop._combined_loader
        found = [] if combined is None else combined.flattened
        expected = None if self.data is None else list(self.data.combined.loaders.values())
        if not is_patched(found) or [view.loader for view in found] != expected:
            names = ", ".join(type(loader).__qualname__ for loader in found) or "nothing"
            raise ConfigurationError(
                f"Lightning is about to train on loaders that are not the callback's ({names}): something has replaced "
                "them, or where they come from, after they were set up, and a resume would not be exact. Leave "
                "trainer.fit_loop's loaders alone, and let train_dataloader return what is to be trained on."
            )

    def _build(self, request: Request) -> TrainingData:
        return TrainingData.build(self._trainer, request, self._settings)

    def _build_as_of(self, moment: Moment) -> TrainingData:
        """Build the loaders under the epoch at which an uninterrupted run would have built them."""
        trainer = self._trainer
        with counters.epoch_set_to(trainer, max(moment.train_reload_epoch, 0)):
            return self._build(lambda: request_training_loaders(trainer))

    def _build_again(self) -> TrainingData:
        """Build loaders that Lightning asks for once more before the first batch, at the same place."""
        moment = self._moment
        data = self._build_as_of(moment)
        if self._state is None:
            data.go_on_without_state(moment)
        elif (again := data.load(self._state, moment)) != moment:
            raise ConfigurationError(
                f"The data would now go on at batch {again.batch} of epoch {moment.epoch}, and not at batch "
                f"{moment.batch} as when the checkpoint was loaded: the batch size has changed since. Set it before."
            )
        return data
