"""Draws what a restart trains on, from real runs that were stopped: ``python docs/pictures/restarts.py [folder]``."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from matplotlib.figure import Figure
from style import BLUE, GREEN, ORANGE, box, canvas, cut, draw_all, label, legend
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback

NUM_STEPS, EVERY, STOP = 16, 5, 8


class Gone(BaseException):
    """A machine that vanishes: nothing runs after it."""


def vanish() -> None:
    """Stop without a word."""
    raise Gone


def terminate() -> None:
    """Get SIGTERM, as from a scheduler."""
    signal.raise_signal(signal.SIGTERM)


class Stopped(BoringModel):
    """Notes the batches that it is trained on, and calls ``stop`` within one."""

    def __init__(self, stop: Callable[[], None] | None) -> None:
        super().__init__()
        self.stop = stop
        self.trained_on: list[int] = []

    def training_step(self, batch, batch_idx):
        """Stop within the chosen batch."""
        if self.stop is not None and batch_idx == STOP:
            self.stop()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Note a batch that was trained on."""
        self.trained_on.append(batch_idx)


class SaveOnSigterm(pl.Callback):
    """Saves when all ranks stop after the same batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_exception(self, trainer, pl_module, exception):
        """Save a checkpoint of the last whole batch."""
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(f"{self.folder}/sigterm.ckpt")


def starts(stop: Callable[[], None]) -> tuple[list[int], list[int]]:
    """The batches of a start that is stopped within a step, and of the next start."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for how in (stop, None):
            saver = ModelCheckpoint(folder, every_n_train_steps=EVERY)
            callbacks = [StatefulDataCallback(seed=0), saver, SaveOnSigterm(folder)]
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
            model = Stopped(how)
            newest = max(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
            with contextlib.suppress(Gone, SIGTERMException):
                trainer = pl.Trainer(max_epochs=1, callbacks=callbacks, **quiet)
                trainer.fit(model, DataLoader(torch.arange(32.0 * NUM_STEPS).reshape(NUM_STEPS, 32)), ckpt_path=newest)
            found.append(model.trained_on)
    return found[0], found[1]


def draw_restarts() -> Figure:
    """Two starts of a run for each way of stopping."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figure, axes = canvas(22, 9.6)
    for top, title, stop in [
        (0.6, "SIGTERM within batch 8: the batch ends, a checkpoint is written", terminate),
        (4.8, f"the machine vanishes within batch 8: the last checkpoint is of {EVERY} batches", vanish),
    ]:
        label(axes, 0.3, top, title, bold=True)
        before, after = starts(stop)
        for y, name, batches in [(top + 0.6, "first start", before), (top + 1.8, "second start", after)]:
            label(axes, 0.3, y + 0.5, name)
            for batch in batches:
                again = name != "first start" and batch in before
                box(axes, 5 + batch, y, ORANGE if again else GREEN if name != "first start" else BLUE, batch)
        cut(axes, 5 + after[0], top + 0.55, top + 2.85, "")
    entries = [(BLUE, "trained on"), (GREEN, "goes on"), (ORANGE, "again, with the weights of the checkpoint")]
    legend(axes, 0.3, 8.5, entries, step=5)
    return figure


if __name__ == "__main__":
    draw_all({"restarts.svg": draw_restarts})
