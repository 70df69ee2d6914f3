"""Stops training once it has been served a number of tokens, counted exactly over resumes and other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loops import loop_progress
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.saved_progress import LoopProgress


def checked_limit(limit: int | None) -> int | None:
    """The argument ``max_tokens_total``.

    Raises:
        ConfigurationError: It is no positive integer.
    """
    return None if limit is None else as_int("max_tokens_total", limit, least=1)


class TokenLimit:
    """Counts the tokens of packed documents that training was served, over all ranks.

    The count follows from where the data stand: a checkpoint holds the tokens of earlier epochs alone, and of loaders
    whose epochs follow each other not even these.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # By path of the loaders that count anew in each epoch: tokens of the epochs before the running one.
        self._epoch, self._step = 0, 0
        self._before: dict[str, int] = {}
        # Steps to come in which the limit cannot be reached.
        self._steps_left = 0

    def of(self, limit: int | None, *, anew: bool) -> TokenLimit:
        """The same count for another limit; from the beginning if it is to begin anew."""
        if anew:
            return TokenLimit(limit)
        self._limit = limit
        return self

    def state(self, combined: CombinedLoaders | None, progress: LoopProgress) -> dict[str, Any] | None:
        """Plain data for a checkpoint of this progress: the epoch that comes next, and tokens of those before it.

        Within an epoch also the tokens up to this progress. Without a limit, or before there are loaders, it is None.
        """
        if combined is None or self._limit is None:
            return None
        epoch, step = progress.epoch_and_step
        if epoch == self._epoch:
            # A resume of a save at the epoch's last batch goes on in the next one.
            after = self._after_epoch(combined, step) if step else dict(self._before)
            return {"epoch": epoch, "before": dict(self._before), "after": after}
        last = progress.batch if progress.has_ended(self._epoch) else self._step
        return {"epoch": epoch, "before": self._after_epoch(combined, last)}

    def load(self, combined: CombinedLoaders, saved: Mapping[str, Any] | None, progress: LoopProgress) -> None:
        """Go on from a checkpoint.

        Args:
            combined: The loaders.
            saved: What :meth:`state` gave; None where nobody has counted.
            progress: Where the run goes on; on other ranks an epoch may be over that was not when it was saved.

        Warns:
            StatefulWarning: Nobody has counted the tokens of earlier epochs.
        """
        if self._limit is None:
            return
        self._epoch = progress.epoch_and_step[0] if saved is None else saved["epoch"]
        self._step = progress.batch if progress.epoch == self._epoch else 0
        self._before = {} if saved is None else dict(saved["before"])
        if saved is not None and "after" in saved and progress.epoch_and_step[0] > self._epoch:
            self._epoch, self._step, self._before = progress.epoch_and_step[0], 0, dict(saved["after"])
        counts_anew = not all(loader.order.carries_over for loader in combined.loaders.values())
        if saved is None and self._epoch and counts_anew:
            rank_zero_warn(
                f"The checkpoint does not say how many tokens the epochs before epoch {self._epoch} have served: it "
                "was written without max_tokens_total. Tokens are counted from the beginning of that epoch.",
                category=StatefulWarning,
            )

    def begin(self, trainer: pl.Trainer, combined: CombinedLoaders | None) -> None:
        """Look before the first batch of a fit.

        Raises:
            ConfigurationError: Nothing in the data is packed.
        """
        if combined is None or self._limit is None:
            return
        epoch, step = loop_progress.next_step(trainer)
        if epoch < self._epoch:
            # A resumed run may have yet to end an epoch that has no batch left.
            epoch, step = self._epoch, self._step
        if not any(_tokens_of(report) is not None for report in combined.report_at(epoch, step).values()):
            raise ConfigurationError(
                f"max_tokens_total={self._limit} counts the tokens of packed documents, and nothing that is trained on "
                "is packed by this package. Use PackedDataModule or StreamDataModule(..., packing=...), or Trainer's "
                "max_steps."
            )
        self._move(combined, epoch, step)
        self._look(combined, trainer, self._limit)

    def after_batch(self, trainer: pl.Trainer, combined: CombinedLoaders) -> None:
        """Tell the trainer to stop if the limit was reached."""
        if self._limit is None:
            return
        self._steps_left -= 1
        self._move(combined, *loop_progress.next_step(trainer))
        # A window of accumulation is trained on as a whole.
        ends_window = trainer.is_last_batch or self._step % trainer.accumulate_grad_batches == 0
        if self._steps_left <= 0 and ends_window:
            self._look(combined, trainer, self._limit)

    def _move(self, combined: CombinedLoaders, epoch: int, step: int) -> None:
        if epoch < self._epoch:
            return
        if epoch > self._epoch:
            self._before = self._after_epoch(combined, self._step)
        self._epoch, self._step = epoch, step

    def _look(self, combined: CombinedLoaders, trainer: pl.Trainer, limit: int) -> None:
        reports = combined.report_at(self._epoch, self._step)
        total = sum(self._before.values()) + sum(_tokens_of(report) or 0 for report in reports.values())
        if total >= limit:
            rank_zero_info(f"Training stops after {total} tokens: max_tokens_total={limit}.")
            trainer.should_stop = True
        most = [loader.most_tokens_a_step for loader in combined.loaders.values()]
        self._steps_left = (limit - total) // sum(most) if all(most) else 0

    def _after_epoch(self, combined: CombinedLoaders, last: int) -> dict[str, int]:
        """Tokens at the end of the epoch after so many steps of it, of loaders that count anew in the next."""
        after = dict(self._before)
        for path, loader in combined.loaders.items():
            if not loader.order.carries_over:
                plan, steps = combined.plan_at(path, self._epoch, last)
                after[path] = after.get(path, 0) + (_tokens_of(loader.report_of(plan, steps)) or 0)
        return after


def _tokens_of(report: Mapping[str, Any]) -> int | None:
    """The tokens of packed documents in a loader's report; None where nothing is packed."""
    found = [part["tokens"] for part in report.get("sources", {"": report}).values() if "documents" in part]
    return sum(found) if found else None
