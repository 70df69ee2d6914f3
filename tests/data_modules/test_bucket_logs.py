"""What is logged about padding is what the batches hold that were trained on, at every step and over resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, StopAt, seeded, train
from support.sources import Event, trained
from support.texts import MODULES, PaddingLog, Texts, bucketed, ids_of, padding_of
from torch.utils.data import DataLoader

from lightning_stateful import BucketBatchSampler, StatefulDataCallback, StatefulDataModule


def logged(make: Any, **options: Any) -> tuple[list[tuple[int, dict[str, float]]], Outcome]:
    """What a run logs about padding, and the run."""
    log = PaddingLog()
    run = train(make, callbacks=[*options.pop("callbacks", []), log], **{"max_epochs": 2, **options})
    return log.found, run


def expected(name: str, ledger: list[Event], *, every: int = 1) -> list[tuple[int, Any]]:
    steps = trained(ledger)
    return [
        (number, pytest.approx(padding_of(name, ids_of(steps[number]))))
        for number in range(every - 1, len(steps), every)
    ]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", ["tokens", "batch size", "quadratic cost", "too long dropped"])
def test_what_is_logged_is_what_the_batches_hold_that_were_trained_on(name: str, every: int) -> None:
    found, run = logged(lambda: MODULES[name](log_data=True), log_every_n_steps=every)
    assert found == expected(name, run.ledger, every=every)


def test_under_accumulation_every_optimizer_step_logs_its_last_batch() -> None:
    found, run = logged(lambda: bucketed(log_data=True), accumulate_grad_batches=5, max_epochs=1)
    steps = trained(run.ledger)
    assert len(steps) == 12
    assert found == [
        (number, pytest.approx(padding_of("tokens", ids_of(steps[end - 1])))) for number, end in enumerate((5, 10, 12))
    ]


@pytest.mark.parametrize("name", ["tokens", "batch size"])
@pytest.mark.parametrize(
    ("hook", "epoch", "batch"),
    [
        ("on_train_batch_start", 1, 3),
        ("on_train_batch_end", 0, 4),
        ("on_train_batch_end", 0, 11),
        ("on_validation_end", 0, 0),
    ],
)
def test_logging_goes_on_exactly(tmp_path: Path, name: str, hook: str, epoch: int, batch: int) -> None:
    def make() -> Any:
        return MODULES[name](log_data=True)

    stop = StopAt(hook, tmp_path / "stop.ckpt", epoch=epoch, batch=batch)
    # Every other step: a step that a crash follows has not been logged yet.
    before, _ = logged(make, callbacks=[stop], log_every_n_steps=2)
    after, _ = logged(make, ckpt_path=tmp_path / "stop.ckpt", seed=99, log_every_n_steps=2)
    whole, _ = logged(make, log_every_n_steps=2)
    missing = whole[len(before) : len(whole) - len(after)]
    assert after
    assert before + missing + after == whole
    assert len(missing) <= 1


def test_a_limited_epoch_logs_the_batches_it_trained_on() -> None:
    found, run = logged(lambda: bucketed(log_data=True), limit_train_batches=5)
    assert len(found) == 10
    assert found == expected("tokens", run.ledger)


def test_nothing_is_logged_unless_asked_for() -> None:
    found, run = logged(bucketed)
    assert found == []
    assert not any("padding" in name for name in run.trainer.callback_metrics)


def test_loaders_without_a_budget_have_no_padding_to_log() -> None:
    found, _ = logged(lambda: StatefulDataModule(Numbers(6), batch_size=2, log_data=True))
    assert found == []


def loader() -> DataLoader[Any]:
    data = Texts()
    return DataLoader(data, batch_sampler=BucketBatchSampler(data.num_tokens, max_tokens=40, num_buckets=4, seed=7))


def test_the_callback_alone_does_the_same() -> None:
    found, run = logged(loader, callbacks=[StatefulDataCallback(log_data=True)])
    assert found == expected("tokens", run.ledger)
    assert found == logged(lambda: bucketed(log_data=True))[0]


def test_a_modules_switch_works_beside_a_callback_of_the_users_own() -> None:
    found, run = logged(lambda: bucketed(log_data=True), callbacks=[StatefulDataCallback()])
    assert found == expected("tokens", run.ledger)


class OnlyTexts(LedgerModel):
    def _ids(self, batch: Any) -> Any:
        return super()._ids(batch["texts"]) if batch["texts"] is not None else ()

    def _loss(self, batch: Any) -> Any:
        return super()._loss(batch["texts"] or batch["plain"])


class Beside(StatefulDataModule):
    """Texts beside a plain loader of other length."""

    def __init__(self, length: int) -> None:
        super().__init__(log_data=True)
        self.length = length

    def train_dataloader(self) -> Any:
        plain = DataLoader(Numbers(self.length, first=600), batch_size=1, shuffle=True)
        return CombinedLoader({"texts": loader(), "plain": plain}, "max_size")


@pytest.mark.parametrize("length", [5, 14])
def test_texts_beside_another_loader_are_logged_under_its_path_and_as_zeros_once_there_are_none(length: int) -> None:
    found, run = logged(lambda: Beside(length), model=seeded(OnlyTexts))
    batches = [ids_of(event) for event in trained(run.ledger)]
    assert sum(bool(batch) for batch in batches) == 24
    assert len(found) == len(batches)
    for (_, values), batch in zip(found, batches, strict=True):
        expected = padding_of("tokens", batch) if batch else dict.fromkeys(padding_of("tokens", batches[0]), 0.0)
        assert {name.replace("/texts", ""): value for name, value in values.items()} == pytest.approx(expected)
