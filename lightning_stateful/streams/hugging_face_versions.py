"""Differences among versions of ``datasets`` from 3.0 on: names, and pipelines that resume wrongly in some."""

from __future__ import annotations

import copy
import sys
from typing import Any

from lightning_stateful.errors import ConfigurationError

# Versions in which a state leaves samples out, or cannot be loaded: since the first, until before the second.
_LOSSY = ((3, 3), (3, 6))
# Stages that versions have but cannot deal out, likewise, and why.
_BROKEN = {
    "repeat": ((3, 3), (4, 0), "cannot divide it into shards"),
    "take": ((5, 0), (5, 1), "cannot read it in any epoch but the first"),
    "skip": ((5, 0), (5, 1), "cannot read it in any epoch but the first"),
}


def version() -> tuple[int, ...]:
    """The first two numbers of the version of ``datasets`` in use, which has been imported."""
    return tuple(map(int, sys.modules["datasets"].__version__.split(".")[:2]))


def num_shards_of(dataset_or_stage: Any) -> int:
    """Number of shards, by whatever name the version has for it."""
    named = "num_shards" if hasattr(type(dataset_or_stage), "num_shards") else "n_shards"
    return int(getattr(dataset_or_stage, named))


def shard_of(dataset: Any, number: int) -> Any:
    """The dataset of one shard."""
    if hasattr(dataset, "shard"):
        return dataset.shard(num_shards=num_shards_of(dataset), index=number)
    return type(dataset)(
        ex_iterable=dataset._ex_iterable.shard_data_sources(number, num_shards_of(dataset)),
        info=dataset._info.copy(),
        split=dataset._split,
        formatting=dataset._formatting,
        shuffling=copy.deepcopy(dataset._shuffling),
        token_per_repo_id=dataset._token_per_repo_id,
    )


def is_table(formatting: Any) -> bool:
    """Whether samples are given out as tables."""
    return formatting is not None and formatting.format_type in ("arrow", "pandas", "polars")


def refuse_broken(stage: str) -> None:
    """Refuse a stage that the version of ``datasets`` in use cannot read shard by shard.

    Args:
        stage: The stage as people call it.

    Raises:
        ConfigurationError: It is such a stage.
    """
    since, until, fault = _BROKEN.get(stage, ((0,), (0,), ""))
    if since <= version() < until:
        raise ConfigurationError(
            f"{stage} in the pipeline: datasets {sys.modules['datasets'].__version__} {fault}. Leave it out, or "
            f"install datasets>={'.'.join(map(str, until))}."
        )


def loss_of_version() -> str:
    """Why every shard has to be read again on a resume with the version in use; empty if it need not be."""
    if not _LOSSY[0] <= version() < _LOSSY[1]:
        return ""
    return f"states of datasets {sys.modules['datasets'].__version__} leave samples out (3.6 mended that)"
