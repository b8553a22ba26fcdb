"""jmp_lite stands in for jmp 0.0.4: it passes its tests and runs its README.

What jmp gets wrong is in the tests of loss scales and of policies: scales in float16,
floors under jit, shardings and shapes as leaves, fp8, static scales from arrays.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp

RUNNER = pathlib.Path(__file__).with_name("run_jmp_tests.py")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, beside the runner and our package."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=RUNNER.parents[2],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"tests/project{os.pathsep}."},
    )


def run_jmps_tests(before: str = "") -> dict[str, Any]:
    """Run jmp's own tests on our modules, after the statements in `before`."""
    process = run_python(f"{before}\nimport run_jmp_tests; run_jmp_tests.main()")
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


# jmp's README.


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
