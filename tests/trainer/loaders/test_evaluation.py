"""Evaluation gives every sample once, in order; predictions know whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import LedgerModel, Numbers, batches, samples, trained
from support.runs import assert_goes_on_from_every_moment, ended, quiet_trainer, stopped, train, train_alone
from support.sampler_cases import TO_EVALUATE, PlainData, evaluate
from support.samplers import LENGTH, LOADERS, ShuffledBatches, loader
from torch.utils.data import DataLoader, Sampler, Subset, WeightedRandomSampler

from lightning_stateful import StatefulDataCallback, StatefulDataModule, StatefulLoader
from lightning_stateful.errors import PositionError, StatefulWarning
from lightning_stateful.trainer import eval_loaders


class Writer(BasePredictionWriter):
    """Remembers what it should write."""

    def __init__(self, interval: Any = "batch_and_epoch") -> None:
        super().__init__(interval)
        self.batches: list[tuple[int, int, list[int], list[int]]] = []
        self.epochs: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((loader, batch_idx, list(batch_indices), prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((numbers(predictions), batch_indices))


def numbers(predictions: Any) -> Any:
    return predictions.tolist() if isinstance(predictions, torch.Tensor) else [numbers(part) for part in predictions]


def flat(nested: Any) -> list[int]:
    return [index for part in nested for index in (flat(part) if isinstance(part, (list, tuple)) else [part])]


def plain(length: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length, first=first), **{"batch_size": 2, **options})


def of_7(**options: Any) -> StatefulDataModule:
    return StatefulDataModule(predict=Numbers(7, first=100), **{"batch_size": 2, **options})


def evaluated(how: str, data: Any, *callbacks: Any, **options: Any) -> list[Any]:
    """The samples of every batch that an evaluation got."""
    model = LedgerModel()
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "dataloaders"
    getattr(quiet_trainer(*callbacks, **options), how)(model, **{keyword: data})
    return [event[-1] for event in model.ledger]


def predicted(data: Any, *callbacks: Any, **options: Any) -> Any:
    """The predictions that ``predict`` returns, as lists."""
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "dataloaders"
    return numbers(quiet_trainer(*callbacks, **options).predict(LedgerModel(), **{keyword: data}))


# Predictions

BATCHES = [[0, 1], [2, 3], [4, 5], [6]]
IDS = [[100, 101], [102, 103], [104, 105], [106]]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 1}], ids=str)
def test_predictions_come_batch_by_batch_in_the_order_of_the_dataset(options: dict[str, Any]) -> None:
    assert predicted(of_7(**options)) == IDS
    assert predicted(of_7(**{**options, "batch_size": 10})) == [list(range(100, 107))]


def test_training_in_another_order_does_not_concern_predictions() -> None:
    data = StatefulDataModule(train=Numbers(6), predict=Numbers(7, first=100), batch_size=2)
    model, trainer = LedgerModel(), quiet_trainer()
    trainer.fit(model, datamodule=data)
    assert [numbers(trainer.predict(model, datamodule=data)) for _ in range(2)] == [IDS, IDS]


@pytest.mark.parametrize("data", [[Numbers(5), Numbers(3, first=100)], {"b": Numbers(5), "a": Numbers(3, first=100)}])
def test_predictions_on_several_datasets_are_a_list_a_dataset(data: Any) -> None:
    module = StatefulDataModule(predict=data, batch_size=2)
    assert predicted(module) == [[[0, 1], [2, 3], [4]], [[100, 101], [102]]]
    assert predicted(module, limit_predict_batches=1) == [[[0, 1]], [[100, 101]]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_writers_get_the_indices_of_each_batch_and_of_all_at_the_end_as_they_ask_for(num_workers: int) -> None:
    by_batch, by_epoch, by_both = writers = [Writer("batch"), Writer("epoch"), Writer("batch_and_epoch")]
    predicted(of_7(num_workers=num_workers), *writers)
    expected = [(0, number, BATCHES[number], IDS[number]) for number in range(4)]
    assert by_batch.batches == by_both.batches == expected
    assert by_epoch.epochs == by_both.epochs == [(IDS, [BATCHES])]
    assert by_epoch.batches == by_batch.epochs == []
    assert {type(index) for index in flat(by_epoch.epochs[0][1])} == {int}


def test_each_of_several_loaders_has_indices_of_its_own() -> None:
    writer = Writer()
    data = {"z": Numbers(3, first=100), "e": Numbers(0), "y": Numbers(5, first=200)}
    predicted(StatefulDataModule(predict=data, batch_size=2), writer)
    assert writer.batches == [
        (0, 0, [0, 1], [100, 101]),
        (0, 1, [2], [102]),
        (2, 0, [0, 1], [200, 201]),
        (2, 1, [2, 3], [202, 203]),
        (2, 2, [4], [204]),
    ]
    assert writer.epochs[0][1] == [[[0, 1], [2]], [], [[0, 1], [2, 3], [4]]]


def test_a_limit_cuts_the_indices_too() -> None:
    writer = Writer()
    predicted(of_7(), writer, limit_predict_batches=3)
    assert writer.epochs == [(IDS[:3], [BATCHES[:3]])]


def test_each_of_several_predictions_has_its_indices_returned_or_not() -> None:
    writer, model, data = Writer(), LedgerModel(), of_7()
    trainer = quiet_trainer(writer)
    trainer.predict(model, datamodule=data)
    trainer.predict(model, datamodule=data, return_predictions=False)
    assert writer.epochs == [(IDS, [BATCHES])] * 2
    assert writer.batches[:4] == writer.batches[4:]


def test_the_callback_alone_gives_the_indices_of_plain_loaders_also_of_an_incomplete_last_batch() -> None:
    # Lightning predicts on all samples, whatever drop_last says.
    written = []
    for callbacks in ([], [StatefulDataCallback()]):
        writer = Writer()
        predicted([plain(7, 100, drop_last=True), plain(3)], *callbacks, writer)
        assert [indices for _, _, indices, _ in writer.batches] == [*BATCHES, [0, 1], [2]]
        written.append(writer.batches)
    assert written[0] == written[1]


def test_a_loader_of_the_models_own_hook_has_its_indices() -> None:
    class Hooked(LedgerModel):
        def predict_dataloader(self) -> Any:
            return plain(7, 100)

    writer = Writer()
    quiet_trainer(StatefulDataCallback(), writer).predict(Hooked())
    assert writer.epochs == [(IDS, [BATCHES])]


@pytest.mark.filterwarnings("ignore:Your `.*`'s sampler has shuffling enabled.*")
@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(9, shuffle=True),
        lambda: StatefulLoader(Numbers(9), batch_size=2, shuffle=True, seed=4),
        lambda: plain(9, sampler=WeightedRandomSampler([1.0] * 9, 9)),
    ],
    ids=["shuffled", "stateful", "drawn"],
)
def test_the_indices_of_a_loader_in_another_order_are_those_of_the_samples(make: Any) -> None:
    writer = Writer()
    predicted(make(), StatefulDataCallback(), writer)
    assert [indices for _, _, indices, _ in writer.batches] == [ids for _, _, _, ids in writer.batches]
    assert writer.epochs[0][1] == [writer.epochs[0][0]]
    assert flat(writer.epochs[0][0]) != list(range(9))


def test_the_indices_are_those_of_the_dataset_that_the_loader_reads() -> None:
    writer = Writer("batch")
    predicted(StatefulDataModule(predict=Subset(Numbers(9), [8, 6, 4]), batch_size=2), writer)
    assert writer.batches == [(0, 0, [0, 1], [8, 6]), (0, 1, [2], [4])]


# Validation and testing

STAGES = {"validate": "val", "test": "test"}
STRUCTURES: dict[str, Any] = {
    "tuple": lambda first, second: (first, second),
    "dict": lambda first, second: {"b": first, "a": second},
    "nested": lambda first, second: {"b": [first], "a": {"c": second}},
    "CombinedLoader": lambda first, second: CombinedLoader([first, second], "sequential"),
}


@pytest.mark.parametrize("how", STAGES)
def test_datasets_are_gone_through_in_order_one_after_the_other_again_and_again(how: str) -> None:
    datasets = {"second": Numbers(3), "none": Numbers(0), "first": Numbers(4, first=100)}
    data, model, trainer = StatefulDataModule(**{STAGES[how]: datasets}, batch_size=2), LedgerModel(), quiet_trainer()
    for _ in range(2):
        getattr(trainer, how)(model, datamodule=data, verbose=False)
    assert [event[-1] for event in model.ledger] == [(0, 1), (2,), (100, 101), (102, 103)] * 2
    assert evaluated(how, data, **{f"limit_{STAGES[how]}_batches": 1}) == [(0, 1), (100, 101)]
    assert evaluated(how, StatefulDataModule(**{STAGES[how]: Numbers(5)}, batch_size=2)) == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_callback_alone_takes_over_plain_loaders_in_any_structure(structure: str) -> None:
    loaders = STRUCTURES[structure](plain(3), plain(4, 100))
    assert evaluated("validate", loaders, StatefulDataCallback()) == [(0, 1), (2,), (100, 101), (102, 103)]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("min_size", [((0, 1), (100, 101)), ((2,), (102, 103))]),
        ("max_size", [((0, 1), (100, 101)), ((2,), (102, 103)), (None, (104,))]),
        ("max_size_cycle", [((0, 1), (100, 101)), ((2,), (102, 103)), ((0, 1), (104,))]),
    ],
)
def test_loaders_that_are_served_together_end_as_their_mode_says(mode: Any, steps: Any) -> None:
    loaders = CombinedLoader({"a": plain(3), "b": plain(5, 100)}, mode)
    assert evaluated("validate", loaders, StatefulDataCallback()) == [(("a", a), ("b", b)) for a, b in steps]


# Beside training


def test_several_validation_loaders_are_gone_through_in_every_epoch() -> None:
    data = StatefulDataModule(Numbers(4), {"a": Numbers(3), "b": Numbers(2, first=100)}, batch_size=2)
    assert batches(train(lambda: data, max_epochs=2).ledger, stage="val") == [(0, 1), (2,), (100, 101)] * 2


@pytest.mark.filterwarnings("ignore:Your `.*`'s sampler has shuffling enabled.*")
def test_a_plain_shuffled_validation_loader_has_another_order_in_each_epoch() -> None:
    run = train_alone(lambda: PlainData(lambda: plain(4), lambda: plain(12, shuffle=True)), max_epochs=2)
    orders = [samples(run.ledger, epoch, "val") for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(12))] * 2
    assert orders[0] != orders[1]


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_a_checkpoint_within_an_epoch_of_other_training_data_can_be_evaluated(tmp_path: Path, how: str) -> None:
    ended(tmp_path / "stop.ckpt", lambda: StatefulDataModule(Numbers(9), batch_size=2), max_steps=2)
    stage = {**STAGES, "predict": "predict"}[how]
    data = StatefulDataModule(Numbers(5), **{stage: Numbers(3)}, batch_size=2, seed=8)
    model = LedgerModel()
    getattr(quiet_trainer(), how)(model, datamodule=data, ckpt_path=tmp_path / "stop.ckpt")
    assert [event[-1] for event in model.ledger] == [(0, 1), (2,)]


@pytest.mark.parametrize("how", ["validate", "predict"])
def test_an_evaluation_between_two_fits_leaves_the_training_data_where_it_was(how: str) -> None:
    def served(interrupted: bool) -> list[Any]:
        data = StatefulDataModule(Numbers(12), Numbers(3), predict=Numbers(3), batch_size=2)
        trainer = train(lambda: data, max_steps=4).trainer
        if interrupted:
            getattr(trainer, how)(trainer.lightning_module, datamodule=data)
        trainer.fit_loop.epoch_loop.max_steps = 6
        trainer.fit(trainer.lightning_module, datamodule=data)
        return samples(trainer.lightning_module.ledger)

    assert served(True) == served(False)
    assert sorted(served(True)) == list(range(12))


# Other people's samplers


def test_of_predictions_of_a_sampler_without_len_it_is_said_that_there_are_no_indices() -> None:
    with pytest.warns(UserWarning, match="Couldn't infer the batch indices"):
        evaluate(TO_EVALUATE["samples without len"])


def test_validation_within_training_sees_every_sample_of_a_sampler_of_its_own() -> None:
    run = train_alone(lambda: PlainData(LOADERS["class balanced"], LOADERS["batches without len"]), max_epochs=2)
    for epoch in range(2):
        assert sorted(samples(run.ledger, epoch, "val")) == list(range(LENGTH))


def test_a_sampler_shared_by_training_and_validation_is_one_to_each(tmp_path: Path) -> None:
    """People reuse one sampler object; each loader runs it for itself."""

    def data(shared: bool = True) -> Any:
        of_training = ShuffledBatches()
        of_validation = of_training if shared else ShuffledBatches()
        return PlainData(lambda: loader(batch_sampler=of_training), lambda: loader(batch_sampler=of_validation))

    moments, options = [("on_validation_batch_end", 0, 4)], {"max_epochs": 2, "val_check_interval": 3}
    whole = assert_goes_on_from_every_moment(tmp_path, data, moments, train_alone, **options)
    assert whole.ledger == train_alone(lambda: data(False), **options).ledger


class CountsPasses(Sampler[int]):
    """Validates on other samples in every pass."""

    passes = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([self.passes, self.passes + 1])


def test_a_validation_that_counts_its_passes_is_warned_of_on_a_resume(tmp_path: Path) -> None:
    class Module(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(6), batch_size=2)

        def val_dataloader(self) -> Any:
            return DataLoader(Numbers(9), sampler=CountsPasses())

    stopped(tmp_path / "stop.ckpt", Module, epoch=1, run=train_alone)
    with pytest.warns(StatefulWarning, match="the val loader: its sampler remembers earlier passes"):
        train_alone(Module, ckpt_path=tmp_path / "stop.ckpt", max_epochs=2)


class SharesSampler(pl.LightningDataModule):
    """Trains and validates with one sampler, which counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = ShuffledByPass()

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(8), batch_size=2, sampler=self.sampler)

    val_dataloader = train_dataloader


