"""Loaders that iterate in a way of their own train as without this package, and resume exactly or are refused."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support import own_iterations as own
from support.ddp_runs import Link, assert_chains, chain_of, over_all
from support.ledger import LedgerModel, Numbers, samples, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import assert_goes_on_from_every_moment, stopped, train, train_alone
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, default_collate

from lightning_stateful import StatefulDataCallback, check_resume, patch_dataloader
from lightning_stateful.core.order import UNKNOWN
from lightning_stateful.errors import StatefulWarning, StateMismatchError, UnsupportedLoaderError
from lightning_stateful.loaders.patching import build_patched

pytestmark = pytest.mark.filterwarnings("ignore:InBackground reads its batches in a thread")

KINDS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (own.MultiEpochs, own.Infinite, own.Twice, own.TwiceAsLong, own.LeavesOut)},
    **{kind.__name__: kind for kind in (own.ReadsAhead, own.InBackground, own.PassesTwice, own.Pairs)},
    **{kind.__name__: kind for kind in (own.ByNumber, own.KeepsBack, own.CountsInVariable)},
    **{kind.__name__: kind for kind in (own.HalfOfLength, own.PassesByLength, own.ByShare, own.CountsOff)},
    **{kind.__name__: kind for kind in (own.ChangesInPlace, own.PutsInto, own.Echoes)},
    **{kind.__name__: kind for kind in (own.ByHand, own.BatchesByHand, own.ShufflesItself)},
    "HalfOfHeld": lambda *args, **options: own.HalfOfHeld(DataLoader(*args, **options)),
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
SLOW = (
    *("TwiceAsLong", "Twice", "Pairs", "ByNumber", "InBackground", "Unsized", "HandsOn"),
    *("PassesByLength", "ByShare", "CountsOff", "HalfOfLength", "ChangesInPlace", "PutsInto", "BatchesByHand"),
    "ShufflesItself",
)


@pytest.mark.parametrize("name", thinned(KINDS, SLOW))
def test_a_run_trains_as_without_this_package_and_goes_on_from_every_moment(tmp_path: Path, name: str) -> None:
    in_order = partial(made, name, shuffle=False)
    if name not in ("of a patched one", "ShufflesItself"):
        assert ids(train_alone(in_order, max_epochs=2)) == ids(train(in_order, max_epochs=2))
    # Some have three batches an epoch.
    moments = [("on_train_batch_end", 0, 2), *MOMENTS[2:]] if name.startswith("Half") else MOMENTS
    assert_goes_on_from_every_moment(tmp_path, partial(made, name), moments, train_alone, max_epochs=3)


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        *((name, 0) for name in KINDS if isinstance(KINDS[name], type) and name != "LeavesOut"),
        ("HalfOfHeld", 0),
        ("MultiEpochs", 1),
        pytest.param("ReadsAhead", 1, marks=pytest.mark.slow),
    ],
)
def test_a_loop_resumes_at_every_batch(name: str, num_workers: int) -> None:
    def patched(num_replicas: int, rank: int) -> Any:
        loader = made(name, num_workers=num_workers)
        return build_patched(loader, seed=3, num_replicas=num_replicas, rank=rank)

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


class Turns(Sampler[int]):
    """Begins one index later in each pass."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter([(index + self.begun) % 13 for index in range(13)])

    def __len__(self) -> int:
        return 13


@pytest.mark.parametrize("kind", [own.PassesTwice, own.ByHand, own.BatchesByHand])
def test_a_users_sampler_is_iterated_in_each_pass_as_by_torch(kind: Any) -> None:
    make = partial(kind, Numbers(13), batch_size=2, drop_last=True)
    plain, patched = make(sampler=Turns()), patch_dataloader(make(sampler=Turns()))
    for _ in range(3):
        assert [batch["id"].tolist() for batch in patched] == [batch["id"].tolist() for batch in plain]
    result = check_resume(
        lambda num_replicas, rank: build_patched(make(sampler=Turns()), num_replicas=num_replicas, rank=rank), key=str
    )
    assert result, result


