"""Several streams as one, in turn or in proportion."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.sources import Stop
from lightning_stateful.mixture.weights import WeightSchedule
from lightning_stateful.samplers.mixture_samplers import refuse_splits
from lightning_stateful.stream_nodes.hugging_face import is_hugging_face
from lightning_stateful.stream_nodes.nodes import Shards
from lightning_stateful.streams.indexed import IndexedStream, has_index
from lightning_stateful.streams.source import By, Mixing
from lightning_stateful.streams.stream import Stream, as_stream
from lightning_stateful.streams.worker_slot import ALONE


class MixedStream(Stream):
    """Several streams, of which one after the other gives a batch, or a sample.

    Without weights they come in turn, as :class:`RoundRobinDataModule` has it; with weights as often as
    these say, in periods of exact shares, as :class:`MixtureDataModule` has it. All ranks take a step's batch from the
    same source as long as none is exhausted.

    Args:
        streams: The streams by name, or in a list. A map-style dataset among them is read as an
            :class:`IndexedStream`.
        weights: A positive number for each, by name or in order; None for round robin.
        temperature: Above 1, weights are made more alike.
        by: Whether one draw is a ``"batch"`` or a ``"sample"``.
        stop: When a worker's share of an epoch ends: ``"all_exhausted"``, ``"first_exhausted"`` (what is left comes
            first in the next epoch), or ``"cycle"``: those exhausted begin again until all have been.
        schedule: Weights that change by step of training, in place of ``weights``: a :class:`WeightSchedule`, or a dict
            of weights by step. Needs ``stop="cycle"``.
        seed: Chooses the order of draws; by default the seed of the data module or loader that serves it, as
            ``StreamDataModule(seed=...)``, or that of Lightning's ``seed_everything``, or 0. Streams without a
            seed have that default too, and not this seed.

    Raises:
        ConfigurationError: An argument is out of range, a stream is mixed itself, or they are splits of one dataset.
    """

    def __init__(
        self,
        streams: Mapping[str, Any] | Sequence[Any],
        *,
        weights: Mapping[str, Any] | Sequence[Any] | None = None,
        temperature: float = 1,
        by: By = "batch",
        stop: Stop = "all_exhausted",
        schedule: WeightSchedule | Mapping[int, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        is_one = isinstance(streams, (str, bytes, IterableDataset, Shards, BaseNode)) or is_hugging_face(streams)
        if is_one or not isinstance(streams, Collection):
            raise ConfigurationError(
                f"MixedStream takes streams by name, or in a list, got a {type(streams).__qualname__}. Pass "
                "MixedStream([one, other]) or MixedStream({'one': one, 'other': other})."
            )
        refuse_splits(streams)
        named = streams if isinstance(streams, Mapping) else {str(n): stream for n, stream in enumerate(streams)}
        if not named:
            raise ConfigurationError("MixedStream was given no streams.")
        if len({str(name) for name in named}) < len(named):
            raise ConfigurationError(f"Streams need different names, got {list(named)}.")
        sources = {}
        for name, dataset in named.items():
            stream = as_stream(dataset)
            if stream is None and has_index(dataset):
                stream = IndexedStream(dataset)
            if stream is None or stream.mixing is not None:
                raise ConfigurationError(
                    f"Stream {name!r} is a {type(dataset).__qualname__}"
                    f"{' mixed already' if stream is not None else ', which has no shards'}. Mix ChunkedDatasets, "
                    "streams of Hugging Face's, and datasets with an index."
                )
            sources[str(name)] = replace(stream.sources[ALONE], path=str(name))
        mixing = Mixing.of(
            list(sources),
            weights=weights,
            temperature=temperature,
            by=by,
            stop=stop,
            schedule=schedule,
            seed=None if seed is None else as_int("seed", seed),
        )
        super().__init__(sources, mixing)
