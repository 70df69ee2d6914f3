"""Code of a length is known to change nothing only where all that it does can be seen."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.samplers import Bag
from torch.utils.data import Sampler

from lightning_stateful.sampler_copies.sampler_facts import len_only_reads

COUNT = 3


def holding(length: Callable[[Any], int], **held: Any) -> Any:
    """A sampler with such a ``__len__`` and attributes."""
    return type("Held", (Bag,), {"__len__": length})(**held)


def counted_up(self: Any) -> int:
    self.count += 1
    return self.count  # type: ignore[no-any-return]


def shuffled(self: Any) -> int:
    random.shuffle(self.rows)
    return len(self.rows)


def put_in_place(self: Any) -> int:
    rows = self.rows
    rows += [1]
    return len(rows)


def item_set(self: Any) -> int:
    self.rows[0] = 1
    return len(self.rows)


SEEN: dict[str, Any] = {
    "a number": (lambda self: self.count, {"count": 3}),
    "of a list": (lambda self: len(self.rows) // self.size, {"rows": [1, 2], "size": 2}),
    "either": (lambda self: len(self.rows) if self.is_cut else self.count, {"rows": [], "is_cut": False, "count": 4}),
    "rounded up": (lambda self: math.ceil(len(self.rows) / 4), {"rows": np.arange(9)}),
    "of all lists": (lambda self: sum(map(len, self.rows.values())), {"rows": {1: [2], 3: [4, 5]}}),
    "the least": (lambda self: min(len(self.rows), self.most), {"rows": (1, 2), "most": 7}),
}
UNSEEN: dict[str, Any] = {
    "counts": (counted_up, {"count": 3}),
    "shuffles": (shuffled, {"rows": [1]}),
    "adds in place": (put_in_place, {"rows": [1]}),
    "sets an item": (item_set, {"rows": [1]}),
    "takes one out": (lambda self: self.rows.pop(), {"rows": [1]}),
    "a method": (lambda self: self.plan(), {}),
    "a function that it holds": (lambda self: self.plan(), {"plan": lambda: 3}),
    "an object of a class": (lambda self: len(self.rows), {"rows": Bag()}),
    "objects of a class": (lambda self: sum(map(len, self.rows)), {"rows": [Bag()]}),
    "an array of objects": (lambda self: len(self.rows), {"rows": np.array([Bag()], dtype=object)}),
    "makes entries": (lambda self: len(self.rows[1]), {"rows": defaultdict(list)}),
    "of an attribute's attribute": (lambda self: self.of.count, {"of": SimpleNamespace(count=3), "count": 3}),
    "a variable of the module": (lambda self: COUNT, {}),
    "a comprehension": (lambda self: sum(len(row) for row in self.rows), {"rows": [[1]]}),
}


@pytest.mark.parametrize(("length", "held"), SEEN.values(), ids=SEEN)
def test_a_length_that_is_counted_of_plain_attributes_is_seen(length: Any, held: dict[str, Any]) -> None:
    assert len_only_reads(holding(length, **held))


@pytest.mark.parametrize(("length", "held"), UNSEEN.values(), ids=UNSEEN)
def test_a_length_that_may_change_something_is_not_seen(length: Any, held: dict[str, Any]) -> None:
    assert not len_only_reads(holding(length, **held))


def test_an_attribute_that_is_a_property_is_not_seen() -> None:
    sampler = holding(lambda self: self.count)
    type(sampler).count = property(lambda self: 3)
    vars(sampler)["count"] = 3

    assert not len_only_reads(sampler)


def test_a_name_that_a_module_has_made_its_own_is_not_seen() -> None:
    names: dict[str, Any] = {"len": counted_up}
    exec("def length(self):\n    return len(self.rows)", names)

    assert not len_only_reads(holding(names["length"], rows=[1]))


def test_a_sampler_without_a_length_is_not_seen() -> None:
    assert not len_only_reads(Sampler())


def test_a_pass_that_is_left_as_the_process_ends_says_nothing() -> None:
    code = (
        "import lightning_stateful, torch\n"
        "from torch.utils.data import BatchSampler, DataLoader, RandomSampler\n"
        "class Own(BatchSampler): pass\n"
        "samples = list(range(20))\n"
        "loader = DataLoader(samples, batch_sampler=Own(RandomSampler(samples), 2, False))\n"
        "iterator = iter(lightning_stateful.patch_dataloader(loader))\n"
        "next(iterator)\n"
        "print('begun')\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)

    assert (done.stdout, done.stderr) == ("begun\n", "")
