"""The lists, dicts and CombinedLoaders in which people hand over their loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from lightning_stateful.loaders.patching import is_iterable
from lightning_stateful.trainer.lightning import (
    CombinedLoader,
    TrainerFn,
    _check_dataloader_iterable,
    _is_leaf_or_primitive_container,
    pl,
)


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
        # Of paths that look alike, as of the keys 0 and "0", or "a.b" and "a" with "b" in it, the keys are spelled out.
        loaders = {_path(keys, str if paths.count(_path(keys)) == 1 else repr): leaf for keys, leaf in leaves}
        return cls(loaders, spec, mode)

    def refuse_others(self, trainer: pl.Trainer) -> None:
        """Let Lightning refuse, in its own words, what cannot be iterated.

        Raises:
            TypeError: That is so of a training loader.
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
