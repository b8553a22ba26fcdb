"""The check of compiled programs: what is compiled, and when it fails."""

import collections
import dataclasses
import fnmatch
import functools
import json
import re
import types

import bitwise
import pytest
from commands import invoke

from benchmarks import programs
from benchmarks.common import limits, targets
from benchmarks.common.compiled_steps import (
    BY_HAND,
    GRAD_AUTOCAST,
    REDUCE_FLOAT32,
    STEPS,
    STEPS_OF_OTHERS,
    Step,
    build,
    fp8_by_rule,
)
from benchmarks.common.models import MODELS, SIZES, SIZES_OF_OTHERS
from jmp_lite import explain, memory

pytestmark = [
    # Optax, flax and the benchmarks' models promote by themselves.
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:Matrix products in fp8"),
]


@pytest.mark.full
@pytest.mark.parametrize("step", [*STEPS, *STEPS_OF_OTHERS], ids=str)
def test_every_step_keeps_the_dtypes_of_what_it_takes(step):
    # One device stands for all: shapes are the same.
    sizes = SIZES["ci"] | SIZES_OF_OTHERS
    fun, shapes = build(step, sizes[step.model], memory.mesh("cpu"))
    *held, loss = fun.eval_shape(*shapes)
    assert bitwise.avals(held) == bitwise.avals(shapes[:3])
    assert loss.dtype == "float32"
    assert str(step.base) in {str(s) for s in [*STEPS, *STEPS_OF_OTHERS]}


def test_a_compiled_step_has_every_figure_and_takes_over_what_is_donated(monkeypatch):
    step = Step("mlp", "float16", BY_HAND, scaled=True)
    row = programs.measure(step, "cpu", "ci")
    assert row.keys() >= set(_row("x"))
    assert row["aliased"] == row["donated"] == 3 * 6 + 1 + 3
    assert row["aliased bytes"] == row["donated bytes"]
    assert row["host_transfers"] == 0

    # The same program is not compiled again; its figures are those that are known.
    numbers = dict.fromkeys(("bytes_accessed", "peak", "temporaries", "donated"), 2)
    report = types.SimpleNamespace(**numbers, counts={})
    monkeypatch.setattr(memory, "of_step", lambda *_: lambda *_: report)
    known = row | {"peak": 1}
    assert programs.measure(step, "cpu", "ci", known) == known
    for other in (
        {k: x for k, x in row.items() if k != "program"},
        row | {"program": "another"},
    ):
        assert programs.measure(step, "cpu", "ci", other)["peak"] == 2


@pytest.mark.parametrize(
    ("model", "with_one_gradient"),
    [("transformer", 0), ("mlp", 1)],  # nothing is differentiated by the images
)
def test_a_product_in_fp8_has_two_more_for_its_gradients(model, with_one_gradient):
    sizes = SIZES["ci"][model]
    params, _, *batch = MODELS[model].make_shapes(sizes)
    loss = MODELS[model].make_loss("float32", sizes)
    report = explain(loss, "mixed_fp8")(params, *batch)
    forward = collections.Counter(row.op_class for row in report.rows)["fp8"]
    found = fp8_by_rule(Step(model, "fp8", GRAD_AUTOCAST), sizes)
    assert found == 3 * forward - with_one_gradient > 0
    assert fp8_by_rule(Step(model, "bfloat16", GRAD_AUTOCAST), sizes) == 0


@pytest.mark.parametrize(
    ("cast", "dtype"), [(GRAD_AUTOCAST, "bf16"), (REDUCE_FLOAT32, "f32")]
)
def test_the_gradient_of_a_weight_is_its_accumulator_if_it_is_reduced_in_float32(
    cast, dtype
):
    step = Step("transformer", "bfloat16", cast)
    fun, shapes = build(step, SIZES["ci"][step.model], memory.mesh("cpu"))
    lowered = fun.lower(*shapes)
    # "qkv", whose shape, transposed, no other product has.
    products = re.findall(r"dot_general.*-> tensor<768x256x(\w+)>", lowered.as_text())
    assert products == [dtype]


def _row(name, **figures):
    none = ("half_sums", "conditionals", "host_transfers", "loops_counted_once")
    empty = ("collectives", "collective_calls", "products")
    return {
        **{"step": name, "program": "0", "leaves": 10, "casts": 3, "fp8 by rule": 0},
        **{"donated": 4, "donated bytes": 400, "aliased": 4, "aliased bytes": 400},
        **dict.fromkeys(("bytes accessed", "traffic"), 10_000),
        **dict.fromkeys(("peak", "temporary", "kernels"), 1000),
        **dict.fromkeys(none, 0),
        **{name: {} for name in empty},
    } | figures


@pytest.mark.parametrize("figure", limits.GUARDED)
def test_what_grows_by_more_than_a_hundredth_fails(figure):
    def growth(count):
        rows = ({"a": _row("a", **{figure: x})} for x in (10_000, count))
        return limits.growth(*rows)

    assert growth(10_090) == growth(5000) == []
    (row,) = growth(10_110)
    assert row == ("a", figure, "10,000 → 10,110", "1.011×", "at most 1.01×")


