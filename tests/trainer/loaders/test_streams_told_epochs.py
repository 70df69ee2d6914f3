"""Streams of shards that a hook tells an epoch: the trainer's decides, and another one is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.runs import train_alone
from torch.utils.data import DataLoader

from lightning_stateful import ChunkedDataset
from lightning_stateful.errors import StatefulWarning


def sample(number: int) -> dict[str, Any]:
    return {"id": number, "x": torch.full((4,), number / 100)}


def read(chunk: int) -> list[dict[str, Any]]:
    return [sample(5 * chunk + number) for number in range(5)]


def of_chunks() -> Any:
    return ChunkedDataset(range(4), read)


def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from ({"id": 5 * shard + number, "x": [shard / 100] * 4} for number in range(5))


def of_hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]}).with_format("torch")


class Tells(pl.Callback):
    """Tells a dataset the epoch that comes, or another one, in a hook."""

    def __init__(self, dataset: Any, hook: str, more: int) -> None:
        self.dataset, self.more = dataset, more
        setattr(self, hook, self.tell)

    def tell(self, trainer: pl.Trainer, module: Any) -> None:
        self.dataset.set_epoch(trainer.current_epoch + self.more)


@pytest.mark.parametrize("make", [of_chunks, of_hugging_face])
@pytest.mark.parametrize(
    ("hook", "more", "is_another"),
    [
        ("on_train_epoch_start", 0, False),
        ("on_train_epoch_end", 1, False),
        ("on_train_epoch_start", 10, True),
        ("on_train_epoch_end", 0, True),
        ("on_train_epoch_end", 7, True),
    ],
)
def test_another_epoch_than_the_one_that_is_read_is_warned_of_once(
    make: Any, hook: str, more: int, is_another: bool
) -> None:
    dataset = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = train_alone(lambda: DataLoader(dataset, batch_size=5), callbacks=[Tells(dataset, hook, more)])
        alone = train_alone(lambda: DataLoader(make(), batch_size=5))
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    assert [one.startswith("Something else has called set_epoch(") for one in said] == [True] * is_another, said
    assert told.ledger == alone.ledger
