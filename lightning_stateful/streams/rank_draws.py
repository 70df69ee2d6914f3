"""Whether the ranks of a run draw alike in an iterable dataset, as they would of the generators that a user has left.

A dataset may shuffle by the process's generators and take every n-th file: after ``seed_everything`` all ranks shuffle
alike in torch, and each file comes once. Where the ranks' generators stand apart, ranks have to draw apart.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stateful.samplers.attributes import codes_in
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.user_samplers.rank_exchange import exchanged

_SIZE = 8


def where_generators_stand(loader: DataLoader[Any]) -> dict[str, str]:
    """Digests, by name, of the states of the CPU generators that a pass over a loader depends on in torch.

    Workers are seeded by torch's own generator, or by the loader's.

    Args:
        loader: The loader.
    """
    if loader.num_workers:
        generator = torch.default_generator if loader.generator is None else loader.generator
        return {"torch": hex_digest(generator.get_state().numpy().tobytes(), size=_SIZE)}
    states: dict[str, Any] = {"NumPy": np.random.get_state(), "random": random.getstate()}
    kind, key, *rest = states["NumPy"]
    texts = {"NumPy": repr((kind, key.tobytes(), *rest)), "random": repr(states["random"])}
    found = {name: hex_digest(text.encode(), size=_SIZE) for name, text in texts.items()}
    return {"torch": hex_digest(torch.get_rng_state().numpy().tobytes(), size=_SIZE), **found}


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


def standing_alike(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, bool]:
    """Whether generators stand alike on all ranks, by name.

    Args:
        of_ranks: What :func:`where_generators_stand` has found on each rank.
    """
    first = of_ranks[0]
    return {name: all(of.get(name) == first[name] for of in of_ranks) for name in first}


def note_of_draws(alike: Mapping[str, bool], name: str) -> str:
    """A sentence on how ranks draw, where that is not the same for all generators; empty where it is.

    Args:
        alike: What :func:`standing_alike` has found.
        name: The dataset's.
    """
    if len(set(alike.values())) < 2:
        return ""
    same = ", ".join(one for one, is_alike in alike.items() if is_alike)
    others = ", ".join(one for one, is_alike in alike.items() if not is_alike)
    return (
        f"The ranks' random generators stood alike ({same}) and apart ({others}), so each rank draws otherwise in "
        f"{name}. If ranks are to shuffle alike, seed all of these alike before its loader is built."
    )
