"""Every sample of an epoch once, whatever the numbers of ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from lightning_stateful.audit.compare import difference
from lightning_stateful.audit.plan import Plan
from lightning_stateful.audit.result import END, Divergence
from lightning_stateful.audit.runs import Reference, Run, Tally, observe
from lightning_stateful.audit.stops import Stop


def check_even(references: Sequence[Reference]) -> Iterator[Divergence]:
    """Ranks that would wait for each other for ever."""
    expected = references[0].lengths
    for rank, reference in enumerate(references):
        for epoch, (wanted, found) in enumerate(zip(expected, reference.lengths, strict=False)):
            if wanted != found:
                what = f"rank {rank} has {found} items and rank 0 has {wanted}; a collective would hang"
                yield Divergence(
                    law="even", what=what, epoch=epoch, step=None, rank=rank, stop=None, expected=wanted, got=found
                )


def check_resize(plan: Plan, references: list[Reference], taken: list[Stop], tally: Tally) -> Iterator[Divergence]:
    """Resume rank 0's states on the plan's other numbers of ranks."""
    if not plan.resize:
        return
    alone = observe(plan.run(1, 0), plan.num_epochs)
    batches = [[plan.key(item) for item in items[:-1]] for items in alone.passes]
    largest = max((len(batch) for epoch in batches for batch in epoch), default=0)
    due = [[identity for batch in epoch for identity in batch] for epoch in batches]
    for num_replicas in plan.resize:
        # One epoch more, because the resumed run may have gone on to it.
        others = [observe(run, plan.num_epochs + 1) for run in plan.runs(num_replicas)]
        yield from check_even(others)
        for item in others[0].passes[0][:-1]:
            largest = max(largest, len(plan.key(item)))
        for stop in taken:
            epoch, step = stop.place
            # An epoch without a step says nothing on where the next one begins.
            if epoch < plan.num_epochs and references[0].lengths[epoch]:
                ledger = Ledger(plan, due[epoch], epoch, largest, stop.num_items)
                yield from ledger.enter([reference.passes[epoch][:step] for reference in references])
                yield from _resume_elsewhere(plan, ledger, stop, others, tally)
    yield from _history(plan, Ledger(plan, due[0], 0, largest), tally)


class Ledger:
    """What an epoch owes, and what it has served on all its ranks.

    Args:
        plan: Names the samples of an item.
        due: The samples of the epoch on one rank.
        epoch: Which epoch.
        largest: Samples of the largest item.
        stop: After how many items the run was stopped.
    """

    def __init__(self, plan: Plan, due: Sequence[Hashable], epoch: int, largest: int, stop: int | None = None) -> None:
        self.plan = plan
        self.epoch = epoch
        self.stop = stop
        self.num_due = len(due)
        self._due = Counter(due)
        self._served: Counter[Hashable] = Counter()
        self._largest = largest

    def enter(self, table: Sequence[Sequence[Any]]) -> Iterator[Divergence]:
        """Enter ``table[rank][step]``, what the ranks were given from where the last entry ended."""
        lengths = [len(items) for items in table]
        if len(set(lengths)) > 1:
            yield self._blame("even", f"the {len(table)} ranks were given {lengths} items", lengths[0], lengths)
        for step, items in enumerate(zip(*table, strict=False)):
            surplus: list[tuple[int, Hashable]] = []
            for rank, item in enumerate(items):
                surplus += [(rank, identity) for identity in self.plan.key(item) if self._serve(identity)]
            # Ranks left without a sample repeat one, in the very last step.
            if surplus and (self.missing or self.plan.drop_last or len(surplus) >= len(table)):
                rank, identity = surplus[0]
                what = f"sample {identity!r} was served once too often, in step {step} on {len(table)} ranks"
                yield self._blame("rank-free", what, self._due[identity], self._served[identity], step=step, rank=rank)

    def _serve(self, identity: Hashable) -> bool:
        self._served[identity] += 1
        # With drop_last the epoch on one rank may have left out what comes now.
        new = self.plan.drop_last and identity not in self._due
        return self._served[identity] > (1 if new else self._due[identity])

    @property
    def missing(self) -> Counter[Hashable]:
        """Samples that are due and have not been served."""
        return self._due - self._served

    def may_end(self, num_replicas: int) -> bool:
        """Whether what is missing is less than a step, and may be left out."""
        return self.plan.drop_last and self.missing.total() < self._largest * num_replicas

    def close(self, num_replicas: int) -> Iterator[Divergence]:
        """Look for what was never served."""
        missing = self.missing
        if missing and not self.may_end(num_replicas):
            identity = next(iter(missing))
            what = f"{missing.total()} samples were never served on {num_replicas} ranks, for example {identity!r}"
            if not self.plan.drop_last:
                what += " (if the last incomplete step is meant to be left out, pass drop_last=True)"
            yield self._blame("rank-free", what, self._due[identity], self._served[identity])

    def _blame(
        self, law: str, what: str, expected: Any, got: Any, *, step: int | None = None, rank: int | None = None
    ) -> Divergence:
        return Divergence(
            law=law, what=what, epoch=self.epoch, step=step, rank=rank, stop=self.stop, expected=expected, got=got
        )


def _resume_elsewhere(
    plan: Plan, ledger: Ledger, stop: Stop, others: list[Reference], tally: Tally
) -> Iterator[Divergence]:
    runs = [stop.resume(run) for run in plan.runs(len(others))]
    tally.num_resumes += len(runs)
    table = [_take(run, ledger.num_due + 1) for run in runs]
    epoch, step = stop.place
    following = [reference.passes[epoch + 1][:-1] for reference in others]
    if step and plan.drop_last and not difference(following, table):
        # Less than a step was left, so that the resumed run began with the next epoch at once.
        for run in runs:
            run.epoch += 1
    else:
        yield from ledger.enter(table)
    yield from ledger.close(len(runs))
    for run, reference in zip(runs, others, strict=True):
        divergence = run.follow(reference, tally, law="rank-free", stop=stop.num_items)
        if divergence:
            yield divergence


def _history(plan: Plan, ledger: Ledger, tally: Tally) -> Iterator[Divergence]:
    """One step on every number of ranks in turn, and the rest of the epoch on the last one."""
    state: Any = None
    *firsts, last = (plan.num_replicas, *plan.resize)
    for number, num_replicas in enumerate((*firsts, last)):
        if ledger.may_end(num_replicas):
            break
        runs = plan.runs(num_replicas)
        if number:
            ledger.stop = number
            tally.num_resumes += len([run.load(copy.deepcopy(state), (0, number)) for run in runs])
        limit = 1 if number < len(firsts) else ledger.num_due + 1
        yield from ledger.enter([_take(run, limit) for run in runs])
        state = runs[0].state()
        if runs[0].next() is END:
            break
    yield from ledger.close(num_replicas)


def _take(run: Run, limit: int) -> list[Any]:
    """Up to ``limit`` items of the present pass."""
    items: list[Any] = []
    while len(items) < limit and (not items or items[-1] is not END):
        items.append(run.next())
    return [item for item in items if item is not END]
