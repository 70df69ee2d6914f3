"""Logs and reports of sources and padding tell what training was served, at every moment and over resumes."""

from __future__ import annotations

import csv
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import texts
from support.ledger import Event, LedgerModel, Numbers, batches, ids_of, trained
from support.runs import Outcome, SaveAt, numbers_module, seeded, stopped, train, train_alone
from support.sources import LENGTHS, Beside, mixture, plain_loader, round_robin, source_of
from support.stream_runs import chunks
from support.stream_runs import module as stream_module
from support.texts import Texts, bucketed, padding_of
from torch.utils.data import DataLoader

from lightning_stateful import BucketBatchSampler, StatefulDataCallback, StatefulDataModule


def served(events: list[Event]) -> dict[str, float]:
    """The values to log after some training steps, by the ledger."""
    counts = Counter(source_of(index) for event in events for index in ids_of(event))
    values: dict[str, float] = {}
    for name, length in LENGTHS.items():
        values[f"{name}/samples"] = counts[name]
        values[f"{name}/epochs"] = counts[name] / length
        values[f"{name}/share"] = counts[name] / counts.total() if counts else 0.0
    return values


def expected(ledger: list[Event], *, every: int = 1, carries_over: bool = False) -> list[tuple[int, Any]]:
    """The values to log at the steps at which a trainer logs; floats as torch rounds them."""
    steps = trained(ledger)
    found = []
    for number in range(every - 1, len(steps), every):
        epoch = steps[number][1]
        before = [event for event in steps[: number + 1] if carries_over or event[1] == epoch]
        found.append((number, pytest.approx(served(before), rel=1e-6)))
    return found


def logged(run: Outcome) -> list[tuple[int, dict[str, float]]]:
    return run.trainer.logger.sources


def padding(run: Outcome) -> list[tuple[int, dict[str, float]]]:
    return run.trainer.logger.padding


LOGGED: dict[str, Any] = {
    "round robin": lambda: round_robin(log_data=True),
    "mixture": lambda: mixture(weights=[1, 2, 1], log_data=True),
    "by sample, steps": lambda: mixture(by="sample", num_steps=7, log_data=True),
}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", LOGGED)
def test_what_is_logged_is_what_was_served(name: str, every: int) -> None:
    run = train(LOGGED[name], log_every_n_steps=every)
    assert logged(run) == expected(run.ledger, every=every, carries_over="steps" in name)


def test_under_accumulation_every_optimizer_step_logs_what_was_served_until_then() -> None:
    run = train(LOGGED["round robin"], accumulate_grad_batches=3, max_epochs=1)
    steps = trained(run.ledger)
    ends = [3, 6, 9, 12, 14]
    assert logged(run) == [(number, pytest.approx(served(steps[:end]))) for number, end in enumerate(ends)]


def test_nothing_is_logged_unless_asked_for() -> None:
    run = train(round_robin, max_epochs=1)
    assert logged(run) == []
    assert not any("sources" in name for name in run.trainer.callback_metrics)
    run = train(bucketed, max_epochs=1)
    assert padding(run) == []
    assert not any("padding" in name for name in run.trainer.callback_metrics)


def test_the_callback_alone_logs_the_same() -> None:
    run = train_alone(plain_loader, settings={"log_data": True, "seed": 0}, max_epochs=2)
    assert logged(run) == expected(run.ledger)
    assert logged(run) == logged(train(lambda: round_robin(log_data=True), max_epochs=2))


class OnlyTurns(LedgerModel):
    def _ids(self, batch: Any) -> Any:
        return super()._ids(batch["turns"])

    def _loss(self, batch: Any) -> Any:
        return super()._loss(batch["turns"])


@pytest.mark.parametrize("length", [14, 5])
def test_sources_beside_another_loader_are_logged_under_its_path(length: int) -> None:
    run = train(lambda: Beside(length, log_data=True), model=seeded(OnlyTurns), max_epochs=2)
    found = [
        (step, {key.removeprefix("turns/"): value for key, value in values.items()}) for step, values in logged(run)
    ]
    assert found == expected(run.ledger)


def test_a_modules_switch_works_beside_a_callback_of_the_users_own() -> None:
    run = train(LOGGED["round robin"], callbacks=[StatefulDataCallback()], max_epochs=1)
    assert logged(run) == expected(run.ledger)


# One scheme of names

CSV = ("epoch", "batch", "fraction", "samples")


