"""What is logged and reported about sources is what training was served of them, at every moment and over resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.ledger import Numbers
from support.runs import Outcome, StopAt, seeded
from support.sources import (
    LENGTHS,
    TOKENS,
    Beside,
    Event,
    SourcesModel,
    ids_of,
    mixture,
    plain_loader,
    round_robin,
    source_of,
    train_on,
    trained,
)
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule

SIZES = {"news": 2, "code": 3, "web": 1}


def served(events: list[Event]) -> dict[str, float]:
    """What there is to log after some training steps, by the ledger."""
    counts = Counter(source_of(index) for event in events for index in ids_of(event))
    values: dict[str, float] = {}
    for name, length in LENGTHS.items():
        values[f"{name}/samples"] = counts[name]
        values[f"{name}/epochs"] = counts[name] / length
        values[f"{name}/share"] = counts[name] / counts.total() if counts else 0.0
    return values


def expected(ledger: list[Event], *, every: int = 1, carries_over: bool = False) -> list[tuple[int, Any]]:
    """What there is to log at the steps at which a trainer logs; floats as torch rounds them."""
    steps = trained(ledger)
    found = []
    for number in range(every - 1, len(steps), every):
        epoch = steps[number][1]
        before = [event for event in steps[: number + 1] if carries_over or event[1] == epoch]
        found.append((number, pytest.approx(served(before), rel=1e-6)))
    return found


def logged(run: Outcome) -> list[tuple[int, dict[str, float]]]:
    return run.trainer.logger.sources


LOGGED: dict[str, Any] = {
    "round robin": lambda: round_robin(log_data=True),
    "cycle": lambda: round_robin(stop="cycle", log_data=True),
    "mixture": lambda: mixture(weights=[1, 2, 1], log_data=True),
    "by sample": lambda: mixture(by="sample", log_data=True),
    "by sample, steps": lambda: mixture(by="sample", num_steps=7, log_data=True),
    "steps": lambda: round_robin(num_steps=7, log_data=True),
}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", LOGGED)
def test_what_is_logged_is_what_was_served(name: str, every: int) -> None:
    run = train_on(LOGGED[name], log_every_n_steps=every)
    assert logged(run) == expected(run.ledger, every=every, carries_over="steps" in name)


def test_under_accumulation_every_optimizer_step_logs_what_was_served_until_then() -> None:
    run = train_on(LOGGED["round robin"], accumulate_grad_batches=3, max_epochs=1)
    steps = trained(run.ledger)
    ends = [3, 6, 9, 12, 14]
    assert logged(run) == [(number, pytest.approx(served(steps[:end]))) for number, end in enumerate(ends)]


@pytest.mark.parametrize("name", ["mixture", "by sample, steps"])
@pytest.mark.parametrize(
    ("hook", "epoch", "batch"),
    [("on_train_batch_start", 1, 3), ("on_train_batch_end", 0, 4), ("on_validation_end", 0, 0)],
)
def test_logging_goes_on_exactly(tmp_path: Path, name: str, hook: str, epoch: int, batch: int) -> None:
    stop = StopAt(hook, tmp_path / "stop.ckpt", epoch=epoch, batch=batch)
    before = train_on(LOGGED[name], callbacks=[stop], log_every_n_steps=2)
    after = train_on(LOGGED[name], ckpt_path=tmp_path / "stop.ckpt", seed=99, log_every_n_steps=2)
    whole = train_on(LOGGED[name], log_every_n_steps=2)
    assert logged(before) + logged(after) == logged(whole)


def test_with_lengths_tokens_are_logged_too() -> None:
    run = train_on(lambda: mixture(by="token", lengths=TOKENS, log_data=True, stop="cycle"), max_epochs=1)
    steps = trained(run.ledger)
    for number, values in logged(run):
        for name, length in LENGTHS.items():
            mean = TOKENS[name].sum() / length
            count = sum(source_of(index) == name for event in steps[: number + 1] for index in ids_of(event))
            assert values[f"{name}/tokens"] == pytest.approx(count * mean, abs=0.51)


def test_nothing_is_logged_unless_asked_for() -> None:
    run = train_on(lambda: round_robin(), max_epochs=1)
    assert logged(run) == []
    assert not any("sources" in name for name in run.trainer.callback_metrics)


# Wherever the loader comes from


class FromHooks(SourcesModel):
    def train_dataloader(self) -> Any:
        return plain_loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(3, first=500))


class Overrides(StatefulDataModule):
    def train_dataloader(self) -> Any:
        return plain_loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(3, first=500))


def run_from(where: str, **options: Any) -> Outcome:
    options = {"max_epochs": 2, **options}
    if where == "module":
        return train_on(lambda: Overrides(log_data=True), **options)
    callbacks = [*options.pop("callbacks", []), StatefulDataCallback(log_data=True)]
    if where == "argument":
        return train_on(plain_loader, callbacks=callbacks, **options)
    return train_on(lambda: None, model=seeded(FromHooks, options.pop("seed", 1)), callbacks=callbacks, **options)


@pytest.mark.parametrize("where", ["argument", "model", "module"])
@pytest.mark.filterwarnings("ignore:Total length of `list`.*:UserWarning")
def test_the_callback_alone_does_the_same(tmp_path: Path, where: str) -> None:
    stop = StopAt("on_train_batch_start", tmp_path / "stop.ckpt", epoch=1, batch=3)
    before = run_from(where, callbacks=[stop])
    after = run_from(where, ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = run_from(where)
    ours = train_on(lambda: round_robin(batch_size=SIZES), max_epochs=2)
    assert [event[4] for event in trained(whole.ledger)] == [event[4] for event in trained(ours.ledger)]
    assert stop.ledger is not None
    assert trained(stop.ledger) + trained(after.ledger) == trained(whole.ledger)
    assert logged(whole) == expected(whole.ledger)
    assert logged(before) + logged(after) == logged(whole)


class OnlyTurns(SourcesModel):
    def _ids(self, batch: Any) -> Any:
        return super()._ids(batch["turns"])

    def _loss(self, batch: Any) -> Any:
        return super()._loss(batch["turns"])


@pytest.mark.parametrize("length", [14, 5])
def test_sources_beside_another_loader_are_logged_under_its_path(length: int) -> None:
    run = train_on(lambda: Beside(length, log_data=True), model=seeded(OnlyTurns), max_epochs=2)
    found = [
        (step, {key.removeprefix("turns/"): value for key, value in values.items()}) for step, values in logged(run)
    ]
    assert found == expected(run.ledger)


def test_a_modules_switch_works_beside_a_callback_of_the_users_own() -> None:
    run = train_on(LOGGED["round robin"], callbacks=[StatefulDataCallback()], max_epochs=1)
    assert logged(run)


# Reports


class Reports(pl.Callback):
    """What module and callback report in every hook, beside what the ledger has then."""

    HOOKS = (
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_train_batch_end",
        "on_validation_start", "on_validation_batch_end", "on_train_epoch_end", "on_train_end",
    )  # fmt: skip

    def __init__(self) -> None:
        self.found: list[tuple[str, int, Any, Any]] = []
        for hook in self.HOOKS:
            setattr(self, hook, self._noter(hook))

    def _noter(self, hook: str) -> Any:
        def note(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            callback = next(one for one in trainer.callbacks if isinstance(one, StatefulDataCallback))
            steps = len(trained(module.ledger)) - (hook == "on_before_backward")
            assert callback.position_report() == trainer.datamodule.position_report()
            self.found.append((hook, steps, trainer.current_epoch, trainer.datamodule.position_report()))

        return note


@pytest.mark.parametrize("carries_over", [False, True])
def test_a_report_is_what_the_model_was_trained_on_at_every_moment(tmp_path: Path, carries_over: bool) -> None:
    def make() -> Any:
        return round_robin(num_steps=14) if carries_over else round_robin()

    whole = train_on(make, max_epochs=2)
    steps = trained(whole.ledger)
    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)
    begun, resumed = Reports(), Reports()
    train_on(make, callbacks=[begun, stop], max_epochs=2)
    train_on(make, callbacks=[resumed], ckpt_path=tmp_path / "stop.ckpt", seed=99, max_epochs=2)
    assert {hook for hook, *_ in begun.found + resumed.found} == set(Reports.HOOKS)
    for already, reports in ((0, begun), (14 + 4, resumed)):
        for hook, done, _, report in reports.found:
            done += already
            # After the last batch of an epoch the data goes on with the next.
            assert report["epoch"] == done // 14, (hook, done)
            counted = steps[:done] if carries_over else steps[done // 14 * 14 : done]
            flat = {f"{name}/{key}": value for name, of in report["sources"].items() for key, value in of.items()}
            assert flat == pytest.approx(served(counted)), (hook, done)


def test_without_loaders_there_is_nothing_to_report() -> None:
    assert round_robin().position_report() == {}
    assert StatefulDataCallback().position_report() == {}
