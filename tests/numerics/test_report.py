"""The report of a dry run: its order, its layers, its tables, figures and JSON."""

import dataclasses
import functools
import json
import math

import pytest
from matplotlib.figure import Figure
from numpy_stats import EXPONENTS
from printed import printed

from jmp_lite._src.numerics.faults import find_faults
from jmp_lite.numerics import DryRunReport, OpStats

HISTOGRAM = tuple(2 if e == 3 else 1 if e == -30 else 0 for e in EXPONENTS)
ROW = OpStats(
    layer="net/a",
    primitive="dot_general",
    line="/code/model.py:12",
    direction="forward",
    dtype="float16",
    times=2,
    size=4,
    nonfinite=0.0,
    zero=0.25,
    subnormal=0.0,
    underflow=0.25,
    overflow=0.0,
    max_abs=8.0,
    min_abs=2.0**-30,
    error=0.002,
    added_error=0.001,
    histogram=HISTOGRAM,
    reads_half=True,
)


a_row = functools.partial(dataclasses.replace, ROW)
IN_F32 = {"dtype": "float32", "overflow": 0.5, "added_error": 0.004}
LOST = {"overflow": 0.25, "error": math.inf, "added_error": math.inf}
ROWS = (
    a_row(primitive="lhs of dot_general", underflow=0.5),
    a_row(),
    a_row(layer="net/b", primitive="exp", **IN_F32),
    a_row(layer="net/b/c", underflow=0.0, **LOST),
    a_row(layer="net/a", direction="backward", added_error=0.0, size=12, times=None),
    a_row(layer="", primitive="add", dtype="float32", added_error=0.0, max_abs=1e30),
)
REPORT = DryRunReport(ROWS, "float16")


def layers_of(text: str) -> list[str]:
    """Return the layers of the rows of a table."""
    return [line.split()[0] for line in text.splitlines() if "net/" in line]


def test_a_row_prints_as_one_line_without_its_histogram():
    caused = a_row(layer="", line="", dtype="float32", cause=("b", "exp", "m.py:3"))
    for row, text in {
        ROWS[0]: "lhs of dot_general in net/a at /code/model.py:12: float16, |x| to 8, "
        "underflow 50.0%, error 0.002, added error 0.001",
        ROWS[3]: "dot_general in net/b/c at /code/model.py:12: float16, |x| to 8, "
        "overflow 25.0%, error inf, added error inf",
        ROWS[4]: "dot_general in net/a at /code/model.py:12, backward: float16, |x| to "
        "8, underflow 25.0%, error 0.002",
        caused: "dot_general: float32, |x| to 8, error 0.002, added error 0.001 from "
        "exp in b at m.py:3",
    }.items():
        assert (str(row), repr(row)) == (text, f"<{text}>")


def test_a_report_prints_its_worst_layers_in_40_lines():
    assert str(REPORT).startswith("dry run in float16: the worst 5 of 5 layers")
    assert layers_of(str(REPORT)) == ["net/b/c", "net/b", "net/a", "net/a"]
    assert repr(REPORT) == "<dry run in float16: 6 operations>"
    many = [a_row(layer=f"layer {i}") for i in range(50)]
    assert len(str(DryRunReport(tuple(many), "float16")).splitlines()) <= 40
    assert "of 0 layers" in str(DryRunReport((), "float16"))


def test_worst_is_overflow_then_added_error_then_underflow():
    assert [ROWS.index(row) for row in REPORT.worst()] == [3, 2, 0, 1, 4, 5]
    assert REPORT.worst(2) == (ROWS[3], ROWS[2])
    harmless = a_row(dtype="float32", overflow=1.0, added_error=0.0)
    assert harmless.badness == (0.0, 0.0, 0.0)


def test_layers_are_in_the_order_of_the_program_with_directions_apart():
    for depth, names in (
        (None, ["net/a", "net/b", "net/b/c", "net/a backward", ""]),
        (1, ["net", "net backward", ""]),
    ):
        rows = REPORT.layers(depth)
        found = [f"{row.layer} {row.direction}" for row in rows]
        assert [name.removesuffix(" forward") for name in found] == names


