"""A cursor turns a position in an order into a state and back."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_stateful.errors import DamagedStateError, PositionError, StateError, StateMismatchError
from lightning_stateful.index import Position, SequentialOrder, ShuffledOrder
from lightning_stateful.samplers import Cursor


def a_cursor(**config: Any) -> Cursor:
    return Cursor(ShuffledOrder(10, 3), {"dataset": {"length": 10}, **config})


def test_a_fresh_cursor_stands_at_the_beginning() -> None:
    assert a_cursor().position == Position(epoch=0, consumed=0, width=1)


def test_the_state_is_an_envelope_of_the_orders_kind() -> None:
    cursor = a_cursor()
    cursor.position = Position(epoch=2, consumed=4, width=3)

    assert cursor.state_dict() == {
        "version": 1,
        "kind": "shuffled",
        "order_version": 1,
        "config": {"shuffle": True, "seed": 3, "dataset": {"length": 10}},
        "progress": {"epoch": 2, "consumed": 4, "width": 3},
    }


def test_every_state_is_a_fresh_copy() -> None:
    cursor = a_cursor()
    state = cursor.state_dict()
    state["config"]["dataset"]["length"] = 99
    state["progress"]["consumed"] = 5

    assert cursor.state_dict()["config"]["dataset"] == {"length": 10}
    assert cursor.position.consumed == 0


def test_the_state_of_another_position_does_not_move_the_cursor() -> None:
    cursor = a_cursor()

    assert cursor.state_dict(Position(epoch=1, consumed=2))["progress"]["epoch"] == 1
    assert cursor.position == Position()


def test_reading_a_state_does_not_move_the_cursor() -> None:
    cursor = a_cursor()

    assert cursor.read(cursor.state_dict(Position(epoch=1, consumed=2))) == Position(epoch=1, consumed=2)
    assert cursor.position == Position()


def test_the_end_of_an_epoch_reads_as_the_beginning_of_the_next() -> None:
    cursor = a_cursor()

    assert cursor.read(cursor.state_dict(Position(epoch=1, consumed=10, width=4))) == Position(epoch=2, width=4)


def test_the_beginning_of_an_empty_epoch_reads_as_itself() -> None:
    cursor = Cursor(SequentialOrder(0), {})

    assert cursor.read(cursor.state_dict()) == Position()


def test_a_cyclic_position_may_lie_beyond_the_epoch() -> None:
    cursor = a_cursor()
    state = cursor.state_dict(Position(epoch=0, consumed=25))

    assert cursor.locate(state, cyclic=True) == Position(epoch=0, consumed=25)
    with pytest.raises(PositionError, match="has consumed 25 samples of epoch 0, but an epoch has only 10"):
        cursor.read(state)


def test_a_config_that_is_no_plain_data_is_refused_with_its_path() -> None:
    with pytest.raises(StateError, match=r"state.dataset.file is a object"):
        a_cursor(dataset={"file": object()}).state_dict()


def test_errors_name_the_state_as_the_caller_does() -> None:
    state = a_cursor().state_dict()

    with pytest.raises(StateMismatchError, match=r"^The train state does not fit"):
        a_cursor(extra=1).read(state, where="The train state")
    with pytest.raises(DamagedStateError, match=r"^The train state must hold a dict under 'position', got nothing"):
        a_cursor().read({key: state[key] for key in state if key != "progress"}, where="The train state")
    with pytest.raises(DamagedStateError, match=r"^The train state: a position needs 'width'"):
        a_cursor().read({**state, "progress": {"epoch": 0, "consumed": 0}}, where="The train state")


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_dict_is_refused(state: Any) -> None:
    with pytest.raises(DamagedStateError, match="must be a dict"):
        a_cursor().read(state)


def test_a_difference_is_accepted_by_its_name_or_a_name_above_it() -> None:
    state = Cursor(ShuffledOrder(10, 3), {"dataset": {"length": 12, "fingerprint": "a"}}).state_dict()
    cursor = Cursor(ShuffledOrder(10, 3), {"dataset": {"length": 10, "fingerprint": "b"}})

    with pytest.raises(StateMismatchError, match="2 differences"):
        cursor.read(state)
    with pytest.raises(StateMismatchError, match="1 difference"):
        cursor.read(state, accept=("dataset.fingerprint",))
    assert cursor.read(state, accept=("dataset",)) == Position()
