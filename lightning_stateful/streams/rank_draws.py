"""Whether the ranks of a run draw alike in an iterable dataset, as they would of the generators that a user has left.

A dataset may shuffle by the process's generators and take every n-th file: after ``seed_everything`` all ranks shuffle
alike in torch, and each file comes once. Where the ranks' generators stand apart, ranks have to draw apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_stateful.core.seeding import mixed_seed
from lightning_stateful.samplers.attributes import codes_in
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.rng import KINDS, Randomness, seed_kinds, seed_randomness, state_of_generator
from lightning_stateful.user_samplers.rank_exchange import exchanged

_SIZE, ALL_KINDS = 8, frozenset(KINDS)


def where_generators_stand(loader: DataLoader[Any]) -> dict[str, str]:
    """Digests, by kind, of the states of the CPU generators that a pass over a loader depends on in torch.

    Workers are seeded by torch's own generator, or by the loader's.

    Args:
        loader: The loader.
    """
    states = dict(zip(KINDS, Randomness.now().as_texts(), strict=True))
    if loader.num_workers:
        own = loader.generator
        states = {"torch": states["torch"] if own is None else state_of_generator(own)}
    return {kind: hex_digest(text.encode(), size=_SIZE) for kind, text in states.items()}


def generators_of_ranks(loader: DataLoader[Any], name: str, timeout: float) -> list[dict[str, str]]:
    """What :func:`where_generators_stand` finds now on every process, in a loop of the user's own.

    In such a loop nothing of this package has drawn from them before.

    Args:
        loader: The loader.
        name: Its dataset's name.
        timeout: Seconds to wait for the others.
    """
    return exchanged(f"generators of {name}", where_generators_stand(loader), timeout=timeout) or []


def seeds_workers_by_rank(loader: DataLoader[Any]) -> bool:
    """Whether a loader's workers are seeded by rank before they read, as by Lightning's ``worker_init_fn``.

    Of a function of the user's that is told by whether its code names a rank.
    """
    function: Any = loader.worker_init_fn if loader.num_workers else None
    names: list[str] = []
    while isinstance(function, partial):
        names += function.keywords
        function = function.func
    function = getattr(function, "__func__", function)
    if function is not None and not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    for code in codes_in(function.__code__) if hasattr(function, "__code__") else ():
        names += [*code.co_names, *code.co_varnames, *code.co_freevars]
        names += [one for one in code.co_consts if isinstance(one, str)]
    return any("rank" in name.lower() for name in names)


def lightning_seeds_workers(loader: Any) -> bool:
    """Whether Lightning's Trainer is to seed a loader's workers by rank, after ``seed_everything(workers=True)``."""
    is_asked = os.environ.get("PL_SEED_WORKERS", "0") not in ("", "0")
    return bool(is_asked and loader.num_workers and loader.worker_init_fn is None)


def kinds_alike(of_ranks: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """The kinds of generators from which ranks are to draw alike, as they stand alike on all.

    Args:
        of_ranks: What :func:`where_generators_stand` has found on each rank.

    Returns:
        Some of :data:`~lightning_stateful.samplers.rng.KINDS`; all of them where the only one seeds workers.
    """
    first = of_ranks[0]
    found = frozenset(kind for kind in first if all(of.get(kind) == first[kind] for of in of_ranks))
    return ALL_KINDS if found and found == first.keys() else found & ALL_KINDS


def seed_reads(seed: int | None, kinds: frozenset[str], task: Any, epoch: int, number: int) -> None:
    """Seed the process's generators for what a worker slot reads next.

    Args:
        seed: The seed; None to leave them.
        kinds: The kinds from which all ranks draw alike; of all of them the slot is one of rank 0.
        task: The slot's.
        epoch: The pass.
        number: The batch of the slot.
    """
    if seed is None:
        return
    seed_randomness(mixed_seed(seed, epoch, task.slot, number))
    if kinds and not kinds >= ALL_KINDS:
        seed_kinds(kinds, mixed_seed(seed, epoch, task.slot - task.rank, number))
