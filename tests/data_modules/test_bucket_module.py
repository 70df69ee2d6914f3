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
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, StopAt, assert_same_end, assert_stitches, seeded, train
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

from lightning_stateful import BucketBatchSampler, BucketDataModule, StatefulDataCallback, StatefulDataModule
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
FEWER_MOMENTS = [("on_before_backward", 1, 2), ("on_train_batch_end", 0, 4), ("on_validation_batch_end", 1, 1)]


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


@pytest.mark.parametrize("name", ["tokens", "given boundaries"])
def test_the_samples_that_meet_and_the_order_of_batches_differ_from_epoch_to_epoch(name: str) -> None:
    ledger = train(MODULES[name], max_epochs=2).ledger
    first, second = batches(ledger, 0), batches(ledger, 1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    # Sizes tell the buckets apart.
    assert list(map(len, first)) != list(map(len, second))


def test_without_shuffling_the_longest_bucket_comes_first_in_the_datasets_order() -> None:
    ledger = train(lambda: bucketed(shuffle=False, boundaries=[3, 8, 20]), max_epochs=2).ledger

    def place(index: int) -> tuple[int, int]:
        return sum(length_of(index) <= end for end in (3, 8)), index

    assert samples(ledger, 0) == samples(ledger, 1) == sorted(EVERY_SAMPLE, key=place)


def test_samples_too_long_are_left_out_and_counted_if_asked_for() -> None:
    data = bucketed(max_tokens=15, too_long="drop", eval_batch_size=3)
    run = train(lambda: data, max_epochs=1)
    assert sorted(samples(run.ledger)) == [index for index in EVERY_SAMPLE if length_of(index) <= 15]
    assert data.batch_sampler().num_dropped == sum(length > 15 for length in LENGTHS) > 0


def test_samples_too_long_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        bucketed(max_tokens=15, too_long="drop").train_dataloader()
    assert f"9 of {NUM_SAMPLES} samples are longer than a batch may be, and left out" in caplog.text


# Where lengths come from


def test_a_column_of_a_hugging_face_dataset_gives_lengths() -> None:
    datasets = pytest.importorskip("datasets")
    table = {"id": EVERY_SAMPLE, "num_tokens": LENGTHS, "x": [[0.1, 0.2, 0.3, 0.4]] * NUM_SAMPLES}
    table["words"] = [[7] * length for length in LENGTHS]
    dataset = datasets.Dataset.from_dict(table)
    expected = batches(train(bucketed, max_epochs=1).ledger)
    for column in ("num_tokens", "words"):
        torch_only = dataset.with_format("torch", columns=["id", "x"])
        run = train(lambda d=torch_only, c=column: bucketed(train=d, lengths=c, eval_batch_size=2), max_epochs=1)
        assert batches(run.ledger) == expected


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
    run = train(
        lambda: bucketed(lengths=given, eval_batch_size=3, cache_file=tmp_path / "cache" / "lengths.npy"), max_epochs=1
    )
    assert batches(run.ledger) == batches(train(bucketed, max_epochs=1).ledger)


def test_a_subset_has_the_lengths_of_its_samples() -> None:
    chosen = list(range(0, NUM_SAMPLES, 2))
    run = train(lambda: bucketed(train=Subset(Texts(), chosen)), max_epochs=1)
    assert sorted(samples(run.ledger)) == chosen
    assert all(fits("tokens", batch) for batch in batches(run.ledger))


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


@pytest.mark.parametrize("name", ["tokens", "batch size"])
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, MODULES[name], MOMENTS)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("tokens", "batch size")])
def test_every_budget_goes_on_exactly(tmp_path: Path, name: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, MODULES[name], [("on_train_batch_end", 1, 5)])


