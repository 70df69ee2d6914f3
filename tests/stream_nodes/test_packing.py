"""Documents of a stream are packed into sequences of one length, and held by their positions alone."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.node_cases import ListNode, NumberedShards, assert_resumes, started
from support.packing_cases import Tokens, documents, packed, plain, real, tokens_of
from support.quick import thinned
from support.slot_cases import alone, flat, mixture, serve, serve_epoch, source
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Loader, Mapper, Prefetcher

from lightning_stateful import ChunkedDataset, MixedStream
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.packing import Packing
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode
from lightning_stateful.streams import DocumentPacker
from lightning_stateful.streams.source import Source, Transform
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig


def packer(given: Any, packing: Packing, asked: Counter[str] | None = None) -> DocumentPacker:
    return DocumentPacker(given if isinstance(given, BaseNode) else ListNode(given, asked), packing)


def lists(given: Any, packing: Packing) -> MapNode:
    """The same, with sequences as lists."""
    return MapNode(packer(given, packing), plain)


def random_packing(rng: random.Random, **fixed: Any) -> Packing:
    how: dict[str, Any] = {"how": rng.choice(["split", "whole"]), "separator": rng.choice([None, 7])}
    if how["how"] == "whole":
        how["too_long"] = rng.choice(["drop", "truncate", "split"])
        how["open_sequences"] = rng.choice([1, 2, 5, 16])
    return Packing(**{"sequence_length": rng.choice([1, 5, 16, 50]), "padding": 3, **how, **fixed})


# Against plain Python, from any state on


@pytest.mark.parametrize("seed", thinned(range(24), range(12, 24)))
def test_it_resumes_at_every_sequence_of_what_plain_python_packs(seed: int) -> None:
    rng = random.Random(seed)
    given = documents(rng, rng.choice([0, 1, 3, 30, 250]), rng.choice([3, 20, 70]))
    packing = random_packing(rng)
    assert assert_resumes(lambda: lists(given, packing)) == packed(given, packing)


@pytest.mark.parametrize("seed", thinned(range(3), [1, 2]))
def test_it_resumes_where_few_documents_fit_beside_those_that_wait(seed: int) -> None:
    rng = random.Random(seed)
    # Sequences are closed because they have waited, and of those that have as much room one is older.
    given = [tokens_of(number, rng.choice([3, 9, 10, 10, 11, 11, 12, 13])) for number in range(600)]
    packing = Packing(16, how="whole", open_sequences=rng.choice([2, 5, 9]))
    whole, node = packed(given, packing), started(lists(given, packing))
    for at in range(0, 200, 4):
        assert list(started(lists(given, packing), json.loads(json.dumps(node.state_dict())))) == whole[at:]
        assert node.next_many(4) == whole[at : at + 4]


@pytest.mark.parametrize(
    "sample",
    [
        lambda tokens: {"input_ids": tokens, "attention_mask": [1] * len(tokens), "text": "a"},
        lambda tokens: {"labels": torch.tensor(tokens), "input_ids": tokens},
        lambda tokens: {"tokens": tokens, "text": "a"},
        lambda tokens: np.array(tokens, dtype=np.uint16),
        lambda tokens: torch.tensor(tokens) if tokens[0] % 3 else list(map(np.int64, tokens)),
    ],
    ids=["columns left out", "labels", "tokens", "arrays", "of several kinds"],
)
@pytest.mark.parametrize("packing", [Packing(12, separator=5), Packing(30, how="whole")], ids=["split", "whole"])
def test_documents_are_packed_alike_however_they_are_given(packing: Packing, sample: Any) -> None:
    given = documents(random.Random(1), 60, 28)
    found = list(map(plain, packer(list(map(sample, given)), packing)))
    assert found == packed(given, packing)


def test_bytes_are_packed_as_the_numbers_that_they_are() -> None:
    given = [b"a text", bytearray(b"and"), b"\xff\x00"]
    for packing in (Packing(5), Packing(8, how="whole", separator=300)):
        assert list(lists(given, packing)) == packed(list(map(list, given)), packing)


@pytest.mark.parametrize("how", ["split", "whole"])
def test_every_column_is_packed_alike_and_padded_by_its_name(how: Any) -> None:
    given = [
        {"input_ids": tokens, "labels": [-token for token in tokens], "loss_mask": np.array(tokens, np.float32) / 2}
        for tokens in documents(random.Random(2), 40, 20)
    ]
    packing = Packing(21, how=how, separator=9, padding={"input_ids": 4, "loss_mask": 7}, labels_across=True)
    sequences = list(packer(given, packing))
    assert {sequence["loss_mask"].dtype for sequence in sequences} == {np.dtype(np.float32)}
    for sequence in sequences:
        tokens, is_padding = sequence["input_ids"], sequence["document_ids"] < 0
        is_separator = ~is_padding & (sequence["labels"] == 9)
        expected = np.where(is_padding, -100, np.where(is_separator, 9, -tokens))
        assert sequence["labels"].tolist() == expected.tolist()
        assert set(tokens[is_padding]) <= {4}
        assert set(tokens[is_separator]) <= {9}
        mask = sequence["loss_mask"]
        # A separator's is that of the token before it.
        assert (mask[is_padding] == 7).all()
        assert (mask == tokens / 2)[~is_padding & ~is_separator].all()
    assert sum(int((sequence["labels"] == 9).sum()) for sequence in sequences) == 40


def test_sequences_that_are_made_together_are_left_out_one_by_one() -> None:
    given, packing = [tokens_of(number, 900) for number in range(200)], Packing(3000)
    whole, node = packed(given, packing), started(packer(given, packing))
    rng, at = random.Random(1), 0
    while at < len(whole):
        at += node.skip(rng.choice([0, 1, 3, 5]))
        found = node.next_many(2)
        assert list(map(plain, found)) == whole[at : at + 2]
        at += len(found)
    assert at == len(whole)


def test_the_order_is_always_this_one() -> None:
    # Of others, a state that was taken before would be worth nothing.
    sizes = [5, 6, 4, 3, 7, 1, 8, 4, 2, 5]
    given = [[size] * size for size in sizes]
    found = [sequence["input_ids"] for sequence in lists(given, Packing(8, how="whole", open_sequences=2))]
    assert [sorted(Counter(tokens).items()) for tokens in found] == [
        [(0, 2), (6, 6)], [(3, 3), (5, 5)], [(1, 1), (7, 7)], [(8, 8)], [(4, 8)], [(0, 1), (2, 2), (5, 5)],
    ]  # fmt: skip


class TestInTorchdata:
    """A graph of torchdata's nodes and loader, without a stream."""

    @staticmethod
    def graph(packing: Packing) -> Loader[Any]:
        texts = ["the quick fox " * (number % 7 + 1) for number in range(90)]
        source = Mapper(IterableWrapper(texts), lambda text: {"input_ids": list(map(len, text.split()))})
        return Loader(Prefetcher(Batcher(DocumentPacker(source, packing), 2, drop_last=False), 2))

    @pytest.mark.parametrize("packing", [Packing(16), Packing(32, how="whole", open_sequences=3)], ids=repr)
    def test_it_packs_and_resumes(self, packing: Packing) -> None:
        whole = [[plain(sequence) for sequence in batch] for batch in self.graph(packing)]
        given = [[3, 5, 3] * (number % 7 + 1) for number in range(90)]
        assert [sequence for batch in whole for sequence in batch] == packed(given, packing)
        loader = self.graph(packing)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        resumed = self.graph(packing)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [[plain(sequence) for sequence in batch] for batch in resumed] == whole[4:]


