"""Gradients of several micro-batches in one step: by optax.MultiSteps, and by a scan.

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
from jmp_lite import DynamicLossScale, NoOpLossScale, scale_aware

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("dtype")]

over_dtypes = pytest.mark.parametrize("dtype", ["float32", "float16"])


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


def _stack(batches):
    return jax.tree.map(lambda *x: jnp.stack(x), *batches)


# optax.MultiSteps inside scale_aware.


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


# By hand, in a scan inside of one step.

# Unscaled, and checked as a whole: where no micro-batch was finite, 0 / 0 is not.
_TX: Any = scale_aware(optax.adam(1e-2), NoOpLossScale())


def _accumulate(policy, params, loss_scale, batches):
    """Return the mean of the finite gradients, how many they are, and the scale."""
    fun = functools.partial(_loss, policy)

    def body(carry, batch):
        total, count, loss_scale = carry
        grads = jmp_lite.scaled_grad(fun, loss_scale=loss_scale)(params, batch)
        grads = loss_scale.unscale(grads)
        finite = jmp_lite.all_finite(grads)
        added = jax.tree.map(jnp.add, total, grads)
        total = jmp_lite.select_tree(finite, added, total)
        return (total, count + finite, loss_scale.adjust(finite)), loss_scale

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    first = zeros, jnp.float32(0), loss_scale
    (total, count, loss_scale), scales = jax.lax.scan(body, first, batches)
    mean = jax.tree.map(lambda g: g / count, total)
    return mean, count, loss_scale, scales


@functools.cache
def _scanned_step(dtype):
    def step(params, state, loss_scale, batches):
        grads, _, loss_scale, scales = _accumulate(
            POLICIES[dtype], params, loss_scale, batches
        )
        updates, state = _TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_scale, scales

    return jax.jit(step, compiler_options=bitwise.UNOPTIMISED)


def _first(loss_scale):
    params = _params()
    return params, _TX.init(params), loss_scale


@over_dtypes
def test_accumulated_gradients_are_those_of_the_whole_batch(dtype):
    batches = _microbatches(8)
    whole = {"x": jnp.concatenate([b["x"] for b in batches]), "factor": jnp.float32(1)}
    expected = jax.grad(functools.partial(_loss, POLICIES["float32"]))(_params(), whole)
    loss_scale = DynamicLossScale(2.0**10, period=2)
    grads, count, _, _ = _accumulate(
        POLICIES[dtype], _params(), loss_scale, _stack(batches)
    )
    assert float(count) == 8
    rtol = {"float32": 1e-5, "float16": 2**-8}[dtype]
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], rtol=rtol, atol=rtol / 10)


@over_dtypes
def test_a_scale_that_changes_at_each_microbatch_changes_nothing(dtype):
    batches = _stack(_microbatches(5))
    step = _scanned_step(dtype)
    fixed = step(*_first(DynamicLossScale(2.0**8)), batches)
    grown = step(*_first(DynamicLossScale(2.0**8, period=1)), batches)
    assert [float(s) for s in fixed[3].loss_scale] == [2.0**8] * 5
    assert [float(s) for s in grown[3].loss_scale] == [2.0**n for n in range(8, 13)]
    bitwise.assert_same(grown[:2], fixed[:2])


@pytest.mark.one_of("bad")
@over_bad
def test_a_bad_microbatch_in_a_scan_is_as_if_not_there(dtype, bad):
    good = _microbatches(4)
    batches = [_BAD[bad](good[1]), *good[:2], _BAD[bad](good[0]), *good[2:]]
    step, first = _scanned_step(dtype), _first(DynamicLossScale(2.0**10, period=2))

    params, state, loss_scale, scales = step(*first, _stack(batches))
    expected, expected_state, _, _ = step(*first, _stack(good))

    bitwise.assert_same(params, expected)
    bitwise.assert_same(state, expected_state)
    seen = [float(s) for s in (*scales.loss_scale, loss_scale.loss_scale)]
    assert np.log2(seen).tolist() == [10, 9, 9, 10, 9, 9, 10]


def test_a_window_with_nothing_finite_is_no_step():
    batches = [_BAD["overflow"](batch) for batch in _microbatches(3)]
    params, state, loss_scale = _first(DynamicLossScale(2.0**10))
    after, skipped, loss_scale, _ = _scanned_step("float16")(
        params, state, loss_scale, _stack(batches)
    )
    bitwise.assert_same(after, params)
    bitwise.assert_same(skipped.inner_state, state.inner_state)
    assert int(skipped.skipped_steps) == 1
    assert float(loss_scale.loss_scale) == 2.0**7
