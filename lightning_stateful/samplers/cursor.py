"""An order and the position in it: the one class that holds a position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_stateful import state as format_
from lightning_stateful.errors import DamagedStateError, Difference, PositionError, StateMismatchError
from lightning_stateful.index.orders import Order
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.samplers.user_sampler import UserSampler


class Cursor:
    """Holds a position in an order and turns it into a state and back.

    Args:
        order: The canonical sequence.
        config: What determines the sequence beside the order: plain data that is compared on load.

    State:
        An envelope of the order's kind (see :mod:`lightning_stateful.state`).
    """

    def __init__(self, order: Order | BatchOrder | UserSampler, config: Mapping[str, Any]) -> None:
        self.order = order
        self.config = {**order.describe(), **config}
        self.position = Position()

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """The state at ``position``, or at the one held; a fresh plain dict."""
        held = self.position if position is None else position
        saved = self.order.save(held) if isinstance(self.order, (BatchOrder, UserSampler)) else held.to_dict()
        return self._envelope(saved)

    def _present(self) -> dict[str, Any]:
        return self._envelope(Position().to_dict())

    def _envelope(self, position: Mapping[str, Any]) -> dict[str, Any]:
        return format_.pack(self.order.kind, self.order.order_version, self.config, position)

    def read(self, state: Mapping[str, Any], *, accept: Collection[str] = (), where: str = "The state") -> Position:
        """The position that a state names in this order, without moving there.

        Args:
            state: What :meth:`state_dict` returned; it is not changed.
            accept: Names of differences to let pass, for example ``("seed", "dataset.length")``.
            where: How an error calls the state.

        Raises:
            StateMismatchError: The state was made with another configuration.
            DamagedStateError, StateVersionError, PositionError: The state is of no use.
        """
        format_.check(state, where=where)
        format_.refuse_differences(state, self._present(), accept=accept, where=where)
        return self.locate(state, where=where)

    def locate(self, state: Mapping[str, Any], *, cyclic: bool = False, where: str = "The state") -> Position:
        """:meth:`read` for a checked state of which every difference has been accepted.

        Args:
            state: What :meth:`state_dict` returned; it is not changed.
            cyclic: Whether there are other loaders beside: the position may lie at the end of its epoch, or in a later
                pass over a loader that starts over within the epoch.
            where: How an error calls the state.

        Raises:
            StateMismatchError: The state counts other slots than this order.
            DamagedStateError, PositionError: The position is of no use.
        """
        if isinstance(self.order, BatchOrder):
            changed = bool(format_.differences(state, self._present(), fingerprints=False))
            return _read_in_batches(self.order, state, changed=changed, cyclic=cyclic, where=where)
        own: dict[str, Any] = Position().to_dict()
        if isinstance(self.order, UserSampler):
            own[self.order.kind] = None
        if not _counts_alike(state, self.order.kind, own):
            raise _other_slots(state, self.order.kind, where)
        position = read_position(state, where=where, order=self.order)
        length = len(self.order)
        # How many steps of a stream make an epoch may change.
        is_stream = self.order.kind == "stream"
        if position.consumed > length and not cyclic and not is_stream:
            raise PositionError(
                f"{where} has consumed {position.consumed} samples of epoch {position.epoch}, but an epoch has only "
                f"{length}. Train on the dataset that it was made with, or resume from a checkpoint of this one."
            )
        if length and position.consumed >= length and not cyclic:
            return Position(epoch=position.epoch + 1, consumed=0, width=position.width)
        return position


def _read_in_batches(
    order: BatchOrder, state: Mapping[str, Any], *, changed: bool, cyclic: bool, where: str
) -> Position:
    if not _counts_alike(state, order.kind, order.save(order.begin(0, 1))):
        raise _other_slots(state, order.kind, where)
    try:
        position = order.restore(state["progress"], state["config"], changed=changed)
    except (DamagedStateError, PositionError) as error:
        raise type(error)(f"{where}: {error}. Resume from another checkpoint.") from None
    end = order.steps(position) * position.width
    if position.consumed > end:
        raise PositionError(
            f"{where} has consumed {position.consumed} batches of epoch {position.epoch}, but an epoch has only {end}. "
            "Train on the data that it was made with, or resume from a checkpoint of this one."
        )
    if position.consumed == end and not cyclic:
        # Beside other loaders, the epoch may go on without this one.
        return order.begin(position.epoch + 1, position.width, position)
    return position


def _counts_alike(state: Mapping[str, Any], kind: str, own: Mapping[str, Any]) -> bool:
    """Whether a state of another kind counts the same things."""
    return bool(state["kind"] == kind or state["progress"].keys() == own.keys())


def _other_slots(state: Mapping[str, Any], kind: str, where: str) -> StateMismatchError:
    # Not to be accepted: a number of batches is no number of samples.
    remedy = "Use the order or sampler that the checkpoint was made with."
    return StateMismatchError([Difference(path="kind", saved=state["kind"], present=kind, remedy=remedy)], where=where)


def read_position(state: Mapping[str, Any], *, where: str, order: Any = None) -> Position:
    """The position in a checked envelope, for an order of that kind.

    Raises:
        DamagedStateError, PositionError: With ``where`` in the message.
    """
    try:
        if isinstance(order, UserSampler):
            return order.restore(state["progress"])
        return Position.from_dict(state["progress"])
    except (DamagedStateError, PositionError) as error:
        raise type(error)(f"{where}: {error}. Resume from another checkpoint.") from None
