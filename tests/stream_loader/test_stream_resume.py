"""A loader of streams that is stopped anywhere, any number of times, goes on as if it had not been."""

from __future__ import annotations

import contextlib
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
    drawn_document,
    loaded,
    mixed,
    numbers,
    observe,
    packed,
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
    pytest.mark.filterwarnings("ignore:.*interleave_datasets works on each:lightning_stateful.errors.StatefulWarning"),
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


SHUFFLED = of(chunks)
SMALL: dict[str, Any] = {"batch_size": 4, "drop_last": True}
CASES: dict[str, Case] = {
    "shuffled": SHUFFLED,
    "in order": of(partial(chunks, shuffle=False), batch_size=3),
    "one chunk in one block": of(partial(chunks, (17,), buffer_size=1000)),
    "more batches than samples": of(partial(chunks, (1, 0, 1, 0)), batch_size=4),
    "drop_last": of(chunks, **SMALL),
    "drop_last, less than a batch in a pass": of(partial(chunks, (1, 0, 2)), **SMALL),
    "one by one, collate draws": of(chunks, batch_size=None, collate_fn=drawn),
    "draws": of(partial(chunks, transform=drawn), collate_fn=all_drawn, batch_size=3),
    "map and filter": of(lambda: chunks().map(drawn).map(lambda found: found[0]).filter(is_even).map(drawn)),
    "running windows": of(lambda: chunks().recurrent(total_of, 5).windowed(3, 2), batch_size=3),
    "one step an epoch": of(chunks, steps_per_epoch=1),
    "epochs of several passes": of(chunks, steps_per_epoch=29, batch_size=3),
    "steps, drop_last": of(chunks, steps_per_epoch=4, **SMALL),
    "tokens": of_tokens(chunks),
    "tokens in steps": of_tokens(chunks, steps_per_epoch=4),
    **{f"mixed, {stop}": of(partial(mixed, stop=stop)) for stop in ("all_exhausted", "first_exhausted", "cycle")},
    "mixed by sample": of(partial(mixed, stop="cycle", weights=[1, 2], by="sample"), **SMALL),
    "mixed in steps": of(partial(mixed, weights={"one": 3, "two": 1}, temperature=2), steps_per_epoch=6),
    "mixed tokens": of_tokens(partial(mixed, weights=[2, 1])),
    "packed": of(lambda: packed(chunks())),
    "packed whole, lengths that are drawn": of(lambda: packed(chunks(), "whole", drawn_document), batch_size=3),
    "packed in steps": of(lambda: packed(chunks(), "whole"), steps_per_epoch=4),
    "packed mixture": of(lambda: packed(mixed(weights=[1, 2], by="sample", stop="cycle")), **SMALL),
    "a source gives nothing": of(lambda: MixedStream([chunks(), chunks((0, 0), 100)], stop="cycle"), batch_size=4),
    "a source gives no full batch": of(
        lambda: MixedStream([chunks((2, 9)), chunks((1, 2), 100), chunks((4, 3), 200)], stop="cycle"), **SMALL
    ),
    "a state of its own": of(Remembers, batch_size=3),
    "a state of its iterator": of(RemembersWhereItReads, batch_size=None),
    "a state, in steps": of(Remembers, steps_per_epoch=5),
    "no state, collate draws": of(Divided, collate_fn=all_drawn),
}


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
        "map that draws": more.map(hf_streams.draw),
        "batched map": rows.map(hf_streams.twice, batched=True, batch_size=3, remove_columns=["text"]),
        "batched map that draws": more.map(hf_streams.draw_batch, batched=True, batch_size=3),
        "concatenated": datasets.concatenate_datasets([more, other]),
        "interleaved": datasets.interleave_datasets([more.take(20), other], seed=5, probabilities=[0.7, 0.3]),
        "shuffle buffer": more.map(hf_streams.plus).shuffle(seed=2, buffer_size=4),
    }
    return {name: of(lambda dataset=dataset: dataset, collate_fn=plain) for name, dataset in made.items()}


