"""A patched loader is what it was, dealt out to ranks and resumable, or it is refused with the reason."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities import CombinedLoader
from support.ledger import Numbers
from support.samplers import LENGTH, GlobalRandom, loader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful.core import BlockShuffledOrder, Progress
from lightning_stateful.errors import ConfigurationError, DamagedStateError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.loaders import StatefulLoader, build_patched, is_patched, patch_dataloader
from lightning_stateful.loaders.patching import dealt_otherwise
from lightning_stateful.stream_loader import StreamLoader
from lightning_stateful.trainer.loader_proxy import LoaderProxy

DATA = list(range(LENGTH))


class Named(DataLoader[Any]):
    """A loader with a constructor, methods and attributes of its own."""

    kind = "ordinary"

    def __init__(self, name: str, data: Any = DATA, *, scale: int = 2) -> None:
        super().__init__(data, batch_size=4, sampler=GlobalRandom(), num_workers=0)
        self.name, self.scale, self._secret = name, scale, [name]

    def described(self) -> str:
        return f"{self.name} x {self.scale} of {len(self.dataset)}"

    def rename(self, name: str) -> None:
        self.name = name

    @property
    def secret(self) -> list[str]:
        return self._secret


class Scaled(DataLoader[Any]):
    """Transforms its batches, by a method of its own."""

    factor = 1

    def __iter__(self) -> Any:
        return map(self.transform, super().__iter__())

    def transform(self, batch: Any) -> Any:
        return batch * self.factor


class Counts(DataLoader[Any]):
    """Counts its passes."""

    num_passes = 0

    def __iter__(self) -> Any:
        yield from super().__iter__()
        self.num_passes += 1


class NamedAlike(DataLoader[Any]):
    """Has values in its class under names that a StatefulLoader uses."""

    seed, path, epoch, order, batch_size = 5, "a", 7, "none", 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def opens(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened_by = worker_id


def to_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(samples)


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def served(loaders: list[Any]) -> list[int]:
    return sorted(index for loader in loaders for batch in batches_of(loader) for index in batch)


class TestClassArgumentsAndAttributes:
    def test_its_attributes_are_those_of_the_loader_and_are_kept_when_it_is_patched(self) -> None:
        plain = Named("a")
        plain.extra, plain.kind = {"note": 1}, "special"  # type: ignore[attr-defined]
        patched: Any = patch_dataloader(plain)
        patched.rename("b")
        patched.fresh = 1
        taken: Any = build_patched(patched, num_replicas=2, rank=0)

        for one in (patched, taken):
            assert isinstance(one, Named)
            assert isinstance(one, StatefulLoader)
            assert (one.extra, one.kind, one.name, one.scale, one.fresh) == ({"note": 1}, "special", "b", 2, 1)
            assert (one.described(), one.secret) == ("b x 2 of 22", ["a"])
        # As with torch, what holds the user's object, such as a collate_fn, finds it.
        assert plain.name == "b"
        with pytest.raises(AttributeError, match="Named' object has no attribute 'nothing'"):
            _ = patched.nothing

    def test_its_class_may_have_names_that_ours_sets(self) -> None:
        patched: Any = patch_dataloader(NamedAlike(DATA, batch_size=4), seed=3)

        assert (patched.seed, patched.path, patched.epoch) == (3, "", 0)
        assert served([patched]) == DATA
        assert patched.epoch == 1

    @pytest.mark.parametrize("moment", ["before the first batch", "between epochs"])
    def test_options_set_after_patching_are_used(self, moment: str) -> None:
        patched = patch_dataloader(loader_of_numbers(batch_size=11))
        if moment == "between epochs":
            list(patched)
        patched.collate_fn = to_tuple

        assert batches_of(patched) == [tuple(DATA[:11]), tuple(DATA[11:])]


class TestIterationOfItsOwn:
    def test_transformed_batches_resume_exactly(self) -> None:
        def make() -> StatefulLoader:
            patched = patch_dataloader(Scaled(DATA, batch_size=4, sampler=GlobalRandom(), num_workers=2))
            patched.factor = 10
            return patched

        patched = make()
        iterator = iter(patched)
        [next(iterator) for _ in range(2)]
        fresh = make()
        fresh.load_state_dict(patched.state_dict())

        assert batches_of(fresh) == batches_of(iterator) == batches_of(make())[2:]
        assert served([make()]) == [10 * n for n in DATA]


def test_every_option_is_kept() -> None:
    options: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": to_tuple,
        "timeout": 7,
        "worker_init_fn": opens,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "generator": torch.Generator(),
    }
    patched = patch_dataloader(Scaled(DATA, **options))

    assert {name: getattr(patched, name) for name in options} == options


class TestTheLoaderThatWasPatched:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: loader_of_numbers(batch_size=4, shuffle=True, generator=torch.Generator()),
            lambda: loader_of_numbers(sampler=GlobalRandom()),
        ],
        ids=["shuffle", "global random"],
    )
    def test_it_yields_what_it_would_have_yielded(self, make: Any) -> None:
        untouched, plain = make(), make()
        list(patch_dataloader(plain))
        epochs: list[list[Any]] = []
        for one in (plain, untouched):
            torch.manual_seed(3)
            random.seed(3)
            epochs.append(batches_of(one) + batches_of(one))

        assert epochs[0] == epochs[1]

    def test_none_of_its_attributes_changes(self) -> None:
        plain = Counts(DATA, batch_size=4, sampler=GlobalRandom())
        before = dict(vars(plain))
        list(patch_dataloader(plain, num_replicas=2, rank=1))

        assert vars(plain) == before

    def test_one_that_keeps_persistent_workers_can_be_patched_while_they_live(self) -> None:
        plain = Scaled(DATA, batch_size=11, num_workers=1, persistent_workers=True)
        list(plain)
        patched = patch_dataloader(plain)

        assert served([patched]) == DATA
        assert served([plain]) == DATA

    def test_patching_twice_is_patching_once(self) -> None:
        patched = patch_dataloader(Named("a"))

        assert patch_dataloader(patched) is patched
        assert patch_dataloader(patched, seed=0, seed_samples=False) is patched

    def test_patching_again_with_another_seed_or_rank_is_refused(self) -> None:
        patched = patch_dataloader(Named("a"), seed=3)

        with pytest.raises(ConfigurationError, match="patched already, with seed=3, and keeps that; seed=7 would be"):
            patch_dataloader(patched, seed=7)
        with pytest.raises(ConfigurationError, match="with num_replicas=None, rank=None"):
            patch_dataloader(patched, num_replicas=2, rank=0)

    @pytest.mark.parametrize("seed", [-1, 1.5])
    def test_what_is_no_seed_is_refused(self, seed: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"seed must be (at least 0|an integer), got"):
            patch_dataloader(Named("a"), seed=seed)

    def test_a_name_in_accept_that_no_difference_has_is_pointed_out(self) -> None:
        with pytest.warns(StatefulWarning, match="accept names 'sead', .* Is 'seed' meant"):
            patch_dataloader(Named("a"), accept=("sead", "dataset.length"))
        with pytest.warns(StatefulWarning, match="accept names 'wholly.unheard'"):
            patch_dataloader(Named("a"), accept="wholly.unheard")
        patch_dataloader(Named("a"), accept=("dataset", "train.seed", "sequence", "weights", "replay", "iteration"))


class TestTakingOver:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: loader_of_numbers(batch_size=5, sampler=GlobalRandom()),
            lambda: patch_dataloader(loader_of_numbers(batch_size=5, sampler=GlobalRandom())),
            lambda: StatefulLoader(DATA, batch_size=5, shuffle=True),
        ],
        ids=["plain", "patched", "stateful"],
    )
    def test_without_shuffling_samples_come_in_order_whatever_the_sampler(self, make: Any) -> None:
        taken = build_patched(make(), shuffle=False)

        assert batches_of(taken) == batches_of(loader_of_numbers(batch_size=5))
        assert (taken.state_dict()["kind"], taken.resume_note) == ("sequential", "")

    @pytest.mark.parametrize(("early", "shuffle"), [(True, None), (False, False)])
    def test_evaluation_can_be_exact(self, early: bool, shuffle: bool | None) -> None:
        plain: Any = StatefulLoader(DATA, exact=True) if early else loader_of_numbers()
        ranks = [build_patched(plain, num_replicas=5, rank=rank, exact=not early, shuffle=shuffle) for rank in range(5)]

        assert served(ranks) == DATA

    def test_a_stateful_loader_keeps_its_settings(self) -> None:
        loader = StatefulLoader(
            DATA,
            batch_size=5,
            sampler=BlockShuffledOrder(LENGTH, 7, block_size=3),
            seed=7,
            seed_samples=False,
            exact=True,
            accept=("seed",),
            drop_last=True,
            num_replicas=2,
            rank=1,
        )
        taken = build_patched(loader, seed=1, num_replicas=3, rank=0, accept=("dataset",))

        assert taken.state_dict() == loader.state_dict()
        assert (taken.order, taken.seed, taken.seed_samples) == (loader.order, 7, False)
        assert (taken.accept, taken.batch_size, taken.drop_last) == (("seed", "dataset"), 5, True)
        assert batches_of(taken) == batches_of(loader)

    @pytest.mark.parametrize(
        "sampler", [lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH), lambda: RandomSampler(DATA)]
    )
    def test_what_torch_draws_differs_from_rank_to_rank_where_nothing_is_dealt_out(self, sampler: Any) -> None:
        def drawn(rank: int) -> list[list[int]]:
            plain = loader_of_numbers(batch_size=5, sampler=sampler())
            return batches_of(build_patched(plain, num_replicas=2, rank=rank, own_rank=rank))

        assert drawn(0) == drawn(0) != drawn(1)
        assert sum(map(len, drawn(0))) == LENGTH


def test_an_iterable_dataset_is_read_as_it_is() -> None:
    patched = patch_dataloader(NamedAlike(Stream(), batch_size=4))

    assert isinstance(patched, StreamLoader)
    assert [n for batch in batches_of(patched) for n in batch] == DATA


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_own_state_of_a_loader_of_torchdatas_is_refused_with_our_words() -> None:
    theirs: StatefulDataLoader[Any] = StatefulDataLoader(DATA, batch_size=4)
    next(iter(theirs))
    patched = patch_dataloader(theirs)

    assert isinstance(patched, StatefulDataLoader)
    with pytest.raises(DamagedStateError, match="The loader's state has no version"):
        patched.load_state_dict(theirs.state_dict())


class TestRefusals:
    def test_without_workers_batches_come_in_order_whatever_the_option(self) -> None:
        assert batches_of(build_patched(loader_of_numbers(in_order=False))) == batches_of(loader_of_numbers())

    @pytest.mark.parametrize(
        ("make", "how", "words"),
        [
            (lambda: loader(in_order=False, num_workers=1), {}, "in_order=False hands .* no fixed order.*Leave it out"),
            (lambda: DataLoader(Stream(), num_workers=2, in_order=False), {}, "in_order=False hands batches over"),
            (lambda: 3, {}, "it is a int and not a torch.utils.data.DataLoader"),
            (lambda: Scaled(Stream()), {"exact": True}, "Stream is an IterableDataset, which has no random access"),
        ],
    )
    def test_what_cannot_be_patched_is_refused_with_the_reason(
        self, make: Any, how: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(UnsupportedLoaderError, match=f"Cannot patch the loader: {words}"):
            build_patched(make(), **how)
        # That any other iterable gives batches is known within a Trainer only.
        with pytest.raises(UnsupportedLoaderError, match="it is a list and not a torch"):
            patch_dataloader([1, 2])  # type: ignore[arg-type]


def loader_of_numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


def test_a_patched_loader_can_be_pickled() -> None:
    patched = pickle.loads(pickle.dumps(patch_dataloader(loader(batch_size=2))))

    assert isinstance(patched.dataset, Numbers)
    assert len(list(patched)) == 11


def by_fabric(given: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(given)


PATCHED: dict[str, Any] = {
    "patched": lambda: ours(),
    "over a stream": lambda: patch_dataloader(DataLoader(Stream())),
    "nested": lambda: {"a": [ours(), (ours(), {"b": ours()})], "c": ours()},
    "a CombinedLoader": lambda: CombinedLoader({"a": ours(), "b": [ours()]}, "sequential"),
    "what Fabric makes of one": lambda: [by_fabric(ours()), ours()],
    "what a trainer is given": lambda: [view(), {"a": CombinedLoader({"a": view()})}],
}
NOT_PATCHED: dict[str, Any] = {
    "nothing": lambda: None,
    "a loader over a patched one's batches": lambda: DataLoader(range(22), batch_sampler=ours().batch_sampler),
    "one deep in a structure": lambda: {"a": [ours(), {"b": (ours(), loader())}]},
    "one and None": lambda: [ours(), None],
    "what Fabric makes of a plain one": lambda: by_fabric(loader()),
}


def ours() -> StatefulLoader:
    return patch_dataloader(loader(batch_size=2))


def view() -> LoaderProxy:
    return LoaderProxy(ours(), Progress)


@pytest.mark.parametrize("name", [*PATCHED, *NOT_PATCHED])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_loaders_are_patched_if_all_that_will_be_iterated_are_ours(name: str) -> None:
    assert is_patched({**PATCHED, **NOT_PATCHED}[name]()) is (name in PATCHED)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_note_says_where_distributed_samplers_would_shuffle_loaders_alike(ranks: int) -> None:
    given: dict[str, Any] = {name: DataLoader(Numbers(LENGTH), batch_size=4, shuffle=True) for name in "ab"}
    given["c"] = DataLoader(Numbers(LENGTH), batch_size=4)
    given["d"] = DataLoader(Numbers(LENGTH + 4), batch_size=4, shuffle=True)
    loaders = {name: build_patched(one, path=name, num_replicas=ranks, rank=0) for name, one in given.items()}
    notes = dealt_otherwise(given, loaders)
    assert [name for name, note in notes.items() if "as it does those of 'a'" in note] == (["b"] if ranks == 2 else [])
    assert [name for name, note in notes.items() if note] == (list("abcd") if ranks == 2 else [])
    one_seed = {name: build_patched(given[name], path=name, drawn_as="a", num_replicas=2, rank=0) for name in "ab"}
    assert not any("as it does those of" in note for note in dealt_otherwise(given, one_seed).values())
