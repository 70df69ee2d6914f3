"""A checkpoint can be taken at any moment; the resumed run goes on exactly, whatever the hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, Timer
from support.ledger import Numbers, parts, samples, trained
from support.runs import (
    Outcome,
    SaveAt,
    assert_goes_on_from_every_moment,
    assert_goes_on_from_stop_to_stop,
    assert_log_goes_on,
    assert_resumes,
    assert_same_end,
    ended,
    numbers_module,
    stopped,
    train,
    uninterrupted,
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
    "accumulating 2, validation every 3 batches": {"accumulate_grad_batches": 2, "val_check_interval": 3},
    "accumulating 4": {"accumulate_grad_batches": 4},
}


# Those that are looked at under every schedule in the short suite; the others under the first.
HARDEST = [
    ("on_before_backward", 1, 3, 1),
    ("on_train_batch_end", 1, 10, 0),
    ("on_validation_batch_end", 1, 2, 3),
]
# Under accumulation an open window is served again from its first batch.
IN_WINDOWS = [
    ("on_train_batch_start", 1, 3, None),
    ("on_before_backward", 1, 3, None),
    ("on_before_optimizer_step", 1, 1, None),
    ("on_train_batch_end", 1, 0, None),
    ("on_train_batch_end", 1, 5, None),
    ("on_train_batch_end", 1, 7, None),
    ("on_train_batch_end", 1, 9, None),
    ("on_train_batch_end", 1, 10, None),
    ("on_validation_start", 1, 0, None),
    ("on_validation_end", 1, 0, None),
    ("on_train_epoch_end", 1, 0, None),
]


def moments_of(schedule: str) -> list[Any]:
    return IN_WINDOWS if schedule.startswith("accumulating") else MOMENTS


def cases() -> list[Any]:
    found = []
    for number, schedule in enumerate(SCHEDULES):
        for moment in moments_of(schedule):
            is_slow = number and moments_of(schedule) is MOMENTS and moment not in HARDEST
            # Of the windows, every moment is looked at under one schedule.
            is_slow = is_slow or (schedule == "accumulating 4" and moment not in IN_WINDOWS[1::3])
            # A share of an epoch is turned into a number of batches.
            is_slow = is_slow or schedule == "validation twice an epoch"
            found.append(pytest.param(schedule, moment, marks=pytest.mark.slow if is_slow else ()))
    return found


Saved = Callable[[str], tuple[SaveAt, Outcome]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Runs once under a schedule, and saves at all of its moments."""

    @cache
    def run(schedule: str) -> tuple[SaveAt, Outcome]:
        saver = SaveAt(tmp_path_factory.mktemp("moments"), [moment[:3] for moment in moments_of(schedule)])
        return saver, train(callbacks=[saver], **SCHEDULES[schedule])

    return run


@pytest.mark.parametrize(("schedule", "moment"), cases())
def test_a_run_saved_in_any_hook_goes_on_exactly(saved: Saved, schedule: str, moment: Any) -> None:
    saver, _ = saved(schedule)
    number, options = moments_of(schedule).index(moment), SCHEDULES[schedule]
    resumed = assert_resumes(saver.path(number), saver.ledgers[number], moment[3], **options)
    assert_log_goes_on(saver.logged[number], resumed.logged, uninterrupted(**options).logged)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saving_changes_nothing(saved: Saved, schedule: str) -> None:
    _, saving = saved(schedule)
    whole = uninterrupted(**SCHEDULES[schedule])
    assert saving.ledger == whole.ledger
    assert_same_end(saving, whole)


def test_progress_of_optimizers_and_schedulers_is_counted_as_without_the_stop(saved: Saved) -> None:
    schedule = next(iter(SCHEDULES))
    saver, _ = saved(schedule)
    resumed = train(ckpt_path=saver.path(MOMENTS.index(("on_before_optimizer_step", 1, 3, 1))), seed=99)
    ours, theirs = (run.trainer.fit_loop.state_dict() for run in (resumed, uninterrupted()))
    for name in ("epoch_loop.scheduler_progress", "epoch_loop.batch_progress", "epoch_progress"):
        assert ours[name] == theirs[name], name
    steps = [state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] for state in (ours, theirs)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("others", [0, 1])
