"""Loaders that are served together stand, at every step, where Lightning's own iteration would have got to."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.orders import but_ahead
from support.samplers import BatchesWithoutLen, GlobalRandom, ShuffledBatches

from lightning_stateful.core import Progress
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    PositionError,
    StateError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.loaders import StatefulLoader
from lightning_stateful.loaders.combined_loaders import MODES, CombinedLoaders
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler
from lightning_stateful.state import sealed

WHERE = "The state of this test"
SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=3)
Served = tuple[Progress, Any] | None


def combined(
    sizes: dict[str, tuple[int, int]], mode: str = "max_size_cycle", *, ranks: int = 1, rank: int = 0, **options: Any
) -> CombinedLoaders:
    """Loaders of the given lengths and batch sizes."""
    loaders = {
        path: StatefulLoader(range(length), batch_size=batch_size, num_replicas=ranks, rank=rank, **options)
        for path, (length, batch_size) in sizes.items()
    }
    return CombinedLoaders(loaders, mode)


def two(mode: str = "max_size_cycle", **options: Any) -> CombinedLoaders:
    return combined({"a": (4, 2), "b": (10, 2)}, mode, **options)


def named(sizes: list[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"loader{number}": size for number, size in enumerate(sizes)} if len(sizes) > 1 else {"": sizes[0]}


def at(loaders: CombinedLoaders, path: str, epoch: int, step: int) -> Served:
    """The progress of a loader before a step, and the batch of its rank there."""
    plan, own_step = loaders.plan_at(path, epoch, step)
    if own_step == plan.num_steps:
        return None
    return but_ahead(plan.progress_after(own_step)), next(plan.batches(loaders.loaders[path].topology.rank, own_step))[
        1
    ]


def consumed(loaders: CombinedLoaders, path: str, epoch: int, steps: int) -> list[tuple[int, int] | None]:
    """Pass and samples consumed in it, before every step."""
    found = [at(loaders, path, epoch, step) for step in range(steps)]
    return [None if one is None else (one[0].cycle, one[0].consumed) for one in found]


class Passes:
    """Stands in for a loader: each ``iter()`` gives its next pass within the epoch."""

    def __init__(self, loader: StatefulLoader, epoch: int) -> None:
        self.loader, self.epoch, self.cycle = loader, epoch, -1

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Served]:
        self.cycle += 1
        plan = self.loader.plan(self.epoch, Progress(epoch=self.epoch, cycle=self.cycle))
        batches = plan.batches(self.loader.topology.rank)
        return ((plan.progress_after(step), batch) for step, (_, batch) in enumerate(batches))


def simulated(loaders: CombinedLoaders, epoch: int) -> list[dict[str, Served]]:
    """The batches that Lightning's own iteration gets in every step of an epoch."""
    if not all(len(loader) for loader in loaders.loaders.values()):
        # A loader without a batch, among others that start over, ends every epoch of Lightning's at once.
        assume(False)
    passes = {path: Passes(loader, epoch) for path, loader in loaders.loaders.items()}
    return [step for step, _, _ in CombinedLoader(passes, loaders.mode)]


class TestWhereLoadersStand:
    def test_a_loader_that_is_done_stands_nowhere_and_has_consumed_its_epoch(self) -> None:
        loaders = combined({"short": (5, 2), "long": (10, 2)}, "max_size")

        assert at(loaders, "short", 1, 4) is None
        assert loaders.state_at(1, 4)["loaders"]["short"]["progress"] == {"epoch": 1, "cycle": 0, "consumed": 5}

    def test_other_modes_are_refused_by_name(self) -> None:
        with pytest.raises(ConfigurationError, match=r"modes \('min_size', 'max_size', 'max_size_cycle'\).*'sequen"):
            two("sequential")

    def test_beside_a_loader_without_len_only_the_shortest_can_end_an_epoch(self) -> None:
        def make(mode: str) -> CombinedLoaders:
            open_ended = StatefulLoader(range(22), batch_sampler=BatchesWithoutLen())
            return CombinedLoaders({"open": open_ended, "b": StatefulLoader(range(3))}, mode)

        for mode in ("max_size", "max_size_cycle"):
            with pytest.raises(ConfigurationError, match=r"Loaders \['open'\] do not say where they end"):
                make(mode)
        loaders, fresh = make("min_size"), make("min_size")
        expected = [at(loaders, "open", 0, step) for step in range(3)][2]

        assert (loaders.num_batches(), loaders.is_sized) == (3, True)
        assert fresh.load(loaders.state_at(0, 2), where=WHERE) == (0, 2)
        assert at(fresh, "open", 0, 2) == expected


