"""Reads the states in a checkpoint, whichever strategy or program wrote it, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stateful.cli.plain_pickle import from_pickles, from_zip, refuse_flipped
from lightning_stateful.errors import DamagedStateError, StateError, StatefulError
from lightning_stateful.loops.saved_progress import (
    CALLBACK_KEY,
    LoopProgress,
    data_state_in,
    read_callback_state,
    read_counters,
)
from lightning_stateful.state import check, pack_combined, walk

# Values in a state, and how deep they lie in each other.
_MOST_VALUES, _DEEPEST = 2**23, 100
# Files of Lightning's strategies that write a folder; what is not a tensor stands in them.
_FOLDERS = {
    "meta.pt": "a folder of FSDPStrategy or ModelParallelStrategy",
    "checkpoint/mp_rank_00_model_states.pt": "a folder of DeepSpeedStrategy",
    "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt": "a folder of DeepSpeedStrategy, stage 3",
}
# What a note of a run has; see run_notes.py.
_NOTE = {"versions", "ranks", "steps", "batch_size", "workers"}
# Kinds whose progress counts samples of the epoch, of one dataset.
COUNTS_SAMPLES = ("sequential", "shuffled", "block_shuffled", "packed")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The states in a checkpoint.

    Attributes:
        path: The file or folder.
        layout: What it is, in words.
        global_step: Optimizer steps that had been taken; None where it does not say.
        callback: The state of StatefulDataCallback; None if it has none.
        progress: How far its run was; None where it does not say.
        data: The state of the training data; None if it has none, or one that is damaged.
        problems: Why a resume would refuse it, whatever the data; empty if it would not.
        lightning: The version of Lightning that wrote it; empty where it does not say.
        contents: All that it holds, without tensors.
    """

    path: Path
    layout: str
    global_step: int | None = None
    callback: Mapping[str, Any] | None = None
    progress: LoopProgress | None = None
    data: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    lightning: str = ""
    contents: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def loaders(self) -> dict[str, Mapping[str, Any]]:
        """The state of each training loader by its path; a single one has the path ``""``."""
        return {} if self.data is None else dict(walk(self.data))

    @property
    def written(self) -> Mapping[str, Any]:
        """The note of the run that wrote it; empty where it has none, or a damaged one."""
        note = (self.callback or {}).get("written")
        return note if isinstance(note, Mapping) and note.keys() >= _NOTE else {}

    @property
    def epoch(self) -> int | None:
        """The epoch of the batch that comes next, by the loops or, without these, by the first loader."""
        if self.progress is not None:
            return self.progress.epoch_and_step[0]
        return next((int(state["progress"]["epoch"]) for state in self.loaders.values()), None)

    def needed(self) -> Mapping[str, Any]:
        """The state of the training data, for commands that can do nothing without it.

        Raises:
            StateError: There is none, or a resume would refuse the checkpoint.
        """
        if self.problems or self.data is None:
            raise StateError(f"{self.path}: {' '.join(self.problems) or 'it has no state of training data.'}")
        return self.data


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the states in a checkpoint: a file or folder of a Trainer's, or a ``state_dict()`` in JSON or ``.pt``.

    Raises:
        OSError: There is no such file.
        StateError: It is no checkpoint, is damaged, or names what could only do harm.
    """
    file, layout = _file_of(path)
    try:
        layout, contents = _contents(file, layout)
        if not isinstance(contents, Mapping):
            raise DamagedStateError(f"it holds a {type(contents).__name__}, and a checkpoint is a dict.")
        return _states_in(path, layout, contents)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


def refuse_damaged(path: Path) -> None:
    """Read all of a checkpoint that is one file of ``torch.save``, and compare its checksums.

    Raises:
        StateError: A part has other bytes than were saved.
    """
    if not path.is_file():
        return
    with path.open("rb") as opened:
        if not opened.read(2).startswith(b"PK"):
            return
        opened.seek(0)
        try:
            refuse_flipped(opened)
        except StateError as error:
            raise StateError(f"{path}: {error}") from None


@contextmanager
def refusing_odd_states(*paths: Path) -> Iterator[None]:
    """Refuse states that nobody has damaged, by their checksums, and that are not as their kind writes them.

    Raises:
        DamagedStateError: Whatever in the block found a value of another type or size, or missed one.
    """
    try:
        yield
    except StatefulError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedStateError(
            f"{' or '.join(map(str, paths))}: the state of the training data is not as this version writes it "
            f"({type(error).__name__}: {error})."
        ) from error


def _file_of(path: Path) -> tuple[Path, str]:
    """The file that holds the states of a checkpoint, and what a folder is in words."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}.")
    if not path.is_dir():
        return path, ""
    for name, layout in _FOLDERS.items():
        for file in (path / name, path / Path(name).name):
            if file.is_file():
                return file, layout
    raise StateError(
        f"{path} is a folder without meta.pt (FSDPStrategy, ModelParallelStrategy) or checkpoint/mp_rank_00_model_"
        "states.pt (DeepSpeedStrategy): name a checkpoint's own folder or file."
    )


