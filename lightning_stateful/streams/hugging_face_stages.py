"""What the stages of a Hugging Face ``IterableDataset`` mean for reading it shard by shard."""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.hugging_face_versions import is_table, num_shards_of, version

REBATCHED, FORMATTED = "RebatchedArrowExamplesIterable", "FormattedExamplesIterable"
SHARDS_INTERLEAVED = "InterleavedShardsExamplesIterable"
INTERLEAVED = ("CyclingMultiSourcesExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable")
_FILES = ("ExamplesIterable", "ArrowExamplesIterable")
# Since when shards are divided as easily_divided does it.
_DIVIDED_SINCE = (5, 2)
# Stages by what people call them, those that Hugging Face adds by itself by nothing; of others nothing is known.
_WORDS = {
    **dict.fromkeys(_FILES, ""),
    REBATCHED: "",
    FORMATTED: "",
    SHARDS_INTERLEAVED: "",
    # Of versions before 5.0.
    "ShuffledDataSourcesExamplesIterable": "",
    "ShuffledDataSourcesArrowExamplesIterable": "",
    "TypedExamplesIterable": "",
    "SelectColumnsIterable": "select_columns",
    "MappedExamplesIterable": "map",
    "FilteredExamplesIterable": "filter",
    "RepeatExamplesIterable": "repeat",
    "TakeExamplesIterable": "take",
    "SkipExamplesIterable": "skip",
    "BufferShuffledExamplesIterable": "shuffle",
    **dict.fromkeys(INTERLEAVED, "interleave_datasets"),
    "VerticallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": "concatenate_columns",
}
_DETAILS = ("n", "num_times", "buffer_size", "stopping_strategy", "probabilities", "column_names")
_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"
# A longer number is no seed that somebody chose, but what the system gave for none.
_BITS_OF_A_SEED = 64
# Before NumPy 2, a copy of a generator does not tell its seed.
_COPIES_KEEP_SEEDS = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def walk(stage: Any) -> Iterator[Any]:
    """The stages that a dataset is made of, the last one first."""
    yield stage
    for source in sources_of(stage):
        yield from walk(source)


def easily_divided(stage: Any) -> Any:
    """A copy of a stage and of those before it whose shards do not cost more where there are many of them.

    Hugging Face divides all the files of a dataset for every shard of it.
    """
    if version() < _DIVIDED_SINCE:
        return stage
    own = copy.copy(stage)
    if type(own).__name__ in _FILES:
        own.shard_data_sources = partial(_part_of, stage)
    elif hasattr(own, "ex_iterable"):
        own.ex_iterable = easily_divided(own.ex_iterable)
    elif sources_of(own):
        own.ex_iterables = [easily_divided(source) for source in own.ex_iterables]
    return own


def sources_of(stage: Any) -> list[Any]:
    """The stages that a stage reads from."""
    return [stage.ex_iterable] if hasattr(stage, "ex_iterable") else list(getattr(stage, "ex_iterables", ()))


def word_of(stage: Any) -> str:
    """What people call a stage."""
    return _WORDS.get(type(stage).__name__, type(stage).__name__)


def is_batched(stage: Any) -> bool:
    """Whether a map or a filter may make several samples at a time."""
    return bool(stage.batched) or is_table(stage.formatting)


def function_of(stage: Any) -> Callable[..., Any] | None:
    """The function of a map or a filter."""
    function: Callable[..., Any] | None = getattr(stage, "mask_function", getattr(stage, "function", None))
    return function


def is_of_user(function: Any) -> bool:
    """Whether a function is none of Hugging Face's own."""
    owner = getattr(_bare(function), "__self__", None)
    of = _bare(function) if owner is None or inspect.ismodule(owner) else type(owner)
    module = getattr(of, "__module__", None) or type(of).__module__
    # Behind the builder of a generator there is the user's.
    return module.partition(".")[0] != "datasets" or module.startswith("datasets.packaged_modules.generator")


def runs_users_code(stage: Any) -> bool:
    """Whether a stage may run code that is none of Hugging Face's own."""
    if type(stage).__name__ not in _WORDS:
        return True
    function = function_of(stage) or _reader(stage)
    return function is not None and is_of_user(function)


