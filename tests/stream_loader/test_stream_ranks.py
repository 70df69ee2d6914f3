"""Real ranks in a plain loop: equal steps, equal states, and an end in words whatever becomes of one of them.

The ranks of all runs are forked from one process, which has torch at hand already. A run is a function of a folder that
every rank calls; what it returns on each is what the tests look at.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import hf_streams
from support.large_states import RemembersMuch, assert_gives_the_same
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
    drawn,
    loaded,
    mixed,
    numbers,
    observe,
    plain,
    saved,
    steps,
    stream_loader,
)

from lightning_stateful.errors import StatefulError

# Seconds that ranks wait for each other where one of them does not come.
PATIENCE = 1.0
RUNS: dict[str, tuple[int, Callable[[Path], Any]]] = {}


def on(num_ranks: int) -> Any:
    """A run on so many ranks."""

    def add(function: Any) -> Any:
        RUNS[function.__name__] = num_ranks, function
        return function

    return add


def cut(dataset: Any, **options: Any) -> Any:
    return stream_loader(dataset, config=budgeted(dataset), **options)


def rows_of(folder: Path) -> Any:
    """A stream of Hugging Face's; ranks that write its files at once would be in each other's way."""
    own = folder / f"rank{dist.get_rank()}-{dist.get_world_size()}"
    return hf_streams.stream("parquet", own, SIZES).map(hf_streams.plus)


def numbers_of_rows(rows: list[dict[str, Any]]) -> list[int]:
    return [row["n"] for row in rows]


# All have unequal shares for two lanes and three.
KINDS: dict[str, Callable[[Path], Any]] = {
    "chunks": lambda folder: stream_loader(chunks()),
    "draws": lambda folder: stream_loader(chunks(transform=drawn), batch_size=None),
    "drop_last": lambda folder: stream_loader(chunks(), batch_size=3, drop_last=True),
    "steps": lambda folder: stream_loader(chunks(), steps_per_epoch=5),
    "one shard": lambda folder: stream_loader(chunks((23,))),
    "tokens": lambda folder: cut(chunks()),
    "mixed": lambda folder: stream_loader(mixed(), batch_size=3),
    "by sample": lambda folder: stream_loader(mixed(by="sample", weights=[2, 1]), batch_size=3),
    "first exhausted": lambda folder: stream_loader(mixed(stop="first_exhausted")),
    "rows": lambda folder: stream_loader(rows_of(folder), collate_fn=numbers_of_rows),
    "no shards": lambda folder: stream_loader(Remembers(), batch_size=2),
    "no state": lambda folder: stream_loader(Divided(), batch_size=2, steps_per_epoch=4),
    "mixed in steps": lambda folder: stream_loader(mixed(), steps_per_epoch=7, batch_size=3),
}
# Those of which a pass gives every sample once.
ELASTIC = ("chunks", "one shard", "steps", "tokens", "mixed", "by sample", "rows", "drop_last", "first exhausted")
LEGS = [4, 0, 1, 7, 9]


@on(2)
def exact(folder: Path) -> Any:
    """Every kind, without a stop and with several."""
    found = {}
    for name, make in KINDS.items():
        assert_goes_on(partial(make, folder), LEGS, total=26)
        items, states = observe(partial(make, folder), 26)
        loader = make(folder)
        reports = [loader.position_report() for _ in islice(steps(loader), 26)]
        found[name] = {"items": items, "states": states, "reports": reports}
    return found


def elastic(folder: Path) -> Any:
    """Goes on with what other ranks have left, for some steps."""
    path = folder / "elastic.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    served, left = {}, {}
    dist.barrier()
    for name in ELASTIC:
        loader = KINDS[name](folder)
        if name in held:
            loader.load_state_dict(held[name])
        before = loader.position_report()["pass"]
        served[name] = []
        for item in islice(steps(loader), 3):
            after = loader.position_report()["pass"]
            served[name].append((before, after, item))
            before = after
        left[name] = saved(loader)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(left))
    return {"served": served, "states": left}


NUMBERS_OF_RANKS = (2, 3, 1, 2, 3, 1, 1, 2, 2, 3, 1)
for place, number in enumerate(NUMBERS_OF_RANKS):
    RUNS[f"elastic{place}"] = number, elastic


class Fails:
    """A function that goes wrong at a sample of one rank, as long as a file is there.

    Args:
        folder: Where the file is.
        number: The sample.
        rank: The rank.
        what: What goes wrong.
    """

    def __init__(self, folder: Path, number: int, rank: int, what: Callable[[Path], Any]) -> None:
        folder.mkdir(exist_ok=True)
        self.marker, self.number, self.rank, self.what = folder / "marker", number, rank, what

    def cause(self) -> None:
        """From now on, on all ranks."""
        dist.barrier()
        self.marker.touch()
        dist.barrier()

    def mend(self) -> None:
        """No longer, on all ranks."""
        dist.barrier()
        self.marker.unlink(missing_ok=True)
        dist.barrier()

    def __call__(self, number: int) -> int:
        if number == self.number and dist.get_rank() == self.rank and self.marker.exists():
            self.what(self.marker)
        return number


def fail(marker: Path) -> None:
    raise OSError("the disk is gone")


def end(loader: Any, folder: Path | None = None) -> dict[str, Any]:
    """What a loader gives until it ends in an error, and how."""
    found: list[Any] = []
    gaps, began = [], time.monotonic()
    try:
        for item in islice(steps(loader), 60):
            found.append(item)
            gaps.append(time.monotonic() - began)
            if folder is not None and dist.get_rank() == 0:
                (folder / "part").write_text(json.dumps([len(found), saved(loader)]))
                (folder / "part").replace(folder / "last.json")
            began = time.monotonic()
    except StatefulError as error:
        # Whether another batch follows is found out before one is handed over.
        gaps.append(time.monotonic() - began)
        said = f"{type(error).__name__}: {error}"
        return {"items": found, "said": said, "seconds": max(gaps), "state": state_of(loader)}
    return {"items": found}


def state_of(loader: Any) -> Any:
    """The state, or why there is none."""
    try:
        return saved(loader)
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"


def mended(make: Any, found: dict[str, Any], items: list[Any], states: list[Any]) -> None:
    """What broke off goes on as if nothing had been."""
    at = len(found["items"])
    assert found["items"] == items[:at]
    assert found["state"] == states[at]
    rest = items[at:]
    if rest[0] == END and states[at] == states[at + 1]:
        del rest[0]
    assert list(islice(steps(loaded(make(), found["state"])), len(rest))) == rest


@on(2)
def broken(folder: Path) -> Any:
    """The stream of rank 1 breaks off at some sample, and goes on when that is mended."""
    results = {}
    for name, options in {"next": {}, "steps": {"steps_per_epoch": 20}}.items():
        trouble = Fails(folder / name, 29, 1, fail)
        make = partial(in_order, trouble, **options)
        items, states = observe(make, 24)
        trouble.cause()
        results[name] = end(make())
        trouble.mend()
        mended(make, results[name], items, states)
    return results


def in_order(transform: Any, **options: Any) -> Any:
    """Chunks of which rank 1 reads the second and the fourth, from sample 9 and 26 on."""
    return stream_loader(chunks((9, 8, 9, 9), transform=transform, shuffle=False), **{"timeout": PATIENCE, **options})


@on(2)
def slow(folder: Path) -> Any:
    """Rank 1 stands still until the other has given up."""
    trouble = Fails(folder, 11, 1, stand_still)
    make = partial(in_order, trouble)
    items, states = observe(make, 12)
    trouble.cause()
    found = end(make())
    if dist.get_rank() == 0:
        trouble.marker.unlink()
    trouble.mend()
    mended(make, found, items, states)
    return found


@on(2)
def killed(folder: Path) -> Any:
    """Rank 1 is gone from one moment to the next; the other writes a state at every step."""
    Fails(folder, 29, 1, kill).cause()
    return end(in_order(Fails(folder, 29, 1, kill)), folder)


@on(2)
def killed_first(folder: Path) -> Any:
    """Rank 0, which also serves the key-value store, is gone from one moment to the next."""
    Fails(folder, 18, 0, kill).cause()
    return end(in_order(Fails(folder, 18, 0, kill)))


@on(2)
def after_kill(folder: Path) -> Any:
    """What was written last goes on as if nothing had been."""
    make = partial(in_order, Fails(folder, 29, 1, kill))
    items, states = observe(make, 30)
    number, state = json.loads((folder.parent / "killed" / "last.json").read_text())
    assert state == states[number]
    mended(make, {"items": items[:number], "state": state}, items, states)
    return {"at": number}


@on(2)
def evaluated(folder: Path) -> Any:
    """Each rank for itself, of more shards than ranks and of fewer, twice."""
    sizes = {"one": (5,), "two": (1, 6), "some": SIZES}
    return {
        name: [list(map(plain, loader)) for _ in range(2)]
        for name, found in sizes.items()
        for loader in [stream_loader(chunks(found, shuffle=False), exact=True)]
    }


@on(2)
def side_by_side(folder: Path) -> Any:
    """Two loaders of one class, of unequal length, in one loop; and one loader begun again in the middle."""
    loaders = [stream_loader(chunks()), stream_loader(chunks(OTHER_SIZES, 100))]
    both = [[plain(batch) for batch in batches] for batches in zip(*loaders, strict=False)]
    alone = [list(map(plain, loader)) for loader in (stream_loader(chunks()), stream_loader(chunks(OTHER_SIZES, 100)))]
    loader = stream_loader(chunks())
    first = list(map(plain, islice(loader, 3)))
    return {"both": both, "alone": alone, "first": first, "again": list(map(plain, loader))}


OTHERWISE: dict[str, Callable[[int], Any]] = {
    "seed": lambda rank: stream_loader(chunks(seed=rank), timeout=PATIENCE),
    "chunks": lambda rank: stream_loader(chunks(SIZES[: 6 - rank]), timeout=PATIENCE),
    "batch_size": lambda rank: stream_loader(chunks(), batch_size=2 + rank, timeout=PATIENCE),
    "steps_per_epoch": lambda rank: stream_loader(chunks(), steps_per_epoch=2 + rank, timeout=PATIENCE),
    "progress": lambda rank: loaded(in_order(None), observe(partial(in_order, None), 6)[1][2 + 3 * rank]),
    "workers": lambda rank: stream_loader(chunks(), num_workers=2 * rank, kind=InThisProcess, timeout=PATIENCE),
}


@on(2)
def disagree(folder: Path) -> Any:
    """Ranks that were given other streams."""
    found = {}
    for name, make in OTHERWISE.items():
        dist.barrier()
        try:
            found[name] = end(make(dist.get_rank()))
        except Exception as error:
            found[name] = {"said": f"{type(error).__name__}: {error}"}
    return found


@on(2)
def with_workers(folder: Path) -> Any:
    """Persistent workers, stopped and resumed."""
    make = partial(stream_loader, chunks(), num_workers=2, persistent_workers=True)
    items, states = observe(make, 14)
    # A fork hangs if a thread of gloo's holds the interpreter's lock on its threads.
    time.sleep(0.05)
    mended(make, {"items": items[:4], "state": states[4]}, items, states)
    return {"items": items, "states": states}


EVEN = {
    "unequal shards": (10, 200, 30, 90, 5),
    "small ones": (9,) * 40,
}


@on(3)
def even_shares(folder: Path) -> Any:
    """Epochs of shards that do not go round among the ranks: the steps of each, and what is served."""
    found = {}
    for name, sizes in EVEN.items():
        loader = stream_loader(chunks(sizes), batch_size=8)
        epochs = [list(map(plain, loader)) for _ in range(3)]
        found[name] = [len(epoch) for epoch in epochs], numbers(epochs)
    return found


@on(2)
def large(folder: Path) -> Any:
    """Datasets whose state is large, stopped and resumed."""
    found = {}
    for name, options in {"next": {}, "steps": {"steps_per_epoch": 7}}.items():
        for num_workers in (0, 2):
            kind = {"num_workers": num_workers, "kind": InThisProcess} if num_workers else {}
            # Unequal shares: of 751 samples and of 750, or of 376 at most.
            make = partial(stream_loader, RemembersMuch(1501), batch_size=50, **kind, **options)
            assert_gives_the_same(make, [6, 0, 3, 11], total=36)
            found[name, num_workers] = observe(make, 36)[1]
    return found


def kill(marker: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still(marker: Path) -> None:
    deadline = time.monotonic() + 30
    while marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


# The process that has torch at hand.


def main(folder: Path) -> None:
    """Fork the ranks of one run after the other."""
    warnings.simplefilter("ignore")
    for name, (num_ranks, _) in RUNS.items():
        (folder / name).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [fork(name, rank, num_ranks, port, folder) for rank in range(num_ranks)]
        deadline = time.monotonic() + 60
        while ranks and time.monotonic() < deadline:
            ranks = [rank for rank in ranks if os.waitpid(rank, os.WNOHANG) == (0, 0)]
            time.sleep(0.01)
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)


def fork(name: str, rank: int, num_ranks: int, port: int, folder: Path) -> int:
    """A process that is one rank of a run."""
    process = os.fork()
    if process:
        return process
    try:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
        found = RUNS[name][1](folder / name if not name.startswith("elastic") else folder)
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    (folder / f"{name}{rank}.pkl").write_bytes(pickle.dumps(found))
    with suppress(RuntimeError):
        # Rank 0 has the store that others may still ask.
        if isinstance(found, dict):
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))


# What became of them.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results of all runs lie."""
    folder = tmp_path_factory.mktemp("ranks")
    # The tests, and the package beside them.
    paths = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with (folder / "log").open("w") as log:
        command = [sys.executable, __file__, str(folder)]
        subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=240, check=True)
    return folder


