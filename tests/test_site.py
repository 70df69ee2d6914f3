"""The pages of the site are complete: every page, link, name and message has its place."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, WeightedRandomSampler

import lightning_stateful
from lightning_stateful import (
    BucketBatchSampler,
    Budget,
    ChunkedDataset,
    MixedStream,
    MixtureBatchSampler,
    PackedDataModule,
    Packing,
    QuadraticCost,
    RoundRobinBatchSampler,
    StatefulLoader,
    StreamDataModule,
    patch_dataloader,
)
from lightning_stateful import state as format_
from lightning_stateful.core import BlockShuffledOrder
from lightning_stateful.errors import Difference
from lightning_stateful.mixture import MixtureOrder
from lightning_stateful.mixture.sources import Sources
from lightning_stateful.stream_loader.reader import StreamReader

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("api/*.md"))]
PUBLIC = ("lightning_stateful", "lightning_stateful.testing", "lightning_stateful.audit", "lightning_stateful.errors")


def read(name: str) -> str:
    return (DOCS / name).read_text()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


# Navigation


def toctrees(page: str) -> list[str]:
    """The pages that a page's tables of contents name."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", read(page), flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    return [re.sub(r".*<(.+)>", r"\1", line) for line in lines]


def test_every_page_is_in_one_table_of_contents_and_each_of_these_names_pages() -> None:
    listed = [*toctrees("index.md"), *toctrees("api.md")]
    there = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")} - {"index"}

    assert len(set(listed)) == len(listed)
    assert set(listed) == there


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and the site, give to the headings of a page."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.M):
        plain = re.sub(r"\]\([^)]*\)", "", heading.lower())
        found[re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")] += 1
    return {f"{anchor}-{n}" if n else anchor for anchor, times in found.items() for n in range(times)}


def test_every_link_leads_to_a_page_and_to_a_heading_of_it() -> None:
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            if "://" in target:
                continue
            if not to.exists() or (anchor and anchor not in anchors(to)):
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_code_of_other_packages_that_is_shown_is_python() -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", read("coming_from.md"), flags=re.M | re.S)
    assert len(blocks) > 5
    for block in blocks:
        compile(block, "coming_from.md", "exec")


# The reference


def test_every_public_name_is_in_the_reference_and_all_names_there_exist() -> None:
    text = "".join(path.read_text() for path in DOCS.glob("api/*.md"))
    modules = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", text, flags=re.M))
    others = re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)\.(\w+)$", text, flags=re.M)
    assert text.count(".. auto") == len(modules) + len(others)
    assert [name for module, name in others if not hasattr(importlib.import_module(module), name)] == []
    described = {name for _, name in others}
    for module in PUBLIC:
        if module not in modules:
            names = set(importlib.import_module(module).__all__)
            assert names - described - {"Recorder"} == set(), module


def test_the_overview_of_the_reference_has_every_name_of_the_package() -> None:
    assert set(lightning_stateful.__all__) <= set(re.findall(r"`(\w+)`", read("api.md")))


def calls_in(page: Path) -> Iterator[ast.Call]:
    """Calls that a page's text and code show, such as ``patch_dataloader(loader, tail="drop")``."""
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    spans = re.findall(r"`([A-Za-z_.]+\([^`]*\))`", without_code(text))
    for shown in [*blocks, *(span.replace("...)", "_)").replace("(..., ", "(_, ") for span in spans)]:
        try:
            yield from (node for node in ast.walk(ast.parse(shown)) if isinstance(node, ast.Call))
        except SyntaxError:
            continue


def arguments_of(name: str) -> set[str]:
    """The arguments of a public class or function, with those that it hands on to the classes above and a loader."""
    made: Any = getattr(lightning_stateful, name)
    takes = inspect.signature(made).parameters
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        return set(takes)
    above = [
        inspect.signature(one).parameters
        for one in [*getattr(made, "__mro__", [made]), DataLoader]
        if one is not object
    ]
    return {argument for of in above for argument in of}


