"""The ledger of a stream says shard and number of each sample that was trained on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import chain_of
from support.ledger import Numbers, batches
from support.ranks import Ranks
from support.runs import stopped, train
from support.stream_runs import MODULES, OTHER_FIRST, OTHER_SIZES, SIZES, chunks, document, module, packed

from lightning_stateful import MixedStream, StatefulDataCallback
from lightning_stateful.audit import read_ledger
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.ledger.over_time import coverage_of
from lightning_stateful.streams import IndexedStream

KINDS = [kind for kind in MODULES if not kind.startswith("own")]
# Of these a sample's place in its shard is another than in the file.
OF_STAGES = ("filter", "interleave", "concatenate", "shuffle")


def place_of(number: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, int]:
    """The shard of a sample, and its place there."""
    ends = list(itertools.accumulate(sizes))
    shard = next(shard for shard, end in enumerate(ends) if number < end)
    return shard, number - ends[shard] + sizes[shard]


def shard_and_place(number: int) -> tuple[int, int]:
    """The same among the shards of two sources."""
    if number < OTHER_FIRST:
        return place_of(number)
    shard, place = place_of(number - OTHER_FIRST, OTHER_SIZES)
    return len(SIZES) + shard, place


def samples_of(ids: tuple[int, ...], *, are_tokens: bool) -> list[int]:
    """The samples of a batch; of packed documents those that begin in it."""
    return [token // 100 for token in ids if token % 100 == 0] if are_tokens else list(ids)


def noted(folder: Path) -> list[list[Any]]:
    """Pass and item of each sample, batch by batch."""
    found: dict[tuple[int, int, int], list[Any]] = {}
    for (epoch, _), rows in read_ledger(folder / "ledger").rows[""].items():
        for row in rows:
            found.setdefault((row.epoch, row.batch, row.rank), []).extend((epoch, *item) for item in row.items)
    return [found[at] for at in sorted(found)]


def writing(folder: Path) -> Any:
    """Trains with a ledger."""

    def run(make: Callable[[], Any], callbacks: Any = (), **options: Any) -> Any:
        writer = StatefulDataCallback(ledger=folder / "ledger")
        return train(make, callbacks=[writer, *callbacks], max_epochs=2, **options)

    return run


def more_kinds(kind: str, folder: Path) -> Any:
    """A stream of that name, or of one of ours with functions and windows."""
    if kind == "functions":
        return module(chunks().filter(lambda found: int(found["id"]) % 5 != 1).map(dict))
    if kind == "workers":
        return module(chunks(), num_workers=2)
    if kind == "crossing":
        return module(chunks(), steps_per_epoch=7)
    if kind == "left out":
        return module(chunks(), skip={0: range(3, 5), 1: range(1)})
    if kind == "no batches":
        return packed("split", chunks(transform=document), batch_size=1, drop_last=True)
    return MODULES[kind](folder)


@pytest.mark.filterwarnings("ignore:.*has a resume read the shard again", "ignore:.*were read again, and left out")
@pytest.mark.parametrize("kind", [*KINDS, "functions", "workers", "crossing", "left out", "no batches"])
def test_samples_of_a_stream_are_known_by_shard_and_number(tmp_path: Path, files: Path, kind: str) -> None:
    def make() -> Any:
        return more_kinds(kind, files)

    run = writing(tmp_path)
    whole = run(make)
    uninterrupted = noted(tmp_path)
    found = read_ledger(tmp_path / "ledger")
    shards = found.starts[0].header.loaders[""]["shards"]
    trained = batches(whole.ledger)
    are_tokens = kind.startswith("packed") or kind == "no batches"
    assert len(uninterrupted) == len(trained)
    by_item: dict[Any, int] = {}
    for items, ids in zip(uninterrupted, trained, strict=True):
        numbers = samples_of(ids, are_tokens=are_tokens)
        assert len(items) == len(numbers)
        if kind not in OF_STAGES:
            places = [(shards.index(shard), place) for _, shard, place in items]
            assert sorted(places) == sorted(map(shard_and_place, numbers))
            continue
        # No other sample has this number in a pass.
        assert all(by_item.setdefault(item, number) == number for item, number in zip(items, numbers, strict=True))
        assert len(set(items)) == len(items)
    # A start that stops, and one that goes on.
    (tmp_path / "ledger").rename(tmp_path / "whole")
    stopped(tmp_path / "a.ckpt", make, epoch=1, batch=2, run=run)
    run(make, ckpt_path=tmp_path / "a.ckpt")
    assert noted(tmp_path) == uninterrupted
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert not any("were only counted" in note or "may begin in one pass" in note for note in found.notes())


def test_a_sample_that_comes_again_after_a_resume_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "a.ckpt", lambda: module(chunks()), batch=4, run=writing(tmp_path))
    # Another seed deals out other samples behind the checkpoint.
    with pytest.warns(StatefulWarning, match=r"goes on with another (sources.rows.)?seed, as was accepted"):
        writing(tmp_path)(lambda: module(chunks(seed=8), accept=("seed",)), ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    (twice,) = (one for one in found.findings() if one.kind == "twice" and one.epoch == 0)
    assert all(f"sample {item.number} of {item.shard}" in twice.text for item in twice.items)
    picture = coverage_of(found)
    assert picture is not None
    assert picture.of_shards
    assert picture.is_again.sum() == twice.number
    # Samples are counted shard by shard.
    assert sorted(set(picture.items.tolist())) == list(range(sum(SIZES)))


def test_a_key_takes_the_place_of_numbers(tmp_path: Path) -> None:
    callback = StatefulDataCallback(ledger=tmp_path / "ledger", ledger_key=lambda batch: batch["id"])
    whole = train(lambda: module(chunks()), callbacks=[callback], max_epochs=1)
    rows = read_ledger(tmp_path / "ledger").rows[""][0, 0]
    assert [tuple(row.items) for row in rows] == batches(whole.ledger)


def test_samples_of_a_dataset_beside_streams_are_known_by_their_index(tmp_path: Path) -> None:
    def make(seed: int = 4, **options: Any) -> Any:
        rows = IndexedStream(Numbers(30, first=200), shard_size=4, seed=seed)
        return module(MixedStream({"rows": rows, "one": chunks()}, by="sample", seed=4), **options)

    stopped(tmp_path / "a.ckpt", make, batch=9, run=writing(tmp_path))
    with pytest.warns(StatefulWarning, match=r"goes on with another (sources.rows.)?seed, as was accepted"):
        again = writing(tmp_path)(lambda: make(5, accept=("sources", "seed", "dataset")), ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    ids = [number for batch in batches(again.ledger, 1) for number in batch if number >= 200]
    assert sorted(item.number for item in found.items(1) if item.shard == "rows: by index") == sorted(
        number - 200 for number in ids
    )
    (twice,) = (one for one in found.findings() if one.kind == "twice" and one.epoch == 0)
    assert all(item.shard == "rows: by index" for item in twice.items)


def mixed() -> Any:
    streams = {"one": chunks(), "other": chunks(OTHER_SIZES, OTHER_FIRST)}
    return module(MixedStream(streams, weights=[2, 1], by="sample", stop="cycle"), num_workers=1)


def on_two(folder: Path) -> None:
    moments = [("on_train_batch_end", 0, 3), ("on_train_batch_end", 1, 1)]
    chain_of(mixed, folder, moments, callbacks=lambda: [StatefulDataCallback(ledger=folder / "ledger")])


def test_ranks_have_each_sample_of_a_pass_once_over_resumes(ranks: Ranks) -> None:
    ranks.of(on_two)
    folder = ranks.folder_of(on_two)
    found = read_ledger(folder / "ledger")
    assert found.findings() == []
    assert len(found.starts) == 3
    passes = {at: [item for row in rows for item in row.items] for at, rows in found.rows[""].items()}
    assert len(passes) >= 2
    for items in passes.values():
        assert len(set(items)) == len(items)
    assert all(item.shard.startswith(("one: chunk ", "other: chunk ")) for items in passes.values() for item in items)
