"""Checks for exact resumes: ``check_resume``, and the laws that everything with a state obeys, one function a law.

All laws take the arguments of :func:`check_fresh` and raise a :class:`ContractError` where an object breaks them.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stateful.audit.compare import Key, difference, identities
from lightning_stateful.audit.elastic import check_apart, check_even, check_resize
from lightning_stateful.audit.runner import ContractError, Divergence, Factory, Recorder, Recording, Stop, Stops
from lightning_stateful.errors import ConfigurationError

_PLAIN = (bool, int, float, str, tuple, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The outcome of :func:`check_resume`; true if everything agreed.

    Attributes:
        divergence: The first difference, or None.
        num_comparisons: Items that were compared with those of the uninterrupted run.
        num_resumes: Fresh objects that a state was loaded into.
        state_bytes: Size of the largest state, as JSON where it is plain data and pickled where it is not.
    """

    divergence: Divergence | None
    num_comparisons: int
    num_resumes: int
    state_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there was no difference."""
        return self.divergence is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        tally = (
            f"{self.num_resumes} resumes, {self.num_comparisons} items compared, states up to {self.state_bytes} bytes"
        )
        return f"Resumes exactly: {tally}." if self.ok else f"Does not resume exactly ({tally}).\n{self.divergence}"


def check_resume(
    factory: Factory,
    *,
    num_replicas: int = 1,
    num_epochs: int = 2,
    stops: Stops = "spread",
    chain: Sequence[int] | None = None,
    resize: Sequence[int] = (),
    key: Key = identities,
    drop_last: bool = False,
    set_epoch: bool = False,
    shared_state: bool = True,
    max_items: int | None = None,
) -> AuditResult:
    """Compare runs that are stopped and resumed with one that is not, item by item.

    All ranks run in this process, one object a rank and without a process group. Every state is loaded into fresh
    objects, which must yield the rest of the epoch and the same next epochs. The items of the uninterrupted run are
    held in memory. A setting that the state leaves out does not show here, because the factory's objects have one
    configuration; :func:`check_not_configuration` compares two.

    Args:
        factory: ``factory(num_replicas, rank)`` returns a fresh object for that rank with ``state_dict()``,
            ``load_state_dict(state)`` and ``__iter__``, always of the same configuration.
        num_replicas: Ranks of the run.
        num_epochs: Epochs of the run; each is one pass over the object.
        stops: After how many items of a rank, counted from the beginning of the run, a state is taken: numbers,
            ``"every"``, or ``"spread"`` for the beginning, the first item, a quarter, the middle, the last item and
            the end of every epoch.
        chain: For one more run, which is killed and resumed several times: the items of a rank between two kills. By
            default ``(q, 0, q, q)``, where ``q`` is a quarter of the first epoch; ``()`` for no such run.
        resize: Numbers of ranks to resume on. Before and after the stop together, every sample of the epoch must be
            served as often as in a whole epoch on one rank.
        key: A function from an item to the list of its samples' identities, for ``resize`` and to name samples. The
            default reads integers and strings, tensors and arrays of integers, and lists of these.
        drop_last: Whether a run on another number of ranks may leave out less than a step's samples.
        set_epoch: Whether to call ``set_epoch(epoch)`` before every pass, as Lightning does.
        shared_state: Restore rank 0's state on every rank, as Lightning does; False for each rank its own.
        max_items: Items of a rank after which the run is over, for iterables without an end.

    Returns:
        What was found: true if nothing diverged. A divergence is never raised.

    Raises:
        ConfigurationError: An argument is out of range, or the factory's object is not stateful.
        Exception: Whatever the factory and its objects raise, with a note that says where (from Python 3.11 on).

    Example:
        >>> from lightning_stateful import StatefulDistributedSampler, check_resume
        >>> result = check_resume(lambda num_replicas, rank: StatefulDistributedSampler(100, num_replicas, rank))
        >>> result.ok
        True
    """
    numbers = {"num_replicas": num_replicas, "num_epochs": num_epochs, "resize": min(resize, default=1)}
    for name, value in {**numbers, "max_items": 1 if max_items is None else max_items}.items():
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}.")
    if min(chain or (), default=0) < 0:
        raise ConfigurationError(
            f"chain must be numbers from 0, got {[number for number in chain or () if number < 0]}."
        )
    if resize and max_items is not None:
        raise ConfigurationError("resize compares whole epochs; leave max_items out, or resize=().")
    recorder = Recorder.of(factory, set_epoch=set_epoch, max_items=max_items)
    divergence = None
    try:
        recordings = recorder.observe(num_replicas, num_epochs)
        check_even(recordings)
        check_apart(recordings)
        stopped = [recorder.record(num_epochs, stops, num_replicas, rank) for rank in range(num_replicas)]
        for rank, recording in enumerate(stopped):
            demand_unchanged(recording, rank)
        for rank in range(num_replicas):
            for stop in stopped[0 if shared_state else rank].stops:
                followed, _ = recorder.resume(recordings, rank, stop)
                recorder.demand_equal("suffix", recordings, rank, stop.place, followed, stop=stop.num_items, key=key)
        _check_chain(recorder, recordings, chain, shared_state=shared_state, key=key)
        if resize:
            check_resize(recorder, recordings, stopped[0].stops, resize, key=key, drop_last=drop_last)
    except ContractError as error:
        divergence = error.divergence
    return AuditResult(
        divergence=divergence,
        num_comparisons=recorder.num_comparisons,
        num_resumes=recorder.num_resumes,
        state_bytes=recorder.state_bytes,
    )


def _check_chain(
    recorder: Recorder, recordings: Sequence[Recording], chain: Sequence[int] | None, *, shared_state: bool, key: Key
) -> None:
    """Kill one run several times, each time after so many more items."""
    quarter = max(recordings[0].lengths[0] // 4, 1)
    legs = (quarter, 0, quarter, quarter) if chain is None else chain
    states: list[Any] = []
    start, done = (0, 0), 0
    for leg in (*legs, None) if legs else ():
        runs = [recorder.run(len(recordings), rank) for rank in range(len(recordings))]
        for run, state in zip(runs, states, strict=False):
            recorder.num_resumes += 1
            run.load(copy.deepcopy(state), start)
        for rank, run in enumerate(runs):
            followed = run.follow(recordings[rank].from_place(start), leg)
            recorder.demand_equal("suffix", recordings, rank, start, followed, stop=done, key=key)
        done += leg or 0
        start = recordings[0].resumed_at(runs[0].place)
        states = [run.state() for run in (runs[:1] * len(runs) if shared_state else runs)]


def check_fresh(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state loads into a new object, before ``iter()`` or after it, with the same effect.

    Args:
        make: ``make(num_replicas, rank)`` returns a fresh object, always of the same configuration. A
            :class:`~lightning_stateful.audit.runner.Recorder` of such a function spares several laws the same runs.
        num_epochs: Passes over the object that are compared.
        stops: When states are taken, as in :func:`~lightning_stateful.audit.check_resume`.

    Raises:
        ContractError: The object breaks this law.

    Example:
        >>> from lightning_stateful import StatefulDistributedSampler
        >>> check_fresh(lambda num_replicas, rank: StatefulDistributedSampler(10, num_replicas, rank))
    """
    recorder = Recorder.of(make)
    for stop in recorder.record(num_epochs, stops).stops:
        late = recorder.run()
        late.open()
        recordings = recorder.observe(1, num_epochs)
        try:
            before, _ = recorder.resume(recordings, 0, stop)
            after = recorder.load(stop, late).follow(recordings[0].from_place(stop.place))
        except Exception as error:
            what = "a fresh object does not take the state, or does not go on with it"
            raise _broken(stop, "fresh", what, "no error", error) from error
        items = [[*recordings[0].from_place(stop.place)[: way.num_equal], *way.rest] for way in (before, after)]
        for expected, got in zip(*items, strict=False):
            found = difference(expected, got)
            if found:
                what = f"loaded after iter() it goes on otherwise than before iter(): {found}"
                raise _broken(stop, "fresh", what, expected, got)


