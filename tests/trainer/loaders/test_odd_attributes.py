"""What a dataset or a sampler holds may be anything: what cannot be read is left alone, and the run is what it was."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import assert_goes_on_from_every_moment, train_alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler


def freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def escaped() -> torch.Tensor:
    """A tensor of a call of vmap that is over."""
    seen: list[torch.Tensor] = []
    torch.func.vmap(lambda value: (seen.append(value), value)[1])(torch.zeros(3))
    return seen[0]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


class Refusing(torch.Tensor):
    """A tensor on which no function of torch's may be called."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ValueError("not for you")


class WithoutLen(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise ValueError("not for you")


class WithoutIter(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("not for you")


class WithoutItems(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise ValueError("not for you")


def archive(*, is_closed: bool) -> Any:
    """An archive of NumPy; a closed one raises where anything is asked of it."""
    file = io.BytesIO()
    np.savez(file, numbers=np.zeros(3))
    file.seek(0)
    opened = np.load(file)
    if is_closed:
        opened.close()
    return opened


class Raises:
    """Has nothing that it does not have in its class."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not for you")


ODD: dict[str, Callable[[], Any]] = {
    "archive": partial(archive, is_closed=False),
    "closed archive": partial(archive, is_closed=True),
    "raises": Raises,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "freed": freed,
    "fake": fake,
    "escaped": escaped,
    "refusing": lambda: torch.zeros(3).as_subclass(Refusing),
    "uninitialized": torch.nn.UninitializedParameter,
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
    "long integer": lambda: 10**5000,
    "long integers": lambda: [10**5000, {"a": 10**6000}],
    "no len": lambda: WithoutLen([1]),
    "no iter": lambda: WithoutIter([1]),
    "no items": lambda: WithoutItems(a=1),
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.full((4,), index / 100)}


class Holding(RandomSampler):
    """A sampler of a class of its own, which holds it."""

    def __init__(self, data: Any, held: Any) -> None:
        super().__init__(data)
        self.held = held


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(Rows(None).__getitem__, range(8))


HOLDERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "dataset": lambda held: DataLoader(Rows(held), batch_size=2, shuffle=True),
    "sampler": lambda held: DataLoader(Rows(None), batch_size=2, sampler=Holding(Rows(None), held)),
    "stream": lambda held: DataLoader(Stream(held), batch_size=2),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
def test_a_run_is_trained_and_goes_on_exactly(kind: str, holder: str, tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        return HOLDERS[holder](ODD[kind]())

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 1, 1)], train_alone, max_epochs=2)


class Logs(IterableDataset[Any]):
    """Writes to a logger that it holds, which then keeps what levels are on; it may have a state."""

    at, loaded = 0, 0

    def __init__(self) -> None:
        self.log = logging.getLogger("data of this test")

    def __iter__(self) -> Iterator[Any]:
        first, self.loaded = self.loaded, 0
        self.log.debug("begin")
        for number in range(first, 12):
            self.at = number + 1
            yield {"id": torch.tensor(number), "x": torch.rand(4)}


class LogsWithState(Logs):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"] % 12


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize("kind", [Logs, LogsWithState])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_logger_is_none_of_what_passes_change(tmp_path: Path, kind: Any, num_workers: int) -> None:
    moments = [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 2)]
    make = partial(made_of, kind, num_workers)
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3)


def made_of(kind: Any, num_workers: int) -> Any:
    logging.Logger.manager.loggerDict.pop("data of this test", None)
    return DataLoader(kind(), 2, num_workers=num_workers)
