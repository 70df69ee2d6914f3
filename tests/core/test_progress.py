"""Progress is what changes in a state: plain counts, and what the order adds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lightning_stateful.core import Progress
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError

COUNTS = ["epoch", "cycle", "consumed"]
WHOLE = {"epoch": 2, "cycle": 0, "consumed": 12288}
DETAILS = {"segments": [[64, 300], [48, 20]], "served": {"en": 5}}


def test_details_are_written_beside_the_counts() -> None:
    assert Progress(**WHOLE, details=DETAILS).to_dict() == {**WHOLE, **DETAILS}


def test_what_is_written_and_read_shares_nothing_with_the_progress() -> None:
    data: dict[str, Any] = {**WHOLE, "served": {"en": 5}}
    progress = Progress.from_dict(data)
    data["served"]["en"] = progress.to_dict()["served"]["en"] = 9

    assert progress.to_dict() == {**WHOLE, "served": {"en": 5}}


@pytest.mark.parametrize("name", COUNTS)
def test_a_negative_count_is_refused_with_all_values(name: str) -> None:
    values = {**WHOLE, name: -1}

    with pytest.raises(PositionError, match="got epoch={epoch}, cycle={cycle}, consumed={consumed}".format(**values)):
        Progress.from_dict(values)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1.0, "1", None, True, [1]])
def test_a_saved_count_that_is_no_int_is_damaged(name: str, value: Any) -> None:
    with pytest.raises(DamagedStateError) as caught:
        Progress.from_dict({**WHOLE, name: value})
    assert str(caught.value) == f"progress.{name} must be an int, got {value!r}."


def test_integers_of_numpy_become_pythons_and_other_numbers_are_refused() -> None:
    progress = Progress(epoch=np.int64(1), consumed=np.int32(4))

    assert [type(value) for value in progress.to_dict().values()] == [int, int, int]
    with pytest.raises(ConfigurationError, match=r"consumed must be an integer, got 1\.5"):
        Progress(consumed=1.5)  # type: ignore[arg-type]


def test_progress_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Progress().epoch = 1  # type: ignore[misc]
