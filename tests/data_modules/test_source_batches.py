"""Batch sizes, collate functions and tags of each source, in training and evaluation, and what is said without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.data import warning_cache
from support.ledger import LedgerModel, Numbers
from support.runs import seeded
from support.sources import (
    EVERY_SAMPLE,
    SourcesModel,
    assert_goes_on_from_every_moment,
    datasets,
    ids_of,
    mixture,
    round_robin,
    samples,
    source_of,
    train_on,
    trained,
)
from torch.utils.data import Dataset, IterableDataset, default_collate

from lightning_stateful.errors import ConfigurationError

Sample = dict[str, torch.Tensor]


class Sentences(Dataset[Sample]):
    """Samples of one to three rows."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return {"id": torch.tensor(index + self.first), "x": torch.rand(index % 3 + 1, 4)}


def padded(samples: list[Sample]) -> dict[str, Any]:
    rows = torch.nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
    return {"id": torch.stack([sample["id"] for sample in samples]), "x": rows}


def pictures(samples: list[Sample]) -> dict[str, Any]:
    batch = default_collate(samples)
    return {**batch, "x": batch["x"].reshape(-1, 1, 1, 4).expand(-1, 2, 2, 4)}


def of_many_shapes(**options: Any) -> Any:
    collate_fn = {"news": padded, "code": None, "web": pictures}
    data = {**datasets(), "news": Sentences(9)}
    val = {"web": Numbers(3, first=500), "news": Sentences(5, first=600)}
    return round_robin(train=data, val=val, collate_fn=collate_fn, tag="source", **options)


