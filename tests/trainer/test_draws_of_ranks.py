"""Iterable datasets that shuffle by the process's generators, and take every n-th sample, on real ranks."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from support.ddp_runs import assert_chains, chain_of, on_ranks, over_all
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import quiet_trainer, train
from support.stream_cases import rank_and_ranks
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_stateful import StatefulDataCallback, patch_dataloader

EVERY = list(range(24))


def alike() -> None:
    """Ranks' generators stand alike."""
    pl.seed_everything(3)


def alike_with_workers() -> None:
    """Ranks' generators stand alike, and Lightning seeds workers by rank."""
    pl.seed_everything(3, workers=True)


def apart() -> None:
    """Ranks' generators stand apart, all of them."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3 + rank_and_ranks()[0])


def partly() -> None:
    """The generators of ``random`` stand alike, and others apart."""
    apart()
    random.seed(3)


class Shuffled(IterableDataset[Any]):
    """Shuffles by one generator, and by it again in the middle, and gives every n-th to each rank."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Any]:
        (rank, ranks), numbers = rank_and_ranks(), list(EVERY)
        shuffle(numbers, self.by)
        first, then = numbers[:12], numbers[12:]
        yield from map(sample, first[rank::ranks])
        shuffle(then, self.by)
        yield from map(sample, then[rank::ranks])


def sample(number: int) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(number), "x": torch.rand(4)}


def shuffle(numbers: list[int], by: str) -> None:
    if by == "random":
        random.shuffle(numbers)
    elif by == "numpy":
        np.random.shuffle(numbers)
    else:
        numbers[:] = [numbers[place] for place in torch.randperm(len(numbers)).tolist()]


STANDS = {"alike": alike, "alike with workers": alike_with_workers, "apart": apart, "partly": partly}


def fixed(worker_id: int) -> None:
    """Seeds a worker alike on all ranks, whatever torch has seeded it by."""
    random.seed(40 + worker_id)


def divided(worker_id: int) -> None:
    """Seeds a worker by what another function finds."""
    random.seed(torch.initial_seed() % 2**32 + offset())


def offset() -> int:
    return 100 * rank_and_ranks()[0]


def named(worker_id: int) -> None:
    """Knows its rank, and seeds nothing."""
    assert rank_and_ranks()[1] == 2


INITS = {"": None, "fixed": fixed, "divided": divided, "named": partial(named)}


def loader(workers: int, by: str = "random", init: str = "") -> Any:
    return DataLoader(Shuffled(by), batch_size=3, num_workers=workers, worker_init_fn=INITS[init])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("draws") / "2")


class Stand(pl.Callback):
    """Leaves generators standing as a user's process would."""

    def __init__(self, stand: str) -> None:
        self.stand = stand

    def setup(self, *args: Any, **how: Any) -> None:
        STANDS[self.stand]()


def chain(folder: Path, stand: str, workers: int, by: str = "random", then: str = "", init: str = "") -> Any:
    """A run without this package, one with it, and some that are resumed in processes that may stand otherwise."""
    torch.manual_seed(1)
    os.environ.pop("PL_SEED_WORKERS", None)
    make = partial(loader, workers, by, init)
    without = train(make, callbacks=[Stand(stand)], **on_ranks())
    dist.barrier()
    lines: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = rank_zero.log
    logger.addHandler(handler := Noted())
    level = logger.level
    logger.setLevel(logging.INFO)
    stands = iter([stand, *[then or stand] * 2])
    stops = [("on_train_batch_end", 0, 1), ("on_train_batch_end", 1, 2)]
    found = chain_of(
        make,
        folder,
        stops,
        callbacks=lambda: [Stand(next(stands)), StatefulDataCallback(seed=7)],
    )
    logger.removeHandler(handler)
    logger.setLevel(level)
    return {"without": {"ledger": without.ledger}, "chain": found, "lines": lines}


def ids(found: list[dict[str, Any]], epoch: int) -> list[int]:
    return over_all([of["without"] for of in found], epoch)


CASES = [
    ("alike", 0, "random"),
    ("alike", 0, "numpy"),
    ("alike", 1, "torch"),
    ("alike", 1, "random"),
    ("alike with workers", 0, "random"),
    ("alike with workers", 1, "random"),
    ("apart", 0, "random"),
    ("apart", 1, "random"),
    # Each kind of generator by itself.
    ("partly", 0, "random"),
    ("partly", 0, "torch"),
]


@pytest.mark.parametrize(("stand", "workers", "by"), CASES)
def test_ranks_draw_alike_where_they_do_in_lightning_alone(ranks: Ranks, stand: str, workers: int, by: str) -> None:
    found = ranks.of(chain, stand, workers, by)
    runs = assert_chains([of["chain"] for of in found])
    for epoch in range(2):
        is_each_once = ids(found, epoch) == EVERY
        stands_alike = stand == "alike" or (stand == "alike with workers" and not workers)
        assert is_each_once == (stands_alike or (stand, by) == ("partly", "random"))
        assert (over_all(runs, epoch) == EVERY) == is_each_once


@pytest.mark.parametrize(("stand", "then"), [("alike", "apart"), ("apart", "alike")])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_draws_as_the_run_did_however_its_own_generators_stand(
    ranks: Ranks, stand: str, then: str, workers: int
) -> None:
    runs = assert_chains([of["chain"] for of in ranks.of(chain, stand, workers, "random", then)])
    assert (over_all(runs, 1) == EVERY) == (stand == "alike")