def test_a_layer_counts_what_it_has_in_half():
    net = REPORT.layers(1)[0]  # rows 0, 1, and 3
    assert net.size == 12 and net.is_half
    assert net.underflow == pytest.approx((0.5 + 0.25 + 0.0) / 3)
    assert net.overflow == pytest.approx(0.25 / 3)
    assert (net.error, net.added_error) == (math.inf, math.inf)
    assert net.primitive == "dot_general" and net.line == ROWS[3].line
    assert net.histogram == tuple(3 * n for n in HISTOGRAM)
    assert (net.max_abs, net.min_abs) == (8.0, 2.0**-30)
    without = REPORT.layers()[1]  # counts all it has
    assert (without.is_half, without.overflow) == (False, 0.5)
    assert without.primitive == "exp"
    # Fractions are by numbers, not by operations.
    rows = (a_row(size=1, underflow=1.0), a_row(size=9, underflow=0.0))
    assert DryRunReport(rows, "float16").layers()[0].underflow == pytest.approx(0.1)


def test_each_kind_of_fault_has_words_of_its_own():
    large = LOST | {"overflow": 0.0, "max_abs": 1e5}
    beyond = "reaches 1e+05, beyond 6.55e+04, in"
    of_half = "has an error of 50.0% in float16."
    cause = ("a", "dot_general", "m.py:1")
    for changes, reason in (
        (large | {"overflow": 0.25}, f"sin at m.py:3 {beyond} 25.0% of its numbers."),
        (large | {"overflow": 1e-5}, f"sin at m.py:3 {beyond} <0.1% of its numbers."),
        (
            large | {"max_abs": 15.9},
            "sin at m.py:3 is not finite in float16; in float32 it reaches 15.9.",
        ),
        ({}, f"sin at m.py:3 {of_half}"),
        (
            {"error": 17.0, "added_error": 1.0},
            "sin at m.py:3 has an error of 17 times its size in float16.",
        ),
        ({"cause": cause}, f"sin at m.py:3 {of_half}"),
        (
            {"layer": "", "cause": cause},
            "dot_general at m.py:1 rounds away what sin in no scope at m.py:3 needs, "
            f"which {of_half}",
        ),
    ):
        sin = a_row(layer="a", primitive="sin", line="m.py:3", error=0.5)
        row = dataclasses.replace(sin, **({"added_error": 0.5} | changes))
        (fault,) = find_faults(DryRunReport((row,), "float16"), ())
        assert fault.layer == "a"
        assert fault.reason() == f"a in float32: {reason}"


def test_what_only_repeats_a_large_error_is_no_fault_until_that_is_repaired():
    lost = a_row(layer="a", error=0.6, added_error=0.6)
    after = a_row(layer="b", error=0.9, added_error=0.3)
    found = find_faults(DryRunReport((lost, after), "float16"), ())
    assert [fault.layer for fault in found] == ["a"]
    repaired = a_row(layer="b", error=0.3, added_error=0.3)
    found = find_faults(DryRunReport((repaired,), "float16"), ())
    assert [fault.layer for fault in found] == ["b"]


def test_the_table_has_a_row_per_layer_worst_first_or_every_operation():
    text = printed(REPORT.table())
    assert "dry run in float16: the worst 5 of 5 layers" in text
    assert layers_of(text) == ["net/b/c", "net/b", "net/a", "net/a"]
    first = next(line for line in text.splitlines() if "net/" in line)
    assert "25.0%" in first and "inf" in first and "f16" in first
    assert ", model.py:12" in text and "/code" not in text
    assert "net/a ←" in text and "(no layer)" in text
    narrow = printed(REPORT.table(), width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "net/b/c" in narrow
    every = printed(REPORT.table(every=True))
    assert "the worst 6 of 6 operations" in every
    assert every.count("dot_general") == 4 and "lhs of dot_general" in every


def labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_figures_have_a_row_per_layer_with_half():
    assert labels(REPORT.plot()) == ["net/a", "net/b/c", "net/a ←"]
    assert labels(REPORT.plot(depth=1)) == ["net", "net ←"]
    # Without half, all layers.
    rows = tuple(dataclasses.replace(row, dtype="float32") for row in ROWS)
    names = ["net/a", "net/b", "net/b/c", "net/a ←", "(no layer)"]
    assert labels(DryRunReport(rows, "float16").plot()) == names


def test_json_comes_back_exactly_and_has_no_infinity():
    text = REPORT.to_json()
    assert DryRunReport.from_json(text) == REPORT
    assert DryRunReport.from_json(text).to_json() == text

    assert "Infinity" not in text and "NaN" not in text
    data = json.loads(text)
    assert data["dtype"] == "float16"
    assert data["rows"][3]["error"] == "inf"
    assert set(data["rows"][0]) == {field.name for field in dataclasses.fields(OpStats)}
