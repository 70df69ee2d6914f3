"""What the tests of length buckets under DDP run on every rank."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_stateful.errors import StatefulError
from support.killed_ranks import Writes
from support.runs import Outcome, StopAt, seeded, train
from support.sources import SaveAt
from support.texts import MODULES, PaddingLog, Texts, bucketed, measure

NUM_SAMPLES = 91
VAL_FIRST = 500
NUM_VAL = 23
NAMES = ("tokens", "given boundaries", "batch size")
RESUMED = ("tokens", "batch size")
MOMENTS = [
    ("on_before_backward", 0, 3),
    ("on_validation_batch_end", 0, 0),
    ("on_train_batch_end", 1, 5),
]
# Steps of the first epoch after which each number of ranks leaves the rest to the next.
HANDED_OVER = {2: 3, 3: 5, 1: 8}


def make(name: str, **options: Any) -> Any:
    """A configuration over samples that two and three ranks cannot share without remainders."""
    data = {"train": Texts(NUM_SAMPLES), "val": Texts(NUM_VAL, first=VAL_FIRST)}
    return lambda: MODULES[name](**{**data, "log_data": True, **options})


def num_ranks() -> int:
    """Ranks of the present run."""
    return int(os.environ["WORLD_SIZE"])


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": num_ranks(), "max_epochs": 2, **options}


class Settle(pl.Callback):
    """Waits before workers are forked.

    In CPython 3.11 a fork hangs if one of gloo's threads, which are still busy with a collective that has just ended,
    holds the interpreter's lock on its threads.
    """

    def on_train_epoch_start(self, *args: Any) -> None:
        """Lightning asks for the first batch after this hook."""
        time.sleep(0.05)


def run(make_data: Any, *, callbacks: list[Any] | None = None, **options: Any) -> dict[str, Any]:
    """A run on all ranks, as plain data."""
    log = PaddingLog()
    return plain(train(make_data, callbacks=[*(callbacks or []), log], **options), log)


def plain(run: Outcome, log: PaddingLog) -> dict[str, Any]:
    """What a test compares."""
    return {
        "ledger": run.ledger,
        "padding": log.found,
        "weights": {name: value.tolist() for name, value in run.weights.items()},
        "end": (run.global_step, run.current_epoch, run.total_batches),
        "length": run.trainer.num_training_batches,
        "state": run.trainer.datamodule.state_dict(),
    }


def uninterrupted(folder: Path) -> dict[str, Any]:
    return {name: run(make(name), **on_ranks()) for name in NAMES}


def every_moment(folder: Path) -> dict[str, Any]:
    """Of some configurations, the ledger up to each moment, and what the run resumed from there does."""
    found = {}
    for name in RESUMED:
        own = folder / name
        own.mkdir(exist_ok=True)
        saver = SaveAt(own, MOMENTS)
        train(make(name), callbacks=[saver], **on_ranks())
        torch.distributed.barrier()
        found[name] = [
            (ledger, run(make(name), ckpt_path=saver.path(number), seed=9, **on_ranks()))
            for number, ledger in sorted(saver.ledgers.items())
        ]
    return found


def workers(folder: Path) -> dict[str, Any]:
    """A run with workers that is stopped, and what goes on from there."""
    options = {"val": None, "num_workers": 2, "persistent_workers": True}
    stop = StopAt("on_train_batch_end", folder / "stop.ckpt", epoch=0, batch=4)
    train(make("tokens", **options), callbacks=[Settle(), stop], **on_ranks())
    torch.distributed.barrier()
    resumed = run(make("tokens", **options), callbacks=[Settle()], ckpt_path=folder / "stop.ckpt", seed=9, **on_ranks())
    return {"before": stop.ledger, "after": resumed, "whole": run(make("tokens", val=None), **on_ranks())}


def killed_run(folder: Path) -> Any:
    """A run that writes what it trains on, from its last checkpoint if there is one; its weights in the end."""
    last = folder / "last.ckpt"
    outcome = train(
        make("tokens", val=None, num_workers=1, persistent_workers=True),
        model=seeded(lambda: Writes(folder / f"ledger{os.environ['RANK']}.jsonl")),
        callbacks=[Settle(), ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)],
        ckpt_path=last if last.exists() else None,
        **on_ranks(),
    )
    return {name: value.tolist() for name, value in outcome.weights.items()}


def handed_over(folder: Path) -> dict[str, Any]:
    """Go on with what other ranks have left, if there is any, and leave the rest of the epoch to others again."""
    number = num_ranks()
    return {name: hand_over(folder.parent, name, number, **on_ranks()) for name in NAMES}


def hand_over(folder: Path, name: str, number: int, **options: Any) -> dict[str, Any]:
    """A few steps on ``number`` ranks, from the checkpoint that the ranks before them left."""
    order = list(HANDED_OVER)
    before = order[order.index(number) - 1] if order.index(number) else None
    path = None if before is None else folder / f"{name}, {before}.ckpt"
    log = PaddingLog()
    found = train(make(name), callbacks=[log], ckpt_path=path, max_steps=HANDED_OVER[number], **options)
    found.trainer.save_checkpoint(folder / f"{name}, {number}.ckpt")
    return plain(found, log)


def to_the_end(folder: Path) -> dict[str, Any]:
    """The last of an epoch that was handed over, and once more from within it."""
    found = {}
    for name in NAMES:
        own = folder / name
        own.mkdir(exist_ok=True)
        saver = SaveAt(own, [("on_train_batch_end", 0, 0)])
        path = folder.parent / f"{name}, {list(HANDED_OVER)[-1]}.ckpt"
        whole = run(make(name), callbacks=[saver], ckpt_path=path, **on_ranks())
        torch.distributed.barrier()
        again = run(make(name), ckpt_path=saver.path(0), seed=9, **on_ranks())
        found[name] = (whole, saver.ledgers[0], again)
    return found


def note_and_measure(path: Path, sample: dict[str, torch.Tensor]) -> int:
    """Measures a sample and notes who did."""
    with path.open("a") as file:
        file.write(f"{os.getpid()} {int(sample['id'])}\n")
    # Long enough for all ranks to have come by the time the first is done.
    time.sleep(0.003)
    return measure(sample)


def measured(folder: Path) -> dict[str, Any]:
    lengths = partial(note_and_measure, folder / "calls")
    options = {
        "lengths": lengths,
        "cache_file": folder / "cache" / "lengths.npy",
        "measure_workers": 0,
        "eval_batch_size": 4,
    }
    found = run(make("tokens", **options), **on_ranks(max_epochs=1))
    return {"pid": os.getpid(), "ledger": found["ledger"]}


def other_lengths(folder: Path) -> str:
    """One rank takes a sample for longer than the others do."""
    lengths = Texts().num_tokens
    lengths[0] += torch.distributed.get_rank()
    return refusal(lambda: bucketed(lengths=lengths, val=None))


def other_budgets(folder: Path) -> str:
    return refusal(lambda: bucketed(max_tokens=40 + torch.distributed.get_rank()))


def refusal(make_data: Any) -> str:
    try:
        train(make_data, **on_ranks())
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def few_samples(folder: Path) -> dict[str, Any]:
    """As many samples as ranks less one, and one more than there are ranks."""
    number = num_ranks()
    return {
        f"{kind}, {length}": run(lambda n=length, k=kind: MODULES[k](train=Texts(n), val=None), **on_ranks())
        for kind in ("tokens", "batch size")
        for length in (number - 1, number + 1)
    }


ON_TWO = [workers, uninterrupted, every_moment, handed_over, measured, other_lengths, other_budgets, few_samples]
ON_THREE = [uninterrupted, handed_over, few_samples]
ON_TWO_AGAIN = [killed_run, to_the_end]
