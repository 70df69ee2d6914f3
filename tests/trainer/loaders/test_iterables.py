"""Iterables of batches that are no DataLoader, trained on under a Trainer with nothing but the callback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torchdata.nodes as nodes
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import Numbers, batches
from support.runs import assert_goes_on_from_every_moment, ended, quiet_trainer, stopped, train, train_alone
from support.stream_runs import chunks
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info

from lightning_stateful import StatefulDataCallback, patch_dataloader
from lightning_stateful.errors import ConfigurationError, StateError, StatefulWarning, UnsupportedLoaderError

MOMENTS = [
    ("on_train_batch_start", 1, 3),
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 2),
    ("on_train_batch_end", 1, 4),
    ("on_train_epoch_end", 0, 0),
]
READ_AGAIN = pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")


def batch_of(numbers: list[int]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(numbers), "x": torch.tensor([[number / 100] * 4 for number in numbers])}


class Batches:
    """Eleven batches in an order of the pass, which it counts itself."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return map(batch_of, self.order())

    def order(self) -> list[list[int]]:
        numbers = random.Random(self.epoch).sample(range(22), 22)
        return [numbers[at : at + 2] for at in range(0, 22, 2)]


class Sized(Batches):
    """Says how many they are, and hands all of them over in the same memory."""

    held = batch_of([0, 0])

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            for name, value in batch.items():
                self.held[name].copy_(value)
            yield self.held


class Remembers(Batches):
    """Has a state; after the last batch that is one from which nothing follows."""

    at = first = fetched = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        self.epoch += not first
        for at, numbers in enumerate(self.order()[first:], first + 1):
            self.at = at
            Remembers.fetched += 1
            yield batch_of(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.first = state["epoch"], int(state["at"])


class BySetEpoch(Batches):
    """Is told its epoch by way of a sampler, as Lightning does."""

    epoch = 0

    @property
    def sampler(self) -> BySetEpoch:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return map(batch_of, self.order())


class Fixed(BySetEpoch):
    """In the same order in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Does nothing."""


class Shuffled:
    """A sampler whose order follows from the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(22), 22))


def of_nodes() -> Any:
    """A loader of torchdata's, which counts its passes in its state and reads ahead."""
    node: Any = nodes.SamplerWrapper(Shuffled())
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(nodes.Batcher(node, 2), batch_of), prefetch_factor=3))


def of_threads() -> Any:
    """As :func:`of_nodes`, read by threads that live on between passes."""
    node: Any = nodes.SamplerWrapper(Shuffled())
    return nodes.Loader(nodes.ParallelMapper(nodes.Batcher(node, 2), batch_of, num_workers=2, method="thread"))


KINDS = {kind.__name__: kind for kind in (Batches, Sized, Remembers, BySetEpoch)} | {
    "torchdata.nodes": of_nodes,
    "threads": of_threads,
}


@READ_AGAIN
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_any_iterable_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    assert_goes_on_from_every_moment(tmp_path, KINDS[kind], MOMENTS, train_alone)


@READ_AGAIN
@pytest.mark.parametrize("kind", ["Batches", "Remembers"])
@pytest.mark.parametrize("options", [{"limit_train_batches": 5}, {"accumulate_grad_batches": 3}], ids=str)
def test_the_trainers_options_change_nothing_about_it(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    assert_goes_on_from_every_moment(tmp_path, KINDS[kind], MOMENTS[1:4], train_alone, **options)


class Shares(IterableDataset[Any]):
    """Shared by workers, draws for each sample, and says where it stands."""

    def __init__(self) -> None:
        self.served = self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.passes).sample(range(43), 43)
        info = get_worker_info()
        order = order if info is None else order[info.id :: info.num_workers]
        while self.served < len(order):
            self.served += 1
            yield {"id": torch.tensor(order[self.served - 1]), "x": torch.rand(4)}
        self.served, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served, self.passes = state["served"], state["passes"]


def test_a_pass_that_a_state_at_an_end_leads_to_draws_what_it_does_without_the_stop(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Shares(), batch_size=4, num_workers=2, persistent_workers=True)

    moments = [("on_train_epoch_end", epoch, 0) for epoch in range(2)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3, limit_train_batches=7)


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}], ids=str)
def test_epochs_are_those_of_lightning_alone(options: dict[str, Any]) -> None:
    assert batches(train_alone(Fixed, **options).ledger) == batches(train(Fixed, **options).ledger)


