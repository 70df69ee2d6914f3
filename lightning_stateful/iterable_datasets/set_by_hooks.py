"""Notices attributes of an iterable dataset that something else than its passes sets between two of them."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from lightning_stateful.contents.code_uses import uses_any_of
from lightning_stateful.contents.held_state import SHARED, changed_names, shared_numbers
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import PLAIN, attributes_of, is_users
from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import state_of_generator
from lightning_stateful.iterable_datasets.dataset_parts import (
    ReadTogether,
    attributes_in,
    data_as_text,
    digests_of,
    parts_of,
    values_in,
)
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.stream_nodes.own_state import has_state

_log = logging.getLogger("lightning.pytorch.lightning_stateful")
# Lightning reads the first batch before it builds loaders of validation.
LOOKS_AT = 2
# By their ids: the iterable datasets of loaders of validation.
_EVALUATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class SetBetweenPasses:
    """Notices attributes of a dataset that something else than its passes sets between two of them, as a hook does.

    So it does variables of a module that code of the dataset names. What ``set_epoch`` sets is left out, and looked at
    elsewhere.

    Args:
        dataset: The dataset, as it is in this process, perhaps :class:`ReadTogether` with what collates.
        in_workers: Whether workers read copies of it, so that no pass changes it here.
        looks_at: Whether to look at a value; by default at all.
        values: Digests of what to compare in its place, by name, the same in every process: of a stream of shards,
            which is read by functions.

    State:
        ``set``: by ``class.attribute``, a digest of each attribute that was set so, the same in every process;
        ``first``: one of the first value that it was set to. Of a dataset without a state of its own, or in workers,
        what was set before the first pass, as in ``on_train_start``, is there too, if samples are read by it and no
        pass changes it. ``later``: digests of what was set within a pass whose workers had been started before, and so
        comes into force with the next one. ``drawn``: names of random generators outside of the dataset that were drawn
        from since the latest pass, as by a callback or a dataset of validation.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        in_workers: bool,
        looks_at: Callable[[Any], bool] = lambda value: True,
        values: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        self._dataset, self._in_workers, self._looks_at, self._values = dataset, in_workers, looks_at, values
        # What a checkpoint has, until the first pass begins, and whether it is of a pass that goes on.
        self._expected: dict[str, str] = {}
        self._is_within = self._is_resumed = False
        # What was set within that pass, which is looked at elsewhere.
        self._set_within: set[str] = set()
        # Of that, what is to be compared when the next pass begins, and what had been set for that.
        self._next: dict[str, str] = {}
        self._later: dict[str, str] = {}
        # Whether what is expected is of that pass.
        self._is_next = False
        # Of that, digests from when training began, and what no hook had restored; None while nobody has looked.
        self._restored: dict[str, str] = {}
        self._as_built: set[str] | None = None
        # And the lists and sets, with how long they were.
        self._lists: dict[str, tuple[Any, int]] = {}
        self._first: dict[str, str] = {}
        self._built = self.held()
        # What it held when the latest pass had ended; None within a pass that may change it.
        self._left: dict[str, str] | None = None
        # What it held when the latest pass began, and of that what was set between passes.
        self._begun: dict[str, str] = {}
        self._begun_with: dict[str, str] = {}
        self._set: set[str] = set()
        # What was set before the first pass; None before that.
        self._set_at_start: set[str] | None = None
        # Where generators outside of it stood as the latest pass ended; and what a checkpoint has of these.
        self._outside: OutsideValues | None = None
        self._ended: dict[str, str] = {}
        self._drawn: list[str] = []
        # Where the generators stood then that it holds, by their ids.
        self._stood: dict[int, str] = {}
        self._num_read = 0

    def expect(self, saved: Mapping[str, Any], *, is_within: bool) -> None:
        """Compare with a checkpoint's state when the first pass begins.

        Args:
            saved: The state, among other details.
            is_within: Whether it is of a pass that goes on, and not of one that is over.
        """
        self._expected, self._first = dict(saved.get("set", {})), dict(saved.get("first", {}))
        self._later, self._is_within, self._as_built = dict(saved.get("later", {})), is_within, None
        self._set_within = {*saved.get("set_within", {}).get("within", ())}
        if is_within and self._values is not None:
            # It is compared with what it was set to last.
            self._expected = {name: held for name, held in self._expected.items() if name not in self._set_within}
        self._is_next = False
        self._drawn = [] if is_within else list(saved.get("drawn", ()))
        self._restored, self._is_resumed = {}, True

    def note_restored(self) -> None:
        """Hooks that restore what a checkpoint has were called; those of an epoch may set something else."""
        if self._expected:
            self._restored = self._digests(self._expected)
            self._as_built = {name for name, held in self._expected.items() if self._restored[name] != held}
            of_dataset = values_in(self._dataset) if self._values is None else ()
            lists = (item for item in of_dataset if isinstance(item[1], (list, set, deque)))
            self._lists = {name: (value, len(value)) for name, value in lists if name in self._as_built}

    @property
    def is_awaiting(self) -> bool:
        """Whether the first pass is to be compared with a checkpoint."""
        return bool(self._expected)

    def note_own_state(self, loaded: Any) -> None:
        """A copy of the dataset has loaded the state that its pass goes on from: what that restores need not be set.

        What it restores in workers that end with the pass has to be set for the next one.
        """
        present = digests_of(loaded, self._expected)
        restored = {name: held for name, held in self._expected.items() if present.get(name) == held}
        self._set |= restored.keys()
        self._expected = {name: held for name, held in self._expected.items() if name not in restored}
        self._next = restored if self._in_workers else {}

    def note_begin(self) -> None:
        """A pass is about to begin."""
        self._begun = now = self._compare()
        self._ended = {}
        if drawn := self._drawn:
            self._drawn = []
            _warn(
                f"{', '.join(drawn)} is a random generator that the dataset's code draws from, and something else drew "
                "from it between two epochs in the run that wrote the checkpoint, as a callback or a dataset of "
                "validation: the resume is not exact. Give each a generator of its own."
            )
        present = self._digests(self._expected)
        lost = sorted(name for name, held in self._expected.items() if present.get(name, "") != held)
        if not self._is_within:
            # A hook sets something else for the next epoch; one that goes by it hardly what it was in an earlier one.
            first, as_built = self._first, self._as_built or set()
            unset = {name for name in lost if present.get(name) == self._restored.get(name)}
            # What a hook has added to it since, it has added to what nobody had restored.
            held = dict(values_in(self._dataset)) if self._lists else {}
            grown = {name for name, (of, size) in self._lists.items() if len(of) > size}
            unset |= {name for name in grown if held.get(name) is self._lists[name][0]}
            counted = {name for name in as_built - unset if now.get(name) != self._built.get(name)}
            lost = [name for name in lost if name in unset or now.get(name) == self._built.get(name)]
            lost += sorted(name for name in counted if first.get(name) == present[name])
            if others := sorted(counted - {*lost}):
                _log.info(
                    f"{', '.join(others)} was as built when this run began, and was not in the run that wrote the "
                    "checkpoint; a hook has set it since. That is exact if hooks set it by the epoch alone."
                )
        if shared := [name for name in lost if name.endswith(SHARED)]:
            _log.info(
                f"{', '.join(shared)} was set in the run that wrote the checkpoint, by a hook or in workers, and is "
                "another here. If the order or samples depend on it, the resume is not exact: set it again before the "
                "first batch, in on_train_epoch_start at the latest."
            )
        if lost := [name for name in lost if name not in shared]:
            _warn(
                f"{', '.join(lost)} was set between two epochs in the run that wrote the checkpoint, by something else "
                "than the dataset's own iteration, and is another here: the resume is not exact. Set the same again "
                "before the first batch, as in load_state_dict of a callback."
            )
        if self._set_at_start is None:
            self._set_at_start = {name for name in changed_names(self._built, now) if self._is_read_by(name)}
            if self._is_resumed and (more := sorted(self._set_at_start - self._expected.keys() - self._set_within)):
                _log.info(
                    f"{', '.join(more)} was set before the first batch of this run, and was as built in the run that "
                    "wrote the checkpoint. If no hook sets it in each epoch, samples are others than there."
                )
        # Of what was set before the first pass alone there is no first value.
        self._set |= {name for name in self._expected if self._first.get(name)}
        self._set_at_start |= self._expected.keys() - self._set
        self._warn_of_early()
        self._expected, self._next, self._as_built = {**self._next, **self._later}, {}, None
        self._later, self._is_next = {}, True
        self._is_within = False
        self.note_restored()
        self._left = now if self._in_workers else None
        self._begun_with = self._digests(self._set | self._set_at_start)
        if self._num_read < LOOKS_AT and not self._in_workers and self._values is None:
            found = {id(one): one for _, one in _generators_in(self._dataset)}
            self._stood = {key: state_of_generator(one) for key, one in found.items()}

    def _warn_of_early(self) -> None:
        """Warn of what is set already, and came into force with the next epoch in the run that wrote a checkpoint."""
        present = self._digests(self._later)
        if early := sorted(name for name, held in self._later.items() if present[name] == held):
            _warn(
                f"{', '.join(early)} was set within the epoch in the run that wrote the checkpoint, when its workers "
                "had been started, and came into force with the next one. Here workers start with it: the rest of "
                "this epoch is not exact. Set it behind the first batch, in on_train_batch_start."
            )

    def note_read(self) -> None:
        """A batch was read: at the second one loaders of validation have been built.

        Warns:
            StatefulWarning: The pass has changed something that a dataset of validation holds too, or has drawn from a
                random generator in it; once.
        """
        self._num_read += 1
        if self._in_workers or self._num_read != LOOKS_AT:
            return
        now = self.held()
        others = [value for dataset in list(_EVALUATED.values()) for _, value in attributes_in(dataset)]
        ids = {id(value) for value in others if type(value) not in PLAIN and not isinstance(value, Enum)}
        changed = changed_names(self._begun, now)
        shared = {name for name, value in attributes_in(self._dataset) if id(value) in ids} & changed
        evaluated = {id(part) for dataset in list(_EVALUATED.values()) for part in parts_of(dataset)}
        kinds = tuple(f"{type(part).__qualname__}." for part in parts_of(self._dataset) if id(part) in evaluated)
        shared |= {name for name in changed if name.startswith(kinds)}
        drawn = {id(one) for dataset in list(_EVALUATED.values()) for _, one in _generators_in(dataset)}
        shared |= {
            name
            for name, one in _generators_in(self._dataset)
            if id(one) in drawn and self._stood.get(id(one)) != state_of_generator(one)
        }
        if names := sorted(shared):
            _warn(
                f"The datasets of training and of validation share one object, {', '.join(names)}, which a pass "
                "changes: what the one gets depends on the passes of the other, of which a checkpoint knows nothing. "
                "So a resume may not be exact, or be refused. Give each dataset a copy of its own."
            )

    def note_end(self) -> set[str]:
        """A pass has ended; the names of what was changed since it began, by the pass or in it."""
        if self._in_workers:
            return set()
        self._left = self.held()
        if self._values is None:
            self._outside = OutsideValues(self._dataset)
            self._ended = self._generators_outside()
        changed = changed_names(self._begun, self._left)
        self._set_at_start = (self._set_at_start or set()) - changed
        return changed

    def _generators_outside(self) -> dict[str, str]:
        """Digests of the states of random generators outside of the dataset, by name."""
        if self._outside is None:
            return {}
        others = self._outside.digests(of_generators=False)
        return {name: held for name, held in self._outside.digests().items() if name not in others}

    def as_begun(self) -> tuple[dict[str, str], dict[str, str]]:
        """Digests of what it held as it was built, and as the latest pass began."""
        return self._built, self._begun

    def _is_read_by(self, name: str) -> bool:
        """Whether code uses an attribute to read samples, which no state of the dataset's own restores here."""
        if self._values is not None:
            return True
        is_kept = has_own_state(self._dataset) and not self._in_workers
        return not is_kept and uses_any_of(self._dataset, [name])

    def state(self, *, within: bool = False) -> dict[str, Any]:
        """See above; empty if nothing was set.

        Args:
            within: What attributes were when the latest pass began; else what they are now.
        """
        found, later = {} if within and self._is_next else self._expected, self._later
        if not found and within:
            found, later = dict(self._begun_with), self._expected | self._set_for_later()
        elif not found:
            self._compare()
            found = self._digests(self._set | (self._set_at_start or set()))
        state = {"set": found, "first": {name: self._first.get(name, "") for name in found}} if found else {}
        drawn = [] if within or not self._ended else sorted(changed_names(self._ended, self._generators_outside()))
        return {**state, **({"later": later} if later else {}), **({"drawn": drawn} if drawn else {})}

    def _set_for_later(self) -> dict[str, str]:
        """Digests of what was set since workers that end with the pass were started."""
        return self._digests(self._changed_since_left(self.held())) if self._in_workers else {}

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        """Digests of attributes as they are now; empty ones of those that are missing."""
        if self._values is not None:
            present = self._values() if names else {}
            return {name: present.get(name, "") for name in sorted(names)}
        shared = {name: digest(value) for name, value in _shared_in(self._dataset) if name in names}
        return {**dict.fromkeys(sorted(names), ""), **digests_of(self._dataset, names), **shared}

    def _compare(self) -> dict[str, str]:
        """Digests of what the dataset holds now; warns of attributes that were set since the latest pass."""
        now = self.held()
        self.note_set(self._changed_since_left(now))
        return now

    def _changed_since_left(self, now: Mapping[str, str]) -> set[str]:
        """What is not as the latest pass has left it, or as it began in workers; nothing within a pass."""
        left = now if self._left is None else self._left
        changed = changed_names(left, now)
        # What functions reach by now, or no more, nobody has set.
        return changed if self._values is None else changed & left.keys() & now.keys()

    def note_set(self, names: Collection[str]) -> None:
        """Something else than its passes has set attributes since the latest pass, which was left before its end.

        Warns:
            StatefulWarning: Of each, once.
        """
        changed = {*names} - self._set
        if changed:
            self._set |= changed
            self._first = {**self._digests(changed), **self._first}
        # Workers may have set what lies in shared memory.
        if changed := {name for name in changed if not name.endswith(SHARED)}:
            _warn(
                f"{', '.join(sorted(changed))} was changed between two epochs by something else than the dataset's own "
                "iteration. A resume from here on is exact only if the same is set again before its first batch, as "
                "in load_state_dict of a callback."
            )

    def held(self) -> dict[str, str]:
        """Digests of all attributes, to be compared in this process."""
        if self._values is not None:
            return self._values()
        held: dict[str, str] = {}
        for name, value in filter(lambda item: self._looks_at(item[1]), values_in(self._dataset)):
            digests = digest_of_contents({name.rpartition(".")[2]: value}) + data_as_text(value)
            held[name] = held.get(name, "") + digests
        return {**held, **{name: repr(value) for name, value in _shared_in(self._dataset)}}


