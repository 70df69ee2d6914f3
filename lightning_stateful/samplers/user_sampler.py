"""Any sampler or batch sampler as one canonical sequence of slots for every epoch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.index.position import Position
from lightning_stateful.index.step_plan import ENDLESS
from lightning_stateful.samplers import claims
from lightning_stateful.samplers.items import only_next
from lightning_stateful.samplers.place import Place
from lightning_stateful.samplers.pristine import Pristine
from lightning_stateful.samplers.repeated import Repeated
from lightning_stateful.samplers.state_codec import to_plain
from lightning_stateful.samplers.surroundings import Surroundings
from lightning_stateful.samplers.trial import Trial
from lightning_stateful.samplers.winding import Winding
from lightning_stateful.state import accepted_names

Way = Literal["wound", "own_state", "feedback"]
# What to say of each way.
WAYS: dict[Way, str] = {
    "wound": "is begun anew on a resume and wound forward, by indices alone.",
    "own_state": "keeps its own state, which a resume goes on from.",
    "feedback": "depends on training; its own state, and what it yielded ahead, are kept.",
}
Length = int | Literal["len", "unknown"]

_TORCHS_OWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


class UserSampler:
    """A sampler that the toolkit has not written, run so that an epoch is a function of (seed, epoch).

    It runs under randomness of its own, seeded from (seed, epoch), generators that it holds included; it is told the
    epoch by ``set_epoch`` where it has that, and believes that there is one rank. So every rank, and every resumed
    run, sees one and the same sequence. How it is brought to a place within an epoch is its :attr:`way`:

    - ``"wound"``: it is begun anew and wound forward to the place, by indices alone.
    - ``"own_state"``: it has ``state_dict`` and ``load_state_dict``, which bring it there, or near it.
    - ``"feedback"``: it depends on what training computes, and says so (``depends_on_training = True``); its
      own state and what it has yielded ahead of training are kept.

    Args:
        sampler: Any iterable over indices (or over batches of them), to be iterated once an epoch.
        seed: Chooses its randomness.
        path: The place of its loader among several, which draw apart; empty for a loader that stands alone.
        whole_batches: Whether it yields whole batches.
        is_collated: Whether these are certainly batches of indices, of whatever type; else a tuple names one sample.
        length: Items that it yields in an epoch: ``"len"`` for its own ``len()`` if it has one, ``"unknown"`` to find
            out where it ends, or a number after which an epoch is cut off.
        accept: With ``"nondeterministic"`` in it, a sampler that cannot be repeated is accepted, with a warning.
        as_one_rank: Whether samplers in it that deal out to ranks are told that there is one rank; if not, it is wound.

    Raises:
        ConfigurationError: It cannot be iterated, or lacks part of what its way asks for.
    """

    order_version = 1

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int = 0,
        path: str = "",
        whole_batches: bool = False,
        is_collated: bool = False,
        length: Length = "len",
        accept: Collection[str] = (),
        as_one_rank: bool = True,
    ) -> None:
        self.sampler = sampler
        self.seed, self.path = as_int("seed", seed), path
        self.own_seed = loader_seed(self.seed, path)
        self.whole_batches = whole_batches
        self.is_collated = is_collated
        self.accept = accepted_names(accept)
        self.name = type(sampler).__qualname__
        if not hasattr(sampler, "__iter__"):
            raise ConfigurationError(f"{self.name} cannot be iterated; a sampler has __iter__.")
        self.as_one_rank = as_one_rank
        self.way = _way_of(sampler) if as_one_rank else "wound"
        self.surroundings = Surroundings(sampler, as_one_rank=as_one_rank)
        self.length_given = length if isinstance(length, str) else as_int("length", length)
        claims.take_over(self)
        with self.surroundings.alone():
            self._length = self._measure()
            self.is_known = _is_known(sampler)
            self.pristine = None if self.is_known else Pristine(self.surroundings.samplers.values())
        self.restores = False
        self.is_repeatable = True
        self.has_reported = False
        # The latest run, and how a sampler that depends on training stood when its latest pass began.
        self.live: Winding | None = None
        self.pass_begun: tuple[int, int, Any] | None = None
        self._trial: Trial | None = None
        self._middle = {"of a pass": False}
        # A run that is dropped leaves the sampler as it was found.
        weakref.finalize(self, _put_back, self.pristine, self._middle).atexit = False

    @property
    def kind(self) -> str:
        """The name under which a state knows such a sequence."""
        return "batch_sampler" if self.whole_batches else "sampler"

    @property
    def is_sized(self) -> bool:
        """Whether the length of an epoch is known before its end."""
        return self._length is not None

    @property
    def is_cut(self) -> bool:
        """Whether epochs are cut off at a given length."""
        return isinstance(self.length_given, int)

    def __len__(self) -> int:
        """Slots of an epoch; :data:`~lightning_stateful.index.step_plan.ENDLESS` where that is not known."""
        return ENDLESS if self._length is None else self._length

    def describe(self) -> dict[str, Any]:
        """What determines the sequence, as far as it can be read off, as plain data to be compared."""
        # It settles the way as well.
        begins = self.examine().begins
        length = "unknown" if self._length is None else self._length
        described = {"class": self.name, "way": self.way, "length": length}
        return {"seed": self.seed, "sampler": described, "sequence": begins}

    def begin(self, epoch: int, number: int) -> Iterator[Any]:
        """Begin a pass of an epoch; to be called, and iterated, within the surroundings."""
        self.prepare(epoch, number)
        return only_next(iter(self.sampler))

    def prepare(self, epoch: int, number: int) -> None:
        """Everything before ``iter()``."""
        epoch = 0 if isinstance(self.sampler, Repeated) else epoch
        if self.restores and self.pristine is not None:
            self.pristine.restore()
        self.seed_draws(epoch, number)
        self.set_epoch(epoch)

    def seed_draws(self, *labels: int) -> None:
        """Seed everything that the sampler may draw from; to be called within the surroundings."""
        self.surroundings.seed(self.own_seed, *labels)

    def at(self, path: str, *, as_one_rank: bool | None = None) -> UserSampler:
        """The same sampler for a loader at ``path`` among several."""
        as_one_rank = self.as_one_rank if as_one_rank is None else as_one_rank
        if (path, as_one_rank) == (self.path, self.as_one_rank):
            return self
        return UserSampler(
            self.sampler,
            seed=self.seed,
            path=path,
            whole_batches=self.whole_batches,
            is_collated=self.is_collated,
            length=self.length_given,
            accept=self.accept,
            as_one_rank=as_one_rank,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the sampler in its surroundings, and note what it leaves in its data."""
        # What depends on training is seeded before every draw, and has nothing to go on with.
        with self.surroundings.entered(keep_inner=self.way != "feedback"):
            try:
                yield
            finally:
                if self.pristine is not None and (self.restores or self._trial is None):
                    self.pristine.leave()

    def note_begun(self, run: Winding) -> None:
        """A run of the sampler goes on from now on, and changes what it holds."""
        self.live = run
        self._middle["of a pass"] = self.restores
        claims.claim(self, run)

    def put_back(self) -> None:
        """Put what the sampler holds back to what it was at first, if a run has been in the middle of it."""
        _put_back(self.pristine, self._middle)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, and those within it, which epoch it is."""
        for part in reversed(self.surroundings.samplers.values()):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def examine(self) -> Trial:
        """Make sure, once and cheaply, that the sampler gives the same again; see :class:`Trial`.

        Raises:
            UnsupportedLoaderError: It does not, and that is not accepted.
        """
        if self._trial is None:
            self._trial = Trial(self)
        return self._trial

    def wind(self, position: Position) -> Winding:
        """A run of the sampler from ``position`` to the end of its pass; it begins when it is first asked."""
        number, slot = self._pass_of(position)
        place = Place.from_text(position.carried)
        if position.consumed and not self.is_repeatable:
            warnings.warn(
                f"{self.name} differs from run to run. What is left of epoch {position.epoch} is not what was left "
                "when the checkpoint was written: some samples come twice, and others never.",
                StatefulWarning,
                stacklevel=2,
            )
        return Winding(self, position.epoch, number, slot, place)

    def known_end(self, position: Position) -> int | None:
        """Slots of the position's pass if the sampler has been seen to end there; None if not, or if it is sized."""
        live = self.live
        if self.is_sized or live is None or (live.epoch, live.number) != (position.epoch, 0):
            return None
        return live.end

    def note_handed(self, position: Position) -> None:
        """The batch at ``position`` is about to be trained on: what training teaches the sampler comes after it."""
        number, slot = self._pass_of(position)
        live = self.live
        if live is not None and (live.epoch, live.number) == (position.epoch, number):
            live.note_handed(slot)

    def save(self, position: Position) -> dict[str, Any]:
        """A position as plain data, with what the sampler needs to go on from there."""
        return {**position.to_dict(), self.kind: self._place(position).to_dict()}

    def restore(self, data: Mapping[str, Any]) -> Position:
        """The position that :meth:`save` wrote.

        Raises:
            DamagedStateError: Keys are missing or hold what does not belong there.
            PositionError: A value is out of range.
        """
        place = Place.from_dict(data.get(self.kind))
        return replace(Position.from_dict(data), carried=place.to_text())

    def report(self, position: Position) -> dict[str, Any]:
        """What has been served, and how the sampler is brought to a place, as plain data."""
        unit = "batches" if self.whole_batches else "samples"
        return {unit: position.consumed, "sampler": {"class": self.name, "way": self.way}}

    def _place(self, position: Position) -> Place:
        if not self.as_one_rank:
            return Place()
        number, slot = self._pass_of(position)
        live = self.live
        if live is not None and (live.epoch, live.number) == (position.epoch, number) and live.begun <= slot:
            return live.place_at(slot)
        if not position.carried and not position.consumed and self.way == "feedback":
            # What it has learnt outlives the epoch.
            return Place(state=(self.own_state(),))
        return Place.from_text(position.carried)

    def _pass_of(self, position: Position) -> tuple[int, int]:
        """Which pass over the sampler within the epoch, and which slot of it."""
        return divmod(position.consumed, len(self) or 1)

    def __getstate__(self) -> dict[str, Any]:
        # A run cannot be copied; a copy begins one of its own, where it stands.
        return {**vars(self), "live": None}

    def own_state(self, state: Any = None) -> Any:
        """The sampler's own state, as plain data; by default as it is now."""
        return to_plain(self.sampler.state_dict() if state is None else state, f"{self.name}.state_dict()")

    def _measure(self) -> int | None:
        length = self.length_given
        if length == "unknown":
            return None
        if isinstance(length, int) and length >= 1:
            return length
        if length != "len":
            raise ConfigurationError(f"length must be at least 1, 'len' or 'unknown', got {length!r}.")
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None


def _put_back(pristine: Pristine | None, middle: dict[str, bool]) -> None:
    if pristine is not None and middle["of a pass"]:
        pristine.restore()
    middle["of a pass"] = False


def _is_known(sampler: Any) -> bool:
    # torch's own samplers are known not to change when they are iterated.
    if type(sampler) is BatchSampler:
        return _is_known(sampler.sampler)
    return type(sampler) in _TORCHS_OWN


def _way_of(sampler: Any) -> Way:
    has_state = all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))
    if getattr(sampler, "depends_on_training", False):
        if not has_state or not callable(getattr(sampler, "set_epoch", None)):
            raise ConfigurationError(
                f"{type(sampler).__qualname__} says depends_on_training = True. It then needs state_dict(), "
                "load_state_dict(state) and set_epoch(epoch): a state has to hold what it learnt from training, and "
                "set_epoch with another epoch than the state's has to begin that epoch."
            )
        return "feedback"
    return "own_state" if has_state else "wound"
