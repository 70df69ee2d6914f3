"""Shards are read one after the other, from any state, whatever state a shard's own node has."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
from support.node_cases import ListNode, NumberedShards, assert_resumes, drawn, started
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Mapper, MultiNodeWeightedSampler

from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError, ShardError, StateError
from lightning_stateful.stream_nodes import shard_reader as module
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import ShardReader

SIZES = [3, 0, 5, 1, 0, 4]
ORDER = (4, 2, 5, 0, 1, 3)


@pytest.fixture
def _states_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_GAP", 1)


def reader(sizes: Any = SIZES, numbers: Any = ORDER, epoch: int = 0, **options: Any) -> ShardReader:
    own = {name: options.pop(name) for name in ("seed", "seeds_samples", "on_error") if name in options}
    return ShardReader(NumberedShards(sizes, **options), numbers, epoch, **own)


def numbered(sizes: Any = SIZES, numbers: Any = ORDER, epoch: int = 0) -> list[tuple[int, int, int]]:
    return [(epoch, shard, number) for shard in numbers for number in range(sizes[shard])]


@pytest.mark.usefixtures("_states_at_every_sample")
@pytest.mark.parametrize(("state_size", "seed"), [(None, 5), (0, None), (40, 5)])
def test_it_resumes_at_every_sample(state_size: int | None, seed: int | None) -> None:
    for sizes, numbers in ((SIZES, ORDER), ([90, 2, 25], (2, 0)), ([0, 0], (1, 0)), ([1], ()), ([1], (0,))):
        samples = assert_resumes(
            lambda s=sizes, n=numbers: reader(s, n, state_size=state_size, seed=seed, draws=seed is not None)
        )
        assert [sample[:3] for sample in samples] == numbered(sizes, numbers)


class TestStates:
    def test_a_state_is_taken_only_when_it_is_worth_its_size(self) -> None:
        for padding in (0, 50, 500, 20_000):
            node = started(reader([4000], (0,), state_size=padding))
            characters, before, most = 0, None, 0
            for _ in range(4000):
                next(node)
                state = node.state_dict()
                characters += len(json.dumps(state["state"])) if state["state"] != before else 0
                before, most = state["state"], max(most, state["since"])
            # What is written is bounded, and what has to be read again.
            assert characters <= 16 * 4000 + padding + 30
            assert most <= 256 + (padding + 30) // 16

    @pytest.mark.usefixtures("_states_at_every_sample")
    @pytest.mark.parametrize(("state_size", "again"), [(0, 0), (None, 7)])
    def test_without_a_state_of_its_node_only_the_shard_is_read_again(self, state_size: int | None, again: int) -> None:
        asked: Counter[str] = Counter()
        node = started(reader([9, 9, 9], (2, 0, 1), state_size=state_size))
        node.skip(16)
        rest = started(reader([9, 9, 9], (2, 0, 1), state_size=state_size, asked=asked), node.state_dict())
        assert not asked
        assert list(rest) == numbered([9, 9, 9], (2, 0, 1))[16:]
        assert (asked["opened"], asked["read"]) == (2, 11 + again)

    @pytest.mark.usefixtures("_states_at_every_sample")
    def test_a_node_may_go_on_counting_in_its_state(self) -> None:
        class Counting(ListNode):
            def reset(self, initial_state: Any = None) -> None:
                self.counts = {"next": 0} if initial_state is None else initial_state
                super().reset(self.counts)

            def next(self) -> Any:
                item = super().next()
                self.counts["next"] = self.at
                return item

            def get_state(self) -> Any:
                return self.counts

        class Counted(NumberedShards):
            def node(self, shard: int, epoch: int) -> BaseNode[Any]:
                return Counting(range(10))

        assert_resumes(lambda: ShardReader(Counted([10]), (0,), 0))


@pytest.mark.usefixtures("_states_at_every_sample")
@pytest.mark.parametrize(
    "over",
    [
        lambda node: BlockShuffle(node, 4, seed=1),
        lambda node: Mapper(Batcher(node, 2), str),
        lambda node: MultiNodeWeightedSampler({"one": node}, {"one": 1.0}, "ALL_DATASETS_EXHAUSTED"),
    ],
    ids=["shuffle", "of torchdata", "several"],
)
def test_a_graph_over_a_node_without_a_state_is_read_again(over: Any) -> None:
    class Graphs(NumberedShards):
        def node(self, shard: int, epoch: int) -> BaseNode[Any]:
            return over(super().node(shard, epoch))

    assert_resumes(lambda: ShardReader(Graphs([9, 5], state_size=None), (1, 0), 0))


class TestShorterShards:
    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    def test_a_shard_that_became_shorter_is_named_and_closed(self, on_error: Any) -> None:
        node = started(reader([9, 9], (1, 0), on_error=on_error))
        node.skip(7)
        shorter = started(reader([9, 5], (1, 0), on_error=on_error), node.state_dict())
        with pytest.raises(PositionError, match=r"7 samples of shard-1\.bin were used, .* ends after 5"):
            next(shorter)


class TestSeeds:
    def test_what_a_sample_draws_follows_from_seed_epoch_shard_and_sample(self) -> None:
        def read(numbers: Any = (4, 2, 0), **options: Any) -> dict[Any, Any]:
            return {sample[:3]: sample[3:] for sample in reader([3, 0, 90, 1, 5], numbers, draws=True, **options)}

        whole = read(seed=3)
        random.seed(77)
        assert read((0, 4, 2), seed=3) == whole
        others = [*whole.values(), *read(seed=4).values(), *read(seed=3, epoch=1).values()]
        assert all(len({numbers[which] for numbers in others}) == 3 * 98 for which in range(3))

    def test_a_generator_that_draws_is_read_again_with_the_same_draws(self) -> None:
        class Drawing(NumberedShards):
            def node(self, shard: int, epoch: int) -> BaseNode[Any]:
                return Generated()

        assert_resumes(lambda: ShardReader(Drawing([70], draws=True), (0,), 0, seed=3))


class Generated(BaseNode[Any]):
    """A node without state over numbers that leave a buffer at random."""

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self.iterator = self.buffered()

    def buffered(self) -> Iterator[int]:
        buffer = deque(range(5))
        for number in range(5, 70):
            buffer.append(number)
            buffer.rotate(drawn()[0] % 5)
            yield buffer.popleft()

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def next(self) -> Any:
        raise AssertionError("the reader takes what iter() gives")

    def get_state(self) -> Any:
        return None


class TestErrors:
    @pytest.mark.usefixtures("_states_at_every_sample")
    @pytest.mark.parametrize(("state_size", "number"), [(None, 1), (0, 100)])
    def test_an_error_names_the_shard_and_the_sample(self, state_size: int | None, number: int) -> None:
        node = started(reader([3, 6], (0, 1), fails={1: 4}, state_size=state_size))
        assert len(node.next_many(7)) == 7
        state = node.state_dict()
        said = r"shard-1\.bin could not be read at its sample 4: OSError: bad block 4\..*on_error=\"skip\""
        with pytest.raises(ShardError, match=said) as caught:
            node.next_many(number)
        assert isinstance(caught.value.__cause__, OSError)
        mended = reader([3, 6], (0, 1), state_size=state_size)
        assert list(started(mended, state)) == [(0, 1, 4), (0, 1, 5)]

    @pytest.mark.usefixtures("_states_at_every_sample")
    @pytest.mark.parametrize(("state_size", "draws"), [(None, True), (0, False)])
    def test_skipping_keeps_what_came_before_and_counts_the_shard(self, state_size: int | None, draws: bool) -> None:
        options: dict[str, Any] = {"fails": {2: 3, 5: -1, 0: 0}, "on_error": "skip", "state_size": state_size}
        samples = assert_resumes(lambda: reader(draws=draws, seed=1, **options))
        assert [sample[1:3] for sample in samples] == [(2, 0), (2, 1), (2, 2), (3, 0)]
        node, counted = started(reader(draws=draws, seed=1, **options)), []
        for _ in samples:
            next(node)
            # Wherever it is resumed, the count goes on.
            node = started(reader(draws=draws, seed=1, **options), node.state_dict())
            counted.append(node.state_dict()["skipped_shards"])
        assert counted == [0, 0, 0, 3]

    @pytest.mark.parametrize(
        ("error", "seen"),
        [
            # As next() raises on the header of an empty file, which is no empty shard.
            (StopIteration(), ShardError),
            (FileNotFoundError("no such file"), ShardError),
            # No bad shards, and so not to be left out.
            (ConfigurationError("it gave no node"), ConfigurationError),
            (DamagedStateError("the state is of another epoch"), DamagedStateError),
            (KeyboardInterrupt("stopped"), KeyboardInterrupt),
        ],
        ids=repr,
    )
    def test_errors_while_a_shard_is_opened(self, error: BaseException, seen: type[BaseException]) -> None:
        class Breaking(NumberedShards):
            def node(self, shard: int, epoch: int) -> BaseNode[Any]:
                raise error

        on_error: Any = "raise" if seen is ShardError else "skip"
        with pytest.raises(seen, match=type(error).__name__ if seen is ShardError else str(error)):
            next(ShardReader(Breaking([3]), (0,), 0, on_error=on_error))

    @pytest.mark.parametrize("state", [object(), {"at": object()}, KeyError("at")])
    def test_a_state_that_cannot_be_kept_is_told_with_the_shard(self, state: Any) -> None:
        class Stateful(IterableWrapper[int]):
            def get_state(self) -> Any:
                if isinstance(state, Exception):
                    raise state
                return state

        class Listed(NumberedShards):
            def node(self, shard: int, epoch: int) -> BaseNode[Any]:
                return Stateful(range(9999))

        node = started(ShardReader(Listed([1]), (0,), 0, on_error="skip"))
        node.skip(300)
        with pytest.raises(StateError, match=r"get_state\(\) of .*Stateful gave, for shard-0\.bin, at its sample 300"):
            node.state_dict()


class TestFiles:
    def test_each_shard_is_closed_before_the_next_is_opened_and_at_a_reset(self) -> None:
        class Exclusive(NumberedShards):
            def node(self, shard: int, epoch: int) -> BaseNode[Any]:
                assert self.asked["closed"] == self.asked["opened"]
                made = super().node(shard, epoch)
                # It is closed with what it reads from.
                made.source = ListNode((), self.asked)  # type: ignore[attr-defined]
                return made

        for number in (1, 2, 100):
            shards = Exclusive(SIZES, fails={2: 3})
            node = ShardReader(shards, ORDER, 0, on_error="skip")
            next(node)
            node.reset()
            while node.next_many(number):
                pass
            node.close()
            assert shards.asked["closed"] == shards.asked["opened"] == 8
