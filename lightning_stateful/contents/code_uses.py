"""Tells from the source of functions whether they use a count or a queue for more than counting, and for logging."""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import linecache
import warnings
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias

from lightning_stateful.generators.attributes import Place, codes_in, is_users, names_in, reached

# Functions by which samples are read.
_READ = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward"})
# Those that only put something into a container, or lock it; and those whose result, if any, is only written down.
_ADD = {"append", "appendleft", "add", "extend", "update"}
_PUT = _ADD | {"get_lock", "acquire", "release"}
_TELL = {"print", "write", "log", "debug", "info", "warn", "warning", "error", "exception", "critical", "next"}
_TELL |= {"log_dict", "log_metrics", "add_scalar", "add_scalars"}
# Functions that make a number of something.
_NUMBER = {"len", "int", "float", "min", "max", "abs", "round", "sum"}
# Those that may take any attribute of an object, and attributes that hold all of them.
_TAKE, _ALL = {"getattr", "vars", "copy", "deepcopy"}, {"__dict__", "__getstate__"}


class Use(NamedTuple):
    """The use of a value by the code that reads samples.

    Attributes:
        counts: Whether it counts it up, or sets it from what it was.
        uses: Whether it does more with it than to count, to put something into it, and to write it down now and then.
        grows: Whether it counts it up, or puts something into it, for each sample, or for each that it does not have.
        uses_all: Whether it uses more of it than the item of a key.
        into: Attributes that are set from it.
        carries: Whether a function adds to it, sets it from what it was, or uses it and then sets it, and had not set
            it before.
    """

    counts: bool = False
    uses: bool = False
    grows: bool = False
    uses_all: bool = False
    into: frozenset[str] = frozenset()
    carries: bool = False


def uses_of(
    dataset: Any,
    name: str,
    *,
    is_variable: bool = False,
    may_be_called: bool = False,
    read: frozenset[str] = _READ,
) -> Use:
    """Whether the code that reads samples counts a value up, and whether it does more with it than that.

    Nothing more is done by ``self.reads += 1``, ``self.reads[key] += 1`` and ``self.reads.append(index)``, nor by
    ``if self.reads % 1000 == 0: print(self.reads)``, by what only says whether a sample is kept under its index, by
    what sets an attribute that is not used, nor by what is set in the same function before.
    Looked at are all functions of the user's that reading may call.

    Args:
        dataset: The dataset.
        name: The name of the value.
        is_variable: Whether it may be a variable or an argument, and not only an attribute.
        may_be_called: Whether it may be a function, so that to call what has that name is to use it.
        read: The functions by which samples are read, or others that are looked at in place of those.
    """
    codes = _code_of(dataset, read)
    found: dict[str, Use] = {}
    left = {name}
    while left:
        one = left.pop()
        found[one] = _joined([_uses_in(code, one, is_variable and one == name, may_be_called) for code in codes])
        left |= found[one].into - found.keys()
    return found[name]._replace(
        uses=any(use.uses for use in found.values()),
        uses_all=found[name].uses_all or any(use.uses for other, use in found.items() if other != name),
    )


def uses_any_of(owner: Any, names: Iterable[str]) -> bool:
    """Whether code does more with one of some values than to count it; by names with dots, such as ``Data.scores``."""
    leaves = {name.rpartition(".")[2] for name in names}
    return any(uses_of(owner, name, is_variable=True, may_be_called=True).uses for name in leaves)


def is_set_anew(owner: Any, name: str, read: frozenset[str]) -> bool:
    """Whether a function of those names sets an attribute whenever it is called, and not from what it was.

    Args:
        owner: What has the functions.
        name: The attribute.
        read: The names of the functions.
    """
    codes = [code for code in _code_of(owner, read) if code.co_name in read]
    functions = [function for code in codes for function in _functions_of(code)]
    steps = [(step, of) for function, of in functions if not isinstance(function, ast.Lambda) for step in function.body]
    assigns = [(step, target, of) for step, of in steps if isinstance(step, ast.Assign) for target in step.targets]
    return any(
        isinstance(target, ast.Attribute)
        and _attribute_of(target, of) == name
        and not any(isinstance(part, ast.Attribute) and part.attr == name for part in ast.walk(step.value))
        for step, target, of in assigns
    )


