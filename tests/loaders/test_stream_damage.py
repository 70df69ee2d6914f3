"""Whatever is wrong in a stream's state is refused, or does no more harm than a wrong position does."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from support.stream_cases import InThisProcess, Remembers, budgeted, chunks, mixed, saved, steps, stream_loader

from lightning_stateful.errors import ConfigurationError, StateError, StreamError

pytestmark = pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")

WRONG = (None, True, -1, 10**30, "x", [-1, 0, 0], {})


def is_odd(number: int) -> bool:
    return number % 2 == 1


def total_of(state: int, number: int) -> tuple[int, int]:
    return state + number, state + number


def of_tokens(**how: Any) -> Any:
    dataset = chunks()
    return stream_loader(dataset, config=budgeted(dataset), **how)


CASES: dict[str, Any] = {
    "shuffled": lambda **how: stream_loader(chunks(), **how),
    "skipping": lambda **how: stream_loader(chunks(on_error="skip").map(float).filter(is_odd), **how),
    "windows of a running state": lambda **how: stream_loader(chunks().recurrent(total_of, 0).windowed(3, 2), **how),
    "tokens": of_tokens,
    "cycle": lambda **how: stream_loader(mixed(stop="cycle"), drop_last=True, **how),
    "mixed by sample": lambda **how: stream_loader(mixed(by="sample", weights=[2, 1]), **how),
    "a state of its own": lambda **how: stream_loader(Remembers(), **how),
}


def damaged(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every way to put something else in the place of a part, or to leave it out, at any depth."""
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        changed = copy.copy(value)
        del changed[key]
        yield f"without {(*path, key)}", changed
        others = [wrong for wrong in WRONG if type(wrong) is not type(part) or wrong != part]
        inner = [(f"{(*path, key)} is {wrong!r}", wrong) for wrong in others]
        for what, other in (*inner, *damaged(part, (*path, key))):
            changed = copy.copy(value)
            changed[key] = other
            yield what, changed


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_wrong_is_refused_or_ends_in_an_error_of_ours(name: str) -> None:
    loader = CASES[name](num_workers=2, kind=InThisProcess)
    for _ in islice(steps(loader), 5):
        pass
    state, broken, refused = saved(loader), [], 0
    for what, position in damaged(state["progress"]):
        wrong = json.loads(json.dumps({**state, "progress": position}))
        try:
            for workers in (2, 1):
                _go_on(CASES[name](num_workers=workers, kind=InThisProcess), wrong)
        except StateError:
            refused += 1
        except Exception as error:
            broken.append(f"{what}: {type(error).__name__}: {error}")
    assert broken == []
    assert refused > 100


def _go_on(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)
    with contextlib.suppress(StreamError, ConfigurationError):
        loader.state_dict(), loader.position_report()
        for _ in islice(steps(loader), 6):
            pass
        loader.state_dict()