def check_suffix(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A fresh object with the state of k items yields exactly the rest, then the same next epochs."""
    _demand(check_resume(make, num_epochs=num_epochs, stops=stops))


def check_echo(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """An object that has loaded a state gives it back, before and after ``iter()``."""
    recorder = Recorder.of(make)
    for stop in recorder.record(num_epochs, stops).stops:
        run = recorder.load(stop, recorder.run())
        _demand_same(stop, "echo", "the state read back is not the one loaded", run.state())
        run.open()
        _demand_same(stop, "echo", "iter() changed the state", run.state())


def check_plain(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state is plain data that survives a JSON round trip unchanged."""
    for stop in Recorder.of(make).record(num_epochs, stops).stops:
        try:
            back = json.loads(json.dumps(stop.state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise _broken(stop, "plain", "the state is no JSON data", "plain data", error) from error
        _demand_same(stop, "plain", "the state does not survive JSON", back)


def check_steady(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state has the same keys at every step."""
    recorder = Recorder.of(make)
    taken = recorder.record(num_epochs, stops).stops
    expected = sorted(_keys(taken[0].state, "state"))
    for stop in taken:
        for state in (stop.state, recorder.load(stop, recorder.run()).state()):
            got = sorted(_keys(state, "state"))
            if got != expected:
                raise _broken(stop, "steady", "the keys of the state are others here", expected, got)


def check_snapshot(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """Iterating on does not change a state that was taken, and loading does not change its argument."""
    recorder = Recorder.of(make)
    recording = recorder.record(num_epochs, stops)
    demand_unchanged(recording, 0)
    for stop in recording.stops:
        _, given = recorder.resume(recorder.observe(1, num_epochs), 0, stop)
        _demand_same(stop, "snapshot", "loading a state, and iterating on, changed the state that was given", given)


def check_rank_free(
    make: Factory,
    *,
    num_epochs: int = 2,
    stops: Stops = "every",
    num_replicas: int = 2,
    resize: Sequence[int] = (1, 3),
    key: Key = identities,
    drop_last: bool = False,
) -> None:
    """States are equal on all ranks, and serve any number of ranks: every sample of the epoch once.

    Args:
        make: As in :func:`check_fresh`.
        num_epochs: As in :func:`check_fresh`.
        stops: As in :func:`check_fresh`.
        num_replicas: Ranks of the run that is stopped.
        resize: Numbers of ranks to resume on.
        key: What turns an item into the list of its samples' identities.
        drop_last: Whether less than a step's samples may be left out on another number of ranks.
    """
    recorder = Recorder.of(make)
    first, *others = (recorder.record(num_epochs, stops, num_replicas, rank) for rank in range(num_replicas))
    for rank, recording in enumerate(others, 1):
        for stop, other in zip(first.stops, recording.stops, strict=False):
            _demand_same(stop, "rank-free", f"the state of rank {rank} is not that of rank 0", other.state, rank)
    result = check_resume(
        recorder,
        num_replicas=num_replicas,
        num_epochs=num_epochs,
        stops=stops,
        resize=resize,
        key=key,
        drop_last=drop_last,
    )
    _demand(result)


def check_not_configuration(
    make: Factory,
    *,
    make_other: Callable[[], Any] | None = None,
    settings: Callable[[Any], Any] | None = None,
    num_epochs: int = 2,
    stops: Stops = "every",
) -> None:
    """Loading a state never alters a setting, and a state of another configuration is refused.

    Args:
        make: As in :func:`check_fresh`.
        num_epochs: As in :func:`check_fresh`.
        stops: As in :func:`check_fresh`.
        make_other: Returns a fresh object of another configuration, such as another seed, which must refuse every state
            of ``make``'s and go on as if nothing had been tried. This shows a setting that the state leaves out.
            Without it only the settings are compared.
        settings: What an object's settings are; by default its length and those constructor arguments that it keeps
            under their names.
    """
    recorder, read = Recorder.of(make), settings or read_settings
    taken = recorder.record(num_epochs, stops).stops
    for stop in [*taken, *recorder.record(num_epochs, "spread", 2, 1).stops]:
        run = recorder.run()
        before = read(run.source)
        loaded = read(recorder.load(stop, run).source)
        run.next()
        for moment, now in (("loading a state", loaded), ("the first item after loading it", read(run.source))):
            found = difference(before, now, "settings")
            if found:
                raise _broken(stop, "not configuration", f"{moment} altered {found}", before, now)
    for stop in taken if make_other else ():
        _demand_refusal(stop, Recorder(lambda num_replicas, rank: make_other()), read)  # type: ignore[misc]  # not None


def read_settings(source: Any) -> dict[str, Any]:
    """The length of an object and the constructor arguments that it keeps under their names."""
    names = inspect.signature(type(source).__init__).parameters
    held = {name: value for name, value in getattr(source, "__dict__", {}).items() if name in names}
    # Datasets and functions are the same if they are the same object.
    plain = {name: value if isinstance(value, _PLAIN) else id(value) for name, value in held.items()}
    try:
        return {"len()": len(source), **plain}
    except TypeError:  # it has no length, or none that is known
        return {"len()": None, **plain}


LAWS: dict[str, Callable[..., None]] = {
    "fresh": check_fresh,
    "suffix": check_suffix,
    "echo": check_echo,
    "plain": check_plain,
    "steady": check_steady,
    "snapshot": check_snapshot,
    "rank-free": check_rank_free,
    "not configuration": check_not_configuration,
}
# What usually breaks a law, where it is not found by looking at the items.
_CAUSES = {
    "fresh": "The position is read in iter(): read it at the first item, so that a state loaded after iter() counts.",
    "echo": "state_dict() tells what this object has iterated, or iter() begins anew: a loaded state counts at once.",
    "plain": "A state holds numbers, strings, lists and dicts with strings as keys; no tuples, tensors or objects.",
    "steady": "A key is written only once it is needed: write it always, and empty.",
    "snapshot": "The object shares its own dict or list with the caller: copy in state_dict() and load_state_dict().",
    "rank-free": "The state holds what belongs to one rank: save only what is equal on all, such as a common count.",
    "not configuration": "load_state_dict() must compare the settings in the state first, and raise; it applies none.",
}


def demand_unchanged(recording: Recording, rank: int) -> None:
    """Raise if a state changed after it had been taken."""
    for stop in recording.stops:
        complaint = "iterating on changed a state that had been taken before"
        _demand_same(stop, "snapshot", complaint, stop.held, rank)


def _demand(result: AuditResult) -> None:
    if result.divergence:
        raise ContractError(result.divergence)


def _demand_same(stop: Stop, law: str, complaint: str, got: Any, rank: int = 0) -> None:
    found = difference(stop.state, got, "state")
    if found:
        raise _broken(stop, law, f"{complaint}: {found}", stop.state, got, rank)


def _demand_refusal(stop: Stop, recorder: Recorder, read: Callable[[Any], Any]) -> None:
    untouched, run = recorder.run(), recorder.run()
    settings = read(run.source)
    try:
        run.source.load_state_dict(copy.deepcopy(stop.state))
    except Exception:
        before = [settings, untouched.state(), untouched.next()]
        after = [read(run.source), run.state(), run.next()]
    else:
        what = "an object of another configuration took the state instead of refusing it"
        raise _broken(stop, "not configuration", what, "an error", run.state())
    found = difference(before, after, "[settings, state, first item]")
    if found:
        raise _broken(stop, "not configuration", f"a refused state left traces: {found}", before, after)


def _broken(stop: Stop, law: str, what: str, expected: Any, got: Any, rank: int = 0) -> ContractError:
    epoch, step = stop.place
    found = {"law": law, "what": what, "expected": expected, "got": got, "cause": _CAUSES[law]}
    return ContractError(Divergence(epoch=epoch, step=step, rank=rank, stop=stop.num_items, **found))


def _keys(value: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _keys(item, f"{path}[{key!r}]")
