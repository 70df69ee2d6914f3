"""Methods that all loaders have, and that a trainer calls on each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_stateful.core.order import EpochPlan, Progress
from lightning_stateful.core.skip import Skip, as_skip
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.skipping import Skipping
from lightning_stateful.samplers.tracker import Tracked
from lightning_stateful.user_loaders import has_of_its_own, users_loader

_log = logging.getLogger(__name__)


def say_begun_behind_end(kind: str, epoch: int) -> None:
    """Log that a pass begins an epoch, where a state was to lead into the one before, of which nothing was left."""
    _log.warning(
        "The state was taken behind the last batch of epoch %d, which a %s without length shows only now. This pass is "
        "epoch %d: a loop that counts its passes by itself has one less left.",
        epoch - 1,
        kind,
        epoch,
    )


class TrackedLoader(Tracked):
    """Methods that trainers call on every loader; loaders over streams do more than is done here.

    Attributes:
        own_rank: This rank, if each rank has a loader of its own which is not dealt out; else None.
        is_map_style: Whether samples are read by index.
        seed_samples: Whether what samples draw is seeded.
    """

    own_rank: int | None = None
    is_map_style: ClassVar[bool] = False
    seed_samples: bool

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`Tracked.set_epoch`; a user's loader with such a method, or an attribute ``epoch``, is told too."""
        super().set_epoch(epoch)
        users = users_loader(self)
        if has_of_its_own(users, "set_epoch"):
            users.set_epoch(epoch)
        elif has_of_its_own(users, "epoch"):
            users.epoch = epoch

    def leave_out(self, skip: Any) -> None:
        """Leave out batches and samples, as the argument ``skip`` of :class:`StatefulLoader` names them."""
        if (found := as_skip(skip)) is not None:
            if reason := self._reason_against_skip(found):
                raise ConfigurationError(f"skip cannot be honoured here: {reason}")
            self.tracker.skipping = Skipping(found)

    def _reason_against_skip(self, skip: Skip) -> str:
        """The reason why something cannot be left out exactly, and what to do; empty if it can."""
        return ""

    @property
    def is_plain(self) -> bool:
        """Whether samples come in an order of torch's own samplers, or in one of this package's."""
        return False

    @property
    def progress(self) -> Progress:
        """The progress of a model that has been trained on all batches handed over."""
        return self.tracker.progress

    def plan(self, epoch: int, progress: Progress | None = None) -> EpochPlan:
        """Plan an epoch, or the rest of it, for the present number of ranks; the loader stays where it is."""
        return self.tracker.plan_epoch(epoch, progress)

    def follow_length(self) -> bool:
        """Plan the epochs that have not begun for the length that the dataset has now; whether that has changed.

        As with torch, whose samplers of all samples ask for it in each pass.
        """
        return False

    @property
    def indices(self) -> Any:
        """The indices of the batch that was given last, where they are kept; None for one that has none."""
        return None

    @property
    def numbers(self) -> Any:
        """The numbers of the samples in a stream's latest batch, where they are kept; None for others."""
        return None

    @property
    def stream_config(self) -> Any:
        """The settings by which a stream of shards is read; None of other data."""
        return None

    @property
    def has_each_once(self) -> bool:
        """Whether an epoch has no sample twice."""
        return True

    def keep_indices(self) -> None:
        """From the next pass on keep what tells the samples of the batch that was given last apart."""

    def plan_aside(self, epoch: int, *, of_copy: bool) -> tuple[EpochPlan, int] | None:
        """Plan another pass within an epoch, and its first step; None for one that counts as the epoch's own.

        One ``of_copy`` leaves the position, and a user's sampler, as they are. Else only passes over a user's sampler
        are planned so.
        """
        return None

    def position_report(self) -> dict[str, Any]:
        """The epoch, and counts of what it has served; see :meth:`Tracked.position_report`."""
        plan, steps = self.tracker.position()
        return {"epoch": plan.epoch, **self.report_of(plan, steps)}

    @property
    def most_tokens_a_step(self) -> int:
        """Tokens of packed documents that a step of all ranks may have; 0 where that is not known."""
        return 0

    def report_of(self, plan: EpochPlan, steps: int) -> dict[str, Any]:
        """Counts of what the epoch has served after some steps of a plan of this loader."""
        return plan.report_after(steps)

    @property
    def goes_on_behind_limit(self) -> bool:
        """Whether an epoch that a trainer's limit has cut is followed by what comes behind the cut."""
        return False

    @property
    def ended(self) -> tuple[int, int] | None:
        """The epoch whose end was found latest, and its steps; None where ends are known beforehand."""
        return None

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer.

        Args:
            label: Tells the loaders of a trainer apart, the same on all ranks.
            limit: Steps after which epochs end at the latest.
            lag: So many steps ago may be asked for.
            repeats: Begin every epoch as the first: to overfit on its batches.
        """

    def begin_at(self, progress: Progress) -> str:
        """Go on at a progress of which no state says where the data stood; the name of what begins anew there."""
        return ""

    def begin_in(self, epoch: int) -> None:
        """Begin with an epoch, as a loader that is built anew in training; others begin with the first."""

    def end_at(self, progress: Progress) -> None:
        """Let the epoch of a progress end there; the next goes on from it."""

    def config_of_ranks(self) -> dict[str, Any]:
        """The configuration as ranks compare it."""
        config = dict(self.tracker.config)
        if isinstance(sources := config.get("sources"), Mapping):
            config["order of sources"] = list(sources)
        return config | self._skip_of_ranks()

    def _skip_of_ranks(self) -> dict[str, Any]:
        """The argument ``skip`` as ranks compare it."""
        return {} if self.tracker.skipping is None else {"skip": self.tracker.skipping.described()}

    def remedy_for_steps(self, num_steps: int) -> str:
        """The way to give epochs as many steps, in words."""
        return f"pass num_steps={num_steps}"
