"""Evaluation loaders: every sample once over all ranks, in order, with equal steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning, UnsupportedLoaderError
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.index.topology import Topology
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.takeover import take_over
from lightning_stateful.samplers.user_sampler import UserSampler
from lightning_stateful.trainer.lightning import TrainerFn, pl
from lightning_stateful.trainer.ranks import build_alike, own_rank, topology_of
from lightning_stateful.trainer.structure import Structure
from lightning_stateful.trainer.training_data import Settings, overfit_batches
from lightning_stateful.trainer.view import LoaderView


def exact_evaluation(trainer: pl.Trainer, request: Callable[[], Any], settings: Settings, stage: str) -> Any:
    """Ask for the loaders of an evaluation hook and take them over, in the structure they come in.

    A loader that cannot be taken over stays as it is, which on one replica is exact all the same; on several, a
    warning says that Lightning's own sampler deals it out.

    Args:
        trainer: The trainer.
        request: Gets what the hook returns.
        settings: How to take loaders over.
        stage: ``"val"``, ``"test"`` or ``"predict"``.

    Raises:
        RankMismatchError: The ranks' loaders differ in length, and are dealt out to them.
    """
    topology = topology_of(trainer)

    def build() -> Structure:
        structure = Structure.of(request())
        views = {
            path: _view(trainer, loader, ".".join(filter(None, (stage, path))), settings, topology)
            for path, loader in structure.loaders.items()
        }
        return replace(structure, loaders=views)

    structure = build_alike(trainer, build, _lengths, f"the {stage} data")
    return structure.rebuilt(lambda path, loader: loader)


def _lengths(structure: Structure) -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    for path, view in structure.loaders.items():
        # As Lightning has it, ranks may take unequal steps through data of their own.
        if isinstance(view, LoaderView) and not _is_of_one_rank(view.loader):
            described[path] = {"length": view.plan.num_slots()}
            if isinstance(view.order, UserSampler):
                described[path]["begins"] = view.order.examine().begins
    return described


def _is_of_one_rank(loader: Any) -> bool:
    return isinstance(loader, StatefulLoader) and loader.own_rank is not None


def _view(trainer: pl.Trainer, loader: Any, path: str, settings: Settings, topology: Topology) -> Any:
    where = f"the evaluation loader {path!r}"
    overfits = trainer.state.fn == TrainerFn.FITTING and overfit_batches(trainer) > 0
    try:
        taken = take_over(
            loader,
            seed=settings.seed,
            path=path,
            num_replicas=topology.num_replicas,
            rank=topology.rank,
            own_rank=own_rank(trainer, loader),
            seed_samples=settings.seed_samples,
            shuffle=False if overfits else None,
            exact=True,
            replace_samplers=settings.replace_samplers,
            accept=settings.accept,
            where=where,
        )
    except UnsupportedLoaderError as error:
        if topology.num_replicas > 1 and own_rank(trainer, loader) is None:
            rank_zero_warn(
                f"{error} It is left to Lightning, which may evaluate some samples twice.", category=StatefulWarning
            )
        return loader

    for repeats in taken.plan.repeats() if isinstance(taken.order, (BatchOrder, UserSampler)) else ():
        rank_zero_warn(f"{where}: {repeats}, because ranks take equal steps.", category=StatefulWarning)

    def locate() -> Position | None:
        # Randomness and, if the loader shuffles, its order follow the training epoch, as a plain loader's would.
        begins = Position(epoch=trainer.current_epoch, width=taken.topology.num_replicas)
        return begins if taken.plan.num_batches() else None

    return LoaderView(taken, locate, keeps_indices=trainer.predicting, original=loader, overfits=overfits)
