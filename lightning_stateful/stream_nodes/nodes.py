"""Base classes of the shards of a stream, and of the torchdata nodes that read and transform their samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

from torchdata.nodes import BaseNode

from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.shapes import COUNT, check_shape

T = TypeVar("T", covariant=True)

# Plain JSON data that says where a node stands. Whoever is given one leaves it as it is.
NodeState = dict[str, Any]

# What nodes count in their states of what they leave out: shards, samples on which a function failed, samples too long.
LEFT_OUT = ("skipped_shards", "skipped_samples", "dropped")

_SKIPPED_AT_ONCE = 256


class Shards(ABC):
    """A fixed list of shards, numbered from 0, the same on every rank and worker.

    It is pickled into worker processes.

    Attributes:
        draws: Whether code of the user's runs at every sample, which may draw random numbers.
        runs_users_code: Whether code of the user's that may draw random numbers runs as a shard is opened or read.
        watch: Looks, in this process, whether functions remember what they were given; None before a pass.
        has_index: Whether the samples are those of data with an index, by which its nodes give them.
        hides_workers: Whether a dataset in it, which would divide itself among workers, is told that there is one.
        warning: What a user should know before training, and what to do about it; empty for nothing.
        note: What else differs from reading the data as a whole, for the log; empty for nothing.
        reread: Why a shard has to be read again from its beginning on a resume, in words; empty where that is quick.
        reread_if_drawn: Why it has to be, once functions have drawn random numbers; empty where it does not.
    """

    draws: bool = False
    runs_users_code: bool = True
    watch: Any = None
    has_index: bool = False
    hides_workers: bool = False
    warning: str = ""
    note: str = ""
    reread: str = ""
    reread_if_drawn: str = ""

    def __getstate__(self) -> dict[str, Any]:
        # Each process looks by itself.
        return {**vars(self), "watch": None}

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards."""

    @abstractmethod
    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """A node that reads the samples of a shard in some epoch, and was not reset yet.

        Its ``get_state()`` is plain JSON data, or None where only reading again leads there. An error while it is reset
        or read is the node's own; the caller says which shard it was. A generator that may draw at every sample says so
        by an attribute ``draws``; by default that is the shards' :attr:`draws`.
        """

    @abstractmethod
    def name(self, shard: int) -> str:
        """The name of the shard in errors: a file, or a number."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """A cheap description that tells other data apart, as plain data."""

    def sizes(self) -> list[int] | None:
        """Samples of each shard, where that is known without reading."""
        return None

    def look_again(self) -> None:  # noqa: B027  # most shards do not look
        """Look for random generators anew, if the shards do: functions have made some while samples were read."""

    def seeded(self, seed: int) -> Shards:
        """The same shards, with this seed where they draw an order and have no seed of their own."""
        return self


class StreamNode(BaseNode[T]):
    """A torchdata node that can give many items at once, leave items out, and close what it reads.

    ``reset(state)`` opens it where a state was taken, ``reset()`` at the beginning; what it gives from there is a
    function of its configuration and the state alone. ``get_state()`` is plain JSON data of the node's own, below 200
    bytes with the states of its sources left out, and never holds a sample: a node that buffers keeps the state at
    which its buffer was begun and the number of items given since. Code that raised has left a node between two items:
    it has to be reset before it is read again. ``next()`` and ``state_dict()`` reset a node that never was; all else
    wants one that has been.

    Attributes:
        context: What else than the node that it reads from a stream gives its constructor: ``"seed"``, ``"on_error"``,
            ``"where"``.
        state_shape: The shape of its states, as :mod:`~lightning_stateful.shapes` has it, but for counts of what
            is left out; empty where nothing is known of it.
        indices: The indices of the samples of a shard, where :attr:`Shards.has_index`; else None.
        keeps_numbers: Whether samples that come with their numbers leave it with them; see
            :mod:`~lightning_stateful.stream_nodes.numbered`.
    """

    context: ClassVar[tuple[str, ...]] = ()
    state_shape: ClassVar[Mapping[str, Any]] = {}
    keeps_numbers: ClassVar[bool] = False
    indices: Sequence[int] | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata annotates only some of its methods

    def held_objects(self) -> Any:
        """What may lead to random generators to which the shards do not, in the node of a shard that was reset."""
        return self

    def next(self) -> T:
        """The next item. A class that does not define it defines :meth:`next_many`, or ``__iter__``."""
        for item in self.next_many(1):
            return item
        raise StopIteration

    def next_many(self, number: int) -> list[T]:
        """The next items, up to ``number``; fewer at the end only. A class that does not define it defines ``next``."""
        return list(islice(self, number))

    def read_into(self, samples: list[Any], number: int) -> None:
        """Append the next items to a list, up to ``number``; what comes before an error stays in it."""
        samples.extend(islice(self, number))

    def skip(self, number: int) -> int:
        """Leave out items, up to ``number``; returns how many there were."""
        skipped = 0
        while items := self.next_many(min(number - skipped, _SKIPPED_AT_ONCE)):
            skipped += len(items)
        return skipped

    def check_state(self, state: Any, path: str) -> None:
        """Refuse a state of another shape, before the node is reset to it.

        Raises:
            DamagedStateError: With the path of the part.
        """
        if self.state_shape:
            # What is counted of samples left out may be new.
            check_shape(state, {**self.state_shape, **{f"{name}?": COUNT for name in LEFT_OUT}}, path)

    def close(self) -> None:
        """Let go of files and processes; the node has to be reset before it is read again."""
        for source in sources_of(self):
            close(source)


def next_many(node: BaseNode[T], number: int) -> list[T]:
    """The next items of any node, up to ``number``; fewer at the end only."""
    return node.next_many(number) if isinstance(node, StreamNode) else list(islice(node, number))


def skip(node: BaseNode[Any], number: int) -> int:
    """Leave out items of any node, up to ``number``; returns how many there were."""
    return node.skip(number) if isinstance(node, StreamNode) else sum(1 for _ in islice(node, number))


def close(node: BaseNode[Any]) -> None:
    """Close a node; one of torchdata's has nothing to close but what it reads from."""
    if isinstance(node, StreamNode):
        node.close()
        return
    for source in sources_of(node):
        close(source)


def state_of(node: BaseNode[Any]) -> NodeState:
    """The state of any node as plain JSON data, which the node does not change any more.

    Raises:
        StateError: The state of a node that is none of this package's holds what cannot be kept in a checkpoint.
    """
    if isinstance(node, StreamNode):
        return node.state_dict()
    plain: NodeState = to_plain(node.state_dict(), "state_dict()", type(node).__qualname__)
    return plain


def reset_to(node: BaseNode[Any], state: NodeState | None) -> None:
    """Reset any node to what :func:`state_of` gave; to its beginning for None."""
    node.reset(state if isinstance(node, StreamNode) else from_plain(state))


def sources_of(node: BaseNode[Any]) -> list[BaseNode[Any]]:
    """The nodes that a node reads from: its attributes ``source`` and ``source_nodes``, as torchdata has them."""
    several = getattr(node, "source_nodes", ())
    held = [getattr(node, "source", None), *(several.values() if isinstance(several, Mapping) else several)]
    return [source for source in held if isinstance(source, BaseNode)]


def innermost(state: NodeState) -> NodeState:
    """The state of the node that reads the shards, within the states of the nodes after it."""
    while "source" in state:
        state = state["source"]
    return state
