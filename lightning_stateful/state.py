"""The format of a state: the only file that knows it.

A state is plain JSON data. One loader's is an *envelope*::

    {"version": 1, "kind": "shuffled", "order_version": 1,
     "config": {...}, "progress": {"epoch": 2, "cycle": 0, "consumed": 12288}, "checksum": "5d2e0c91"}

and several loaders' one envelope a loader, by the path of the loader in the user's list or dict::

    {"version": 1, "kind": "combined", "config": {"mode": "max_size_cycle"}, "loaders": {"0": {...}, "1": {...}},
     "checksum": "81b0f3aa"}

``config`` is compared on load and never applied. Where something of it has changed in training, an envelope also holds
``"changed"``: values by name, with dots, as they were when the state was taken. A resume may begin with either. Where
batches or samples are left out, ``"skip"`` says which (``samplers/skipping.py``). The checksum covers everything else,
so that a damaged state is refused without a look at every value.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_stateful.errors import (
    MISSING,
    DamagedStateError,
    Difference,
    StateError,
    StatefulWarning,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.shapes import DAMAGED, SKIP, Either, check_shape, refuse_vast

VERSION = 1
COMBINED = "combined"

# Differences by which the samples of an epoch stay the same, whatever the order. What a wrapped sampler yields is
# compared again when it is iterated.
_HARMLESS = ("drop_last", "dataset.fingerprint", "iteration", "sequence", "module", "mode")
_SCALARS = frozenset({bool, int, str, type(None)})
# Names in accept that are no keys of a configuration.
_OTHER_NAMES = ("iteration", "nondeterministic", "replay")
_PASSED = ("seed", "shuffle", "drop_last", "by", "block", "max_tokens", "num_buckets", "boundaries", "window")
_REMEDIES = {
    **{name: f"Pass the saved {name}" for name in _PASSED},
    "dataset": "Train on the dataset that the checkpoint was made with",
    "dataset.indices": "Choose the samples as when the checkpoint was written: pass a seed to random_split or shuffle",
    "dataset.content": "The dataset's samples are others, or in another order, than when the checkpoint was written: "
    "sort the files, pass a seed to random_split or shuffle",
    "ranks": "Each rank iterates a sampler or data of its own: resume on the saved ranks, in the same way",
    "drawn_alike": "Seed the ranks alike (seed_everything), or apart, as when the checkpoint was written",
    "draws_apart": "Read in workers only if it was so before: loaders with equal generators draw alike there",
    "order_version": "Install the version of lightning-stateful that wrote the checkpoint",
    "kind": "Use the order or sampler that the checkpoint was made with",
    "sources": "Pass the saved datasets, under their saved names",
    "weights": "Pass the saved weights, temperature, block or schedule, of which these are the draws in a period",
    "batch_size": "Pass the saved batch sizes",
    "stop": "Pass the saved stop or num_steps",
    "lengths": "Pass the lengths that the checkpoint was made with",
    "max_samples": "Pass a Budget with the saved max_samples",
    "multiple": "Pass a Budget with the saved multiple",
    "quadratic_length": "Pass a Budget with the saved cost",
    "too_long": "Pass a Budget with the saved too_long",
    "mode": "Combine the loaders in the saved mode",
    "loaders": "Return the same loaders, under the same names",
    "sampler": "Build the sampler as when the epoch of the checkpoint began: of weights, say, save those of then",
    "sequence": "The sampler does not yield its first epoch as it did: restore nothing that its own passes change, as "
    "their count, for they are begun again; build it anew, with the same data and settings, before on_fit_start",
    "sizes": "Read the shards that the checkpoint was made with",
    "buffer_size": "Pass the saved buffer_size",
    "steps": "Do to the stream's samples what was done before: the same functions and settings, in the same order",
    "packing": "Pass a Packing with the saved value",
    "mixing_seed": "Mix the streams with the saved seed",
    "in_turn": "Pass weights, or leave them out, as when the checkpoint was written",
    "module": "Use the data module that the checkpoint was made with",
}


def pack(
    kind: str,
    order_version: int,
    config: Mapping[str, Any],
    progress: Mapping[str, Any],
    **more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Put one loader's state into a fresh envelope; ``changed`` and ``skip`` only where there is something in them."""
    return sealed(
        {
            "version": VERSION,
            "kind": kind,
            "order_version": order_version,
            "config": copy_plain(config, "config"),
            "progress": copy_plain(progress, "progress"),
            **{name: copy_plain(part, name) for name, part in more.items() if part},
        }
    )


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum of its contents to an envelope."""
    return {**state, "checksum": _checksum(state)}


def _checksum(state: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of BLAKE2b over the envelope as JSON, but for the checksum itself."""
    rest = {key: value for key, value in state.items() if key != "checksum"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=4).hexdigest()