def refuse(stage: Any, num_shards: int) -> None:
    """Refuse a stage that cannot be repeated, or of which the shards would hold something else.

    Raises:
        ConfigurationError: It is such a stage.
    """
    word, generator = word_of(stage), getattr(stage, "generator", None)
    if generator is not None and _is_unseeded(generator):
        raise ConfigurationError(
            f"{word} has no seed, so that every process would read other samples, and a resume too. Pass seed=..., or "
            "leave it out and let this package shuffle or mix."
        )
    if num_shards < 2:
        return
    if not getattr(stage, "split_when_sharding", True):
        raise ConfigurationError(
            f"{word}({stage.n}) was called after split_dataset_by_node, which makes it count in each of the "
            f"{num_shards} shards. Leave split_dataset_by_node out: ranks are dealt their shards by this package."
        )
    if _name_of(function_of(stage)) == "add_column_fn":
        raise ConfigurationError(
            f"add_column counts rows from 0 in each of the {num_shards} shards, so that all but the first would get "
            "values of other rows. Write the column into the files, or add it in a map, from what tells samples apart."
        )


def warnings_of(stage: Any, num_shards: int) -> Iterator[str]:
    """What differs from reading the dataset as a whole, or from run to run, and what to do."""
    word = word_of(stage)
    if word == "shuffle":
        yield (
            f".shuffle(buffer_size={stage.buffer_size}) in the pipeline: Hugging Face's own state loses what is in the "
            "buffer; this library reads the shard again from its beginning on a resume. Leave shuffle() out and pass "
            "buffer_size= for an exact block shuffle."
        )
    if word == "interleave_datasets" and any(map(runs_users_code, walk(stage))):
        yield (
            "Hugging Face runs functions and generators that come before interleave_datasets in threads, so that what "
            "they draw from the generators that all code shares follows no seed. If they draw, apply them after it, or "
            "mix the datasets with MixedStream."
        )
    if num_shards < 2:
        return
    if word in ("take", "skip"):
        yield (
            f"{word}({stage.n}) is divided among the {num_shards} shards, as Hugging Face does for workers: it counts "
            f"from the beginning of each, and not {stage.n} samples from the beginning of the first. Give the dataset "
            "fewer files instead, or one shard."
        )
    if word == "interleave_datasets" and stage.stopping_strategy != _WITHOUT_REPLACEMENT:
        yield (
            f"interleave_datasets ends in each of its {num_shards} shards by itself ({stage.stopping_strategy}: of the "
            "parts of the datasets that are in the shard), so that other samples are left out or repeated than without "
            f"shards. Pass stopping_strategy={_WITHOUT_REPLACEMENT!r}, or mix the datasets with MixedStream."
        )
    if word == "map" and stage.drop_last_batch:
        yield (
            f"map(drop_last_batch=True) drops the incomplete last batch of each of the {num_shards} shards. Leave it "
            "out to train on every sample."
        )
    if word in ("map", "filter") and stage.with_indices and not _accumulates(stage):
        yield (
            f"{word}(with_indices=True) counts from 0 in each of the {num_shards} shards. Give samples a column that "
            "tells them apart."
        )


def loss_of(stage: Any) -> str:
    """Why a shard with this stage has to be read again on a resume; empty if it need not be."""
    word, function = word_of(stage), function_of(stage)
    if type(stage).__name__ not in _WORDS:
        return f"this version does not know the stage {word}"
    if word == "shuffle":
        return "shuffle() holds samples back that Hugging Face's state leaves out"
    if _accumulates(stage):
        return "batch(by_column=...) holds samples back that Hugging Face's state leaves out"
    if function is not None and inspect.iscoroutinefunction(function) and is_of_user(function):
        return "async functions run ahead of the sample that is read"
    if function is None and runs_users_code(stage):
        return "a generator has to make every sample again"
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
    """What tells datasets apart: plain data that is equal wherever their files lie, and in every process."""
    found = list(walk(dataset._ex_iterable))
    generators = (stage.generator for stage in found if getattr(stage, "generator", None) is not None)
    return {
        "class": type(dataset).__qualname__,
        "shards": num_shards_of(dataset),
        "split": None if dataset.split is None else str(dataset.split),
        "features": None if dataset.features is None else list(dataset.features),
        "format": None if dataset._formatting is None else dataset._formatting.format_type,
        "stages": _in_words(dataset._ex_iterable),
        "files": _digest(_base_name(file) for stage in found for file in files_of(stage)),
        "seeds": _digest(repr(generator.bit_generator.state) for generator in generators),
    }