def attributes_read(owner: Any, functions: frozenset[str]) -> set[str]:
    """The names of attributes that functions of those names, or what they call, read."""
    codes = [one for code in _code_of(owner, functions) for one in codes_in(code)]
    steps = (step for code in codes for step in dis.get_instructions(code))
    return {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}


def functions_naming(owner: Any, name: str, read: frozenset[str]) -> list[tuple[_Function, str]]:
    """Functions of names ``read``, and what they call, whose source names a value; and how they name their object."""
    codes = [code for code in _code_of(owner, read) if name in names_in(code)]
    return [one for code in codes for one in _functions_of(code)]


def forgets(kind: type, method: str, name: str) -> bool:
    """Whether a method sets an attribute whenever it is called, and it and what it calls use nothing of what was in it.

    Args:
        kind: The class.
        method: The name of the method.
        name: The attribute.
    """
    held = {key: value for one in reversed(kind.__mro__) for key, value in vars(one).items()}
    functions = {key: value for key, value in held.items() if isinstance(value, FunctionType)}
    called = [method]
    for one in called:
        named = names_in(functions[one].__code__) if one in functions else ()
        called += [key for key in named if key in functions and key not in called]
    if method not in functions or any(name in names_in(functions[one].__code__) for one in called[1:]):
        return False
    function, read = functions[method], frozenset({method})
    return is_set_anew(function, name, read) and not uses_of(function, name, read=read).carries


def _joined(uses: list[Use]) -> Use:
    return Use(
        counts=any(use.counts for use in uses),
        uses=any(use.uses for use in uses),
        grows=any(use.grows for use in uses),
        uses_all=any(use.uses_all for use in uses),
        into=frozenset().union(*(use.into for use in uses)),
        carries=any(use.carries for use in uses),
    )


def _code_of(dataset: Any, read: frozenset[str]) -> list[CodeType]:
    """The code of the user's functions that reading samples may call, as far as their names tell."""
    places = [place for place in reached({"dataset": dataset}) if isinstance(place.value, FunctionType)]
    places = [place for place in places if is_users(place.value.__module__)]
    own = [place for place in places if not _is_overridden(place)]
    called = _called_by(own, read)
    if len(own) < len(places):
        # A method may call the one that it overrides.
        own = [place for place in places if not _is_overridden(place) or called & {"super", _class_of(place)}]
        called = _called_by(own, read)
    return list(dict.fromkeys(place.value.__code__ for place in own if place.value.__name__ in called))


def _called_by(places: list[Place], read: frozenset[str]) -> set[str]:
    """The names that functions by which samples are read name, and those that these name, and so on."""
    held = {place.value.__name__ for place in places if place.above and not _is_method(place)}
    # That of a dataclass is none of its methods.
    called = {*read, *(held - {"__repr__"})}
    functions = [place.value for place in places]
    while more := {name for one in functions if one.__name__ in called for name in names_in(one.__code__)} - called:
        called |= more
    return called


def _class_of(place: Place) -> str:
    return str(place.value.__qualname__.rpartition(".")[0].rpartition(".")[2])


def _is_method(place: Place) -> bool:
    above, function = place.above, place.value
    held = None if above is None else inspect.getattr_static(type(above.value), function.__name__, None)
    return held is function or isinstance(held, (staticmethod, classmethod, property))


def _is_overridden(place: Place) -> bool:
    """Whether a function is that of a base class which has another one in its place, or only that leads to it."""
    if place.above is None:
        return False
    kind, name = type(place.above.value), getattr(place.value, "__name__", "")
    held = [vars(one)[name] for one in kind.__mro__ if name in vars(one)]
    is_method = isinstance(place.value, FunctionType) and any(one is place.value for one in held)
    return (is_method and held[0] is not place.value) or _is_overridden(place.above)


