"""Measured lengths are kept, found again for the same data and function only, and believed only if they fit."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support.measured import TEXTS, Counting, calls, measure, measure_and_die_before_the_header, measure_together

from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.loaders.length_cache import LengthCache, folder_beside
from lightning_stateful.loaders.lengths import lengths_of

LENGTHS = [len(text) for text in TEXTS]
# Some samples are looked at for the key and, on reading, others and the shortest and longest.
NAMED, READ = 16, 16 + 32 + 2
CLOSED = 7


class Files(list[str]):
    """Samples that lie in files or a folder."""

    files: Any = None
    root: Any = None


@pytest.fixture(autouse=True)
def users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "xdg" / "lightning-stateful"


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "calls")


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("*.npy")
    return found


def key(dataset: Any, function: Any) -> str:
    return LengthCache(dataset, function, Path()).path.name


class TestPlaces:
    def test_by_default_it_is_the_users_cache(self, users_cache: Path) -> None:
        assert folder_beside(TEXTS) == users_cache
        assert lengths_of(TEXTS, len).tolist() == LENGTHS
        assert the_file(users_cache).name.startswith("lengths-")

    def test_without_a_variable_the_users_cache_is_in_the_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("", None):
            monkeypatch.setenv("XDG_CACHE_HOME", name) if name is not None else monkeypatch.delenv("XDG_CACHE_HOME")
            assert folder_beside(TEXTS) == tmp_path / "home" / ".cache" / "lightning-stateful"

    @pytest.mark.parametrize("attribute", ["files", "root"])
    @pytest.mark.parametrize("kind", [str, Path])
    def test_files_of_a_dataset_have_theirs_beside_them(self, tmp_path: Path, attribute: str, kind: Any) -> None:
        folder = tmp_path / "data"
        folder.mkdir()
        dataset = Files(TEXTS)
        setattr(dataset, attribute, [kind(folder / "part.txt")] if attribute == "files" else kind(folder))
        lengths_of(dataset, len)

        assert np.load(the_file(folder)).tolist() == LENGTHS

    def test_a_hugging_face_dataset_on_disk_has_them_beside_its_files(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
        dataset = datasets.load_from_disk(tmp_path / "saved")
        lengths_of(dataset, lambda sample: len(sample["text"]))

        assert np.load(the_file(tmp_path / "saved")).tolist() == LENGTHS

    def test_a_folder_that_was_asked_for_is_made_and_used(self, tmp_path: Path, users_cache: Path) -> None:
        dataset = Files(TEXTS)
        dataset.root = tmp_path
        for kind in (str, Path):
            lengths_of(dataset, len, cache_dir=kind(tmp_path / "mine" / "deep"))

        assert the_file(tmp_path / "mine" / "deep")
        assert not list(tmp_path.glob("*.npy"))
        assert not users_cache.exists()

    def test_beside_files_that_cannot_be_written_it_is_the_users_cache(
        self, tmp_path: Path, users_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = Files(TEXTS)
        dataset.root = tmp_path
        # Who runs the tests may be allowed to write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

        assert folder_beside(dataset) == users_cache

    def test_beside_files_that_are_not_there_it_is_the_users_cache(self, tmp_path: Path, users_cache: Path) -> None:
        dataset = Files(TEXTS)
        dataset.files, dataset.root = [tmp_path / "gone" / "part.txt"], tmp_path / "gone" / "too"

        assert folder_beside(dataset) == users_cache

    def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match=r"lengths cannot be kept in '.*file/sub'.*Pass a cache_dir"):
            lengths_of(TEXTS, len, cache_dir=tmp_path / "file" / "sub")

    def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: Any, **kwargs: Any) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ConfigurationError, match=r"sizes cannot be kept in .*Permission denied.*Pass a cache_dir"):
            lengths_of(TEXTS, len, cache_dir=tmp_path, what="sizes")


class TestFindingAgain:
    def test_the_second_time_only_a_few_samples_are_measured(self, tmp_path: Path, counting: Counting) -> None:
        first = lengths_of(TEXTS, counting)
        assert len(calls(counting.calls)) == NAMED + len(TEXTS)
        second = lengths_of(TEXTS, Counting(counting.calls))

        assert len(calls(counting.calls)) == NAMED + len(TEXTS) + READ
        assert first.tolist() == second.tolist() == LENGTHS

    def test_what_comes_back_is_mapped_from_the_file(self) -> None:
        for _ in range(2):
            assert isinstance(lengths_of(TEXTS, len), np.memmap)

    def test_beside_it_lies_what_it_is_of(self, tmp_path: Path) -> None:
        lengths_of(TEXTS, len, cache_dir=tmp_path)
        header = json.loads(the_file(tmp_path).with_suffix(".json").read_text())

        assert header["of"]["dataset"]["type"] == "list"
        assert header["of"]["dataset"]["length"] == 40
        assert len(header["of"]["dataset"]["some lengths"]) == NAMED
        assert header["of"]["function"]["name"] == "builtins.len"

    def test_no_other_file_is_left(self, tmp_path: Path) -> None:
        lengths_of(TEXTS, len, cache_dir=tmp_path / "own")
        path = the_file(tmp_path / "own")

        assert set((tmp_path / "own").iterdir()) <= {path, path.with_suffix(".json"), path.with_suffix(".lock")}

    def test_fewer_samples_than_are_looked_at_again_will_do(self, counting: Counting) -> None:
        for _ in range(2):
            assert lengths_of(["a", "bc"], counting).tolist() == [1, 2]
        for _ in range(2):
            assert lengths_of([], counting).tolist() == []

    def test_finding_them_draws_nothing_from_global_generators(self) -> None:
        def noisy(sample: str) -> int:
            torch.rand(1), np.random.rand(), random.random()
            return len(sample)

        for _ in range(2):
            before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
            lengths_of(TEXTS, noisy)
            assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before

    @pytest.mark.timeout(60)
    def test_a_function_that_fails_leaves_nothing_and_no_lock(self, tmp_path: Path, counting: Counting) -> None:
        dataset: list[Any] = [*TEXTS[:-1], None]
        for _ in range(2):
            with pytest.raises(TypeError):
                lengths_of(dataset, counting, cache_dir=tmp_path / "cache")
            assert not list((tmp_path / "cache").glob("*.npy"))
        dataset[-1] = TEXTS[-1]

        assert lengths_of(dataset, counting, cache_dir=tmp_path / "cache").tolist() == LENGTHS


def cut_at(limit: int) -> Callable[[str], int]:
    return lambda sample: min(len(sample), limit)


def keep_closed(sample: str) -> int:
    return len(sample) + CLOSED


class Scaled:
    """A function with something in it."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, sample: str) -> int:
        return self.factor * len(sample)

    def measure(self, sample: str) -> int:
        return self.factor * len(sample)


