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

from support.ledger import batches, samples, trained
from support.runs import Moment, Outcome, SaveAt, assert_stitches, callback_of, ended, train
from support.stream_cases import position_in

# What a run did, and what it had done when it was saved; None of the last of a chain.
Link = tuple[dict[str, Any], Any]


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 2, **options}


def run(make: Callable[[], Any], **options: Any) -> Outcome:
    """:func:`train` on all ranks that there are."""
    return train(make, **on_ranks(**options))


def plain(found: Outcome) -> dict[str, Any]:
    """The parts of an outcome that a test compares, as plain data."""
    trainer: Any = found.trainer
    own = callback_of(found)
    return {
        "ledger": found.ledger,
        "weights": {name: value.tolist() for name, value in found.weights.items()},
        "end": (found.global_step, found.current_epoch, found.total_batches),
        "state": own.data_state(),
        "report": own.position_report(),
        "length": trainer.num_training_batches,
        "sources": trainer.logger.sources,
        "padding": trainer.logger.padding,
    }


def chain_of(
    make: Callable[[], Any],
    folder: Path,
    stops: list[Moment],
    *,
    callbacks: Callable[[], list[Any]] = list,
    run: Callable[..., Outcome] = run,
    ckpt_path: Path | None = None,
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
        ckpt_path: The checkpoint that the uninterrupted run, too, goes on from.
        options: The trainer's.
    """
    parts, path = [], ckpt_path
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
        for name in ("weights", "end", "report"):
            assert after[name] == whole[name], name
        assert position_in(after["state"]) == position_in(whole["state"])
        for name in ("sources", "padding"):
            assert after[name] == whole[name][len(whole[name]) - len(after[name]) :], name


def assert_chains(chains: list[list[Link]], served_again: int | None = None) -> list[dict[str, Any]]:
    """The same on every rank, which take the same steps; what each did in the uninterrupted run."""
    for parts in chains:
        assert_chain(parts, served_again)
    runs = [parts[0][0] for parts in chains]
    assert_in_step(runs)
    return runs


def assert_in_step(runs: list[dict[str, Any]]) -> None:
    """All ranks take the same steps, to the same weights, states and logs."""
    first = runs[0]
    for other in runs[1:]:
        assert [event[:4] for event in trained(other["ledger"])] == [event[:4] for event in trained(first["ledger"])]
        for name in set(first) - {"ledger"}:
            assert other[name] == first[name], name


def over_all(runs: list[dict[str, Any]], epoch: int | None = None, stage: str = "train") -> list[int]:
    """The samples that all ranks were served, sorted."""
    return sorted(index for run in runs for index in samples(run["ledger"], epoch, stage))


def steps_of(runs: list[dict[str, Any]], epoch: int) -> list[tuple[tuple[int, ...], ...]]:
    """The batches of all ranks, step by step."""
    return list(zip(*(batches(run["ledger"], epoch) for run in runs), strict=True))


def hand_over(
    folder: Path, name: str, make: Callable[[], Any], legs: dict[int, dict[str, Any]], number: int, **options: Any
) -> dict[str, Any]:
    """Part of an epoch, from the checkpoint that other ranks have left, if any; one is left to the next.

    Args:
        folder: Where checkpoints are left.
        name: What they are named by.
        make: Makes what is trained on.
        legs: Of each number of ranks, in turn, the trainer's options.
        number: The number of ranks that there are.
        options: Further options of the trainer.
    """
    order = list(legs)
    turn = order.index(number)
    path = folder / f"{name}, {order[turn - 1]}.ckpt" if turn else None
    return plain(ended(folder / f"{name}, {number}.ckpt", make, ckpt_path=path, **options, **legs[number]))


class Settle(pl.Callback):
    """Waits before workers are forked.

    In CPython 3.11 a fork hangs if one of gloo's threads, which are still busy with a collective that has just ended,
    holds the interpreter's lock on its threads.
    """

    def on_train_epoch_start(self, *args: Any) -> None:
        """Lightning asks for the first batch after this hook."""
        time.sleep(0.05)
