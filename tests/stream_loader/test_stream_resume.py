"""A loader of streams that is stopped anywhere, any number of times, goes on as if it had not been."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import datasets
import pytest
import torch
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
    RemembersWhereItReads,
    assert_goes_on,
    budgeted,
    chunks,
    drawn,
    loaded,
    mixed,
    numbers,
    observe,
    plain,
    random_legs,
    saved,
    steps,
    stream_loader,
)

from lightning_stateful import MixedStream, check_resume
from lightning_stateful.errors import (
    StateMismatchError,
    StreamError,
)

Case = Callable[..., Any]

pytestmark = [
    # Of workers in this process.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:.*in the pipeline:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:.*interleave_datasets ends:lightning_stateful.errors.StatefulWarning"),
]


def is_even(number: int) -> bool:
    return number % 2 == 0


def total_of(state: int, number: int) -> tuple[int, int]:
    return state + number, state + number


def all_drawn(samples: list[Any]) -> Any:
    """A batch that draws."""
    return drawn([plain(sample) for sample in samples])


def of(make_dataset: Case, **options: Any) -> Case:
    """A case: what makes a loader, given options that come beside its own."""
    return lambda **more: stream_loader(make_dataset(), **{**options, **more})


def of_tokens(make_dataset: Case, **options: Any) -> Case:
    """The same, in batches within a budget."""

    def make(**more: Any) -> Any:
        dataset = make_dataset()
        return stream_loader(dataset, config=budgeted(dataset), **{**options, **more})

    return make


# Hugging Face leaves csv files open where they are not read to their end.
FILES = ("parquet", "arrow", "json", "text")
STOPS = ("all_exhausted", "first_exhausted", "cycle")
CHUNKS: dict[str, Case] = {
    "shuffled": of(chunks),
    "in order": of(partial(chunks, shuffle=False)),
    "one chunk": of(partial(chunks, (17,))),
    "one block": of(partial(chunks, buffer_size=1000), batch_size=3),
    "more batches than samples": of(partial(chunks, (1, 0, 1, 0)), batch_size=4),
    "drop_last": of(chunks, batch_size=4, drop_last=True),
    "drop_last, less than a batch in a pass": of(partial(chunks, (1, 0, 2)), batch_size=5, drop_last=True),
    "one by one": of(chunks, batch_size=None),
    "one by one, collate draws": of(chunks, batch_size=None, collate_fn=drawn),
    "draws": of(partial(chunks, transform=drawn)),
    "collate draws": of(partial(chunks, transform=drawn), collate_fn=all_drawn, batch_size=3),
    "map and filter": of(lambda: chunks().map(drawn).map(lambda found: found[0]).filter(is_even).map(drawn)),
    "windows": of(lambda: chunks().windowed(3, 2), batch_size=3),
    "running state": of(lambda: chunks().recurrent(total_of, 5)),
    "steps of an epoch": of(chunks, steps_per_epoch=5),
    "one step an epoch": of(chunks, steps_per_epoch=1),
    "epochs of several passes": of(chunks, steps_per_epoch=29, batch_size=3),
    "steps, drop_last": of(chunks, steps_per_epoch=4, drop_last=True, batch_size=5),
    "tokens": of_tokens(chunks),
    "tokens in steps": of_tokens(partial(chunks, transform=None), steps_per_epoch=4),
}
MIXED: dict[str, Case] = {
    **{f"{stop} by {by}": of(partial(mixed, stop=stop, by=by)) for by in ("batch", "sample") for stop in STOPS},
    "weights": of(partial(mixed, weights={"one": 3, "two": 1}, temperature=2), batch_size=3),
    "weights by sample": of(partial(mixed, weights=[1, 2], by="sample"), batch_size=4, drop_last=True),
    "weights in steps": of(partial(mixed, weights=[1, 2], stop="cycle"), steps_per_epoch=6),
    "a source gives nothing": of(lambda: MixedStream([chunks(), chunks((0, 0), 100)], stop="cycle"), batch_size=4),
    "a source gives no full batch": of(
        lambda: MixedStream([chunks((2, 9)), chunks((1, 2), 100), chunks((4, 3), 200)], stop="cycle"),
        batch_size=4,
        drop_last=True,
    ),
    "a source has less than a batch, by sample": of(
        lambda: MixedStream([chunks((2, 9)), chunks((1,), 100)], stop="cycle", by="sample", weights=[3, 1]),
        batch_size=4,
        drop_last=True,
    ),
    "mixed tokens": of_tokens(partial(mixed, weights=[2, 1])),
    "mixed, drop_last": of(mixed, drop_last=True, batch_size=5),
}
OWN: dict[str, Case] = {
    "a state of its own": of(Remembers, batch_size=3),
    "a state of its iterator": of(RemembersWhereItReads, batch_size=3),
    "no state": of(Divided, batch_size=3),
    "a state, one by one": of(Remembers, batch_size=None),
    "a state, in steps": of(Remembers, steps_per_epoch=5),
    "no state, collate draws": of(Divided, collate_fn=all_drawn),
}
CASES = {**CHUNKS, **MIXED, **OWN}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face sleeps for seconds wherever a shard of interleaved files is closed."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Streams of Hugging Face's over real files."""
    folder = tmp_path_factory.mktemp("files")
    files = {kind: hf_streams.stream(kind, folder / kind, SIZES) for kind in FILES}
    other = hf_streams.stream("parquet", folder / "other", OTHER_SIZES, first=100)
    more, rows = files["parquet"], files["json"]
    made = {
        **{f"{kind} files": dataset for kind, dataset in files.items()},
        "map": more.map(hf_streams.plus),
        "map that draws": more.map(hf_streams.draw),
        "batched map": rows.map(hf_streams.twice, batched=True, batch_size=3, remove_columns=["text"]),
        "batched map that draws": more.map(hf_streams.draw_batch, batched=True, batch_size=3),
        "filter": more.filter(hf_streams.of_three),
        "concatenated": datasets.concatenate_datasets([more, other]),
        "interleaved": datasets.interleave_datasets([more.take(20), other], seed=5, probabilities=[0.7, 0.3]),
        "shuffle buffer": more.shuffle(seed=2, buffer_size=4),
        "shuffle buffer, map": more.map(hf_streams.plus).shuffle(seed=2, buffer_size=100),
    }
    return {name: of(lambda dataset=dataset: dataset, collate_fn=plain) for name, dataset in made.items()}


