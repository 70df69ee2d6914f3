"""A batch that was trained on is read again on a resume, and other content is refused before anything is trained on."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Value
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
import torch
from support.ledger import LedgerModel, Numbers
from support.runs import numbers_module, stopped, train, train_alone, training
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_stateful.errors import StatefulWarning, StateMismatchError


class Hidden(Dataset[dict[str, torch.Tensor]]):
    """Shows nothing of its order, counts what it reads, and may be in another one."""

    def __init__(self, first: int = 0, *, noise: bool = False) -> None:
        self.read, self.epoch = [0], 0
        self._sample = lambda index: first + (index * 7 if first else index)
        self.noise = torch.Generator().manual_seed(0) if noise else None

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read[0] += 1
        own = 0 if self.noise is None else torch.rand(4, generator=self.noise)
        number = self._sample(index) + 1000 * self.epoch
        return {"id": torch.tensor(number), "x": torch.rand(4) + number / 100 + own}


def module(dataset: Any, **options: Any) -> Any:
    return numbers_module(train=dataset, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after four batches of epoch 1."""
    path = tmp_path_factory.mktemp("content") / "stop.ckpt"
    stopped(path, lambda: module(Hidden()), epoch=1, batch=3)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_another_order_that_nothing_shows_is_refused_by_the_batch(saved: Path, workers: int) -> None:
    model = LedgerModel()
    words = r"dataset.content: .*Batch 0 of epoch 1 is not what it was.*accept=\('dataset.content',\)"
    with pytest.raises(StateMismatchError, match=words):
        train(lambda: module(Hidden(1), num_workers=workers), model=model, ckpt_path=saved)
    assert [event for event in model.ledger if event[0] == "train"] == []


class InHand(Hidden):
    """Notes the sample that it reads, which is no setting that a hook has changed."""

    current = -1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.current = index
        return super().__getitem__(self.current)


def test_it_is_compared_where_reading_changes_an_attribute(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: module(InHand()), epoch=1, batch=3)
    train(lambda: module(InHand()), ckpt_path=path)
    with pytest.raises(StateMismatchError, match=r"dataset\.content"):
        train(lambda: module(InHand(1)), ckpt_path=path)


@pytest.mark.parametrize("options", [{"accept": "dataset.content"}, {"check_content": False}], ids=str)
def test_it_passes_where_it_is_accepted_or_not_asked_for(saved: Path, options: Any) -> None:
    assert train(lambda: module(Hidden(1), **options), ckpt_path=saved).global_step == 33


def test_the_same_data_go_on_whatever_the_workers_and_the_batch_size(saved: Path) -> None:
    for options in ({}, {"num_workers": 2}, {"batch_size": 3}):
        train(partial(module, Hidden(), **options), ckpt_path=saved)


def test_without_workers_the_dataset_is_as_if_nothing_had_been_read(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: module(Hidden(noise=True)), epoch=1, batch=3)
    checked, unchecked = Hidden(noise=True), Hidden(noise=True)
    with_check = train(lambda: module(checked), ckpt_path=path)
    without = train(lambda: module(unchecked, check_content=False), ckpt_path=path)
    assert checked.read == unchecked.read == [14 + 22]
    assert all(torch.equal(value, without.weights[name]) for name, value in with_check.weights.items())


@pytest.mark.parametrize(("is_held", "workers"), [(False, 1), (True, 1), (True, 0)])
def test_content_that_differs_whenever_it_is_read_is_warned_of(tmp_path: Path, is_held: bool, workers: int) -> None:
    class Entropic(Hidden):
        """Draws what nobody can seed, from what it holds or makes."""

        def __init__(self, first: int = 0) -> None:
            super().__init__(first)
            self.held = SystemRandom() if is_held else None

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "x": sample["x"] + (self.held or SystemRandom()).random()}

    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: module(Entropic(), num_workers=workers), batch=3)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 0 has another content whenever it is read"):
        train(lambda: module(Entropic(1), num_workers=workers), ckpt_path=path)


@pytest.mark.parametrize("stop", [{"batch": 3}, {"batch": 10}, {"epoch": 1, "batch": 3}], ids=str)
def test_what_reads_as_before_only_the_first_time_is_warned_of_from_the_first_epoch_on(
    tmp_path: Path, stop: dict[str, int]
) -> None:
    class Quasi(Hidden):
        """Draws from a sequence that no seed sets, and begins anew in each process."""

        def __init__(self) -> None:
            super().__init__()
            self.engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=0)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "x": sample["x"] + self.engine.draw(1).item()}

    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: module(Quasi()), **stop)
    with pytest.warns(StatefulWarning, match=r"Batch 0 of epoch \d has another content whenever it is read"):
        train(lambda: module(Quasi()), ckpt_path=path)


class CountsOutside(Hidden):
    """Counts in its class, in a variable of the module, and in a default argument."""

    count = 0

    def __getitem__(self, index: int, reads: list[int] = [0]) -> dict[str, torch.Tensor]:  # noqa: B006  # as users do
        global NUM_READ
        NUM_READ += 1
        reads[0] += 1
        CountsOutside.count += 1
        return super().__getitem__(index)

    def counts(self) -> Any:
        default: Any = type(self).__getitem__.__defaults__
        return NUM_READ, CountsOutside.count, *default[0]


NUM_READ = 0


def test_what_is_counted_outside_of_the_dataset_is_put_back_too(tmp_path: Path) -> None:
    path, dataset = tmp_path / "stop.ckpt", CountsOutside()
    stopped(path, lambda: module(dataset), epoch=1, batch=3)
    reads = dataset.counts()
    train(lambda: module(CountsOutside()), ckpt_path=path)
    assert dataset.counts() == tuple(count + 14 + 22 for count in reads)


