"""A run that goes on with other lengths or another budget: refused, or taken up from the next epoch on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ledger import LedgerModel, batches, trained
from support.runs import SaveAt, assert_resumes, assert_same_end, stopped, train
from support.texts import NUM_SAMPLES, Texts, bucketed
from torch.utils.data import Subset

from lightning_stateful.errors import StatefulWarning, StateMismatchError


class OneLonger(Texts):
    def __init__(self) -> None:
        super().__init__()
        self.num_tokens[5] += 1


class Described(Texts):
    def describe(self) -> dict[str, Any]:
        return {"edition": 2}


SEVERAL = {"max_tokens", "seed", "lengths.digest", "dataset.content.num_tokens"}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "a budget": ({}, {"max_tokens": 50}, {"max_tokens"}),
    "a length": ({}, {"train": OneLonger()}, {"lengths.digest", "dataset.content.num_tokens"}),
    "a sample more": ({}, {"train": Texts(48)}, {"lengths.digest", "lengths.samples", "dataset.length"}),
    "given boundaries": ({"boundaries": [5, 20]}, {"boundaries": [6, 20]}, {"boundaries"}),
    "samples for tokens": ({}, {"batch_size": 4}, {"batch_size", "max_tokens"}),
    "several": ({}, {"max_tokens": 50, "seed": 8, "train": OneLonger()}, SEVERAL),
}


def refused(path: Path, options: dict[str, Any]) -> StateMismatchError:
    """The error of a run that goes on with other options, before it trains."""
    model = LedgerModel()
    with pytest.raises(StateMismatchError) as caught:
        train(lambda: bucketed(**options), model=model, ckpt_path=path)
    assert model.ledger == []
    return caught.value


def saved(folder: Path, options: dict[str, Any]) -> list[Path]:
    """Checkpoints within an epoch and after it."""
    saver = SaveAt(folder, [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0)])
    train(lambda: bucketed(**options), callbacks=[saver], max_epochs=1)
    return [saver.path(number) for number in range(2)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_within_an_epoch_and_between_epochs(tmp_path: Path, change: str) -> None:
    before, after, paths = CHANGES[change]
    within, between = saved(tmp_path, before)
    for path in (within, between):
        error = refused(path, after)
        assert {difference.path for difference in error.differences} == paths
        assert all(name in str(error) for name in paths)
    # Within an epoch, what decides about batches stands in the way whatever is accepted.
    found = {difference.path for difference in refused(within, {**after, "accept": tuple(paths)}).differences}
    assert found == {name.split(".")[0] for name in paths} - {"dataset"}


@pytest.mark.parametrize("change", ["a sample more", "given boundaries", "samples for tokens", "several"])
def test_an_accepted_change_is_taken_up_at_the_beginning_of_an_epoch(tmp_path: Path, change: str) -> None:
    before, after, paths = CHANGES[change]
    _, between = saved(tmp_path, before)
    resumed = train(lambda: bucketed(**after, accept=tuple(paths)), ckpt_path=between, seed=99, max_epochs=2)
    fresh = train(lambda: bucketed(**after), max_epochs=2)
    assert batches(resumed.ledger) == batches(fresh.ledger, 1)


def test_a_change_is_accepted_after_the_last_batch_of_an_epoch_before_its_validation(tmp_path: Path) -> None:
    last = len(bucketed().train_dataloader()) - 1
    path = tmp_path / "stop.ckpt"
    stopped(path, bucketed, batch=last)
    resumed = train(lambda: bucketed(max_tokens=70, accept="max_tokens"), ckpt_path=path, seed=99)
    fresh = train(lambda: bucketed(max_tokens=70))
    assert batches(resumed.ledger) == batches(fresh.ledger, 1) + batches(fresh.ledger, 2)
    assert [event[0] for event in resumed.ledger].index("val") < [event[0] for event in resumed.ledger].index("train")


@pytest.mark.parametrize("other", [Described(), Subset(Texts(), range(NUM_SAMPLES))])
def test_another_dataset_of_the_same_lengths_is_refused_and_may_be_accepted_within_an_epoch(
    tmp_path: Path, other: Any
) -> None:
    path = tmp_path / "stop.ckpt"
    first = stopped(path, bucketed, batch=3)
    differing = refused(path, {"train": other}).differences
    assert {difference.path.split(".")[0] for difference in differing} == {"dataset"}
    whole = train(bucketed)
    with pytest.warns(StatefulWarning, match="within epoch 0, goes on with another dataset"):
        assert_resumes(path, first, 0, make=lambda: bucketed(train=other, accept="dataset"), whole=whole)


def test_what_does_not_decide_about_batches_may_change_at_any_time(tmp_path: Path) -> None:
    first = stopped(tmp_path / "stop.ckpt", bucketed, batch=3)
    # The same lengths in another form, workers, and the size of evaluation batches.
    other = {"lengths": Texts().num_tokens, "num_workers": 1, "eval_batch_size": 4, "log_data": True}
    resumed = train(lambda: bucketed(**other), ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = train(bucketed)
    assert trained(first) + trained(resumed.ledger) == trained(whole.ledger)
    assert_same_end(resumed, whole)
