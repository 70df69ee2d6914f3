"""check_resume finds what a resume gets wrong, says where, and never raises for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.honest import Honest

from lightning_stateful.audit import check_resume
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders import StatefulLoader
from lightning_stateful.samplers import StatefulDistributedSampler
from lightning_stateful.state import sealed


def a_sampler(length: int = 10, **options: Any) -> Any:
    return lambda num_replicas, rank: StatefulDistributedSampler(length, num_replicas, rank, **options)


def test_an_exact_sampler_passes_on_every_rank_and_on_other_numbers_of_ranks() -> None:
    result = check_resume(a_sampler(23), num_replicas=3, resize=(1, 2, 5), stops="every")

    assert result
    assert result.ok
    assert result.divergence is None
    assert str(result).startswith("Resumes exactly: ")


def test_a_second_resume_that_forgets_the_first_is_found_by_the_chain() -> None:
    class ForgetsTheFirstOffset(Honest):
        offset = 0

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.offset = state["consumed"]

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "consumed": max(self.consumed - self.offset, 0)}

    assert check_resume(ForgetsTheFirstOffset, chain=())
    by_default = check_resume(ForgetsTheFirstOffset)
    given = check_resume(ForgetsTheFirstOffset, chain=(3, 2))

    assert by_default.divergence is not None
    assert by_default.divergence.stop == 3
    assert given.divergence is not None
    assert (given.divergence.stop, given.divergence.step) == (5, 5)


def test_a_factory_that_ignores_its_rank_is_found() -> None:
    result = check_resume(lambda num_replicas, rank: StatefulDistributedSampler(10, 1, 0), num_replicas=2)

    assert not result
    assert result.divergence is not None
    assert result.divergence.law == "rank-free"
    assert "all 2 ranks are given the same items" in str(result)
    assert "does not pass num_replicas and rank on" in result.divergence.cause
    # Samples that are all alike say nothing.
    assert check_resume(lambda num_replicas, rank: StatefulDistributedSampler(1, 1, 0), num_replicas=2)


def test_ranks_with_different_numbers_of_items_are_found() -> None:
    divergence = check_resume(lambda num_replicas, rank: Honest(length=8 - rank), num_replicas=2).divergence

    assert divergence is not None
    assert (divergence.law, divergence.rank, divergence.expected, divergence.got) == ("even", 1, 8, 7)


def test_rank_0s_state_is_restored_on_every_rank_unless_each_has_its_own() -> None:
    class YieldsItsRank(Honest):
        def item(self, index: int) -> Any:
            return self.rank, index

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "rank": self.rank}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.rank = state["rank"]

    shared = check_resume(YieldsItsRank, num_replicas=2)

    assert shared.divergence is not None
    assert shared.divergence.rank == 1
    assert check_resume(YieldsItsRank, num_replicas=2, shared_state=False)


def test_a_dropped_tail_needs_to_be_allowed_on_another_number_of_ranks() -> None:
    def factory(num_replicas: int, rank: int) -> StatefulLoader:
        return StatefulLoader(range(16), batch_size=2, num_replicas=num_replicas, rank=rank, drop_last=True)

    refused = check_resume(factory, resize=(4,))

    assert refused.divergence is not None
    assert refused.divergence.what.endswith("pass drop_last=True)")
    assert check_resume(factory, resize=(4, 3), drop_last=True)


def test_allowing_a_dropped_tail_does_not_allow_a_repeated_sample() -> None:
    class StartsAnew(StatefulDistributedSampler):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(sealed({**state, "progress": {**state["progress"], "consumed": 0}}))

    divergence = check_resume(
        lambda num_replicas, rank: StartsAnew(9, num_replicas, rank, drop_last=True),
        stops=[0],
        chain=(),
        resize=(2,),
        drop_last=True,
    ).divergence

    assert divergence is not None
    assert divergence.what.startswith("sample ")
    assert "served once too often" in divergence.what


def test_a_key_says_which_samples_a_batch_holds() -> None:
    class Dicts:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"index": index, "x": torch.full((2,), float(index))}

    def factory(num_replicas: int, rank: int) -> StatefulLoader:
        return StatefulLoader(Dicts(), batch_size=2, shuffle=True, num_replicas=num_replicas, rank=rank)

    with pytest.raises(ConfigurationError, match="Cannot tell which samples a dict holds"):
        check_resume(factory, resize=(3,))
    assert check_resume(factory, resize=(3,), key=lambda batch: batch["index"].tolist())


def test_set_epoch_is_called_before_every_pass_on_demand() -> None:
    class NeedsSetEpoch(Honest):
        def set_epoch(self, epoch: int) -> None:
            if epoch != self.epoch:
                self.epoch, self.consumed = epoch, 0

        def __iter__(self) -> Iterator[Any]:
            for index in self.order()[self.consumed :]:
                self.consumed += 1
                yield index

        def state_dict(self) -> dict[str, Any]:
            done = {"epoch": self.epoch + 1, "consumed": 0} if self.consumed == self.length else {}
            return {**super().state_dict(), **done}

    assert check_resume(NeedsSetEpoch, set_epoch=True, stops="every")
    assert check_resume(a_sampler(), num_replicas=2, set_epoch=True, stops="every")
    assert not check_resume(NeedsSetEpoch)


def test_an_endless_iterable_is_compared_up_to_max_items() -> None:
    class Endless(Honest):
        def order(self) -> Any:
            return range(self.length)

    endless = partial(Endless, length=10**9)
    assert check_resume(endless, max_items=20)
    with pytest.raises(ConfigurationError, match="leave max_items out"):
        check_resume(endless, max_items=20, resize=(2,))


def test_an_error_in_the_users_code_propagates_with_a_note_that_says_where() -> None:
    class Fails(Honest):
        def item(self, index: int) -> int:
            if (self.epoch, self.consumed) == (1, 4):
                raise OSError("disk on fire")
            return index

    with pytest.raises(OSError, match="disk on fire") as caught:
        check_resume(Fails)

    assert caught.value.__notes__ == ["Raised while iterating, rank 0 of 1, at epoch 1, step 3."]


@pytest.mark.parametrize("factory", [lambda: Honest(), lambda num_replicas: Honest()])
def test_a_factory_of_other_arguments_is_refused(factory: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"called as factory\(num_replicas, rank\), and takes \("):
        check_resume(factory)


def test_an_object_without_a_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"returned a list without state_dict\(\)"):
        check_resume(lambda num_replicas, rank: [1, 2, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"resize": (2, 0)}, "resize must be at least 1, got 0"),
        ({"stops": [3, 99]}, r"numbers from 0 to 24 .* got \[99\]"),
        ({"chain": [2, -1]}, r"chain must be numbers from 0, got \[-1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_resume(Honest, **options)
