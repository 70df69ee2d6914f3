"""The rule: an uninterrupted run is as without the callback, or refused; a resume is exact, refused or warned of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harm.basics import LABELS
from harm.runs import EPOCHS, Run, Trial, train
from harm.table import Entry
from lightning_stateful import errors

# The batches of every rank in one epoch.
Epoch = list[list[list[int]]]


def epochs_of(runs: list[Run]) -> list[Epoch]:
    """The batches of all ranks, epoch by epoch."""
    return [[run.epoch(number) for run in runs] for number in range(EPOCHS)]


def samples(epoch: Epoch) -> list[int]:
    """The samples of all ranks."""
    return [index for batches in epoch for batch in batches for index in batch]


def _labels(epochs: list[Epoch]) -> Any:
    shapes = [
        Counter(tuple(sorted(Counter(LABELS[i] for i in batch).values())) for batches in epoch for batch in batches)
        for epoch in epochs
    ]
    return [sorted(shape.items()) for shape in shapes]


# What two runs are compared by.
FEATURES: dict[str, Callable[[list[Epoch]], Any]] = {
    "batches of each rank": lambda epochs: epochs,
    "samples of each rank": lambda epochs: [
        [sorted(i for batch in batches for i in batch) for batches in epoch] for epoch in epochs
    ],
    "batches a rank": lambda epochs: [[len(batches) for batches in epoch] for epoch in epochs],
    "samples a rank": lambda epochs: [[sum(map(len, batches)) for batches in epoch] for epoch in epochs],
    "samples in all": lambda epochs: [len(samples(epoch)) for epoch in epochs],
    "samples as often": lambda epochs: [Counter(samples(epoch)) for epoch in epochs],
    "repeats in an epoch": lambda epochs: [sorted(Counter(samples(epoch)).values()) for epoch in epochs],
    "pool of all epochs": lambda epochs: len({index for epoch in epochs for index in samples(epoch)}),
    "labels of a batch": _labels,
    "batches in all but repeats": lambda epochs: [
        len({str(batch) for batches in epoch for batch in batches}) for epoch in epochs
    ],
    "orders that differ": lambda epochs: len({str(epoch) for epoch in epochs}),
}
_EVEN = ("batches a rank", "samples a rank")
MODES: dict[str, tuple[str, ...]] = {
    # The first that differs is told: from samples that others got or nobody, to batches that are cut otherwise.
    "equal": ("samples as often", "samples of each rank", "batches of each rank"),
    "multiset": (*_EVEN, "samples as often"),
    "distinct": (*_EVEN, "repeats in an epoch"),
    "subset": (*_EVEN, "repeats in an epoch", "pool of all epochs"),
    "labels": (*_EVEN, "labels of a batch"),
    "counts": _EVEN,
    "padded": ("batches in all but repeats",),
    "together": ("batches a rank", "samples as often"),
    "told": (),
    "drawn": (),
    "runs": (),
}
# What the modes mean in the table for readers.
MEANINGS = {
    "equal": "the same batches",
    "multiset": "the same samples, in another random order",
    "distinct": "as many samples, none twice",
    "subset": "one subset in all epochs",
    "labels": "as many batches, of as many classes and instances",
    "counts": "as many samples, drawn anew",
    "drawn": "what the sampler draws, where Lightning deals out the whole dataset; the log says so",
    "together": "the same samples over all ranks, dealt out in another way",
    "told": "is told the epoch, or tells Lightning its length, where Lightning alone would keep the first",
    "padded": "as many whole batches; fewer than ranks are repeated, which the log says",
    "runs": "runs to its end",
}


def uninterrupted(entry: Entry, trials: list[Trial], alone: list[Run] | None) -> tuple[str, str]:
    """Judge an uninterrupted run.

    Args:
        entry: Of the table.
        trials: Of all ranks.
        alone: What one process trains on without the callback, of an entry that nobody deals out.

    Returns:
        ``"same"``, ``"refused"``, ``"aborted"`` or ``"other data"``, and why.
    """
    own = [trial.own for trial in trials]
    if any(run.error for run in own):
        outcome = "refused" if all(run.refused for run in own) else "aborted"
        return outcome, _errors(own)
    dealt = len(trials) > 1 and entry.deals == "nobody"
    plain = (alone or []) if dealt else [trial.plain for trial in trials]
    broken = [run.error for run in plain if run.error]
    if broken or not plain:
        return "other data", f"nothing to compare with: without the callback {broken}"
    return compare(entry, plain, own, dealt)


def compare(entry: Entry, plain: list[Run], own: list[Run], dealt: bool) -> tuple[str, str]:
    """Compare two runs by the features that an entry is compared by."""
    features = MODES[entry.compared(len(own))]
    if dealt:
        # One process and several: over all ranks.
        features = tuple("samples in all" if name in _EVEN else name for name in features)
    elif len(own) == 1 and entry.same in ("multiset", "distinct", "subset", "labels", "counts"):
        features = (*features, "orders that differ")
    expected, found = epochs_of(plain), epochs_of(own)
    for name in features:
        if (want := FEATURES[name](expected)) != (got := FEATURES[name](found)):
            return "other data", f"{name}: {_difference(want, got)}"
    return "same", ""


def resumed(whole: list[Run], after: list[Run]) -> tuple[str, str]:
    """Judge a resume on the same ranks.

    Returns:
        ``"exact"``, ``"refused"``, ``"aborted"``, ``"warned"`` or ``"silent"``, and why.
    """
    if any(run.error for run in after):
        outcome = "refused" if all(run.refused for run in after) else "aborted"
        return outcome, _errors(after)
    for rank, (before, second) in enumerate(zip(whole, after, strict=True)):
        if (want := before.trained[before.saved :]) != (got := second.trained):
            return _said(f"rank {rank}, after the resume: {_short(got)} instead of {_short(want)}", whole, after)
    return "exact", ""


def elsewhere(entry: Entry, whole: list[Run], after: list[Run]) -> tuple[str, str]:
    """Judge a resume on other ranks: over the epoch, each sample as often as without the stop."""
    if any(run.error for run in after):
        outcome = "refused" if all(run.refused for run in after) else "aborted"
        return outcome, _errors(after)
    want = Counter(samples([run.epoch(1) for run in whole]))
    stopped = [Run(run.trained[: run.saved]) for run in whole]
    got = Counter(samples([run.epoch(1) for run in (*stopped, *after)]))
    if want == got:
        return "exact", ""
    if "limit_train_batches" in entry.trainer and got <= want:
        # An epoch that is cut off by steps has other samples on other ranks.
        return "exact", ""
    if entry.on_ranks == "padded" and got <= want and got.keys() == want.keys():
        # What is repeated to make the last step equal depends on the ranks.
        return "exact", ""
    more, less = sorted((got - want).elements()), sorted((want - got).elements())
    return _said(f"in epoch 1 too often {more}, too seldom {less}", whole, after)


def _said(told: str, whole: list[Run], after: list[Run]) -> tuple[str, str]:
    words = [text for run in (*whole, *after) for text in run.said]
    return ("warned", words[0]) if words else ("silent", told)


def is_harm(outcome: str) -> bool:
    """Whether the rule forbids it."""
    return outcome not in ("same", "exact", "refused", "warned")


def is_by_name(why: str) -> bool:
    """Whether what refused a run is an error of the package, and no accident."""
    return isinstance(getattr(errors, why.split(":")[0], None), type)


def falls_short(entry: Entry, outcome: str, way: str) -> bool:
    """Whether a lawful outcome is less than the table states; ``way`` is "run", "same" or "other"."""
    grades = ["refused", "warned", "exact"]
    least = entry.expected(way)
    if way == "run":
        return outcome == "refused" and least != "refused"
    return grades.index(outcome) < grades.index(least)


def _difference(want: Any, got: Any) -> str:
    """The first epoch that differs, and how."""
    if not isinstance(want, list):
        return f"{got} instead of {want}"
    epoch = next(number for number in range(len(want)) if want[number] != got[number])
    if isinstance(want[epoch], Counter):
        more, less = got[epoch] - want[epoch], want[epoch] - got[epoch]
        return f"in epoch {epoch} too often {sorted(more.elements())}, too seldom {sorted(less.elements())}"
    return f"in epoch {epoch} {_short(got[epoch])} instead of {_short(want[epoch])}"


def _errors(runs: list[Run]) -> str:
    return "; ".join(dict.fromkeys(_short(run.error.split("\n")[0]) or "went on" for run in runs))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 160 else f"{text[:150]} ... ({len(text)} characters)"


def judged(
    folder: Path,
    make: Callable[[int], Any],
    stops: dict[int, str],
    same: str = "equal",
    workers: int = 0,
    **options: Any,
) -> None:
    """Compare a run with one without the callback, and its resumes with what is expected of each stop."""
    entry = Entry(make, same, trainer=options)
    plain, own = (train(entry, own=with_callback, workers=workers) for with_callback in (False, True))
    assert uninterrupted(entry, [Trial(plain, own)], None) == ("same", "")
    for stop, expected in stops.items():
        saved = train(entry, workers=workers, save=folder / "stop.ckpt", after=stop)
        outcome, why = resumed([saved], [train(entry, workers=workers, ckpt_path=folder / "stop.ckpt")])
        assert not is_harm(outcome), f"{stop}: {why}"
        assert outcome == expected, f"{stop}: {why}"
