"""The sampler and batch sampler of a patched loader: the user's own, whose attributes are read, set and followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_stateful import DDPSamplerWrapper, patch_dataloader
from lightning_stateful.errors import StatefulWarning

DATA = torch.arange(24)


class Part(Sampler[int]):
    part = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * self.part, 4 * self.part + 4))

    def set_part(self, part: int) -> None:
        self.part = part


class PartInBatches(Part):
    def __iter__(self) -> Iterator[Any]:
        return ([index, index] for index in super().__iter__())


class Batches(BatchSampler):
    """A class of the user's own."""


def of_sampler() -> Any:
    return DataLoader(DATA, batch_size=2, sampler=Part())


def of_batches() -> Any:
    return DataLoader(DATA, batch_sampler=PartInBatches())


def of_own_class() -> Any:
    return DataLoader(DATA, batch_sampler=Batches(SequentialSampler(DATA), 3, False))


def of_weights() -> Any:
    return DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] + [0.0] * 23, 4))


def set_part(holder: Any, epoch: int) -> None:
    holder.part = epoch


def set_batch_size(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = 3 + epoch


def set_weights(loader: Any, epoch: int) -> None:
    loader.sampler.weights = torch.eye(24, dtype=torch.double)[epoch]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "sampler": (of_sampler, lambda loader, epoch: set_part(loader.sampler, epoch)),
    "sampler of the batch sampler": (of_sampler, lambda loader, epoch: set_part(loader.batch_sampler.sampler, epoch)),
    "batch sampler": (of_batches, lambda loader, epoch: set_part(loader.batch_sampler, epoch)),
    "method": (of_batches, lambda loader, epoch: loader.batch_sampler.set_part(epoch)),
    "batch size": (of_own_class, set_batch_size),
    "weights": (of_weights, set_weights),
}


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs by something else")
@pytest.mark.filterwarnings("ignore:.*no longer yields what it did before training")
@pytest.mark.parametrize("case", CASES)
def test_what_is_set_between_epochs_is_followed_as_in_torch(case: str) -> None:
    make, change = CASES[case]
    found = []
    for loader in (make(), patch_dataloader(make())):
        found.append([])
        for epoch in range(3):
            change(loader, epoch)
            found[-1].append([batch.tolist() for batch in loader])
    assert found[0] == found[1]


def test_attributes_are_those_of_the_users_object_also_in_a_wrapper() -> None:
    part = Part()
    ours = patch_dataloader(DataLoader(DATA, batch_size=2, sampler=DDPSamplerWrapper(part)))
    ours.sampler.part = 2
    assert (part.part, ours.sampler.part, list(ours.sampler)) == (2, 2, [8, 9, 10, 11])
    with pytest.raises(AttributeError, match="absent"):
        _ = ours.sampler.absent


def set_generator(loader: Any) -> None:
    loader.sampler.generator = torch.Generator()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_generator, "generator of RandomSampler was set on a patched loader"),
        (lambda loader: set_batch_size(loader, 1), "batch_size of BatchSampler was set on a patched loader"),
    ],
)
def test_what_cannot_be_followed_is_warned_of_once(change: Callable[[Any], None], said: str) -> None:
    ours = patch_dataloader(DataLoader(DATA, batch_size=3, shuffle=True))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", StatefulWarning)
        change(ours)
        assert [len(batch) for _ in range(2) for batch in ours] == [3] * 16
    assert [str(warning.message).partition(", which")[0] for warning in found] == [said]


def test_a_loader_of_which_nothing_is_set_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make, _ in CASES.values():
            list(patch_dataloader(make()))
