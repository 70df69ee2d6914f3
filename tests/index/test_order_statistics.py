from collections import Counter
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.index import permutation
from lightning_stateful.index.orders import ShuffledOrder

# Each statistic is computed for the shuffled order and for torch's generator at fixed seeds. That it passes on torch's
# shows that the test is fair; the last test shows that it finds a mixer with too few rounds.
ALMOST_NEVER = 1e-4
MIDDLE = [1000, 2**16 + 1, 2**17]
LARGE = [10**9, 2**33, 10**12, 2**40]


def shuffled(length, seed, epoch=0):
    return ShuffledOrder(length, seed).take(np.arange(length), epoch)


def randperm(length, seed, epoch=0):
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch) >> 1)
    return torch.randperm(length, generator=generator).numpy()


def shuffled_at(length, seed, positions):
    return ShuffledOrder(length, seed).take(positions.ravel(), 0).reshape(positions.shape)


def drawn_at(length, seed, positions):
    generator = torch.Generator().manual_seed(derive_seed(length, seed) >> 1)
    return torch.randint(length, positions.shape, generator=generator).numpy()


both = pytest.mark.parametrize("draw", [shuffled, randperm])
both_at = pytest.mark.parametrize("draw_at", [shuffled_at, drawn_at])
middle = pytest.mark.parametrize("length", MIDDLE)
large = pytest.mark.parametrize("length", LARGE)


@lru_cache(maxsize=1)
def some_permutations(draw, length):
    permutations = np.stack([draw(length, seed) for seed in range(200 if length <= 1000 else 12)])
    permutations.flags.writeable = False
    return permutations


def p_of_squares(scores):
    """Whether independent standard normal scores are neither too large nor too small."""
    scores = np.asarray(scores, dtype=float)
    return two_sided(stats.chi2(scores.size), float((scores**2).sum()))


def two_sided(distribution, value):
    return min(1.0, 2 * min(distribution.cdf(value), distribution.sf(value)))


def squares_of_table(first, second, num_first, num_second):
    """Chi-square and degrees of freedom of a table of pairs against its own margins."""
    table = np.bincount(first * num_second + second, minlength=num_first * num_second).reshape(num_first, num_second)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return ((table - expected) ** 2 / expected).sum(), (num_first - 1) * (num_second - 1)


def squares_of_counts(buckets, num_buckets):
    """Chi-square and degrees of freedom of equally likely buckets."""
    counts = np.bincount(buckets, minlength=num_buckets)
    expected = buckets.size / num_buckets
    return ((counts - expected) ** 2).sum() / expected, num_buckets - 1


def p_of_sum(squares):
    """The p-value of independent chi-squares, each with its degrees of freedom; too even counts as well."""
    return two_sided(stats.chi2(sum(freedom for _, freedom in squares)), sum(square for square, _ in squares))


@both
def test_all_120_orders_of_five_samples_are_equally_likely(draw):
    counts = Counter(tuple(draw(5, seed)) for seed in range(12_000))
    assert len(counts) == 120
    assert stats.chisquare(list(counts.values())).pvalue > ALMOST_NEVER


@both
def test_all_120_orders_of_five_samples_are_equally_likely_over_epochs(draw):
    counts = Counter(tuple(draw(5, 0, epoch)) for epoch in range(12_000))
    assert len(counts) == 120
    assert stats.chisquare(list(counts.values())).pvalue > ALMOST_NEVER


@both
def test_each_of_52_samples_lands_at_each_place_equally_often(draw):
    table = sum(np.eye(52)[draw(52, seed)] for seed in range(5200))
    square = ((table - 100) ** 2 / 100).sum() * 51 / 52
    assert p_of_sum([(square, 51**2)]) > ALMOST_NEVER


