"""Loop counters of every moment are read for what they stand for and rewritten to the one form that resumes exactly."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ledger import Numbers
from support.runs import StopAt, assert_same_end, assert_stitches, numbers_module, train

from lightning_stateful.errors import DamagedStateError
from lightning_stateful.trainer.loop_progress import (
    LoopProgress,
    continue_from,
    epoch_set_to,
    locate,
    next_step,
    rewritten,
    step_is_beyond_epoch,
)

TRACKED = ("ready", "started", "processed", "completed")
Counts = tuple[int, int, int, int]


def tracked(counts: Counts) -> dict[str, int]:
    return dict(zip(TRACKED, counts, strict=True))


def loops(
    epoch: Counts, batch: Counts, *, is_last: bool = False, total: int | None = None, stepped: int = 0
) -> dict[str, Any]:
    """A fit loop's state with the given counters, as Lightning writes it, and others that are out of step."""
    total = batch[2] if total is None else total
    behind = {"ready": 9, "completed": 8}
    return {
        "state_dict": {"combined_loader": [{"progress": 3}]},
        "epoch_loop.state_dict": {"_batches_that_stepped": stepped},
        "epoch_loop.batch_progress": {
            "total": tracked((total + batch[0] - batch[2], total + batch[1] - batch[2], total, total - 1)),
            "current": tracked(batch),
            "is_last_batch": is_last,
        },
        "epoch_loop.scheduler_progress": {"total": dict(behind), "current": dict(behind)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {"total": dict(behind), "current": dict(behind)},
                "zero_grad": {"total": {**behind, "started": 9}, "current": {**behind, "started": 9}},
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(behind), "current": dict(behind)},
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {
            "total": tracked((6, 6, 6, 5)),
            "current": tracked((2, 2, 2, 1)),
            "is_last_batch": True,
        },
        "epoch_progress": {"total": tracked(epoch), "current": tracked(epoch)},
    }


def between(epoch: int) -> LoopProgress:
    return LoopProgress(epoch=epoch)


def within(epoch: int, batch: int) -> LoopProgress:
    return LoopProgress(epoch=epoch, batch=batch, running=True)


def at_the_end(epoch: int, batch: int) -> LoopProgress:
    return LoopProgress(epoch=epoch, batch=batch, running=True, ended=True)


# Epochs of 7 batches; 3 of them done where the progress lies within an epoch. ``e`` epochs were over before.
ROWS: dict[str, Any] = {
    "before anything has run": lambda e: (loops((e, e, e, e), (0, 0, 0, 0), is_last=e > 0), between(e)),
    "on_train_epoch_start": lambda e: (loops((e + 1, e, e, e), (7, 7, 7, 7), is_last=True), between(e)),
    "on_train_epoch_start of the first epoch": lambda e: (loops((e + 1, e, e, e), (0, 0, 0, 0)), between(e)),
    "before the first batch": lambda e: (loops((e + 1, e + 1, e, e), (0, 0, 0, 0)), within(e, 0)),
    "on_train_batch_start": lambda e: (loops((e + 1, e + 1, e, e), (4, 3, 3, 3)), within(e, 3)),
    "inside training_step": lambda e: (loops((e + 1, e + 1, e, e), (4, 4, 3, 3)), within(e, 3)),
    "inside the first training_step": lambda e: (loops((e + 1, e + 1, e, e), (1, 1, 0, 0)), within(e, 0)),
    "inside the last training_step": lambda e: (loops((e + 1, e + 1, e, e), (7, 7, 6, 6), is_last=True), within(e, 6)),
    "an exception in next": lambda e: (loops((e + 1, e + 1, e, e), (3, 3, 3, 3)), within(e, 3)),
    "on_train_batch_end": lambda e: (loops((e + 1, e + 1, e, e), (3, 3, 3, 2)), within(e, 3)),
    "on_train_batch_end of the last batch": lambda e: (
        loops((e + 1, e + 1, e, e), (7, 7, 7, 6), is_last=True),
        at_the_end(e, 7),
    ),
    "in a validation": lambda e: (loops((e + 1, e + 1, e, e), (3, 3, 3, 3)), within(e, 3)),
    "in the validation at the end": lambda e: (
        loops((e + 1, e + 1, e, e), (7, 7, 7, 7), is_last=True),
        at_the_end(e, 7),
    ),
    "on_train_epoch_end": lambda e: (loops((e + 1, e + 1, e + 1, e), (7, 7, 7, 7), is_last=True), between(e + 1)),
    "after fit": lambda e: (loops((e + 1,) * 4, (7, 7, 7, 7), is_last=True), between(e + 1)),
    "on_train_epoch_end of an epoch cut short": lambda e: (
        loops((e + 1, e + 1, e + 1, e), (3, 3, 3, 3)),
        within(e, 3),
    ),
    "after a fit cut short": lambda e: (loops((e + 1,) * 4, (3, 3, 3, 3)), within(e, 3)),
    "after a skipped batch": lambda e: (loops((e + 1, e + 1, e, e), (4, 3, 4, 4)), within(e, 4)),
    "after a batch skipped the rest": lambda e: (
        loops((e + 1, e + 1, e + 1, e), (4, 3, 4, 3), is_last=True),
        between(e + 1),
    ),
    "in a later batch after a skipped one": lambda e: (loops((e + 1, e + 1, e, e), (6, 5, 5, 5)), within(e, 5)),
}


