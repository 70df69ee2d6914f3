"""Notices attributes of an iterable dataset that something else than its own iteration sets within a pass."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_stateful.contents.code_uses import uses_any_of, uses_of
from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.iterable_datasets.dataset_parts import HeldValues, digests_of
from lightning_stateful.iterable_datasets.set_by_hooks import LOOKS_AT, has_own_state

_log = logging.getLogger("lightning.pytorch.lightning_stateful")
_READ_AGAIN = (
    "A resume within the epoch reads what came before again without that, so samples may come twice, or never. Give "
    "the dataset state_dict and load_state_dict."
)


class SetWithinPass:
    """Compares what a dataset holds behind each batch with what it holds before the next is read.

    What differs was set by something else, such as a hook; see :class:`HeldValues`. Changes within long lists and large
    arrays are seen behind the first two batches alone, before which a resume knows no state of the dataset's own.

    Args:
        dataset: The dataset, which is read in this process.
        built: What :func:`digests_as_built` has given.

    State:
        ``within``: digests by ``class.attribute`` of what was set so, as it is now; ``ahead``: which of them were set
        after the next batch had been read. ``used``: names of what was set so and the pass has changed since, as a list
        that a hook fills and the pass empties, which a pass that is read again from its beginning lacks.
    """

    def __init__(self, dataset: Any, built: Mapping[str, str]) -> None:
        self._dataset, self._built = dataset, built
        # What it held behind the latest batch of a pass; None between passes.
        self._left: HeldValues | None = None
        self._num_read = 0
        # By name, the epoch and the number of batches of it that had been read.
        self._set: dict[str, tuple[int, int]] = {}
        self._at = -1, 0
        self._used = set[str]()
        self._expected: dict[str, Any] = {}
        # What the dataset held when training began, and before the pass began, of what is expected.
        self._restored: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def expect(self, details: Mapping[str, Any], *, is_within: bool) -> None:
        """Compare with a checkpoint's state when the first batch has been read.

        Args:
            details: What has the state, as ``set_within``.
            is_within: Whether it is of a pass that goes on.
        """
        saved = _expected_in(details, is_within=is_within)
        self._expected = {**saved, "is_within": is_within} if saved else {}
        self._used = set(saved.get("used", ()) if is_within else ())
        if self._used:
            _warn(
                f"{', '.join(sorted(self._used))} was set within the epoch in the run that wrote the checkpoint, by "
                f"something else than the dataset's own iteration, which has changed it since. {_READ_AGAIN}"
            )
        self._set, self._restored = dict.fromkeys(saved.get("within", ()), (-1, 0)), {}

    def note_restored(self, saved: Mapping[str, str]) -> list[str]:
        """Hooks that restore what a checkpoint has were called; those of an epoch may set something else.

        Args:
            saved: Digests of what was set in the run that wrote it.

        Returns:
            What they have set behind the first batch of the resume, and was not so in that run.
        """
        self._restored = digests_of(self._dataset, self._expected.get("within", ()))
        changed = self.changed() if self._num_read == 1 else set[str]()
        now = digests_of(self._dataset, changed)
        return sorted(name for name in changed if name not in saved or now.get(name) != saved[name])

    def note_begin(self) -> None:
        """A pass is about to begin, or to go on at a state."""
        if self._at[0] >= 0:
            self._used = set()
        self._left, self._num_read = None, 0
        self._before = digests_of(self._dataset, self._expected.get("within", ()))

    def note_read(self, epoch: int, num_read: int) -> None:
        """A batch was read.

        Args:
            epoch: The epoch.
            num_read: Batches of the epoch that were read.

        Warns:
            StatefulWarning: It is the first one of a resume, and something is not as in the run that wrote the
                checkpoint, or was not when that batch was read there.
        """
        if self._set:
            # What its own iteration changes too is no setting of somebody else's.
            changed = self.changed()
            self._note_used(self._set.keys() & changed)
            self._set = {name: at for name, at in self._set.items() if name not in changed}
        if self._expected:
            self._compare()
        self._num_read += 1
        self._at = epoch, num_read
        self._note_held()

    def _note_used(self, names: Collection[str]) -> None:
        """The pass has changed what something else had set within it."""
        new = {name for name in names if not has_own_state(self._dataset) and uses_any_of(self._dataset, [name])}
        if new := new - self._used:
            self._used |= new
            _warn(
                f"{', '.join(sorted(new))} was set within an epoch by something else than the dataset's own iteration, "
                f"which has changed it since. {_READ_AGAIN}"
            )

    def _note_held(self) -> None:
        self._left = HeldValues(self._dataset) if self._left is None else self._left
        # Before the first batches a resume knows no state of the dataset's own.
        self._left.note(in_long=self._num_read <= LOOKS_AT and has_own_state(self._dataset))

    def note_end(self) -> None:
        """A pass has ended: what is set from here on is set between two passes."""
        self._left = None

    def note_outside(self) -> None:
        """The next batch is about to be read, or a state is taken: whatever has changed was set by something else."""
        if self._left is None or self._left.is_same():
            return
        self._set |= dict.fromkeys(self.changed(), self._at)
        self._note_held()

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """See above.

        Args:
            epoch: The epoch.
            step: Batches of it that were trained on.
        """
        if self._expected:
            return {name: held for name, held in self._expected.items() if name != "is_within"}
        self.note_outside()
        used = {"used": sorted(self._used)} if self._used else {}
        if not self._set and not used:
            return {}
        within = digests_of(self._dataset, self._set)
        is_ahead = {name: of == epoch and num_read > step for name, (of, num_read) in self._set.items()}
        return {"within": within, "ahead": sorted(name for name in within if is_ahead[name]), **used}

    def changed(self, *, with_told: bool = True) -> set[str]:
        """The attributes that are not as they were behind the latest batch of a pass; none if that has ended.

        Args:
            with_told: Whether what ``set_epoch`` sets is among them.
        """
        return set() if self._left is None else self._left.changed(with_told=with_told)

    def _compare(self) -> None:
        """Warn of what is another than in the run that wrote the checkpoint."""
        expected, self._expected = self._expected, {}
        within: Mapping[str, str] = expected["within"]
        now = digests_of(self._dataset, within)
        lost = sorted(name for name, held in within.items() if now.get(name, "") != held)
        if not expected["is_within"]:
            # A hook sets something else for the next epoch; the state of the dataset's own may have an earlier value.
            unset = {name for name in lost if now.get(name, "") == self._restored.get(name)}
            known = {name for name in lost if self._built.get(name) in (now.get(name), self._before.get(name))}
            lost = sorted(unset | known)
        ahead = sorted({*expected["ahead"]} - {*lost})
        kept = sorted(within.keys() - {*lost, *ahead})
        if kept and expected["is_within"] and not has_own_state(self._dataset):
            _log.info(
                f"{', '.join(kept)} was set within the epoch that goes on, and is the same here. What came before was "
                "read again with that: if it decides which samples come, the resume is not exact. Set it between two "
                "epochs, or give the dataset state_dict and load_state_dict."
            )
        first = "The first batch is read with what is set here, but was read there before that was set"
        if lost:
            also = f" {first}: it stays inexact." if {*lost} & {*expected["ahead"]} else ""
            _warn(
                f"{', '.join(lost)} was set within the epoch in the run that wrote the checkpoint, by something else "
                "than the dataset's own iteration, and is another here: the resume is not exact. Set the same again "
                f"before the first batch, as in load_state_dict of a callback.{also}"
            )
        if ahead:
            _warn(
                f"{', '.join(ahead)} was set within the epoch in the run that wrote the checkpoint, and is the same "
                f"here. {first}, as a loader without a length is read one batch ahead: the resume is not exact in that "
                "batch. Set it between two epochs."
            )


# Samples on which functions of a stream of shards are run ahead.
_AHEAD = 32
# So many times as long as a look takes, none is taken.
_REST = 32


class SetWithinShards:
    """Notices what functions of a stream of shards read, and something else sets within a pass in this process.

    It is looked at behind the first batches, and then every now and then, so that this takes little of the time. What
    reading these changes, or code of the functions counts up, is no setting of somebody else's.

    Args:
        dataset: The dataset.
        values: Digests of what to compare, by name, the same in every process.
        built: What these were as it was built.
        batch_size: Samples in a batch; None if that is not known.

    State:
        ``within``: digests of what was set so, as it is now; ``ahead``: which of them were set so late that samples of
        later batches had been made without that.
    """

    def __init__(
        self,
        dataset: Any,
        values: Callable[[], dict[str, str]],
        built: Mapping[str, str],
        batch_size: int | None,
    ) -> None:
        self._dataset, self._values, self._built, self._batch_size = dataset, values, built, batch_size or 1
        # What it held at the latest look; None between passes.
        self._left: dict[str, str] | None = None
        self._num_read, self._at, self._due = 0, (-1, 0), 0.0
        # By name, the epoch and the number of batches of it that had been read; and what functions change themselves.
        self._set: dict[str, tuple[int, int]] = {}
        self._own = set[str]()
        self._expected: dict[str, Any] = {}

    def expect(self, details: Mapping[str, Any], *, is_within: bool) -> None:
        """Compare with a checkpoint's state when the first pass begins.

        Args:
            details: What has the state, as ``set_within``.
            is_within: Whether it is of a pass that goes on.
        """
        saved = _expected_in(details, is_within=is_within)
        self._expected = {**saved, "is_within": is_within} if saved else {}
        self._set = dict.fromkeys(saved.get("within", ()), (-1, 0))

    def note_begin(self) -> None:
        """A pass is about to begin, or to go on.

        Warns:
            StatefulWarning: It is the first one of a resume, and something is not as in the run that wrote the
                checkpoint, or samples were made there without it.
        """
        self._left, self._num_read, self._own = self._values(), 0, set()
        if self._expected:
            self._compare(self._left)

    def note_read(self, epoch: int, num_read: int) -> None:
        """A batch was read.

        Args:
            epoch: The epoch.
            num_read: Batches of the epoch that were read.
        """
        self._num_read += 1
        self._at = epoch, num_read
        if self._left is not None and self._num_read <= LOOKS_AT:
            self._own |= self._look()

    def note_outside(self) -> None:
        """The next batch is about to be read: what has changed since the latest was set by something else."""
        if self._left is not None and (self._num_read <= LOOKS_AT or time.perf_counter() > self._due):
            self._note_set()

    def note_end(self) -> None:
        """A pass has ended: what is set from here on is set between two passes."""
        if self._left is not None:
            self._note_set()
        self._left = None

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """See above; empty if nothing was set.

        Args:
            epoch: The epoch.
            step: Batches of it that were trained on.
        """
        if self._expected:
            return {name: held for name, held in self._expected.items() if name != "is_within"}
        if self._left is not None:
            self._note_set()
        now = self._values() if self._set else {}
        within = {name: now.get(name, "") for name in sorted(self._set)}
        ahead = [name for name in within if self._is_ahead(epoch, step, *self._set[name])]
        return {"within": within, "ahead": ahead} if within else {}

    def _is_ahead(self, epoch: int, step: int, of_epoch: int, num_read: int) -> bool:
        return epoch == of_epoch and (step - num_read) * self._batch_size < _AHEAD

    def _look(self) -> set[str]:
        """The names of what has changed since the latest look."""
        began, before = time.perf_counter(), self._left or {}
        self._left = now = self._values()
        ended = time.perf_counter()
        self._due = ended + _REST * (ended - began)
        # What functions reach by now, or no more, nobody has set.
        return changed_names(before, now) & before.keys() & now.keys()

    def _note_set(self) -> None:
        changed = self._look() - self._own
        counted = {name for name in changed if self._is_counted(name.rpartition(".")[2])}
        self._own |= counted
        self._set |= dict.fromkeys(changed - counted, self._at)

    def _is_counted(self, name: str) -> bool:
        use = uses_of(self._dataset, name, is_variable=True, may_be_called=True)
        return use.counts or use.grows or use.carries

    def _compare(self, now: Mapping[str, str]) -> None:
        """Warn of what is another than in the run that wrote the checkpoint, or is so too early."""
        expected, self._expected = self._expected, {}
        lost = {name for name, held in expected["within"].items() if now.get(name, "") != held}
        if not expected["is_within"]:
            # A hook sets something else for the next epoch.
            lost = {name for name in lost if now.get(name) == self._built.get(name)}
        if lost:
            _warn(
                f"{', '.join(sorted(lost))} was set within the epoch in the run that wrote the checkpoint, by "
                "something else than the functions that read it, and is another here: the resume is not exact. Set the "
                "same again before the first batch, as in load_state_dict of a callback."
            )
        if expected["is_within"] and (ahead := sorted({*expected["ahead"]} & expected["within"].keys() - lost)):
            _warn(
                f"{', '.join(ahead)} was set within the epoch in the run that wrote the checkpoint, and is the same "
                f"here. There functions had been run on up to {_AHEAD} samples before that was set, and here they are "
                "run on them with it: the resume may not be exact in the batches of these. Set it between two epochs."
            )


def _expected_in(details: Mapping[str, Any], *, is_within: bool) -> Mapping[str, Any]:
    """What a state has of a pass as ``set_within``; of one that is over, but for what is set between passes as well."""
    saved: Mapping[str, Any] = details.get("set_within", {})
    # Of that the value between them is compared.
    known = {} if is_within else details.get("set", {})
    if not known:
        return saved
    within = {name: held for name, held in saved.get("within", {}).items() if name not in known}
    return {"within": within, "ahead": [name for name in saved["ahead"] if name in within]} if within else {}


def _warn(message: str) -> None:
    warnings.warn(message, StatefulWarning, stacklevel=5)
