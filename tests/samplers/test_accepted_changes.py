"""A changed mixture is refused with the source's name; an accepted change goes on where each source stands."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from lightning_stateful.errors import PositionError, StateMismatchError
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, RoundRobinBatchSampler

Sample = tuple[str, int]
LENGTHS = {"a": 23, "b": 40, "c": 11}


class Ranks:
    """A mixture on several ranks that knows what it has served, by name."""

    def __init__(self, kind: Any, lengths: dict[str, int], ranks: int = 1, **options: Any) -> None:
        self.lengths = lengths
        options = {"batch_size": 2, **options}
        self.samplers = [kind(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]

    def load(self, state: dict[str, Any]) -> Ranks:
        for sampler in self.samplers:
            sampler.load_state_dict(state)
        return self

    def serve(self, count: int | None = None) -> list[Sample]:
        iterators = [iter(sampler) for sampler in self.samplers]
        steps = []
        while len(steps) != count and (step := [next(iterator, None) for iterator in iterators])[0] is not None:
            assert None not in step
            steps.append(step)
        return [self.named(index) for step in steps for batch in step for index in batch or ()]

    def named(self, index: int) -> Sample:
        for name, length in self.lengths.items():
            if index < length:
                return name, index
            index -= length
        raise IndexError(index)

    def state(self) -> dict[str, Any]:
        first, *others = (sampler.state_dict() for sampler in self.samplers)
        assert all(state == first for state in others)
        return json.loads(json.dumps(first))

    def places(self) -> dict[str, int]:
        sources = self.samplers[0].position_report()["sources"]
        return {name: int(counts["samples"]) for name, counts in sources.items()}


def all_of(lengths: dict[str, int]) -> set[Sample]:
    return {(name, index) for name, length in lengths.items() for index in range(length)}


def paths(error: pytest.ExceptionInfo[StateMismatchError]) -> set[str]:
    return {difference.path for difference in error.value.differences}


MIXED: dict[str, Any] = {"weights": {"a": 3, "b": 2, "c": 1}, "seed": 5}
# The lengths and options that are now, and the names that the documentation calls enough.
CHANGES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "other weights": (LENGTHS, {"weights": {"a": 1, "b": 1, "c": 5}, "accept": "weights"}),
    "other batch sizes": (LENGTHS, {"batch_size": {"a": 1, "b": 3, "c": 2}, "accept": "batch_size"}),
    "one source in front": ({"d": 9, **LENGTHS}, {"weights": [1, 2, 3, 4], "accept": ("sources", "weights")}),
    "one source less": ({"a": 23, "c": 11}, {"weights": {"a": 3, "c": 1}, "accept": ("sources", "weights")}),
    "another order": (dict(reversed(LENGTHS.items())), {"weights": [2, 2, 3], "accept": ("sources", "weights")}),
}


class TestAcceptedChanges:
    """Of ``stop="all_exhausted"``: nothing is lost and nothing repeated in the epoch of the change."""

    @pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3)])
    @pytest.mark.parametrize("change", CHANGES)
    def test_each_source_goes_on_at_its_own_place(self, change: str, before: int, after: int) -> None:
        lengths, options = CHANGES[change]
        first = Ranks(MixtureBatchSampler, LENGTHS, before, **MIXED)
        served = first.serve(4)
        second = Ranks(MixtureBatchSampler, lengths, after, **{**MIXED, **options}).load(first.state())
        assert second.places() == {name: first.places().get(name, 0) for name in lengths}
        served += second.serve()

        counts = Counter(sample for sample in served if sample[0] in lengths)
        assert set(counts) == all_of(lengths)
        assert sum(count - 1 for count in counts.values()) < max(after, 2)
        assert after > 1 or set(counts.values()) == {1}

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_second_resume_in_the_same_epoch_is_exact(self, change: str) -> None:
        lengths, options = CHANGES[change][0], {**MIXED, **CHANGES[change][1]}
        first = Ranks(MixtureBatchSampler, LENGTHS, 2, **MIXED)
        first.serve(4)
        state = first.state()
        whole = Ranks(MixtureBatchSampler, lengths, 2, **options).load(state)
        expected = whole.serve() + whole.serve()
        second = Ranks(MixtureBatchSampler, lengths, 2, **options).load(state)
        begun = second.serve(3)
        third = Ranks(MixtureBatchSampler, lengths, 2, **{**options, "accept": ()}).load(second.state())

        assert begun + third.serve() + third.serve() == expected

    @pytest.mark.parametrize("change", CHANGES)
    def test_with_steps_each_source_goes_on_in_its_pass(self, change: str) -> None:
        lengths, options = CHANGES[change][0], {**MIXED, "num_steps": 7}
        first = Ranks(MixtureBatchSampler, LENGTHS, 2, **options)
        served = first.serve() + first.serve(3)
        options |= CHANGES[change][1]
        second = Ranks(MixtureBatchSampler, lengths, 3, **options).load(first.state())
        assert second.places() == {name: first.places().get(name, 0) for name in lengths}
        for _ in range(40):
            served += second.serve()

        for name, length in lengths.items():
            own = [index for source, index in served if source == name]
            passes = [own[start : start + length] for start in range(0, len(own) - length + 1, length)]
            assert len(passes) > 1
            # A step's ranks serve across the end of a pass together, so the step is compared as a whole.
            assert all(count in (len(passes), len(passes) + 1) for count in Counter(own).values())

    @pytest.mark.parametrize(("name", "steps"), [("b", 9), ("c", 20)], ids=["within its pass", "served whole"])
    def test_a_source_that_grew_goes_on_with_the_samples_it_has_not_served(self, name: str, steps: int) -> None:
        first = Ranks(RoundRobinBatchSampler, LENGTHS, shuffle=False)
        served = first.serve(steps)
        longer = {**LENGTHS, name: 50}
        second = Ranks(RoundRobinBatchSampler, longer, shuffle=False, accept=f"sources.{name}").load(first.state())

        assert Counter(served + second.serve()) == Counter(all_of(longer))

    def test_without_the_last_unfinished_source_the_next_epoch_begins(self) -> None:
        first = Ranks(RoundRobinBatchSampler, {"a": 4, "b": 40})
        first.serve(6)
        second = Ranks(RoundRobinBatchSampler, {"a": 4}, accept="sources").load(first.state())

        assert second.samplers[0].epoch == 1
        assert Counter(second.serve()) == Counter(all_of({"a": 4}))

    def test_fewer_steps_than_were_taken_are_refused_and_as_many_end_the_epoch(self) -> None:
        first = Ranks(RoundRobinBatchSampler, LENGTHS, num_steps=10)
        first.serve(8)
        second = Ranks(RoundRobinBatchSampler, LENGTHS, num_steps=8, accept="stop").load(first.state())

        assert (second.samplers[0].epoch, second.places()) == (1, first.places())
        with pytest.raises(PositionError, match="8 steps of epoch 0 were taken, but an epoch has only num_steps=5"):
            Ranks(RoundRobinBatchSampler, LENGTHS, num_steps=5, accept="stop").load(first.state())

    @pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
    def test_a_state_made_after_a_change_loads_where_an_epoch_serves_less_now(self, stop: str) -> None:
        lengths, options = {"a": 1000, "b": 20}, {"weights": [50, 1], "stop": stop, "batch_size": 4}
        first = Ranks(MixtureBatchSampler, lengths, **{**options, "weights": [1, 1], "stop": "cycle"})
        first.serve(100)
        state, accept = first.state(), ("weights", "stop")
        rest = Ranks(MixtureBatchSampler, lengths, accept=accept, **options).load(state).serve()
        changed = Ranks(MixtureBatchSampler, lengths, accept=accept, **options).load(state)
        begun = changed.serve(1)
        again = Ranks(MixtureBatchSampler, lengths, **options).load(changed.state())

        assert begun + again.serve() == rest
        assert len(rest) > len(begun)


@pytest.mark.parametrize("saved", [2, {"a": 2, "b": 3, "c": 2}], ids=["of all", "of its own"])
def test_a_new_source_may_bring_a_batch_size(saved: Any) -> None:
    first = Ranks(RoundRobinBatchSampler, LENGTHS, batch_size=saved)
    first.serve(3)
    sizes = [*(saved.values() if isinstance(saved, dict) else [saved] * 3), 4]
    second = Ranks(RoundRobinBatchSampler, {**LENGTHS, "d": 9}, batch_size=sizes, accept="sources.d")

    assert second.load(first.state()).places() == {**first.places(), "d": 0}


class TestRefusals:
    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            ({"a": 23, "b": 40, "z": 11}, {"sources.c", "sources.z"}),
            ({"a": 23, "b": 41, "c": 11}, {"sources.b"}),
            ({"a": 23, "b": 40}, {"sources.c"}),
            ({"a": 23, "b": 40, "c": 11, "d": 5}, {"sources.d"}),
            ({"b": 40, "a": 23, "c": 11}, {"sources.(order)"}),
        ],
    )
    def test_a_source_that_was_renamed_changed_added_removed_or_moved_is_named(
        self, lengths: dict[str, int], expected: set[str]
    ) -> None:
        state = Ranks(RoundRobinBatchSampler, LENGTHS).state()
        with pytest.raises(StateMismatchError) as caught:
            Ranks(RoundRobinBatchSampler, lengths).load(state)

        assert paths(caught) == expected
        assert all("Pass the saved datasets" in difference.remedy for difference in caught.value.differences)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"temperature": 2}, "weights"),
            ({"weights": None, "schedule": {0: [3, 2, 1]}}, "weights"),
            ({"token_lengths": [[5] * 23, [1] * 40, [1] * 11]}, "weights"),
            ({"by": "sample"}, "by"),
            ({"block": 12}, "weights"),
            ({"batch_size": [2, 2, 3]}, "batch_size"),
            ({"num_steps": 8}, "stop"),
            ({"num_steps": None, "stop": "cycle"}, "stop"),
        ],
        ids=str,
    )
    def test_every_single_other_setting_is_named(self, options: dict[str, Any], expected: str) -> None:
        tokens = [[1] * length for length in LENGTHS.values()]
        base: dict[str, Any] = {"weights": [3, 2, 1], "num_steps": 7, "by": "token", "token_lengths": tokens}
        state = Ranks(MixtureBatchSampler, LENGTHS, **base).state()
        with pytest.raises(StateMismatchError) as caught:
            Ranks(MixtureBatchSampler, LENGTHS, **{**base, **options}).load(state)

        assert expected in {path.split(".")[0] for path in paths(caught)}

    def test_other_steps_an_epoch_of_a_schedule_which_counts_by_them_cannot_be_accepted(self) -> None:
        schedule = {0: [1, 1, 1], 100: [1, 2, 3]}
        saved = Ranks(MixtureBatchSampler, LENGTHS, schedule=schedule, num_steps=7)
        saved.serve(5)
        with pytest.raises(StateMismatchError, match="counts steps by num_steps"):
            Ranks(MixtureBatchSampler, LENGTHS, schedule=schedule, num_steps=40, accept="stop").load(saved.state())


def test_a_state_survives_json_with_sorted_keys() -> None:
    first = Ranks(RoundRobinBatchSampler, {"b": 20, "a": 10}, num_steps=9)
    first.serve(5)
    state = json.loads(json.dumps(first.state(), sort_keys=True))
    options: dict[str, Any] = {"num_steps": 9, "accept": "sources"}
    second = Ranks(RoundRobinBatchSampler, {"b": 20, "a": 10, "c": 5}, **options).load(state)

    assert second.places() == {**first.places(), "c": 0}
