"""Seeds are hashes of labels: equal on every platform and in every version, and never a sum."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.seeding import derive_seed, derive_seed_within, loader_seed, mixed_seed

# Few letters, so that labels are often alike: those of the encoding, and one of two bytes.
TEXTS = st.lists(st.sampled_from("is12:-ä"), max_size=5).map("".join)
LABELS = st.lists(st.one_of(st.integers(), TEXTS), max_size=4)


def blake2b_of(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


@pytest.mark.parametrize(
    ("labels", "encoded"), [(("shuffle", 12, -3), b"s7:shufflei2:12i2:-3"), (("ä",), b"s2:\xc3\xa4")]
)
def test_a_seed_is_the_blake2b_hash_of_tagged_and_counted_labels(labels: Any, encoded: bytes) -> None:
    assert derive_seed(*labels) == blake2b_of(encoded)


def test_mixed_seeds_never_change_between_versions() -> None:
    seeds = [mixed_seed(7, 0), mixed_seed(7, 1, 2), mixed_seed(7, 2, 1)]

    assert seeds == [7191089600892374487, 10274041424000653043, 7104948020671887413]


@given(LABELS, LABELS)
def test_two_lists_of_labels_give_one_seed_only_if_they_are_equal(first: list[Any], second: list[Any]) -> None:
    assert (derive_seed(*first) == derive_seed(*second)) == (first == second)


@given(LABELS, LABELS)
def test_a_seed_within_first_labels_is_that_of_all_labels(first: list[Any], others: list[Any]) -> None:
    assert derive_seed_within(tuple(first), *others) == derive_seed(*first, *others)


def test_a_loader_that_stands_alone_keeps_its_seed_and_others_draw_from_their_paths() -> None:
    assert loader_seed(5, "") == 5
    assert len({loader_seed(seed, path) for seed in (5, 6) for path in ("", "0", "1", "a.0")}) == 8
