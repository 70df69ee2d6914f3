"""Two real ranks with data that differ, or only seem to: refused on every rank, or trained on where a user says so."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed
from support import samplers, sources, texts
from support.ddp_runs import Link, assert_chain, chain_of, on_ranks, over_all, run
from support.ledger import LedgerModel, Numbers, samples, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import ended, numbers_module, quiet_trainer, stopped, train
from support.stream_runs import SIZES, chunks
from support.stream_runs import module as stream_module
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from lightning_stateful import DDPSamplerWrapper, StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import RankMismatchError, StatefulWarning, StateMismatchError


def rank() -> int:
    return torch.distributed.get_rank()


# Ranks that disagree


def rows() -> Any:
    data = {"id": list(range(22)), "x": torch.arange(88.0).reshape(22, 4).div(100).tolist()}
    return datasets.Dataset.from_dict(data).with_format("torch")


def in_an_order_of_its_rank(data: dict[Any, Any]) -> dict[Any, Any]:
    return dict(reversed(data.items())) if rank() else data


class Described(Numbers):
    """Gives its description in an order of the rank's."""

    def describe(self) -> dict[Any, Any]:
        return in_an_order_of_its_rank({"mean": np.float32(0.5), "std": float("nan"), 3: np.int64(1)})


class Permutes(Sampler[int]):
    """Yields what a function of no arguments permutes."""

    def __init__(self, permute: Callable[[], Any]) -> None:
        self.permute = permute

    def __len__(self) -> int:
        return samplers.LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(self.permute())


class OfTheProcess(str):
    """A string as ranks have it that are launched one by one: its hash differs from process to process."""

    def __hash__(self) -> int:
        # hash() of a tuple puts strings into the same order in one of seventy pairs of processes.
        return int.from_bytes(hashlib.blake2b(f"{os.getpid()} {self!s}".encode(), digest_size=7).digest(), "big")


def by_hash() -> Any:
    return [int(name) for name in {OfTheProcess(number) for number in range(samplers.LENGTH)}]


def longer(lengths: dict[str, int]) -> dict[str, int]:
    return {**lengths, "web": lengths["web"] + rank()}


def other_lengths() -> list[int]:
    lengths = texts.Texts().num_tokens
    return [lengths[0] + rank(), *lengths[1:]]


def sampled(sampler: Any) -> DataLoader[Any]:
    return samplers.loader(sampler=sampler, batch_size=2)


# Data that differ from rank to rank, and what is said of them.
DISAGREE: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: numbers_module(train=Numbers(22 + 4 * rank())), "length: rank 0: 22, rank 1: 26"),
    # That samples are as many as there are steps for cannot be waived.
    "lengths accepted": (
        lambda: numbers_module(train=Numbers(22 + 4 * rank()), accept=("dataset", "length")),
        "length: rank 0: 22, rank 1: 26",
    ),
    "seeds": (lambda: numbers_module(seed=rank()), "seed: rank 0: 0, rank 1: 1"),
    "rows": (
        lambda: StatefulDataModule(rows().shuffle(seed=rank())),
        r"dataset.rows: rank 0: .*, rank 1: .*accept=\('dataset.rows',\)",
    ),
    "order of loaders": (
        lambda: StatefulDataModule(in_an_order_of_its_rank({"a": Numbers(8), "b": Numbers(8)})),
        r"order of loaders: rank 0: \['a', 'b'\], rank 1: \['b', 'a'\]",
    ),
    "lengths of samples": (lambda: texts.bucketed(lengths=other_lengths(), val=None), "digest"),
    "budgets": (lambda: texts.bucketed(max_tokens=40 + rank()), "max_tokens: rank 0: 40, rank 1: 41"),
    "weights": (lambda: sources.mixture(weights=[[1, 2, 1], [2, 1, 1]][rank()]), "weights"),
    "sources": (lambda: sources.round_robin(train=sources.datasets(**longer(sources.LENGTHS))), "sources"),
    "a sampler by hash": (
        lambda: sampled(Permutes(by_hash)),
        r"Permutes yields other items on other ranks .*rank 0: (?P<one>\w+) of 22, rank 1: (?!(?P=one))\w+ of 22",
    ),
    "a sampler of windows": (
        lambda: sampled(Permutes(lambda: [slice(index, index + 2) for index in by_hash()])),
        "Permutes yields other items on other ranks",
    ),
    "lengths of samplers": (
        lambda: sampled(DDPSamplerWrapper(samplers.Endless(), length=5 + rank())),
        "Endless yields other items on other ranks .* of 5, rank 1: .* of 6",
    ),
    "seeds of streams": (lambda: stream_module(chunks(seed=rank())), "seed: rank 0: 0, rank 1: 1"),
    "an order of samples": (
        lambda: StatefulDataModule(list(range(rank(), 22)) + list(range(rank())), batch_size=2),
        r"dataset\.content\.items: rank 0: .*, rank 1: .*accept=\('dataset\.content',\)",
    ),
    "chunks": (lambda: stream_module(chunks(SIZES[: 8 + rank()])), "stream.chunks: rank 0: 8"),
    "steps": (lambda: stream_module(chunks(), steps_per_epoch=3 + rank()), "length: rank 0: 3, rank 1: 4"),
}
AGREE: dict[str, Callable[[], Any]] = {
    "rows accepted": lambda: StatefulDataModule(
        rows().shuffle(seed=rank()), batch_size=2, accept=("dataset.rows", "dataset.fingerprint")
    ),
    "order of descriptions": lambda: numbers_module(train=Described(22)),
}


