"""Evaluation loaders: every sample once over all ranks, in order, with equal steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils import _pytree as pytree

from lightning_stateful.errors import StatefulWarning, UnsupportedLoaderError
from lightning_stateful.index.position import Position
from lightning_stateful.index.topology import Topology
from lightning_stateful.loaders.takeover import take_over
from lightning_stateful.trainer.training_data import Settings, path_of, topology_of
from lightning_stateful.trainer.view import LoaderView


def exact_evaluation(trainer: pl.Trainer, raw: Any, settings: Settings, stage: str) -> Any:
    """Take over the loaders of an evaluation hook, in the structure they came in.

    A loader that cannot be taken over stays as it is, which on one replica is exact all the same; on several, a
    warning says that Lightning's own sampler deals it out.

    Args:
        trainer: The trainer.
        raw: What the hook returned.
        settings: How to take loaders over.
        stage: ``"val"``, ``"test"`` or ``"predict"``.
    """
    combined = raw if isinstance(raw, CombinedLoader) else None
    leaves, spec = pytree.tree_flatten_with_path(raw if combined is None else combined.iterables)
    topology = topology_of(trainer)
    views = [_view(trainer, leaf, f"the {stage} loader {path_of(keys)!r}", settings, topology) for keys, leaf in leaves]
    structure: Any = pytree.tree_unflatten(views, spec)
    return structure if combined is None else CombinedLoader(structure, combined._mode)


def _view(trainer: pl.Trainer, loader: Any, where: str, settings: Settings, topology: Topology) -> Any:
    try:
        taken = take_over(
            loader,
            seed=settings.seed,
            num_replicas=topology.num_replicas,
            rank=topology.rank,
            seed_samples=settings.seed_samples,
            exact=True,
            where=where,
        )
    except UnsupportedLoaderError as error:
        if topology.num_replicas > 1:
            rank_zero_warn(
                f"{error} It is left to Lightning, which may evaluate some samples twice.", category=StatefulWarning
            )
        return loader

    def locate() -> Position | None:
        # Randomness and, if the loader shuffles, its order follow the training epoch, as a plain loader's would.
        return Position(epoch=trainer.current_epoch, width=topology.num_replicas) if len(taken) else None

    return LoaderView(taken, locate, keeps_indices=trainer.predicting)
