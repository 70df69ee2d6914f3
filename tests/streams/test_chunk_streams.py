"""Chunks opened by a function of the user's: read whole, in any process, and known by their references."""

from __future__ import annotations

import copy
import functools
import gzip
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import ConfigurationError, ShardError, StateMismatchError
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.streams.chunks import ChunkedDataset, Chunks


def drawn(value: Any = None) -> tuple[Any, ...]:
    """A sample beside a number of each of the generators that all code shares."""
    return value, random.randrange(10**9), int(np.random.randint(10**9)), int(torch.randint(10**9, ()))


class TestReading:
    def test_each_sample_comes_once_in_an_order_of_every_epochs_own(self) -> None:
        def make(seed: int = 3) -> ChunkedDataset:
            return ChunkedDataset([range(7), range(7, 7), range(7, 11), range(11, 30)], iter, buffer_size=5, seed=seed)

        stream = make()
        epochs = [list(stream) for _ in range(3)]
        assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert list(make()) == epochs[0] != list(make(seed=4))

    def test_chunks_come_in_an_order_of_every_epochs_own(self) -> None:
        stream = ChunkedDataset([[chunk] for chunk in range(20)], iter, buffer_size=1, seed=3)
        assert len({tuple(stream) for _ in range(3)}) == 3

    @pytest.mark.parametrize(
        "opened",
        [list, iter, np.array, torch.tensor, lambda ref: (one for one in ref)],
        ids=["list", "iterator", "array", "tensor", "generator"],
    )
    def test_a_chunk_may_be_opened_as_anything_that_can_be_iterated(self, opened: Any) -> None:
        stream = ChunkedDataset(([[3, 1], [], [4, 1, 5]][number] for number in range(3)), opened, shuffle=False)
        assert [[int(sample) for sample in stream] for _ in range(2)] == [[3, 1, 4, 1, 5]] * 2

    def test_an_iterator_is_not_begun_again(self) -> None:
        class Anew:
            position = 0

            def __iter__(self) -> Anew:
                self.position = 0
                return self

            def __next__(self) -> int:
                if self.position == 5:
                    raise StopIteration
                self.position += 1
                return self.position

        node = Chunks([0], lambda ref: Anew()).node(0, 0)
        assert [next(node), next(node)] == [1, 2]
        assert list(node) == [3, 4, 5]

    def test_chunks_are_opened_as_they_are_wanted_and_closed_where_a_pass_is_left(self) -> None:
        opened: list[int] = []

        def read(ref: int) -> Iterator[int]:
            opened.append(ref)
            try:
                yield from [ref] * 40
            finally:
                opened.append(-1)

        stream = ChunkedDataset(range(4), read, shuffle=False)
        for number, sample in enumerate(stream):
            assert [ref for ref in opened if ref >= 0] == list(range(sample + 1))
            assert opened.count(-1) in (sample, sample + 1)
            if number == 100:
                break
        stream.state_dict()
        assert opened.count(-1) == sum(ref >= 0 for ref in opened)


class TestRandomness:
    @pytest.mark.parametrize("lazily", [False, True])
    def test_what_is_drawn_as_a_chunk_is_opened_follows_from_seed_epoch_and_chunk(self, lazily: bool) -> None:
        def read(ref: int) -> Any:
            return iter([(ref, *drawn()) for _ in range(3)]) if lazily else [(ref, *drawn()) for _ in range(3)]

        def samples(order: list[int], seed: int = 1, epoch: int = 0) -> dict[int, list[Any]]:
            found: dict[int, list[Any]] = {}
            for sample in ShardReader(Chunks(range(4), read), order, epoch, seed=seed, seeds_samples=False):
                found.setdefault(sample[0], []).append(sample)
            return found

        first = samples([0, 1, 2, 3])
        random.seed(9)
        assert samples([3, 0, 2, 1]) == first
        others = [first, samples([0, 1, 2, 3], seed=2), samples([0, 1, 2, 3], epoch=1)]
        assert len({str(one[shard]) for one in others for shard in range(4)}) == 12


class TestErrors:
    def test_a_chunk_that_cannot_be_read_is_named_and_can_be_left_out(self, tmp_path: Path) -> None:
        file, text = tmp_path / "a.gz", "".join(f"{number}\n" for number in range(50_000))
        file.write_bytes(gzip.compress(text.encode())[:-2000])

        def read(path: Path) -> Iterator[int]:
            with gzip.open(path, "rt") as lines:
                yield from map(int, lines)

        with pytest.raises(ShardError, match=r"chunk 0 of 1 \(a\.gz\).*EOFError"):
            list(ChunkedDataset([file], read, shuffle=False))
        kept = list(ChunkedDataset([file], read, shuffle=False, on_error="skip"))
        assert kept == list(range(len(kept)))
        assert 1000 < len(kept) < 50_000

    @pytest.mark.parametrize("opened", [lambda ref: None, lambda ref: 3])
    def test_a_function_that_opens_nothing_is_told_so(self, opened: Any) -> None:
        with pytest.raises(ShardError, match=r"chunk 0 of 1 .* TypeError"):
            list(ChunkedDataset([0], opened))

    def test_a_changed_list_of_chunks_is_refused_on_a_resume(self) -> None:
        state = ChunkedDataset(np.arange(4), lambda ref: [ref] * 3).state_dict()
        ChunkedDataset(range(4), lambda ref: [ref] * 3).load_state_dict(state)
        with pytest.raises(StateMismatchError, match=r"dataset\.names"):
            ChunkedDataset(np.arange(4, 8), lambda ref: [ref] * 3).load_state_dict(state)