def test_calls_that_pages_show_have_arguments_that_there_are() -> None:
    wrong, checked = [], 0
    for page in PAGES:
        for call in calls_in(page):
            name = ast.unparse(call.func).split(".")[-1]
            if name not in lightning_stateful.__all__:
                continue
            given = {keyword.arg for keyword in call.keywords if keyword.arg} - arguments_of(name) - {"_"}
            checked += 1
            wrong += [f"{page.name}: {name}({argument}=)" for argument in sorted(given)]
    assert wrong == []
    assert checked > 100


def test_the_packages_that_build_the_site_are_pinned() -> None:
    extra = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert extra is not None
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[>=]", name)[0] for name in re.findall(r'"([^"]+)"', extra[1])} <= pinned


# Errors


@pytest.fixture(scope="module")
def messages() -> Iterator[Any]:
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("messages")
    sys.path.remove(str(DOCS))


def test_every_class_of_errors_and_warnings_is_explained() -> None:
    from lightning_stateful import errors

    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    explained = set(re.findall(r"^### (\w+)$", read("errors.md"), flags=re.M))
    assert explained == kinds | {"ContractError"}
    named = {name for page in PAGES for name in re.findall(r"\b(\w+(?:Error|Warning))\b", page.read_text())}
    assert {name for name in named if hasattr(errors, name)} <= explained


def test_the_words_of_messages_that_are_explained_are_those_of_the_package(messages: Any) -> None:
    words = {words_of(node) for tree in messages.read_sources().values() for node in ast.walk(tree)}
    quoted = re.findall(r"^\| `([^`]+)` \|", read("errors.md"), flags=re.M)
    assert len(quoted) > 90
    assert [quote for quote in quoted if not any(quote in text for text in words)] == []


def words_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_every_message_is_listed_by_its_words(messages: Any) -> None:
    page = messages.page_of_messages()
    for words in (
        "There are no sources; give at least one dataset.",  # plain
        "rank must be in range(…), got ….",  # filled in
        "this installation reads version …",
        "data of another fingerprint: …",  # put together by a function
        "gave no sample. No other shard is read in its place",  # said by a worker
        "Put it back, or resume from a checkpoint of the end of an epoch.",  # a line of differences
    ):
        assert words in page.replace("\\", ""), words
    assert messages.MARKER in read("messages.md")


def test_files_that_raise_errors_have_messages_in_the_list(messages: Any) -> None:
    raised = {
        place
        for place, tree in messages.read_sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) in messages.KINDS
    }
    # What these raise is put together from what was found: the laws that an object breaks.
    assert raised - {message.place for message in messages.read_messages()} == {"audit/elastic"}


# Names for accept=


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", read(page), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", text, flags=re.M)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


class Samples(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def loaders() -> dict[str, list[Any]]:
    """Loaders and samplers of every kind of state, by the section of the page that has their names."""
    data, docs = list(range(20)), [[1] * 5] * 20
    budget = Budget(max_tokens=10, max_samples=2, multiple=2, cost=QuadraticCost(64), too_long="drop")
    chunks = ChunkedDataset(range(4), lambda chunk: [[chunk]] * 5, seed=0, chunk_sizes=[5] * 4)
    every_fifth = BatchSampler(range(0, 20, 5), 2, False)
    mixed = MixedStream({"a": chunks, "b": ChunkedDataset(range(4), lambda chunk: [[chunk]])}, weights=[1, 1])
    return {
        "Any data with an index": [
            patch_dataloader(DataLoader(data)),
            patch_dataloader(DataLoader(Subset(data, [1, 2]), shuffle=True)),
            StatefulLoader(data, sampler=BlockShuffledOrder(20, seed=0, block_size=10)),
        ],
        "Samplers of yours": [
            patch_dataloader(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 20, 9))),
            patch_dataloader(DataLoader(data, batch_sampler=every_fifth)),
        ],
        "Round robin and mixtures": [
            RoundRobinBatchSampler({"a": 10, "b": 20}, 2),
            MixtureBatchSampler({"a": 10, "b": 20}, 2, weights=[1, 2], by="sample", num_steps=4, by_pass=("a",)),
        ],
        "Batches of like lengths": [
            BucketBatchSampler([1, 2, 3, 4], budget=budget),
            BucketBatchSampler([1, 2, 3, 4], batch_size=2, num_buckets=2),
        ],
        "Packed sequences": [
            PackedDataModule(docs, lengths=[5] * 20, packing=Packing(8, how=how)).train_dataloader()
            for how in ("split", "whole")
        ],
        "Streams": [
            StreamDataModule(chunks, max_tokens=20, read_ahead=10, length=len).train_dataloader(),
            StreamDataModule(chunks, packing=Packing(8), batch_size=2).train_dataloader(),
            StreamDataModule(mixed, batch_size=2).train_dataloader(),
        ],
        "Iterable datasets that divide themselves": [patch_dataloader(DataLoader(Samples(), batch_size=2))],
    }


