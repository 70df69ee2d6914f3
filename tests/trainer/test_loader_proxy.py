"""What Lightning iterates asks for its place as late as can be, and nothing of Lightning's gets hold of the loader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.data import _is_dataloader_shuffled
from support.ledger import LedgerModel, Numbers
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_stateful import StatefulLoader
from lightning_stateful.core import EpochPlan, Progress
from lightning_stateful.trainer.loader_hooks import InterceptedSource, intercept, request_training_loaders
from lightning_stateful.trainer.loader_proxy import LoaderProxy

Place = tuple[EpochPlan, int]


class Guide:
    """Says where to begin, and how often it was asked."""

    def __init__(self, *places: Progress | None) -> None:
        self.places = list(places) or [Progress()]
        self.num_asked = 0

    def __call__(self) -> Place | None:
        self.num_asked += 1
        progress = self.places[min(self.num_asked, len(self.places)) - 1]
        return None if progress is None else (plan_from(progress), 0)


class Told(Dataset[int]):
    """A dataset that tells when a sample is read."""

    def __init__(self, events: list[str], length: int = 6) -> None:
        self.events, self.length = events, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.events.append(f"read {index}")
        return index


def plan_from(progress: Progress) -> EpochPlan:
    return a_loader().plan(progress.epoch, progress)


def the_beginning() -> Place:
    return plan_from(Progress()), 0


def worker_init(worker_id: int) -> None:
    raise AssertionError("no worker is ever started")


def a_loader(length: int = 12, **options: Any) -> StatefulLoader:
    return StatefulLoader(list(range(length)), **{"batch_size": 2, "shuffle": True, **options})


def a_proxy(locate: Callable[[], Place | None] = the_beginning, **options: Any) -> LoaderProxy:
    return LoaderProxy(a_loader(), locate, **options)


def read(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def batches_from(progress: Progress) -> list[list[int]]:
    return [indices for _, indices in plan_from(progress).batches(rank=0)]


class TestIterating:
    def test_nobody_asks_for_a_place_at_iter(self) -> None:
        guide = Guide()
        iterators = [iter(a_proxy(guide)) for _ in range(4)]

        assert (guide.num_asked, len(iterators)) == (0, 4)

    def test_the_place_is_asked_for_at_the_first_next_and_at_no_other(self) -> None:
        guide = Guide()
        iterator = iter(a_proxy(guide))
        next(iterator)
        assert guide.num_asked == 1

        list(iterator)
        assert guide.num_asked == 1

    def test_the_place_that_holds_at_the_first_next_is_what_counts(self) -> None:
        guide = Guide(Progress())
        iterator = iter(a_proxy(guide))
        guide.places = [Progress(epoch=3, consumed=4)]

        assert read(iterator) == batches_from(Progress(epoch=3, consumed=4))

    def test_every_pass_asks_anew(self) -> None:
        guide = Guide(Progress(), Progress(epoch=1), Progress(epoch=1, consumed=8))
        proxy = a_proxy(guide)

        assert [read(proxy) for _ in range(3)] == [batches_from(place) for place in guide.places]
        assert guide.num_asked == 3

    def test_any_number_of_unused_iterators_changes_nothing(self) -> None:
        proxy = a_proxy()
        unused = [iter(proxy) for _ in range(4)]
        first = read(proxy)
        unused += [iter(proxy) for _ in range(4)]

        assert first == read(proxy) == batches_from(Progress())
        assert len(unused) == 8

    def test_a_pass_may_lie_beyond_the_first_within_an_epoch(self) -> None:
        place = Progress(epoch=1, consumed=12)

        assert read(a_proxy(Guide(place))) == batches_from(place)

    def test_where_there_is_no_place_there_are_no_batches(self) -> None:
        guide = Guide(None, Progress())
        proxy = a_proxy(guide)

        assert read(proxy) == []
        assert len(read(proxy)) == 6

    def test_a_pass_that_is_over_stays_over(self) -> None:
        iterator = iter(a_proxy())
        list(iterator)

        assert list(iterator) == []

    def test_iterating_does_not_move_the_loader(self) -> None:
        proxy = a_proxy(Guide(Progress(epoch=2, consumed=6)))
        read(proxy)

        assert proxy.loader.progress == Progress()

    def test_the_hook_runs_after_a_batch_is_read_and_before_it_is_handed_over(self) -> None:
        events: list[str] = []
        loader = StatefulLoader(Told(events), batch_size=2)
        proxy = LoaderProxy(loader, lambda: (loader.plan(0), 0), lambda: events.append("before batch"))
        for batch in proxy:
            events.append(f"got {batch.tolist()}")

        assert events[:4] == ["read 0", "read 1", "before batch", "got [0, 1]"]
        assert events.count("before batch") == 3

    def test_the_hook_does_not_run_where_there_is_no_batch(self) -> None:
        calls: list[int] = []
        read(a_proxy(Guide(None), before_batch=lambda: calls.append(1)))

        assert calls == []

    def test_an_error_of_the_dataset_reaches_the_caller(self) -> None:
        loader = StatefulLoader(Numbers(4, fail_at=2), batch_size=1)
        proxy = LoaderProxy(loader, lambda: (loader.plan(0), 0))
        iterator = iter(proxy)
        next(iterator)
        next(iterator)
        with pytest.raises(RuntimeError, match="sample 2 cannot be read"):
            next(iterator)


class TestLookingLikeALoader:
    @pytest.mark.parametrize("place", [Progress(), Progress(consumed=6), None])
    def test_its_length_is_that_of_a_whole_epoch_wherever_it_begins(self, place: Progress | None) -> None:
        proxy = a_proxy(Guide(place))
        read(proxy)

        assert len(proxy) == 6

    def test_it_is_no_data_loader(self) -> None:
        assert not isinstance(a_proxy(), DataLoader)

    @pytest.mark.parametrize("name", ["dataset", "batch_size", "num_workers", "collate_fn", "seed", "order"])
    def test_its_attributes_are_those_of_the_loader(self, name: str) -> None:
        proxy = a_proxy()

        assert getattr(proxy, name) == getattr(proxy.loader, name)

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_on_several_ranks_hooks_find_the_sampler_that_lightning_would_put_there(self, shuffle: bool) -> None:
        original = DataLoader(range(12), batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]  # is sized
        proxy = LoaderProxy(a_loader(num_replicas=2, rank=1), the_beginning, original=original)

        assert (type(proxy.sampler), proxy.sampler.num_replicas, proxy.sampler.rank) == (DistributedSampler, 2, 1)
        assert proxy.batch_sampler.sampler is proxy.sampler
        assert len(proxy.batch_sampler) == len(proxy) == 3
        assert _is_dataloader_shuffled(proxy) is shuffle

    def test_a_missing_attribute_is_reported_as_usual(self) -> None:
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = a_proxy().no_such_thing

    def test_a_worker_init_fn_is_set_through(self) -> None:
        proxy = a_proxy()
        assert proxy.worker_init_fn is None

        proxy.worker_init_fn = worker_init
        assert proxy.loader.worker_init_fn is proxy.worker_init_fn is worker_init

    def test_seeding_everything_for_workers_reaches_the_loader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning.fabric.utilities.data import _auto_add_worker_init_fn

        monkeypatch.setenv("PL_SEED_WORKERS", "1")
        proxy = a_proxy()
        _auto_add_worker_init_fn(proxy, 0)

        assert proxy.loader.worker_init_fn is not None

    def test_loading_a_state_moves_nothing(self) -> None:
        proxy = a_proxy()
        proxy.load_state_dict(a_loader().tracker.state_dict(Progress(epoch=1, consumed=4)))

        assert proxy.loader.progress == Progress()
        assert proxy.state_dict() == {}

    def test_persistent_workers_are_found_and_ended_where_lightning_looks(self) -> None:
        proxy = LoaderProxy(a_loader(num_workers=1, persistent_workers=True), the_beginning)
        assert proxy._iterator is None
        read(proxy)
        workers = proxy._iterator
        assert workers is proxy.loader._iterator is not None

        workers._shutdown_workers()
        proxy._iterator = None
        assert proxy.loader._iterator is None


class TestCopying:
    @pytest.mark.parametrize("keeps_indices", [False, True])
    @pytest.mark.parametrize(
        "duplicate",
        [copy.copy, copy.deepcopy, lambda proxy: pickle.loads(pickle.dumps(proxy))],
        ids=["copy", "deep", "pickle"],
    )
    def test_a_duplicate_serves_the_same(self, duplicate: Any, keeps_indices: bool) -> None:
        twin = duplicate(a_proxy(keeps_indices=keeps_indices))

        assert type(twin) is LoaderProxy
        assert read(twin) == batches_from(Progress())
        assert isinstance(twin.batch_sampler, _IndexBatchSamplerWrapper) is keeps_indices

    def test_a_view_that_is_not_yet_filled_has_no_attributes(self) -> None:
        empty = LoaderProxy.__new__(LoaderProxy)
        for name in ("loader", "sampler", "dataset", "_locate", "__setstate__", "__getstate_manages_dict__"):
            with pytest.raises(AttributeError):
                getattr(empty, name)

    def test_a_shallow_copy_shares_the_loader(self) -> None:
        proxy = a_proxy()

        assert copy.copy(proxy).loader is proxy.loader


class TestKeepingIndices:
    def test_lightning_finds_the_indices_of_every_batch(self) -> None:
        place = Progress(epoch=1, consumed=4)
        proxy = a_proxy(Guide(place), keeps_indices=True)
        batches = read(proxy)

        assert isinstance(proxy.batch_sampler, _IndexBatchSamplerWrapper)
        assert proxy.batch_sampler.seen_batch_indices == batches == batches_from(place)

    def test_they_are_there_when_the_first_batch_is(self) -> None:
        proxy = a_proxy(keeps_indices=True)
        first = next(iter(proxy))

        assert proxy.batch_sampler.seen_batch_indices[0] == first.tolist()

    def test_every_pass_has_its_own(self) -> None:
        proxy = a_proxy(Guide(Progress(), Progress(epoch=1)), keeps_indices=True)
        read(proxy)
        read(proxy)

        assert proxy.batch_sampler.seen_batch_indices == batches_from(Progress(epoch=1))

    def test_its_length_is_that_of_the_epoch(self) -> None:
        proxy = a_proxy(keeps_indices=True)

        assert len(proxy.batch_sampler) == len(proxy) == 6


def a_trainer() -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def attached(module: pl.LightningDataModule) -> pl.LightningDataModule:
    """The module in a trainer, as a ``fit`` or ``test`` leaves it."""
    connector: Any = a_trainer()._data_connector
    connector.attach_data(LedgerModel(), datamodule=module)
    return module


def loops_of(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "train": trainer.fit_loop,
        "val within fit": trainer.fit_loop.epoch_loop.val_loop,
        "val": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }


class Intercepted:
    """A trainer whose loops ask through functions that note who asked and pass on what the user's side returns."""

    def __init__(self) -> None:
        self.trainer = a_trainer()
        self.asked: list[str] = []
        self.install()

    def install(self) -> None:
        intercept(self.trainer, self.training, self.evaluation)

    def training(self, request: Any) -> Any:
        self.asked.append("train")
        return request()

    def evaluation(self, stage: str, request: Any) -> Any:
        self.asked.append(stage)
        return request()


