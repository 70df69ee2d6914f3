"""Patched loaders without a Trainer: under Fabric, and in a bare loop under torchrun that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from support.plain_loop import LENGTH, PLAIN, STOP, Samples, fabric_run, ids_of
from support.ranks import ledger_of, run_on_ranks

from lightning_stateful.loaders import StatefulLoader, patch_dataloader, take_over

TESTS = Path(__file__).parents[1]
SAMPLES = list(range(LENGTH))
# The step in which the run under torchrun is killed, within its second epoch.
HOLD = 9


def one_process() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def flat(epochs: list[list[list[int]]]) -> list[list[int]]:
    return [batch for epoch in epochs for batch in epoch]


def rest_on_one_rank(name: str, state: Any) -> list[int]:
    loader = patch_dataloader(PLAIN[name](), num_replicas=1, rank=0)
    loader.load_state_dict(state)
    return [index for batch in loader for index in ids_of(batch)]


class TestFabricOnOneProcess:
    @pytest.mark.parametrize("name", PLAIN)
    def test_a_run_that_was_saved_goes_on_exactly(self, name: str, tmp_path: Path) -> None:
        fabric, checkpoint = one_process(), tmp_path / "last.ckpt"
        whole = fabric_run(fabric, name)
        before = fabric_run(fabric, name, save=checkpoint)
        after = fabric_run(fabric, name, load=checkpoint)

        assert flat(before["epochs"]) + flat(after["epochs"]) == flat(whole["epochs"])
        assert after["weights"] == whole["weights"]

    def test_a_checkpoint_is_plain_data(self, tmp_path: Path) -> None:
        fabric = one_process()
        patched = patch_dataloader(PLAIN["batch sampler"]())
        loader = fabric.setup_dataloaders(patched)
        next(iter(loader))
        fabric.save(tmp_path / "last.ckpt", {"loader": loader})

        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["loader"] == patched.state_dict()

    def test_epochs_differ_and_fabrics_count_of_them_changes_nothing(self) -> None:
        patched = patch_dataloader(PLAIN["sampler"]())
        loader = one_process().setup_dataloaders(patched)
        first = [ids_of(batch) for batch in loader]
        # One that only looks.
        next(iter(loader))
        second = [ids_of(batch) for batch in loader]

        alone = patch_dataloader(PLAIN["sampler"]())
        assert [first, second] == [[ids_of(batch) for batch in alone] for _ in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every loader gave on each of two processes."""
    folder = tmp_path_factory.mktemp("fabric")
    found = run_on_ranks([("support.plain_loop", "fabric_on_ranks")], 2, folder)
    results = [rank["fabric_on_ranks"] for rank in found]
    assert all(isinstance(result, dict) for result in results), results
    return results


class TestFabricOnTwoRanks:
    @pytest.mark.parametrize("name", PLAIN)
    def test_every_sample_comes_once_over_the_ranks(self, ranks: list[dict[str, Any]], name: str) -> None:
        for epoch in range(2):
            own = [rank[name]["whole"]["epochs"][epoch] for rank in ranks]
            assert sorted(index for batches in own for batch in batches for index in batch) == SAMPLES
            assert len({len(batches) for batches in own}) == 1

    @pytest.mark.parametrize("name", PLAIN)
    def test_a_run_that_was_saved_goes_on_exactly(self, ranks: list[dict[str, Any]], name: str) -> None:
        assert ranks[0][name]["before"]["state"] == ranks[1][name]["before"]["state"]
        for rank in ranks:
            whole, before, after = (rank[name][run] for run in ("whole", "before", "after"))
            assert flat(before["epochs"]) + flat(after["epochs"]) == flat(whole["epochs"])
            assert len(flat(before["epochs"])) == STOP
            assert after["weights"] == whole["weights"]
            assert after["state"] == whole["state"]

    @pytest.mark.parametrize("name", PLAIN)
    def test_resumed_on_one_rank_the_rest_comes_once(self, ranks: list[dict[str, Any]], name: str) -> None:
        begun = [index for rank in ranks for batch in flat(rank[name]["before"]["epochs"]) for index in batch]

        for rank in ranks:
            assert sorted(begun + rest_on_one_rank(name, rank[name]["before"]["state"])) == SAMPLES


def torchrun(folder: Path, hold: int = 0) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*launcher, "-m", "support.plain_loop", str(folder), str(hold)],
            env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End torchrun and the ranks it has started, each of which leads a session of its own, with SIGKILL."""
    process.kill()
    process.wait()
    for path in folder.glob("pid*"):
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was not killed, and one that was killed within a step of the second epoch and run again."""
    folder = tmp_path_factory.mktemp("torchrun")
    whole, killed = folder / "whole", folder / "killed"
    process = torchrun(killed, HOLD)
    try:
        deadline = time.monotonic() + 120
        while min(len(ledger_of(killed, rank)) for rank in range(2)) <= HOLD:
            assert process.poll() is None, (killed / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the run did not begin"
            time.sleep(0.01)
    finally:
        kill(process, killed)
    (folder / "state.pt").write_bytes((killed / "last.pt").read_bytes())
    processes = {at: torchrun(at) for at in (whole, killed)}
    for at, other in processes.items():
        try:
            assert other.wait(timeout=200) == 0, (at / "log").read_text()[-3000:]
        finally:
            kill(other, at) if other.returncode is None else None
    return {"whole": whole, "killed": killed, "state": folder / "state.pt"}


class TestTorchrun:
    def test_every_rank_trains_on_what_it_would_have_trained_on(self, folders: dict[str, Path]) -> None:
        for rank in range(2):
            whole, killed = (ledger_of(folders[name], rank) for name in ("whole", "killed"))

            # The step within which it was killed is taken again, on the same samples.
            assert killed[HOLD] == killed[HOLD + 1]
            assert killed[:HOLD] + killed[HOLD + 1 :] == whole

    def test_it_ends_with_the_same_weights(self, folders: dict[str, Path]) -> None:
        whole, killed = (json.loads((folders[name] / "weights.json").read_text()) for name in ("whole", "killed"))

        assert whole == killed

    def test_on_one_rank_the_rest_of_the_epoch_comes_once(self, folders: dict[str, Path]) -> None:
        state = torch.load(folders["state"], weights_only=True)["loader"]
        done = [ids for rank in range(2) for step, ids in ledger_of(folders["whole"], rank) if step < HOLD]
        served = Counter(index for ids in done for index in ids)
        served.update(rest_on_one_rank("batch sampler", state))

        assert served == dict.fromkeys(SAMPLES, state["progress"]["epoch"] + 1)
        assert state["progress"]["consumed"]


def test_a_loader_set_up_by_a_plain_loop_asks_for_the_ranks_at_the_first_batch() -> None:
    loader = patch_dataloader(PLAIN["sampler"]())

    assert isinstance(loader, StatefulLoader)
    assert isinstance(loader.dataset, Samples)
    assert loader.tracker.num_replicas is None
    assert take_over(loader, num_replicas=2, rank=1).topology.num_replicas == 2
