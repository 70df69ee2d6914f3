"""Evaluation gives every sample once, in order; predictions know whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import Numbers
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from lightning_stateful import StatefulDataCallback, StatefulDataModule, StatefulLoader


class Recorder(pl.LightningModule):
    """Predicts the ids of a batch, and remembers which batches it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.got: list[tuple[int, int, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.got.append((dataloader_idx, batch_idx, ids_of(batch)))
        if "id" in batch:
            self.log("mean_id", batch["id"].float().mean(), batch_size=len(batch["id"]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.got.append((dataloader_idx, batch_idx, ids_of(batch)))
        return batch["id"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


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


def ids_of(batch: Any) -> Any:
    if batch is None:
        return None
    if "id" in batch:
        return batch["id"].tolist()
    return {name: ids_of(part) for name, part in batch.items()}


def numbers(predictions: Any) -> Any:
    return predictions.tolist() if isinstance(predictions, torch.Tensor) else [numbers(part) for part in predictions]


def flat(nested: Any) -> list[int]:
    return [index for part in nested for index in (flat(part) if isinstance(part, list) else [part])]


def a_trainer(*callbacks: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**quiet, **options}, callbacks=list(callbacks))


def plain(length: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length, first=first), **{"batch_size": 2, **options})


def of_7(**options: Any) -> StatefulDataModule:
    return StatefulDataModule(predict=Numbers(7, first=100), **{"batch_size": 2, **options})


BATCHES = [[0, 1], [2, 3], [4, 5], [6]]
IDS = [[100, 101], [102, 103], [104, 105], [106]]


def predicted(data: Any, *callbacks: Any, **options: Any) -> Any:
    """What ``predict`` returns, as lists."""
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "dataloaders"
    return numbers(a_trainer(*callbacks, **options).predict(Recorder(), **{keyword: data}))


class TestPredictions:
    @pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 1}], ids=str)
    def test_they_come_batch_by_batch_in_the_order_of_the_dataset(self, options: dict[str, Any]) -> None:
        assert predicted(of_7(**options)) == IDS

    def test_fewer_samples_than_a_batch_are_predicted_once(self) -> None:
        assert predicted(of_7(batch_size=10)) == [list(range(100, 107))]

    def test_training_in_another_order_does_not_concern_them(self) -> None:
        data = StatefulDataModule(train=Numbers(6), predict=Numbers(7, first=100), batch_size=2)
        model, trainer = Recorder(), a_trainer()
        trainer.fit(model, datamodule=data)

        assert [numbers(trainer.predict(model, datamodule=data)) for _ in range(2)] == [IDS, IDS]

    @pytest.mark.parametrize("container", [list, dict])
    def test_several_datasets_give_a_list_a_dataset(self, container: type) -> None:
        data = container(zip("ba", [Numbers(5), Numbers(3, first=100)], strict=True))
        data = data if container is dict else [dataset for _, dataset in data]

        assert predicted(StatefulDataModule(predict=data, batch_size=2)) == [[[0, 1], [2, 3], [4]], [[100, 101], [102]]]

    def test_a_limit_holds_for_each_of_several_loaders(self) -> None:
        data = StatefulDataModule(predict=[Numbers(5), Numbers(3, first=100)], batch_size=2)

        assert predicted(data, limit_predict_batches=1) == [[[0, 1]], [[100, 101]]]


