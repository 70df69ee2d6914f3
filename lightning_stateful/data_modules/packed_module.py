"""A data module whose batches are sequences of one length, packed out of documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loaders.length_cache import names_lengths
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.packing.settings import Packing
from lightning_stateful.samplers.batch_samplers import Lengths
from lightning_stateful.samplers.rng import seed_or_default


class PackedDataModule(StatefulDataModule):
    """Trains on packed sequences; ``Trainer.fit(ckpt_path=...)`` goes on at the very next one.

    Every epoch packs the documents anew, each once; see :class:`PackedDataset` for what a sequence has. A batch is a
    dict of tensors of shape ``(batch_size, sequence_length)``; a ``collate_fn`` of your own is given NumPy arrays. With
    ``collate_fn=lightning_stateful.loaders.collate_flat`` it is one row without padding. On another number of ranks,
    a resume goes on with the rest of the epoch's sequences; where ranks times ``batch_size`` stays, each step takes the
    same ones.

    Args:
        train: A map-style dataset of documents, or a list or dict of them of which each step gets one batch each.
        val: Documents for validation, packed in the dataset's order, each sequence once over all ranks. They need
            ``lengths`` that can be found for any dataset: a name or a function.
        test: The same for testing.
        predict: The same for prediction.
        lengths: The number of tokens of every document, without the separator: the name of a column of a Hugging Face
            dataset (of which nothing else is read) or of an attribute; an array, or the path of a ``.npy`` file; or a
            function of a sample, which is called once for each, in parallel (see ``cache_file``).
        packing: The settings.
        batch_size: Sequences in a batch of one rank; by default 1.
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

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        lengths: Lengths | Callable[[Any], int],
        packing: Packing,
        batch_size: int = 1,
        cache_file: str | Path | None = None,
        measure_workers: int | None = None,
        **options: Any,
    ) -> None:
        self.lengths, self.packing = lengths, packing
        self.cache_file, self.measure_workers = cache_file, measure_workers
        super().__init__(train, val, test, predict, batch_size=batch_size, **options)

    def packed(self, dataset: Any, name: str | None = None, stage: str = "train") -> PackedDataset:
        """Pack a dataset as its loader does, for a look at its sequences without a trainer.

        Args:
            dataset: The documents.
            name: The name of the dataset among several.
            stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        """
        if stage != "train" and not names_lengths(self.lengths):
            raise ConfigurationError(
                "Documents for evaluation need lengths of their own: an array or a file has those of the training "
                "data. Pass lengths as the name of a column or attribute, or as a function of a sample."
            )
        path = None if self.cache_file is None else Path(self.cache_file)
        if path is not None:
            # Each of several datasets has a file of its own.
            parts = [path.stem, "" if stage == "train" else stage, name or ""]
            path = path.with_stem("-".join(filter(None, parts)))
        packed = PackedDataset(
            dataset,
            lengths=self.lengths,
            packing=self.packing,
            seed=loader_seed(seed_or_default(self.seed), name or ""),
            shuffle=self.shuffle and stage == "train",
            cache_file=path,
            measure_workers=self.measure_workers,
        )
        if packed.num_dropped:
            said = f"{packed.num_dropped} of {len(dataset)} documents are longer than a sequence, and left out"
            if stage == "train":
                rank_zero_info(f"{said}.")
            else:
                rank_zero_warn(f"{said} of metrics.", category=StatefulWarning)
        return packed

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        packed = self.packed(dataset, name, stage)
        how = {"batch_size": self.batch_size, **how}
        if stage == "train":
            return self._stateful_loader(packed, name, sampler=packed.order, drop_last=self.drop_last, **how)
        return self._stateful_loader(packed, name, exact=True, **how)
