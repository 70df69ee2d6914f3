"""The classes that Hugging Face's pipelines are made of: which resume by their own state, and what differs by shard."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.stream_nodes.plain_functions import draws_nothing


@dataclass(frozen=True, slots=True)
class PipelineClass:
    """The meaning of a class in a pipeline for reading and resuming a shard.

    Attributes:
        word: What people call it; empty for what Hugging Face adds by itself.
        reread: Why its own state is not exact, so that a shard is read again; empty where it is exact.
        reruns: Whether a resume by its state runs functions before it once more for some samples, which is exact as
            long as they draw no random numbers. Batched functions do so by themselves.
    """

    word: str = ""
    reread: str = ""
    reruns: bool = False


_INTERLEAVED = PipelineClass("interleave_datasets", reruns=True)
# What is not in this table is read again, whatever its own state says.
PIPELINE_CLASSES = {
    "ExamplesIterable": PipelineClass(),
    "ArrowExamplesIterable": PipelineClass(),
    "ShuffledDataSourcesExamplesIterable": PipelineClass(),
    "ShuffledDataSourcesArrowExamplesIterable": PipelineClass(),
    "TypedExamplesIterable": PipelineClass(),
    "FormattedExamplesIterable": PipelineClass(),
    "RebatchedArrowExamplesIterable": PipelineClass(reruns=True),
    "InterleavedShardsExamplesIterable": PipelineClass(reruns=True),
    "SelectColumnsIterable": PipelineClass("select_columns"),
    "MappedExamplesIterable": PipelineClass("map"),
    "FilteredExamplesIterable": PipelineClass("filter"),
    "RepeatExamplesIterable": PipelineClass("repeat"),
    "TakeExamplesIterable": PipelineClass("take"),
    "SkipExamplesIterable": PipelineClass("skip"),
    "BufferShuffledExamplesIterable": PipelineClass(
        "shuffle", "shuffle() holds back samples that its state leaves out"
    ),
    "CyclingMultiSourcesExamplesIterable": _INTERLEAVED,
    "RandomlyCyclingMultiSourcesExamplesIterable": _INTERLEAVED,
    "VerticallyConcatenatedMultiSourcesExamplesIterable": PipelineClass("concatenate_datasets"),
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": PipelineClass("concatenate_columns"),
}
# Versions of which no state is exact: since the first, before the second.
_LOSSY_VERSIONS = ((3, 3), (3, 6))
_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"
_FUNCTIONS = ("function", "mask_function", "generate_examples_fn", "generate_tables_fn")
_DETAILS = (
    "n",
    "num_times",
    "buffer_size",
    "stopping_strategy",
    "probabilities",
    "column_names",
    "batched",
    "batch_size",
)
# Arguments that take more characters are told apart by a digest.
_LONGEST_SAID = 64
# A longer number is no seed that somebody chose, but what the system gave for none. Before NumPy 2, a copy of a
# generator does not tell its seed; ranks that differ are then found out by their descriptions.
_BITS_OF_A_SEED = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 1024


def version() -> tuple[int, ...]:
    """The first two numbers of the version of ``datasets`` in use, which has been imported."""
    return tuple(map(int, sys.modules["datasets"].__version__.split(".")[:2]))


def class_of(stage: Any) -> PipelineClass:
    """The table's row of a stage of a pipeline."""
    name = type(stage).__name__
    return PIPELINE_CLASSES.get(name, PipelineClass(name, f"nothing is known here of how {name} resumes"))


def sources_of(stage: Any) -> list[Any]:
    """The stages that a stage reads from."""
    return [stage.ex_iterable] if hasattr(stage, "ex_iterable") else list(getattr(stage, "ex_iterables", ()))


def walk(stage: Any) -> Iterator[Any]:
    """The stages of a pipeline, the last one first."""
    yield stage
    for source in sources_of(stage):
        yield from walk(source)