class TestInterceptedSource:
    def test_what_it_gives_has_passed_through_the_function(self) -> None:
        source = InterceptedSource(_DataLoaderSource([1, 2], "train_dataloader"), lambda request: ["seen", *request()])

        assert source.dataloader() == ["seen", 1, 2]

    def test_the_function_decides_whether_the_user_is_asked(self) -> None:
        source = InterceptedSource(_DataLoaderSource(None, "train_dataloader"), lambda request: "mine")

        assert source.dataloader() == "mine"

    def test_the_request_is_what_the_original_would_give(self) -> None:
        class Module(pl.LightningDataModule):
            def val_dataloader(self) -> Any:
                return "from the hook"

        source = InterceptedSource(_DataLoaderSource(attached(Module()), "val_dataloader"), lambda request: request())

        assert source.dataloader() == source.request() == "from the hook"

    def test_a_hook_is_asked_anew_each_time(self) -> None:
        class Module(pl.LightningDataModule):
            count = 0

            def train_dataloader(self) -> Any:
                self.count += 1
                return self.count

        source = InterceptedSource(_DataLoaderSource(attached(Module()), "train_dataloader"), lambda request: request())

        assert [source.dataloader(), source.dataloader()] == [1, 2]

    def test_it_survives_a_new_instance(self) -> None:
        source = InterceptedSource(_DataLoaderSource([1], "train_dataloader"), lambda request: ["seen", *request()])
        source.instance = [2]

        assert source.dataloader() == ["seen", 2]

    def test_lightning_sees_whether_the_hook_is_defined(self) -> None:
        class Validates(LedgerModel):
            def val_dataloader(self) -> Any:
                return []

        defined = [
            InterceptedSource(_DataLoaderSource(model, "val_dataloader"), lambda request: request()).is_defined()
            for model in (Validates(), LedgerModel(), Numbers(3))
        ]

        assert defined == [True, False, True]


