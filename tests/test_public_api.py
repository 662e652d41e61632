from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import lightning_asgd
from tests.test_architecture import FILES, PACKAGE

MODULES = sorted(name for name in FILES if name != "__init__")


@pytest.mark.parametrize("name", lightning_asgd.__all__)
def test_public_name_can_be_imported_and_is_documented(name: str) -> None:
    value = getattr(lightning_asgd, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__.startswith(f"{PACKAGE}.")
        assert (value.__doc__ or "").strip()
    else:
        assert isinstance(value, str)


def test_public_names_are_sorted_and_unique() -> None:
    assert lightning_asgd.__all__ == sorted(set(lightning_asgd.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_asgd' has no attribute 'Nonsense'"):
        lightning_asgd.Nonsense  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_modules_are_documented(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    assert (module.__doc__ or "").strip()
    names = getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")])
    assert len(set(names)) == len(names)
    for public in names:
        value = getattr(module, public)
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
            doc = value.__doc__ or ""
            assert doc.strip(), public
            assert not doc.startswith(f"{public}("), f"{public} has only the docstring that dataclass makes"


def test_the_page_on_algorithms_names_all_of_them_and_none_that_is_not() -> None:
    from lightning_asgd import algorithms

    page = (Path(lightning_asgd.__file__).parent.parent / "docs" / "algorithms.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)\(", page)) - {"ASGDStrategy", "Advanced"}
    assert not {name for name in named if not hasattr(algorithms, name)}
    public = {n for n in algorithms.__all__ if n[0].isupper()} - {"Algorithm", "Transform", "Barrier"}
    assert public <= named
    assert all(f'`"{name}"`' in page or f', `"{name}"`' in page for name in algorithms._NAMED)
