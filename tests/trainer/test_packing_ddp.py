"""Packed documents on real ranks: in step, exact over stops, and handed over between any numbers of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import (
    Link,
    Settle,
    assert_chains,
    assert_in_step,
    chain_of,
    hand_over,
    on_ranks,
    over_all,
    steps_of,
)
from support.packed_data import FIRSTS, NUM_VAL, SIZES, VAL_FIRST, Documents, length_of, mixed, packed, tokens_of
from support.quick import thinned
from support.ranks import Ranks
from support.runs import train

VAL = Documents(NUM_VAL, VAL_FIRST)
MODULES: dict[str, Callable[..., Any]] = {
    "split": partial(packed, "split"),
    "whole": partial(packed, "whole"),
    "mixture": partial(
        mixed, "whole", stop="all_exhausted", val={"a": (VAL, [length_of(VAL[number]) for number in range(NUM_VAL)])}
    ),
}
STOPS = [("on_before_backward", 0, 3), ("on_train_batch_end", 1, 5)]
# Steps of the first epoch after which each number of ranks leaves the rest to the next.
HANDED_OVER = {2: {"max_steps": 3}, 3: {"max_steps": 5}, 1: {"max_steps": 8, "max_epochs": 2}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    folder = tmp_path_factory.mktemp("packing")
    return {number: Ranks(number, folder / str(number)) for number in (2, 3)}


def chain(folder: Path, name: str) -> list[Link]:
    return chain_of(MODULES[name], folder, STOPS, callbacks=lambda: [Settle()])


def handed_over(folder: Path, name: str) -> dict[str, Any]:
    options = on_ranks()
    return hand_over(folder.parents[1], name, MODULES[name], HANDED_OVER, options["devices"], **options)


def to_the_end(folder: Path, name: str) -> list[Link]:
    """The last of an epoch that was handed over, and once more from within it."""
    left = folder.parents[1] / f"{name}, {list(HANDED_OVER)[-1]}.ckpt"
    return chain_of(MODULES[name], folder, [("on_train_batch_end", 0, 0)], ckpt_path=left)


# A mixture packs its sources whole as well.
@pytest.mark.parametrize("name", thinned(MODULES, ["whole"]))
def test_stops_and_other_ranks_leave_every_token_of_an_epoch_once(ranks: dict[int, Ranks], name: str) -> None:
    whole = assert_chains(ranks[2].of(chain, name))
    parts = [(SIZES[source], FIRSTS[source]) for source in SIZES] if name == "mixture" else [()]
    tokens = sorted(token for part in parts for token in tokens_of(*part))
    for epoch in range(2):
        assert over_all(whole, epoch) == tokens
        assert over_all(whole, epoch, "val") == tokens_of(NUM_VAL, VAL_FIRST)
    assert len(json.dumps(whole[0]["state"])) < 800

    begun = ranks[2].of(handed_over, name)
    more = ranks[3].of(handed_over, name)
    one = [hand_over(ranks[2].folder.parent, name, MODULES[name], HANDED_OVER, 1)]
    last = assert_chains(ranks[2].of(to_the_end, name))
    legs = (begun, more, one, last)
    assert [len(steps_of(runs, 0)) for runs in legs[:3]] == [3, 2, 3]
    assert sorted(token for runs in legs for token in over_all(runs, 0)) == tokens
    for runs in legs:
        assert_in_step(runs)
    assert steps_of(last, 1) == steps_of(whole, 1)
    # One process with batches as large as those of both ranks takes the same tokens in each step.
    alone = [{"ledger": train(lambda: MODULES[name](batch_size=4), max_epochs=1).ledger}]
    steps = [[token for batch in step for token in batch] for step in steps_of(whole, 0)]
    assert [list(step[0]) for step in steps_of(alone, 0)] == steps


LIMITED: dict[str, tuple[int, Callable[..., Any]]] = {
    "epochs": (800, partial(packed, "whole", val=None, max_tokens_total=800)),
    "steps of a mixture": (700, partial(mixed, "split", num_steps=9, max_tokens_total=700)),
}
LEGS = {2: {"max_steps": 3}, 3: {"max_steps": 12}, 1: {}}


def limited(folder: Path, name: str) -> dict[str, Any]:
    options = on_ranks(max_epochs=9)
    return hand_over(folder.parents[1], f"limited {name}", LIMITED[name][1], LEGS, options["devices"], **options)


@pytest.mark.parametrize("name", LIMITED)
def test_other_ranks_stop_after_as_many_tokens(ranks: dict[int, Ranks], name: str) -> None:
    limit, make = LIMITED[name]
    legs = [ranks[2].of(limited, name), ranks[3].of(limited, name)]
    legs.append([hand_over(ranks[2].folder.parent, f"limited {name}", make, LEGS, 1, max_epochs=9)])
    steps = [step for runs in legs for epoch in range(9) for step in steps_of(runs, epoch)]
    sizes = [sum(map(len, step)) for step in steps]
    assert sum(sizes[:-1]) < limit <= sum(sizes)
    assert steps_of(legs[1], 1) if name == "epochs" else legs[1]