def test_a_stop_in_a_window_that_a_change_of_batch_size_fell_into_loses_nothing(
    tmp_path: Path, batch: int, others: int
) -> None:
    """Windows are counted from the epoch's first batch: 5 batches of 2 are 10 of 1, within a window of 4."""

    def make(batch_size: int) -> Any:
        datasets = {"a": Numbers(22), "b": Numbers(6, first=100)}
        return numbers_module(train=datasets if others else Numbers(22), batch_size=batch_size, val=None)

    how: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1}
    first = ended(tmp_path / "changed.ckpt", lambda: make(2), max_steps=5)
    whole = train(lambda: make(1), ckpt_path=tmp_path / "changed.ckpt", **how)
    before = stopped(tmp_path / "stop.ckpt", lambda: make(1), batch=batch, ckpt_path=tmp_path / "changed.ckpt", **how)
    assert_resumes(tmp_path / "stop.ckpt", before, make=lambda: make(1), whole=whole, **how)
    served = parts(first.ledger + whole.ledger, "a") if others else [samples(first.ledger + whole.ledger)]
    assert sorted(index for batch in served for index in batch) == list(range(22))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4, 11])
def test_each_step_checkpoint_of_a_run_resumes_exactly(tmp_path: Path, every: int) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    whole = train(callbacks=[saver], max_epochs=2)
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    assert len(saved) == 22 // every
    for path in saved:
        resumed = assert_resumes(path, [], whole=whole, max_epochs=2)
        assert len(trained(resumed.ledger)) == 22 - int(path.stem.split("=")[1])


def stop_early(trainer: Any, *args: Any) -> None:
    if trainer.global_step == 17:
        trainer.should_stop = True


class Clock(Timer):
    """Its time is up after 13 steps."""

    _steps = 0

    def time_elapsed(self, stage: Any = "train") -> float:
        return 100.0 if self._steps >= 13 else 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._steps = trainer.global_step
        super().on_train_batch_end(trainer, *args)


ENDED: dict[str, Callable[[], dict[str, Any]]] = {
    "max_steps within an epoch": lambda: {"max_steps": 15},
    "max_steps at the end of an epoch": lambda: {"max_steps": 11},
    "max_steps at the end of another epoch": lambda: {"max_steps": 22},
    "should_stop": lambda: {"callbacks": [LambdaCallback(on_train_batch_end=stop_early)]},
    "a timer": lambda: {"callbacks": [Clock(duration={"seconds": 50})]},
}


@pytest.mark.parametrize("way", ENDED)
def test_a_run_that_was_ended_goes_on_within_its_epoch(tmp_path: Path, way: str) -> None:
    saves = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "end hook.ckpt"))
    options = ENDED[way]()
    options["callbacks"] = [*options.get("callbacks", []), saves]
    first, whole = ended(tmp_path / "after fit.ckpt", **options), uninterrupted()
    for path in tmp_path.glob("*.ckpt"):
        resumed = train(ckpt_path=path, seed=99)
        assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
        assert_same_end(resumed, whole)


@pytest.mark.parametrize(("limit", "last"), [(7, 6), (0.5, 4)])
def test_19_a_limited_epoch_ends_at_its_limit_after_a_resume(tmp_path: Path, limit: float, last: int) -> None:
    moments = [("on_train_batch_end", 1, 2), ("on_train_batch_end", 1, last), ("on_train_epoch_end", 1, 0)]
    options: dict[str, Any] = {"limit_train_batches": limit, "max_epochs": 3}
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, served_again=0, **options)


CHAINS = [
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
        (CHAINS[0], {"max_steps": 29}),
        (CHAINS[1], {}),
        (CHAINS[2], {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        pytest.param(CHAINS[3], {}, marks=pytest.mark.slow),
        (CHAINS[4], {}),
    ],
)
def test_a_chain_of_stops_and_resumes_gives_the_uninterrupted_run(
    tmp_path: Path, chain: list[tuple[str, int, int]], options: dict[str, Any]
) -> None:
    assert_goes_on_from_stop_to_stop(tmp_path, numbers_module, chain, **options)