def pack_combined(mode: str, loaders: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Put the envelopes of several loaders into one."""
    packed = {path: copy_plain(state) for path, state in loaders.items()}
    return sealed({"version": VERSION, "kind": COMBINED, "config": {"mode": mode}, "loaders": packed})


def check(state: Any, *, where: str = "the state") -> None:
    """Refuse data that is no envelope, or not one that this version can read.

    Raises:
        DamagedStateError: Keys are missing or have the wrong type, or the checksum is not that of the contents.
        StateVersionError: The version is another one.
    """
    if not isinstance(state, Mapping):
        raise DamagedStateError(f"{where} must be a dict, got {type(state).__name__}.{DAMAGED}")
    refuse_vast(state, where)
    version = state.get("version")
    if type(version) is not int:
        raise DamagedStateError(f"{where} has no version; its keys are {sorted(map(str, state))}.{DAMAGED}")
    if version != VERSION:
        raise StateVersionError(
            f"{where} has version {version}, this installation reads version {VERSION}. "
            "Install the version of lightning-stateful that wrote it."
        )
    wanted: dict[str, type] = {"kind": str, "config": dict}
    if state.get("kind") == COMBINED:
        wanted["loaders"] = dict
    else:
        wanted.update(order_version=int, progress=dict, **{name: dict for name in ("changed", "skip") if name in state})
    for key, kind in wanted.items():
        if type(state.get(key)) is not kind:
            found = repr(state[key]) if key in state else "nothing"
            raise DamagedStateError(f"{where} must hold a {kind.__name__} under {key!r}, got {found}.{DAMAGED}")
    try:
        check_shape(state.get("skip"), Either(None, SKIP), "skip")
        contents = _checksum(copy_plain(state, where))
    except StateError as error:
        raise DamagedStateError(f"{error}{DAMAGED}") from None
    if state.get("checksum") != contents:
        raise DamagedStateError(
            f"{where} does not have the checksum of its contents, {contents}, but {state.get('checksum')!r}: "
            f"something in it was changed after it was written.{DAMAGED}"
        )
    for path, part in state["loaders"].items() if state["kind"] == COMBINED else ():
        if isinstance(part, Mapping) and part.get("kind") == COMBINED:
            raise DamagedStateError(f"{where} holds several loaders under {path!r}, where one belongs.{DAMAGED}")
        check(part, where=f"{where}, loader {path!r},")


def differences(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    accept: Collection[str] = (),
    path: str = "",
    fingerprints: bool = True,
) -> list[Difference]:
    """List every difference between two envelopes apart from their progress.

    Args:
        saved: A checked envelope from a checkpoint.
        present: The envelope of the object that should load it.
        accept: Names of differences to let pass, in full (``"train.dataset.length"``), without the loader's path
            (``"dataset.length"``), or by a name above it (``"dataset"``).
        path: Prefix of the reported paths.
        fingerprints: Whether to report fingerprints of datasets too, which may differ for the same data.
    """
    accept = accepted_names(accept)
    if (saved["kind"] == COMBINED) != (present["kind"] == COMBINED):
        # Nothing to accept: which of several loaders would the one be?
        before, now = (sorted(s["loaders"]) if s["kind"] == COMBINED else "one loader" for s in (saved, present))
        full = ".".join(part for part in (path, "loaders") if part)
        return [Difference(path=full, saved=before, present=now, remedy=f"{_REMEDIES['loaders']}.")]
    pairs = _combined_pairs(saved, present) if saved["kind"] == COMBINED else _pairs("", *_aligned(saved, present))
    found = []
    for loader, name, before, now in pairs:
        full = ".".join(part for part in (path, loader, name) if part)
        if not is_accepted((full, name, _of_source(name)), accept) and (fingerprints or not is_fingerprint(name)):
            found.append(Difference(path=full, saved=before, present=now, remedy=_remedy(name)))
    return found


def refuse_differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, accept: Collection[str] = (), where: str = "The state"
) -> None:
    """Raise if two envelopes differ, but for their progress and accepted names; warn if only fingerprints differ.

    Raises:
        StateMismatchError: With every difference at once.
    """
    found = differences(saved, present, accept=accept)
    if not all(is_fingerprint(difference.path) for difference in found):
        raise StateMismatchError(found, where=where)
    if found:
        changed = ", ".join(f"{one.path} (saved {one.saved!r}, now {one.present!r})" for one in found)
        text = fingerprint_warning(f"{where} was made with", changed, found[0].path)
        warnings.warn(text, StatefulWarning, stacklevel=3)


def warn_of_other_order(accepted: Iterable[Difference], harmless: Collection[str], *, where: str) -> None:
    """Warn if an accepted difference may give what is left of a begun epoch another order than it had.

    Args:
        accepted: The differences that were let pass.
        harmless: Names of differences that the order goes on with exactly; any other may change it.
        where: A name for the state, with which the warning begins.
    """
    changed = [
        one.path
        for one in accepted
        if not is_accepted((one.path,), (*harmless, *_HARMLESS))
        and not ("sources that come or go" in harmless and one.is_source_that_comes_or_goes)
        and not (one.path == "dataset" and MISSING in (one.saved, one.present))  # in a state of a sampler alone
    ]
    if changed:
        warnings.warn(
            f"{where} goes on with another {', '.join(changed)}, as was accepted. What was served of the epoch "
            "followed from the saved value: in the rest of it some samples may come a second time, and others not at "
            "all. From the next epoch on every sample comes once.",
            StatefulWarning,
            stacklevel=4,
        )


def is_fingerprint(name: str) -> bool:
    """Whether the name of a difference is that of a dataset's fingerprint.

    A Hugging Face dataset that was mapped by a method has another one in every process. Its rows are compared as well.
    """
    return "fingerprint" in name.split(".")


def is_content(name: str) -> bool:
    """Whether the name of a difference is that of what a dataset's attributes show, or below."""
    return "dataset.content." in f"{name}."


def fingerprint_warning(what: str, changed: str, name: str) -> str:
    """The text of the warning for data that differ in their fingerprint alone."""
    return (
        f"{what} data of another fingerprint: {changed}. All else that is compared, length, columns and some rows, is "
        "the same, so the run goes on. Functions that belong to an object, such as map(self.tokenize), get another "
        f"fingerprint in every process; pass a plain function, or accept=({name!r},) to hear no more of it."
    )


def accepted_names(accept: Collection[str]) -> tuple[str, ...]:
    """Turn the names in ``accept`` into a tuple; a single name may be a plain string."""
    return (accept,) if isinstance(accept, str) else tuple(accept)


def warning_of_unknown(accept: Collection[str], configs: Iterable[Mapping[str, Any]]) -> str:
    """Say which names in ``accept`` are those of no difference; empty if there are none.

    Args:
        accept: The names.
        configs: The present configurations, whose keys are names too.
    """
    known = {*_REMEDIES, *_OTHER_NAMES, *(name for config in configs for name in _names_in(config))}
    unknown = [name for name in accepted_names(accept) if known.isdisjoint(name.split("."))]
    if not unknown:
        return ""
    similar = [found for name in unknown for found in difflib.get_close_matches(name.split(".")[-1], sorted(known), 1)]
    meant = f" Is {' or '.join(map(repr, similar))} meant?" if similar else ""
    return f"accept names {', '.join(map(repr, unknown))}, which no difference is called by here.{meant}"


def _names_in(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        yield str(name)
        yield from _names_in(value) if isinstance(value, Mapping) else ()


def walk(state: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the envelopes in a checked state, each with its loader's path (``""`` for a single loader)."""
    if state["kind"] == COMBINED:
        yield from state["loaders"].items()
    else:
        yield "", state


def copy_plain(value: Any, path: str = "state") -> Any:
    """Copy plain data deeply; tuples become lists.

    Args:
        value: The data.
        path: A name for it, with which an error begins.

    Raises:
        StateError: A part of it would not survive JSON or ``torch.load(weights_only=True)``; with its path.
    """
    try:
        return _copied(value)
    except StateError:
        return _copied_by_path(value, path)


def _copied(value: Any) -> Any:
    """A copy of plain data in dicts, lists and tuples; most states are, and paths take most of the time."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        if set(map(type, value)) <= {str}:
            return {key: item if type(item) in _SCALARS else _copied(item) for key, item in value.items()}
    elif kind is list or kind is tuple:
        return [item if type(item) in _SCALARS else _copied(item) for item in value]
    elif kind is float and math.isfinite(value):
        return value
    raise StateError("This is no plain data of these types.")


def _copied_by_path(value: Any, path: str) -> Any:
    """The same of any mappings, with errors that name the place."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        if any(type(key) is not str for key in value):
            raise StateError(f"{path} has keys that are not strings: {[key for key in value if type(key) is not str]}")
        return {key: _copied_by_path(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied_by_path(item, f"{path}[{i}]") for i, item in enumerate(value)]
    found = f"the {value}" if type(value) is float else f"a {type(value).__name__}"
    raise StateError(f"{path} is {found}; a state holds dict, list, str, int, finite float, bool and None.")


_KINDS = {
    "sequential": "{length} samples in the dataset's order",
    "shuffled": "{length} samples, shuffled by seed {seed}",
    "block_shuffled": "{length} samples, shuffled in blocks by seed {seed}",
    "packed": "{length} packed sequences",
    "round_robin": "{sources} sources in turn, seed {seed}",
    "mixture": "A mixture of {sources} sources, seed {seed}",
    "buckets": "{length} samples in batches of like lengths, seed {seed}",
    "sampler": "A sampler that is iterated",
    "batch_sampler": "A batch sampler that is iterated",
    "stream": "A stream of shards",
    "iterable": "An iterable dataset",
}


def order_in_words(kind: str, config: Mapping[str, Any]) -> str:
    """A few words for people on the order of a loader, by what an envelope says of it."""
    length = value_at(config, "dataset.length")
    length = value_at(config, "lengths.samples") if length is None else length
    words = _KINDS.get(kind, f"{{length}} samples in the order {kind!r}")
    known = {"length": f"{length:,}" if isinstance(length, int) else "All", "seed": config.get("seed", "none")}
    return words.format(**known, sources=len(config.get("sources") or ()))


def _comparable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in an envelope that is compared: its configuration, kind and order version."""
    envelope = {"kind": state["kind"], "order_version": state["order_version"]}
    return {**envelope, **state["config"], **envelope}


def _aligned(saved: Mapping[str, Any], present: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that is compared in two envelopes; values of several sources are dicts by the sources both have."""
    then = _as_when_saved(_comparable(saved), saved, present)
    before, now = _packed_once(*_of_equal_lengths(then, _comparable(present)))
    if not isinstance(before.get("sources"), Mapping) or not isinstance(now.get("sources"), Mapping):
        return before, now
    common = [name for name in before["sources"] if name in now["sources"]]
    before, now = _by_source(before, common), _by_source(now, common)
    sizes = [config.get("batch_size") for config in (before, now)]
    if isinstance(sizes[0], Mapping) != isinstance(sizes[1], Mapping):
        each = [size if isinstance(size, Mapping) else dict.fromkeys(common, size) for size in sizes]
        before["batch_size"], now["batch_size"] = each
    return before, now


def _as_when_saved(before: dict[str, Any], saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration; of the data, or of the sampler, as it was when saved where all of it is so at present.

    Or the sampler is as it was when the epoch began that was saved.
    """
    # Within an epoch it goes on over as many samples as it began with.
    left_out = {"dataset.length"} if value_at(saved, "progress.consumed") else {}
    changed = {name: value for name, value in saved.get("changed", {}).items() if name not in left_out}
    for of_data in (True, False):
        values = {name: value for name, value in changed.items() if name.startswith("dataset.") is of_data}
        if values and all(holds(present["config"], name, value) for name, value in values.items()):
            for name in values:
                before = _replaced(before, name.split("."), value_at(present["config"], name))
    began = value_at(saved, "progress.began")
    return {**before, "sequence": began} if began and began == value_at(present, "config.sequence") else before


def value_at(config: Any, name: str) -> Any:
    """The value that a name with dots leads to in a configuration; None where it leads nowhere."""
    for key in name.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def holds(config: Any, name: str, value: Any) -> bool:
    """Whether a value is in a configuration, or, where that lists those of ranks, that of a rank as ``"0 value"``."""
    now = value_at(config, name)
    return now == value or (isinstance(now, list) and value in [f"{rank} {one}" for rank, one in enumerate(now)])


def _replaced(config: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    held = config.get(keys[0])
    below = _replaced(held if isinstance(held, Mapping) else {}, keys[1:], value) if keys[1:] else value
    return {**config, keys[0]: below}


def _of_equal_lengths(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configurations without the content of datasets of another length, which is another one for that."""
    for config, other in ((before, now), (now, before)):
        own, theirs = config.get("dataset"), other.get("dataset")
        if isinstance(own, Mapping) and isinstance(theirs, Mapping) and own.get("length") != theirs.get("length"):
            config["dataset"] = {name: value for name, value in own.items() if name != "content"}
        if isinstance(contents := config.get("dataset.content"), Mapping):
            lengths = [of if isinstance(of, Mapping) else {} for of in (before.get("sources"), now.get("sources"))]
            kept = {name: of for name, of in contents.items() if lengths[0].get(name) == lengths[1].get(name)}
            config["dataset.content"] = kept
    return before, now


def _packed_once(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configurations without what datasets say of their packing, where settings and lengths stand beside them."""
    if all(isinstance(config.get("packing"), Mapping) for config in (before, now)):
        for config in (before, now):
            if isinstance(own := config.get("dataset"), Mapping) and "packed" in own:
                config["dataset"] = {name: own[name] for name in own if name not in ("packed", "length")}
            if isinstance(parts := config.get("sources"), Mapping) and before["packing"] != now["packing"]:
                # Of a source that is packed otherwise the digest alone, without its number of sequences.
                config["sources"] = {name: str(of).split(" ")[-1] for name, of in parts.items()}
    return before, now


def _by_source(config: Mapping[str, Any], common: Collection[str]) -> dict[str, Any]:
    """A configuration whose lists of one value a source are dicts by source, of the sources in ``common``."""
    names = list(config["sources"])
    result = {
        key: {name: of for name, of in zip(names, value, strict=True) if name in common}
        if isinstance(value, list) and len(value) == len(names)
        else value
        for key, value in config.items()
    }
    result["sources"] = {**config["sources"], "(order)": [name for name in names if name in common]}
    return result


def _combined_pairs(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    yield from _pairs("", saved["config"], present["config"])
    ours, theirs = present["loaders"], saved["loaders"]
    if list(ours) != list(theirs):
        yield "", "loaders", list(theirs), list(ours)
    for path in theirs:
        if path in ours:
            for _, name, before, now in _pairs("", *_aligned(theirs[path], ours[path])):
                yield path, name, before, now


def _pairs(prefix: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    for key in dict.fromkeys([*saved, *present]):
        name = f"{prefix}.{key}" if prefix else key
        if is_content(name) and (key not in saved or key not in present):
            # A cache may show itself on one side alone.
            continue
        before, now = saved.get(key, MISSING), present.get(key, MISSING)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _pairs(name, before, now)
        elif before != now or isinstance(before, bool) != isinstance(now, bool):
            yield "", name, before, now


def is_accepted(names: tuple[str, ...], accept: Collection[str]) -> bool:
    """Whether one of a difference's names, or a name above it, is accepted."""
    return any(name == wanted or name.startswith(f"{wanted}.") for name in names for wanted in accept)


def _of_source(name: str) -> str:
    """The name of a setting of packing without the source of a stream that it belongs to; else the name as it is."""
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "sources" and parts[2:3] == ["packing"] else name


def _remedy(name: str) -> str:
    is_packing = _of_source(name).split(".")[0] == "packing"
    name = "dataset.content" if is_content(name) else "packing" if is_packing else name
    known = next((_REMEDIES[of] for of in (name, name.split(".")[0]) if of in _REMEDIES), "Restore the saved value")
    return f"{known}, or accept the change with accept=({name!r},)."
