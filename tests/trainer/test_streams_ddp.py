"""Streams on real ranks: in step, nothing lost, exact over stops and faults, and dealt out anew."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.callbacks import LambdaCallback
from support.ddp_runs import (
    Link,
    Settle,
    assert_chains,
    chain_of,
    hand_over,
    on_ranks,
    over_all,
    run,
)
from support.ledger import ids_of, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import quiet_trainer, seeded, train
from support.stream_runs import (
    EVERY_SAMPLE,
    MODULES,
    OF_OTHERS,
    OTHER_FIRST,
    OTHER_SIZES,
    VAL_FIRST,
    VAL_SAMPLES,
    VAL_SIZES,
    Batches,
    BatchesWithState,
    Own,
    OwnWithState,
    chunks,
    files_of,
    mapped,
    module,
    tokens_in,
    write_files,
)
from torch.utils.data import DataLoader

from lightning_stateful import MixedStream, StatefulDataCallback, StreamDataModule
from lightning_stateful.errors import StatefulWarning, StateMismatchError

STOPS = [("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]
# The kinds that differ most; the others are read in one process by many tests.
PACKED = ("packed split", "packed whole", "packed tokens", "packed mixture")
# The kinds that differ most; the others are read in one process by many tests.
KINDS = ("chunks", "json", "batched map", "tokens", "mixed by sample", "cycle", "own with a state", "own", *PACKED[:2])
MIXED = ("mixed by sample", "cycle", "packed mixture")
# After so many steps each number of ranks leaves the rest to the next; one rank has workers.
HANDED_OVER = {number: {"max_steps": steps, "max_epochs": -1} for number, steps in ((2, 2), (1, 4), (3, 5))}
HANDED = ("batched map", "mixed by sample", "packed split", "packed mixture")
# These are handed over as a part of the others, or in test_packed_streams_ddp.
HANDED_SLOWLY = ("chunks", "tokens", "packed whole", "packed tokens")
CALLBACK = {"callbacks": lambda: [StatefulDataCallback(seed=7)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return Ranks(2, folder / "2")


def files(folder: Path) -> Path:
    """The folder of the files that all cases read."""
    return folder.parents[1]


def every_sample_of(kind: str) -> list[int]:
    every = [*EVERY_SAMPLE, *OF_OTHERS] if kind in MIXED else EVERY_SAMPLE
    return tokens_in(every) if kind in PACKED else every


# In step, and nothing lost


def chain(folder: Path, kind: str) -> list[Link]:
    return chain_of(partial(MODULES[kind], files(folder)), folder, STOPS)


# Mixtures stop on two ranks in test_mixed_streams.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_ranks_which_lose_nothing(ranks: Ranks, kind: str) -> None:
    runs = assert_chains(ranks.of(chain, kind))
    every = every_sample_of(kind)
    first, both = Counter(over_all(runs, 0)), Counter(over_all(runs))
    assert len(trained(runs[0]["ledger"])) >= 8
    assert set(both) == set(every)
    if kind != "cycle":
        # What is not served in an epoch comes in the next, of which some is left in turn.
        assert max(first.values()) == 1
        assert max(both.values()) == 2
        # Two ranks share all but a sample, unless the stream divides itself.
        assert first.total() >= len(every) - 1 or kind.startswith("own")


def test_ranks_of_unequal_length_stop_together_and_begin_each_epoch_anew(ranks: Ranks) -> None:
    runs = [parts[0][0] for parts in ranks.of(chain, "own")]
    for epoch in range(2):
        found = list(over_all(runs, epoch))
        assert len(set(found)) == len(found) == len(EVERY_SAMPLE) - 1


def states(folder: Path, kind: str, options: dict[str, Any]) -> list[Any]:
    """Every state and report that a rank would give."""
    found: list[Any] = []

    def keep(trainer: Any, *args: Any) -> None:
        own: Any = trainer.datamodule
        found.append((trainer.current_epoch, own.state_dict()["lightning_stateful"], own.position_report()))

    hooks = ("train_epoch_start", "before_backward", "train_batch_end", "validation_end", "train_epoch_end")
    keeps = LambdaCallback(**{f"on_{hook}": keep for hook in hooks})
    run(partial(MODULES[kind], files(folder)), callbacks=[keeps], **options)
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [("json", {"accumulate_grad_batches": 3}), ("own with a state", {}), ("cycle", {"limit_train_batches": 5})],
)
def test_states_are_equal_on_all_ranks_at_every_moment_and_plain(
    ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    first, second = ranks.of(states, kind, options)
    assert first == second
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(second))
    assert len(first) > 20
    # The dataset's own state of each rank is a tensor of 22 numbers.
    most = 11000 if kind == "own with a state" else 5000
    assert max(len(json.dumps(state)) for _, state, _ in first) < most


# Stops


def workers(folder: Path, kind: str) -> list[Link]:
    make = partial(MODULES[kind], files(folder), num_workers=2, persistent_workers=True, val=None)
    return chain_of(make, folder, [("on_train_batch_end", 0, 2)], callbacks=lambda: [Settle()])


@pytest.mark.parametrize("kind", thinned(["json", "own with a state"], ["json"]))
def test_workers_go_on_exactly_on_every_rank(ranks: Ranks, kind: str) -> None:
    assert_chains(ranks.of(workers, kind))


def side_by_side(folder: Path) -> Any:
    others = mapped(files_of("json", files(folder), "other"))
    return module({"a": chunks(), "b": chunks(OTHER_SIZES, OTHER_FIRST), "c": others}, steps_per_epoch=4)


def on_chunks(folder: Path, **options: Any) -> Any:
    return MODULES["chunks"](folder, **options)


# Epochs cut, made of several passes, with windows of accumulated gradients, and of several streams.
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "side by side": (side_by_side, {"max_epochs": 4}),
    "loaders made anew": (on_chunks, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "limited": (on_chunks, {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 6}),
    "long accumulation": (partial(on_chunks, steps_per_epoch=26), {"accumulate_grad_batches": 20}),
    "short epochs": (partial(on_chunks, steps_per_epoch=4), {"max_epochs": 7}),
    "long epochs": (partial(on_chunks, steps_per_epoch=13), {"val_check_interval": 5}),
    "callback alone": (lambda folder: DataLoader(mapped(files_of("parquet", files(folder))), batch_size=2), CALLBACK),
    "iterables": (lambda folder: Batches(), CALLBACK),
    "iterables with a state": (lambda folder: BatchesWithState(), CALLBACK),
    "iterables cut": (
        lambda folder: BatchesWithState(),
        {**CALLBACK, "limit_train_batches": 3, "max_epochs": 3, "use_distributed_sampler": False},
    ),
}


BESIDE_CHUNKS = ("side by side", "callback alone", "iterables", "iterables with a state", "iterables cut")


def schedule(folder: Path, name: str) -> list[Link]:
    make, options = SCHEDULES[name]
    return chain_of(partial(make, folder), folder, STOPS, **options)


# Those of one process, in test_stream_moments, stop in the others too.
@pytest.mark.parametrize(
    "name",
    thinned(
        SCHEDULES, ["loaders made anew", "long accumulation", "long epochs", "short epochs", "iterables with a state"]
    ),
)
def test_a_run_of_any_schedule_goes_on_exactly_on_every_rank_and_loses_nothing(ranks: Ranks, name: str) -> None:
    runs = assert_chains(ranks.of(schedule, name))
    if name not in BESIDE_CHUNKS:
        counts = Counter(over_all(runs))
        assert set(counts) == set(EVERY_SAMPLE)
        # A sample may be left of each of the last two passes, at most.
        assert max(counts.values()) - min(counts.values()) <= 2


# Evaluation


def evaluated(folder: Path, kind: str) -> list[Any]:
    """Streams for every stage of evaluation, of more shards than ranks and of one."""
    made = {
        "one chunk": lambda: chunks((4,), VAL_FIRST),
        "parquet": lambda: mapped(files_of("parquet", files(folder), "val")),
        "mixed": lambda: MixedStream({"a": chunks(VAL_SIZES, VAL_FIRST), "b": chunks((1, 2, 1, 1), 600)}),
    }
    stream = made[kind]()
    data = StreamDataModule(None, stream, stream, stream, batch_size=2)
    trainer, model = quiet_trainer(**on_ranks()), seeded()
    trainer.test(model, datamodule=data, verbose=False)
    trainer.predict(model, datamodule=data)
    validating = run(partial(module, chunks(), val=stream), val_check_interval=3, max_epochs=1)
    return [*model.ledger, *validating.ledger]


@pytest.mark.parametrize("kind", thinned(["one chunk", "parquet", "mixed"], ["parquet"]))
def test_evaluation_gives_every_sample_once_over_the_ranks(ranks: Ranks, kind: str) -> None:
    of_kind = {"one chunk": list(range(VAL_FIRST, VAL_FIRST + 4)), "mixed": [*VAL_SAMPLES, *range(600, 605)]}
    expected, ledgers = of_kind.get(kind, VAL_SAMPLES), ranks.of(evaluated, kind)
    # Of validations, by the step of training.
    served: dict[Any, list[int]] = {}
    for event in itertools.chain(*ledgers):
        if event[0] in ("test", "predict", "val"):
            served.setdefault(event[3] if event[0] == "val" else event[0], []).extend(ids_of(event))
    assert len(served) > 3
    assert all(sorted(found) == expected for found in served.values())


def nothing_at_all(folder: Path) -> list[Any]:
    with pytest.warns(StatefulWarning, match="has given no batch in an epoch, so nothing was trained on"):
        return run(lambda: module(chunks((0, 0)), val=None), max_epochs=2).ledger


def test_ranks_that_have_nothing_at_all_are_warned_as_a_single_one_is(ranks: Ranks) -> None:
    assert [trained(ledger) for ledger in ranks.of(nothing_at_all)] == [[], []]


class RaisesOnOne(pl.Callback):
    """Raises on one rank between epochs, where no rank waits for its gradients."""

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            raise KeyError("its own")


def raises_on_one(folder: Path) -> None:
    run(lambda: DataLoader(Own(), batch_size=2), callbacks=[StatefulDataCallback(seed=7), RaisesOnOne()])


def test_a_rank_that_raises_outside_its_data_is_not_waited_for(ranks: Ranks) -> None:
    waiting, raising = ranks.errors_of(raises_on_one)
    assert waiting == "StreamError: Rank 1 has failed: KeyError: 'its own'"
    assert raising == "KeyError: 'its own'"


def split_alike(folder: Path) -> None:
    """Every rank takes the part of rank 0."""
    part = split_dataset_by_node(mapped(files_of("parquet", files(folder))), rank=0, world_size=2)
    run(lambda: DataLoader(part, batch_size=2), callbacks=[StatefulDataCallback(seed=7)])


def test_ranks_whose_parts_contradict_them_are_refused_before_the_first_step(ranks: Ranks) -> None:
    for error in ranks.errors_of(split_alike):
        assert error.startswith("RankMismatchError")


# Other numbers of ranks


def part(folder: Path, kind: str, number: int, **options: Any) -> dict[str, Any]:
    make = partial(MODULES[kind], folder, num_workers=2 if number == 1 else 0, val=None)
    return hand_over(folder, kind, make, HANDED_OVER, number, **options)


def handed_over(folder: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Go on with what other ranks have left, if there is any, and leave the rest of the epoch to others again."""
    options = on_ranks()
    del options["max_epochs"]
    return {kind: part(files(folder), kind, options["devices"], **options) for kind in kinds}


