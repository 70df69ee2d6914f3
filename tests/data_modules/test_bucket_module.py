"""Batches of like lengths in a Trainer go on exactly, whatever the moment, the budget and where lengths come from."""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support.ledger import LedgerModel
from support.runs import Outcome, StopAt, assert_same_end, assert_stitches, train
from support.sources import assert_goes_on_from_every_moment, trained
from support.texts import (
    MODULES,
    NUM_SAMPLES,
    VAL_FIRST,
    Texts,
    batches,
    bucketed,
    fits,
    ids_of,
    length_of,
    measure,
    samples,
)
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_stateful import BucketBatchSampler, BucketDataModule, StatefulDataCallback
from lightning_stateful.errors import ConfigurationError, StatefulWarning

EVERY_SAMPLE = list(range(NUM_SAMPLES))
LENGTHS = [length_of(index) for index in EVERY_SAMPLE]
MOMENTS = [
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 1, 3),
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 4),
    ("on_train_batch_end", 1, 5),
    ("on_validation_start", 1, 0),
    ("on_validation_batch_end", 1, 1),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
]
# What is served


@pytest.mark.parametrize("name", ["tokens", "too long dropped", "full steps"])
def test_every_batch_is_within_its_budget_and_every_sample_comes_once_an_epoch(name: str) -> None:
    run = train(MODULES[name], max_epochs=2)
    assert all(fits(name, batch) for batch in batches(run.ledger))
    for epoch in range(2):
        served = samples(run.ledger, epoch)
        assert len(batches(run.ledger, epoch)) == run.trainer.num_training_batches
        if name == "too long dropped":
            assert sorted(served) == [index for index in EVERY_SAMPLE if length_of(index) <= 15]
        elif name == "full steps":
            assert len(set(served)) == len(served) < NUM_SAMPLES
        else:
            assert sorted(served) == EVERY_SAMPLE


