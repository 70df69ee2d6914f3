"""Iterable datasets that are told the epoch, and whose order follows from something else as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.ledger import batches
from support.runs import assert_goes_on_from_every_moment, ended, train_alone
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful.errors import StatefulWarning

NUMBERS = 43
READ_AGAIN = pytest.mark.filterwarnings("ignore:.*samples of .* were read again")


class Told(IterableDataset[Any]):
    """Is told the epoch, which the order follows from."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(NUMBERS), NUMBERS)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in self.order()[first::step]:
            yield {"id": number, "x": torch.full((4,), number / 100)}


class Buffers(Told):
    """Shuffles in a buffer, by a generator that goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(self.generator.randrange(len(buffer)))
        yield from buffer


class Counts(Told):
    """Goes by the passes that it has begun."""

    passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return random.Random(self.epoch + 100 * self.passes).sample(range(NUMBERS), NUMBERS)


class CountsAtEnd(Told):
    """Goes by the passes that it has ended."""

    passes = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch + 100 * self.passes).sample(range(NUMBERS), NUMBERS)

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.passes += 1


class Reseeds(Told):
    """Seeds its generator by the epoch."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def order(self) -> list[int]:
        self.generator = random.Random(self.epoch)
        return self.generator.sample(range(NUMBERS), NUMBERS)


KINDS: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (Told, Buffers, Counts, CountsAtEnd, Reseeds)}
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@READ_AGAIN
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 6], ids=["whole epochs", "limit_train_batches"])
@pytest.mark.parametrize("how", ["no workers", *(pytest.param(one, marks=pytest.mark.slow) for one in [*WORKERS][1:])])
def test_a_resume_is_exact_whatever_else_the_order_follows_from(
    tmp_path: Path, kind: str, how: str, limit: int | None
) -> None:
    def make() -> Any:
        return DataLoader(KINDS[kind](), batch_size=4, **WORKERS[how])

    moments: list[Any] = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 3), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3, limit_train_batches=limit)


class Opens(Told):
    """Notes the passes that it begins, and samples that it gives."""

    begun: ClassVar[list[int]] = []
    given = 0

    def __iter__(self) -> Iterator[Any]:
        Opens.begun.append(self.epoch)
        for sample in super().__iter__():
            Opens.given += 1
            yield sample


def test_of_one_that_the_epoch_decides_no_earlier_pass_is_begun(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Opens(), batch_size=4)

    before = ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=2)
    Opens.begun, Opens.given = [], 0
    after = train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    assert (Opens.begun, Opens.given) == ([2], NUMBERS)
    assert batches(before.ledger + after.ledger) == batches(train_alone(make, max_epochs=3).ledger)


class Unseeded(Told):
    """Draws its order from a generator that nobody seeds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def order(self) -> list[int]:
        return list(self.generator.permutation(NUMBERS))


@pytest.mark.parametrize("how", ["no workers", "workers"])
def test_a_generator_without_a_seed_is_warned_of(tmp_path: Path, how: str) -> None:
    def make() -> Any:
        return DataLoader(Unseeded(), batch_size=4, **WORKERS[how])

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_epochs=1)
    with pytest.warns(StatefulWarning, match="not exact"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)
