"""Compares the first batch of a pass over a stream with what is read in its place on a resume."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.contents.dataset_content import PATH, digest_of_batch, is_same_batch, show_batch
from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.contents.read_watch import moved_for_good
from lightning_stateful.data_checks.odd_datasets import find_trained, say_collectives
from lightning_stateful.errors import Difference, StatefulWarning, StateMismatchError
from lightning_stateful.loaders.combined_loaders import streams_in
from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import epoch_set_to
from lightning_stateful.loops.ranks import gathered
from lightning_stateful.state import is_accepted
from lightning_stateful.stream_loader.order import StreamOrder
from lightning_stateful.stream_loader.reader import StreamReader


class StreamContent:
    """Digests the first batch of passes over streams: the first pass and the latest.

    A resume goes on within shards and reads no earlier sample again, and functions are compared by their names: another
    tokenizer or vocabulary shows in what they give alone.

    Args:
        loaders: The loaders, by path.

    State:
        By the path of a loader, of each such pass: its number, the ranks and worker slots, digests of what its
        functions reached as it began and hooks or reading have changed at some time (``held``), and the digest of its
        first batch on the first rank.
    """

    def __init__(self, loaders: Mapping[str, AnyLoader]) -> None:
        self._orders = streams_in(loaders)
        self._notes: dict[str, list[dict[str, Any]]] = {}
        # By path, digests of what functions reached as each of these passes began, and names of what has changed.
        self._values: dict[str, list[Mapping[str, str]]] = {}
        self._changed: dict[str, set[str]] = {path: set() for path in self._orders}
        # What of a checkpoint is yet to be compared, and differences that were seen before hooks restored anything.
        self._expected: dict[str, list[dict[str, Any]]] = {}
        self._early: dict[str, Difference] = {}
        self._is_awaiting = False

    def note(self, path: str, batch: Any) -> None:
        """Digest the first batch of an epoch, which is about to be handed over, if it is the first one of a pass."""
        order = self._orders.get(path)
        begun = None if order is None else order.begun_pass
        if order is None or begun is None:
            return
        try:
            content = digest_of_batch(batch)
        except Exception as error:
            rank_zero_info(f"A batch could not be digested, and will not be compared on a resume: {error!r}")
            return
        built, values = order.values_as_begun
        self._changed[path] |= changed_names(built, values)
        note = {"pass": begun, **_slots_of(order), "held": {}, **content}
        note |= {"collectives": True} if order.calls_collectives else {}
        self._notes[path] = [*self._notes.get(path, ())[:1], note]
        # What is unchanged since a checkpoint was written is as built.
        self._values[path] = [*self._values.get(path, [built] * (len(self._notes[path]) - 1))[:1], values]

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """See above."""
        return {path: self._notes_of(path, self._orders[path]) for path in self._notes}

    def _notes_of(self, path: str, order: StreamReader) -> list[dict[str, Any]]:
        built, _ = order.values_as_begun
        changed = sorted(self._changed[path] | changed_names(built, order.values))
        values = self._values.get(path, [built] * 2)
        return [
            {**note, "held": {**{name: held.get(name, "") for name in changed}, **note["held"]}}
            for note, held in zip(self._notes[path], values, strict=False)
        ]

    def expect(self, trainer: pl.Trainer, saved: Mapping[str, list[dict[str, Any]]], accept: Collection[str]) -> None:
        """Take a checkpoint's state, and read its batches again; :meth:`compare` says what differs.

        Args:
            trainer: The trainer.
            saved: The state.
            accept: Names of differences to let pass.
        """
        self._notes = {path: [*notes] for path, notes in saved.items() if path in self._orders}
        self._expected = {
            path: notes
            for path, notes in self._notes.items()
            if not _is_accepted(path, self._orders[path], accept) and self._is_other(trainer, path, notes)
        }
        self._is_awaiting = bool(self._notes)

    def _is_other(self, trainer: pl.Trainer, path: str, notes: list[dict[str, Any]]) -> bool:
        """Whether a batch has another content before hooks restore anything, or cannot be read yet."""
        if not trainer.is_global_zero:
            return False
        of, name = self._noted(path, notes)
        if of and of.get("collectives"):
            say_collectives(name)
            return False
        read = of and _read(trainer, self._orders[path], of["pass"])
        if of is None or read is None:
            return True
        is_other = not is_same_batch(of, read)
        if is_other:
            self._early[path] = _difference(path, name, of, read)
        return is_other

    def _noted(self, path: str, notes: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
        """The latest pass as which a stream is about to begin, if there is one, and what its first batch is called."""
        order = self._orders[path]
        now = order.values
        # What has changed here alone may be another than it was then.
        changed = changed_names(order.values_as_begun[0], now)
        known = [note for note in notes if note.items() >= _slots_of(order).items() and note["held"].keys() >= changed]
        same = [note for note in known if all(now.get(name, "") == held for name, held in note["held"].items())]
        of = same[-1] if same else None
        return of, f"The first batch of pass {of['pass']} over {order.name}" if of else ""

    def compare(self, trainer: pl.Trainer) -> None:
        """Read batches of a checkpoint again, on the process that wrote it: the first; once, before others are read.

        Args:
            trainer: The trainer; all its processes hear of a difference.

        Raises:
            StateMismatchError: On all processes, if a batch has another content, twice the same.

        Warns:
            StatefulWarning: A batch has another content whenever it is read, or batches depend on training.
        """
        if not self._is_awaiting:
            return
        self._is_awaiting = False
        compared = [self._compared(trainer, path, notes) for path, notes in self._expected.items()]
        found = [other for other in compared if other is not None]
        if trainer.world_size > 1:
            found = gathered(found)[0]
        if found:
            raise StateMismatchError(found, where="The checkpoint's data state")

    def _compared(self, trainer: pl.Trainer, path: str, notes: list[dict[str, Any]]) -> Difference | None:
        """The difference of a stream that is refused; others are warned of."""
        order, loader = self._orders[path], self._orders[path].loader
        of, name = self._noted(path, notes)
        read = of and _read(trainer, order, of["pass"], name)
        if of is None or read is None:
            if path in self._early and not isinstance(order, StreamOrder):
                # Its own state has been loaded since.
                _warn_of_other_content(self._early[path])
            elif of is None:
                rank_zero_info(
                    f"No batch of {order.name} was compared with the checkpoint: ranks or workers are others, or what "
                    "its functions use was changed by hooks or by reading, and is not as when a pass began."
                )
            return None
        if is_same_batch(of, read):
            return None
        again = _read(trainer, order, of["pass"], name)
        kind = find_trained(trainer, order.dataset, loader.collate_fn)
        if again is None or not is_same_batch(read, again):
            _warn_of_unstable(name)
        elif kind:
            rank_zero_warn(
                f"{name} has another content than before the checkpoint, and the data hold a {kind}: batches depend "
                "on training, so that nobody can tell whether the data are those of the checkpoint.",
                category=StatefulWarning,
            )
        elif isinstance(order, StreamOrder):
            return _difference(path, name, of, read)
        else:
            _warn_of_other_content(_difference(path, name, of, read))
        return None


def names_of_content(path: str) -> tuple[str, str]:
    """The names by which other content of a loader is accepted."""
    return (f"{path}.{PATH}" if path else PATH), PATH


def _slots_of(order: StreamReader) -> dict[str, int]:
    return {"ranks": order.topology.num_replicas, "workers": order.num_workers}


def _is_accepted(path: str, order: StreamReader, accept: Collection[str]) -> bool:
    accepted = (*accept, *order.options.accept)
    return "nondeterministic" in accepted or is_accepted(names_of_content(path), accepted)


def _read(trainer: pl.Trainer, order: StreamReader, epoch: int, name: str = "") -> dict[str, Any] | None:
    """Describe what is read in the place of the first batch of a pass; None, with a line in the log, if it cannot be.

    Args:
        trainer: The trainer.
        order: Reads it.
        epoch: The pass.
        name: What people know the batch by; empty to say nothing.
    """
    if moved := moved_for_good((order.dataset, order.loader.collate_fn), is_elsewhere=True):
        holder, attribute, _ = moved[0]
        if name:
            rank_zero_info(
                f"{name} was not compared with the checkpoint: to read it again would change {attribute!r} of "
                f"{holder}, in shared memory, for good."
            )
        return None
    try:
        with epoch_set_to(trainer, epoch):
            return digest_of_batch(order.read_first(epoch))
    except Exception as error:
        if name:
            rank_zero_info(f"{name} could not be read again, and was not compared with the checkpoint: {error!r}")
        return None


def _warn_of_unstable(name: str) -> None:
    rank_zero_warn(
        f"{name} has another content whenever it is read: a function or the collate_fn remembers what it was given, or "
        "draws from a generator that is out of reach. The resume is not exact, unless this does not matter. Draw from "
        "torch's, NumPy's or Python's global generators.",
        category=StatefulWarning,
    )


def _warn_of_other_content(other: Difference) -> None:
    rank_zero_warn(
        f"{other.remedy} If it is another, the resume is not exact. It is no error, because what the dataset reads may "
        f"follow from something that is no tokenizer and no file. Saved: {other.saved}; now: {other.present}.",
        category=StatefulWarning,
    )


def _difference(path: str, name: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> Difference:
    accepted, _ = names_of_content(path)
    remedy = (
        f"{name} is not what it was when the checkpoint was written: a tokenizer, a vocabulary or something else that "
        "a function or the collate_fn uses is another, or the files are. A set of strings has another order in each "
        "process: build a vocabulary from sorted(words). Restore it as it was, or accept the change with "
        f"accept=({accepted!r},)."
    )
    shown = {"saved": show_batch(saved, present), "present": show_batch(present, saved)}
    return Difference(path=accepted, remedy=remedy, **{side: f"{name}, {text}" for side, text in shown.items()})
