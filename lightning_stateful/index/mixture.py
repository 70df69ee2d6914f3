"""How several sources are mixed: the configuration behind round robin and mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.schedule import Schedule, digest
from lightning_stateful.index.sources import Sources

# A state of many sources stays short: beyond so many, their weights are told apart by a digest alone.
_MOST_LISTED = 8

Stop = Literal["all_exhausted", "first_exhausted", "cycle"]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources, their shares, and when an epoch ends.

    Attributes:
        sources: The datasets.
        shares: Each source's share of the turns.
        block: Turns in a block; in every block the shares are exact.
        stop: When an epoch ends, unless ``num_steps`` says it.
        num_steps: Steps of an epoch; each source goes on in the next where it stands.
        seed: Chooses the orders.
        shuffle: Whether samples, and turns within a block, have an order of their own.
        drop_last: Serve full batches only, and leave out the last step if it is not full.
        in_turn: Whether turns stand evenly spread in their block: round robin.
        by_sample: Whether a turn is a sample and a batch holds several sources; all batch sizes are equal then.
        by_token: Whether the shares were given as shares of tokens.
        weights: The shares as they were given: of batches, samples or tokens.
        sets_block: Whether the block was given, and does not follow from the shares.
        tokens: Tokens in every source, if they are known.
        schedule: Shares that change as training goes on, in place of ``shares``.

    Raises:
        ConfigurationError: The values contradict each other.
    """

    sources: Sources
    shares: tuple[Fraction, ...]
    block: int
    stop: Stop = "all_exhausted"
    num_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    in_turn: bool = False
    by_sample: bool = False
    by_token: bool = False
    weights: tuple[Fraction, ...] = ()
    sets_block: bool = False
    tokens: tuple[int, ...] | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if self.stop not in get_args(Stop):
            raise ConfigurationError(f"stop must be one of {get_args(Stop)}, got {self.stop!r}.")
        if self.num_steps is not None and as_int("num_steps", self.num_steps) < 1:
            raise ConfigurationError(f"num_steps must be at least 1, got {self.num_steps}.")
        if self.schedule is not None and self.num_steps is None:
            raise ConfigurationError(
                "With a schedule, an epoch that ends with its sources would have another length each time; pass "
                "num_steps, and each source goes on in the next epoch where it stands."
            )
        if self.drop_last and not self.by_sample:
            self.sources.refuse_large_batches()

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        return "round_robin" if self.in_turn else "mixture"

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        sizes = list(self.sources.batch_sizes)
        described: dict[str, Any] = {
            "stop": self.stop if self.num_steps is None else f"{self.num_steps} steps",
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_size": sizes[0] if len(set(sizes)) == 1 else sizes,
            "sources": dict(zip(self.sources.names, self.sources.lengths, strict=True)),
        }
        if self.in_turn:
            return described
        described["by"] = "sample" if self.by_sample else "token" if self.by_token else "batch"
        if self.sets_block:
            described["block"] = self.block
        # What is too long to list, or follows from it, belongs to the weights as well.
        rest: tuple[Any, ...] = (self.shares, None if self.sets_block else self.block)
        if self.schedule is None:
            listed = [float(f"{float(share):.3g}") for share in self.weights]
            described["weights"] = listed if len(listed) <= _MOST_LISTED else f"of {len(listed)} sources"
        else:
            described["weights"] = self.schedule.describe()
            rest = (*rest, self.tokens if self.schedule.unit == "tokens" else None)
        described["exact"] = digest(*rest)
        return described

    def rule(self, batch_size: int, width: int) -> StepRule:
        """How a pass over a source is cut."""
        return StepRule(batch_size=batch_size, num_replicas=width, drop_last=self.drop_last)
