"""Random generators of an iterable dataset that no seed decides: those in its attributes, and in its iterator."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lightning_stateful.errors import some_of
from lightning_stateful.generators.attributes import attributes_of
from lightning_stateful.generators.rng import GENERATORS, state_of_generator
from lightning_stateful.samplers.fingerprint import hex_digest

OTHER_GENERATORS = (
    "holds a random generator that does not stand where it stood, because its own state_dict and load_state_dict leave "
    "it out: the resume is not exact in later passes, unless each of them seeds it. Have them see to it; "
    'accept=("nondeterministic",) is silent.'
)
OTHER_LOCALS = (
    "has other values than before the stop in local variables of its iterator ({}), random generators or sets, because "
    "its own state_dict and load_state_dict leave them out: if later samples depend on them, the resume is not exact. "
    'Have them see to it; accept=("nondeterministic",) is silent.'
)
# Generator functions that read from one another by ``yield from``.
_MOST_NESTED = 8


class KeptGenerators:
    """The random generators that datasets hold in attributes, and an iterator in local variables.

    Looked into are iterators of generator functions, and those that these read from by ``yield from``. A ``state_dict``
    that leaves such a generator out leads to the right samples at first, where it draws the order of a later block. So
    does one that leaves out a set by which samples that have come are told from others: looked at is how long it is.

    Args:
        datasets: A dataset, and the datasets in it.
        iterator: The iterator of it, if it is to be looked into.
    """

    def __init__(self, datasets: list[Any], iterator: Any = None) -> None:
        self._datasets, self._iterator = datasets, iterator

    def digest(self) -> str:
        """Digest of the states of those in attributes, the same in every process; empty if there are none."""
        texts = _texts_of(value for dataset in self._datasets for value in attributes_of(dataset).values())
        return hex_digest("".join(texts).encode()) if texts else ""

    def noted(self) -> dict[str, Any]:
        """What a state holds of them."""
        found: dict[str, Any] = {"generators": digest} if (digest := self.digest()) else {}
        return found if self._iterator is None else {**found, "locals": self._digests_of_locals()}

    def stand_elsewhere(self, noted: str) -> bool:
        """Whether those in attributes stand elsewhere than where a digest was noted."""
        return "" not in (noted, found := self.digest()) and found != noted

    def said(self, noted: Mapping[str, Any]) -> str:
        """What is to be said where they are others than noted; empty if they are not.

        Args:
            noted: What :meth:`noted` gave at the same place of the pass, and more.
        """
        if self.stand_elsewhere(noted.get("generators", "")):
            return OTHER_GENERATORS
        before, found = noted.get("locals", {}), self._digests_of_locals()
        others = [name for name, value in before.items() if found.get(name, value) != value]
        return OTHER_LOCALS.format(some_of(others)) if others else ""

    def _digests_of_locals(self) -> dict[str, str]:
        found: dict[str, str] = {}
        iterator = self._iterator
        for _ in range(_MOST_NESTED):
            if not inspect.isgenerator(iterator):
                break
            for name, value in inspect.getgeneratorlocals(iterator).items():
                texts = [str(len(value))] if type(value) is set else _texts_of([value])
                found |= {f"{iterator.__name__}.{name}": hex_digest(text.encode()) for text in texts}
            iterator = iterator.gi_yieldfrom
        return found


def _texts_of(values: Iterable[Any]) -> list[str]:
    """The states of those among some values that are random generators; one by the operating system has none."""
    found: list[str] = []
    for value in values:
        if isinstance(value, GENERATORS):
            with suppress(Exception):
                found.append(state_of_generator(value))
    return found
