"""Five faults in a run with two servers: a short version of benchmarks/storm.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import environment

STORM = Path(__file__).parents[2] / "benchmarks" / "storm.py"
SECONDS = 170


@pytest.mark.timeout(SECONDS + 10)
def test_after_five_faults_every_sample_was_applied_once_and_every_update_counts() -> None:
    done = subprocess.run(
        [sys.executable, str(STORM), "--short"],
        env=environment(lean=False),  # the examples' data are of scikit-learn, which needs scipy
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "5/5" in said, said
