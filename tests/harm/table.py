"""The table of samplers, batch samplers, loaders and iterables, with what the rule asks of each.

``same`` says how an uninterrupted run is compared with one without the callback (``laws.MODES``), and ``on_ranks`` the
same on several ranks, where it differs. ``deals`` says who divides the data among ranks:

- ``"lightning"``: Lightning does. A run is compared with the same run without the callback.
- ``"distributed"``: it is a DistributedSampler, which Lightning leaves alone; compared likewise.
- ``"itself"``: the sampler knows its rank; both runs have ``use_distributed_sampler=False``, as its users set it.
- ``"nobody"``: Lightning cannot rebuild it for ranks, or does so wrongly. What all ranks train on is compared with what
  one process trains on.

``resume`` is the least that a resume on the same ranks is to be: ``"exact"``, ``"warned"`` (inexact, and a warning says
so) or ``"refused"`` (perhaps at the start of the first run). ``elsewhere`` is the same for a resume on one rank of a
run on two, which is exact where the samples of the epoch are trained on as often as without the stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from harm import known_samplers as known
from harm import loaders, own_samplers
from harm.basics import LABELS, LENGTH, LENGTHS, NAMES, Indices, loader, num_ranks, own_rank

WEIGHTS = [1.0 + index % 3 for index in range(LENGTH)]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One sampler, loader or iterable.

    Attributes:
        group: The package that it is of, or a heading for users' own.
        name: Unique in the group.
        make: Makes a fresh loader with so many workers.
        same: How an uninterrupted run is compared in one process.
        resume: The least that a resume on the same ranks is to be.
        deals: Who divides the data among ranks.
        on_ranks: How an uninterrupted run is compared on several ranks.
        elsewhere: The least that a resume on another number of ranks is to be.
        trainer: Options of the Trainer.
    """

    group: str
    name: str
    make: Callable[[int], Any]
    same: str
    resume: str = "exact"
    deals: str = "lightning"
    on_ranks: str = ""
    elsewhere: str = ""
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.group}: {self.name}"

    def compared(self, ranks: int) -> str:
        """How an uninterrupted run is compared on so many ranks."""
        if ranks == 1:
            return self.same
        keeps_order = self.deals in ("itself", "distributed")
        return self.on_ranks or ("multiset" if self.same == "equal" and not keeps_order else self.same)

    def expected(self, way: str) -> str:
        """The least that a resume is to be, ``"same"`` on as many ranks or ``"other"`` on another number."""
        return self.resume if way == "same" else self.elsewhere or self.resume


class OfCuts(Dataset[torch.Tensor]):
    """Makes a batch of the objects that a sampler yields."""

    def __getitem__(self, cuts: Any) -> torch.Tensor:
        return torch.tensor([cut.index for cut in cuts])


@dataclass
class Cut:
    """An object with a duration."""

    index: int
    duration: float


@dataclass(frozen=True)
class WithCallback:
    """A DataLoader with a sampler that a callback of the same user's knows."""

    sampler: Callable[[], Any]
    callback: Callable[[Any], pl.Callback]

    def __call__(self, workers: int) -> tuple[Callable[[], DataLoader[Any]], pl.Callback]:
        sampler = self.sampler()
        return lambda: loader(workers, sampler=sampler), self.callback(sampler)