def test_a_run_saved_at_the_last_batch_of_an_epoch_begins_the_next_one(tmp_path: Path) -> None:
    last = len(bucketed().train_dataloader()) - 1
    moments = [("on_train_batch_end", 0, last), ("on_train_batch_end", 1, last), ("on_before_backward", 1, last)]
    assert_goes_on_from_every_moment(tmp_path, bucketed, moments)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulating": {"accumulate_grad_batches": 3},
    "validating over epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "limited": {"limit_train_batches": 6},
    "reloading": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_trainers_options_change_nothing_about_it(tmp_path: Path, options: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, bucketed, FEWER_MOMENTS, **OPTIONS[options])


CHAIN = [("on_train_batch_end", 0, 3), ("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]


def test_a_chain_of_stops_gives_the_uninterrupted_run(tmp_path: Path) -> None:
    ledgers, path = [], None
    for number, (hook, epoch, batch) in enumerate(CHAIN):
        stop = StopAt(hook, tmp_path / f"{number}.ckpt", epoch=epoch, batch=batch)
        train(bucketed, callbacks=[stop], ckpt_path=path, seed=1 if path is None else 50 + number)
        assert stop.ledger is not None
        ledgers.append(stop.ledger)
        path = tmp_path / f"{number}.ckpt"
    last = train(bucketed, ckpt_path=path, seed=99)
    whole = train(bucketed)
    assert_stitches([*ledgers, last.ledger], whole.ledger)
    assert_same_end(last, whole)


def test_the_state_is_plain_and_under_a_kilobyte(tmp_path: Path) -> None:
    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    train(bucketed, callbacks=[stop])
    state = torch.load(tmp_path / "stop.ckpt", weights_only=True)["BucketDataModule"]
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1000


# Objects used again


def test_the_batch_sampler_shows_what_a_run_will_train_on() -> None:
    data = bucketed()
    assert list(data.batch_sampler()) == [list(batch) for batch in batches(train(lambda: data).ledger, 0)]


@pytest.mark.filterwarnings("ignore:.*overfit_batches trains on the same batches.*")
def test_overfitting_trains_on_the_same_batches_in_every_epoch() -> None:
    ledger = train(bucketed, overfit_batches=3, max_epochs=2).ledger
    assert len(batches(ledger, 0)) == 3
    assert batches(ledger, 0) == batches(ledger, 1)


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


def test_with_a_batch_size_evaluation_has_the_same_in_order() -> None:
    assert evaluated("test", bucketed(batch_size=4, test=Texts(6))) == [(0, 1, 2, 3), (4, 5)]


def test_eval_batch_size_comes_before_the_batch_size() -> None:
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
    [lambda folder: LENGTHS, lambda folder: np.array(LENGTHS), file_of_lengths],
    ids=["list", "array", "path"],
)
def test_lengths_of_the_training_data_are_not_taken_for_those_of_others(tmp_path: Path, lengths: Any) -> None:
    data = bucketed(lengths=lengths(tmp_path), val=Texts())
    with pytest.raises(ConfigurationError, match=r"Evaluation data need eval_batch_size="):
        data.val_dataloader()


def test_a_file_named_by_a_string_is_not_taken_for_lengths_of_other_data(tmp_path: Path) -> None:
    data = bucketed(lengths=str(file_of_lengths(tmp_path)), val=Texts(first=VAL_FIRST))
    with pytest.raises(ConfigurationError, match="eval_batch_size="):
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


def test_evaluation_data_without_random_access_have_no_lengths() -> None:
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


# Other sources of loaders


def assert_resumes_exactly(folder: Path, run: Any, moments: list[tuple[str, int, int]]) -> Outcome:
    """``run(**options)`` trains; whatever it is stopped at, it goes on as it would have."""
    whole = run()
    for hook, epoch, batch in moments:
        stop = StopAt(hook, folder / "stop.ckpt", epoch=epoch, batch=batch)
        run(callbacks=[stop])
        resumed = run(ckpt_path=folder / "stop.ckpt", seed=99)
        assert stop.ledger is not None
        assert_stitches([stop.ledger, resumed.ledger], whole.ledger, 0)
        assert_same_end(resumed, whole)
    return whole


def parts(ledger: list[Any], name: str, epoch: int) -> list[Any]:
    """What a loader among several gave, step by step."""
    return [dict(event[4])[name] for event in trained(ledger) if event[1] == epoch]


TWO_SETS = {"a": (20, 0), "b": (40, 100)}


def by_hand(mode: str) -> Any:
    class ByHand(StatefulDataModule):
        def train_dataloader(self) -> Any:
            return CombinedLoader({name: loader_by_hand(*of) for name, of in TWO_SETS.items()}, mode)

    return ByHand(seed=7)


def test_several_training_datasets_give_one_batch_each_to_every_step(tmp_path: Path) -> None:
    def run(**options: Any) -> Outcome:
        # As many steps each: none may start over within an epoch.
        sets = {"a": Texts(20), "b": Texts(20)}
        return train(lambda: bucketed(train=sets, max_tokens=40, val=None), **{"max_epochs": 2, **options})

    whole = assert_resumes_exactly(tmp_path, run, [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 1)])
    for name in ("a", "b"):
        for epoch in range(2):
            found = parts(whole.ledger, name, epoch)
            assert all(fits("tokens", batch) for batch in found)
            assert sorted(index for batch in found for index in batch) == list(range(20))


