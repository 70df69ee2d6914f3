"""Notes the files that copies of a user's sampler write while they are tried, and puts back what was in them."""

from __future__ import annotations

import builtins
import io
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch

# Functions that open a file to write it, or may.
_WRITERS = ((builtins, "open"), (io, "open"), (os, "open"), (torch, "save"), (sqlite3, "connect"))
# Bytes of all files that are kept to be put back.
_MOST_BYTES = 2**26


class WrittenFiles:
    """Notes whether code that this thread runs within the block opens a file to write it; such files are put back.

    Databases stay as they are, and so do files behind the first 64 MiB.

    Attributes:
        are_there: Whether it has.
    """

    are_there = False

    def __init__(self) -> None:
        # What they held before; None of those that were not there.
        self._before: dict[Path, bytes | None] = {}

    def __enter__(self) -> WrittenFiles:
        self._thread = threading.get_ident()
        self._kept = [(home, name, getattr(home, name)) for home, name in _WRITERS]
        for home, name, function in self._kept:
            setattr(home, name, self._noting(function))
        return self

    def __exit__(self, *error: object) -> None:
        for home, name, function in self._kept:
            setattr(home, name, function)
        self.put_back()

    def put_back(self) -> None:
        """Put back what was in the files that were written so far."""
        for path, held in self._before.items():
            with suppress(OSError):
                _put_back(path, held)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            how = args[1] if len(args) > 1 else kwargs.get("flags", kwargs.get("mode", "r"))
            if threading.get_ident() == self._thread and _is_written(function, how):
                self.are_there = True
                if function is not sqlite3.connect:
                    self._note(how if function.__name__ == "save" else args[0] if args else kwargs.get("file"))
            return function(*args, **kwargs)

        return noting

    def _note(self, named: Any) -> None:
        """Note what is in a file before it is written for the first time."""
        with suppress(OSError, TypeError, ValueError):
            path = Path(os.fsdecode(named)).absolute()
            if path in self._before or (path.exists() and not path.is_file()):
                return
            size = path.stat().st_size if path.exists() else 0
            if size + sum(len(held or b"") for held in self._before.values()) <= _MOST_BYTES:
                self._before[path] = path.read_bytes() if path.exists() else None


def _put_back(path: Path, held: bytes | None) -> None:
    if held is None:
        path.unlink(missing_ok=True)
    elif path.read_bytes() != held:
        # In place: the user may have mapped it into memory.
        with path.open("r+b") as file:
            file.write(held)
            file.truncate()


def _is_written(function: Any, how: Any) -> bool:
    """Whether a file is opened to write it, by a mode or by flags, or ``torch.save`` is to write one."""
    if function.__name__ == "save":
        # Not into memory, as tensors in a sampler's own state are; a file has been opened.
        return isinstance(how, (str, os.PathLike))
    if function.__name__ != "open":
        return True
    if isinstance(how, int):
        return bool(how & (os.O_WRONLY | os.O_RDWR))
    return isinstance(how, str) and bool({*"wax+"} & {*how})