class TestIntercept:
    def test_every_loop_asks_through_the_functions(self) -> None:
        intercepted = Intercepted()
        for name, loop in loops_of(intercepted.trainer).items():
            loop._data_source.instance = name

        given = [loop._data_source.dataloader() for loop in loops_of(intercepted.trainer).values()]
        assert given == ["train", "val within fit", "val", "test", "predict"]
        assert intercepted.asked == ["train", "val", "val", "test", "predict"]

    def test_installing_again_asks_once(self) -> None:
        intercepted = Intercepted()
        intercepted.install()
        intercepted.install()
        for loop in loops_of(intercepted.trainer).values():
            loop._data_source.instance = "data"
            loop._data_source.dataloader()

        assert intercepted.asked == ["train", "val", "val", "test", "predict"]

    def test_installing_again_keeps_the_sources(self) -> None:
        intercepted = Intercepted()
        before = [loop._data_source for loop in loops_of(intercepted.trainer).values()]
        intercepted.install()

        after = [loop._data_source for loop in loops_of(intercepted.trainer).values()]
        assert all(one is other for one, other in zip(before, after, strict=True))

    def test_installing_again_replaces_the_functions(self) -> None:
        first = Intercepted()
        second = Intercepted()
        intercept(first.trainer, second.training, second.evaluation)
        for loop in loops_of(first.trainer).values():
            loop._data_source.instance = "data"
            loop._data_source.dataloader()

        assert first.asked == []
        assert second.asked == ["train", "val", "val", "test", "predict"]

    def test_it_stays_when_lightning_attaches_other_data(self) -> None:
        intercepted = Intercepted()
        trainer, model = intercepted.trainer, LedgerModel()
        connector: Any = trainer._data_connector
        connector.attach_data(model, train_dataloaders="first", val_dataloaders="second")
        connector.attach_data(model, train_dataloaders="third")

        assert trainer.fit_loop._data_source.dataloader() == "third"
        assert trainer.fit_loop.epoch_loop.val_loop._data_source.instance is model
        assert intercepted.asked == ["train"]

    def test_it_stays_when_lightning_attaches_a_data_module(self) -> None:
        class Module(pl.LightningDataModule):
            def test_dataloader(self) -> Any:
                return "from the module"

        intercepted = Intercepted()
        connector: Any = intercepted.trainer._data_connector
        connector.attach_data(LedgerModel(), datamodule=Module())

        assert intercepted.trainer.test_loop._data_source.dataloader() == "from the module"
        assert intercepted.asked == ["test"]

    def test_the_users_training_loaders_can_be_asked_for_past_the_function(self) -> None:
        intercepted = Intercepted()
        intercepted.trainer.fit_loop._data_source.instance = "data"

        assert request_training_loaders(intercepted.trainer) == "data"
        assert intercepted.asked == []

    def test_without_an_intercepted_source_the_users_loaders_are_asked_for_all_the_same(self) -> None:
        trainer = a_trainer()
        trainer.fit_loop._data_source.instance = "data"

        assert request_training_loaders(trainer) == "data"

    def test_the_stages_are_those_of_lightnings_hooks(self) -> None:
        intercepted = Intercepted()
        for loop in loops_of(intercepted.trainer).values():
            assert hasattr(DataHooks, loop._data_source.name)
            loop._data_source.instance = "data"
            loop._data_source.dataloader()

        names = [loop._data_source.name for loop in loops_of(intercepted.trainer).values()]
        assert [f"{stage}_dataloader" for stage in intercepted.asked] == names
