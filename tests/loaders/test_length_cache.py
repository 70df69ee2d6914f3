"""Lengths are found wherever a user says they are; measured ones are kept, and believed only if they fit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support.measured import TEXTS, Counting, calls, measure, measure_and_die_before_the_lengths, measure_together
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loaders import length_cache
from lightning_stateful.loaders.length_cache import lengths_of, measure_samples

LENGTHS = [len(text) for text in TEXTS]
VALUES = [3, 0, 7, 200, 5]
# Of a file that is read, the shortest, the longest and some other samples are measured again.
READ = 32 + 2


class Texts(Dataset[str]):
    """Knows the lengths of its samples, and never gives one out."""

    def __init__(self, sizes: Any = tuple(VALUES)) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("read a sample")

    def method(self) -> list[int]:
        return VALUES


def refuse(batch: Any) -> Any:
    raise AssertionError("read a sample")


@pytest.fixture
def arrow() -> Any:
    """Lengths, tokens, and a column that cannot be decoded."""
    columns = {
        "length": VALUES,
        "tokens": [[1] * length for length in VALUES],
        "picture": [{"bytes": b"no picture", "path": None}] * len(VALUES),
    }
    features = datasets.Features(
        {
            "length": datasets.Value("int32"),
            "tokens": datasets.Sequence(datasets.Value("int16")),
            "picture": datasets.Image(),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


def test_not_one_a_sample_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match="There are 6 lengths for the 5 samples of a Texts"):
        lengths_of(Texts(), [1] * 6)


class TestColumns:
    @pytest.mark.parametrize("name", ["length", "tokens"])
    def test_integers_or_the_lengths_of_lists_are_found_by_the_columns_name(self, arrow: Any, name: str) -> None:
        with pytest.raises(Exception, match="cannot identify image"):
            arrow[0]
        joined = datasets.concatenate_datasets([arrow, arrow.select([2, 1])])
        for chosen in (arrow, arrow.select([3, 0, 3]), arrow.shuffle(seed=4), joined):
            expected = chosen.remove_columns("picture")["length"][:]
            assert lengths_of(chosen, name).tolist() == list(expected)

    def test_no_transform_is_run(self, arrow: Any) -> None:
        arrow.set_transform(refuse)

        assert lengths_of(arrow, "tokens").tolist() == VALUES

    @pytest.mark.parametrize("values", [[3, None, 5], [[1], None, [2, 3]]], ids=["integers", "lists"])
    def test_a_missing_value_is_refused_with_its_sample(self, values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(length_cache, "_ROWS", 2)
        dataset = datasets.Dataset.from_dict({"a": [values[0], values[2], values[0], values[1]]})

        with pytest.raises(ConfigurationError, match="lengths in column 'a' have no value for sample 3"):
            lengths_of(dataset, "a")

    def test_a_name_that_is_none_is_refused_with_the_columns_there_are(self, arrow: Any) -> None:
        with pytest.raises(
            ConfigurationError,
            match=r"lengths='size' is neither a column nor an attribute of the Dataset with the columns "
            r"\['length', 'tokens', 'picture'\], nor a .npy file",
        ):
            lengths_of(arrow, "size")


class TestAttributesAndParts:
    @pytest.mark.parametrize("make", [list, np.array, torch.tensor])
    def test_an_attribute_of_any_kind_of_integers_is_found(self, make: Any) -> None:
        assert lengths_of(Texts(make(VALUES)), "sizes").tolist() == VALUES

    def test_subsets_and_parts_of_a_concatenation_have_the_lengths_of_their_samples(self, arrow: Any) -> None:
        joined = ConcatDataset([Subset(arrow, [1]), arrow, Subset(ConcatDataset([arrow, arrow]), [7])])

        assert lengths_of(Subset(Texts(), [3, 1, 3]), "sizes").tolist() == [200, 0, 200]
        assert lengths_of(Subset(arrow, torch.tensor([3, 1])), "tokens").tolist() == [200, 0]
        assert lengths_of(joined, "length").tolist() == [0, *VALUES, 7]


# Measuring


def process_of_sample(sample: str) -> int:
    return os.getpid()


def fails_at(index: int, returned: Any) -> Callable[[int], Any]:
    return lambda sample: returned if sample == index else sample


MANY = ["a" * (index % 37) for index in range(700)]


class TestMeasuring:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_lengths_come_in_the_order_of_the_samples(self, num_workers: int | None) -> None:
        assert measure_samples(MANY, len, num_workers=num_workers).tolist() == [n % 37 for n in range(700)]
        assert measure_samples([], len, num_workers=num_workers).tolist() == []

    def test_by_default_few_samples_are_measured_here_and_many_by_a_process_a_core(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(length_cache, "_WORTH_WORKERS", 600)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)

        assert set(measure_samples(MANY[:599], process_of_sample).tolist()) == {os.getpid()}
        assert set(measure_samples(MANY[:600], lambda sample: get_worker_info().num_workers).tolist()) == {2}

    @pytest.mark.parametrize("returned", [-1, 1.5, torch.tensor([3, 4]), 2**70], ids=str)
    def test_what_is_no_length_is_refused_with_its_sample(self, returned: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"says .* of sample 300, and not a length from 0"):
            measure_samples(list(range(400)), fails_at(300, returned), num_workers=0)


# Keeping what was measured


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "lengths.npy"


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "calls")


class TestFiles:
    def test_the_second_time_only_a_few_samples_are_measured(self, path: Path, counting: Counting) -> None:
        first = lengths_of(TEXTS, counting, cache_file=str(path))
        assert len(calls(counting.calls)) == len(TEXTS)
        second = lengths_of(TEXTS, Counting(counting.calls), cache_file=path)

        assert len(calls(counting.calls)) == len(TEXTS) + READ
        assert first.tolist() == second.tolist() == np.load(path).tolist() == LENGTHS
        assert isinstance(first, np.memmap)
        assert isinstance(second, np.memmap)

    def test_of_many_samples_it_is_said_how_to_keep_them(self) -> None:
        with pytest.warns(StatefulWarning, match=r'5000 lengths are measured in every.*cache_file="lengths\.npy"'):
            lengths_of([1] * 5000, lambda sample: 1, num_workers=0)

    def test_a_file_that_cannot_be_written_or_is_the_users_own_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        np.save(tmp_path / "mine.npy", np.arange(3))
        for name, message in {
            "lengths": r"must be the path of a \.npy file, got '.*lengths'",
            "mine.npy": r"mine\.npy' was not written by this function",
            "file/sub/a.npy": r"cannot be kept in '.*file/sub/a\.npy'.*Pass a cache_file",
        }.items():
            with pytest.raises(ConfigurationError, match=message):
                lengths_of(TEXTS, len, cache_file=tmp_path / name)

        assert np.load(tmp_path / "mine.npy").tolist() == [0, 1, 2]

    @pytest.mark.timeout(60)
    def test_a_function_that_fails_leaves_nothing_and_no_lock(self, path: Path, counting: Counting) -> None:
        dataset: list[Any] = [*TEXTS[:-1], None]
        with pytest.raises(ConfigurationError, match=r"fails on sample \d+, a NoneType: TypeError: .*NoneType"):
            lengths_of(dataset, counting, cache_file=path)
        assert not path.exists()
        dataset[-1] = TEXTS[-1]

        assert lengths_of(dataset, counting, cache_file=path).tolist() == LENGTHS


class TestHuggingFace:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Any:
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
        return datasets.load_from_disk(tmp_path / "saved")

    def test_of_a_dataset_on_disk_data_and_functions_have_files_of_their_own(self, saved: Any, tmp_path: Path) -> None:
        def files() -> list[Path]:
            return list((tmp_path / "saved").glob("lengths-*.npy"))

        for _ in range(2):
            assert lengths_of(saved, lambda sample: len(sample["text"])).tolist() == LENGTHS
        (file,) = files()
        assert np.load(file).tolist() == LENGTHS
        lengths_of(saved, lambda sample: len(sample["text"]) + 1)
        lengths_of(saved.select(range(9)), lambda sample: len(sample["text"]))
        assert len(files()) == 3

        steps = (step for step in range(3))
        # A generator cannot be hashed, so that these are measured each time.
        assert lengths_of(saved, lambda sample: len(sample["text"]) if steps else 0).tolist() == LENGTHS
        assert len(files()) == 3


class TestFilesThatDoNotFit:
    @pytest.fixture
    def written(self, path: Path) -> Path:
        lengths_of(TEXTS, len, cache_file=path)
        return path

    def found(self, path: Path, said: str, texts: list[str] = TEXTS) -> None:
        with pytest.warns(StatefulWarning, match=f"are not used, because .*{said}.*measured again") as caught:
            assert lengths_of(texts, len, cache_file=path).tolist() == [len(text) for text in texts]

        assert [warning.filename for warning in caught] == [__file__]
        # And then all is well.
        assert lengths_of(texts, len, cache_file=path).tolist() == [len(text) for text in texts]

    @pytest.mark.parametrize(
        ("texts", "said"),
        [
            ([*TEXTS, "a"], "there are 40 of them for 41 samples"),
            ([text + "b" for text in TEXTS], r"sample \d+ has length \d+, and they say \d+"),
        ],
    )
    def test_those_of_other_data(self, written: Path, texts: list[str], said: str) -> None:
        held = lengths_of(TEXTS, len, cache_file=written)
        self.found(written, said, texts)

        # An array that is in use is not changed when it is measured again.
        assert held.tolist() == LENGTHS

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda file: file[:-3] + bytes([file[-3] ^ 1]) + file[-2:], "the file is damaged"),
            (lambda file: b"", "the file cannot be read"),
        ],
        ids=["another byte", "empty"],
    )
    def test_a_damaged_file(self, written: Path, change: Callable[[bytes], bytes], said: str) -> None:
        written.write_bytes(change(written.read_bytes()))

        self.found(written, said)

    def test_only_the_longest_sample_that_is_no_longer_as_long(self, path: Path) -> None:
        texts = ["a" * (number % 9) for number in range(4000)]
        texts[3210] = "a" * 20
        lengths_of(texts, len, cache_file=path)
        texts[3210] = "a" * 30

        self.found(path, "sample 3210 has length 30, and they say 20", texts)


class TestProcesses:
    context = multiprocessing.get_context("forkserver")

    def ended(self, process: Any) -> int:
        process.join(60)
        assert process.exitcode is not None
        return int(process.exitcode)

    def test_of_two_at_the_same_time_one_measures_and_the_other_reads(self, tmp_path: Path) -> None:
        barrier, results = self.context.Barrier(2), self.context.Queue()
        processes = [self.context.Process(target=measure_together, args=(tmp_path, barrier, results)) for _ in range(2)]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=60) for _ in processes)
        assert [self.ended(process) for process in processes] == [0, 0]

        assert list(found.values()) == [LENGTHS, LENGTHS]
        assert sorted(calls(tmp_path / "calls").count(str(pid)) for pid in found) == [READ, len(TEXTS)]

    # A worker that outlives its process holds the lock until it finds out, after five seconds.
    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    @pytest.mark.timeout(120)
    def test_one_that_is_killed_while_it_measures_leaves_nothing_to_believe_and_no_lock(
        self, tmp_path: Path, path: Path, num_workers: int
    ) -> None:
        (tmp_path / "stays").write_text("")
        process = self.context.Process(target=measure, args=(tmp_path, num_workers))
        process.start()
        while len(calls(tmp_path / "calls")) < 6:
            assert process.is_alive()
            time.sleep(0.02)
        process.kill()
        assert self.ended(process) == -signal.SIGKILL
        assert not path.exists()

        (tmp_path / "stays").unlink()
        with warnings.catch_warnings(record=True) as caught:
            found = lengths_of(TEXTS, Counting(tmp_path / "calls"), cache_file=path)

        assert found.tolist() == LENGTHS
        assert calls(tmp_path / "calls").count(str(os.getpid())) == len(TEXTS)
        assert not caught

    @pytest.mark.timeout(120)
    def test_one_that_is_killed_while_it_writes_is_not_believed(self, tmp_path: Path, path: Path) -> None:
        lengths_of([*TEXTS, "a"], len, cache_file=path)
        process = self.context.Process(target=measure_and_die_before_the_lengths, args=(tmp_path,))
        process.start()
        assert self.ended(process) == -signal.SIGKILL

        with pytest.warns(StatefulWarning, match="the file is damaged"):
            assert lengths_of(TEXTS, Counting(tmp_path / "calls"), cache_file=path).tolist() == LENGTHS
