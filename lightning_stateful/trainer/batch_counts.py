"""Counts of what a batch holds, as its loader knows them: samples of each source, and tokens with padding."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.loaders.source_datasets import PackedSources
from lightning_stateful.mixture.order import MixtureOrder
from lightning_stateful.mixture.weights import DrawSchedule
from lightning_stateful.packing.plan import SequenceOrder

_UNITS = {"batch": "batches", "sample": "samples", "token": "tokens"}


class BatchCounts:
    """Counts of the batches of a loader, as far as it knows them without looking at what they hold.

    Args:
        loader: The loader.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self.loader = loader
        order: Any = loader.order
        self._mixture = order if isinstance(order, MixtureOrder) else None
        self._bounds = list(accumulate(self._mixture.sources.lengths)) if self._mixture else []
        self._lengths = order.lengths if isinstance(order, BucketOrder) else None
        is_packed = isinstance(getattr(order, "samples", None), SequenceOrder)
        is_packed = is_packed and isinstance(loader.dataset, PackedDataset)
        self._packed: Any = loader.dataset if is_packed or isinstance(loader.dataset, PackedSources) else None
        # Of a stream.
        self._stream: Any = loader.order
        config = loader.stream_config
        self._mixing, packing = (None, None) if config is None else (config.mixing, config.packing)
        self._room = 0 if packing is None else packing.sequence_length

    def described(self) -> dict[str, Any]:
        """The shares that were asked for of a mixture, for the header of a ledger; nothing of other data.

        Returns:
            Under ``mixture``: ``names``; ``unit``, what the shares are shares of; ``shares``, those of draws that were
            asked for ``at`` some steps of training, and how they go on ``between`` these. With an index, ``lengths`` of
            the sources, one after the other, and with a schedule ``steps`` of an epoch. By token, the ``tokens`` in a
            sample, and in a ``draw``, of each source.
        """
        if self._mixture is not None:
            order, sources = self._mixture, self._mixture.sources
            described: dict[str, Any] = {"names": sources.names, "unit": _UNITS[order.by], "lengths": sources.lengths}
            if order.schedule is not None:
                described["steps"] = order.num_steps
            if order.by == "token" and order.tokens is not None:
                each = [tokens / length for tokens, length in zip(order.tokens, sources.lengths, strict=True)]
                described["tokens"] = each
                described["draw"] = [size * tokens for size, tokens in zip(sources.batch_sizes, each, strict=True)]
            return {"mixture": {**described, **_asked(order.draws, order.schedule)}}
        if self._mixing is not None:
            mixing = self._mixing
            described = {"names": mixing.names, "unit": _UNITS[mixing.by]}
            return {"mixture": {**described, **_asked(mixing.draws, mixing.schedule)}}
        return {}

    def sources(self, indices: Any) -> tuple[tuple[int, int], ...]:
        """The number of each source in the latest batch, and its samples; empty where there are no sources.

        Args:
            indices: The indices of the batch; None of a stream's.
        """
        if self._mixing is not None:
            return tuple((number, samples) for number, samples, _ in self._stream.given.sources)
        if not self._bounds or indices is None:
            return ()
        # Batches are small: arrays would take longer.
        bounds, length = self._bounds, self._bounds[-1]
        return tuple(sorted(Counter(bisect_right(bounds, index % length) for index in indices).items()))

    def padding(self, indices: Any) -> tuple[int, int]:
        """Tokens of the latest batch, without padding and with it; zeros where that is not known.

        Args:
            indices: The indices of the batch; None of a stream's.
        """
        if self._lengths is not None and indices is not None and len(indices):
            of_samples = self._lengths[indices]
            return int(of_samples.sum()), int(of_samples.max()) * len(of_samples)
        if self._packed is not None and indices is not None:
            # Without a batch size an item is a sample.
            listed = [indices] if isinstance(indices, int) else indices
            counts: tuple[int, int] = self._packed.num_tokens_at(listed)
            return counts
        if self._room:
            given = self._stream.given.sources
            room = self._room * sum(samples for _, samples, _ in given)
            return room - sum(padding for _, _, padding in given), room
        return 0, 0


def _asked(draws: Sequence[int], schedule: DrawSchedule | None) -> Mapping[str, Any]:
    """Shares of draws by step."""
    points = [draws] if schedule is None else schedule.draws
    return {
        "at": [0] if schedule is None else list(schedule.steps),
        "shares": [[count / sum(point) for count in point] for point in points],
        "between": "constant" if schedule is None else schedule.between,
    }
