"""A ledger knows of every batch the samples of each source, the tokens and padding, and how long it was waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import packed_data, sources, texts
from support.ledger import Numbers, batches
from support.runs import stopped, train
from support.stream_runs import OTHER_FIRST, OTHER_SIZES, chunks, document, packed
from support.stream_runs import module as stream_module
from torch.utils.data import DataLoader

from lightning_stateful import MixedStream, StatefulDataCallback
from lightning_stateful.audit import read_ledger
from lightning_stateful.ledger.over_time import padding_of, shares_of, waiting_of


def ids(batch: Any) -> Any:
    return batch["id"]


def in_two_starts(folder: Path, make: Callable[[], Any], key: Any = None, batch: int = 2, **options: Any) -> list[Any]:
    """Trains two epochs, stopped and resumed within the second; the samples of every batch."""

    def run(make: Any, *, callbacks: Any = (), **more: Any) -> Any:
        writer = StatefulDataCallback(ledger=folder / "ledger", ledger_key=key)
        return train(make, callbacks=[writer, *callbacks], **{"max_epochs": 2, **options, **more})

    before = stopped(folder / "a.ckpt", make, epoch=1, batch=batch, run=run)
    return batches(before) + batches(run(make, ckpt_path=folder / "a.ckpt").ledger)


@pytest.mark.parametrize(
    ("name", "key", "unit", "asked"),
    [
        ("mixture", None, "batches", [1 / 4, 1 / 2, 1 / 4]),
        ("by sample, steps", ids, "samples", [1 / 2, 1 / 4, 1 / 4]),
        ("by token", None, "tokens", [1 / 3] * 3),
        # Nine steps, three, and two.
        ("schedule", ids, "batches", [(9 / 2 + 3 / 4) / 14, (9 / 2 + 3 / 4 + 2 / 2) / 14, (3 / 2 + 2 / 2) / 14]),
    ],
    ids=["batches", "samples", "tokens", "schedule"],
)
def test_sources_of_a_mixture(tmp_path: Path, name: str, key: Any, unit: str, asked: list[float]) -> None:
    served = in_two_starts(tmp_path, sources.MODULES[name], key)
    ledger = read_ledger(tmp_path / "ledger")
    found = shares_of(ledger)
    assert found is not None
    assert len(ledger.starts) == 2
    assert (found.unit, found.names) == (unit, tuple(sources.LENGTHS))
    of_batches = [Counter(map(sources.source_of, batch)) for batch in served]
    assert found.samples == [sum(counts[source] for counts in of_batches) for source in found.names]
    if unit == "batches":
        shares = [sum(source in counts for counts in of_batches) / len(served) for source in found.names]
    else:
        each = {source: sum(of) / len(of) for source, of in sources.TOKENS.items()} if unit == "tokens" else {}
        amounts = [samples * each.get(source, 1) for source, samples in zip(found.names, found.samples, strict=True)]
        shares = [amount / sum(amounts) for amount in amounts]
    assert found.got_in_all == pytest.approx(shares)
    assert found.got[0] == pytest.approx(shares)
    # Tokens are asked for as exactly as whole batches can give them.
    assert found.asked_in_all == pytest.approx(asked, abs=0.01 if unit == "tokens" else 1e-9)


def mixed_stream(**options: Any) -> Any:
    streams = {"one": chunks(), "other": chunks(OTHER_SIZES, OTHER_FIRST)}
    return MixedStream(streams, **options)


@pytest.mark.parametrize(
    ("options", "more", "asked"),
    [
        ({"weights": [2, 1], "by": "batch"}, {}, [2 / 3, 1 / 3]),
        ({"weights": [1, 1], "by": "sample"}, {}, [1 / 2, 1 / 2]),
        # Six steps, and six.
        (
            {"schedule": {0: [1, 0], 6: [1, 3]}, "stop": "cycle"},
            {"num_workers": 1, "steps_per_epoch": 6},
            [(1 + 1 / 4) / 2, (0 + 3 / 4) / 2],
        ),
    ],
    ids=["batches", "samples", "schedule"],
)
def test_sources_of_a_mixed_stream(tmp_path: Path, options: Any, more: Any, asked: list[float]) -> None:
    served = in_two_starts(tmp_path, lambda: stream_module(mixed_stream(**options), **more))
    found = shares_of(read_ledger(tmp_path / "ledger"))
    assert found is not None
    of_other = sum(number >= OTHER_FIRST for batch in served for number in batch)
    assert found.samples == [sum(map(len, served)) - of_other, of_other]
    assert found.asked_in_all == pytest.approx(asked)


def test_a_loader_that_is_no_mixture_has_no_shares(tmp_path: Path) -> None:
    in_two_starts(tmp_path, lambda: DataLoader(Numbers(12), batch_size=2))
    ledger = read_ledger(tmp_path / "ledger")
    assert shares_of(ledger) is None
    assert padding_of(ledger) is None


def test_padding_of_buckets(tmp_path: Path) -> None:
    served = in_two_starts(tmp_path, texts.bucketed)
    found = padding_of(read_ledger(tmp_path / "ledger"))
    assert found is not None
    lengths = [[texts.length_of(index) for index in batch] for batch in served]
    assert found.tokens == sum(map(sum, lengths))
    assert found.padded == sum(max(batch) * len(batch) for batch in lengths)
    assert found.share_in_all == pytest.approx(1 - found.tokens / found.padded)


@pytest.mark.parametrize(
    "make",
    [
        lambda: packed_data.packed("whole"),
        lambda: packed_data.packed("split", shuffle=False),
        lambda: packed_data.mixed("whole"),
        lambda: packed("whole", MixedStream([chunks(transform=document), chunks((5, 2), 700, transform=document)])),
    ],
    ids=["whole", "split", "mixture", "mixed stream"],
)
def test_padding_of_packed_documents(tmp_path: Path, make: Callable[[], Any]) -> None:
    """The ids of a batch are its tokens without padding."""
    served = in_two_starts(tmp_path, make)
    found = padding_of(read_ledger(tmp_path / "ledger"))
    assert found is not None
    assert found.tokens == sum(map(len, served))
    # Batches of two sequences of 12 tokens; the last of a pass over a source may have one.
    assert 24 * (len(served) - 4) <= found.padded <= 24 * len(served)
    assert found.padded % 12 == 0


class Slow(Numbers):
    """Takes a while for every sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_time_that_the_loop_waited_for_its_batches(tmp_path: Path) -> None:
    began = time.time()
    in_two_starts(tmp_path, lambda: {"a": DataLoader(Slow(12), batch_size=2), "b": DataLoader(Slow(6), batch_size=1)})
    took = time.time() - began
    ledger = read_ledger(tmp_path / "ledger")
    found = waiting_of(ledger)
    assert found is not None
    assert [(one.start, one.rank, one.steps, one.others, one.last) for one in found.ranks] == [
        (0, 0, 9, 0, 9),
        (1, 0, 3, 0, 3),
    ]
    assert len({one.host for one in found.ranks}) == found.num_hosts == 1
    for one in found.ranks:
        assert one.first >= 0.06
        # A step waits for three samples, and some may be read before a step of the epoch is counted.
        assert 0.06 * (one.steps - 1) <= one.own <= one.seconds < took
    assert ((found.own > 0.3) & (found.own <= 1)).all()
    headers = [start.headers[0] for start in ledger.starts]
    assert began <= headers[0].time < headers[1].time <= time.time()