class TestLoading:
    @given(SIZES, st.sampled_from(MODES), st.integers(1, 3), st.booleans(), st.integers(0, 2))
    def test_a_loader_stands_where_lightnings_iteration_gets_to_and_goes_on_there(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, drop_last: bool, epoch: int
    ) -> None:
        options: dict[str, Any] = {"ranks": ranks, "rank": ranks - 1, "drop_last": drop_last, "shuffle": True}
        saving = combined(named(sizes), mode, **options)
        whole, following = simulated(saving, epoch), simulated(saving, epoch + 1)
        assert saving.num_batches() == len(whole)
        for step in range(len(whole)):
            assert {path: at(saving, path, epoch, step) for path in saving.loaders} == whole[step]
            fresh, state = combined(named(sizes), mode, **options), saving.state_at(epoch, step)
            assert fresh.load(state, where=WHERE) == (epoch, step)
            assert fresh.state_at(epoch, step) == state
            for path in saving.loaders:
                rest = [at(fresh, path, epoch, later) for later in range(step, len(whole))]
                assert rest == [each[path] for each in whole[step:]]
                assert at(fresh, path, epoch + 1, 0) == following[0][path]


def of_batches(sampler: Any, length: int = 22, **options: Any) -> StatefulLoader:
    return StatefulLoader(range(length), batch_sampler=sampler, path="short", **options)


LENGTHS = [1 + 7 * number % 12 for number in range(22)]
# Loaders that may start over within an epoch; each is given its ranks.
SHORT: dict[str, Callable[..., StatefulLoader]] = {
    "samples": lambda **ranks: StatefulLoader(range(9), batch_size=2, shuffle=True, path="short", **ranks),
    "sampler": lambda **ranks: StatefulLoader(range(22), batch_size=4, sampler=GlobalRandom(), path="short", **ranks),
    "batch sampler": lambda **ranks: of_batches(ShuffledBatches(), **ranks),
    "mixture": lambda **ranks: of_batches(MixtureBatchSampler([12, 10], 2, weights=[1, 2], stop="cycle"), **ranks),
    "buckets": lambda **ranks: of_batches(BucketBatchSampler(LENGTHS, max_tokens=24, num_buckets=3), **ranks),
}


def beside_a_long_one(kind: str, ranks: int = 1, rank: int = 0, **options: Any) -> CombinedLoaders:
    """A short loader that starts over about three times beside a long one."""
    short = SHORT[kind](num_replicas=ranks, rank=rank)
    steps = 3 * len(SHORT[kind](num_replicas=2, rank=0)) + 1
    long = StatefulLoader(range(2 * steps), num_replicas=ranks, rank=rank)
    return CombinedLoaders({"short": short, "long": long}, **options)


class TestStartingOver:
    @pytest.mark.parametrize("kind", SHORT)
    def test_every_step_of_every_pass_resumes_exactly(self, kind: str) -> None:
        for rank in range(2):
            loaders = beside_a_long_one(kind, 2, rank)
            whole = simulated(loaders, 1)
            assert whole[-1]["short"][0].cycle == 3
            for step in range(len(whole)):
                state = json.loads(json.dumps(loaders.state_at(1, step)))
                fresh = beside_a_long_one(kind, 2, rank)
                assert fresh.load(state, where=WHERE) == (1, step)
                assert fresh.state_at(1, step) == state
                rest = [at(fresh, "short", 1, later) for later in range(step, len(whole))]
                assert [batch for _, batch in rest] == [each["short"][1] for each in whole[step:]]


def carrying(mode: str, num_steps: int, long: int, *, ranks: int = 1, rank: int = 0) -> CombinedLoaders:
    """Sources that go on from one epoch to the next, beside a plain loader."""
    where = {"num_replicas": ranks, "rank": rank}
    sampler = RoundRobinBatchSampler([7, 12, 4], 2, num_steps=num_steps)
    turns = StatefulLoader(range(23), batch_sampler=sampler, **where)
    return CombinedLoaders({"turns": turns, "long": StatefulLoader(range(long), **where)}, mode)


