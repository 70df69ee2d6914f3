"""Lengths are read, checked, counted and recognised without a copy."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.bucketing.lengths import check_lengths, digest, histogram, open_lengths
from lightning_stateful.errors import ConfigurationError

SOME = [3, 0, 7, 3, 12, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64, ">i4"])
def test_integers_of_any_type_are_not_copied(dtype):
    array = np.array(SOME, dtype=dtype)
    checked = check_lengths(array)
    assert np.shares_memory(checked, array)
    assert checked.dtype == array.dtype


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_file_is_memory_mapped(tmp_path, kind):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(SOME, dtype=np.uint16))
    found = open_lengths(kind(path))
    assert isinstance(found.base, np.memmap)
    assert found.tolist() == SOME


def test_what_is_no_npy_file_is_refused_with_its_path(tmp_path):
    archive, text = tmp_path / "lengths.npz", tmp_path / "text.npy"
    np.savez(archive, lengths=np.array(SOME))
    text.write_text("1 2 3")
    for path in (archive, text, tmp_path / "gone.npy"):
        with pytest.raises(ConfigurationError, match=rf"lengths cannot be read from '.*{path.name}'.*numpy\.save"):
            open_lengths(path)


def test_a_file_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([None, 3], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigurationError, match="lengths cannot be read"):
        open_lengths(tmp_path / "lengths.npy")


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([[1, 2], [3, 4]], r"one integer a sample, got an array of shape \(2, 2\)"),
        ([], "lengths are empty"),
        ([1.5, 2.0], r"must be integers, got float64: \[1.5, 2.0\].*milliseconds"),
        ([True, False], "must be integers, got bool"),
        ([3, 4, -1], "must not be negative, and that of sample 2 is -1"),
        (np.array([2**64 - 1], dtype=np.uint64), r"below 2\*\*42, got 18446744073709551615"),
    ],
)
def test_what_is_no_row_of_lengths_is_refused_with_its_values(lengths, said):
    with pytest.raises(ConfigurationError, match=said):
        open_lengths(lengths)


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**42 - 1)), min_size=1))
def test_a_histogram_counts_every_length(lengths):
    counted = Counter(lengths)
    found = histogram(check_lengths(lengths))
    assert found.values.tolist() == sorted(counted)
    assert found.counts.tolist() == [counted[length] for length in sorted(counted)]
    assert found.total == sum(lengths)


def test_a_digest_is_that_of_little_endian_words():
    expected = hashlib.blake2b(b"".join(length.to_bytes(8, "little") for length in SOME), digest_size=8).hexdigest()
    assert digest(np.array(SOME)) == expected == "703a507c728dce68"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, ">i8", np.uint64])
def test_equal_lengths_have_one_digest_whatever_their_type_and_other_ones_another(dtype):
    assert digest(np.array(SOME, dtype=dtype)) == digest(np.array(SOME))
    others = [SOME, [*SOME, 0], SOME[:-1], SOME[::-1], [*SOME[:-1], 2]]
    assert len({digest(np.array(lengths, dtype=dtype)) for lengths in others}) == 5
