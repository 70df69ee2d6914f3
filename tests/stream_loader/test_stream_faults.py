"""A shard that cannot be read ends a stream in words, with a state that goes on exactly once it is mended."""

from __future__ import annotations

import contextlib
import gc
import gzip
import multiprocessing
import os
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data._utils
from support import hf_streams
from support.quick import thinned
from support.stream_cases import (
    END,
    SIZES,
    InThisProcess,
    budgeted,
    chunks,
    loaded,
    numbers,
    observe,
    plain,
    read_lines,
    saved,
    steps,
    stream_loader,
    write_lines,
)
from support.stream_troubles import Trouble, fail, stand_still
from torchdata.nodes import IterableWrapper

from lightning_stateful import ChunkedDataset, MixedStream
from lightning_stateful.errors import ConfigurationError, ShardError, StatefulWarning, StreamError
from lightning_stateful.stream_nodes.node_shards import NodeShards
from lightning_stateful.streams import Stream, as_stream

# Makes a loader on so many workers.
Make = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

IN_PROCESS = {"kind": InThisProcess, "num_workers": 2}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "two worker slots": IN_PROCESS,
    "persistent worker": {"num_workers": 1, "persistent_workers": True},
}


def die(marker: Path) -> None:
    """End this process at once, when whoever waits for it does so."""
    stand_still(marker)
    os.kill(os.getpid(), signal.SIGKILL)


def take(loader: Any) -> tuple[list[Any], BaseException]:
    """The items of a loader, and the error that ends it."""
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


