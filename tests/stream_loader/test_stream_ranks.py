"""Real ranks in a plain loop: equal steps, equal states, nothing lost, and an end in words whatever fails on one."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import hf_streams
from support.large_states import RemembersMuch, assert_gives_the_same
from support.ranks import Ranks
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
    document,
    drawn,
    loaded,
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
from support.stream_troubles import Trouble, fail, stand_still
from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import IterableWrapper

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import StatefulError
from lightning_stateful.streams import as_stream

# Seconds that ranks wait for each other where one of them does not come.
PATIENCE = 1.0
OF_CHUNKS, OF_OTHERS = Counter(range(23)), Counter(range(100, 118))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return Ranks(2, folder / "two")


def rows_of(folder: Path) -> Any:
    """A stream of Hugging Face's; ranks that write its files at once would be in each other's way."""
    files = hf_streams.stream("parquet", folder / f"rank{dist.get_rank()}", SIZES).map(hf_streams.plus)
    return stream_loader(files, collate_fn=numbers_of_rows)


def numbers_of_rows(rows: list[dict[str, Any]]) -> list[int]:
    return [row["n"] for row in rows]


# All have unequal shares for two worker slots and three.
KINDS: dict[str, Callable[[Path], Any]] = {
    "draws": lambda folder: stream_loader(chunks(transform=drawn), batch_size=None),
    "drop_last": lambda folder: stream_loader(chunks(), batch_size=3, drop_last=True),
    "steps": lambda folder: stream_loader(chunks(), steps_per_epoch=5),
    "one shard": lambda folder: stream_loader(chunks((23,))),
    "tokens": lambda folder: stream_loader(chunks(), config=budgeted(chunks())),
    "packed": lambda folder: stream_loader(packed(chunks(), "whole"), collate_fn=tokens),
    "mixed": lambda folder: stream_loader(mixed(), batch_size=3),
    "by sample": lambda folder: stream_loader(mixed(by="sample", weights=[2, 1]), batch_size=3),
    "first exhausted": lambda folder: stream_loader(mixed(stop="first_exhausted")),
    "rows": rows_of,
    "no shards": lambda folder: stream_loader(Remembers(), batch_size=2),
    "no state": lambda folder: stream_loader(Divided(), batch_size=2, steps_per_epoch=4),
}


def exact(folder: Path) -> Any:
    """Every kind, without a stop and with several."""
    found = {}
    for name, make in KINDS.items():
        loader = make(folder)
        items, states, reports = [], [saved(loader)], []
        for item in islice(steps(loader), 26):
            items.append(item)
            states.append(saved(loader))
            reports.append(loader.position_report())
        assert_goes_on(partial(make, folder), [4, 0, 1, 7, 9], total=26, observed=(items, states))
        found[name] = {"items": items, "states": states, "reports": reports}
    return found


class Endless(IterableDataset[int]):
    """Goes on at each ``iter()``."""

    def __init__(self) -> None:
        self.drawn = random.Random(dist.get_rank())

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.drawn.randrange(1000)


def left_by_break(folder: Path) -> list[Any]:
    """Batches of epochs that a loop breaks off, by torch and by us."""
    found: list[Any] = []
    for make in (lambda loader: loader, patch_dataloader):
        for workers in ({}, {"num_workers": 2, "persistent_workers": True}):
            loader = make(DataLoader(Endless(), 4, **workers))
            found.append([batch.tolist() for _ in range(3) for batch in islice(loader, 5)])
    return found


def test_epochs_that_a_loop_breaks_off_lose_no_batch_of_an_endless_source(ranks: Ranks) -> None:
    for alone, in_workers, ours, ours_in_workers in ranks.of(left_by_break):
        assert (alone, in_workers) == (ours, ours_in_workers)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_take_equal_steps_and_have_equal_states_at_each(ranks: Ranks, name: str) -> None:
    first, second = (found[name] for found in ranks.of(exact))

    assert [item == END for item in first["items"]] == [item == END for item in second["items"]]
    assert first["states"] == second["states"]
    assert first["reports"] == second["reports"]
    assert first["items"] != second["items"]


@pytest.mark.parametrize("name", ["one shard", "tokens", "packed", "by sample", "rows", "drop_last", "no shards"])
def test_ranks_of_unequal_shares_lose_and_repeat_nothing(ranks: Ranks, name: str) -> None:
    first, second = (found[name] for found in ranks.of(exact))
    last = max(place for place, item in enumerate(first["items"]) if item == END)
    passes = first["reports"][last]["pass"]
    assert passes >= 2
    served = numbers(first["items"][:last]) + numbers(second["items"][:last])
    every = OF_CHUNKS + OF_OTHERS if name == "by sample" else OF_CHUNKS
    if name == "packed":
        every = Counter(token for number in OF_CHUNKS for token in document(number))

    assert set(served) <= set(every)
    if name == "no shards":
        assert max(served.values()) <= passes
    else:
        # What one rank has left comes first in the next pass.
        assert {served[number] for number in every} <= {passes - 1, passes}
        assert served.total() > (passes - 1) * len(every)


def empty(folder: Path) -> list[str]:
    """What is said of a stream in which one of four shards is empty."""
    loader = stream_loader(chunks((8, 0, 8, 8), shuffle=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
        list(loader)
    return [str(one.message) for one in caught]


def test_the_rank_that_reads_an_empty_shard_names_it_once(ranks: Ranks) -> None:
    first, second = ranks.of(empty)
    assert not first
    assert len(second) == 1
    assert "chunk 1 of 4" in second[0]
    assert "gave no sample" in second[0]


# Faults


class Fails(Trouble):
    """Something that goes wrong at a sample of rank 1."""

    def set(self, is_there: bool) -> None:
        """Cause it, or mend it, on all ranks."""
        dist.barrier()
        if is_there:
            self.marker.touch()
        else:
            self.marker.unlink(missing_ok=True)
        dist.barrier()

    def __call__(self, number: int) -> int:
        return super().__call__(number) if dist.get_rank() == 1 else number


def in_order(transform: Any, **options: Any) -> Any:
    """Chunks of which rank 1 reads the second and the fourth, from sample 9 and 26 on."""
    return stream_loader(chunks((9, 8, 9, 9), transform=transform, shuffle=False), **{"timeout": PATIENCE, **options})


def end(loader: Any) -> dict[str, Any]:
    """The items of a loader until it ends in an error, and how it ends."""
    found: list[Any] = []
    times = [time.monotonic()]
    try:
        for item in islice(steps(loader), 60):
            found.append(item)
            times.append(time.monotonic())
    except StatefulError as error:
        times.append(time.monotonic())
        # Whether another batch follows is found out before one is handed over.
        seconds = max(after - before for before, after in pairwise(times))
        return {"items": found, "said": f"{type(error).__name__}: {error}", "seconds": seconds, "state": saved(loader)}
    return {"items": found}


def assert_mended(make: Any, found: dict[str, Any], items: list[Any], states: list[Any]) -> None:
    """A stream that broke off goes on as if nothing had been."""
    at = len(found["items"])
    assert found["items"] == items[:at]
    assert found["state"] == states[at]
    rest = items[at:]
    if rest[0] == END and states[at] == states[at + 1]:
        del rest[0]
    assert list(islice(steps(loaded(make(), found["state"])), len(rest))) == rest


def broken(folder: Path, steps_per_epoch: int | None) -> Any:
    """The stream of rank 1 breaks off at some sample, and goes on when that is mended."""
    trouble = Fails(folder, 29, fail)
    make = partial(in_order, trouble, steps_per_epoch=steps_per_epoch)
    items, states = observe(make, 24)
    trouble.set(True)
    found = end(make())
    trouble.set(False)
    assert_mended(make, found, items, states)
    return found


@pytest.mark.parametrize("steps_per_epoch", [None, 20])
def test_a_rank_whose_stream_breaks_off_ends_all_at_the_same_step_at_once(
    ranks: Ranks, steps_per_epoch: int | None
) -> None:
    first, second = ranks.of(broken, steps_per_epoch)

    assert first["state"] == second["state"]
    assert len(first["items"]) == len(second["items"]) > 2
    assert second["said"].startswith("ShardError: ")
    assert "failed on the sample 29" in second["said"]
    assert first["said"].startswith("StreamError: The stream of rank 1 broke off before step")
    assert "OSError: the disk is gone" in first["said"]
    assert first["seconds"] < PATIENCE


def slow(folder: Path) -> Any:
    """Rank 1 stands still until the other has given up."""
    trouble = Fails(folder, 11, stand_still)
    make = partial(in_order, trouble)
    items, states = observe(make, 12)
    trouble.set(True)
    found = end(make())
    if dist.get_rank() == 0:
        trouble.marker.unlink()
    trouble.set(False)
    assert_mended(make, found, items, states)
    return found


def test_a_rank_that_stands_still_is_named_with_its_shard(ranks: Ranks) -> None:
    first, second = ranks.of(slow)

    assert "1 of 2 ranks" in first["said"]
    assert "rank 1" in first["said"]
    assert "chunk" in first["said"]
    assert second["said"].startswith("StreamError")
    assert len(first["items"]) == len(second["items"])
    assert PATIENCE <= first["seconds"] < PATIENCE + 5


OTHERWISE: dict[str, Callable[[int], Any]] = {
    "seed": lambda rank: stream_loader(chunks(seed=rank), timeout=PATIENCE),
    "chunks": lambda rank: stream_loader(chunks(SIZES[: 6 - rank]), timeout=PATIENCE),
    "batch_size": lambda rank: stream_loader(chunks(), batch_size=2 + rank, timeout=PATIENCE),
    "steps_per_epoch": lambda rank: stream_loader(chunks(), steps_per_epoch=2 + rank, timeout=PATIENCE),
    "progress": lambda rank: loaded(in_order(None), observe(partial(in_order, None), 6)[1][2 + 3 * rank]),
    "first sample": lambda rank: stream_loader(as_stream(IterableWrapper(Divided())), timeout=PATIENCE),
    "workers": lambda rank: stream_loader(chunks(), num_workers=2 * rank, kind=InThisProcess, timeout=PATIENCE),
}


def disagree(folder: Path) -> Any:
    """Ranks that were given other streams."""
    found = {}
    for name, make in OTHERWISE.items():
        dist.barrier()
        with pytest.raises(StatefulError) as caught:
            list(islice(make(dist.get_rank()), 60))
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    return found


@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_read_other_streams_are_told_so(ranks: Ranks, name: str) -> None:
    for found in ranks.of(disagree):
        assert found[name].startswith("RankMismatchError")
        assert name in found[name]


# Several loaders, large states


def side_by_side(folder: Path) -> Any:
    """Two loaders of one class, of unequal length, in one loop; and one loader that is left in the middle."""

    def make() -> list[Any]:
        return [stream_loader(chunks()), stream_loader(chunks(OTHER_SIZES, 100))]

    both = [[plain(batch) for batch in batches] for batches in zip(*make(), strict=False)]
    alone = [list(map(plain, loader)) for loader in make()]
    loader, whole = stream_loader(chunks()), stream_loader(chunks())
    first = list(map(plain, islice(loader, 3)))
    passes = [list(map(plain, whole)) for _ in range(2)]
    return {"both": both, "alone": alone, "first": first, "next": list(map(plain, loader)), "passes": passes}


def test_streams_in_one_loop_and_passes_that_are_left_are_not_mixed_up(ranks: Ranks) -> None:
    for found in ranks.of(side_by_side):
        assert found["both"] == [list(batches) for batches in zip(*found["alone"], strict=False)]
        assert found["first"] == found["passes"][0][:3]
        assert found["next"] == found["passes"][1]


def large(folder: Path) -> Any:
    """Datasets whose state is large, stopped and resumed."""
    found = []
    for options in ({}, {"steps_per_epoch": 7, "num_workers": 2, "kind": InThisProcess}):
        # Unequal shares: of 751 samples and of 750, or of 376 at most.
        make = partial(lambda options: stream_loader(RemembersMuch(1501), batch_size=50, **options), options)
        assert_gives_the_same(make, [6, 0, 3, 11], total=36)
        found.append(observe(make, 36)[1])
    return found


def test_large_states_of_a_dataset_reach_the_other_ranks(ranks: Ranks) -> None:
    first, second = ranks.of(large)

    assert first == second
    for states in first:
        slots = [[slot for slot in state["progress"]["slots"] if slot is not None] for state in states]
        held = [[len(json.dumps(slot["state"])) for slot in of] for of in slots]
        assert sum(len(sizes) > 1 and min(sizes) > 1024 for sizes in held) > 2
