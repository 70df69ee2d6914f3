"""Plans of packed sequences: every token of an epoch once, with random access, against plain Python."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lightning_stateful.core.permutation import Indices
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing import Packing, split, whole
from lightning_stateful.packing import plan as plan_module
from lightning_stateful.packing.plan import PackingPlan, Part, SequenceOrder
from lightning_stateful.packing.split import SplitPlan
from lightning_stateful.packing.whole import WholePlan, best_fit_decreasing


def lengths_of(rng: random.Random, count: int, most: int) -> Any:
    """Lengths up to ``most``, short ones more often."""
    return np.array([1 + int(most * rng.random() ** 3) for _ in range(count)], dtype=rng.choice([np.uint16, np.int64]))


def epoch_of(plan: PackingPlan, epoch: int) -> list[list[Part]]:
    # Some at once, as batches are.
    found: list[list[Part]] = []
    for first in range(0, plan.num_sequences, 50):
        numbers = np.arange(first, min(first + 50, plan.num_sequences))
        parts = plan.parts_of(numbers, epoch)
        rows = map(Part, parts.documents.tolist(), parts.firsts.tolist(), parts.ends.tolist())
        found += [list(islice(rows, count)) for count in parts.counts.tolist()]
    return found


def sizes(sequences: list[list[Part]]) -> list[int]:
    return [sum(part.end - part.first for part in parts) for parts in sequences]


def tokens(sequences: list[list[Part]]) -> list[tuple[int, int]]:
    """Document and place of every token."""
    return [(part.document, at) for parts in sequences for part in parts for at in range(part.first, part.end)]


@pytest.fixture(params=["one column", "several"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few documents in columns, as many are."""
    if request.param == "several":
        monkeypatch.setattr(split, "_ONE_COLUMN", 4)
        monkeypatch.setattr(split, "_ROWS", 7)


# Split


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("seed", range(12))
def test_documents_of_an_epoch_are_joined_and_cut_each_token_once(seed: int) -> None:
    rng = random.Random(seed)
    lengths = lengths_of(rng, rng.choice([1, 2, 6, 8, 14, 50, 300]), rng.choice([1, 5, 60]))
    length, separators = rng.choice([1, 4, 16, 50]), rng.choice([0, 1])
    plan = SplitPlan(lengths, length, separators, rng.choice([None, 3]))
    for epoch in (0, 5):
        found = epoch_of(plan, epoch)
        order = list(dict.fromkeys(part.document for parts in found for part in parts))
        joined = [(document, at) for document in order for at in range(int(lengths[document]) + separators)]
        assert tokens(found) == joined
        assert sorted(order) == list(range(len(lengths)))
        assert sizes(found)[:-1] == [length] * (len(found) - 1)
        assert 0 < sizes(found)[-1] <= length
        assert plan.num_tokens == len(joined)


@pytest.mark.usefixtures("columns")
def test_epochs_and_seeds_shuffle_documents_anew() -> None:
    lengths = lengths_of(random.Random(1), 120, 9)

    def order(seed: int | None, epoch: int) -> tuple[int, ...]:
        parts = (part for parts in epoch_of(SplitPlan(lengths, 16, 0, seed), epoch) for part in parts)
        return tuple(dict.fromkeys(part.document for part in parts))

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in range(3)}) == 6
    assert order(None, 0) == order(None, 7) == tuple(range(120))


def test_a_document_takes_every_place_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_ONE_COLUMN", 4)
    monkeypatch.setattr(split, "_ROWS", 8)
    plan = SplitPlan(np.ones(50, dtype=np.int64), 1, 0, 0)
    places = Counter()
    for epoch in range(200):
        order = [parts[0].document for parts in epoch_of(plan, epoch)]
        places[order.index(37)] += 1
    # Binomial: 4 a place, and a deviation of 2.
    assert len(places) > 45
    assert max(places.values()) <= 16


# Whole


