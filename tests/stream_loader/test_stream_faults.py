"""What cannot be read breaks a stream off in words, with a state that goes on exactly once it is mended."""

from __future__ import annotations

import contextlib
import gc
import gzip
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support import hf_streams
from support.stream_cases import (
    END,
    SIZES,
    InThisProcess,
    assert_goes_on,
    budgeted,
    chunks,
    loaded,
    numbers,
    observe,
    plain,
    random_legs,
    read_lines,
    saved,
    steps,
    stream_loader,
    write_lines,
)

from lightning_stateful import ChunkedDataset
from lightning_stateful.errors import ConfigurationError, ShardError, StatefulWarning, StreamError
from lightning_stateful.streams import Stream

# Makes a loader on so many workers.
Make = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

IN_PROCESS = {"kind": InThisProcess, "num_workers": 2}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "two lanes": IN_PROCESS,
    "worker": {"num_workers": 1},
    "persistent worker": {"num_workers": 1, "persistent_workers": True},
}


class Trouble:
    """Something that a marker on the disk makes go wrong at one sample, in whatever process.

    Args:
        folder: Where the marker is.
        number: The sample.
        what: What goes wrong there.
    """

    def __init__(self, folder: Path, number: int, what: Callable[[Path], Any]) -> None:
        self.marker, self.number, self.what = folder / "marker", number, what

    def __call__(self, number: int) -> int:
        if number == self.number and self.marker.exists():
            self.what(self.marker)
        return number

    def read(self, ref: tuple[int, int]) -> Iterator[int]:
        """A chunk in which it happens."""
        return map(self, range(ref[0], ref[0] + ref[1]))


def fail(marker: Path) -> None:
    raise OSError("the disk is gone")


def stop_iteration(marker: Path) -> None:
    raise StopIteration


def stand_still(marker: Path) -> None:
    """Wait as long as the marker is there."""
    deadline = time.monotonic() + 30
    while marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def die(marker: Path) -> None:
    """End this process at once, when whoever waits for it does so."""
    stand_still(marker)
    os.kill(os.getpid(), signal.SIGKILL)


def take(loader: Any) -> tuple[list[Any], BaseException]:
    """What a loader gives, and the error that ends it."""
    found = []
    try:
        for item in islice(steps(loader), 200):
            found.append(item)
    except StreamError as error:
        # Frames hold iterators of workers, which torch ends slowly where they are garbage in a cycle.
        return found, error.with_traceback(None)
    pytest.fail(f"nothing went wrong in {len(found)} steps")


def assert_mends(make: Make, damage: Callable[[], Any], mend: Callable[[], Any], match: str) -> None:
    """Damage breaks a run off at the last batch before it; mended, the run goes on as if nothing had been."""
    items, states = observe(make, 40)
    start = len(items) // 8
    damage()
    first = loaded(make(), states[start])
    found, error = take(first)
    end = start + len(found)
    assert found == items[start:end]
    assert isinstance(error, StreamError)
    assert pytest.raises(StreamError, match=match).matches(error), error
    assert saved(first) == states[end]
    again, error = take(loaded(make(), saved(first)))
    assert again == []
    assert pytest.raises(StreamError, match=match).matches(error), error
    mend()
    rest = items[end:]
    if rest[0] == END and states[end] == states[end + 1]:
        del rest[0]
    for loader in (loaded(make(), states[end]), loaded(first, states[end])):
        assert list(islice(steps(loader), len(rest))) == rest
        assert saved(loader) == states[-1]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_reader_that_raises(tmp_path: Path, workers: str) -> None:
    trouble = Trouble(tmp_path, 14, fail)

    def make() -> Any:
        return stream_loader(chunks(read=trouble.read), **WORKERS[workers])

    # The sample is the third of the fourth chunk, whatever the order.
    match = r"chunk 3 of 6 \(\(11, 5\)\) could not be read at its sample 3: OSError: the disk is gone"
    assert_mends(make, trouble.marker.touch, trouble.marker.unlink, match)


