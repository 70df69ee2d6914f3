"""Loaders with other people's samplers under the callback, in one process and on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed
from lhotse import CutSet
from lhotse.dataset.sampling import SimpleCutSampler
from lhotse.testing.dummies import dummy_cut
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful import DDPSamplerWrapper, StatefulDataCallback
from lightning_stateful.errors import StatefulError
from support import samplers
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, train
from support.samplers import LENGTH, LOADERS
from support.sources import SaveAt

MakeLoaders = Callable[[], Any]

VAL_FIRST = 100
DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 2}
MOMENTS = [
    ("on_before_backward", 0, 2),
    ("on_validation_batch_end", 0, 0),
    ("on_train_batch_end", 1, 1),
]
# After so many steps of an epoch a run on one rank or on two leaves the rest to the other number.
HANDED_OVER = 2


class PlainData(pl.LightningDataModule):
    """A data module that knows nothing of the toolkit, with five samples for validation unless it is told otherwise."""

    def __init__(self, make: MakeLoaders, val: MakeLoaders | None = None) -> None:
        super().__init__()
        self.make, self.val = make, val or val_loader

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return self.val()


class ByRank(Sampler[int]):
    """Yields another order on every rank, by what it reads in the environment."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ.get("RANK", "0"))
        return iter(np.random.default_rng(rank).permutation(LENGTH).tolist())


class ByHash(Sampler[int]):
    """Yields the order of a set of strings, which differs from process to process."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(int(name) for name in {str(number) for number in range(LENGTH)})


class Unshared(Sampler[int]):
    """Cannot be made deterministic on one of the ranks only."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(samplers.ByTheClock() if os.environ.get("RANK") == "1" else samplers.GlobalRandom())


class OfCuts(Dataset[Any]):
    """What lhotse's datasets are: it is given a whole set of cuts, and makes a batch of it."""

    def __getitem__(self, cuts: Any) -> Any:
        ids = [int(cut.id.rsplit("-", 1)[-1]) for cut in cuts]
        return {"id": torch.tensor(ids), "x": torch.rand(len(ids), 4) + torch.tensor(ids)[:, None] / 100}


def cuts_loader(num_cuts: int = LENGTH, **options: Any) -> DataLoader[Any]:
    """lhotse's sampler as its documentation uses it; it asks torch for the ranks by itself."""
    cuts = CutSet.from_cuts(dummy_cut(number, duration=1.0 + number % 4) for number in range(num_cuts))
    sampler = SimpleCutSampler(cuts, max_duration=6.0, shuffle=True, seed=3)
    return DataLoader(OfCuts(), sampler=sampler, batch_size=None, **options)


def torchdatas_distributed(batch_size: int = 2) -> DataLoader[Any]:
    """torchdata's sampler as it is built under DDP, where it asks torch for the ranks by itself."""
    asks = torch.distributed.is_initialized()
    ranks = {} if asks else {"num_replicas": 1, "rank": 0}
    return samplers.loader(sampler=TorchdataDistributedSampler(range(LENGTH), seed=3, **ranks), batch_size=batch_size)


def val_loader() -> DataLoader[Any]:
    """Five samples in order."""
    return DataLoader(Numbers(5, first=VAL_FIRST), batch_size=2)


def train_with(make: MakeLoaders | None, *, settings: dict[str, Any] | None = None, **options: Any) -> Outcome:
    """:func:`train` with the callback alone, on loaders that a plain data module makes; None for a model with hooks."""
    callback = StatefulDataCallback(**{"seed": 5, **(settings or {})})
    options = {**options, "callbacks": [callback, *options.pop("callbacks", [])]}
    return train((lambda: None) if make is None else (lambda: PlainData(make)), **options)


def callback_of(run: Outcome) -> Any:
    """The toolkit's callback of a run."""
    trainer: Any = run.trainer
    return next(callback for callback in trainer.callbacks if isinstance(callback, StatefulDataCallback))


# On ranks

# Every way in which a sampler may stand in a loader, and those that ask torch for the ranks by themselves.
ON_RANKS: dict[str, Callable[[], DataLoader[Any]]] = {
    **LOADERS,
    "torchdata's distributed": torchdatas_distributed,
    "lhotse's": cuts_loader,
}
# Those of which every moment is tried.
STOPPED = ("class balanced", "batches without len", "lhotse's")