class TestWriters:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_writers_get_the_indices_of_each_batch_and_of_all_at_the_end_as_they_ask_for(
        self, num_workers: int
    ) -> None:
        by_batch, by_epoch, by_both = writers = [Writer("batch"), Writer("epoch"), Writer("batch_and_epoch")]
        predicted(of_7(num_workers=num_workers), *writers)

        batches = [(0, number, BATCHES[number], IDS[number]) for number in range(4)]
        assert by_batch.batches == by_both.batches == batches
        assert by_epoch.epochs == by_both.epochs == [(IDS, [BATCHES])]
        assert by_epoch.batches == by_batch.epochs == []
        assert {type(index) for index in flat(by_epoch.epochs[0][1])} == {int}

    def test_each_of_several_loaders_has_indices_of_its_own(self) -> None:
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

    def test_a_limit_cuts_the_indices_too(self) -> None:
        writer = Writer()
        predicted(of_7(), writer, limit_predict_batches=3)

        assert writer.epochs == [(IDS[:3], [BATCHES[:3]])]

    def test_each_of_several_predictions_has_its_indices_returned_or_not(self) -> None:
        writer, model, data = Writer(), Recorder(), of_7()
        trainer = a_trainer(writer)
        trainer.predict(model, datamodule=data)
        trainer.predict(model, datamodule=data, return_predictions=False)

        assert writer.epochs == [(IDS, [BATCHES])] * 2
        assert writer.batches[:4] == writer.batches[4:]

    def test_the_callback_alone_gives_the_indices_of_plain_loaders(self) -> None:
        writer = Writer()
        predicted([plain(7, 100, drop_last=True), plain(3)], StatefulDataCallback(), writer)

        assert [indices for _, _, indices, _ in writer.batches] == [*BATCHES[:3], [0, 1], [2]]
        assert writer.epochs[0][1] == [BATCHES[:3], [[0, 1], [2]]]

    def test_a_loader_of_the_models_own_hook_has_its_indices(self) -> None:
        class Hooked(Recorder):
            def predict_dataloader(self) -> Any:
                return plain(7, 100)

        writer = Writer()
        a_trainer(StatefulDataCallback(), writer).predict(Hooked())

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
    def test_the_indices_of_a_loader_in_another_order_are_those_of_the_samples(self, make: Any) -> None:
        writer = Writer()
        predicted(make(), StatefulDataCallback(), writer)

        assert [indices for _, _, indices, _ in writer.batches] == [ids for _, _, _, ids in writer.batches]
        assert writer.epochs[0][1] == [writer.epochs[0][0]]
        assert flat(writer.epochs[0][0]) != list(range(9))

    def test_the_indices_are_those_of_the_dataset_that_the_loader_reads(self) -> None:
        writer = Writer("batch")
        predicted(StatefulDataModule(predict=Subset(Numbers(9), [8, 6, 4]), batch_size=2), writer)

        assert writer.batches == [(0, 0, [0, 1], [8, 6]), (0, 1, [2], [4])]


def evaluated(how: str, data: Any, *callbacks: Any, **options: Any) -> list[tuple[int, int, Any]]:
    """Number of the loader, number of the batch and ids of every batch that an evaluation got."""
    model = Recorder()
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "dataloaders"
    getattr(a_trainer(*callbacks, **options), how)(model, verbose=False, **{keyword: data})
    return model.got


STAGES = {"validate": "val", "test": "test"}
TWO = [(0, 0, [0, 1]), (0, 1, [2]), (1, 0, [100, 101]), (1, 1, [102, 103])]
STRUCTURES: dict[str, Any] = {
    "tuple": lambda first, second: (first, second),
    "dict": lambda first, second: {"b": first, "a": second},
    "nested": lambda first, second: {"b": [first], "a": {"c": second}},
    "CombinedLoader": lambda first, second: CombinedLoader([first, second], "sequential"),
}


