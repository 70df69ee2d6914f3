"""Several streams as one: what they are made of, in what order they come, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from datasets import IterableDataset as HuggingFace
from support.node_cases import NumberedShards
from torch.utils.data import IterableDataset

from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.streams import ChunkedDataset, MixedStream, Stream, as_stream


class Bare(IterableDataset[int]):
    """Numbers without shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def chunks(label: str, *sizes: int, **options: Any) -> ChunkedDataset:
    """Chunks of labelled numbers."""
    refs = [[(label, chunk, number) for number in range(size)] for chunk, size in enumerate(sizes)]
    return ChunkedDataset(refs, list, **{"shuffle": False, **options})


def two(**options: Any) -> MixedStream:
    """Two streams of three samples."""
    return MixedStream({"a": chunks("a", 3), "b": chunks("b", 3)}, **options)


def labels(stream: Stream) -> str:
    return "".join(sample[0] for sample in stream)


class TestDraws:
    def test_without_weights_streams_come_in_turn(self) -> None:
        assert labels(MixedStream({"a": chunks("a", 3), "b": chunks("b", 3), "c": chunks("c", 3)})) == "abcabcabc"

    def test_with_weights_they_come_as_often_as_these_say(self) -> None:
        mixed = MixedStream([chunks("a", 300), chunks("b", 100)], weights=[3, 1], seed=2)
        draws = labels(mixed)
        assert all(draws[first : first + 4].count("a") == 3 for first in range(0, 400, 4))
        assert draws != labels(mixed)

    def test_temperature_makes_weights_more_alike(self) -> None:
        mixed = MixedStream([chunks("a", 300), chunks("b", 300)], weights=[16, 1], temperature=2, by="sample")
        assert Counter(labels(mixed)[:50]) == {"a": 40, "b": 10}

    def test_streams_that_are_alike_are_shuffled_each_in_its_own_way(self) -> None:
        samples = list(MixedStream([chunks(label, 30).shuffle(buffer_size=30, seed=1) for label in "ab"]))
        of_a, of_b = ([sample[2] for sample in samples if sample[0] == label] for label in "ab")
        assert of_a != of_b

    def test_what_is_done_to_all_is_done_to_each(self) -> None:
        mixed = MixedStream({"a": chunks("a", 4), "b": chunks("b", 3)}).windowed(2).map(lambda window: window[0])
        assert labels(mixed) == "ababa"


class TestStates:
    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"weights": [1, 1]}, "weights"),
            ({"by": "sample"}, "by"),
            ({"stop": "cycle"}, "stop"),
            ({"weights": None}, "in_turn"),
            ({"seed": 1}, "seed"),
        ],
    )
    def test_states_of_other_mixtures_are_refused(self, change: dict[str, Any], what: str) -> None:
        state = two(weights=[2, 1]).state_dict()
        with pytest.raises(StateMismatchError, match=what):
            two(**{"weights": [2, 1], **change}).load_state_dict(state)

    @pytest.mark.parametrize(
        "other",
        [
            lambda: MixedStream({"a": chunks("a", 3), "c": chunks("b", 3)}),
            lambda: MixedStream({"a": chunks("a", 3), "b": chunks("b", 3, 1)}),
            lambda: chunks("a", 3),
        ],
    )
    def test_states_of_other_streams_are_refused(self, other: Any) -> None:
        with pytest.raises(StateMismatchError):
            other().load_state_dict(two().state_dict())


class TestRefusals:
    @pytest.mark.parametrize("other", [{1, 2}, None, Bare()])
    def test_what_has_no_shards_is_named(self, other: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"Stream 'b' is a \w+, which has no shards"):
            MixedStream({"a": chunks("a", 1), "b": other})

    def test_mixtures_of_mixtures(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Stream '1' is a .*Stream mixed already"):
            MixedStream([chunks("a", 1), two().map(str)])

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"by": "token"}, "by='token'"),
            ({"stop": "never"}, "stop must be one of"),
            ({"weights": [1]}, "1 values were given as"),
            ({"weights": {"a": 1}}, "Source 'b' has no weight"),
            ({"weights": [1, 0]}, "The weight of source 'b' must be a positive number"),
            ({"temperature": 2}, "pass weights"),
            ({"seed": 1.5}, "seed"),
        ],
    )
    def test_arguments_out_of_range(self, options: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            two(**options)

    def test_batches_that_sources_cut_themselves_are_not_mixed_by_sample(self) -> None:
        with pytest.raises(ConfigurationError, match='by="batch"'):
            two(by="sample").config(batch_size=None)

    def test_one_stream_is_no_list_of_streams_and_is_not_read(self) -> None:
        for one in (ChunkedDataset([0], count), HuggingFace.from_generator(count), NumberedShards([3]), "ab", count()):
            with pytest.raises(ConfigurationError, match=r"by name, or in a list, got a .*MixedStream\(\["):
                MixedStream(one)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(ConfigurationError, match="no streams"):
            MixedStream([])

    def test_names_that_are_alike_as_text(self) -> None:
        with pytest.raises(ConfigurationError, match="different names"):
            MixedStream({1: chunks("a", 1), "1": chunks("b", 1)})  # type: ignore[dict-item]  # that is the point


def test_what_is_a_stream() -> None:
    stream = chunks("a", 1)
    assert as_stream(stream) is stream
    made = as_stream(NumberedShards([1, 2]), seed=7)
    assert made is not None
    assert made.state_dict()["config"]["seed"] == 7
    assert as_stream([1, 2]) is None
    assert as_stream(Bare()) is None