def test_a_sampler_that_is_read_by_hand_is_dealt_out_as_by_torch() -> None:
    for shuffle in (False, True):
        served = []
        for rank in range(2):
            loader = own.ByHand(Numbers(13), batch_size=2, shuffle=shuffle)
            batches = list(build_patched(loader, seed=1, num_replicas=2, rank=rank))
            assert [len(batch["id"]) for batch in batches] == [2, 2, 2, 1]
            served.append([index for batch in batches for index in batch["id"].tolist()])
            if not shuffle:
                # Of 13 samples one is served twice: another one than torch's.
                assert served[rank][:6] == list(DistributedSampler(Numbers(13), 2, rank, shuffle=False))[:6]
        assert sorted({*served[0], *served[1]}) == list(range(13))


def test_one_that_is_read_can_be_pickled() -> None:
    for name in ("ByHand", "ByNumber"):
        loader = patch_dataloader(made(name))
        next(iter(loader))
        unpickled = pickle.loads(pickle.dumps(loader))
        assert [batch["id"].tolist() for batch in unpickled] == [batch["id"].tolist() for batch in loader]


def test_an_iteration_by_hand_finds_the_samplers_of_torch() -> None:
    class Looks(own.BatchesByHand):
        def __iter__(self) -> Any:
            batches: Any = self.batch_sampler
            assert isinstance(self.sampler, RandomSampler)
            assert isinstance(batches, BatchSampler)
            assert (batches.batch_size, len(batches), len(self.sampler), len(batches.sampler)) == (2, 7, 13, 13)
            return super().__iter__()

    options: dict[str, Any] = {"batch_size": 2, "shuffle": True}
    assert len(list(patch_dataloader(Looks(Numbers(13), **options)))) == 7
    in_evaluation = list(build_patched(Looks(Numbers(13), **options), exact=True, shuffle=False))
    assert [index for batch in in_evaluation for index in batch["id"].tolist()] == list(range(13))


@pytest.mark.parametrize(("kind", "said"), [(own.ChangesLate, "gives other batches"), (own.AsksLate, "asks for len")])
def test_one_that_no_longer_hands_on_what_it_reads_behind_a_resume_is_warned_of(kind: Any, said: str) -> None:
    make = partial(kind, Numbers(16), batch_size=2)
    resumed = build_patched(make())
    resumed.load_state_dict(states_of(build_patched(make()), 1)[0, 3])
    with pytest.warns(StatefulWarning, match=rf"{kind.__name__}.__iter__ had handed on .*{said}.* may not be those of"):
        assert len(list(resumed)) == 5
    assert len(list(resumed)) == 8


def test_generators_that_a_dataset_holds_are_seeded_where_it_is_read_by_hand() -> None:
    class Draws(Numbers):
        def __init__(self) -> None:
            super().__init__(12)
            self.generator = np.random.default_rng(0)

        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "y": self.generator.random()}

    def patched(num_replicas: int, rank: int) -> Any:
        return build_patched(own.ByHand(Draws(), batch_size=2), num_replicas=num_replicas, rank=rank)

    result = check_resume(patched, key=str)
    assert result, result


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


@pytest.mark.filterwarnings("ignore:.*from where the model has left them:lightning_stateful.errors.StatefulWarning")
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
    "KeepsGenerator": own.KeepsGenerator,
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


def test_one_that_makes_what_it_keeps_anew_for_each_pass_resumes_anywhere(tmp_path: Path) -> None:
    make = partial(own.KeepsIterator, Numbers(12), batch_size=2, shuffle=True)
    moments = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 2)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone)
    says = lambda: own.SaysItsEnd(DataLoader(Numbers(12), batch_size=2, shuffle=True))  # noqa: E731
    assert_goes_on_from_every_moment(tmp_path, says, moments, train_alone)
    uses = partial(own.UsesIterator, Numbers(12), batch_size=2, shuffle=True)
    with pytest.raises(StateMismatchError, match="kept as earlier epochs have left it"):
        build_patched(uses()).load_state_dict(states_of(build_patched(uses()), 2)[1, 0])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (own.CountsInModule, "support.own_iterations.PASSES"),
        (own.CountsInClass, "CountsInClass.begun"),
        (own.CountsByHand, "num_passes"),
        (own.CountsUnread, "num_passes"),
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


