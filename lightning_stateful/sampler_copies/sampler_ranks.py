"""Tells samplers that deal out to ranks by themselves of other ranks, and compares what all ranks yield together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from lightning_stateful.generators.attributes import attributes_of
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts
from lightning_stateful.samplers.fingerprint import digest

# Where samplers that deal out to ranks by themselves keep how many there are, which, and their share.
_REPLICAS, _RANK = ("num_replicas", "world_size", "_num_replicas", "_world_size"), ("rank", "_rank")
_COUNTS = ("num_samples", "total_size", "num_selected_samples")
# Functions of torch.distributed that tell a process its rank.
_ASKED = ("get_rank", "get_world_size", "is_initialized", "is_available")
# An object or dict, a name in it, and a value to set there.
Setting: TypeAlias = tuple[Any, str, Any]


def ranks_held(sampler: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank that a sampler, or one in it, holds; None if it holds none.

    What is one of several within another may hold that there is one rank.
    """
    found = [(held[names[0]], held[names[1]]) for _, held, names in _holders(SamplerParts(sampler).samplers)]
    return next((ranks for ranks in reversed(found) if ranks != (1, 0)), found[-1] if found else None)


def settings_of(sampler: Any, num_replicas: int, rank: int) -> list[Setting]:
    """The attributes by which a sampler knows that there are several ranks, with the values for other ranks."""
    parts = SamplerParts(sampler)
    return [
        (holder, name, value)
        for holder, held, names in _holders([*parts.samplers, *parts.dicts])
        if (held[names[0]], held[names[1]]) != (1, 0)
        for name, value in zip(names, (num_replicas, rank), strict=True)
    ]


def _holders(parts: Sequence[Any]) -> list[tuple[Any, Mapping[str, Any], tuple[str, str]]]:
    """The objects and dicts among ``parts`` that hold ranks, with all that they hold and the names of the two."""
    found = [(part, part if type(part) is dict else attributes_of(part)) for part in parts]
    return [(part, held, names) for part, held in found if (names := _rank_names(held)) is not None]


def settings_of_one_rank(sampler: Any, *, by_dataset: bool) -> list[Setting]:
    """The attributes by which a sampler knows its ranks and its share, with the values for a single rank.

    Args:
        sampler: The sampler.
        by_dataset: A single rank's share is the length of the dataset that the sampler holds, where it holds one; else
            it is the shares of all ranks.
    """
    settings = settings_of(sampler, 1, 0)
    for holder in (holder for holder, name, _ in list(settings) if name in _REPLICAS and type(holder) is not dict):
        held = attributes_of(holder)
        ranks = next(held[name] for name in _REPLICAS if name in held)
        data = held.get("dataset", held.get("data_source"))
        whole = len(data) if by_dataset and isinstance(data, Sized) else None
        counts = {name: held[name] for name in _COUNTS if type(held.get(name)) is int}
        if type(ranks) is not int or ranks == 1:
            continue
        if "num_samples" in counts:
            of_all = counts.get("total_size", counts["num_samples"] * ranks)
            settings.append((holder, "num_samples", of_all if whole is None else whole))
        if "total_size" in counts and whole is not None:
            settings.append((holder, "total_size", whole))
        if "num_selected_samples" in counts:
            settings.append((holder, "num_selected_samples", counts["num_selected_samples"] * ranks))
    return settings


def _rank_names(held: Mapping[Any, object]) -> tuple[str, str] | None:
    return next(((one, other) for one, other in product(_REPLICAS, _RANK) if one in held and other in held), None)


@contextmanager
def told(settings: Sequence[Setting]) -> Iterator[None]:
    """Set attributes for the block, and put them back at its end.

    Raises:
        AttributeError: One of them cannot be set.
    """
    before: list[Setting] = []
    try:
        for holder, name, value in settings:
            held = holder if type(holder) is dict else attributes_of(holder)
            kept = (holder, name, held[name])
            tell([(holder, name, value)])
            before.append(kept)
        yield
    finally:
        tell(before[::-1])