@lru_cache(maxsize=1024)
def _uses_in(code: CodeType, name: str, is_variable: bool, may_be_called: bool) -> Use:
    functions = _functions_of(code)
    if not functions:
        # There is no source, or that of other code.
        is_named = name in {*names_in(code), *code.co_varnames, *code.co_freevars}
        return Use(is_named, is_named, carries=is_named)
    found = []
    for function, owner in functions:
        uses = _Uses(name, is_variable, may_be_called, owner, _kept_in(function, owner))
        uses.visit(function)
        found.append(Use(uses.counts, uses.uses, uses.grows, uses.uses_all, frozenset(uses.into), uses.carries))
    return _joined(found)


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _functions_of(code: CodeType) -> list[tuple[_Function, str]]:
    """The functions in source that code may be of, and the names of the object in methods; none if it has changed."""
    # Not of a function, which may say that it is another one.
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename))
    codes, functions = _parsed(source, code.co_flags & __future__.annotations.compiler_flag)
    return functions.get((code.co_firstlineno, code.co_name), []) if code in codes else []


@lru_cache(maxsize=32)
def _parsed(source: str, flags: int) -> tuple[set[CodeType], dict[tuple[int, str], list[tuple[_Function, str]]]]:
    """All code of a file, and its functions by line and name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            codes = set(codes_in(compile(source, "", "exec", flags, dont_inherit=True)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return set(), {}
    methods = {part: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
    functions: dict[tuple[int, str], list[tuple[_Function, str]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            line = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            arguments = [*node.args.posonlyargs, *node.args.args] if node in methods else []
            owner = arguments[0].arg if arguments else ""
            functions.setdefault((line, getattr(node, "name", "<lambda>")), []).append((node, owner))
    return codes, functions


def _kept_in(function: ast.AST, owner: str) -> set[str]:
    """What a method keeps under keys, such as ``self.cache[index]``."""
    steps = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    return {ast.unparse(target) for step in steps for target in step.targets if _is_under_key(target, owner)}


def _is_under_key(node: ast.AST, owner: str) -> bool:
    """Whether this is an item of an attribute by a key that is no constant."""
    if not owner or not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Attribute):
        return False
    return _is_key(node.slice) and _attribute_of(node, owner) is not None


def _is_key(node: ast.AST) -> bool:
    """Whether an index follows from variables alone."""
    calls = [called_name(part) for part in ast.walk(node) if isinstance(part, ast.Call)]
    is_slice = any(isinstance(part, ast.Slice) for part in ast.walk(node))
    return not is_slice and {*calls} <= {"int", "str"} and any(isinstance(part, ast.Name) for part in ast.walk(node))


def _attribute_of(node: ast.expr, owner: str) -> str | None:
    """The attribute of a method's object that this is, or is an item of."""
    held: ast.expr = node
    while isinstance(held, ast.Subscript):
        held = held.value
    if not isinstance(held, ast.Attribute) or not isinstance(held.value, ast.Name):
        return None
    return held.attr if held.value.id == owner else None


