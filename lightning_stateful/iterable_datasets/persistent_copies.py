"""Notices what something else than its passes sets on a dataset of which persistent workers have copies from before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import PLAIN, can_be_read, text_of_plain
from lightning_stateful.iterable_datasets.dataset_parts import attributes_in
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents

_MOST_NAMED, _MOST_CHARACTERS = 8, 40
# The text of a value that nobody compares with that of another process.
_UNKNOWN = "another"
_DIGEST = "#"


class PersistentCopies:
    """The attributes of a dataset in this process, from which the copies in persistent workers are made.

    Datasets with ``set_epoch`` are left out, as workers are told the epoch; so is what lies in shared memory, where
    workers read what is set here.

    Args:
        dataset: The dataset.

    State:
        By attribute: the value that copies have, of what has changed since this was made, or since workers were
        started.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._built = self._started = self._values()
        self._named: set[str] = set()
        self._expected: Mapping[str, str] | None = None
        self._is_said = False

    def expect(self, saved: Mapping[str, str]) -> None:
        """Compare with a checkpoint's state when workers are started."""
        self._expected = dict(saved)

    def note_begin(self, *, is_started: bool) -> None:
        """A pass is about to begin.

        Args:
            is_started: Whether its workers live on from an earlier one.

        Warns:
            StatefulWarning: Something was set since workers were started, here (once) or in the run that wrote the
                checkpoint, so that copies have other values.
        """
        now = self._values()
        if is_started:
            self._named |= changed_names(self._started, now)
            if self._named and not self._is_said:
                self._is_said = True
                self._warn(
                    "were set after the persistent workers of its loader had been started",
                    self._started,
                    now,
                    "The workers go on with their copies from before, as with torch alone, and those of a resume start "
                    "with the values of then. If samples depend on them,",
                )
            return
        if self._expected is not None:
            # What a checkpoint does not have was as built when workers were started.
            copies = {**self._built, **self._expected}
            copies |= {name: now.get(name, "") for name, text in self._expected.items() if text == _DIGEST}
            self._named |= self._expected.keys()
            self._warn(
                "were others when the persistent workers were started in the run that wrote the checkpoint",
                copies,
                now,
                "It read with copies from then, and workers start with others here. If samples depend on them, the "
                "resume is not exact:",
            )
        self._expected, self._started = None, now

    def state(self) -> dict[str, str]:
        """See above."""
        if self._expected is not None:
            return dict(self._expected)
        found: dict[str, str] = {}
        for name in sorted(self._named | changed_names(self._built, self._started)):
            text = self._started.get(name, "")
            # Of a digest another process can say nothing.
            if not text.startswith(_DIGEST):
                found[name] = text
            elif text != self._built.get(name):
                found[name] = _DIGEST
        return found

    def _warn(self, what: str, before: Mapping[str, str], now: Mapping[str, str], then: str) -> None:
        changed = sorted(changed_names(before, now))[:_MOST_NAMED]
        if changed:
            values = "; ".join(
                f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}" for name in changed
            )
            warnings.warn(
                f"Attributes of the dataset, a {type(self._dataset).__qualname__}, {what}: {values}. {then} pass "
                "persistent_workers=False, or let the dataset derive them from the epoch, by set_epoch.",
                StatefulWarning,
                stacklevel=5,
            )

    def _values(self) -> dict[str, str]:
        """Texts of all attributes: plain values as they are, others as digests."""
        found: dict[str, str] = {}
        for name, value in attributes_in(self._dataset):
            if is_in_shared_memory(value):
                continue
            text = text_of_plain(value)[:_MOST_CHARACTERS] if type(value) in PLAIN else ""
            if not text:
                shared = next(filter(is_in_shared_memory, SamplerParts(value).found), None)
                text = f"{_DIGEST}{digest_of_contents({name.rpartition('.')[2]: value}, shared)}"
            found[name] = f"{found[name]} {text}" if name in found else text
        return found


def is_in_shared_memory(value: Any) -> bool:
    """Whether a value lies in memory that workers share with this process: a tensor, or one of multiprocessing's."""
    if isinstance(value, torch.Tensor):
        return can_be_read(value) and bool(value.is_shared())  # type: ignore[no-untyped-call]  # torch's
    module = type(value).__module__
    # Of those without a lock some are of ctypes, and say by this that multiprocessing has made them.
    return module == "multiprocessing.sharedctypes" or (module == "ctypes" and hasattr(value, "_wrapper"))


def _shown(text: str | None) -> str:
    return "missing" if text is None else _UNKNOWN if text.startswith(_DIGEST) else text
