from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.test_processes import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_the_quickstart_trains_prints_a_table_and_saves_a_picture(tmp_path: Path) -> None:
    copy = tmp_path / "examples"
    copy.mkdir()
    for name in ("quickstart.py", "digits.py"):
        (copy / name).write_text((ROOT / "examples" / name).read_text())
    done = subprocess.run(
        [sys.executable, str(copy / "quickstart.py"), "--only", "asgd", "--fast"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("│ A-SGD, 2 workers")]
    accuracy = float(row.split("│")[2])
    assert accuracy > 0.8  # two epochs
    assert (tmp_path / "results" / "quickstart.png").stat().st_size > 10_000
