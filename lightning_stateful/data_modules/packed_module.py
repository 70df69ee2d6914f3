"""A data module whose batches are sequences of one length, packed out of documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loaders.length_cache import file_of, names_lengths
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.loaders.source_datasets import SourceCollate, concatenated, packed_anew
from lightning_stateful.mixture.sources import Stop
from lightning_stateful.mixture.weights import WeightSchedule
from lightning_stateful.packing.settings import Packing
from lightning_stateful.samplers.batch_samplers import Lengths
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, refuse_splits


class PackedDataModule(StatefulDataModule):
    """Trains on packed sequences; ``Trainer.fit(ckpt_path=...)`` goes on at the very next one.

    Every epoch packs the documents anew, each once; see :class:`PackedDataset` for what a sequence has. A batch is a
    dict of tensors of shape ``(batch_size, sequence_length)``; a ``collate_fn`` of your own is given NumPy arrays. With
    ``collate_fn=lightning_stateful.loaders.collate_flat`` it is one row without padding. On another number of ranks,
    a resume goes on with the rest of the epoch's sequences; where ranks times ``batch_size`` stays, each step takes the
    same ones.

    Args:
        train: A map-style dataset of documents. A dict of them, each perhaps as a pair ``(dataset, lengths)``, is mixed
            where any of ``weights``, ``schedule``, ``temperature``, ``by``, ``stop`` and ``num_steps`` is given; of
            others, as of a list, each step gets one batch each.
        val: Documents for validation, or a dict of them, packed in the dataset's order, each sequence once over all
            ranks. They need ``lengths`` of their own, or such as can be found for any dataset: a name or a function.
        test: The same for testing.
        predict: The same for prediction.
        lengths: The number of tokens of every document, without the separator: the name of a column of a Hugging Face
            dataset (of which nothing else is read) or of an attribute; an array, or the path of a ``.npy`` file; or a
            function of a sample, which is called once for each, in parallel (see ``cache_file``). A dict has those of
            each dataset by name.
        packing: The settings.
        batch_size: Sequences in a batch of one rank; by default 1.
        weights: Of a mixture: a positive number for every dataset, by name or in order; by default its sequences. A
            sequence is of one dataset and they are all of one length, so shares of sequences are shares of tokens.
        by: Whether each batch holds sequences of several datasets in proportion (``"sample"``, the default), or of one
            (``"batch"``).
        temperature: As in :class:`MixtureDataModule`, like the following.
        schedule: Weights by step of training, in place of ``weights``; needs ``num_steps``.
        stop: When an epoch ends. Each pass over a dataset packs it anew.
        num_steps: In place of ``stop``: steps of an epoch. Every dataset goes on in the next where it was.
        tag: Key under which a batch gets the name of its dataset or, by sample, a list of names; of evaluation datasets
            in a dict, too.
        cache_file: Path of a ``.npy`` file in which to keep the lengths of the training data that a function measures.
            Those of other data are kept beside it: ``lengths-val.npy`` where it is ``lengths.npy``.
        measure_workers: Processes that measure lengths; by default one a core, or none for few samples.
        **options: Any other argument of :class:`StatefulDataModule`. ``shuffle=False`` trains on the documents in the
            dataset's order.

    State:
        As :class:`StatefulDataModule`, with the settings of packing and a digest of the lengths: others are refused.

    Raises:
        ConfigurationError: When loaders are asked for: lengths are not found or not one a document, a document is empty
            or too long. When one is read: it has another number of tokens than ``lengths`` says.
    """

    cache_file: str | Path | None
    lengths: Lengths | Callable[[Any], int] | Mapping[str, Any] | None
    measure_workers: int | None
    packing: Packing

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        lengths: Lengths | Callable[[Any], int] | Mapping[str, Any] | None = None,
        packing: Packing,
        batch_size: int = 1,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        by: Literal["sample", "batch"] | None = None,
        temperature: float | None = None,
        schedule: WeightSchedule | Mapping[int, Any] | None = None,
        stop: Stop | None = None,
        num_steps: int | None = None,
        tag: str | None = None,
        cache_file: str | Path | None = None,
        measure_workers: int | None = None,
        **options: Any,
    ) -> None:
        self.lengths, self.packing = lengths, packing
        self.cache_file, self.measure_workers = cache_file, measure_workers
        mixing: dict[str, Any] = {"weights": weights, "temperature": temperature, "schedule": schedule, "stop": stop}
        mixing |= {"num_steps": num_steps, "by": by}
        self._is_mixture = any(value is not None for value in mixing.values())
        self._mixing, self._tag = {**mixing, "by": _checked_by(by)}, tag
        self._mixes = self._mixing["by"] == "sample"
        if tag is not None and not self._is_mixture:
            raise ConfigurationError(
                f"tag={tag!r} names the datasets of a mixture. Pass weights (or a schedule, temperature, by, stop or "
                "num_steps), or leave it out."
            )
        super().__init__(train, val, test, predict, batch_size=batch_size, **options)

    def packed(self, dataset: Any, name: str | None = None, stage: str = "train") -> PackedDataset:
        """Pack a dataset as its loader does, for a look at its sequences without a trainer.

        Args:
            dataset: The documents.
            name: The name of the dataset among several.
            stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        """
        dataset, lengths = self._with_lengths(dataset, name, stage)
        packed = PackedDataset(
            dataset,
            lengths=lengths,
            packing=self.packing,
            seed=loader_seed(seed_or_default(self.seed), name or ""),
            shuffle=self.shuffle and stage == "train",
            cache_file=file_of(self.cache_file, stage, name),
            measure_workers=self.measure_workers,
        )
        if packed.num_dropped:
            said = f"{packed.num_dropped} of {len(dataset)} documents are longer than a sequence, and left out"
            if stage == "train":
                rank_zero_info(f"{said}.")
            else:
                rank_zero_warn(f"{said} of metrics.", category=StatefulWarning)
        return packed

    def batch_sampler(self) -> MixtureBatchSampler:
        """The batches of a mixture, whose indices are those of the packed datasets one after the other, pass by pass.

        Raises:
            ConfigurationError: The training data are no mixture.
        """
        return self._batches(self._sources(self.train))

    def _with_lengths(self, dataset: Any, name: str | None, stage: str) -> tuple[Any, Any]:
        """A dataset without the lengths that it may be given with, and its lengths."""
        if name is not None and isinstance(dataset, tuple) and len(dataset) == 2:
            return dataset
        lengths: Any = self.lengths
        if isinstance(lengths, Mapping):
            if name not in lengths:
                raise ConfigurationError(f"Dataset {name!r} has no lengths; there are some for {list(lengths)}.")
            lengths = lengths[name]
        if lengths is None:
            raise ConfigurationError(
                "Packing needs the number of tokens of every document: pass lengths, or a dict of pairs (dataset, "
                "lengths)."
            )
        if stage != "train" and not names_lengths(lengths):
            raise ConfigurationError(
                "Documents for evaluation need lengths of their own: an array or a file has those of the training "
                "data. Pass lengths as the name of a column or attribute, or as a function of a sample; or a dict of "
                "pairs (dataset, lengths)."
            )
        return dataset, lengths

    def _sources(self, data: Any) -> dict[str, PackedDataset]:
        if not self._is_mixture or not isinstance(data, Mapping):
            raise ConfigurationError(
                "A mixture of packed datasets is a dict of datasets with weights, a schedule, temperature, by, stop or "
                f"num_steps; got a {type(data).__name__}."
            )
        refuse_splits(data)
        return {str(name): self.packed(dataset, str(name)) for name, dataset in data.items()}

    def _batches(self, sources: Mapping[str, PackedDataset]) -> MixtureBatchSampler:
        how: dict[str, Any] = {"shuffle": self.shuffle, "drop_last": self.drop_last, "seed": self.seed, **self._mixing}
        return MixtureBatchSampler(sources, self.batch_size, by_pass=packed_anew(sources), **how)

    def _loaders(self, data: Any, stage: str) -> Any:
        if stage != "train" or not self._is_mixture or data is None:
            return super()._loaders(data, stage)
        sources = self._sources(data)
        dataset, collate_fn = concatenated(sources, self._options["collate_fn"], tag=self._tag, mixes=self._mixes)
        return self._stateful_loader(dataset, batch_sampler=self._batches(sources), collate_fn=collate_fn)

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        packed = self.packed(dataset, name, stage)
        how = {"batch_size": self.batch_size, **how}
        if self._tag is not None and name is not None:
            collate_fn = self._options["collate_fn"]
            how["collate_fn"] = SourceCollate((name,), collate_fn, tag=self._tag, mixes=self._mixes)
        if stage == "train":
            return self._stateful_loader(packed, name, sampler=packed.order, drop_last=self.drop_last, **how)
        return self._stateful_loader(packed, name, exact=True, **how)


def _checked_by(by: Any) -> str:
    if by == "document":
        raise ConfigurationError(
            'by="document" would put documents of several datasets into one sequence, and the passes over them end at '
            "different places: no order of sequences holds each document once in every pass. Mix sequences, each of "
            'one dataset, with by="sample", or batches of them with by="batch": their shares are shares by token.'
        )
    if by not in (None, "sample", "batch"):
        raise ConfigurationError(
            f'Packed datasets are mixed by="sample" or by="batch", got by={by!r}. All sequences have the same length, '
            "so the shares of both are shares by token."
        )
    return by or "sample"
