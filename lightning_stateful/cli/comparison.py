"""The differences between two checkpoints: of settings, which a resume would refuse, and of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_stateful.cli.reading import Checkpoint
from lightning_stateful.cli.words import number, printable
from lightning_stateful.errors import Difference
from lightning_stateful.loops.saved_progress import SEED_REMEDY
from lightning_stateful.state import differences

# Lines on positions, of which a stream has many; JSON has all.
_MOST_LINES = 20
MODULE_REMEDY = "Give the data module its old name, or accept the change with accept=('module',)."


def compared(first: Checkpoint, second: Checkpoint) -> dict[str, Any]:
    """The differences between two checkpoints, as plain data.

    Returns:
        ``settings``: what a resume from the first with the data of the second would refuse, each with ``path``,
        ``saved``, ``present`` and ``remedy``. ``position``: ``path``, ``first`` and ``second`` of what differs in how
        far the two are. ``written``: the same of how the two were run, which may always differ.

    Raises:
        StateError: One of them has no state of training data.
    """
    found = differences(first.needed(), second.needed())
    settings = [*_of_callbacks(first, second, {one.path for one in found}), *found]
    return {
        "first": str(first.path),
        "second": str(second.path),
        "settings": [
            {"path": one.path, "saved": one.saved, "present": one.present, "remedy": one.remedy} for one in settings
        ],
        "position": list(_unequal(_position(first), _position(second))),
        "written": list(_unequal(first.written, second.written)),
    }


def comparison_in_words(found: Mapping[str, Any]) -> str:
    """Say for people what :func:`compared` has found."""
    lines = []
    if settings := found["settings"]:
        lines.append(f"settings: a resume from {found['first']} with the data of {found['second']} is refused")
        lines += [f"  {one['path']}: {one['saved']!r} | {one['present']!r}. {one['remedy']}" for one in settings]
    else:
        lines.append("settings: the same; the one can be resumed with the data of the other")
    for what in ("position", "written"):
        values = found[what]
        if not values:
            lines.append(f"{what}: the same")
            continue
        lines.append(f"{what}:")
        shown = values[:_MOST_LINES]
        lines += [f"  {one['path']}: {number(one['first'])} | {number(one['second'])}" for one in shown]
        if len(values) > len(shown):
            lines.append(f"  and {len(values) - len(shown)} more; --json has all")
    return "\n".join(map(printable, lines))


def _of_callbacks(first: Checkpoint, second: Checkpoint, known: set[str]) -> Iterator[Difference]:
    """Differences of the two callbacks: the seed, and the name of the data module."""
    if first.callback is None or second.callback is None:
        return
    for name, remedy in (("seed", SEED_REMEDY), ("module", MODULE_REMEDY)):
        if name in known:
            continue
        before, now = first.callback.get(name), second.callback.get(name)
        if before != now:
            yield Difference(path=name, saved=before, present=now, remedy=remedy)


def _position(checkpoint: Checkpoint) -> dict[str, Any]:
    """The progress of a checkpoint: of its loops, and of each loader."""
    loops: Any = {} if checkpoint.progress is None else checkpoint.progress.to_dict()
    loaders = {path or "data": state["progress"] for path, state in checkpoint.loaders.items()}
    return {"global_step": checkpoint.global_step, "loops": loops, **loaders}


def _unequal(first: Any, second: Any) -> Iterator[dict[str, Any]]:
    """The values that differ, under dotted names."""
    before, now = dict(_leaves(first)), dict(_leaves(second))
    for path in dict.fromkeys([*before, *now]):
        if path not in before or path not in now or before[path] != now[path]:
            yield {"path": path, "first": before.get(path, "nothing"), "second": now.get(path, "nothing")}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, ".".join(filter(None, (path, str(name)))))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]")
    else:
        yield path, value
