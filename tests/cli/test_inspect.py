"""A checkpoint says where it stands, what a resume refuses, and how it differs from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import command_data
from support.runs import ended

import lightning_stateful
from lightning_stateful.cli.reading import read_checkpoint
from lightning_stateful.state import sealed

WORDS = {
    "numbers": ("epoch 1, batch 4 of 11 (36%); global step 15", "epoch 1: trained on 8 of 22 samples (36%)", "x 2,"),
    "mixture": ("epoch 1, batch 4 of 8 (50%)", "served since training began:", "1.667 passes over its 9"),
    "round_robin": ("3 sources in turn, seed 7", "served since the epoch began:"),
    "buckets": ("40 samples in batches of like lengths, seed 7", "max_tokens=12"),
    "stream": ("pass 0, 1 x 1 worker slots", "9 shards were assigned", "rank 0, worker 0: 4 batches; 8 samples"),
    "plain": ("22 samples, shuffled by seed 7", "goes on with other ranks, workers, batch sizes"),
    "side_by_side": ("training data 'a'", "training data 'b'", "trained on 8 of 10 samples (80%)"),
    "drawn": ("A sampler that is iterated", "trained on 8 items", "sampler.class=WeightedRandomSampler"),
    "iterable": ("An iterable dataset", "goes on with these ranks, workers, batch sizes"),
}


@pytest.mark.parametrize("name", WORDS)
def test_it_says_where_each_kind_of_data_stands(checkpoints: Any, tell: Any, name: str) -> None:
    told, found = tell("inspect", checkpoints(name)), json.loads(tell("inspect", checkpoints(name), "--json").out)
    assert (told.code, told.err) == (0, "")
    for words in (*WORDS[name], "written on 1 rank", f"lightning_stateful {lightning_stateful.__version__}"):
        assert words in told.out
    assert found["position"]["batch"] == 4
    assert (found["problems"], found["written"]["versions"]["torch"]) == ([], str(torch.__version__))


def test_of_mixed_streams_all_that_was_served_is_counted_over_passes(checkpoints: Any, tell: Any) -> None:
    path = checkpoints.folder / "mixed sequences.ckpt"
    run = ended(path, command_data.mixed_sequences, max_epochs=1)
    report = run.trainer.datamodule.position_report()["sources"]
    served = {name: of["samples"] for name, of in report.items()}
    # Several passes over the second.
    assert served["short"] > 20
    stream = json.loads(tell("inspect", path, "--json").out)["loaders"][""]["stream"]
    assert stream["served_since_training_began"] == served
    out = tell("inspect", path).out
    assert f"sequences served since training began: long: {served['long']}, short: {served['short']}\n" in out
    assert f"; short: {served['short']} sequences, " in out


def test_names_in_a_foreign_checkpoint_do_not_reach_the_terminal_raw(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    state = dict(read_checkpoint(checkpoints("numbers")).needed())
    del state["checksum"]
    bad = "\x1b[2J\nall is fine\u202e"
    named = sealed({**state, "config": {**state["config"], bad: bad}})
    several = {bad: named, "other": named}
    cases = {
        "config": (named, ["inspect"], 0),
        "several": (several, ["inspect"], 0),
        "no state": ({bad: 1}, ["inspect"], 2),
        "damaged": ({**named, bad: 1}, ["inspect"], 1),
        "refused": (named, ["check", "support.command_data:numbers", "--devices", 1], 1),
        "refused in an error": (named, ["plan", "support.command_data:numbers", "--devices", 1], 2),
        "compared": (named, ["diff", checkpoints("numbers")], 1),
    }
    for name, (contents, (command, *more), code) in cases.items():
        (tmp_path / "bad.json").write_text(json.dumps(contents))
        told = tell(command, tmp_path / "bad.json", *more)
        lines = (told.out + told.err).splitlines()
        assert told.code == code, (name, told.err)
        assert any("all is fine" in line for line in lines) or name == "damaged", name
        assert not any(line.startswith("all is fine") or not line.isprintable() for line in lines), name


def test_a_checkpoint_without_a_data_state_says_what_a_resume_would_replay(checkpoints: Any, tell: Any) -> None:
    told = tell("inspect", checkpoints("lightning"))
    assert told.code == 1
    assert "epoch 0, batch 4; global step 4" in told.out
    assert "No data state" in told.out
    assert "replay as many as 4 batches" in told.out
    path = checkpoints("lightning")
    of_data = ("trained", path, "support.command_data:plain", "--epoch", 0)
    for command in (("plan", path), ("plan", path, "--devices", 2), ("diff", path, path), of_data):
        told = tell(*command)
        assert (told.code, told.err.count("\n")) == (2, 1)
        assert "it has no state of training data" in told.err


def test_what_a_resume_refuses_whatever_the_data_is_a_finding(checkpoints: Any, tell: Any, tmp_path: Path) -> None:
    def changed(change: Any) -> Path:
        contents = torch.load(checkpoints("numbers"), weights_only=True)
        change(contents)
        torch.save(contents, tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    callback = ("callbacks", "StatefulDataCallback")
    cases = {
        "replaced by averages": lambda all: all[callback[0]][callback[1]].update(averaged=True),
        "reads version 1": lambda all: all[callback[0]][callback[1]].update(version=2),
        "does not have the checksum": lambda all: all["StatefulDataModule"]["lightning_stateful"]["progress"].update(
            consumed=9
        ),
    }
    cases["had not yet restored"] = lambda all: all[callback[0]][callback[1]].update(restored=False)
    cases["put averages in place"] = cases.pop("replaced by averages")
    for said, change in cases.items():
        path = changed(change)
        told = tell("inspect", path)
        assert (told.code, told.err) == (1, "")
        assert said in told.out
        refused = tell("check", path, "support.command_data:numbers")
        assert (refused.code, said in refused.out) == (1, True)
        assert tell("plan", path, "--devices", 2).code == 2


def test_a_checkpoint_of_a_process_that_only_started_the_ranks_says_so(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    contents = torch.load(checkpoints("numbers"), weights_only=True)
    del contents["StatefulDataModule"]
    contents["callbacks"]["StatefulDataCallback"].update(written={}, data=None)
    torch.save(contents, tmp_path / "parent.ckpt")
    told = tell("inspect", tmp_path / "parent.ckpt")
    assert told.code == 1
    assert "in one that started others to train (ddp_notebook" in told.out
    assert "without lightning-stateful" not in told.out


def test_a_difference_of_two_checkpoints_has_the_remedy_of_a_resume(checkpoints: Any, tell: Any) -> None:
    alike = tell("diff", checkpoints("numbers"), checkpoints("numbers"))
    assert alike.code == 0
    assert "position: the same" in alike.out
    told = tell("diff", checkpoints("plain"), checkpoints("drawn"))
    assert told.code == 1
    assert "kind: 'shuffled' | 'sampler'. Use the order or sampler that the checkpoint was made with" in told.out
    found = json.loads(tell("diff", checkpoints("plain"), checkpoints("drawn"), "--json").out)
    by_path = {one["path"]: one for one in found["settings"]}
    assert by_path["kind"]["saved"] == "shuffled"
    assert {"path": "loops.epoch", "first": 1, "second": 0} in found["position"]
    other = tell("diff", checkpoints("numbers"), checkpoints("mixture"))
    assert "module: 'StatefulDataModule' | 'MixtureDataModule'. Give the data module its old name" in other.out
