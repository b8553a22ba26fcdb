"""Losses with scales of their own, on one network; gradient penalties."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import error
from jax.flatten_util import ravel_pytree

import jmp_lite
from jmp_lite import DynamicLossScale, NoOpLossScale, StaticLossScale, scale_aware

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("dtype")]

_EPS = {"float16": 2**-10, "bfloat16": 2**-7}
# By the dtype in which they compute.
_POLICIES = {name: jmp_lite.get_policy(f"mixed_{name}") for name in _EPS}
_POLICIES["float64"] = jmp_lite.get_policy("p=f64,c=f64,o=f64")


def _as_dtype(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def _dense(rng: np.random.Generator, m: int, n: int) -> dict[str, np.ndarray]:
    return {"w": rng.normal(size=(m, n)) / np.sqrt(m), "b": np.zeros((1, n))}


def _mlp(layers: Any, x: Any) -> Any:
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


# Tasks: a trunk, a head for each, and losses of very different size.

# The cotangent of the faint one is 5e-9 an example: no float16 but 0. That of the loud
# one leaves float16 where it is scaled by more than 2**9.
_WEIGHTS = {"faint": 1e-7, "plain": 1.0, "loud": 1e3}


def _task_params() -> Any:
    rng = np.random.default_rng(0)
    heads = {name: [_dense(rng, 8, 2)] for name in _WEIGHTS}
    layers = {"trunk": [_dense(rng, 3, 8), _dense(rng, 8, 8)], "heads": heads}
    return _as_dtype(layers, jnp.float32)


def _task_batch(seed: int, **boost: float) -> Any:
    rng = np.random.default_rng(seed)
    y = {name: rng.normal(size=(16, 2)) for name in _WEIGHTS}
    boost = dict.fromkeys(_WEIGHTS, 1.0) | boost
    return _as_dtype({"x": rng.normal(size=(16, 3)), "y": y, "boost": boost}, "float32")


def _task_loss(policy, name, params, batch):
    used = params["trunk"], params["heads"][name], batch["x"]
    trunk, head, x = policy.cast_to_compute(used)
    y = policy.cast_to_output(_mlp(head, jnp.tanh(_mlp(trunk, x))))
    weight = _WEIGHTS[name] * batch["boost"][name]
    return weight * jnp.mean((y - batch["y"][name]) ** 2)


# The losses have been unscaled when their gradients are added: what is left to do is
# to check the sum.
_TASK_TX: Any = scale_aware(optax.adam(1e-2), NoOpLossScale())


@jax.jit
def _task_step(carry, batch):
    """Take the step of the recipe: unscaled gradients are added, each checked."""
    params, state, loss_scales = carry
    grads, scales = [], {}
    for name, loss_scale in loss_scales.items():
        loss = functools.partial(_task_loss, _POLICIES["float16"], name)
        scaled = jmp_lite.scaled_grad(loss, loss_scale=loss_scale)(params, batch)
        grads.append(loss_scale.unscale(scaled))
        scales[name] = loss_scale.adjust(jmp_lite.all_finite(grads[-1]))
    grads = jax.tree.map(lambda *g: sum(g), *grads)
    updates, state = _TASK_TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, scales


@pytest.mark.one_of("bad")
@pytest.mark.parametrize("bad", _WEIGHTS)
def test_an_overflow_of_one_loss_skips_the_step_and_lowers_its_scale_only(bad):
    params = _task_params()
    scales = {"faint": 2.0**24, "plain": 2.0**12, "loud": 2.0**4}
    loss_scales = {name: DynamicLossScale(scale) for name, scale in scales.items()}
    carry = _task_step((params, _TASK_TX.init(params), loss_scales), _task_batch(1))
    skipped = _task_step(carry, _task_batch(2, **{bad: 1e6}))

    bitwise.assert_same(skipped[0], carry[0])
    bitwise.assert_same(skipped[1].inner_state, carry[1].inner_state)
    found = {name: float(s.loss_scale) for name, s in skipped[2].items()}
    assert found == scales | {bad: scales[bad] / 2}
    counters = {name: int(s.counter) for name, s in skipped[2].items()}
    assert counters == {name: 0 if name == bad else 2 for name in _WEIGHTS}
    for seed in (3, 4):
        batch = _task_batch(seed)
        carry, skipped = _task_step(carry, batch), _task_step(skipped, batch)
    # Half as large a scale, and a power of two: the same gradients.
    bitwise.assert_same(skipped[0], carry[0])
    assert int(skipped[1].skipped_steps) == 1


# A gradient penalty: the gradient of the norm of a gradient.

# What a float32 loss is multiplied by, so that float16 hardly holds its gradient.
_FAINT = 1e-7


def _critic_params() -> Any:
    rng = np.random.default_rng(2)
    return [_dense(rng, 2, 16), _dense(rng, 16, 16), _dense(rng, 16, 1)]


def _score(policy, params, x):
    params, x = policy.cast_to_compute((params, x))
    return policy.cast_to_output(_mlp(params, x))


def _penalty(policy, params, x, loss_scale, size=1.0):
    """Return the mean of `(norm - 1)**2`, of the gradients of the score over `size`."""

    def sum_of_scores(x):
        return size * jnp.sum(_score(policy, params, x))

    scaled = jmp_lite.scaled_grad(sum_of_scores, loss_scale=loss_scale)(x)
    grads = loss_scale.unscale(scaled) / size
    assert grads.dtype == policy.output_dtype  # half would overflow in the norm
    norms = jnp.sqrt(jnp.sum(grads**2, axis=-1) + 1e-12)
    return jnp.mean((norms - 1) ** 2)


def _penalty_grads(dtype, inner, outer, size=1.0) -> Any:
    is_exact = dtype == "float64"
    with jax.enable_x64(is_exact):
        array_dtype = jnp.float64 if is_exact else jnp.float32
        params = _as_dtype(_critic_params(), array_dtype)
        x = _as_dtype(np.random.default_rng(3).normal(size=(16, 2)), array_dtype)

        def loss(params):
            return _penalty(_POLICIES[dtype], params, x, inner, size)

        fun = jmp_lite.scaled_grad(loss, loss_scale=outer)
        grads = jax.jit(fun)(params)
        return np.asarray(ravel_pytree(outer.unscale(grads))[0])


_NONE = NoOpLossScale()


@functools.cache
def _exact(size=1.0) -> Any:
    return _penalty_grads("float64", _NONE, _NONE, size)


@pytest.mark.one_of("kind")
@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
@pytest.mark.parametrize("dtype", _EPS)
def test_the_gradient_of_a_penalty_in_half_is_that_of_float64(kind, dtype):
    grads = _penalty_grads(dtype, kind(2.0**10), kind(2.0**10))
    assert error(grads, _exact()) < 3 * _EPS[dtype]


def test_the_gradient_inside_a_penalty_needs_a_scale_too():
    scaled = _penalty_grads("float16", DynamicLossScale(2.0**20), _NONE, _FAINT)
    assert error(scaled, _exact(_FAINT)) < 2**-9
    # The cotangent of a gradient of 1e-7 is as large as that one is small: 2**20 brings
    # both into range, and a scale of the whole loss makes matters worse.
    for outer in (_NONE, DynamicLossScale(2.0**8)):
        only_outside = _penalty_grads("float16", _NONE, outer, _FAINT)
        assert not jmp_lite.all_finite(only_outside)
