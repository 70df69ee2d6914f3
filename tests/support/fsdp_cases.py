"""Runs under FSDP2, which restores a checkpoint after ``configure_optimizers``, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support import ddp_cases
from support.ledger import LedgerModel
from support.runs import MakeData, Outcome, StopAt, numbers_module, seeded, train
from support.stream_runs import chunks, module


class Sharded(LedgerModel):
    """Parameters over two ranks; asks for loaders before there is a checkpoint."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(next(self.parameters()), DTensor):
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit(make: MakeData, *callbacks: Any, **options: Any) -> Outcome:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    how = {"strategy": strategy, "devices": 2, "max_epochs": 2, **options}
    run = train(make, callbacks=callbacks, model=seeded(Sharded), **how)
    run.weights = {name: value.full_tensor() for name, value in run.weights.items()}
    return run


def stop_and_resume(folder: Path, make: MakeData, again: MakeData, batch: int, **options: Any) -> list[dict[str, Any]]:
    """A run that is stopped after a batch of epoch 0, the one that goes on, and the uninterrupted one."""
    path = ddp_cases.shared(folder, "stop.ckpt")
    stop = StopAt("on_train_batch_end", path, batch=batch)
    first = ddp_cases.plain(fit(make, stop, **options), stop)
    resumed = fit(again, ckpt_path=path, **options)
    return [first, ddp_cases.plain(resumed), ddp_cases.plain(fit(make, **options))]


def sharded_stream(folder: Path) -> list[dict[str, Any]]:
    def make() -> Any:
        # Without a number of steps, Lightning reads a batch as soon as it has built the loader.
        return module(chunks())

    return stop_and_resume(folder, make, make, 2)


def sharded_other_batch_size(folder: Path) -> list[dict[str, Any]]:
    return stop_and_resume(folder, numbers_module, lambda: numbers_module(batch_size=3), 0, max_epochs=1)


def sharded_validation_due(folder: Path) -> list[dict[str, Any]]:
    """The last batch is done, the validation after it is not."""
    return stop_and_resume(folder, numbers_module, numbers_module, 5, max_steps=6)


ALL = [sharded_stream, sharded_other_batch_size, sharded_validation_due]
