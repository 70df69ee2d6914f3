import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_stateful.core.seeding import derive_words
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import draws
from lightning_stateful.index.draws import ReplacementOrder, SubsetOrder, WeightedOrder
from lightning_stateful.index.orders import ShuffledOrder

WEIGHTS = np.array([1.0, 0.0, 2.0, 3.0, 4.0, 0.0])
EVEN = np.ones(4)


def hash_word(word):
    mask = 2**64 - 1
    x = (word + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def word_at(slot, *labels):
    first, second = derive_words(2, *labels)
    return hash_word(hash_word(slot ^ first) ^ second)


def uniform_at(slot, *labels):
    return (word_at(slot, *labels) >> 11) / 2**53


def frequencies(order, num_values, epochs=1):
    taken = np.concatenate([order.take(np.arange(len(order)), epoch) for epoch in range(epochs)])
    return np.bincount(taken, minlength=num_values)


def test_draws_with_replacement_are_hashed_slots_modulo_the_length():
    by_hand = [word_at(slot, "replacement", 3, 2) % 31 for slot in range(200)]
    assert ReplacementOrder(31, 200, 3).take(np.arange(200), 2).tolist() == by_hand


@pytest.mark.parametrize("length", [2, 7, 1000])
def test_draws_with_replacement_are_uniform(length):
    assert stats.chisquare(frequencies(ReplacementOrder(length, 100_000, 1), length)).pvalue > 1e-4


def test_draws_with_replacement_at_2_to_the_40_reach_odd_samples():
    taken = ReplacementOrder(2**40, 10_000, 1).take(np.arange(10_000), 0)
    assert stats.binomtest(int((taken & 1).sum()), 10_000).pvalue > 1e-4
    assert 0 <= taken.min() <= taken.max() < 2**40


def test_draws_with_replacement_repeat_as_often_as_independent_draws():
    taken = ReplacementOrder(10_000, 10_000, 1).take(np.arange(10_000), 0)
    assert np.unique(taken).size == pytest.approx(10_000 * (1 - math.exp(-1)), abs=200)


def test_successive_epochs_of_draws_are_independent():
    order = ReplacementOrder(8, 50_000, 1)
    first, second = (order.take(np.arange(50_000), epoch) for epoch in (0, 1))
    assert stats.chisquare(np.bincount(first * 8 + second, minlength=64)).pvalue > 1e-4


def test_successive_draws_are_independent():
    taken = ReplacementOrder(8, 100_000, 1).take(np.arange(100_000), 0).reshape(-1, 2)
    assert stats.chisquare(np.bincount(taken[:, 0] * 8 + taken[:, 1], minlength=64)).pvalue > 1e-4


def test_one_sample_is_drawn_every_time():
    assert ReplacementOrder(1, 5).take(np.arange(5), 0).tolist() == [0, 0, 0, 0, 0]


def test_nothing_drawn_from_nothing_is_an_empty_epoch():
    assert ReplacementOrder(0, 0).take(np.arange(0), 0).tolist() == []


def test_draws_from_an_empty_dataset_are_refused():
    with pytest.raises(ConfigurationError, match="Cannot draw num_samples=3 from an empty dataset"):
        ReplacementOrder(0, 3)


@pytest.mark.parametrize(("length", "num_samples"), [(-1, 3), (2**40 + 1, 3), (3, -1), (3, 2**40 + 1)])
def test_a_count_of_draws_or_samples_out_of_range_is_refused(length, num_samples):
    with pytest.raises(ConfigurationError, match=r"0 to 2\*\*40"):
        ReplacementOrder(length, num_samples)


def test_a_replacement_order_describes_its_draws():
    described = ReplacementOrder(9, 4, seed=2).describe()
    assert described == {"shuffle": True, "replacement": True, "seed": 2, "num_samples": 4}


def test_weighted_draws_invert_the_cumulated_weights():
    weights = [0.5, 0.0, 2.0, 0.25, 0.0, 1.25]
    cumulated = list(accumulate(weights))
    by_hand = [bisect_right(cumulated, uniform_at(slot, "weighted", 3, 2) * cumulated[-1]) for slot in range(300)]
    assert WeightedOrder(np.array(weights), 300, seed=3).take(np.arange(300), 2).tolist() == by_hand


def test_a_race_of_exponential_clocks_decides_without_replacement():
    weights = [0.5, 0.0, 2.0, 0.25, 0.0, 1.25]
    for epoch in range(20):
        arrivals = {
            sample: -math.log1p(-uniform_at(sample, "weighted race", 3, epoch, 0)) / weight
            for sample, weight in enumerate(weights)
            if weight
        }
        order = WeightedOrder(np.array(weights), 4, replacement=False, seed=3)
        assert order.take(np.arange(4), epoch).tolist() == sorted(arrivals, key=arrivals.__getitem__)


def test_weighted_draws_come_in_proportion_to_the_weights():
    drawn = frequencies(WeightedOrder(WEIGHTS, 100_000, seed=1), 6)
    positive = WEIGHTS > 0
    expected = 100_000 * WEIGHTS[positive] / WEIGHTS.sum()
    assert stats.chisquare(drawn[positive], expected).pvalue > 1e-4


def test_a_thousand_uneven_weights_are_all_kept():
    weights = np.random.default_rng(0).exponential(size=1000) + 0.01
    drawn = frequencies(WeightedOrder(weights, 500_000, seed=1), 1000)
    assert stats.chisquare(drawn, 500_000 * weights / weights.sum()).pvalue > 1e-4


def test_scaled_weights_give_the_same_draws():
    orders = [WeightedOrder(WEIGHTS * scale, 500, seed=1) for scale in (1, 8, 2**-20)]
    plain, larger, smaller = (order.take(np.arange(500), 0).tolist() for order in orders)
    assert plain == larger == smaller


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("zeros", ["first", "last", "between"])
def test_samples_of_weight_zero_are_never_drawn(replacement, zeros):
    weights = {
        "first": np.r_[np.zeros(50), np.ones(100)],
        "last": np.r_[np.ones(100), np.zeros(50)],
        "between": np.r_[np.ones(50), np.zeros(50), np.ones(50)],
    }[zeros]
    order = WeightedOrder(weights, 100, replacement=replacement, seed=1)
    drawn = frequencies(order, 150, epochs=50)
    assert drawn[weights == 0].sum() == 0


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 3.0, 1e9]), min_size=1, max_size=12).filter(any),
    st.integers(0, 2**63),
)
def test_weighted_draws_always_have_weight(weights, seed):
    weights = np.array(weights)
    taken = WeightedOrder(weights, 50, seed=seed).take(np.arange(50), 0)
    assert (weights[taken] > 0).all()


