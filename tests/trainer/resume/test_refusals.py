"""A checkpoint that does not fit is refused with everything that differs, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.ledger import LedgerModel, Numbers, samples
from support.runs import assert_resumes, ended, numbers_module, train, train_alone, uninterrupted
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import (
    DamagedStateError,
    PositionError,
    StateError,
    StatefulWarning,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.state import sealed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 4 batches of epoch 1."""
    path = tmp_path_factory.mktemp("refusals") / "stop.ckpt"
    ended(path, max_steps=15)
    return path


def edited(path: Path, folder: Path, edit: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, folder / "edited.ckpt")
    return folder / "edited.ckpt"


@pytest.mark.parametrize(
    ("now", "path", "values"),
    [
        ({"train": Numbers(24)}, "dataset.length", "saved 22, now 24"),
        ({"seed": 8}, "seed", "saved 7, now 8"),
        ({"shuffle": False}, "shuffle", "saved True, now False"),
        ({"drop_last": True}, "drop_last", "saved False, now True"),
        ({"train": [Numbers(22), Numbers(4)]}, "loaders", "saved 'one loader', now \\['0', '1'\\]"),
    ],
)
def test_a_difference_is_refused_with_both_values_and_the_remedy(
    stopped: Path, now: dict[str, Any], path: str, values: str
) -> None:
    with pytest.raises(StateMismatchError, match=f"{path}: {values}") as caught:
        train(lambda: numbers_module(**now), ckpt_path=stopped)
    assert "accept=(" in str(caught.value) or path == "loaders"
    assert "nothing was loaded" in str(caught.value)


def test_all_differences_but_the_accepted_are_reported_at_once_and_nothing_is_trained(stopped: Path) -> None:
    model = LedgerModel()
    with pytest.raises(StateMismatchError) as caught:
        train(lambda: numbers_module(train=Numbers(30), seed=1, drop_last=True), ckpt_path=stopped, model=model)
    assert {difference.path for difference in caught.value.differences} == {"seed", "drop_last", "dataset.length"}
    assert model.ledger == []
    with pytest.raises(StateMismatchError) as caught:
        train(lambda: numbers_module(train=Numbers(26), seed=1, accept=("dataset.length",)), ckpt_path=stopped)
    assert [difference.path for difference in caught.value.differences] == ["seed"]


def test_a_named_difference_is_accepted_and_the_position_kept(stopped: Path) -> None:
    with pytest.warns(StatefulWarning, match="within epoch 1, goes on with another dataset.length"):
        resumed = train(lambda: numbers_module(train=Numbers(26), accept=("dataset.length",)), ckpt_path=stopped)
    assert len(samples(resumed.ledger, 1)) == 26 - 8


@pytest.mark.filterwarnings("ignore:StatefulDataModule has seed=7 and the StatefulDataCallback seed=8")
def test_what_a_module_accepts_holds_for_a_callback_of_the_users_own_too(stopped: Path) -> None:
    def resume(**options: Any) -> int:
        callbacks = [StatefulDataCallback(seed=8)]
        return train(lambda: numbers_module(**options), callbacks=callbacks, ckpt_path=stopped).current_epoch

    with pytest.raises(StateMismatchError, match="seed: saved 7, now 8"):
        resume()
    assert resume(accept=("seed",)) == 3


def test_a_module_and_a_callback_of_two_seeds_are_warned_of() -> None:
    with pytest.warns(StatefulWarning, match=r"has seed=7 and the StatefulDataCallback seed=8.*model draws, from 8"):
        train(numbers_module, callbacks=[StatefulDataCallback(seed=8)], max_steps=1)
    train(numbers_module, callbacks=[StatefulDataCallback(seed=7)], max_steps=1)


def test_a_name_in_accept_that_no_difference_has_is_pointed_out() -> None:
    with pytest.warns(StatefulWarning, match="accept names 'sead', which no difference is called by here. Is 'seed'"):
        train(lambda: numbers_module(accept=("sead", "module", "dataset.fingerprint")), max_steps=1)


@pytest.mark.parametrize("loops", [{}, {"validate_loop": {}}])
def test_loop_counters_without_those_of_training_are_refused(stopped: Path, tmp_path: Path, loops: Any) -> None:
    checkpoint = torch.load(stopped, weights_only=True)
    torch.save({**checkpoint, "loops": loops}, tmp_path / "lacking.ckpt")
    with pytest.raises(DamagedStateError, match=r"checkpoint\['loops'\] has no 'fit_loop'"):
        train(numbers_module, ckpt_path=tmp_path / "lacking.ckpt")


def test_batch_size_and_workers_are_no_difference(stopped: Path) -> None:
    resumed = train(lambda: numbers_module(batch_size=5, num_workers=1), ckpt_path=stopped, max_epochs=2)
    assert len(samples(resumed.ledger)) == 22 - 8


def test_a_dataset_described_otherwise_is_another_dataset(tmp_path: Path) -> None:
    class Described(Numbers):
        def __init__(self, source: str) -> None:
            super().__init__(22)
            self.source = source

        def describe(self) -> dict[str, Any]:
            return {"source": self.source}

    ended(tmp_path / "stop.ckpt", lambda: numbers_module(train=Described("v1")), max_steps=15)
    with pytest.raises(StateMismatchError, match=r"dataset.source: saved 'v1', now 'v2'"):
        train(lambda: numbers_module(train=Described("v2")), ckpt_path=tmp_path / "stop.ckpt")