class TestLocate:
    @pytest.mark.parametrize("epoch", [0, 3])
    @pytest.mark.parametrize("row", ROWS)
    def test_the_counters_of_every_hook_stand_for_their_moment(self, row: str, epoch: int) -> None:
        state, progress = ROWS[row](epoch)

        assert locate(state) == progress

    @pytest.mark.parametrize(
        ("epoch", "batch", "progress"),
        [
            ((3, 3, 2, 2), (7, 7, 7, 6), at_the_end(2, 7)),
            ((3, 3, 2, 2), (7, 7, 7, 7), at_the_end(2, 7)),
            ((3, 3, 3, 2), (7, 7, 7, 7), between(3)),
            ((3, 3, 3, 3), (7, 7, 7, 7), between(3)),
            ((3, 3, 2, 2), (7, 7, 6, 6), within(2, 6)),
        ],
    )
    def test_the_last_batch_of_a_limited_epoch_is_its_end(
        self, epoch: Counts, batch: Counts, progress: LoopProgress
    ) -> None:
        assert locate(loops(epoch, batch), max_batches=7) == progress

    def test_epochs_of_a_sized_loader_end_where_the_counters_say_whatever_the_limit(self) -> None:
        assert locate(loops((1, 1, 0, 0), (5, 5, 5, 4), is_last=True), max_batches=7) == at_the_end(0, 5)

    def test_the_count_of_windows_is_taken_along(self) -> None:
        for row in ROWS.values():
            state, progress = row(2)
            state["epoch_loop.state_dict"]["_batches_that_stepped"] = 41
            assert locate(state) == dataclasses.replace(progress, stepped=41)

    def test_a_state_without_a_count_of_windows_counts_from_0(self) -> None:
        state = loops((1, 1, 0, 0), (3, 3, 3, 2))
        del state["epoch_loop.state_dict"]["_batches_that_stepped"]

        assert locate(state) == within(0, 3)

    def test_totals_do_not_matter(self) -> None:
        state = loops((2, 2, 1, 1), (4, 4, 3, 3), total=900)
        state["epoch_progress"]["total"] = tracked((50, 50, 50, 50))

        assert locate(state) == within(1, 3)

    def test_locating_leaves_the_state_as_it_was(self) -> None:
        state = loops((2, 2, 1, 1), (4, 4, 3, 3))
        kept = copy.deepcopy(state)
        locate(state, max_batches=7)

        assert state == kept

    def test_the_counters_of_a_new_trainer_stand_for_the_beginning(self) -> None:
        assert locate(a_trainer().fit_loop.state_dict()) == LoopProgress()

    @pytest.mark.parametrize(
        ("progress", "data"),
        [(LoopProgress(), (0, 0)), (between(2), (2, 0)), (within(2, 5), (2, 5)), (at_the_end(2, 7), (3, 0))],
    )
    def test_the_data_goes_on_at_the_next_batch_or_epoch(self, progress: LoopProgress, data: tuple[int, int]) -> None:
        assert progress.data == data


