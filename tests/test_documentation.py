"""Everything in the documentation runs, and says what is so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, run_page

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


# Its commands start processes as the tests of verify do, which run it beside them.
ELSEWHERE = ("verify.md",)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE],
    ids=lambda page: page.name,
)
def test_the_code_of_a_page_runs_from_top_to_bottom_and_its_commands_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(page, tmp_path, monkeypatch, capsys)


def written_by(page: Path) -> set[str]:
    """Files that a page's own code is to be put into."""
    return set(re.findall(r"^```python\n# (\w+\.py)\n", page.read_text(), flags=re.M))


def test_the_error_that_is_shown_is_the_one_raised() -> None:
    from lightning_stateful import StatefulLoader
    from lightning_stateful.errors import StateMismatchError

    state = StatefulLoader(list(range(640)), shuffle=True).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        StatefulLoader(list(range(500)), shuffle=True, seed=1).load_state_dict(state)
    assert str(caught.value) in (ROOT / "docs" / "start.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = [ROOT / name for name in ("lightning_stateful", "tests", "examples", "benchmarks", "docs")]
    files = "".join(f"/{path.relative_to(ROOT).as_posix()}\n" for folder in folders for path in folder.rglob("*.py"))
    missing = {name for name in re.findall(r"\w[\w/]*\.py\b", page.read_text()) if f"/{name}\n" not in files}
    assert missing == written_by(page)


def test_every_picture_is_drawn_by_a_script_and_shown_on_a_page() -> None:
    folder = ROOT / "docs" / "pictures"
    scripts, pages = ("".join(path.read_text() for path in paths) for paths in (folder.glob("*.py"), PAGES))
    pictures = [path.name for path in folder.iterdir() if path.suffix not in (".py", "")]
    assert pictures
    assert [name for name in pictures if f'"{name}"' not in scripts or f"pictures/{name})" not in pages] == []


def test_the_readme_shows_the_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"make (\w+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{name}:", makefile, flags=re.M) or name == "is", name


def test_every_numbered_trap_is_answered() -> None:
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "traps.md").read_text(), flags=re.M)
    assert [int(number) for number in numbers] == list(range(1, 41))


NAMED = re.compile(r"`((?:[\w.]+/)*[\w.]+\.py|(?:[\w.]+/)+)`|`(lightning_stateful(?:\.\w+)+)")


def test_every_file_folder_and_module_that_is_named_exists() -> None:
    folders = [ROOT / name for name in ("lightning_stateful", "tests", "benchmarks", "docs", "examples")]
    tracked = [path.relative_to(ROOT).as_posix() for folder in folders for path in (folder, *folder.rglob("*"))]
    missing = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for path, dotted in NAMED.findall(page.read_text()):
            if path in written_by(page):
                continue
            found = any(f"/{one}/".endswith(f"/{path.strip('/')}/") for one in tracked) if path else _resolves(dotted)
            if not found:
                missing.append(f"{page.name}: {path or dotted}")
    assert missing == []


def _resolves(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        return bool(importlib.import_module(dotted))
    except ImportError:
        return hasattr(importlib.import_module(module), name)
