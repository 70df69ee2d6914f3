"""A patched loader is what it was, dealt out to ranks and resumable."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import Numbers
from support.samplers import LENGTH, ClassBalanced, GlobalRandom, ShuffledBatches, ShufflesInPlace, loader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.loaders import StatefulLoader, patch_dataloader, take_over
from lightning_stateful.loaders.stream_loader import StreamLoader

DATA = list(range(LENGTH))


class Named(DataLoader[Any]):
    """A loader with a constructor, methods and attributes of its own."""

    kind = "ordinary"
    limit: int | None = None

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

    @classmethod
    def usual(cls) -> Named:
        return cls("usual")


class Scaled(DataLoader[Any]):
    """Transforms its batches."""

    factor = 1

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * self.factor


class Counts(DataLoader[Any]):
    """Counts its batches, and its passes when they are over."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_batches, self.num_passes = 0, 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.num_batches += 1
            yield batch
        self.num_passes += 1


class CountsInItsClass(DataLoader[Any]):
    """Counts from a number that stands in the class."""

    num_batches = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.num_batches += 1
            yield batch


class Drops(DataLoader[Any]):
    """Leaves every other batch out."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number % 2 == 0:
                yield batch


class Adds(DataLoader[Any]):
    """Hands every batch out twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


class AddsOne(DataLoader[Any]):
    """Hands out a last batch of its own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield torch.tensor([-1])


class FiltersWithWorkers(Drops):
    """A subclass of a subclass."""


class SaysTen(DataLoader[Any]):
    """Says that it has ten batches."""

    def __len__(self) -> int:
        return 10


class OfTheFuture(DataLoader[Any]):
    """Has an option that only its iterator knows."""

    def __init__(self, *args: Any, later: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.later = later
        self.begun: list[int] = []

    def _get_iterator(self) -> Any:
        self.begun.append(self.later)
        return super()._get_iterator()


class WithSlots(DataLoader[Any]):
    """Reads what it hands out from its own methods."""

    def __iter__(self) -> Any:
        return map(self.transform, super().__iter__())

    def transform(self, batch: Any) -> Any:
        return batch + 100


class OwnStateful(StatefulDataLoader[Any]):
    """A subclass of torchdata's loader."""

    label = "mine"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Opened:
    """A dataset that has to be opened in each worker."""

    opened_by: int | None = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int | None]:
        return index, self.opened_by