@pytest.mark.parametrize(
    ("stand", "by", "init", "each_once"),
    [
        ("apart", "random", "fixed", True),
        ("alike", "random", "divided", False),
        pytest.param("apart", "numpy", "fixed", False, marks=pytest.mark.slow),
        pytest.param("alike", "numpy", "fixed", True, marks=pytest.mark.slow),
        pytest.param("alike", "random", "named", True, marks=pytest.mark.slow),
    ],
)
def test_workers_draw_as_a_function_of_the_user_has_seeded_them(
    ranks: Ranks, stand: str, by: str, init: str, each_once: bool
) -> None:
    found = ranks.of(chain, stand, 1, by, "", init)
    runs = assert_chains([of["chain"] for of in found])
    assert [ids(found, epoch) == EVERY for epoch in range(2)] == [each_once] * 2
    assert [over_all(runs, epoch) == EVERY for epoch in range(2)] == [each_once] * 2


def reloaded(folder: Path) -> Any:
    """Loaders are built anew for every epoch, when training has seeded the generators by rank."""
    make = partial(loader, 0)
    return chain_of(
        make,
        folder,
        [("on_train_batch_end", 1, 1)],
        callbacks=lambda: [Stand("alike"), StatefulDataCallback(seed=7)],
        reload_dataloaders_every_n_epochs=1,
        max_epochs=3,
    )


def test_loaders_that_are_built_anew_draw_as_the_first_ones(ranks: Ranks) -> None:
    runs = assert_chains(ranks.of(reloaded))
    assert [over_all(runs, epoch) for epoch in range(3)] == [EVERY] * 3


def fitted_twice(folder: Path) -> Any:
    """Two trainers one after the other, of which nobody seeds the second: the first has seeded by rank."""
    alike()
    runs = [train(partial(loader, 0), callbacks=[StatefulDataCallback(seed=7)], **on_ranks()) for _ in range(2)]
    return [{"ledger": run.ledger} for run in runs]


def test_another_trainer_finds_generators_as_alike_as_the_first(ranks: Ranks) -> None:
    found = ranks.of(fitted_twice)
    for fit in range(2):
        assert [over_all([of[fit] for of in found], epoch) for epoch in range(2)] == [EVERY] * 2


class Validated(LedgerModel):
    """Notes what it validates on."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch["id"].tolist()


def validated(folder: Path, stand: str) -> list[list[int]]:
    """What a rank validates on, without the callback and with it: by a dataset that shuffles, and divides itself."""
    found = []
    for callbacks in ([], [StatefulDataCallback(seed=7)]):
        STANDS[stand]()
        model = Validated()
        trainer = quiet_trainer(*callbacks, **on_ranks(max_epochs=1))
        trainer.fit(model, numbered(), loader(0))
        found.append(model.validated)
    return found


def numbered() -> Any:
    return DataLoader(Numbers(24), batch_size=3)


@pytest.mark.parametrize("stand", ["alike", "apart"])
def test_validation_data_are_divided_as_in_lightning_alone(ranks: Ranks, stand: str) -> None:
    found = ranks.of(validated, stand)
    for way in (0, 1):
        assert (sorted(number for of in found for number in of[way]) == EVERY) == (stand == "alike")


class ShuffledBatches(Shuffled):
    """The same as an iterable of batches, which is no DataLoader's."""

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        yield from (default_collate(samples[at : at + 3]) for at in range(0, len(samples), 3))


class Holder:
    """No dataset of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ShuffledBatches("random"))


UNSEEDED: dict[str, Any] = {"seed_samples=False": partial(loader, 0), "iterable": Holder}


def unseeded(folder: Path, name: str, stand: str) -> Any:
    """What is not seeded draws from where the model's seeds leave the generators."""
    settings = {"seed_samples": name == "iterable", "seed": 7}
    return chain_of(
        UNSEEDED[name],
        folder,
        [("on_train_batch_end", 0, 3), ("on_train_batch_end", 1, 3)],
        callbacks=lambda: [Stand(stand), StatefulDataCallback(**settings)],
        max_epochs=3,
    )


@pytest.mark.parametrize("name", UNSEEDED)
@pytest.mark.parametrize("stand", ["alike", "apart"])
def test_what_is_not_seeded_draws_alike_too(ranks: Ranks, name: str, stand: str) -> None:
    runs = [parts[0][0] for parts in ranks.of(unseeded, name, stand)]
    assert [over_all(runs, epoch) == EVERY for epoch in range(3)] == [stand == "alike"] * 3


# A loop of one's own


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def looped(folder: Path, stand: str, workers: int) -> Any:
    """Two epochs in a plain loop, in torch alone, with the package, and resumed within the first where all is apart."""
    STANDS[stand]()
    alone = [numbers(loader(workers)) for _ in range(2)]
    dist.barrier()
    STANDS[stand]()
    patched = patch_dataloader(loader(workers), seed=7)
    whole, state = [], None
    for epoch in range(2):
        whole.append([])
        for step, batch in enumerate(patched):
            whole[-1] += batch["id"].tolist()
            if (epoch, step) == (0, 1):
                state = patched.state_dict()
    dist.barrier()
    apart()
    fresh = patch_dataloader(loader(workers), seed=7)
    fresh.load_state_dict(state)
    rest = [numbers(fresh), numbers(fresh)]
    return {"alone": alone, "whole": whole, "rest": rest}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stand", ["alike", "apart"])
def test_ranks_of_a_plain_loop_draw_alike_where_they_do_in_torch(ranks: Ranks, stand: str, workers: int) -> None:
    found = ranks.of(looped, stand, workers)
    for epoch in range(2):
        for name in ("alone", "whole"):
            assert (sorted(number for of in found for number in of[name][epoch]) == EVERY) == (stand == "alike")
    for of in found:
        assert of["rest"] == [of["whole"][0][6:], of["whole"][1]]
