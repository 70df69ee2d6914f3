"""A data module whose batches hold samples of like lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.index.buckets import Boundaries
from lightning_stateful.index.budget import QuadraticCost
from lightning_stateful.index.too_long import TooLong
from lightning_stateful.loaders.lengths import lengths_of, names_lengths
from lightning_stateful.samplers.buckets import BucketBatchSampler, Lengths
from lightning_stateful.trainer.datamodule import StatefulDataModule


class BucketDataModule(StatefulDataModule):
    """Trains on batches of like lengths within a budget; ``Trainer.fit(ckpt_path=...)`` goes on at the very next one.

    All ranks of a step take batches of the same bucket, with the same number of samples, and the same number of steps.

    Args:
        train: A map-style dataset.
        val: A dataset, or a dict or list of them, each sample once over all ranks; see ``eval_batch_size``.
        test: The same for testing.
        predict: The same for prediction, always in the dataset's order.
        lengths: The length of every sample: the name of a column of a Hugging Face dataset (of which nothing else is
            read) or of an attribute; an array, or the path of a ``.npy`` file; or a function of a sample, which is
            called once for each, in parallel, and its results kept in a file (see ``cache_dir``).
        max_tokens: What a batch of one rank may hold, padding included; see :class:`BucketBatchSampler` for this and
            the following arguments.
        batch_size: In place of ``max_tokens``: samples in a batch, one for all or one for each bucket.
        max_samples: Samples that a batch never exceeds, beside ``max_tokens``.
        multiple: Batches of at least so many samples have a multiple of it.
        cost: What samples cost beside their tokens.
        num_buckets: Number of buckets.
        boundaries: Where buckets end.
        window: Sort and cut windows of so many samples in place of buckets.
        boundary_key: With ``window``: an integer for every sample, given like ``lengths``; a batch holds one of them.
        shuffle_batches: With ``window``: shuffle the batches of each window.
        too_long: ``"error"``, ``"drop"`` or ``"alone"``: what to do about samples longer than the budget.
        eval_batch_size: Samples in a batch for evaluation, in the dataset's order. By default it is ``batch_size``, or,
            with ``max_tokens``, evaluation data are put into buckets as well, the longest first. That takes ``lengths``
            that can be found for any dataset: a name or a function. What is too long is dropped here, too, if that is
            asked for.
        cache_dir: Folder for measured lengths; by default that of the dataset's files, or one in the user's cache.
        measure_workers: Processes that measure lengths; by default one a core, or none for few samples.
        **options: Any other argument of :class:`StatefulDataModule`; ``log_padding`` among them, which logs padding and
            tokens of a step.

    State:
        As :class:`StatefulDataModule`.

    Raises:
        ConfigurationError: When loaders are asked for: lengths are not found, are not one a sample or too long for the
            budget, or an argument is out of range.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        lengths: Lengths | Callable[[Any], int],
        max_tokens: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_samples: int | None = None,
        multiple: int = 1,
        cost: QuadraticCost | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        window: int | None = None,
        boundary_key: Lengths | Callable[[Any], int] | None = None,
        shuffle_batches: bool = True,
        too_long: TooLong = "error",
        eval_batch_size: int | None = None,
        cache_dir: str | Path | None = None,
        measure_workers: int | None = None,
        **options: Any,
    ) -> None:
        self.lengths, self.boundary_key = lengths, boundary_key
        self.eval_batch_size = eval_batch_size
        self._budget: dict[str, Any] = {
            "max_tokens": max_tokens,
            "max_samples": max_samples,
            "multiple": multiple,
            "cost": cost,
            "too_long": too_long,
        }
        self._cut: dict[str, Any] = {
            "num_buckets": num_buckets,
            "boundaries": boundaries,
            "window": window,
            "shuffle_batches": shuffle_batches,
        }
        self._measuring: dict[str, Any] = {"cache_dir": cache_dir, "num_workers": measure_workers}
        # Spelled out, because LightningCLI looks here for the options of the class above.
        super().__init__(train, val, test, predict, batch_size=batch_size, **options)  # type: ignore[arg-type]

    def batch_sampler(self) -> BucketBatchSampler:
        """The batches of the training dataset: a fresh batch sampler, for a look at them without a trainer."""
        return self._batches(self.train)

    def _batches(self, dataset: Any) -> BucketBatchSampler:
        lengths = self._lengths_of(dataset)
        key = self.boundary_key
        if key is not None:
            key = lengths_of(dataset, key, what="boundary_key", **self._measuring)
        batches = BucketBatchSampler(
            lengths,
            batch_size=self.batch_size,
            boundary_key=key,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=self.seed,
            **self._budget,
            **self._cut,
        )
        if batches.num_dropped or batches.num_alone:
            rank_zero_info(
                f"{batches.num_dropped + batches.num_alone} of {len(dataset)} samples are longer than a batch may be: "
                f"{batches.num_dropped} are left out, {batches.num_alone} come alone."
            )
        return batches

    def _lengths_of(self, dataset: Any) -> Any:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"{type(self).__name__} needs a dataset with __getitem__ and __len__, which a {type(dataset).__name__} "
                "has not: it has no random access by index."
            )
        return lengths_of(dataset, self.lengths, **self._measuring)

    def _loader(self, dataset: Any, name: str | None, **how: Any) -> DataLoader[Any]:
        if "exact" not in how:
            return self._stateful_loader(dataset, batch_sampler=self._batches(dataset))
        size = self._size_for_evaluation
        if size is None and hasattr(dataset, "__len__") and not len(dataset):
            size = 1
        if size is not None:
            return super()._loader(dataset, name, **{"batch_size": size, **how})
        if self._budget["max_tokens"] is None or not names_lengths(self.lengths) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                "Evaluation data need eval_batch_size=: several batch sizes, and lengths as an array or a file, are "
                "those of the training data. With max_tokens, and with lengths as the name of a column or attribute or "
                "as a function of a sample, map-style datasets can do without."
            )
        batches = BucketBatchSampler(self._lengths_of(dataset), shuffle=False, **self._budget)
        if batches.num_dropped:
            rank_zero_warn(
                f"{batches.num_dropped} of {len(dataset)} samples for evaluation are too long, and left out of its "
                "metrics.",
                category=StatefulWarning,
            )
        return self._stateful_loader(dataset, batch_sampler=batches)

    def _predict_dataloader(self) -> Any:
        # Predictions are wanted in the order of their dataset.
        if self._size_for_evaluation is None:
            raise ConfigurationError("Prediction keeps the dataset's order, in batches of eval_batch_size; pass it.")
        return super()._predict_dataloader()

    @property
    def _size_for_evaluation(self) -> int | None:
        if self.eval_batch_size is not None:
            return self.eval_batch_size
        several = self.batch_size is None or np.ndim(self.batch_size) > 0
        return None if several else as_int("batch_size", self.batch_size)