def test_the_samples_that_meet_and_the_order_of_batches_differ_from_epoch_to_epoch() -> None:
    ledger = train(bucketed, max_epochs=2).ledger
    first, second = batches(ledger, 0), batches(ledger, 1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    # Sizes tell the buckets apart.
    assert list(map(len, first)) != list(map(len, second))


def test_without_shuffling_the_longest_bucket_comes_first_in_the_datasets_order() -> None:
    ledger = train(lambda: bucketed(shuffle=False, boundaries=[3, 8, 20]), max_epochs=2).ledger

    def place(index: int) -> tuple[int, int]:
        return sum(length_of(index) <= end for end in (3, 8)), index

    assert samples(ledger, 0) == samples(ledger, 1) == sorted(EVERY_SAMPLE, key=place)


def test_samples_too_long_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        data = bucketed(max_tokens=15, too_long="drop")
        data.train_dataloader()
    assert data.batch_sampler().num_dropped == sum(length > 15 for length in LENGTHS) == 9
    assert f"9 of {NUM_SAMPLES} samples are longer than a batch may be, and left out" in caplog.text


# Where lengths come from


def test_a_column_of_a_hugging_face_dataset_gives_lengths() -> None:
    datasets = pytest.importorskip("datasets")
    table = {"id": EVERY_SAMPLE, "num_tokens": LENGTHS, "x": [[0.1, 0.2, 0.3, 0.4]] * NUM_SAMPLES}
    table["words"] = [[7] * length for length in LENGTHS]
    dataset = datasets.Dataset.from_dict(table)
    for column in ("num_tokens", "words"):
        data = bucketed(train=dataset.with_format("torch", columns=["id", "x"]), lengths=column, eval_batch_size=2)
        assert list(data.batch_sampler()) == list(bucketed().batch_sampler())
        served = [batch["id"].tolist() for batch in data.train_dataloader()]
        assert served == list(data.batch_sampler())


def file_of_lengths(folder: Path) -> Path:
    np.save(folder / "lengths.npy", np.array(LENGTHS, dtype=np.uint8))
    return folder / "lengths.npy"


@pytest.mark.parametrize(
    "lengths",
    [
        lambda folder: LENGTHS,
        lambda folder: np.array(LENGTHS, dtype=np.int32),
        lambda folder: torch.tensor(LENGTHS),
        file_of_lengths,
        lambda folder: str(file_of_lengths(folder)),
        lambda folder: measure,
    ],
    ids=["list", "array", "tensor", "path", "name of a file", "function"],
)
def test_lengths_given_in_any_form_make_the_same_batches(tmp_path: Path, lengths: Any) -> None:
    given = lengths(tmp_path)
    data = bucketed(lengths=given, eval_batch_size=3, cache_file=tmp_path / "cache" / "lengths.npy")
    assert list(data.batch_sampler()) == list(bucketed().batch_sampler())


def test_a_subset_has_the_lengths_of_its_samples() -> None:
    chosen = list(range(0, NUM_SAMPLES, 2))
    served = [batch["id"].tolist() for batch in bucketed(train=Subset(Texts(), chosen)).train_dataloader()]
    assert sorted(index for batch in served for index in batch) == chosen
    assert all(fits("tokens", tuple(batch)) for batch in served)


def noting_measure(path: Path, sample: dict[str, torch.Tensor]) -> int:
    with path.open("a") as file:
        file.write(f"{int(sample['id'])}\n")
    return measure(sample)


def test_samples_are_measured_once_and_not_again_on_resume(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def make() -> Any:
        return bucketed(lengths=partial(noting_measure, calls), cache_file=tmp_path / "cache" / "lengths.npy", val=None)

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    train(make, callbacks=[stop], reload_dataloaders_every_n_epochs=1)
    assert set(map(int, calls.read_text().split())) == set(EVERY_SAMPLE)
    calls.unlink()
    resumed = train(make, ckpt_path=tmp_path / "stop.ckpt", seed=99)
    assert stop.ledger is not None
    assert_stitches([stop.ledger, resumed.ledger], train(lambda: bucketed(val=None)).ledger, 0)
    # Some are looked at, to see that the file is still right.
    assert len(calls.read_text().split()) % (32 + 2) == 0


def noting_process(path: Path, sample: dict[str, torch.Tensor]) -> int:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return measure(sample)


def test_lengths_are_measured_by_processes_of_their_own_and_kept_where_asked_for(tmp_path: Path) -> None:
    # Two batches of what a measuring process takes at once.
    data = bucketed(
        train=Texts(300), lengths=partial(noting_process, tmp_path / "pids"), cache_file=tmp_path / "a" / "b.npy",
        measure_workers=2,
    )  # fmt: skip
    data.train_dataloader()
    measured = Counter((tmp_path / "pids").read_text().split())
    assert str(os.getpid()) not in measured
    assert len(measured) == 2
    assert sum(measured.values()) == 300
    assert np.load(tmp_path / "a" / "b.npy").tolist() == Texts(300).num_tokens


def test_measuring_draws_nothing_from_the_runs_randomness(tmp_path: Path) -> None:
    measured = train(lambda: bucketed(lengths=measure, cache_file=tmp_path / "a.npy"), max_epochs=1)
    known = train(bucketed, max_epochs=1)
    assert measured.ledger == known.ledger
    assert_same_end(measured, known)


# Stops


@pytest.mark.parametrize("name", MODULES)
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    moments = MOMENTS if name == "tokens" else [("on_train_batch_end", 1, 5)]
    assert_goes_on_from_every_moment(tmp_path, MODULES[name], moments)


def test_a_run_saved_at_the_last_batch_of_an_epoch_begins_the_next_one(tmp_path: Path) -> None:
    last = len(bucketed().train_dataloader()) - 1
    moments = [("on_train_batch_end", 0, last), ("on_train_batch_end", 1, last), ("on_before_backward", 1, last)]
    assert_goes_on_from_every_moment(tmp_path, bucketed, moments)


def test_the_state_is_plain_and_under_a_kilobyte(tmp_path: Path) -> None:
    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    train(bucketed, callbacks=[stop])
    state = torch.load(tmp_path / "stop.ckpt", weights_only=True)["BucketDataModule"]
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1000


def test_the_batch_sampler_shows_what_a_run_will_train_on() -> None:
    data = bucketed()
    assert list(data.batch_sampler()) == [list(batch) for batch in batches(train(lambda: data).ledger, 0)]


# Evaluation and prediction


def evaluated(how: str, data: BucketDataModule) -> list[tuple[int, ...]]:
    model = LedgerModel()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    getattr(trainer, how)(model, datamodule=data, **({} if how == "predict" else {"verbose": False}))
    return [ids_of(event) for event in model.ledger]


@pytest.mark.parametrize("how", ["validate", "test"])
def test_evaluation_data_are_put_into_buckets_within_the_budget_each_sample_once(how: str) -> None:
    # Enough samples for several buckets.
    data = bucketed(**{"val": None, ("val" if how == "validate" else "test"): Texts(400)})
    found = evaluated(how, data)
    assert sorted(index for batch in found for index in batch) == list(range(400))
    assert all(fits("tokens", batch) for batch in found)
    longest = [max(map(length_of, batch)) for batch in found]
    half = len(found) // 2
    assert min(longest[:half]) >= max(longest[half + 1 :])


def test_evaluation_keeps_the_datasets_order_in_batches_of_eval_batch_size() -> None:
    found = evaluated("validate", bucketed(val=Texts(8), eval_batch_size=3))
    assert found == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_evaluation_has_the_batch_size_in_order_unless_eval_batch_size_says_otherwise() -> None:
    assert evaluated("test", bucketed(batch_size=4, test=Texts(6))) == [(0, 1, 2, 3), (4, 5)]
    assert evaluated("test", bucketed(batch_size=4, eval_batch_size=5, test=Texts(6))) == [(0, 1, 2, 3, 4), (5,)]


@pytest.mark.parametrize("options", [{"eval_batch_size": 2}, {"batch_size": 2}])
def test_predictions_come_in_the_datasets_order(options: dict[str, Any]) -> None:
    assert evaluated("predict", bucketed(predict=Texts(5), **options)) == [(0, 1), (2, 3), (4,)]


def test_prediction_without_a_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Prediction keeps the dataset's order.*eval_batch_size"):
        evaluated("predict", bucketed(predict=Texts(5)))


def test_several_evaluation_datasets_are_each_put_into_buckets() -> None:
    found = evaluated("validate", bucketed(val=[Texts(9), Texts(7, first=100)]))
    assert sorted(index for batch in found for index in batch) == [*range(9), *range(100, 107)]
    assert all(fits("tokens", batch) for batch in found)


def test_evaluation_data_are_measured_where_lengths_are_computed(tmp_path: Path) -> None:
    data = bucketed(lengths=measure, val=Texts(30, first=VAL_FIRST), cache_file=tmp_path / "lengths.npy")
    found = evaluated("validate", data)
    assert np.load(tmp_path / "lengths-val.npy").size == 30
    assert sorted(index for batch in found for index in batch) == list(range(VAL_FIRST, VAL_FIRST + 30))
    assert all(fits("tokens", batch) for batch in found)


@pytest.mark.parametrize(
    "lengths",
    [lambda folder: LENGTHS, file_of_lengths, lambda folder: str(file_of_lengths(folder))],
    ids=["list", "path", "name of a file"],
)
def test_lengths_of_the_training_data_are_not_taken_for_those_of_others(tmp_path: Path, lengths: Any) -> None:
    data = bucketed(lengths=lengths(tmp_path), val=Texts())
    with pytest.raises(ConfigurationError, match=r"Evaluation data need eval_batch_size="):
        data.val_dataloader()


def test_evaluation_says_how_many_samples_it_leaves_out() -> None:
    data = bucketed(train=None, max_tokens=15, too_long="drop")
    with pytest.warns(StatefulWarning, match="2 of 9 samples for evaluation are too long"):
        served = [int(index) for batch in data.val_dataloader() for index in batch["id"]]
    assert len(served) == 7


# Refusals


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Texts()[index] for index in range(NUM_SAMPLES))


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return NUM_SAMPLES


@pytest.mark.parametrize("stream", [Stream(), StreamOfKnownLength()])
def test_data_without_random_access_are_refused(stream: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"a {type(stream).__name__} has not: it has no random access"):
        train(lambda: bucketed(train=stream))


def test_evaluation_data_without_random_access_come_in_batches_of_eval_batch_size() -> None:
    found = evaluated("validate", bucketed(val=Stream(), eval_batch_size=20))
    assert [len(batch) for batch in found] == [20, 20, 7]
    with pytest.raises(ConfigurationError, match="eval_batch_size"):
        evaluated("validate", bucketed(val=Stream(), lengths=measure))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "samples too long": ({"max_tokens": 15}, r"9 of 47 samples are longer than max_tokens=15 allows; the longest has"),
    "too few lengths": ({"lengths": LENGTHS[:-1]}, "There are 46 lengths for the 47 samples of a Texts"),
    "an unknown name": ({"lengths": "nothing"}, "lengths='nothing' is neither a column nor an attribute of the Texts"),
    "no budget": ({"max_tokens": None}, "Pass either max_tokens or batch_size"),
    "lengths of nothing": ({"train": Texts(0)}, "are empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_trained(case: str) -> None:
    options, said = REFUSED[case]
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match=said):
        train(lambda: bucketed(**{"val": None, **options}), model=model)
    assert model.ledger == []


def test_a_function_that_gives_no_length_is_refused_with_the_sample() -> None:
    with pytest.raises(ConfigurationError, match="says -3 of sample 0, and not a length"):
        train(lambda: bucketed(lengths=lambda sample: -3))


def test_a_module_without_training_data_says_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="BucketDataModule has no dataset for this stage"):
        train(lambda: bucketed(train=None))


