"""Several sources on two real ranks: in step, exact over stops, and handed over from one rank to two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ddp_runs import Link, assert_chains, chain_of, over_all, plain, run
from support.ledger import Numbers, ids_of, samples, trained
from support.quick import thinned
from support.ranks import Ranks
from support.runs import ended
from support.sources import FIRSTS, datasets, mixture, round_robin, samples_of, source_of

# Lengths that two ranks cannot share without remainders.
UNEVEN = {"news": 9, "code": 15, "web": 5}
EVERY_SAMPLE = sorted(FIRSTS[name] + index for name, length in UNEVEN.items() for index in range(length))
STOPS = [
    ("on_before_backward", 0, 2),
    ("on_validation_batch_end", 0, 0),
    ("on_train_batch_end", 1, 2),
]
# After so many steps of an epoch a run on one rank leaves the rest to two.
HANDED_OVER = 3


def uneven(**options: Any) -> dict[str, Any]:
    return {"train": datasets(**UNEVEN), "log_data": True, **options}


CONFIGS: dict[str, Any] = {
    "round robin": lambda: round_robin(**uneven(tag="source", batch_size={"news": 1, "code": 3, "web": 1})),
    "mixture": lambda: mixture(**uneven(tag="source", weights=[1, 2, 1], batch_size=2)),
    "mixture, steps": lambda: mixture(**uneven(tag="source", num_steps=6, temperature=2)),
    "by sample": lambda: mixture(**uneven(by="sample")),
}
# Those that serve every sample once an epoch.
WHOLE_EPOCHS = ("round robin", "mixture", "by sample")


def chain(folder: Path, name: str) -> list[Link]:
    return chain_of(CONFIGS[name], folder, STOPS)


def assert_logs_what_was_served(name: str, runs: list[dict[str, Any]], before: list[Any] | None = None) -> None:
    """Every logged value is what all ranks were served until then, after what was trained on before."""
    done = trained(before or [])
    steps = list(zip(*(trained(run["ledger"]) for run in runs), strict=True))
    assert [step - len(done) for step, _ in runs[0]["sources"]] == list(range(len(steps)))
    for number, (_, values) in enumerate(runs[0]["sources"]):
        epoch = steps[number][0][1]
        events = [*done, *(event for step in steps[: number + 1] for event in step)]
        counted = [event for event in events if "steps" in name or event[1] == epoch]
        for source, length in UNEVEN.items():
            count = len(samples_of(source, counted))
            assert values[f"{source}/samples"] == count
            assert values[f"{source}/epochs"] == pytest.approx(count / length)
            assert values[f"{source}/share"] == pytest.approx(count / len(samples(counted)))


# Ranks share samples by the rule of batches; tests of one process and of other numbers of ranks have them too.
@pytest.mark.parametrize("name", thinned(CONFIGS, ["by sample"]))
def test_a_chain_of_stops_gives_the_uninterrupted_run_on_every_rank_which_log_what_both_were_served(
    ranks: Ranks, name: str
) -> None:
    runs = assert_chains(ranks.of(chain, name))
    assert_logs_what_was_served(name, runs)
    if name in WHOLE_EPOCHS:
        assert [over_all(runs, epoch) for epoch in range(2)] == [EVERY_SAMPLE] * 2


@pytest.mark.parametrize("name", ["round robin", "mixture", "mixture, steps"])
def test_all_ranks_serve_the_same_source_in_each_step(ranks: Ranks, name: str) -> None:
    first, second = (trained(parts[0][0]["ledger"]) for parts in ranks.of(chain, name))
    for epoch in range(2):
        tags = [(one[4][0], other[4][0]) for one, other in zip(first, second, strict=True) if one[1] == epoch]
        differing = [number for number, (one, other) in enumerate(tags) if one != other]
        # Only what is left of the sources in the end, too little for a batch on each rank, is served side by side.
        assert differing in ([], [len(tags) - 1])
        assert "steps" not in name or not differing
    for event in first + second:
        assert {source_of(index) for index in ids_of(event)} == {event[4][0]}


def test_with_steps_both_ranks_go_through_each_source_pass_by_pass(ranks: Ranks) -> None:
    ledgers = [trained(parts[0][0]["ledger"]) for parts in ranks.of(chain, "mixture, steps")]
    together = [event for step in zip(*ledgers, strict=True) for event in step]
    for source, length in UNEVEN.items():
        # Within a step the ranks' shares of a pass stand one after the other.
        served = samples_of(source, together)
        for start in range(0, len(served) - length + 1, length):
            assert len(set(served[start : start + length])) == length, (source, start)


def fewer_samples_than_ranks(folder: Path) -> dict[str, Any]:
    """Sources of one sample each, which no step can serve on both ranks."""
    sets = {"news": Numbers(1), "code": Numbers(1, first=100), "web": Numbers(4, first=200)}
    return plain(run(lambda: mixture(train=sets, batch_size=2, tag="source", log_data=True)))


def test_sources_smaller_than_the_ranks_are_served_side_by_side(ranks: Ranks) -> None:
    runs = ranks.of(fewer_samples_than_ranks)
    for epoch in range(2):
        assert over_all(runs, epoch) == [0, 100, 200, 201, 202, 203]
    assert [len(trained(run["ledger"])) for run in runs] == [4, 4]


# Another number of ranks


def resumed_on_two_ranks(folder: Path, name: str) -> list[Link]:
    """Resumes the checkpoint of one process, and once more from within the epoch that is planned anew."""
    left = folder.parent / f"{name}, 1.ckpt"
    return chain_of(CONFIGS[name], folder, [("on_train_batch_end", 0, 0)], ckpt_path=left)


@pytest.mark.parametrize("name", thinned(CONFIGS, ["round robin", "by sample"]))
def test_one_rank_hands_over_to_two(ranks: Ranks, name: str) -> None:
    left = ended(ranks.folder / f"{name}, 1.ckpt", CONFIGS[name], max_steps=HANDED_OVER, max_epochs=2)
    runs = assert_chains(ranks.of(resumed_on_two_ranks, name))
    assert_logs_what_was_served(name, runs, left.ledger)
    # The epoch goes on in the steps of two ranks, and ends where they end.
    assert [event[2] for event in trained(runs[0]["ledger"]) if event[1] == 0][-1] == runs[0]["length"] - 1
    if name in WHOLE_EPOCHS:
        assert sorted(samples(left.ledger, 0) + over_all(runs, 0)) == over_all(runs, 1) == EVERY_SAMPLE
