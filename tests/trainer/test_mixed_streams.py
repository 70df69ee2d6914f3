"""Mixtures of streams and of datasets with an index: shares by schedule, counts by source, on any ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import Link, Settle, assert_chains, chain_of, hand_over, on_ranks, over_all, steps_of
from support.ledger import batches
from support.ranks import Ranks
from support.runs import assert_goes_on_from_every_moment, train
from support.stream_runs import EVERY_SAMPLE, chunks, document, packed, tokens_in
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import MixedStream, StreamDataModule, WeightSchedule, patch_dataloader
from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.streams.indexed import IndexedStream

FIRST, NUM_BOOKS = 700, 33
CHANGES_AT = 9
SCHEDULE = WeightSchedule({0: {"web": 1, "books": 1}, CHANGES_AT: {"web": 1, "books": 3}})


class Books(Dataset[Any]):
    """Documents with an index."""

    def __len__(self) -> int:
        return NUM_BOOKS

    def __getitem__(self, index: int) -> Any:
        return document(FIRST + index)


def by_schedule(**options: Any) -> StreamDataModule:
    """Batches of chunks and of documents with an index, as a schedule says."""
    streams = {"web": chunks(transform=document), "books": Books()}
    mixed = MixedStream(streams, schedule=SCHEDULE, stop="cycle", seed=4)
    return packed("split", mixed, **{"steps_per_epoch": 14, "val": None, "log_data": True, **options})


def each_once(**options: Any) -> StreamDataModule:
    """Sequences of both, each document of an epoch once."""
    mixed = MixedStream([chunks(transform=document), Books()], weights=[1, 2], by="sample")
    return packed("whole", mixed, **{"val": None, **options})


def source_of(token: int) -> str:
    return "books" if token >= 100 * FIRST else "web"


def assert_shares(steps: list[Any]) -> None:
    """Each step has batches of one source; and each period before and behind the change, its share of every one."""
    found = ["/".join(sorted({source_of(token) for token in step})) for step in steps]
    assert set(found) == {"web", "books"}
    for first in range(0, CHANGES_AT - 1, 2):
        assert Counter(found[first : first + 2]) == {"web": 1, "books": 1}, first
    for first in range(CHANGES_AT, len(found) - 3, 4):
        assert Counter(found[first : first + 4]) == {"web": 1, "books": 3}, first


def counts_of(tokens: list[int]) -> dict[str, int]:
    """Tokens and documents by source; a document counts by its last token."""
    ends = {document(number)["input_ids"][-1] for number in range(FIRST + NUM_BOOKS)}
    told = Counter(f"{source_of(token)}/tokens" for token in tokens)
    return told + Counter(f"{source_of(token)}/documents" for token in tokens if token in ends)


def told_of(report: dict[str, Any]) -> dict[str, int]:
    return {f"{name}/{what}": of[what] for name, of in report["sources"].items() for what in ("tokens", "documents")}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
def test_a_schedule_goes_by_steps_of_training_and_counts_are_those_of_what_was_served(
    tmp_path: Path, workers: dict[str, Any]
) -> None:
    make = partial(by_schedule, **workers)
    moments = [("on_train_batch_end", 0, 5), ("on_before_backward", 0, 12), ("on_train_batch_end", 1, 6)]
    run = assert_goes_on_from_every_moment(tmp_path, make, moments[2:] if workers else moments, max_epochs=3)
    steps = batches(run.ledger)
    # Behind the end of the first pass, one worker may be over before the other.
    assert_shares(steps[:22] if workers else steps)
    for step, logged in run.trainer.logger.sources:
        expected = counts_of([token for batch in steps[: step + 1] for token in batch])
        assert {name: logged[name] for name in expected} == expected
    report = run.trainer.datamodule.position_report()
    assert told_of(report) == counts_of([token for batch in steps for token in batch])
    assert report["sources"]["books"]["share"] == pytest.approx(sum(map(is_of_books, steps)) / len(steps), abs=0.02)


def is_of_books(batch: Any) -> bool:
    return source_of(batch[0]) == "books"


def test_streams_stop_after_a_number_of_tokens(tmp_path: Path) -> None:
    make = partial(by_schedule, max_tokens_total=500, log_data=False)
    moments = [("on_train_batch_end", 0, 5), ("on_before_backward", 1, 2)]
    run = assert_goes_on_from_every_moment(tmp_path, make, moments, max_epochs=9)
    sizes = list(map(len, batches(run.ledger)))
    assert sum(sizes[:-1]) < 500 <= sum(sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": {0: [1, 1]}}, "stop='all_exhausted' a stream that is over leaves its share"),
        ({"schedule": {0: [1, 1]}, "weights": [1, 1], "stop": "cycle"}, "takes the place of weights"),
    ],
)
def test_a_schedule_that_could_not_be_kept_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        MixedStream([chunks(), chunks()], **options)


# On ranks

HANDED_OVER = {2: {"max_steps": 4}, 3: {"max_steps": 11}, 1: {"max_epochs": 9}}
ONCE = {2: {"max_steps": 3}, 3: {"max_steps": 5}, 1: {"max_epochs": 1}}
MODULES: dict[str, Any] = {
    "schedule": (partial(by_schedule, max_tokens_total=900), HANDED_OVER),
    "once": (each_once, ONCE),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    folder = tmp_path_factory.mktemp("mixed")
    return {number: Ranks(number, folder / str(number)) for number in (2, 3)}


def chain(folder: Path) -> list[Link]:
    stops = [("on_before_backward", 0, 3), ("on_train_batch_end", 1, 5)]
    return chain_of(partial(by_schedule, max_tokens_total=1300), folder, stops, max_epochs=9)


def handed_over(folder: Path, name: str) -> dict[str, Any]:
    (make, legs), options = MODULES[name], on_ranks(max_epochs=9)
    return hand_over(folder.parents[1], name, make, legs, options["devices"], callbacks=[Settle()], **options)


def test_ranks_stop_and_go_on_in_step(ranks: dict[int, Ranks]) -> None:
    runs = assert_chains(ranks[2].of(chain))
    steps = [step for epoch in range(4) for step in steps_of(runs, epoch)]
    joined = [[token for batch in step for token in batch] for step in steps]
    assert_shares(joined)
    assert told_of(runs[0]["report"]) == counts_of(over_all(runs))
    assert sum(map(len, joined[:-1])) < 1300 <= sum(map(len, joined))


def renamed(report: dict[str, Any]) -> dict[str, Any]:
    return {"sources": dict(zip(("web", "books"), report["sources"].values(), strict=True))}


@pytest.mark.parametrize("name", MODULES)
def test_other_ranks_go_on_with_shares_counts_and_what_is_left(ranks: dict[int, Ranks], name: str) -> None:
    make, how = MODULES[name]
    legs = [ranks[2].of(handed_over, name), ranks[3].of(handed_over, name)]
    legs.append([hand_over(ranks[2].folder.parent, name, make, how, 1)])
    steps = [step for runs in legs for epoch in range(9) for step in steps_of(runs, epoch)]
    joined = [[token for batch in step for token in batch] for step in steps]
    tokens = [token for step in joined for token in step]
    if name == "once":
        assert sorted(tokens) == sorted(tokens_in(EVERY_SAMPLE) + tokens_in(range(FIRST, FIRST + NUM_BOOKS)))
        assert told_of(renamed(legs[-1][0]["report"])) == counts_of(tokens)
        return
    assert_shares(joined)
    assert told_of(legs[-1][0]["report"]) == counts_of(tokens)
    assert sum(map(len, joined[:-1])) < 900 <= sum(map(len, joined))


def test_a_dataset_with_an_index_is_read_in_another_order_in_each_epoch() -> None:
    run = train(lambda: packed("split", MixedStream({"books": Books()}), val=None), max_epochs=2)
    first, second = (sum(batches(run.ledger, epoch), ()) for epoch in range(2))
    assert sorted(first) == sorted(second) == tokens_in(range(FIRST, FIRST + NUM_BOOKS))
    assert first != second


def test_the_seed_of_a_module_or_callback_is_that_of_all_in_a_mixture_that_has_none() -> None:
    def mixed(seed: int | None = None) -> MixedStream:
        streams = {
            "chunks": chunks(transform=document, seed=seed),
            "books": IndexedStream(Books(), seed=seed),
            "own": chunks(first=300, transform=document, seed=4),
        }
        return MixedStream(streams, weights={"chunks": 1, "books": 2, "own": 1}, by="sample", seed=seed)

    def found(mixture: MixedStream, seed: int) -> list[Any]:
        loader = packed("split", mixture, val=None, seed=seed).train_dataloader()
        return [batch["id"].tolist() for batch in loader]

    first, other = found(mixed(), 1), found(mixed(), 2)
    assert first == found(mixed(1), 1) == found(mixed(1), 2)
    assert other == found(mixed(2), 1)
    assert [[source_of(token) for token in step] for step in first] != [
        [source_of(token) for token in step] for step in other
    ]
    for least, most in ((0, 100 * 300), (100 * FIRST, 100 * (FIRST + NUM_BOOKS))):
        orders = [[token for step in steps for token in step if least <= token < most] for steps in (first, other)]
        assert sorted(orders[0]) == sorted(orders[1])
        assert orders[0] != orders[1]
    # A loader that is patched, by the callback or without a Trainer, has it likewise.
    patched = [
        list(patch_dataloader(DataLoader(mixture, batch_size=None), seed=seed))
        for mixture, seed in ((mixed(), 1), (mixed(1), 2), (mixed(), 2))
    ]
    assert patched[0] == patched[1] != patched[2]
    state = packed("split", mixed(), val=None, seed=1).train_dataloader().state_dict()
    with pytest.raises(StateMismatchError, match="mixing_seed: saved 1, now 2") as refused:
        packed("split", mixed(), val=None, seed=2).train_dataloader().load_state_dict(state)
    changed = ["mixing_seed", "sources.chunks.seed", "sources.books.seed"]
    assert [difference.path for difference in refused.value.differences] == changed
