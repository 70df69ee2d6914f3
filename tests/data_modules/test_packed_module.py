"""Packed documents in a Trainer: every token once an epoch, and resumes that are exact or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ledger import LedgerModel, batches, samples
from support.packed_data import (
    FIRSTS,
    NUM_DOCUMENTS,
    NUM_VAL,
    PACKINGS,
    SIZES,
    VAL_FIRST,
    Documents,
    collated,
    length_of,
    mixed,
    packed,
    source_of,
    tokens_of,
)
from support.quick import thinned
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_goes_on_from_stop_to_stop,
    numbers_module,
    stopped,
    train,
)
from support.stream_runs import document
from torch.utils.data import default_collate

from lightning_stateful import MixtureDataModule, Packing, WeightSchedule
from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError

MOMENTS = [
    ("on_train_batch_start", 0, 4),
    ("on_before_backward", 0, 7),
    ("on_validation_batch_end", 0, 1),
    ("on_train_batch_end", 1, 0),
    ("on_train_batch_end", 1, 9),
    ("on_train_epoch_end", 0, 0),
]


# That workers live on changes nothing about the indices that they are sent, packed or not.
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("split", {}),
        ("whole", {"num_workers": 2}),
        pytest.param("split", {"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
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


def as_mixture_module(how: str = "split", **options: Any) -> MixtureDataModule:
    """The same as ``mixed``, of packed datasets."""
    module = mixed(how)
    sources = {name: module.packed(dataset, name) for name, dataset in module.train.items()}
    given: dict[str, Any] = {"weights": {"a": 1, "b": 3}, "by": "sample", "batch_size": 2, "seed": 7}
    return MixtureDataModule(sources, **{**given, "collate_fn": collated, **options})


MIXTURES: dict[str, Callable[[], Any]] = {
    "by sample": lambda: mixed("split", num_steps=40),
    "by sample, workers": lambda: mixed("split", num_steps=40, num_workers=2),
    "by batch, whole": lambda: mixed("whole", by="batch", num_steps=40),
    "schedule": lambda: mixed(
        "split", weights=None, schedule=WeightSchedule({0: [1, 1], 30: [1, 4]}, "linear"), num_steps=40
    ),
    "cycle": lambda: mixed("whole", stop="cycle"),
    "each once": lambda: mixed("split", stop="all_exhausted"),
    "of packed datasets": lambda: as_mixture_module("whole", num_steps=40),
}


# Packed documents and mixtures are each read in workers by other tests.
@pytest.mark.parametrize("name", thinned(MIXTURES, ["by sample, workers", "by batch, whole", "schedule", "each once"]))
def test_each_pass_over_a_source_of_a_mixture_has_every_token_once(tmp_path: Path, name: str) -> None:
    moments = [("on_before_backward", 0, 15), ("on_train_batch_end", 1, 3)]
    run = assert_goes_on_from_every_moment(tmp_path, MIXTURES[name], moments)
    steps = [None] if "num_steps" in inspect.getsource(MIXTURES[name]) else [0, 1]
    passes: dict[str, list[list[int]]] = {"a": [], "b": []}
    for epoch in steps:
        for source, found in passes.items():
            tokens = [token for token in samples(run.ledger, epoch) if source_of(token) == source]
            expected = tokens_of(SIZES[source], FIRSTS[source])
            for first in range(0, len(tokens) - len(expected) + 1, len(expected)):
                found.append(tokens[first : first + len(expected)])
                assert sorted(found[-1]) == expected, (source, first)
    assert len(passes["a"]) > 1
    for found in passes.values():
        assert len(set(map(tuple, found))) == len(found)


def test_a_dataset_that_is_added_leaves_the_others_where_they_were(tmp_path: Path) -> None:
    before = stopped(tmp_path / "stop.ckpt", lambda: mixed(num_steps=40), batch=12)
    more = {"c": (Documents(9, VAL_FIRST), length_of)}
    options: dict[str, Any] = {"num_steps": 40, "weights": {"a": 1, "b": 3, "c": 1}, "accept": ("sources", "weights")}
    run = train(
        lambda: mixed(train={**mixed().train, **more}, **options), ckpt_path=tmp_path / "stop.ckpt", max_epochs=1
    )
    served = [token for ledger in (before, run.ledger) for token in samples(ledger) if token < 100 * VAL_FIRST]
    for source in SIZES:
        tokens, expected = (
            [token for token in served if source_of(token) == source],
            tokens_of(SIZES[source], FIRSTS[source]),
        )
        assert sorted(tokens[: len(expected)]) == expected
    assert len(samples(before) + samples(run.ledger)) > len(served) > 600


def test_shares_of_sequences_are_exact_and_named() -> None:
    data = mixed("whole", batch_size=4, num_steps=30, tag="source", collate_fn=default_collate)
    for batch in data.train_dataloader():
        assert sorted(batch["source"]) == ["a", "b", "b", "b"]
        for name, tokens, numbers in zip(batch["source"], batch["input_ids"], batch["document_ids"], strict=True):
            assert {source_of(token) for token in tokens[numbers >= 0].tolist()} == {name}
    assert data.position_report()["sources"]["b"]["share"] == 0.75
    data.val = {"c": (Documents(NUM_VAL, VAL_FIRST), length_of)}
    assert {name for batch in data.val_dataloader()["c"] for name in batch["source"]} == {"c"}
    with pytest.raises(ConfigurationError, match="tag='source' names the datasets of a mixture"):
        packed("split", tag="source")


LIMITS: dict[str, tuple[int, Callable[..., Any], dict[str, Any]]] = {
    "in the third epoch": (1300, lambda **options: packed("whole", **options), {}),
    "limited epochs": (700, lambda **options: packed("split", **options), {"limit_train_batches": 7}),
    "windows": (900, lambda **options: packed("split", **options), {"accumulate_grad_batches": 3}),
    "steps of a mixture": (800, lambda **options: mixed("split", num_steps=20, **options), {}),
    "epochs of a mixture": (800, lambda **options: mixed("whole", stop="cycle", **options), {}),
}


# Windows end in the third epoch too, and the other mixture counts its tokens in the same way.
@pytest.mark.parametrize("name", thinned(LIMITS, ["in the third epoch", "epochs of a mixture"]))
def test_training_stops_after_a_number_of_tokens(tmp_path: Path, name: str) -> None:
    limit, make, options = LIMITS[name]
    options = {"max_epochs": 20, **options}
    moments = [("on_before_backward", 1, 3), ("on_train_epoch_end", 0, 0)]
    moments += [("on_train_batch_end", 0, 6)] if "limit_train_batches" in options else []
    run = assert_goes_on_from_every_moment(tmp_path, lambda: make(max_tokens_total=limit, val=None), moments, **options)
    window = options.get("accumulate_grad_batches", 1)
    steps = [len(batch) for batch in batches(run.ledger)]
    assert len(steps) % window == 0 or name == "windows"
    assert sum(steps[:-window]) < limit <= sum(steps)
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = train(lambda: make(max_tokens_total=limit, val=None), ckpt_path=tmp_path / "end.ckpt", **options)
    assert (batches(again.ledger), again.global_step) == ([], run.global_step)
    more = train(lambda: make(max_tokens_total=limit + 300, val=None), ckpt_path=tmp_path / "end.ckpt", **options)
    whole = train(lambda: make(max_tokens_total=limit + 300, val=None), **options)
    assert batches(run.ledger) + batches(more.ledger) == batches(whole.ledger)


def test_tokens_are_counted_of_packed_documents_alone() -> None:
    with pytest.raises(ConfigurationError, match="max_tokens_total=5 counts the tokens of packed documents"):
        train(lambda: numbers_module(max_tokens_total=5))


def test_what_is_reported_and_logged_of_tokens_is_what_was_served(tmp_path: Path) -> None:
    for make in (lambda: packed("split", log_data=True, val=None), lambda: mixed("whole", num_steps=20, log_data=True)):
        path = tmp_path / "stop.ckpt"
        before = stopped(path, make, batch=6, epoch=1, max_epochs=2)
        run = train(make, ckpt_path=path, max_epochs=2, limit_train_batches=20)
        of_epoch = None if "sources" in run.trainer.datamodule.position_report() else 1
        tokens = [token for ledger in (before, run.ledger) for token in samples(ledger, of_epoch)]
        logged = run.trainer.logger.packed[-1] if of_epoch else dict(run.trainer.logger.sources)[39]
        if of_epoch:
            assert logged["tokens"] == len(tokens)
            assert logged["padding"] == pytest.approx(1 - len(tokens) / (40 * 12))
            ends = {document(number)["input_ids"][-1] for number in range(NUM_DOCUMENTS)}
            assert logged["documents"] == len(ends & set(tokens))
        else:
            for name in SIZES:
                assert logged[f"{name}/tokens"] == sum(source_of(token) == name for token in tokens)
                assert logged[f"{name}/cut"] > 0


def test_batches_have_one_shape_and_an_epoch_the_steps_that_are_told() -> None:
    data = packed("split", collate_fn=default_collate, drop_last=True, batch_size=3)
    loader = data.train_dataloader()
    shapes = {column.shape for batch in loader for column in batch.values()}
    assert shapes == {(3, 12)}
    assert len(loader) == -(-len(tokens_of()) // 12) // 3
    assert data.position_report() == {"epoch": 1, "samples": 0, "tokens": 0, "documents": 0, "cut": 0.0, "padding": 0.0}


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


def test_another_packing_of_a_mixture_is_named_and_accepted_as_that_of_one_dataset(tmp_path: Path) -> None:
    def make(length: int, accept: tuple[str, ...] = ()) -> Any:
        return partial(mixed, "split", packing=Packing(length), accept=accept)

    path = tmp_path / "stop.ckpt"
    stopped(path, make(12), batch=3)
    for accept in ((), ("sources",)):
        with pytest.raises(StateMismatchError) as caught:
            train(make(16, accept), ckpt_path=path)
        assert [difference.path for difference in caught.value.differences] == ["packing.sequence_length"]
    with pytest.warns(StatefulWarning, match="within epoch 0, goes on with another packing.sequence_length"):
        train(make(16, ("packing",)), ckpt_path=path, max_epochs=1)


def test_what_cannot_be_packed_is_refused_before_the_first_step() -> None:
    sizes = [length_of(Documents()[number]) for number in range(NUM_DOCUMENTS)]
    first = next(number for number, size in enumerate(sizes) if size > 12)
    cases: dict[str, dict[str, Any]] = {
        f"Document {first} has {sizes[first]} tokens and a sequence has 12": {"packing": Packing(12, how="whole")},
        "2 lengths for the 67 samples": {"lengths": [1, 2], "val": None},
        "Documents for evaluation need lengths of their own": {"lengths": sizes},
        "pass lengths, or a dict of pairs": {"lengths": None},
        "Dataset 'a' has no lengths": {"train": {"a": Documents()}, "lengths": {"b": sizes}, "stop": "cycle"},
        "A mixture of packed datasets is a dict": {"num_steps": 3},
    }
    with pytest.raises(ConfigurationError, match="documents of several datasets into one sequence"):
        packed("split", by="document")
    for told, options in cases.items():
        model = LedgerModel()
        with pytest.raises(ConfigurationError, match=told):
            train(lambda options=options: packed("split", **options), model=model)
        assert [event for event in model.ledger if event[0] == "train"] == []
