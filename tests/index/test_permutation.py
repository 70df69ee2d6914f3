import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.permutation import MAX_LENGTH, KeyedPermutation, keyed_permutation, splitmix64
from lightning_stateful.core.seeding import derive_words
from lightning_stateful.errors import ConfigurationError

NUM_ROUNDS = 8
SMALL = [0, 1, 2, 3, 10, 1000, 2**16 - 1, 2**16]
MIXED = [2**16 + 1, 100_003, 2**17 - 1, 2**17, 2**17 + 1]
LARGE = [2**32 - 1, 2**32, 2**32 + 1, 10**9 + 7, 10**12, 2**40 - 1, 2**40]
KEYS = st.integers(0, 2**64 - 1)


def hash_word(word):
    mask = 2**64 - 1
    x = (word + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def table_by_hand(length, key):
    first, second = derive_words(2, "permutation table", length, key)
    return sorted(range(length), key=lambda element: (hash_word(hash_word(element ^ first) ^ second), element))


def mix_by_hand(length, key, position):
    bits = (length - 1).bit_length()
    words = derive_words(2 * NUM_ROUNDS, "permutation mixer", length, key)
    x = position
    while True:
        for constant, multiplier in zip(words[0::2], words[1::2], strict=True):
            x = (x ^ constant) * (multiplier | 1) % 2**bits
            x ^= x >> (bits + 1) // 2
        if x < length:
            return x


def some_positions(length, count=200):
    ends = [0, 1, 2, length // 2, length - 2, length - 1]
    return np.concatenate([ends, np.random.default_rng(length).integers(0, length, count)])


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 52, 1000, 2**16])
def test_a_small_permutation_is_the_sorted_table_of_a_plain_reference(length):
    assert KeyedPermutation(length, 11).take(np.arange(length)).tolist() == table_by_hand(length, 11)


@pytest.mark.parametrize("length", [*MIXED, *LARGE])
def test_a_large_permutation_mixes_as_a_plain_reference(length):
    positions = some_positions(length)
    by_hand = [mix_by_hand(length, 11, position) for position in positions.tolist()]
    assert KeyedPermutation(length, 11).take(positions).tolist() == by_hand


@given(st.integers(2**16 + 1, 2**40), KEYS, st.data())
def test_any_length_and_key_mix_as_a_plain_reference(length, key, data):
    position = data.draw(st.integers(0, length - 1))
    assert KeyedPermutation(length, key).take(np.array([position])).tolist() == [mix_by_hand(length, key, position)]


@pytest.mark.parametrize("length", [*SMALL, *MIXED])
@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_every_element_comes_exactly_once(length, key):
    taken = KeyedPermutation(length, key).take(np.arange(length))
    assert np.array_equal(np.sort(taken), np.arange(length))


@given(st.integers(0, 5000), KEYS)
def test_every_element_of_any_small_length_comes_exactly_once(length, key):
    taken = KeyedPermutation(length, key).take(np.arange(length))
    assert np.array_equal(np.sort(taken), np.arange(length))


@given(st.integers(2**16 + 1, 2**18), KEYS)
def test_every_element_of_any_mixed_length_comes_exactly_once(length, key):
    taken = KeyedPermutation(length, key).take(np.arange(length))
    assert np.bincount(taken, minlength=length).tolist() == [1] * length


@pytest.mark.parametrize("length", [*SMALL[1:], *MIXED, *LARGE])
def test_positions_of_undoes_take(length):
    permutation = KeyedPermutation(length, 5)
    positions = some_positions(length) % length
    assert np.array_equal(permutation.positions_of(permutation.take(positions)), positions)


@pytest.mark.parametrize("length", [*SMALL[1:], *MIXED, *LARGE])
def test_take_undoes_positions_of(length):
    permutation = KeyedPermutation(length, 5)
    indices = some_positions(length) % length
    assert np.array_equal(permutation.take(permutation.positions_of(indices)), indices)