class TestSourcesThatCarryOver:
    def test_they_cannot_start_over_within_an_epoch(self) -> None:
        loaders = carrying("max_size_cycle", 4, 9)
        with pytest.raises(ConfigurationError, match=r"'turns' has 4 steps an epoch, .* has 9; .*num_steps=9"):
            loaders.refuse_short_sources(loaders.num_batches())
        fits = carrying("max_size_cycle", 9, 9)
        fits.refuse_short_sources(fits.num_batches())

        assert at(fits, "turns", 0, 8) is not None

    @pytest.mark.parametrize("step", [4, 8])
    def test_those_that_are_done_before_the_other_stay_done_after_a_resume(self, step: int) -> None:
        whole, resumed = carrying("max_size", 4, 9), carrying("max_size", 4, 9)
        assert resumed.load(whole.state_at(0, step), where=WHERE) == (0, step)

        for epoch, later in ((0, step), (1, 0), (1, 3), (2, 2)):
            assert resumed.state_at(epoch, later) == whole.state_at(epoch, later)
            assert at(resumed, "turns", epoch, later) == at(whole, "turns", epoch, later)

    def test_loaders_that_are_built_anew_go_on_where_those_before_stand(self) -> None:
        first, second, resumed = (carrying("min_size", 4, 9, ranks=ranks) for ranks in (2, 1, 1))
        resumed.load(first.state_at(1, 2), where=WHERE)
        second.continue_from(resumed, 2)
        expected = [at(resumed, "turns", epoch, step) for epoch in (2, 3) for step in range(4)]

        assert [at(second, "turns", epoch, step) for epoch in (2, 3) for step in range(4)] == expected
        # Also when a later epoch was asked for before.
        assert at(second, "turns", 2, 1) == expected[1]

    def test_loaders_that_are_others_begin_anew_with_a_warning(self) -> None:
        first, second = carrying("min_size", 4, 9), carrying("min_size", 5, 9)
        with pytest.warns(StatefulWarning, match="Loader 'turns' is another than before, so it begins anew"):
            second.continue_from(first, 2)

        assert at(second, "turns", 2, 0) == at(carrying("min_size", 5, 9), "turns", 2, 0)


class Run:
    """The indices that a chain of runs served on all ranks, as often as they came, for each loader and pass."""

    def __init__(self, mode: str, lengths: list[int], segments: Any, *, drop_last: bool = False) -> None:
        self.served: dict[tuple[str, int], Counter[int]] = {}
        self.empty_steps: list[int] = []
        state: dict[str, Any] | None = None
        for number, (ranks, batch_sizes, num_steps) in enumerate(segments):
            sizes = named(list(zip(lengths, batch_sizes[: len(lengths)], strict=True)))
            self.ranks = [
                combined(sizes, mode, ranks=ranks, rank=rank, drop_last=drop_last, shuffle=True)
                for rank in range(ranks)
            ]
            assume(all(len(loader) for loader in self.ranks[0].loaders.values()))
            starts = {(2, 0) if state is None else each.load(state, where=WHERE) for each in self.ranks}
            assert len(starts) == 1
            (_, first), last = starts.pop(), self.ranks[0].num_batches()
            end = last if number == len(segments) - 1 else min(first + num_steps, last)
            for step in range(first, end):
                self.step(step)
            states = [each.state_at(2, end) for each in self.ranks]
            assert states == [states[0]] * ranks
            state = states[0]
            if end == last:
                break

    def step(self, step: int) -> None:
        given = 0
        for path in self.ranks[0].loaders:
            found = [at(each, path, 2, step) for each in self.ranks]
            assert len({None if one is None else str(one[0]) for one in found}) == 1
            for one in found:
                if one is not None:
                    self.served.setdefault((path, one[0].cycle), Counter()).update(one[1])
            given += found[0] is not None
        if given < (1 if self.ranks[0].mode == "max_size" else len(self.ranks[0].loaders)):
            self.empty_steps.append(step)

    def passes(self, path: str) -> list[Counter[int]]:
        found = {cycle: served for (name, cycle), served in self.served.items() if name == path}
        assert sorted(found) == list(range(len(found)))
        return [found[cycle] for cycle in sorted(found)]


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(0, 6)),
    min_size=1,
    max_size=4,
)


