from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not
from matplotlib import pyplot
from matplotlib.figure import Figure

from docs import pictures
from lightning_asgd.report import picture_style
from lightning_asgd.report.picture_style import DARK, PAPER, SERIES

ROOT = Path(__file__).parents[2]


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


def test_the_plots_of_the_pages_are_drawn_from_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plot of a page has a twin for the dark theme, and colours of its palette only."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the examples'
    with pyplot.rc_context():
        drawn = {(name, theme): text for name, svg in pictures.plots() for theme, text in pictures.twins(svg)}
    kept = {file.name for theme in pictures.THEMES for file in pictures.IMAGES.glob(f"*-{theme}.svg")}
    assert kept == {f"{name}-{theme}.svg" for name, theme in drawn}
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for (name, theme), text in drawn.items():
        assert theme == "dark" or f"images/{name}-light.svg" in pages
        assert len(text) < 60_000
        assert {*re.findall("#[0-9a-f]{6}", text)} <= {*pictures.THEMES[theme].values()}, name
