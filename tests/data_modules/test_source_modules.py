"""Round robin and mixtures in a Trainer go on exactly, whatever the moment, the trainer's options and the stop rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.ledger import LedgerModel, Numbers
from support.runs import assert_same_end, train
from support.sources import (
    EVERY_SAMPLE,
    LENGTHS,
    MODULES,
    Beside,
    ids_of,
    mixture,
    round_robin,
    samples,
    samples_of,
    source_of,
    train_on,
    trained,
)

from lightning_stateful.errors import ConfigurationError, StatefulWarning

MOMENTS = [
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 1, 3),
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 4),
    ("on_train_batch_end", 1, 5),
    ("on_validation_start", 1, 0),
    ("on_validation_batch_end", 1, 1),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
]
HARDEST = [("on_before_backward", 1, 2), ("on_train_batch_end", 0, 4)]


def assert_goes_on_from_every_moment(
    folder: Path, make: Any, moments: list[tuple[str, int, int]] = MOMENTS, **options: Any
) -> Any:
    return sources.assert_goes_on_from_every_moment(folder, make, moments, train_on, **options)


@pytest.mark.parametrize("name", MODULES)
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    every = name in ("round robin", "by sample, steps")
    assert_goes_on_from_every_moment(tmp_path, MODULES[name], MOMENTS if every else HARDEST)


@pytest.mark.parametrize("name", ["round robin", "round robin, steps"])
def test_a_run_saved_at_the_last_batch_of_an_epoch_begins_the_next_one(tmp_path: Path, name: str) -> None:
    make = MODULES[name]
    last = len(make().train_dataloader()) - 1
    moments = [("on_train_batch_end", 0, last), ("on_train_batch_end", 1, last)]
    assert_goes_on_from_every_moment(tmp_path, make, moments)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulating": {"accumulate_grad_batches": 3},
    "limited": {"limit_train_batches": 6},
    "reloading": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3},
    "counting steps": {"max_steps": 29, "max_epochs": -1},
}
FEWER_MOMENTS = [
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 4),
    ("on_validation_batch_end", 1, 1),
    ("on_train_epoch_end", 0, 0),
]


@pytest.mark.filterwarnings("ignore:limit_train_batches cuts epochs")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("by sample, steps", "accumulating"),
        ("round robin", "limited"),
        ("by sample, steps", "limited"),
        ("by sample, steps", "reloading"),
        ("round robin", "counting steps"),
    ],
)
def test_the_trainers_options_change_nothing_about_it(tmp_path: Path, name: str, options: str) -> None:
    moments = [("on_before_backward", 1, 2), ("on_train_batch_end", 0, 4), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, MODULES[name], moments, **OPTIONS[options])


def test_workers_that_have_fetched_ahead_change_nothing(tmp_path: Path) -> None:
    def make(workers: int) -> Any:
        return lambda: mixture(by="sample", num_steps=8, tag="source", num_workers=workers)

    whole = assert_goes_on_from_every_moment(tmp_path, make(2), [("on_train_batch_end", 1, 3)])
    assert whole.ledger == train_on(make(0), max_epochs=2).ledger


# What is served


def test_round_robin_serves_whole_batches_in_turn_and_every_sample_once() -> None:
    run = train_on(MODULES["round robin"])
    for epoch in range(3):
        assert sorted(samples(run.ledger, epoch)) == EVERY_SAMPLE
    steps = [event for event in trained(run.ledger) if event[1] == 0]
    assert [event[4][0] for event in steps[:12]] == ["news", "code", "web"] * 4
    assert [len(ids_of(event)) for event in steps[:6]] == [2, 3, 1, 2, 3, 1]
    assert all({source_of(index) for index in ids_of(event)} == {event[4][0]} for event in steps)
    assert samples(run.ledger, 0) != samples(run.ledger, 1)


@pytest.mark.parametrize("name", ["round robin, steps", "mixture, steps", "by sample, steps", "schedule"])
def test_with_steps_every_source_goes_on_in_the_next_epoch_where_it_stands(name: str) -> None:
    ledger = train_on(MODULES[name], max_epochs=6).ledger
    for source, length in LENGTHS.items():
        served = samples_of(source, ledger)
        assert len(served) > length, "too short to show anything"
        for start in range(0, len(served) - length + 1, length):
            assert len(set(served[start : start + length])) == length, (source, start)


def test_a_limited_epoch_with_a_stop_rule_begins_anew() -> None:
    run = train_on(MODULES["round robin"], limit_train_batches=5)
    assert [event[2] for event in trained(run.ledger)] == [0, 1, 2, 3, 4] * 3
    assert all(len(set(samples(run.ledger, epoch))) == 11 for epoch in range(3))


def test_a_limit_that_cuts_epochs_with_steps_short_is_warned_of() -> None:
    with pytest.warns(StatefulWarning, match="cuts epochs of num_steps=8 after 3 steps.*Pass num_steps=3"):
        train_on(lambda: round_robin(num_steps=8), limit_train_batches=3, max_epochs=1)


# Objects used again


@pytest.mark.parametrize("name", ["mixture, steps"])
def test_a_module_that_is_fitted_again_begins_anew(name: str) -> None:
    data = MODULES[name]()
    first = train_on(lambda: data)
    second = train_on(lambda: data)
    assert second.ledger == first.ledger
    assert_same_end(second, first)


@pytest.mark.parametrize("name", ["by sample, steps"])
def test_a_trainer_that_is_fitted_again_goes_on_within_the_epoch(name: str) -> None:
    whole = train_on(MODULES[name])
    model, data = None, MODULES[name]()
    for max_steps in (5, 11, -1):
        if model is None:
            run = train_on(lambda: data, max_steps=max_steps)
            model = run.trainer.lightning_module
            continue
        run.trainer.fit_loop.epoch_loop.max_steps = max_steps
        run.trainer.fit(model, datamodule=data)
    # Lightning makes a new optimizer for each fit, so weights differ.
    assert [event[4] for event in trained(model.ledger)] == [event[4] for event in trained(whole.ledger)]


# Beside another loader


@pytest.mark.parametrize(("length", "num_steps"), [(14, None), (5, None), (9, 9)])
def test_sources_beside_another_loader_go_on_exactly(tmp_path: Path, length: int, num_steps: int | None) -> None:
    last = (num_steps or 14) - 1
    moments = [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 4), ("on_train_batch_end", 0, last)]
    sources.assert_goes_on_from_every_moment(
        tmp_path, lambda: Beside(length, num_steps), moments, served_again=0, max_epochs=3
    )


def test_sources_with_num_steps_beside_a_longer_loader_are_refused_before_anything_is_trained() -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match="cannot start over within one"):
        train(lambda: Beside(20, num_steps=7), model=model)
    assert model.ledger == []


def test_a_module_without_names_calls_its_sources_by_number() -> None:
    data = round_robin(train=[Numbers(4), Numbers(6, first=100)], batch_size=[1, 2], val=None)
    run = train_on(lambda: data, max_epochs=1)
    assert sorted(samples(run.ledger)) == [*range(4), *range(100, 106)]
    assert list(run.trainer.datamodule.batch_sampler().position_report()["sources"]) == ["0", "1"]


def test_names_that_are_equal_as_strings_lose_no_dataset() -> None:
    with pytest.raises(ConfigurationError, match="'1'"):
        round_robin(train={1: Numbers(4), "1": Numbers(6, first=100)}, batch_size=2).train_dataloader()