def tell(settings: Sequence[Setting]) -> None:
    """Set attributes for good."""
    for holder, name, value in settings:
        if type(holder) is dict:
            holder[name] = value
        else:
            setattr(holder, name, value)


class AskedRanks:
    """Notes whether code asks torch.distributed for its rank, and may answer in its place.

    Args:
        num_replicas: Ranks to tell of; None to let torch answer.
        rank: The rank to tell of.

    Attributes:
        was_asked: Whether anybody asked.
    """

    def __init__(self, num_replicas: int | None = None, rank: int = 0) -> None:
        self.was_asked = False
        self._answers: dict[str, Any] = {}
        if num_replicas is not None:
            self._answers = dict(zip(_ASKED, (rank, num_replicas, True, True), strict=True))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer within the block."""
        homes = [torch.distributed, torch.distributed.distributed_c10d]
        kept = [(home, name, getattr(home, name)) for home in homes for name in _ASKED if hasattr(home, name)]
        try:
            for home, name, function in kept:
                setattr(home, name, self._answer(name, function))
            yield
        finally:
            for home, name, function in kept:
                setattr(home, name, function)

    def _answer(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            self.was_asked = self.was_asked or name in ("get_rank", "get_world_size")
            return self._answers[name] if name in self._answers else function(*args, **kwargs)

        return answer


def yields_as_one(of_ranks: Sequence[Sequence[Any]], of_one: Sequence[Any], *, in_turn: bool = False) -> bool:
    """Whether what all ranks yield is what one rank yields, but for what makes their last step equal.

    That is fewer repeats than a step has samples, and fewer other items than ranks (lhotse names its repeats anew).

    Args:
        of_ranks: The items of each rank, single samples or batches.
        of_one: The items of a sampler that was told of one rank.
        in_turn: Whether ranks have to take them in turn, so that dealt out each rank gets what it yields by itself.
    """
    turns = len(of_one) // len(of_ranks) if in_turn else 0
    for rank, items in enumerate(of_ranks):
        if list(map(_samples_in, items[:turns])) != list(map(_samples_in, of_one[rank :: len(of_ranks)][:turns])):
            return False
    num_ranks = len(of_ranks)
    together = Counter(sample for items in of_ranks for item in items for sample in _samples_in(item))
    alone = Counter(sample for item in of_one for sample in _samples_in(item))
    added = together - alone
    step = num_ranks * max((len(_samples_in(item)) for item in of_one), default=1)
    num_others = sum(count for sample, count in added.items() if sample not in alone)
    return not alone - together and added.total() < step and num_others < num_ranks


def _samples_in(item: Any) -> list[Any]:
    if isinstance(item, (int, np.integer)):
        return [int(item)]
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return list(np.ravel(item).tolist())
    if isinstance(item, Sized) and hasattr(type(item), "__iter__") and not isinstance(item, (str, bytes, tuple)):
        return [int(part) if isinstance(part, (int, np.integer)) else digest(part) for part in item]  # type: ignore[attr-defined]
    return [digest(item)]


def numbers_in(sampler: Any) -> dict[str, int]:
    """Small whole numbers among a sampler's attributes: on ranks that it knows, one of them is the rank."""
    found = {}
    for place, part in enumerate(SamplerParts(sampler).samplers):
        for name, value in attributes_of(part).items():
            if type(value) is int and 0 <= value < 2**20:
                found[f"{place}.{name}"] = value
    return found


def name_of_rank(numbers: Sequence[Mapping[str, int]]) -> str | None:
    """The name under which the samplers of all ranks hold their rank, of :func:`numbers_in` by rank; None for none."""
    return next(
        (name for name in numbers[0] if all(of.get(name) == rank for rank, of in enumerate(numbers))),
        None,
    )


def is_given_ranks(sampler: Any) -> bool:
    """Whether a sampler is of a class that torch leaves to itself on ranks, or holds several by a usual name.

    One that was told that there is one rank yields everything, to be dealt out.
    """
    return isinstance(sampler, DistributedSampler) or ranks_held(sampler) not in (None, (1, 0))
