"""Metric learning with a batch sampler of one's own under Lightning Fabric: stopped in the middle of an epoch, resumed.

The sampler draws class-balanced batches from Python's global generator. ``patch_dataloader`` deals them out to the
devices and gives the loader a state; ``fabric.save`` and ``fabric.load`` carry it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from names import ClassBalanced, Encoder, Names, contrastive_loss, digest
from torch.utils.data import DataLoader

from lightning_stateful import patch_dataloader


def train(fabric: Fabric, num_epochs: int, *, checkpoint: Path | None = None, stop: int = 0) -> dict[str, Any]:
    """Train, from a checkpoint if there is one, to the end or to a step at which it is written."""
    torch.manual_seed(1)
    names = Names()
    model, optimizer = (module := Encoder()), torch.optim.Adam(module.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    patched = patch_dataloader(DataLoader(names, batch_sampler=ClassBalanced(names.labels)), seed=7)
    loader = fabric.setup_dataloaders(patched)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    resumed = checkpoint is not None and checkpoint.exists()
    if resumed:
        fabric.load(checkpoint, state)
    batches, loss = [], torch.tensor(0.0)
    while patched.epoch < num_epochs:
        for codes, labels in loader:
            # Dropout, too, has to be a function of the step for the weights to agree.
            torch.manual_seed(state["step"] * fabric.world_size + fabric.global_rank)
            loss = contrastive_loss(model(codes), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
            batches.append(codes.sum().item())
            if state["step"] == stop and not resumed:
                fabric.save(checkpoint, state)
                return {"batches": batches}
    return {"batches": batches, "weights": digest(module), "loss": loss.item()}


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop", type=int, default=70, help="step at which the run is stopped")
    arguments = parser.parse_args()
    devices = arguments.devices
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    with tempfile.TemporaryDirectory() as folder:
        # Where the first process writes is where all read.
        checkpoint = Path(fabric.broadcast(folder)) / "last.ckpt"
        whole = train(fabric, arguments.epochs)
        before = train(fabric, arguments.epochs, checkpoint=checkpoint, stop=arguments.stop)
        after = train(fabric, arguments.epochs, checkpoint=checkpoint, stop=arguments.stop)
        fabric.barrier()
    if fabric.is_global_zero:
        print(f"loss after {len(whole['batches'])} steps: {whole['loss']:.3f}")
        print(
            f"stopped after step {arguments.stop} and resumed: "
            f"same batches {before['batches'] + after['batches'] == whole['batches']}, "
            f"same weights {after['weights'] == whole['weights']}"
        )


if __name__ == "__main__":
    main()
