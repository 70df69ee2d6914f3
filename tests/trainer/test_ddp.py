"""Two real ranks: every rank's own ledger goes on exactly, and another number of ranks takes over."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ddp_runs import Link, assert_chain, assert_chains, chain_of, on_ranks, over_all, plain, run
from support.ledger import Asks, LedgerModel, Numbers, batches, samples, trained
from support.ranks import Ranks
from support.runs import Outcome, assert_stitches, ended, numbers_module, quiet_trainer, seeded, train, training
from support.signalled import SignalledInStep, enter_slurm_job
from support.stream_runs import chunks
from support.stream_runs import module as stream_module
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule

# Stops

# Each is counted from where the run before was saved.
MOMENTS = [
    ("on_train_batch_end", 0, 2),
    ("on_train_batch_start", 0, 1),
    ("on_train_batch_end", 0, 1),
    ("on_validation_start", 0, 0),
    ("on_validation_batch_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_before_backward", 1, 1),
    ("on_validation_end", 1, 0),
]


def numbers(folder: Path) -> list[Link]:
    return chain_of(numbers_module, folder, MOMENTS)


def windows(folder: Path) -> list[Link]:
    stops = [("on_train_batch_end", 1, 0), ("on_train_batch_end", 1, 2), ("on_before_backward", 1, 3)]
    return chain_of(numbers_module, folder, stops, accumulate_grad_batches=4)


def callback_alone(folder: Path) -> list[Link]:
    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, shuffle=True)

    return chain_of(make, folder, [("on_train_batch_end", 1, 2)], callbacks=lambda: [StatefulDataCallback(seed=7)])


def test_a_run_stopped_in_any_hook_goes_on_exactly_on_every_rank(ranks: Ranks) -> None:
    runs = assert_chains(ranks.of(numbers))
    for epoch in range(2):
        assert over_all(runs, epoch) == list(range(22))
    assert len(trained(runs[0]["ledger"])) == 12
    assert_chains(ranks.of(windows))


def test_the_callback_alone_serves_the_same_under_the_default_distributed_sampler(ranks: Ranks) -> None:
    alone = assert_chains(ranks.of(callback_alone), served_again=0)
    for (own, *_), found in zip(ranks.of(numbers), alone, strict=True):
        assert batches(own[0]["ledger"]) == batches(found["ledger"])


def signals_inside_a_step(folder: Path) -> list[tuple[list[Any], dict[str, Any]]]:
    """Every rank gets a signal in a step of its own, or only one rank gets it; with SLURM, the first then SIGTERM."""
    rank = torch.distributed.get_rank()
    enter_slurm_job(folder, os.environ.__setitem__, rank=rank, num_ranks=2)
    found = []
    for signum, steps in [(signal.SIGUSR1, (7, 8)), (signal.SIGTERM, (-1, 8)), (signal.SIGINT, (8, 9))]:
        own = folder / signum.name
        options = {"plugins": [SLURMEnvironment()], "default_root_dir": own}
        first = seeded(partial(SignalledInStep, signum, steps[rank]))
        with contextlib.suppress(SIGTERMException, SystemExit):
            run(numbers_module, model=first, callbacks=[OnExceptionCheckpoint(own)], **options)
        saved = "hpc_ckpt_1.ckpt" if signum == signal.SIGUSR1 else "on_exception.ckpt"
        found.append((first.ledger, plain(run(numbers_module, ckpt_path=own / saved, seed=9, **options))))
    return found


def test_22_ranks_that_get_signals_inside_different_steps_save_together_and_go_on_exactly(ranks: Ranks) -> None:
    for ((whole, _), *_), runs in zip(ranks.of(numbers), ranks.of(signals_inside_a_step), strict=True):
        for ledger, resumed in runs:
            assert 7 <= len(trained(ledger)) <= 10
            assert_stitches([ledger, resumed["ledger"]], whole["ledger"])
            assert (resumed["weights"], resumed["end"]) == (whole["weights"], whole["end"])


def state_of_one_rank(folder: Path) -> Any:
    """Rank 0 alone asks for the data's state, which needs no collective."""

    states = []

    def ask(trainer: Any, *args: Any) -> None:
        if trainer.global_step == 8 and trainer.is_global_zero:
            states.append(trainer.datamodule.state_dict()["lightning_stateful"]["progress"])

    run(numbers_module, callbacks=[LambdaCallback(on_train_batch_end=ask)])
    return states


def test_8_the_state_needs_no_other_rank(ranks: Ranks) -> None:
    assert ranks.of(state_of_one_rank) == [[{"epoch": 1, "cycle": 0, "consumed": 8}], []]


# FSDP2, which restores a checkpoint after ``configure_optimizers``


