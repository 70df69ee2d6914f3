"""Mixtures keep the laws of all orders; their configurations, and progress that is carried into others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.mixtures import mixture, round_robin
from support.orders import OrderCase, every_law, through_json
from support.quick import thinned

from lightning_stateful.core.order import Progress
from lightning_stateful.errors import StateMismatchError
from lightning_stateful.mixture import MixtureOrder, Sources, WeightSchedule
from lightning_stateful.mixture.weights import DrawSchedule

LENGTHS = (31, 17, 24)
SCHEDULE = DrawSchedule((0, 5, 20), ((3, 1, 0), (1, 1, 1), (0, 3, 1)), "linear")


def an_order(lengths: tuple[int, ...], sizes: tuple[int, ...], draws: tuple[int, ...], **options: Any) -> MixtureOrder:
    sources = Sources(tuple("abc"), lengths, sizes)
    return MixtureOrder(sources=sources, draws=draws, seed=3, **options)


def case(
    sizes: tuple[int, ...] = (2, 3, 1), draws: tuple[int, ...] = (3, 1, 2), *, whole: bool = True, **options: Any
) -> OrderCase:
    longer = an_order(tuple(4 * length for length in LENGTHS), sizes, draws, **options)
    return OrderCase(
        order=an_order(LENGTHS, sizes, draws, **options),
        longer=longer if whole else None,
        samples=range(sum(LENGTHS)) if whole else None,
        drops=options.get("drop_last", False),
        shuffled=options.get("shuffle", True),
        cycles=options.get("num_steps") is None,
    )


CASES = {
    "by batch": case(),
    "in turn": case(draws=(1, 1, 1), in_turn=True),
    "by sample": case((2, 2, 2), by="sample"),
    "drop_last": case((2, 3, 2), drop_last=True),
    "unshuffled": case(shuffle=False),
    "first_exhausted": case(whole=False, stop="first_exhausted"),
    "cycle": case(whole=False, stop="cycle"),
    "num_steps": case(whole=False, num_steps=13),
    "num_steps by sample": case((2, 2, 2), whole=False, num_steps=13, by="sample"),
    "scheduled": case(whole=False, num_steps=13, schedule=SCHEDULE),
}


# A schedule has as many steps, by batch; in turn, draws are those of equal weights.
@every_law
@pytest.mark.parametrize("name", thinned(CASES, ["in turn", "unshuffled", "num_steps", "num_steps by sample"]))
def test_mixtures_keep_the_laws(law: Callable[[OrderCase], None], name: str) -> None:
    law(CASES[name])


def moved(order: MixtureOrder, progress: Progress, other: MixtureOrder) -> Progress:
    """The same progress, for another order."""
    return other.convert(through_json(progress), json.loads(json.dumps(order.config())))


def test_a_configuration_of_many_sources_or_points_is_short() -> None:
    many = mixture([9] * 8, 2, [1, 2, 3, 4, 5, 6, 7, 8])
    schedule = WeightSchedule({step: [step + 1, 1] for step in range(100)})
    assert many.config()["weights"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(str(mixture([9, 9], 2, schedule=schedule, num_steps=4).config()["weights"])) < 60


def test_what_changes_the_sequence_changes_the_configuration() -> None:
    plain = mixture([9, 3], 2, [2, 1])
    others = [
        mixture([9, 4], 2, [2, 1]),
        mixture([9, 3], [2, 1], [2, 1]),
        mixture([9, 3], 2, [3, 1]),
        mixture([9, 3], 2, [2, 1], drop_last=True),
        mixture([9, 3], 2, [2, 1], stop="cycle"),
        mixture([9, 3], 2, [2, 1], num_steps=3),
        mixture([9, 3], 2, [2, 1], by="sample"),
        mixture([9, 3], 2, num_steps=3, schedule=WeightSchedule({0: [2, 1]})),
        mixture([9, 3], 2, num_steps=3, schedule=WeightSchedule({0: [2, 1]}, "linear")),
        mixture([9, 3], 2, num_steps=3, schedule=WeightSchedule({0: [2, 1], 4: [1, 2]})),
        round_robin([9, 3], 2),
    ]
    configs = [json.dumps(order.config()) for order in (plain, *others)]
    assert len(set(configs)) == len(configs)


def test_a_source_of_another_length_keeps_its_passes() -> None:
    before, after = mixture([10, 10], 2, num_steps=20), mixture([30, 6], 2, num_steps=20)
    progress = before.plan(0, 2).progress_after(17)
    assert progress.details["served"] == {"a": 36, "b": 32}
    assert moved(before, progress, after).details["served"] == {"a": 96, "b": 20}


@pytest.mark.parametrize(
    ("before", "now"), [({"num_steps": 50}, {"stop": "cycle"}), ({"stop": "cycle"}, {"num_steps": 50})]
)
def test_passes_that_are_counted_otherwise_are_refused_within_an_epoch(before: Any, now: Any) -> None:
    saved = round_robin([100, 100], 5, **before)
    progress = saved.plan(0, 1).progress_after(20)
    with pytest.raises(StateMismatchError, match="cannot be changed within an epoch"):
        moved(saved, progress, round_robin([100, 100], 5, **now))


def test_passes_that_are_counted_otherwise_begin_anew_with_an_epoch() -> None:
    before, after = round_robin([20, 20], 5, stop="cycle"), round_robin([20, 20], 5, num_steps=6)
    end = before.plan(1, 1, before.plan(0, 1).progress_after(8))
    progress = moved(before, end.progress_after(0), after)
    assert after.plan(1, 1, progress).num_steps == 6


def test_the_end_of_an_epoch_goes_on_with_other_sources() -> None:
    before = mixture([9, 6], 2, num_steps=5)
    sources = replace(before.sources, names=("c", "d"))
    after = replace(before, sources=sources)
    progress = moved(before, before.plan(0, 2).progress_after(5), after)
    assert progress.details["served"] == {"c": 0, "d": 0}
    assert (after.plan(0, 2, progress).num_steps, after.plan(1, 2, progress).num_steps) == (0, 5)
