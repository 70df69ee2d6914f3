"""A state with one value changed, under a checksum that fits, is refused by name or goes on as a valid state does.

Whoever damages a file damages the checksum too; these states are those that a program has changed. One of three things
may come of it:

- a :class:`StateError`, while the state is loaded or where its position is first looked up, or a warning;
- the very batches that follow the unchanged state: what was changed is a note that nothing but a comparison, or a
  report, reads;
- other batches, where the changed value is itself a valid other position. That is decided thus: the new value has the
  type of the old one, the loader says by its own ``state_dict`` that it stands where the changed state says, and a
  second resume a batch later goes on with the batches that the first one gave.

The end of an epoch is the beginning of the next. A mixture of which it is gone for how many ranks it was planned is
planned anew from what was served, as one whose weights have changed.

What a sampler or dataset of the user's has in its own ``state_dict`` is its own affair: what it takes, it takes; what
it cannot take is a :class:`StateError` still.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.iterable_cases import Counts, CountsWithState, OnIterator
from support.iterable_cases import Numbers as IterableNumbers
from support.ledger import LedgerModel, Numbers
from support.runs import quiet_trainer
from support.samplers import KeepsItsPlace, OwnState, ShufflesInPlace
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from lightning_stateful import (
    BucketDataModule,
    ChunkedDataset,
    MixedStream,
    MixtureDataModule,
    PackedDataModule,
    Packing,
    RoundRobinDataModule,
    StatefulDataModule,
    StatefulLoader,
    StreamDataModule,
    patch_dataloader,
)
from lightning_stateful.errors import DamagedStateError, StateError, StatefulWarning
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loops.saved_progress import LoopProgress, read_callback_state
from lightning_stateful.state import check, sealed

State = dict[str, Any]
DATA = [torch.tensor(float(number)) for number in range(80)]
LENGTHS = [1 + number * 7 % 23 for number in range(80)]
VALUES = [None, True, -1, 0, 1, 7, 10**6, 2**63, 10**30, 1.5, "", "x", "12", [], [0], [[1]], {}, {"a": 1}, [-1]]


class Documents(Dataset[list[int]]):
    """Documents of 1 to 29 tokens."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> list[int]:
        return list(range(1 + index * 11 % 29))


def chunks(*, documents: bool = False) -> ChunkedDataset:
    def read(ref: int) -> Any:
        if documents:
            return iter([list(range(3, 4 + (ref * 7 + number) % 9)) for number in range(9)])
        return [torch.tensor(float(ref * 10 + number)) for number in range(9)]

    return ChunkedDataset(list(range(6)), read)


def two(**settings: Any) -> Callable[[], Any]:
    kind: Any = settings.pop("kind", MixtureDataModule)
    parts = {"a": DATA[:30], "b": DATA[30:]}
    return lambda: kind(parts, batch_size=4, seed=1, **settings).train_dataloader()


def mixed(**settings: Any) -> Any:
    streams = {"a": chunks().shuffle(buffer_size=4, seed=2), "b": chunks().map(_same)}
    return patched(MixedStream(streams, seed=1, **settings), batch_size=4)


def _same(sample: Any) -> Any:
    return sample


def patched(dataset: Any, **options: Any) -> Any:
    return patch_dataloader(DataLoader(dataset, **options), seed=1)