@pytest.mark.filterwarnings("ignore:.*has given no batch in an epoch")
@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_stops_at_random_moments_is_exact(name: str) -> None:
    for seed in range(3):
        assert_goes_on(CASES[name], random_legs(seed))


HUGGING_FACE = [
    *(f"{kind} files" for kind in FILES),
    *("map", "map that draws", "batched map", "batched map that draws", "filter", "concatenated", "interleaved"),
    *("shuffle buffer", "shuffle buffer, map"),
]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_stream_of_hugging_faces_goes_on_exactly(hugging_face: dict[str, Case], name: str) -> None:
    make = hugging_face[name]
    assert_goes_on(make, random_legs(len(name)), total=25)
    assert_goes_on(partial(make, drop_last=True, batch_size=4), [3, 5, 1], total=14)
    assert_goes_on(partial(make, batch_size=None, steps_per_epoch=7), [6, 2, 7, 11], total=28)


@given(data=st.data())
def test_any_configuration_goes_on_exactly_on_any_number_of_workers(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=8))
    options = {"shuffle": data.draw(st.booleans()), "buffer_size": data.draw(st.sampled_from([1, 2, 6, 99]))}
    how: dict[str, Any] = {
        "num_workers": data.draw(st.integers(0, 4)),
        "batch_size": data.draw(st.sampled_from([None, 1, 2, 5])),
        "steps_per_epoch": data.draw(st.sampled_from([None, None, 1, 6])) if sum(sizes) > 20 else None,
    }
    how["drop_last"] = how["batch_size"] is not None and how["steps_per_epoch"] is None and data.draw(st.booleans())
    legs = data.draw(st.lists(st.integers(0, 9), max_size=6))
    is_mixed, is_cut, by = (
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(["batch", "sample"])),
    )
    stop = data.draw(st.sampled_from(["all_exhausted", "first_exhausted"]))

    def make() -> Any:
        dataset: Any = chunks(sizes, **options)
        if is_mixed:
            dataset = mixed(by="batch" if is_cut else by, stop=stop)
        if is_cut:
            return stream_loader(dataset, config=budgeted(dataset), kind=InThisProcess, num_workers=how["num_workers"])
        return stream_loader(dataset, kind=InThisProcess, **how)

    if any(sizes):
        assert_goes_on(make, legs, total=24)


