"""Lengths as users give them: arrays of any kind as they are, files memory-mapped, and clear words about all else."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.buckets import BucketBatchSampler
from lightning_stateful.samplers.lengths import open_lengths

VALUES = [3, 0, 7, 200, 5]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.array(VALUES, dtype=np.uint16))
    return tmp_path / "lengths.npy"


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"])
def test_an_array_of_any_integers_is_taken_as_it_is(dtype: str) -> None:
    array = np.array([3, 0, 7, 100], dtype=dtype)

    assert open_lengths(array) is array


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda values: torch.tensor(values, dtype=torch.int32)])
def test_sequences_and_tensors_become_arrays(make: Any) -> None:
    assert open_lengths(make(VALUES)).tolist() == VALUES


def is_mapped(array: Any) -> bool:
    return isinstance(array, np.memmap) or (array.base is not None and is_mapped(array.base))


def test_a_file_is_memory_mapped_and_not_writable(path: Path) -> None:
    for given in (path, str(path)):
        lengths = open_lengths(given)
        assert is_mapped(lengths)
        assert not lengths.flags.writeable
        assert lengths.tolist() == VALUES


def test_batches_of_a_file_are_those_of_its_lengths(path: Path) -> None:
    assert list(BucketBatchSampler(path, max_tokens=400)) == list(BucketBatchSampler(VALUES, max_tokens=400))


def test_a_sampler_keeps_the_file_mapped(path: Path) -> None:
    assert is_mapped(BucketBatchSampler(path, max_tokens=400).order.lengths)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "lengths are empty"),
        (np.zeros(0, dtype=np.int64), "lengths are empty"),
        (None, r"one integer a sample, got an array of shape \(\)"),
        (7, r"one integer a sample, got an array of shape \(\)"),
        ([[1, 2], [3, 4]], r"one integer a sample, got an array of shape \(2, 2\)"),
        ([1.5, 2.0], r"must be integers, got float64: \[1.5, 2.0\].*milliseconds"),
        (torch.tensor([1.0, 2.0]), "must be integers, got float32"),
        ([True, False], "must be integers, got bool"),
        (["a", "b"], "must be integers, got <U1"),
        ([1, None], "must be integers, got object"),
        ([3, -1, 2, -5], "must not be negative, and that of sample 3 is -5"),
        ([3, 2**42], r"must be below 2\*\*42, got 4398046511104"),
        (np.array([3, 2**63], dtype=np.uint64), r"must be below 2\*\*42"),
    ],
    ids=str,
)
def test_other_things_are_refused_with_what_they_are(lengths: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_lengths(lengths)


def test_samples_in_place_of_their_lengths_are_refused_clearly() -> None:
    with pytest.raises(ConfigurationError, match="one integer a sample"):
        open_lengths([[5, 8, 1], [2, 4]])


def test_an_error_calls_them_by_the_name_it_is_given() -> None:
    with pytest.raises(ConfigurationError, match="boundary_key must not be negative, and that of sample 1 is -3"):
        open_lengths([1, -3], what="boundary_key")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"could not be read from '.*nothing\.npy'.*numpy\.save"):
        open_lengths(tmp_path / "nothing.npy")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="could not be read from"):
        open_lengths(tmp_path)


UNREADABLE = {
    "of text": b"3\n0\n7\n",
    "that is truncated": b"\x93NUMPY\x01\x00\x76\x00{'descr'",
    "of python objects": None,
}
NOT_CAUGHT = {
    "that is empty": b"",
    "that begins like a zip file": b"PK\x03\x04 and no more",
}


@pytest.mark.parametrize("contents", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "lengths.npy"
    if contents is None:
        np.save(path, np.array([1, "a"], dtype=object))
    else:
        path.write_bytes(contents)

    with pytest.raises(ConfigurationError, match=r"lengths could not be read from '.*lengths\.npy'"):
        open_lengths(path)


@pytest.mark.parametrize("contents", NOT_CAUGHT.values(), ids=NOT_CAUGHT)
def test_a_file_that_numpy_stumbles_over_is_refused_by_name(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "lengths.npy"
    path.write_bytes(contents)
    said = ""
    # NumPy leaves a broken zip file open.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            open_lengths(path)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        gc.collect()

    assert said.startswith(f"ConfigurationError: lengths could not be read from '{path}'")


def test_a_file_cut_off_in_the_middle_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(ConfigurationError, match="could not be read"):
        open_lengths(path)


def test_a_file_of_fractions_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "seconds.npy", np.array([0.5, 1.5]))

    with pytest.raises(ConfigurationError, match="must be integers, got float64"):
        open_lengths(tmp_path / "seconds.npy")
