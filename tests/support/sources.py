"""Three sources, modules over them, a model that says which of them it was given, and checkpoints at many moments."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import ConcatDataset, DataLoader

from lightning_stateful import (
    MixtureDataModule,
    RoundRobinBatchSampler,
    RoundRobinDataModule,
    StatefulDataModule,
    WeightSchedule,
)
from support.ledger import LedgerModel, Numbers
from support.runs import assert_same_end, assert_stitches, seeded, train

Event = tuple[Any, ...]

LENGTHS = {"news": 9, "code": 14, "web": 4}
FIRSTS = {"news": 0, "code": 100, "web": 200, "talk": 300}
EVERY_SAMPLE = sorted(FIRSTS[name] + index for name, length in LENGTHS.items() for index in range(length))
TOKENS = {name: np.arange(1, length + 1) * 3 for name, length in LENGTHS.items()}


def datasets(**lengths: int) -> dict[str, Numbers]:
    """The sources by name; samples tell their source by their hundreds."""
    return {name: Numbers(length, first=FIRSTS[name]) for name, length in (lengths or LENGTHS).items()}


def source_of(index: int) -> str:
    """The source of a sample."""
    return next(name for name, first in reversed(FIRSTS.items()) if index >= first)


def round_robin(**options: Any) -> RoundRobinDataModule:
    """Each source with a batch size of its own, and five samples for validation."""
    defaults: dict[str, Any] = {
        "train": datasets(),
        "val": {"web": Numbers(3, first=500)},
        "batch_size": {"news": 2, "code": 3, "web": 1},
        "seed": 7,
    }
    return RoundRobinDataModule(**{**defaults, **options})


def mixture(**options: Any) -> MixtureDataModule:
    """Batches of three, and five samples for validation."""
    defaults: dict[str, Any] = {"train": datasets(), "val": Numbers(5, first=500), "batch_size": 3, "seed": 7}
    return MixtureDataModule(**{**defaults, **options})


MODULES: dict[str, Callable[[], Any]] = {
    "round robin": lambda: round_robin(tag="source"),
    "round robin, cycle": lambda: round_robin(stop="cycle"),
    "round robin, first exhausted": lambda: round_robin(stop="first_exhausted"),
    "round robin, steps": lambda: round_robin(num_steps=8, tag="source"),
    "mixture": lambda: mixture(weights=[1, 2, 1]),
    "mixture, steps": lambda: mixture(num_steps=8, temperature=2, tag="source"),
    "mixture, full batches": lambda: mixture(
        drop_last=True, stop="cycle", batch_size={"news": 3, "code": 3, "web": 2}, val={"web": Numbers(5, first=500)}
    ),
    "by sample": lambda: mixture(by="sample", tag="source"),
    "by sample, steps": lambda: mixture(by="sample", num_steps=8, weights={"news": 2, "code": 1, "web": 1}),
    "by token": lambda: mixture(by="token", lengths=TOKENS, weights=[1, 1, 1]),
    "schedule": lambda: mixture(num_steps=7, schedule={0: [1, 1, 0], 9: [1, 1, 2], 12: [0, 1, 1]}),
    "linear schedule": lambda: mixture(
        num_steps=7, schedule=WeightSchedule({0: [1, 1, 1], 13: [1, 5, 1]}, between="linear")
    ),
    "schedule, by sample": lambda: mixture(
        num_steps=7, by="sample", schedule=WeightSchedule({0: [1, 1, 1], 11: [1, 5, 0]})
    ),
}


class SourcesModel(LedgerModel):
    """Its ledger has the tag of every batch beside the samples; features may have any shape that ends in four."""

    def _ids(self, batch: Any) -> Any:
        ids = tuple(batch["id"].tolist())
        if "source" not in batch:
            return ids
        tag = batch["source"]
        return (tag if isinstance(tag, str) else tuple(tag), ids)

    def _loss(self, batch: Any) -> Any:
        features = batch["x"].reshape(len(batch["id"]), -1, 4).mean(1)
        return self.net(features).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.ledger.append(("val", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))
        self.log("val_loss", self._loss(batch), batch_size=len(batch["id"]))


def train_on(make: Callable[[], Any], **options: Any) -> Any:
    """:func:`train` with a :class:`SourcesModel`."""
    model = options.pop("model", None)
    seed = options.pop("seed", 1)
    model = seeded(SourcesModel, seed) if model is None else model
    return train(make, model=model, **options)


def plain_loader(**options: Any) -> DataLoader[Any]:
    """An ordinary DataLoader that serves what :func:`round_robin` does."""
    sampler = RoundRobinBatchSampler(LENGTHS, {"news": 2, "code": 3, "web": 1}, seed=7, **options)
    return DataLoader(ConcatDataset(list(datasets().values())), batch_sampler=sampler)


class Beside(StatefulDataModule):
    """Sources beside a plain loader of ``length`` batches."""

    def __init__(self, length: int, num_steps: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.length, self.num_steps = length, num_steps

    def train_dataloader(self) -> Any:
        plain = DataLoader(Numbers(self.length, first=600), shuffle=True)
        return {"turns": plain_loader(num_steps=self.num_steps), "plain": plain}


class SaveAt(Checkpoint):
    """Saves a checkpoint at every one of many moments of one run, and what the run had done until then.

    Args:
        folder: Where to save; the checkpoints are named by their number.
        moments: Hooks, each with an epoch and the number of its calls in that epoch before.
    """

    def __init__(self, folder: Path, moments: list[tuple[str, int, int]]) -> None:
        self._folder, self._moments = folder, list(moments)
        self._calls: Counter[tuple[str, int]] = Counter()
        self.ledgers: dict[int, list[Event]] = {}
        self.logged: dict[int, list[tuple[str, int]]] = {}
        for hook in {hook for hook, _, _ in moments}:
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.sanity_checking:
                return
            moment = (hook, trainer.current_epoch, self._calls[hook, trainer.current_epoch])
            self._calls[hook, trainer.current_epoch] += 1
            if moment in self._moments:
                number = self._moments.index(moment)
                trainer.save_checkpoint(self.path(number))
                self.ledgers[number] = copy.deepcopy(module.ledger)
                self.logged[number] = list(trainer.logger.steps)

        return save

    def path(self, number: int) -> Path:
        """Where the checkpoint of a moment is."""
        return self._folder / f"{number}.ckpt"


def trained(ledger: list[Event]) -> list[Event]:
    """The training steps of a ledger."""
    return [event for event in ledger if event[0] == "train"]


def ids_of(event: Event) -> tuple[int, ...]:
    """The samples of a step, whether it has a tag or not."""
    batch = event[4]
    return batch[1] if len(batch) == 2 and isinstance(batch[1], tuple) else batch


def samples(ledger: list[Event], epoch: int | None = None) -> list[int]:
    """What was trained on, in one epoch or in all."""
    return [index for event in trained(ledger) if epoch in (None, event[1]) for index in ids_of(event)]


def samples_of(source: str, ledger: list[Event]) -> list[int]:
    """What was trained on of one source, in order."""
    return [index for index in samples(ledger) if source_of(index) == source]


def assert_goes_on_from_every_moment(
    folder: Path,
    make: Callable[[], Any],
    moments: list[tuple[str, int, int]],
    run: Any = train,
    *,
    served_again: int | None = None,
    **options: Any,
) -> Any:
    """A run resumed from checkpoints of many moments does, each time, what it would have done without the stop.

    Args:
        folder: Where to save.
        make: Makes the data.
        moments: Hooks, each with an epoch and the number of its calls in that epoch before.
        run: What trains, as :func:`train` does.
        served_again: As for :func:`assert_stitches`.
        **options: Of ``run``; two epochs by default.

    Returns:
        What the uninterrupted run did.
    """
    options = {"max_epochs": 2, **options}
    saver = SaveAt(folder, moments)
    saving = run(make, callbacks=[saver], **options)
    whole = run(make, **options)
    # Saving changes nothing.
    assert saving.ledger == whole.ledger
    assert_same_end(saving, whole)
    assert len(saver.ledgers) == len(moments), "a moment was never reached"
    for number, moment in enumerate(moments):
        resumed = run(make, ckpt_path=saver.path(number), seed=99, **options)
        try:
            assert_stitches([saver.ledgers[number], resumed.ledger], whole.ledger, served_again)
            assert_same_end(resumed, whole)
        except AssertionError as error:
            raise AssertionError(f"stopped at {moment}") from error
    return whole
