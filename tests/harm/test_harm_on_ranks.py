"""The rule on one entry of each kind on two ranks; the others, on three ranks and in workers, are slow."""

from __future__ import annotations

from typing import Any

import pytest

from harm.table import ENTRIES
from harm.verdicts import Verdict, assert_lawful, judge_alone, judge_on_ranks

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
    "own: DataLoader that reads its sampler by hand",
    "own: IterableDataset, divides itself",
}
# Its workers begin an epoch before Lightning tells its sampler which: it has the orders of epochs 0, 0 and 1 there.
NOT_IN_WORKERS = {"ultralytics: InfiniteDataLoader"}
# Those that remember their passes: workers read ahead of training, and Lightning may try iter() before.
QUICK_IN_WORKERS = {
    (1, "own: IterableDataset, counts passes"),
    (1, "own: counts epochs at the start"),
    (1, "mmengine: InfiniteSampler"),
}
CASES = [
    *(pytest.param(2, 0, name, marks=() if name in DIAGONAL else pytest.mark.slow) for name in ENTRIES),
    *(pytest.param(3, 0, name, marks=pytest.mark.slow) for name in ENTRIES),
    *(
        pytest.param(ranks, 2, name, marks=() if (ranks, name) in QUICK_IN_WORKERS else pytest.mark.slow)
        for ranks in (1, 2)
        for name in ENTRIES
        if name not in NOT_IN_WORKERS
    ),
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


@pytest.mark.timeout(1800)  # The first case waits for all others.
@pytest.mark.parametrize(("ranks", "workers", "name"), CASES)
def test_the_rule_holds_on_ranks(judged: Judged, ranks: int, workers: int, name: str) -> None:
    assert_lawful(name, judged.of(ranks, workers, name))
