"""Data modules can be built by the LightningCLI, from their own arguments and those of the classes above them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from support.ledger import LedgerModel, Numbers, batches
from support.runs import train
from support.sources import datasets, mixture, round_robin
from support.texts import MODULES, Texts

from lightning_stateful import BucketDataModule, MixtureDataModule, RoundRobinDataModule, StatefulDataModule


class Plain(StatefulDataModule):
    """With arguments of its own alone."""

    def __init__(self, length: int = 10, batch_size: int = 2) -> None:
        super().__init__(Numbers(length), batch_size=batch_size, seed=5)


class InTurn(RoundRobinDataModule):
    """Its datasets are known only in setup()."""

    def setup(self, stage: str) -> None:
        self.train = datasets()


class Mixed(MixtureDataModule):
    def setup(self, stage: str) -> None:
        self.train = datasets()


class Bucketed(BucketDataModule):
    def setup(self, stage: str) -> None:
        self.train = Texts()


def of(module: Any, arguments: dict[str, Any], make: Any) -> Any:
    return pytest.param(module, [f"--data.{name}={value}" for name, value in arguments.items()], make)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the CLI uses what jsonargparse will drop
@pytest.mark.parametrize(
    ("module", "arguments", "make"),
    [
        of(Plain, {"length": 6}, lambda: Plain(6)),
        of(
            InTurn,
            {"seed": 5, "num_steps": 6, "batch_size": "{news: 2, code: 3, web: 1}", "tag": "source"},
            lambda: round_robin(seed=5, num_steps=6, tag="source"),
        ),
        of(
            Mixed,
            {"seed": 5, "num_steps": 6, "batch_size": 3, "by": "sample", "weights": "{news: 2, code: 1, web: 0.5}"},
            lambda: mixture(seed=5, num_steps=6, by="sample", weights=[2, 1, 0.5]),
        ),
        of(
            Bucketed,
            {
                "seed": 7,
                "lengths": "num_tokens",
                "budget.max_tokens": 60,
                "budget.cost.length": 12,
                "num_buckets": 4,
            },
            MODULES["quadratic cost"],
        ),
        of(
            Bucketed,
            {"seed": 7, "lengths": "num_tokens", "max_tokens": 40, "boundaries": "[3, 8, 20]", "log_data": "true"},
            MODULES["given boundaries"],
        ),
    ],
)
def test_a_data_module_can_be_built_by_the_lightning_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, arguments: list[str], make: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    cli = LightningCLI(
        LedgerModel,
        module,
        save_config_callback=None,
        args=[
            "fit", "--seed_everything=3", *arguments,
            "--trainer.max_epochs=2", "--trainer.logger=false", "--trainer.accelerator=cpu",
            "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false", f"--trainer.default_root_dir={tmp_path}",
        ],
    )  # fmt: skip
    expected = train(make, max_epochs=2)
    assert batches(cli.model.ledger) == batches(expected.ledger)
