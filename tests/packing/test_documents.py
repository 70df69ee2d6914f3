"""Settings of packing, and what documents may be."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing import DocumentReader, Packing


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"separator": True}, "separator must be an integer, got True"),
        ({"separator": -1}, "separator must be at least 0, got -1"),
        ({"separator": 2**63}, "separator must be a number that an int64 holds, got 9223372036854775808"),
        ({"padding": True}, "padding must be a token, got True"),
        ({"padding": {"input_ids": 2**70}}, "padding of 'input_ids' must be a number that an int64 holds"),
        ({"padding": {"labels": 3}}, "padding of 'labels' must be below 0, got 3, which would be learned"),
        ({"padding": {"position_ids": 3}}, "padding of 'position_ids' cannot be chosen"),
        ({"padding": {"document_ids": 3}}, "padding of 'document_ids' cannot be chosen"),
        ({"padding": None}, "padding of 'input_ids' must be an integer, got None"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Packing(8, **settings)


def test_any_token_may_be_the_separator_or_fill_up() -> None:
    for token in (0, 2**40, np.int64(7), 2**63 - 1):
        assert Packing(8, separator=token, padding=token).separator == token  # type: ignore[arg-type]  # NumPy's too
    packing = Packing(8, padding={"labels": -1, "loss_mask": False, "input_ids": 2})
    assert [packing.padding_of(name) for name in ("labels", "loss_mask", "input_ids", "other")] == [-1, 0, 2, 0]


def test_padding_of_a_column_that_documents_have_not_is_refused() -> None:
    reader = DocumentReader(Packing(8, padding={"input_ids": 1, "labels": -100, "mask": 3}))
    with pytest.raises(
        ConfigurationError, match=r"padding names 'mask', and document 3 has the columns \['input_ids'\]"
    ):
        reader.read([1, 2], "document 3")
    assert reader.read({"input_ids": [1, 2], "mask": [0, 1]}, "document 3").keys() == {"input_ids", "mask", "labels"}


@pytest.mark.parametrize("column", ["input_ids", "labels", "token_type_ids"])
@pytest.mark.parametrize("value", [[2**63], np.array([2**63], np.uint64)], ids=["list", "array"])
def test_numbers_beyond_int64_are_refused_and_never_wrap(column: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'?{column}'? of a document has the value 9223372036854775808"):
        DocumentReader(Packing(8)).read({"input_ids": [1], column: value}, "a document")
    with pytest.raises(ConfigurationError, match=f"has the value -{2**64}"):
        DocumentReader(Packing(8)).read([1, -(2**64)], "a document")
    small = np.array([2**62], np.uint64)
    assert DocumentReader(Packing(8)).read({"input_ids": [1], column: small}, "a")[column].tolist() == [2**62]


def test_tokens_may_have_their_own_name_and_bytes_are_tokens() -> None:
    given: list[Any] = [
        [1, 2],
        {"tokens": [1, 2]},
        {"tokens": b"\x01\x02"},
        b"\x01\x02",
        {"input_ids": bytearray([1, 2])},
    ]
    for sample in given:
        reader = DocumentReader(Packing(8, separator=300))
        found = reader.read(sample, "a document")
        assert {name: column.tolist() for name, column in found.items()} == {
            "input_ids": [1, 2, 300],
            "labels": [1, 2, 300],
        }
    # Beside input_ids it is a column like any other.
    found = DocumentReader(Packing(8)).read({"tokens": [3, 4], "input_ids": [1, 2]}, "a document")
    assert (found["input_ids"].tolist(), found["tokens"].tolist()) == ([1, 2], [3, 4])


def test_what_is_left_out_is_named_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    reader = DocumentReader(Packing(8))
    sample = {"tokens": [1], "attention_mask": [1], "position_ids": [0], "text": "a", "id": 3}
    with caplog.at_level(logging.WARNING):
        reader.read(sample, "a document")
        reader.read(sample, "a document")
    untrue, others = (record.getMessage() for record in caplog.records)
    assert untrue.startswith("Packing leaves out attention_mask, position_ids of the samples: they hold for a document")
    assert others == "Packing leaves out id, text of the samples: only columns of one number a token can be packed."
