"""Bugs of other libraries' loss scaling, each shown where cheap, and not to be ours.

Where a test runs the other library, that it fails there is what shows that the test can
fail. Should a release mend it, the line that shows it fails: delete that line.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from optimizers import half_on_purpose

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware

# The peers promote by themselves.
pytestmark = [pytest.mark.standard_promotion, half_on_purpose]


# flax.training.dynamic_scale.DynamicScale.


def _half_loss(x, offset=0.0):
    return jnp.sum(x) + jnp.asarray(offset, x.dtype)


def test_a_float16_loss_survives_the_first_scale():
    x = jnp.full(2, 2.0, jnp.float16)
    theirs = dynamic_scale.DynamicScale().value_and_grad(_half_loss)(x)
    assert (bool(theirs.finite), bool(jnp.isfinite(theirs.aux))) == (False, False)

    # Ours is a float32 loss times the scale. The gradient, 1 at the loss, is the scale
    # itself and must be a float16: hence 2**15 as a default.
    scaled = jmp_lite.scaled_value_and_grad(_half_loss, loss_scale=DynamicLossScale())
    value, grads = scaled(x)
    assert (float(value), value.dtype) == (4.0, jnp.float32)
    np.testing.assert_array_equal(grads, [2.0**15, 2.0**15])


def test_a_loss_scale_from_python_numbers_compiles_once():
    def calls_until_stable(first, step):
        traces = []

        @jax.jit
        def counted(state):
            traces.append(1)
            return step(state)

        state = first
        for _ in range(3):
            state = counted(state)
        return len(traces)

    def their_step(scale):
        return scale.value_and_grad(_half_loss)(jnp.ones(2, jnp.float32))[0]

    def our_step(scale):
        return scale.adjust(jnp.bool_(True))

    assert calls_until_stable(dynamic_scale.DynamicScale(), their_step) == 2
    assert calls_until_stable(DynamicLossScale(2.0**15, 0), our_step) == 1


def test_keyword_arguments_and_vmap_reach_the_loss():
    x = jnp.ones(2, jnp.float16)
    with pytest.raises(TypeError, match="offset"):
        dynamic_scale.DynamicScale().value_and_grad(_half_loss)(x, offset=1.0)

    fun = jmp_lite.scaled_value_and_grad(_half_loss, loss_scale=DynamicLossScale())
    assert float(fun(x, offset=1.0)[0]) == 3.0

    batch = jnp.ones((3, 2), jnp.float16)
    values, grads = jax.vmap(functools.partial(fun, offset=1.0))(batch)
    np.testing.assert_array_equal(values, [3.0] * 3)
    assert grads.shape == (3, 2)


# mpx: unscales with the scale that is already adjusted.


# optax.


def _apply(tx, stream, params) -> Any:
    state = tx.init(params)
    for grads in stream:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_a_nan_is_not_accepted_however_many_there_were():
    params, nans = jnp.ones(2), [jnp.full(2, jnp.nan)] * 6
    theirs = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=5)
    assert np.isnan(_apply(theirs, nans, params)).all()

    ours: Any = scale_aware(optax.sgd(1.0))
    np.testing.assert_array_equal(_apply(ours, nans * 10, params), params)


def test_bfloat16_gradients_of_float32_params():
    params, grads = jnp.ones(2), jnp.full(2, 0.5, jnp.bfloat16)
    theirs = optax.apply_if_finite(optax.adamw(1.0), max_consecutive_errors=5)
    with pytest.raises(TypeError, match="cond"):
        _apply(theirs, [grads], params)

    ours: Any = scale_aware(optax.sgd(1.0), StaticLossScale(1.0))
    np.testing.assert_array_equal(_apply(ours, [grads], params), [0.5, 0.5])


def test_accumulation_forgets_a_nan_microbatch():
    params = jnp.ones(2)
    good, bad = jnp.ones(2), jnp.full(2, jnp.nan)
    inner = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2)
    stream = [bad, good, good, good, good]
    theirs = inner.gradient_transformation()
    assert np.isnan(_apply(theirs, stream, params)).all()

    ours: Any = scale_aware(inner, StaticLossScale(1.0))
    np.testing.assert_array_equal(_apply(ours, stream, params), [0.0, 0.0])


def test_the_epsilon_of_adam_does_not_underflow_in_float16():
    params, grads = jnp.ones(2, jnp.float16), jnp.zeros(2, jnp.float16)
    assert np.isnan(_apply(optax.adam(1e-3), [grads], params)).all()

    ours: Any = scale_aware(optax.adam(1e-3))
    np.testing.assert_array_equal(_apply(ours, [grads], params), params)
    moments = ours.init(params).inner_state[0]
    assert (moments.mu.dtype, moments.nu.dtype) == (jnp.float32, jnp.float32)


def test_the_norm_of_float16_gradients_does_not_overflow():
    params = jnp.zeros((200, 4), jnp.float16)
    grads = jnp.full((200, 4), 16.0, jnp.float16)  # of norm 452
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    assert (_apply(inner, [grads], params) == 0).all()

    ours = _apply(scale_aware(inner, StaticLossScale(1.0)), [grads], params)
    np.testing.assert_allclose(optax.tree.norm(ours.astype(jnp.float32)), 1, 1e-3)


def test_clipping_does_not_hide_an_overflow():
    params, grads = jnp.ones(2), jnp.array([1.0, jnp.inf])
    clip = optax.clip(1.0)
    theirs = optax.chain(
        clip, optax.apply_if_finite(optax.sgd(0.5), max_consecutive_errors=5)
    )
    np.testing.assert_array_equal(_apply(theirs, [grads], params), [0.5, 0.5])

    ours: Any = scale_aware(optax.chain(clip, optax.sgd(0.5)))
    np.testing.assert_array_equal(_apply(ours, [grads], params), params)


# Keras and torch.amp. (The host's wait at each step: test_scale_aware_transforms.py. An
# overflow by unscaling: test_scale_aware.py. The schedule: test_scale_aware_inners.py.)


# jaxamp.


def test_a_nan_in_aux_is_no_overflow():
    tx: Any = scale_aware(optax.sgd(1.0), DynamicLossScale(8.0))
    params = jnp.ones(2)
    state = tx.init(params)
    fun = jmp_lite.scaled_value_and_grad(
        lambda p: (jnp.sum(p), {"metric": jnp.nan}), loss_scale=state, has_aux=True
    )

    (value, aux), grads = fun(params)
    updates, state = tx.update(grads, state, params, value=value)

    assert np.isnan(aux["metric"])
    assert state.last_finite
    assert float(state.loss_scale.loss_scale) == 8.0
    np.testing.assert_array_equal(updates, [-1.0, -1.0])
