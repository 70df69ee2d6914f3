"""Data modules over several datasets: round robin and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.source_datasets import (
    Collate,
    SourceCollate,
    SourceDataset,
    concatenated,
    packed_anew,
)
from lightning_stateful.mixture.sources import By, Stop
from lightning_stateful.mixture.weights import WeightSchedule
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, RoundRobinBatchSampler, refuse_splits


class SourcesDataModule(StatefulDataModule):
    """Trains on named datasets, each with a batch size and collate function; base of round robin and mixtures.

    Args:
        train: Map-style datasets by name, or a list of them (their names are then ``"0"``, ``"1"`` ...).
        val: A dataset, or a dict or list of them that are evaluated one after the other, each sample once over all
            ranks. Under a source's name, one has that source's batch size, collate function and tag.
        test: The same for testing.
        predict: The same for prediction.
        batch_size: Samples in a batch of one rank: one for all, or one for each dataset by name or in order.
        collate_fn: Makes a batch of samples: one function for all, or one for each dataset by name.
        tag: Key under which a batch that is a dict gets the name of its dataset, or, if its samples are of several,
            a list of names, one a sample.
        **options: Any other argument of :class:`StatefulDataModule`; ``log_data`` among them, which logs samples,
            passes and share of every dataset as ``data/sources/<name>/samples`` and so on.
    """

    # Set by subclasses, before they call the constructor.
    _sampler: Callable[..., StatefulBatchSampler]
    _mixes = False

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        batch_size: int | Mapping[str, int] | Sequence[int] = 1,
        collate_fn: Collate | Mapping[str, Collate] | Sequence[Collate] | None = None,
        tag: str | None = None,
        **options: Any,
    ) -> None:
        self._tag, self._collate_fn = tag, collate_fn
        # Spelled out, because LightningCLI looks here for the options of the class above.
        super().__init__(train, val, test, predict, batch_size=batch_size, **options)  # type: ignore[arg-type]  # several

    def _loaders(self, data: Any, stage: str) -> Any:
        """One loader over all training datasets; one for each dataset for evaluation."""
        if data is None or stage != "train":
            return super()._loaders(data, stage)
        batches = self.batch_sampler()
        dataset, collate_fn = concatenated(self._named(data), self._collate_fn, tag=self._tag, mixes=self._mixes)
        return self._stateful_loader(dataset, batch_sampler=batches, collate_fn=collate_fn)

    def batch_sampler(self) -> StatefulBatchSampler:
        """The batches of the training datasets: a fresh batch sampler, for a look at them without a trainer."""
        named, how = self._named(self.train), {"drop_last": self.drop_last, "seed": self.seed}
        return self._sampler(named, self.batch_size, shuffle=self.shuffle, by_pass=packed_anew(named), **how)

    def _named(self, data: Any) -> dict[str, Any]:
        refuse_splits(data)
        if isinstance(data, Mapping):
            pairs = [(str(name), dataset) for name, dataset in data.items()]
        elif isinstance(data, (list, tuple)):
            pairs = [(str(number), dataset) for number, dataset in enumerate(data)]
        else:
            raise ConfigurationError(
                f"{type(self).__name__} trains on a dict or list of datasets, got a {type(data).__name__}."
            )
        named = dict(pairs)
        if len(named) < len(pairs):
            raise ConfigurationError(f"Sources need different names, got {[name for name, _ in pairs]}.")
        for name, dataset in pairs:
            if isinstance(dataset, (IterableDataset, Mapping)) or not hasattr(dataset, "__len__"):
                raise ConfigurationError(
                    f"Source {name!r} is a {type(dataset).__name__}, which has no random access by index; it needs "
                    "__getitem__ and __len__."
                )
        return named

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        how["batch_size"] = self._of_source(self.batch_size, name, "batch_size")
        collate_fn = self._of_source(self._collate_fn, name, "collate_fn")
        if self._tag is not None and name is not None:
            collate_fn = SourceCollate((name,), collate_fn, tag=self._tag, mixes=self._mixes)
            dataset = dataset if isinstance(dataset, IterableDataset) else SourceDataset([dataset])
        return super()._loader(dataset, name, stage, collate_fn=collate_fn, **how)

    def _of_source(self, setting: Any, name: str | None, what: str) -> Any:
        """The setting of one source, where each has its own."""
        if not isinstance(setting, (Mapping, list, tuple)):
            return setting
        if isinstance(setting, Mapping):
            named = {str(source): value for source, value in setting.items()}
        else:
            names = range(len(setting)) if self.train is None else self._named(self.train)
            named = {str(source): value for source, value in zip(names, setting, strict=False)}
        if name is None or name not in named:
            found = "a dataset without a name" if name is None else f"dataset {name!r}"
            raise ConfigurationError(
                f"{what} is given for the sources {list(named)}, which does not tell that of {found} for evaluation. "
                f"Give evaluation datasets as a dict with names among these, or one {what} for all."
            )
        return named[name]


class RoundRobinDataModule(SourcesDataModule):
    """Trains on whole batches from one dataset in turn; ``Trainer.fit(ckpt_path=...)`` goes on at the very next one.

    All ranks of a step serve the same dataset (save in an epoch's last steps, which gather what is left of several) and
    take the same number of steps.

    Args:
        train: As in :class:`SourcesDataModule`, like the following.
        val: Data for validation.
        test: Data for testing.
        predict: Data for prediction.
        stop: When an epoch ends: ``"all_exhausted"``, ``"first_exhausted"`` or ``"cycle"``; see
            :class:`RoundRobinBatchSampler`.
        num_steps: In place of ``stop``: steps of an epoch. Every dataset goes on in the next where it was.
        **options: ``batch_size``, ``collate_fn``, ``tag`` and any other argument of :class:`SourcesDataModule`.

    State:
        As :class:`StatefulDataModule`, with the samples served of every dataset.

    Raises:
        ConfigurationError: When loaders are asked for: a dataset is empty, or has no batch size or collate function;
            with its name.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        stop: Stop | None = None,
        num_steps: int | None = None,
        **options: Any,
    ) -> None:
        self._sampler = partial(RoundRobinBatchSampler, stop=stop, num_steps=num_steps)
        super().__init__(train, val, test, predict, **options)


