"""Loaders that are served together stand, at every step, where Lightning's own iteration would have got to."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    PositionError,
    StateError,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.index import Position
from lightning_stateful.loaders import StatefulLoader
from lightning_stateful.loaders.group import MODES, LoaderGroup

WHERE = "The state of this test"
SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=3)


class Passes:
    """Stands in for a loader: each ``iter()`` gives its next pass, as pairs of where a batch begins and its indices."""

    def __init__(self, loader: StatefulLoader, epoch: int) -> None:
        self.loader, self.epoch, self.number = loader, epoch, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Position, list[int]]]:
        self.number += 1
        return self.read(self.number - 1)

    def read(self, number: int) -> Iterator[tuple[Position, list[int]]]:
        rule, rank = self.loader.plan.rule, self.loader.plan.rank
        length = len(self.loader.order)
        slot, remaining = number * length, length
        while rule.num_steps(remaining):
            position = Position(epoch=self.epoch, consumed=slot, width=rule.num_replicas)
            indices = self.loader.order.take(slot + rule.share(remaining, rank), self.epoch)
            yield position, indices.tolist()
            slot += rule.step_size(remaining)
            remaining -= rule.step_size(remaining)


def a_group(
    sizes: dict[str, tuple[int, int]], mode: str = "max_size_cycle", *, ranks: int = 1, rank: int = 0, **options: Any
) -> LoaderGroup:
    """Loaders of the given lengths and batch sizes."""
    loaders = {
        path: StatefulLoader(range(length), batch_size=batch_size, num_replicas=ranks, rank=rank, **options)
        for path, (length, batch_size) in sizes.items()
    }
    return LoaderGroup(loaders, mode)


def named(sizes: list[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"loader{number}": size for number, size in enumerate(sizes)} if len(sizes) > 1 else {"": sizes[0]}


def simulate(group: LoaderGroup, epoch: int) -> list[dict[str, Any]]:
    """For every step of an epoch what Lightning gets: each loader's position and indices, or None."""
    combined = CombinedLoader({path: Passes(loader, epoch) for path, loader in group.loaders.items()}, group.mode)
    return [step for step, _, _ in combined]


def batch_at(group: LoaderGroup, path: str, position: Position | None) -> list[int] | None:
    return None if position is None else next(group.loaders[path].plan.indices(position))


def serves_something(group: LoaderGroup) -> bool:
    # A loader without a batch, among others that start over, ends every epoch of Lightning's at once.
    return all(len(loader) for loader in group.loaders.values())


