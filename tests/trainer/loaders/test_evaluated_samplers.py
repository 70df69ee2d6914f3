"""Evaluation over other people's samplers gives every sample once, and knows whose its predictions are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import sampler_cases, samplers, sources
from support.runs import train
from support.sampler_cases import TO_EVALUATE, evaluate
from support.samplers import LENGTH, LOADERS, loader


def flat(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch]


def batches_of(make: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in make()]


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices.*:UserWarning")
@pytest.mark.parametrize("name", TO_EVALUATE)
def test_evaluation_gives_every_sample_once(name: str) -> None:
    found = evaluate(TO_EVALUATE[name])
    expected = sorted(flat(batches_of(TO_EVALUATE[name])))
    for stage in ("validate", "test", "predict"):
        assert sorted(flat(found[stage])) == expected
    assert found["validate"] == found["test"] == found["predict"] == found["predictions"]


@pytest.mark.parametrize("name", ["an odd batch", "shuffled batches", "own state", "one at a time"])
def test_predictions_are_written_with_the_indices_that_they_belong_to(name: str) -> None:
    found = evaluate(TO_EVALUATE[name])
    assert [indices for indices, _ in found["written"]] == found["predict"]
    assert [predicted for _, predicted in found["written"]] == found["predict"]
    assert found["written at the end"] == [found["predict"]]


@pytest.mark.parametrize("name", ["batches without len", "samples without len"])
def test_of_predictions_of_a_sampler_without_len_it_is_said_that_there_are_no_indices(name: str) -> None:
    with pytest.warns(UserWarning, match="Couldn't infer the batch indices"):
        found = evaluate(TO_EVALUATE[name])
    assert [predicted for _, predicted in found["written"]] == found["predict"]
    assert [indices for indices, _ in found["written"]] == [[] for _ in found["predict"]]
    assert found["written at the end"] == [[]]


def test_validation_within_training_sees_every_sample_of_a_sampler_of_its_own() -> None:
    def run(**options: Any) -> Any:
        data = sampler_cases.PlainData(LOADERS["class balanced"], LOADERS["batches without len"])
        callback = sampler_cases.StatefulDataCallback(seed=5)
        return train(lambda: data, callbacks=[callback, *options.pop("callbacks", [])], max_epochs=2, **options)

    for epoch in range(2):
        validated = [event[4] for event in run().ledger if event[:2] == ("val", epoch)]
        assert sorted(flat(validated)) == list(range(LENGTH))


def test_a_sampler_shared_by_training_and_validation_is_one_to_each(tmp_path: Path) -> None:
    """People reuse one sampler object; each loader runs it for itself."""

    def data(shared: bool) -> Any:
        of_training = samplers.ShuffledBatches()
        of_validation = of_training if shared else samplers.ShuffledBatches()
        return sampler_cases.PlainData(
            lambda: loader(batch_sampler=of_training), lambda: loader(batch_sampler=of_validation)
        )

    def run(shared: bool, *, callbacks: Any = (), **options: Any) -> Any:
        callbacks = [sampler_cases.StatefulDataCallback(seed=5), *callbacks]
        return train(lambda: data(shared), callbacks=callbacks, **options)

    options = {"max_epochs": 2, "val_check_interval": 3}
    whole = sources.assert_goes_on_from_every_moment(
        tmp_path, True, [("on_validation_batch_end", 0, 4)], run, **options
    )
    assert whole.ledger == run(False, **options).ledger
