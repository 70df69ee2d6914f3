"""Loaders without a Trainer leave out what skip= names, say so in their state, and go on from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.own_iterations import Twice
from support.stream_runs import chunks
from torch.utils.data import DataLoader

from lightning_stateful import Packing, StatefulDataModule, StatefulLoader, patch_dataloader
from lightning_stateful.core.samples import SampleEpochPlan
from lightning_stateful.errors import ConfigurationError, DamagedStateError
from lightning_stateful.loaders import PackedDataset
from lightning_stateful.state import sealed

DATA = [torch.tensor(number) for number in range(50)]


def shuffled(**options: Any) -> Any:
    return StatefulLoader(DATA, **{"batch_size": 4, "shuffle": True, "seed": 3, **options})


def stream(**options: Any) -> Any:
    return patch_dataloader(DataLoader(chunks(transform=None), batch_size=2), seed=1, **options)


def listed(loader: Any, number: int = 10**6) -> list[list[int]]:
    found = []
    for _, batch in zip(range(number), loader, strict=False):
        found.append(batch.tolist())
    return found


def test_without_skip_plans_and_states_are_as_ever() -> None:
    loader = shuffled()
    plan = loader.plan(0)
    assert type(plan) is SampleEpochPlan
    assert not plan.gaps
    assert "skip" not in loader.state_dict()
    assert "skip" not in shuffled(skip={}).state_dict()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_another_batch_size_leaves_the_same_samples_out(batch_size: int) -> None:
    skip = [(0, range(5, 9)), {7}]
    whole = [index for batch in listed(shuffled()) for index in batch]
    kept = [index for index in whole[:20] + whole[36:] if index != 7]
    loader = shuffled(skip=skip)
    begun = listed(loader, 2)
    other = shuffled(skip=skip, batch_size=batch_size)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [index for batch in begun + listed(other) for index in batch] == kept


@pytest.mark.parametrize(
    "skip", [{0: range(2, 4)}, {0: range(0, 1)}, {0: range(7, 100)}], ids=["middle", "begin", "end"]
)
def test_a_stream_is_read_over_what_is_left_out_and_goes_on_from_every_batch(skip: Any) -> None:
    whole = stream()
    first, second = listed(whole), listed(whole)
    loader = stream(skip=skip)
    numbers = set(skip[0])
    expected = [batch for number, batch in enumerate(first) if number not in numbers]
    assert (listed(loader), listed(loader)) == (expected, second)
    for number in range(len(expected) + 1):
        begun = stream(skip=skip)
        before = listed(begun, number) if number else []
        resumed = stream(skip=skip)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        # Behind the last batch begins the next epoch.
        is_over = number == len(expected)
        assert before + listed(resumed) == (expected + second if is_over else expected), number


def test_a_state_is_small_and_a_damaged_one_is_refused_by_name() -> None:
    loader = shuffled(skip=[(0, range(5, 9)), (1, range(3, 4)), (3, range(100, 600)), set(range(40))])
    listed(loader, 1)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 500
    state["skip"]["ranges"][1][2] = 0
    with pytest.raises(DamagedStateError, match=r"skip\.ranges\[1\] must be a range that ends behind its beginning"):
        shuffled().load_state_dict(sealed(state))


def test_tokens_of_packed_documents_that_are_left_out_are_not_counted() -> None:
    documents = [[100 * number + token for token in range(3 + number * 7 % 13)] for number in range(40)]
    data = PackedDataset(documents, lengths=len, packing=Packing(16))

    def loader(**options: Any) -> Any:
        return StatefulLoader(data, sampler=data.order, batch_size=2, collate_fn=list, **options)

    found = loader(skip={0: [range(2, 4), range(6, 7)]})
    tokens = 0
    for batch in found:
        tokens += sum(int((sequence["document_ids"] >= 0).sum()) for sequence in batch)
        report = found.position_report()
        if report["epoch"] == 0:
            assert report["tokens"] == tokens
    assert tokens < loader().plan(0).num_steps * 2 * 16 - 3 * 2 * 16 + 16


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loader's own iteration": (
        lambda: patch_dataloader(Twice(DATA, batch_size=2), skip={0: range(3)}),
        "the loader iterates by itself",
    ),
    "samples of a stream": (lambda: stream(skip={3}), "is a stream, whose samples have no index"),
    "packed sequences by index": (
        lambda: StatefulLoader(
            (data := PackedDataset([[1, 2]] * 9, lengths=[2] * 9, packing=Packing(4))), sampler=data.order, skip={3}
        ),
        "batches of the kind 'packed'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_left_out_is_refused_when_the_loader_is_made(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_a_data_module_without_a_trainer_leaves_out_the_same() -> None:
    def make(**options: Any) -> Any:
        return StatefulDataModule(DATA, batch_size=4, seed=3, **options)

    whole, module = listed(make().train_dataloader()), make(skip={0: range(2, 4)})
    loader = module.train_dataloader()
    begun = listed(loader, 3)
    again = make(skip={0: range(2, 4)})
    again.load_state_dict(module.state_dict())
    assert begun + listed(again.train_dataloader()) == whole[:2] + whole[4:]
