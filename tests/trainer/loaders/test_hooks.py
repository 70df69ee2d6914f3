"""User hooks that look at loaders, Lightning's advice about them, and what errors in hooks leave behind."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, _replace_dunder_methods
from lightning.pytorch.callbacks import LambdaCallback
from support.ledger import LedgerModel, Numbers, trained
from support.runs import quiet_trainer, train
from support.sampler_cases import PlainData
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_stateful import StatefulDataCallback, StatefulLoader, StreamDataModule, patch_dataloader
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.trainer.loader_proxy import LoaderProxy


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Numbers(6).__getitem__, range(6))


class Told(Sampler[int]):
    """Goes through six samples, beginning with the one of the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((self.epoch + number) % 6 for number in range(6))

    def __len__(self) -> int:
        return 6


class Looks(pl.Callback):
    """Calls a function with the training and validation loaders that the trainer shows, at the start of an epoch."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(self.look(trainer.train_dataloader))

    def on_validation_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(self.look(trainer.val_dataloaders))


def fit(*callbacks: Any, train: Any, val: Any = None, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(StatefulDataCallback(), *callbacks, **options)
    trainer.fit(LedgerModel(), train, val)
    return trainer


def batches(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(6), **{"batch_size": 2, **options})


ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "batch_size", "num_workers", "collate_fn", "worker_init_fn")


def attributes(shown: Any) -> list[Any]:
    return [getattr(shown, name) for name in ATTRIBUTES]


@pytest.mark.parametrize("make", [batches, lambda: DataLoader(Rows(), batch_size=2)], ids=["samples", "stream"])
def test_hooks_find_what_they_find_in_a_plain_loader(make: Callable[[], DataLoader[Any]]) -> None:
    train, val = make(), batches(sampler=Told())
    looks = Looks(attributes)
    shown: Any = fit(looks, train=train, val=val).train_dataloader

    assert looks.seen == [attributes(train), attributes(val)]
    assert not isinstance(shown, DataLoader)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = shown.no_such_thing


def test_seeding_everything_for_workers_reaches_the_loaders() -> None:
    pl.seed_everything(3, workers=True, verbose=False)
    looks = Looks(lambda shown: shown.worker_init_fn)
    fit(looks, train=batches(), val=batches(worker_init_fn=print))

    assert callable(looks.seen[0])
    assert looks.seen[1] is print


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_under_ddp_on_one_device_hooks_find_lightnings_sampler() -> None:
    def tell(shown: Any) -> tuple[Any, ...]:
        shown.sampler.set_epoch(1)
        batch_sampler = shown.batch_sampler
        return type(shown.sampler), batch_sampler.sampler is shown.sampler, len(batch_sampler), len(shown)

    looks = Looks(tell)
    with mock.patch.dict(os.environ):
        fit(looks, train=batches(shuffle=True), val=batches(), strategy="ddp", devices=1)
        torch.distributed.destroy_process_group()

    assert looks.seen == [(DistributedSampler, True, 3, 3)] * 2


def test_on_several_ranks_hooks_find_lightnings_sampler_of_this_rank() -> None:
    loader = StatefulLoader(Numbers(6), batch_size=2, num_replicas=2, rank=1)
    shown = LoaderProxy(loader, lambda: None, original=batches(shuffle=True)).sampler

    assert (shown.num_replicas, shown.rank, shown.shuffle) == (2, 1, True)


@pytest.mark.filterwarnings("ignore:.* was changed between two epochs")
def test_a_sampler_that_a_hook_changes_is_the_one_that_is_trained_on() -> None:
    class Chosen(Sampler[int]):
        chosen = 0

        def __iter__(self) -> Iterator[int]:
            return iter([self.chosen] * 2)

        def __len__(self) -> int:
            return 2

    def choose(trainer: Any, *args: Any) -> None:
        trainer.train_dataloader.sampler.chosen += 1

    chooses = LambdaCallback(on_train_epoch_end=choose)
    plain, ours = (
        train(lambda: batches(sampler=Chosen()), callbacks=[chooses, *others], max_epochs=3).ledger
        for others in ([], [StatefulDataCallback(accept=("nondeterministic",))])
    )
    assert [event[-1] for event in ours] == [event[-1] for event in plain]


def test_an_argument_of_a_loader_that_a_hook_sets_in_vain_is_warned_of() -> None:
    loader = batches()

    def enlarge(*args: Any) -> None:
        loader.batch_sampler.batch_size += 1  # type: ignore[union-attr]  # torch's own

    with pytest.warns(StatefulWarning, match=r"^batch_sampler.batch_size of the training loader was set after"):
        train(lambda: loader, callbacks=[LambdaCallback(on_train_epoch_end=enlarge), StatefulDataCallback()])


@pytest.mark.filterwarnings("ignore:overfit_batches trains on the same batches.*")
def test_overfitting_shows_and_serves_samples_in_order() -> None:
    looks = Looks(lambda shown: type(shown.sampler))
    trainer = fit(looks, train=batches(shuffle=True), val=batches(shuffle=True), overfit_batches=2)
    model: Any = trainer.lightning_module

    assert set(looks.seen) == {SequentialSampler}
    assert {event[-1] for event in model.ledger if event[0] in ("train", "val")} == {(0, 1), (2, 3)}


@pytest.mark.parametrize("inner", [False, True])
def test_a_sampler_is_told_the_epoch_in_evaluation_too(inner: bool) -> None:
    def served_in(*callbacks: Any) -> list[list[Any]]:
        loaders = [
            DataLoader(Numbers(6), batch_sampler=BatchSampler(Told(), 2, False)) if inner else batches(sampler=Told())
            for _ in range(4)
        ]
        trainer, models = quiet_trainer(*callbacks, max_epochs=2), [LedgerModel() for _ in range(3)]
        trainer.fit(models[0], loaders[0], loaders[1])
        trainer.test(models[1], loaders[2], verbose=False)
        trainer.predict(models[2], loaders[3])
        return [[event[-1] for event in model.ledger if "epoch" not in event[0]] for model in models]

    plain, ours = served_in(), served_in(StatefulDataCallback())
    # Of a batch sampler, Lightning itself tells the sampler nothing when it predicts.
    assert ours[:2] == plain[:2]
    assert ours[0][3:6] == [(0, 1), (2, 3), (4, 5)]
    assert ours[0][6:9] == [(1, 2), (3, 4), (5, 0)]
    assert ours[1] == ours[2] == [(2, 3), (4, 5), (0, 1)]


@pytest.mark.filterwarnings("default")
def test_lightning_gives_its_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))

    def shuffled() -> Any:
        return batches(shuffle=True)

    def advice(data: dict[str, Any], *callbacks: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(*callbacks).fit(LedgerModel(), **data)
        texts = [str(warning.message).split(",")[0] for warning in caught]
        return sorted(text for text in texts if "num_workers" in text or "many workers" in text or "shuffling" in text)

    sources: list[dict[str, Any]] = [
        {"datamodule": PlainData(shuffled, shuffled)},
        {"train_dataloaders": batches(), "val_dataloaders": batches(sampler=RandomSampler(Numbers(6)))},
    ]
    for source in sources:
        theirs = advice(source)
        assert advice(source, StatefulDataCallback()) == theirs
        assert len(theirs) == 3


def test_an_error_in_a_loader_hook_leaves_torchs_classes_as_they_were() -> None:
    def broken() -> Any:
        raise OSError("disk not mounted")

    def methods() -> list[Any]:
        return [getattr(kind, name) for kind in (DataLoader, BatchSampler) for name in ("__init__", "__setattr__")]

    before = methods()
    with pytest.raises(OSError, match="disk not mounted"):
        fit(train=PlainData(batches, broken))
    assert methods() == before
    assert not hasattr(DataLoader, "__old__init__")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_with_a_length_leaves_no_filter_for_warnings(fails: bool) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk not mounted")

    before = list(warnings.filters)
    data = StreamDataModule(Rows(), val=Numbers(4), batch_size=2, steps_per_epoch=2)
    with pytest.raises(OSError, match="disk not mounted") if fails else contextlib.nullcontext():
        fit(*([LambdaCallback(on_train_start=fail)] if fails else []), train=data)
    assert list(warnings.filters) == before


def test_a_loader_whose_stream_was_read_can_still_be_built_again_by_lightning() -> None:
    # As within Fabric.launch, Lightning records what is set on loaders, to build them again with it.
    with _replace_dunder_methods(DataLoader, "dataset"):
        loader: Any = DataLoader(Rows(), batch_size=2)
        loader.note = "mine"
        list(patch_dataloader(loader))
        again = _reinstantiate_wrapped_cls(loader, Rows(), batch_size=2)
    assert (type(again), again.note) == (DataLoader, "mine")
    assert len(list(again)) == 3


def test_a_method_of_a_loop_that_somebody_replaced_stays_in_place() -> None:
    trainer = quiet_trainer(StatefulDataCallback(), max_epochs=2)
    validation: Any = trainer.fit_loop.epoch_loop.val_loop
    own = validation.run = mock.Mock()
    trainer.fit(LedgerModel(), batches(), batches())

    assert validation.run is own
    assert own.call_count == 2


class Shifted(Numbers):
    """Has other ids by an attribute."""

    by = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "id": sample["id"] + self.by}


class ShiftedRows(Rows):
    by = 0

    def __iter__(self) -> Iterator[Any]:
        return ({**sample, "id": sample["id"] + self.by} for sample in super().__iter__())


@pytest.mark.filterwarnings("ignore:ShiftedRows.by was changed between two epochs")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Shifted, ShiftedRows])
def test_a_dataset_that_hooks_change_is_seen_by_workers_as_without_this_package(kind: Any, num_workers: int) -> None:
    def ids(*callbacks: Any) -> Any:
        dataset = kind(6) if kind is Shifted else kind()

        def shift(by: int, trainer: pl.Trainer, module: Any) -> None:
            dataset.by += by

        hooks = LambdaCallback(
            on_train_start=partial(shift, 100),
            on_train_epoch_start=partial(shift, 1000),
            on_train_epoch_end=partial(shift, 10),
        )
        loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
        model = LedgerModel()
        trainer = quiet_trainer(*callbacks, hooks, max_epochs=2)
        trainer.fit(model, loader)
        return [event[-1] for event in trained(model.ledger)]

    assert ids(StatefulDataCallback()) == ids()
