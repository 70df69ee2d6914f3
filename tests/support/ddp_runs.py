"""Runs on all ranks that there are, and chains of them, each going on from where the one before was saved."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed

from lightning_stateful import StatefulDataCallback
from support.ledger import LedgerModel
from support.runs import Outcome, assert_stitches, seeded, train
from support.sources import SaveAt, SourcesModel, trained
from support.texts import PaddingLog

Moment = tuple[str, int, int]
# What a run did, and what it had done when it was saved; None of the last of a chain.
Link = tuple[dict[str, Any], Any]


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 2, **options}


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A trainer on all ranks that logs and saves nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", **{**quiet, **on_ranks(**options)})


def run(make: Callable[[], Any], *, makes: type[LedgerModel] = SourcesModel, seed: int = 1, **options: Any) -> Outcome:
    """Train a model of a class on what a function makes."""
    return train(make, model=options.pop("model", None) or seeded(makes, seed), **on_ranks(**options))


def plain(found: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    trainer: Any = found.trainer
    own = next(callback for callback in trainer.callbacks if isinstance(callback, StatefulDataCallback))
    padding = [callback.found for callback in trainer.callbacks if isinstance(callback, PaddingLog)]
    return {
        "ledger": found.ledger,
        "weights": {name: value.tolist() for name, value in found.weights.items()},
        "end": (found.global_step, found.current_epoch, found.total_batches),
        "state": own.data_state(),
        "report": own.position_report(),
        "length": trainer.num_training_batches,
        "sources": trainer.logger.sources,
        "padding": list(itertools.chain(*padding)),
    }


def chain_of(
    make: Callable[[], Any],
    folder: Path,
    stops: list[Moment],
    *,
    callbacks: Callable[[], list[Any]] = list,
    run: Callable[..., Outcome] = run,
    **options: Any,
) -> list[Link]:
    """An uninterrupted run, and runs that go on from one another.

    Args:
        make: Makes what each run is trained on.
        folder: Where checkpoints go.
        stops: Where each run but the last is saved: a hook, an epoch, and the number of the hook's calls in that epoch
            of that run before.
        callbacks: Makes callbacks for each run.
        run: Trains.
        options: The trainer's.
    """
    parts, path = [], None
    for number in range(len(stops) + 1):
        saver = SaveAt(folder / str(number), stops[number : number + 1])
        found = run(make, callbacks=[saver, *callbacks()], ckpt_path=path, seed=number + 1, **options)
        parts.append((plain(found), saver.ledgers.get(0)))
        torch.distributed.barrier()
        path = saver.path(0)
    return parts


def assert_chain(parts: list[Link], served_again: int | None = None) -> None:
    """Each run goes on where the one before was saved, and ends and logs as the first did."""
    whole = parts[0][0]
    for (_, before), (after, _) in itertools.pairwise(parts):
        assert before is not None, "the moment was never reached"
        assert_stitches([before, after["ledger"]], whole["ledger"], served_again)
        for name in ("weights", "end", "state", "report"):
            assert after[name] == whole[name], name
        for name in ("sources", "padding"):
            assert after[name] == whole[name][len(whole[name]) - len(after[name]) :], name


def assert_in_step(runs: list[dict[str, Any]]) -> None:
    """All ranks take the same steps, to the same weights, states and logs."""
    first = runs[0]
    for other in runs[1:]:
        assert [event[:4] for event in trained(other["ledger"])] == [event[:4] for event in trained(first["ledger"])]
        for name in set(first) - {"ledger"}:
            assert other[name] == first[name], name


class Settle(pl.Callback):
    """Waits before workers are forked.

    In CPython 3.11 a fork hangs if one of gloo's threads, which are still busy with a collective that has just ended,
    holds the interpreter's lock on its threads.
    """

    def on_train_epoch_start(self, *args: Any) -> None:
        """Lightning asks for the first batch after this hook."""
        time.sleep(0.05)
