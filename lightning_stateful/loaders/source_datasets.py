"""Several named datasets behind one loader: concatenates them, tags batches with their source, describes them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

from torch.utils.data import ConcatDataset, Subset, default_collate

from lightning_stateful.contents.dataset_content import content_now, content_of, glance
from lightning_stateful.core.skip import whole_plan
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.mixture.order import MixtureEpochPlan
from lightning_stateful.mixture.weights import by_name
from lightning_stateful.packing.plan import SequenceOrder
from lightning_stateful.samplers.fingerprint import describe_dataset, hex_digest, indices_in, without_fingerprint
from lightning_stateful.samplers.fingerprint import digest as fingerprint
from lightning_stateful.state import value_at

Collate = Callable[[list[Any]], Any]


class Sample(NamedTuple):
    """A sample with the number of its source."""

    source: int
    value: Any


class SourceDataset(ConcatDataset[Sample]):
    """A ``ConcatDataset`` whose samples tell their source, for a :class:`SourceCollate`."""

    def __getitem__(self, index: int) -> Sample:
        """The sample at ``index``, counted over all datasets."""
        value = super().__getitem__(index)  # type: ignore[no-untyped-call]  # torch's own
        return Sample(bisect_right(self.cumulative_sizes, index % len(self)), value)


class PackedSources(ConcatDataset[Any]):
    """A ``ConcatDataset`` whose indices go on from pass to pass: ``n * len(self) + i`` is index ``i`` in pass ``n``.

    Only those of a :class:`PackedDataset` have passes after 0. The sequences of one are read together.

    Samples tell their source, for a :class:`SourceCollate`, where ``is_told``.
    """

    def __init__(self, datasets: Iterable[Any], *, is_told: bool = False) -> None:
        super().__init__(datasets)
        self._is_told = is_told

    def __getitem__(self, index: int) -> Any:
        """The sample at ``index``."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at ``indices``."""
        samples: list[Any] = [None] * len(indices)
        for source, pairs in self._by_source(indices).items():
            dataset, within = self.datasets[source], [index for _, index in pairs]
            found = (
                dataset.__getitems__(within) if isinstance(dataset, PackedDataset) else map(dataset.__getitem__, within)
            )
            for (place, _), value in zip(pairs, found, strict=True):
                samples[place] = Sample(source, value) if self._is_told else value
        return samples

    def num_tokens_at(self, indices: Sequence[int]) -> tuple[int, int]:
        """Tokens of documents at ``indices``, and the same with padding; zeros if some samples are not packed."""
        found = [(self.datasets[source], pairs) for source, pairs in self._by_source(indices).items()]
        if not all(isinstance(dataset, PackedDataset) for dataset, _ in found):
            return 0, 0
        counts = [cast(PackedDataset, dataset).num_tokens_at([at for _, at in pairs]) for dataset, pairs in found]
        return sum(tokens for tokens, _ in counts), sum(room for _, room in counts)

    def _by_source(self, indices: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """By the number of a source, pairs of a place among ``indices`` and the index within the source."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number, at = divmod(index, len(self))
            source = bisect_right(self.cumulative_sizes, at)
            first, end = self.cumulative_sizes[source - 1] if source else 0, self.cumulative_sizes[source]
            wanted.setdefault(source, []).append((place, number * (end - first) + at - first))
        return wanted


class SourceCollate:
    """Collates a batch with its source's own function, and tags it with the name of its source.

    Args:
        names: The sources.
        collate_fn: One function for all, one for each by name or in order, or None for torch's own.
        tag: Key under which a batch that is a dict gets the name of its source.
        mixes: Whether a batch holds several sources; it gets a list of names then, one a sample.

    Raises:
        ConfigurationError: A source has no function; with its name.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        collate_fn: Collate | Mapping[str, Collate] | Sequence[Collate] | None,
        *,
        tag: str | None = None,
        mixes: bool = False,
    ) -> None:
        self.names, self.tag, self.mixes = names, tag, mixes
        if isinstance(collate_fn, (Mapping, Sequence)):
            if mixes:
                raise ConfigurationError(
                    'With by="sample" a batch holds several sources, so that they cannot each have a collate_fn.'
                )
            self._functions = list(by_name(names, collate_fn, "collate_fn").values())
        else:
            self._functions = [collate_fn] * len(names)

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch of samples; those that are no :class:`Sample` are from the only source."""
        sources, values = [0] * len(samples), samples
        if isinstance(samples[0], Sample):
            sources, values = [sample.source for sample in samples], [sample.value for sample in samples]
        name = self.names[sources[0]]
        batch = (self._functions[sources[0]] or default_collate)(values)
        if self.tag is None:
            return batch
        if not isinstance(batch, MutableMapping):
            raise ConfigurationError(
                f"tag={self.tag!r} needs batches that are dicts, and a batch of source {name!r} is a "
                f"{type(batch).__name__}. Let the collate function return a dict, or leave tag out."
            )
        if self.tag in batch:
            raise ConfigurationError(
                f"A batch of source {name!r} already has the key {self.tag!r}; choose another tag than that."
            )
        told = [self.names[source] for source in sources] if self.mixes else name
        # First, because Lightning takes the last value it finds no size in for a sign of an ambiguous batch.
        if isinstance(batch, dict):
            return {self.tag: told, **batch}
        batch[self.tag] = told
        return batch


def packed_anew(datasets: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of packed datasets that have other sequences in each pass."""
    return tuple(name for name, one in datasets.items() if isinstance(one, PackedDataset) and one.packs_anew)


