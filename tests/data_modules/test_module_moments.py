"""Modules over sources and over buckets go on exactly, whatever the moment, the order and the trainer's options."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources, texts
from support.ledger import batches
from support.quick import thinned
from support.runs import Moment, assert_goes_on_from_every_moment, train
from support.sources import Beside, mixture
from support.texts import VAL_FIRST, Texts, bucketed

from lightning_stateful import BucketDataModule

MOMENTS = [
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 0, 4),
    ("on_train_epoch_end", 0, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 1, 3),
    ("on_train_batch_end", 1, 5),
    ("on_validation_start", 1, 0),
    ("on_validation_batch_end", 1, 1),
    ("on_validation_end", 0, 0),
]
EVERY_MOMENT = ("round robin", "tokens")
MODULES = {**sources.MODULES, **texts.MODULES}


class InSetup(BucketDataModule):
    """A dataset that is known only in setup()."""

    def setup(self, stage: str) -> None:
        self.train, self.val = Texts(), Texts(9, first=VAL_FIRST)


def at_last(step: int) -> list[Moment]:
    """The last batches of two epochs."""
    return [("on_train_batch_end", 0, step), ("on_train_batch_end", 1, step), ("on_before_backward", 1, step)]


def beside(step: int) -> list[Moment]:
    return [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 4), ("on_train_batch_end", 0, step)]


WORKERS = partial(mixture, by="sample", num_steps=8, tag="source")
IN_SETUP = partial(InSetup, lengths="num_tokens", max_tokens=40, num_buckets=4, seed=7)
# What is trained on, the moments at which a run is stopped, and options of the trainer.
CASES: dict[str, tuple[Any, list[Moment], dict[str, Any]]] = {
    **{name: (make, MOMENTS if name in EVERY_MOMENT else MOMENTS[:1], {}) for name, make in MODULES.items()},
    "the last batch, round robin": (MODULES["round robin"], at_last(13), {}),
    "the last batch, steps": (MODULES["round robin, steps"], at_last(7), {}),
    "the last batch, tokens": (MODULES["tokens"], at_last(11), {}),
    "accumulating": (MODULES["by sample, steps"], MOMENTS[:3], {"accumulate_grad_batches": 3}),
    "limited": (MODULES["round robin"], MOMENTS[:3], {"limit_train_batches": 6}),
    "limited, steps": (MODULES["by sample, steps"], MOMENTS[:3], {"limit_train_batches": 6}),
    "reloading": (
        MODULES["by sample, steps"],
        MOMENTS[:3],
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3},
    ),
    "counting steps": (MODULES["round robin"], MOMENTS[:3], {"max_steps": 29, "max_epochs": -1}),
    "workers": (partial(WORKERS, num_workers=2), [("on_train_batch_end", 1, 3)], {}),
    "set in setup()": (IN_SETUP, [("on_validation_batch_end", 1, 1)], {}),
    "beside a loader as long": (partial(Beside, 14), beside(13), {"max_epochs": 3}),
    "beside a shorter loader": (partial(Beside, 5), beside(13), {"max_epochs": 3}),
    "beside a loader, steps": (partial(Beside, 9, 9), beside(8), {"max_epochs": 3}),
}
# What serves the same by other means.
SAME = {"workers": WORKERS, "set in setup()": bucketed}


# Their orders keep the laws in tests/mixture and tests/bucketing, and differ from others here in nothing else.
SLOW = (
    "given boundaries",
    "equal counts",
    "limited and in multiples",
    "too long dropped",
    "batch size",
    "full steps",
    "in order",
    "mixture, full batches",
    "round robin, first exhausted",
    "linear schedule",
    "by sample",
    "round robin, steps",
    "schedule",
    # Epochs that are cut, or end, in steps and by tokens.
    "limited",
    "the last batch, round robin",
    "the last batch, steps",
    # A shorter one begins anew meanwhile.
    "beside a loader as long",
    "beside a loader, steps",
    "schedule, by sample",
    "mixture, steps",
)


@pytest.mark.filterwarnings("ignore:limit_train_batches cuts epochs")
@pytest.mark.parametrize("name", thinned(CASES, SLOW))
def test_a_run_saved_in_any_hook_goes_on_exactly(tmp_path: Path, name: str) -> None:
    make, moments, options = CASES[name]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, **options)
    if name in SAME:
        assert batches(whole.ledger) == batches(train(SAME[name], max_epochs=2).ledger)