def test_a_draw_on_the_edge_of_a_sample_without_weight_falls_to_the_next(monkeypatch):
    monkeypatch.setattr(draws, "_uniform", lambda words: np.array([0.0, 0.25, 0.5, 1 - 2**-53]))
    order = WeightedOrder(np.array([0.0, 1.0, 0.0, 1.0, 2.0, 0.0]), 4)
    assert order.take(np.arange(4), 0).tolist() == [1, 3, 4, 4]


def test_a_draw_that_rounding_puts_past_the_end_falls_to_the_last_sample_with_weight():
    order = WeightedOrder(np.array([0.0, 5e-324, 0.0]), 50)
    assert order.take(np.arange(50), 0).tolist() == [1] * 50


def test_the_only_sample_with_weight_is_drawn_every_time():
    assert WeightedOrder(np.array([0.0, 5.0, 0.0]), 4).take(np.arange(4), 0).tolist() == [1, 1, 1, 1]


def test_no_sample_is_drawn_twice_without_replacement():
    order = WeightedOrder(np.arange(1.0, 101.0), 60, replacement=False, seed=1)
    assert all(np.unique(order.take(np.arange(60), epoch)).size == 60 for epoch in range(20))


def test_all_samples_drawn_without_replacement_are_a_permutation():
    taken = WeightedOrder(np.arange(1.0, 101.0), 100, replacement=False).take(np.arange(100), 0)
    assert sorted(taken.tolist()) == list(range(100))


def test_the_first_of_a_race_comes_in_proportion_to_the_weights():
    order = WeightedOrder(np.array([1.0, 2.0, 3.0, 4.0]), 4, replacement=False, seed=1)
    first = [int(order.take(np.array([0]), epoch)[0]) for epoch in range(4000)]
    assert stats.chisquare(np.bincount(first), [400, 800, 1200, 1600]).pvalue > 1e-4


def test_the_second_of_a_race_comes_in_proportion_to_what_the_first_left():
    weights = np.array([1.0, 2.0, 5.0])
    order = WeightedOrder(weights, 3, replacement=False, seed=2)
    taken = np.array([order.take(np.arange(2), epoch) for epoch in range(4000)])
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    expected = [4000 * weights[a] / 8 * weights[b] / (8 - weights[a]) for a, b in pairs]
    observed = [int(((taken[:, 0] == a) & (taken[:, 1] == b)).sum()) for a, b in pairs]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_slots_past_the_end_of_a_race_are_another_race():
    order = WeightedOrder(np.arange(1.0, 101.0), 60, replacement=False, seed=1)
    assert np.unique(order.take(np.arange(60, 120), 0)).size == 60


def test_float32_weights_draw_as_their_values_in_float64():
    weights = np.array([0.5, 2.0, 1.25], dtype=np.float32)
    wide = WeightedOrder(weights.astype(np.float64), 100, seed=1)
    assert WeightedOrder(weights, 100, seed=1).take(np.arange(100), 0).tolist() == wide.take(np.arange(100), 0).tolist()


