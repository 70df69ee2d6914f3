import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import random_budget, random_lengths, read_ahead

from lightning_stateful.index.budget import Budget
from lightning_stateful.index.cutting import cut_window
from lightning_stateful.index.too_long import num_samples
from lightning_stateful.index.windows import Windows

# Around where two bytes no longer hold a length, and the longest that there are.
LENGTHS = st.one_of(st.integers(0, 20), st.integers(2**15 - 2, 2**15 + 1), st.integers(2**42 - 3, 2**42 - 1))
SAMPLES = st.lists(st.tuples(LENGTHS, st.integers(-2, 2)), max_size=60)


def in_batches(window):
    order = window.order.tolist()
    assert window.bounds[0] == 0
    assert window.bounds[-1] == len(order)
    return [order[start:stop] for start, stop in zip(window.bounds, window.bounds[1:], strict=False)]


@given(SAMPLES, st.integers(1, 9), st.booleans())
def test_a_window_is_sorted_and_cut_as_reading_ahead_does(samples, most, keyed):
    lengths, keys = [length for length, _ in samples], [key for _, key in samples]

    def fits(longest):
        return 1 + longest % most

    cut = cut_window(np.array(lengths, dtype=np.int64), fits, np.array(keys, dtype=np.int64) if keyed else None)
    expected = read_ahead(range(len(samples)), lengths, keys if keyed else None, max(len(samples), 1), fits)
    assert in_batches(cut) == [batch for batches in expected for batch in batches]


def test_a_window_is_cut_as_windows_of_an_order_are():
    rng = random.Random(3)
    for _ in range(100):
        lengths = random_lengths(rng)
        options = random_budget(rng, lengths)
        if options.pop("too_long", "error") == "drop":
            continue
        keys = [rng.randint(5, 9) for _ in lengths] if rng.random() < 0.4 else None
        windows = Windows.of(
            lengths, **options, too_long="alone", window=len(lengths), boundary_key=keys, shuffle=False
        )
        cut = cut_window(
            np.array(lengths),
            partial(num_samples, Budget(**options)),
            None if keys is None else np.array(keys),
        )
        assert np.array(lengths)[cut.order].tolist() == cut.lengths
        # Windows put the samples of a dataset's order into one order of classes first.
        opened = windows.open(0, 1, 0)
        assert np.diff(cut.bounds).tolist() == opened.sizes.tolist()
        assert np.array(lengths)[cut.order].tolist() == np.array(lengths)[opened.samples].tolist()


@pytest.mark.parametrize("length", [7, 2**15])
def test_equally_long_samples_stay_in_the_order_in_which_they_came(length):
    assert cut_window(np.full(1000, length), lambda longest: 10).order.tolist() == list(range(1000))


def test_keys_come_in_rising_order_whatever_their_lengths():
    cut = cut_window(np.array([9, 1, 5, 2]), lambda longest: 4, np.array([2**62, -(2**63), 2**62, -1]))
    assert in_batches(cut) == [[1], [3], [0, 2]]


def test_nothing_gives_no_batch():
    assert in_batches(cut_window(np.zeros(0, dtype=np.int64), lambda longest: 1)) == []