def opens(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened_by = worker_id


def to_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(samples)


def to_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def served(loaders: list[Any]) -> list[int]:
    return sorted(index for loader in loaders for batch in batches_of(loader) for index in batch)


def over_ranks(make: Any, num_replicas: int) -> list[StatefulLoader]:
    return [patch_dataloader(make(), num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)]


class TestClassArgumentsAndAttributes:
    @pytest.mark.parametrize(
        "make", [lambda: loader(), lambda: Named("a"), lambda: Scaled(DATA), lambda: SaysTen(DATA), Named.usual]
    )
    def test_a_patched_loader_is_an_instance_of_its_class_and_of_ours(self, make: Any) -> None:
        patched = patch_dataloader(make())

        assert isinstance(patched, type(make()))
        assert isinstance(patched, StatefulLoader)

    def test_constructor_arguments_of_its_own_are_not_asked_for_again(self) -> None:
        patched: Any = patch_dataloader(Named("a", scale=3))

        assert (patched.name, patched.scale, patched.batch_size) == ("a", 3, 4)
        assert served([patched]) == DATA

    def test_methods_and_properties_of_its_own_work(self) -> None:
        patched: Any = patch_dataloader(Named("a"))
        patched.rename("b")

        assert patched.described() == "b x 2 of 22"
        assert patched.secret == ["a"]
        assert Named.usual().secret == ["usual"]

    def test_attributes_set_before_patching_are_kept(self) -> None:
        plain = Named("a")
        plain.extra = {"note": 1}  # type: ignore[attr-defined]

        assert patch_dataloader(plain).extra == {"note": 1}

    def test_an_attribute_that_hides_one_of_the_class_is_kept(self) -> None:
        plain = Named("a")
        plain.kind = "special"

        assert patch_dataloader(plain).kind == "special"

    def test_attributes_set_after_patching_are_read_by_its_methods(self) -> None:
        patched: Any = patch_dataloader(Named("a"))
        patched.name, patched.fresh = "b", 1

        assert patched.described().startswith("b")
        assert patched.fresh == 1

    def test_attributes_set_after_patching_are_read_by_its_iteration(self) -> None:
        plain = Scaled(DATA, batch_size=11)
        plain.factor = 5
        patched = patch_dataloader(plain)
        patched.factor = 10

        assert batches_of(patched) == [[10 * n for n in DATA[:11]], [10 * n for n in DATA[11:]]]

    def test_attributes_that_stood_in_the_class_may_be_set_after_patching(self) -> None:
        patched = patch_dataloader(Scaled(DATA, batch_size=22))
        patched.factor = 10

        assert batches_of(patched) == [[10 * n for n in DATA]]

    @pytest.mark.parametrize("moment", ["before the first batch", "between epochs"])
    def test_options_set_after_patching_are_used(self, moment: str) -> None:
        patched = patch_dataloader(loader_of_numbers(batch_size=11))
        if moment == "between epochs":
            list(patched)
        patched.collate_fn = to_tuple

        assert batches_of(patched) == [tuple(DATA[:11]), tuple(DATA[11:])]

    def test_attributes_that_there_are_not_are_missed_by_name(self) -> None:
        with pytest.raises(AttributeError, match="Named' object has no attribute 'nothing'"):
            _ = patch_dataloader(Named("a")).nothing

    def test_the_class_says_what_it_is_made_of(self) -> None:
        patched = patch_dataloader(Named("a"))

        assert type(patched).__name__ == "StatefulNamed"
        assert type(patched) is type(patch_dataloader(Named("b")))
        assert patched.__doc__ == Named.__doc__

    def test_a_patched_loader_can_be_copied_with_its_attributes(self) -> None:
        patched: Any = patch_dataloader(Named("a"))
        copied = copy.copy(patched)

        assert copied.name == "a"
        assert copied.described() == patched.described()

    def test_torchs_guard_against_changes_stays(self) -> None:
        patched = patch_dataloader(Named("a"))

        for name in ("batch_size", "sampler", "dataset"):
            with pytest.raises(ValueError, match=f"{name} attribute should not be set after"):
                setattr(patched, name, 1)


class TestIterationOfItsOwn:
    def test_transformed_batches_are_transformed(self) -> None:
        plain = Scaled(DATA, batch_size=4, shuffle=True)
        plain.factor = 3
        patched = patch_dataloader(plain)

        assert served([patched]) == [3 * n for n in DATA]

    def test_a_method_of_its_own_may_do_it(self) -> None:
        assert served([patch_dataloader(WithSlots(DATA, batch_size=4))]) == [n + 100 for n in DATA]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_transformed_batches_resume_exactly(self, num_workers: int) -> None:
        def make() -> StatefulLoader:
            return patch_dataloader(WithSlots(DATA, batch_size=4, sampler=GlobalRandom(), num_workers=num_workers))

        patched = make()
        iterator = iter(patched)
        [next(iterator) for _ in range(2)]
        fresh = make()
        fresh.load_state_dict(patched.state_dict())

        assert batches_of(fresh) == batches_of(iterator) == batches_of(make())[2:]

    def test_what_it_counts_can_be_read(self) -> None:
        patched: Any = patch_dataloader(Counts(DATA, batch_size=4))
        list(patched)
        list(patched)

        assert (patched.num_batches, patched.num_passes) == (12, 2)

    def test_what_it_counts_from_a_number_in_its_class_can_be_read(self) -> None:
        patched: Any = patch_dataloader(CountsInItsClass(DATA, batch_size=4))
        list(patched)

        assert patched.num_batches == 6

    def test_the_loader_that_was_patched_counts_by_itself(self) -> None:
        plain = Counts(DATA, batch_size=4)
        list(patch_dataloader(plain))

        assert (plain.num_batches, plain.num_passes) == (0, 0)

    @pytest.mark.parametrize("num_replicas", [1, 2])
    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("kind", [Drops, FiltersWithWorkers])
    def test_one_that_drops_batches_is_found(self, kind: Any, num_workers: int, num_replicas: int) -> None:
        patched = patch_dataloader(kind(DATA, batch_size=2, num_workers=num_workers), num_replicas=num_replicas, rank=0)
        count = -(-11 // num_replicas)

        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.__iter__ gave only \d of {count} batches"):
            list(patched)

    @pytest.mark.parametrize("kind", [Adds, AddsOne])
    def test_one_that_adds_batches_is_found(self, kind: Any) -> None:
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.__iter__ gave more of 6 batches"):
            list(patch_dataloader(kind(DATA, batch_size=4)))

    def test_one_that_drops_batches_is_found_in_every_pass(self) -> None:
        patched = patch_dataloader(Drops(DATA, batch_size=2))

        for _ in range(2):
            with pytest.raises(ConfigurationError, match="gave only"):
                list(patched)

    def test_what_is_left_of_an_epoch_is_counted_from_where_it_stands(self) -> None:
        plain = Counts(DATA, batch_size=4)
        state = advanced(patch_dataloader(plain), 4).state_dict()
        patched = patch_dataloader(plain)
        patched.load_state_dict(state)

        assert len(batches_of(patched)) == 2
        assert patched.epoch == 1

    def test_a_length_of_its_own_gives_way_to_the_number_of_batches(self) -> None:
        patched = patch_dataloader(SaysTen(DATA, batch_size=4))

        assert len(patched) == len(batches_of(patched)) == 6

    def test_options_that_only_its_iterator_knows_are_kept(self) -> None:
        patched: Any = patch_dataloader(OfTheFuture(DATA, batch_size=4, later=7))

        assert served([patched]) == DATA
        assert patched.begun == [7]

    def test_one_that_breaks_off_a_pass_can_begin_it_again(self) -> None:
        patched = patch_dataloader(Counts(DATA, batch_size=4, sampler=GlobalRandom()))
        first = next(iter(patched)).tolist()

        assert batches_of(patched)[0] == first


class TestOptions:
    OPTIONS: dict[str, Any] = {  # noqa: RUF012  # read only
        "num_workers": 2,
        "collate_fn": to_tuple,
        "timeout": 7,
        "worker_init_fn": opens,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "generator": torch.Generator(),
    }

    @pytest.mark.parametrize("kind", [DataLoader, Scaled])
    @pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"multiprocessing_context", "generator"}))
    def test_every_option_is_kept(self, kind: Any, name: str) -> None:
        assert getattr(patch_dataloader(kind(DATA, **self.OPTIONS)), name) is self.OPTIONS[name]

    @pytest.mark.parametrize("kind", [DataLoader, Scaled])
    def test_its_generator_is_kept(self, kind: Any) -> None:
        assert patch_dataloader(kind(DATA, **self.OPTIONS)).generator is self.OPTIONS["generator"]

    @pytest.mark.parametrize("kind", [DataLoader, Scaled])
    def test_the_way_to_start_workers_is_kept(self, kind: Any) -> None:
        patched = patch_dataloader(kind(DATA, **self.OPTIONS))

        assert patched.multiprocessing_context.get_start_method() == "fork"

    @pytest.mark.filterwarnings("ignore:pin_memory_device is deprecated")
    def test_the_device_of_pinned_memory_is_kept(self) -> None:
        assert patch_dataloader(loader(pin_memory_device="cuda")).pin_memory_device == "cuda"

    def test_a_worker_init_fn_finds_the_dataset(self) -> None:
        patched = patch_dataloader(
            DataLoader(Opened(), batch_size=1, num_workers=2, worker_init_fn=opens, collate_fn=to_list)
        )

        assert list(patched) == [[(index, index % 2)] for index in range(6)]

    def test_persistent_workers_are_kept_between_epochs(self) -> None:
        patched = patch_dataloader(
            DataLoader(Process(), batch_size=3, num_workers=1, persistent_workers=True, collate_fn=to_list)
        )

        assert len({pid for _ in range(2) for batch in patched for pid in batch}) == 1

    def test_workers_may_be_spawned(self) -> None:
        patched = patch_dataloader(
            Scaled(DATA, batch_size=4, num_workers=1, multiprocessing_context="spawn", sampler=GlobalRandom())
        )

        assert served([patched]) == DATA

    def test_a_collate_fn_is_used(self) -> None:
        assert list(patch_dataloader(DataLoader(DATA[:3], batch_size=2, collate_fn=to_tuple))) == [(0, 1), (2,)]

    def test_a_generator_is_left_where_it_is(self) -> None:
        generator = torch.Generator()
        before = generator.get_state()
        patched = patch_dataloader(DataLoader(DATA, batch_size=4, shuffle=True, generator=generator))

        assert served([patched]) == DATA
        assert torch.equal(generator.get_state(), before)

    def test_the_seed_chooses_the_order_and_the_generator_does_not(self) -> None:
        first, second, other = (
            patch_dataloader(
                DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(number)),
                seed=seed,
            )
            for number, seed in ((1, 0), (2, 0), (1, 5))
        )

        assert batches_of(first) == batches_of(second)
        assert batches_of(first) != batches_of(other)

    def test_lightnings_setting_of_worker_seeds_reaches_the_workers(self) -> None:
        patched = patch_dataloader(DataLoader(Opened(), batch_size=3, num_workers=1, collate_fn=to_list))
        patched.worker_init_fn = opens

        assert next(iter(patched)) == [(0, 0), (1, 0), (2, 0)]