def sizes_of(stage: Any) -> list[int] | None:
    """Samples of each shard of a stage; None if only reading tells."""
    word, number = word_of(stage), num_shards_of(stage)
    sources = [sizes_of(source) for source in sources_of(stage)]
    if not sources:
        tables = getattr(stage, "kwargs", {}).get("shards")
        is_known = not runs_users_code(stage) and isinstance(tables, list)
        return [len(table) for table in tables] if is_known and tables is not None else None
    if any(sizes is None for sizes in sources):
        return None
    sizes = [size for source in sources for size in source or ()]
    if len(sizes) != number:
        return None
    if word == "concatenate_datasets":
        return sizes
    if len(sources) > 1:
        return None
    if word == "repeat":
        return None if stage.num_times is None else [size * max(stage.num_times, 0) for size in sizes]
    if word in ("take", "skip"):
        parts = zip(sizes, stage.split_number(stage.n, number), strict=True)
        return [min(size, part) if word == "take" else max(size - part, 0) for size, part in parts]
    is_one_to_one = word in ("", "select_columns", "shuffle") or (word == "map" and not is_batched(stage))
    return sizes if is_one_to_one and not getattr(stage, "drop_last_batch", False) else None


def _part_of(stage: Any, num_shards: int, index: int, contiguous: bool = True) -> Any:
    """What ``shard_data_sources`` of a stage that reads files gives, without looking at the other files."""
    if stage.num_shards < 2:
        return stage.shard_data_sources(num_shards, index, contiguous=contiguous)
    numbers = stage.split_shard_indices_by_worker(num_shards, index, contiguous=contiguous)
    part = copy.copy(stage)
    part._state_dict = None
    part.kwargs = {
        name: [value[number] for number in numbers] if isinstance(value, list) else value
        for name, value in stage.kwargs.items()
    }
    return part


def _in_words(stage: Any) -> str:
    word, before = word_of(stage), Counter(map(_in_words, sources_of(stage)))
    if not before:
        reader = _reader(stage)
        owner = getattr(_bare(reader), "__self__", None)
        return word or (_name_of(reader).strip("_") if owner is None else type(owner).__name__.lower())
    # Shuffled shards of one dataset are many sources; which of them comes when is told by their files.
    text = " + ".join(f"{count} of {source}" if count > 1 else source for source, count in before.items())
    if not word:
        return text
    details = [f"{name}={vars(stage)[name]}" for name in _DETAILS if vars(stage).get(name) is not None]
    if getattr(stage, "batched", False):
        details.append(f"batch_size={stage.batch_size}")
    text = f"({text})" if before.total() > 1 else text
    return f"{text} > {word}({', '.join(details)})" if details else f"{text} > {word}"


def _reader(stage: Any) -> Callable[..., Any] | None:
    reader: Callable[..., Any] | None = getattr(
        stage, "generate_examples_fn", getattr(stage, "generate_tables_fn", None)
    )
    return reader


def _accumulates(stage: Any) -> bool:
    return bool(getattr(stage, "is_batch_accumulate_arrow_table_function", False))


def _bare(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    return str(getattr(_bare(function), "__name__", ""))


def _is_unseeded(generator: np.random.Generator) -> bool:
    if not _COPIES_KEEP_SEEDS:
        # Ranks that differ are found out by their descriptions, and resumes too.
        return False
    seeds: Any = getattr(generator.bit_generator, "seed_seq", None)
    entropy = getattr(seeds, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _BITS_OF_A_SEED


def _base_name(file: str) -> str:
    # An address on the Hub tells its revision, but folders may be others on another machine.
    is_address = re.compile("(?!file:)[a-z0-9]+://").match
    return "::".join(part if is_address(part) else PurePath(part).name for part in file.split("::"))


def _digest(texts: Iterable[str]) -> str:
    listed = list(texts)
    return f"{len(listed)}, {hashlib.blake2b(chr(0).join(listed).encode(), digest_size=8).hexdigest()}"
