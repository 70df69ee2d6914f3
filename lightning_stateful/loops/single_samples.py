"""Last steps of an epoch that leave a rank a single sample, which BatchNorm may refuse after hours: said beforehand."""

from __future__ import annotations

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_stateful.core.samples import SampleEpochPlan
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.user_samplers.sampler_plan import SamplerEpochPlan


def warn_of_single_samples(trainer: pl.Trainer, combined: CombinedLoaders, epoch: int) -> None:
    """Warn where the last step of an epoch has a single sample for some rank, and the module trains BatchNorm layers.

    Args:
        trainer: The trainer.
        combined: The training loaders.
        epoch: The epoch that training begins in.
    """
    layers = [
        name
        for name, layer in trainer.lightning_module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm) and layer.training
    ]
    for path, loader in combined.loaders.items() if layers else ():
        if found := _single_samples(loader, epoch, trainer.fit_loop.max_batches):
            where = f"Training data {path!r}" if path else "Training data"
            rank_zero_warn(
                f"{where}: {found[0]}, where other batches have {loader.batch_size}. BatchNorm layers "
                f"({some_of(layers)}) may refuse such a batch ('Expected more than 1 value per channel'), "
                f"which would end the run there. {found[1]}",
                category=StatefulWarning,
            )


def _single_samples(loader: AnyLoader, epoch: int, most: float) -> tuple[str, str] | None:
    """Which ranks the last step leaves a single sample, and what to do about it; None for no rank."""
    plan = loader.plan(epoch)
    # Of loaders that are not dealt out, the ranks are as in torch.
    if not isinstance(plan, SampleEpochPlan | SamplerEpochPlan) or loader.own_rank is not None:
        return None
    rule, left = plan.rule, plan.remaining
    if not left or most < plan.num_steps or min(rule.num_replicas, rule.batch_size) == 1:
        return None
    ranks = range(rule.num_replicas)
    alone = sum([share.size for share in rule.last_shares(left, rank)][-1:] == [1] for rank in ranks)
    if not alone:
        return None
    has = "are left" if plan.progress_after(0).consumed else "samples"
    alike = ""
    if has == "samples" and loader.is_plain:
        repeated = -left % rule.num_replicas
        last = ((left + repeated) // rule.num_replicas - 1) % rule.batch_size + 1
        alike = "Lightning alone would too. "
        if last > 1:
            alike = f"Lightning alone would repeat {repeated} there, so that each rank has {last}. "
    return (
        f"the last step of epoch {epoch} ({left} {has}) gives {alone} of {rule.num_replicas} ranks a single sample",
        f"{alike}drop_last=True in the DataLoader, or tail='drop' for a sampler of yours, leaves {left % rule.full} "
        "samples out of each epoch instead.",
    )