class NotesShapes(SourcesModel):
    """Also lists the number of dimensions of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: set[tuple[str, str, int]] = set()

    def _loss(self, batch: Any) -> Any:
        self.dims.add(("train" if self.training else "val", batch["source"], batch["x"].ndim))
        return super()._loss(batch)


def test_sources_with_features_of_other_shapes_have_their_own_collate_functions_and_batch_sizes() -> None:
    model = seeded(NotesShapes)
    run = train_on(of_many_shapes, model=model, max_epochs=1)
    assert sorted(samples(run.ledger)) == EVERY_SAMPLE
    assert model.dims == {
        ("train", "news", 3), ("train", "code", 2), ("train", "web", 4), ("val", "news", 3), ("val", "web", 4)
    }  # fmt: skip
    validated = [event[4] for event in run.ledger if event[0] == "val"]
    web, news = [("web", (number,)) for number in (500, 501, 502)], [("news", ids) for ids in ((600, 601), (602, 603))]
    assert validated == [*web, *news, ("news", (604,))]


def test_a_run_over_other_shapes_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, of_many_shapes, [("on_train_batch_end", 1, 3)], train_on, served_again=0)


# Tags


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tag_is_the_source_of_a_batch(workers: int) -> None:
    run = train_on(lambda: mixture(tag="source", stop="cycle", num_workers=workers), max_epochs=1)
    for tag, ids in (event[4] for event in trained(run.ledger)):
        assert {source_of(index) for index in ids} == {tag}


def test_by_sample_a_tag_lists_the_source_of_every_sample() -> None:
    run = train_on(lambda: mixture(by="sample", tag="source", val={"web": Numbers(2, first=200)}), max_epochs=1)
    for tag, ids in (event[4] for event in trained(run.ledger)):
        assert tag == tuple(source_of(index) for index in ids)
    assert any(len(set(event[4][0])) > 1 for event in trained(run.ledger))
    assert [event[4] for event in run.ledger if event[0] == "val"] == [(("web", "web"), (200, 201))]


def test_a_dataset_for_evaluation_without_a_name_has_no_tag() -> None:
    run = train_on(lambda: mixture(tag="source"), max_epochs=1)
    assert [event[4] for event in run.ledger if event[0] == "val"] == [(500, 501, 502), (503, 504)]


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_every_kind_of_evaluation_gives_each_sample_once_under_its_sources_name(how: str) -> None:
    sets = {"code": Numbers(4, first=100), "web": Numbers(2, first=200)}
    data = round_robin(val=sets, test=sets, predict=sets, tag="source")
    model = SourcesModel()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **options)
    if how == "predict":
        trainer.predict(model, datamodule=data, return_predictions=False)
    else:
        getattr(trainer, how)(model, datamodule=data, verbose=False)
    assert [event[-1] for event in model.ledger] == [
        ("code", (100, 101, 102)), ("code", (103,)), ("web", (200,)), ("web", (201,))
    ]  # fmt: skip


@pytest.mark.parametrize("by", ["batch", "sample"])
def test_a_tag_leaves_lightning_sure_of_the_batch_size(by: str) -> None:
    warning_cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ambiguous collection.*")
        train_on(lambda: mixture(by=by, tag="source", val={"web": Numbers(2)}), model=LedgerModel(), max_epochs=1)


# Settings in the order of the sources


@pytest.mark.parametrize("setting", [{"batch_size": [2, 3, 1]}, {"collate_fn": [default_collate] * 3}])
def test_settings_in_the_order_of_the_sources_hold_for_evaluation_by_name(setting: dict[str, Any]) -> None:
    run = train_on(lambda: round_robin(val={"code": Numbers(4, first=100)}, **setting), max_epochs=1)
    assert [event[4] for event in run.ledger if event[0] == "val"] == [(100, 101, 102), (103,)]


def test_settings_in_the_order_of_a_list_hold_for_evaluation_in_that_order() -> None:
    data = [Numbers(4), Numbers(6, first=100)]
    run = train_on(lambda: round_robin(train=data, val=data, batch_size=[2, 3], tag="source"), max_epochs=1)
    validated = [event[4] for event in run.ledger if event[0] == "val"]
    assert validated == [("0", (0, 1)), ("0", (2, 3)), ("1", (100, 101, 102)), ("1", (103, 104, 105))]
    assert all(len(ids_of(event)) == 2 + (event[4][0] == "1") for event in trained(run.ledger))


# Iterable datasets for evaluation are left to Lightning, with the source's settings


class Streams(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return (Numbers(5, first=500)[index] for index in range(5))


STREAMED = [(500, 501, 502), (503, 504)]


def validated_on(**options: Any) -> list[Any]:
    return [event[4] for event in train_on(lambda: round_robin(**options), max_epochs=1).ledger if event[0] == "val"]


def test_an_iterable_dataset_is_evaluated_with_its_sources_batch_size_or_that_of_all() -> None:
    assert validated_on(val={"code": Streams()}) == STREAMED
    assert validated_on(val={"code": Streams()}, batch_size=3, tag="source") == [("code", ids) for ids in STREAMED]


def test_an_iterable_dataset_is_evaluated_with_the_collate_function() -> None:
    def tenfold(samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return {**batch, "id": batch["id"] * 10}

    assert validated_on(val=Streams(), batch_size=3, collate_fn=tenfold)[0] == (5000, 5010, 5020)


# What is missing


def fit(**options: Any) -> Any:
    return train_on(lambda: round_robin(**options), max_epochs=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": {"news": 2, "code": 3}}, "Source 'web' has no batch_size"),
        ({"batch_size": {"news": 2, "code": 3, "web": 0}}, "batch size of source 'web' must be at least 1, got 0"),
        ({"batch_size": {"news": 2, "code": 3, "web": 1, "talk": 1}}, "batch_size for 'talk', which is none of"),
        ({"batch_size": [2, 3]}, "2 values were given as batch_size for the 3 sources"),
        ({"collate_fn": {"news": padded, "code": padded}}, "Source 'web' has no collate_fn"),
        ({"train": {**datasets(), "web": []}}, "Source 'web' is empty"),
        ({"train": Numbers(4)}, "trains on a dict or list of datasets, got a Numbers"),
        ({"train": None}, "has no dataset for this stage"),
        ({"val": Numbers(3)}, "does not tell that of a dataset without a name for evaluation"),
        ({"val": {"talk": Numbers(3)}}, "does not tell that of dataset 'talk' for evaluation"),
        ({"tag": "id"}, "A batch of source 'news' already has the key 'id'"),
        ({"num_steps": 4, "stop": "cycle"}, "num_steps takes the place of stop"),
    ],
)
def test_a_setting_that_misses_is_named_with_its_source(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(**options)


def test_a_tag_wants_batches_that_are_dicts() -> None:
    with pytest.raises(ConfigurationError, match=r"tag='source' needs batches that are dicts.* 'web' is a list"):
        fit(tag="source", collate_fn={"news": None, "code": None, "web": list})


def test_by_sample_there_is_one_batch_size_and_one_collate_function() -> None:
    with pytest.raises(ConfigurationError, match="cannot each have a collate_fn"):
        train_on(lambda: mixture(by="sample", collate_fn=dict.fromkeys(datasets(), padded)))
    with pytest.raises(ConfigurationError, match=r"has one size; got \{'news': 1, 'code': 2, 'web': 3\}"):
        train_on(lambda: mixture(by="sample", val=None, batch_size=[1, 2, 3]))


@pytest.mark.parametrize(("train", "words"), [({}, "no sources"), ({**datasets(), "web": Streams()}, "'web'")])
def test_no_source_at_all_or_one_without_random_access_is_refused(train: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(train=train, val=None, batch_size=2)
