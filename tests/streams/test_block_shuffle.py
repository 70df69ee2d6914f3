"""Samples shuffled in blocks: one and the same from every place, a block never stored, none travelling further."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.shards import NumberedShards
from test_running import assert_obeys

from lightning_stateful.errors import PositionError, ShardError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import reading
from lightning_stateful.streams.block_shuffle import BlockShuffle
from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.running import MapStage, WindowedStage
from lightning_stateful.streams.stage import Item, Open, Place

SIZES = [7, 0, 1, 12, 3, 30, 2]
ORDER = (5, 1, 0, 6, 3, 2, 4)


@pytest.fixture(autouse=True)
def _states_of_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 items holds for shards of a few, as these tests have."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)


def shuffled(
    sizes: Sequence[int] = SIZES,
    numbers: Sequence[int] = ORDER,
    *,
    size: int = 8,
    seed: int = 0,
    own: Any = None,
    **options: Any,
) -> Open:
    """Opens shards of numbered samples, shuffled."""

    def read(place: Place | None) -> Reading:
        return Reading(NumberedShards(sizes, **options), numbers, 0, place, **(own or {}))

    return lambda place: BlockShuffle(read, place, size=size, seed=seed)


def names(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Shards and numbers of samples, which the samples themselves know too."""
    found = [(item.shard, item.number) for item in items]
    assert found == [item.value[2:4] for item in items]
    return found


def in_order(sizes: Sequence[int] = SIZES, numbers: Sequence[int] = ORDER) -> list[tuple[int, int]]:
    return [(shard, number) for shard in numbers for number in range(sizes[shard])]


@pytest.mark.parametrize("size", [2, 3, 8, 29, 55, 56, 1000])
@pytest.mark.parametrize("state_size", [None, 0, 60])
def test_a_block_is_the_same_from_every_place(size: int, state_size: int | None) -> None:
    items = assert_obeys(shuffled(size=size, state_size=state_size), random.Random(size))
    assert sorted(names(items)) == sorted(in_order())
    assert names(items) != in_order()


def test_blocks_are_consecutive_and_span_shards() -> None:
    for size in (2, 5, 8, 20, 55, 70):
        found, expected = names(list(shuffled(size=size)(None))), in_order()
        blocks = [sorted(found[first : first + size]) for first in range(0, len(found), size)]
        assert blocks == [sorted(expected[first : first + size]) for first in range(0, len(found), size)]
    assert len({shard for shard, _ in names(shuffled(size=8)(None).take(40))[32:]}) == 3


def test_blocks_are_in_orders_of_their_own_by_seed_and_first_item() -> None:
    blocks = np.array([item.number for item in shuffled([800], (0,), size=8)(None)]).reshape(-1, 8) % 8
    assert len({tuple(block) for block in blocks.tolist()}) > 95
    # Each place of a block is taken by each of its items about as often.
    counts = [np.bincount(column, minlength=8) for column in blocks.T]
    assert np.max(counts) < 30
    others = [names(list(shuffled(size=8, seed=seed)(None))) for seed in range(5)]
    assert len({str(other) for other in others}) == 5


def test_a_block_begun_elsewhere_is_ordered_by_its_own_first_item() -> None:
    # The second shard is read by itself after a change of lanes: its block follows from its own first sample.
    alone = names(list(shuffled([9, 9], (1,), size=9)(None)))
    after = names(list(shuffled([9, 9], (0, 1), size=9)(None)))
    assert after[9:] == alone


def test_how_far_a_sample_travels_beside_a_true_shuffle() -> None:
    length, block = 6000, 300
    numbers = np.array([item.number for item in shuffled([length], (0,), size=block)(None)])
    travelled = np.abs(numbers - np.arange(length))
    true = np.abs(np.random.default_rng(0).permutation(length) - np.arange(length))
    assert travelled.max() < block
    # A third of the block, where a true shuffle has a third of all.
    assert travelled.mean() == pytest.approx((block**2 - 1) / (3 * block), rel=0.05)
    assert true.mean() == pytest.approx((length**2 - 1) / (3 * length), rel=0.05)
    assert travelled.mean() / true.mean() == pytest.approx(block / length, rel=0.1)


@pytest.mark.parametrize("size", [2, 10, 100, 5000])
def test_no_block_is_ever_stored(size: int) -> None:
    stage = shuffled([3000, 3000], (1, 0), size=size, state_size=0)(None)
    lengths = []
    for number in range(6000):
        next(stage)
        if number % 37 == 0:
            lengths.append(len(json.dumps(stage.place())))
    # Two numbers beside what the shards are said to stand at, however large the block is.
    assert max(lengths) <= 140


@pytest.mark.parametrize("state_size", [None, 0])
def test_going_on_reads_no_more_than_a_block_again_where_shards_can_say_where_they_stand(
    state_size: int | None,
) -> None:
    stage = shuffled([400], (0,), size=50, state_size=state_size)(None)
    stage.skip(333)
    asked: Counter[str] = Counter()
    rest = shuffled([400], (0,), size=50, state_size=state_size, asked=asked)(stage.place())
    next(rest)
    assert asked["read"] == (350 if state_size is None else 50)


