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
from support import own_iterations
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
from harm import loaders
from harm import own_samplers as own
from harm.basics import LABELS, LENGTH, LENGTHS, NAMES, Indices, loader, num_ranks, own_rank

WEIGHTS = [1.0 + index % 3 for index in range(LENGTH)]


@dataclass(frozen=True)
class Entry:
    """One sampler, loader or iterable.

    Attributes:
        make: Makes a fresh loader with so many workers.
        same: How an uninterrupted run is compared in one process.
        resume: The least that a resume on the same ranks is to be.
        deals: Who divides the data among ranks.
        on_ranks: How an uninterrupted run is compared on several ranks.
        elsewhere: The least that a resume on another number of ranks is to be.
        trainer: Options of the Trainer.
    """

    make: Callable[[int], Any]
    same: str
    resume: str = "exact"
    deals: str = "lightning"
    on_ranks: str = ""
    elsewhere: str = ""
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def compared(self, ranks: int) -> str:
        """The mode by which an uninterrupted run is compared on so many ranks."""
        if ranks == 1:
            return self.same
        keeps_order = self.deals in ("itself", "distributed")
        return self.on_ranks or ("multiset" if self.same == "equal" and not keeps_order else self.same)

    def expected(self, way: str) -> str:
        """The least that a run ("run"), a resume ("same") or one on other ranks ("other") is to be."""
        return self.elsewhere or self.resume if way == "other" else self.resume


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
    """A DataLoader with a sampler, or something in another role, that a callback of the same user's knows."""

    sampler: Callable[[], Any]
    callback: Callable[[Any], pl.Callback]
    role: str = "sampler"

    def __call__(self, workers: int) -> tuple[Callable[[], DataLoader[Any]], pl.Callback]:
        sampler = self.sampler()
        return lambda: loader(workers, **{self.role: sampler}), self.callback(sampler)


