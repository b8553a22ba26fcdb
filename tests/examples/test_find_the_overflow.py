"""The example finds the overflow it has planted, and the advice repairs it."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import jmp_lite
from examples import find_the_overflow
from jmp_lite.numerics import DryRunReport

# flax.linen leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion

_APP = typer.Typer()
_APP.command()(find_the_overflow.main)
_PLANTED = "Transformer/mlp_0/down"


def _invoke(*args: str):
    return CliRunner().invoke(_APP, list(args), env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[str, Path, dict[str, Any]]:
    """Return what it printed, where it wrote, and its results."""
    out = tmp_path_factory.mktemp("overflow")
    tiny = ["--width", "32", "--layers", "1", "--steps", "20", "--out", str(out)]
    result = _invoke(*tiny)
    assert result.exit_code == 0, result.output
    return result.output, out, json.loads((out / "results.json").read_text())


@pytest.mark.full
def test_float16_takes_no_step_and_says_so(ran):
    printed, _, results = ran
    assert results["broken"]["steps_taken"] == 0
    assert "The last 50 steps were skipped" in results["broken"]["check_skipped_steps"]
    assert "0 of 50" in printed


@pytest.mark.full
def test_the_planted_operation_is_found_on_its_line(ran):
    _, _, results = ran
    found = results["first_nonfinite"]
    assert (found["layer"], found["direction"]) == (_PLANTED, "forward")
    path, _, line = found["line"].rpartition(":")
    source, first = inspect.getsourcelines(find_the_overflow.MLP)
    assert Path(path).name == "find_the_overflow.py"
    assert 'name="down"' in source[int(line) - first]


@pytest.mark.full
def test_the_dry_run_puts_it_on_top(ran):
    _, _, results = ran
    report = DryRunReport.from_json(json.dumps(results["dry_run"]))
    worst = max(report.layers(), key=lambda row: row.badness)
    assert worst.layer == _PLANTED and worst.overflow > 0.01


@pytest.mark.full
def test_the_advice_is_about_that_layer_alone_and_repairs_the_training(ran):
    _, out, results = ran
    pasted: dict[str, Any] = {}
    exec((out / "advice.py").read_text(), pasted)
    # The scope of autocast, or the path of the module: a rule fits both.
    (pattern,) = [pattern for pattern, _ in pasted["policy"].rules]
    assert pattern == "(Transformer/)?mlp_0/down"
    assert re.fullmatch(pattern, _PLANTED)
    assert isinstance(pasted["loss_scale"], jmp_lite.StaticLossScale)
    full, repaired = (
        np.array(results["history"][name]["loss"])
        for name in ("float32", "float16, repaired")
    )
    assert full[-5:].mean() < 0.9 * full[0]
    np.testing.assert_allclose(repaired, full, rtol=2e-3)
    assert all(results["history"]["float16, repaired"]["last_finite"])


@pytest.mark.full
def test_figures_and_tables_are_written(ran):
    _, out, _ = ran
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {
        "exponents.png",
        "exponents_repaired.png",
        "heat_map.png",
        "losses.png",
    }
    assert "| float16, repaired | 20 |" in (out / "table.md").read_text()


def test_a_width_that_no_head_fits_is_refused():
    result = _invoke("--width", "33")
    assert result.exit_code == 2
    assert "multiple of 32, got 33" in " ".join(result.output.split())


def test_without_the_gain_nothing_is_found(getkey):
    model = find_the_overflow.MLP(1.0)
    x = jax.random.normal(getkey(), (4, 8))
    params = model.init(getkey(), x)
    fun = jmp_lite.autocast(lambda p, x: model.apply(p, x), "mixed_float16")
    assert jmp_lite.numerics.first_nonfinite(fun)(params, x) is None
