"""Reads the samples of shards, one shard after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, Literal, TypeVar, get_args

from torchdata.nodes import BaseNode

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StateError
from lightning_stateful.generators.attributes import PLAIN, reached
from lightning_stateful.generators.held_generators import HeldGenerators, held_places
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.shapes import COUNT, refuse_unless
from lightning_stateful.state import copy_plain
from lightning_stateful.stream_nodes.nodes import (
    NodeState,
    Shards,
    StreamNode,
    close,
    reset_to,
    skip,
    state_of,
)
from lightning_stateful.stream_nodes.numbered import Numbered, Numbering
from lightning_stateful.stream_nodes.own_state import OF_STATES

OnError = Literal["raise", "skip"]
T = TypeVar("T")

# A state is taken after so many samples, and one more for so many of its characters as JSON: the samples since are read
# again on a resume, which costs less than states of every batch would.
_LEAST_GAP = 256
_CHARACTERS_A_SAMPLE = 16
# So many samples more since a state are there only where the node has none any more.
_MANY = 1024
# Samples that are read together under one seed: to seed each costs more than many take to read.
_RUN = 32


def check_on_error(on_error: str) -> None:
    """Refuse an ``on_error`` that is neither ``"raise"`` nor ``"skip"``.

    Raises:
        ConfigurationError: It is neither.
    """
    if on_error not in get_args(OnError):
        raise ConfigurationError(f"on_error must be one of {get_args(OnError)}, got {on_error!r}.")


class ShardReader(StreamNode[Any]):
    """Reads the samples of some shards in one epoch.

    A shard's node is read by ``iter()``: one that has nothing to count may give there the iterator that it reads.

    Args:
        shards: What they are shards of.
        numbers: Which shards, in the order in which they are read.
        epoch: The epoch that shards are told.
        seed: Seeds torch, NumPy and ``random`` as a shard is opened, and before each run of 32 samples, by (seed,
            epoch, shard, number of the sample); None to leave them.
        seeds_samples: False to seed only shards as they are opened. Samples at which user code may draw are read in
            whole runs, up to 31 further than asked for.
        on_error: ``"skip"`` to leave out the rest of a shard that cannot be read, and count it.
        numbering: Gives each sample its number, with which it comes; None for samples alone.

    Attributes:
        said: Texts that a user should read, which whoever shows them takes out.

    State:
        ``shard``, the index in ``numbers``, and ``item``, the number of the next sample in it; ``state``, the latest
        state of the shard's node that was worth its size, and ``since``, the samples since; ``skipped_shards``.

    Raises:
        ShardError: A shard could not be read; with its name.
        PositionError: A shard ends before the sample where reading stopped.
        StateError: The state of a shard's node is no plain data.
        ConfigurationError: ``on_error`` is unknown, or what reads a shard is no node.
    """

    state_shape: ClassVar = {"shard": COUNT, "item": COUNT, "since": COUNT, "state": object}

    def __init__(
        self,
        shards: Shards,
        numbers: Sequence[int],
        epoch: int,
        *,
        seed: int | None = None,
        seeds_samples: bool = True,
        on_error: OnError = "raise",
        numbering: Numbering | None = None,
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        self._numbering = numbering
        self._shards, self._numbers, self._epoch, self._on_error = shards, numbers, epoch, on_error
        self._seed = None if seed is None else derive_seed("item", seed, epoch)
        self._seeds_samples = seeds_samples and seed is not None
        self._node: BaseNode[Any] | None = None
        self._held = HeldGenerators(is_repeatable=False, shards=shards)
        self._has_looked = False
        # What the shards lead to, kept so that no other object gets its id().
        self._known: dict[int, Any] | None = None
        self.said: list[str] = []

    def check_state(self, state: Any, path: str) -> None:
        """Refuse a state of another shape, or of more samples than it counts; see :class:`StreamNode`."""
        super().check_state(state, path)
        item, since = state["item"], state["since"]
        is_right = since == item if state["state"] is None else since <= item
        refuse_unless(is_right, since, f"{item} or, beside a state, fewer", f"{path}.since")

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken; no shard is opened before it is read."""
        super().reset(initial_state)
        self.close()
        begun = initial_state or {"shard": 0, "item": 0, "since": 0, "state": None, "skipped_shards": 0}
        self._at: int = begun["shard"]
        self._item: int = begun["item"]
        # The sample at which the state was taken.
        self._state_item: int = begun["item"] - begun["since"]
        self._state: Any = begun["state"]
        self._skipped: int = begun.get("skipped_shards", 0)
        self._gap = self._gap_after(self._state)

    def next_many(self, number: int) -> list[Any]:
        """The next samples, up to ``number``, of as many shards as it takes."""
        samples: list[Any] = []
        while len(samples) < number and self._at < len(self._numbers):
            before, failure = len(samples), None
            try:
                if self._node is None:
                    self._open()
                # What comes before an error stays in the list.
                samples.extend(islice(self._samples, number - before))
            except Exception as error:
                failure = error
            if self._numbering is not None:
                numbers = self._numbers_of(self._numbering, len(samples) - before)
                samples[before:] = map(Numbered, zip(samples[before:], zip(numbers), strict=True))
            self._item += len(samples) - before
            if failure is not None:
                self._leave_out_shard(failure)
            elif len(samples) < number:
                if not self._item:
                    self._say_empty()
                self._advance()
        return samples

    def get_state(self) -> NodeState:
        """The position of the next sample, as fresh plain data."""
        item = self._item
        if self._node is not None and not self._draws and item - self._state_item >= self._gap:
            self._take_state(self._node, item)
        return {
            "shard": self._at,
            "item": item,
            "since": item - self._state_item,
            "state": self._state,
            "skipped_shards": self._skipped,
        }

    def close(self) -> None:
        """Close the shard that is open."""
        node, self._node = self._node, None
        self._samples: Iterable[Any] = ()
        if node is not None:
            close(node)

    @property
    def num_opened(self) -> int:
        """The number of shards that have been opened, the one that is read now among them."""
        return min(self._at + 1, len(self._numbers))

    def where(self) -> str:
        """Shard and number of the sample that comes next, in words."""
        if self._at == len(self._numbers):
            return "the end of its shards"
        return f"{self._name()}, at its sample {self._item}"

    def _numbers_of(self, numbering: Numbering, count: int) -> Iterable[int]:
        """The numbers of the next samples of the present shard; of data with an index by that, as of one shard."""
        if self._indices is None:
            return numbering.numbers(self._epoch, self._numbers[self._at], self._item, count)
        indices = self._indices[self._item : self._item + count]
        return [numbering.numbers(self._epoch, 0, index, 1)[0] for index in indices]

    def _open(self) -> None:
        """Open a shard where its state was taken, and leave out what was given since."""
        node = self._node_at_state()
        self._draws = self._seeds_samples and bool(getattr(node, "draws", self._shards.draws))
        self._samples = chain.from_iterable(self._runs(node)) if self._draws else node
        since = self._item - self._state_item
        found = sum(1 for _ in islice(self._samples, since)) if self._draws else skip(node, since)
        if found < since:
            raise PositionError(
                f"{self._item} samples of {self._name()} were used, but now it ends after {self._state_item + found}. "
                "Read the same data, or resume from another checkpoint."
            )

    def _node_at_state(self) -> Any:
        """The node of a shard, where its state was taken."""
        number = self._numbers[self._at]
        if self._seed is None:
            node: Any = self._shards.node(number, self._epoch)
        else:
            node = self._seeded(self._held, 0, self._shards.node, number, self._epoch)
        if not isinstance(node, BaseNode):
            raise ConfigurationError(
                f"node() of {type(self._shards).__qualname__} gave a {type(node).__qualname__} for {self._name()}. "
                "Let it return a torchdata.nodes.BaseNode, whose next() gives the samples."
            )
        self._node = node
        self._indices = node.indices if isinstance(node, StreamNode) else None
        # A copy, which a node may go on counting in.
        try:
            reset_to(node, copy_plain(self._state))
        except OF_STATES as error:
            if self._state is None:
                raise
            raise StateError(
                f"{type(node).__qualname__} cannot go on from its state in {self._name()}: {type(error).__name__}: "
                f"{error}. Resume from another checkpoint, or mend its reset()."
            ) from error
        return node

    def _runs(self, node: BaseNode[Any]) -> Iterator[list[Any]]:
        """The samples of a shard that are always read together, under one seed."""
        item, held = self._state_item, self._held_by(node)
        while True:
            read = node.read_into if isinstance(node, StreamNode) else partial(_read_plainly, node)
            self._take_state(node, item)
            run: list[Any] = []
            try:
                self._seeded(held, item, read, run, _RUN)
            except Exception:
                # What was read before the error comes first.
                yield run
                raise
            if not run:
                return
            if self._finds_more():
                # As in a process in which they are there when the shard is opened.
                close(node)
                node = self._node_at_state()
                held = self._held_by(node)
                continue
            yield run
            item += len(run)

    def _held_by(self, node: BaseNode[Any]) -> HeldGenerators:
        """The generators that the shards lead to, and a node of theirs.

        Every node is looked at, so that what is seeded does not depend on which shards this process has opened before;
        but not what the shards lead to again, as that may take longer than to read a small shard.
        """
        own = node.held_objects() if isinstance(node, StreamNode) else node
        if type(own) in PLAIN:
            return self._held
        if self._known is None:
            self._known = {id(place.value): place.value for place in reached({"shards": self._shards})}
        if all(
            not identity or id(place.value) in self._known for identity, place in held_places(self._known, node=own)
        ):
            return self._held
        held = HeldGenerators(is_repeatable=False, shards=self._shards, node=own)
        # A single search.
        held.present()
        return held

    def _finds_more(self) -> bool:
        """Whether the first samples that are read have had functions make generators of their own; looks once."""
        if self._has_looked:
            return False
        known, self._has_looked = self._held.places, True
        self._held.begin()
        self._held.present()
        if self._held.places <= known:
            return False
        self._known = None
        self._shards.look_again()
        return True

    def _seeded(self, held: HeldGenerators, item: int, read: Callable[..., T], *arguments: Any) -> T:
        seed = mixed_seed(self._seed or 0, self._numbers[self._at], item)
        seed_randomness(seed)
        return read(*arguments) if held.is_idle else held.isolated(seed, partial(read, *arguments))

    def _take_state(self, node: BaseNode[Any], item: int) -> None:
        """Take the state that a node has before the sample ``item``, if the last one lies far enough back."""
        if item - self._state_item < self._gap:
            return
        state = self._state_of(node)
        if state is not None:
            self._state, self._state_item, self._gap = state, item, self._gap_after(state)

    def _state_of(self, node: BaseNode[Any]) -> Any:
        """The state of a shard's node, as a copy that it does not change any more."""
        try:
            state = copy_plain(state_of(node))
            return None if _lacks_source_state(state) else state
        except Exception as error:
            raise StateError(
                f"get_state() of {type(node).__qualname__} gave, for {self.where()}, nothing that can be kept in a "
                f"checkpoint: {type(error).__name__}: {error} Return plain JSON data, numbers as int(...) or "
                "float(...); or None where only reading the shard again leads there."
            ) from error

    def _gap_after(self, state: Any) -> int:
        """Samples after which a state of this size is worth being taken again."""
        # Its repr is as long as its JSON, but for letters that JSON escapes, and is made in half the time.
        return _LEAST_GAP + (0 if state is None else len(repr(state)) // _CHARACTERS_A_SAMPLE)

    def _advance(self) -> None:
        self.close()
        self._at, self._item, self._state_item, self._state = self._at + 1, 0, 0, None
        self._gap = self._gap_after(None)

    def _say_empty(self) -> None:
        self.said.append(
            f"{self._name()} gave no sample. No other shard is read in its place, so its rank has less to read; and as "
            "an epoch ends for all ranks where one has nothing more, it may be much shorter. Look whether the shard is "
            "empty or was cut off, and leave it out if so. Where a filter has left nothing of it, all is well."
        )

    def _leave_out_shard(self, error: Exception) -> None:
        """Go on behind a shard that cannot be read, or raise."""
        self.close()
        if isinstance(error, (StateError, ConfigurationError)):
            # No bad shard, but another than the state was taken in, or none that could be read at all.
            raise error
        if self._on_error == "skip":
            self._skipped += 1
            self._advance()
            return
        raise ShardError(
            f"{self._name()} could not be read at its sample {self._item}: {type(error).__name__}: {error}. A "
            "resume from any state taken before loses nothing: mend the shard and resume, or pass "
            'on_error="skip" to leave out what is left of it.'
        ) from error

    def _name(self) -> str:
        return self._shards.name(self._numbers[self._at])


def _read_plainly(node: BaseNode[Any], samples: list[Any], number: int) -> None:
    """The same as :meth:`StreamNode.read_into`, of any node."""
    # The iterator is over before generators are put back.
    samples.extend(islice(node, number))


def num_read_again(shards: Shards, state: NodeState) -> int:
    """The number of samples read again for a reader's state, where these are more than the few between two states."""
    since: int = state["since"]
    if shards.reread and state["state"] is None:
        return since
    if not shards.reread_if_drawn:
        return 0
    return since if since > _MANY + len(json.dumps(state["state"])) // _CHARACTERS_A_SAMPLE else 0


def _lacks_source_state(state: Any) -> bool:
    """Whether the state of a node holds None for a node that it reads from, which then has none."""
    # A Mapping would be asked for many times slower.
    if not isinstance(state, dict):
        return False
    # By torchdata's names for them.
    sources = [state.get("source", state), *state.get("dataset_node_states", {}).values()]
    return None in sources or any(map(_lacks_source_state, state.values()))
