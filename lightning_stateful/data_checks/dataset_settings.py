"""Notes values that hooks set and training data follow from, and warns where a resume does not set them.

These are attributes of datasets and of a ``collate_fn``, variables that their code reads, and values that the method
reads which builds the loaders.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import ConcatDataset

from lightning_stateful.contents.build_values import values_read_by, values_samples_follow
from lightning_stateful.contents.code_uses import uses_of
from lightning_stateful.contents.held_state import SHARED, HeldState, are_equal, changed_names
from lightning_stateful.contents.value_texts import OBJECT, shortened, texts
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import (
    PLAIN,
    attributes_of,
    is_lightnings,
    is_users,
    methods_of,
    names_in,
    reached,
)
from lightning_stateful.iterable_datasets.outside_values import OutsideValues
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import reloads_every
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.user_loaders import users_loader

# Attributes in a checkpoint, and bytes of a digest.
_MOST_ATTRIBUTES, _SIZE = 16, 6
# How deep modules in each other are looked into.
_MOST_DEEP = 4
_NO_COPIES = "pass persistent_workers=False, or let the dataset derive them from the epoch"
# Stands for a value that is missing, or has no text, as a list of tensors.
_UNSHOWN = "something else"
_DEFAULTS = (bool, int, float, str)
# Stands for the path of a loader with the values that the method reads which builds the loaders.
BUILD = "train_dataloader()"


class DatasetSettings:
    """Plain values that map-style datasets follow from, and that something else than reading has set.

    They are attributes of a dataset, and of a ``collate_fn`` that is an object; variables of functions, modules and
    classes of the user's that their code reads; and what the method reads that builds the loaders, if it is called
    again for later epochs. The values are numbers, strings, arrays and tensors, and lists, tuples, dicts and sets of
    such. A hook that makes samples harder with every batch sets one, for example. Values that change while the first
    batch of a pass is read, as counters and caches do, are left out. No method or property of a dataset is called.

    Args:
        loaders: The loaders, by path.
        build: Gives the values that the method reads which builds the loaders; None where it is not called again.

    State:
        By path and name: the value, the value when the latest pass began, and the first one that was set.
    """

    def __init__(self, loaders: Mapping[str, StatefulLoader], build: Callable[[], dict[str, str]] | None) -> None:
        self._loaders = loaders
        # Kept for the run: loaders that are built later may come with another dataset.
        self._outside = {path: OutsideValues((loader.dataset, loader.collate_fn)) for path, loader in loaders.items()}
        self._values: dict[str, Callable[[], dict[str, str]]] = {path: partial(self._of, path) for path in loaders}
        self._values |= {BUILD: build} if build is not None else {}
        self._built = {path: values() for path, values in self._values.items()}
        # When the latest pass began, or that in which persistent workers were started.
        self._at_begin = dict(self._built)
        # The first other value than as built.
        self._first: dict[str, dict[str, str]] = {path: {} for path in self._values}
        # Between the beginning of a pass and the first batch that was read of it.
        self._reading: dict[str, dict[str, str]] = {}
        self._changed_by_reading: dict[str, set[str]] = {path: set() for path in self._values}
        # Paths of loaders whose persistent workers a hook has started anew, and of those that were warned of.
        self._restarted, self._said_copies = set[str](), set[str]()
        # By path and name.
        self._only_written: dict[tuple[str, str], bool] = {}
        # What a checkpoint has, and whether training goes on within an epoch.
        self._expected: dict[str, Mapping[str, Any]] = {}
        # By path, names of attributes that a user was told of otherwise.
        self.said: dict[str, set[str]] = {}
        # Likewise: names that were as built when the hooks which restore were over, and were others in a checkpoint.
        self._as_built: dict[str, set[str]] = {}
        self._is_within_epoch = self._is_of_rank = False
        # The state ahead of the end of an epoch that was cut, until the next pass begins.
        self._kept_state: dict[str, dict[str, list[str]]] | None = None
        # Paths of loaders of which no pass has begun since a checkpoint was loaded, and of those that were compared.
        self._resumed: frozenset[str] = frozenset()
        self._compared: set[str] = set()

    @property
    def follows_build(self) -> bool:
        """Whether values that the method reads which builds the loaders are to be compared with a checkpoint's."""
        return BUILD in self._expected and BUILD in self._values

    def continue_from(self, before: DatasetSettings) -> None:
        """Follow what is followed of loaders in whose place these were built, from when the first ones were.

        Of a dataset that was built anew the attributes are others, whatever was set before.
        """
        self._is_within_epoch, self._said_copies = before._is_within_epoch, before._said_copies
        for path in self._values.keys() & before._values.keys():
            kept = self._kept(path, before)
            self._built[path] |= {name: before._built[path][name] for name in kept}
            self._first[path] = {name: value for name, value in before._first[path].items() if name in kept}
            self._changed_by_reading[path] = before._changed_by_reading[path] & kept
            self.said[path] = before.said.get(path, set())
            self._as_built[path] = before._as_built.get(path, set())
            if path in before._expected:
                self._expected[path] = {name: of for name, of in before._expected[path].items() if name in kept}

    def _kept(self, path: str, before: DatasetSettings) -> set[str]:
        """The names of values that are held where they were: attributes of the same dataset, and variables."""
        names, way = set(before._built[path]), ""
        if path not in self._loaders or path not in before._loaders:
            return names
        mine: Any = self._loaders[path].dataset
        other: Any = before._loaders[path].dataset
        while mine is not other and mine is not None:
            # The dataset of a Subset, say.
            mine, other = (getattr(one, "__dict__", {}).get("dataset") for one in (mine, other))
            way = f"{way}dataset."
        # A function that was made anew has variables of its own around it.
        now, then = self._outside[path].variables(), before._outside[path].variables()
        same = {name for name in now.keys() & then.keys() if now[name][0] is then[name][0]}
        return {name for name in names if name in same or (mine is not None and name.startswith(way))}

    def expect(
        self, saved: Mapping[str, Mapping[str, Any]], *, is_within_epoch: bool, is_of_rank: bool = False
    ) -> None:
        """Compare with a checkpoint when the first pass begins.

        Args:
            saved: The state in it.
            is_within_epoch: Whether training goes on within an epoch.
            is_of_rank: Whether it is of this rank alone, which then warns; else rank 0 does.
        """
        self._is_of_rank = is_of_rank
        self._expected, self._is_within_epoch = dict(saved), is_within_epoch
        self._resumed, self._compared = frozenset(self._loaders), set()
        for path in saved.keys() & self._first.keys():
            self._first[path] = {name: first for name, (_, _, first) in saved[path].items()}

    def note_begin(self, path: str) -> None:
        """A pass over a loader begins.

        Warns:
            StatefulWarning: A value is not what it was in the run that wrote the checkpoint; or a hook has set one
                after persistent workers were started.
        """
        self._kept_state = None
        # A stream is none of the loaders, and yet one that a method has built.
        loader = self._loaders.get(path)
        for of in (path, BUILD):
            if of in self._values:
                self._reading[of] = now = self._values[of]()
                self._warn(of, now)
                for name in filter(partial(self._may_be_set, of), changed_names(self._built[of], now)):
                    self._first[of].setdefault(name, now.get(name, ""))
                if loader is not None and self._first[path]:
                    # A checkpoint has what set_epoch of the dataset has set.
                    loader.told = None
                if of == BUILD or loader is None or not (_keeps_workers(loader) and loader._iterator is not None):
                    self._at_begin[of] = now
                else:
                    self._warn_of_copies(of, now)

    def note_restart(self, path: str) -> None:
        """The persistent workers of a loader are about to be started anew."""
        self._restarted.add(path)
        if path in self._values:
            self._at_begin[path] = self._values[path]()

    def note_build(self) -> None:
        """The loaders are about to be built anew, after which hooks of the epoch may set values for the next.

        Warns:
            StatefulWarning: As :meth:`note_begin`.
        """
        if BUILD in self._values:
            self._warn(BUILD, self._values[BUILD]())

    def note_told(self, path: str, names: set[str]) -> None:
        """A user was told otherwise of attributes of a dataset, which the loaders may be built from as well."""
        self.said.setdefault(path, set()).update(names)
        expected = self._expected.get(BUILD, {})
        self.said.setdefault(BUILD, set()).update(name for name in expected if name.rpartition(".")[2] in names)

    def note_read(self, path: str) -> None:
        """The first batch of a pass has been read, and no hook was called since :meth:`note_begin`."""
        for of in (path, BUILD):
            if (before := self._reading.pop(of, None)) is not None:
                self._changed_by_reading[of] |= changed_names(before, self._values[of]())

    def note_early_workers(self) -> None:
        """Training begins; workers of its first epoch may have been started before."""
        for path in list(self._reading):
            self.note_read(path)

    def keep_changes(self) -> None:
        """An epoch is cut off: what its end sets is none of what a resume within it begins with."""
        self._kept_state = self.state()

    def state(self) -> dict[str, dict[str, list[str]]]:
        """See above; empty where nothing was set."""
        if self._kept_state is not None:
            return self._kept_state
        found: dict[str, dict[str, list[str]]] = {}
        for path, values in self._values.items():
            built, began, now = self._built[path], self._at_begin[path], values()
            changed = changed_names(built, now) | changed_names(built, began) | self._first[path].keys()
            for name in self._set_by_hooks(path, changed)[:_MOST_ATTRIBUTES]:
                first = self._first[path].setdefault(name, now.get(name, ""))
                found.setdefault(path, {})[name] = [now.get(name, ""), began.get(name, ""), first]
        return found

    def _set_by_hooks(self, path: str, changed: set[str], *, in_workers: bool = False) -> list[str]:
        """Of values that have changed those that a hook may have set, and that samples, or their order, depend on."""
        names = filter(partial(self._may_be_set, path), sorted(changed - self._changed_by_reading[path]))
        read = {name: not self._is_only_written(path, name) for name in names}
        # Samplers are iterated in this process.
        return [name for name, is_read in read.items() if is_read or (not in_workers and self._is_drawn_by(path, name))]

    def _may_be_set(self, path: str, name: str) -> bool:
        """Whether a hook may have set a value: not what something holds that was built later, as samples in a cache."""
        return name in self._built[path] or name in self._first[path] or "." not in name.lstrip("0123456789.")

    def note_restored(self) -> None:
        """The hooks that restore what a checkpoint has were called; those of an epoch may set something else."""
        for path, of in ({} if self._is_within_epoch else self._expected).items():
            now = self._values[path]() if path in self._values else {}
            restored = {name for name, (latest, *_) in of.items() if now.get(name, "") == latest}
            self.said.setdefault(path, set()).update(restored)
            self._as_built[path] = of.keys() - restored - changed_names(self._built.get(path, {}), now)

    def unlike(self, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The names of values that are others than in a state, or missing."""
        now = {path: self._values[path]() for path in saved.keys() & self._values.keys()}
        return [name for path in now for name, (latest, *_) in saved[path].items() if now[path].get(name, "") != latest]

    def changed(self, path: str) -> str:
        """Digest of the values of a loader that something else than reading has changed; empty for none."""
        built, now = self._built[path], self._values[path]()
        names = changed_names(built, now) - self._changed_by_reading[path]
        changed = [(name, now.get(name, "")) for name in sorted(names)]
        return hex_digest(repr(changed).encode("utf-8", "replace"), size=_SIZE) if changed else ""

    def _is_only_written(self, path: str, name: str) -> bool:
        """Whether the code that reads samples names a value, and only counts it or writes it down."""
        if path in self._loaders and (path, name) not in self._only_written:
            loader = self._loaders[path]
            of, leaf = (loader.dataset, loader.collate_fn), name.rpartition(".")[2]
            places = reached({"dataset": of})
            functions = [place.value for place in places if isinstance(place.value, FunctionType)]
            is_named = any(leaf in names_in(one.__code__) for one in functions if is_users(one.__module__))
            is_variable = name in self._outside[path].variables()
            use = uses_of(of, leaf, is_variable=is_variable, may_be_called=True)
            # Of the code of objects that variables of modules hold nothing is known but that they are called.
            is_seen = use.counts or not _is_of_module(name)
            self._only_written[path, name] = is_named and not use.uses and is_seen
        return self._only_written.get((path, name), False)

    def _is_drawn_by(self, path: str, name: str) -> bool:
        """Whether the loader's sampler uses an attribute of its dataset of that name."""
        held = vars(users_loader(self._loaders[path])) if path in self._loaders else {}
        methods = [methods_of(held.get(one)) for one in ("sampler", "batch_sampler")]
        return uses_of(methods, name.rpartition(".")[2]).uses

    def _of(self, path: str) -> dict[str, str]:
        """The attributes and variables of a loader's dataset, as they are now."""
        loader = self._loaders[path]
        # Plain ones of the class are among the attributes.
        own = (type(loader.dataset), type(loader.collate_fn))
        variables = self._outside[path].variables()
        held = {name: value for name, (of, value) in variables.items() if of not in own or type(value) not in _DEFAULTS}
        found = {**_attributes(loader), **texts(held)}
        # An item of a container is not named beside it.
        shown = {name for name, text in found.items() if not (callable(held.get(name)) or text.startswith(OBJECT))}
        followed = _followed(loader, variables)
        followed = {name: text for name, text in followed.items() if not _is_among(name.rpartition(".")[0], shown)}
        # One that a hook gives to the user's loader is that of the next pass.
        return followed | found | texts({"collate_fn": getattr(users_loader(loader), "__dict__", {}).get("collate_fn")})

    def _warn(self, path: str, now: Mapping[str, str]) -> None:
        loader, built = self._loaders.get(path), self._built[path]
        is_first, self._resumed = path in self._resumed, self._resumed - {path}
        # Workers that a hook has just asked for start with what it has set, as without the stop.
        starts_others = is_first and path not in self._restarted and not self._is_within_epoch
        if starts_others and loader is not None and _keeps_workers(loader):
            self._warn_of_earlier_copies(path, now)
        wrong: dict[str, str] = {}
        counted: list[str] = []
        # Workers have copies from when their pass began, also of what was set later.
        in_workers = self._is_within_epoch and loader is not None and loader.num_workers > 0
        in_workers = in_workers and path not in self._compared
        expected, set_within = self._expected.pop(path, {}), list[str]()
        if in_workers and loader is not None and not _keeps_workers(loader):
            # Those of the next epoch are started with what was set since.
            later = {
                name: [latest, latest, first] for name, (latest, began, first) in expected.items() if latest != began
            }
            self._expected |= {path: later} if later else {}
            copied = {name for name, (latest, *_) in later.items() if not latest.endswith(SHARED)}
            self._as_built[path] = copied - changed_names(built, now)
        self._compared.add(path)
        for name, (latest, began, first) in expected.items():
            set_within += [name] if latest != began else []
            if name in self.said.get(path, ()):
                continue
            in_copies = in_workers and not (latest.endswith(SHARED) or self._is_only_written(path, name))
            saved, present = began if in_copies else latest, now.get(name, "")
            if not are_equal(present, saved) and (in_copies or present == built.get(name, "")):
                wrong[name] = f"{name} was {saved or _UNSHOWN} and is {present or _UNSHOWN}"
            elif not in_workers and name in self._as_built.get(path, ()):
                change = f"{name} was {saved or _UNSHOWN}, and went from {built.get(name) or _UNSHOWN} to {present}"
                if present == first:
                    # One that goes by the epoch would hardly be what it was in an earlier one.
                    wrong[name] = change
                else:
                    counted.append(change)
            elif is_first and not in_copies and not are_equal(present, saved):
                # Set to a third value: within an epoch nothing sets it once more before the first batch.
                change = f"{name} was {saved or _UNSHOWN} and is {present or _UNSHOWN}"
                wrong |= {name: change} if self._is_within_epoch else {}
                counted += [] if self._is_within_epoch else [change]
        if counted:
            rank_zero_info(f"On the resume {'; '.join(counted)}. That is exact if hooks set it by the epoch alone.")
        if not wrong:
            if set_within and loader is not None and self._is_within_epoch:
                self._warn_of_reading_ahead(path, loader, set_within)
            return
        copies = " when the workers of this epoch were started" if in_workers else ""
        message = (
            f"{self._owner(path, wrong)} were changed in training, by a hook or as later samples were read, in the run "
            f"that wrote the checkpoint, and are others here{copies}: {'; '.join(wrong.values())}. If samples depend "
            "on them, the resume is not exact. Set them again before the first batch: in load_state_dict, "
            "on_load_checkpoint or on_train_start."
        )
        if self._is_of_rank:
            warnings.warn(f"{message} On this rank they were not as on rank 0.", StatefulWarning, stacklevel=2)
        else:
            rank_zero_warn(message, category=StatefulWarning)

    def _warn_of_reading_ahead(self, path: str, loader: StatefulLoader, names: list[str]) -> None:
        """Warn of values that hooks set within an epoch of a loader that Lightning reads one batch ahead."""
        if not loader.is_sized and not loader.num_workers:
            rank_zero_warn(
                f"{self._owner(path, names)} were set within the epoch that goes on: {', '.join(sorted(names))}. "
                "Lightning reads a loader without length one batch ahead, so that the first batch of a resume is read "
                "under the value of now, and was read under the one before. If samples depend on it, the resume is not "
                "exact. Give the sampler a __len__, or set it between epochs.",
                category=StatefulWarning,
            )

    def _owner(self, path: str, names: Collection[str]) -> str:
        """Words for what has some values."""
        if path not in self._loaders:
            return "Values that the method reads which builds the training loaders"
        variables = self._outside[path].variables()
        if all(_is_among(name, variables) or _is_of_module(name) for name in names):
            return "Variables that the code of the dataset reads"
        return f"Attributes of the dataset, a {type(_users_of(self._loaders[path].dataset)[0]).__qualname__},"

    def _warn_of_copies(self, path: str, now: Mapping[str, str]) -> None:
        """Warn once, if persistent workers have copies of values from before a hook set them."""
        began = self._at_begin[path]
        names = self._set_by_hooks(path, changed_names(began, now), in_workers=True)
        left = [
            f"{name} was {began.get(name) or _UNSHOWN} and is {now.get(name) or _UNSHOWN}"
            for name in names
            if not now.get(name, "").endswith(SHARED)
        ]
        if left and path not in self._said_copies:
            self._said_copies.add(path)
            rank_zero_warn(
                f"{self._owner(path, names)} were set after the persistent workers of the training loader had been "
                f"started: {'; '.join(left[:_MOST_ATTRIBUTES])}. The workers go on with their copies from before, as "
                "with torch alone, and those of a resume start with the values of then. If samples depend on them, "
                f"{_NO_COPIES}.",
                category=StatefulWarning,
            )

    def _warn_of_earlier_copies(self, path: str, now: Mapping[str, str]) -> None:
        """Warn, if the persistent workers of the run that wrote the checkpoint had copies of other values than here."""
        saved, built, wrong = self._expected.get(path, {}), self._built[path], dict[str, str]()
        # What a checkpoint does not have had not changed when workers were started.
        names = self._set_by_hooks(path, changed_names(built, now), in_workers=True)
        copies = {name: built.get(name, "") for name in names}
        for name, (latest, began, _) in saved.items():
            if (latest != began or now.get(name) != built.get(name)) and not self._is_only_written(path, name):
                copies[name] = began
        for name, began in copies.items():
            present = now.get(name, "")
            if began != present and not present.endswith(SHARED):
                wrong[name] = f"{name} was {began or _UNSHOWN} and is {present or _UNSHOWN}"
        if wrong:
            self.said.setdefault(path, set()).update(wrong)
            rank_zero_warn(
                f"{self._owner(path, wrong)} were set after the persistent workers had been started in the run that "
                f"wrote the checkpoint. It read with copies from before, and workers start with others here: "
                f"{'; '.join(wrong.values())}. If samples depend on them, the resume is not exact: {_NO_COPIES}.",
                category=StatefulWarning,
            )


def _keeps_workers(loader: StatefulLoader) -> bool:
    return bool(loader.num_workers and loader.persistent_workers)


def builder_of(trainer: pl.Trainer) -> Callable[[], dict[str, str]] | None:
    """Gives the values that the method of a module reads which builds the training loaders; None without reloads."""
    source = trainer.fit_loop._data_source
    is_module = isinstance(source.instance, (pl.LightningModule, pl.LightningDataModule))
    if not (reloads_every(trainer) and is_module):
        return None
    return values_of_builder(source.instance, source.name)


def values_of_builder(owner: Any, method: str) -> Callable[[], dict[str, str]]:
    """Gives the values, as texts, that a method reads which builds loaders."""
    return partial(_texts_read_by, owner, method)


def _texts_read_by(owner: Any, method: str) -> dict[str, str]:
    return texts(values_read_by(owner, method))


def _followed(loader: StatefulLoader, variables: Collection[str]) -> dict[str, str]:
    """Texts of what the code names that reads and collates samples, but for plain variables."""
    found: dict[str, str] = {}
    for number, dataset in enumerate(_users_of(loader.dataset)):
        values = values_samples_follow(dataset, loader.collate_fn)
        followed = texts(values)
        dicts = {name for name in followed if isinstance(values[name], dict)}
        for name, text in followed.items():
            if name not in variables and not _is_among(name.rpartition(".")[0], dicts):
                is_owned = number and not (name.startswith("collate_fn.") or _is_among(name, variables))
                found[f"{number}.{name}" if is_owned else name] = text
    return found


def _attributes(loader: StatefulLoader) -> dict[str, str]:
    found: dict[str, str] = {}
    owners = {f"{number}." if number else "": dataset for number, dataset in enumerate(_users_of(loader.dataset))}
    # What functions and methods reach may be anything.
    if not isinstance(loader.collate_fn, (FunctionType, BuiltinFunctionType, MethodType, partial)):
        owners["collate_fn."] = loader.collate_fn
    for prefix, owner in owners.items():
        state = HeldState(owner, containers=False)
        attributes = dict(state.attributes())
        for name, value in attributes_of(owner).items():
            attributes |= dict(_settings_of_modules(name, value))
        held = {name: shortened(text) for name, text in state.plain().items()} | texts(attributes)
        found |= {f"{prefix}{name}": text for name, text in held.items()}
    return found


def _settings_of_modules(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Plain settings of torch modules that change samples, as torchvision's transforms are, and of their parts."""
    if depth > _MOST_DEEP or is_lightnings(value):
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if type(value) in (list, tuple) and len(value) <= _MOST_ATTRIBUTES:
        parts = enumerate(value)
    elif isinstance(value, torch.nn.Module):
        held = vars(value)
        yield from ((f"{name}.{key}", one) for key, one in held.items() if type(one) in PLAIN and key != "training")
        parts = [*held["_modules"].items(), *(item for item in held.items() if type(item[1]) in (list, tuple))]
    for key, part in parts:
        yield from _settings_of_modules(f"{name}.{key}", part, depth + 1)


def _is_of_module(name: str) -> bool:
    """Whether a name begins with that of a module, or of the package that it is in."""
    return name.partition(".")[0] in sys.modules


def _is_among(name: str, variables: Collection[str]) -> bool:
    """Whether a value is one of some variables, or held by one."""
    return any(name == one or name.startswith(f"{one}.") for one in variables)


def _users_of(dataset: Any) -> list[Any]:
    """The user's datasets within those of this package and torch's ``ConcatDataset``."""
    if isinstance(dataset, PackedDataset):
        return _users_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [user for part in dataset.datasets for user in _users_of(part)]
    return [dataset]