def test_a_step_that_only_one_side_has_fails():
    rows = limits.growth({"old": _row("old")}, {"new": _row("new")})
    assert [row[:3] for row in rows] == [
        ("new", "", "only measured"),
        ("old", "", "only committed"),
    ]


SCALED = Step("transformer", "float16", BY_HAND, scaled=True)
IN_FP8 = Step("transformer", "fp8", GRAD_AUTOCAST)
REDUCED = Step("transformer", "bfloat16", REDUCE_FLOAT32)
PARALLEL = dataclasses.replace(REDUCED, layout="data parallel")
SHARDED = dataclasses.replace(REDUCED, layout="FSDP")


def _broken(device, size, step, of_base=None, **figures):
    """Return what a step breaks: beside its base, if there are figures of it."""
    rows = {str(step): _row(str(step), **figures)}
    if of_base is not None:
        rows[str(step.base)] = _row(str(step.base), **of_base)
    return [row[1] for row in limits.broken_limits(device, size, rows)]


@pytest.mark.parametrize(
    ("device", "size", "step", "figure", "fits", "breaks"),
    [
        ("h100", "full", SCALED, "traffic", 10_100, 10_101),
        ("h100", "full", SCALED, "temporary", 5096, 5097),
        ("h100", "full", SCALED, "kernels", 1024, 1025),  # of ten leaves
        ("h100", "full", SCALED, "conditionals", 0, 1),
        ("v5e", "full", SCALED, "host_transfers", 0, 1),
        ("h100", "full", IN_FP8, "traffic", 10_700, 10_701),
        ("h100", "full", REDUCED, "peak", 1000, 1001),
        ("h100", "ci", SHARDED, "peak", 1250, 1251),
        ("v5e", "ci", PARALLEL, "peak", 1040, 1041),
    ],
    ids=str,
)
def test_what_a_step_may_cost_has_limits(device, size, step, figure, fits, breaks):
    assert _broken(device, size, step, {}, **{figure: fits}) == []
    assert _broken(device, size, step, {}, **{figure: breaks}) == [figure]


def _gathered(full):
    return {"collectives": {"all-gather f16": 1000, "all-gather f32": full}}


def _products(forward=0, backward=0, in_half=0):
    found = {"f8e4m3fn f8e4m3fn": forward, "f8e5m2 f8e4m3fn": backward}
    return {"products": found | {"f16 f16": in_half}, "fp8 by rule": 15}


_INSIDE = dataclasses.replace(SCALED, cast="autocast(grad(f))")
_SHARDED_BY_HAND = dataclasses.replace(SCALED, layout="FSDP")
_FAMILY = Step("llama", "fp8", GRAD_AUTOCAST)  # its products may be joined
_IN_FP8 = "products in fp8"


@pytest.mark.parametrize(
    ("device", "step", "figures", "found"),
    [
        ("h100", SCALED, {"aliased bytes": 399}, ["aliased bytes"]),
        ("h100", SCALED, {"conditionals": 1}, ["conditionals"]),
        ("v5e", SCALED, {"host_transfers": 1}, ["host_transfers"]),
        ("h100", SCALED, {"half_sums": 1}, []),
        ("h100", _INSIDE, {"half_sums": 1}, ["half_sums"]),
        ("v5e", _SHARDED_BY_HAND, _gathered(10), []),
        ("v5e", _SHARDED_BY_HAND, _gathered(11), ["all-gather in float32"]),
        ("h100", IN_FP8, _products(5, 10, in_half=6), []),
        ("h100", IN_FP8, _products(5, 9), [_IN_FP8]),
        ("h100", IN_FP8, _products(in_half=15), [_IN_FP8]),
        ("a100", IN_FP8, _products(in_half=15), []),
        ("h100", _FAMILY, _products(8), [_IN_FP8]),
        ("h100", _FAMILY, _products(9), []),
        ("h100", _FAMILY, _products(16), [_IN_FP8]),
    ],
    ids=str,
)
def test_a_promise_that_a_step_breaks_is_named(device, step, figures, found):
    assert _broken(device, "ci", step, **figures) == found


@pytest.mark.parametrize(
    ("collectives", "calls", "found"),
    [
        ({}, 4, []),
        ({"all-gather bf16": 65_536_000}, 4, []),  # the embedding
        ({"all-gather bf16": 66_191_361}, 4, ["all-gather in half"]),
        ({"all-gather f8e4m3fn": 1012}, 4, ["all-gather"]),
        ({"reduce-scatter f32": 1001}, 4, ["reduce-scatter"]),
        ({}, 5, ["all-reduces"]),
    ],
)
def test_what_fp8_may_send_has_limits(collectives, calls, found):
    step = dataclasses.replace(IN_FP8, layout="FSDP")
    sent = {"all-gather f8e4m3fn": 1000, "reduce-scatter f32": 1000}
    of_base = {"all-gather bf16": 1001, "reduce-scatter bf16": 500}
    figures = {
        "collectives": sent | collectives,
        "collective_calls": {"all-reduce": calls},
        **{"products": {"f8e4m3fn f8e4m3fn": 1}, "fp8 by rule": 1},
    }
    base = {"collectives": of_base, "collective_calls": {"all-reduce": 1}}
    assert _broken("h100", "full", step, base, **figures) == found


