"""How ranks learn, without a collective, where each of them stands in its stream, and before which step all stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError, PositionError, StatefulError, StreamError
from lightning_stateful.streams.group_store import GroupStore, meet
from lightning_stateful.streams.place_text import Text
from lightning_stateful.streams.ring import Ring

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Up to so many ranks, each tells at every step where it stands; of more, at every second, third, ... step.
_RANKS_A_STEP = 64
_LEAD = 2  # Groups that a rank may have told of beyond that of the step it asks about.
# One is complete before the third after it is begun, so that they take turns.
_COUNTERS = 4
# Groups from that of the step which rank 0 was handed to the last that another can have told of, and one to spare.
_AHEAD = 8
# In a counter, above the number of ranks that have told of a group: there is something to be read elsewhere.
_NOTICE = 2**40
_MOST_NAMED = 8  # In an error.
# What is kept under a run's name.
_NAMES = ("end", "failure", "gathered", *(f"told/{number}" for number in range(_COUNTERS)))


class Exchange:
    """One pass of all ranks over their streams, step by step: a step is one batch of each rank.

    Ranks tell of their batches through the run's key-value store before they are handed them. A step *happens* if all
    have told of a batch for it: so all stop before the same step, and where each stands after a step is known before
    anybody is handed it. They tell of a batch a step before they ask about it, so they hardly ever wait.

    Steps are told of in *groups*, the same on all ranks: for each a message, an addition to a counter, and a look at
    it. A group is complete when all ranks are counted. Whoever ends or fails within one says so before it is counted.

    All ranks construct theirs with the same arguments, in the same order; the constructor waits for all. Each process
    needs a rank of its own. While it waits, signals are handled.

    Args:
        store: The run's, for example that of the process group, which a connection of its own is made to.
        topology: The ranks, and this one.
        label: Keeps apart exchanges that are used at the same time.
        first_step: Number of the pass's first step.
        keep: For how many steps back places can be had.
        timeout: Seconds to wait for others, at each step anew; on ranks other than 0 up to five more.
        group_size: Steps of a group; None for one up to 127 ranks, two up to 191, and so on.
        describe: Says in words what a rank was doing that stood at a place, for errors.
        terms: What else has to be equal on all ranks, as plain data by name.

    Attributes:
        run: Name of this pass, on all ranks and nowhere else.
        stop: The step before which the pass stops, once :meth:`happens` has found it; until then None.

    Raises:
        ConfigurationError: An argument is out of range.
        RankMismatchError: The arguments differ between ranks.
        StreamError: Not all ranks came in time, or the store does not answer; the latter from all methods.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        *,
        label: str,
        first_step: int,
        keep: int = 64,
        timeout: float = 1800.0,
        group_size: int | None = None,
        describe: Callable[[int, str], str] = lambda rank, place: f"stood at {place[:200]}",
        terms: Mapping[str, Any] | None = None,
    ) -> None:
        usual = max(topology.num_replicas // _RANKS_A_STEP, 1)
        size = usual if group_size is None else as_int("group_size", group_size)
        first_step, keep = as_int("first_step", first_step), as_int("keep", keep)
        for name, value, least in (("first_step", first_step, 0), ("keep", keep, 1), ("group_size", size, 1)):
            if value < least:
                raise ConfigurationError(f"{name} must be at least {least}, got {value}.")
        self.topology, self.first_step, self.timeout, self._size = topology, first_step, timeout, size
        self.stop: int | None = None
        self._describe = describe
        self._places: list[str | Text] = []  # Not yet told of.
        self._announced = self._next = first_step
        self._told = self._complete = 0  # Groups.
        self._end: int | None = None
        self._failed = self._noticed = False
        ranks, terms = topology.num_replicas, dict(terms or {})
        terms.update(num_replicas=ranks, first_step=first_step, keep=keep, group_size=size)
        self._store = GroupStore(store, label, ranks)
        self.run = meet(self._store, topology, terms, _NAMES, timeout)
        self._messages = Ring(self._store, self.run, ranks, -(-keep // size) + _AHEAD)
        self._ends = Ring(self._store, self.run, ranks, 1, "ends")

    def horizon(self, step: int) -> int:
        """Below which step, beyond ``step``, this rank has to have announced its batches before it asks about it."""
        return self._first_of(self._group(step + 1) + 1)

    def announce(self, place: str | Text) -> None:
        """Say that this rank has the next batch, and stands at ``place`` after it; its large parts are said once.

        Raises:
            ConfigurationError: The rank has ended.
        """
        if self._end is not None:
            raise ConfigurationError(f"Rank {self.topology.rank} has ended at step {self._end} and has no next batch.")
        self._places.append(place)
        self._announced += 1
        self._tell()

    def announce_end(self, place: str | Text | None = None) -> None:
        """Say that this rank has no more batches.

        Args:
            place: Where it stands now that it knows; :meth:`gather_places` gives this if the pass stops here.
        """
        if self._end is not None:
            return
        end = self._announced
        if place is not None:
            self._ends.say(self.topology.rank, end, [place])
        self._store.settle(self._key("end"), end, lambda standing: end < standing)
        self._end = end
        self._tell()

    def happens(self, step: int) -> bool:
        """Whether ``step`` happens on all ranks; False if the pass stops before it. Waits until that is known.

        The answer is the same on all ranks. A step that all ranks have announced happens even if one has failed since:
        if that one hands over what it has announced before it raises, all break off at the same step.

        Raises:
            ConfigurationError: ``step`` lies before the first, or this rank has not announced up to :meth:`horizon`.
            StreamError: A rank's stream broke off before ``step``, or ranks did not announce it in time.
        """
        self._check(step)
        for group in range(self._group(self._next), self._group(step) + 1):
            if self._is_known(step):
                break
            self._next = max(self._next, self._first_of(group))
            self._tell()
            self._await(group, step)
        if self.stop is not None and self.stop <= step:
            return False
        self._next = max(self._next, step + 1)
        return True

    def places_at(self, step: int) -> list[str]:
        """Where every rank stands after all steps below ``step``, rank 0 first.

        At once: every rank has told of it before any could be handed its batch of the last of these steps.

        Raises:
            PositionError: Nothing is known of the step yet, or no longer.
            StreamError: The messages in the store are not of this pass.
        """
        group = self._group(step - 1)
        if not self.first_step < step or group >= self._complete:
            known = f"between {self.first_step} and {self._first_of(self._complete)}"
            raise PositionError(f"Where ranks stand is known {known}, not at step {step}; ask if it happens first.")
        number, told = step - self._first_of(group), self._messages.hear(group)
        if short := [rank for rank, places in enumerate(told) if len(places) < number]:
            raise PositionError(f"Ranks {short[:_MOST_NAMED]} end before step {step}, and so does the pass.")
        return [places[number - 1] for places in told]

    def gather_places(self, step: int) -> list[str | None]:
        """:meth:`places_at` for all ranks, which all call it, once a pass, at its end: rank 0 reads and passes it on.

        Of ranks that ended just there it gives the place that they stood at when they knew; None, where the pass stops
        before its first step, of those that did not.

        Raises:
            PositionError: On rank 0: nothing is known of the step yet, or no longer.
            StreamError: The messages in the store are not of this pass, or rank 0 did not pass them on.
        """
        ranks = range(self.topology.num_replicas)
        if not self.topology.rank:
            try:
                places = [] if step == self.first_step else self.places_at(step)
            except StatefulError as error:
                self._post_failure(step, f"Rank 0 could not gather the places at step {step}: {error}")
                raise
            ends = self._ends.find(step, ranks)
            gathered = [place if end is None else end[0] for place, end in zip_longest(places, ends)]
            self._store.say(self._key("gathered"), [step, gathered])
            return gathered

        def find() -> list[str | None] | None:
            self._read_notices(step)
            message = self._store.hear(self._key("gathered"))
            return message[1] if message is not None and message[0] == step else None

        if (passed_on := self._store.wait(find, self.timeout)) is not None:
            return passed_on
        raise StreamError(f"Rank 0 did not pass on the places at step {step} in {self.timeout:g} s: see its log.")

    def fail(self, error_text: str) -> None:
        """Say that this rank's stream raised: no step happens that it has not announced, and nobody waits for one.

        Raises nothing where the store does not answer: there is an error to raise already.
        """
        if self._failed:
            return
        with suppress(StreamError):
            self._tell()
            self._failed = True
            # Batches of which the others are not to know yet are given up.
            due = self._told <= self._group(self._next) + _LEAD
            step = self._announced if due else self._first_of(self._told)
            self._post_failure(
                step, f"The stream of rank {self.topology.rank} broke off before step {step}: {error_text}"
            )
            is_over = self._end is not None and self._group(self._end) < self._told
            if due and not is_over:
                self._tell_of(self._told)

    def _group(self, step: int) -> int:
        return (step - self.first_step) // self._size

    def _first_of(self, group: int) -> int:
        return self.first_step + group * self._size

    def _is_known(self, step: int) -> bool:
        return step < self._next or (self.stop is not None and self.stop <= step)

    def _key(self, name: str) -> str:
        return f"{self.run}/{name}"

    def _check(self, step: int) -> None:
        if step < self.first_step:
            raise ConfigurationError(f"The pass begins at step {self.first_step}; cannot ask about step {step}.")
        ended = self._failed or self._end is not None
        if not self._is_known(step) and not ended and self._announced < self.horizon(step):
            raise ConfigurationError(
                f"Rank {self.topology.rank} has to announce its batches below step {self.horizon(step)}, or its end, "
                f"before it asks about step {step}; it has announced those below step {self._announced}."
            )

    def _tell(self) -> None:
        """Tell the others of groups that are full, or at whose end this rank ends, unless that is too early."""
        while self._told <= self._group(self._next) + _LEAD and not self._failed:
            ends = self._end is not None and self._group(self._end) == self._told
            if len(self._places) < self._size and not ends:
                break
            self._tell_of(self._told, _NOTICE if ends else 0)

    def _tell_of(self, group: int, notice: int = 0) -> None:
        places, self._places = self._places[: self._size], self._places[self._size :]
        counter = self._key(f"told/{group % _COUNTERS}")
        self._messages.say(self.topology.rank, group, places)
        self._told = group + 1
        self._count(group, self._store.add(counter, 1 + notice))

    def _count(self, group: int, counter: int) -> None:
        # It has counted all ranks once for each of its groups that are complete.
        if counter % _NOTICE >= self.topology.num_replicas * (group // _COUNTERS + 1):
            self._complete = max(self._complete, group + 1)
        self._noticed = self._noticed or counter >= _NOTICE

    def _await(self, group: int, step: int) -> None:
        """Wait until ``group`` is complete; raise if ``step`` cannot be reached."""

        def find() -> bool | None:
            if self._complete <= group:
                self._count(group, self._counted(group))
            if self._noticed:
                self._read_notices(step)
            return True if self._complete > group or self._is_known(step) else None

        # The lowest rank that waits finds out who is late, and tells the others.
        patience = self.timeout + min(self.topology.rank * 0.05, 5.0)
        while self._store.wait(find, patience) is None:
            self._blame(group, step)

    def _counted(self, group: int) -> int:
        counter = self._store.look(self._key(f"told/{group % _COUNTERS}"))
        if counter is None and self._told > group:
            raise StreamError(
                f"Run {self.run} has been taken out of the store: the ranks have begun a newer pass under its label."
            )
        return int(counter or 0)

    def _read_notices(self, step: int) -> None:
        """Raise if a rank has failed up to ``step``; note where the pass stops, once nobody can end earlier."""
        failure = self._store.hear(self._key("failure"))
        if failure is not None and failure[0] <= step:
            raise StreamError(failure[1])
        end = self._store.hear(self._key("end"))
        if end is not None and self._group(end) < self._complete:
            self.stop = end

    def _post_failure(self, step: int, text: str) -> None:
        self._store.settle(self._key("failure"), [step, text[:4000]], lambda standing: step < standing[0])
        for number in range(_COUNTERS):
            self._store.add(self._key(f"told/{number}"), _NOTICE)

    def _blame(self, group: int, step: int) -> None:
        """Name the ranks that have kept ``group`` waiting, here and on all ranks that wait."""
        ranks = range(self.topology.num_replicas)
        late = [rank for rank, told in zip(ranks, self._messages.find(group, ranks), strict=True) if told is None]
        if not late:
            return
        # They have told of the group before, or nobody would wait for this one.
        stood = zip(late, self._messages.find(group - 1, late[:_MOST_NAMED]), strict=False)
        words = ((rank, self._describe(rank, told[-1]) if told else "nothing yet") for rank, told in stood)
        named = "".join(f"\n  - rank {rank}: {doing}" for rank, doing in words)
        text = (
            f"Step {step} was waited for in vain for {self.timeout:g} s: {len(late)} of {len(ranks)} ranks have not "
            f"announced their batch, among them{named}\nA slow shard, or a dead process? Look at their logs; if they "
            "are only slow, raise the timeout."
        )
        self._post_failure(step, text)
        raise StreamError(text)
