from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not
from matplotlib import pyplot
from matplotlib.figure import Figure

from lightning_asgd.report import picture_style
from lightning_asgd.report.picture_style import DARK, PAPER, SERIES


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


# What readers without red, green or blue cones see, in linear RGB: Machado, Oliveira and Fernandes (2009).
CONES = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def seen(colour: str, cones: str) -> npt.NDArray[np.float64]:
    """A colour in CIELAB, where about 2 can just be told apart."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(np.array(CONES[cones]) @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("palette", [PAPER, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("cones", CONES)
def test_the_colours_of_curves_can_be_told_apart(palette: dict[str, str], cones: str) -> None:
    names = ("blue", "orange", "green", "purple", "teal", "gold", "rose", "grey", "red")
    assert {PAPER[name] for name in names} >= {*SERIES}
    for one, other in itertools.combinations(names, 2):
        assert np.linalg.norm(seen(palette[one], cones) - seen(palette[other], cones)) > 15, (one, other)


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
