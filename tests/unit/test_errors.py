from __future__ import annotations

import inspect
import pickle

import pytest

from lightning_asgd.core.foundation import errors
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, error_from

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, ASGDError)]


def test_the_tree_in_the_docstring_is_the_one_that_exists() -> None:
    tree = (errors.__doc__ or "").split("::")[1].split("\n\n")[1]
    drawn = {line.strip("│├└─ ").split()[0] for line in tree.splitlines()}
    assert drawn == {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_made_from_one_string_and_survives_pickling(cls: type[ASGDError]) -> None:
    error = cls("what happened")
    assert str(error) == "what happened"
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what happened"


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_rebuilt_from_its_name_and_text(cls: type[ASGDError]) -> None:
    error = error_from(cls.__name__, "what happened")
    assert type(error) is cls
    assert str(error) == "what happened"


@pytest.mark.parametrize("name", ["KeyError", "SystemExit", "error_from", ""])
def test_an_unknown_name_becomes_the_root_and_stays_readable(name: str) -> None:
    error = error_from(name, "what happened")
    assert type(error) is ASGDError
    assert str(error) == f"{name}: what happened"


def test_a_wrong_setting_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise ConfigurationError("wrong")
