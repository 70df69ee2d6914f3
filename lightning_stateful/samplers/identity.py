"""What a state says about a dataset, so that a changed one is found out."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_stateful.state import copy_plain

_DIGESTED_INDICES = 2**16


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Describe a dataset by what can be read cheaply.

    Its length, if it has one; the fingerprint of a Hugging Face dataset; names and sizes of files if it lists their
    paths in an attribute ``files``; of a ``Subset`` also the chosen indices (up to 65,536 of them, evenly spaced) and
    of a ``ConcatDataset`` the lengths of its parts. A dataset may say more, or something else, by a method
    ``describe() -> dict`` of plain data.

    Returns:
        Plain data that is equal for equal data, wherever it lies.
    """
    described: dict[str, Any] = {"length": len(dataset) if hasattr(dataset, "__len__") else "unknown"}
    fingerprint = getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str):
        described["fingerprint"] = fingerprint
    files = getattr(dataset, "files", None)
    if isinstance(files, (list, tuple)) and files and all(isinstance(file, (str, Path)) for file in files):
        described["files"] = _digest_files(files)
    if isinstance(dataset, Subset):
        stride = -(-len(dataset.indices) // _DIGESTED_INDICES) or 1
        chosen = np.asarray(dataset.indices[::stride], dtype=np.int64)
        described["indices"] = hashlib.blake2b(chosen.tobytes(), digest_size=8).hexdigest()
        described["of"] = describe_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        sizes = np.asarray(dataset.cumulative_sizes, dtype=np.int64)
        described["parts"] = hashlib.blake2b(sizes.tobytes(), digest_size=8).hexdigest()
    described.update(_own_words(dataset))
    return described


def _own_words(dataset: Any) -> dict[str, Any]:
    own = getattr(dataset, "describe", None)
    # Another library's method of that name may want arguments, or tell about something else in other types.
    if not callable(own) or inspect.signature(own).parameters:
        return {}
    said = own()
    return dict(copy_plain(said, "dataset.describe()")) if isinstance(said, Mapping) else {}


def _digest_files(files: list[Any] | tuple[Any, ...]) -> str:
    # Names without their folder: the same files on another mount are the same data.
    digest = hashlib.blake2b(digest_size=8)
    for path in map(Path, files):
        size = path.stat().st_size if path.exists() else -1
        digest.update(f"{path.name}\0{size}\0".encode())
    return f"{len(files)} files, {digest.hexdigest()}"
