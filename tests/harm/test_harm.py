"""The rule on every entry of the table: no harm to an uninterrupted run, and no resume that is inexact in silence.

A failure that begins with HARM breaks the rule; one that begins with LESS keeps it, but refuses or warns of what the
table says is to work.
"""

from __future__ import annotations

from typing import Any

import pytest

from harm.laws import is_harm, resumed, uninterrupted
from harm.page import PAGE, names_in
from harm.runs import Run, Trial
from harm.table import ENTRIES, Entry, of
from harm.verdicts import Verdict, judge_alone, judge_on_ranks

# One of each kind on two ranks; the others are slow.
DIAGONAL = {
    "torch: RandomSampler",
    "torch: WeightedRandomSampler",
    "torch: DistributedSampler",
    "OML: BalanceSampler",
    "VISSL: StatefulDistributedSampler",
    "detectron2: TrainingSampler",
    "mmengine: DefaultSampler",
    "own: rank asked of torch in iter",
    "own: distributed, 40 a rank with replacement",
    "own: P x K, seven batches",
    "own: no len",
    "own: IterableDataset, divides itself",
}
# One of each kind of loader in two workers.
IN_WORKERS = {
    "torch: RandomSampler",
    "torchdata: StatefulDataLoader",
    "timm: MultiEpochsDataLoader",
    "lhotse: DynamicBucketingSampler",
    "torchtitan: HuggingFaceTextDataset",
    "torchtitan: HuggingFaceTextDataset in a StatefulDataLoader",
    "own: counts epochs at the end",
    "own: reads losses",
    "own: batches of tokens, fewer later",
    "own: no len",
    "own: DataLoader that yields twice",
    "own: thread before a DataLoader",
    "own: IterableDataset",
    "own: IterableDataset, counts passes",
    "own: IterableDataset, goes on at iter",
    "own: IterableDataset, divides itself",
}
SLOW = pytest.mark.slow


def _case(ranks: int, workers: int, name: str, *marks: Any) -> Any:
    where = f"{ranks} ranks" if not workers else f"{ranks} ranks, {workers} workers"
    # On ranks, the first case waits for all others.
    timeout = pytest.mark.timeout(60 if ranks == 1 else 900)
    return pytest.param(ranks, workers, name, id=f"{where}, {name}", marks=[timeout, *marks])


CASES = [
    *(_case(1, 0, name) for name in ENTRIES),
    *(_case(2, 0, name, *([] if name in DIAGONAL else [SLOW])) for name in ENTRIES),
    *(_case(3, 0, name, SLOW) for name in ENTRIES),
    *(_case(ranks, 2, name, SLOW) for ranks in (1, 2) for name in ENTRIES if name in IN_WORKERS),
]


class Judged:
    """Judges all entries of a test run that are due on the same ranks in one launch, when the first is asked for."""

    def __init__(self, items: list[Any], factory: pytest.TempPathFactory) -> None:
        self.due: dict[tuple[int, int], list[str]] = {}
        for item in items:
            case = getattr(item, "callspec", None)
            if case and {"ranks", "workers", "name"} <= set(case.params):
                self.due.setdefault((case.params["ranks"], case.params["workers"]), []).append(case.params["name"])
        self.folder = factory.mktemp("harm")
        self.found: dict[tuple[int, int], dict[str, Verdict]] = {}

    def of(self, ranks: int, workers: int, name: str) -> Verdict:
        if ranks == 1:
            return judge_alone(name, self.folder, workers)
        key = ranks, workers
        if key not in self.found:
            self.found[key] = judge_on_ranks(ranks, self.due[key], self.folder / f"{ranks}-{workers}", workers)
        return self.found[key][name]


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return Judged(request.session.items, tmp_path_factory)


@pytest.mark.parametrize(("ranks", "workers", "name"), CASES)
def test_the_rule_holds(judged: Judged, ranks: int, workers: int, name: str) -> None:
    faults = list(judged.of(ranks, workers, name).faults(ENTRIES[name]))
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_the_rule_tells_what_is_harm() -> None:
    entry, steps = Entry(of(list), "multiset"), [(epoch, [2 * epoch, 1]) for epoch in range(3)]
    plain, broken = Run(steps), Run(steps[:1], "KeyError: theirs")
    again = Run([(0, [0, 0]), *steps[1:]])
    runs = {"same": plain, "other data": again, "aborted": broken, "refused": Run([], "StateError: by name")}
    for outcome, own in runs.items():
        assert uninterrupted(entry, [Trial(plain, own)], None)[0] == outcome
    rest = {
        "exact": Run(steps[1:]),
        "silent": again,
        "warned": Run(again.trained, said=["not exact"]),
        "aborted": broken,
    }
    for outcome, after in rest.items():
        assert resumed([plain], [Run(steps[:1])], [after])[0] == outcome
    assert [outcome for outcome in {**runs, **rest} if is_harm(outcome)] == ["other data", "aborted", "silent"]


def test_the_page_has_these_entries() -> None:
    assert names_in(PAGE.read_text()) == list(ENTRIES)
