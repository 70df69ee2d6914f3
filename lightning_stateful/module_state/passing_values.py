"""What training sets and no checkpoint holds: buffers with ``persistent=False``, attributes, and settings.

Settings are plain attributes of layers by installed packages, such as Dropout's ``p``, and some of the Trainer's. A
temperature that ``on_train_epoch_start`` sets, a running average, a queue of samples: plain attributes that training
has changed are lost by a resume, unless a hook restores them.
"""

from __future__ import annotations

import logging
import warnings
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from queue import Queue
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from lightning_stateful.contents.code_uses import attributes_read, is_set_anew
from lightning_stateful.contents.training_uses import (
    changes_training_with,
    leaf_of,
    names_in_transfers,
    steps_with,
    trains_with,
)
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import (
    LIGHTNINGS,
    PLAIN,
    attributes_and_defaults,
    attributes_of,
    closure_of,
    is_users,
    package_of,
)
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import call_before_epochs, next_step
from lightning_stateful.loops.other_callbacks import callbacks_before, callbacks_of
from lightning_stateful.module_state.optimizer_steps import states_of
from lightning_stateful.samplers.fingerprint import digest, digest_of_some, is_plain_tensor, short_text, text_of_large

# Kept with the loop.
_WATCH = "_passing_values"
# Numbers in a buffer up to which it is looked at: a metric, a queue; attributes in a checkpoint; objects within each
# other that are looked into; and items of a list of objects.
_MOST_NUMBERS, _MOST_NAMES, _DEPTH, _MOST_ITEMS = 2**16, 64, 2, 64
# What others compare.
_LEFT_OUT = (Dataset, DataLoader, pl.LightningDataModule, pl.Trainer)
# Of Python's, what holds attributes of a user's.
_HOLDERS = (SimpleNamespace, UserDict, UserList, Queue)
# What an optimizer saves, and what torch's class keeps for itself.
_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])))
# Hooks that a resume calls again ahead of its first batch: of a validation that was due, or of an epoch's end.
_AGAIN = frozenset(
    {
        *(f"on_validation_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")),
        *("validation_step", "on_train_epoch_end"),
    }
)
# Settings of the Trainer that training goes by, but for what Lightning computes of the lengths of loaders.
_OF_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "check_val_every_n_epoch",
    "max_epochs",
)
# Ends the name of the steps of a learning rate schedule; and that of the class of a layer, or an optimizer.
_STEPS, _CLASS = ".last_epoch", "__class__"
# Begins what is no value itself, and the name of a function.
_DIGEST, _FUNCTION = "#", "function "
Texts = dict[str, str]
_log = logging.getLogger("lightning.pytorch.lightning_stateful")


class _Watch:
    """What is known of such values in a fit.

    Args:
        saved: What :func:`changed` gave, of the checkpoint that the run is resumed from.
    """

    def __init__(self, saved: dict[str, Texts]) -> None:
        self.saved = saved
        # By kind, as the first epoch began; None before.
        self.begun: dict[str, Texts] | None = None
        # Attributes as that epoch or a later one began, behind the hooks of callbacks that come before this package's.
        self.at_start: Texts | None = None
        # Those that are others ahead of the end of an epoch that was cut, and where it was cut.
        self.cut: tuple[tuple[int, int], dict[str, Texts]] | None = None
        # Those that are others, as the fit ended.
        self.at_end: dict[str, Texts] | None = None
        # Attributes of a checkpoint are still to be compared, but for those that another rank speaks of.
        self.is_awaiting, self.shared = False, set[tuple[str, str]]()
        # So are settings.
        self.awaits_settings = bool(saved["settings"])
        # Whether hooks of before the save are called again first.
        self.is_again = False


