"""Colours and panels of the benchmarks' figures."""

from collections.abc import Iterable
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey as well.
BLACK = "#000000"
BLUE = "#0072B2"
GREEN = "#009E73"
ORANGE = "#E69F00"
PURPLE = "#CC79A7"
VERMILION = "#D55E00"
# For what stays in the background.
GREY = "#666666"
LIGHT_GREY = "#BBBBBB"

_STYLE: Any = {"axes.grid": True, "grid.alpha": 0.25}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def panels(
    rows: int,
    columns: int,
    size: tuple[float, float],
    grid: Literal["x", "y", "both"] = "both",
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its panels with a light grid; options of `subplots`."""
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": grid}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [*axes.ravel()]


def legend_below(figure: Figure, handles: Iterable[Any], labels: Iterable[str]) -> None:
    """Draw one legend for all panels, in a row beneath them."""
    names = list(labels)
    figure.legend(
        list(handles), names, loc="outside lower center", ncols=len(names), fontsize=9
    )
