"""Real worker processes, and the loaders that people have made of torch's."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from support.stream_cases import (
    SIZES,
    Divided,
    RemembersWhereItReads,
    assert_goes_on,
    budgeted,
    chunks,
    drawn,
    drawn_document,
    loaded,
    mixed,
    numbers,
    observe,
    packed,
    plain,
    saved,
    steps,
    stream_loader,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torchdata.nodes import IterableWrapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful import is_patched, patch_dataloader
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.stream_loader import StreamLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def all_drawn(samples: list[Any]) -> Any:
    """A batch that draws."""
    return drawn([plain(sample) for sample in samples])


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (partial(chunks, transform=drawn), {"batch_size": 3, "collate_fn": all_drawn, "persistent_workers": True}),
        (lambda: packed(chunks(), "whole", drawn_document), {"persistent_workers": True}),
        (partial(mixed, weights=[2, 1], by="sample"), {"batch_size": 5, "steps_per_epoch": 5}),
        (RemembersWhereItReads, {"batch_size": None, "persistent_workers": True}),
        (Divided, {"batch_size": 4, "steps_per_epoch": 4}),
    ],
    ids=["draws", "packed", "mixed", "state", "no state"],
)
def test_workers_go_on_exactly(dataset: Any, options: dict[str, Any]) -> None:
    def make() -> Any:
        return stream_loader(dataset(), num_workers=2, **options)

    assert_goes_on(make, [4, 0, 5], total=15)


def test_workers_that_are_sent_a_stream_read_what_those_that_are_forked_do() -> None:
    def make(context: str, num_workers: int = 1) -> Any:
        options = {"multiprocessing_context": context, "persistent_workers": True, "num_workers": num_workers}
        dataset = chunks()
        return stream_loader(dataset, config=budgeted(dataset), **options)

    items, states = observe(partial(make, "fork"), 16)

    assert list(islice(steps(loaded(make("forkserver"), states[5])), 11)) == items[5:]


def test_persistent_workers_live_on_and_end_with_their_loader() -> None:
    # What another test has left may end meanwhile.
    before = set(multiprocessing.active_children())
    loader = stream_loader(chunks(), num_workers=2, persistent_workers=True)
    found = []
    for _ in range(3):
        list(loader)
        found.append({child.pid for child in set(multiprocessing.active_children()) - before})
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 2

    loader._iterator = None
    gc.collect()
    assert set(multiprocessing.active_children()) <= before
    assert len(list(loader)) == len(list(stream_loader(chunks(), num_workers=2)))
    del loader
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_of_a_pass_that_is_given_up_do_not_stay(persistent_workers: bool) -> None:
    before = set(multiprocessing.active_children())
    loader = stream_loader(chunks(), num_workers=2, persistent_workers=persistent_workers)
    for _ in range(3):
        next(iter(loader))
    assert len(set(multiprocessing.active_children()) - before) == 2
    del loader
    gc.collect()

    assert set(multiprocessing.active_children()) <= before


class KnowsItsWorker(IterableDataset[Any]):
    """Says which worker reads, by number, and what that was told."""

    told = -1.0

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            info = get_worker_info()
            assert info is not None
            assert info.dataset is self
            yield info.id, info.num_workers, number, self.told


def tell(worker: int) -> None:
    """Changes the dataset of a worker, as torch's documentation has it."""
    info = get_worker_info()
    assert info is not None
    assert info.dataset.told == -1
    info.dataset.told = float(worker)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_worker_init_fn_reaches_the_dataset_and_slots_keep_their_numbers(persistent_workers: bool) -> None:
    def make() -> Any:
        options = {"num_workers": 3, "worker_init_fn": tell, "persistent_workers": persistent_workers}
        return stream_loader(KnowsItsWorker(), batch_size=1, collate_fn=lambda samples: samples[0], **options)

    found = list(make())
    assert [sample[:3] for sample in found] == [(worker, 3, number) for number in range(6) for worker in range(3)]
    assert [sample[3] for sample in found] == [0, 1, 2] * 6

    # The lane whose turn it is is run by the first process.
    stopped, resumed = make(), make()
    iterator = iter(stopped)
    for _ in range(7):
        next(iterator)
    resumed.load_state_dict(saved(stopped))
    for _ in range(2):
        rest = list(resumed)
        assert [sample[:3] for sample in rest] == [sample[:3] for sample in found[-len(rest) :]]
        assert len({sample[3] for sample in rest}) == 3


