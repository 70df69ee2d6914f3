"""Iterable datasets over an agent that plays as they are read, and that training changes as well."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


class Agent:
    played = 0


class OfAgent(IterableDataset[Any]):
    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.agent.played += 1
            yield torch.tensor([self.agent.played])


class OfFunction(IterableDataset[Any]):
    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self.generate()


class Plays(BoringModel):
    """Has the agent play in each step; the dataset has it itself, or a method of this module, or a function there.

    Args:
        restores: Whether a resume has the agent that was saved.
    """

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.agent, self.restores = Agent(), restores
        self.trained: list[int] = []

    def generate(self) -> Iterator[Any]:
        return iter(OfAgent(self.agent))

    def play(self) -> Iterator[Any]:
        yield from self.generate()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(int(batch))
        self.agent.played += 100
        return self.layer(torch.ones(1, 32)).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["played"] = self.agent.played

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.restores:
            self.agent.played = checkpoint["played"]


def dataset_of(model: Plays, kind: str) -> IterableDataset[Any]:
    def play() -> Iterator[Any]:
        yield from model.generate()

    return {"agent": OfAgent(model.agent), "method": OfFunction(model.play), "function": OfFunction(play)}[kind]


def fit(folder: Path, kind: str, *more: pl.Callback, restores: bool = True, ckpt_path: Any = None) -> Any:
    """What was trained on, and the warnings of this package."""
    model = Plays(restores)
    trainer = quiet_trainer(*more, StatefulDataCallback(seed=0), max_epochs=3, enable_checkpointing=bool(more))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(dataset_of(model, kind)), ckpt_path=ckpt_path)
    return model.trained, " ".join(str(one.message) for one in caught if issubclass(one.category, StatefulWarning))


@pytest.mark.parametrize("kind", ["agent", "method", "function"])
def test_an_agent_that_is_restored_does_not_play_earlier_passes_again(tmp_path: Path, kind: str) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    whole, _ = fit(tmp_path, kind, saver)
    for epoch in (0, 1):
        path = tmp_path / f"epoch={epoch}.ckpt"
        resumed, said = fit(tmp_path, kind, ckpt_path=path)
        assert resumed == whole[4 * (epoch + 1) :]
        assert ("is exact only if on_load_checkpoint of the module" in said) == (kind != "agent")
        resumed, said = fit(tmp_path, kind, restores=False, ckpt_path=path)
        assert resumed != whole[4 * (epoch + 1) :]
        assert ("on_load_checkpoint of the module" if kind != "agent" else "OfAgent.agent was set between") in said
