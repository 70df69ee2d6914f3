"""Errors that the handler of a signal raises in the middle of other code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class HandlerError(RuntimeError):
    """What such a handler raises, as torch's does for a worker that has died."""


def raising_at(number: int, module: ModuleType, event: str) -> Callable[..., Any]:
    """A function for ``sys.settrace`` that raises once, before an instruction or a line of a module.

    Args:
        number: After so many of them.
        module: The module.
        event: ``"opcode"`` or ``"line"``.
    """
    left = number

    def trace(frame: Any, kind: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = event == "opcode"
        if kind == event:
            left -= 1
            if left == -1:
                raise HandlerError(f"before line {frame.f_lineno}, in {frame.f_code.co_name}")
        return trace

    return trace


@contextmanager
def handler_raises_at(number: int, module: ModuleType, event: str = "opcode") -> Iterator[None]:
    """Let a handler raise while code of a module runs: see :func:`raising_at`."""
    before = sys.gettrace()
    sys.settrace(raising_at(number, module, event))
    try:
        yield
    finally:
        sys.settrace(before)