def test_between_blocks_nothing_is_read_again_or_ahead() -> None:
    stage = shuffled([40], (0,), size=8, state_size=0)(None)
    stage.skip(16)
    assert stage.place()["since"] == 0
    asked: Counter[str] = Counter()
    shuffled([40], (0,), size=8, state_size=0, asked=asked)(stage.place())
    assert not asked["read"]


def test_runs_are_the_items_in_their_order_under_the_name_of_the_first() -> None:
    items = list(shuffled()(None))
    for seed in range(30):
        rng, stage, at = random.Random(seed), shuffled()(None), 0
        while at < len(items):
            number = rng.choice([0, 1, 2, 5, 9, 100])
            runs = stage.take_runs(number)
            for run in runs:
                assert (run.shard, run.first) == items[at][:2]
                assert run.values == [item.value for item in items[at : at + len(run.values)]]
                at += len(run.values)
            assert sum(len(run.values) for run in runs) == number or at == len(items)
            if rng.random() < 0.5:
                stage = shuffled()(stage.place())


def test_values_that_look_like_nothing_are_samples() -> None:
    asked = [None, 0, [], "", False]
    shards = NumberedShards([5])
    open_map = lambda place: MapStage(  # noqa: E731  # the stage below, opened at a place
        lambda at: Reading(shards, (0,), 0, at), place, function=lambda value: asked[value[3]], seed=None
    )
    items = assert_obeys(lambda place: BlockShuffle(open_map, place, size=3, seed=0), random.Random(0))
    assert sorted(repr(item.value) for item in items) == sorted(map(repr, asked))


@pytest.mark.parametrize("state_size", [None, 0])
def test_shards_left_out_count_once_and_keep_what_came_before(state_size: int | None) -> None:
    options: dict[str, Any] = {"fails": {5: 20, 3: 0, 4: -1}, "state_size": state_size, "own": {"on_error": "skip"}}
    for size in (2, 7, 60):
        items = assert_obeys(shuffled(size=size, **options), random.Random(size))
        kept = [name for name in in_order() if name[1] < options["fails"].get(name[0], 99)]
        assert sorted(names(items)) == sorted(name for name in kept if name[0] != 4)
        stage = shuffled(size=size, **options)(None)
        counts = []
        for _ in items:
            next(stage)
            stage = shuffled(size=size, **options)(stage.place())
            counts.append(stage.place()["at"]["skipped_shards"])
        assert counts == sorted(counts)
        assert next(stage, None) is None
        assert stage.place()["at"]["skipped_shards"] == 3


@pytest.mark.parametrize("fail", [0, 5, 10, 19])
def test_an_error_within_a_block_is_met_before_any_of_its_items(fail: int) -> None:
    stage = shuffled([30], (0,), size=10, fails={0: fail}, state_size=0)(None)
    taken = stage.take(fail // 10 * 10)
    place = json.dumps(stage.place())
    with pytest.raises(ShardError, match=f"at its sample {fail}"):
        next(stage)
    whole = list(shuffled([30], (0,), size=10)(None))
    assert taken + list(shuffled([30], (0,), size=10)(json.loads(place))) == whole


@pytest.mark.parametrize("fail", [5, 19])
def test_a_block_that_cannot_be_read_is_no_further_however_often_it_is_asked_for(fail: int) -> None:
    stage = shuffled([30], (0,), size=10, fails={0: fail}, state_size=0)(None)
    stage.skip(fail // 10 * 10)
    place = stage.place()
    for _ in range(3):
        with pytest.raises(ShardError, match=f"at its sample {fail}"):
            next(stage)
        assert stage.place() == place


def test_what_is_drawn_in_a_block_follows_from_its_sample_alone() -> None:
    with keep_randomness():
        options: dict[str, Any] = {"own": {"seed": 4}, "draws": True}
        drawn = {item[:2]: item.value[4:] for item in shuffled(size=9, **options)(None)}
        assert_obeys(shuffled(size=9, **options), random.Random(0))
        other = {item[:2]: item.value[4:] for item in shuffled(size=4, seed=9, **options)(None)}
    assert drawn == other
    assert len(set(drawn.values())) == len(drawn)


def test_windows_over_blocks_go_on_where_they_stand() -> None:
    for width, step in ((3, 1), (2, 5), (20, 3)):
        inner = shuffled(size=6, state_size=0)
        assert_obeys(lambda place, w=width, s=step, i=inner: WindowedStage(i, place, width=w, step=s), random.Random(1))


def test_closing_reaches_the_shard_that_is_open() -> None:
    asked: Counter[str] = Counter()
    stage = shuffled([30], (0,), size=4, asked=asked)(None)
    next(stage)
    stage.close()
    assert asked["closed"] == asked["opened"] == 1


@pytest.mark.parametrize("now", [20, 22, 25])
def test_shards_that_became_shorter_than_the_place_within_a_block_are_refused(now: int) -> None:
    stage = shuffled([30], (0,), size=10)(None)
    stage.skip(26)
    place = stage.place()
    assert place["since"] == 6
    with pytest.raises(PositionError):
        list(shuffled([now], (0,), size=10)(place))
