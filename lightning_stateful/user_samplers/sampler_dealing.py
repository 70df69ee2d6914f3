"""Finds out how the items of a user's sampler come to ranks: dealt out, or as each rank's own sampler yields them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_stateful.errors import RankMismatchError
from lightning_stateful.sampler_copies.sampler_copy import held_at
from lightning_stateful.sampler_copies.sampler_facts import Dealing, RankDraws
from lightning_stateful.sampler_copies.sampler_ranks import (
    AskedRanks,
    is_given_ranks,
    name_of_rank,
    numbers_in,
    ranks_held,
    settings_of,
    settings_of_one_rank,
    told,
    yields_as_one,
)
from lightning_stateful.sampler_copies.shared_objects import SharedObjects
from lightning_stateful.sampler_copies.written_files import WrittenFiles
from lightning_stateful.samplers.rank_exchange import exchanged, kinds_drawn_apart
from lightning_stateful.user_samplers.sampler_check import check_sampler
from lightning_stateful.user_samplers.sampler_trial import COMPARED, PATIENCE, fresh_copy
from lightning_stateful.user_samplers.user_sampler import UserSampler


def deal(order: UserSampler, num_replicas: int, rank: int, *, is_given: bool = False) -> Dealing:
    """Find out whether the ranks' samplers yield one sequence, to be dealt out, or sequences of their own.

    Processes of a group compare what their samplers yield. Where a sampler knows its rank, it is dealt out only if the
    simulated sequences of all ranks have together what a single rank's has, in two epochs.

    The number of ranks ``is_given`` by a Trainer, which deals samplers out.

    Raises:
        RankMismatchError: The samplers yield other items, though they know of no ranks; or other numbers of items.
    """
    inner = order.innermost
    if order.is_known and type(inner) is DistributedSampler:
        if (inner.num_replicas, inner.rank) == (num_replicas, rank) and order.is_dealt_out:
            return Dealing(settings=tuple(settings_of_one_rank(inner, by_dataset=True)))
        return Dealing(is_own=not order.is_dealt_out or (num_replicas > 1 and not order.is_wrapped))
    if num_replicas == 1 or order.is_known or not order.is_dealt_out:
        return Dealing(is_own=not order.is_dealt_out, begins=order.facts.sequence)
    facts, draws = order.facts, draws_of(order, rank)
    knows = is_given_ranks(order.sampler) or facts.asks
    alone = _prove(order, num_replicas, rank) if knows else None
    is_dealt = order.is_wrapped or is_given or order.memory.is_in_trainer
    if draws is not None and "held" in draws.kinds and not is_dealt:
        # In plain loops torch deals nothing out, and one that is seeded by rank knows it by that.
        knows = True
    draws = draws if knows and alone is None else None
    if draws is not None:
        facts = replace(order, draws=draws).facts
    report = {
        "rank": rank,
        "name": order.name,
        "knows": knows,
        "marks": {str(count): mark for count, mark in facts.marks.items()},
        "length": facts.length,
        "sequence": facts.sequence,
        "numbers": numbers_in(order.sampler),
        "alone": None if alone is None else alone.begins,
        "error": facts.error,
    }
    found = exchanged(f"sampler {order.name}", report) or [report]
    by_rank = [next((of for of in found if of["rank"] == number), None) for number in range(num_replicas)]
    reports = [of for of in by_rank if of is not None]
    if all(of["alone"] is not None and of["alone"] == reports[0]["alone"] for of in reports) and alone is not None:
        return alone
    # Of other ranks nothing is known without a process group.
    is_alike = all(_alike(of, reports[0]) for of in reports) and (len(reports) == num_replicas or not knows)
    is_alike = "nondeterministic" in order.accept or (is_alike and not any(of["error"] for of in reports))
    if is_alike and (order.is_wrapped or not any(of["knows"] for of in reports)):
        return Dealing(begins=facts.sequence)
    held = name_of_rank([of["numbers"] for of in reports]) if len(reports) == num_replicas else None
    if not any(of["knows"] for of in reports) and held is None:
        raise RankMismatchError(_differ(order, reports))
    lengths = [of["length"] for of in reports]
    if len({order.rule(1).num_steps(length) for length in lengths if length is not None}) > 1:
        raise RankMismatchError(
            f"{order.name} deals out to ranks by itself, and gives them other numbers of items ({lengths}), so that a "
            "rank would wait for ever for the others. Give all ranks the same number."
        )
    note = (
        f"{order.name} deals out to ranks by itself, and what one rank would yield is not provably what all yield "
        f"together: each of the {num_replicas} ranks iterates its own, where Lightning, left to deal out, would divide "
        "its share once more. A resume needs as many ranks."
    )
    begins = [of["sequence"] for of in reports]
    if draws is None:
        return Dealing(is_own=True, begins=begins, note=note)
    if "held" in draws.kinds:
        note = (
            f"{order.name} holds random generators that are seeded otherwise on each rank: each iterates its own, as "
            f"in torch, and draws by (seed {order.seed}, rank, epoch). A resume needs as many ranks."
        )
    return Dealing(is_own=True, draws=draws, facts=facts, begins=begins, note=note)


def draws_of(order: UserSampler, rank: int) -> RankDraws | None:
    """What each rank draws for itself in torch, as generators stand otherwise there; processes ask together."""
    kinds = kinds_drawn_apart(f"sampler {order.name}", generators_of(order))
    return RankDraws(rank, kinds) if kinds else None


def generators_of(order: UserSampler) -> list[Any]:
    """The random generators that a sampler holds, and those outside of it that its code reaches."""
    memory = order.memory
    held = [held_at(order.sampler, path) for path in sorted(memory.generators, key=repr)]
    return held + [state.generator for _, state in memory.generators_outside(order.sampler, order.dataset)]


def _beginning_in(report: Any) -> str:
    marks: dict[str, str] = report["marks"]
    return next((marks[count] for count in reversed(marks) if int(count) <= COMPARED), "")


def _alike(one: Any, other: Any) -> bool:
    # Endless samplers are drawn as far as on the other rank.
    counts = one["marks"].keys() & other["marks"].keys()
    return bool(one["length"] == other["length"] and all(one["marks"][n] == other["marks"][n] for n in counts))


def _differ(order: UserSampler, reports: list[Any]) -> str:
    if failed := [f"rank {of['rank']}: {of['error']}" for of in reports if of["error"]]:
        said = f"{order.name} cannot be tried before training ({'; '.join(failed)}), so that ranks cannot be compared."
    else:
        begins = ", ".join(f"rank {of['rank']}: {_beginning_in(of)} of {of['length']}" for of in reports)
        said = f"{order.name} yields other items on other ranks (digests of how they begin: {begins})."
    return (
        f"{said} Its items are dealt out to ranks, so some samples would come twice and others never. Build it with "
        "the same data and seed on every rank (mind random splits without a seed, and the order of sets of strings, "
        "which PYTHONHASHSEED decides: sort them). If each rank is to iterate its own, say so: "
        "Trainer(use_distributed_sampler=False), or patch_dataloader(loader, num_replicas=1, rank=0)."
    )


def _prove(order: UserSampler, num_replicas: int, rank: int) -> Dealing | None:
    """The way to tell a sampler of one rank, if that is proven to yield what all ranks yield together; else None."""
    facts, held = order.facts, ranks_held(order.sampler)
    if facts.cannot_be_tried or facts.length is None or facts.seconds * 2 * (num_replicas + 1) > PATIENCE:
        return None
    if held not in (None, (num_replicas, rank)):
        return None
    with suppress(Exception), SharedObjects(order.sampler, order.dataset), WrittenFiles():
        told_of = [
            [
                _items(order, partial(settings_of, num_replicas=num_replicas, rank=r), num_replicas, r, epoch)
                for r in range(num_replicas)
            ]
            for epoch in range(2)
        ]
        for by_dataset in (True, False):
            choose = partial(settings_of_one_rank, by_dataset=by_dataset)
            ones = [_items(order, choose, 1, 0, epoch) for epoch in range(2)]
            # Those that torch and Lightning leave to their ranks may have data there that others lack.
            in_turn = isinstance(order.sampler, DistributedSampler) and not order.is_wrapped
            if all(yields_as_one(ranks, one, in_turn=in_turn) for ranks, one in zip(told_of, ones, strict=True)):
                settings, alone = tuple(choose(order.sampler)), check_sampler(order, choose)
                with told(settings):
                    # They can be set on the sampler itself.
                    note = "It is told that there is one rank, which provably yields what all ranks yield together."
                    return Dealing(settings=settings, answers=facts.asks, facts=alone, begins=alone.sequence, note=note)
    return None


def _items(order: UserSampler, choose: Any, num_replicas: int, rank: int, epoch: int) -> list[Any]:
    """All items of an epoch of a copy that is told of a rank."""
    tried = fresh_copy(order, choose, AskedRanks(num_replicas, rank) if order.facts.asks else None)
    items = tried.begin(epoch, 0)
    with tried.entered():
        return list(items)
