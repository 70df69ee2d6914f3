"""The package as a user finds it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import lightning_stateful


def test_importing_the_package_imports_neither_lightning_nor_datasets() -> None:
    code = (
        "import sys, lightning_stateful; "
        "print([name for name in ('lightning', 'datasets', 'torchdata', 'torch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_samplers_and_loaders_work_without_importing_lightning() -> None:
    code = (
        "import sys; from lightning_stateful import StatefulLoader, StatefulDistributedSampler; "
        "next(iter(StatefulLoader(list(range(8)), batch_size=2))); print('lightning' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in lightning_stateful.__all__:
        public = getattr(lightning_stateful, name)
        assert public.__doc__, name
    assert set(lightning_stateful.__all__) <= set(dir(lightning_stateful))


def test_the_version_is_that_of_the_distribution() -> None:
    assert lightning_stateful.__version__ == version("lightning-stateful")


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lightning_stateful.__file__).parent / "py.typed").exists()
