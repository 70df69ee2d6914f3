"""Training without a Trainer: a bare loop on ranks as torchrun starts them, and loops under Fabric."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stateful import patch_dataloader

LENGTH, NUM_EPOCHS, STOP = 46, 3, 4
# The step in which a bare loop is killed, within its second epoch.
HOLD = 9


class Samples(Dataset[Any]):
    """Samples that know their index and draw one augmentation."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(4) + index / 100


class Chunks(Sampler[list[int]]):
    """Every sample once an epoch, in 16 batches of two to four, of which the global ``random`` draws the sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(LENGTH))
        random.shuffle(left)
        for behind in reversed(range(16)):
            size = random.randint(max(2, len(left) - 4 * behind), min(4, len(left) - 2 * behind))
            yield left[:size]
            left = left[size:]


class Shuffled(Sampler[int]):
    """Every sample once, and told the epoch nowhere."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


PLAIN: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(Samples(), batch_size=3, shuffle=True),
    "sampler": lambda: DataLoader(Samples(), batch_size=3, sampler=Shuffled()),
    "batch sampler": lambda: DataLoader(Samples(), batch_sampler=Chunks()),
    "one by one": lambda: DataLoader(Samples(), batch_size=None, sampler=Shuffled(), collate_fn=alone),
    "workers": lambda: DataLoader(Samples(), batch_size=3, sampler=Shuffled(), num_workers=1),
}


# Those that run on several ranks.
ON_RANKS = ("shuffle", "batch sampler", "one by one")


def alone(sample: Any) -> Any:
    """A batch of one sample."""
    index, x = sample
    return torch.tensor([index]), x.unsqueeze(0)


def main(folder: Path, hold: int) -> None:
    """Train from the last checkpoint, if there is one, writing every step down before it is taken.

    Args:
        folder: Where ledgers and checkpoints are written.
        hold: Step that is begun and never ended; 0 for none.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loader = patch_dataloader(PLAIN["batch sampler"]())
    step, last = 0, folder / "last.pt"
    if last.exists():
        saved = torch.load(last, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    dist.barrier()
    with (folder / f"ledger{rank}.jsonl").open("a") as ledger:
        while loader.epoch < NUM_EPOCHS:
            for ids, x in loader:
                ledger.write(json.dumps([step, ids.tolist()]) + "\n")
                ledger.flush()
                if step and step == hold:
                    # Here the run is killed: in the middle of a step, which is trained on again.
                    threading.Event().wait()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                step += 1
                if rank == 0:
                    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save({**parts, "loader": loader.state_dict()}, folder / "part.pt")
                    (folder / "part.pt").replace(last)
    if rank == 0:
        weights = {name: value.tolist() for name, value in net.state_dict().items()}
        (folder / "weights.json").write_text(json.dumps(weights))


def bare_loop(folder: Path) -> None:
    """Train to the end."""
    main(folder, 0)


def killed_loop(folder: Path) -> None:
    """Go on with the run that was killed, to the end."""
    main(folder.with_name("killed"), 0)


def held_loop(folder: Path) -> None:
    """Train up to a step that is never ended."""
    main(folder, HOLD)


# Fabric


def ids_of(batch: Any) -> list[int]:
    """The samples of a batch."""
    ids: list[int] = batch[0].tolist()
    return ids


def fabric_run(fabric: Any, name: str, *, load: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Two epochs of a loader under Fabric, or what is left after a checkpoint, or the steps before one."""
    patched = patch_dataloader(PLAIN[name]())
    loader = fabric.setup_dataloaders(patched)
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if load is not None:
        fabric.load(load, state)
    epochs: list[list[list[int]]] = []
    steps = 0
    while patched.epoch < 2:
        epochs.append([])
        for batch in loader:
            epochs[-1].append(ids_of(batch))
            loss = model(batch[1]).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            steps += 1
            if save is not None and steps == STOP:
                fabric.save(save, state)
                return {"epochs": epochs, "state": patched.state_dict()}
    weights = {key: value.tolist() for key, value in net.state_dict().items()}
    return {"epochs": epochs, "weights": weights, "state": patched.state_dict()}


def fabric_on_ranks(folder: Path) -> dict[str, Any]:
    """Every loader without a stop, to a checkpoint and on from there."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    found = {}
    for name in ON_RANKS:
        checkpoint = folder / f"{name}.ckpt"
        found[name] = {
            "whole": fabric_run(fabric, name),
            "before": fabric_run(fabric, name, save=checkpoint),
            "after": fabric_run(fabric, name, load=checkpoint),
        }
    return found
