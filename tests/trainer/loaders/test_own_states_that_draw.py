"""Samplers with a state of their own that draw on their way, and go on in the next epoch from where they were left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import Numbers, batches
from support.runs import assert_same_end, ended, served_in_loop, stopped, train_alone
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import patch_dataloader

NUMBER = 40


class Queues(Sampler[list[int]]):
    """One of each class in a batch, out of queues that are drawn anew where they are empty, and kept over epochs."""

    def __init__(self) -> None:
        self.classes = {0: list(range(25)), 1: list(range(25, 35)), 2: list(range(35, NUMBER))}
        self.queues: dict[int, list[int]] = {number: [] for number in self.classes}
        self.done = 0

    def __len__(self) -> int:
        return NUMBER

    def draw(self, members: list[int]) -> list[int]:
        return random.sample(members, len(members))

    def __iter__(self) -> Iterator[list[int]]:
        self.done %= NUMBER
        while self.done < NUMBER:
            batch = []
            for number, members in self.classes.items():
                self.queues[number] = self.queues[number] or self.draw(members)
                batch.append(self.queues[number].pop())
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"queues": [list(queue) for queue in self.queues.values()], "done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.queues, self.done = dict(enumerate(map(list, state_dict["queues"]))), state_dict["done"]


class OfAGenerator(Queues):
    """Draws with a generator that it holds, of which it saves the state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def draw(self, members: list[int]) -> list[int]:
        return [members[place] for place in torch.randperm(len(members), generator=self.generator).tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.generator.set_state(state_dict["generator"])


@pytest.mark.parametrize("kind", [Queues, OfAGenerator])
def test_each_stop_is_resumed_exactly(kind: type[Queues], tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Numbers(NUMBER), batch_sampler=kind())

    whole = train_alone(make)
    # Of the first epoch, as it ends, within the second, and behind it.
    for epoch, batch in ((0, 20), (0, NUMBER - 1), (1, 4), (1, 16), (1, NUMBER - 1), (2, 33)):
        before = stopped(tmp_path / "a.ckpt", make, epoch=epoch, batch=batch, run=train_alone)
        rest = train_alone(make, ckpt_path=tmp_path / "a.ckpt")
        assert before + rest.ledger == whole.ledger, (epoch, batch)
        assert len(batches(rest.ledger, 2)) == min(NUMBER, 3 * NUMBER - (epoch * NUMBER + batch + 1))


def test_a_plain_loop_goes_on_in_its_second_epoch() -> None:
    def served(state: Any = None, stop: int = -1) -> tuple[list[Any], Any]:
        loader: Any = patch_dataloader(DataLoader(range(NUMBER), batch_sampler=Queues()), seed=0)  # type: ignore[arg-type]
        return served_in_loop(loader, 2, state, stop)

    whole, _ = served()
    for stop in (20, NUMBER, NUMBER + 5, NUMBER + 32):
        before, state = served(stop=stop)
        assert before + served(state)[0] == whole, stop


class Resumable(Sampler[int]):
    """As many people write one: begins anew where it is told another epoch."""

    def __init__(self) -> None:
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return NUMBER

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        self.start %= NUMBER
        order = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.start < NUMBER:
            self.start += 1
            yield order[self.start - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.start = state_dict["epoch"], state_dict["start"]


def test_nothing_is_said_of_one_that_is_told_the_next_epoch_where_max_steps_ends_a_fit(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Numbers(NUMBER), batch_size=2, sampler=Resumable())

    for steps in (5, 10, 33):
        ended(tmp_path / "a.ckpt", make, run=train_alone, max_steps=steps)
        assert_same_end(train_alone(make, ckpt_path=tmp_path / "a.ckpt"), train_alone(make))
