"""Batches of like lengths in a Trainer: what they serve, in training and evaluation, and where lengths come from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import LedgerModel, batches, ids_of, parts, samples, trained
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_resumes,
    assert_same_end,
    quiet_trainer,
    stopped,
    train,
    train_alone,
)
from support.sampler_cases import PlainData
from support.texts import MODULES, NUM_SAMPLES, VAL_FIRST, Texts, bucketed, fits, length_of, measure
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import BucketBatchSampler, BucketDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning

EVERY_SAMPLE = list(range(NUM_SAMPLES))
LENGTHS = [length_of(index) for index in EVERY_SAMPLE]

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


def test_batches_and_their_order_differ_from_epoch_to_epoch_unless_nothing_is_shuffled() -> None:
    ledger = train(bucketed, max_epochs=2).ledger
    first, second = batches(ledger, 0), batches(ledger, 1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    # Sizes tell the buckets apart.
    assert list(map(len, first)) != list(map(len, second))
    ledger = train(lambda: bucketed(shuffle=False, boundaries=[3, 8, 20]), max_epochs=2).ledger
    # The longest bucket first, in the dataset's order.
    expected = sorted(EVERY_SAMPLE, key=lambda index: (sum(length_of(index) <= end for end in (3, 8)), index))
    assert samples(ledger, 0) == samples(ledger, 1) == expected


def test_samples_too_long_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        data = bucketed(max_tokens=15, too_long="drop")
        data.train_dataloader()
    assert data.batch_sampler().num_dropped == sum(length > 15 for length in LENGTHS) == 9
    assert f"9 of {NUM_SAMPLES} samples are longer than a batch may be, and left out" in caplog.text


# Where lengths come from


def file_of_lengths(folder: Path) -> Path:
    np.save(folder / "lengths.npy", np.array(LENGTHS, dtype=np.uint8))
    return folder / "lengths.npy"


@pytest.mark.parametrize("lengths", [lambda folder: torch.tensor(LENGTHS), file_of_lengths, lambda folder: measure])
def test_lengths_given_in_any_form_make_the_same_batches(tmp_path: Path, lengths: Any) -> None:
    data = bucketed(lengths=lengths(tmp_path), eval_batch_size=3, cache_file=tmp_path / "cache" / "lengths.npy")
    assert list(data.batch_sampler()) == list(bucketed().batch_sampler())


def noting(path: Path, sample: dict[str, torch.Tensor]) -> int:
    """Measures a sample and notes it."""
    with path.open("a") as file:
        file.write(f"{int(sample['id'])} ")
    return measure(sample)


def test_samples_are_measured_once_and_not_again_on_resume(tmp_path: Path) -> None:
    def make() -> Any:
        return bucketed(lengths=partial(noting, tmp_path / "calls"), cache_file=tmp_path / "lengths.npy", val=None)

    path = tmp_path / "stop.ckpt"
    before = stopped(path, make, epoch=1, batch=3, reload_dataloaders_every_n_epochs=1)
    assert set(map(int, (tmp_path / "calls").read_text().split())) == set(EVERY_SAMPLE)
    (tmp_path / "calls").unlink()
    assert_resumes(path, before, 0, make=make, whole=train(lambda: bucketed(val=None)))
    # Some are looked at, to see that the file is still right.
    assert len((tmp_path / "calls").read_text().split()) % (32 + 2) == 0


def test_measuring_draws_nothing_from_the_runs_randomness(tmp_path: Path) -> None:
    measured = train(lambda: bucketed(lengths=measure, cache_file=tmp_path / "a.npy"), max_epochs=1)
    known = train(bucketed, max_epochs=1)
    assert measured.ledger == known.ledger
    assert_same_end(measured, known)


def test_the_batch_sampler_shows_what_a_run_will_train_on() -> None:
    data = bucketed()
    assert list(data.batch_sampler()) == [list(batch) for batch in batches(train(lambda: data).ledger, 0)]


# Evaluation and prediction


def evaluated(how: str, data: BucketDataModule) -> list[tuple[int, ...]]:
    model = LedgerModel()
    getattr(quiet_trainer(), how)(model, datamodule=data)
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


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eval_batch_size": 3}, [(0, 1, 2), (3, 4, 5)]),
        ({"batch_size": 4}, [(0, 1, 2, 3), (4, 5)]),
        ({"batch_size": 4, "eval_batch_size": 5}, [(0, 1, 2, 3, 4), (5,)]),
    ],
)
def test_evaluation_keeps_the_datasets_order_in_batches_of_a_size(
    how: str, options: dict[str, Any], expected: Any
) -> None:
    stage = "val" if how == "validate" else how
    assert evaluated(how, bucketed(**{stage: Texts(6), **options})) == expected


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


def test_evaluation_data_without_random_access_come_in_batches_of_eval_batch_size() -> None:
    found = evaluated("validate", bucketed(val=Stream(), eval_batch_size=20))
    assert [len(batch) for batch in found] == [20, 20, 7]
    with pytest.raises(ConfigurationError, match="eval_batch_size"):
        evaluated("validate", bucketed(val=Stream(), lengths=measure))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "samples too long": ({"max_tokens": 15}, r"9 of 47 samples are longer than max_tokens=15 allows; the longest has"),
    "no budget": ({"max_tokens": None}, "Pass either max_tokens or batch_size"),
    "lengths of nothing": ({"train": Texts(0)}, "are empty"),
    "no data": ({"train": None}, "BucketDataModule has no dataset for this stage"),
    "a stream": ({"train": Stream()}, "a Stream has not: it has no random access"),
    "a stream of known length": (
        {"train": StreamOfKnownLength()},
        "a StreamOfKnownLength has not: it has no random access",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_trained(case: str) -> None:
    options, said = REFUSED[case]
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match=said):
        train(lambda: bucketed(**{"val": None, **options}), model=model)
    assert model.ledger == []


# Several datasets


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


def plain_loaders() -> Any:
    return PlainData(loader_by_hand, lambda: loader_by_hand(9, VAL_FIRST, shuffle=False))


def test_a_batch_sampler_in_a_loader_of_a_plain_module_does_the_same(tmp_path: Path) -> None:
    moments = [("on_train_batch_end", 1, 7)]
    whole = assert_goes_on_from_every_moment(tmp_path, plain_loaders, moments, train_alone)
    ours = train(lambda: bucketed(val=None), max_epochs=2)
    assert trained(whole.ledger) == trained(ours.ledger)
    assert sorted(samples(whole.ledger, 0, "val")) == list(range(VAL_FIRST, VAL_FIRST + 9))