WHOLE = Packing(24, how="whole")
MAKERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: StatefulLoader(DATA, batch_size=4, shuffle=True, seed=1),
    "batches and samples left out": lambda: StatefulLoader(
        DATA, batch_size=4, shuffle=True, seed=1, skip=[(0, range(1, 3)), (0, range(6, 8)), (1, range(2)), {3, 5}]
    ),
    "mixture": two(weights={"a": 1, "b": 2}),
    "mixture of steps": two(weights={"a": 1, "b": 2}, num_steps=4),
    "round robin": two(kind=RoundRobinDataModule),
    "buckets": lambda: BucketDataModule(DATA, lengths=LENGTHS, max_tokens=200, seed=1).train_dataloader(),
    "packed": lambda: PackedDataModule(
        Documents(), lengths=[1 + number * 11 % 29 for number in range(60)], packing=Packing(16), batch_size=2, seed=1
    ).train_dataloader(),
    "torch's sampler": lambda: patched(DATA, batch_size=4, sampler=WeightedRandomSampler(torch.ones(80), 80)),
    "sampler with a state": lambda: patched(DATA[:22], batch_size=2, sampler=OwnState()),
    "sampler that keeps its place": lambda: patched(DATA[:50], batch_size=4, sampler=KeepsItsPlace()),
    "batch sampler that remembers": lambda: patched(DATA[:22], batch_sampler=ShufflesInPlace()),
    "stream": lambda: patched(chunks().shuffle(buffer_size=4, seed=3), batch_size=4),
    "windows": lambda: patched(chunks().windowed(3).map(_same), batch_size=2),
    "stream of sequences": lambda: StreamDataModule(
        chunks(documents=True), packing=Packing(8), batch_size=2, seed=1
    ).train_dataloader(),
    "stream of whole documents": lambda: StreamDataModule(
        chunks(documents=True), packing=WHOLE, batch_size=1, seed=1
    ).train_dataloader(),
    "mixed streams": lambda: mixed(weights={"a": 1, "b": 2}),
    "streams in a circle": lambda: mixed(stop="cycle"),
    "iterable": lambda: patched(IterableNumbers(), batch_size=1),
    "iterable that counts its passes": lambda: patched(Counts(), batch_size=1),
    "iterable with a state": lambda: patched(CountsWithState(), batch_size=1, collate_fn=list),
    "iterator with a state": lambda: patched(OnIterator(), batch_size=1, collate_fn=list),
}


class Combined:
    """Two loaders in one state, as a trainer combines them."""

    def __init__(self) -> None:
        loaders = {"a": MAKERS["shuffled"](), "b": MAKERS["torch's sampler"]()}
        self.loaders, self._at = CombinedLoaders(loaders), (0, 3)

    def state_dict(self) -> State:
        return self.loaders.state_at(*self._at)

    def load_state_dict(self, state: State) -> None:
        self._at = self.loaders.load(state, where="The state")

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._at
        for step in range(first, self.loaders.num_batches(epoch)):
            found = []
            for path, loader in self.loaders.loaders.items():
                plan, at = self.loaders.plan_at(path, epoch, step)
                found.append(next(iter(loader.batches(plan, at))))
            self._at = epoch, step + 1
            yield found


MAKERS["combined"] = Combined


