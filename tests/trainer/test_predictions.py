"""Predictions come in the order of the dataset and know whose they are; evaluation gives every sample once."""

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

INTERVALS = ["batch", "epoch", "batch_and_epoch"]


class Recorder(pl.LightningModule):
    """Predicts the ids of a batch, and remembers which batches it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.got: list[tuple[int, int, Any]] = []

    def _note(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.got.append((dataloader_idx, batch_idx, ids_of(batch)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._note(batch, batch_idx, dataloader_idx)
        if "id" in batch:
            self.log("mean_id", batch["id"].float().mean(), batch_size=len(batch["id"]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self._note(batch, batch_idx, dataloader_idx)
        return batch["id"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Writer(BasePredictionWriter):
    """Remembers what it should write."""

    def __init__(self, interval: Any) -> None:
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


class TestReturnedPredictions:
    @pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 10])
    def test_they_come_in_the_order_of_the_dataset(self, batch_size: int) -> None:
        assert flat(predicted(of_7(batch_size=batch_size))) == list(range(100, 107))

    def test_they_come_batch_by_batch(self) -> None:
        assert predicted(of_7()) == IDS

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_training_in_another_order_does_not_concern_them(self, shuffle: bool) -> None:
        data = StatefulDataModule(train=Numbers(6), predict=Numbers(7, first=100), batch_size=2, shuffle=shuffle)
        model, trainer = Recorder(), a_trainer()
        trainer.fit(model, datamodule=data)

        assert numbers(trainer.predict(model, datamodule=data)) == IDS

    def test_dropping_training_batches_drops_none_of_them(self) -> None:
        assert predicted(of_7(drop_last=True)) == IDS

    def test_several_datasets_give_a_list_a_dataset(self) -> None:
        data = StatefulDataModule(predict=[Numbers(5), Numbers(3, first=100)], batch_size=2)

        assert predicted(data) == [[[0, 1], [2, 3], [4]], [[100, 101], [102]]]

    def test_a_dict_of_datasets_gives_a_list_a_dataset(self) -> None:
        data = StatefulDataModule(predict={"b": Numbers(5), "a": Numbers(3, first=100)}, batch_size=2)

        assert predicted(data) == [[[0, 1], [2, 3], [4]], [[100, 101], [102]]]

    def test_workers_change_nothing(self) -> None:
        assert predicted(of_7(num_workers=1)) == IDS

    def test_predicting_again_gives_the_same(self) -> None:
        data, model, trainer = of_7(), Recorder(), a_trainer()

        assert numbers(trainer.predict(model, datamodule=data)) == numbers(trainer.predict(model, datamodule=data))

    def test_the_callback_alone_leaves_the_order_of_a_plain_loader(self) -> None:
        assert predicted(plain(7, 100), StatefulDataCallback()) == IDS

    def test_a_limit_is_kept(self) -> None:
        assert predicted(of_7(), limit_predict_batches=2) == IDS[:2]

    def test_a_limit_holds_for_each_of_several_loaders(self) -> None:
        data = StatefulDataModule(predict=[Numbers(5), Numbers(3, first=100)], batch_size=2)

        assert predicted(data, limit_predict_batches=1) == [[[0, 1]], [[100, 101]]]

    def test_fewer_samples_than_a_batch_are_predicted_once(self) -> None:
        assert predicted(StatefulDataModule(predict=Numbers(1), batch_size=4)) == [[0]]


class TestWriters:
    @pytest.mark.parametrize("interval", ["batch", "batch_and_epoch"])
    def test_a_writer_gets_the_indices_of_each_batch(self, interval: str) -> None:
        writer = Writer(interval)
        predicted(of_7(), writer)

        assert writer.batches == [(0, number, BATCHES[number], IDS[number]) for number in range(4)]

    @pytest.mark.parametrize("interval", ["epoch", "batch_and_epoch"])
    def test_a_writer_gets_the_indices_of_all_batches_at_the_end(self, interval: str) -> None:
        writer = Writer(interval)
        predicted(of_7(), writer)

        assert writer.epochs == [(IDS, [BATCHES])]

    def test_a_writer_is_called_when_it_wants_to_be(self) -> None:
        writers = [Writer(interval) for interval in INTERVALS]
        for writer in writers:
            predicted(of_7(), writer)

        assert [(len(writer.batches), len(writer.epochs)) for writer in writers] == [(4, 0), (0, 1), (4, 1)]

    @pytest.mark.parametrize("interval", INTERVALS)
    def test_writers_with_other_intervals_do_not_disturb_each_other(self, interval: str) -> None:
        writer, others = Writer(interval), [Writer(other) for other in INTERVALS]
        predicted(of_7(), *others, writer)

        assert (writer.batches, writer.epochs) == next(
            (other.batches, other.epochs) for other in others if other.interval == writer.interval
        )

    @pytest.mark.parametrize("container", ["list", "dict"])
    def test_each_of_several_loaders_has_indices_of_its_own(self, container: str) -> None:
        datasets = [Numbers(3, first=100), Numbers(5, first=200)]
        writer = Writer("batch_and_epoch")
        data = datasets if container == "list" else dict(zip("zy", datasets, strict=True))
        predicted(StatefulDataModule(predict=data, batch_size=2), writer)

        assert writer.batches == [
            (0, 0, [0, 1], [100, 101]),
            (0, 1, [2], [102]),
            (1, 0, [0, 1], [200, 201]),
            (1, 1, [2, 3], [202, 203]),
            (1, 2, [4], [204]),
        ]
        assert writer.epochs[0][1] == [[[0, 1], [2]], [[0, 1], [2, 3], [4]]]

    def test_a_loader_without_samples_among_others_has_no_indices(self) -> None:
        writer = Writer("batch_and_epoch")
        predicted(StatefulDataModule(predict=[Numbers(3), Numbers(0), Numbers(2)], batch_size=2), writer)

        assert [(loader, indices) for loader, _, indices, _ in writer.batches] == [(0, [0, 1]), (0, [2]), (2, [0, 1])]
        assert writer.epochs[0][1] == [[[0, 1], [2]], [], [[0, 1]]]

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_batches_that_workers_read_ahead_keep_their_indices(self, num_workers: int) -> None:
        writer = Writer("batch_and_epoch")
        predicted(of_7(num_workers=num_workers), writer)

        assert [indices for _, _, indices, _ in writer.batches] == BATCHES
        assert writer.epochs == [(IDS, [BATCHES])]

    def test_a_limit_cuts_the_indices_too(self) -> None:
        writer = Writer("batch_and_epoch")
        predicted(of_7(), writer, limit_predict_batches=3)

        assert writer.epochs == [(IDS[:3], [BATCHES[:3]])]

    def test_each_of_several_predictions_has_its_indices(self) -> None:
        writer, model, data = Writer("batch_and_epoch"), Recorder(), of_7()
        trainer = a_trainer(writer)
        trainer.predict(model, datamodule=data)
        trainer.predict(model, datamodule=data)

        assert writer.epochs == [(IDS, [BATCHES])] * 2
        assert writer.batches[:4] == writer.batches[4:]

    def test_nothing_need_be_returned(self) -> None:
        writer = Writer("epoch")
        a_trainer(writer).predict(Recorder(), datamodule=of_7(), return_predictions=False)

        assert writer.epochs == [(IDS, [BATCHES])]

    @pytest.mark.parametrize("interval", INTERVALS)
    def test_the_callback_alone_gives_the_indices_of_plain_loaders(self, interval: str) -> None:
        writer = Writer(interval)
        predicted([plain(7, 100), plain(3)], StatefulDataCallback(), writer)

        if "batch" in interval:
            assert [indices for _, _, indices, _ in writer.batches] == [*BATCHES, [0, 1], [2]]
        if "epoch" in interval:
            assert writer.epochs[0][1] == [BATCHES, [[0, 1], [2]]]

    def test_a_loader_of_the_models_own_hook_has_its_indices(self) -> None:
        class Hooked(Recorder):
            def predict_dataloader(self) -> Any:
                return plain(7, 100)

        writer = Writer("batch_and_epoch")
        a_trainer(StatefulDataCallback(), writer).predict(Hooked())

        assert writer.epochs == [(IDS, [BATCHES])]

    @pytest.mark.filterwarnings("ignore:Your `.*`'s sampler has shuffling enabled.*")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: plain(9, batch_size=2, shuffle=True),
            lambda: StatefulLoader(Numbers(9), batch_size=2, shuffle=True, seed=4),
            lambda: plain(9, batch_size=2, sampler=WeightedRandomSampler([1.0] * 9, 9)),
        ],
        ids=["shuffled", "stateful", "drawn"],
    )
    def test_the_indices_of_a_loader_in_another_order_are_those_of_the_samples(self, make: Any) -> None:
        writer = Writer("batch_and_epoch")
        predicted(make(), StatefulDataCallback(), writer)

        assert [indices for _, _, indices, _ in writer.batches] == [ids for _, _, _, ids in writer.batches]
        assert writer.epochs[0][1] == [writer.epochs[0][0]]
        assert flat(writer.epochs[0][0]) != list(range(9))

    def test_the_indices_are_those_of_the_dataset_that_the_loader_reads(self) -> None:
        writer = Writer("batch")
        predicted(StatefulDataModule(predict=Subset(Numbers(9), [8, 6, 4]), batch_size=2), writer)

        assert writer.batches == [(0, 0, [0, 1], [8, 6]), (0, 1, [2], [4])]

    def test_dropped_samples_have_no_indices(self) -> None:
        writer = Writer("epoch")
        predicted(plain(7, 100, drop_last=True), StatefulDataCallback(), writer)

        assert writer.epochs == [(IDS[:3], [BATCHES[:3]])]

    def test_indices_are_plain_integers(self) -> None:
        writer = Writer("epoch")
        predicted(of_7(), writer)

        assert {type(index) for index in flat(writer.epochs[0][1])} == {int}


def evaluated(how: str, data: Any, *callbacks: Any, **options: Any) -> list[tuple[int, int, Any]]:
    """Number of the loader, number of the batch and ids of every batch that an evaluation got."""
    model = Recorder()
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "dataloaders"
    getattr(a_trainer(*callbacks, **options), how)(model, verbose=False, **{keyword: data})
    return model.got


STAGES = {"validate": "val", "test": "test"}


@pytest.mark.parametrize("how", STAGES)
class TestEvaluation:
    def test_one_loader_gives_every_sample_in_order(self, how: str) -> None:
        got = evaluated(how, StatefulDataModule(**{STAGES[how]: Numbers(5)}, batch_size=2))

        assert got == [(0, 0, [0, 1]), (0, 1, [2, 3]), (0, 2, [4])]

    def test_several_datasets_are_gone_through_one_after_the_other(self, how: str) -> None:
        datasets = [Numbers(3), Numbers(4, first=100)]
        got = evaluated(how, StatefulDataModule(**{STAGES[how]: datasets}, batch_size=2))

        assert got == [(0, 0, [0, 1]), (0, 1, [2]), (1, 0, [100, 101]), (1, 1, [102, 103])]

    def test_a_dict_of_datasets_is_gone_through_in_its_order(self, how: str) -> None:
        datasets = {"second": Numbers(3), "first": Numbers(4, first=100)}
        got = evaluated(how, StatefulDataModule(**{STAGES[how]: datasets}, batch_size=2))

        assert got == [(0, 0, [0, 1]), (0, 1, [2]), (1, 0, [100, 101]), (1, 1, [102, 103])]

    @pytest.mark.parametrize("container", ["list", "tuple", "dict", "nested", "CombinedLoader"])
    def test_the_callback_alone_takes_over_plain_loaders_in_any_structure(self, how: str, container: str) -> None:
        first, second = plain(3), plain(4, 100)
        loaders = {
            "list": [first, second],
            "tuple": (first, second),
            "dict": {"b": first, "a": second},
            "nested": {"b": [first], "a": {"c": second}},
            "CombinedLoader": CombinedLoader([first, second], "sequential"),
        }[container]

        assert evaluated(how, loaders, StatefulDataCallback()) == [
            (0, 0, [0, 1]),
            (0, 1, [2]),
            (1, 0, [100, 101]),
            (1, 1, [102, 103]),
        ]

    @pytest.mark.parametrize(
        ("mode", "steps"),
        [
            ("min_size", [([0, 1], [100, 101]), ([2], [102, 103])]),
            ("max_size", [([0, 1], [100, 101]), ([2], [102, 103]), (None, [104])]),
            ("max_size_cycle", [([0, 1], [100, 101]), ([2], [102, 103]), ([0, 1], [104])]),
        ],
    )
    def test_loaders_that_are_served_together_end_as_their_mode_says(self, how: str, mode: Any, steps: Any) -> None:
        loaders = CombinedLoader({"a": plain(3), "b": plain(5, 100)}, mode)

        assert evaluated(how, loaders, StatefulDataCallback()) == [
            (0, number, {"a": a, "b": b}) for number, (a, b) in enumerate(steps)
        ]

    def test_every_metric_is_the_mean_over_its_loaders_samples(self, how: str) -> None:
        data = StatefulDataModule(**{STAGES[how]: [Numbers(5), Numbers(4, first=100)]}, batch_size=2)
        metrics = getattr(a_trainer(), how)(Recorder(), datamodule=data, verbose=False)

        assert metrics == [{"mean_id/dataloader_idx_0": 2.0}, {"mean_id/dataloader_idx_1": 101.5}]

    def test_a_limit_holds_for_each_loader(self, how: str) -> None:
        data = StatefulDataModule(**{STAGES[how]: [Numbers(5), Numbers(4, first=100)]}, batch_size=2)

        assert evaluated(how, data, **{f"limit_{STAGES[how]}_batches": 1}) == [(0, 0, [0, 1]), (1, 0, [100, 101])]

    def test_workers_change_nothing(self, how: str) -> None:
        datasets = [Numbers(3), Numbers(4, first=100)]
        ours, theirs = (
            evaluated(how, StatefulDataModule(**{STAGES[how]: datasets}, batch_size=2, num_workers=num_workers))
            for num_workers in (0, 1)
        )

        assert ours == theirs

    def test_evaluating_again_gives_the_same(self, how: str) -> None:
        data, model, trainer = StatefulDataModule(**{STAGES[how]: Numbers(5)}, batch_size=2), Recorder(), a_trainer()
        for _ in range(2):
            getattr(trainer, how)(model, datamodule=data, verbose=False)

        assert model.got[:3] == model.got[3:]

    def test_an_empty_loader_among_others_is_passed_over(self, how: str) -> None:
        data = StatefulDataModule(**{STAGES[how]: [Numbers(0), Numbers(2)]}, batch_size=2)

        assert evaluated(how, data) == [(1, 0, [0, 1])]


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
    def test_a_checkpoint_of_other_training_data_can_be_evaluated(self, tmp_path: Path, how: str) -> None:
        trainer = a_trainer(max_steps=2)
        trainer.fit(Recorder(), datamodule=StatefulDataModule(Numbers(9), batch_size=2))
        trainer.save_checkpoint(tmp_path / "stop.ckpt")
        stage = {**STAGES, "predict": "predict"}[how]
        data = StatefulDataModule(Numbers(5), **{stage: Numbers(3)}, batch_size=2, seed=8)
        model = Recorder()
        getattr(a_trainer(), how)(model, datamodule=data, ckpt_path=tmp_path / "stop.ckpt")

        assert model.got == [(0, 0, [0, 1]), (0, 1, [2])]

    @pytest.mark.parametrize("how", ["validate", "test", "predict"])
    def test_an_evaluation_between_two_fits_leaves_the_training_data_where_it_was(self, how: str) -> None:
        def trained(interrupted: bool) -> list[Any]:
            seen: list[Any] = []

            class Notes(pl.Callback):
                def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                    seen.append(batch["id"].tolist())

            data = StatefulDataModule(Numbers(12), Numbers(3), Numbers(3), Numbers(3), batch_size=2)
            trainer, model = a_trainer(Notes(), max_steps=4, limit_val_batches=1), Recorder()
            trainer.fit(model, datamodule=data)
            if interrupted:
                getattr(trainer, how)(model, datamodule=data)
            trainer.fit_loop.epoch_loop.max_steps = 6
            trainer.fit(model, datamodule=data)
            return seen

        assert trained(True) == trained(False)
        assert sorted(flat(trained(True))) == list(range(12))