def _contents(file: Path, layout: str) -> tuple[str, Any]:
    """The contents of a file, and what it is in words."""
    with file.open("rb") as opened:
        begin = opened.read(64)
        opened.seek(0)
        if begin.startswith(b"PK"):
            return layout or "a file of torch.save", from_zip(opened)
        if begin.startswith(b"\x80"):
            return layout or "a file of torch.save", from_pickles(opened)
        if begin.lstrip().startswith(b"{"):
            try:
                return "JSON", json.load(opened)
            except ValueError as error:
                raise DamagedStateError(f"it is no whole JSON: {error}.") from None
    raise StateError("it is neither a file of torch.save nor JSON.")


def _states_in(path: Path, layout: str, contents: Mapping[str, Any]) -> Checkpoint:
    """The states in a checkpoint's contents."""
    found: dict[str, Any] = {"path": path, "layout": layout, "problems": ()}
    is_lightnings = "pytorch-lightning_version" in contents or "loops" in contents
    callbacks = contents.get("callbacks")
    callback = callbacks.get(CALLBACK_KEY) if isinstance(callbacks, Mapping) else None
    states = _data_states(contents, callback)
    if not is_lightnings and not states:
        raise StateError(
            "it has neither a state of training data nor a Trainer's loops. Its keys are "
            f"{', '.join(map(str, contents))}."
        )
    step = contents.get("global_step")
    found["global_step"] = step if isinstance(step, int) else None
    found["lightning"] = str(contents.get("pytorch-lightning_version", ""))
    problems: list[str] = []
    if callback is not None:
        found["callback"] = callback if isinstance(callback, Mapping) else None
        try:
            found["progress"] = read_callback_state(callback)[0]
        except StateError as error:
            problems.append(str(error))
    elif is_lightnings:
        found["progress"] = _counted(contents, problems)
    try:
        for name, state in states.items():
            _refuse_endless(state)
            check(state, where=f"The state under {name!r}" if name else "The state of the training data")
        # Several that a program has put side by side are read as those of loaders side by side.
        found["data"] = None if not states else states.get("") or pack_combined("side by side", states)
    except StateError as error:
        problems.append(str(error))
    return Checkpoint(**{**found, "problems": tuple(problems), "contents": contents})


def _counted(contents: Mapping[str, Any], problems: list[str]) -> LoopProgress | None:
    """The progress of a run without the callback, by Lightning's own counters."""
    try:
        return read_counters(contents["loops"]["fit_loop"])
    except (KeyError, TypeError):
        problems.append("It has no loop counters, so a resume begins at epoch 0 with its weights.")
        return None


def _data_states(contents: Mapping[str, Any], callback: Any) -> dict[str, Mapping[str, Any]]:
    """The state of training data that a resume would take, under ``""``; or those that a program has saved, by name."""
    if isinstance(callback, Mapping):
        module = callback.get("module")
        for part in (data_state_in(contents.get(module)) if isinstance(module, str) else None, callback.get("data")):
            if isinstance(part, Mapping):
                return {"": part}
    for part in (contents, data_state_in(contents)):
        if isinstance(part, Mapping) and _is_state(part):
            return {"": part}
    found = {}
    for name, value in contents.items():
        for part in (value, data_state_in(value)):
            if isinstance(part, Mapping) and _is_state(part):
                found[str(name)] = part
    return {"": next(iter(found.values()))} if len(found) == 1 else found


def _refuse_endless(state: Mapping[str, Any]) -> None:
    """Refuse a state with values within values without end, or the same ones again and again.

    Raises:
        DamagedStateError: It is.
    """
    level: list[Any] = [state]
    number = 0
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, (Mapping, list, tuple)):
                inner.extend(value.values() if isinstance(value, Mapping) else value)
            if len(inner) > _MOST_VALUES:
                break
        level, number = inner, number + len(inner)
        if not level or number > _MOST_VALUES:
            break
    if level:
        raise DamagedStateError("The state of the training data is no plain data: it has no end. It is damaged.")


def source_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """The samples of each source of a mixture, with which its description in a configuration begins."""
    return {name: int(str(of).split(" ", maxsplit=1)[0]) for name, of in config.get("sources", {}).items()}


def _is_state(value: Mapping[str, Any]) -> bool:
    return {"version", "kind", "config", "checksum"} <= value.keys()
