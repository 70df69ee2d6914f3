"""Loaders over iterable datasets under a Trainer, with nothing but the callback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import Numbers
from support.runs import train
from support.sources import assert_goes_on_from_every_moment
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import PositionError, StatefulWarning

MOMENTS = [
    ("on_train_batch_start", 1, 3),
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 2),
    ("on_train_batch_end", 1, 4),
    ("on_train_epoch_end", 0, 0),
]


class Stream(IterableDataset[Any]):
    """Twenty-two drawn samples, dealt out to workers."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, 22, step):
            yield {"id": torch.randint(1000, ()), "x": torch.rand(4) + number / 100}


class Streams(pl.LightningDataModule):
    """A plain data module, with ordinary validation data."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2, **self.options)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(5, first=100), batch_size=2)


def run(make: Any, callbacks: Any = (), **options: Any) -> Any:
    return train(make, callbacks=[*callbacks, StatefulDataCallback(seed=7)], **options)


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 3}, {"limit_train_batches": 5, "val_check_interval": 4}], ids=str
)
def test_a_run_on_a_stream_goes_on_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_goes_on_from_every_moment(tmp_path, Streams, MOMENTS, run, **options)


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
def test_a_run_on_a_stream_with_workers_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, lambda: Streams(num_workers=2), MOMENTS[2:4], run)


def test_a_resumed_stream_tells_what_it_cost(tmp_path: Path) -> None:
    stopped = run(Streams, max_steps=4)
    stopped.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    with pytest.warns(StatefulWarning, match="8 samples of Stream .* were read again"):
        run(Streams, ckpt_path=tmp_path / "middle.ckpt", max_steps=6)


class Counting(IterableDataset[Any]):
    """Shuffles by the number of passes that it has begun, and has no state."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        numbers = random.Random(self.epoch).sample(range(22), 22)
        return ({"id": torch.tensor(number), "x": torch.rand(4) + number / 100} for number in numbers)


class Unsteady(Counting):
    """In another order whenever it is made."""

    made = 0

    def __init__(self) -> None:
        Unsteady.made += 1
        self.epoch = 1000 * Unsteady.made


def loader_over(kind: Any, **options: Any) -> Any:
    return lambda: DataLoader(kind(), batch_size=2, **options)


@pytest.mark.skipif(pl.__version__.startswith("2.5"), reason="Lightning 2.5 begins it twice on a resume: refused")
@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stream_that_counts_its_passes_goes_on_in_the_order_of_its_pass(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, loader_over(Counting), MOMENTS, run)
    # Copies in workers that end with a pass count nothing; those in workers that persist do.
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    assert_goes_on_from_every_moment(tmp_path, loader_over(Counting, **options), MOMENTS[3:], run)
    options["persistent_workers"] = True
    assert_goes_on_from_every_moment(tmp_path, loader_over(Counting, **options), MOMENTS[3:], run)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stream_that_begins_otherwise_each_time_is_refused(tmp_path: Path) -> None:
    stopped = run(loader_over(Unsteady), max_steps=4)
    stopped.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    with pytest.raises(PositionError, match=r"Unsteady .* begins pass 0 with other samples than before the resume"):
        run(loader_over(Unsteady), ckpt_path=tmp_path / "middle.ckpt", max_steps=6)
    with pytest.warns(StatefulWarning, match="8 samples of Unsteady .* were read again"):
        train(
            loader_over(Unsteady),
            callbacks=[StatefulDataCallback(seed=7, accept=("nondeterministic",))],
            ckpt_path=tmp_path / "middle.ckpt",
            max_steps=6,
        )
