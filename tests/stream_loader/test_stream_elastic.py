"""A stream that goes on with other workers gives every sample of the pass once, however often that happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import datasets
import pytest
from support import hf_streams
from support.quick import thinned
from support.stream_cases import (
    END,
    OTHER_SIZES,
    SIZES,
    Divided,
    InThisProcess,
    Remembers,
    assert_goes_on,
    budgeted,
    chunks,
    mixed,
    numbers,
    observe,
    packed,
    plain,
    saved,
    steps,
    stream_loader,
    tokens,
)

from lightning_stateful.errors import StatefulWarning, StateMismatchError

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
    "one block": of(partial(chunks, buffer_size=99), batch_size=3),
    "one by one": of(partial(chunks, shuffle=False), batch_size=None),
    "tokens": of(chunks, cut=True),
    "packed": of(lambda: packed(chunks()), collate_fn=tokens),
    "packed whole": of(lambda: packed(chunks(), "whole"), collate_fn=tokens, batch_size=3),
    "packed mixture": of(lambda: packed(mixed(), "whole"), collate_fn=tokens),
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
        "batched map": files.map(hf_streams.plus_batch, batched=True, batch_size=3, remove_columns=["n", "text"]),
        "concatenated": datasets.concatenate_datasets([files, other]),
        "shuffle buffer": files.shuffle(seed=2, buffer_size=5),
    }
    return {name: of(lambda dataset=dataset: dataset, collate_fn=numbers_of_rows) for name, dataset in made.items()}


def numbers_of_rows(rows: list[dict[str, Any]]) -> list[int]:
    return [value for row in rows for value in row.values() if isinstance(value, int)]


def finish(loader: Any) -> Counter[int]:
    """The numbers left of the epoch."""
    return numbers(list(map(plain, loader)))


def assert_complete(make: Make, pairs: Any, stride: int = 1) -> None:
    """From every moment of an epoch, on other workers, the rest of it comes once, and then all of the next."""
    every = finish(make(0))
    assert set(every.values()) == {1}
    for before, now in pairs:
        items, states = observe(partial(make, before), 60)
        for at in range(random.Random(before).randrange(stride), items.index(END), stride):
            loader = make(now)
            loader.load_state_dict(states[at])
            assert numbers(items[:at]) + finish(loader) == every, f"{before} workers, after {at} steps {now}"
            assert finish(loader) == every, f"the epoch after: {before} workers, after {at} steps {now}"


def test_every_sample_comes_once_from_every_moment_on_any_workers() -> None:
    assert_complete(WHOLE["in blocks"], [(0, 3), (2, 1), (4, 3)])


# Mixtures by sample share their sources as these do, and those packed whole their documents; mixtures of tokens and
# packed streams also go through many changes below.
@pytest.mark.parametrize("name", thinned(WHOLE, ["mixed by batch", "mixed tokens", "packed", "packed mixture"]))
def test_every_kind_of_stream_is_complete_on_other_workers(name: str) -> None:
    assert_complete(WHOLE[name], [(0, 3), (4, 1), (7, 9)], stride=9)


@pytest.mark.parametrize("name", thinned(["batched map", "concatenated", "shuffle buffer"], ["concatenated"]))
def test_streams_of_hugging_faces_are_complete_on_other_workers(hugging_face: dict[str, Make], name: str) -> None:
    assert_complete(hugging_face[name], [(0, 3), (9, 1)], stride=9)


CHANGING: dict[str, tuple[Make, int]] = {
    **{name: (make, 1) for name, make in WHOLE.items() if name != "filtered"},
    "one step an epoch": (of(chunks, steps_per_epoch=1), 1),
    "long epochs": (of(mixed, steps_per_epoch=40, batch_size=5), 1),
    # What does not fill a batch may wait for the next pass, but never twice.
    "drop_last": (of(chunks, drop_last=True, batch_size=4), 2),
    "steps, drop_last": (of(chunks, drop_last=True, steps_per_epoch=3), 2),
    "first exhausted": (of(partial(mixed, stop="first_exhausted"), drop_last=True), 99),
}


@pytest.mark.parametrize(
    "name",
    thinned(
        CHANGING,
        [
            *("one block", "one by one", "tokens", "mixed by batch", "mixed by sample", "packed whole"),
            *("packed mixture", "steps, drop_last", "long epochs"),
        ],
    ),
)
def test_workers_may_change_any_number_of_times_over_many_passes(name: str) -> None:
    draws, (make, missed) = random.Random(len(name)), CHANGING[name]
    served, state, passes = Counter[int](), None, 1
    for _ in range(30):
        loader = make(draws.choice((0, 1, 2, 3, 4, 7, 9)))
        if state is not None:
            loader.load_state_dict(state)
        for item in islice(steps(loader), draws.randrange(9)):
            served += numbers([item])
            passes = loader.position_report()["pass"] + 1
        state = saved(loader)
        assert max(served.values(), default=0) <= passes
    assert passes > 3
    assert min(served.values()) >= passes - missed


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_mixtures_that_begin_again_or_end_early_go_on_exactly_after_a_change(stop: str) -> None:
    make = of(partial(mixed, stop=stop), batch_size=3)

    def changed(num_workers: int, state: Any) -> Any:
        loader = make(num_workers)
        loader.load_state_dict(state)
        return loader

    for before, now in ((0, 3), (4, 2)):
        _, states = observe(partial(make, before), 12)
        for state in states[::4]:
            assert_goes_on(partial(changed, now, state), [3, 1], total=9)


@pytest.mark.parametrize("dataset", [Divided, Remembers])
def test_a_dataset_that_divides_itself_changes_workers_between_epochs_only(dataset: Any) -> None:
    make = of(dataset)
    items, states = observe(lambda: make(2), 16)
    for now in (3, 0):
        words = rf"num_workers: saved 2, now {now}. .* resume on 1 ranks with num_workers=2"
        with pytest.raises(StateMismatchError, match=words):
            make(now).load_state_dict(states[4])

    for state in (states[0], states[items.index(END) + 1]):
        loader = make(3)
        loader.load_state_dict(state)
        assert finish(loader) == Counter(range(23))


@pytest.mark.parametrize(
    ("make", "num_workers", "words"),
    [
        (of(mixed), 12, r"12 worker slots, more than the 6 shards of source 'one' that MixedStream has.* 2\.0 times"),
        (of(chunks, num_replicas=3, rank=1), 6, r"3 ranks with num_workers=6 are 18 worker slots.*num_workers=2"),
        (of(chunks, num_replicas=8, rank=0), 0, r"8 ranks .* for reading and decoding. Use more and smaller shards"),
    ],
)
def test_more_worker_slots_than_shards_are_told_what_that_costs(make: Make, num_workers: int, words: str) -> None:
    with pytest.warns(StatefulWarning, match=words):
        next(iter(make(num_workers)))


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_gives_every_sample_once_on_however_many_workers(
    num_shards: int, num_replicas: int, num_workers: int, drop_last: bool
) -> None:
    sizes = (3, 0, 4, 1, 5)[:num_shards]
    options = {"exact": True, "drop_last": drop_last, "num_replicas": num_replicas}
    loaders = [of(partial(chunks, sizes), rank=rank, **options)(num_workers) for rank in range(num_replicas)]
    for _ in range(2):
        found = sum((finish(loader) for loader in loaders), Counter())
        if drop_last:
            assert max(found.values(), default=1) == 1
        else:
            assert found == Counter(range(sum(sizes)))