class TestPositions:
    @given(SIZES, st.sampled_from(MODES), st.integers(1, 3), st.booleans(), st.integers(0, 2))
    def test_at_every_step_each_loader_stands_where_lightnings_iteration_gets_to(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, drop_last: bool, epoch: int
    ) -> None:
        for rank in range(ranks):
            group = a_group(named(sizes), mode, ranks=ranks, rank=rank, drop_last=drop_last, shuffle=True)
            assume(serves_something(group))
            for step, expected in enumerate(simulate(group, epoch)):
                for path, item in expected.items():
                    position = group.position(path, epoch, step)
                    assert (position, batch_at(group, path, position)) == (item or (None, None)), (rank, step, path)

    @given(SIZES, st.sampled_from(MODES), st.integers(1, 3), st.booleans())
    def test_an_epoch_has_as_many_steps_as_lightning_makes(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, drop_last: bool
    ) -> None:
        group = a_group(named(sizes), mode, ranks=ranks, drop_last=drop_last)
        assume(serves_something(group))

        assert group.num_batches() == len(simulate(group, 0))

    def test_the_modes_end_an_epoch_differently(self) -> None:
        sizes = {"short": (4, 2), "long": (10, 2)}

        assert [a_group(sizes, mode).num_batches() for mode in ("min_size", "max_size", "max_size_cycle")] == [2, 5, 5]

    def test_a_loader_that_starts_over_goes_on_counting(self) -> None:
        group = a_group({"short": (4, 2), "long": (10, 2)}, "max_size_cycle")
        consumed = [group.position("short", 0, step).consumed for step in range(5)]

        assert consumed == [0, 2, 4, 6, 8]

    def test_a_loader_that_starts_over_leaves_out_the_dropped_tail_of_every_pass(self) -> None:
        group = a_group({"short": (5, 2), "long": (12, 2)}, "max_size_cycle", drop_last=True)
        consumed = [group.position("short", 0, step).consumed for step in range(6)]

        assert consumed == [0, 2, 5, 7, 10, 12]

    @pytest.mark.parametrize("mode", ["min_size", "max_size"])
    def test_an_exhausted_loader_stands_nowhere(self, mode: str) -> None:
        group = a_group({"short": (4, 2), "long": (10, 2)}, mode)

        assert group.position("short", 0, 2) is None
        assert group.position("long", 0, 2) == Position(consumed=4)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_single_loader_never_starts_over(self, mode: str) -> None:
        group = a_group({"": (4, 2)}, mode)

        assert [group.position("", 0, step) for step in (1, 2, 3)] == [Position(consumed=2), None, None]

    def test_an_empty_loader_stands_nowhere(self) -> None:
        group = a_group({"": (0, 2)})

        assert group.num_batches() == 0
        assert group.position("", 0, 0) is None

    def test_a_loader_smaller_than_a_dropped_batch_stands_nowhere(self) -> None:
        assert a_group({"a": (1, 2), "b": (6, 2)}, drop_last=True).position("a", 0, 0) is None

    def test_an_epoch_begins_with_the_present_number_of_ranks(self) -> None:
        assert a_group({"": (9, 2)}, ranks=3, rank=1).position("", 4, 0) == Position(epoch=4, width=3)

    def test_asking_moves_nothing(self) -> None:
        group = a_group({"a": (7, 2), "b": (10, 2)})
        before = [group.position("a", 1, step) for step in range(5)]
        group.position("a", 3, 2)
        group.state_at(2, 4)

        assert [group.position("a", 1, step) for step in range(5)] == before

    def test_other_modes_are_refused_by_name(self) -> None:
        with pytest.raises(ConfigurationError, match=r"modes \('min_size', 'max_size', 'max_size_cycle'\).*'sequen"):
            a_group({"": (4, 2)}, "sequential")


class TestStates:
    def test_one_loaders_state_is_its_envelope(self) -> None:
        assert a_group({"": (10, 2)}, ranks=2, shuffle=True, seed=3).state_at(1, 2) == {
            "version": 1,
            "kind": "shuffled",
            "order_version": 1,
            "config": {"shuffle": True, "seed": 3, "drop_last": False, "dataset": {"length": 10}},
            "progress": {"epoch": 1, "consumed": 8, "width": 2},
        }

    def test_several_loaders_state_is_one_envelope_a_loader(self) -> None:
        state = a_group({"a": (4, 2), "b.0": (10, 3)}, "max_size_cycle").state_at(1, 3)

        assert {key: state[key] for key in ("version", "kind", "config")} == {
            "version": 1,
            "kind": "combined",
            "config": {"mode": "max_size_cycle"},
        }
        assert {path: part["progress"] for path, part in state["loaders"].items()} == {
            "a": {"epoch": 1, "consumed": 6, "width": 1},
            "b.0": {"epoch": 1, "consumed": 9, "width": 1},
        }

    def test_a_single_loader_in_a_list_or_dict_keeps_its_path(self) -> None:
        assert list(a_group({"a": (4, 2)}).state_at(0, 1)["loaders"]) == ["a"]

    def test_a_loaders_envelope_is_what_the_loader_itself_would_save(self) -> None:
        group = a_group({"": (10, 2)}, shuffle=True)
        loader = StatefulLoader(range(10), batch_size=2, shuffle=True)
        iterator = iter(loader)
        next(iterator)
        next(iterator)

        assert group.state_at(0, 2) == loader.state_dict()

    @pytest.mark.parametrize("mode", ["min_size", "max_size"])
    def test_an_exhausted_loader_has_consumed_its_epoch(self, mode: str) -> None:
        state = a_group({"short": (5, 2), "long": (10, 2)}, mode).state_at(1, 4)

        assert state["loaders"]["short"]["progress"] == {"epoch": 1, "consumed": 5, "width": 1}

    @given(SIZES, st.sampled_from(MODES), st.integers(2, 4), st.integers(0, 12))
    def test_the_state_is_equal_on_all_ranks(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, step: int
    ) -> None:
        states = [a_group(named(sizes), mode, ranks=ranks, rank=rank).state_at(2, step) for rank in range(ranks)]

        assert all(state == states[0] for state in states)

    @pytest.mark.parametrize("sizes", [{"": (10, 2)}, {"a": (4, 2), "b": (10, 2)}])
    def test_the_state_is_plain_data(self, sizes: dict[str, tuple[int, int]]) -> None:
        state = a_group(sizes).state_at(3, 2)

        assert json.loads(json.dumps(state)) == state

    @pytest.mark.parametrize("sizes", [{"": (10, 2)}, {"a": (4, 2), "b": (10, 2)}])
    def test_every_state_is_a_fresh_copy(self, sizes: dict[str, tuple[int, int]]) -> None:
        group = a_group(sizes)
        state = group.state_at(0, 2)
        kept = copy.deepcopy(state)
        part = state["loaders"]["b"] if "loaders" in state else state
        part["config"]["dataset"]["length"] = part["progress"]["consumed"] = 99

        assert group.state_at(0, 2) == kept

    @pytest.mark.parametrize("mode", MODES)
    def test_the_keys_are_the_same_at_every_step(self, mode: str) -> None:
        group = a_group({"a": (4, 2), "b": (10, 2)}, mode)
        shapes = {
            json.dumps({path: sorted(part["progress"]) for path, part in group.state_at(0, step)["loaders"].items()})
            for step in range(6)
        }

        assert len(shapes) == 1


