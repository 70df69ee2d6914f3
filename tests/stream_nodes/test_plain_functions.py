"""Functions that draw no random numbers, told by their code."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.stream_nodes.plain_functions import draws_nothing

WORDS = re.compile(r"\w+")
LABELS = {"cat": 0, "dog": 1}
LOADED_LATER = None
RNG = np.random.default_rng(0)
OF_OBJECTS = [RNG]
TABLE = list(range(2000))
count = 0


def length(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(row["text"])}


def halves(row: dict[str, Any], *, more: int = 1) -> dict[str, Any]:
    def half(text: str) -> str:
        return text[: len(text) // 2].strip()

    try:
        return {**row, "half": sorted((half(one) for one in row["texts"]), key=lambda one: (len(one), more))}
    except KeyError:
        return length(row)


def again(row: dict[str, Any], depth: int) -> int:
    return again(row, depth - 1) if depth else len(row)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(row: Any) -> Any:
        return function(row)

    return run


def drawn() -> float:
    return random.random()


def calls_what_draws(row: Any) -> Any:
    return [drawn() for _ in row]


def imports(row: Any) -> Any:
    from random import random

    return random()


def counts(row: Any) -> Any:
    global count
    count += 1
    return row


def counter() -> Callable[[Any], int]:
    number = 0

    def run(row: Any) -> int:
        nonlocal number
        number += 1
        return number

    return run


async def later(row: Any) -> Any:
    return row


def with_default(row: Any, rng: Any = RNG) -> Any:
    return row


class Augment:
    def __call__(self, row: Any) -> Any:
        return row

    def method(self, row: Any) -> Any:
        return row


PLAIN: dict[str, Any] = {
    "builtin functions": length,
    "a function within, a generator, a default, another function": halves,
    "a function that calls itself": again,
    "a decorator": logged(length),
    "a partial": partial(again, depth=3),
    "a lambda": lambda row: row["text"].lower().split(" "),
    "a global table": lambda row: LABELS[row["label"]],
    "a regular expression": lambda row: WORDS.findall(re.sub("a", "b", row["text"])),
    "json": lambda row: json.loads(row["text"]).get("key"),
    "a builtin itself": len,
    "arguments": {"number": 3, "names": ["a", "b"]},
}
OTHER: dict[str, Any] = {
    "random": lambda row: random.random(),
    "torch": lambda row: torch.rand(2),
    "a method by which a tensor draws": lambda row: row["x"].uniform_(),
    "a generator": lambda row: RNG.random(),
    "a generator in a list": lambda row: OF_OBJECTS[0],
    "a generator in a closure": logged(partial(with_default, rng=RNG)),
    "a generator as a default": with_default,
    "a function that it calls": calls_what_draws,
    "a function in a decorator": logged(calls_what_draws),
    "a partial of it": partial(calls_what_draws),
    "an import": imports,
    "a global that it sets": counts,
    "a closure that it sets": counter(),
    "a name that is None yet": lambda row: LOADED_LATER(row),  # type: ignore[misc]
    "a name that is not there yet": lambda row: tokenizer(row),  # type: ignore[name-defined]  # noqa: F821
    "another module": lambda row: string.capwords(row["text"]),
    "any attribute by its name": lambda row: getattr(row, "x"),  # noqa: B009
    "code in a text": lambda row: eval(row["text"]),
    "coroutines": later,
    "an object that is called": Augment(),
    "a method": Augment().method,
    "a table of thousands": lambda row: TABLE[row["id"]],
    "arguments": {"rng": RNG},
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_names_plain_values_alone_draws_nothing(name: str) -> None:
    assert draws_nothing(PLAIN[name])


@pytest.mark.parametrize("name", OTHER)
def test_what_names_anything_else_may_draw(name: str) -> None:
    assert not draws_nothing(OTHER[name])


def test_a_name_that_stands_for_a_builtin_function_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "len", lambda one: random.random())

    assert not draws_nothing(length)


def test_no_method_that_is_let_pass_draws() -> None:
    from lightning_stateful.stream_nodes.plain_functions import _METHODS

    drawing = {"sample", "shuffle", "choice", "normal", "random", "bernoulli", "multinomial", "rand", "permutation"}
    assert not [name for name in _METHODS if name in drawing or name.endswith("_")]
