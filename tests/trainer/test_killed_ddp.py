"""Ranks that are killed with SIGKILL, under loaders of all kinds side by side."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import samplers
from support.ddp_runs import Settle, run
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks, kill, kill_after, ledger_of, start_ranks, wait_for_steps
from support.runs import seeded
from support.sampler_cases import cuts_loader, torchdatas_distributed
from support.samplers import LENGTH, loader
from support.sources import datasets
from support.stream_runs import (
    Own,
    OwnWithState,
    chunks,
    document,
    hugging_face,
    length_of,
    of_sequences,
    two_streams,
    write_files,
)
from support.texts import Texts
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful import (
    BucketBatchSampler,
    MixedStream,
    MixtureBatchSampler,
    Packing,
    StatefulDataCallback,
    StreamDataModule,
)

NUM_EPOCHS, NUM_STEPS = 2, 7
KINDS = 19


def stream(data: Any, num_workers: int = 0, **options: Any) -> Any:
    if "max_tokens" not in options:
        options["batch_size"] = 2
    # Those who wait for the dead give up before the tests do.
    options |= {"steps_per_epoch": NUM_STEPS, "buffer_size": 5, "timeout": 20, "num_workers": num_workers}
    return StreamDataModule(data, seed=7, persistent_workers=num_workers > 0, **options).train_dataloader()


def loaders(files: Path) -> dict[str, Any]:
    """Of each kind a loader, with and without workers, that gives a batch to every step."""
    parts = list(datasets(news=60, code=40, web=30).values())
    sizes = {name: len(part) for name, part in zip(("news", "code", "web"), parts, strict=True)}
    in_turn = MixtureBatchSampler(sizes, batch_size=2, weights=[1, 2, 1], num_steps=NUM_STEPS)
    texts = Texts(400)
    return {
        "shuffled": DataLoader(Numbers(60), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),
        "mixture": DataLoader(ConcatDataset(parts), batch_sampler=in_turn),
        "buckets": DataLoader(texts, batch_sampler=BucketBatchSampler(texts.num_tokens, max_tokens=40, num_buckets=4)),
        "random": loader(sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=4 * NUM_STEPS)),
        "weighted": loader(sampler=WeightedRandomSampler(samplers.WEIGHTS, 4 * NUM_STEPS)),
        "balanced": loader(batch_sampler=samplers.ClassBalanced(num_batches=2 * NUM_STEPS)),
        "batches": loader(batch_sampler=samplers.ShuffledBatches(3 * samplers.BATCHES)),
        "torchdata's sampler": torchdatas_distributed(batch_size=1),
        "torchdata's loader": StatefulDataLoader(Numbers(LENGTH), sampler=samplers.GlobalRandom()),
        "lhotse's": cuts_loader(85),
        "chunks": stream(chunks()),
        "chunks, workers": stream(chunks(), 2),
        "tokens": stream(chunks(), max_tokens=18, length=length_of, read_ahead=6),
        "packed": stream(chunks(transform=document), packing=Packing(17, how="whole"), collate_fn=of_sequences),
        "parquet": stream(hugging_face(files, "parquet")),
        "json": stream(hugging_face(files, "json")),
        "mixed": stream(MixedStream(two_streams(files), weights=[2, 1], by="sample")),
        "own with a state": stream(OwnWithState()),
        "own": stream(Own()),
    }


class Writes(LedgerModel):
    """Appends every batch of every loader to a file before it is trained on."""

    def __init__(self, path: Path, files: Path) -> None:
        super().__init__()
        self.path, self.files = path, files

    def train_dataloader(self) -> Any:
        return CombinedLoader(loaders(self.files), "min_size")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        served = {name: part["id"].tolist() for name, part in batch.items()}
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, served]) + "\n")
        return super().training_step(batch, batch_idx)


def train(folder: Path) -> Any:
    """Train, from the last checkpoint if there is one; the weights in the end."""
    last = folder / "last.ckpt"
    found = run(
        lambda: None,
        model=seeded(partial(Writes, folder / f"ledger{os.environ['RANK']}.jsonl", folder.parent / "files")),
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=1, save_last=True),
            StatefulDataCallback(seed=7),
            Settle(),
        ],
        ckpt_path=last if last.exists() else None,
        max_epochs=NUM_EPOCHS,
    )
    return {name: value.tolist() for name, value in found.weights.items()}


def go_on(folder: Path) -> Any:
    return train(folder.parent / "killed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "files").mkdir()
    write_files(folder / "files")
    return Ranks(2, folder)


@pytest.mark.slow
def test_ranks_killed_twice_train_on_exactly_the_uninterrupted_batches(ranks: Ranks) -> None:
    killed = ranks.folder / "killed"
    killed.mkdir()
    processes = start_ranks(train, killed)
    try:
        wait_for_steps(4, processes, killed)
        kill(processes[1:])
        began = time.monotonic()
        processes[0].join(60)
        assert time.monotonic() - began < 45, "a rank waits for ever for one that was killed"
        assert processes[0].exitcode not in (0, -9)
    finally:
        kill(processes)
    steps = len(ledger_of(killed, 0))
    kill_after(NUM_STEPS + 4, train, killed)
    assert 4 <= steps < NUM_STEPS + 4 <= len(ledger_of(killed, 0)) < NUM_EPOCHS * NUM_STEPS

    assert ranks.of(go_on) == ranks.of(train)
    for rank in range(2):
        ours, whole = ledger_of(killed, rank), ledger_of(ranks.folder_of(train), rank)
        assert len(whole) == NUM_EPOCHS * NUM_STEPS
        assert all(len(served) == KINDS for _, _, served in whole)
        # A kill between the step and its checkpoint repeats that step, to the same weights.
        once = [line for number, line in enumerate(ours) if line not in ours[max(number - 3, 0) : number]]
        assert once == whole
        assert len(ours) - len(once) <= 4
