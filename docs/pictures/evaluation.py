"""Draws evaluation on three ranks, and a validation that is stopped: ``python docs/pictures/evaluation.py [folder]``.

Batches are those of torch's ``DistributedSampler`` and of ``StatefulLoader``; events are those of real runs, which an
error ends in the second of three validation batches, and which the saved checkpoint resumes.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, GREEN, RED, box, canvas, cut, draw_all, label, legend
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stateful import StatefulDataCallback, StatefulLoader

NUM_SAMPLES, NUM_RANKS, BATCH_SIZE = 16, 3, 2
TRAINED, VALIDATED = "train", "val"


def by_torch(rank: int) -> list[list[int]]:
    """The batches of a rank as Lightning alone deals them out."""
    data = torch.arange(NUM_SAMPLES)
    sampler = DistributedSampler(data, NUM_RANKS, rank, shuffle=False)
    return [batch.tolist() for batch in DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)]


def by_stateful_loader(rank: int) -> list[list[int]]:
    """The batches of a rank as an evaluation loader deals them out."""
    data, ranks = torch.arange(NUM_SAMPLES), {"num_replicas": NUM_RANKS, "rank": rank}
    return [batch.tolist() for batch in StatefulLoader(data, batch_size=BATCH_SIZE, exact=True, **ranks)]


def draw_ranks(axes: Axes, left: float, title: str, of_ranks: list[list[list[int]]]) -> None:
    """A row for each rank; samples that came before are red."""
    label(axes, left, 0.6, title, bold=True)
    seen: set[int] = set()
    for step, batches in enumerate(zip(*of_ranks, strict=True)):
        x = left + 2.4 + 2.4 * step
        label(axes, x + 1, 1.5, f"step {step + 1}", align="center", size=8)
        for rank, batch in enumerate(batches):
            for position, sample in enumerate(batch):
                box(axes, x + position, 2 + rank * 1.15, RED if sample in seen else GREEN, sample)
            seen.update(batch)
    for rank in range(NUM_RANKS):
        label(axes, left, 2.5 + rank * 1.15, f"rank {rank}")


class Model(BoringModel):
    """Notes which batches it is given, and fails in the second batch of a validation if it is told so."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.given = fails, []

    def training_step(self, batch, batch_idx):
        """Note the batch."""
        self.given.append((TRAINED, batch_idx + 1))
        return self.step(batch[:, None].expand(-1, 32) / 16)

    def validation_step(self, batch, batch_idx):
        """Note the batch."""
        self.given.append((VALIDATED, batch_idx + 1))
        if self.fails and batch_idx == 1:
            raise KeyboardInterrupt


def start(folder: str, callbacks: list[pl.Callback], *, resumes: bool) -> list[tuple[str, int]]:
    """One start of the script; return the batches that the model was given."""
    pl.seed_everything(0, verbose=False)
    save = OnExceptionCheckpoint(folder, "stopped")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(
        max_epochs=1, val_check_interval=4, num_sanity_val_steps=0, callbacks=[save, *callbacks], **quiet
    )
    loaders = DataLoader(torch.arange(16), batch_size=2), DataLoader(torch.arange(6), batch_size=2)
    model = Model(fails=not resumes)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(model, *loaders, ckpt_path=f"{folder}/stopped.ckpt" if resumes else None)
    return model.given


def draw_run(axes: Axes, top: float, title: str, callbacks: list[type[pl.Callback]]) -> None:
    """The batches of a run that is stopped within its first validation, and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        before = start(folder, [callback() for callback in callbacks], resumes=False)
        after = start(folder, [callback() for callback in callbacks], resumes=True)
    label(axes, 0.3, top, title, bold=True)
    for position, (kind, number) in enumerate([*before, *after]):
        box(axes, 0.3 + position, top + 1.3, BLUE if kind == TRAINED else GREEN, number)
    cut(axes, 0.3 + len(before), top + 1.1, top + 2.4, "")
    label(axes, 0.5 + len(before), top + 0.7, "stopped and resumed here", color=RED)


def draw_evaluation() -> Figure:
    """Batches of three ranks, and a validation that is stopped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figure, axes = canvas(24, 13.2)
    draw_ranks(axes, 0.3, "16 samples: Lightning alone", [by_torch(rank) for rank in range(NUM_RANKS)])
    draw_ranks(axes, 12.6, "With the callback", [by_stateful_loader(rank) for rank in range(NUM_RANKS)])
    draw_run(axes, 6.4, "Stopped within a validation of 3 batches: Lightning alone", [])
    draw_run(axes, 9.5, "The same with the callback", [StatefulDataCallback])
    entries = [(BLUE, "training batch"), (GREEN, "evaluation"), (RED, "a sample again")]
    legend(axes, 0.3, 12.3, entries, step=5.2)
    return figure


if __name__ == "__main__":
    draw_all({"evaluation.svg": draw_evaluation})