# What is read again


@pytest.mark.parametrize("how", ["split", "whole"])
def test_only_the_documents_that_are_held_are_read_again(how: Any) -> None:
    given, asked = documents(random.Random(3), 3000, 60), Counter[str]()
    packing = Packing(128, how=how, **({"open_sequences": 8} if how == "whole" else {}))
    node, most = started(packer(given, packing, asked)), 0
    for _ in range(200):
        next(node)
        state = node.state_dict()
        asked.clear()
        started(packer(given, packing, asked), state)
        most = max(most, asked["read"])
    # The documents of two blocks, or those of the sequences that are open and of those that were finished meanwhile.
    assert most <= (2 * 128 if how == "split" else 400)


def test_a_sequence_is_closed_once_many_others_were_finished_while_it_was_the_oldest() -> None:
    # Nothing ever fits beside the first.
    given = [tokens_of(0, 9), *(tokens_of(number, 10) for number in range(1, 100))]
    found = packed(given, packing := Packing(10, how="whole", open_sequences=4))
    assert [plain(sequence) for sequence in packer(given, packing)] == found
    assert [0 in sequence["input_ids"][:1] for sequence in found].index(True) == 8


def test_long_documents_are_read_in_smaller_blocks() -> None:
    asked = Counter[str]()
    given, packing = [[number] * 30_000 for number in range(60)], Packing(1000)
    node = started(packer(given, packing, asked))
    node.skip(50 * 30)
    assert asked["read"] <= 50 + 2
    state = json.loads(json.dumps(node.state_dict()))
    assert list(map(plain, started(packer(given, packing), state))) == list(map(plain, node))


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ("split", lambda given: given[:10]),
        ("split", lambda given: []),
        ("whole", lambda given: given[:10]),
        # None of them goes where something was held.
        ("whole", lambda given: [[1] * 64] * 900),
    ],
    ids=["split, few", "split, none", "whole, few", "whole, others"],
)
def test_other_documents_than_before_are_refused(how: Any, changed: Any) -> None:
    given, packing = documents(random.Random(1), 900, 30), Packing(64, how=how)
    node = started(packer(given, packing))
    for _ in range(70):
        next(node)
    state = node.state_dict()
    assert state["open"]
    with pytest.raises(PositionError, match=r"sequences were given since a document that is read again.*seed"):
        started(packer(changed(given), packing), state)