# Several datasets


def parts(ledger: list[Any], name: str, epoch: int) -> list[Any]:
    """What a loader among several gave, step by step."""
    return [dict(event[4])[name] for event in trained(ledger) if event[1] == epoch]


def test_of_training_datasets_of_unequal_steps_the_shorter_starts_over(tmp_path: Path) -> None:
    def make() -> Any:
        return bucketed(train={"a": Texts(20), "b": Texts(40, first=100)}, val=None)

    steps = [len(bucketed(train=data).batch_sampler()) for data in (Texts(20), Texts(40, first=100))]
    moments = [("on_train_batch_end", 0, steps[0] - 1), ("on_train_batch_end", 1, steps[0] + 1)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0)
    for epoch in range(2):
        found = parts(whole.ledger, "a", epoch)
        passes = [found[: steps[0]], found[steps[0] : 2 * steps[0]]]
        assert len(found) == len(parts(whole.ledger, "b", epoch)) == steps[1] > steps[0]
        assert sorted(index for batch in passes[0] for index in batch) == list(range(20))
        assert passes[1] != passes[0][: len(passes[1])]


# Other places that loaders come from


def loader_by_hand(length: int = NUM_SAMPLES, first: int = 0, **options: Any) -> DataLoader[Any]:
    data = Texts(length, first=first)
    batch_sampler = BucketBatchSampler(data.num_tokens, max_tokens=40, num_buckets=4, seed=7, **options)
    return DataLoader(data, batch_sampler=batch_sampler)