class TestTheLoaderThatWasPatched:
    def found_and_expected(self, make: Any, iterated: bool) -> tuple[list[Any], list[Any]]:
        """Two epochs of a loader that was patched, and of one that was not."""
        untouched, plain = make(), make()
        patched = patch_dataloader(plain)
        if iterated:
            list(patched)
        epochs: list[list[Any]] = []
        for one in (plain, untouched):
            seeded_globally()
            epochs.append(batches_of(one) + batches_of(one))
        return epochs[0], epochs[1]

    @pytest.mark.parametrize("iterated", [False, True])
    @pytest.mark.parametrize(
        "make",
        [
            lambda: loader_of_numbers(batch_size=4, sampler=RandomSampler(DATA)),
            lambda: loader_of_numbers(batch_size=4, shuffle=True, generator=torch.Generator()),
            lambda: Named("a"),
        ],
        ids=["random", "shuffle", "subclass"],
    )
    def test_it_yields_what_it_would_have_yielded(self, make: Any, iterated: bool) -> None:
        found, expected = self.found_and_expected(make, iterated)

        assert found == expected

    @pytest.mark.parametrize("kind", [ShuffledBatches, ShufflesInPlace, ClassBalanced])
    def test_patching_alone_does_not_move_what_its_sampler_holds(self, kind: Any) -> None:
        found, expected = self.found_and_expected(lambda: loader_of_numbers(batch_sampler=kind()), False)

        assert found == expected

    @pytest.mark.parametrize(
        "make",
        [
            lambda: loader_of_numbers(batch_size=4, sampler=RandomSampler(DATA, generator=torch.Generator())),
            lambda: loader_of_numbers(batch_sampler=ShuffledBatches()),
            lambda: loader_of_numbers(batch_sampler=ShufflesInPlace()),
            lambda: loader_of_numbers(batch_sampler=ClassBalanced()),
        ],
        ids=["random", "shuffled batches", "shuffled in place", "class balanced"],
    )
    def test_iterating_the_patched_one_does_not_move_what_its_sampler_holds(self, make: Any) -> None:
        found, expected = self.found_and_expected(make, True)

        assert found == expected

    def test_it_can_be_patched_again_to_resume_in_the_same_process(self) -> None:
        plain = loader_of_numbers(batch_sampler=ShufflesInPlace())
        whole = batches_of(patch_dataloader(plain))
        first = advanced(patch_dataloader(loader_of_numbers(batch_sampler=ShufflesInPlace())), 3)
        second = patch_dataloader(plain)
        second.load_state_dict(first.state_dict())

        assert batches_of(second) == whole[3:]

    def test_none_of_its_attributes_changes(self) -> None:
        plain = Counts(DATA, batch_size=4, sampler=GlobalRandom())
        before = dict(vars(plain))
        list(patch_dataloader(plain, num_replicas=2, rank=1))

        assert vars(plain) == before

    def test_setting_an_attribute_of_the_patched_one_does_not_reach_it(self) -> None:
        plain = Named("a")
        patched = patch_dataloader(plain)
        patched.name, patched.collate_fn = "b", to_tuple

        assert plain.name == "a"
        assert plain.collate_fn is not to_tuple

    def test_a_sampler_keeps_the_ranks_it_was_built_for(self) -> None:
        sampler = torch.utils.data.DistributedSampler(DATA, 2, 1)
        own = list(sampler)
        patched = patch_dataloader(loader_of_numbers(sampler=sampler, batch_size=4), num_replicas=3, rank=0)
        list(patched)
        sampler.set_epoch(0)

        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, 1, 11)
        assert list(sampler) == own

    def test_one_that_keeps_persistent_workers_can_be_patched_while_they_live(self) -> None:
        plain = Scaled(DATA, batch_size=11, num_workers=1, persistent_workers=True)
        list(plain)
        patched = patch_dataloader(plain)

        assert served([patched]) == DATA
        assert served([plain]) == DATA

    def test_the_global_generators_are_left_alone(self) -> None:
        seeded_globally()
        expected = torch.rand(1)
        seeded_globally()
        patched = patch_dataloader(loader(batch_sampler=ClassBalanced()))
        list(patched)

        assert torch.equal(torch.rand(1), expected)

    def test_two_patched_from_one_loader_do_not_disturb_each_other_when_one_follows_the_other(self) -> None:
        plain = loader_of_numbers(batch_sampler=ShufflesInPlace())
        alone = batches_of(patch_dataloader(loader_of_numbers(batch_sampler=ShufflesInPlace())))
        first, second = patch_dataloader(plain), patch_dataloader(plain)

        assert batches_of(first) == batches_of(second) == alone

    def test_two_patched_from_one_loader_may_be_iterated_in_turn(self) -> None:
        plain = loader_of_numbers(batch_size=2, sampler=GlobalRandom())
        alone = batches_of(patch_dataloader(plain))
        pairs = list(zip(patch_dataloader(plain), patch_dataloader(plain), strict=True))

        assert [one.tolist() for one, _ in pairs] == [two.tolist() for _, two in pairs] == alone