def found_by(folder: Path, name: str) -> list[Any]:
    """What a run gave on each rank; None where a rank was killed."""
    paths = [folder / f"{name}{rank}.pkl" for rank in range(RUNS[name][0])]
    found = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    assert not any(isinstance(text, str) for text in found), found
    return found


def batches(items: list[Any]) -> list[Any]:
    return [item for item in items if item != END]


@pytest.mark.parametrize("name", KINDS)
def test_ranks_take_equal_steps_and_have_equal_states_at_each(folder: Path, name: str) -> None:
    first, second = (found[name] for found in found_by(folder, "exact"))

    assert [item == END for item in first["items"]] == [item == END for item in second["items"]]
    assert first["states"] == second["states"]
    assert first["reports"] == second["reports"]
    assert first["items"] != second["items"]


@pytest.mark.parametrize(
    "name", ["chunks", "one shard", "tokens", "mixed", "by sample", "rows", "drop_last", "no shards"]
)
def test_ranks_of_unequal_shares_lose_and_repeat_nothing(folder: Path, name: str) -> None:
    first, second = (found[name] for found in found_by(folder, "exact"))
    last = max(place for place, item in enumerate(first["items"]) if item == END)
    passes = first["reports"][last]["pass"]
    assert passes >= 2
    served = numbers(first["items"][:last]) + numbers(second["items"][:last])
    every = numbers(list(range(23))) + (numbers(list(range(100, 118))) if name in ("mixed", "by sample") else Counter())

    assert set(served) <= set(every)
    if name == "no shards":
        assert max(served.values()) <= passes
    else:
        # What one rank has left comes first in the next pass.
        assert {served[number] for number in every} <= {passes - 1, passes}
        assert sum(served.values()) > (passes - 1) * len(every)