class PlainModule(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader_by_hand()

    def val_dataloader(self) -> Any:
        return loader_by_hand(9, VAL_FIRST, shuffle=False)


def test_a_batch_sampler_in_a_loader_of_a_plain_module_does_the_same(tmp_path: Path) -> None:
    def run(make: Any, *, callbacks: Any = (), **options: Any) -> Outcome:
        return train(make, callbacks=[StatefulDataCallback(seed=7), *callbacks], **options)

    whole = assert_goes_on_from_every_moment(tmp_path, PlainModule, [("on_train_batch_end", 1, 7)], run)
    ours = train(lambda: bucketed(val=None), max_epochs=2)
    assert trained(whole.ledger) == trained(ours.ledger)
    served = [index for event in whole.ledger if event[:2] == ("val", 0) for index in ids_of(event)]
    assert sorted(served) == list(range(VAL_FIRST, VAL_FIRST + 9))


class InSetup(BucketDataModule):
    """A dataset that is known only in setup()."""

    def setup(self, stage: str) -> None:
        self.train, self.val = Texts(), Texts(9, first=VAL_FIRST)


def test_datasets_set_in_setup_go_on_exactly(tmp_path: Path) -> None:
    def make() -> Any:
        return InSetup(lengths="num_tokens", max_tokens=40, num_buckets=4, seed=7)

    whole = assert_goes_on_from_every_moment(tmp_path, make, [("on_validation_batch_end", 1, 1)])
    assert batches(whole.ledger) == batches(train(bucketed, max_epochs=2).ledger)
