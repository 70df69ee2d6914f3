"""A data module over streams: Hugging Face's, chunks, mixed ones, and any iterable dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.core.checks import as_int
from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing.settings import Packing
from lightning_stateful.stream_loader.loader import StreamLoader
from lightning_stateful.stream_loader.options import Replay, StreamOptions
from lightning_stateful.stream_nodes.document_packer import DocumentPacker
from lightning_stateful.stream_nodes.hugging_face import HuggingFaceShards
from lightning_stateful.stream_nodes.read_ahead import LengthBatcher
from lightning_stateful.stream_nodes.shard_reader import OnError
from lightning_stateful.streams.source import Source, Transform
from lightning_stateful.streams.stream import Stream, as_stream
from lightning_stateful.streams.worker_slot import StreamConfig


class StreamDataModule(StatefulDataModule):
    """Trains on streams, which have no length and no index; ``Trainer.fit(ckpt_path=...)`` goes on at the next batch.

    The shards of a stream are dealt out to ranks and workers. On the same ranks and workers a resume goes on in exactly
    the same order; on others, with what is left of the shards.

    Args:
        train: A ``datasets.IterableDataset``, a :class:`ChunkedDataset`, a :class:`MixedStream`, or any iterable
            dataset, which then divides itself among ranks and workers. A dict or list of them gives one batch of each
            to every step.
        val: The same for validation, or a map-style dataset: each sample once over all ranks, in order. Of a stream
            ranks take as many steps as their shards give.
        test: The same for testing.
        predict: The same for prediction.
        batch_size: Samples in a batch of one rank; by default 1.
        max_tokens: In place of ``batch_size``: what a batch may hold, padding included. Windows of ``read_ahead``
            samples are sorted by length and cut.
        budget: In place of both: a :class:`Budget`, with further limits; windows are cut as with ``max_tokens``.
        length: From a sample to its length, or the name of a column.
        read_ahead: Samples of a window, which each worker holds in memory. With ``batch_size`` it may be given too.
        boundary_key: From a sample to an integer, or the name of a column; a batch holds samples of one.
        shuffle_batches: Shuffle the batches of each window.
        packing: Pack the samples, which are documents of tokens, into sequences of one length, each of one source; a
            batch is ``batch_size`` sequences. Datasets with an index are left as they are: pass a
            :class:`PackedDataset` to have them packed.
        shuffle: Read the shards of each epoch in an order of its own, and shuffle samples in blocks: of Hugging Face
            streams, in a :class:`MixedStream` too. A :class:`ChunkedDataset` says itself how it is shuffled.
        buffer_size: Samples of a block.
        steps_per_epoch: Steps of an epoch; the next goes on where it ends, and the stream begins again where it ends.
        replay: Whether a stream that can only be read again up to its place is read again, with a warning
            (``"warn"``), or refused (``"refuse"``).
        on_error: ``"skip"`` to leave out the rest of a shard that cannot be read, samples on which a function fails,
            and with ``packing`` samples that are no documents or too long, and count them (:meth:`position_report`).
        timeout: Seconds to wait for the batches of other ranks.
        eval_batch_size: Samples in a batch for evaluation; by default ``batch_size``, or as in training.
        **options: Any other argument of :class:`StatefulDataModule`.

    State:
        As :class:`StatefulDataModule`; beside the position it says how far each open shard is read.

    Raises:
        ConfigurationError: An argument is out of range; when loaders are asked for: a dataset is no stream.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        budget: Budget | None = None,
        length: Callable[[Any], Any] | str = len,
        read_ahead: int | None = None,
        boundary_key: Callable[[Any], Any] | str | None = None,
        shuffle_batches: bool = True,
        packing: Packing | None = None,
        shuffle: bool = True,
        buffer_size: int = 1000,
        steps_per_epoch: int | None = None,
        replay: Replay = "warn",
        on_error: OnError = "raise",
        timeout: float = 1800.0,
        eval_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if max_tokens is None and batch_size is None and budget is None:
            batch_size = 1
        self._length_batching: Transform | None = None
        self._packing = None if packing is None else Transform(DocumentPacker, {"packing": packing})
        of_lengths = {
            "length": length != len,
            "boundary_key": boundary_key is not None,
            "shuffle_batches": shuffle_batches is not True,
        }
        if packing is not None:
            of_windows = {"max_tokens": max_tokens, "budget": budget, "read_ahead": read_ahead}
            _refuse_beside_packing({name: value is not None for name, value in of_windows.items()} | of_lengths)
        if not (max_tokens is None and budget is None and read_ahead is None):
            budget = Budget.of(budget, max_tokens=max_tokens, batch_size=batch_size)
            how = {"length": length, "boundary_key": boundary_key, "shuffle_batches": shuffle_batches}
            window = 10_000 if read_ahead is None else as_int("read_ahead", read_ahead, least=1)
            self._length_batching = Transform(LengthBatcher, {"window": window, "budget": budget, **how})
            batch_size = budget.batch_size
            if options.get("drop_last"):
                raise ConfigurationError(
                    "drop_last leaves out batches that are not full, and windows are cut into batches of any size. "
                    "Leave it out: what ranks have left comes first in the next epoch."
                )
        elif given := [name for name, is_given in of_lengths.items() if is_given and packing is None]:
            raise ConfigurationError(
                f"{', '.join(given)}: for batches of like lengths only. Pass max_tokens, a budget, or read_ahead with "
                "batch_size."
            )
        self.eval_batch_size = eval_batch_size
        self._buffer_size, self._on_error = as_int("buffer_size", buffer_size), on_error
        if self._buffer_size < 0:
            raise ConfigurationError(f"buffer_size must not be negative, got {buffer_size}.")
        self._serving = StreamOptions(steps_per_epoch=steps_per_epoch, replay=replay, timeout=timeout)
        # Spelled out, because LightningCLI looks here for the options of the class above.
        super().__init__(train, val, test, predict, batch_size=batch_size, shuffle=shuffle, **options)  # type: ignore[arg-type]

    def _loader(self, dataset: Any, name: str | None, stage: str, **how: Any) -> DataLoader[Any]:
        exact = stage != "train"
        size = self.batch_size if not exact or self.eval_batch_size is None else self.eval_batch_size
        stream = as_stream(dataset)
        if stream is None and not isinstance(dataset, IterableDataset):
            return self._of_index(dataset, name, stage, size)
        budgeted = self._length_batching is not None and not (exact and self.eval_batch_size is not None)
        drop_last = self.drop_last and not exact
        # torch and Lightning take what is no IterableDataset, as a graph of nodes, for data with an index.
        held = dataset if stream is None or isinstance(dataset, IterableDataset) else stream
        loader: DataLoader[Any] = DataLoader(
            held, **{**self._options, "batch_size": size or 1, "drop_last": drop_last and not budgeted}
        )
        if exact and stream is None:
            return loader
        config = None if stream is None else self._config(stream, size, exact, budgeted, drop_last)
        if config is None and (budgeted or self._packing is not None):
            what = "packed exactly" if self._packing is not None else "cut into batches ahead"
            raise ConfigurationError(
                f"A {type(dataset).__name__} has no shards, so it cannot be {what}. Make a ChunkedDataset."
            )
        options = replace(
            self._serving,
            config=config,
            seed=self.seed,
            path=name or "",
            seed_samples=self._settings.seed_samples,
            accept=self._settings.accept,
        )
        return StreamLoader(loader, replace(options, exact=True, steps_per_epoch=None) if exact else options)

    def _of_index(self, dataset: Any, name: str | None, stage: str, size: int | None) -> DataLoader[Any]:
        """Evaluation on a dataset with an index, beside training on a stream."""
        if stage == "train":
            raise ConfigurationError(
                f"{type(self).__name__} trains on iterable datasets; a {type(dataset).__name__} has an index, and "
                "StatefulDataModule serves it faster."
            )
        if size is None:
            raise ConfigurationError(
                f"A {type(dataset).__name__} has an index, and is evaluated in batches of a size: pass eval_batch_size."
            )
        return super()._loader(dataset, name, stage, batch_size=size)

    def _config(self, stream: Stream, size: int | None, exact: bool, budgeted: bool, drop_last: bool) -> StreamConfig:
        changes: dict[str, Any] = {"seed_samples": self._settings.seed_samples}
        if self._on_error != "raise":
            changes["on_error"] = self._on_error

        def changed(source: Source) -> Source:
            source = replace(source, **changes)
            if exact:
                source = replace(source, shuffle=False, buffer_size=0)
            elif isinstance(source.shards, HuggingFaceShards) and not source.shuffle:
                # They do not say themselves how they are shuffled, in a mixture either.
                source = replace(source, shuffle=self.shuffle, buffer_size=self._buffer_size * self.shuffle)
            step = self._length_batching if budgeted else self._packing
            if step is None:
                return source
            if exact and budgeted:
                step = replace(step, options={**step.options, "shuffle_batches": False})
            return replace(source, steps=(*source.steps, step))

        return StreamConfig(
            sources={name: changed(source) for name, source in stream.sources.items()},
            mixing=stream.mixing,
            batch_size=None if budgeted else size,
            drop_last=drop_last,
        )


def _refuse_beside_packing(given: dict[str, bool]) -> None:
    """Refuse arguments for batches of like lengths where there is a packing.

    Raises:
        ConfigurationError: One of them is given.
    """
    if names := ", ".join(name for name, is_given in given.items() if is_given):
        raise ConfigurationError(
            "With packing, all sequences have the same length, and tokens are counted in the documents themselves: "
            f"pass batch_size, the number of sequences in a batch, and leave out {names}."
        )
