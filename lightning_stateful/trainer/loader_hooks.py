"""Puts the toolkit between Lightning's loops and the hooks that return loaders.

A loop asks its ``_data_source`` for loaders. :func:`intercept` replaces that by an :class:`InterceptedSource`, which
hands the request to the callback; a :class:`Structure` takes apart the lists and dicts that hooks return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader

from lightning_stateful.loaders.patching import is_iterable
from lightning_stateful.trainer.lightning import (
    CombinedLoader,
    TrainerFn,
    _check_dataloader_iterable,
    _DataLoaderSource,
    _is_leaf_or_primitive_container,
    _worker_check,
    pl,
)
from lightning_stateful.trainer.loader_proxy import LoaderProxy

Request = Callable[[], Any]


@dataclass(frozen=True)
class Structure:
    """Loaders by their path, and the way back to the structure that they came in.

    Attributes:
        loaders: The loaders by path, with dots; a single loader has the path ``""``.
        spec: What torch needs to build the structure again.
        mode: Mode of the CombinedLoader that they came in; None if there was none.
    """

    loaders: dict[str, Any]
    spec: Any
    mode: str | None

    @classmethod
    def of(cls, raw: Any) -> Structure:
        """Take apart what a hook returned."""
        combined = raw if isinstance(raw, CombinedLoader) else None
        # As Lightning has it, a list of numbers is a loader of them, and so is an empty list.
        leaves, spec = pytree.tree_flatten_with_path(
            raw if combined is None else combined.iterables, is_leaf=_is_leaf_or_primitive_container
        )
        mode = None if combined is None else combined._mode
        paths = [_path(keys) for keys, _ in leaves]
        # Different keys may give the same path: 0 and "0", or "a.b" and a "b" within "a". These are written by repr.
        loaders = {_path(keys, str if paths.count(_path(keys)) == 1 else repr): leaf for keys, leaf in leaves}
        return cls(loaders, spec, mode)

    def refuse_others(self, trainer: pl.Trainer) -> None:
        """Let Lightning refuse, in its own words, what cannot be iterated.

        Raises:
            TypeError: A training loader cannot be iterated.
        """
        for loader in self.loaders.values():
            if not is_iterable(loader):
                _check_dataloader_iterable(loader, trainer.fit_loop._data_source, TrainerFn.FITTING)

    def rebuilt(self, replace: Callable[[str, Any], Any]) -> Any:
        """The same structure of what ``replace(path, loader)`` returns."""
        tree = pytree.tree_unflatten([replace(path, loader) for path, loader in self.loaders.items()], self.spec)
        return tree if self.mode is None else CombinedLoader(tree, self.mode)  # type: ignore[arg-type]  # its own mode


def _path(keys: Any, text: Callable[[Any], str] = str) -> str:
    return ".".join(text(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


class InterceptedSource(_DataLoaderSource):
    """A source of loaders whose answer passes through a function.

    The loops ask their source whenever they (re)build loaders: from a data module, from hooks of a LightningModule, or
    for loaders that were passed to ``fit``. What passes here is what the loops use.

    Args:
        original: The loop's source.
        intercept: Gets the request and answers it.
        loop: The loop; the workers of loaders that it has are ended when it gets others.
    """

    def __init__(self, original: _DataLoaderSource, intercept: Callable[[Request], Any], loop: Any = None) -> None:
        super().__init__(original.instance, original.name)
        self.intercept = intercept
        self._loop = loop

    def dataloader(self) -> Any:
        """What the loop gets."""
        try:
            loaders = self.intercept(self.request)
        except BaseException:
            _undo_patches()
            raise
        if self._loop is not None:
            _end_workers(self._loop._combined_loader)
            _advise(self._loop.trainer, loaders, self.name)
        return loaders

    def request(self) -> Any:
        """What the user's hook returns, or what was passed to the trainer."""
        return super().dataloader()


def intercept(
    trainer: pl.Trainer, training: Callable[[Request], Any], evaluation: Callable[[str, Request], Any]
) -> None:
    """Let all loader requests of a trainer's loops pass through two functions, once however often it is called.

    Args:
        trainer: The trainer, with its sources attached.
        training: Gets the request for training loaders.
        evaluation: Gets the stage (``"val"``, ``"test"`` or ``"predict"``) and its request.
    """
    for stage, loop in _loops(trainer):
        function = training if stage == "train" else partial(evaluation, stage)
        if isinstance(loop._data_source, InterceptedSource):
            loop._data_source.intercept = function
        else:
            loop._data_source = InterceptedSource(loop._data_source, function, loop)


def release(trainer: pl.Trainer) -> None:
    """Undo :func:`intercept`."""
    for _, loop in _loops(trainer):
        source = loop._data_source
        if isinstance(source, InterceptedSource):
            loop._data_source = _DataLoaderSource(source.instance, source.name)


def _loops(trainer: pl.Trainer) -> list[tuple[str, Any]]:
    """The loops that ask for loaders, with the stage of each."""
    return [
        ("train", trainer.fit_loop),
        ("val", trainer.fit_loop.epoch_loop.val_loop),
        ("val", trainer.validate_loop),
        ("test", trainer.test_loop),
        ("predict", trainer.predict_loop),
    ]


def request_training_loaders(trainer: pl.Trainer) -> Any:
    """Ask the user's side for the training loaders, as the fit loop would."""
    source = trainer.fit_loop._data_source
    return source.request() if isinstance(source, InterceptedSource) else source.dataloader()


def discard_training_loaders(trainer: pl.Trainer) -> None:
    """Throw away the loaders that the fit loop has built, and end their workers, so that it asks for them anew."""
    fit_loop: Any = trainer.fit_loop
    if fit_loop._combined_loader is None:
        return
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    # Lightning's own teardown fails on a fetcher that has been torn down.
    fit_loop._combined_loader = fit_loop._data_fetcher = None


def _undo_patches() -> None:
    """Undo Lightning's patches of torch's classes, which it leaves in place where a hook raises an error."""
    for base in (DataLoader, BatchSampler):
        for kind in (base, *get_all_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if f"__old{name}" in vars(kind):
                    setattr(kind, name, getattr(kind, f"__old{name}"))
                    delattr(kind, f"__old{name}")


def _advise(trainer: pl.Trainer, loaders: Any, name: str) -> None:
    """Give Lightning's advice on workers, which it has for a DataLoader only."""
    for proxy in Structure.of(loaders).loaders.values():
        if isinstance(proxy, LoaderProxy):
            _worker_check(trainer, proxy.original, name)


def _end_workers(combined: CombinedLoader | None) -> None:
    """End the workers of our loaders that are replaced; references in a circle would keep them alive for long."""
    if combined is None:
        return
    proxies = [leaf for leaf in combined.flattened if isinstance(leaf, LoaderProxy)]
    if combined._iterator is not None and len(proxies) == len(combined.flattened):
        # A pass that was broken off has workers too. iter() drops it; the new pass starts none before its first batch.
        iter(combined)
    for proxy in proxies:
        proxy.end_workers()