class ShuffledByPass(Sampler[int]):
    """Another order in each pass."""

    passes = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.passes)).tolist())


@pytest.mark.filterwarnings("ignore:the val loader. its sampler remembers")
@pytest.mark.filterwarnings("ignore:The loaders of training and of validation share")
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (0, 2), (1, 0), (1, 2)])
def test_training_that_shares_its_sampler_with_validation_resumes_exactly(
    tmp_path: Path, epoch: int, batch: int
) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2}
    whole = train_alone(SharesSampler, **options).ledger
    before = stopped(tmp_path / "stop.ckpt", SharesSampler, epoch=epoch, batch=batch, run=train_alone, **options)
    after = train_alone(SharesSampler, ckpt_path=tmp_path / "stop.ckpt", **options).ledger
    assert trained(before) + trained(after) == trained(whole)


@pytest.mark.filterwarnings("ignore:the val loader. its sampler remembers")
def test_but_where_that_is_due_it_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2}
    with pytest.warns(StatefulWarning, match="training and of validation share one ShuffledByPass object"):
        stopped(tmp_path / "stop.ckpt", SharesSampler, epoch=1, batch=1, run=train_alone, **options)
    with (
        pytest.warns(StatefulWarning, match="share one ShuffledByPass object"),
        pytest.raises(PositionError, match="was written within epoch 1, just before a validation"),
    ):
        train_alone(SharesSampler, ckpt_path=tmp_path / "stop.ckpt", **options)


def test_no_data_to_validate_on_are_no_loader_that_is_left_to_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Validates(LedgerModel):
        def val_dataloader(self) -> list[Any]:
            return []

    said: list[str] = []
    monkeypatch.setattr(eval_loaders, "rank_zero_info", said.append)
    train_alone(lambda: plain(4), model=Validates(), max_epochs=1)
    assert said == []
