"""A data module owns its state: what it has loaded it goes on from, and what it says is where its data stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import sources, texts
from support.ledger import Numbers
from support.runs import StopAt, assert_resumes, numbers_module, stopped, train
from support.stream_runs import chunks
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataModule, StreamDataModule
from lightning_stateful.errors import ConfigurationError, DamagedStateError, StatefulWarning, StateMismatchError


def two(**options: Any) -> StatefulDataModule:
    data = {"a": Numbers(9), "b": Numbers(9, first=100)}
    return StatefulDataModule(data, batch_size=2, seed=7, **options)


MODULES: dict[str, Callable[[], StatefulDataModule]] = {
    "samples": numbers_module,
    "two side by side": two,
    "round robin": sources.round_robin,
    "buckets": texts.bucketed,
    "stream": lambda: StreamDataModule(chunks(), batch_size=2, seed=7),
}


def read(data: Any, stop: int | None = None) -> list[Any]:
    """Ids of the batches of a pass, of a module or its loaders; of several loaders, of each at a time."""
    loaders = data.train_dataloader() if isinstance(data, StatefulDataModule) else data
    steps = zip(*loaders.values(), strict=True) if isinstance(loaders, dict) else ((batch,) for batch in loaders)
    return [[batch["id"].tolist() for batch in step] for step in itertools.islice(steps, stop)]


@pytest.mark.parametrize("name", MODULES)
def test_without_a_trainer_a_module_goes_on_at_the_next_batch(name: str) -> None:
    module, resumed = MODULES[name](), MODULES[name]()
    first = read(module, stop=2)
    resumed.load_state_dict(module.state_dict())
    rest, whole = resumed.train_dataloader(), MODULES[name]().train_dataloader()
    assert [first + read(rest), read(rest)] == [read(whole), read(whole)]


@pytest.mark.parametrize("name", MODULES)
def test_a_state_that_was_loaded_is_given_back_until_training_goes_on(name: str) -> None:
    module, resumed = MODULES[name](), MODULES[name]()
    read(module, stop=2)
    state = module.state_dict()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state

    loaders = resumed.train_dataloader()
    assert resumed.state_dict() == state
    read(loaders, 1)
    assert resumed.state_dict() != state


def test_a_module_goes_on_where_the_state_of_its_loader_was_taken_and_says_where_that_is() -> None:
    module, resumed = numbers_module(), numbers_module()
    loader = module.train_dataloader()
    first = read(loader, stop=2)
    assert module.position_report() == loader.position_report() == {"epoch": 0, "samples": 4}
    resumed.load_state_dict(loader.state_dict())
    assert first + read(resumed) == read(numbers_module())


class OwnLoader(StatefulDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(range(20), 2)


class JoinedLoader(StatefulDataModule):
    def train_dataloader(self) -> Any:
        return super().train_dataloader()


class OwnState(OwnLoader):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}


def test_without_a_trainer_a_subclass_with_loaders_of_its_own_says_that_it_has_no_state() -> None:
    module = OwnLoader()
    next(iter(module.train_dataloader()))
    with pytest.warns(StatefulWarning, match=r"OwnLoader.train_dataloader is your own.*state_dict\(\) is empty"):
        state = module.state_dict()
    with pytest.warns(StatefulWarning, match="training data begin from the beginning"):
        OwnLoader().load_state_dict(state)


@pytest.mark.parametrize("kind", [JoinedLoader, OwnState, StatefulDataModule])
def test_nothing_is_said_of_one_that_serves_or_saves_them(kind: Any) -> None:
    module = kind(range(20))
    module.load_state_dict({})
    module.state_dict()


def test_a_state_that_says_nothing_of_the_data_is_refused() -> None:
    with pytest.raises(DamagedStateError, match=r"no 'lightning_stateful' among the keys of the state, \['mine'\]"):
        numbers_module().load_state_dict({"mine": 1})


def test_a_module_that_nobody_has_read_has_no_state() -> None:
    assert numbers_module().state_dict() == {}


@pytest.mark.parametrize(
    ("make", "remedy"),
    [(lambda: two(shuffle=False), "shuffle"), (numbers_module, "loaders")],
    ids=["other order", "one loader"],
)
def test_a_state_of_other_data_is_refused_when_loaders_are_built(make: Any, remedy: str) -> None:
    module, other = two(), make()
    read(module, stop=2)
    other.load_state_dict(module.state_dict())
    with pytest.raises(StateMismatchError, match=remedy):
        other.train_dataloader()


@pytest.mark.parametrize("make", [numbers_module, two])
def test_a_checkpoint_of_a_trainer_is_read_on_without_one(tmp_path: Path, make: Any) -> None:
    stopped(tmp_path / "stop.ckpt", make, epoch=1, batch=2)
    whole = [event[4] for event in train(make).ledger if event[:2] == ("train", 1)]
    module = make()
    module.load_state_dict(torch.load(tmp_path / "stop.ckpt", weights_only=True)["StatefulDataModule"])
    rest = read(module)
    assert [step if len(step) > 1 else step[0] for step in rest] == [
        [list(part) for _, part in ids] if isinstance(ids[0], tuple) else list(ids) for ids in whole[3:]
    ]


def test_a_module_that_has_been_trained_on_goes_on_without_its_trainer() -> None:
    module = numbers_module()
    train(lambda: module, max_steps=13)
    state = module.state_dict()
    module.load_state_dict(state)
    loaders = module.train_dataloader()
    assert module.state_dict() == state
    read(loaders, 1)
    assert module.state_dict()["lightning_stateful"]["progress"]["consumed"] == 6


def test_a_run_is_not_begun_anew_with_a_state_that_was_loaded_by_hand() -> None:
    module, other = numbers_module(), numbers_module()
    read(module, stop=2)
    other.load_state_dict(module.state_dict())
    with pytest.raises(ConfigurationError, match="Pass the checkpoint as ckpt_path"):
        train(lambda: other)


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
def test_evaluation_with_a_checkpoint_leaves_training_data_where_they_are(tmp_path: Path, evaluate: str) -> None:
    module = numbers_module(test=Numbers(4), predict=Numbers(4))
    run = train(lambda: module, callbacks=[StopAt("on_train_batch_end", None, batch=2)])
    state = module.state_dict()
    stopped(tmp_path / "other.ckpt", epoch=1, batch=4)
    getattr(run.trainer, evaluate)(run.trainer.lightning_module, datamodule=module, ckpt_path=tmp_path / "other.ckpt")
    assert module.state_dict() == state


class Asks(pl.Callback):
    """Asks for the callback's state in a step, and for a checkpoint without callbacks at the end of another."""

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.callbacks[-1].state_dict()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)


