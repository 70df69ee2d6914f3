"""What a user's sampler finds around it while it is asked: randomness of its own, and no other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.samplers.randomness import (
    GENERATORS,
    Randomness,
    keep_randomness,
    seed_generator,
    seed_randomness,
)

# Generators and samplers are looked for in containers of at most so many things, and so deep.
_MOST_ITEMS, _DEEPEST = 64, 5
_CONTAINERS = (list, tuple, dict)


class Surroundings:
    """Lets a sampler run apart from the process around it.

    Within :meth:`entered` the process-wide CPU generators are the sampler's, and every sampler in it that deals
    batches out to ranks by itself is told that there is one rank: the ranks are the toolkit's to deal out to. Outside
    of it nothing of that can be seen.

    Args:
        sampler: The user's sampler or batch sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.samplers: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}
        self._find("", sampler, 0)
        self._inner: Randomness | None = None

    def seed(self, *labels: str | int) -> None:
        """Seed everything that the sampler may draw from; to be called within :meth:`entered`."""
        seed_randomness(derive_seed("sampler", *labels))
        for path, generator in self.generators.items():
            seed_generator(generator, derive_seed("sampler", path, *labels))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the sampler in its surroundings, which go on where they were left."""
        with keep_randomness():
            if self._inner is not None:
                self._inner.restore()
            with self.alone():
                yield
            self._inner = Randomness.now()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the samplers believe that there is one rank."""
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            for sampler in self.samplers.values():
                settings = _as_one_rank(sampler)
                before.append((sampler, {name: getattr(sampler, name) for name in settings}))
                _set(sampler, settings)
            yield
        finally:
            for sampler, settings in reversed(before):
                _set(sampler, settings)

    def _find(self, path: str, value: Any, depth: int) -> None:
        if depth > _DEEPEST or any(value is found for found in self.samplers.values()):
            return
        if isinstance(value, GENERATORS):
            self.generators[path] = value
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS:
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    self._find(f"{path}.{key}", item, depth + 1)
        elif depth == 0 or _is_sampler(value):
            self.samplers[path] = value
            for name, item in getattr(value, "__dict__", {}).items():
                self._find(f"{path}.{name}" if path else name, item, depth + 1)


def _is_sampler(value: Any) -> bool:
    if isinstance(value, Sampler):
        return True
    if isinstance(value, (type, Dataset, torch.Tensor, np.ndarray)) or hasattr(value, "__getitem__"):
        return False
    return hasattr(value, "__iter__") and hasattr(value, "__dict__")


def _as_one_rank(sampler: Any) -> dict[str, Any]:
    """What has to be set on a sampler that deals batches out by itself; empty for others."""
    for replicas in ("num_replicas", "world_size"):
        held = vars(sampler).get(replicas, "nothing") if hasattr(sampler, "__dict__") else "nothing"
        if held == "nothing" or "rank" not in vars(sampler) or (held, sampler.rank) == (1, 0):
            continue
        settings = {replicas: 1, "rank": 0}
        if isinstance(sampler, DistributedSampler):
            length = len(sampler.dataset)  # type: ignore[arg-type]  # torch takes its length, too
            counts = {"num_samples": length, "total_size": length}
            settings |= {name: count for name, count in counts.items() if name in vars(sampler)}
        return settings
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
