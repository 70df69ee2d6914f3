"""Leaving the toolkit, and taking it up, in the middle of an epoch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.ledger import LedgerModel, Numbers, trained
from support.ranks import start
from support.runs import SaveAt, quiet_trainer, stopped, train, train_alone
from support.sampler_cases import PlainData
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.errors import StatefulWarning


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Numbers(8).__getitem__, range(8))


def rows() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=2)


def numbers(length: int = 8) -> DataLoader[Any]:
    return DataLoader(Numbers(length), batch_size=2, shuffle=True)


MAKE: dict[str, Any] = {"one": numbers, "stream": rows, "two": lambda: {"a": numbers(), "b": numbers(6)}}


def test_a_plain_trainer_resumes_checkpoints_of_this_package_where_it_is_not_installed(tmp_path: Path) -> None:
    for name, make in MAKE.items():
        stopped(tmp_path / f"{name}-middle.ckpt", make, run=train_alone, batch=1)
    stopped(tmp_path / "one-end.ckpt", numbers, "on_train_epoch_end", run=train_alone)

    log = tmp_path / "log.txt"
    process = start(resume_without_the_toolkit, tmp_path, log=log)
    process.join(120)
    said = log.read_text().splitlines()
    assert [line for line in said if line.startswith("epoch")] == [
        "epoch 2: one-end", "epoch 2: one-middle", "epoch 2: stream-middle", "epoch 2: two-middle",
    ], said  # fmt: skip


def resume_without_the_toolkit(folder: Path) -> None:
    """Resume checkpoints where nothing can import this package; their names say what data they were made with."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning_stateful"]:
        del sys.modules[name]
    sys.modules["lightning_stateful"] = None  # type: ignore[assignment]  # so that an import of it fails
    for path in sorted(folder.glob("*.ckpt")):
        trainer = quiet_trainer(max_epochs=2)
        trainer.fit(LedgerModel(), MAKE[path.name.split("-")[0]](), ckpt_path=path)
        print(f"epoch {trainer.current_epoch}: {path.stem}", flush=True)


# Moments of a run of 4 batches an epoch, with a validation after each, and the batches done by then.
MOMENTS = {
    ("on_train_epoch_start", 0, 0): 0,
    ("on_train_batch_start", 0, 0): 0,
    ("on_before_backward", 0, 0): 0,
    ("on_train_batch_end", 0, 0): 1,
    ("on_train_epoch_end", 0, 0): 4,
    ("on_train_epoch_start", 1, 0): 4,
    ("on_train_batch_start", 1, 2): 6,
    ("on_before_backward", 1, 2): 6,
    ("on_before_backward", 1, 3): 7,
    ("on_train_batch_end", 1, 3): 8,
    ("on_validation_start", 1, 0): 8,
    ("on_train_epoch_end", 1, 0): 8,
}


@pytest.mark.filterwarnings("ignore:The checkpoint has no data state")
def test_a_checkpoint_of_a_plain_trainer_is_taken_up_where_its_counters_say_whatever_the_hook(tmp_path: Path) -> None:
    def in_order() -> Any:
        return PlainData(lambda: DataLoader(Numbers(8), batch_size=2))

    saver = SaveAt(tmp_path, list(MOMENTS))
    whole = train(in_order, callbacks=[saver])
    for number, (moment, done) in enumerate(MOMENTS.items()):
        resumed = train_alone(in_order, ckpt_path=saver.path(number))
        assert trained(resumed.ledger) == trained(whole.ledger)[done:], moment
        assert resumed.total_batches == whole.total_batches, moment


@pytest.mark.filterwarnings("ignore:.*were read again.*")
def test_taking_it_up_on_a_stream_begins_the_pass_anew_and_says_so(tmp_path: Path) -> None:
    path, again = tmp_path / "plain.ckpt", tmp_path / "again.ckpt"
    stopped(path, rows, epoch=1, batch=1)

    with pytest.warns(StatefulWarning, match=r"batch 2 of epoch 1.*Rows begins anew"):
        run = train_alone(rows, ckpt_path=path)
    served = [(epoch, step, ids) for _, epoch, step, _, ids in trained(run.ledger)]
    passed = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert served == [(1, 2 + step, ids) for step, ids in enumerate(passed)] + [
        (2, step, ids) for step, ids in enumerate(passed)
    ]

    # From then on it resumes exactly.
    with pytest.warns(StatefulWarning, match="begins anew"):
        stopped(again, rows, run=train_alone, epoch=1, ckpt_path=path)
    assert train_alone(rows, ckpt_path=again).ledger == run.ledger[1:]


def test_taking_it_up_within_a_window_of_accumulation_can_be_saved_at_once(tmp_path: Path) -> None:
    path, again = tmp_path / "plain.ckpt", tmp_path / "again.ckpt"
    stopped(path, rows, batch=1)
    with pytest.warns(StatefulWarning, match="begins anew"):
        stopped(again, rows, run=train_alone, ckpt_path=path, accumulate_grad_batches=4)
    assert again.exists()


def test_taking_it_up_after_the_last_batch_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    stopped(path, rows, batch=3)
    with pytest.warns(StatefulWarning, match="batch 4 of epoch 0"):
        run = train_alone(rows, ckpt_path=path)
    assert [event[1:3] for event in trained(run.ledger)][:2] == [(1, 0), (1, 1)]
