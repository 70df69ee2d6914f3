"""Collects the message of every error and warning of the package, for the page of all messages.

The messages are read from the sources, so that the page cannot differ from them. An ellipsis stands for the values that
a message is filled in with.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_stateful import errors

PACKAGE = Path(errors.__file__).parent
# The sentence in docs/messages.md in whose place the site has the list.
MARKER = "The site lists them here. Where you read this instead, search the folder `lightning_stateful` for your words."
# The parts of the package, in the order of the page, by the folders and files whose messages belong to them.
PARTS = {
    "States and checkpoints": (
        "state",
        "shapes",
        "errors",
        "samplers/state_codec",
        "loops/checkpoint",
        "loops/saved",
    ),
    "The Trainer and the callback": ("trainer", "loops", "module_state", "data_checks"),
    "Data modules": ("data_modules",),
    "Loaders and patched DataLoaders": ("loaders", "user_loaders", "contents"),
    "Samplers of this package": ("samplers", "core", "generators"),
    "Samplers of yours": ("user_samplers", "sampler_copies", "samplers/rank_exchange"),
    "Mixtures and round robin": ("mixture", "samplers/mixture", "loaders/source_datasets", "data_modules/source"),
    "Lengths, buckets and budgets": ("bucketing", "loaders/length_cache", "data_modules/bucket", "report"),
    "Packing": ("packing", "loaders/packed", "data_modules/packed", "stream_nodes/document_packer"),
    "Streams": ("streams", "iterable_datasets", "stream_nodes", "stream_loader", "data_modules/stream"),
    "The ledger": ("ledger", "trainer/ledger", "report/ledger"),
    "Checks of your own samplers": ("audit", "testing", "verify"),
    "The command": ("cli",),
    "Others": ("",),
}
KINDS = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
KINDS |= {"ContractError", "FileNotFoundError", "TypeError", "ClickException", "UsageError"}
WARNING, LINE = "StatefulWarning", "a line of a StateMismatchError"
GAP = "…"


@dataclass(frozen=True, order=True)
class Message:
    """One message, as its words stand in the sources."""

    text: str
    kind: str
    place: str

    @property
    def part(self) -> str:
        """The part of the package that it belongs to: the one with the longest beginning of its path."""
        fits = [
            (len(start), part) for part, starts in PARTS.items() for start in starts if self.place.startswith(start)
        ]
        return max(fits)[1]


@cache
def read_sources() -> dict[str, ast.Module]:
    """The files of the package, parsed, by their paths without suffix."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def read_messages() -> list[Message]:
    """Every message of the package, sorted by its words."""
    found = {message for place, tree in read_sources().items() for message in _in_file(place, tree)}
    # Where a message is put together elsewhere, it has no words of its own.
    return sorted(message for message in found if len(re.findall(r"\w+", message.text)) > 1)


def page_of_messages() -> str:
    """The messages as Markdown, one list a part of the package."""
    messages = sorted(read_messages(), key=lambda message: message.text.lstrip(f" {GAP}:.").lower())
    parts = []
    for part in PARTS:
        lines = [f"- {_escaped(one.text)} *{one.kind}*" for one in messages if one.part == part]
        parts += [f"## {part}", "", *dict.fromkeys(lines), ""] if lines else []
    return "\n".join(parts)


def _escaped(text: str) -> str:
    plain = re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<=\s)(--[\w-]+)", r"`\1`", plain)  # options of the command


def _in_file(place: str, tree: ast.Module) -> Iterator[Message]:
    for scope, call in _calls(tree, tree):
        kind, node = _message_of(call)
        for text in _texts(node, scope, tree) if node is not None else ():
            yield Message(text, kind, place)


def _message_of(call: ast.Call) -> tuple[str, ast.expr | None]:
    """The kind of the message that a call makes, and the expression for its words."""
    whole = ast.unparse(call.func)
    name = whole.split(".")[-1]
    remedies = [keyword.value for keyword in call.keywords if keyword.arg == "remedy"]
    if name in ("Difference", "replace") and remedies:
        return LINE, remedies[0]
    if name in KINDS and call.args:
        return name, call.args[0]
    # A worker has its warnings said by the main process, from a list.
    if call.args and (name in ("warn", "_warn", "rank_zero_warn") or whole.endswith("said.append")):
        return WARNING, call.args[0]
    return "", None


def _calls(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield scope, child
        yield from _calls(child, child if isinstance(child, ast.FunctionDef) else scope)


def _texts(node: ast.AST, scope: ast.AST, tree: ast.AST) -> list[str]:
    """The texts that an expression can be; a name stands for what it is set to in its function or file."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_texts(part, scope, tree)[0] for part in node.values)]
    if isinstance(node, ast.BinOp):
        return [a + b for a in _texts(node.left, scope, tree) for b in _texts(node.right, scope, tree)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scope, tree), *_texts(node.orelse, scope, tree)]
    if isinstance(node, ast.Name):
        for where in (scope, tree):
            found = [
                one.value
                for one in ast.walk(where)
                if isinstance(one, ast.Assign) and any(ast.unparse(target) == node.id for target in one.targets)
            ]
            if found:
                return [
                    text for value in found if node.id not in ast.unparse(value) for text in _texts(value, scope, tree)
                ]
    if isinstance(node, ast.Call):
        # A function of the same file that puts the words together.
        name = ast.unparse(node.func).split(".")[-1]
        made_by = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name]
        ends = [one for of in made_by for one in ast.walk(of) if isinstance(one, ast.Return) and one.value is not None]
        return [text for end in ends for text in _texts(end.value, made_by[0], tree)] or [GAP]
    return [GAP]
