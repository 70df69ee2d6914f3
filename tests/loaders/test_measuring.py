"""Every sample is measured once, in processes of its own, and nothing else happens."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders import measuring
from lightning_stateful.loaders.measuring import measure_one, measure_samples

TEXTS = ["a" * (index % 37) for index in range(700)]
LENGTHS = [index % 37 for index in range(700)]


class Draws(Dataset[str]):
    """Every sample draws from all generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        torch.rand(1), np.random.rand(), random.random()
        return "a" * index


def process_of_sample(sample: str) -> int:
    return os.getpid()


def fails_at(index: int, returned: Any) -> Callable[[int], Any]:
    return lambda sample: returned if sample == index else sample


@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_lengths_come_in_the_order_of_the_samples(num_workers: int | None) -> None:
    assert measure_samples(TEXTS, len, num_workers=num_workers).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("longest", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.uint32), (2**33, np.uint64)]
)
def test_they_are_kept_in_the_smallest_type_that_holds_them(longest: int, dtype: Any) -> None:
    found = measure_samples([0, longest], lambda sample: sample, num_workers=0)

    assert (found.dtype, found.tolist()) == (dtype, [0, longest])


def test_no_samples_have_no_lengths() -> None:
    assert measure_samples([], len).tolist() == []


@pytest.mark.parametrize("number", [np.int32(5), torch.tensor(5), np.array(5), np.uint8(5)])
def test_a_length_may_be_any_integer(number: Any) -> None:
    assert measure_samples([1, 2], lambda sample: number, num_workers=0).tolist() == [5, 5]


def test_workers_measure_in_processes_of_their_own() -> None:
    found = set(measure_samples(TEXTS, process_of_sample, num_workers=2).tolist())

    assert len(found) == 2
    assert os.getpid() not in found


def test_without_workers_this_process_measures() -> None:
    assert set(measure_samples(TEXTS, process_of_sample, num_workers=0).tolist()) == {os.getpid()}


def test_by_default_few_samples_are_measured_here_and_many_by_a_process_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_WORTH_WORKERS", 600)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    assert set(measure_samples(TEXTS[:599], process_of_sample).tolist()) == {os.getpid()}
    assert set(measure_samples(TEXTS[:600], lambda sample: get_worker_info().num_workers).tolist()) == {2}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_is_read_once(tmp_path: Path, num_workers: int) -> None:
    reads = tmp_path / "reads"

    def length(sample: str) -> int:
        with reads.open("a") as file:
            file.write("x")
        return len(sample)

    measure_samples(TEXTS, length, num_workers=num_workers)

    assert len(reads.read_text()) == 700


def test_a_bar_on_standard_error_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    measure_samples(TEXTS, len, num_workers=0, what="boundary_key")
    written = capsys.readouterr()

    assert "Measuring boundary_key: 100%" in written.err
    assert "700/700" in written.err
    assert written.out == ""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_generators_are_left_alone(num_workers: int) -> None:
    torch.manual_seed(1)
    before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    measure_samples(Draws(), len, num_workers=num_workers)

    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before


@pytest.mark.parametrize("returned", [-1, 1.5, None, "5", [3], torch.tensor([3, 4])], ids=str)
def test_what_is_no_length_is_refused_with_its_sample(returned: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"sizes: the function says .* of sample 300, and not a length"):
        measure_samples(list(range(400)), fails_at(300, returned), num_workers=0, what="sizes")


def test_a_worker_tells_the_sample_too() -> None:
    with pytest.raises(ConfigurationError, match="the function says -1 of sample 300"):
        measure_samples(list(range(400)), fails_at(300, -1), num_workers=1)


def test_what_a_sample_raises_comes_through() -> None:
    def length(sample: str) -> int:
        raise LookupError(f"no {sample!r}")

    with pytest.raises(LookupError, match="no 'a'"):
        measure_samples(["a"], length, num_workers=0)


def test_one_sample_is_measured_by_itself() -> None:
    assert measure_one(TEXTS, len, 40) == 3
    with pytest.raises(ConfigurationError, match="lengths: the function says -7 of sample 2"):
        measure_one(TEXTS, lambda sample: -7, 2)


def test_a_length_beyond_what_any_sample_has_is_refused_with_its_sample() -> None:
    with pytest.raises(ConfigurationError, match="sample 1"):
        measure_samples([1, 2**70], lambda sample: sample, num_workers=0)