def watch(trainer: pl.Trainer, saved: Mapping[str, Any] | None) -> None:
    """Begin to follow the values; to be called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: A state that has buffers and settings of :func:`changed`, if the run is resumed from a checkpoint.
    """
    of_module = {kind: dict((saved or {}).get(kind, {})) for kind in ("passing", "settings")}
    vars(trainer.fit_loop)[_WATCH] = _Watch({**of_module, "remembered": {}})
    call_before_epochs(trainer, partial(_begin, trainer))


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`, but keep what was changed: the model may be used before another checkpoint is written."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.at_end is None:
        known.at_end = {kind: changed(trainer, kind) for kind in _KINDS}


def changed(trainer: pl.Trainer, kind: str) -> Texts:
    """What no checkpoint holds and is another value than before the first epoch, by name.

    Args:
        trainer: The trainer.
        kind: ``"passing"`` for digests of buffers; ``"remembered"`` for attributes, and ``"settings"`` for
            settings, numbers as text.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None:
        return {}
    if known.at_end is not None:
        return known.at_end[kind]
    if known.begun is None:
        return dict(known.saved[kind])
    if known.cut is not None and known.cut[0] == next_step(trainer, begun=True):
        # What that end sets it will set again.
        return known.cut[1][kind]
    begun, saved, now = known.begun[kind], known.saved[kind], _KINDS[kind](trainer)
    others = [name for name, held in now.items() if name in saved or _is_other(begun.get(name, ""), held)]
    return {name: now[name] for name in others[:_MOST_NAMES]}


def _is_other(begun: str, now: str) -> bool:
    # A function may be built where it is needed first, on a resume too.
    return begun != now and (begun.startswith(_FUNCTION) or not now.startswith(_FUNCTION))


def note_cut(trainer: pl.Trainer) -> None:
    """An epoch ends before all its batches, or by a validation that is run only for that: note what is changed then."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.at_end is None:
        # Else what was noted there before would be given back.
        known.cut = None
        known.cut = next_step(trainer, begun=True), {kind: changed(trainer, kind) for kind in _KINDS}


def expect_attributes(trainer: pl.Trainer, of_ranks: Sequence[Texts]) -> None:
    """Compare attributes, when the first batch begins, with those of the rank that wrote a checkpoint.

    Args:
        trainer: The trainer.
        of_ranks: By rank what :func:`changed` gave as ``remembered``; another number of ranks has that of the first.
    """
    known: _Watch = vars(trainer.fit_loop)[_WATCH]
    rank = trainer.global_rank if len(of_ranks) == trainer.world_size else 0
    known.saved["remembered"] = dict(of_ranks[rank])
    # What is as on rank 0 is said there.
    known.shared = set(of_ranks[0].items()) if trainer.global_rank else set()
    known.is_awaiting = bool(of_ranks[rank])


def _begin(trainer: pl.Trainer) -> None:
    """Compare buffers with the checkpoint, once: behind the hooks ``on_train_start``, which may restore them.

    Warns:
        StatefulWarning: Some are others than at the save.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or known.begun is not None:
        return
    known.begun = {kind: look(trainer) for kind, look in _KINDS.items()}
    now = known.begun["passing"]
    if others := sorted(name for name, held in known.saved["passing"].items() if now.get(name) != held):
        rank_zero_warn(
            f"Buffers of the module that no checkpoint holds (persistent=False) had been changed in training when the "
            f"checkpoint was written, and are others here: {some_of(others)}. If training "
            "depends on them, as on a metric that they sum up, the resume is not exact. Register them with "
            "persistent=True, or restore them in on_load_checkpoint or on_train_start.",
            category=StatefulWarning,
        )


def look_at_start(trainer: pl.Trainer) -> None:
    """Remember attributes where the first epoch of a resume begins; to be called in ``on_train_epoch_start``."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.is_awaiting:
        known.at_start = texts_of_attributes(trainer)


def note_again(trainer: pl.Trainer) -> None:
    """A validation, or the end of an epoch, begins: on a resume hooks change once more what they had changed."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and (known.is_awaiting or known.awaits_settings):
        known.is_again = True


def look_once(trainer: pl.Trainer) -> None:
    """Tell, as the first batch of a resume begins, which attributes are others than at the save and were not set since.

    Of those that training does not use it is said in the log: many remember a loss for that alone.

    Warns:
        StatefulWarning: Training uses one, or one is a schedule of learning rates.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or not known.is_awaiting or known.begun is None:
        # In most runs, at every batch.
        return
    known.is_awaiting = False
    now, begun = texts_of_attributes(trainer), known.begun["remembered"]
    # Callbacks that come first may have changed theirs in on_train_batch_start by now, as they do at any batch.
    first = tuple(f"{type(one).__qualname__}." for one in callbacks_before(trainer))
    at_start = begun if known.at_start is None else known.at_start
    now = {name: held for name, held in now.items() if not name.startswith(first)}
    now |= {name: held for name, held in at_start.items() if name.startswith(first)}
    # So have hooks that move the first batch to a device, perhaps.
    data = data_module_of(trainer)
    batch_owners = {"": trainer.lightning_module, **({} if data is None else {f"{type(data).__qualname__}.": data})}
    moved = names_in_transfers(batch_owners, {**now, **known.saved["remembered"]})
    now = {name: held for name, held in now.items() if name not in moved}
    now |= {name: at_start[name] for name in moved if name in at_start}
    others = {name: was for name, was in known.saved["remembered"].items() if now.get(name) != was}
    if next_step(trainer)[1] == 0:
        others = {name: was for name, was in others.items() if not _is_set_by_epoch(trainer, name)}
    again = _changed_again(trainer, known, "remembered", at_start if known.at_start else now)
    others |= again
    now = {name: held for name, held in now.items() if name not in again}
    now |= {name: begun[name] for name in again if name in begun}
    left = [
        name for name, was in others.items() if now.get(name) == begun.get(name) and (name, was) not in known.shared
    ]
    of_rank = f" of rank {trainer.global_rank}" if trainer.world_size > 1 else ""
    moved = names_in_transfers(batch_owners, moved, used=True)
    all_owners = "module, callbacks, optimizers or data module"
    kinds: list[tuple[str, str, Callable[[str], bool]]] = [
        ("module", "training_step uses and ", partial(trains_with, trainer.lightning_module)),
        ("optimizers", "step() uses and ", partial(steps_with, trainer.optimizers)),
        ("module or data module", "hooks of the transfer of batches use and ", moved.__contains__),
        (all_owners, "set learning rates and ", lambda name: name.endswith(_STEPS)),
        (
            "callbacks",
            "hooks which change the module, its gradients or optimizers use and ",
            partial(changes_training_with, callbacks_of(trainer)),
        ),
        (all_owners, "", lambda _: True),
    ]
    for owners, what, is_one in kinds:
        names = [name for name in left if is_one(name)]
        left = [name for name in left if name not in names]
        if not names:
            continue
        said = [_change(name, others[name], now.get(name, "not set")) for name in names]
        text = (
            f"Attributes of the {owners}{of_rank} that {what}"
            "no checkpoint holds had been changed in training when this one was written, and are others here: "
            f"{some_of(said)}. If training depends on them, the resume is not exact: save them in on_save_checkpoint, "
            "or in a callback's state_dict, or set them in on_train_start."
            f"{of_rank and ' It has what rank 0 saves: gather it, or let it be the same on all ranks.'}"
        )
        if what:
            warnings.warn(text, StatefulWarning, stacklevel=2)
        else:
            _log.info(text)


def look_at_settings(trainer: pl.Trainer) -> None:
    """Tell, as the first batch of a resume ends, which settings are others than at the save and were not set since.

    Warns:
        StatefulWarning: There are such.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or not known.awaits_settings or known.begun is None:
        # In most runs, at every batch.
        return
    known.awaits_settings = False
    now, begun = _settings(trainer), known.begun["settings"]
    again = _changed_again(trainer, known, "settings", now)
    now |= {name: begun[name] for name in again if name in begun}
    left = {name: was for name, was in known.saved["settings"].items() if now.get(name, was) != was}
    said = [_change(name, was, now[name]) for name, was in left.items() if now[name] == begun.get(name)]
    if said:
        rank_zero_warn(
            "Settings of the Trainer, or of layers of the module, had been changed in training when the checkpoint was "
            f"written, and are others here: {some_of(said)}. No checkpoint holds them, so the resume is not exact if "
            "training goes by them. Set them again in on_train_start, or in load_state_dict of the callback that sets "
            "them.",
            category=StatefulWarning,
        )


def _changed_again(trainer: pl.Trainer, known: _Watch, kind: str, now: Texts) -> Texts:
    """Values of a checkpoint that nothing had restored when hooks changed them again, by what they were.

    Args:
        trainer: The trainer.
        known: What is known.
        kind: As for :func:`changed`.
        now: The values behind these hooks.

    Returns:
        What they were in the checkpoint; empty where no such hook was called.
    """
    if not known.is_again or known.begun is None:
        return {}
    begun = known.begun[kind]
    others = {name: was for name, was in known.saved[kind].items() if begun.get(name) not in (was, now.get(name))}
    owners = [trainer.lightning_module, *callbacks_of(trainer)] if others else []
    read = {name for owner in owners for name in attributes_read(owner, _AGAIN)}
    return {name: was for name, was in others.items() if leaf_of(name) in read}


def _is_set_by_epoch(trainer: pl.Trainer, name: str) -> bool:
    """Whether ``on_train_epoch_start`` of what has an attribute sets it anew, as the hidden state of a network."""
    held = [(f"{prefix}.".lstrip("."), owner) for prefix, owner in _owners(trainer)]
    return any(
        name.startswith(prefix) and is_set_anew(owner, name[len(prefix) :], frozenset({"on_train_epoch_start"}))
        for prefix, owner in held
    )


def _change(name: str, was: str, now: str) -> str:
    return name if _DIGEST in (was[:1], now[:1]) else f"{name} was {was} and is {now}"


def _buffers(trainer: pl.Trainer) -> Texts:
    found: Texts = {}
    for prefix, part in trainer.lightning_module.named_modules():
        held = vars(part)
        for name in sorted(held.get("_non_persistent_buffers_set", ())):
            buffer = held["_buffers"].get(name)
            if buffer is not None and is_plain_tensor(buffer):
                is_small = buffer.numel() <= _MOST_NUMBERS
                text = digest(buffer.detach().cpu()) if is_small else text_of_large(buffer)
                found |= {f"{prefix}.{name}".lstrip("."): text} if text else {}
    return found


def _settings(trainer: pl.Trainer) -> Texts:
    """Texts of settings by name, such as ``net.1.p``, and of classes of layers and optimizers."""
    found = {f"trainer.{name}": short_text(getattr(trainer, name, None)) for name in _OF_TRAINER}
    optimizers = enumerate(trainer.optimizers)
    found |= {f"trainer.optimizers[{place}].{_CLASS}": type(one).__qualname__ for place, one in optimizers}
    for prefix, layer in trainer.lightning_module.named_modules():
        texts = _of_layer(layer) if prefix else {}
        # Other attributes of a user's own are compared with those of the module.
        names = [name for name in texts if name == _CLASS or not is_users(type(layer).__module__)]
        found |= {f"{prefix}.{name}": texts[name] for name in names}
    return found


def _of_layer(layer: torch.nn.Module) -> Texts:
    """The class of a layer, and its plain attributes."""
    held = {name: value for name, value in vars(layer).items() if name[0] != "_" and name != "training"}
    texts = {name: short_text(value) for name, value in held.items() if type(value) in PLAIN}
    return {_CLASS: type(layer).__qualname__, **texts}


def texts_of_attributes(trainer: pl.Trainer) -> Texts:
    """Texts, by name, of what attributes of the user's module, callbacks, optimizers and data module hold."""
    module, found = trainer.lightning_module, Texts()
    # What a checkpoint holds.
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    seen = {id(one) for one in (*module.modules(), *trainer.optimizers, *schedulers)}
    for prefix, owner in _owners(trainer):
        held = attributes_and_defaults(owner)
        # Lightning makes an empty dict of its own as it saves.
        hparams = held.get("_hparams")
        held |= {"hparams": dict(hparams)} if isinstance(hparams, dict) and hparams else {}
        for name, value in held.items():
            # What cannot be read is left alone.
            with suppress(Exception):
                if name not in names_of_lightning() and name not in _OF_OPTIMIZERS:
                    found |= _texts(f"{prefix}.{name}".lstrip("."), value, seen, 0)
    return found


def _texts(name: str, value: Any, seen: set[int], depth: int) -> Texts:
    """Texts of a value, and of what objects of a user's in it hold; of a network, or an optimizer, one digest."""
    if text := short_text(value) or text_of_large(value):
        return {name: text}
    found: Texts = {}
    # Lightning sets some of its own within a step.
    if isinstance(value, (FunctionType, BuiltinFunctionType)) and package_of(value) not in LIGHTNINGS:
        found[name] = f"{_FUNCTION}{value.__module__}.{value.__qualname__}"
    if id(value) in seen or depth > _DEPTH or isinstance(value, _LEFT_OUT):
        return found
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        layers = [(prefix, _of_layer(layer)) for prefix, layer in value.named_modules()]
        return {name: f"{_DIGEST}{digest_of_some([*value.parameters(), *value.buffers()])} {digest(layers)}"}
    if isinstance(value, torch.optim.Optimizer):
        return {name: _DIGEST + digest_of_some(states_of(value))}
    if isinstance(value, LRScheduler):
        return {f"{name}{_STEPS}": repr(value.last_epoch)}
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in islice(value.items(), _MOST_ITEMS)}
    elif isinstance(value, (list, tuple, deque)):
        parts = {f"{name}[{place}]": part for place, part in enumerate(islice(value, _MOST_ITEMS))}
    elif isinstance(value, partial):
        parts = {f"{name}.args": value.args, f"{name}.keywords": value.keywords, f"{name}.func": value.func}
    elif isinstance(value, FunctionType) and is_users(value.__module__):
        parts = {f"{name}.{key}": part for key, part in closure_of(value).items()}
    elif is_users(type(value).__module__) or isinstance(value, _HOLDERS):
        parts = {f"{name}.{key}": part for key, part in attributes_of(value).items()}
    inner = {key: text for at, part in parts.items() for key, text in _texts(at, part, seen, depth + 1).items()}
    return found | inner


def _owners(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The module, its parts, the callbacks, optimizers and data module that are a user's own."""
    module = data_module_of(trainer)
    others = (*callbacks_of(trainer), *trainer.optimizers, *([] if module is None else [module]))
    named = [(type(one).__qualname__, one) for one in others]
    for name, one in (*trainer.lightning_module.named_modules(), *named):
        if is_users(type(one).__module__):
            yield name, one


def data_module_of(trainer: pl.Trainer) -> Any:
    """The data module; None if there is none, or it is derived from a class of this package, and holds its loaders."""
    module: Any = vars(trainer).get("datamodule")
    is_own = all(package_of(kind) != "lightning_stateful" for kind in type(module).__mro__)
    return module if is_own else None


@lru_cache(maxsize=1)
def names_of_lightning() -> frozenset[str]:
    """Attributes that any LightningModule, or LightningDataModule, has."""
    held = {*vars(pl.LightningModule()), *vars(pl.LightningDataModule())}
    return frozenset({*held, "_hparams", "_hparams_initial", "_hparams_name"})


_KINDS: dict[str, Callable[[pl.Trainer], Texts]] = {
    "passing": _buffers,
    "remembered": texts_of_attributes,
    "settings": _settings,
}
