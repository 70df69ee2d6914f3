"""The ledger of a run is what the model was trained on, over stops at every moment, kills, and other ranks."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ddp_runs import chain_of, on_ranks
from support.handlers import HandlerError, raising_at
from support.ledger import LedgerModel, Numbers, batches, trained
from support.ranks import Ranks, start, start_ranks
from support.runs import Moment, SaveAt, SaveOnException, StopAt, numbers_module, quiet_trainer, stopped, train
from support.stream_runs import EVERY_SAMPLE, Own, chunks, sample
from support.stream_runs import module as stream_module
from support.stream_troubles import fail
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.audit import read_ledger
from lightning_stateful.errors import ConfigurationError, ShardError, StatefulWarning
from lightning_stateful.ledger.over_time import waiting_of
from lightning_stateful.trainer import ledger as trainer_ledger

NUM = 22


def keys_of(batch: Any) -> Any:
    return batch["id"]


def writing(folder: Path, key: Any = None) -> Any:
    """Trains as :func:`train` does, with a ledger."""

    def run(make: Any = numbers_module, *, callbacks: Any = (), **options: Any) -> Any:
        writer = StatefulDataCallback(ledger=folder / "ledger", ledger_key=key)
        return train(make, callbacks=[writer, *callbacks], **{"max_epochs": 2, **options})

    return run


def written(folder: Path, epoch: int, path: str = "", rank: int = 0) -> list[Any]:
    """The items of the batches of an epoch in the order in which they were trained on."""
    rows = read_ledger(folder / "ledger").rows[path][epoch, 0]
    return [tuple(row.items) for row in rows if row.rank == rank]


def numbers_loader(**options: Any) -> Any:
    return DataLoader(Numbers(NUM), batch_size=2, shuffle=True, **options)


class Twice(DataLoader[Any]):
    """Gives each batch twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


MOMENTS: list[Moment] = [
    ("on_train_batch_end", 0, 3),
    ("on_train_batch_start", 0, 0),
    ("on_before_backward", 0, 5),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_end", 1, 10),
]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (numbers_module, {}),
        (numbers_module, {"accumulate_grad_batches": 4}),
        (lambda: numbers_loader(num_workers=1), {}),
    ],
    ids=["data module", "windows", "workers"],
)
def test_a_run_stopped_at_any_moment_has_the_ledger_of_one_that_was_not(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, Any]
) -> None:
    moments = MOMENTS if make is numbers_module and not options else MOMENTS[:3]
    saver, run = SaveAt(tmp_path, moments), writing(tmp_path)
    whole = run(make, callbacks=[saver], **options)
    for epoch in range(2):
        assert written(tmp_path, epoch) == batches(whole.ledger, epoch)
    for number, moment in enumerate(moments):
        run(make, ckpt_path=saver.path(number), seed=5, **options)
        found = read_ledger(tmp_path / "ledger")
        assert found.findings() == [], moment
        assert len(found.starts) == 2
        for epoch in range(2):
            assert written(tmp_path, epoch) == batches(whole.ledger, epoch), moment
        assert all(row["over"] and row["distinct"] == row["length"] == NUM for row in found.epochs())


def test_what_a_crash_leaves_behind_a_checkpoint_is_lost_and_a_trainer_that_is_fitted_again_goes_on(
    tmp_path: Path,
) -> None:
    run = writing(tmp_path)
    crash = StopAt("on_train_batch_end", None, batch=6)
    saver = SaveAt(tmp_path, [("on_train_batch_end", 0, 3)])
    run(callbacks=[saver, crash])
    run(ckpt_path=saver.path(0), max_steps=15)
    found = read_ledger(tmp_path / "ledger")
    assert [(one.num_kept, one.num_lost) for one in found.starts] == [(4, 3), (11, 0)]
    assert [row["over"] for row in found.epochs()] == [True, False]
    assert found.findings() == []


