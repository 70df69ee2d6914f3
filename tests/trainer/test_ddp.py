"""Two real ranks: every rank's own ledger goes on exactly, and another number of ranks takes over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import data_cases, ddp_cases, fsdp_cases
from support.ranks import run_on_ranks
from support.runs import assert_stitches, train

from lightning_stateful.errors import StateMismatchError

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    # What one process leaves behind is picked up by two, in `resumed_on_two_ranks`.
    train(max_steps=5).trainer.save_checkpoint(folder / "one.ckpt")
    cases = [*ddp_cases.ALL, *fsdp_cases.ALL, *data_cases.ALL]
    return run_on_ranks([(case.__module__, case.__name__) for case in cases], 2, folder)


def of(ranks: Ranks, name: str) -> list[Any]:
    results = [rank[name] for rank in ranks]
    assert not any(isinstance(result, str) for result in results), results
    return results


def trained(ledger: list[Any]) -> list[Any]:
    return [event for event in ledger if event[0] == "train"]


def samples(ledger: list[Any], epoch: int) -> list[int]:
    return [index for event in trained(ledger) if event[1] == epoch for index in event[4]]


def test_an_epoch_gives_every_sample_once_over_the_ranks(ranks: Ranks) -> None:
    ledgers = [run["ledger"] for run in of(ranks, "uninterrupted")]
    for epoch in range(2):
        assert sorted(samples(ledgers[0], epoch) + samples(ledgers[1], epoch)) == list(range(22))
    assert len(trained(ledgers[0])) == len(trained(ledgers[1])) == 12


def test_a_run_stopped_in_any_hook_goes_on_exactly_on_every_rank(ranks: Ranks) -> None:
    for whole, pairs in zip(of(ranks, "uninterrupted"), of(ranks, "every_moment"), strict=True):
        for moment, (first, resumed) in zip(ddp_cases.MOMENTS, pairs, strict=True):
            assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"])
            assert resumed["weights"] == whole["weights"], moment
            assert resumed["end"] == whole["end"], moment


def test_22_ranks_that_get_signals_inside_different_steps_save_together_and_go_on_exactly(ranks: Ranks) -> None:
    for whole, runs in zip(of(ranks, "uninterrupted"), of(ranks, "signals_inside_a_step"), strict=True):
        for first, resumed in runs:
            assert 7 <= len(trained(first["ledger"])) <= 10
            assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"])
            assert (resumed["weights"], resumed["end"]) == (whole["weights"], whole["end"])


def test_open_accumulation_windows_are_served_again_on_every_rank(ranks: Ranks) -> None:
    for whole, pairs in zip(of(ranks, "uninterrupted_with_windows"), of(ranks, "every_moment_in_windows"), strict=True):
        for first, resumed in pairs:
            assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"])
            assert resumed["weights"] == whole["weights"]


def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank(ranks: Ranks) -> None:
    for whole, parts in zip(of(ranks, "uninterrupted"), of(ranks, "chain"), strict=True):
        assert_stitches([part["ledger"] for part in parts], whole["ledger"])
        assert parts[-1]["weights"] == whole["weights"]
        assert parts[-1]["end"] == whole["end"]


def test_workers_change_nothing_on_any_rank(ranks: Ranks) -> None:
    for whole, (first, resumed) in zip(of(ranks, "uninterrupted"), of(ranks, "with_workers"), strict=True):
        assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"], 0)
        assert resumed["weights"] == whole["weights"]


def test_the_callback_alone_does_the_same_under_the_default_distributed_sampler(ranks: Ranks) -> None:
    for whole, (first, resumed, reference) in zip(of(ranks, "uninterrupted"), of(ranks, "callback_alone"), strict=True):
        assert_stitches([first["ledger"], resumed["ledger"]], reference["ledger"], 0)
        assert resumed["weights"] == reference["weights"]
        assert [event[4] for event in trained(reference["ledger"])] == [event[4] for event in trained(whole["ledger"])]


@pytest.mark.parametrize("case", ["sharded_stream", "sharded_validation_due"])
def test_fsdp2_which_restores_late_goes_on_exactly(ranks: Ranks, case: str) -> None:
    for first, resumed, whole in of(ranks, case):
        assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"], 0)
        assert resumed["weights"] == whole["weights"]
        assert resumed["end"] == whole["end"]


def test_fsdp2_with_another_batch_size_serves_every_sample_once(ranks: Ranks) -> None:
    served = [
        index
        for first, resumed, _ in of(ranks, "sharded_other_batch_size")
        for index in samples(first["ledger"] + resumed["ledger"], 0)
    ]
    assert sorted(served) == list(range(22))


def test_8_the_state_needs_no_other_rank(ranks: Ranks) -> None:
    for _, asked in of(ranks, "exception_on_one_rank"):
        assert asked["state"]["progress"] == {"epoch": 1, "cycle": 0, "consumed": 8}


def test_the_state_is_equal_on_all_ranks(ranks: Ranks) -> None:
    first, second = of(ranks, "states_of_all_ranks")
    assert first == second


@pytest.mark.parametrize("batch_size", [2, 3])
def test_two_ranks_hand_over_to_one_without_losing_a_sample(ranks: Ranks, folder: Path, batch_size: int) -> None:
    before = [run["ledger"] for run in of(ranks, "saved_on_two_ranks")]
    path = folder / "saved_on_two_ranks" / "two.ckpt"
    resumed = train(lambda: ddp_cases.numbers_module(batch_size=batch_size), ckpt_path=path, max_epochs=2)
    seen = samples(before[0], 1) + samples(before[1], 1) + samples(resumed.ledger, 1)
    assert len(samples(before[0], 1)) == 4
    assert sorted(seen) == list(range(22))
    # The epoch goes on in the steps of the new topology, and ends where they end.
    last = trained(resumed.ledger)[-1]
    assert last[1:3] == (1, -(-22 // batch_size) - 1)


def test_one_rank_hands_over_to_two_without_losing_a_sample(ranks: Ranks) -> None:
    before = train(max_steps=5).ledger
    after = [run["ledger"] for run in of(ranks, "resumed_on_two_ranks")]
    assert sorted(samples(before, 0) + samples(after[0], 0) + samples(after[1], 0)) == list(range(22))
    assert len(trained(after[0])) == len(trained(after[1]))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_lengths", ["length", "rank 0: 22, rank 1: 26"]),
        ("other_seeds", ["seed", "rank 0", "rank 1"]),
    ],
)
def test_16_ranks_that_disagree_are_refused_on_every_rank(ranks: Ranks, case: str, words: list[str]) -> None:
    for rank in ranks:
        assert rank[case].startswith("RankMismatchError: The ranks disagree about the training data")
        assert all(word in rank[case] for word in words)


def test_16_a_rank_that_cannot_build_its_data_stops_all_ranks(ranks: Ranks) -> None:
    assert ranks[0]["fails_on_one_rank"].startswith("RankMismatchError: the training data could not be built")
    assert "rank 1: OSError: disk not mounted" in ranks[0]["fails_on_one_rank"]
    assert ranks[1]["fails_on_one_rank"] == "OSError: disk not mounted"


def test_evaluation_gives_each_sample_once_with_equal_steps(ranks: Ranks) -> None:
    first, second = of(ranks, "evaluation")
    for case, batches in first.items():
        length = int(case.split(",")[0])
        assert len(batches) == len(second[case]), case
        seen = [index for batch in batches + second[case] for index in batch]
        # Only where there are fewer samples than ranks can a rank not be given one of its own.
        assert sorted(seen) == (list(range(length)) if length > 1 else [0, 0]), case
        steps = [index for mine, other in zip(batches, second[case], strict=True) for index in mine + other]
        assert steps == sorted(steps), case


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_plain_evaluation_loaders_are_exact_too(ranks: Ranks, how: str) -> None:
    first, second = (found[how] for found in of(ranks, "plain_evaluation_loaders"))
    assert sorted(index for batch in first + second for index in batch) == list(range(7))
    assert len(first) == len(second)


def test_rank_0_alone_may_test_within_a_fit_and_after_it(ranks: Ranks) -> None:
    first, second = of(ranks, "tested_on_rank_0")
    assert first["steps"] == second["steps"] == 6
    assert second["seen"] == {}
    assert first["seen"].keys() == {"within", "after", "stream"}
    for seen in first["seen"].values():
        assert sorted(index for batch in seen for index in batch) == list(range(5))


def assert_goes_on_as_uninterrupted(parts: list[dict[str, Any]]) -> None:
    first, resumed, whole = parts
    assert_stitches([first["ledger"], resumed["ledger"]], whole["ledger"], 0)
    assert resumed["weights"] == whole["weights"]


def test_without_use_distributed_sampler_ranks_train_on_all_of_their_own_data(ranks: Ranks, folder: Path) -> None:
    for rank, parts in enumerate(of(ranks, "own_data")):
        assert_goes_on_as_uninterrupted(parts)
        own = list(range(100 * rank, 100 * rank + 11))
        for epoch in range(2):
            assert sorted(samples(parts[2]["ledger"], epoch)) == own
            validated = [event[4] for event in parts[2]["ledger"] if event[:2] == ("val", epoch)]
            assert [index for batch in validated for index in batch] == own[: 2 + rank]
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2.*resume on the saved ranks"):
        train(lambda: ddp_cases.numbers_module(train=ddp_cases.Numbers(11)), ckpt_path=folder / "own_data" / "own.ckpt")


def test_without_use_distributed_sampler_samplers_deal_out_by_themselves(ranks: Ranks) -> None:
    first, second = of(ranks, "samplers_of_each_rank")
    for name, parts in first.items():
        assert_goes_on_as_uninterrupted(parts)
        assert_goes_on_as_uninterrupted(second[name])
        for epoch in range(2):
            served = [samples(run[name][2]["ledger"], epoch) for run in (first, second)]
            assert sorted(served[0] + served[1]) == list(range(22)), name


def test_data_of_each_rank_that_cannot_be_resumed_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["own_lengths_differ"].startswith("RankMismatchError: The ranks disagree about the training data")
        assert "length: rank 0: 22, rank 1: 26" in rank["own_lengths_differ"]
        assert "use_distributed_sampler=False leaves the training loader as each rank has it" in rank["own_streams"]


def test_ranks_draw_other_dropout(ranks: Ranks) -> None:
    first, second = of(ranks, "dropout_by_rank")
    assert not set(first) & set(second)


def test_data_of_another_fingerprint_are_trained_on_with_a_warning(ranks: Ranks) -> None:
    found = of(ranks, "fingerprints_of_its_own")
    assert found[0]["fingerprint"] != found[1]["fingerprint"]
    for rank in found:
        (first, resumed) = ([event[4] for event in trained(part)] for part in rank["parts"])
        assert (len(first), len(resumed)) == (3, 3)
    seen = [event[4] for rank in found for part in rank["parts"] for event in trained(part)]
    assert sorted(index for batch in seen for index in batch) == list(range(22))
    said = found[0]["warned"]
    assert any("The ranks have" in text and "dataset.fingerprint" in text for text in said)
    assert any("state was made with" in text and "dataset.fingerprint" in text for text in said)


def test_ranks_with_other_rows_are_refused_unless_that_is_accepted(ranks: Ranks) -> None:
    for rank in ranks:
        assert re.search(
            r"dataset.rows: rank 0: .*, rank 1: .*accept=\('dataset.rows',\)", rank["other_rows"], re.DOTALL
        )
        assert rank["other_rows_accepted"] == 8
        # That samples are as many as there are steps for cannot be waived.
        assert "length: rank 0: 22, rank 1: 26" in rank["other_lengths_accepted"]


def test_the_order_of_a_description_is_no_difference_and_that_of_loaders_is_named(ranks: Ranks) -> None:
    assert of(ranks, "described_in_another_order")[0] > 8
    for rank in ranks:
        words = "order of loaders: rank 0: ['a', 'b'], rank 1: ['b', 'a']"
        assert words in rank["loaders_in_another_order"]


def test_single_samples_that_are_left_are_joined_where_that_can_be_and_repeated_elsewhere(ranks: Ranks) -> None:
    first, second = of(ranks, "evaluation_of_shapes")
    for way in first:
        batches, said = first[way]
        assert len(batches) == len(second[way][0])
        seen = sorted(index for batch in batches + second[way][0] for index in batch)
        exact = way in ("alike", "fitting pair")
        assert (seen == list(range(5))) == exact == (not said), (way, seen, said)
        assert set(seen) == set(range(5))
        assert len(seen) == 6 - exact
        assert exact or "1 of 5" in said[0]
        assert exact or "two samples of other shapes cannot be collated" in said[0]
