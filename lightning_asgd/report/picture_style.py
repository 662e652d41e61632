"""How pictures look: those of the report, of examples and benchmarks, and of the docs. One palette, one style."""

from __future__ import annotations

import math
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError

PAPER = {
    "blue": "#2a55cc",
    "orange": "#e08a00",
    "green": "#16863a",
    "purple": "#5f1c71",
    "teal": "#16565c",
    "gold": "#c9b458",
    "rose": "#cb8f88",
    "red": "#cc1420",
    "grey": "#707884",
    "calm": "#9dbce4",
    "faint": "#b9cde6",
    "rest": "#d9dde3",
    "ink": "#2b3139",
    "soft": "#666d78",
    "line": "#e3e6ea",
}
"""Colours on white by name. Pages replace them by variables of these names, which have other values in the dark."""

DARK = {
    "blue": "#6680f7",
    "orange": "#d58518",
    "green": "#9ad98a",
    "purple": "#ab7abf",
    "teal": "#4fd8e6",
    "gold": "#f0dd4a",
    "rose": "#e4b0b0",
    "red": "#e05457",
    "grey": "#7d828b",
    "calm": "#41638f",
    "faint": "#34507a",
    "rest": "#3a414b",
    "ink": "#e6e9ed",
    "soft": "#a3abb6",
    "line": "#343a43",
}
"""The same colours on a dark page."""

SERIES = [PAPER[name] for name in ("blue", "orange", "green", "purple", "teal", "gold", "rose", "grey")]
"""Colours of curves and workers, in this order."""

SYSTEM_COLOURS = {
    "A-SGD": PAPER["blue"],
    "DDP": PAPER["orange"],
    "DDP, all gradients after backward": PAPER["rose"],
    "layer-wise": PAPER["purple"],
    "local SGD": PAPER["green"],
    "alone": PAPER["grey"],
    "one alone": PAPER["grey"],
    "unconnected": PAPER["rest"],
    "bare torch": PAPER["line"],
    "bare local SGD": PAPER["calm"],
    "A-SGD loop": PAPER["faint"],
    "torchft": PAPER["teal"],
    "hivemind": PAPER["gold"],
}
"""Colours of the systems that are compared, in every picture."""

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": PAPER["soft"],
    "axes.labelcolor": PAPER["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": PAPER["ink"],
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": PAPER["line"],
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "text.color": PAPER["ink"],
    "xtick.color": PAPER["soft"],
    "xtick.labelcolor": PAPER["ink"],
    "ytick.color": PAPER["soft"],
    "ytick.labelcolor": PAPER["ink"],
}
"""Settings of matplotlib."""


def pyplot() -> Any:
    """The pyplot of matplotlib in this style, without a display.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigurationError("Pictures need matplotlib: pip install matplotlib.") from error
    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({**STYLE, "axes.prop_cycle": plt.cycler(color=SERIES)})
    return plt


def logarithmic(axes: Any, which: str = "y") -> None:
    """Make an axis logarithmic, with plain numbers. Its limits are set, or all is drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set(**{f"{which}scale": "log"})
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    few, some = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0)
    steps = few if decades < 0.8 else some if decades < 1.5 else (1.0, 3.0) if decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(10, steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
