"""Two real ranks: every rank's own ledger goes on exactly, and another number of ranks takes over."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ddp_runs import Link, assert_chain, assert_in_step, chain_of, plain, quiet_trainer, run
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import Outcome, assert_stitches, numbers_module, seeded, train
from support.signalled import SignalledInStep, enter_slurm_job
from support.sources import samples, trained
from support.stream_runs import chunks
from support.stream_runs import module as stream_module
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("ddp"))


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


def workers(folder: Path) -> list[Link]:
    return chain_of(partial(numbers_module, num_workers=2), folder, [("on_train_batch_end", 1, 2)])


def callback_alone(folder: Path) -> list[Link]:
    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, shuffle=True)

    return chain_of(make, folder, [("on_train_batch_end", 1, 2)], callbacks=lambda: [StatefulDataCallback(seed=7)])


def test_an_epoch_gives_every_sample_once_over_the_ranks(ranks: Ranks) -> None:
    runs = [parts[0][0] for parts in ranks.of(numbers)]
    assert_in_step(runs)
    for epoch in range(2):
        assert sorted(index for run in runs for index in samples(run["ledger"], epoch)) == list(range(22))
    assert len(trained(runs[0]["ledger"])) == 12


@pytest.mark.parametrize("case", [numbers, windows])
def test_a_run_stopped_in_any_hook_goes_on_exactly_on_every_rank(ranks: Ranks, case: Any) -> None:
    for parts in ranks.of(case):
        assert_chain(parts)


@pytest.mark.parametrize("case", [workers, callback_alone])
def test_nothing_is_served_again_after_a_batch_on_any_rank(ranks: Ranks, case: Any) -> None:
    for parts in ranks.of(case):
        assert_chain(parts, served_again=0)


def test_the_callback_alone_serves_the_same_under_the_default_distributed_sampler(ranks: Ranks) -> None:
    for (own, *_), (alone, *_) in zip(ranks.of(numbers), ranks.of(callback_alone), strict=True):
        assert [event[4] for event in trained(own[0]["ledger"])] == [event[4] for event in trained(alone[0]["ledger"])]


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

    class Ask(pl.Callback):
        state = None

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 8 and trainer.is_global_zero:
                self.state = trainer.datamodule.state_dict()["lightning_stateful"]

    ask = Ask()
    run(numbers_module, callbacks=[ask])
    return ask.state


def test_8_the_state_needs_no_other_rank(ranks: Ranks) -> None:
    state, none = ranks.of(state_of_one_rank)
    assert state["progress"] == {"epoch": 1, "cycle": 0, "consumed": 8}
    assert none is None


# FSDP2, which restores a checkpoint after ``configure_optimizers``


class Sharded(LedgerModel):
    """Parameters over two ranks; asks for loaders before there is a checkpoint."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(next(self.parameters()), DTensor):
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def run_sharded(make: Any, **options: Any) -> Outcome:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = run(make, makes=Sharded, strategy=strategy, **options)
    found.weights = {name: value.full_tensor() for name, value in found.weights.items()}
    return found


def sharded_stream(folder: Path) -> list[Link]:
    # Without a number of steps, Lightning reads a batch as soon as it has built the loader.
    return chain_of(lambda: stream_module(chunks()), folder, [("on_train_batch_end", 0, 2)], run=run_sharded)


def sharded_validation_due(folder: Path) -> list[Link]:
    """The last batch is done, the validation after it is not."""
    return chain_of(numbers_module, folder, [("on_train_batch_end", 0, 5)], run=run_sharded, max_steps=6)


def sharded_other_batch_size(folder: Path) -> list[int]:
    first = run_sharded(numbers_module, max_steps=2)
    first.trainer.save_checkpoint(folder / "two.ckpt")
    rest = run_sharded(partial(numbers_module, batch_size=3), ckpt_path=folder / "two.ckpt", max_epochs=1)
    return samples(first.ledger + rest.ledger, 0)


@pytest.mark.parametrize("case", [sharded_stream, sharded_validation_due])
def test_fsdp2_which_restores_late_goes_on_exactly(ranks: Ranks, case: Any) -> None:
    for parts in ranks.of(case):
        assert_chain(parts, served_again=0)


def test_fsdp2_with_another_batch_size_serves_every_sample_once(ranks: Ranks) -> None:
    first, second = ranks.of(sharded_other_batch_size)
    assert sorted(first + second) == list(range(22))


# Another number of ranks


def saved_on_two_ranks(folder: Path) -> list[Any]:
    found = run(numbers_module, max_steps=8)
    found.trainer.save_checkpoint(folder / "two.ckpt")
    return found.ledger


def resumed_on_two_ranks(folder: Path) -> list[Any]:
    return run(numbers_module, ckpt_path=folder.parent / "one.ckpt").ledger


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


def test_one_rank_hands_over_to_two_without_losing_a_sample(ranks: Ranks) -> None:
    before = train(max_steps=5)
    before.trainer.save_checkpoint(ranks.folder / "one.ckpt")
    first, second = ranks.of(resumed_on_two_ranks)
    assert sorted(samples(before.ledger, 0) + samples(first, 0) + samples(second, 0)) == list(range(22))
    assert len(trained(first)) == len(trained(second))


# Evaluation


def evaluation(folder: Path) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    found = {}
    for length in (1, 2, 5, 8):
        for batch_size in (1, 2, 3):
            model, data = LedgerModel(), StatefulDataModule(val=Numbers(length), batch_size=batch_size)
            quiet_trainer().validate(model, datamodule=data, verbose=False)
            found[length, batch_size] = [event[4] for event in model.ledger]
    return found


def test_evaluation_gives_each_sample_once_with_equal_steps(ranks: Ranks) -> None:
    first, second = ranks.of(evaluation)
    for case, batches in first.items():
        steps = [index for mine, other in zip(batches, second[case], strict=True) for index in mine + other]
        # Only where there are fewer samples than ranks can a rank not be given one of its own.
        assert steps == (list(range(case[0])) if case[0] > 1 else [0, 0]), case


def plain_evaluation_loaders(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    model, found = LedgerModel(), {}
    trainer = quiet_trainer(callbacks=[StatefulDataCallback()])
    for how in ("validate", "test", "predict"):
        model.ledger.clear()
        options = {} if how == "predict" else {"verbose": False}
        getattr(trainer, how)(model, dataloaders=DataLoader(Numbers(7), batch_size=2), **options)
        found[how] = [event[-1] for event in model.ledger]
    return found


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_plain_evaluation_loaders_are_exact_too(ranks: Ranks, how: str) -> None:
    first, second = (found[how] for found in ranks.of(plain_evaluation_loaders))
    assert sorted(index for batch in first + second for index in batch) == list(range(7))
    assert len(first) == len(second)


def alone_on_rank_0(folder: Path) -> dict[str, Any]:
    """Rank 0 alone tests what all ranks have been fitted on, within the fit and after it."""
    seen: dict[str, Any] = {}

    def test_alone(name: str, data: Any) -> None:
        if torch.distributed.get_rank() == 0:
            model = LedgerModel()
            quiet_trainer(strategy="auto", devices=1).test(model, datamodule=data, verbose=False)
            seen[name] = [index for event in model.ledger for index in event[2]]

    class Tests(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            test_alone("within", numbers_module(test=Numbers(5)))

    data, stream = numbers_module(test=Numbers(5)), stream_module(chunks(), test=chunks((3, 2)), val=None)
    fitted = run(lambda: data, callbacks=[Tests()], max_epochs=1)
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
