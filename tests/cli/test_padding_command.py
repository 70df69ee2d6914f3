"""The command line says what the sampler would do or, in one line and never with a traceback, why it cannot."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from support.bucket_cases import in_budget

import lightning_stateful
from lightning_stateful.bucketing import QuadraticCost
from lightning_stateful.cli import main
from lightning_stateful.cli.commands import group
from lightning_stateful.report.padding import padding_report, summary
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

CLI = "lightning_stateful.cli"
LENGTHS = np.random.default_rng(1).integers(1, 60, 400).astype(np.uint16)
BUDGET = ("--max-tokens", "200")


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


class Told:
    """The exit code of a command, and its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
        self.code = main(["padding", *arguments])
        self.out, self.err = capsys.readouterr()


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "batch size": (("--batch-size", "8", "--seed", "5"), {"batch_size": 8, "seed": 5}),
    "samples": (
        (*BUDGET, "--multiple", "8", "--max-samples", "16"),
        {"max_tokens": 200, "multiple": 8, "max_samples": 16},
    ),
    "cost": ((*BUDGET, "--quadratic-length", "90"), {"max_tokens": 200, "cost": QuadraticCost(90)}),
    "boundaries": ((*BUDGET, "--boundaries", "10,30,70"), {"max_tokens": 200, "boundaries": [10, 30, 70]}),
    "equal counts": (
        (*BUDGET, "--boundaries", "equal_counts", "--num-buckets", "5"),
        {"max_tokens": 200, "boundaries": "equal_counts", "num_buckets": 5},
    ),
    "left out": (
        ("--max-tokens", "40", "--too-long", "drop", "--drop-last"),
        {"max_tokens": 40, "too_long": "drop", "drop_last": True},
    ),
}
every_option = pytest.mark.parametrize(("arguments", "options"), OPTIONS.values(), ids=OPTIONS)


@every_option
def test_json_is_the_report_of_the_same_sampler(
    path: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], options: dict[str, Any]
) -> None:
    told = Told(capsys, ("--lengths", path, *arguments, "--ranks", "1", "3", "--json"))
    sampler = BucketBatchSampler(LENGTHS, **in_budget(options))
    expected = [padding_report(sampler, num_replicas=ranks).to_dict() for ranks in (1, 3)]

    assert (told.code, told.err) == (0, "")
    assert json.loads(told.out) == json.loads(json.dumps(expected))


def test_with_buckets_each_number_of_ranks_has_a_table_of_its_own(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(capsys, ("--lengths", path, *BUDGET, "--buckets", "--ranks", "1", "2"))
    sampler = BucketBatchSampler(LENGTHS, max_tokens=200)
    reports = [padding_report(sampler, num_replicas=ranks) for ranks in (1, 2)]

    assert told.out == "\n\n".join([*map(str, reports), summary(reports)]) + "\n"


def test_a_picture_is_drawn_beside_the_table(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Told(capsys, ("--lengths", path, *BUDGET))
    told = Told(capsys, ("--lengths", path, *BUDGET, "--picture", str(tmp_path / "padding.png")))

    assert (told.code, told.out, told.err) == (0, plain.out, "")
    assert (tmp_path / "padding.png").read_bytes().startswith(b"\x89PNG")


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no ranks": ((*BUDGET, "--ranks", "0"), "Invalid value for '--ranks'"),
    "boundaries by another name": ((*BUDGET, "--boundaries", "equal"), "got 'equal'"),
    "no step": (("--max-tokens", "100000", "--drop-last", "--ranks", "64"), "no full step"),
    "a picture of no format": ((*BUDGET, "--picture", "padding.what"), "cannot be drawn"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused_in_a_line(
    path: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    told = Told(capsys, ("--lengths", path, *arguments))

    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("lightning-stateful: ")
    assert told.err.count("\n") == 1
    assert said in told.err


def test_without_matplotlib_it_is_said_what_to_install(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = Told(capsys, ("--lengths", path, *BUDGET, "--picture", str(tmp_path / "padding.png")))

    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "pip install 'lightning-stateful[plots]'" in told.err


def test_the_installed_script_prints_the_reason_without_a_traceback(path: str) -> None:
    script = Path(sys.executable).with_name("lightning-stateful")
    command = [script, "padding", "--lengths", path, "--max-tokens", "40"]
    bad = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("lightning-stateful: ")
    assert "longer than --max-tokens 40" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_the_version_and_the_help_are_there_and_so_is_the_completion_of_shells() -> None:
    module = [sys.executable, "-m", "lightning_stateful"]
    version = subprocess.run([*module, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert version.stdout == f"lightning-stateful {lightning_stateful.__version__}\n"
    script = Path(sys.executable).with_name("lightning-stateful")
    words = {"COMP_WORDS": "lightning-stateful in", "COMP_CWORD": "1", "_LIGHTNING_STATEFUL_COMPLETE": "bash_complete"}
    found = subprocess.run(
        [script], env={**os.environ, **words}, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout == "plain,inspect\n"


@pytest.mark.parametrize("command", ["inspect", "diff", "plan", "check", "trained", "padding"])
def test_the_help_of_each_command_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert f"\n  lightning-stateful {command} " in capsys.readouterr().out.split("Examples:")[1]


@pytest.mark.parametrize("command", group.commands.values(), ids=group.commands)
def test_every_example_in_the_help_has_options_that_the_command_knows(command: click.Command) -> None:
    examples = (command.epilog or "").strip().splitlines()
    assert examples
    for example in examples:
        script, name, *arguments = shlex.split(re.split(r"&&|\|", example)[0])
        assert (script, name) == ("lightning-stateful", command.name)
        command.make_context(name, arguments)


def test_without_click_it_is_said_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "click" or name.startswith(f"{CLI}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["inspect", "last.ckpt"]) == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), "pip install 'lightning-stateful[cli]'" in told) == (1, True)
