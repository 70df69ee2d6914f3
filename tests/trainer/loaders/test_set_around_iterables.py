"""What hooks set around an iterable dataset: what its ``collate_fn`` reads, tables, and lists that its pass empties."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import ChangesOnce, quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful import ChunkedDataset, StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

GAIN: float = 1.0
SETTINGS: dict[str, Any] = {"gain": 1.0}


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.deep = {"a": {"b": {"c": 1.0}}}
        self.table = pandas.DataFrame({"gain": [1.0]})
        self.user = UserDict({"gain": 1.0})

    def __iter__(self) -> Iterator[torch.Tensor]:
        gain = self.deep["a"]["b"]["c"] * float(self.table["gain"][0]) * self.user["gain"]
        return (torch.full((32,), number * gain) for number in range(12))


class Indexed(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


def by_variable(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * GAIN


def by_settings(samples: list[torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    return torch.stack(samples) * settings["gain"]


def loud(number: int, settings: dict[str, Any]) -> torch.Tensor:
    return torch.full((32,), number * settings["gain"])


def listed(chunk: int) -> list[int]:
    return [3 * chunk, 3 * chunk + 1, 3 * chunk + 2]


def closing(settings: dict[str, Any]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * settings["gain"]

    return collate


def set_variable(_: Any) -> None:
    global GAIN
    GAIN = 3.0


def set_settings(_: Any) -> None:
    SETTINGS["gain"] = 3.0


def set_deep(data: Numbers) -> None:
    data.deep["a"]["b"]["c"] = 3.0


def set_table(data: Numbers) -> None:
    data.table.loc[0, "gain"] = 3.0


def set_user(data: Numbers) -> None:
    data.user["gain"] = 3.0


of_numbers = partial(DataLoader, batch_size=3)
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "variable": (lambda: of_numbers(Numbers(), collate_fn=by_variable), set_variable, "GAIN was set between"),
    "closure": (lambda: of_numbers(Numbers(), collate_fn=closing(SETTINGS)), set_settings, "settings was set between"),
    "partial": (
        lambda: of_numbers(Numbers(), collate_fn=partial(by_settings, settings=SETTINGS)),
        set_settings,
        "by_settings.settings was set between",
    ),
    "partial, map-style": (
        lambda: of_numbers(Indexed(), collate_fn=partial(by_settings, settings=SETTINGS)),
        set_settings,
        r"collate_fn was .* and is",
    ),
    "partial of a stream": (
        lambda: of_numbers(ChunkedDataset(range(4), listed, transform=partial(loud, settings=SETTINGS))),
        set_settings,
        "settings was set between",
    ),
    "deep dict": (lambda: of_numbers(Numbers()), set_deep, "Numbers.deep was set between"),
    "table": (lambda: of_numbers(Numbers()), set_table, "Numbers.table was set between"),
    "dict of a class": (lambda: of_numbers(Numbers()), set_user, "Numbers.user was set between"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_hook_has_set_and_nothing_sets_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, change, named = CASES[name]

    def fit(path: Path | None = None) -> list[list[float]]:
        monkeypatch.setitem(globals(), "GAIN", 1.0)
        monkeypatch.setitem(SETTINGS, "gain", 1.0)
        loader = make()
        sets = ChangesOnce(loader.dataset, change)
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [sets, StatefulDataCallback(), *([saver] if path is None else [])]
        options = {"enable_checkpointing": path is None, "limit_val_batches": 0, "max_epochs": 2}
        quiet_trainer(*callbacks, **options).fit(BoringModel(), loader, ckpt_path=path)
        return sets.trained

    with warnings.catch_warnings():
        # Of an iterable dataset the run itself is warned, too.
        warnings.filterwarnings("ignore", ".*was changed between two epochs", StatefulWarning)
        whole = fit()
    with pytest.warns(StatefulWarning, match=named):
        assert fit(tmp_path / "epoch=0.ckpt") != whole[4:]


class Again(IterableDataset[torch.Tensor]):
    """Gives the samples again that a hook puts into a list."""

    def __init__(self) -> None:
        self.again: list[float] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(24):
            while self.again:
                yield torch.full((32,), self.again.pop(0))
            yield torch.full((32,), float(number))


class PutsBack(ChangesOnce):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.dataset.again += [float(batch[0, 0]), float(batch[1, 0])]


@pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize("at", [3, 4])
def test_a_list_that_a_hook_fills_and_the_pass_empties_is_named_in_the_run_and_on_a_resume(
    tmp_path: Path, at: int
) -> None:
    def fit(path: Path | None = None) -> list[list[float]]:
        loader = DataLoader(Again(), batch_size=2)
        puts = PutsBack(loader.dataset, lambda data: None)
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [puts, StatefulDataCallback(), *([saver] if path is None else [])]
        quiet_trainer(*callbacks, enable_checkpointing=path is None, limit_val_batches=0).fit(
            BoringModel(), loader, ckpt_path=path
        )
        return puts.trained

    with pytest.warns(StatefulWarning, match="Again.again was set within an epoch .*, which has changed it since"):
        whole = fit()
    assert len(whole) == 13
    with pytest.warns(StatefulWarning, match="Again.again was set within the epoch in the run that wrote"):
        assert fit(tmp_path / f"step={at}.ckpt") != whole[at:]


ROLLS = random.Random(0)


class Rolls(IterableDataset[torch.Tensor]):
    """Shuffles with a generator of this module."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(12))
        ROLLS.shuffle(order)
        return (torch.full((32,), float(number)) for number in order)


@pytest.mark.parametrize("draws", [True, False])
def test_a_generator_that_something_else_draws_from_between_two_epochs_is_named(tmp_path: Path, draws: bool) -> None:
    def fit(path: Path | None = None) -> tuple[list[list[float]], list[str]]:
        ROLLS.seed(0)
        sets = ChangesOnce(Rolls(), lambda data: ROLLS.random() if draws else None)
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [sets, StatefulDataCallback(), *([saver] if path is None else [])]
        options = {"enable_checkpointing": path is None, "limit_val_batches": 0, "max_epochs": 3}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(*callbacks, **options).fit(BoringModel(), of_numbers(sets.dataset), ckpt_path=path)
        return sets.trained, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]

    whole, said = fit()
    assert not said
    rest, said = fit(tmp_path / "epoch=0.ckpt")
    assert (rest == whole[4:]) is not draws
    assert ["ROLLS is a random generator that the dataset's code draws from" in one for one in said] == [True] * draws
