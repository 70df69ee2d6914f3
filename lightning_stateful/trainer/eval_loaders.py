"""Evaluation loaders: every sample once over all ranks, in order, with equal steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.core.order import EpochPlan, SampleCountingPlan
from lightning_stateful.errors import RankMismatchError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.iterable_datasets.set_by_hooks import note_validation
from lightning_stateful.loaders.combined_loaders import name_of
from lightning_stateful.loaders.patching import AnyLoader, length_of
from lightning_stateful.loops import loop_progress
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.ranks import build_alike, deals_out, own_rank, topology_of
from lightning_stateful.trainer.loader_proxy import LoaderProxy, Structure
from lightning_stateful.trainer.train_loaders import Settings
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


def exact_evaluation(trainer: pl.Trainer, request: Callable[[], Any], settings: Settings, stage: str) -> Any:
    """Ask for the loaders of an evaluation hook and patch them, in the structure they come in.

    A loader that cannot be patched stays as it is, which on one replica is exact all the same; on several, a
    warning says that Lightning's own sampler deals it out.

    Args:
        trainer: The trainer.
        request: Gets what the hook returns.
        settings: How to take loaders over.
        stage: ``"val"``, ``"test"`` or ``"predict"``.

    Raises:
        RankMismatchError: The ranks' loaders differ in length, and are dealt out to them.
    """

    def build() -> Structure:
        structure = Structure.of(request())
        proxies = {path: _proxy(trainer, loader, stage, path, settings) for path, loader in structure.loaders.items()}
        return replace(structure, loaders=proxies)

    structure = build_alike(trainer, build, _lengths, f"the {stage} data")
    for path, proxy in structure.loaders.items():
        # The same on all ranks, which have to hear of each other what only some of them can try.
        if isinstance(proxy, LoaderProxy) and _serves_pairs(proxy.stateful_loader):
            fails = not _can_serve_pairs(proxy.stateful_loader)
            if trainer.strategy.reduce_boolean_decision(fails, all=False):
                _repeat_instead(proxy.stateful_loader, name_of(stage, path))
    return structure.rebuilt(structure.loaders)


def _serves_pairs(loader: AnyLoader) -> bool:
    """Whether single samples that are left at the end are served in batches of two."""
    plan = loader.plan(0)
    return loader.is_sized and isinstance(plan, SampleCountingPlan) and plan.ends_in_pairs


def _can_serve_pairs(loader: AnyLoader) -> bool:
    """Whether the samples that this rank would serve in one batch can be collated.

    They are read where the loader reads: a file that is opened in this process must not be shared with its workers.
    """
    plan, rank = loader.plan(0), loader.topology.rank
    _, last = next(plan.batches(rank, plan.num_steps - 1))
    if loader.order != loader.order.adapted(shuffle=False):
        # Another epoch pairs others.
        last = [*next(plan.batches(rank))[1], *last]
    how: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    if loader.num_workers:
        how |= {"num_workers": 1, "multiprocessing_context": loader.multiprocessing_context}
    trials = [*([index] for index in last), last]
    batches = DataLoader(loader.dataset, batch_sampler=trials, generator=torch.Generator(), **how)
    read = 0
    try:
        with keep_randomness():
            for _ in batches:
                read += 1
    except Exception:
        # What cannot be read at all is for the evaluation itself to report.
        return read < len(last)
    return True


def _repeat_instead(loader: Any, where: str) -> None:
    """Serve some samples twice in place of two of them in one batch."""
    loader.tracker.order = loader.order.with_repeats()
    repeats = loader.plan(0).repeats()
    rank_zero_warn(
        f"{where}: {repeats}, because ranks take equal steps and two samples of other shapes cannot be collated into a "
        "batch, as would be exact. For exact metrics pass a collate_fn that pads, or evaluate on one device.",
        category=StatefulWarning,
    )


def _lengths(structure: Structure) -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    for path, proxy in structure.loaders.items():
        if not isinstance(proxy, LoaderProxy) or proxy.stateful_loader.own_rank is not None:
            # As Lightning has it, ranks may take unequal steps through data of their own.
            continue
        described[path] = {"length": length_of(proxy.stateful_loader)}
        if begins := proxy.stateful_loader.tracker.config.get("sequence"):
            described[path]["begins"] = begins
    return described


def _proxy(trainer: pl.Trainer, loader: Any, stage: str, path: str, settings: Settings) -> Any:
    if isinstance(loader, (list, tuple)) and not loader:
        # No data to evaluate on.
        return loader
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_iterable and stage == "val" and trainer.state.fn == "fit" and not loader.num_workers:
        note_validation(loader.dataset)
    try:
        patched = settings.build_patched(trainer, loader, path, stage)
    except (UnsupportedLoaderError, RankMismatchError) as error:
        if topology_of(trainer).num_replicas > 1 and own_rank(trainer, loader) is None:
            rank_zero_warn(
                f"{error} It is left to Lightning, which may evaluate some samples twice.", category=StatefulWarning
            )
        else:
            rank_zero_info(f"{error} It is left to Lightning; what it remembers of earlier passes is in no checkpoint.")
        return loader
    if stage == "val" and trainer.state.fn == "fit" and isinstance(patched.order, WrappedSampler):
        patched.order.memory.note_use(patched.order)
    if stage == "val" and trainer.ckpt_path is not None and getattr(patched.order, "remembers", False):
        rank_zero_warn(
            f"{name_of(stage, path)}: its sampler remembers earlier passes, and a resume begins it as in the first. "
            "This run may validate on other samples than without the stop. Let it depend on set_epoch, or yield the "
            "same every time.",
            category=StatefulWarning,
        )

    if repeats := patched.plan(0).repeats():
        rank_zero_warn(f"{name_of(stage, path)}: {repeats}, because ranks take equal steps.", category=StatefulWarning)

    return LoaderProxy(
        patched,
        partial(_locate, trainer, patched),
        keeps_indices=trainer.predicting,
        original=loader,
        overfits=loop_progress.overfits(trainer),
        is_dealt_out=deals_out(trainer),
    )


def _locate(trainer: pl.Trainer, loader: AnyLoader) -> tuple[EpochPlan, int] | None:
    # Randomness and, if the loader shuffles, its order follow the training epoch, as a plain loader's would.
    loader.follow_length()
    plan = loader.plan(trainer.current_epoch)
    return (plan, 0) if plan.num_steps else None
