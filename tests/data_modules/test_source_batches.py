"""Batch sizes, collate functions and tags of each source, in training and evaluation, and what is said without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.data import warning_cache
from support.ledger import LedgerModel, Numbers, samples, trained
from support.runs import quiet_trainer, seeded, train
from support.sources import EVERY_SAMPLE, datasets, mixture, round_robin, source_of
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


class NotesShapes(LedgerModel):
    """Also lists the number of dimensions of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: set[tuple[str, str, int]] = set()

    def _loss(self, batch: Any) -> Any:
        self.dims.add(("train" if self.training else "val", batch["source"], batch["x"].ndim))
        return super()._loss(batch)


def test_sources_with_features_of_other_shapes_have_their_own_collate_functions_and_batch_sizes() -> None:
    model = seeded(NotesShapes)
    run = train(of_many_shapes, model=model, max_epochs=1)
    assert sorted(samples(run.ledger)) == EVERY_SAMPLE
    assert model.dims == {
        ("train", "news", 3), ("train", "code", 2), ("train", "web", 4), ("val", "news", 3), ("val", "web", 4)
    }  # fmt: skip
    validated = [event[4] for event in run.ledger if event[0] == "val"]
    web, news = [("web", (number,)) for number in (500, 501, 502)], [("news", ids) for ids in ((600, 601), (602, 603))]
    assert validated == [*web, *news, ("news", (604,))]


# Tags


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tag_is_the_source_of_a_batch(workers: int) -> None:
    run = train(lambda: mixture(tag="source", stop="cycle", num_workers=workers), max_epochs=1)
    for tag, ids in (event[4] for event in trained(run.ledger)):
        assert {source_of(index) for index in ids} == {tag}


def test_by_sample_a_tag_lists_the_source_of_every_sample() -> None:
    run = train(lambda: mixture(by="sample", tag="source", val={"web": Numbers(2, first=200)}), max_epochs=1)
    for tag, ids in (event[4] for event in trained(run.ledger)):
        assert tag == tuple(source_of(index) for index in ids)
    assert any(len(set(event[4][0])) > 1 for event in trained(run.ledger))
    assert [event[4] for event in run.ledger if event[0] == "val"] == [(("web", "web"), (200, 201))]


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_every_kind_of_evaluation_gives_each_sample_once_under_its_sources_name(how: str) -> None:
    sets, model = {"code": Numbers(4, first=100), "web": Numbers(2, first=200)}, LedgerModel()
    data = round_robin(val=sets, test=sets, predict=sets, tag="source")
    getattr(quiet_trainer(), how)(model, datamodule=data)
    served = [("code", (100, 101, 102)), ("code", (103,)), ("web", (200,)), ("web", (201,))]
    assert [event[-1] for event in model.ledger] == served


@pytest.mark.parametrize("by", ["batch", "sample"])
def test_a_tag_leaves_lightning_sure_of_the_batch_size(by: str) -> None:
    warning_cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ambiguous collection.*")
        train(lambda: mixture(by=by, tag="source", val={"web": Numbers(2)}), model=LedgerModel(), max_epochs=1)


# Evaluation of each source


class Streams(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return (Numbers(5, first=500)[index] for index in range(5))


def tenfold(samples: list[Sample]) -> Sample:
    batch = default_collate(samples)
    return {**batch, "id": batch["id"] * 10}


OF_CODE = {"code": Numbers(4, first=100)}
STREAMED = [(500, 501, 502), (503, 504)]
TWO = [Numbers(4), Numbers(6, first=100)]


# Iterable datasets are left to Lightning, with the source's settings.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"val": OF_CODE, "batch_size": [2, 3, 1]}, [(100, 101, 102), (103,)]),
        ({"val": OF_CODE, "collate_fn": [default_collate] * 3}, [(100, 101, 102), (103,)]),
        ({"val": {"code": Streams()}}, STREAMED),
        ({"val": {"code": Streams()}, "batch_size": 3, "tag": "source"}, [("code", ids) for ids in STREAMED]),
        ({"val": Streams(), "batch_size": 3, "collate_fn": tenfold}, [(5000, 5010, 5020), (5030, 5040)]),
        ({"val": Numbers(5, first=500), "batch_size": 3, "tag": "source"}, STREAMED),
        (
            {"train": TWO, "val": TWO, "batch_size": [2, 3], "tag": "source"},
            [("0", (0, 1)), ("0", (2, 3)), ("1", (100, 101, 102)), ("1", (103, 104, 105))],
        ),
    ],
)
def test_evaluation_has_the_settings_of_its_source(options: dict[str, Any], expected: list[Any]) -> None:
    run = train(lambda: round_robin(**options), max_epochs=1)
    assert [event[4] for event in run.ledger if event[0] == "val"] == expected


# What is missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": {"news": 2, "code": 3, "web": 0}}, "batch size of source 'web' must be at least 1, got 0"),
        ({"train": {**datasets(), "web": []}}, "Source 'web' is empty"),
        ({"train": Numbers(4)}, "trains on a dict or list of datasets, got a Numbers"),
        ({"train": None}, "has no dataset for this stage"),
        ({"val": Numbers(3)}, "does not tell that of a dataset without a name for evaluation"),
        ({"val": {"talk": Numbers(3)}}, "does not tell that of dataset 'talk' for evaluation"),
        (
            {"tag": "source", "collate_fn": {"news": None, "code": None, "web": list}},
            r"tag='source' needs batches that are dicts.* 'web' is a list",
        ),
        ({"train": {}, "val": None, "batch_size": 2}, "no sources"),
        ({"train": {**datasets(), "web": Streams()}, "val": None, "batch_size": 2}, "'web'"),
    ],
)
def test_a_setting_that_misses_is_named_with_its_source(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(lambda: round_robin(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collate_fn": dict.fromkeys(datasets(), padded)}, "cannot each have a collate_fn"),
        ({"val": None, "batch_size": [1, 2, 3]}, r"has one size; got \{'news': 1, 'code': 2, 'web': 3\}"),
    ],
)
def test_by_sample_there_is_one_batch_size_and_one_collate_function(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(lambda: mixture(by="sample", **options))
