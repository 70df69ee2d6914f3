"""Worker slots of iterable datasets: states of all kinds, passes begun again, and what is refused."""

from __future__ import annotations

import json
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support.iterable_cases import Counts, GoesOn, GoesOnWithState, ItselfWithState, Numbers, OnIterator, Tokens

from lightning_stateful.errors import PositionError, StateError
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.iterable_datasets.iterable_task import IterableTask
from lightning_stateful.iterable_datasets.iterables import IterableConfig, IterableSlot
from lightning_stateful.iterable_datasets.pass_history import digest_of_sample


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with keep_randomness():
        yield


def slot_of(dataset: Any, state: Any = None, epoch: int = 0, **config: Any) -> IterableSlot:
    """A slot at the beginning of a pass, or where a state was taken."""
    task = IterableTask(0, 0, 0, epoch, json.loads(json.dumps(state)), is_here=state is None)
    return IterableConfig(**{"dataset": dataset, "sample_seed": 1, "batch_size": 2, **config}).open(task)


class Rich(GoesOnWithState):
    """Its state has what JSON does not."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.int64(self.at), 3: (1, b"\0"), "t": torch.tensor([self.at]), "s": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["at"], np.int64)
        assert (state[3], state["s"]) == ((1, b"\0"), {1, 2})
        self.at = int(state["t"])


class OnBoth(OnIterator):
    """The dataset has a state too, in which the position is not."""

    def state_dict(self) -> dict[str, Any]:
        return {"files": self.num_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_passes = state["files"] - 1


@pytest.mark.parametrize("kind", [Rich, OnBoth, OnIterator, ItselfWithState, Tokens, Numbers])
def test_a_state_leads_to_the_very_sample_and_stays_as_it_is(kind: Any) -> None:
    slot = slot_of(kind())
    first = [next(slot) for _ in range(2)]
    state = slot.state()
    saved = json.dumps(state)
    following = next(slot)

    resumed = slot_of(kind(), state)
    assert next(resumed) == following != first[-1]
    assert json.dumps(state) == saved


@pytest.mark.parametrize("kind", [Rich, OnIterator])
def test_a_state_that_nothing_takes_any_more_is_refused(kind: Any) -> None:
    slot = slot_of(kind())
    next(slot), next(slot), next(slot)
    with pytest.raises(StateError, match=r"Numbers \(rank 0, worker 0\) .*load_state_dict"):
        next(slot_of(Numbers(), slot.state()))


class EpochAlone(GoesOnWithState):
    """Saves its epoch, and not its position."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.share())


class NotHeeded(EpochAlone):
    """Loads its position, and ``iter()`` does not look at it."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.share():
            self.at += 1
            yield number


class Buffered(Tokens):
    """Its buffer is not in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": []}


@pytest.mark.parametrize("kind", [EpochAlone, NotHeeded, Buffered])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_own_state_that_leads_to_other_samples_is_told(kind: Any, number: int) -> None:
    slot = slot_of(kind())
    for _ in range(number):
        next(slot)
    resumed = slot_of(kind(), slot.state())
    is_same = next(resumed, None) == next(slot, None)
    assert is_same or "not exact. Its own state_dict and load_state_dict leave something out" in "".join(resumed.said)
    silent = slot_of(kind(), slot.state(), is_checked=False)
    next(silent, None)
    assert not silent.said


