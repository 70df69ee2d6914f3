"""The length of every sample is found wherever a user says it is, and nothing else is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.lengths import lengths_of

VALUES = [3, 0, 7, 200, 5]


class Texts(Dataset[str]):
    """Knows the lengths of its samples, and never gives one out."""

    def __init__(self, sizes: Any = tuple(VALUES)) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("read a sample")

    def method(self) -> list[int]:
        return VALUES


def refuse(batch: Any) -> Any:
    raise AssertionError("read a sample")


@pytest.fixture
def arrow() -> Any:
    """Lengths, tokens, and a column that cannot be decoded."""
    columns = {
        "length": VALUES,
        "tokens": [[1] * length for length in VALUES],
        "picture": [{"bytes": b"no picture", "path": None}] * len(VALUES),
    }
    features = datasets.Features(
        {
            "length": datasets.Value("int32"),
            "tokens": datasets.List(datasets.Value("int16")),
            "picture": datasets.Image(),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class TestArrays:
    @pytest.mark.parametrize(
        "make", [list, tuple, np.array, torch.tensor, lambda values: np.array(values, dtype=np.uint8)]
    )
    def test_integers_are_taken_as_they_are(self, make: Any) -> None:
        assert lengths_of(Texts(), make(VALUES)).tolist() == VALUES

    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_file_is_read_by_its_path(self, tmp_path: Path, kind: Any) -> None:
        np.save(tmp_path / "lengths.npy", np.array(VALUES))

        assert lengths_of(Texts(), kind(tmp_path / "lengths.npy")).tolist() == VALUES

    @pytest.mark.parametrize("number", [4, 6])
    def test_not_one_a_sample_is_refused_with_both_numbers(self, number: int) -> None:
        with pytest.raises(ConfigurationError, match=f"There are {number} sizes for the 5 samples of a Texts"):
            lengths_of(Texts(), [1] * number, what="sizes")

    def test_fractions_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="must be integers, got float64"):
            lengths_of(Texts(), [0.5] * 5)


class TestColumns:
    def test_a_column_of_integers_is_found_by_its_name(self, arrow: Any) -> None:
        assert lengths_of(arrow, "length").tolist() == VALUES

    def test_of_a_column_of_lists_their_lengths_are_taken(self, arrow: Any) -> None:
        assert lengths_of(arrow, "tokens").tolist() == VALUES

    def test_no_other_column_is_decoded(self, arrow: Any) -> None:
        with pytest.raises(Exception, match="cannot identify image"):
            arrow[0]

        assert lengths_of(arrow, "tokens").tolist() == VALUES

    def test_no_other_column_is_even_read(self, arrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[list[str]] = []
        iterate = datasets.Dataset.iter

        def watched(self: Any, batch_size: int) -> Any:
            read.append(self.column_names)
            return iterate(self, batch_size)

        monkeypatch.setattr(datasets.Dataset, "iter", watched)
        lengths_of(arrow, "tokens")

        assert read == [["tokens"]]

    def test_a_transform_is_not_run(self, arrow: Any) -> None:
        arrow.set_transform(refuse)

        assert lengths_of(arrow, "length").tolist() == VALUES
        assert lengths_of(arrow, "tokens").tolist() == VALUES

    def test_the_dataset_keeps_its_own_format(self, arrow: Any) -> None:
        arrow.set_transform(refuse)
        before = (arrow.format, arrow._fingerprint)
        lengths_of(arrow, "length")

        assert (arrow.format, arrow._fingerprint) == before

    @pytest.mark.parametrize("name", ["length", "tokens"])
    def test_chosen_and_shuffled_samples_have_their_own_lengths(self, arrow: Any, name: str) -> None:
        for chosen in (arrow.select([3, 0, 3]), arrow.shuffle(seed=4), arrow.select(range(1, 4)), arrow.shard(2, 1)):
            expected = chosen.remove_columns("picture")["length"][:]
            assert lengths_of(chosen, name).tolist() == list(expected)

    def test_concatenated_datasets_follow_each_other(self, arrow: Any) -> None:
        joined = datasets.concatenate_datasets([arrow, arrow.select([2, 1])])

        assert lengths_of(joined, "tokens").tolist() == [*VALUES, 7, 0]

    @pytest.mark.parametrize("kind", [datasets.LargeList, datasets.List])
    def test_lists_of_lists_have_the_outer_lengths(self, kind: Any) -> None:
        features = datasets.Features({"a": kind(datasets.List(datasets.Value("int8")))})
        dataset = datasets.Dataset.from_dict({"a": [[[1, 2], [3]], [], [[4]]]}, features=features)

        assert lengths_of(dataset, "a").tolist() == [2, 0, 1]

    def test_lists_of_one_length_have_it(self) -> None:
        features = datasets.Features({"a": datasets.List(datasets.Value("int8"), length=3)})
        dataset = datasets.Dataset.from_dict({"a": [[1, 2, 3], [4, 5, 6]]}, features=features)

        assert lengths_of(dataset, "a").tolist() == [3, 3]

    def test_many_samples_are_read_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_stateful.loaders.lengths._ROWS", 7)
        dataset = datasets.Dataset.from_dict({"n": list(range(100)), "a": [[0] * (index % 5) for index in range(100)]})

        assert lengths_of(dataset, "n").tolist() == list(range(100))
        assert lengths_of(dataset.shuffle(seed=1), "a").tolist() == [n % 5 for n in dataset.shuffle(seed=1)["n"]]

    @pytest.mark.parametrize("values", [[3, None, 5], [[1], None, [2, 3]]], ids=["integers", "lists"])
    def test_a_missing_value_is_refused_with_its_sample(self, values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_stateful.loaders.lengths._ROWS", 2)
        dataset = datasets.Dataset.from_dict({"a": [values[0], values[2], values[0], values[1]]})

        with pytest.raises(ConfigurationError, match="lengths in column 'a' have no value for sample 3"):
            lengths_of(dataset, "a")

    @pytest.mark.parametrize("values", [["ab", "c"], [0.5, 2.0], [True, False], [{"x": 1}, {"x": 2}]], ids=str)
    def test_a_column_of_something_else_is_refused_by_name(self, values: Any) -> None:
        with pytest.raises(ConfigurationError, match="lengths in column 'a' must be integers"):
            lengths_of(datasets.Dataset.from_dict({"a": values}), "a")

    def test_negative_values_are_refused_by_column_and_sample(self) -> None:
        with pytest.raises(
            ConfigurationError, match="lengths in column 'a' must not be negative, and that of sample 1"
        ):
            lengths_of(datasets.Dataset.from_dict({"a": [3, -1]}), "a")

    def test_a_column_without_samples_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="lengths in column 'a' are empty"):
            lengths_of(datasets.Dataset.from_dict({"a": []}), "a")

    def test_a_name_that_is_none_is_refused_with_the_columns_there_are(self, arrow: Any) -> None:
        with pytest.raises(
            ConfigurationError,
            match=r"sizes='size' is neither a column nor an attribute of the Dataset with the columns "
            r"\['length', 'tokens', 'picture'\], nor a .npy file",
        ):
            lengths_of(arrow, "size", what="sizes")


class TestAttributes:
    @pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
    def test_an_attribute_of_any_kind_of_integers_is_found(self, make: Any) -> None:
        assert lengths_of(Texts(make(VALUES)), "sizes").tolist() == VALUES

    def test_an_attribute_may_be_the_path_of_a_file(self, tmp_path: Path) -> None:
        np.save(tmp_path / "lengths.npy", np.array(VALUES))

        assert lengths_of(Texts(tmp_path / "lengths.npy"), "sizes").tolist() == VALUES

    def test_an_attribute_of_another_number_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="There are 2 lengths for the 5 samples of a Texts"):
            lengths_of(Texts([1, 2]), "sizes")

    def test_an_attribute_of_fractions_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigurationError, match="lengths in attribute 'sizes' must be integers"):
            lengths_of(Texts([0.5] * 5), "sizes")

    @pytest.mark.parametrize("name", ["method", "nothing", "__len__", "no name"])
    def test_what_is_no_attribute_of_values_is_refused(self, name: str) -> None:
        with pytest.raises(
            ConfigurationError, match=r"neither a column nor an attribute of the Texts, nor a \.npy file"
        ):
            lengths_of(Texts(), name)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"could not be read from '.*gone\.npy'"):
            lengths_of(Texts(), str(tmp_path / "gone.npy"))


class TestParts:
    def test_a_subset_has_the_lengths_of_its_samples(self, arrow: Any) -> None:
        assert lengths_of(Subset(Texts(), [3, 1, 3]), "sizes").tolist() == [200, 0, 200]
        assert lengths_of(Subset(arrow, [3, 1, 3]), "tokens").tolist() == [200, 0, 200]
        assert lengths_of(Subset(Texts(), torch.tensor([4, 0])), "sizes").tolist() == [5, 3]

    def test_parts_of_a_concatenation_follow_each_other(self, arrow: Any) -> None:
        joined = ConcatDataset([Subset(arrow, [1]), arrow, Subset(ConcatDataset([arrow, arrow]), [7])])

        assert lengths_of(joined, "length").tolist() == [0, *VALUES, 7]

    def test_a_part_without_the_name_is_told(self, arrow: Any) -> None:
        with pytest.raises(ConfigurationError, match="neither a column nor an attribute of the Texts"):
            lengths_of(ConcatDataset([arrow, Texts()]), "length")


class TestFunctions:
    def test_a_function_of_a_sample_is_called_for_each(self) -> None:
        assert lengths_of(["abc", "", "ab"], len).tolist() == [3, 0, 2]

    def test_an_object_that_can_be_called_is_a_function(self) -> None:
        class Double:
            def __call__(self, sample: str) -> int:
                return 2 * len(sample)

        assert lengths_of(["abc", "", "ab"], Double()).tolist() == [6, 0, 4]

    def test_what_it_says_wrong_is_refused_with_the_sample(self) -> None:
        with pytest.raises(ConfigurationError, match="sizes: the function says -1 of sample 2"):
            lengths_of(["abc", "", "ab"], lambda sample: len(sample) - 3 if sample else 0, what="sizes")

    def test_measured_lengths_are_good_for_a_file_and_a_sampler(self) -> None:
        from lightning_stateful.samplers.buckets import BucketBatchSampler

        sampler = BucketBatchSampler(lengths_of(["abc", "", "ab"], len), max_tokens=4)

        assert sorted(index for batch in sampler for index in batch) == [0, 1, 2]
