"""Random generators that a LightningModule, callbacks, optimizers or schedulers hold, whose states a checkpoint keeps.

They are never seeded: a run that nobody stops draws from them what it would draw without this package. A checkpoint
holds their states, and a resume puts them back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import Dataset

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import reached
from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import GENERATORS, get_generator_state, set_generator_state
from lightning_stateful.loops.lightning import LightningOptimizer, pl
from lightning_stateful.loops.loop_progress import next_step
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state import cut_epochs
from lightning_stateful.module_state.module_changes import note_weights
from lightning_stateful.samplers.state_codec import from_plain, to_plain

# Parts of a loader whose generators are seeded by batch, and those whose generators are seeded by epoch.
_OF_SAMPLES, _OF_ORDER = ("dataset", "collate_fn"), ("sampler", "batch_sampler", "generator")


def generators_in(trainer: pl.Trainer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The generators that module, callbacks, optimizers and schedulers hold, by place, as ``Model.augment.generator``.

    They are looked for as those of a dataset are (:mod:`lightning_stateful.generators.held_generators`),
    and no property or method is called. Of a data module they are its own attributes. Those of the process are left
    out. One that optimizers or schedulers share with the module has its place there.

    Returns:
        Those that training data do not hold; those that a sampler holds too; and others that training data hold too.
    """
    callbacks = callbacks_of(trainer)
    users = [one for one in callbacks if not type(one).__module__.startswith("lightning_stateful.")]
    roots = _named([trainer.lightning_module, *users])
    if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined]  # set by a connector
        # What else it holds are datasets and loaders.
        roots[_name_of(data)] = {name: value for name, value in vars(data).items() if isinstance(value, GENERATORS)}
    left_out = (Dataset, pl.LightningDataModule)
    found = _reachable(roots, left_out)
    for identity, one in _reachable(_named(_stepped(trainer), roots), left_out).items():
        found.setdefault(identity, one)
    of_order, of_samples = (_of_data(trainer, names) if found else set() for names in (_OF_ORDER, _OF_SAMPLES))
    own = dict(one for identity, one in found.items() if identity not in of_order | of_samples)
    by_epoch = dict(one for identity, one in found.items() if identity in of_order - of_samples)
    return own, by_epoch, dict(one for identity, one in found.items() if identity in of_samples)


def _stepped(trainer: pl.Trainer) -> list[Any]:
    """The optimizers as the user has made them, and the learning rate schedulers; none before there are any."""
    optimizers: list[Any] = [
        one.optimizer if isinstance(one, LightningOptimizer) else one for one in trainer.optimizers
    ]
    return [*optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]