SOURCE = """
import functools

LIMIT = {limit}

def plain(sample):
    return {body}

def with_default(sample, limit={limit}):
    return min(len(sample), limit)

def with_global(sample):
    return min(len(sample), LIMIT)

def calls_another(sample):
    return plain(sample)

def wrap(function):
    @functools.wraps(function)
    def inner(sample):
        return function(sample)
    return inner

@wrap
def decorated(sample):
    return {body}

def keyed(sample, key=None):
    return {body}

partial = functools.partial(keyed, key=3)
"""


def module_of(folder: Path, *, limit: int = 5, body: str = "len(sample)") -> ModuleType:
    """A module of the user's, as it is after an edit."""
    path = folder / f"users_{limit}_{len(body)}.py"
    path.write_text(SOURCE.format(limit=limit, body=body))
    spec = importlib.util.spec_from_file_location("users_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Functions of a module that can be imported are pickled by their name.
    sys.modules["users_module"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key of a function in a user's module after an edit."""
    monkeypatch.setitem(sys.modules, "users_module", ModuleType("users_module"))
    return lambda name, **edit: key(TEXTS, getattr(module_of(tmp_path, **edit), name))


class TestKeys:
    def test_the_same_data_and_function_have_one_key(self) -> None:
        assert key(TEXTS, len) == key(list(TEXTS), len)
        assert key(TEXTS, cut_at(3)) == key(TEXTS, cut_at(3))
        assert key(TEXTS, Scaled(2)) == key(TEXTS, Scaled(2))
        assert key([1, 5], functools.partial(max, 3)) == key([1, 5], functools.partial(max, 3))

    def test_data_of_another_length_or_type_have_another(self) -> None:
        assert len({key(TEXTS, len), key(TEXTS[1:], len), key(tuple(TEXTS), len)}) == 3

    def test_what_a_dataset_was_built_with_counts(self) -> None:
        class Cut(list[str]):
            def __init__(self, longest: int) -> None:
                super().__init__(TEXTS)
                self.longest = longest

        assert key(Cut(3), len) == key(Cut(3), len)
        assert key(Cut(3), len) != key(Cut(4), len)

    def test_the_lengths_of_some_samples_count(self) -> None:
        assert key(TEXTS, len) != key([text + "b" for text in TEXTS], len)

    def test_another_fingerprint_has_another(self) -> None:
        dataset = datasets.Dataset.from_dict({"text": TEXTS})
        other = dataset.map(lambda sample: {"text": sample["text"] + "b"})

        assert len({key(dataset, len), key(other, len), key(dataset.shuffle(seed=1), len)}) == 3

    def test_other_files_or_sizes_of_files_have_another(self, tmp_path: Path) -> None:
        found, dataset = set(), Files(TEXTS)
        for name, text in (("a.txt", "1"), ("a.txt", "22"), ("b.txt", "22")):
            (tmp_path / name).write_text(text)
            dataset.files = [tmp_path / name]
            found.add(key(dataset, len))

        assert len(found) == 3

    def test_what_a_dataset_says_of_itself_counts(self) -> None:
        class Described(Files):
            version = 1

            def describe(self) -> dict[str, Any]:
                return {"version": self.version}

        first, second = Described(TEXTS), Described(TEXTS)
        second.version = 2

        assert key(first, len) != key(second, len)

    def test_other_code_has_another(self) -> None:
        functions = [
            len,
            lambda sample: 0,
            lambda sample: len(sample),
            lambda sample: len(sample) + 1,
            lambda sample: len(sample) + 2,
        ]

        assert len({key(TEXTS, function) for function in functions}) == 5

    def test_what_a_function_closes_over_counts(self) -> None:
        assert key(TEXTS, cut_at(3)) != key(TEXTS, cut_at(4))

    def test_what_a_function_is_given_counts(self) -> None:
        assert key([7, 8], functools.partial(max, 3)) != key([7, 8], functools.partial(max, 4))

    def test_what_an_object_holds_counts(self) -> None:
        assert key(TEXTS, Scaled(2)) != key(TEXTS, Scaled(3))
        assert key(TEXTS, Scaled(2).measure) != key(TEXTS, Scaled(3).measure)

    def test_where_a_function_stands_in_its_file_does_not_count(self, edited: Callable[..., str]) -> None:
        assert edited("plain") == edited("plain", limit=6)

    def test_an_edited_function_of_a_module_has_another(self, edited: Callable[..., str]) -> None:
        assert edited("plain") != edited("plain", body="len(sample) + 1")

    @pytest.mark.parametrize(
        ("name", "edit"),
        [
            ("with_default", {"limit": 6}),
            ("decorated", {"body": "len(sample) + 1"}),
            ("partial", {"body": "len(sample) + 1"}),
        ],
    )
    def test_what_belongs_to_an_edited_function_counts(
        self, edited: Callable[..., str], name: str, edit: dict[str, Any]
    ) -> None:
        assert edited(name) != edited(name, **edit)

    def test_what_cannot_be_pickled_is_left_to_the_samples(self, counting: Counting) -> None:
        steps = (step for step in range(3))

        def measured(sample: str) -> int:
            return counting(sample) if steps else 0

        for _ in range(2):
            assert lengths_of(TEXTS, measured).tolist() == LENGTHS

        assert len(calls(counting.calls)) == NAMED + len(TEXTS) + READ


class TestDamage:
    """Every kind is found out, told, and mended."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        lengths_of(TEXTS, len, cache_dir=tmp_path / "cache")
        return the_file(tmp_path / "cache")

    def found(self, path: Path, said: str) -> None:
        with pytest.warns(StatefulWarning, match=f"are not used, because .*{said}.*measured again") as caught:
            assert lengths_of(TEXTS, len, cache_dir=path.parent).tolist() == LENGTHS

        assert [warning.filename for warning in caught] == [__file__]
        # And then all is well.
        assert lengths_of(TEXTS, len, cache_dir=path.parent).tolist() == LENGTHS

    @pytest.mark.parametrize("changed", [[9] * 40, [length + 1 for length in LENGTHS]], ids=["one", "all"])
    def test_lengths_with_another_digest(self, path: Path, changed: list[int]) -> None:
        np.save(path, np.array(changed, dtype=np.uint8))

        self.found(path, "the file is damaged")

    def test_a_single_byte(self, path: Path) -> None:
        contents = bytearray(path.read_bytes())
        contents[-3] ^= 1
        path.write_bytes(contents)

        self.found(path, "the file is damaged")

    @pytest.mark.parametrize("shape", [(39,), (41,), (40, 1), ()], ids=str)
    def test_lengths_of_another_shape(self, path: Path, shape: tuple[int, ...]) -> None:
        np.save(path, np.zeros(shape, dtype=np.uint8))

        self.found(path, "the file is damaged")

    def test_a_file_of_text(self, path: Path) -> None:
        path.write_text("no lengths")

        self.found(path, "it cannot be read")

    def test_a_file_of_objects(self, path: Path) -> None:
        np.save(path, np.array([None] * 40, dtype=object))

        self.found(path, "it cannot be read")

    @pytest.mark.parametrize("left", [5, 100, -1])
    def test_a_file_cut_off(self, path: Path, left: int) -> None:
        path.write_bytes(path.read_bytes()[:left])

        self.found(path, "it cannot be read")

    def test_an_empty_file(self, path: Path) -> None:
        path.write_bytes(b"")

        self.found(path, "it cannot be read")

    def test_several_arrays_in_one_file(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, lengths=np.array(LENGTHS))

        self.found(path, "")

    def test_a_missing_header(self, path: Path) -> None:
        path.with_suffix(".json").unlink()

        self.found(path, "it cannot be read")

    @pytest.mark.parametrize("header", ["", "{", "\x00"])
    def test_a_damaged_header(self, path: Path, header: str) -> None:
        path.with_suffix(".json").write_text(header)

        self.found(path, "it cannot be read")

    @pytest.mark.parametrize("header", ["[]", "{}", "null", '{"of": {"version": 1}}', '"text"'])
    def test_the_header_of_something_else(self, path: Path, header: str) -> None:
        path.with_suffix(".json").write_text(header)

        self.found(path, "they are those of another dataset or function")

    def test_a_header_without_a_digest(self, path: Path) -> None:
        header = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps({"of": header["of"]}))

        self.found(path, "the file is damaged")

    def test_another_datasets_files_under_this_ones_name(self, path: Path, tmp_path: Path) -> None:
        lengths_of([text + "b" for text in TEXTS], lambda sample: len(sample), cache_dir=tmp_path / "other")
        other = the_file(tmp_path / "other")
        path.write_bytes(other.read_bytes())
        path.with_suffix(".json").write_bytes(other.with_suffix(".json").read_bytes())

        self.found(path, "they are those of another dataset or function")

    def test_only_the_longest_sample_that_is_no_longer_as_long(self, tmp_path: Path) -> None:
        texts = ["a" * (number % 9) for number in range(5000)]
        texts[4321] = "a" * 20
        lengths_of(texts, len, cache_dir=tmp_path)
        texts[4321] = "a" * 30
        with pytest.warns(StatefulWarning, match="sample 4321 has length 30, and they say 20"):
            found = lengths_of(texts, len, cache_dir=tmp_path)

        assert int(found.max()) == 30

    def test_samples_that_are_no_longer_as_long(self, path: Path) -> None:
        named = np.linspace(0, len(TEXTS) - 1, NAMED).astype(int)
        changed = [text if number in named else text + "b" for number, text in enumerate(TEXTS)]
        with pytest.warns(StatefulWarning, match=r"because sample \d+ has length \d+, and they say \d+: data or .*All"):
            found = lengths_of(changed, len, cache_dir=path.parent)

        assert found.tolist() == [len(text) for text in changed]

    def test_a_missing_array_is_simply_measured(self, path: Path) -> None:
        path.unlink()

        assert lengths_of(TEXTS, len, cache_dir=path.parent).tolist() == LENGTHS
        assert the_file(path.parent) == path

    def test_an_array_that_is_in_use_is_not_changed_when_it_is_measured_again(self, path: Path) -> None:
        held = lengths_of(TEXTS, len, cache_dir=path.parent)
        path.with_suffix(".json").unlink()
        self.found(path, "it cannot be read")

        assert held.tolist() == LENGTHS


class TestProcesses:
    context = multiprocessing.get_context("spawn")

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
        by_process = sorted(calls(tmp_path / "calls").count(str(pid)) for pid in found)
        assert by_process == [READ, NAMED + len(TEXTS)]

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_one_that_is_killed_while_it_measures_leaves_nothing_to_believe_and_no_lock(
        self, tmp_path: Path, num_workers: int
    ) -> None:
        (tmp_path / "stays").write_text("")
        process = self.context.Process(target=measure, args=(tmp_path, num_workers))
        process.start()
        while len(calls(tmp_path / "calls")) < NAMED + 6:
            assert process.is_alive()
            time.sleep(0.02)
        process.kill()
        assert self.ended(process) == -signal.SIGKILL
        assert not list((tmp_path / "cache").glob("*.npy"))

        before = len(calls(tmp_path / "calls"))
        counting = Counting(tmp_path / "calls", tmp_path / "stays")
        (tmp_path / "stays").unlink()
        with warnings.catch_warnings(record=True) as caught:
            found = lengths_of(TEXTS, counting, cache_dir=tmp_path / "cache")

        assert found.tolist() == LENGTHS
        assert calls(tmp_path / "calls").count(str(os.getpid())) == NAMED + len(TEXTS)
        assert len(calls(tmp_path / "calls")) >= before + NAMED + len(TEXTS)
        assert not caught

    @pytest.mark.timeout(120)
    def test_one_that_is_killed_while_it_writes_is_not_believed(self, tmp_path: Path) -> None:
        process = self.context.Process(target=measure_and_die_before_the_header, args=(tmp_path,))
        process.start()
        assert self.ended(process) == -signal.SIGKILL
        assert the_file(tmp_path / "cache")

        with pytest.warns(StatefulWarning, match="it cannot be read"):
            found = lengths_of(TEXTS, Counting(tmp_path / "calls", tmp_path / "stays"), cache_dir=tmp_path / "cache")

        assert found.tolist() == LENGTHS
        assert calls(tmp_path / "calls").count(str(os.getpid())) == NAMED + len(TEXTS)