def best_fit(counts: Indices, length: int) -> Counter[tuple[int, ...]]:
    """The lengths in each sequence, of documents packed one after the other, the longest first."""
    held: list[list[int]] = []
    for size in reversed(range(1, length + 1)):
        for _ in range(int(counts[size])):
            fitting = [sequence for sequence in held if sum(sequence) + size <= length]
            if not fitting:
                held.append([])
            (max(fitting, key=sum) if fitting else held[-1]).append(size)
    return Counter(tuple(sequence) for sequence in held)


@pytest.mark.parametrize("seed", range(20))
def test_patterns_are_those_of_best_fit_decreasing_document_by_document(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.choice([1, 2, 10, 33, 100])
    counts = np.bincount([rng.randint(0, length) for _ in range(rng.choice([1, 10, 300]))], minlength=length + 1)
    found: Counter[tuple[int, ...]] = Counter()
    for number, items in best_fit_decreasing(counts, length):
        found[tuple(size for size, each in items for _ in range(each))] += number
    assert sorted(map(sum, found.elements())) == sorted(map(sum, best_fit(counts, length).elements()))
    assert Counter(size for each in found.elements() for size in each) == Counter(
        size for each in best_fit(counts, length).elements() for size in each
    )


@pytest.mark.parametrize("too_long", ["drop", "truncate", "split"])
@pytest.mark.parametrize("seed", range(6))
def test_whole_documents_come_once_and_long_ones_as_told(seed: int, too_long: Any) -> None:
    rng = random.Random(seed)
    lengths, length = lengths_of(rng, rng.choice([3, 40, 3000]), rng.choice([20, 70])), 16
    packing = Packing(length, how="whole", too_long=too_long, separator=rng.choice([None, 9]))
    plan = WholePlan(lengths, packing, rng.choice([None, 4]))
    expected = []
    for document, tokens_in in enumerate((lengths.astype(int) + packing.num_separators).tolist()):
        kept = {"drop": 0, "truncate": length, "split": tokens_in}[too_long] if tokens_in > length else tokens_in
        expected += [(document, at) for at in range(kept)]
    for epoch in (0, 3):
        found = epoch_of(plan, epoch)
        assert sorted(tokens(found)) == expected
        assert max(sizes(found), default=0) <= length
        # A part of a document is a full sequence, or the rest of it.
        parts = [part for parts in found for part in parts]
        assert all(part.first % length == 0 for part in parts)
    assert plan.num_tokens == len(expected)
    assert plan.num_dropped == (sum(lengths + packing.num_separators > length) if too_long == "drop" else 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("how", ["split", "whole"])
def test_lengths_as_large_as_their_type_hold_a_separator_more(how: Any, dtype: Any) -> None:
    most = int(np.iinfo(dtype).max)
    lengths = np.array([most, 3, most - 1, 1], dtype=dtype)
    packing = Packing(most + 1, how=how, separator=9)
    plan = WholePlan(lengths, packing, 1) if packing.is_whole else SplitPlan(lengths, most + 1, 1, 1)
    found = sorted(tokens(epoch_of(plan, 0)))
    assert found == [(document, at) for document, size in enumerate(lengths.tolist()) for at in range(size + 1)]


def test_epochs_and_seeds_put_other_documents_together() -> None:
    lengths = lengths_of(random.Random(2), 3000, 16)
    packing = Packing(32, how="whole")

    def sequences(seed: int | None, epoch: int) -> list[tuple[int, ...]]:
        return [tuple(part.document for part in parts) for parts in epoch_of(WholePlan(lengths, packing, seed), epoch)]

    found = [sequences(seed, epoch) for seed in (0, 1) for epoch in range(2)]
    for number, one in enumerate(found):
        for other in found[:number]:
            assert one != other
            assert len(set(one) & set(other)) < len(one) / 20
    assert sequences(None, 0) == sequences(None, 1)


def test_little_is_padded() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 1, 30_000).astype(np.int64) + 1, 512)
    plan = WholePlan(lengths, Packing(512, how="whole"), 0)
    assert plan.num_sequences <= -(-int(lengths.sum()) // 512) * 1.001


def test_a_document_that_is_too_long_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Document 2 has 10 tokens, its separator counted, and .* has 9"):
        WholePlan(np.array([3, 8, 9, 30]), Packing(9, how="whole", separator=1), 0)


@pytest.mark.parametrize("how", ["split", "whole"])
def test_any_sequence_of_any_epoch_is_found_by_itself_in_any_process(how: Any) -> None:
    lengths = lengths_of(random.Random(3), 500, 40)
    packing = Packing(64, how=how)
    plan = WholePlan(lengths, packing, 1) if how == "whole" else SplitPlan(lengths, 64, 1, 1)
    whole = {epoch: epoch_of(plan, epoch) for epoch in range(4)}
    again = pickle.loads(pickle.dumps(plan))
    some = np.array([7, 3, 3, plan.num_sequences - 1])
    several = again.parts_of(some, 2)
    assert several.counts.tolist() == [len(whole[2][number]) for number in some.tolist()]
    assert several.documents.tolist() == [part.document for number in some.tolist() for part in whole[2][number]]
    for _ in range(200):
        epoch = random.randrange(4)
        number = random.randrange(again.num_sequences)
        assert again.parts(number, epoch) == whole[epoch][number]


def test_the_order_names_epochs_and_passes_within_one() -> None:
    order = SequenceOrder(5, Packing(8), "digest", seed=3)
    offsets = np.array([0, 4])
    found = {tuple(order.take(offsets, epoch, cycle).tolist()) for epoch in range(3) for cycle in range(3)}
    assert order.take(offsets, 2, 0).tolist() == [10, 14]
    assert len(found) == 9
    assert SequenceOrder(5, Packing(8), "digest", seed=None).config() != order.config()


# Counts


def counted(plan: PackingPlan, lengths: Any, packing: Packing, epoch: int, number: int) -> tuple[int, int, int]:
    """The same by looking at every sequence."""
    parts = [part for each in range(number) for part in plan.parts(each, epoch)]
    sizes = {part.document: int(lengths[part.document]) + packing.num_separators for part in parts}
    truncates, length = packing.too_long == "truncate", packing.sequence_length
    ended = [
        part for part in parts if part.end == (min(sizes[part.document], length) if truncates else sizes[part.document])
    ]
    cut = [part for part in ended if part.first > 0 or (truncates and sizes[part.document] > length)]
    return sum(part.end - part.first for part in parts), len(ended), len(cut)


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("too_long", [None, "drop", "truncate", "split"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_what_an_epoch_has_served_is_counted(seed: int | None, too_long: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(plan_module, "_COUNTED_AT_ONCE", 5)
    monkeypatch.setattr(whole, "_AT_ONCE", 3)
    lengths = lengths_of(rng, 90, rng.choice([12, 40]))
    packing = Packing(rng.choice([8, 11]), how="whole" if too_long else "split", too_long=too_long, separator=0)
    arguments = (packing, seed) if too_long else (packing.sequence_length, 1, seed)
    plan: PackingPlan = (WholePlan if too_long else SplitPlan)(lengths, *arguments)  # type: ignore[arg-type]
    for epoch in (0, 3, 0):
        at = 0
        while at <= plan.num_sequences:
            assert plan.counts(at, epoch) == counted(plan, lengths, packing, epoch, at), (epoch, at)
            at += rng.randint(-min(at, 3), 24)
        some = rng.sample(range(plan.num_sequences), min(plan.num_sequences, 7))
        held = [part.end - part.first for each in some for part in plan.parts(each, epoch)]
        assert plan.tokens_of(some, epoch) == sum(held)
    assert plan.counts(plan.num_sequences, 1).tokens == plan.num_tokens