def has_own_state(dataset: Any) -> bool:
    """Whether a dataset, perhaps :class:`ReadTogether` with what collates, has a state of its own."""
    return has_state(dataset.dataset if isinstance(dataset, ReadTogether) else dataset)


def _shared_in(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Numbers that ``multiprocessing.Value`` and ``Array`` share, in attributes, and in those of objects there."""
    for name, value in attributes_in(dataset):
        inner = attributes_of(value) if is_users(type(value).__module__) else {}
        held = {name: value, **{f"{name}.{attribute}": one for attribute, one in inner.items()}}
        for path, one in held.items():
            if isinstance(one, SynchronizedBase):
                yield from ((f"{path}{SHARED}", shared) for shared in shared_numbers(one))


def note_validation(dataset: Any) -> None:
    """A loader of validation reads a dataset in this process."""
    with suppress(TypeError):
        _EVALUATED[id(dataset)] = dataset


def _generators_in(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Random generators in a dataset and its parts, but the process's, by the ``class.attribute`` that leads there."""
    for part in parts_of(dataset):
        for path, generator in SamplerParts(part).generators.items():
            if identity_of(generator) != 0:
                yield ".".join((type(part).__qualname__, *map(str, path[:1]))), generator


def _warn(message: str) -> None:
    warnings.warn(message, StatefulWarning, stacklevel=5)
