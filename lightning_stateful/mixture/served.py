"""Counts of what a mixture has served of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stateful.core.seeding import Label
from lightning_stateful.mixture.sources import Sources, number_of_pass

# Of each source the passes over it: pairs of its number and the samples that were served of it.
Passes = Mapping[str, Sequence[tuple[int, int]]]


def passes_of(
    sources: Sources, served: Sequence[tuple[tuple[Label, ...], Sequence[int]]]
) -> dict[str, list[tuple[int, int]]]:
    """Divide samples served into passes.

    Args:
        sources: The datasets.
        served: Runs through all of them, one for each cycle of an epoch: labels that their orders are derived from, and
            the samples that were served of each source, whose passes begin with the run.
    """
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in sources.names}
    for labels, counts in served:
        for name, length, samples in zip(sources.names, sources.lengths, counts, strict=True):
            whole, rest = divmod(samples, length)
            numbers = [number_of_pass(number, ("mixture", *labels)) for number in range(whole + (rest > 0))]
            sizes = [length] * whole + [rest] * (rest > 0)
            found[name] += zip(numbers, sizes, strict=True)
    return found


def report_of(sources: Sources, tokens: Sequence[int] | None, passes: Passes) -> dict[str, Any]:
    """Samples, passes ("epochs"), share of samples and, if known, tokens of each of the ``sources``."""
    served = [sum(samples for _, samples in passes[name]) for name in sources.names]
    total, result = sum(served), dict[str, dict[str, float]]()
    for source, (name, length, samples) in enumerate(zip(sources.names, sources.lengths, served, strict=True)):
        share = samples / total if total else 0.0
        result[name] = {"samples": samples, "epochs": samples / length, "share": share}
        if tokens is not None:
            result[name]["tokens"] = (2 * samples * tokens[source] + length) // (2 * length)
    return {"sources": result}
