"""What the command computes beforehand is what a run on real ranks does then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import command_data
from support.ddp_runs import run
from support.ledger import batches, parts, samples, trained
from support.ranks import Ranks
from support.runs import stopped, train, train_alone

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

DATA = "support.command_data"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("ranks"))


def resumed(folder: Path, names: list[str], at: str) -> dict[str, Any]:
    """What goes on from checkpoints of one rank on these, and a run that is stopped in epoch 1."""
    found: dict[str, Any] = {"path": str(folder / "two.ckpt")}
    for name in names:
        found[name] = run(getattr(command_data, name), ckpt_path=Path(at) / f"{name}.ckpt").ledger
    found["stopped"] = stopped(folder / "two.ckpt", command_data.numbers, epoch=1, batch=2, run=run)
    return found


def test_plans_are_what_ranks_train_and_indices_what_they_were_trained_on(
    checkpoints: Any, ranks: Ranks, tell: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = {"numbers": 1, "mixture": 1, "buckets": 0}
    for name in epochs:
        shutil.copy(checkpoints(name), tmp_path)
    runs = ranks.of(resumed, list(epochs), str(tmp_path))
    for name, epoch in epochs.items():
        path, taken = checkpoints(name), trained(runs[0][name])
        left = len([event for event in taken if event[1] == epoch])
        with_module = json.loads(tell("plan", path, f"{DATA}:{name}", "--devices", 2, "--json").out)
        assert (with_module["steps_left"], with_module["ranks"]) == (left, 2), name
        checked = json.loads(tell("check", path, f"{DATA}:{name}", "--devices", 2, "--json").out)
        assert checked["next_batch"] == taken[0][2] + 1, name
        alone = tell("plan", path, "--nodes", 2, "--devices", 1, "--json")
        if name == "buckets":
            assert (alone.code, alone.err.count("\n")) == (2, 1)
            assert "depends on the lengths of the samples: name its factory too" in alone.err
        else:
            assert json.loads(alone.out)["steps_left"] == left, name
    rest = json.loads(tell("plan", checkpoints("numbers"), "--devices", 2, "--json").out)["loaders"][""]
    assert rest["samples_left"] == sum(len(samples(one["numbers"], 1)) for one in runs)
    for epoch in range(2):
        told = json.loads(tell("trained", runs[0]["path"], f"{DATA}:numbers", "--epoch", epoch, "--json").out)
        by_rank = [[list(batch) for batch in batches(one["stopped"], epoch)] for one in runs]
        assert (told["ranks"], told["loaders"][""]) == (2, by_rank)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(command_data.numbers, ckpt_path=Path(runs[0]["path"]), max_epochs=2)
    assert (
        "Resumed at epoch 1, batch 3 of 6 (12 of 22 samples): saved on 2 ranks x 2, goes on on 1 rank x 2; "
        "next is batch 7 of 11." in caplog.text
    )


def test_indices_are_those_that_a_run_was_trained_on(checkpoints: Any, tell: Any) -> None:
    for name, epoch in {"numbers": 1, "plain": 1, "drawn": 0, "buckets": 0}.items():
        told = tell("trained", checkpoints(name), f"{DATA}:{name}", "--epoch", epoch, "--json")
        (found,) = json.loads(told.out)["loaders"][""]
        expected = [list(batch) for batch in batches(checkpoints.ledgers[name], epoch)]
        assert (told.code, found) == (0, expected), name
    found = json.loads(
        tell("trained", checkpoints("side_by_side"), f"{DATA}:side_by_side", "--epoch", 0, "--json").out
    )["loaders"]
    for name in ("a", "b"):
        assert found[name] == [[list(batch) for batch in parts(checkpoints.ledgers["side_by_side"], name, 0)]]
    lines = tell("trained", checkpoints("numbers"), f"{DATA}:numbers", "--epoch", 1, "--first", 1, "--last", 2).out
    step, following = (" ".join(map(str, batch)) for batch in batches(checkpoints.ledgers["numbers"], 1)[1:3])
    assert lines == f"epoch 1, step 1, rank 0: {step}\nepoch 1, step 2, rank 0: {following}\n"
    none = tell("trained", checkpoints("numbers"), f"{DATA}:numbers", "--epoch", 1, "--first", 7)
    assert (none.code, none.out) == (0, "")
    assert "note: no step is listed: by the checkpoint 4 steps were trained of epoch 1" in none.err


LISTED = "note: epoch 0 is listed as of the present ranks, batch size and seed. Whether it was begun with others"


@pytest.mark.parametrize("name", ["numbers", "mixture", "buckets", "side_by_side"])
def test_a_list_says_that_it_is_of_the_present_settings(tell: Any, tmp_path: Path, name: str) -> None:
    first, second, make = tmp_path / "first.ckpt", tmp_path / "second.ckpt", getattr(command_data, name)
    run = train_alone if name == "side_by_side" else train
    stopped(first, make, batch=1, run=run)
    stopped(second, make, batch=3, run=run, ckpt_path=first)
    told = tell("trained", second, f"{DATA}:{name}", "--epoch", 0)
    assert (told.code, told.err.count("\n"), told.err.startswith(LISTED)) == (0, 1, True)


def test_a_list_that_is_not_of_the_run_is_called_so(tell: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    stopped(first, command_data.numbers, batch=3)
    stopped(second, command_data.large_batches, batch=1, ckpt_path=first)
    told = tell("trained", second, f"{DATA}:large_batches", "--epoch", 0, "--json")
    notes = json.loads(told.out)["notes"]
    assert (told.code, len(notes)) == (0, 2)
    assert "the checkpoint has consumed 14, not 15." in notes[1]


def test_a_plan_says_what_it_does_not_count(tell: Any, tmp_path: Path) -> None:
    stopped(tmp_path / "cut.ckpt", command_data.round_robin, epoch=1, batch=3, limit_train_batches=6)
    told = tell("plan", tmp_path / "cut.ckpt", "--devices", 1, "--batch-size", 2)
    assert told.code == 0
    assert (
        "note: The run took 6 of the 14 steps of an epoch (limit_train_batches), which is not counted here." in told.out
    )
    assert (
        "note: A resume refuses another batch size than the saved [2, 3, 1], unless accept=('batch_size',)" in told.out
    )
    plain = tell("plan", tmp_path / "cut.ckpt", "--devices", 2).out
    assert plain.count("note: ") == 1


def test_a_plan_of_a_stream_counts_shards_that_ranks_share(checkpoints: Any, tell: Any) -> None:
    found = json.loads(tell("plan", checkpoints("stream"), f"{DATA}:stream", "--devices", 4, "--json").out)
    assert found["steps_left"] is None
    words = tell("plan", checkpoints("stream"), f"{DATA}:stream", "--devices", 4).out
    assert words.startswith("on 4 ranks: how many steps are left of epoch 0 is known only when it ends\n")
    assert found["loaders"][""]["shards"] == {"left": 8, "read_by_several_ranks": 4}
    # Shards that were read are not left on the saved ranks either.
    same = json.loads(tell("plan", checkpoints("stream"), f"{DATA}:stream", "--json").out)
    assert same["loaders"][""]["shards"] == {"left": 8, "read_by_several_ranks": 0}
    for command in (("plan", checkpoints("stream"), "--devices", 2), ("trained", checkpoints("stream"))):
        more = (f"{DATA}:stream", "--epoch", 0) if command[0] == "trained" else ()
        told = tell(*command, *more)
        assert (told.code, told.err.count("\n")) == (2, 1)


def test_a_plan_of_a_stream_whose_run_left_batches_out_counts_shards(tell: Any, tmp_path: Path) -> None:
    for skipped in (range(1, 3), range(2, 9)):
        path = tmp_path / f"{skipped.stop}.ckpt"
        stopped(path, lambda skip=skipped: command_data.stream(skip={0: skip}), batch=3)
        stopped(tmp_path / "plain.ckpt", command_data.stream, batch=3 + len(skipped))
        told, expected = (tell("plan", at, f"{DATA}:stream").out for at in (path, tmp_path / "plain.ckpt"))
        assert "shard" in told
        assert told == expected


REFUSED = {"other_seed": "seed: saved 7, now 8", "fewer": "dataset.length: saved 22, now 20", "mixture": "kind: saved"}


def test_a_check_refuses_what_a_resume_refuses_and_trains_nothing(checkpoints: Any, tell: Any) -> None:
    path = checkpoints("numbers")
    for name, said in REFUSED.items():
        told = tell("check", path, f"{DATA}:{name}")
        assert (told.code, told.err) == (1, "")
        assert said in told.out
        assert json.loads(tell("check", path, f"{DATA}:{name}", "--json").out)["resumes"] is False
    assert tell("check", path, f"{DATA}:numbers").out == "resumes on 1 rank: next is batch 5 of 11 of epoch 1\n"
    assert "next is batch 4 of 8" in tell("check", path, f"{DATA}:large_batches").out
    accepted = tell("check", path, f"{DATA}:other_seed", "--accept", "seed")
    assert (accepted.code, "note: " in accepted.out) == (0, True)
    # Of loaders without a seed of their own the saved one is taken, or the one that is given.
    assert tell("check", checkpoints("plain"), f"{DATA}:plain").code == 0
    assert tell("check", checkpoints("plain"), f"{DATA}:plain", "--seed", 3).code == 1
    assert tell("check", checkpoints("lightning"), f"{DATA}:plain", "--devices", 1).code == 1
    # Beside a module's own seed it is no default: a Trainer has none of it.
    told = tell("trained", checkpoints("own_sampler"), f"{DATA}:own_sampler", "--epoch", 0, "--json")
    expected = [list(batch) for batch in batches(checkpoints.ledgers["own_sampler"], 0)]
    assert (told.code, json.loads(told.out)["loaders"][""]) == (0, [expected])
    assert tell("check", checkpoints("own_sampler"), f"{DATA}:own_sampler", "--seed", 7).code == 1


def test_a_check_knows_a_callback_beside_the_module_and_limits(tell: Any, tmp_path: Path) -> None:
    beside = tmp_path / "beside.ckpt"
    own = StatefulDataCallback(seed=3, log_data=True)
    with pytest.warns(StatefulWarning, match="what the model draws, from 3"):
        stopped(beside, command_data.numbers, callbacks=[own], epoch=1, batch=3, limit_train_batches=6)
    told = tell("check", beside, f"{DATA}:numbers")
    assert (told.code, told.out.splitlines()[0]) == (0, "resumes on 1 rank: next is batch 5 of 6 of epoch 1")
    assert "note: The run took 6 of 11 steps of an epoch (limit_train_batches)" in told.out
    assert "note: The run had a StatefulDataCallback with seed 3 beside its data module" in told.out
    for command in (("plan",), ("trained", "--epoch", 0)):
        assert tell(command[0], beside, f"{DATA}:numbers", *command[1:]).code == 0, command
    assert "seed: saved 7, now 8" in tell("check", beside, f"{DATA}:other_seed").out
    for name, make in {"numbers": command_data.numbers, "plain": command_data.plain}.items():
        run = train_alone if name == "plain" else train
        with pytest.warns(StatefulWarning, match="is not shuffled"):
            stopped(tmp_path / "few.ckpt", make, run=run, epoch=1, batch=2, overfit_batches=4)
        told = tell("check", tmp_path / "few.ckpt", f"{DATA}:{name}")
        assert (told.code, told.out.splitlines()[0]) == (0, "resumes on 1 rank: next is batch 4 of 4 of epoch 1")


def test_a_check_refuses_a_tensor_that_a_disk_has_changed(checkpoints: Any, tell: Any, tmp_path: Path) -> None:
    whole = checkpoints("numbers").read_bytes()
    weight = torch.load(checkpoints("numbers"), weights_only=True)["state_dict"]["net.0.weight"]
    at = whole.index(weight.numpy().tobytes())
    path = tmp_path / "flipped.ckpt"
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert not torch.equal(torch.load(path, weights_only=True)["state_dict"]["net.0.weight"], weight)
    told = tell("check", path, f"{DATA}:numbers")
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert f"{path}: it is damaged: the checksum of " in told.err
    path.write_bytes(whole[: at + 1])
    assert "truncated or damaged" in tell("check", path, f"{DATA}:numbers").err


def test_a_difference_is_accepted_by_what_the_refusal_says_to_type(checkpoints: Any, tell: Any) -> None:
    path, unknown = checkpoints("numbers"), "note: accept names 'sed', which no difference is called by here."
    refused = tell("check", path, f"{DATA}:other_seed", "--accept", "sed")
    assert (refused.code, refused.err) == (1, f"{unknown} Is 'seed' meant?\n")
    assert "or accept the change with --accept seed.\n" in f"{refused.out}\n"
    assert tell("check", path, f"{DATA}:other_seed", "--accept", "seed").code == 0
    assert unknown in tell("plan", path, f"{DATA}:numbers", "--accept", "sed").out
    for command in (("plan",), ("trained", "--epoch", 0)):
        told = tell(command[0], path, f"{DATA}:other_seed", "--accept", "sed", *command[1:])
        assert (told.code, told.out) == (2, "")
        assert unknown in told.err
        assert "--accept seed." in told.err


def test_numbers_of_packed_data_are_said_to_be_those_of_sequences(checkpoints: Any, tell: Any) -> None:
    told = tell("trained", checkpoints("packed"), f"{DATA}:packed", "--epoch", 0)
    assert told.out.startswith("epoch 0, step 0, rank 0: 0 1\n")
    assert "the numbers are those of sequences, not of documents" in told.err
    found = json.loads(tell("trained", checkpoints("packed"), f"{DATA}:packed", "--epoch", 0, "--json").out)
    assert "sequences, not of documents" in found["notes"][1]
    told = tell("trained", checkpoints("numbers"), f"{DATA}:numbers", "--epoch", 0)
    assert (told.err.count("\n"), "sequences" in told.err) == (1, False)


WRONG = {
    "no factory": (("check", "{}", "support.command_data"), "names no factory: write package.module:function"),
    "no module": (("check", "{}", "no_such_module:make"), "ModuleNotFoundError"),
    "no such name": (("check", "{}", f"{DATA}:make"), "AttributeError"),
    "a factory that gives nothing": (("check", "{}", f"{DATA}:nothing"), f"{DATA}:nothing returns None, and a data"),
    "no factory but a number": (("plan", "{}", f"{DATA}:number"), f"{DATA}:number is 3, and a data module"),
    "a factory that fails": (("check", "{}", f"{DATA}:fails"), "KeyError: 'no such table'"),
    "no ranks": (("plan", "{}", "--devices", "0"), "Invalid value for '--devices'"),
    "a batch size beside a factory": (("plan", "{}", f"{DATA}:numbers", "--batch-size", "4"), "--batch-size is for"),
    "an epoch to come": (("trained", "{}", f"{DATA}:numbers", "--epoch", "2"), "--epoch 2 has not been trained"),
    "an unknown flag": (("inspect", "{}", "--jsn"), "--jsn"),
    "no checkpoint": (("inspect",), "Missing argument 'CHECKPOINT'"),
    "an unknown command": (("look", "{}"), "No such command 'look'"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_done_is_said_in_a_line(checkpoints: Any, tell: Any, arguments: Any, said: str) -> None:
    told = tell(*(argument.format(checkpoints("numbers")) for argument in arguments))
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith("lightning-stateful: ")
    assert said in told.err
