"""Batch samplers over several datasets: round robin and mixtures."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence, Sized
from fractions import Fraction
from typing import Any, get_args

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.mixture.order import MixtureOrder
from lightning_stateful.mixture.sources import By, Sources, Stop
from lightning_stateful.mixture.weights import (
    MAX_PERIOD,
    DrawSchedule,
    WeightSchedule,
    by_name,
    relative_errors,
    shares_of,
    whole_draws,
)
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler

Lengths = Mapping[str, Any] | Sequence[Any] | ConcatDataset[Any]

# Whole draws that are further off, relative to the share asked for, are told.
_TOLD_ERROR = 0.0105

# A split is known by the first word of its name: "train_sft", "validation_matched", "test.other".
_TRAINING_SPLITS = ("train", "training")
_EVALUATION_SPLITS = ("validation", "val", "valid", "dev", "eval", "evaluation", "test", "testing")


class RoundRobinBatchSampler(StatefulBatchSampler):
    """Whole batches from one dataset in turn, for a DataLoader over a ``ConcatDataset`` of them.

    All ranks of a step serve the same dataset, and take the same number of steps. Each dataset is shuffled as a whole,
    over all ranks, in every epoch. Only in the last steps of an epoch, which gather what is left of datasets that have
    no sample for each rank any more, ranks serve different ones.

    Args:
        lengths: The datasets or their lengths: by name, in a list (their names are then ``"0"``, ``"1"`` ...), or as a
            ``ConcatDataset``. Indices count over all of them in this order.
        batch_size: Samples in a batch of one rank: one for all, or one for each by name or in order.
        stop: When an epoch ends: ``"all_exhausted"`` (the default), when every sample has been served once, and a
            dataset that is finished leaves the turn; ``"first_exhausted"``, when a dataset has no batch left for its
            turn; or ``"cycle"``, when the longest has been served once, while the shorter ones start over, shuffled
            anew.
        num_steps: In place of ``stop``: steps of an epoch. Every dataset goes on in the next where it was.
        shuffle: Whether samples have an order of their own in each pass.
        drop_last: Serve full batches only, and leave out the last step if it is not full.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        num_replicas: As in :class:`StatefulBatchSampler`.
        rank: As in :class:`StatefulBatchSampler`.
        accept: Names of differences between a state and this configuration to let pass on load, for example
            ``("sources",)`` for datasets added or removed. Each goes on where it was.
        by_pass: Names of datasets whose indices go on from pass to pass, because each pass has other samples: those of
            a :class:`PackedDataset` in a :class:`~lightning_stateful.loaders.source_datasets.PackedSources`.

    State:
        See :class:`StatefulBatchSampler`. It has the samples served of every dataset, for any number of ranks.

    Raises:
        ConfigurationError: A dataset is empty, or an argument is out of range; with the dataset's name.
    """

    def __init__(
        self,
        lengths: Lengths,
        batch_size: int | Mapping[str, int] | Sequence[int],
        *,
        stop: Stop | None = None,
        num_steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
        by_pass: Collection[str] = (),
    ) -> None:
        sources = sources_of(lengths, batch_size, by_pass)
        order = MixtureOrder(
            sources=sources,
            draws=(1,) * len(sources),
            in_turn=True,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed_or_default(seed),
            stop=stop,
            num_steps=num_steps,
        )
        super().__init__(order, num_replicas=num_replicas, rank=rank, accept=accept)


class MixtureBatchSampler(StatefulBatchSampler):
    """Batches from several datasets in proportion, for a DataLoader over a ``ConcatDataset`` of them.

    Weights are rounded once, to whole draws of a period, and every period has exactly these; a draw is a batch for each
    rank or, with ``by="sample"``, a sample. All ranks of a step serve the same dataset (unless ``by="sample"``), and
    take the same number of steps.

    Args:
        lengths: As in :class:`RoundRobinBatchSampler`.
        batch_size: As in :class:`RoundRobinBatchSampler`; with ``by="sample"`` one for all.
        weights: A positive number for every dataset, by name or in order; by default its size in samples (in tokens
            with ``by="token"``).
        by: What the weights are shares of: ``"batch"``, each batch from one dataset; ``"sample"``, each batch from
            several in proportion; or ``"token"``, as ``"batch"``, with batches as often as makes the shares of tokens
            right over whole passes.
        temperature: Raise the weights to the power ``1 / temperature``: above 1, small datasets are served more often.
        schedule: Weights that change as training goes on, in place of ``weights``: a :class:`WeightSchedule`, or
            weights by step. Needs ``num_steps``.
        token_lengths: Tokens of every sample, an array for each dataset by name or in order; needed for
            ``by="token"``, and for tokens in reports.
        block: Draws in a period; by default the fewest in which all shares are whole, or if that takes over 256 as many
            as keep every share within 0.5 %. Within periods of over 256 draws, each 64 have about the same shares.
        stop: As in :class:`RoundRobinBatchSampler`.
        num_steps: As in :class:`RoundRobinBatchSampler`.
        shuffle: Whether samples, and the draws within a period, have an order of their own.
        drop_last: Serve full batches only, and leave out the last step if it is not full.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        num_replicas: As in :class:`StatefulBatchSampler`.
        rank: As in :class:`StatefulBatchSampler`.
        accept: Names of differences between a state and this configuration to let pass on load, for example
            ``("weights",)``, or ``("sources", "weights")`` for datasets added or removed.
        by_pass: As in :class:`RoundRobinBatchSampler`.

    State:
        See :class:`StatefulBatchSampler`. It has the samples served of every dataset, for any number of ranks.

    Raises:
        ConfigurationError: A weight is not positive, a dataset is empty, or an argument is out of range; with the
            dataset's name.

    Warns:
        StatefulWarning: Whole draws are over 1 % off a weight.
    """

    def __init__(
        self,
        lengths: Lengths,
        batch_size: int | Mapping[str, int] | Sequence[int],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        by: By = "batch",
        temperature: float | None = None,
        schedule: WeightSchedule | Mapping[int, Any] | None = None,
        token_lengths: Mapping[str, Any] | Sequence[Any] | None = None,
        block: int | None = None,
        stop: Stop | None = None,
        num_steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
        by_pass: Collection[str] = (),
    ) -> None:
        sources = sources_of(lengths, batch_size, by_pass)
        tokens = None if token_lengths is None else _count_tokens(sources, token_lengths)
        _check_draws(by, sources, block)
        costs = _tokens_per_draw(sources, tokens) if by == "token" else None
        if schedule is None:
            sizes = tokens if tokens is not None and by == "token" else sources.lengths
            asked, power = sizes if weights is None else weights, 1 if temperature is None else temperature
            points = [shares_of(sources.names, asked, temperature=power, costs=costs)]
        elif weights is not None or temperature is not None:
            raise ConfigurationError("schedule takes the place of weights and temperature; pass one or the other.")
        else:
            schedule = schedule if isinstance(schedule, WeightSchedule) else WeightSchedule(schedule)
            points = schedule.shares(sources.names, costs)
        exact = sources.batch_sizes[0] if by == "sample" else 0
        draws = tuple(whole_draws(point, block, exact=exact) for point in points)
        if weights is not None or schedule is not None:
            _warn_of_rounding(sources.names, points, draws)
        scheduled = None
        if schedule is not None:
            scheduled = DrawSchedule(tuple(map(int, schedule.points)), draws, schedule.between)
        order = MixtureOrder(
            sources=sources,
            # Of a schedule, the most that each source ever has: evaluation serves all of them.
            draws=tuple(map(max, zip(*draws, strict=True))),
            by=by,
            tokens=tokens,
            schedule=scheduled,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed_or_default(seed),
            stop=stop,
            num_steps=num_steps,
        )
        super().__init__(order, num_replicas=num_replicas, rank=rank, accept=accept)


def sources_of(
    lengths: Lengths, batch_size: int | Mapping[str, int] | Sequence[int], by_pass: Collection[str] = ()
) -> Sources:
    """Names, lengths and batch sizes of datasets or of their lengths; ``by_pass`` as in :class:`Sources`."""
    refuse_splits(lengths)
    if isinstance(lengths, ConcatDataset):
        lengths = list(lengths.datasets)
    if isinstance(lengths, Mapping):
        names, parts = tuple(map(str, lengths)), list(lengths.values())
    elif hasattr(lengths, "__len__") and not isinstance(lengths, (str, Dataset)):
        names, parts = tuple(map(str, range(len(lengths)))), list(lengths)
    else:
        raise ConfigurationError(
            f"lengths must be a dict or list of datasets or of their lengths, got {type(lengths).__name__}."
        )
    sizes = batch_size if isinstance(batch_size, (Mapping, list, tuple)) else dict.fromkeys(names, batch_size)
    return Sources(
        names,
        tuple(len(part) if isinstance(part, Sized) else part for part in parts),
        tuple(by_name(names, sizes, "batch_size").values()),
        tuple(by_pass),
    )


def refuse_splits(data: Any, *, trains: bool = True) -> None:
    """Refuse the splits of one dataset where several datasets are expected: a test split would be trained on.

    A mapping counts as splits if a training split and one for evaluation are among its keys; a ``DatasetDict`` if any
    of its keys is a split's name. For evaluation, only a ``DatasetDict`` with a training split does.
    """
    if not isinstance(data, Mapping):
        return
    words = {str(name): re.split(r"[^a-z]", str(name).lower())[0] for name in data}
    training = [name for name, word in words.items() if word in _TRAINING_SPLITS]
    evaluation = [name for name, word in words.items() if word in _EVALUATION_SPLITS]
    library: Any = sys.modules.get("datasets")
    if library is not None and isinstance(data, (library.DatasetDict, library.IterableDatasetDict)):
        refused = bool(training or (evaluation and trains))
    else:
        refused = bool(training and evaluation and trains)
    if refused:
        use = "trained" if trains else "evaluated"
        wanted = (training if trains and training else evaluation or training)[0]
        raise ConfigurationError(
            f"A {type(data).__name__} with the splits {', '.join(words)} was passed where datasets are expected, and "
            f"all of them would be {use} on. Pass one split, data[{wanted!r}], or load_dataset(..., split={wanted!r}). "
            f"If several are meant, give them names of another kind: {{'one': data[{wanted!r}], 'other': ...}}."
        )


def _count_tokens(sources: Sources, token_lengths: Mapping[str, Any] | Sequence[Any]) -> tuple[int, ...]:
    totals = []
    for (name, given), length in zip(
        by_name(sources.names, token_lengths, "array of token lengths").items(), sources.lengths, strict=True
    ):
        lengths = np.asarray(given)
        if lengths.shape != (length,) or lengths.dtype.kind not in "iu" or lengths.min() < 0 or not lengths.any():
            raise ConfigurationError(
                f"The token lengths of source {name!r} must be {length} integers, one a sample, from 0 and not all 0; "
                f"got an array of {lengths.dtype} of shape {lengths.shape}."
            )
        totals.append(int(lengths.sum(dtype=np.int64)))
    return tuple(totals)


def _check_draws(by: By, sources: Sources, block: int | None) -> None:
    if by not in get_args(By):
        raise ConfigurationError(f"by must be one of {get_args(By)}, got {by!r}.")
    if by == "sample" and len(set(sources.batch_sizes)) > 1:
        sizes = dict(zip(sources.names, sources.batch_sizes, strict=True))
        raise ConfigurationError(f'With by="sample" a batch holds several sources and has one size; got {sizes}.')
    if block is not None and by == "sample":
        raise ConfigurationError('With by="sample" the proportions are those of every batch; leave block out.')
    if block is not None and as_int("block", block, least=1) > MAX_PERIOD:
        raise ConfigurationError(f"block must be at most {MAX_PERIOD}, got {block}.")


def _tokens_per_draw(sources: Sources, tokens: tuple[int, ...] | None) -> list[Fraction]:
    """Tokens in a batch of each source, on average."""
    if tokens is None:
        raise ConfigurationError(
            'by="token" needs the length of every sample in tokens: pass token_lengths to a batch sampler, or '
            "lengths to a data module, an array for each source."
        )
    columns = zip(tokens, sources.batch_sizes, sources.lengths, strict=True)
    return [Fraction(total * size, length) for total, size, length in columns]


def _warn_of_rounding(
    names: Sequence[str], points: Sequence[Sequence[Fraction]], draws: Sequence[Sequence[int]]
) -> None:
    for shares, counts in zip(points, draws, strict=True):
        errors = relative_errors(shares, counts)
        worst = max(range(len(names)), key=errors.__getitem__)
        if errors[worst] > _TOLD_ERROR:
            warnings.warn(
                f"Source {names[worst]!r} has {counts[worst]} of {sum(counts)} draws, a share of "
                f"{counts[worst] / sum(counts):.3g} where its weight asks for {float(shares[worst]):.3g}: weights are "
                "rounded to whole draws of a period. If that matters, pass a longer block, or weights nearer to each "
                "other.",
                StatefulWarning,
                stacklevel=3,
            )
