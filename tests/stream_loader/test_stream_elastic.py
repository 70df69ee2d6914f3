"""A stream that goes on with other workers gives every sample of the pass once, however often that happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hf_streams
from support.stream_cases import (
    END,
    OTHER_SIZES,
    SIZES,
    Divided,
    InThisProcess,
    Remembers,
    budgeted,
    chunks,
    loaded,
    mixed,
    numbers,
    observe,
    plain,
    saved,
    steps,
    stream_loader,
)

from lightning_stateful.errors import StatefulWarning, StateMismatchError

WORKERS = range(5)
# Of six shards, and of five.
MORE_THAN_SHARDS = (7, 9)
# Makes a loader on so many workers.
Make = Callable[[int], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:.*in the pipeline:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*worker slots, more than the:lightning_stateful.errors.StatefulWarning"),
]


def of(make_dataset: Callable[[], Any], *, cut: bool = False, **options: Any) -> Make:
    def make(num_workers: int) -> Any:
        dataset = make_dataset()
        config = budgeted(dataset) if cut else None
        return stream_loader(dataset, config=config, num_workers=num_workers, kind=InThisProcess, **options)

    return make


# None begins a source again or leaves some of it to the next pass.
WHOLE: dict[str, Make] = {
    "in blocks": of(chunks),
    "in order": of(partial(chunks, shuffle=False), batch_size=3),
    "one block": of(partial(chunks, buffer_size=99), batch_size=3),
    "one by one": of(chunks, batch_size=None),
    "sizes are known": of(partial(chunks, chunk_sizes=SIZES)),
    "tokens": of(chunks, cut=True),
    "running state": of(lambda: chunks().recurrent(lambda state, number: (number, state + 1), 0), batch_size=3),
    "filtered": of(lambda: chunks().map(lambda number: 2 * number).filter(lambda number: number % 3 > 0)),
    "mixed by batch": of(mixed, batch_size=3),
    "mixed by sample": of(partial(mixed, by="sample", weights=[1, 2]), batch_size=4),
    "mixed tokens": of(mixed, cut=True),
}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Make]:
    folder = tmp_path_factory.mktemp("files")
    files = hf_streams.stream("parquet", folder / "one", SIZES)
    other = hf_streams.stream("arrow", folder / "two", OTHER_SIZES, first=100)
    made = {
        "files": files,
        "batched map": files.map(hf_streams.plus_batch, batched=True, batch_size=3, remove_columns=["n", "text"]),
        "concatenated": datasets.concatenate_datasets([files, other]),
        "shuffle buffer": files.shuffle(seed=2, buffer_size=5),
    }
    return {name: of(lambda dataset=dataset: dataset, collate_fn=numbers_of_rows) for name, dataset in made.items()}


def numbers_of_rows(rows: list[dict[str, Any]]) -> list[int]:
    return [value for row in rows for value in row.values() if isinstance(value, int)]


def finish(loader: Any) -> Counter[int]:
    """What is left of the epoch."""
    return numbers(list(map(plain, loader)))


def assert_complete(make: Make, pairs: Any, stride: int = 1) -> None:
    """From every moment of an epoch, on other workers, the rest of it comes once, and then all of the next."""
    every = finish(make(0))
    assert set(every.values()) == {1}
    for before, now in pairs:
        items, states = observe(lambda before=before: make(before), 200)
        for at in range(random.Random(before).randrange(stride), items.index(END), stride):
            loader = make(now)
            loader.load_state_dict(states[at])
            assert numbers(items[:at]) + finish(loader) == every, f"{before} workers, after {at} steps {now}"
            assert finish(loader) == every, f"the epoch after: {before} workers, after {at} steps {now}"


def test_every_sample_comes_once_from_every_moment_on_any_workers() -> None:
    assert_complete(WHOLE["in blocks"], product((0, 1, 2, 4), (0, 1, 3, 4)))


@pytest.mark.parametrize("name", WHOLE)
def test_every_kind_of_stream_is_complete_on_other_workers(name: str) -> None:
    assert_complete(WHOLE[name], [(0, 3), (4, 1), (3, 2), (7, 9)], stride=6)


@pytest.mark.parametrize("name", ["files", "batched map", "concatenated", "shuffle buffer"])
def test_streams_of_hugging_faces_are_complete_on_other_workers(hugging_face: dict[str, Make], name: str) -> None:
    assert_complete(hugging_face[name], [(0, 3), (9, 1)], stride=5)


class Run:
    """A run on changing workers that counts what each pass has given.

    Args:
        make: Makes a loader on so many workers.
        every: What a pass gives; None if that is not to be looked at.
    """

    def __init__(self, make: Make, every: Counter[int] | None) -> None:
        self.make, self.every = make, every
        self.state: Any = None
        self.served: Counter[int] = Counter()
        self.passes = 0

    def leg(self, num_workers: int, number: int) -> None:
        """Take some steps on other workers; somewhere on the way another goes on from the same state exactly."""
        loader = self.make(num_workers)
        if self.state is not None:
            loader.load_state_dict(self.state)
        middle, items, states = number // 2, [], [saved(loader)]
        for item in islice(steps(loader), number):
            before, self.served = self.served, self.served + numbers([item])
            if self.every is not None and loader.position_report()["pass"] > self.passes:
                self.passes += 1
                whole = Counter({number: self.passes * count for number, count in self.every.items()})
                # The last batch of a pass ends it; where epochs are numbers of steps, the first of the next does.
                assert whole in (before, self.served)
            items.append(item)
            states.append(saved(loader))
        twin = loaded(self.make(num_workers), states[middle])
        rest = items[middle:]
        if rest and rest[0] == END and states[middle] == states[middle + 1]:
            del rest[0]
        assert list(islice(steps(twin), len(rest))) == rest
        assert saved(twin) == states[-1]
        self.state = states[-1]


@given(
    name=st.sampled_from([name for name in WHOLE if name != "running state"]),
    legs=st.lists(
        st.tuples(st.sampled_from([*WORKERS, *MORE_THAN_SHARDS]), st.integers(0, 9)), min_size=4, max_size=12
    ),
)
def test_workers_may_change_any_number_of_times_over_many_passes(name: str, legs: list[tuple[int, int]]) -> None:
    run = Run(WHOLE[name], finish(WHOLE[name](0)))
    for num_workers, number in legs:
        run.leg(num_workers, number)


@pytest.mark.parametrize("steps_per_epoch", [1, 5, 40])
def test_passes_are_complete_where_epochs_are_numbers_of_steps(steps_per_epoch: int) -> None:
    draws = random.Random(steps_per_epoch)
    for dataset, size in ((chunks, 2), (mixed, 5)):
        run = Run(of(dataset, steps_per_epoch=steps_per_epoch, batch_size=size), finish(of(dataset)(0)))
        while run.passes < 4:
            run.leg(draws.choice(WORKERS), draws.randrange(12))


@pytest.mark.parametrize(
    "how", [{"drop_last": True, "batch_size": 4}, {"drop_last": True, "steps_per_epoch": 3}], ids=str
)
@pytest.mark.parametrize("stop", [None, "all_exhausted", "first_exhausted"])
def test_what_is_left_of_a_pass_comes_in_the_next_on_whatever_workers(how: dict[str, Any], stop: Any) -> None:
    draws = random.Random(5)
    make = of(chunks if stop is None else partial(mixed, stop=stop), **how)
    served, state, passes = Counter[int](), None, 0
    for _ in range(40):
        loader = make(draws.choice(WORKERS))
        if state is not None:
            loader.load_state_dict(state)
        for item in islice(steps(loader), draws.randrange(9)):
            served += numbers([item])
            passes = loader.position_report()["pass"] + 1
        state = saved(loader)
        assert max(served.values(), default=0) <= passes
    if stop != "first_exhausted":
        assert passes > 5
        assert min(served.values()) >= passes - 2, "a sample was left out twice"


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_mixtures_that_begin_again_or_end_early_go_on_exactly_after_every_change(stop: str) -> None:
    for seed in range(8):
        draws = random.Random(seed)
        run = Run(of(partial(mixed, stop=stop), batch_size=3), None)
        for _ in range(6):
            run.leg(draws.choice(WORKERS), draws.randrange(16))


def test_a_cycle_gives_every_sample_at_least_once_in_a_pass_on_any_workers() -> None:
    make = of(partial(mixed, stop="cycle"), batch_size=3)
    for before, now in ((0, 3), (4, 0), (3, 2)):
        items, states = observe(lambda before=before: make(before), 14)
        for at in range(items.index(END) if END in items else 14):
            loader = make(now)
            loader.load_state_dict(states[at])
            served = numbers(items[:at]) + finish(loader)
            assert len(served) == sum(SIZES) + sum(OTHER_SIZES)


@pytest.mark.parametrize("dataset", [Divided, Remembers])
def test_a_dataset_that_divides_itself_changes_workers_between_epochs_only(dataset: Any) -> None:
    make = of(dataset)
    items, states = observe(lambda: make(2), 16)
    end = items.index(END)
    with pytest.raises(StateMismatchError, match=r"workers: saved 2, now 3. .* resume on 1 ranks with num_workers=2"):
        make(3).load_state_dict(states[4])

    for state in (states[0], states[end]):
        loader = make(3)
        loader.load_state_dict(state)
        assert finish(loader) == Counter(range(23))


@pytest.mark.parametrize(
    ("make", "num_workers", "words"),
    [
        (
            of(chunks),
            15,
            r"15 worker slots, more than the 6 shards that ChunkedDataset has.* 2\.5 times.*num_workers=6",
        ),
        (of(mixed), 12, r"12 worker slots, more than the 6 shards of source 'one' that MixedStream has.* 2\.0 times"),
        (of(chunks, num_replicas=3, rank=1), 6, r"3 ranks with 6 workers each are 18 worker slots.*num_workers=2"),
        (of(chunks, num_replicas=8, rank=0), 0, r"8 ranks .* for reading and decoding. Use more and smaller shards"),
    ],
)
def test_more_worker_slots_than_shards_are_told_what_that_costs(make: Make, num_workers: int, words: str) -> None:
    with pytest.warns(StatefulWarning, match=words):
        next(iter(make(num_workers)))


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_evaluation_gives_every_sample_once_on_however_many_workers(
    num_shards: int, num_replicas: int, num_workers: int
) -> None:
    sizes = (3, 0, 4, 1, 5)[:num_shards]
    for dataset in (chunks(sizes, shuffle=False), chunks(sizes, shuffle=False).map(lambda number: number)):
        for drop_last in (False, True):
            loaders = [
                of(
                    lambda dataset=dataset: dataset,
                    exact=True,
                    drop_last=drop_last,
                    num_replicas=num_replicas,
                    rank=rank,
                )(num_workers)
                for rank in range(num_replicas)
            ]
            for _ in range(2):
                found = [finish(loader) for loader in loaders]
                if not drop_last:
                    assert sum(found, Counter()) == Counter(range(sum(sizes)))
                else:
                    assert max(sum(found, Counter()).values(), default=1) == 1