def test_a_state_is_that_of_the_batch_trained_on_and_two_are_fetched_again_to_compare(tmp_path: Path) -> None:
    before = ended(tmp_path / "middle.ckpt", Remembers, run=train_alone, max_steps=4)
    Remembers.fetched = 0
    resumed = train_alone(Remembers, ckpt_path=tmp_path / "middle.ckpt", max_epochs=1)
    assert Remembers.fetched == 9
    assert batches(before.ledger + resumed.ledger) == batches(train_alone(Remembers, max_epochs=1).ledger)


@pytest.mark.parametrize("max_steps", [4, 11])
def test_a_state_that_does_not_lead_back_is_warned_of_by_name(tmp_path: Path, max_steps: int) -> None:
    class Forgets(Remembers):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epoch = state["epoch"]

    ended(tmp_path / "middle.ckpt", Forgets, run=train_alone, max_steps=max_steps)
    with pytest.warns(StatefulWarning, match=r"Forgets \(rank 0\) gives other samples .* (not exact|is over, so)"):
        train_alone(Forgets, ckpt_path=tmp_path / "middle.ckpt", max_epochs=2)


def rows(numbers: list[int]) -> Iterator[Any]:
    for number in numbers:
        yield {"id": number, "x": [number / 100] * 4}


def of_hugging_face() -> Any:
    # Nobody told it would give another order, were it told its epoch.
    made: Any = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": list(range(20))})
    return made.with_format("torch")


class Delegates(IterableDataset[Any]):
    """Leaves its state to a dataset of Hugging Face's, where a loaded one would begin every later pass."""

    def __init__(self) -> None:
        self.held = of_hugging_face()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def state_dict(self) -> Any:
        return self.held.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.held.load_state_dict(state)


