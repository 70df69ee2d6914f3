"""Several datasets one after the other, as the sources of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import MAX_LENGTH, Indices, concatenated_ranges, keyed_permutation
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.errors import ConfigurationError

Stop = Literal["all_exhausted", "first_exhausted", "cycle"]
By = Literal["batch", "sample", "token"]

# Times the samples of all sources, the largest index still is an int64.
_MOST_PASSES = 2**31


@dataclass(frozen=True)
class Sources:
    """Named datasets that stand one after the other, as in ``torch.utils.data.ConcatDataset``.

    Attributes:
        names: A name for each.
        lengths: Samples in each.
        batch_sizes: Samples in a full batch of each, on one rank.
        by_pass: The names of those that have other samples in each pass over them, in an order of their own: packed
            datasets. Their indices go on from pass to pass: sample ``i`` of pass ``n`` is at ``i`` plus ``n`` times the
            length of all sources.

    Raises:
        ConfigurationError: There is none, names are equal, a source is empty, or a batch size is not positive.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    by_pass: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigurationError("There are no sources; give at least one dataset.")
        if len(set(self.names)) < len(self.names):
            raise ConfigurationError(f"Sources need different names, got {list(self.names)}.")
        for name, length, batch_size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            if as_int(f"The length of source {name!r}", length) == 0:
                raise ConfigurationError(f"Source {name!r} is empty; leave it out.")
            if not 0 < length <= MAX_LENGTH:
                raise ConfigurationError(f"Source {name!r} must have 1 to 2**40 samples, got {length}.")
            as_int(f"The batch size of source {name!r}", batch_size, least=1)
        if unknown := set(self.by_pass) - set(self.names):
            raise ConfigurationError(
                f"by_pass has {sorted(unknown)}, which are none of the sources {list(self.names)}."
            )
        # States hold no other integers than Python's.
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
        object.__setattr__(self, "batch_sizes", tuple(map(int, self.batch_sizes)))

    def __len__(self) -> int:
        return len(self.names)

    def refuse_less_than_a_batch(self) -> None:
        """Refuse sources that have no full batch.

        Raises:
            ConfigurationError: One has none; with its name.
        """
        for name, length, size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            if size > length:
                raise ConfigurationError(
                    f"Source {name!r} has {length} samples, fewer than a batch of {size}; with drop_last=True it "
                    "would never be served. Give it a smaller batch size, or pass drop_last=False."
                )

    def config(self) -> dict[str, Any]:
        """Plain data to be compared: the lengths of sources by name, and whether passes have samples of their own."""
        config: dict[str, Any] = {"sources": dict(zip(self.names, self.lengths, strict=True))}
        return {**config, "packed_anew": True} if self.by_pass else config

    def in_order(self, served: Mapping[str, int]) -> tuple[int, ...]:
        """Numbers by name, as one for each source; 0 for one that is not there."""
        return tuple(served.get(name, 0) for name in self.names)

    def are(self, saved: Mapping[str, Any]) -> bool:
        """Whether these are the sources of a configuration: the same names and lengths, in the same order."""
        return [(name, _length(length)) for name, length in saved.items()] == [
            *zip(self.names, self.lengths, strict=True)
        ]

    def moved(self, served: Mapping[str, int], saved: Mapping[str, Any]) -> list[int]:
        """Samples served of each source, which may have another length than in a configuration; a new one begins."""
        kept = []
        for name, length in zip(self.names, self.lengths, strict=True):
            before, samples = _length(saved.get(name, length)), served.get(name, 0)
            # Where a pass has just been served whole, what has come to the source since is still to be served.
            passes = max(samples - 1, 0) // before
            rest = samples - passes * before
            # Of documents that are packed otherwise, the same share of the pass.
            kept.append(passes * length + min(rest * length // before if name in self.by_pass else rest, length))
        return kept

    def passes_of(self, served: Sequence[tuple[tuple[Label, ...], Sequence[int]]]) -> dict[str, list[tuple[int, int]]]:
        """Of each source the passes over it: pairs of its number and the samples that were served of it.

        Args:
            served: Runs through all of them, one for each cycle of an epoch: labels that their orders are derived from,
                and the samples that were served of each source, whose passes begin with the run.
        """
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        for labels, counts in served:
            for name, length, samples in zip(self.names, self.lengths, counts, strict=True):
                whole, rest = divmod(samples, length)
                numbers = [_number_of_pass(number, ("mixture", *labels)) for number in range(whole + (rest > 0))]
                sizes = [length] * whole + [rest] * (rest > 0)
                found[name] += zip(numbers, sizes, strict=True)
        return found

    def report(
        self, passes: Mapping[str, Sequence[tuple[int, int]]], tokens: Sequence[int] | None
    ) -> dict[str, dict[str, float]]:
        """Of each source samples, passes ("epochs"), share of samples and, if known, tokens.

        Args:
            passes: As :meth:`passes_of` gives them.
            tokens: Tokens in every source; None if they are not known.
        """
        served = [sum(samples for _, samples in passes[name]) for name in self.names]
        total, result = sum(served), dict[str, dict[str, float]]()
        for source, (name, length, samples) in enumerate(zip(self.names, self.lengths, served, strict=True)):
            share = samples / total if total else 0.0
            result[name] = {"samples": samples, "epochs": samples / length, "share": share}
            if tokens is not None:
                result[name]["tokens"] = (2 * samples * tokens[source] + length) // (2 * length)
        return result

    def take(self, numbers: Indices, offsets: Indices, sizes: Indices, seed: tuple[Label, ...] | None) -> Indices:
        """The samples of many runs, each of consecutive samples of one source, one run after the other.

        Args:
            numbers: The source of each run; int64 of shape ``(runs,)``.
            offsets: Its first sample, counted on from pass to pass over the source; of the same shape, and rising
                within a source.
            sizes: Its number of samples; of the same shape.
            seed: Labels that choose the order of every pass; None for the order of the dataset.

        Returns:
            Indices as they count over all datasets; int64 of shape ``(sizes.sum(),)``.
        """
        ends = np.cumsum(sizes)
        indices = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.int64)
        for source in present(numbers):
            runs = np.flatnonzero(numbers == source)
            where = concatenated_ranges(ends[runs] - sizes[runs], sizes[runs])
            indices[where] = self._take_of(source, concatenated_ranges(offsets[runs], sizes[runs]), seed)
        return indices

    def _take_of(self, source: int, offsets: Indices, seed: tuple[Label, ...] | None) -> Indices:
        """The samples of one source at ``offsets``, which rise."""
        length, before = self.lengths[source], sum(self.lengths[:source])
        if seed is not None and self.names[source] in self.by_pass:
            passes, within = np.divmod(offsets, length)
            found = [_number_of_pass(number, seed) for number in range(int(passes[0]), int(passes[-1]) + 1)]
            numbers = np.array(found, dtype=np.int64)[passes - passes[0]]
            return numbers * sum(self.lengths) + before + within  # type: ignore[no-any-return]  # int64
        if seed is None or length == 1:
            return offsets % length + before
        first, last = int(offsets[0]) // length, int(offsets[-1]) // length
        borders = np.searchsorted(offsets, np.arange(first + 1, last + 1) * length)
        result = np.empty_like(offsets)
        for number, (begin, end) in enumerate(pairwise([0, *borders.tolist(), offsets.size]), first):
            if begin < end:
                # By name: a source keeps its order when others come and go.
                key = derive_seed("source", *seed, self.names[source], number)
                result[begin:end] = keyed_permutation(length, key).take(offsets[begin:end] - number * length)
        return result + before


def _number_of_pass(number: int, seed: tuple[Label, ...]) -> int:
    """The number by which a source knows a pass over it that has samples of its own.

    Args:
        number: Passes before it: since training began or, where passes begin anew with each epoch, in the epoch.
        seed: Labels that orders are derived from; behind the first two, the epoch and the number of its cycle where
            passes begin anew.
    """
    return derive_seed("pass", *seed[2:], number) % _MOST_PASSES if len(seed) > 2 else number


def _length(described: Any) -> int:
    """The length of a source in a configuration, to which a loader adds a digest."""
    return int(str(described).split(" ", maxsplit=1)[0])


def present(numbers: Indices) -> list[int]:
    """The different ones of non-negative and not too large integers, ascending: faster than ``numpy.unique``."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found