class TestLoading:
    @given(SIZES, st.sampled_from(MODES), st.integers(1, 3), st.booleans(), st.integers(0, 2))
    def test_on_the_same_ranks_and_batch_sizes_every_state_goes_on_at_its_own_step(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, drop_last: bool, epoch: int
    ) -> None:
        saving = a_group(named(sizes), mode, ranks=ranks, drop_last=drop_last, shuffle=True)
        assume(serves_something(saving))
        for step in range(saving.num_batches()):
            fresh = a_group(named(sizes), mode, ranks=ranks, drop_last=drop_last, shuffle=True)
            assert fresh.load(saving.state_at(epoch, step), where=WHERE) == (epoch, step)
            for path in saving.loaders:
                for when in [*((epoch, later) for later in range(step, saving.num_batches())), (epoch + 1, 1)]:
                    assert fresh.position(path, *when) == saving.position(path, *when), (step, path, when)

    @given(SIZES, st.sampled_from(MODES), st.integers(1, 3), st.booleans())
    def test_a_loaded_group_gives_back_the_state_it_got(
        self, sizes: list[tuple[int, int]], mode: str, ranks: int, drop_last: bool
    ) -> None:
        saving = a_group(named(sizes), mode, ranks=ranks, drop_last=drop_last)
        assume(serves_something(saving))
        for step in range(saving.num_batches()):
            state = saving.state_at(1, step)
            fresh = a_group(named(sizes), mode, ranks=ranks, drop_last=drop_last)
            assert fresh.state_at(*fresh.load(state, where=WHERE)) == state

    def test_after_the_last_step_a_single_loader_goes_on_with_the_next_epoch(self) -> None:
        group = a_group({"": (9, 2)})

        assert group.load(group.state_at(1, 5), where=WHERE) == (2, 0)

    @pytest.mark.parametrize("mode", MODES)
    def test_after_the_last_step_several_loaders_have_no_step_left(self, mode: str) -> None:
        saving = a_group({"a": (4, 2), "b": (9, 2)}, mode)
        fresh = a_group({"a": (4, 2), "b": (9, 2)}, mode)

        assert fresh.load(saving.state_at(1, saving.num_batches()), where=WHERE) == (1, saving.num_batches())

    def test_an_empty_loader_goes_on_with_nothing(self) -> None:
        group = a_group({"": (0, 2)})

        assert group.load(group.state_at(0, 0), where=WHERE) == (0, 0)

    def test_loading_leaves_its_argument_as_it_was(self) -> None:
        group = a_group({"a": (4, 2), "b": (10, 2)})
        state = group.state_at(1, 3)
        kept = copy.deepcopy(state)
        group.load(state, where=WHERE)
        state["loaders"]["b"]["progress"]["consumed"] = 0

        assert group.state_at(1, 3) == kept

    def test_a_state_that_went_through_json_is_loaded_too(self) -> None:
        group = a_group({"a": (4, 2), "b": (10, 2)})

        assert group.load(json.loads(json.dumps(group.state_at(1, 3))), where=WHERE) == (1, 3)

    def test_loading_again_forgets_what_was_loaded_before(self) -> None:
        group = a_group({"": (20, 2)})
        group.load(a_group({"": (20, 3)}).state_at(2, 3), where=WHERE)
        group.load(a_group({"": (20, 2)}).state_at(5, 4), where=WHERE)

        assert group.position("", 5, 6) == Position(epoch=5, consumed=12)
        assert group.position("", 2, 1) == Position(epoch=2, consumed=2)

    def test_epochs_after_the_resumed_one_are_whole(self) -> None:
        group = a_group({"": (20, 3)}, ranks=2)
        group.load(a_group({"": (20, 2)}).state_at(2, 5), where=WHERE)

        assert group.num_batches() == 4
        assert [group.position("", 3, step).consumed for step in range(4)] == [0, 6, 12, 18]


