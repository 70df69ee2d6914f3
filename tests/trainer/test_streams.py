"""Loaders over iterable datasets under a Trainer, with nothing but the callback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from support.iterable_cases import Counts, EndlessTokens, GoesOn, GoesOnWithState, Itself, Sized
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


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of numbers, of lists of them, or of pairs of the pass and a number."""
    numbers = [sample[-1] if isinstance(sample, (tuple, list)) else sample for sample in samples]
    return {"id": torch.tensor(numbers), "x": torch.tensor([[number / 1000] * 4 for number in numbers])}


def remembering(kind: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(), batch_size=2, collate_fn=collated, **options)


# Lightning asks a loader without length for one batch more than the limit; whole epochs are in tests/harm.
@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Counts, {}),
        (GoesOnWithState, {}),
        (GoesOn, {}),
        (EndlessTokens, {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}),
    ],
)
def test_a_dataset_remembers_of_limited_epochs_what_it_remembers_in_lightning(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    make = partial(remembering, kind, **options)
    limited = {"limit_train_batches": 4}
    assert batches(train_alone(make, **limited).ledger) == batches(train(make, **limited).ledger)
    moments = [("on_train_batch_end", 1, 2), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, **limited)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_length_is_not_lost() -> None:
    run = train_alone(partial(remembering, Sized), val_check_interval=0.5)
    assert run.trainer.fit_loop.max_batches == 4


class Grows(Counts):
    """Says behind each pass that the next one has two numbers more."""

    def __len__(self) -> int:
        return 7 + 2 * self.num_passes


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_passes_are_counted_on_where_a_resume_finds_an_epoch_over(tmp_path: Path) -> None:
    moments = [("on_train_epoch_end", 0, 0), ("on_train_epoch_end", 1, 0), ("on_train_batch_end", 1, 2)]
    assert_goes_on_from_every_moment(tmp_path, partial(remembering, Grows), moments, train_alone, max_epochs=3)


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
