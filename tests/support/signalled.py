"""Signals that arrive inside ``optimizer.step``, and a SLURM job whose commands are stand-ins."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.ledger import LedgerModel


class SignalledInStep(LedgerModel):
    """Gets a signal inside ``optimizer.step``, once the weights have changed."""

    def __init__(self, signum: signal.Signals, step: int) -> None:
        super().__init__()
        self.signum, self.at = signum, step

    def configure_optimizers(self) -> Any:
        model = self

        class Signalled(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                if model.global_step == model.at:
                    # In this thread, at once: ``os.kill`` may choose another, which is late under load.
                    signal.raise_signal(model.signum)
                return loss

        optimizer = Signalled(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def enter_slurm_job(folder: Path, setenv: Callable[[str, str], Any], *, rank: int = 0, num_ranks: int = 1) -> Path:
    """Set the environment of a task of a SLURM job.

    Returns:
        A file that gets a line at each requeue, after which the process that asked for it gets SIGTERM.
    """
    requeued, commands = folder / "requeued.txt", folder / f"bin{rank}"
    commands.mkdir()
    for name, script in [("scontrol", f'echo "$@" >> {requeued}\nkill -TERM $PPID'), ("sbatch", "exit 1")]:
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    job = {"JOB_ID": 1234, "JOB_NAME": "train", "NTASKS": num_ranks, "NTASKS_PER_NODE": num_ranks}
    for name, value in {**job, "PROCID": rank, "LOCALID": rank, "NODEID": 0}.items():
        setenv(f"SLURM_{name}", str(value))
    return requeued