def test_a_pass_is_complete_on_whatever_ranks_go_on_with_it(folder: Path) -> None:
    found = [found_by(folder, f"elastic{place}") for place in range(len(NUMBERS_OF_RANKS))]
    for ranks in found:
        assert all(rank["states"] == ranks[0]["states"] for rank in ranks)
    for name in ELASTIC:
        every = numbers(list(range(23)))
        if name in ("mixed", "by sample", "first exhausted"):
            every += numbers(list(range(100, 118)))
        served: Counter[int] = Counter()
        passes = 0
        for ranks in found:
            for taken in zip(*(rank["served"][name] for rank in ranks), strict=True):
                served += numbers([item for _, _, item in taken])
                passes = taken[0][1]
                assert max(served.values()) <= passes + 1, name
                assert name == "first exhausted" or min(served[number] for number in every) >= passes - 1, name
        assert passes >= 2 or name == "first exhausted"


@pytest.mark.parametrize("name", ["next", "steps"])
def test_a_rank_whose_stream_breaks_off_ends_all_at_the_same_step_at_once(folder: Path, name: str) -> None:
    first, second = (found[name] for found in found_by(folder, "broken"))

    assert first["state"] == second["state"]
    assert len(first["items"]) == len(second["items"]) > 2
    assert second["said"].startswith("ShardError: ")
    assert "failed on the sample 29" in second["said"]
    assert first["said"].startswith("StreamError: The stream of rank 1 broke off before step")
    assert "OSError: the disk is gone" in first["said"]
    assert first["seconds"] < PATIENCE


