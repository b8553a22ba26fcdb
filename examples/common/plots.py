"""Colours and panels of figures."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
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

Grid = Literal["x", "y", "both"]


def style(grid: Grid = "both") -> AbstractContextManager[None]:
    """Return a context in which axes have a light grid, and no frame at two sides."""
    options: Any = {"axes.grid": True, "axes.grid.axis": grid, "grid.alpha": 0.25}
    options |= {"axes.spines.top": False, "axes.spines.right": False}
    return matplotlib.rc_context(options)


def panels(
    rows: int,
    columns: int,
    size: tuple[float, float],
    grid: Grid = "both",
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels; the options are those of `Figure.subplots`."""
    with style(grid):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [*axes.ravel()]


def legend_below(figure: Figure, handles: Iterable[Any], labels: Iterable[str]) -> None:
    """Draw one legend for all panels, in a row beneath them."""
    names = list(labels)
    figure.legend(
        list(handles), names, loc="outside lower center", ncols=len(names), fontsize=9
    )
