"""The figures of the pages are drawn, say what they show, and are committed."""

from pathlib import Path

import pytest

from benchmarks import figures

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
    figure = figures.FIGURES[name]()
    axes = figure.axes
    assert figure.get_suptitle() or all(a.get_title() for a in axes)
    legends = [*figure.legends, *filter(None, (a.get_legend() for a in axes))]
    assert any(legend.get_texts() for legend in legends)
    assert axes[-1].get_xlabel() and all(a.get_ylabel() for a in axes)


def test_a_figure_has_the_same_bytes_each_time(tmp_path: Path):
    for name in ("one.svg", "two.svg"):
        figures.save(figures.draw_ranges(), tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert b"<svg" in one and b"dc:date" not in one


def test_every_figure_is_committed():
    committed = {path.name for path in figures.IMAGES.iterdir()}
    assert figures.FIGURES.keys() <= committed, "run `make figures`"


def test_the_trainings_do_what_the_page_says():
    sound, nan, inf = (figures.train(2.0**15, f) for f in (None, "gradient", "loss"))
    assert sound.applied.mean() > 0.9 and sound.scale.max() > 2.0**15
    assert not nan.applied.any() and nan.scale[-1] == 1.0
    assert not inf.applied.any() and (inf.scale == 2.0**15).all()
