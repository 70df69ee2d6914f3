"""Imports go down: the table in docs/architecture.md is the law."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_stateful"


@cache
def table() -> dict[str, tuple[set[str], set[str]]]:
    """For every layer, the layers and the packages that it may import."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|(.*?)\|$", text, flags=re.M)
    return {name: (set(re.findall(r"`(\w+)`", own)), set(re.findall(r"`(\w+)`", others))) for name, own, others in rows}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, those for type checking only among them."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "lightning_stateful" else {module}
    return names


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    layers, packages = table()[layer]
    for name in imported(path):
        top = name.split(".")[0]
        if top == "lightning_stateful":
            assert name.split(".")[1] in layers | {layer}, f"{path.name} imports {name}"
        else:
            assert top in packages or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_table_names_every_layer_and_no_other() -> None:
    layers = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert set(table()) == layers


def test_no_file_is_longer_than_a_room_should_be() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_the_library_raises_errors_and_asserts_nothing() -> None:
    for path in FILES:
        asserts = [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
        assert asserts == [], path


def test_only_one_file_imports_lightning() -> None:
    lightnings = {"lightning", "pytorch_lightning"}
    importing = {path.name for path in FILES if lightnings & {name.split(".")[0] for name in imported(path)}}
    assert importing == {"lightning.py"}


@pytest.mark.parametrize(
    ("pattern", "only"),
    [
        # In quotes it stands in the list of lightning.py.
        (r"(batch|epoch)_progress|_batches_that_stepped(?!\")", {"loop_progress.py", "saved_progress.py"}),
        (r"distributed\.get_rank\(", {"tracker.py"}),
    ],
    ids=["the loop counters", "the rank"],
)
def test_no_other_file_asks_for(pattern: str, only: set[str]) -> None:
    asking = {path.name for path in FILES if re.search(pattern, path.read_text())}
    # lightning.py names what it makes sure of.
    assert asking - {"lightning.py"} == only


def test_no_two_files_on_users_samplers_import_one_another() -> None:
    files = {f"lightning_stateful.user_samplers.{path.stem}": path for path in (PACKAGE / "user_samplers").glob("*.py")}
    left = {name: imported(path) & files.keys() for name, path in files.items()}
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert left == {}
