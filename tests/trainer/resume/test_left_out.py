"""A run that leaves batches or samples out trains on all others as they were, from its start or from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import samplers, sources, texts
from support.ddp_runs import Link, assert_chains, chain_of, over_all
from support.ddp_runs import run as train_on_ranks
from support.ledger import Asks, Numbers, batches, samples, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import (
    Moment,
    assert_goes_on_from_every_moment,
    callback_of,
    numbers_module,
    seeded,
    stopped,
    train,
    train_alone,
)
from support.stream_runs import chunks
from support.stream_runs import module as stream_module
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.audit import read_ledger
from lightning_stateful.cli import main
from lightning_stateful.errors import ConfigurationError, StatefulWarning

SKIP = {1: range(3, 6), 2: range(10, 11)}


def without(found: list[Any], numbers: Any) -> list[Any]:
    return [batch for number, batch in enumerate(found) if number not in numbers]


MAKE: dict[str, tuple[Callable[..., Any], Any]] = {
    "data module": (numbers_module, train),
    "workers": (lambda **options: numbers_module(num_workers=2, **options), train),
    "mixture": (sources.mixture, train),
    "buckets": (texts.bucketed, train),
    "a user's sampler": (lambda: samplers.LOADERS["own state"](), train_alone),
    "a stream": (lambda **options: stream_module(chunks(), **options), train),
    "a stream of known epochs": (lambda **options: stream_module(chunks(), steps_per_epoch=7, **options), train),
    "a stream in workers": (lambda **options: stream_module(chunks(), num_workers=2, **options), train),
}


def ways(name: str, skip: Any) -> tuple[Callable[[], Any], Any, dict[str, Any]]:
    make, run = MAKE[name]
    if run is train_alone:
        return make, run, {"settings": {"skip": skip}}
    return lambda: make(skip=skip), run, {}


# What others stand for: each kind of plan is in tests/core/test_skip.py.
SLOW = ("workers", "a stream in workers", "mixture", "buckets", "a stream of known epochs")


@pytest.mark.parametrize("name", thinned(MAKE, SLOW))
def test_batches_are_left_out_of_whatever_data_and_a_resume_goes_on_from_every_moment(
    name: str, tmp_path: Path
) -> None:
    skip = {0: [range(2, 4)], 1: range(0, 1)}
    plain_make, run, plain_options = ways(name, None)
    whole = run(plain_make, max_epochs=2, **plain_options)
    make, run, options = ways(name, skip)
    moments: list[Moment] = [("on_train_batch_end", 0, 1), ("on_train_batch_end", 0, 2), ("on_train_epoch_end", 0, 0)]

    def again(make: Any, **more: Any) -> Any:
        return run(make, **options, **more)

    found = assert_goes_on_from_every_moment(tmp_path, make, moments, again, max_epochs=2)
    for epoch, numbers in ((0, {2, 3}), (1, {0})):
        assert batches(found.ledger, epoch) == without(batches(whole.ledger, epoch), numbers)
        # Lightning counts what is trained on.
        counted = [event[2] for event in trained(found.ledger) if event[1] == epoch]
        assert counted == list(range(len(counted)))
    assert found.global_step == whole.global_step - 3


def test_a_resume_may_leave_out_what_the_run_did_not_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "before.ckpt"
    before = stopped(path, epoch=1, batch=3)
    whole = train()
    caplog.set_level("INFO", logger="lightning.pytorch")
    found = train(lambda: numbers_module(skip={1: range(3, 6), 2: range(10, 11), 0: range(4)}), ckpt_path=path)
    said = [record.message for record in caplog.records if "skip=" in record.message]
    assert said == [
        "Training data: skip= leaves out batches 3 to 5 of epoch 1, batch 10 of epoch 2. Batches 0 to 3 of epoch 0, "
        "batch 3 of epoch 1 came before the checkpoint, which stays as it is."
    ]
    assert batches(before, 1) == batches(whole.ledger, 1)[:4]
    assert batches(found.ledger, 1) == batches(whole.ledger, 1)[6:]
    assert batches(found.ledger, 2) == batches(whole.ledger, 2)[:10]
    # The next batch is the fifth of epoch 1, of nine that are trained on.
    assert [event[2] for event in trained(found.ledger) if event[1] == 1] == [4, 5, 6, 7, 8]
    state = callback_of(found).data_state()["skip"]
    assert [entry[:3] for entry in state["ranges"]] == [[1, 3, 6], [2, 10, 11]]


def test_what_was_left_out_before_a_checkpoint_stays_so_without_skip_and_what_is_ahead_is_warned_of(
    tmp_path: Path,
) -> None:
    path, whole = tmp_path / "one.ckpt", train()
    stopped(path, lambda: numbers_module(skip=SKIP), epoch=1, batch=4)
    with pytest.warns(StatefulWarning, match="was to leave out batch 10 of epoch 2, which this one has no skip= for"):
        found = train(ckpt_path=path)
    assert batches(found.ledger, 1) == batches(whole.ledger, 1)[8:]
    # Five were trained on before, of eight.
    assert [event[2] for event in trained(found.ledger) if event[1] == 1] == [5, 6, 7]
    assert batches(found.ledger, 2) == batches(whole.ledger, 2)
    later = tmp_path / "later.ckpt"
    stopped(later, lambda: numbers_module(skip=SKIP), epoch=2, batch=9, max_epochs=4)
    rest = train(ckpt_path=later, max_epochs=4)
    assert {event[1] for event in trained(rest.ledger)} == {3}


def test_samples_are_left_out_by_their_index_or_a_function_and_others_take_their_places(tmp_path: Path) -> None:
    bad = {3, 8, 13, 21}
    whole = train(max_epochs=2)
    runs = [
        train(lambda skip=skip: numbers_module(skip=skip), max_epochs=2)  # type: ignore[misc]  # a default
        for skip in (bad, lambda indices: torch.isin(torch.from_numpy(indices), torch.tensor([*bad])).numpy())
    ]
    for epoch in range(2):
        kept = [index for index in samples(whole.ledger, epoch) if index not in bad]
        assert [samples(run.ledger, epoch) for run in runs] == [kept, kept]
        assert {len(batch) for batch in batches(runs[0].ledger, epoch)} == {2}
    path = tmp_path / "some.ckpt"
    before = stopped(path, epoch=1, batch=4)
    found = train(lambda: numbers_module(skip=bad), ckpt_path=path, max_epochs=2)
    rest = samples(whole.ledger, 1)[len(samples(before, 1)) :]
    assert samples(found.ledger, 1) == [index for index in rest if index not in bad]
    assert trained(found.ledger)[0][2] == 5


def test_other_samples_may_be_left_out_on_a_resume_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = tmp_path / "some.ckpt", train(max_epochs=1)
    before = stopped(path, lambda: numbers_module(skip={0, 1, 2, 3, 4, 5, 6}), batch=2)
    caplog.set_level("INFO", logger="lightning.pytorch")
    found = train(lambda: numbers_module(skip=lambda indices: indices > 15), ckpt_path=path, max_epochs=1)
    said = [record.message for record in caplog.records if "skip=" in record.message]
    assert said[-1].endswith("<lambda> names. Before the checkpoint it was 7 samples by index.")
    order = samples(whole.ledger)
    rest = order[order.index(samples(before)[-1]) + 1 :]
    assert samples(found.ledger) == [index for index in rest if index <= 15]
    # Three batches were trained on before.
    assert trained(found.ledger)[0][2] == 3


def test_a_schedule_is_planned_by_the_same_number_of_steps_whatever_is_left_out(tmp_path: Path) -> None:
    models = [seeded(Asks) for _ in range(3)]
    path = tmp_path / "some.ckpt"
    stopped(path, epoch=0, batch=2)
    train(model=models[0])
    train(lambda: numbers_module(skip={0: range(5), 1: range(2)}), model=models[1])
    train(lambda: numbers_module(skip={0: range(4, 9)}), model=models[2], ckpt_path=path)
    assert [model.estimate for model in models] == [33, 33, 33]


def test_the_ledger_counts_what_is_left_out_over_resumes(tmp_path: Path) -> None:
    folder, path = tmp_path / "ledger", tmp_path / "some.ckpt"
    skip = [(0, range(2, 4)), (1, range(9, 11)), {5, 6}]

    def run(make: Any, *, callbacks: Any = (), **options: Any) -> Any:
        return train(make, callbacks=[StatefulDataCallback(ledger=folder), *callbacks], max_epochs=2, **options)

    stopped(path, lambda: numbers_module(skip=skip), batch=3, run=run)
    run(lambda: numbers_module(skip=skip), ckpt_path=path)
    ledger = read_ledger(folder)
    assert ledger.findings() == []
    assert [(row["items"], row["distinct"], row["skipped"]) for row in ledger.epochs()] == [(16, 16, 6), (16, 16, 6)]
    assert "16 items, 16 of 22 distinct, 6 left out by skip=" in str(ledger)


def test_the_state_and_a_line_of_inspect_say_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.ckpt"
    stopped(path, lambda: numbers_module(skip=[(0, range(2, 4)), (1, range(9, 10)), {5}]), batch=5)
    assert main(["inspect", str(path)]) == 0
    found = capsys.readouterr().out
    batches_and_samples = "batches 2 to 3 of epoch 0, batch 9 of epoch 1, 1 sample by index"
    assert f"skip= leaves out {batches_and_samples}; " in found
    assert "epoch 0: trained on 12 of 22 samples (55%)" in found
    assert main(["plan", str(path), "--devices", "1"]) == 0
    assert "Samples that skip= leaves out by their index are counted" in "".join(capsys.readouterr())
    saved = torch.load(path, weights_only=True)
    both = [saved["callbacks"]["StatefulDataCallback"], saved["StatefulDataModule"]["lightning_stateful"]]
    assert len(json.dumps(both[1])) < 500


def test_loaders_that_are_built_anew_in_each_epoch_leave_out_the_same() -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    whole, found = train(**options), train(lambda: numbers_module(skip=SKIP), **options)
    for epoch in range(3):
        assert batches(found.ledger, epoch) == without(batches(whole.ledger, epoch), SKIP.get(epoch, ()))


def two_loaders(mode: str, length: int) -> CombinedLoader:
    loaders = {"a": DataLoader(Numbers(22), batch_size=2), "b": DataLoader(Numbers(length, first=50), batch_size=2)}
    return CombinedLoader(loaders, mode)


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "samples of a mixture": (sources.mixture, {3}, "batches of the kind 'mixture' are .*Subset"),
    "samples of buckets": (texts.bucketed, {3}, "batches of the kind 'buckets'"),
    "samples of a sampler": (samplers.LOADERS["own state"], {3}, "batches of the kind 'sampler'"),
    "a function on a stream": (lambda: stream_module(chunks()), lambda indices: indices > 3, "have no index"),
    "samples of two loaders": (lambda: two_loaders("min_size", 22), {3}, "there are 2 loaders"),
    "a loader that starts over": (lambda: two_loaders("max_size_cycle", 8), {0: range(3)}, r"\[4, 11\] batches"),
    "a stream that a limit cuts": (lambda: stream_module(chunks(), val=None), {0: range(1)}, "Say .* steps_per_epoch"),
    "a number": (numbers_module, 3, "ranges of batches by epoch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_left_out_exactly_is_refused_before_the_first_step(case: str) -> None:
    make, skip, said = REFUSED[case]
    with pytest.raises(ConfigurationError, match=said):
        train(make, callbacks=[StatefulDataCallback(skip=skip)], limit_train_batches=3 if "limit" in case else 1.0)


def test_loaders_side_by_side_leave_the_same_batches_out() -> None:
    found = train_alone(lambda: two_loaders("min_size", 16), settings={"skip": {0: range(1, 7)}}, max_epochs=1)
    whole = train_alone(lambda: two_loaders("min_size", 16), max_epochs=1)
    assert [event[4] for event in trained(found.ledger)] == without([e[4] for e in trained(whole.ledger)], range(1, 7))


# On real ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("skip"))


ON_RANKS: dict[str, tuple[Callable[..., Any], Any]] = {
    "samples": (lambda **options: numbers_module(val=None, **options), [(0, range(2, 4)), {5}]),
    "mixture": (lambda **options: sources.mixture(val=None, **options), {0: range(2, 4)}),
    "a stream": (lambda **options: stream_module(chunks(), val=None, **options), {0: range(1, 2)}),
}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    stops: list[Moment] = [("on_train_batch_end", 0, 0)]
    found = {}
    for name, (make, skip) in ON_RANKS.items():
        whole = [] if name == "samples" else chain_of(make, folder / "whole", [], max_epochs=1)
        found[name] = whole, chain_of(partial(make, skip=skip), folder / name, stops, max_epochs=1)
    return found


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_leave_the_same_steps_out_and_stay_in_step(ranks: Ranks, name: str) -> None:
    found = [of_rank[name] for of_rank in ranks.of(on_two_ranks)]
    chains: list[list[Link]] = [parts for _, parts in found]
    runs = assert_chains(chains)
    if name == "samples":
        return
    left_out = ON_RANKS[name][1][0]
    for (whole, _), run in zip(found, runs, strict=True):
        assert batches(run["ledger"]) == without(batches(whole[0][0]["ledger"]), left_out)


def with_skips_of_their_own(folder: Path) -> None:
    train_on_ranks(lambda: numbers_module(skip={0: range(torch.distributed.get_rank(), 5)}))


def test_ranks_that_leave_out_other_batches_are_refused_on_all(ranks: Ranks) -> None:
    assert all("skip.ranges" in error for error in ranks.errors_of(with_skips_of_their_own))


def test_one_rank_goes_on_with_the_same_samples_left_out(ranks: Ranks) -> None:
    make, skip = ON_RANKS["samples"]
    parts = [of_rank["samples"][1] for of_rank in ranks.of(on_two_ranks)]
    everything = over_all([of_rank[0][0] for of_rank in parts])
    # Steps 2 and 3 have four samples each.
    assert len(everything) in (13, 14)
    assert 5 not in everything
    path = ranks.folder_of(on_two_ranks) / "samples" / "0" / "0.ckpt"
    rest = train(lambda: make(skip=skip), ckpt_path=path, max_epochs=1)
    before = [index for of_rank in parts for event in of_rank[0][1] if event[0] == "train" for index in event[4]]
    assert sorted(before + samples(rest.ledger)) == everything


def test_on_other_ranks_steps_of_a_mixture_hold_other_samples_which_is_warned_of(ranks: Ranks) -> None:
    ranks.of(on_two_ranks)
    make, skip = ON_RANKS["mixture"]
    path = ranks.folder_of(on_two_ranks) / "mixture" / "0" / "0.ckpt"
    with pytest.warns(StatefulWarning, match="counts batches 2 to 3 of epoch 0, .* in steps of 2 ranks"):
        train(lambda: make(skip=skip), ckpt_path=path, max_epochs=1)
