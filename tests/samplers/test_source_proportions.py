"""Shares come out over an epoch as they were asked for, on real text and on any number of ranks."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stateful.samplers import MixtureBatchSampler

DATA = Path(__file__).parents[3] / "shared" / "data"
real_text = pytest.mark.skipif(not list(DATA.glob("*.txt")), reason="the text is not part of the project")


@cache
def word_counts() -> dict[str, Any]:
    """Words of every line that has any, in sources as unlike as headings, the short half and the long half."""
    lines = [line for path in sorted(DATA.glob("*.txt")) for line in path.read_text(encoding="utf-8").splitlines()]
    counts = {line: len(line.split()) for line in lines if line.strip()}
    headings = [count for line, count in counts.items() if line.strip().startswith("=")]
    text = sorted(count for line, count in counts.items() if not line.strip().startswith("="))
    half = len(text) // 2
    parts = {"headings": headings, "short": text[:half], "long": text[half:]}
    return {name: np.random.default_rng(0).permutation(part) for name, part in parts.items()}


def tokens_served(sampler: MixtureBatchSampler, lengths: dict[str, Any]) -> dict[str, int]:
    """Counted sample by sample."""
    flat = np.concatenate(list(lengths.values()))
    ends = np.cumsum([len(part) for part in lengths.values()])
    indices = np.array([index for batch in sampler for index in batch])
    sources = np.searchsorted(ends, indices, side="right")
    return {name: int(flat[indices[sources == number]].sum()) for number, name in enumerate(lengths)}


def shares(counts: dict[str, int]) -> list[float]:
    return [count / sum(counts.values()) for count in counts.values()]


@real_text
class TestRealText:
    @pytest.mark.parametrize("batch_size", [4, {"headings": 16, "short": 4, "long": 2}], ids=["one size", "three"])
    @pytest.mark.parametrize("weights", [[1, 1, 1], [1, 4, 5], [0.1, 0.6, 0.3]], ids=str)
    def test_by_token_shares_are_right_within_a_percent_of_an_epoch(self, weights: Any, batch_size: Any) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(
            lengths, batch_size, weights=weights, by="token", token_lengths=lengths, stop="cycle", seed=3
        )

        expected = np.array(weights) / sum(weights)
        assert shares(tokens_served(sampler, lengths)) == pytest.approx(expected.tolist(), abs=0.01)

    def test_by_token_shares_are_right_on_several_ranks_together(self) -> None:
        lengths, served = word_counts(), Counter[str]()
        for rank in range(3):
            sampler = MixtureBatchSampler(
                lengths,
                4,
                weights=[1, 2, 2],
                by="token",
                token_lengths=lengths,
                num_steps=4000,
                num_replicas=3,
                rank=rank,
            )
            served.update(tokens_served(sampler, lengths))

        assert shares(dict(served)) == pytest.approx([0.2, 0.4, 0.4], abs=0.01)

    def test_by_default_every_token_is_served_once_in_an_epoch(self) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(lengths, 4, by="token", token_lengths=lengths)

        assert tokens_served(sampler, lengths) == {name: int(part.sum()) for name, part in lengths.items()}

    def test_reports_count_tokens_closely_and_exactly_after_whole_passes(self) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(lengths, 4, by="token", token_lengths=lengths, weights=[1, 2, 2], num_steps=3000)
        served = tokens_served(sampler, lengths)
        reported = {name: counts["tokens"] for name, counts in sampler.position_report()["sources"].items()}

        assert reported == pytest.approx(served, rel=0.03)
        whole = MixtureBatchSampler({"text": len(lengths["long"])}, 1, token_lengths={"text": lengths["long"]})
        list(whole)
        end = whole.order.report(whole.plan.end(whole.plan.begin(0)))["sources"]
        assert end["text"]["tokens"] == lengths["long"].sum()


class TestAnyLengths:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_by_batch_every_block_of_turns_is_exact(self, ranks: int) -> None:
        sampler = MixtureBatchSampler(
            [300, 500, 200], 2, weights=[2, 5, 3], num_steps=100, num_replicas=ranks, rank=ranks - 1
        )
        sources = [int(np.searchsorted([300, 800, 1000], batch[0], side="right")) for batch in sampler]

        assert {tuple(sorted(sources[start : start + 10])) for start in range(0, 100, 10)} == {
            (0, 0, 1, 1, 1, 1, 1, 2, 2, 2)
        }

    def test_shares_that_are_never_whole_are_right_over_many_blocks(self) -> None:
        weights = [0.123457, 0.51, 0.366543]
        sampler = MixtureBatchSampler([300, 500, 200], 2, weights=weights, num_steps=20_000)
        state = sampler.plan.after(sampler.position, 20_000)

        found = [counts["share"] for counts in sampler.order.report(state)["sources"].values()]
        assert found == pytest.approx(weights, abs=2e-4)

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_by_sample_shares_are_exact_over_all_ranks(self, ranks: int) -> None:
        samplers = [
            MixtureBatchSampler([30, 50], 5, by="sample", weights=[2, 3], num_steps=40, num_replicas=ranks, rank=rank)
            for rank in range(ranks)
        ]
        indices = [index for sampler in samplers for batch in sampler for index in batch]

        assert sum(index < 30 for index in indices) / len(indices) == 0.4