def test_a_rank_that_stands_still_is_named_with_its_shard(folder: Path) -> None:
    first, second = found_by(folder, "slow")

    assert "1 of 2 ranks" in first["said"]
    assert "rank 1" in first["said"]
    assert "chunk" in first["said"]
    assert second["said"].startswith("StreamError")
    assert len(first["items"]) == len(second["items"])
    assert PATIENCE <= first["seconds"] < PATIENCE + 3


def test_a_rank_that_is_killed_leaves_an_error_and_a_state_that_goes_on(folder: Path) -> None:
    first, second = found_by(folder, "killed")

    assert second is None
    assert "rank 1" in first["said"]
    assert PATIENCE <= first["seconds"] < PATIENCE + 3
    assert found_by(folder, "after_kill") == [{"at": len(first["items"])}] * 2
    assert len(first["items"]) > 2


def test_rank_0_may_be_killed_with_the_store(folder: Path) -> None:
    first, second = found_by(folder, "killed_first")

    assert first is None
    assert second["said"].startswith("StreamError: ")
    assert "rank 0" in second["said"]
    assert second["seconds"] < PATIENCE + 3


def test_evaluation_gives_every_sample_once_over_ranks(folder: Path) -> None:
    first, second = found_by(folder, "evaluated")

    for name, sizes in {"one": (5,), "two": (1, 6), "some": SIZES}.items():
        for one, other in zip(first[name], second[name], strict=True):
            assert numbers(one) + numbers(other) == Counter(range(sum(sizes)))


