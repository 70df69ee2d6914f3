from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import command_data
from support.ledger import Event
from support.runs import stopped, train, train_alone

from lightning_stateful.cli import main

# Each after its fourth batch of an epoch: with a module of the package's, with the callback alone, by Lightning alone.
WITH_MODULE = {"numbers": 1, "mixture": 1, "round_robin": 0, "buckets": 0, "stream": 0}
ALONE = {"plain": 1, "side_by_side": 0, "drawn": 0, "iterable": 0}


class Checkpoints:
    """Checkpoints of real Trainers, written when a test first asks for one.

    Attributes:
        ledgers: What each run had done.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledgers: dict[str, list[Event]] = {}

    def __call__(self, name: str) -> Path:
        path = self.folder / f"{name}.ckpt"
        if not path.exists():
            run = train_alone if name in ALONE else train
            make = command_data.plain if name == "lightning" else getattr(command_data, name)
            epoch = {**WITH_MODULE, **ALONE}.get(name, 0)
            self.ledgers[name] = stopped(path, make, epoch=epoch, batch=3, run=run)
        return path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


class Told:
    """The exit code of a command, and its output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Told:
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        return Told(code, *capsys.readouterr())

    return run
