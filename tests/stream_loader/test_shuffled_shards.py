"""Hugging Face streams whose files come in another order in each epoch that they are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from datasets import IterableDataset
from torch.utils.data import DataLoader

from lightning_stateful import patch_dataloader

SHARDS = 8


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": 10 * shard + number} for number in range(3))


def made(*, shuffles: bool, takes: int = 0) -> Any:
    dataset = IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(SHARDS))})
    dataset = dataset.shuffle(seed=3, buffer_size=2) if shuffles else dataset
    return dataset.take(takes) if takes else dataset


def orders(dataset: Any, num_epochs: int) -> list[tuple[int, ...]]:
    """The order in which the shards come in each epoch; all of them do."""
    loader: Any = patch_dataloader(DataLoader(dataset, batch_size=3), seed=0)
    found = []
    for _ in range(num_epochs):
        shards = [int(number) // 10 for batch in loader for number in batch["x"]]
        assert sorted(shards) == sorted([*range(SHARDS)] * 3)
        found.append(tuple(dict.fromkeys(shards)))
    return found


@pytest.mark.filterwarnings("ignore:.*has a resume read the shard again:lightning_stateful.errors.StatefulWarning")
def test_files_of_one_that_is_shuffled_come_in_another_order_in_each_epoch() -> None:
    found = orders(made(shuffles=True), 4)
    assert len({*found}) == 4
    assert found == orders(made(shuffles=True), 4)


def test_those_of_another_come_in_their_order() -> None:
    assert {*orders(made(shuffles=False), 3)} == {tuple(range(SHARDS))}
