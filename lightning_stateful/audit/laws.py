"""The laws that everything with a state obeys, one function a law."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_stateful.audit.compare import difference
from lightning_stateful.audit.result import AuditResult, Divergence
from lightning_stateful.audit.resume import check_resume
from lightning_stateful.audit.runs import Factory, Reference, Run, Tally, observe
from lightning_stateful.audit.samples import Key, identities
from lightning_stateful.audit.stops import Stop, Stops, check_held, record

_PLAIN = (bool, int, float, str, tuple, type(None))


class ContractError(AssertionError):
    """An object breaks a law of the contract.

    Attributes:
        divergence: Which law, where, what was expected and what was found.
    """

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


def check_fresh(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state loads into a new object, before ``iter()`` or after it, with the same effect.

    Args:
        make: ``make(num_replicas, rank)`` returns a fresh object, always of the same configuration.
        num_epochs: Passes over the object that are compared.
        stops: When states are taken, as in :func:`~lightning_stateful.audit.check_resume`.

    Raises:
        ContractError: The object breaks this law.

    Example:
        >>> from lightning_stateful import StatefulDistributedSampler
        >>> check_fresh(lambda num_replicas, rank: StatefulDistributedSampler(10, num_replicas, rank))
    """
    reference, taken = _record(make, num_epochs, stops)
    for stop in taken:
        late = Run(make, 1, 0)
        late.open()
        try:
            early = stop.resume(Run(make, 1, 0))
            stop.resume(late)
        except Exception as error:
            raise ContractError(
                _at(stop, "fresh", "a fresh object does not take the state", "no error", error)
            ) from error
        while early.epoch < num_epochs and early.num_items <= sum(reference.lengths):
            expected, got = early.next(), late.next()
            if difference(expected, got):
                what = f"loaded after iter() it goes on otherwise than before iter(): {difference(expected, got)}"
                raise ContractError(_at(stop, "fresh", what, expected, got))


