"""Iterable datasets that hooks set something on, of which persistent workers have copies from before."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import batches
from support.runs import stopped, train, train_alone
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.errors import StatefulWarning


class Growing(IterableDataset[Any]):
    """Gives as many samples as a hook says."""

    longest = 6

    def __init__(self) -> None:
        self.words, self.left_out = ["a"], {"b", "c"}

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(self.longest * len(self.words)))


class Told(IterableDataset[Any]):
    """Is told the epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return map(sample, random.Random(self.epoch).sample(range(6), 6))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def sample(number: int) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(number), "x": torch.full((4,), number / 100)}


class AtStart(pl.Callback):
    """Sets something as an epoch starts."""

    def __init__(self, set_on: Callable[[Any, int], None]) -> None:
        self.set_on = set_on

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        self.set_on(trainer.train_dataloader.dataset, trainer.current_epoch)


def loader(kind: Any, persistent: bool = True) -> Any:
    return DataLoader(kind(), batch_size=2, num_workers=1, persistent_workers=persistent)


def grow(dataset: Any, epoch: int) -> None:
    dataset.longest = 6 + 2 * epoch


def add_word(dataset: Any, epoch: int) -> None:
    dataset.words = ["a"] * (1 + epoch)


def leave_out_the_same(dataset: Any, epoch: int) -> None:
    dataset.left_out = {"c", "b"}


def tell_another(dataset: Any, epoch: int) -> None:
    dataset.set_epoch(1234 + epoch)


def tell(dataset: Any, epoch: int) -> None:
    dataset.set_epoch(epoch)


def nothing(dataset: Any, epoch: int) -> None:
    pass