@pytest.fixture(scope="module")
def handed(folder: Path, ranks: Ranks) -> Callable[[str], list[list[dict[str, Any]]]]:
    """The runs of two ranks, then one, then three, of each kind; many kinds share a launch."""
    three = Ranks(3, folder / "3")

    @cache
    def of(kinds: tuple[str, ...]) -> list[list[dict[str, Any]]]:
        two = ranks.of(handed_over, kinds)
        one = [{kind: part(folder, kind, 1) for kind in kinds}]
        return [two, one, three.of(handed_over, kinds)]

    return lambda kind: of(HANDED if kind in HANDED else HANDED_SLOWLY)


@pytest.mark.parametrize("kind", [*HANDED, *HANDED_SLOWLY])
@pytest.mark.slow
def test_an_epoch_is_handed_over_from_two_ranks_to_one_to_three_to_one(
    folder: Path, handed: Callable[[str], list[list[dict[str, Any]]]], kind: str
) -> None:
    legs, make = handed(kind), partial(MODULES[kind], folder, val=None)
    last = train(make, ckpt_path=folder / f"{kind}, 3.ckpt", max_epochs=2)
    runs = [*([run[kind] for run in of_number] for of_number in legs), [{"ledger": last.ledger}]]
    assert [len(of_number) for of_number in runs] == [2, 1, 3, 1]
    assert all(trained(run["ledger"]) for of_number in runs for run in of_number)
    # What three ranks of uneven shares have left comes first in the next epoch.
    assert sorted(index for of_number in runs for index in over_all(of_number)) == sorted(every_sample_of(kind) * 2)
    assert max(Counter(index for of_number in runs for index in over_all(of_number, 0)).values()) == 1


def test_an_own_stream_cannot_be_handed_over_within_an_epoch(ranks: Ranks) -> None:
    ranks.of(chain, "own with a state")
    path = ranks.folder_of(chain, "own with a state") / "1" / "0.ckpt"
    with pytest.raises(StateMismatchError, match=r"ranks: saved 2, now 1.* resume on 2 ranks"):
        train(lambda: module(OwnWithState()), ckpt_path=path)