class Run:
    """What a chain of runs on all their ranks served: for each loader and pass the indices, as often as they came."""

    def __init__(self, mode: str, lengths: list[int], *, drop_last: bool = False, epoch: int = 2) -> None:
        self.mode, self.lengths, self.drop_last, self.epoch = mode, lengths, drop_last, epoch
        self.served: dict[tuple[str, int], Counter[int]] = {}
        self.empty_steps: list[int] = []
        self.state: dict[str, Any] | None = None
        self.groups: list[LoaderGroup] = []
        self.num_left = -1

    def play(self, ranks: int, batch_sizes: list[int], num_steps: int | None) -> None:
        """Go on where the last run stopped, for some steps or to the end of the epoch."""
        sizes = named(list(zip(self.lengths, batch_sizes, strict=True)))
        options = {"ranks": ranks, "drop_last": self.drop_last}
        self.groups = [a_group(sizes, self.mode, rank=rank, **options) for rank in range(ranks)]
        starts = {
            (self.epoch, 0) if self.state is None else group.load(self.state, where=WHERE) for group in self.groups
        }
        assert len(starts) == 1
        ((epoch, first),) = starts
        assert epoch == self.epoch
        last = self.groups[0].num_batches()
        end = last if num_steps is None else min(first + num_steps, last)
        for step in range(first, end):
            self.step(step)
        states = [group.state_at(epoch, end) for group in self.groups]
        assert all(state == states[0] for state in states)
        self.state, self.num_left = states[0], last - end

    def step(self, step: int) -> None:
        given = 0
        for path in self.groups[0].loaders:
            positions = {group.position(path, self.epoch, step) for group in self.groups}
            assert len(positions) == 1
            (position,) = positions
            if position is None:
                continue
            given += 1
            number = position.consumed // len(self.groups[0].loaders[path].order)
            batches = [batch_at(group, path, position) for group in self.groups]
            self.served.setdefault((path, number), Counter()).update(index for batch in batches for index in batch)
        whole = len(self.groups[0].loaders) if self.mode != "max_size" else 1
        if given < whole:
            self.empty_steps.append(step)


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(0, 6)),
    min_size=1,
    max_size=4,
)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def a_run(mode: str, lengths: list[int], segments: Any, *, drop_last: bool = False) -> Run:
    """Play the segments, the last one to the end of the epoch."""
    run = Run(mode, lengths, drop_last=drop_last)
    for number, (ranks, batch_sizes, num_steps) in enumerate(segments):
        run.play(ranks, batch_sizes[: len(lengths)], num_steps if number < len(segments) - 1 else None)
        assume(serves_something(run.groups[0]))
        if not run.num_left:
            break
    return run


