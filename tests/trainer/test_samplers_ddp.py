"""Other people's samplers on two real ranks: every slot once, exact over stops, and handed over between one and two."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from support import samplers
from support.ddp_runs import Link, assert_chain, assert_in_step, chain_of, on_ranks
from support.ledger import LedgerModel
from support.ranks import Ranks
from support.runs import Outcome
from support.sampler_cases import TO_EVALUATE, PlainData, cuts_loader, evaluate, torchdatas_distributed, train_with
from support.samplers import LENGTH, LOADERS
from support.sources import samples as samples_of
from support.sources import trained
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import DDPSamplerWrapper, StatefulDataCallback

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

# Every way in which a sampler may stand in a loader, and those that ask torch for the ranks by themselves.
ON_RANKS: dict[str, Callable[[], DataLoader[Any]]] = {
    **LOADERS,
    "torchdata's distributed": torchdatas_distributed,
    "lhotse's": cuts_loader,
}
DRAWN = ("random with replacement", "weighted", "weighted without replacement", "class balanced")
# How many samples of an epoch may be left that cannot be split over two ranks, and are served to both.
REPEATED = {"unbatched": 1, "unbatched, by itself": 1, "lhotse's": 1}
STOPS = [("on_before_backward", 0, 2), ("on_validation_batch_end", 0, 0), ("on_train_batch_end", 1, 1)]
# After so many steps of an epoch a run on one rank or on two leaves the rest to the other number.
HANDED_OVER = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("samplers"))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    """What one process is trained on."""
    return {name: train_with(make, max_epochs=2).ledger for name, make in ON_RANKS.items()}


def seeds_differ() -> None:
    """Give every rank other global generators, as a script without ``seed_everything`` has."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)


def made(name: str) -> Any:
    seeds_differ()
    return PlainData(ON_RANKS[name])


def chain(folder: Path, name: str) -> list[Link]:
    def callbacks() -> list[Any]:
        return [StatefulDataCallback(seed=5)]

    return chain_of(lambda: made(name), folder, STOPS, callbacks=callbacks, makes=LedgerModel)


def counts(runs: list[list[Any]], epoch: int) -> Counter[int]:
    return Counter(index for ledger in runs for index in samples_of(ledger, epoch))


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_serve_in_step_what_one_serves_though_their_generators_differ(
    ranks: Ranks, alone: dict[str, list[Any]], name: str
) -> None:
    runs = [parts[0][0] for parts in ranks.of(chain, name)]
    assert_in_step(runs)
    for epoch in range(2):
        served, expected = counts([run["ledger"] for run in runs], epoch), counts([alone[name]], epoch)
        assert not expected - served
        assert (served - expected).total() <= REPEATED.get(name, 0)
        assert name in DRAWN or set(served) == set(range(LENGTH))


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank(ranks: Ranks, name: str) -> None:
    for parts in ranks.of(chain, name):
        assert_chain(parts)


# Another number of ranks


def saved_on_two_ranks(folder: Path) -> dict[str, list[Any]]:
    return {name: hand_over(folder, name, **on_ranks()).ledger for name in ON_RANKS}


def resumed_on_two_ranks(folder: Path) -> dict[str, list[Any]]:
    return {
        name: train_with(make, ckpt_path=folder.parent / f"{name}.ckpt", seed=9, **on_ranks()).ledger
        for name, make in ON_RANKS.items()
    }


def hand_over(folder: Path, name: str, **options: Any) -> Outcome:
    """Train a few steps and leave a checkpoint for another number of ranks."""
    found = train_with(ON_RANKS[name], max_steps=HANDED_OVER, **options)
    found.trainer.save_checkpoint(folder / f"{name}.ckpt")
    return found


@pytest.fixture(scope="module")
def of_one_rank(ranks: Ranks) -> dict[str, list[Any]]:
    """What one process leaves behind for two."""
    return {name: hand_over(ranks.folder, name).ledger for name in ON_RANKS}


@pytest.mark.parametrize("name", ON_RANKS)
def test_one_rank_hands_over_to_two(
    ranks: Ranks, of_one_rank: dict[str, list[Any]], alone: dict[str, list[Any]], name: str
) -> None:
    first, second = (found[name] for found in ranks.of(resumed_on_two_ranks))
    assert [event[:4] for event in trained(first)] == [event[:4] for event in trained(second)]
    for epoch in range(2):
        served, expected = counts([of_one_rank[name], first, second], epoch), counts([alone[name]], epoch)
        assert not expected - served
        assert (served - expected).total() <= REPEATED.get(name, 0)


