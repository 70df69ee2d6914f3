"""Draws an epoch that is stopped and resumed, from two real runs: ``python docs/pictures/epoch.py [folder]``.

Both runs are the same script, started twice: ``seed_everything``, a shuffled ``DataLoader``, a Trainer with
``ModelCheckpoint``. The first start ends by an error in step 13 of 20, right after a checkpoint; the second one passes
that as ``ckpt_path``.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GRAY, RED, box, canvas, cut, draw_all, label, legend
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback

NUM_SAMPLES, BATCH_SIZE, STOP = 40, 2, 12


class WrittenDown(BoringModel):
    """Notes the samples of each batch that it is trained on, and fails in step ``fails_in``."""

    def __init__(self, fails_in: int | None) -> None:
        super().__init__()
        self.fails_in = fails_in
        self.trained_on: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        """Note the batch."""
        if len(self.trained_on) == self.fails_in:
            raise KeyboardInterrupt
        self.trained_on.append(batch.tolist())
        return self.step(batch[:, None].expand(-1, 32) / NUM_SAMPLES)


def start(folder: str, callbacks: list[pl.Callback], *, resumes: bool) -> list[list[int]]:
    """One start of the script; return the samples of each step."""
    pl.seed_everything(0, verbose=False)
    model = WrittenDown(fails_in=None if resumes else STOP)
    loader = DataLoader(torch.arange(NUM_SAMPLES), batch_size=BATCH_SIZE, shuffle=True)
    save = ModelCheckpoint(folder, "saved", every_n_train_steps=STOP)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=1, callbacks=[save, *callbacks], **quiet)
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        trainer.fit(model, loader, ckpt_path=f"{folder}/saved.ckpt" if resumes else None)
    return model.trained_on


def stopped_and_resumed(*callbacks: type[pl.Callback]) -> list[list[int]]:
    """The samples of each step of an epoch that is stopped after ``STOP`` steps and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        before = start(folder, [callback() for callback in callbacks], resumes=False)
        after = start(folder, [callback() for callback in callbacks], resumes=True)
    return before + after


def draw_run(axes: Axes, top: float, title: str, steps: list[list[int]]) -> None:
    """A column for each step; samples that come again are red, and those that never come are listed behind."""
    label(axes, 0.3, top, title, bold=True, size=10)
    seen: set[int] = set()
    for step, batch in enumerate(steps):
        for position, sample in enumerate(batch):
            box(axes, 0.3 + step, top + 1.7 + position, RED if sample in seen else BLUE, sample)
        seen.update(batch)
    cut(axes, 0.3 + STOP, top + 1.4, top + 3.9, "stopped and resumed here")
    never = sorted(set(range(NUM_SAMPLES)) - seen)
    if never:
        label(axes, 0.3, top + 4.6, f"{len(never)} samples come twice, {len(never)} never:")
        for position, sample in enumerate(never):
            box(axes, 0.3 + position, top + 5.1, GRAY, sample, outline=True)
    else:
        label(axes, 0.3, top + 4.6, f"all {NUM_SAMPLES} samples come once")


def draw_epoch() -> Figure:
    """An epoch of plain Lightning, and one with the callback."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figure, axes = canvas(20.6, 14.4)
    draw_run(axes, 0.7, "Lightning alone", stopped_and_resumed())
    draw_run(axes, 7.9, "Lightning with StatefulDataCallback", stopped_and_resumed(StatefulDataCallback))
    legend(axes, 0.3, 13.5, [(BLUE, "sample, first time"), (RED, "again")], step=6)
    label(axes, 11.3, 13.87, "a column is a step with a batch of 2")
    return figure


if __name__ == "__main__":
    draw_all({"epoch.svg": draw_epoch})