class MixtureDataModule(SourcesDataModule):
    """Trains on several datasets in exact proportion; ``Trainer.fit(ckpt_path=...)`` goes on at the very next batch.

    Weights are rounded once, to whole draws of a period, and every period has exactly these.

    Args:
        train: As in :class:`SourcesDataModule`, like the following.
        val: Data for validation.
        test: Data for testing.
        predict: Data for prediction.
        weights: A positive number for every dataset, by name or in order; by default its size.
        by: What the weights are shares of: ``"batch"``, ``"sample"`` or ``"token"``; see :class:`MixtureBatchSampler`.
            With ``"sample"``, ``batch_size`` and ``collate_fn`` are one for all datasets.
        temperature: Raise the weights to the power ``1 / temperature``: above 1, small datasets are served more often.
        schedule: Weights by step of training, in place of ``weights``; needs ``num_steps``.
        lengths: Tokens of every sample, an array for each dataset by name or in order; ``log_data`` then logs tokens.
        block: Draws in a period; see :class:`MixtureBatchSampler`.
        stop: As in :class:`RoundRobinDataModule`.
        num_steps: As in :class:`RoundRobinDataModule`.
        **options: ``batch_size``, ``collate_fn``, ``tag`` and any other argument of :class:`SourcesDataModule`.

    State:
        As :class:`StatefulDataModule`, with the samples served of every dataset.

    Raises:
        ConfigurationError: When loaders are asked for: a weight is not positive, a dataset is empty, or has no batch
            size, lengths or collate function; with its name.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        by: By = "batch",
        temperature: float | None = None,
        schedule: WeightSchedule | Mapping[int, Any] | None = None,
        lengths: Mapping[str, Any] | Sequence[Any] | None = None,
        block: int | None = None,
        stop: Stop | None = None,
        num_steps: int | None = None,
        **options: Any,
    ) -> None:
        self._mixes = by == "sample"
        self._sampler = partial(
            MixtureBatchSampler,
            weights=weights,
            by=by,
            temperature=temperature,
            schedule=schedule,
            token_lengths=lengths,
            block=block,
            stop=stop,
            num_steps=num_steps,
        )
        super().__init__(train, val, test, predict, **options)