def callbacks_for(data: Any) -> list[Any]:
    return [StatefulDataCallback(seed=7)] if isinstance(data, DataLoader) else []


def trained_on(folder: Path, name: str) -> int:
    data = AGREE[name]() if name in AGREE else DISAGREE[name][0]()
    return run(lambda: data, callbacks=callbacks_for(data), max_epochs=1).global_step


def refused(folder: Path) -> dict[str, str]:
    """What is said of each that ranks disagree about; they find it out together, and so stay in step."""
    said = {}
    for name in DISAGREE:
        with pytest.raises(RankMismatchError) as caught:
            trained_on(folder, name)
        said[name] = str(caught.value)
    return said


@pytest.mark.parametrize("name", DISAGREE)
def test_16_ranks_that_disagree_are_refused_on_every_rank(ranks: Ranks, name: str) -> None:
    for error in (said[name] for said in ranks.of(refused)):
        # Samplers are compared before, as they are tried.
        words = "The ranks disagree about the training data" if "sampler" not in name else ""
        assert error.startswith(words), error
        assert re.search(DISAGREE[name][1], error, re.DOTALL), error


@pytest.mark.parametrize("name", AGREE)
def test_what_is_accepted_or_no_difference_is_trained_on(ranks: Ranks, name: str) -> None:
    assert ranks.of(trained_on, name) == [6, 6]


def refused_by_one_rank(folder: Path) -> None:
    kind = samplers.SaysTooMuch if rank() else samplers.ShuffledBatches
    run(lambda: samplers.loader(batch_sampler=kind()), callbacks=[StatefulDataCallback()])


def fails_on_one_rank(folder: Path) -> None:
    class Breaks(StatefulDataModule):
        def train_dataloader(self) -> Any:
            if rank() == 1:
                raise OSError("disk not mounted")
            return super().train_dataloader()

    run(lambda: Breaks(Numbers(22)))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (fails_on_one_rank, "OSError: disk not mounted"),
        (refused_by_one_rank, "ConfigurationError: the training loader: SaysTooMuch yields only 8 items"),
    ],
)
def test_16_a_rank_that_cannot_build_its_data_stops_all_ranks(ranks: Ranks, case: Any, words: str) -> None:
    first, second = ranks.errors_of(case)
    assert first.startswith("RankMismatchError: the training data could not be built on every rank")
    assert f"rank 1: {words}" in first
    assert second.startswith(words)


class Mapped(StatefulDataModule):
    """Maps its rows by a method: ``datasets`` cannot tell that it is the same in every process."""

    def __init__(self) -> None:
        super().__init__(batch_size=2)
        self.process = os.urandom(8)

    def setup(self, stage: str) -> None:
        self.train = rows().map(self.double)

    def double(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"x": [2 * value for value in row["x"]]}


def fingerprints_of_its_own(folder: Path) -> dict[str, Any]:
    """A run that is stopped and resumed, with what was warned of."""
    path = folder / "stop.ckpt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StatefulWarning)
        ledger = stopped(path, Mapped, run=run, batch=2, max_epochs=1)
        resumed = run(Mapped, ckpt_path=path, max_epochs=1)
    fingerprint = resumed.trainer.datamodule.train._fingerprint
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return {"fingerprint": fingerprint, "parts": [ledger, resumed.ledger], "said": "\n".join(said)}


