"""Orders of several datasets keep the laws of all orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.orders import OrderCase, every_law

from lightning_stateful.mixture import MixtureOrder, Sources
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


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mixtures_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)