@pytest.mark.parametrize(
    "name", ["shuffled", "drop_last", "steps of an epoch", "tokens", "weights", "a state of its own"]
)
def test_the_audit_finds_nothing(name: str) -> None:
    make = CASES[name]

    result = check_resume(lambda ranks, rank: make(num_replicas=ranks, rank=rank), stops="every", chain=(1, 0, 3, 2))

    assert result, result


@pytest.mark.parametrize("name", ["shuffled", "drop_last", "mixed tokens", "no state"])
def test_told_the_epoch_or_not_a_run_is_the_same(name: str) -> None:
    make = CASES[name]
    expected, _ = observe(make, 40)

    result = check_resume(lambda ranks, rank: make(), set_epoch=True)
    loader, found = make(), []
    while len(found) < 40:
        loader.set_epoch(loader.epoch)
        found += [*map(plain, loader), END]

    assert result, result
    assert found[:40] == expected


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    loader = CHUNKS["shuffled"]()
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
    after_the_last = saved(loader)
    assert loader.epoch == 1

    with pytest.raises(StopIteration):
        next(iterator)
    assert saved(loader) == after_the_last
    iter(loader)
    assert saved(loader) == after_the_last
    assert [END, *islice(steps(loaded(CHUNKS["shuffled"](), after_the_last)), 20)] == observe(CHUNKS["shuffled"], 33)[
        0
    ][12:]


def test_an_iterator_goes_on_where_a_state_was_loaded_meanwhile() -> None:
    items, states = observe(CHUNKS["shuffled"], 8)
    loader = CHUNKS["shuffled"]()
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(states[6])

    assert saved(loader) == states[6]
    assert plain(next(iterator)) == items[6]
    assert saved(loader) == states[7]


@pytest.mark.parametrize("how", [{}, {"steps_per_epoch": 9}, {"drop_last": True, "batch_size": 4}], ids=str)
def test_a_pass_that_is_broken_off_begins_again_where_it_began(how: dict[str, Any]) -> None:
    items, states = observe(lambda: stream_loader(chunks(), **how), 24)
    for at in (0, 2, items.index(END) + 1, items.index(END) + 2):
        loader = loaded(stream_loader(chunks(), **how), states[at])
        for count in (1, 2, 2):
            assert list(islice(map(plain, loader), count)) == items[at : at + count]
            assert saved(loader) == states[at + count]


@pytest.mark.parametrize("at", [3, 31])
def test_a_pass_that_is_broken_off_late_begins_again_where_it_began(at: int) -> None:
    def make() -> Any:
        return stream_loader(chunks((20, 20, 20, 20)), steps_per_epoch=30)

    items, states = observe(make, 60)
    loader = loaded(make(), states[at])
    assert list(islice(map(plain, loader), 20)) == items[at : at + 20]

    assert list(islice(map(plain, loader), 20)) == items[at : at + 20]


def test_an_iterator_takes_nothing_from_the_one_that_was_begun_after_it() -> None:
    items, states = observe(CHUNKS["shuffled"], 9)
    loader = CHUNKS["shuffled"]()
    first = iter(loader)
    next(first)
    second = iter(loader)

    found = []
    for count in range(8):
        found.append(plain(next(second)))
        # It may go on, or be over, or refuse to go on.
        with contextlib.suppress(StopIteration, StreamError):
            assert plain(next(first)) == items[1 + count]
    assert found == items[:8]
    assert saved(loader) == states[8]


def test_set_epoch_keeps_a_place_in_that_epoch_and_leaves_any_other() -> None:
    items, states = observe(CHUNKS["shuffled"], 30)
    loader = loaded(CHUNKS["shuffled"](), states[17])
    loader.set_epoch(1)
    assert saved(loader) == states[17]

    loader.set_epoch(0)
    assert list(islice(steps(loader), 30)) == items
    loader.set_epoch(7)
    assert loader.epoch == 7
    assert numbers(list(map(plain, loader))) == numbers(items[:12])
    assert loader.epoch == 8


