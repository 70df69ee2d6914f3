"""The examples run, and show what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


EXACT = "and resumed: same batches True, same weights True"


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs an example with some options, and returns the lines that it prints."""

    def run(name: str, options: str) -> list[str]:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [name, *options.split()])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_the_mixture_of_corpora_follows_its_schedule_and_goes_on_after_a_stop(run_example: Any) -> None:
    lines = run_example("mix_corpora.py", "--steps 80 --stop 47")
    counts = [[int(number) for number in line.split()[3:]] for line in lines[1:5]]

    assert [sum(row) for row in counts] == [20] * 4
    assert [row[1] for row in counts] == [4] * 4
    assert counts[0][2] > counts[1][2] > counts[2][2] > counts[3][2] == 2
    assert lines[5] == f"stopped after step 47 {EXACT}"


# Batches of like lengths go on in tests/data_modules.
@pytest.mark.slow
def test_a_transformer_on_text_in_buckets_wastes_little_and_goes_on_after_a_stop(run_example: Any) -> None:
    lines = run_example("bucket_text.py", "--max-tokens 1024 --steps 10 --stop 6")
    shuffled, in_buckets = (float(line.split(": ")[1].split("%")[0]) for line in lines[1:3])

    assert shuffled > 50
    assert in_buckets < 5
    assert lines[3] == f"stopped after step 6 {EXACT}"


# Loaders are stopped under Fabric in tests/loaders/test_fabric_and_torchrun.py.
@pytest.mark.slow
def test_a_sampler_of_ones_own_goes_on_under_fabric(run_example: Any) -> None:
    lines = run_example("sampler_with_fabric.py", "--epochs 1 --stop 30")

    assert lines[0].startswith("loss after 50 steps: ")
    assert lines[1] == f"stopped after step 30 {EXACT}"


def test_metric_learning_with_a_sampler_of_ones_own_goes_on_after_a_stop(run_example: Any) -> None:
    lines = run_example("metric_learning.py", "--fast")

    assert lines[0].startswith("loss after 30 steps, in epochs of 10: ")
    assert lines[1] == f"stopped after step 14 {EXACT}"


def test_a_ledger_says_that_nothing_was_lost(run_example: Any) -> None:
    lines = run_example("read_ledger.py", "--fast")

    assert lines[0].endswith("10 batches, and 4 that no later start has kept")
    assert lines[-2:] == ["Nothing was trained on twice, and nothing was left out.", "samples of epoch 1: 320 of 320"]


@pytest.mark.slow
def test_a_job_that_is_requeued_goes_on(tmp_path: Path) -> None:
    launcher = tmp_path / "srun"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    names = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "NODEID": "0", "PROCID": "0", "LOCALID": "0", "JOB_ID": "1"}
    slurm = {f"SLURM_{name}": value for name, value in (names | {"JOB_NAME": "bytes", "NODELIST": "localhost"}).items()}

    def run(steps: int) -> str:
        command = ["bash", str(EXAMPLES / "requeue.sbatch"), "--trainer.max_steps", str(steps)]
        environment = os.environ | slurm | {"PATH": path, "RUN": str(tmp_path / "run")}
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=environment, cwd=EXAMPLES.parent, check=True
        )
        return found.stdout + found.stderr

    assert "Resumed" not in run(60)
    lines = run(80)
    assert "resumes on 1 rank: next is batch 51 of 375 of epoch 0" in lines
    assert "Resumed at epoch 0, batch 50 of 375" in lines


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"}
    assert {name for name in files if f"[{name}]({name})" not in table} == set()


def test_a_stream_of_text_shards_goes_on_after_a_stop_with_the_same_and_with_other_workers(run_example: Any) -> None:
    lines = run_example("stream_text.py", "--shards 6 --lines 60 --stop 10")

    assert lines[0].startswith("6 shards, 360 lines, ")
    assert lines[1] == f"stopped after step 10 {EXACT}"
    assert lines[2] == "resumed in three workers: 360 lines once, 0 more than once"


# A stream is stopped, and read on by three workers, above; packed ones are in tests/trainer/test_packed_streams_ddp.py.
@pytest.mark.slow
def test_pretraining_on_a_packed_stream_goes_on_after_a_stop_and_loses_no_token(run_example: Any) -> None:
    lines = run_example("pretrain_text.py", "--fast")

    assert lines[0].startswith("4 files, ")
    assert lines[1] == f"stopped after step 5 {EXACT}"
    assert lines[2] == "resumed in three workers: 0 tokens lost, 0 more than once"


# The same datasets are in tests/harm and tests/stream_loader.
@pytest.mark.slow
def test_iterable_datasets_that_divide_themselves_become_shards_for_any_ranks(run_example: Any) -> None:
    lines = run_example("migrate_iterables.py", "--fast")

    assert [line.split(":")[0] for line in lines[::3]] == ["torchtitan's", "of one's own"]
    assert all(int(line.split()[-11]) > 100 for line in lines[::3])
    assert lines[1::3] == ["  stopped after step 5 and resumed: same batches and weights True"] * 2
    assert lines[2::3] == ["  begun on one rank, read on by three: every window once True"] * 2


# Patched loaders in such a loop are killed in tests/loaders/test_fabric_and_torchrun.py.
@pytest.mark.slow
def test_a_bare_loop_under_torchrun_goes_on_after_it_was_broken_off(tmp_path: Path) -> None:
    def run(checkpoint: str, *options: str) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [str(EXAMPLES / "sampler_with_torchrun.py"), "--checkpoint", str(tmp_path / checkpoint)]
        command = [*launcher, *script, "--epochs", "1", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()

    whole, stopped, resumed = run("whole.pt"), run("last.pt", "--stop", "17"), run("last.pt")

    assert stopped[-1].startswith("step 10: ")
    assert resumed[0] == "goes on after step 10, in epoch 0"
    assert resumed[-1] == whole[-1]
    assert whole[-1].endswith(" after step 25")
