"""Names of Lightning's that are used and not public: listed in one place, and missed before anything is trained on."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _ModeIterator
from support.ledger import LedgerModel
from support.runs import numbers_module, quiet_trainer
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchmetrics import Metric, MetricCollection

import lightning_stateful
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loops.lightning import INTERNALS

PACKAGE = Path(lightning_stateful.__file__).parent
FOLDERS = ("loops", "module_state", "data_checks", "trainer", "data_modules")
FILES = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py"))]

# Private names of what is no part of a Trainer.
ELSEWHERE: dict[Any, set[str]] = {
    CombinedLoader: {"_mode", "_iterator"},
    _DataLoaderIterDataFetcher: {"_batch_idx"},
    _ModeIterator: {"_idx"},
    StochasticWeightAveraging: {"_average_model", "_initialized", "_scheduler_state", "_accumulate_grad_batches"},
    ModelPruning: {"_parameters_to_prune", "_original_layers"},
    torch.nn.Module: {"_register_load_state_dict_pre_hook"},
    _MultiProcessingDataLoaderIter: {"_shutdown_workers"},
    Metric: {"_update_count", "_computed"},
    MetricCollection: {"_groups", "_groups_checked"},
}
# Whose private names are not of Lightning.
OWNERS = ("self", "sys")
# Kept by the toolkit on one of Lightning's loops; the last is Lightning's since 2.6, and does nothing before.
KEPT_THERE = {
    "_before_epoch",
    "_ended_early",
    "_validated",
    "_lifted_max_steps",
    "_resuming_from_checkpoint",
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes that a file uses of other objects than its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and ast.unparse(node.value) not in OWNERS:
            yield node.attr


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to methods and to attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_every_private_name_of_lightning_that_is_used_is_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES]
    own = {name for tree in trees for name in own_names(tree)}
    used = {name for tree in trees for name in private_names(tree)} - own - KEPT_THERE
    listed = {part for name in INTERNALS for part in name.split(".") if part.startswith("_")}
    assert used == (listed | set().union(*ELSEWHERE.values())) - own


@pytest.mark.parametrize("kind", ELSEWHERE, ids=lambda kind: kind.__name__)
def test_what_is_no_part_of_a_trainer_has_its_private_names(kind: Any) -> None:
    source = inspect.getsource(kind)
    assert [name for name in ELSEWHERE[kind] if f"self.{name}" not in source and not hasattr(kind, name)] == []


def set_up_trainer() -> pl.Trainer:
    """A trainer before its setup hooks."""
    trainer = quiet_trainer()
    trainer.strategy.connect(LedgerModel())
    module = numbers_module()
    trainer.datamodule = module
    module.trainer = trainer
    return trainer


def remove(patch: pytest.MonkeyPatch, trainer: Any, name: str) -> None:
    """Take an attribute of a trainer away, as a Lightning that has renamed it would."""
    *owners, attribute = name.split(".")
    owner = trainer
    for step in owners:
        owner = getattr(owner, step)
    if attribute in vars(owner):
        patch.delattr(owner, attribute)
    for kind in type(owner).__mro__:
        if attribute in vars(kind):
            patch.delattr(kind, attribute)


@pytest.mark.parametrize("name", INTERNALS)
def test_a_lightning_that_has_renamed_something_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer = set_up_trainer()
    callback = trainer.callbacks[-1]  # type: ignore[attr-defined]  # set by a connector
    with monkeypatch.context() as patch:
        remove(patch, trainer, name)
        with pytest.raises(ConfigurationError, match=rf"(?s){pl.__version__}\) lacks .*trainer\.{name}, to .*2\.7"):
            callback.setup(trainer, trainer.lightning_module, "fit")
