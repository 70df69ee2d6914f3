"""A checkpoint can be taken at any moment; the resumed run goes on exactly, whatever the hook."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from support.ledger import LedgerModel, Numbers
from support.runs import (
    Outcome,
    StopAt,
    StoppedError,
    assert_log_goes_on,
    assert_same_end,
    assert_stitches,
    numbers_module,
    seeded,
    train,
)

# Hook, epoch, how many calls of it in that epoch before, and how many trained batches are served again.
MOMENTS = [
    ("on_train_epoch_start", 0, 0, 0),
    ("on_train_epoch_start", 1, 0, 0),
    ("on_train_batch_start", 0, 0, 0),
    ("on_train_batch_start", 1, 3, 0),
    ("on_before_backward", 1, 3, 1),
    ("on_after_backward", 1, 2, 1),
    ("on_before_optimizer_step", 1, 3, 1),
    ("on_train_batch_end", 0, 0, 0),
    ("on_train_batch_end", 1, 5, 0),
    ("on_train_batch_end", 1, 10, 0),
    ("on_validation_start", 1, 0, 0),
    ("on_validation_batch_start", 1, 1, 1),
    ("on_validation_batch_end", 1, 2, 3),
    ("on_validation_epoch_end", 1, 0, 3),
    ("on_validation_end", 1, 0, 0),
    ("on_train_epoch_end", 0, 0, 0),
    ("on_train_epoch_end", 1, 0, 0),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "validation after each epoch": {},
    "validation every 3 batches": {"val_check_interval": 3},
    "validation twice an epoch": {"val_check_interval": 0.5},
    "validation every 4 batches over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "max_steps": {"max_steps": 28, "max_epochs": -1},
    "sanity checking": {"num_sanity_val_steps": 2},
}


# Those that are looked at under every schedule; the others under the first.
HARDEST = [
    ("on_before_backward", 1, 3, 1),
    ("on_train_batch_end", 1, 5, 0),
    ("on_train_batch_end", 1, 10, 0),
    ("on_validation_batch_end", 1, 2, 3),
    ("on_train_epoch_end", 1, 0, 0),
]


@cache
def uninterrupted(**options: Any) -> Outcome:
    return train(**options)


@pytest.mark.parametrize(
    ("schedule", "hook", "epoch", "batch", "served_again"),
    [(schedule, *moment) for number, schedule in enumerate(SCHEDULES) for moment in (HARDEST if number else MOMENTS)],
)
def test_a_run_stopped_in_any_hook_goes_on_exactly(
    tmp_path: Path, schedule: str, hook: str, epoch: int, batch: int, served_again: int
) -> None:
    options = SCHEDULES[schedule]
    stop = StopAt(hook, tmp_path / "stop.ckpt", epoch=epoch, batch=batch)
    train(callbacks=[stop], **options)
    assert stop.ledger is not None
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99, **options)
    whole = uninterrupted(**options)
    assert_stitches([stop.ledger, resumed.ledger], whole.ledger, served_again)
    assert_log_goes_on(stop.logged, resumed.logged, whole.logged)
    assert_same_end(resumed, whole)


@pytest.mark.parametrize(
    ("window", "schedule"), [(2, "validation every 3 batches"), (4, "validation after each epoch")]
)
@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("on_train_batch_start", 3),
        ("on_before_backward", 3),
        ("on_before_optimizer_step", 1),
        ("on_train_batch_end", 0),
        ("on_train_batch_end", 5),
        ("on_train_batch_end", 7),
        ("on_train_batch_end", 9),
        ("on_train_batch_end", 10),
        ("on_validation_start", 0),
        ("on_validation_end", 0),
        ("on_train_epoch_end", 0),
    ],
)
def test_an_open_accumulation_window_is_served_again_from_its_first_batch(
    tmp_path: Path, window: int, schedule: str, hook: str, batch: int
) -> None:
    options = {**SCHEDULES[schedule], "accumulate_grad_batches": window}
    stop = StopAt(hook, tmp_path / "stop.ckpt", epoch=1, batch=batch)
    train(callbacks=[stop], **options)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99, **options)
    whole = uninterrupted(**options)
    assert stop.ledger is not None
    assert_stitches([stop.ledger, resumed.ledger], whole.ledger)
    assert_same_end(resumed, whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_have_fetched_ahead_change_nothing(tmp_path: Path, workers: int) -> None:
    def make() -> Any:
        return numbers_module(num_workers=workers)

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=4)
    train(make, callbacks=[stop], max_epochs=2)
    resumed = train(make, ckpt_path=tmp_path / "stop.ckpt", seed=99, max_epochs=2)
    whole = uninterrupted(max_epochs=2)
    assert stop.ledger is not None
    assert_stitches([stop.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


def test_a_sample_that_cannot_be_read_stops_the_run_before_its_batch(tmp_path: Path) -> None:
    class SaveOnException(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "stop.ckpt")

    model = seeded(LedgerModel)
    with pytest.raises(RuntimeError, match="sample 13 cannot be read"):
        train(lambda: numbers_module(train=Numbers(22, fail_at=13)), callbacks=[SaveOnException()], model=model)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = uninterrupted()
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*:UserWarning")
def test_an_on_exception_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    class Crash(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 15:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    model = seeded(Crash)
    saver = OnExceptionCheckpoint(tmp_path, filename="crash")
    with pytest.raises(RuntimeError, match="out of memory"):
        train(callbacks=[saver], model=model)
    resumed = train(ckpt_path=tmp_path / "crash.ckpt", seed=99)
    whole = uninterrupted()
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


def test_ctrl_c_saves_and_resumes_exactly(tmp_path: Path) -> None:
    class Interrupt(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Any) -> None:
            if trainer.global_step == 14:
                raise KeyboardInterrupt

        def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "stop.ckpt")

    model = seeded(LedgerModel)
    with pytest.raises(SystemExit):
        train(callbacks=[Interrupt()], model=model)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = uninterrupted()
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 1)
    assert_same_end(resumed, whole)


@pytest.mark.parametrize("every", [1, 4, 11])
def test_each_step_checkpoint_of_a_run_resumes_exactly(tmp_path: Path, every: int) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    whole = train(callbacks=[saver], max_epochs=2)
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    assert len(saved) == 22 // every
    for path in saved:
        resumed = train(ckpt_path=path, seed=99, max_epochs=2)
        step = int(path.stem.split("=")[1])
        trained = [event for event in resumed.ledger if event[0] == "train"]
        assert [event[3] for event in trained] == list(range(step, 22))
        assert resumed.ledger == whole.ledger[len(whole.ledger) - len(resumed.ledger) :]
        assert_same_end(resumed, whole)


@pytest.mark.parametrize("moment", ["on_train_epoch_end", "after fit"])
@pytest.mark.parametrize("stop", [{"max_steps": 15}, {"max_steps": 11}, {"max_steps": 22}])
def test_a_run_stopped_by_max_steps_goes_on_within_its_epoch(tmp_path: Path, stop: dict[str, int], moment: str) -> None:
    path = tmp_path / "stop.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
            trainer.save_checkpoint(path)

    first = train(callbacks=[Save()] if moment == "on_train_epoch_end" else [], **stop)
    if moment == "after fit":
        first.trainer.save_checkpoint(path)
    resumed = train(ckpt_path=path, seed=99)
    whole = uninterrupted()
    ours = [event for event in first.ledger + resumed.ledger if event[0] == "train"]
    assert ours == [event for event in whole.ledger if event[0] == "train"]
    assert_same_end(resumed, whole)


def test_a_run_stopped_early_within_an_epoch_goes_on_within_it(tmp_path: Path) -> None:
    class StopEarly(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 17:
                trainer.should_stop = True

    first = train(callbacks=[StopEarly()])
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = uninterrupted()
    ours = [event for event in first.ledger + resumed.ledger if event[0] == "train"]
    assert ours == [event for event in whole.ledger if event[0] == "train"]
    assert_same_end(resumed, whole)


def test_a_timer_stops_a_run_that_then_goes_on_within_its_epoch(tmp_path: Path) -> None:
    class Clock(Timer):
        def time_elapsed(self, stage: Any = "train") -> float:
            return 100.0 if self._steps >= 13 else 0.0

        _steps = 0

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self._steps = trainer.global_step
            super().on_train_batch_end(trainer, *args)

    first = train(callbacks=[Clock(duration={"seconds": 50})])
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = uninterrupted()
    ours = [event for event in first.ledger + resumed.ledger if event[0] == "train"]
    assert ours == [event for event in whole.ledger if event[0] == "train"]
    assert_same_end(resumed, whole)


@pytest.mark.parametrize("limit", [7, 0.5])
def test_a_limited_epoch_ends_at_its_limit_after_a_resume(tmp_path: Path, limit: float) -> None:
    last = 7 if limit == 7 else 5
    for hook, batch in [("on_train_batch_end", 2), ("on_train_batch_end", last - 1), ("on_train_epoch_end", 0)]:
        stop = StopAt(hook, tmp_path / "stop.ckpt", epoch=1, batch=batch)
        train(callbacks=[stop], limit_train_batches=limit)
        resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99, limit_train_batches=limit)
        whole = train(limit_train_batches=limit)
        assert stop.ledger is not None
        assert_stitches([stop.ledger, resumed.ledger], whole.ledger, 0)
        assert_same_end(resumed, whole)


CHAINS = [
    [("on_train_batch_end", 0, 3), ("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 0)],
    [("on_before_backward", 0, 4), ("on_before_backward", 0, 2), ("on_before_backward", 1, 7)],
    [("on_train_batch_end", 0, 10), ("on_train_epoch_start", 1, 0), ("on_train_batch_end", 1, 10)],
    [("on_validation_end", 0, 0), ("on_train_batch_start", 1, 0), ("on_validation_batch_end", 1, 0)],
    [("on_train_epoch_end", 0, 0), ("on_after_backward", 1, 1), ("on_train_epoch_end", 1, 0)],
    [
        ("on_train_batch_end", 0, 5),
        ("on_train_batch_end", 0, 0),
        ("on_train_batch_end", 0, 0),
        ("on_validation_start", 1, 0),
    ],
]


@pytest.mark.parametrize(
    ("chain", "options"),
    [
        *((chain, {}) for chain in CHAINS),
        (CHAINS[3], {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        (CHAINS[1], {"max_steps": 29}),
    ],
)
def test_a_chain_of_stops_and_resumes_gives_the_uninterrupted_run(
    tmp_path: Path, chain: list[tuple[str, int, int]], options: dict[str, Any]
) -> None:
    ledgers, path = [], None
    for number, (hook, epoch, batch) in enumerate(chain):
        stop = StopAt(hook, tmp_path / f"{number}.ckpt", epoch=epoch, batch=batch)
        train(callbacks=[stop], ckpt_path=path, seed=1 if path is None else 50 + number, **options)
        assert stop.ledger is not None
        ledgers.append(stop.ledger)
        path = tmp_path / f"{number}.ckpt"
    last = train(ckpt_path=path, seed=99, **options)
    whole = uninterrupted(**options)
    assert_stitches([*ledgers, last.ledger], whole.ledger)
    assert_same_end(last, whole)


def test_the_state_says_how_far_training_is_when_a_batch_is_in_flight(tmp_path: Path) -> None:
    stop = StopAt("on_before_backward", tmp_path / "stop.ckpt", epoch=0, batch=3)
    train(callbacks=[stop])
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert checkpoint["StatefulDataModule"]["lightning_stateful"]["progress"] == {"epoch": 0, "cycle": 0, "consumed": 6}


def test_stopped_is_what_ends_these_runs() -> None:
    # Were a hook never reached, the run would not have been stopped and the tests above would show nothing.
    stop = StopAt("on_train_batch_end", None, epoch=0, batch=99)
    train(callbacks=[stop], max_epochs=1)
    assert stop.ledger is None
    assert issubclass(StoppedError, Exception)