def test_a_state_of_hugging_faces_is_used_by_one_pass(tmp_path: Path) -> None:
    moments = [("on_train_batch_end", 0, 0), ("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0)]
    make = lambda: DataLoader(Delegates(), batch_size=2)  # noqa: E731
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone, max_epochs=3)
    assert batches(train_alone(make).ledger) == batches(train(make).ledger)


class HoldsLoader:
    """As docs/compatibility.md has it."""

    def __init__(self) -> None:
        self.loader = LoaderOfAPackage(OfAPackage(), batch_size=2)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def test_an_iterable_that_holds_a_packages_own_loader_goes_on_by_its_state(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"takes arguments \(num_samples_yielded, num_workers, batch_size\)"):
        train_alone(lambda: DataLoader(OfAPackage(), batch_size=2))
    whole, path = train_alone(HoldsLoader), tmp_path / "within.ckpt"
    stopped(path, HoldsLoader, epoch=1, batch=2, run=train_alone)
    resumed = train_alone(HoldsLoader, ckpt_path=path)
    assert batches(resumed.ledger, 1) == batches(whole.ledger, 1)[3:]
    assert batches(resumed.ledger, 2) == batches(whole.ledger, 2)


class OverNodes(IterableDataset[Any]):
    """Hands on what a loader of torchdata's gives, and its state."""

    def __init__(self) -> None:
        self.loader = nodes.Loader(nodes.IterableWrapper(list(range(22))))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def test_a_dataset_that_holds_a_loader_of_torchdata_goes_on_from_its_state(tmp_path: Path) -> None:
    make = lambda: DataLoader(OverNodes(), batch_size=2, collate_fn=batch_of)  # noqa: E731
    assert_goes_on_from_every_moment(tmp_path, make, MOMENTS, train_alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_its_user_has_split_off_is_what_torch_reads(rank: int) -> None:
    make = lambda: DataLoader(split_dataset_by_node(of_hugging_face(), rank=rank, world_size=2), batch_size=2)  # noqa: E731
    found = batches(train_alone(make, max_epochs=1).ledger)
    assert found == batches(train(make, max_epochs=1).ledger)
    assert len(found) == 5


class InForce(Remembers):
    """What it has loaded begins every later pass."""

    def __iter__(self) -> Iterator[Any]:
        first = self.first
        yield from super().__iter__()
        self.first = first


def test_a_loaded_state_that_stays_in_force_is_warned_of(tmp_path: Path) -> None:
    class Loads(InForce):
        def order(self) -> list[list[int]]:
            return [[number, number + 1] for number in range(0, 22, 2)]

    ended(tmp_path / "middle.ckpt", Loads, run=train_alone, max_steps=4)
    with pytest.warns(StatefulWarning, match="begins pass 1 where the resume began: the resume is not exact"):
        train_alone(Loads, ckpt_path=tmp_path / "middle.ckpt", max_epochs=2)


def test_what_is_not_read_again_begins_anew_as_in_lightning(tmp_path: Path) -> None:
    path, said = tmp_path / "middle.ckpt", "4 batches of BySetEpoch .* were read again, and left out, .* no state_dict"
    ended(path, BySetEpoch, run=train_alone, max_steps=4)
    with pytest.warns(StatefulWarning, match=said):
        train_alone(BySetEpoch, ckpt_path=path, max_steps=5)
    anew = train_alone(BySetEpoch, ckpt_path=path, settings={"accept": ("replay",)}, max_epochs=1)
    assert batches(anew.ledger) == batches(train_alone(BySetEpoch, max_epochs=1).ledger)


def test_one_that_is_too_short_to_go_round_with_others_is_refused_with_the_remedy() -> None:
    sides = {"a": Sized(), "b": DataLoader(Numbers(30), batch_size=2)}

    with pytest.raises(ConfigurationError, match=r"'a' has 11 steps an epoch, and the epoch has 15.*'min_size'"):
        train_alone(lambda: sides)


@pytest.mark.parametrize("loader", [None, 3, [DataLoader(Numbers(4)), None]])
def test_what_cannot_be_iterated_is_refused_as_lightning_does_by_the_hook_that_returned_it(loader: Any) -> None:
    class Returns(BoringModel):
        def train_dataloader(self) -> Any:
            return loader

    told = []
    for callbacks in ([], [StatefulDataCallback()]):
        with pytest.raises(TypeError, match=r"invalid dataloader was returned from `Returns.train_dataloader") as error:
            quiet_trainer(*callbacks).fit(Returns())
        told.append(str(error.value))
    assert told[1].startswith(told[0])
    assert isinstance(error.value, UnsupportedLoaderError)


def test_what_cannot_be_iterated_is_refused_as_passed_to_fit() -> None:
    with pytest.raises(TypeError, match=r"invalid dataloader was passed to `Trainer.fit\(train_dataloaders=...\)`"):
        train_alone(lambda: 3)


class Seen(BoringModel):
    """Keeps the batches of training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(batch)

    validation_step = training_step


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
@pytest.mark.parametrize("data", [[1, 2], {"a": [0, 1], "b": [[2, 3], [4, 5]]}, ("ab", "cd"), []], ids=str)
def test_a_list_of_numbers_is_a_loader_as_in_lightning(data: Any) -> None:
    seen = []
    for callbacks in ([], [StatefulDataCallback()]):
        module = Seen()
        quiet_trainer(*callbacks).fit(module, data, data)
        seen.append(module.seen)

    assert seen[1] == seen[0]


class Told(IterableDataset[Any]):
    def set_epoch(self, epoch: int) -> None:
        """Does nothing."""

    def __iter__(self) -> Iterator[Any]:
        return map(Numbers(6).__getitem__, range(6))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            Remembers,
            [
                "Training data: Remembers is no DataLoader: each rank trains on what its own gives, without "
                "seed_samples, and a resume is as exact as its own state_dict."
            ],
        ),
        (
            lambda: DataLoader(Told()),
            [
                "Training data: Told is a stream: every rank and worker trains on what its own dataset gives it, and a "
                "resume reads it again, because it has no state_dict and load_state_dict. It is told every epoch by "
                "set_epoch, in workers too; Lightning alone tells samplers only."
            ],
        ),
        (
            lambda: DataLoader(chunks()),
            [
                "limit_train_batches cuts epochs of the training loader after 3 steps, and the next epoch goes on "
                "there; Lightning alone begins its data anew.",
                "Training data: ChunkedDataset is a stream: its 9 shards are shared evenly among ranks and workers, "
                "and a resume goes on within it.",
            ],
        ),
    ],
    ids=["iterable", "told", "goes on"],
)
def test_the_log_says_once_what_is_done_otherwise(
    caplog: pytest.LogCaptureFixture, make: Any, expected: list[str]
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train_alone(make, max_epochs=3, limit_train_batches=3)

    said = [record.message for record in caplog.records]
    assert [text for text in said if text.startswith(("Training data", "limit_train"))] == expected


def test_the_log_says_that_a_stream_goes_on_where_a_shorter_loader_has_ended_an_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(mode: str) -> CombinedLoader:
        return CombinedLoader([DataLoader(Numbers(3)), DataLoader(chunks())], mode)

    with caplog.at_level("INFO", logger="lightning.pytorch"):
        whole = train_alone(lambda: make("min_size"), max_epochs=2)
    (said,) = [record.message for record in caplog.records if "Where a shorter loader ends" in record.message]
    assert said.startswith("Training data '1': Where a shorter loader ends an epoch, as in the mode min_size")
    first, second = (batches(whole.ledger, epoch) for epoch in range(2))
    assert len(first) == len(second)
    assert not {batch[-1] for batch in first} & {batch[-1] for batch in second}


PASSES = [0]


class CountsOutside(IterableDataset[Any]):
    """Counts its passes in a list of its module."""

    def __iter__(self) -> Iterator[Any]:
        PASSES[0] += 1
        return map(Numbers(6).__getitem__, range(6))


def test_what_an_iterable_dataset_counts_outside_of_itself_is_said_on_a_resume() -> None:
    loader, fresh = (patch_dataloader(DataLoader(CountsOutside(), batch_size=2)) for _ in range(2))
    list(loader)
    fresh.load_state_dict(loader.state_dict())
    with pytest.warns(StatefulWarning, match=r"CountsOutside .*changes .*PASSES in a pass.*resume is not exact"):
        list(fresh)


class OfAPackage(IterableDataset[Any]):
    """Its state takes what only its own loader knows, as LitData's and MosaicML's."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for number in range(first, 12):
            yield {"id": torch.tensor(number), "x": torch.full((4,), number / 100)}

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        return {"at": num_samples_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


class LoaderOfAPackage(DataLoader[Any]):
    """Counts what it has given."""

    given = first = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.given, self.first = self.first, 0
        for batch in super().__iter__():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        of_dataset = self.dataset.state_dict(2 * self.given, self.num_workers, 2)  # type: ignore[attr-defined]
        return {"dataset": of_dataset, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["given"]
        self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_random_sampler_in_a_graph_draws_the_order_of_its_epoch(tmp_path: Path, prefetches: bool) -> None:
    def make() -> Any:
        graph: Any = nodes.Batcher(nodes.SamplerWrapper(RandomSampler(range(22))), 2)
        return nodes.Loader(nodes.Mapper(nodes.Prefetcher(graph, 3) if prefetches else graph, batch_of))

    whole = assert_goes_on_from_every_moment(tmp_path, make, MOMENTS, train_alone, max_epochs=3)
    assert len({str(batches(whole.ledger, epoch)) for epoch in range(3)}) == 3


@pytest.mark.filterwarnings("ignore:.*gives other samples from batch:lightning_stateful.errors.StatefulWarning")
def test_a_stream_in_a_graph_begins_anew_behind_a_state_that_gives_no_further_batch(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{row}\n" for row in range(40)))
    files = sorted(map(str, tmp_path.glob("*.txt")))

    def make() -> Any:
        texts = datasets.load_dataset("text", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
        rows = nodes.Mapper(nodes.IterableWrapper(texts.shuffle(seed=1, buffer_size=20)), of_text)
        return nodes.Loader(nodes.Mapper(nodes.Batcher(rows, 4, drop_last=False), batch_of))

    whole = train_alone(make, max_epochs=3)
    ended(tmp_path / "end.ckpt", make, run=train_alone, max_epochs=1)
    resumed = train_alone(make, ckpt_path=tmp_path / "end.ckpt", max_epochs=3)
    assert batches(resumed.ledger, 1) == batches(whole.ledger, 1)
    assert batches(resumed.ledger, 2) == batches(whole.ledger, 2) != []


def of_text(row: dict[str, str]) -> int:
    return ord(row["text"][0]) * 100 + int(row["text"][1:])
