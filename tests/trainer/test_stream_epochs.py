"""Where epochs over streams begin and end when limits, loaders or trainers change: nothing is lost by it."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.ledger import LedgerModel, Numbers
from support.runs import seeded, train
from support.sources import SourcesModel, samples, train_on, trained
from support.stream_runs import (
    EVERY_SAMPLE,
    OF_OTHERS,
    OTHER_FIRST,
    OTHER_SIZES,
    SIZES,
    VAL_FIRST,
    VAL_SAMPLES,
    VAL_SIZES,
    chunks,
    module,
)
from torch.utils.data import DataLoader

from lightning_stateful import MixedStream, StatefulDataCallback, StreamDataModule, patch_dataloader
from lightning_stateful.errors import ConfigurationError, StatefulWarning

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def plain_module(**options: Any) -> StreamDataModule:
    return module(chunks(), val=None, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"limit_train_batches": 9}, {"limit_train_batches": 5}),
        ({"limit_train_batches": 5}, {}),
    ],
    ids=str,
)
def test_another_limit_on_a_resume_loses_nothing(tmp_path: Path, before: Any, after: Any) -> None:
    first = train_on(plain_module, max_steps=8, max_epochs=-1, **before)
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train_on(plain_module, ckpt_path=tmp_path / "stop.ckpt", max_steps=22, max_epochs=-1, **after)

    # Two passes of eleven batches.
    assert Counter([*samples(first.ledger), *samples(resumed.ledger)]) == Counter(EVERY_SAMPLE * 2)


class Grows(StreamDataModule):
    """Has other chunks in its second epoch."""

    sizes = (SIZES[:4], SIZES)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.train = chunks(self.sizes[min(self.trainer.current_epoch, 1)])
        return super().train_dataloader()


@pytest.mark.parametrize("turned", [False, True])
def test_other_chunks_in_a_loader_made_anew_are_all_read(turned: bool) -> None:
    class Shrinks(Grows):
        sizes = Grows.sizes[::-1]

    kind = Shrinks if turned else Grows
    with pytest.warns(StatefulWarning, match="is another than before, so it begins anew with epoch 1: dataset.chunks"):
        run = train_on(
            lambda: kind(batch_size=2, seed=7, train=chunks()), reload_dataloaders_every_n_epochs=1, max_epochs=2
        )
    for epoch, sizes in enumerate(kind.sizes):
        found = [index for event in trained(run.ledger) if event[1] == epoch for index in event[4]]
        assert sorted(found) == list(range(sum(sizes)))


def test_a_trainer_leaves_no_limit_behind() -> None:
    loader = patch_dataloader(DataLoader(chunks(), batch_size=2), seed=7)
    pl.Trainer(**QUIET, fast_dev_run=True).fit(seeded(SourcesModel), loader)
    model = seeded(SourcesModel)
    pl.Trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(model, loader)

    assert sorted(samples(model.ledger)) == EVERY_SAMPLE
    assert len(list(loader)) == 11


def test_an_epoch_of_the_middle_of_a_pass_begins_where_it_did_when_it_is_broken_off() -> None:
    loader = patch_dataloader(DataLoader(chunks((30, 30, 20)), batch_size=2), seed=7)
    limited = type(loader)(DataLoader(chunks((30, 30, 20)), batch_size=2), loader.options)
    limited.order.prepare("here", limit=18)
    batches = [batch["id"].tolist() for batch in limited]
    again = [[batch["id"].tolist() for batch in islice(limited, 17)] for _ in range(2)]

    assert len(batches) == 18
    assert again[0] == again[1]
    assert not set(map(tuple, again[0])) & set(map(tuple, batches))


def test_a_stream_too_short_for_the_epoch_of_others_is_refused_with_the_remedy() -> None:
    class Both(StreamDataModule):
        def train_dataloader(self) -> Any:
            return {"stream": super().train_dataloader(), "index": DataLoader(Numbers(16), batch_size=2)}

    with pytest.raises(ConfigurationError, match=r"5 steps an epoch, and the epoch has 8.*steps_per_epoch=8"):
        train(lambda: Both(chunks(), batch_size=2, steps_per_epoch=5), model=seeded(LedgerModel))


def test_of_streams_that_end_with_the_shortest_the_others_go_on_in_the_next_epoch(tmp_path: Path) -> None:
    class Shortest(StreamDataModule):
        def train_dataloader(self) -> Any:
            return pl.utilities.CombinedLoader(super().train_dataloader(), "min_size")

    def make() -> Any:
        return Shortest({"long": chunks(), "short": chunks(OTHER_SIZES, OTHER_FIRST)}, batch_size=2, seed=7)

    whole = train(make, max_epochs=6, model=seeded(LedgerModel))
    for name, every in (("long", EVERY_SAMPLE), ("short", OF_OTHERS)):
        found = Counter(index for event in trained(whole.ledger) for index in dict(event[4])[name])
        assert set(found) == set(every)
        assert max(found.values()) - min(found.values()) <= 1, name
    first = train(make, max_epochs=2, model=seeded(LedgerModel))
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(make, max_epochs=6, model=seeded(LedgerModel, 9), ckpt_path=tmp_path / "stop.ckpt")
    assert [*trained(first.ledger), *trained(resumed.ledger)] == trained(whole.ledger)


@pytest.mark.parametrize(("stop", "alone"), [("first_exhausted", True), ("cycle", False)])
def test_evaluation_of_a_mixture_gives_each_sample_once_whatever_stops_its_passes(stop: Any, alone: bool) -> None:
    mixed = MixedStream({"one": chunks(VAL_SIZES, VAL_FIRST), "two": chunks((9, 9), 600)}, stop=stop)
    model = seeded(SourcesModel)
    if alone:
        trainer = pl.Trainer(**QUIET, callbacks=[StatefulDataCallback()])
        trainer.validate(model, DataLoader(mixed, batch_size=2), verbose=False)
    else:
        trainer = pl.Trainer(**QUIET)
        trainer.validate(model, datamodule=module(chunks(), val=mixed), verbose=False)
    found = sorted(index for event in model.ledger for index in event[-1])
    assert found == [*VAL_SAMPLES, *range(600, 618)]


def test_a_map_style_dataset_is_evaluated_beside_a_stream() -> None:
    run = train_on(lambda: module(chunks(), val=Numbers(5, first=VAL_FIRST)), max_epochs=1)
    assert sorted(index for event in run.ledger if event[0] == "val" for index in event[-1]) == list(range(500, 505))


def test_loaders_made_anew_leave_no_workers_behind() -> None:
    counts = []

    class Counts(pl.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            counts.append(len(multiprocessing.active_children()))

    def make() -> Any:
        return plain_module(num_workers=1, persistent_workers=True)

    train_on(make, callbacks=[Counts()], limit_train_batches=2, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert counts == [1] * 4


def test_a_loader_whose_workers_were_ended_goes_on() -> None:
    def batches(ends: bool) -> Iterator[Any]:
        loader: Any = patch_dataloader(DataLoader(chunks(), batch_size=2, num_workers=1), seed=7)
        loader.order.prepare("here", limit=4)
        for _ in range(4):
            yield from (batch["id"].tolist() for batch in loader)
            if ends:
                loader._iterator = None

    assert list(batches(True)) == list(batches(False))
