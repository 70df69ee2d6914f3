"""The order of a mixture: batches from several sources, in turn or in proportion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_stateful.core.order import Progress, seeded_at
from lightning_stateful.errors import Difference, PositionError, StateMismatchError
from lightning_stateful.mixture.plan import MixtureEpochPlan
from lightning_stateful.mixture.sources import Mixture
from lightning_stateful.mixture.weights import digest

# A state of many sources stays short: beyond so many, their draws are told apart by a digest alone.
_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """Batches that come from one source each or, by sample, from several in proportion.

    A step gives every rank one batch, all of the same source; only the last steps of an epoch gather what is left of
    several. The rest of an epoch that is resumed on another number of ranks, or with other sources or weights, is
    planned from what was served of each source. Progress is counted in steps; its details are

    - ``served``: samples of every source, in the epoch or, with ``num_steps``, since training began;
    - ``batches``: batches of the epoch over all ranks, by which batches are numbered;
    - ``planned``: for how many ``ranks`` the rest of the epoch was planned and, unless it was the whole, after how many
      ``steps`` and samples ``served``. On other ranks it is planned anew from ``served``; with ``num_steps``, always.

    Attributes:
        mixture: How the sources are mixed.
    """

    mixture: Mixture
    version: ClassVar[int] = 1

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        return "round_robin" if self.mixture.in_turn else "mixture"

    @property
    def carries_over(self) -> bool:
        """Whether sources go on in an epoch where the one before left them."""
        return self.mixture.num_steps is not None

    def config(self) -> dict[str, Any]:
        """Configuration that determines the sequence; ``weights`` are the draws of each source in a period."""
        mixture, sizes = self.mixture, self.mixture.sources.batch_sizes
        config: dict[str, Any] = {
            "stop": self._stop(),
            "seed": mixture.seed,
            "shuffle": mixture.shuffle,
            "drop_last": mixture.drop_last,
            "batch_size": sizes[0] if len(set(sizes)) == 1 else list(sizes),
            "sources": dict(zip(mixture.sources.names, mixture.sources.lengths, strict=True)),
        }
        if not mixture.in_turn:
            weights: Any = list(mixture.draws)
            if mixture.schedule is not None:
                weights = mixture.schedule.describe()
            elif len(weights) > _MOST_LISTED:
                weights = f"of {len(weights)} sources, {digest(weights)}"
            config |= {"by": mixture.by, "weights": weights}
        return config

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> MixtureEpochPlan:
        """Plan ``epoch``, or the rest of it.

        Raises:
            PositionError: More steps were taken than the epoch has.
            ConfigurationError: A whole epoch would have no step, or would leave a source out.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        if self.carries_over:
            here = self._carried_over(epoch, num_replicas, progress or Progress())
        if not here.details:
            ranks, nothing = 0 if self.carries_over else num_replicas, (0,) * len(self.mixture.sources)
            here = replace(here, details=self._details(nothing, here.consumed * num_replicas, ranks))
        details = here.details
        planned = {"steps": 0, "served": {}, **details["planned"]}
        if planned.get("ranks") != num_replicas:
            planned = {"steps": here.consumed, "served": details["served"]}
        origin = self._in_order(planned["served"])
        plan = MixtureEpochPlan(self.mixture, num_replicas, here, planned["steps"], origin)
        if not planned["steps"] <= here.consumed <= planned["steps"] + plan.total_steps:
            raise PositionError(
                f"{here.consumed} steps of epoch {epoch} were taken, and on {num_replicas} ranks the rest of it "
                f"was planned to go from step {planned['steps']} to {planned['steps'] + plan.total_steps}. Resume "
                "from a checkpoint of these sources."
            )
        if not here.consumed:
            plan.refuse_empty()
        return plan

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """A progress of other sources, weights or stop rules: each source goes on where it was.

        Raises:
            StateMismatchError: Passes over the sources, or steps of a schedule, are counted otherwise.
        """
        stop = str(saved.get("stop"))
        carried = stop.endswith("steps")
        if progress.consumed or progress.epoch:
            self._refuse_other_counting(stop, carried, progress)
        served = progress.details.get("served", {})
        if carried != self.carries_over or not served:
            # Passes begin with each epoch, or go on from one to the next: nothing is left of how they were counted.
            return Progress(epoch=progress.epoch, consumed=progress.consumed)
        kept = self._in_present_lengths(served, saved["sources"])
        return replace(progress, details=self._details(kept, progress.details["batches"]))

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> MixtureOrder:
        """The same batches for another use; unshuffled epochs do not go on where the one before ended."""
        mixture = seeded_at(self.mixture, path)
        if not shuffle:
            mixture = replace(mixture, shuffle=False)
            if self.carries_over:
                mixture = replace(mixture, num_steps=None, schedule=None, stop="cycle")
        return MixtureOrder(mixture)

    def _stop(self) -> str:
        return str(self.mixture.stop) if self.mixture.num_steps is None else f"{self.mixture.num_steps} steps"

    def _in_order(self, served: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(served.get(name, 0) for name in self.mixture.sources.names)

    def _details(self, served: Sequence[int], batches: int, ranks: int = 0) -> dict[str, Any]:
        """Details of a progress where nothing is planned or, for so many ranks, the whole epoch."""
        named = dict(zip(self.mixture.sources.names, served, strict=True))
        return {"served": named, "batches": batches, "planned": {"ranks": ranks} if ranks else {}}

    def _carried_over(self, epoch: int, num_replicas: int, progress: Progress) -> Progress:
        """The progress in ``epoch`` of a run whose sources go on, from its progress in that or an earlier one."""
        steps = self.mixture.num_steps or 0
        if progress.epoch > epoch:
            progress = Progress()
        if progress.consumed > steps:
            raise PositionError(
                f"{progress.consumed} steps of epoch {progress.epoch} were taken, but an epoch has only num_steps="
                f"{steps}. Pass at least as many, or resume from the end of an epoch."
            )
        consumed = progress.consumed if progress.epoch == epoch else 0
        known = progress if progress.details else Progress()
        if (known.epoch, known.consumed) == (epoch, consumed):
            return known
        origin = self._in_order(known.details.get("served", {}))
        before = MixtureEpochPlan(self.mixture, num_replicas, known, known.consumed, origin)
        served = before.served_after((epoch - known.epoch) * steps - known.consumed + consumed)
        return Progress(epoch=epoch, consumed=consumed, details=self._details(served, consumed * num_replicas))

    def _refuse_other_counting(self, stop: str, carried: bool, progress: Progress) -> None:
        remedy = ""
        if carried != self.carries_over and progress.consumed:
            remedy = (
                "With num_steps passes go on from epoch to epoch, and without they begin with each, in other orders: "
                "this cannot be changed within an epoch. Train to its end under the saved stop."
            )
        if carried and self.mixture.schedule is not None and stop != self._stop():
            remedy = "A schedule counts steps by num_steps; keep it, or give weights without a schedule."
        if remedy:
            raise StateMismatchError([Difference(path="stop", saved=stop, present=self._stop(), remedy=remedy)])

    def _in_present_lengths(self, served: Mapping[str, int], saved_sources: Mapping[str, Any]) -> list[int]:
        """Samples served of each source, which may have another length now; one that is new begins."""
        kept = []
        for name, length in zip(self.mixture.sources.names, self.mixture.sources.lengths, strict=True):
            # A loader adds a digest after the length.
            before = int(str(saved_sources.get(name, length)).split(" ", maxsplit=1)[0])
            samples = served.get(name, 0)
            # Where a pass has just been served whole, what has come to the source since is still to be served.
            passes = max(samples - 1, 0) // before
            kept.append(passes * length + min(samples - passes * before, length))
        return kept
