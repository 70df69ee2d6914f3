"""Datasets whose state is large: it goes from a worker to the loader only when it changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.large_states import RemembersMuch, assert_gives_the_same
from support.stream_cases import InThisProcess, plain, stream_loader
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_stateful.errors import PositionError
from lightning_stateful.stream_loader import stream_run
from lightning_stateful.stream_loader.rank_store import Changes


def much(**options: Any) -> Any:
    """A loader of a dataset that nobody has read."""
    return stream_loader(RemembersMuch(), batch_size=30, **options)


@pytest.mark.parametrize(
    ("num_workers", "persistent_workers", "kind"),
    [(0, False, DataLoader), (2, False, InThisProcess), (2, True, DataLoader)],
)
def test_it_goes_on_exactly(num_workers: int, persistent_workers: bool, kind: Any) -> None:
    make = partial(much, num_workers=num_workers, persistent_workers=persistent_workers, kind=kind)

    assert_gives_the_same(make, [7, 0, 1, 24, 5], total=45)


def test_a_delivery_is_small_unless_the_state_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[Changes] = []

    def complete(changes: Any, before: Any) -> Any:
        delivered.append(changes)
        return completes(changes, before)

    completes = stream_run.complete
    monkeypatch.setattr(stream_run, "complete", complete)
    loader = much(num_workers=2, kind=InThisProcess)
    for _ in range(2):
        delivered.clear()
        assert len(list(loader)) == 30
        # Of one sample for 16 characters.
        assert 2 <= sum(any(large.values()) for _, large in delivered) <= 12
        assert all(len(text) < 400 for text, _ in delivered)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_pins_memory_goes_on_exactly(num_workers: int) -> None:
    """As on a machine with a GPU, where torch hands every delivery to ``pin_memory``."""

    class Pins(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return map(pin_memory, super()._get_iterator())

        def __iter__(self) -> Any:
            return self._get_iterator()

    assert_gives_the_same(
        partial(much, num_workers=num_workers, kind=Pins, pin_memory=True, collate_fn=list), [7, 20], total=30
    )


def test_a_rank_with_fewer_batches_than_a_state_of_another_says_is_told_so() -> None:
    def make(rank: int) -> Any:
        # Of 20 samples and of 6.
        dataset = RemembersMuch(26)
        dataset.share = lambda: list(range(20 if rank == 0 else 6))  # type: ignore[method-assign]
        return stream_loader(dataset, num_replicas=2, rank=rank)

    first, second = make(0), make(1)
    for _, batch in zip(range(8), first, strict=False):
        assert len(plain(batch)) == 3
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        with pytest.raises(PositionError, match=r"each rank was given 8 batches(.|\n)*rank 1(.|\n)*has only 3\."):
            list(second)
