import hashlib
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.seeding import derive_seed, derive_words

LABELS = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


def blake2b_of(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def test_a_seed_is_the_blake2b_hash_of_tagged_and_counted_labels():
    assert derive_seed("shuffle", 12, -3) == blake2b_of(b"s7:shufflei2:12i2:-3")


def test_a_string_is_counted_in_bytes_of_utf_8():
    assert derive_seed("ä") == blake2b_of(b"s2:\xc3\xa4")


def test_words_are_read_from_shake_256_of_the_same_labels():
    stream = hashlib.shake_256(b"s1:ai1:1").digest(16)
    assert derive_words(2, "a", 1) == [int.from_bytes(stream[:8], "little"), int.from_bytes(stream[8:], "little")]


@pytest.mark.parametrize(
    ("labels", "seed"),
    [
        ((), 13020603013274838756),
        (("shuffle", 1, 2), 10446305355637620133),
        (("shuffled", 0, 0, 0), 17400652813165815435),
        ((-1,), 15422518530090533802),
        (("ä", 2**64), 4046424022769964296),
    ],
)
def test_seeds_never_change_between_versions(labels, seed):
    assert derive_seed(*labels) == seed


def test_words_never_change_between_versions():
    assert derive_words(2, "a", 1) == [11600362622790234900, 15652662250445113377]


def test_seed_1_at_epoch_2_is_not_seed_2_at_epoch_1():
    assert derive_seed("shuffle", 1, 2) != derive_seed("shuffle", 2, 1)


def test_an_integer_and_its_text_give_two_seeds():
    assert derive_seed("a", 1) != derive_seed("a", "1")


def test_joined_labels_give_another_seed_than_separate_ones():
    assert len({derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed("abc"), derive_seed("a", "b", "c")}) == 4


def test_a_label_that_imitates_the_encoding_gives_another_seed():
    assert derive_seed("a", "b") != derive_seed("as1:b")


def test_an_empty_label_counts():
    assert len({derive_seed(), derive_seed(""), derive_seed("", "")}) == 3


def test_a_grid_of_seeds_epochs_and_passes_has_no_equal_seeds():
    grid = {derive_seed("shuffled", seed, epoch, pas) for seed in range(20) for epoch in range(20) for pas in range(20)}
    assert len(grid) == 20**3


@given(LABELS, LABELS)
def test_two_lists_of_labels_give_one_seed_only_if_they_are_equal(first, second):
    assert (derive_seed(*first) == derive_seed(*second)) == (first == second)


@given(LABELS)
def test_a_seed_is_an_int_of_64_bits(labels):
    seed = derive_seed(*labels)
    assert type(seed) is int
    assert 0 <= seed < 2**64


@given(LABELS, st.integers(0, 20), st.integers(0, 20))
def test_more_words_begin_with_the_fewer_words(labels, few, more):
    words = derive_words(few + more, *labels)
    assert len(words) == few + more
    assert words[:few] == derive_words(few, *labels)


@pytest.mark.parametrize("integer", [np.int64(7), np.uint8(7), np.int32(7), IntEnum("Color", {"RED": 7}).RED])
def test_every_kind_of_integer_with_one_value_gives_one_seed(integer):
    assert derive_seed("a", integer) == derive_seed("a", 7)


@pytest.mark.parametrize("label", [1.0, None, b"a", (1,), np.float64(1.0)])
def test_a_label_that_is_neither_string_nor_integer_is_refused(label):
    with pytest.raises(TypeError):
        derive_seed("a", label)


def test_all_bits_of_successive_seeds_are_set_half_of_the_time():
    seeds = np.array([derive_seed("shuffled", 0, epoch, 0) for epoch in range(4000)], dtype=np.uint64)
    ones = np.array([int(((seeds >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)])
    assert (abs(ones - 2000) < 5 * np.sqrt(1000)).all()
