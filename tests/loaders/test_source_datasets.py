"""Several datasets behind one loader: where a batch comes from, how it is collated, and what a state says of each."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset

from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError
from lightning_stateful.loaders import StatefulLoader
from lightning_stateful.loaders.source_datasets import Sample, SourceCollate, SourceDataset, describe_sources
from lightning_stateful.samplers import RoundRobinBatchSampler

LENGTHS = {"a": 5, "b": 8}


class Numbered(Dataset[dict[str, int]]):
    def __init__(self, length: int, first: int = 0, **words: Any) -> None:
        self.length, self.first, self.words = length, first, words

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index + self.first}

    def describe(self) -> dict[str, Any]:
        return self.words


def datasets(**words: Any) -> dict[str, Dataset[Any]]:
    return {"a": Numbered(5, **words), "b": Numbered(8, 100)}


def a_loader(parts: dict[str, Any], **options: Any) -> StatefulLoader:
    return StatefulLoader(ConcatDataset(parts.values()), batch_sampler=RoundRobinBatchSampler(parts, 2, **options))


def test_samples_tell_their_source_in_worker_processes_too() -> None:
    dataset = pickle.loads(pickle.dumps(SourceDataset(datasets().values())))

    assert [dataset[index] for index in (0, 4, 5, -1)] == [
        Sample(0, {"id": 0}),
        Sample(0, {"id": 4}),
        Sample(1, {"id": 100}),
        Sample(1, {"id": 107}),
    ]
    with pytest.raises(IndexError):
        dataset[13]


def told(*sources: int) -> list[Sample]:
    return [Sample(source, {"id": 10 * source + number}) for number, source in enumerate(sources)]


class TestSourceCollate:
    @pytest.mark.parametrize("functions", [{"b": sum, "a": len}, [len, sum]], ids=["by name", "in order"])
    def test_each_source_has_a_function_of_its_own(self, functions: Any) -> None:
        collate = SourceCollate(("a", "b"), functions)

        assert (collate([Sample(0, 7), Sample(0, 8)]), collate([Sample(1, 7), Sample(1, 8)])) == (2, 15)

    def test_one_source_may_be_left_to_torch_and_what_a_function_returned_is_not_changed(self) -> None:
        held = {"x": 1}
        collate = SourceCollate(("a", "b"), {"a": None, "b": lambda samples: held}, tag="source")

        assert collate([Sample(0, {"id": 7})])["id"].tolist() == [7]
        assert collate([Sample(1, {"id": 7})]) == {"source": "b", "x": 1}
        assert held == {"x": 1}

    def test_a_mixed_batch_has_the_source_of_every_sample(self) -> None:
        batch = SourceCollate(("a", "b"), None, tag="source", mixes=True)(told(1, 0, 1))

        assert (batch["source"], batch["id"].tolist()) == (["b", "a", "b"], [10, 1, 12])

    @pytest.mark.parametrize(
        ("functions", "message"),
        [
            ({"a": len}, "Source 'b' has no collate_fn"),
            ([len], "1 values were given as collate_fn for the 2 sources"),
            ({"a": len, "b": len, "z": len}, "a collate_fn for 'z', which is none of the sources"),
        ],
    )
    def test_a_source_without_a_function_is_named(self, functions: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            SourceCollate(("a", "b"), functions)
        with pytest.raises(ConfigurationError, match='With by="sample" a batch holds several sources'):
            SourceCollate(("a", "b"), functions, mixes=True)

    @pytest.mark.parametrize(
        ("collate_fn", "message"),
        [(list, "a batch of source 'b' is a list"), (None, "A batch of source 'b' already has the key 'id'")],
    )
    def test_a_tag_without_room_for_it_is_refused_with_the_source(self, collate_fn: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            SourceCollate(("a", "b"), collate_fn, tag="id")(told(1))


def described(dataset: Any, lengths: dict[str, int] | None = None) -> dict[str, Any]:
    return describe_sources(dataset, {"sources": dict(lengths or LENGTHS), "seed": 0})


class TestDescriptions:
    def test_what_a_dataset_says_follows_its_length_in_short(self) -> None:
        given = {"sources": dict(LENGTHS)}
        sources = describe_sources(ConcatDataset(datasets(version="1.0").values()), given)["sources"]

        assert sources["b"] == 8
        assert sources["a"].startswith("5 ")
        assert len(sources["a"]) == len("5 ") + 6
        assert given == {"sources": LENGTHS}

    def test_any_other_dataset_of_as_many_samples_is_described_as_a_whole(self) -> None:
        other = described(ConcatDataset([range(5), range(4), range(4)]))

        assert described(range(13)) == {"sources": LENGTHS, "seed": 0, "dataset": {"length": 13}}
        assert (other["sources"], set(other["dataset"])) == (LENGTHS, {"length", "parts"})

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (ConcatDataset([range(5), range(9)]), "13 samples together, {'a': 5, 'b': 8}, and the dataset has 14"),
            (range(12), "and the dataset has 12"),
            (ConcatDataset([range(8), range(5)]), "Source 'a' has 5 samples, and the dataset in its place 8"),
        ],
    )
    def test_a_dataset_that_the_sampler_was_not_made_for_is_refused(self, dataset: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            StatefulLoader(dataset, batch_sampler=RoundRobinBatchSampler(LENGTHS, 2))


class TestChangedData:
    """A checkpoint is refused for other data, source by source."""

    def test_a_source_whose_fingerprint_alone_has_changed_is_a_warning(self) -> None:
        parts = datasets()
        parts["a"]._fingerprint = "one"
        state = a_loader(parts).state_dict()
        parts["a"]._fingerprint = "other"

        with pytest.warns(StatefulWarning, match=r"fingerprint.a \(saved 'one', now 'other'\)"):
            a_loader(parts).load_state_dict(state)

    @pytest.mark.parametrize(
        ("parts", "named"),
        [
            (datasets(version="1.1"), {"sources.a"}),
            ({"a": Numbered(6), "c": Numbered(8)}, {"sources.a", "sources.b", "sources.c"}),
        ],
        ids=["another version", "renamed, and of another length"],
    )
    def test_a_changed_source_is_named(self, parts: dict[str, Any], named: set[str]) -> None:
        state = a_loader(datasets(version="1.0")).state_dict()
        with pytest.raises(StateMismatchError) as caught:
            a_loader(parts).load_state_dict(state)

        assert {difference.path for difference in caught.value.differences} == named