@given(st.integers(1, 2**40), KEYS, st.data())
def test_both_ways_undo_each_other_at_any_length(length, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    permutation = KeyedPermutation(length, key)
    assert np.array_equal(permutation.positions_of(permutation.take(positions)), positions)


@pytest.mark.parametrize("length", LARGE)
def test_neighbours_at_the_end_of_a_large_range_stay_apart(length):
    taken = KeyedPermutation(length, 1).take(np.arange(length - 4096, length))
    assert np.unique(taken).size == 4096
    assert taken.min() >= 0
    assert taken.max() < length


@pytest.mark.parametrize("length", LARGE)
def test_odd_and_even_elements_of_a_large_range_are_both_reached(length):
    # A way through float64 would lose the lowest bits.
    taken = KeyedPermutation(length, 1).take(np.arange(4096))
    assert 1800 < int((taken & 1).sum()) < 2300


def test_the_largest_element_of_the_largest_range_is_reached():
    permutation = KeyedPermutation(2**40, 1)
    position = permutation.positions_of(np.array([2**40 - 1]))
    assert permutation.take(position).tolist() == [2**40 - 1]


@pytest.mark.parametrize("length", [1000, 100_003])
def test_elements_taken_one_by_one_or_backwards_are_those_taken_together(length):
    permutation = KeyedPermutation(length, 9)
    together = permutation.take(np.arange(300))
    assert [int(permutation.take(np.array([position]))[0]) for position in range(300)] == together.tolist()
    assert np.array_equal(permutation.take(np.arange(300)[::-1]), together[::-1])


@pytest.mark.parametrize("length", [1000, 100_003, 2**33])
@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (0, 4), (1, 2, 3)])
def test_the_answer_has_the_shape_of_the_question(length, shape):
    positions = np.arange(int(np.prod(shape))).reshape(shape)
    permutation = KeyedPermutation(length, 9)
    assert permutation.take(positions).shape == shape
    assert permutation.positions_of(positions).shape == shape


@pytest.mark.parametrize("length", [1000, 100_003, 2**33])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_gives_the_same_int64_answer(length, dtype):
    taken = KeyedPermutation(length, 9).take(np.arange(100, dtype=dtype))
    assert taken.dtype == np.int64
    assert taken.tolist() == KeyedPermutation(length, 9).take(np.arange(100)).tolist()


@pytest.mark.parametrize("length", [1000, 100_003, 2**33])
def test_the_question_is_not_written_to(length):
    positions = np.arange(100)
    positions.flags.writeable = False
    permutation = KeyedPermutation(length, 9)
    permutation.positions_of(permutation.take(positions))
    assert positions.tolist() == list(range(100))


@pytest.mark.parametrize("length", [1000, 100_003])
def test_writing_to_an_answer_does_not_change_the_next(length):
    permutation = KeyedPermutation(length, 9)
    first = permutation.take(np.arange(100))
    expected = first.tolist()
    first[:] = 0
    assert permutation.take(np.arange(100)).tolist() == expected


@pytest.mark.parametrize("length", [0, 1, 1000, 100_003, 2**40])
@pytest.mark.parametrize("method", ["take", "positions_of"])
def test_a_value_past_the_end_is_refused_with_the_range(length, method):
    with pytest.raises(IndexError, match=rf"values from {length} to {length} lie outside range\({length}\)"):
        getattr(KeyedPermutation(length, 0), method)(np.array([length]))


@pytest.mark.parametrize("length", [1000, 100_003, 2**40])
@pytest.mark.parametrize("method", ["take", "positions_of"])
def test_a_negative_value_is_refused_and_does_not_count_from_the_end(length, method):
    with pytest.raises(IndexError, match="values from -1 to 5 lie outside"):
        getattr(KeyedPermutation(length, 0), method)(np.array([5, -1]))


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_a_length_out_of_range_is_refused_with_its_value(length):
    with pytest.raises(ConfigurationError, match=rf"0 to 2\*\*40 elements, got length={length}\."):
        KeyedPermutation(length, 0)


