"""Tells from the source of functions whether they use a count or a queue for more than counting, and for logging."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

from lightning_stateful.samplers.attributes import Place, is_users, names_in, reached

# Functions by which samples are read.
_READ = {"__getitem__", "__getitems__", "__call__", "forward"}
# Those that only put something into a container, or lock it; and those whose result, if any, is only written down.
_PUT = {"append", "appendleft", "add", "extend", "get_lock", "acquire", "release"}
_TELL = {"print", "write", "log", "debug", "info", "warn", "warning", "error", "exception", "critical", "next"}
# Those that may take any attribute of an object, and attributes that hold all of them.
_TAKE, _ALL = {"getattr", "vars", "copy", "deepcopy"}, {"__dict__", "__getstate__"}


def uses_of(dataset: Any, name: str, *, is_variable: bool = False) -> tuple[bool, bool]:
    """Whether the code that reads samples counts a value up, and whether it does more with it than that.

    Nothing more is done by ``self.reads += 1``, ``self.reads[key] += 1`` and ``self.reads.append(index)``, nor by
    ``if self.reads % 1000 == 0: print(self.reads)``. Looked at are all functions of the user's that reading may call.

    Args:
        dataset: The dataset.
        name: The name of the value.
        is_variable: Whether it may be a variable or an argument, and not only an attribute.
    """
    found = [_uses_in(code, name, is_variable) for code in _code_of(dataset)]
    return any(counts for counts, _ in found), any(uses for _, uses in found)


def _code_of(dataset: Any) -> list[CodeType]:
    """The code of the user's functions that reading samples may call, as far as their names tell."""
    places = [place for place in reached({"dataset": dataset}) if isinstance(place.value, FunctionType)]
    functions = [place.value for place in places if is_users(place.value.__module__)]
    called = {*_READ, *(place.value.__name__ for place in places if place.above and not _is_method(place))}
    while more := {name for one in functions if one.__name__ in called for name in names_in(one.__code__)} - called:
        called |= more
    return list(dict.fromkeys(one.__code__ for one in functions if one.__name__ in called))


def _is_method(place: Place) -> bool:
    above, function = place.above, place.value
    held = None if above is None else inspect.getattr_static(type(above.value), function.__name__, None)
    return held is function or isinstance(held, (staticmethod, classmethod, property))


@lru_cache(maxsize=1024)
def _uses_in(code: CodeType, name: str, is_variable: bool) -> tuple[bool, bool]:
    try:
        # Not of a function, which may say that it is another one.
        source = inspect.getsource(code)
        tree = ast.parse(f"if 1:\n{source}" if source[0].isspace() else source)
    except (OSError, TypeError, SyntaxError, TokenError):
        # There is no source, or that of a lambda which is a part of a statement.
        is_named = name in {*names_in(code), *code.co_varnames, *code.co_freevars}
        return is_named, is_named
    found = _Uses(name, is_variable)
    found.visit(tree)
    return found.counts, found.uses


class _Uses(ast.NodeVisitor):
    """Goes through source, and notes what it does with a value of a name.

    Attributes:
        counts: Whether it counts it up, or sets it from what it was.
        uses: Whether it does more with it than to count, to put something into it, and to write it down now and then.
    """

    def __init__(self, name: str, is_variable: bool) -> None:
        self._name, self._is_variable = name, is_variable
        self.counts = self.uses = False

    def _is_named(self, node: ast.AST) -> bool:
        is_variable = self._is_variable and isinstance(node, ast.Name) and node.id == self._name
        return is_variable or (isinstance(node, ast.Attribute) and node.attr == self._name)

    def _is_in(self, *nodes: ast.AST) -> bool:
        return any(self._is_named(part) for node in nodes for part in ast.walk(node))

    def _holds(self, node: ast.AST) -> bool:
        """Whether this is the value, an item or an attribute of it."""
        while not self._is_named(node) and isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return self._is_named(node)

    def _tells(self, step: ast.stmt) -> bool:
        """Whether a statement does nothing but to write something down, and to set the value."""
        if isinstance(step, ast.If):
            return all(map(self._tells, [*step.body, *step.orelse]))
        if isinstance(step, ast.Assign):
            return all(map(self._holds, step.targets)) and isinstance(step.value, ast.Constant)
        is_call = isinstance(step, ast.Expr) and isinstance(step.value, ast.Call)
        return isinstance(step, ast.Pass) or (is_call and _called(step.value) in _TELL)  # type: ignore[attr-defined]

    def visit_Expr(self, node: ast.Expr) -> None:
        if not self._tells(node):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not self._tells(node):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._holds(node.target):
            self.counts = True
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(map(self._holds, node.targets)) and self._is_in(node.value):
            # Also one that is made where it is None.
            self.counts = True
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        is_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        if not (is_none and self._is_named(node.left)):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called, first = _called(node), node.args[0] if node.args else None
        is_selfs = isinstance(first, ast.Name) and first.id == "self"
        names = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
        self.uses = self.uses or (called in _TAKE and is_selfs and names in ([], [self._name]))
        if called in _PUT and isinstance(node.func, ast.Attribute) and self._is_named(node.func.value):
            for part in node.args:
                self.visit(part)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.uses = self.uses or node.attr in _ALL or (self._is_named(node) and isinstance(node.ctx, ast.Load))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.uses = self.uses or (self._is_named(node) and isinstance(node.ctx, ast.Load))


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
