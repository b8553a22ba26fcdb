"""A figure of exponents over the range of a half dtype.

It is made without pyplot, so without a display or global state. Write it with
`figure.savefig("a.png")`; notebooks display it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import dtypes, extras, reports
from jmp_lite._src.numerics.stats import EXPONENTS

with extras.needed("numerics"):
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for colour-blind readers.
_BARS = "#0072B2"
_PARTS = {  # from the smallest numbers on: colour and opacity
    "underflow": ("#D55E00", 0.30),
    "subnormal": ("#E69F00", 0.22),
    "normal": ("#009E73", 0.10),
    "overflow": ("#CC79A7", 0.40),
}
# The height of a bar is the logarithm of its share above 10**_FLOOR: it shows tails.
_FLOOR = -6


def plot_histograms(
    histograms: Mapping[str, ArrayLike | Sequence[int] | None], dtype: DTypeLike
) -> Figure:
    """Draw the histogram of exponents `[96]` of each layer, over the range of a dtype.

    A row of bars per layer, from top to bottom, has one bar per power of two, whose
    height is the logarithm of the share of the layer's non-zero numbers.
    """
    dtype = dtypes.parse_dtype(dtype)
    if without := [name for name, counts in histograms.items() if counts is None]:
        raise ValueError(
            f"Expected a histogram of every layer, got none of {without}: count with "
            "histogram=True."
        )
    if not histograms:
        raise ValueError("Expected at least one layer to draw, got none.")
    # Each row is as high as a line of text, and named at the left.
    width = 7.5 + 0.075 * max(map(len, histograms))
    size = width, 1.2 + 0.3 * max(len(histograms), 3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    names = list(map(reports.printable, histograms))
    axes.set_yticks(range(len(names)), names, fontsize=9, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(left=False)
    info = jnp.finfo(dtype)
    to_zero = info.minexp - info.nmant - 1  # half of the smallest subnormal rounds to 0
    borders = -math.inf, to_zero, info.minexp, info.maxexp, math.inf  # as log2
    shown = {b for b in borders if EXPONENTS[0] < b < EXPONENTS[-1]}
    for row, (name, histogram) in enumerate(histograms.items()):
        counts = np.asarray(histogram, np.float64)
        drawn = np.flatnonzero(counts)
        exponents = drawn + EXPONENTS[0]
        shown.update(exponents)
        shares = counts[drawn] / counts.sum()
        heights = np.clip(1 - np.log10(shares) / _FLOOR, 0.02, 1)
        # Upwards: the first row is on top.
        options = {"width": 1, "align": "edge", "color": _BARS, "label": name}
        axes.bar(exponents, -0.86 * heights, bottom=row + 0.43, **options)
        axes.axhline(row + 0.43, color="black", linewidth=0.5)
    low, high = int(min(shown, default=0)) - 3, int(max(shown, default=0)) + 5
    parts = zip(_PARTS.items(), itertools.pairwise(borders), strict=True)
    for (name, (face, alpha)), (left, right) in parts:
        left, right = max(left, low), min(right, high)
        if left < right:
            axes.axvspan(left, right, color=face, alpha=alpha, linewidth=0, zorder=0)
            at = {"ha": "center", "va": "bottom", "fontsize": 9, "clip_on": False}
            axes.text((left + right) / 2, -0.6, name, **at)
    axes.set_xlim(low, high)
    axes.set_xlabel(
        f"log2 of the magnitude, over the range of {jnp.dtype(dtype).name}\n"
        f"(heights: logarithm of the share, from $10^{{{_FLOOR}}}$ to 1)"
    )
    return figure