def test_an_error_of_a_worker_begins_with_what_to_do(tmp_path: Path) -> None:
    trouble = Trouble(tmp_path, 5, fail)
    trouble.marker.touch()
    loader = stream_loader(chunks(read=trouble.read), num_workers=1)
    with pytest.raises(
        ShardError, match=r"^chunk \d of 6 .*could not be read .*: OSError: the disk is gone.*"
    ) as error:
        list(loader)
    message, _, traceback = str(error.value).partition("\n\n")
    assert message.endswith('on_error="skip" to leave out what is left of it.')
    assert traceback.startswith("Caught ShardError in DataLoader worker process 0.\nOriginal Traceback")


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

        assert set(multiprocessing.active_children()) <= before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "name", "workers"),
    [("parquet", "part3.parquet", "persistent worker"), ("json", "part3.jsonl", "no workers")],
)
def test_a_corrupted_file_of_hugging_faces(tmp_path: Path, kind: str, name: str, workers: str) -> None:
    dataset = hf_streams.stream(kind, tmp_path, SIZES).map(hf_streams.plus)
    file = tmp_path / name
    whole = file.read_bytes()

    def make() -> Any:
        return stream_loader(dataset, collate_fn=plain, **WORKERS[workers])

    damage = partial(file.write_bytes, whole[: len(whole) // 3] + b"{]" + whole[-9:])
    assert_mends(make, damage, partial(file.write_bytes, whole), rf"{name} could not be read at its sample \d")


@pytest.mark.parametrize("change", ["transform", "recurrent", "length"])
def test_a_function_that_fails_on_a_sample(tmp_path: Path, change: str) -> None:
    trouble = Trouble(tmp_path, 14, fail)

    def make() -> Any:
        dataset: Stream = chunks(transform=trouble if change == "transform" else None)
        if change == "recurrent":
            dataset = dataset.recurrent(lambda state, number: (trouble(number), state + 1), 0)
        if change == "length":
            return stream_loader(
                dataset, config=budgeted(dataset, length=lambda number: trouble(number) % 5), **IN_PROCESS
            )
        return stream_loader(dataset, **IN_PROCESS)

    match = r"the sample 14 .*OSError: the disk is gone"
    assert_mends(make, trouble.marker.touch, trouble.marker.unlink, match)


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


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    trouble = Trouble(tmp_path, 14, die)

    def make() -> Any:
        return stream_loader(chunks(transform=trouble), num_workers=1, persistent_workers=True)

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


def test_a_shard_that_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So long torch waits for a worker to end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
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
    """The numbers in a file before it fails."""
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
    for at in (0, 4, 8):
        before, after = make(), lossy(damaged, 2)
        served = numbers(list(map(plain, islice(before, at))))
        after.load_state_dict(saved(before))
        assert served + numbers(list(map(plain, after))) == Counter(kept)
        report = after.position_report()
        assert (report["shards_skipped"], report["samples_skipped"]) == (3, len(readable) - len(kept))


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
    with pytest.raises(ConfigurationError, match=r"has given no batch to all ranks in 4 passes.*filter that keeps no"):
        list(make(steps_per_epoch=2))


@pytest.mark.parametrize("by", ["batch", "sample"])
@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
@pytest.mark.parametrize("nothing", [chunks((0, 0), 100), chunks((3, 2), 100).filter(lambda number: False)])
def test_a_source_of_a_mixture_that_gives_nothing_is_named(nothing: Any, stop: Any, by: Any) -> None:
    dataset = MixedStream({"some": chunks(), "none": nothing}, stop=stop, by=by)
    loader = stream_loader(dataset, **IN_PROCESS)
    with pytest.warns(StatefulWarning, match="Source 'none' of MixedStream has given nothing in pass 0, out of 2"):
        list(loader)
    # Once.
    list(loader)


# With first_exhausted the pass ends there.
@pytest.mark.parametrize("stop", thinned(["all_exhausted", "first_exhausted", "cycle"], ["first_exhausted"]))
def test_a_source_that_was_used_up_before_a_resume_is_not_taken_for_an_empty_one(stop: Any) -> None:
    def make() -> Any:
        return stream_loader(MixedStream({"many": chunks(), "few": chunks((1, 1), 100)}, stop=stop), **IN_PROCESS)

    whole = list(map(plain, make()))
    for at in range(1, len(whole)):
        stopped = make()
        list(islice(stopped, at))
        assert list(map(plain, loaded(make(), saved(stopped)))) == whole[at:]


# Shards without a sample

EMPTY = "gave no sample. No other shard is read in its place"
STREAMS: dict[str, Callable[[Path], Any]] = {
    "chunks": lambda folder: chunks((4, 0, 9, 4)),
    "hugging face": lambda folder: hf_streams.stream("json", folder, (4, 0, 9, 4)),
    "nodes": lambda folder: as_stream(NodeShards(lambda shard: IterableWrapper(range((4, 0, 9, 4)[shard])), 4)),
    "one, read by all": lambda folder: chunks((0,)),
}
NAMES = {"chunks": r"chunk 1 of 4", "hugging face": "part1", "nodes": "shard 1 of", "one, read by all": "chunk 0 of 1"}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_shard_without_a_sample_is_named_once(tmp_path: Path, kind: str, workers: str) -> None:
    loader = stream_loader(STREAMS[kind](tmp_path), exact=True, **WORKERS[workers])
    for is_first in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
        assert len([one for one in caught if EMPTY in str(one.message)]) == is_first
        assert not is_first or re.search(NAMES[kind], str(caught[0].message))


def test_a_stream_by_itself_names_a_shard_without_a_sample() -> None:
    with pytest.warns(StatefulWarning, match=f"chunk 1 of 3.* {EMPTY}"):
        list(chunks((4, 0, 9)))


@pytest.mark.filterwarnings(f"error:.*{EMPTY}")
@pytest.mark.parametrize("workers", WORKERS)
def test_the_end_of_a_shard_or_of_a_share_is_no_empty_shard(workers: str) -> None:
    def make() -> Any:
        # More slots than shards, and slots with none of the few samples of one.
        return stream_loader(chunks((4, 1, 9), buffer_size=1), batch_size=1, **WORKERS[workers])

    whole = list(map(plain, make()))
    for at in range(len(whole) + 1):
        stopped = make()
        list(islice(stopped, at))
        assert at == len(whole) or list(map(plain, loaded(make(), saved(stopped)))) == whole[at:]
