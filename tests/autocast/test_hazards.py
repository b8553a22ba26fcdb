"""What overflows, underflows or loses its digits in float16 stays right under autocast.

Each hazard lies between matrix products, as in a model: something is always lowered.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from autocast_corpus.program import POLICIES, normal, relative_error, weight

from jmp_lite import autocast

HAZARDS = {}


def hazard(make: Any) -> Any:
    """Add a factory of a scalar function and its arguments."""
    HAZARDS[make.__name__] = make
    return make


def attention(w: jax.Array, x: jax.Array, mask: Any = None, fill: float = 0.0) -> Any:
    """Return attention `[t, d]` of `x` `[t, d]` by weights `[4, d, d]`."""
    q, k, v = (x @ w[i] for i in range(3))
    logits = q @ k.T * x.shape[-1] ** -0.5
    if mask is not None:
        logits = jnp.where(mask, logits, fill)
    return jax.nn.softmax(logits) @ v @ w[3]


def project(w: jax.Array, x: jax.Array, between: Any) -> jax.Array:
    """Return the mean square of a two-layer model with something between the layers."""
    return jnp.mean((between(x @ w[0]) @ w[1] - 1.0) ** 2)


@hazard
def large_logits():
    # The logits reach 1e5, past float16's 65504; the gaps between them decide.
    def fun(w, x):
        logits = (x @ w[0]) @ (x @ w[1]).T
        logits = logits * (1e5 / jax.lax.stop_gradient(jnp.max(jnp.abs(logits))))
        probabilities = jax.nn.softmax(logits)
        return jnp.mean((probabilities @ x @ w[2] - 1.0) ** 2)

    return fun, (weight(0, 3, 8, 8), normal(1, 8, 8))


@hazard
def large_products():
    # The same logits, straight from the product.
    def fun(w, x):
        q, k, v = (x @ w[i] for i in range(3))
        probabilities = jax.nn.softmax(q @ k.T)
        return jnp.mean((probabilities @ v - 1.0) ** 2)

    w = weight(0, 3, 8, 8) * jnp.asarray([300.0, 100.0, 1.0])[:, None, None]
    return fun, (w, normal(1, 8, 8))


@hazard
def finfo_min_mask():
    def fun(w, x):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        low = float(jnp.finfo(jnp.float32).min)
        return jnp.mean((attention(w, x, mask, low) - 1.0) ** 2)

    return fun, (weight(0, 4, 8, 8), normal(1, 8, 8))


@hazard
def large_negative_mask():
    def fun(w, x):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        return jnp.mean((attention(w, x, mask, -1e10) - 1.0) ** 2)

    return fun, (weight(0, 4, 8, 8), normal(1, 8, 8))


@hazard
def added_mask():
    def fun(w, x):
        bias = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), 0.0, -1e9)
        q, k, v = (x @ w[i] for i in range(3))
        return jnp.mean((jax.nn.softmax(q @ k.T + bias) @ v @ w[3] - 1.0) ** 2)

    return fun, (weight(0, 4, 8, 8), normal(1, 8, 8))


@hazard
def fully_masked_rows():
    def fun(w, x):
        mask = jnp.tril(jnp.ones((8, 8), bool)) & (jnp.arange(8) % 3 > 0)[:, None]
        low = float(jnp.finfo(jnp.float32).min)
        return jnp.mean((attention(w, x, mask, low) - 1.0) ** 2)

    return fun, (weight(0, 4, 8, 8), normal(1, 8, 8))


@hazard
def l2_norm_with_eps():
    def fun(w, x):
        def normalise(x):
            square = jnp.sum(x**2, -1, keepdims=True)
            return x * jax.lax.rsqrt(square + 1e-12)

        # One row is so small that eps, which is 0 in float16, is what holds it.
        return project(w, x, normalise)

    x = normal(1, 8, 16) * jnp.where(jnp.arange(8) == 0, 1e-3, 1.0)[:, None]
    return fun, (weight(0, 2, 16, 16), x)


@hazard
def log_of_clipped():
    def fun(w, x):
        p = jax.nn.softmax(4.0 * (x @ w[0]))
        return jnp.mean((jnp.log(jnp.maximum(p, 1e-10)) @ w[1]) ** 2)

    return fun, (weight(0, 2, 16, 16), normal(1, 8, 16))


@hazard
def layer_norm_of_large():
    def fun(w, x):
        def layer_norm(x):
            mean = jnp.mean(x, -1, keepdims=True)
            variance = jnp.mean(x**2, -1, keepdims=True) - mean**2
            return (x - mean) * jax.lax.rsqrt(variance + 1e-5)

        return project(w, x, layer_norm)

    return fun, (weight(0, 2, 16, 16), 1e3 * normal(1, 8, 16))


@hazard
def rms_norm_of_large():
    def fun(w, x):
        def rms_norm(x):
            return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

        return project(w, x, rms_norm)

    return fun, (weight(0, 2, 16, 16), 1e3 * normal(1, 8, 16))


@hazard
def gelu_of_large():
    def fun(w, x):
        return project(w, x, lambda x: 0.02 * jax.nn.gelu(x))

    return fun, (weight(0, 2, 16, 16), 60.0 * normal(1, 8, 16))


@hazard
def long_sum():
    def fun(w, x):
        return (jnp.sum(jnp.abs(x @ w[0])) + jnp.sum(jnp.abs(x @ w[1]))) * 1e-3

    return fun, (weight(0, 2, 4, 16), normal(1, 3125, 4))


@hazard
def long_cumulative_sum():
    def fun(w, x):
        running = jnp.cumsum(jnp.abs(x @ w[0]), 0)
        return jnp.mean((0.01 * running @ w[1]) ** 2)

    return fun, (weight(0, 2, 4, 4), normal(1, 4096, 4))


@hazard
def cross_entropy():
    def fun(w, x):
        logits = 20.0 * jax.nn.relu(x @ w[0]) @ w[1]
        picked = jax.nn.log_softmax(logits)[jnp.arange(8), jnp.arange(8)]
        return -jnp.mean(picked)

    return fun, (weight(0, 2, 16, 16), normal(1, 8, 16))


@hazard
def mean_of_large_losses():
    # Their sum is past the range, their mean is not.
    def fun(w, x):
        return jnp.mean((100.0 * jnp.tanh(x @ w[0]) @ w[1]) ** 2) * 1e-3

    return fun, (weight(0, 2, 16, 16), normal(1, 64, 16))


@functools.cache
def in_f32(name: str) -> tuple[Any, ...]:
    fun, args = HAZARDS[name]()
    value, grad = jax.jit(jax.value_and_grad(fun))(*args)
    return fun, args, value, grad


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", HAZARDS)
def test_forward_holds_in_f16(name: str) -> None:
    fun, args, value, _ = in_f32(name)
    fun = autocast(fun, POLICIES["f16"])
    half = [eqn for eqn in jaxprs.products(jaxprs.trace(fun, *args))]
    assert half and all(map(jaxprs.is_half, half))
    assert relative_error([jax.jit(fun)(*args)], [value]) < 0.02


@pytest.mark.standard_promotion
@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["gradient of autocast", "autocast of gradient"])
@pytest.mark.parametrize("name", HAZARDS)
def test_gradient_holds_in_f16(name: str, order: str) -> None:
    fun, args, _, grad = in_f32(name)
    if order == "gradient of autocast":
        fun = jax.grad(autocast(fun, POLICIES["f16"]))
    else:
        fun = autocast(jax.grad(fun), POLICIES["f16"])
    assert relative_error([jax.jit(fun)(*args)], [grad]) < 0.06


# The others are hazards to some rewrites of them, not to a plain cast.
BREAK_IN_F16 = (
    "large_products",
    "fully_masked_rows",
    "l2_norm_with_eps",
    "log_of_clipped",
    "layer_norm_of_large",
    "rms_norm_of_large",
    "gelu_of_large",
    "long_sum",
)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", BREAK_IN_F16)
def test_the_hazard_is_one(name: str) -> None:
    fun, args, value, grad = in_f32(name)
    args = jax.tree.map(lambda x: x.astype(jnp.float16), args)
    out, out_grad = jax.jit(jax.value_and_grad(fun))(*args)
    holds = np.isclose(out, value, rtol=0.02) and np.isfinite(out_grad).all()
    assert not (holds and relative_error([out_grad], [grad]) < 0.06)


@pytest.mark.parametrize("half", POLICIES)
def test_rotary_angles_are_those_of_f32(half: str) -> None:
    def rotate(w, x, positions):
        inverse = 10000.0 ** (-jnp.arange(0, 8, 2, dtype=jnp.float32) / 8)
        angles = positions.astype(jnp.float32)[:, None] * inverse[None, :]
        angles = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        # The product is there so that something is lowered beside them.
        return angles, angles * (x @ w)

    args = weight(0, 8, 8), normal(1, 4, 8), 8000 + jnp.arange(4)
    angles, _ = jax.jit(autocast(rotate, POLICIES[half]))(*args)
    expected, _ = jax.jit(rotate)(*args)
    np.testing.assert_allclose(angles, expected, rtol=0, atol=1e-6)