def a_trainer() -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


MOMENTS = st.one_of(
    st.builds(between, st.integers(0, 50)),
    st.builds(within, st.integers(0, 50), st.integers(0, 500)),
    st.builds(at_the_end, st.integers(0, 50), st.integers(1, 500)),
)
STATES = st.sampled_from(list(ROWS.values())).flatmap(lambda row: st.integers(0, 5).map(lambda epoch: row(epoch)[0]))
WITHIN = {"within": within(4, 3), "at the end": at_the_end(4, 7), "between": between(5)}


class TestRewritten:
    @given(STATES, MOMENTS, st.integers(0, 1000))
    def test_reading_what_was_rewritten_gives_it_back(self, state: Any, progress: LoopProgress, stepped: int) -> None:
        progress = dataclasses.replace(progress, stepped=stepped)

        assert locate(rewritten(state, progress)) == progress

    @given(STATES, MOMENTS)
    def test_rewriting_again_changes_nothing(self, state: Any, progress: LoopProgress) -> None:
        once = rewritten(state, progress)

        assert rewritten(once, progress) == once

    @given(STATES, MOMENTS)
    def test_rewriting_leaves_its_argument_as_it_was(self, state: Any, progress: LoopProgress) -> None:
        kept = copy.deepcopy(state)
        result = rewritten(state, progress)
        assert state == kept

        for part in leaves(result):
            part.clear()
        assert state == kept

    @given(STATES, MOMENTS)
    def test_every_moment_has_one_form_of_the_current_counters(self, state: Any, progress: LoopProgress) -> None:
        other = loops((1, 1, 0, 0), (2, 2, 1, 1))
        ours, theirs = rewritten(state, progress), rewritten(other, progress)

        assert ours["epoch_progress"] == theirs["epoch_progress"]
        for key in ("current", "is_last_batch"):
            assert ours["epoch_loop.batch_progress"][key] == theirs["epoch_loop.batch_progress"][key]

    def test_within_an_epoch_it_has_begun_and_is_not_processed(self) -> None:
        result = rewritten(loops((5, 5, 4, 4), (4, 4, 3, 3), total=31), within(4, 3))

        assert result["epoch_progress"]["current"] == tracked((5, 5, 4, 4))
        assert result["epoch_loop.batch_progress"] == {
            "total": tracked((31,) * 4),
            "current": tracked((3,) * 4),
            "is_last_batch": False,
        }

    def test_at_the_end_of_an_epoch_its_last_batch_is_the_last(self) -> None:
        result = rewritten(loops((5, 5, 4, 4), (7, 7, 7, 6), total=35, is_last=True), at_the_end(4, 7))

        assert result["epoch_progress"]["current"] == tracked((5, 5, 4, 4))
        assert result["epoch_loop.batch_progress"] == {
            "total": tracked((35,) * 4),
            "current": tracked((7,) * 4),
            "is_last_batch": True,
        }

    def test_between_epochs_no_batch_of_the_next_one_is_counted(self) -> None:
        result = rewritten(loops((5, 5, 5, 4), (7, 7, 7, 7), total=35, is_last=True), between(5))

        assert result["epoch_progress"]["current"] == tracked((5,) * 4)
        assert result["epoch_loop.batch_progress"] == {
            "total": tracked((35,) * 4),
            "current": tracked((0,) * 4),
            "is_last_batch": True,
        }

    def test_an_epoch_that_has_only_been_announced_has_not_begun(self) -> None:
        state, progress = ROWS["on_train_epoch_start"](5)

        assert rewritten(state, progress)["epoch_progress"]["current"] == tracked((5,) * 4)

    @pytest.mark.parametrize("progress", WITHIN)
    def test_epochs_are_counted_alike_in_total(self, progress: str) -> None:
        progress = rewritten(loops((5, 5, 4, 4), (4, 4, 3, 3)), WITHIN[progress])["epoch_progress"]

        assert progress["total"] == progress["current"]

    @pytest.mark.parametrize("row", [row for row in ROWS if "skip" not in row])
    def test_the_total_of_batches_is_what_has_been_processed(self, row: str) -> None:
        state, progress = ROWS[row](3)
        current = state["epoch_loop.batch_progress"]["current"]["processed"]
        state["epoch_loop.batch_progress"]["total"] = tracked((99, 98, 21 + current, 97))

        assert rewritten(state, progress)["epoch_loop.batch_progress"]["total"] == tracked((21 + current,) * 4)

    def test_batches_of_an_open_window_are_taken_off_the_total(self) -> None:
        result = rewritten(loops((2, 2, 1, 1), (6, 6, 6, 5), total=17), within(1, 4))

        assert result["epoch_loop.batch_progress"]["total"] == tracked((15,) * 4)

    def test_a_resume_in_other_steps_counts_the_epoch_in_them(self) -> None:
        result = rewritten(loops((2, 2, 1, 1), (6, 6, 6, 5), total=17), within(1, 12))

        assert result["epoch_loop.batch_progress"]["total"] == tracked((23,) * 4)

    def test_other_progress_is_put_back_to_what_was_completed(self) -> None:
        result = rewritten(loops((2, 2, 1, 1), (4, 4, 3, 3)), within(1, 3))
        optimizer = result["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        both = {"ready": 8, "completed": 8}

        assert result["epoch_loop.scheduler_progress"] == {"total": both, "current": both}
        assert result["epoch_loop.manual_optimization.optim_step_progress"] == {"total": both, "current": both}
        assert optimizer["step"] == {"total": both, "current": both}
        assert optimizer["zero_grad"]["total"] == {**both, "started": 8}

    def test_a_validation_begins_anew(self) -> None:
        result = rewritten(loops((2, 2, 1, 1), (3, 3, 3, 3)), within(1, 3))

        assert result["epoch_loop.val_loop.batch_progress"] == {
            "total": tracked((0,) * 4),
            "current": tracked((0,) * 4),
            "is_last_batch": False,
        }

    def test_states_of_loaders_that_lightning_would_load_are_left_out(self) -> None:
        assert rewritten(loops((2, 2, 1, 1), (3, 3, 3, 3)), within(1, 3))["state_dict"] == {}

    def test_nothing_else_is_added_or_lost(self) -> None:
        state = {**loops((2, 2, 1, 1), (3, 3, 3, 3)), "somebody.elses": {"deep": [1, {"a": 2}]}}
        result = rewritten(state, within(1, 3))

        assert result.keys() == state.keys()
        assert result["somebody.elses"] == {"deep": [1, {"a": 2}]}

    def test_a_state_of_a_run_without_optimizers_or_validation_is_rewritten_too(self) -> None:
        full = loops((2, 2, 1, 1), (4, 4, 3, 3))
        kept = ("state_dict", "epoch_progress", "epoch_loop.state_dict", "epoch_loop.batch_progress")

        assert locate(rewritten({key: full[key] for key in kept}, within(1, 3))) == within(1, 3)

    @pytest.mark.parametrize("progress", WITHIN)
    def test_lightnings_own_loops_take_it_and_give_it_back(self, progress: str) -> None:
        fit_loop = a_trainer().fit_loop
        result = rewritten(fit_loop.state_dict(), WITHIN[progress])
        fit_loop.load_state_dict(result)

        assert fit_loop.state_dict() == result
        assert locate(fit_loop.state_dict()) == WITHIN[progress]

    def test_the_keys_are_those_of_lightnings_own_loops(self) -> None:
        ours, theirs = loops((1, 1, 0, 0), (1, 1, 0, 0)), a_trainer().fit_loop.state_dict()
        ours["state_dict"].clear()

        assert shape(ours) == shape(theirs)

    @pytest.mark.parametrize("progress", WITHIN)
    def test_the_next_step_is_where_the_data_goes_on_within_the_epoch(self, progress: str) -> None:
        trainer = a_trainer()
        continue_from(trainer, WITHIN[progress])

        assert next_step(trainer) == (WITHIN[progress].epoch, WITHIN[progress].batch)
        assert trainer.current_epoch == WITHIN[progress].epoch

    @pytest.mark.parametrize("batch", [(3, 3, 3, 3), (4, 3, 3, 3), (4, 4, 3, 3), (3, 3, 3, 2)])
    def test_the_next_step_counts_only_batches_that_have_been_trained_on(self, batch: Counts) -> None:
        trainer = a_trainer()
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        progress.load_state_dict(loops((1, 1, 0, 0), batch)["epoch_loop.batch_progress"])
        trainer.fit_loop.epoch_progress.current.started = 1

        assert next_step(trainer) == (0, 3)

    def test_between_epochs_the_next_step_is_the_first_whatever_the_batches_counted(self) -> None:
        trainer = a_trainer()
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        progress.load_state_dict(loops((1, 1, 0, 0), (3, 3, 3, 3))["epoch_loop.batch_progress"])
        epoch: Any = trainer.fit_loop.epoch_progress.current
        epoch.started = epoch.processed = 1

        assert next_step(trainer) == (1, 0)


def leaves(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for value in list(state.values()):
        if isinstance(value, dict):
            yield from leaves(value)
    yield state


def shape(state: Any) -> Any:
    return {key: shape(value) for key, value in state.items()} if isinstance(state, dict) else type(state)


WHOLE = LoopProgress(
    epoch=2, batch=5, running=True, validate=True, stepped=19, train_reload_epoch=1, val_reload_epoch=2
).to_dict()


class TestPlainData:
    @given(MOMENTS)
    def test_it_survives_json(self, progress: LoopProgress) -> None:
        assert LoopProgress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress

    def test_everything_in_it_is_kept(self) -> None:
        assert LoopProgress.from_dict(WHOLE).to_dict() == WHOLE

    @pytest.mark.parametrize("key", WHOLE)
    def test_a_missing_key_is_refused_by_name(self, key: str) -> None:
        with pytest.raises(DamagedStateError, match=f"under '{key}', got None"):
            LoopProgress.from_dict({name: value for name, value in WHOLE.items() if name != key})

    @pytest.mark.parametrize("wrong", [None, 1.0, [1], {}, b"1"])
    @pytest.mark.parametrize("key", WHOLE)
    def test_a_value_of_another_type_is_refused_by_name(self, key: str, wrong: Any) -> None:
        with pytest.raises(DamagedStateError, match=f"must hold a (int|bool|str) under '{key}'"):
            LoopProgress.from_dict({**WHOLE, key: wrong})

    def test_truth_is_no_number_and_a_number_no_truth(self) -> None:
        for key, wrong in [("epoch", True), ("batch", False), ("running", 1), ("ended", 0)]:
            with pytest.raises(DamagedStateError, match=f"under '{key}'"):
                LoopProgress.from_dict({**WHOLE, key: wrong})

    def test_keys_that_nobody_asks_for_are_let_pass(self) -> None:
        assert LoopProgress.from_dict({**WHOLE, "colour": "red"}).to_dict() == WHOLE

    def test_reading_leaves_the_dict_as_it_was(self) -> None:
        data = dict(WHOLE)
        LoopProgress.from_dict(data)

        assert data == WHOLE

    def test_writing_gives_a_new_dict_each_time(self) -> None:
        progress = LoopProgress()
        progress.to_dict()["epoch"] = 7

        assert progress.to_dict()["epoch"] == 0


class TestEpochSetTo:
    def test_the_trainer_is_in_that_epoch_for_a_while(self) -> None:
        trainer = a_trainer()
        with epoch_set_to(trainer, 5):
            assert trainer.current_epoch == 5

        assert trainer.current_epoch == 0

    def test_every_counter_is_put_back(self) -> None:
        trainer = a_trainer()
        continue_from(trainer, within(4, 3))
        before = trainer.fit_loop.state_dict()
        with epoch_set_to(trainer, 1):
            assert trainer.current_epoch == 1

        assert trainer.fit_loop.state_dict() == before

    def test_an_error_puts_them_back_too(self) -> None:
        trainer = a_trainer()
        continue_from(trainer, within(4, 3))
        before = trainer.fit_loop.state_dict()
        with pytest.raises(KeyError), epoch_set_to(trainer, 1):
            raise KeyError

        assert trainer.fit_loop.state_dict() == before

    def test_the_batches_are_left_alone(self) -> None:
        trainer = a_trainer()
        continue_from(trainer, within(4, 3))
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        with epoch_set_to(trainer, 1):
            assert batches.processed == 3


class TestLimits:
    def test_a_new_trainer_knows_no_limit(self) -> None:
        assert not step_is_beyond_epoch(a_trainer(), 10**9)

    @pytest.mark.parametrize(("step", "beyond"), [(0, False), (6, False), (7, True), (8, True)])
    def test_a_limited_epoch_has_no_step_from_its_limit_on(self, step: int, beyond: bool) -> None:
        trainer = a_trainer()
        trainer.fit_loop.max_batches = 7

        assert step_is_beyond_epoch(trainer, step) is beyond


class TestWindowsAfterAChange:
    """Windows are counted from the epoch's first batch; a resume with another batch size may fall into one."""

    @pytest.fixture
    def changed(self, tmp_path: Path) -> Path:
        """A checkpoint after 5 batches of 2: 10 batches of 1, in the middle of a window of 4."""
        train(lambda: numbers_module(val=None), max_steps=5).trainer.save_checkpoint(tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    @pytest.mark.parametrize("batch", [0, 1, 3])
    def test_a_stop_in_the_window_of_the_change_resumes_exactly(
        self, tmp_path: Path, changed: Path, batch: int
    ) -> None:
        def make() -> Any:
            return numbers_module(batch_size=1, val=None)

        how: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1}
        stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=0, batch=batch)
        train(make, ckpt_path=changed, callbacks=[stop], **how)
        resumed = train(make, ckpt_path=tmp_path / "stop.ckpt", seed=99, **how)
        whole = train(make, ckpt_path=changed, **how)
        assert stop.ledger is not None
        assert_stitches([stop.ledger, resumed.ledger], whole.ledger)
        assert_same_end(resumed, whole)

    def test_a_stop_in_the_window_of_the_change_loses_no_sample_of_several_loaders(self, tmp_path: Path) -> None:
        def make(batch_size: int) -> Any:
            datasets = {"a": Numbers(22), "b": Numbers(6, first=100)}
            return numbers_module(train=datasets, batch_size=batch_size, val=None)

        how: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1}
        first = train(lambda: make(2), max_steps=5)
        first.trainer.save_checkpoint(tmp_path / "changed.ckpt")
        stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=0)
        train(lambda: make(1), ckpt_path=tmp_path / "changed.ckpt", callbacks=[stop], **how)
        resumed = train(lambda: make(1), ckpt_path=tmp_path / "stop.ckpt", seed=99, **how)

        ledger = itertools.chain(first.ledger, resumed.ledger)
        seen = [index for event in ledger if event[0] == "train" for index in dict(event[4])["a"]]
        assert sorted(seen) == list(range(22))

    def test_the_state_in_that_window_stands_at_the_place_of_the_change(self, tmp_path: Path, changed: Path) -> None:
        stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=0)
        train(
            lambda: numbers_module(batch_size=1, val=None),
            ckpt_path=changed,
            callbacks=[stop],
            accumulate_grad_batches=4,
        )
        state = torch.load(tmp_path / "stop.ckpt", weights_only=True)["StatefulDataModule"]["lightning_stateful"]

        assert state["progress"] == {"epoch": 0, "cycle": 0, "consumed": 10}