def test_data_of_another_fingerprint_are_trained_on_with_a_warning(ranks: Ranks) -> None:
    first, second = ranks.of(fingerprints_of_its_own)
    assert first["fingerprint"] != second["fingerprint"]
    parts = [*first["parts"], *second["parts"]]
    assert [len(trained(part)) for part in parts] == [3] * 4
    assert sorted(index for part in parts for index in samples(part)) == list(range(22))
    for words in ("The ranks have", "state was made with"):
        assert re.search(f"{words}.*dataset.fingerprint", first["said"], re.DOTALL)


# Data of each rank's own


def own_data(**options: Any) -> StatefulDataModule:
    first = 100 * rank()
    defaults = {"train": Numbers(11, first=first), "val": Numbers(2 + rank(), first=first)}
    return numbers_module(**{**defaults, **options})


class Share(Sampler[int]):
    """Leaves each rank its share of a shuffle, and has a state that is true on its own rank only."""

    start = at = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        for index in torch.randperm(22).tolist()[rank() :: 2][self.at :]:
            self.at += 1
            yield index

    def __len__(self) -> int:
        return 11

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rank": rank()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == rank()
        self.start = state["at"]


OWN: dict[str, Callable[[], Any]] = {
    "data": own_data,
    "torch's sampler": lambda: DataLoader(Numbers(22), 2, sampler=DistributedSampler(Numbers(22), 2, rank(), seed=3)),
    "a sampler with a state": lambda: DataLoader(Numbers(22), 2, sampler=Share()),
    "batches": lambda: DataLoader(Numbers(22), batch_sampler=BatchSampler(Share(), 2, drop_last=False)),
    "a wrapped sampler": lambda: DataLoader(Numbers(22), 2, sampler=DDPSamplerWrapper(RandomSampler(range(22)))),
    "lengths": lambda: own_data(train=Numbers(22 + 4 * rank())),
    "streams": lambda: stream_module(chunks()),
}


def own(folder: Path, name: str) -> list[Link]:
    stops, callbacks = [("on_train_batch_end", 1, 2)], lambda: callbacks_for(OWN[name]())
    return chain_of(OWN[name], folder, stops, callbacks=callbacks, use_distributed_sampler=False)


def test_without_use_distributed_sampler_ranks_train_on_all_of_their_own_data(ranks: Ranks) -> None:
    for number, parts in enumerate(ranks.of(own, "data")):
        assert_chain(parts, served_again=0)
        expected = list(range(100 * number, 100 * number + 11))
        ledger = parts[0][0]["ledger"]
        for epoch in range(2):
            assert sorted(samples(ledger, epoch)) == expected
            assert samples(ledger, epoch, "val") == expected[: 2 + number]
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2.*resume on the saved ranks"):
        train(partial(numbers_module, train=Numbers(11)), ckpt_path=ranks.folder_of(own, "data") / "0" / "0.ckpt")


@pytest.mark.parametrize(
    "name",
    # The table of tests/harm has samplers that deal out by themselves on two ranks.
    thinned(["torch's sampler", "a sampler with a state", "batches", "a wrapped sampler"], ["torch's sampler"]),
)
def test_without_use_distributed_sampler_samplers_deal_out_by_themselves(ranks: Ranks, name: str) -> None:
    found = ranks.of(own, name)
    for parts in found:
        assert_chain(parts, served_again=0)
    for epoch in range(2):
        assert over_all([parts[0][0] for parts in found], epoch) == list(range(22))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lengths", "RankMismatchError: The ranks disagree.*length: rank 0: 22, rank 1: 26"),
        ("streams", "the training loader: use_distributed_sampler=False leaves the loader as each rank has it"),
    ],
)
def test_data_of_each_rank_that_cannot_be_resumed_are_refused(ranks: Ranks, name: str, words: str) -> None:
    assert all(re.search(words, error, re.DOTALL) for error in ranks.errors_of(own, name))


# What ranks draw, and evaluate


class Shapes(Numbers):
    """Samples with as many rows as are given, which can only be stacked if they are alike."""

    def __init__(self, *num_rows: int) -> None:
        super().__init__(len(num_rows))
        self.num_rows = num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.ones(self.num_rows[index], 4)}


