"""The benchmarks that run: each from end to end, cut to the smallest size."""

import inspect
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import jmp_lite
from benchmarks import (
    advised,
    autocast_trace,
    checkpoint_save,
    convergence,
    fp8_accuracy,
    many_leaves,
    memory,
    programs,
    step_overhead,
    train_step,
    tree_stats,
)
from benchmarks.common import contenders, problems, tasks, timing, torch_gpt
from examples.common import results
from examples.common.results import provenance

# Optax, flax and the benchmarks' models promote by themselves.
pytestmark = pytest.mark.standard_promotion

PNG = b"\x89PNG"


def _invoke(main: Any, *args: str):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "100"})


def _run(
    main: Any, out: Path, *args: str, draws: bool = True
) -> tuple[dict[str, Any], str]:
    """Run a benchmark, which draws or does not; return its JSON and its output."""
    result = _invoke(main, *args, "--out", str(out))
    assert result.exit_code == 0, result.output
    (path,) = out.glob("*.json")
    figures = list(out.glob("*.png"))
    assert bool(figures) == draws
    assert all(path.read_bytes().startswith(PNG) for path in figures)
    found = json.loads(path.read_text())
    # Enough to run it again, and to know what it speaks of.
    assert found["settings"].items() >= provenance().items()
    return found, result.output


def _are_finite(values: Any) -> bool:
    return bool(np.isfinite(np.asarray(values, np.float64)).all())


def test_turns_rotate_and_every_round_has_a_sample():
    calls: list[str] = []

    def program(name):
        def step(state):
            calls.append(name)
            return state + 1

        return step

    states: dict[str, Any] = {"a": 0, "b": 0}
    samples = timing.take_turns(
        {"a": program("a"), "b": program("b")}, states, rounds=2, steps=2, title=""
    )
    assert "".join(calls) == "ab" + "aabb" + "bbaa"
    assert states == {"a": 5, "b": 5}
    assert {len(x) for row in samples.values() for x in row.values()} == {2}
    assert timing.quartiles([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]) == [1.5, 2.0, 2.5]


@pytest.mark.full
def test_step_overhead_sweeps_leaves_and_keeps_raw_samples(tmp_path):
    found, text = _run(
        step_overhead.main,
        tmp_path,
        *("--optimizer", "adam", "--batch", "4", "--leaves", "2"),
        *("--width", "8", "--rounds", "2", "--steps", "1"),
    )
    assert "bytes" in text
    assert [case["leaves"] for case in found["cases"]] == [3, 2]
    for case in found["cases"]:
        assert list(case["contenders"]) == list(contenders.CONTENDERS)
        bare = case["contenders"][contenders.BASELINE]
        assert bare["over_bare"] == [1, 1, 1] and bare["bytes_over_bare"] == 1
        for row in case["contenders"].values():
            assert len(row["seconds"]) == len(row["processor_seconds"]) == 2
            assert _are_finite([row[key] for key in ("over_bare", "over_ours")])
            assert row["bytes"] >= bare["bytes"] and _are_finite(
                row["compile_over_bare"]
            )


@pytest.mark.full
def test_many_leaves_measures_every_contender_beside_the_others(tmp_path):
    found, text = _run(
        many_leaves.main,
        tmp_path,
        *("--leaves", "3", "--leaves", "2", "--rounds", "2", "--steps", "1"),
    )
    assert [case["leaves"] for case in found["cases"]] == [2, 3]
    for case in found["cases"]:
        assert list(case["contenders"]) == list(many_leaves.CONTENDERS)
        for row in case["contenders"].values():
            assert list(row) == list(many_leaves.FIGURES)
            assert _are_finite(list(row.values())) and min(row.values()) > 0
    assert "stochastic_rounding" in text


@pytest.mark.full
def test_step_overhead_goes_on_without_jmp_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jmp", None)
    found, text = _run(
        step_overhead.main,
        tmp_path,
        *("--optimizer", "adam", "--batch", "4", "--leaves", "2"),
        *("--width", "8", "--rounds", "1", "--steps", "1"),
    )
    reason = "jmp is not installed: pip install jmp"
    for case in found["cases"]:
        assert set(case["contenders"]) == set(contenders.CONTENDERS) - {contenders.JMP}
        assert case["not_measured"] == {contenders.JMP: reason}
    assert _plain(text).count(f"{contenders.JMP}: not measured, {reason}") == 2


def test_jmp_is_given_up_at_many_leaves():
    assert contenders.why_not(contenders.JMP, 100) == ""
    assert contenders.why_not(contenders.JMP, 101) == (
        "given up at more than 100 leaves, which take minutes to compile"
    )
    assert contenders.why_not(contenders.OURS, 101) == ""