def plain(run: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    return {
        "ledger": run.ledger,
        "weights": {name: value.tolist() for name, value in run.weights.items()},
        "end": (run.global_step, run.current_epoch, run.total_batches),
        "state": callback_of(run).data_state(),
        "report": callback_of(run).position_report(),
    }


def file_name(name: str, ranks: int) -> str:
    return f"{name}, {ranks}.ckpt"


def hand_over(folder: Path, name: str, **options: Any) -> Outcome:
    """Train a few steps and leave a checkpoint for another number of ranks."""
    run = train_with(ON_RANKS[name], max_steps=HANDED_OVER, **options)
    run.trainer.save_checkpoint(folder / file_name(name, run.trainer.world_size))
    return run


def seeds_differ() -> None:
    """Give every rank other global generators, as a script without ``seed_everything`` has."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)


def uninterrupted(folder: Path) -> dict[str, Any]:
    found = {}
    for name, make in ON_RANKS.items():
        found[name] = plain(train_with(lambda make=make: (seeds_differ(), make())[1], **DDP))
    return found


def every_moment(folder: Path) -> dict[str, Any]:
    """Of some loaders, the ledger up to each moment, and what the run resumed from there does."""
    found = {}
    for name in STOPPED:
        own = folder / name
        own.mkdir(exist_ok=True)
        saver = SaveAt(own, MOMENTS)
        train_with(ON_RANKS[name], callbacks=[saver], **DDP)
        torch.distributed.barrier()
        found[name] = [
            (ledger, plain(train_with(ON_RANKS[name], ckpt_path=saver.path(number), seed=9, **DDP)))
            for number, ledger in sorted(saver.ledgers.items())
        ]
    return found


def saved_on_two_ranks(folder: Path) -> dict[str, Any]:
    return {name: plain(hand_over(folder, name, **DDP)) for name in ON_RANKS}


def resumed_on_two_ranks(folder: Path) -> dict[str, Any]:
    """What one process left behind."""
    return {
        name: plain(train_with(make, ckpt_path=folder.parent / file_name(name, 1), seed=9, **DDP))
        for name, make in ON_RANKS.items()
    }


class Writes(pl.callbacks.BasePredictionWriter):
    """Remembers the indices and predictions that it should write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.append((list(indices or []), prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = batch_indices


# Batches that ranks cannot share evenly, by what is left of them.
TO_EVALUATE: dict[str, Callable[[], DataLoader[Any]]] = {
    "an odd batch": lambda: fixed_batches([[0, 1], [2, 3, 4], [5, 6, 7]]),
    "one sample": lambda: fixed_batches([[0, 1], [2, 3, 4], [5]]),
    "one sample after many": lambda: fixed_batches([[0, 1], [2, 3, 4], [5, 6], [7], [8]]),
    "one batch": lambda: fixed_batches([[0, 1, 2]]),
    "shuffled batches": lambda: samplers.loader(batch_sampler=samplers.ShuffledBatches(samplers.BATCHES[:7])),
    "batches without len": lambda: samplers.loader(batch_sampler=samplers.BatchesWithoutLen()),
    "samples without len": lambda: samplers.loader(sampler=samplers.WithoutLen(), batch_size=3),
    "own state": lambda: samplers.loader(sampler=samplers.OwnState(), batch_size=5),
    "one at a time": lambda: samplers.loader(sampler=samplers.GlobalRandom()),
}


class Fixed(Sampler[list[int]]):
    """Yields the same batches in every epoch."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def fixed_batches(batches: list[list[int]]) -> DataLoader[Any]:
    """A loader of given batches."""
    return samplers.loader(batch_sampler=Fixed(batches))


def evaluate(make: MakeLoaders, **options: Any) -> dict[str, Any]:
    """What each of the trainer's ways to evaluate gives the model."""
    found: dict[str, Any] = {}
    for stage in ("validate", "test", "predict"):
        writer, model = Writes(), Evaluates()
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[StatefulDataCallback(seed=5), writer],
            **{"devices": 1, **options},
        )
        result = getattr(trainer, stage)(model, dataloaders=make())
        found[stage] = model.batches
        if stage == "predict":
            found["predictions"] = [prediction.tolist() for prediction in result]
            found["written"], found["written at the end"] = writer.batches, writer.epoch
    return found


class Evaluates(LedgerModel):
    """Remembers the samples of every batch that it is to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch["id"].tolist())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch["id"].tolist())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch["id"].tolist())
        return batch["id"]


def evaluated(folder: Path) -> dict[str, Any]:
    return {name: evaluate(make, strategy="ddp", devices=2) for name, make in TO_EVALUATE.items()}


def refusal(sampler: Any) -> str:
    try:
        train_with(lambda: samplers.loader(sampler=sampler, batch_size=2), **DDP)
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def by_rank(folder: Path) -> str:
    return refusal(ByRank())


def by_hash(folder: Path) -> str:
    return refusal(ByHash())


def on_one_rank_only(folder: Path) -> str:
    return refusal(Unshared())


def lengths_differ(folder: Path) -> str:
    length = 5 + torch.distributed.get_rank()
    return refusal(DDPSamplerWrapper(samplers.Endless(), length=length))


ALL = [
    uninterrupted,
    every_moment,
    saved_on_two_ranks,
    resumed_on_two_ranks,
    evaluated,
    by_rank,
    by_hash,
    on_one_rank_only,
    lengths_differ,
]