_IN_HALF, _IN_FLOAT32 = "reduced in half", "reduced in float32"


@pytest.mark.parametrize(
    ("half", "full", "found"),
    [
        (0, 108_000, []),
        (100, 107_800, []),
        (0, 106_900, [_IN_FLOAT32]),  # less is reduced, or in another dtype
        (0, 109_100, [_IN_FLOAT32]),  # more is
        (200, 107_600, [_IN_HALF]),
    ],
)
def test_a_gradient_that_is_reduced_in_half_breaks_a_limit(half, full, found):
    opcode = "reduce-scatter"
    of_base = {f"{opcode} bf16": 50_000, f"{opcode} f32": 8000}
    sent = {f"{opcode} bf16": half, f"{opcode} f32": full, "all-gather bf16": 50_000}
    for device, step in (("h100", SHARDED), ("v5e", PARALLEL)):
        base = {"collectives": of_base}
        assert _broken(device, "ci", step, base, collectives=sent) == found


@pytest.mark.parametrize(
    ("device", "size", "step", "times", "found"),
    [
        ("h100", "full", SHARDED, 2 / 4, []),
        ("h100", "full", SHARDED, 2.2 / 4, [_IN_HALF]),
        ("v5e", "full", SHARDED, 2.1, [_IN_HALF]),
    ],
)
def test_at_full_size_activations_may_be_summed_in_half(
    device, size, step, times, found
):
    half = int(times * 8 * 1024 * 1024 * 2)
    base = {"collectives": {"all-reduce bf16": 100_000_000}}
    sent = {"all-reduce bf16": half, "all-reduce f32": 2 * (100_000_000 - half)}
    assert _broken(device, size, step, base, collectives=sent) == found


def test_v6e_asks_for_the_stack_that_its_compiler_takes(monkeypatch):
    monkeypatch.setattr(programs.resource, "getrlimit", lambda _: (2**23, 2**23))
    status, printed = invoke(programs.main, "--device", "v6e")
    assert status == 2 and "ulimit -s" in printed


def test_the_check_names_the_versions_that_differ(monkeypatch):
    here = targets.versions() | {"jaxlib": "0.0.1", "libtpu": "none"}
    monkeypatch.setattr(targets, "versions", lambda: here)
    status, printed = invoke(programs.main, "--check", "--device", "v5e")
    assert status == 1
    assert "jaxlib: got 0.0.1, expected 0.10.2" in printed
    assert "libtpu: got none, expected 0.0.42.1" in printed
    assert "`make programs` makes an environment" in printed


def test_the_check_passes_on_the_committed_figures_and_fails_on_more(monkeypatch):
    settings, committed = programs.read(programs.result_path("v100", "ci"))
    monkeypatch.setattr(targets, "versions", lambda: settings["compiled with"])
    knowns = []

    def measure_all(device, size, known):
        knowns.append(known)
        return {name: _row(name) | row for name, row in committed.items()}

    monkeypatch.setattr(programs, "measure_all", measure_all)
    check = functools.partial(invoke, programs.main, "--check", "--device", "v100")
    check("--all")
    status, printed = check()
    assert knowns == [{}, committed]
    assert status == 0 and printed.endswith("Nothing has grown.")
    name = next(iter(committed))
    committed[name]["peak"] = int(committed[name]["peak"] * 1.02)
    status, printed = check()
    assert status == 1 and printed.endswith("Something has grown.")
    assert "1.020×" in printed and name in printed


@pytest.mark.parametrize(
    ("device", "size", "sizes"),
    [
        *((device, "ci", SIZES["ci"]) for device in programs.DEFAULT_DEVICES),
        ("h100", "others", SIZES_OF_OTHERS),
    ],
)
def test_committed_figures_are_those_of_the_steps_sizes_and_pins(device, size, sizes):
    settings, rows = programs.read(programs.result_path(device, size))
    assert list(rows) == [str(step) for step in programs.steps_for(device, size)]
    assert all(row.keys() | {"program"} == _row("").keys() for row in rows.values())
    assert settings["device"] == memory.DEVICES[device].title
    sizes = json.loads(json.dumps(sizes))  # lists for tuples
    assert {model: settings[model] for model in sizes} == sizes
    pins = dict(
        line.split("==")
        for line in targets.REQUIREMENTS.read_text().splitlines()
        if not line.startswith("#")
    )
    assert settings["compiled with"].keys() == pins.keys()
    for name, pin in pins.items():
        assert fnmatch.fnmatch(settings["compiled with"][name], pin)
    assert limits.broken_limits(device, size, rows) == []
    assert {row["step"] for row in programs.list_figures(rows)} == rows.keys()
