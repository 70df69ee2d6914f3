"""Values of every kind that a hook puts into a dataset at the end of an epoch, and what a resume says of them."""

from __future__ import annotations

import datetime
import enum
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset as Table
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import ChangesOnce, quiet_trainer
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

NUMBERS = 8
MIXER: Any = None


class Mode(enum.Enum):
    PLAIN = 0
    HARD = 1


class Plain:
    gain = 1.0


class Loud:
    gain = 3.0


class Mixer:
    def __init__(self, gain: float) -> None:
        self.gain = gain


class Adds(torch.nn.Module):
    """A transform, as those of torchvision."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, value: Any) -> Any:
        return value + self.amount


class Compose(torch.nn.Module):
    def __init__(self, transforms: list[torch.nn.Module]) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class OfKinds(Dataset[torch.Tensor]):
    """Samples that follow from values of many kinds; opens a file of its own as the first sample is read."""

    def __init__(self) -> None:
        self.kind: type[Any] = Plain
        self.dtype = torch.float64
        self.wave: Any = torch.cos
        self.slope: Any = np.cos
        self.root = Path("/data/first")
        self.text = "/data/first"
        self.day = datetime.date(2026, 1, 1)
        self.mode = Mode.PLAIN
        self.table = pandas.DataFrame({"number": range(NUMBERS), "name": list("abcdefgh")})
        self.rows = Table.from_dict({"number": list(range(NUMBERS))})
        self.mixer: Any = None
        self.cut = slice(0, 1)
        self.file: Any = None
        self.transform = Compose([torch.nn.Identity(), Adds(0.0)])

    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file = self.file or re.compile("opened")
        value = torch.tensor(index + 1 / 3, dtype=self.dtype).double() * self.kind.gain + self.wave(torch.ones(()))
        value += self.slope(1.0)
        value += len(self.root.name) + len(self.text) + (self.day - datetime.date(2026, 1, 1)).days + self.mode.value
        value += self.table["number"].iloc[index] + self.rows[index % len(self.rows)]["number"]
        value += (self.mixer.gain if self.mixer else 0) + (MIXER.gain if MIXER else 0) + len(range(9)[self.cut])
        return torch.full((32,), float(self.transform(value)))


CHANGES: dict[str, tuple[Callable[[OfKinds], Any], str]] = {
    "class": (lambda data: vars(data).update(kind=Loud), "kind was class Loud and is class Plain"),
    "dtype": (lambda data: vars(data).update(dtype=torch.float16), "dtype was torch.float16 and is torch.float64"),
    "function of torch": (lambda data: vars(data).update(wave=torch.sin), "wave was sin and is cos"),
    "function of NumPy": (lambda data: vars(data).update(slope=np.sin), "slope was sin and is cos"),
    "path": (lambda data: vars(data).update(root=Path("/data/of the second")), "root was 'of the second' and is 'fi"),
    "text of a path": (lambda data: vars(data).update(text="/data/2nd part"), "text was '2nd part' and is 'first'"),
    "date": (lambda data: vars(data).update(day=datetime.date(2026, 2, 1)), "day was datetime.date(2026, 2, 1) and is"),
    "choice": (lambda data: vars(data).update(mode=Mode.HARD), "mode was <Mode.HARD: 1> and is <Mode.PLAIN: 0>"),
    "table": (lambda data: data.table.iloc.__setitem__((0, 0), 50), "table was "),
    "rows": (lambda data: vars(data).update(rows=data.rows.select([1, 3])), "rows was "),
    "object": (lambda data: vars(data).update(mixer=Mixer(2.0)), "mixer was a Mixer and is None"),
    "slice": (lambda data: vars(data).update(cut=slice(0, 5)), "cut was slice(0, 5, None) and is slice(0, 1, None)"),
    "transform": (
        lambda data: vars(data.transform.transforms[1]).update(amount=2.0),
        "transform.transforms.1.amount was 2.0 and is 0.0",
    ),
    "variable": (lambda data: vars(sys.modules[__name__]).update(MIXER=Mixer(2.0)), "MIXER was a Mixer and is None"),
}


def fit(folder: Path, change: Callable[[OfKinds], Any], path: Path | None = None) -> list[list[float]]:
    changes = ChangesOnce(OfKinds(), change)
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = quiet_trainer(
        changes, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=True, limit_val_batches=0
    )
    trainer.fit(BoringModel(), DataLoader(changes.dataset, batch_size=2, shuffle=True), ckpt_path=path)
    return changes.trained


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_hook_has_set_and_nothing_sets_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(globals(), "MIXER", None)
    change, named = CHANGES[name]
    whole = fit(tmp_path, change)
    for epoch in range(2):
        monkeypatch.setitem(globals(), "MIXER", None)
        with pytest.warns(StatefulWarning, match=re.escape(named)) as caught:
            assert fit(tmp_path, change, tmp_path / f"epoch={epoch}.ckpt") != whole[4 * (epoch + 1) :]
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        assert len(said) == 1
        assert "file was" not in said[0]


def test_nothing_is_said_of_a_run_in_which_no_hook_sets_anything(tmp_path: Path) -> None:
    whole = fit(tmp_path, lambda data: math.pi)
    assert fit(tmp_path, lambda data: math.pi, tmp_path / "epoch=1.ckpt") == whole[8:]


def louder(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * 2


def test_another_collate_fn_that_a_hook_gives_to_the_loader_is_named(tmp_path: Path) -> None:
    def replace(data: Any) -> None:
        loader.collate_fn = louder

    def run(*, resumed: bool) -> list[list[float]]:
        nonlocal loader
        loader = DataLoader(OfKinds(), batch_size=2, shuffle=True)
        changes = ChangesOnce(OfKinds(), replace)
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = quiet_trainer(
            changes, StatefulDataCallback(), saver, max_epochs=3, enable_checkpointing=True, limit_val_batches=0
        )
        trainer.fit(BoringModel(), loader, ckpt_path=tmp_path / "epoch=0.ckpt" if resumed else None)
        return changes.trained

    loader: Any = None
    whole = run(resumed=False)
    assert [max(map(max, whole[4 * epoch : 4 * epoch + 4])) > 50 for epoch in range(3)] == [False, True, True], whole
    with pytest.warns(StatefulWarning, match="collate_fn was louder .* and is default_collate"):
        assert run(resumed=True) != whole[4:]