class TestElasticLoading:
    @given(st.integers(1, 60), SEGMENTS)
    def test_a_loaders_samples_come_once_each_whatever_the_ranks_and_batch_sizes(
        self, length: int, segments: Any
    ) -> None:
        run = a_run("max_size_cycle", [length], segments)
        served = run.served["", 0]

        assert set(served) == set(range(length))
        # Only fewer samples than ranks, in the last step, are given out twice.
        assert served.total() - length < len(run.groups)

    @given(st.integers(1, 60), SEGMENTS)
    def test_repeated_samples_are_those_that_the_rule_counts(self, length: int, segments: Any) -> None:
        run = Run("max_size", [length])
        for number, (ranks, batch_sizes, num_steps) in enumerate(segments):
            before = 0 if run.state is None else run.state["progress"]["consumed"]
            run.play(ranks, batch_sizes[:1], num_steps if number < len(segments) - 1 else None)
            if not run.num_left:
                break
        rule = run.groups[0].loaders[""].plan.rule

        assert run.served["", 0].total() == length + rule.num_repeated(length - before)

    @given(st.integers(1, 60), SEGMENTS)
    def test_dropping_the_last_step_drops_less_than_a_step_and_repeats_nothing(
        self, length: int, segments: Any
    ) -> None:
        run = Run("max_size", [length], drop_last=True)
        for number, (ranks, batch_sizes, num_steps) in enumerate(segments):
            run.play(ranks, batch_sizes[:1], num_steps if number < len(segments) - 1 else None)
            if not run.num_left:
                break
        served = run.served.get(("", 0), Counter())

        assert all(count == 1 for count in served.values())
        assert set(served) == set(range(len(served)))
        assert length - len(served) < run.groups[0].loaders[""].plan.rule.full

    @given(LENGTHS, SEGMENTS)
    def test_the_longest_loader_ends_the_epoch_when_all_have_been_served(
        self, lengths: list[int], segments: Any
    ) -> None:
        run = a_run("max_size", lengths, segments)

        for path, length in zip(run.groups[0].loaders, lengths, strict=True):
            assert set(run.served[path, 0]) == set(range(length))
            assert run.served[path, 0].total() - length < 4
        assert {number for _, number in run.served} == {0}
        assert run.empty_steps == []

    @given(LENGTHS, SEGMENTS)
    def test_loaders_that_start_over_serve_every_pass_but_the_last_whole(
        self, lengths: list[int], segments: Any
    ) -> None:
        run = a_run("max_size_cycle", lengths, segments)

        for path, length in zip(run.groups[0].loaders, lengths, strict=True):
            passes = [served for (name, _), served in sorted(run.served.items()) if name == path]
            assert sorted(number for name, number in run.served if name == path) == list(range(len(passes)))
            for served in passes if len(passes) == 1 else passes[:-1]:
                assert set(served) == set(range(length))
                assert served.total() - length < 4
            assert set(passes[-1]) == set(range(len(passes[-1])))
        assert run.empty_steps == []

    @given(LENGTHS, SEGMENTS)
    def test_the_shortest_loader_ends_the_epoch_when_it_has_been_served(
        self, lengths: list[int], segments: Any
    ) -> None:
        run = a_run("min_size", lengths, segments)
        counts = [run.served[path, 0] for path in run.groups[0].loaders]

        assert any(set(served) == set(range(length)) for served, length in zip(counts, lengths, strict=True))
        assert all(set(served) == set(range(len(served))) for served in counts)
        assert all(served.total() - len(served) < 4 for served in counts)
        assert run.empty_steps == []

    @given(LENGTHS, SEGMENTS, st.sampled_from(MODES))
    def test_with_the_last_step_dropped_no_pass_repeats_a_sample(
        self, lengths: list[int], segments: Any, mode: str
    ) -> None:
        run = a_run(mode, lengths, segments, drop_last=True)

        for served in run.served.values():
            assert all(count == 1 for count in served.values())
            assert set(served) == set(range(len(served)))

    def test_the_step_is_counted_from_the_end_of_the_present_epoch(self) -> None:
        # 12 of 22 samples are left: 4 of the 8 steps of 3 samples.
        group = a_group({"": (22, 3)})

        assert group.load(a_group({"": (22, 2)}).state_at(1, 5), where=WHERE) == (1, 4)
        assert [group.position("", 1, step).consumed for step in range(4, 8)] == [10, 13, 16, 19]
        assert group.position("", 1, 8) is None

    def test_nothing_is_left_where_the_rest_is_dropped(self) -> None:
        group = a_group({"": (22, 5)}, drop_last=True)

        assert group.load(a_group({"": (22, 2)}, drop_last=True).state_at(1, 10), where=WHERE) == (1, 4)

    def test_the_width_stays_until_the_epoch_ends(self) -> None:
        group = a_group({"": (24, 2)}, ranks=2)
        group.load(a_group({"": (24, 2)}, ranks=4).state_at(1, 1), where=WHERE)

        assert group.position("", 1, group.num_batches() - 1).width == 4
        assert group.position("", 2, 0).width == 2

    def test_the_width_of_an_exhausted_loader_stays_too(self) -> None:
        sizes = {"short": (8, 2), "long": (24, 2)}
        group = a_group(sizes, "max_size", ranks=2)
        group.load(a_group(sizes, "max_size", ranks=4).state_at(1, 2), where=WHERE)

        assert group.state_at(1, group.num_batches() - 1)["loaders"]["short"]["progress"] == {
            "epoch": 1,
            "consumed": 8,
            "width": 4,
        }

    @pytest.mark.parametrize("before", [0, 9])
    def test_a_step_before_that_of_resuming_stands_at_the_place_of_resuming(self, before: int) -> None:
        # It is asked for where a window of accumulated batches, counted from 0, was open at the step of resuming.
        group = a_group({"": (22, 1)})

        assert group.load(a_group({"": (22, 2)}).state_at(0, 5), where=WHERE) == (0, 10)
        assert group.state_at(0, before) == group.state_at(0, 10)

    def test_a_step_before_that_of_resuming_is_no_later_pass_of_several_loaders(self) -> None:
        group = a_group({"a": (6, 1), "b": (22, 1)})

        assert group.load(a_group({"a": (6, 2), "b": (22, 2)}).state_at(0, 5), where=WHERE) == (0, 10)
        assert group.state_at(0, 8) == group.state_at(0, 10)