def of(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with a sampler."""
    return lambda workers: loader(workers, sampler=make(), **options)


def batches(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with a batch sampler."""
    return lambda workers: loader(workers, batch_sampler=make(), **options)


def over(make: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader over another dataset."""
    return lambda workers: loader(workers, dataset=make(), **options)


def shuffled(kind: type[DataLoader[Any]]) -> Callable[[int], DataLoader[Any]]:
    """A loader of another class with ``shuffle=True``."""
    return lambda workers: loader(workers, kind=kind, shuffle=True)


def in_batches(make: Callable[[], Any]) -> Callable[[int], DataLoader[Any]]:
    """A DataLoader with torch's BatchSampler over a sampler."""
    return batches(lambda: BatchSampler(make(), 4, False))


def generator() -> torch.Generator:
    """Seeded."""
    return torch.Generator().manual_seed(1)


def distributed(**options: Any) -> DistributedSampler[Any]:
    """torch's, of the ranks that there are unless told otherwise."""
    return DistributedSampler(Indices(), **{"num_replicas": num_ranks(), "rank": own_rank(), **options})


# In place of a RandomSampler, whatever its options, Lightning puts a DistributedSampler over the whole dataset.
OF_TORCH: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "SequentialSampler": ("equal", "multiset", lambda: SequentialSampler(Indices())),
    "RandomSampler": ("multiset", "multiset", lambda: RandomSampler(Indices())),
    "RandomSampler(generator)": ("multiset", "multiset", lambda: RandomSampler(Indices(), generator=generator())),
    "RandomSampler(replacement)": ("counts", "drawn", lambda: RandomSampler(Indices(), replacement=True)),
    "RandomSampler(num_samples=12)": ("distinct", "drawn", lambda: RandomSampler(Indices(), num_samples=12)),
    "SubsetRandomSampler": ("multiset", "multiset", lambda: SubsetRandomSampler(range(6, 18))),
    "WeightedRandomSampler": ("counts", "counts", lambda: WeightedRandomSampler(WEIGHTS, LENGTH)),
}
CUTS = [Cut(index, float(length)) for index, length in enumerate(LENGTHS)]
CATEGORIES = {name: "even" if name in ("class 0", "class 2") else "odd" for name in NAMES}

distributed_alone = partial(distributed, num_replicas=3, rank=1)
of_torchdata = partial(StatefulDistributedSampler, Indices(), seed=3)
text = loaders.HuggingFaceText

# Who deals the data out, and options that come often.
itself: dict[str, Any] = {"deals": "itself", "elsewhere": "refused"}
ends = {"trainer": {"limit_train_batches": 5}}
subclass: dict[str, Any] = {"deals": "distributed"}
on_its_ranks: dict[str, Any] = {"deals": "distributed", "elsewhere": "refused"}
nobody: dict[str, Any] = {"deals": "nobody"}
drawn: dict[str, Any] = {"deals": "nobody", "on_ranks": "counts"}
refused: dict[str, Any] = {"resume": "refused"}

_ROWS: dict[str, tuple[Callable[[int], Any], str, dict[str, Any]]] = {
    **{f"torch: {name}": (of(make), same, {"on_ranks": two}) for name, (same, two, make) in OF_TORCH.items()},
    # Lightning rebuilds these for ranks with batches of one sample.
    **{f"torch: BatchSampler({name})": (in_batches(make), same, nobody) for name, (same, _, make) in OF_TORCH.items()},
    "torch: DistributedSampler": (of(distributed), "equal", subclass),
    "torch: BatchSampler(DistributedSampler)": (in_batches(distributed), "equal", itself),
    "torch: DistributedSampler of rank 1 of 3": (of(distributed_alone), "equal", {**on_its_ranks, **refused}),
    "torchdata: StatefulDistributedSampler": (
        of(lambda: of_torchdata(num_replicas=num_ranks(), rank=own_rank())),
        "equal",
        subclass,
    ),
    "torchdata: RandomSampler": (of(lambda: TorchdataRandomSampler(Indices())), "multiset", {}),
    "torchdata: StatefulDataLoader": (shuffled(StatefulDataLoader), "multiset", {}),
    "OML: BalanceSampler": (
        batches(lambda: known.BalanceSampler(NAMES)),
        "labels",
        {**drawn, "elsewhere": "refused"},
    ),
    "OML: CategoryBalanceSampler": (batches(lambda: known.CategoryBalanceSampler(NAMES, CATEGORIES)), "labels", drawn),
    "pytorch-metric-learning: MPerClassSampler": (
        of(lambda: known.MPerClassSampler(LABELS, 2)),
        "labels",
        {"on_ranks": "counts"},
    ),
    "pytorch-metric-learning: HierarchicalSampler": (
        batches(lambda: known.HierarchicalSampler(known.LABELS_OF_TWO_LEVELS)),
        "labels",
        drawn,
    ),
    "timm: OrderedDistributedSampler": (of(known.OrderedDistributedSampler), "equal", itself),
    "timm: RepeatAugSampler": (of(known.RepeatAugSampler), "equal", itself),
    "timm: MultiEpochsDataLoader": (
        of(own.Distributed, kind=own_iterations.MultiEpochs),
        "together",
        {**subclass, **refused},
    ),
    "torchvision: RASampler": (of(known.RASampler), "equal", itself),
    "torchvision: GroupedBatchSampler": (
        batches(lambda: known.GroupedBatchSampler(distributed(), LABELS, 2)),
        "equal",
        itself,
    ),
    "VISSL: StatefulDistributedSampler": (
        of(lambda: known.VisslSampler(Indices(), 4)),
        "equal",
        {**on_its_ranks, "on_ranks": "together"},
    ),
    "lhotse: DynamicBucketingSampler": (
        of(lambda: known.DynamicBucketingSampler(CUTS), dataset=OfCuts(), batch_size=None),
        "equal",
        itself,
    ),
    "detectron2: TrainingSampler": (of(lambda: known.TrainingSampler(LENGTH)), "equal", {**itself, **ends}),
    "detectron2: RepeatFactorTrainingSampler": (
        of(lambda: known.RepeatFactorTrainingSampler(torch.linspace(1, 3, LENGTH))),
        "equal",
        {**itself, **ends},
    ),
    "detectron2: InferenceSampler": (of(lambda: known.InferenceSampler(LENGTH)), "equal", itself),
    "transformers: LengthGroupedSampler": (of(lambda: known.LengthGroupedSampler(2, LENGTHS)), "multiset", {}),
    "transformers: DistributedLengthGroupedSampler": (
        of(lambda: known.DistributedLengthGroupedSampler(2, LENGTHS)),
        "equal",
        subclass,
    ),
    "ml-cvnets: VariableBatchSampler": (batches(known.VariableBatchSampler), "equal", {**itself, **refused}),
    "ultralytics: InfiniteDataLoader": (
        of(own.Distributed, kind=own_iterations.Infinite),
        "multiset",
        {**subclass, **refused},
    ),
    "mmengine: DefaultSampler": (of(known.DefaultSampler), "equal", itself),
    "mmengine: InfiniteSampler": (of(known.InfiniteSampler), "equal", {**itself, **ends, **refused}),
    "Megatron: MegatronPretrainingRandomSampler": (
        batches(known.MegatronPretrainingRandomSampler),
        "equal",
        {**itself, **refused},
    ),
    "VITS: DistributedBucketSampler": (
        batches(lambda: known.DistributedBucketSampler(Indices())),
        "told",
        itself,
    ),
    "torchtitan: HuggingFaceTextDataset": (over(text), "equal", {**itself, **ends}),
    "torchtitan: HuggingFaceTextDataset in a StatefulDataLoader": (
        over(text, kind=StatefulDataLoader),
        "equal",
        {**itself, **ends},
    ),
    "own: share under its own name": (batches(own.RankShare), "equal", itself),
    "own: built before ranks are known": (of(own.ToldOfOne), "equal", {}),
    "own: rank in slots": (of(own.InSlots), "equal", itself),
    "own: rank in properties": (of(own.InProperties), "equal", itself),
    "own: rank asked of torch in iter": (of(own.AsksTorch), "equal", itself),
    "own: distributed, each sample three times": (
        of(own.RepeatsThrice),
        "equal",
        {**on_its_ranks, "on_ranks": "together"},
    ),
    "own: distributed, 40 a rank with replacement": (
        of(own.DrawsWithReplacement, batch_size=8),
        "equal",
        on_its_ranks,
    ),
    "own: distributed, len of all ranks": (of(own.CountsAllRanks), "equal", {**on_its_ranks, **refused}),
    "own: distributed, all samples on each rank": (of(own.AllOnEachRank), "equal", on_its_ranks),
    "own: counts epochs at the start": (of(own.CountsAtStart), "equal", refused),
    "own: counts epochs at the end": (of(own.CountsAtEnd), "equal", refused),
    "own: keeps its first subset": (of(own.KeepsItsSubset), "subset", refused),
    "own: shuffles in place": (of(own.ShufflesInPlace), "equal", refused),
    "own: plans in iter and stores the plan": (batches(own.StoresItsPlan), "multiset", nobody),
    "own: goes on with a generator": (of(own.GoesOn), "equal", refused),
    "own: its own iterator": (of(own.OwnIterator), "equal", refused),
    # Ranks have losses of their own, so that Lightning deals out lists that differ.
    "own: reads losses": (
        WithCallback(own.ByLoss, own.WritesLosses),
        "equal",
        {"resume": "refused", "on_ranks": "counts"},
    ),
    "own: weights set at an epoch's end": (
        WithCallback(own.Weighted, own.SetsWeights),
        "multiset",
        {"resume": "warned"},
    ),
    "own: reads trainer.current_epoch": (
        WithCallback(own.AsksTheTrainer, own.GivesTheTrainer),
        "equal",
        {"resume": "warned"},
    ),
    # Lightning cuts epochs off at the length of the first.
    "own: len follows set_epoch": (of(own.Grows), "told", {**nobody, "on_ranks": "told"}),
    "own: batches of tokens, fewer later": (
        batches(lambda: own.TokenBatches(own.Shuffled(), 16)),
        "equal",
        {**nobody, "on_ranks": "padded"},
    ),
    "own: batches of tokens, more later": (
        batches(lambda: own.TokenBatches(own.Shuffled(), 18)),
        "told",
        {**nobody, "on_ranks": "told"},
    ),
    "own: no len": (of(own.WithoutLen), "multiset", nobody),
    "own: len too long": (of(own.SaysTooMuch), "multiset", {**nobody, **refused}),
    "own: len too short": (of(own.SaysTooLittle), "distinct", refused),
    "own: endless": (of(own.Endless), "counts", {**nobody, **ends, "on_ranks": "runs"}),
    "own: batches from a set of strings": (batches(own.OfNames), "multiset", {**nobody, **refused}),
    "own: P x K, seven batches": (batches(own.PTimesK), "labels", {**drawn, "on_ranks": "padded"}),
    "own: holds a NumPy generator": (of(own.HoldsNumpy), "multiset", {}),
    "own: holds a random.Random": (of(own.HoldsRandom), "multiset", {}),
    "own: holds a torch.Generator": (of(own.HoldsTorch), "multiset", {}),
    "own: draws lazily from global generators": (of(own.DrawsLazily), "multiset", {}),
    "own: state that is right": (of(own.RightState), "equal", {}),
    "own: state that is ignored": (of(own.IgnoresState), "equal", {}),
    "own: state one off": (of(own.StateOneOff), "equal", {}),
    "own: DataLoader that yields twice": (shuffled(own_iterations.TwiceAsLong), "multiset", {"elsewhere": "refused"}),
    "own: DataLoader that reads its sampler by hand": (
        shuffled(own_iterations.ByHand),
        "multiset",
        {"elsewhere": "refused"},
    ),
    "own: DataLoader that gives half of its len": (
        lambda workers: loader(workers, kind=own_iterations.HalfOfLength),
        "equal",
        {"on_ranks": "counts"},
    ),
    "own: thread before a DataLoader": (
        lambda workers: loaders.Prefetches(loader(workers, shuffle=True)),
        "multiset",
        {**itself, **refused},
    ),
    "own: iterable of batches": (lambda workers: loaders.Batches(), "multiset", {**itself, **refused}),
    "own: IterableDataset": (over(loaders.Samples), "equal", itself),
    "own: IterableDataset with len": (over(loaders.SizedSamples), "equal", itself),
    "own: IterableDataset, counts passes": (over(loaders.CountsPasses), "equal", itself),
    "own: IterableDataset, counts passes in its state": (over(loaders.CountsWithState), "equal", itself),
    "own: IterableDataset, goes on at iter": (over(loaders.GoesOnReading), "equal", itself),
    "own: IterableDataset, its own iterator": (over(loaders.OwnIterable), "equal", itself),
    "own: IterableDataset, divides itself": (over(loaders.DividesItself), "equal", itself),
    "own: IterableDataset, torch's generator": (over(loaders.ShuffledByTorch), "multiset", itself),
}
ENTRIES = {name: Entry(make, same, **more) for name, (make, same, more) in _ROWS.items()}
