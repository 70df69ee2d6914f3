"""Loaders over iterable datasets under a Trainer, with nothing but the callback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from support.iterable_cases import Counts, CountsWithState, EndlessTokens, GoesOn, GoesOnWithState, Itself, Sized
from support.ledger import batches
from support.runs import assert_goes_on_from_every_moment, train, train_alone
from support.sampler_cases import PlainData
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful.errors import ConfigurationError, StatefulWarning

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


def streams(**options: Any) -> Any:
    """Of a plain data module, with ordinary validation data."""
    return PlainData(lambda: DataLoader(Stream(), batch_size=2, **options))


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 3}, {"limit_train_batches": 5, "val_check_interval": 4}], ids=str
)
def test_a_run_on_a_stream_goes_on_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_goes_on_from_every_moment(tmp_path, streams, MOMENTS, train_alone, **options)


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
def test_a_run_on_a_stream_with_workers_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, partial(streams, num_workers=2), MOMENTS[2:4], train_alone)


class Counting(IterableDataset[Any]):
    """Shuffles by the number of passes that it has begun, and has no state."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        numbers = random.Random(self.epoch).sample(range(22), 22)
        return ({"id": torch.tensor(number), "x": torch.rand(4) + number / 100} for number in numbers)


def counting(**options: Any) -> DataLoader[Any]:
    return DataLoader(Counting(), batch_size=2, **options)


@pytest.mark.skipif(pl.__version__.startswith("2.5"), reason="Lightning 2.5 begins it twice on a resume: refused")
@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_stream_that_counts_its_passes_goes_on_in_the_order_of_its_pass(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, counting, MOMENTS, train_alone)
    # Copies in workers that end with a pass count nothing; those in workers that persist do.
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    assert_goes_on_from_every_moment(tmp_path, partial(counting, **options), MOMENTS[3:], train_alone)
    options["persistent_workers"] = True
    assert_goes_on_from_every_moment(tmp_path, partial(counting, **options), MOMENTS[3:], train_alone)


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of numbers, of lists of them, or of pairs of the pass and a number."""
    numbers = [sample[-1] if isinstance(sample, (tuple, list)) else sample for sample in samples]
    return {"id": torch.tensor(numbers), "x": torch.tensor([[number / 1000] * 4 for number in numbers])}


def remembering(kind: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(), batch_size=2, collate_fn=collated, **options)


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:Your .IterableDataset. has .__len__. defined")
@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        (Sized, {}, 1.0),
        (Counts, {}, 4),
        (CountsWithState, {}, 1.0),
        (GoesOnWithState, {}, 4),
        (GoesOn, {}, 4),
        (EndlessTokens, {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}, 4),
    ],
)
def test_what_a_dataset_remembers_is_what_it_remembers_in_lightning(
    tmp_path: Path, kind: Any, options: dict[str, Any], limit: float
) -> None:
    make = partial(remembering, kind, **options)
    trained = {"limit_train_batches": limit}
    assert batches(train_alone(make, **trained).ledger) == batches(train(make, **trained).ledger)
    moments = [("on_train_batch_end", 1, 2), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, **trained)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_length_is_not_lost() -> None:
    run = train_alone(partial(remembering, Sized), val_check_interval=0.5)
    assert run.trainer.fit_loop.max_batches == 4


def test_two_loaders_over_one_dataset_are_warned_of_at_the_start() -> None:
    def shared() -> Any:
        dataset = Stream()
        loaders = [DataLoader(dataset, batch_size=2), DataLoader(dataset, batch_size=2)]
        return CombinedLoader(loaders, "min_size")

    with pytest.warns(StatefulWarning, match=r"'0' and '1' read one Stream object in turn"):
        train_alone(shared, max_epochs=1)


def test_two_loaders_over_one_iterator_are_refused_at_the_start() -> None:
    dataset = Itself()
    with pytest.raises(ConfigurationError, match="'0' and '1' share one Itself object, which is its own iterator"):
        train_alone(lambda: CombinedLoader([DataLoader(dataset), DataLoader(dataset)], "min_size"))