class TestEvaluation:
    @pytest.mark.parametrize("how", STAGES)
    def test_datasets_are_gone_through_in_order_one_after_the_other_again_and_again(self, how: str) -> None:
        datasets = {"second": Numbers(3), "none": Numbers(0), "first": Numbers(4, first=100)}
        data, model, trainer = StatefulDataModule(**{STAGES[how]: datasets}, batch_size=2), Recorder(), a_trainer()
        for _ in range(2):
            metrics = getattr(trainer, how)(model, datamodule=data, verbose=False)

        expected = [(0, 0, [0, 1]), (0, 1, [2]), (2, 0, [100, 101]), (2, 1, [102, 103])]
        assert model.got == expected * 2
        # The mean over the samples of each.
        assert metrics == [{"mean_id/dataloader_idx_0": 1.0}, {"mean_id/dataloader_idx_2": 101.5}]

    @pytest.mark.parametrize("how", STAGES)
    def test_one_dataset_gives_every_sample_in_order(self, how: str) -> None:
        got = evaluated(how, StatefulDataModule(**{STAGES[how]: Numbers(5)}, batch_size=2))

        assert got == [(0, 0, [0, 1]), (0, 1, [2, 3]), (0, 2, [4])]

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_the_callback_alone_takes_over_plain_loaders_in_any_structure(self, structure: str) -> None:
        loaders = STRUCTURES[structure](plain(3), plain(4, 100))

        assert evaluated("validate", loaders, StatefulDataCallback()) == TWO

    @pytest.mark.parametrize(
        ("mode", "steps"),
        [
            ("min_size", [([0, 1], [100, 101]), ([2], [102, 103])]),
            ("max_size", [([0, 1], [100, 101]), ([2], [102, 103]), (None, [104])]),
            ("max_size_cycle", [([0, 1], [100, 101]), ([2], [102, 103]), ([0, 1], [104])]),
        ],
    )
    def test_loaders_that_are_served_together_end_as_their_mode_says(self, mode: Any, steps: Any) -> None:
        loaders = CombinedLoader({"a": plain(3), "b": plain(5, 100)}, mode)

        assert evaluated("validate", loaders, StatefulDataCallback()) == [
            (0, number, {"a": a, "b": b}) for number, (a, b) in enumerate(steps)
        ]

    @pytest.mark.parametrize("how", STAGES)
    def test_a_limit_holds_for_each_loader(self, how: str) -> None:
        data = StatefulDataModule(**{STAGES[how]: [Numbers(5), Numbers(4, first=100)]}, batch_size=2)

        assert evaluated(how, data, **{f"limit_{STAGES[how]}_batches": 1}) == [(0, 0, [0, 1]), (1, 0, [100, 101])]


class TestEvaluationBesideTraining:
    def test_several_validation_loaders_are_gone_through_in_every_epoch(self) -> None:
        data = StatefulDataModule(Numbers(4), {"a": Numbers(3), "b": Numbers(2, first=100)}, batch_size=2)
        model = Recorder()
        a_trainer(max_epochs=2).fit(model, datamodule=data)

        assert model.got == [(0, 0, [0, 1]), (0, 1, [2]), (1, 0, [100, 101])] * 2

    @pytest.mark.filterwarnings("ignore:Your `.*`'s sampler has shuffling enabled.*")
    def test_a_plain_shuffled_validation_loader_has_another_order_in_each_epoch(self) -> None:
        model = Recorder()
        trainer = a_trainer(StatefulDataCallback(), max_epochs=2)
        trainer.fit(model, plain(4), plain(12, shuffle=True))
        orders = [flat([ids for _, _, ids in model.got[start : start + 6]]) for start in (0, 6)]

        assert [sorted(order) for order in orders] == [list(range(12))] * 2
        assert orders[0] != orders[1]

    @pytest.mark.parametrize("how", ["validate", "test", "predict"])
    def test_a_checkpoint_within_an_epoch_of_other_training_data_can_be_evaluated(
        self, tmp_path: Path, how: str
    ) -> None:
        trainer = a_trainer(max_steps=2)
        trainer.fit(Recorder(), datamodule=StatefulDataModule(Numbers(9), batch_size=2))
        trainer.save_checkpoint(tmp_path / "stop.ckpt")
        stage = {**STAGES, "predict": "predict"}[how]
        data = StatefulDataModule(Numbers(5), **{stage: Numbers(3)}, batch_size=2, seed=8)
        model = Recorder()
        getattr(a_trainer(), how)(model, datamodule=data, ckpt_path=tmp_path / "stop.ckpt")

        assert model.got == [(0, 0, [0, 1]), (0, 1, [2])]

    @pytest.mark.parametrize("how", ["validate", "predict"])
    def test_an_evaluation_between_two_fits_leaves_the_training_data_where_it_was(self, how: str) -> None:
        def trained(interrupted: bool) -> list[Any]:
            seen: list[Any] = []

            class Notes(pl.Callback):
                def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                    seen.append(batch["id"].tolist())

            data = StatefulDataModule(Numbers(12), Numbers(3), predict=Numbers(3), batch_size=2)
            trainer, model = a_trainer(Notes(), max_steps=4, limit_val_batches=1), Recorder()
            trainer.fit(model, datamodule=data)
            if interrupted:
                getattr(trainer, how)(model, datamodule=data)
            trainer.fit_loop.epoch_loop.max_steps = 6
            trainer.fit(model, datamodule=data)
            return seen

        assert trained(True) == trained(False)
        assert sorted(flat(trained(True))) == list(range(12))
