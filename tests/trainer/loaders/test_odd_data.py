"""Data and checkpoints that are seldom what they seem: keys that look alike, lists that shrink, counters that lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import LedgerModel, Numbers
from support.runs import StopAt, numbers_module, seeded, train
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.trainer.lightning import pl


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

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=1)
    train(lambda: made(loaders), callbacks=[StatefulDataCallback(), stop])
    resumed = train(lambda: made(loaders), callbacks=[StatefulDataCallback()], ckpt_path=tmp_path / "stop.ckpt")
    whole = train(lambda: made(loaders), callbacks=[StatefulDataCallback()])

    assert resumed.ledger == whole.ledger[len(whole.ledger) - len(resumed.ledger) :]
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

    assert len([event for event in model.ledger if event[0] == "train"]) == 3
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=numbers_module())
    assert len([one for one in trainer.callbacks if isinstance(one, StatefulDataCallback)]) == 1
    assert len([event for event in model.ledger if event[0] == "train"]) == 3 + 11


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_list_that_has_shrunk_since_its_loader_was_built_is_refused(num_workers: int) -> None:
    samples = [Numbers(10)[number] for number in range(10)]

    class Shrinks(LedgerModel):
        def on_train_epoch_end(self) -> None:
            samples.pop()

    model = seeded(Shrinks)
    with pytest.raises(
        ConfigurationError, match=r"list had 10 samples when its loader was built, and has 9 now.*reload_"
    ):
        train(lambda: StatefulDataModule(samples, batch_size=2, num_workers=num_workers), model=model)
    assert len([event for event in model.ledger if event[0] == "train"]) == 5
    samples.append(samples[0])
    train(lambda: StatefulDataModule(samples), model=seeded(Shrinks), reload_dataloaders_every_n_epochs=1)


def test_a_list_that_has_grown_is_served_as_it_was_with_a_warning() -> None:
    samples = [Numbers(4)[number] for number in range(4)]

    class Grows(LedgerModel):
        def on_train_epoch_end(self) -> None:
            samples.append(samples[0])

    with pytest.warns(
        StatefulWarning, match="had 4 samples when its loader was built, and has 5 now. New ones are not"
    ):
        train(lambda: StatefulDataModule(samples), model=seeded(Grows), max_epochs=2)


def test_a_checkpoint_without_loops_begins_at_epoch_0_with_a_warning(tmp_path: Path) -> None:
    train(max_steps=15).trainer.save_checkpoint(tmp_path / "stop.ckpt")
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    del checkpoint["loops"]
    torch.save(checkpoint, tmp_path / "stop.ckpt")
    with pytest.warns(StatefulWarning, match="has no loop counters .*state_dict.* begins at epoch 0"):
        resumed = train(ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)

    def samples(ledger: list[Any]) -> list[Any]:
        return [event[-1] for event in ledger if event[0] == "train"]

    assert samples(resumed.ledger) == samples(train(max_epochs=1).ledger)
