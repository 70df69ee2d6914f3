"""The command verify: exit codes, JSON, YAML files of the LightningCLI, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import verify_cases

from lightning_stateful.cli import main
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.verify import trials
from lightning_stateful.verify.factory import CommandLineConfig, made_by, path_of
from lightning_stateful.verify.result import Trial, Verification

CASES = "support.verify_cases"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the command passes on; nothing is run, and one resume is refused."""
    given: dict[str, Any] = {}

    def verify(factory: Any, **options: Any) -> Verification:
        given.update(factory=factory, **options)
        on_two = {"ranks": 1, "workers": None, "resumed_on": 2, "resumed_workers": None}
        said = "StateMismatchError: pass accept=('seed',)"
        return Verification(
            factory=factory, lengths={1: 3}, trials=[Trial(name="on 2", **on_two, outcome="refused", said=said)]
        )

    monkeypatch.setattr(trials, "verify", verify)
    return given


def test_the_command_passes_its_options_on_and_ends_with_1_where_something_was_found(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["verify", f"{CASES}:Plain", "--devices", "1", "2", "--workers", "0", "--seed", "4", "--no-callback"])

    assert code == 1
    expected = {"factory": f"{CASES}:Plain", "devices": (1, 2), "workers": (0,), "seed": 4, "callback": False}
    assert expected.items() <= asked.items()
    out = capsys.readouterr()
    assert out.out.splitlines()[-1] == "not right: 1 refused"
    assert out.err == ""


def test_json_has_all_of_it(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{CASES}:Plain", "--json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert asked["workers"] == (None,)
    assert found["trials"][0]["outcome"] == "refused"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Pass a factory, package.module:function, or a config"),
        (["--config", "missing.yaml"], "missing.yaml cannot be read"),
        ([f"{CASES}:Plain", "--batches", "1"], "--batches"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_the_lightning_cli_names_the_class_its_arguments_and_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"seed_everything: 5\ntrainer:\n  max_epochs: 2\ndata:\n  class_path: {CASES}.Plain\n"
        "  init_args:\n    batch_size: 7\n"
    )
    with_class = CommandLineConfig.read(file)
    file.write_text("seed_everything: true\ndata:\n  batch_size: seven\n")
    without = CommandLineConfig.read(file)

    assert with_class == CommandLineConfig(f"{CASES}:Plain", {"batch_size": 7}, 5)
    assert made_by(f"{CASES}:Plain", with_class.arguments).batch_size == 7
    assert without.factory is without.seed is None
    with pytest.raises(ConfigurationError, match="batch_size"):
        made_by(f"{CASES}:Plain", without.arguments)
    file.write_text("model: {}\n")
    with pytest.raises(ConfigurationError, match="no section data:"):
        CommandLineConfig.read(file)


def test_classes_are_imported_by_name_or_file(tmp_path: Path) -> None:
    file = tmp_path / "some_data.py"
    file.write_text("from torch.utils.data import DataLoader\n\n\ndef make():\n    return DataLoader(range(3))\n")

    assert path_of(verify_cases.Plain) == f"{CASES}:Plain"
    assert path_of(verify_cases.Timed.dataset) == f"{CASES}:Timed.dataset"
    assert len(made_by(f"{file}:make")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_of_a_command_that_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_stateful", "verify", f"{CASES}:Plain", "--workers", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: list(tmp_path.glob("*/*.jsonl")))
        process.send_signal(how)
        process.communicate(timeout=30)
    finally:
        process.kill()

    # Its servers remove the folder once they have ended all that they had started.
    wait_until(lambda: not list(tmp_path.glob("lightning-stateful-verify-*")))


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
