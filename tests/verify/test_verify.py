"""Data that are right are found right, and each fault is found with its cause, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import verify_cases, verify_examples
from support.pages import ROOT, run_page
from support.quick import thinned

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.testing import verify_datamodule
from lightning_stateful.verify.launcher import environments_of_ranks
from lightning_stateful.verify.result import Verification
from lightning_stateful.verify.trials import verify

CASES = "support.verify_cases"


def outcomes(found: Verification) -> dict[str, str]:
    return {trial.name: trial.outcome for trial in found.trials}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_on_verify_runs_from_top_to_bottom_and_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(ROOT / "docs" / "verify.md", tmp_path, monkeypatch, capsys)


# On one rank, and from one to two and back, it is tried in docs/verify.md.
@pytest.mark.slow
def test_a_data_module_goes_on_exactly_after_every_stop_on_two_ranks_and_with_other_workers() -> None:
    found = verify_datamodule(verify_cases.Plain, devices=(2,), workers=(0, 2))

    assert found.ok
    assert found.lengths == {2: 5}
    assert outcomes(found) == {
        "another run without a stop": "equal",
        "stopped in the middle of epoch 0": "exact",
        "stopped at the end of epoch 0": "exact",
        "stopped in a validation": "exact",
        "killed by SIGKILL in epoch 1": "exact",
        "resumed with 2 workers": "exact",
    }
    # Each run is of all batches of both epochs that come after its stop, on both ranks.
    assert [trial.num_batches for trial in found.trials] == [18, 16, 10, 10, 6, 16]


@pytest.mark.parametrize(
    ("case", "cause", "what"),
    [
        ("Unseeded", "generator", "the same samples with other values"),
        ("Timed", "clock", "the same samples with other values"),
        ("Unsorted", "sets", None),
        ("Learning", "learns", "other samples"),
        ("Iterated", "iter", "other content"),
        ("Prefetching", "held batches", None),
    ],
)
def test_a_fault_is_found_and_its_cause_named(case: str, cause: str, what: str | None) -> None:
    found = verify(f"{CASES}:{case}")

    assert not found.ok
    assert found.cause is not None
    assert found.cause.name == cause, found
    if what is None:
        # The package refuses to resume it, and says why.
        assert found.divergence is None
        assert found.refused
        assert not found.faults
    else:
        assert found.divergence is not None
        assert found.divergence.what.startswith(what), found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the data of all processes find."""
    monkeypatch.setenv("VERIFY_FOLDER", str(tmp_path))
    return tmp_path


EXAMPLES = ["source_bytes", "mixed_corpora", "bucketed_text", "streamed_text", "packed_text"]


@pytest.mark.parametrize("name", thinned(EXAMPLES, slow={"source_bytes", "packed_text"}))
def test_the_data_of_the_examples_are_right(name: str, folder: Path) -> None:
    verify_examples.write_files()

    found = verify_datamodule(getattr(verify_examples, name), batches=12)

    assert len(found.trials) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_data_of_the_examples_are_right_on_other_ranks_and_workers(name: str, folder: Path) -> None:
    verify_examples.write_files()

    key = "support.verify_examples:numbers_of_lines" if name == "streamed_text" else None
    found = verify_datamodule(getattr(verify_examples, name), devices=(1, 2), workers=(0, 2), key=key)

    assert outcomes(found)["resumed on 2 ranks"] == "once"


@pytest.mark.slow
def test_an_order_of_files_is_found(folder: Path) -> None:
    for number in range(24):
        (folder / f"{number}.txt").touch()

    found = verify(f"{CASES}:Listed")

    assert found.refused
    assert found.cause is not None
    assert found.cause.name == "files", found


@pytest.mark.slow
def test_a_split_without_a_seed_is_found_and_is_right_with_that_of_the_script() -> None:
    found = verify(f"{CASES}:Split")

    assert found.cause is not None
    assert found.cause.name == "global generators", found
    assert verify(f"{CASES}:Split", seed=3).ok


@pytest.mark.slow
def test_a_script_without_the_callback_is_told_so() -> None:
    found = verify(f"{CASES}:Plain", callback=False, seed=3)

    assert found.cause is not None
    assert found.cause.name == "callback", found
    assert found.divergence is not None
    assert found.divergence.batch == 6


@pytest.mark.slow
def test_ranks_that_are_refused_are_no_fault_where_that_is_allowed() -> None:
    with pytest.raises(AssertionError, match="resume on 1 ranks"):
        verify_datamodule("support.command_data:iterable", devices=(1, 2))
    found = verify_datamodule("support.command_data:iterable", devices=(1, 2), allow_refused=True)

    assert outcomes(found)["resumed on 1 rank"] == "refused"


@pytest.mark.slow
def test_what_hangs_is_ended() -> None:
    with pytest.raises(ConfigurationError, match="hung: no new batch in 3 seconds, after 1"):
        verify(f"{CASES}:Hanging", timeout=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Loaders", "loader"])
def test_loaders_by_themselves_and_those_of_a_lightning_module_are_tried(name: str) -> None:
    assert verify_datamodule(f"{CASES}:{name}").ok


def test_what_cannot_be_made_is_no_finding() -> None:
    with pytest.raises(ConfigurationError, match="fails cannot be made: KeyError: 'no such table'"):
        verify(verify_cases.fails)
    with pytest.raises(ConfigurationError, match="must be able to import it"):
        verify(lambda: None)
    with pytest.raises(ConfigurationError, match=r"devices must be numbers from 1, got \[0\]"):
        verify(verify_cases.Plain, devices=(0,))


def test_ranks_meet_on_a_port_that_no_other_connection_is_given() -> None:
    # Linux takes ports of outgoing connections from 32,768 on, macOS and Windows from 49,152 on.
    ports = {int(environments_of_ranks(2)[rank]["MASTER_PORT"]) for rank in (0, 1) for _ in range(20)}
    assert len(ports) > 30
    assert max(ports) < 32_768
