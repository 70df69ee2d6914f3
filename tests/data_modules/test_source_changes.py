"""A run that goes on with other weights or other sources: refused, or each source goes on where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ledger import LedgerModel, Numbers, samples, trained
from support.runs import Outcome, assert_resumes, seeded, stopped, train
from support.sources import EVERY_SAMPLE, LENGTHS, datasets, mixture, round_robin, samples_of

from lightning_stateful.errors import StatefulWarning, StateMismatchError

OTHER_SOURCES = {"code": Numbers(14, first=100), "talk": Numbers(5, first=300), "news": Numbers(9)}
TALK = list(range(300, 305))


def resumed(make: Any, path: Path, **options: Any) -> Outcome:
    return train(make, ckpt_path=path, seed=99, **options)


CHANGES: dict[str, tuple[Any, Any, set[str]]] = {
    "weights": (lambda: mixture(weights=[1, 2, 1]), lambda: mixture(weights=[2, 1, 1]), {"weights"}),
    "a source more": (
        lambda: round_robin(batch_size=2),
        lambda: round_robin(batch_size=2, train={**datasets(), "talk": Numbers(5, first=300)}),
        {"sources"},
    ),
    "a stop rule": (lambda: round_robin(), lambda: round_robin(stop="cycle"), {"stop"}),
    "by": (
        lambda: mixture(batch_size=4, weights=[1, 2, 1]),
        lambda: mixture(batch_size=4, weights=[1, 2, 1], by="sample"),
        {"by"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_before_anything_is_trained(tmp_path: Path, change: str) -> None:
    before, after, paths = CHANGES[change]
    stopped(tmp_path / "stop.ckpt", before, batch=2)
    model = seeded(LedgerModel)
    with pytest.raises(StateMismatchError) as caught:
        train(after, model=model, ckpt_path=tmp_path / "stop.ckpt")
    assert {difference.path.split(".")[0] for difference in caught.value.differences} == paths
    assert model.ledger == []


def test_a_mixture_is_not_taken_for_round_robin(tmp_path: Path) -> None:
    stopped(tmp_path / "stop.ckpt", lambda: mixture(), batch=5)
    with pytest.raises(StateMismatchError, match="kind"):
        train(lambda: round_robin(batch_size=3, accept=("module",)), ckpt_path=tmp_path / "stop.ckpt")


def more_weights() -> dict[str, Any]:
    return {"weights": {"news": 1, "code": 2, "talk": 1}, "train": OTHER_SOURCES, "accept": ("sources", "weights")}


# Before and after a change, and where the resumed run is stopped once more.
ACCEPTED: dict[str, tuple[Any, Any, str, int]] = {
    "round robin": (
        lambda: round_robin(batch_size=2),
        lambda: round_robin(batch_size=2, train=OTHER_SOURCES, val=None, accept=("sources",)),
        "on_train_epoch_end",
        0,
    ),
    "mixture": (
        lambda: mixture(weights=[1, 2, 1]),
        lambda: mixture(**more_weights()),
        "on_before_backward",
        3,
    ),
    "by sample": (
        lambda: mixture(by="sample", weights=[1, 2, 1]),
        lambda: mixture(by="sample", **more_weights()),
        "on_train_batch_end",
        1,
    ),
}


def assert_second_stop_changes_nothing(
    folder: Path, make: Any, path: Path, run: Outcome, hook: str, batch: int
) -> None:
    again = folder / "again.ckpt"
    before = stopped(again, make, hook, epoch=run.ledger[0][1], batch=batch, ckpt_path=path, seed=33)
    assert_resumes(again, before, make=make, whole=run)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_sources_come_and_go_and_the_others_are_served_once(tmp_path: Path, name: str) -> None:
    before, after, hook, batch = ACCEPTED[name]
    first = stopped(tmp_path / "stop.ckpt", before, batch=5)
    second = resumed(after, tmp_path / "stop.ckpt")
    kept = [index for index in EVERY_SAMPLE if index < 200]
    assert sorted(index for index in samples(first, 0) if index < 200) != kept, "nothing was left to serve"
    served = [index for index in samples(first, 0) + samples(second.ledger, 0) if not 200 <= index < 300]
    assert sorted(served) == kept + TALK
    assert sorted(samples(second.ledger, 1)) == kept + TALK
    assert_second_stop_changes_nothing(tmp_path, after, tmp_path / "stop.ckpt", second, hook, batch)


def test_a_source_with_a_batch_size_of_its_own_may_leave(tmp_path: Path) -> None:
    first = stopped(tmp_path / "stop.ckpt", lambda: round_robin(), batch=5)
    after = lambda: round_robin(  # noqa: E731
        train=datasets(news=9, code=14), val=None, batch_size={"news": 2, "code": 3}, accept=("sources",)
    )
    second = resumed(after, tmp_path / "stop.ckpt")
    served = [index for index in samples(first, 0) + samples(second.ledger, 0) if index < 200]
    assert sorted(served) == [index for index in EVERY_SAMPLE if index < 200]


@pytest.mark.filterwarnings("ignore:.*goes on with another sources.web.*")
@pytest.mark.parametrize("lengths", [{"news": 4, "code": 4}, {"news": 4, "code": 4, "web": 4}])
def test_where_an_accepted_change_leaves_nothing_of_the_epoch_the_next_one_begins(
    tmp_path: Path, lengths: dict[str, int]
) -> None:
    def make(**lengths: int) -> Any:
        return lambda: round_robin(train=datasets(**lengths), batch_size=2, val=None, accept=("sources",))

    # Six steps in turn: of web four samples are served by then, and only web has more.
    stopped(tmp_path / "stop.ckpt", make(news=4, code=4, web=12), batch=5)
    second = resumed(make(**lengths), tmp_path / "stop.ckpt", max_epochs=2)
    assert {event[1] for event in trained(second.ledger)} == {1}
    assert len(samples(second.ledger)) == sum(lengths.values())


def test_an_accepted_source_that_is_another_one_is_warned_of_where_its_passes_are_shuffled(tmp_path: Path) -> None:
    def make(length: int, **options: Any) -> Any:
        return lambda: mixture(train=datasets(news=8, code=length), val=None, accept=("sources",), **options)

    with pytest.warns(StatefulWarning, match=r"within epoch 0, goes on with another sources\.code, as was accepted"):
        stopped(tmp_path / "stop.ckpt", make(12), batch=1)
        resumed(make(14), tmp_path / "stop.ckpt", max_epochs=1)
    stopped(tmp_path / "stop.ckpt", make(12, shuffle=False), batch=1)
    resumed(make(14, shuffle=False), tmp_path / "stop.ckpt", max_epochs=1)


@pytest.mark.parametrize("how", ["reloading", "fitting again"])
def test_with_steps_sources_go_on_where_they_stand_when_loaders_are_built_anew(tmp_path: Path, how: str) -> None:
    def make(weights: list[int]) -> Any:
        return lambda: mixture(num_steps=9, weights=weights, accept=("weights",), val=None)

    whole = train(make([1, 2, 1]), max_epochs=6)
    first = stopped(tmp_path / "stop.ckpt", make([1, 2, 1]), batch=3)
    options = {"reload_dataloaders_every_n_epochs": 1} if how == "reloading" else {"max_epochs": 1}
    second = resumed(make([2, 1, 1]), tmp_path / "stop.ckpt", **options)
    if how == "fitting again":
        second.trainer.fit_loop.max_epochs = 3
        second.trainer.fit(second.trainer.lightning_module, datamodule=second.trainer.datamodule)
    for source in LENGTHS:
        served = samples_of(source, first) + samples_of(source, second.ledger)
        assert served == samples_of(source, whole.ledger)[: len(served)]
