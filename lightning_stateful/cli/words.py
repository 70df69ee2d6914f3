"""A checkpoint's states in words: where a run stands, what was served, and what a resume will refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_stateful.cli.reading import COUNTS_SAMPLES, Checkpoint, source_lengths
from lightning_stateful.errors import StateMismatchError
from lightning_stateful.state import order_in_words

_UNITS = {"sampler": "items", "batch_sampler": "items"}
# A line for each worker slot, up to so many; JSON has all.
_MOST_SLOTS = 16
_WIDTH = 100


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that is said of a checkpoint, as plain data."""
    progress, callback = checkpoint.progress, checkpoint.callback or {}
    position: dict[str, Any] = {"epoch": checkpoint.epoch}
    if progress is not None:
        # At an epoch's end, of the epoch that ends.
        steps = checkpoint.written.get("steps")
        position = {"epoch": progress.epoch, "batch": progress.batch, "batches": steps if progress.running else None}
        position |= {"running": progress.running, "ended": progress.ended}
    return {
        "path": str(checkpoint.path),
        "layout": checkpoint.layout,
        "position": {**position, "global_step": checkpoint.global_step},
        "written": dict(checkpoint.written),
        "lightning": checkpoint.lightning or None,
        "seed": callback.get("seed"),
        "module": callback.get("module"),
        "loaders": {path: _loader(state) for path, state in checkpoint.loaders.items()},
        "problems": [*checkpoint.problems, *_missing(checkpoint)],
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Say for people what :func:`described` has found."""
    lines = [f"{found['path']}: {found['layout']}", *_indented(_position_lines(found))]
    for path, loader in found["loaders"].items():
        lines += [f"training data {path!r}" if path else "training data", *_indented(_loader_lines(loader))]
    if found["loaders"]:
        lines += ["a resume", *_indented(_resume_lines(found))]
    return "\n".join(map(printable, [*lines, *(f"refused: {problem}" for problem in found["problems"])]))


def printable(text: str) -> str:
    """A text in which newlines, and all that a terminal would obey and not show, are written as in ``repr``."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def error_in_words(error: Exception) -> str:
    """The text of an error, on a line of its own for each difference; names may be those of a foreign checkpoint."""
    if not isinstance(error, StateMismatchError):
        return printable(str(error))
    return "\n".join(map(printable, error.lines))


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts under dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def number(value: Any) -> str:
    """A count with commas, other values as they are written."""
    return f"{value:,}" if type(value) is int and value >= 0 else str(value)


def share(part: int, whole: int) -> str:
    """A number of a total, with the percentage."""
    return f"{part:,} of {whole:,} ({part / whole:.0%})" if whole else f"{part:,} of 0"


def ranks_in_words(written: Mapping[str, Any]) -> str:
    """The ranks, batch sizes and workers of the run that wrote a checkpoint."""
    ranks = f"{written['ranks']} rank{'s' * (written['ranks'] != 1)}"
    sizes = [str(size) for size in written.get("batch_size", {}).values() if size is not None]
    workers = sorted(set(written.get("workers", {}).values()))
    return ranks + (f" x {' and '.join(sizes)}" * bool(sizes)) + f", {' or '.join(map(str, workers))} workers a rank;"


def _missing(checkpoint: Checkpoint) -> list[str]:
    """Say what a resume from a checkpoint without a data state leads to."""
    if checkpoint.data is not None or checkpoint.problems:
        return []
    progress = checkpoint.progress
    begun = progress is not None and progress.batch and not progress.ended
    said = "No data state: it was written without lightning-stateful, or before there were loaders."
    if checkpoint.callback is not None and not checkpoint.written:
        return [
            "No data state: StatefulDataCallback wrote it in a process that had no loaders: before training, or in one "
            "that started others to train (ddp_notebook, ddp_fork, ddp_spawn). Its counters and optimizers are not "
            "those of the training: a resume begins at the first batch. Take a checkpoint that was saved while it "
            "trained."
        ]
    if not begun or progress is None:
        return [f"{said} It stands between two epochs, where little is lost: a resume begins the next one."]
    batches = f"{progress.batch} batch{'es' * (progress.batch != 1)}"
    return [
        f"{said} A resume by Lightning alone would begin the loader anew in the middle of epoch {progress.epoch}, and "
        f"replay as many as {batches} of what was trained on, in place of others that never come. With "
        f"StatefulDataCallback it goes on at batch {progress.batch + 1}, but in an order of this toolkit's, which the "
        "run had not; from the next epoch on every sample comes once."
    ]


def _loader(state: Mapping[str, Any]) -> dict[str, Any]:
    """One loader's state as plain data."""
    kind, config, progress = state["kind"], state["config"], state["progress"]
    dataset = config.get("dataset")
    length = dataset.get("length") if isinstance(dataset, Mapping) else None
    counts_samples = kind in COUNTS_SAMPLES
    unit = "samples" if counts_samples else _UNITS.get(kind, "steps")
    skip = state.get("skip", {})
    found: dict[str, Any] = {
        "order": order_in_words(kind, config),
        "kind": kind,
        "epoch": progress["epoch"],
        "consumed": {
            "count": progress["consumed"] - skip.get("skipped", 0),
            "unit": unit,
            "of": length if counts_samples else None,
        },
        "settings": dict(leaves(config)),
        "may_change": [what for what, key in _CHANGEABLE if key not in config and kind != "iterable"],
    }
    if skip:
        ranges = [{"epoch": epoch, "first": first, "last": stop - 1} for epoch, first, stop, _, _ in skip["ranges"]]
        found["skip"] = {"skipped": skip["skipped"], "ranges": ranges, "samples": skip.get("samples")}
    if progress["cycle"]:
        found["passes_before_in_epoch"] = progress["cycle"]
    if isinstance(progress.get("served"), Mapping):
        found["since"] = "training began" if str(config.get("stop")).endswith("steps") else "the epoch began"
        lengths = source_lengths(config)
        found["sources"] = {
            name: {"samples": samples, "of": lengths[name], "passes": round(samples / lengths[name], 3)}
            for name, samples in progress["served"].items()
            if lengths.get(name)
        }
    if "slots" in progress:
        found["stream"] = _stream(progress, config)
    return found


_CHANGEABLE = (("ranks", "ranks"), ("workers", "workers"), ("batch sizes", "batch_size"))


def _stream(progress: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Lines on the positions of a stream's worker slots, and on what was served of each of its sources."""
    ranks, counts = progress["num_replicas"], "given" in progress
    served = {name: given[0] for name, given in progress.get("given", {}).items()}
    slots = []
    for slot, state in enumerate(progress["slots"]):
        here: dict[str, Any] = {"rank": slot % ranks, "worker": slot // ranks, "batches": 0, "over": False}
        if state is not None:
            here |= {"batches": state["batches"], "over": state["over"]}
            here["sources"] = {name: _in_source(of, counts=counts) for name, of in state.get("of", {}).items()}
            served = {name: number + here["sources"][name]["served"] for name, number in served.items()}
            here |= {"item": state["item"]} if "item" in state else {}
        slots.append(here)
    shards = {
        name: sum(last - first + 1 for first, last in of["whole"]) + len(of["older"]) + len(of["begun"])
        for name, of in progress.get("sources", {}).items()
    }
    skipped = dict(zip(("shards", "samples", "too_long"), progress.get("skipped", ()), strict=False))
    return {
        "pass": progress["pass"],
        "ranks": ranks,
        "workers": progress["workers"],
        "steps": progress["steps"],
        "shards_assigned": shards,
        "unit": _unit_of(config),
        "served_since_training_began": served,
        "left_out": skipped,
        "slots": slots,
    }


def _in_source(of: Mapping[str, Any], *, counts: bool) -> dict[str, int]:
    """The position of a worker slot in a source; ``counts`` tells whether slots count what they have served of each."""
    state = of["state"]
    seen = state["seen"][-1] if isinstance(state, Mapping) and state.get("seen") else 0
    served = {"served": of["given"][0] if "given" in of else 0} if counts else {}
    return {"slice": of["slice"], "shards_opened": of["opened"], "samples_seen": seen, **served}


def _unit_of(config: Mapping[str, Any]) -> str:
    """The name for the items that the sources of a stream give."""
    first = next(iter(config["sources"].values()), {}) if "sources" in config else config
    if "packing" in first:
        return "sequences"
    return "samples" if "batch_size" in config else "batches"


def _position_lines(found: Mapping[str, Any]) -> Iterator[str]:
    position, written = found["position"], found["written"]
    line = f"epoch {position['epoch']}"
    if "batch" not in position:
        line += ", by the state of the data alone"
    elif not position["running"]:
        line = f"between epochs: the next is epoch {position['epoch']}"
    elif position["batches"]:
        line += f", batch {share(position['batch'], position['batches'])}"
    else:
        line += f", batch {position['batch']:,}"
    if position.get("ended"):
        line += ", all of its batches done"
    yield line + (f"; global step {number(position['global_step'])}" if position["global_step"] is not None else "")
    versions = {**written.get("versions", {}), **({"lightning": found["lightning"]} if found["lightning"] else {})}
    if versions:
        ranks = f"on {ranks_in_words(written)}" if written else "by"
        yield f"written {ranks} {', '.join(f'{name} {version}' for name, version in versions.items())}"
    if found["seed"] is not None:
        yield f"seed {found['seed']}" + (f", data module {found['module']}" if found["module"] else "")


def _loader_lines(loader: Mapping[str, Any]) -> Iterator[str]:
    yield loader["order"]
    consumed = loader["consumed"]
    count, of, unit = consumed["count"], consumed["of"], consumed["unit"]
    trained = f"{count:,} of {of:,} {unit} ({count / of:.0%})" if of else f"{count:,} {unit}"
    again = f", after {loader['passes_before_in_epoch']} whole passes" if "passes_before_in_epoch" in loader else ""
    yield f"epoch {loader['epoch']}: trained on {trained}{again}"
    if skip := loader.get("skip"):
        done = f"{skip['skipped']:,} {unit} left out of the epoch so far"
        yield f"skip= leaves out {', '.join(_skipped(skip)) or 'nothing from here on'}; {done}"
    sources = loader.get("sources", {})
    width = max(map(len, sources), default=0)
    if sources:
        yield f"served since {loader['since']}:"
    for name, of in sources.items():
        yield f"  {name:{width}}  {of['samples']:>12,} samples, {of['passes']:.3f} passes over its {of['of']:,}"
    if "stream" in loader:
        yield from _stream_lines(loader["stream"])


def _skipped(skip: Mapping[str, Any]) -> Iterator[str]:
    """The batches and samples that a run leaves out, in words."""
    for one in skip["ranges"]:
        batches = f"batch {one['first']}" if one["first"] == one["last"] else f"batches {one['first']} to {one['last']}"
        yield f"{batches} of epoch {one['epoch']}"
    samples = skip["samples"] or {}
    if "count" in samples:
        yield f"{samples['count']:,} sample{'s' * (samples['count'] != 1)} by index"
    if "function" in samples:
        yield f"the samples that {samples['function']} names"


def _stream_lines(stream: Mapping[str, Any]) -> Iterator[str]:
    slots, left_out = stream["slots"], {name: count for name, count in stream["left_out"].items() if count}
    yield f"pass {stream['pass']}, {stream['ranks']} x {stream['workers']} worker slots, {stream['steps']:,} steps each"
    for name, shards in stream["shards_assigned"].items():
        yield f"{name or 'the stream'}: {shards:,} shards were assigned to them"
    if served := stream["served_since_training_began"]:
        counts = ", ".join(f"{name + ': ' if name else ''}{number:,}" for name, number in served.items())
        yield f"{stream['unit']} served since training began: {counts}"
    for slot in slots[:_MOST_SLOTS]:
        line = f"  rank {slot['rank']}, worker {slot['worker']}: {slot['batches']:,} batches"
        line += f", {slot['item']:,} samples" if "item" in slot else ""
        for name, of in slot.get("sources", {}).items():
            number = of.get("served", of["samples_seen"])
            line += f"; {name + ': ' if name else ''}{number:,} {stream['unit']}"
            line += f", {of['shards_opened']} shards opened" + " in its pass" * ("served" in of)
        yield line + ("; over" if slot["over"] else "")
    if len(slots) > _MOST_SLOTS:
        yield f"  and {len(slots) - _MOST_SLOTS} more; --json has all"
    if left_out:
        yield "left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items())


def _resume_lines(found: Mapping[str, Any]) -> Iterator[str]:
    changeable = [set(loader["may_change"]) for loader in found["loaders"].values()]
    common = [what for what, _ in _CHANGEABLE if all(what in of for of in changeable)]
    yield f"goes on with other {', '.join(common)}" if common else "goes on with these ranks, workers, batch sizes"
    yield "refuses another of these, unless accept= names it:"
    for path, loader in found["loaders"].items():
        line = f"  {path}:" if path else " "
        for name, value in loader["settings"].items():
            part = f" {name}={number(value)}"
            if len(line) + len(part) > _WIDTH:
                yield line
                line = "   "
            line += part
        yield line


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def rest_in_words(answer: Mapping[str, Any], notes: Iterable[str]) -> str:
    """Say for people what is left of an epoch on some ranks."""
    ranks, left = answer["ranks"], answer["steps_left"]
    epoch = next(iter(answer["loaders"].values()))["epoch"]
    said = f"{left:,} step{'s' * (left != 1)} left of epoch {epoch}" if left is not None else ""
    said = said or f"how many steps are left of epoch {epoch} is known only when it ends"
    lines = [f"on {ranks} rank{'s' * (ranks != 1)}: {said}"]
    for path, rest in answer["loaders"].items():
        lines += [f"training data {path!r}" if path else "training data", *_indented(_rest_lines(rest, ranks))]
    return "\n".join(map(printable, [*lines, *(f"note: {note}" for note in notes)]))


def _rest_lines(rest: Mapping[str, Any], ranks: int) -> Iterator[str]:
    if rest["steps_left"] is not None:
        yield f"{rest['steps_left']:,} of {rest['steps_of_epoch']:,} steps on so many ranks"
    if rest["samples_left"] is not None:
        yield f"{rest['samples_left']:,} sample{'s' * (rest['samples_left'] != 1)}"
    if rest["last_step"] is not None:
        least, most = rest["last_step"]
        yield f"the last step has {least if least == most else f'{least} to {most}'} samples a rank"
    if rest["repeated"] is not None:
        repeated = rest["repeated"]
        yield f"{repeated:,} sample{'s are' if repeated != 1 else ' is'} served twice, {rest['dropped']:,} dropped"
    elif rest["note"]:
        yield rest["note"]
    if rest["shards"] is not None:
        together = rest["shards"]["read_by_several_ranks"]
        left = rest["shards"]["left"]
        yield f"{left:,} shard{'s' * (left != 1)}, of which several ranks read {together:,} together"