def concatenated(
    datasets: Mapping[str, Any], collate_fn: Any, *, tag: str | None = None, mixes: bool = False
) -> tuple[ConcatDataset[Any], Any]:
    """The datasets one after the other, and a collate function that knows them apart where that matters.

    Other arguments are those of :class:`SourceCollate`.
    """
    is_told = tag is not None or isinstance(collate_fn, (Mapping, Sequence))
    collate = SourceCollate(tuple(datasets), collate_fn, tag=tag, mixes=mixes) if is_told else collate_fn
    if packed_anew(datasets):
        return PackedSources(datasets.values(), is_told=is_told), collate
    return (SourceDataset if is_told else ConcatDataset)(datasets.values()), collate


def describe_sources(dataset: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Add a description of each source's data to an order's configuration."""
    lengths = config["sources"]
    if len(dataset) != sum(lengths.values()):
        raise ConfigurationError(
            f"The sources have {sum(lengths.values())} samples together, {dict(lengths)}, and the dataset has "
            f"{len(dataset)}. Pass a ConcatDataset of the datasets that the batch sampler was made for, in that order."
        )
    if not isinstance(dataset, ConcatDataset) or len(dataset.datasets) != len(lengths):
        return {**config, "dataset": described_with_content(dataset)}
    sources, fingerprints, contents, packings = {}, {}, {}, {}
    for (name, length), part in zip(lengths.items(), dataset.datasets, strict=True):
        if len(part) != length:  # type: ignore[arg-type]  # ConcatDataset has asked for their lengths
            raise ConfigurationError(
                f"Source {name!r} has {length} samples, and the dataset in its place {len(part)}. "  # type: ignore[arg-type]  # as above
                "Concatenate the datasets in the order of the sources."
            )
        described, of_library = without_fingerprint(describe_dataset(part))
        if of_library is not None:
            fingerprints[name] = of_library
        if content := content_of(part):
            contents[name] = content
        if isinstance(part, PackedDataset):
            packings[name] = part.packing.config()
            # Their settings stand beside the sources, to be named one by one.
            described["packed"] = fingerprint({k: v for k, v in part.order.config().items() if k != "packing"})
        # Short, because a state lists every source: the length, and a digest of all else.
        more = json.dumps({key: value for key, value in described.items() if key != "length"}, sort_keys=True)
        digest = hex_digest(more.encode(), size=3)
        sources[name] = length if more == "{}" else f"{length} {digest}"
    settings = list(packings.values())
    packing = settings[0] if len(settings) == len(sources) and settings.count(settings[0]) == len(sources) else packings
    more_of_all = {"fingerprint": fingerprints, "dataset.content": contents, "packing": packing}
    return {**config, "sources": sources, **{name: more for name, more in more_of_all.items() if more}}


def with_packed(report: dict[str, Any], dataset: Any, order: Any, plan: Any, steps: int) -> dict[str, Any]:
    """A report with counts of packed documents: what :meth:`PackedDataset.counts` tells, of each source."""
    if isinstance(dataset, PackedDataset) and isinstance(getattr(order, "samples", None), SequenceOrder):
        cycle, rest = divmod(report["samples"] + report.get("skipped", 0), len(dataset))
        samples: SequenceOrder = order.samples
        passes = [(samples.pass_of(plan.epoch, number), len(dataset)) for number in range(cycle)]
        # Ranges of the first pass alone are left out.
        gaps = plan.gaps.within(0, len(dataset) if cycle else rest).pairs.tolist()
        skipped = [(samples.pass_of(plan.epoch, 0), first, stop) for first, stop in gaps]
        return {**report, **dataset.counts([*passes, (samples.pass_of(plan.epoch, cycle), rest)], skipped)}
    plan, steps = whole_plan(plan, steps)
    if not isinstance(dataset, ConcatDataset) or not isinstance(plan, MixtureEpochPlan):
        return report
    # Only of those that are read from pass to pass it is known which sequences were the first.
    passes_of, told = plan.passes_after(steps), dict(report["sources"])
    for name, part in zip(passes_of, dataset.datasets, strict=False):
        if isinstance(part, PackedDataset) and (name in order.sources.by_pass or not order.shuffle):
            told[name] = {**told[name], **part.counts(passes_of[name])}
    return {**report, "sources": told}


def described_with_content(dataset: Any) -> dict[str, Any]:
    """Describe a dataset, and under ``content`` what its attributes show of its samples."""
    content = content_of(dataset)
    return {**({"content": content} if content else {}), **describe_dataset(dataset)}


def changed_content(dataset: Any, config: Mapping[str, Any], known: dict[str, Any]) -> dict[str, str]:
    """Digests of a dataset's attributes, and a subset's indices, that are no longer those of a configuration, by name.

    ``known`` keeps the latest answer, for as long as some items of each list are the same.
    """
    described = config.get("dataset")
    before = described.get("content") if isinstance(described, Mapping) else None
    if not before and not isinstance(dataset, Subset):
        return {}
    if (seen := glance(dataset)) != known.get("glance"):
        known["glance"], now = seen, content_now(dataset)
        # An attribute that is gone, or counts as a cache by now, is no other order of the samples.
        changed = {name: now[name] for name, was in (before or {}).items() if now.get(name, was) != was}
        known["changed"] = {f"dataset.content.{name}": digest for name, digest in changed.items()}
        indices = indices_in(dataset).items()
        known["changed"] |= {name: digest for name, digest in indices if value_at(config, name) not in (None, digest)}
    return dict(known["changed"])