@pytest.mark.parametrize("length", [52, 2**16, 2**16 + 1, 2**40])
def test_equal_keys_give_equal_permutations(length):
    positions = np.arange(52)
    assert np.array_equal(KeyedPermutation(length, 3).take(positions), KeyedPermutation(length, 3).take(positions))


@pytest.mark.parametrize("length", [52, 2**16, 2**16 + 1, 2**40])
def test_a_hundred_keys_give_a_hundred_permutations(length):
    positions = np.arange(20)
    assert len({tuple(KeyedPermutation(length, key).take(positions).tolist()) for key in range(-50, 50)}) == 100


@pytest.mark.parametrize("lengths", [(1000, 1001), (100_003, 100_004), (2**40 - 1, 2**40)])
def test_neighbouring_lengths_give_unrelated_permutations(lengths):
    shorter, longer = (KeyedPermutation(length, 3).take(np.arange(500)) for length in lengths)
    assert int((shorter == longer).sum()) < 8


def test_memory_does_not_grow_with_the_length():
    KeyedPermutation(10**12, 0).take(np.arange(10))
    tracemalloc.start()
    permutation = KeyedPermutation(10**12, 1)
    permutation.positions_of(permutation.take(np.arange(10)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**16


def test_the_largest_table_takes_half_a_megabyte():
    tracemalloc.start()
    permutation = KeyedPermutation(2**16, 1)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert permutation.length == 2**16
    assert held < 2**19 + 2**14


def test_the_cache_hands_out_one_object_for_equal_arguments():
    assert keyed_permutation(1000, 77) is keyed_permutation(1000, 77)


def test_the_cached_permutation_is_the_uncached_one():
    assert np.array_equal(keyed_permutation(1000, 78).take(np.arange(9)), KeyedPermutation(1000, 78).take(np.arange(9)))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_the_hash_of_words_is_that_of_a_plain_reference(words):
    assert splitmix64(np.array(words, dtype=np.uint64)).tolist() == [hash_word(word) for word in words]


def test_the_hash_is_the_published_splitmix64():
    # The first outputs of the generator at seed 1234567, as published with its C code.
    states = [(1234567 + step * 0x9E3779B97F4A7C15) % 2**64 for step in range(3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(np.array(states, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize(
    ("length", "key", "taken"),
    [
        (10, 0, [6, 1, 0, 7, 3, 4, 5, 2, 9, 8]),
        (10, 1, [6, 7, 1, 9, 2, 8, 4, 5, 0, 3]),
        (12, 2**63, [9, 10, 4, 11, 1, 7, 3, 2, 0, 6, 8, 5]),
    ],
)
def test_small_permutations_never_change_between_versions(length, key, taken):
    assert KeyedPermutation(length, key).take(np.arange(length)).tolist() == taken


@pytest.mark.parametrize(
    ("length", "taken"),
    [
        (2**16, [61187, 58454, 41385, 7]),
        (2**16 + 1, [53893, 23741, 15713, 14425]),
        (100_003, [30800, 33199, 29837, 6933]),
        (2**17, [66011, 67312, 11189, 36884]),
        (10**9 + 7, [109443165, 419735844, 472622146, 429587616]),
        (2**32, [2106730316, 2326674120, 3772195382, 3610865493]),
        (2**32 + 1, [3834013968, 4049133843, 1507910023, 126329251]),
        (10**12, [248695576520, 691255044136, 56025615273, 251355857377]),
        (2**40, [945790873774, 709343310690, 922326352939, 565932707569]),
    ],
)
def test_large_permutations_never_change_between_versions(length, taken):
    assert KeyedPermutation(length, 7).take(np.array([0, 1, 2, length - 1])).tolist() == taken
