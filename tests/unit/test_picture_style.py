from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not
from matplotlib import pyplot
from matplotlib.figure import Figure

from lightning_asgd.report import picture_style


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (2.2, 5.5, ["3", "4", "5"]),
        (0.3, 4.0, ["0.3", "0.5", "1", "2", "3"]),
        (0.02, 3.0, ["0.03", "0.1", "0.3", "1", "3"]),
        (1, 20_000, ["1", "10", "100", "1,000", "10,000"]),
    ],
)
def test_a_logarithmic_axis_has_a_few_plain_numbers(low: float, high: float, shown: list[str]) -> None:
    axes = Figure().subplots()
    axes.set_ylim(low, high)
    picture_style.logarithmic(axes)
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    assert axes.yaxis.get_major_formatter().format_ticks(ticks) == shown


def test_the_picture_of_all_algorithms_is_as_wide_as_its_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it sets this, and the path, for itself
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    algorithms = importlib.import_module("benchmarks.algorithms")
    tasks = [algorithms.Task(name, name.title(), "loss", 0.01, 5.0, 0.1, {}) for name in ("digits", "characters")]
    curve = [(0.4 * i, 1000 * i, 2.3 * math.exp(-0.2 * i)) for i in range(12)]
    runs = [{"task": task.name, "name": name, "curve": curve} for task in tasks for name in algorithms.SHOWN]
    drawn: list[Figure] = []
    with pyplot.rc_context():
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", drawn.append)
            algorithms.draw(runs, tasks, tmp_path / "picture.png")
        (figure,) = drawn
        right = max(axes.get_position().x1 for axes in figure.axes)
        pyplot.close(figure)
    assert right > 0.95
    assert len(figure.legends[0].get_texts()) == len(algorithms.SHOWN)
