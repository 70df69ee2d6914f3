"""Unpickles plain data, and nothing else: no class of any package is found, nothing runs, no tensor is read.

A file of ``torch.save`` is a pickle beside the numbers of its tensors. The pickle alone is read; whatever it names
becomes an :class:`Opaque` object that holds nothing and does nothing. A state is plain data, so nothing of it is lost.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from typing import IO, Any, ClassVar

from lightning_stateful.errors import DamagedStateError, StateError

# Names in a pickle that no checkpoint needs, and that run a program or read and write files when they are called.
_HOSTILE_MODULES = frozenset(
    "os posix nt sys subprocess shutil pty socket multiprocessing asyncio webbrowser runpy importlib imp code codeop "  # noqa: SIM905
    "ctypes pdb timeit pip commands popen2 pickle _pickle cPickle marshal".split()
)
_HOSTILE_BUILTINS = frozenset(("eval", "exec", "execfile", "compile", "open", "__import__", "input", "breakpoint"))
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
}
# A pickle beside tensors has some hundred bytes for each of these.
_MOST_BYTES = 2**28
# A checkpoint written before torch 1.6 is a row of pickles: a number, a version, facts about the machine, the contents.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


class Opaque:
    """An object of a class that is not known here: it takes whatever a pickle does to it, and keeps nothing."""

    def __new__(cls, *args: Any, **options: Any) -> Opaque:
        """A new one, whatever the arguments."""
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, *args: Any, **options: Any) -> Opaque:
        """Another one."""
        return Opaque()

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take an element."""

    def extend(self, values: Any) -> None:
        """Take elements."""

    def add(self, value: Any) -> None:
        """Take an element."""

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__}>"


class _PlainUnpickler(pickle._Unpickler):
    """Makes plain data, and opaque objects of all else; refuses names that can only be there to do harm.

    The unpickler written in Python: that in C takes as much memory as a number in the pickle says. What does so here
    as well, a bytearray, is left out.
    """

    dispatch: ClassVar = {
        opcode: load for opcode, load in pickle._Unpickler.dispatch.items() if opcode != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # as older protocols call it
        hostile = module.split(".")[0] in _HOSTILE_MODULES
        if hostile or (module == "builtins" and name in _HOSTILE_BUILTINS):
            raise StateError(
                f"it names {module}.{name}, which no checkpoint needs: whoever loads it would run a program of its "
                "author's. Nothing of it was run here. Do not load it."
            )
        return _PLAIN.get((module, name)) or type(f"{module}.{name}", (Opaque,), {})

    def persistent_load(self, pid: Any) -> Opaque:
        """A tensor's numbers, which are not read."""
        return Opaque()


class _Limited:
    """A file of which no part is read that is larger than a checkpoint's are, whatever a pickle says of its size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        """The next bytes."""
        if size > _MOST_BYTES:
            raise ValueError(f"a part of {size} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        """The next line."""
        return self._file.readline(_MOST_BYTES)


def _unpickled(opened: io.BytesIO | _Limited) -> Any:
    try:
        return _PlainUnpickler(opened).load()  # plain data alone
    except (StateError, zipfile.BadZipFile):
        raise
    except Exception as error:
        # Of a pickle that is cut or changed anything may be raised.
        raise DamagedStateError(
            f"it is truncated or damaged: {type(error).__name__}: {error}. Take an older checkpoint."
        ) from None


def from_zip(file: IO[bytes]) -> Any:
    """Plain data of what ``torch.save`` has written.

    Raises:
        StateError: It is no such archive, is damaged, or names what could only do harm.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
            if not names:
                raise StateError("it is a zip archive, but none that torch.save has written.")
            pickled = archive.getinfo(names[0])
            if pickled.compress_type != zipfile.ZIP_STORED or pickled.file_size > _MOST_BYTES:
                raise StateError("it is a zip archive whose data.pkl torch.save has not written so.")
            return _unpickled(io.BytesIO(archive.read(pickled)))
    except zipfile.BadZipFile as error:
        raise DamagedStateError(f"it is truncated or damaged: {error}. Take an older checkpoint.") from None


def refuse_flipped(file: IO[bytes]) -> None:
    """Compare every part of what ``torch.save`` has written, tensors too, with its checksum, which torch does not read.

    Raises:
        DamagedStateError: A part has other bytes than were saved.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise DamagedStateError(f"it is truncated or damaged: {error}. Take an older checkpoint.") from None
    if damaged is not None:
        raise DamagedStateError(
            f"it is damaged: the checksum of {damaged} is not that of its bytes. torch would load it without a word. "
            "Take an older checkpoint."
        )


def from_pickles(file: IO[bytes]) -> Any:
    """Plain data of a pickle, or of what ``torch.save`` wrote before torch 1.6.

    Raises:
        StateError: As in :func:`from_zip`.
    """
    opened = _Limited(file)
    contents = _unpickled(opened)
    if contents == _LEGACY_MAGIC:
        contents = [_unpickled(opened) for _ in range(3)][-1]
    return contents