class _Uses(ast.NodeVisitor):
    """Goes through a function, and notes what it does with a value of a name, as ``Use`` says it.

    Args:
        name: The name.
        is_variable: Whether it may be a variable or an argument, and not only an attribute.
        may_be_called: Whether it may be a function.
        owner: The name of the object in a method.
        kept: What the function keeps under keys.
    """

    def __init__(self, name: str, is_variable: bool, may_be_called: bool, owner: str, kept: set[str]) -> None:
        self._name, self._is_variable, self._may_be_called = name, is_variable, may_be_called
        self._owner, self._kept = owner, kept
        self.counts = self.uses = self.grows = self.uses_all = self.carries = False
        self.into: set[str] = set()
        # What was set before in this block or in one around it.
        self._set: set[str] = set()
        self._is_now_and_then = False

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the parts of a node; what a block sets is known in that block alone."""
        for _, part in ast.iter_fields(node):
            before = set(self._set)
            for one in part if isinstance(part, list) else [part]:
                if isinstance(one, ast.AST):
                    self.visit(one)
            self._set = before

    def _is_named(self, node: ast.AST) -> bool:
        is_variable = self._is_variable and isinstance(node, ast.Name) and node.id == self._name
        return is_variable or (isinstance(node, ast.Attribute) and node.attr == self._name)

    def _is_in(self, *nodes: ast.AST) -> bool:
        parts = [part for node in nodes for part in ast.walk(node)]
        methods = {part.func for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)}
        return any(self._is_named(part) for part in parts if part not in methods)

    def _holds(self, node: ast.AST) -> bool:
        """Whether this is the value, an item or an attribute of it."""
        while not self._is_named(node) and isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return self._is_named(node)

    def _is_left(self, node: ast.AST) -> bool:
        """Whether this holds the value as an earlier call may have left it."""
        return self._holds(node) and not any(ast.unparse(part) in self._set for part in ast.walk(node))

    def _tells(self, step: ast.stmt) -> bool:
        """Whether a statement does nothing but to write something down, and to set the value."""
        if isinstance(step, ast.If):
            return all(map(self._tells, [*step.body, *step.orelse]))
        if isinstance(step, ast.Assign):
            return all(map(self._holds, step.targets)) and isinstance(step.value, ast.Constant)
        is_call = isinstance(step, ast.Expr) and isinstance(step.value, ast.Call)
        return isinstance(step, ast.Pass) or (is_call and called_name(step.value) in _TELL)  # type: ignore[attr-defined]

    def _keeps(self, step: ast.stmt, block: list[ast.stmt]) -> bool:
        """Whether a statement only writes down, counts, keeps a sample under its key, or takes one that was kept."""
        if isinstance(step, ast.AugAssign):
            attribute = _attribute_of(step.target, self._owner) if self._owner else None
            self.into |= {attribute} - {self._name} if attribute else set()
            return not self._is_in(step.value) and (attribute is not None or self._holds(step.target))
        if isinstance(step, ast.Assign) and all(map(self._is_named, step.targets)):
            # Such as one that is emptied, or cut.
            return self._is_simple(step.value)
        if isinstance(step, ast.Assign) and not self._tells(step) and not self._is_in(step):
            (target, *others), value = step.targets, step.value
            if _is_under_key(target, self._owner):
                return not others and not isinstance(value, ast.Constant)
            if isinstance(value, ast.Constant) and not others and isinstance(target, ast.Attribute):
                self.into |= {attribute for attribute in [_attribute_of(target, self._owner)] if attribute}
                return _attribute_of(target, self._owner) is not None
            assigns = [one for one in block if isinstance(one, ast.Assign)]
            kept = [ast.unparse(one.value) for one in assigns if _is_under_key(one.targets[0], self._owner)]
            return isinstance(target, ast.Name) and not others and (target.id in kept or self._is_kept(value))
        if isinstance(step, ast.Expr) and isinstance(step.value, ast.Call) and self._is_put(step.value):
            return not self._is_in(*step.value.args)
        is_taken = isinstance(step, ast.Return) and step.value is not None and self._is_kept(step.value)
        return is_taken or isinstance(step, ast.Raise) or self._tells(step)

    def _is_kept(self, value: ast.expr) -> bool:
        """Whether this is a sample that the function keeps, or a copy of it."""
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
            value = value.func.value
        return ast.unparse(value) in self._kept

    def _is_put(self, node: ast.Call) -> bool:
        return called_name(node) in _PUT and isinstance(node.func, ast.Attribute) and self._is_named(node.func.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "clear" and self._is_named(called.value):
            # Emptied: as one that is set anew.
            self._set.add(ast.unparse(called.value))
        elif isinstance(called, ast.Attribute) and called.attr == "setdefault" and self._is_named(called.value):
            # What it returns is left out.
            self.grows = self.grows or self._is_in(*node.value.args)  # type: ignore[attr-defined]
            self._visit_value(ast.Tuple(node.value.args))  # type: ignore[attr-defined]
        elif not self._tells(node):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Visit a condition, unless all that follows from it is what is written down or kept."""
        is_about = self._is_in(node.test)
        if self._tells(node):
            return
        blocks = [node.body, node.orelse]
        if not (is_about and all(self._keeps(step, block) for block in blocks for step in block)):
            self.visit(node.test)
        before, self._is_now_and_then = self._is_now_and_then, self._is_now_and_then or not is_about
        for block in blocks:
            self.generic_visit(ast.Module(block, []))
        self._is_now_and_then = before

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        before, self._is_now_and_then = self._is_now_and_then, True
        self.generic_visit(node)
        self._is_now_and_then = before

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._holds(node.target):
            self.counts, self.carries = True, self.carries or self._is_left(node.target)
            self.grows = self.grows or not self._is_now_and_then
            self._visit_value(node.value)
        elif not self._goes_into([node.target], node.value):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        (first, *others), value = node.targets, node.value
        targets, values = ([] if others else getattr(first, "elts", [])), getattr(value, "elts", [])
        if targets and isinstance(value, ast.Tuple) and len(targets) == len(values):
            for target, part in zip(targets, values, strict=True):
                self.visit_Assign(ast.Assign([target], part))
            return
        self.carries = self.carries or self._is_carried_by(node)
        if any(map(self._holds, node.targets)) and self._is_in(node.value):
            # Also one that is made where it is None.
            self.counts = True
            is_len = isinstance(node.value, ast.Call) and called_name(node.value) == "len"
            self.grows = self.grows or is_len or (isinstance(node.value, ast.BinOp) and not self._is_now_and_then)
        elif not self._goes_into(node.targets, node.value):
            for target in node.targets:
                # To set an item is no use of the others.
                is_item = isinstance(target, ast.Subscript) and self._is_named(target.value)
                self.visit(target.slice if isinstance(target, ast.Subscript) and is_item else target)
            self.visit(node.value)
            self._set |= {ast.unparse(target) for target in node.targets if self._is_named(target)}

    def _is_carried_by(self, node: ast.Assign) -> bool:
        """Whether this sets the value, from what it was or behind a use of that."""
        parts = [part for target in node.targets for part in getattr(target, "elts", [target])]
        is_used = self.uses or self._is_in(node.value)
        return is_used and any(map(self._is_left, parts))

    def _visit_value(self, value: ast.expr) -> None:
        if self._is_in(value) and not self._is_simple(value):
            self.visit(value)

    def _is_simple(self, value: ast.expr) -> bool:
        """Whether nothing of the user's is called with the value."""
        calls = [part for part in ast.walk(value) if isinstance(part, ast.Call) and called_name(part) not in _NUMBER]
        return not any(self._is_in(*part.args, *part.keywords) for part in calls)

    def _goes_into(self, targets: list[ast.expr], value: ast.expr) -> bool:
        """Whether an attribute of the object is set from the value, which is noted."""
        names = {_attribute_of(target, self._owner) if self._owner else None for target in targets}
        if None in names or self._is_in(*targets) or not self._is_in(value) or not self._is_simple(value):
            return False
        self.into |= {name for name in names if name}
        return True

    def visit_Compare(self, node: ast.Compare) -> None:
        is_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        if not (is_none and self._is_named(node.left)):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called, first = called_name(node), node.args[0] if node.args else None
        is_selfs = isinstance(first, ast.Name) and first.id == "self"
        names = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
        if called in _TAKE and is_selfs and names in ([], [self._name]):
            self.uses = self.uses_all = True
        if called == "setdefault" and isinstance(node.func, ast.Attribute) and self._is_named(node.func.value):
            # Such as a number for each new word, which is how many there were.
            self.grows = self.grows or self._is_in(*node.args)
        if called in _ADD and isinstance(node.func, ast.Attribute):
            self.carries = self.carries or self._is_left(node.func.value)
        if self._is_put(node):
            self.grows = self.grows or (called in _ADD and not self._is_now_and_then)
            for part in node.args:
                self.visit(part)
        elif isinstance(node.func, ast.Attribute) and self._is_named(node.func) and not self._may_be_called:
            # A method of that name.
            self.generic_visit(ast.Tuple([node.func.value, *node.args, *(one.value for one in node.keywords)]))
        else:
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        uses_all = self.uses_all
        self.generic_visit(node)
        if self._is_named(node.value) and _is_key(node.slice) and not self._is_in(node.slice):
            self.uses_all = uses_all

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node)
        if node.attr in _ALL:
            self.uses = self.uses_all = True
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def _note(self, node: ast.Attribute | ast.Name) -> None:
        if self._is_named(node) and isinstance(node.ctx, ast.Load) and ast.unparse(node) not in self._set:
            self.uses = self.uses_all = True


def called_name(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
