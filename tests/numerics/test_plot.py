"""Figures: what is drawn is what was counted, and everything has its name."""

import importlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_stats import EXPONENTS

from jmp_lite._src.numerics import plot
from jmp_lite._src.numerics.plot import plot_histograms
from jmp_lite.numerics import DryRunReport, TreeStats, tree_stats, value_stats

RNG = np.random.default_rng(0)
NUMBERS = {
    "encoder": RNG.lognormal(-9, 9, 500),
    "a/long/name/of/a/layer": [1.0, 1.5, 0.25],
    "nothing": [0.0, 0.0, 0.0],
}
HISTOGRAMS = {
    name: value_stats(np.float32(x), "f16", histogram=True).histogram
    for name, x in NUMBERS.items()
}


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def spans(axes: Any) -> dict[str, tuple[float, float]]:
    """Return from where to where each named part of the range is shaded."""
    shades = [p for p in axes.patches if p.get_height() == 1 and p.get_alpha()]
    found = {}
    for text in axes.texts:
        (span,) = (
            (p.get_x(), p.get_x() + p.get_width())
            for p in shades
            if p.get_x() < text.get_position()[0] < p.get_x() + p.get_width()
        )
        found[text.get_text()] = span
    assert len(found) == len(shades)
    return found


def test_bars_are_the_counts_of_layers_from_top_to_bottom():
    rare = np.zeros(len(EXPONENTS))  # a single number among a billion is seen
    rare[[10, 70]] = 1, 1e9
    histograms = HISTOGRAMS | {"rare": rare}
    (axes,) = plot_histograms(histograms, "f16").axes
    assert [c.get_label() for c in axes.containers] == list(histograms)
    assert texts(axes.get_yticklabels()) == list(histograms)
    assert axes.get_ylim() == (3.5, -0.5)  # the bottom, the top
    for row, (bars, histogram) in enumerate(
        zip(axes.containers, histograms.values(), strict=True)
    ):
        counts = dict(zip(EXPONENTS, np.asarray(histogram), strict=True))
        drawn = {int(bar.get_x()): abs(bar.get_height()) for bar in bars}
        assert set(drawn) == {e for e, n in counts.items() if n}
        for bar in bars:
            assert bar.get_width() == 1  # from 2**e to 2**(e + 1)
            assert max(bar.get_y(), bar.get_y() + bar.get_height()) == row + 0.43
        # Six decades are the whole height, 0.86 of a row, of which 2 % are seen.
        for exponent, height in drawn.items():
            share = counts[exponent] / sum(counts.values())
            expected = 0.86 * max(1 + np.log10(share) / 6, 0.02)
            np.testing.assert_allclose(height, expected, rtol=1e-6)


def test_the_range_is_shaded_and_named():
    (axes,) = plot_histograms(HISTOGRAMS, jnp.float16).axes
    info = jnp.finfo(jnp.float16)
    low, high = axes.get_xlim()
    # What is larger than half of the smallest subnormal rounds up to it.
    to_zero = np.log2(float(info.smallest_subnormal)) - 1
    to_normal = np.log2(float(info.smallest_normal))
    to_infinity = np.ceil(np.log2(float(info.max)))
    assert spans(axes) == {
        "underflow": (low, to_zero),
        "subnormal": (to_zero, to_normal),
        "normal": (to_normal, to_infinity),
        "overflow": (to_infinity, high),
    }
    assert low <= EXPONENTS[0] and high > max(
        c[-1].get_x() for c in axes.containers[:2]
    )
    (axes,) = plot_histograms(HISTOGRAMS, "bf16").axes  # no border in sight
    assert spans(axes) == {"normal": axes.get_xlim()}
    assert "log2" in axes.get_xlabel() and "bfloat16" in axes.get_xlabel()


def test_forty_layers_have_room():
    few_bars = HISTOGRAMS["a/long/name/of/a/layer"]
    named = {f"decoder/layer_{i}/attention/query": few_bars for i in range(40)}
    figure = plot_histograms(named, "f16")
    assert figure.get_figheight() > 40 * 0.25
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    for above, below in zip(boxes[:-1], boxes[1:], strict=True):
        assert above.y0 >= below.y1  # no label lies on another
    assert min(box.x0 for box in boxes) >= 0  # nor is one cut off


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="Expected at least one layer to draw"):
        plot_histograms({}, "f16")
    with pytest.raises(ValueError, match=r"got none of \['w'\]: count with histogram="):
        tree_stats({"w": jnp.ones(2)}, "f16").plot()
    with pytest.raises(ValueError, match="Cannot cast to float8_e5m2"):
        plot_histograms(HISTOGRAMS, "float8_e5m2")
    with pytest.raises(ValueError, match="Expected at least one layer to draw"):
        DryRunReport((), "float16").plot()


def test_statistics_of_a_tree_plot_themselves():
    found = tree_stats(
        {"b": jnp.ones(2), "w": jnp.full(3, 1e-9)}, "f16", histogram=True
    )
    for stats in (found, TreeStats.from_json(found.to_json())):
        (axes,) = stats.plot().axes
        assert texts(axes.get_yticklabels()) == ["b", "w"]
        assert [bars[0].get_x() for bars in axes.containers] == [0, -30]


def test_no_display_and_no_global_state_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # refuses its import
    without_pyplot = importlib.reload(plot)
    figure = without_pyplot.plot_histograms(HISTOGRAMS, "f16")
    figure.savefig(tmp_path / "figure.png")
