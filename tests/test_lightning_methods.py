"""Methods of Lightning that this package wraps, replaces or relies on are those that it was checked with.

tests/data/lightning_methods.json lists them: what each is used for, and digests of its code with the releases that have
it. Comments, docstrings, annotations and layout do not count. CONTRIBUTING.md says what to do when Lightning releases.
To add releases to the record, from their wheels: python -m tests.test_lightning_methods WHEEL ...
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "data" / "lightning_methods.json"
RECORD: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
PACKAGES = {"pytorch-lightning": "pytorch_lightning", "lightning": "lightning/pytorch"}
IGNORED = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}
MISSING = "missing"


def number(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def spelled(node: Any) -> str:
    """Code as text, the same in all versions of Python, which ``ast.dump`` and ``ast.unparse`` are not."""
    if isinstance(node, list):
        kept = [e for e in node if not (isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant))]  # no docstrings
        return f"[{','.join(map(spelled, kept))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, v) for name, v in ast.iter_fields(node) if name not in IGNORED and v is not None and v != []]
    return f"{type(node).__name__}({','.join(f'{name}={spelled(v)}' for name, v in fields)})"


def digest_of(source: str, owner: str, method: str) -> str:
    """Digest of a method, the same in both packages of Lightning; of a property with its setter."""
    source = source.replace("lightning.pytorch", "pytorch_lightning").replace("lightning.fabric", "lightning_fabric")
    body = ast.parse(source).body
    if owner:
        body = [each for cls in body if isinstance(cls, ast.ClassDef) and cls.name == owner for each in cls.body]
    found = [spelled(each) for each in body if isinstance(each, ast.FunctionDef) and each.name == method]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16] if found else MISSING


def digests_in(root: Any, package: str) -> dict[str, str]:
    """Digests of all methods in the folder, or the wheel, that holds a package of Lightning."""
    found = {}
    for path in RECORD:
        module, _, name = path.partition(":")
        owner, _, method = name.rpartition(".")
        file = root.joinpath(f"{package}/{module.replace('.', '/')}.py")
        found[path] = digest_of(file.read_text(encoding="utf-8"), owner, method) if file.exists() else MISSING
    return found


def differences(record: dict[str, dict[str, Any]], release: str, found: dict[str, str]) -> list[str]:
    """The methods that are not as recorded for a release or, if it is not recorded, for the latest one before it."""
    said = []
    for path, entry in record.items():
        of = {each: digest for digest, releases in entry["digests"].items() for each in releases.split()}
        expected = of[max((each for each in of if number(each) <= number(release)), key=number)]
        if found[path] != expected:
            releases = ", ".join(entry["digests"][expected].split())
            said.append(f"{path} differs from that of {releases}. It matters because {entry['used_for']}.")
    return said


@pytest.mark.parametrize("distribution", PACKAGES)
def test_the_methods_of_lightning_are_those_that_were_checked(distribution: str) -> None:
    package = PACKAGES[distribution]
    spec = importlib.util.find_spec(package.partition("/")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"{distribution} is not installed")
    release = importlib.metadata.version(distribution)
    said = differences(RECORD, release, digests_in(Path(spec.origin).parents[1], package))
    assert not said, "\n".join([f"{distribution} {release}:", *said, "CONTRIBUTING.md says what to do."])


def test_every_method_is_recorded_for_the_same_releases() -> None:
    assert len({tuple(sorted(" ".join(entry["digests"].values()).split())) for entry in RECORD.values()}) == 1


def test_a_method_that_has_changed_is_named() -> None:
    entry = {"used_for": "somebody calls it", "digests": {"old": "2.5.0 2.5.6", "new": "2.6.0 2.6.6"}}
    said = ["loops:Loop.run differs from that of 2.6.0, 2.6.6. It matters because somebody calls it."]
    for release, digest, expected in (
        ("2.7.0", "other", said),
        ("2.7.0", "old", said),
        ("2.7.0", "new", []),
        ("2.6.0", "old", said),
        ("2.5.7", "old", []),
    ):
        assert differences({"loops:Loop.run": entry}, release, {"loops:Loop.run": digest}) == expected


def test_only_what_a_method_does_counts() -> None:
    before = 'class A:\n  def f(self, n):\n    """Say."""\n    import lightning.pytorch\n    return n + 1\n'
    same = "class A:\n    def f(self, n: int) -> int:\n        import pytorch_lightning  # x\n        return (n + 1)\n"
    assert digest_of(before, "A", "f") == digest_of(same, "A", "f") == "684b751f57e66614"
    assert digest_of(before.replace("1", "2"), "A", "f") != digest_of(before, "A", "f")
    assert digest_of(before, "A", "g") == digest_of(before, "", "f") == MISSING


if __name__ == "__main__":
    for wheel in sys.argv[1:]:
        distribution, release = Path(wheel).name.split("-")[:2]
        for path, digest in digests_in(zipfile.Path(wheel), PACKAGES[distribution.replace("_", "-")]).items():
            digests = RECORD[path]["digests"]
            digests[digest] = " ".join(sorted({*digests.get(digest, "").split(), release}, key=number))
            twice = sum(release in releases.split() for releases in digests.values()) > 1
            assert not twice, f"{path} of {distribution} {release} is not that of the other package, or of the record"
    RECORDED.write_text(json.dumps(RECORD, indent=1) + "\n")
