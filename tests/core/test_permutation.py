"""Keyed permutations against a plain reference: one range, and many ranges at once; and ranges laid end to end."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core import KeyedPermutation
from lightning_stateful.core.permutation import ClassShuffle, bounds_of
from lightning_stateful.core.seeding import derive_words

TABLES = [0, 1, 2, 3, 10, 1000, 2**16 - 1, 2**16]
MIXED = [2**16 + 1, 100_003, 2**17, 2**17 + 1]
LARGE = [2**32 - 1, 2**32, 2**32 + 1, 10**12, 2**40]
KEYS = st.integers(0, 2**64 - 1)
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 17, 300, 1024, 1025, 1500, 2048]), min_size=1, max_size=12)


def hash_word(word: int) -> int:
    mask = 2**64 - 1
    x = (word + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def table_by_hand(length: int, key: int) -> list[int]:
    first, second = derive_words(2, "permutation table", length, key)
    return sorted(range(length), key=lambda element: hash_word(hash_word(element ^ first) ^ second))


def mix_by_hand(length: int, key: int, position: int) -> int:
    bits = (length - 1).bit_length()
    words = derive_words(16, "permutation mixer", length, key)
    x = position
    while True:
        for constant, multiplier in zip(words[0::2], words[1::2], strict=True):
            x = (x ^ constant) * (multiplier | 1) % 2**bits
            x ^= x >> (bits + 1) // 2
        if x < length:
            return x


@pytest.mark.parametrize("length", [*TABLES, *MIXED, *LARGE])
def test_an_element_is_found_where_it_is_taken_from(length: int) -> None:
    positions = some_positions(length) if length > 2 else np.arange(length)
    permutation = KeyedPermutation(length, 7)
    assert permutation.find(permutation.take(positions)).tolist() == positions.tolist()


def some_positions(length: int) -> np.ndarray:
    ends = [0, 1, 2, length // 2, length - 2, length - 1]
    return np.concatenate([ends, np.random.default_rng(length).integers(0, length, 200)])


class TestKeyedPermutation:
    @pytest.mark.parametrize("length", TABLES[:-2])
    def test_a_small_one_is_the_sorted_table_of_a_plain_reference(self, length: int) -> None:
        assert KeyedPermutation(length, 11).take(np.arange(length)).tolist() == table_by_hand(length, 11)

    @pytest.mark.parametrize("length", [*MIXED, *LARGE])
    def test_a_large_one_mixes_as_a_plain_reference(self, length: int) -> None:
        positions = some_positions(length)
        by_hand = [mix_by_hand(length, 11, position) for position in positions.tolist()]

        assert KeyedPermutation(length, 11).take(positions).tolist() == by_hand

    @given(st.integers(0, 2**18), KEYS)
    def test_every_element_comes_once(self, length: int, key: int) -> None:
        taken = KeyedPermutation(length, key).take(np.arange(length))

        assert np.array_equal(np.sort(taken), np.arange(length))

    @pytest.mark.parametrize(
        ("length", "key", "taken"),
        [
            (10, 0, [6, 1, 0, 7, 3, 4, 5, 2, 9, 8]),
            (2**16, 7, [61187, 58454, 41385]),
            (2**16 + 1, 7, [53893, 23741, 15713]),
            (10**9 + 7, 7, [109443165, 419735844, 472622146]),
            (2**40, 7, [945790873774, 709343310690, 922326352939]),
        ],
    )
    def test_permutations_never_change_between_versions(self, length: int, key: int, taken: list[int]) -> None:
        assert KeyedPermutation(length, key).take(np.arange(len(taken))).tolist() == taken


def starts_of(sizes: list[int]) -> np.ndarray:
    return bounds_of(np.array(sizes, dtype=np.int64))


class TestClassShuffle:
    @given(SIZES, st.integers(0, 2**40))
    def test_every_class_is_mapped_onto_itself(self, sizes: list[int], seed: int) -> None:
        starts = starts_of(sizes)
        found = ClassShuffle(starts, seed).take(np.arange(starts[-1]))

        for first, last in pairwise(starts.tolist()):
            assert sorted(found[first:last]) == list(range(first, last))

    @pytest.mark.parametrize("size", [1025, 2048, 4096])
    def test_no_stride_of_a_class_shows_whatever_the_key(self, size: int) -> None:
        starts = starts_of([size] * 500)
        found = ClassShuffle(starts, 3).take(np.arange(starts[-1])).reshape(-1, size)

        for stride in (1, size // 4, size // 2):
            differences = np.sort((found[:, stride:] - found[:, :-stride]) % size, axis=1)
            # Of a random permutation, one difference comes about nine times at most; of a bad key, dozens of times.
            assert not (differences[:, 16:] == differences[:, :-16]).any()

    def test_the_order_never_changes_between_versions(self) -> None:
        found = ClassShuffle(starts_of([5, 1300, 2]), 7, 3).take(np.arange(1307))

        assert found[:8].tolist() == [0, 4, 3, 1, 2, 930, 1038, 924]
        assert found[1303:].tolist() == [1256, 190, 1305, 1306]
