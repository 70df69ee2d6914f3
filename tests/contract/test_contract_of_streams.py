"""Loaders of streams obey the eight laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.quick import thinned
from support.stream_cases import (
    OTHER_SIZES,
    Divided,
    InThisProcess,
    RemembersWhereItReads,
    budgeted,
    chunks,
    drawn,
    mixed,
    observe,
    packed,
    stream_loader,
)

from lightning_stateful.testing import LAWS, Recorder

Make = Callable[[int, int], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

few = partial(chunks, (4, 1, 0, 3))


def of(make_dataset: Callable[[], Any], *, cut: bool = False, **options: Any) -> Make:
    """A loader on one rank, whatever is asked for: in one process ranks know nothing of each other."""

    def make(num_replicas: int, rank: int) -> Any:
        dataset = make_dataset()
        return stream_loader(dataset, config=budgeted(dataset) if cut else None, **options)

    return make


WORKERS: dict[str, Any] = {"num_workers": 3, "kind": InThisProcess}
IMPLEMENTERS: dict[str, Make] = {
    "chunks that draw": of(partial(few, transform=drawn), batch_size=3, drop_last=True, **WORKERS),
    "running windows": of(lambda: few().recurrent(lambda state, number: (state, number), 0).windowed(2)),
    "chunks in tokens": of(few, cut=True),
    "packed": of(lambda: packed(few(), "whole"), **WORKERS),
    "mixed by sample": of(partial(mixed, by="sample", weights=[2, 1]), batch_size=4, steps_per_epoch=3),
    "mixed, in a cycle": of(partial(mixed, stop="cycle"), batch_size=5, **WORKERS),
    "an iterator with a state": of(partial(RemembersWhereItReads, 11), **WORKERS),
    "no state": of(partial(Divided, 11)),
}
# All laws read one recording of each.
RECORDERS = {name: Recorder(make) for name, make in IMPLEMENTERS.items()}
# Real ranks are in test_stream_ranks. What is keyed by shard has other keys at other steps; see below.
LAWS_OF_A_RANK = [law for law in LAWS if law not in ("rank-free", "steady")]


def outer_keys(state: Any) -> list[str]:
    """The keys of a state, but for those of a worker slot's state."""
    position = state["progress"]
    sources = [f"{name}.{key}" for name, source in position.get("sources", {}).items() for key in source]
    return [*state, *(f"position.{name}" for name in position), *sources]


def settings_of(loader: Any) -> dict[str, Any]:
    names = ("options", "batch_size", "drop_last", "num_workers", "topology")
    return {name: str(getattr(loader, name)) for name in names}


# Mixtures that begin a source again are changed and resumed in test_stream_elastic.
@pytest.mark.parametrize("law", LAWS_OF_A_RANK)
@pytest.mark.parametrize("name", thinned(IMPLEMENTERS, ["mixed, in a cycle"]))
def test_every_loader_of_streams_obeys_every_law(name: str, law: str) -> None:
    options: dict[str, Any] = {}
    if law == "not configuration":
        options = {
            "make_other": lambda: stream_loader(chunks(OTHER_SIZES, seed=5)),
            "settings": settings_of,
            "stops": "spread",
        }
    elif law == "fresh" and name == "mixed, in a cycle":
        # Its epochs are the longest, and each stop is read to the end in workers.
        options = {"stops": "spread"}
    LAWS[law](RECORDERS[name], **options)


@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_all_that_is_not_keyed_by_shard_has_the_same_keys_at_every_step(name: str) -> None:
    _, states = observe(lambda: IMPLEMENTERS[name](1, 0), 25)

    assert len({str(sorted(outer_keys(state))) for state in states}) == 1
    assert len({str(state["config"]) for state in states}) == 1