def num_shards_of(dataset: Any) -> int:
    """Number of shards, by whatever name the version has for it.

    Raises:
        ConfigurationError: The version cannot divide such a pipeline, as one with ``repeat`` before 4.0.
    """
    try:
        return int(dataset.num_shards if hasattr(type(dataset), "num_shards") else dataset.n_shards)
    except NotImplementedError as error:
        raise ConfigurationError(
            f"datasets {sys.modules['datasets'].__version__} cannot divide this dataset into shards ({error}). Leave "
            "that stage out, or install a newer version of datasets."
        ) from error


def gives_tables(formatting: Any) -> bool:
    """Whether samples are given out as tables."""
    return formatting is not None and formatting.format_type in ("arrow", "pandas", "polars")


def runs_users_code(stage: Any) -> bool:
    """Whether a stage itself may run code that is none of Hugging Face's own."""
    return type(stage).__name__ not in PIPELINE_CLASSES or any(map(_is_of_user, _functions_of(stage)))


def may_draw(stage: Any) -> bool:
    """Whether a stage itself may draw random numbers: it runs code of the user's that is not seen to draw none."""
    if type(stage).__name__ not in PIPELINE_CLASSES:
        return True
    held = [vars(stage)[name] for name in _FUNCTIONS if name in vars(stage)]
    of_user = [function for function in held if _is_of_user(_bare(function))]
    return bool(of_user) and not all(map(draws_nothing, [*of_user, getattr(stage, "fn_kwargs", {})]))


def reruns_users_code(stage: Any) -> bool:
    """Whether a resume by the state of a stage runs functions of the user's once more for some samples."""
    return (class_of(stage).reruns or _is_batched(stage)) and any(map(runs_users_code, walk(stage)))


def reread_of(stages: Iterable[Any]) -> str:
    """Why a shard of these stages has to be read again on a resume; empty if it goes on from its state."""
    found = []
    if _LOSSY_VERSIONS[0] <= version() < _LOSSY_VERSIONS[1]:
        found.append(f"states of datasets {sys.modules['datasets'].__version__} leave samples out (3.6 mended that)")
    for stage in stages:
        sources, kind = sources_of(stage), class_of(stage)
        found.append(kind.reread)
        if _accumulates(stage):
            found.append("batch(by_column=...) holds back samples that its state leaves out")
        if any(inspect.iscoroutinefunction(function) for function in _functions_of(stage)):
            found.append("async functions run ahead of the sample that is read")
        if not sources and not kind.reread and runs_users_code(stage):
            found.append("a generator has to make every sample again")
        if _functions_of(stage) and any(map(_reads_ahead, sources)):
            found.append(f"datasets {sys.modules['datasets'].__version__} reads whole tables ahead of maps and filters")
        if kind.word == "concatenate_datasets" and len({source.iter_arrow is None for source in sources}) > 1:
            # In a shard of the former, a map reads whole tables ahead, which its state leaves out.
            found.append("it concatenates datasets that are read as tables and others that are not")
    return ", and ".join(dict.fromkeys(filter(None, found)))


def refuse(stage: Any, num_shards: int) -> None:
    """Refuse a stage that cannot be repeated, or of which the shards would hold something else.

    Raises:
        ConfigurationError: It is such a stage.
    """
    word, generator = class_of(stage).word, getattr(stage, "generator", None)
    if generator is not None and _is_unseeded(generator):
        raise ConfigurationError(
            f"{word} has no seed, so that every process would read other samples, and a resume too. Pass seed=..., or "
            "leave it out and let this package shuffle or mix."
        )
    if version() == (5, 0) and getattr(stage, "block_sources_order_when_shuffling", False):
        raise ConfigurationError(
            f"datasets {sys.modules['datasets'].__version__} reads {word}({stage.n}) in the first epoch only, and "
            "fails in the second. Leave it out, or install datasets 5.1 or later."
        )
    if num_shards > 1 and not getattr(stage, "split_when_sharding", True):
        raise ConfigurationError(
            f"{word}({stage.n}) was called after split_dataset_by_node, which makes it count in each of the "
            f"{num_shards} shards. Leave split_dataset_by_node out: ranks are dealt their shards by this package."
        )
    if num_shards > 1 and word == "repeat" and stage.num_times is None:
        raise ConfigurationError(
            f"repeat(None) would read one of the {num_shards} shards for ever and never come to the others, as each is "
            "read by itself. Leave it out: every epoch begins the data anew, and Trainer(max_epochs=-1, max_steps=...) "
            "ends by steps. Of datasets that are mixed, MixedStream begins each anew where it ends."
        )
    if num_shards > 1 and "add_column_fn" in map(_name_of, _functions_of(stage)):
        raise ConfigurationError(
            f"add_column counts rows from 0 in each of the {num_shards} shards, so that all but the first would get "
            "values of other rows. Write the column into the files, or add it in a map, from what tells samples apart."
        )