class TestNames:
    def test_names_are_said_in_errors_and_told_apart_wherever_they_lie(self) -> None:
        chunks = Chunks(["/here/a.gz", Path("/here/b.gz"), 7, ("c", 1), object()], list)
        assert [chunks.name(shard) for shard in range(4)] == [
            "chunk 0 of 5 (a.gz)", "chunk 1 of 5 (b.gz)", "chunk 2 of 5 (7)", "chunk 3 of 5 (('c', 1))",
        ]  # fmt: skip
        assert "0x" not in chunks.name(4)
        for there in (["/there/now/a.gz", "/there/now/b.gz"], ["a.gz", "b.gz"]):
            assert Chunks([*there, 7, ("c", 1), object()], list).describe() == chunks.describe()
        assert Chunks(["b.gz", "a.gz", 7, ("c", 1), object()], list).describe() != chunks.describe()

    def test_paths_are_known_below_the_longest_folder_that_all_have(self) -> None:
        names = ["en/0.gz", "de/0.gz", "de/more/1.gz"]
        chunks = Chunks([f"/a/chunks/{name}" for name in names], list)
        assert [chunks.name(shard) for shard in range(3)] == [
            f"chunk {n} of 3 ({name})" for n, name in enumerate(names)
        ]
        for folder in ("/b/chunks", "relative", "s3://bucket/elsewhere", ""):
            assert Chunks([Path(folder) / name for name in names], list).describe() == chunks.describe()
        assert Chunks(["en/0.gz", "en/0.gz", "de/more/1.gz"], list).describe() != chunks.describe()

    @pytest.mark.parametrize(
        "refs", [["/a/0.gz", "0.gz"], ["", "."], ["/"], ["a-very-long-folder/" * 30 + "0"], ["\udcff"]], ids=ascii
    )
    def test_any_path_has_a_name(self, refs: list[str]) -> None:
        chunks = Chunks(refs, list)
        assert all(0 < len(chunks.name(shard)) < 120 for shard in range(len(refs)))
        assert chunks.describe() == pickle.loads(pickle.dumps(chunks)).describe()

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.arange(4).reshape(2, 2), np.arange(4, 8).reshape(2, 2)),
            ([{"file": b"a", "rows": [0, 9]}], [{"file": b"a", "rows": [9, 18]}]),
            ([("a", Path("/x"))], [("a", Path("/y"))]),
            ([{1.5, None}], [{1.25, None}]),
            ([True], [1]),
            ([(1, (2,))], [((1,), 2)]),
            (["/a/en/0.gz", "/a/de/0.gz"], ["/a/en/0.gz", "/a/fr/0.gz"]),
        ],
    )
    def test_other_chunks_are_told_apart_by_their_values(self, one: Any, other: Any) -> None:
        assert Chunks(one, list).describe() != Chunks(other, list).describe()
        assert Chunks(copy.deepcopy(one), list).describe() == Chunks(one, list).describe()


class Divides(IterableDataset[int]):
    """Leaves a part of its samples to each other worker."""

    def __init__(self, chunk: int) -> None:
        self.samples = range(chunk * 10, chunk * 10 + 10)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(self.samples if worker is None else self.samples[worker.id :: worker.num_workers])


class TestChunksThatAreDatasets:
    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    def test_are_refused_in_workers_among_which_they_would_divide_themselves(self, on_error: Any) -> None:
        stream = ChunkedDataset(range(4), Divides, on_error=on_error)
        assert sorted(index for batch in patch_dataloader(DataLoader(stream)) for index in batch) == list(range(40))
        loader = patch_dataloader(DataLoader(stream, num_workers=2))
        with pytest.raises(ConfigurationError, match="gave a Divides, which may divide a chunk among the 2 workers"):
            list(loader)


class TestArguments:
    @pytest.mark.parametrize("refs", ["chunks/*.gz", b"chunks", Path("chunks"), None], ids=repr)
    def test_one_pattern_is_no_list_of_chunks(self, refs: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"got .*glob"):
            ChunkedDataset(refs, list)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"chunk_refs": []}, "no chunks"),
            ({"buffer_size": -1}, "buffer_size"),
            ({"on_error": "ignore"}, "on_error"),
            ({"seed": "a"}, "seed"),
            ({"transform": 3}, "must be a function, got 3"),
            ({"read_chunk_fn": None}, "read_chunk_fn must be a function, got None"),
            *[({"chunk_sizes": sizes}, "chunk_sizes") for sizes in ([1.7, 3], [-1, 3], [3], 6, "33")],
        ],
    )
    def test_arguments_out_of_range(self, options: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            ChunkedDataset(**{"chunk_refs": [[1], [2]], "read_chunk_fn": list, **options})


def test_the_plain_arguments_of_a_partial_are_compared() -> None:
    def read(ref: int, first: int) -> list[int]:
        return [first + ref]

    described = [Chunks(range(2), functools.partial(read, first=first)).describe() for first in (0, 1)]
    assert [one["function"].rpartition(".")[2] for one in described] == ["read(first=0)", "read(first=1)"]