def test_loaders_side_by_side_are_written_by_their_paths_and_epochs(tmp_path: Path) -> None:
    def make() -> Any:
        loaders = {"long": numbers_loader(), "short": DataLoader(Numbers(6, first=50), batch_size=2, shuffle=True)}
        return CombinedLoader(loaders, "max_size_cycle")

    stopped(tmp_path / "a.ckpt", make, epoch=0, batch=5, run=writing(tmp_path))
    writing(tmp_path)(make, ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert sorted(index for batch in written(tmp_path, 1, "long") for index in batch) == list(range(NUM))
    passes = found.rows["short"]
    assert list(passes) == [(epoch, cycle) for epoch in range(2) for cycle in range(4)]
    for at, rows in passes.items():
        items = [item for row in rows for item in row.items]
        # The epoch ends in the last pass.
        assert len(items) == len(set(items)) == (4 if at[1] == 3 else 6)


def test_batches_of_other_data_are_known_by_their_keys(tmp_path: Path) -> None:
    def make() -> Any:
        return stream_module(chunks())

    run = writing(tmp_path, keys_of)
    stopped(tmp_path / "a.ckpt", make, epoch=1, batch=2, run=run)
    resumed = run(make, ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert found.notes() == [
        "Whether items never came was not asked: that is known of the indices of a single loader alone, without limits "
        "and drop_last."
    ]
    assert str(found).endswith("Nothing was trained on twice.")
    assert found.items(0) == Counter(EVERY_SAMPLE)
    rest = batches(resumed.ledger, 1)
    assert written(tmp_path, 1)[-len(rest) :] == rest


@pytest.mark.parametrize("make", [lambda: stream_module(Own()), lambda: Twice(Numbers(NUM), batch_size=2)])
def test_batches_that_are_not_known_are_counted(tmp_path: Path, make: Callable[[], Any]) -> None:
    whole = writing(tmp_path)(make, max_epochs=1)
    rows = read_ledger(tmp_path / "ledger").rows[""][0, 0]
    assert [(row.batch, row.items) for row in rows] == [(event[2], []) for event in trained(whole.ledger)]


# Ranks


def on_two(folder: Path) -> Any:
    make: Any = numbers_loader
    writer = [lambda: StatefulDataCallback(ledger=folder / "ledger", seed=7)]
    chain = chain_of(make, folder, [("on_train_batch_end", 0, 2)], callbacks=lambda: [one() for one in writer])
    train(
        make,
        callbacks=[
            StatefulDataCallback(ledger=folder / "ledger", seed=7),
            SaveAt(folder, [("on_train_batch_end", 1, 1)]),
        ],
        **on_ranks(),
    )
    return [part["ledger"] for part, _ in chain]


def test_ranks_write_their_own_files_and_other_ranks_go_on_in_others(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path)
    chains = ranks.of(on_two)
    folder = ranks.folder_of(on_two)
    starts = sorted(path.name for path in (folder / "ledger").iterdir())
    resumed = read_ledger(folder / "ledger", start=starts[1])
    assert resumed.findings() == []
    assert resumed.items(0) == Counter(range(NUM)) + Counter(dict(resumed.items(0) - Counter(range(NUM))))
    for rank, (whole, _) in enumerate(chains):
        for epoch in range(2):
            assert written_by(folder, epoch, rank, starts[1]) == list(map(tuple, batches_of(whole, epoch)))
    callback = StatefulDataCallback(ledger=folder / "ledger", seed=7)
    train(numbers_loader, callbacks=[callback], ckpt_path=folder / "0.ckpt", max_epochs=2)
    times = waiting_of(resumed)
    assert times is not None
    assert [(one.start, one.rank, one.steps) for one in times.ranks] == [
        *((0, rank, 12) for rank in range(2)),
        *((1, rank, 9) for rank in range(2)),
    ]
    assert times.ranks[0].last + times.ranks[1].last >= 12
    assert all(0 <= one.own + one.others <= 1.001 * one.seconds for one in times.ranks)
    alone = read_ledger(folder / "ledger")
    assert [start.header.num_replicas for start in alone.starts] == [2, 1]
    assert alone.findings() == []
    assert set(alone.items(1)) == set(range(NUM))


def written_by(folder: Path, epoch: int, rank: int, start: str) -> list[Any]:
    rows = read_ledger(folder / "ledger", start=start).rows[""][epoch, 0]
    return [tuple(row.items) for row in rows if row.rank == rank]


def batches_of(ledger: list[Any], epoch: int) -> list[Any]:
    return [event[-1] for event in ledger if event[0] == "train" and event[1] == epoch]


# Kills, and files that cannot be written


def killed(folder: str) -> None:
    """Trains until it is killed, two batches behind its checkpoint."""

    def end(trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if number == 4:
            trainer.save_checkpoint(Path(folder) / "a.ckpt")
        if number == 7:
            Path(folder, "done.json").write_text(json.dumps(batches(module.ledger, 0)))
            os.kill(os.getpid(), signal.SIGKILL)

    writing(Path(folder))(callbacks=[LambdaCallback(on_train_batch_end=end)])


def test_a_run_that_is_killed_leaves_all_that_its_checkpoint_holds(tmp_path: Path) -> None:
    process = start(killed, str(tmp_path), log=tmp_path / "log.txt")
    process.join(100)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    writing(tmp_path)(ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert found.items(0) == found.items(1) == Counter(range(NUM))
    done = [tuple(batch) for batch in json.loads((tmp_path / "done.json").read_text())]
    assert written(tmp_path, 0)[:5] == done[:5]


class DiesFirst(pl.Callback):
    """Rank 1 is killed in a batch, behind the gradients of both ranks, that rank 0 writes into a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            deadline = time.monotonic() + 60
            while not (self.folder / "a.ckpt").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.folder / "a.ckpt")


def killed_in_a_batch(folder: Path) -> None:
    writing(folder)(numbers_loader, callbacks=[DiesFirst(folder)], **on_ranks())


@pytest.mark.slow
def test_a_checkpoint_that_a_rank_did_not_live_to_see_has_its_batches_too(tmp_path: Path) -> None:
    processes = start_ranks(killed_in_a_batch, tmp_path)
    for process in processes:
        process.join(100)
    assert processes[1].exitcode == -signal.SIGKILL, (tmp_path / "rank1.log").read_text()
    writing(tmp_path)(numbers_loader, ckpt_path=tmp_path / "a.ckpt", seed=3)
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert set(found.items(0)) == set(range(NUM))


def test_a_checkpoint_of_a_start_that_failed_before_its_first_batch_leads_to_the_one_before(tmp_path: Path) -> None:
    # Of data without a length Lightning reads the first batch before training begins.
    marker = tmp_path / "marker"

    def read(number: int) -> Any:
        return fail(marker) if marker.exists() else sample(number)

    def make() -> Any:
        return stream_module(chunks(transform=read))

    run, path = writing(tmp_path, keys_of), tmp_path / "a.ckpt"
    stopped(path, make, epoch=0, batch=8, run=run)
    marker.touch()
    with pytest.raises(ShardError):
        run(make, ckpt_path=path, callbacks=[SaveOnException(tmp_path / "b.ckpt")])
    marker.unlink()
    run(make, ckpt_path=tmp_path / "b.ckpt")
    found = read_ledger(tmp_path / "ledger")
    assert len(found.starts) == 2
    assert found.findings() == []
    assert found.items(0) == Counter(EVERY_SAMPLE)


class RaisesWithin(pl.Callback):
    """The handler of a signal raises before a line of what writes a ledger, in the fourth batch of an epoch."""

    def __init__(self, number: int, hook: str) -> None:
        self.number, self.hook = number, hook

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.begin("on_train_batch_start", batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.begin("on_train_batch_end", batch_idx)

    def begin(self, hook: str, batch: int) -> None:
        # Until another hook than that of this batch is called.
        sys.settrace(raising_at(self.number, trainer_ledger, "line") if (hook, batch) == (self.hook, 3) else None)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_an_error_of_a_signal_within_a_hook_leaves_all_that_its_checkpoint_holds(tmp_path: Path, hook: str) -> None:
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        callbacks = [RaisesWithin(number, hook), SaveOnException(folder / "a.ckpt")]
        try:
            train(callbacks=[callbacks[0], StatefulDataCallback(ledger=folder / "ledger"), callbacks[1]], max_epochs=1)
        except HandlerError as error:
            where = str(error)
        else:
            break
        finally:
            sys.settrace(None)
        writing(folder)(ckpt_path=folder / "a.ckpt", max_epochs=1)
        found = read_ledger(folder / "ledger")
        assert found.findings() == [], where
        assert found.items(0) == Counter(range(NUM)), where
    assert number > 10


def on_a_full_disk(folder: str) -> None:
    """Trains where a file may have no more than so many bytes, which stands for a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
    with pytest.warns(StatefulWarning, match="could not be written any more: .* Training goes on without it") as said:
        whole = writing(Path(folder))()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert sum("could not be written" in str(one.message) for one in said) == 1
    assert len(batches(whole.ledger)) == NUM


def test_training_goes_on_without_a_ledger_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    process = start(on_a_full_disk, str(tmp_path), log=tmp_path / "log.txt")
    process.join(100)
    assert process.exitcode == 0, (tmp_path / "log.txt").read_text()
    found = read_ledger(tmp_path / "ledger").findings()
    assert {one.kind for one in found} <= {"damaged"}


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file")
    model = LedgerModel()
    callback = StatefulDataCallback(ledger=tmp_path / "ledger")
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*Pass StatefulDataCallback\(ledger=...\)"):
        quiet_trainer(callback).fit(model, numbers_loader())
    assert not trained(model.ledger)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda batch: None, "ledger_key gave None"),
        (lambda batch: [], r"ledger_key gave \[\]"),
        (lambda batch: batch["nope"], "ledger_key raised KeyError: 'nope'"),
        (lambda batch: batch["id"][:1], "ledger_key gave 1 keys for 2 samples"),
    ],
)
def test_a_key_that_gives_no_keys_is_refused_before_the_first_step(tmp_path: Path, key: Any, message: str) -> None:
    model = LedgerModel()
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(StatefulDataCallback(ledger=tmp_path, ledger_key=key)).fit(model, numbers_loader())
    assert not trained(model.ledger)


def test_a_key_that_fails_later_ends_no_run(tmp_path: Path) -> None:
    found: list[int] = []

    def key(batch: Any) -> Any:
        found.append(0)
        return keys_of(batch) if len(found) < 4 else None

    with pytest.warns(StatefulWarning, match="ledger_key gave None"):
        writing(tmp_path, key)(max_epochs=1)
    assert [len(items) for items in written(tmp_path, 0)] == [2] * 3 + [0] * 8


def test_a_checkpoint_at_the_end_of_an_epoch_has_all_of_it_whatever_hook_writes_it(tmp_path: Path) -> None:
    moments = [("on_validation_end", 0, 0), ("on_train_batch_end", 0, 10), ("on_train_epoch_end", 0, 0)]
    saver = SaveAt(tmp_path, moments)
    writing(tmp_path)(callbacks=[saver])
    for number in range(len(moments)):
        writing(tmp_path)(ckpt_path=saver.path(number))
        found = read_ledger(tmp_path / "ledger")
        assert (found.findings(), found.items(0)) == ([], Counter(range(NUM))), moments[number]


class Refuses(LedgerModel):
    """Leaves every epoch before its fifth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


def test_a_batch_that_the_model_has_refused_is_not_written(tmp_path: Path) -> None:
    saver = SaveAt(tmp_path, [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0)])
    first = StatefulDataCallback(ledger=tmp_path / "ledger")
    # Before the callback's own hook.
    whole = train(callbacks=[saver, first], model=Refuses(), max_epochs=2)
    for number in range(3):
        assert [written(tmp_path, epoch) for epoch in range(2)] == [batches(whole.ledger, epoch) for epoch in range(2)]
        assert all(row["over"] and row["items"] == 8 for row in read_ledger(tmp_path / "ledger").epochs())
        if number < 2:
            writing(tmp_path)(ckpt_path=saver.path(number), model=Refuses())


def test_epochs_of_a_stream_that_cross_passes_are_not_compared(tmp_path: Path) -> None:
    def make() -> Any:
        return stream_module(chunks(), steps_per_epoch=7)

    run = writing(tmp_path, keys_of)
    stopped(tmp_path / "a.ckpt", make, epoch=1, batch=3, run=run)
    run(make, ckpt_path=tmp_path / "a.ckpt")
    found = read_ledger(tmp_path / "ledger")
    assert found.findings() == []
    assert any("may begin in one pass" in note for note in found.notes())


def test_what_is_not_known_is_said_and_not_taken_for_right(tmp_path: Path) -> None:
    def some_keys(batch: Any) -> Any:
        return [] if 3 in batch["id"].tolist() else batch["id"]

    with pytest.warns(StatefulWarning, match="ledger_key gave"):
        writing(tmp_path / "keys", some_keys)(max_epochs=1)
    found = read_ledger(tmp_path / "keys" / "ledger")
    assert (found.findings(), found.verdict()) == ([], [])
    assert "Of 1 batch not all items are known: nothing is said of them." in found.notes()
    # Keys of data with an index need not be indices.
    writing(tmp_path / "others", lambda batch: batch["id"] * 10 + 7)(max_epochs=1)
    found = read_ledger(tmp_path / "others" / "ledger")
    assert found.findings() == []
    assert found.verdict() == ["Nothing was trained on twice."]
    writing(tmp_path / "cut")(max_epochs=1, limit_train_batches=3)
    assert read_ledger(tmp_path / "cut" / "ledger").verdict() == ["Nothing was trained on twice."]


@pytest.mark.filterwarnings("ignore:.*goes on with another seed, as was accepted")
@pytest.mark.parametrize(("stop", "expected"), [(3, 1), (9, 1)])
def test_another_seed_shows_what_came_twice_to_the_last_step(tmp_path: Path, stop: int, expected: int) -> None:
    run = writing(tmp_path)
    stopped(tmp_path / "a.ckpt", lambda: numbers_module(seed=1), batch=stop, run=run)
    run(lambda: numbers_module(seed=2, accept=("seed",)), ckpt_path=tmp_path / "a.ckpt", max_epochs=1)
    found = read_ledger(tmp_path / "ledger")
    trained = [item for row in found.rows[""][0, 0] for item in row.items]
    (twice,) = (one for one in found.findings() if one.kind == "twice")
    assert twice.number == len(trained) - len(set(trained)) >= expected


def test_a_start_that_finds_an_epoch_over_leaves_nothing_missing(tmp_path: Path) -> None:
    def make() -> Any:
        return stream_module(chunks())

    # Eleven batches: of the third epoch the limit leaves three.
    run, options = writing(tmp_path), {"limit_train_batches": 4, "max_epochs": 5}
    saver = SaveAt(tmp_path, [("on_train_batch_end", 2, 2)])
    run(make, callbacks=[saver], **{**options, "max_steps": 11})
    end = tmp_path / "end.ckpt"
    run(make, callbacks=[SaveOnEnd(end)], ckpt_path=saver.path(0), **{**options, "max_epochs": 3})
    run(make, ckpt_path=end, **options)
    found = read_ledger(tmp_path / "ledger")
    assert len(found.starts) >= 2
    assert found.findings() == []


class SaveOnEnd(pl.Callback):
    """Saves when fitting ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_key_without_a_ledger_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ledger_key says what a ledger holds"):
        StatefulDataCallback(ledger_key=keys_of)
