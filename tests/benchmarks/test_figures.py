"""The figures of the pages are drawn, say what they show, and are on a page."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import figures
from examples.common.results import ROOT

LARGEST = 120_000  # bytes: a page loads its figures at once


def faults(figure: Figure) -> list[str]:
    """Return what a reader of a figure would miss."""
    axes = figure.axes
    legends = [*figure.legends, *filter(None, (a.get_legend() for a in axes))]
    has_title = figure.get_suptitle() or all(a.get_title() for a in axes)
    return [
        fault
        for fault, is_there in {
            "no title": not has_title,
            "no legend": not any(legend.get_texts() for legend in legends),
            "no label at x": not axes[-1].get_xlabel(),
            "no label at y": not all(a.get_ylabel() for a in axes),
        }.items()
        if is_there
    ]


# What they draw takes seconds to train or to find.
_TRAINED = ("find_the_overflow.svg", "gradient_ranges.svg", "ten_minutes.svg")


@pytest.mark.standard_promotion  # for the models of examples
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.full] * (x in _TRAINED))
        for x in figures.FIGURES
    ],
)
def test_a_figure_is_drawn_and_labelled(name: str):
    assert faults(figures.FIGURES[name]()) == []


def test_a_figure_has_the_same_bytes_each_time(tmp_path: Path):
    for name in ("one.svg", "two.svg"):
        figures.save(figures.draw_ranges(), tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert b"<svg" in one and b"dc:date" not in one


def test_a_figure_without_labels_is_seen():
    figure = Figure()
    figure.subplots().plot([1, 2], label="a")
    missing = ["no title", "no legend", "no label at x", "no label at y"]
    assert faults(figure) == missing


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_committed_figure_is_small_and_on_a_page(name: str):
    committed = figures.IMAGES / name
    assert committed.exists(), "run `make figures`"
    assert committed.stat().st_size < LARGEST
    paths = [*(ROOT / "docs").glob("**/*.md"), ROOT / "benchmarks" / "README.md"]
    pages = [page.read_text("utf-8") for page in paths]
    assert any(re.search(rf"\]\([^)]*images/{re.escape(name)}\)", p) for p in pages)


def test_the_trainings_do_what_the_page_says():
    sound, nan, inf = (figures.train(2.0**15, f) for f in (None, "gradient", "loss"))
    assert sound.applied.mean() > 0.9 and sound.scale.max() > 2.0**15
    assert not nan.applied.any() and nan.scale[-1] == 1.0
    assert not inf.applied.any() and (inf.scale == 2.0**15).all()
