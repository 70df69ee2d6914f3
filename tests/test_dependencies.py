"""The packages of pyproject.toml are those imported, and those that `make test-oldest` installs."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OWN = {"lightning_stateful", "benchmarks", "support", "harm"}
OWN |= {path.stem for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")}


def imported(*folders: str) -> set[str]:
    """Other people's packages that files in these folders import, at whatever place in the file."""
    names: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    tops = {name.split(".")[0] for name in names}
    return tops - OWN - set(sys.stdlib_module_names)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def names(requirements: list[str]) -> set[str]:
    """Requirements by the name that is imported."""
    return {re.split(r"[\[<>=~!; ]", line)[0].replace("-", "_") for line in requirements}


def test_what_the_package_imports_is_declared_and_nothing_else(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    optional = names([*extras["plots"], *extras["cli"]])
    needed = names(project["dependencies"])
    assert needed.isdisjoint(optional)
    assert imported("lightning_stateful") == needed | optional


def test_what_tests_benchmarks_and_examples_import_is_declared(project: dict[str, Any]) -> None:
    declared = names(project["dependencies"]) | names(project["optional-dependencies"]["dev"])
    assert imported("tests", "benchmarks", "examples") <= declared


def test_the_oldest_versions_declared_are_those_that_are_tested(project: dict[str, Any]) -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints-oldest.txt").read_text(), flags=re.M))
    tested = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for line in project["dependencies"]:
        name, oldest = re.match(r"([\w-]+)>=([\w.]+)", line).groups()  # type: ignore[union-attr]  # or the test fails
        if name != "torch":
            assert re.fullmatch(rf"{re.escape(oldest)}(\.0)*", tested[name]), line
    # Older builds of torch are not at hand everywhere.
    assert tested["torch"] == re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)[1]  # type: ignore[index]