SHAPES: dict[str, Callable[[], Any]] = {
    "alike": lambda: StatefulDataModule(val=Shapes(1, 1, 1, 1, 1)),
    "fitting pair": lambda: StatefulDataModule(val=Shapes(1, 2, 3, 3, 4)),
    "differing": lambda: StatefulDataModule(val=Shapes(*range(1, 6))),
    "workers": lambda: StatefulDataModule(val=Shapes(*range(1, 6)), num_workers=1),
    "shuffled": lambda: DataLoader(Shapes(*range(1, 6)), shuffle=True),
    "batches": lambda: DataLoader(Shapes(*range(1, 6)), batch_sampler=[[4], [3], [2], [1], [0]]),
}


def shapes(folder: Path) -> dict[str, Any]:
    """The samples that each rank has evaluated, and the warnings that it was given."""
    found = {}
    for name, make in SHAPES.items():
        model, data = LedgerModel(), make()
        trainer = quiet_trainer(*callbacks_for(data), **on_ranks())
        keyword = "datamodule" if isinstance(data, StatefulDataModule) else "dataloaders"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StatefulWarning)
            trainer.validate(model, **{keyword: data}, verbose=False)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        found[name] = ([event[4] for event in model.ledger], said)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_single_samples_that_are_left_are_joined_where_that_can_be_and_repeated_elsewhere(
    ranks: Ranks, name: str
) -> None:
    (first, said), (second, _) = (found[name] for found in ranks.of(shapes))
    assert len(first) == len(second)
    seen = sorted(index for batch in first + second for index in batch)
    if name in ("alike", "fitting pair"):
        assert seen == list(range(5))
        assert not said
    else:
        assert set(seen) == set(range(5))
        assert len(seen) == 6
        assert "1 of 5" in said[0]
        assert "two samples of other shapes cannot be collated" in said[0]


# Other content than that of a checkpoint


def other_content(folder: Path, first: int) -> int:
    chain = folder.parent / "content.ckpt"
    if not first:
        ended(chain, numbers_module, run=run, max_steps=8)
    return run(lambda: numbers_module(train=Numbers(22, first=first)), ckpt_path=chain).global_step


def test_other_content_is_refused_on_every_rank(ranks: Ranks) -> None:
    assert ranks.of(other_content, 0) == [12, 12]
    for error in ranks.errors_of(other_content, 7):
        assert re.search(r"^StateMismatchError: .*Batch 0 of epoch 1 is not what it was", error, re.DOTALL), error
    # What two ranks have trained on is read again on one.
    with pytest.raises(StateMismatchError, match="Batch 0 of epoch 1 is not what it was"):
        train(lambda: numbers_module(train=Numbers(22, first=7)), ckpt_path=ranks.folder / "content.ckpt")
    train(numbers_module, ckpt_path=ranks.folder / "content.ckpt")


class OfFiles(IterableDataset[Any]):
    """Gives three samples of each of its files."""

    def __init__(self, files: list[int]) -> None:
        self.files = [f"{file}.tar" for file in files]

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            for number in range(3):
                yield {"id": int(file[:-4]) * 3 + number, "x": torch.ones(4)}


def with_other_files(folder: Path) -> list[str]:
    """What is said on a resume with the same files, with others on one rank, and in another order on all."""

    def loader(of_ranks: list[list[int]]) -> Any:
        return DataLoader(OfFiles(of_ranks[rank()]), batch_size=2)

    def saved(*of_ranks: list[int]) -> Callable[[], Any]:
        return partial(loader, list(of_ranks))

    own, path = [[0, 2, 4], [1, 3, 5]], folder / "files.ckpt"
    stopped(path, saved(*own), run=run, batch=2, max_epochs=1, callbacks=[StatefulDataCallback()])
    said = []
    for files in (own, [own[0], [1, 5, 3]], [[0, 2, 6], own[1]], own[::-1]):
        try:
            run(saved(*files), callbacks=[StatefulDataCallback()], ckpt_path=path, max_epochs=1)
            said.append("exact")
        except StateMismatchError as error:
            said.append(str(error))
    return said


def test_files_of_their_own_are_compared_rank_by_rank(ranks: Ranks) -> None:
    for same, *others in ranks.of(with_other_files):
        assert same == "exact"
        assert all("dataset.content.files: saved [" in other for other in others), others