@pytest.mark.filterwarnings("ignore:.*has given no batch in an epoch")
@pytest.mark.filterwarnings("ignore:Source .* has given nothing in pass")
@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_stops_at_random_moments_is_exact(name: str) -> None:
    assert_goes_on(CASES[name], random_legs(len(name)))


HUGGING_FACE = [
    *(f"{kind} files" for kind in FILES),
    *("map that draws", "batched map", "batched map that draws", "concatenated", "interleaved", "shuffle buffer"),
]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_stream_of_hugging_faces_goes_on_exactly(hugging_face: dict[str, Case], name: str) -> None:
    make = hugging_face[name]
    assert_goes_on(partial(make, drop_last=True), [4, 0, 8, 1, 3], total=25)
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


@pytest.mark.parametrize("name", ["drop_last", "no state, collate draws"])
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
    loader = SHUFFLED()
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
    assert [END, *islice(steps(loaded(SHUFFLED(), after_the_last)), 20)] == observe(SHUFFLED, 33)[0][12:]


def test_an_iterator_goes_on_where_a_state_was_loaded_meanwhile() -> None:
    items, states = observe(SHUFFLED, 8)
    loader = SHUFFLED()
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(states[6])

    assert saved(loader) == states[6]
    assert plain(next(iterator)) == items[6]
    assert saved(loader) == states[7]


@pytest.mark.parametrize("how", [{}, {"steps_per_epoch": 9}, {"drop_last": True, "batch_size": 4}], ids=str)
def test_a_pass_that_is_broken_off_is_followed_by_the_next_epoch(how: dict[str, Any]) -> None:
    items, states = observe(lambda: stream_loader(chunks(), **how), 24)
    for at in (0, 2, items.index(END) + 1, items.index(END) + 2):
        loader = loaded(stream_loader(chunks(), **how), states[at])
        epoch = loader.epoch
        for count in (0, 0, 2):
            assert list(islice(map(plain, loader), count)) == items[at : at + count]
            assert saved(loader) == states[at + count]
        following = list(islice(map(plain, loader), 3))
        anew = stream_loader(chunks(), **how)
        anew.set_epoch(epoch + 1)

        assert (loader.epoch, following) == (epoch + 1, list(islice(map(plain, anew), 3)))


@pytest.mark.filterwarnings("ignore:A pass of epoch 0 goes on, though a later pass")
def test_an_iterator_takes_nothing_from_the_one_that_was_begun_after_it() -> None:
    items, states = observe(SHUFFLED, 9)
    loader = SHUFFLED()
    first = iter(loader)
    next(first)
    loader.set_epoch(0)
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
    items, states = observe(SHUFFLED, 30)
    loader = loaded(SHUFFLED(), states[17])
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
    _, states = observe(SHUFFLED, 5)
    other = OTHERS[what]()
    expected, own = observe(OTHERS[what], 9)
    assert list(islice(map(plain, other), 2)) == expected[:2]

    with pytest.raises(StateMismatchError, match=what):
        other.load_state_dict(states[5])
    assert saved(other) == own[2]
    other.set_epoch(0)
    assert list(islice(steps(other), 9)) == expected


def test_an_accepted_difference_that_shards_do_not_allow_is_named() -> None:
    _, states = observe(SHUFFLED, 5)
    fewer = stream_loader(chunks(SIZES[:2]), accept=("dataset",))
    expected, own = observe(lambda: stream_loader(chunks(SIZES[:2])), 6)
    assert list(islice(steps(fewer), 1)) == expected[:1]

    with pytest.raises(StateMismatchError, match=r"The loader's state(.|\n)*saved 6, now 2.*Within a pass this cannot"):
        fewer.load_state_dict(states[5])
    assert saved(fewer) == own[1]
