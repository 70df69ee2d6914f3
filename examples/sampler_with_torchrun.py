"""A bare PyTorch loop on several processes, with a batch sampler of one's own, that may be killed at any moment.

    torchrun --nproc-per-node 2 examples/sampler_with_torchrun.py --checkpoint last.pt

Run it, kill it, run it again, on as many processes as you like: it goes on at the next batch after the last checkpoint.
On the same number of processes it ends with the weights of a run that was not killed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from names import ClassBalanced, Encoder, Names, contrastive_loss, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_stateful import patch_dataloader


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--stop", type=int, default=0, help="step after which to break off, as if killed")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    names = Names()
    encoder = Encoder()
    model = DistributedDataParallel(encoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = patch_dataloader(DataLoader(names, batch_sampler=ClassBalanced(names.labels)), seed=7)
    step = 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint)
        encoder.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # The same state on every rank, and for any number of them.
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        if rank == 0:
            print(f"goes on after step {step}, in epoch {loader.epoch}", flush=True)
    while loader.epoch < arguments.epochs:
        for codes, labels in loader:
            torch.manual_seed(step * num_ranks + rank)
            loss = contrastive_loss(model(codes), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % arguments.every == 0:
                parts = {"model": encoder.state_dict(), "optimizer": optimizer.state_dict()}
                written = arguments.checkpoint.with_suffix(".part")
                torch.save({**parts, "loader": loader.state_dict(), "step": step}, written)
                written.replace(arguments.checkpoint)
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == arguments.stop:
                return
    if rank == 0:
        print(f"weights {digest(encoder)} after step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
