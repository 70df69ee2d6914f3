"""Makes a user's data of an import path, and of the ``data:`` section of a LightningCLI's YAML file."""

from __future__ import annotations

import importlib.util
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_stateful.errors import ConfigurationError, StatefulError


def made_by(factory: str, config: Mapping[str, Any] | None = None) -> Any:
    """Import a factory and call it.

    Args:
        factory: ``package.module:name`` or ``path/to/file.py:name``, of a function or class that takes no arguments
            but those in the configuration, or of what it would return: a LightningDataModule, a LightningModule with
            loaders, or a DataLoader or a list or dict of them.
        config: Arguments of the factory, as a LightningCLI's YAML file has them.

    Raises:
        ConfigurationError: The factory cannot be found, fails, or makes something else.
    """
    from torch.utils.data import DataLoader

    from lightning_stateful.loaders.patching import is_iterable

    try:
        found = imported(factory)
        is_data = isinstance(found, (DataLoader, dict, list)) or (
            hasattr(found, "train_dataloader") and not isinstance(found, type)
        )
        made = found if is_data or not callable(found) else _called(found, config)
    except StatefulError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{factory} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(made, (str, bytes)) or not (hasattr(made, "train_dataloader") or is_iterable(made)):
        given = "is" if made is found else "returns"
        raise ConfigurationError(
            f"{factory} {given} {reprlib.repr(made)}, and a data module, a LightningModule with loaders, or a "
            "DataLoader or a list or dict of them is needed."
        )
    return made


def imported(path: str) -> Any:
    """Import what a path names.

    Args:
        path: ``package.module:name`` or ``path/to/file.py:name``; modules are looked for in the working folder, too.
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ConfigurationError(f"{path!r} names no factory: write package.module:function.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _imported_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _imported_module(module: str) -> Any:
    if not module.endswith(".py"):
        return import_module(module)
    path = Path(module).resolve()
    name = path.stem
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ModuleNotFoundError(f"there is no file {module}")
    # By its name workers find it, too.
    sys.path.insert(0, str(path.parent))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _called(found: Callable[..., Any], config: Mapping[str, Any] | None) -> Any:
    if not config:
        return found()
    parser = _parser()
    if isinstance(found, type):
        parser.add_class_arguments(found, "data")
    else:
        parser.add_function_arguments(found, "data")
    # Its name since version 4.49.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = instantiate(parser.parse_object({"data": dict(config)})).data
    return made if isinstance(found, type) else found(**made)


def _parser() -> Any:
    try:
        jsonargparse: Any = import_module("jsonargparse")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "A YAML file of the LightningCLI needs jsonargparse: pip install 'jsonargparse[signatures]'"
        ) from error
    return jsonargparse.ArgumentParser(exit_on_error=False)


@dataclass(frozen=True)
class CommandLineConfig:
    """The parts of a LightningCLI's YAML file that say what it trains on.

    Attributes:
        factory: The ``class_path`` of its ``data:`` section; None where that has arguments alone.
        arguments: The arguments of the class, or of the factory.
        seed: Its ``seed_everything``, where that is a number.
    """

    factory: str | None
    arguments: dict[str, Any]
    seed: int | None

    @classmethod
    def read(cls, path: str | Path) -> CommandLineConfig:
        """Read a file.

        Raises:
            ConfigurationError: It cannot be read, or has no ``data:`` section.
        """
        yaml: Any = import_module("yaml")
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        section = found.get("data") if isinstance(found, dict) else None
        if not isinstance(section, dict):
            raise ConfigurationError(f"{path} has no section data:, as a LightningCLI's file has.")
        seed = found.get("seed_everything")
        seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
        if "class_path" not in section:
            return cls(None, section, seed)
        module, _, name = str(section["class_path"]).rpartition(".")
        return cls(f"{module}:{name}", dict(section.get("init_args") or {}), seed)


def path_of(factory: Any) -> str:
    """The import path of a factory, so that another process can import it.

    Args:
        factory: A path, or a function, class or object at the level of a module.

    Raises:
        ConfigurationError: It cannot be imported by a name.
    """
    if isinstance(factory, str):
        return factory
    name, module = getattr(factory, "__qualname__", ""), sys.modules.get(getattr(factory, "__module__", ""))
    if module is None or not name or "<" in name:
        raise ConfigurationError(
            f"{reprlib.repr(factory)} is made in new processes, which must be able to import it: pass a function or "
            "class at the level of a module, or 'package.module:name'."
        )
    file = inspect.getsourcefile(module)
    spec = None if module.__name__ == "__main__" else importlib.util.find_spec(module.__name__)
    if spec is not None and spec.origin == module.__file__:
        return f"{module.__name__}:{name}"
    if file is None:
        raise ConfigurationError(f"{name} is of no file that another process could import.")
    return f"{file}:{name}"