def two(mode: str = "max_size_cycle", **options: Any) -> LoaderGroup:
    return a_group({"a": (4, 2), "b": (10, 2)}, mode, **options)


def refused(group: LoaderGroup, state: Any, **options: Any) -> list[tuple[str, Any, Any]]:
    """The differences that a state is refused for."""
    with pytest.raises(StateMismatchError, match=f"^{WHERE} does not fit") as caught:
        group.load(state, where=WHERE, **options)
    return [(each.path, each.saved, each.present) for each in caught.value.differences]


def edited(state: dict[str, Any], path: str, **position: Any) -> dict[str, Any]:
    """A state in which one loader stands elsewhere."""
    changed = copy.deepcopy(state)
    changed["loaders"][path]["progress"].update(position)
    return changed


class TestDifferences:
    @pytest.mark.parametrize("saved", MODES)
    @pytest.mark.parametrize("present", MODES)
    def test_another_mode_is_refused(self, saved: str, present: str) -> None:
        if saved == present:
            assert two(present).load(two(saved).state_at(0, 1), where=WHERE) == (0, 1)
        else:
            assert refused(two(present), two(saved).state_at(0, 1)) == [("mode", saved, present)]

    def test_a_missing_loader_is_refused(self) -> None:
        state = a_group({"a": (4, 2), "b": (10, 2), "c": (6, 2)}).state_at(0, 1)

        assert refused(two(), state) == [("loaders", ["a", "b", "c"], ["a", "b"])]

    def test_an_added_loader_is_refused(self) -> None:
        group = a_group({"a": (4, 2), "b": (10, 2), "c": (6, 2)})

        assert refused(group, two().state_at(0, 1)) == [("loaders", ["a", "b"], ["a", "b", "c"])]

    def test_a_renamed_loader_is_refused(self) -> None:
        group = a_group({"a": (4, 2), "c": (10, 2)})

        assert refused(group, two().state_at(0, 1)) == [("loaders", ["a", "b"], ["a", "c"])]

    def test_one_loader_in_place_of_several_is_refused(self) -> None:
        assert refused(a_group({"": (10, 2)}), two().state_at(0, 1)) == [("loaders", ["a", "b"], "one loader")]

    def test_several_loaders_in_place_of_one_are_refused(self) -> None:
        assert refused(two(), a_group({"": (10, 2)}).state_at(0, 1)) == [("loaders", "one loader", ["a", "b"])]

    def test_a_loaders_difference_is_named_by_its_path(self) -> None:
        group = a_group({"a": (4, 2), "b": (12, 2)})

        assert refused(group, two().state_at(0, 1)) == [("b.dataset.length", 10, 12)]

    def test_all_differences_are_reported_at_once(self) -> None:
        group = a_group({"a": (5, 2), "c": (10, 2)}, "min_size", drop_last=True)

        assert [path for path, _, _ in refused(group, two().state_at(0, 1))] == [
            "mode",
            "loaders",
            "a.drop_last",
            "a.dataset.length",
        ]

    def test_ranks_and_batch_sizes_are_no_difference(self) -> None:
        group = a_group({"a": (4, 1), "b": (10, 5)}, ranks=2, rank=1)

        assert group.load(two().state_at(3, 1), where=WHERE)[0] == 3