def in_csv(path: Path) -> list[tuple[float, ...]]:
    """The position and the samples in the rows of a CSV logger in which the data were logged."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("data/batch")]
    return [tuple(float(row[f"data/{name}"]) for name in CSV) for row in rows]


def test_position_samples_and_fraction_are_logged_of_any_data_and_go_on_over_a_resume(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> Any:
        logger: Any = CSVLogger(tmp_path, name="", version=folder, flush_logs_every_n_steps=1)
        logger.steps = []
        return train(lambda: numbers_module(log_data=True), logger=logger, max_epochs=2, **options)

    saver = SaveAt(tmp_path, [("on_train_batch_end", 1, 3)])
    run("whole", callbacks=[saver])
    run("resumed", ckpt_path=saver.path(0))
    whole, resumed = (in_csv(tmp_path / folder / "metrics.csv") for folder in ("whole", "resumed"))
    every = [(epoch, batch, batch / 11, 2 * batch) for epoch in range(2) for batch in range(1, 12)]
    assert whole == [pytest.approx(row) for row in every]
    assert resumed == whole[15:]


KINDS: dict[str, tuple[Any, set[str]]] = {
    "samples": (lambda: numbers_module(log_data=True), {"samples"}),
    "left out": (lambda: numbers_module(log_data=True, skip={0: range(1)}), {"samples", "skipped"}),
    "mixture": (
        lambda: round_robin(log_data=True),
        {"samples", *(f"sources/{name}/{what}" for name in LENGTHS for what in ("samples", "epochs", "share"))},
    ),
    "buckets": (bucketed, {"samples", "padding/share", "padding/tokens", "padding/budget_use"}),
    "stream": (
        lambda: stream_module(chunks(), val=None, log_data=True),
        {"batches", "pass", "shards_left", "shards_skipped", "samples_skipped", "samples_too_long"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_of_each_kind_of_data_are_those_of_the_table(kind: str) -> None:
    make, names = KINDS[kind]
    make = partial(bucketed, log_data=True) if kind == "buckets" else make
    run: Any = train(make, max_steps=2, max_epochs=1)
    _, found = run.trainer.logger.data[-1]
    fraction = set() if kind == "stream" else {"fraction"}
    assert set(found) == {"epoch", "batch", *fraction, *names}
    table = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()
    for name in found:
        assert f"`{name.rsplit('/')[-1]}`" in table or f"/{name.rsplit('/')[-1]}`" in table, name


# Padding


def padding_expected(name: str, ledger: list[Event], *, every: int = 1) -> list[tuple[int, Any]]:
    steps = trained(ledger)
    return [
        (number, pytest.approx(padding_of(name, ids_of(steps[number]))))
        for number in range(every - 1, len(steps), every)
    ]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", ["tokens", "batch size", "quadratic cost", "too long dropped"])
def test_the_padding_that_is_logged_is_that_of_the_batches_trained_on(name: str, every: int) -> None:
    run = train(lambda: texts.MODULES[name](log_data=True), log_every_n_steps=every, max_epochs=2)
    assert padding(run) == padding_expected(name, run.ledger, every=every)


def test_loaders_without_a_budget_have_no_padding_to_log() -> None:
    assert padding(train(lambda: StatefulDataModule(Numbers(6), batch_size=2, log_data=True))) == []


class OnlyTexts(LedgerModel):
    def _ids(self, batch: Any) -> Any:
        return super()._ids(batch["texts"]) if batch["texts"] is not None else ()

    def _loss(self, batch: Any) -> Any:
        return super()._loss(batch["texts"] or batch["plain"])


class TextsBeside(StatefulDataModule):
    """Texts beside a plain loader of other length."""

    def __init__(self, length: int) -> None:
        super().__init__(log_data=True)
        self.length = length

    def train_dataloader(self) -> Any:
        data = Texts()
        sampler = BucketBatchSampler(data.num_tokens, max_tokens=40, num_buckets=4, seed=7)
        plain = DataLoader(Numbers(self.length, first=600), batch_size=1, shuffle=True)
        return CombinedLoader({"texts": DataLoader(data, batch_sampler=sampler), "plain": plain}, "max_size")


@pytest.mark.parametrize("length", [5, 14])
def test_texts_beside_another_loader_are_logged_under_its_path_and_as_zeros_once_there_are_none(length: int) -> None:
    run = train(lambda: TextsBeside(length), model=seeded(OnlyTexts), max_epochs=2)
    served = batches(run.ledger)
    assert sum(bool(batch) for batch in served) == 24
    for (_, values), batch in zip(padding(run), served, strict=True):
        expected = padding_of("tokens", batch) if batch else dict.fromkeys(padding_of("tokens", served[0]), 0.0)
        assert {name.replace("texts/", ""): value for name, value in values.items()} == pytest.approx(expected)


# Resumes


@pytest.mark.parametrize(
    ("find", "make"),
    [
        (logged, LOGGED["mixture"]),
        (logged, LOGGED["by sample, steps"]),
        (padding, lambda: texts.MODULES["tokens"](log_data=True)),
    ],
)
def test_logging_goes_on_exactly(tmp_path: Path, find: Any, make: Any) -> None:
    moments = [("on_train_batch_start", 1, 3), ("on_train_batch_end", 0, 4), ("on_validation_end", 0, 0)]
    saver = SaveAt(tmp_path, moments)
    # Every other step: a step that a crash follows has not been logged yet.
    options: dict[str, Any] = {"log_every_n_steps": 2, "max_epochs": 2}
    whole = find(train(make, callbacks=[saver], **options))
    for number, ledger in saver.ledgers.items():
        resumed = find(train(make, ckpt_path=saver.path(number), seed=99, **options))
        assert resumed
        assert resumed == [(step, values) for step, values in whole if step >= len(trained(ledger))]


# Reports


class Reports(pl.Callback):
    """The reports of module and callback in every hook, beside what the ledger has then."""

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
            callback: Any = next(one for one in trainer.callbacks if isinstance(one, StatefulDataCallback))
            steps = len(trained(module.ledger)) - (hook == "on_before_backward")
            assert callback.position_report() == trainer.datamodule.position_report()
            self.found.append((hook, steps, trainer.current_epoch, trainer.datamodule.position_report()))

        return note


@pytest.mark.parametrize("carries_over", [False, True])
def test_a_report_is_what_the_model_was_trained_on_at_every_moment(tmp_path: Path, carries_over: bool) -> None:
    def make() -> Any:
        return round_robin(num_steps=14) if carries_over else round_robin()

    whole = train(make, max_epochs=2)
    steps = trained(whole.ledger)
    begun, resumed = Reports(), Reports()
    stopped(tmp_path / "stop.ckpt", make, epoch=1, batch=3, callbacks=[begun], max_epochs=2)
    train(make, callbacks=[resumed], ckpt_path=tmp_path / "stop.ckpt", seed=99, max_epochs=2)
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
