"""Loaders that are served side by side share neither their orders nor what their samples draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_stateful import (
    ChunkedDataset,
    MixedStream,
    StatefulDataCallback,
    StatefulDataModule,
    StreamDataModule,
)
from lightning_stateful.errors import StateMismatchError
from lightning_stateful.samplers import BucketBatchSampler

Make = Callable[[], Any]
LENGTH = 64


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())) + random.random()


class Own(Sampler[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Any:
        return iter(random.sample(range(LENGTH), LENGTH))


class Records(BoringModel):
    """Keeps what each loader gives to each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[tuple[list[int], list[float]]]] = {"a": [], "b": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name, steps in self.steps.items():
            steps.append(tuple(part.tolist() for part in batch[name]))
        return super().training_step(torch.rand(1, 32), batch_idx)


def chunks() -> ChunkedDataset:
    return ChunkedDataset(range(8), lambda chunk: [(8 * chunk + n, random.random()) for n in range(8)], seed=0)


def a_loader(**options: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, **options)


def of_buckets() -> Any:
    return DataLoader(Noisy(), batch_sampler=BucketBatchSampler([1] * LENGTH, batch_size=4))


CASES: dict[str, Make] = {
    "shuffled": lambda: {name: a_loader(shuffle=True) for name in "ab"},
    "weighted": lambda: {name: a_loader(sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH)) for name in "ab"},
    "own sampler": lambda: {name: a_loader(sampler=Own()) for name in "ab"},
    "buckets": lambda: {name: of_buckets() for name in "ab"},
    "module": lambda: StatefulDataModule({name: Noisy() for name in "ab"}, batch_size=4),
    "streams": lambda: StreamDataModule({name: chunks() for name in "ab"}, batch_size=4, steps_per_epoch=16),
    "mixed streams": lambda: StreamDataModule(
        {name: MixedStream({"x": chunks(), "y": chunks()}) for name in "ab"}, batch_size=4, steps_per_epoch=32
    ),
}


def served(data: Any, **settings: Any) -> list[list[Any]]:
    """The indices and drawn numbers that each of two loaders gave to every step."""
    model = Records()
    quiet_trainer(StatefulDataCallback(**settings)).fit(model, data)
    return [model.steps["a"], model.steps["b"]]


def drawn(steps: list[Any]) -> set[float]:
    return {noise for _, of_step in steps for noise in of_step}


@pytest.mark.parametrize("name", CASES)
def test_no_two_loaders_serve_alike(name: str) -> None:
    a, b = served(CASES[name]())
    assert len(a) >= LENGTH // 4
    # By chance, one pair in sixteen thousand.
    assert sum(one[0] == other[0] for one, other in zip(a, b, strict=True)) < 3
    assert not drawn(a) & drawn(b)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def order_of(steps: list[Any]) -> list[list[int]]:
    return [indices for indices, _ in steps]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: a_loader(shuffle=True, generator=generator(seed)),
        lambda seed: a_loader(sampler=RandomSampler(range(LENGTH), generator=generator(seed))),
    ],
    ids=["of the loader", "of the sampler"],
)
def test_generators_of_equal_state_draw_one_order_as_in_torch_and_others_do_not(make: Any) -> None:
    a, b = served({"a": make(1), "b": make(1)})
    assert order_of(a) == order_of(b)
    assert sorted(index for indices in order_of(a) for index in indices) == list(range(LENGTH))

    a, b = served({"a": make(1), "b": make(2)})
    assert sum(one == other for one, other in zip(order_of(a), order_of(b), strict=True)) < 3


@pytest.mark.parametrize(
    ("make", "is_alike"),
    [
        (lambda: a_loader(shuffle=True, generator=generator(1)), False),
        (lambda: a_loader(shuffle=True, generator=generator(1), num_workers=1), True),
        (lambda: a_loader(sampler=RandomSampler(range(LENGTH), generator=generator(1)), num_workers=1), False),
    ],
    ids=["no workers", "workers", "of the sampler, workers"],
)
def test_samples_are_drawn_alike_by_equal_generators_where_they_are_in_torch(make: Any, is_alike: bool) -> None:
    a, b = served({"a": make(), "b": make()})
    assert order_of(a) == order_of(b)
    assert (drawn(a) == drawn(b)) is is_alike
    assert is_alike or not drawn(a) & drawn(b)
    # So it is in torch.
    loaders = [make(), make()]
    plain = [[batch[1].tolist() for batch in loader] for loader in loaders]
    assert (plain[0] == plain[1]) is is_alike


def test_loaders_that_share_one_generator_or_sampler_draw_from_it_in_turn_as_in_torch() -> None:
    shared = generator(1)
    a, b = served({name: a_loader(shuffle=True, generator=shared) for name in "ab"})
    assert sum(one == other for one, other in zip(order_of(a), order_of(b), strict=True)) < 3
    assert not drawn(a) & drawn(b)
    sampler = RandomSampler(range(LENGTH), generator=generator(1))
    a, b = served({name: a_loader(sampler=sampler) for name in "ab"})
    assert sum(one == other for one, other in zip(order_of(a), order_of(b), strict=True)) < 3


def test_a_resume_on_workers_is_refused_where_samples_would_be_drawn_alike(tmp_path: Any) -> None:
    data = [{name: a_loader(shuffle=True, generator=generator(1), num_workers=n) for name in "ab"} for n in (0, 1)]
    trainer = quiet_trainer(StatefulDataCallback(), max_steps=3)
    trainer.fit(Records(), data[0])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(StateMismatchError, match="draws_apart"):
        quiet_trainer(StatefulDataCallback(), max_steps=5).fit(Records(), data[1], ckpt_path=tmp_path / "last.ckpt")


def test_workers_whose_samples_are_not_seeded_draw_apart_too() -> None:
    a, b = served({name: a_loader(num_workers=1) for name in "ab"}, seed_samples=False)
    assert not drawn(a) & drawn(b)