class TestPatchingTwice:
    @pytest.mark.parametrize("make", [loader, lambda: Named("a"), lambda: loader(batch_sampler=ShuffledBatches())])
    def test_patching_twice_is_patching_once(self, make: Any) -> None:
        patched = patch_dataloader(make())

        assert patch_dataloader(patched, seed=9) is patched

    @pytest.mark.parametrize("num_replicas", [2, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"batch_size": 2, "shuffle": True},
            {"batch_size": 2, "sampler": GlobalRandom},
            {"batch_sampler": ShuffledBatches},
        ],
        ids=["shuffle", "sampler", "batch sampler"],
    )
    def test_every_sample_comes_once_over_the_ranks(self, options: dict[str, Any], num_replicas: int) -> None:
        ranks = [
            patch_dataloader(
                patch_dataloader(loader_of_numbers(**made_of(options)), num_replicas=num_replicas, rank=rank)
            )
            for rank in range(num_replicas)
        ]

        assert served(ranks) == DATA

    @pytest.mark.parametrize("num_replicas", [2, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"batch_size": 2, "shuffle": True},
            {"batch_size": 2, "sampler": GlobalRandom},
            {"batch_sampler": ShuffledBatches},
            {"batch_size": None, "sampler": GlobalRandom, "collate_fn": torch.tensor},
        ],
        ids=["shuffle", "sampler", "batch sampler", "one by one"],
    )
    def test_one_without_ranks_is_dealt_out_once_when_it_is_taken_over(
        self, options: dict[str, Any], num_replicas: int
    ) -> None:
        if "collate_fn" in options:
            options = {**options, "collate_fn": lambda index: torch.tensor([index])}
        ranks = [
            take_over(patch_dataloader(loader_of_numbers(**made_of(options))), num_replicas=num_replicas, rank=rank)
            for rank in range(num_replicas)
        ]

        counts = Counter(served(ranks))
        assert set(counts) == set(DATA)
        assert counts.total() - LENGTH < (num_replicas if options.get("batch_size", 0) is None else 1)

    def test_one_that_is_taken_over_keeps_class_and_attributes(self) -> None:
        patched: Any = patch_dataloader(Named("a"))
        patched.name, patched.later = "b", 1
        taken: Any = take_over(patched, num_replicas=2, rank=0)

        assert isinstance(taken, Named)
        assert (taken.name, taken.scale, taken.later) == ("b", 2, 1)

    def test_one_that_is_taken_over_serves_what_it_would_have_served(self) -> None:
        plain = WithSlots(DATA, batch_size=4, sampler=GlobalRandom())

        assert batches_of(take_over(patch_dataloader(plain, seed=3))) == batches_of(patch_dataloader(plain, seed=3))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