class TestOnOtherRanks:
    @given(st.sampled_from(MODES), st.lists(st.integers(1, 40), min_size=1, max_size=3), SEGMENTS, st.booleans())
    def test_loaders_serve_every_sample_of_every_pass_once(
        self, mode: str, lengths: list[int], segments: Any, drop_last: bool
    ) -> None:
        run = Run(mode, lengths, segments, drop_last=drop_last)
        if drop_last:
            assert all(count == 1 for served in run.served.values() for count in served.values())
            return
        wholes = []
        for path, length in zip(run.ranks[0].loaders, lengths, strict=True):
            passes = run.passes(path)
            # Only fewer samples than ranks, in the last step of a pass, are given out twice.
            assert all(served.total() - len(served) < 4 for served in passes)
            assert all(set(served) == set(range(length)) for served in passes[:-1])
            assert len(passes) == 1 or (mode == "max_size_cycle" and len(lengths) > 1)
            wholes.append(len(passes) > 1 or set(passes[-1]) == set(range(length)))
        assert any(wholes) if mode == "min_size" else all(wholes)
        assert run.empty_steps == []

    def test_the_step_is_counted_from_the_end_of_the_present_epoch(self) -> None:
        # 12 of 22 samples are left: 4 of the 8 steps of 3 samples.
        loaders = combined({"": (22, 3)})

        assert loaders.load(combined({"": (22, 2)}).state_at(1, 5), where=WHERE) == (1, 4)
        assert consumed(loaders, "", 1, 9)[4:] == [(0, 10), (0, 13), (0, 16), (0, 19), None]

    @pytest.mark.parametrize("sizes", [[(22, 2)], [(6, 2), (22, 2)]])
    @pytest.mark.parametrize("before", [0, 9])
    def test_a_step_before_that_of_resuming_stands_at_the_place_of_resuming(
        self, sizes: list[tuple[int, int]], before: int
    ) -> None:
        # It is asked for where a window of accumulated batches, counted from 0, was open at the step of resuming.
        loaders = combined(named([(length, 1) for length, _ in sizes]))

        assert loaders.load(combined(named(sizes)).state_at(0, 5), where=WHERE) == (0, 10)
        assert loaders.state_at(0, before) == loaders.state_at(0, 10)


def refused(loaders: CombinedLoaders, state: Any, **options: Any) -> list[tuple[str, Any, Any]]:
    """The differences that a state is refused for."""
    with pytest.raises(StateMismatchError, match=f"^{WHERE} does not fit") as caught:
        loaders.load(state, where=WHERE, **options)
    return [(each.path, each.saved, each.present) for each in caught.value.differences]


class TestDifferences:
    def test_a_loader_that_is_accepted_as_new_begins_with_the_epoch_but_one_is_not_several(self) -> None:
        loaders = combined({"a": (4, 2), "b": (10, 2), "c": (6, 2)})
        loaders.load(two().state_at(3, 2), accept=("loaders",), where=WHERE)

        assert loaders.state_at(3, 2)["loaders"]["c"]["progress"] == {"epoch": 3, "cycle": 0, "consumed": 0}
        assert len(refused(two(), combined({"": (10, 2)}).state_at(3, 2), accept=("loaders",))) == 1


def edited(state: dict[str, Any], path: str, **progress: Any) -> dict[str, Any]:
    """A state in which one loader stands elsewhere, as if it had been saved so."""
    changed = copy.deepcopy(state)
    part = changed["loaders"][path]
    part["progress"].update(progress)
    changed["loaders"][path] = sealed(part)
    return sealed(changed)


SAVED = two().state_at(0, 1)
DAMAGED: dict[str, tuple[Any, type[StateError], str]] = {
    "another content": ({**SAVED, "config": {"mode": "min_size"}}, DamagedStateError, "the checksum of its contents"),
    "behind its end": (edited(SAVED, "b", consumed=11), PositionError, "11 samples of epoch 0 were consumed"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_state_that_is_of_no_use_is_refused_and_changes_nothing(damage: str) -> None:
    state, error, message = DAMAGED[damage]
    loaders = two(ranks=2)
    loaders.load(two(ranks=4).state_at(1, 1), where=WHERE)
    before = [loaders.state_at(epoch, step) for epoch in range(3) for step in range(1, 4)]
    with pytest.raises(error, match=f"(?s){WHERE}.*{message}"):
        loaders.load(state, where=WHERE)

    assert [loaders.state_at(epoch, step) for epoch in range(3) for step in range(1, 4)] == before


def test_loaders_that_are_not_dealt_out_hold_what_determines_them_on_every_rank() -> None:
    def make(rank: int, ranks: int, lengths: list[int]) -> CombinedLoaders:
        loaders = [StatefulLoader(range(length), num_replicas=1, rank=0) for length in lengths]
        for number, loader in enumerate(loaders):
            loader.own_rank = number
        all_ranks = [CombinedLoaders({"": loader}) for loader in loaders]
        configs = [each.configs_of_this_rank() for each in all_ranks]
        all_ranks[rank].note_ranks(configs)
        return all_ranks[rank]

    states = [make(rank, 2, [8, 9]).state_at(0, 3) for rank in range(2)]

    assert states[0] == states[1]
    assert states[0]["config"]["dataset"]["length"] == [8, 9]
    assert [path for path, _, _ in refused(make(0, 3, [8, 9, 9]), states[0])] == ["ranks", "dataset.length"]
