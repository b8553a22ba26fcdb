"""Colours and axes of the benchmarks' figures."""

from collections.abc import Iterable
from typing import Any, Literal

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


def style_axes(axes: Axes, grid: Literal["x", "y", "both"] | None = "both") -> None:
    """Remove the frame above and at the right; draw a light grid along `grid`."""
    if grid:
        axes.grid(axis=grid, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, handles: Iterable[Any], labels: Iterable[str]) -> None:
    """Draw one legend for all panels, in a row beneath them."""
    names = list(labels)
    figure.legend(
        list(handles), names, loc="outside lower center", ncols=len(names), fontsize=9
    )