# On any ranks and workers


def as_document(sample: tuple[int, int, int]) -> Tokens:
    """Tokens of a sample, of which no other has any."""
    epoch, shard, number = sample[-3:]
    return tokens_of((epoch * 100 + shard) * 1000 + number, 1 + (shard * 31 + number * 7) % 23)


def drawn_document(sample: Any) -> Tokens:
    """Of a length that is drawn, a third of all being left out."""
    return as_document(sample)[: random.randrange(1, 24)]


def is_kept(sample: Any) -> bool:
    return sum(sample[-2:]) % 3 > 0


def config_of(sizes: list[int], packing: Packing, function: Any = as_document, **options: Any) -> StreamConfig:
    steps = (Transform(MapNode, {"function": function}), Transform(DocumentPacker, {"packing": packing}))
    return alone(sizes, steps=steps, **{"shuffle": True, "buffer_size": 7, "seed": 1, **options})


def tokens_in(config: StreamConfig, epoch: int) -> Tokens:
    """All tokens of a pass."""
    found: list[Any] = [sample for one in config.sources.values() for sample in one.shards.all(epoch)]  # type: ignore[attr-defined]  # numbered shards
    return sorted(token for sample in found for token in as_document(sample))


@pytest.mark.parametrize("seed", thinned(range(10), range(6, 10)))
@pytest.mark.parametrize("how", ["split", "whole"])
def test_no_token_is_lost_or_comes_twice_on_any_ranks(how: Any, seed: int) -> None:
    history = random.Random(seed)
    sizes = [150] if seed % 3 == 2 else [history.randint(0, 40) for _ in range(history.choice([3, 9]))]
    more = {"too_long": "split", "open_sequences": history.choice([1, 4, 64])} if how == "whole" else {}
    config = config_of(sizes, Packing(history.choice([7, 32]), how=how, **more))
    state, sequences = StreamState.beginning(config, 0, history.randint(1, 3), history.randint(1, 2)), []
    for _ in range(5):
        steps, state, _ = serve_epoch(state, history.randint(0, 4))
        sequences += flat(steps)
        state = state.on(history.randint(1, 4), history.randint(1, 2))
    # On several ranks something may be left, which comes first in the next pass.
    sequences += flat(serve_epoch(state.on(1, 1))[0])
    assert real(sequences) == tokens_in(config, 0)