def test_of_training_datasets_of_unequal_steps_the_shorter_starts_over(tmp_path: Path) -> None:
    def run(**options: Any) -> Outcome:
        sets = {"a": Texts(20), "b": Texts(40, first=100)}
        return train(lambda: bucketed(train=sets, max_tokens=40, val=None), **{"max_epochs": 2, **options})

    steps = [len(bucketed(train=Texts(length, first=first)).train_dataloader()) for length, first in TWO_SETS.values()]
    moments = [("on_train_batch_end", 0, steps[0] - 1), ("on_train_batch_end", 1, steps[0] + 1)]
    whole = assert_resumes_exactly(tmp_path, run, moments)
    for epoch in range(2):
        found = parts(whole.ledger, "a", epoch)
        passes = [found[: steps[0]], found[steps[0] : 2 * steps[0]]]
        assert len(found) == len(parts(whole.ledger, "b", epoch)) == steps[1] > steps[0]
        assert sorted(index for batch in passes[0] for index in batch) == list(range(20))
        assert passes[1] != passes[0][: len(passes[1])]


def loader_by_hand(length: int = NUM_SAMPLES, first: int = 0, **options: Any) -> DataLoader[Any]:
    data = Texts(length, first=first)
    batch_sampler = BucketBatchSampler(data.num_tokens, max_tokens=40, num_buckets=4, seed=7, **options)
    return DataLoader(data, batch_sampler=batch_sampler)


@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_datasets_of_unequal_steps_are_combined_as_asked_for(tmp_path: Path, mode: str) -> None:
    def run(**options: Any) -> Outcome:
        return train(lambda: by_hand(mode), **{"max_epochs": 2, **options})

    steps = [len(loader_by_hand(*of)) for of in TWO_SETS.values()]
    assert steps[0] < steps[1]
    moments = [
        ("on_train_batch_end", 0, 1),
        ("on_train_batch_end", 1, steps[0] - 2),
        ("on_train_batch_end", 0, steps[0]),
    ]
    whole = assert_resumes_exactly(tmp_path, run, moments[: 2 + (mode == "max_size")])
    served = [batch for batch in parts(whole.ledger, "a", 1) if batch is not None]
    assert sorted(index for batch in served for index in batch) == list(range(20))
    assert len(parts(whole.ledger, "b", 1)) == (steps[0] if mode == "min_size" else steps[1])


@pytest.mark.parametrize("batches_beside", [5, 12])
def test_buckets_beside_another_loader_go_on_exactly(tmp_path: Path, batches_beside: int) -> None:
    class Beside(StatefulDataModule):
        def train_dataloader(self) -> Any:
            plain = DataLoader(Numbers(batches_beside * 2, first=600), batch_size=2, shuffle=True)
            return {"texts": loader_by_hand(), "plain": plain}

    def run(**options: Any) -> Outcome:
        return train(lambda: Beside(seed=7), **{"max_epochs": 2, **options})

    whole = assert_resumes_exactly(tmp_path, run, [("on_train_batch_end", 0, 6), ("on_train_batch_end", 1, 3)])
    for epoch in range(2):
        found = parts(whole.ledger, "texts", epoch)
        assert sorted(index for batch in found for index in batch) == EVERY_SAMPLE


