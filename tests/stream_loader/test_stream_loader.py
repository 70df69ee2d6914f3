"""A loader over an iterable dataset."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import ChunkedDataset, is_patched, patch_dataloader
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.stream_loader import StreamLoader, StreamOptions


class Draws(IterableDataset[Any]):
    """Numbers drawn from all three global generators, told the epoch."""

    def __init__(self, length: int = 13) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, self.length, step):
            drawn = random.randrange(10**6), int(np.random.randint(10**6)), int(torch.randint(10**6, ()))
            yield torch.tensor([self.epoch, number, *drawn])


def patched(length: int = 13, num_replicas: int = 1, rank: int = 0, **options: Any) -> Any:
    loader = DataLoader(Draws(length), **{"batch_size": 2, **options})
    return patch_dataloader(loader, seed=3, num_replicas=num_replicas, rank=rank)


def read(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_a_stream_is_patched_into_a_loader_of_streams_once() -> None:
    loader = patched()

    assert isinstance(loader, StreamLoader)
    assert is_patched([loader])
    assert patch_dataloader(loader) is loader


def test_ranks_and_epochs_draw_otherwise() -> None:
    loader = patched()
    drawn = [read(loader), read(loader), read(patched(num_replicas=2, rank=1))]

    assert [batch[0][:2] for batch in drawn[1]] == [[1, number] for number in range(0, 13, 2)]
    assert len({str([row[2:] for batch in run for row in batch]) for run in drawn}) == 3


def test_a_resume_tells_its_cost() -> None:
    loader, fresh = patched(), patched()
    next(iter(loader))
    fresh.load_state_dict(loader.state_dict())

    with pytest.warns(StatefulWarning, match=r"2 samples of Draws .* were read again.*took \d+\.\d s"):
        read(fresh)


def test_a_loader_of_streams_has_the_attributes_of_its_loader_and_no_length() -> None:
    loader = patched(batch_size=3)
    loader.worker_init_fn = print

    assert (loader.batch_size, loader.worker_init_fn) == (3, print)
    with pytest.raises(TypeError, match="Draws is a stream"):
        len(loader)


def read_drawing(chunk: int) -> Iterator[Any]:
    for number in range(40):
        yield torch.tensor([chunk, number, int(np.random.randint(10**6)), random.randrange(10**6)])


@pytest.mark.parametrize("make", [Draws, lambda: ChunkedDataset(range(3), read_drawing)], ids=["draws", "chunks"])
def test_the_process_draws_what_it_would_have_drawn_without_the_loader(make: Any) -> None:
    def drawn(with_each: Any) -> list[Any]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        return [(float(torch.rand(())), float(np.random.rand()), random.random()) for _ in islice(with_each, 5)]

    loader = patch_dataloader(DataLoader(make(), batch_size=1), seed=0)
    assert drawn(loader) == drawn(range(5))


def test_a_copy_of_a_loader_that_is_read_draws_at_the_same_path() -> None:
    loader = StreamLoader(DataLoader(ChunkedDataset(range(3), read_drawing), batch_size=4), StreamOptions(path="a"))
    whole = [batch.tolist() for batch in loader]

    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == whole


def test_what_a_collate_fn_draws_is_something_else_for_every_batch_of_every_pass() -> None:
    chunks = ChunkedDataset([range(9)] * 4, iter)
    loader = patch_dataloader(DataLoader(chunks, batch_size=2, collate_fn=lambda _: random.random()), seed=1)

    drawn = [*loader, *loader]
    assert len(set(drawn)) == len(drawn) > 30


def test_a_dataset_that_divides_itself_has_no_packed_tokens_to_count() -> None:
    assert StreamLoader(DataLoader(Draws(), batch_size=2)).most_tokens_a_step == 0
