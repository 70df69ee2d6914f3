"""Packed documents in a Trainer: every token once an epoch, and resumes that are exact or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ledger import LedgerModel, batches, samples
from support.packed_data import (
    NUM_DOCUMENTS,
    NUM_VAL,
    PACKINGS,
    VAL_FIRST,
    Documents,
    collated,
    length_of,
    packed,
    tokens_of,
)
from support.runs import assert_goes_on_from_every_moment, assert_goes_on_from_stop_to_stop, stopped, train
from torch.utils.data import default_collate

from lightning_stateful import MixtureDataModule, Packing
from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError

MOMENTS = [
    ("on_train_batch_start", 0, 4),
    ("on_before_backward", 0, 7),
    ("on_validation_batch_end", 0, 1),
    ("on_train_batch_end", 1, 0),
    ("on_train_batch_end", 1, 9),
    ("on_train_epoch_end", 0, 0),
]


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("split", {}),
        ("whole", {"num_workers": 2}),
        ("split", {"num_workers": 2, "persistent_workers": True}),
    ],
)
def test_it_goes_on_from_every_moment(tmp_path: Path, name: str, workers: dict[str, Any]) -> None:
    moments = MOMENTS[1::3] if workers else MOMENTS
    run = assert_goes_on_from_every_moment(tmp_path, lambda: packed(name, **workers), moments)
    for epoch in range(2):
        assert sorted(samples(run.ledger, epoch)) == tokens_of()
        assert samples(run.ledger, epoch, "val") == tokens_of(NUM_VAL, VAL_FIRST) or name == "whole"
        assert sorted(samples(run.ledger, epoch, "val")) == tokens_of(NUM_VAL, VAL_FIRST)
    assert batches(run.ledger, 0) != batches(run.ledger, 1)
    # As workers change nothing, nor do they here.
    if workers:
        assert run.ledger == train(lambda: packed(name), max_epochs=2).ledger


@pytest.mark.parametrize(
    "options", [{"shuffle": False}, {"drop_last": True}, {"train": {"a": Documents(20), "b": Documents(41)}}]
)
def test_runs_go_on_from_one_another(tmp_path: Path, options: dict[str, Any]) -> None:
    moments = [("on_train_batch_end", 0, 2), ("on_train_batch_end", 1, 0), ("on_before_backward", 1, 3)]
    assert_goes_on_from_stop_to_stop(tmp_path, lambda: packed("whole", val=None, **options), moments)


def test_packed_datasets_are_sources_of_a_mixture(tmp_path: Path) -> None:
    def make() -> MixtureDataModule:
        given = {"a": Documents(30), "b": Documents(50, first=100)}
        sources = {name: packed("whole").packed(documents, name) for name, documents in given.items()}
        how: dict[str, Any] = {"batch_size": 3, "by": "sample", "seed": 3, "collate_fn": collated}
        return MixtureDataModule(sources, weights={"a": 1, "b": 2}, num_steps=40, **how)

    moments = [("on_train_batch_end", 0, 4), ("on_before_backward", 0, 30), ("on_train_batch_end", 1, 3)]
    run = assert_goes_on_from_every_moment(tmp_path, make, moments)
    sequences = [batch for batch in batches(run.ledger, 0) if batch]
    assert len(sequences) == 40


def test_batches_have_one_shape_and_an_epoch_the_steps_that_are_told() -> None:
    data = packed("split", collate_fn=default_collate, drop_last=True, batch_size=3)
    loader = data.train_dataloader()
    shapes = {column.shape for batch in loader for column in batch.values()}
    assert shapes == {(3, 12)}
    assert len(loader) == -(-len(tokens_of()) // 12) // 3
    assert data.position_report() == {"epoch": 1, "samples": 0}


CHANGES: dict[str, dict[str, Any]] = {
    "packing.sequence_length": {"packing": Packing(13)},
    "packing.how": {"packing": PACKINGS["whole"]},
    "lengths": {"train": Documents(NUM_DOCUMENTS, first=1)},
    "seed": {"seed": 8},
}


def test_a_change_is_refused_by_name_or_accepted_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: packed("split"), batch=3)
    for name, options in CHANGES.items():
        model = LedgerModel()
        with pytest.raises(StateMismatchError) as caught:
            train(lambda options=options: packed("split", **options), model=model, ckpt_path=path)
        assert name in {difference.path for difference in caught.value.differences}
        assert model.ledger == []
        if name.startswith("packing"):
            # By these settings alone, and not by what follows from them.
            assert {difference.path.split(".")[0] for difference in caught.value.differences} == {"packing"}
            assert "or accept the change with accept=('packing',)." in str(caught.value)


@pytest.mark.parametrize("packing", [Packing(12, padding=5), Packing(40), Packing(5, separator=9), PACKINGS["whole"]])
def test_another_packing_is_accepted_by_its_name_and_goes_on_behind_as_many_tokens(
    tmp_path: Path, packing: Packing
) -> None:
    path = tmp_path / "stop.ckpt"
    stopped(path, lambda: packed("split"), batch=15)
    accepted = packed("split", accept=("packing",), packing=packing, batch_size=1)
    with pytest.warns(StatefulWarning, match="another packing"):
        rest = train(lambda: accepted, ckpt_path=path, max_epochs=2)
    # Sequences behind those that have about as many tokens as were trained on; then a whole epoch.
    skipped = len(accepted.packed(accepted.train)) - len(batches(rest.ledger, 0))
    assert skipped == 32 * 12 // packing.sequence_length
    assert set(samples(rest.ledger, 1)) - {9} == set(tokens_of())


def test_what_cannot_be_packed_is_refused_before_the_first_step() -> None:
    sizes = [length_of(Documents()[number]) for number in range(NUM_DOCUMENTS)]
    first = next(number for number, size in enumerate(sizes) if size > 12)
    cases: dict[str, dict[str, Any]] = {
        f"Document {first} has {sizes[first]} tokens and a sequence has 12": {"packing": Packing(12, how="whole")},
        "2 lengths for the 67 samples": {"lengths": [1, 2], "val": None},
        "Documents for evaluation need lengths of their own": {"lengths": sizes},
    }
    for told, options in cases.items():
        model = LedgerModel()
        with pytest.raises(ConfigurationError, match=told):
            train(lambda options=options: packed("split", **options), model=model)
        assert [event for event in model.ledger if event[0] == "train"] == []
