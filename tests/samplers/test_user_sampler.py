"""Any sampler as one canonical sequence for every epoch: ways, surroundings, and what users' samplers are like."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from lightning_stateful.errors import ConfigurationError, DamagedStateError, UnsupportedLoaderError
from lightning_stateful.index.position import Position
from lightning_stateful.samplers import DDPSamplerWrapper
from lightning_stateful.samplers.user_sampler import UserSampler


class Drawn(Sampler[int]):
    """Draws with whatever it is given; generators may stand anywhere in what it holds."""

    def __init__(self, held: Any, draw: Callable[[Any], int]) -> None:
        self.held, self.draw = held, draw

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield self.draw(self.held)


class BeginsAnew:
    """Is its own iterator, and begins anew at iter()."""

    def __iter__(self) -> BeginsAnew:
        self.next = 0
        return self

    def __next__(self) -> int:
        if self.next == 5:
            raise StopIteration
        self.next += 1
        return self.next - 1


class ToldTheEpoch(BeginsAnew):
    """The same, told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __next__(self) -> int:
        return 10 * self.epoch + super().__next__()


class Grows(Sampler[int]):
    """Has one item more in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5 + self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(5 + self.epoch))


class NothingInOneEpoch(Grows):
    """Has nothing to yield in epoch 1, and does not say how much otherwise."""

    def __len__(self) -> int:
        raise TypeError

    def __iter__(self) -> Iterator[int]:
        return iter(range(0 if self.epoch == 1 else 3))


class OwnShare(Sampler[int]):
    """Deals out to ranks by itself, and has counted its share when it was built."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank
        self.count = 12 // num_replicas

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        own = list(range(12))[self.rank :: self.num_replicas]
        assert len(own) == self.count
        return iter(own)


class Scheduled(Sampler[int]):
    """Shuffles a list in place, and serves as much of it as it is told from outside."""

    def __init__(self) -> None:
        self.indices, self.count = list(range(20)), 5

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices[: self.count])


class ShufflesMany(Sampler[int]):
    """Shuffles a list in place, and serves it."""

    def __init__(self) -> None:
        self.indices = list(range(200))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        yield from self.indices


class Misbehaved(Sampler[int]):
    """Has properties that raise, and itself, and a long list, and a read-only array, and locks."""

    def __init__(self) -> None:
        self.me, self.many = self, list(range(10**5))
        self.array = np.arange(9)
        self.array.flags.writeable = False
        self.function, self.kind, self.stream = print, Misbehaved, sys.stderr

    @property
    def not_yet(self) -> Any:
        raise RuntimeError("too early")

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.array).tolist())


FOUR: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "torch": (torch.Generator, lambda g: int(torch.randint(99, (), generator=g))),
    "NumPy": (lambda: np.random.default_rng(), lambda g: int(g.integers(99))),
    "NumPy, old": (lambda: np.random.RandomState(), lambda g: int(g.randint(99))),
    "random": (random.Random, lambda g: g.randrange(99)),
}
four_kinds = pytest.mark.parametrize(("make", "draw"), FOUR.values(), ids=FOUR)


def epochs(sampler: Any, count: int = 3, **options: Any) -> list[list[Any]]:
    wrapper = DDPSamplerWrapper(sampler, **options)
    return [list(wrapper) for _ in range(count)]


class TestWays:
    @pytest.mark.parametrize(
        ("make", "way"),
        [(theirs.GlobalRandom, "wound"), (theirs.OwnState, "own_state"), (theirs.HardNegatives, "feedback")],
    )
    def test_the_way_is_seen_from_what_the_sampler_has(self, make: Callable[[], Any], way: str) -> None:
        source = UserSampler(make())

        assert source.way == way
        assert source.report(Position(consumed=3)) == {
            "samples": 3,
            "sampler": {"class": make.__name__, "way": way},
        }

    @pytest.mark.parametrize("missing", ["state_dict", "load_state_dict", "set_epoch"])
    def test_a_sampler_that_depends_on_training_needs_all_three_methods(self, missing: str) -> None:
        made = type("Partly", (theirs.HardNegatives,), {missing: None})
        with pytest.raises(ConfigurationError, match=r"Partly says depends_on_training = True\. It then needs"):
            UserSampler(made())

    @pytest.mark.parametrize("value", [3, None, object(), lambda: iter(())], ids=lambda value: type(value).__name__)
    def test_what_cannot_be_iterated_is_refused(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match="cannot be iterated; a sampler has __iter__"):
            UserSampler(value)

    @pytest.mark.parametrize(
        "value",
        [iter([1]), (n for n in range(3)), map(str, range(3)), iter(range(500))],
        ids=["of a list", "generator", "map", "long"],
    )
    def test_an_iterator_which_is_over_after_one_epoch_is_refused(self, value: Any) -> None:
        with pytest.raises(UnsupportedLoaderError, match="yields something else when the same epoch is begun a second"):
            DDPSamplerWrapper(value)

    @pytest.mark.parametrize("place", [None, {}, {"slot": 1}], ids=str)
    def test_a_position_without_the_samplers_place_is_damaged(self, place: Any) -> None:
        source = UserSampler([1, 2])
        with pytest.raises(DamagedStateError, match="a sampler's place"):
            source.restore({**Position().to_dict(), "sampler": place})

    def test_a_position_survives_save_and_restore(self) -> None:
        source = UserSampler(theirs.GlobalRandom())
        saved = source.save(Position(epoch=2, consumed=5, width=3))

        assert source.save(source.restore(saved)) == saved


