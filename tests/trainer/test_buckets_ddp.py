"""Batches of like lengths on real ranks: in step, exact over stops, and handed over between any numbers of ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import (
    Link,
    Settle,
    assert_chain,
    assert_chains,
    assert_in_step,
    chain_of,
    hand_over,
    on_ranks,
    over_all,
    plain,
    run,
    steps_of,
)
from support.ledger import batches, trained
from support.quick import thinned
from support.ranks import Ranks
from support.texts import MODULES, VAL_FIRST, Texts, fits, length_of, padding_of

# Samples that two and three ranks cannot share without remainders.
NUM_SAMPLES, NUM_VAL = 91, 23
EVERY_SAMPLE = list(range(NUM_SAMPLES))
NAMES = ("tokens", "given boundaries", "batch size")
# Numbers of ranks; two are stopped and resumed below.
NUMBERS = thinned([2, 3], [2])
STOPS = [("on_before_backward", 0, 3), ("on_validation_batch_end", 0, 0), ("on_train_batch_end", 1, 5)]
# Steps of the first epoch after which each number of ranks leaves the rest to the next.
HANDED_OVER = {2: {"max_steps": 3}, 3: {"max_steps": 5}, 1: {"max_steps": 8, "max_epochs": 2}}
Runs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:  # two or three of them
    folder = tmp_path_factory.mktemp("buckets")
    return {number: Ranks(number, folder / str(number)) for number in (2, 3)}


def make(name: str, **options: Any) -> Any:
    data = {"train": Texts(NUM_SAMPLES), "val": Texts(NUM_VAL, first=VAL_FIRST), "log_data": True}
    return MODULES[name](**{**data, **options})


def chain(folder: Path, name: str, stops: list[Any] = STOPS, **options: Any) -> list[Link]:
    return chain_of(partial(make, name, **options), folder, stops, callbacks=lambda: [Settle()])


def whole(folder: Path, name: str) -> dict[str, Any]:
    return plain(run(partial(make, name)))


def uninterrupted(ranks: dict[int, Ranks], number: int, name: str) -> Runs:
    """The runs of all ranks."""
    return ranks[3].of(whole, name) if number == 3 else [parts[0][0] for parts in ranks[2].of(chain, name)]


# In step


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", thinned(NAMES, ["batch size"]))
def test_all_ranks_take_the_same_steps_and_every_sample_comes_once(
    ranks: dict[int, Ranks], name: str, number: int
) -> None:
    runs = uninterrupted(ranks, number, name)
    assert_in_step(runs)
    assert all(fits(name, batch) for run in runs for batch in batches(run["ledger"]))
    for epoch in range(2):
        steps = steps_of(runs, epoch)
        assert len(steps) == runs[0]["length"]
        assert over_all(runs, epoch) == EVERY_SAMPLE
        if name != "batch size":
            assert all(len({len(batch) for batch in step}) == 1 for step in steps[:-1])
    assert steps_of(runs, 0) != steps_of(runs, 1)
    assert runs[0]["state"]["progress"]["epoch"] == 2
    assert len(json.dumps(runs[0]["state"])) < 1000


@pytest.mark.parametrize("number", NUMBERS)
def test_all_ranks_of_a_step_serve_the_same_bucket_save_where_one_ends(ranks: dict[int, Ranks], number: int) -> None:
    def bucket(index: int) -> int:
        return sum(length_of(index) > end for end in (3, 8))

    steps = steps_of(uninterrupted(ranks, number, "given boundaries"), 0)
    of_step = [{bucket(index) for batch in step for index in batch} for step in steps]
    mixed = [found for found in of_step if len(found) > 1]
    assert all(max(found) - min(found) == 1 for found in mixed)
    # Three buckets end twice before the last.
    assert len(mixed) <= 2
    assert {max(found) for found in of_step} == {0, 1, 2}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", thinned(NAMES, ["batch size"]))
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: dict[int, Ranks], name: str, number: int) -> None:
    runs = uninterrupted(ranks, number, name)
    for epoch in range(2):
        assert len({len(batches(run["ledger"], epoch, "val")) for run in runs}) == 1
        assert over_all(runs, epoch, "val") == list(range(VAL_FIRST, VAL_FIRST + NUM_VAL))


@pytest.mark.parametrize("name", thinned(NAMES, ["batch size"]))
def test_padding_is_logged_over_all_ranks(ranks: dict[int, Ranks], name: str) -> None:
    runs = uninterrupted(ranks, 3, name)
    steps = [*steps_of(runs, 0), *steps_of(runs, 1)]
    expected = [(step, pytest.approx(padding_of(name, *of_ranks))) for step, of_ranks in enumerate(steps)]
    assert runs[0]["padding"] == expected


def few_samples(folder: Path, kind: str, length: int) -> dict[str, Any]:
    return plain(run(lambda: MODULES[kind](train=Texts(length), val=None)))


@pytest.mark.parametrize(("kind", "length"), [("tokens", 2), ("batch size", 4)])
def test_hardly_any_samples_still_give_all_ranks_the_same_steps(
    ranks: dict[int, Ranks], kind: str, length: int
) -> None:
    runs = ranks[3].of(few_samples, kind, length)
    for epoch in range(2):
        assert all(batch for step in steps_of(runs, epoch) for batch in step)
        assert set(over_all(runs, epoch)) == set(range(length))
        # Only where there are fewer samples than ranks is one of them served twice.
        assert len(over_all(runs, epoch)) == max(length, 3)


# Stops


@pytest.mark.parametrize("name", thinned(NAMES, ["batch size"]))
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank(ranks: dict[int, Ranks], name: str) -> None:
    assert_chains(ranks[2].of(chain, name))


def workers(folder: Path) -> list[Link]:
    stops = [("on_train_batch_end", 0, 4)]
    return chain(folder, "tokens", stops, val=None, num_workers=2, persistent_workers=True)


def test_workers_change_nothing_on_any_rank(ranks: dict[int, Ranks]) -> None:
    for parts, expected in zip(ranks[2].of(workers), uninterrupted(ranks, 2, "tokens"), strict=True):
        assert_chain(parts, served_again=0)
        assert batches(parts[0][0]["ledger"]) == batches(expected["ledger"])


# Another number of ranks


def handed_over(folder: Path, name: str) -> dict[str, Any]:
    options = on_ranks()
    return hand_over(folder.parents[1], name, partial(make, name), HANDED_OVER, options["devices"], **options)


def to_the_end(folder: Path, name: str) -> list[Link]:
    """The last of an epoch that was handed over, and once more from within it."""
    left = folder.parents[1] / f"{name}, {list(HANDED_OVER)[-1]}.ckpt"
    return chain_of(partial(make, name), folder, [("on_train_batch_end", 0, 0)], ckpt_path=left)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_an_epoch_is_handed_over_from_two_ranks_to_three_to_one_to_two(ranks: dict[int, Ranks], name: str) -> None:
    begun = ranks[2].of(handed_over, name)
    more = ranks[3].of(handed_over, name)
    one = [hand_over(ranks[2].folder.parent, name, partial(make, name), HANDED_OVER, 1)]
    last = assert_chains(ranks[2].of(to_the_end, name))
    steps = [len(steps_of(runs, 0)) for runs in (begun, more, one, last)]
    assert steps[:3] == [3, 2, 3], HANDED_OVER
    assert steps[3] > 1
    assert sorted(index for runs in (begun, more, one, last) for index in over_all(runs, 0)) == EVERY_SAMPLE
    for runs in (begun, more, one, last):
        assert_in_step(runs)
        assert all(fits(name, batch) for run in runs for batch in batches(run["ledger"]))
        # What was handed over is served in step, and logged.
        if name != "batch size":
            assert all(len({len(batch) for batch in step}) == 1 for step in steps_of(runs, 0)[:-1])
        expected = [pytest.approx(padding_of(name, *of_ranks)) for of_ranks in steps_of(runs, 0)]
        assert [values for _, values in runs[0]["padding"]][: len(expected)] == expected
    # The epoch ends where one on two ranks does, and the next is a whole one.
    assert [event[2] for event in trained(last[0]["ledger"]) if event[1] == 0][-1] == last[0]["length"] - 1
    assert steps_of(last, 1) == steps_of(uninterrupted(ranks, 2, name), 1)