@pytest.mark.parametrize("how", ["split", "whole"])
def test_a_chain_of_one_two_three_ranks_and_one_serves_every_pass_as_one_run_does(how: Any) -> None:
    packing = Packing(16, how=how, **({"too_long": "split", "open_sequences": 8} if how == "whole" else {}))
    config = config_of([60, 25, 0, 90, 41], packing)
    state = StreamState.beginning(config, 0, 1, 1)
    for number in range(2):
        sequences = []
        for ranks, workers in ((1, 1), (2, 2), (3, 1), (1, 2), (1, 1)):
            # The last goes on to the end.
            last = ranks == workers == 1 and bool(sequences)
            steps, state, ended = serve_epoch(state.on(ranks, workers), None if last else 4)
            assert ended == last
            sequences += flat(steps)
        assert real(sequences) == tokens_in(config, number)
        state = state.following()


@pytest.mark.parametrize("how", ["split", "whole"])
def test_passes_follow_one_another_and_lose_nothing(how: Any) -> None:
    packing = Packing(20, how=how, **({"too_long": "split"} if how == "whole" else {}))
    config = config_of([13, 40, 5, 21], packing)
    state, sequences, steps_of = StreamState.beginning(config, 0, 2, 2), [], []
    for number in range(4):
        steps, state, _ = serve_epoch(state if not number else state.following())
        steps_of.append(len(steps))
        sequences += flat(steps)
    sequences += flat(serve_epoch(state.on(1, 1))[0])
    assert real(sequences) == sorted(token for epoch in range(4) for token in tokens_in(config, epoch))
    due = len(tokens_in(config, 0)) / 20 / 2 / 2
    assert all(due - 2 <= found <= due + 4 for found in steps_of)


@pytest.mark.parametrize("how", ["split", "whole"])
@pytest.mark.parametrize(
    ("ranks", "workers"), [(2, 2), *(pytest.param(number, 1, marks=pytest.mark.slow) for number in (1, 3))]
)
def test_on_the_same_ranks_every_sequence_is_the_same(how: Any, ranks: int, workers: int) -> None:
    # Lengths are drawn; what is left out before is counted.
    config = config_of([80, 9, 40, 80, 33], Packing(24, how=how), drawn_document)
    config = StreamConfig(sources=config.sources, batch_size=2)
    whole, _, _ = serve(StreamState.beginning(config, 0, ranks, workers))
    assert len(whole) > 5
    for stop in range(len(whole) + 1):
        begun, state, _ = serve(StreamState.beginning(config, 0, ranks, workers), stop)
        rest, _, _ = serve(state)
        assert [[list(map(plain, batch)) for batch in step] for step in begun + rest] == [
            [list(map(plain, batch)) for batch in step] for step in whole
        ]


