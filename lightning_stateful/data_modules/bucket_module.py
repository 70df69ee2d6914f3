"""A data module whose batches hold samples of like lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.bucketing.buckets import Boundaries
from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loaders.length_cache import file_of, lengths_of, names_lengths
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler, Lengths


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
            called once for each, in parallel (see ``cache_file``).
        max_tokens: What a batch of one rank may hold, padding included; see :class:`BucketBatchSampler` for this and
            the following arguments.
        batch_size: In place of ``max_tokens``: samples in a batch.
        budget: In place of both: a :class:`Budget`, with further limits.
        num_buckets: Number of buckets.
        boundaries: Where buckets end.
        eval_batch_size: Samples in a batch for evaluation, in the dataset's order. By default it is ``batch_size``, or,
            with ``max_tokens``, evaluation data are put into buckets as well, the longest first. That takes ``lengths``
            that can be found for any dataset: a name or a function. What is too long is dropped here, too, if the
            budget says so.
        cache_file: Path of a ``.npy`` file in which to keep the lengths of the training data that a function measures.
            Those of other data are kept beside it: ``lengths-val.npy`` where it is ``lengths.npy``. By default only
            those of a Hugging Face dataset on disk are kept, beside its files.
        measure_workers: Processes that measure lengths; by default one a core, or none for few samples.
        **options: Any other argument of :class:`StatefulDataModule`; ``log_data`` among them, which logs padding and
            tokens of a step.

    State:
        As :class:`StatefulDataModule`.

    Raises:
        ConfigurationError: When loaders are asked for: lengths are not found, are not one a sample or too long for the
            budget, or an argument is out of range.
    """

    cache_file: str | Path | None
    eval_batch_size: int | None
    lengths: Lengths | Callable[[Any], int]
    measure_workers: int | None

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        lengths: Lengths | Callable[[Any], int],
        max_tokens: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        eval_batch_size: int | None = None,
        cache_file: str | Path | None = None,
        measure_workers: int | None = None,
        **options: Any,
    ) -> None:
        self.lengths, self.cache_file = lengths, cache_file
        self.eval_batch_size, self.measure_workers = eval_batch_size, measure_workers
        self._max_tokens, self._budget = max_tokens, budget
        self._buckets: dict[str, Any] = {"num_buckets": num_buckets, "boundaries": boundaries}
        # Spelled out, because LightningCLI looks here for the options of the class above.
        super().__init__(train, val, test, predict, batch_size=batch_size, **options)  # type: ignore[arg-type]  # None

    def batch_sampler(self) -> BucketBatchSampler:
        """The batches of the training dataset: a fresh batch sampler, for a look at them without a trainer."""
        return self._batches(self.train, None)

    @property
    def budget(self) -> Budget:
        """The limit of a batch; a ``batch_size`` that was set since counts.

        Raises:
            ConfigurationError: None of ``max_tokens``, ``batch_size`` and ``budget`` is given, or several.
        """
        return Budget.of(self._budget, max_tokens=self._max_tokens, batch_size=self.batch_size)

    def _batches(self, dataset: Any, name: str | None) -> BucketBatchSampler:
        batches = BucketBatchSampler(
            self._lengths_of(dataset, name, "train"),
            budget=self.budget,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=self.seed,
            **self._buckets,
        )
        if batches.num_dropped:
            rank_zero_info(
                f"{batches.num_dropped} of {len(dataset)} samples are longer than a batch may be, and left out."
            )
        return batches

    def _lengths_of(self, dataset: Any, name: str | None, stage: str) -> Any:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"{type(self).__name__} needs a dataset with __getitem__ and __len__, which a {type(dataset).__name__} "
                "has not: it has no random access by index."
            )
        own_file = file_of(self.cache_file, stage, name)
        return lengths_of(dataset, self.lengths, cache_file=own_file, num_workers=self.measure_workers)

    def _loaders(self, data: Any, stage: str) -> Any:
        if stage == "predict" and self._size_for_evaluation is None:
            # Predictions are wanted in the order of their dataset.
            raise ConfigurationError("Prediction keeps the dataset's order, in batches of eval_batch_size; pass it.")
        return super()._loaders(data, stage)

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        if stage == "train":
            return self._stateful_loader(dataset, name, batch_sampler=self._batches(dataset, name))
        size = self._size_for_evaluation
        if size is None and hasattr(dataset, "__len__") and not len(dataset):
            size = 1
        if size is not None:
            return super()._loader(dataset, name, stage, batch_size=size)
        if not names_lengths(self.lengths) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                "Evaluation data need eval_batch_size=: lengths as an array or a file are those of the training data. "
                "With max_tokens, and with lengths as the name of a column or attribute or as a function of a sample, "
                "map-style datasets can do without."
            )
        batches = BucketBatchSampler(self._lengths_of(dataset, name, stage), budget=self.budget, shuffle=False)
        if batches.num_dropped:
            rank_zero_warn(
                f"{batches.num_dropped} of {len(dataset)} samples for evaluation are too long, and left out of its "
                "metrics.",
                category=StatefulWarning,
            )
        return self._stateful_loader(dataset, name, batch_sampler=batches)

    @property
    def _size_for_evaluation(self) -> int | None:
        return self.budget.batch_size if self.eval_batch_size is None else self.eval_batch_size
