"""A dataset that reads the trainer or weights cannot be compared by its content: a warning, and no refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import LedgerModel
from support.runs import numbers_module, quiet_trainer, seeded
from torch.utils.data import Dataset, default_collate

from lightning_stateful.errors import StatefulWarning, StateMismatchError

WORDS = "another content than before the checkpoint, and the data hold a .*batches depend on training"


class Items(Dataset[dict[str, torch.Tensor]]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], **held: Any) -> None:
        self.make = make
        vars(self).update(held)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.full((4,), float(self.make(index)))}


class Model(LedgerModel):
    """With functions that make samples and batches, of which some read what is trained."""

    scale = 7

    def plain(self, samples: Any) -> Any:
        return self.scaled(default_collate(samples))

    def scaled(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] * self.scale}

    def by_step(self, samples: Any) -> Any:
        return self.stepped(default_collate(samples))

    def stepped(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] + self.global_step}

    def by_weight(self, samples: Any) -> Any:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] + self.net[0].bias.detach().mean()}

    def handed_on(self, samples: Any) -> Any:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] + step_of(self)}


def step_of(model: Any) -> int:
    return int(model.global_step)


class Reads:
    """A transform that holds a parameter alone."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, index: int) -> float:
        return index * float(self.weight[0].detach().sum())


def times(weight: torch.Tensor) -> Callable[[int], float]:
    return lambda index: index * float(weight.detach().sum())


DEPENDS: dict[str, Callable[[Any, Model], dict[str, Any]]] = {
    "trainer": lambda trainer, model: {"train": Items(lambda index: index + trainer.global_step)},
    "module": lambda trainer, model: {"train": Items(lambda index: index + model.global_step)},
    "layer": lambda trainer, model: {
        "train": Items(lambda index, held=[{"layer": model.net[0]}]: index + held[0]["layer"].bias.mean().item())  # type: ignore[misc]
    },
    "parameter": lambda trainer, model: {"train": Items(Reads(model.net[0].bias))},
    "parameter in a closure": lambda trainer, model: {"train": Items(times(model.net[0].bias))},
    "parameters in a list": lambda trainer, model: {"train": Items(Reads([model.net[0].bias]))},
    "method": lambda trainer, model: {"train": Items(float), "collate_fn": model.by_step},
    "method that reads a weight": lambda trainer, model: {"train": Items(float), "collate_fn": model.by_weight},
    "method that hands itself on": lambda trainer, model: {"train": Items(float), "collate_fn": model.handed_on},
}
# A tensor that has changed since the batch was read: such data are left alone.
NOT_COMPARED = ("parameter", "parameter in a closure")


def fitted(make: Callable[[Any, Model], dict[str, Any]], path: Path | None = None, **options: Any) -> Any:
    """A trainer that was fitted on data that are made for it and for its model."""
    trainer = quiet_trainer(**{"max_epochs": 2, **options})
    model: Any = seeded(Model)
    trainer.fit(model, datamodule=numbers_module(**make(trainer, model)), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("name", DEPENDS)
def test_data_that_read_what_is_trained_are_warned_of_and_go_on_exactly(tmp_path: Path, name: str) -> None:
    make, path = DEPENDS[name], tmp_path / "a.ckpt"
    whole = fitted(make)
    fitted(make, max_steps=4).save_checkpoint(path)
    with pytest.warns(StatefulWarning, match=WORDS) if name not in NOT_COMPARED else nullcontext():
        resumed = fitted(make, path)
    assert resumed.global_step == whole.global_step
    for one, other in zip(resumed.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)


OTHERS: dict[str, Callable[[Any, Model], dict[str, Any]]] = {
    "nothing": lambda trainer, model: {},
    "a method that reads nothing that is trained": lambda trainer, model: {"collate_fn": model.plain},
    "a layer that is not trained": lambda trainer, model: {"layer": torch.nn.Linear(1, 1)},
    "a copy": lambda trainer, model: {"layer": copy.deepcopy(model.net[0])},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_that_read_nothing_of_it_are_refused(tmp_path: Path, name: str) -> None:
    def data(make: Callable[[int], Any]) -> Callable[[Any, Model], dict[str, Any]]:
        def of(trainer: Any, model: Model) -> dict[str, Any]:
            found = OTHERS[name](trainer, model)
            held = {"layer": found.pop("layer")} if "layer" in found else {}
            return {"train": Items(make, **held), **found}

        return of

    fitted(data(lambda index: index), max_steps=4).save_checkpoint(tmp_path / "a.ckpt")
    fitted(data(lambda index: index), tmp_path / "a.ckpt")
    with pytest.raises(StateMismatchError, match=r"dataset\.content"):
        fitted(data(lambda index: index * 5 + 1), tmp_path / "a.ckpt")
