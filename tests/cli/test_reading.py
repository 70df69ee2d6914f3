"""Checkpoints of any kind are read, whoever wrote them; nothing in them runs, and their tensors are not read."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_stateful import StatefulLoader
from lightning_stateful.cli.reading import read_checkpoint
from lightning_stateful.state import sealed


class Hostile:
    """Runs a program where it is unpickled."""

    def __init__(self, function: Any, argument: str) -> None:
        self.function, self.argument = function, argument

    def __reduce__(self) -> Any:
        return self.function, (self.argument,)


class Settings(dict[str, Any]):
    """A dict of a class that the command does not have, as hyperparameters are."""


class Numbered(list[int]):
    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers)
        self.more = {"set": {1, 2}, "path": Path("a"), "dtype": torch.float16, "counts": collections.Counter("aab")}


def saved(contents: Any, path: Path, **options: Any) -> Path:
    torch.save(contents, path, **options)
    return path


def contents_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, f"{os.system.__module__}.system"), (eval, "builtins.eval"), (exec, "builtins.exec")],
    ids=["system", "eval", "exec"],
)
def test_a_hostile_pickle_is_refused_in_a_line_and_nothing_of_it_runs(
    checkpoints: Any, tell: Any, tmp_path: Path, function: Any, named: str, zipped: bool, protocol: int
) -> None:
    trace = tmp_path / "trace"
    argument = f"touch {trace}" if function is os.system else f"__import__('pathlib').Path({str(trace)!r}).touch()"
    contents = {**contents_of(checkpoints("numbers")), "hyper_parameters": Hostile(function, argument)}
    path = saved(contents, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    for command in (("inspect", path), ("diff", path, path), ("plan", path, "--devices", 2)):
        told = tell(*command)
        assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
        assert f"it names {named}, which no checkpoint needs" in told.err
    assert not trace.exists()
    # It does run where it is loaded.
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_classes_that_the_command_does_not_have_are_no_hindrance_and_are_not_imported(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    found = Settings(lr=0.1, path=Path("a"), fn=json.dumps, model=torch.nn.Linear(2, 2))
    contents = {**contents_of(checkpoints("numbers")), "hyper_parameters": found, "numbered": Numbered(1, 2)}
    path = saved(contents, tmp_path / "own.ckpt")
    code = "import sys; from lightning_stateful.cli import main; code = main(sys.argv[1:]); "
    code += "print([name for name in ('torch', 'numpy', 'lightning', 'test_reading') if name in sys.modules], code)"
    command = [sys.executable, "-W", "error", "-c", code, "inspect", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines()[-1] == "[] 0"
    assert tell("inspect", path).out.splitlines()[1:] == tell("inspect", checkpoints("numbers")).out.splitlines()[1:]


def test_two_gigabytes_of_tensors_are_not_read(checkpoints: Any, tmp_path: Path) -> None:
    contents = contents_of(checkpoints("numbers"))
    contents["state_dict"] = {str(number): torch.empty(2**26) for number in range(8)}
    path = tmp_path / "large.ckpt"
    with torch.serialization.skip_data():
        torch.save(contents, path)
    assert path.stat().st_size > 2**31
    code = "import resource, sys; from lightning_stateful.cli import main; "
    code += "code = main(sys.argv[1:]); used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024; "
    code += "print(code, used)"
    # A small process starts it, because a process counts the memory of the one that it is forked from.
    start = (
        f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {code!r}, *sys.argv[1:]]).returncode)"
    )
    command = [sys.executable, "-c", start, "inspect", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found, mebibytes = run.stdout.splitlines()[-1].split()
    assert found == "0"
    assert float(mebibytes) < 400


def test_folders_of_strategies_are_read_by_the_file_that_holds_the_states(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    # As strategies write them: without the weights, which stand in other files.
    contents = contents_of(checkpoints("numbers"))
    rest = {name: value for name, value in contents.items() if name not in ("state_dict", "optimizer_states")}
    engine = {"module": contents["state_dict"], "ds_version": "0.18", **rest}
    written = tell("inspect", checkpoints("numbers")).out.splitlines()[1:]
    for name, found in {
        "meta.pt": rest,
        "checkpoint/mp_rank_00_model_states.pt": engine,
        "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt": engine,
    }.items():
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        saved(found, folder / name)
        told = tell("inspect", folder)
        assert (told.code, told.out.splitlines()[1:]) == (0, written)
        assert "Strategy" in told.out.splitlines()[0]
    told = tell("inspect", tmp_path)
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "is a folder without meta.pt" in told.err


def test_the_state_of_a_loader_is_read_wherever_a_program_has_saved_it(tell: Any, tmp_path: Path) -> None:
    loader = StatefulLoader(list(range(40)), batch_size=4, shuffle=True, seed=3)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(state))
    legacy = io.BytesIO()
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    (tmp_path / "legacy.pt").write_bytes(legacy.getvalue())
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"step": 2, "data": state}))
    for path in (
        tmp_path / "state.json",
        tmp_path / "legacy.pt",
        tmp_path / "plain.pkl",
        saved(state, tmp_path / "state.pt"),
        saved({"model": {"w": torch.ones(2)}, "loader": state}, tmp_path / "fabric.ckpt"),
    ):
        told = tell("inspect", path)
        assert told.code == 0, told.err
        assert "epoch 0: trained on 8 of 40 samples (20%)" in told.out
        assert read_checkpoint(path).loaders == {"": state}
    several = saved({"train": state, "aux": state, "step": 3}, tmp_path / "several.ckpt")
    assert read_checkpoint(several).loaders == {"train": state, "aux": state}


def test_what_cannot_be_read_is_said_in_a_line(checkpoints: Any, tell: Any, tmp_path: Path) -> None:
    whole = checkpoints("numbers").read_bytes()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "text")
    flipped = bytearray(whole)
    flipped[whole.index(b"shuffled") + 3] ^= 1
    cases: dict[str, tuple[bytes, str]] = {
        "truncated": (whole[: len(whole) // 2], "truncated or damaged"),
        "flipped": (bytes(flipped), "truncated or damaged"),
        "empty": (b"", "neither a file of torch.save nor JSON"),
        "text": (b"epoch: 3", "neither a file of torch.save nor JSON"),
        "half": (b'{"version": 1,', "no whole JSON"),
        "pickle": (pickle.dumps(list(range(9)))[:-3], "truncated or damaged"),
        "list": (pickle.dumps([1]), "a checkpoint is a dict"),
        "weights": (pickle.dumps({"layer": 1}), "neither a state of training data nor a Trainer's loops"),
        "archive": ((tmp_path / "other.zip").read_bytes(), "none that torch.save has written"),
    }
    for name, (data, said) in cases.items():
        (tmp_path / name).write_bytes(data)
        told = tell("inspect", tmp_path / name)
        assert (told.code, told.out, told.err.count("\n")) == (2, "", 1), name
        assert told.err.startswith("lightning-stateful: "), name
        assert said in told.err, name
    told = tell("inspect", tmp_path / "nothing.ckpt")
    assert (told.code, told.err) == (2, f"lightning-stateful: there is no {tmp_path / 'nothing.ckpt'}.\n")


def test_a_checkpoint_that_is_changed_anywhere_is_read_or_refused_in_a_line(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    contents = contents_of(checkpoints("stream"))
    parts = {name: contents[name] for name in ("loops", "callbacks", "StreamDataModule", "global_step")}
    whole, draw, codes = pickle.dumps(parts, protocol=2), random.Random(0), collections.Counter[int]()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 3))):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((1, 1, 9))] = bytes(draw.choices(range(256), k=draw.choice((0, 1, 1))))
        (tmp_path / "changed.ckpt").write_bytes(data)
        told = tell("inspect", tmp_path / "changed.ckpt")
        assert told.code < 2 or (told.out, told.err.count("\n")) == ("", 1), told.err
        codes[told.code] += 1
    assert codes[2] > 75
    assert tell("inspect", checkpoints("stream")).code == 0


def test_a_state_that_is_odd_under_a_right_checksum_is_refused_in_a_line(
    checkpoints: Any, tell: Any, tmp_path: Path
) -> None:
    state = dict(read_checkpoint(checkpoints("mixture")).needed())
    nested: Any = []
    for _ in range(300):
        nested = [nested]
    wide: Any = [0]
    for _ in range(60):
        wide = [wide, wide]
    odd = {
        "sources": {**state, "config": {**state["config"], "sources": [9]}},
        "served": {**state, "progress": {**state["progress"], "served": {"news": None}}},
        "epoch": {**state, "progress": {"consumed": 4}},
    }
    for name, changed in odd.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(sealed({key: value for key, value in changed.items() if key != "checksum"})))
        found = [tell("inspect", path), tell("plan", path, "--devices", 2)]
        refused = [told for told in found if told.code == 2]
        assert refused, name
        for told in refused:
            assert (told.out, told.err.count("\n")) == ("", 1), name
            assert "the state of the training data" in told.err or "progress." in told.err
    for endless in (nested, wide):
        path = saved({**state, "more": endless}, tmp_path / "endless.pt")
        assert "it has no end" in tell("inspect", path).out