def said_by(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return found, [one for one in said if "were read again" not in one]


@pytest.mark.parametrize(("set_on", "was"), [(grow, "longest was 6 and is 8"), (add_word, "words was another and is")])
def test_what_a_hook_sets_behind_the_start_of_persistent_workers_is_warned_of(
    tmp_path: Path, set_on: Any, was: str
) -> None:
    make, callbacks = partial(loader, Growing), [AtStart(set_on)]
    alone = train(make, callbacks=callbacks)
    whole, said = said_by(lambda: train_alone(make, callbacks=callbacks))
    assert [batches(whole.ledger, epoch) for epoch in range(3)] == [batches(alone.ledger, epoch) for epoch in range(3)]
    assert len(said) == 1
    assert "a Growing, were set after the persistent workers of its loader had been started" in said[0]
    assert f"Growing.{was}" in said[0]
    path = tmp_path / "last batch.ckpt"
    _, said = said_by(lambda: stopped(path, make, epoch=0, batch=2, run=train_alone, callbacks=callbacks))
    assert not said
    resumed, said = said_by(lambda: train_alone(make, callbacks=callbacks, ckpt_path=path))
    assert "were others when the persistent workers were started in the run that wrote the checkpoint" in said[0]
    assert f"Growing.{was}" in said[0]
    assert batches(resumed.ledger, 1) != batches(whole.ledger, 1)


def early(folder: Path, set_on: Any, kind: Any, persistent: bool) -> list[str]:
    """What is said in a run and on its resume."""
    make, path = partial(loader, kind, persistent), folder / "last batch.ckpt"
    first = said_by(lambda: stopped(path, make, epoch=1, batch=2, run=train_alone, callbacks=[AtStart(set_on)]))[1]
    return first + said_by(lambda: train_alone(make, callbacks=[AtStart(set_on)], ckpt_path=path))[1]


@pytest.mark.parametrize(
    ("kind", "set_on"), [(Growing, nothing), (Growing, leave_out_the_same), (Told, tell), (Told, nothing)]
)
def test_nothing_is_said_where_copies_are_as_the_dataset(tmp_path: Path, kind: Any, set_on: Any) -> None:
    assert not early(tmp_path, set_on, kind, persistent=True)


class SetsFirst(pl.Callback):
    """Sets something before the workers are started, in every run."""

    def setup(self, trainer: Any, *args: Any, **how: Any) -> None:
        source = trainer.fit_loop._data_source.instance
        source.dataset.longest = 8


def test_what_is_set_before_workers_are_started_may_be_set_again(tmp_path: Path) -> None:
    make, path = partial(loader, Growing), tmp_path / "end.ckpt"
    whole, said = said_by(lambda: train_alone(make, callbacks=[SetsFirst()]))
    assert not said
    said_by(lambda: stopped(path, make, epoch=0, batch=3, run=train_alone, callbacks=[SetsFirst()]))
    resumed, said = said_by(lambda: train_alone(make, callbacks=[SetsFirst()], ckpt_path=path))
    assert not said
    assert batches(resumed.ledger, 1) == batches(whole.ledger, 1)


def test_a_dataset_that_a_hook_tells_other_epochs_is_warned_of_with_persistent_workers(tmp_path: Path) -> None:
    said = early(tmp_path, tell_another, Told, persistent=True)
    assert len(said) == 2
    for one in said:
        assert one.startswith("Something else has called set_epoch of Told, in this process. Its persistent workers")
    assert len(early(tmp_path, tell_another, Told, persistent=False)) == 2


class InSharedMemory(IterableDataset[Any]):
    """Is told the epoch by a tensor that workers see."""

    def __init__(self) -> None:
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        return map(sample, random.Random(int(self.epoch)).sample(range(6), 6))


def fill(dataset: Any, epoch: int) -> None:
    dataset.epoch.fill_(epoch)


class AtEnd(pl.Callback):
    """Sets something as an epoch ends, and nothing sets it again on a resume."""

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        fill(trainer.train_dataloader.dataset, trainer.current_epoch + 1)


@pytest.mark.parametrize("make", [partial(AtStart, fill), AtEnd])
def test_of_what_lies_in_shared_memory_workers_have_no_copies(tmp_path: Path, make: Any) -> None:
    data, path = partial(loader, InSharedMemory), tmp_path / "end.ckpt"
    whole, said = said_by(lambda: train_alone(data, callbacks=[make()], max_epochs=2))
    assert batches(whole.ledger) == batches(train(data, callbacks=[make()], max_epochs=2).ledger)
    changed = "InSharedMemory.epoch was changed between two epochs by something else"
    assert [one.startswith(changed) for one in said] == [True]
    said_by(lambda: stopped(path, data, "on_train_epoch_end", run=train_alone, callbacks=[make()], max_epochs=2))
    resumed, said = said_by(lambda: train_alone(data, callbacks=[make()], ckpt_path=path, max_epochs=2))
    if make is AtEnd:
        assert batches(resumed.ledger, 1) != batches(whole.ledger, 1)
        assert any(one.startswith("InSharedMemory.epoch was set between two epochs") for one in said)
    assert not any("their copies from before" in one for one in said)


class SharedEpoch:
    """Holds the epoch in memory that workers see, as open_clip's."""

    def __init__(self) -> None:
        self.number = torch.zeros((), dtype=torch.long).share_memory_()


class InObject(IterableDataset[Any]):
    """Is told the epoch by an object."""

    def __init__(self) -> None:
        self.shared = SharedEpoch()

    def __iter__(self) -> Iterator[Any]:
        return map(sample, random.Random(int(self.shared.number)).sample(range(6), 6))


def test_of_what_an_object_holds_in_shared_memory_workers_have_no_copies_either() -> None:
    def fill_shared(dataset: Any, epoch: int) -> None:
        dataset.shared.number.fill_(epoch)

    data, callbacks = partial(loader, InObject), [AtStart(fill_shared)]
    whole, said = said_by(lambda: train_alone(data, callbacks=callbacks, max_epochs=2))
    assert batches(whole.ledger) == batches(train(data, callbacks=callbacks, max_epochs=2).ledger)
    assert not any("their copies from before" in one for one in said)