@pytest.mark.parametrize(
    "weights", [[1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]], ids=["negative", "nan", "inf", "matrix"]
)
def test_weights_that_are_no_weights_are_refused(weights):
    with pytest.raises(ConfigurationError, match="one-dimensional array of finite numbers that are not negative"):
        WeightedOrder(np.array(weights), 2)


def test_weights_that_are_all_zero_are_refused():
    with pytest.raises(ConfigurationError, match="At least one weight must be greater than zero"):
        WeightedOrder(np.zeros(3), 2)


def test_no_weights_are_refused():
    with pytest.raises(ConfigurationError, match="Cannot draw num_samples=2 from an empty dataset"):
        WeightedOrder(np.zeros(0), 2)


def test_too_few_weights_without_replacement_are_refused_with_both_counts():
    with pytest.raises(ConfigurationError, match="num_samples=5 needs as many weights above zero, got 4"):
        WeightedOrder(WEIGHTS, 5, replacement=False)


def test_a_negative_count_of_weighted_draws_is_refused():
    with pytest.raises(ConfigurationError, match="got -1"):
        WeightedOrder(EVEN, -1)


def test_a_weighted_order_describes_its_weights_by_a_digest():
    described = WeightedOrder(EVEN, 2, seed=5).describe()
    digest = described.pop("weights")
    assert described == {"shuffle": "weighted", "replacement": True, "seed": 5, "num_samples": 2}
    assert len(digest) == 16


def test_one_changed_weight_changes_the_description():
    changed = EVEN.copy()
    changed[2] = np.nextafter(1.0, 2.0)
    assert WeightedOrder(EVEN, 2).describe() != WeightedOrder(changed, 2).describe()


def test_weights_that_lie_apart_in_memory_are_described_as_those_that_do_not():
    assert WeightedOrder(np.ones(8)[::2], 2).describe() == WeightedOrder(EVEN, 2).describe()


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(0, 2**63), st.integers(0, 50))
def test_a_subset_is_served_once_an_epoch(indices, seed, epoch):
    order = SubsetOrder(np.array(indices, dtype=np.int64), seed)
    assert len(order) == len(indices)
    assert sorted(order.take(np.arange(len(indices)), epoch).tolist()) == sorted(indices)


def test_a_subset_is_shuffled_as_a_dataset_of_its_length():
    indices = np.array([50, 3, 8, 70, 11])
    places = ShuffledOrder(5, 4).take(np.arange(12), 2)
    assert SubsetOrder(indices, 4).take(np.arange(12), 2).tolist() == indices[places].tolist()


def test_other_indices_change_the_description_of_a_subset():
    descriptions = [SubsetOrder(np.array(indices)).describe()["indices"] for indices in ([1, 2, 3], [1, 3, 2], [1, 2])]
    assert len(set(descriptions)) == 3


def test_a_subset_describes_how_many_it_serves():
    described = SubsetOrder(np.array([5, 6]), seed=1).describe()
    assert (described["shuffle"], described["seed"], described["num_samples"]) == (True, 1, 2)


@pytest.mark.parametrize(
    ("order", "epoch", "samples"),
    [
        (ReplacementOrder(10, 10, 3), 0, [5, 4, 5, 1, 6, 5, 4, 0, 2, 4]),
        (ReplacementOrder(10, 10, 3), 1, [4, 1, 1, 6, 8, 0, 5, 9, 8, 5]),
        (WeightedOrder(WEIGHTS[:5], 10, seed=3), 0, [3, 3, 3, 4, 0, 4, 4, 2, 3, 3]),
        (WeightedOrder(WEIGHTS[:5], 10, seed=3), 1, [4, 2, 4, 4, 4, 0, 4, 3, 2, 4]),
        (WeightedOrder(WEIGHTS[:5], 4, replacement=False, seed=3), 0, [3, 4, 0, 2, 2, 4, 3, 0]),
        (WeightedOrder(WEIGHTS[:5], 4, replacement=False, seed=3), 1, [4, 0, 3, 2, 3, 4, 0, 2]),
        (SubsetOrder(np.array([3, 1, 4, 15, 9, 2, 6, 5, 35, 8]), 3), 0, [6, 8, 1, 3, 15, 9, 2, 4, 5, 35]),
        (SubsetOrder(np.array([3, 1, 4, 15, 9, 2, 6, 5, 35, 8]), 3), 1, [3, 8, 35, 1, 15, 4, 2, 5, 6, 9]),
    ],
)
def test_order_version_1_never_changes(order, epoch, samples):
    assert order.take(np.arange(len(samples)), epoch).tolist() == samples


def test_the_digest_of_weights_never_changes():
    assert WeightedOrder(EVEN, 2).describe()["weights"] == "93c02702a7e500f0"


def test_the_digest_of_indices_never_changes():
    assert SubsetOrder(np.array([3, 1, 4])).describe()["indices"] == "24ce5ab60dd277bb"
