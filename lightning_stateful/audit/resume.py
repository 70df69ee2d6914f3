"""Whether a sampler or loader resumes exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_stateful.audit.elastic import check_even, check_resize
from lightning_stateful.audit.plan import Plan
from lightning_stateful.audit.result import AuditResult, Divergence
from lightning_stateful.audit.runs import Factory, Reference, Tally
from lightning_stateful.audit.samples import Key, identities
from lightning_stateful.audit.stops import Stop, Stops, check_held, record


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

    All ranks run in this process, one object a rank. Every state is loaded into fresh objects, which must yield the
    rest of the epoch and the same next epochs. The items of the uninterrupted run are held in memory.

    Args:
        factory: ``factory(num_replicas, rank)`` returns a fresh object with ``state_dict()``,
            ``load_state_dict(state)`` and ``__iter__``, always of the same configuration.
        num_replicas: Ranks of the run.
        num_epochs: Epochs of the run; each is one pass over the object.
        stops: After how many items of a rank, counted from the beginning of the run, a state is taken: numbers,
            ``"every"``, or ``"spread"`` for the beginning, the first item, a quarter, the middle, the last item and
            the end of every epoch.
        chain: Items between the kills of one run that is killed several times; by default a quarter of an epoch,
            nothing, and twice a quarter. ``()`` for none.
        resize: Numbers of ranks to resume on. Every sample of the epoch must be served once.
        key: What turns an item into the list of its samples' identities, for ``resize``.
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
    plan = Plan(
        factory=factory,
        num_replicas=num_replicas,
        num_epochs=num_epochs,
        chain=None if chain is None else tuple(chain),
        resize=tuple(resize),
        key=key,
        drop_last=drop_last,
        set_epoch=set_epoch,
        shared_state=shared_state,
        max_items=max_items,
    )
    tally = Tally()
    divergence = next(_checks(plan, stops, tally), None)
    return AuditResult(
        divergence=divergence,
        num_comparisons=tally.num_comparisons,
        num_resumes=tally.num_resumes,
        state_bytes=tally.state_bytes,
    )


def _checks(plan: Plan, stops: Stops, tally: Tally) -> Iterator[Divergence]:
    references = plan.observe(plan.num_replicas)
    yield from check_even(references)
    taken = []
    for run, reference in zip(plan.runs(plan.num_replicas), references, strict=True):
        found, divergence = record(run, reference, stops, tally)
        if divergence:
            yield divergence
        yield from check_held(found, run.rank)
        taken.append(found)
    yield from _suffixes(plan, references, taken, tally)
    yield from _chains(plan, references, tally)
    yield from check_resize(plan, references, taken[0], tally)


def _suffixes(plan: Plan, references: list[Reference], taken: list[list[Stop]], tally: Tally) -> Iterator[Divergence]:
    for rank, reference in enumerate(references):
        for stop in taken[0 if plan.shared_state else rank]:
            run = stop.resume(plan.run(plan.num_replicas, rank))
            tally.num_resumes += 1
            divergence = run.follow(reference, tally, law="suffix", stop=stop.num_items)
            if divergence:
                yield divergence


def _chains(plan: Plan, references: list[Reference], tally: Tally) -> Iterator[Divergence]:
    quarter = max(references[0].lengths[0] // 4, 1)
    legs = (quarter, 0, quarter, quarter) if plan.chain is None else plan.chain
    states: list[Any] = []
    place, done = (0, 0), 0
    for leg in (*legs, None) if legs else ():
        runs = plan.runs(plan.num_replicas)
        for run, state in zip(runs, states, strict=False):
            run.load(copy.deepcopy(state), place)
            tally.num_resumes += 1
        for run, reference in zip(runs, references, strict=True):
            while not run.is_done(reference) and (leg is None or run.num_items < leg):
                divergence = run.advance(reference, tally, law="suffix", stop=done)
                if divergence:
                    yield divergence
                    return
        place, done = references[0].after(runs[0].epoch, runs[0].step), done + runs[0].num_items
        states = [run.state() for run in (runs[:1] * len(runs) if plan.shared_state else runs)]
