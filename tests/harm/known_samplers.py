"""Samplers written after those of well-known packages: their structure, the names of their attributes, no more."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from harm.basics import LABELS, LENGTH, LENGTHS, num_ranks, own_rank, permutation


class BalanceSampler(BatchSampler):
    """OML: batches of some labels with some instances each; it draws from sets and iterates them."""

    def __init__(self, labels: list[Any], n_labels: int = 2, n_instances: int = 2) -> None:
        self._n_labels, self._n_instances = n_labels, n_instances
        self._unq_labels = set(labels)
        self._lbl2idx = {label: [i for i, of in enumerate(labels) if of == label] for label in sorted(self._unq_labels)}

    @property
    def batch_size(self) -> int:
        return self._n_labels * self._n_instances

    def __len__(self) -> int:
        return math.ceil(len(self._unq_labels) / self._n_labels) * 6

    def __iter__(self) -> Iterator[list[int]]:
        epoch, rest = [], self._unq_labels.copy()
        for _ in range(len(self)):
            chosen = set(random.sample(sorted(rest), k=self._n_labels))
            rest = (rest - chosen) or self._unq_labels.copy()
            batch: list[int] = []
            for label in chosen:
                batch.extend(np.random.choice(self._lbl2idx[label], self._n_instances, replace=False).tolist())
            epoch.append(batch)
        return iter(epoch)


class CategoryBalanceSampler(BalanceSampler):
    """OML: the same within some categories of labels."""

    def __init__(self, labels: list[Any], label2category: dict[Any, str], n_categories: int = 1) -> None:
        super().__init__(labels)
        self._label2category, self._n_categories = label2category, n_categories

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            categories = np.random.choice(sorted(set(self._label2category.values())), self._n_categories, replace=False)
            labels = [label for label in self._unq_labels if self._label2category[label] in set(categories)]
            yield [i for label in sorted(labels)[:2] for i in random.sample(self._lbl2idx[label], self._n_instances)]


class MPerClassSampler(Sampler[int]):
    """pytorch-metric-learning: m samples of a class in a row; it shuffles its array of labels in place."""

    def __init__(self, labels: list[int], m: int, length_before_new_iter: int = LENGTH) -> None:
        self.m_per_class = m
        self.labels_to_indices = {label: np.flatnonzero(np.array(labels) == label) for label in sorted(set(labels))}
        self.labels = list(self.labels_to_indices)
        self.length_of_single_pass = self.m_per_class * len(self.labels)
        self.list_size = length_before_new_iter // self.length_of_single_pass * self.length_of_single_pass

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        idx_list = [0] * self.list_size
        i = 0
        for _ in range(self.list_size // self.length_of_single_pass):
            np.random.shuffle(self.labels)
            for label in self.labels:
                found = self.labels_to_indices[label]
                idx_list[i : i + self.m_per_class] = np.random.choice(found, self.m_per_class, replace=False).tolist()
                i += self.m_per_class
        return iter(idx_list)


class HierarchicalSampler(BatchSampler):
    """pytorch-metric-learning: batches of pairs of super-classes, drawn anew in each ``__iter__`` and kept."""

    def __init__(self, labels: list[tuple[int, int]], samples_per_class: int = 2) -> None:
        self.samples_per_class = samples_per_class
        self.super_image_lists: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, (inner, outer) in enumerate(labels):
            self.super_image_lists[outer][inner].append(index)
        self.super_image_lists = {outer: dict(lists) for outer, lists in self.super_image_lists.items()}
        self.super_pairs = list(itertools.combinations(self.super_image_lists, 2))
        self.reshuffle()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.reshuffle()
        yield from self.batches

    def reshuffle(self) -> None:
        batches = []
        for pair in self.super_pairs:
            for _ in range(6):
                batch: list[int] = []
                for outer in pair:
                    inner = list(self.super_image_lists[outer])
                    np.random.shuffle(inner)
                    found = self.super_image_lists[outer][inner[0]]
                    batch += np.random.choice(found, self.samples_per_class, replace=False).tolist()
                np.random.shuffle(batch)
                batches.append(batch)
        np.random.shuffle(batches)
        self.batches = batches


class OfRanks(Sampler[int]):
    """A sampler that divides a seeded shuffle of the dataset among ranks by itself, as most packages have one."""

    def __init__(self, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True) -> None:
        self.num_replicas = num_ranks() if num_replicas is None else num_replicas
        self.rank = own_rank() if rank is None else rank
        self.shuffle, self.epoch = shuffle, 0
        self.num_samples = math.ceil(LENGTH / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        indices = permutation(self.epoch) if self.shuffle else list(range(LENGTH))
        indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OrderedDistributedSampler(OfRanks):
    """timm: in order, padded; it has no ``set_epoch``."""

    set_epoch = None

    def __init__(self) -> None:
        super().__init__(shuffle=False)


class RepeatAugSampler(OfRanks):
    """timm: every sample three times, so that ranks get the same ones, of which a rank takes its share alone."""

    def __init__(self, num_repeats: int = 3, selected_round: int = 0) -> None:
        super().__init__()
        self.num_repeats, self.selected_round = num_repeats, selected_round
        self.num_samples = math.ceil(LENGTH * num_repeats / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.num_selected_samples = math.ceil(LENGTH / self.num_replicas)

    def __len__(self) -> int:
        return self.num_selected_samples

    def __iter__(self) -> Iterator[int]:
        indices = [index for index in permutation(self.epoch) for _ in range(self.num_repeats)]
        return iter(indices[self.rank : self.total_size : self.num_replicas][: self.num_selected_samples])


class RASampler(OfRanks):
    """torchvision's references: the same by a tensor, seeded by ``seed + epoch``."""

    def __init__(self, repetitions: int = 3, seed: int = 5) -> None:
        super().__init__()
        self.repetitions, self.seed = repetitions, seed
        self.num_samples = math.ceil(LENGTH * repetitions / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.num_selected_samples = LENGTH // self.num_replicas

    def __len__(self) -> int:
        return self.num_selected_samples

    def __iter__(self) -> Iterator[int]:
        indices = torch.tensor(permutation(self.seed + self.epoch)).repeat_interleave(self.repetitions).tolist()
        yield from indices[self.rank : self.total_size : self.num_replicas][: self.num_selected_samples]


class GroupedBatchSampler(BatchSampler):
    """torchvision's references: batches of one group (of like shapes) of what another sampler yields."""

    def __init__(self, sampler: Sampler[int], group_ids: list[int], batch_size: int) -> None:
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        buffer: dict[int, list[int]] = defaultdict(list)
        samples: dict[int, list[int]] = defaultdict(list)
        num_batches = 0
        for index in self.sampler:
            group = self.group_ids[index]
            buffer[group].append(index)
            samples[group].append(index)
            if len(buffer[group]) == self.batch_size:
                yield buffer.pop(group)
                num_batches += 1
        # Groups that are not full take their first samples once more.
        for group in sorted(buffer, key=lambda group: -len(buffer[group]))[: len(self) - num_batches]:
            missing = self.batch_size - len(buffer[group])
            yield buffer[group] + (samples[group] * self.batch_size)[:missing]


class VisslSampler(DistributedSampler[Any]):
    """VISSL's StatefulDistributedSampler: a range for each rank, shuffled in it, begun at ``start_iter``."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        super().__init__(dataset, num_ranks(), own_rank(), shuffle=False, seed=3)
        self.start_iter, self.batch_size = 0, batch_size
        self.total_size = len(dataset) - len(dataset) % self.num_replicas
        self.num_samples = self.total_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        own = np.arange(self.rank * self.num_samples, (self.rank + 1) * self.num_samples)
        indices = own[permutation(self.epoch + self.seed, self.num_samples)].tolist()
        return iter(indices[self.start_iter * self.batch_size :])

    def set_start_iter(self, start_iter: int) -> None:
        self.start_iter = start_iter


class DynamicBucketingSampler(Sampler[Any]):
    """As lhotse's: its own iterator over lists of objects within a duration, every ``world_size``th of them."""

    def __init__(self, cuts: list[Any], max_duration: float = 18.0, seed: int = 1) -> None:
        self.cuts, self.max_duration, self.seed, self.epoch = cuts, max_duration, seed, 0
        self.world_size, self.rank = num_ranks(), own_rank()

    def __iter__(self) -> DynamicBucketingSampler:
        cuts = list(self.cuts)
        random.Random(self.seed + self.epoch).shuffle(cuts)
        self._buckets = [sorted(cuts[start : start + 8], key=lambda cut: cut.duration) for start in range(0, LENGTH, 8)]
        self._rng = random.Random(self.seed)
        return self

    def __next__(self) -> list[Any]:
        # Incomplete rounds are left out, so that ranks take equal steps.
        batches = [self._next_batch() for _ in range(self.world_size)]
        if not all(batches):
            raise StopIteration
        return batches[self.rank]

    def _next_batch(self) -> list[Any]:
        buckets = [bucket for bucket in self._buckets if bucket]
        if not buckets:
            return []
        bucket, batch = self._rng.choice(buckets), []
        while bucket and sum(cut.duration for cut in batch) + bucket[0].duration <= self.max_duration:
            batch.append(bucket.pop(0))
        return batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class TrainingSampler(Sampler[int]):
    """detectron2: never ends; ranks take every so manieth index of one shuffled stream."""

    def __init__(self, size: int, shuffle: bool = True, seed: int = 9) -> None:
        self._size, self._shuffle, self._seed = size, shuffle, seed
        self._rank, self._world_size = own_rank(), num_ranks()

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self._infinite_indices(), self._rank, None, self._world_size)

    def _infinite_indices(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            indices = self._epoch_indices(generator)
            yield from indices[torch.randperm(len(indices), generator=generator)].tolist()

    def _epoch_indices(self, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(self._size)


class RepeatFactorTrainingSampler(TrainingSampler):
    """detectron2: rare samples come more often, by a whole factor and a fraction that is drawn."""

    def __init__(self, repeat_factors: torch.Tensor) -> None:
        super().__init__(len(repeat_factors))
        self._int_part = torch.trunc(repeat_factors)
        self._frac_part = repeat_factors - self._int_part

    def _epoch_indices(self, generator: torch.Generator) -> torch.Tensor:
        drawn = (torch.rand(len(self._frac_part), generator=generator) < self._frac_part).float()
        return torch.arange(self._size).repeat_interleave((self._int_part + drawn).long())


class InferenceSampler(Sampler[int]):
    """detectron2: a contiguous range for each rank, as ``_local_indices``."""

    def __init__(self, size: int) -> None:
        self._size, self._rank, self._world_size = size, own_rank(), num_ranks()
        share = size // self._world_size
        self._local_indices = range(self._rank * share, (self._rank + 1) * share)

    def __iter__(self) -> Iterator[int]:
        yield from self._local_indices

    def __len__(self) -> int:
        return len(self._local_indices)


class LengthGroupedSampler(Sampler[int]):
    """transformers: shuffled, and sorted by length within megabatches."""

    def __init__(self, batch_size: int, lengths: list[int], generator: torch.Generator | None = None) -> None:
        self.batch_size, self.lengths, self.generator = batch_size, lengths, generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._grouped(self.generator))

    def _grouped(self, generator: torch.Generator | None) -> list[int]:
        indices = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.batch_size * 4
        groups = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [index for group in groups for index in sorted(group, key=lambda i: -self.lengths[i])]


class DistributedLengthGroupedSampler(LengthGroupedSampler, DistributedSampler[Any]):
    """transformers: the same, seeded by ``seed + epoch``, of which a rank takes its share."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int = 0) -> None:
        LengthGroupedSampler.__init__(self, batch_size, lengths)
        self.num_replicas, self.rank, self.epoch, self.seed = num_ranks(), own_rank(), 0, seed
        self.num_samples = math.ceil(len(lengths) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        indices = self._grouped(torch.Generator().manual_seed(self.seed + self.epoch))
        indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class VariableBatchSampler(Sampler[Any]):
    """ml-cvnets: batches of varying sizes, of (height, width, index); it seeds the global ``random`` by the epoch."""

    def __init__(self) -> None:
        self.img_indices, self.epoch, self.shuffle = list(range(LENGTH)), 0, True
        self.rank, self.num_replicas = own_rank(), num_ranks()
        self.n_samples_per_replica = math.ceil(LENGTH / self.num_replicas)
        self.img_batch_tuples = [(32, 32, 1), (24, 24, 2), (16, 16, 3)]

    def __len__(self) -> int:
        # Too long: samples, not batches.
        return self.n_samples_per_replica

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        random.seed(self.epoch)
        indices = random.sample(self.img_indices, len(self.img_indices))
        own = indices[self.rank : len(indices) : self.num_replicas]
        start = 0
        while start < self.n_samples_per_replica:
            height, width, size = random.choice(self.img_batch_tuples)
            chosen = own[start : start + size]
            chosen += own[: size - len(chosen)]
            start += size
            yield [(height, width, index) for index in chosen]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class DefaultSampler(OfRanks):
    """mmengine: by ``rank`` and ``world_size``, with a seed that ranks agree on."""

    def __init__(self, seed: int = 4, round_up: bool = True) -> None:
        super().__init__()
        self.world_size = self.num_replicas
        del self.num_replicas
        self.seed, self.round_up = seed, round_up

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.seed + self.epoch)[self.rank : self.total_size : self.world_size])


class InfiniteSampler(Sampler[int]):
    """mmengine: a generator made in ``__init__``, which every ``__iter__`` goes on with; its len is the dataset's."""

    def __init__(self, size: int = LENGTH, seed: int = 4) -> None:
        self.size, self.seed, self.rank, self.world_size = size, seed, own_rank(), num_ranks()
        self.indices = itertools.islice(self._infinite_indices(), self.rank, None, self.world_size)

    def _infinite_indices(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from self.indices

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """It ignores it."""


class MegatronPretrainingRandomSampler:
    """Megatron: batches by ``data_parallel_rank``; ``consumed_samples`` counts on, and the epoch follows from it."""

    def __init__(self, consumed_samples: int = 0, micro_batch_size: int = 2) -> None:
        self.total_samples, self.consumed_samples, self.micro_batch_size = LENGTH, consumed_samples, micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = own_rank(), num_ranks()
        self.micro_batch_times_data_parallel_size = micro_batch_size * self.data_parallel_size
        self.last_batch_size = self.total_samples % self.micro_batch_times_data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        active = self.total_samples - self.last_batch_size
        self.epoch, current = divmod(self.consumed_samples, active)
        size = self.total_samples // self.micro_batch_times_data_parallel_size * self.micro_batch_size
        first = self.data_parallel_rank * size
        batch: list[int] = []
        for index in permutation(self.epoch, size)[current // self.data_parallel_size :]:
            batch.append(first + index)
            if len(batch) == self.micro_batch_size:
                self.consumed_samples += self.micro_batch_times_data_parallel_size
                yield batch
                batch = []


class DistributedBucketSampler(DistributedSampler[Any]):
    """VITS: a batch sampler of like lengths that is a DistributedSampler; buckets are padded for ranks and batches."""

    def __init__(self, dataset: Any, batch_size: int = 2) -> None:
        super().__init__(dataset, num_ranks(), own_rank(), shuffle=True)
        self.lengths, self.batch_size, self.boundaries = LENGTHS, batch_size, [0, 4, 7, 10]
        pairs = list(itertools.pairwise(self.boundaries))
        self.buckets = [[i for i, n in enumerate(LENGTHS) if low < n <= high] for low, high in pairs]
        whole = self.num_replicas * batch_size
        self.num_samples_per_bucket = [math.ceil(len(bucket) / whole) * whole for bucket in self.buckets]
        self.total_size = sum(self.num_samples_per_bucket)
        self.num_samples = self.total_size // self.num_replicas

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for bucket, size in zip(self.buckets, self.num_samples_per_bucket, strict=True):
            ids = [bucket[i] for i in permutation(self.epoch, len(bucket))]
            own = (ids * size)[:size][self.rank :: self.num_replicas]
            batches += [own[start : start + self.batch_size] for start in range(0, len(own), self.batch_size)]
        self.batches = [batches[i] for i in permutation(self.epoch, len(batches))]
        return iter(self.batches)


LABELS_OF_TWO_LEVELS = [(label, label // 2) for label in LABELS]