@pytest.mark.parametrize(
    "module",
    [
        *(autocast_trace, checkpoint_save, convergence, fp8_accuracy, many_leaves),
        *(memory, programs, step_overhead, train_step, tree_stats),
    ],
)
def test_no_benchmark_writes_figures_of_changed_code_among_the_committed(
    module, monkeypatch
):
    monkeypatch.setattr(results, "git_revision", lambda root: "0123456789ab-dirty")
    monkeypatch.setattr(results, "changes", lambda root: ["jmp_lite/policy.py"])
    result = _invoke(module.main, "--out", str(results.COMMITTED / "cpu"))
    assert result.exit_code == 2
    assert "differ from the commit: jmp_lite/policy.py." in _plain(result.output)
    assert inspect.signature(module.main).parameters["out"].default == Path("out")


def test_the_leaves_of_the_sweep_are_one_matrix_cut_up():
    loss = {}
    for leaves in (1, 16):
        params, batch = step_overhead.make_columns(leaves, 4, width=8)
        assert len(params) == leaves
        assert sum(x.size for x in params) == 8 * step_overhead.COLUMNS
        loss[leaves] = float(step_overhead.columns_loss(params, batch))
    assert math.isclose(loss[1], loss[16], rel_tol=1e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--leaves", "7"], "expected divisors of 1600"),
        (["--optimizer", "sgd"], "expected some of adam, adamw, adafactor"),
        (["--rounds", "0"], "greater than or equal to 1"),
    ],
)
def test_step_overhead_refuses_what_it_cannot_measure(args, message):
    result = _invoke(step_overhead.main, *args)
    assert result.exit_code == 2 and message in _plain(result.output)


