"""jmp_lite stands in for jmp 0.0.4: it passes its tests and has none of its bugs."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp

RUNNER = pathlib.Path(__file__).with_name("run_jmp_tests.py")


def run_jmps_tests(before: str = "") -> dict[str, Any]:
    """Run jmp's own tests on our modules, after the statements in `before`."""
    code = (
        f"{before}\nimport runpy; runpy.run_path({str(RUNNER)!r}, run_name='__main__')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=RUNNER.parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_jmps_own_97_tests_pass():
    result = run_jmps_tests()
    assert result["version"] == "0.0.4"
    assert (result["ran"], result["skipped"], result["failed"]) == (97, 0, [])
    # And it is our code that they ran: of jmp, nothing but the tests was loaded.
    assert result["files"] == ["loss_scale_test", "policy_test"]
    assert result["policy"] == "jmp_lite._src.policy"


def test_jmps_own_tests_can_fail():
    result = run_jmps_tests(
        "import jmp_lite; jmp_lite.DynamicLossScale.adjust = lambda self, finite: self"
    )
    assert result["ran"] == 97
    assert {name.rstrip("0123456789") for name in result["failed"]} == {
        "test_dynamic_loss_scale_adjust_increases_on_finite",
        "test_dynamic_loss_scale_adjust_reduce_on_non_finite",
        "test_dynamic_loss_scale_explicit_min_loss_scale",
    }


@pytest.mark.full
def test_jmp_itself_cannot_be_loaded_by_the_runner():
    code = (
        "import run_jmp_tests, sys; sys.meta_path.insert(0, run_jmp_tests.RefuseJmp())"
    )
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport jmp"],
        capture_output=True,
        text=True,
        cwd=RUNNER.parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["tests/project", "."])},
    )
    assert process.returncode == 1
    assert "jmp is not to be loaded: jmp_lite stands for it." in process.stderr


# jmp's README.


def test_the_policies_of_jmps_readme():
    half, full = jmp.half_dtype(), jnp.float32
    policy = jmp.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)
    assert policy == jmp.get_policy("params=float32,compute=float16,output=float16")
    assert policy.cast_to_compute(jnp.ones(2)).dtype == half
    assert policy.with_output_dtype(full).output_dtype == full


@pytest.mark.parametrize("finite", [True, False])
def test_the_loss_scale_of_jmps_readme_adjusts(finite):
    # In jmp this form raises: an f16 scale meets an f32 floor.
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15))
    for adjusted in (
        loss_scale.adjust(jnp.bool_(finite)),
        jax.jit(lambda ls: ls.adjust(jnp.bool_(finite)))(loss_scale),
    ):
        assert adjusted.loss_scale.dtype == jnp.float32
        assert float(adjusted.loss_scale) == (2**15 if finite else 2**14)


def test_the_training_loop_of_jmps_readme_runs_and_skips():
    policy = jmp.get_policy("params=float32,compute=half,output=float32")

    @jax.jit
    def train_step(params, loss_scale, x):
        def loss_fn(params):
            params, inputs = policy.cast_to_compute((params, x))
            loss = policy.cast_to_output(jnp.sum((params * inputs) ** 2))
            return loss_scale.scale(loss)

        grads = loss_scale.unscale(jax.grad(loss_fn)(params))
        grads_finite = jmp.all_finite(grads)
        new_params = params - 0.25 * grads
        params = jmp.select_tree(grads_finite, new_params, params)
        return params, loss_scale.adjust(grads_finite), grads_finite

    # A gradient of 2 * 2**15 is more than f16 holds: the first step is skipped.
    params, loss_scale = jnp.float32(1), jmp.DynamicLossScale(jnp.float32(2**15))
    params, loss_scale, finite = train_step(params, loss_scale, jnp.float32(1))
    assert not finite and float(params) == 1.0
    assert float(loss_scale.loss_scale) == 2.0**14
    params, loss_scale, finite = train_step(params, loss_scale, jnp.float32(1))
    assert finite and float(params) == 0.5
    assert int(loss_scale.counter) == 1


# What jmp 0.0.4 gets wrong.


def test_an_f16_scale_unscales_in_float32():
    scale = np.float16(2.0**15)
    grad = np.float16(1e-3)
    for loss_scale in jmp.DynamicLossScale(scale), jmp.StaticLossScale(scale):
        unscaled = loss_scale.unscale(grad)
        # In f16 it would be 0.
        assert unscaled.dtype == jnp.float32
        assert float(unscaled) == float(grad) / 2**15
    assert float(jmp.StaticLossScale(2**15).unscale(grad)) == float(grad) / 2**15


def test_shardings_shapes_and_lowering_meet_no_validation():
    loss_scale = jmp.DynamicLossScale(2.0**15)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, loss_scale)
    assert shardings.loss_scale is sharding
    shapes = jax.eval_shape(lambda: loss_scale)
    assert shapes.loss_scale == jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(lambda ls: ls.adjust(True), in_shardings=(shardings,))
    assert "func.func public @main" in lowered.lower(shapes).as_text()


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.dtype("float16"), "p=f16,c=f16,o=f16"),
        (jnp.dtype("bfloat16"), "p=bf16,c=bf16,o=bf16"),
        (
            jnp.float8_e4m3fn,
            "p=float8_e4m3fn,c=float8_e4m3fn,o=float8_e4m3fn",
        ),
    ],
)
def test_a_policy_of_any_floating_dtype_has_a_text(dtype, text):
    assert str(jmp.Policy(dtype, dtype, dtype)) == text


def test_fp8_leaves_are_not_cast_up():
    leaf = jnp.ones(2, jnp.float8_e4m3fn)
    assert jmp.cast_to_half(leaf) is leaf
    assert jmp.get_policy("mixed_bfloat16").cast_to_compute(leaf) is leaf


def test_a_static_scale_compiles_once_per_value_and_not_per_object():
    traced = []

    @jax.jit
    def scale(loss_scale, x):
        traced.append(loss_scale)
        return loss_scale.scale(x)

    for value in 8.0, 8, np.float32(8), jnp.float32(8):
        assert float(scale(jmp.StaticLossScale(value), jnp.float32(1))) == 8.0
    assert traced == [jmp.StaticLossScale(8.0)]
    # A constant of the program, as jmp's: another value is another program.
    assert float(scale(jmp.StaticLossScale(4.0), jnp.float32(1))) == 4.0
    assert len(traced) == 2
