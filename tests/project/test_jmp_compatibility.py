"""jmp_lite stands in for jmp 0.0.4: it passes its tests and runs its README.

What jmp gets wrong is in the tests of loss scales and of policies: scales in float16,
floors under jit, shardings and shapes as leaves, fp8, static scales from arrays.
"""

import json
import pathlib

import bitwise
import jax
import jax.numpy as jnp
import jmp as original
import optax
import pytest
from commands import run_python

import jmp_lite as jmp

RUNNER = pathlib.Path(__file__).with_name("run_jmp_tests.py")


def test_jmps_own_97_tests_pass():
    expected = {"version": "0.0.4", "ran": 97, "skipped": 0, "failed": []}
    assert json.loads(run_python(str(RUNNER))[0]) == expected


# jmp's README: it skips, and the scale moves.


@pytest.mark.standard_promotion
def test_the_training_loop_of_jmps_readme_gives_the_same_bits_as_with_jmp():
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
