"""What a user's sampler finds around it while it is asked: randomness of its own, and no other ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.rng import (
    GENERATORS,
    Randomness,
    keep_randomness,
    read_generator,
    seed_generator,
    seed_randomness,
    write_generator,
)

# How deep, and among how many things in all, generators and samplers are looked for.
_DEEPEST, _MOST_THINGS, _LONG, _FEW = 6, 10_000, 1024, 16
_CONTAINERS = (list, tuple, dict)
# Where samplers that deal out to ranks by themselves keep how many there are, which, and their share.
_REPLICAS, _RANK = ("num_replicas", "world_size", "_num_replicas", "_world_size"), ("rank", "_rank")
# What Lightning notes of the samplers that are made while it asks for loaders.
_LIGHTNINGS = "__pl_saved"
_COUNTS = ("num_samples", "total_size", "num_selected_samples")
OF_RANKS = frozenset({*_REPLICAS, *_RANK, *_COUNTS})
_NO_HOLDERS = (type, Dataset, torch.Tensor, torch.nn.Module, np.ndarray)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), np.int64, np.float64})


class Surroundings:
    """Lets a sampler run apart from the process around it.

    Within :meth:`entered` the process-wide CPU generators are the sampler's, those that it holds stand where it has
    left them, and every sampler in it that deals batches out to ranks by itself is told that there is one rank: the
    ranks are the toolkit's to deal out to. Outside of it nothing of that can be seen.

    Args:
        sampler: The user's sampler or batch sampler.
        as_one_rank: Whether there is to be one rank.
    """

    def __init__(self, sampler: Any, *, as_one_rank: bool = True) -> None:
        self._as_one_rank = as_one_rank
        self.name = type(sampler).__qualname__
        self.samplers: dict[str, Any] = {}
        # Arguments that a sampler keeps, to build others with, or as part of its state.
        self.shares: list[dict[str, Any]] = []
        self.generators: dict[str, Any] = {}
        self._seen: set[int] = set()
        self._home = type(sampler).__module__
        self._find("", sampler, 0)
        self._seen.clear()
        self._inner: Randomness | None = None
        self._inner_held: list[Any] = []

    def seed(self, *labels: str | int) -> None:
        """Seed everything that the sampler may draw from; to be called within :meth:`entered`."""
        seed_randomness(derive_seed("sampler", *labels))
        for path, generator in self.generators.items():
            seed_generator(generator, derive_seed("sampler", path, *labels))

    @contextmanager
    def entered(self, *, keep_inner: bool = True) -> Iterator[None]:
        """Run the sampler in its surroundings, which go on where they were left.

        Args:
            keep_inner: Whether they do; if not, whoever enters has to seed them.

        Raises:
            ConfigurationError: A sampler that counted its share of the ranks when it was built cannot be alone.
        """
        generators = list(self.generators.values())
        before = [read_generator(generator) for generator in generators]
        try:
            with keep_randomness():
                if self._inner is not None:
                    self._inner.restore()
                    for generator, state in zip(generators, self._inner_held, strict=True):
                        write_generator(generator, state)
                with self.alone():
                    yield
                if keep_inner:
                    self._inner = Randomness.now()
                    self._inner_held = [read_generator(generator) for generator in generators]
        finally:
            for generator, state in zip(generators, before, strict=True):
                write_generator(generator, state)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the samplers believe that there is one rank, unless they are to deal out to ranks by themselves."""
        if not self._as_one_rank:
            yield
            return
        before: list[tuple[Any, dict[str, Any]]] = []
        shares = [(share, {name: share[name] for name in _ranks_in(share)}) for share in self.shares]
        try:
            for sampler in self.samplers.values():
                settings = _as_one_rank(sampler)
                if settings:
                    before.append((sampler, {name: getattr(sampler, name) for name in settings}))
                    _set(sampler, settings)
            for share in self.shares:
                share.update(_ranks_in(share))
            yield
        except AssertionError as error:
            if not before:
                raise
            why = str(error).partition("\n")[0] or "without a word"
            raise ConfigurationError(
                f"{self.name} deals batches out to ranks by itself, and failed when it was told that there is one rank "
                f"(AssertionError: {why}). Build it for one rank (num_replicas=1, rank=0): the loader deals its "
                "batches out."
            ) from error
        finally:
            for sampler, settings in reversed(before):
                for name, value in settings.items():
                    with suppress(AttributeError):
                        setattr(sampler, name, value)
            for share, settings in shares:
                share.update(settings)

    def _find(self, path: str, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or depth > _DEEPEST or id(value) in self._seen or len(self._seen) > _MOST_THINGS:
            return
        self._seen.add(id(value))
        if isinstance(value, random.SystemRandom):
            return  # It cannot be seeded, which the trial will show.
        if isinstance(value, GENERATORS):
            self.generators[path] = value
        elif isinstance(value, _CONTAINERS):
            self._find_in_container(path, value, depth)
        elif depth == 0 or _is_sampler(value):
            self.samplers[path] = value
            self._find_in_attributes(path, value, depth)
        elif type(value).__module__ == self._home and not isinstance(value, _NO_HOLDERS):
            self._find_in_attributes(path, value, depth)

    def _find_in_container(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, dict) and _ranks_in(value):
            self.shares.append(value)
        items = value.values() if isinstance(value, dict) else value
        if set(map(type, items)) <= _PLAIN:
            return
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        # Long lists hold data, and not a generator somewhere.
        for key, item in islice(pairs, len(value) if len(value) <= _LONG else _FEW):
            self._find(f"{path}.{key}", item, depth + 1)

    def _find_in_attributes(self, path: str, value: Any, depth: int) -> None:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        held = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
        for name, item in held.items():
            if name.startswith(_LIGHTNINGS):
                continue
            self._find(f"{path}.{name}" if path else name, item, depth + 1)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_sampler(value: Any) -> bool:
    if isinstance(value, Sampler):
        return True
    if isinstance(value, _NO_HOLDERS) or hasattr(value, "__getitem__"):
        return False
    return hasattr(value, "__iter__") and hasattr(value, "__dict__")


def _as_one_rank(sampler: Any) -> dict[str, Any]:
    """What has to be set on a sampler that deals batches out by itself; empty for others."""
    held = getattr(sampler, "__dict__", {})
    settings = _ranks_in(held)
    if not settings:
        return {}
    ranks = next(held[name] for name in _REPLICAS if name in settings)
    counts = {name: held[name] for name in _COUNTS if isinstance(held.get(name), int)}
    if isinstance(sampler, DistributedSampler) and isinstance(held.get("dataset"), Sized):
        whole = len(held["dataset"])
        return settings | {name: whole for name in ("num_samples", "total_size") if name in counts}
    # Others count their share in various ways; that of a single rank is all of it.
    if isinstance(ranks, int) and "num_samples" in counts:
        settings["num_samples"] = counts.get("total_size", counts["num_samples"] * ranks)
    if isinstance(ranks, int) and "num_selected_samples" in counts:
        settings["num_selected_samples"] = counts["num_selected_samples"] * ranks
    return settings


def _ranks_in(held: dict[str, Any]) -> dict[str, Any]:
    """What says there, unless there is one rank, that there is one; empty where nothing does."""
    for replicas in _REPLICAS:
        for rank in _RANK:
            if replicas in held and rank in held and (held[replicas], held[rank]) != (1, 0):
                return {replicas: 1, rank: 0}
    return {}


def _set(sampler: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        try:
            setattr(sampler, name, value)
        except AttributeError as error:
            raise UnsupportedLoaderError(
                f"The sampler {type(sampler).__qualname__} deals batches out to ranks by itself, and its {name!r} "
                "cannot be set. Build it for one rank (num_replicas=1, rank=0): the loader deals its batches out."
            ) from error