def test_dropped_documents_are_counted_once_on_any_ranks() -> None:
    packing = Packing(12, how="whole", too_long="drop", open_sequences=3)
    config = config_of([60, 20, 33], packing)
    too_long = {token // 1000 for token in tokens_in(config, 0) if token % 1000 >= 12}
    state, sequences = StreamState.beginning(config, 0, 2, 1), []
    for stop in (3, 0, 5):
        steps, state, _ = serve_epoch(state, stop)
        sequences += flat(steps)
        state = state.on(state.num_replicas % 3 + 1, 1)
    steps, state, _ = serve_epoch(state.on(1, 1))
    assert real(sequences + flat(steps)) == [t for t in tokens_in(config, 0) if t // 1000 not in too_long]
    assert state.left_out[2] == len(too_long)


# Mixtures


@pytest.mark.parametrize("by", ["batch", "sample"])
def test_shares_of_sequences_are_shares_of_tokens_each_of_one_source(by: Any) -> None:
    def one(name: str, sign: int) -> Source:
        maps = Transform(MapNode, {"function": partial(signed, sign)})
        return source([300] * 4, of={"label": name}, steps=(maps, Transform(DocumentPacker, {"packing": Packing(16)})))

    sources = {"one": one("one", 1), "two": one("two", -1)}
    config = mixture(sources, by=by, weights={"one": 3, "two": 1}, batching={"batch_size": 4})
    batches = [batch for step in serve(StreamState.beginning(config, 0, 1, 1), 40)[0] for batch in step]
    found = [sequence["input_ids"] for batch in batches for sequence in batch]
    assert all((tokens > 0).all() or (tokens < 0).all() for tokens in found)
    tokens = np.concatenate(found)
    assert (tokens > 0).sum() == 3 * (tokens < 0).sum() == len(tokens) * 3 / 4


def signed(sign: int, sample: Any) -> Tokens:
    return [sign * (1 + token) for token in as_document(sample)]


def test_documents_of_several_sources_in_one_sequence_are_refused_by_name() -> None:
    streams = [ChunkedDataset([0], lambda ref: iter([[1]])) for _ in range(2)]
    with pytest.raises(ConfigurationError, match='by="document" would put documents of several sources'):
        MixedStream(streams, by="document")


# The state


@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("how", ["split", "whole"])
def test_the_state_of_a_worker_slot_is_below_500_bytes(how: Any, length: int) -> None:
    packing = Packing(length, how=how, **({"too_long": "split"} if how == "whole" else {}))
    config = config_of([9000], packing, long_document, buffer_size=1000)
    slot_state = 0
    state = StreamState.beginning(config, 0, 1, 1)
    for _ in range(4):
        _, state, ended = serve(state, 50)
        assert not ended
        written = json.dumps(state.to_dict()["slots"][0], separators=(",", ":"))
        slot_state = max(slot_state, len(written))
    assert 200 < slot_state < 500
    assert set(json.loads(written)["of"][ALONE]["state"]["source"]) == {"source", "size", "open", "served"}


def long_document(sample: Any) -> Any:
    return np.zeros(100 + sample[-1] * 37 % 3000, dtype=np.int64)


# Errors


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "has no tokens"),
        ([1.5], "must be integers, got float64"),
        (np.zeros(3, np.float32), "must be integers, got float32"),
        ([1, 2.5], "must be integers, got float64"),
        ("text", "must be a row of integers"),
        (7, "must be a row of integers"),
        (torch.zeros(2, 2, dtype=torch.int64), "must be a row of integers"),
        ({"text": "a"}, "'input_ids' is none of them"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' of .* has 1 elements for 2 tokens"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "the documents before it had"),
        (b"", "has no tokens"),
        ([2**63, 1], "has the value 9223372036854775808, and sequences hold int64"),
        (np.array([2**63], np.uint64), "has the value 9223372036854775808"),
    ],
    ids=str,
)
def test_what_is_no_document_is_named_with_its_shard(document: Any, said: str) -> None:
    # However the stream is shuffled, the place is that of the document.
    for buffer_size in (0, 16):
        reader = ShardReader(NumberedShards([9, 40]), (0, 1), 0)
        shuffled = BlockShuffle(reader, buffer_size, seed=1) if buffer_size else reader
        given = MapNode(shuffled, lambda sample: document if sample[1:] == (1, 21) else [1, 2, 3])
        node = DocumentPacker(given, Packing(4), where=reader.where)
        with pytest.raises(ShardError, match=said) as caught:
            list(node)
        assert "(of shard-1.bin, at its sample 22, counted from 1)" in str(caught.value)


def test_a_document_that_is_too_long_is_named_with_its_shard() -> None:
    reader = ShardReader(NumberedShards([9, 40]), (0, 1), 0)
    given = MapNode(reader, lambda sample: [1] * (9 if sample[1:] == (1, 21) else 3))
    node = DocumentPacker(given, Packing(8, how="whole"), where=reader.where)
    with pytest.raises(StreamError, match=r"at its sample 22, counted from 1\) has 9 tokens, and a sequence has 8"):
        list(node)