def test_drop_last_leaves_nothing_out_for_good() -> None:
    loader = stream_loader(chunks(), batch_size=5, drop_last=True)
    served = numbers(list(islice(steps(loader), 240)))

    assert max(served.values()) - min(served.values()) <= 1
    assert len(served) == sum(SIZES)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_drop_last_serves_full_batches_only_of_a_dataset_that_divides_itself(num_workers: int) -> None:
    loader = stream_loader(Divided(13), batch_size=3, drop_last=True, num_workers=num_workers, kind=InThisProcess)

    for _ in range(2):
        assert {len(batch[0]) for batch in loader} == {3}


def test_without_seeded_samples_the_process_keeps_its_randomness() -> None:
    def read() -> list[Any]:
        torch.manual_seed(len(found))
        return list(map(plain, stream_loader(chunks(transform=drawn), seed_samples=False)))

    found: list[Any] = []
    found.append(read())
    assert found[0] != read()


def spoil(data: Any) -> None:
    """Change all that can be changed in plain data."""
    values = list(data.values() if isinstance(data, dict) else data)
    for value in values:
        if isinstance(value, (dict, list)):
            spoil(value)
    if isinstance(data, list):
        data.append("spoiled")
    else:
        data.update({key: "spoiled" for key, value in data.items() if not isinstance(value, (dict, list))})


@pytest.mark.parametrize("name", ["shuffled", "running state", "mixed, drop_last", "a state of its own"])
def test_whoever_changes_a_state_changes_no_loader(name: str) -> None:
    items, states = observe(CASES[name], 12)
    loader, again = CASES[name](), CASES[name]()
    iterator = steps(loader)
    assert list(islice(iterator, 5)) == items[:5]
    spoil(loader.state_dict())
    given = copy.deepcopy(states[5])
    again.load_state_dict(given)
    spoil(given)

    assert saved(loader) == saved(again) == states[5]
    assert list(islice(iterator, 5)) == list(islice(steps(again), 5)) == items[5:10]


OTHERS: dict[str, Callable[[], Any]] = {
    "seed: saved 3, now 4": lambda: stream_loader(chunks(seed=4)),
    "batch_size: saved 2, now 3": lambda: stream_loader(chunks(), batch_size=3),
    "buffer_size: saved 5, now 6": lambda: stream_loader(chunks(buffer_size=6)),
    "shuffle: saved True, now False": lambda: stream_loader(chunks(shuffle=False)),
    "drop_last: saved False, now True": lambda: stream_loader(chunks(), drop_last=True),
    "dataset.chunks: saved 6, now 5": lambda: stream_loader(chunks(SIZES[:5])),
    "dataset.names": lambda: stream_loader(chunks((4, *SIZES[1:]))),
    "steps": lambda: stream_loader(chunks().map(is_even)),
    "sources": lambda: stream_loader(mixed()),
    "read_ahead": lambda: (lambda stream: stream_loader(stream, config=budgeted(stream)))(chunks()),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_another_stream_is_refused_and_changes_nothing(what: str) -> None:
    _, states = observe(CHUNKS["shuffled"], 5)
    other = OTHERS[what]()
    expected, own = observe(OTHERS[what], 9)
    assert list(islice(map(plain, other), 2)) == expected[:2]

    with pytest.raises(StateMismatchError, match=what):
        other.load_state_dict(states[5])
    assert saved(other) == own[2]
    assert list(islice(steps(other), 9)) == expected


def test_an_accepted_difference_that_shards_do_not_allow_is_named() -> None:
    _, states = observe(CHUNKS["shuffled"], 5)
    fewer = stream_loader(chunks(SIZES[:2]), accept=("dataset",))
    expected, own = observe(lambda: stream_loader(chunks(SIZES[:2])), 6)
    assert list(islice(steps(fewer), 1)) == expected[:1]

    with pytest.raises(StateMismatchError, match=r"The loader's state(.|\n)*saved 6, now 2.*Within a pass this cannot"):
        fewer.load_state_dict(states[5])
    assert saved(fewer) == own[1]


def test_a_dataset_of_hugging_faces_stays_as_it_is(hugging_face: dict[str, Case]) -> None:
    make = hugging_face["map that draws"]
    dataset = make().dataset
    before = [dict(row, drawn=None) for row in dataset], dataset.state_dict()
    for _ in islice(steps(make()), 5):
        pass

    assert ([dict(row, drawn=None) for row in dataset], dataset.state_dict()) == before
