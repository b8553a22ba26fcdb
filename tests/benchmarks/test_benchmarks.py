"""The benchmarks that run: each from end to end, cut to the smallest size."""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import invoke

from benchmarks import (
    autocast_trace,
    checkpoint_save,
    convergence,
    fp8_accuracy,
    memory,
    programs,
    step_overhead,
    storage_accuracy,
    train_step,
    tree_stats,
)
from benchmarks.common import tasks, timing
from benchmarks.common.models import MODELS, SIZES
from benchmarks.common.storage import Storage
from examples.common import results
from examples.common.results import provenance

# Optax, flax and the benchmarks' models promote by themselves.
pytestmark = pytest.mark.standard_promotion

_, V100 = programs.read(programs.result_path("v100", "ci"))
# Cut to what compiles in seconds.
SMALL = {
    (autocast_trace, "LAYERS"): (1,),
    (fp8_accuracy, "TASKS"): {"mlp": fp8_accuracy.TASKS["mlp"]},
    (memory, "rows_for"): lambda device: [(Storage(), True)],
    (programs, "measure_all"): lambda device, size, known: V100,
    (step_overhead, "OPTIMIZERS"): {"adam": step_overhead.OPTIMIZERS["adam"]},
    (step_overhead, "BATCHES"): (4,),
    (step_overhead, "WIDTH"): 8,
    (storage_accuracy, "TASKS"): {"mlp": storage_accuracy.TASKS["mlp"]},
    (storage_accuracy, "RUNS"): storage_accuracy.RUNS[:3],
    (tasks, "WIDTH"): 32,
    (tasks, "RESNET_WIDTHS"): (2,),
    (tasks, "SHAPE"): {"width": 32, "layers": 1},
    (tree_stats, "PROBLEMS"): {"MLP": tree_stats.make_mlp},
    (train_step, "SIZES"): {"ci": SIZES["small"]},
}

TURNS = "--rounds 2 --steps 1"
TRAINING = "--seeds 1 --steps 2"
ALL = (
    (autocast_trace, "--rounds 1", "forward, unrolled"),
    (checkpoint_save, "--megabytes 1 --rounds 2", "`checkpoint.save`"),
    (convergence, f"--task tiny --task transformer {TRAINING}", convergence.UNSCALED),
    (convergence, f"--task mlp --task resnet {TRAINING}", "accuracy"),
    (fp8_accuracy, TRAINING, "fp8 over bfloat16"),
    (
        memory,
        "--device cpu --layers 1 --width 32 --heads 2 --vocabulary 64",
        "Adam; float32, recomputed",
    ),
    (programs, "--device v100", "transformer: float16 by hand, scale_aware"),
    (step_overhead, f"--leaves 2 {TURNS}", "`lax.cond` by hand"),
    (storage_accuracy, TRAINING, "AdaFactor"),
    (train_step, f"--model mlp --dtype float16 {TURNS}", train_step.CPU_NOTE),
    (
        train_step,
        f"--model transformer --width 64 --dtype bfloat16 {TURNS}",
        "bfloat16 grad(autocast(f))",
    ),
    (tree_stats, TURNS, "bare step"),
)
FAST = (checkpoint_save, memory, programs)


@pytest.fixture
def small(monkeypatch):
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("module", "args", "text"),
    [
        pytest.param(*case, marks=() if case[0] in FAST else pytest.mark.full)
        for case in ALL
    ],
)
def test_a_benchmark_stores_what_it_prints(module, args, text, tmp_path):
    status, printed = invoke(module.main, *args.split(), "--out", str(tmp_path))
    assert status == 0 and text in printed, printed
    (path,) = tmp_path.rglob("*.json")
    found = json.loads(path.read_text())
    # Enough to run it again, and to know what it speaks of.
    assert found["settings"].items() >= provenance(found["settings"]["device"]).items()
    assert len(found) > 1 and "NaN" not in json.dumps(found)


def test_no_benchmark_writes_figures_of_changed_code_among_the_committed(monkeypatch):
    monkeypatch.setattr(results, "git_revision", lambda root: "0123456789ab-dirty")
    monkeypatch.setattr(results, "changes", lambda root: ["jmp_lite/policy.py"])
    out = str(results.COMMITTED / "cpu")
    status, printed = invoke(checkpoint_save.main, "--out", out)
    assert status == 2
    assert "differ from the commit: jmp_lite/policy.py." in printed
    for module in {module for module, *_ in ALL}:
        assert inspect.signature(module.main).parameters["out"].default == Path("out")


def test_turns_rotate_and_every_round_has_a_sample():
    calls: list[str] = []
    programs = {n: lambda state, n=n: calls.append(n) or state + 1 for n in "ab"}
    states: dict[str, Any] = {"a": 0, "b": 0}
    samples = timing.take_turns(programs, states, rounds=2, steps=2, title="")
    assert "".join(calls) == "ab" + "aabb" + "bbaa"
    assert states == {"a": 5, "b": 5}
    assert {len(x) for row in samples.values() for x in row.values()} == {2}
    assert timing.quartiles([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]) == [1.5, 2.0, 2.5]


@pytest.mark.parametrize(
    ("model", "parameters"), [("cnn", 25.5e6), ("vit", 22.0e6), ("mlp", 20.0e6)]
)
def test_full_models_have_the_sizes_that_they_are_known_by(model, parameters):
    params, *_ = MODELS[model].shapes(SIZES["full"][model])
    count = sum(x.size for x in jax.tree.leaves(params))
    assert math.isclose(count, parameters, rel_tol=0.005)


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
