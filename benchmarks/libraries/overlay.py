"""Third-party libraries, each in its own environment on top of this program's.

An overlay is a virtual environment whose path also leads to this program's packages. pip sees those, so it installs
only what is missing, or what the library needs in another version. Torch, Lightning and torchmetrics are pinned: pip
rejects a library that conflicts with them, and its reason is kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["OverlayError", "held", "overlay", "reason"]

HELD = ("torch", "torchvision", "pytorch-lightning", "lightning", "torchmetrics")
INSTALL_S = 1800.0
_REASON_LINES = 6


class OverlayError(RuntimeError):
    """A library cannot be used beside this torch and this Lightning; the text says why."""


def overlay(folder: Path, requirements: tuple[str, ...]) -> Path:
    """Make an overlay, or find an overlay that an earlier call made from the same requirements.

    Args:
        folder: of the overlay.
        requirements: as pip takes them.

    Returns:
        the overlay's Python.

    Raises:
        OverlayError: pip cannot install the requirements.
    """
    python = folder / "bin" / "python"
    pins = held()
    stamp = hashlib.sha256("\n".join([sys.version, sys.prefix, *requirements, *pins]).encode()).hexdigest()
    done = folder / "installed.txt"
    if done.exists() and done.read_text() == stamp:
        return python
    done.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(packages) / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += ["--prefer-binary", "-c", constraints, *requirements]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OverlayError(f"pip was not done within {INSTALL_S:g} s") from error
    if pip.returncode != 0:
        raise OverlayError(f"pip finds no version that goes with {', '.join(pins)}\n{reason(pip.stdout + pip.stderr)}")
    done.write_text(stamp)
    return python


def held() -> list[str]:
    """What pip must leave as it is."""
    return [f"{name}=={installed}" for name in HELD if (installed := _installed(name))]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def reason(output: str) -> str:
    """The lines of pip's output that say why it failed."""
    lines = [line.strip() for line in output.splitlines()]
    conflicts = [line for line in lines if "depends on" in line or "user requested" in line]
    errors = [line for line in lines if line.startswith("ERROR") and "ResolutionImpossible" not in line]
    return "\n".join(dict.fromkeys([*errors[:_REASON_LINES], *conflicts[:_REASON_LINES]]))
