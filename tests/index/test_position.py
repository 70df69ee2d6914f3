import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.index.position import Position

KEYS = ["epoch", "consumed", "width"]
WHOLE = {"epoch": 2, "consumed": 12288, "width": 8}


def test_a_run_begins_at_the_first_slot_of_epoch_0():
    assert Position().to_dict() == {"epoch": 0, "consumed": 0, "width": 1}


def test_a_position_is_written_as_a_plain_dict():
    assert Position(**WHOLE).to_dict() == WHOLE


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**31))
def test_a_position_survives_json(epoch, consumed, width):
    position = Position(epoch=epoch, consumed=consumed, width=width)
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position


def test_writing_gives_a_new_dict_each_time():
    position = Position()
    position.to_dict()["epoch"] = 7
    assert position.to_dict()["epoch"] == 0


def test_reading_leaves_the_dict_as_it_was():
    data = dict(WHOLE)
    Position.from_dict(data)
    assert data == WHOLE


def test_keys_that_a_position_does_not_know_are_passed_over():
    assert Position.from_dict({**WHOLE, "extra": 1}) == Position(**WHOLE)


@pytest.mark.parametrize(
    "wrong", [{"epoch": -1}, {"consumed": -1}, {"width": 0}, {"width": -2}], ids=["epoch", "consumed", "0", "width"]
)
def test_a_value_out_of_range_is_refused_with_all_three_values(wrong):
    values = {**WHOLE, **wrong}
    said = "got epoch={epoch}, consumed={consumed}, width={width}".format(**values)
    with pytest.raises(PositionError, match=said):
        Position(**values)


def test_a_dict_with_a_value_out_of_range_is_a_position_error():
    with pytest.raises(PositionError, match="consumed=-5"):
        Position.from_dict({**WHOLE, "consumed": -5})


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named_beside_those_that_are_there(key):
    rest = {name: value for name, value in WHOLE.items() if name != key}
    with pytest.raises(DamagedStateError) as caught:
        Position.from_dict(rest)
    assert f"a position needs '{key}', got the keys {sorted(rest)}" in str(caught.value)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [1.0, "1", None, True, [1]])
def test_a_value_that_is_no_int_is_named(key, value):
    with pytest.raises(DamagedStateError) as caught:
        Position.from_dict({**WHOLE, key: value})
    assert f"position.{key} must be an int, got {value!r}" in str(caught.value)


@pytest.mark.parametrize(("data", "kind"), [(None, "NoneType"), ([0, 0, 1], "list"), (3, "int"), ("x", "str")])
def test_what_is_no_dict_is_refused_by_its_type(data, kind):
    with pytest.raises(DamagedStateError, match=f"a position is a dict, got {kind}"):
        Position.from_dict(data)


def test_keys_that_are_no_strings_are_reported_and_do_not_crash():
    with pytest.raises(DamagedStateError, match="needs 'epoch'"):
        Position.from_dict({1: 2, "a": 3})


def test_a_position_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Position().epoch = 1


def test_equal_positions_are_equal_and_hash_alike():
    assert len({Position(**WHOLE), Position(**WHOLE), Position()}) == 2
