"""Gradients of several micro-batches in one step, by optax.MultiSteps.

Gradients made at different scales must never be added as they are, and a micro-batch
that is not finite costs that micro-batch.
"""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mlps import POLICIES

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("dtype")]


def _params() -> Any:
    rng = np.random.default_rng(0)
    layers = {"w1": rng.normal(size=(3, 8)), "w2": rng.normal(size=(8, 1))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), layers)


def _microbatches(n) -> list[Any]:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(n, 4, 3)), jnp.float32)
    # A factor of the loss: 1e8 is fine in float32, and its gradient no float16.
    return [{"x": x[i], "factor": jnp.float32(1)} for i in range(n)]


_BAD = {
    "nan": lambda batch: batch | {"x": batch["x"].at[0, 0].set(jnp.nan)},
    "inf": lambda batch: batch | {"factor": jnp.float32(jnp.inf)},
    "overflow": lambda batch: batch | {"factor": jnp.float32(1e8)},
}
over_bad = pytest.mark.parametrize(
    ("dtype", "bad"),
    [("float32", "nan"), ("float32", "inf"), *(("float16", bad) for bad in _BAD)],
)


def _loss(policy, params, batch):
    params, x = policy.cast_to_compute((params, batch["x"]))
    y = policy.cast_to_output(jnp.tanh(x @ params["w1"]) @ params["w2"])
    return batch["factor"] * jnp.mean((y - 1) ** 2)


def _multi_steps_runner(dtype, loss_scale):
    """Return a function that trains on a stream, and always in the same program."""
    inner = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3)
    tx: Any = scale_aware(inner, loss_scale)
    fun = functools.partial(_loss, POLICIES[dtype])

    @jax.jit
    def step(params, state, batch):
        grads = jmp_lite.scaled_grad(fun, loss_scale=state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train(stream):
        params = _params()
        state, scales = tx.init(params), []
        for batch in stream:
            scales.append(float(state.loss_scale.loss_scale))
            params, state = step(params, state, batch)
        return params, state, scales

    return train


@over_bad
def test_with_multi_steps_a_run_is_that_without_its_bad_microbatches(dtype, bad):
    train = _multi_steps_runner(dtype, DynamicLossScale(2.0**8, period=2))
    good = _microbatches(9)
    a_bad_one = _BAD[bad](good[3])
    # The first of a window, one inside, two in a row, and the one that emits.
    stream = [a_bad_one, *good[:2], a_bad_one, *good[2:4], a_bad_one, a_bad_one]
    stream += [*good[4:8], a_bad_one, good[8]]

    params, state, scales = train(stream)
    expected, expected_state, expected_scales = train(good)

    bitwise.assert_same(params, expected)
    bitwise.assert_same(state.inner_state, expected_state.inner_state)
    assert int(state.inner_state.gradient_step) == 3
    assert int(state.skipped_steps) == 5
    # Windows of several scales, and not the same ones.
    assert np.log2(scales).tolist() == [8, 7, 7, 8, 7, 7, 8, 7, 6, 6, 7, 7, 8, 7]
    assert np.log2(expected_scales).tolist() == [8, 8, 9, 9, 10, 10, 11, 11, 12]