@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_hand_over_to_one(ranks: Ranks, alone: dict[str, list[Any]], name: str) -> None:
    before = [found[name] for found in ranks.of(saved_on_two_ranks)]
    path = ranks.folder_of(saved_on_two_ranks) / f"{name}.ckpt"
    resumed = train_with(ON_RANKS[name], ckpt_path=path, seed=9, max_epochs=2).ledger
    for epoch in range(2):
        assert counts([*before, resumed], epoch) == counts([alone[name]], epoch)


# Evaluation


def evaluated(folder: Path) -> dict[str, Any]:
    return {name: evaluate(make, **on_ranks()) for name, make in TO_EVALUATE.items()}


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices:UserWarning")
@pytest.mark.parametrize("name", TO_EVALUATE)
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: Ranks, name: str) -> None:
    found = [rank[name] for rank in ranks.of(evaluated)]
    alone = evaluate(TO_EVALUATE[name])
    for stage in ("validate", "test", "predict"):
        served = sorted(index for rank in found for batch in rank[stage] for index in batch)
        assert served == sorted(index for batch in alone[stage] for index in batch), stage
        assert len({len(rank[stage]) for rank in found}) == 1
        assert all(batch for rank in found for batch in rank[stage])


@pytest.mark.parametrize("name", TO_EVALUATE)
def test_every_rank_writes_its_predictions_with_their_indices(ranks: Ranks, name: str) -> None:
    for rank in ranks.of(evaluated):
        found = rank[name]
        assert found["predictions"] == found["predict"]
        assert [predicted for _, predicted in found["written"]] == found["predict"]
        # Lightning infers no indices for loaders without len.
        expected = [[] for _ in found["predict"]] if "without len" in name else found["predict"]
        assert [indices for indices, _ in found["written"]] == expected
        assert found["written at the end"] == ([[]] if "without len" in name else [expected])


# Refusals


class ByRank(Sampler[int]):
    """Yields another order on every rank, by what it reads in the environment."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(int(os.environ["RANK"])).permutation(LENGTH).tolist())


class OfTheProcess(str):
    """A string as ranks have it that are launched one by one: its hash differs from process to process."""

    def __hash__(self) -> int:
        return hash((os.getpid(), str(self)))


class ByHash(Sampler[int]):
    """Yields the order of a set of strings."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(int(name) for name in {OfTheProcess(number) for number in range(LENGTH)})


class Unshared(Sampler[int]):
    """Cannot be made deterministic on one of the ranks only."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(samplers.ByTheClock() if os.environ["RANK"] == "1" else samplers.GlobalRandom())


def refused(folder: Path, kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "rank": ByRank,
        "hash": ByHash,
        "unshared": Unshared,
        "length": lambda: DDPSamplerWrapper(samplers.Endless(), length=5 + torch.distributed.get_rank()),
    }
    train_with(lambda: samplers.loader(sampler=made[kind](), batch_size=2), **on_ranks())


@pytest.mark.parametrize("kind", ["rank", "hash"])
def test_a_sampler_that_differs_from_rank_to_rank_is_refused_on_every_rank(ranks: Ranks, kind: str) -> None:
    for error in ranks.errors_of(refused, kind):
        assert error.startswith("RankMismatchError: The ranks disagree about the training data"), error
        ((first, second),) = re.findall(r"- sequence: rank 0: '(\w+)', rank 1: '(\w+)'", error)
        assert first != second


def test_a_sampler_that_one_rank_refuses_is_refused_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.errors_of(refused, "unshared")
    assert first.startswith("RankMismatchError: the training data could not be built on every rank"), first
    assert "rank 1: UnsupportedLoaderError" in first
    assert second.startswith("UnsupportedLoaderError: Cannot patch the training loader: Unshared"), second


def test_ranks_with_other_lengths_are_refused_on_every_rank(ranks: Ranks) -> None:
    for error in ranks.errors_of(refused, "length"):
        assert error.startswith("RankMismatchError"), error
        assert "length: rank 0: 5, rank 1: 6" in error
