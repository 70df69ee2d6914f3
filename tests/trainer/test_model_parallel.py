"""Several processes for each data-parallel rank: they read the same batches, and any other ranks take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from lightning.pytorch.strategies import ModelParallelStrategy
from support.ddp_runs import Link, assert_chain, chain_of, on_ranks, over_all
from support.ledger import Asks, batches, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import Outcome, ended, numbers_module, training
from support.stream_runs import EVERY_SAMPLE, MODULES, OF_OTHERS, OwnWithState, module, write_files
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KINDS = ("numbers", "chunks", "mixed by sample")
# (data-parallel ranks, processes of each), by the processes that there are.
TAKES_OVER = {4: (4, 1), 2: (2, 1), 1: (1, 1)}


class Parallel(Asks):
    """Its layers are cut over the processes of a data-parallel rank, and what is left over these ranks."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(next(self.parameters()), DTensor):
            return
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.net, mesh=mesh["data_parallel"])


def run(make: Callable[[], Any], *, sizes: tuple[int, int] = (2, 2), **options: Any) -> Outcome:
    strategy = ModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    found = training(Parallel)(make, **on_ranks(strategy=strategy, **options))
    found.weights = {name: value.full_tensor() for name, value in found.weights.items()}
    return found


def made(folder: Path, kind: str) -> Callable[[], Any]:
    return numbers_module if kind == "numbers" else partial(MODULES[kind], folder, val=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model_parallel")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return Ranks(4, folder / "4")


def stopped(folder: Path) -> dict[str, list[Link]]:
    stops = [("on_before_backward", 0, 2)]
    return {kind: chain_of(made(folder.parents[1], kind), folder / kind, stops, run=run) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_processes_of_a_rank_read_the_same_and_a_stop_and_a_resume_give_the_uninterrupted_run(
    ranks: Ranks, kind: str
) -> None:
    found = [of_process[kind] for of_process in ranks.of(stopped)]
    for parts in found:
        assert_chain(parts)
    whole = [parts[0][0] for parts in found]
    for one, other in ((0, 1), (2, 3)):
        assert batches(whole[one]["ledger"]) == batches(whole[other]["ledger"])
    assert all(one["state"] == whole[0]["state"] for one in whole)
    counts = Counter(over_all(whole[::2], 0))
    assert max(counts.values()) == 1
    assert len(trained(whole[0]["ledger"])) >= 8
    assert counts.total() >= (21 if kind == "numbers" else len(EVERY_SAMPLE) - 1)


def hands_over(folder: Path) -> dict[str, list[Any]]:
    """Two steps of each kind, which are saved for others."""
    shared = folder.parents[1]
    return {kind: ended(shared / f"{kind}.ckpt", made(shared, kind), run=run, max_steps=2).ledger for kind in KINDS}


def takes_over(folder: Path) -> dict[str, list[Any]]:
    """The rest of two epochs, on all processes that there are."""
    shared, sizes = folder.parents[1], TAKES_OVER[torch.distributed.get_world_size()]
    return {
        kind: run(made(shared, kind), sizes=sizes, ckpt_path=shared / f"{kind}.ckpt", max_epochs=2).ledger
        for kind in KINDS
    }


# As many processes go on in the test above; of two, each is a rank, as in tests/trainer/test_ddp.py.
@pytest.mark.parametrize("number", thinned([4, 2, 1], [4, 2]))
def test_other_ranks_take_over_what_is_left(folder: Path, ranks: Ranks, number: int) -> None:
    first = ranks.of(hands_over)[::2]
    taken = (ranks if number == 4 else Ranks(number, folder / str(number))).of(takes_over)
    for kind in KINDS:
        runs = [{"ledger": found[kind]} for found in (*first, *taken)]
        expected = {"numbers": list(range(22)), "mixed by sample": EVERY_SAMPLE + OF_OTHERS}.get(kind, EVERY_SAMPLE)
        served = Counter(over_all(runs))
        assert set(served) == set(expected), kind
        assert max(served.values()) == 2
        assert max(Counter(over_all(runs, 0)).values()) == 1
        # Of a stream a sample for each other rank may be left.
        assert served.total() >= 2 * len(expected) - number + 1, kind


def own(folder: Path) -> None:
    run(lambda: module(OwnWithState(), val=None))


def test_a_dataset_that_divides_itself_is_refused(ranks: Ranks) -> None:
    for error in ranks.errors_of(own):
        assert "4 processes are 2 data-parallel ranks" in error