def begun(name: str) -> State:
    """The state of a loader after four batches."""
    loader = MAKERS[name]()
    for _ in itertools.islice(iter(loader), 4):
        pass
    state: State = loader.state_dict()
    return state


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a state but checksums, and of the state itself."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key != "checksum":
            yield from paths_in(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def resealed(state: Any) -> Any:
    """A state, and the states in it, under checksums that fit."""
    if not isinstance(state, dict):
        return state
    if isinstance(state.get("loaders"), dict):
        state = {**state, "loaders": {path: resealed(part) for path, part in state["loaders"].items()}}
    return sealed(state) if "checksum" in state else state


def mutated(rng: random.Random, state: State, others: list[State]) -> tuple[tuple[Any, ...], str, State]:
    """A state with one value gone, of another type, in another order, cut off, or from another state."""
    changed = copy.deepcopy(state)
    path = rng.choice([path for path in paths_in(changed) if path])
    holder, key, old = at(changed, path[:-1]), path[-1], at(changed, path)
    how = rng.choice(["gone", "other", "other", "other", "near", "swapped", "of another", "order", "cut", "wrapped"])
    if how == "gone":
        del holder[key]
    elif how == "near" and type(old) is int:
        holder[key] = old + rng.choice([-1, 1, 2, 16])
    elif how == "swapped":
        holder[key] = copy.deepcopy(at(state, rng.choice(list(paths_in(state)))))
    elif how == "of another":
        other = rng.choice(others)
        same = [path for path in paths_in(other) if path and path[-1] == key]
        holder[key] = copy.deepcopy(at(other, rng.choice(same or list(paths_in(other)))))
    elif how == "order" and isinstance(old, list):
        holder[key] = old[::-1]
    elif how == "cut" and isinstance(old, (list, str)):
        holder[key] = old[: len(old) // 2]
    elif how == "wrapped":
        holder[key] = rng.choice([[old], {"a": old}, [old, old], str(old)])
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    return path, how, resealed(changed)


def following(name: str, state: State, number: int = 3) -> tuple[list[str], State, State]:
    """The batches that follow a state, the state that a loader says at once, and that behind the first batch."""
    with warnings.catch_warnings():
        # This is said of the unchanged state, too.
        warnings.filterwarnings("ignore", ".* were read again", StatefulWarning)
        loader = MAKERS[name]()
        loader.load_state_dict(copy.deepcopy(state))
        here = loader.state_dict()
        iterator, batches = iter(loader), []
        behind = here
        for count, batch in enumerate(itertools.islice(iterator, number)):
            batches.append(repr(batch))
            behind = loader.state_dict() if not count else behind
    return batches, here, behind


def verdict(name: str, path: tuple[Any, ...], valid: State, state: State, expected: list[str]) -> str:
    """What came of a changed state; fails where that is none of what may."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", StatefulWarning)
            found, here, behind = following(name, state)
    except StateError:
        return "refused"
    except StatefulWarning:
        return "said"
    if found == expected:
        return "same"
    if is_users(path):
        return "taken by the user's"
    if path[-2:] == ("planned", "ranks") and "ranks" not in at(state, path[:-1]):
        return "planned anew"
    said = f"{name}: {path} was taken without a word: {at(valid, path)!r} is {at(state, path)!r}"
    assert type(at(state, path)) is type(at(valid, path)), said
    assert progress_of(here) == progress_of(state) or is_next_epoch(progress_of(here), progress_of(state)), said
    again, _, _ = following(name, behind, 2)
    assert again == found[1:] or len(found) < 3, said
    return "other position"


def is_users(path: tuple[Any, ...]) -> bool:
    """Whether a path leads into what an object's own ``state_dict`` has given."""
    return bool({"iterator", "dataset"} & {*path[3:]}) or path[:3] == ("progress", "sampler", 2)


def is_next_epoch(here: Any, there: Any) -> bool:
    """Whether a progress is the beginning of the epoch after another."""
    return bool((here.get("epoch"), here.get("consumed")) == (there.get("epoch", 0) + 1, 0))


def progress_of(state: State) -> Any:
    return state["progress"] if "progress" in state else {at: of["progress"] for at, of in state["loaders"].items()}


def run(number: int, seed: int) -> Counter[str]:
    """Try so many changed states, as many of each kind."""
    rng, found = random.Random(seed), Counter[str]()
    states = {name: begun(name) for name in MAKERS}
    expected = {name: following(name, state)[0] for name, state in states.items()}
    for name in itertools.islice(itertools.cycle(MAKERS), number):
        others = [state for other, state in states.items() if other != name]
        path, _, state = mutated(rng, states[name], others)
        if state != states[name]:
            found[verdict(name, path, states[name], state, expected[name])] += 1
    return found


@pytest.fixture(scope="module")
def callback_state(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The callback's entry in a checkpoint of a Trainer, within an epoch."""
    path, trainer = tmp_path_factory.mktemp("run") / "at.ckpt", quiet_trainer(max_steps=2, accelerator="cpu")
    trainer.fit(LedgerModel(), StatefulDataModule(Numbers(22), batch_size=4, seed=1))
    trainer.save_checkpoint(path)
    state: State = torch.load(path, weights_only=True)["callbacks"]["StatefulDataCallback"]
    return state


def test_a_changed_entry_of_the_callback_is_refused_or_read_as_it_is(callback_state: State) -> None:
    rng, found, fresh = random.Random(0), Counter[str](), LoopProgress().to_dict()
    progress, metrics = read_callback_state(callback_state)
    for _ in range(2000):
        path, _, state = mutated(rng, callback_state, [{"progress": fresh, "version": 1}])
        try:
            changed, logged = read_callback_state(state)
        except StateError:
            found["refused"] += 1
            continue
        found["read"] += 1
        assert [type(value) for value in changed.to_dict().values()] == [type(value) for value in fresh.values()]
        assert path[0] == "progress" or changed == progress
        assert path[0] == "metrics" or logged == metrics

    assert found["refused"] > 800
    assert found["read"]


@pytest.mark.parametrize("kind", ["levels", "itself", "shared", "digits"])
def test_a_state_without_bound_is_refused_at_once(kind: str) -> None:
    state, part = begun("shuffled"), list[Any]()
    for _ in range({"levels": 100_000, "shared": 60}.get(kind, 0)):
        part = [part, part] if kind == "shared" else [part]
    if kind == "itself":
        part.append(part)
    state["progress"]["epoch"] = 10**5000 if kind == "digits" else part

    with pytest.raises(DamagedStateError, match=r"levels|same parts|bits"):
        check(state)


def test_a_changed_state_is_refused_or_goes_on_as_a_valid_one() -> None:
    found = run(420, seed=0)

    assert found["refused"] > 300
    assert found["same"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_twenty_thousand_changed_states_are_refused_or_go_on_as_valid_ones(seed: int) -> None:
    found = run(2000, seed)

    assert found["refused"] > 1500