class TestRandomness:
    @four_kinds
    @pytest.mark.parametrize("nest", [lambda g: g, lambda g: [1, (g,)], lambda g: {"a": {"b": g}}])
    def test_generators_that_it_holds_are_seeded_wherever_they_stand(self, make: Any, draw: Any, nest: Any) -> None:
        def dig(held: Any) -> int:
            while isinstance(held, (list, tuple, dict)):
                held = next(iter(held.values())) if isinstance(held, dict) else held[-1]
            return draw(held)

        first, second = (epochs(Drawn(nest(make()), dig)) for _ in range(2))

        assert first == second
        assert first[0] != first[1] != first[2]

    @four_kinds
    def test_generators_of_inner_samplers_are_seeded(self, make: Any, draw: Any) -> None:
        first, second = (epochs(BatchSampler(Drawn([make()], lambda held: draw(held[0])), 3, False)) for _ in range(2))

        assert first == second
        assert first[0] != first[1]

    def test_ranks_with_other_global_seeds_agree(self) -> None:
        found = []
        for rank in range(3):
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            found.append([*epochs(theirs.BatchesWithoutLen()), *epochs(theirs.GlobalRandom())])

        assert found[0] == found[1] == found[2]

    def test_seeds_give_other_sequences(self) -> None:
        assert epochs(theirs.GlobalRandom(), seed=1) != epochs(theirs.GlobalRandom(), seed=2)

    def test_neither_training_nor_the_sampler_sees_what_the_other_draws(self) -> None:
        alone = epochs(theirs.GlobalRandom(), 1)[0]
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        drawn = [(float(torch.rand(())), np.random.rand(), random.random()) for _ in range(theirs.LENGTH)]
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        found = []
        for index in DDPSamplerWrapper(theirs.GlobalRandom()):
            found.append((index, (float(torch.rand(())), np.random.rand(), random.random())))

        assert found == list(zip(alone, drawn, strict=True))


