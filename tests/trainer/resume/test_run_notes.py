"""The log says in one line what makes data exact, and in one where a run goes on; a checkpoint says how it was run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.command_data import drawn, iterable, mixture, plain, side_by_side, stream
from support.ledger import LedgerModel, Numbers
from support.runs import StoppedError, ended, numbers_module, quiet_trainer, stopped, train, train_alone
from torch.utils.data import DataLoader

import lightning_stateful
from lightning_stateful.errors import StateMismatchError


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The lines of the log that begin in some way."""
    caplog.set_level("INFO", logger="lightning.pytorch")
    return lambda begin: [record.message for record in caplog.records if record.message.startswith(begin)]


def test_a_resume_says_in_a_line_where_and_on_what_it_goes_on(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "last.ckpt"
    stopped(path, epoch=1, batch=3)
    assert said("Resumed") == []
    train(lambda: numbers_module(batch_size=3), ckpt_path=path)
    assert said("Resumed") == [
        "Resumed at epoch 1, batch 4 of 11 (8 of 22 samples): saved on 1 rank x 2, goes on on 1 rank x 3; "
        "next is batch 4 of 8."
    ]


def test_between_epochs_and_at_the_end_of_one_the_next_is_named(tmp_path: Path, said: Any) -> None:
    ended(tmp_path / "end.ckpt", max_epochs=1)
    train(ckpt_path=tmp_path / "end.ckpt", max_epochs=2)
    stopped(tmp_path / "last.ckpt", hook="on_train_batch_end", batch=10)
    train(ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    runs = "saved on 1 rank x 2, goes on on 1 rank x 2; next is batch 1 of 11"
    assert said("Resumed") == [
        f"Resumed at the beginning of epoch 1: {runs}.",
        f"Resumed at epoch 0, batch 11 of 11: {runs} of epoch 1.",
    ]


def test_where_nothing_is_left_and_which_seeds_apply_is_said(tmp_path: Path, said: Any) -> None:
    def run(make: Any = numbers_module, *, callbacks: Any = (), **options: Any) -> Any:
        return train(make, callbacks=[lightning_stateful.StatefulDataCallback(), *callbacks], **options)

    def noisy(seed: int) -> Any:
        return numbers_module(shuffle=False, seed=seed)

    ended(tmp_path / "end.ckpt", run=run, max_steps=14)
    run(ckpt_path=tmp_path / "end.ckpt", max_steps=14)
    ended(tmp_path / "over.ckpt", max_epochs=1)
    train(ckpt_path=tmp_path / "over.ckpt", max_epochs=1)
    assert [line.partition("; ")[2] for line in said("Resumed")] == [
        "no batch is left to train on: max_steps=14 is reached.",
        "no batch is left to train on: max_epochs=1 is reached.",
    ]
    draws = said("Samplers and samples draw")
    beside, alone = (f"(seed 7, epoch, batch){model}, and not from" for model in ("; the model by seed 0", ""))
    assert [beside in draws[0], beside in draws[1], alone in draws[2]] == [True] * 3
    # Noise is drawn by the module's seed, which the callback's says nothing of.
    stopped(tmp_path / "noisy.ckpt", lambda: noisy(7), run=run)
    with pytest.raises(StateMismatchError, match="seed: saved 7, now 8"):
        run(lambda: noisy(8), ckpt_path=tmp_path / "noisy.ckpt")


def test_other_kinds_of_data_and_older_checkpoints_say_what_they_can(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "last.ckpt"
    stopped(path, mixture, epoch=1, batch=3)
    train(mixture, ckpt_path=path)
    stopped(path, stream, batch=3)
    train(stream, ckpt_path=path, max_epochs=1)
    stopped(path, batch=3)
    contents = torch.load(path, weights_only=True)
    del contents["callbacks"]["StatefulDataCallback"]["written"]
    torch.save(contents, path)
    train(ckpt_path=path, max_epochs=1)
    assert said("Resumed") == [
        "Resumed at epoch 1, batch 4 of 8: saved on 1 rank, goes on on 1 rank; next is batch 5 of 8.",
        "Resumed at epoch 0, batch 4: saved on 1 rank x 2, goes on on 1 rank x 2.",
        "Resumed at epoch 0, batch 4 (8 of 22 samples): goes on on 1 rank x 2; next is batch 5 of 11.",
    ]


def test_without_a_data_state_the_warning_says_it_and_nothing_is_said_twice(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "last.ckpt"
    stopped(path, plain, batch=3)
    with pytest.warns(UserWarning, match="goes on at batch 4 of epoch 0"):
        train_alone(plain, ckpt_path=path, max_epochs=1)
    assert said("Resumed") == []


def test_a_trainer_that_is_fitted_again_says_where_it_goes_on(said: Any) -> None:
    def break_off(trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            raise StoppedError

    trainer, module, model = (
        quiet_trainer(LambdaCallback(on_train_batch_end=break_off)),
        numbers_module(),
        LedgerModel(),
    )
    with pytest.raises(StoppedError):
        trainer.fit(model, module)
    trainer.fit(model, module)
    assert said("Resumed") == [
        "Resumed at epoch 0, batch 4 of 11 (8 of 22 samples): saved on 1 rank x 2, goes on on 1 rank x 2; "
        "next is batch 5 of 11. This trainer is fitted again: it goes on in its epoch, where Lightning alone begins "
        "the next."
    ]


COMPUTED = "Its order is computed: a resume goes on at any batch at once, on any number of ranks."
NOTES: dict[str, tuple[Any, list[str]]] = {
    "plain": (plain, [f"Training data: 22 samples, shuffled by seed 7. {COMPUTED}"]),
    "side by side": (
        side_by_side,
        [
            f"Training data 'a': 22 samples, shuffled by seed 7. {COMPUTED}",
            f"Training data 'b': 10 samples in the dataset's order. {COMPUTED}",
        ],
    ),
    "drawn": (
        drawn,
        ["Training data: WeightedRandomSampler is begun anew on a resume and fast-forwarded, by indices alone."],
    ),
    "iterable": (
        iterable,
        [
            "Training data: Given is a stream: every rank and worker trains on what its own dataset gives it, and a "
            "resume reads it again, because it has no state_dict and load_state_dict."
        ],
    ),
}


@pytest.mark.parametrize(("make", "expected"), NOTES.values(), ids=NOTES)
def test_a_fit_says_in_a_line_for_each_loader_what_a_resume_will_do(said: Any, make: Any, expected: list[str]) -> None:
    train_alone(make, max_steps=1)
    assert said("Training data") == expected


def test_a_checkpoint_says_how_it_was_run_and_no_resume_compares_it(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    stopped(path, batch=3, limit_train_batches=7)
    contents = torch.load(path, weights_only=True)
    written = contents["callbacks"]["StatefulDataCallback"]["written"]
    assert written.pop("versions") == {
        "lightning_stateful": lightning_stateful.__version__,
        "torch": str(torch.__version__),
    }
    assert written.pop("arguments") == {"limit_train_batches": "7"}
    assert written == {"ranks": 1, "steps": 7, "batch_size": {"": 2}, "workers": {"": 0}}
    written |= {"ranks": 64, "steps": 1, "batch_size": {}, "versions": {"torch": "1.0"}}
    torch.save(contents, path)
    assert len(train(ckpt_path=path, max_epochs=1, limit_train_batches=7).ledger) > 3


def test_a_resume_without_workers_says_what_would_be_others(tmp_path: Path, said: Any) -> None:
    def make(workers: int) -> Any:
        return DataLoader(Numbers(12), batch_size=2, num_workers=workers)

    stopped(tmp_path / "last.ckpt", partial(make, 2), epoch=0, batch=2, run=train_alone)
    for workers in (1, 2, 0):
        train_alone(partial(make, workers), ckpt_path=tmp_path / "last.ckpt")
    assert said("num_workers") == [
        "num_workers was 2 in the run that wrote the checkpoint, and is 0: samples that follow from the worker that "
        "reads them, by get_worker_info() or worker_init_fn, would be others."
    ]


class ByHash(Numbers):
    """Samples that follow from a number which is another one in each process."""

    salt = "a"

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if hash(self.salt) else None


@pytest.mark.parametrize("kind", [ByHash, Numbers])
def test_data_that_call_hash_are_named_in_a_process_that_hashes_otherwise(tmp_path: Path, said: Any, kind: Any) -> None:
    path, make = tmp_path / "last.ckpt", lambda: DataLoader(kind(12), batch_size=2)
    stopped(path, make, epoch=0, batch=2, run=train_alone)
    train_alone(make, ckpt_path=path)
    assert said("ByHash") == []
    contents = torch.load(path, weights_only=True)
    written = contents["callbacks"]["StatefulDataCallback"]["written"]
    assert ("hashes" in written) == (kind is ByHash)
    written["hashes"] = "1"
    torch.save(contents, path)
    train_alone(make, ckpt_path=path)
    assert ["calls hash()" in line for line in said("ByHash")] == [True] * (kind is ByHash)


def test_other_arguments_of_the_trainer_are_named(tmp_path: Path, said: Any) -> None:
    stopped(tmp_path / "last.ckpt", batch=3, accumulate_grad_batches=2)
    train(ckpt_path=tmp_path / "last.ckpt", accumulate_grad_batches=2)
    assert said("Arguments of the Trainer") == []
    train(ckpt_path=tmp_path / "last.ckpt", val_check_interval=5)
    assert said("Arguments of the Trainer") == [
        "Arguments of the Trainer are others than in the run that wrote the checkpoint: accumulate_grad_batches was 2 "
        "and is 1, val_check_interval was 1.0 and is 5. Training goes on by those of now."
    ]
