"""jmp_lite stands in for jmp 0.0.4: it passes its tests and runs its README.

What jmp gets wrong is in the tests of loss scales and of policies: scales in float16,
floors under jit, shardings and shapes as leaves, fp8, static scales from arrays.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp

import jmp_lite as jmp

RUNNER = pathlib.Path(__file__).with_name("run_jmp_tests.py")


def test_jmps_own_97_tests_pass():
    process = subprocess.run(
        [sys.executable, str(RUNNER)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(RUNNER.parents[2])},
    )
    assert process.returncode == 0, process.stderr
    expected = {"version": "0.0.4", "ran": 97, "skipped": 0, "failed": []}
    assert json.loads(process.stdout) == expected


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
