"""Ranks that disagree are found at the start and on every rank alike, not by a hang later."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from lightning_stateful.errors import RankMismatchError
from lightning_stateful.trainer.lightning import pl

T = TypeVar("T")


def build_alike(trainer: pl.Trainer, build: Callable[[], T], describe: Callable[[T], dict[str, Any]], what: str) -> T:
    """Build something on every rank and make sure that all ranks could, and that the results agree.

    A collective of the trainer's ranks. A trainer of one process only builds, whatever group of processes another
    trainer has left behind.

    Args:
        trainer: Says how many ranks there are.
        build: What each rank does for itself.
        describe: What has to be equal on all ranks, as plain data.
        what: How an error calls it.

    Raises:
        RankMismatchError: On every rank, if ranks describe different things or some ranks failed to build.
        Exception: The rank's own, where it failed to build.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if trainer.world_size == 1 or not running:
        return build()
    failure: Exception | None = None
    try:
        built = build()
        report: tuple[str, Any] = ("built", describe(built))
    except Exception as error:
        failure, report = error, ("failed", f"{type(error).__name__}: {error}")
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (kind, text) in enumerate(reports) if kind == "failed"}
    if failed:
        lines = "\n".join(f"  - rank {rank}: {text}" for rank, text in failed.items())
        raise RankMismatchError(f"{what} could not be built on every rank:\n{lines}")
    if any(pickle.dumps(other) != pickle.dumps(reports[0]) for other in reports):
        raise RankMismatchError(_disagreement(what, [description for _, description in reports]))
    return built


def _disagreement(what: str, descriptions: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for description in descriptions for name in description)
    lines = []
    for name in names:
        values = [description.get(name, "<nothing>") for description in descriptions]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            lines.append(f"  - {name}: {by_rank}")
    return (
        f"The ranks disagree about {what}. Steps would not match and the run would hang:\n"
        + "\n".join(lines)
        + "\nBuild the same dataset with the same settings on every rank; the loader deals out the samples."
    )