BAD = {5: [], 17: [1.5], 18: "text", 40: {"input_ids": []}, 71: {"text": "a"}, 99: [1] * 60}


@pytest.mark.parametrize("packing", [Packing(30, separator=7), Packing(30, how="whole", open_sequences=3)], ids=repr)
def test_samples_that_are_no_documents_are_skipped_and_counted_once(packing: Packing) -> None:
    given = documents(random.Random(4), 120, 25)
    left_out = {at: bad for at, bad in BAD.items() if packing.is_whole or at != 99}
    mixed = [left_out.get(at, tokens) for at, tokens in enumerate(given)]
    kept = [tokens for at, tokens in enumerate(given) if at not in left_out]

    def make() -> MapNode:
        return MapNode(DocumentPacker(ListNode(mixed), packing, on_error="skip"), plain)

    assert assert_resumes(make) == packed(kept, packing)
    for stop in (0, 3, 9, 30):
        node = started(make())
        node.skip(stop)
        node = started(make(), node.state_dict())
        node.skip(1000)
        counts = node.source.state_dict()
        assert (counts["skipped_samples"], counts["dropped"]) == (5, int(packing.is_whole))


def test_documents_of_other_columns_are_never_skipped() -> None:
    given = [[1, 2], {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    with pytest.raises(ShardError, match=r"the documents before it had \['input_ids'\]") as caught:
        list(DocumentPacker(ListNode(given), Packing(3), on_error="skip"))
    assert "on_error" not in str(caught.value)
    with pytest.raises(ShardError, match=r"padding names 'mask', and .* has the columns"):
        list(DocumentPacker(ListNode(given), Packing(3, padding={"mask": 1}), on_error="skip"))
    with pytest.raises(ShardError, match=r'has no tokens.* Or pass on_error="skip"'):
        list(DocumentPacker(ListNode([[]]), Packing(3)))


def test_after_an_error_the_last_state_leads_to_all_tokens() -> None:
    broken = [True]
    given = documents(random.Random(1), 300, 30)

    def read(number: int) -> Any:
        return [] if broken and number == 200 else given[number]

    def make() -> DocumentPacker:
        return packer(MapNode(ListNode(range(300)), read), Packing(32, how="whole"))

    node = started(make())
    served, state = node.next_many(5), node.state_dict()
    with pytest.raises(ShardError, match="has no tokens"):
        list(node)
    broken.clear()
    assert list(map(plain, served + list(started(make(), state)))) == packed(given, Packing(32, how="whole"))


def test_what_is_no_packing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="packing must be a Packing, got 5"):
        packer([], 5)  # type: ignore[arg-type]  # that is the case


def test_it_describes_all_that_decides_about_sequences_as_plain_data() -> None:
    described = packer([], Packing(8, how="whole", open_sequences=3)).describe()
    assert json.loads(json.dumps(described)) == described
    assert described[0] == "packed"
    assert described[1]["open_sequences"] == 3
    assert "open_sequences" not in packer([], Packing(8)).describe()[1]
    assert packer([], Packing(8)).describe() != packer([], Packing(8, separator=1)).describe()


# Other nodes before it


@pytest.mark.parametrize("how", ["split", "whole"])
def test_it_resumes_over_filters_shuffles_and_what_they_draw(how: Any) -> None:
    def make() -> Any:
        reader = ShardReader(NumberedShards([30, 0, 41, 4], draws=True), (2, 0, 1, 3), 0, seed=1)
        kept = FilterNode(BlockShuffle(reader, 9, seed=3), lambda sample: is_kept(sample[:3]), seed=4)
        given = MapNode(kept, lambda sample: drawn_document(sample[:3]), seed=5)
        return lists(given, Packing(20, how=how))

    # What is drawn depends on what is asked for together, and that is always a block.
    sequences = assert_resumes(make)
    assert len(sequences) > 10
    assert math.isclose(len(real(sequences)) / len(sequences), 20, rel_tol=0.5)
