"""The ranks of a trainer: which this is, who deals the data out to them, and whether they agree about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import RankMismatchError, StatefulWarning
from lightning_stateful.loaders.patching import deals_itself
from lightning_stateful.loops.lightning import pl
from lightning_stateful.samplers.rank_exchange import failing_together, kinds_drawn_apart
from lightning_stateful.state import fingerprint_warning, is_accepted, is_content, is_fingerprint

T = TypeVar("T")
Descriptions = Mapping[str, Mapping[str, Any]]

# What may differ between ranks that serve the same numbers of samples, where the user accepts it.
_ABOUT_DATA = ("dataset", "sources", "fingerprint")


def topology_of(trainer: pl.Trainer) -> Topology:
    """The place of this process among the data-parallel replicas, which need not be all processes."""
    kwargs = trainer.distributed_sampler_kwargs
    if kwargs is None:
        return Topology()
    return Topology(num_replicas=int(kwargs["num_replicas"]), rank=int(kwargs["rank"]))


def own_rank(trainer: pl.Trainer, loader: Any) -> int | None:
    """The data-parallel rank of this process where its loader is not to be dealt out; None where it is, or is alone.

    ``Trainer(use_distributed_sampler=False)`` says so, unless the loader itself asks to be dealt out.
    """
    topology = topology_of(trainer)
    deals = trainer._accelerator_connector.use_distributed_sampler
    return None if deals or topology.num_replicas == 1 or deals_itself(loader) else topology.rank


def deals_out(trainer: pl.Trainer) -> bool:
    """Whether Lightning alone would deal a plain loader out by a DistributedSampler, as under DDP on one device too."""
    connector = trainer._accelerator_connector
    return connector.use_distributed_sampler and connector.is_distributed


def build_alike(
    trainer: pl.Trainer,
    build: Callable[[], T],
    describe: Callable[[T], Descriptions],
    what: str,
    *,
    accept: Collection[str] = (),
) -> T:
    """Build something on every rank and make sure that all ranks could, and that the results agree.

    A collective of the trainer's ranks. A trainer of one process only builds, whatever group of processes another
    trainer has left behind.

    Args:
        trainer: Says how many ranks there are.
        build: What each rank does for itself.
        describe: What has to be equal on all ranks, as plain data by the path of the loader.
        what: How an error calls it.
        accept: Names of differences to let pass, as on a resume; of what a dataset says of itself, not of its length.

    Raises:
        RankMismatchError: On every rank, if ranks describe different things or some ranks failed to build.
        Exception: The rank's own, where it failed to build.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if trainer.world_size == 1 or not running:
        return build()
    # Before training seeds them.
    kinds_drawn_apart("this process", ())
    failure: Exception | None = None
    try:
        with failing_together(what):
            built = build()
        report: tuple[str, Any] = ("built", describe(built))
    except Exception as error:
        failure, report = error, ("failed", f"{type(error).__name__}: {error}")
    reports = gathered(report)
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (kind, text) in enumerate(reports) if kind == "failed"}
    if failed:
        lines = "\n".join(f"  - rank {rank}: {text}" for rank, text in failed.items())
        raise RankMismatchError(f"{what} could not be built on every rank:\n{lines}")
    _compare([description for _, description in reports], what, accept)
    return built


def gathered(value: Any) -> list[Any]:
    """The values of all processes; a collective of the default process group."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _compare(descriptions: list[Descriptions], what: str, accept: Collection[str]) -> None:
    """Refuse what differs between ranks, but for what is accepted; warn of what does so in fingerprints alone."""
    by_rank = [
        {(path, name): value for path, of in description.items() for name, value in _leaves(of)}
        for description in descriptions
    ]
    differing = {}
    for path, name in dict.fromkeys(key for leaves in by_rank for key in leaves):
        if is_content(name) and not all((path, name) in leaves for leaves in by_rank):
            continue
        values = [leaves.get((path, name), "<nothing>") for leaves in by_rank]
        full = f"{path}.{name}" if path else name
        is_accepted_here = name.split(".")[0] in _ABOUT_DATA and is_accepted((full, name), accept)
        if not is_accepted_here and len({json.dumps(value, sort_keys=True, default=repr) for value in values}) > 1:
            differing[full] = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
    if not all(map(is_fingerprint, differing)):
        raise RankMismatchError(_disagreement(what, differing))
    if differing:
        changed = "; ".join(f"{name} ({values})" for name, values in differing.items())
        rank_zero_warn(
            fingerprint_warning(f"The ranks have, in {what},", changed, next(iter(differing))), category=StatefulWarning
        )


def _leaves(described: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values under dotted names; the order of a dict says nothing."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _disagreement(what: str, differing: Mapping[str, str]) -> str:
    lines = "\n".join(f"  - {name}: {values}" for name, values in differing.items())
    remedy = (
        "Build the same dataset with the same settings on every rank; the loader deals out the samples. Where each "
        "rank is to have data of its own, give them equal lengths and batch sizes."
    )
    if seeds := [name for name in differing if name.rpartition(".")[2] == "seed"]:
        remedy = (
            "The seed of seed_everything is another on each rank. Pass one for all, as "
            f"StatefulDataCallback(seed=0).{'' if len(seeds) == len(differing) else f' {remedy}'}"
        )
    if data := [name for name in differing if any(part in name.split(".") for part in ("dataset", "sources"))]:
        name = re.sub(r"(dataset\.content)\..*", r"\1", data[0])
        remedy += f" Where ranks read the same samples all the same, let it pass with accept=({name!r},)."
    said = f"The ranks disagree about {what}. Steps would not match and the run hang, or samples be lost:"
    return f"{said}\n{lines}\n{remedy}"