def test_a_checkpoint_of_weights_alone_has_the_present_place_in_the_data() -> None:
    asks = Asks()
    train(callbacks=[asks], max_epochs=1)
    assert asks.checkpoint["StatefulDataModule"]["lightning_stateful"]["progress"]["consumed"] == 10


class Edits(StatefulDataModule):
    """Has a state of its own, and hands on that of the data, or does not."""

    calls_super = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict["own"]
        if self.calls_super:
            super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 3}


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_module_may_restore_more_than_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls_super: bool
) -> None:
    monkeypatch.setattr(Edits, "calls_super", calls_super)
    modules = [Edits(Numbers(22), batch_size=2, seed=7) for _ in range(3)]
    before = stopped(tmp_path / "stop.ckpt", lambda: modules[0], epoch=1, batch=4)
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=lambda: modules[1], whole=train(lambda: modules[2]))
    assert modules[1].restored == 3


class LeavesOut(StatefulDataModule):
    """Has a state of its own, and leaves out that of the data, in saving and in loading."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict["own"]

    def state_dict(self) -> dict[str, Any]:
        return {"own": 3}


def test_the_place_in_the_data_is_saved_with_a_module_that_leaves_it_out(tmp_path: Path) -> None:
    modules = [LeavesOut(Numbers(22), batch_size=2, seed=7) for _ in range(3)]
    before = stopped(tmp_path / "stop.ckpt", lambda: modules[0], epoch=1, batch=4)
    saved = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert saved["LeavesOut"]["own"] == 3
    assert saved["LeavesOut"]["lightning_stateful"]["progress"]["consumed"] == 10
    assert saved["callbacks"]["StatefulDataCallback"]["data"] is None
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=lambda: modules[1], whole=train(lambda: modules[2]))
    assert modules[1].restored == 3


class CountsLooks(Numbers):
    """Counts how often it is described, as every loader that is built over it does once."""

    looks = 0

    def describe(self) -> dict[str, int]:
        self.looks += 1
        return {"of": 1}


def test_a_trainer_trains_on_the_very_loader_that_the_module_has_built() -> None:
    data, held_out = CountsLooks(8), CountsLooks(4, first=100)
    outcome = train(lambda: StatefulDataModule(data, held_out, batch_size=2, seed=7), max_epochs=2)
    assert (outcome.current_epoch, data.looks, held_out.looks) == (2, 1, 1)


class Keeps(StatefulDataModule):
    """Builds its loader once, whatever trainer asks for it."""

    loader: Any = None

    def train_dataloader(self) -> Any:
        self.loader = self.loader or super().train_dataloader()
        return self.loader


def test_a_loader_that_a_module_keeps_serves_one_trainer_after_another() -> None:
    module = Keeps(Numbers(8), batch_size=2, seed=7)
    first, second = (train(lambda: module, max_epochs=2).ledger for _ in range(2))
    assert first == second != []