class Counts(Hidden):
    """Takes a number from a place that nothing can put back, and adds it if ``step`` is not 0."""

    def __init__(self, place: Any, step: int = 1) -> None:
        super().__init__()
        self.place, self.step = place, step

    def count(self) -> int:
        if isinstance(self.place, Iterator):
            return int(next(self.place))
        self.place.value += 1
        return int(self.place.value)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "id": torch.tensor(index + self.count() * self.step)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [itertools.count, lambda: Value("i", -1)], ids=["iterator", "shared memory"])
def test_what_reading_moves_for_good_is_named_and_not_moved_by_a_look(
    tmp_path: Path, make: Callable[[], Any], workers: int
) -> None:
    path, reads = tmp_path / "stop.ckpt", []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StatefulWarning)
        stopped(path, lambda: module(Counts(make(), step=0), num_workers=workers), batch=3)
        before = len(said)
        for options in ({}, {"check_content": False}):
            dataset = Counts(make())
            train(lambda: module(dataset, num_workers=workers, **options), ckpt_path=path, max_epochs=1)  # noqa: B023
            reads.append(dataset.count())
    assert reads[0] == reads[1]
    words = "Counts changes 'place' whenever samples are read. Nothing can put that back, so Batch 0 of epoch 0 was not"
    assert words in next(str(one.message) for one in said[before:] if issubclass(one.category, StatefulWarning))


def test_a_count_that_samples_depend_on_is_named_on_a_resume_before_its_first_step(tmp_path: Path) -> None:
    class Counted(Counts):
        read_so_far = 0

        def count(self) -> int:
            self.read_so_far += 1
            return self.read_so_far

    path, dataset = tmp_path / "stop.ckpt", Counted(None)
    with pytest.warns(StatefulWarning, match="Counted changes 'read_so_far' whenever"):
        stopped(path, lambda: module(Counted(None, step=0)), batch=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StatefulWarning)
        train(lambda: module(dataset), ckpt_path=path, max_epochs=1)
    first, second = (str(one.message) for one in said if issubclass(one.category, StatefulWarning))
    assert "Counted changes 'read_so_far' whenever samples are read" in first
    assert "Batch 0 of epoch 0 has another content whenever it is read" in second
    assert dataset.read_so_far == 2 * 2


def test_a_dataset_that_is_told_the_epoch_is_compared_in_the_same_epoch_alone(tmp_path: Path) -> None:
    def training(dataset: Hidden) -> Any:
        class Told(LedgerModel):
            def on_train_epoch_start(self) -> None:
                dataset.epoch = self.current_epoch
                super().on_train_epoch_start()

        return {"make_data": lambda: module(dataset), "model": Told()}

    path = tmp_path / "epoch.ckpt"
    first = train(**training(Hidden()), max_epochs=1)
    first.trainer.save_checkpoint(path)
    train(**training(Hidden()), ckpt_path=path)


def test_several_loaders_and_loaders_of_users_are_compared_each(tmp_path: Path) -> None:
    def loaders(one: Any, other: Any) -> Any:
        return lambda: {"a": DataLoader(one, batch_size=2, shuffle=True), "b": DataLoader(other, batch_size=3)}

    path = tmp_path / "stop.ckpt"
    same = loaders(Numbers(22), ConcatDataset([Hidden(), Numbers(4)]))
    stopped(path, same, batch=3, run=train_alone)
    train_alone(same, ckpt_path=path)
    with pytest.raises(StateMismatchError, match=r"b\.dataset\.content") as error:
        train_alone(loaders(Numbers(22), ConcatDataset([Hidden(1), Numbers(4)])), ckpt_path=path)
    assert [one.path for one in error.value.differences] == ["b.dataset.content"]


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda first: Subset(Numbers(9, first=100), [first, 4, 5, 6]), "indices"),
        (lambda first: TensorDataset(torch.arange(first, 9)[:5]), r"content\.tensors\.0"),
    ],
    ids=["subset", "tensors"],
)
def test_other_validation_data_are_warned_of(tmp_path: Path, make: Any, shown: str) -> None:
    class Plain(LedgerModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    path, data = tmp_path / "stop.ckpt", make(0)
    stopped(path, lambda: numbers_module(val=data), run=training(Plain), epoch=1, batch=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        train(lambda: numbers_module(val=data), model=Plain(), ckpt_path=path)
    with pytest.warns(StatefulWarning, match=rf"the data are others.*\({shown}\)"):
        train(lambda: numbers_module(val=make(1)), model=Plain(), ckpt_path=path)


class DrawsOnceCalled:
    """Makes its generator when the first batch is collated, as a collator with a seed does."""

    generator: Any = None

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        self.generator = self.generator or torch.Generator().manual_seed(5)
        drawn = torch.rand(len(samples), 4, generator=self.generator)
        return {"id": torch.stack([one["id"] for one in samples]), "x": drawn}


@pytest.mark.filterwarnings("error::lightning_stateful.errors.StatefulWarning")
def test_workers_that_end_with_an_epoch_forget_a_generator_that_a_collate_fn_makes(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, num_workers=1, collate_fn=DrawsOnceCalled())

    path, within = tmp_path / "end.ckpt", tmp_path / "within.ckpt"
    whole = train_alone(make, max_epochs=2)
    stopped(path, make, "on_train_epoch_end", run=train_alone, max_epochs=2)
    again = train_alone(make, ckpt_path=path, max_epochs=2)
    assert all(torch.equal(value, whole.weights[name]) for name, value in again.weights.items())
    stopped(within, make, batch=3, run=train_alone, max_epochs=2)
    with pytest.warns(StatefulWarning, match="has another content whenever it is read"):
        train_alone(make, ckpt_path=within, max_epochs=2)
