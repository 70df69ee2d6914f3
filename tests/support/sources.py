"""Three sources, and modules over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader

from lightning_stateful import (
    MixtureDataModule,
    RoundRobinBatchSampler,
    RoundRobinDataModule,
    StatefulDataModule,
    WeightSchedule,
)
from support.ledger import Event, Numbers, samples

LENGTHS = {"news": 9, "code": 14, "web": 4}
FIRSTS = {"news": 0, "code": 100, "web": 200, "talk": 300}
EVERY_SAMPLE = sorted(FIRSTS[name] + index for name, length in LENGTHS.items() for index in range(length))
TOKENS = {name: np.arange(1, length + 1) * 3 for name, length in LENGTHS.items()}


def datasets(**lengths: int) -> dict[str, Numbers]:
    """The sources by name; samples tell their source by their hundreds."""
    return {name: Numbers(length, first=FIRSTS[name]) for name, length in (lengths or LENGTHS).items()}


def source_of(index: int) -> str:
    """The source of a sample."""
    return next(name for name, first in reversed(FIRSTS.items()) if index >= first)


def round_robin(**options: Any) -> RoundRobinDataModule:
    """Each source with a batch size of its own, and five samples for validation."""
    defaults: dict[str, Any] = {
        "train": datasets(),
        "val": {"web": Numbers(3, first=500)},
        "batch_size": {"news": 2, "code": 3, "web": 1},
        "seed": 7,
    }
    return RoundRobinDataModule(**{**defaults, **options})


def mixture(**options: Any) -> MixtureDataModule:
    """Batches of three, and five samples for validation."""
    defaults: dict[str, Any] = {"train": datasets(), "val": Numbers(5, first=500), "batch_size": 3, "seed": 7}
    return MixtureDataModule(**{**defaults, **options})


MODULES: dict[str, Callable[[], Any]] = {
    "round robin": lambda: round_robin(tag="source"),
    "round robin, cycle": lambda: round_robin(stop="cycle"),
    "round robin, first exhausted": lambda: round_robin(stop="first_exhausted"),
    "round robin, steps": lambda: round_robin(num_steps=8, tag="source"),
    "mixture": lambda: mixture(weights=[1, 2, 1]),
    "mixture, steps": lambda: mixture(num_steps=8, temperature=2, tag="source"),
    "mixture, full batches": lambda: mixture(
        drop_last=True, stop="cycle", batch_size={"news": 3, "code": 3, "web": 2}, val={"web": Numbers(5, first=500)}
    ),
    "by sample": lambda: mixture(by="sample", tag="source"),
    "by sample, steps": lambda: mixture(by="sample", num_steps=8, weights={"news": 2, "code": 1, "web": 1}),
    "by token": lambda: mixture(by="token", lengths=TOKENS, weights=[1, 1, 1]),
    "schedule": lambda: mixture(num_steps=7, schedule={0: [1, 1, 0], 9: [1, 1, 2], 12: [0, 1, 1]}),
    "linear schedule": lambda: mixture(
        num_steps=7, schedule=WeightSchedule({0: [1, 1, 1], 13: [1, 5, 1]}, between="linear")
    ),
    "schedule, by sample": lambda: mixture(
        num_steps=7, by="sample", schedule=WeightSchedule({0: [1, 1, 1], 11: [1, 5, 0]})
    ),
}


def plain_loader(**options: Any) -> DataLoader[Any]:
    """An ordinary DataLoader that serves what :func:`round_robin` does."""
    sampler = RoundRobinBatchSampler(LENGTHS, {"news": 2, "code": 3, "web": 1}, seed=7, **options)
    return DataLoader(ConcatDataset(list(datasets().values())), batch_sampler=sampler)


class Beside(StatefulDataModule):
    """Sources beside a plain loader of ``length`` batches."""

    def __init__(self, length: int, num_steps: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.length, self.num_steps = length, num_steps

    def train_dataloader(self) -> Any:
        plain = DataLoader(Numbers(self.length, first=600), shuffle=True)
        return {"turns": plain_loader(num_steps=self.num_steps), "plain": plain}


def samples_of(source: str, ledger: list[Event]) -> list[int]:
    """The samples of one source that were trained on, in order."""
    return [index for index in samples(ledger) if source_of(index) == source]
