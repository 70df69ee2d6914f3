"""Samplers that copies, or slots drawn ahead, once got wrong."""

from __future__ import annotations

import copy
import random
from array import array
from collections import UserList, deque
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from lightning_stateful.core import Progress
from lightning_stateful.errors import StatefulWarning, UnsupportedLoaderError
from lightning_stateful.samplers.wrapped_sampler import WrappedSampler


def batches_of(order: WrappedSampler, epoch: int = 0, progress: Progress | None = None) -> list[Any]:
    return [batch for _, batch in order.plan(epoch, 1, progress).batches(0)]


class Sliding:
    """Yields one container again and again."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        window = copy.copy(self.container)
        for index in range(300):
            window.append(index)
            if len(window) > 3:
                del window[0]
            yield window


class Nested:
    """Yields one list of one list again and again."""

    def __iter__(self) -> Iterator[Any]:
        batch = [[0]]
        for index in range(300):
            batch[0][0] = index
            yield batch


@pytest.mark.parametrize("container", [[], deque(), UserList(), array("q")], ids=["list", "deque", "UserList", "array"])
def test_a_container_that_is_yielded_again_and_again_is_served_as_it_was_each_time(container: Any) -> None:
    served = batches_of(WrappedSampler(Sliding(container), batch_size=None, length="unknown"))

    assert [list(batch) for batch in served] == [list(range(max(last - 2, 0), last + 1)) for last in range(300)]


def test_lists_within_a_batch_are_served_as_they_were() -> None:
    assert batches_of(WrappedSampler(Nested(), batch_size=None, length="unknown")) == [[[n]] for n in range(300)]


class EndsByChanging:
    """Changes something at the end of a pass of more slots than the check follows."""

    def __init__(self, shared: list[Any]) -> None:
        self.epoch, self.shared = 0, shared

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(5000), 5000) if not self.shared else self.indices()
        self.epoch += 1
        random.Random(self.epoch).shuffle(self.shared)
        for number, held in enumerate(self.shared):
            held.number = number

    def indices(self) -> Iterator[int]:
        yield from (held.number for held in self.shared for _ in range(4))

    def __len__(self) -> int:
        return 4 * len(self.shared) if self.shared else 5000


class Held:
    def __init__(self, number: int) -> None:
        self.number = number


def test_a_sampler_that_counts_epochs_at_the_end_of_a_long_pass_is_warned_of() -> None:
    order = WrappedSampler(EndsByChanging([]))
    with pytest.warns(StatefulWarning, match="all epochs are alike, in the order of the first"):
        first = batches_of(order)

    assert batches_of(order, 1) == first


def test_a_sampler_that_changes_what_its_copies_share_is_refused_when_its_pass_ends() -> None:
    order = WrappedSampler(EndsByChanging([Held((7 * number) % 1250) for number in range(1250)]))

    with pytest.raises(UnsupportedLoaderError, match="EndsByChanging changed data in the course of a pass"):
        batches_of(order)


class Proxy:
    """Hands every attribute on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Unpicklable(Proxy):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not to be pickled")


class Shuffled:
    def __init__(self) -> None:
        self.indices = list(range(50))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@pytest.mark.parametrize("kind", [Proxy, Unpicklable])
def test_what_a_proxy_holds_is_copied_and_the_users_own_stays_as_it_is(kind: type[Proxy]) -> None:
    inner = Shuffled()
    order = WrappedSampler(kind(inner))

    assert batches_of(order) == batches_of(order) != batches_of(order, 1)
    assert inner.indices == list(range(50))


def test_a_proxy_of_a_distributed_sampler_is_dealt_out_as_one_sequence() -> None:
    order = WrappedSampler(Proxy(DistributedSampler(range(64), num_replicas=2, rank=1)))  # type: ignore[arg-type]
    served = [index for rank in range(2) for _, batch in order.plan(0, 2).batches(rank) for index in batch]

    assert sorted(served) == list(range(64))


class BadState(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no")


def test_a_sampler_whose_state_cannot_be_loaded_is_fast_forwarded() -> None:
    order = WrappedSampler(BadState())
    plan = order.plan(0, 1)

    assert order.resume_mode == "fast_forward"
    assert batches_of(order, 0, plan.progress_after(30)) == batches_of(order)[30:]
