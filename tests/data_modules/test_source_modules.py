"""Round robin and mixtures in a Trainer: what they serve, and what is refused."""

from __future__ import annotations

import pytest
from support.ledger import LedgerModel, Numbers, ids_of, samples, trained
from support.runs import assert_same_end, train
from support.sources import EVERY_SAMPLE, LENGTHS, MODULES, Beside, round_robin, samples_of, source_of

from lightning_stateful.errors import ConfigurationError, StatefulWarning


def test_round_robin_serves_whole_batches_in_turn_and_every_sample_once() -> None:
    run = train(MODULES["round robin"])
    for epoch in range(3):
        assert sorted(samples(run.ledger, epoch)) == EVERY_SAMPLE
    steps = [event for event in trained(run.ledger) if event[1] == 0]
    assert [event[4][0] for event in steps[:12]] == ["news", "code", "web"] * 4
    assert [len(ids_of(event)) for event in steps[:6]] == [2, 3, 1, 2, 3, 1]
    assert all({source_of(index) for index in ids_of(event)} == {event[4][0]} for event in steps)
    assert samples(run.ledger, 0) != samples(run.ledger, 1)


@pytest.mark.parametrize("name", ["round robin, steps", "mixture, steps", "by sample, steps", "schedule"])
def test_with_steps_every_source_goes_on_in_the_next_epoch_where_it_stands(name: str) -> None:
    ledger = train(MODULES[name], max_epochs=6).ledger
    for source, length in LENGTHS.items():
        served = samples_of(source, ledger)
        assert len(served) > length, "too short to show anything"
        for start in range(0, len(served) - length + 1, length):
            assert len(set(served[start : start + length])) == length, (source, start)


def test_a_limited_epoch_with_a_stop_rule_begins_anew() -> None:
    run = train(MODULES["round robin"], limit_train_batches=5)
    assert [event[2] for event in trained(run.ledger)] == [0, 1, 2, 3, 4] * 3
    assert all(len(set(samples(run.ledger, epoch))) == 11 for epoch in range(3))


def test_a_limit_that_cuts_epochs_with_steps_short_is_warned_of() -> None:
    with pytest.warns(StatefulWarning, match="cuts epochs of num_steps=8 after 3 steps.*Pass num_steps=3"):
        train(lambda: round_robin(num_steps=8), limit_train_batches=3, max_epochs=1)


# Objects used again


def test_a_module_that_is_fitted_again_begins_anew() -> None:
    data = MODULES["mixture, steps"]()
    first, second = train(lambda: data), train(lambda: data)
    assert second.ledger == first.ledger
    assert_same_end(second, first)


def test_sources_with_num_steps_beside_a_longer_loader_are_refused_before_anything_is_trained() -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match="cannot start over within one"):
        train(lambda: Beside(20, num_steps=7), model=model)
    assert model.ledger == []


def test_a_module_without_names_calls_its_sources_by_number() -> None:
    data = round_robin(train=[Numbers(4), Numbers(6, first=100)], batch_size=[1, 2], val=None)
    run = train(lambda: data, max_epochs=1)
    assert sorted(samples(run.ledger)) == [*range(4), *range(100, 106)]
    assert list(run.trainer.datamodule.batch_sampler().position_report()["sources"]) == ["0", "1"]


def test_names_that_are_equal_as_strings_lose_no_dataset() -> None:
    with pytest.raises(ConfigurationError, match="'1'"):
        round_robin(train={1: Numbers(4), "1": Numbers(6, first=100)}, batch_size=2).train_dataloader()