DAMAGES_OF_THE_DATA: list[tuple[Any, type[Exception], str]] = [
    (lambda state: state.pop("progress"), DamagedStateError, "must hold a dict under 'progress', got nothing"),
    (lambda state: state["progress"].update(consumed="8"), DamagedStateError, "consumed must be an int, got '8'"),
    (lambda state: state["progress"].update(consumed=-1), PositionError, "consumed=-1"),
    (lambda state: state["progress"].update(consumed=23), PositionError, "23 samples of epoch 1 were consumed"),
    (lambda state: state["progress"].update(epoch=4), DamagedStateError, "lies in epoch 4"),
    (lambda state: state.update(version=2), StateVersionError, "version 2"),
    (lambda state: state.update(order_version=2), StateMismatchError, "order_version: saved 2, now 1"),
    (lambda state: state.update(kind="bucketed"), StateMismatchError, "kind: saved 'bucketed'"),
]
DAMAGES_OF_THE_CALLBACK: list[tuple[Any, type[Exception], str]] = [
    (lambda own: own.update(version=9), StateVersionError, "version 9"),
    (lambda own: own.pop("version"), DamagedStateError, "no version"),
    (lambda own: own.pop("progress"), DamagedStateError, "no progress"),
    (lambda own: own["progress"].pop("batch"), DamagedStateError, "'batch'"),
    (lambda own: own["progress"].update(epoch=True), DamagedStateError, "'epoch'"),
    (lambda own: own["progress"].update(running=1), DamagedStateError, "'running'"),
    (lambda own: own.update(metrics={"loss": "low"}), DamagedStateError, "no metrics"),
]


@pytest.mark.parametrize(("edit", "error", "words"), [*DAMAGES_OF_THE_DATA, *DAMAGES_OF_THE_CALLBACK])
def test_a_damaged_or_foreign_state_is_refused(
    stopped: Path, tmp_path: Path, edit: Any, error: type[Exception], words: str
) -> None:
    def edit_sealed(checkpoint: Any) -> None:
        state = checkpoint["StatefulDataModule"]["lightning_stateful"]
        edit(state)
        state.update(sealed(state))

    def edit_callback(checkpoint: Any) -> None:
        edit(checkpoint["callbacks"]["StatefulDataCallback"])

    is_of_data = (edit, error, words) in DAMAGES_OF_THE_DATA
    with pytest.raises(error, match=words):
        train(ckpt_path=edited(stopped, tmp_path, edit_sealed if is_of_data else edit_callback))


def test_a_state_that_was_changed_after_it_was_written_is_refused(stopped: Path, tmp_path: Path) -> None:
    def edit(checkpoint: Any) -> None:
        checkpoint["StatefulDataModule"]["lightning_stateful"]["progress"]["consumed"] += 2

    with pytest.raises(DamagedStateError, match="does not have the checksum of its contents"):
        train(ckpt_path=edited(stopped, tmp_path, edit))


@pytest.mark.parametrize(
    ("make", "run"),
    [(numbers_module, train), (lambda: DataLoader(Numbers(22), batch_size=2), train_alone)],
    ids=["of the module", "of the user"],
)
def test_a_checkpoint_whose_callbacks_were_taken_out_is_refused(tmp_path: Path, make: Any, run: Any) -> None:
    ended(tmp_path / "stop.ckpt", make, run=run, max_steps=15)
    path = edited(tmp_path / "stop.ckpt", tmp_path, lambda checkpoint: checkpoint.pop("callbacks"))
    model = LedgerModel()
    with pytest.raises(StateError, match=r"would begin at batch 0 of epoch 2.*'callbacks'.*StatefulDataCallback"):
        run(make, model=model, ckpt_path=path)
    assert not model.ledger


class Renamed(StatefulDataModule):
    pass


def test_28_a_renamed_data_module_is_refused_and_goes_on_exactly_when_that_is_accepted(stopped: Path) -> None:
    def make(**options: Any) -> Any:
        return Renamed(Numbers(22), Numbers(5, first=100), batch_size=2, seed=7, **options)

    with pytest.raises(StateMismatchError, match="module: saved 'StatefulDataModule', now 'Renamed'"):
        train(make, ckpt_path=stopped)
    assert_resumes(stopped, [], make=lambda: make(accept=("module",)), whole=uninterrupted())


def test_a_checkpoint_made_without_the_toolkit_warns_once_and_goes_on_where_the_loops_say(tmp_path: Path) -> None:
    ended(tmp_path / "plain.ckpt", lambda: DataLoader(Numbers(22), batch_size=2), max_steps=15)
    with pytest.warns(StatefulWarning, match="has no data state.*batch 4 of epoch 1") as caught:
        resumed = train(lambda: numbers_module(val=None), ckpt_path=tmp_path / "plain.ckpt")
    assert len([warning for warning in caught if issubclass(warning.category, StatefulWarning)]) == 1
    whole = train(lambda: numbers_module(val=None))
    assert resumed.ledger == whole.ledger[len(whole.ledger) - len(resumed.ledger) :]


def test_a_checkpoint_of_the_callback_alone_is_refused_for_other_data(tmp_path: Path) -> None:
    def make(length: int) -> Any:
        return DataLoader(Numbers(length), batch_size=2, shuffle=True)

    ended(tmp_path / "stop.ckpt", lambda: make(22), run=train_alone, max_steps=15)
    with pytest.raises(StateMismatchError, match=r"dataset.length: saved 22, now 20"):
        train_alone(lambda: make(20), ckpt_path=tmp_path / "stop.ckpt")


def test_a_checkpoint_taken_before_the_first_batch_resumes_without_a_word(tmp_path: Path) -> None:
    before = runs.stopped(tmp_path / "start.ckpt", hook="on_fit_start")
    assert_resumes(tmp_path / "start.ckpt", before, 0)
