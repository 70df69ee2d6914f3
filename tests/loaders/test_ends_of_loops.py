"""Loops of the user's over a sampler that changes itself behind the last item of an epoch, and states at its end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from harm.basics import LENGTH, loader, permutation
from harm.own_samplers import CountsAtEnd, CountsInFinally
from torch.utils.data import DataLoader

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import StatefulWarning

STEPS, EPOCHS = LENGTH // 4, 3
SAYS_NOTHING = pytest.mark.filterwarnings("error::lightning_stateful.errors.StatefulWarning")


def made(kind: Any, workers: int = 0) -> DataLoader[Any]:
    return loader(workers, sampler=kind())


def looped(loader: Any, epochs: int, most: int = STEPS) -> tuple[list[list[int]], list[Any]]:
    """The batches of some epochs, each left after so many, and the states behind each batch and each epoch."""
    trained, states = [], []
    for _ in range(epochs):
        for number, batch in enumerate(loader, 1):
            trained.append(batch.tolist())
            states.append(loader.state_dict() if hasattr(loader, "state_dict") else None)
            if number == most < STEPS:
                break
    return trained, states


@SAYS_NOTHING
@pytest.mark.parametrize("kind", [CountsAtEnd, CountsInFinally])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_at_any_batch_leads_to_the_batches_that_come_next_and_these_are_torchs(kind: Any, workers: int) -> None:
    whole, states = looped(patch_dataloader(made(kind, workers)), EPOCHS)

    assert whole == looped(made(kind), EPOCHS)[0]
    for stop in (STEPS - 1, STEPS, STEPS + 1, 2 * STEPS):
        again = patch_dataloader(made(kind))
        again.load_state_dict(states[stop - 1])
        assert looped(again, EPOCHS - again.epoch)[0] == whole[stop:]


@SAYS_NOTHING
@pytest.mark.parametrize("kind", [CountsAtEnd, CountsInFinally])
def test_epochs_that_are_broken_off_count_as_in_torch(kind: Any) -> None:
    ours = patch_dataloader(made(kind))
    whole, _ = looped(ours, 2, STEPS - 2)
    state = ours.state_dict()

    assert whole == looped(made(kind), 2, STEPS - 2)[0]
    again = patch_dataloader(made(kind))
    again.load_state_dict(state)
    assert state["progress"]["consumed"] == LENGTH - 8
    assert next(iter(again)).tolist() == permutation(int(kind is CountsInFinally))[-8:-4]


@pytest.mark.parametrize("is_within", [True, False])
def test_a_loop_that_leaves_a_sampler_at_its_last_batch_is_resumed_so_or_warned_of(is_within: bool) -> None:
    ours = patch_dataloader(made(CountsAtEnd))
    iterator = iter(ours)
    for _ in range(STEPS):
        next(iterator)
    state = ours.state_dict() if is_within else None
    del iterator
    state = ours.state_dict() if state is None else state
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        following = next(iter(ours)).tolist()

    again = patch_dataloader(made(CountsAtEnd))
    again.load_state_dict(state)
    assert [warning.category for warning in said] == [StatefulWarning] * is_within
    assert (next(iter(again)).tolist() == following) is not is_within


def test_a_pass_that_goes_on_behind_a_later_one_is_warned_of_once() -> None:
    loader = patch_dataloader(DataLoader(range(8), 2), seed=1)
    with pytest.warns(StatefulWarning, match="A pass of epoch 0 goes on, though a later pass") as said:
        pairs = list(zip(loader, loader, strict=True))
    assert (len(pairs), len(said)) == (4, 1)


def test_a_look_behind_a_loaded_state_is_warned_of_as_it_ends_the_epoch() -> None:
    loader, resumed = (patch_dataloader(DataLoader(range(8), 2), seed=1) for _ in range(2))
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    with pytest.warns(StatefulWarning, match="within epoch 0 was left behind its first batch"):
        assert len(list(resumed)) == 4


def test_nothing_is_said_of_loops_that_are_left_by_break() -> None:
    loader = patch_dataloader(DataLoader(range(8), 2), seed=1)
    for _ in range(3):
        next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert len(list(loader)) == 4
