"""Lets all processes hear a value of each, through the key-value store of the process group."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import RankMismatchError
from lightning_stateful.generators.rng import KINDS, Randomness, seed_kinds, state_of_generator
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.tracker import detect_topology

# Of each name, values that were exchanged so far; all processes exchange the same in the same order.
_COUNTED: Counter[str] = Counter()
# Blocks of failing_together() that were entered or left so far, after which names are counted anew; odd within one.
_BLOCKS = [0]
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.05


def exchanged(name: str, value: Any, *, timeout: float = 300.0) -> list[Any] | None:
    """The values of all processes, by global rank; None without a process group of several.

    It is no collective of the group: a process that never comes cannot upset those that others are in.

    Raises:
        RankMismatchError: Some process has failed, or has not come in time.
    """
    world, store = detect_topology(), _store()
    if store is None or world.num_replicas == 1:
        return None
    key = f"lightning_stateful/{_BLOCKS[0]}/{name} {_COUNTED[name]}"
    _COUNTED[name] += 1
    store.set(f"{key}/{world.rank}", json.dumps(value))
    store.add(f"{key}/came", 1)
    keys = [f"{key}/{rank}" for rank in range(world.num_replicas)]
    ends, wait = time.monotonic() + timeout, _FIRST_WAIT
    # Many processes look at one number, and at all keys once it says that these are there.
    while store.add(f"{key}/came", 0) < len(keys) or not store.check(keys):
        if _BLOCKS[0] % 2 and store.check([failure := _failure_key()]):
            raise RankMismatchError(store.get(failure).decode())
        if time.monotonic() > ends:
            late = [rank for rank, its in enumerate(keys) if not store.check([its])]
            raise RankMismatchError(
                f"{name}: ranks {late[:8]} have not come within {timeout:.0f} s to compare what they yield. Build the "
                "same loaders on every rank, in the same order."
            )
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return [json.loads(value) for value in store.multi_get(keys)]


def _store() -> Any:
    """The key-value store of the process group; None without one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def kinds_drawn_apart(name: str, generators: Collection[Any]) -> frozenset[str]:
    """The kinds of generators from which code draws other numbers on each rank, as they stand before training.

    They do so where they are seeded by rank, or by nobody. All processes are to ask together. Those of the process are
    compared once in a fit, as training seeds them by rank.

    Returns:
        ``"held"`` for these, and some of :data:`~lightning_stateful.generators.rng.KINDS`; none without others.
    """
    if not _APART:
        shared = [hex_digest(repr(state).encode()) for state in Randomness.now().as_texts()]
        if (found := exchanged("generators of the process", shared)) is None:
            return frozenset()
        _APART.append(frozenset(kind for kind, *of in zip(KINDS, *found, strict=True) if len(set(of)) > 1))
    states = "".join(map(state_of_generator, generators))
    held = exchanged(f"generators of {name}", hex_digest(states.encode())) if generators else None
    return _APART[0] | {"held"} if len(set(held or ())) > 1 else _APART[0]


def kinds_found_alike() -> frozenset[str]:
    """The kinds of the process's generators that stood alike on all ranks before this fit; none on a single one."""
    return frozenset(KINDS) - _APART[0] if _APART else frozenset()


def expect_alike(kinds: Collection[str]) -> frozenset[str]:
    """Go on as a run in which these kinds of generators stood alike before training; none on a single rank."""
    if _APART:
        _APART[0] = frozenset(KINDS) - frozenset(kinds)
    return kinds_found_alike()


def end_comparing(*, were_seeded: bool) -> None:
    """Compare the process's generators anew from now on.

    Args:
        were_seeded: Training has seeded them by rank. Those that stood alike are put into states that do so again.
    """
    if were_seeded and _APART:
        _NUM_SEEDED[0] += 1
        seed_kinds(kinds_found_alike(), derive_seed("behind training", _NUM_SEEDED[0]))
    _APART.clear()


# The kinds of the process's generators that stood otherwise on other ranks.
_APART: list[frozenset[str]] = []
_NUM_SEEDED = [0]


def post(name: str, value: Any) -> None:
    """Let other processes see a value of this one, in place of the one before, without waiting for anybody."""
    if (store := _store()) is not None:
        store.set(f"lightning_stateful/posted/{name}/{detect_topology().rank}", json.dumps(value))


def posted(name: str) -> list[Any]:
    """The latest values of all processes, by global rank; None for one that has posted none."""
    if (store := _store()) is None:
        return []
    keys = [f"lightning_stateful/posted/{name}/{rank}" for rank in range(detect_topology().num_replicas)]
    # Two requests for all of them once all have posted, and nobody deletes what was posted.
    there = keys if store.check(keys) else [key for key in keys if store.check([key])]
    values = dict(zip(there, map(json.loads, store.multi_get(there)), strict=True)) if there else {}
    return [values.get(key) for key in keys]


@contextmanager
def failing_together(what: str = "") -> Iterator[None]:
    """Let processes that wait in :func:`exchanged` hear of an error in this block, which all run to build ``what``."""
    _begin_block()
    try:
        yield
    except Exception as error:
        store = torch.distributed.distributed_c10d._get_default_store()
        rank, said = detect_topology().rank, f"{type(error).__name__}: {error}"
        of_what = f"{what} could not be built on every rank:\n  - rank {rank}: {said}"
        store.set(_failure_key(), of_what if what else f"rank {rank} failed: {said}")
        raise
    finally:
        _begin_block()


def _begin_block() -> None:
    _BLOCKS[0] += 1
    _COUNTED.clear()


def _failure_key() -> str:
    return f"lightning_stateful/{_BLOCKS[0]}/failed"


def collectives_begun() -> list[int]:
    """How many collectives this process has begun in each group of torch.distributed."""
    if _store() is None:
        return []
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    # Some backends do not count them.
    with suppress(RuntimeError):
        return [group._get_sequence_number_for_group() for group in groups]
    return []
