"""What resuming any user's sampler costs: fast-forwarding it, batches a second, states, and the start."""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.checkpoint import json_bytes, torch_bytes
from benchmarks.measure import Row, in_child, interleave, median_ratio, report, seconds, short, target
from benchmarks.throughput import Images, Ints
from lightning_stateful import DDPSamplerWrapper, patch_dataloader
from lightning_stateful.state import pack

CLAIM = (
    "Fast-forwarding a sampler costs what iterating it costs, and a patched loader is as fast as the loader that it "
    "was made of. Samplers are written as people write them; a loader over a plain shuffle is no such case, because an "
    "order takes the place of its sampler."
)
BATCH = 32
MILLION = 10**6


# Samplers


class Permuted(Sampler[int]):
    """Every index once, shuffled anew in every epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class WithoutLen(Sampler[int]):
    """The same, which does not say how many there are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class ClassBalanced(Sampler[list[int]]):
    """Batches of 4 of 100 classes, each with an equal number of samples, drawn by a generator of its own."""

    def __init__(self, num_batches: int) -> None:
        self.by_class = [list(range(label, 10_000, 100)) for label in range(100)]
        self.num_batches = num_batches
        self.random = random.Random(5)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.num_batches):
            chosen = self.random.sample(self.by_class, 4)
            yield [index for members in chosen for index in self.random.choices(members, k=BATCH // 4)]


class Ready(Sampler[list[int]]):
    """Batches that it holds, handed out as they are: nothing that yields lists is cheaper."""

    def __init__(self, num_batches: int, batch_size: int = BATCH, length: int = 50_000) -> None:
        indices = list(range(length))
        starts = (number * batch_size % (length - batch_size + 1) for number in range(num_batches))
        self.batches = [indices[start : start + batch_size] for start in starts]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Shuffled(Ready):
    """The same in an order of a generator of its own."""

    def __init__(self, num_batches: int, batch_size: int = BATCH, length: int = 50_000) -> None:
        super().__init__(num_batches, batch_size, length)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[number]


class ShuffledInPlace(Ready):
    """The same, of which the list itself is shuffled."""

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


def random_batches(num_batches: int) -> BatchSampler:
    """A BatchSampler with a generator of its own: that of a plain shuffle would be replaced by an order."""
    samples = RandomSampler(range(num_batches * BATCH), generator=torch.Generator())
    return BatchSampler(samples, BATCH, drop_last=False)


# Fast-forwarding


@dataclass(frozen=True)
class Stop:
    """A sampler, and how far on it was stopped.

    Attributes:
        title: Of the sampler.
        make: The sampler, of so many items.
        items: What it had yielded.
        option: The argument of a DataLoader that takes it.
        cuts: Indices that one of its items counts for where the loader counts indices.
        rounds: How often.
    """

    title: str
    make: Callable[[int], Any]
    items: int
    option: str = "batch_sampler"
    cuts: int = 1
    rounds: int = 5

    @property
    def size(self) -> int:
        """Samples in a batch of the loader, where the loader cuts them."""
        return 1 if self.option == "batch_sampler" else BATCH

    def subjects(self, items: int) -> tuple[Any, dict[str, tuple[Any, int, int]]]:
        """The sampler, and those that fast-forward it: of each, how many slots ``items`` and the last are."""
        sampler = self.make(items + 2 * BATCH)
        how = {"batch_size": BATCH} if self.option == "sampler" else {}
        loader = patch_dataloader(DataLoader(Ints(10**9), **{self.option: sampler}, **how), seed_samples=False)
        return sampler, {
            "DDPSamplerWrapper": (DDPSamplerWrapper(sampler), items, 1),
            "patch_dataloader": (loader, items * self.cuts, self.size * self.cuts),
        }


STOPS = (
    Stop("BatchSampler over RandomSampler", random_batches, MILLION, cuts=BATCH, rounds=3),
    Stop("class-balanced batches", ClassBalanced, MILLION, rounds=3),
    Stop("batches that it holds", Ready, MILLION, rounds=15),
    Stop("indices, 1e6", Permuted, MILLION, "sampler", rounds=9),
    Stop("indices, 1e7", Permuted, 10 * MILLION, "sampler"),
)
ITSELF = "for _ in islice(sampler, n)"


def state_after(subject: Any, slots: int, last: int) -> dict[str, Any]:
    """The state after so many slots: it is fast-forwarded up to the last item, and only that is served."""
    subject.set_epoch(0)
    state: dict[str, Any] = subject.state_dict()
    # Without notes of items that an earlier pass of this process may have left.
    progress = {**state["progress"], "consumed": slots - last, state["kind"]: []}
    subject.load_state_dict(pack(state["kind"], state["order_version"], state["config"], progress))
    next(iter(subject))
    state = subject.state_dict()
    assert state["progress"]["consumed"] == slots
    return state


def resumed(subject: Any, state: dict[str, Any]) -> tuple[Any, Any]:
    """The first item after a state, and what has to be kept."""
    subject.load_state_dict(state)
    iterator = iter(subject)
    return next(iterator), iterator


def iterated(sampler: Any, items: int) -> Any:
    iterator = iter(sampler)
    for _ in itertools.islice(iterator, items):
        pass
    return iterator


def leanest(sampler: Any, items: int) -> Any:
    """The same with nothing at all between two items."""
    iterator = iter(sampler)
    return next(itertools.islice(iterator, items, None)), iterator


def check(stop: Stop) -> None:
    """Check :func:`state_after` against a state really iterated to, and the item that follows."""
    items = 64 * BATCH
    for subject, slots, last in stop.subjects(items)[1].values():
        iterator = iter(subject)
        for _ in itertools.islice(iterator, slots // last):
            pass
        state, following = subject.state_dict(), next(iterator)
        assert state_after(subject, slots, last) == state
        assert str(resumed(subject, state)[0]) == str(following)


def fast_forwarding() -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    for stop in STOPS:
        check(stop)
        sampler, subjects = stop.subjects(stop.items)
        tasks: dict[str, Callable[[], object]] = {
            ITSELF: partial(iterated, sampler, stop.items),
            "next(islice(sampler, n, None))": partial(leanest, sampler, stop.items),
        }
        for name, (subject, slots, last) in subjects.items():
            tasks[name] = partial(resumed, subject, state_after(subject, slots, last))
        timed = {name: partial(seconds, task, time.process_time) for name, task in tasks.items()}
        gc.freeze()
        figures = interleave(timed, stop.rounds)
        gc.unfreeze()
        peer = figures[ITSELF]
        rows += [
            {
                "sampler": stop.title,
                "by": name,
                "ms, best": min(took) * 1e3,
                "ms, median": statistics.median(took) * 1e3,
                "over itself, best": min(took) / min(peer),
                "over itself, median": 1 / median_ratio(peer, took),
            }
            for name, took in figures.items()
        ]
        del sampler, subjects, tasks, timed
        gc.collect()
    targets = [
        target(f"{row['by']} over the sampler itself: {row['sampler']}", row["over itself, best"], at_most=1.05)
        for row in rows
        if row["by"] in ("DDPSamplerWrapper", "patch_dataloader")
    ]
    return rows, targets


# Batches a second

PEER = "DataLoader"
BARE = "patched, seed_samples=False"
SEEDED = "patched, seed_samples=True"
CASES = (
    # what, dataset, batch size, workers, samples, rounds
    ("ints", Ints, 16, 0, 72_000, 15),
    ("ints", Ints, 16, 2, 24_000, 9),
    ("3x32x32 float tensors", Images, 64, 0, 44_800, 9),
    ("3x32x32 float tensors", Images, 64, 2, 32_000, 9),
)


def plain_loader(dataset: Any, batch_size: int, kind: str, num_workers: int = 0) -> DataLoader[Any]:
    """A loader over a user's sampler of the dataset."""
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    if kind == "batch sampler":
        batches = Shuffled(len(dataset) // batch_size, batch_size, len(dataset))
        return DataLoader(dataset, batch_sampler=batches, **options)
    return DataLoader(dataset, sampler=Permuted(len(dataset)), batch_size=batch_size, **options)


def cpu_seconds() -> float:
    """CPU time of this process and of all workers so far, in steps of 10 ms."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children()))


def epoch(loader: Any, spent: list[float]) -> float:
    """Seconds of an epoch: without workers CPU time, as on an idle machine; with them wall time.

    Args:
        loader: The loader.
        spent: CPU time of all processes is added to it.
    """
    before = cpu_seconds()

    def run() -> None:
        for _ in loader:
            pass

    took = seconds(run, time.perf_counter if loader.num_workers else time.process_time)
    spent.append(cpu_seconds() - before if loader.num_workers else took)
    return took


def rates(dataset: Any, batch_size: int, num_workers: int, rounds: int, kind: str) -> list[Row]:
    make = partial(plain_loader, dataset, batch_size, kind, num_workers)
    subjects: dict[str, Any] = {
        PEER: make(),
        BARE: patch_dataloader(make(), seed_samples=False),
        SEEDED: patch_dataloader(make()),
    }
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for loader in subjects.values():
        epoch(loader, [])  # workers start
    figures = interleave({name: partial(epoch, loader, spent[name]) for name, loader in subjects.items()}, rounds)
    return [
        {
            "sampler": kind,
            "loader": name,
            "batches/s, best": len(subjects[name]) / min(took),
            "batches/s, median": len(subjects[name]) / statistics.median(took),
            "ratio, best": min(figures[PEER]) / min(took),
            "ratio, median": median_ratio(figures[PEER], took),
            "ratio of CPU, best": min(spent[PEER]) / min(spent[name]),
        }
        for name, took in figures.items()
    ]


def throughput() -> tuple[dict[str, list[Row]], list[Row]]:
    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    for what, kind, batch_size, num_workers, length, rounds in CASES:
        dataset = kind(length)
        clock = "wall time" if num_workers else "CPU time"
        rows: list[Row] = []
        for sampler in ("batch sampler", "index sampler"):
            rows += rates(dataset, batch_size, num_workers, rounds, sampler)
        tables[f"{length:,} {what}, batches of {batch_size}, {num_workers} workers, {rounds} epochs each, {clock}"] = (
            rows
        )
        targets += [
            target(
                f"patched unseeded over unpatched: {what}, {num_workers} workers, {row['sampler']}",
                row["ratio, best"],
                at_least=0.97,
            )
            for row in rows
            if row["loader"] == BARE
        ]
    return tables, targets


def ranks() -> list[Row]:
    """Rank 0 of 8, whose sampler yields eight times as much, beside one rank with as many batches of its own."""
    rows: list[Row] = []
    for what, kind, batch_size, _, length, rounds in CASES[::2]:
        for sampler in ("batch sampler", "index sampler"):
            alone = plain_loader(kind(length), batch_size, sampler)
            eighth = plain_loader(kind(8 * length), batch_size, sampler)
            ranked = patch_dataloader(eighth, seed_samples=False, num_replicas=8, rank=0)
            assert len(ranked) == len(alone)
            subjects: dict[str, Any] = {"DataLoader, 1 rank": alone, "patched, rank 0 of 8": ranked}
            figures = interleave({name: partial(epoch, loader, []) for name, loader in subjects.items()}, rounds)
            one, of_eight = figures.values()
            rows.append(
                {
                    "samples": what,
                    "sampler": sampler,
                    "DataLoader, 1 rank, batches/s": len(alone) / min(one),
                    "patched, rank 0 of 8, batches/s": len(alone) / min(of_eight),
                    "ratio, best": min(one) / min(of_eight),
                    "ratio, median": median_ratio(one, of_eight),
                }
            )
    return rows


def rare() -> list[Row]:
    """Samplers that ask for more, without workers, beside the same unpatched."""
    length, size = 16_000, 16
    dataset = Ints(length)
    many = length // size

    def torchdatas() -> Any:
        return StatefulDistributedSampler(dataset, num_replicas=1, rank=0)

    samples = partial(DataLoader, dataset, batch_size=size)
    bare = partial(patch_dataloader, seed_samples=False)
    # Of each, the loader as it is and what becomes of it, and how many batches of it are timed.
    cases: dict[str, tuple[Any, Any, int]] = {
        "without len, patched": (samples(sampler=WithoutLen(length)), bare(samples(sampler=WithoutLen(length))), many),
        "indices in a DDPSamplerWrapper, unpatched": (
            samples(sampler=Permuted(length)),
            samples(sampler=DDPSamplerWrapper(Permuted(length))),
            many,
        ),
        "batches in a DDPSamplerWrapper, unpatched": (
            DataLoader(dataset, batch_sampler=Ready(many, size, length)),
            DataLoader(dataset, batch_sampler=DDPSamplerWrapper(Ready(many, size, length))),
            many,
        ),
        "StatefulDistributedSampler's own state, patched": (
            samples(sampler=torchdatas()),
            bare(samples(sampler=DDPSamplerWrapper(torchdatas()))),
            many,
        ),
    }
    rows: list[Row] = []
    for name, (own, subject, count) in cases.items():
        timed = {
            which: partial(seconds, partial(iterated, loader, count + 1), time.process_time)
            for which, loader in (("own", own), ("subject", subject))
        }
        figures = interleave(timed, 7)
        one, other = figures.values()
        rows.append(
            {
                "sampler": name,
                "DataLoader, batches/s": count / min(one),
                "batches/s": count / min(other),
                "ratio, best": min(one) / min(other),
                "ratio, median": median_ratio(one, other),
                "us more a batch": (min(other) - min(one)) / count * 1e6,
            }
        )
    return rows


# States

SERVED = 100_000


def state_subjects() -> dict[str, Any]:
    many, size = SERVED + 100, 16
    samples = Ints(many * size)
    torchdatas = StatefulDistributedSampler(samples, num_replicas=1, rank=0)
    loaders: dict[str, DataLoader[Any]] = {
        "fast-forward: class-balanced batches": DataLoader(samples, batch_sampler=ClassBalanced(many)),
        "fast-forward: indices": DataLoader(samples, sampler=Permuted(len(samples)), batch_size=size),
        "own state: StatefulDistributedSampler": DataLoader(
            samples, sampler=DDPSamplerWrapper(torchdatas), batch_size=size
        ),
    }
    return {name: patch_dataloader(loader, seed_samples=False) for name, loader in loaders.items()}


def states() -> list[Row]:
    rows: list[Row] = []
    running = []
    for name, loader in state_subjects().items():
        running.append((name, loader, iterated(loader, SERVED)))
    for name, loader, _ in running:

        def ask(loader: Any = loader) -> None:
            for _ in range(200):
                loader.state_dict()

        took = [seconds(ask, time.process_time) / 200 for _ in range(5)]
        state = loader.state_dict()
        json.dumps(state)
        rows.append(
            {
                "sampler": name,
                "us for state_dict(), best": min(took) * 1e6,
                "median": statistics.median(took) * 1e6,
                "bytes as JSON": json_bytes(state),
                "bytes by torch.save": torch_bytes(state),
            }
        )
    return rows


# The start, an epoch, a resume


class Labels(Sampler[int]):
    """A list of labels as long as the dataset, drawn from in another order in every epoch."""

    def __init__(self, length: int) -> None:
        self.labels = list(range(length))

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(self.labels, len(self.labels)))


class Told(Labels):
    """The same by the epoch that it is told, as torch's DistributedSampler."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take another epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(self.labels, len(self.labels)))


class Records(Labels):
    """A list of dicts, sorted by one of their values and shuffled within."""

    def __init__(self, length: int) -> None:
        self.labels: Any = [{"path": str(number), "speaker": number % 100} for number in range(length)]

    def __iter__(self) -> Iterator[int]:
        def key(index: int) -> tuple[int, float]:
            return self.labels[index]["speaker"], random.random()

        return iter(sorted(range(len(self.labels)), key=key))


class Classes(Sampler[list[int]]):
    """Batches of 4 samples of each of 16 classes, of 50,000."""

    def __init__(self, length: int) -> None:
        self.by_class: dict[int, list[int]] = {}
        for index in range(length):
            self.by_class.setdefault(index % 50_000, []).append(index)

    def __len__(self) -> int:
        return sum(map(len, self.by_class.values())) // 64

    def __iter__(self) -> Iterator[list[int]]:
        classes = list(self.by_class)
        for _ in range(len(self)):
            chosen = random.sample(classes, 16)
            yield [index for label in chosen for index in random.sample(self.by_class[label], 4)]


class Planned(Sampler[list[int]]):
    """Batches of 64 samples of like lengths, all planned before the first."""

    def __init__(self, length: int) -> None:
        self.lengths = torch.arange(length) % 500

    def __len__(self) -> int:
        return -(-len(self.lengths) // 64)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.argsort(self.lengths + torch.rand(len(self.lengths))).tolist()
        batches = [order[first : first + 64] for first in range(0, len(order), 64)]
        random.shuffle(batches)
        yield from batches


# The sampler, and whether it yields batches.
STARTS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "1e6 labels": (Labels, False),
    "1e6 labels, set_epoch": (Told, False),
    "1e6 dicts": (Records, False),
    "50,000 classes": (Classes, True),
    "planned batches": (Planned, True),
    "a shuffle": (Permuted, False),
}


ROUNDS = 3


def start(name: str) -> Row:
    """The cost of a sampler of a million beside its own pass; medians of rounds of both, for a child process."""
    make, is_batched = STARTS[name]
    rounds = [_start_once(make, is_batched) for _ in range(ROUNDS)]
    return {"sampler": name, **{column: statistics.median(row[column] for row in rounds) for column in rounds[0]}}


def _start_once(make: Callable[[int], Any], is_batched: bool) -> dict[str, float]:
    def loader(sampler: Any) -> DataLoader[Any]:
        samples = Ints(MILLION)
        how: dict[str, Any] = {"batch_sampler": sampler} if is_batched else {"sampler": sampler, "batch_size": 64}
        return DataLoader(samples, **how)

    plain, given = loader(make(MILLION)), loader(make(MILLION))
    gc.freeze()
    batches: Any = plain.batch_sampler

    def timed(iterable: Any, items: int) -> float:
        return seconds(partial(iterated, iterable, items), time.process_time)

    # Before and after: a pass takes longer once a process has given memory back in pieces.
    own, first = timed(batches, MILLION), timed(batches, 1)
    made: list[Any] = []

    def begun() -> None:
        made.append(patch_dataloader(given))
        iterated(made[0].plan(0).batches(0), 1)

    started = seconds(begun, time.process_time)
    whole = timed(made[0].plan(1).batches(0), MILLION)
    half = made[0].plan(2)
    middle = half.num_steps // 2
    iterated(half.batches(0), middle)
    rest = made[0].plan(2, half.progress_after(middle))
    resumed_in = timed(rest.batches(0), 1)
    own = (own + timed(batches, MILLION)) / 2
    return {
        "s for its own pass": own,
        "start, more than torch's, in own passes": (started - first) / own,
        "an epoch, in own passes": whole / own,
        "a resume in the middle, in own passes": resumed_in / own,
        "us more a batch": (whole - own) / half.num_steps * 1e6,
    }


def starts() -> tuple[list[Row], list[Row]]:
    rows = [in_child(start, name) for name in STARTS]
    targets: list[Row] = []
    for row in rows:
        name, values = row["sampler"], list(row.values())
        targets += [
            target(f"start in own passes: {name}", values[2], at_most=1.5),
            target(f"an epoch in own passes: {name}", values[3], at_most=1.2),
            target(f"a resume in own passes: {name}", values[4], at_most=1.0),
        ]
    return rows, targets


def main() -> None:
    warnings.simplefilter("ignore")  # a long fast-forward says how long it took; torchdata calls what torch deprecates
    torch.set_num_threads(1)
    forwarded, targets = fast_forwarding()
    tables = {
        f"load_state_dict to the first item, {short(MILLION)} batches of {BATCH} or as many indices as said": forwarded
    }
    rate_tables, rate_targets = throughput()
    tables |= rate_tables
    tables["Rank 0 of 8 beside one rank with as many batches, no workers, CPU time"] = ranks()
    tables["Samplers that ask for more, ints in batches of 16, no workers, CPU time"] = rare()
    tables[f"A state after {short(SERVED)} batches"] = states()
    tables["Samplers of a million, begun, iterated and resumed, CPU time"], start_targets = starts()
    report("samplers", CLAIM, tables, [*targets, *rate_targets, *start_targets])


if __name__ == "__main__":
    main()