class TestTorchdatasLoader:
    @pytest.mark.parametrize("kind", [StatefulDataLoader, OwnStateful])
    def test_it_stays_an_instance_of_its_class(self, kind: Any) -> None:
        patched = patch_dataloader(kind(DATA, batch_size=4))

        assert isinstance(patched, kind)
        assert served([patched]) == DATA

    @pytest.mark.parametrize("kind", [StatefulDataLoader, OwnStateful])
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("options", [{"shuffle": True, "batch_size": 2}, {"batch_sampler": ShuffledBatches}])
    def test_its_state_is_ours_and_resumes_exactly(self, kind: Any, num_workers: int, options: dict[str, Any]) -> None:
        def make() -> StatefulLoader:
            return patch_dataloader(kind(DATA, num_workers=num_workers, **made_of(options)))

        patched = make()
        iterator = iter(patched)
        [next(iterator) for _ in range(3)]
        state = patched.state_dict()
        fresh = make()
        fresh.load_state_dict(state)

        assert state["progress"]["consumed"] == (6 if "batch_size" in options else 3)
        assert batches_of(fresh) == batches_of(iterator)

    def test_its_own_state_is_refused_with_our_words(self) -> None:
        theirs: StatefulDataLoader[Any] = StatefulDataLoader(DATA, batch_size=4)
        iterator = iter(theirs)
        next(iterator)

        with pytest.raises(Exception, match="state"):
            patch_dataloader(theirs).load_state_dict(theirs.state_dict())

    def test_a_subclass_keeps_what_it_has(self) -> None:
        patched: Any = patch_dataloader(OwnStateful(DATA, batch_size=4, snapshot_every_n_steps=3))

        assert (patched.label, patched.snapshot_every_n_steps) == ("mine", 3)

    @pytest.mark.parametrize("num_replicas", [2, 3])
    def test_every_sample_comes_once_over_ranks(self, num_replicas: int) -> None:
        assert served(over_ranks(lambda: StatefulDataLoader(DATA, batch_size=4, shuffle=True), num_replicas)) == DATA


