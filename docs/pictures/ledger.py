"""Draws a ledger of a run that was killed and resumed: ``python docs/pictures/ledger.py [folder]``.

Two ranks train on a mixture whose weights follow a schedule, and the second one reads more slowly. They are killed 38
batches behind their checkpoint, and go on from it. The figures are those of ``lightning-stateful report``; times, and
how much of the last second is in the files, are others in every run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from style import BLUE, GRAY, GREEN, ORANGE, TEXT, draw_all
from torch.utils.data import Dataset

from lightning_stateful import MixtureDataModule, StatefulDataCallback, WeightSchedule
from lightning_stateful.audit import read_ledger
from lightning_stateful.ledger.over_time import coverage_of, shares_of, waiting_of

SOURCES = {"web": 3000, "code": 1500, "books": 400}
STEPS, KILLED_AT, SAVED_EVERY, STEPS_AN_EPOCH = 450, 238, 40, 150
BEGIN, END = {"web": 8, "code": 1, "books": 1}, {"web": 3, "code": 5, "books": 2}


class Samples(Dataset[torch.Tensor]):
    """Samples of which some take the second rank longer to read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ.get("LOCAL_RANK") == "1" and index % 97 < 12:
            time.sleep(0.002)
        return torch.full((32,), index / 10_000)


class Slow(BoringModel):
    """A step takes 20 ms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Wait, and train."""
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class SaveAndDie(pl.Callback):
    """Writes checkpoints, and is killed if there was none to begin with."""

    def __init__(self, path: Path, dies: bool) -> None:
        self.path, self.dies = path, dies

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write a checkpoint, or end the process."""
        if trainer.global_step % SAVED_EVERY == 0:
            trainer.save_checkpoint(self.path)
        if self.dies and trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path) -> None:
    """Train on two ranks, from the checkpoint if there is one."""
    path = folder / "last.ckpt"
    resumed = path.exists()
    schedule = WeightSchedule({0: BEGIN, STEPS_AN_EPOCH: BEGIN, STEPS: END}, between="linear")
    data = MixtureDataModule(
        {name: Samples(length) for name, length in SOURCES.items()},
        batch_size=4, num_steps=STEPS_AN_EPOCH, schedule=schedule,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[StatefulDataCallback(ledger=folder / "ledger"), SaveAndDie(path, not resumed)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Slow(), datamodule=data, ckpt_path=str(path) if resumed else None)


def drawn(folder: Path) -> Figure:
    """Which samples came when, the shares of the sources, and the time that ranks waited."""
    ledger = read_ledger(folder)
    coverage, shares, waiting = coverage_of(ledger), shares_of(ledger), waiting_of(ledger)
    if coverage is None or shares is None or waiting is None:
        raise RuntimeError(f"The ledger in {folder} is not that of the run above.")
    figure = Figure(figsize=(7.5, 7.8), layout="constrained")
    samples, mixture, waits = figure.subplots(3, height_ratios=(1.3, 1, 1))
    colors = np.where(coverage.is_lost, GRAY, np.array([BLUE, ORANGE])[coverage.starts])
    samples.scatter(coverage.steps, coverage.items, s=3, c=colors, linewidths=0, rasterized=True)
    samples.axvline(coverage.begins[1] - 0.5, color=TEXT, lw=1, ls="--")
    samples.set(xlabel="step of the run", ylabel="index of the sample")
    samples.set_title("samples: start 1 (blue), lost with its weights (gray), start 2 (orange)", loc="left")
    bounds = np.cumsum([0, *SOURCES.values()])
    for source, color in enumerate((BLUE, ORANGE, GREEN)):
        middle = (bounds[source] + bounds[source + 1]) / 2
        samples.text(1.005, middle, shares.names[source], va="center", transform=samples.get_yaxis_transform())
        mixture.plot(shares.steps, shares.got[:, source], color=color, label=shares.names[source])
        mixture.plot(shares.steps, shares.asked[:, source], color=color, ls=(0, (4, 3)), lw=1)
    mixture.set(xlabel="step of training", ylabel=f"share of {shares.unit}", ylim=(0, None))
    mixture.set_title("mixture; dashed, what was asked for", loc="left")
    mixture.legend(loc="upper right", ncols=3, labelcolor=TEXT)
    for start in (0, 1):
        chosen = (waiting.steps >= waiting.begins[1]) == bool(start)
        steps, own, others = (values[chosen] for values in (waiting.steps, waiting.own, waiting.others))
        waits.fill_between(steps, own, color=BLUE, lw=0)
        waits.fill_between(steps, own, own + others, color=ORANGE, lw=0)
    waits.axvline(waiting.begins[1] - 0.5, color=TEXT, lw=1, ls="--")
    waits.set(xlabel="step of the run", ylabel="share of the ranks' time", ylim=(0, None))
    waits.set_title("time that ranks waited: for their own batch (blue), for the last rank (orange)", loc="left")
    for axes in (mixture, waits):
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter("{x:.0%}")
    return figure


def main() -> None:
    """Train twice, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "train", folder], check=False)  # noqa: S603  # this very file
        draw_all({"ledger.svg": lambda: drawn(Path(folder) / "ledger")})


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    else:
        main()
