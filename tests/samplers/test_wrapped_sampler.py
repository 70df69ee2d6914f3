"""Any sampler is an order of batches: the laws, how slots are dealt out, lengths, and what users' samplers are like."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import samplers as theirs
from support.orders import OrderCase, but_ahead, every_law, serve
from torch.utils.data import DistributedSampler, Sampler

from lightning_stateful.core import UNKNOWN, Progress
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError, PositionError, UnsupportedLoaderError
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class Items(Sampler[Any]):
    """So many items in their order, with or without saying how many."""

    def __init__(self, items: list[Any], sized: bool = True) -> None:
        self.items, self.sized = items, sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no len")
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.items))


class Drawn(Items):
    """The same in an order of Python's global generator."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.sample(self.items, len(self.items)))


class SharesWithData(Sampler[int]):
    """Tells its dataset where it is, which others read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.order = dataset, list(range(len(dataset)))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        for index in self.order:
            self.dataset.scale = index
            yield index


BATCHES = [[3 * number + offset for offset in range(1 + number % 3)] for number in range(11)]
SAMPLES = [sample for batch in BATCHES for sample in batch]


def law_case(sampler: Any, samples: Any = None, *, longer: Any = None, forward: bool = False, **options: Any) -> Any:
    return OrderCase(
        order=WrappedSampler(sampler, **options),
        samples=samples,
        longer=None if longer is None else WrappedSampler(longer, **options),
        drops=options.get("tail") == "drop",
        forward=forward,
        tells_repeats=options.get("batch_size", 1) is not None,
    )


LAW_CASES: dict[str, OrderCase] = {
    "samples": law_case(Drawn(list(range(31))), range(31), longer=Drawn(list(range(40))), batch_size=3),
    "without len": law_case(theirs.WithoutLen(), range(22), forward=True, batch_size=2),
    "drop": law_case(Drawn(list(range(31))), range(31), tail="drop", batch_size=2),
    "batches": law_case(Drawn(BATCHES), SAMPLES, batch_size=None),
    "batches without len": law_case(theirs.BatchesWithoutLen(), range(22), forward=True, batch_size=None),
    "between ranks": law_case(Drawn(list(range(31))), range(31), batch_size=3, shuffles=True),
    "cut off": law_case(theirs.Endless(), length=25, batch_size=3),
}


@every_law
@pytest.mark.parametrize("case", LAW_CASES.values(), ids=LAW_CASES)
def test_wrapped_samplers_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)


def rest(sampler: Any, ranks: int, consumed: int = 0, **options: Any) -> list[list[Any]]:
    """The batches of every rank in epoch 0 from a slot on."""
    plan = WrappedSampler(sampler, **options).plan(0, ranks, Progress(consumed=consumed))
    return [[batch for _, batch in plan.batches(rank)] for rank in range(ranks)]


class TestDealing:
    @pytest.mark.parametrize("seed", range(8))
    def test_steps_of_samples_are_those_of_the_rule_from_any_slot(self, seed: int) -> None:
        drawn = random.Random(seed)
        length, ranks, batch_size = drawn.randrange(1, 60), drawn.randrange(1, 6), drawn.randrange(1, 5)
        consumed, tail, exact = drawn.randrange(length), drawn.choice(["split", "pad", "drop"]), drawn.random() < 0.3
        rule = StepRule(
            batch_size=batch_size, num_replicas=ranks, exact=exact, pad=tail == "pad", drop_last=tail == "drop"
        )
        expected: list[list[list[int]]] = [[] for _ in range(ranks)]
        left = length - consumed
        while rule.num_steps(left):
            step, first = rule.step_size(left), length - left
            for rank, batches in enumerate(expected):
                # In turn, unless there are not enough for all.
                shared = tail == "pad" or step < ranks
                batches.append(
                    (first + rule.share(left, rank)).tolist() if shared else [*range(first + rank, first + step, ranks)]
                )
            left -= step
        items = Items(list(range(length)), sized=seed % 2 == 0)

        assert rest(items, ranks, consumed, batch_size=batch_size, tail=tail, exact=exact) == expected

    @pytest.mark.parametrize("batch", [[7, 8, 9], (7, 8), "abc"], ids=["list", "tuple", "text"])
    def test_a_batch_of_whatever_kind_is_never_cut_but_served_twice(self, batch: Any) -> None:
        assert rest(Items([batch]), 2, batch_size=None, is_collated=True) == [[batch], [batch]]
        assert rest(Items([batch]), 2, batch_size=None, tail="drop") == [[], []]

    def test_shuffling_between_ranks_moves_slots_within_their_step_only(self) -> None:
        order = WrappedSampler(Items(list(range(20))), shuffles=True)
        steps = [[batch[0] for _, batch in step] for step in serve(order, 0, 4).steps]

        assert [sorted(step) for step in steps] == [list(range(start, start + 4)) for start in range(0, 20, 4)]
        assert len({tuple(slot % 4 for slot in step) for step in steps}) > 1
        assert steps != [[batch[0] for _, batch in step] for step in serve(order, 1, 4).steps]


class TestPlans:
    def test_steps_are_known_once_the_end_was_met(self) -> None:
        plan = WrappedSampler(Items(list(range(9)), sized=False)).plan(0, 2)
        batches = plan.batches(0)
        next(batches)
        assert plan.num_steps in (5, UNKNOWN)
        assert len(list(batches)) == 4
        assert plan.num_steps == 5

    def test_an_exact_plan_of_single_samples_tells_that_it_ends_in_pairs(self) -> None:
        order = WrappedSampler(Items(list(range(9))), exact=True)

        assert (order.plan(0, 4).ends_in_pairs, order.plan(0, 3).ends_in_pairs) == (True, False)


class TestOptions:
    @pytest.mark.parametrize(("name", "value"), [("tail", "wrap"), ("length", 0), ("length", "all")])
    def test_options_out_of_range_are_refused_by_name(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=f"{name} must be .* got {value!r}"):
            WrappedSampler([1, 2], **{name: value})
        with pytest.raises(ConfigurationError, match="int cannot be iterated; a sampler has __iter__ or"):
            WrappedSampler(3)

    def test_a_sampler_without_len_refuses_no_progress_but_a_sized_one_does(self) -> None:
        WrappedSampler(theirs.WithoutLen()).plan(0, 1, Progress(consumed=10**6))
        with pytest.raises(PositionError, match="23 samples of epoch 0 were consumed, but GlobalRandom yields only 22"):
            WrappedSampler(theirs.GlobalRandom()).plan(0, 1, Progress(consumed=23))

    def test_a_progress_of_ranks_with_sequences_of_their_own_is_a_count(self) -> None:
        order = WrappedSampler(DistributedSampler(range(22), 4, 3), is_dealt_out=False)  # type: ignore[arg-type]
        order.meet(2, 1)
        plan = order.plan(0, 2)

        assert len(list(plan.batches(1))) == 6
        assert but_ahead(plan.progress_after(4)) == Progress(consumed=4, details={"sampler": [], "items": None})


class Warns(Sampler[int]):
    """Warns in each pass, which Python notes in its module."""

    def __iter__(self) -> Iterator[int]:
        warnings.warn("some classes are small", UserWarning, stacklevel=1)
        return iter(range(9))

    def __len__(self) -> int:
        return 9


COUNTS = {"passes": 0}


class Registry:
    """A class in which samplers count."""

    passes = 0


class CountsInModule(Sampler[int]):
    """Shuffles by a count that its module holds."""

    def __iter__(self) -> Iterator[int]:
        COUNTS["passes"] += 1
        return iter(random.Random(COUNTS["passes"]).sample(range(9), 9))


class CountsInClass(Sampler[int]):
    """Shuffles by a count that another class holds."""

    def __iter__(self) -> Iterator[int]:
        Registry.passes += 1
        return iter(random.Random(Registry.passes).sample(range(9), 9))


class CountsInEnvironment(Sampler[int]):
    """Shuffles by a count in a variable of the environment."""

    def __iter__(self) -> Iterator[int]:
        os.environ["PASSES_OF_SAMPLER"] = str(int(os.environ.get("PASSES_OF_SAMPLER", 0)) + 1)
        return iter(random.Random(os.environ["PASSES_OF_SAMPLER"]).sample(range(9), 9))


class TestTheirs:
    @pytest.mark.parametrize(
        ("kind", "where"),
        [
            (CountsInModule, r"test_wrapped_sampler\.COUNTS"),
            (CountsInClass, r"Registry\.passes"),
            (CountsInEnvironment, r"os\.environ\['PASSES_OF_SAMPLER'\]"),
        ],
    )
    def test_one_that_counts_in_its_module_is_refused_because_copies_share_it(
        self, kind: type[Sampler[int]], where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PASSES_OF_SAMPLER", "0")
        with pytest.raises(UnsupportedLoaderError, match=f"{kind.__name__} changes `.*{where}` while it is iterated"):
            serve(WrappedSampler(kind()), 0, 1)

    def test_one_that_warns_is_no_other_for_it(self) -> None:
        with pytest.warns(UserWarning, match="some classes are small"):
            serve(WrappedSampler(Warns()), 0, 1)

    @pytest.mark.parametrize("as_argument", [True, False], ids=["told", "a torch Dataset"])
    def test_one_that_changes_its_dataset_is_refused_because_copies_share_it(self, as_argument: bool) -> None:
        dataset = theirs.Numbers(9) if not as_argument else theirs.CountsEpochs()
        order = WrappedSampler(SharesWithData(dataset), dataset=dataset if as_argument else None)
        with pytest.raises(UnsupportedLoaderError, match=r"SharesWithData changes `\w+\.\w+` while"):
            serve(order, 0, 1)
