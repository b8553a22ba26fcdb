"""Programs that overflow, underflow or lose their digits in float16, for the tests.

Each hazard lies between matrix products, as in a model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from autocast_corpus.program import normal, weight

HAZARDS = {}
FLOAT32_MIN = float(jnp.finfo(jnp.float32).min)
# The weights and the input of attention, and of two layers; a large input.
OF_ATTENTION = weight(0, 4, 8, 8), normal(1, 8, 8)
OF_LAYERS = weight(0, 2, 16, 16), normal(1, 8, 16)
OF_LARGE = OF_LAYERS[0], 1e3 * OF_LAYERS[1]


def hazard(w: jax.Array, x: jax.Array) -> Any:
    """Add a scalar function of weights and an input, with these."""

    def add(fun: Any) -> Any:
        HAZARDS[fun.__name__] = fun, (w, x)
        return fun

    return add


def attention(w: jax.Array, x: jax.Array, mask: Any, fill: float) -> jax.Array:
    """Return the mean square of attention by weights `[4, d, d]` of `x` `[t, d]`."""
    q, k, v = (x @ w[i] for i in range(3))
    logits = jnp.where(mask, q @ k.T * x.shape[-1] ** -0.5, fill)
    return jnp.mean((jax.nn.softmax(logits) @ v @ w[3] - 1.0) ** 2)


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((8, 8), bool))


def project(w: jax.Array, x: jax.Array, between: Any) -> jax.Array:
    """Return the mean square of a two-layer model with something between the layers."""
    return jnp.mean((between(x @ w[0]) @ w[1] - 1.0) ** 2)


def over_norm(x: jax.Array, total: Any, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(total(x**2, -1, keepdims=True) + eps)


# The logits reach 1e5, past float16's 65504; the gaps between them decide.
@hazard(weight(0, 3, 8, 8), normal(1, 8, 8))
def large_logits(w, x):
    logits = (x @ w[0]) @ (x @ w[1]).T
    logits = logits * (1e5 / jax.lax.stop_gradient(jnp.max(jnp.abs(logits))))
    return jnp.mean((jax.nn.softmax(logits) @ x @ w[2] - 1.0) ** 2)


# The same logits, straight from the product.
@hazard(
    weight(0, 3, 8, 8) * jnp.asarray([300.0, 100.0, 1.0])[:, None, None],
    normal(1, 8, 8),
)
def large_products(w, x):
    q, k, v = (x @ w[i] for i in range(3))
    return jnp.mean((jax.nn.softmax(q @ k.T) @ v - 1.0) ** 2)


@hazard(*OF_ATTENTION)
def large_negative_mask(w, x):
    return attention(w, x, causal(), -1e10)


@hazard(*OF_ATTENTION)
def added_mask(w, x):
    q, k, v = (x @ w[i] for i in range(3))
    bias = jnp.where(causal(), 0.0, -1e9)
    return jnp.mean((jax.nn.softmax(q @ k.T + bias) @ v @ w[3] - 1.0) ** 2)


@hazard(*OF_ATTENTION)
def fully_masked_rows(w, x):
    mask = causal() & (jnp.arange(8) % 3 > 0)[:, None]
    return attention(w, x, mask, FLOAT32_MIN)


# One row is so small that eps, which is 0 in float16, is what holds it.
@hazard(
    weight(0, 2, 16, 16),
    normal(1, 8, 16) * jnp.where(jnp.arange(8) == 0, 1e-3, 1.0)[:, None],
)
def l2_norm_with_eps(w, x):
    return project(w, x, lambda x: over_norm(x, jnp.sum, 1e-12))


@hazard(*OF_LAYERS)
def log_of_clipped(w, x):
    p = jax.nn.softmax(4.0 * (x @ w[0]))
    return jnp.mean((jnp.log(jnp.maximum(p, 1e-10)) @ w[1]) ** 2)


@hazard(*OF_LARGE)
def layer_norm_of_large(w, x):
    def layer_norm(x):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(x**2, -1, keepdims=True) - mean**2
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5)

    return project(w, x, layer_norm)


@hazard(*OF_LARGE)
def rms_norm_of_large(w, x):
    return project(w, x, lambda x: over_norm(x, jnp.mean, 1e-6))


@hazard(weight(0, 2, 16, 16), 60.0 * normal(1, 8, 16))
def gelu_of_large(w, x):
    return project(w, x, lambda x: 0.02 * jax.nn.gelu(x))


@hazard(weight(0, 2, 4, 16), normal(1, 3125, 4))
def long_sum(w, x):
    return (jnp.sum(jnp.abs(x @ w[0])) + jnp.sum(jnp.abs(x @ w[1]))) * 1e-3


@hazard(weight(0, 2, 4, 4), normal(1, 4096, 4))
def long_cumulative_sum(w, x):
    running = jnp.cumsum(jnp.abs(x @ w[0]), 0)
    return jnp.mean((0.01 * running @ w[1]) ** 2)


@hazard(*OF_LAYERS)
def cross_entropy(w, x):
    logits = 20.0 * jax.nn.relu(x @ w[0]) @ w[1]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(8), jnp.arange(8)])


# Their sum is past the range, their mean is not.
@hazard(weight(0, 2, 16, 16), normal(1, 64, 16))
def mean_of_large_losses(w, x):
    return jnp.mean((100.0 * jnp.tanh(x @ w[0]) @ w[1]) ** 2) * 1e-3