class Sharded(Asks):
    """Parameters over two ranks; asks for loaders before there is a checkpoint."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(next(self.parameters()), DTensor):
            fully_shard(self.net, mesh=mesh["data_parallel"])


def run_sharded(make: Any, **options: Any) -> Outcome:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = training(Sharded)(make, **on_ranks(strategy=strategy, **options))
    found.weights = {name: value.full_tensor() for name, value in found.weights.items()}
    return found


def sharded_stream(folder: Path) -> list[Link]:
    # Without a number of steps, Lightning reads a batch as soon as it has built the loader.
    return chain_of(lambda: stream_module(chunks()), folder, [("on_train_batch_end", 0, 2)], run=run_sharded)


def sharded_validation_due(folder: Path) -> list[Link]:
    """The last batch is done, the validation after it is not."""
    return chain_of(numbers_module, folder, [("on_train_batch_end", 0, 5)], run=run_sharded, max_steps=6)


def sharded_other_batch_size(folder: Path) -> list[int]:
    first = ended(folder / "two.ckpt", run=run_sharded, max_steps=2)
    rest = run_sharded(partial(numbers_module, batch_size=3), ckpt_path=folder / "two.ckpt", max_epochs=1)
    return samples(first.ledger + rest.ledger, 0)


# A validation that is due is made up for without FSDP2 in tests/trainer/resume/test_edges.py.
@pytest.mark.parametrize("case", [sharded_stream, pytest.param(sharded_validation_due, marks=pytest.mark.slow)])
def test_fsdp2_which_restores_late_goes_on_exactly(ranks: Ranks, case: Any) -> None:
    for parts in ranks.of(case):
        assert_chain(parts, served_again=0)


def test_fsdp2_with_another_batch_size_serves_every_sample_once(ranks: Ranks) -> None:
    first, second = ranks.of(sharded_other_batch_size)
    assert sorted(first + second) == list(range(22))


# Another number of ranks


def saved_on_two_ranks(folder: Path) -> list[Any]:
    return ended(folder / "two.ckpt", run=run, max_steps=8).ledger


@pytest.mark.parametrize("batch_size", [2, 3])
def test_two_ranks_hand_over_to_one_without_losing_a_sample(ranks: Ranks, batch_size: int) -> None:
    first, second = ranks.of(saved_on_two_ranks)
    path = ranks.folder_of(saved_on_two_ranks) / "two.ckpt"
    resumed = train(partial(numbers_module, batch_size=batch_size), ckpt_path=path, max_epochs=2)
    assert len(samples(first, 1)) == 4
    assert sorted(samples(first, 1) + samples(second, 1) + samples(resumed.ledger, 1)) == list(range(22))
    # The epoch goes on in the steps of the new topology, and ends where they end.
    last = trained(resumed.ledger)[-1]
    assert last[1:3] == (1, -(-22 // batch_size) - 1)


# Evaluation


def evaluation(folder: Path) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    found = {}
    for length in (1, 2, 5, 8):
        for batch_size in (1, 2, 3):
            model, data = LedgerModel(), StatefulDataModule(val=Numbers(length), batch_size=batch_size)
            quiet_trainer(**on_ranks()).validate(model, datamodule=data, verbose=False)
            found[length, batch_size] = [event[4] for event in model.ledger]
    return found


def test_evaluation_gives_each_sample_once_with_equal_steps(ranks: Ranks) -> None:
    first, second = ranks.of(evaluation)
    for case, mine in first.items():
        steps = [index for pair in zip(mine, second[case], strict=True) for ids in pair for index in ids]
        # Only where there are fewer samples than ranks can a rank not be given one of its own.
        assert steps == (list(range(case[0])) if case[0] > 1 else [0, 0]), case


def alone_on_rank_0(folder: Path) -> dict[str, Any]:
    """Rank 0 alone tests what all ranks have been fitted on, within the fit and after it."""
    seen: dict[str, Any] = {}

    def test_alone(name: str, data: Any) -> None:
        if torch.distributed.get_rank() == 0:
            model = LedgerModel()
            quiet_trainer().test(model, datamodule=data, verbose=False)
            seen[name] = [index for event in model.ledger for index in event[2]]

    tests = LambdaCallback(on_train_end=lambda *args: test_alone("within", numbers_module(test=Numbers(5))))
    data, stream = numbers_module(test=Numbers(5)), stream_module(chunks(), test=chunks((3, 2)), val=None)
    fitted = run(lambda: data, callbacks=[tests], max_epochs=1)
    test_alone("after", data)
    run(lambda: stream, max_epochs=1)
    test_alone("stream", stream)
    return {"seen": seen, "steps": fitted.global_step}


def test_rank_0_alone_may_test_within_a_fit_and_after_it(ranks: Ranks) -> None:
    first, second = ranks.of(alone_on_rank_0)
    assert first["steps"] == second["steps"] == 6
    assert second["seen"] == {}
    assert first["seen"].keys() == {"within", "after", "stream"}
    assert all(sorted(seen) == list(range(5)) for seen in first["seen"].values())