def names_of(config: Mapping[str, Any]) -> Iterator[str]:
    """The names of a configuration that are the same in every run: not those of sources and attributes."""
    for name, value in config.items():
        yield name
        if isinstance(value, Mapping) and name in ("dataset", "packing", "lengths", "sampler"):
            yield from (f"{name}.{below}" for below in value)


def test_every_name_that_a_state_compares_is_listed_under_its_order_and_no_other() -> None:
    page, of_any = sections("accept.md"), names_in(sections("accept.md")["Any data with an index"])
    for section, made in loaders().items():
        listed = names_in(page[section]) | of_any | names_in(page["Packed sequences"] if section == "Streams" else "")
        for one in made:
            names = set(names_of(one.tracker.config))
            assert {
                name for name in names if name not in listed and name.removeprefix("sampler.") not in listed
            } == set()
            assert f"`{one.order.kind}`" in page[section]

    every_name = {name for text in page.values() for cells in rows(text) for name in names_in(cells[0])}
    known = {*format_._REMEDIES, *format_._OTHER_NAMES}
    assert known <= set().union(*map(names_in, page.values()))
    configs = [one.tracker.config for made in loaders().values() for one in made]
    # Parts of what datasets of other packages say of themselves stand beside these.
    assert format_.warning_of_unknown(every_name, configs) == ""


def test_what_is_said_to_repeat_samples_is_what_a_resume_warns_of() -> None:
    mixture = MixtureOrder(sources=Sources(("a",), (4,), (1,)), draws=(1,))
    harmless = {"Round robin and mixtures": mixture.harmless, "Streams": StreamReader.harmless}
    for section, text in sections("accept.md").items():
        if section in ("Batches of like lengths", "The run"):
            continue
        for first, *_, effect in rows(text):
            for name in names_in(first) - {"nondeterministic", "replay", "dataset"}:
                found = Difference(path=name, saved=0, present=1, remedy="")
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    format_.warn_of_other_order([found], harmless.get(section, ("batch_size",)), where="The state")
                assert bool(said) == effect.startswith("may repeat"), (section, name)


# Compatibility


def test_what_other_packages_do_is_said_as_the_table_of_all_samplers_says_it() -> None:
    table = read("others.md").partition("<!-- table: begin -->")[2].partition("<!-- table: end -->")[0]
    measured = {cells[0]: cells[2:4] for cells in rows(table)}
    said = {
        f"{cells[0]}: {cells[1]}": cells[2:4] for cells in rows(sections("compatibility.md")["Samplers and loaders"])
    }
    compared = {name: cells for name, cells in said.items() if name in measured}

    assert len(compared) > 25
    assert set(said) - set(compared) == {
        "package: object",
        "lhotse: its five samplers, with `patch_dataloader`, on two and three ranks",
    }
    assert compared == {name: [cell.rstrip(" |") for cell in measured[name]] for name in compared}
