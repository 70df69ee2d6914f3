"""Iterable datasets whose passes seed the random generators that they hold: resumed exactly, and not warned of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import batches
from support.runs import BEGINS_TWICE, assert_same_end, stopped, train_alone
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.errors import StatefulWarning

LENGTH = 22
READ_AGAIN = pytest.mark.filterwarnings("ignore:.*samples of .* were read again")


class Seeds(IterableDataset[Any]):
    """Seeds its generator by a count of its passes, and draws an order and each sample from it."""

    def __init__(self) -> None:
        self.epoch, self.generator = -1, self.built()

    def built(self) -> Any:
        return random.Random()

    def seed(self) -> None:
        self.generator.seed(self.epoch)

    def drawn(self) -> float:
        return float(self.generator.random())

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.seed()
        order = list(range(LENGTH))
        order.sort(key=lambda number: self.drawn())
        for number in order:
            yield {"id": number, "x": torch.full((4,), self.drawn())}


class Anew(Seeds):
    """Makes another one."""

    def seed(self) -> None:
        self.generator = random.Random(0)


class OfNumpy(Seeds):
    def built(self) -> Any:
        return np.random.default_rng()

    def seed(self) -> None:
        self.generator = np.random.default_rng(self.epoch)


class OfTorch(Seeds):
    def built(self) -> Any:
        generator = torch.Generator()
        generator.seed()
        return generator

    def seed(self) -> None:
        self.generator.manual_seed(self.epoch)

    def drawn(self) -> float:
        return float(torch.rand((), generator=self.generator))


OUTSIDE = random.Random()


class Outside(Seeds):
    """Seeds one of its module."""

    def built(self) -> Any:
        OUTSIDE.seed()

    def seed(self) -> None:
        OUTSIDE.seed(self.epoch)

    def drawn(self) -> float:
        return OUTSIDE.random()


class FirstAlone(Seeds):
    """Seeds it in the first pass alone."""

    def seed(self) -> None:
        if not self.epoch:
            super().seed()


class AndAnother(Seeds):
    """Has another one as well, which it draws from late in a pass, and does not seed."""

    def __init__(self) -> None:
        self.epoch, self.generator = -1, random.Random(0)
        self.other = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            yield {**sample, "x": sample["x"] + (self.other.random() if number > LENGTH // 2 else 0)}


def loader_of(kind: type[Seeds]) -> Any:
    return DataLoader(kind(), batch_size=4)


@READ_AGAIN
@pytest.mark.skipif(BEGINS_TWICE, reason="begins the first pass of a resume twice")
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("kind", [Seeds, Anew, OfNumpy, OfTorch, Outside])
def test_a_generator_that_each_pass_seeds_is_not_warned_of(kind: type[Seeds], epoch: int, tmp_path: Path) -> None:
    def make() -> Any:
        return loader_of(kind)

    before = stopped(tmp_path / "a.ckpt", make, epoch=epoch, batch=3, run=train_alone)
    resumed, whole = train_alone(make, ckpt_path=tmp_path / "a.ckpt"), train_alone(make)
    assert batches(before + resumed.ledger) == batches(whole.ledger)
    assert_same_end(resumed, whole)


@READ_AGAIN
@pytest.mark.skipif(BEGINS_TWICE, reason="begins the first pass of a resume twice")
@pytest.mark.parametrize("kind", [FirstAlone, AndAnother])
def test_one_that_passes_seed_in_part_is_warned_of(kind: type[Seeds], tmp_path: Path) -> None:
    def make() -> Any:
        return loader_of(kind)

    stopped(tmp_path / "a.ckpt", make, epoch=1, batch=3, run=train_alone)
    with pytest.warns(StatefulWarning, match=r"goes on from pass to pass|changes \w+.generator"):
        train_alone(make, ckpt_path=tmp_path / "a.ckpt")
