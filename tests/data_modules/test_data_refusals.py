"""Data that would train on something else than the user means are refused before training, with the remedy."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from support.ledger import Numbers

from lightning_stateful import (
    BucketDataModule,
    ChunkedDataset,
    MixedStream,
    MixtureBatchSampler,
    MixtureDataModule,
    RoundRobinDataModule,
    StatefulDataModule,
    StreamDataModule,
)
from lightning_stateful.errors import ConfigurationError

COLUMNS = {"n": list(range(6)), "length": [1] * 6}


def splits(*names: str, stream: bool = False) -> Any:
    made = datasets.DatasetDict({name: datasets.Dataset.from_dict(COLUMNS) for name in names})
    return datasets.IterableDatasetDict({n: d.to_iterable_dataset() for n, d in made.items()}) if stream else made


def all_ways(data: Any, streams: Any) -> dict[str, Any]:
    """Everything that takes several datasets by name, as functions that ask for loaders."""
    return {
        "plain": StatefulDataModule(data).train_dataloader,
        "nested": StatefulDataModule({"one": data}).train_dataloader,
        "mixture": MixtureDataModule(data).train_dataloader,
        "round robin": RoundRobinDataModule(data).batch_sampler,
        "buckets": BucketDataModule(data, lengths="length", max_tokens=8).train_dataloader,
        "streams": StreamDataModule(streams).train_dataloader,
        "mixed stream": lambda: MixedStream(streams),
        "batch sampler": lambda: MixtureBatchSampler(data, 2),
    }


@pytest.mark.parametrize(
    "names", [("train", "test"), ("train", "validation_matched"), ("train_sft", "Test_sft"), ("training", "dev", "x")]
)
def test_splits_are_no_training_data(names: tuple[str, ...]) -> None:
    data, streams = splits(*names), splits(*names, stream=True)
    found = {**all_ways(data, streams), **{f"dict, {k}": v for k, v in all_ways(dict(data), dict(streams)).items()}}
    for way, ask in found.items():
        with pytest.raises(ConfigurationError, match=f"splits {', '.join(names)} .* data\\['{names[0]}'\\]"):
            pytest.fail(f"{way} took {ask()}")


def test_what_load_dataset_gives_without_a_split_is_refused_even_if_there_is_only_one() -> None:
    for ask in all_ways(splits("train"), splits("train", stream=True)).values():
        with pytest.raises(ConfigurationError, match=r"splits train .* split='train'"):
            ask()


def test_splits_are_evaluated_by_name_unless_the_training_split_is_among_them() -> None:
    evaluated = StatefulDataModule(val=splits("validation_matched", "validation_mismatched")).val_dataloader()
    assert list(evaluated) == ["validation_matched", "validation_mismatched"]
    assert list(StatefulDataModule(val={"train": Numbers(3), "val": Numbers(3)}).val_dataloader()) == ["train", "val"]
    with pytest.raises(ConfigurationError, match=r"evaluated on. Pass one split, data\['test'\]"):
        StatefulDataModule(val=splits("train", "test")).val_dataloader()


@pytest.mark.parametrize("names", [("en", "sw"), ("train", "train_extra"), ("contest", "trains"), ("test", "news")])
def test_sources_of_other_names_are_training_data(names: tuple[str, ...]) -> None:
    data = {name: Numbers(6) for name in names}
    assert list(StatefulDataModule(data).train_dataloader()) == list(names)
    assert len(MixtureDataModule(data, batch_size=2).train_dataloader()) == 6


def test_an_argument_that_nobody_has_is_refused_at_once_and_one_of_the_callback_is_named() -> None:
    with pytest.raises(ConfigurationError, match="have no argument 'batch_siez'"):
        StatefulDataModule(Numbers(8), batch_siez=4)
    with pytest.raises(ConfigurationError, match=r"StatefulDataCallback\(ledger=\.\.\.\)"):
        StreamDataModule(ChunkedDataset(range(2), lambda ref: iter([ref])), ledger="ledger")
