"""Loaders that iterate in a way of their own train as without this package, and resume exactly or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import own_iterations as own
from support.ddp_runs import Link, assert_chains, chain_of
from support.ledger import Numbers, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import assert_goes_on_from_every_moment, train, train_alone
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import StatefulDataCallback, check_resume, patch_dataloader
from lightning_stateful.core.order import UNKNOWN
from lightning_stateful.errors import StatefulWarning, StateMismatchError, UnsupportedLoaderError
from lightning_stateful.loaders.patching import build_patched

pytestmark = pytest.mark.filterwarnings("ignore:InBackground reads its batches in a thread")

KINDS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (own.MultiEpochs, own.Infinite, own.Twice, own.TwiceAsLong, own.LeavesOut)},
    **{kind.__name__: kind for kind in (own.ReadsAhead, own.InBackground, own.PassesTwice, own.Pairs)},
    **{kind.__name__: kind for kind in (own.ByNumber, own.KeepsBack)},
    "Prefetching": lambda *args, **options: own.Prefetching(DataLoader(*args, **options)),
    "Unsized": lambda *args, **options: own.Unsized(DataLoader(*args, **options)),
    "HandsOn": lambda *args, **options: own.HandsOn(DataLoader(*args, **options)),
    "of a patched one": lambda *args, **options: own.Prefetching(
        patch_dataloader(DataLoader(*args, **options), seed=7)
    ),
}
MOMENTS = [("on_train_batch_end", 0, 0), ("on_train_batch_end", 0, 3), ("on_train_batch_start", 1, 2)]


def made(name: str, **options: Any) -> Any:
    return KINDS[name](Numbers(12), **{"batch_size": 2, "shuffle": True, **options})


def states_of(loader: Any, num_epochs: int) -> dict[tuple[int, int], Any]:
    """The states of a loop by epoch and batches of it."""
    states = {}
    for epoch in range(num_epochs):
        for number, _ in enumerate(loader, 1):
            states[epoch, number] = loader.state_dict()
        states[epoch + 1, 0] = loader.state_dict()
    return states


def ids(run: Any) -> list[Any]:
    return [event[-1] for event in trained(run.ledger)]


# A loop without a Trainer resumes these, too, at every batch.
SLOW = ("TwiceAsLong", "Twice", "Pairs", "ByNumber", "InBackground", "Unsized", "HandsOn")


@pytest.mark.parametrize("name", thinned(KINDS, SLOW))
def test_a_run_trains_as_without_this_package_and_goes_on_from_every_moment(tmp_path: Path, name: str) -> None:
    in_order = partial(made, name, shuffle=False)
    if name != "of a patched one":
        assert ids(train_alone(in_order, max_epochs=2)) == ids(train(in_order, max_epochs=2))
    assert_goes_on_from_every_moment(tmp_path, partial(made, name), MOMENTS, train_alone, max_epochs=3)


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        *((name, 0) for name in KINDS if isinstance(KINDS[name], type) and name != "LeavesOut"),
        ("MultiEpochs", 1),
        pytest.param("ReadsAhead", 1, marks=pytest.mark.slow),
    ],
)
def test_a_loop_resumes_at_every_batch(name: str, num_workers: int) -> None:
    def patched(num_replicas: int, rank: int) -> Any:
        loader = made(name, num_workers=num_workers)
        return patch_dataloader(loader, seed=3, num_replicas=num_replicas, rank=rank)

    # Its epochs are longer than it says, which is known only at their end.
    stops: Any = [stop for stop in range(24) if stop % 12] if name == "Twice" else "spread"
    # Processes take long.
    how: Any = {"stops": [2, 6, 9], "chain": ()} if num_workers else {"stops": stops}
    result = check_resume(patched, key=str, **how)
    assert result, result


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_pass_in_an_epoch_is_shuffled_by_itself(num_workers: int) -> None:
    first: list[int] = []
    second: list[int] = []
    for number, batch in enumerate(patch_dataloader(made("PassesTwice", num_workers=num_workers), seed=3)):
        (first if number < 6 else second).extend(batch["id"].tolist())
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_passes_of_a_users_sampler_in_one_epoch_are_the_same_with_a_warning() -> None:
    class Alike(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(12))

        def __len__(self) -> int:
            return 12

    loader = patch_dataloader(own.PassesTwice(Numbers(12), batch_size=2, sampler=Alike()))
    with pytest.warns(StatefulWarning, match="reads its data more than once in an epoch, and the order of .*Alike is"):
        assert len(list(loader)) == 12


def test_an_epoch_with_fewer_batches_ends_there(tmp_path: Path) -> None:
    moments = [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0), ("on_train_epoch_start", 1, 0)]
    whole = assert_goes_on_from_every_moment(tmp_path, partial(made, "LeavesOut"), moments, train_alone)
    assert len(ids(whole)) == 2 * 4


def test_the_rest_of_an_epoch_has_no_length_where_the_epoch_has_none() -> None:
    class HandsOnUnsized(own.Unsized):
        def __iter__(self) -> Any:
            yield from self.loader

    loader = build_patched(HandsOnUnsized(DataLoader(Numbers(12), batch_size=2)))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.plan(0, loader.progress).num_steps == UNKNOWN


def test_what_is_read_again_takes_the_same_ranks_and_batch_size(tmp_path: Path) -> None:
    loader = patch_dataloader(made("Twice"))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StateMismatchError, match=r"batch_size: saved 2, now 3.*Put it back"):
        patch_dataloader(made("Twice", batch_size=3)).load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatchError, match=r"iteration: saved 'own'"):
        patch_dataloader(DataLoader(Numbers(12), batch_size=2, shuffle=True)).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: own.SkipsFirst(Numbers(12)), "SkipsFirst keeps an iterator of torch's under iterator"),
        (
            lambda: own.HasBegun(DataLoader(Numbers(12))),
            "HasBegun holds a DataLoader and gives batches without reading",
        ),
    ],
)
def test_one_that_cannot_be_followed_is_refused_before_the_first_step(make: Any, said: str) -> None:
    with pytest.raises(UnsupportedLoaderError, match=said):
        train_alone(make, max_epochs=1)


def test_a_prefetcher_that_is_its_own_iterator_is_told_of_a_form_that_is_resumed(tmp_path: Path) -> None:
    held = DataLoader(Numbers(12), batch_size=2, shuffle=True)
    words = (
        "or let PreloadsNext hold one DataLoader, no iterator of it, and have no __next__, but an __iter__ that calls"
    )
    with pytest.warns(StatefulWarning, match=words):
        assert train_alone(lambda: own.PreloadsNext(held), max_epochs=1).global_step == 6
    # In that form it is a Prefetching.
    make = lambda: own.Prefetching(DataLoader(Numbers(12), batch_size=2, shuffle=True))  # noqa: E731
    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 1, 2)], train_alone)


KEEPING: dict[str, Callable[..., Any]] = {
    "CountsPasses": own.CountsPasses,
    "Mixes": own.Mixes,
    "StepsOn": lambda *args, **options: own.StepsOn(DataLoader(*args, **options)),
}


@pytest.mark.parametrize("name", [*KEEPING, "CountsAtEnd"])
def test_what_a_loader_keeps_from_epoch_to_epoch_is_as_without_this_package(name: str) -> None:
    make = partial({**KEEPING, "CountsAtEnd": own.CountsAtEnd}[name], Numbers(12), batch_size=2)
    assert ids(train_alone(make, max_epochs=3)) == ids(train(make, max_epochs=3))


@pytest.mark.parametrize("name", KEEPING)
def test_a_loader_that_keeps_something_from_epoch_to_epoch_resumes_in_the_first_only(tmp_path: Path, name: str) -> None:
    make = partial(KEEPING[name], Numbers(12), batch_size=2, shuffle=True)
    first = [("on_train_batch_end", 0, 0), ("on_train_batch_end", 0, 2)]
    assert_goes_on_from_every_moment(tmp_path, make, first, train_alone)
    state = states_of(build_patched(make()), 2)
    for moment in ((1, 0), (1, 2)):
        with pytest.raises(StateMismatchError, match=r"as earlier epochs have left it.*accept=\(\"iteration\",\)"):
            build_patched(make()).load_state_dict(state[moment])
        with pytest.warns(StatefulWarning, match="may not be exact"):
            build_patched(make(), accept=("iteration",)).load_state_dict(state[moment])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (own.CountsInModule, "support.own_iterations.PASSES"),
        (own.CountsInClass, "CountsInClass.begun"),
        (own.counts_around(), "counts_around.<locals>.CountsAround.__iter__.begun"),
    ],
)
def test_what_a_loader_keeps_outside_of_itself_is_refused_behind_the_first_epoch(kind: Any, name: str) -> None:
    make = partial(kind, Numbers(12), batch_size=2, shuffle=True)
    state = states_of(build_patched(make()), 2)
    build_patched(make()).load_state_dict(state[0, 2])
    for moment in ((1, 0), (1, 2)):
        with pytest.raises(StateMismatchError, match=f"saved '{name} as earlier epochs have left it"):
            build_patched(make()).load_state_dict(state[moment])


def test_one_that_reads_in_a_thread_without_workers_is_warned_of() -> None:
    with pytest.warns(StatefulWarning, match=r"InBackground reads its batches in a thread .*num_workers=1") as warned:
        train_alone(partial(made, "InBackground"), max_epochs=2)
    assert [str(one.message).startswith("InBackground reads") for one in warned].count(True) == 1
    train_alone(partial(made, "InBackground", num_workers=1), max_epochs=1)


def test_one_that_reads_several_loaders_is_warned_of_at_the_start() -> None:
    def interleaved() -> Any:
        made = own.HandsOn(DataLoader(Numbers(4)))
        made.other = DataLoader(Numbers(4))  # type: ignore[attr-defined]
        return made

    with pytest.warns(
        StatefulWarning, match=r"the training loader is a HandsOn .*\(loader, other\).*Pass the DataLoader"
    ):
        train_alone(interleaved, max_epochs=1)


def test_an_object_that_holds_a_loader_is_shown_with_its_attributes() -> None:
    run: Any = train_alone(partial(made, "Prefetching"), max_epochs=1)
    assert run.trainer.train_dataloader.mean == 0.5


def chain(folder: Path, name: str) -> list[Link]:
    stops = [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 1)]
    return chain_of(lambda: made(name), folder, stops, callbacks=lambda: [StatefulDataCallback(seed=5)])


def test_ranks_resume_what_each_gives_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks = Ranks(2, tmp_path_factory.mktemp("own"))
    for name in ("MultiEpochs", "TwiceAsLong", "Prefetching"):
        assert_chains(ranks.of(chain, name))
