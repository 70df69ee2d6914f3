"""Options of a loader over an iterable dataset: how it is read and served."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.state import accepted_names
from lightning_stateful.streams.worker_slot import StreamConfig

Replay = Literal["warn", "refuse"]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options by which a stream is read and served.

    Attributes:
        config: How the stream is read; None to read it as the loader says.
        steps_per_epoch: Steps of an epoch; the next goes on where it ends, and the stream begins again where it ends.
        replay: Whether a stream that has to be read again up to where it stood is read, with a warning, or refused.
        exact: Whether each rank serves what it has, however many steps it takes, of every source: for evaluation.
        timeout: Seconds to wait for the other ranks' batches.
        seed: Chooses the randomness of what has none of its own; None for that of Lightning's ``seed_everything``, or 0
            if there is none.
        path: Where several loaders are served side by side, which of them this is: each draws from (seed, path).
        seed_samples: Seed what torch, NumPy and ``random`` draw, by (seed, path, pass, shards, samples before).
        num_replicas: Data-parallel ranks; None for those of the process group at the first batch, or 1.
        rank: This rank.
        accept: Names of differences between a state and this configuration to let pass.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    config: StreamConfig | None = None
    steps_per_epoch: int | None = None
    replay: Replay = "warn"
    exact: bool = False
    timeout: float = 1800.0
    seed: int | None = None
    path: str = ""
    seed_samples: bool = True
    num_replicas: int | None = None
    rank: int | None = None
    accept: Collection[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept", accepted_names(self.accept))
        if self.steps_per_epoch is not None and as_int("steps_per_epoch", self.steps_per_epoch) < 1:
            raise ConfigurationError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch}.")
        if not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ConfigurationError(f"timeout must be a number of seconds above 0, got {self.timeout!r}.")
        if self.replay not in ("warn", "refuse"):
            raise ConfigurationError(f"replay must be one of ('warn', 'refuse'), got {self.replay!r}.")


class IterableBatches(IterableDataset[Any]):
    """An iterable of batches as the dataset of a DataLoader that hands them over as they are.

    Args:
        iterable: The iterable.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments by which a loader makes batches of samples."""
    return {
        "batch_size": loader.batch_size,
        "is_batched": loader.batch_size is not None,
        "drop_last": loader.drop_last,
    }
