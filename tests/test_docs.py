"""The site builds without a warning, its links lead somewhere, and what it says of commands and errors is there.

Its Python blocks are run by tests/conformance/test_pages.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from lightning_asgd.cli.command_line import COMMANDS
from lightning_asgd.core.foundation import errors
from lightning_asgd.core.lightning import strategy_options
from tests.helpers import pages
from tests.helpers.project import EXTRAS
from tests.test_architecture import TREES

ROOT = pages.ROOT
TEXTS = sorted([*pages.PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
BASH = [block for page in pages.PAGES for block in pages.blocks(page, "bash")]
YAML = [block for page in pages.PAGES for block in pages.blocks(page, "yaml")]
OF_CLUSTERS = {"kubectl", "sbatch", "squeue", "srun"}  # not on every machine that runs the tests
OF_THE_SHELL = {"export", "until", "do", "done", "umask"}
LANGUAGES = {"bash", "python", "toml", "yaml"}


def named(block: pages.Block) -> str:
    return f"{pages.name_of(block.page)}:{block.line}"


# ---------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder."""
    pytest.importorskip("furo", reason="the group docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--builder", "html"]
    done = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(pages.DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


class _Links(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.fetched: list[str] = []  # with the page: scripts, styles, pictures
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.targets.append(value)
                if tag != "a":
                    self.fetched.append(value)


@pytest.mark.timeout(600)
def test_the_site_builds_without_warnings_and_every_local_link_and_anchor_resolves(site: Path) -> None:
    found = {path: _Links(path.read_text()) for path in site.rglob("*.html")}
    assert {"index.html", "changelog.html", "api"} <= {path.name for path in site.iterdir()}
    dead = []
    for path, links in found.items():
        for link in links.targets:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                assert target.scheme == "https", link
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            if not file.is_file():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif file in found and unquote(target.fragment) not in found[file].anchors:
                dead.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not dead


@pytest.mark.timeout(600)
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not [link for link in _Links(path.read_text()).fetched if urlsplit(link).netloc], path.name


@pytest.mark.timeout(600)
def test_every_commands_help_stands_on_a_page(site: Path) -> None:
    text = (site / "commands.html").read_text()
    assert all(f"usage: lightning-asgd {command} [-h]" in text for command in COMMANDS)


@pytest.mark.timeout(600)
def test_a_search_finds_no_internals(site: Path) -> None:
    found = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    terms = {found["docnames"].index(page) for page in ("architecture", "changelog")}
    of = [{pages} if isinstance(pages, int) else set(pages) for pages in found["terms"].values()]
    assert of
    assert not [1 for pages in of if pages & terms]


@pytest.mark.timeout(600)
def test_every_public_name_stands_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'id="(lightning_asgd\.[\w.]+)"', text))
    for package in ("lightning_asgd", *(f"lightning_asgd.{name}" for name in ("algorithms", "errors", "simulation"))):
        module = importlib.import_module(package)
        classes = [name for name in module.__all__ if inspect.isclass(getattr(module, name))]
        assert classes
        for name in classes:
            cls = getattr(module, name)
            paths = package, cls.__module__, f"lightning_asgd.{cls.__module__.rpartition('.')[2]}"
            assert {f"{path}.{name}" for path in paths} & anchors, f"{package}.{name}"


@pytest.mark.parametrize("text", TEXTS, ids=pages.name_of)
def test_links_between_files_of_the_repository_resolve(text: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text.read_text()):
        assert urlsplit(link).scheme == "https" or (text.parent / link).exists(), link


# ---------------------------------------------------------------------- blocks of code


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_all_blocks_of_code_are_found(page: Path) -> None:
    fences = re.findall(r"^ *```(\w+)$", page.read_text(), re.MULTILINE)
    assert set(fences) <= LANGUAGES
    hidden = page.read_text().count("<!-- python\n")
    assert len(pages.blocks(page, *LANGUAGES)) == len(fences) + hidden


def commands(script: str) -> Iterator[list[str]]:
    """The words of every command of a script, without redirections of its environment."""
    for line in script.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|[;|()]" if line.startswith("(") else r"&&|[;|]", line):
            words = shlex.split(part, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words


def check_command(words: list[str]) -> None:
    program, *rest = words
    if program in OF_THE_SHELL:
        return
    assert program in OF_CLUSTERS or shutil.which(program, path=f"{Path(sys.executable).parent}:/usr/bin:/bin"), program
    if program == "srun":
        check_command([word for word in rest if not word.startswith("-")])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest[0]
    elif program == "lightning-asgd":
        assert rest[0] in COMMANDS, rest[0]
    elif program in ("python", "torchrun"):
        (script,) = (word for word in rest if word.endswith(".py"))
        assert script == "train.py" or (ROOT / script).is_file(), script  # the tutorial says what is in train.py
    elif program == "pip":
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert {*extras.split(",")} <= EXTRAS.keys(), extras


@pytest.mark.parametrize("block", BASH, ids=named)
def test_commands_exist(block: pages.Block) -> None:
    for words in commands(block.text):
        check_command(words)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    scripts = ("nonsense", "make nonsense", "lightning-asgd nonsense", "python nonsense.py", "pip install 'x[nonsens]'")
    for script in scripts:
        with pytest.raises(AssertionError):
            check_command(*commands(script))


def classes_named(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every ``class_path`` in a configuration, with its ``init_args``."""
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"], value.get("init_args", {})
        for inner in value.values():
            yield from classes_named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from classes_named(inner)


@pytest.mark.parametrize("block", YAML, ids=named)
def test_configurations_name_classes_and_arguments_that_exist(block: pages.Block) -> None:
    for document in yaml.safe_load_all(block.text):
        assert isinstance(document, dict)
        for path, arguments in classes_named(document):
            module, _, name = path.rpartition(".")
            signature = inspect.signature(getattr(importlib.import_module(module), name))
            assert set(arguments) <= set(signature.parameters), path


@pytest.mark.parametrize("page", ["settings.md", "reliability.md"])
def test_a_page_that_names_ways_to_start_workers_names_all(page: str) -> None:
    text = (pages.DOCS / page).read_text()
    ways = typing.get_args(typing.get_type_hints(strategy_options.StrategyOptions)["start_method"])
    assert not [way for way in ways if way != "popen" and f'"{way}"' not in text]


# ---------------------------------------------------------------------- errors

TROUBLE = (pages.DOCS / "troubleshooting.md").read_text().split("\n## No error, but")[0]


def texts_of_the_package() -> set[str]:
    """Every string of the package, with an ellipsis for what is filled in."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[sdr]", "…", node.value))
    return {re.sub("…+", "…", text.replace("'…'", "…")) for text in found}


def quoted() -> list[str]:
    """The texts that the page explains: in first cells of tables, and where definitions stand below."""
    lines = TROUBLE.splitlines()
    terms = [line for line, below in itertools.pairwise(lines) if below.startswith(": ")]
    terms += [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [text for term in terms for text in re.findall(r"`([^`]+)`", term)]


def test_errors_that_are_explained_are_those_that_are_raised() -> None:
    texts, quotes = texts_of_the_package(), quoted()
    assert len(quotes) > 40
    assert not [quote for quote in quotes if not any(quote.strip("…") in text for text in texts)]


def test_every_class_of_errors_is_explained() -> None:
    headings = set(re.findall(r"^###? (\w+Error)$", TROUBLE, re.MULTILINE))
    public = {name for name in errors.__all__ if name[0].isupper()}
    assert headings == public - {"ASGDError"}
