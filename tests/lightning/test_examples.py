from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.test_processes import environment

ROOT = Path(__file__).parents[2]


def run_example(folder: Path, seconds: float, name: str, *arguments: str) -> str:
    """Run a copy of an example, and return what it printed."""
    copy = folder / "examples"
    copy.mkdir()
    for file in (name, "digits.py"):
        (copy / file).write_text((ROOT / "examples" / file).read_text())
    done = subprocess.run(
        [sys.executable, str(copy / name), *arguments],
        env=environment(lean=False),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_the_quickstart_trains_prints_a_table_and_saves_a_picture(tmp_path: Path) -> None:
    output = run_example(tmp_path, 100, "quickstart.py", "--only", "asgd", "--fast")
    (row,) = [line for line in output.splitlines() if line.startswith("│ A-SGD, 2 workers")]
    accuracy = float(row.split("│")[2])
    assert accuracy > 0.8  # two epochs
    assert (tmp_path / "results" / "quickstart.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_monitored_example_ends_with_a_report(tmp_path: Path) -> None:
    output = run_example(tmp_path, 100, "monitor.py", "--fast")
    report = Path(output.splitlines()[-1])
    assert report == tmp_path / "results" / "monitor" / "report" / "report.html"
    assert "worker 1" in report.read_text()
    assert len(list(report.parent.glob("*.png"))) == 6


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_paper_s_experiments_end_with_a_table_verdicts_and_a_picture(tmp_path: Path) -> None:
    output = run_example(tmp_path, 160, "paine2013.py", "--quick")
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│ ")]
    runs = ["1 worker", "2 workers, cold, nsync 10", "2 workers, warm, nsync 10", "2 workers, warm, nsync 1"]
    assert rows == runs
    for experiment in "123":
        claims = [line for line in output.splitlines() if line.startswith(f"{experiment}. ")]
        assert claims
        assert all("seen" in claim for claim in claims)
    assert (tmp_path / "results" / "paine2013.png").stat().st_size > 10_000
