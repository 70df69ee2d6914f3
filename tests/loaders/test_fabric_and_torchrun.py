"""Patched loaders without a Trainer: under Fabric, and in a bare loop that is killed, as torchrun starts it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from support.plain_loop import (
    HOLD,
    LENGTH,
    ON_RANKS,
    PLAIN,
    STOP,
    bare_loop,
    fabric_on_ranks,
    fabric_run,
    held_loop,
    ids_of,
    killed_loop,
)
from support.ranks import Ranks, kill, ledger_of, start_ranks, wait_for_steps

from lightning_stateful.loaders import patch_dataloader

SAMPLES = list(range(LENGTH))


def one_process() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def flat(epochs: list[list[list[int]]]) -> list[list[int]]:
    return [batch for epoch in epochs for batch in epoch]


def rest_on_one_rank(name: str, state: Any) -> list[int]:
    loader = patch_dataloader(PLAIN[name](), num_replicas=1, rank=0)
    loader.load_state_dict(state)
    return [index for batch in loader for index in ids_of(batch)]


def batches_of_one_rank(name: str) -> list[list[list[int]]]:
    """The batches of two epochs."""
    loader = patch_dataloader(PLAIN[name](), num_replicas=1, rank=0)
    return [[ids_of(batch) for batch in loader] for _ in range(2)]


def in_turn(batches: list[list[int]]) -> list[list[list[int]]]:
    """Whole batches for two ranks in turn; they are never cut, and a last one without another goes to both."""
    batches = [*batches, batches[-1]] if len(batches) % 2 else batches
    return [batches[0::2], batches[1::2]]


class TestFabricOnOneProcess:
    def test_a_run_that_was_saved_as_plain_data_goes_on_exactly(self, tmp_path: Path) -> None:
        fabric, checkpoint = one_process(), tmp_path / "last.ckpt"
        whole, before, after = (
            fabric_run(fabric, "workers", **options) for options in ({}, {"save": checkpoint}, {"load": checkpoint})
        )

        assert flat(before["epochs"]) + flat(after["epochs"]) == flat(whole["epochs"])
        assert after["weights"] == whole["weights"]
        assert torch.load(checkpoint, weights_only=True)["loader"] == before["state"]

    def test_epochs_differ_and_fabrics_count_of_them_changes_nothing(self) -> None:
        patched = patch_dataloader(PLAIN["sampler"]())
        loader = one_process().setup_dataloaders(patched)
        first = [ids_of(batch) for batch in loader]
        broken_off = [ids_of(next(iter(loader)))]
        third = [ids_of(batch) for batch in loader]

        alone = patch_dataloader(PLAIN["sampler"]())
        expected = [[ids_of(batch) for batch in alone] for _ in range(3)]
        assert [first, broken_off, third] == [expected[0], expected[1][:1], expected[2]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The batches of every loader on each of two processes under Fabric."""
    return Ranks(2, tmp_path_factory.mktemp("fabric")).of(fabric_on_ranks)


class TestFabricOnTwoRanks:
    @pytest.mark.parametrize("name", ON_RANKS)
    def test_a_run_that_was_saved_goes_on_exactly_and_on_one_rank_too(
        self, ranks: list[dict[str, Any]], name: str
    ) -> None:
        for epoch in range(2):
            own = [rank[name]["whole"]["epochs"][epoch] for rank in ranks]
            if name == "batch sampler":
                assert own == in_turn(batches_of_one_rank(name)[epoch])
            else:
                assert sorted(index for batches in own for batch in batches for index in batch) == SAMPLES
        begun = [index for rank in ranks for batch in flat(rank[name]["before"]["epochs"]) for index in batch]
        state = ranks[0][name]["before"]["state"]
        assert state == ranks[1][name]["before"]["state"]
        assert sorted(begun + rest_on_one_rank(name, state)) == SAMPLES
        for rank in ranks:
            whole, before, after = (rank[name][run] for run in ("whole", "before", "after"))
            assert flat(before["epochs"]) + flat(after["epochs"]) == flat(whole["epochs"])
            assert len(flat(before["epochs"])) == STOP
            assert after["weights"] == whole["weights"]
            assert after["state"] == whole["state"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed within a step of the second epoch and run again; "bare_loop" beside it was not killed."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = Ranks(2, folder)
    ranks.of(bare_loop)
    path = folder / "killed"
    path.mkdir()
    processes = start_ranks(held_loop, path)
    try:
        wait_for_steps(HOLD + 1, processes, path)
        while len(ledger_of(path, 1)) <= HOLD:
            time.sleep(0.01)
    finally:
        kill(processes)
    (folder / "state.pt").write_bytes((path / "last.pt").read_bytes())
    ranks.of(killed_loop)
    return path


class TestBareLoop:
    def test_every_rank_trains_on_what_it_would_have_trained_on_to_the_same_weights(self, killed: Path) -> None:
        whole = killed.with_name("bare_loop")
        for rank in range(2):
            ledger = ledger_of(killed, rank)

            # The step within which it was killed is taken again, on the same samples.
            assert ledger[HOLD] == ledger[HOLD + 1]
            assert ledger[:HOLD] + ledger[HOLD + 1 :] == ledger_of(whole, rank)
        assert (killed / "weights.json").read_text() == (whole / "weights.json").read_text()

    def test_on_one_rank_the_rest_of_the_epoch_comes_once(self, killed: Path) -> None:
        state = torch.load(killed.with_name("state.pt"), weights_only=True)["loader"]
        whole = killed.with_name("bare_loop")
        done = [ids for rank in range(2) for step, ids in ledger_of(whole, rank) if step < HOLD]
        served = Counter(index for ids in done for index in ids)
        served.update(rest_on_one_rank("batch sampler", state))

        assert served == dict.fromkeys(SAMPLES, state["progress"]["epoch"] + 1)
        assert state["progress"]["consumed"]
