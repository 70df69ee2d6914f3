"""Lightning comes as ``lightning.pytorch`` and as ``pytorch_lightning``, and people use either."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import Numbers
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError


@pytest.mark.slow
def test_a_run_by_pytorch_lightning_is_resumed_exactly(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "support" / "other_package.py"
    command = [sys.executable, str(script), str(tmp_path / "stop.ckpt")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    runs = re.findall(r"_run: .*", said)
    assert runs == ["_run: 15 + 21 batches, True True", "_run: 9 + 9 batches, True True"], said
    assert said.count("LearningRateFinder would restart") == 2
    assert "Beside it: False" in said


# Lightning 2.5 looks at callbacks before any hook, and knows no remedy.
of_2_6 = pytest.mark.skipif(pl.__version__ < "2.6", reason="of Lightning 2.6")


@pytest.mark.parametrize("way", ["data module", "data module in second place", pytest.param("callback", marks=of_2_6)])
def test_a_trainer_of_the_other_package_is_refused_with_the_remedy(way: str) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Model(other.LightningModule):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    callbacks = [StatefulDataCallback()] if way == "callback" else []
    data = DataLoader(Numbers(8)) if way == "callback" else StatefulDataModule(Numbers(8))
    name = "datamodule" if way == "data module" else "train_dataloaders"
    trainer = other.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks
    )
    with pytest.raises(ConfigurationError, match=r"before.* lightning_stateful"):
        trainer.fit(Model(), **{name: data})
