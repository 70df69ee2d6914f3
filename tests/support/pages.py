"""Runs the code and the commands of a page of the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_stateful.cli import main

ROOT = Path(__file__).parents[2]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a page from top to bottom in a folder; its commands print what it shows."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for language, block in re.findall(r"^```(python|console)\n(.*?)^```$", page.read_text(), flags=re.M | re.S):
        if language == "console":
            command, shown = block.removeprefix("$ ").split("\n", maxsplit=1)
            capsys.readouterr()
            main(shlex.split(command)[1:])
            assert without_versions(capsys.readouterr().out) == without_versions(shown)
            continue
        if name := re.match(r"# (\w+\.py)\n", block):
            Path(name[1]).write_text(block)
        exec(compile(block, str(page), "exec"), names)


def without_versions(text: str) -> str:
    """A text without the versions of packages."""
    return re.sub(r"(lightning_stateful|torch|lightning) \d[\w.+]*", r"\1", text)