def test_a_truncated_file(tmp_path: Path) -> None:
    files = write_lines(tmp_path, (30, 40, 3000, 10))
    whole = Path(files[2]).read_bytes()

    def make() -> Any:
        dataset = ChunkedDataset(files, read_lines, buffer_size=50, seed=1)
        return stream_loader(dataset, batch_size=100, **IN_PROCESS)

    damage = partial(Path(files[2]).write_bytes, whole[: len(whole) // 2])
    match = r"chunk 2 of 4 \(shard-2.gz\) could not be read at its sample \d+: EOFError"
    assert_mends(make, damage, partial(Path(files[2]).write_bytes, whole), match)


def test_workers_of_a_stream_that_broke_off_end_with_their_loader(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    trouble = Trouble(tmp_path, 3, fail)
    trouble.marker.touch()
    loader = stream_loader(chunks(read=trouble.read), num_workers=1)
    gc.disable()
    try:
        with pytest.raises(ShardError):
            list(loader)
        del loader

        assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", ["no workers", "persistent worker"])
@pytest.mark.parametrize(("kind", "name"), [("parquet", "part3.parquet"), ("json", "part3.jsonl")])
def test_a_corrupted_file_of_hugging_faces(tmp_path: Path, kind: str, name: str, workers: str) -> None:
    dataset = hf_streams.stream(kind, tmp_path, SIZES).map(hf_streams.plus)
    file = tmp_path / name
    whole = file.read_bytes()

    def make() -> Any:
        return stream_loader(dataset, collate_fn=plain, **WORKERS[workers])

    damage = partial(file.write_bytes, whole[: len(whole) // 3] + b"{]" + whole[-9:])
    assert_mends(make, damage, partial(file.write_bytes, whole), rf"{name} could not be read at its sample \d")


@pytest.mark.parametrize("change", ["map", "filter", "transform", "recurrent", "length"])
def test_a_function_that_fails_on_a_sample(tmp_path: Path, change: str) -> None:
    trouble = Trouble(tmp_path, 14, fail)

    def make() -> Any:
        dataset: Stream = chunks(transform=trouble if change == "transform" else None)
        if change in ("map", "filter"):
            dataset = getattr(dataset, change)(trouble)
        elif change == "recurrent":
            dataset = dataset.recurrent(lambda state, number: (trouble(number), state + 1), 0)
        if change == "length":
            return stream_loader(dataset, config=measured_by(dataset, lambda number: trouble(number) % 5), **IN_PROCESS)
        return stream_loader(dataset, **IN_PROCESS)

    match = r"the sample 14 .*OSError: the disk is gone"
    assert_mends(make, trouble.marker.touch, trouble.marker.unlink, match)


def measured_by(dataset: Stream, length: Callable[[int], int], **options: Any) -> Any:
    """Batches within a budget by another length."""
    config = budgeted(dataset)
    sources = {}
    for name, source in config.sources.items():
        *others, last = source.steps
        cut = replace(last, options={**last.options, "length": length, **options})
        sources[name] = replace(source, steps=(*others, cut))
    return replace(config, sources=sources)


def test_a_collate_fn_that_fails_leaves_the_state_of_the_last_batch(tmp_path: Path) -> None:
    trouble = Trouble(tmp_path, 14, fail)

    def make() -> Any:
        return stream_loader(chunks(), collate_fn=lambda samples: [trouble(number) for number in samples])

    items, states = observe(make, 20)
    trouble.marker.touch()
    loader = make()
    found: list[Any] = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(loader)
    assert found == items[: len(found)]
    assert saved(loader) == states[len(found)]
    trouble.marker.unlink()
    assert list(islice(steps(loaded(loader, states[len(found)])), 5)) == items[len(found) :][:5]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_worker_that_is_killed(tmp_path: Path, persistent_workers: bool) -> None:
    trouble = Trouble(tmp_path, 14, die)

    def make() -> Any:
        dataset = chunks(transform=trouble)
        return stream_loader(dataset, num_workers=1, persistent_workers=persistent_workers)

    items, states = observe(make, 30)
    trouble.marker.touch()
    loader = make()
    # By then, this process waits.
    timer = threading.Timer(0.3, trouble.marker.unlink)
    timer.start()
    found, error = take(loader)
    timer.join()

    assert found == items[: len(found)]
    assert saved(loader) == states[len(found)]
    assert "chunk " in str(error)
    assert "The workers broke off: DataLoader worker" in str(error)
    for again in (loaded(make(), states[len(found)]), loaded(loader, states[len(found)])):
        assert list(islice(steps(again), 9)) == items[len(found) : len(found) + 9]


def test_a_shard_that_is_too_slow(tmp_path: Path) -> None:
    trouble = Trouble(tmp_path, 14, stand_still)

    def make() -> Any:
        return stream_loader(chunks(transform=trouble), num_workers=2, slow=1)

    items, states = observe(make, 20)
    trouble.marker.touch()
    loader = make()
    found, error = take(loader)
    trouble.marker.unlink()

    assert found == items[: len(found)]
    assert saved(loader) == states[len(found)]
    assert "timed out after 1 seconds" in str(error)
    assert "By their last batches they had come to chunk" in str(error)
    rest = list(islice(steps(loaded(make(), states[len(found)])), 6))
    assert rest == items[len(found) :][:6]


# What is left out


def skipping(dataset: Stream) -> Stream:
    """A stream that goes on where something fails."""
    return Stream({name: replace(source, on_error="skip") for name, source in dataset.sources.items()}, dataset.mixing)


@pytest.fixture
def damaged(tmp_path: Path) -> list[str]:
    """Files of which one is truncated, one is missing, and one holds what is no number."""
    files = write_lines(tmp_path, (30, 20, 3000, 10, 25, 7))
    Path(files[2]).write_bytes(Path(files[2]).read_bytes()[:1000])
    Path(files[4]).unlink()
    with gzip.open(files[1], "wt") as opened:
        opened.write("\n".join([*map(str, range(30, 41)), "no number", "42"]))
    return files


def readable_of(file: str) -> list[int]:
    """What there is in a file before it fails."""
    found: list[int] = []
    with contextlib.suppress(OSError, EOFError, ValueError):
        for number in read_lines(file):
            found.append(number)  # what comes before an error stays
    return found


def odd_one_out(number: int) -> int:
    """Fails on some samples."""
    if number % 7 == 3:
        raise ValueError(f"{number} is odd")
    return number


def lossy(files: list[str], num_workers: int = 0, **options: Any) -> Any:
    """A loader that leaves out what cannot be read."""
    dataset = ChunkedDataset(files, read_lines, buffer_size=20, seed=1, transform=odd_one_out, on_error="skip")
    return stream_loader(dataset, **{"batch_size": 50, "num_workers": num_workers, "kind": InThisProcess, **options})


@pytest.mark.parametrize("num_workers", [0, 3])
def test_what_is_left_out_is_counted_over_every_stop(damaged: list[str], num_workers: int) -> None:
    make = partial(lossy, damaged, num_workers)
    readable = [number for file in damaged for number in readable_of(file)]
    kept = [number for number in readable if number % 7 != 3]
    assert len(damaged) < len(kept) < len(readable) < 1000
    assert numbers(list(map(plain, make()))) == Counter(kept)

    assert_goes_on(make, random_legs(num_workers), total=30)
    reports, loader = [], make()
    for _ in islice(steps(loader), 30):
        reports.append(loader.position_report())
    first = next(report for report in reports if report["pass"] == 1)
    assert (first["shards_skipped"], first["samples_skipped"]) == (3, len(readable) - len(kept))
    state, legs = None, (4, 1, 0, 9, 3)
    for leg in legs:
        resumed = make() if state is None else loaded(make(), state)
        for _ in islice(steps(resumed), leg):
            pass
        state = saved(resumed)
    assert resumed.position_report() in reports


def test_what_is_left_out_is_counted_once_on_whatever_workers(damaged: list[str]) -> None:
    whole = lossy(damaged)
    list(whole)
    expected = whole.position_report()
    served = numbers(list(map(plain, lossy(damaged))))
    for at in range(0, 9, 2):
        for num_workers in (0, 2, 3):
            before, after = lossy(damaged, 2), lossy(damaged, num_workers)
            found = numbers(list(map(plain, islice(before, at))))
            after.load_state_dict(saved(before))
            found += numbers(list(map(plain, after)))
            assert found == served
            assert after.position_report() == {**expected, "shards_left": expected["shards_left"]}


def test_samples_too_long_are_counted_over_a_stop() -> None:
    def make() -> Any:
        dataset = chunks()
        config = measured_by(dataset, lambda number: 99 if number % 5 == 2 else 3, too_long="drop")
        return stream_loader(dataset, config=config)

    served = numbers(list(map(plain, make())))
    assert served == Counter(number for number in range(sum(SIZES)) if number % 5 != 2)
    assert_goes_on(make, [2, 1, 0, 3], total=20)
    loader = loaded(make(), observe(make, 3)[1][3])
    list(loader)
    assert loader.position_report()["samples_too_long"] == 5
    list(loader)
    assert loader.position_report()["samples_too_long"] == 10


def test_a_stream_of_which_nothing_can_be_read_ends_with_a_warning(tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        files = [str(tmp_path / f"{number}.gz") for number in range(3)]
        return stream_loader(ChunkedDataset(files, read_lines, on_error="skip"), **options)

    loader = make()
    for _ in range(2):
        with pytest.warns(StatefulWarning, match="has given no batch in an epoch, so nothing was trained on"):
            assert list(loader) == []
    assert list(make(exact=True)) == []
    assert loader.position_report()["shards_skipped"] == 6
    assert loader.position_report()["epoch"] == 2
    with pytest.raises(ConfigurationError, match="has given no batch to all ranks in 4 passes"):
        list(make(steps_per_epoch=2))
