import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.lengths import Histogram, check_lengths, chunks, digest, histogram

SOME = [3, 0, 7, 3, 12, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64, ">i4"])
def test_integers_of_any_type_are_not_copied(dtype):
    array = np.array(SOME, dtype=dtype)
    checked = check_lengths(array)
    assert np.shares_memory(checked, array)
    assert checked.dtype == array.dtype


def test_a_memory_mapped_file_stays_one(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array(SOME, dtype=np.uint16))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    assert np.shares_memory(check_lengths(mapped), mapped)


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array])
def test_lists_tuples_tensors_and_arrays_are_lengths(make):
    assert check_lengths(make(SOME)).tolist() == SOME


def test_lengths_go_up_to_2_to_the_42():
    assert check_lengths([1, 2**42 - 1]).tolist() == [1, 2**42 - 1]
    with pytest.raises(ConfigurationError, match=rf"below 2\*\*42, got {2**42}"):
        check_lengths([1, 2**42])


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([[1, 2], [3, 4]], r"one integer a sample, got an array of shape \(2, 2\)"),
        (5, r"got an array of shape \(\)"),
        ([], "lengths are empty"),
        (np.zeros(0, dtype=np.int64), "lengths are empty"),
        ([1.5, 2.0], r"must be integers, got float64: \[1.5, 2.0\].*milliseconds"),
        ([True, False], "must be integers, got bool"),
        (["3", "4"], "must be integers, got <U1"),
        ([3, None], "must be integers, got object"),
        ([3, 2**64], "must be integers, got object"),
        ([3, 4, -1], "must not be negative, and that of sample 2 is -1"),
        ([3, -2, -7], "must not be negative, and that of sample 2 is -7"),
        (np.array([2**64 - 1], dtype=np.uint64), r"below 2\*\*42, got 18446744073709551615"),
    ],
)
def test_what_is_no_row_of_lengths_is_refused_with_its_values(lengths, said):
    with pytest.raises(ConfigurationError, match=said):
        check_lengths(lengths)


def test_a_negative_length_far_behind_is_named_by_its_place():
    array = np.ones(2**20 + 5, dtype=np.int8)
    array[2**20 + 3] = -4
    with pytest.raises(ConfigurationError, match=f"that of sample {2**20 + 3} is -4"):
        check_lengths(array)


def test_an_error_calls_them_what_the_caller_calls_them():
    with pytest.raises(ConfigurationError, match=r"^boundary_key are empty"):
        check_lengths([], what="boundary_key")


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**42 - 1)), min_size=1))
def test_a_histogram_counts_every_length(lengths):
    counted = Counter(lengths)
    found = histogram(check_lengths(lengths))
    assert found.values.tolist() == sorted(counted)
    assert found.counts.tolist() == [counted[length] for length in sorted(counted)]
    assert found.total == sum(lengths)
    assert (found.values.dtype, found.counts.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("longest", [9, 2**24, 2**24 + 1])
def test_a_histogram_counts_lengths_of_many_chunks(longest):
    array = np.full(2**20 + 9, 4, dtype=np.uint32)
    array[-3:], array[0] = longest, 0
    found = histogram(array)
    assert found.values.tolist() == [0, 4, longest]
    assert found.counts.tolist() == [1, 2**20 + 5, 3]


def test_the_total_of_a_histogram_is_the_sum_of_all_lengths():
    assert Histogram(np.array([2, 2**41]), np.array([3, 1000])).total == 6 + 1000 * 2**41


def test_chunks_are_consecutive_and_know_where_they_begin():
    array = np.arange(2**20 * 2 + 5)
    found = list(chunks(array))
    assert [start for start, _ in found] == [0, 2**20, 2**21]
    assert np.array_equal(np.concatenate([part for _, part in found]), array)


def test_a_digest_is_that_of_little_endian_words():
    expected = hashlib.blake2b(b"".join(length.to_bytes(8, "little") for length in SOME), digest_size=8).hexdigest()
    assert digest(np.array(SOME)) == expected == "703a507c728dce68"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, ">i8", np.uint64])
def test_equal_lengths_have_one_digest_whatever_their_type(dtype):
    assert digest(np.array(SOME, dtype=dtype)) == digest(np.array(SOME))


def test_equal_lengths_have_one_digest_wherever_they_lie(tmp_path):
    array = np.arange(2**20 + 77, dtype=np.uint32)
    np.save(tmp_path / "lengths.npy", array)
    assert digest(np.load(tmp_path / "lengths.npy", mmap_mode="r")) == digest(array) == digest(array[::-1][::-1])


def test_one_length_more_fewer_or_elsewhere_gives_another_digest():
    others = [SOME, [*SOME, 0], SOME[:-1], SOME[::-1], [*SOME[:-1], 2]]
    assert len({digest(np.array(lengths)) for lengths in others}) == 5