class OwnLoader(StatefulDataModule):
    def train_dataloader(self) -> Any:
        return loader_by_hand()

    def val_dataloader(self) -> Any:
        return loader_by_hand(9, VAL_FIRST, shuffle=False)


class PlainModule(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader_by_hand()

    def val_dataloader(self) -> Any:
        return loader_by_hand(9, VAL_FIRST, shuffle=False)


class HookedModel(LedgerModel):
    def train_dataloader(self) -> Any:
        return loader_by_hand()

    def val_dataloader(self) -> Any:
        return loader_by_hand(9, VAL_FIRST, shuffle=False)


@pytest.mark.parametrize("where", ["stateful module", "plain module", "hooks of the model", "argument"])
def test_a_batch_sampler_in_a_loader_from_anywhere_does_the_same(tmp_path: Path, where: str) -> None:
    make = {"stateful module": lambda: OwnLoader(seed=7), "plain module": PlainModule, "argument": loader_by_hand}

    def run(**options: Any) -> Outcome:
        callbacks = [*options.pop("callbacks", []), *([] if "stateful" in where else [StatefulDataCallback(seed=7)])]
        model = seeded(HookedModel if "model" in where else LedgerModel, options.pop("seed", 1))
        options = {"max_epochs": 2, **options}
        return train(make.get(where, lambda: None), callbacks=callbacks, model=model, **options)

    whole = assert_resumes_exactly(tmp_path, run, [("on_train_batch_end", 0, 4), ("on_train_batch_end", 1, 7)])
    ours = train(lambda: bucketed(val=None), max_epochs=2)
    assert trained(whole.ledger) == trained(ours.ledger)
    assert_same_end(whole, ours)
    if where != "argument":
        served = [index for event in whole.ledger if event[0] == "val" and event[1] == 0 for index in ids_of(event)]
        assert sorted(served) == list(range(VAL_FIRST, VAL_FIRST + 9))


class InSetup(BucketDataModule):
    """A dataset that is known only in setup()."""

    def setup(self, stage: str) -> None:
        self.train, self.val = Texts(), Texts(9, first=VAL_FIRST)


def test_datasets_set_in_setup_go_on_exactly(tmp_path: Path) -> None:
    def make() -> Any:
        return InSetup(lengths="num_tokens", max_tokens=40, num_buckets=4, seed=7)

    assert_goes_on_from_every_moment(tmp_path, make, FEWER_MOMENTS)
    assert batches(train(make).ledger) == batches(train(bucketed).ledger)


# From a command line


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the CLI uses what jsonargparse will drop
@pytest.mark.parametrize(
    ("arguments", "make"),
    [
        (["--data.max_tokens=40", "--data.num_buckets=4", "--data.log_data=true"], bucketed),
        (
            ["--data.max_tokens=60", "--data.num_buckets=4", "--data.cost.length=12"],
            MODULES["quadratic cost"],
        ),
        (["--data.max_tokens=40", "--data.boundaries=[3, 8, 20]"], MODULES["given boundaries"]),
    ],
)
def test_the_module_can_be_built_by_the_lightning_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], make: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    cli = LightningCLI(
        LedgerModel,
        InSetup,
        save_config_callback=None,
        args=[
            "fit", "--seed_everything=3", "--data.seed=7", "--data.lengths=num_tokens", *arguments,
            "--trainer.max_epochs=2", "--trainer.logger=false", "--trainer.accelerator=cpu",
            "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false", f"--trainer.default_root_dir={tmp_path}",
        ],
    )  # fmt: skip
    assert batches(cli.model.ledger) == batches(train(make, max_epochs=2).ledger)
