"""A few words for people on the orders that states tell of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {
    "sequential": "{length} samples in the dataset's order",
    "shuffled": "{length} samples, shuffled by seed {seed}",
    "block_shuffled": "{length} samples, shuffled in blocks by seed {seed}",
    "packed": "{length} packed sequences",
    "round_robin": "{sources} sources in turn, seed {seed}",
    "mixture": "A mixture of {sources} sources, seed {seed}",
    "buckets": "{length} samples in batches of like lengths, seed {seed}",
    "sampler": "A sampler that is iterated",
    "batch_sampler": "A batch sampler that is iterated",
    "stream": "A stream of shards",
    "iterable": "An iterable dataset",
}


def order_in_words(kind: str, config: Mapping[str, Any]) -> str:
    """A few words for people on the order of a loader, by what an envelope says of it."""
    dataset, lengths = config.get("dataset"), config.get("lengths")
    length = dataset.get("length") if isinstance(dataset, Mapping) else None
    if length is None and isinstance(lengths, Mapping):
        length = lengths.get("samples")
    words = _KINDS.get(kind, f"{{length}} samples in the order {kind!r}")
    known = {"length": f"{length:,}" if isinstance(length, int) else "All", "seed": config.get("seed", "none")}
    return words.format(**known, sources=len(config.get("sources") or ()))
