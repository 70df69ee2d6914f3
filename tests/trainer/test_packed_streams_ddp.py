"""Packed streams over chains of other ranks and workers: every token of every epoch once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import Settle, assert_in_step, on_ranks, over_all, plain
from support.ranks import Ranks
from support.runs import ended
from support.stream_runs import OTHER_FIRST, chunks, document, packed, tokens_in

from lightning_stateful import MixedStream, Packing, StreamDataModule

SIZES, OTHER_SIZES = (9, 4, 11, 2, 6), (5, 8, 3)
PACKINGS = {
    "split": Packing(8),
    "whole": Packing(10, how="whole", too_long="split", open_sequences=3),
}
STREAMS = ("chunks", "mixture")
# Ranks, workers, and the steps or epochs at whose end a run leaves the rest to the next.
LEGS: tuple[tuple[int, int, dict[str, int]], ...] = (
    (2, 0, {"max_steps": 4}),
    (1, 2, {"max_steps": 7}),
    (2, 2, {"max_steps": 18}),
    (1, 0, {"max_epochs": 2}),
)
OF_WORKERS: tuple[tuple[int, int, dict[str, int]], ...] = (
    (1, 0, {"max_steps": 5}),
    (1, 2, {"max_steps": 11}),
    (1, 1, {"max_steps": 16}),
    (1, 2, {"max_steps": 50}),
    (1, 0, {"max_epochs": 2}),
)


def stream_of(kind: str) -> Any:
    one = chunks(SIZES, transform=document)
    if kind == "chunks":
        return one
    two = chunks(OTHER_SIZES, OTHER_FIRST, transform=document, seed=4)
    return MixedStream({"one": one, "two": two}, weights={"one": 2, "two": 1}, by="sample", seed=4)


def tokens_of(kind: str) -> list[int]:
    others = range(OTHER_FIRST, OTHER_FIRST + sum(OTHER_SIZES)) if kind == "mixture" else ()
    return tokens_in([*range(sum(SIZES)), *others])


def make(how: str, kind: str, num_workers: int) -> StreamDataModule:
    options = {"val": None, "batch_size": 1, "num_workers": num_workers}
    return packed(how, stream_of(kind), packing=PACKINGS[how], **options)


def leg(folder: Path, number: int, left: Path, legs: Any = LEGS) -> dict[tuple[str, str], dict[str, Any]]:
    """One of the legs of every stream and packing, from the checkpoints that the one before has left."""
    ranks, workers, until = legs[number]
    found = {}
    for how in PACKINGS:
        for kind in STREAMS:
            path = left / f"{how}, {kind}, {number - 1}.ckpt" if number else None
            options = {"max_epochs": 2, **(on_ranks(callbacks=[Settle()]) if ranks > 1 else {}), **until}
            run = ended(
                left / f"{how}, {kind}, {number}.ckpt", partial(make, how, kind, workers), ckpt_path=path, **options
            )
            found[how, kind] = plain(run)
    return found


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What the ranks of each leg did."""
    left = tmp_path_factory.mktemp("left")
    ranks = Ranks(2, tmp_path_factory.mktemp("packed streams"))
    return [
        ranks.of(leg, number, left) if number_of > 1 else [leg(left, number, left)]
        for number, (number_of, _, _) in enumerate(LEGS)
    ]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.slow
def test_two_ranks_one_and_two_with_workers_serve_every_token_of_two_passes_once(
    chained: list[list[Any]], how: str, kind: str
) -> None:
    legs = [[run[how, kind] for run in runs] for runs in chained]
    for runs in legs:
        assert_in_step(runs)
        assert over_all(runs)
    every = tokens_of(kind)
    first = Counter(token for runs in legs for token in over_all(runs, 0))
    second = Counter(token for runs in legs for token in over_all(runs, 1))
    # On two ranks less than a step may be left, which comes first in the next pass.
    assert max(first.values()) == 1
    left = Counter(every) - first
    assert left.total() <= 2 * PACKINGS[how].sequence_length
    assert second == Counter(every) + left


# Two ranks and one change their workers above, and one process its own at every step in test_stream_elastic.
@pytest.mark.slow
def test_chains_of_other_numbers_of_workers_serve_every_token_of_each_pass_once(tmp_path: Path) -> None:
    legs = [leg(tmp_path, number, tmp_path, OF_WORKERS) for number in range(len(OF_WORKERS))]
    for how in PACKINGS:
        for kind in STREAMS:
            for epoch in range(2):
                assert over_all([runs[how, kind] for runs in legs], epoch) == tokens_of(kind), (how, kind, epoch)