@pytest.mark.filterwarnings("ignore:.*from where the model has left them:lightning_stateful.errors.StatefulWarning")
def test_one_that_reads_several_loaders_is_warned_of_at_the_start() -> None:
    def interleaved() -> Any:
        made = own.HandsOn(DataLoader(Numbers(4)))
        made.other = DataLoader(Numbers(4))  # type: ignore[attr-defined]
        return made

    with pytest.warns(
        StatefulWarning, match=r"the training loader is a HandsOn .*\(loader, other\).*Pass the DataLoader"
    ):
        train_alone(interleaved, max_epochs=1)


class DrawsFromBoth(RandomSampler):
    """Draws from a generator of its own, and from one that its class holds."""

    of_class = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_class.permutation(list(super().__iter__())).tolist())


BESIDE: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "sampler": lambda: {"sampler": DrawsFromBoth(Numbers(12), generator=torch.Generator().manual_seed(1))},
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_loader_that_is_read_beside_draws_from_its_own_generators_as_before_the_stop(
    tmp_path: Path, name: str
) -> None:
    def beside() -> Any:
        other = DataLoader(Numbers(12), batch_size=2, **BESIDE[name]())
        return own.Beside(Numbers(12), batch_size=2, shuffle=True, other=other)

    moments = [*MOMENTS, ("on_train_epoch_end", 1, 0)]
    whole = ids(assert_goes_on_from_every_moment(tmp_path, beside, moments, train_alone, max_epochs=3))
    firsts = [[index // 100 for batch in whole[first : first + 6] for index in batch] for first in (0, 6, 12)]
    assert [sorted(first) for first in firsts] == [list(range(12))] * 3
    assert firsts[0] != firsts[1] != firsts[2]


@pytest.mark.parametrize(("patch", "name"), [(lambda loader: loader, "others.0.sampler"), (patch_dataloader, "others")])
def test_one_that_counts_its_passes_and_is_read_beside_is_refused_behind_the_first_epoch(patch: Any, name: str) -> None:
    def beside(**options: Any) -> Any:
        other = patch(DataLoader(Numbers(13), batch_size=2, sampler=Turns()))
        return build_patched(own.Beside(Numbers(13), batch_size=2, shuffle=True, other=other), **options)

    state = states_of(beside(), 2)
    beside().load_state_dict(state[0, 2])
    for moment in ((1, 0), (1, 2)):
        with pytest.raises(StateMismatchError, match=rf"saved '{name} as earlier epochs have left it"):
            beside().load_state_dict(state[moment])
        with pytest.warns(StatefulWarning, match=rf"changed {name} in earlier epochs.*may not be exact"):
            beside(accept=("iteration",)).load_state_dict(state[moment])


@pytest.mark.filterwarnings("ignore:.*from where the model has left them:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*keeps what it draws from torch:lightning_stateful.errors.StatefulWarning")
def test_one_that_keeps_iterators_of_several_loaders_is_warned_of_in_the_run_and_on_a_resume(tmp_path: Path) -> None:
    def keeps_both() -> Any:
        return own.KeepsBoth(*(DataLoader(Numbers(num), batch_size=2, shuffle=True) for num in (10, 8)))

    said = r"KeepsBoth that reads torch's loaders by itself \(loaders.0, loaders.1\).*not from any later epoch"
    with pytest.warns(StatefulWarning, match=said):
        run: Any = train_alone(keeps_both, max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.warns(StatefulWarning, match=said):
        train_alone(keeps_both, max_epochs=2, ckpt_path=tmp_path / "end.ckpt")


def test_an_object_that_holds_a_loader_is_shown_with_its_attributes() -> None:
    run: Any = train_alone(partial(made, "Prefetching"), max_epochs=1)
    assert run.trainer.train_dataloader.mean == 0.5


class Marked(Numbers):
    """Has a mark that samples show, and that workers have a copy of."""

    mark = 0.0

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "x": torch.full((4,), self.mark)}


class Marks(pl.Callback):
    """Sets the mark at a moment, and lets the loader start its workers anew."""

    def __init__(self, hook: str, epoch: int, loader: Any = None) -> None:
        self.epoch, self.loader, self.is_over = epoch, loader, False
        setattr(self, hook, self.mark)

    def mark(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == self.epoch and not self.is_over:
            self.is_over = True
            trainer.train_dataloader.dataset.mark = 1.0
            (self.loader or trainer.train_dataloader).reset()


class Sees(LedgerModel):
    """Writes down the marks of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.marks.append(float(batch["x"].mean()))
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("error::lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize(("workers", "is_users"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("hook", "epoch", "before"),
    [("on_train_epoch_start", 0, 0), ("on_train_batch_end", 0, 1), ("on_train_epoch_start", 1, 3)],
)
def test_a_loader_that_keeps_its_workers_starts_them_anew_where_a_hook_asks_it_to(
    hook: str, epoch: int, before: int, workers: int, is_users: bool
) -> None:
    model, loader = Sees(), own.Infinite(Marked(6), 2, num_workers=workers)
    marks = Marks(hook, epoch, loader if is_users else None)
    train_alone(lambda: loader, model=model, callbacks=[marks], max_epochs=2)
    assert model.marks == [0.0] * before + [1.0] * (6 - before)
    assert over_epoch(model, 0) == over_epoch(model, 1) == list(range(6))


@pytest.mark.filterwarnings("error::lightning_stateful.errors.StatefulWarning")
def test_a_resume_behind_an_epoch_starts_them_anew_as_the_run_did(tmp_path: Path) -> None:
    def make() -> Any:
        return own.Infinite(Marked(6), 2, num_workers=1)

    path, model, how = tmp_path / "end.ckpt", Sees(), {"max_epochs": 2}
    stopped(path, make, "on_train_epoch_end", run=train_alone, callbacks=[Marks("on_train_epoch_start", 1)], **how)
    train_alone(make, model=model, callbacks=[Marks("on_train_epoch_start", 1)], ckpt_path=path, **how)
    assert model.marks == [1.0] * 3


def over_epoch(model: LedgerModel, epoch: int) -> list[int]:
    return sorted(index for index in samples(model.ledger, epoch))


def chain(folder: Path, name: str) -> list[Link]:
    stops = [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 1)]
    return chain_of(lambda: made(name), folder, stops, callbacks=lambda: [StatefulDataCallback(seed=5)])


def test_ranks_resume_what_each_gives_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks = Ranks(2, tmp_path_factory.mktemp("own"))
    for name in ("MultiEpochs", "TwiceAsLong", "Prefetching", "ByHand"):
        runs = assert_chains(ranks.of(chain, name))
    # Of the last one, which reads its sampler by hand.
    assert over_all(runs, 0) == over_all(runs, 1) == list(range(12))


class Lasting(Numbers):
    """Adds the first sample of the batch before, which the loader tells it."""

    last = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + self.last}


class TellsLast(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        self.dataset.last = 0  # type: ignore[attr-defined]
        for batch in super().__iter__():
            self.dataset.last = int(batch["id"][0])  # type: ignore[attr-defined]
            yield batch


class Moved:
    k = 0

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] + self.k}


class MovesCollate(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.collate_fn.k += 1  # type: ignore[attr-defined]
            yield batch


def lasting() -> Any:
    return TellsLast(Lasting(22), 2)


def moving() -> Any:
    return MovesCollate(Numbers(22), 2, collate_fn=Moved())


@pytest.mark.parametrize(("make", "name"), [(lasting, "dataset.last"), (moving, "collate_fn.k")])
def test_what_an_iteration_sets_on_the_data_from_batch_to_batch_is_named_and_set_again(
    tmp_path: Path, make: Any, name: str
) -> None:
    with pytest.warns(StatefulWarning, match=f"__iter__ sets {name} from batch to batch"):
        stopped(tmp_path / "stop.ckpt", make, batch=3, run=train_alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatefulWarning)
        whole = train_alone(make, max_epochs=1)
        resumed = train_alone(make, ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
    assert all(torch.equal(value, resumed.weights[key]) for key, value in whole.weights.items())
