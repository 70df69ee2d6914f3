"""Whether loaders are patched is told from the objects that will be iterated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch.utilities import CombinedLoader
from support.samplers import GlobalRandom, ShuffledBatches, loader
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful.index.position import Position
from lightning_stateful.loaders import StatefulLoader, is_patched, patch_dataloader
from lightning_stateful.samplers import DDPSamplerWrapper, StatefulDistributedSampler
from lightning_stateful.trainer.view import LoaderView


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def ours() -> StatefulLoader:
    return patch_dataloader(loader(batch_size=2))


def view() -> LoaderView:
    return LoaderView(ours(), Position)


def by_fabric(given: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(given)


PATCHED: dict[str, Any] = {
    "patched": ours,
    "built as one": lambda: StatefulLoader(range(3)),
    "over a batch sampler": lambda: patch_dataloader(loader(batch_sampler=ShuffledBatches())),
    "over a stream": lambda: patch_dataloader(DataLoader(Stream())),
    "a list": lambda: [ours(), ours()],
    "a tuple": lambda: (ours(),),
    "a dict": lambda: {"a": ours(), "b": ours()},
    "an ordered dict": lambda: OrderedDict(a=ours()),
    "nested": lambda: {"a": [ours(), (ours(), {"b": ours()})], "c": ours()},
    "a CombinedLoader of a list": lambda: CombinedLoader([ours(), ours()]),
    "a CombinedLoader of a dict": lambda: CombinedLoader({"a": ours(), "b": [ours()]}, "sequential"),
    "a CombinedLoader of one": lambda: CombinedLoader(ours()),
    "a CombinedLoader in a list": lambda: [ours(), CombinedLoader({"a": ours()})],
    "a CombinedLoader in a CombinedLoader": lambda: CombinedLoader([CombinedLoader([ours()])]),
    "a dict in a dict": lambda: {"a": {"b": {"c": ours()}}},
    "what Fabric makes of one": lambda: by_fabric(ours()),
    "what Fabric makes of one twice": lambda: [by_fabric(ours()), ours()],
    "a view": view,
    "views": lambda: [view(), {"a": view()}],
    "views in a CombinedLoader": lambda: CombinedLoader({"a": view()}),
}

NOT_PATCHED: dict[str, Any] = {
    "nothing": lambda: None,
    "an empty list": lambda: [],
    "an empty tuple": lambda: (),
    "an empty dict": lambda: {},
    "a dict of empty lists": lambda: {"a": [], "b": ()},
    "a CombinedLoader of nothing": lambda: CombinedLoader([]),
    "a CombinedLoader of an empty dict": lambda: CombinedLoader({}),
    "a plain loader": lambda: loader(batch_size=2),
    "torchdata's loader": lambda: StatefulDataLoader(range(3)),
    "a loader with our sampler": lambda: loader(sampler=StatefulDistributedSampler(22, 1, 0)),
    "a loader with a wrapper": lambda: loader(sampler=DDPSamplerWrapper(GlobalRandom())),
    "a loader with a wrapper around batches": lambda: loader(batch_sampler=DDPSamplerWrapper(ShuffledBatches())),
    "a loader over a stream": lambda: DataLoader(Stream()),
    "a loader over a patched one": lambda: DataLoader(ours().dataset, sampler=ours().sampler),
    "a loader over a patched one's batches": lambda: DataLoader(range(22), batch_sampler=ours().batch_sampler),
    "one of two": lambda: [ours(), loader()],
    "one of two, the first": lambda: [loader(), ours()],
    "one deep in a structure": lambda: {"a": [ours(), {"b": (ours(), loader())}]},
    "one and None": lambda: [ours(), None],
    "a CombinedLoader of both": lambda: CombinedLoader({"a": ours(), "b": loader()}),
    "a patched one's iterator": lambda: iter(ours()),
    "the class": lambda: StatefulLoader,
    "a string": lambda: "loader",
    "a list of batches": lambda: [[1, 2], [3]],
    "what Fabric makes of a plain one": lambda: by_fabric(loader()),
}


@pytest.mark.parametrize("name", PATCHED)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_will_be_iterated_is_ours_throughout(name: str) -> None:
    assert is_patched(PATCHED[name]()) is True


@pytest.mark.parametrize("name", NOT_PATCHED)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_one_that_is_not_ours_or_nothing_at_all_is_not_patched(name: str) -> None:
    assert is_patched(NOT_PATCHED[name]()) is False


def test_looking_reads_nothing() -> None:
    patched = ours()
    before = patched.state_dict()

    assert is_patched([patched])
    assert patched.state_dict() == before