class TestAccepting:
    def test_a_difference_of_all_loaders_is_accepted_by_its_name(self) -> None:
        group = a_group({"a": (6, 2), "b": (12, 2)})

        assert group.load(two().state_at(1, 2), accept=("dataset.length",), where=WHERE) == (1, 2)

    def test_a_difference_of_one_loader_is_accepted_by_its_full_path(self) -> None:
        group = a_group({"a": (6, 2), "b": (12, 2)})

        assert refused(group, two().state_at(1, 2), accept=("b.dataset.length",)) == [("a.dataset.length", 4, 6)]

    def test_what_a_loader_accepts_is_accepted(self) -> None:
        group = a_group({"": (12, 2)}, accept=("dataset",))

        assert group.load(a_group({"": (10, 2)}).state_at(1, 2), where=WHERE) == (1, 2)

    def test_what_a_loader_accepts_among_others_is_accepted(self) -> None:
        group = a_group({"a": (4, 2), "b": (12, 2)}, accept=("dataset",))

        assert group.load(two().state_at(1, 2), where=WHERE)[0] == 1
        assert group.position("b", 1, group.num_batches() - 4).consumed == 4

    def test_an_accepted_mode_goes_on_in_the_present_one(self) -> None:
        group = two("max_size")

        assert group.load(two("max_size_cycle").state_at(1, 1), accept=("mode",), where=WHERE) == (1, 1)
        assert group.position("a", 1, 2) is None

    def test_an_accepted_mode_does_not_excuse_a_loader_that_has_started_over(self) -> None:
        with pytest.raises(PositionError, match=r"loader 'a', has consumed 6 samples of an epoch that has only 4"):
            two("max_size").load(two("max_size_cycle").state_at(1, 3), accept=("mode",), where=WHERE)

    def test_an_accepted_new_loader_begins_with_the_epoch(self) -> None:
        group = a_group({"a": (4, 2), "b": (10, 2), "c": (4, 2)})

        assert group.load(two().state_at(1, 2), accept=("loaders",), where=WHERE) == (1, 2)
        assert group.position("c", 1, 2) == Position(epoch=1)
        assert group.position("b", 1, 2) == Position(epoch=1, consumed=4)

    def test_an_accepted_loss_of_a_loader_leaves_the_others_where_they_were(self) -> None:
        group = a_group({"b": (10, 2)})

        assert group.load(two().state_at(1, 2), accept=("loaders",), where=WHERE) == (1, 2)
        assert group.position("b", 1, 2) == Position(epoch=1, consumed=4)

    @pytest.mark.parametrize("names", [["c", "d"], ["0", "1"]])
    def test_when_all_loaders_are_accepted_as_new_they_begin_with_the_states_epoch(self, names: list[str]) -> None:
        group = a_group(dict.fromkeys(names, (10, 2)))

        assert group.load(two().state_at(3, 2), accept=("loaders",), where=WHERE) == (3, 0)

    def test_a_damaged_position_is_refused_by_the_states_name_although_its_loader_is_gone(self) -> None:
        group = a_group({"c": (10, 2), "d": (10, 2)})
        state = edited(edited(two().state_at(0, 1), "a", consumed=-2), "b", consumed="two")
        with pytest.raises(StateError, match=WHERE):
            group.load(state, accept=("loaders",), where=WHERE)

    @pytest.mark.parametrize(
        ("saved", "present"), [({"": (10, 2)}, {"a": (10, 2), "b": (4, 2)}), ({"a": (10, 2)}, {"": (10, 2)})]
    )
    def test_one_loader_and_several_are_no_difference_to_accept(self, saved: Any, present: Any) -> None:
        assert len(refused(a_group(present), a_group(saved).state_at(3, 2), accept=("loaders",))) == 1

    def test_one_name_is_accepted_without_a_tuple_around_it(self) -> None:
        group = a_group({"a": (6, 2), "b": (12, 2)})

        assert group.load(two().state_at(1, 2), accept="dataset.length", where=WHERE) == (1, 2)

    def test_what_is_not_accepted_is_still_refused(self) -> None:
        group = a_group({"a": (4, 2), "b": (12, 2)}, drop_last=True)

        assert [path for path, _, _ in refused(group, two().state_at(0, 1), accept=("dataset",))] == [
            "a.drop_last",
            "b.drop_last",
        ]