def check_suffix(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A fresh object with the state of k items yields exactly the rest, then the same next epochs.

    Args, errors and example: as :func:`check_fresh`.
    """
    _demand(check_resume(make, num_epochs=num_epochs, stops=stops))


def check_echo(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """An object that has loaded a state gives it back, before and after ``iter()``.

    Args, errors and example: as :func:`check_fresh`.
    """
    for stop in _record(make, num_epochs, stops)[1]:
        run = stop.resume(Run(make, 1, 0))
        _demand_same(stop, "echo", "the state read back is not the one loaded", run.state())
        run.open()
        _demand_same(stop, "echo", "iter() changed the state", run.state())


def check_plain(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state is plain data that survives a JSON round trip unchanged.

    Args, errors and example: as :func:`check_fresh`.
    """
    for stop in _record(make, num_epochs, stops)[1]:
        try:
            back = json.loads(json.dumps(stop.state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ContractError(_at(stop, "plain", "the state is no JSON data", "plain data", error)) from error
        _demand_same(stop, "plain", "the state does not survive JSON", back)


def check_steady(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """A state has the same keys at every step.

    Args, errors and example: as :func:`check_fresh`.
    """
    _, taken = _record(make, num_epochs, stops)
    expected = sorted(_keys(taken[0].state, "state"))
    for stop in taken:
        for state in (stop.state, stop.resume(Run(make, 1, 0)).state()):
            got = sorted(_keys(state, "state"))
            if got != expected:
                raise ContractError(_at(stop, "steady", "the keys of the state are others here", expected, got))


def check_snapshot(make: Factory, *, num_epochs: int = 2, stops: Stops = "every") -> None:
    """Iterating on does not change a state that was taken, and loading does not change its argument.

    Args, errors and example: as :func:`check_fresh`.
    """
    reference, taken = _record(make, num_epochs, stops)
    for divergence in check_held(taken, 0):
        raise ContractError(divergence)
    for stop in taken:
        given = copy.deepcopy(stop.state)
        run = Run(make, 1, 0).load(given, stop.place)
        while run.epoch < num_epochs and run.num_items <= sum(reference.lengths):
            run.next()
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

    Raises:
        ContractError: The object breaks this law.
    """
    first, *others = (_record(make, num_epochs, stops, num_replicas, rank)[1] for rank in range(num_replicas))
    for rank, taken in enumerate(others, 1):
        for stop, other in zip(first, taken, strict=False):
            _demand_same(stop, "rank-free", f"the state of rank {rank} is not that of rank 0", other.state, rank)
    _demand(
        check_resume(
            make,
            num_replicas=num_replicas,
            num_epochs=num_epochs,
            stops=stops,
            resize=resize,
            key=key,
            drop_last=drop_last,
        )
    )


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
        make_other: Returns a fresh object of another configuration, which must refuse every state of ``make``'s and
            go on as if nothing had been tried. Without it only the settings are compared.
        settings: What an object's settings are; by default its length and those constructor arguments that it keeps
            under their names.
        num_epochs: As in :func:`check_fresh`.
        stops: As in :func:`check_fresh`.

    Raises:
        ContractError: The object breaks this law.
    """
    read = settings or read_settings
    _, taken = _record(make, num_epochs, stops)
    for stop in [*taken, *_record(make, num_epochs, "spread", 2, 1)[1]]:
        run = Run(make, 1, 0)
        before = read(run.source)
        loaded = read(stop.resume(run).source)
        run.next()
        for moment, now in (("loading a state", loaded), ("the first item after loading it", read(run.source))):
            what = difference(before, now, "settings")
            if what:
                raise ContractError(_at(stop, "not configuration", f"{moment} altered {what}", before, now))
    for stop in taken if make_other else ():
        _demand_refusal(stop, lambda num_replicas, rank: make_other(), read)  # type: ignore[misc]  # not None here


def read_settings(source: Any) -> dict[str, Any]:
    """The length of an object and the constructor arguments that it keeps under their names."""
    names = inspect.signature(type(source).__init__).parameters
    held = {name: value for name, value in getattr(source, "__dict__", {}).items() if name in names}
    # Datasets and functions are the same if they are the same object.
    plain = {name: value if isinstance(value, _PLAIN) else id(value) for name, value in held.items()}
    return {"len()": _length(source), **plain}


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:  # None of its own, or none that is known.
        return None


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


def _record(
    make: Factory, num_epochs: int, stops: Stops, num_replicas: int = 1, rank: int = 0
) -> tuple[Reference, list[Stop]]:
    reference = observe(Run(make, num_replicas, rank), num_epochs)
    taken, divergence = record(Run(make, num_replicas, rank), reference, stops, Tally())
    if divergence:
        raise ContractError(divergence)
    return reference, taken


def _demand(result: AuditResult) -> None:
    if result.divergence:
        raise ContractError(result.divergence)


def _demand_same(stop: Stop, law: str, complaint: str, got: Any, rank: int = 0) -> None:
    what = difference(stop.state, got, "state")
    if what:
        raise ContractError(_at(stop, law, f"{complaint}: {what}", stop.state, got, rank))


def _demand_refusal(stop: Stop, make: Factory, read: Callable[[Any], Any]) -> None:
    untouched, run = Run(make, 1, 0), Run(make, 1, 0)
    settings = read(run.source)
    try:
        run.source.load_state_dict(copy.deepcopy(stop.state))
    except Exception:
        before = [settings, untouched.state(), untouched.next()]
        after = [read(run.source), run.state(), run.next()]
    else:
        what = "an object of another configuration took the state instead of refusing it"
        raise ContractError(_at(stop, "not configuration", what, "an error", run.state()))
    what = difference(before, after, "[settings, state, first item]")
    if what:
        raise ContractError(_at(stop, "not configuration", f"a refused state left traces: {what}", before, after))


def _at(stop: Stop, law: str, what: str, expected: Any, got: Any, rank: int = 0) -> Divergence:
    epoch, step = stop.place
    return Divergence(
        law=law, what=what, epoch=epoch, step=step, rank=rank, stop=stop.num_items, expected=expected, got=got
    )


def _keys(value: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _keys(item, f"{path}[{key!r}]")