def of(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with a sampler."""
    return lambda workers: loader(workers, sampler=make(), **options)


def batches(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with a batch sampler."""
    return lambda workers: loader(workers, batch_sampler=make(), **options)


def over(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader over another dataset."""
    return lambda workers: loader(workers, dataset=make(), **options)


def in_batches(make: Callable[[], Any]) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with torch's BatchSampler over a sampler."""
    return batches(lambda: BatchSampler(make(), 4, False))


def generator() -> torch.Generator:
    """Seeded."""
    return torch.Generator().manual_seed(1)


def distributed(**options: Any) -> DistributedSampler[Any]:
    """torch's, of the ranks that there are unless told otherwise."""
    return DistributedSampler(Indices(), **{"num_replicas": num_ranks(), "rank": own_rank(), **options})


def _torch() -> list[Entry]:
    # In place of a RandomSampler, whatever its options, Lightning puts a DistributedSampler over the whole dataset.
    samplers: dict[str, tuple[str, str, Callable[[], Any]]] = {
        "SequentialSampler": ("equal", "multiset", lambda: SequentialSampler(Indices())),
        "RandomSampler": ("multiset", "multiset", lambda: RandomSampler(Indices())),
        "RandomSampler(generator)": ("multiset", "multiset", lambda: RandomSampler(Indices(), generator=generator())),
        "RandomSampler(replacement)": ("counts", "multiset", lambda: RandomSampler(Indices(), replacement=True)),
        "RandomSampler(num_samples=12)": ("distinct", "multiset", lambda: RandomSampler(Indices(), num_samples=12)),
        "SubsetRandomSampler": ("multiset", "multiset", lambda: SubsetRandomSampler(range(6, 18))),
        "WeightedRandomSampler": ("counts", "counts", lambda: WeightedRandomSampler(WEIGHTS, LENGTH)),
    }
    entry = partial(Entry, group="torch")
    data = partial(Entry, group="torchdata")
    return [
        *(entry(name=name, make=of(make), same=same, on_ranks=two) for name, (same, two, make) in samplers.items()),
        # Lightning rebuilds these for ranks with batches of one sample.
        *(
            entry(name=f"BatchSampler({name})", make=in_batches(make), same=same, deals="nobody")
            for name, (same, _, make) in samplers.items()
        ),
        entry(name="DistributedSampler", make=of(distributed), same="equal", deals="distributed"),
        entry(
            name="BatchSampler(DistributedSampler)",
            make=in_batches(distributed),
            same="equal",
            deals="itself",
            elsewhere="refused",
        ),
        entry(
            name="DistributedSampler of rank 1 of 3",
            make=of(lambda: distributed(num_replicas=3, rank=1)),
            same="equal",
            deals="distributed",
            elsewhere="refused",
        ),
        data(
            name="StatefulDistributedSampler",
            make=of(lambda: StatefulDistributedSampler(Indices(), num_ranks(), own_rank(), seed=3)),
            same="equal",
            deals="distributed",
        ),
        data(name="RandomSampler", make=of(lambda: TorchdataRandomSampler(Indices())), same="multiset"),
        data(
            name="StatefulDataLoader",
            make=lambda workers: loader(workers, kind=StatefulDataLoader, shuffle=True),
            same="multiset",
        ),
    ]


def _known() -> list[Entry]:
    itself: dict[str, Any] = {"deals": "itself", "elsewhere": "refused"}
    nobody: dict[str, Any] = {"deals": "nobody", "on_ranks": "counts"}
    endless: dict[str, Any] = {**itself, "trainer": {"limit_train_batches": 5}}
    cuts = [Cut(index, float(length)) for index, length in enumerate(LENGTHS)]
    categories = {name: "even" if name in ("class 0", "class 2") else "odd" for name in NAMES}
    rows: list[tuple[str, str, Callable[[int], Any], str, dict[str, Any]]] = [
        (
            "OML",
            "BalanceSampler",
            batches(lambda: known.BalanceSampler(NAMES)),
            "labels",
            {**nobody, "elsewhere": "refused"},
        ),
        (
            "OML",
            "CategoryBalanceSampler",
            batches(lambda: known.CategoryBalanceSampler(NAMES, categories)),
            "labels",
            nobody,
        ),
        (
            "pytorch-metric-learning",
            "MPerClassSampler",
            of(lambda: known.MPerClassSampler(LABELS, 2), batch_size=4),
            "labels",
            {"on_ranks": "counts"},
        ),
        (
            "pytorch-metric-learning",
            "HierarchicalSampler",
            batches(lambda: known.HierarchicalSampler(known.LABELS_OF_TWO_LEVELS)),
            "labels",
            nobody,
        ),
        ("timm", "OrderedDistributedSampler", of(known.OrderedDistributedSampler), "equal", itself),
        ("timm", "RepeatAugSampler", of(known.RepeatAugSampler), "equal", itself),
        (
            "timm",
            "MultiEpochsDataLoader",
            of(own_samplers.Distributed, kind=loaders.MultiEpochsDataLoader),
            "multiset",
            {"deals": "distributed", "resume": "refused"},
        ),
        ("torchvision", "RASampler", of(known.RASampler), "equal", itself),
        (
            "torchvision",
            "GroupedBatchSampler",
            batches(lambda: known.GroupedBatchSampler(distributed(), LABELS, 2)),
            "equal",
            itself,
        ),
        (
            "VISSL",
            "StatefulDistributedSampler",
            of(lambda: known.VisslSampler(Indices(), 4)),
            "equal",
            {**itself, "deals": "distributed"},
        ),
        (
            "lhotse",
            "DynamicBucketingSampler",
            lambda workers: loader(
                workers, dataset=OfCuts(), sampler=known.DynamicBucketingSampler(cuts), batch_size=None
            ),
            "equal",
            itself,
        ),
        ("detectron2", "TrainingSampler", of(lambda: known.TrainingSampler(LENGTH)), "equal", endless),
        (
            "detectron2",
            "RepeatFactorTrainingSampler",
            of(lambda: known.RepeatFactorTrainingSampler(torch.linspace(1, 3, LENGTH))),
            "equal",
            endless,
        ),
        ("detectron2", "InferenceSampler", of(lambda: known.InferenceSampler(LENGTH)), "equal", itself),
        ("transformers", "LengthGroupedSampler", of(lambda: known.LengthGroupedSampler(2, LENGTHS)), "multiset", {}),
        (
            "transformers",
            "DistributedLengthGroupedSampler",
            of(lambda: known.DistributedLengthGroupedSampler(2, LENGTHS)),
            "equal",
            {"deals": "distributed"},
        ),
        (
            "ml-cvnets",
            "VariableBatchSampler",
            batches(known.VariableBatchSampler),
            "equal",
            {**itself, "resume": "refused"},
        ),
        (
            "ultralytics",
            "InfiniteDataLoader",
            of(own_samplers.Distributed, kind=loaders.InfiniteDataLoader),
            "multiset",
            {"deals": "distributed", "resume": "refused"},
        ),
        ("mmengine", "DefaultSampler", of(known.DefaultSampler), "equal", itself),
        ("mmengine", "InfiniteSampler", of(known.InfiniteSampler), "equal", {**endless, "resume": "refused"}),
        (
            "Megatron",
            "MegatronPretrainingRandomSampler",
            batches(known.MegatronPretrainingRandomSampler),
            "equal",
            {**itself, "resume": "refused"},
        ),
        (
            "VITS",
            "DistributedBucketSampler",
            batches(lambda: known.DistributedBucketSampler(Indices())),
            "equal",
            itself,
        ),
        (
            "torchtitan",
            "HuggingFaceTextDataset",
            over(loaders.HuggingFaceText),
            "equal",
            {**endless, "resume": "warned"},
        ),
        (
            "torchtitan",
            "HuggingFaceTextDataset in a StatefulDataLoader",
            over(loaders.HuggingFaceText, kind=StatefulDataLoader),
            "equal",
            {**endless, "resume": "warned"},
        ),
    ]
    return [Entry(group=group, name=name, make=make, same=same, **more) for group, name, make, same, more in rows]


def _own() -> list[Entry]:
    itself: dict[str, Any] = {"deals": "itself", "elsewhere": "refused"}
    subclass: dict[str, Any] = {"deals": "distributed", "elsewhere": "refused"}
    nobody: dict[str, Any] = {"deals": "nobody"}
    alone: dict[str, Any] = {**itself, "resume": "warned"}
    own, losses = own_samplers, own_samplers.WritesLosses
    rows: dict[str, tuple[Callable[[int], Any], str, dict[str, Any]]] = {
        "share under its own name": (batches(own.RankShare), "equal", itself),
        "rank in slots": (of(own.InSlots), "equal", itself),
        "rank in properties": (of(own.InProperties), "equal", itself),
        "rank asked of torch in iter": (of(own.AsksTorch), "equal", itself),
        "distributed, each sample three times": (of(own.RepeatsThrice), "equal", subclass),
        "distributed, 40 a rank with replacement": (of(own.DrawsWithReplacement, batch_size=8), "equal", subclass),
        "distributed, len of all ranks": (of(own.CountsAllRanks), "equal", {**subclass, "resume": "refused"}),
        "counts epochs at the start": (of(own.CountsAtStart), "equal", {"resume": "refused"}),
        "counts epochs at the end": (of(own.CountsAtEnd), "equal", {"resume": "refused"}),
        "keeps its first subset": (of(own.KeepsItsSubset), "subset", {"resume": "refused"}),
        "shuffles in place": (of(own.ShufflesInPlace), "equal", {"resume": "refused"}),
        "plans in iter and stores the plan": (batches(own.StoresItsPlan), "multiset", nobody),
        "goes on with a generator": (of(own.GoesOn), "equal", {"resume": "refused"}),
        "its own iterator": (of(own.OwnIterator), "equal", {"resume": "refused"}),
        # Ranks have losses of their own, so that Lightning deals out lists that differ.
        "reads losses": (WithCallback(own.ByLoss, losses), "equal", {"resume": "warned", "on_ranks": "counts"}),
        "weights set at an epoch's end": (
            WithCallback(own.Weighted, own.SetsWeights),
            "multiset",
            {"resume": "warned"},
        ),
        "reads trainer.current_epoch": (
            WithCallback(own.AsksTheTrainer, own.GivesTheTrainer),
            "equal",
            {"resume": "warned"},
        ),
        "len follows set_epoch": (of(own.Grows), "equal", nobody),
        "batches of tokens": (batches(own.TokenBatches), "equal", nobody),
        "no len": (of(own.WithoutLen), "multiset", nobody),
        "len too long": (of(own.SaysTooMuch), "multiset", {**nobody, "resume": "refused"}),
        "len too short": (of(own.SaysTooLittle), "distinct", {"resume": "refused"}),
        "endless": (of(own.Endless), "counts", {**nobody, "trainer": {"limit_train_batches": 5}, "on_ranks": "steps"}),
        "batches from a set of strings": (batches(own.OfNames), "multiset", {**nobody, "resume": "refused"}),
        "P x K, seven batches": (batches(own.PTimesK), "labels", {**nobody, "on_ranks": "counts"}),
        "holds a NumPy generator": (of(own.HoldsNumpy), "multiset", {}),
        "holds a random.Random": (of(own.HoldsRandom), "multiset", {}),
        "holds a torch.Generator": (of(own.HoldsTorch), "multiset", {}),
        "draws lazily from global generators": (of(own.DrawsLazily), "multiset", {}),
        "state that is right": (of(own.RightState), "equal", {}),
        "state that is ignored": (of(own.IgnoresState), "equal", {}),
        "state one off": (of(own.StateOneOff), "equal", {}),
        "DataLoader that yields twice": (
            lambda workers: loader(workers, kind=loaders.YieldsTwice, shuffle=True),
            "multiset",
            {},
        ),
        "thread before a DataLoader": (
            lambda workers: loaders.Prefetches(loader(workers, shuffle=True)),
            "multiset",
            {**alone, "resume": "refused"},
        ),
        "iterable of batches": (lambda workers: loaders.Batches(), "multiset", {**alone, "resume": "refused"}),
        "IterableDataset": (over(loaders.Samples), "equal", alone),
        "IterableDataset with len": (over(loaders.SizedSamples), "equal", alone),
        "IterableDataset, counts passes": (over(loaders.CountsPasses), "equal", alone),
        "IterableDataset, counts passes in its state": (over(loaders.CountsWithState), "equal", alone),
        "IterableDataset, goes on at iter": (over(loaders.GoesOnReading), "equal", alone),
        "IterableDataset, its own iterator": (over(loaders.OwnIterable), "equal", alone),
        "IterableDataset, divides itself": (over(loaders.DividesItself), "equal", alone),
        "IterableDataset, torch's generator": (over(loaders.ShuffledByTorch), "multiset", alone),
    }
    return [Entry(group="own", name=name, make=make, same=same, **more) for name, (make, same, more) in rows.items()]


ENTRIES: dict[str, Entry] = {entry.id: entry for entry in (*_torch(), *_known(), *_own())}
