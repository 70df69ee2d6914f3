from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.quick import FEW_EXAMPLES, MANY_EXAMPLES, shorten_waits

# One thread a process: the tests run side by side, and sums come out in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that a test starts find the package and `support`.
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent)))

# Of a test process there is one server that others are forked from; it imports this when it is first needed.
multiprocessing.set_forkserver_preload(["support.rank_server"])

# The same examples in each run; `pytest --hypothesis-profile=thorough` looks further.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=FEW_EXAMPLES)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=MANY_EXAMPLES)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Leave files in the order below: xdist would begin with those that have most tests."""
    config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """Leave what has been imported out of all collections of garbage, which take a quarter of a second with it."""
    gc.collect()
    gc.freeze()


# Files that take longest, first of all: the processes share the files, and so end together.
_LONGEST = (
    "verify/test_verify",
    "trainer/test_streams_ddp",
    "test_documentation",
    "test_hugging_face_nodes",
    "test_contract",
    "test_killed_ddp",
    "test_model_parallel",
    "test_packed_module",
    "trainer/test_samplers_ddp",
    "test_examples",
    "loaders/test_samplers",
    "test_stream_elastic",
    "test_stream_moments",
    "test_packing",
    "test_mixed_streams",
    "test_packed_streams_ddp",
    "test_ddp_data",
    "test_iterable_epochs",
    "test_buckets_ddp",
    "test_stream_resume",
    "test_ddp",
    "test_own_iteration",
    "test_traps",
    "test_module_moments",
    "test_torture",
    "test_left_out",
    "trainer/test_ledger",
    "resume/test_moments",
    "test_even_shares",
    "test_stream_state",
    "test_stream_workers",
    "test_stream_ranks",
    "test_mixture_order",
    "test_sources_ddp",
    "test_stream_faults",
    "test_contract_of_streams",
    "test_both_packages",
    "test_rank_sync",
    "test_harm_on_ranks",
    "cli/test_on_ranks",
    "test_samplers_that_change",
    "test_epoch_averages",
    "test_harm",
    "test_harm_own",
    "test_lhotse",
    "test_data_logs",
    "test_iterables",
    "test_stream_module",
)


_SLOW_CASES = Path(__file__).with_name("slow_cases.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, and mark those that are listed as slow."""
    slow = {line for line in _SLOW_CASES.read_text().splitlines() if not line.startswith("#")}
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    names = [f"{name}.py" for name in _LONGEST]

    def turn(item: pytest.Item) -> int:
        return next((turn for turn, name in enumerate(names) if str(item.path).endswith(name)), len(names))

    items.sort(key=turn)


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> None:
    """Whatever the file imports waits no longer than it must."""
    shorten_waits()


@pytest.fixture(autouse=True)
def quiet_lightning() -> None:
    """Lightning's messages on devices and checkpoints say nothing about a test."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def no_seed_of_another_test() -> Iterator[None]:
    """Take out what ``seed_everything`` sets for the process: the default seed of all loaders."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