class TestStreams:
    @pytest.mark.parametrize("kind", [DataLoader, Scaled])
    def test_an_iterable_dataset_is_read_as_it_is_and_patched_once(self, kind: Any) -> None:
        patched = patch_dataloader(kind(Stream(), batch_size=4))

        assert isinstance(patched, StreamLoader)
        assert patch_dataloader(patched) is patched
        assert [n for batch in batches_of(patched) for n in batch] == DATA

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    @pytest.mark.parametrize("kind", [Scaled, StatefulDataLoader])
    def test_the_class_of_its_loader_is_kept(self, kind: Any) -> None:
        assert isinstance(patch_dataloader(kind(Stream(), batch_size=4)), kind)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: loader(in_order=False), "in_order=False hands batches over in no fixed order"),
            (lambda: [1, 2], "it is a list and not a torch.utils.data.DataLoader"),
            (lambda: None, "it is a NoneType and not"),
            (lambda: iter(loader()), "it is a _SingleProcessDataLoaderIter and not"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    def test_what_cannot_be_patched_is_refused_with_the_reason(self, make: Any, words: str) -> None:
        with pytest.raises(UnsupportedLoaderError, match=words):
            patch_dataloader(make())

    @pytest.mark.parametrize("kind", [DataLoader, Scaled, StatefulDataLoader])
    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
    def test_an_iterable_dataset_is_refused_by_name_where_no_sample_may_be_repeated(self, kind: Any) -> None:
        with pytest.raises(UnsupportedLoaderError, match="Stream is an IterableDataset, which has no random access"):
            take_over(kind(Stream(), batch_size=2), exact=True)

    def test_a_stream_in_no_fixed_order_is_refused(self) -> None:
        with pytest.raises(UnsupportedLoaderError, match="in_order=False"):
            patch_dataloader(DataLoader(Stream(), batch_size=2, num_workers=2, in_order=False))

    def test_a_loader_over_nothing_is_patched_and_is_over_at_once(self) -> None:
        patched = patch_dataloader(DataLoader([], batch_size=4, sampler=SequentialSampler([])))

        assert (len(patched), list(patched)) == (0, [])


class Process:
    """A dataset of the ids of the processes that read it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def made_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options with samplers of their own."""
    return {name: value() if isinstance(value, type) else value for name, value in options.items()}


def seeded_globally() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def loader_of_numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


def advanced(patched: StatefulLoader, count: int) -> StatefulLoader:
    iterator = iter(patched)
    for _ in range(count):
        next(iterator)
    return patched


def test_a_patched_loader_can_be_pickled() -> None:
    patched = pickle.loads(pickle.dumps(patch_dataloader(loader(batch_size=2))))

    assert isinstance(patched.dataset, Numbers)
    assert len(list(patched)) == 11