class Shuffled(Numbers):
    """Shuffles each pass by a generator that goes on, which its state leaves out or has."""

    def __init__(self, *, in_state: bool) -> None:
        self.generator, self.in_state = np.random.default_rng(2), in_state
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        if not self.at:
            self.order = self.generator.permutation(8).tolist()
        while self.at < 8:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        state = {"at": self.at, "order": self.order}
        return {**state, "generator": self.generator.bit_generator.state} if self.in_state else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], list(state["order"])
        if self.in_state:
            self.generator.bit_generator.state = state["generator"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_state_without_the_generator_of_later_passes_is_told(number: int) -> None:
    for in_state in (False, True):
        slot = slot_of(Shuffled(in_state=in_state))
        for _ in range(number):
            next(slot)
        state = slot.state()
        resumed = slot_of(Shuffled(in_state=in_state), state)
        assert next(resumed) == next(slot)
        # The pass that it draws is begun again for one or two batches.
        said = ["holds a random generator that does not stand where" in one for one in resumed.said]
        assert said == [True] * (not in_state and number > 2)
        silent = slot_of(Shuffled(in_state=in_state), state, is_checked=False)
        next(silent)
        # Of a copy that ends with the pass nothing is drawn later.
        of_copy = slot_of(Shuffled(in_state=in_state), state, stays=False)
        next(of_copy)
        assert not silent.said
        assert not of_copy.said


class SkipsAhead(GoesOnWithState):
    """Draws random numbers for each sample, also for those that it leaves out on the way to its position."""

    def __iter__(self) -> Iterator[Any]:
        drawn = ((number, float(torch.rand(()))) for number in range(20))
        for sample in islice(drawn, self.at, None):
            self.at += 1
            yield sample
        self.at = 0


class MayKeep:
    """Its state holds what later samples depend on, if it keeps that."""

    state: Any = None

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class InBlocks(MayKeep):
    """Shuffles block by block; its state may hold the generator of the blocks to come."""

    def __iter__(self) -> Iterator[int]:
        loaded, self.state = self.state, None
        generator = random.Random(3)
        self.block, self.at, self.order = loaded[:3] if loaded else (0, 0, [])
        if loaded and self.keeps:
            generator.setstate((3, tuple(loaded[3]), None))
        while self.block < 3:
            if not self.order:
                self.order = generator.sample(range(10 * self.block, 10 * self.block + 10), 10)
            self.words = generator.getstate()[1]
            while self.at < 10:
                self.at += 1
                yield self.order[self.at - 1]
            self.block, self.at, self.order = self.block + 1, 0, []

    def state_dict(self) -> dict[str, Any]:
        return {"held": [self.block, self.at, list(self.order), list(self.words)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


class LeavesOutWhatCame(MayKeep):
    """Leaves out what has come already, in a function that it reads from; its state may hold the set."""

    def __iter__(self) -> Iterator[int]:
        yield from self.unique()

    def unique(self) -> Iterator[int]:
        loaded, self.state = self.state or {"at": 0, "seen": []}, None
        seen = set(loaded["seen"]) if self.keeps else set()
        self.seen = seen
        for self.at in range(loaded["at"] + 1, 41):
            number = self.at % 20
            if number not in seen:
                seen.add(number)
                yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": sorted(self.seen)}


class CountsDown(MayKeep):
    """Gives each seventeenth number twice, by a count that its state may hold."""

    def __iter__(self) -> Iterator[int]:
        loaded, self.state = self.state or {"at": 0, "left": 17}, None
        left = loaded["left"] if self.keeps else 17
        for number in range(loaded["at"], 30):
            left -= 1
            self.held = {"at": number + 1, "left": left or 17}
            yield number
            if not left:
                left = 17
                yield number

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)


class KeepsOrder(MayKeep):
    """Has its order in its state, for which alone it draws."""

    def __iter__(self) -> Iterator[int]:
        loaded, self.state = self.state, None
        generator = random.Random(3)
        self.at, self.order = loaded or (0, generator.sample(range(20), 20))
        while self.at < 20:
            self.at += 1
            yield self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"held": (self.at, list(self.order))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


class Keeps(MayKeep):
    """Gives each fifth number at the end, from what it has kept by then; its state may hold that."""

    def __init__(self, keeps: bool, *, container: Any = list) -> None:
        super().__init__(keeps)
        self.container = container

    def __iter__(self) -> Iterator[int]:
        loaded, self.state = self.state or {"at": 0, "held": []}, None
        self.held = kept = self.container(loaded["held"] if self.keeps else [])
        # What is logged by key, or read once, is none of its memory.
        self.cache: dict[int, str] = {}
        for self.at in range(loaded["at"] + 1, 41):
            self.cache[self.at] = ""
            if self.at % 5:
                yield self.at
            elif isinstance(kept, Counter):
                kept[self.at] += 1
            else:
                kept.append(self.at)
        yield from kept

    def state_dict(self) -> dict[str, Any]:
        held = self.held.elements() if isinstance(self.held, Counter) else self.held
        return {"at": self.at, "held": list(held)}


class KeepsCounts(Keeps):
    def __init__(self, keeps: bool) -> None:
        super().__init__(keeps, container=Counter)


KEEPS = [
    (InBlocks, "__iter__.generator"),
    (LeavesOutWhatCame, "LeavesOutWhatCame.seen, unique.seen"),
    (CountsDown, "__iter__.left"),
    (Keeps, "Keeps.held, __iter__.kept"),
    (KeepsCounts, "KeepsCounts.held, __iter__.kept"),
]


def test_a_generator_that_is_drawn_from_again_is_told_then_and_after_another_stop_too() -> None:
    slot = slot_of(InBlocks(False))
    list(islice(slot, 3))
    for _ in range(2):
        slot = slot_of(InBlocks(False), slot.state())
        next(slot)
        assert not slot.said
    list(islice(slot, 2))
    assert "held before the stop in __iter__.generator" in " ".join(slot.said)
    slot = slot_of(KeepsOrder(True))
    before = list(islice(slot, 4))
    resumed = slot_of(KeepsOrder(True), slot.state())
    assert (before + list(resumed), resumed.said) == (list(slot_of(KeepsOrder(True))), [])


@pytest.mark.parametrize(("kind", "name"), KEEPS)
@pytest.mark.parametrize("number", range(5, 10))
def test_a_state_without_what_later_samples_depend_on_is_told(kind: Any, name: str, number: int) -> None:
    for keeps in (True, False):
        slot = slot_of(kind(keeps))
        before = [next(slot) for _ in range(number)]
        resumed = slot_of(kind(keeps), slot.state())
        after = list(resumed)
        if keeps:
            assert (before + after, resumed.said) == (list(slot_of(kind(keeps))), [])
        else:
            (said,) = resumed.said
            # Behind the first block the batches that are read again show it.
            assert f"held before the stop in {name}" in said or (number > 5 and "other samples" in said)


class SetsOnce(GoesOnWithState):
    """Sets an attribute in one of its samples, and gives it much later; its state leaves that out."""

    def __init__(self, value: Any, at: int) -> None:
        super().__init__()
        self.at, self.sets, self.held = 0, (at, value), type(value)(0) if value is not True else False

    def __iter__(self) -> Iterator[Any]:
        while self.at < 40:
            self.at += 1
            if self.at == self.sets[0]:
                self.held = self.sets[1]
            yield self.held if self.at == 40 else self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SetsFromNone(SetsOnce):
    def __init__(self, value: Any, at: int) -> None:
        super().__init__(1, at)
        self.held, self.sets = None, (at, value)


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize(
    ("kind", "value"),
    [(SetsOnce, True), (SetsOnce, np.float64(2)), (SetsOnce, np.int32(3)), (SetsFromNone, (1, "a")), (SetsFromNone, 2)],
)
def test_a_value_of_any_kind_that_a_state_leaves_out_is_told(kind: Any, value: Any, at: int) -> None:
    slot = slot_of(kind(value, at))
    for _ in range(6):
        next(slot)
    resumed = slot_of(kind(value, at), slot.state())
    next(resumed)
    assert "held before the stop in" in " ".join(resumed.said)


@pytest.mark.parametrize("number", range(1, 9))
def test_what_is_drawn_on_the_way_to_a_position_is_not_taken_for_another_position(number: int) -> None:
    slot = slot_of(SkipsAhead(), sample_seed=0)
    for _ in range(number):
        next(slot)
    resumed = slot_of(SkipsAhead(), slot.state(), sample_seed=0)
    assert next(resumed) == next(slot)
    assert not resumed.said
    # What has changed in a pass is told from its second batch on.
    assert {**resumed.state(), "kept": None} == {**slot.state(), "kept": None}


class InThread(Numbers):
    """Reads ahead in a thread, or in a pool, and draws there or where it is iterated."""

    def __init__(self, *, draws_there: bool, in_pool: bool = False) -> None:
        self.draws_there, self.in_pool = draws_there, in_pool

    def __iter__(self) -> Iterator[Any]:
        samples: queue.Queue[Any] = queue.Queue(2)

        def fill() -> None:
            for number in range(8):
                samples.put(number + random.random() if self.draws_there else number)

        if self.in_pool:
            # Not at an end of its own: the pool waits for its function.
            ThreadPoolExecutor(1).submit(fill)
        else:
            threading.Thread(target=fill, daemon=True).start()
        for _ in range(8):
            yield samples.get()


@pytest.mark.parametrize("in_pool", [False, True])
def test_draws_in_threads_of_a_dataset_are_told_once(in_pool: bool) -> None:
    for draws_there in (False, True):
        slot = slot_of(InThread(draws_there=draws_there, in_pool=in_pool))
        assert len(list(slot)) == 4
        assert [("runs threads of its own in this process" in one) for one in slot.said] == [True] * draws_there
    unseeded = slot_of(InThread(draws_there=True, in_pool=in_pool), sample_seed=None)
    assert len(list(unseeded)) == 4
    assert "threads" not in " ".join(unseeded.said)


class Floats:
    """Batches of floats alone; its state may be that of what a wrapper has fetched ahead, and it may augment them."""

    at, loaded = 0, 0

    def __init__(self, ahead: int = 0, *, augments: bool = False) -> None:
        self.ahead, self.augments = ahead, augments

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.loaded = self.loaded, 0
        while self.at < 10:
            self.at += 1
            yield torch.full((4,), self.at / 8) + (torch.rand(4) if self.augments else 0)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + self.ahead}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("number", range(3, 9))
def test_batches_of_floats_that_a_state_does_not_lead_back_to_are_told(ahead: int, number: int) -> None:
    how: dict[str, Any] = {"sample_seed": None, "batch_size": None, "gives_batches": True}
    slot = slot_of(Floats(ahead), **how)
    list(islice(slot, number))
    resumed = slot_of(Floats(ahead), slot.state(), **how)
    list(resumed)
    assert ["gives other samples" in one for one in resumed.said] == [True] * ahead
    # What is drawn from the process is another each time, and tells nothing.
    slot = slot_of(Floats(augments=True), **how)
    list(islice(slot, number))
    resumed = slot_of(Floats(augments=True), slot.state(), **how)
    list(resumed)
    assert ["from where the model has left" in one for one in resumed.said] == [True]


class FewKinds:
    """Samples of few kinds, in another order in each pass; its state is right, or stays in force."""

    at, loaded, epoch = 0, 0, -1

    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def __iter__(self) -> Iterator[int]:
        self.epoch += not self.loaded
        self.at = self.loaded - 1
        # The first two samples of pass 1 are those behind sample 2 of pass 0.
        order = (0, 1, 9, 9, 5, 6, 8, 8, 7, 7) if self.epoch else (9, 9, 0, 1, 5, 6, 7, 7, 8, 8)
        for number in order[self.loaded :]:
            self.at += 1
            yield number
        self.loaded = 2 if self.stays and self.loaded else 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + 1, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("stays", [False, True])
def test_passes_that_begin_alike_by_chance_are_not_taken_for_one_another(stays: bool) -> None:
    dataset = FewKinds(stays)
    slot = slot_of(dataset)
    before = [next(slot) for _ in range(3)]
    assert before[1] == [0, 1]
    resumed = FewKinds(stays)
    slot = slot_of(resumed, slot.state())
    assert list(slot) == [[7, 7], [8, 8]]
    following = slot_of(resumed, None, 1)
    list(following)
    assert ["where the resume began" in one for one in following.said] == [True] * stays


class OverLibrary(Numbers):
    """Draws where it is iterated, and reads from a library that has a pool of its own."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for number in self.source:
            yield number["text"] + str(random.random())


def test_a_pool_of_a_library_is_none_of_the_users(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text("a\nb\nc\n")
    files = [str(path) for path in paths]
    streamed = datasets.load_dataset("text", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    slot = slot_of(OverLibrary(streamed.shuffle(seed=1, buffer_size=2)))
    threads = threading.active_count()
    next(slot)
    if threading.active_count() == threads:
        pytest.skip("this version of datasets starts no thread")
    assert len(list(slot)) == 4
    assert not slot.said


class Drawn(Numbers):
    """Batches of its own: it draws as a pass begins, and perhaps in each batch."""

    def __init__(self, *, in_batches: bool) -> None:
        self.in_batches = in_batches

    def __iter__(self) -> Iterator[Any]:
        first = random.random()
        for number in range(5):
            yield number + (random.random() if self.in_batches else first)


@pytest.mark.parametrize("in_batches", [False, True])
def test_batches_that_are_drawn_from_where_the_model_has_left_generators_are_told(in_batches: bool) -> None:
    how: dict[str, Any] = {"sample_seed": None, "batch_size": None}
    for gives_batches in (True, False):
        slot = slot_of(Drawn(in_batches=in_batches), gives_batches=gives_batches, **how)
        assert len(list(slot)) == 5
        told = ["from where the model has left them" in one for one in slot.said]
        assert told == [True] * in_batches


def test_a_state_that_is_no_plain_data_is_refused() -> None:
    class Odd(GoesOnWithState):
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

    with pytest.raises(StateError, match=r"Odd \(rank 0, worker 0\) gave nothing that can be kept"):
        next(slot_of(Odd()))


def test_a_state_dict_that_takes_arguments_is_refused_with_what_to_do() -> None:
    class OfItsOwnLoader(GoesOnWithState):
        """As LitData's and MosaicML's."""

        def state_dict(self, num_samples_yielded: int, num_workers: int = 0) -> dict[str, Any]:  # type: ignore[override]
            return {"at": num_samples_yielded}

    with pytest.raises(StateError) as caught:
        next(slot_of(OfItsOwnLoader()))
    said = str(caught.value)
    assert "OfItsOwnLoader (rank 0, worker 0) takes arguments (num_samples_yielded)" in said
    assert "which only the loader of its own package knows" in said
    assert "give it, in a subclass, a state_dict() without arguments" in said
    assert "train on an iterable that is no DataLoader and holds that loader" in said


def test_a_state_dict_that_raises_a_type_error_of_its_own_is_refused_as_any() -> None:
    class Raises(GoesOnWithState):
        def state_dict(self, prefix: str = "") -> dict[str, Any]:
            raise TypeError("its own")

    with pytest.raises(StateError, match="gave nothing that can be kept in a checkpoint: TypeError: its own"):
        next(slot_of(Raises()))


def test_an_endless_source_without_state_is_read_again_from_its_first_pass_where_it_goes_on() -> None:
    class Held(GoesOn):
        """Cannot be copied to find out."""

        def __init__(self) -> None:
            self.made = 0
            self.source = iter(lambda: self.made, -1)

        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                self.made += 1
                yield number, self.made

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds an open file")

    for kind, fewest in ((Held, 7), (GoesOn, 7), (Counts, 2)):
        dataset = kind()
        state = {**slot_of(kind()).state(), "passes": [3], "ended": None}
        slot = slot_of(dataset, state, 1)
        next(slot)
        assert slot.state()["passes"] == [3]
        assert getattr(dataset, "at", getattr(dataset, "num_passes", 0)) in (fewest, fewest + 1)


def test_a_generator_that_goes_on_is_warned_of_and_its_passes_are_not_read_again() -> None:
    class Augments(Numbers):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def __iter__(self) -> Iterator[Any]:
            return ((number, self.generator.random()) for number in self.share())

    slot = slot_of(Augments())
    next(slot), next(slot)
    assert slot.state()["draws"]
    resumed = slot_of(Augments(), {**slot.state(), "passes": [4]}, 1)
    next(resumed)
    assert "holds a random generator that goes on from pass to pass" in "".join(resumed.said)


def test_other_samples_are_refused_unless_accepted() -> None:
    class AtRandom(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return iter([random.SystemRandom().randrange(10**9) for _ in range(9)])

    slot = slot_of(AtRandom())
    next(slot), next(slot)
    with pytest.raises(PositionError, match=r"AtRandom \(rank 0, worker 0\) begins pass 0 with other samples"):
        next(slot_of(AtRandom(), slot.state()))
    assert len(list(slot_of(AtRandom(), slot.state(), is_checked=False))) == 3


@pytest.mark.parametrize(
    "tag", [16000, "train", True, torch.tensor(0), np.int64(1)], ids=lambda tag: type(tag).__name__
)
def test_other_samples_are_refused_though_all_of_them_have_one_label(tag: Any) -> None:
    class Tagged(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return iter([(random.SystemRandom().random(), tag) for _ in range(9)])

    slot = slot_of(Tagged())
    next(slot), next(slot)
    with pytest.raises(PositionError, match="begins pass 0 with other samples"):
        next(slot_of(Tagged(), slot.state()))


@pytest.mark.parametrize("sample_seed", [None, 3])
def test_other_values_beside_the_same_labels_are_told_where_draws_follow_a_seed(sample_seed: int | None) -> None:
    class Augmented(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return iter([(random.SystemRandom().random(), number % 3) for number in range(9)])

    slot = slot_of(Augmented(), sample_seed=sample_seed)
    next(slot), next(slot)
    resumed = slot_of(Augmented(), slot.state(), sample_seed=sample_seed)
    next(resumed)
    assert ["the integers and strings of those before" in text for text in resumed.said] == [True] * bool(sample_seed)


def test_an_order_that_differs_behind_the_first_samples_is_refused() -> None:
    class Late(Numbers):
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __iter__(self) -> Iterator[Any]:
            return iter([*range(100), *random.Random(self.seed).sample(range(100, 200), 100)])

    slot = slot_of(Late(0))
    for _ in range(70):
        next(slot)
    with pytest.raises(PositionError, match="begins pass 0 with other samples"):
        next(slot_of(Late(1), slot.state()))


def test_a_pass_that_is_shorter_now_is_refused() -> None:
    class Short(Numbers):
        def share(self) -> list[int]:
            return [0, 1]

    slot = slot_of(Numbers())
    next(slot), next(slot)
    with pytest.raises(PositionError, match=r"2 batches of .*Short \(rank 0, worker 0\) were used, but now it ends"):
        next(slot_of(Short(), slot.state()))


def test_it_goes_on_behind_a_sample_that_fails_as_in_torch() -> None:
    class Fails(ItselfWithState):
        def __next__(self) -> Any:
            if (number := super().__next__()) == 2:
                raise OSError("broken")
            return number

    slot = slot_of(Fails())
    found = [next(slot)]
    with pytest.raises(OSError, match="broken"):
        next(slot)
    assert [*found, *slot] == [[0, 1], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ((torch.rand(3), torch.tensor(3)), (torch.rand(3), torch.tensor(3)), True),
        (torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), False),
        (np.zeros((2, 3), "u1"), np.zeros((3, 2), "u1"), False),
        ([1, 23], [12, 3], False),
        ({"x": 0.5}, {"x": 0.5}, True),
    ],
)
def test_samples_are_told_apart_by_labels_or_else_by_all_that_they_hold(one: Any, other: Any, is_same: bool) -> None:
    assert (digest_of_sample(one) == digest_of_sample(other)) is is_same


class DrawsItsOrder(Numbers):
    """Draws its order from the process as a pass begins, and has all of it in its state."""

    order: list[int] | None = None
    at = 0

    def __iter__(self) -> Iterator[Any]:
        if self.order is None:
            self.order, self.at = random.sample(range(20), 20), 0
        while self.at < 20:
            self.at += 1
            yield float(self.order[self.at - 1])
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order or ()), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = list(state["order"]), state["at"]


@pytest.mark.parametrize("number", range(1, 9))
def test_an_order_that_follows_no_seed_is_not_drawn_again_in_place_of_its_state(number: int) -> None:
    slot = slot_of(DrawsItsOrder(), sample_seed=None)
    for _ in range(number):
        next(slot)
    resumed = slot_of(DrawsItsOrder(), slot.state(), sample_seed=None)
    assert next(resumed) == next(slot)
    assert not resumed.said


class Alternates(Numbers):
    """Whose iterator has a local variable that seldom changes."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.at, 40):
            block = number // 10  # noqa: F841
            self.at += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("number", [4, 5])
def test_what_has_not_changed_before_a_stop_is_kept_behind_it_as_without_the_stop(number: int) -> None:
    slot = slot_of(Alternates())
    for _ in range(number):
        next(slot)
    resumed = slot_of(Alternates(), slot.state())
    for _ in range(2):
        next(slot)
        next(resumed)

    assert resumed.state()["kept"] == slot.state()["kept"]
    assert "__iter__.block" in slot.state()["kept"]
