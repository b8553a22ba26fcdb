"""jmp_lite stands in for jmp 0.0.4: it passes its tests and runs its README.

What jmp gets wrong is in the tests of loss scales and of policies: scales in float16,
floors under jit, shardings and shapes as leaves, fp8, static scales from arrays.
"""

import json
import os
import pathlib
import subprocess
import sys

import bitwise
import jax
import jax.numpy as jnp
import jmp as original
import optax
import pytest

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


@pytest.mark.standard_promotion
def test_the_same_loop_gives_the_same_bits_as_with_jmp():
    tx = optax.adam(1e-2)
    keys = jax.random.split(jax.random.key(0), 3)
    w, v, x = (jax.random.normal(key, (16, 16)) for key in keys)

    def run(jmp):
        policy = jmp.get_policy("params=float32,compute=float16,output=float32")

        @jax.jit
        def step(state, x):
            params, opt_state, loss_scale = state

            def scaled_loss(params):
                (w, v), low = policy.cast_to_compute((params, x))
                out = policy.cast_to_output(jax.nn.relu(low @ w) @ v)
                return loss_scale.scale(jnp.mean(jnp.square(out)))

            grads = loss_scale.unscale(jax.grad(scaled_loss)(params))
            updates, after = tx.update(grads, opt_state, params)
            new = optax.apply_updates(params, updates), after
            finite = jmp.all_finite(grads)
            kept = jmp.select_tree(finite, new, (params, opt_state))
            return *kept, loss_scale.adjust(finite)

        loss_scale = jmp.DynamicLossScale(jnp.float32(2**15), period=3)
        state, scales = ((w, v), tx.init((w, v)), loss_scale), []
        for i in range(12):
            state = step(state, x * 1e6 if i == 8 else x)
            scales.append(float(state[2].loss_scale))
        return state[:2], scales

    (state, scales), (expected, of_jmp) = run(jmp), run(original)
    assert scales == of_jmp and len(set(scales)) > 2
    bitwise.assert_same(state, expected)