def warnings_of(stage: Any, num_shards: int) -> Iterator[str]:
    """Warnings of all that differs from reading the dataset as a whole, or from run to run, with remedies."""
    word = class_of(stage).word
    if word == "shuffle":
        mixes = "" if num_shards == 1 else f", and mixes the samples of each of the {num_shards} shards by itself"
        yield (
            f".shuffle(buffer_size={stage.buffer_size}) in the pipeline has a resume read the shard again from its "
            f"beginning, because Hugging Face's state loses what is in the buffer{mixes}. Leave shuffle() out and pass "
            "buffer_size= to StreamDataModule for an exact block shuffle, over several shards where they are small."
        )
    if word == "interleave_datasets" and any(map(runs_users_code, walk(stage))):
        yield (
            "Hugging Face runs functions and generators that come before interleave_datasets in threads, so that what "
            "they draw from the generators that all code shares follows no seed. If they draw, apply them after it, or "
            "mix the datasets with MixedStream."
        )
    if num_shards > 1 and (apart := _apart(stage)):
        yield f"{word} works on each of the {num_shards} shards by itself, as in Hugging Face's workers: {apart}."


def note_of(stages: Sequence[Any], num_shards: int) -> str:
    """Sentences on what each shard gives by itself otherwise than the whole dataset would."""
    if num_shards == 1:
        return ""
    said = [
        f"repeat({stage.num_times}) reads each of the {num_shards} shards as often in a row."
        for stage in stages
        if class_of(stage).word == "repeat"
    ]
    if any(getattr(stage, "batched", False) and runs_users_code(stage) for stage in stages):
        said.append(
            f"map(batched=True) is given the rows of each of the {num_shards} shards by itself: a function that joins "
            "rows, or cuts them into blocks, gives other rows than over the whole dataset."
        )
    return " ".join(said)


def _apart(stage: Any) -> str:
    """A warning of what a stage does in each shard by itself; empty where shards make no difference."""
    word = class_of(stage).word
    if word in ("take", "skip"):
        return f"{word}({stage.n}) is divided among them. Give the dataset fewer files, or one shard, instead"
    if word == "interleave_datasets" and stage.stopping_strategy != _WITHOUT_REPLACEMENT:
        return (
            f"it ends where one of its sources does in the shard ({stage.stopping_strategy}). Pass "
            f"stopping_strategy={_WITHOUT_REPLACEMENT!r}, or mix the datasets with MixedStream"
        )
    if word == "map" and stage.drop_last_batch:
        return "drop_last_batch=True drops the last batch of each. Leave it out to train on every sample"
    if _accumulates(stage):
        return "batch(by_column=...) joins what follows each other within one. Give the dataset one file, or one shard"
    if any("batch" in _name_of(function) for function in _functions_of(stage) if not _is_of_user(function)):
        return f"batch({stage.batch_size}) ends each with a smaller batch. Let batch_size= of the loader make batches"
    if getattr(stage, "with_indices", False):
        return "with_indices=True counts from 0 in each. Give samples a column that tells them apart"
    return ""


def files_of(stage: Any) -> list[str]:
    """The files that a source reads, as far as its arguments tell."""
    given = getattr(stage, "kwargs", {})
    for name, value in given.items():
        if isinstance(value, str) and ("file" in name or "path" in name):
            return [value]
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return list(value)
    # Before 5.0, a file is an iterable that was made of its path.
    paths = [item.args[0] for item in given.get("files", ()) if type(item).__name__ == "FilesIterable"]
    return [path for path in paths if isinstance(path, str)]


