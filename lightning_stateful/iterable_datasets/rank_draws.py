"""Whether the ranks of a run draw alike in an iterable dataset, as they would of the generators that a user has left.

A dataset may shuffle by the process's generators and take every n-th file: after ``seed_everything`` all ranks shuffle
alike in torch, and each file comes once. Where the ranks' generators stand apart, ranks have to draw apart. What it
draws in threads of its own follows no seed, nor what an iterable of batches draws.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import cached_property
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.generators.attributes import is_users, names_in, reached
from lightning_stateful.generators.generator_states import process_states
from lightning_stateful.generators.rng import (
    KINDS,
    Randomness,
    keep_randomness,
    seed_kinds,
    seed_randomness,
    state_of_generator,
)
from lightning_stateful.iterable_datasets.pass_history import digest_of_sample
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.samplers.rank_exchange import exchanged

GOES_ON = (
    "holds a random generator that goes on from pass to pass. Earlier passes are not read again for that, so the "
    "resume is not exact in what it draws. Seed it in set_epoch(epoch) or __iter__, or give the dataset state_dict and "
    "load_state_dict."
)
KEEPS = (
    "keeps what it draws from torch, NumPy or random in a pass, such as a list that it shuffles in place, or samples "
    "that wait for the next pass. That is not seeded for it (an iterable that is no DataLoader, or "
    "seed_samples=False), and earlier passes are read again with other draws: the resume is not exact. Shuffle a copy, "
    "by a generator that is seeded from the epoch, or pass a DataLoader, with seed_samples on."
)
_SIZE, ALL_KINDS = 8, frozenset(KINDS)
# Items that tell a pass from another.
_FIRST_ITEMS = 2
# Passes in which what an iterable keeps of draws is looked for.
_FEW_PASSES = 4
# Batches of a pass in which draws of threads are looked for.
_LOOKS = 8
# Modules of Python's whose threads run functions; what code names that makes them do so; and what it may hold for that.
_POOLS = ("concurrent.futures.thread", "multiprocessing.dummy")
_POOL_NAMES = frozenset({"ThreadPoolExecutor", "ThreadPool", "submit", "apply_async", "map_async", "imap"})
_POOL_KINDS = (Executor, ThreadPool)


def where_generators_stand(loader: DataLoader[Any], *, is_alone: bool = False) -> dict[str, str]:
    """Digests, by kind, of the states of the CPU generators that a pass over a loader depends on in torch.

    Workers are seeded by torch's own generator, or by the loader's, and then by the loader's ``worker_init_fn``.

    Args:
        loader: The loader.
        is_alone: There is no other rank to compare them with, so that no worker has to be started to find out.
    """
    states = dict(zip(KINDS, Randomness.now().as_texts(), strict=True))
    if loader.num_workers:
        own = loader.generator
        states = {"torch": states["torch"] if own is None else state_of_generator(own)}
        if loader.worker_init_fn is not None and not is_alone:
            states = _states_in_worker(loader, states["torch"]) or states
    return {kind: hex_digest(text.encode(), size=_SIZE) for kind, text in states.items()}


def _states_in_worker(loader: DataLoader[Any], seeded_by: str) -> dict[str, str]:
    """What a worker's generators depend on, by kind, once ``worker_init_fn`` was called; empty where that fails.

    Two workers are started under two seeds, which end before they read anything. A kind that stands alike in both
    follows from ``worker_init_fn`` alone, others from ``seeded_by`` as well.
    """
    found: list[list[str]] = []
    with TemporaryDirectory() as folder:
        for seed in range(2):
            path = Path(folder, str(seed))
            trial = DataLoader(
                loader.dataset,
                num_workers=1,
                worker_init_fn=_EndsAsBegun(loader.worker_init_fn, path),
                generator=torch.Generator().manual_seed(seed),
                multiprocessing_context=loader.multiprocessing_context,
            )
            with suppress(Exception):
                next(iter(trial))
            if not path.exists():
                return {}
            found.append(json.loads(path.read_text()))
    alike = zip(KINDS, *found, strict=True)
    return {kind: one if one == other else f"{one} {other} {seeded_by}" for kind, one, other in alike}


class _EndsAsBegun:
    """A ``worker_init_fn`` that calls another one, writes down where generators stand then, and ends the worker.

    Args:
        function: The other one.
        path: The file to write.
    """

    def __init__(self, function: Any, path: Path) -> None:
        self.function, self.path = function, path

    def __call__(self, worker_id: int) -> None:
        self.function(worker_id)
        self.path.write_text(json.dumps(Randomness.now().as_texts()))
        raise RuntimeError("It reads nothing.")


def generators_of_ranks(loader: DataLoader[Any], name: str, timeout: float) -> list[dict[str, str]]:
    """What :func:`where_generators_stand` finds now on every process, in a loop of the user's own.

    In such a loop nothing of this package has drawn from them before.

    Args:
        loader: The loader.
        name: Its dataset's name.
        timeout: Seconds to wait for the others.
    """
    return exchanged(f"generators of {name}", where_generators_stand(loader), timeout=timeout) or []


def lightning_seeds_workers(loader: Any) -> bool:
    """Whether Lightning's Trainer is to seed a loader's workers by rank, after ``seed_everything(workers=True)``."""
    is_asked = os.environ.get("PL_SEED_WORKERS", "0") not in ("", "0")
    return bool(is_asked and loader.num_workers and loader.worker_init_fn is None)


def kinds_alike(of_ranks: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """The kinds of generators from which ranks are to draw alike, as they stand alike on all.

    Args:
        of_ranks: What :func:`where_generators_stand` has found on each rank.

    Returns:
        Some of :data:`~lightning_stateful.generators.rng.KINDS`; all of them where the only one seeds workers.
    """
    first = of_ranks[0]
    found = frozenset(kind for kind in first if all(of.get(kind) == first[kind] for of in of_ranks))
    return ALL_KINDS if found and found == first.keys() else found & ALL_KINDS


class UnseededDraws:
    """Notices draws from the process's generators that no seed decides, in the first batches of a pass.

    A thread that a dataset has started draws as it happens to run, before or after the generators are seeded for a
    batch. Looked for are threads that run a function of the user's, or are those of a pool that the user's code has or
    makes: libraries have pools that draw nothing. An iterable of batches, which is not seeded, draws from where the
    model has left the generators.

    Args:
        dataset: The dataset, or the iterable of batches.
        gives_batches: Whether it is an iterable of batches.
    """

    def __init__(self, dataset: Any, *, gives_batches: bool) -> None:
        self._dataset, self._gives_batches, self._others = dataset, gives_batches, set(threading.enumerate())
        self._num_read = 0
        self._is_looked_at = self._is_seeded = False
        self._before: Any = None

    def note_seeded(self, seed: int | None) -> None:
        """A batch is about to be read, for which the generators were seeded, unless the seed is None."""
        # With its first batch a pass may begin one of a DataLoader, which draws a seed for workers.
        may_draw = self._started() if seed is not None else self._num_read > 0
        self._is_looked_at = self._num_read < _LOOKS and may_draw
        self._is_seeded = seed is not None
        self._before = process_states() if self._is_looked_at or seed is None else None

    def are_found(self) -> bool:
        """Whether something was drawn since :meth:`note_seeded`, where nothing is seeded or threads run."""
        return self._before is not None and self._before != process_states()

    def said(self, name: str) -> list[str]:
        """A text if something was drawn since :meth:`note_seeded`, once.

        Args:
            name: The dataset's name.
        """
        is_found = self._is_looked_at and self.are_found()
        self._num_read += _LOOKS if is_found else 1
        if not is_found:
            return []
        if self._gives_batches or not self._is_seeded:
            remedy = "train on a DataLoader" if self._gives_batches else "leave seed_samples on"
            return [
                f"{name} draws from the process's random generators, from where the model has left them. So the first "
                "batches after a resume draw other numbers than without the stop. Let it draw from a generator of its "
                f"own that is in its state; or {remedy}, or train on a graph of torchdata nodes with "
                "StreamDataModule(graph): their samples are seeded."
            ]
        return [
            f"{name} runs threads of its own in this process, while random numbers are drawn from the process's "
            "generators. If a thread draws them, they are others in every run, and after a resume: draw in the "
            "function that iterates, or from a generator that the thread makes from a seed and the epoch."
        ]

    def _started(self) -> bool:
        started = set(threading.enumerate()) - self._others
        modules = {one for thread in started for one in _modules_of(thread)}
        return any(map(is_users, modules)) or (not modules.isdisjoint(_POOLS) and self._has_pool)

    @cached_property
    def _has_pool(self) -> bool:
        values = [place.value for place in reached({"dataset": self._dataset})]
        names = {name for one in values if isinstance(one, FunctionType) for name in names_in(one.__code__)}
        return bool(names & _POOL_NAMES) or any(isinstance(one, _POOL_KINDS) for one in values)


def _modules_of(thread: threading.Thread) -> list[str]:
    """The modules of a thread's class and of the function that it runs."""
    of_function = getattr(getattr(thread, "_target", None), "__module__", None)
    return [type(thread).__module__, *([of_function] if of_function else [])]


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


def keeps_what_it_draws(iterable: Any, *, is_begun_alike: bool) -> bool:
    """Whether a pass over an iterable depends on what the process's generators gave in the one before it.

    Two copies of it are read in a few passes, which begin under the same seeds, but draw under others in between.

    Args:
        iterable: An iterable dataset, or an iterable of batches.
        is_begun_alike: Whether the pass before begins under the same seed, so that only its later draws are others.
    """
    found: list[str] = []
    with keep_randomness(), suppress(Exception):
        for seed in range(2):
            copied, firsts = copy.deepcopy(iterable), list[Any]()
            for number in range(_FEW_PASSES):
                is_apart = not (number or is_begun_alike)
                seed_randomness(derive_seed("pass", number, seed if is_apart else 0))
                items = iter(copied)
                read = list(islice(items, _FIRST_ITEMS))
                firsts += [] if is_apart else read
                if is_begun_alike:
                    seed_randomness(derive_seed("later", number, seed))
                # Where it leaves off, it may keep more or less.
                list(islice(items, number))
            found.append(digest_of_sample(firsts, only_labels=False))
    return len(set(found)) > 1