def _plain(text: str) -> str:
    """Return text without the box that is drawn around it."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.full
def test_tree_stats_measures_every_way_to_look(tmp_path, monkeypatch):
    def make_small():
        params, batch = step_overhead.make_problem(4, width=8)
        return step_overhead.mlp_loss, params, batch

    monkeypatch.setattr(tree_stats, "PROBLEMS", {"a": make_small, "b": make_small})
    found, text = _run(tree_stats.main, tmp_path, "--rounds", "2", "--steps", "1")
    assert all(name in text for name in tree_stats.CONTENDERS)
    for problem in found["problems"].values():
        assert problem["parameters"] == 784 * 8 + 8 * 8 + 8 * 10
        assert list(problem["samples"]) == list(tree_stats.CONTENDERS)
        for row in problem["samples"].values():
            assert _are_finite(list(row.values())) and len(row["seconds"]) == 2


def test_checkpoint_save_measures_every_way_to_save(tmp_path):
    args = ("--megabytes", "1", "--rounds", "2", "--folder", str(tmp_path))
    found, text = _run(checkpoint_save.main, tmp_path / "out", *args)
    ratios = checkpoint_save.ratios(found["samples"])
    assert ratios[checkpoint_save.BARE]["seconds"] == [1, 1, 1]
    assert _are_finite(ratios[checkpoint_save.OURS]["seconds"])
    assert all(name in text for name in ratios)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no checkpoint stays


@pytest.mark.full
def test_train_step_measures_every_model(tmp_path, monkeypatch):
    tiny = {
        "mlp": {"width": 8, "batch": 4},
        "cnn": {"blocks": (1,), "width": 2, "classes": 3, "image": 8, "batch": 2},
        "gpt": {
            **{"layers": 1, "width": 8, "heads": 2, "vocabulary": 16},
            **{"length": 8, "batch": 2},
        },
    }
    monkeypatch.setitem(problems.SIZES, "ci", tiny)
    some = [train_step.Way("float32"), train_step.Way("float16", "policy")]
    monkeypatch.setattr(train_step, "ways", lambda platform: some)
    found, text = _run(train_step.main, tmp_path, "--rounds", "2", "--steps", "1")
    assert train_step.CPU_NOTE in _plain(text) and train_step.CPU_NOTE in found["notes"]
    assert "not measured, torch" in _plain(text)
    assert list(found["models"]) == ["mlp", "cnn", "gpt"]
    for result in found["models"].values():
        assert list(result["rows"]) == ["float32", "float16 policy"]
        for row in result["rows"].values():
            assert len(row["seconds"]) == 2 and _are_finite(row["over_float32"])
            assert row["memory"] > row["temporary"] > 0
            assert row["device_peak"] is None  # a CPU does not tell


@pytest.mark.one_of("precision")
@pytest.mark.parametrize("precision", problems.HALVES)
@pytest.mark.parametrize("cast", [problems.POLICY, problems.AUTOCAST, problems.BY_HAND])
def test_products_are_in_half_whichever_way_they_got_there(precision, cast):
    way = train_step.Way(precision, cast)
    problem = train_step.make_problem("mlp", {"width": 8})
    loss_fn = problem.loss(way)
    if cast == problems.AUTOCAST:
        loss_fn = jmp_lite.autocast(loss_fn, f"mixed_{precision}")
    text = str(jax.make_jaxpr(loss_fn)(*problem.init(), *problem.batch(4)))
    products = [line for line in text.splitlines() if "dot_general" in line]
    short = {"bfloat16": "bf16", "float16": "f16"}[precision]
    # In float16 autocast leaves the last of the three, the logits, in float32.
    in_half = sum(f":{short}[" in line for line in products)
    assert len(products) == 3
    assert in_half == (2 if (precision, cast) == ("float16", "autocast") else 3)


def test_tf32_is_compared_on_gpus_only():
    assert str(train_step.ways("gpu")[1]) == "TF32"
    assert problems.TF32 not in map(str, train_step.ways("tpu"))
    assert len(train_step.ways("cpu")) == 7


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "parameters"), [("cnn", 25.5e6), ("gpt", 123.6e6), ("mlp", 20.0e6)]
)
def test_full_models_have_the_sizes_that_they_are_known_by(model, parameters):
    problem = train_step.make_problem(model, problems.SIZES["full"][model])
    params, _ = jax.eval_shape(problem.init)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert math.isclose(count, parameters, rel_tol=0.005)


@pytest.mark.parametrize("limit", [0, 1, 3, 64, 100, 1000])
def test_the_largest_batch_is_found_by_doubling_and_bisection(limit):
    tried: list[int] = []

    def fits(n):
        tried.append(n)
        return n <= limit

    found = train_step.largest(fits, 64)
    assert found <= limit < found + max(2, found / 16 + 1)
    assert len(tried) < 20


def test_a_full_memory_is_told_from_other_errors(monkeypatch):
    errors = {8: "RESOURCE_EXHAUSTED: Out of memory", 16: "INTERNAL: a bug"}

    def fail(problem, way, batch_size):
        raise jax.errors.JaxRuntimeError(errors[batch_size])

    monkeypatch.setattr(train_step, "Program", fail)
    way: Any = train_step.Way("float32")
    problem = train_step.make_problem("mlp", {"width": 8})
    assert not train_step.batch_fits(problem, way, 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        train_step.batch_fits(problem, way, 16)


@pytest.mark.full
def test_peaks_of_an_allocator_are_told_apart_while_they_rise(monkeypatch):
    way = train_step.Way("float32")
    problem = train_step.make_problem("mlp", {"width": 8})
    programs = {n: train_step.Program(problem, way, n) for n in (64, 4, 16)}
    # Before and after each, the smallest program first.
    readings = iter([100, 200, 200, 200, 200, 300])
    monkeypatch.setattr(train_step, "device_peak", lambda: next(readings))
    assert train_step.measure_peaks(programs) == {4: 200, 16: None, 64: 300}


def test_largest_batches_are_tabled_beside_float32(monkeypatch):
    limits = {"float32": 10, "bfloat16 policy": 20}
    some = [train_step.Way("float32"), train_step.Way("bfloat16", "policy")]
    monkeypatch.setattr(train_step, "ways", lambda platform: some)
    monkeypatch.setattr(
        train_step, "batch_fits", lambda problem, way, n: n <= limits[str(way)]
    )
    found = train_step.largest_batches({"mlp": {"width": 8, "batch": 4}})
    rows = found["mlp"]["rows"]
    assert {name: row["largest_batch"] for name, row in rows.items()} == limits
    table = train_step.batch_table("MLP", rows)
    assert list(table.columns[2].cells) == ["1.00", "2.00"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--largest-batch"], "a CPU never says that its memory is full"),
        (["--size", "full"], "full is for accelerators: expected ci on a cpu"),
        (["--model", "lstm"], "expected some of mlp, cnn, gpt, got 'lstm'"),
    ],
)
def test_train_step_refuses_what_it_cannot_measure(args, message):
    result = _invoke(train_step.main, *args)
    assert result.exit_code == 2 and message in _plain(result.output)


def test_torch_is_left_out_with_a_reason(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(torch_gpt.importlib, "import_module", missing)
    assert torch_gpt.why_not() == "torch is not installed"


@pytest.mark.full
def test_convergence_shows_what_a_loss_scale_is_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "WIDTH", 32)
    args = ("--task", "tiny", "--seeds", "2", "--steps", "3")
    found, text = _run(convergence.main, tmp_path, *args)
    assert tasks.UNSCALED in text
    assert (tmp_path / "convergence_gradients.png").exists()
    tiny = found["tasks"]["tiny"]
    assert list(tiny["runs"]) == ["float32", "float16", tasks.UNSCALED]
    for curves in tiny["runs"].values():
        assert [len(curve["loss"]) for curve in curves] == [3, 3]
        assert _are_finite([curve["loss"] for curve in curves])
    underflow = tiny["gradients"]["first"]["stats"]["underflow"]
    assert sum(underflow) > 0
    # Without a scale nothing is learned from gradients that float16 does not have.
    scaled, unscaled = (
        tiny["runs"][name][0]["loss"] for name in ("float16", tasks.UNSCALED)
    )
    assert scaled != unscaled


@pytest.mark.full
def test_convergence_trains_in_every_precision(monkeypatch):
    monkeypatch.setattr(tasks, "WIDTH", 32)
    runs = tasks.TASKS["mlp"].train(0, 2, Console(file=io.StringIO()))
    assert list(runs) == list(tasks.RUNS)


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_convergence_trains_the_other_examples_too(name, monkeypatch):
    monkeypatch.setattr(tasks, "RUNS", {"float32": ("float32", 0.0)})
    monkeypatch.setattr(tasks, "WIDTH", 32)
    monkeypatch.setattr(tasks, "RESNET_WIDTHS", (2,))
    monkeypatch.setattr(tasks, "SHAPE", {"width": 32, "layers": 1})
    console = Console(file=io.StringIO())
    result = convergence.measure(tasks.TASKS[name], [0], 2, console)
    (curve,) = result["runs"]["float32"]
    assert _are_finite([*curve["loss"], curve["validation_loss"]])
    for step in ("first", "last"):
        stats = result["gradients"][step]
        assert sum(stats["stats"]["size"]) > 0 and sum(stats["stats"]["nonfinite"]) == 0
    # It has trained with the loss whose gradients these are.
    assert result["gradients"]["first"] != result["gradients"]["last"]


@pytest.mark.full
def test_advised_trains_with_half_results_where_they_were_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(advised, "RESNET_WIDTHS", (2,))
    monkeypatch.setattr(advised, "SHAPE", {"width": 32, "layers": 1})
    args = ("--seeds", "1", "--steps", "2")
    found, text = _run(advised.main, tmp_path, *args, draws=False)
    for result in found["tasks"].values():
        (runs,) = result["seeds"]
        assert list(runs) == [advised.BASELINE, advised.SAFE, advised.ADVISED]
        assert _are_finite([run["validation_loss"] for run in runs.values()])
        assert "o=f16" in result["advice"] and "save" in " ".join(result["reasons"])
    assert "ResNet" in text


@pytest.mark.full
def test_fp8_accuracy_trains_in_fp8_and_measures_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "SHAPE", {"width": 32, "layers": 1})
    monkeypatch.setattr(fp8_accuracy, "WIDTH", 32)
    args = ("--seeds", "1", "--steps", "2", "--min-size", "32")
    found, text = _run(fp8_accuracy.main, tmp_path, *args)
    assert "digits, MLP: 2 of 3 products in fp8" in text
    for name, result in found["tasks"].items():
        (seed,) = result["seeds"]
        assert list(seed["scores"]) == list(fp8_accuracy.RUNS)
        assert _are_finite([list(x.values()) for x in seed["scores"].values()])
        for errors in seed["gradient_errors"].values():
            half, fp8 = errors["bfloat16"], errors["fp8"]
            if name == "cnn":  # it has no product in fp8
                assert result["products"]["products_in_fp8"] == 0 and half == fp8
            else:
                assert 0 < half[""] < fp8[""] < 0.5
    # The gradients of the keys' biases are 0 but for rounding.
    names = found["tasks"]["transformer"]["seeds"][0]["gradient_errors"]["first step"]
    assert "layers.0.attention.query.bias" in names["fp8"]
    assert "layers.0.attention.key.bias" not in names["fp8"]


def test_errors_of_gradients_are_relative_and_leave_rounding_out():
    gradients = {
        "float32": {"w": np.array([3.0, 4.0]), "zero": np.array([1e-7])},
        "bfloat16": {"w": np.array([3.0, 4.5]), "zero": np.array([2e-7])},
        "fp8": {"w": np.array([0.0, 4.0]), "zero": np.array([0.0])},
    }
    errors = fp8_accuracy.gradient_errors(gradients)
    assert list(errors["fp8"]) == list(errors["bfloat16"]) == ["", "w"]
    assert errors["bfloat16"]["w"] == 0.1 and errors["fp8"]["w"] == 0.6
    assert math.isclose(errors["fp8"][""], 0.6)


def test_convergence_refuses_a_task_that_it_does_not_know():
    result = _invoke(convergence.main, "--task", "imagenet")
    message = "expected some of mlp, cnn, tiny, resnet, transformer, got 'imagenet'"
    assert result.exit_code == 2 and message in _plain(result.output)