def _named(objects: Iterable[Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """Objects by the names of their classes, with a number from the second of a class on.

    Args:
        objects: The objects.
        taken: Names of others.
    """
    named: dict[str, Any] = {}
    for one in objects:
        name = _name_of(one)
        number = sum(other.partition("#")[0] == name for other in (*taken, *named))
        named[f"{name}#{number + 1}" if number else name] = one
    return named


def _name_of(value: Any) -> str:
    return type(value).__qualname__.rpartition(".")[2]


def _of_data(trainer: pl.Trainer, names: tuple[str, ...]) -> set[int]:
    """Identities of the generators that parts of the training loaders hold."""
    if (combined := trainer.fit_loop._combined_loader) is None:
        return set()
    parts = [getattr(loader, name, None) for loader in combined.flattened for name in names]
    parts += [getattr(part, "__dict__", None) for part in parts]
    return set(_reachable({str(number): part for number, part in enumerate(parts)}, ()))


class ModelGenerators:
    """Reads the states of these generators where a resume goes on, and puts them back."""

    def __init__(self) -> None:
        self._generators: dict[str, Any] | None = None
        nowhere: tuple[tuple[int, int], dict[str, Any]] = ((-1, -1), {})
        # States before the latest batch was fetched, or the first of a window; before a validation; and at an end.
        self._before_batch = self._before_validation = self._at_end = nowhere
        # Those that training data hold too, by epoch and by batch, and their states after the latest batch was fetched.
        self._shared: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._fetched: dict[str, Any] = {}
        # Those of them that something else than training data has drawn from.
        self._drawn_by_both: set[str] = set()
        # Those that the latest validation has drawn from.
        self._validated: set[str] = set()

    def watch(self, trainer: pl.Trainer, before_validation: Callable[[], None]) -> None:
        """Note the states from now on before a batch is fetched and a validation begins: ahead of all hooks.

        Args:
            trainer: The trainer.
            before_validation: Called before a validation begins.
        """
        self.end_watching(trainer)
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        epoch_loop._on_before_fetch = partial(self._before_fetch, trainer, epoch_loop._on_before_fetch)
        epoch_loop._on_after_fetch = partial(self._after_fetch, epoch_loop._on_after_fetch)
        epoch_loop.val_loop.reset = partial(self._before_reset, trainer, before_validation, epoch_loop.val_loop.reset)

    def end_watching(self, trainer: pl.Trainer) -> None:
        """Undo :meth:`watch`."""
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        for name in ("_on_before_fetch", "_on_after_fetch"):
            vars(epoch_loop).pop(name, None)
        vars(epoch_loop.val_loop).pop("reset", None)

    def _before_fetch(self, trainer: pl.Trainer, original: Callable[[], None]) -> None:
        epoch, batch = next_step(trainer)
        self._note_drawn(trainer)
        if batch == 0:
            # They may have been replaced.
            self._generators = None
        if batch % trainer.accumulate_grad_batches == 0:
            self._before_batch = (epoch, batch), self._states(trainer)
        original()

    def _after_fetch(self, original: Callable[[], None]) -> None:
        original()
        self._fetched = self._states_of_shared()

    def note_batch_end(self) -> None:
        """Warn where the model or a callback has drawn, since the latest batch was fetched, from what data draw from.

        Warns:
            StatefulWarning: It has, for the first time.
        """
        if not self._fetched:
            return
        now = self._states_of_shared()
        drawn = {place for place, state in self._fetched.items() if now.get(place, state) != state}
        self._fetched = {}
        if drawn and not self._drawn_by_both:
            rank_zero_warn(
                f"{', '.join(sorted(drawn))} is a random generator that training data draw from as well. It is seeded "
                "for these by (seed, epoch, batch), so what the module, a callback or an optimizer draws from it does "
                "not go on exactly where a run is resumed within an epoch. Give it a generator of its own.",
                category=StatefulWarning,
            )
        self._drawn_by_both |= drawn

    def _states_of_shared(self) -> dict[str, Any]:
        """The states, as plain data, of those that training data hold too and nobody has been warned of."""
        if not any(self._shared):
            # In most runs, at every batch.
            return {}
        shared = {place: one for of in self._shared for place, one in of.items() if place not in self._drawn_by_both}
        return _plain({place: get_generator_state(one) for place, one in shared.items()})

    def _before_reset(
        self, trainer: pl.Trainer, before_validation: Callable[[], None], original: Callable[[], None]
    ) -> None:
        self._before_validation = next_step(trainer), self._states(trainer)
        cut_epochs.note_validation(trainer)
        note_weights(trainer)
        before_validation()
        original()

    def _note_drawn(self, trainer: pl.Trainer) -> None:
        at, before = self._before_validation
        if before and at == next_step(trainer):
            now = _plain(self._states(trainer))
            self._validated = {place for place, state in _plain(before).items() if now.get(place) != state}

    def note_end(self, trainer: pl.Trainer) -> None:
        """Remember the states at the end of an epoch, perhaps one that ends before all its batches."""
        self._at_end = next_step(trainer, begun=True), self._states(trainer)

    def state(self, trainer: pl.Trainer, progress: LoopProgress) -> dict[str, Any]:
        """The states with which a run goes on from ``progress``, as plain data by place."""
        self._generators = None
        states = self._states(trainer)
        if progress.running:
            at = progress.epoch, progress.batch
            noted = [self._at_end] if progress.ended else [self._at_end, self._before_batch]
            if cut_epochs.stops_by_validation(trainer, at):
                noted = [self._before_validation]
            found = [earlier for step, earlier in noted if step == at]
            if trainer.validating and progress.validate and self._before_validation[0] == next_step(trainer):
                found.append(self._before_validation[1])
            states = {**states, **found[0]} if found else states
        if progress.validated:
            # The window is trained on again without its validation: they cannot come to where they were.
            self._note_drawn(trainer)
            states = {place: state for place, state in states.items() if place not in self._validated}
        # A resume at the beginning of an epoch finds those that a sampler seeds as they were.
        lost = {place for of in self._shared[not progress.running :] for place in of if place in self._drawn_by_both}
        return {**_plain(states), **dict.fromkeys(lost)}

    def put_back(self, trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
        """Put the generators back to saved states.

        Warns:
            StatefulWarning: One has no saved state, or is not there, or is of another kind by now.
        """
        generators, *_ = generators_in(trainer)
        unlike = generators.keys() ^ saved.keys()
        for place in generators.keys() & saved.keys():
            try:
                set_generator_state(generators[place], from_plain(saved[place]))
            except (TypeError, ValueError, RuntimeError, KeyError):
                unlike.add(place)
        warn_of_lost(unlike)

    def _states(self, trainer: pl.Trainer) -> dict[str, Any]:
        if self._generators is None:
            self._generators, *shared = generators_in(trainer)
            self._shared = shared[0], shared[1]
        return {place: get_generator_state(generator) for place, generator in self._generators.items()}


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    return {place: to_plain(state, place, "generator") for place, state in states.items()}


def warn_of_lost(places: Collection[str]) -> None:
    """Warn of generators that a resume does not put back."""
    if places:
        warnings.warn(
            "Of random generators of the module, callbacks, optimizers or schedulers, "
            f"{', '.join(sorted(places))} could not be put back to where the checkpoint was written: on this rank the "
            "checkpoint or this run lacks it, or it is of another kind, or training data draw from it as well, or the "
            "number of ranks is another, or a validation in an open accumulation window has drawn from it. What is "
            "drawn from it does not go on exactly. Make it in __init__, and for it alone; save between windows.",
            category=StatefulWarning,
            stacklevel=2,
        )


def _reachable(roots: Mapping[str, Any], left_out: tuple[type, ...]) -> dict[int, tuple[str, Any]]:
    """Place and generator by identity; of several places of one, the nearest."""
    found: dict[int, tuple[str, Any]] = {}
    for place in reached(roots, lambda value: not isinstance(value, left_out)):
        generator = place.value
        identity = identity_of(generator)
        if identity or (identity == 0 and _is_of_device(generator)):
            # As the user writes it.
            name = ".".join(part for part in place.path if part != "_modules")
            found.setdefault(identity or id(generator), (name, generator))
    return found


def _is_of_device(value: Any) -> bool:
    """Whether it is a generator of a device that is not the device's own."""
    if type(value) is not torch.Generator or value.device.type == "cpu":
        return False
    own: Iterable[Any] = getattr(getattr(torch, value.device.type, None), "default_generators", ())
    return all(value is not one for one in own)