class TestTheirs:
    def test_a_sampler_that_is_its_own_iterator_and_begins_anew_is_served(self) -> None:
        assert epochs(BeginsAnew(), 2) == [[0, 1, 2, 3, 4]] * 2

    def test_one_that_is_told_the_epoch_is_served(self) -> None:
        wrapper = DDPSamplerWrapper(ToldTheEpoch())

        assert [list(islice(wrapper, 20)) for _ in range(2)] == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]

    def test_a_length_that_changes_with_the_epoch_is_found_with_both_numbers(self) -> None:
        wrapper = DDPSamplerWrapper(Grows())
        list(wrapper)
        with pytest.raises(ConfigurationError, match=r"Grows yields more than 5 items in epoch 1, .* length='unknown'"):
            list(wrapper)

    def test_a_length_that_changes_with_the_epoch_is_found_out_on_demand(self) -> None:
        assert [len(epoch) for epoch in epochs(Grows(), length="unknown")] == [5, 6, 7]

    def test_an_epoch_without_items_is_passed(self) -> None:
        assert epochs(NothingInOneEpoch()) == [[0, 1, 2], [], [0, 1, 2]]

    @pytest.mark.parametrize("make", [list, lambda: SequentialSampler([]), lambda: theirs.ShuffledBatches([])])
    def test_an_empty_sampler_yields_nothing(self, make: Callable[[], Any]) -> None:
        wrapper = DDPSamplerWrapper(make(), 2, 1)

        assert (list(wrapper), len(wrapper)) == ([], 0)

    def test_a_sampler_that_has_counted_its_own_share_is_refused_with_the_remedy(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"OwnShare .*told that there is one rank .*\(num_replicas=1, rank=0"
        ):
            DDPSamplerWrapper(OwnShare(2, 1), 2, 1)

    def test_what_it_is_told_between_epochs_is_kept(self) -> None:
        sampler = Scheduled()
        wrapper = DDPSamplerWrapper(sampler)
        list(wrapper)
        sampler.count = 9

        assert len(list(wrapper)) == 9

    def test_whatever_it_holds_it_is_served(self) -> None:
        first, second = (epochs(Misbehaved()) for _ in range(2))

        assert first == second
        assert [sorted(epoch) for epoch in first] == [list(range(9))] * 3

    @pytest.mark.parametrize(
        "items",
        [[3, 1], ["a", "b"], [None, 1.5], [np.int64(3), np.int64(4)], [torch.tensor(3), torch.tensor(5)], [{"i": 1}]],
        ids=["ints", "strings", "others", "NumPy ints", "tensors", "dicts"],
    )
    def test_items_pass_as_they_are(self, items: list[Any]) -> None:
        found = list(DDPSamplerWrapper(items))

        assert all(mine is yours for mine, yours in zip(found, items, strict=True))

    def test_a_class_with_slots_is_served(self) -> None:
        class Slotted:
            __slots__ = ("length",)

            def __init__(self) -> None:
                self.length = 9

            def __len__(self) -> int:
                return self.length

            def __iter__(self) -> Iterator[int]:
                return iter(torch.randperm(self.length).tolist())

        assert epochs(Slotted()) == epochs(Slotted())

    def test_a_wrapper_of_a_sampler_that_deals_out_by_itself_is_dealt_out_once(self) -> None:
        ranks = [
            DDPSamplerWrapper(DistributedSampler(range(11), 3, rank, seed=4), 3, rank, tail="drop")  # type: ignore[arg-type]
            for rank in range(3)
        ]
        for _ in range(2):
            found = [list(rank) for rank in ranks]

            assert len({index for rank in found for index in rank}) == 9
            assert [len(rank) for rank in found] == [3, 3, 3]


class TestLeaving:
    def test_a_sampler_is_left_as_it_was_found_where_iterating_changes_it(self) -> None:
        sampler = theirs.ShufflesInPlace()
        wrapper = DDPSamplerWrapper(sampler)
        for _ in range(2):
            assert sampler.batches == theirs.BATCHES
            list(wrapper)

        assert sampler.batches == theirs.BATCHES

    def test_what_it_is_told_afterwards_stays_when_it_is_wrapped_again(self) -> None:
        sampler = Scheduled()
        list(DDPSamplerWrapper(sampler))
        sampler.count = 9

        assert len(list(DDPSamplerWrapper(sampler))) == 9

    def test_a_sampler_that_was_dropped_in_the_middle_of_a_pass_is_put_back_when_it_is_wrapped_again(self) -> None:
        expected = epochs(theirs.ShufflesInPlace())
        sampler = theirs.ShufflesInPlace()
        next(iter(DDPSamplerWrapper(sampler)))

        assert epochs(sampler) == expected

    def test_a_sampler_that_need_not_be_put_back_keeps_what_it_holds(self) -> None:
        sampler = Scheduled()
        source = UserSampler(sampler)
        with source.entered():
            sampler.indices.reverse()
        source.put_back()

        assert sampler.indices == list(range(20))[::-1]

    def test_wrapping_a_sampler_again_leaves_a_pass_that_is_under_way_alone(self) -> None:
        expected = list(DDPSamplerWrapper(ShufflesMany()))
        sampler = ShufflesMany()
        items = iter(DDPSamplerWrapper(sampler))
        found = [next(items) for _ in range(3)]
        DDPSamplerWrapper(sampler)

        assert [*found, *items] == expected


SCRIPT = """
import json, sys
from torch.utils.data import Sampler
from lightning_stateful.samplers import DDPSamplerWrapper

class OfASet(Sampler):
    def __iter__(self):
        return iter({f"sample {n}" for n in range(50)})

sampler = DDPSamplerWrapper(OfASet())
items = iter(sampler)
try:
    if len(sys.argv) > 1:
        sampler.load_state_dict(json.loads(sys.argv[1]))
    for _ in range(9):
        next(items)
except Exception as error:
    print(json.dumps(type(error).__name__))
else:
    print(json.dumps(sampler.state_dict()))
"""


def in_a_process(hash_seed: int, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_sampler_in_the_order_of_a_set_of_strings_is_found_in_another_process() -> None:
    state = in_a_process(1)

    assert in_a_process(2, state) == '"StateMismatchError"'
    assert in_a_process(1, state).startswith("{")
