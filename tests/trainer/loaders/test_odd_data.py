"""Data and checkpoints that are seldom what they seem: keys that look alike, lists that shrink, counters that lack."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.ledger import LedgerModel, Numbers, trained
from support.runs import assert_resumes, numbers_module, seeded, stopped, train, train_alone
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loops.lightning import pl


@pytest.mark.parametrize(
    ("loaders", "paths"),
    [
        ({0: 8, "0": 6}, ["0", "'0'"]),
        ({"a.b": 8, "a": {"b": 6}}, ["'a.b'", "'a'.'b'"]),
        ({"a": 8, "b": {"b": 6}}, ["a", "b.b"]),
    ],
)
def test_keys_that_look_alike_are_loaders_of_their_own(tmp_path: Path, loaders: Any, paths: list[str]) -> None:
    def made(of: Any, first: int = 0) -> Any:
        if isinstance(of, dict):
            return {key: made(part, 100 * number) for number, (key, part) in enumerate(of.items(), 1)}
        return DataLoader(Numbers(of, first=first), batch_size=2, shuffle=True)

    make = partial(made, loaders)
    before = stopped(tmp_path / "stop.ckpt", make, run=train_alone, epoch=1, batch=1)
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=make, run=train_alone)
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert list(checkpoint["callbacks"]["StatefulDataCallback"]["data"]["loaders"]) == paths


class Unsupported(pl.LightningDataModule):
    """A data module whose loader the toolkit refuses."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(6), batch_size=2, in_order=False)


@pytest.mark.parametrize("later", [Unsupported, lambda: Unsupported().train_dataloader()])
def test_a_callback_that_was_brought_along_leaves_with_its_data_module(later: Any) -> None:
    run = train(max_epochs=1)
    trainer, model = run.trainer, seeded(LedgerModel)
    trainer.fit_loop.max_epochs = 2
    data = later()
    trainer.fit(model, **{"datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders": data})

    assert len(trained(model.ledger)) == 3
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=numbers_module())
    assert len([one for one in trainer.callbacks if isinstance(one, StatefulDataCallback)]) == 1
    assert len(trained(model.ledger)) == 3 + 11


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_list_that_has_shrunk_since_its_loader_was_built_is_refused(num_workers: int) -> None:
    samples = [Numbers(10)[number] for number in range(10)]

    model, shrinks = seeded(), LambdaCallback(on_train_epoch_end=lambda *args: samples.pop())
    make = partial(StatefulDataModule, samples, batch_size=2, num_workers=num_workers)
    said = r"list had 10 samples when its loader was built, and has 9 now.*reload_"
    with pytest.raises(ConfigurationError, match=said):
        train(make, model=model, callbacks=[shrinks])
    assert len(trained(model.ledger)) == 5
    samples.append(samples[0])
    train(lambda: StatefulDataModule(samples), callbacks=[shrinks], reload_dataloaders_every_n_epochs=1)


def test_a_list_that_has_grown_is_served_as_it_was_with_a_warning() -> None:
    samples = [Numbers(4)[number] for number in range(4)]

    grows = LambdaCallback(on_train_epoch_end=lambda *args: samples.append(samples[0]))
    with pytest.warns(
        StatefulWarning, match="had 4 samples when its loader was built, and has 5 now. New ones are not"
    ):
        train(lambda: StatefulDataModule(samples), callbacks=[grows], max_epochs=2)
