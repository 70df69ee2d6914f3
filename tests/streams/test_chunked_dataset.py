"""Chunks opened by a function of the user's: read whole, in any process, each sample under a seed of its own."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import drawn, read_numbers, with_draws, with_worker, write_chunks
from torch.utils.data import DataLoader

from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StateMismatchError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import ChunkedDataset
from lightning_stateful.streams.chunks import Chunks
from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.steps import Mapped, Windowed
from lightning_stateful.streams.stream import Stream

SIZES = (7, 0, 4, 12, 1, 6)
TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def _randomness_as_it_was() -> Iterator[None]:
    with keep_randomness():
        yield


def dataset(folder: Path, sizes: Any = SIZES, **options: Any) -> ChunkedDataset:
    return ChunkedDataset(write_chunks(folder, sizes), read_numbers, **{"buffer_size": 5, "seed": 3, **options})


def loaded(stream: Any, num_workers: int = 2, **options: Any) -> Any:
    context = "fork" if num_workers else None
    return DataLoader(
        stream, num_workers=num_workers, multiprocessing_context=context, **{"batch_size": None, **options}
    )


class TestReading:
    def test_each_sample_comes_once_in_an_order_of_every_epochs_own(self, tmp_path: Path) -> None:
        stream = dataset(tmp_path)
        epochs = [list(stream) for _ in range(3)]
        assert all(sorted(epoch) == list(range(TOTAL)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert list(dataset(tmp_path)) == epochs[0]
        assert list(dataset(tmp_path, seed=4)) != epochs[0]

    def test_without_shuffling_samples_come_in_their_order(self, tmp_path: Path) -> None:
        stream = dataset(tmp_path, shuffle=False)
        assert [list(stream), list(stream)] == [list(range(TOTAL))] * 2

    def test_blocks_of_one_leave_samples_in_the_order_of_their_chunks(self, tmp_path: Path) -> None:
        samples = list(dataset(tmp_path, buffer_size=1))
        starts = [sum(SIZES[:chunk]) for chunk in range(len(SIZES))]
        chunks = {start: list(range(start, start + size)) for start, size in zip(starts, SIZES, strict=True) if size}
        assert samples != list(range(TOTAL))
        while samples:
            chunk = chunks.pop(samples[0])
            assert samples[: len(chunk)] == chunk
            del samples[: len(chunk)]

    @pytest.mark.parametrize(
        "opened",
        [list, tuple, iter, np.array, torch.tensor, lambda ref: (one for one in ref), lambda ref: dict.fromkeys(ref)],
        ids=["list", "tuple", "iterator", "array", "tensor", "generator", "dict"],
    )
    def test_a_chunk_may_be_opened_as_anything_that_can_be_iterated(self, opened: Any) -> None:
        stream = ChunkedDataset([[3, 1], [], [4, 1, 5]], opened, shuffle=False)
        assert [int(sample) for sample in stream] == [3, 1, 4, 1, 5]

    def test_references_may_be_anything_and_come_from_anywhere(self) -> None:
        refs: Any = ({"first": first, "size": 2} for first in (0, 10, 20))
        stream = ChunkedDataset(refs, lambda ref: range(ref["first"], ref["first"] + ref["size"]), shuffle=False)
        assert [list(stream), list(stream)] == [[0, 1, 10, 11, 20, 21]] * 2

    def test_chunks_are_opened_as_they_are_wanted_and_one_at_a_time(self) -> None:
        opened: list[int] = []

        def read(ref: int) -> list[int]:
            opened.append(ref)
            return [ref] * 3

        stream = ChunkedDataset(range(4), read, shuffle=False)
        for number, sample in enumerate(stream):
            assert opened == list(range(sample + 1))
            if number == 7:
                break
        assert opened == [0, 1, 2]

    def test_files_are_closed_at_their_end(self, tmp_path: Path) -> None:
        open_files, read = _counted()
        stream = ChunkedDataset(write_chunks(tmp_path, SIZES), read, buffer_size=2)
        for _ in stream:
            assert open_files.total() <= 1
        assert open_files.total() == 0

    def test_a_pass_that_was_left_keeps_one_file_and_no_longer_than_the_next_pass(self, tmp_path: Path) -> None:
        open_files, read = _counted()
        stream = ChunkedDataset(write_chunks(tmp_path, SIZES), read, buffer_size=2)
        for _ in range(3):
            for _ in stream:
                break
            assert open_files.total() <= 1
        list(stream)
        assert open_files.total() == 0
        next(iter(stream))
        del stream
        gc.collect()
        assert open_files.total() == 0

    def test_files_are_closed_where_a_pass_is_left(self, tmp_path: Path) -> None:
        open_files, read = _counted()
        stream = ChunkedDataset(write_chunks(tmp_path, SIZES), read, buffer_size=2)
        for _ in stream:
            break
        state = stream.state_dict()
        assert open_files.total() == 0
        assert state["progress"]["place"]["batches"] == 1


def _counted() -> tuple[Counter[str], Any]:
    """How many files are open, and what opens them."""
    open_files: Counter[str] = Counter()

    def read(file: Path) -> Iterator[int]:
        open_files[file.name] += 1
        try:
            yield from read_numbers(file)
        finally:
            open_files[file.name] -= 1

    return open_files, read


class TestArguments:
    @pytest.mark.parametrize("refs", [[], (), iter([])])
    def test_no_chunks(self, refs: Any) -> None:
        with pytest.raises(ConfigurationError, match="no chunks"):
            ChunkedDataset(refs, list)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"buffer_size": -1}, "buffer_size"),
            ({"buffer_size": 2.5}, "buffer_size"),
            ({"on_error": "ignore"}, "on_error"),
            ({"chunk_sizes": [1]}, "chunk_sizes has 1 sizes for 2 chunks"),
        ],
    )
    def test_arguments_out_of_range(self, options: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            ChunkedDataset([[1], [2]], list, **options)

    @pytest.mark.parametrize("seed", [1.5, "a"])
    def test_a_seed_that_is_no_number(self, seed: Any) -> None:
        with pytest.raises(ConfigurationError, match="seed"):
            ChunkedDataset([[1], [2]], list, seed=seed)

    @pytest.mark.parametrize("name", ["seed", "buffer_size"])
    def test_numbers_may_be_numpys(self, name: str) -> None:
        stream = ChunkedDataset([[1], [2]], list, **{name: np.int64(3)})
        plain = ChunkedDataset([[1], [2]], list, **{name: 3})
        assert json.dumps(stream.state_dict()) == json.dumps(plain.state_dict())

    def test_every_change_gives_a_new_stream(self) -> None:
        stream = ChunkedDataset([[1, 2, 3, 4]], list, shuffle=False)
        changed = [stream.shuffle(buffer_size=4), stream.map(str), stream.filter(bool), stream.windowed(2)]
        assert list(stream) == [1, 2, 3, 4]
        assert all(type(one) is Stream for one in changed)
        assert list(changed[1]) == ["1", "2", "3", "4"]

    def test_known_sizes_deal_even_shares_and_are_part_of_what_it_is(self, tmp_path: Path) -> None:
        refs = [[0] * 30, [1] * 2, [2] * 3, [3] * 25]
        known = ChunkedDataset(refs, list, shuffle=False, chunk_sizes=[len(ref) for ref in refs])
        shares = list(loaded(known.map(with_worker)))
        assert Counter(worker for _, worker in shares) == {0: 30, 1: 30}
        unknown = ChunkedDataset(refs, list, shuffle=False)
        assert known.state_dict()["config"] != unknown.state_dict()["config"]


class TestChunks:
    def test_names_are_said_in_errors_and_told_apart_wherever_they_lie(self) -> None:
        chunks = Chunks(["/here/a.gz", Path("/here/b.gz"), 7, ("c", 1), object()], list)
        assert [chunks.name(shard) for shard in range(4)] == [
            "chunk 0 of 5 (a.gz)", "chunk 1 of 5 (b.gz)", "chunk 2 of 5 (7)", "chunk 3 of 5 (('c', 1))",
        ]  # fmt: skip
        assert "0x" not in chunks.name(4)
        for there in (["/there/now/a.gz", "/there/now/b.gz"], ["a.gz", "b.gz"]):
            assert Chunks([*there, 7, ("c", 1), object()], list).describe() == chunks.describe()
        assert Chunks(["b.gz", "a.gz", 7, ("c", 1), object()], list).describe() != chunks.describe()
        assert Chunks(["/here/a.gz"], list).describe() != chunks.describe()

    def test_paths_are_known_below_the_longest_folder_that_all_have(self) -> None:
        names = ["en/0.gz", "de/0.gz", "de/more/1.gz"]
        chunks = Chunks([f"/a/chunks/{name}" for name in names], list)
        assert [chunks.name(shard) for shard in range(3)] == [
            f"chunk {shard} of 3 ({name})" for shard, name in enumerate(names)
        ]
        for folder in ("/b/chunks", "relative", "s3://bucket/elsewhere"):
            assert Chunks([Path(folder) / name for name in names], list).describe() == chunks.describe()
        assert Chunks(names, list).describe() == chunks.describe()
        assert Chunks(["en/0.gz", "en/0.gz", "de/more/1.gz"], list).describe() != chunks.describe()

    @pytest.mark.parametrize(
        "refs",
        [["/a/en/0.gz", "/a/de/0.gz"], ["/a/0.gz", "0.gz"], ["", "."], ["/"], ["a-very-long-folder/" * 30 + "0"]],
        ids=str,
    )
    def test_any_path_has_a_name(self, refs: list[str]) -> None:
        chunks = Chunks(refs, list)
        assert all(0 < len(chunks.name(shard)) < 120 for shard in range(len(refs)))
        assert chunks.describe() == pickle.loads(pickle.dumps(chunks)).describe()

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (np.arange(4), np.arange(4, 8)),
            (torch.arange(4), torch.arange(4, 8)),
            (np.arange(4).reshape(2, 2), np.arange(4, 8).reshape(2, 2)),
            ([b"0", b"1"], [b"0", b"2"]),
            ([{"file": "a", "rows": [0, 9]}], [{"file": "a", "rows": [9, 18]}]),
            ([[1, 2]], [[1, 3]]),
            ([("a", Path("/x"))], [("a", Path("/y"))]),
            ([{1, 2}], [{1, 3}]),
            ([1.5, None], [1.25, None]),
            ([True], [1]),
            ([(1, (2,))], [((1,), 2)]),
            (["en/0.gz", "de/0.gz"], ["de/0.gz", "en/0.gz"]),
            (["/a/en/0.gz", "/a/de/0.gz"], ["/a/en/0.gz", "/a/fr/0.gz"]),
        ],
    )
    def test_other_chunks_are_told_apart_by_their_values(self, one: Any, other: Any) -> None:
        assert Chunks(one, list).describe() != Chunks(other, list).describe()
        assert Chunks(copy.deepcopy(one), list).describe() == Chunks(one, list).describe()

    def test_numbers_are_one_whatever_counts_them(self) -> None:
        described = Chunks(range(3), list).describe()
        for refs in (np.arange(3), torch.arange(3), [np.uint8(0), 1, np.int32(2)]):
            assert Chunks(list(refs), list).describe() == described

    def test_a_changed_list_of_chunks_is_refused_on_a_resume(self) -> None:
        def resumed(refs: Any, state: Any) -> ChunkedDataset:
            stream = ChunkedDataset(refs, lambda ref: [ref] * 3)
            stream.load_state_dict(state)
            return stream

        state = ChunkedDataset(np.arange(4), lambda ref: [ref] * 3).state_dict()
        assert resumed(range(4), state).state_dict() == state
        with pytest.raises(StateMismatchError, match=r"dataset\.names"):
            resumed(np.arange(4, 8), state)

    def test_a_reference_that_holds_all_samples_is_said_in_short(self) -> None:
        with pytest.raises(ShardError, match=r"chunk 0 of 1 \(\[0, 1, .*\.\.\.\)") as caught:
            list(ChunkedDataset([list(range(10_000))], lambda ref: 1 // 0))  # type: ignore[arg-type]  # that fails
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize("lazily", [False, True])
    def test_what_is_drawn_as_a_chunk_is_opened_follows_from_seed_epoch_and_chunk(self, lazily: bool) -> None:
        def read(ref: int) -> Any:
            numbers = [(ref, *drawn()) for _ in range(3)]
            random.shuffle(numbers)
            return numbers

        def read_lazily(ref: int) -> Any:
            yield from read(ref)

        def samples(order: list[int], seed: int = 1, epoch: int = 0) -> dict[int, list[Any]]:
            chunks = Chunks(range(4), read_lazily if lazily else read)
            found: dict[int, list[Any]] = {}
            for item in Reading(chunks, order, epoch, seed=seed, seeds_samples=False):
                found.setdefault(item.shard, []).append(item.value)
            return found

        first = samples([0, 1, 2, 3])
        random.seed(9)
        assert samples([3, 0, 2, 1]) == first
        others = [first, samples([0, 1, 2, 3], seed=2), samples([0, 1, 2, 3], epoch=1)]
        assert len({str(one[shard]) for one in others for shard in range(4)}) == 12

    def test_without_a_seed_randomness_is_left_alone(self) -> None:
        before = random.getstate(), torch.get_rng_state().tolist()
        list(Reading(Chunks([[1]], list), [0], 0))
        assert (random.getstate(), torch.get_rng_state().tolist()) == before


class TestTransforms:
    def test_what_a_sample_draws_does_not_depend_on_workers_nor_on_shuffling(self, tmp_path: Path) -> None:
        alone = dict(_split(dataset(tmp_path, transform=with_draws)))
        assert len(alone) == TOTAL
        assert len(set(alone.values())) == TOTAL
        with_two = dict(_split(loaded(dataset(tmp_path, transform=with_draws))))
        in_order = dict(_split(dataset(tmp_path, transform=with_draws, shuffle=False)))
        assert with_two == alone
        assert in_order == alone

    def test_nor_on_what_is_batched_but_on_seed_and_epoch(self, tmp_path: Path) -> None:
        stream = dataset(tmp_path, transform=with_draws)
        epochs = [dict(_split(stream)) for _ in range(2)]
        batches = loaded(dataset(tmp_path, transform=with_draws), 0, batch_size=4, collate_fn=list)
        assert dict(_split(sample for batch in batches for sample in batch)) == epochs[0]
        other = dict(_split(dataset(tmp_path, transform=with_draws, seed=4)))
        assert all(len({one[sample] for one in (*epochs, other)}) == 3 for sample in range(TOTAL))

    def test_a_transform_sees_the_sample_as_it_was_read(self) -> None:
        stream = ChunkedDataset([[1, 2], [3]], list, shuffle=False, transform=lambda sample: sample * 10)
        assert list(stream) == [10, 20, 30]

    def test_every_transform_of_several_draws_for_itself(self, tmp_path: Path) -> None:
        for (_, *first), *second in dataset(tmp_path).map(with_draws).map(with_draws):
            assert first != second


def _split(samples: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    for number, *numbers in samples:
        yield int(number), tuple(int(one) for one in numbers)


class TestErrors:
    def test_a_chunk_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        files = write_chunks(tmp_path, (3, 3, 3))
        files[1].write_text("3\nfour\n5\n")
        taken: list[int] = []
        with pytest.raises(ShardError, match=r"chunk 1 of 3 \(part-001\.txt\) .* sample 1: ValueError: inv"):
            taken.extend(ChunkedDataset(files, read_numbers, shuffle=False))
        files[1].unlink()
        with pytest.raises(ShardError, match=r"part-001\.txt.*sample 0: FileNotFoundError"):
            list(ChunkedDataset(files, read_numbers))

    def test_a_truncated_archive_is_named_and_can_be_left_out(self, tmp_path: Path) -> None:
        file, text = tmp_path / "a.gz", "".join(f"{number}\n" for number in range(50_000))
        file.write_bytes(gzip.compress(text.encode())[:-2000])

        def read(path: Path) -> Iterator[int]:
            with gzip.open(path, "rt") as lines:
                yield from map(int, lines)

        with pytest.raises(ShardError, match=r"a\.gz.*EOFError"):
            list(ChunkedDataset([file], read, shuffle=False))
        stream = ChunkedDataset([file], read, shuffle=False, on_error="skip")
        kept = list(stream)
        assert kept == list(range(len(kept)))
        assert 1000 < len(kept) < 50_000

    @pytest.mark.parametrize("opened", [lambda ref: None, lambda ref: 3])
    def test_a_function_that_opens_nothing_is_told_so(self, opened: Any) -> None:
        with pytest.raises(ShardError, match=r"chunk 0 of 1 .* TypeError"):
            list(ChunkedDataset([0], opened))

    def test_an_error_in_a_worker_names_the_chunk_too(self, tmp_path: Path) -> None:
        files = write_chunks(tmp_path, (3, 3))
        files[1].write_text("x\n")
        batches: Any = iter(loaded(ChunkedDataset(files, read_numbers)))
        with pytest.raises(ShardError, match=r"chunk 1 of 2 \(part-001\.txt\)"):
            list(batches)
        # Garbage in a cycle with the error, torch would wait for them for seconds.
        batches._shutdown_workers()

    def test_a_transform_that_fails_names_itself_and_the_sample_or_is_left_out(self) -> None:
        def invert(number: int) -> float:
            return 1 / number

        refs = [[1, 2], [4, 0, 5]]
        with pytest.raises(ShardError, match=r"invert failed on sample 1 of chunk 1 of 2 \(\[4, 0, 5\]\): ZeroDiv"):
            list(ChunkedDataset(refs, list, shuffle=False, transform=invert))
        stream = ChunkedDataset(refs, list, shuffle=False, transform=invert, on_error="skip")
        assert list(stream) == [1, 0.5, 0.25, 0.2]

    def test_a_chunk_that_became_shorter_is_refused(self) -> None:
        held = {"a": [0, 1, 2, 3], "b": [4, 5]}
        stream = ChunkedDataset(["a", "b"], held.__getitem__, shuffle=False)
        iterator = iter(stream)
        for _ in range(3):
            next(iterator)
        state = stream.state_dict()
        shorter = ChunkedDataset(["a", "b"], {**held, "a": [0, 1]}.__getitem__, shuffle=False)
        shorter.load_state_dict(state)
        with pytest.raises(PositionError, match=r"3 samples of chunk 0 of 2 .* were used, but now it ends after 2"):
            list(shorter)


class TestInOtherProcesses:
    def test_workers_share_the_chunks(self, tmp_path: Path) -> None:
        found = list(loaded(dataset(tmp_path).map(with_worker), 2))
        assert sorted(number for number, _ in found) == list(range(TOTAL))
        assert {worker for _, worker in found} == {0, 1}

    def test_more_workers_than_chunks_leave_some_with_nothing(self, tmp_path: Path) -> None:
        assert sorted(loaded(dataset(tmp_path, sizes=(5,)), 2)) == list(range(5))

    def test_persistent_workers_go_on_to_the_next_epoch_and_others_wait_to_be_told(self, tmp_path: Path) -> None:
        kept = loaded(dataset(tmp_path), persistent_workers=True)
        first, second = list(kept), list(kept)
        del kept
        stream = dataset(tmp_path)
        loader = loaded(stream)
        assert list(loader) == first != second
        stream.set_epoch(1)
        assert list(loader) == second
        assert sorted(first) == sorted(second) == list(range(TOTAL))

    def test_it_can_be_pickled_and_copied(self, tmp_path: Path) -> None:
        stream = dataset(tmp_path, transform=with_draws)
        for other in (pickle.loads(pickle.dumps(stream)), copy.deepcopy(stream), copy.copy(stream)):
            assert list(other) == list(dataset(tmp_path, transform=with_draws))

    def test_it_can_be_pickled_and_copied_in_the_midst_of_a_pass_and_a_copy_stands_where_it_stands(
        self, tmp_path: Path
    ) -> None:
        whole = list(dataset(tmp_path, transform=with_draws))
        stream = dataset(tmp_path, transform=with_draws)
        iterator = iter(stream)
        taken = [next(iterator) for _ in range(9)]
        for other in (pickle.loads(pickle.dumps(stream)), copy.deepcopy(stream)):
            assert other.state_dict() == stream.state_dict()
            assert taken + list(other) == whole
        assert taken + list(iterator) == whole

    def test_a_state_is_small_and_has_no_sample_in_it(self, tmp_path: Path) -> None:
        stream = ChunkedDataset([[f"a long sample {number}" for number in range(2000)]] * 50, list, buffer_size=1500)
        iterator = iter(stream)
        for _ in range(1200):
            next(iterator)
        said = json.dumps(stream.state_dict())
        assert len(said) < 800
        assert "sample 1" not in said


def test_a_source_may_leave_samples_unseeded() -> None:
    def source(seed_samples: bool) -> Any:
        return Source(shards=Chunks([[1, 2]], list), seed=1, seed_samples=seed_samples, steps=(Mapped(with_draws),))

    def draws(seed_samples: bool) -> list[Any]:
        random.seed(random.randrange(10**9))
        return list(Stream({"": source(seed_samples)}))

    assert draws(True) == draws(True)
    assert [sample[1] for sample in draws(False)] != [sample[1] for sample in draws(False)]


class TestArgumentsOutOfRange:
    @pytest.mark.parametrize("refs", ["chunks/*.gz", b"chunks", Path("chunks"), None, 3], ids=repr)
    def test_one_pattern_is_no_list_of_chunks(self, refs: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"got .*glob"):
            ChunkedDataset(refs, list)

    @pytest.mark.parametrize("function", ["x", None, 3, ["x"]])
    def test_what_is_no_function(self, function: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"read_chunk_fn must be a function, got "):
            ChunkedDataset([[1]], function)
        stream = ChunkedDataset([[1]], list)
        makes: list[Any] = [stream.map, stream.filter, lambda given: stream.recurrent(given, 0)]
        if function is not None:
            makes.append(lambda given: ChunkedDataset([[1]], list, transform=given))
        for make in makes:
            with pytest.raises(ConfigurationError, match=r"must be a function, got "):
                make(function)

    @pytest.mark.parametrize("given", [(0,), (2, 0), (-1,), (1.5,), (2, None), ("2",)])
    def test_windows(self, given: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"width|step"):
            ChunkedDataset([[1]], list).windowed(*given)
        with pytest.raises(ConfigurationError, match=r"width|step"):
            Windowed(*given)

    @pytest.mark.parametrize("sizes", [[1.7, 3], ["3", 3], [-1, 3], [None, 3], [3], [3, 3, 3], 6, "33", [[1], 2]])
    def test_sizes(self, sizes: Any) -> None:
        with pytest.raises(ConfigurationError, match="chunk_sizes"):
            ChunkedDataset([[1], [2]], list, chunk_sizes=sizes)

    def test_sizes_may_be_any_integers(self) -> None:
        found = [Chunks(["a", "b"], list, sizes).sizes() for sizes in (np.array([0, 3]), (0, np.uint8(3)))]
        assert found == [[0, 3]] * 2
        assert {type(size) for sizes in found for size in sizes or ()} == {int}