def describe(dataset: Any) -> dict[str, Any]:
    """A description that tells datasets apart: plain data, equal wherever their files lie, and in every process."""
    stages = list(walk(dataset._ex_iterable))
    labels = [label for label in map(_label_of, reversed(stages)) if label]
    return {
        "shards": num_shards_of(dataset),
        "split": None if dataset.split is None else str(dataset.split),
        "features": None if dataset.features is None else list(dataset.features),
        "format": None if dataset._formatting is None else dataset._formatting.format_type,
        # Once each: shuffled shards of one dataset are many sources.
        "stages": " > ".join(dict.fromkeys(labels)),
        "digest": _digest(labels),
        "files": _digest(_base_name(file) for stage in stages for file in files_of(stage)),
    }


def _label_of(stage: Any) -> str:
    word = class_of(stage).word
    details = [f"{name}={vars(stage)[name]}" for name in _DETAILS if vars(stage).get(name) is not None]
    details += [part for name in _FUNCTIONS if name in vars(stage) for part in _function_in_words(vars(stage)[name])]
    details += _in_words(getattr(stage, "fn_kwargs", None) or {})
    if getattr(stage, "generator", None) is not None:
        details.append(f"seed={_digest([repr(stage.generator.bit_generator.state)])}")
    return f"{word}({', '.join(details)})" if word else ""


def _function_in_words(function: Any) -> list[str]:
    return name_and_arguments(function) if _is_of_user(_bare(function)) else []


def name_and_arguments(function: Any) -> list[str]:
    """The name of a function, and the plain arguments that it was given by ``functools.partial``."""
    given: list[str] = []
    while isinstance(function, partial):
        given += [*_in_words(dict(enumerate(function.args))), *_in_words(function.keywords)]
        function = function.func
    return [getattr(function, "__qualname__", type(function).__qualname__), *given]


def _in_words(arguments: Mapping[Any, Any]) -> list[str]:
    """Plain arguments with their values, long ones by a digest, and the types of others."""
    said = []
    for name, value in arguments.items():
        text = repr(value) if _is_plain(value) else type(value).__qualname__
        said.append(f"{name}={text if len(text) <= _LONGEST_SAID else _digest([text])}")
    return said


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _functions_of(stage: Any) -> list[Any]:
    return [_bare(vars(stage)[name]) for name in _FUNCTIONS if name in vars(stage)]


def _is_unseeded(generator: np.random.Generator) -> bool:
    entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _BITS_OF_A_SEED


def _accumulates(stage: Any) -> bool:
    return bool(getattr(stage, "is_batch_accumulate_arrow_table_function", False))


def _is_batched(stage: Any) -> bool:
    return bool(getattr(stage, "batched", False)) or gives_tables(getattr(stage, "formatting", None))


def _reads_ahead(stage: Any) -> bool:
    # Newer versions cut tables into the batches of the map that comes next.
    cut: Any = getattr(stage, "ex_iterable", None)
    is_formatted = type(stage).__name__ == "FormattedExamplesIterable"
    return is_formatted and cut.iter_arrow is not None and type(cut).__name__ != "RebatchedArrowExamplesIterable"


def _is_of_user(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    of = function if owner is None or inspect.ismodule(owner) else type(owner)
    module = getattr(of, "__module__", None) or type(of).__module__
    # Behind the builder of a generator there is the user's.
    return module.partition(".")[0] != "datasets" or module.startswith("datasets.packaged_modules.generator")


def _bare(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def _base_name(file: str) -> str:
    # An address on the Hub tells its revision, but folders may be others on another machine.
    is_address = re.compile("(?!file:)[a-z0-9]+://").match
    return "::".join(part if is_address(part) else PurePath(part).name for part in file.split("::"))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b(chr(0).join(texts).encode(), digest_size=8).hexdigest()