def test_streams_in_one_loop_and_passes_begun_again_are_not_mixed_up(folder: Path) -> None:
    for found in found_by(folder, "side_by_side"):
        length = min(map(len, found["alone"]))
        assert [both[0] for both in found["both"]] == found["alone"][0][:length]
        assert [both[1] for both in found["both"]] == found["alone"][1][:length]
        assert found["again"] == found["alone"][0]
        assert found["first"] == found["again"][:3]


@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_read_other_streams_are_told_so(folder: Path, name: str) -> None:
    for found in found_by(folder, "disagree"):
        assert found[name]["said"].startswith("RankMismatchError")
        assert name in found[name]["said"]


@pytest.mark.parametrize("name", EVEN)
def test_ranks_share_an_epoch_evenly_whatever_the_shards(folder: Path, name: str) -> None:
    ranks = [found[name] for found in found_by(folder, "even_shares")]

    due = math.ceil(sum(EVEN[name]) / (8 * 3))
    assert all(steps == ranks[0][0] for steps, _ in ranks)
    assert all(abs(number - due) <= 1 for number in ranks[0][0])
    served = sum((counts for _, counts in ranks), Counter())
    assert {served[number] for number in range(sum(EVEN[name]))} <= {2, 3}


def test_large_states_of_a_dataset_reach_the_other_ranks(folder: Path) -> None:
    first, second = found_by(folder, "large")

    assert first == second
    for states in first.values():
        slots = [[slot for slot in state["progress"]["slots"] if slot is not None] for state in states]
        held = [[len(json.dumps(slot["of"][""]["state"])) for slot in of] for of in slots]
        assert sum(len(sizes) > 1 and min(sizes) > 1024 for sizes in held) > 2


def test_ranks_with_workers_agree_too(folder: Path) -> None:
    first, second = found_by(folder, "with_workers")

    assert first["states"] == second["states"]
    assert first["items"] != second["items"]
