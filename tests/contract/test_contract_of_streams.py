"""Loaders of streams obey the eight laws."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import pytest
from support.stream_cases import (
    OTHER_SIZES,
    Divided,
    InThisProcess,
    Remembers,
    RemembersWhereItReads,
    budgeted,
    chunks,
    drawn,
    mixed,
    numbers,
    observe,
    stream_loader,
)

from lightning_stateful.testing import LAWS, ContractError, check_rank_free

Make = Callable[[int, int], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

few = partial(chunks, (4, 1, 0, 3))


def of(make_dataset: Callable[[], Any], *, cut: bool = False, **options: Any) -> Make:
    def make(num_replicas: int, rank: int) -> Any:
        dataset = make_dataset()
        config = budgeted(dataset) if cut else None
        return stream_loader(dataset, config=config, num_replicas=num_replicas, rank=rank, **options)

    return make


IMPLEMENTERS: dict[str, Make] = {
    "chunks": of(few),
    "chunks in order": of(partial(few, shuffle=False)),
    "chunks, drop_last": of(few, batch_size=3, drop_last=True),
    "chunks one by one": of(few, batch_size=None),
    "chunks that draw": of(partial(few, transform=drawn)),
    "chunks in steps": of(few, steps_per_epoch=3),
    "chunks in tokens": of(few, cut=True),
    "chunks, three workers": of(few, num_workers=3, kind=InThisProcess),
    "chunks, for evaluation": of(few, exact=True),
    "windows": of(lambda: few().windowed(2)),
    "running state": of(lambda: few().recurrent(lambda state, number: (state, number), 0)),
    "mixed by batch": of(mixed, batch_size=4),
    "mixed by sample": of(partial(mixed, by="sample", weights=[2, 1]), batch_size=4),
    "mixed, cut short": of(partial(mixed, stop="first_exhausted"), batch_size=4, num_workers=2, kind=InThisProcess),
    "mixed, in a cycle": of(partial(mixed, stop="cycle"), batch_size=5),
    "a dataset with a state": of(partial(Remembers, 11)),
    "an iterator with a state": of(partial(RemembersWhereItReads, 11), num_workers=2, kind=InThisProcess),
    "no state": of(partial(Divided, 11)),
}
# In one process ranks know nothing of each other; real ones are in test_stream_ranks. What is keyed by shard has
# other keys at other steps; the test below says what is steady.
LAWS_OF_A_RANK = [law for law in LAWS if law not in ("rank-free", "steady")]


def alone(make: Make) -> Make:
    """The same on one rank, whatever is asked for."""
    return lambda num_replicas, rank: make(1, 0)


def outer_keys(state: Any) -> list[str]:
    """The keys of a state, but for those of a lane's place."""
    position = state["progress"]
    sources = [f"{name}.{key}" for name, source in position["sources"].items() for key in source]
    return [*state, *(f"position.{name}" for name in position), *sources]


def another(name: str) -> Any:
    return stream_loader(chunks(OTHER_SIZES, seed=5)) if name.startswith("no ") else stream_loader(Divided(12), seed=9)


def settings_of(loader: Any) -> dict[str, Any]:
    names = ("options", "batch_size", "drop_last", "num_workers", "topology")
    return {name: str(getattr(loader, name)) for name in names}


def samples_of(item: Any) -> list[Hashable]:
    return list(numbers(item.tolist() if hasattr(item, "tolist") else item).elements())


@pytest.mark.parametrize("law", LAWS_OF_A_RANK)
@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_every_loader_of_streams_obeys_every_law(name: str, law: str) -> None:
    options: dict[str, Any] = {}
    if law == "not configuration":
        options = {"make_other": lambda: another(name), "settings": settings_of, "stops": "spread"}
    LAWS[law](alone(IMPLEMENTERS[name]), **options)


@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_all_that_is_not_keyed_by_shard_has_the_same_keys_at_every_step(name: str) -> None:
    _, states = observe(lambda: IMPLEMENTERS[name](1, 0), 25)

    assert len({str(sorted(outer_keys(state))) for state in states}) == 1
    assert len({str(state["config"]) for state in states}) == 1


@pytest.mark.parametrize("name", ["chunks", "chunks, three workers", "chunks in tokens", "mixed by batch"])
def test_every_sample_comes_once_from_wherever_an_epoch_goes_on(name: str) -> None:
    check_rank_free(IMPLEMENTERS[name], num_replicas=1, resize=(1,), key=samples_of)


WORDS: list[tuple[Make, Make]] = [
    (of(few, batch_size=2), of(few, batch_size=3)),
    (of(few), of(partial(few, seed=4))),
    (of(few), of(partial(few, buffer_size=4))),
    (of(few), of(partial(few, shuffle=False))),
    (of(few), of(few, drop_last=True)),
    (of(few), of(lambda: few().map(abs))),
    (of(lambda: few().windowed(2)), of(lambda: few().windowed(2, 2))),
    (of(few), of(few, cut=True)),
    (of(mixed), of(partial(mixed, by="sample"))),
    (of(mixed), of(partial(mixed, stop="cycle"))),
    (of(mixed), of(partial(mixed, weights=[1, 1]))),
    (of(partial(mixed, weights=[1, 1])), of(partial(mixed, weights=[1, 2]))),
    (of(partial(mixed, weights=[1, 1])), of(partial(mixed, weights=[1, 1], seed=1))),
]


@pytest.mark.parametrize("number", range(len(WORDS)))
def test_every_single_setting_that_changes_the_batches_is_compared(number: int) -> None:
    make, other = WORDS[number]
    LAWS["not configuration"](
        alone(make), make_other=lambda: other(1, 0), settings=settings_of, num_epochs=1, stops=[0, 3]
    )


def test_a_loader_that_stands_elsewhere_than_it_says_is_found_out() -> None:
    class Lies(InThisProcess):
        """Begins behind its first batch."""

        def _get_iterator(self) -> Any:
            iterator = super()._get_iterator()
            next(iterator)
            return iterator

    with pytest.raises(ContractError):
        LAWS["suffix"](of(few, kind=Lies, num_workers=1))