WITHOUT_POSITION = {key: value for key, value in two().state_at(0, 1)["loaders"]["a"].items() if key != "progress"}
DAMAGED: dict[str, Any] = {
    "no dict": (None, DamagedStateError),
    "no version": ({"kind": "combined", "config": {}, "loaders": {}}, DamagedStateError),
    "a future version": ({**two().state_at(0, 1), "version": 2}, StateVersionError),
    "loaders that are no dict": ({**two().state_at(0, 1), "loaders": []}, DamagedStateError),
    "no loaders": ({key: two().state_at(0, 1)[key] for key in ("version", "kind", "config")}, DamagedStateError),
    "a loader without a position": (
        {**two().state_at(0, 1), "loaders": {**two().state_at(0, 1)["loaders"], "a": WITHOUT_POSITION}},
        DamagedStateError,
    ),
    "a loader that holds loaders": (
        {**two().state_at(0, 1), "loaders": {**two().state_at(0, 1)["loaders"], "a": two().state_at(0, 1)}},
        StateError,
    ),
    "a position in words": (edited(two().state_at(0, 1), "b", consumed="two"), DamagedStateError),
    "a position before the epoch": (edited(two().state_at(0, 1), "b", consumed=-2), PositionError),
    "a position without a width": (edited(two().state_at(0, 1), "b", width=0), PositionError),
    "an epoch of its own": (edited(two().state_at(0, 1), "b", epoch=1), DamagedStateError),
    "another mode": (two("max_size").state_at(0, 1), StateMismatchError),
    "another loader": (a_group({"a": (4, 2), "c": (10, 2)}).state_at(0, 1), StateMismatchError),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGED)
    def test_a_damaged_state_is_refused(self, damage: str) -> None:
        state, error = DAMAGED[damage]
        with pytest.raises(error, match=WHERE):
            two().load(state, where=WHERE)

    @pytest.mark.parametrize("damage", DAMAGED)
    def test_a_refused_state_changes_nothing(self, damage: str) -> None:
        group = two(ranks=2)
        group.load(two(ranks=4).state_at(1, 1), where=WHERE)
        before = [group.state_at(epoch, step) for epoch in range(3) for step in range(1, 4)]
        with pytest.raises(StateError):
            group.load(DAMAGED[damage][0], where=WHERE)

        assert [group.state_at(epoch, step) for epoch in range(3) for step in range(1, 4)] == before

    def test_loaders_in_several_epochs_are_refused_with_the_epochs(self) -> None:
        with pytest.raises(DamagedStateError, match=r"has loaders in the epochs \[0, 4\]"):
            two().load(edited(two().state_at(0, 1), "b", epoch=4), where=WHERE)

    @pytest.mark.parametrize("mode", ["min_size", "max_size"])
    def test_a_loader_past_its_end_is_refused_where_loaders_do_not_start_over(self, mode: str) -> None:
        state = edited(two(mode).state_at(0, 1), "b", consumed=11)
        with pytest.raises(PositionError, match="loader 'b', has consumed 11 samples of an epoch that has only 10"):
            two(mode).load(state, where=WHERE)

    def test_a_single_loader_past_its_end_is_refused(self) -> None:
        group = a_group({"": (10, 2)})
        state = group.state_at(0, 1)
        state["progress"]["consumed"] = 11
        with pytest.raises(PositionError, match="has consumed 11 samples of epoch 0, but an epoch has only 10"):
            group.load(state, where=WHERE)

    def test_a_state_of_a_longer_dataset_is_refused_although_its_length_is_accepted(self) -> None:
        state = a_group({"": (20, 2)}).state_at(0, 8)
        with pytest.raises(PositionError, match="has consumed 16 samples"):
            a_group({"": (10, 2)}).load(state, accept=("dataset.length",), where=WHERE)