@both
def test_the_first_two_of_52_samples_are_every_pair_equally_often(draw):
    pairs = np.array([draw(52, seed)[:2] for seed in range(6000)])
    gaps = (pairs[:, 1] - pairs[:, 0]) % 52 - 1
    assert p_of_sum([squares_of_counts(gaps, 51)]) > ALMOST_NEVER
    assert p_of_sum([squares_of_table(pairs[:, 0] // 13, gaps // 17, 4, 3)]) > ALMOST_NEVER


@both
@middle
def test_samples_spread_evenly_over_places(draw, length):
    places = np.arange(length) * 25 // length
    squares = [squares_of_table(places, order * 25 // length, 25, 25) for order in some_permutations(draw, length)]
    assert p_of_sum(squares) > ALMOST_NEVER


@both
@middle
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_the_gap_between_neighbours_is_uniform(draw, length, lag):
    gaps = [(order[lag:] - order[:-lag]) % length - 1 for order in some_permutations(draw, length)]
    assert p_of_sum([squares_of_counts(gap * 50 // (length - 1), 50) for gap in gaps]) > ALMOST_NEVER


@both
@middle
def test_neighbours_are_independent(draw, length):
    buckets = some_permutations(draw, length) * 16 // length
    squares = [squares_of_table(order[:-1], order[1:], 16, 16) for order in buckets]
    assert p_of_sum(squares) > ALMOST_NEVER


@both
@middle
def test_triples_of_neighbours_are_independent(draw, length):
    buckets = some_permutations(draw, length) * 4 // length
    squares = [squares_of_table(order[:-2] * 4 + order[1:-1], order[2:], 16, 4) for order in buckets]
    assert p_of_sum(squares) > ALMOST_NEVER


@both
@middle
def test_the_gap_at_every_power_of_two_is_uniform(draw, length):
    squares = []
    for order in some_permutations(draw, length)[:6]:
        for power in range((length // 2).bit_length()):
            gaps = (np.roll(order, -(2**power)) - order) % length - 1
            gaps = gaps[: length // 2] if 2 ** (power + 1) == length else gaps
            squares.append(squares_of_counts(gaps * 64 // (length - 1), 64))
    assert p_of_sum(squares) > ALMOST_NEVER


@both
@middle
def test_neighbours_are_not_correlated(draw, length):
    orders = some_permutations(draw, length)
    correlations = np.array([np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders])
    assert p_of_squares((correlations + 1 / length) * np.sqrt(length)) > ALMOST_NEVER


@both
@middle
def test_half_of_the_neighbours_ascend(draw, length):
    ascents = (np.diff(some_permutations(draw, length)) > 0).sum(1)
    assert p_of_squares((ascents - (length - 1) / 2) / np.sqrt((length + 1) / 12)) > ALMOST_NEVER


@both
@middle
def test_half_of_all_pairs_are_inverted(draw, length):
    taus = np.array([stats.kendalltau(np.arange(length), order).statistic for order in some_permutations(draw, length)])
    assert p_of_squares(taus * 3 * np.sqrt(length * (length - 1) / (2 * (2 * length + 5)))) > ALMOST_NEVER


@both
@middle
def test_permutations_have_as_many_cycles_as_random_ones(draw, length):
    places, orders = np.arange(length), some_permutations(draw, length)
    graphs = [coo_array((np.ones(length), (places, order)), shape=(length, length)) for order in orders]
    num_cycles = sum(connected_components(graph, connection="weak")[0] for graph in graphs)
    reciprocals = 1 / np.arange(1, length + 1)
    mean, variance = reciprocals.sum(), (reciprocals - reciprocals**2).sum()
    assert p_of_squares([(num_cycles - len(orders) * mean) / np.sqrt(len(orders) * variance)]) > ALMOST_NEVER


@both
@pytest.mark.parametrize("length", [52, 1000])
@pytest.mark.parametrize("successive", ["seeds", "epochs"])
def test_samples_that_keep_their_place_are_as_many_as_by_chance(draw, length, successive):
    orders = [draw(length, *((number, 0) if successive == "seeds" else (0, number))) for number in range(1501)]
    kept = Counter(min(int((before == after).sum()), 4) for before, after in pairwise(orders))
    chances = [*stats.poisson.pmf(range(4), 1), stats.poisson.sf(3, 1)]
    observed = [kept[number] for number in range(5)]
    assert stats.chisquare(observed, [1500 * chance for chance in chances]).pvalue > ALMOST_NEVER


@both
@pytest.mark.parametrize("length", [2**16 + 1, 2**17])
def test_samples_of_long_orders_that_keep_their_place_are_as_many_as_by_chance(draw, length):
    kept = sum(int((before == after).sum()) for before, after in pairwise(some_permutations(draw, length)))
    assert two_sided(stats.poisson(11), kept) > ALMOST_NEVER


@both
@middle
def test_successive_epochs_are_independent(draw, length):
    epochs = [draw(length, 0, epoch) * 25 // length for epoch in range(12)]
    assert p_of_sum([squares_of_table(*pair, 25, 25) for pair in pairwise(epochs)]) > ALMOST_NEVER


def random_positions(length, shape, seed=0):
    return np.random.default_rng([length, seed]).integers(0, length, shape)


def p_of_places(draw_at, length):
    squares = []
    for seed in range(6):
        positions = random_positions(length, 2**15, seed)
        places = (positions // (length // 32 + 1)).astype(np.int64)
        squares.append(squares_of_table(places, high_bucket(draw_at(length, seed, positions), length, 32), 32, 32))
    return p_of_sum(squares)


def high_bucket(values, length, num_buckets):
    return np.minimum(values // (length // num_buckets), num_buckets - 1)


def p_of_strides(draw_at, length, bucket):
    """Gaps between the samples at ``position`` and ``position + 2**k``, for every ``k``, in 64 buckets."""
    squares = []
    for seed in range(3):
        powers = 2 ** np.arange((length // 2).bit_length())
        positions = random_positions(length, 2**12, seed) // 2
        samples = draw_at(length, seed, np.concatenate([positions[None], (positions + powers[:, None]) % length]))
        gaps = (samples[1:] - samples[0]) % length
        squares += [squares_of_counts(bucket(gap, length), 64) for gap in gaps]
    return p_of_sum(squares)


def high_gap(gap, length):
    return high_bucket(gap, length, 64)


def low_gap(gap, length):
    return gap & 63


@both_at
@large
def test_samples_of_huge_datasets_spread_evenly_over_places(draw_at, length):
    assert p_of_places(draw_at, length) > ALMOST_NEVER


@both_at
@large
@pytest.mark.parametrize("bucket", [high_gap, low_gap])
def test_gaps_at_every_power_of_two_in_huge_datasets_are_uniform(draw_at, length, bucket):
    assert p_of_strides(draw_at, length, bucket) > ALMOST_NEVER


@both_at
@large
def test_neighbours_in_huge_datasets_are_independent(draw_at, length):
    squares = []
    for seed in range(6):
        start = int(random_positions(length - 2**16, 1, seed)[0])
        buckets = high_bucket(draw_at(length, seed, start + np.arange(2**16)), length, 16)
        squares.append(squares_of_table(buckets[:-1], buckets[1:], 16, 16))
    assert p_of_sum(squares) > ALMOST_NEVER


@both_at
@large
def test_low_bits_of_places_and_samples_in_huge_datasets_are_independent(draw_at, length):
    squares = []
    for seed in range(6):
        positions = random_positions(length, 2**15, seed)
        squares.append(squares_of_table(positions % 32, draw_at(length, seed, positions) % 32, 32, 32))
    assert p_of_sum(squares) > ALMOST_NEVER


@both_at
@large
def test_batches_of_neighbours_in_huge_datasets_come_from_everywhere(draw_at, length):
    # Of 64 random samples in 64 equal parts of the dataset, the number of parts hit has this mean and variance.
    samples = draw_at(length, 3, 12_345 + np.arange(64 * 1000)).reshape(1000, 64)
    hit = np.array([np.unique(high_bucket(batch, length, 64)).size for batch in samples])
    missed, missed_both = (63 / 64) ** 64, (62 / 64) ** 64
    mean = 64 * (1 - missed)
    variance = 64 * missed * (1 - missed) + 64 * 63 * (missed_both - missed**2)
    assert p_of_squares([(hit.sum() - 1000 * mean) / np.sqrt(1000 * variance)]) > ALMOST_NEVER


@both_at
@large
def test_samples_of_huge_datasets_leave_no_lattice(draw_at, length):
    # Birthday spacings: among the sorted gaps of m samples of n, about m**3 / 4n are equal to their neighbour.
    count = int((4 * length * 16) ** (1 / 3))
    equal = 0
    for seed in range(8):
        samples = np.unique(draw_at(length, seed, 10**6 + np.arange(count)))
        equal += int((np.diff(np.sort(np.diff(samples))) == 0).sum())
    assert two_sided(stats.poisson(8 * count**3 / (4 * length)), equal) > ALMOST_NEVER


@both_at
@pytest.mark.parametrize("bits", [17, 20, 33, 40])
def test_one_changed_bit_of_the_place_changes_half_of_the_bits_of_the_sample(draw_at, bits):
    scores = []
    for seed in range(3):
        positions = random_positions(2**bits, 2**12, seed)
        flipped = positions ^ (2 ** np.arange(bits))[:, None]
        samples = draw_at(2**bits, seed, np.concatenate([positions[None], flipped]))
        changed = ((samples[1:] ^ samples[0])[..., None] >> np.arange(bits)) & 1
        scores.append((changed.mean(1) - 0.5) * 2 * np.sqrt(positions.size))
    assert p_of_squares(scores) > ALMOST_NEVER


@pytest.mark.parametrize("length", [2**17, 2**33, 2**40])
def test_the_gaps_find_a_mixer_with_too_few_rounds(length, monkeypatch):
    monkeypatch.setattr(permutation, "_NUM_ROUNDS", 2)

    def weak_at(length, seed, positions):
        return KeyedPermutation(length, seed).take(positions)

    assert p_of_strides(weak_at, length, high_gap) < ALMOST_NEVER
