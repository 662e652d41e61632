"""What a user's program calls by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError


def module_and_loader(reference: str) -> tuple[Any, Any]:
    """A LightningModule and a loader of its training data, from a class or a function that needs no arguments."""
    make = named(reference)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        text = f"{reference} cannot be called without arguments: {error}. Expected a class or function that can."
        raise ConfigurationError(text) from error
    made = make()
    module, data = made if isinstance(made, tuple) and len(made) == 2 else (made, made)
    load = getattr(data, "train_dataloader", None)
    if data is module and (load is None or load.__module__.endswith("core.hooks")):  # Lightning's own
        raise ConfigurationError(
            f"{reference} made a {type(made).__name__} without train_dataloader(). Expected a LightningModule with "
            "one, or a function that returns (module, loader) or (module, datamodule)."
        )
    if load is None:
        return module, data
    data.prepare_data()  # as a Trainer does
    data.setup("fit")
    return module, load()


def named(reference: str) -> Any:
    """The object of that name in a module, or in a file.

    Args:
        reference: ``"package.module:Name"`` or ``"path/to/script.py:Name"``. Modules are looked for in the present
            folder too. A script is imported: what it guards with ``if __name__ == "__main__":`` is not run.

    Raises:
        ConfigurationError: there is no such module, file or name.
    """
    place, colon, name = reference.rpartition(":")
    if not (place and colon and name):
        raise ConfigurationError(f"{reference!r} has no name. Expected 'package.module:Name' or 'script.py:Name'.")
    module = _script(Path(place)) if place.endswith(".py") else _module(place)
    if not hasattr(module, name):
        raise ConfigurationError(f"{place} has no {name!r}. Expected a name that is defined there, outside functions.")
    return getattr(module, name)


def _module(dotted: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"There is no module {error.name!r}. Expected one that can be imported.") from error


def _script(path: Path) -> Any:
    if not path.is_file():
        raise ConfigurationError(f"There is no file {str(path)!r}. Expected the path of a Python script.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(path)!r} cannot be imported. Expected a Python script.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where processes of a data loader look for its classes
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script that it runs
    spec.loader.exec_module(module)
    return module