class OldWorkerInfo:
    """As torch 2.3 has it: no dataclass."""

    id: int
    num_workers: int
    seed: int
    dataset: Any

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def test_workers_of_an_older_torch_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return stream_loader(chunks(), batch_size=4, num_workers=2, multiprocessing_context="fork")

    found = [plain(batch) for batch in make()]
    monkeypatch.setattr(torch_worker, "WorkerInfo", OldWorkerInfo)
    assert [plain(batch) for batch in make()] == found


class DividesItself(IterableDataset[int]):
    """Numbers, of which each worker has its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(20) if info is None else range(info.id, 20, info.num_workers)


@pytest.mark.filterwarnings("ignore:.*are read by several slots")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_dataset_in_a_graph_is_told_that_nobody_else_reads_it(persistent_workers: bool) -> None:
    graph = Prefetcher(IterableWrapper(DividesItself()), 2)
    loader = stream_loader(graph, batch_size=2, num_workers=2, persistent_workers=persistent_workers)
    for _ in range(2):
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(20))


class OneToOne(DataLoader[Any]):
    """Does something to every batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 2


def test_a_loader_with_an_iter_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match=r"OneToOne.__iter__ may give other batches.*collate_fn"):
        patch_dataloader(OneToOne(chunks()))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdatas_goes_on_exactly() -> None:
    def make() -> Any:
        loader = StatefulDataLoader(chunks(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        return patch_dataloader(loader, seed=3)

    assert_goes_on(make, [5, 1], total=12)


@pytest.mark.timeout(30)
def test_long_lists_of_shards_reach_workers_of_a_loader_that_begins_late() -> None:
    options = {"num_workers": 1, "persistent_workers": True, "batch_size": 2000}
    loader = stream_loader(chunks([1] * 30_000, buffer_size=1), **options)

    assert len(next(iter(loader))) == 2000


class Subclass(DataLoader[Any]):
    """Has attributes and methods of its own."""

    def __init__(self, *args: Any, weights: dict[str, float], **options: Any) -> None:
        super().__init__(*args, **options)
        self.weights = weights

    def weight(self, name: str) -> float:
        return self.weights[name] * self.scale

    scale = 2


def test_a_patched_loader_is_still_of_its_class_with_its_attributes() -> None:
    original = Subclass(chunks(), batch_size=3, weights={"one": 1.5}, pin_memory=False, timeout=0)
    loader: Any = patch_dataloader(original, seed=3)

    assert isinstance(loader, (Subclass, StreamLoader))
    assert is_patched([loader])
    assert (loader.weights, loader.weight("one"), loader.scale) == ({"one": 1.5}, 3.0, 2)
    assert (loader.batch_size, loader.pin_memory, loader.drop_last) == (3, False, False)
    loader.weights = {"one": 4}
    assert loader.weight("one") == 8
    assert original.weights == {"one": 1.5}
    assert patch_dataloader(loader, seed=3) is loader
    with pytest.raises(ConfigurationError, match="patched already, with seed=3, and keeps that; seed=9"):
        patch_dataloader(loader, seed=9)
    assert numbers(list(map(plain, loader))) == Counter(range(sum(SIZES)))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        loader.nothing  # noqa: B018
    with pytest.raises(TypeError, match="ChunkedDataset is a stream"):
        len(loader)


def test_options_that_are_set_later_count() -> None:
    loader = stream_loader(chunks(), num_workers=1)
    list(loader)
    loader.worker_init_fn = partial(refuse, "from now on")

    with pytest.raises(RuntimeError, match="from now on"):
        list(loader)


def refuse(text: str, worker: int) -> None:
    """A worker_init_fn that fails."""
    raise RuntimeError(text)
